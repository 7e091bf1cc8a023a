//! What all handles to a disk share: its extents, failed flushes, and what is under way.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use blockhaul_block::{
    BASE_ALLOCATION, BlockSizes, Can, Error, Facts, Flushes, HOLE, Kind, Result, ZERO,
};
use blockhaul_catalog::StorageFigure;
use blockhaul_io::BlockingPool;

use crate::allocation::{Allocation, PART, UnitBits};
use crate::changes::{CONTEXT, ChangedAreas};
use crate::library::{DiskInfo, SECTOR};
use crate::options::{SINGLE_LINK, VddkOptions};
use crate::saved::{self, MapFile};
use crate::scan::Scan;
use crate::session::{LibrarySession, OpenDisk};
use crate::statistics;
use crate::trial::OverlapTrial;

/// Preferred request, in bytes, as of nbdkit-vddk-plugin.
const PREFERRED: u32 = 4096;

/// A disk.
pub(crate) struct VddkDisk {
    pub(crate) options: Arc<VddkOptions>,
    session: Arc<LibrarySession>,
    write: bool,
    pub(crate) flushes: Arc<Flushes>,
    /// Transfers under way on all handles.
    pub(crate) in_flight: AtomicUsize,
    /// Whether queries may be asked during transfers.
    pub(crate) trial: OverlapTrial,
    /// The handle for queries, while a handle uses it.
    apart: Mutex<Weak<QueryHandle>>,
    /// Known once the first handle is open.
    known: OnceLock<DiskFacts>,
}

/// What the first handle finds out.
struct DiskFacts {
    facts: Arc<Facts>,
    scan: Mutex<Scan>,
    /// What has changed since an earlier state.
    changes: Option<ChangedAreas>,
    /// Where the extents are kept.
    place: Option<MapFile>,
}

impl VddkDisk {
    /// Starts the library.
    ///
    /// # Errors
    /// If it cannot be loaded or started.
    pub(crate) async fn start(options: VddkOptions, write: bool) -> Result<Arc<VddkDisk>> {
        let session = LibrarySession::start(&options).await?;
        Ok(VddkDisk::of(options, session, write))
    }

    /// A disk of a library that was started with the same folder.
    pub(crate) fn of(
        options: VddkOptions,
        session: Arc<LibrarySession>,
        write: bool,
    ) -> Arc<VddkDisk> {
        Arc::new(VddkDisk {
            options: Arc::new(options),
            session,
            write,
            flushes: Arc::default(),
            in_flight: AtomicUsize::new(0),
            trial: OverlapTrial::default(),
            apart: Mutex::default(),
            known: OnceLock::new(),
        })
    }

    /// Opens a handle of the library, and returns it with the facts of the disk.
    ///
    /// # Errors
    /// If the library refuses, or the disk has another size than before.
    pub(crate) async fn open(&self) -> Result<(OpenDisk, Arc<Facts>)> {
        let named =
            |error: Error| error.reworded(format!("{}: {}", self.options.name(), error.text()));
        let open = self.session.open(&self.options, self.write).await.map_err(named)?;
        let size =
            open.info.sectors.checked_mul(SECTOR).filter(|size| i64::try_from(*size).is_ok());
        let wrong = |what: String| named(Error::new(Kind::Io, what));
        let size = size.ok_or_else(|| wrong(format!("a size of {} sectors", open.info.sectors)))?;
        let changes = self.changes_of(size).await?;
        let place = MapFile::of(&self.options, size);
        let saved = match place.clone().filter(|_| self.known.get().is_none()) {
            // It may take long.
            Some(place) => blockhaul_io::offload(move || place.load(size.div_ceil(PART)))
                .await
                .unwrap_or_default(),
            None => Vec::new(),
        };
        let known =
            self.known.get_or_init(|| self.examine(size, open.info, place, (saved, changes)));
        if known.facts.size != size {
            let before = known.facts.size;
            return Err(wrong(format!("the disk has {size} bytes now, and had {before} before")));
        }
        Ok((open, known.facts.clone()))
    }

    /// Reads the file of `changes=`, for the first handle.
    async fn changes_of(&self, size: u64) -> Result<Option<ChangedAreas>> {
        let path = self.options.changes.clone().filter(|_| self.known.get().is_none());
        let Some(path) = path else { return Ok(None) };
        let lost = |lost| Error::new(Kind::Io, "vddk: changes= was not read").because(lost);
        let read = blockhaul_io::offload(move || ChangedAreas::read(&path, size)).await;
        Ok(Some(read.map_err(lost)??))
    }

