//! Failures of a command: one line with what failed, where, why and a remedy; and the exit
//! statuses, which scripts can distinguish.

use std::fmt;

use blockhaul_backups::{BackupError, BackupErrorKind};
use blockhaul_block::{Error, Kind};
use blockhaul_jobs::JobError;
use blockhaul_metrics::CommandEnd;
use blockhaul_transfer::{TransferError, TransferErrorKind, kind_remedy};

pub use blockhaul_io::plain;

/// The result of a command: its exit status, or why it failed.
pub type CommandResult = Result<u8, CommandFailure>;

/// The operation failed in a way not listed below.
pub const FAILED: u8 = 1;
/// The command line is invalid.
pub const USAGE: u8 = 2;
/// A device cannot be opened: not found, refused, not an NBD server, or of the wrong kind or size.
pub const OPEN: u8 = 3;
/// The source failed.
pub const SOURCE: u8 = 4;
/// The target failed.
pub const TARGET: u8 = 5;
/// The target is full.
pub const FULL: u8 = 6;
/// A connection was lost or timed out.
pub const LOST: u8 = 7;
/// Verification found source and target different.
pub const DIFFERENT: u8 = 8;

/// A server stopped while requests were still in flight at devices, or plugins or scripts had not
/// ended.
pub const HELD: u8 = 9;

/// Copied, except for what the source cannot read.
pub const PARTIAL: u8 = 10;

/// The statuses, for help and manual.
pub const TABLE: &[(&str, &str)] = &[
    ("0", "success"),
    ("1", "a failure other than those below"),
    (
        "2",
        "the command line is invalid, or an argument has the wrong type (for example, a directory)",
    ),
    (
        "3",
        "a device cannot be opened: not found, refused, in use, not an NBD server, read-only, or the target \
         is smaller than the source; nothing was written, and no target was resized or emptied",
    ),
    ("4", "reading the source failed"),
    ("5", "writing the target failed"),
    ("6", "the target is full"),
    ("7", "a connection was lost or timed out"),
    ("8", "verification found that source and target, or device and manifest, differ"),
    ("10", "with --on-error skip: some ranges cannot be read; everything else is copied"),
    (
        "128+N",
        "terminated by signal N: 130 for Ctrl-C, 143 for SIGTERM, 141 if standard output was closed before \
         the end of a copy. A shell reports 137 after SIGKILL; a copy with a journal can then be resumed",
    ),
    (
        "check",
        "0 no faults, or all are repaired; 1 the image could not be checked completely, or not repaired; \
         2 corruptions: what guests read may be wrong; 3 leaks: lost clusters, which are harmless",
    ),
    (
        "compare",
        "0 the same; 1 different; 2 a device cannot be opened; 3 extents cannot be read; 4 data cannot be read",
    ),
    ("info", "0 success, or the answer to --can or --is is yes; 1 any failure; 2 the answer is no"),
    (
        "ctl",
        "0 done; 1 the server failed; 2 unknown command, or invalid value; 3 no server listens on the \
         socket, or it has no such client, export or layer; 7 no reply in time",
    ),
    (
        "serve",
        "0 after a normal exit; 1 a failure other than those below; 2 the command line or the file of --config is invalid; \
         3 a device or a file cannot be opened; 5 a layer could not write back data that it had accepted (cache); 9 devices still held \
         requests after --drain-timeout, or plugins or scripts had not ended; --run the status of the command, or \
         128+N if signal N terminated it",
    ),
];

/// Why a command failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommandFailure {
    status: u8,
    text: String,
    /// What the user of the command line can do about it, with the punctuation before it; or nothing.
    remedy: String,
}

impl CommandFailure {
    /// A failure with this exit status.
    pub fn new(status: u8, text: impl Into<String>) -> CommandFailure {
        CommandFailure { status, text: text.into(), remedy: String::new() }
    }

    /// The command line is invalid.
    pub fn usage(text: impl Into<String>) -> CommandFailure {
        CommandFailure::new(USAGE, text)
    }

    /// A device could not be opened. `role`: "source", "target", "device".
    pub fn opening(role: &str, what: &str, error: &Error) -> CommandFailure {
        let status = match error.kind() {
            Kind::Usage => USAGE,
            Kind::TimedOut => LOST,
            Kind::NoSpace => FULL,
            _ => OPEN,
        };
        let text = blockhaul_transfer::opening_text(role, what, error);
        CommandFailure::new(status, text).with_remedy(error, true)
    }

