//! The result of a copy.

use std::path::Path;

use blockhaul_block::LatencySnapshot;
use blockhaul_catalog::DeviceSpec;
use blockhaul_engine::{CopyProgress, CopySummary, VerificationResult};

use crate::journal::Journal;

/// The result of a copy that succeeded.
#[derive(Debug, Clone)]
pub struct CopyReport {
    /// How the copy ended.
    pub end: CopyEnd,
    /// One line for users.
    pub text: String,
    /// The counters of the engine.
    pub summary: CopySummary,
    /// Bytes that the verification compared; 0 without one.
    pub verified: u64,
    /// The digest with the name of the source, as b3sum and others print it, with a newline.
    pub digest: Option<String>,
    /// Warnings that were not logged.
    pub warnings: Vec<String>,
    /// The end of the text, behind the summary.
    rest: String,
}

/// How a copy ended that succeeded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CopyEnd {
    /// Everything is copied.
    Complete,
    /// Nothing was copied: an earlier run has copied everything, and discarded the source.
    CompletedEarlier,
    /// What the source can read is copied. It failed on some ranges, which are in the error map.
    Partial,
    /// The reader of the pipe has closed it, for a reason that only the reader knows.
    ReaderGone,
}

impl CopyReport {
    pub(crate) fn complete(source: &DeviceSpec, text: String, summary: CopySummary) -> CopyReport {
        let digest = summary.digest.as_ref().map(|digest| format!("{digest}  {source}\n"));
        let (verified, warnings, rest) = (0, Vec::new(), String::new());
        CopyReport { end: CopyEnd::Complete, text, summary, verified, digest, warnings, rest }
    }

    /// The reader has closed the pipe early.
    pub(crate) fn reader_gone() -> CopyReport {
        CopyReport {
            end: CopyEnd::ReaderGone,
            text: "standard output was closed before the end".to_string(),
            summary: CopySummary::default(),
            verified: 0,
            digest: None,
            warnings: Vec::new(),
            rest: String::new(),
        }
    }

    /// An earlier run has completed the copy, and discarded its source.
    pub(crate) fn of_earlier_run(journal: &Path, target: &str, summary: CopySummary) -> CopyReport {
        CopyReport {
            end: CopyEnd::CompletedEarlier,
            text: format!("nothing is copied: {}", complete_journal(journal, target)),
            summary,
            verified: 0,
            digest: None,
            warnings: Vec::new(),
            rest: String::new(),
        }
    }

    /// The copy between two devices, with its times and warnings.
    pub(crate) fn of_devices(
        source: &DeviceSpec,
        journal: Option<&Journal>,
        summary: CopySummary,
        progress: &CopyProgress,
    ) -> CopyReport {
        // The summary's own warnings were logged.
        let mut warnings = Vec::new();
        if summary.retried.is_trouble() {
            warnings.push(summary.retried.to_string());
        }
        if summary.not_discarded > 0 {
            let bytes = summary.not_discarded;
            warnings.push(format!("{bytes} bytes could not be discarded at the source"));
        }
        let mut rest = times(progress);
        if let Some(journal) = journal.filter(|_| summary.journal_stays) {
            rest += &format!("; the journal {} stays", journal.path.display());
        }
        let text = format!("{summary}{rest}");
        CopyReport { warnings, rest, ..CopyReport::complete(source, text, summary) }
    }

    /// The report of a copy that leaves out these ranges. `is_first`: they are zeroes on the target.
    pub(crate) fn with_unread(
        mut self,
        map: &Path,
        (ranges, bytes): (usize, u64),
        is_first: bool,
    ) -> CopyReport {
        if ranges == 0 {
            self.text += "; everything could be read";
            return self;
        }
        self.end = CopyEnd::Partial;
        let noun = if ranges == 1 { "range" } else { "ranges" };
        let unread = format!("{bytes} bytes in {ranges} {noun} cannot be read");
        self.text += &format!("; {unread}");
        let map = map.display();
        let there = if is_first { "zeroes" } else { "what it had before" };
        self.warnings.push(format!(
            "{unread}: they are in {map}, and the target has {there} there; run the \
             command again to read them once more"
        ));
        self
    }

    /// Adds the result of the verification.
    pub(crate) fn add_verified(&mut self, verified: &VerificationResult) {
        self.verified = verified.bytes;
        let mut more = format!("; verified {} bytes", verified.bytes);
        if let Some(digest) = &verified.digest {
            more += &format!(", digest {digest}");
        }
        self.text += &more;
        self.rest += &more;
    }

    /// The text without discards, for a source that is a point in time: these release saved contents, and the disk
    /// of the user keeps its data.
    pub fn text_without_discards(&self) -> String {
        if self.summary.discarded + self.summary.not_discarded == 0 {
            return self.text.clone();
        }
        let mut summary = self.summary.clone();
        (summary.discarded, summary.not_discarded) = (0, 0);
        format!("{summary}{}", self.rest)
    }
}

/// The meaning of a complete journal of a copy that discards its source.
pub(crate) fn complete_journal(journal: &Path, target: &str) -> String {
    let journal = journal.display();
    format!(
        "the journal {journal} shows that this copy is complete and that its source was discarded, so {target} \
         may be the only copy; for another backup, use another journal and another target; remove {journal} \
         only if the source has new contents"
    )
}

/// The mean time of requests on each side, which shows the slower one.
fn times(progress: &CopyProgress) -> String {
    let mean = |latency: LatencySnapshot| {
        let requests: u64 = latency.classes.iter().sum();
        (requests > 0).then(|| 1e3 * latency.seconds / requests as f64)
    };
    let told = ["a read", "a write"].into_iter().zip(progress.meters().latency);
    let told: Vec<_> = told
        .filter_map(|(what, latency)| Some(format!("{what} took {:.3} ms", mean(latency)?)))
        .collect();
    if told.is_empty() { String::new() } else { format!("; on average {}", told.join(", ")) }
}
