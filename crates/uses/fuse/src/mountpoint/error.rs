//! Why something cannot be mounted or unmounted.

use std::fmt;

/// Why something cannot be mounted or unmounted, with a remedy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Error(pub(super) String);

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Error {}
