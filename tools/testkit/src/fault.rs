//! A layer that delays, reorders, fails and hangs requests, by rules and a seed.
//!
//! ```no_run
//! # use std::sync::Arc;
//! # use blockhaul_block::{Kind, OpKind};
//! # fn example(inner: Arc<dyn blockhaul_block::Device>) {
//! use blockhaul_testkit::fault::{FaultDevice, FaultRule, FaultEffect};
//!
//! let device = FaultDevice::over(inner, 1);
//! // The third write fails; whatever touches the second MiB hangs until it is released.
//! device.add(FaultRule::new(FaultEffect::Fail(Kind::NoSpace)).kind(OpKind::Write).nth(3));
//! device.add(FaultRule::new(FaultEffect::Hang).range(1 << 20..2 << 20));
//! // … use it …
//! device.release();
//! # }
//! ```

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use blockhaul_block::{
    Device, Error, Facts, Kind, Op, OpKind, Outcome, PendingRequest, Request, RequestFlags,
};
use blockhaul_io::Completer;

use crate::model::{RequestRecord, lock};
use crate::rng::Rng;

/// What happens to a request that matches a rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultEffect {
    /// It fails, and nothing has happened.
    Fail(Kind),
    /// It is carried out, and fails nevertheless: its effect remains.
    FailAfter(Kind),
    /// The first half of it is carried out, then it fails. A request that cannot be halved fails as
    /// with `Fail`.
    FailHalfway(Kind),
    /// It takes this long before it reaches the device.
    Delay(Duration),
    /// It does not reach the device until [`FaultDevice::release`].
    Hang,
    /// It reaches the device, but its completion is held back until [`FaultDevice::release`].
    HangAfter,
    /// Its completion is lost: the caller sees [`Kind::Disconnected`], and nothing has happened.
    Lose,
}

/// Selects requests, and what happens to them.
#[derive(Debug, Clone)]
pub struct FaultRule {
    then: FaultEffect,
    kind: Option<OpKind>,
    durable: bool,
    range: Option<Range<u64>>,
    nth: Option<u64>,
    percent: Option<u64>,
    times: Option<u64>,
    matched: u64,
    applied: u64,
}

impl FaultRule {
    /// For every request; the other methods narrow it down.
    pub fn new(then: FaultEffect) -> FaultRule {
        let matched = 0;
        let applied = 0;
        FaultRule {
            then,
            kind: None,
            durable: false,
            range: None,
            nth: None,
            percent: None,
            times: None,
            matched,
            applied,
        }
    }

    /// Only for requests of this kind.
    #[must_use]
    pub fn kind(mut self, kind: OpKind) -> FaultRule {
        self.kind = Some(kind);
        self
    }

    /// Only for flushes and requests with FUA.
    #[must_use]
    pub fn durable(mut self) -> FaultRule {
        self.durable = true;
        self
    }

    /// Only for requests that touch this range.
    #[must_use]
    pub fn range(mut self, range: Range<u64>) -> FaultRule {
        self.range = Some(range);
        self
    }

    /// Only for the `nth` of those that match otherwise, counted from 1.
    #[must_use]
    pub fn nth(mut self, nth: u64) -> FaultRule {
        self.nth = Some(nth);
        self
    }

    /// Only for some of those that match otherwise, at random.
    #[must_use]
    pub fn percent(mut self, percent: u64) -> FaultRule {
        self.percent = Some(percent);
        self
    }

    /// At most this many times.
    #[must_use]
    pub fn times(mut self, times: u64) -> FaultRule {
        self.times = Some(times);
        self
    }

