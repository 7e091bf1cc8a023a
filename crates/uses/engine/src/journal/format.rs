//! The file format of a journal: its header and records as bytes, and their meaning.

use std::fmt::Write as _;

use crate::marker::{JournalPosition, MarkerPlace};

pub(super) const MAGIC: &[u8; 20] = b"blockhaul journal 1\n";

/// Bytes before the first record.
pub(super) const HEADER: usize = 4096;

/// Bytes of a record.
pub(super) const RECORD: usize = 32;

/// Bytes of a checksum (a truncated BLAKE3).
pub(super) const CHECK: usize = 16;

/// Longest text that identifies a side; a longer one is replaced by its digest.
const TEXT_MAX: usize = 1500;

/// Why a file's header is not that of a journal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HeaderError {
    /// It is the file of another program.
    Foreign,
    /// It is or may be a journal's, and what it said of its copy is not known. After a loss of power, it may
    /// be empty or zeroes.
    Damaged,
}

impl HeaderError {
    /// The message, with a remedy.
    pub(super) fn text(self) -> &'static str {
        match self {
            HeaderError::Foreign => "it is not a journal: choose another name",
            HeaderError::Damaged => {
                "its header is damaged: if its copy was begun with --discard-source, what it recorded is on the \
                 target only, and a new copy would lack it: keep both sides and the journal, and put an undamaged \
                 copy of its latest state in its place. Only if it was begun without, remove the journal, and \
                 copy everything again"
            }
        }
    }
}

/// The bit of a record's lane that marks a segment with content. Old journals never set it.
const CONTENT: u32 = 1 << 31;

/// Bits of a record's number that hold the first segment; the others hold the exponent of the
/// count.
const NUMBER_BITS: u32 = 58;

/// What is copied where; must be the same when a copy continues.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct JournalIdentity {
    /// Segment size in bytes.
    pub(crate) segment: u64,
    /// Where the copy starts and ends in the source.
    pub(crate) range: (u64, u64),
    pub(crate) source_size: u64,
    pub(crate) target_size: u64,
    /// Digest of samples of the source.
    pub(crate) sample: [u8; 32],
    pub(crate) source: String,
    pub(crate) target: String,
    /// Digest of the ranges that are copied; zeroes for a single range.
    pub(crate) ranges: [u8; 32],
    /// What is recorded is discarded at the source.
    pub(crate) discards: bool,
    /// The target was found to read as zeroes when the copy began. Not compared: it is so no more.
    pub(crate) zeroes_checked: bool,
    /// Of a copy that discards: the target has a marker while it runs, if the source has content. Not compared.
    pub(crate) is_marked: bool,
    pub(crate) place: Option<MarkerPlace>,
}

/// Most bytes of a block with a marker: more than a device may ask for.
const BLOCK_MAX: u64 = 64 << 20;

/// Bits of the header, in one byte.
const DISCARDS: u8 = 1;
const ZEROES_CHECKED: u8 = 2;
const IS_MARKED: u8 = 4;
const HAS_PLACE: u8 = 8;

impl JournalIdentity {
    pub(super) fn shortened(mut self) -> JournalIdentity {
        for text in [&mut self.source, &mut self.target] {
            if text.len() > TEXT_MAX {
                *text = format!("blake3:{}", blake3::hash(text.as_bytes()).to_hex());
            }
        }
        self
    }

