//! Lanes: each takes segments from the plan and moves them from its source handle to its target
//! handle, with a bounded window of requests in flight.
//!
//! What fails and may pass is carried out again, request by request, from a fresh read of the source:
//! nothing is kept of what was written, so that payloads can stay in the kernel. What becomes of
//! writes over connections that were lost is in `recheck`.

mod chunk;
mod copy_range;
mod recheck;
mod reflink;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use blockhaul_block::{Can, Error, Kind, Result};
use blockhaul_io::{Event, Reservation};

use crate::end::End;
use crate::job::Job;
use crate::ledger::{Ledger, Range, Suspect};
use crate::segment::{Run, Segment, What};
use crate::window::Window;

/// A wait for a segment that is longer than that leaves the devices idle.
const IDLE: Duration = Duration::from_millis(5);

/// One request in so many is looked at for zeroes when samples suffice.
const SAMPLE_EVERY: u64 = 16;

/// One source handle and one target handle, on one worker.
pub(crate) struct Lane {
    job: Arc<Job>,
    source: End,
    target: End,
    takes_parked: bool,
    /// The target zeroes without being sent zeroes.
    target_zeroes: bool,
    /// The first lane brings the proof by which others are examined.
    first: bool,
    window: RefCell<Window>,
    /// Holds one of the places for lanes at work.
    placed: Cell<bool>,
    /// Bytes of a request, as the window knows it.
    size: Cell<u64>,
    in_flight: Cell<usize>,
    bytes: Cell<u64>,
    /// Bytes that are zeroed in one request.
    zero_piece: Cell<u64>,
    /// There is something that a flush would make durable: also zeroes that the target has already,
    /// which somebody may have made without a flush.
    unflushed: Cell<bool>,
    done: Event,
    /// Set while the first lane has not handed out a proof.
    proof_due: Cell<bool>,
    ledger: RefCell<Ledger>,
    /// For the journal.
    number: u32,
    /// A task waits for the next flush, or flushes.
    armed: Cell<bool>,
    /// No more segments come.
    ending: Cell<bool>,
}

/// How far a segment is.
struct Seen {
    /// The source told its extents.
    told: bool,
    /// Requests of the segment so far; what the kernel copied counts as if by requests.
    requests: u64,
}

impl Lane {
    pub(crate) fn new(job: Arc<Job>, source: End, target: End, first: bool) -> Rc<Lane> {
        let window = Window::new(job.settled.requests, !job.settled.adaptive);
        // A new connection of a target without the promise may show another disk.
        let promised = target.facts().can.contains(Can::MULTI_CONN);
        let used = job.retries.any() || job.journal.is_some();
        let ledger = Ledger::new(used, first && target.reconnects() && !promised);
        Rc::new(Lane {
            window: RefCell::new(window),
            takes_parked: target.facts().takes_parked,
            target_zeroes: !target.facts().emulated.contains(Can::ZERO),
            source,
            target,
            first,
            placed: Cell::new(false),
            size: Cell::new(job.tuner.request_size()),
            in_flight: Cell::new(0),
            bytes: Cell::new(0),
            zero_piece: Cell::new(job.settled.segment),
            unflushed: Cell::new(false),
            done: Event::new(),
            proof_due: Cell::new(first),
            number: job.next_lane(),
            armed: Cell::new(false),
            ending: Cell::new(false),
            ledger: RefCell::new(ledger),
            job,
        })
    }

    pub(crate) async fn run(self: Rc<Self>) {
        if self.first {
            self.job.gate.enter_first();
        } else if !self.job.gate.enter(|| self.job.stopped()).await {
            return self.finish().await;
        }
        self.begin_work();
        let mut used = false;
        while !self.job.stopped() {
            let asked = blockhaul_io::now();
            let Some(segment) = self.job.plan.next().await else { break };
            if blockhaul_io::elapsed(asked) > IDLE {
                self.job.tuner.disturb();
            }
            if !std::mem::replace(&mut used, true) {
                self.job.lanes.fetch_add(1, Ordering::Relaxed);
            }
            self.segment(segment).await;
        }
        self.job.tuner.finish();
        if self.placed.take() {
            self.job.gate.leave();
        }
        self.finish().await;
    }

