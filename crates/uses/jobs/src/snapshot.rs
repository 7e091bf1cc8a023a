//! Points in time and dirty bitmaps of exports in use.

use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use blockhaul_block::{Device, Error, fence};
use blockhaul_catalog::{Barrier, Named, Shared, Stack};
use blockhaul_snapshot::{Bitmap, Changes, Options, Remaining, Snapshot, Trim, tracking};

use crate::error::JobError;
use crate::export::{OpenExport, SnapshotOrigin};
use crate::export_table::ExportTable;

/// Granularity of bitmaps, in bytes, unless another one is given.
pub const DEFAULT_GRANULARITY: u64 = 64 << 10;

/// Maximum time for the last flush of a device whose bitmaps outlive the server.
const LAST_FLUSH: Duration = Duration::from_secs(30);

/// Maximum time for requests in flight to end when a point in time begins, by default.
pub(crate) const DRAIN_LIMIT: Duration = Duration::from_secs(30);

/// A bitmap to be added.
pub struct NewBitmap<'a> {
    /// Its name.
    pub name: &'a str,
    /// In bytes.
    pub granularity: u64,
    /// It outlives the server, if bitmaps are kept.
    pub kept: bool,
}

/// How a point in time of a disk begins, and which bitmaps begin or end with it.
pub struct SnapshotConfig {
    /// How old contents are saved.
    pub options: Options,
    /// The bitmap that the point in time shows, as it was then.
    pub bitmap: Option<String>,
    /// Whether that bitmap is clean from then on.
    pub clears: bool,
    /// The name of a bitmap that begins with the point in time.
    pub start: Option<String>,
    /// Whether readers can release parts of the point in time.
    pub trim: Trim,
    /// Maximum time for requests in flight to end.
    pub within: Duration,
}

impl SnapshotConfig {
    /// A point in time at which a bitmap of this name begins, for the next increment.
    pub fn with_new_bitmap(name: impl Into<String>) -> SnapshotConfig {
        SnapshotConfig { start: Some(name.into()), ..SnapshotConfig::default() }
    }

    /// A point in time with what this bitmap marks. The bitmap is clean from then on; if the backup fails,
    /// everything that it marked is marked again.
    pub fn from_bitmap(name: impl Into<String>) -> SnapshotConfig {
        SnapshotConfig { bitmap: Some(name.into()), ..SnapshotConfig::default() }
    }
}

impl Default for SnapshotConfig {
    /// No bitmaps; a bitmap that is named is handed over. Readers can release parts, and requests in flight
    /// have 30 s to end.
    fn default() -> SnapshotConfig {
        SnapshotConfig {
            options: Options::default(),
            bitmap: None,
            clears: true,
            start: None,
            trim: Trim::Releases,
            within: DRAIN_LIMIT,
        }
    }
}

/// Where the disk of a point in time differs from the target of its job.
#[derive(Clone)]
pub struct JobMap {
    /// The blocks.
    pub map: Remaining,
    /// The job is resumed: what differs now is to be copied, and the view shows it as this bitmap.
    pub resumed: Option<String>,
}

/// A change of bitmaps at a point in time. It cannot fail.
pub type BitmapStep = Box<dyn Fn() + Send>;

/// A point in time that has begun.
pub struct OpenSnapshot {
    /// It is kept until it ends.
    pub snapshot: Snapshot,
    /// The disk as it was.
    pub view: Arc<dyn Device>,
    /// What the bitmap held, for the case that nobody has made use of it.
    pub frozen: Option<FrozenBitmap>,
}

/// What was dirty at a point in time.
#[derive(Clone)]
pub struct FrozenBitmap {
    live: Arc<Bitmap>,
    dirty: Arc<Bitmap>,
}

impl FrozenBitmap {
    /// What is dirty now; the bitmap is clean from then on.
    pub fn take(live: Arc<Bitmap>) -> FrozenBitmap {
        let frozen = FrozenBitmap::later(live);
        frozen.fill(true);
        frozen
    }

    /// The same for a later moment, when [`FrozenBitmap::fill`] is called.
    pub fn later(live: Arc<Bitmap>) -> FrozenBitmap {
        let dirty = live.frozen();
        dirty.clear();
        FrozenBitmap { dirty: Arc::new(dirty), live }
    }

    /// Takes what is dirty now; `clears`: the bitmap is clean from then on.
    pub fn fill(&self, clears: bool) {
        if clears {
            self.live.hand_over(&self.dirty);
        } else {
            self.dirty.merge(&self.live);
        }
    }

