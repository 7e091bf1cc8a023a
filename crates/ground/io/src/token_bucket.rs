//! A token bucket: tokens come in at a rate, and callers that need some wait for their turn.

use std::time::{Duration, Instant};

/// Tokens of one kind: bytes, or requests.
///
/// A caller draws a turn, which is a place in the order of all tokens drawn so far, and may go on when as many
/// tokens have come in. Turns that were drawn earlier come first, and a new rate counts for all that wait.
/// The caller holds a lock around it.
#[derive(Debug)]
pub struct TokenBucket {
    rate: u64,
    burst: u64,
    /// Tokens drawn since the start.
    drawn: f64,
    /// Tokens that have come in since the start, at most `burst` more than were drawn.
    come: f64,
    updated: Instant,
}

/// The place of a caller in the order of tokens: how many were drawn up to its last one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Turn(f64);

impl TokenBucket {
    /// A full bucket: `rate` tokens per second (0: none come in), and `burst` tokens at once.
    pub fn new(rate: u64, burst: u64) -> TokenBucket {
        TokenBucket { rate, burst, drawn: 0.0, come: burst as f64, updated: crate::now() }
    }

    /// Tokens per second.
    pub fn rate(&self) -> u64 {
        self.rate
    }

    /// Changes the rate, in tokens per second, and the burst, also for callers that wait.
    pub fn set(&mut self, rate: u64, burst: u64, now: Instant) {
        self.update(now);
        (self.rate, self.burst) = (rate, burst);
        self.update(now);
    }

    /// Neither tokens that are there nor tokens that are missing count any more.
    pub fn empty(&mut self) {
        self.come = self.drawn;
    }

    /// Draws `tokens`: all callers that draw later come after them.
    pub fn draw(&mut self, tokens: u64, now: Instant) -> Turn {
        self.update(now);
        self.drawn += tokens as f64;
        Turn(self.drawn)
    }

    /// How long until all tokens of a turn have come in; `None`: they have.
    pub fn wait(&mut self, turn: Turn, now: Instant) -> Option<Duration> {
        self.wait_for(turn.0, now)
    }

    /// How long until all tokens that were drawn so far have come in; `None`: they have. A caller that goes on
    /// then and draws as many as it wants lets the next ones wait for them.
    pub fn wait_for_all(&mut self, now: Instant) -> Option<Duration> {
        self.wait_for(self.drawn, now)
    }

    fn wait_for(&mut self, tokens: f64, now: Instant) -> Option<Duration> {
        self.update(now);
        let missing = tokens - self.come;
        // What comes in within a nanosecond is the rounding of times.
        if missing <= self.rate as f64 * 1e-9 {
            return None;
        }
        let wait = Duration::try_from_secs_f64(missing / self.rate as f64);
        // A little rather than nothing, so that rounding makes no caller spin.
        Some(wait.unwrap_or(Duration::MAX).max(Duration::from_micros(50)))
    }

    fn update(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.updated);
        let come = self.come + passed.as_secs_f64() * self.rate as f64;
        self.come = come.min(self.drawn + self.burst as f64);
        self.updated = now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_come_in_at_the_rate_and_no_more_than_the_burst_ahead() {
        let mut bucket = TokenBucket::new(1_000_000, 64_000);
        let start = bucket.updated;
        bucket.draw(1_000_000, start);
        for ms in 0..=1200 {
            bucket.update(start + Duration::from_millis(ms));
            let due = (64_000.0 + 1000.0 * ms as f64).min(1_064_000.0);
            assert!((bucket.come - due).abs() < 1.0, "{} instead of {due} in {ms} ms", bucket.come);
        }
    }

    #[test]
    fn turns_come_in_order_and_a_new_rate_counts_for_all() {
        let mut bucket = TokenBucket::new(1000, 0);
        let now = bucket.updated;
        let first = bucket.draw(500, now);
        let second = bucket.draw(500, now);
        assert_eq!(bucket.wait(first, now), Some(Duration::from_millis(500)));
        assert_eq!(bucket.wait(second, now), Some(Duration::from_secs(1)));
        let now = now + Duration::from_millis(500);
        assert_eq!(bucket.wait(first, now), None);
        bucket.set(500, 0, now);
        assert_eq!(bucket.wait(second, now), Some(Duration::from_secs(1)));
        bucket.set(0, 0, now);
        assert_eq!(bucket.wait(second, now), Some(Duration::MAX), "none come in");
        bucket.empty();
        assert_eq!((bucket.wait(second, now), bucket.wait_for_all(now)), (None, None));
    }
}
