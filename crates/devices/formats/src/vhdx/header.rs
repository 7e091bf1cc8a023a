//! Headers, region table and metadata ([MS-VHDX] 2.2, 2.6), little-endian.

use std::sync::Arc;

use blockhaul_block::{Device, Result};

use crate::bytes::{array, index, le16, le32, le64};
use crate::crc32c::of_structure;
use crate::mapped::{check_within, checked_size, damaged, other_file, unsupported};
use crate::storage::{len_of, read};
use crate::windows::utf16;

/// The scheme, in errors.
pub(super) const FORMAT: &str = "vhdx";
pub(super) const MIB: u64 = 1 << 20;
/// Sectors that a bitmap block describes: the bits of 1 MiB (2.4, "chunk").
pub(super) const CHUNK: u64 = 1 << 23;
/// Offsets of both headers (2.2.2) and of both region tables (2.2.3), and their lengths.
const HEADERS: [u64; 2] = [64 << 10, 128 << 10];
const HEADER: u64 = 4 << 10;
const REGIONS: [u64; 2] = [192 << 10, 256 << 10];
const REGION: u64 = 64 << 10;
/// Most entries of a region table and of the metadata table.
const REGION_ENTRIES: u32 = 2047;
const METADATA_ENTRIES: u16 = 2047;
/// Length of the metadata table; items follow it.
const METADATA_TABLE: u64 = 64 << 10;
/// Longest metadata item.
const ITEM_MAX: u64 = 1 << 20;
/// Length of an entry of both tables.
const ENTRY: usize = 32;

pub(super) type Guid = [u8; 16];

/// A GUID as files have it: the first three parts are little-endian.
const fn guid(text: u128) -> Guid {
    let b = text.to_be_bytes();
    [
        b[3], b[2], b[1], b[0], b[5], b[4], b[7], b[6], b[8], b[9], b[10], b[11], b[12], b[13],
        b[14], b[15],
    ]
}

/// Regions (2.2.3.2) and metadata items (2.6.2).
const BAT: Guid = guid(0x2dc2_7766_f623_4200_9d64_115e_9bfd_4a08);
const METADATA: Guid = guid(0x8b7c_a206_4790_4b9a_b8fe_575f_050f_886e);
const FILE_PARAMETERS: Guid = guid(0xcaa1_6737_fa36_4d43_b3b6_33f0_aa44_e76b);
const DISK_SIZE: Guid = guid(0x2fa5_4224_cd1b_4876_b211_5dbe_d83b_f4b8);
const DISK_ID: Guid = guid(0xbeca_12ab_b2e6_4523_93ef_c309_e000_c746);
const LOGICAL_SECTOR: Guid = guid(0x8141_bf1d_a96f_4709_ba47_f233_a8fa_ab5f);
const PHYSICAL_SECTOR: Guid = guid(0xcda3_48c7_445d_4471_9cc9_e988_5251_c556);
const PARENT_LOCATOR: Guid = guid(0xa8d3_5f2d_b30b_454d_abf7_d3d8_4834_ab0c);
/// The type of parent locators (2.6.2.6.1).
const LOCATOR_TYPE: Guid = guid(0xb04a_efb7_d19e_4a81_b789_25b8_e944_5913);

/// The current header of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) sequence: u64,
    /// Changes when the contents of the disk change.
    pub(super) data_write_id: Guid,
    /// The entries of the log that count; zero: none.
    pub(super) log_id: Guid,
    pub(super) log_at: u64,
    pub(super) log_len: u32,
}

/// Reads both headers; the current one is in order and has the larger sequence number.
pub(super) async fn current(device: &Arc<dyn Device>) -> Result<Header> {
    let file_len = len_of(&device.facts());
    let start = read(device, 0, 8.min(file_len)).await?;
    if !start.starts_with(b"vhdxfile") {
        return Err(other_file(FORMAT, "VHDX"));
    }
    check_within(FORMAT, "the area of headers", 0, MIB, file_len)?;
    let mut best: Option<Header> = None;
    for at in HEADERS {
        let header = Header::parse(&read(device, at, HEADER).await?)?;
        best = match (best, header) {
            (Some(one), Some(other)) if other.sequence > one.sequence => Some(other),
            (one, other) => one.or(other),
        };
    }
    let texts = "both headers, at offsets 65536 and 131072, have wrong checksums";
    best.ok_or_else(|| damaged(FORMAT, texts))
}

