//! `cow`: stores changes in an overlay, and never changes the device below.
//!
//! A change of part of a block that is not in the overlay first copies the rest of it there. Such
//! changes hold a lock on their blocks; a block's state is set when its data is in the overlay, so
//! reads need no lock.

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blockhaul_block::{
    BASE_ALLOCATION, Can, ContextSet, Device, Error, Extents, Facts, HOLE, Hints, Kind, Op,
    Outcome, PendingRequest, Reply, Request, RequestFlags, Result, ZERO,
};
use blockhaul_catalog::{Layer, LayerKind, ParamKind, ParamValues};
use blockhaul_io::{Buf, Data, FallocateMode, File, Reservation};

use crate::declared::{opened, param, param_or, usage};
use crate::per_disk::KeptPerDisk;
use crate::runs::Runs;
use crate::scratch::ScratchMemory;
use crate::temporary;

/// Maximum number of extents requests to the device below for one reply.
const ASKED_MAX: usize = 64;
/// Runs of blocks that a trim or zero request handles before other requests get their turn.
const RUNS_AT_ONCE: usize = 1024;
/// Bytes of zeroes written at a time.
const ZEROES: u64 = Data::ZEROES_MAX as u64;

/// The layer `cow`.
pub static COW: LayerKind = LayerKind {
    name: "cow",
    summary: "keeps changes in an overlay; the device below does not change",
    manual: "Written data goes to a temporary file without a name, in blocks of `cow-block-size`, and is \
lost when the program ends. All connections to an export see the same changes, also later ones. A \
server keeps the changes of up to 1000 exports. Do not use the layer over a plugin that gives each \
connection a disk of its own. The device below may be read-only. Zero and trim requests for \
whole blocks take no space and make holes; extents of \
unchanged ranges are those of the device below. The file is created in `dir`, or in the \
directory that TMPDIR names, or in /var/tmp; when its file system is full, writes fail \
(ENOSPC).

The list of changed blocks takes 32 to 80 bytes of memory for each run of adjacent blocks, \
whatever its length. At most every second block is a separate run: about 8 MiB for a disk of \
16 GiB in blocks of 64 KiB.",
    example: r#"
blockhaul copy sample:64M disk.raw
blockhaul serve --layer cow disk.raw --run 'blockhaul copy random:1M "$uri"'
blockhaul compare sample:64M disk.raw
"#,
    needs_content: true,
    writes_below: false,
    transparent: false,
    params: &[
        param_or(
            "cow-block-size",
            ParamKind::Size,
            "64k",
            "Block size; a power of two, 4k to 16M.",
        ),
        param("dir", ParamKind::Text, "Directory for the overlay."),
    ],
    changeable: &[],
    configure: |args| configure(args),
};

fn configure(args: &ParamValues) -> Result<Arc<dyn Layer>> {
    let block = args.size("cow-block-size").unwrap_or(64 << 10);
    if !block.is_power_of_two() || !(4096..=16 << 20).contains(&block) {
        return Err(usage("cow: cow-block-size must be a power of two from 4k to 16M"));
    }
    let dir = args.text("dir").map(String::from);
    let disks = KeptPerDisk::new(CowOverlay::has_changes);
    opened(move |below| {
        let inner = below.device.clone();
        let overlay = disks.get(&below, || {
            Ok(CowOverlay {
                file: temporary::file("cow", dir.as_deref().map(Path::new))?,
                block,
                size: inner.facts().size,
                states: Mutex::default(),
                locks: Arc::default(),
            })
        })?;
        let below = inner.facts();
        // Buffers are taken before the data arrives, writes go to a file, and flushes do nothing.
        let kept = Hints::ZEROED | Hints::IN_FLIGHT | Hints::EXTENTS;
        let mut facts = Facts::over(&below).keeping(&below, kept);
        if facts.size != overlay.size {
            let text = format!("cow: {} does not have the size of the overlay's disk", facts.name);
            return Err(usage(text));
        }
        let supplied = Can::CHANGES | Can::FLUSH | Can::MULTI_CONN;
        facts.temporary = true;
        facts.can |= supplied | Can::CACHE;
        facts.emulated -= supplied;
        facts.withheld -= supplied;
        let unit = u32::try_from(block).unwrap_or(u32::MAX);
        facts.allocation_unit = unit;
        // Partial writes copy the rest of the block to the overlay.
        facts.prefer(unit);
        facts.contexts = vec![BASE_ALLOCATION.to_string()];
        let base = inner.facts().context(BASE_ALLOCATION);
        let scratch = ScratchMemory::for_device(&inner);
        let cow = CowHandle { inner, overlay, scratch, base };
        Ok(Arc::new(CowDevice { facts: Arc::new(facts), cow: Arc::new(cow) }))
    })
}

