//! Clients of a server, which read only what can be there.

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::rc::{Rc, Weak};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use blockhaul_block::{
    ContextSet, Device, DeviceExt, Error, Kind, Reply, Request, RequestFlags, ZERO,
};
use blockhaul_catalog::{DeviceSpec, Intent, Registry, Stack};
use blockhaul_client::ConnectOptions;
use blockhaul_io::simulation::note;
use blockhaul_io::{Data, Notify, sleep, timeout};
use blockhaul_testkit::rng::Rng;

use crate::oracle::{Oracle, SECTOR, ZEROES, bytes_of};

/// Virtual time in which a request ends, with all retries of all layers.
const PATIENCE: Duration = Duration::from_secs(4 * 3600);
/// Longest time between two requests of a slow client.
const SLOW: Duration = Duration::from_secs(20);

pub(crate) fn lock(oracle: &Mutex<Oracle>) -> MutexGuard<'_, Oracle> {
    oracle.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Connects, with these layers over the connection.
pub(crate) async fn open(
    uri: &str,
    layers: &[String],
    options: ConnectOptions,
) -> Result<Stack, Error> {
    let backends = blockhaul_client::all(options);
    let registry = Registry { backends, layers: blockhaul_layers::all(), ..Registry::default() };
    let layers = layers.iter().map(|layer| registry.layer(layer)).collect::<Result<_, _>>()?;
    registry.open(&DeviceSpec::parse(uri.as_ref())?, layers, Intent::WRITE).await
}

/// The states of sectors in `base:allocation`.
pub(crate) async fn states(device: &dyn Device, range: Range<usize>) -> Result<Vec<u64>, Error> {
    let mut states = Vec::new();
    while states.len() < range.len() {
        let at = ((range.start + states.len()) * SECTOR) as u64;
        let len = ((range.len() - states.len()) * SECTOR) as u64;
        let request = Request::extents(at, len, ContextSet::first());
        let Reply::Extents(lists) = device.submit(request).await? else {
            return Err(Error::misfit());
        };
        for run in lists.first().ok_or_else(Error::misfit)?.runs() {
            let count = usize::try_from(run.len).unwrap_or(usize::MAX).div_ceil(SECTOR);
            states.extend(std::iter::repeat_n(run.state, count.min(range.len() - states.len())));
        }
    }
    Ok(states)
}

/// What a client is.
pub(crate) struct ClientConfig {
    pub(crate) number: usize,
    pub(crate) oracle: Arc<Mutex<Oracle>>,
    pub(crate) uri: String,
    /// Layers over the connection, the first innermost.
    pub(crate) layers: Vec<String>,
    pub(crate) options: ConnectOptions,
    /// Longest request in sectors.
    pub(crate) longest: u64,
    pub(crate) tempo: Arc<ClientPace>,
}

/// Longest request of the clients of a run, in sectors: short ones cost less.
pub(crate) fn longest(rng: &mut Rng) -> u64 {
    *rng.pick(&[4, 16, 64])
}

/// Number of requests that each client makes, on each part of its sectors: few in most runs, which are quick.
pub(crate) fn requests(rng: &mut Rng) -> u64 {
    let most = *rng.pick(&[6, 15, 60]);
    rng.between(2, most)
}

/// When clients work; the default: always.
#[derive(Default)]
pub(crate) struct ClientPace {
    /// They begin no request.
    quiet: AtomicBool,
    /// They end.
    over: AtomicBool,
    /// Requests of clients that have not returned.
    busy: AtomicUsize,
    /// Longest time between two requests.
    pace: Duration,
    /// Requests at that pace; then clients are slow.
    quick: AtomicU64,
    /// Some of this has changed.
    changed: Notify,
}

impl ClientPace {
    /// With up to this time between two requests of one client, for some of them.
    pub(crate) fn of(pace: Duration) -> Arc<ClientPace> {
        Arc::new(ClientPace { pace, ..ClientPace::default() })
    }

    /// This many requests come at the pace; clients are slow then, because a run has a number of
    /// steps, and not a time.
    pub(crate) fn hurry(&self, requests: u64) {
        self.quick.store(requests, Ordering::Relaxed);
    }