impl Header {
    /// A header; none if its checksum is wrong.
    fn parse(bytes: &[u8]) -> Result<Option<Header>> {
        if !bytes.starts_with(b"head") || le32(bytes, 4) != Some(of_structure(bytes, 4)) {
            return Ok(None);
        }
        let short = || damaged(FORMAT, "a short header");
        let header = Header {
            sequence: le64(bytes, 8).ok_or_else(short)?,
            data_write_id: array(bytes, 32).ok_or_else(short)?,
            log_id: array(bytes, 48).ok_or_else(short)?,
            log_len: le32(bytes, 68).ok_or_else(short)?,
            log_at: le64(bytes, 72).ok_or_else(short)?,
        };
        match (le16(bytes, 64), le16(bytes, 66)) {
            (Some(0), Some(1)) => Ok(Some(header)),
            (log, version) => {
                let [log, version] = [log, version].map(Option::unwrap_or_default);
                let text =
                    format!("version {version} of the format, with version {log} of the log");
                Err(unsupported(FORMAT, text, "convert it with Hyper-V's Convert-VHD"))
            }
        }
    }
}

/// What the metadata tells.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct VhdxLayout {
    /// Size of the disk in bytes.
    pub(super) size: u64,
    /// Block size in bytes, a power of two, 1 to 256 MiB.
    pub(super) block: u64,
    /// Logical sector size in bytes: 512 or 4096.
    pub(super) sector: u64,
    /// Offset of the BAT, which is within the file with all entries that are needed.
    pub(super) table: u64,
    pub(super) parent: Option<Parent>,
}

/// The image under a differencing one (2.6.2.6).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Parent {
    /// What its [`Header::data_write_id`] may be.
    pub(super) linkages: Vec<Guid>,
    pub(super) relative: Option<String>,
    pub(super) absolute: Option<String>,
    pub(super) volume: Option<String>,
}

/// A region, within the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Region {
    at: u64,
    len: u64,
}

/// Reads the region table and the metadata.
pub(super) async fn layout(device: &Arc<dyn Device>) -> Result<VhdxLayout> {
    let file_len = len_of(&device.facts());
    let mut tables = None;
    for at in REGIONS {
        let bytes = read(device, at, REGION).await?;
        if bytes.starts_with(b"regi") && le32(&bytes, 4) == Some(of_structure(&bytes, 4)) {
            tables = Some(bytes);
            break;
        }
    }
    let texts = "both region tables, at offsets 196608 and 262144, have wrong checksums";
    let bytes = tables.ok_or_else(|| damaged(FORMAT, texts))?;
    let (table, metadata) = regions(&bytes, file_len)?;
    let mut items = Items::default();
    let entries = read(device, metadata.at, METADATA_TABLE.min(metadata.len)).await?;
    for (id, item) in metadata_entries(&entries, metadata)? {
        items.add(&id, &read(device, item.at, item.len).await?)?;
    }
    items.layout(table)
}

/// The regions of the BAT and of the metadata.
fn regions(bytes: &[u8], file_len: u64) -> Result<(Region, Region)> {
    let short = || damaged(FORMAT, "a short region table");
    let count = le32(bytes, 8).ok_or_else(short)?;
    if count > REGION_ENTRIES {
        return Err(damaged(FORMAT, format!("{count} entries in the region table")));
    }
    let mut table = None;
    let mut metadata = None;
    for number in 0..index(count.into()) {
        let at = 16 + number * ENTRY;
        let id: Guid = array(bytes, at).ok_or_else(short)?;
        let place = le64(bytes, at + 16).zip(le32(bytes, at + 24)).zip(le32(bytes, at + 28));
        let ((offset, len), flags) = place.ok_or_else(short)?;
        let slot = match id {
            BAT => &mut table,
            METADATA => &mut metadata,
            _ if flags & 1 == 0 => continue,
            id => return Err(unknown("region", &id)),
        };
        let len = u64::from(len);
        if offset < MIB || !offset.is_multiple_of(MIB) || slot.is_some() {
            return Err(damaged(
                FORMAT,
                format!("entry {number} of the region table, for offset {offset}"),
            ));
        }
        check_within(FORMAT, format_args!("region {number}"), offset, len, file_len)?;
        *slot = Some(Region { at: offset, len });
    }
    let found = table.zip(metadata);
    let (table, metadata) =
        found.ok_or_else(|| damaged(FORMAT, "a table without the regions of BAT and metadata"))?;
    if table.at < metadata.at + metadata.len && metadata.at < table.at + table.len {
        return Err(damaged(FORMAT, "the regions of BAT and metadata overlap"));
    }
    Ok((table, metadata))
}

