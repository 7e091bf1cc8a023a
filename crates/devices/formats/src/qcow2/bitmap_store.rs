//! The bitmaps of an image that is open for writing, for whoever keeps them right ("Bitmaps").
//!
//! While the image is written, its bitmaps are marked as in use, as QEMU does: after a crash they are
//! inconsistent.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use blockhaul_block::Result;
use blockhaul_catalog::{
    BackendTarget, BitmapStore, ImageBitmap, ImageBitmaps, OpenFuture, OpenedDevice,
};

use super::bitmap::{self, BitmapEntry, PersistentBitmap, flag};
use super::bitmap_change::{
    BitmapEditor, ObsoleteParts, bits_of, check_name, entry_of, table_entries,
};
use super::chain::{self, Qcow2Chain};
use super::error::{unsupported, usage};
use super::header::Header;
use super::image::FileHeader;
use super::parts::ImageParts;
use crate::bytes::index;

/// Extents that are read at a time.
const EXTENTS: usize = 4096;

/// Opens the image that the user described. The bitmaps of one that is written are for who opens it, if
/// that is prepared.
pub(super) async fn open(target: &BackendTarget) -> Result<OpenedDevice> {
    let chain = chain::open(target).await?;
    let slot = target.context.registry().bitmaps.upgrade();
    if let Some(slot) = slot.filter(|_| target.intent.write) {
        let has_any = Arc::default();
        slot.put(Arc::new(ChainBitmaps { chain: chain.clone(), has_any }));
    }
    chain.opened()
}

/// The bitmaps of the top image of a chain.
struct ChainBitmaps {
    chain: Arc<Qcow2Chain>,
    /// Whether the image had bitmaps when they were taken or stored.
    has_any: Arc<AtomicBool>,
}

impl BitmapStore for ChainBitmaps {
    fn check(&self, name: &str, granularity: u64) -> OpenFuture<()> {
        let chain = self.chain.clone();
        let name = name.to_string();
        Box::pin(async move {
            let handle = chain.top()?;
            let Directory { header, entries } = Directory::read(handle.parts()).await?;
            check_version(&header)?;
            check_name(&name)?;
            if entries.len() >= index(bitmap::COUNT_MAX.into()) {
                return Err(usage(format!("there are {} bitmaps already", entries.len())));
            }
            table_entries(&header, bits_of(&header, Some(granularity))?).map(drop)
        })
    }

    fn take(&self) -> OpenFuture<ImageBitmaps> {
        let chain = self.chain.clone();
        let has_any = self.has_any.clone();
        Box::pin(async move {
            let handle = chain.top()?;
            let parts = handle.parts();
            let found = take(parts).await.map_err(|error| error.on(&parts.file.facts().name))?;
            has_any.store(found != ImageBitmaps::default(), Ordering::SeqCst);
            Ok(found)
        })
    }

    fn store(&self, bitmaps: ImageBitmaps) -> OpenFuture<()> {
        let chain = self.chain.clone();
        let has_any = self.has_any.clone();
        Box::pin(async move {
            if !has_any.load(Ordering::SeqCst) && bitmaps.consistent.is_empty() {
                // There is nothing to change, also if the device does not answer any more.
                return Ok(());
            }
            let handle = chain.top()?;
            let parts = handle.parts();
            store(parts, &bitmaps).await.map_err(|error| error.on(&parts.file.facts().name))?;
            has_any.store(bitmaps != ImageBitmaps::default(), Ordering::SeqCst);
            Ok(())
        })
    }
}

fn check_version(header: &Header) -> Result<()> {
    if header.version >= 3 {
        return Ok(());
    }
    let way = "convert it to version 3 with \"qemu-img amend -o compat=1.1\"";
    Err(unsupported("an image of version 2 cannot have bitmaps", way))
}

/// The header of an image as it is now, and its bitmaps.
struct Directory {
    header: Header,
    entries: Vec<BitmapEntry>,
}

impl Directory {
    async fn read(parts: &ImageParts) -> Result<Directory> {
        let header = FileHeader::read(&parts.file).await?.header;
        let file_len = parts.image.layout_now().file_len();
        let entries = match header.bitmaps {
            Some(directory) => bitmap::entries(&parts.file, file_len, &header, directory).await?,
            None => Vec::new(),
        };
        Ok(Directory { header, entries })
    }
}

