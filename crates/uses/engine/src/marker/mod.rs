//! The marker of a copy that discards its source: a block on the target, for as long as the copy runs.
//!
//! It shows that source and target are two storages, that both are those of the journal, that the journal is
//! not older than the target, and that a connection that was made again leads to the same disk. A discard is
//! final, so none of this may be assumed.
//!
//! Two blocks of one segment are chosen, which is copied last: the *content*, a block with content, identifies
//! the source; the *place* of the marker is the last block of the same extent, which was most likely not read
//! before. The marker replaces the first bytes of what the target has there. Why each kill is safe:
//!
//! - Before the header of the journal is durable: nothing was written. Behind it, and before the marker:
//!   nothing but the header was, and the next run writes the marker.
//! - With the marker, and before it is shown that there are two storages: if there is one, the source lacks the
//!   bytes under the marker. The header has them, and the next run writes them back before it refuses.
//! - From then on until all else is copied, recorded and discarded: the marker is there. It says how many records
//!   the journal has, exactly. For each batch, and for one batch at a time, these become durable in this order: the
//!   batch, a marker with the *intent* to write its records behind those that are there, the records, a marker with
//!   the new number. Then the batch is discarded. A target with an intent has the batch, also one that was rolled
//!   back to it; so the journal may have the records or a part of them, or lack them, because nothing of the batch
//!   is discarded before the next marker. Every other difference is refused: with fewer records the journal is
//!   older than the target; with more, the target is in a state from before what they record. The number of a
//!   batch, which no other run uses, tells equal numbers of records apart.
//! - At the end the content is durable on the target before the marker is overwritten: one of them is always
//!   there. Before, the journal records that the marker *leaves*: only such a journal belongs to a target without
//!   it. All is recorded then but the last segment, of which the source still has everything.
//! - With its record, all is recorded, and the target has the content.
//!
//! A lost connection to the target may have led to a replica that lacks what was flushed last. The marker with the
//! intent is the first write behind the flush, and no connection is accepted that shows an older one. So if the
//! connection is still the one that was flushed when the intent is durable, and no other one is being made, each later
//! one has the batch; if not, the batch is written again. A lane writes the marker only over a connection that shows the
//! newest one: another lane may have written that while this lane was connected again.
//!
//! A write of the marker that was in flight when its connection was lost may reach the target later, also over what has
//! replaced the marker. So the place of the marker is read once more when the last segment is durable. If such a write
//! may still follow, the last segment is neither recorded nor discarded: the same command completes the copy later.
//!
//! What stays invisible: such a write of a killed run that follows the end of the next run; a source whose cache holds the place of the marker from before, or has read ahead so
//! far; a source that begins with the same blocks as that of the journal; a target and a journal that are both rolled
//! back; the same storage at another offset; a layer that opens another disk without a new handle between a flush and
//! the marker behind it; two servers of one image of which one has its tables in memory, where the other moves the place
//! of the marker, as QEMU does for compressed and shared clusters.

pub(crate) mod check;
pub(crate) mod choice;

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use blockhaul_block::{Device, DeviceExt as _};
use blockhaul_io::Notify;

use crate::ledger::SegmentRange;
use crate::side::Side;

/// Bytes of the marker, at the start of its block.
pub(crate) const LEN: usize = 72;
/// Bytes of its checksum, which end it.
const CHECK: usize = 16;
/// Its first bytes.
const MAGIC: &[u8; 16] = b"blockhaul marker";
/// How often a handle is read that shows neither the old nor the new state: a write may be under way.
const LOOKS: u32 = 3;

/// Where the marker is, and what it replaces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MarkerPlace {
    /// Offset of the block with the marker.
    pub(crate) at: u64,
    /// Offset of the block that identifies the source, in the same segment and not behind.
    pub(crate) content: u64,
    /// Bytes of each of the two blocks.
    pub(crate) len: u64,
    /// Digest of the content.
    pub(crate) digest: [u8; 32],
    /// What the target has had in place of the marker.
    pub(crate) before: [u8; LEN],
}

impl MarkerPlace {
    /// From the first byte of both blocks to the end of the last.
    pub(crate) fn range(&self) -> SegmentRange {
        (self.content, self.at + self.len)
    }

    /// Whether a block is the content.
    pub(crate) fn is_content(&self, block: &[u8]) -> bool {
        *blake3::hash(block).as_bytes() == self.digest
    }
}

/// How far the marker is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum MarkerStage {
    /// The target may have it or not.
    Begun,
    /// It is on the target.
    Placed,
    /// It is being overwritten, and the target has the content before.
    Leaving,
    /// The target has the content, and no marker.
    Restored,
    /// The source may lack the content.
    Discarded,
}

const STAGES: [MarkerStage; 5] = [
    MarkerStage::Begun,
    MarkerStage::Placed,
    MarkerStage::Leaving,
    MarkerStage::Restored,
    MarkerStage::Discarded,
];