fn unknown(what: &str, id: &Guid) -> blockhaul_block::Error {
    let id: String = id.iter().map(|byte| format!("{byte:02x}")).collect();
    let text = format!("the required {what} {id} is not known");
    unsupported(FORMAT, text, "convert it with Hyper-V's Convert-VHD")
}

/// The items of the metadata table (2.6.1) that this program reads.
fn metadata_entries(bytes: &[u8], region: Region) -> Result<Vec<(Guid, Region)>> {
    let short = || damaged(FORMAT, "a short metadata table");
    if !bytes.starts_with(b"metadata") {
        return Err(damaged(FORMAT, format!("no metadata table at offset {}", region.at)));
    }
    let count = le16(bytes, 10).ok_or_else(short)?;
    if count > METADATA_ENTRIES {
        return Err(damaged(FORMAT, format!("{count} entries in the metadata table")));
    }
    let mut found: Vec<(Guid, Region)> = Vec::new();
    for number in 0..usize::from(count) {
        let at = 32 + number * ENTRY;
        let id: Guid = array(bytes, at).ok_or_else(short)?;
        let place = le32(bytes, at + 16).zip(le32(bytes, at + 20)).zip(le32(bytes, at + 24));
        let ((offset, len), flags) = place.ok_or_else(short)?;
        let is_user = flags & 1 != 0;
        let is_required = flags & 4 != 0;
        let known =
            [FILE_PARAMETERS, DISK_SIZE, DISK_ID, LOGICAL_SECTOR, PHYSICAL_SECTOR, PARENT_LOCATOR];
        if is_user || !known.contains(&id) {
            if is_required {
                return Err(unknown("metadata item", &id));
            } else {
                continue;
            }
        }
        let offset = u64::from(offset);
        let len = u64::from(len);
        let outside = offset < METADATA_TABLE || len > ITEM_MAX || offset + len > region.len;
        if outside || found.iter().any(|(other, _)| *other == id) {
            return Err(damaged(
                FORMAT,
                format!("item {number} of the metadata, {len} bytes at {offset}"),
            ));
        }
        found.push((id, Region { at: region.at + offset, len }));
    }
    Ok(found)
}

/// Metadata items.
#[derive(Debug, Default)]
struct Items {
    block: Option<u32>,
    has_parent: bool,
    size: Option<u64>,
    sector: Option<u32>,
    parent: Option<Parent>,
}

impl Items {
    fn add(&mut self, id: &Guid, bytes: &[u8]) -> Result<()> {
        match *id {
            FILE_PARAMETERS => {
                self.block = le32(bytes, 0);
                self.has_parent = le32(bytes, 4).is_some_and(|flags| flags & 2 != 0);
            }
            DISK_SIZE => self.size = le64(bytes, 0),
            LOGICAL_SECTOR => self.sector = le32(bytes, 0),
            PARENT_LOCATOR => self.parent = Some(parent(bytes)?),
            _ => {}
        }
        Ok(())
    }

