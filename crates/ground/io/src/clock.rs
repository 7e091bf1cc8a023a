//! The only source of time, so that workers can run in simulated time by changing it here alone.

use std::time::{Duration, Instant};

/// The current time.
#[expect(clippy::disallowed_methods, reason = "the clock that all others ask")]
#[inline]
pub fn now() -> Instant {
    #[cfg(feature = "simulation")]
    if let Some(now) = crate::simulation::now() {
        return now;
    }
    Instant::now()
}

/// Time since then; zero for a time in the future.
#[inline]
pub fn elapsed(since: Instant) -> Duration {
    now().saturating_duration_since(since)
}
