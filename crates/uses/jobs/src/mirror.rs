//! Mirror jobs: a target follows a disk in use, until it equals the disk and clients move to it.
//!
//! A full copy is followed by rounds over what has changed meanwhile. When the rest can be copied in
//! time, the mirror is *ready*; it goes on with rounds until it is asked to complete. Then the
//! requests of clients wait while the last round and a flush end, and continue on the target.
//!
//! With [`CopyMode::WriteBlocking`], clients' writes go to the target, too, once everything was
//! copied: what has changed becomes less with each range that is copied, however fast they write.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::task::Poll;
use std::time::{Duration, Instant};

use blockhaul_block::{Can, Device, DeviceExt as _, Error, Facts, Kind, Result};
use blockhaul_catalog::{Adjustable, Barrier, ClaimOwner, PROVIDED, Stack};
use blockhaul_engine::{Control, CopyError, Engine, Progress, Summary};
use blockhaul_io::Notify;
use blockhaul_snapshot::{Changes, Remaining};
use blockhaul_transfer::Follower;
use serde_json::{Value, json};

use crate::error::JobError;
use crate::export::OpenExport;
use crate::export_table::ExportTable;
use crate::job_files::JobRecord;
use crate::snapshot::{DEFAULT_GRANULARITY, FrozenBitmap};

pub use blockhaul_control::CopyMode;

/// Time between rounds while a mirror is ready: changes are collected.
const PACE: Duration = Duration::from_millis(100);
/// Interval of flushes while a mirror is ready, so that the last one is short.
const FLUSH_EVERY: Duration = Duration::from_secs(1);
/// Interval at which the map of a job that outlives the server is brought up to date while it is ready.
const SETTLE_EVERY: Duration = Duration::from_secs(10);
/// Rounds of fewer bytes say nothing about the rate.
const TELLING: u64 = 1 << 20;
/// Bytes that are copied at a time while clients' writes go to the target, too: those that overlap
/// wait for it.
const PIECE: u64 = 1 << 20;
/// The same with a limited rate: one request, which need not wait for the tokens of another one.
const LIMITED_PIECE: u64 = 64 << 10;
/// Time that a client's write waits for a piece that is not copied: a request of it fails and is
/// repeated, or the target is that slow.
const PATIENCE: Duration = Duration::from_millis(200);
/// Time that clients may wait at the end, unless another one is given.
pub const CLIENT_WAIT: Duration = Duration::from_secs(1);

/// A mirror job, as its task and the control socket see it.
pub struct Mirror {
    table: Arc<ExportTable>,
    /// It may be removed meanwhile, and closed: also while the ended job is remembered.
    export: Weak<OpenExport>,
    target: String,
    /// Size of the export in bytes.
    size: u64,
    changes: Changes,
    initial: InitialCopy,
    /// The outermost layer of the target makes its errors wait: not those of clients' writes.
    errors_wait: bool,
    /// The target is a node.
    is_to_node: bool,
    /// The owner of the claims of the target.
    target_owner: ClaimOwner,
    /// What was dirty in the bitmap of [`InitialCopy::Dirty`].
    frozen: Option<FrozenBitmap>,
    /// It outlives the server, with this map.
    record: Option<(Arc<JobRecord>, Remaining)>,
    /// What is left of the job of an earlier server.
    rest: Option<Vec<(u64, u64)>>,
    progress: Arc<Progress>,
    state: Mutex<MirrorState>,
    /// It became ready, or has ended.
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
    /// What clients have left, and its description.
    former: Option<(Stack, String)>,
}

/// What a mirror copies before it copies changes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InitialCopy {
    /// All of the disk.
    All,
    /// Nothing: the target has the contents of now.
    Nothing,
    /// What this bitmap shows, onto an earlier copy. The bitmap is clean from then on; if the
    /// mirror fails, what was dirty is dirty again.
    Dirty(String),
}

/// The device that clients move to.
struct Destination {
    stack: Stack,
    /// Its layers that users see.
    layers: Vec<Arc<Adjustable>>,
}

