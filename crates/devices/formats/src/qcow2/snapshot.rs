//! The table of internal snapshots ("Snapshots").

use std::sync::Arc;

use blockhaul_block::{Device, Error, Kind, Result};

use super::error::damaged;
use super::header::{Header, L1Place, check_l1_len};
use crate::bytes::{be16, be32, be64, index, text};
use crate::storage::read;

/// Most snapshots and longest table; QEMU allows as much of both.
pub(super) const COUNT_MAX: u32 = 65536;
const TABLE_MAX: u64 = 64 << 20;
/// Length in bytes of the fixed part of an entry.
const FIXED: usize = 40;
/// Most names in a message.
const NAMES_MAX: usize = 16;

/// A snapshot of the disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct InternalSnapshot {
    pub(super) id: String,
    pub(super) name: String,
    pub(super) l1: L1Place,
    /// Size of its disk in bytes; none if it is the image's.
    pub(super) size: Option<u64>,
    pub(super) facts: SnapshotFacts,
    /// Where its entry is in the table: from one offset to the other, padding included.
    pub(super) range: (u64, u64),
}

/// What a snapshot tells about the moment when it was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct SnapshotFacts {
    /// Length in bytes of the saved state of the virtual machine; 0 if there is none.
    pub vm_state: u64,
    /// Seconds since 1970, and nanoseconds.
    pub date: (u32, u32),
    /// How long the virtual machine had run, in nanoseconds.
    pub clock: u64,
    /// Instructions that it had run, if they were counted.
    pub instructions: Option<u64>,
}

impl SnapshotFacts {
    /// Those of an entry whose extra data has this length.
    fn parse(entry: &[u8], extra: usize) -> Option<SnapshotFacts> {
        let vm_state = match extra {
            8.. => be64(entry, FIXED)?,
            _ => be32(entry, 32)?.into(),
        };
        let instructions = if extra >= 24 { be64(entry, FIXED + 16) } else { None };
        Some(SnapshotFacts {
            vm_state,
            date: (be32(entry, 16)?, be32(entry, 20)?),
            clock: be64(entry, 24)?,
            // QEMU writes all ones if it does not count.
            instructions: instructions.filter(|&count| count != u64::MAX),
        })
    }
}

/// Reads the table of an image.
pub(super) async fn list(
    file: &Arc<dyn Device>,
    file_len: u64,
    header: &Header,
) -> Result<Vec<InternalSnapshot>> {
    Ok(list_with_len(file, file_len, header).await?.0)
}

/// The same, with the length of the table in bytes.
pub(super) async fn list_with_len(
    file: &Arc<dyn Device>,
    file_len: u64,
    header: &Header,
) -> Result<(Vec<InternalSnapshot>, u64)> {
    let table = header.snapshots;
    let mut all = Vec::new();
    if table.count == 0 {
        return Ok((all, 0));
    }
    if table.count > COUNT_MAX {
        return Err(damaged(format!("{} snapshots (at most {COUNT_MAX})", table.count)));
    }
    let mut entries =
        SnapshotReader { file, file_len, start: table.offset, at: table.offset, bytes: Vec::new() };
    for _ in 0..table.count {
        all.push(entries.next(header.cluster()).await?);
    }
    Ok((all, entries.at - entries.start))
}

/// The snapshot of this name, or else of this number.
pub(super) fn find(all: Vec<InternalSnapshot>, wanted: &str) -> Result<InternalSnapshot> {
    let place = all.iter().position(|one| one.name == wanted);
    let place = place.or_else(|| all.iter().position(|one| one.id == wanted));
    if let Some(place) = place {
        return all.into_iter().nth(place).ok_or_else(Error::misfit);
    }
    let names: Vec<_> = all.iter().take(NAMES_MAX).map(|one| format!("{:?}", one.name)).collect();
    let rest = all.len() - names.len();
    let known = match (names.is_empty(), rest) {
        (true, _) => "the image has none".to_string(),
        (false, 0) => format!("known are {}", names.join(", ")),
        (false, rest) => format!("known are {} and {rest} more", names.join(", ")),
    };
    let error = Error::new(Kind::NotFound, format!("qcow2: no snapshot {wanted:?}: {known}"));
    Err(if names.is_empty() { error } else { error.complete() })
}

/// Reads entries, whose lengths are known only one after the other.
struct SnapshotReader<'a> {
    file: &'a Arc<dyn Device>,
    file_len: u64,
    /// The start of the table, and of the next entry.
    start: u64,
    at: u64,
    /// What was read from `at` on.
    bytes: Vec<u8>,
}

impl SnapshotReader<'_> {
    async fn next(&mut self, cluster: u64) -> Result<InternalSnapshot> {
        self.ensure(FIXED).await?;
        let (Some(ids), Some(names), Some(extra)) =
            (be16(&self.bytes, 12), be16(&self.bytes, 14), be32(&self.bytes, 36))
        else {
            return Err(Error::misfit());
        };
        let ids = index(ids.into());
        let names = index(names.into());
        let extra = index(extra.into());
        let len = FIXED.saturating_add(extra).saturating_add(ids).saturating_add(names);
        self.ensure(len).await?;
        let snapshot = parse(&self.bytes[..len], extra, ids, cluster)?;
        let len = len.next_multiple_of(8);
        self.bytes.drain(..len.min(self.bytes.len()));
        let start = self.at - self.start;
        self.at = self.at.saturating_add(len as u64);
        Ok(InternalSnapshot { range: (start, self.at - self.start), ..snapshot })
    }

    /// Reads until `len` bytes from `at` on are there.
    async fn ensure(&mut self, len: usize) -> Result<()> {
        if len <= self.bytes.len() {
            return Ok(());
        }
        let end = self.at.saturating_add(len as u64);
        if end > self.file_len || end - self.start > TABLE_MAX {
            let start = self.start;
            return Err(damaged(format!(
                "the snapshot table at offset {start} exceeds the file, or 64 MiB"
            )));
        }
        // Entries are short: read some at once.
        let more = (len as u64).max(4096).min(self.file_len - self.at);
        self.bytes = read(self.file, self.at, more).await?.to_vec();
        Ok(())
    }
}

/// An entry with all of its parts.
fn parse(entry: &[u8], extra: usize, ids: usize, cluster: u64) -> Result<InternalSnapshot> {
    let (Some(offset), Some(entries)) = (be64(entry, 0), be32(entry, 8)) else {
        return Err(Error::misfit());
    };
    let (id, name) = entry[FIXED + extra..].split_at(ids);
    let id = text(id);
    let name = text(name);
    let l1 = L1Place { offset, entries };
    if !offset.is_multiple_of(cluster) {
        return Err(damaged(format!("snapshot {name:?} has an L1 table at offset {offset}")));
    }
    check_l1_len(l1)?;
    let size = if extra >= 16 { be64(entry, FIXED + 8) } else { None };
    if size.is_some_and(|size| i64::try_from(size).is_err()) {
        return Err(damaged(format!("snapshot {name:?} has more than 2^63 - 1 bytes")));
    }
    let facts = SnapshotFacts::parse(entry, extra).ok_or_else(Error::misfit)?;
    Ok(InternalSnapshot { id, name, l1, size, facts, range: (0, 0) })
}
