//! `vdi:DEVICE`: VirtualBox's image format, read only. The layout is that of VirtualBox's public
//! header VDICore.h ("preheader", "header version 1.1").
//!
//! A header names two areas: the block map, with a 32-bit number for each block of the disk, and
//! the data area, where block N is.

use blockhaul_block::Result;
use blockhaul_catalog::{Backend, BackendTarget, OpenFuture, OpenedDevice, Param};

use crate::bytes::{array, le32, le64};
use crate::mapped::{
    self, BlockMap, CACHE, DiskPlace, ImageFileOpener, ImageFiles, MappedFormat, TableLookup,
    check_within, checked_size, damaged, other_file, unsupported,
};
use crate::named::ChainFile;
use crate::storage::{len_of, read};

const FORMAT: &str = "vdi";
const SIGNATURE: u32 = 0xbeda_107f;
/// Versions 1.x, of which 1.1 is what all programs write.
const MAJOR_VERSION: u32 = 1;
/// Length in bytes of the part of the header that is read.
const HEADER: u64 = 512;
/// Types of images.
const DYNAMIC: u32 = 1;
const FIXED: u32 = 2;
const DIFFERENCING: u32 = 4;
/// Largest block in bytes that is read: VirtualBox writes 1 MiB.
const BLOCK_MAX: u64 = 256 << 20;
/// Entries of the block map that are no numbers: not allocated, and zeroes.
const FREE: u32 = 0xffff_ffff;
const ZERO: u32 = 0xffff_fffe;

/// The backend `vdi:DEVICE`.
pub struct VdiBackend;

impl Backend for VdiBackend {
    fn schemes(&self) -> &'static [&'static str] {
        &["vdi"]
    }

    fn operand(&self) -> &'static str {
        "DEVICE"
    }

    fn summary(&self) -> &'static str {
        "the disk in a VDI image (VirtualBox), read-only. DEVICE is the path of the image, or any device that \
         holds it, where %3f is a question mark and %25 a percent sign"
    }

    fn example(&self) -> &'static str {
        r#"
blockhaul copy sample:8M disk.raw && qemu-img convert -O vdi disk.raw disk.vdi
blockhaul copy vdi:disk.vdi restored.raw && cmp disk.raw restored.raw
"#
    }

    fn params(&self) -> &'static [Param] {
        &[CACHE]
    }

    fn open(&self, target: BackendTarget) -> OpenFuture<OpenedDevice> {
        Box::pin(async move { mapped::open(FORMAT, &target, inspect).await })
    }
}

async fn inspect(_: ImageFileOpener<'_>, file: ChainFile) -> Result<(MappedFormat, ImageFiles)> {
    let file_len = len_of(&file.device.facts());
    let head = read(&file.device, 0, HEADER.min(file_len)).await?;
    let header = Header::parse(&head, file_len)?;
    let size = header.size;
    let unit = header.block;
    let map = Box::new(VdiBlocks { header, file_len });
    Ok((MappedFormat { size, unit, sector: None, map, unpack: None }, ImageFiles::one(file, None)))
}

/// A header that was checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Header {
    /// Size of the disk in bytes.
    size: u64,
    /// Block size in bytes, a power of two from 512 on.
    block: u64,
    /// Offset of the block map, within the file.
    map: u64,
    /// Offset of the data area, after the block map.
    data: u64,
}

impl Header {
    fn parse(head: &[u8], file_len: u64) -> Result<Header> {
        let word =
            |at| le32(head, at).ok_or_else(|| damaged(FORMAT, "the file ends within its header"));
        if le32(head, 64) != Some(SIGNATURE) {
            return Err(other_file(FORMAT, "VDI"));
        }
        let version = word(68)?;
        if version >> 16 != MAJOR_VERSION {
            let text = format!(
                "version {}.{} of the format is not known",
                version >> 16,
                version & 0xffff
            );
            return Err(unsupported(FORMAT, text, "convert it with \"VBoxManage clonemedium\""));
        }
        check_kind(word(76)?, head)?;
        let map = word(340)?;
        let data = word(344)?;
        let sector = word(360)?;
        let extra = word(380)?;
        let block = u64::from(word(376)?);
        let blocks = u64::from(word(384)?);
        let size = checked_size(
            FORMAT,
            le64(head, 368).ok_or_else(|| damaged(FORMAT, "a short header"))?,
        )?;
        if sector != 512 || extra != 0 {
            let text = format!("sectors of {sector} bytes, and {extra} bytes before each block");
            return Err(unsupported(FORMAT, text, "convert it with \"VBoxManage clonemedium\""));
        }
        if !block.is_power_of_two() || !(512..=BLOCK_MAX).contains(&block) {
            return Err(damaged(FORMAT, format!("blocks of {block} bytes in the header")));
        }
        let needed = size.div_ceil(block);
        if needed > blocks {
            let text =
                format!("a disk of {size} bytes has {needed} blocks; the header says {blocks}");
            return Err(damaged(FORMAT, text));
        }
        let map = u64::from(map);
        let data = u64::from(data);
        if !map.is_multiple_of(512) || !data.is_multiple_of(512) {
            let text =
                format!("the block map at offset {map} or the data at {data} is not at a sector");
            return Err(damaged(FORMAT, text));
        }
        check_within(FORMAT, "the block map", map, needed * 4, file_len)?;
        if map < HEADER || data < map + needed * 4 {
            let text = format!("the data, at offset {data}, overlaps the block map at {map}");
            return Err(damaged(FORMAT, text));
        }
        Ok(Header { size, block, map, data })
    }
}

