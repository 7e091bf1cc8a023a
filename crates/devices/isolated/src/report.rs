//! What the process of a device counts, for this program: a small file in memory that the process
//! writes, and that this side reads when it is asked. Nobody waits for the other.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::sync::Mutex;

use blockhaul_catalog::StorageFigure;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

/// The environment variable with the path of the file.
const VARIABLE: &str = "BLOCKHAUL_REPORT";

/// What is in a report, and what it means.
#[derive(Debug, Clone, Copy)]
pub struct ReportFormat {
    /// Its size in bytes. All are 0 until the process has written it.
    pub size: usize,
    /// What it says, for users; empty if nothing.
    pub state: fn(&[u8]) -> String,
    /// What it says, for metrics. The label `process` is added.
    pub figures: fn(&[u8]) -> Vec<StorageFigure>,
}

/// The side of the program that starts the process.
pub(super) struct ReportFile {
    file: OwnedFd,
    what: ReportFormat,
}

impl ReportFile {
    /// For a new process.
    ///
    /// # Errors
    /// Those of the system.
    pub(super) fn new(what: ReportFormat) -> io::Result<ReportFile> {
        let file = memfd_create("blockhaul-report", MemfdFlags::CLOEXEC)?;
        ftruncate(&file, what.size as u64)?;
        Ok(ReportFile { file, what })
    }

    /// The environment variable of the process.
    pub(super) fn variable(&self) -> (OsString, OsString) {
        let path = format!("{}{}", folder(std::process::id()), self.file.as_raw_fd());
        (VARIABLE.into(), path.into())
    }

    /// What the process counts, for users.
    pub(super) fn state(&self) -> String {
        self.read().map(|bytes| (self.what.state)(&bytes)).unwrap_or_default()
    }

    /// The same for metrics.
    pub(super) fn figures(&self, process: u32) -> Vec<StorageFigure> {
        let mut figures = self.read().map(|bytes| (self.what.figures)(&bytes)).unwrap_or_default();
        for figure in &mut figures {
            figure.labels.push(("process", process.to_string()));
        }
        figures
    }

    fn read(&self) -> Option<Vec<u8>> {
        let mut bytes = vec![0; self.what.size];
        let length = rustix::io::pread(&self.file, &mut bytes[..], 0).ok()?;
        (length == bytes.len()).then_some(bytes)
    }
}

/// The side of the process.
#[derive(Debug)]
pub struct ReportWriter(Mutex<File>);

impl ReportWriter {
    /// Reports to the program that started this process, if it wants that and this user may.
    pub fn of_parent() -> Option<ReportWriter> {
        let path = std::env::var(VARIABLE).ok()?;
        // The variable is inherited, too: only the parent's own file is meant.
        let parent = std::os::unix::process::parent_id();
        path.strip_prefix(&folder(parent))?.parse::<u32>().ok()?;
        let file = File::options().write(true).open(path).ok()?;
        Some(ReportWriter(Mutex::new(file)))
    }

    /// Replaces the report. The bytes are made while no other report is written, so that the last one
    /// is the newest.
    pub fn write(&self, bytes: impl FnOnce() -> Vec<u8>) {
        let Ok(file) = self.0.lock() else { return };
        // A report that cannot be written is missing, and nothing else.
        let _ = file.write_all_at(&bytes(), 0);
    }
}

/// The folder of a process's open files.
fn folder(process: u32) -> String {
    format!("/proc/{process}/fd/")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn figures(bytes: &[u8]) -> Vec<StorageFigure> {
        let value = f64::from(bytes[0]);
        vec![StorageFigure { name: "calls_total", help: "Calls.", labels: Vec::new(), value }]
    }

    #[test]
    fn what_is_written_to_the_file_is_read() {
        let state = |bytes: &[u8]| format!("{} calls", bytes[0]);
        let report = ReportFile::new(ReportFormat { size: 2, state, figures }).unwrap();
        assert_eq!(report.state(), "0 calls");
        let (name, path) = report.variable();
        assert_eq!(name, VARIABLE);
        let file = File::options().write(true).open(path).unwrap();
        ReportWriter(Mutex::new(file)).write(|| vec![7, 8]);
        assert_eq!(report.state(), "7 calls");
        let figures = report.figures(44);
        assert_eq!(figures[0].labels, [("process", "44".to_string())]);
        assert!((figures[0].value - 7.0).abs() < 0.1);
    }
}
