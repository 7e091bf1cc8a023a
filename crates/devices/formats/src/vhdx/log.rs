//! The log ([MS-VHDX] 2.3): changes of tables that may not be in their places yet. It is applied
//! in memory.

use std::collections::BTreeMap;
use std::sync::Arc;

use blockhaul_block::{Device, Result};

use super::header::{FORMAT, Guid, Header};
use crate::bytes::{array, index, le32, le64};
use crate::crc32c::Crc32c;
use crate::mapped::{check_within, damaged, unsupported};
use crate::storage::{self, len_of};

/// Entries consist of sectors of this length.
const SECTOR: u64 = 4096;
/// Longest log in bytes that is read: Hyper-V makes logs of 1 MiB.
const LOG_MAX: u64 = 64 << 20;
/// Lengths in bytes of an entry's header and of a descriptor.
const HEADER: usize = 64;
const DESCRIPTOR: usize = 32;
/// Checksums are computed over at most this many times the length of the log: each sector belongs
/// to few entries, unless they are made to take time.
const EFFORT: u64 = 16;

/// Parts of the file that differ from what is in it.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Patches {
    /// By their start; they do not overlap.
    parts: BTreeMap<u64, Patch>,
    /// The file has at least this length in bytes.
    pub(super) len: u64,
}

/// A part: its end, and its bytes, or zeroes.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Patch {
    end: u64,
    bytes: Option<Arc<[u8]>>,
}

impl Patches {
    /// Whether a part of a range differs.
    pub(super) fn touch(&self, at: u64, end: u64) -> bool {
        self.parts.range(..end).next_back().is_some_and(|(_, patch)| patch.end > at)
    }

    /// Changes bytes that were read from the file at `at`.
    pub(super) fn apply(&self, at: u64, out: &mut [u8]) {
        let end = at.saturating_add(out.len() as u64);
        for (&start, patch) in self.parts.range(..end).rev() {
            if patch.end <= at {
                break;
            }
            let from = start.max(at);
            let to = patch.end.min(end);
            let Some(part) = out.get_mut(index(from - at)..index(to - at)) else { continue };
            match &patch.bytes {
                None => part.fill(0),
                Some(bytes) => {
                    if let Some(bytes) = bytes.get(index(from - start)..index(to - start)) {
                        part.copy_from_slice(bytes);
                    }
                }
            }
        }
    }

    /// Adds a part over what was there. Bounds are multiples of a sector, and bytes are one sector,
    /// so that only zeroes are ever divided.
    fn add(&mut self, at: u64, end: u64, bytes: Option<Arc<[u8]>>) {
        while let Some((&start, patch)) = self.parts.range(..end).next_back() {
            let old = patch.clone();
            if old.end <= at {
                break;
            }
            self.parts.remove(&start);
            if old.end > end {
                self.parts.insert(end, Patch { end: old.end, bytes: None });
            }
            if start < at {
                self.parts.insert(start, Patch { end: at, bytes: None });
                break;
            }
        }
        if at < end {
            self.parts.insert(at, Patch { end, bytes });
        }
    }
}

/// Tells the user that the log is used.
pub(super) fn note(name: &str, patches: &Patches) {
    ::log::info!(
        "{name}: the program that wrote the image ended early: {} changes of its log are applied in memory",
        patches.parts.len()
    );
}

/// Reads the log; none if it is empty.
pub(super) async fn read(device: &Arc<dyn Device>, header: &Header) -> Result<Option<Patches>> {
    if header.log_id == [0; 16] {
        return Ok(None);
    }
    let at = header.log_at;
    let len = u64::from(header.log_len);
    let file_len = len_of(&device.facts());
    if len == 0 || !len.is_multiple_of(1 << 20) || !at.is_multiple_of(1 << 20) || at == 0 {
        return Err(damaged(FORMAT, format!("a log of {len} bytes at offset {at}")));
    }
    check_within(FORMAT, "the log", at, len, file_len)?;
    if len > LOG_MAX {
        let text = format!("a log of {len} bytes, which must be applied, is longer than {LOG_MAX}");
        return Err(unsupported(FORMAT, text, "open the image with Hyper-V once"));
    }
    let bytes = storage::read(device, at, len).await?;
    let patches = replay(&bytes, &header.log_id, file_len);
    patches.map(Some)
}

