//! Ranges between two files that the kernel copies by copy_file_range: always where a server of the
//! network's file system does it, else where that was found to be faster than reading and writing
//! (`kernel_copy`). What the kernel refuses or does not copy in full is read and written instead: an error
//! that matters is met again there, and told.

use std::rc::Rc;

use super::reflink::Piece;
use super::{Lane, OpenSegment, SAMPLE_EVERY};
use crate::kernel_copy::Mover;
use crate::ledger::{Home, Range};

/// Bytes that are copied by one call: a limit on the rate is kept in such steps, and whoever stops a
/// copy waits for one.
const STEP: u64 = 16 << 20;
/// Ranges that are shorter are not worth a thread.
const SHORT: u64 = 1 << 20;

impl Lane {
    /// Copies from the start of a range of a segment, by copy_file_range or to measure that;
    /// gives where it ended. `None`: nothing was done.
    pub(super) async fn copy_range(
        self: &Rc<Self>,
        segment: &OpenSegment,
        (at, stop): Range,
    ) -> Option<u64> {
        let home = segment.home;
        let known = &self.shared.learned.kernel_copy.copy_range;
        if known.is_left() || !self.kernel_may_copy() {
            return None;
        }
        let piece = self.piece((at, stop))?;
        let remote = piece.from.file.is_remote() && piece.to.file.is_remote();
        if known.always || remote {
            return self.by_kernel(home, at, piece, STEP).await;
        }
        // A sample of the bytes is looked at, however they go.
        if piece.to.len < SHORT || self.looks(segment) || !through_cache(&piece) {
            return None;
        }
        let size = self.request_size();
        let unseen = match self.shared.resolved.sparse {
            0 => STEP,
            _ => (SAMPLE_EVERY - segment.requests.get() % SAMPLE_EVERY)
                .saturating_mul(size)
                .min(STEP),
        };
        let limited = self.shared.resolved.is_limited();
        match known.turn(self.number) {
            Mover::Requests => None,
            // What a limit holds back tells nothing.
            Mover::TimeKernel(_) | Mover::TimeRequests(_) if limited => None,
            Mover::Kernel => {
                let done = self.by_kernel(home, at, piece, unseen).await?;
                segment.count_moved((done - at).div_ceil(size));
                Some(done)
            }
            Mover::TimeKernel(most) => {
                self.drained().await;
                let started = blockhaul_io::now();
                let done = self.by_kernel(home, at, piece, unseen.min(most)).await?;
                known.note(done - at, blockhaul_io::elapsed(started));
                segment.count_moved((done - at).div_ceil(size));
                Some(done)
            }
            Mover::TimeRequests(most) => {
                self.drained().await;
                let (started, stop) = (blockhaul_io::now(), stop.min(at + most));
                let mut here = at;
                while here < stop {
                    here = self.request(segment, (here, stop)).await?;
                }
                self.drained().await;
                known.note(here - at, blockhaul_io::elapsed(started));
                Some(here)
            }
        }
    }

    /// Has the kernel copy up to `most` bytes of what both ends lend at `at`; gives where it ended.
    /// `None`: it does not, and will not be asked again.
    async fn by_kernel(&self, home: Home, at: u64, piece: Piece, most: u64) -> Option<u64> {
        let len = piece.to.len.min(most);
        self.shared.resolved.pace(len, || self.shared.stopped()).await;
        if self.shared.stopped() {
            return None;
        }
        self.note_doubts();
        self.safety.ledger.borrow_mut().wrote_content(home);
        let Piece { from, to, .. } = piece;
        let copied =
            blockhaul_io::offload(move || to.file.copy_range_now(to.at, &from.file, from.at, len))
                .await;
        match copied {
            Ok(Ok(bytes)) if bytes == len => {
                self.shared.count_moved(&self.shared.progress.counters.copy_file_range, len);
                Some(at + len)
            }
            refused => {
                log::debug!("copy_file_range is not used any more: {refused:?}");
                self.shared.learned.kernel_copy.copy_range.leave();
                None
            }
        }
    }
}

/// Whether reading and writing would go through the page cache, as copying by the kernel does.
fn through_cache(piece: &Piece) -> bool {
    let (from, to) = (&piece.from, &piece.to);
    let cached = || from.file.cached(from.at, to.len).is_some_and(|cached| cached >= to.len);
    !to.past_cache && (!from.past_cache || cached())
}
