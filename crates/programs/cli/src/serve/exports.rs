//! The exports of a server: its device, and those of `--export NAME=DEVICE`, each with its layers.

use std::ffi::{OsStr, OsString};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use blockhaul_block::{Can, Device, DeviceExt as _};
use blockhaul_catalog::{
    Adjustable, Barrier, Exports, Figure, Gate, Intent, Layer, Listed, Named, Registry, Several,
    Shared, Spec, Stack, guarded, percent_decode,
};
use blockhaul_io::FifoLock;
use blockhaul_snapshot::{Bitmap, Changes, Snapshot};
use clap::Parser as _;

use super::bitmap_files::BitmapFiles;
use super::fresh::Fresh;
use super::snapshots::{self, SnapshotOf};
use super::trace;
use crate::args::{self, ServeExport};
use crate::brackets::{self, Groups};
use crate::devices;
use crate::exit::Failure;
use crate::image_format::{self, Use};

/// The requested exports.
pub struct WantedExports {
    registry: Registry,
    exports: Vec<One>,
    /// Over each of them.
    layers: Vec<String>,
    /// The only export is available under any name.
    any_name: bool,
    /// Each client gets separate devices.
    per_client: bool,
    /// Requests are logged.
    trace: bool,
    /// Where dirty bitmaps are kept.
    pub bitmap_files: Option<BitmapFiles>,
}

/// A requested export.
pub struct One {
    name: String,
    description: String,
    spec: Spec,
    intent: Intent,
    /// Below the common layers.
    layers: Vec<String>,
}

