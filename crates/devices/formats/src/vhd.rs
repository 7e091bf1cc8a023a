//! `vhd:DEVICE`: the image format of Virtual PC, read only. Comments name sections of Microsoft's
//! "Virtual Hard Disk Image Format Specification" (version 1.0).
//!
//! A fixed image is the disk and a footer. A dynamic one begins with a copy of the footer, and has
//! a header, a table with the sector of each block (BAT), and the blocks: a bitmap of sectors, then
//! data. A differencing image takes sectors whose bits are not set from its parent. Numbers are
//! big-endian.

use blockhaul_block::Result;
use blockhaul_catalog::{Backend, BackendTarget, OpenFuture, OpenedDevice, Param};

use crate::bytes::{array, be16, be32, be64, index};
use crate::mapped::{
    self, BACKING, BlockMap, CACHE, DiskPlace, ImageFileOpener, ImageFiles, MappedFormat, NAMES,
    TableLookup, check_within, checked_size, damaged, other_file, unsupported,
};
use crate::named::ChainFile;
use crate::storage::{len_of, read};

const FORMAT: &str = "vhd";
const SECTOR: u64 = 512;
/// Lengths in bytes of the footer, and of the header of dynamic images.
const FOOTER: u64 = 512;
const HEADER: u64 = 1024;
const FOOTER_COOKIE: &[u8; 8] = b"conectix";
const HEADER_COOKIE: &[u8; 8] = b"cxsparse";
/// Types of images ("Disk Type").
const FIXED: u32 = 2;
const DYNAMIC: u32 = 3;
const DIFFERENCING: u32 = 4;
/// An entry of the BAT for a block that is not in the file.
const UNUSED: u32 = 0xffff_ffff;
/// The largest geometry of an IDE disk, in sectors ("Disk Geometry"): larger disks have this one.
const GEOMETRY_MAX: u64 = 65535 * 16 * 255;
/// Programs that write the exact size of the disk. Virtual PC and old versions of QEMU use the
/// geometry, and round the size in the footer.
const EXACT_CREATORS: [&[u8; 4]; 6] = [b"win ", b"qem2", b"d2v ", b"tap\0", b"CTXS", b"wa\0\0"];
/// Largest block in bytes that is read: all programs write 2 MiB, and none of them more than this.
const BLOCK_MAX: u64 = 256 << 20;

/// The backend `vhd:DEVICE`.
pub struct VhdBackend;

impl Backend for VhdBackend {
    fn schemes(&self) -> &'static [&'static str] {
        &["vhd", "vpc"]
    }

    fn operand(&self) -> &'static str {
        "DEVICE"
    }

    fn summary(&self) -> &'static str {
        "the disk in a VHD image (Virtual PC, Azure, XenServer), read-only. DEVICE is the path of the image, or \
         any device that holds it, where %3f is a question mark and %25 a percent sign"
    }

    fn example(&self) -> &'static str {
        r#"
blockhaul copy sample:8M disk.raw
qemu-img convert -O vpc -o force_size=on disk.raw disk.vhd
blockhaul copy vhd:disk.vhd restored.raw && cmp disk.raw restored.raw
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
    let file_len = len_of(&file.device.facts());
    let footer = footer(&file, file_len).await?;
    if footer.kind == FIXED {
        let data = file_len.saturating_sub(FOOTER);
        if footer.size > data {
            let text =
                format!("a disk of {} bytes in a file with {data} bytes of data", footer.size);
            return Err(damaged(FORMAT, text));
        }
        let map = Box::new(FixedVhd { size: footer.size });
        let found =
            MappedFormat { size: footer.size, unit: SECTOR, sector: None, map, unpack: None };
        return Ok((found, ImageFiles::one(file, None)));
    }
    check_within(FORMAT, "the header", footer.header, HEADER, file_len)?;
    let bytes = read(&file.device, footer.header, HEADER).await?;
    let header = Header::parse(&bytes, footer.size, file_len)?;
    let is_differencing = footer.kind == DIFFERENCING;
    let backing =
        if is_differencing { Some(parent(&opener, &file, &bytes, file_len).await?) } else { None };
    let size = footer.size;
    let unit = header.block;
    let map = Box::new(VhdBlocks { header, size, file_len, is_differencing });
    Ok((
        MappedFormat { size, unit, sector: None, map, unpack: None },
        ImageFiles::one(file, backing),
    ))
}