    /// No client begins a request from now on, or they go on.
    pub(crate) fn quieten(&self, quiet: bool) {
        self.quiet.store(quiet, Ordering::Relaxed);
        self.changed.notify();
    }

    /// Waits until no client waits for a reply.
    pub(crate) async fn idle(&self) {
        self.until(|| self.busy.load(Ordering::Relaxed) == 0).await;
    }

    async fn until(&self, holds: impl Fn() -> bool) {
        loop {
            let changed = self.changed.listen();
            if holds() {
                return;
            }
            // The notifier lives as long as this does.
            let _ = changed.await;
        }
    }

    /// Clients end after their next reply.
    pub(crate) fn end(&self) {
        self.over.store(true, Ordering::Relaxed);
        self.quieten(false);
    }

    /// Waits for the next request; `None`: there is none. It is over when the result is dropped.
    async fn next(&self, rng: &mut Rng) -> Option<InFlightRequest<'_>> {
        if !self.pace.is_zero() {
            let quick = self.quick.load(Ordering::Relaxed);
            self.quick.store(quick.saturating_sub(1), Ordering::Relaxed);
            let pace = if quick > 0 { self.pace } else { self.pace.max(SLOW) };
            let most = u64::try_from(pace.as_micros()).unwrap_or(u64::MAX);
            sleep(Duration::from_micros(rng.below(most))).await;
        }
        self.until(|| !self.quiet.load(Ordering::Relaxed)).await;
        let over = self.over.load(Ordering::Relaxed);
        (!over).then(|| {
            self.busy.fetch_add(1, Ordering::Relaxed);
            InFlightRequest(self)
        })
    }
}

/// A request that has not returned.
struct InFlightRequest<'a>(&'a ClientPace);

impl Drop for InFlightRequest<'_> {
    fn drop(&mut self) {
        self.0.busy.fetch_sub(1, Ordering::Relaxed);
        self.0.changed.notify();
    }
}

/// One client; several of its requests are in flight at a time.
pub(crate) struct SimulatedClient {
    guest: ClientConfig,
    /// The connection, and its number.
    stack: RefCell<Option<Rc<Stack>>>,
    /// The one before it.
    left: RefCell<Weak<Stack>>,
    generation: Cell<u64>,
}

/// Sends requests on each part of the client's sectors, one at a time there.
///
/// Returns the extents that it sees at the end, if it can.
pub(crate) async fn work(
    client: Rc<SimulatedClient>,
    requests: u64,
    mut rng: Rng,
) -> Result<Option<Vec<u64>>, String> {
    let all = client.oracle().all();
    let parts = rng.between(1, 4) as usize;
    let share = all.len() / parts;
    let mut tasks = Vec::new();
    for part in 0..parts {
        let start = all.start + part * share;
        let client = client.clone();
        let rng = Rng::new(rng.number());
        tasks.push(blockhaul_io::spawn(async move {
            ClientWorker { client, range: start..start + share, rng }.work(requests).await
        }));
    }
    let mut ended = Ok(());
    for task in tasks {
        ended = ended.and(task.await);
    }
    ended?;
    let (stack, _) = client.connection().await?;
    Ok(states(&**stack.device(), all).await.ok())
}

impl SimulatedClient {
    pub(crate) fn new(guest: ClientConfig) -> Rc<SimulatedClient> {
        Rc::new(SimulatedClient {
            guest,
            stack: RefCell::default(),
            left: RefCell::default(),
            generation: Cell::default(),
        })
    }

