//! The exports that a server is asked for, and how each is opened.

use std::sync::{Arc, Mutex, Weak};

use blockhaul_block::{Device, Kind};
use blockhaul_catalog::{
    AdjustableLayer, BitmapSlot, ClaimOwner, DeviceSpec, Exports, Gate, Intent, Layer,
    ListedExport, NamedStorage, Registry, SharedDevice, Stack, Warnings, guarded,
};
use blockhaul_transfer::{TransferOptions, adjustable_layers, make_layers, writes_below};

use crate::bitmap_files::BitmapFiles;
use crate::client_devices::ClientDevices;
use crate::error::JobError;
use crate::export::OpenExport;
use crate::job_files::JobFiles;
use crate::trace;

/// The exports of a server, and what all of them share.
pub struct ExportTableConfig {
    /// The devices and layers that can be opened.
    pub registry: Registry,
    /// The exports, in order.
    pub exports: Vec<ExportConfig>,
    /// Layers over each export, `NAME[?key=value&…]`, the first innermost.
    pub layers: Vec<String>,
    /// Whether the only export is available under any name.
    pub any_name: bool,
    /// Whether exports of one storage have its name before theirs also while it is the only one.
    pub full_names: bool,
    /// Whether each client gets a device of its own.
    pub per_client: bool,
    /// Whether requests are logged.
    pub trace: bool,
    /// The directory that keeps dirty bitmaps beyond the end of the server.
    pub bitmap_files: Option<BitmapFiles>,
    /// The directory that keeps jobs beyond the end of the server.
    pub job_files: Option<Arc<JobFiles>>,
    /// Is called for each copy of a job, before its target is opened: for warnings. Must not block.
    pub on_copy: CopyHook,
}

/// Is called with the options, the source and the target of a copy.
pub type CopyHook = fn(&TransferOptions, [&DeviceSpec; 2]);

/// The word for an export in messages.
pub(crate) const EXPORT: &str = "export";
/// The word for a disk of the monitor protocol in messages.
pub(crate) const NODE: &str = "node";

/// An export of a server: a device, its name, and the access of clients.
pub struct ExportConfig {
    /// The name for clients.
    pub name: String,
    /// The text for users; may be empty.
    pub description: String,
    /// The device.
    pub spec: DeviceSpec,
    /// The access that clients get.
    pub intent: Intent,
    /// Layers over the device, below those of all exports.
    pub layers: Vec<String>,
}

impl ExportTableConfig {
    /// No exports yet, of devices of `registry`: clients share each device, and nothing outlives the server.
    pub fn new(registry: Registry) -> ExportTableConfig {
        ExportTableConfig {
            registry,
            exports: Vec::new(),
            layers: Vec::new(),
            any_name: false,
            full_names: false,
            per_client: false,
            trace: false,
            bitmap_files: None,
            job_files: None,
            on_copy: |_, _| (),
        }
    }

    /// The intent for opening the storage of an export: under a layer that changes nothing it need
    /// not be writable, and others may use it at the same time.
    fn intent_below(&self, one: &ExportConfig) -> Intent {
        let mut layers = one.layers.iter().chain(&self.layers);
        let kept = layers.any(|layer| !writes_below(&self.registry, layer));
        if kept { Intent::READ } else { one.intent }
    }

    /// Checks the exports before any is opened.
    ///
    /// # Errors
    /// If a device or a layer is unknown or invalid, or two exports have one name.
    pub fn check(&self) -> Result<(), JobError> {
        make_layers(&self.registry, &self.layers)?;
        for (index, one) in self.exports.iter().enumerate() {
            self.check_one(one)?;
            if self.exports[..index].iter().any(|before| before.name == one.name) {
                let text = format!("two exports have the name {:?}: choose another", one.name);
                return Err(JobError::request(text));
            }
        }
        Ok(())
    }

