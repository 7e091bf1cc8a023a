//! Mirror jobs: a target follows a disk in use, until it equals the disk and clients move to it.
//!
//! A full copy is followed by rounds over what has changed meanwhile. When the rest can be copied in
//! time, the mirror is *ready*; it goes on with rounds until it is asked to complete. Then the
//! requests of clients wait while the last round and a flush end, and continue on the target.
//!
//! With [`CopyMode::WriteBlocking`], clients' writes go to the target, too, once everything was
//! copied: what has changed becomes less with each range that is copied, however fast they write.

mod cut_over;
mod rounds;

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

use blockhaul_block::{Error, Kind, Result};
use blockhaul_catalog::{Barrier, ClaimOwner, Stack};
use blockhaul_control::CopyMode;
use blockhaul_control::MirrorFigures;
use blockhaul_engine::{CopyError, CopyProgress, CopySummary, Engine};
use blockhaul_io::Notify;
use blockhaul_snapshot::{ChangeTracker, PersistentDirtyMap};
use blockhaul_transfer::Follower;

use crate::error::JobError;
use crate::export::OpenExport;
use crate::export_bitmaps::{DEFAULT_GRANULARITY, FrozenBitmap};
use crate::export_table::ExportTable;
use crate::job_files::JobRecord;
use rounds::PACE;

/// Time that clients may wait at the end, unless another one is given.
pub const CLIENT_WAIT: Duration = Duration::from_secs(1);

/// A mirror job, as its task and the control socket see it.
pub struct Mirror {
    table: Arc<ExportTable>,
    /// The export, which may be removed meanwhile, and closed: also while the ended job is remembered.
    export: Weak<OpenExport>,
    target: String,
    /// Size of the export in bytes.
    size: u64,
    changes: ChangeTracker,
    initial: InitialCopy,
    /// The outermost layer of the target makes its errors wait: not those of clients' writes.
    errors_wait: bool,
    /// The target is a node.
    is_to_node: bool,
    /// The owner of the claims of the target.
    target_owner: ClaimOwner,
    /// The dirty blocks of the bitmap of [`InitialCopy::Dirty`].
    frozen: Option<FrozenBitmap>,
    /// The record and the map of a mirror that outlives the server.
    record: Option<(Arc<JobRecord>, PersistentDirtyMap)>,
    /// The ranges that the job of an earlier server has left.
    rest: Option<Vec<(u64, u64)>>,
    progress: Arc<CopyProgress>,
    state: Mutex<MirrorState>,
    /// The mirror became ready, or has ended.
    changed: Notify,
}

#[derive(Default)]
struct MirrorState {
    /// Bytes per second of the latest round that says something.
    rate: Option<f64>,
    /// Time of the latest flush.
    flush: Duration,
    flushed: Option<Instant>,
    /// When the map was last brought up to date.
    settled: Option<Instant>,
    rounds: u64,
    /// Bytes of the current round that are not copied yet.
    left: u64,
    /// Bytes that the engine has written again.
    rewritten: u64,
    /// Number of requests of the job that have failed and are repeated.
    failures: u64,
    ready: bool,
    completion: Option<MirrorCompletion>,
    copy_mode: CopyMode,
    /// Clients wait.
    cutting_over: bool,
    /// Why the latest attempt to complete was given up.
    postponed: Option<String>,
    /// Time that clients have waited at the end.
    downtime: Option<Duration>,
    /// The device that clients have left, and its description.
    former: Option<(Stack, String)>,
}

/// The ranges that a mirror copies before it copies changes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InitialCopy {
    /// All of the disk.
    All,
    /// None: the target has the contents of now.
    Nothing,
    /// The dirty ranges of this bitmap, onto an earlier copy. The bitmap is clean from then on; if the
    /// mirror fails, what was dirty is dirty again.
    Dirty(String),
}

/// How a mirror is to begin.
pub struct MirrorSetup {
    /// The target, for people.
    pub target: String,
    /// Counts what is copied.
    pub progress: Arc<CopyProgress>,
    /// Maximum time for requests in flight to end.
    pub within: Duration,
    /// The ranges that are copied before changes are.
    pub initial: InitialCopy,
    /// When the target has what clients write.
    pub copy_mode: CopyMode,
    /// The target's outermost layer makes its errors wait.
    pub errors_wait: bool,
    /// The target is a node, whose disk becomes the one that clients have left.
    pub is_to_node: bool,
    /// The owner of the claims of the target.
    pub target_owner: ClaimOwner,
    /// The record of a mirror that outlives the server.
    pub record: Option<Arc<JobRecord>>,
    /// A job of an earlier server goes on.
    pub is_resumed: bool,
}