    fn layout(self, table: Region) -> Result<VhdxLayout> {
        let found = self.block.zip(self.size).zip(self.sector);
        let ((block, size), sector) = found.ok_or_else(|| {
            damaged(FORMAT, "metadata without block size, disk size or sector size")
        })?;
        let block = u64::from(block);
        let sector = u64::from(sector);
        if !block.is_power_of_two() || !(MIB..=256 * MIB).contains(&block) {
            return Err(damaged(FORMAT, format!("blocks of {block} bytes (1 MiB to 256 MiB)")));
        }
        if sector != 512 && sector != 4096 {
            return Err(damaged(FORMAT, format!("sectors of {sector} bytes (512 or 4096)")));
        }
        let size = checked_size(FORMAT, size)?;
        if !size.is_multiple_of(sector) {
            return Err(damaged(FORMAT, format!("a disk of {size} bytes, which are no sectors")));
        }
        let parent = match (self.has_parent, self.parent) {
            (true, None) => {
                return Err(damaged(FORMAT, "a differencing image without a parent locator"));
            }
            (true, parent) => parent,
            (false, _) => None,
        };
        let blocks = size.div_ceil(block);
        let chunk = CHUNK * sector / block;
        // Bitmaps have entries between those of blocks; only differencing images need the last one.
        let needed = match (&parent, blocks) {
            (_, 0) => 0,
            (Some(_), _) => blocks.div_ceil(chunk) * (chunk + 1),
            (None, _) => blocks + (blocks - 1) / chunk,
        };
        if needed * 8 > table.len {
            let text = format!(
                "a disk of {size} bytes needs a BAT of {needed} entries; it has {} bytes",
                table.len
            );
            return Err(damaged(FORMAT, text));
        }
        Ok(VhdxLayout { size, block, sector, table: table.at, parent })
    }
}

/// Reads a parent locator (2.6.2.6).
fn parent(bytes: &[u8]) -> Result<Parent> {
    let short = || damaged(FORMAT, "a parent locator that ends early");
    if array::<16>(bytes, 0) != Some(LOCATOR_TYPE) {
        let text = "the parent is named in a way that is not known";
        return Err(unsupported(FORMAT, text, "convert it with Hyper-V's Convert-VHD"));
    }
    let mut parent = Parent::default();
    for number in 0..usize::from(le16(bytes, 18).ok_or_else(short)?) {
        let at = 20 + number * 12;
        let offsets = le32(bytes, at).zip(le32(bytes, at + 4)).ok_or_else(short)?;
        let lens = le16(bytes, at + 8).zip(le16(bytes, at + 10)).ok_or_else(short)?;
        let text = |offset: u32, len: u16| {
            let start = index(offset.into());
            let part = bytes.get(start..start.checked_add(len.into())?)?;
            Some(utf16(part, u16::from_le_bytes))
        };
        let key = text(offsets.0, lens.0).ok_or_else(short)?;
        let value = text(offsets.1, lens.1).ok_or_else(short)?;
        match key.as_str() {
            "parent_linkage" | "parent_linkage2" => parent.linkages.extend(guid_of(&value)),
            "relative_path" => parent.relative = Some(value),
            "absolute_win32_path" => parent.absolute = Some(value),
            "volume_path" => parent.volume = Some(value),
            _ => {}
        }
    }
    Ok(parent)
}

/// A GUID in its written form.
fn guid_of(text: &str) -> Option<Guid> {
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    (digits.len() == 32).then(|| u128::from_str_radix(&digits, 16).ok().map(guid))?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guid_has_the_order_of_files() {
        let wanted = [0x66, 0x77, 0xc2, 0x2d, 0x23, 0xf6, 0, 0x42, 0x9d, 0x64];
        assert_eq!(BAT[..10], wanted);
        assert_eq!(guid_of("{2DC27766-F623-4200-9D64-115E9BFD4A08}"), Some(BAT));
        assert_eq!(guid_of("{2DC27766}"), None);
    }

    #[test]
    fn a_table_has_all_blocks_and_bitmaps() {
        let items = |size, parent: bool| Items {
            block: Some(1 << 20),
            has_parent: parent,
            size: Some(size),
            sector: Some(512),
            parent: Some(Parent::default()),
        };
        let fits = |size, parent, entries: u64| {
            items(size, parent).layout(Region { at: MIB, len: entries * 8 }).is_ok()
        };
        // A chunk is 4096 blocks.
        assert!(fits(4096 << 20, false, 4096) && !fits(4096 << 20, false, 4095));
        assert!(fits(4097 << 20, false, 4098) && !fits(4097 << 20, false, 4097));
        assert!(fits(1 << 20, true, 4097) && !fits(1 << 20, true, 4096));
        assert!(fits(0, false, 0) && !fits(1 << 62, false, 4096));
    }
}
