//! Lanes: each takes segments from the plan and moves them from its source handle to its target
//! handle, with a bounded window of requests in flight.

use std::cell::{Cell, RefCell};
use std::collections::HashSet;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use block::{Can, Device, Error, Flags, Kind, Op, Reply, Request, Result, Stack};
use io::{Event, Pool, Remote};

use crate::options::{MAX_REQUEST, MIN_REQUEST, Options, SEGMENT, Summary};
use crate::plan::{Plan, Segment};
use crate::progress::Progress;
use crate::trust::{Sample, Trust};
use crate::window::Window;
use crate::zeroes;

/// Time for a further connection to be made; the copy goes on meanwhile and without it.
const DIAL_MAX: Duration = Duration::from_secs(10);
/// One request in so many is looked at for zeroes when samples suffice.
const SAMPLE_EVERY: u64 = 16;
/// Target blocks larger than this do not widen what is copied as data.
const GRAIN_MAX: u32 = 64 << 10;

/// Copies all of `source` to the start of `target`, which must be at least as large. Call it on a
/// worker; lanes are spread over all workers.
pub async fn copy(
    source: &Stack,
    target: &Stack,
    options: &Options,
    pool: &Pool,
    progress: &Arc<Progress>,
) -> Result<Summary> {
    let started = Instant::now();
    let (from, to) = (source.device().facts(), target.device().facts());
    check_target(from.size, &to)?;
    progress.set_total(from.size);
    let settled = Settled::new(options, source.device(), target.device(), pool);
    let plan = Arc::new(Plan::new());
    let job = Arc::new(Job {
        plan: plan.clone(),
        settled,
        progress: progress.clone(),
        pool: pool.clone(),
        first_error: std::sync::Mutex::new(None),
        trust: Trust::new(),
        zeroes_in: std::sync::Mutex::default(),
        lanes: AtomicUsize::new(0),
        warnings: std::sync::Mutex::default(),
    });
    let grain = u64::from(to.block.preferred.max(to.block.minimum).min(GRAIN_MAX));
    let making = io::spawn(plan.clone().make(
        source.device().clone(),
        from.size,
        grain,
        options.extents,
        progress.clone(),
    ));
    let mut lanes = Vec::new();
    for index in 1..job.settled.connections {
        let (job, source, target) = (job.clone(), source.clone(), target.clone());
        let lane = Remote::to(index).spawn(move || further_lane(job, source, target));
        lanes.push(lane);
    }
    job.clone().first_lane(source.device().clone(), target.device().clone()).await;
    for lane in lanes {
        if lane.await.is_err() {
            job.fail(Error::new(Kind::Io, "a worker ended before its lane"));
        }
    }
    making.await;
    if let Some(error) = job.first_error.lock().expect("no panic under this lock").take() {
        return Err(error);
    }
    if progress.is_cancelled() {
        return Err(Error::new(Kind::ShuttingDown, "stopped before the end of the copy"));
    }
    let done = progress.snapshot();
    let warnings = std::mem::take(&mut *job.warnings.lock().expect("no panic under this lock"));
    Ok(Summary {
        size: from.size,
        data: done.data,
        zeroed: done.zeroed,
        skipped: done.skipped,
        lanes: job.lanes.load(Ordering::Relaxed),
        elapsed: started.elapsed(),
        warnings,
    })
}

/// Whether a target can take `size` bytes.
pub(crate) fn check_target(size: u64, target: &block::Facts) -> Result<()> {
    if !target.can.contains(Can::WRITE) {
        let text = "the target is read-only: choose another, or serve it for writing";
        return Err(Error::new(Kind::ReadOnly, text).on(&target.name));
    }
    if target.size < size {
        let text = format!(
            "the target ({} bytes) is smaller than the source ({size} bytes): make it larger",
            target.size
        );
        return Err(Error::new(Kind::NoSpace, text).on(&target.name));
    }
    Ok(())
}

/// Options with what the devices demand.
#[derive(Debug, Clone)]
pub(crate) struct Settled {
    pub(crate) connections: usize,
    pub(crate) requests: usize,
    pub(crate) adaptive: bool,
    pub(crate) request_size: u64,
    pub(crate) queue_size: u64,
    /// Grain of zero detection; 0: bytes are not looked at.
    pub(crate) sparse: u32,
    pub(crate) sampled: bool,
    pub(crate) allocated: bool,
    pub(crate) target_is_zero: bool,
    pub(crate) flush: bool,
}

