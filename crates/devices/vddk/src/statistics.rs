//! Calls of the library's functions: how many, how long, how many bytes.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use blockhaul_catalog::StorageFigure;
use blockhaul_isolated::{ReportFormat, ReportWriter};

/// A function of the library.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Function {
    Init,
    Connect,
    Disconnect,
    Create,
    Open,
    Close,
    GetInfo,
    Read,
    Write,
    Wait,
    Flush,
    Query,
}

const NAMES: [&str; 12] = [
    "InitEx",
    "ConnectEx",
    "Disconnect",
    "Create",
    "Open",
    "Close",
    "GetInfo",
    "ReadAsync",
    "WriteAsync",
    "Wait",
    "Flush",
    "QueryAllocatedBlocks",
];

/// The calls of all functions, and whom they are reported to.
#[derive(Debug)]
pub(crate) struct Statistics {
    /// The version of the library.
    version: u32,
    all: [Calls; NAMES.len()],
    reporter: Option<ReportWriter>,
}

#[derive(Debug, Default)]
struct Calls {
    calls: AtomicU64,
    nanoseconds: AtomicU64,
    bytes: AtomicU64,
}

/// Words of each function in a report.
const WORDS: usize = 3;
/// Bytes of a report: the version, then calls, nanoseconds and bytes of each function.
const REPORT: usize = (1 + NAMES.len() * WORDS) * size_of::<u64>();

/// The report of a process with the library.
pub(crate) const REPORTED: ReportFormat = ReportFormat { size: REPORT, state, figures };

impl Statistics {
    /// No calls yet.
    pub(crate) fn new(version: u32) -> Statistics {
        Statistics { version, all: Default::default(), reporter: ReportWriter::of_parent() }
    }

    /// Runs a call, and counts it. For transfers this is the time until they are under way.
    pub(crate) fn of<T>(&self, function: Function, call: impl FnOnce() -> T) -> T {
        let started = blockhaul_io::now();
        let result = call();
        let calls = &self.all[function as usize];
        calls.calls.fetch_add(1, Ordering::Relaxed);
        let taken = u64::try_from(blockhaul_io::elapsed(started).as_nanos()).unwrap_or(u64::MAX);
        calls.nanoseconds.fetch_add(taken, Ordering::Relaxed);
        if let Some(reporter) = &self.reporter {
            reporter.write(|| self.report());
        }
        result
    }

    /// Counts bytes of a transfer, before its call.
    pub(crate) fn bytes(&self, function: Function, bytes: u64) {
        self.all[function as usize].bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// All of it as bytes.
    pub(crate) fn report(&self) -> Vec<u8> {
        let words = self.all.iter().flat_map(|calls| {
            [&calls.calls, &calls.nanoseconds, &calls.bytes]
                .map(|count| count.load(Ordering::Relaxed))
        });
        let words = [u64::from(self.version)].into_iter().chain(words);
        words.flat_map(u64::to_le_bytes).collect()
    }
}

/// The functions of a report that were called: name, calls, nanoseconds, bytes.
fn called(report: &[u8]) -> impl Iterator<Item = (&'static str, [u64; WORDS])> {
    let words: Vec<u64> =
        report.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).skip(1).collect();
    let counts = words.as_chunks::<WORDS>().0.to_vec();
    NAMES.into_iter().zip(counts).filter(|(_, counts)| counts[0] > 0)
}

/// A report for users: `VDDK 8: Open 1 (0.2 s), ReadAsync 44 (0.1 s, 11534336 bytes)`.
pub(crate) fn state(report: &[u8]) -> String {
    let version = report.first_chunk().map_or(0, |word| u64::from_le_bytes(*word));
    if version == 0 {
        return String::new();
    }
    let mut text = format!("VDDK {version}: ");
    for (index, (name, [calls, nanoseconds, bytes])) in called(report).enumerate() {
        let separator = if index == 0 { "" } else { ", " };
        let time = Duration::from_nanos(nanoseconds).as_secs_f32();
        let _ = write!(text, "{separator}{name} {calls} ({time:.1} s");
        match bytes {
            0 => text.push(')'),
            bytes => {
                let _ = write!(text, ", {bytes} bytes)");
            }
        }
    }
    text
}

/// A report for metrics.
pub(crate) fn figures(report: &[u8]) -> Vec<StorageFigure> {
    type Value = fn([u64; WORDS]) -> f64;
    let kinds: [(&str, &str, Value); WORDS] = [
        ("vddk_calls_total", "Calls of functions of VMware's library.", |counts| counts[0] as f64),
        (
            "vddk_call_seconds_total",
            "Time in functions of VMware's library. Of reads and writes, the time until they are under way.",
            |counts| Duration::from_nanos(counts[1]).as_secs_f64(),
        ),
        ("vddk_bytes_total", "Bytes read and written by VMware's library.", |counts| {
            counts[2] as f64
        }),
    ];
    let mut figures = Vec::new();
    for (name, help, value) in kinds {
        let with_bytes = |function: &str| ["ReadAsync", "WriteAsync"].contains(&function);
        for (function, counts) in called(report) {
            if name != "vddk_bytes_total" || with_bytes(function) {
                let labels = vec![("function", function.to_string())];
                figures.push(StorageFigure { name, help, labels, value: value(counts) });
            }
        }
    }
    figures
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_says_what_was_counted() {
        let statistics = Statistics::new(8);
        assert_eq!(state(&[0; REPORT]), "");
        assert!(figures(&[0; REPORT]).is_empty() && state(&[]).is_empty());
        statistics.of(Function::Open, || ());
        statistics.bytes(Function::Read, 512);
        statistics.of(Function::Read, || ());
        let report = statistics.report();
        assert_eq!(report.len(), REPORT);
        assert_eq!(state(&report), "VDDK 8: Open 1 (0.0 s), ReadAsync 1 (0.0 s, 512 bytes)");
        let figures = figures(&report);
        let names: Vec<_> =
            figures.iter().map(|figure| (figure.name, figure.labels[0].1.as_str())).collect();
        let expected = [
            ("vddk_calls_total", "Open"),
            ("vddk_calls_total", "ReadAsync"),
            ("vddk_call_seconds_total", "Open"),
            ("vddk_call_seconds_total", "ReadAsync"),
            ("vddk_bytes_total", "ReadAsync"),
        ];
        assert_eq!(names, expected);
        assert!((figures[4].value - 512.0).abs() < 0.1);
    }
}
