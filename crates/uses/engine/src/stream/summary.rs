//! The summary of a copy from or to a pipe.

use std::time::Instant;

use crate::handle::Retries;
use crate::options::Summary;
use crate::progress::Progress;

/// A copy from or to a pipe that has come to its end.
pub(super) struct Ended<'a> {
    pub(super) progress: &'a Progress,
    pub(super) retries: &'a Retries,
    /// Bytes of the pipe.
    pub(super) size: u64,
    pub(super) digest: Option<String>,
    /// When the copy began.
    pub(super) started: Instant,
}

impl Ended<'_> {
    /// The summary.
    pub(super) fn summary(self) -> Summary {
        let done = self.progress.snapshot();
        Summary {
            size: self.size,
            data: done.data,
            zeroed: done.zeroed,
            skipped: done.skipped,
            resumed: 0,
            discarded: 0,
            not_discarded: 0,
            routes: self.progress.routes(),
            lanes: 1,
            requests: done.requests,
            request_size: done.request_size,
            retried: self.retries.summary(),
            digest: self.digest,
            elapsed: blockhaul_io::elapsed(self.started),
            warnings: Vec::new(),
            journal_stays: false,
        }
    }
}
