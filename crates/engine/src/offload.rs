//! Ranges between two files that the kernel copies by itself: shared where the file system can
//! (reflink), copied by the file system's server where there is one (copy_file_range).
//!
//! Both ends lend their file for a range (`Device::file_at`). What is refused, for whatever reason, is
//! read and written as usual: an error that matters is met again there, and told.

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use block::{Access, Device, FileRange};

use crate::copy::Job;
use crate::lane::Lane;
use crate::ledger::Range;
use crate::plan::Run;
use crate::route;

/// Bytes that are copied by one call of copy_file_range: a limit on the rate is kept in such steps.
const STEP: u64 = 16 << 20;

/// What files have not refused yet, for all lanes of a copy.
pub(crate) struct Offload {
    reflink: AtomicBool,
    copy_range: AtomicBool,
    /// Also where no server offloads it.
    always: bool,
}

/// Whether the kernel may copy by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ByKernel {
    /// Where it is cheaper than reading and writing: reflink, and copy_file_range between files of a
    /// network's file system.
    #[default]
    Auto,
    /// Never.
    Never,
    /// No reflink, but copy_file_range between any two files. For tests.
    CopyRange,
}

impl Offload {
    pub(crate) fn new(by_kernel: ByKernel) -> Offload {
        Offload {
            reflink: AtomicBool::new(by_kernel == ByKernel::Auto),
            copy_range: AtomicBool::new(by_kernel != ByKernel::Never),
            always: by_kernel == ByKernel::CopyRange,
        }
    }

    fn left(&self) -> bool {
        self.reflink.load(Ordering::Relaxed) || self.copy_range.load(Ordering::Relaxed)
    }
}

/// Part of both files.
struct Piece {
    at: u64,
    from: FileRange,
    to: FileRange,
}

impl Lane {
    /// Has the kernel copy what it can of the data of a segment at `home`; gives the ranges that are
    /// done, in order.
    pub(crate) async fn offload(self: &Rc<Self>, home: u64, runs: &[Run]) -> Vec<Range> {
        let settled = &self.job.settled;
        // Shared space is not allocated for the target alone, and whoever asks to look, or for a
        // digest, wants the bytes.
        let looks = (settled.sparse != 0 && !settled.sampled) || self.job.fold.is_some();
        if !self.job.offload.left() || settled.allocated || looks {
            return Vec::new();
        }
        let pieces = self.pieces(home, runs);
        if pieces.is_empty() {
            return Vec::new();
        }
        self.note_connection();
        self.wrote.set(true);
        self.ledger.borrow_mut().wrote(home);
        let (job, rest) = (self.job.clone(), pieces);
        let Ok((mut done, rest)) = io::offload(move || reflink_all(&job, rest)).await else {
            return Vec::new();
        };
        self.copy_ranges(rest, &mut done).await;
        done.sort_unstable();
        done
    }

    /// What both ends lend of the data of a segment, in whole blocks.
    fn pieces(&self, home: u64, runs: &[Run]) -> Vec<Piece> {
        let (source, target) = (self.source.device(), self.target.device());
        let (from, to) = (source.facts(), target.facts());
        let unit = u64::from(from.allocation_unit.max(to.allocation_unit)).max(1);
        let mut pieces = Vec::new();
        let mut at = home;
        for run in runs {
            let end = at + run.len;
            // The last block of a file may be a part.
            let whole = if end == from.size { end } else { end - end % unit };
            let start = at.next_multiple_of(unit);
            if run.what.is_data() && start < whole {
                lent(&source, &target, start, whole - start, &mut pieces);
            }
            at = end;
        }
        pieces
    }

    /// Copies by copy_file_range where that pays.
    async fn copy_ranges(&self, pieces: Vec<Piece>, done: &mut Vec<Range>) {
        let offload = &self.job.offload;
        for piece in pieces {
            let remote = || piece.from.file.is_remote() && piece.to.file.is_remote();
            if !offload.copy_range.load(Ordering::Relaxed) || !(offload.always || remote()) {
                return;
            }
            let mut copied = 0;
            while copied < piece.to.len {
                let len = STEP.min(piece.to.len - copied);
                self.job.settled.pace(len, || self.job.stopped()).await;
                if self.job.stopped() {
                    return;
                }
                let (from, to) = (piece.from.clone(), piece.to.clone());
                let step = io::offload(move || {
                    to.file.copy_range_now(to.at + copied, &from.file, from.at + copied, len)
                });
                match step.await {
                    Ok(Ok(bytes)) if bytes == len => {
                        copied += len;
                        self.job.count_moved(&self.job.progress.counters.copy_file_range, len);
                    }
                    refused => {
                        log::debug!("copy_file_range is not used any more: {refused:?}");
                        offload.copy_range.store(false, Ordering::Relaxed);
                        break;
                    }
                }
            }
            if copied > 0 {
                done.push((piece.at, piece.at + copied));
            }
        }
    }
}

impl Job {
    fn count_moved(&self, counter: &std::sync::atomic::AtomicU64, bytes: u64) {
        self.progress.add_data(bytes);
        route::add(counter, bytes);
    }
}

/// Collects what both devices lend of a range.
fn lent(
    source: &Arc<dyn Device>,
    target: &Arc<dyn Device>,
    mut at: u64,
    mut len: u64,
    pieces: &mut Vec<Piece>,
) {
    while len > 0 {
        let Some(mut from) = source.file_at(at, len, Access::Read) else { return };
        let Some(mut to) = target.file_at(at, len, Access::Write) else { return };
        let both = from.len.min(to.len).min(len);
        if both == 0 {
            return;
        }
        (from.len, to.len) = (both, both);
        pieces.push(Piece { at, from, to });
        at += both;
        len -= both;
    }
}

/// Shares what can be shared; gives what was, and what is left. Blocks.
fn reflink_all(job: &Job, pieces: Vec<Piece>) -> (Vec<Range>, Vec<Piece>) {
    let (mut done, mut rest) = (Vec::new(), Vec::new());
    for piece in pieces {
        if !job.offload.reflink.load(Ordering::Relaxed) || job.stopped() {
            rest.push(piece);
            continue;
        }
        let (from, to) = (&piece.from, &piece.to);
        match to.file.reflink_now(to.at, &from.file, from.at, to.len) {
            Ok(()) => {
                job.count_moved(&job.progress.counters.reflink, to.len);
                done.push((piece.at, piece.at + to.len));
            }
            Err(error) => {
                log::debug!("reflink is not used any more: {error}");
                job.offload.reflink.store(false, Ordering::Relaxed);
                rest.push(piece);
            }
        }
    }
    (done, rest)
}