impl Settled {
    pub(crate) fn new(
        options: &Options,
        source: &Arc<dyn Device>,
        target: &Arc<dyn Device>,
        pool: &Pool,
    ) -> Settled {
        let (from, to) = (source.facts(), target.facts());
        // As nbdcopy: at least what both sides prefer, and never more than they take.
        let wish = options.request_size.clamp(MIN_REQUEST, MAX_REQUEST);
        let preferred = from.block.preferred.max(to.block.preferred);
        let most = from.block.maximum.min(to.block.maximum).min(MAX_REQUEST);
        let most = u64::from(most).min(pool.limit());
        let request_size = u64::from(wish.max(preferred)).min(most).max(1);
        let minimum = u64::from(from.block.minimum.max(to.block.minimum).max(1));
        let request_size = (request_size - request_size % minimum).max(minimum);
        let alone = options.synchronous;
        // Zeroes are looked for in blocks that the target can free.
        let sparse = match options.sparse {
            _ if options.allocated => 0,
            0 => 0,
            sparse => sparse.max(to.block.preferred.min(GRAIN_MAX)),
        };
        Settled {
            connections: if alone { 1 } else { options.connections.max(1) },
            requests: if alone { 1 } else { options.requests.max(1) },
            adaptive: options.adaptive,
            request_size,
            queue_size: options.queue_size.max(request_size),
            sparse,
            sampled: options.sampled,
            allocated: options.allocated,
            target_is_zero: options.target_is_zero || (to.zeroed && !options.allocated),
            flush: options.flush,
        }
    }
}

/// What all lanes of a copy share.
struct Job {
    plan: Arc<Plan>,
    settled: Settled,
    progress: Arc<Progress>,
    pool: Pool,
    first_error: std::sync::Mutex<Option<Error>>,
    trust: Trust,
    /// Segments, by number, that are looked at as a whole because zeroes turned up there or before.
    zeroes_in: std::sync::Mutex<HashSet<u64>>,
    lanes: AtomicUsize,
    warnings: std::sync::Mutex<Vec<String>>,
}

impl Job {
    fn fail(&self, error: Error) {
        self.first_error.lock().expect("no panic under this lock").get_or_insert(error);
        self.plan.stop();
    }

    fn stopped(&self) -> bool {
        self.progress.is_cancelled()
            || self.first_error.lock().expect("no panic under this lock").is_some()
    }

    /// Notes that a sample at `at` had zeroes: this segment and the next are looked at.
    fn found_zeroes(&self, at: u64) {
        let segment = at / SEGMENT;
        let mut zeroes_in = self.zeroes_in.lock().expect("no panic under this lock");
        zeroes_in.extend([segment, segment + 1]);
    }

    fn has_zeroes(&self, at: u64) -> bool {
        let zeroes_in = self.zeroes_in.lock().expect("no panic under this lock");
        zeroes_in.contains(&(at / SEGMENT))
    }

    fn warn(&self, text: String) {
        log::warn!("{text}");
        let mut warnings = self.warnings.lock().expect("no panic under this lock");
        if !warnings.contains(&text) {
            warnings.push(text);
        }
    }

    async fn first_lane(self: Arc<Job>, source: Arc<dyn Device>, target: Arc<dyn Device>) {
        let lane = Lane::new(self.clone(), source, target, true);
        lane.run().await;
        // Nobody will bring a sample any more.
        self.trust.settle(None);
    }
}

/// A lane beyond the first: dials, makes sure that it sees the same disks, then works like the first.
async fn further_lane(job: Arc<Job>, source: Stack, target: Stack) {
    let dial = async {
        let from = source.another().await?;
        let to = target.another().await?;
        Ok::<_, Error>((from, to))
    };
    // The others may have done all the work before the connection stands.
    let dialled = futures_or(io::timeout(DIAL_MAX, dial), job.plan.exhausted()).await;
    let (from, to) = match dialled {
        None => return,
        Some(Ok(Ok(handles))) => handles,
        Some(Ok(Err(error))) => {
            job.warn(format!("going on with fewer connections: {error}"));
            return;
        }
        Some(Err(io::Elapsed)) => {
            job.warn(format!(
                "going on with fewer connections: no handshake within {} s",
                DIAL_MAX.as_secs()
            ));
            return;
        }
    };
    if let Some(why) = differs(&source, &from).or_else(|| differs(&target, &to)) {
        job.warn(format!("going on with fewer connections: {why}"));
        return;
    }
    let unsure = |stack: &Stack, handle: &Arc<dyn Device>| {
        (stack.has_more() && !handle.facts().can.contains(Can::MULTI_CONN)).then(|| handle.clone())
    };
    let check = (unsure(&source, &from), unsure(&target, &to));
    if (check.0.is_some() || check.1.is_some())
        && let Err(why) = job.trust.examine(check.0, check.1, &job.plan).await
    {
        if let Some(why) = why {
            job.warn(format!("going on with fewer connections: {why}"));
        }
        return;
    }
    Lane::new(job, from, to, false).run().await;
}

