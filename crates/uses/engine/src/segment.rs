//! The pieces of the work, and what is known of their bytes.

use crate::ledger::Range;

/// A piece of the work, written by one lane. One that is longer than segments usually are is all
/// zero.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Segment {
    pub(crate) at: u64,
    /// The source has told which of it is data.
    pub(crate) extents_known: bool,
    /// An earlier run has written it, but it is not sure to have lasted.
    pub(crate) check: bool,
    /// Runs that follow each other from `at` on.
    pub(crate) runs: Vec<Run>,
}

impl Segment {
    /// Length in bytes.
    pub(crate) fn len(&self) -> u64 {
        self.runs.iter().map(|run| run.len).sum()
    }

    /// Where it starts and ends.
    pub(crate) fn range(&self) -> Range {
        (self.at, self.at + self.len())
    }
}

/// Bytes of a segment that go one way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) len: u64,
    pub(crate) what: What,
}

/// What is known of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum What {
    /// To be read.
    Data,
    /// To be read, where the target reads as zeroes; told apart on request only.
    New,
    /// Reads as zeroes.
    Zero,
    /// Reads as zeroes, and so does the target already.
    Clean,
}

impl What {
    /// Whether it is to be read.
    pub(crate) fn is_data(self) -> bool {
        matches!(self, What::Data | What::New)
    }
}
