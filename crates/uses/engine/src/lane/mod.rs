//! Lanes: each takes segments from the plan and moves them from its source handle to its target
//! handle, or only reads them, with a bounded window of requests in flight.
//!
//! A transient failure is retried per request, from a fresh read of the source: written data is not
//! kept, so that payloads can stay in the kernel. `recheck` handles writes over connections that
//! were lost.

mod chunk;
mod copy_range;
mod discard;
mod marker;
mod open;
mod read;
mod recheck;
mod reflink;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use blockhaul_block::{Can, Error, Kind};
use blockhaul_io::{Event, Reservation};

use self::chunk::SegmentChunk;
use self::open::{NextStep, OpenSegment, RequestBatch};
use crate::error::Result;
use crate::handle::ReconnectingHandle;
use crate::ledger::{Ledger, SegmentRange, SegmentStart, SuspectSegment};
use crate::orders::EndAction;
use crate::reading::SourceScan;
use crate::segment::{RunContent, Segment, SegmentRun};
use crate::segment_queue::SegmentQueue;
use crate::shared::EngineState;
use crate::side::Side;
use crate::signals::{PAUSED, WANTED};
use crate::window::RequestWindow;

/// A longer wait for a segment leaves the devices idle.
const IDLE: Duration = Duration::from_millis(5);

/// One request in this many is checked for zeroes when sampling suffices.
const SAMPLE_EVERY: u64 = 16;

/// One source handle and one target handle, on one worker.
pub(crate) struct Lane {
    shared: Arc<EngineState>,
    source: ReconnectingHandle,
    target: ReconnectingHandle,
    takes_parked: bool,
    /// The target can zero without being sent zeroes.
    target_zeroes: bool,
    /// The target reads as zeroes where this run has not written.
    target_is_zero: Cell<bool>,
    /// The first lane provides the proof that verifies the others.
    first: bool,
    /// Set until the first lane has published a proof.
    proof_due: Cell<bool>,
    /// Lane number, for the journal.
    number: u32,
    pace: LaneLimits,
    load: LaneLoad,
    work: LaneWork,
    safety: WriteDurability,
}

/// Limits of what a lane has in flight.
struct LaneLimits {
    window: RefCell<RequestWindow>,
    /// Holds one of the places for active lanes.
    placed: Cell<bool>,
    /// Requests that the progress counts for this lane.
    shown: Cell<usize>,
    /// Minimum requests in flight, whatever the window allows.
    least: Cell<usize>,
    /// Request size in bytes, as the window knows it.
    size: Cell<u64>,
    /// Bytes zeroed per request.
    zero_piece: Cell<u64>,
}

/// What a lane has in flight.
struct LaneLoad {
    requests: Cell<usize>,
    bytes: Cell<u64>,
    /// Of the requests: those that wait for the end of a pause.
    resting: Cell<usize>,
    changed: Event,
}

/// What a lane works on.
#[derive(Default)]
struct LaneWork {
    /// Segments that are begun; the last one is being worked on.
    open: RefCell<Vec<Rc<OpenSegment>>>,
    /// The flight that requests starting now belong to.
    flight: RefCell<Option<Rc<RequestBatch>>>,
    /// The number of the newest range request (`want`) that this lane has seen.
    last_want: Cell<u64>,
    /// Segments are read only.
    reading: RefCell<Option<Arc<SourceScan>>>,
}

/// How durable a lane's writes are.
struct WriteDurability {
    ledger: RefCell<Ledger>,
    /// A flush would make something durable. This includes zeroes that were already on the target,
    /// which another program may have written without a flush.
    unflushed: Cell<bool>,
    /// A task waits for the next flush, or flushes.
    armed: Cell<bool>,
    /// No more segments follow.
    ending: Cell<bool>,
}

/// The result of a step in a segment.
enum StepResult {
    /// The segment continues.
    Further,
    /// All its requests have been started.
    Ended,
    /// The copy has ended.
    Stopped,
}