/// Why a further connection does not look like the first one.
fn differs(stack: &Stack, handle: &Arc<dyn Device>) -> Option<String> {
    let (first, other) = (stack.device().facts(), handle.facts());
    if first.size != other.size {
        let (name, a, b) = (&first.name, first.size, other.size);
        return Some(format!("{name} has {a} bytes on one connection and {b} on another"));
    }
    (first.can != other.can).then(|| format!("{} differs between connections", first.name))
}

/// The first future's output, or `None` when the second ends before it.
async fn futures_or<T>(
    first: impl Future<Output = T>,
    second: impl Future<Output = ()>,
) -> Option<T> {
    let mut first = std::pin::pin!(first);
    let mut second = std::pin::pin!(second);
    std::future::poll_fn(|cx| {
        if let std::task::Poll::Ready(output) = first.as_mut().poll(cx) {
            return std::task::Poll::Ready(Some(output));
        }
        second.as_mut().poll(cx).map(|()| None)
    })
    .await
}

/// One source handle and one target handle, on one worker.
struct Lane {
    job: Arc<Job>,
    source: Arc<dyn Device>,
    target: Arc<dyn Device>,
    takes_parked: bool,
    /// The first lane brings the sample by which others are examined.
    first: bool,
    window: RefCell<Window>,
    in_flight: Cell<usize>,
    bytes: Cell<u64>,
    wrote: Cell<bool>,
    done: Event,
    /// Set while the first lane has not handed out a sample.
    sample_due: RefCell<bool>,
}

impl Lane {
    fn new(
        job: Arc<Job>,
        source: Arc<dyn Device>,
        target: Arc<dyn Device>,
        first: bool,
    ) -> Rc<Lane> {
        let window = Window::new(job.settled.requests, !job.settled.adaptive);
        Rc::new(Lane {
            job,
            window: RefCell::new(window),
            takes_parked: target.facts().takes_parked,
            source,
            target,
            first,
            in_flight: Cell::new(0),
            bytes: Cell::new(0),
            wrote: Cell::new(false),
            done: Event::new(),
            sample_due: RefCell::new(first),
        })
    }

    async fn run(self: Rc<Self>) {
        self.job.lanes.fetch_add(1, Ordering::Relaxed);
        while !self.job.stopped() {
            let Some(segment) = self.job.plan.next().await else { break };
            self.segment(segment).await;
        }
        self.wait_until(|lane| lane.in_flight.get() == 0).await;
        let wanted = self.job.settled.flush && self.wrote.get();
        if wanted
            && !self.job.stopped()
            && self.target.facts().can.contains(Can::FLUSH)
            && let Err(error) = self.target.submit(Request::flush()).await
        {
            self.job.fail(error);
        }
    }

    async fn segment(self: &Rc<Self>, segment: Segment) {
        let size = self.job.settled.request_size;
        let mut at = segment.at;
        let mut requests = 0_u64;
        for run in segment.runs {
            let end = at + run.len;
            if run.zero {
                if self.job.stopped() {
                    return;
                }
                self.turn(0).await;
                self.start(0, Rc::clone(self).zero_run(at, run.len));
                at = end;
                continue;
            }
            while at < end {
                // On the grid of the request size, so that requests are aligned.
                let len = (size - at % size).min(end - at);
                self.turn(len).await;
                if self.job.stopped() {
                    return;
                }
                // A request's worst need is one buffer: it is read into and written from.
                let look = self.looks(segment.told, requests, at);
                requests += 1;
                let room = match self.job.pool.reserve(len as usize).await {
                    // What nobody looks at may stay in the kernel on its way.
                    Ok(room) if !look && self.takes_parked => room.parkable(),
                    Ok(room) => room,
                    Err(error) => {
                        let text = "no buffer for a request of this size";
                        self.job.fail(Error::new(Kind::NoMemory, text).because(error));
                        return;
                    }
                };
                self.start(len, Rc::clone(self).data_chunk(at, room, look));
                at += len;
            }
        }
    }