    /// The lane has a place.
    fn begin_work(&self) {
        self.placed.set(true);
        self.job.progress.set_connections(self.job.gate.active());
        self.job.progress.change_requests(0, self.window.borrow().limit());
    }

    /// Makes place where there are more lanes at work than pay; what is in flight goes on.
    async fn make_place(&self) {
        if self.first || !self.placed.get() || !self.job.gate.leave_if_over() {
            return;
        }
        self.placed.set(false);
        self.job.progress.set_connections(self.job.gate.active());
        self.job.progress.change_requests(self.window.borrow().limit(), 0);
        if self.job.gate.enter(|| self.job.stopped()).await {
            self.begin_work();
        }
    }

    /// Bytes of a request now.
    fn request_size(&self) -> u64 {
        let size = self.job.tuner.request_size();
        let before = self.size.replace(size);
        if before != size {
            self.change_window(|window| window.resize(size as f64 / before as f64));
        }
        size
    }

    /// After the last segment: everything that is out is awaited, and what must last is made to.
    pub(crate) async fn finish(self: &Rc<Self>) {
        self.ending.set(true);
        self.done.notify();
        self.wait_until(|lane| lane.in_flight.get() == 0 && !lane.armed.get()).await;
        if let Err(error) = self.conclude().await {
            self.job.fail(error);
        }
    }

    /// Waits until nothing is in flight.
    async fn drained(&self) {
        self.wait_until(|lane| lane.in_flight.get() == 0).await;
    }

    async fn segment(self: &Rc<Self>, segment: Segment) {
        let home = segment.at;
        let range = (home, home + segment.len());
        let clean = |run: &Run| run.what == What::Clean;
        // Reading what the target does not zero by itself is cheaper than sending zeroes.
        let compare = segment.runs.iter().all(clean)
            && !self.target_zeroes
            && self.job.retries.lost_target()
            && self.ledger.borrow().failures() == 0;
        if segment.check || compare {
            return self.recheck(Suspect { range, again: false }).await;
        }
        self.begin(range);
        let mut at = home;
        let mut seen = Seen { told: segment.told, requests: 0 };
        let mut moved = self.offload(home, &segment.runs).await.into_iter().peekable();
        for run in segment.runs {
            let end = at + run.len;
            if !run.what.is_data() {
                if self.job.stopped() {
                    return;
                }
                self.turn(0).await;
                let known = run.what == What::Clean;
                self.start(home, 0, Rc::clone(self).zero_run(home, at, run.len, known));
                at = end;
                continue;
            }
            while at < end {
                if let Some((_, to)) = moved.next_if(|moved| moved.0 == at) {
                    at = to;
                    continue;
                }
                let stop = moved.peek().map_or(end, |moved| moved.0.min(end));
                let done = match self.copy_range(home, (at, stop), &mut seen).await {
                    None => self.request(home, (at, stop), &mut seen).await,
                    done => done,
                };
                match done {
                    Some(to) => at = to,
                    None => return,
                }
            }
        }
        self.complete(home);
    }

    /// Starts the first request of a range of the segment at `home`; gives where it ends. `None`: the
    /// copy is over.
    async fn request(
        self: &Rc<Self>,
        home: u64,
        (at, stop): Range,
        seen: &mut Seen,
    ) -> Option<u64> {
        // On the grid of the request size, so that requests are aligned.
        let size = self.request_size();
        let len = (size - at % size).min(stop - at);
        self.turn(len).await;
        if self.job.stopped() {
            return None;
        }
        let look = self.looks(seen, at);
        seen.requests += 1;
        match self.room(len, look).await {
            Ok(room) => self.start(home, len, Rc::clone(self).chunk(home, at, room, look)),
            Err(error) => {
                self.job.fail(error);
                return None;
            }
        }
        Some(at + len)
    }