    fn applies(&mut self, seen: &RequestRecord, rng: &mut Rng) -> bool {
        let touched = self.range.as_ref().is_none_or(|range| {
            let end = seen.at.saturating_add(seen.len);
            seen.at < range.end && range.start < end
        });
        let durable = seen.kind == OpKind::Flush || seen.flags.contains(RequestFlags::FUA);
        if self.kind.is_some_and(|kind| kind != seen.kind) || !touched || (self.durable && !durable)
        {
            return false;
        }
        self.matched += 1;
        let due = self.nth.is_none_or(|nth| nth == self.matched)
            && self.percent.is_none_or(|percent| rng.chance(percent))
            && self.times.is_none_or(|times| self.applied < times);
        self.applied += u64::from(due);
        due
    }
}

/// The layer; it controls itself. Without rules it passes everything on.
pub struct FaultDevice {
    inner: Arc<dyn Device>,
    shared: Arc<FaultState>,
}

struct FaultState {
    plan: Mutex<FaultSchedule>,
    in_flight: AtomicUsize,
}

struct FaultSchedule {
    rng: Rng,
    rules: Vec<FaultRule>,
    delay_max: Duration,
    turns_max: u64,
    seen: Vec<RequestRecord>,
    hanging: Vec<Completer<()>>,
    in_flight_max: usize,
    /// Number of requests so far at each failure caused by a rule.
    failures: Vec<usize>,
}

impl FaultDevice {
    /// The layer over a device; everything random comes from the seed.
    pub fn over(inner: Arc<dyn Device>, seed: u64) -> Arc<FaultDevice> {
        let plan = Mutex::new(FaultSchedule {
            rng: Rng::new(seed),
            rules: Vec::new(),
            delay_max: Duration::ZERO,
            turns_max: 0,
            seen: Vec::new(),
            hanging: Vec::new(),
            in_flight_max: 0,
            failures: Vec::new(),
        });
        let shared = Arc::new(FaultState { plan, in_flight: AtomicUsize::new(0) });
        Arc::new(FaultDevice { inner, shared })
    }

    /// Adds a rule; the first matching rule counts.
    pub fn add(&self, rule: FaultRule) {
        lock(&self.shared.plan).rules.push(rule);
    }

    /// Drops all rules; hanging requests remain until they are released.
    pub fn heal(&self) {
        lock(&self.shared.plan).rules.clear();
    }

    /// From now on each request takes a random time up to this.
    pub fn delay_up_to(&self, delay_max: Duration) {
        lock(&self.shared.plan).delay_max = delay_max;
    }

    /// From now on each request yields a random number of times, up to this.
    pub fn reorder(&self, turns_max: u64) {
        lock(&self.shared.plan).turns_max = turns_max;
    }

    /// Releases all hanging requests; returns their number.
    pub fn release(&self) -> usize {
        let hanging = std::mem::take(&mut lock(&self.shared.plan).hanging);
        let count = hanging.len();
        hanging.into_iter().for_each(|completer| completer.complete(()));
        count
    }

    /// Number of hanging requests.
    pub fn hanging(&self) -> usize {
        lock(&self.shared.plan).hanging.len()
    }

    /// All requests so far, in the order of their submission.
    pub fn seen(&self) -> Vec<RequestRecord> {
        lock(&self.shared.plan).seen.clone()
    }

    /// For each failure caused by a rule, the number of requests until then: those after that in
    /// [`FaultDevice::seen`] were submitted after it.
    pub fn failures(&self) -> Vec<usize> {
        lock(&self.shared.plan).failures.clone()
    }

    /// Requests that have not completed.
    pub fn in_flight(&self) -> usize {
        self.shared.in_flight.load(Ordering::SeqCst)
    }

    /// The largest number of requests in flight at a time.
    pub fn in_flight_max(&self) -> usize {
        lock(&self.shared.plan).in_flight_max
    }
}