    pub(super) fn encode(&self, id: &[u8; 16]) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(id);
        let numbers =
            [self.segment, self.range.0, self.range.1, self.source_size, self.target_size];
        bytes.extend(numbers.iter().flat_map(|number| number.to_be_bytes()));
        bytes.extend(self.sample);
        for text in [&self.source, &self.target] {
            // At most TEXT_MAX bytes.
            bytes.extend((text.len() as u16).to_be_bytes());
            bytes.extend(text.as_bytes());
        }
        bytes.extend(self.ranges);
        // Old journals have zeroes from here on.
        let bits = [
            (DISCARDS, self.discards),
            (ZEROES_CHECKED, self.zeroes_checked),
            (IS_MARKED, self.is_marked),
            (HAS_PLACE, self.place.is_some()),
        ];
        bytes.push(bits.iter().filter(|bit| bit.1).map(|bit| bit.0).sum());
        if let Some(place) = &self.place {
            let numbers = [place.at, place.content, place.len];
            bytes.extend(numbers.iter().flat_map(|number| number.to_be_bytes()));
            bytes.extend(place.digest);
            bytes.extend(place.before);
        }
        bytes.resize(HEADER - CHECK, 0);
        let check = blake3::hash(&bytes);
        bytes.extend(&check.as_bytes()[..CHECK]);
        bytes
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<([u8; 16], JournalIdentity), HeaderError> {
        let damaged = HeaderError::Damaged;
        if !bytes.starts_with(MAGIC) {
            // The rest may be that of a journal.
            let is_blank = bytes.iter().take(HEADER).all(|byte| *byte == 0);
            return Err(if is_blank || has_check(bytes) { damaged } else { HeaderError::Foreign });
        }
        let header = bytes.get(..HEADER).filter(|header| has_check(header)).ok_or(damaged)?;
        let body = &header[..HEADER - CHECK];
        let mut fields = Fields(&body[MAGIC.len()..]);
        let parsed = (|| {
            let id = fields.array()?;
            let mut number = || Some(u64::from_be_bytes(fields.array()?));
            let segment = number()?;
            let start = number()?;
            let end = number()?;
            let source_size = number()?;
            let target_size = number()?;
            let sample = fields.array()?;
            let source = fields.text()?;
            let target = fields.text()?;
            let range = (start, end);
            let ranges = fields.array()?;
            let [bits] = fields.array::<1>()?;
            let has = |bit| bits & bit != 0;
            let place = if has(HAS_PLACE) { Some(fields.place()?) } else { None };
            let identity = JournalIdentity {
                segment,
                range,
                source_size,
                target_size,
                sample,
                source,
                target,
                ranges,
                discards: has(DISCARDS),
                zeroes_checked: has(ZEROES_CHECKED),
                is_marked: has(IS_MARKED),
                place,
            };
            Some((id, identity))
        })();
        parsed.ok_or(damaged)
    }

    /// Why a copy with this identity cannot continue as `now`.
    pub(super) fn differs(&self, now: &JournalIdentity) -> Option<String> {
        let mut text = String::new();
        if self.discards != now.discards {
            let how = if self.discards { "with" } else { "without" };
            text = format!("it was begun {how} --discard-source");
        } else if self.source != now.source || self.source_size != now.source_size {
            let _ = write!(
                text,
                "the source is not that of the journal: {} of {} bytes then, {} of {} bytes now",
                self.source, self.source_size, now.source, now.source_size
            );
        } else if self.target != now.target || self.target_size != now.target_size {
            let _ = write!(
                text,
                "the target is not that of the journal: {} of {} bytes then, {} of {} bytes now",
                self.target, self.target_size, now.target, now.target_size
            );
        } else if self.ranges != now.ranges {
            text = "it was started with other ranges".into();
        } else if self.segment != now.segment || self.range != now.range {
            text = "it was started with another range or segment size".into();
        } else if self.sample != now.sample {
            // Last, as it is of other places if the ranges differ.
            text = "the content of the source has changed since the journal was started".into();
        }
        (!text.is_empty()).then_some(text)
    }
}

/// Whether the checksum of a header is right, whatever its first bytes are.
fn has_check(bytes: &[u8]) -> bool {
    let Some(header) = bytes.get(..HEADER) else { return false };
    let (body, check) = header.split_at(HEADER - CHECK);
    let mut hasher = blake3::Hasher::new();
    hasher.update(MAGIC).update(&body[MAGIC.len()..]);
    hasher.finalize().as_bytes()[..CHECK] == *check
}

