//! Dirty bitmaps that outlive a server in the image of their disk, as with QEMU's programs.
//!
//! A disk of the monitor protocol that is a qcow2 image has the bitmaps of the image from the moment
//! when it is opened, and the image has those that are kept again when the disk is closed. In between they
//! are in use: after a crash they are inconsistent.

use std::sync::Arc;

use blockhaul_catalog::{BitmapStore, ImageBitmap, ImageBitmaps};
use blockhaul_snapshot::{BITMAPS_MAX, DirtyBitmap};

use crate::bitmap_files::StoredBitmaps;
use crate::error::JobError;
use crate::export::OpenExport;

/// Reads the bitmaps of the image of a disk of `size` bytes, which are in use from then on.
///
/// # Errors
/// If the image cannot be read or written, or a disk cannot have as many bitmaps or their granularity.
pub(crate) async fn take(
    store: &dyn BitmapStore,
    name: &str,
    size: u64,
) -> Result<StoredBitmaps, JobError> {
    let failed = |error: &dyn std::fmt::Display| {
        JobError::other(format!("cannot take over the bitmaps in the image of {name:?}: {error}"))
    };
    let found = store.take().await.map_err(|error| failed(&error))?;
    let opened = opened(&found, size);
    if opened.is_err() {
        store.store(found.clone()).await.map_err(|error| failed(&error))?;
    }
    let bitmaps = opened.map_err(|why| failed(&why))?;
    Ok(StoredBitmaps { bitmaps, inconsistent: found.inconsistent })
}

/// The bitmaps of an image, for a disk of `size` bytes. An error says why it cannot have them.
fn opened(found: &ImageBitmaps, size: u64) -> Result<Vec<Arc<DirtyBitmap>>, String> {
    let count = found.consistent.len();
    if count > BITMAPS_MAX {
        return Err(format!(
            "there are {count}, and a disk has at most {BITMAPS_MAX}: remove some"
        ));
    }
    let bitmaps = found.consistent.iter().map(|one| {
        let bitmap = DirtyBitmap::new(&one.name, size, one.granularity)
            .map_err(|error| format!("{:?}: {error}", one.name))?;
        one.dirty.iter().for_each(|&(at, len)| bitmap.set(at, len));
        bitmap.enable(one.enabled);
        Ok(Arc::new(bitmap))
    });
    bitmaps.collect()
}

/// Stores the bitmaps of a disk that are kept in its image. Nothing writes to the disk any more.
///
/// # Errors
/// If the image cannot be written, or cannot store them.
pub(crate) async fn store(store: &dyn BitmapStore, export: &OpenExport) -> Result<(), JobError> {
    let mut bitmaps = export.bitmaps().clone();
    bitmaps.retain(|bitmap| bitmap.is_kept());
    let consistent = bitmaps.iter().map(|bitmap| ImageBitmap {
        name: bitmap.name().to_string(),
        granularity: bitmap.granularity(),
        enabled: bitmap.is_enabled(),
        dirty: bitmap.unsettled_ranges(),
    });
    let bitmaps = ImageBitmaps {
        consistent: consistent.collect(),
        inconsistent: export.inconsistent().clone(),
    };
    store.store(bitmaps).await.map_err(|error| {
        let name = &export.name;
        JobError::other(format!("cannot store the bitmaps of {name:?} in its image: {error}"))
    })
}
