//! The exports of a running server: its device, and those of `--export NAME=DEVICE`, each with its layers.

use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use blockhaul_block::{Can, Device, DeviceExt as _};
use blockhaul_catalog::{
    AdjustableLayer, Barrier, Exports, Gate, NamedStorage, NamedStorages, SharedDevice, Stack,
    StorageFigure, Warnings, guarded,
};
use blockhaul_io::FifoLock;
use blockhaul_transfer::adjustable_layers;

use crate::error::JobError;
use crate::export::{OpenExport, SnapshotOrigin, removed};
use crate::export_config::{EXPORT, ExportConfig, ExportTableConfig, NODE, gates};

/// Maximum time for a change of exports to end when the server stops.
const LAST_CHANGE: Duration = Duration::from_secs(1);

/// How a storage is listed for clients.
type AddStorage = fn(&NamedStorages, NamedStorage) -> blockhaul_block::Result<()>;

/// The exports of a running server, which can be changed while clients use them.
pub struct ExportTable {
    config: ExportTableConfig,
    /// The exports that clients reach by name.
    served: Arc<NamedStorages>,
    entries: Mutex<TableState>,
    /// The common gates, if they precede the first export: they also apply to exports that are
    /// added.
    gates: Mutex<Vec<Arc<dyn Gate>>>,
    /// The lock of changes. No device is opened meanwhile: that may take as long as a server does not
    /// answer.
    changes: Arc<FifoLock>,
}

#[derive(Default)]
struct TableState {
    /// The exports, in the order in which they were added.
    exports: Vec<Arc<OpenExport>>,
    /// Names of exports whose devices are being opened.
    reserved: Vec<String>,
    /// The server stops: no export is added any more.
    is_closed: bool,
}

/// A name that no other export gets until this is dropped.
pub struct NameReservation<'a> {
    table: &'a ExportTable,
    name: &'a str,
}

impl Drop for NameReservation<'_> {
    fn drop(&mut self) {
        self.table.lock().reserved.retain(|name| name != self.name);
    }
}

impl ExportTable {
    /// A table for these exports. [`ExportTable::open`] opens them.
    pub fn new(config: ExportTableConfig) -> ExportTable {
        let served = if config.full_names {
            NamedStorages::with_full_names()
        } else {
            NamedStorages::default()
        };
        ExportTable {
            config,
            served: Arc::new(served),
            entries: Mutex::default(),
            gates: Mutex::default(),
            changes: Arc::default(),
        }
    }

    /// The initially requested exports.
    pub fn config(&self) -> &ExportTableConfig {
        &self.config
    }

    /// The current exports, in order.
    pub fn exports(&self) -> Vec<Arc<OpenExport>> {
        self.lock().exports.clone()
    }

    /// The export of this name.
    pub fn find(&self, name: &str) -> Option<Arc<OpenExport>> {
        self.lock().exports.iter().find(|one| one.name == name).cloned()
    }

    /// The figures of the storages of the exports, each once; figures of one name are consecutive.
    pub fn figures(&self) -> Vec<StorageFigure> {
        let mut figures: Vec<StorageFigure> = Vec::new();
        for own in self.exports().iter().filter_map(|one| one.own.as_ref()?.upgrade()) {
            for figure in own.figures() {
                let same =
                    |one: &StorageFigure| (one.name, &one.labels) == (figure.name, &figure.labels);
                if !figures.iter().any(same) {
                    figures.push(figure);
                }
            }
        }
        figures.sort_by_key(|figure| figure.name);
        figures
    }

