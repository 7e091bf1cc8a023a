//! The exports that the command line asks for, and how each is opened.

use std::ffi::{OsStr, OsString};
use std::sync::{Arc, Mutex, Weak};

use blockhaul_block::{Device, Kind};
use blockhaul_catalog::{
    Adjustable, ClaimOwner, Exports, Gate, Intent, Layer, Listed, Named, Registry, Shared, Spec,
    Stack, Warnings, guarded, percent_decode,
};

use super::bitmap_files::BitmapFiles;
use super::fresh::Fresh;
use super::job_error::JobError;
use super::job_files::JobFiles;
use super::running::Running;
use super::trace;
use crate::args::{self, ServeExport};
use crate::brackets::{self, Groups, NamedDevice};
use crate::devices;
use crate::exit::Failure;
use crate::image_format::{self, Use};

/// The requested exports.
pub struct WantedExports {
    pub(super) registry: Registry,
    pub(super) exports: Vec<One>,
    /// Over each of them.
    pub(super) layers: Vec<String>,
    /// The only export is available under any name.
    pub(super) any_name: bool,
    /// Each client gets separate devices.
    pub(super) per_client: bool,
    /// Requests are logged.
    pub(super) trace: bool,
    /// Where dirty bitmaps are kept.
    pub bitmap_files: Option<BitmapFiles>,
    /// Where jobs are kept.
    pub job_files: Option<Arc<JobFiles>>,
}

/// What messages call an export.
pub(super) const EXPORT: &str = "export";
/// What messages call a disk of the monitor protocol.
pub(super) const NODE: &str = "node";

/// A requested export.
pub struct One {
    pub(super) name: String,
    pub(super) description: String,
    pub(super) spec: Spec,
    pub(super) intent: Intent,
    /// Below the common layers.
    pub(super) layers: Vec<String>,
}