    /// The dirty ranges, as offset and length in bytes.
    pub fn ranges(&self) -> Vec<(u64, u64)> {
        self.dirty.ranges()
    }

    /// As a bitmap that does not change.
    pub fn dirty(&self) -> &Arc<Bitmap> {
        &self.dirty
    }

    /// It is dirty still.
    pub fn give_back(&self) {
        self.live.give_back(&self.dirty);
    }

    /// It was copied, or somebody else is responsible for it. Until then a server that ends keeps it
    /// as dirty.
    pub fn settle(&self) {
        self.live.settle(&self.dirty);
    }
}

/// A point in time that is about to begin.
struct PreparedSnapshot<'a> {
    export: &'a OpenExport,
    shared: &'a Shared,
    /// What clients use from then on.
    device: Option<Arc<dyn Device>>,
    snapshot: Snapshot,
    /// The bitmap that it shows.
    bitmap: Option<Arc<Bitmap>>,
    clears: bool,
    frozen: OnceLock<FrozenBitmap>,
    tracked: Option<JobMap>,
    /// What a job that is resumed copies.
    rest: OnceLock<Arc<Bitmap>>,
}

impl PreparedSnapshot<'_> {
    /// No request is in flight: what was written is in the point in time, flushed or not.
    fn take(&self) {
        if let Some(live) = self.bitmap.clone() {
            let frozen = FrozenBitmap::later(live);
            frozen.fill(self.clears);
            let _ = self.frozen.set(frozen);
        }
        let Some(JobMap { map, resumed }) = &self.tracked else { return };
        let ranges = match (resumed, self.frozen.get()) {
            (Some(_), _) => map.ranges(),
            (None, Some(frozen)) => frozen.ranges(),
            (None, None) => vec![(0, u64::MAX)],
        };
        map.begin(&ranges);
        if let Some(rest) = self.rest.get() {
            ranges.iter().for_each(|&(at, len)| rest.set(at, len));
        }
    }

    fn begun(&self, trim: Trim) -> Result<OpenSnapshot, JobError> {
        let frozen = self.frozen.get().cloned();
        let shown =
            frozen.iter().map(|frozen| &frozen.dirty).chain(self.rest.get()).cloned().collect();
        let view = self.snapshot.view(shown, trim).ok_or_else(Error::misfit)?;
        Ok(OpenSnapshot { snapshot: self.snapshot.clone(), view: fence(view), frozen })
    }

    /// It does not begin.
    fn undo(&self, start: Option<&str>) {
        self.snapshot.end();
        self.export.snapshots().retain(|other| !other.is_same(&self.snapshot));
        if let Some(JobMap { map, resumed: None }) = &self.tracked {
            self.export.maps().retain(|other| !other.is_same(map));
        }
        if let Some(name) = start {
            self.export.bitmaps().retain(|bitmap| bitmap.name() != name);
        }
        if let Some(frozen) = self.frozen.get() {
            frozen.give_back();
        }
    }
}

/// Exchanges the devices of all exports at a moment when the requests of all of them are held. The
/// last one is exchanged first; after it, nothing can fail.
fn exchange_together<'a>(
    exports: &'a [PreparedSnapshot<'a>],
    barrier: Barrier,
    last: &'a [BitmapStep],
) -> Pin<Box<dyn Future<Output = blockhaul_block::Result<()>> + 'a>> {
    Box::pin(async move {
        let Some((first, others)) = exports.split_first() else {
            last.iter().for_each(|change| change());
            return Ok(());
        };
        let device = first.device.clone().ok_or_else(Error::misfit)?;
        let rest = async || {
            exchange_together(others, barrier, last).await?;
            first.take();
            Ok(())
        };
        first.shared.switch().swap(device, barrier, rest).await.map(drop)
    })
}

impl ExportTable {
    /// Begins a point in time of an export: at a moment when none of its requests is in flight.
    ///
    /// # Errors
    /// If the export cannot have a point in time, lacks a bitmap, or requests in flight do not end in time.
    /// Bitmaps are as they were then.
    pub async fn begin_snapshot(
        &self,
        export: &OpenExport,
        begin: &SnapshotConfig,
    ) -> Result<OpenSnapshot, JobError> {
        let mut begun = self.begin_snapshots(&[(export, begin, None)], &[]).await?;
        begun.pop().ok_or_else(|| JobError::from(Error::misfit()))
    }

