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
    /// Turns behind `come` that were given back, in order; those next to each other are one.
    given_back: Vec<Turn>,
    updated: Instant,
}

/// The place of a caller in the order of tokens: how many were drawn before its first one, and up to its last one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Turn {
    start: f64,
    end: f64,
}

impl TokenBucket {
    /// A full bucket: `rate` tokens per second (0: none come in), and `burst` tokens at once.
    pub fn new(rate: u64, burst: u64) -> TokenBucket {
        let (drawn, come, given_back) = (0.0, burst as f64, Vec::new());
        TokenBucket { rate, burst, drawn, come, given_back, updated: crate::now() }
    }

    /// Tokens per second.
    pub fn rate(&self) -> u64 {
        self.rate
    }

    /// Tokens that may come in ahead of those that are drawn.
    pub fn burst(&self) -> u64 {
        self.burst
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
        self.given_back.clear();
    }

    /// Draws `tokens`: all callers that draw later come after them.
    pub fn draw(&mut self, tokens: u64, now: Instant) -> Turn {
        self.update(now);
        let start = self.drawn;
        self.drawn += tokens as f64;
        Turn { start, end: self.drawn }
    }

    /// Gives back a turn whose caller does not go on: its tokens are for those that come after it.
    pub fn give_back(&mut self, turn: Turn, now: Instant) {
        self.update(now);
        let at = self.given_back.partition_point(|other| other.start < turn.start);
        self.given_back.insert(at, turn);
        self.given_back.dedup_by(|next, one| {
            let is_next = one.end == next.start;
            if is_next {
                one.end = next.end;
            }
            is_next
        });
        self.update(now);
    }

    /// How long until all tokens of a turn have come in; `None`: they have.
    pub fn wait(&mut self, turn: Turn, now: Instant) -> Option<Duration> {
        self.wait_for(turn.end, now)
    }

    /// How long until all tokens that were drawn so far have come in; `None`: they have. A caller that goes on
    /// then and draws as many as it wants lets the next ones wait for them.
    pub fn wait_for_all(&mut self, now: Instant) -> Option<Duration> {
        self.wait_for(self.drawn, now)
    }

    fn wait_for(&mut self, tokens: f64, now: Instant) -> Option<Duration> {
        self.update(now);
        let before = self.given_back.iter().take_while(|turn| turn.start < tokens);
        let missing = tokens - self.come - before.map(Turn::tokens).sum::<f64>();
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
        let mut come = self.come + passed.as_secs_f64() * self.rate as f64;
        let reached = self.given_back.iter().take_while(|turn| {
            let is_reached = turn.start <= come;
            come += if is_reached { turn.tokens() } else { 0.0 };
            is_reached
        });
        let reached = reached.count();
        self.given_back.drain(..reached);
        self.come = come.min(self.drawn + self.burst as f64);
        self.updated = now;
    }
}

impl Turn {
    fn tokens(&self) -> f64 {
        self.end - self.start
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

    #[test]
    fn turns_that_are_given_back_keep_nobody_waiting() {
        let mut bucket = TokenBucket::new(1000, 0);
        let start = bucket.updated;
        let turns: Vec<_> = (0..6).map(|_| bucket.draw(1000, start)).collect();
        let seconds = |seconds| Some(Duration::from_secs(seconds));
        for index in [1, 3, 2] {
            bucket.give_back(turns[index], start);
        }
        assert_eq!(bucket.given_back.len(), 1, "one run");
        assert_eq!(
            (bucket.wait(turns[4], start), bucket.wait(turns[5], start)),
            (seconds(2), seconds(3))
        );
        let now = start + Duration::from_millis(1500);
        assert_eq!(
            (bucket.wait(turns[0], now), bucket.wait(turns[4], now)),
            (None, Some(Duration::from_millis(500)))
        );
        // Half of the tokens of this turn were there.
        bucket.give_back(turns[4], now);
        assert_eq!(bucket.wait(turns[5], now), Some(Duration::from_millis(500)));
        bucket.give_back(turns[5], now);
        assert_eq!((bucket.wait_for_all(now), bucket.given_back.len()), (None, 0));
        let next = bucket.draw(1000, now);
        assert_eq!(bucket.wait(next, now), seconds(1), "no more than the burst is there");
    }
}