/// How far the journal is, as a marker says it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct JournalPosition {
    /// Number of records.
    pub(crate) count: u64,
    /// Number of the batch of the last record; 0: there is none.
    pub(crate) last: u32,
    /// Number of the batch that is being recorded, and is durable; 0: there is none.
    pub(crate) next: u32,
}

/// What a block with a marker says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MarkerFields {
    id: [u8; 16],
    /// Number of the marker among those that the copy has written.
    sequence: u64,
    /// How far the journal is.
    pub(crate) position: JournalPosition,
}

impl MarkerFields {
    /// What a block says that begins with a marker, of any copy.
    pub(crate) fn of(block: &[u8]) -> Option<MarkerFields> {
        let (body, check) = block.get(..LEN)?.split_at(LEN - CHECK);
        let is_whole = blake3::hash(body).as_bytes()[..CHECK] == *check;
        let (magic, body) = body.split_first_chunk::<16>()?;
        let (id, body) = body.split_first_chunk::<16>()?;
        let (sequence, body) = body.split_first_chunk::<8>()?;
        let (count, body) = body.split_first_chunk::<8>()?;
        let (last, body) = body.split_first_chunk::<4>()?;
        let (next, _) = body.split_first_chunk::<4>()?;
        let position = JournalPosition {
            count: u64::from_be_bytes(*count),
            last: u32::from_be_bytes(*last),
            next: u32::from_be_bytes(*next),
        };
        let sequence = u64::from_be_bytes(*sequence);
        (is_whole && magic == MAGIC).then_some(MarkerFields { id: *id, sequence, position })
    }

    fn encode(&self) -> Vec<u8> {
        let mut block = MAGIC.to_vec();
        block.extend(self.id);
        block.extend(self.sequence.to_be_bytes());
        block.extend(self.position.count.to_be_bytes());
        block.extend(self.position.last.to_be_bytes());
        block.extend(self.position.next.to_be_bytes());
        let check = blake3::hash(&block);
        block.extend(&check.as_bytes()[..CHECK]);
        block
    }
}

/// The marker of one copy, for all its lanes.
pub(crate) struct Marker {
    /// Its place.
    pub(crate) place: MarkerPlace,
    id: [u8; 16],
    /// What follows the marker in its block.
    rest: OnceLock<Vec<u8>>,
    stage: AtomicU8,
    /// Sequence numbers: the newest one that is durable on the target, and the newest one that may be there.
    durable: AtomicU64,
    written: AtomicU64,
    /// A connection was lost with a write of a marker in flight, which the server may still carry out.
    may_follow: AtomicBool,
    /// A lane records a batch.
    is_busy: AtomicBool,
    changed: Notify,
}

impl Marker {
    /// The marker of the copy with this identifier.
    pub(crate) fn new(place: MarkerPlace, id: [u8; 16]) -> Arc<Marker> {
        Arc::new(Marker {
            place,
            id,
            rest: OnceLock::new(),
            stage: AtomicU8::new(0),
            durable: AtomicU64::new(0),
            written: AtomicU64::new(0),
            may_follow: AtomicBool::new(false),
            is_busy: AtomicBool::new(false),
            changed: Notify::default(),
        })
    }

    /// How far it is.
    pub(crate) fn stage(&self) -> MarkerStage {
        STAGES[usize::from(self.stage.load(Ordering::SeqCst))]
    }

    /// It is as far as this.
    pub(crate) fn enter(&self, stage: MarkerStage) {
        self.stage.fetch_max(stage as u8, Ordering::SeqCst);
    }

    /// The marker of this position, with a new sequence number, which may be on the target from now on.
    pub(crate) fn next(&self, position: JournalPosition) -> MarkerFields {
        let sequence = self.written.fetch_add(1, Ordering::SeqCst) + 1;
        MarkerFields { id: self.id, sequence, position }
    }

    /// This marker is durable on the target.
    pub(crate) fn wrote(&self, fields: &MarkerFields) {
        self.written.fetch_max(fields.sequence, Ordering::SeqCst);
        self.durable.fetch_max(fields.sequence, Ordering::SeqCst);
    }

    /// A connection was lost with a write of the marker in flight.
    pub(crate) fn lost_write(&self) {
        self.may_follow.store(true, Ordering::SeqCst);
    }

    /// Whether a write of an older marker may still reach the target.
    pub(crate) fn may_follow(&self) -> bool {
        self.may_follow.load(Ordering::SeqCst)
    }

