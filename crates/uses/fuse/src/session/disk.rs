//! A disk of a session, and requests to it.

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};
use std::time::{Duration, Instant};

use blockhaul_block::{
    Can, Device, Error, Facts, Flushes, Kind, OpKind, Outcome, PendingRequest, Reply, Request,
    Result,
};
use blockhaul_io::WorkerHandle;

use crate::files;

/// Interval of looks at the size of a disk: shorter than attributes are valid, so that each request for
/// them gets the size as it is.
const LOOK: Duration = Duration::from_millis(500);
/// Maximum time that a device has for what is in flight, after the file system was unmounted or the size
/// has changed.
pub(super) const DRAIN: Duration = Duration::from_secs(30);
/// Interval of looks at whether the handles of a former size are still in use.
const IDLE: Duration = Duration::from_millis(5);

/// Opens a further handle to a disk on this worker, fenced, with the size that the disk has now.
pub type HandleReopener =
    Arc<dyn Fn() -> Pin<Box<dyn Future<Output = Result<Arc<dyn Device>>>>> + Send + Sync>;

/// How further handles to a disk are opened. A flush through one of them covers what was written through
/// any of them.
#[derive(Clone)]
pub struct HandleSource {
    /// Opens one.
    pub reopen: HandleReopener,
    /// Each worker gets a handle of its own; otherwise all share one.
    pub one_for_each_worker: bool,
}

/// A disk to show.
pub struct DiskMount {
    /// Its name in a directory.
    pub name: String,
    /// The disk, fenced.
    pub device: Arc<dyn Device>,
    /// It may be written.
    pub write: bool,
    /// How it is opened again; none for a disk that keeps its size and has one handle.
    pub source: Option<HandleSource>,
}

/// A request of the kernel to a disk.
#[derive(Clone, Copy)]
pub(super) struct DiskCall {
    /// Its number.
    pub(super) unique: u64,
    /// The place of the disk in the session's list.
    pub(super) disk: usize,
}

/// A write, as the kernel asks for it.
#[derive(Clone, Copy)]
pub(super) struct Write {
    pub(super) at: u64,
    pub(super) len: u32,
    /// Flags of open(2).
    pub(super) flags: u32,
    /// It comes from the page cache, and no program waits for it.
    pub(super) cached: bool,
}

/// The handles to a disk: one for all lanes, or one for each. A request keeps them while it is in flight.
pub(super) struct Handles(Vec<Arc<dyn Device>>);

impl Handles {
    /// The handle of a lane, by its number.
    pub(super) fn of(&self, lane: usize) -> &Arc<dyn Device> {
        &self.0[lane % self.0.len()]
    }
}

/// A disk that is shown as a file, with what is known about its writes.
pub(super) struct DiskFile {
    name: String,
    handles: RwLock<Arc<Handles>>,
    pub(super) write: bool,
    source: Option<HandleSource>,
    /// The worker of the first lane.
    first_worker: AtomicUsize,
    /// When the last look at the size has begun; none while one is under way.
    looked: Mutex<Option<Instant>>,
    flushes: Arc<Flushes>,
    /// Something was written since the last flush was asked for.
    pub(super) unflushed: AtomicBool,
    /// Why a write from the page cache has failed, the first time: no program gets the error.
    lost: OnceLock<Error>,
    pub(super) mode: DiskMode,
}

/// The permissions that the owner of a disk has given it.
#[derive(Default)]
pub(super) struct DiskMode(Mutex<Option<u32>>);

impl DiskMode {
    pub(super) fn get(&self) -> Option<u32> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn set(&self, mode: u32) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(mode);
    }
}

impl DiskFile {
    pub(super) fn new(shown: DiskMount) -> DiskFile {
        let DiskMount { name, device, write, source } = shown;
        DiskFile {
            name,
            handles: RwLock::new(Arc::new(Handles(vec![device]))),
            write,
            source,
            first_worker: AtomicUsize::new(0),
            looked: Mutex::new(Some(blockhaul_io::now())),
            flushes: Arc::default(),
            unflushed: AtomicBool::new(false),
            lost: OnceLock::new(),
            mode: DiskMode::default(),
        }
    }