/// How a mirror is to end.
#[derive(Debug, Clone, Copy)]
pub struct MirrorCompletion {
    /// Time that clients may wait.
    pub within: Duration,
    /// Clients move to the target. Otherwise they stay, and the target is the disk of that moment.
    pub switch: bool,
}

impl Mirror {
    /// Begins to note what clients write to the export.
    ///
    /// # Errors
    /// If the export cannot be mirrored, or is being mirrored, or clients' requests do not end in time.
    pub async fn begin(
        table: &Arc<ExportTable>,
        export: &Arc<OpenExport>,
        setup: MirrorSetup,
    ) -> std::result::Result<(Arc<Mirror>, Stack), JobError> {
        let MirrorSetup {
            target,
            progress,
            within,
            initial,
            copy_mode,
            errors_wait,
            is_to_node,
            target_owner,
            ..
        } = setup;
        let is_resumed = setup.is_resumed;
        let record = setup.record.and_then(|record| record.map().map(|map| (record, map)));
        let _change = table.change().await;
        let (shared, stack) = table.changeable(export)?;
        export.check_not_mirrored()?;
        let facts = shared.switch().device().facts();
        export.check_writable(&facts)?;
        let bitmap = match &initial {
            InitialCopy::Dirty(name) => Some(export.bitmap(name)?),
            InitialCopy::All | InitialCopy::Nothing => None,
        };
        let changes = ChangeTracker::new(facts.size, DEFAULT_GRANULARITY)?;
        *export.mirrored() = Some(changes.clone());
        export.maps().extend(record.iter().filter(|_| !is_resumed).map(|(_, map)| map.clone()));
        let mut frozen = None;
        let mut rest = None;
        let begin = async || {
            // What is written meanwhile is in both.
            frozen = bitmap.map(FrozenBitmap::take);
            if let Some((record, map)) = &record {
                let initial = initial_ranges(&initial, frozen.as_ref());
                let is_rest = is_resumed && (record.has_target() || initial.is_some());
                rest = is_rest.then(|| map.ranges());
                map.begin(rest.as_ref().or(initial.as_ref()).unwrap_or(&vec![(0, u64::MAX)]));
            }
            Ok(())
        };
        let swapped = async {
            let new = table.client_device(export, &stack).await;
            let new = new.map_err(|failure| Error::new(Kind::Refused, failure.to_string()))?;
            shared.switch().swap(new, Barrier::Within(within), begin).await
        };
        let swapped = swapped.await;
        if let Err(error) = swapped {
            *export.mirrored() = None;
            if let Some((_, map)) = record.filter(|_| !is_resumed) {
                export.maps().retain(|other| !other.is_same(&map));
            }
            return Err(error.into());
        }
        let mirror = Mirror {
            table: table.clone(),
            export: Arc::downgrade(export),
            target,
            size: facts.size,
            changes,
            initial,
            errors_wait,
            is_to_node,
            target_owner,
            frozen,
            record,
            rest,
            progress,
            state: Mutex::new(MirrorState { copy_mode, ..MirrorState::default() }),
            changed: Notify::default(),
        };
        Ok((Arc::new(mirror), Stack::over(stack.device().clone())))
    }

    /// Copies, and follows the disk until the end.
    async fn run(&self, mut engine: Engine, target: Stack) -> Result<CopySummary, CopyError> {
        let control = engine.control();
        let initial = initial_ranges(&self.initial, self.frozen.as_ref());
        match self.rest.as_ref().or(initial.as_ref()) {
            Some(ranges) if ranges.is_empty() => {}
            Some(ranges) => self.round(&mut engine, ranges).await?,
            None => {
                let plan = engine.plan();
                let first = engine.run(&plan).await?;
                self.note_rate(&first);
            }
        }
        let clients = self.destination(&target).await?;
        let also = clients.stack.device().clone();
        loop {
            self.catch_up(&mut engine, &also).await?;
            self.flush(&mut engine, &also).await?;
            self.lock().ready = true;
            self.changed.notify();
            if let Some(completion) = self.wait(&control).await? {
                if self.cut_over(&mut engine, &control, &clients, completion).await? {
                    // All is copied and flushed, and clients may have moved: a request to cancel
                    // comes too late.
                    let summary = engine.summary();
                    return Ok(engine.finish().await.unwrap_or(summary));
                }
                blockhaul_io::sleep(PACE).await;
            }
        }
    }

