//! Clients of a server with layers on both sides, while connections are cut, the server's process
//! ends, its machine loses power, and its disk fails. Nobody reads what cannot be there; what was
//! flushed stays; every request ends.

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use blockhaul_block::{
    BlockSizes, Contexts, Device, DeviceExt, Error, Flags, HOLE, Kind, OpKind, Reply, Request, ZERO,
};
use blockhaul_catalog::{Intent, Registry, Spec, Stack};
use blockhaul_client::Options;
use blockhaul_io::simulation::{Faults, Machine, choose, note, set_faults};
use blockhaul_io::{Data, sleep, timeout};
use blockhaul_testkit::fault::{FaultDevice, Rule, Then};
use blockhaul_testkit::model::Model;
use blockhaul_testkit::rng::Rng;

use crate::Setting;
use crate::noise::calm;
use crate::oracle::{Oracle, SECTOR, ZEROES, bytes_of, image};
use crate::site::{Site, pause};

/// Sectors of the disk.
const SECTORS: usize = 512;
/// Virtual time in which a request ends, with all retries of all layers.
const PATIENCE: Duration = Duration::from_secs(4 * 3600);
/// Longest request in sectors.
const LEN_MAX: u64 = 64;

/// Which layers there are, and what follows for the run.
struct Layout {
    client: Vec<String>,
    server: Vec<String>,
    /// The client's layers hide a new connection, and trust that it leads to the same disk.
    trusts: bool,
    /// The server's layers lose everything with their process.
    volatile: bool,
    /// The server's layers lose what was not flushed with their process.
    caches: bool,
    /// Extents are those of the disk.
    exact: bool,
    /// Over TLS.
    tls: bool,
}

impl Layout {
    fn new(rng: &mut Rng) -> Layout {
        let trusts = rng.chance(20);
        let unflushed = if trusts { "trust" } else { "fail" };
        let retry = format!("retry?retries={}&unflushed={unflushed}", rng.pick(&[1, 5]));
        let extents = "extents-cache".to_string();
        let cache = "cache?cache-min-block-size=4k".to_string();
        let client = match rng.below(7) {
            0 => vec![retry],
            1 => vec![extents.clone()],
            2 => vec![retry, extents.clone()],
            3 => vec![cache.clone()],
            4 => vec![retry, cache.clone()],
            _ => Vec::new(),
        };
        let server = match rng.below(6) {
            0 => vec![cache],
            1 => vec![extents],
            2 => vec!["cow?cow-block-size=4k".to_string()],
            _ => Vec::new(),
        };
        let has =
            |layers: &[String], name: &str| layers.iter().any(|layer| layer.starts_with(name));
        Layout {
            trusts: has(&client, "retry") && trusts,
            volatile: has(&server, "cow"),
            caches: has(&server, "cache"),
            exact: !has(&client, "cache") && !has(&server, "cache") && !has(&server, "cow"),
            // Rarely: a connection takes as long as a whole run without TLS.
            tls: rng.chance(4),
            client,
            server,
        }
    }
}

struct Serving {
    site: Site,
    layout: Layout,
    faults: Faults,
    options: Options,
    clients: Vec<Arc<Mutex<Oracle>>>,
    calamities: u64,
    requests: u64,
    /// Number of times the disk was started: another disk may be allocated otherwise.
    starts: u64,
    rng: Rng,
}

pub(crate) async fn run(setting: Setting) -> Result<(), String> {
    let mut serving = Serving::new(setting)?;
    note(&format!("layers {:?} over {:?}", serving.layout.client, serving.layout.server));
    serving.start().await?;
    serving.work().await?;
    serving.end().await
}