/// What the log with this identifier changes in a file.
///
/// # Errors
/// If the log has no valid sequence of entries, or describes a file that was longer.
pub(super) fn replay(log: &[u8], id: &Guid, file_len: u64) -> Result<Patches> {
    let effort = (log.len() as u64).saturating_mul(EFFORT);
    let mut reader = LogReader { log, id, effort };
    let Some(sequence) = reader.active()? else {
        return Err(damaged(FORMAT, "the log is in use, but has no valid sequence of entries"));
    };
    let mut patches = Patches::default();
    for entry in &sequence {
        if entry.flushed > file_len {
            let text = format!(
                "the file had {} bytes when its log was written, and has {file_len}",
                entry.flushed
            );
            return Err(damaged(FORMAT, text));
        }
        patches.len = patches.len.max(entry.last);
        reader.apply(entry, &mut patches)?;
    }
    if i64::try_from(patches.len).is_err() {
        return Err(damaged(FORMAT, format!("a file of {} bytes in the log", patches.len)));
    }
    Ok(patches)
}

/// A valid entry (2.3.1.1).
#[derive(Debug, Clone, Copy)]
struct LogEntry {
    /// Its offset in the log, and length, in bytes.
    at: u64,
    len: u64,
    /// The offset of the first entry that is needed when this one is the last.
    tail: u64,
    sequence: u64,
    descriptors: u32,
    /// The length in bytes that the file had at least, and that it gets.
    flushed: u64,
    last: u64,
}

impl LogEntry {
    /// The length in bytes of header and descriptors, in whole sectors.
    fn head(&self) -> u64 {
        let bytes = HEADER as u64 + u64::from(self.descriptors) * DESCRIPTOR as u64;
        bytes.next_multiple_of(SECTOR)
    }
}

struct LogReader<'a> {
    log: &'a [u8],
    id: &'a Guid,
    /// Bytes that checksums may still be computed over.
    effort: u64,
}

impl LogReader<'_> {
    fn len(&self) -> u64 {
        self.log.len() as u64
    }

    /// A sector of the log, which continues at its start.
    fn sector(&self, at: u64) -> &[u8] {
        let at = index(at % self.len().max(1));
        self.log.get(at..at + index(SECTOR)).unwrap_or_default()
    }

    /// The entries that count (2.3.2): of all sequences whose last entry needs none before them, the
    /// one with the largest sequence number, from the first entry that is needed on.
    fn active(&mut self) -> Result<Option<Vec<LogEntry>>> {
        let mut best: Option<Vec<LogEntry>> = None;
        let mut at = 0;
        while at < self.len() {
            let sequence = self.sequence(at)?;
            let (Some(first), Some(last)) = (sequence.first(), sequence.last()) else {
                at += SECTOR;
                continue;
            };
            let newest = best.as_ref().and_then(|best| best.last()).map_or(0, |last| last.sequence);
            let Some(needed) = sequence.iter().position(|entry| entry.at == last.tail) else {
                at += SECTOR;
                continue;
            };
            // One at the end of the log may go on at its start.
            at = if last.at >= first.at { last.at + last.len } else { self.len() };
            if best.is_none() || last.sequence > newest {
                best = Some(sequence[needed..].to_vec());
            }
        }
        Ok(best)
    }

    /// The entries from an offset on whose sequence numbers follow one another.
    fn sequence(&mut self, at: u64) -> Result<Vec<LogEntry>> {
        let mut all: Vec<LogEntry> = Vec::new();
        let mut total: u64 = 0;
        while let Some(entry) = self.entry((at + total) % self.len())? {
            let follows =
                all.last().is_none_or(|last| last.sequence.checked_add(1) == Some(entry.sequence));
            total += entry.len;
            if !follows || total > self.len() {
                break;
            }
            all.push(entry);
        }
        Ok(all)
    }

    /// The entry at an offset, if it is valid.
    fn entry(&mut self, at: u64) -> Result<Option<LogEntry>> {
        let head = self.sector(at);
        if !head.starts_with(b"loge") || array(head, 32) != Some(*self.id) {
            return Ok(None);
        }
        let Some(entry) = parse(head, at) else { return Ok(None) };
        let log = self.len();
        let fits = |len: u64| len > 0 && len.is_multiple_of(SECTOR) && len <= log;
        let fine = fits(entry.len)
            && entry.tail < log
            && entry.tail.is_multiple_of(SECTOR)
            && entry.sequence > 0
            && entry.head() <= entry.len;
        if !fine || le32(head, 4) != Some(self.checksum(&entry)?) {
            return Ok(None);
        }
        Ok(Some(entry))
    }

    fn checksum(&mut self, entry: &LogEntry) -> Result<u32> {
        let left = self.effort.checked_sub(entry.len);
        self.effort =
            left.ok_or_else(|| damaged(FORMAT, "a log whose entries overlap many times"))?;
        let mut crc = Crc32c::new();
        for done in (0..entry.len).step_by(index(SECTOR)) {
            let sector = self.sector(entry.at + done);
            match done {
                0 => {
                    crc.add(sector.get(..4).unwrap_or_default());
                    crc.add(&[0; 4]);
                    crc.add(sector.get(8..).unwrap_or_default());
                }
                _ => crc.add(sector),
            }
        }
        Ok(crc.sum())
    }

    /// Adds the changes of an entry.
    fn apply(&self, entry: &LogEntry, patches: &mut Patches) -> Result<()> {
        let bad = |what: &str| {
            damaged(FORMAT, format!("the log entry at offset {} of the log has {what}", entry.at))
        };
        let mut data = entry.head();
        for number in 0..u64::from(entry.descriptors) {
            let place = HEADER as u64 + number * DESCRIPTOR as u64;
            let sector = self.sector(entry.at + place / SECTOR * SECTOR);
            let start = index(place % SECTOR);
            let bytes = sector.get(start..start + DESCRIPTOR).unwrap_or_default();
            let fields = le64(bytes, 8).zip(le64(bytes, 16)).zip(le64(bytes, 24));
            let ((first, at), sequence) = fields.ok_or_else(|| bad("a short descriptor"))?;
            if sequence != entry.sequence || !at.is_multiple_of(SECTOR) {
                return Err(bad("a descriptor that does not belong to it"));
            }
            match bytes.get(..4) {
                Some(b"zero") => {
                    let end = at.checked_add(first).filter(|_| first.is_multiple_of(SECTOR));
                    patches.add(at, end.ok_or_else(|| bad("zeroes that are no sectors"))?, None);
                }
                Some(b"desc") if data < entry.len => {
                    let content = content(self.sector(entry.at + data), bytes, sequence);
                    let content =
                        content.ok_or_else(|| bad("a data sector that does not belong to it"))?;
                    let end = at.checked_add(SECTOR).ok_or_else(|| bad("data beyond all files"))?;
                    patches.add(at, end, Some(content));
                    data += SECTOR;
                }
                _ => return Err(bad("a descriptor of an unknown kind")),
            }
        }
        Ok(())
    }
}