    /// The handles of the disk as it is now.
    pub(super) fn handles(&self) -> Arc<Handles> {
        self.handles.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn facts(&self) -> Arc<Facts> {
        self.handles().of(0).facts()
    }

    /// Opens a handle for each lane, on its worker, if the disk is to have several. A disk of which they
    /// cannot be opened has one.
    pub(super) async fn open_lanes(&self) {
        self.first_worker.store(blockhaul_io::worker(), Ordering::Relaxed);
        let first = self.handles().of(0).clone();
        match self.complete(first).await {
            Ok(handles) => *self.handles.write().unwrap_or_else(PoisonError::into_inner) = handles,
            Err(error) => log::debug!("{}: the workers share a connection: {error}", self.name),
        }
    }

    /// A handle of the lane with this number.
    async fn reopen(&self, source: &HandleSource, lane: usize) -> Result<Arc<dyn Device>> {
        let reopen = source.reopen.clone();
        let worker = WorkerHandle::to(self.first_worker.load(Ordering::Relaxed) + lane);
        match worker.spawn(move || reopen()).await {
            Ok(opened) => opened,
            Err(lost) => Err(Error::new(Kind::Io, lost.to_string())),
        }
    }

    /// The handles of all lanes, of which this is the first.
    async fn complete(&self, first: Arc<dyn Device>) -> Result<Arc<Handles>> {
        let size = first.facts().size;
        let mut all = vec![first];
        let several = self.source.as_ref().filter(|source| source.one_for_each_worker);
        for lane in 1..several.map_or(1, |_| blockhaul_io::worker_count()) {
            let Some(source) = several else { break };
            let next = self.reopen(source, lane).await?;
            if next.facts().size != size {
                return Err(Error::new(Kind::Io, "its size changes at this moment"));
            }
            all.push(next);
        }
        Ok(Arc::new(Handles(all)))
    }

    /// Whether its size may have changed since the last look.
    pub(super) fn is_due(&self) -> bool {
        self.source.is_some() && self.looked().is_some_and(is_due)
    }

    fn looked(&self) -> std::sync::MutexGuard<'_, Option<Instant>> {
        self.looked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Finds out whether the size has changed, and uses the new one then. Only one look at a time.
    pub(super) async fn look(&self) {
        let Some(source) = &self.source else { return };
        {
            let mut looked = self.looked();
            if !looked.is_some_and(is_due) {
                return;
            }
            *looked = None;
        }
        let over = SizeLook(self, blockhaul_io::now());
        if let Err(error) = self.follow(source).await {
            log::debug!("{}: cannot find out its size: {error}", self.name);
        }
        drop(over);
    }

    async fn follow(&self, source: &HandleSource) -> Result<()> {
        let device = self.reopen(source, 0).await?;
        let (before, now) = (self.facts(), device.facts());
        if now.size == before.size {
            return Ok(());
        }
        // Another file has this name, or what it can do has changed.
        if now.files != before.files || now.can != before.can {
            return Err(Error::new(Kind::Io, "it is another disk now"));
        }
        let new = self.complete(device).await?;
        log::info!(
            "{}: the size of the disk changes from {} to {} bytes",
            self.name,
            before.size,
            now.size
        );
        // Storage may report lost data to the old handles only: until they are flushed, no flush through
        // the new ones succeeds.
        let durable = if self.write && self.has_flush() {
            Some(self.flushes.begin(OpKind::Flush)?)
        } else {
            None
        };
        let old = {
            let mut handles = self.handles.write().unwrap_or_else(PoisonError::into_inner);
            std::mem::replace(&mut *handles, new)
        };
        if let Some(durable) = durable {
            drop(blockhaul_io::start(async move {
                let idle = async {
                    while Arc::strong_count(&old) > 1 {
                        blockhaul_io::sleep(IDLE).await;
                    }
                };
                // What the device holds for longer was never completed.
                let _ = blockhaul_io::timeout(DRAIN, idle).await;
                let outcome = old.of(0).submit(Request::flush()).await;
                // A failure stays, and is reported by the next flush.
                drop(durable.end_now(outcome, true));
            }));
        }
        Ok(())
    }

    /// Starts a flush of what was written since the last one, through each handle: one that has lost
    /// its connection reports what was in flight there, and others may not know of it.
    pub(super) fn flush_last(&self) -> PendingRequest {
        if !self.unflushed.swap(false, Ordering::SeqCst) || !self.has_flush() {
            return Ok(Reply::Done).into();
        }
        let flush = |device| match self.submit_durable(device, Request::flush()) {
            Ok(outcome) => outcome.into(),
            Err(pending) => pending,
        };
        let all: Vec<PendingRequest> = self.handles().0.iter().map(flush).collect();
        PendingRequest::start(async move {
            let mut outcome = Ok(Reply::Done);
            for pending in all {
                outcome = outcome.and(pending.await);
            }
            outcome
        })
    }

    /// A write from the page cache has failed: the kernel has dropped the data, and maybe no program gets
    /// the error.
    pub(super) fn lose(&self, error: Error) {
        // The first one counts.
        let _ = self.lost.set(error);
    }

    /// Why a write from the page cache has failed.
    pub(super) fn lost(&self) -> Option<&Error> {
        self.lost.get()
    }

    pub(super) fn has_flush(&self) -> bool {
        self.facts().can.contains(Can::FLUSH)
    }

    /// Submits a flush or FUA request, unless one has failed before. It succeeds only if no other
    /// one fails meanwhile.
    pub(super) fn submit_durable(
        &self,
        device: &Arc<dyn Device>,
        request: Request,
    ) -> std::result::Result<Outcome, PendingRequest> {
        // A handle does not know about the failures of others.
        let alone = self.source.is_none() && device.facts().flush_failures_stay;
        self.flushes.submit(&**device, request, alone)
    }
}

fn is_due(looked: Instant) -> bool {
    blockhaul_io::elapsed(looked) >= LOOK
}

/// A look that is under way; not any more when this is dropped.
struct SizeLook<'a>(&'a DiskFile, Instant);

impl Drop for SizeLook<'_> {
    fn drop(&mut self) {
        *self.0.looked() = Some(self.1);
    }
}

impl files::DiskAttributes for DiskFile {
    fn name(&self) -> &str {
        &self.name
    }

    fn write(&self) -> bool {
        self.write
    }

    fn mode(&self) -> Option<u32> {
        self.mode.get()
    }

    fn facts(&self) -> Arc<Facts> {
        self.facts()
    }
}