/// The footer of an image: the copy at its start, or else the last sector.
async fn footer(file: &ChainFile, file_len: u64) -> Result<Footer> {
    let name = file.device.facts().name.clone();
    let first = read(&file.device, 0, FOOTER.min(file_len)).await?;
    let mut failed = None;
    if first.starts_with(FOOTER_COOKIE) {
        match Footer::parse(&first) {
            Ok(footer) => return Ok(footer),
            Err(error) => failed = Some(error),
        }
    }
    let Some(at) = file_len.checked_sub(FOOTER) else { return Err(other_file(FORMAT, "VHD")) };
    let last = read(&file.device, at, FOOTER).await?;
    match (last.starts_with(FOOTER_COOKIE), failed) {
        (false, None) => Err(other_file(FORMAT, "VHD")),
        (false, Some(error)) => Err(error),
        (true, None) => Footer::parse(&last),
        (true, Some(first)) => {
            let footer = Footer::parse(&last)?;
            log::warn!("{name}: the footer at the end of the file is used: {first}");
            Ok(footer)
        }
    }
}

/// The sum of a footer or header ("Checksum"): the complement of the sum of all bytes but those of
/// the field itself, which is at `field`.
fn checksum(bytes: &[u8], field: usize) -> u32 {
    let others = bytes.iter().enumerate().filter(|(at, _)| !(field..field + 4).contains(at));
    !others.fold(0_u32, |sum, (_, &byte)| sum.wrapping_add(byte.into()))
}

fn check_sum(what: &str, bytes: &[u8], field: usize) -> Result<()> {
    let found = be32(bytes, field);
    let wanted = checksum(bytes, field);
    if found == Some(wanted) {
        return Ok(());
    }
    let text = format!("checksum {:#x} of {what} instead of {wanted:#x}", found.unwrap_or(0));
    Err(damaged(FORMAT, text))
}

/// A footer that was checked.
#[derive(Debug, PartialEq, Eq)]
struct Footer {
    /// Size of the disk in bytes.
    size: u64,
    /// [`FIXED`], [`DYNAMIC`] or [`DIFFERENCING`].
    kind: u32,
    /// Offset of the header of dynamic images.
    header: u64,
    /// Identifies the image to those over it.
    id: [u8; 16],
}

impl Footer {
    /// Reads the footer ("Hard Disk Footer Format").
    fn parse(bytes: &[u8]) -> Result<Footer> {
        let short = || damaged(FORMAT, "the file ends within its footer");
        let bytes = bytes.get(..index(FOOTER)).ok_or_else(short)?;
        check_sum("the footer", bytes, 64)?;
        let (version, kind) = be32(bytes, 12).zip(be32(bytes, 60)).ok_or_else(short)?;
        if version >> 16 != 1 {
            let text = format!(
                "version {}.{} of the format is not known",
                version >> 16,
                version & 0xffff
            );
            return Err(unsupported(FORMAT, text, "convert it with the program that made it"));
        }
        if ![FIXED, DYNAMIC, DIFFERENCING].contains(&kind) {
            let text = format!("images of type {kind} are not known");
            return Err(unsupported(FORMAT, text, "convert it with the program that made it"));
        }
        let size = size(bytes).ok_or_else(short)?;
        if !size.is_multiple_of(SECTOR) {
            return Err(damaged(FORMAT, format!("a disk of {size} bytes, which are no sectors")));
        }
        let header = be64(bytes, 16).ok_or_else(short)?;
        let id = array(bytes, 68).ok_or_else(short)?;
        Ok(Footer { size: checked_size(FORMAT, size)?, kind, header, id })
    }
}

/// The size of the disk in bytes: that of the geometry, or that in the footer.
fn size(footer: &[u8]) -> Option<u64> {
    let creator = array::<4>(footer, 28)?;
    let [heads, sectors] = array::<2>(footer, 58)?;
    let by_geometry = u64::from(be16(footer, 56)?) * u64::from(heads) * u64::from(sectors);
    if EXACT_CREATORS.contains(&&creator) || by_geometry >= GEOMETRY_MAX || by_geometry == 0 {
        return be64(footer, 48);
    }
    Some(by_geometry * SECTOR)
}

/// A header of a dynamic image that was checked.
#[derive(Debug, PartialEq, Eq)]
struct Header {
    /// Offset of the table of blocks, which is within the file.
    table: u64,
    /// Block size in bytes, a power of two from 4096 on.
    block: u64,
    /// Length in bytes of the bitmap before each block.
    bitmap: u64,
}

impl Header {
    /// Reads the header ("Dynamic Disk Header Format") of a disk of `size` bytes.
    fn parse(bytes: &[u8], size: u64, file_len: u64) -> Result<Header> {
        let short = || damaged(FORMAT, "the file ends within its header");
        if !bytes.starts_with(HEADER_COOKIE) {
            return Err(damaged(FORMAT, "no header where the footer says"));
        }
        check_sum("the header", bytes, 36)?;
        let table = be64(bytes, 16).ok_or_else(short)?;
        let (entries, block) = be32(bytes, 28).zip(be32(bytes, 32)).ok_or_else(short)?;
        let block = u64::from(block);
        if !block.is_power_of_two() || !(4096..=BLOCK_MAX).contains(&block) {
            return Err(damaged(FORMAT, format!("blocks of {block} bytes in the header")));
        }
        let needed = size.div_ceil(block);
        if needed > entries.into() {
            let text =
                format!("a disk of {size} bytes has {needed} blocks; the table has {entries}");
            return Err(damaged(FORMAT, text));
        }
        if !table.is_multiple_of(SECTOR) {
            return Err(damaged(
                FORMAT,
                format!("the table of blocks at offset {table}, no sector"),
            ));
        }
        check_within(FORMAT, "the table of blocks", table, needed * 4, file_len)?;
        let bitmap = (block / SECTOR / 8).next_multiple_of(SECTOR);
        Ok(Header { table, block, bitmap })
    }
}

