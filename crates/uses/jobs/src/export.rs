//! An open export, for a server and for `ctl`.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use blockhaul_block::{Can, Device, Error, Facts, Kind};
use blockhaul_catalog::{
    AdjustableLayer, BitmapStore, ClaimOwner, Claims, Exports, SharedDevice, Stack, TargetClaims,
};
use blockhaul_snapshot::{BITMAPS_MAX, ChangeTracker, DirtyBitmap, PersistentDirtyMap, Snapshot};
use blockhaul_transfer::TransferErrorKind;

use crate::error::JobError;

/// An open export of a server: a disk that clients use, with its layers, bitmaps and points in time.
pub struct OpenExport {
    /// The name for clients.
    pub name: String,
    /// The text for users; may be empty.
    pub description: String,
    /// The description of the device, as typed.
    pub storage: Mutex<String>,
    /// Whether clients may write.
    pub write: bool,
    /// Whether clients reach the export by its name. Otherwise it is a disk of the monitor protocol, which
    /// exports it under other names.
    pub served: bool,
    /// Whether it is one device, without exports of its own.
    pub(crate) single: bool,
    /// Its own exports, which may report their state.
    pub(crate) own: Option<Weak<dyn Exports>>,
    /// The device, if all clients share it.
    pub shared: Option<Arc<SharedDevice>>,
    /// The stack of the device: to be closed when no worker needs it any more.
    pub stack: Mutex<Option<Stack>>,
    /// Its layers and gates, innermost first.
    pub(crate) layers: Mutex<Vec<Arc<AdjustableLayer>>>,
    /// Its points in time, over the layers.
    pub(crate) snapshots: Mutex<Vec<Snapshot>>,
    /// Its dirty bitmaps, below the points in time.
    pub(crate) bitmaps: Mutex<Vec<Arc<DirtyBitmap>>>,
    /// The image of the disk stores those of its bitmaps that are kept.
    pub(crate) bitmap_store: Mutex<Option<Arc<dyn BitmapStore>>>,
    /// Names of bitmaps from earlier that may lack writes, and why.
    pub(crate) inconsistent: Mutex<Vec<(String, String)>>,
    /// The changes that a mirror of the disk notes; between the bitmaps and the points in time.
    pub(crate) mirrored: Mutex<Option<ChangeTracker>>,
    /// Where its disk differs from the targets of jobs that outlive the server.
    pub(crate) maps: Mutex<Vec<PersistentDirtyMap>>,
    /// The storages that are open.
    pub claims: Arc<Claims>,
    /// The owner of the claims of the disk.
    pub owner: ClaimOwner,
    /// A job writes to it, below its bitmaps and points in time.
    pub(crate) written: Arc<AtomicBool>,
    /// The export of which this one is a point in time.
    pub snapshot_of: Option<SnapshotOrigin>,
}

/// An export that shows a point in time of another one.
pub struct SnapshotOrigin {
    /// The export in use.
    pub live: Arc<OpenExport>,
    /// Its point in time.
    pub snapshot: Snapshot,
}

impl OpenExport {
    /// Whether the export is one device, without exports of its own.
    pub fn is_one_device(&self) -> bool {
        self.single
    }

    /// The state of storage that has exports of its own, if there is anything to report.
    pub fn state(&self) -> Option<String> {
        self.own.as_ref()?.upgrade()?.state()
    }

    /// The current layers and gates, innermost first.
    pub fn layers(&self) -> Vec<Arc<AdjustableLayer>> {
        self.layers.lock().expect("no panic under this lock").clone()
    }

    /// The description of the device, as typed.
    pub fn storage(&self) -> String {
        self.storage.lock().expect("no panic under this lock").clone()
    }

    /// The current device, if all clients share it.
    pub fn device(&self) -> Option<Arc<dyn Device>> {
        self.shared.as_ref().map(|shared| shared.switch().device())
    }