impl Lane {
    pub(crate) fn new(
        shared: Arc<EngineState>,
        source: ReconnectingHandle,
        target: ReconnectingHandle,
        first: bool,
    ) -> Rc<Lane> {
        let window = RequestWindow::new(shared.resolved.requests, !shared.resolved.adaptive);
        // Without the promise, a new connection to the target may show another disk.
        // nbd: flags.single-conn
        let promised = target.facts().can.contains(Can::MULTI_CONN);
        let used = shared.retries.any() || shared.keeps_track();
        let ledger = Ledger::new(used, first && target.reconnects() && !promised);
        Rc::new(Lane {
            takes_parked: target.facts().takes_parked,
            target_zeroes: !target.facts().emulated.contains(Can::ZERO),
            target_is_zero: Cell::new(shared.target_is_zero.load(Ordering::Relaxed)),
            source,
            target,
            first,
            proof_due: Cell::new(first),
            number: shared.next_lane(),
            pace: LaneLimits {
                window: RefCell::new(window),
                placed: Cell::new(false),
                shown: Cell::new(0),
                least: Cell::new(1),
                size: Cell::new(shared.learned.tuner.request_size()),
                zero_piece: Cell::new(shared.resolved.segment),
            },
            load: LaneLoad {
                requests: Cell::new(0),
                bytes: Cell::new(0),
                resting: Cell::new(0),
                changed: Event::new(),
            },
            work: LaneWork::default(),
            safety: WriteDurability {
                ledger: RefCell::new(ledger),
                unflushed: Cell::new(false),
                armed: Cell::new(false),
                ending: Cell::new(false),
            },
            shared,
        })
    }

    /// Copies segments until none is left, then ends as `ending` says.
    pub(crate) async fn copy(self: &Rc<Self>, queue: &Arc<SegmentQueue>, ending: EndAction) {
        self.safety.ending.set(false);
        self.target_is_zero.set(self.shared.target_is_zero.load(Ordering::Relaxed));
        self.proof_due.set(self.first);
        self.safety.ledger.borrow_mut().begin_run(self.shared.resolved.segment);
        self.take_part(queue).await;
        self.finish(ending).await;
        self.shared.signals.end_work();
    }

    /// Takes segments, once the lane has a place. It may start requests until `end_work`.
    async fn take_part(self: &Rc<Self>, queue: &Arc<SegmentQueue>) {
        let slots = &self.shared.learned.slots;
        let entered = if self.first {
            slots.enter_beyond();
            true
        } else {
            slots.enter(|| self.shared.stopped()).await
        };
        self.shared.signals.begin_work();
        if entered {
            self.take_segments(queue).await;
        }
    }

    /// Takes segments while there are any.
    async fn take_segments(self: &Rc<Self>, queue: &Arc<SegmentQueue>) {
        self.hold_place();
        let mut used = false;
        while !self.shared.stopped() {
            let asked = blockhaul_io::now();
            // A lane that waits starts no request.
            self.shared.signals.end_work();
            let next = queue.next().await;
            self.shared.signals.begin_work();
            let Some(segment) = next else { break };
            if blockhaul_io::elapsed(asked) > IDLE {
                self.shared.learned.tuner.disturb();
            }
            if !std::mem::replace(&mut used, true) {
                self.shared.report.lanes_used.fetch_add(1, Ordering::Relaxed);
                // Not later: what is copied last has the content that the target is recognized by.
                if let Some(marker) = self.shared.retries.marker()
                    && let Err(error) = self.check_side(marker, Side::Target).await
                {
                    self.shared.fail(error);
                    break;
                }
            }
            self.open(segment, queue).await;
            self.work(queue).await;
        }
        self.work.open.borrow_mut().clear();
        self.work.flight.replace(None);
        self.shared.learned.tuner.finish();
        if self.pace.placed.take() {
            self.shared.learned.slots.leave();
        }
    }

    /// Marks that the lane holds a place.
    fn hold_place(&self) {
        self.pace.placed.set(true);
        self.shared.progress.set_connections(self.shared.learned.slots.active());
        self.show_requests(self.pace.window.borrow().limit());
    }

    /// Reports how many requests the lane may have in flight.
    fn show_requests(&self, requests: usize) {
        let before = self.pace.shown.replace(requests);
        self.shared.progress.change_requests(before, requests);
    }

    /// Handles signals: rests while the engine is paused, starts wanted ranges first, and gives up
    /// its place if more lanes are active than pay. Requests in flight continue.
    async fn attend(self: &Rc<Self>, queue: Option<&Arc<SegmentQueue>>) {
        let signals = &self.shared.signals;
        let slots = &self.shared.learned.slots;
        let is_new = || queue.is_some_and(|queue| queue.newest_want() != self.work.last_want.get());
        while !self.shared.stopped() {
            if signals.is(PAUSED) {
                self.rest().await;
                continue;
            }
            if let Some(queue) = queue
                && is_new()
            {
                self.look_at_wants(queue);
            }
            if self.first || !self.pace.placed.get() || self.is_urgent() || !slots.leave_if_over() {
                return;
            }
            self.pace.placed.set(false);
            self.shared.progress.set_connections(slots.active());
            self.show_requests(0);
            let entered =
                slots.enter(|| self.shared.stopped() || signals.is(PAUSED) || is_new()).await;
            if !entered && !self.shared.stopped() {
                // To see what has changed; the place is given up again afterwards.
                slots.enter_beyond();
            }
            if !self.shared.stopped() || entered {
                self.hold_place();
            }
            if entered {
                return;
            }
        }
    }

