//! `vhdx:DEVICE`: the image format of Hyper-V, read only. Comments name sections of Microsoft's
//! [MS-VHDX].
//!
//! `header` reads the structures at fixed places, `log` what a program that ended early had still
//! to write, which `patched` shows as if it was written: the file itself never changes. The block
//! allocation table (BAT) has an entry for each block of the disk, and, after the entries of each
//! chunk, one for the bitmap of its sectors, which differencing images use.

mod header;
mod log;
mod patched;

use std::sync::Arc;

use blockhaul_block::Result;
use blockhaul_catalog::{Backend, BackendTarget, OpenFuture, OpenedDevice, Param};

use crate::bits;
use crate::bytes::index;
use crate::mapped::{
    self, BACKING, BlockMap, CACHE, DiskPlace, ImageFileOpener, ImageFiles, MappedFormat, NAMES,
    TableLookup, damaged, unsupported,
};
use crate::named::ChainFile;
use crate::storage::len_of;
use header::{CHUNK, FORMAT, MIB, Parent, VhdxLayout};

/// The backend `vhdx:DEVICE`.
pub struct VhdxBackend;

impl Backend for VhdxBackend {
    fn schemes(&self) -> &'static [&'static str] {
        &["vhdx"]
    }

    fn operand(&self) -> &'static str {
        "DEVICE"
    }

    fn summary(&self) -> &'static str {
        "the disk in a VHDX image (Hyper-V), read-only. DEVICE is the path of the image, or any device that \
         holds it, where %3f is a question mark and %25 a percent sign"
    }

    fn example(&self) -> &'static str {
        r#"
blockhaul copy sample:8M disk.raw && qemu-img convert -O vhdx disk.raw disk.vhdx
blockhaul copy vhdx:disk.vhdx restored.raw && cmp disk.raw restored.raw
"#
    }

    fn params(&self) -> &'static [Param] {
        &[NAMES, BACKING, CACHE]
    }

    fn open(&self, target: BackendTarget) -> OpenFuture<OpenedDevice> {
        Box::pin(async move { mapped::open(FORMAT, &target, inspect).await })
    }
}

async fn inspect(
    opener: ImageFileOpener<'_>,
    file: ChainFile,
) -> Result<(MappedFormat, ImageFiles)> {
    let header = header::current(&file.device).await?;
    let file = match log::read(&file.device, &header).await? {
        None => file,
        Some(patches) => {
            let name = file.device.facts().name.clone();
            log::note(&name, &patches);
            let patches = Arc::new(patches);
            file.over(move |device| Arc::new(patched::PatchedDevice::new(device, patches.clone())))
        }
    };
    let layout = header::layout(&file.device).await?;
    let backing = match &layout.parent {
        Some(parent) => Some(open_parent(&opener, &file, parent).await?),
        None => None,
    };
    let file_len = len_of(&file.device.facts());
    let size = layout.size;
    let unit = layout.block;
    let sector = u32::try_from(layout.sector).ok();
    let map = Box::new(VhdxBlocks { layout, file_len });
    Ok((MappedFormat { size, unit, sector, map, unpack: None }, ImageFiles::one(file, backing)))
}

/// The parent of a differencing image (2.6.2.6): the path relative to the image, or a file of this
/// name beside it.
async fn open_parent(
    opener: &ImageFileOpener<'_>,
    file: &ChainFile,
    parent: &Parent,
) -> Result<ChainFile> {
    if let Some(own) = opener.own_backing().await? {
        return Ok(own);
    }
    let name = file.device.facts().name.clone();
    let paths = [&parent.relative, &parent.absolute, &parent.volume];
    let mut paths = paths.into_iter().flatten().map(|path| crate::windows::path(path));
    let Some(path) = paths.find(|path| !path.is_empty()) else {
        let text = format!("{name} is a differencing image without the name of its parent");
        return Err(unsupported(FORMAT, text, "name it with backing=DEVICE"));
    };
    // As a file first: is it the one that the image was made over?
    let raw = opener.named(&name, &path, None, "backing").await?;
    let found = header::current(&raw.device).await?;
    if !parent.linkages.contains(&found.data_write_id) {
        let text = format!("the parent {path:?} was written after {name} was made over it");
        let way = "use the right parent; backing=DEVICE uses this one in spite of that";
        return Err(unsupported(FORMAT, text, way));
    }
    drop(raw);
    opener.named(&name, &path, Some(FORMAT), "backing").await
}

