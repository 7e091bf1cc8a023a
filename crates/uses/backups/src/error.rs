//! Errors of backups as data: the kind, the step, the store, and a remedy.

use std::fmt;
use std::path::{Path, PathBuf};

use blockhaul_block::{Error, Kind};
use blockhaul_transfer::{kind_remedy, opening_text};

/// Result of an operation on stores.
pub(crate) type Result<T, E = BackupError> = std::result::Result<T, E>;

/// The class of an error, by which front ends choose exit statuses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BackupErrorKind {
    /// The request is invalid.
    Request,
    /// A store, device or file cannot be opened, or does not fit.
    Open,
    /// A source failed, or a point that is read is incomplete.
    Source,
    /// The target failed.
    Target,
    /// There is no space left.
    Full,
    /// A connection was lost or timed out.
    Connection,
    /// Files of a store have changed since they were written.
    Damage,
    /// Any other failure.
    Other,
}

/// The step in which an operation was refused or failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BackupStep {
    /// A store was opened or locked.
    OpenStore,
    /// Files were compared with their digests.
    Check,
    /// An increment was merged into the full backup below it.
    Merge,
    /// The oldest point was removed.
    Prune,
    /// A point that an interrupted pull has begun was removed.
    Abandon,
    /// The source of a pull was opened.
    OpenSource,
    /// The bitmap of a source was read.
    ReadBitmap,
    /// A full backup or an increment was chosen, and whether an earlier pull is resumed.
    Plan,
    /// What is about to be copied was recorded in a store.
    Record,
    /// A new point was listed.
    Publish,
}

/// Why an operation on stores is refused, or has failed.
#[derive(Clone, PartialEq, Eq)]
pub struct BackupError(Box<BackupErrorDetails>);

#[derive(Debug, Clone, PartialEq, Eq)]
struct BackupErrorDetails {
    kind: BackupErrorKind,
    step: BackupStep,
    store: Option<PathBuf>,
    disk: Option<usize>,
    text: String,
    /// With the punctuation before it; or nothing.
    remedy: String,
}

impl BackupError {
    pub(crate) fn new(
        kind: BackupErrorKind,
        step: BackupStep,
        text: impl Into<String>,
    ) -> BackupError {
        let (text, remedy) = (text.into(), String::new());
        BackupError(Box::new(BackupErrorDetails {
            kind,
            step,
            store: None,
            disk: None,
            text,
            remedy,
        }))
    }

    /// A file of the store `dir` cannot be read or written, or is invalid.
    pub(crate) fn of_store(step: BackupStep, dir: &Path, error: Error) -> BackupError {
        let kind = match error.kind() {
            Kind::Usage => BackupErrorKind::Request,
            Kind::NoSpace => BackupErrorKind::Full,
            _ => BackupErrorKind::Open,
        };
        // The remedies by kind are for disks; only that for a full file system fits.
        let error = if error.kind() == Kind::NoSpace { error } else { error.or_remedy("") };
        BackupError::of_device(kind, step, &error).in_store(dir)
    }

    /// A device failed: a file of a store, or a source.
    pub(crate) fn of_file(step: BackupStep, error: &Error) -> BackupError {
        let kind = match error.kind() {
            Kind::Usage => BackupErrorKind::Request,
            Kind::Disconnected | Kind::TimedOut => BackupErrorKind::Connection,
            _ => BackupErrorKind::Other,
        };
        BackupError::of_device(kind, step, error)
    }

    /// The source of a pull cannot be opened.
    pub(crate) fn opening_source(source: &str, error: &Error) -> BackupError {
        let kind = match error.kind() {
            Kind::Usage => BackupErrorKind::Request,
            Kind::TimedOut => BackupErrorKind::Connection,
            Kind::NoSpace => BackupErrorKind::Full,
            _ => BackupErrorKind::Open,
        };
        let text = opening_text("source", source, error);
        BackupError::new(kind, BackupStep::OpenSource, text).with_remedy(error, true)
    }

    fn of_device(kind: BackupErrorKind, step: BackupStep, error: &Error) -> BackupError {
        BackupError::new(kind, step, error.located()).with_remedy(error, false)
    }

    fn with_remedy(self, error: &Error, opening: bool) -> BackupError {
        match error.remedy() {
            Some(remedy) => self.and(&format!("; {remedy}")),
            None => self.and(kind_remedy(error, opening)),
        }
    }

    /// The same error of this store.
    #[must_use]
    pub(crate) fn in_store(mut self, dir: &Path) -> BackupError {
        self.0.store = Some(dir.to_path_buf());
        self
    }

    /// The same error of the disk with this index.
    #[must_use]
    pub(crate) fn of_disk(mut self, index: usize) -> BackupError {
        self.0.disk = Some(index);
        self
    }

    /// The same error of another kind.
    #[must_use]
    pub(crate) fn with_kind(mut self, kind: BackupErrorKind) -> BackupError {
        self.0.kind = kind;
        self
    }

    /// The same error with text appended to its remedy.
    #[must_use]
    pub(crate) fn and(mut self, more: &str) -> BackupError {
        self.0.remedy += more;
        self
    }

    /// The class of the error.
    pub fn kind(&self) -> BackupErrorKind {
        self.0.kind
    }

    /// The step in which it arose.
    pub fn step(&self) -> BackupStep {
        self.0.step
    }

    /// The directory of the store; `None`: the error concerns no single store.
    pub fn store(&self) -> Option<&Path> {
        self.0.store.as_deref()
    }

    /// The index of the disk in a [`PullRequest`](crate::PullRequest); `None`: the error concerns no single disk.
    pub fn disk(&self) -> Option<usize> {
        self.0.disk
    }

    /// The failure, its device, offset and cause, without remedy.
    pub fn facts(&self) -> &str {
        self.0.text.trim()
    }

    /// The next step of the user, with the punctuation before it; empty: none is known.
    pub fn remedy(&self) -> &str {
        &self.0.remedy
    }
}

impl fmt::Display for BackupError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(format!("{}{}", self.0.text, self.0.remedy).trim())
    }
}

impl fmt::Debug for BackupError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} in {:?} ({self})", self.0.kind, self.0.step)
    }
}

impl std::error::Error for BackupError {}
