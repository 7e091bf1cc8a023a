//! Lanes: each takes segments from the plan and moves them from its source handle to its target
//! handle, with a bounded window of requests in flight.
//!
//! What fails and may pass is carried out again, request by request, from a fresh read of the source:
//! nothing is kept of what was written, so that payloads can stay in the kernel. What becomes of
//! writes over connections that were lost is in `recheck`.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use block::{Can, DeviceExt, Error, Flags, Kind, Op, Pending, Reply, Request, Result};
use io::{Data, Event, Room};

use crate::copy::Job;
use crate::end::{End, Side};
use crate::ledger::{Ledger, Range, Suspect};
use crate::plan::{Segment, What};
use crate::route;
use crate::trust::{SAMPLE, Sample};
use crate::window::Window;
use crate::zeroes;

/// A wait for a segment that is longer than that leaves the devices idle.
const IDLE: Duration = Duration::from_millis(5);
/// One request in so many is looked at for zeroes when samples suffice.
pub(crate) const SAMPLE_EVERY: u64 = 16;

/// Zeroing that took less than this may be four times as long the next time.
const QUICK: Duration = Duration::from_secs(1);

/// One source handle and one target handle, on one worker.
pub(crate) struct Lane {
    pub(crate) job: Arc<Job>,
    pub(crate) source: End,
    pub(crate) target: End,
    takes_parked: bool,
    /// The target zeroes without being sent zeroes.
    target_zeroes: bool,
    /// The first lane brings the sample by which others are examined.
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
    pub(crate) wrote: Cell<bool>,
    pub(crate) done: Event,
    /// Set while the first lane has not handed out a sample.
    sample_due: Cell<bool>,
    pub(crate) ledger: RefCell<Ledger>,
    /// For the journal.
    pub(crate) number: u32,
    /// A task waits for the next flush, or flushes.
    pub(crate) armed: Cell<bool>,
    /// No more segments come.
    pub(crate) ending: Cell<bool>,
}

/// How far a segment is.
pub(crate) struct Seen {
    /// The source told its extents.
    pub(crate) told: bool,
    /// Requests of the segment so far; what the kernel copied counts as if by requests.
    pub(crate) requests: u64,
}

/// A request that failed: over which handle, and how.
pub(crate) struct Failed {
    side: Side,
    generation: u64,
    error: Error,
}

