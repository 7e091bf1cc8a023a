//! Segments, the units of work, and what is known of their bytes.

use crate::ledger::SegmentRange;

/// Bytes of a segment: the unit that is written by one lane (libnbd's THREAD_WORK_SIZE).
pub const SEGMENT: u64 = 128 << 20;

/// A unit of work, written by one lane. A segment longer than the usual size is all zero.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Segment {
    pub(crate) at: u64,
    /// The source reported which of it is data.
    pub(crate) extents_known: bool,
    /// An earlier run has written it, but may have lost it.
    pub(crate) check: bool,
    /// Consecutive runs from `at` on.
    pub(crate) runs: Vec<SegmentRun>,
}

impl Segment {
    /// Length in bytes.
    pub(crate) fn len(&self) -> u64 {
        self.runs.iter().map(|run| run.len).sum()
    }

    /// Start and end.
    pub(crate) fn range(&self) -> SegmentRange {
        (self.at, self.at + self.len())
    }
}

/// Bytes of a segment that take one route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SegmentRun {
    pub(crate) len: u64,
    pub(crate) what: RunContent,
}

/// What is known of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RunContent {
    /// To be read.
    Data,
    /// To be read; the target reads as zeroes there. Distinguished from `Data` on request only.
    New,
    /// Reads as zeroes.
    Zero,
    /// Reads as zeroes, and so does the target.
    Clean,
}

impl RunContent {
    /// Whether it is to be read.
    pub(crate) fn is_data(self) -> bool {
        matches!(self, RunContent::Data | RunContent::New)
    }
}
