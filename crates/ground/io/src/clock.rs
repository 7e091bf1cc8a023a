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

/// Whether this thread runs a simulation, in which several machines share one process.
pub fn is_simulated() -> bool {
    #[cfg(feature = "simulation")]
    return crate::simulation::now().is_some();
    #[cfg(not(feature = "simulation"))]
    false
}

/// Time since then; zero for a time in the future.
#[inline]
pub fn elapsed(since: Instant) -> Duration {
    now().saturating_duration_since(since)
}