/// Refuses types of images that have more than one file.
fn check_kind(kind: u32, head: &[u8]) -> Result<()> {
    // The identifier of the image under this one.
    let linked = array::<16>(head, 424).is_some_and(|link| link != [0; 16]);
    match kind {
        DYNAMIC | FIXED if !linked => Ok(()),
        DYNAMIC | FIXED | DIFFERENCING => Err(unsupported(
            FORMAT,
            "a differencing image",
            "convert it to a full one with \"VBoxManage clonemedium\"",
        )),
        kind => Err(unsupported(
            FORMAT,
            format!("images of type {kind} are not known"),
            "convert it with \"VBoxManage clonemedium\"",
        )),
    }
}

struct VdiBlocks {
    header: Header,
    file_len: u64,
}

impl BlockMap for VdiBlocks {
    fn find(&self, at: u64, look: &mut TableLookup<'_>) -> Result<Option<(u64, DiskPlace)>> {
        let Header { size, block, map, data } = self.header;
        let number = at / block;
        let start = at % block;
        let left = block - start;
        // The map of all blocks is within the file.
        let Some(entry) = look.number(0, map + number * 4)? else { return Ok(None) };
        let entry = u32::from_le_bytes(entry);
        if entry == FREE || entry == ZERO {
            return Ok(Some((left, DiskPlace::Zero { stored: false })));
        }
        let host = u64::from(entry).checked_mul(block).and_then(|place| place.checked_add(data));
        let used = block.min(size - number * block);
        let fits = |host: &u64| host.checked_add(used).is_some_and(|end| end <= self.file_len);
        let Some(host) = host.filter(fits) else {
            let text = format!(
                "block {number} of the disk is block {entry} of the file, beyond its {} bytes",
                self.file_len
            );
            return Err(damaged(FORMAT, text));
        };
        Ok(Some((left, DiskPlace::Data { file: 0, at: host + start })))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A header of a disk of 3.5 blocks.
    fn header() -> Vec<u8> {
        let mut head = vec![0; 512];
        let mut put =
            |at: usize, value: u32| head[at..at + 4].copy_from_slice(&value.to_le_bytes());
        put(64, SIGNATURE);
        put(68, 0x0001_0001);
        put(76, DYNAMIC);
        put(340, 512);
        put(344, 1024);
        put(360, 512);
        put(368, 7 << 19);
        put(376, 1 << 20);
        put(384, 4);
        head
    }

    #[test]
    fn a_header_is_checked() {
        let wanted = Header { size: 7 << 19, block: 1 << 20, map: 512, data: 1024 };
        assert_eq!(Header::parse(&header(), 4096).unwrap(), wanted);
        for (at, value, part) in [
            (64, 1, "no VDI image"),
            (68, 2 << 16, "version 2.0"),
            (76, 4, "differencing"),
            (76, 9, "type 9"),
            (340, 1024, "overlaps"),
            (340, 100, "not at a sector"),
            (340, 1 << 30, "exceeds the 4096 bytes"),
            (344, 513, "not at a sector"),
            (372, u32::MAX, "a disk of"),
            (372, 1, "blocks; the header says 4"),
            (376, 3 << 20, "blocks of 3145728"),
            (376, 0, "blocks of 0"),
            (376, 1 << 31, "blocks of 2147483648"),
            (380, 8, "8 bytes before each block"),
            (384, 3, "4 blocks; the header says 3"),
            (424, 1, "differencing"),
        ] {
            let mut head = header();
            head[at..at + 4].copy_from_slice(&u32::to_le_bytes(value));
            let error = Header::parse(&head, 4096).unwrap_err().to_string();
            assert!(error.contains(part), "{at}: {error}");
        }
        for len in 0..388 {
            assert!(Header::parse(&header()[..len], 4096).is_err(), "{len}");
        }
    }
}