    /// Starts no request until the engine is resumed.
    async fn rest(&self) {
        self.wait_until(|lane| lane.load.requests.get() == lane.load.resting.get()).await;
        self.shared.signals.end_work();
        self.shared.signals.resumed(|| self.shared.stopped()).await;
        self.shared.signals.begin_work();
        // The delay was not due to the settings.
        self.shared.learned.tuner.disturb();
    }

    /// Like [`Lane::rest`], for a request in flight that is about to send another one.
    pub(super) async fn rest_in_flight(&self) {
        if !self.shared.signals.is(PAUSED) {
            return;
        }
        self.load.resting.set(self.load.resting.get() + 1);
        self.shared.progress.meter.end();
        self.load.changed.notify();
        self.shared.signals.resumed(|| self.shared.stopped()).await;
        self.shared.progress.meter.begin();
        self.load.resting.set(self.load.resting.get() - 1);
    }

    /// Of the open segments, starts the ranges first that a caller waits for.
    fn look_at_wants(&self, queue: &Arc<SegmentQueue>) {
        let since = self.work.last_want.replace(queue.newest_want());
        let mut open = self.work.open.borrow_mut();
        for segment in &*open {
            for wanted in queue.wanted_within(segment.range(), since) {
                segment.hurry(wanted, queue, &self.shared);
            }
        }
        open.sort_by_key(|segment| segment.is_urgent());
    }

    /// Whether a caller waits for the range that this lane starts next.
    fn is_urgent(&self) -> bool {
        self.work.open.borrow().last().is_some_and(|segment| segment.is_urgent())
    }

    /// Current request size in bytes.
    fn request_size(&self) -> u64 {
        let size = self.shared.learned.tuner.request_size();
        self.change_size(size);
        size
    }

    /// Requests have `size` bytes from now on.
    fn change_size(&self, size: u64) {
        let before = self.pace.size.replace(size);
        if before != size {
            self.change_window(|window| window.resize(size as f64 / before as f64));
        }
    }

    /// Ends, as `ending` says, what was copied before.
    pub(crate) async fn end(self: &Rc<Self>, ending: EndAction) {
        self.shared.signals.begin_work();
        self.finish(ending).await;
        self.shared.signals.end_work();
    }

    /// After the last segment: waits for all requests in flight, and makes durable what must be.
    pub(crate) async fn finish(self: &Rc<Self>, ending: EndAction) {
        self.safety.ending.set(true);
        self.load.changed.notify();
        self.wait_or_rest(|lane| lane.load.requests.get() == 0 && !lane.safety.armed.get()).await;
        if let Err(error) = self.conclude(ending).await {
            self.shared.fail(error);
        }
    }

    /// Waits until no request is in flight.
    async fn drained(&self) {
        self.wait_or_rest(|lane| lane.load.requests.get() == 0).await;
    }

    /// Begins a segment: reflinks what the kernel can share, rechecks what only needs that, and
    /// leaves the rest to [`Lane::work`].
    async fn open(self: &Rc<Self>, segment: Segment, queue: &Arc<SegmentQueue>) {
        if self.shared.signals.is(PAUSED) {
            self.rest().await;
        }
        let reading = self.work.reading.borrow().clone();
        if let Some(reading) = reading {
            if reading.differs_before(segment.at) {
                // All others are behind this one.
                queue.stop();
            } else {
                let segment = OpenSegment::new(segment, queue, &self.shared, Some(reading));
                self.work.open.borrow_mut().push(Rc::new(segment));
            }
            return;
        }
        let range = segment.range();
        let clean = |run: &SegmentRun| run.what == RunContent::Clean;
        // Reading what the target does not zero by itself is cheaper than sending zeroes.
        let compare = segment.runs.iter().all(clean)
            && !self.target_zeroes
            && self.shared.retries.lost_target()
            && self.safety.ledger.borrow().failures() == 0;
        let check = segment.check || compare;
        let segment = OpenSegment::new(segment, queue, &self.shared, None);
        if check {
            self.work.flight.replace(Some(segment.flight()));
            drop(segment);
            self.recheck(SuspectSegment { range, again: false }).await;
            self.work.flight.replace(None);
            return;
        }
        self.begin(range);
        segment.leave_out(&self.reflink_segment(&segment).await);
        if self.shared.signals.is(WANTED) {
            for wanted in queue.wanted_within(range, 0) {
                segment.hurry(wanted, queue, &self.shared);
            }
        }
        self.work.open.borrow_mut().push(Rc::new(segment));
    }

