//! What of a disk has changed since it was copied, for a copy that follows a disk in use.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blockhaul_block::{
    Device, DeviceExt as _, Facts, Op, Outcome, PendingRequest, Request, Result,
};
use blockhaul_catalog::Layer;
use blockhaul_io::{Data, Notify, RangeLock, RangeLocks, Ticket};

use crate::bitmap::DirtyBitmap;

/// The ranges that were written since they were last [taken](ChangeTracker::take).
///
/// A range is marked when its write has completed, with or without success: whoever takes the range
/// and then reads it sees what was written. A dirty bitmap is different: it marks before.
#[derive(Clone)]
pub struct ChangeTracker(Arc<ChangeState>);

struct ChangeState {
    bitmap: DirtyBitmap,
    /// A range was marked.
    marked: Notify,
    /// Where clients' writes go as well.
    also: Mutex<WriteMirror>,
    /// No write goes to another device any more.
    settled: Notify,
    /// Writes that go there, and ranges that are being copied.
    locks: Arc<RangeLocks>,
    /// Ranges that are being copied and that nobody waits for.
    opened: Mutex<Vec<(u64, u64)>>,
}

/// A range that is being copied: writes there that go to the other device, too, wait until it is
/// dropped or [opened](CopyLock::open).
pub struct CopyLock {
    changes: Arc<ChangeState>,
    range: (u64, u64),
    lock: Option<RangeLock>,
}

impl CopyLock {
    /// Ends the wait of writers before the range is copied: until then, writes there go to the disk
    /// only, and mark.
    pub fn open(&mut self) {
        let Some(lock) = self.lock.take() else { return };
        self.changes.opened().push(self.range);
        drop(lock);
    }
}

impl Drop for CopyLock {
    fn drop(&mut self) {
        if self.lock.is_none() {
            let mut opened = self.changes.opened();
            if let Some(place) = opened.iter().position(|range| *range == self.range) {
                opened.swap_remove(place);
            }
        }
    }
}

/// Another device for writes.
#[derive(Default)]
struct WriteMirror {
    device: Option<Arc<dyn Device>>,
    /// Number of writes that go there, or to one from before.
    in_flight: usize,
}

impl ChangeTracker {
    /// No changes, of a disk of `size` bytes, in blocks of `granularity` bytes.
    ///
    /// # Errors
    /// If the granularity is not that of a bitmap.
    pub fn new(size: u64, granularity: u64) -> Result<ChangeTracker> {
        let bitmap = DirtyBitmap::new("changes", size, granularity)?;
        let marked = Notify::default();
        let settled = Notify::default();
        let also = Mutex::default();
        let locks = Arc::default();
        let opened = Mutex::default();
        Ok(ChangeTracker(Arc::new(ChangeState { bitmap, marked, also, settled, locks, opened })))
    }

    /// The layer that marks. All handles that write to the disk must be under it.
    pub fn layer(&self) -> Arc<dyn Layer> {
        Arc::new(ChangeLayer(self.0.clone()))
    }

    /// From now on, writes go to this device too before they complete, and mark nothing unless that
    /// fails; `None`: they only mark. What is copied from the disk to the same device meanwhile must
    /// be [locked](ChangeTracker::lock). Writes in flight are finished as they began:
    /// [settle](ChangeTracker::settle) waits for them.
    pub fn write_also(&self, device: Option<Arc<dyn Device>>) {
        self.0.also().device = device;
    }

    /// Whether writes go to another device, too.
    pub fn writes_also(&self) -> bool {
        self.0.also().device.is_some()
    }

    /// Once writes go to no other device: waits for those in flight that still do. Before that, a
    /// copy without [locks](ChangeTracker::lock) could overwrite them with older contents, and they could
    /// overwrite what somebody else writes to that device later.
    pub async fn settle(&self) {
        loop {
            let settled = self.0.settled.listen();
            if self.0.also().in_flight == 0 {
                return;
            }
            // This side keeps the sender.
            let _ = settled.await;
        }
    }

    /// Waits for the writes in a range that go to the other device, too; those that begin later wait
    /// until the lock is dropped or [opened](CopyLock::open).
    pub async fn lock(&self, at: u64, len: u64) -> CopyLock {
        let range = (at, at.saturating_add(len));
        let lock = Some(self.0.locks.lock(range.0, range.1).await);
        CopyLock { changes: self.0.clone(), range, lock }
    }

    /// What has changed, as offset and length in bytes, in order. It counts as copied then.
    #[must_use]
    pub fn take(&self) -> Vec<(u64, u64)> {
        self.0.bitmap.take().ranges()
    }

    /// What has changed, as offset and length in bytes, in order.
    pub fn ranges(&self) -> Vec<(u64, u64)> {
        self.0.bitmap.ranges()
    }

    /// These ranges have not been copied after all.
    pub fn give_back(&self, ranges: &[(u64, u64)]) {
        ranges.iter().for_each(|&(at, len)| self.0.bitmap.mark(at, at.saturating_add(len)));
    }