/// Where a block's data is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum OverlayBlockState {
    /// In the device below.
    #[default]
    Below,
    /// In the overlay.
    Above,
    /// Nowhere: it reads as zeroes.
    Zero,
}

/// State shared by all handles.
struct CowOverlay {
    file: File,
    block: u64,
    size: u64,
    states: Mutex<Runs<OverlayBlockState>>,
    locks: Arc<blockhaul_io::RangeLocks>,
}

impl CowOverlay {
    fn has_changes(&self) -> bool {
        self.state(0, self.size) != Some(OverlayBlockState::Below)
    }

    fn states(&self) -> MutexGuard<'_, Runs<OverlayBlockState>> {
        self.states.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The runs of a range: offset, end, state.
    fn runs(&self, at: u64, end: u64, most: usize) -> Vec<(u64, u64, OverlayBlockState)> {
        let states = self.states();
        let runs = states.iter(at / self.block, end.div_ceil(self.block)).take(most);
        let bytes = |block: u64| block.saturating_mul(self.block);
        runs.map(|(from, to, state)| (bytes(from).max(at), bytes(to).min(end), state)).collect()
    }

    /// The state of a range, if there is only one.
    fn state(&self, at: u64, end: u64) -> Option<OverlayBlockState> {
        let last = end.div_ceil(self.block);
        let (state, to) = self.states().run(at / self.block, last);
        (to == last).then_some(state)
    }

    /// The whole blocks within a range: the first, and the one after the last. The end of the
    /// device counts as the end of a block.
    fn whole(&self, at: u64, end: u64) -> (u64, u64) {
        let last = if end == self.size { end.div_ceil(self.block) } else { end / self.block };
        let first = at.div_ceil(self.block);
        (first, last.max(first))
    }

    async fn write(&self, at: u64, data: Data) -> Result<()> {
        let written = self.file.write_all_at(data, at).await;
        written.map_err(|error| Error::system("cannot write to the overlay", error))
    }

    async fn read(&self, at: u64, buf: Buf) -> Result<Buf> {
        let (result, buf) = self.file.read_exact_at(buf, at).await;
        match result {
            Ok(()) => Ok(buf),
            Err(error) => Err(Error::system("cannot read the overlay", error)),
        }
    }
}

struct CowDevice {
    facts: Arc<Facts>,
    cow: Arc<CowHandle>,
}

/// One handle.
struct CowHandle {
    inner: Arc<dyn Device>,
    overlay: Arc<CowOverlay>,
    scratch: ScratchMemory,
    /// `base:allocation` of the device below.
    base: Option<ContextSet>,
}

