//! Partition tables: GPT (UEFI 2.10, 5.3) and MBR with logical partitions.

use std::sync::Arc;

use blockhaul_block::{Device, DeviceExt as _, Error, Kind, Result};

/// Maximum number of logical partitions followed: more than Linux shows.
const LOGICAL_MAX: u32 = 256;
/// Maximum number of GPT entries checked; tables have 128.
const GPT_ENTRIES_MAX: u32 = 4096;
/// Longest read of a table in bytes.
const PIECE: u64 = 64 << 10;
/// MBR partition type of the range described by a GPT.
const PROTECTIVE: u8 = 0xee;

/// The partition table of a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PartitionTable {
    /// Its format.
    pub format: TableFormat,
    /// Bytes of a sector: 512 or 4096.
    pub sector: u64,
    /// The partitions, in the order of their numbers.
    pub partitions: Vec<PartitionEntry>,
}

/// Formats of partition tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TableFormat {
    /// A GUID partition table.
    Gpt,
    /// A master boot record, with or without logical partitions.
    Mbr,
}

/// An entry of a partition table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PartitionEntry {
    /// Its number in Linux, from 1 on; logical partitions begin with 5.
    pub number: u32,
    /// First sector.
    pub start: u64,
    /// Number of sectors.
    pub sectors: u64,
    /// Its type.
    pub kind: PartitionKind,
    /// Its name; empty in an MBR.
    pub name: String,
}

/// The type of a partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PartitionKind {
    /// A GUID, as it is stored in a GPT.
    Gpt([u8; 16]),
    /// The type in an MBR.
    Mbr(u8),
}

/// Names of types of an MBR.
const MBR_KINDS: &[(u8, &str)] = &[
    (0x05, "extended"),
    (0x07, "NTFS or exFAT"),
    (0x0b, "FAT32"),
    (0x0c, "FAT32"),
    (0x0f, "extended"),
    (0x82, "Linux swap"),
    (0x83, "Linux"),
    (0x85, "extended"),
    (0x8e, "Linux LVM"),
    (0xa5, "FreeBSD"),
    (PROTECTIVE, "protective entry of a GPT"),
    (0xef, "EFI system"),
    (0xfd, "Linux RAID"),
];

/// Names of types of a GPT. Sources: UEFI 2.10, table 5.7; the Discoverable Partitions Specification; Microsoft's
/// PARTITION_INFORMATION_GPT.
const GPT_KINDS: &[(&str, &str)] = &[
    ("c12a7328-f81f-11d2-ba4b-00a0c93ec93b", "EFI system"),
    ("21686148-6449-6e6f-744e-656564454649", "BIOS boot"),
    ("0fc63daf-8483-4772-8e79-3d69d8477de4", "Linux filesystem"),
    ("4f68bce3-e8cd-4db1-96e7-fbcaf984b709", "Linux root (x86-64)"),
    ("b921b045-1df0-41c3-af44-4c6f280d3fae", "Linux root (ARM64)"),
    ("bc13c2ff-59e6-4262-a352-b275fd6f7172", "Linux extended boot"),
    ("933ac7e1-2eb4-4f13-b844-0e14e2aef915", "Linux home"),
    ("0657fd6d-a4ab-43c4-84e5-0933c84b4f4f", "Linux swap"),
    ("e6d6d379-f507-44c2-a23c-238f2a3df928", "Linux LVM"),
    ("a19d880f-05fc-4d3b-a006-743f0f84911e", "Linux RAID"),
    ("ebd0a0a2-b9e5-4433-87c0-68b6b72699c7", "Microsoft basic data"),
    ("e3c9e316-0b5c-4db8-817d-f92df00215ae", "Microsoft reserved"),
    ("de94bba4-06d1-4d40-a16a-bfd50179d6ac", "Windows recovery"),
];

impl PartitionKind {
    /// The type as programs write it: a GUID, or hexadecimal digits.
    pub fn code(self) -> String {
        match self {
            PartitionKind::Gpt(guid) => guid_text(guid),
            PartitionKind::Mbr(kind) => format!("0x{kind:02x}"),
        }
    }

    /// A name for users; `None` for a type that is not known here.
    pub fn name(self) -> Option<&'static str> {
        match self {
            PartitionKind::Gpt(guid) => {
                let code = guid_text(guid);
                GPT_KINDS.iter().find(|known| known.0 == code).map(|known| known.1)
            }
            PartitionKind::Mbr(kind) => {
                MBR_KINDS.iter().find(|known| known.0 == kind).map(|known| known.1)
            }
        }
    }

    fn is_extended(self) -> bool {
        matches!(self, PartitionKind::Mbr(0x05 | 0x0f | 0x85))
    }
}