/// Reads the bitmaps, and marks those that are consistent as in use.
async fn take(parts: &ImageParts) -> Result<ImageBitmaps> {
    let Directory { header, mut entries } = Directory::read(parts).await?;
    let file_len = parts.image.layout_now().file_len();
    let mut found = ImageBitmaps::default();
    let mut names = HashSet::new();
    for entry in &mut entries {
        let is_new = names.insert(entry.name.clone());
        match entry.open(&parts.file, file_len, &header).await {
            Ok(bitmap) if is_new => {
                found.consistent.push(ImageBitmap {
                    name: entry.name.clone(),
                    granularity: 1 << entry.granularity_bits,
                    enabled: entry.flags & flag::AUTO != 0,
                    dirty: ranges(&bitmap, parts, header.size).await?,
                });
                entry.set_flags(|flags| flags | flag::IN_USE);
            }
            Ok(_) => {}
            Err(error) => found.inconsistent.push((entry.name.clone(), error.to_string())),
        }
    }
    if !found.consistent.is_empty() {
        replace(parts, &header, async |_: &BitmapEditor<'_>| {
            Ok((entries, ObsoleteParts::default()))
        })
        .await?;
    }
    Ok(found)
}

/// The dirty ranges of a bitmap of a disk of `size` bytes, as offset and length in bytes.
async fn ranges(
    bitmap: &PersistentBitmap,
    parts: &ImageParts,
    size: u64,
) -> Result<Vec<(u64, u64)>> {
    let mut all: Vec<(u64, u64)> = Vec::new();
    let mut at = 0;
    while at < size {
        let extents = bitmap.extents(&parts.file, at, size, EXTENTS).await?;
        for extent in extents.runs() {
            match all.last_mut().filter(|last| last.0 + last.1 == at) {
                _ if extent.state == 0 => {}
                Some(last) => last.1 += extent.len,
                None => all.push((at, extent.len)),
            }
            at += extent.len;
        }
        blockhaul_io::yield_now().await;
    }
    Ok(all)
}

/// Stores these bitmaps in place of those of the image.
async fn store(parts: &ImageParts, bitmaps: &ImageBitmaps) -> Result<()> {
    let Directory { header, entries } = Directory::read(parts).await?;
    check_version(&header)?;
    let stays = |entry: &BitmapEntry| {
        let is_new = bitmaps.consistent.iter().any(|one| one.name == entry.name);
        !is_new && bitmaps.inconsistent.iter().any(|(name, _)| *name == entry.name)
    };
    replace(parts, &header, async |now: &BitmapEditor<'_>| {
        let mut replaced = ObsoleteParts::default();
        let mut all = Vec::new();
        for entry in entries {
            if stays(&entry) {
                all.push(entry);
            } else if let Err(error) = now.retire(&entry, &mut replaced).await {
                // Its clusters are lost until the image is checked.
                log::warn!("{}: bitmap {:?}: {error}", parts.file.facts().name, entry.name);
            }
        }
        for one in &bitmaps.consistent {
            all.push(stored(now, one).await?);
        }
        Ok((all, replaced))
    })
    .await
}

/// An entry for a bitmap, whose bits are written.
async fn stored(now: &BitmapEditor<'_>, bitmap: &ImageBitmap) -> Result<BitmapEntry> {
    check_name(&bitmap.name)?;
    let bits = bits_of(now.header, Some(bitmap.granularity))?;
    let words = now.table_of(bits, &bitmap.dirty).await?;
    let (table, count) = now.new_words(&words).await?;
    let flags = if bitmap.enabled { flag::AUTO } else { 0 };
    entry_of(&bitmap.name, bits, flags, (table, count))
}

/// Replaces the directory by the entries that `change` returns, and frees what it has replaced.
async fn replace(
    parts: &ImageParts,
    header: &Header,
    change: impl AsyncFnOnce(&BitmapEditor<'_>) -> Result<(Vec<BitmapEntry>, ObsoleteParts)>,
) -> Result<()> {
    let now = BitmapEditor { parts, header, file: &parts.file };
    parts
        .carry_out(async || {
            let (entries, replaced) = change(&now).await?;
            now.put(&entries, replaced).await
        })
        .await
}