    /// Waits until no other lane records a batch: the numbers of records are exact, and of two writes of the marker
    /// the newer one would not win for certain.
    pub(crate) async fn turn(&self) -> RecordTurn<'_> {
        loop {
            let changed = self.changed.listen();
            if !self.is_busy.swap(true, Ordering::SeqCst) {
                return RecordTurn(self);
            }
            let _ = changed.await;
        }
    }

    /// The block with this marker.
    pub(crate) fn block(&self, fields: &MarkerFields) -> Vec<u8> {
        let mut block = fields.encode();
        block.extend(self.rest.get().into_iter().flatten());
        block
    }

    /// What the marker of this copy says, if a block begins with that.
    pub(crate) fn fields(&self, block: &[u8]) -> Option<MarkerFields> {
        MarkerFields::of(block).filter(|fields| fields.id == self.id)
    }

    /// What the target has had in a block that may have the marker. Keeps what follows the marker.
    pub(crate) fn old_block(&self, mut block: Vec<u8>) -> Vec<u8> {
        if self.fields(&block).is_some() {
            block[..LEN].copy_from_slice(&self.place.before);
        }
        self.rest.get_or_init(|| block[LEN..].to_vec());
        block
    }

    /// Why a handle of this side does not show the disk of this copy, if so.
    ///
    /// # Errors
    /// The handle cannot be read.
    pub(crate) async fn differs(
        &self,
        side: Side,
        device: &dyn Device,
    ) -> blockhaul_block::Result<Option<String>> {
        let mut why = None;
        for _ in 0..LOOKS {
            why = match side {
                Side::Source => self.differs_source(device).await?,
                Side::Target => self.differs_target(device).await?,
            };
            if why.is_none() {
                break;
            }
        }
        Ok(why)
    }

    async fn differs_source(&self, device: &dyn Device) -> blockhaul_block::Result<Option<String>> {
        let MarkerPlace { at, content, len, .. } = self.place;
        let content_there = device.read(content, len as usize).await?;
        let place_there = device.read(at, len as usize).await?;
        if matches!(self.stage(), MarkerStage::Begun | MarkerStage::Discarded) {
            return Ok(None);
        }
        if MarkerFields::of(place_there.bytes()).is_some() {
            return Ok(Some(format!(
                "the source shows what was written to the target (at offset {at})"
            )));
        }
        let is_same = self.place.is_content(content_there.bytes());
        Ok((!is_same).then(|| {
            format!(
                "the content of the source has changed (at offset {content}): is it another disk?"
            )
        }))
    }

    async fn differs_target(&self, device: &dyn Device) -> blockhaul_block::Result<Option<String>> {
        let MarkerPlace { at, content, len, .. } = self.place;
        let oldest = self.durable.load(Ordering::SeqCst);
        let stage = self.stage();
        if stage == MarkerStage::Begun {
            return Ok(None);
        }
        let place_there = device.read(at, len as usize).await?;
        let newest = self.written.load(Ordering::SeqCst);
        let is_known = |fields: MarkerFields| (oldest..=newest).contains(&fields.sequence);
        let is_marked = self.fields(place_there.bytes()).is_some_and(is_known);
        let is_copied = stage > MarkerStage::Placed && {
            let content_there = device.read(content, len as usize).await?;
            self.place.is_content(content_there.bytes())
        };
        let is_same = is_copied || is_marked && stage <= MarkerStage::Leaving;
        let at = if stage == MarkerStage::Placed { at } else { content };
        Ok((!is_same && stage == self.stage()).then(|| {
            format!("the target lacks what was written to it (at offset {at}): is it another disk?")
        }))
    }
}

/// The only lane that records a batch.
pub(crate) struct RecordTurn<'a>(&'a Marker);

impl Drop for RecordTurn<'_> {
    fn drop(&mut self) {
        self.0.is_busy.store(false, Ordering::SeqCst);
        self.0.changed.notify();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn marker(id: u8) -> Arc<Marker> {
        let place =
            MarkerPlace { at: 8192, content: 4096, len: 4096, digest: [0; 32], before: [7; LEN] };
        Marker::new(place, [id; 16])
    }

    #[test]
    fn a_marker_is_that_of_its_copy_and_position() {
        let (own, other) = (marker(1), marker(2));
        let old = own.old_block((0..4096).map(|at| at as u8).collect());
        let fields = own.next(JournalPosition { count: 5, last: 3, next: 4 });
        let block = own.block(&fields);
        assert_eq!(block.len(), 4096);
        assert_eq!((own.fields(&block), other.fields(&block)), (Some(fields), None));
        assert_eq!(MarkerFields::of(&block), Some(fields));
        assert_eq!((own.fields(&old), own.fields(&[0; 4096]), own.fields(&[])), (None, None, None));
        assert_eq!(block[LEN..], old[LEN..]);
        for bit in 0..LEN * 8 {
            let mut damaged = block.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(own.fields(&damaged), None, "bit {bit}");
        }
        // What was there before comes from the header.
        let mut before = block.clone();
        before[..LEN].fill(7);
        assert!(own.old_block(block) == before);
    }

    #[test]
    fn stages_and_numbers_only_grow() {
        let marker = marker(1);
        marker.enter(MarkerStage::Leaving);
        marker.enter(MarkerStage::Placed);
        assert_eq!(marker.stage(), MarkerStage::Leaving);
        let [older, newer] =
            [1, 2].map(|count| marker.next(JournalPosition { count, last: 1, next: 0 }));
        marker.wrote(&newer);
        marker.wrote(&older);
        assert_eq!(marker.durable.load(Ordering::SeqCst), 2);
    }
}
