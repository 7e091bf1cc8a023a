//! What a server serves: its device, and those of `--export NAME=DEVICE`, each with its layers.

use std::ffi::{OsStr, OsString};
use std::sync::{Arc, Weak};

use blockhaul_block::Device;
use blockhaul_catalog::{
    Adjustable, Exports, Intent, Layer, Listed, Named, Registry, Several, Shared, Spec, Stack,
    guarded, percent_decode,
};
use clap::Parser as _;

use super::fresh::Fresh;
use super::trace;
use crate::args::{self, ServeExport};
use crate::brackets::{self, Groups};
use crate::devices;
use crate::exit::Failure;

/// What is to be served.
pub struct Wanted {
    registry: Registry,
    exports: Vec<One>,
    /// Over each of them.
    layers: Vec<String>,
    /// The only one is had by whatever name.
    any_name: bool,
    /// Each client gets devices of its own.
    per_client: bool,
    /// Requests are said.
    trace: bool,
    /// What was opened: to be closed when no worker needs it any more.
    pub open: Vec<Stack>,
}

/// An export as it was asked for.
struct One {
    name: String,
    description: String,
    spec: Spec,
    intent: Intent,
    /// Below those of all.
    layers: Vec<String>,
}

/// What was opened, for a server.
pub struct Opened {
    /// What its clients may open.
    pub exports: Arc<dyn Exports>,
    /// What `ctl` sees of them, in their order.
    pub running: Vec<Running>,
}

/// An export that is served, for `ctl`.
pub struct Running {
    /// Its name.
    pub name: String,
    /// For people; may be empty.
    pub description: String,
    /// As it was asked for.
    pub storage: String,
    /// The device, where all clients share it.
    pub device: Option<Arc<dyn Device>>,
    /// It has no exports of its own.
    pub single: bool,
    /// Those that it has, which may say how they are.
    pub own: Option<Weak<dyn Exports>>,
    /// Its layers, innermost first.
    pub layers: Vec<Arc<Adjustable>>,
}

impl Wanted {
    /// What the command line asks for; nothing is opened yet.
    pub fn new(args: &args::Serve, groups: &Groups, registry: Registry) -> Result<Wanted, Failure> {
        let mut exports = Vec::new();
        let mut name = None;
        for word in &args.export {
            match split(word) {
                Some((name, device)) => {
                    exports.push(One::parse(name, &device, groups, args.readonly)?);
                }
                None if name.is_some() => {
                    let text =
                        "two names for one device: write --export NAME=DEVICE for another one";
                    return Err(Failure::usage(text));
                }
                None => name = Some(text(word)?),
            }
        }
        match (&args.device, name) {
            (Some(device), name) => exports.insert(
                0,
                One {
                    name: name.unwrap_or_default().to_string(),
                    description: args.description.clone(),
                    spec: groups.spec(device)?,
                    intent: intent(args.readonly),
                    layers: Vec::new(),
                },
            ),
            (None, Some(name)) => {
                let text =
                    format!("there is no device: write it behind the name, --export {name}=DEVICE");
                return Err(Failure::usage(text));
            }
            (None, None) if !args.description.is_empty() => {
                let text = "--description is of DEVICE; in brackets, each export has its own";
                return Err(Failure::usage(text));
            }
            (None, None) => {}
        }
        if args.any_name && exports.len() > 1 {
            return Err(Failure::usage("--any-name is for one export"));
        }
        if args.per_client && exports.iter().any(|one| matches!(one.spec, Spec::Command(_))) {
            let text =
                "--per-client: a server in brackets has clients of its own: it is started once";
            return Err(Failure::usage(text));
        }
        let (layers, any_name) = (args.layer.clone(), args.any_name);
        let (per_client, trace) = (args.per_client, args.trace);
        let open = Vec::new();
        let wanted = Wanted { registry, exports, layers, any_name, per_client, trace, open };
        wanted.check()?;
        Ok(wanted)
    }

    /// What the storage of an export is opened for: under a layer that changes nothing it need not be
    /// writable, and others may do the same with it at the same time.
    fn intent_below(&self, one: &One) -> Intent {
        let mut layers = one.layers.iter().chain(&self.layers);
        let kept = layers.any(|layer| !devices::writes_below(&self.registry, layer));
        if kept { Intent::READ } else { one.intent }
    }

