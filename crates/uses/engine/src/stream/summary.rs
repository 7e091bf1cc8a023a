//! The summary of a copy from or to a pipe.

use std::time::Instant;

use crate::handle::Retries;
use crate::options::Summary;
use crate::progress::Progress;

/// The summary of a copy that began at `started`.
pub(super) fn summary(
    (progress, retries): (&Progress, &Retries),
    size: u64,
    digest: Option<String>,
    started: Instant,
) -> Summary {
    let done = progress.snapshot();
    Summary {
        size,
        data: done.data,
        zeroed: done.zeroed,
        skipped: done.skipped,
        resumed: 0,
        discarded: 0,
        not_discarded: 0,
        routes: progress.routes(),
        lanes: 1,
        requests: done.requests,
        request_size: done.request_size,
        retried: retries.summary(),
        digest,
        elapsed: blockhaul_io::elapsed(started),
        warnings: Vec::new(),
    }
}
