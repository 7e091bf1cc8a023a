//! What can go wrong before or around the runs themselves; a run that fails is a result, no error.

use std::fmt;
use std::path::Path;

/// What was tried, on what, and what to do next: one line for people.
#[derive(Debug)]
pub struct MeasureError {
    text: String,
    status: u8,
}

/// What functions of this crate return.
pub type Result<T> = std::result::Result<T, MeasureError>;

impl MeasureError {
    /// A failure while working: exit status 1.
    pub fn new(text: impl Into<String>) -> MeasureError {
        MeasureError { text: text.into(), status: 1 }
    }

    /// The scenario or the command line cannot be used as it is: exit status 2.
    pub fn usage(text: impl Into<String>) -> MeasureError {
        MeasureError { text: text.into(), status: 2 }
    }

    /// A device cannot be opened: exit status 3.
    pub fn opening(text: impl Into<String>) -> MeasureError {
        MeasureError { text: text.into(), status: 3 }
    }

    /// The same error as one of usage: exit status 2.
    #[must_use]
    pub fn of_usage(self) -> MeasureError {
        MeasureError { status: 2, ..self }
    }

    /// A system call on a file failed. `tried` is an infinitive: `write`.
    pub fn file(tried: &str, path: &Path, cause: impl fmt::Display) -> MeasureError {
        let cause = blockhaul_io::plain(&cause);
        MeasureError::new(format!("cannot {tried} {}: {cause}", path.display()))
    }

    /// The exit status of a program that ends with this error.
    pub fn status(&self) -> u8 {
        self.status
    }
}

impl fmt::Display for MeasureError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for MeasureError {}