/// States of a block of the disk (2.5.1.1).
mod state {
    pub(super) const NOT_PRESENT: u64 = 0;
    pub(super) const UNDEFINED: u64 = 1;
    pub(super) const ZERO: u64 = 2;
    pub(super) const UNMAPPED: u64 = 3;
    pub(super) const FULLY_PRESENT: u64 = 6;
    pub(super) const PARTIALLY_PRESENT: u64 = 7;
}

struct VhdxBlocks {
    layout: VhdxLayout,
    file_len: u64,
}

impl VhdxBlocks {
    /// The number of blocks in a chunk.
    fn chunk(&self) -> u64 {
        CHUNK * self.layout.sector / self.layout.block
    }

    /// An entry of the table: its state, and its offset in the file.
    fn entry(&self, number: u64, look: &mut TableLookup<'_>) -> Result<Option<(u64, u64)>> {
        let entry = look.number(0, self.layout.table + number * 8)?.map(u64::from_le_bytes);
        Ok(entry.map(|entry| (entry & 7, entry >> 20 << 20)))
    }

    /// Refuses a block that is in the area of headers, or not all within the file.
    fn check(&self, what: &str, number: u64, host: u64, used: u64) -> Result<()> {
        let end = host.checked_add(used).filter(|end| *end <= self.file_len);
        if host >= MIB && end.is_some() {
            return Ok(());
        }
        let text = format!(
            "{what} {number} is at offset {host}, not within the {} bytes of the file",
            self.file_len
        );
        Err(damaged(FORMAT, text))
    }

    /// A part of a block whose bitmap tells which sectors are in the image.
    fn partial(
        &self,
        (at, left, data): (u64, u64, DiskPlace),
        look: &mut TableLookup<'_>,
    ) -> Result<Option<(u64, DiskPlace)>> {
        let sector = self.layout.sector;
        let chunk = self.chunk();
        let number = at / self.layout.block / chunk;
        let Some((kind, host)) = self.entry(number * (chunk + 1) + chunk, look)? else {
            return Ok(None);
        };
        if kind != state::FULLY_PRESENT {
            let text = format!("the bitmap of chunk {number} has state {kind}, and is needed");
            return Err(damaged(FORMAT, text));
        }
        self.check("the bitmap of chunk", number, host, MIB)?;
        let place = at / sector % CHUNK;
        let Some(bytes) = look.bytes(0, host + place / 8)? else { return Ok(None) };
        let bytes = bytes.get(..bytes.len().min(index(MIB - place / 8))).unwrap_or(bytes);
        let (is_set, sectors) = bits::run(bytes, index(place % 8), bits::BitOrder::Low);
        let len = (sectors as u64 * sector - at % sector).min(left);
        Ok(Some((len, if is_set { data } else { DiskPlace::Below })))
    }
}

impl BlockMap for VhdxBlocks {
    fn find(&self, at: u64, look: &mut TableLookup<'_>) -> Result<Option<(u64, DiskPlace)>> {
        let VhdxLayout { size, block, .. } = self.layout;
        let number = at / block;
        let start = at % block;
        let left = block - start;
        let Some((kind, host)) = self.entry(number + number / self.chunk(), look)? else {
            return Ok(None);
        };
        let has_parent = self.layout.parent.is_some();
        let data = DiskPlace::Data { file: 0, at: host.saturating_add(start) };
        match kind {
            state::NOT_PRESENT if has_parent => Ok(Some((left, DiskPlace::Below))),
            state::NOT_PRESENT | state::UNDEFINED | state::ZERO | state::UNMAPPED => {
                Ok(Some((left, DiskPlace::Zero { stored: false })))
            }
            state::FULLY_PRESENT => {
                self.check("block", number, host, block.min(size - number * block))?;
                Ok(Some((left, data)))
            }
            state::PARTIALLY_PRESENT if has_parent => {
                self.check("block", number, host, block.min(size - number * block))?;
                self.partial((at, left, data), look)
            }
            kind => Err(damaged(FORMAT, format!("block {number} of the disk has state {kind}"))),
        }
    }
}
