//! Ranges between two files that the kernel copies with copy_file_range: always if the server of a
//! network file system does the work, otherwise if it was measured to be faster than reading and
//! writing (`kernel_copy`). What the kernel refuses or copies only in part is read and written
//! instead; a persistent error recurs there and is reported.

use std::rc::Rc;

use super::reflink::ReflinkRange;
use super::{Lane, OpenSegment, SAMPLE_EVERY};
use crate::kernel_copy::CopyMethod;
use crate::ledger::{SegmentRange, SegmentStart};

/// Bytes per call: the step in which a rate limit is applied, and the longest that stopping a copy
/// has to wait for.
const STEP: u64 = 16 << 20;
/// Shorter ranges are not worth a thread.
const SHORT: u64 = 1 << 20;

impl Lane {
    /// Copies from the start of a range of a segment with copy_file_range, or to measure it;
    /// returns the end of the copied part. `None`: nothing was copied.
    pub(super) async fn copy_range(
        self: &Rc<Self>,
        segment: &OpenSegment,
        (at, stop): SegmentRange,
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
        // A sample of the bytes is checked for zeroes, whatever copies them.
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
            CopyMethod::Requests => None,
            // A measurement under a rate limit means nothing.
            CopyMethod::TimeKernel(_) | CopyMethod::TimeRequests(_) if limited => None,
            CopyMethod::Kernel => {
                let done = self.by_kernel(home, at, piece, unseen).await?;
                segment.count_moved((done - at).div_ceil(size));
                Some(done)
            }
            CopyMethod::TimeKernel(most) => {
                self.drained().await;
                let started = blockhaul_io::now();
                let done = self.by_kernel(home, at, piece, unseen.min(most)).await?;
                known.note(done - at, blockhaul_io::elapsed(started));
                segment.count_moved((done - at).div_ceil(size));
                Some(done)
            }
            CopyMethod::TimeRequests(most) => {
                self.drained().await;
                let started = blockhaul_io::now();
                let stop = stop.min(at + most);
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

    /// Has the kernel copy up to `most` bytes of the files of both ends at `at`; returns the end.
    /// `None`: the kernel refuses, and is not asked again.
    async fn by_kernel(
        &self,
        home: SegmentStart,
        at: u64,
        piece: ReflinkRange,
        most: u64,
    ) -> Option<u64> {
        let len = piece.to.len.min(most);
        self.shared.resolved.pace(len, || self.shared.stopped()).await;
        if self.shared.stopped() {
            return None;
        }
        self.note_doubts();
        self.safety.ledger.borrow_mut().wrote_content(home);
        let ReflinkRange { from, to, .. } = piece;
        let copied =
            blockhaul_io::offload(move || to.file.copy_range_now(to.at, &from.file, from.at, len))
                .await;
        match copied {
            Ok(Ok(bytes)) if bytes == len => {
                self.shared.count_moved(&self.shared.progress.counters.copy_file_range, at, len);
                Some(at + len)
            }
            refused => {
                let why = match refused {
                    Ok(Ok(bytes)) => format!("it copied {bytes} of {len} bytes"),
                    Ok(Err(error)) => blockhaul_io::plain(&error),
                    Err(lost) => lost.to_string(),
                };
                log::debug!("copy_file_range is no longer used: {why}");
                self.shared.learned.kernel_copy.copy_range.leave();
                None
            }
        }
    }
}

/// Whether reading and writing would use the page cache, as copying by the kernel does.
fn through_cache(piece: &ReflinkRange) -> bool {
    let from = &piece.from;
    let to = &piece.to;
    let cached = || from.file.cached(from.at, to.len).is_some_and(|cached| cached >= to.len);
    !to.past_cache && (!from.past_cache || cached())
}
