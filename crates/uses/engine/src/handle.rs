//! One side of a copy as a lane sees it: a handle that is replaced when its connection is lost.

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use blockhaul_block::{Device, Error, Facts, Kind, Result};
use blockhaul_catalog::Stack;
use blockhaul_io::Event;

use crate::error::CopyError;
use crate::marker::Marker;
use crate::options::{EngineOptions, RETRY_DELAY_MAX, RetryCounts};
use crate::progress::CopyProgress;
use crate::same_disk::Proof;
use crate::side::Side;

/// Maximum time to make a connection.
pub(crate) const DIAL_MAX: Duration = Duration::from_secs(10);
/// First pause before a request is repeated on a working connection; four times as long each time,
/// up to the configured delay.
const QUICK: Duration = Duration::from_millis(20);
/// Maximum time for which a pause outlasts a stopped copy.
const PAUSE_STEP: Duration = Duration::from_millis(100);

/// Retry settings and counters shared by all handles of a copy.
pub(crate) struct RetryControl {
    limit: u32,
    delay: Duration,
    progress: Arc<CopyProgress>,
    failed: AtomicBool,
    lost_target: AtomicBool,
    requests: [AtomicU64; 2],
    connections: [AtomicU64; 2],
    /// A block of the source, to recognize the source after a reconnect.
    seen: Mutex<Option<Proof>>,
    /// Whether `seen` is set.
    has_seen: AtomicBool,
    /// What was read from the source may be discarded there, and proves nothing later.
    discards: bool,
    /// Of a copy that discards its source.
    marker: OnceLock<Arc<Marker>>,
    pub(crate) checked: AtomicU64,
    pub(crate) rewritten: AtomicU64,
}

impl RetryControl {
    pub(crate) fn new(options: &EngineOptions, progress: &Arc<CopyProgress>) -> Arc<RetryControl> {
        Arc::new(RetryControl {
            limit: options.retries,
            delay: options.retry_delay,
            progress: progress.clone(),
            failed: AtomicBool::new(false),
            lost_target: AtomicBool::new(false),
            requests: Default::default(),
            connections: Default::default(),
            seen: Mutex::default(),
            has_seen: AtomicBool::new(false),
            discards: options.discard_source,
            marker: OnceLock::new(),
            checked: AtomicU64::new(0),
            rewritten: AtomicU64::new(0),
        })
    }

    /// Whether requests are ever repeated.
    pub(crate) fn any(&self) -> bool {
        self.limit > 0
    }

    /// The marker of a copy that discards its source, if that has content.
    pub(crate) fn marker(&self) -> Option<&Arc<Marker>> {
        self.marker.get()
    }

    /// Sets the marker, once.
    pub(crate) fn set_marker(&self, marker: Arc<Marker>) {
        let _ = self.marker.set(marker);
    }

    /// Maximum number of retries.
    pub(crate) fn limit(&self) -> u32 {
        self.limit
    }

    /// Notes that the copy has failed: nothing is retried any more.
    pub(crate) fn fail(&self) {
        self.failed.store(true, Ordering::Relaxed);
    }

    /// Whether to submit no more requests.
    pub(crate) fn stopped(&self) -> bool {
        self.failed.load(Ordering::Relaxed) || self.progress.is_cancelled()
    }

    pub(crate) fn summary(&self) -> RetryCounts {
        let [source_requests, target_requests] =
            [0, 1].map(|side| self.requests[side].load(Ordering::Relaxed));
        let [source_connections, target_connections] =
            [0, 1].map(|side| self.connections[side].load(Ordering::Relaxed));
        RetryCounts {
            source_requests,
            target_requests,
            source_connections,
            target_connections,
            checked: self.checked.load(Ordering::Relaxed),
            rewritten: self.rewritten.load(Ordering::Relaxed),
        }
    }

