//! Persistent bitmaps, as contexts of extents ("Bitmaps").

use std::collections::HashSet;
use std::sync::Arc;

use blockhaul_block::{Device, Error, Extents, Result};

use super::error::damaged;
use super::header::{BitmapDirectory, Header};
use crate::bytes::{be16, be32, be64, index, text};
use crate::storage::read;

/// A persistent bitmap.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct BitmapDescription {
    /// Its name.
    pub name: String,
    /// Bytes of the disk for each bit.
    pub granularity: u64,
    /// Whether writers must keep it right.
    pub enabled: bool,
    /// Whether it was not saved correctly, and must not be used.
    pub in_use: bool,
}

/// The state of a dirty range in contexts `qemu:dirty-bitmap:NAME`, as QEMU's server reports it.
const DIRTY: u64 = 1;
/// Most bitmaps, and longest directory; QEMU allows as much of both.
pub(super) const COUNT_MAX: u32 = 65535;
pub(super) const DIRECTORY_MAX: u64 = 64 << 20;
/// Longest bitmap table in bytes that is kept in memory: a bitmap for 1 EiB with the defaults.
pub(super) const TABLE_MAX: u64 = 16 << 20;
/// Longest name in bytes; QEMU allows as much.
pub(super) const NAME_MAX: usize = 1023;
/// Length in bytes of the fixed part of an entry of the directory.
pub(super) const FIXED: usize = 24;
/// Granularities that QEMU supports, as powers of two.
pub(super) const GRANULARITY_BITS: std::ops::RangeInclusive<u8> = 9..=31;
/// Offsets in entries of a bitmap table: bits 9 to 55; the others, but the first, are reserved.
pub(super) const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
pub(super) const ALL_ONES: u64 = 1;
/// Part of a bitmap in bytes that is read at a time.
const PIECE: u64 = 64 << 10;

/// Flags of a bitmap.
pub(super) mod flag {
    /// It was not saved correctly.
    pub(in crate::qcow2) const IN_USE: u32 = 1 << 0;
    /// Programs that write to the disk must keep it right.
    pub(in crate::qcow2) const AUTO: u32 = 1 << 1;
    /// It may be used although its extra data is not understood.
    pub(super) const EXTRA_IS_COMPATIBLE: u32 = 1 << 2;
}

/// A bitmap that can be used.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct PersistentBitmap {
    pub(super) name: String,
    granularity_bits: u32,
    cluster_bits: u32,
    table: Vec<u64>,
}

/// Reads the bitmaps of an image that are consistent. One that is not, or that is damaged, is left
/// out with a warning: the disk can be read without.
pub(super) async fn list(
    file: &Arc<dyn Device>,
    file_len: u64,
    header: &Header,
    most: usize,
) -> Vec<PersistentBitmap> {
    let Some(directory) = header.bitmaps else { return Vec::new() };
    let found = match entries(file, file_len, header, directory).await {
        Ok(found) => found,
        Err(error) => {
            log::warn!("{}: its bitmaps are left out: {error}", file.facts().name);
            return Vec::new();
        }
    };
    let mut all = Vec::new();
    let mut names = HashSet::new();
    for entry in found {
        let name = entry.name.clone();
        if all.len() == most {
            log::warn!("{}: only the first {most} bitmaps are used", file.facts().name);
            break;
        }
        match entry.open(file, file_len, header).await {
            Ok(bitmap) if names.insert(name.clone()) => all.push(bitmap),
            Ok(_) => log::warn!("{}: a second bitmap {name:?} is left out", file.facts().name),
            Err(error) => log::warn!("{}: bitmap {name:?} is left out: {error}", file.facts().name),
        }
    }
    all
}

/// The names of the bitmaps that whoever writes to the disk must keep right.
///
/// # Errors
/// If the directory cannot be read.
pub(super) async fn kept_right(
    file: &Arc<dyn Device>,
    file_len: u64,
    header: &Header,
) -> Result<Vec<String>> {
    let Some(directory) = header.bitmaps else { return Ok(Vec::new()) };
    let found = entries(file, file_len, header, directory).await?;
    // One that is in use is not consistent, and stays so.
    let kept =
        found.into_iter().filter(|entry| entry.flags & (flag::AUTO | flag::IN_USE) == flag::AUTO);
    Ok(kept.map(|entry| entry.name).collect())
}

/// The name of each bitmap, consistent or not, and the offset and number of entries of its table.
///
/// # Errors
/// If the directory cannot be read.
pub(super) async fn tables(
    file: &Arc<dyn Device>,
    file_len: u64,
    header: &Header,
) -> Result<Vec<(String, u64, u64)>> {
    let Some(directory) = header.bitmaps else { return Ok(Vec::new()) };
    let found = entries(file, file_len, header, directory).await?;
    let place = |entry: BitmapEntry| (entry.name, entry.table, u64::from(entry.table_entries));
    Ok(found.into_iter().map(place).collect())
}

