//! Ranges between two files that share their data, if the file system supports it (reflink).
//!
//! Both ends give access to their file for a range (`Device::file_at`). What is refused, for
//! whatever reason, is copied (`copy_range`), or read and written; a persistent error recurs there
//! and is reported.

use std::rc::Rc;
use std::sync::atomic::Ordering;

use blockhaul_block::{FileRange, LeaseAccess};

use super::{Lane, OpenSegment};
use crate::ledger::SegmentRange;
use crate::route_counters;
use crate::shared::EngineState;

/// Part of both files.
pub(super) struct ReflinkRange {
    at: u64,
    pub(super) from: FileRange,
    pub(super) to: FileRange,
}

impl Lane {
    /// Reflinks what it can of the data of a segment; returns the ranges that are done, in order.
    pub(super) async fn reflink_segment(
        self: &Rc<Self>,
        segment: &OpenSegment,
    ) -> Vec<SegmentRange> {
        if !self.shared.learned.kernel_copy.reflink.load(Ordering::Relaxed)
            || !self.kernel_may_copy()
        {
            return Vec::new();
        }
        let pieces = self.pieces(&segment.data());
        if pieces.is_empty() {
            return Vec::new();
        }
        self.note_doubts();
        self.safety.ledger.borrow_mut().wrote_content(segment.home);
        let shared = self.shared.clone();
        blockhaul_io::offload(move || reflink_all(&shared, pieces)).await.unwrap_or_default()
    }

    /// Whether the kernel may move bytes that are not inspected. Not if the target must be
    /// allocated (shared space is not its own), nor if all bytes must be checked or hashed.
    pub(super) fn kernel_may_copy(&self) -> bool {
        let resolved = &self.shared.resolved;
        let looks = (resolved.sparse != 0 && !resolved.sampled) || self.shared.streaming.is_some();
        !resolved.allocated && !looks
    }

    /// The files of both ends for a range, from its start on.
    pub(super) fn piece(&self, (at, end): SegmentRange) -> Option<ReflinkRange> {
        let source = self.source.device();
        let target = self.target.device();
        let mut from = source.file_at(at, end - at, LeaseAccess::Read)?;
        let mut to = target.file_at(at, end - at, LeaseAccess::Write)?;
        let both = from.len.min(to.len).min(end - at);
        (from.len, to.len) = (both, both);
        (both > 0).then_some(ReflinkRange { at, from, to })
    }

    /// The files of both ends for the data of a segment, in whole blocks.
    fn pieces(&self, data: &[SegmentRange]) -> Vec<ReflinkRange> {
        let from = self.source.facts();
        let to = self.target.facts();
        let unit = u64::from(from.allocation_unit.max(to.allocation_unit)).max(1);
        let mut pieces = Vec::new();
        for &(at, end) in data {
            // The last block of a file may be partial.
            let whole = if end == from.size { end } else { end - end % unit };
            let mut start = at.next_multiple_of(unit);
            while start < whole {
                let Some(piece) = self.piece((start, whole)) else { break };
                start += piece.to.len;
                pieces.push(piece);
            }
        }
        pieces
    }
}

impl EngineState {
    pub(super) fn count_moved(&self, counter: &std::sync::atomic::AtomicU64, at: u64, bytes: u64) {
        self.progress.add_data(at, bytes);
        route_counters::add(counter, bytes);
    }
}

/// Shares what can be shared, and returns those ranges. Blocks.
fn reflink_all(shared: &EngineState, pieces: Vec<ReflinkRange>) -> Vec<SegmentRange> {
    let mut done = Vec::new();
    for piece in pieces {
        if !shared.learned.kernel_copy.reflink.load(Ordering::Relaxed) || shared.stopped() {
            break;
        }
        let from = &piece.from;
        let to = &piece.to;
        match to.file.reflink_now(to.at, &from.file, from.at, to.len) {
            Ok(()) => {
                shared.count_moved(&shared.progress.counters.reflink, piece.at, to.len);
                done.push((piece.at, piece.at + to.len));
            }
            Err(error) => {
                log::debug!("reflink is no longer used: {}", blockhaul_io::plain(&error));
                shared.learned.kernel_copy.reflink.store(false, Ordering::Relaxed);
            }
        }
    }
    done
}