impl Device for CowDevice {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        let cow = self.cow.clone();
        let Request { op, at, len, flags } = request;
        match op {
            // The overlay does not outlive the program.
            Op::Flush => PendingRequest::ready(Ok(Reply::Done)),
            Op::Cache if cow.inner.facts().can.contains(Can::CACHE) => {
                cow.inner.submit(Request::cache(at, len))
            }
            Op::Cache => PendingRequest::ready(Ok(Reply::Done)),
            Op::Read(room) => match cow.overlay.state(at, at + len) {
                Some(OverlayBlockState::Below) => cow.inner.submit(Request::read(at, room)),
                Some(OverlayBlockState::Zero) => PendingRequest::ready(Ok(Reply::Hole)),
                Some(OverlayBlockState::Above) => PendingRequest::start(async move {
                    let buf = cow.overlay.read(at, room.into_buf()).await?;
                    Ok(Reply::Data(buf.into()))
                }),
                None => PendingRequest::start(async move { cow.read(at, room).await }),
            },
            Op::Write(data) => PendingRequest::start(async move { cow.write(at, data).await }),
            Op::Zero if flags.contains(RequestFlags::NO_HOLE | RequestFlags::FAST) => {
                let text = "zeroing allocated space is not faster than writing";
                Error::new(Kind::Unsupported, text).into()
            }
            Op::Zero => {
                let keep = flags.contains(RequestFlags::NO_HOLE);
                PendingRequest::start(async move { cow.zero(at, len, keep).await })
            }
            // As in nbdkit's filter, parts of blocks at either end read as zeroes, too.
            Op::Trim => PendingRequest::start(async move { cow.zero(at, len, false).await }),
            Op::Extents(contexts) => PendingRequest::start(async move {
                let one = flags.contains(RequestFlags::ONE_EXTENT);
                let extents = cow.extents(at, at + len, one).await?;
                Ok(Reply::Extents(contexts.iter().map(|_| extents.clone()).collect()))
            }),
        }
    }
}

impl CowHandle {
    /// Reads a range with several states.
    async fn read(&self, at: u64, room: Reservation) -> Outcome {
        let mut buf = room.into_buf();
        let runs = self.overlay.runs(at, at + buf.len() as u64, usize::MAX);
        for (from, to, state) in runs {
            let part = &mut buf[(from - at) as usize..(to - at) as usize];
            match state {
                OverlayBlockState::Zero => part.fill(0),
                OverlayBlockState::Below => drop(self.scratch.fill(&self.inner, from, part).await?),
                OverlayBlockState::Above => {
                    let mut next = from;
                    for part in part.chunks_mut(self.scratch.piece() as usize) {
                        let room = self.scratch.room(part.len() as u64).await?;
                        part.copy_from_slice(&self.overlay.read(next, room.into_buf()).await?);
                        next += part.len() as u64;
                    }
                }
            }
        }
        Ok(Reply::Data(buf.into()))
    }

    async fn write(&self, at: u64, data: Data) -> Outcome {
        let overlay = &self.overlay;
        let len = data.len() as u64;
        let block = overlay.block;
        let end = at + len;
        if overlay.state(at, end) == Some(OverlayBlockState::Above) {
            overlay.write(at, data).await?;
            return Ok(Reply::Done);
        }
        let first = at / block;
        let last = end.div_ceil(block);
        let _lock = overlay.locks.lock(first, last).await;
        let (whole, behind) = overlay.whole(at, end);
        // Blocks that are only partly written: at both ends, or one.
        let mut parts = Vec::new();
        if first < whole {
            parts.push(first);
        }
        if behind < last && !parts.contains(&(last - 1)) {
            parts.push(last - 1);
        }
        for part in parts {
            self.bring(part).await?;
        }
        overlay.write(at, data).await?;
        overlay.states().set(first, last, OverlayBlockState::Above);
        Ok(Reply::Done)
    }

    /// Copies a block to the overlay; it is locked, and the caller sets its state.
    async fn bring(&self, block: u64) -> Result<()> {
        let overlay = &self.overlay;
        let state = overlay.states().get(block);
        let at = block * overlay.block;
        let len = overlay.block.min(overlay.size - at);
        match state {
            OverlayBlockState::Above => Ok(()),
            OverlayBlockState::Zero => self.write_zeroes(at, len).await,
            OverlayBlockState::Below => {
                let mut done = 0;
                while done < len {
                    let now = self.scratch.piece().min(len - done);
                    match self.scratch.read(&self.inner, at + done, now).await? {
                        Some(data) => overlay.write(at + done, data).await?,
                        None => self.write_zeroes(at + done, now).await?,
                    }
                    done += now;
                }
                Ok(())
            }
        }
    }

