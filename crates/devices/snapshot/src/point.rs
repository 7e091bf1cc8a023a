//! What of a point in time is where, and how old contents are saved.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use blockhaul_block::{
    BASE_ALLOCATION, ContextSet, Device, Error, Kind, Reply, Request, Result, ZERO,
};
use blockhaul_io::{Data, FallocateMode, File, RangeLocks, is_zero};
use blockhaul_layers::support::{Runs, ScratchMemory, temporary_file};
use rustix::fs::ftruncate;

use crate::{OnFailure, PointOptions, SnapshotStats};

/// Blocks that are locked and saved at a time.
const PORTION: u64 = 256;
/// Runs from this many bytes on are asked for their extents first: a guest that discards a large
/// range must not wait until its holes are read.
const ASK_FROM: u64 = 1 << 20;

/// Where the contents of a block at the point in time are. A block leaves `Live` once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum BlockPlace {
    /// In the live disk, which nobody has written there since.
    #[default]
    Live,
    /// In the file of saved contents.
    Saved,
    /// Nowhere: they were zeroes.
    Zero,
    /// Nowhere: the reader does not need them any more.
    Released,
}

/// A handle of the live disk, below the layer.
pub(crate) struct LiveHandle {
    pub(crate) device: Arc<dyn Device>,
    pub(crate) scratch: ScratchMemory,
    /// `base:allocation` of the device.
    pub(crate) base: Option<ContextSet>,
}

impl LiveHandle {
    pub(crate) fn new(device: Arc<dyn Device>) -> LiveHandle {
        let scratch = ScratchMemory::for_device(&device);
        let base = device.facts().context(BASE_ALLOCATION);
        LiveHandle { device, scratch, base }
    }
}

/// A point in time, for all handles.
pub(crate) struct PointState {
    pub(crate) block: u64,
    pub(crate) size: u64,
    /// Saved contents, at their offsets in the disk. Its length is that of the disk.
    store: File,
    max: u64,
    guest_timeout: Duration,
    on_failure: OnFailure,
    states: Mutex<Runs<BlockPlace>>,
    /// Held while blocks are saved or released.
    locks: Arc<RangeLocks>,
    /// Why the point in time is lost.
    broken: OnceLock<Error>,
    /// A handle for the view: the first one that the layer was put over.
    pub(crate) below: OnceLock<LiveHandle>,
    /// Bytes in `store`.
    kept: AtomicU64,
    saved: AtomicU64,
    waits: AtomicU64,
    /// In nanoseconds.
    longest_wait: AtomicU64,
}

impl PointState {
    pub(crate) fn new(size: u64, options: &PointOptions) -> Result<PointState> {
        Ok(PointState {
            block: options.block,
            size,
            store: store(size, options)?,
            max: options.max,
            guest_timeout: options.guest_timeout,
            on_failure: options.on_failure,
            states: Mutex::default(),
            locks: Arc::default(),
            broken: OnceLock::new(),
            below: OnceLock::new(),
            kept: AtomicU64::new(0),
            saved: AtomicU64::new(0),
            waits: AtomicU64::new(0),
            longest_wait: AtomicU64::new(0),
        })
    }

    pub(crate) fn stats(&self) -> SnapshotStats {
        SnapshotStats {
            saved: self.saved.load(Ordering::Relaxed),
            kept: self.kept.load(Ordering::Relaxed),
            waits: self.waits.load(Ordering::Relaxed),
            longest_wait: Duration::from_nanos(self.longest_wait.load(Ordering::Relaxed)),
            broken: self.broken.get().map(ToString::to_string),
        }
    }

    /// The point in time is lost, if it is not yet. Call it before the write that it is lost for.
    pub(crate) fn break_off(&self, error: Error) {
        let _ = self.broken.set(error);
    }

    /// Whether nothing has to be saved any more.
    pub(crate) fn is_broken(&self) -> bool {
        self.broken.get().is_some()
    }

    /// An error if the point in time is lost.
    pub(crate) fn check(&self) -> Result<()> {
        match self.broken.get() {
            None => Ok(()),
            Some(error) => Err(error.clone()),
        }
    }

    fn states(&self) -> MutexGuard<'_, Runs<BlockPlace>> {
        self.states.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The blocks that a range of bytes touches: the first, and the one after the last.
    pub(crate) fn blocks(&self, at: u64, end: u64) -> (u64, u64) {
        (at / self.block, end.div_ceil(self.block))
    }

