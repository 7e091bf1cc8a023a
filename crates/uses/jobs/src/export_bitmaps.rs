//! Dirty bitmaps of exports in use, and the maps of jobs.

use std::sync::Arc;
use std::time::Duration;

use blockhaul_catalog::Barrier;
use blockhaul_snapshot::{DirtyBitmap, PersistentDirtyMap};

use crate::error::JobError;
use crate::export::OpenExport;
use crate::export_table::ExportTable;
use crate::image_bitmaps;

/// Granularity of bitmaps, in bytes, unless another one is given.
pub const DEFAULT_GRANULARITY: u64 = 64 << 10;

/// Maximum time for the last flush of a device whose bitmaps outlive the server.
const LAST_FLUSH: Duration = Duration::from_secs(30);

/// A bitmap to be added.
pub struct NewBitmap<'a> {
    /// Its name.
    pub name: &'a str,
    /// Bytes per bit: a power of two from 512 to 64 MiB.
    pub granularity: u64,
    /// Whether the bitmap outlives the server, if bitmaps are kept.
    pub kept: bool,
}

/// The contents of a bitmap at a point in time.
#[derive(Clone)]
pub struct FrozenBitmap {
    live: Arc<DirtyBitmap>,
    dirty: Arc<DirtyBitmap>,
}

impl FrozenBitmap {
    /// The dirty blocks of now; the bitmap is clean from then on.
    pub fn take(live: Arc<DirtyBitmap>) -> FrozenBitmap {
        let frozen = FrozenBitmap::later(live);
        frozen.fill(true);
        frozen
    }

    /// The dirty blocks of a later moment, when [`FrozenBitmap::fill`] is called.
    pub fn later(live: Arc<DirtyBitmap>) -> FrozenBitmap {
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

    /// The blocks as a bitmap that does not change.
    pub fn dirty(&self) -> &Arc<DirtyBitmap> {
        &self.dirty
    }

    /// Makes the blocks dirty again.
    pub fn give_back(&self) {
        self.live.give_back(&self.dirty);
    }

    /// Notes that the blocks were copied, or that a job is responsible for them. Until then a server that ends keeps them
    /// as dirty.
    pub fn settle(&self) {
        self.live.settle(&self.dirty);
    }
}

impl ExportTable {
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
        let bitmap = DirtyBitmap::new(name, size, granularity)?;
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
    pub(crate) fn write_bitmaps(&self, export: &OpenExport) -> Result<(), JobError> {
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
        let Some(size) = export.device().map(|device| device.facts().size) else { return Ok(()) };
        let kept = match (export.bitmap_store(), &self.config().bitmap_files) {
            (Some(store), _) => image_bitmaps::take(&*store, &export.name, size).await?,
            (None, Some(files)) => files.read(&export.name, &export.storage(), size)?,
            (None, None) => return Ok(()),
        };
        for (name, why) in &kept.inconsistent {
            log::warn!(
                export = export.name;
                "bitmap {name:?} of export {:?} is inconsistent: {why}; remove it with bitmap-remove, and make a full backup",
                export.name
            );
        }
        if kept.bitmaps.is_empty() && kept.inconsistent.is_empty() {
            return Ok(());
        }
        *export.bitmaps() = kept.bitmaps;
        *export.inconsistent() = kept.inconsistent;
        self.write_bitmaps(export)?;
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
    pub(crate) async fn forget_map(&self, export: &OpenExport, map: &PersistentDirtyMap) {
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
        if export.snapshot_of.is_some() || export.shared.is_none() {
            return;
        }
        let kept = async {
            match (export.bitmap_store(), &self.config().bitmap_files) {
                (None, None) => Ok(()),
                (Some(store), _) => {
                    flush_last(export).await?;
                    image_bitmaps::store(&*store, export).await
                }
                (None, Some(files)) => {
                    // Bitmaps do not show what the device would still lose.
                    flush_last(export).await?;
                    files.write(export, true)
                }
            }
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