impl Serving {
    fn new(setting: Setting) -> Result<Serving, String> {
        let Setting { mut rng, dir, faults } = setting;
        let layout = Layout::new(&mut rng);
        let mut facts = Model::all_facts((SECTORS * SECTOR) as u64);
        facts.zeroed = false;
        facts.block = BlockSizes { minimum: 512, preferred: 4096, ..BlockSizes::default() };
        let path = dir.join("server");
        let temporary = |layer: &String| {
            if layer.starts_with('c') {
                format!("{layer}&dir={}", dir.display())
            } else {
                layer.clone()
            }
        };
        let layout = Layout {
            client: layout.client.iter().map(temporary).collect(),
            server: layout.server.iter().map(temporary).collect(),
            ..layout
        };
        let site = Site::new(path, rng.between(1, 2) as usize, facts, image(SECTORS));
        let site = site.with_layers(layout.server.clone());
        let site = if layout.tls { site.with_tls()? } else { site };
        // Caches of several clients would not know of each other.
        let count = if layout.client.is_empty() { rng.between(1, 3) as usize } else { 1 };
        let share = SECTORS / count;
        let oracle = |index| Arc::new(Mutex::new(Oracle::new(index * share, share)));
        let clients = (0..count).map(oracle).collect();
        let options = Options {
            timeout: Duration::from_secs(*rng.pick(&[5, 60])),
            extended: rng.chance(70),
            ..Options::default()
        };
        let calamities = rng.below(6);
        let requests = rng.between(5, 60);
        let starts = 0;
        Ok(Serving { site, layout, faults, options, clients, calamities, requests, starts, rng })
    }

    async fn start(&mut self) -> Result<(), String> {
        self.starts += 1;
        self.site.start(disk_faults).await
    }

