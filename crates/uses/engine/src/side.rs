//! The two sides of a copy.

/// A side of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// What is read.
    Source,
    /// What is written, or compared with the source.
    Target,
}

impl Side {
    /// The other one.
    pub(crate) fn other(self) -> Side {
        match self {
            Side::Source => Side::Target,
            Side::Target => Side::Source,
        }
    }
}
