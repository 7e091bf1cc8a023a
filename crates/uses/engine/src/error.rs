//! Errors of a copy: what failed, and on which side.

use std::fmt;

use blockhaul_block::{Error, Kind};

use crate::side::Side;

/// Result of an operation on two devices.
pub(crate) type Result<T, E = CopyError> = std::result::Result<T, E>;

/// An error of a copy or of another operation on a source and a target.
#[derive(Debug, Clone)]
pub struct CopyError {
    /// The side that failed; `None`: neither, or that is unknown.
    pub side: Option<Side>,
    /// What failed.
    pub error: Error,
}

impl CopyError {
    /// An error of the source.
    pub fn at_source(error: Error) -> CopyError {
        CopyError { side: Some(Side::Source), error }
    }

    /// An error of the target.
    pub fn at_target(error: Error) -> CopyError {
        CopyError { side: Some(Side::Target), error }
    }

    /// What the caller can do about it.
    pub fn kind(&self) -> Kind {
        self.error.kind()
    }
}

impl fmt::Display for CopyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl std::error::Error for CopyError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        std::error::Error::source(&self.error)
    }
}

impl From<Error> for CopyError {
    fn from(error: Error) -> CopyError {
        CopyError { side: None, error }
    }
}

impl From<CopyError> for Error {
    fn from(error: CopyError) -> Error {
        error.error
    }
}