    /// The same failure with the remedy of an error. `opening`: it happened when a device was opened.
    #[must_use]
    pub fn with_remedy(self, error: &Error, opening: bool) -> CommandFailure {
        let remedy = match error.remedy() {
            Some(remedy) => format!("; {remedy}"),
            None => kind_remedy(error, opening).to_string(),
        };
        CommandFailure { remedy, ..self }
    }

    /// A failure with the same status and remedy, and with this text, which contains
    /// [that of this one](CommandFailure::facts).
    #[must_use]
    pub fn reworded(&self, text: impl Into<String>) -> CommandFailure {
        CommandFailure { text: text.into(), ..self.clone() }
    }

    /// The same failure with another status.
    #[must_use]
    pub fn with_status(self, status: u8) -> CommandFailure {
        CommandFailure { status, ..self }
    }

    /// The same failure with text appended.
    #[must_use]
    pub fn and(self, more: &str) -> CommandFailure {
        CommandFailure { remedy: self.remedy + more, ..self }
    }

    /// What failed, where and why, without remedy: for front ends other than the command line.
    pub fn facts(&self) -> &str {
        self.text.trim()
    }

    /// The exit status.
    pub fn status(&self) -> u8 {
        self.status
    }
}

impl fmt::Display for CommandFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(format!("{}{}", self.text, self.remedy).trim())
    }
}

/// The exit status for errors of copies and jobs of this kind.
pub fn status_of(kind: TransferErrorKind) -> u8 {
    match kind {
        TransferErrorKind::Request => USAGE,
        TransferErrorKind::Open => OPEN,
        TransferErrorKind::Source => SOURCE,
        TransferErrorKind::Target => TARGET,
        TransferErrorKind::Full => FULL,
        TransferErrorKind::Connection => LOST,
        TransferErrorKind::Difference => DIFFERENT,
        TransferErrorKind::Other => FAILED,
    }
}

impl From<TransferError> for CommandFailure {
    fn from(error: TransferError) -> CommandFailure {
        CommandFailure::new(status_of(error.kind()), error.facts()).and(error.remedy())
    }
}

impl From<JobError> for CommandFailure {
    fn from(error: JobError) -> CommandFailure {
        CommandFailure::new(status_of(error.kind()), error.facts()).and(error.remedy())
    }
}

impl From<BackupError> for CommandFailure {
    fn from(error: BackupError) -> CommandFailure {
        let status = match error.kind() {
            BackupErrorKind::Request => USAGE,
            BackupErrorKind::Open => OPEN,
            BackupErrorKind::Source => SOURCE,
            BackupErrorKind::Target => TARGET,
            BackupErrorKind::Full => FULL,
            BackupErrorKind::Connection => LOST,
            BackupErrorKind::Damage => DIFFERENT,
            BackupErrorKind::Other => FAILED,
        };
        CommandFailure::new(status, error.facts()).and(error.remedy())
    }
}

impl From<Error> for CommandFailure {
    fn from(error: Error) -> CommandFailure {
        let status = match error.kind() {
            Kind::Usage => USAGE,
            Kind::Disconnected | Kind::TimedOut => LOST,
            _ => FAILED,
        };
        CommandFailure::new(status, error.located()).with_remedy(&error, false)
    }
}

/// The end of a command, for its metrics and its state.
pub fn command_end(outcome: &CommandResult) -> CommandEnd {
    match outcome {
        Ok(status) => CommandEnd { status: *status, error: None },
        Err(failure) => CommandEnd { status: failure.status(), error: Some(failure.to_string()) },
    }
}

/// A message of several lines, as one line.
pub fn joined(text: &str) -> String {
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    lines.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_of_several_lines_become_one() {
        assert_eq!(joined("first\n  second\n\nthird"), "first second third");
    }

    #[test]
    fn opening_tells_kinds_apart_and_what_to_do() {
        let gone = Error::new(Kind::NotFound, "no such file").on(&"disk.raw".into());
        let failure = CommandFailure::opening("source", "disk.raw", &gone);
        assert_eq!(failure.status(), OPEN);
        let text = "cannot open the source: disk.raw: no such file; check the name";
        assert_eq!(failure.to_string(), text);
        let late = Error::new(Kind::TimedOut, "no greeting within 30 s");
        let failure = CommandFailure::opening("source", "nbd://h", &late);
        assert_eq!(failure.status(), LOST);
        assert!(failure.to_string().starts_with("cannot open the source: nbd://h: no greeting"));
        let wrong = Error::new(Kind::Io, "./a.sh: get_size: printed 1X").of_plugin();
        let failure = CommandFailure::opening("source", "sh:./a.sh", &wrong).to_string();
        assert_eq!(failure, "cannot open the source: sh:./a.sh: ./a.sh: get_size: printed 1X");
    }
}