    /// Checks an export before it is opened.
    ///
    /// # Errors
    /// If its device or a layer is unknown or invalid.
    pub fn check_one(&self, one: &ExportConfig) -> Result<(), JobError> {
        self.registry.target(&one.spec, one.intent)?;
        make_layers(&self.registry, &one.layers)?;
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

    /// The storage that is served, for users, or the names of several exports.
    pub fn shown(&self) -> String {
        match &self.exports[..] {
            [one] => blockhaul_transfer::shown(&one.spec.to_string()).into_owned(),
            several => {
                let names = several.iter().map(|one| format!("{:?}", one.name));
                format!("exports {}", names.collect::<Vec<_>>().join(", "))
            }
        }
    }

    /// The access that clients have, if the storage can be written, for messages.
    pub fn access(&self) -> String {
        let closed = self.exports.iter().filter(|one| !one.intent.write);
        let closed: Vec<_> = closed.map(|one| format!("{:?}", one.name)).collect();
        match closed.len() {
            0 => "read-write".to_string(),
            count if count == self.exports.len() => "read-only".to_string(),
            _ => format!("{} read-only", closed.join(", ")),
        }
    }

    pub(crate) fn has_several(&self) -> bool {
        self.exports.len() > 1
    }

    /// Opens an export, or what messages call `kind` otherwise, with its layers and gates. `warnings`
    /// are for its user, besides those in the log.
    pub(crate) async fn open_one(
        &self,
        kind: &str,
        one: &ExportConfig,
        warnings: Weak<Warnings>,
    ) -> Result<(NamedStorage, OpenExport), JobError> {
        // Its clients share raw bytes, whatever handles they have.
        let owner = match (kind, one.name.as_str()) {
            (EXPORT, "") => ClaimOwner::export("the default export"),
            (EXPORT, name) => ClaimOwner::export(format!("{kind} {name:?}")),
            (_, name) => ClaimOwner::new(format!("{kind} {name:?}")),
        };
        let slot = Arc::new(BitmapSlot::default());
        let keeps = kind == NODE && self.can_keep_bitmaps(one);
        let bitmaps = if keeps { Arc::downgrade(&slot) } else { Weak::new() };
        let registry = Registry { owner, warnings, bitmaps, ..self.registry.clone() };
        let configured = self.layers_of(one)?;
        let layers: Vec<_> = if self.trace {
            trace::with_trace(&configured, device_name(&one.spec))
        } else {
            configured.iter().filter_map(|layer| layer.layer().cloned()).collect()
        };
        let gates = gates(&configured);
        let mut export = OpenExport {
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
            bitmap_store: Mutex::default(),
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
                export.single = false;
                export.own = Some(Arc::downgrade(&own));
                own
            }
            None => {
                let (stack, device) = self.open_device(&registry, one, &layers).await?;
                if self.per_client && registry.claims.is_exclusive(&registry.owner) {
                    return Err(no_image_for_each_client(one));
                }
                let (exports, shared) = self.device_exports(registry, one, layers, device);
                (export.shared, export.stack) = (shared, Mutex::new(Some(stack)));
                export.bitmap_store = Mutex::new(slot.take());
                exports
            }
        };
        let storage = NamedStorage {
            name: export.name.clone(),
            description: export.description.clone(),
            exports: guarded(exports, &gates)?,
            single: export.single,
        };
        Ok((storage, export))
    }

    /// Whether the bitmaps of a disk can be those of its image: no file has them, and all that is written
    /// is written under the layer that marks it, at the same place.
    fn can_keep_bitmaps(&self, one: &ExportConfig) -> bool {
        let mut layers = one.layers.iter().chain(&self.layers);
        let moves = layers.any(|text| {
            AdjustableLayer::new(&self.registry, text)
                .is_ok_and(|layer| !layer.kind().transparent())
        });
        one.intent.write && !self.per_client && !self.trace && self.bitmap_files.is_none() && !moves
    }

    /// The layers and gates of an export, first innermost: its own below the common ones. They are
    /// made anew for each export, because their state belongs to one. The common gates are omitted
    /// if there are several exports: they admit clients once, before every export.
    fn layers_of(&self, one: &ExportConfig) -> Result<Vec<Arc<AdjustableLayer>>, JobError> {
        let mut configured = adjustable_layers(&self.registry, &one.layers)?;
        let outer = adjustable_layers(&self.registry, &self.layers)?;
        let own = |layer: &Arc<AdjustableLayer>| !self.has_several() || layer.gate().is_none();
        configured.extend(outer.into_iter().filter(own));
        Ok(configured)
    }

