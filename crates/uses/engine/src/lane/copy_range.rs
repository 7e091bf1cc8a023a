//! Ranges between two files that the kernel copies by copy_file_range: always where a server of the
//! network's file system does it, else where that was found to be faster than reading and writing
//! (`offload`). What the kernel refuses or does not copy in full is read and written instead: an error
//! that matters is met again there, and told.

use std::rc::Rc;

use super::reflink::Piece;
use super::{Lane, SAMPLE_EVERY, Seen};
use crate::ledger::Range;
use crate::offload::Turn;

/// Bytes that are copied by one call: a limit on the rate is kept in such steps, and whoever stops a
/// copy waits for one.
const STEP: u64 = 16 << 20;
/// Ranges that are shorter are not worth a thread.
const SHORT: u64 = 1 << 20;

impl Lane {
    /// Copies from the start of a range of the segment at `home`, by copy_file_range or to measure that;
    /// gives where it ended. `None`: nothing was done.
    pub(super) async fn copy_range(
        self: &Rc<Self>,
        home: u64,
        (at, stop): Range,
        seen: &mut Seen,
    ) -> Option<u64> {
        let known = &self.job.offload.copy_range;
        if known.is_left() || !self.may_offload() {
            return None;
        }
        let piece = self.piece((at, stop))?;
        let remote = piece.from.file.is_remote() && piece.to.file.is_remote();
        if known.always || remote {
            return self.by_kernel(home, at, piece, STEP).await;
        }
        // A sample of the bytes is looked at, however they go.
        if piece.to.len < SHORT || self.looks(seen, at) || !through_cache(&piece) {
            return None;
        }
        let size = self.request_size();
        let unseen = match self.job.settled.sparse {
            0 => STEP,
            _ => (SAMPLE_EVERY - seen.requests % SAMPLE_EVERY).saturating_mul(size).min(STEP),
        };
        let limited = self.job.settled.is_limited();
        match known.turn(self.number) {
            Turn::Requests => None,
            // What a limit holds back tells nothing.
            Turn::TimeKernel(_) | Turn::TimeRequests(_) if limited => None,
            Turn::Kernel => {
                let done = self.by_kernel(home, at, piece, unseen).await?;
                seen.requests += (done - at).div_ceil(size);
                Some(done)
            }
            Turn::TimeKernel(most) => {
                self.drained().await;
                let started = blockhaul_io::now();
                let done = self.by_kernel(home, at, piece, unseen.min(most)).await?;
                known.note(done - at, blockhaul_io::elapsed(started));
                seen.requests += (done - at).div_ceil(size);
                Some(done)
            }
            Turn::TimeRequests(most) => {
                self.drained().await;
                let (started, stop) = (blockhaul_io::now(), stop.min(at + most));
                let mut here = at;
                while here < stop {
                    here = self.request(home, (here, stop), seen).await?;
                }
                self.drained().await;
                known.note(here - at, blockhaul_io::elapsed(started));
                Some(here)
            }
        }
    }

    /// Has the kernel copy up to `most` bytes of what both ends lend at `at`; gives where it ended.
    /// `None`: it does not, and will not be asked again.
    async fn by_kernel(&self, home: u64, at: u64, piece: Piece, most: u64) -> Option<u64> {
        let len = piece.to.len.min(most);
        self.job.settled.pace(len, || self.job.stopped()).await;
        if self.job.stopped() {
            return None;
        }
        self.note_doubts();
        self.ledger.borrow_mut().wrote_content(home);
        let Piece { from, to, .. } = piece;
        let copied =
            blockhaul_io::offload(move || to.file.copy_range_now(to.at, &from.file, from.at, len))
                .await;
        match copied {
            Ok(Ok(bytes)) if bytes == len => {
                self.job.count_moved(&self.job.progress.counters.copy_file_range, len);
                Some(at + len)
            }
            refused => {
                log::debug!("copy_file_range is not used any more: {refused:?}");
                self.job.offload.copy_range.leave();
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
