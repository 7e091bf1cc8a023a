//! Points in time of exports in use.

use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use blockhaul_block::{Device, Error, fence};
use blockhaul_catalog::{Barrier, NamedStorage, SharedDevice, Stack};
use blockhaul_snapshot::{
    ChangeTracker, DirtyBitmap, PersistentDirtyMap, PointOptions, Snapshot, ViewTrim, tracking,
};

use crate::error::JobError;
use crate::export::{OpenExport, SnapshotOrigin};
use crate::export_bitmaps::{DEFAULT_GRANULARITY, FrozenBitmap};
use crate::export_table::ExportTable;

/// Maximum time for requests in flight to end when a point in time begins, by default.
pub(crate) const DRAIN_LIMIT: Duration = Duration::from_secs(30);

/// How a point in time of a disk begins, and which bitmaps begin or end with it.
pub struct SnapshotConfig {
    /// How old contents are saved.
    pub options: PointOptions,
    /// The bitmap that the point in time shows, as it was then.
    pub bitmap: Option<String>,
    /// Whether that bitmap is clean from then on.
    pub clears: bool,
    /// The name of a bitmap that begins with the point in time.
    pub start: Option<String>,
    /// Whether readers can release parts of the point in time.
    pub trim: ViewTrim,
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
            options: PointOptions::default(),
            bitmap: None,
            clears: true,
            start: None,
            trim: ViewTrim::Releases,
            within: DRAIN_LIMIT,
        }
    }
}

/// Where the disk of a point in time differs from the target of its job.
#[derive(Clone)]
pub struct JobMap {
    /// The blocks.
    pub map: PersistentDirtyMap,
    /// The job is resumed: what differs now is to be copied, and the view shows it as this bitmap.
    pub resumed: Option<String>,
}

/// A change of bitmaps at a point in time. It cannot fail.
pub type BitmapStep = Box<dyn Fn() + Send>;

/// A point in time that has begun.
pub struct OpenSnapshot {
    /// The point in time, which is kept until it is ended.
    pub snapshot: Snapshot,
    /// The disk as it was.
    pub view: Arc<dyn Device>,
    /// The contents of the bitmap at that moment.
    pub frozen: Option<FrozenBitmap>,
}

/// A point in time that is about to begin.
struct PreparedSnapshot<'a> {
    export: &'a OpenExport,
    shared: &'a SharedDevice,
    /// The device that clients use from then on.
    device: Option<Arc<dyn Device>>,
    snapshot: Snapshot,
    /// The bitmap that it shows.
    bitmap: Option<Arc<DirtyBitmap>>,
    clears: bool,
    frozen: OnceLock<FrozenBitmap>,
    tracked: Option<JobMap>,
    /// The blocks that a resumed job copies.
    rest: OnceLock<Arc<DirtyBitmap>>,
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

    fn open(&self, trim: ViewTrim) -> Result<OpenSnapshot, JobError> {
        let frozen = self.frozen.get().cloned();
        let shown =
            frozen.iter().map(|frozen| frozen.dirty()).chain(self.rest.get()).cloned().collect();
        let view = self.snapshot.view(shown, trim).ok_or_else(Error::misfit)?;
        Ok(OpenSnapshot { snapshot: self.snapshot.clone(), view: fence(view), frozen })
    }

    /// Takes back the preparations of a point in time that does not begin.
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
    /// The errors of [`ExportTable::begin_snapshot`], of any of the exports.
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
            begun.map(|(one, (_, begin, _))| one.open(begin.trim)).collect()
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
            export.start_bitmap(DirtyBitmap::new(name, facts.size, DEFAULT_GRANULARITY)?)?;
        }
        let rest = OnceLock::new();
        match &tracked {
            None => {}
            Some(JobMap { resumed: Some(name), .. }) => {
                let _ =
                    rest.set(Arc::new(DirtyBitmap::new(name, facts.size, DEFAULT_GRANULARITY)?));
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

    /// Moves clients to the same stack under the present bitmaps and points in time.
    ///
    /// # Errors
    /// If a layer cannot be put over the device, or requests in flight do not end in time.
    pub(crate) async fn refresh_device(
        &self,
        export: &OpenExport,
        shared: &SharedDevice,
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
        let marking = export.mirrored().as_ref().map(ChangeTracker::layer);
        let maps = export.maps().clone();
        let maps = maps.iter().map(PersistentDirtyMap::layer);
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
        let shared = SharedDevice::new(name, &description, view);
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
            bitmap_store: std::sync::Mutex::default(),
            inconsistent: std::sync::Mutex::default(),
            mirrored: std::sync::Mutex::default(),
            maps: std::sync::Mutex::default(),
            claims: blockhaul_catalog::Claims::for_process(),
            owner: blockhaul_catalog::ClaimOwner::default(),
            written: std::sync::Arc::default(),
            snapshot_of: Some(SnapshotOrigin { live, snapshot }),
        };
        let storage =
            NamedStorage { name: name.to_string(), description, exports: shared, single: true };
        self.serve(storage, running)
    }
}
