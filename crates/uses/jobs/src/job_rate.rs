//! The rate of a job, for reports.

use std::time::{Duration, Instant};

/// The rate of a job between two reports.
pub(crate) struct ReportedRate {
    since: Instant,
    data: u64,
    rate: u64,
}

impl ReportedRate {
    /// Minimum interval of two values.
    const APART: Duration = Duration::from_millis(500);

    /// The rate of a job that begins.
    pub(crate) fn new() -> ReportedRate {
        ReportedRate { since: blockhaul_io::now(), data: 0, rate: 0 }
    }

    /// Notes the bytes of data so far; returns bytes per second.
    pub(crate) fn note(&mut self, data: u64) -> u64 {
        let passed = blockhaul_io::elapsed(self.since);
        if passed >= Self::APART {
            let moved = data.saturating_sub(self.data) as f64;
            self.rate = (moved / passed.as_secs_f64()) as u64;
            (self.since, self.data) = (blockhaul_io::now(), data);
        }
        self.rate
    }
}