/// Counts a request for as long as it lives.
struct InFlight(Arc<FaultState>);

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Device for FaultDevice {
    fn facts(&self) -> Arc<Facts> {
        self.inner.facts()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        let in_flight = InFlight(self.shared.clone());
        let drawn = self.draw(RequestRecord::of(&request));
        if drawn.then == Some(FaultEffect::Lose) {
            return PendingRequest::completer().1;
        }
        let inner = self.inner.clone();
        let shared = self.shared.clone();
        PendingRequest::start(async move {
            let _in_flight = in_flight;
            for _ in 0..drawn.turns {
                blockhaul_io::yield_now().await;
            }
            if !drawn.delay.is_zero() {
                blockhaul_io::sleep(drawn.delay).await;
            }
            carry_out(inner, shared, request, drawn).await
        })
    }
}

/// What happens to one request.
struct FaultDraw {
    then: Option<FaultEffect>,
    delay: Duration,
    /// Turns of other tasks before it.
    turns: u64,
    /// Its release, if it hangs.
    hang: Option<blockhaul_io::Ticket<()>>,
}

impl FaultDevice {
    /// Counts a request, and decides what happens to it.
    fn draw(&self, seen: RequestRecord) -> FaultDraw {
        let mut guard = lock(&self.shared.plan);
        let plan = &mut *guard;
        plan.seen.push(seen);
        let now = self.shared.in_flight.fetch_add(1, Ordering::SeqCst) + 1;
        plan.in_flight_max = plan.in_flight_max.max(now);
        let mut then = None;
        for rule in &mut plan.rules {
            if rule.applies(&seen, &mut plan.rng) {
                then = Some(rule.then);
                break;
            }
        }
        let micros = u64::try_from(plan.delay_max.as_micros()).unwrap_or(u64::MAX);
        let delay = Duration::from_micros(plan.rng.between(0, micros));
        let turns = plan.rng.between(0, plan.turns_max);
        let hang = matches!(then, Some(FaultEffect::Hang | FaultEffect::HangAfter)).then(|| {
            let (completer, ticket) = blockhaul_io::ticket();
            plan.hanging.push(completer);
            ticket
        });
        FaultDraw { then, delay, turns, hang }
    }
}

/// Submits a request to the inner device, or fails it, or both.
async fn carry_out(
    inner: Arc<dyn Device>,
    shared: Arc<FaultState>,
    request: Request,
    drawn: FaultDraw,
) -> Outcome {
    let injected = move |kind| {
        let mut plan = lock(&shared.plan);
        let seen = plan.seen.len();
        plan.failures.push(seen);
        Error::new(kind, "injected by a test")
    };
    match drawn.then {
        None | Some(FaultEffect::Lose) => inner.submit(request).await,
        Some(FaultEffect::Fail(kind)) => Err(injected(kind)),
        Some(FaultEffect::FailAfter(kind)) => {
            inner.submit(request).await?;
            Err(injected(kind))
        }
        Some(FaultEffect::FailHalfway(kind)) => {
            if let Some(half) = half(request, &inner.facts()) {
                inner.submit(half).await?;
            }
            Err(injected(kind))
        }
        Some(FaultEffect::Delay(delay)) => {
            blockhaul_io::sleep(delay).await;
            inner.submit(request).await
        }
        Some(FaultEffect::Hang) => {
            wait(drawn.hang).await;
            inner.submit(request).await
        }
        Some(FaultEffect::HangAfter) => {
            let outcome = inner.submit(request).await;
            wait(drawn.hang).await;
            outcome
        }
    }
}

/// Waits for the release; dropping the layer releases, too.
async fn wait(hang: Option<blockhaul_io::Ticket<()>>) {
    if let Some(hang) = hang {
        let _released_or_gone = hang.await;
    }
}

/// The first half of a change, if there is one.
fn half(request: Request, facts: &Facts) -> Option<Request> {
    let minimum = u64::from(facts.block.minimum.max(1));
    let len = request.len / 2 / minimum * minimum;
    if len == 0 || !request.kind().changes() {
        return None;
    }
    let op = match request.op {
        Op::Write(data) => Op::Write(data.slice(0, usize::try_from(len).ok()?)),
        op => op,
    };
    Some(Request { op, len, at: request.at, flags: request.flags })
}
