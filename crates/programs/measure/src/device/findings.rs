//! What was measured of a device, and the settings that follow from it.

use std::time::Duration;

use serde::Serialize;

/// Settings as good as the best, as far as such measurements tell: the cheapest of them is advised.
const GOOD_ENOUGH: f64 = 0.95;

/// Defaults that reach this share of the fastest settings are advised.
const DEFAULTS_GOOD_ENOUGH: f64 = 0.9;

/// All that was measured.
#[derive(Clone, Debug, Serialize)]
pub struct Findings {
    /// The device as it was typed.
    pub device: String,
    /// Its size in bytes.
    pub size: u64,
    /// Offsets and lengths are multiples of this.
    pub minimum_block: u32,
    /// Longest request.
    pub maximum_request: u32,
    /// Whether further connections are connections of their own; else all share one handle.
    pub own_connections: bool,
    /// Whether it promises that connections see what others have flushed.
    pub multi_conn: bool,
    /// Bytes that were found to be data, which were read again and again.
    pub data_bytes: u64,
    /// Whether it says that there are only zeroes where it was asked: those were read then, all of it.
    pub only_zeroes: bool,
    /// How long it took.
    pub took_s: f64,
    /// Settings that were not tried, because the time would not have done.
    pub left_out: usize,
    /// Single reads of 4 KiB, or of the minimum block if that is larger.
    pub read_latency: Option<LatencySummary>,
    /// Single writes, with consent.
    pub write_latency: Option<LatencySummary>,
    /// A single write and a flush after it, with consent.
    pub flush_latency: Option<LatencySummary>,
    /// What questions for extents cost, where it answers them.
    pub extents: Option<ExtentQueryCost>,
    /// Throughput of reading.
    pub reading: Vec<SettingsResult>,
    /// Throughput of writing, with consent.
    pub writing: Vec<SettingsResult>,
    /// What to read it with.
    pub reading_advice: Option<Advice>,
    /// What to write it with.
    pub writing_advice: Option<Advice>,
}

/// The settings that are advised.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Advice {
    /// As measured: the median of several measurements.
    pub settings: SettingsResult,
    /// Whether the defaults of `blockhaul copy` are advised: no others are clearly faster, or the
    /// defaults were not measured. `settings` are the defaults if they were measured.
    pub keep_defaults: bool,
    /// The defaults of `blockhaul copy`, as measured; none if the device is too slow for the time.
    pub defaults: Option<SettingsResult>,
    /// The best of all settings that were measured several times, for comparison.
    pub best_bytes_per_second: f64,
    /// The command line; without the device, which is filled in when it is shown.
    pub command: String,
}

/// The advice that follows from `points` and from `defaults`, which were measured several times:
/// the defaults, unless other settings are clearly faster than these were measured to be: settings that
/// were measured once may be the fastest by chance. Else, of the points that are nearly as
/// fast as the fastest, the one with the fewest bytes in flight; of equal ones, the one with the
/// fewest connections.
/// `own_connections`: whether the device has connections; else their number cannot be set for a
/// copy.
/// None if nothing was measured.
pub(super) fn advise(
    points: &[SettingsResult],
    defaults: Option<SettingsResult>,
    own_connections: bool,
) -> Option<Advice> {
    let fastest = points.iter().chain(&defaults).map(|point| point.bytes_per_second);
    let best_bytes_per_second = fastest.fold(0.0, f64::max);
    let reaches = |point: &&SettingsResult, share: f64| {
        point.bytes_per_second >= share * best_bytes_per_second
    };
    let kept = defaults.filter(|point| reaches(&point, DEFAULTS_GOOD_ENOUGH));
    let good = points.iter().filter(|point| reaches(point, GOOD_ENOUGH));
    let cheapest = good.min_by_key(|point| (point.in_flight(), point.connections)).copied();
    let settings = kept.or(cheapest)?;
    let keep_defaults = kept.is_some() || defaults.is_none();
    let command = if keep_defaults {
        "blockhaul copy".to_owned()
    } else {
        command(&settings, own_connections)
    };
    Some(Advice { settings, keep_defaults, defaults, best_bytes_per_second, command })
}

fn command(settings: &SettingsResult, own_connections: bool) -> String {
    let connections = if own_connections {
        format!("--connections={} ", settings.connections)
    } else {
        String::new()
    };
    // A copy accepts powers of two from 4 KiB.
    let size = (1 << settings.request_size.max(4096).ilog2()).min(32 << 20);
    let size = blockhaul_catalog::format_size(size);
    format!("blockhaul copy {connections}--requests={} --request-size={size}", settings.requests)
}

/// The `count` fastest of `points`.
pub(super) fn fastest(points: &[SettingsResult], count: usize) -> Vec<SettingsResult> {
    let mut points = points.to_vec();
    points.sort_by(|one, other| other.bytes_per_second.total_cmp(&one.bytes_per_second));
    points.truncate(count);
    points
}