fn parse(head: &[u8], at: u64) -> Option<LogEntry> {
    Some(LogEntry {
        at,
        len: le32(head, 8)?.into(),
        tail: le32(head, 12)?.into(),
        sequence: le64(head, 16)?,
        descriptors: le32(head, 24)?,
        flushed: le64(head, 48)?,
        last: le64(head, 56)?,
    })
}

/// The bytes of a data sector (2.3.1.4): its descriptor has the first 8 and the last 4, whose places
/// have the sequence number.
fn content(sector: &[u8], descriptor: &[u8], sequence: u64) -> Option<Arc<[u8]>> {
    let high = le32(sector, 4)?;
    let low = le32(sector, 4092)?;
    let number = u64::from(high) << 32 | u64::from(low);
    if !sector.starts_with(b"data") || number != sequence {
        return None;
    }
    let mut bytes = Vec::with_capacity(index(SECTOR));
    bytes.extend_from_slice(descriptor.get(8..16)?);
    bytes.extend_from_slice(sector.get(8..4092)?);
    bytes.extend_from_slice(descriptor.get(4..8)?);
    Some(bytes.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: Guid = [7; 16];
    const FILE: u64 = 16 << 20;

    /// A change: zeroes of this length, or a sector of this byte.
    enum Change {
        Zero(u64),
        Fill(u8),
    }

    /// An entry with changes at offsets of the file.
    fn entry(sequence: u64, tail: u64, changes: &[(u64, Change)]) -> Vec<u8> {
        let mut bytes = vec![0; 4096];
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        let fills = changes.iter().filter(|(_, change)| matches!(change, Change::Fill(_))).count();
        let len = 4096 * (1 + fills);
        put(0, b"loge");
        put(8, &(len as u32).to_le_bytes());
        put(12, &(tail as u32).to_le_bytes());
        put(16, &sequence.to_le_bytes());
        put(24, &(changes.len() as u32).to_le_bytes());
        put(32, &ID);
        put(48, &FILE.to_le_bytes());
        put(56, &FILE.to_le_bytes());
        let mut data = Vec::new();
        for (number, (at, change)) in changes.iter().enumerate() {
            let place = 64 + number * 32;
            match change {
                Change::Zero(len) => {
                    put(place, b"zero");
                    put(place + 8, &len.to_le_bytes());
                }
                Change::Fill(byte) => {
                    put(place, b"desc");
                    put(place + 4, &[*byte; 12]);
                    data.extend_from_slice(b"data");
                    data.extend_from_slice(&((sequence >> 32) as u32).to_le_bytes());
                    data.extend_from_slice(&[*byte; 4084]);
                    data.extend_from_slice(&(sequence as u32).to_le_bytes());
                }
            }
            put(place + 16, &at.to_le_bytes());
            put(place + 24, &sequence.to_le_bytes());
        }
        bytes.extend_from_slice(&data);
        let sum = crate::crc32c::of_structure(&bytes, 4);
        bytes[4..8].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// A log with entries at offsets, which go on at the start.
    fn log(entries: &[(u64, Vec<u8>)]) -> Vec<u8> {
        let mut log = vec![0; 1 << 20];
        for (at, entry) in entries {
            for (place, byte) in entry.iter().enumerate() {
                let place = (*at as usize + place) % log.len();
                log[place] = *byte;
            }
        }
        log
    }

    /// The first bytes of sectors of a file of 0xff.
    fn applied(log: &[u8], sectors: &[u64]) -> Vec<u8> {
        let patches = replay(log, &ID, FILE).unwrap();
        let first = |sector: &u64| {
            let mut bytes = vec![0xff; 4096];
            patches.apply(sector * 4096, &mut bytes);
            assert!(bytes.iter().all(|byte| *byte == bytes[0]));
            assert_eq!(patches.touch(sector * 4096 + 1, sector * 4096 + 2), bytes[0] != 0xff);
            bytes[0]
        };
        sectors.iter().map(first).collect()
    }

    #[test]
    fn the_newest_sequence_counts_from_the_first_entry_that_is_needed() {
        let fill = |byte| Change::Fill(byte);
        let entries = [
            // Not needed any more.
            (0, entry(5, 0, &[(4096, fill(1))])),
            (8192, entry(6, 8192, &[(8192, fill(2)), (3 * 4096, fill(3))])),
            (8192 + 3 * 4096, entry(7, 8192, &[(8192, fill(4))])),
            // Older, and behind a gap.
            (65536, entry(2, 65536, &[(8192, fill(9))])),
        ];
        assert_eq!(applied(&log(&entries), &[1, 2, 3, 4]), [0xff, 4, 3, 0xff]);
    }

    #[test]
    fn a_sequence_goes_on_at_the_start_of_the_log() {
        let end = (1 << 20) - 4096;
        let entries = [
            (end, entry(8, end, &[(4096, Change::Fill(1))])),
            (4096, entry(9, end, &[(8192, Change::Fill(2))])),
        ];
        assert_eq!(applied(&log(&entries), &[1, 2]), [1, 2]);
    }

    #[test]
    fn zeroes_and_data_replace_one_another() {
        let changes = [
            (0, Change::Zero(10 * 4096)),
            (3 * 4096, Change::Fill(5)),
            (5 * 4096, Change::Fill(6)),
            (4 * 4096, Change::Zero(3 * 4096)),
        ];
        let log = log(&[(0, entry(1, 0, &changes))]);
        assert_eq!(applied(&log, &[0, 2, 3, 4, 5, 6, 9, 10]), [0, 0, 5, 0, 0, 0, 0, 0xff]);
    }

    #[test]
    fn damaged_logs_are_refused() {
        let good = log(&[(0, entry(1, 0, &[(4096, Change::Fill(1))]))]);
        assert!(replay(&good, &ID, FILE).is_ok());
        assert!(replay(&good, &[8; 16], FILE).is_err());
        assert!(replay(&good, &ID, FILE - 1).unwrap_err().to_string().contains("when its log"));
        for at in [0, 8, 16, 24, 40, 70, 4097, 8191] {
            let mut bad = good.clone();
            bad[at] ^= 1;
            let text = replay(&bad, &ID, FILE).unwrap_err().to_string();
            assert!(text.contains("no valid sequence"), "{at}: {text}");
        }
        let odd = log(&[(0, entry(1, 0, &[(4097, Change::Fill(1))]))]);
        assert!(replay(&odd, &ID, FILE).unwrap_err().to_string().contains("does not belong"));
        let long = log(&[(0, entry(1, 0, &[(4096, Change::Zero(u64::MAX - 4095))]))]);
        assert!(replay(&long, &ID, FILE).unwrap_err().to_string().contains("no sectors"));
    }

    #[test]
    fn entries_that_overlap_take_bounded_time() {
        let mut log = vec![0; 4 << 20];
        let mut head = entry(1, 0, &[]);
        let len = log.len() as u32;
        head[8..12].copy_from_slice(&len.to_le_bytes());
        for sector in log.chunks_mut(4096) {
            sector.copy_from_slice(&head);
        }
        let text = replay(&log, &ID, FILE).unwrap_err().to_string();
        assert!(text.contains("overlap many times"), "{text}");
    }
}