    /// Begins the same point in time of several exports: at a moment when no request of any of them
    /// is in flight. Then `bitmap_steps` changes bitmaps, too.
    ///
    /// # Errors
    /// Those of [`ExportTable::begin_snapshot`], of any of the exports.
    pub async fn begin_snapshots(
        &self,
        exports: &[(&OpenExport, &SnapshotConfig, Option<JobMap>)],
        bitmap_steps: &[BitmapStep],
    ) -> Result<Vec<OpenSnapshot>, JobError> {
        let _change = self.change().await;
        let mut prepared = Vec::new();
        let begun = async {
            for (export, begin, tracked) in exports {
                prepared.push(self.prepare_snapshot(export, begin, tracked.clone()).await?);
            }
            let within = exports.iter().map(|(_, begin, _)| begin.within).max();
            let barrier = Barrier::Within(within.unwrap_or_default());
            exchange_together(&prepared, barrier, bitmap_steps).await?;
            let begun = prepared.iter().zip(exports);
            begun.map(|(one, (_, begin, _))| one.begun(begin.trim)).collect()
        };
        let begun: Result<Vec<OpenSnapshot>, JobError> = begun.await;
        if begun.is_err() {
            for (one, (_, begin, _)) in prepared.iter().zip(exports) {
                one.undo(begin.start.as_deref());
            }
        }
        begun
    }