    /// The runs of a range of bytes, `most` of them: start, end, state.
    pub(crate) fn runs(&self, at: u64, end: u64, most: usize) -> Vec<(u64, u64, BlockPlace)> {
        let (first, last) = self.blocks(at, end);
        let states = self.states();
        let bytes = |block: u64| block.saturating_mul(self.block);
        let runs = states.iter(first, last).take(most);
        runs.map(|(from, to, state)| (bytes(from).max(at), bytes(to).min(end), state)).collect()
    }

    /// The ranges that are not in the live disk any more: offset and length in bytes.
    pub(crate) fn changed(&self) -> Vec<(u64, u64)> {
        let runs = self.runs(0, self.size, usize::MAX).into_iter();
        runs.filter(|(.., state)| *state != BlockPlace::Live)
            .map(|(from, to, _)| (from, to - from))
            .collect()
    }

    /// The state of a range of bytes, if there is only one.
    pub(crate) fn state(&self, at: u64, end: u64) -> Option<BlockPlace> {
        let (first, last) = self.blocks(at, end);
        let (state, to) = self.states().run(first, last);
        (to == last).then_some(state)
    }

    /// Whether the old contents of blocks must be saved before a write to this range.
    pub(crate) fn must_save(&self, at: u64, end: u64) -> bool {
        let (first, last) = self.blocks(at, end);
        !self.is_broken() && self.next_live(first, last).is_some()
    }

    /// The first run of blocks in the live disk.
    fn next_live(&self, first: u64, last: u64) -> Option<(u64, u64)> {
        let states = self.states();
        let mut runs = states.iter(first, last);
        runs.find(|(_, _, state)| *state == BlockPlace::Live).map(|(from, to, _)| (from, to))
    }

    /// Saves the old contents of a range of bytes that is about to be written. An error is for the
    /// writer.
    pub(crate) async fn before_write(&self, below: &LiveHandle, at: u64, end: u64) -> Result<()> {
        let started = blockhaul_io::now();
        let saving = self.save(below, at, end);
        let saved = match self.guest_timeout {
            Duration::ZERO => saving.await,
            time => blockhaul_io::timeout(time, saving).await.unwrap_or_else(|_| {
                let text = format!(
                    "old contents could not be saved within {} s, and the write cannot wait longer",
                    time.as_secs_f32()
                );
                Err(Error::new(Kind::TimedOut, text))
            }),
        };
        self.count_wait(started);
        let Err(error) = saved else { return Ok(()) };
        let error = error.reworded(format!("the snapshot is lost: {}", error.located()));
        match self.on_failure {
            // It did not reach the disk: with FUA, no flush has failed.
            OnFailure::FailWrite => Err(error.before_flush()),
            OnFailure::BreakSnapshot => {
                log::warn!("{error}; the disk stays in use");
                self.break_off(error);
                Ok(())
            }
        }
    }

    fn count_wait(&self, started: Instant) {
        let nanos = u64::try_from(blockhaul_io::elapsed(started).as_nanos()).unwrap_or(u64::MAX);
        self.waits.fetch_add(1, Ordering::Relaxed);
        self.longest_wait.fetch_max(nanos, Ordering::Relaxed);
    }

    async fn save(&self, below: &LiveHandle, at: u64, end: u64) -> Result<()> {
        let (first, last) = self.blocks(at, end);
        let mut next = first;
        while let Some((from, to)) = self.next_live(next, last) {
            let to = to.min(from.saturating_add(PORTION));
            let _lock = self.locks.lock(from, to).await;
            self.save_portion(below, from, to).await?;
            next = to;
        }
        Ok(())
    }

    /// Saves those of the locked blocks that are in the live disk.
    async fn save_portion(&self, below: &LiveHandle, first: u64, last: u64) -> Result<()> {
        if (last - first).saturating_mul(self.block) >= ASK_FROM {
            self.find_zeroes(below, first, last).await?;
        }
        let mut next = first;
        while let Some((from, to)) = self.next_live(next, last) {
            let at_once = (below.scratch.piece() / self.block).max(1);
            next = to.min(from + at_once);
            let state = self.save_blocks(below, from, next).await?;
            self.states().set(from, next, state);
        }
        Ok(())
    }

    /// Marks whole blocks that the device reports as zero.
    async fn find_zeroes(&self, below: &LiveHandle, first: u64, last: u64) -> Result<()> {
        let Some(base) = below.base else { return Ok(()) };
        let at = first * self.block;
        let end = (last * self.block).min(self.size);
        let Reply::Extents(lists) =
            below.device.submit(Request::extents(at, end - at, base)).await?
        else {
            return Err(Error::misfit());
        };
        let list = lists.first().ok_or_else(Error::misfit)?;
        for (from, extent) in list.ranges(at).filter(|(_, extent)| extent.state & ZERO != 0) {
            let to = from.saturating_add(extent.len).min(end);
            let whole_end = if to == self.size { to.div_ceil(self.block) } else { to / self.block };
            self.change(from.div_ceil(self.block), whole_end, BlockPlace::Live, BlockPlace::Zero);
        }
        Ok(())
    }

