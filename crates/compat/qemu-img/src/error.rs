//! The results of commands: exit statuses of qemu-img, and errors as data.

use std::fmt;

use blockhaul_block::Error;
use blockhaul_transfer::{TransferError, kind_remedy, opening_text};

/// Result of a command, or of a part of it.
pub(crate) type Result<T, E = QemuImgError> = std::result::Result<T, E>;

/// The answer of a command that has not failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QemuImgStatus {
    /// The command is done, and has found nothing wrong.
    Success,
    /// `compare`: the disks are different.
    Different,
    /// `check`: the image is damaged.
    Damaged,
    /// `check`: the image has lost clusters, and no other fault.
    Leaks,
}

impl QemuImgStatus {
    /// The exit status of qemu-img.
    pub fn code(self) -> u8 {
        match self {
            QemuImgStatus::Success => 0,
            QemuImgStatus::Different => 1,
            QemuImgStatus::Damaged => 2,
            QemuImgStatus::Leaks => 3,
        }
    }
}

/// The class of an error, by which qemu-img chooses its exit status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QemuImgErrorKind {
    /// The command has failed in a way that is not listed below.
    Failed,
    /// `compare` cannot open an image.
    CompareOpen,
    /// `compare` cannot read the extents of a disk.
    CompareExtents,
    /// `compare` cannot read the data of a disk.
    CompareData,
    /// `check`: the format has no tables that can be checked.
    CheckUnsupported,
    /// A copy was cancelled.
    Cancelled,
}

impl QemuImgErrorKind {
    /// The exit status of qemu-img. `None` if the copy was cancelled: a signal ends qemu-img then.
    pub fn code(self) -> Option<u8> {
        match self {
            QemuImgErrorKind::Failed => Some(1),
            QemuImgErrorKind::CompareOpen => Some(2),
            QemuImgErrorKind::CompareExtents => Some(3),
            QemuImgErrorKind::CompareData => Some(4),
            QemuImgErrorKind::CheckUnsupported => Some(63),
            QemuImgErrorKind::Cancelled => None,
        }
    }
}

/// Why a command has failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QemuImgError {
    kind: QemuImgErrorKind,
    text: String,
}

impl QemuImgError {
    pub(crate) fn new(kind: QemuImgErrorKind, text: impl Into<String>) -> QemuImgError {
        QemuImgError { kind, text: text.into() }
    }

    /// An error of a device, with a remedy. `opening`: the device was being opened.
    fn of_device(text: &str, error: &Error, opening: bool) -> QemuImgError {
        let remedy = match error.remedy() {
            Some(remedy) => format!("; {remedy}"),
            None => kind_remedy(error, opening).to_string(),
        };
        failure(format!("{text}{remedy}").trim())
    }

    /// A device cannot be opened. `role`: "source", "target", "image", "device", "disk".
    pub(crate) fn opening(role: &str, name: &str, error: &Error) -> QemuImgError {
        QemuImgError::of_device(&opening_text(role, name, error), error, true)
    }

    pub(crate) fn with_kind(self, kind: QemuImgErrorKind) -> QemuImgError {
        QemuImgError { kind, ..self }
    }

    /// The class of the error.
    pub fn kind(&self) -> QemuImgErrorKind {
        self.kind
    }
}

/// An error without an exit status of its own.
pub(crate) fn failure(text: impl Into<String>) -> QemuImgError {
    QemuImgError::new(QemuImgErrorKind::Failed, text)
}

/// The message, as qemu-img prints it after its name; it may have several lines.
impl fmt::Display for QemuImgError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for QemuImgError {}

impl From<Error> for QemuImgError {
    fn from(error: Error) -> QemuImgError {
        QemuImgError::of_device(&error.located(), &error, false)
    }
}

/// The text of a command line that is not understood.
impl From<String> for QemuImgError {
    fn from(text: String) -> QemuImgError {
        failure(text)
    }
}

impl From<TransferError> for QemuImgError {
    fn from(error: TransferError) -> QemuImgError {
        failure(error.to_string())
    }
}