    /// Starts the account of a segment.
    fn begin(&self, range: Range) {
        self.note_doubts();
        self.unflushed.set(true);
        self.ledger.borrow_mut().begin(range);
    }

    /// Ends the account of the segment at `home` when its requests have completed.
    fn complete(self: &Rc<Self>, home: u64) {
        if self.ledger.borrow_mut().complete(home) {
            self.arm();
        }
    }

    /// Room for a request. Its worst need is one buffer: it is read into and written from.
    async fn room(&self, len: u64, look: bool) -> Result<Reservation> {
        let (pool, bytes) = (&self.job.pool, len as usize);
        let room = match &self.job.late {
            Some(late) => late.reserve_late(bytes, pool).await,
            None => pool.reserve(bytes).await,
        };
        match room {
            Ok(room) => {
                // What nobody looks at may stay in the kernel on its way.
                let room = room.counted(&self.job.progress.counters.tally);
                let stays = !look && self.takes_parked && self.job.fold.is_none();
                Ok(if stays { room.parkable() } else { room })
            }
            Err(error) => {
                let text = "no buffer for a request of this size";
                Err(Error::new(Kind::NoMemory, text).because(error))
            }
        }
    }

    /// Waits until another request of `len` bytes may be in flight, and is within the limit.
    async fn turn(&self, len: u64) {
        let settled = &self.job.settled;
        self.make_place().await;
        settled.pace(len, || self.job.stopped()).await;
        self.wait_until(|lane| {
            lane.in_flight.get() < lane.window.borrow().limit()
                && (lane.bytes.get() == 0 || lane.bytes.get() + len <= settled.queue_size)
        })
        .await;
    }

    async fn wait_until(&self, ready: impl Fn(&Lane) -> bool) {
        loop {
            let mark = self.done.mark();
            if ready(self) {
                return;
            }
            self.done.wait_after(mark).await;
        }
    }

    /// Starts a request of the segment at `home`.
    fn start(
        self: &Rc<Self>,
        home: u64,
        len: u64,
        work: impl Future<Output = Result<()>> + 'static,
    ) {
        self.in_flight.set(self.in_flight.get() + 1);
        self.job.progress.meter.begin();
        self.bytes.set(self.bytes.get() + len);
        self.ledger.borrow_mut().request(home);
        let lane = self.clone();
        let started = (len > 0).then(|| self.job.tuner.clock());
        // Only what fills the window tells how full the path is.
        let full = len == self.size.get();
        drop(blockhaul_io::start(async move {
            if let Err(error) = work.await {
                lane.ledger.borrow_mut().abandon(home);
                lane.job.fail(error);
            }
            if let Some(started) = started {
                let now = lane.job.tuner.clock();
                let time = now.saturating_sub(started);
                lane.job.tuner.note(len, time, now);
                if full {
                    lane.change_window(|window| window.learn(time, now));
                }
            }
            if lane.ledger.borrow_mut().completed(home) {
                lane.arm();
            }
            lane.in_flight.set(lane.in_flight.get() - 1);
            lane.job.progress.meter.end();
            lane.bytes.set(lane.bytes.get() - len);
            lane.done.notify();
        }));
    }

    fn change_window(&self, change: impl FnOnce(&mut Window)) {
        let mut window = self.window.borrow_mut();
        let before = window.limit();
        change(&mut window);
        if self.placed.get() && window.limit() != before {
            self.job.progress.change_requests(before, window.limit());
        }
    }

    /// Whether zeroes are looked for in the next request of a segment, at `at`.
    fn looks(&self, seen: &Seen, at: u64) -> bool {
        let settled = &self.job.settled;
        settled.sparse != 0
            && (!settled.sampled
                || !seen.told
                || seen.requests.is_multiple_of(SAMPLE_EVERY)
                || self.job.has_zeroes(at))
    }
}
