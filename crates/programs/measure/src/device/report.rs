//! Findings as text and JSON.

use blockhaul_catalog::format_size;

use super::findings::{Advice, Findings, LatencySummary, SettingsResult};
use crate::error::{MeasureError, Result};
use crate::text::{number, shell_line};

fn filled(findings: &Findings) -> Findings {
    let mut findings = findings.clone();
    let device = if findings.device.starts_with('[') {
        findings.device.clone()
    } else {
        shell_line(std::slice::from_ref(&findings.device))
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
        .map_err(|error| MeasureError::new(format!("cannot print JSON: {error}")))
}

/// The device, and what of it was read.
fn described(findings: &Findings) -> String {
    let mut out = wrapped(&format!(
        "{}: {} bytes; minimum block {}, maximum request {}; {}{}",
        findings.device,
        findings.size,
        format_size(u64::from(findings.minimum_block)),
        format_size(u64::from(findings.maximum_request)),
        if findings.own_connections {
            "separate connections"
        } else {
            "one handle for all threads"
        },
        if findings.own_connections && !findings.multi_conn { ", without multi-conn" } else { "" }
    ));
    out.push_str(&if findings.only_zeroes {
        "the device reports only zeroes: data may be read at a lower rate\n\n".to_owned()
    } else {
        let bytes = findings.data_bytes;
        let text = "bytes of data, read repeatedly: a cache that holds them affects the results";
        wrapped(&format!("{bytes} {text}")) + "\n"
    });
    out
}

/// What single requests take.
fn latencies(findings: &Findings) -> String {
    let mut out = String::new();
    let singles = [
        ("small read", &findings.read_latency),
        ("small write", &findings.write_latency),
        ("write and flush", &findings.flush_latency),
    ];
    for (what, found) in singles {
        if let Some(found) = found {
            out.push_str(&latency(what, found));
        }
    }
    match &findings.extents {
        None => out.push_str("extents            not reported\n"),
        Some(questions) => {
            out.push_str(&latency("extents query", &questions.latency));
            out.push_str(&format!(
                "                   {} extents in {} of {} bytes\n",
                questions.extents, questions.covered, findings.size
            ));
        }
    }
    out
}

fn latency(what: &str, latency: &LatencySummary) -> String {
    format!(
        "{what:18} median {} us, 90 % {}, 99 % {}, maximum {}\n                   {}\n",
        number(latency.median_us),
        number(latency.p90_us),
        number(latency.p99_us),
        number(latency.max_us),
        counted(latency.count, "request")
    )
}

/// For people.
pub(super) fn text(findings: &Findings) -> String {
    let findings = filled(findings);
    let mut out = described(&findings) + &latencies(&findings);
    // What has no connections is used by several workers at a time.
    let lane = if findings.own_connections { "connection" } else { "thread" };
    for (title, points) in [("Reading", &findings.reading), ("Writing", &findings.writing)] {
        if !points.is_empty() {
            out.push_str(&format!(
                "\n{title}, MB/s\nRows: request size and requests in flight per {lane}; columns: {lane}s\n"
            ));
            out.push_str(&grid(points));
        }
    }
    let advice = [("reading", &findings.reading_advice), ("writing", &findings.writing_advice)];
    for (what, advice) in advice {
        let Some(advice) = advice else { continue };
        out.push_str(&advised(what, advice, lane));
    }
    let mut end = format!("measured in {} s", number(findings.took_s));
    if findings.left_out > 0 {
        end.push_str(&format!(
            "; left out for lack of time: {} (--time allows more)",
            counted(findings.left_out, "measurement")
        ));
    }
    out + "\n" + &wrapped(&end)
}

/// The advice for one direction.
fn advised(what: &str, advice: &Advice, lane: &str) -> String {
    let described = |point: &SettingsResult| {
        format!(
            "{}, {} in flight per {lane}, {} per request: {} MB/s, {} s of CPU time per GiB",
            counted(point.connections, lane),
            counted(point.requests, "request"),
            size(point.request_size),
            number(point.bytes_per_second / 1e6),
            number(point.cpu_s_per_gib),
        )
    };
    let settings = described(&advice.settings);
    let best = number(advice.best_bytes_per_second / 1e6);
    let text = match &advice.defaults {
        Some(_) if advice.keep_defaults => format!(
            "use the defaults of copy: {settings} (best settings, measured again: {best} MB/s)"
        ),
        Some(defaults) => format!("{settings} (defaults of copy: {})", described(defaults)),
        None => format!(
            "use the defaults of copy, which there was no time to measure (fastest settings, not \
             measured again: {settings}); --time allows more"
        ),
    };
    format!("\n{}    {}\n", wrapped(&format!("For {what}: {text}")), advice.command)
}

/// Columns of a terminal that every user has.
const COLUMNS: usize = 80;

/// Text in lines that fit a terminal.
fn wrapped(text: &str) -> String {
    let mut out = String::new();
    let mut used = 0;
    for word in text.split(' ') {
        let len = word.chars().count();
        let separator = match used {
            0 => "",
            _ if used + 1 + len >= COLUMNS => {
                used = 1;
                "\n  "
            }
            _ => " ",
        };
        used += separator.trim_start_matches('\n').len() + len;
        out.push_str(separator);
        out.push_str(word);
    }
    out.push('\n');
    out
}

/// The size of a request: of tiny devices less than a KiB.
fn size(bytes: u64) -> String {
    if bytes < 1024 { format!("{bytes} B") } else { format!("{} KiB", bytes >> 10) }
}

/// So many of something.
fn counted(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

/// A line for each size and number of requests, a column for each number of connections.
fn grid(points: &[SettingsResult]) -> String {
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
    for (bytes, requests) in lines {
        out.push_str(&format!("{:>9}  {requests:>8}", size(bytes)));
        for count in &connections {
            let found = points.iter().find(|point| {
                (point.request_size, point.requests, point.connections) == (bytes, requests, *count)
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
    use crate::device::findings::tests::point;

    #[test]
    fn advice_fits_a_terminal() {
        let words = vec!["word"; 60].join(" ");
        let text = wrapped(&words);
        assert!(text.lines().all(|line| line.len() < COLUMNS), "{text}");
        assert_eq!(text.split_whitespace().collect::<Vec<_>>().join(" "), words);
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