    fn oracle(&self) -> MutexGuard<'_, Oracle> {
        lock(&self.guest.oracle)
    }

    /// The connection, and its number; connects if there is none.
    async fn connection(&self) -> Result<(Rc<Stack>, u64), String> {
        for attempt in 1..10_000 {
            if let Some(stack) = self.stack.borrow().clone() {
                return Ok((stack, self.generation.get()));
            }
            while self.caches_extents() && self.left.borrow().strong_count() > 0 {
                // What is in flight there may change the disk, which a new cache does not see.
                sleep(Duration::from_millis(100)).await;
            }
            let generation = self.generation.get();
            let opened =
                open(&self.guest.uri, &self.guest.layers, self.guest.options.clone()).await;
            if generation != self.generation.get() || self.stack.borrow().is_some() {
                // Another task was faster.
                continue;
            }
            match opened {
                Ok(stack) => {
                    self.generation.set(generation + 1);
                    self.oracle().reconnected();
                    self.stack.replace(Some(Rc::new(stack)));
                }
                Err(error) => {
                    let allowed = [
                        Kind::Io,
                        Kind::Disconnected,
                        Kind::TimedOut,
                        Kind::ShuttingDown,
                        Kind::NotFound,
                    ];
                    self.allowed(&error, &allowed)?;
                    sleep(Duration::from_millis(100 * attempt.min(20))).await;
                }
            }
        }
        Err(format!("client {} cannot connect", self.guest.number))
    }

    /// Gives up a connection.
    fn leave(&self, generation: u64) {
        if self.generation.get() != generation || self.stack.borrow().is_none() {
            return;
        }
        self.note("leaves its connection");
        if let Some(stack) = self.stack.replace(None) {
            self.left.replace(Rc::downgrade(&stack));
        }
        if self.has_cache() {
            // What the cache had not written is lost, or is written while it closes.
            self.oracle().lost_cache();
        }
    }

    fn caches_extents(&self) -> bool {
        self.guest.layers.iter().any(|layer| layer.starts_with("extents-cache"))
    }

    fn has_cache(&self) -> bool {
        self.guest.layers.iter().any(|layer| layer.starts_with("cache"))
    }

    /// Whether a layer of the client connects again by itself.
    fn hides_reconnections(&self) -> bool {
        self.guest.layers.iter().any(|layer| layer.starts_with("retry"))
    }

    /// Whether the client still uses this connection.
    fn is_current(&self, stack: &Stack) -> bool {
        self.stack.borrow().as_ref().is_some_and(|current| std::ptr::eq(&**current, stack))
    }

    fn note(&self, text: &str) {
        note(&format!("client {}: {text}", self.guest.number));
    }

    /// Whether an error is one that the faults of a run explain.
    fn allowed(&self, error: &Error, kinds: &[Kind]) -> Result<(), String> {
        let text = error.to_string();
        self.note(&text);
        if kinds.contains(&error.kind()) && !text.contains("broke the protocol") {
            Ok(())
        } else {
            Err(format!("client {}: {text} ({:?})", self.guest.number, error.kind()))
        }
    }
}

/// Errors that requests may have.
const FAULTS: [Kind; 5] =
    [Kind::Io, Kind::Disconnected, Kind::TimedOut, Kind::ShuttingDown, Kind::NoSpace];

/// Requests on a part of a client's sectors.
struct ClientWorker {
    client: Rc<SimulatedClient>,
    range: Range<usize>,
    rng: Rng,
}

impl ClientWorker {
    async fn work(mut self, requests: u64) -> Result<(), String> {
        let client = self.client.clone();
        for _ in 0..requests {
            let Some(_busy) = client.guest.tempo.next(&mut self.rng).await else { break };
            let (stack, generation) = client.connection().await?;
            let ended = timeout(PATIENCE, self.request(&stack)).await;
            let ended = ended.map_err(|_| {
                format!(
                    "client {}: a request has no reply after {PATIENCE:?}",
                    self.client.guest.number
                )
            })?;
            match ended? {
                Some(Kind::Disconnected | Kind::TimedOut | Kind::ShuttingDown) => {
                    self.client.leave(generation);
                }
                // A flush that has failed fails until the device is opened again.
                Some(_) if self.rng.chance(30) => self.client.leave(generation),
                _ => {}
            }
            if self.rng.chance(20) {
                sleep(Duration::from_micros(self.rng.below(20_000))).await;
            }
        }
        Ok(())
    }

    fn sectors(&mut self) -> Range<usize> {
        let start = self.range.start as u64 + self.rng.below(self.range.len() as u64);
        let most = (self.range.end as u64 - start).min(self.client.guest.longest);
        let end = start + self.rng.between(1, most);
        start as usize..end as usize
    }

