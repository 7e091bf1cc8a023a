//! Finds the holes of a file with SEEK_DATA and SEEK_HOLE.
//!
//! lseek(2) moves the descriptor's position, which nothing else here uses (all reads and writes
//! have explicit offsets), and returns the result: so calls from several workers on one descriptor
//! need no lock.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use blockhaul_block::{Error, Extents, HOLE, PendingRequest, Reply, RequestFlags, Result, ZERO};
use rustix::fs::{SeekFrom, fstat, seek};
use rustix::io::Errno;

use super::limits::FileSystemSpeed;
use super::storage::FileState;

/// Maximum number of hole/data pairs searched on the worker: about a microsecond each, unless a run is long.
const STEPS_INLINE: usize = 64;
/// Maximum number of pairs in one reply; the caller requests the rest again.
const STEPS_MAX: usize = 4096;

/// Answers a request for extents with `lists` equal lists.
pub(super) fn answer(
    inner: &Arc<FileState>,
    at: u64,
    len: u64,
    lists: usize,
    flags: RequestFlags,
) -> PendingRequest {
    let one = flags.contains(RequestFlags::ONE_EXTENT);
    let end = at.saturating_add(len);
    let reply = move |mut extents: Extents| {
        if one {
            extents.first_only();
        }
        Ok(Reply::Extents(vec![extents; lists]))
    };
    if !inner.seeks.load(Ordering::Relaxed) {
        return PendingRequest::ready(reply(Extents::one(len, 0)));
    }
    let mut found = Extents::new();
    let is_near = inner.storage.nearness != FileSystemSpeed::Unknown && !inner.known_data.is_slow();
    if is_near || inner.known_data.end(at).is_some_and(|known| known >= end) {
        match inner.scan(at, end, if one { 1 } else { STEPS_INLINE }) {
            Ok(extents) if one || extents.total() == len => {
                return PendingRequest::ready(reply(extents));
            }
            Ok(extents) => found = extents,
            Err(error) => return error.into(),
        }
    }
    // Many runs, a long one, or a file system that may block.
    let inner = inner.clone();
    let steps = if one { 1 } else { STEPS_MAX };
    let scan = blockhaul_io::offload(move || {
        inner.scan(at + found.total(), end, steps).map(|e| (found, e))
    });
    PendingRequest::start(async move {
        let (mut found, rest) = scan.await.map_err(|lost| {
            Error::new(blockhaul_block::Kind::Io, "querying extents was cancelled").because(lost)
        })??;
        rest.runs().iter().for_each(|run| found.push(run.len, run.state));
        reply(found)
    })
}

impl FileState {
    /// The runs from `at` up to at most `end`, at least one.
    fn scan(&self, at: u64, end: u64, steps: usize) -> Result<Extents> {
        match self.scan_holes(at, end, steps) {
            Ok(extents) if !extents.is_empty() => Ok(extents),
            // Another program punched holes meanwhile.
            Ok(_) => Ok(Extents::one(end - at, 0)),
            Err(Errno::INVAL | Errno::OPNOTSUPP | Errno::NOSYS) => {
                self.seeks.store(false, Ordering::Relaxed);
                Ok(Extents::one(end - at, 0))
            }
            Err(errno) => Err(Error::system("cannot query its extents", errno.into())),
        }
    }

    fn scan_holes(&self, at: u64, end: u64, steps: usize) -> rustix::io::Result<Extents> {
        let file = &self.storage.file;
        let mut extents = Extents::new();
        let mut next = at;
        for _ in 0..steps {
            if next >= end {
                break;
            }
            if let Some(known) = self.known_data.end(next) {
                let known = known.min(end);
                extents.push(known - next, 0);
                next = known;
                continue;
            }
            let data = match seek(file, SeekFrom::Data(next)) {
                Ok(data) => data.clamp(next, end),
                Err(Errno::NXIO) => {
                    // No data up to the end of the file, nor beyond it if it grows. If the file has become shorter, the
                    // missing part is not a hole: it is reported as data, and reading it fails as
                    // it should.
                    let size = u64::try_from(fstat(file)?.st_size).unwrap_or(0);
                    let hole = if self.storage.grows { end } else { size.clamp(next, end) };
                    extents.push(hole - next, HOLE | ZERO);
                    extents.push(end - hole, 0);
                    return Ok(extents);
                }
                Err(errno) => return Err(errno),
            };
            extents.push(data - next, HOLE | ZERO);
            next = data;
            if data < end {
                let search = self.known_data.search();
                let hole = match seek(file, SeekFrom::Hole(data)) {
                    // The file was truncated here since the last call; the next step detects it.
                    Err(Errno::NXIO) => data,
                    hole => hole?,
                };
                self.known_data.found(&search, data..hole);
                let hole = hole.clamp(data, end);
                extents.push(hole - data, 0);
                next = hole;
            }
        }
        Ok(extents)
    }
}