    /// Finds what is wrong with it while the terminal is still there.
    fn check(&self) -> Result<(), Failure> {
        devices::layers(&self.registry, &self.layers)?;
        for (index, one) in self.exports.iter().enumerate() {
            self.registry.target(&one.spec, one.intent)?;
            devices::layers(&self.registry, &one.layers)?;
            if one.name.len() > blockhaul_wire::limits::STRING || one.name.contains('\0') {
                let text = "the name of an export is longer than 4096 bytes, or holds a NUL";
                return Err(Failure::usage(text));
            }
            if self.exports[..index].iter().any(|before| before.name == one.name) {
                let text = format!("two exports have the name {:?}: choose another", one.name);
                return Err(Failure::usage(text));
            }
        }
        Ok(())
    }

    /// The name that clients use who are told one.
    pub fn name(&self) -> &str {
        self.exports.first().map(|one| one.name.as_str()).unwrap_or_default()
    }

    /// What is served, for people.
    pub fn shown(&self) -> String {
        let all: Vec<_> = self.exports.iter().map(|one| one.spec.to_string()).collect();
        all.join(", ")
    }

    /// Opens everything. On a worker.
    pub async fn open(&mut self) -> Result<Opened, Failure> {
        let mut storages = Vec::new();
        let mut running = Vec::new();
        for index in 0..self.exports.len() {
            let (storage, one) = self.open_one(index).await?;
            storages.push(storage);
            running.push(one);
        }
        let exports: Arc<dyn Exports> = match storages.pop() {
            // Its exports have the names that it gives them.
            Some(only) if storages.is_empty() => only.exports,
            last => {
                storages.extend(last);
                Arc::new(Several::new(storages)?)
            }
        };
        let mut gates = Vec::new();
        if self.has_several() {
            let all = devices::adjustable(&self.registry, &self.layers)?;
            gates.extend(all.iter().filter_map(|layer| layer.gate().cloned()));
        }
        Ok(Opened { exports: guarded(exports, &gates)?, running })
    }

    fn has_several(&self) -> bool {
        self.exports.len() > 1
    }

    /// Opens one, with its layers and gates.
    async fn open_one(&mut self, index: usize) -> Result<(Named, Running), Failure> {
        let one = &self.exports[index];
        let configured = self.layers_of(one)?;
        let layers: Vec<_> = match self.trace {
            true => trace::woven(&configured, device_name(&one.spec)),
            false => configured.iter().filter_map(|layer| layer.layer().cloned()).collect(),
        };
        let gates: Vec<_> = configured.iter().filter_map(|layer| layer.gate().cloned()).collect();
        let mut running = Running {
            name: one.name.clone(),
            description: one.description.clone(),
            storage: one.spec.to_string(),
            device: None,
            single: true,
            own: None,
            layers: configured,
        };
        let exports = match self.storage_exports(one, &layers).await? {
            Some(own) => {
                running.single = false;
                running.own = Some(Arc::downgrade(&own));
                own
            }
            None => {
                let (stack, device) = self.open_device(one, &layers).await?;
                let exports = self.device_exports(one, layers, device.clone());
                running.device = Some(device);
                self.open.push(stack);
                exports
            }
        };
        let storage = Named {
            name: running.name.clone(),
            description: running.description.clone(),
            exports: guarded(exports, &gates)?,
            single: running.single,
        };
        Ok((storage, running))
    }

    /// The layers and gates of an export, first innermost: its own below those of all. They are made anew for
    /// each export, because what they keep is about one. The gates of all are left out where there are
    /// several exports: they judge clients once, before every export.
    fn layers_of(&self, one: &One) -> Result<Vec<Arc<Adjustable>>, Failure> {
        let mut configured = devices::adjustable(&self.registry, &one.layers)?;
        let outer = devices::adjustable(&self.registry, &self.layers)?;
        let own = |layer: &Arc<Adjustable>| !self.has_several() || layer.gate().is_none();
        configured.extend(outer.into_iter().filter(own));
        Ok(configured)
    }

    /// The exports that the storage has itself, if it has some.
    async fn storage_exports(
        &self,
        one: &One,
        layers: &[Arc<dyn Layer>],
    ) -> Result<Option<Arc<dyn Exports>>, Failure> {
        let mut over = layers.to_vec();
        if !one.intent.write {
            // Some layers can be written whatever is below.
            over.push(self.registry.layer("readonly")?);
        }
        let own = self.registry.exports(&one.spec, &over, self.intent_below(one)).await;
        own.map_err(|error| Failure::opening("device", &one.spec.to_string(), &error))
    }

