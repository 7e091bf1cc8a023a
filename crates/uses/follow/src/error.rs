//! Why a move has stopped.

use std::fmt;

use blockhaul_transfer::{TransferError, TransferErrorKind, TransferStep};

/// Kinds of [`FollowError`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FollowErrorKind {
    /// The plan is invalid.
    Plan,
    /// The provider failed, or has printed a reply that is not possible here.
    Provider,
    /// The command that stops or starts the machine failed.
    Command,
    /// A copy failed.
    Copy(TransferErrorKind),
    /// Source and target differ.
    Difference,
    /// The rounds do not get shorter.
    NoConvergence,
    /// A signal requested the end.
    Cancelled,
    /// The state of the move cannot be read or written.
    State,
}

/// Why a move has stopped, and what to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FollowError {
    kind: FollowErrorKind,
    disk: Option<String>,
    text: String,
}

impl FollowError {
    /// An error of this kind.
    pub fn new(kind: FollowErrorKind, text: impl Into<String>) -> FollowError {
        FollowError { kind, disk: None, text: text.into() }
    }

    /// The same error, about this disk.
    #[must_use]
    pub fn of_disk(mut self, disk: &str) -> FollowError {
        self.disk = Some(disk.to_string());
        self
    }

    pub(crate) fn provider(text: impl Into<String>) -> FollowError {
        FollowError::new(FollowErrorKind::Provider, text)
    }

    /// The kind.
    pub fn kind(&self) -> FollowErrorKind {
        self.kind
    }

    /// The name of the disk, if the error is about one.
    pub fn disk(&self) -> Option<&str> {
        self.disk.as_deref()
    }

    /// Whether the same round may succeed if it is repeated.
    pub fn is_transient(&self) -> bool {
        self.kind == FollowErrorKind::Copy(TransferErrorKind::Connection)
    }
}

impl From<TransferError> for FollowError {
    fn from(error: TransferError) -> FollowError {
        FollowError::new(FollowErrorKind::Copy(error.kind()), error.to_string())
    }
}

impl From<FollowError> for TransferError {
    fn from(error: FollowError) -> TransferError {
        let kind = match error.kind {
            FollowErrorKind::Plan => TransferErrorKind::Request,
            FollowErrorKind::Copy(kind) => kind,
            FollowErrorKind::Difference => TransferErrorKind::Difference,
            FollowErrorKind::State => TransferErrorKind::Open,
            FollowErrorKind::Provider
            | FollowErrorKind::Command
            | FollowErrorKind::NoConvergence
            | FollowErrorKind::Cancelled => TransferErrorKind::Other,
        };
        let step = match kind {
            TransferErrorKind::Request => TransferStep::Options,
            TransferErrorKind::Difference => TransferStep::Verification,
            _ => TransferStep::Copy,
        };
        TransferError::new(kind, step, error.to_string())
    }
}

impl fmt::Display for FollowError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.disk {
            Some(disk) => write!(f, "disk {disk}: {}", self.text),
            None => f.write_str(&self.text),
        }
    }
}

impl std::error::Error for FollowError {}