/// All bitmaps, for users.
///
/// # Errors
/// If the directory cannot be read.
pub(super) async fn describe(
    file: &Arc<dyn Device>,
    file_len: u64,
    header: &Header,
) -> Result<Vec<BitmapDescription>> {
    let Some(directory) = header.bitmaps else { return Ok(Vec::new()) };
    let found = entries(file, file_len, header, directory).await?;
    let all = found.into_iter().map(|entry| BitmapDescription {
        granularity: 1_u64.checked_shl(entry.granularity_bits.into()).unwrap_or(0),
        enabled: entry.flags & flag::AUTO != 0,
        in_use: entry.flags & flag::IN_USE != 0,
        name: entry.name,
    });
    Ok(all.collect())
}

/// An entry of the directory.
pub(super) struct BitmapEntry {
    pub(super) name: String,
    pub(super) table: u64,
    pub(super) table_entries: u32,
    pub(super) flags: u32,
    kind: u8,
    pub(super) granularity_bits: u8,
    extra: usize,
    /// Its bytes, up to the next entry.
    pub(super) raw: Vec<u8>,
}

/// The entries of a directory, in its order.
///
/// # Errors
/// If it exceeds the file or its limits, or an entry exceeds it.
pub(super) async fn entries(
    file: &Arc<dyn Device>,
    file_len: u64,
    header: &Header,
    directory: BitmapDirectory,
) -> Result<Vec<BitmapEntry>> {
    let BitmapDirectory { count, offset, len } = directory;
    let is_inside = offset.checked_add(len).is_some_and(|end| end <= file_len);
    if count > COUNT_MAX || len > DIRECTORY_MAX || !is_inside {
        return Err(damaged(format!(
            "{count} bitmaps in a directory of {len} bytes at offset {offset}"
        )));
    }
    if !offset.is_multiple_of(header.cluster()) {
        return Err(damaged(format!("a directory of bitmaps at offset {offset}")));
    }
    let bytes = read(file, offset, len).await?;
    let mut rest = &bytes[..];
    let mut all = Vec::new();
    for number in 0..count {
        let parsed = BitmapEntry::parse(rest);
        let (entry, used) =
            parsed.ok_or_else(|| damaged(format!("the entry of bitmap {number}")))?;
        all.push(entry);
        rest = rest.get(used..).unwrap_or_default();
    }
    Ok(all)
}

impl BitmapEntry {
    /// An entry and its length; `None` if it exceeds the directory.
    pub(super) fn parse(bytes: &[u8]) -> Option<(BitmapEntry, usize)> {
        let name_len = index(be16(bytes, 18)?.into());
        let extra = index(be32(bytes, 20)?.into());
        let start = FIXED.checked_add(extra)?;
        let end = start.checked_add(name_len)?;
        let used = end.checked_next_multiple_of(8)?;
        let entry = BitmapEntry {
            name: text(bytes.get(start..end)?),
            table: be64(bytes, 0)?,
            table_entries: be32(bytes, 8)?,
            flags: be32(bytes, 12)?,
            kind: *bytes.get(16)?,
            granularity_bits: *bytes.get(17)?,
            extra,
            // The last one may lack its padding.
            raw: bytes.get(..used).or(bytes.get(..end))?.to_vec(),
        };
        Some((entry, used))
    }

    /// The offsets of the clusters with bits, of a table that was checked.
    ///
    /// # Errors
    /// If the table, or an entry of it, cannot be right.
    pub(super) async fn clusters(
        &self,
        file: &Arc<dyn Device>,
        file_len: u64,
        cluster: u64,
    ) -> Result<Vec<u64>> {
        let len = u64::from(self.table_entries) * 8;
        let is_inside = self.table.checked_add(len).is_some_and(|end| end <= file_len);
        if !is_inside || !self.table.is_multiple_of(cluster) || len > TABLE_MAX {
            let BitmapEntry { table, table_entries, .. } = self;
            return Err(damaged(format!("a table of {table_entries} entries at offset {table}")));
        }
        let bytes = read(file, self.table, len).await?;
        let mut all = Vec::new();
        for entry in bytes.chunks_exact(8).filter_map(|entry| be64(entry, 0)) {
            check(entry, cluster, file_len)?;
            if entry & OFFSET != 0 {
                all.push(entry & OFFSET);
            }
        }
        Ok(all)
    }

