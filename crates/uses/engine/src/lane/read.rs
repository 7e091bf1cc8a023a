//! Segments that are read only: both sides are compared, or the source is digested.

use std::rc::Rc;
use std::sync::Arc;

use blockhaul_io::{Data, Reservation};

use super::chunk::RequestFailure;
use super::open::{OpenSegment, SegmentPiece};
use super::{Lane, StepResult};
use crate::blocks::find;
use crate::error::Result;
use crate::manifest::BLOCK;
use crate::reading::{SegmentScan, SourceScan};
use crate::segment_queue::SegmentQueue;
use crate::side::Side;

/// Minimum number of blocks in flight: a disk needs a few at a time even if they merely wait for
/// each other.
const IN_FLIGHT: usize = 8;

/// What was read of a side; `None` is all zero.
type SideReadResult = Result<Option<Data>, RequestFailure>;

impl Lane {
    /// Reads segments until none is left.
    pub(crate) async fn read_segments(
        self: &Rc<Self>,
        queue: &Arc<SegmentQueue>,
        reading: &Arc<SourceScan>,
    ) {
        self.work.reading.replace(Some(reading.clone()));
        self.pace.least.set(if self.shared.resolved.adaptive { IN_FLIGHT } else { 1 });
        self.change_size(BLOCK);
        self.take_part(queue).await;
        self.drained().await;
        self.shared.signals.end_work();
        self.pace.least.set(1);
        self.work.reading.replace(None);
        if self.shared.stopped() {
            // Also after a cancel that wakes nobody.
            queue.stop();
        }
    }

    /// Starts the first block of a piece of a segment.
    pub(super) async fn read_piece(
        self: &Rc<Self>,
        segment: &OpenSegment,
        part: &Rc<SegmentScan>,
        SegmentPiece { at, end, what }: SegmentPiece,
    ) -> StepResult {
        if part.reading.differs_before(at) {
            return StepResult::Ended;
        }
        let sides = part.reading.sides_with(what);
        if sides == [false; 2] {
            self.shared.progress.add_verified(at, end - at);
            segment.started_to(end);
            return StepResult::Further;
        }
        let len = (BLOCK - at % BLOCK).min(end - at);
        self.turn(len).await;
        if self.shared.stopped() {
            return StepResult::Stopped;
        }
        // Beyond its end, the target counts as zero.
        let beside = self.target.facts().size.saturating_sub(at).min(len);
        let lens = [if sides[0] { len } else { 0 }, if sides[1] { beside } else { 0 }];
        let rooms = match part.reading.rooms(lens).await {
            Ok(rooms) => rooms,
            Err(error) => {
                self.shared.fail(error);
                return StepResult::Stopped;
            }
        };
        let part = part.clone();
        self.start(segment.home, len, move |lane| async move {
            lane.read_block(&part, at, lens, rooms).await?;
            lane.shared.progress.add_verified(at, len);
            Ok(())
        });
        segment.started_to(at + len);
        StepResult::Further
    }

    async fn read_block(
        self: &Rc<Self>,
        part: &SegmentScan,
        at: u64,
        lens: [u64; 2],
        rooms: [Option<Reservation>; 2],
    ) -> Result<()> {
        let mut attempts = [0; 2];
        let mut rooms = Some(rooms);
        let (source, target) = loop {
            let rooms = match rooms.take() {
                Some(rooms) => rooms,
                None => part.reading.rooms(lens).await?,
            };
            let failed = match self.read_both(at, rooms).await {
                (Ok(source), Ok(target)) => break (source, target),
                (Err(failed), _) | (_, Err(failed)) => failed,
            };
            // No buffer is held while a side recovers.
            let attempts = &mut attempts[failed.side as usize];
            self.recover(failed, attempts).await?;
        };
        if let Some(data) = &source {
            self.source.keep_proof(at, data.bytes());
        }
        part.add(at, source.as_ref(), target.as_ref());
        Ok(())
    }

    /// Reads both sides of a block at the same time.
    async fn read_both(
        self: &Rc<Self>,
        at: u64,
        [source, target]: [Option<Reservation>; 2],
    ) -> (SideReadResult, SideReadResult) {
        let target = target.map(|room| {
            let lane = self.clone();
            blockhaul_io::start(async move { lane.read_side(Side::Target, room, at).await })
        });
        let source = match source {
            Some(room) => self.read_side(Side::Source, room, at).await,
            None => Ok(None),
        };
        let target = match target {
            Some(target) => target.await,
            None => Ok(None),
        };
        (source, target)
    }

    async fn read_side(&self, side: Side, room: Reservation, at: u64) -> SideReadResult {
        let end = if side == Side::Source { &self.source } else { &self.target };
        let found = find(end, room, at).await;
        found.map_err(|(error, generation)| RequestFailure { side, generation, error })
    }
}