/// Segments that are durable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct JournalRecord {
    /// Number of the first segment in the source.
    pub(crate) segment: u64,
    /// Count of segments, as a power of two.
    pub(crate) exponent: u8,
    /// Number of the flush that made them durable.
    pub(crate) batch: u32,
    /// The lane that wrote them.
    pub(crate) lane: u32,
    /// Something other than zeroes was written there, as far as the lane knows.
    pub(crate) content: bool,
}

impl JournalRecord {
    /// The records of a range of segments.
    pub(super) fn of(
        (first, end): (u64, u64),
        content: bool,
        batch: u32,
        lane: u32,
    ) -> impl Iterator<Item = JournalRecord> {
        let mut next = first;
        std::iter::from_fn(move || {
            let exponent = end.checked_sub(next)?.checked_ilog2()? as u8;
            let record = JournalRecord { segment: next, exponent, batch, lane, content };
            next += 1 << exponent;
            Some(record)
        })
    }

    /// The record that everything is copied. No segment has its number.
    pub(super) const COMPLETE: JournalRecord = JournalRecord {
        segment: (1 << NUMBER_BITS) - 1,
        exponent: u8::MAX >> 2,
        batch: 0,
        lane: 0,
        content: false,
    };

    /// The record that all is recorded but what is copied last, and that the marker is about to be overwritten. No
    /// segment has its number.
    pub(super) const LEAVING: JournalRecord =
        JournalRecord { segment: JournalRecord::COMPLETE.segment - 1, ..JournalRecord::COMPLETE };

    /// Number of the segment after the last.
    pub(super) fn end(&self) -> u64 {
        // An exponent has six bits.
        self.segment.saturating_add(1 << self.exponent)
    }

    pub(super) fn encode(&self, id: &[u8; 16], index: u64) -> [u8; RECORD] {
        let mut bytes = [0; RECORD];
        let number = self.segment | u64::from(self.exponent) << NUMBER_BITS;
        bytes[..8].copy_from_slice(&number.to_be_bytes());
        bytes[8..12].copy_from_slice(&self.batch.to_be_bytes());
        let lane = self.lane & !CONTENT | if self.content { CONTENT } else { 0 };
        bytes[12..16].copy_from_slice(&lane.to_be_bytes());
        let check = check(&bytes[..RECORD - CHECK], id, index);
        bytes[RECORD - CHECK..].copy_from_slice(&check);
        bytes
    }

    fn decode(bytes: &[u8], id: &[u8; 16], index: u64) -> Option<JournalRecord> {
        let (body, found) = bytes.split_at_checked(RECORD - CHECK)?;
        if check(body, id, index) != *found {
            return None;
        }
        let mut fields = Fields(body);
        let number = u64::from_be_bytes(fields.array()?);
        let segment = number & ((1 << NUMBER_BITS) - 1);
        let exponent = (number >> NUMBER_BITS) as u8;
        let batch = u32::from_be_bytes(fields.array()?);
        let lane = u32::from_be_bytes(fields.array()?);
        let (lane, content) = (lane & !CONTENT, lane & CONTENT != 0);
        Some(JournalRecord { segment, exponent, batch, lane, content })
    }
}

/// Takes fields from the front of a slice.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (taken, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*taken)
    }

    /// The place of a marker, whose blocks lie in a device.
    fn place(&mut self) -> Option<MarkerPlace> {
        let mut number = || Some(u64::from_be_bytes(self.array()?));
        let (at, content, len) = (number()?, number()?, number()?);
        let digest = self.array()?;
        let before = self.array()?;
        let fits = len >= before.len() as u64 && len <= BLOCK_MAX;
        let is_there = fits && content <= at && at.checked_add(len).is_some();
        is_there.then_some(MarkerPlace { at, content, len, digest, before })
    }

    fn text(&mut self) -> Option<String> {
        let len = usize::from(u16::from_be_bytes(self.array()?));
        let (taken, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        String::from_utf8(taken.to_vec()).ok()
    }
}