    /// Starts requests until all open segments are started completely.
    async fn work(self: &Rc<Self>, queue: &Arc<SegmentQueue>) {
        loop {
            if self.shared.signals.any() {
                self.attend(Some(queue)).await;
                if self.shared.signals.is(WANTED)
                    && !self.is_urgent()
                    && let Some(urgent) = queue.take_urgent()
                {
                    self.open(urgent, queue).await;
                }
            }
            let Some(segment) = self.work.open.borrow().last().cloned() else { return };
            self.work.flight.replace(Some(segment.flight()));
            loop {
                match self.step(&segment).await {
                    StepResult::Further => {}
                    StepResult::Ended => {
                        self.work.open.borrow_mut().pop();
                        self.work.flight.replace(None);
                        self.complete(segment.home);
                        break;
                    }
                    StepResult::Stopped => return,
                }
                if self.shared.signals.any() {
                    break;
                }
            }
        }
    }

    /// Starts the next request of a segment.
    async fn step(self: &Rc<Self>, segment: &OpenSegment) -> StepResult {
        let piece = match segment.next() {
            NextStep::Copy(piece) => piece,
            NextStep::Arrival(arrival) => {
                segment.end_flight(&arrival);
                self.work.flight.replace(Some(segment.flight()));
                return StepResult::Further;
            }
            NextStep::End => return StepResult::Ended,
        };
        if let Some(part) = &segment.reading {
            return self.read_piece(segment, part, piece).await;
        }
        let range = (piece.at, piece.end);
        if !piece.what.is_data() {
            if self.shared.stopped() {
                return StepResult::Stopped;
            }
            self.turn(0).await;
            let known = piece.what == RunContent::Clean;
            let home = segment.home;
            self.start(home, 0, move |lane| lane.zero_run(home, range, known));
            segment.started_to(piece.end);
            return StepResult::Further;
        }
        let started = match self.copy_range(segment, range).await {
            None => self.request(segment, range).await,
            started => started,
        };
        match started {
            Some(to) => {
                segment.started_to(to);
                StepResult::Further
            }
            None => StepResult::Stopped,
        }
    }

    /// Starts the first request of a range of a segment; returns its end. `None`: the copy has
    /// ended.
    async fn request(
        self: &Rc<Self>,
        segment: &OpenSegment,
        (at, stop): SegmentRange,
    ) -> Option<u64> {
        // Aligned to multiples of the request size.
        let size = self.request_size();
        let len = (size - at % size).min(stop - at);
        self.turn(len).await;
        if self.shared.stopped() {
            return None;
        }
        let look = self.looks(segment);
        segment.requests.set(segment.requests.get() + 1);
        let chunk = SegmentChunk { home: segment.home, at, look };
        match self.room(len, look).await {
            Ok(room) => self.start(chunk.home, len, move |lane| lane.chunk(chunk, room)),
            Err(error) => {
                self.shared.fail(error);
                return None;
            }
        }
        Some(at + len)
    }

    /// Starts tracking a segment in the ledger.
    fn begin(&self, range: SegmentRange) {
        self.note_doubts();
        self.safety.unflushed.set(true);
        self.safety.ledger.borrow_mut().begin(range);
    }

    /// Marks the segment at `home` as complete once its requests have completed.
    fn complete(self: &Rc<Self>, home: SegmentStart) {
        if self.safety.ledger.borrow_mut().complete(home) {
            self.arm();
        }
    }

    /// A reservation for a request. It needs at most one buffer: the data is written from the
    /// buffer it was read into.
    async fn room(&self, len: u64, look: bool) -> Result<Reservation> {
        let pool = &self.shared.memory.pool;
        let bytes = len as usize;
        let room = match &self.shared.memory.late {
            Some(late) => late.reserve_late(bytes, pool).await,
            None => pool.reserve(bytes).await,
        };
        match room {
            Ok(room) => {
                // Data that is not inspected may stay in the kernel.
                let room = room.counted(&self.shared.progress.counters.tally);
                let stays = !look && self.takes_parked && self.shared.streaming.is_none();
                Ok(if stays { room.parkable() } else { room })
            }
            Err(error) => {
                let text = "no buffer for a request of this size";
                Err(Error::new(Kind::NoMemory, text).because(error).into())
            }
        }
    }

