//! Controls a running engine.

use std::sync::Arc;

use crate::rate::RateLimit;
use crate::shared::EngineState;
use crate::signals::PAUSED;

/// Pauses, resumes, throttles and cancels an engine, whatever it does; usable from any thread.
#[derive(Clone)]
pub struct EngineControl(pub(super) Arc<EngineState>);

impl EngineControl {
    /// Starts no new request from now on; those in flight complete. The journal is still written.
    pub fn pause(&self) {
        self.0.signals.set(PAUSED, true);
        self.0.learned.slots.wake();
    }

    /// Waits until no request is in flight after [`EngineControl::pause`].
    pub async fn paused(&self) {
        self.0.signals.quiet().await;
    }

    /// Continues after [`EngineControl::pause`].
    pub fn resume(&self) {
        self.0.signals.set(PAUSED, false);
    }

    /// Whether the engine is paused.
    pub fn is_paused(&self) -> bool {
        self.0.signals.is(PAUSED)
    }

    /// Waits while a request could not start because of a pause or the rate, or until the engine
    /// has failed or is cancelled.
    pub async fn may_start(&self) {
        let stopped = || self.0.stopped();
        while !stopped() {
            self.0.signals.resumed(stopped).await;
            self.rate().paid(|| stopped() || self.is_paused()).await;
            if !self.is_paused() {
                return;
            }
        }
    }

    /// Limits bytes and requests per second from now on; 0: no limit. If the options hold a rate,
    /// this changes it for all engines that share it.
    pub fn set_rate(&self, bytes: u64, requests: u64) {
        self.rate().set(bytes, requests);
        self.0.learned.tuner.disturb();
    }

    /// The limits in bytes and requests per second; 0: no limit.
    pub fn rate_limits(&self) -> (u64, u64) {
        self.rate().limits()
    }

    /// Lets this engine start requests without regard to the rate, which stays as it is for all others,
    /// until this is called with `false`.
    pub fn ignore_rate(&self, ignores: bool) {
        self.0.resolved.ignore_rate(ignores);
    }

    fn rate(&self) -> &Arc<RateLimit> {
        self.0.resolved.rate()
    }

    /// Ends the run soon, paused or not: submits nothing more and waits for what is in flight.
    /// [`Engine::summary`](crate::Engine::summary) returns the work done until then.
    pub fn cancel(&self) {
        self.0.progress.cancel();
        self.0.wake();
    }
}