pub(super) fn check(body: &[u8], id: &[u8; 16], index: u64) -> [u8; CHECK] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(id).update(&index.to_be_bytes()).update(body);
    let mut check = [0; CHECK];
    check.copy_from_slice(&hasher.finalize().as_bytes()[..CHECK]);
    check
}

/// The records of a journal's file, up to the first with a wrong checksum.
pub(super) fn recover(bytes: &[u8], id: &[u8; 16]) -> Vec<JournalRecord> {
    let records = bytes.get(HEADER..).unwrap_or_default().chunks_exact(RECORD).zip(0..);
    records.map_while(|(record, index)| JournalRecord::decode(record, id, index)).collect()
}

/// Whether a journal's file is damaged where its first `count` records end, which are those that [`recover`]
/// finds: no crash leaves the rest so.
///
/// A crash leaves a part of the last write, as records are durable before the next write: of each sector, what
/// was written, or zeroes. A sector has whole records. All that is written at once has one batch, and the records
/// that the marker leaves and that everything is copied are written alone.
pub(super) fn is_damaged(bytes: &[u8], id: &[u8; 16], count: usize) -> bool {
    let rest = bytes.get(HEADER + count * RECORD..).unwrap_or_default();
    let records = rest.chunks_exact(RECORD).zip(count as u64..);
    let mut valid = records.filter_map(|(record, index)| JournalRecord::decode(record, id, index));
    let Some(first) = valid.next() else { return false };
    let is_written = rest[..RECORD].iter().any(|&byte| byte != 0);
    let is_alone = [JournalRecord::COMPLETE, JournalRecord::LEAVING].contains(&first);
    is_written || is_alone || valid.any(|record| record.batch != first.batch)
}

/// The last batch of which something is recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LastBatch {
    number: u32,
    /// Records before it.
    before: u64,
}

/// What a journal records of earlier runs.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct JournalContent {
    /// Durable segments as ranges: the first and the one after the last; ascending, disjoint.
    pub(crate) segments: Vec<(u64, u64)>,
    /// Of those, the segments that each lane recorded last, and the last with content; ascending.
    /// Content distinguishes the target from another one that is fresh and all zeroes.
    pub(crate) edge: Vec<u64>,
    /// Everything is copied, and may be discarded at the source.
    pub(crate) complete: bool,
    /// An earlier run has begun the journal.
    pub(crate) is_earlier: bool,
    /// Number of records of segments.
    pub(crate) count: u64,
    /// The last batch of them.
    pub(crate) last: Option<LastBatch>,
    /// All is recorded but what is copied last, and the target may lack the marker.
    pub(crate) is_leaving: bool,
    /// The target was found to read as zeroes when the copy began.
    pub(crate) zeroes_checked: bool,
    /// Of a copy that discards its source: the place of its marker.
    pub(crate) place: Option<MarkerPlace>,
}

impl LastBatch {
    fn of(records: &[&JournalRecord]) -> Option<LastBatch> {
        let number = records.last()?.batch;
        let len = records.iter().rev().take_while(|record| record.batch == number).count();
        Some(LastBatch { number, before: (records.len() - len) as u64 })
    }
}

impl JournalContent {
    /// Everything is copied, of a range that ends before segment `end`.
    pub(super) fn everything(end: u64) -> JournalContent {
        JournalContent { segments: vec![(0, end)], complete: true, ..JournalContent::default() }
    }