    /// Ends the notes of a mirror that has not completed; if it was interrupted, another server may
    /// go on.
    pub(crate) async fn give_up(&self, is_complete: bool, is_interrupted: bool) {
        self.changes.write_also(None);
        self.changes.settle().await;
        if let Some((record, map)) = &self.record
            && (is_complete || !is_interrupted)
        {
            let record = record.clone();
            let _ = blockhaul_io::offload(move || record.remove()).await;
            if let Some(export) = self.export.upgrade() {
                self.table.forget_map(&export, map).await;
            }
        }
        let _change = self.table.change().await;
        if let Some(frozen) = &self.frozen {
            if is_complete { frozen.settle() } else { frozen.give_back() }
        }
        let mine = |changes: &ChangeTracker| changes.is_same(&self.changes);
        let Some(export) = self.export.upgrade() else { return };
        if !export.mirrored().as_ref().is_some_and(mine) {
            return;
        }
        *export.mirrored() = None;
        let Ok((shared, stack)) = self.table.changeable(&export) else { return };
        // It stays in the path of the requests, and costs little.
        if let Err(failure) =
            self.table.refresh_device(&export, shared, &stack, Barrier::None).await
        {
            log::debug!("the layer of an ended mirror stays: {failure}");
        }
    }

    /// Asks it to end.
    pub fn complete(&self, completion: MirrorCompletion) {
        self.lock().completion = Some(completion);
        self.changes.wake();
    }

    /// Changes when the target has what clients write.
    pub fn set_copy_mode(&self, copy_mode: CopyMode) {
        self.lock().copy_mode = copy_mode;
        self.changes.wake();
    }

    /// Whether the target equals the disk, and each write goes to both.
    pub fn is_synced(&self) -> bool {
        self.changes.writes_also() && self.is_ready() && self.changed_bytes() == 0
    }

    /// Looks again whether it is paused or cancelled.
    pub fn wake(&self) {
        self.changes.wake();
    }

    /// Waits until it is ready, or `over`.
    pub async fn ready(&self, over: impl Fn() -> bool) {
        loop {
            let changed = self.changed.listen();
            if self.is_ready() || over() {
                return;
            }
            // This side keeps the sender.
            let _ = changed.await;
        }
    }

    /// Wakes those who wait until it is ready.
    pub fn has_ended(&self) {
        self.changed.notify();
    }

    /// The device that clients have left for the target, and its description; once.
    pub fn former_disk(&self) -> Option<(Stack, String)> {
        self.lock().former.take()
    }

    /// Whether clients have moved to the target, or will.
    pub fn switches(&self) -> bool {
        self.lock().completion.is_some_and(|completion| completion.switch)
    }

    /// Whether clients wait for it just now.
    pub(crate) fn is_cutting_over(&self) -> bool {
        self.lock().cutting_over
    }

    /// Whether it could complete in time.
    pub fn is_ready(&self) -> bool {
        self.lock().ready
    }

    /// Whether it was asked to complete.
    pub(crate) fn is_completing(&self) -> bool {
        self.lock().completion.is_some()
    }

    /// The figures of the mirror, for the control socket.
    pub(crate) fn figures(&self) -> MirrorFigures {
        let dirty = self.changed_bytes();
        let predicted = self.predicted();
        let synced = self.is_synced();
        let state = self.lock();
        MirrorFigures {
            ready: state.ready,
            copy_mode: state.copy_mode,
            synced,
            dirty,
            rounds: state.rounds,
            rate: state.rate,
            predicted_downtime: state.rate.map(|_| predicted.as_secs_f64()),
            downtime: state.downtime.map(|time| time.as_secs_f64()),
            postponed: state.postponed.clone(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, MirrorState> {
        self.state.lock().expect("no panic under this lock")
    }
}

impl Follower for Mirror {
    fn check(&self, target: &Stack) -> Result<()> {
        self.check_fits(target.device())?;
        let rest = target.device().facts().size.saturating_sub(self.size);
        if let Some(export) = self.export.upgrade().filter(|_| rest > 0) {
            let (export, target, size) = (&export.name, &self.target, self.size);
            log::warn!(export; "{target} is {rest} bytes larger than export {export:?}: clients of the export will see {size} bytes of it, and the rest is not changed");
        }
        Ok(())
    }

    fn follow(
        self: Arc<Self>,
        engine: Engine,
        target: Stack,
    ) -> Pin<Box<dyn Future<Output = Result<CopySummary, CopyError>>>> {
        Box::pin(async move { self.run(engine, target).await })
    }
}

/// The ranges that a mirror copies first; none: all.
fn initial_ranges(initial: &InitialCopy, frozen: Option<&FrozenBitmap>) -> Option<Vec<(u64, u64)>> {
    match (initial, frozen) {
        (InitialCopy::Nothing, _) => Some(Vec::new()),
        (InitialCopy::Dirty(_), Some(frozen)) => Some(frozen.ranges()),
        _ => None,
    }
}
