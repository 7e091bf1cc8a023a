//! How many requests a lane keeps in flight, learned from the request times.
//!
//! More in flight than the path can hold only fills queues: buffers fall out of the cache and
//! memory is pinned. Fewer leaves the path idle when replies take long. The rule is that of TCP
//! Vegas: compare the shortest request time with the current one; the difference times the window
//! is the number of requests that merely wait. Keep that number small but not zero.

use std::time::Duration;

/// Initial window: enough for a local socket, where more only costs (measured: 4 in flight per
/// connection are a third faster than 64 between servers on the same machine).
const START: usize = 4;
/// Minimum window: one request is on the wire while another is processed.
const MIN: usize = 2;
/// Number of waiting requests below which the window grows, and above which it shrinks.
const WAITING_LOW: f64 = 3.0;
const WAITING_HIGH: f64 = 6.0;
/// Rounds after which the shortest time is measured anew, to notice a path that became slower.
const ROUNDS_PER_EPOCH: u32 = 64;
/// Request time in seconds from which on, if hardly any request waits, the path counts as long: the
/// window opens faster there. (On a path that is merely slow, requests wait.)
const LONG: f64 = 0.003;
const WAITING_HARDLY: f64 = 1.5;
/// If requests take at least this many seconds on average, a window twice as large is tried now and
/// then, and kept if the rate grows by this much: occasional replies from a cache make all others
/// look as if they merely waited. Local paths are never that slow, and noise must not open the
/// window.
const PROBE_FROM: f64 = 0.015;
const PROBE_GAIN: f64 = 1.3;
/// Rounds between such trials, rounds before the first, measured rounds and time, and rounds in
/// which a window that won does not shrink.
const ROUNDS_PER_PROBE: u32 = 32;
const ROUNDS_BEFORE_PROBE: u32 = 8;
const PROBE_ROUNDS: u32 = 2;
const PROBE_TIME: Duration = Duration::from_millis(50);
const HOLD: u32 = 64;

/// The window of one lane.
#[derive(Debug)]
pub(crate) struct RequestWindow {
    limit: usize,
    max: usize,
    fixed: bool,
    /// Doubles each round until requests begin to wait.
    opening: bool,
    /// Shortest time of this epoch and of the previous one, in seconds.
    shortest: f64,
    shortest_before: f64,
    rounds: u32,
    sum: f64,
    count: usize,
    /// The current measurement: start time, requests and rounds.
    measured: (Duration, usize, u32),
    /// Rounds in which the window does not shrink.
    held: u32,
    probe: Option<WindowProbe>,
    /// The last change of the request size, and the window before it.
    resized: Option<(f64, usize)>,
}

impl RequestWindow {
    /// A window of at most `max` requests; `fixed`: always that many.
    pub(crate) fn new(max: usize, fixed: bool) -> RequestWindow {
        let max = max.max(1);
        RequestWindow {
            limit: if fixed { max } else { START.min(max) },
            max,
            fixed,
            opening: true,
            shortest: f64::INFINITY,
            shortest_before: f64::INFINITY,
            rounds: 0,
            sum: 0.0,
            count: 0,
            measured: (Duration::ZERO, 0, 0),
            held: 0,
            probe: None,
            resized: None,
        }
    }

    /// Requests that may be in flight now.
    pub(crate) fn limit(&self) -> usize {
        self.limit
    }

    /// Learns from a full-sized request that took `time` and ended at the time `now`.
    pub(crate) fn learn(&mut self, time: Duration, now: Duration) {
        if self.fixed {
            return;
        }
        if self.rounds == 0 && self.count == 0 {
            self.measured = (now, 0, 0);
        }
        let time = time.as_secs_f64().max(1e-9);
        self.shortest = self.shortest.min(time);
        self.sum += time;
        self.count += 1;
        if self.count >= self.limit {
            self.end_round(now);
        }
    }

    /// Requests are `larger` times as large from now on (smaller if below one): forgets their
    /// times, and keeps as many bytes in flight, or returns to the window before if that undoes the
    /// last change.
    pub(crate) fn resize(&mut self, larger: f64) {
        if self.fixed {
            return;
        }
        let limit = match self.resized.take() {
            // The step is undone.
            Some((before, limit)) if before * larger == 1.0 => limit,
            _ => {
                self.resized = Some((larger, self.limit));
                self.opening = true;
                (self.limit as f64 / larger).round() as usize
            }
        };
        self.limit = limit.clamp(MIN.min(self.max), self.max);
        (self.shortest, self.shortest_before) = (f64::INFINITY, f64::INFINITY);
        (self.sum, self.count, self.held) = (0.0, 0, 0);
        self.probe = None;
        self.measured.2 = 0;
    }