    fn lock(&self) -> MutexGuard<'_, TableState> {
        self.entries.lock().expect("no panic under this lock")
    }

    /// Opens all exports, for a server ([`blockhaul_catalog::Exports`]). Call it on a worker. Exports that were
    /// opened before a failure remain here.
    ///
    /// # Errors
    /// The first export ([`JobError::export`]) whose device cannot be opened, or whose bitmaps cannot be read.
    pub async fn open(&self) -> Result<Arc<dyn Exports>, JobError> {
        for one in &self.config.exports {
            let opened = self.open_first(one).await;
            opened.map_err(|error| error.about_export(&one.name))?;
        }
        if self.config.has_several() {
            let all = adjustable_layers(&self.config.registry, &self.config.layers)?;
            return Ok(guarded(self.served.clone(), &gates(&all))?);
        }
        // The common layers are outermost; the export may have gates of its own.
        let first = self.exports().first().map(|one| one.layers()).unwrap_or_default();
        let own = first.len().saturating_sub(self.config.layers.len());
        *self.gates.lock().expect("no panic under this lock") = gates(&first[own..]);
        Ok(self.served.clone())
    }

    async fn open_first(&self, one: &ExportConfig) -> Result<(), JobError> {
        let (storage, export) = self.config.open_one(EXPORT, one, Weak::new()).await?;
        let export = Arc::new(export);
        self.lock().exports.push(export.clone());
        self.restore_bitmaps(&export).await?;
        self.restore_jobs(&export).await?;
        Ok(self.served.add(storage)?)
    }

    /// Opens one more export, for later clients. On a worker. Returns warnings for its user.
    ///
    /// # Errors
    /// If the name is in use, the device cannot be opened, or the server stops.
    pub async fn add(&self, one: ExportConfig) -> Result<Vec<String>, JobError> {
        self.add_as(one, NamedStorages::add).await
    }

    /// Opens one more export as [`ExportTable::add`] does, which no client finds until [`ExportTable::show`].
    ///
    /// # Errors
    /// Those of [`ExportTable::add`].
    pub async fn add_hidden(&self, one: ExportConfig) -> Result<Vec<String>, JobError> {
        self.add_as(one, NamedStorages::add_hidden).await
    }

    /// Lets clients find the export of this name, or hides it from those that have not opened it.
    pub fn show(&self, name: &str, shown: bool) {
        if shown { self.served.show(name) } else { self.served.hide(name) }
    }

    async fn add_as(&self, one: ExportConfig, add: AddStorage) -> Result<Vec<String>, JobError> {
        if self.config.any_name || self.config.per_client {
            let text = "the server has --any-name or --per-client: it can serve only one export";
            return Err(JobError::request(text));
        }
        self.config.check_one(&one)?;
        let _name = self.reserve(&one.name)?;
        let warnings = Arc::new(Warnings::default());
        let opened = self.config.open_one(EXPORT, &one, Arc::downgrade(&warnings)).await;
        let (storage, export) = opened?;
        self.insert(Some((storage, add)), export).await?;
        Ok(warnings.take())
    }

    /// Opens a disk that no client reaches yet. On a worker.
    ///
    /// # Errors
    /// The errors of [`ExportTable::add`], or if each client would get a device of its own.
    pub async fn add_disk(&self, one: ExportConfig) -> Result<Arc<OpenExport>, JobError> {
        self.config.check_one(&one)?;
        let _name = self.reserve(&one.name)?;
        let (storage, mut export) = self.config.open_one(NODE, &one, Weak::new()).await?;
        if export.shared.is_none() {
            release((storage, export)).await;
            return Err(JobError::request("the device is not one disk that all clients share"));
        }
        export.served = false;
        self.insert(None, export).await
    }

    /// Lists an open export; `storage` is for clients. It is closed if that fails.
    async fn insert(
        &self,
        storage: Option<(NamedStorage, AddStorage)>,
        export: OpenExport,
    ) -> Result<Arc<OpenExport>, JobError> {
        let change = self.changes.lock().await;
        let export = Arc::new(export);
        // For the case that it is to be closed.
        let exports = storage.as_ref().map(|(storage, _)| storage.exports.clone());
        let inserted = async {
            self.restore_bitmaps(&export).await?;
            let listed = async {
                self.restore_jobs(&export).await?;
                self.list(storage, &export)
            };
            let listed = listed.await;
            if listed.is_err() {
                self.keep(&export).await;
            }
            listed
        };
        let inserted = inserted.await;
        drop(change);
        match inserted {
            Ok(()) => Ok(export),
            Err(failure) => {
                release((export, exports)).await;
                Err(failure)
            }
        }
    }

    fn list(
        &self,
        storage: Option<(NamedStorage, AddStorage)>,
        export: &Arc<OpenExport>,
    ) -> Result<(), JobError> {
        let mut entries = self.lock();
        if entries.is_closed {
            return Err(JobError::other("the server stops"));
        }
        if let Some((mut storage, add)) = storage {
            storage.exports = guarded(storage.exports, &self.common_gates())?;
            add(&self.served, storage)?;
        }
        entries.exports.push(export.clone());
        Ok(())
    }

    /// Adds no more exports from now on: the server stops.
    pub async fn close(&self) {
        self.lock().is_closed = true;
        // One that is listed just now gets its bitmaps, or keeps them.
        let _ = blockhaul_io::timeout(LAST_CHANGE, self.changes.lock()).await;
    }

    /// Serves these exports under a name to clients that connect from now on.
    ///
    /// # Errors
    /// If the name is in use.
    pub fn add_name(&self, name: &str, exports: Arc<dyn Exports>) -> Result<(), JobError> {
        let exports = guarded(exports, &self.common_gates())?;
        let name = name.to_string();
        let description = String::new();
        Ok(self.served.add(NamedStorage { name, description, exports, single: true })?)
    }

    /// Ends that for new clients. False: there is none of this name.
    pub fn remove_name(&self, name: &str) -> bool {
        self.served.remove(name)
    }

    /// A device in the form for clients that only read.
    ///
    /// # Errors
    /// If the registry has no layer `readonly`.
    pub fn readonly(&self, device: &Arc<dyn Device>) -> blockhaul_block::Result<Arc<dyn Device>> {
        blockhaul_transfer::readonly(&self.config.registry, device)
    }

    /// The layer that shows only the first `size` bytes of a device.
    ///
    /// # Errors
    /// If the registry has no layer `offset`.
    pub(crate) fn first_bytes(&self, size: u64) -> blockhaul_block::Result<AdjustableLayer> {
        AdjustableLayer::new(&self.config.registry, &format!("offset?range={size}"))
    }

    /// Refuses a name that is in use; others are refused it until the result is dropped.
    ///
    /// # Errors
    /// If the name is in use, too long, or contains a NUL.
    pub fn reserve<'a>(&'a self, name: &'a str) -> Result<NameReservation<'a>, JobError> {
        if name.len() > blockhaul_wire::limits::STRING || name.contains('\0') {
            let text = "the name of an export is longer than 4096 bytes, or contains a NUL";
            return Err(JobError::request(text));
        }
        let mut entries = self.lock();
        if entries.exports.iter().any(|before| before.name == name) {
            let text = format!("two exports have the name {name:?}: choose another");
            return Err(JobError::request(text));
        }
        if entries.reserved.iter().any(|reserved| reserved == name) {
            let text = format!(
                "another request is opening an export named {name:?}: choose another name, or wait for it"
            );
            return Err(JobError::request(text));
        }
        entries.reserved.push(name.to_string());
        Ok(NameReservation { table: self, name })
    }

    /// Serves an export to clients that connect from now on.
    ///
    /// # Errors
    /// If the name is in use, or the server stops.
    pub fn serve(&self, storage: NamedStorage, export: OpenExport) -> Result<(), JobError> {
        self.list(Some((storage, NamedStorages::add)), &Arc::new(export))
    }

    /// The gates for exports that are added.
    pub(crate) fn common_gates(&self) -> Vec<Arc<dyn Gate>> {
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
            let mut entries = self.lock();
            let place = entries.exports.iter().position(|one| one.name == name);
            place.map(|place| entries.exports.remove(place))
        };
        let Some(found) = found else { return false };
        if found.served {
            self.served.remove(name);
        }
        if let Some(shared) = &found.shared {
            shared.switch().close(removed());
        }
        self.keep(&found).await;
        drop(change);
        if let Some(SnapshotOrigin { live, snapshot }) = &found.snapshot_of {
            self.end_snapshot(live, snapshot).await;
        }
        release(found).await;
        true
    }

    /// Keeps what outlives an export that is not in use any more.
    async fn keep(&self, export: &OpenExport) {
        self.keep_bitmaps(export).await;
        if let Some(files) = &self.config.job_files {
            files.detach(&export.name);
        }
    }

    /// Adds a layer to an export, outermost, while clients use it.
    ///
    /// # Errors
    /// If the layer is unknown, would change what clients see, or a mirror job runs; and if requests in
    /// flight do not end within `time`.
    pub async fn add_layer(
        &self,
        export: &OpenExport,
        text: &str,
        time: Duration,
    ) -> Result<(), JobError> {
        let _change = self.changes.lock().await;
        export.check_not_mirrored()?;
        let (shared, stack) = self.changeable(export)?;
        let adjustable = Arc::new(AdjustableLayer::new(&self.config.registry, text)?);
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
    ///
    /// # Errors
    /// If clients would see another disk, the layer keeps writes, or a mirror job runs; and if requests in
    /// flight do not end within `time`.
    pub async fn remove_layer(
        &self,
        export: &OpenExport,
        place: usize,
        time: Duration,
    ) -> Result<(), JobError> {
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
            return Err(JobError::request(text));
        }
        let number = layers[..place].iter().filter(|layer| layer.layer().is_some()).count();
        let new = stack.without_layer(number).await?;
        self.exchange(shared, export, &new, time).await?;
        *export.stack.lock().expect("no panic under this lock") = Some(new);
        export.layers.lock().expect("no panic under this lock").remove(place);
        Ok(())
    }

    /// The changeable parts of an export.
    ///
    /// # Errors
    /// If requests are logged, or each client has a device of its own.
    pub fn changeable<'a>(
        &self,
        export: &'a OpenExport,
    ) -> Result<(&'a SharedDevice, Stack), JobError> {
        let stack = export.stack.lock().expect("no panic under this lock").clone();
        match (&export.shared, stack) {
            _ if self.config.trace => {
                Err(JobError::request("with --trace, layers cannot be changed"))
            }
            (Some(shared), Some(stack)) => Ok((shared, stack)),
            _ => Err(JobError::request(format!(
                "each client of export {:?} has its own device and layers",
                export.name
            ))),
        }
    }

    /// Moves clients to another stack over the same storage, when their requests in flight have
    /// ended and the writes held by a layer are written.
    async fn exchange(
        &self,
        shared: &SharedDevice,
        export: &OpenExport,
        new: &Stack,
        time: Duration,
    ) -> Result<(), JobError> {
        let new = self.client_device(export, new).await?;
        let old = shared.switch().device();
        let carry = async || {
            let can = old.facts().can;
            if can.contains(Can::WRITE | Can::FLUSH) { old.flush().await } else { Ok(()) }
        };
        shared.switch().swap(new, Barrier::Within(time), carry).await?;
        Ok(())
    }
}

/// Drops what is open. Not on a worker: it may wait for its own server to end, whose connections workers
/// close.
async fn release(opened: impl Send + 'static) {
    let _ = blockhaul_io::offload(move || drop(opened)).await;
}

fn not_transparent(name: &str) -> JobError {
    JobError::request(format!(
        "{name} cannot be added or removed while the server runs: clients would see another disk, or it \
         decides about clients"
    ))
}
