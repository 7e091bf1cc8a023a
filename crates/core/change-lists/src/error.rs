//! Why a list cannot be used.

use std::fmt;

use blockhaul_io::plain;

/// Why a list of changes cannot be used, and what to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChangeListError {
    kind: ChangeListErrorKind,
    line: Option<usize>,
    text: String,
}

/// Kinds of [`ChangeListError`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChangeListErrorKind {
    /// Reading failed.
    Unreadable,
    /// Not a whole list of a known kind.
    Malformed,
    /// A list of another disk.
    OtherDisk,
    /// A list of a part of the disk.
    Incomplete,
    /// More bytes or ranges than are read.
    TooLong,
}

impl ChangeListError {
    /// The kind.
    pub fn kind(&self) -> ChangeListErrorKind {
        self.kind
    }

    /// The line at which a malformed list was noticed, from 1 on.
    pub fn line(&self) -> Option<usize> {
        self.line
    }

    /// The same error, noticed at this line.
    pub(crate) fn at(mut self, line: usize) -> ChangeListError {
        self.line.get_or_insert(line);
        self
    }

    fn new(kind: ChangeListErrorKind, text: String) -> ChangeListError {
        ChangeListError { kind, line: None, text }
    }

    pub(crate) fn malformed(text: impl Into<String>) -> ChangeListError {
        ChangeListError::new(ChangeListErrorKind::Malformed, text.into())
    }

    pub(crate) fn other_disk(text: String) -> ChangeListError {
        ChangeListError::new(ChangeListErrorKind::OtherDisk, text)
    }

    pub(crate) fn incomplete(text: String) -> ChangeListError {
        ChangeListError::new(ChangeListErrorKind::Incomplete, text)
    }

    pub(crate) fn too_long(text: String) -> ChangeListError {
        ChangeListError::new(ChangeListErrorKind::TooLong, text)
    }

    pub(crate) fn unreadable(error: &std::io::Error) -> ChangeListError {
        ChangeListError::new(ChangeListErrorKind::Unreadable, plain(error))
    }

    pub(crate) fn empty() -> ChangeListError {
        ChangeListError::malformed(
            "the list is empty: did the program fail? If nothing has changed, write []",
        )
    }
}

impl fmt::Display for ChangeListError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(line) = self.line {
            write!(f, "line {line}: ")?;
        }
        f.write_str(&self.text)
    }
}

impl std::error::Error for ChangeListError {}