    fn oracles(&self) -> impl Iterator<Item = MutexGuard<'_, Oracle>> {
        self.clients.iter().map(|oracle| lock(oracle))
    }

    /// The clients work, while calamities happen.
    async fn work(&mut self) -> Result<(), String> {
        let machine = Machine::start(1).map_err(|error| error.to_string())?;
        let mut working = Vec::new();
        for (number, oracle) in self.clients.iter().enumerate() {
            let oracle = oracle.clone();
            let uri = self.site.uri();
            let layers = self.layout.client.clone();
            let options = self.options.clone();
            let requests = self.requests;
            let rng = Rng::new(self.rng.number());
            working.push(machine.workers()[0].spawn(move || {
                let client = Client::new(number, oracle, uri, layers, options);
                work(client, requests, rng)
            }));
        }
        while self.calamities > 0 {
            self.calamities -= 1;
            let most = 1 << self.rng.between(8, 22);
            sleep(Duration::from_micros(self.rng.below(most))).await;
            self.calamity().await?;
        }
        set_faults(calm(self.faults));
        let mut seen = Vec::new();
        for client in working {
            seen.push(client.await.map_err(|_| "a client was dropped")??);
        }
        self.check_seen(seen).await?;
        // A killed machine has always been killed.
        let _ = machine.kill().await;
        if self.layout.client.iter().any(|layer| layer.starts_with("cache")) {
            self.oracles().for_each(|mut oracle| oracle.lost_cache());
        }
        Ok(())
    }

    async fn calamity(&mut self) -> Result<(), String> {
        match self.rng.below(6) {
            0 if !self.layout.volatile
                && !self.layout.trusts
                && choose("the server loses power", 100_000) =>
            {
                self.power_cut().await;
            }
            1 if !self.layout.volatile
                && (!self.layout.caches || !self.layout.trusts)
                && choose("the server's process ends", 100_000) =>
            {
                self.process_end().await;
            }
            2 if choose("the server disconnects its clients", 100_000) => {
                let Some(server) = self.site.server() else { return Ok(()) };
                for client in server.clients() {
                    server.disconnect(client.number);
                }
                return Ok(());
            }
            3 if !self.layout.volatile
                && (!self.layout.caches || !self.layout.trusts)
                && choose("the server stops", 100_000) =>
            {
                self.site.stop().await?;
                self.process_has_ended();
            }
            4 if choose("a layer of the server changes", 100_000) => {
                return self.site.change_layers().await;
            }
            5 if self.layout.tls && choose("the server reloads its keys", 100_000) => {
                return self.site.reload();
            }
            _ => return Ok(()),
        }
        pause().await;
        self.start().await
    }

    async fn power_cut(&mut self) {
        self.site.lose_power().await;
        for mut oracle in self.oracles() {
            oracle.power_cut();
            oracle.forget_late();
        }
    }

    async fn process_end(&mut self) {
        self.site.lose_process().await;
        self.process_has_ended();
    }

    fn process_has_ended(&self) {
        for mut oracle in self.oracles() {
            if self.layout.caches {
                oracle.power_cut();
            }
            oracle.forget_late();
        }
    }

    /// Reads everything back, flushes it, and reads it again after a power cut.
    async fn end(&mut self) -> Result<(), String> {
        sleep(Duration::from_secs(3600)).await;
        self.site.is_tidy()?;
        if let Some(faults) = self.site.faults() {
            faults.heal();
        }
        self.check_extents().await?;
        if !self.layout.volatile {
            // A disk that has failed a flush fails all that follow.
            self.process_end().await;
            self.site.start(|_| {}).await?;
        }
        self.read_back(!self.layout.volatile).await?;
        if self.layout.volatile {
            return Ok(());
        }
        self.power_cut().await;
        self.site.start(|_| {}).await?;
        self.read_back(false).await
    }

    /// Reads the whole disk over a connection without layers.
    async fn read_back(&mut self, flush: bool) -> Result<(), String> {
        let device = open(&self.site.uri(), &[], self.options.clone()).await;
        let device = device.map_err(|error| format!("the server does not come back: {error}"))?;
        let failed = |error: Error| format!("the disk cannot be read at the end: {error}");
        for oracle in &self.clients {
            let all = lock(oracle).all();
            let at = (all.start * SECTOR) as u64;
            let len = all.len() * SECTOR;
            let data = device.device().read(at, len).await.map_err(failed)?;
            let mut oracle = lock(oracle);
            let losses = oracle.losses();
            oracle.check(all, data.bytes(), losses)?;
        }
        if flush {
            device
                .device()
                .flush()
                .await
                .map_err(|error| format!("the last flush fails: {error}"))?;
            self.oracles().for_each(|mut oracle| oracle.all_durable());
        }
        Ok(())
    }

    /// Checks the extents that clients have seen after their last request.
    async fn check_seen(&self, seen: Vec<Option<Vec<u64>>>) -> Result<(), String> {
        if !self.layout.exact || self.starts > 1 {
            return Ok(());
        }
        for (oracle, ours) in self.clients.iter().zip(seen) {
            let all = lock(oracle).all();
            let Some(ours) = ours else { continue };
            // A cache takes what a failed change has touched for data.
            if !lock(oracle).has_failed() {
                self.compare_extents(all, &ours).await?;
            }
        }
        Ok(())
    }

    /// Checks extents that are reported for sectors against those of the disk. Holes may be reported
    /// as zeroes.
    async fn compare_extents(&self, sectors: Range<usize>, ours: &[u64]) -> Result<(), String> {
        let Some(disk) = self.site.disk() else { return Ok(()) };
        let theirs = states(&**disk, sectors.clone()).await.map_err(|error| error.to_string())?;
        let agree = |ours: u64, theirs: u64| {
            ours & ZERO == theirs & ZERO && (ours & HOLE == 0 || theirs & HOLE != 0)
        };
        match ours.iter().zip(&theirs).position(|(ours, theirs)| !agree(*ours, *theirs)) {
            None => Ok(()),
            Some(index) => Err(format!(
                "sector {} has state {}, but is reported as {}",
                sectors.start + index,
                theirs[index],
                ours[index]
            )),
        }
    }

    /// The same over a connection without layers of its own.
    async fn check_extents(&self) -> Result<(), String> {
        let failures = self.site.faults().map_or(0, |faults| faults.failures().len());
        if !self.layout.exact || failures > 0 {
            return Ok(());
        }
        let failed = |error: Error| format!("the disk has no extents: {error}");
        let stack = open(&self.site.uri(), &[], self.options.clone()).await.map_err(failed)?;
        let ours = states(&**stack.device(), 0..SECTORS).await.map_err(failed)?;
        self.compare_extents(0..SECTORS, &ours).await
    }
}

/// What is wrong with the disk of a server from now on.
fn disk_faults(disk: &FaultDevice) {
    if choose("the disk is slow", 50_000) {
        disk.delay_up_to(Duration::from_millis(20));
        disk.reorder(20);
    }
    if choose("the disk fails", 20_000) {
        disk.add(Rule::new(Then::Fail(Kind::Io)).percent(5));
        disk.add(Rule::new(Then::FailAfter(Kind::Io)).kind(OpKind::Write).percent(5));
    }
    if choose("the disk is full", 10_000) {
        disk.add(Rule::new(Then::FailHalfway(Kind::NoSpace)).kind(OpKind::Write).percent(10));
    }
    if choose("flushes are slow", 20_000) {
        disk.add(Rule::new(Then::Delay(Duration::from_secs(20))).kind(OpKind::Flush).percent(30));
    }
}