    /// Makes all that a point in time needs, but for the exchange of the device.
    async fn prepare_snapshot<'a>(
        &self,
        export: &'a OpenExport,
        begin: &SnapshotConfig,
        tracked: Option<JobMap>,
    ) -> Result<PreparedSnapshot<'a>, JobError> {
        let (shared, stack) = self.changeable(export)?;
        let facts = shared.switch().device().facts();
        export.check_writable(&facts)?;
        let bitmap = begin.bitmap.as_deref().map(|name| export.bitmap(name)).transpose()?;
        let snapshot = Snapshot::new(facts.size, &begin.options)?;
        if let Some(name) = &begin.start {
            export.start_bitmap(Bitmap::new(name, facts.size, DEFAULT_GRANULARITY)?)?;
        }
        let rest = OnceLock::new();
        match &tracked {
            None => {}
            Some(JobMap { resumed: Some(name), .. }) => {
                let _ = rest.set(Arc::new(Bitmap::new(name, facts.size, DEFAULT_GRANULARITY)?));
            }
            Some(JobMap { map, .. }) => export.maps().push(map.clone()),
        }
        export.snapshots().push(snapshot.clone());
        let made = async {
            if begin.start.is_some() {
                self.write_bitmaps(export)?;
            }
            self.client_device(export, &stack).await
        };
        let frozen = OnceLock::new();
        let device = made.await;
        let clears = begin.clears;
        let mut prepared = PreparedSnapshot {
            export,
            shared,
            device: None,
            snapshot,
            bitmap,
            clears,
            frozen,
            tracked,
            rest,
        };
        match device {
            Ok(device) => {
                prepared.device = Some(device);
                Ok(prepared)
            }
            Err(failure) => {
                prepared.undo(begin.start.as_deref());
                Err(failure)
            }
        }
    }

    /// Adds a clean bitmap, which tracks writes from now on; shown to clients that connect later.
    /// `kept`: it outlives the server, if the server keeps bitmaps.
    ///
    /// # Errors
    /// If the name is in use, the granularity is invalid, or requests in flight do not end within `time`.
    pub async fn add_bitmap(
        &self,
        export: &OpenExport,
        new: NewBitmap<'_>,
        time: Duration,
    ) -> Result<(), JobError> {
        let NewBitmap { name, granularity, kept } = new;
        let _change = self.change().await;
        let (shared, stack) = self.changeable(export)?;
        let size = shared.switch().device().facts().size;
        let bitmap = Bitmap::new(name, size, granularity)?;
        bitmap.keep(kept);
        export.start_bitmap(bitmap)?;
        let exchanged = async {
            self.write_bitmaps(export)?;
            self.refresh_device(export, shared, &stack, Barrier::Within(time)).await
        };
        let exchanged = exchanged.await;
        if exchanged.is_err() {
            export.bitmaps().retain(|bitmap| bitmap.name() != name);
        }
        exchanged
    }

    /// The file of bitmaps says which are in use.
    fn write_bitmaps(&self, export: &OpenExport) -> Result<(), JobError> {
        match &self.config().bitmap_files {
            None => Ok(()),
            Some(files) => files.write(export, false),
        }
    }

    /// Continues the bitmaps of an earlier server, before the first client can write.
    ///
    /// # Errors
    /// If the file of the bitmaps cannot be read or written.
    pub(crate) async fn restore_bitmaps(&self, export: &OpenExport) -> Result<(), JobError> {
        let Some(files) = &self.config().bitmap_files else { return Ok(()) };
        let Some(size) = export.device().map(|device| device.facts().size) else { return Ok(()) };
        let kept = files.read(&export.name, &export.storage(), size)?;
        for (name, why) in &kept.inconsistent {
            log::warn!(
                export = export.name;
                "bitmap {name:?} of export {:?} is inconsistent: {why}; remove it, and make a full backup",
                export.name
            );
        }
        if kept.bitmaps.is_empty() && kept.inconsistent.is_empty() {
            return Ok(());
        }
        *export.bitmaps() = kept.bitmaps;
        *export.inconsistent() = kept.inconsistent;
        files.write(export, false)?;
        let (shared, stack) = self.changeable(export)?;
        self.refresh_device(export, shared, &stack, Barrier::None).await
    }

    /// Marks what clients write for the jobs of an earlier server, before the first client can write.
    ///
    /// # Errors
    /// If the device cannot be exchanged.
    pub(crate) async fn restore_jobs(&self, export: &OpenExport) -> Result<(), JobError> {
        let Some(files) = self.config().job_files.clone() else { return Ok(()) };
        let Some(size) = export.device().map(|device| device.facts().size) else { return Ok(()) };
        let name = export.name.clone();
        let storage = export.storage();
        let attached = blockhaul_io::offload(move || files.attach(&name, &storage, size)).await;
        let maps = attached.unwrap_or_default();
        if maps.is_empty() {
            return Ok(());
        }
        *export.maps() = maps;
        let (shared, stack) = self.changeable(export)?;
        self.refresh_device(export, shared, &stack, Barrier::None).await
    }

    /// A job does not outlive the server any more: its map is no longer needed.
    pub(crate) async fn forget_map(&self, export: &OpenExport, map: &Remaining) {
        let _change = self.change().await;
        export.maps().retain(|other| !other.is_same(map));
        let Ok((shared, stack)) = self.changeable(export) else { return };
        // It stays in the path of the requests, and costs little.
        if let Err(failure) = self.refresh_device(export, shared, &stack, Barrier::None).await {
            log::debug!("the layer of the map of an ended job stays: {failure}");
        }
    }

    /// Keeps the bitmaps of an export that clients cannot write to any more.
    pub(crate) async fn keep_bitmaps(&self, export: &OpenExport) {
        let Some(files) = &self.config().bitmap_files else { return };
        if export.snapshot_of.is_some() || export.shared.is_none() {
            return;
        }
        let kept = async {
            // Bitmaps do not show what the device would still lose.
            flush_last(export).await?;
            files.write(export, true)
        };
        if let Err(failure) = kept.await {
            log::error!(export = export.name; "{failure}: they are inconsistent now");
        }
    }

    /// Keeps the bitmaps of all exports, at the end of the server.
    pub(crate) async fn keep_all_bitmaps(&self) {
        for export in self.exports() {
            self.keep_bitmaps(&export).await;
        }
    }

    /// Removes a bitmap.
    ///
    /// # Errors
    /// If the export has no such bitmap, or the file of the bitmaps cannot be written.
    pub async fn remove_bitmap(&self, export: &OpenExport, name: &str) -> Result<(), JobError> {
        let _change = self.change().await;
        let (shared, stack) = self.changeable(export)?;
        if export.forget_inconsistent(name) {
            return self.write_bitmaps(export);
        }
        export.bitmap(name)?;
        export.bitmaps().retain(|bitmap| bitmap.name() != name);
        self.write_bitmaps(export)?;
        // Bitmaps may miss no write: not one begins on the old device after another on the new one.
        self.refresh_device(export, shared, &stack, Barrier::None).await
    }

    /// Moves clients to the same stack under the present bitmaps and points in time.
    ///
    /// # Errors
    /// If a layer cannot be put over the device, or requests in flight do not end in time.
    pub(crate) async fn refresh_device(
        &self,
        export: &OpenExport,
        shared: &Shared,
        stack: &Stack,
        barrier: Barrier,
    ) -> Result<(), JobError> {
        let new = self.client_device(export, stack).await?;
        shared.switch().swap(new, barrier, async || Ok(())).await?;
        Ok(())
    }

    /// Ends a point in time. Writes in flight are finished as they began.
    pub async fn end_snapshot(&self, export: &OpenExport, snapshot: &Snapshot) {
        let _change = self.change().await;
        snapshot.end();
        export.snapshots().retain(|other| !other.is_same(snapshot));
        let Ok((shared, stack)) = self.changeable(export) else { return };
        // It stays in the path of the requests, and does nothing there.
        if let Err(failure) = self.refresh_device(export, shared, &stack, Barrier::None).await {
            log::debug!("the layer of an ended snapshot stays: {failure}");
        }
    }

    /// The device for clients: a stack with the bitmaps and the points in time of its export over it.
    ///
    /// # Errors
    /// If a layer cannot be put over the device.
    pub(crate) async fn client_device(
        &self,
        export: &OpenExport,
        stack: &Stack,
    ) -> Result<Arc<dyn Device>, JobError> {
        let mut device = self.config().served(stack, export.write)?;
        let bitmaps = export.bitmaps().clone();
        let tracking = (!bitmaps.is_empty()).then(|| tracking(bitmaps));
        let marking = export.mirrored().as_ref().map(Changes::layer);
        let maps = export.maps().clone();
        let maps = maps.iter().map(Remaining::layer);
        let snapshots = export.snapshots().clone();
        let snapshots = snapshots.iter().map(Snapshot::layer);
        for layer in tracking.into_iter().chain(marking).chain(maps).chain(snapshots) {
            device = Stack::over(device).with_layer(layer).await?.device().clone();
        }
        Ok(device)
    }

    /// Begins a point in time and serves it as another export, read-only.
    ///
    /// # Errors
    /// If the name is in use, and those of [`ExportTable::begin_snapshot`].
    pub async fn add_snapshot(
        &self,
        live: Arc<OpenExport>,
        name: &str,
        begin: &SnapshotConfig,
    ) -> Result<(), JobError> {
        let _name = self.reserve(name)?;
        let OpenSnapshot { snapshot, view, frozen } = self.begin_snapshot(&live, begin).await?;
        frozen.iter().for_each(FrozenBitmap::settle);
        let added = self.serve_snapshot(live.clone(), name, snapshot.clone(), view).await;
        if added.is_err() {
            self.end_snapshot(&live, &snapshot).await;
        }
        added
    }

    async fn serve_snapshot(
        &self,
        live: Arc<OpenExport>,
        name: &str,
        snapshot: Snapshot,
        view: Arc<dyn Device>,
    ) -> Result<(), JobError> {
        let _change = self.change().await;
        let description = format!("snapshot of {}", live.storage());
        let shared = Shared::new(name, &description, view);
        let running = OpenExport {
            name: name.to_string(),
            description: description.clone(),
            storage: std::sync::Mutex::new(description.clone()),
            write: false,
            served: true,
            single: true,
            own: None,
            shared: Some(shared.clone()),
            stack: std::sync::Mutex::default(),
            layers: std::sync::Mutex::default(),
            snapshots: std::sync::Mutex::default(),
            bitmaps: std::sync::Mutex::default(),
            inconsistent: std::sync::Mutex::default(),
            mirrored: std::sync::Mutex::default(),
            maps: std::sync::Mutex::default(),
            claims: blockhaul_catalog::Claims::for_process(),
            owner: blockhaul_catalog::ClaimOwner::default(),
            written: std::sync::Arc::default(),
            snapshot_of: Some(SnapshotOrigin { live, snapshot }),
        };
        let storage = Named { name: name.to_string(), description, exports: shared, single: true };
        self.serve(storage, running)
    }
}

/// Makes durable what clients have written to an export with bitmaps that outlive the server.
async fn flush_last(export: &OpenExport) -> Result<(), JobError> {
    let has_kept = export.bitmaps().iter().any(|bitmap| bitmap.is_kept());
    let Some(shared) = export.shared.as_ref().filter(|_| has_kept) else { return Ok(()) };
    let flushed = blockhaul_io::timeout(LAST_FLUSH, shared.flush()).await;
    let why = match flushed {
        Ok(Ok(())) => return Ok(()),
        Ok(Err(error)) => error.to_string(),
        Err(_) => format!("it takes longer than {} s", LAST_FLUSH.as_secs()),
    };
    let text = format!("cannot flush the device before its bitmaps are kept: {why}");
    Err(JobError::other(text))
}
