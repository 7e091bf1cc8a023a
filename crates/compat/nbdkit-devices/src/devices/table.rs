//! Partition tables: MBR with logical partitions, and GPT (UEFI specification, chapter 5).

use blockhaul_block::{Error, Kind, Result};

/// Sector size in bytes.
pub(crate) const SECTOR: u64 = 512;
/// Offset of the first entry of an MBR.
const MBR_ENTRIES: usize = 0x1be;
/// Size of a GPT entry in bytes, and the minimum number of entries.
const GPT_ENTRY: usize = 128;
const GPT_ENTRIES: usize = 128;
/// Partition types in an MBR: one with logical partitions, and one that protects a GPT.
const EXTENDED: u8 = 0x0f;
const PROTECTIVE: u8 = 0xee;

/// A sector with the signature of an MBR.
pub(crate) fn boot_sector() -> Vec<u8> {
    let mut sector = vec![0; SECTOR as usize];
    sector[0x1fe..].copy_from_slice(&[0x55, 0xaa]);
    sector
}

/// Writes entry `index` of an MBR: `sectors` from sector `start`. Only sector numbers are used: its
/// cylinders are the maximum, as for disks that are too large for cylinders.
pub(crate) fn mbr_entry(
    mbr: &mut [u8],
    index: usize,
    kind: u8,
    active: bool,
    (start, sectors): (u64, u64),
) -> Result<()> {
    let number = |number: u64| {
        u32::try_from(number).map(u32::to_le_bytes).map_err(|_| {
            let text = "a partition ends beyond 2 TiB, the limit of an MBR: use a GPT";
            Error::new(Kind::Usage, text)
        })
    };
    const CYLINDERS: [u8; 3] = [254, 0xff, 0xff];
    let entry = &mut mbr[MBR_ENTRIES + 16 * index..][..16];
    entry[0] = if active { 0x80 } else { 0 };
    entry[1..4].copy_from_slice(&CYLINDERS);
    entry[4] = kind;
    entry[5..8].copy_from_slice(&CYLINDERS);
    entry[8..12].copy_from_slice(&number(start)?);
    entry[12..16].copy_from_slice(&number(sectors)?);
    Ok(())
}

/// Writes an entry for an extended partition.
pub(crate) fn mbr_extended(mbr: &mut [u8], index: usize, sectors: (u64, u64)) -> Result<()> {
    mbr_entry(mbr, index, EXTENDED, false, sectors)
}

/// A GUID as stored in a GPT.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Guid(pub [u8; 16]);

impl Guid {
    /// Parses the usual form, with or without braces.
    pub fn parse(text: &str) -> Option<Guid> {
        let inner = text.strip_prefix('{').and_then(|text| text.strip_suffix('}'));
        let mut parts = inner.unwrap_or(text).split('-');
        let mut guid = [0; 16];
        let mut at = 0;
        for len in [4, 2, 2, 2, 6] {
            let part = parts.next().filter(|part| part.len() == 2 * len)?;
            if !part.bytes().all(|byte| byte.is_ascii_hexdigit()) {
                return None;
            }
            let place = &mut guid[at..at + len];
            for (index, byte) in place.iter_mut().enumerate() {
                *byte = u8::from_str_radix(&part[2 * index..2 * index + 2], 16).ok()?;
            }
            // The first three numbers are little-endian.
            if at < 8 {
                place.reverse();
            }
            at += len;
        }
        parts.next().is_none().then_some(Guid(guid))
    }

    /// A random one.
    pub fn random() -> Result<Guid> {
        let mut guid = [0; 16];
        let flags = rustix::rand::GetRandomFlags::empty();
        rustix::rand::getrandom(&mut guid, flags)
            .map_err(|error| Error::system("cannot get random bytes for a GUID", error.into()))?;
        // RFC 9562, section 5.4; the number with the version is little-endian.
        guid[7] = guid[7] & 0x0f | 0x40;
        guid[8] = guid[8] & 0x3f | 0x80;
        Ok(Guid(guid))
    }
}

/// A partition of a GPT.
pub(crate) struct GptEntry {
    pub kind: Guid,
    pub unique: Guid,
    /// First and last sector.
    pub sectors: (u64, u64),
    pub bootable: bool,
    /// Stored if it is ASCII and fits.
    pub name: String,
}