    async fn write_zeroes(&self, at: u64, len: u64) -> Result<()> {
        let mut done = 0;
        while done < len {
            let now = ZEROES.min(len - done);
            self.overlay.write(at + done, Data::zeroes(now as usize)).await?;
            done += now;
        }
        Ok(())
    }

    async fn zero(&self, at: u64, len: u64, keep: bool) -> Outcome {
        let overlay = &self.overlay;
        let end = at + len;
        let (whole, behind) = if keep {
            // As if it were written.
            (at.div_ceil(overlay.block), at.div_ceil(overlay.block))
        } else {
            overlay.whole(at, end)
        };
        let start = whole * overlay.block;
        let stop = (behind * overlay.block).min(end);
        if whole >= behind {
            let mut from = at;
            while from < end {
                let now = ZEROES.min(end - from);
                self.write(from, Data::zeroes(now as usize)).await?;
                from += now;
            }
            return Ok(Reply::Done);
        }
        for (from, to) in [(at, start.min(end)), (stop.max(at), end)] {
            let mut from = from;
            while from < to {
                let now = ZEROES.min(to - from);
                self.zero_part(from, now).await?;
                from += now;
            }
        }
        self.discard(start, stop - start).await
    }

    /// Zeroes part of a block, unless it already reads as zeroes.
    async fn zero_part(&self, at: u64, len: u64) -> Result<()> {
        if self.overlay.states().get(at / self.overlay.block) != OverlayBlockState::Zero {
            self.write(at, Data::zeroes(len as usize)).await?;
        }
        Ok(())
    }

    /// Makes the whole blocks of a range holes; does not change the rest.
    async fn discard(&self, at: u64, len: u64) -> Outcome {
        let overlay = &self.overlay;
        let (first, last) = overlay.whole(at, at + len);
        if first >= last {
            return Ok(Reply::Done);
        }
        let _lock = overlay.locks.lock(first, last).await;
        let end = (last * overlay.block).min(overlay.size);
        let mut next = first * overlay.block;
        while next < end {
            let runs = overlay.runs(next, end, RUNS_AT_ONCE);
            let Some(&(_, to, _)) = runs.last() else { break };
            overlay.states().set(
                next / overlay.block,
                to.div_ceil(overlay.block),
                OverlayBlockState::Zero,
            );
            for (from, to, state) in runs {
                if state == OverlayBlockState::Above {
                    // Frees space if the file system can; reads depend on the state.
                    let _ = overlay.file.allocate(FallocateMode::PunchHole, from, to - from).await;
                }
            }
            next = to;
            if next < end {
                blockhaul_io::yield_now().await;
            }
        }
        Ok(Reply::Done)
    }

    async fn extents(&self, at: u64, end: u64, one: bool) -> Result<Extents> {
        let mut extents = Extents::new();
        let most = if one { 1 } else { ASKED_MAX };
        for (from, to, state) in self.overlay.runs(at, end, most) {
            match (state, self.base) {
                (OverlayBlockState::Above, _) | (OverlayBlockState::Below, None) => {
                    extents.push(to - from, 0)
                }
                (OverlayBlockState::Zero, _) => extents.push(to - from, HOLE | ZERO),
                (OverlayBlockState::Below, Some(base)) => {
                    let asked = Request::extents(from, to - from, base);
                    let asked = if one { asked.with(RequestFlags::ONE_EXTENT) } else { asked };
                    let Reply::Extents(lists) = self.inner.submit(asked).await? else {
                        return Err(Error::misfit());
                    };
                    let list = lists.first().ok_or_else(Error::misfit)?;
                    list.runs().iter().for_each(|run| extents.push(run.len, run.state));
                    if list.total() < to - from {
                        break;
                    }
                }
            }
        }
        if one {
            extents.first_only();
        }
        Ok(extents)
    }
}
