//! The summary of a copy from or to a pipe.

use std::time::Instant;

use crate::handle::RetryControl;
use crate::options::CopySummary;
use crate::progress::CopyProgress;

/// A copy from or to a pipe that has come to its end.
pub(super) struct PipeCopyEnd<'a> {
    pub(super) progress: &'a CopyProgress,
    pub(super) retries: &'a RetryControl,
    /// Bytes of the pipe.
    pub(super) size: u64,
    pub(super) digest: Option<String>,
    /// When the copy began.
    pub(super) started: Instant,
}

impl PipeCopyEnd<'_> {
    /// The summary.
    pub(super) fn summary(self) -> CopySummary {
        let done = self.progress.snapshot();
        CopySummary {
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
