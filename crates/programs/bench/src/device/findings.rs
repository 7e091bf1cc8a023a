//! What was measured of a device, and the settings that follow from it.

use std::time::Duration;

use serde::Serialize;

/// Settings as good as the best, as far as such measurements tell: the cheapest of them is advised.
const GOOD_ENOUGH: f64 = 0.95;

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
    pub read_latency: Option<Latency>,
    /// Single writes, with consent.
    pub write_latency: Option<Latency>,
    /// A single write and a flush after it, with consent.
    pub flush_latency: Option<Latency>,
    /// What questions for extents cost, where it answers them.
    pub extents: Option<Questions>,
    /// Throughput of reading.
    pub reading: Vec<Point>,
    /// Throughput of writing, with consent.
    pub writing: Vec<Point>,
    /// What to read it with.
    pub reading_advice: Option<Advice>,
    /// What to write it with.
    pub writing_advice: Option<Advice>,
}

/// The settings that are advised.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Advice {
    /// As measured.
    pub settings: Point,
    /// The best of all that was measured, for comparison.
    pub best_bytes_per_second: f64,
    /// The command line; without the device, which is filled in when it is shown.
    pub command: String,
}

/// Of those that are nearly as fast as the fastest, the one with the fewest bytes in flight; of equal
/// ones, the one with the fewest connections.
/// `own_connections`: whether connections are of their own; else they are no setting of a copy.
pub(super) fn best(points: &[Point], own_connections: bool) -> Option<Advice> {
    let fastest = points.iter().map(|point| point.bytes_per_second).fold(0.0, f64::max);
    let good = points.iter().filter(|point| point.bytes_per_second >= GOOD_ENOUGH * fastest);
    let cheapest = good.min_by_key(|point| (point.in_flight(), point.connections))?;
    Some(Advice {
        settings: *cheapest,
        best_bytes_per_second: fastest,
        command: format!(
            "blockhaul copy {}--requests={} --request-size={}",
            match own_connections {
                true => format!("--connections={} ", cheapest.connections),
                false => String::new(),
            },
            cheapest.requests,
            // What a copy takes: a power of two from 4 KiB on.
            blockhaul_catalog::format_size(
                (1 << cheapest.request_size.max(4096).ilog2()).min(32 << 20)
            ),
        ),
    })
}

/// One combination of settings, measured.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Point {
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

impl Point {
    /// Bytes in flight.
    pub fn in_flight(&self) -> u64 {
        self.request_size * (self.requests * self.connections) as u64
    }
}

/// How long single requests take, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Latency {
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

impl Latency {
    pub(super) fn of(mut times: Vec<Duration>) -> Option<Latency> {
        times.sort_unstable();
        let last = times.len().checked_sub(1)?;
        let at = |share: f64| times[(share * last as f64).round() as usize].as_secs_f64() * 1e6;
        Some(Latency {
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
pub struct Questions {
    /// How long they take.
    pub latency: Latency,
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
    ) -> Point {
        let (bytes_per_second, cpu_s_per_gib) = (speed, 0.1);
        Point { request_size, requests, connections, bytes_per_second, cpu_s_per_gib }
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
        let advice = best(&points, true).unwrap();
        assert_eq!(advice.settings, points[4], "the same bytes in flight on one connection");
        assert_eq!(
            advice.command,
            "blockhaul copy --connections=1 --requests=64 --request-size=64K"
        );
        let advice = best(&points, false).unwrap();
        assert_eq!(advice.command, "blockhaul copy --requests=64 --request-size=64K");
        assert_eq!(best(&[], true), None);
    }
}