    /// Whether a connection to the target was lost.
    pub(crate) fn lost_target(&self) -> bool {
        self.lost_target.load(Ordering::Relaxed)
    }

    /// Notes that a connection to the target was lost.
    pub(crate) fn lose_target(&self) {
        self.lost_target.store(true, Ordering::Relaxed);
    }

    /// Whether a block of the source is still needed for recognition.
    pub(crate) fn wants_proof(&self) -> bool {
        self.any() && !self.discards && !self.has_seen.load(Ordering::Relaxed)
    }

    /// Stores what was read from the source at `at`, if it is not zero.
    pub(crate) fn keep_proof(&self, at: u64, bytes: &[u8]) {
        if let Some(proof) = Proof::of(at, bytes) {
            // Any block will do; keep the first.
            self.seen.lock().expect("no panic under this lock").get_or_insert(proof);
            self.has_seen.store(true, Ordering::Relaxed);
        }
    }

    /// Another run begins: the source may have changed since.
    pub(crate) fn forget_proof(&self) {
        let mut seen = self.seen.lock().expect("no panic under this lock");
        *seen = None;
        self.has_seen.store(false, Ordering::Relaxed);
    }

    fn proof(&self) -> Option<Proof> {
        self.seen.lock().expect("no panic under this lock").clone()
    }

    /// Counts a retry after this error; returns the error if it must not be retried.
    fn count(
        &self,
        side: Side,
        remedy: RetryAction,
        error: &Error,
        attempts: &mut u32,
    ) -> Result<()> {
        if remedy == RetryAction::None || *attempts >= self.limit || self.stopped() {
            return Err(error.clone());
        }
        *attempts += 1;
        log::info!("retrying ({attempts} of {}): {error}", self.limit);
        self.requests[side as usize].fetch_add(1, Ordering::Relaxed);
        self.progress.meter.retried(side);
        Ok(())
    }

    /// Waits after a failed request to a target whose connection is not replaced, because that
    /// would lose its unflushed writes. Ok: repeat the request; otherwise the error that ends the
    /// copy.
    pub(crate) async fn recover_standing(
        &self,
        error: Error,
        attempts: &mut u32,
    ) -> Result<(), CopyError> {
        let remedy = match remedy(error.kind()) {
            RetryAction::Reconnect => RetryAction::None,
            remedy => remedy,
        };
        self.count(Side::Target, remedy, &error, attempts).map_err(CopyError::at_target)?;
        match remedy {
            RetryAction::RepeatSoon => self.pause_briefly(*attempts).await,
            _ => self.pause(*attempts).await,
        }
        if self.stopped() { Err(CopyError::at_target(error)) } else { Ok(()) }
    }

    /// Waits before repetition `number` of a request that failed on a working connection: a
    /// transient error passes soon, and a permanent one should not delay the copy for half a
    /// minute.
    async fn pause_briefly(&self, number: u32) {
        let longer = QUICK.saturating_mul(1 << (2 * number.saturating_sub(1)).min(16));
        self.pause_for(longer.min(self.delay)).await;
    }

    /// Waits before repetition `number`, from 1.
    async fn pause(&self, number: u32) {
        let doubled = self.delay.saturating_mul(1 << number.saturating_sub(1).min(16));
        self.pause_for(doubled.min(RETRY_DELAY_MAX)).await;
    }

    async fn pause_for(&self, time: Duration) {
        let due = blockhaul_io::now() + time;
        while !self.stopped() {
            let left = due.saturating_duration_since(blockhaul_io::now());
            if left.is_zero() {
                return;
            }
            blockhaul_io::sleep(left.min(PAUSE_STEP)).await;
        }
    }
}

/// How to handle a failed request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RetryAction {
    /// The connection is not usable any more.
    Reconnect,
    /// The error may be transient; the connection works.
    RepeatSoon,
    /// The error may be transient; wait longer.
    Repeat,
    /// The request will fail again.
    None,
}