/// A GUID, whose first three numbers are stored with the least byte first.
fn guid_text(guid: [u8; 16]) -> String {
    const ORDER: [usize; 16] = [3, 2, 1, 0, 5, 4, 7, 6, 8, 9, 10, 11, 12, 13, 14, 15];
    let mut text = String::new();
    for (place, at) in ORDER.into_iter().enumerate() {
        if matches!(place, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text += &format!("{:02x}", guid[at]);
    }
    text
}

impl PartitionEntry {
    /// Whether it only contains logical partitions.
    pub fn is_extended(&self) -> bool {
        self.kind.is_extended()
    }

    /// Whether it is the entry of an MBR that stands for a GPT.
    pub fn is_protective(&self) -> bool {
        self.kind == PartitionKind::Mbr(PROTECTIVE)
    }

    /// Offset and length in bytes on a disk with this size and these sectors, in bytes; `None` if it is not a part of
    /// the disk.
    pub fn range(&self, sector: u64, size: u64) -> Option<(u64, u64)> {
        let offset = self.start.checked_mul(sector).filter(|&offset| offset > 0)?;
        let len = self.sectors.checked_mul(sector).filter(|&len| len > 0)?;
        offset.checked_add(len).filter(|&end| end <= size).map(|_| (offset, len))
    }
}

impl PartitionTable {
    /// The partition table of a disk of which it is not known whether it has one; `None` if it has none. The boot
    /// sector of a file system has the signature of an MBR, and no table.
    ///
    /// # Errors
    /// Those of [`PartitionTable::read`].
    pub async fn find(disk: &Arc<dyn Device>) -> Result<Option<PartitionTable>> {
        PartitionTable::read_where(disk, None, is_table).await
    }

    /// The partition table of a disk that has one, as its user says; `None` if it has none. `sector`: bytes of a
    /// sector; without it, those with which there is a GPT, or else 512.
    ///
    /// # Errors
    /// [`Kind::NotFound`] if a GPT has entries of another form than those of UEFI, and errors of reading.
    pub async fn read(
        disk: &Arc<dyn Device>,
        sector: Option<u64>,
    ) -> Result<Option<PartitionTable>> {
        PartitionTable::read_where(disk, sector, is_mbr).await
    }

    async fn read_where(
        disk: &Arc<dyn Device>,
        sector: Option<u64>,
        is_mbr: fn(&[u8]) -> bool,
    ) -> Result<Option<PartitionTable>> {
        let size = disk.facts().size;
        let sectors = sector.map_or(vec![512, 4096], |sector| vec![sector]);
        for &sector in &sectors {
            let reader = TableReader { disk, sector, size };
            let header = reader.sectors(1, 1).await?;
            if header.starts_with(b"EFI PART") {
                let partitions = reader.gpt(&header).await?;
                return Ok(Some(PartitionTable { format: TableFormat::Gpt, sector, partitions }));
            }
        }
        let sector = sectors[0];
        let partitions = TableReader { disk, sector, size }.mbr(is_mbr).await?;
        let table = |partitions| PartitionTable { format: TableFormat::Mbr, sector, partitions };
        Ok(partitions.map(table))
    }

    /// The partition of this number.
    pub fn partition(&self, number: u64) -> Option<&PartitionEntry> {
        self.partitions.iter().find(|entry| u64::from(entry.number) == number)
    }

    /// The numbers of all partitions that hold data, for users.
    pub fn numbers(&self) -> String {
        let data = self.partitions.iter().filter(|entry| !entry.is_extended());
        let numbers: Vec<_> = data.map(|entry| entry.number.to_string()).collect();
        match numbers.split_last() {
            None => "none".into(),
            Some((last, [])) => last.clone(),
            Some((last, others)) => format!("{} and {last}", others.join(", ")),
        }
    }
}

struct TableReader<'a> {
    disk: &'a Arc<dyn Device>,
    /// Bytes of a sector.
    sector: u64,
    /// Bytes of the disk.
    size: u64,
}