/// How a mirror is to begin.
pub struct MirrorSetup {
    /// The target, for people.
    pub target: String,
    /// Counts what is copied.
    pub progress: Arc<Progress>,
    /// Maximum time for requests in flight to end.
    pub within: Duration,
    /// What is copied before changes are.
    pub initial: InitialCopy,
    /// When the target has what clients write.
    pub copy_mode: CopyMode,
    /// The target's outermost layer makes its errors wait.
    pub errors_wait: bool,
    /// The target is a node, whose disk becomes the one that clients have left.
    pub is_to_node: bool,
    /// The owner of the claims of the target.
    pub target_owner: ClaimOwner,
    /// It outlives the server.
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

/// The result of an attempt to move the clients.
#[derive(Clone, Copy, PartialEq, Eq)]
enum CutOverResult {
    Done,
    /// It is to be tried again.
    Postponed,
    /// The same, and the last round has begun and not ended.
    Unfinished,
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
        let changes = Changes::new(facts.size, DEFAULT_GRANULARITY)?;
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
    async fn run(&self, mut engine: Engine, target: Stack) -> Result<Summary, CopyError> {
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

    /// The target for clients: its errors must not make them wait, neither now nor when they have
    /// moved there, and it has the size of the export.
    async fn destination(&self, target: &Stack) -> Result<Destination> {
        let mut stack = target.clone();
        if self.errors_wait {
            stack = stack.without_layer(target.layer_count() - 1).await?;
        }
        let mut layers = Vec::new();
        if stack.device().facts().size > self.size {
            let layer = self.table.first_bytes(self.size)?;
            if let Some(layer) = layer.layer() {
                stack = stack.with_layer(layer.clone()).await?;
            }
            layers.push(Arc::new(layer));
        }
        Ok(Destination { stack, layers })
    }

    /// Lets clients' writes go to the target, too, or not.
    async fn apply_copy_mode(&self, target: &Arc<dyn Device>) {
        let also = match self.lock().copy_mode {
            CopyMode::Background => None,
            CopyMode::WriteBlocking => Some(target.clone()),
        };
        let is_background = also.is_none();
        self.changes.write_also(also);
        if is_background {
            self.changes.settle().await;
        }
    }

    /// Rounds, until the rest can be copied in time.
    async fn catch_up(&self, engine: &mut Engine, also: &Arc<dyn Device>) -> Result<(), CopyError> {
        loop {
            self.apply_copy_mode(also).await;
            let dirty = self.take();
            if dirty.is_empty() {
                return Ok(());
            }
            self.round(engine, &dirty).await?;
            let within = self.lock().completion.map_or(CLIENT_WAIT, |completion| completion.within);
            if self.predicted() <= within {
                return Ok(());
            }
        }
    }

    /// What has changed, for a round.
    fn take(&self) -> Vec<(u64, u64)> {
        let mut state = self.lock();
        let dirty = self.changes.take();
        state.left = dirty.iter().map(|(_, len)| len).sum();
        dirty
    }

    /// Copies ranges again.
    async fn round(&self, engine: &mut Engine, dirty: &[(u64, u64)]) -> Result<(), CopyError> {
        if self.changes.writes_also() {
            for &(from, len) in dirty {
                let end = from.saturating_add(len);
                let mut at = from;
                while at < end {
                    let copied_to = self.copy_piece(engine, (at, end)).await?;
                    let mut state = self.lock();
                    state.left = state.left.saturating_sub(copied_to - at);
                    at = copied_to;
                }
            }
        } else {
            self.copy(engine, dirty).await?;
        }
        let mut state = self.lock();
        state.left = 0;
        state.rounds += 1;
        Ok(())
    }

    /// Copies the first piece of a range, and returns its end. Clients' writes to the piece wait for
    /// its read and write, but not while the job waits: for its rate, for the end of a pause, or
    /// after an error. What they write then is copied again.
    async fn copy_piece(
        &self,
        engine: &mut Engine,
        (at, end): (u64, u64),
    ) -> Result<u64, CopyError> {
        let control = engine.control();
        control.may_start().await;
        let is_limited = control.rate_limits() != (0, 0);
        let most = if is_limited { LIMITED_PIECE } else { PIECE };
        let len = most.min(end - at);
        let mut piece = self.changes.lock(at, len).await;
        let ranges = [(at, len)];
        let mut copying = pin!(self.copy(engine, &ranges));
        let until = blockhaul_io::now() + PATIENCE;
        let failures = self.lock().failures;
        let overdue = self.overdue(&control, until, failures);
        let copied = match before(copying.as_mut(), overdue).await {
            Some(copied) => copied,
            None => {
                piece.open();
                copying.await
            }
        };
        copied.map(|()| at + len)
    }

    /// Returns at this time, or once the job is paused, or has more than so many failures: then it waits
    /// before it repeats a request.
    async fn overdue(&self, control: &Control, until: Instant, failures: u64) {
        loop {
            let changed = self.changes.listen();
            let left = until.saturating_duration_since(blockhaul_io::now());
            if control.is_paused() || self.lock().failures != failures || left.is_zero() {
                return;
            }
            let _ = blockhaul_io::timeout(left, changed).await;
        }
    }

    async fn copy(&self, engine: &mut Engine, ranges: &[(u64, u64)]) -> Result<(), CopyError> {
        let plan = engine.empty_plan();
        for &(at, len) in ranges {
            plan.add(at, len)?;
        }
        plan.close();
        let copied = engine.run(&plan).await?;
        self.note_rate(&copied);
        self.note_rewrites(engine);
        Ok(())
    }

    /// After an error the engine writes again what no flush has covered, without locks: that may
    /// have overwritten what clients have written to both meanwhile.
    fn note_rewrites(&self, engine: &Engine) {
        let rewritten = engine.summary().retried.rewritten;
        let before = std::mem::replace(&mut self.lock().rewritten, rewritten);
        if rewritten > before && self.changes.writes_also() {
            self.changes.give_back(&[(0, u64::MAX)]);
        }
    }

    /// Flushes the target: the first time, and when the latest flush was a while ago.
    async fn flush(&self, engine: &mut Engine, also: &Arc<dyn Device>) -> Result<(), CopyError> {
        let due = self.lock().flushed.is_none_or(|at| blockhaul_io::elapsed(at) > FLUSH_EVERY);
        if due {
            let started = blockhaul_io::now();
            let settles = self.must_settle(also);
            if let Some(map) = settles {
                map.cut();
            }
            flush_all(engine, also).await?;
            self.note_rewrites(engine);
            if let Some(map) = settles {
                map.settle(&self.changes.ranges());
                self.lock().settled = Some(blockhaul_io::now());
            }
            let mut state = self.lock();
            state.flush = blockhaul_io::elapsed(started);
            state.flushed = Some(blockhaul_io::now());
        }
        Ok(())
    }

    /// The map, if the next flush brings it up to date. Not each one: a client waits at its first write
    /// to a block that does not differ.
    fn must_settle(&self, target: &Arc<dyn Device>) -> Option<&Remaining> {
        let due = self.lock().settled.is_none_or(|at| blockhaul_io::elapsed(at) > SETTLE_EVERY);
        let is_sure = target.facts().can.contains(Can::FLUSH | Can::MULTI_CONN);
        self.record.as_ref().map(|(_, map)| map).filter(|_| due && is_sure)
    }

    /// Waits until there is something to do: changes (`None`), or the end.
    async fn wait(&self, control: &Control) -> Result<Option<MirrorCompletion>> {
        loop {
            let changed = self.changes.listen();
            if self.progress.is_cancelled() {
                return Err(Error::new(Kind::ShuttingDown, "cancelled").complete());
            }
            if !control.is_paused() {
                let (completion, copy_mode) = {
                    let state = self.lock();
                    (state.completion, state.copy_mode)
                };
                if completion.is_some() {
                    return Ok(completion);
                }
                if self.changes.writes_also() != (copy_mode == CopyMode::WriteBlocking) {
                    return Ok(None);
                }
                if self.changes.bytes() > 0 {
                    // A request to complete need not wait for the next round.
                    let _ = blockhaul_io::timeout(PACE, changed).await;
                    return Ok(None);
                }
            }
            // This side keeps the sender.
            let _ = changed.await;
        }
    }

    /// The end: clients wait for the last round and a flush. False: it is to be tried again.
    ///
    /// A round that clients cannot wait for continues after they are released, like any other round:
    /// what they write meanwhile is copied again.
    async fn cut_over(
        &self,
        engine: &mut Engine,
        control: &Control,
        clients: &Destination,
        completion: MirrorCompletion,
    ) -> Result<bool, CopyError> {
        if self.predicted() > completion.within {
            return Ok(false);
        }
        let mut round = pin!(self.last_round(engine, clients.stack.device()));
        let moved = self.move_clients(round.as_mut(), control, clients, completion).await?;
        if moved == CutOverResult::Unfinished {
            round.await?;
        }
        Ok(moved == CutOverResult::Done)
    }

    /// Holds the clients while the last round ends, and moves them.
    async fn move_clients(
        &self,
        mut round: Pin<&mut impl Future<Output = Result<(), CopyError>>>,
        control: &Control,
        clients: &Destination,
        completion: MirrorCompletion,
    ) -> Result<CutOverResult, CopyError> {
        let _change = self.table.change().await;
        let refused = |failure: JobError| Error::new(Kind::Refused, failure.to_string());
        let Some(export) = self.export.upgrade() else { return Err(no_export().into()) };
        let (shared, stack) = self.table.changeable(&export).map_err(refused)?;
        let next = if completion.switch { clients.stack.clone() } else { stack };
        self.stop_marking(&export);
        let new = match self.table.client_device(&export, &next).await {
            Ok(new) => new,
            Err(failure) => {
                self.resume_marking(&export);
                return Err(refused(failure).into());
            }
        };
        let started = blockhaul_io::now();
        let mut is_unfinished = false;
        let mut side = None;
        let last = async || {
            if completion.switch && !export.served {
                // Its first clients may have come since the setup.
                self.check_fits(clients.stack.device())?;
            }
            let left = completion.within.saturating_sub(blockhaul_io::elapsed(started));
            self.begin_last_round(control, left)?;
            let until = blockhaul_io::now() + left;
            let Some(copied) = before(round.as_mut(), self.released(until)).await else {
                is_unfinished = true;
                let text = "the last round did not end while clients could wait for it";
                return Err(Error::new(Kind::TimedOut, text));
            };
            copied.map_err(|failed| {
                side = failed.side;
                failed.error
            })?;
            if completion.switch { self.note_move().await } else { Ok(()) }
        };
        let swapped = shared.switch().swap(new, Barrier::Within(completion.within), last).await;
        control.ignore_rate(false);
        let mut state = self.lock();
        state.cutting_over = false;
        let Err(error) = swapped else {
            state.downtime = Some(blockhaul_io::elapsed(started));
            if completion.switch {
                let shown = format!(", with --layer 'offset?range={}'", self.size);
                let keeps_size = if clients.layers.is_empty() { "" } else { &shown };
                log::info!(export = export.name; "clients of {:?} are on {} now: update the command line of the server: it must name {}{keeps_size}", export.name, self.target, self.target);
                let mut layers = export.layers.lock().expect("no panic under this lock");
                // Gates stay.
                layers.retain(|one| one.layer().is_none());
                layers.extend(clients.layers.iter().cloned());
                let mut stack = export.stack.lock().expect("no panic under this lock");
                let mut storage = export.storage.lock().expect("no panic under this lock");
                let before = std::mem::replace(&mut *storage, self.target.clone());
                let former = stack.replace(next).map(|stack| (stack, before));
                state.former = former.filter(|_| self.is_to_node);
                if !self.is_to_node {
                    export.claims.hand_over(&self.target_owner, &export.owner);
                }
            }
            return Ok(CutOverResult::Done);
        };
        // The layers that mark are still there.
        self.resume_marking(&export);
        if error.kind() != Kind::TimedOut {
            return Err(CopyError { side, error });
        }
        log::info!(export = export.name; "the mirror is not completed yet: {error}");
        state.postponed = Some(error.to_string());
        Ok(if is_unfinished { CutOverResult::Unfinished } else { CutOverResult::Postponed })
    }

    /// Refuses a device that clients could not move to. A disk of the monitor protocol may have none.
    fn check_fits(&self, target: &Arc<dyn Device>) -> Result<()> {
        let Some(export) = self.export.upgrade() else { return Err(no_export()) };
        let Some(device) = export.device() else { return Ok(()) };
        let from = device.facts();
        let to = target.facts();
        let handles = export.shared.as_ref().map_or(0, |shared| shared.switch().handles());
        let has_clients = export.served || handles > 0;
        let what = too_small(&from, &to).or_else(|| missing(&from, &to).filter(|_| has_clients));
        what.map_or(Ok(()), |what| {
            let text = format!("clients of the export could not move to it: {what}");
            Err(Error::new(Kind::Unsupported, text).on(&to.name))
        })
    }

    /// The next device for clients marks nothing for this mirror.
    fn stop_marking(&self, export: &OpenExport) {
        *export.mirrored() = None;
        if let Some((_, map)) = &self.record {
            export.maps().retain(|other| !other.is_same(map));
        }
    }

    /// The device that clients keep marks again what they write for this mirror.
    fn resume_marking(&self, export: &OpenExport) {
        *export.mirrored() = Some(self.changes.clone());
        export.maps().extend(self.record.iter().map(|(_, map)| map.clone()));
    }

    /// Clients are about to move: a later server must not copy the old device onto the new one again.
    async fn note_move(&self) -> Result<()> {
        let Some((record, _)) = self.record.clone() else { return Ok(()) };
        record.note(json!({ "moved": true }));
        let noted = blockhaul_io::offload(move || record.commit()).await;
        let noted = noted.map_err(|lost| Error::new(Kind::Io, lost.to_string()))?;
        noted.map_err(|failure| Error::new(Kind::Io, failure.to_string()))
    }

    /// Refuses a last round that would not end in this time. Once it begins, nobody waits for the rate: it
    /// copies no more than the rate would admit in this time.
    fn begin_last_round(&self, control: &Control, left: Duration) -> Result<()> {
        self.lock().cutting_over = true;
        let too_late = |why: &'static str| Err(Error::new(Kind::TimedOut, why));
        if control.is_paused() {
            return too_late("it is paused");
        }
        let (limit, _) = control.rate_limits();
        let limited =
            self.changed_bytes().checked_div(limit).map_or(Duration::ZERO, Duration::from_secs);
        if self.predicted().max(limited) > left {
            return too_late("clients would wait too long for what has changed");
        }
        control.ignore_rate(true);
        Ok(())
    }

    /// Copies the rest, and makes it durable. It begins while no request is in flight.
    async fn last_round(
        &self,
        engine: &mut Engine,
        also: &Arc<dyn Device>,
    ) -> Result<(), CopyError> {
        let dirty = self.take();
        let copied = async {
            self.round(engine, &dirty).await?;
            flush_all(engine, also).await?;
            self.note_rewrites(engine);
            Ok(())
        };
        copied.await.inspect_err(|_| {
            self.lock().left = 0;
            self.changes.give_back(&dirty);
        })
    }

    /// Returns at this time, or once clients need not wait any more: the job has met an error, or is
    /// cancelled.
    async fn released(&self, until: Instant) {
        loop {
            let changed = self.changes.listen();
            let left = until.saturating_duration_since(blockhaul_io::now());
            if !self.is_cutting_over() || self.progress.is_cancelled() || left.is_zero() {
                return;
            }
            let _ = blockhaul_io::timeout(left, changed).await;
        }
    }

    /// A request of the job has failed and will be repeated: clients do not wait for that.
    pub(crate) fn release_clients(&self) {
        let mut state = self.lock();
        state.cutting_over = false;
        state.failures += 1;
        drop(state);
        self.changes.wake();
    }

    /// Time that clients would wait now.
    fn predicted(&self) -> Duration {
        let bytes = self.changed_bytes();
        let state = self.lock();
        let copying = match state.rate {
            Some(rate) if rate > 0.0 => bytes as f64 / rate,
            _ => 0.0,
        };
        state.flush + Duration::try_from_secs_f64(copying).unwrap_or(Duration::MAX / 2)
    }

    fn note_rate(&self, round: &Summary) {
        let bytes = round.data.saturating_add(round.zeroed);
        let seconds = round.elapsed.as_secs_f64();
        if bytes >= TELLING && seconds > 0.0 {
            self.lock().rate = Some(bytes as f64 / seconds);
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
        let mine = |changes: &Changes| changes.is_same(&self.changes);
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

    /// Number of bytes that have changed and are not copied yet.
    pub(crate) fn changed_bytes(&self) -> u64 {
        let state = self.lock();
        self.changes.bytes().saturating_add(state.left)
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

    /// For the control socket.
    pub fn described(&self) -> Value {
        let dirty = self.changed_bytes();
        let predicted = self.predicted();
        let synced = self.is_synced();
        let state = self.lock();
        json!({
            "ready": state.ready,
            "copy_mode": state.copy_mode.name(),
            "synced": synced,
            "dirty": dirty,
            "rounds": state.rounds,
            "rate": state.rate,
            "predicted_downtime": state.rate.map(|_| predicted.as_secs_f64()),
            "downtime": state.downtime.map(|time| time.as_secs_f64()),
            "postponed": state.postponed,
        })
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
    ) -> Pin<Box<dyn Future<Output = Result<Summary, CopyError>>>> {
        Box::pin(async move { self.run(engine, target).await })
    }
}

/// The output of a future, unless `end` completes first: then the future can be continued.
async fn before<T>(
    mut future: Pin<&mut impl Future<Output = T>>,
    end: impl Future<Output = ()>,
) -> Option<T> {
    let mut end = pin!(end);
    poll_fn(|context| match future.as_mut().poll(context) {
        Poll::Ready(output) => Poll::Ready(Some(output)),
        Poll::Pending => end.as_mut().poll(context).map(|()| None),
    })
    .await
}

/// The export of a mirror is not there any more.
fn no_export() -> Error {
    Error::new(Kind::Refused, "the export was removed").complete()
}

/// Flushes what the engine has written, and what clients have.
async fn flush_all(engine: &mut Engine, also: &Arc<dyn Device>) -> Result<(), CopyError> {
    engine.flush().await?;
    if also.facts().can.contains(Can::FLUSH) {
        also.flush().await.map_err(CopyError::at_target)?;
    }
    Ok(())
}

/// What a mirror copies first; none: all.
fn initial_ranges(initial: &InitialCopy, frozen: Option<&FrozenBitmap>) -> Option<Vec<(u64, u64)>> {
    match (initial, frozen) {
        (InitialCopy::Nothing, _) => Some(Vec::new()),
        (InitialCopy::Dirty(_), Some(frozen)) => Some(frozen.ranges()),
        _ => None,
    }
}

/// Why a device cannot take the place of another one, whoever uses it.
fn too_small(from: &Facts, to: &Facts) -> Option<String> {
    if to.size < from.size {
        return Some(format!("it has {} bytes, the export has {}", to.size, from.size));
    }
    (to.block.minimum > from.block.minimum).then(|| {
        format!(
            "its blocks have {} bytes, those of the export {}",
            to.block.minimum, from.block.minimum
        )
    })
}

/// What clients of one device would miss at another one.
fn missing(from: &Facts, to: &Facts) -> Option<String> {
    let lacks = from.can.difference(to.can | PROVIDED);
    let names: Vec<_> = lacks.iter_names().map(|(name, _)| name.to_lowercase()).collect();
    (!names.is_empty())
        .then(|| format!("it does not support {}", names.join(", ").replace('_', "-")))
}