    /// What these records say of a copy that `discards` what it records.
    pub(super) fn of(records: &[JournalRecord], discards: bool) -> JournalContent {
        let is_leaving = records.contains(&JournalRecord::LEAVING);
        let records: Vec<_> =
            records.iter().filter(|&&record| record != JournalRecord::LEAVING).collect();
        let last = |lane: u32, content: bool| {
            let own = records.iter().copied().filter(|record| record.lane == lane);
            own.filter(|record| record.content || !content).map(|record| record.batch).max()
        };
        let mut lanes: Vec<u32> = records.iter().map(|record| record.lane).collect();
        lanes.sort_unstable();
        lanes.dedup();
        let last_of: Vec<_> =
            lanes.into_iter().map(|lane| (lane, last(lane, false), last(lane, true))).collect();
        let ends_last = |record: &JournalRecord| {
            let batch = Some(record.batch);
            let own = |&&(lane, ..): &&(u32, _, _)| lane == record.lane;
            last_of
                .iter()
                .find(own)
                .is_some_and(|last| last.1 == batch || record.content && last.2 == batch)
        };
        let count = records.len() as u64;
        let last = LastBatch::of(&records);
        let mut recorded = JournalContent { count, last, is_leaving, ..JournalContent::default() };
        for record in records {
            match (ends_last(record), record.exponent) {
                // What was discarded cannot be compared, and must not be zeroed again: the source may
                // read as anything there.
                _ if discards => recorded.segments.push((record.segment, record.end())),
                (false, _) => recorded.segments.push((record.segment, record.end())),
                (true, 0) => {
                    recorded.segments.push((record.segment, record.end()));
                    recorded.edge.push(record.segment);
                }
                // Zeroes: zeroing again is faster than checking.
                (true, _) => {}
            }
        }
        recorded.edge.sort_unstable();
        recorded.edge.dedup();
        recorded.segments.sort_unstable();
        recorded.segments.dedup_by(|next, last| {
            let joined = next.0 <= last.1;
            if joined {
                last.1 = last.1.max(next.1);
            }
            joined
        });
        recorded
    }

    /// Whether a target with a marker of this position has what is recorded, and the journal records all that the
    /// target has that may be discarded.
    pub(crate) fn fits(&self, position: JournalPosition) -> bool {
        let JournalPosition { count, last, next } = position;
        let is_last = last == self.last.map_or(0, |batch| batch.number);
        let has_next = |batch: LastBatch| batch.number == next && batch.before == count;
        count == self.count && is_last || next != 0 && self.last.is_some_and(has_next)
    }

    /// The end of the recorded range that contains this segment, if it is recorded.
    pub(crate) fn reach(&self, segment: u64) -> Option<u64> {
        let behind = self.segments.partition_point(|range| range.0 <= segment);
        let range = self.segments.get(behind.checked_sub(1)?)?;
        (segment < range.1).then_some(range.1)
    }

