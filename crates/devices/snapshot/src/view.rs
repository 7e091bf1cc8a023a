//! The disk as it was.

use std::sync::Arc;

use blockhaul_block::{
    BASE_ALLOCATION, Can, Device, Error, Extents, Facts, HOLE, Kind, Op, Outcome, PendingRequest,
    Reply, Request, RequestFlags, Result, ZERO,
};
use blockhaul_io::{Data, Reservation};

use crate::ViewTrim;
use crate::bitmap::DirtyBitmap;
use crate::point::{BlockPlace, LiveHandle, PointState, bytes_of};

/// Runs of states in one reply about extents.
const RUNS_MAX: usize = 4096;

/// The view of a point in time.
#[derive(Clone)]
pub(crate) struct SnapshotView {
    facts: Arc<Facts>,
    point: Arc<PointState>,
    /// Shown as contexts after `base:allocation`.
    bitmaps: Arc<[Arc<DirtyBitmap>]>,
}

impl SnapshotView {
    pub(crate) fn of(
        point: &Arc<PointState>,
        bitmaps: Vec<Arc<DirtyBitmap>>,
        trim: ViewTrim,
    ) -> Option<SnapshotView> {
        let below = point.below.get()?.device.facts();
        let mut facts = Facts::over(&below);
        facts.name = format!("{} (snapshot)", below.name).into();
        facts.can = Can::EXTENTS | Can::MULTI_CONN;
        if trim == ViewTrim::Releases {
            facts.can |= Can::WRITE | Can::TRIM;
        }
        facts.emulated &= facts.can;
        facts.withheld &= facts.can;
        facts.contexts = vec![BASE_ALLOCATION.to_string()];
        facts.contexts.extend(bitmaps.iter().map(|bitmap| bitmap.context()));
        facts.allocation_unit = u32::try_from(point.block).unwrap_or(u32::MAX);
        let facts = Arc::new(facts);
        let point = point.clone();
        Some(SnapshotView { facts, point, bitmaps: bitmaps.into() })
    }

    fn below(&self) -> Result<&LiveHandle> {
        self.point.below.get().ok_or_else(Error::misfit)
    }

    async fn read(&self, at: u64, room: Reservation) -> Outcome {
        self.point.check()?;
        let below = self.below()?;
        let end = at + room.len() as u64;
        let reply = match self.point.state(at, end) {
            Some(BlockPlace::Zero) => Reply::Hole,
            Some(BlockPlace::Live) => self.read_live(below, at, end, room).await?,
            _ => {
                let mut buf = room.into_buf();
                for (from, to, state) in self.point.runs(at, end, usize::MAX) {
                    if state == BlockPlace::Live {
                        let part = &mut buf[(from - at) as usize..(to - at) as usize];
                        below.scratch.fill(&below.device, from, part).await?;
                    }
                }
                self.replace(below, at, &mut buf).await?;
                Reply::Data(buf.into())
            }
        };
        // The state of a block is set before it is overwritten, and so is this.
        self.point.check()?;
        Ok(reply)
    }

    /// Reads a range of which nothing was saved when this began.
    async fn read_live(
        &self,
        below: &LiveHandle,
        at: u64,
        end: u64,
        room: Reservation,
    ) -> Result<Reply> {
        // Bytes that stay in the kernel are pages that the next write changes.
        let reply = below.device.submit(Request::read(at, room.in_memory())).await?;
        if self.point.state(at, end) == Some(BlockPlace::Live) {
            return Ok(reply);
        }
        let mut bytes = bytes_of(reply, (end - at) as usize)?;
        self.replace(below, at, &mut bytes).await?;
        Ok(Reply::Data(Data::copy_of(&bytes)))
    }

    /// Replaces what was read of blocks that are not in the live disk any more. A block that is
    /// there now was so when it was read.
    async fn replace(&self, below: &LiveHandle, at: u64, bytes: &mut [u8]) -> Result<()> {
        let end = at + bytes.len() as u64;
        for (from, to, state) in self.point.runs(at, end, usize::MAX) {
            let part = &mut bytes[(from - at) as usize..(to - at) as usize];
            match state {
                BlockPlace::Live => {}
                BlockPlace::Zero => part.fill(0),
                BlockPlace::Saved => self.point.read_saved(&below.scratch, from, part).await?,
                BlockPlace::Released => return Err(released()),
            }
        }
        // What was released meanwhile may have been read as zeroes.
        let now = self.point.runs(at, end, usize::MAX);
        if now.iter().any(|(_, _, state)| *state == BlockPlace::Released) {
            Err(released())
        } else {
            Ok(())
        }
    }

    async fn extents(&self, at: u64, len: u64, flags: RequestFlags) -> Result<Extents> {
        self.point.check()?;
        let below = self.below()?;
        let live = match below.base {
            None => Extents::one(len, 0),
            Some(base) => {
                let asked = Request::extents(at, len, base).with(flags & RequestFlags::ONE_EXTENT);
                let Reply::Extents(lists) = below.device.submit(asked).await? else {
                    return Err(Error::misfit());
                };
                lists.into_iter().next().ok_or_else(Error::misfit)?
            }
        };
        let end = at + live.total().min(len);
        // Asked for after the extents: a block that is in the live disk still was so then.
        let states = self.point.runs(at, end, RUNS_MAX);
        let mut extents = merged(at, &live, &states);
        if flags.contains(RequestFlags::ONE_EXTENT) {
            extents.first_only();
        }
        self.point.check()?;
        Ok(extents)
    }
}

/// The extents of the live disk where it still has the contents, else what the states say.
fn merged(at: u64, live: &Extents, states: &[(u64, u64, BlockPlace)]) -> Extents {
    let mut extents = Extents::new();
    let mut runs = live.ranges(at).peekable();
    for (from, to, state) in states {
        match state {
            BlockPlace::Saved | BlockPlace::Released => extents.push(to - from, 0),
            BlockPlace::Zero => extents.push(to - from, HOLE | ZERO),
            BlockPlace::Live => {
                let mut next = *from;
                while let Some((start, run)) = runs.peek() {
                    let stop = start + run.len;
                    if stop > next {
                        let until = stop.min(*to);
                        extents.push(until - next, run.state);
                        next = until;
                    }
                    if stop > *to || next >= *to {
                        break;
                    }
                    runs.next();
                }
            }
        }
    }
    extents
}

fn released() -> Error {
    Error::new(Kind::Invalid, "this part of the snapshot was discarded by its reader")
}

impl Device for SnapshotView {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        let view = self.clone();
        let Request { op, at, len, flags } = request;
        match op {
            Op::Read(room) => PendingRequest::start(async move { view.read(at, room).await }),
            Op::Extents(contexts) => PendingRequest::start(async move {
                let mut lists = Vec::with_capacity(contexts.count());
                for context in contexts.iter() {
                    lists.push(match context.checked_sub(1) {
                        None => view.extents(at, len, flags).await?,
                        Some(index) => {
                            let bitmap = view.bitmaps.get(index).ok_or_else(Error::misfit)?;
                            bitmap.extents(at, len, flags)
                        }
                    });
                }
                Ok(Reply::Extents(lists))
            }),
            Op::Trim => PendingRequest::start(async move {
                view.point.release(at, at + len).await?;
                Ok(Reply::Done)
            }),
            Op::Flush | Op::Cache => PendingRequest::ready(Ok(Reply::Done)),
            Op::Write(_) | Op::Zero => Error::new(Kind::ReadOnly, "a snapshot is read-only").into(),
        }
    }
}