    /// Waits until another request of `len` bytes may be in flight, within the rate limit.
    async fn turn(&self, len: u64) {
        let resolved = &self.shared.resolved;
        resolved.pace(len, || self.shared.stopped()).await;
        self.wait_or_rest(|lane| {
            lane.load.requests.get() < lane.limit()
                && (lane.load.bytes.get() == 0
                    || lane.load.bytes.get() + len <= resolved.queue_size)
        })
        .await;
    }

    /// Requests that may be in flight now.
    fn limit(&self) -> usize {
        self.pace.window.borrow().limit().max(self.pace.least.get())
    }

    /// Waits for requests in flight; if all of them rest, until the engine is resumed.
    async fn wait_or_rest(&self, ready: impl Fn(&Lane) -> bool) {
        let all_rest = |lane: &Lane| {
            let resting = lane.load.resting.get();
            resting > 0 && resting == lane.load.requests.get()
        };
        loop {
            self.wait_until(|lane| ready(lane) || all_rest(lane)).await;
            if ready(self) {
                return;
            }
            self.rest().await;
            // Requests that rested continue first.
            blockhaul_io::yield_now().await;
        }
    }

    async fn wait_until(&self, ready: impl Fn(&Lane) -> bool) {
        loop {
            let mark = self.load.changed.mark();
            if ready(self) {
                return;
            }
            self.load.changed.wait_after(mark).await;
        }
    }

    /// Starts a request of the segment at `home`. Its future is large, so it is built in place.
    fn start<F>(
        self: &Rc<Self>,
        home: SegmentStart,
        len: u64,
        request: impl FnOnce(Rc<Lane>) -> F + 'static,
    ) where
        F: Future<Output = Result<()>>,
    {
        self.load.requests.set(self.load.requests.get() + 1);
        self.shared.progress.meter.begin();
        self.load.bytes.set(self.load.bytes.get() + len);
        self.safety.ledger.borrow_mut().request(home);
        let lane = self.clone();
        // When the last one of these is dropped, the wanted range has arrived.
        let flight = self.work.flight.borrow().clone();
        let started = (len > 0).then(|| self.shared.learned.tuner.clock());
        // Only requests of full size show how full the path is.
        let full = len == self.pace.size.get();
        drop(blockhaul_io::start(async move {
            if let Err(error) = request(lane.clone()).await {
                lane.safety.ledger.borrow_mut().abandon(home);
                lane.shared.fail(error);
            }
            if let Some(started) = started {
                let now = lane.shared.learned.tuner.clock();
                let time = now.saturating_sub(started);
                lane.shared.learned.tuner.note(len, time, now);
                if full {
                    lane.change_window(|window| window.learn(time, now));
                }
            }
            if lane.safety.ledger.borrow_mut().completed(home) {
                lane.arm();
            }
            lane.load.requests.set(lane.load.requests.get() - 1);
            lane.shared.progress.meter.end();
            lane.load.bytes.set(lane.load.bytes.get() - len);
            drop(flight);
            lane.load.changed.notify();
        }));
    }

    fn change_window(&self, change: impl FnOnce(&mut RequestWindow)) {
        let mut window = self.pace.window.borrow_mut();
        let before = window.limit();
        change(&mut window);
        if self.pace.placed.get() && window.limit() != before {
            self.show_requests(window.limit());
        }
    }

    /// Whether the next request of a segment is checked for zeroes.
    fn looks(&self, segment: &OpenSegment) -> bool {
        let resolved = &self.shared.resolved;
        resolved.sparse != 0
            && (!resolved.sampled
                || !segment.extents_known
                || segment.requests.get().is_multiple_of(SAMPLE_EVERY)
                || self.found_zeroes_in(segment))
    }

    /// Whether zeroes were found in a segment, or in the one before.
    fn found_zeroes_in(&self, segment: &OpenSegment) -> bool {
        let found = &self.shared.learned.zeroes;
        let changes = found.changes();
        let (seen, zeroes) = segment.zeroes.get();
        if seen == changes {
            return zeroes;
        }
        let zeroes = found.contain(segment.home.offset() / self.shared.resolved.segment);
        segment.zeroes.set((changes, zeroes));
        zeroes
    }
}