    fn end_round(&mut self, now: Duration) {
        let typical = self.sum / self.count as f64;
        self.measured.1 += self.count;
        self.measured.2 += 1;
        (self.sum, self.count) = (0.0, 0);
        self.rounds += 1;
        if let Some(probe) = self.probe.take() {
            self.go_on_probing(probe, now);
            return;
        }
        let shortest = self.shortest.min(self.shortest_before);
        let waiting = self.limit as f64 * (1.0 - shortest / typical);
        self.held = self.held.saturating_sub(1);
        if waiting < WAITING_LOW {
            let long = shortest >= LONG && waiting < WAITING_HARDLY;
            let grown =
                if self.opening { self.limit * if long { 4 } else { 2 } } else { self.limit + 1 };
            self.limit = grown.min(self.max);
        } else {
            self.opening = false;
            if waiting > WAITING_HIGH && self.held == 0 {
                // All at once would be too much if the shortest time was an exception.
                let excess = (waiting - WAITING_HIGH) / 2.0;
                let less = (excess as usize).clamp(1, (self.limit / 8).max(1));
                self.limit = (self.limit - less).max(MIN.min(self.max));
            }
        }
        if self.rounds.is_multiple_of(ROUNDS_PER_EPOCH) && self.held == 0 {
            self.shortest_before = self.shortest;
            self.shortest = f64::INFINITY;
            // A round with half the window shows the time of a request with less before it; a long
            // path has the whole window again one round later.
            self.limit = (self.limit / 2).max(MIN.min(self.max));
            self.opening = true;
        }
        match self.rounds % ROUNDS_PER_PROBE {
            0 => self.measured = (now, 0, 0),
            ROUNDS_BEFORE_PROBE if typical >= PROBE_FROM && self.limit < self.max => {
                if let Some(rate) = self.rate(now) {
                    self.begin_probe(rate);
                }
            }
            _ => {}
        }
    }

    /// Requests per second since the measurement began, once it has lasted long enough.
    fn rate(&self, now: Duration) -> Option<f64> {
        let (since, count, rounds) = self.measured;
        let time = now.saturating_sub(since);
        (rounds >= PROBE_ROUNDS && time >= PROBE_TIME).then(|| count as f64 / time.as_secs_f64())
    }

    /// Doubles the window to see whether it is faster.
    fn begin_probe(&mut self, rate: f64) {
        self.probe = Some(WindowProbe { before: self.limit, rate, settled: false, won: false });
        self.limit = (self.limit * 2).min(self.max);
    }

    fn go_on_probing(&mut self, probe: WindowProbe, now: Duration) {
        if !probe.settled {
            // Requests of this round were sent with the old window.
            self.measured = (now, 0, 0);
            self.probe = Some(WindowProbe { settled: true, ..probe });
            return;
        }
        match self.rate(now) {
            None => self.probe = Some(probe),
            Some(rate) if rate < probe.rate * PROBE_GAIN => self.limit = probe.before,
            Some(_) if !probe.won => {
                self.measured = (now, 0, 0);
                self.probe = Some(WindowProbe { won: true, ..probe });
            }
            Some(rate) => {
                self.held = HOLD;
                if self.limit < self.max {
                    self.begin_probe(rate);
                }
            }
        }
    }
}

/// A window that is doubled for a while.
#[derive(Debug)]
struct WindowProbe {
    before: usize,
    /// Requests per second before.
    rate: f64,
    settled: bool,
    /// It was faster once; twice is not chance.
    won: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A path with a throughput of `rate` requests per second and a latency of `delay` seconds; one
    /// request in `cached` is answered at once.
    fn settle(delay: f64, rate: f64, max: usize, cached: usize) -> usize {
        let mut window = RequestWindow::new(max, false);
        let mut now = 0.0;
        let mut limits = Vec::new();
        for number in 0..20_000 {
            let limit = window.limit() as f64;
            let time = delay.max(limit / rate);
            now += time / limit;
            let time = if number % cached == 0 { 0.000_05 } else { time };
            window.learn(Duration::from_secs_f64(time), Duration::from_secs_f64(now));
            limits.push(window.limit());
        }
        limits[10_000..].iter().sum::<usize>() / 10_000
    }

    #[test]
    fn a_long_path_opens_the_window_and_a_short_one_does_not() {
        let long = settle(0.050, 1e6, 64, usize::MAX);
        assert!(long >= 56, "{long}");
        let short = settle(0.000_1, 10_000.0, 64, usize::MAX);
        assert!((MIN..=12).contains(&short), "{short}");
    }

    #[test]
    fn quick_answers_now_and_then_do_not_close_the_window_of_a_long_path() {
        let limit = settle(0.050, 1e6, 64, 20);
        assert!(limit >= 40, "{limit}");
    }

    #[test]
    fn long_paths_are_filled_within_a_few_rounds() {
        let mut window = RequestWindow::new(64, false);
        let trip = Duration::from_millis(50);
        let mut rounds = 0;
        while window.limit() < 64 {
            rounds += 1;
            (0..window.limit()).for_each(|_| window.learn(trip, trip * rounds));
        }
        assert_eq!(rounds, 2);
    }

    #[test]
    fn larger_requests_are_fewer() {
        let mut window = RequestWindow::new(64, false);
        window.limit = 32;
        window.resize(2.0);
        assert_eq!(window.limit(), 16);
        window.resize(0.25);
        assert_eq!(window.limit(), 64);
        window.resize(1000.0);
        assert_eq!(window.limit(), MIN);
    }

    #[test]
    fn a_size_that_is_taken_back_restores_the_window() {
        let mut window = RequestWindow::new(64, false);
        window.limit = 5;
        window.resize(4.0);
        assert_eq!(window.limit(), MIN);
        window.limit = 12;
        window.resize(0.25);
        assert_eq!(window.limit(), 5);
        // The next one is a new step.
        window.resize(0.5);
        assert_eq!(window.limit(), 10);
    }

    #[test]
    fn a_given_window_stays() {
        let mut window = RequestWindow::new(7, true);
        let second = Duration::from_secs(1);
        (0..1000).for_each(|n| window.learn(second, second * n));
        window.resize(4.0);
        assert_eq!(window.limit(), 7);
        assert_eq!(RequestWindow::new(1, false).limit(), 1);
    }
}