/// Bytes of the tables of a GPT with this many partitions: at the start of the disk, and at its
/// end.
pub(crate) fn gpt_len(partitions: usize) -> (u64, u64) {
    let entries = (gpt_entries(partitions) * GPT_ENTRY) as u64;
    (2 * SECTOR + entries, entries + SECTOR)
}

fn gpt_entries(partitions: usize) -> usize {
    partitions.next_multiple_of(GPT_ENTRIES).max(GPT_ENTRIES)
}

/// Both tables of a GPT on a disk of `size` bytes, which has space for both and all partitions.
pub(crate) fn gpt(entries: &[GptEntry], size: u64) -> Result<(Vec<u8>, Vec<u8>)> {
    let count = gpt_entries(entries.len());
    let mut table = vec![0; count * GPT_ENTRY];
    for (entry, out) in entries.iter().zip(table.chunks_mut(GPT_ENTRY)) {
        out[..16].copy_from_slice(&entry.kind.0);
        out[16..32].copy_from_slice(&entry.unique.0);
        out[32..40].copy_from_slice(&entry.sectors.0.to_le_bytes());
        out[40..48].copy_from_slice(&entry.sectors.1.to_le_bytes());
        // "Legacy BIOS bootable"
        out[48] = if entry.bootable { 4 } else { 0 };
        if entry.name.len() < 36 && entry.name.is_ascii() {
            for (unit, byte) in out[56..].chunks_mut(2).zip(entry.name.bytes()) {
                unit[0] = byte;
            }
        }
    }
    let header = GptHeader {
        table: table.len() as u64 / SECTOR,
        last: size / SECTOR - 1,
        count: count as u32,
        crc: crc32fast::hash(&table),
    };
    let mut first = boot_sector();
    // As much of the disk as the field can express.
    let covered = (size - 1).min(u64::from(u32::MAX) * SECTOR) + 1 - SECTOR;
    mbr_entry(&mut first, 0, PROTECTIVE, false, (1, covered.div_ceil(SECTOR)))?;
    first.extend(header.sector(1, header.last, 2));
    first.extend_from_slice(&table);
    let mut second = table;
    second.extend(header.sector(header.last, 1, header.last - header.table));
    Ok((first, second))
}

/// The contents of both headers of a GPT.
struct GptHeader {
    /// Sectors of the table.
    table: u64,
    /// Last sector of the disk.
    last: u64,
    /// Number of entries, and their checksum.
    count: u32,
    crc: u32,
}

impl GptHeader {
    /// The header in sector `here`, whose table is at sector `table`; the other header is in sector
    /// `other`.
    fn sector(&self, here: u64, other: u64, table: u64) -> Vec<u8> {
        // 92 bytes are defined; nbdkit counts four more, as compilers do.
        const LEN: usize = 96;
        let mut out = Vec::with_capacity(SECTOR as usize);
        out.extend_from_slice(b"EFI PART\0\0\x01\0");
        out.extend_from_slice(&(LEN as u32).to_le_bytes());
        // The checksum, set later, and a reserved field.
        out.extend_from_slice(&[0; 8]);
        for sector in [here, other, 2 + self.table, self.last - self.table - 1] {
            out.extend_from_slice(&sector.to_le_bytes());
        }
        // The GUID of the disk: none, so that the same files give the same disk.
        out.extend_from_slice(&[0; 16]);
        out.extend_from_slice(&table.to_le_bytes());
        for number in [self.count, GPT_ENTRY as u32, self.crc] {
            out.extend_from_slice(&number.to_le_bytes());
        }
        out.resize(LEN, 0);
        let crc = crc32fast::hash(&out);
        out[16..20].copy_from_slice(&crc.to_le_bytes());
        out.resize(SECTOR as usize, 0);
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guids_are_read_with_and_without_braces() {
        let text = "0FC63DAF-8483-4772-8E79-3D69D8477DE4";
        let linux = Guid([
            0xaf, 0x3d, 0xc6, 0x0f, 0x83, 0x84, 0x72, 0x47, 0x8e, 0x79, 0x3d, 0x69, 0xd8, 0x47,
            0x7d, 0xe4,
        ]);
        assert_eq!(Guid::parse(text), Some(linux));
        assert_eq!(Guid::parse(&format!("{{{}}}", text.to_lowercase())), Some(linux));
        for bad in ["", "{", &text[1..], &format!("{text}-"), &text.replace('A', "+"), "é"] {
            assert_eq!(Guid::parse(bad), None, "{bad}");
        }
    }
}