fn remedy(kind: Kind) -> RetryAction {
    match kind {
        Kind::Disconnected | Kind::TimedOut | Kind::ShuttingDown => RetryAction::Reconnect,
        Kind::Io => RetryAction::RepeatSoon,
        Kind::NoMemory => RetryAction::Repeat,
        Kind::ReadOnly
        | Kind::Invalid
        | Kind::NoSpace
        | Kind::TooLarge
        | Kind::Unsupported
        | Kind::NotFound
        | Kind::Refused
        | Kind::InUse
        | Kind::Usage => RetryAction::None,
    }
}

/// Whether an error means that the connection was lost, rather than that the storage failed.
pub(crate) fn is_lost(error: &Error) -> bool {
    remedy(error.kind()) == RetryAction::Reconnect
}

/// A handle to one side for the requests of one lane; lives on that lane's worker.
pub(crate) struct ReconnectingHandle {
    side: Side,
    stack: Stack,
    handle: RefCell<Arc<dyn Device>>,
    /// Counts handles: an error on an older handle does not affect the current one.
    generation: Cell<u64>,
    dialling: Cell<bool>,
    dead: RefCell<Option<Error>>,
    changed: Event,
    retries: Arc<RetryControl>,
}

impl ReconnectingHandle {
    pub(crate) fn new(
        side: Side,
        stack: Stack,
        handle: Arc<dyn Device>,
        retries: Arc<RetryControl>,
    ) -> ReconnectingHandle {
        ReconnectingHandle {
            side,
            stack,
            handle: RefCell::new(handle),
            generation: Cell::new(0),
            dialling: Cell::new(false),
            dead: RefCell::new(None),
            changed: Event::new(),
            retries,
        }
    }

    /// The current handle.
    pub(crate) fn device(&self) -> Arc<dyn Device> {
        self.handle.borrow().clone()
    }

    /// The number of the current handle, from 0.
    pub(crate) fn generation(&self) -> u64 {
        self.generation.get()
    }

    /// The number of the current handle, once no other one is being made.
    pub(crate) async fn settled(&self) -> u64 {
        loop {
            let mark = self.changed.mark();
            if !self.dialling.get() {
                return self.generation();
            }
            self.changed.wait_after(mark).await;
        }
    }

    /// Whether this is the number of the current handle, and no other one is being made.
    pub(crate) fn is_settled(&self, generation: u64) -> bool {
        !self.dialling.get() && self.generation() == generation
    }

    pub(crate) fn facts(&self) -> Arc<Facts> {
        self.handle.borrow().facts()
    }

    /// Whether a new handle is a separate connection.
    pub(crate) fn reconnects(&self) -> bool {
        self.stack.has_more()
    }

    /// Stores what was read at `at`, to recognize the disk after a reconnect.
    pub(crate) fn keep_proof(&self, at: u64, bytes: &[u8]) {
        if self.retries.wants_proof() {
            self.retries.keep_proof(at, bytes);
        }
    }

    /// Handles the failure of a request that was sent in `generation`: waits, or reconnects. Ok:
    /// repeat the request; otherwise the error that ends the copy.
    pub(crate) async fn recover(
        &self,
        error: Error,
        generation: u64,
        attempts: &mut u32,
    ) -> Result<(), CopyError> {
        let recovered = self.try_recover(error, generation, attempts).await;
        recovered.map_err(|error| CopyError { side: Some(self.side), error })
    }

    async fn try_recover(&self, error: Error, generation: u64, attempts: &mut u32) -> Result<()> {
        let remedy = remedy(error.kind());
        self.retries.count(self.side, remedy, &error, attempts)?;
        match remedy {
            RetryAction::Reconnect if self.reconnects() => {
                self.reconnect(&error, generation).await?
            }
            RetryAction::RepeatSoon => self.retries.pause_briefly(*attempts).await,
            _ => self.retries.pause(*attempts).await,
        }
        if self.retries.stopped() { Err(error) } else { Ok(()) }
    }

