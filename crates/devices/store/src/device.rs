//! The device of a point.

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;

use blockhaul_block::{
    BASE_ALLOCATION, Can, ContextSet, Device, Error, Extents, Facts, FileId, FileRange, Kind,
    LeaseAccess, Op, Outcome, PendingRequest, Reply, Request, RequestFlags, Result,
};
use blockhaul_io::{Pool, Reservation};

use crate::overlay::Overlay;

/// Longest piece of a read that crosses from one file to another, and how many are read at a time.
const PIECE: usize = 256 << 10;
const PIECES: u64 = 8;
/// Number of runs that is enough for one reply.
const RUNS_MAX: usize = 64 << 10;

/// Name and size, where each byte is, the files of the point, all files of the store, and the lock that keeps them.
pub(crate) type PointFiles = ((String, u64), Overlay, Vec<PathBuf>, Vec<FileId>, Option<File>);

/// A disk at a point in time.
pub(crate) struct PointDevice {
    facts: Arc<Facts>,
    shared: Arc<PointData>,
    /// As long as it is open, the point is not removed.
    _lock: Option<File>,
}

struct PointData {
    /// The full backup, then the increments.
    levels: Vec<(Arc<dyn Device>, ContextSet)>,
    overlay: Overlay,
    pool: Pool,
}

impl PointDevice {
    pub(crate) fn new(
        (name, size): (String, u64),
        levels: Vec<Arc<dyn Device>>,
        overlay: Overlay,
        files: Vec<FileId>,
        lock: Option<File>,
    ) -> Result<PointDevice> {
        let mut facts = Facts::new(name, size);
        facts.can = Can::all() - Can::CHANGES - Can::FLUSH;
        facts.contexts = vec![BASE_ALLOCATION.to_string()];
        let mut with_contexts = Vec::with_capacity(levels.len());
        for level in levels {
            let below = level.facts();
            if below.size != size {
                let text = format!("{} has just changed its size", below.name);
                return Err(Error::new(Kind::Invalid, text));
            }
            facts.can &= below.can;
            facts.emulated |= below.emulated;
            facts.block.maximum = facts.block.maximum.min(below.block.maximum);
            facts.block.minimum = facts.block.minimum.max(below.block.minimum);
            facts.rotational |= below.rotational;
            facts.one_handle |= below.one_handle;
            facts.files.extend_from_slice(&below.files);
            facts.allocation_unit = facts.allocation_unit.min(below.allocation_unit);
            let base = below.context(BASE_ALLOCATION).unwrap_or_else(ContextSet::first);
            with_contexts.push((level, base));
        }
        facts.emulated &= facts.can;
        // A target among the files of other points would destroy these.
        facts.files.extend(files);
        let pool = Pool::new(Pool::cost(PIECE) * PIECES);
        let shared = Arc::new(PointData { levels: with_contexts, overlay, pool });
        Ok(PointDevice { facts: Arc::new(facts), shared, _lock: lock })
    }
}

impl Device for PointDevice {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        let shared = self.shared.clone();
        let Request { op, at, len, flags } = request;
        let Some(end) = at.checked_add(len) else {
            return Error::new(Kind::Invalid, "beyond the end").into();
        };
        let Some((level, _, to)) = shared.overlay.within(at, end).next() else {
            return Error::new(Kind::Invalid, "beyond the end").into();
        };
        let inside = to - at;
        let (device, base) = &shared.levels[level];
        match op {
            Op::Extents(_) if len <= inside || flags.contains(RequestFlags::ONE_EXTENT) => {
                device.submit(Request::extents(at, len.min(inside), *base).with(flags))
            }
            Op::Extents(_) => PendingRequest::start(async move { shared.extents(at, end).await }),
            op @ (Op::Read(_) | Op::Cache) if len <= inside => {
                device.submit(Request { op, at, len, flags })
            }
            Op::Read(room) => PendingRequest::start(async move { shared.read(at, room).await }),
            Op::Cache => PendingRequest::start(async move {
                for (level, from, to) in shared.overlay.within(at, end) {
                    shared.levels[level].0.submit(Request::cache(from, to - from)).await?;
                }
                Ok(Reply::Done)
            }),
            Op::Write(_) | Op::Zero | Op::Trim | Op::Flush => {
                Error::new(Kind::ReadOnly, "a point of a backup is read-only").into()
            }
        }
    }

    fn file_at(&self, at: u64, len: u64, access: LeaseAccess) -> Option<FileRange> {
        if access == LeaseAccess::Write {
            return None;
        }
        let (level, from, to) = self.shared.overlay.within(at, at.checked_add(len)?).next()?;
        self.shared.levels[level].0.file_at(from, to - from, access)
    }
}

impl PointData {
    /// Extents of several files in one list; ends early where a file's list is short.
    async fn extents(&self, at: u64, end: u64) -> Outcome {
        let mut all = Extents::new();
        for (level, from, to) in self.overlay.within(at, end) {
            let (device, base) = &self.levels[level];
            let lists = match device.submit(Request::extents(from, to - from, *base)).await {
                Ok(Reply::Extents(lists)) => lists,
                // Return what is known; the error recurs when the rest is requested.
                Err(_) if !all.is_empty() => break,
                other => return other,
            };
            for run in lists.first().into_iter().flat_map(Extents::runs) {
                all.push(run.len.min(to - at - all.total()), run.state);
            }
            if at + all.total() < to || all.len() >= RUNS_MAX {
                break;
            }
        }
        Ok(Reply::Extents(vec![all]))
    }

    async fn read(&self, at: u64, room: Reservation) -> Outcome {
        let mut buf = room.into_buf();
        let end = at + buf.len() as u64;
        let mut found_data = false;
        let mut rest = &mut buf[..];
        for (level, from, to) in self.overlay.within(at, end) {
            let mut next = from;
            let device = &self.levels[level].0;
            while next < to {
                let len = usize::try_from(to - next).map_or(PIECE, |left| left.min(PIECE));
                let (piece, others) = rest.split_at_mut(len.min(rest.len()));
                rest = others;
                let room = self.pool.reserve(piece.len()).await.map_err(|error| {
                    Error::new(Kind::NoMemory, "no scratch memory").because(error)
                })?;
                match device.submit(Request::read(next, room)).await? {
                    Reply::Data(found) if found.len() == piece.len() => {
                        let loaded = found.load();
                        loaded.map_err(|error| Error::system("cannot read the backup", error))?;
                        piece.copy_from_slice(found.bytes());
                        found_data = true;
                    }
                    Reply::Hole => piece.fill(0),
                    _ => return Err(Error::misfit()),
                }
                next += piece.len() as u64;
            }
        }
        Ok(if found_data { Reply::Data(buf.into()) } else { Reply::Hole })
    }
}