    /// Number of bytes that have changed.
    pub fn bytes(&self) -> u64 {
        self.0.bitmap.dirty_bytes()
    }

    /// A ticket that completes at the next change, or [wake](ChangeTracker::wake). Take it before looking
    /// for changes.
    pub fn listen(&self) -> Ticket<()> {
        self.0.marked.listen()
    }

    /// Completes the tickets of all who listen.
    pub fn wake(&self) {
        self.0.marked.notify();
    }

    /// Whether both are of the same copy.
    pub fn is_same(&self, other: &ChangeTracker) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

struct ChangeLayer(Arc<ChangeState>);

impl Layer for ChangeLayer {
    fn wrap(&self, inner: Arc<dyn Device>) -> Result<Arc<dyn Device>> {
        let facts = Arc::new(Facts::same(&inner.facts()));
        Ok(Arc::new(ChangeDevice { facts, inner, changes: self.0.clone() }))
    }
}

struct ChangeDevice {
    facts: Arc<Facts>,
    inner: Arc<dyn Device>,
    changes: Arc<ChangeState>,
}

impl Device for ChangeDevice {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        if !matches!(request.op, Op::Write(_) | Op::Zero | Op::Trim) {
            return self.inner.submit(request);
        }
        if let Some((also, copy)) = self.changes.copy_of(&request) {
            let inner = self.inner.clone();
            return PendingRequest::start(also.write_both(request, inner, copy));
        }
        let mark = self.changes.mark(&request);
        // Dropped when the write has completed, or at once if it has already.
        self.inner.submit(request).guarded(move || mark)
    }
}

impl ChangeState {
    /// The other device, and what to write there; none if the write only marks.
    fn copy_of(self: &Arc<Self>, request: &Request) -> Option<(MirrorWrite, WriteContent)> {
        let copied = match &request.op {
            Op::Write(data) => WriteContent::Data(data.clone()),
            Op::Zero => WriteContent::Zeroes,
            // The contents of what is trimmed are undefined: they are copied from the disk.
            _ => return None,
        };
        let mut also = self.also();
        let device = also.device.clone()?;
        also.in_flight += 1;
        Some((MirrorWrite { changes: self.clone(), device }, copied))
    }

    fn mark(self: &Arc<Self>, request: &Request) -> ChangeMark {
        let at = request.at;
        let end = request.end().unwrap_or(u64::MAX);
        ChangeMark { changes: self.clone(), at, end, equal: false }
    }

    fn also(&self) -> MutexGuard<'_, WriteMirror> {
        self.also.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn opened(&self) -> MutexGuard<'_, Vec<(u64, u64)>> {
        self.opened.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a part of a range is being copied, by somebody whom nobody waits for.
    fn is_opened(&self, at: u64, end: u64) -> bool {
        self.opened().iter().any(|&(from, to)| from < end && at < to)
    }
}

/// The other device, for one write that goes there.
struct MirrorWrite {
    changes: Arc<ChangeState>,
    device: Arc<dyn Device>,
}

impl MirrorWrite {
    /// Writes to both. Overlapping writes go one after another, so that both have the same result.
    async fn write_both(
        self,
        request: Request,
        inner: Arc<dyn Device>,
        copied: WriteContent,
    ) -> Outcome {
        let at = request.at;
        let len = request.len;
        let mut mark = self.changes.mark(&request);
        let end = at.saturating_add(len);
        let lock = self.changes.locks.lock(at, end).await;
        // The copy of an opened range may overwrite the other device with what was there before.
        let goes_there = !self.changes.is_opened(at, end);
        let written = inner.submit(request);
        let copied = goes_there && copied.write(&self.device, at, len).await.is_ok();
        let outcome = written.await;
        mark.equal = outcome.is_ok() && copied;
        drop(mark);
        drop(lock);
        outcome
    }
}

impl Drop for MirrorWrite {
    fn drop(&mut self) {
        let mut also = self.changes.also();
        also.in_flight -= 1;
        if also.in_flight == 0 {
            self.changes.settled.notify();
        }
    }
}

/// The contents of a write.
enum WriteContent {
    Data(Data),
    Zeroes,
}

impl WriteContent {
    async fn write(self, device: &Arc<dyn Device>, at: u64, len: u64) -> Result<()> {
        let data = match self {
            WriteContent::Zeroes => return device.zero(at, len).await,
            WriteContent::Data(data) => data,
        };
        let most = (device.facts().block.maximum as usize).max(1);
        let mut done = 0;
        while done < data.len() {
            let part = (data.len() - done).min(most);
            device.write(at + done as u64, data.slice(done, part)).await?;
            done += part;
        }
        Ok(())
    }
}

/// Marks a range when it is dropped.
struct ChangeMark {
    changes: Arc<ChangeState>,
    at: u64,
    end: u64,
    /// The copy has it: there is nothing to mark.
    equal: bool,
}

impl Drop for ChangeMark {
    fn drop(&mut self) {
        if !self.equal {
            self.changes.bitmap.mark(self.at, self.end);
            self.changes.marked.notify();
        }
    }
}