impl TableReader<'_> {
    /// Bytes of a number of sectors, as far as the disk has them.
    async fn sectors(&self, first: u64, count: u64) -> Result<Vec<u8>> {
        let Some(mut at) = first.checked_mul(self.sector) else { return Ok(Vec::new()) };
        let end = at.saturating_add(count.saturating_mul(self.sector));
        let end = end.min(self.size - self.size % self.sector);
        let mut found = Vec::new();
        while at < end {
            let len = PIECE.min(end - at);
            found.extend_from_slice(self.disk.read(at, len as usize).await?.bytes());
            at += len;
        }
        Ok(found)
    }

    /// The partitions of a GPT with this header.
    async fn gpt(&self, header: &[u8]) -> Result<Vec<PartitionEntry>> {
        let count = le32(header, 80);
        let size = u64::from(le32(header, 84));
        // Entries have 128 bytes, or a power of two times that: none crosses a sector boundary.
        let fits = size >= 128 && size.is_power_of_two() && size <= self.sector;
        if !fits || count == 0 || count > GPT_ENTRIES_MAX {
            let text = format!("partition: a GPT of {count} entries of {size} bytes is not valid");
            return Err(Error::new(Kind::NotFound, text));
        }
        let len = u64::from(count) * size;
        let table = self.sectors(le64(header, 72), len.div_ceil(self.sector)).await?;
        let entries = (1..=count).zip(table.chunks_exact(size as usize));
        Ok(entries.filter_map(|(number, entry)| gpt_entry(number, entry)).collect())
    }

    /// The partitions of an MBR; `None` without one.
    async fn mbr(&self, is_mbr: fn(&[u8]) -> bool) -> Result<Option<Vec<PartitionEntry>>> {
        let first = self.sectors(0, 1).await?;
        if !is_mbr(&first) {
            return Ok(None);
        }
        let used = (1..).zip([0, 1, 2, 3].map(|index| mbr_entry(&first, index, 0)));
        let used = used.filter_map(|(number, entry)| Some(PartitionEntry { number, ..entry? }));
        let mut entries: Vec<_> = used.collect();
        if let Some(extended) = entries.iter().find(|entry| entry.is_extended()) {
            let logical = self.logical(extended.start).await?;
            entries.extend(logical);
        }
        Ok(Some(entries))
    }

    /// Logical partitions: a chain of tables, each with one partition and a link to the next.
    async fn logical(&self, extended: u64) -> Result<Vec<PartitionEntry>> {
        let mut table = extended;
        let mut seen = Vec::new();
        let mut entries = Vec::new();
        for number in 5..5 + LOGICAL_MAX {
            let found = self.sectors(table, 1).await?;
            if seen.contains(&table) || !is_mbr(&found) {
                break;
            }
            seen.push(table);
            let entry = mbr_entry(&found, 0, table);
            entries.extend(entry.map(|entry| PartitionEntry { number, ..entry }));
            match mbr_entry(&found, 1, extended) {
                Some(next) if next.is_extended() => table = next.start,
                _ => break,
            }
        }
        Ok(entries)
    }
}

fn is_mbr(sector: &[u8]) -> bool {
    sector.get(510..512) == Some(&[0x55, 0xaa])
}

/// Whether this is the first sector of a disk with an MBR. Like Linux: the boot sector of a file system has the
/// signature, too, and code in the place of the entries.
fn is_table(sector: &[u8]) -> bool {
    is_mbr(sector) && [0, 1, 2, 3].iter().all(|index| sector[446 + 16 * index] & 0x7f == 0)
}

/// An entry of a GPT; `None` if it is not used.
fn gpt_entry(number: u32, entry: &[u8]) -> Option<PartitionEntry> {
    let kind: [u8; 16] = entry[..16].try_into().ok()?;
    if kind == [0; 16] {
        return None;
    }
    let start = le64(entry, 32);
    // The last sector is included; what exceeds the disk has no range.
    let sectors = le64(entry, 40).checked_sub(start).map_or(0, |count| count.saturating_add(1));
    let units = entry[56..128].chunks_exact(2).map(|unit| u16::from_le_bytes([unit[0], unit[1]]));
    let units: Vec<_> = units.take_while(|&unit| unit != 0).collect();
    let name = String::from_utf16_lossy(&units);
    Some(PartitionEntry { number, start, sectors, kind: PartitionKind::Gpt(kind), name })
}

/// An entry of an MBR whose first sector counts from `base` on; `None` if it is not used.
fn mbr_entry(sector: &[u8], index: usize, base: u64) -> Option<PartitionEntry> {
    let entry = &sector[446 + 16 * index..][..16];
    let sectors = u64::from(le32(entry, 12));
    if entry[4] == 0 || sectors == 0 {
        return None;
    }
    let start = base + u64::from(le32(entry, 8));
    let kind = PartitionKind::Mbr(entry[4]);
    Some(PartitionEntry { number: 0, start, sectors, kind, name: String::new() })
}

fn le32(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn le64(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_have_the_names_of_other_programs() {
        let efi = [
            0x28, 0x73, 0x2a, 0xc1, 0x1f, 0xf8, 0xd2, 0x11, 0xba, 0x4b, 0, 0xa0, 0xc9, 0x3e, 0xc9,
            0x3b,
        ];
        let kind = PartitionKind::Gpt(efi);
        assert_eq!(kind.code(), "c12a7328-f81f-11d2-ba4b-00a0c93ec93b");
        assert_eq!(kind.name(), Some("EFI system"));
        let kind = PartitionKind::Mbr(0x83);
        assert_eq!((kind.code().as_str(), kind.name()), ("0x83", Some("Linux")));
        assert_eq!(PartitionKind::Mbr(0x01).name(), None);
    }

    #[test]
    fn what_exceeds_the_disk_has_no_range() {
        let entry = |start, sectors| PartitionEntry {
            number: 1,
            start,
            sectors,
            kind: PartitionKind::Mbr(0x83),
            name: String::new(),
        };
        assert_eq!(entry(1, 7).range(512, 4096), Some((512, 3584)));
        for (start, sectors) in [(1, 8), (0, 1), (1, 0), (u64::MAX, 1), (1, u64::MAX)] {
            assert_eq!(entry(start, sectors).range(512, 4096), None);
        }
    }
}