impl WantedExports {
    /// Parses the command line; nothing is opened yet.
    pub fn new(
        args: &args::Serve,
        groups: &Groups,
        registry: Registry,
    ) -> Result<WantedExports, Failure> {
        let mut exports = Vec::new();
        let mut name = None;
        for word in &args.export {
            match brackets::named(word) {
                Some((name, device)) => {
                    exports.push(One::parse(name, device, groups, args.readonly)?);
                }
                None if name.is_some() => {
                    let text =
                        "two names for one device: use --export NAME=DEVICE for a further export";
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
                let text = format!("no device given: write --export {name}=DEVICE");
                return Err(Failure::usage(text));
            }
            (None, None) if !args.description.is_empty() => {
                let text = "--description applies to DEVICE; in brackets, each export has its own";
                return Err(Failure::usage(text));
            }
            (None, None) => {}
        }
        for one in &mut exports {
            one.spec = image_format::chosen(one.spec.clone(), &args.image)?;
        }
        if args.any_name && exports.len() > 1 {
            return Err(Failure::usage("--any-name requires a single export"));
        }
        if args.per_client && exports.iter().any(|one| matches!(one.spec, Spec::Command(_))) {
            let text =
                "--per-client cannot be used with a server in brackets, which is started once";
            return Err(Failure::usage(text));
        }
        let layers = args.layer.clone();
        let any_name = args.any_name;
        let per_client = args.per_client;
        let trace = args.trace;
        let bitmap_files = args.bitmaps.as_deref().map(BitmapFiles::new).transpose()?;
        let job_files = args.job_state.as_deref().map(JobFiles::new).transpose()?.map(Arc::new);
        let wanted = WantedExports {
            registry,
            exports,
            layers,
            any_name,
            per_client,
            trace,
            bitmap_files,
            job_files,
        };
        wanted.check()?;
        for one in &wanted.exports {
            let layered = !one.layers.is_empty() || !wanted.layers.is_empty();
            if let Some(text) = image_format::warning(&one.spec, layered, Use::Served) {
                log::warn!("{text}");
            }
        }
        Ok(wanted)
    }

    /// The intent for opening the storage of an export: under a layer that changes nothing it need
    /// not be writable, and others may use it at the same time.
    fn intent_below(&self, one: &One) -> Intent {
        let mut layers = one.layers.iter().chain(&self.layers);
        let kept = layers.any(|layer| !devices::writes_below(&self.registry, layer));
        if kept { Intent::READ } else { one.intent }
    }

    /// Checks it while the terminal is still available.
    fn check(&self) -> Result<(), JobError> {
        devices::layers(&self.registry, &self.layers)?;
        for (index, one) in self.exports.iter().enumerate() {
            self.check_one(one)?;
            if self.exports[..index].iter().any(|before| before.name == one.name) {
                let text = format!("two exports have the name {:?}: choose another", one.name);
                return Err(JobError::request(text));
            }
        }
        Ok(())
    }

    pub(super) fn check_one(&self, one: &One) -> Result<(), JobError> {
        self.registry.target(&one.spec, one.intent)?;
        devices::layers(&self.registry, &one.layers)?;
        if one.name.len() > blockhaul_wire::limits::STRING || one.name.contains('\0') {
            let text = "the name of an export is longer than 4096 bytes, or contains a NUL";
            return Err(JobError::request(text));
        }
        Ok(())
    }

    /// The name for clients in the URI.
    pub fn name(&self) -> &str {
        self.exports.first().map(|one| one.name.as_str()).unwrap_or_default()
    }

    /// What is served, for users: the storage, or the names of several exports.
    pub fn shown(&self) -> String {
        match &self.exports[..] {
            [one] => blockhaul_transfer::shown(&one.spec.to_string()).into_owned(),
            several => {
                let names = several.iter().map(|one| format!("{:?}", one.name));
                format!("exports {}", names.collect::<Vec<_>>().join(", "))
            }
        }
    }

    /// Whether clients may write to any of them, if the storage can be written.
    pub fn may_write(&self) -> bool {
        self.exports.iter().any(|one| one.intent.write)
    }

    pub(super) fn has_several(&self) -> bool {
        self.exports.len() > 1
    }

    /// Opens an export, or what messages call `kind` otherwise, with its layers and gates. `warnings`
    /// are for its user, besides those in the log.
    pub(super) async fn open_one(
        &self,
        kind: &str,
        one: &One,
        warnings: Weak<Warnings>,
    ) -> Result<(Named, Running), JobError> {
        // Its clients share raw bytes, whatever handles they have.
        let owner = match (kind, one.name.as_str()) {
            (EXPORT, "") => ClaimOwner::export("the default export"),
            (EXPORT, name) => ClaimOwner::export(format!("{kind} {name:?}")),
            (_, name) => ClaimOwner::new(format!("{kind} {name:?}")),
        };
        let registry = Registry { owner, warnings, ..self.registry.clone() };
        let configured = self.layers_of(one)?;
        let layers: Vec<_> = if self.trace {
            trace::woven(&configured, device_name(&one.spec))
        } else {
            configured.iter().filter_map(|layer| layer.layer().cloned()).collect()
        };
        let gates = gates(&configured);
        let mut running = Running {
            name: one.name.clone(),
            description: one.description.clone(),
            storage: Mutex::new(blockhaul_transfer::shown(&one.spec.to_string()).into_owned()),
            write: one.intent.write,
            served: true,
            single: true,
            own: None,
            shared: None,
            stack: Mutex::default(),
            layers: Mutex::new(configured),
            snapshots: Mutex::default(),
            bitmaps: Mutex::default(),
            inconsistent: Mutex::default(),
            mirrored: Mutex::default(),
            maps: Mutex::default(),
            claims: registry.claims.clone(),
            owner: registry.owner.clone(),
            written: Arc::default(),
            snapshot_of: None,
        };
        let exports = match self.storage_exports(&registry, one, &layers).await? {
            Some(own) => {
                running.single = false;
                running.own = Some(Arc::downgrade(&own));
                own
            }
            None => {
                let (stack, device) = self.open_device(&registry, one, &layers).await?;
                if self.per_client && registry.claims.is_exclusive(&registry.owner) {
                    return Err(no_image_for_each_client(one));
                }
                let (exports, shared) = self.device_exports(registry, one, layers, device);
                (running.shared, running.stack) = (shared, Mutex::new(Some(stack)));
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

    /// The layers and gates of an export, first innermost: its own below the common ones. They are
    /// made anew for each export, because their state belongs to one. The common gates are omitted
    /// if there are several exports: they admit clients once, before every export.
    fn layers_of(&self, one: &One) -> Result<Vec<Arc<Adjustable>>, JobError> {
        let mut configured = devices::adjustable(&self.registry, &one.layers)?;
        let outer = devices::adjustable(&self.registry, &self.layers)?;
        let own = |layer: &Arc<Adjustable>| !self.has_several() || layer.gate().is_none();
        configured.extend(outer.into_iter().filter(own));
        Ok(configured)
    }

    /// The exports of the storage itself, if it has any.
    async fn storage_exports(
        &self,
        registry: &Registry,
        one: &One,
        layers: &[Arc<dyn Layer>],
    ) -> Result<Option<Arc<dyn Exports>>, JobError> {
        let mut over = layers.to_vec();
        if !one.intent.write {
            // Some layers accept writes whatever is below.
            over.push(self.registry.layer("readonly")?);
        }
        let own = registry.exports(&one.spec, &over, self.intent_below(one)).await;
        own.map_err(|error| JobError::opening(&one.spec.to_string(), &error))
    }

    /// Opens storage that is one device.
    async fn open_device(
        &self,
        registry: &Registry,
        one: &One,
        layers: &[Arc<dyn Layer>],
    ) -> Result<(Stack, Arc<dyn Device>), JobError> {
        let intent = self.intent_below(one);
        let stack = registry.open(&one.spec, layers.to_vec(), intent).await;
        let stack = stack.map_err(|error| {
            let failure = JobError::opening(&one.spec.to_string(), &error);
            match (error.kind(), intent.write) {
                (Kind::ReadOnly | Kind::Refused, true) => failure.and(", or serve it with -r"),
                _ => failure,
            }
        })?;
        let device = self.served(&stack, one.intent.write)?;
        Ok((stack, device))
    }

    /// The device of a stack in the form for clients.
    pub fn served(&self, stack: &Stack, write: bool) -> Result<Arc<dyn Device>, JobError> {
        Ok(if write {
            stack.device().clone()
        } else {
            // Some backends accept writes however they were opened.
            devices::readonly(&self.registry, stack.device())?
        })
    }

    /// How clients get a device: all of them share this one, or each gets a new one.
    fn device_exports(
        &self,
        registry: Registry,
        one: &One,
        layers: Vec<Arc<dyn Layer>>,
        device: Arc<dyn Device>,
    ) -> (Arc<dyn Exports>, Option<Arc<Shared>>) {
        let name = one.name.clone();
        let description = one.description.clone();
        if !self.per_client {
            let shared = if self.any_name {
                Shared::under_any_name(&name, &description, device)
            } else {
                Shared::new(&name, &description, device)
            };
            return (shared.clone(), Some(shared));
        }
        let description =
            if description.is_empty() { device.facts().description.clone() } else { description };
        let fresh = Fresh {
            registry,
            spec: one.spec.clone(),
            layers,
            intent: self.intent_below(one),
            write: one.intent.write,
            listed: Listed { name, description },
            any_name: self.any_name,
        };
        (Arc::new(fresh), None)
    }
}

pub(super) fn gates(layers: &[Arc<Adjustable>]) -> Vec<Arc<dyn Gate>> {
    layers.iter().filter_map(|layer| layer.gate().cloned()).collect()
}

fn no_image_for_each_client(one: &One) -> JobError {
    let text = format!(
        "--per-client: {} is a disk image, which one device at a time can write: leave out --per-client, and \
         all clients share the disk, or serve it with -r",
        blockhaul_transfer::shown(&one.spec.to_string())
    );
    JobError::request(text)
}

/// The name of a device in trace lines; none: it logs requests itself.
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
    /// An export in the form of the control socket.
    pub fn described(
        name: &str,
        description: &str,
        spec: Spec,
        readonly: bool,
        layers: Vec<String>,
    ) -> One {
        let name = name.to_string();
        let description = description.to_string();
        One { name, description, spec, intent: intent(readonly), layers }
    }

    /// `NAME=DEVICE`, or `NAME=[ DEVICE OPTION… ]`.
    fn parse(name: &str, device: &OsStr, groups: &Groups, readonly: bool) -> Result<One, Failure> {
        let (name, options, inner) = parse_named::<ServeExport>(name, device, groups)?;
        Ok(One {
            spec: inner.spec(&options.device)?,
            description: options.description,
            intent: intent(readonly || options.readonly),
            layers: options.layer,
            name,
        })
    }
}

/// The decoded name of `NAME=DEVICE` or `NAME=[ DEVICE OPTION… ]`, the command line of its own, and the
/// groups in it.
pub fn parse_named<T: clap::Parser>(
    name: &str,
    device: &OsStr,
    groups: &Groups,
) -> Result<(String, T, Groups), Failure> {
    let name = percent_decode(name)?;
    let place = |text: &str| {
        let shown = blockhaul_wire::printable(name.as_bytes(), 256);
        Failure::usage(format!("--export {shown}: {text}"))
    };
    let NamedDevice { words, groups } = groups.named_device(device).map_err(|why| place(&why))?;
    let options = T::try_parse_from(words).map_err(|error| {
        let text = brackets::readable(&error.render().to_string());
        let what = text.lines().map(str::trim).take_while(|line| !line.is_empty());
        place(what.collect::<Vec<_>>().join(" ").trim_start_matches("error: "))
    })?;
    Ok((name, options, groups))
}

fn text(word: &OsString) -> Result<&str, Failure> {
    word.to_str().ok_or_else(|| Failure::usage("the name of an export is not UTF-8"))
}

fn intent(readonly: bool) -> Intent {
    if readonly { Intent::READ } else { Intent::WRITE }
}