fn lock(oracle: &Mutex<Oracle>) -> MutexGuard<'_, Oracle> {
    oracle.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Connects, with these layers over the connection.
async fn open(uri: &str, layers: &[String], options: Options) -> Result<Stack, Error> {
    let backends = blockhaul_client::all(options);
    let registry = Registry { backends, layers: blockhaul_layers::all(), ..Registry::default() };
    let layers = layers.iter().map(|layer| registry.layer(layer)).collect::<Result<_, _>>()?;
    registry.open(&Spec::parse(uri.as_ref())?, layers, Intent::WRITE).await
}

/// The states of sectors in `base:allocation`.
async fn states(device: &dyn Device, range: Range<usize>) -> Result<Vec<u64>, Error> {
    let mut states = Vec::new();
    while states.len() < range.len() {
        let at = ((range.start + states.len()) * SECTOR) as u64;
        let len = ((range.len() - states.len()) * SECTOR) as u64;
        let request = Request::extents(at, len, Contexts::first());
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

/// One client; several of its requests are in flight at a time.
struct Client {
    number: usize,
    oracle: Arc<Mutex<Oracle>>,
    uri: String,
    layers: Vec<String>,
    options: Options,
    /// The connection, and its number.
    stack: RefCell<Option<Rc<Stack>>>,
    generation: Cell<u64>,
}

/// Sends requests on each part of the client's sectors, one at a time there.
///
/// Returns the extents that it sees at the end, if it can.
async fn work(client: Rc<Client>, requests: u64, mut rng: Rng) -> Result<Option<Vec<u64>>, String> {
    let all = lock(&client.oracle).all();
    let parts = rng.between(1, 4) as usize;
    let share = all.len() / parts;
    let mut tasks = Vec::new();
    for part in 0..parts {
        let start = all.start + part * share;
        let client = client.clone();
        let rng = Rng::new(rng.number());
        tasks.push(blockhaul_io::spawn(async move {
            Hand { client, range: start..start + share, rng }.work(requests).await
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

impl Client {
    fn new(
        number: usize,
        oracle: Arc<Mutex<Oracle>>,
        uri: String,
        layers: Vec<String>,
        options: Options,
    ) -> Rc<Client> {
        let stack = RefCell::default();
        let generation = Cell::default();
        Rc::new(Client { number, oracle, uri, layers, options, stack, generation })
    }

    /// The connection, and its number; connects if there is none.
    async fn connection(&self) -> Result<(Rc<Stack>, u64), String> {
        for attempt in 1..10_000 {
            if let Some(stack) = self.stack.borrow().clone() {
                return Ok((stack, self.generation.get()));
            }
            let generation = self.generation.get();
            let opened = open(&self.uri, &self.layers, self.options.clone()).await;
            if generation != self.generation.get() || self.stack.borrow().is_some() {
                // Another task was faster.
                continue;
            }
            match opened {
                Ok(stack) => {
                    self.generation.set(generation + 1);
                    lock(&self.oracle).reconnected();
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
        Err(format!("client {} cannot connect", self.number))
    }

    /// Gives up a connection.
    fn leave(&self, generation: u64) {
        if self.generation.get() != generation || self.stack.borrow().is_none() {
            return;
        }
        self.note("leaves its connection");
        self.stack.replace(None);
        if self.has_cache() {
            // What the cache had not written is lost, or is written while it closes.
            lock(&self.oracle).lost_cache();
        }
    }

    fn has_cache(&self) -> bool {
        self.layers.iter().any(|layer| layer.starts_with("cache"))
    }

    /// Whether the client still uses this connection.
    fn is_current(&self, stack: &Stack) -> bool {
        self.stack.borrow().as_ref().is_some_and(|current| std::ptr::eq(&**current, stack))
    }

    fn note(&self, text: &str) {
        note(&format!("client {}: {text}", self.number));
    }

    /// Whether an error is one that the faults of a run explain.
    fn allowed(&self, error: &Error, kinds: &[Kind]) -> Result<(), String> {
        let text = error.to_string();
        self.note(&text);
        if kinds.contains(&error.kind()) && !text.contains("broke the protocol") {
            Ok(())
        } else {
            Err(format!("client {}: {text} ({:?})", self.number, error.kind()))
        }
    }
}

/// Errors that requests may have.
const FAULTS: [Kind; 5] =
    [Kind::Io, Kind::Disconnected, Kind::TimedOut, Kind::ShuttingDown, Kind::NoSpace];

/// Requests on a part of a client's sectors.
struct Hand {
    client: Rc<Client>,
    range: Range<usize>,
    rng: Rng,
}

impl Hand {
    async fn work(mut self, requests: u64) -> Result<(), String> {
        for _ in 0..requests {
            let (stack, generation) = self.client.connection().await?;
            let ended = timeout(PATIENCE, self.request(&stack)).await;
            let ended = ended.map_err(|_| {
                format!("client {}: a request has no reply after {PATIENCE:?}", self.client.number)
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
        let most = (self.range.end as u64 - start).min(LEN_MAX);
        let end = start + self.rng.between(1, most);
        start as usize..end as usize
    }

    /// One request; the kind of its error, if it has one that may be.
    async fn request(&mut self, stack: &Stack) -> Result<Option<Kind>, String> {
        let sectors = self.sectors();
        let settled = lock(&self.client.oracle).is_settled(sectors.clone());
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
        let losses = lock(&self.client.oracle).losses();
        match stack.device().read(at, len).await {
            Ok(data) => {
                self.client.note(&format!("read {sectors:?}"));
                lock(&self.client.oracle).check(sectors, data.bytes(), losses)?;
                Ok(None)
            }
            Err(error) => Ok(Some(error)),
        }
    }

    async fn extents(&self, stack: &Stack, sectors: Range<usize>) -> Result<Option<Error>, String> {
        match states(&**stack.device(), sectors.clone()).await {
            Ok(states) => {
                let mut oracle = lock(&self.client.oracle);
                for (sector, state) in sectors.zip(states) {
                    if state & ZERO != 0 {
                        oracle.check_zero(sector..sector + 1)?;
                    }
                }
                Ok(None)
            }
            Err(error) => Ok(Some(error)),
        }
    }

    async fn flush(&self, stack: &Stack) -> Result<Option<Error>, String> {
        let flushing = lock(&self.client.oracle).flush();
        self.client.note("a flush begins");
        let outcome = stack.device().flush().await;
        self.client.note(if outcome.is_ok() { "flushed" } else { "a flush has failed" });
        match outcome {
            Ok(()) => lock(&self.client.oracle).flushed(&flushing).map(|()| None),
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
                value = lock(&self.client.oracle).fresh();
                Request::write(at, Data::copy_of(&bytes_of(sectors.clone(), value)))
            }
        };
        let durable = self.rng.chance(20);
        let request = if durable { request.with(Flags::FUA) } else { request };
        let losses = lock(&self.client.oracle).losses();
        match kind {
            0 => lock(&self.client.oracle).begin_trim(sectors.clone()),
            _ => lock(&self.client.oracle).begin(sectors.clone(), value),
        }
        let described = format!("{:?} {sectors:?} value {value:#x} fua {durable}", request.kind());
        self.client.note(&format!("{described} begins"));
        let outcome = stack.device().submit(request).await;
        self.client
            .note(&format!("{described}: {}", if outcome.is_ok() { "done" } else { "failed" }));
        let mut oracle = lock(&self.client.oracle);
        match outcome {
            // It was acknowledged by a cache that the client has dropped meanwhile.
            Ok(_) if self.client.has_cache() && !self.client.is_current(stack) => {
                oracle.failed(sectors, true);
            }
            Ok(_) if kind == 0 => oracle.trimmed(sectors),
            Ok(_) => oracle.done(sectors, value, durable, losses),
            Err(error) => {
                let late = matches!(error.kind(), Kind::Disconnected | Kind::TimedOut | Kind::Io);
                oracle.failed(sectors, late);
                return Ok(Some(error));
            }
        }
        Ok(None)
    }
}