    /// Waits until another request of `len` bytes may be in flight.
    async fn turn(&self, len: u64) {
        let settled = &self.job.settled;
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

    fn start(self: &Rc<Self>, len: u64, work: impl Future<Output = Result<()>> + 'static) {
        self.in_flight.set(self.in_flight.get() + 1);
        self.bytes.set(self.bytes.get() + len);
        let lane = self.clone();
        // Only what fills the window tells how full the path is.
        let started = (len == self.job.settled.request_size).then(Instant::now);
        drop(io::start(async move {
            if let Err(error) = work.await {
                lane.job.fail(error);
            }
            if let Some(started) = started {
                lane.window.borrow_mut().learn(started.elapsed());
            }
            lane.in_flight.set(lane.in_flight.get() - 1);
            lane.bytes.set(lane.bytes.get() - len);
            lane.done.notify();
        }));
    }

    /// Whether zeroes are looked for in the request at `at`, the `requests`th of its segment.
    fn looks(&self, told: bool, requests: u64, at: u64) -> bool {
        let settled = &self.job.settled;
        settled.sparse != 0
            && (!settled.sampled
                || !told
                || requests.is_multiple_of(SAMPLE_EVERY)
                || self.job.has_zeroes(at))
    }

    async fn zero_run(self: Rc<Self>, at: u64, len: u64) -> Result<()> {
        self.zero(at, len).await
    }

    /// Makes a range of the target read as zeroes.
    async fn zero(&self, at: u64, len: u64) -> Result<()> {
        let settled = &self.job.settled;
        if settled.target_is_zero {
            self.job.progress.add_skipped(len);
            return Ok(());
        }
        let flags = if settled.allocated { Flags::NO_HOLE } else { Flags::empty() };
        self.wrote.set(true);
        self.target.submit(Request::zero(at, len).with(flags)).await?;
        self.job.progress.add_zeroed(len);
        Ok(())
    }

    async fn data_chunk(self: Rc<Self>, at: u64, room: io::Room, look: bool) -> Result<()> {
        let len = room.len() as u64;
        let data = match self.source.submit(Request::read(at, room)).await? {
            Reply::Data(data) => data,
            _ => return self.zero(at, len).await,
        };
        if self.job.stopped() {
            return Ok(());
        }
        if !look {
            // Somebody may wait for a sample of it; else it goes on without a second holder.
            let sample = self.is_sample_due().then(|| data.clone());
            self.write(at, data).await?;
            return match sample {
                Some(data) => self.offer_sample(at, &data).await,
                None => Ok(()),
            };
        }
        let runs = zeroes::runs(data.bytes(), at, self.job.settled.sparse);
        if let [(_, _, false)] = runs[..] {
            self.write(at, data.clone()).await?;
            return self.offer_sample(at, &data).await;
        }
        if self.job.settled.sampled {
            self.job.found_zeroes(at);
        }
        // Parts go out together; all are awaited, also after an error.
        let mut parts = Vec::with_capacity(runs.len());
        for (start, part, zero) in runs {
            let here = at + start as u64;
            if zero {
                if self.job.settled.target_is_zero {
                    self.job.progress.add_skipped(part as u64);
                    continue;
                }
                self.wrote.set(true);
                parts.push((part, true, self.target.submit(Request::zero(here, part as u64))));
            } else {
                self.wrote.set(true);
                let op = Op::Write(data.slice(start, part));
                let flags = Flags::empty();
                let request = Request { op, at: here, len: part as u64, flags };
                parts.push((part, false, self.target.submit(request)));
            }
        }
        let mut first_error = None;
        for (part, zero, pending) in parts {
            match pending.await {
                Ok(_) if zero => self.job.progress.add_zeroed(part as u64),
                Ok(_) => self.job.progress.add_data(part as u64),
                Err(error) => drop(first_error.get_or_insert(error)),
            }
        }
        first_error.map_or(Ok(()), Err)?;
        self.offer_sample(at, &data).await
    }

    async fn write(&self, at: u64, data: io::Data) -> Result<()> {
        let len = data.len() as u64;
        self.wrote.set(true);
        self.target.submit(Request::write(at, data)).await?;
        self.job.progress.add_data(len);
        Ok(())
    }

    fn is_sample_due(&self) -> bool {
        self.first && self.job.trust.wanted() && *self.sample_due.borrow()
    }

    /// Hands out the first block with content that was written, for lanes that must be examined.
    async fn offer_sample(&self, at: u64, data: &io::Data) -> Result<()> {
        if !self.is_sample_due() {
            return Ok(());
        }
        let Some(sample) = Sample::of(at, data.bytes()) else { return Ok(()) };
        self.sample_due.replace(false);
        if self.target.facts().can.contains(Can::FLUSH) {
            self.target.submit(Request::flush()).await?;
        }
        self.job.trust.settle(Some(sample));
        Ok(())
    }
}