    /// The dirty bitmaps of the export.
    pub fn bitmaps(&self) -> MutexGuard<'_, Vec<Arc<DirtyBitmap>>> {
        self.bitmaps.lock().expect("no panic under this lock")
    }

    /// The bitmap of this name.
    ///
    /// # Errors
    /// If the export has no such bitmap, or it is inconsistent.
    pub fn bitmap(&self, name: &str) -> Result<Arc<DirtyBitmap>, JobError> {
        self.check_consistent(name)?;
        let all = self.bitmaps();
        let found = all.iter().find(|bitmap| bitmap.name() == name).cloned();
        found.ok_or_else(|| {
            let known: Vec<_> = all.iter().map(|bitmap| format!("{:?}", bitmap.name())).collect();
            let known = if known.is_empty() {
                "it has none".to_string()
            } else {
                format!("known are {}", known.join(", "))
            };
            JobError::request(format!("export {:?} has no bitmap {name:?}; {known}", self.name))
        })
    }

    /// Whether the image of the disk stores those of its bitmaps that are kept.
    pub fn has_bitmap_store(&self) -> bool {
        self.bitmap_store().is_some()
    }

    /// The image of the disk, if it stores bitmaps.
    pub(crate) fn bitmap_store(&self) -> Option<Arc<dyn BitmapStore>> {
        self.bitmap_store.lock().expect("no panic under this lock").clone()
    }

    /// Exchanges the images that store bitmaps: the disks of both exports were exchanged. The bitmaps stay
    /// with the exports.
    pub fn exchange_bitmap_stores(&self, other: &OpenExport) {
        let own = self.bitmap_store.lock().expect("no panic under this lock").take();
        let theirs = std::mem::replace(
            &mut *other.bitmap_store.lock().expect("no panic under this lock"),
            own,
        );
        *self.bitmap_store.lock().expect("no panic under this lock") = theirs;
    }

    /// Checks whether the image of the disk can store one more bitmap.
    ///
    /// # Errors
    /// If the image, its version, the name or the granularity is not for that.
    pub async fn check_storable(&self, name: &str, granularity: u64) -> Result<(), JobError> {
        let Some(store) = self.bitmap_store() else {
            let text = format!("{:?} has no image that stores bitmaps", self.name);
            return Err(JobError::request(text));
        };
        Ok(store.check(name, granularity).await?)
    }

    /// Names of bitmaps that may lack writes, and why.
    pub fn inconsistent(&self) -> MutexGuard<'_, Vec<(String, String)>> {
        self.inconsistent.lock().expect("no panic under this lock")
    }

    fn check_consistent(&self, name: &str) -> Result<(), JobError> {
        let all = self.inconsistent();
        match all.iter().find(|(other, _)| other == name) {
            None => Ok(()),
            Some((_, why)) => Err(JobError::request(format!(
                "bitmap {name:?} of export {:?} is inconsistent: {why}; remove it with bitmap-remove, and make a full backup",
                self.name
            ))),
        }
    }

    /// Forgets an inconsistent bitmap. False: there is none of this name.
    pub(crate) fn forget_inconsistent(&self, name: &str) -> bool {
        let mut all = self.inconsistent();
        let before = all.len();
        all.retain(|(other, _)| other != name);
        all.len() < before
    }

    /// Makes dirty in the bitmap `to` what is dirty in the bitmaps `from`.
    ///
    /// # Errors
    /// If the export lacks one of the bitmaps, or one is inconsistent. Nothing is merged then.
    pub fn merge_bitmaps(&self, to: &str, from: &[String]) -> Result<(), JobError> {
        let to = self.bitmap(to)?;
        let from = from.iter().map(|name| self.bitmap(name)).collect::<Result<Vec<_>, _>>()?;
        from.iter().for_each(|other| to.merge(other));
        Ok(())
    }

    /// Adds a bitmap, which shows what is written once the device is exchanged for one that tracks it.
    ///
    /// # Errors
    /// If the export has a bitmap of this name, or as many as it can have.
    pub(crate) fn start_bitmap(&self, bitmap: DirtyBitmap) -> Result<(), JobError> {
        self.check_consistent(bitmap.name())?;
        let mut all = self.bitmaps();
        if all.iter().any(|other| other.name() == bitmap.name()) {
            let name = bitmap.name();
            let text = format!("export {:?} has a bitmap {name:?} already", self.name);
            return Err(JobError::request(text));
        }
        if all.len() >= BITMAPS_MAX {
            let text = format!(
                "export {:?} has {BITMAPS_MAX} bitmaps, and cannot have more: remove those that no backup needs any \
                 more with bitmap-remove",
                self.name
            );
            return Err(JobError::request(text));
        }
        all.push(Arc::new(bitmap));
        Ok(())
    }

    /// Begins to write to the disk as the target of a job, until the result is dropped. Refuses a disk that is
    /// the source or the target of a job, or has a point in time: it would not see what the job writes.
    ///
    /// # Errors
    /// If a job or a point in time uses the disk, or other storage claims do not fit.
    pub(crate) fn begin_writing(&self) -> Result<TargetGuard, JobError> {
        let is_read = !self.snapshots().is_empty() || self.mirrored().is_some();
        if is_read || self.written.swap(true, Ordering::SeqCst) {
            let name = &self.name;
            let text = format!("a job or a point in time uses {name:?}: choose another target");
            return Err(JobError::new(TransferErrorKind::Open, text));
        }
        let mut writing = TargetGuard { written: self.written.clone(), _claims: None };
        writing._claims = Some(self.claims.claim_as_target(&self.owner)?);
        Ok(writing)
    }

    /// Refuses a job or a point in time of a disk that does not change, or that a job writes.
    ///
    /// # Errors
    /// If the disk is read-only, or the target of a job.
    pub(crate) fn check_writable(&self, facts: &Facts) -> Result<(), JobError> {
        if self.written.load(Ordering::SeqCst) {
            let name = &self.name;
            let text = format!("{name:?} is the target of a job: wait until the job has ended");
            return Err(JobError::new(TransferErrorKind::Open, text));
        }
        if facts.can.contains(Can::WRITE) {
            return Ok(());
        }
        let name = &self.name;
        let text = format!("export {name:?} is read-only: it does not change, copy it as it is");
        Err(JobError::request(text))
    }

    /// The changes that a mirror of the export notes.
    pub(crate) fn mirrored(&self) -> MutexGuard<'_, Option<ChangeTracker>> {
        self.mirrored.lock().expect("no panic under this lock")
    }

    /// Where the disk differs from the targets of jobs.
    pub fn maps(&self) -> MutexGuard<'_, Vec<PersistentDirtyMap>> {
        self.maps.lock().expect("no panic under this lock")
    }

    /// Refuses what cannot be done while a mirror job runs.
    ///
    /// # Errors
    /// If a mirror job runs.
    pub(crate) fn check_not_mirrored(&self) -> Result<(), JobError> {
        match *self.mirrored() {
            None => Ok(()),
            Some(_) => {
                let text = format!("a mirror job of export {:?} is running", self.name);
                Err(JobError::request(text))
            }
        }
    }

    /// The points in time of the disk, the first innermost.
    pub fn snapshots(&self) -> MutexGuard<'_, Vec<Snapshot>> {
        self.snapshots.lock().expect("no panic under this lock")
    }
}

/// A job writes to a disk until this is dropped.
pub struct TargetGuard {
    written: Arc<AtomicBool>,
    _claims: Option<TargetClaims>,
}

impl Drop for TargetGuard {
    fn drop(&mut self) {
        self.written.store(false, Ordering::SeqCst);
    }
}

/// The error of a job or a view whose export was removed.
pub fn removed() -> Error {
    Error::new(Kind::ShuttingDown, "the export was removed from the server").complete()
}