    /// Opens storage that is one device.
    async fn open_device(
        &self,
        one: &One,
        layers: &[Arc<dyn Layer>],
    ) -> Result<(Stack, Arc<dyn Device>), Failure> {
        let intent = self.intent_below(one);
        let stack = self.registry.open(&one.spec, layers.to_vec(), intent).await;
        let stack = stack.map_err(|error| {
            let failure = Failure::opening("device", &one.spec.to_string(), &error);
            match (error.kind(), intent.write) {
                (blockhaul_block::Kind::ReadOnly | blockhaul_block::Kind::Refused, true) => {
                    Failure::new(failure.status(), format!("{failure}, or serve it with -r"))
                }
                _ => failure,
            }
        })?;
        let device = match one.intent.write {
            true => stack.device().clone(),
            // Some backends can be written however they were opened.
            false => devices::readonly(&self.registry, stack.device())?,
        };
        Ok((stack, device))
    }

    /// How clients get a device: all of them this one, or each one that is opened anew.
    fn device_exports(
        &self,
        one: &One,
        layers: Vec<Arc<dyn Layer>>,
        device: Arc<dyn Device>,
    ) -> Arc<dyn Exports> {
        let (name, description) = (one.name.clone(), one.description.clone());
        if !self.per_client {
            return match self.any_name {
                true => Shared::under_any_name(&name, &description, device),
                false => Shared::new(&name, &description, device),
            };
        }
        let description = match description.is_empty() {
            true => device.facts().description.clone(),
            false => description,
        };
        Arc::new(Fresh {
            registry: self.registry.clone(),
            spec: one.spec.clone(),
            layers,
            intent: self.intent_below(one),
            write: one.intent.write,
            listed: Listed { name, description },
            any_name: self.any_name,
        })
    }
}

/// What a device is called where requests are said; none: it says them itself.
fn device_name(spec: &Spec) -> Option<&str> {
    match spec {
        // Its filters do.
        Spec::Scheme { scheme, rest } if scheme == "nbdkit" && rest.contains("@filter=") => None,
        Spec::Scheme { scheme, rest } if scheme == "nbdkit" => {
            let plugin = rest.split('?').next()?.rsplit('/').next()?;
            let plugin = plugin.strip_prefix("nbdkit-").unwrap_or(plugin);
            Some(plugin.trim_end_matches(".so").trim_end_matches("-plugin"))
        }
        Spec::Scheme { scheme, .. } => Some(scheme),
        Spec::Path(_) => Some("file"),
        Spec::Command(_) | Spec::Pipe => Some("nbd"),
    }
}

impl One {
    /// `NAME=DEVICE`, or `NAME=[ DEVICE OPTION… ]`.
    fn parse(name: &str, device: &OsStr, groups: &Groups, readonly: bool) -> Result<One, Failure> {
        let name = percent_decode(name)?;
        let place = |text: &dyn std::fmt::Display| {
            Failure::usage(format!(
                "--export {}: {text}",
                blockhaul_wire::printable(name.as_bytes(), 256)
            ))
        };
        let words = match groups.words(device) {
            None if device.is_empty() => return Err(place(&"there is no device behind the =")),
            None => {
                return Ok(One {
                    spec: Spec::parse(device)?,
                    description: String::new(),
                    intent: intent(readonly),
                    layers: Vec::new(),
                    name,
                });
            }
            Some(None) => return Err(place(&"a device name holds a NUL")),
            Some(Some(words)) => words.to_vec(),
        };
        // Commands in brackets may stand in there.
        let (words, inner) = brackets::take(words).map_err(|why| place(&why))?;
        let options = ServeExport::try_parse_from(words).map_err(|error| {
            let text = brackets::readable(&error.render().to_string());
            let what = text.lines().map(str::trim).take_while(|line| !line.is_empty());
            place(&what.collect::<Vec<_>>().join(" ").trim_start_matches("error: "))
        })?;
        Ok(One {
            spec: inner.spec(&options.device)?,
            description: options.description,
            intent: intent(readonly || options.readonly),
            layers: options.layer,
            name,
        })
    }
}

/// The name and the device of an export, if the word has both.
fn split(word: &OsString) -> Option<(&str, OsString)> {
    use std::os::unix::ffi::OsStrExt as _;
    let bytes = word.as_bytes();
    let at = bytes.iter().position(|&byte| byte == b'=')?;
    let name = std::str::from_utf8(&bytes[..at]).ok()?;
    Some((name, OsStr::from_bytes(&bytes[at + 1..]).to_os_string()))
}

fn text(word: &OsString) -> Result<&str, Failure> {
    word.to_str().ok_or_else(|| Failure::usage("the name of an export is not UTF-8"))
}

fn intent(readonly: bool) -> Intent {
    if readonly { Intent::READ } else { Intent::WRITE }
}
