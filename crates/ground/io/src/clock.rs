//! The one place that time comes from: whoever runs the workers in another time has it changed here alone.

use std::time::{Duration, Instant};

/// The present time.
#[expect(clippy::disallowed_methods, reason = "the clock that all others ask")]
#[inline]
pub fn now() -> Instant {
    Instant::now()
}

/// Time since then; zero for a time to come.
#[inline]
pub fn elapsed(since: Instant) -> Duration {
    now().saturating_duration_since(since)
}