    /// One request; the kind of its error, if it has one that may be.
    async fn request(&mut self, stack: &Stack) -> Result<Option<Kind>, String> {
        let sectors = self.sectors();
        let settled = self.client.oracle().is_settled(sectors.clone());
        let failed = match self.rng.below(100) {
            0..40 => self.read(stack, sectors).await?,
            40..50 => self.extents(stack, sectors).await?,
            50..60 => self.flush(stack).await?,
            _ if !settled => self.read(stack, sectors).await?,
            _ => self.change(stack, sectors).await?,
        };
        match failed {
            None => Ok(None),
            Some(error) => self.client.allowed(&error, &FAULTS).map(|()| Some(error.kind())),
        }
    }

    async fn read(&self, stack: &Stack, sectors: Range<usize>) -> Result<Option<Error>, String> {
        let at = (sectors.start * SECTOR) as u64;
        let len = sectors.len() * SECTOR;
        let begun = self.client.oracle().begun();
        match stack.device().read(at, len).await {
            Ok(data) => {
                self.client.note(&format!("read {sectors:?}"));
                self.client.oracle().check(sectors, data.bytes(), begun)?;
                Ok(None)
            }
            Err(error) => Ok(Some(error)),
        }
    }

    async fn extents(&self, stack: &Stack, sectors: Range<usize>) -> Result<Option<Error>, String> {
        let begun = self.client.oracle().begun();
        match states(&**stack.device(), sectors.clone()).await {
            Ok(states) => {
                let mut oracle = self.client.oracle();
                for (sector, state) in sectors.zip(states) {
                    if state & ZERO != 0 {
                        oracle.check_zero(sector..sector + 1, begun)?;
                    }
                }
                Ok(None)
            }
            Err(error) => Ok(Some(error)),
        }
    }

    async fn flush(&self, stack: &Stack) -> Result<Option<Error>, String> {
        let flushing = self.client.oracle().flush();
        self.client.note("a flush begins");
        let outcome = stack.device().flush().await;
        self.client.note(if outcome.is_ok() { "flushed" } else { "a flush has failed" });
        match outcome {
            Ok(()) => self.client.oracle().flushed(&flushing).map(|()| None),
            Err(error) => Ok(Some(error)),
        }
    }

    /// A write, a zero or a trim.
    async fn change(
        &mut self,
        stack: &Stack,
        sectors: Range<usize>,
    ) -> Result<Option<Error>, String> {
        let at = (sectors.start * SECTOR) as u64;
        let len = (sectors.len() * SECTOR) as u64;
        let mut value = ZEROES;
        let kind = self.rng.below(10);
        let request = match kind {
            0 => Request::trim(at, len),
            1 | 2 => Request::zero(at, len),
            _ => {
                value = self.client.oracle().fresh();
                Request::write(at, Data::copy_of(&bytes_of(sectors.clone(), value)))
            }
        };
        let durable = self.rng.chance(20);
        let request = if durable { request.with(RequestFlags::FUA) } else { request };
        let begun = self.client.oracle().begun();
        match kind {
            0 => self.client.oracle().begin_trim(sectors.clone()),
            _ => self.client.oracle().begin(sectors.clone(), value),
        }
        let described = format!("{:?} {sectors:?} value {value:#x} fua {durable}", request.kind());
        self.client.note(&format!("{described} begins"));
        let outcome = stack.device().submit(request).await;
        self.client
            .note(&format!("{described}: {}", if outcome.is_ok() { "done" } else { "failed" }));
        let mut oracle = self.client.oracle();
        match outcome {
            // It was acknowledged by a cache that the client has dropped meanwhile.
            Ok(_) if self.client.has_cache() && !self.client.is_current(stack) => {
                oracle.failed(sectors, true);
            }
            Ok(_) if kind == 0 => oracle.trimmed(sectors),
            Ok(_) => {
                oracle.done(sectors.clone(), value, durable, begun);
                if self.client.hides_reconnections() && !self.client.is_current(stack) {
                    // The current connection does not know of it when it is made again.
                    oracle.not_acked(sectors);
                }
            }
            Err(error) => {
                let late = matches!(error.kind(), Kind::Disconnected | Kind::TimedOut | Kind::Io);
                oracle.failed(sectors, late);
                return Ok(Some(error));
            }
        }
        Ok(None)
    }
}