    /// The first recorded segment after this one.
    pub(crate) fn next(&self, segment: u64) -> Option<u64> {
        let behind = self.segments.partition_point(|range| range.0 <= segment);
        self.segments.get(behind).map(|range| range.0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ID: [u8; 16] = *b"0123456789abcdef";

    fn identity() -> JournalIdentity {
        JournalIdentity {
            segment: 1 << 20,
            range: (0, 100 << 20),
            source_size: 100 << 20,
            target_size: 200 << 20,
            sample: [7; 32],
            source: "disk.raw inode 5".into(),
            target: "nbd://host/export".into(),
            ranges: [3; 32],
            discards: true,
            zeroes_checked: true,
            is_marked: true,
            place: Some(MarkerPlace {
                at: 8192,
                content: 4096,
                len: 4096,
                digest: [5; 32],
                before: [4; crate::marker::LEN],
            }),
        }
    }

    fn file(segments: &[(u64, u32, u32)]) -> (Vec<u8>, Vec<JournalRecord>) {
        let mut bytes = identity().encode(&ID);
        let mut records = Vec::new();
        for (index, &(segment, batch, lane)) in segments.iter().enumerate() {
            let record = JournalRecord { segment, exponent: 0, batch, lane, content: false };
            bytes.extend(record.encode(&ID, index as u64));
            records.push(record);
        }
        (bytes, records)
    }

    proptest! {
        #[test]
        fn any_prefix_and_any_damaged_bit_leave_a_prefix_of_the_records(
            segments in prop::collection::vec((0_u64..100, 1_u32..9, 0_u32..4), 0..20),
            cut in any::<prop::sample::Index>(),
            bit in any::<prop::sample::Index>(),
        ) {
            let (bytes, records) = file(&segments);
            prop_assert_eq!(recover(&bytes, &ID), records.clone());
            prop_assert_eq!(JournalIdentity::decode(&bytes).unwrap(), (ID, identity()));
            // Cut anywhere: the whole records before the cut remain.
            let cut = cut.index(bytes.len() + 1);
            match JournalIdentity::decode(&bytes[..cut]) {
                Ok(_) => {
                    let left = cut.saturating_sub(HEADER) / RECORD;
                    prop_assert!(cut >= HEADER);
                    prop_assert_eq!(recover(&bytes[..cut], &ID), &records[..left]);
                    prop_assert!(!is_damaged(&bytes[..cut], &ID, left));
                }
                Err(_) => prop_assert!(cut < HEADER),
            }
            // One flipped bit: in the header the journal is refused, in a record the records end
            // there, and it is damage unless it is the last.
            let bit = bit.index(bytes.len() * 8);
            let mut damaged = bytes.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            match JournalIdentity::decode(&damaged) {
                Ok(_) => {
                    prop_assert!(bit / 8 >= HEADER);
                    let left = (bit / 8 - HEADER) / RECORD;
                    prop_assert_eq!(recover(&damaged, &ID), &records[..left]);
                    prop_assert_eq!(is_damaged(&damaged, &ID, left), left + 1 < records.len());
                }
                Err(_) => prop_assert!(bit / 8 < HEADER),
            }
        }

        #[test]
        fn arbitrary_bytes_are_no_records(bytes in prop::collection::vec(any::<u8>(), 0..9000)) {
            prop_assert!(JournalIdentity::decode(&bytes).is_err());
            prop_assert!(recover(&bytes, &ID).is_empty());
        }
    }

    #[test]
    fn records_of_another_journal_or_place_do_not_count() {
        let (bytes, _) = file(&[(1, 1, 0), (2, 1, 0)]);
        assert!(recover(&bytes, b"another journal!").is_empty());
        let mut moved = bytes[..HEADER].to_vec();
        moved.extend(&bytes[HEADER + RECORD..]);
        assert!(recover(&moved, &ID).is_empty());
    }

    #[test]
    fn a_crash_leaves_a_part_of_the_last_write_only() {
        // Sectors of 16 records; the last write has 36 of them, from the middle of a sector on.
        let segments: Vec<_> =
            (0..44).map(|number| (number, u32::from(number > 7) + 1, 0)).collect();
        let (bytes, records) = file(&segments);
        for lost in 0..8_u32 {
            let mut left = bytes.clone();
            for sector in (0..3).filter(|sector| lost >> sector & 1 == 1) {
                let start = if sector == 0 { 8 } else { sector * 16 };
                let end = (sector * 16 + 16).min(44);
                left[HEADER + start * RECORD..HEADER + end * RECORD].fill(0);
            }
            let count = recover(&left, &ID).len();
            let expected = [44, 8, 16, 8, 32, 8, 16, 8][lost as usize];
            assert_eq!((count, is_damaged(&left, &ID, count)), (expected, false), "{lost}");
        }
        // Of an earlier write, or before the record that is written alone.
        let mut left = bytes.clone();
        left[HEADER..HEADER + RECORD].fill(0);
        assert!(is_damaged(&left, &ID, 0));
        let mut left = bytes;
        left.extend(JournalRecord::COMPLETE.encode(&ID, records.len() as u64));
        left[HEADER + 43 * RECORD..HEADER + 44 * RECORD].fill(0);
        assert!(is_damaged(&left, &ID, 43));
    }

    #[test]
    fn the_edge_is_the_last_batch_of_each_lane() {
        let (_, records) = file(&[(1, 1, 0), (2, 2, 1), (3, 3, 0), (4, 3, 0), (5, 4, 2)]);
        let recorded = JournalContent::of(&records, false);
        assert_eq!(recorded.segments, [(1, 6)]);
        assert_eq!(recorded.edge, [2, 3, 4, 5]);
        assert_eq!(
            (recorded.reach(0), recorded.reach(3), recorded.reach(6)),
            (None, Some(6), None)
        );
        assert_eq!((recorded.next(0), recorded.next(1)), (Some(1), None));
    }

    #[test]
    fn the_edge_has_what_was_last_written_with_content() {
        let (_, mut records) = file(&[(1, 1, 0), (2, 2, 0), (3, 3, 0), (4, 3, 1), (5, 4, 1)]);
        records[0].content = true;
        records[1].content = true;
        let recorded = JournalContent::of(&records, false);
        assert_eq!(recorded.segments, [(1, 6)]);
        assert_eq!(recorded.edge, [2, 3, 5]);
    }

    #[test]
    fn a_marker_fits_the_records_behind_it_or_the_batch_that_it_announces() {
        let (_, mut records) = file(&[(1, 1, 0), (2, 2, 1), (3, 5, 0), (4, 5, 0)]);
        let fits = |records: &[JournalRecord], count, last, next| {
            JournalContent::of(records, true).fits(JournalPosition { count, last, next })
        };
        for count in 0..6 {
            assert_eq!(fits(&records, count, 5, 0), count == 4, "{count}");
            assert_eq!(fits(&records, count, 5, 6), count == 4, "{count}");
            assert_eq!(fits(&records, count, 2, 5), count == 2, "{count}");
            // Announced, and written by another run; or not by this one.
            assert!(!fits(&records, count, 4, 0) && !fits(&records, count, 2, 4), "{count}");
        }
        // A part of what was announced.
        assert!(fits(&records[..3], 2, 2, 5) && fits(&records[..2], 2, 2, 5));
        assert!(!fits(&records[..1], 2, 2, 5));
        assert!(fits(&[], 0, 0, 0) && fits(&[], 0, 0, 1) && !fits(&[], 1, 1, 0));
        records.push(JournalRecord::LEAVING);
        assert!(fits(&records, 4, 5, 0) && JournalContent::of(&records, true).is_leaving);
    }

    #[test]
    fn many_segments_are_few_records() {
        let records: Vec<_> = JournalRecord::of((3, 3 + (1 << 47) + 5), false, 7, 0).collect();
        assert_eq!(records.len(), 3);
        assert_eq!(records.last().unwrap().end(), 3 + (1 << 47) + 5);
        for record in &records {
            let bytes = record.encode(&ID, 0);
            assert_eq!(JournalRecord::decode(&bytes, &ID, 0), Some(*record));
        }
        let mut earlier = records.clone();
        earlier.push(JournalRecord { segment: 0, exponent: 0, batch: 8, lane: 0, content: false });
        let recorded = JournalContent::of(&earlier, false);
        assert_eq!(recorded.segments, [(0, 1), (3, 3 + (1 << 47) + 5)]);
        // Of the last batch only what is verified is relied on.
        let recorded = JournalContent::of(&records, false);
        let last = 3 + (1 << 47) + 4;
        assert_eq!((recorded.segments, recorded.edge), (vec![(last, last + 1)], vec![last]));
    }

    #[test]
    fn long_names_and_changes_are_told_apart() {
        let mut long = identity();
        long.source = "x".repeat(70_000);
        let short = long.clone().shortened();
        assert_eq!(JournalIdentity::decode(&short.encode(&ID)).unwrap().1, short);
        let mut changes = [identity(), identity(), identity(), identity()];
        changes[0].source += "!";
        changes[1].sample[0] = 0;
        changes[2].target_size += 1;
        changes[3].segment *= 2;
        for (changed, word) in
            changes.iter().zip(["the source is not", "content", "the target", "segment size"])
        {
            let why = identity().differs(changed).unwrap();
            assert!(why.contains(word), "{why}");
        }
        assert_eq!(identity().differs(&identity()), None);
    }
}