    /// The bitmap, if it can be used.
    ///
    /// # Errors
    /// If it is in use or damaged.
    pub(super) async fn open(
        &self,
        file: &Arc<dyn Device>,
        file_len: u64,
        header: &Header,
    ) -> Result<PersistentBitmap> {
        let granularity_bits = u32::from(self.granularity_bits);
        if !(1..=NAME_MAX).contains(&self.name.len()) {
            return Err(damaged(format!("a name of {} bytes", self.name.len())));
        }
        if self.kind != 1 || !GRANULARITY_BITS.contains(&self.granularity_bits) {
            let kind = self.kind;
            return Err(damaged(format!("type {kind}, granularity 2^{granularity_bits}")));
        }
        if self.flags & flag::IN_USE != 0 {
            return Err(super::error::unsupported(
                "it was not saved correctly by its last user",
                "remove it, make a new one, and make a full backup",
            ));
        }
        if self.extra > 0 && self.flags & flag::EXTRA_IS_COMPATIBLE == 0 {
            return Err(damaged("it has unknown data that it needs"));
        }
        let bits = header.size.div_ceil(1 << granularity_bits);
        let needed = bits.div_ceil(8).div_ceil(header.cluster());
        let is_inside = self.table.checked_add(needed * 8).is_some_and(|end| end <= file_len);
        if needed > self.table_entries.into() || !is_inside || needed * 8 > TABLE_MAX {
            return Err(damaged(format!(
                "a table of {} entries, {needed} needed",
                self.table_entries
            )));
        }
        let bytes = read(file, self.table, needed * 8).await?;
        let table: Vec<_> = bytes.chunks_exact(8).filter_map(|entry| be64(entry, 0)).collect();
        for &entry in &table {
            check(entry, header.cluster(), file_len)?;
        }
        Ok(PersistentBitmap {
            name: self.name.clone(),
            granularity_bits,
            cluster_bits: header.cluster_bits,
            table,
        })
    }
}

fn check(entry: u64, cluster: u64, file_len: u64) -> Result<()> {
    let offset = entry & OFFSET;
    let fine = match offset {
        0 => entry & !ALL_ONES == 0,
        _ => entry == offset && offset.is_multiple_of(cluster) && offset + cluster <= file_len,
    };
    if fine { Ok(()) } else { Err(damaged(format!("entry {entry:#x} of its table"))) }
}

impl PersistentBitmap {
    /// The states of a range of the disk, at least one byte; ends early when there are `most` runs.
    pub(super) async fn extents(
        &self,
        file: &Arc<dyn Device>,
        at: u64,
        end: u64,
        most: usize,
    ) -> Result<Extents> {
        let mut all = Extents::new();
        let mut next = at;
        while next < end && all.len() <= most {
            let byte = next >> self.granularity_bits >> 3;
            let entry = self.table.get(index(byte >> self.cluster_bits)).copied().unwrap_or(0);
            // Where the bits of this cluster of the bitmap end on the disk.
            let until = |bytes: u64| {
                let end_byte = u128::from(bytes) << (3 + self.granularity_bits);
                u64::try_from(end_byte).unwrap_or(u64::MAX).min(end)
            };
            let cluster_end = ((byte >> self.cluster_bits) + 1) << self.cluster_bits;
            if entry & OFFSET == 0 {
                let until = until(cluster_end);
                all.push(until - next, entry & ALL_ONES);
                next = until;
                continue;
            }
            let wanted = ((end - 1) >> self.granularity_bits >> 3) + 1;
            let last = (byte + PIECE).min(cluster_end).min(wanted);
            let host = (entry & OFFSET) + (byte & ((1 << self.cluster_bits) - 1));
            let bits = read(file, host, last - byte).await?;
            let until = until(last);
            self.push_bits(&bits, byte, (next, until), &mut all);
            next = until;
        }
        if all.is_empty() { Err(Error::misfit()) } else { Ok(all) }
    }

    /// Appends the states of a range by its bits, the first of which is that of byte `first` of the
    /// bitmap.
    fn push_bits(&self, bits: &[u8], first: u64, range: (u64, u64), all: &mut Extents) {
        let (mut next, end) = range;
        while next < end {
            let bit = next >> self.granularity_bits;
            let byte = bits.get(index((bit >> 3) - first)).copied().unwrap_or(0);
            // Most bytes have the same eight bits.
            let (state, bit_end) = match byte {
                0 => (0, ((bit >> 3) + 1) << 3),
                0xff => (DIRTY, ((bit >> 3) + 1) << 3),
                byte => (u64::from(byte >> (bit & 7) & 1), bit + 1),
            };
            let until = bit_end.checked_shl(self.granularity_bits).unwrap_or(end).min(end);
            all.push(until - next, state);
            next = until;
        }
    }
}