    /// Gives the blocks of one state another one.
    fn change(&self, first: u64, last: u64, from: BlockPlace, to: BlockPlace) {
        self.states().update(first, last, |_, state| if state == from { to } else { state });
    }

    /// Copies blocks to the store; their new state.
    async fn save_blocks(&self, below: &LiveHandle, first: u64, last: u64) -> Result<BlockPlace> {
        let at = first * self.block;
        let end = (last * self.block).min(self.size);
        let mut charge = None;
        let mut from = at;
        while from < end {
            let len = below.scratch.piece().min(end - from);
            let read = below.scratch.read(&below.device, from, len).await?;
            if let Some(data) = read.filter(|data| !is_zero(data.bytes())) {
                if charge.is_none() {
                    charge = Some(self.charge(end - at)?);
                }
                let written = self.store.write_buffered_at(data, from).await;
                written.map_err(|error| Error::system("cannot save old contents", error))?;
            }
            from += len;
        }
        let Some(charge) = charge else { return Ok(BlockPlace::Zero) };
        charge.keep();
        self.saved.fetch_add(end - at, Ordering::Relaxed);
        Ok(BlockPlace::Saved)
    }

    /// Counts bytes that are about to be kept; an error if they are too many.
    fn charge(&self, bytes: u64) -> Result<StoreCharge<'_>> {
        let charge = StoreCharge { point: self, bytes };
        let kept = self.kept.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes);
        if kept <= self.max {
            return Ok(charge);
        }
        let text = format!("more than the {} bytes that may be saved", self.max);
        Err(Error::new(Kind::NoSpace, text))
    }

    /// Reads saved contents.
    pub(crate) async fn read_saved(
        &self,
        scratch: &ScratchMemory,
        at: u64,
        out: &mut [u8],
    ) -> Result<()> {
        let mut next = at;
        for part in out.chunks_mut(scratch.piece() as usize) {
            let room = scratch.room(part.len() as u64).await?;
            let (result, buf) = self.store.read_exact_at(room.into_buf(), next).await;
            result.map_err(|error| Error::system("cannot read saved contents", error))?;
            part.copy_from_slice(&buf);
            next += part.len() as u64;
        }
        Ok(())
    }

    /// The reader does not need the whole blocks of a range any more.
    pub(crate) async fn release(&self, at: u64, end: u64) -> Result<()> {
        let last = if end == self.size { end.div_ceil(self.block) } else { end / self.block };
        let mut next = at.div_ceil(self.block);
        while next < last {
            let to = last.min(next.saturating_add(PORTION));
            let _lock = self.locks.lock(next, to).await;
            let runs: Vec<_> = self.states().iter(next, to).collect();
            self.states().set(next, to, BlockPlace::Released);
            for (from, to, _) in
                runs.into_iter().filter(|(_, _, state)| *state == BlockPlace::Saved)
            {
                let from = from * self.block;
                let to = (to * self.block).min(self.size);
                self.kept.fetch_sub(to - from, Ordering::Relaxed);
                // Frees space where the file system can.
                let _ = self.store.allocate(FallocateMode::PunchHole, from, to - from).await;
            }
            next = to;
        }
        Ok(())
    }
}

/// The file of saved contents, which is as long as the disk: what is not written there is zero.
fn store(size: u64, options: &PointOptions) -> Result<File> {
    let file = temporary_file("snapshot", options.directory.as_deref())?;
    ftruncate(&file, size).map_err(|errno| {
        let text = format!(
            "snapshot: cannot make a temporary file of {size} bytes: choose a directory on a file system \
             that has such files"
        );
        Error::system(text, errno.into()).complete()
    })?;
    Ok(file)
}

/// Bytes that count as kept, unless saving them fails or is given up.
struct StoreCharge<'a> {
    point: &'a PointState,
    bytes: u64,
}

impl StoreCharge<'_> {
    fn keep(self) {
        std::mem::forget(self);
    }
}

impl Drop for StoreCharge<'_> {
    fn drop(&mut self) {
        self.point.kept.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// A payload of zeroes or of bytes.
pub(crate) fn bytes_of(reply: Reply, len: usize) -> Result<Vec<u8>> {
    match reply {
        Reply::Data(data) => Ok(Data::bytes(&data).to_vec()),
        Reply::Hole => Ok(vec![0; len]),
        _ => Err(Error::misfit()),
    }
}