    /// Replaces the handle unless another task has done so since `generation`.
    async fn reconnect(&self, error: &Error, generation: u64) -> Result<()> {
        loop {
            let mark = self.changed.mark();
            if self.generation.get() != generation {
                return Ok(());
            }
            if let Some(dead) = &*self.dead.borrow() {
                return Err(dead.clone());
            }
            if !self.dialling.replace(true) {
                break;
            }
            self.changed.wait_after(mark).await;
        }
        let dialled = self.dial(error).await;
        self.dialling.set(false);
        let result = dialled.map(|handle| {
            if self.side == Side::Target {
                self.retries.lose_target();
            }
            self.handle.replace(handle);
            self.generation.set(generation + 1);
            self.retries.connections[self.side as usize].fetch_add(1, Ordering::Relaxed);
            self.retries.progress.meter.reconnected(self.side);
        });
        if let Err(error) = &result {
            self.dead.replace(Some(error.clone()));
        }
        self.changed.notify();
        result
    }

    async fn dial(&self, error: &Error) -> Result<Arc<dyn Device>> {
        let mut last = None;
        for attempt in 0..=self.retries.limit {
            if attempt > 0 {
                self.retries.pause(attempt).await;
            }
            if self.retries.stopped() {
                return Err(error.clone());
            }
            let connected = async {
                let handle = self.stack.another().await?;
                let why = self.is_another(&handle).await?;
                Ok::<_, Error>((handle, why))
            };
            let failure = match blockhaul_io::timeout(DIAL_MAX, connected).await {
                Ok(Ok((handle, None))) => return Ok(handle),
                Ok(Ok((_, Some(why)))) => {
                    let text = format!("after reconnecting: {why}");
                    return Err(Error::new(Kind::Invalid, text).on(&self.facts().name));
                }
                Ok(Err(failure)) => failure,
                Err(blockhaul_io::TimeoutError) => {
                    let text = format!("no handshake within {} s", DIAL_MAX.as_secs());
                    Error::new(Kind::TimedOut, text)
                }
            };
            log::info!("cannot reconnect: {failure}");
            last = Some(failure);
        }
        let last = last.map(|last| last.located()).unwrap_or_default();
        let tries = self.retries.limit.saturating_add(1);
        let text = format!("{}; {tries} attempts to reconnect failed: {last}", error.text());
        let named = Error::new(Kind::Disconnected, text).on(&self.facts().name);
        Err(match error.request() {
            Some((kind, at, len)) => named.during(kind, at, len),
            None => named,
        })
    }
}

impl ReconnectingHandle {
    /// Why a new handle is not the same disk, if so; a source is recognized by a block read from it
    /// before, and both sides of a copy that discards its source by its marker.
    async fn is_another(&self, handle: &Arc<dyn Device>) -> Result<Option<String>> {
        if let Some(why) = differs(&self.stack, handle) {
            return Ok(Some(why));
        }
        if let Some(marker) = self.retries.marker() {
            return marker.differs(self.side, &**handle).await;
        }
        let Some(proof) = self.retries.proof().filter(|_| self.side == Side::Source) else {
            return Ok(None);
        };
        Ok((!proof.is_on(&**handle).await?).then(|| {
            let at = proof.at();
            format!("the content of the source has changed (at offset {at}): is it another disk?")
        }))
    }
}

/// Why a further connection does not show the same disk as the first one.
pub(crate) fn differs(stack: &Stack, handle: &Arc<dyn Device>) -> Option<String> {
    let first = stack.device().facts();
    let other = handle.facts();
    if first.size != other.size {
        let name = &first.name;
        let a = first.size;
        let b = other.size;
        return Some(format!("{name} has {a} bytes on one connection and {b} on another"));
    }
    (first.can != other.can).then(|| format!("{} differs between connections", first.name))
}
