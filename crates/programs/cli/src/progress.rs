//! Progress of a copy: a bar for users, N/100 like nbdcopy, JSON lines for programs.

use std::fs::File;
use std::io::{IsTerminal as _, Write as _};
use std::os::fd::AsFd as _;
use std::str::FromStr;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use blockhaul_engine::CopyProgress;
use blockhaul_metrics::{CommandEnd, CopyObserver, CopySnapshot, ObservedCopy};
use rustix::fs::OFlags;

use crate::args::ProgressOptions;
use crate::exit::{CommandFailure, plain};
use crate::logger;

/// How to show progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProgressStyle {
    /// A bar on standard error.
    Bar,
    /// A map of the disk that fills, on standard error.
    Map,
    /// Lines of `N/100` on this descriptor.
    Percent(i32),
    /// JSON lines on this descriptor.
    Json(i32),
}

impl FromStr for ProgressStyle {
    type Err = String;

    fn from_str(text: &str) -> Result<ProgressStyle, String> {
        let descriptor = |text: &str| match text.parse() {
            Ok(fd @ 0..) => Ok(fd),
            _ => Err(format!("{text:?} is not a descriptor number, map, json or json:FD")),
        };
        match text {
            "bar" => Ok(ProgressStyle::Bar),
            "map" => Ok(ProgressStyle::Map),
            "json" => Ok(ProgressStyle::Json(2)),
            _ => match text.strip_prefix("json:") {
                Some(fd) => descriptor(fd).map(ProgressStyle::Json),
                None => descriptor(text).map(ProgressStyle::Percent),
            },
        }
    }
}

/// Interval at which the counters are read.
const INTERVAL: Duration = Duration::from_millis(200);
/// Interval of the lines in a file or a pipe.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Shows progress until it is finished.
pub struct ProgressReporter {
    stop: mpsc::Sender<()>,
    thread: Option<JoinHandle<()>>,
}

impl ProgressReporter {
    /// Opens the output; `None` shows a bar on a terminal, else nothing.
    pub fn open(
        style: Option<ProgressStyle>,
        quiet: bool,
    ) -> Result<Option<ProgressOutput>, CommandFailure> {
        let style = match style {
            // A log has lines of one kind.
            Some(ProgressStyle::Bar | ProgressStyle::Map) if logger::is_json() => {
                ProgressStyle::Json(2)
            }
            Some(style) => style,
            None if logger::is_json() => return Ok(None),
            None if !quiet && std::io::stderr().is_terminal() => ProgressStyle::Bar,
            None => return Ok(None),
        };
        let fd = match style {
            ProgressStyle::Bar | ProgressStyle::Map => 2,
            ProgressStyle::Percent(fd) | ProgressStyle::Json(fd) => fd,
        };
        let owned = match fd {
            0 => None,
            1 => std::io::stdout().as_fd().try_clone_to_owned().ok(),
            2 => std::io::stderr().as_fd().try_clone_to_owned().ok(),
            fd => blockhaul_os::inherited(fd),
        };
        let Some(owned) = owned else {
            let text = format!("--progress: descriptor {fd} is not open for writing");
            return Err(CommandFailure::usage(text));
        };
        // Check first whether it can be written, before anything is copied.
        let flags = rustix::fs::fcntl_getfl(&owned).map_err(|errno| {
            CommandFailure::usage(format!("--progress: {}", plain(&std::io::Error::from(errno))))
        })?;
        if flags & OFlags::RWMODE == OFlags::RDONLY {
            let text = format!("--progress: descriptor {fd} is only open for reading");
            return Err(CommandFailure::usage(text));
        }
        Ok(Some(ProgressOutput { style, file: File::from(owned), last: None, logged: None }))
    }

    /// Starts showing.
    pub fn start(
        sink: ProgressOutput,
        watch: Arc<CopyObserver>,
    ) -> Result<ProgressReporter, CommandFailure> {
        let (stop, stopped) = mpsc::channel();
        let thread = std::thread::Builder::new().name("progress".into());
        let thread = thread.spawn(move || report(sink, &watch, &stopped));
        match thread {
            Ok(thread) => Ok(ProgressReporter { stop, thread: Some(thread) }),
            Err(error) => {
                let text = format!("cannot show progress: {}", plain(&error));
                Err(CommandFailure::new(crate::exit::FAILED, text))
            }
        }
    }

