//! What the measurements recommend, and how they are shown.

use serde::Serialize;

use super::probe::{Latency, Point, Questions};
use crate::error::{Error, Result};
use crate::plan::shell_line;
use crate::table::number;

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
    /// How long it took.
    pub took_s: f64,
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
    let cheapest = good.min_by_key(|point| {
        let in_flight = point.request_size * (point.requests * point.connections) as u64;
        (in_flight, point.connections)
    })?;
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
            (1 << cheapest.request_size.max(4096).ilog2()).min(32 << 20),
        ),
    })
}

fn filled(findings: &Findings) -> Findings {
    let mut findings = findings.clone();
    let device = match findings.device.starts_with('[') {
        true => findings.device.clone(),
        false => shell_line(std::slice::from_ref(&findings.device)),
    };
    if let Some(advice) = &mut findings.reading_advice {
        advice.command.push_str(&format!(" {device} TARGET"));
    }
    if let Some(advice) = &mut findings.writing_advice {
        advice.command.push_str(&format!(" SOURCE {device}"));
    }
    findings
}

/// As JSON.
pub(super) fn json(findings: &Findings) -> Result<String> {
    serde_json::to_string_pretty(&filled(findings))
        .map(|text| text + "\n")
        .map_err(|error| Error::new(format!("cannot print JSON: {error}")))
}

/// For people.
pub(super) fn text(findings: &Findings) -> String {
    let findings = filled(findings);
    let mut out = format!(
        "{}: {} bytes; minimum block {}, longest request {}; {}{}\n",
        findings.device,
        findings.size,
        findings.minimum_block,
        findings.maximum_request,
        match findings.own_connections {
            true => "connections of their own",
            false => "no connections, one handle for all",
        },
        if findings.own_connections && !findings.multi_conn {
            ", not promised to agree"
        } else {
            ""
        }
    );
    out.push_str(&format!(
        "{} bytes of data were read again and again: a cache that holds them answers\n\n",
        findings.data_bytes
    ));
    let latency = |what: &str, latency: &Latency| {
        format!(
            "{what:18} median {} us, 90 % {}, 99 % {}, longest {} ({} of them)\n",
            number(latency.median_us),
            number(latency.p90_us),
            number(latency.p99_us),
            number(latency.max_us),
            latency.count
        )
    };
    let singles = [
        ("a small read", &findings.read_latency),
        ("a small write", &findings.write_latency),
        ("write and flush", &findings.flush_latency),
    ];
    for (what, found) in singles {
        if let Some(found) = found {
            out.push_str(&latency(what, found));
        }
    }
    match &findings.extents {
        None => out.push_str("extents            it does not tell where data is\n"),
        Some(questions) => {
            out.push_str(&latency("extents, a question", &questions.latency));
            out.push_str(&format!(
                "                   {} extents in {} of {} bytes\n",
                questions.extents, questions.covered, findings.size
            ));
        }
    }
    // What has no connections is used by several workers at a time.
    let lane = if findings.own_connections { "connection" } else { "thread" };
    let lanes = format!("{lane}s");
    for (title, points) in [("Reading", &findings.reading), ("Writing", &findings.writing)] {
        if !points.is_empty() {
            out.push_str(&format!("\n{title}, MB/s: requests on each of so many {lanes}\n"));
            out.push_str(&grid(points));
        }
    }
    let advice = [("read", &findings.reading_advice), ("write", &findings.writing_advice)];
    for (what, advice) in advice {
        let Some(advice) = advice else { continue };
        let Point { request_size, requests, connections, .. } = advice.settings;
        out.push_str(&format!(
            "\nTo {what} it: {}, {} on each, {} KiB each: \
             {} MB/s, {} s of processor time a GiB (the best of all: {} MB/s)\n    {}\n",
            counted(connections, lane),
            counted(requests, "request"),
            request_size >> 10,
            number(advice.settings.bytes_per_second / 1e6),
            number(advice.settings.cpu_s_per_gib),
            number(advice.best_bytes_per_second / 1e6),
            advice.command
        ));
    }
    out.push_str(&format!("\n{} s in all\n", number(findings.took_s)));
    out
}

/// So many of something.
fn counted(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

/// A line for each size and number of requests, a column for each number of connections.
fn grid(points: &[Point]) -> String {
    let mut connections: Vec<usize> = points.iter().map(|point| point.connections).collect();
    connections.sort_unstable();
    connections.dedup();
    let mut out = format!("{:>9}  {:>8}", "size", "requests");
    for count in &connections {
        out.push_str(&format!("  {count:>8}"));
    }
    out.push('\n');
    let mut lines: Vec<(u64, usize)> =
        points.iter().map(|p| (p.request_size, p.requests)).collect();
    lines.dedup();
    for (size, requests) in lines {
        out.push_str(&format!("{:>5} KiB  {requests:>8}", size >> 10));
        for count in &connections {
            let found = points.iter().find(|point| {
                (point.request_size, point.requests, point.connections) == (size, requests, *count)
            });
            let text = found.map_or("-".to_owned(), |point| number(point.bytes_per_second / 1e6));
            out.push_str(&format!("  {text:>8}"));
        }
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(request_size: u64, requests: usize, connections: usize, speed: f64) -> Point {
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
            "blockhaul copy --connections=1 --requests=64 --request-size=65536"
        );
        let advice = best(&points, false).unwrap();
        assert_eq!(advice.command, "blockhaul copy --requests=64 --request-size=65536");
        assert_eq!(best(&[], true), None);
    }

    #[test]
    fn combinations_that_were_left_out_have_no_figure() {
        let text =
            grid(&[point(65536, 1, 1, 1e6), point(65536, 1, 2, 2e6), point(131_072, 1, 1, 3e6)]);
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[1].ends_with("1.00      2.00"), "{text}");
        assert!(lines[2].ends_with("3.00         -"), "{text}");
    }
}