/// An open export, for a server and for `ctl`.
pub struct Running {
    /// Its name.
    pub name: String,
    /// For users; may be empty.
    pub description: String,
    /// The description of its device, as typed.
    pub storage: Mutex<String>,
    /// Clients may write to it.
    pub write: bool,
    /// Clients reach it by its name. Otherwise it is a disk of the monitor protocol, which exports
    /// it under other names.
    pub served: bool,
    /// It has no exports of its own.
    pub single: bool,
    /// Its own exports, which may report their state.
    pub own: Option<Weak<dyn Exports>>,
    /// The device, if all clients share it.
    pub shared: Option<Arc<Shared>>,
    /// The stack of the device: to be closed when no worker needs it any more.
    pub stack: Mutex<Option<Stack>>,
    /// Its layers and gates, innermost first.
    pub layers: Mutex<Vec<Arc<Adjustable>>>,
    /// Its points in time, over the layers.
    pub snapshots: Mutex<Vec<Snapshot>>,
    /// Its dirty bitmaps, below the points in time.
    pub bitmaps: Mutex<Vec<Arc<Bitmap>>>,
    /// Names of bitmaps from earlier that may lack writes, and why.
    pub inconsistent: Mutex<Vec<(String, String)>>,
    /// What has changed, for a mirror of it; between the bitmaps and the points in time.
    pub mirrored: Mutex<Option<Changes>>,
    /// The export of which this one is a point in time.
    pub snapshot_of: Option<SnapshotOf>,
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
            match split(word) {
                Some((name, device)) => {
                    exports.push(One::parse(name, &device, groups, args.readonly)?);
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
        let wanted =
            WantedExports { registry, exports, layers, any_name, per_client, trace, bitmap_files };
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
    fn check(&self) -> Result<(), Failure> {
        devices::layers(&self.registry, &self.layers)?;
        for (index, one) in self.exports.iter().enumerate() {
            self.check_one(one)?;
            if self.exports[..index].iter().any(|before| before.name == one.name) {
                let text = format!("two exports have the name {:?}: choose another", one.name);
                return Err(Failure::usage(text));
            }
        }
        Ok(())
    }

    fn check_one(&self, one: &One) -> Result<(), Failure> {
        self.registry.target(&one.spec, one.intent)?;
        devices::layers(&self.registry, &one.layers)?;
        if one.name.len() > blockhaul_wire::limits::STRING || one.name.contains('\0') {
            let text = "the name of an export is longer than 4096 bytes, or contains a NUL";
            return Err(Failure::usage(text));
        }
        Ok(())
    }

    /// The name for clients in the URI.
    pub fn name(&self) -> &str {
        self.exports.first().map(|one| one.name.as_str()).unwrap_or_default()
    }

    /// What is served, for users.
    pub fn shown(&self) -> String {
        let shown = |one: &One| crate::ends::shown(&one.spec.to_string()).into_owned();
        self.exports.iter().map(shown).collect::<Vec<_>>().join(", ")
    }

    /// Whether clients may write to any of them, if the storage can be written.
    pub fn may_write(&self) -> bool {
        self.exports.iter().any(|one| one.intent.write)
    }

    fn has_several(&self) -> bool {
        self.exports.len() > 1
    }

    /// Opens an export, with its layers and gates.
    async fn open_one(&self, one: &One) -> Result<(Named, Running), Failure> {
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
            storage: Mutex::new(crate::ends::shown(&one.spec.to_string()).into_owned()),
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
            snapshot_of: None,
        };
        let exports = match self.storage_exports(one, &layers).await? {
            Some(own) => {
                running.single = false;
                running.own = Some(Arc::downgrade(&own));
                own
            }
            None => {
                let (stack, device) = self.open_device(one, &layers).await?;
                let (exports, shared) = self.device_exports(one, layers, device);
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
    fn layers_of(&self, one: &One) -> Result<Vec<Arc<Adjustable>>, Failure> {
        let mut configured = devices::adjustable(&self.registry, &one.layers)?;
        let outer = devices::adjustable(&self.registry, &self.layers)?;
        let own = |layer: &Arc<Adjustable>| !self.has_several() || layer.gate().is_none();
        configured.extend(outer.into_iter().filter(own));
        Ok(configured)
    }

    /// The exports of the storage itself, if it has any.
    async fn storage_exports(
        &self,
        one: &One,
        layers: &[Arc<dyn Layer>],
    ) -> Result<Option<Arc<dyn Exports>>, Failure> {
        let mut over = layers.to_vec();
        if !one.intent.write {
            // Some layers accept writes whatever is below.
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
        let device = self.served(&stack, one.intent.write)?;
        Ok((stack, device))
    }

    /// The device of a stack in the form for clients.
    pub fn served(&self, stack: &Stack, write: bool) -> Result<Arc<dyn Device>, Failure> {
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
            registry: self.registry.clone(),
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

fn gates(layers: &[Arc<Adjustable>]) -> Vec<Arc<dyn Gate>> {
    layers.iter().filter_map(|layer| layer.gate().cloned()).collect()
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

/// The exports of a running server, which can be changed.
pub struct Table {
    wanted: WantedExports,
    exports: Arc<Several>,
    /// In the order in which they were added.
    running: Mutex<Vec<Arc<Running>>>,
    /// The common gates, if they precede the first export: they also apply to exports that are
    /// added.
    gates: Mutex<Vec<Arc<dyn Gate>>>,
    /// One change at a time.
    changes: Arc<FifoLock>,
}

impl Table {
    /// For the requested exports; nothing is opened yet.
    pub fn new(wanted: WantedExports) -> Result<Table, Failure> {
        Ok(Table {
            wanted,
            exports: Arc::new(Several::new(Vec::new())?),
            running: Mutex::default(),
            gates: Mutex::default(),
            changes: Arc::default(),
        })
    }

    /// The initially requested exports.
    pub fn wanted(&self) -> &WantedExports {
        &self.wanted
    }

    /// The current exports, in order.
    pub fn running(&self) -> Vec<Arc<Running>> {
        self.lock().clone()
    }

    /// What the storages of the exports count, each figure once; figures of one name are consecutive.
    pub fn figures(&self) -> Vec<Figure> {
        let mut figures: Vec<Figure> = Vec::new();
        for own in self.running().iter().filter_map(|one| one.own.as_ref()?.upgrade()) {
            for figure in own.figures() {
                let same = |one: &Figure| (one.name, &one.labels) == (figure.name, &figure.labels);
                if !figures.iter().any(same) {
                    figures.push(figure);
                }
            }
        }
        figures.sort_by_key(|figure| figure.name);
        figures
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Arc<Running>>> {
        self.running.lock().expect("no panic under this lock")
    }

    /// Opens all requested exports. On a worker. Exports opened before a failure remain here.
    pub async fn open(&self) -> Result<Arc<dyn Exports>, Failure> {
        for one in &self.wanted.exports {
            let (storage, running) = self.wanted.open_one(one).await?;
            let running = Arc::new(running);
            self.lock().push(running.clone());
            self.restore_bitmaps(&running).await?;
            self.exports.add(storage)?;
        }
        let all = devices::adjustable(&self.wanted.registry, &self.wanted.layers)?;
        if self.wanted.has_several() {
            return Ok(guarded(self.exports.clone(), &gates(&all))?);
        }
        let first = self.running();
        let own = first.iter().flat_map(|one| one.layers()).collect::<Vec<_>>();
        *self.gates.lock().expect("no panic under this lock") = gates(&own);
        Ok(self.exports.clone())
    }

    /// Opens one more export, for later clients. On a worker.
    pub async fn add(&self, one: One) -> Result<(), Failure> {
        let _change = self.changes.lock().await;
        if self.wanted.any_name || self.wanted.per_client {
            let text = "the server has --any-name or --per-client: it can serve only one export";
            return Err(Failure::usage(text));
        }
        self.wanted.check_one(&one)?;
        self.check_new(&one.name)?;
        let (mut storage, running) = self.wanted.open_one(&one).await?;
        storage.exports = guarded(storage.exports, &self.common_gates())?;
        self.restore_bitmaps(&running).await?;
        self.serve(storage, running)
    }

    /// Opens a disk that no client reaches yet. On a worker.
    pub async fn add_disk(&self, one: One) -> Result<Arc<Running>, Failure> {
        let _change = self.changes.lock().await;
        self.wanted.check_one(&one)?;
        self.check_new(&one.name)?;
        let (_, mut running) = self.wanted.open_one(&one).await?;
        if running.shared.is_none() {
            return Err(Failure::usage("the device is not one disk that all clients share"));
        }
        running.served = false;
        self.restore_bitmaps(&running).await?;
        let running = Arc::new(running);
        self.lock().push(running.clone());
        Ok(running)
    }

    /// Serves these exports under a name to clients that connect from now on.
    pub fn add_name(&self, name: &str, exports: Arc<dyn Exports>) -> Result<(), Failure> {
        let exports = guarded(exports, &self.common_gates())?;
        let name = name.to_string();
        let description = String::new();
        Ok(self.exports.add(Named { name, description, exports, single: true })?)
    }

    /// Ends that for new clients. False: there is none of this name.
    pub fn remove_name(&self, name: &str) -> bool {
        self.exports.remove(name)
    }

    /// A device in the form for clients that only read.
    pub fn readonly(&self, device: &Arc<dyn Device>) -> blockhaul_block::Result<Arc<dyn Device>> {
        devices::readonly(&self.wanted.registry, device)
    }

    /// Refuses a name that is in use.
    pub fn check_new(&self, name: &str) -> Result<(), Failure> {
        if self.running().iter().any(|before| before.name == name) {
            let text = format!("two exports have the name {name:?}: choose another");
            return Err(Failure::usage(text));
        }
        if name.len() > blockhaul_wire::limits::STRING || name.contains('\0') {
            let text = "the name of an export is longer than 4096 bytes, or contains a NUL";
            return Err(Failure::usage(text));
        }
        Ok(())
    }

    /// Serves an export to clients that connect from now on.
    pub fn serve(&self, storage: Named, running: Running) -> Result<(), Failure> {
        self.exports.add(storage)?;
        self.lock().push(Arc::new(running));
        Ok(())
    }

    /// The gates for exports that are added.
    pub fn common_gates(&self) -> Vec<Arc<dyn Gate>> {
        self.gates.lock().expect("no panic under this lock").clone()
    }

    /// Waits until no other change of exports is under way; none begins while the result exists.
    pub async fn change(&self) -> impl Sized + use<> {
        self.changes.lock().await
    }

    /// Removes an export. Its clients get ESHUTDOWN for later requests; its devices are closed when
    /// they have disconnected. `false` if there is none of this name.
    pub async fn remove(&self, name: &str) -> bool {
        let change = self.changes.lock().await;
        let found = {
            let mut running = self.lock();
            let place = running.iter().position(|one| one.name == name);
            place.map(|place| running.remove(place))
        };
        let Some(found) = found else { return false };
        if found.served {
            self.exports.remove(name);
        }
        if let Some(shared) = &found.shared {
            shared.switch().close(snapshots::removed());
        }
        self.keep_bitmaps(&found).await;
        drop(change);
        if let Some(SnapshotOf { live, snapshot }) = &found.snapshot_of {
            self.end_snapshot(live, snapshot).await;
        }
        // Not on a worker: it may wait for its own server to end, whose connections workers close.
        let _ = blockhaul_io::offload(move || drop(found)).await;
        true
    }

    /// Adds a layer to an export, outermost, while clients use it.
    pub async fn add_layer(
        &self,
        export: &Running,
        text: &str,
        time: Duration,
    ) -> Result<(), Failure> {
        let _change = self.changes.lock().await;
        export.check_not_mirrored()?;
        let (shared, stack) = self.changeable(export)?;
        let adjustable = Arc::new(Adjustable::new(&self.wanted.registry, text)?);
        let Some(layer) = adjustable.layer().filter(|_| adjustable.kind().transparent()) else {
            return Err(not_transparent(adjustable.name()));
        };
        let new = stack.with_layer(layer.clone()).await?;
        self.exchange(shared, export, &new, time).await?;
        *export.stack.lock().expect("no panic under this lock") = Some(new);
        export.layers.lock().expect("no panic under this lock").push(adjustable);
        Ok(())
    }

    /// Removes a layer of an export, by its index among its layers and gates.
    pub async fn remove_layer(
        &self,
        export: &Running,
        place: usize,
        time: Duration,
    ) -> Result<(), Failure> {
        let _change = self.changes.lock().await;
        export.check_not_mirrored()?;
        let (shared, stack) = self.changeable(export)?;
        let layers = export.layers();
        let found = &layers[place];
        if !found.kind().transparent() {
            return Err(not_transparent(found.name()));
        }
        if found.layer().is_some_and(|layer| layer.keeps_writes()) {
            let text =
                format!("{} keeps writes that a flush does not write to the device", found.name());
            return Err(Failure::usage(text));
        }
        let number = layers[..place].iter().filter(|layer| layer.layer().is_some()).count();
        let new = stack.without_layer(number).await?;
        self.exchange(shared, export, &new, time).await?;
        *export.stack.lock().expect("no panic under this lock") = Some(new);
        export.layers.lock().expect("no panic under this lock").remove(place);
        Ok(())
    }

    /// The changeable parts of an export.
    pub fn changeable<'a>(&self, export: &'a Running) -> Result<(&'a Shared, Stack), Failure> {
        let stack = export.stack.lock().expect("no panic under this lock").clone();
        match (&export.shared, stack) {
            _ if self.wanted.trace => Err(Failure::usage("with --trace, layers cannot be changed")),
            (Some(shared), Some(stack)) => Ok((shared, stack)),
            _ => Err(Failure::usage(format!(
                "each client of export {:?} has its own device and layers",
                export.name
            ))),
        }
    }

    /// Moves clients to another stack over the same storage, when their requests in flight have
    /// ended and the writes held by a layer are written.
    async fn exchange(
        &self,
        shared: &Shared,
        export: &Running,
        new: &Stack,
        time: Duration,
    ) -> Result<(), Failure> {
        let new = self.top(export, new).await?;
        let old = shared.switch().device();
        let carry = async || {
            let can = old.facts().can;
            if can.contains(Can::WRITE | Can::FLUSH) { old.flush().await } else { Ok(()) }
        };
        shared.switch().swap(new, Barrier::Within(time), carry).await?;
        Ok(())
    }
}

fn not_transparent(name: &str) -> Failure {
    Failure::usage(format!(
        "{name} cannot be added or removed while the server runs: clients would see another disk, or it \
         decides about clients"
    ))
}

impl Running {
    /// Its current layers and gates, innermost first.
    pub fn layers(&self) -> Vec<Arc<Adjustable>> {
        self.layers.lock().expect("no panic under this lock").clone()
    }

    /// The description of its device, as typed.
    pub fn storage(&self) -> String {
        self.storage.lock().expect("no panic under this lock").clone()
    }

    /// The current device, if all clients share it.
    pub fn device(&self) -> Option<Arc<dyn Device>> {
        self.shared.as_ref().map(|shared| shared.switch().device())
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
        let name = percent_decode(name)?;
        let place = |text: &dyn std::fmt::Display| {
            Failure::usage(format!(
                "--export {}: {text}",
                blockhaul_wire::printable(name.as_bytes(), 256)
            ))
        };
        let words = match groups.words(device) {
            None if device.is_empty() => return Err(place(&"no device after the =")),
            None => {
                return Ok(One {
                    spec: Spec::parse(device)?,
                    description: String::new(),
                    intent: intent(readonly),
                    layers: Vec::new(),
                    name,
                });
            }
            Some(None) => return Err(place(&"a device name contains a NUL")),
            Some(Some(words)) => words.to_vec(),
        };
        // It may contain commands in brackets.
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