    /// Shows the end state, after [`CopyObserver::finish`]: everything if the copy succeeded.
    pub fn finish(mut self) {
        // Fails only if the thread has ended because its output was closed.
        let _ = self.stop.send(());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Shown progress of work other than copies.
pub struct WorkProgress {
    watch: Arc<CopyObserver>,
    reporter: Option<ProgressReporter>,
}

impl WorkProgress {
    /// Starts showing the work of this command.
    pub fn start(
        command: &'static str,
        options: &ProgressOptions,
    ) -> Result<WorkProgress, CommandFailure> {
        let sink = ProgressReporter::open(options.progress, options.no_progress)?;
        let watch = CopyObserver::new(vec![ObservedCopy::default()], None).of_command(command);
        let watch = Arc::new(watch);
        let reporter = sink.map(|sink| ProgressReporter::start(sink, watch.clone())).transpose()?;
        Ok(WorkProgress { watch, reporter })
    }

    /// The counters that are shown.
    pub fn progress(&self) -> Arc<CopyProgress> {
        self.watch.disks().first().map(|disk| disk.progress.clone()).unwrap_or_default()
    }

    /// Shows the end state.
    pub fn finish(self, is_ok: bool) {
        self.watch.finish(CommandEnd { status: u8::from(!is_ok), error: None });
        if let Some(reporter) = self.reporter {
            reporter.finish();
        }
    }
}

/// The destination and style of progress.
pub struct ProgressOutput {
    style: ProgressStyle,
    file: File,
    last: Option<String>,
    /// The time of the last line in a file.
    logged: Option<Instant>,
}

fn report(mut sink: ProgressOutput, watch: &CopyObserver, stopped: &mpsc::Receiver<()>) {
    loop {
        if stopped.recv_timeout(INTERVAL) == Err(mpsc::RecvTimeoutError::Disconnected) {
            return;
        }
        let view = watch.view();
        // If the output is closed, the copy continues without.
        if sink.show(&view).is_err() || view.end.is_some() {
            return;
        }
    }
}

impl ProgressOutput {
    fn show(&mut self, view: &CopySnapshot) -> std::io::Result<()> {
        let is_end = view.end.is_some();
        match self.style {
            ProgressStyle::Bar | ProgressStyle::Map if !self.file.is_terminal() => {
                self.log_line(view, is_end)
            }
            ProgressStyle::Bar | ProgressStyle::Map => {
                let size = rustix::termios::tcgetwinsize(&self.file);
                let columns = size.map_or(0, |size| usize::from(size.ws_col));
                let map = view.map().filter(|_| self.style == ProgressStyle::Map);
                let shown = map.map_or_else(|| view.bar(columns), |map| view.strip(map, columns));
                let mut line = format!("\r{shown}\x1b[K");
                if is_end {
                    line.push('\n');
                }
                self.file.write_all(line.as_bytes())
            }
            ProgressStyle::Percent(_) => {
                // nbdcopy's first line is 0/100.
                if self.last.is_none() {
                    self.line("0/100".to_string())?;
                }
                self.line(format!("{}/100", view.percent()))
            }
            ProgressStyle::Json(_) => {
                self.last = None;
                self.line(view.json().to_string())
            }
        }
    }

    /// Writes the bar as a line, every 10 s and at the end.
    fn log_line(&mut self, view: &CopySnapshot, is_end: bool) -> std::io::Result<()> {
        let is_due = self.logged.is_none_or(|at| blockhaul_io::elapsed(at) >= LOG_INTERVAL);
        if !is_due && !is_end {
            return Ok(());
        }
        self.logged = Some(blockhaul_io::now());
        let map = view.map().filter(|_| self.style == ProgressStyle::Map);
        let line = map.map_or_else(|| view.bar(0), |map| view.strip(map, 0));
        self.file.write_all(format!("{line}\n").as_bytes())
    }

    /// Writes a line if it differs from the last one.
    fn line(&mut self, line: String) -> std::io::Result<()> {
        if self.last.as_ref() == Some(&line) {
            return Ok(());
        }
        self.file.write_all(format!("{line}\n").as_bytes())?;
        self.last = Some(line);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn styles_are_parsed() {
        assert_eq!("3".parse(), Ok(ProgressStyle::Percent(3)));
        assert_eq!("json".parse(), Ok(ProgressStyle::Json(2)));
        assert_eq!("json:4".parse(), Ok(ProgressStyle::Json(4)));
        for bad in ["", "-1", "x", "json:", "json:x", "99999999999"] {
            assert!(bad.parse::<ProgressStyle>().is_err(), "{bad}");
        }
    }
}
