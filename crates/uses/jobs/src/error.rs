//! Errors of exports, bitmaps, points in time and jobs of a server as data.

use std::fmt;

use blockhaul_block::{Error, Kind};
use blockhaul_control::Refusal;
use blockhaul_transfer::{TransferError, TransferErrorKind, kind_remedy, opening_text};

/// Why an export cannot be opened or changed, or a job is refused or has failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobError {
    kind: TransferErrorKind,
    text: String,
    /// The remedy with the punctuation before it; empty: none is known.
    remedy: String,
    /// The export of a server that could not be opened, if the error is about one of several.
    export: Option<String>,
}

impl JobError {
    /// An error of this kind, without a remedy of its own.
    pub fn new(kind: TransferErrorKind, text: impl Into<String>) -> JobError {
        JobError { kind, text: text.into(), remedy: String::new(), export: None }
    }

    /// The request is invalid.
    pub fn request(text: impl Into<String>) -> JobError {
        JobError::new(TransferErrorKind::Request, text)
    }

    /// A failure without a kind of its own.
    pub fn other(text: impl Into<String>) -> JobError {
        JobError::new(TransferErrorKind::Other, text)
    }

    /// The device with this description cannot be opened.
    pub fn opening(device: &str, error: &Error) -> JobError {
        let kind = match error.kind() {
            Kind::Usage => TransferErrorKind::Request,
            Kind::TimedOut => TransferErrorKind::Connection,
            Kind::NoSpace => TransferErrorKind::Full,
            _ => TransferErrorKind::Open,
        };
        JobError::new(kind, opening_text("device", device, error)).with_remedy(error, true)
    }

    fn with_remedy(self, error: &Error, opening: bool) -> JobError {
        let remedy = match error.remedy() {
            Some(remedy) => format!("; {remedy}"),
            None => kind_remedy(error, opening).to_string(),
        };
        JobError { remedy, ..self }
    }

    /// This error with text appended to its remedy.
    #[must_use]
    pub fn and(mut self, more: &str) -> JobError {
        self.remedy += more;
        self
    }

    /// This error with another text, which contains [its own](JobError::facts).
    #[must_use]
    pub fn reworded(&self, text: impl Into<String>) -> JobError {
        JobError { text: text.into(), ..self.clone() }
    }

    /// This error with the name of the export that could not be opened.
    #[must_use]
    pub fn about_export(self, name: &str) -> JobError {
        JobError { export: Some(name.to_string()), ..self }
    }

    /// The name of the export that could not be opened, if a server opened several.
    pub fn export(&self) -> Option<&str> {
        self.export.as_deref()
    }

    /// The class of the error.
    pub fn kind(&self) -> TransferErrorKind {
        self.kind
    }

    /// The failure, its device, offset and cause, without remedy.
    pub fn facts(&self) -> &str {
        self.text.trim()
    }

    /// The next step of the user, with the punctuation before it; empty: none is known.
    pub fn remedy(&self) -> &str {
        &self.remedy
    }
}

impl fmt::Display for JobError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(format!("{}{}", self.text, self.remedy).trim())
    }
}

impl std::error::Error for JobError {}

impl From<TransferError> for JobError {
    fn from(error: TransferError) -> JobError {
        JobError::new(error.kind(), error.facts()).and(error.remedy())
    }
}

impl From<Error> for JobError {
    fn from(error: Error) -> JobError {
        let kind = match error.kind() {
            Kind::Usage => TransferErrorKind::Request,
            Kind::Disconnected | Kind::TimedOut => TransferErrorKind::Connection,
            _ => TransferErrorKind::Other,
        };
        JobError::new(kind, error.located()).with_remedy(&error, false)
    }
}

impl From<JobError> for Refusal {
    fn from(error: JobError) -> Refusal {
        let text = error.to_string();
        match error.kind() {
            TransferErrorKind::Request => Refusal::usage(text),
            _ => Refusal::failed(text),
        }
    }
}
