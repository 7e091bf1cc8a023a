//! Errors of a copy as data: the kind, what was being done, the side, and a remedy.

use std::fmt;

use blockhaul_block::{Error, Kind};
use blockhaul_engine::{CopyError, Side};

use crate::description::shown;
use crate::remedy::kind_remedy;

/// Result of a step of a copy.
pub(crate) type Result<T, E = TransferError> = std::result::Result<T, E>;

/// The class of an error, by which front ends choose exit statuses and error numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TransferErrorKind {
    /// The request is invalid.
    Request,
    /// A device or file cannot be opened, or does not fit. Nothing was written.
    Open,
    /// The source failed.
    Source,
    /// The target failed.
    Target,
    /// There is no space left, usually on the target.
    Full,
    /// A connection was lost or timed out.
    Connection,
    /// Source and target differ.
    Difference,
    /// Any other failure.
    Other,
}

/// The step in which a copy was refused or failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TransferStep {
    /// Options were checked, before anything was opened.
    Options,
    /// A list of ranges, a bitmap or an earlier manifest was read.
    Selection,
    /// The journal was read, created or removed.
    Journal,
    /// The file of the manifest was checked or written.
    Manifest,
    /// The source was opened.
    OpenSource,
    /// The target was opened, resized or emptied.
    OpenTarget,
    /// Both sides were compared by size, abilities and storage.
    CheckSides,
    /// Data was copied.
    Copy,
    /// Both sides were read again.
    Verification,
}

/// Why a copy is refused, or has failed.
#[derive(Clone, PartialEq, Eq)]
pub struct TransferError(Box<TransferErrorDetails>);

#[derive(Debug, Clone, PartialEq, Eq)]
struct TransferErrorDetails {
    kind: TransferErrorKind,
    step: TransferStep,
    side: Option<Side>,
    text: String,
    /// With the punctuation before it; or nothing.
    remedy: String,
    /// The kind and the number of the error of a device that caused this one.
    cause: Option<(Kind, Option<i32>)>,
}

impl TransferError {
    /// An error of this kind, without a remedy of its own.
    pub fn new(
        kind: TransferErrorKind,
        step: TransferStep,
        text: impl Into<String>,
    ) -> TransferError {
        let text = text.into();
        TransferError(Box::new(TransferErrorDetails {
            kind,
            step,
            side: None,
            text,
            remedy: String::new(),
            cause: None,
        }))
    }

    /// The request is invalid.
    pub fn request(text: impl Into<String>) -> TransferError {
        TransferError::new(TransferErrorKind::Request, TransferStep::Options, text)
    }

    /// Both sides, or their files, do not fit. Nothing was written.
    pub(crate) fn misfit(text: impl Into<String>) -> TransferError {
        TransferError::new(TransferErrorKind::Open, TransferStep::CheckSides, text)
    }

    /// A description of a device or layer is invalid, or a layer cannot be put over a device.
    pub(crate) fn of_description(error: &Error) -> TransferError {
        let kind = match error.kind() {
            Kind::Usage => TransferErrorKind::Request,
            Kind::Disconnected | Kind::TimedOut => TransferErrorKind::Connection,
            _ => TransferErrorKind::Other,
        };
        TransferError::new(kind, TransferStep::Options, error.located()).with_remedy(error, false)
    }

    /// A side cannot be opened, or the target cannot be resized or emptied.
    pub(crate) fn opening(side: Side, device: &str, error: &Error) -> TransferError {
        let kind = match error.kind() {
            Kind::Usage => TransferErrorKind::Request,
            Kind::TimedOut => TransferErrorKind::Connection,
            Kind::NoSpace => TransferErrorKind::Full,
            _ => TransferErrorKind::Open,
        };
        let (role, step) = match side {
            Side::Source => ("source", TransferStep::OpenSource),
            Side::Target => ("target", TransferStep::OpenTarget),
        };
        let text = opening_text(role, device, error);
        TransferError::new(kind, step, text).with_remedy(error, true).at(Some(side))
    }

    /// The engine has failed during this step.
    pub(crate) fn engine(step: TransferStep, failed: impl Into<CopyError>) -> TransferError {
        let CopyError { side, error, .. } = failed.into();
        let (kind, role) = match side {
            Some(Side::Source) => (TransferErrorKind::Source, "the source failed: "),
            Some(Side::Target) => (TransferErrorKind::Target, "the target failed: "),
            None => (TransferErrorKind::Other, ""),
        };
        let kind = match error.kind() {
            Kind::NoSpace if side == Some(Side::Target) => TransferErrorKind::Full,
            Kind::Disconnected | Kind::TimedOut | Kind::ShuttingDown => {
                TransferErrorKind::Connection
            }
            Kind::Usage if side.is_none() => TransferErrorKind::Request,
            _ => kind,
        };
        let text = format!("{role}{}", error.located());
        TransferError::new(kind, step, text).with_remedy(&error, false).at(side)
    }

    pub(crate) fn at(mut self, side: Option<Side>) -> TransferError {
        self.0.side = side;
        self
    }

    fn with_remedy(mut self, error: &Error, opening: bool) -> TransferError {
        self.0.remedy = match error.remedy() {
            Some(remedy) => format!("; {remedy}"),
            None => kind_remedy(error, opening).to_string(),
        };
        self.0.cause = Some((error.kind(), error.os_error()));
        self
    }

    /// The same error with text appended to its remedy.
    #[must_use]
    pub fn and(mut self, more: &str) -> TransferError {
        self.0.remedy += more;
        self
    }

    /// The same error with this text, which contains [that of this one](TransferError::facts).
    #[must_use]
    pub fn reworded(mut self, text: impl Into<String>) -> TransferError {
        self.0.text = text.into();
        self
    }

    /// The class of the error.
    pub fn kind(&self) -> TransferErrorKind {
        self.0.kind
    }

    /// The step in which it arose.
    pub fn step(&self) -> TransferStep {
        self.0.step
    }

    /// The kind of the error of a device that caused this one; `None`: no device has failed.
    pub fn cause(&self) -> Option<Kind> {
        self.0.cause.map(|cause| cause.0)
    }

    /// The number of the system call that failed, as in `errno`; `None`: none has failed, or that is unknown.
    pub fn os_error(&self) -> Option<i32> {
        self.0.cause?.1
    }

    /// The side that failed; `None`: neither, or that is unknown.
    pub fn side(&self) -> Option<Side> {
        self.0.side
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

/// The text of a device that cannot be opened. `role`: "source", "target", "device".
pub fn opening_text(role: &str, device: &str, error: &Error) -> String {
    let text = error.located();
    let device = &*shown(device);
    if text.contains(device) || error.kind() == Kind::Usage {
        format!("cannot open the {role}: {text}")
    } else {
        format!("cannot open the {role}: {device}: {text}")
    }
}

impl fmt::Display for TransferError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(format!("{}{}", self.0.text, self.0.remedy).trim())
    }
}

impl fmt::Debug for TransferError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} in {:?} ({self})", self.0.kind, self.0.step)
    }
}

impl std::error::Error for TransferError {}

impl From<crate::options::OptionConflict> for TransferError {
    fn from(conflict: crate::options::OptionConflict) -> TransferError {
        TransferError::request(conflict.to_string())
    }
}
