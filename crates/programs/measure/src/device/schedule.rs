//! How the time is spent: which settings are tried first, for how long each, and which are left out because
//! a slow device would need longer than there is.

use std::time::{Duration, Instant};

use blockhaul_block::{Error, Kind, Result};

use super::findings::SettingsResult;

/// A device that answers nothing for so long, and for as long as all was to take, is given up.
const PATIENCE_MIN: Duration = Duration::from_secs(3);

/// The time that there is, and what is still to be tried in it.
pub(super) struct Schedule {
    deadline: Instant,
    time: Duration,
    rest: usize,
    /// Settings that were left out.
    pub left_out: usize,
}

impl Schedule {
    /// For all of the measurement, which has just begun.
    pub fn new(time: Duration) -> Schedule {
        Schedule { deadline: Instant::now() + time, time, rest: 0, left_out: 0 }
    }

    /// So many settings are to be tried in what is left.
    pub fn plan(&mut self, rest: usize) {
        self.rest = rest;
    }

    fn left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    /// The share of the next setting; `None` if it is left out. `tried`: what was measured of its kind, of
    /// which the first is tried in any case.
    pub fn next(&mut self, point: &SettingsResult, tried: &[SettingsResult]) -> Option<Duration> {
        let left = self.left();
        let share = left / u32::try_from(self.rest.max(1)).unwrap_or(u32::MAX);
        self.rest = self.rest.saturating_sub(1);
        let best = tried.iter().map(|point| point.bytes_per_second).fold(0.0, f64::max);
        // Each of its requests once, as fast as the device was seen to be. One that answers many at a time
        // is faster than that, and is seen to be so with fewer of them.
        let needs = point.in_flight() as f64 / best.max(1.0);
        if !tried.is_empty() && needs > left.as_secs_f64() {
            self.left_out += 1;
            return None;
        }
        Some(share)
    }

    /// Waits for a measurement, but not for ever.
    pub async fn wait<T>(
        &self,
        what: &str,
        measuring: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        let limit = self.left() + self.time.max(PATIENCE_MIN);
        blockhaul_io::timeout(limit, measuring).await.unwrap_or_else(|_| {
            let text = format!("{what}: no answer for {:.0} s", limit.as_secs_f64());
            Err(Error::new(Kind::TimedOut, text))
        })
    }
}

/// Settings in the order in which they are tried: a coarse grid of all first, then what lies between.
pub(super) fn in_order(settings: Vec<SettingsResult>) -> Vec<SettingsResult> {
    let values = |value: fn(&SettingsResult) -> u64| {
        let mut all: Vec<u64> = settings.iter().map(value).collect();
        all.sort_unstable();
        all.dedup();
        all
    };
    let dimensions: [fn(&SettingsResult) -> u64; 3] =
        [|p| p.request_size, |p| p.requests as u64, |p| p.connections as u64];
    let grids = dimensions.map(|value| (value, values(value)));
    let between = |point: &SettingsResult| {
        let odd = |(value, all): &(fn(&SettingsResult) -> u64, Vec<u64>)| {
            all.binary_search(&value(point)).map_or(1, |at| at % 2)
        };
        grids.iter().map(odd).sum::<usize>()
    };
    let mut ordered = settings.clone();
    ordered.sort_by_key(between);
    ordered
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::findings::tests::point;

    #[test]
    fn a_coarse_grid_comes_first() {
        let mut all = Vec::new();
        for size in [1, 2, 3] {
            for requests in [1, 4, 16] {
                for connections in [1, 2, 4, 8] {
                    all.push(point(size, requests, connections, 0.0));
                }
            }
        }
        let ordered = in_order(all.clone());
        assert_eq!(ordered.len(), all.len());
        let first: Vec<_> =
            ordered[..8].iter().map(|p| (p.request_size, p.requests, p.connections)).collect();
        let wanted = [
            (1, 1, 1),
            (1, 1, 4),
            (1, 16, 1),
            (1, 16, 4),
            (3, 1, 1),
            (3, 1, 4),
            (3, 16, 1),
            (3, 16, 4),
        ];
        assert_eq!(first, wanted);
    }

    #[test]
    fn what_would_take_too_long_is_left_out() {
        let mut schedule = Schedule::new(Duration::from_secs(1000));
        schedule.plan(5);
        // The first is tried whatever it takes.
        assert!(schedule.next(&point(1 << 20, 64, 8, 0.0), &[]).is_some());
        let tried = [point(65536, 1, 1, 655.36)];
        let share = schedule.next(&point(65536, 4, 2, 0.0), &tried).unwrap();
        assert!(share > Duration::from_secs(200) && share < Duration::from_secs(300), "{share:?}");
        assert_eq!(schedule.next(&point(65536, 16, 1, 0.0), &tried), None);
        assert_eq!(schedule.left_out, 1);
        let mut over = Schedule::new(Duration::ZERO);
        over.plan(2);
        assert!(over.next(&tried[0], &[]).is_some() && over.next(&tried[0], &tried).is_none());
    }
}
