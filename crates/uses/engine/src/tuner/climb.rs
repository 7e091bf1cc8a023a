//! The search for the fastest setting of a copy: one step at a time, up and down, measured before
//! and after. Without clock and threads; `tuner` has both.

use std::time::Duration;

/// Time after which a leap may be tried, and after which the search checks whether requests take long.
const LEAP_FROM: Duration = Duration::from_millis(15);
const WARM_UP: Duration = Duration::from_millis(50);
/// If requests take this long on average, or never less than that, the search begins at once.
const LONG_MEAN: Duration = Duration::from_millis(20);
const LONG_LEAST: Duration = Duration::from_millis(3);
/// Time before the first step otherwise, and after a round of steps without success; doubles.
const REST: Duration = Duration::from_secs(1);
const REST_MAX: Duration = Duration::from_secs(60);
/// A measurement lasts as long as this many requests take, within limits.
const ROUNDS: u32 = 4;
const MEASURE_MIN: Duration = Duration::from_millis(50);
/// Minimum of the measurements for a leap, which must pay for itself in a copy of one second.
const MEASURE_LEAP: Duration = Duration::from_millis(15);
const MEASURE_MAX: Duration = Duration::from_secs(2);
/// Minimum number of requests for a valid measurement, and for one of a leap.
const REQUESTS_MIN: u64 = 24;
const REQUESTS_LEAP: u64 = 16;
/// Number of measurements with fewer requests before the search rests.
const EXTENSIONS: u32 = 10;
/// Maximum wait for a further connection: a handshake's limit, and a little more.
const LANES_WAIT: Duration = Duration::from_secs(11);
/// A copy with less time left is not tuned: there is nothing to gain.
const LEFT_MIN: f64 = 10.0;
/// How much faster the copy must become for a step to be kept.
const GAIN: f64 = 1.10;
/// Local copies below this rate in bytes per second are not limited by memory: requests this many
/// times as large are tried at once. (2 MiB instead of 512 KiB are a quarter faster behind HTTP, and a
/// tenth between two qemu-nbd. They are slower from qemu-nbd to a file, and from nbdkit's file plugin
/// over four connections; servers of this program are faster anyway. 4 MiB are no faster than 2 MiB.)
const FAST: f64 = 2e9;
const LEAP: u64 = 4;
/// If requests take long, a leap is tried before the search from this rate on.
const LEAP_LONG: f64 = 2e8;
/// A copy with fewer seconds left makes no such leap.
const LEAP_LEFT: f64 = 0.3;
/// Minimum gain of a leap: larger requests need less processor time, too.
const LEAP_GAIN: f64 = 1.05;
/// Below this rate in bytes per second, each request probably costs more than its bytes: a leap is kept
/// unless the copy is slower by more than the measurements vary.
const SLOW: f64 = 1.2e9;
const SLOW_GAIN: f64 = 0.9;
/// A step after which less than this share of the rate is left is undone before a full measurement.
const COLLAPSED: f64 = 0.5;

/// What is tuned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Setting {
    /// Connections in use.
    pub(crate) lanes: usize,
    /// Request size in bytes.
    pub(crate) size: u64,
}

/// What may be tried; a setting whose minimum equals its maximum is not tuned.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bounds {
    pub(crate) lanes: (usize, usize),
    /// Lanes to begin with if requests take long.
    pub(crate) usual: usize,
    pub(crate) size: (u64, u64),
    /// Maximum bytes that all requests together may pin.
    pub(crate) memory: u64,
}

impl Bounds {
    fn allow(&self, setting: Setting) -> bool {
        let pinned = setting.size.saturating_mul(2 * setting.lanes as u64);
        (self.lanes.0..=self.lanes.1).contains(&setting.lanes)
            && (self.size.0..=self.size.1).contains(&setting.size)
            && pinned <= self.memory
    }
}

/// A snapshot of the counters.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Sample {
    pub(crate) at: Duration,
    pub(crate) moved: u64,
    pub(crate) requests: u64,
    pub(crate) waited: Duration,
    pub(crate) shortest: Duration,
    pub(crate) active: usize,
    /// Bytes of the source that are left, data or not.
    pub(crate) left: u64,
    pub(crate) disturbed: bool,
}

