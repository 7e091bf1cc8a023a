//! Showing how far a copy is: a bar for people, N/100 as nbdcopy, JSON lines for programs.

use std::fs::File;
use std::io::{IsTerminal as _, Write as _};
use std::os::fd::AsFd as _;
use std::str::FromStr;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use engine::{Progress, Snapshot};

use crate::exit::{Failure, plain};

/// How to show progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    /// A bar on standard error.
    Bar,
    /// Lines of `N/100` on this descriptor.
    Percent(i32),
    /// JSON lines on this descriptor.
    Json(i32),
}

impl FromStr for Style {
    type Err = String;

    fn from_str(text: &str) -> Result<Style, String> {
        let descriptor = |text: &str| match text.parse() {
            Ok(fd @ 0..) => Ok(fd),
            _ => Err(format!("{text:?} is neither a descriptor's number nor json nor json:FD")),
        };
        match text {
            "bar" => Ok(Style::Bar),
            "json" => Ok(Style::Json(2)),
            _ => match text.strip_prefix("json:") {
                Some(fd) => descriptor(fd).map(Style::Json),
                None => descriptor(text).map(Style::Percent),
            },
        }
    }
}

/// Time between two looks at the counters.
const INTERVAL: Duration = Duration::from_millis(200);
/// Weight of the newest interval in the rate that is shown: a few seconds' memory.
const NEWEST: f64 = 0.1;
/// Cells of the bar.
const CELLS: usize = 40;

/// Shows progress until it is finished.
pub struct Reporter {
    stop: mpsc::Sender<bool>,
    thread: Option<JoinHandle<()>>,
}

impl Reporter {
    /// Opens what is written to; `None` shows a bar on a terminal, else nothing.
    pub fn open(style: Option<Style>, quiet: bool) -> Result<Option<Sink>, Failure> {
        let style = match style {
            Some(style) => style,
            None if !quiet && std::io::stderr().is_terminal() => Style::Bar,
            None => return Ok(None),
        };
        let fd = match style {
            Style::Bar => 2,
            Style::Percent(fd) | Style::Json(fd) => fd,
        };
        let owned = match fd {
            0 => None,
            1 => std::io::stdout().as_fd().try_clone_to_owned().ok(),
            2 => std::io::stderr().as_fd().try_clone_to_owned().ok(),
            fd => io::inherited(fd),
        };
        let Some(owned) = owned else {
            let text = format!("--progress: descriptor {fd} is not open for writing");
            return Err(Failure::usage(text));
        };
        // A first look at whether it can be written, before anything is copied.
        rustix::fs::fcntl_getfl(&owned)
            .map_err(|errno| Failure::usage(format!("--progress: {}", plain(&errno.into()))))?;
        Ok(Some(Sink { style, file: File::from(owned), last: None }))
    }

    /// Starts showing.
    pub fn start(sink: Sink, progress: Arc<Progress>) -> Result<Reporter, Failure> {
        let (stop, stopped) = mpsc::channel();
        let thread = std::thread::Builder::new().name("progress".into());
        let thread = thread.spawn(move || report(sink, &progress, &stopped));
        match thread {
            Ok(thread) => Ok(Reporter { stop, thread: Some(thread) }),
            Err(error) => {
                let text = format!("cannot show progress: {}", plain(&error));
                Err(Failure::new(crate::exit::FAILED, text))
            }
        }
    }