/// The parent of a differencing image ("Parent Locator Entry"): a relative path of Windows.
async fn parent(
    opener: &ImageFileOpener<'_>,
    file: &ChainFile,
    header: &[u8],
    file_len: u64,
) -> Result<ChainFile> {
    if let Some(own) = opener.own_backing().await? {
        return Ok(own);
    }
    let name = file.device.facts().name.clone();
    let mut path = None;
    for number in 0..8 {
        let at = 576 + number * 24;
        let Some(platform) = array::<4>(header, at) else { break };
        let place = be32(header, at + 8).zip(be64(header, at + 16));
        let Some((len, offset)) = place.filter(|(len, _)| (2..=4096).contains(len)) else {
            continue;
        };
        if &platform == b"W2ru" {
            check_within(FORMAT, "the name of the parent", offset, len.into(), file_len)?;
            let bytes = read(&file.device, offset, len.into()).await?;
            path = Some(crate::windows::path(&crate::windows::utf16(&bytes, u16::from_le_bytes)));
        }
    }
    // The name without a folder is in the header itself.
    let own_name = || {
        let bytes = header.get(64..576)?;
        let name = crate::windows::path(&crate::windows::utf16(bytes, u16::from_be_bytes));
        crate::windows::last(&name).map(str::to_string)
    };
    let Some(path) = path.filter(|path| !path.is_empty()).or_else(own_name) else {
        let text = format!("{name} is a differencing image without the name of its parent");
        return Err(unsupported(FORMAT, text, "name it with backing=DEVICE"));
    };
    // As a file first: is it the one that the image was made over?
    let raw = opener.named(&name, &path, None, "backing").await?;
    let found = footer(&raw, len_of(&raw.device.facts())).await?;
    if array(header, 40) != Some(found.id) {
        let text = format!("the parent {path:?} is not the one that {name} was made over");
        let way = "use the right parent; backing=DEVICE uses this one in spite of that";
        return Err(unsupported(FORMAT, text, way));
    }
    drop(raw);
    opener.named(&name, &path, Some(FORMAT), "backing").await
}

/// A fixed image.
struct FixedVhd {
    size: u64,
}

impl BlockMap for FixedVhd {
    fn find(&self, at: u64, _: &mut TableLookup<'_>) -> Result<Option<(u64, DiskPlace)>> {
        Ok(Some((self.size.saturating_sub(at).max(1), DiskPlace::Data { file: 0, at })))
    }

    fn is_flat(&self, _: usize) -> bool {
        true
    }
}

/// A dynamic or differencing image ("Block Allocation Table and Data Blocks").
struct VhdBlocks {
    header: Header,
    size: u64,
    file_len: u64,
    is_differencing: bool,
}

impl BlockMap for VhdBlocks {
    fn find(&self, at: u64, look: &mut TableLookup<'_>) -> Result<Option<(u64, DiskPlace)>> {
        let Header { table, block, bitmap } = self.header;
        let number = at / block;
        let start = at % block;
        let left = block - start;
        let Some(entry) = look.number(0, table + number * 4)? else { return Ok(None) };
        let entry = u32::from_be_bytes(entry);
        if entry == UNUSED {
            return Ok(Some((left, DiskPlace::Below)));
        }
        let host = u64::from(entry) * SECTOR;
        let used = block.min(self.size - number * block);
        if host < FOOTER || host + bitmap + used > self.file_len {
            let text = format!(
                "block {number} of the disk is at offset {host}, not within the {} bytes of the file",
                self.file_len
            );
            return Err(damaged(FORMAT, text));
        }
        let data = DiskPlace::Data { file: 0, at: host + bitmap + start };
        if !self.is_differencing {
            // As QEMU: the bits of a dynamic image tell which sectors are not zero.
            return Ok(Some((left, data)));
        }
        let sector = start / SECTOR;
        let Some(bytes) = look.bytes(0, host + sector / 8)? else { return Ok(None) };
        let bits = bytes.get(..bytes.len().min(index(bitmap - sector / 8))).unwrap_or(bytes);
        let (is_set, sectors) =
            crate::bits::run(bits, index(sector % 8), crate::bits::BitOrder::High);
        let len = (sectors as u64 * SECTOR - at % SECTOR).min(left);
        Ok(Some((len, if is_set { data } else { DiskPlace::Below })))
    }
}