    /// The exports of the storage itself, if it has any.
    async fn storage_exports(
        &self,
        registry: &Registry,
        one: &ExportConfig,
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
        one: &ExportConfig,
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
    ///
    /// # Errors
    /// If the device cannot be made read-only.
    pub fn served(&self, stack: &Stack, write: bool) -> Result<Arc<dyn Device>, JobError> {
        Ok(if write {
            stack.device().clone()
        } else {
            // Some backends accept writes however they were opened.
            blockhaul_transfer::readonly(&self.registry, stack.device())?
        })
    }

    /// How clients get a device: all of them share this one, or each gets a new one.
    fn device_exports(
        &self,
        registry: Registry,
        one: &ExportConfig,
        layers: Vec<Arc<dyn Layer>>,
        device: Arc<dyn Device>,
    ) -> (Arc<dyn Exports>, Option<Arc<SharedDevice>>) {
        let name = one.name.clone();
        let description = one.description.clone();
        if !self.per_client {
            let shared = if self.any_name {
                SharedDevice::under_any_name(&name, &description, device)
            } else {
                SharedDevice::new(&name, &description, device)
            };
            return (shared.clone(), Some(shared));
        }
        let description =
            if description.is_empty() { device.facts().description.clone() } else { description };
        let fresh = ClientDevices {
            registry,
            spec: one.spec.clone(),
            layers,
            intent: self.intent_below(one),
            write: one.intent.write,
            listed: ListedExport { name, description },
            any_name: self.any_name,
        };
        (Arc::new(fresh), None)
    }
}

pub(crate) fn gates(layers: &[Arc<AdjustableLayer>]) -> Vec<Arc<dyn Gate>> {
    layers.iter().filter_map(|layer| layer.gate().cloned()).collect()
}

fn no_image_for_each_client(one: &ExportConfig) -> JobError {
    let text = format!(
        "--per-client: {} is a disk image, which one device at a time can write: leave out --per-client, and \
         all clients share the disk, or serve it with -r",
        blockhaul_transfer::shown(&one.spec.to_string())
    );
    JobError::request(text)
}

/// The name of a device in trace lines; none: it logs requests itself.
fn device_name(spec: &DeviceSpec) -> Option<&str> {
    match spec {
        // Its filters do.
        DeviceSpec::Scheme { scheme, rest } if scheme == "nbdkit" && rest.contains("@filter=") => {
            None
        }
        DeviceSpec::Scheme { scheme, rest } if scheme == "nbdkit" => {
            let plugin = rest.split('?').next()?.rsplit('/').next()?;
            let plugin = plugin.strip_prefix("nbdkit-").unwrap_or(plugin);
            Some(plugin.trim_end_matches(".so").trim_end_matches("-plugin"))
        }
        DeviceSpec::Scheme { scheme, .. } => Some(scheme),
        DeviceSpec::Path(_) => Some("file"),
        DeviceSpec::Command(_) | DeviceSpec::Pipe => Some("nbd"),
    }
}

impl ExportConfig {
    /// A device that clients may write, under this name, without layers.
    pub fn new(name: impl Into<String>, spec: DeviceSpec) -> ExportConfig {
        ExportConfig {
            name: name.into(),
            description: String::new(),
            spec,
            intent: Intent::WRITE,
            layers: Vec::new(),
        }
    }

    /// An export in the form of the control socket.
    pub fn described(
        name: &str,
        description: &str,
        spec: DeviceSpec,
        readonly: bool,
        layers: Vec<String>,
    ) -> ExportConfig {
        let name = name.to_string();
        let description = description.to_string();
        ExportConfig { name, description, spec, intent: intent(readonly), layers }
    }
}

/// The access of an export, by whether clients only read.
pub fn intent(readonly: bool) -> Intent {
    if readonly { Intent::READ } else { Intent::WRITE }
}