/// The median of several measurements of the same settings; `None` if there is none.
pub(super) fn median(mut measured: Vec<SettingsResult>) -> Option<SettingsResult> {
    measured.sort_by(|one, other| one.bytes_per_second.total_cmp(&other.bytes_per_second));
    // Of two in the middle, the slower one.
    measured.get(measured.len().checked_sub(1)? / 2).copied()
}

/// One combination of settings, measured.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct SettingsResult {
    /// Bytes of a request.
    pub request_size: u64,
    /// Requests in flight on each connection.
    pub requests: usize,
    /// Connections.
    pub connections: usize,
    /// What came of it.
    pub bytes_per_second: f64,
    /// Processor time of this program per GiB, in seconds.
    pub cpu_s_per_gib: f64,
}

impl SettingsResult {
    /// Bytes in flight.
    pub fn in_flight(&self) -> u64 {
        self.request_size * (self.requests * self.connections) as u64
    }
}

/// How long single requests take, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LatencySummary {
    /// How many were timed.
    pub count: usize,
    /// Half of them took no longer, in microseconds.
    pub median_us: f64,
    /// 90 of 100 took no longer.
    pub p90_us: f64,
    /// 99 of 100 took no longer.
    pub p99_us: f64,
    /// The longest.
    pub max_us: f64,
}

impl LatencySummary {
    pub(super) fn of(mut times: Vec<Duration>) -> Option<LatencySummary> {
        times.sort_unstable();
        let last = times.len().checked_sub(1)?;
        let at = |share: f64| times[(share * last as f64).round() as usize].as_secs_f64() * 1e6;
        Some(LatencySummary {
            count: times.len(),
            median_us: at(0.5),
            p90_us: at(0.9),
            p99_us: at(0.99),
            max_us: at(1.0),
        })
    }
}

/// What a question for extents costs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ExtentQueryCost {
    /// How long they take.
    pub latency: LatencySummary,
    /// Bytes of the device that they covered.
    pub covered: u64,
    /// Extents in all answers.
    pub extents: u64,
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A measurement of so many bytes per second.
    pub(in crate::device) fn point(
        request_size: u64,
        requests: usize,
        connections: usize,
        speed: f64,
    ) -> SettingsResult {
        let bytes_per_second = speed;
        let cpu_s_per_gib = 0.1;
        SettingsResult { request_size, requests, connections, bytes_per_second, cpu_s_per_gib }
    }

    #[test]
    fn the_cheapest_of_the_good_ones_is_advised() {
        let points = [
            point(65536, 1, 1, 10.0),
            point(65536, 16, 4, 97.0),
            point(262_144, 4, 4, 99.0),
            point(262_144, 16, 8, 100.0),
            point(65536, 64, 1, 98.0),
        ];
        let defaults = point(524_288, 64, 4, 80.0);
        let advice = advise(&points, Some(defaults), true).unwrap();
        assert_eq!(advice.settings, points[4], "the same bytes in flight on one connection");
        assert_eq!((advice.defaults, advice.best_bytes_per_second), (Some(defaults), 100.0));
        assert_eq!(
            advice.command,
            "blockhaul copy --connections=1 --requests=64 --request-size=64K"
        );
        let advice = advise(&points, Some(defaults), false).unwrap();
        assert_eq!(advice.command, "blockhaul copy --requests=64 --request-size=64K");
    }

    #[test]
    fn the_defaults_are_advised_unless_other_settings_are_a_tenth_faster() {
        let points = [point(65536, 16, 4, 100.0)];
        for (speed, keeps) in [(89.0, false), (90.0, true), (120.0, true)] {
            let advice = advise(&points, Some(point(524_288, 64, 4, speed)), true).unwrap();
            assert_eq!(advice.keep_defaults, keeps, "{speed}");
            assert_eq!(advice.command == "blockhaul copy", keeps, "{speed}");
            assert_eq!(advice.best_bytes_per_second, f64::max(speed, 100.0));
        }
        let advice = advise(&[], Some(points[0]), true).unwrap();
        assert!(advice.keep_defaults && advice.settings == points[0]);
        assert_eq!(advise(&[], None, true), None);
    }

    #[test]
    fn nothing_else_is_advised_than_defaults_that_were_not_measured() {
        let fastest = point(65536, 16, 4, 100.0);
        let advice = advise(&[point(65536, 1, 1, 10.0), fastest], None, true).unwrap();
        assert!(advice.keep_defaults && advice.defaults.is_none());
        assert_eq!((advice.settings, advice.command.as_str()), (fastest, "blockhaul copy"));
    }

    #[test]
    fn candidates_are_the_fastest_and_a_median_ignores_one_outlier() {
        let points = [5.0, 9.0, 1.0, 7.0].map(|speed| point(65536, 1, 1, speed));
        assert_eq!(fastest(&points, 3), [points[1], points[3], points[0]]);
        assert_eq!(fastest(&points[..1], 3), points[..1]);
        assert_eq!(median(points[..3].to_vec()), Some(points[0]));
        assert_eq!(median(points[..2].to_vec()), Some(points[0]), "the slower of two");
        assert_eq!(median(Vec::new()), None);
    }
}
