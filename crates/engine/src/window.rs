//! How many requests a lane keeps in flight, learned from how long they take.
//!
//! More in flight than the path can hold only fills queues: buffers fall out of the cache and memory is
//! pinned. Fewer leaves the path idle when answers take long. The rule is that of TCP Vegas: compare
//! the shortest time that a request took with what they take now; the difference times the window is
//! the number of requests that merely wait. Keep that number small but not zero.

use std::time::Duration;

/// Where a window starts: enough for a local socket, where more only costs (measured: 4 in flight
/// per connection are a third faster than 64 between servers on the same machine).
const START: usize = 4;
/// Fewer than this never pays: one is on the wire while another is worked on.
const MIN: usize = 2;
/// Waiting requests below which the window grows, and above which it shrinks.
const WAITING_LOW: f64 = 3.0;
const WAITING_HIGH: f64 = 6.0;
/// Rounds after which the shortest time is found out anew, so that a path that got slower is noticed.
const ROUNDS_PER_EPOCH: u32 = 64;

/// The window of one lane.
#[derive(Debug)]
pub(crate) struct Window {
    limit: usize,
    max: usize,
    fixed: bool,
    /// Doubles each round until requests first begin to wait.
    opening: bool,
    /// Shortest time of this epoch and of the one before, in seconds.
    shortest: f64,
    shortest_before: f64,
    rounds: u32,
    sum: f64,
    count: usize,
}

impl Window {
    /// A window of at most `max` requests; `fixed`: always that many.
    pub(crate) fn new(max: usize, fixed: bool) -> Window {
        let max = max.max(1);
        Window {
            limit: if fixed { max } else { START.min(max) },
            max,
            fixed,
            opening: true,
            shortest: f64::INFINITY,
            shortest_before: f64::INFINITY,
            rounds: 0,
            sum: 0.0,
            count: 0,
        }
    }

    /// Requests that may be in flight now.
    pub(crate) fn limit(&self) -> usize {
        self.limit
    }

    /// Learns from a full-sized request that took `time` while the window was used to the full.
    pub(crate) fn learn(&mut self, time: Duration) {
        if self.fixed {
            return;
        }
        let time = time.as_secs_f64().max(1e-9);
        self.shortest = self.shortest.min(time);
        self.sum += time;
        self.count += 1;
        if self.count >= self.limit {
            self.end_round();
        }
    }

    fn end_round(&mut self) {
        let typical = self.sum / self.count as f64;
        (self.sum, self.count) = (0.0, 0);
        let shortest = self.shortest.min(self.shortest_before);
        let waiting = self.limit as f64 * (1.0 - shortest / typical);
        if waiting < WAITING_LOW {
            let grown = if self.opening { self.limit * 2 } else { self.limit + 1 };
            self.limit = grown.min(self.max);
        } else {
            self.opening = false;
            if waiting > WAITING_HIGH {
                self.limit = (self.limit - 1).max(MIN.min(self.max));
            }
        }
        self.rounds += 1;
        if self.rounds.is_multiple_of(ROUNDS_PER_EPOCH) {
            self.shortest_before = self.shortest;
            self.shortest = f64::INFINITY;
            // A round with half the window shows what a request takes with less before it; a long
            // path has the whole window again one round later.
            self.limit = (self.limit / 2).max(MIN.min(self.max));
            self.opening = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A path that carries `rate` requests a second after `delay` seconds.
    fn settle(delay: f64, rate: f64, max: usize) -> usize {
        let mut window = Window::new(max, false);
        for _ in 0..20_000 {
            let time = delay.max(window.limit() as f64 / rate);
            window.learn(Duration::from_secs_f64(time));
        }
        window.limit()
    }

    #[test]
    fn a_long_path_opens_the_window_and_a_short_one_does_not() {
        assert_eq!(settle(0.050, 1e6, 64), 64);
        let short = settle(0.000_1, 10_000.0, 64);
        assert!((MIN..=12).contains(&short), "{short}");
    }

    #[test]
    fn long_paths_are_filled_within_a_few_rounds() {
        let mut window = Window::new(64, false);
        let mut requests = 0;
        while window.limit() < 64 {
            window.learn(Duration::from_millis(50));
            requests += 1;
        }
        assert!(requests < 128, "{requests}");
    }

    #[test]
    fn a_given_window_stays() {
        let mut window = Window::new(7, true);
        (0..1000).for_each(|_| window.learn(Duration::from_secs(1)));
        assert_eq!(window.limit(), 7);
        assert_eq!(Window::new(1, false).limit(), 1);
    }
}