/// What became of the bytes of a request.
#[derive(Debug, Default)]
pub(crate) struct Done {
    data: u64,
    zeroed: u64,
    skipped: u64,
    /// Of `data`: looked at.
    seen: u64,
    /// Zeroes that were written as data.
    zeroes: u64,
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
            wrote: Cell::new(false),
            done: Event::new(),
            sample_due: Cell::new(first),
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
            let asked = Instant::now();
            let Some(segment) = self.job.plan.next().await else { break };
            if asked.elapsed() > IDLE {
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
    pub(crate) fn request_size(&self) -> u64 {
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
    pub(crate) async fn drained(&self) {
        self.wait_until(|lane| lane.in_flight.get() == 0).await;
    }

    async fn segment(self: &Rc<Self>, segment: Segment) {
        let home = segment.at;
        let range = (home, home + segment.len());
        if segment.check {
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
    pub(crate) async fn request(
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
    pub(crate) fn begin(&self, range: Range) {
        self.note_connection();
        self.ledger.borrow_mut().begin(range);
    }

    /// Ends the account of the segment at `home` when its requests have completed.
    pub(crate) fn complete(self: &Rc<Self>, home: u64) {
        if self.ledger.borrow_mut().complete(home) {
            self.arm();
        }
    }

    /// Room for a request. Its worst need is one buffer: it is read into and written from.
    pub(crate) async fn room(&self, len: u64, look: bool) -> Result<Room> {
        let (pool, bytes) = (&self.job.pool, len as usize);
        let room = match &self.job.late {
            Some(late) => late.reserve_late(bytes, pool).await,
            None => pool.reserve(bytes).await,
        };
        match room {
            Ok(room) => {
                // What nobody looks at may stay in the kernel on its way.
                let room = room.tallied(&self.job.progress.counters.tally);
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
    pub(crate) async fn turn(&self, len: u64) {
        let settled = &self.job.settled;
        self.make_place().await;
        settled.pace(len, || self.job.stopped()).await;
        self.wait_until(|lane| {
            lane.in_flight.get() < lane.window.borrow().limit()
                && (lane.bytes.get() == 0 || lane.bytes.get() + len <= settled.queue_size)
        })
        .await;
    }

    pub(crate) async fn wait_until(&self, ready: impl Fn(&Lane) -> bool) {
        loop {
            let mark = self.done.mark();
            if ready(self) {
                return;
            }
            self.done.wait_after(mark).await;
        }
    }

    /// Starts a request of the segment at `home`.
    pub(crate) fn start(
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
        drop(io::start(async move {
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
    pub(crate) fn looks(&self, seen: &Seen, at: u64) -> bool {
        let settled = &self.job.settled;
        settled.sparse != 0
            && (!settled.sampled
                || !seen.told
                || seen.requests.is_multiple_of(SAMPLE_EVERY)
                || self.job.has_zeroes(at))
    }

    /// Zeroes a run, which may be nearly the whole device: in pieces that grow while the target is
    /// quick, so that few are needed, and a copy that is stopped need not wait for long. `known`: it
    /// need not be done.
    pub(crate) async fn zero_run(
        self: Rc<Self>,
        home: u64,
        mut at: u64,
        len: u64,
        known: bool,
    ) -> Result<()> {
        let known = known || self.job.settled.target_is_zero;
        let end = at + len;
        let mut attempts = 0;
        while at < end {
            if self.job.stopped() {
                self.ledger.borrow_mut().abandon(home);
                return Ok(());
            }
            let at_once = known && self.job.fold.is_none();
            let piece = self.zero_piece.get();
            let part = if at_once { end - at } else { piece.min(end - at) };
            let (started, mut done) = (Instant::now(), Done::default());
            match self.zero(home, at, part, known, &mut done).await {
                Ok(()) => {
                    self.count(&done);
                    self.digest_zeroes(at, part).await;
                    at += part;
                    attempts = 0;
                    if started.elapsed() < QUICK && part == piece {
                        self.zero_piece.set(piece.saturating_mul(4));
                    }
                }
                Err(failed) => self.recover(failed, &mut attempts).await?,
            }
        }
        Ok(())
    }

    /// Has zeroes in the digest.
    async fn digest_zeroes(&self, at: u64, len: u64) {
        let Some(fold) = &self.job.fold else { return };
        if !fold.hashes_zeroes() || len <= self.job.settled.request_size {
            return fold.add(at, fold.zeroes(at, len));
        }
        let job = self.job.clone();
        let hashed = io::offload(move || job.fold.as_ref().map(|fold| fold.zeroes(at, len)));
        // Lost only when the program ends.
        if let Ok(Some(values)) = hashed.await {
            fold.add(at, values);
        }
    }

    /// Makes a range of the target read as zeroes, unless it is known that it does.
    pub(crate) async fn zero(
        &self,
        home: u64,
        at: u64,
        len: u64,
        known: bool,
        done: &mut Done,
    ) -> Result<(), Failed> {
        if known {
            done.skipped += len;
            return Ok(());
        }
        let flags = if self.job.settled.allocated { Flags::NO_HOLE } else { Flags::empty() };
        self.change(home, Request::zero(at, len).with(flags)).await?;
        done.zeroed += len;
        done.zeroes += if self.target_zeroes { 0 } else { len };
        Ok(())
    }

    async fn chunk(self: Rc<Self>, home: u64, at: u64, room: Room, look: bool) -> Result<()> {
        let len = room.len() as u64;
        let mut room = Some(room);
        let mut attempts = 0;
        loop {
            let mut done = Done::default();
            let room = match room.take() {
                Some(room) => room,
                None => self.room(len, look).await?,
            };
            match self.try_chunk(home, at, room, look, &mut done).await {
                Ok(()) => {
                    self.count(&done);
                    return Ok(());
                }
                Err(failed) => self.recover(failed, &mut attempts).await?,
            }
        }
    }

    async fn try_chunk(
        &self,
        home: u64,
        at: u64,
        room: Room,
        look: bool,
        done: &mut Done,
    ) -> Result<(), Failed> {
        let len = room.len() as u64;
        let data = match self.read(at, room).await? {
            Some(data) => data,
            None => {
                let known = self.job.settled.target_is_zero;
                self.zero(home, at, len, known, done).await?;
                self.digest_zeroes(at, len).await;
                return Ok(());
            }
        };
        if self.job.stopped() {
            self.ledger.borrow_mut().abandon(home);
            return Ok(());
        }
        self.know_source(at, &data, look).await;
        let values = self.job.fold.as_ref().map(|fold| (fold, fold.values(at, data.bytes())));
        self.put(home, at, data, look, done).await?;
        if let Some((fold, values)) = values {
            fold.add(at, values);
        }
        Ok(())
    }

    /// Keeps a block of the source, so that it is known again after its connection was lost.
    async fn know_source(&self, at: u64, data: &Data, look: bool) {
        let retries = &self.job.retries;
        if !self.source.reconnects() || !retries.wants_sample() {
            return;
        }
        if look {
            retries.keep_sample(at, data.bytes());
        } else if self.job.settled.sparse == 0 && self.first {
            // Nothing is looked at otherwise, and what is on its way in the kernel stays there.
            let len = data.len().min(SAMPLE);
            if let Ok(sample) = self.source.device().read(at, len).await {
                retries.keep_sample(at, sample.bytes());
            }
        }
    }

    /// Writes what was read.
    async fn put(
        &self,
        home: u64,
        at: u64,
        data: Data,
        look: bool,
        done: &mut Done,
    ) -> Result<(), Failed> {
        let len = data.len() as u64;
        if !look {
            // Somebody may wait for a sample of it; else it goes on without a second holder.
            let sample = self.is_sample_due().then(|| data.clone());
            self.change(home, Request::write(at, data)).await?;
            done.data += len;
            return match sample {
                Some(data) => self.offer_sample(at, &data).await,
                None => Ok(()),
            };
        }
        let runs = zeroes::runs(data.bytes(), at, self.job.settled.sparse);
        if let [(_, _, false)] = runs[..] {
            done.zeroes += self.zeroes_within(data.bytes());
            self.change(home, Request::write(at, data.clone())).await?;
            (done.data, done.seen) = (len, len);
            return self.offer_sample(at, &data).await;
        }
        if self.job.settled.sampled {
            self.job.found_zeroes(at);
        }
        self.write_runs(home, at, &data, runs, done).await?;
        self.offer_sample(at, &data).await
    }

    /// Writes data and zeroes. Parts go out together; all are awaited, also after an error.
    async fn write_runs(
        &self,
        home: u64,
        at: u64,
        data: &Data,
        runs: Vec<(usize, usize, bool)>,
        done: &mut Done,
    ) -> Result<(), Failed> {
        let generation = self.target.generation();
        let mut parts = Vec::with_capacity(runs.len());
        for (start, part, zero) in runs {
            let (here, len) = (at + start as u64, part as u64);
            if zero && self.job.settled.target_is_zero {
                done.skipped += len;
                continue;
            }
            let request = match zero {
                true => Request::zero(here, len),
                false => {
                    let data = data.slice(start, part);
                    done.zeroes += self.zeroes_within(data.bytes());
                    let op = Op::Write(data);
                    Request { op, at: here, len, flags: Flags::empty() }
                }
            };
            parts.push((len, zero, self.submit_change(home, request)));
        }
        let asked = Instant::now();
        let mut result = Ok(());
        for (len, zero, pending) in parts {
            let reply = pending.await;
            self.job.progress.meter.took(Side::Target, asked.elapsed());
            match reply {
                Ok(_) if zero => {
                    done.zeroed += len;
                    done.zeroes += if self.target_zeroes { 0 } else { len };
                }
                Ok(_) => {
                    done.data += len;
                    done.seen += len;
                }
                Err(error) => {
                    let failed = Failed { side: Side::Target, generation, error };
                    result = result.and(Err(failed));
                }
            }
        }
        result
    }

    /// Reads from the source; `None`: all zero.
    pub(crate) async fn read(&self, at: u64, room: Room) -> Result<Option<Data>, Failed> {
        let generation = self.source.generation();
        let asked = Instant::now();
        let reply = self.source.device().submit(Request::read(at, room)).await;
        self.job.progress.meter.took(Side::Source, asked.elapsed());
        match reply {
            Ok(Reply::Data(data)) => Ok(Some(data)),
            Ok(_) => Ok(None),
            Err(error) => Err(Failed { side: Side::Source, generation, error }),
        }
    }

    /// Changes the target.
    pub(crate) async fn change(&self, home: u64, request: Request) -> Result<(), Failed> {
        let generation = self.target.generation();
        let asked = Instant::now();
        let reply = self.submit_change(home, request).await;
        self.job.progress.meter.took(Side::Target, asked.elapsed());
        match reply {
            Ok(_) => Ok(()),
            Err(error) => Err(Failed { side: Side::Target, generation, error }),
        }
    }

    fn submit_change(&self, home: u64, request: Request) -> Pending {
        self.note_connection();
        self.wrote.set(true);
        self.ledger.borrow_mut().wrote(home);
        self.target.device().submit(request)
    }

    /// A failure of a request to the target that is none of these.
    pub(crate) fn target_failed(&self, generation: u64, error: Error) -> Failed {
        Failed { side: Side::Target, generation, error }
    }

    /// Waits until what failed can be tried again, or tells that it cannot.
    pub(crate) async fn recover(&self, failed: Failed, attempts: &mut u32) -> Result<()> {
        let Failed { side, generation, error } = failed;
        let end = if side == Side::Source { &self.source } else { &self.target };
        let recovered = end.recover(error, generation, attempts).await;
        self.note_connection();
        recovered
    }

    pub(crate) fn count(&self, done: &Done) {
        self.job.progress.add_data(done.data);
        self.job.progress.add_zeroed(done.zeroed);
        self.job.progress.add_skipped(done.skipped);
        route::add(&self.job.progress.counters.seen, done.seen);
        route::add(&self.job.progress.counters.zeroes_written, done.zeroes);
    }

    /// Bytes in blocks of zeroes that are too short to be zeroed.
    fn zeroes_within(&self, bytes: &[u8]) -> u64 {
        match self.job.settled.sparse > zeroes::BLOCK as u32 {
            true => zeroes::count(bytes),
            false => 0,
        }
    }

    fn is_sample_due(&self) -> bool {
        self.first && self.job.trust.wanted() && self.sample_due.get()
    }

    /// Hands out the first block with content that was written, for lanes that must be examined.
    async fn offer_sample(&self, at: u64, data: &Data) -> Result<(), Failed> {
        if !self.is_sample_due() {
            return Ok(());
        }
        let Some(sample) = Sample::of(at, data.bytes()) else { return Ok(()) };
        self.sample_due.set(false);
        if self.target.facts().can.contains(Can::FLUSH) {
            let generation = self.target.generation();
            if let Err(error) = self.target.device().submit(Request::flush()).await {
                self.sample_due.set(true);
                return Err(self.target_failed(generation, error));
            }
        }
        self.job.trust.settle(Some(sample));
        Ok(())
    }
}
