//! Why something cannot be mounted or unmounted.

use std::fmt;

/// Why something cannot be mounted or unmounted, with a remedy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountError(pub(super) String);

impl fmt::Display for MountError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for MountError {}