    /// What has changed, if that is known.
    pub(crate) fn changes(&self) -> Option<&ChangedAreas> {
        self.known.get()?.changes.as_ref()
    }

    fn examine(
        &self,
        size: u64,
        info: DiskInfo,
        place: Option<MapFile>,
        (known, changes): (Vec<(u64, UnitBits)>, Option<ChangedAreas>),
    ) -> DiskFacts {
        let mut facts = Facts::new(self.options.name(), size);
        let sectors = info.logical_sector.max(info.physical_sector);
        let preferred = if sectors.is_power_of_two() { sectors.max(PREFERRED) } else { PREFERRED };
        facts.block =
            BlockSizes { minimum: 512, preferred: preferred.min(1 << 20), ..BlockSizes::default() };
        // Handles of a disk that nobody writes show the same.
        facts.can = if self.write { Can::WRITE | Can::FLUSH } else { Can::MULTI_CONN };
        facts.flush_failures_stay = true;
        if self.session.library.has_query() {
            facts.can |= Can::EXTENTS;
            facts.contexts = vec![BASE_ALLOCATION.to_string()];
        }
        if changes.is_some() {
            facts.can |= Can::EXTENTS;
            facts.contexts.push(CONTEXT.to_string());
        }
        // In one link of a chain, what is not allocated is in another link.
        let single = self.options.flags & SINGLE_LINK != 0;
        let hole = if single { HOLE } else { HOLE | ZERO };
        let mut map = Allocation::new(size, hole);
        saved::add(&mut map, known);
        DiskFacts { facts: Arc::new(facts), scan: Mutex::new(Scan::new(map)), changes, place }
    }

    /// The extents; none before the first handle is open.
    pub(crate) fn scan(&self) -> Option<MutexGuard<'_, Scan>> {
        let known = self.known.get()?;
        Some(known.scan.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// A range was written, perhaps in part.
    pub(crate) fn wrote(&self, at: u64, len: u64) {
        if let Some(mut scan) = self.scan() {
            scan.wrote(at, len);
        }
    }

    /// Whether it was opened for writing: then it may not be possible to open it twice.
    pub(crate) fn is_written(&self) -> bool {
        self.write
    }

    /// The handle for queries, if there is one.
    pub(crate) fn apart(&self) -> Option<Arc<QueryHandle>> {
        self.apart.lock().unwrap_or_else(PoisonError::into_inner).upgrade()
    }

    /// Opens that handle; `then` runs on the thread that opens. If it was opened meanwhile, it gets
    /// that one.
    pub(crate) fn open_apart(
        self: &Arc<VddkDisk>,
        then: impl FnOnce(Result<Arc<QueryHandle>>) + Send + 'static,
    ) {
        let disk = self.clone();
        self.session.open_then(move |session| {
            if let Some(apart) = disk.apart() {
                return then(Ok(apart));
            }
            let opened = session.open_here(&disk.options, false).map(QueryHandle::over);
            if let Ok(apart) = &opened {
                let mut slot = disk.apart.lock().unwrap_or_else(PoisonError::into_inner);
                *slot = Arc::downgrade(apart);
            }
            drop(disk);
            then(opened);
        });
    }

    /// Whether no transfers are under way.
    pub(crate) fn is_idle(&self) -> bool {
        self.in_flight.load(Ordering::Relaxed) == 0
    }

    /// The calls of the library, for users.
    pub(crate) fn state(&self) -> String {
        statistics::state(&self.session.library.statistics.report())
    }

    /// The same, for metrics.
    pub(crate) fn figures(&self) -> Vec<StorageFigure> {
        let mut figures = statistics::figures(&self.session.library.statistics.report());
        for figure in &mut figures {
            figure.labels.push(("process", std::process::id().to_string()));
        }
        figures
    }
}

/// A handle of the library for queries alone.
pub(crate) struct QueryHandle {
    pub(crate) thread: BlockingPool,
    pub(crate) open: OpenDisk,
}

impl QueryHandle {
    fn over(open: OpenDisk) -> Arc<QueryHandle> {
        Arc::new(QueryHandle { thread: BlockingPool::single("vddk-query"), open })
    }
}

impl Drop for VddkDisk {
    /// Saves the extents. The process may end afterwards.
    fn drop(&mut self) {
        let Some(known) = self.known.get() else { return };
        let parts = self.scan().and_then(|mut scan| scan.take_unsaved());
        if let (Some(place), Some(parts)) = (&known.place, parts) {
            place.store(&parts);
        }
    }
}