    /// Shows the end: all of it if the copy succeeded.
    pub fn finish(mut self, success: bool) {
        // Fails only if the thread has ended because nobody reads.
        let _ = self.stop.send(success);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Where and how progress is written.
pub struct Sink {
    style: Style,
    file: File,
    last: Option<String>,
}

fn report(mut sink: Sink, progress: &Progress, stopped: &mpsc::Receiver<bool>) {
    let mut rate = Rate::new();
    loop {
        let end = stopped.recv_timeout(INTERVAL);
        let now = progress.snapshot();
        rate.note(&now);
        let end = match end {
            Ok(success) => Some(success),
            Err(mpsc::RecvTimeoutError::Timeout) => None,
            Err(mpsc::RecvTimeoutError::Disconnected) => return,
        };
        let shown = sink.show(&now, &rate, end);
        // Nobody reads: the copy goes on without.
        if shown.is_err() || end.is_some() {
            return;
        }
    }
}

/// Bytes per second, smoothed.
struct Rate {
    started: Instant,
    last: (Instant, u64),
    smoothed: Option<f64>,
}

impl Rate {
    fn new() -> Rate {
        let now = Instant::now();
        Rate { started: now, last: (now, 0), smoothed: None }
    }

    fn note(&mut self, now: &Snapshot) {
        let done = now.done() + now.verified;
        let time = Instant::now();
        let passed = time.duration_since(self.last.0).as_secs_f64();
        if passed < 0.01 {
            return;
        }
        let newest = done.saturating_sub(self.last.1) as f64 / passed;
        self.smoothed = Some(match self.smoothed {
            None => newest,
            Some(before) => before * (1.0 - NEWEST) + newest * NEWEST,
        });
        self.last = (time, done);
    }

    fn bytes_per_second(&self) -> u64 {
        self.smoothed.unwrap_or(0.0) as u64
    }

    /// Seconds that are left, where that can be told.
    fn eta(&self, now: &Snapshot) -> Option<u64> {
        let left = now.total.checked_sub(position(now))?;
        let rate = self.bytes_per_second();
        (now.total > 0 && rate > 0).then(|| left.div_ceil(rate))
    }
}

/// Whether the copy is over and is being verified.
fn verifying(now: &Snapshot) -> bool {
    now.verified > 0
}

/// How far the copy is, or its verification.
fn position(now: &Snapshot) -> u64 {
    let done = if verifying(now) { now.verified } else { now.done() };
    if now.total > 0 { done.min(now.total) } else { done }
}

fn percent(now: &Snapshot, end: Option<bool>) -> u64 {
    match (end, now.total) {
        (Some(true), _) => 100,
        (_, 0) => 0,
        (_, total) => {
            let done = u128::from(now.done().min(total));
            u64::try_from(done * 100 / u128::from(total)).unwrap_or(100)
        }
    }
}

impl Sink {
    fn show(&mut self, now: &Snapshot, rate: &Rate, end: Option<bool>) -> std::io::Result<()> {
        match self.style {
            Style::Bar => {
                let mut line = format!("\r{}\x1b[K", bar(now, rate, end));
                if end.is_some() {
                    line.push('\n');
                }
                self.file.write_all(line.as_bytes())
            }
            Style::Percent(_) => {
                // nbdcopy's first line is 0/100.
                if self.last.is_none() {
                    self.line("0/100".to_string())?;
                }
                self.line(format!("{}/100", percent(now, end)))
            }
            Style::Json(_) => {
                self.last = None;
                self.line(json(now, rate, end).to_string())
            }
        }
    }

    /// Writes a line that differs from the last one.
    fn line(&mut self, line: String) -> std::io::Result<()> {
        if self.last.as_ref() == Some(&line) {
            return Ok(());
        }
        self.file.write_all(format!("{line}\n").as_bytes())?;
        self.last = Some(line);
        Ok(())
    }
}

fn json(now: &Snapshot, rate: &Rate, end: Option<bool>) -> serde_json::Value {
    let mut line = serde_json::json!({
        "phase": if verifying(now) { "verify" } else { "copy" },
        "done": now.done(),
        "total": now.total,
        "data": now.data,
        "zeroed": now.zeroed,
        "skipped": now.skipped,
        "verified": now.verified,
        "connections": now.connections,
        "requests": now.requests,
        "request_size": now.request_size,
        "rate": rate.bytes_per_second(),
        "eta": rate.eta(now),
        "elapsed": rate.started.elapsed().as_secs_f64(),
        "finished": end.is_some(),
    });
    if let Some(success) = end {
        line["success"] = success.into();
        line["eta"] = serde_json::Value::Null;
    }
    line
}

fn bar(now: &Snapshot, rate: &Rate, end: Option<bool>) -> String {
    let what = if verifying(now) { "verify " } else { "" };
    let rate_text = format!("{}/s", rounded(rate.bytes_per_second()));
    if now.total == 0 && end != Some(true) {
        return format!("{what}{} {rate_text}", rounded(now.done()));
    }
    let share = if now.total == 0 { 1.0 } else { position(now) as f64 / now.total as f64 };
    let share = if end == Some(true) { 1.0 } else { share };
    let filled = ((share * CELLS as f64) as usize).min(CELLS);
    let cells = format!("{}{}", "*".repeat(filled), "-".repeat(CELLS - filled));
    let rest = match (end, rate.eta(now)) {
        (Some(_), _) => {
            let seconds = rate.started.elapsed().as_secs_f64();
            format!("{} in {seconds:.1} s", rounded(now.done()))
        }
        (None, Some(eta)) => format!("{rate_text} {} left", clock(eta)),
        (None, None) => rate_text,
    };
    format!("{what}{:3}% [{cells}] {rest}", (share * 100.0) as u64)
}

/// A size of three digits or so.
fn rounded(bytes: u64) -> String {
    let mut value = bytes as f64;
    for unit in ["B", "KiB", "MiB", "GiB", "TiB", "PiB"] {
        if value < 1024.0 {
            let decimals = usize::from(unit != "B" && value < 100.0);
            return format!("{value:.decimals$} {unit}");
        }
        value /= 1024.0;
    }
    format!("{value:.1} EiB")
}

fn clock(seconds: u64) -> String {
    let (hours, minutes, seconds) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    match hours {
        0 => format!("{minutes}:{seconds:02}"),
        _ => format!("{hours}:{minutes:02}:{seconds:02}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(data: u64, total: u64) -> Snapshot {
        Snapshot { total, data, ..Snapshot::default() }
    }

    #[test]
    fn styles_are_parsed() {
        assert_eq!("3".parse(), Ok(Style::Percent(3)));
        assert_eq!("json".parse(), Ok(Style::Json(2)));
        assert_eq!("json:4".parse(), Ok(Style::Json(4)));
        for bad in ["", "-1", "x", "json:", "json:x", "99999999999"] {
            assert!(bad.parse::<Style>().is_err(), "{bad}");
        }
    }

    #[test]
    fn percentages_end_at_100_only_when_all_is_done() {
        assert_eq!(percent(&at(0, 0), None), 0);
        assert_eq!(percent(&at(0, 0), Some(true)), 100);
        assert_eq!(percent(&at(999, 1000), None), 99);
        assert_eq!(percent(&at(10, 1000), Some(false)), 1);
        assert_eq!(percent(&at(u64::MAX, i64::MAX as u64), None), 100);
    }

    #[test]
    fn lines_are_short_and_json_is_json() {
        let mut rate = Rate::new();
        rate.smoothed = Some(1048576.0);
        let line = bar(&at(512 << 20, 1 << 30), &rate, None);
        assert_eq!(
            line,
            format!(" 50% [{}{}] 1.0 MiB/s 8:32 left", "*".repeat(20), "-".repeat(20))
        );
        let line = json(&at(512 << 20, 1 << 30), &rate, None);
        assert_eq!((line["eta"].as_u64(), line["finished"].as_bool()), (Some(512), Some(false)));
        assert_eq!(json(&at(5, 0), &rate, Some(true))["success"], true);
        assert_eq!(clock(3723), "1:02:03");
        assert_eq!(rounded(1536), "1.5 KiB");
    }
}