impl Sample {
    /// Whether requests take long.
    fn take_long(&self) -> bool {
        let mean = self.waited.checked_div(u32::try_from(self.requests).unwrap_or(u32::MAX));
        mean.is_some_and(|mean| mean >= LONG_MEAN || self.shortest >= LONG_LEAST)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TunerStep {
    MoreLanes,
    LargerRequests,
    /// Twice as large may be slower on the way up: data that is not inspected stays in the kernel
    /// only up to a size.
    MuchLargerRequests,
    FewerLanes,
    SmallerRequests,
}

const STEPS: [TunerStep; 5] = [
    TunerStep::MoreLanes,
    TunerStep::LargerRequests,
    TunerStep::MuchLargerRequests,
    TunerStep::FewerLanes,
    TunerStep::SmallerRequests,
];

#[derive(Debug, Clone, Copy, PartialEq)]
enum TunerPhase {
    /// No measurement until the due time.
    Resting,
    /// Measures the current setting.
    Base,
    /// A step was made and has no effect yet.
    Settling { since: Duration },
    /// Measures after a step.
    Trying { again: bool },
}

/// The search.
#[derive(Debug)]
pub(crate) struct Climb {
    bounds: Bounds,
    pub(crate) present: Setting,
    phase: TunerPhase,
    /// Time of the next check.
    pub(crate) due: Duration,
    /// Counters at the start of the current measurement.
    mark: Sample,
    extensions: u32,
    /// The search has begun; before, there may have been one leap.
    begun: bool,
    leapt: bool,
    /// Rate in bytes per second before the step, and its setting.
    base: f64,
    before: Setting,
    /// Index into the steps, and how many of them failed in a row.
    next: usize,
    failed: usize,
    rest: Duration,
}

impl Climb {
    pub(crate) fn new(begin: Setting, bounds: Bounds) -> Climb {
        Climb {
            bounds,
            present: begin,
            phase: TunerPhase::Resting,
            due: LEAP_FROM,
            mark: Sample::default(),
            extensions: 0,
            begun: false,
            leapt: false,
            base: 0.0,
            before: begin,
            next: 0,
            failed: 0,
            rest: REST,
        }
    }

    /// Whether there is nothing to try.
    pub(crate) fn over(&self) -> bool {
        matches!(self.phase, TunerPhase::Resting | TunerPhase::Base)
            && (0..STEPS.len()).all(|index| self.step(STEPS[index]).is_none())
    }

    pub(crate) fn no_more_lanes(&mut self, active: usize) {
        let most = self.present.lanes.max(active);
        let stays = self.bounds.lanes.0 == self.bounds.lanes.1;
        if !stays {
            self.bounds.lanes.1 = self.bounds.lanes.1.min(most);
        }
    }

    pub(crate) fn look(&mut self, now: &Sample) {
        if now.at < self.due {
            return;
        }
        if now.disturbed && matches!(self.phase, TunerPhase::Base | TunerPhase::Trying { .. }) {
            return self.measure(self.phase, now);
        }
        match self.phase {
            TunerPhase::Resting => self.wake(now),
            TunerPhase::Settling { since } => {
                let missing = now.active < self.present.lanes;
                let grew = self.present.lanes > self.before.lanes;
                match (grew && missing, now.at - since > LANES_WAIT) {
                    (true, false) if self.bounds.lanes.1 >= self.present.lanes => {
                        self.due = now.at + MEASURE_MIN;
                    }
                    (true, _) => {
                        self.bounds.lanes.1 = self.bounds.lanes.1.min(now.active.max(1));
                        self.refuse(now);
                    }
                    _ => self.measure(TunerPhase::Trying { again: false }, now),
                }
            }
            TunerPhase::Base => {
                if let Some(rate) = self.measured(now) {
                    self.base = rate;
                    match (self.begun, self.leap(rate, now)) {
                        (true, _) => self.try_next(now),
                        (false, Some(setting)) => self.set(setting, now),
                        (false, None) => self.await_begin(now),
                    }
                }
            }
            TunerPhase::Trying { again } => {
                let Some(rate) = self.measured(now) else { return };
                let gain = match self.begun {
                    true => GAIN,
                    false if self.base < SLOW => SLOW_GAIN,
                    false => LEAP_GAIN,
                };
                match (rate >= self.base * gain, again) {
                    (false, _) => self.refuse(now),
                    (true, false) => self.measure(TunerPhase::Trying { again: true }, now),
                    (true, true) if !self.begun => self.await_begin(now),
                    (true, true) => {
                        // Keep the step, and try more of the same.
                        (self.base, self.failed, self.rest) = (rate, 0, REST);
                        self.try_next(now);
                    }
                }
            }
        }
    }

    /// The end of a rest.
    fn wake(&mut self, now: &Sample) {
        if !self.begun {
            let (warm, long) = (now.at >= WARM_UP, now.take_long());
            let usual = Setting { lanes: self.bounds.usual, ..self.present };
            let more = warm && long && usual.lanes > self.present.lanes && self.bounds.allow(usual);
            // The first moments are slower than the rest: the measurement decides.
            let rate = now.moved as f64 / now.at.as_secs_f64();
            if more {
                self.present = usual;
            } else if now.at < REST && self.may_leap(rate, long, now) {
                self.leapt = true;
                return self.measure(TunerPhase::Base, now);
            } else if !warm || !long && now.at < REST {
                return self.await_begin(now);
            }
            self.begun = true;
        }
        self.measure(TunerPhase::Base, now);
    }

    /// Whether a first leap may be tried. If requests take long at a high rate, and the shortest does
    /// not, they wait for each other.
    fn may_leap(&self, rate: f64, long: bool, now: &Sample) -> bool {
        let waits = now.shortest < LONG_MEAN && rate >= LEAP_LONG;
        let first = !self.leapt && now.requests >= REQUESTS_LEAP;
        first && (!long || waits) && self.leap(rate, now).is_some()
    }

    /// Much larger requests, if the rate suggests that they may pay.
    fn leap(&self, rate: f64, now: &Sample) -> Option<Setting> {
        let may_pay = rate < FAST && now.left as f64 > rate * LEAP_LEFT;
        self.step(TunerStep::MuchLargerRequests).filter(|_| may_pay)
    }

    /// Changes nothing until the search begins, which is soon if requests take long.
    fn await_begin(&mut self, now: &Sample) {
        let begin = if now.at < WARM_UP || now.take_long() { WARM_UP } else { REST };
        self.phase = TunerPhase::Resting;
        self.due = begin.max(now.at + self.measure_min());
    }

    /// Begins a measurement.
    fn measure(&mut self, phase: TunerPhase, now: &Sample) {
        self.phase = phase;
        self.extensions = 0;
        self.due = now.at + self.typical(now, ROUNDS).clamp(self.measure_min(), MEASURE_MAX);
        self.mark = *now;
    }

    fn measure_min(&self) -> Duration {
        if self.begun { MEASURE_MIN } else { MEASURE_LEAP }
    }

    fn requests_min(&self) -> u64 {
        if self.begun { REQUESTS_MIN } else { REQUESTS_LEAP }
    }

    /// Time that this many requests in a row take.
    fn typical(&self, now: &Sample, requests: u32) -> Duration {
        let waited = now.waited.saturating_sub(self.mark.waited);
        let count = u32::try_from(now.requests.saturating_sub(self.mark.requests));
        waited.checked_div(count.unwrap_or(u32::MAX)).unwrap_or(MEASURE_MIN) * requests
    }

    /// Rate in bytes per second since the mark; `None`: the measurement continues, or is given up.
    fn measured(&mut self, now: &Sample) -> Option<f64> {
        let time = (now.at - self.mark.at).as_secs_f64();
        if now.requests - self.mark.requests >= self.requests_min() {
            return Some((now.moved - self.mark.moved) as f64 / time);
        }
        self.extensions += 1;
        let collapsed = matches!(self.phase, TunerPhase::Trying { .. })
            && ((now.moved - self.mark.moved) as f64) < self.base * time * COLLAPSED;
        if collapsed {
            self.refuse(now);
        } else if self.extensions < EXTENSIONS {
            let more = self.measure_min().max((now.at - self.mark.at) / 2).min(MEASURE_MAX);
            self.due = now.at + more;
        } else if self.phase == TunerPhase::Base {
            self.take_rest(now);
        } else {
            self.refuse(now);
        }
        None
    }

    /// Undoes the last step.
    fn refuse(&mut self, now: &Sample) {
        self.present = self.before;
        if !self.begun {
            return self.await_begin(now);
        }
        self.next += 1;
        self.failed += 1;
        if self.failed >= STEPS.len() {
            return self.take_rest(now);
        }
        self.phase = TunerPhase::Resting;
        self.due = now.at + self.typical(now, 2).clamp(MEASURE_MIN, MEASURE_MAX);
    }

    fn take_rest(&mut self, now: &Sample) {
        if !self.begun {
            return self.await_begin(now);
        }
        self.failed = 0;
        self.phase = TunerPhase::Resting;
        self.due = now.at + self.rest;
        self.rest = (self.rest * 2).min(REST_MAX);
    }

    /// Makes the next possible step.
    fn try_next(&mut self, now: &Sample) {
        if (now.left as f64) < self.base * LEFT_MIN {
            return self.take_rest(now);
        }
        while self.failed < STEPS.len() {
            let Some(setting) = self.step(STEPS[self.next % STEPS.len()]) else {
                self.next += 1;
                self.failed += 1;
                continue;
            };
            return self.set(setting, now);
        }
        self.take_rest(now);
    }

    /// Makes a step, which takes effect after a while.
    fn set(&mut self, setting: Setting, now: &Sample) {
        self.before = self.present;
        self.present = setting;
        self.phase = TunerPhase::Settling { since: now.at };
        self.due = now.at + self.typical(now, 2).clamp(self.measure_min(), MEASURE_MAX);
    }

    fn step(&self, step: TunerStep) -> Option<Setting> {
        let Setting { lanes, size } = self.present;
        let setting = match step {
            TunerStep::MoreLanes => Setting { lanes: (lanes * 2).min(self.bounds.lanes.1), size },
            TunerStep::LargerRequests => Setting { lanes, size: size * 2 },
            TunerStep::MuchLargerRequests => Setting { lanes, size: size * LEAP },
            TunerStep::FewerLanes => Setting { lanes: (lanes / 2).max(self.bounds.lanes.0), size },
            TunerStep::SmallerRequests => Setting { lanes, size: size / 2 },
        };
        (setting != self.present && self.bounds.allow(setting)).then_some(setting)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tuner::{SIZE_MAX, SIZE_MIN};

    const BEGIN: Setting = Setting { lanes: 4, size: 512 << 10 };

    const LANES_MAX: usize = 16;
    const BOUNDS: Bounds = Bounds {
        lanes: (1, LANES_MAX),
        usual: BEGIN.lanes,
        size: (SIZE_MIN, SIZE_MAX),
        memory: 48 << 20,
    };

    /// Runs a search for `seconds` on a server with a throughput of `rate(setting)` bytes per
    /// second and requests that take `time`. Returns the final setting and the share of the time
    /// spent elsewhere.
    fn settle(
        search: &mut Climb,
        seconds: f64,
        time: Duration,
        rate: impl Fn(Setting) -> f64,
    ) -> (Setting, Vec<(f64, Setting)>) {
        let mut now = 0.0;
        let mut moved = 0.0;
        let mut requests = 0.0;
        let mut visited = Vec::new();
        let tick = 0.001;
        while now < seconds {
            let setting = search.present;
            now += tick;
            moved += rate(setting) * tick;
            requests += rate(setting) * tick / setting.size as f64;
            search.look(&Sample {
                at: Duration::from_secs_f64(now),
                moved: moved as u64,
                requests: requests as u64,
                waited: time.mul_f64(requests),
                shortest: time,
                active: setting.lanes,
                left: u64::MAX,
                disturbed: false,
            });
            if visited.last().is_none_or(|(_, last)| *last != search.present) {
                visited.push((now, search.present));
            }
        }
        (search.before_step(), visited)
    }

    impl Climb {
        /// The setting before the current trial.
        fn before_step(&self) -> Setting {
            match self.phase {
                TunerPhase::Settling { .. } | TunerPhase::Trying { .. } => self.before,
                _ => self.present,
            }
        }
    }

    #[test]
    fn a_fast_copy_is_left_alone_for_the_first_second() {
        let mut search = Climb::new(BEGIN, BOUNDS);
        let (_, visited) = settle(&mut search, 0.99, Duration::from_micros(900), |_| 3e9);
        assert_eq!(visited.len(), 1, "{visited:?}");
    }

    #[test]
    fn larger_requests_are_tried_at_once_where_something_else_than_memory_is_waited_for() {
        let large = Setting { size: LEAP * BEGIN.size, ..BEGIN };
        let cases = [
            (SLOW, 1.2, large),
            (SLOW, 1.0, BEGIN),
            (SLOW, 0.7, BEGIN),
            (SLOW, 0.001, BEGIN),
            // Fewer requests, if they are probably what is waited for.
            (0.9 * SLOW, 1.0, large),
            (0.9 * SLOW, 0.8, BEGIN),
        ];
        for (of_small, of_large, expected) in cases {
            // As with the parking of bytes, sizes between are no better.
            let rate = |setting: Setting| {
                if setting.size < large.size { of_small } else { of_small * of_large }
            };
            let mut search = Climb::new(BEGIN, BOUNDS);
            let time = Duration::from_millis(2);
            let (setting, visited) = settle(&mut search, 0.99, time, rate);
            assert_eq!(setting, expected, "{of_large}: {visited:?}");
            assert!(visited.len() <= 3, "{visited:?}");
            // A harmful step is undone soon.
            let back = visited.last().unwrap().0;
            assert!(expected == large || back < 0.4, "{of_large}: {visited:?}");
        }
        // Slow only in its first moments: the rate is asked for twice a millisecond.
        let asked = std::cell::Cell::new(0);
        let slow_first = |_| {
            asked.set(asked.get() + 1);
            if asked.get() < 2 * 55 { 0.5e9 } else { 3e9 }
        };
        let mut search = Climb::new(BEGIN, BOUNDS);
        let (_, visited) = settle(&mut search, 0.99, Duration::from_millis(2), slow_first);
        assert!(search.leapt && visited.len() == 1, "{visited:?}");
        let mut search = Climb::new(BEGIN, BOUNDS);
        let (_, visited) = settle(&mut search, 0.99, Duration::from_millis(50), |_| 1.2e9);
        assert!(visited.iter().all(|(_, s)| s.size <= 2 * BEGIN.size), "{visited:?}");
    }

    #[test]
    fn requests_that_wait_for_each_other_do_not_hinder_the_first_leap() {
        let mut search = Climb::new(BEGIN, BOUNDS);
        for at in (1..100).map(Duration::from_millis) {
            let (ms, size) = (at.as_millis() as u64, BEGIN.size);
            search.look(&Sample {
                at,
                moved: ms * size,
                requests: ms,
                waited: Duration::from_millis(30 * ms),
                shortest: Duration::from_millis(4),
                active: BEGIN.lanes,
                left: u64::MAX,
                disturbed: false,
            });
            // Not before the requests of the first moments have ended.
            assert!(at >= LEAP_FROM || search.present == BEGIN);
        }
        assert!(!search.begun);
        let late = Sample {
            at: Duration::from_millis(200),
            moved: 200 * BEGIN.size,
            requests: 200,
            left: u64::MAX,
            ..Sample::default()
        };
        search.look(&late);
        assert_eq!(search.present, Setting { size: LEAP * BEGIN.size, ..BEGIN });
    }

    #[test]
    fn requests_that_take_long_bring_the_usual_connections_at_once() {
        let few = Setting { lanes: 2, ..BEGIN };
        for (time, expected) in [(50, BEGIN), (1, few)] {
            let mut search = Climb::new(few, BOUNDS);
            settle(&mut search, 0.045, Duration::from_millis(time), |_| 1e9);
            assert_eq!(search.present.lanes, few.lanes, "{time} ms, too early to tell");
            let mut search = Climb::new(few, BOUNDS);
            settle(&mut search, 0.06, Duration::from_millis(time), |_| 1e9);
            assert_eq!(search.present.lanes, expected.lanes, "{time} ms");
        }
    }

    #[test]
    fn where_nothing_helps_almost_no_time_is_spent_on_trying() {
        let mut search = Climb::new(BEGIN, BOUNDS);
        let (setting, visited) = settle(&mut search, 100.0, Duration::from_millis(1), |_| SLOW);
        assert_eq!(setting, BEGIN);
        let away: f64 = visited
            .windows(2)
            .filter(|pair| pair[0].1 != BEGIN)
            .map(|pair| pair[1].0 - pair[0].0)
            .sum();
        assert!(away < 5.0, "{away} of 100 s away from the best");
    }

    #[test]
    fn a_limit_on_each_connection_is_answered_by_more_of_them() {
        let mut search = Climb::new(BEGIN, BOUNDS);
        let per_connection = |setting: Setting| setting.lanes.min(16) as f64 * 20e6;
        let (setting, _) = settle(&mut search, 20.0, Duration::from_millis(50), per_connection);
        assert_eq!(setting.lanes, 16);
    }

    #[test]
    fn a_server_that_is_slower_with_more_connections_gets_one() {
        let mut search = Climb::new(BEGIN, BOUNDS);
        let slower = |setting: Setting| 100e6 / (setting.lanes as f64).powf(0.4);
        let (setting, _) = settle(&mut search, 20.0, Duration::from_millis(40), slower);
        assert_eq!(setting.lanes, 1);
    }

    #[test]
    fn a_cost_of_each_call_is_answered_by_larger_requests_and_a_server_that_chokes_by_smaller() {
        let mut search = Climb::new(BEGIN, BOUNDS);
        let per_call = |setting: Setting| {
            let size = setting.size as f64;
            size / (0.010 + size / 500e6)
        };
        let (setting, _) = settle(&mut search, 30.0, Duration::from_millis(40), per_call);
        assert!(setting.size >= 4 << 20, "{setting:?}");
        let mut search = Climb::new(BEGIN, BOUNDS);
        let chokes = |setting: Setting| 50e6 * (128e3 / setting.size as f64).min(1.0);
        let (setting, _) = settle(&mut search, 30.0, Duration::from_millis(40), chokes);
        assert_eq!(setting.size, 128 << 10);
    }

    #[test]
    fn what_is_given_stays_and_memory_is_kept() {
        let given = Bounds { lanes: (4, 4), size: (BEGIN.size, BEGIN.size), ..BOUNDS };
        assert!(Climb::new(BEGIN, given).over());
        let mut search = Climb::new(BEGIN, BOUNDS);
        let (setting, visited) = settle(&mut search, 60.0, Duration::from_millis(40), |setting| {
            (setting.size * setting.lanes as u64) as f64
        });
        assert!(setting.size * setting.lanes as u64 * 2 <= 48 << 20, "{setting:?}");
        assert!(visited.iter().all(|(_, s)| s.size * s.lanes as u64 * 2 <= 48 << 20));
    }

    #[test]
    fn connections_that_cannot_be_had_are_not_asked_for_again() {
        let mut search = Climb::new(BEGIN, BOUNDS);
        search.no_more_lanes(1);
        assert_eq!(search.bounds.lanes, (1, 4));
        let (setting, visited) =
            settle(&mut search, 20.0, Duration::from_millis(50), |s| s.lanes as f64 * 20e6);
        assert!(setting.lanes <= 4 && visited.iter().all(|(_, s)| s.lanes <= 4));
    }
}
