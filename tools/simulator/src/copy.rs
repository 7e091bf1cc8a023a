//! Copies that are interrupted: the machine of the copy, the source and the target lose power,
//! connections are cut. Once the faults end, the copy ends; the target is then the source.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use blockhaul_block::{Can, Error, Kind};
use blockhaul_catalog::{DeviceSpec, Intent, Registry, Stack};
use blockhaul_client::ConnectOptions as ClientOptions;
use blockhaul_engine::{CopyProgress, EngineOptions, JournalOptions, copy};
use blockhaul_io::simulation::{Faults, SimulatedMachine, choose, note, random, set_faults};
use blockhaul_io::{Pool, sleep, timeout};
use blockhaul_testkit::model::Model;
use blockhaul_testkit::rng::Rng;

use crate::ScenarioSetup;
use crate::noise::calm;
use crate::site::{ServerSite, pause};

/// Virtual time in which a copy ends once nothing fails any more: more than its retries need.
const PATIENCE: Duration = Duration::from_secs(3600);
/// Memory of a copy.
const MEMORY: u64 = 4 << 20;

/// How an attempt ended: the copy's own result, or none if its machine lost power.
type CopyAttempt = Option<Result<(), Error>>;

struct CopyScenario {
    source: ServerSite,
    target: ServerSite,
    content: Vec<u8>,
    options: EngineOptions,
    client: ClientOptions,
    journal: Option<PathBuf>,
    faults: Faults,
    /// Power cuts and restarts still to come.
    calamities: u64,
    workers: usize,
    rng: Rng,
}

pub(crate) async fn run(setting: ScenarioSetup) -> Result<(), String> {
    let mut copying = CopyScenario::new(setting);
    copying.source.start(|_| {}).await?;
    copying.target.start(|_| {}).await?;
    note(&format!("{:?} {:?}", copying.options, copying.client));
    loop {
        // An attempt that begins after the last fault has to succeed.
        let calm_before = copying.calamities == 0;
        match copying.attempt().await? {
            Some(Ok(())) => break,
            None => {}
            Some(Err(error)) => copying.may_fail(&error, calm_before)?,
        }
    }
    copying.check().await
}

impl CopyScenario {
    fn new(setting: ScenarioSetup) -> CopyScenario {
        let ScenarioSetup { mut rng, dir, faults } = setting;
        // Mostly small ones: they are quick, and fail in as many ways.
        let size: u64 = match rng.below(20) {
            0 => 1 << 20,
            1..4 => 256 << 10,
            4..12 => 64 << 10,
            _ => 16 << 10,
        };
        let size = size - rng.below(2) * rng.below(size - 512);
        let size = size as usize;
        let content = rng.disk(size, 100_000, 60);
        let mut facts = Model::all_facts(size as u64);
        facts.zeroed = false;
        let source_workers = rng.between(1, 2) as usize;
        let path = dir.join("source");
        let source = ServerSite::new(path, source_workers, facts.clone(), content.clone());
        facts.can.set(Can::MULTI_CONN, rng.chance(50));
        let mut garbage = vec![0xa5; size];
        if rng.chance(50) {
            garbage = content.clone();
            garbage[..size / 2].fill(0x5a);
        }
        let target_workers = rng.between(1, 2) as usize;
        let target = ServerSite::new(dir.join("target"), target_workers, facts, garbage);
        let journal = rng.chance(70).then(|| dir.join("journal"));
        let options = options(&mut rng, journal.as_deref());
        let client = ClientOptions {
            timeout: Duration::from_secs(*rng.pick(&[5, 60])),
            extended: rng.chance(70),
            structured: rng.chance(90),
            ..ClientOptions::default()
        };
        let calamities = rng.below(6);
        let workers = rng.between(1, 2) as usize;
        CopyScenario {
            source,
            target,
            content,
            options,
            client,
            journal,
            faults,
            calamities,
            workers,
            rng,
        }
    }

    /// One attempt: while there are calamities left, they happen meanwhile.
    async fn attempt(&mut self) -> Result<CopyAttempt, String> {
        let machine = SimulatedMachine::start(self.workers).map_err(|error| error.to_string())?;
        let source = self.source.uri();
        let target = self.target.uri();
        let options = self.options.clone();
        let client = self.client.clone();
        let mut ticket = machine.workers()[0].spawn(move || go(source, target, options, client));
        while self.calamities > 0 {
            let most = 1 << self.rng.between(8, 20);
            let time = Duration::from_micros(self.rng.below(most));
            if let Ok(ended) = timeout(time, &mut ticket).await {
                return over(ended);
            }
            self.calamities -= 1;
            if self.calamity().await? {
                let _ = machine.kill().await;
                self.tear_journal()?;
                return Ok(None);
            }
        }
        set_faults(calm(self.faults));
        match timeout(PATIENCE, &mut ticket).await {
            Ok(ended) => over(ended),
            Err(_) => Err(format!("the copy does not end within {} s", PATIENCE.as_secs())),
        }
    }

    /// Something bad; true if the copy's own machine loses power.
    async fn calamity(&mut self) -> Result<bool, String> {
        match self.rng.below(5) {
            0 | 1 => return Ok(choose("the copy's machine loses power", 100_000)),
            // Without a flush, nothing has to survive a power cut.
            2 if self.is_durable() && choose("the target loses power", 100_000) => {
                self.target.lose_power().await;
                pause().await;
                self.target.start(|_| {}).await?;
            }
            3 if choose("the target's process ends", 100_000) => {
                self.target.lose_process().await;
                pause().await;
                self.target.start(|_| {}).await?;
            }
            4 if choose("the source loses power", 100_000) => {
                self.source.lose_power().await;
                pause().await;
                self.source.start(|_| {}).await?;
            }
            _ => {}
        }
        Ok(false)
    }

    fn is_durable(&self) -> bool {
        self.options.flush || self.journal.is_some()
    }

    /// The end of the journal may not have reached the disk of the copy's machine.
    fn tear_journal(&self) -> Result<(), String> {
        let Some(path) = &self.journal else { return Ok(()) };
        let Ok(data) = std::fs::metadata(path) else { return Ok(()) };
        let torn = random(2) * random(40);
        let file = std::fs::File::options().write(true).open(path);
        let len = data.len().saturating_sub(torn).max(4096);
        file.and_then(|file| file.set_len(len)).map_err(|error| error.to_string())
    }

    /// Whether the copy may end with this error.
    fn may_fail(&self, error: &Error, calm: bool) -> Result<(), String> {
        // A server that is off refuses connections (ECONNREFUSED).
        let opening = [Kind::Io, Kind::NotFound];
        let allowed = [Kind::Disconnected, Kind::TimedOut, Kind::ShuttingDown];
        let allowed = if error.request().is_none() {
            [&allowed[..], &opening].concat()
        } else {
            allowed.to_vec()
        };
        if !calm && allowed.contains(&error.kind()) {
            Ok(())
        } else {
            Err(format!("the copy fails: {error} ({:?})", error.kind()))
        }
    }

    /// What must hold after a copy that succeeded.
    async fn check(&mut self) -> Result<(), String> {
        // Requests of lost connections may be carried out late.
        sleep(Duration::from_secs(600)).await;
        let first = |disk: &[u8]| first_difference(disk, &self.content);
        if let Some(at) = first(&self.target.live()) {
            return Err(format!("the target differs from the source at {at}"));
        }
        if self.is_durable()
            && let Some(at) = first(&self.target.durable())
        {
            return Err(format!("the target would lose data at {at}"));
        }
        if self.journal.as_ref().is_some_and(|path| path.exists()) {
            return Err("a journal is left after the copy".into());
        }
        self.source.is_tidy()?;
        self.target.is_tidy()
    }
}

/// Where two disks differ first; the length of the shorter one if it is a part of the other.
fn first_difference(one: &[u8], other: &[u8]) -> Option<usize> {
    // Whole slices are compared faster than single bytes.
    if one == other {
        return None;
    }
    let differs = one.iter().zip(other).position(|(one, other)| one != other);
    Some(differs.unwrap_or(one.len().min(other.len())))
}

fn options(rng: &mut Rng, journal: Option<&Path>) -> EngineOptions {
    let journal = journal.map(|path| JournalOptions {
        path: path.to_path_buf(),
        restart: false,
        keep: false,
        interval: Duration::from_millis(*rng.pick(&[0, 1, 20, 1000])),
        source: "source".into(),
        target: "target".into(),
    });
    EngineOptions {
        journal,
        connections: rng.between(1, 4) as usize,
        adaptive_connections: rng.chance(50),
        requests: rng.between(1, 16) as usize,
        adaptive: rng.chance(50),
        request_size: 4096 << rng.below(6),
        adaptive_size: rng.chance(50),
        segment: (64 << 10) << rng.below(2),
        sparse: *rng.pick(&[0, 4096]),
        sampled: rng.chance(50),
        extents: rng.chance(80),
        flush: rng.chance(50),
        retries: *rng.pick(&[0, 1, 8]),
        retry_delay: Duration::from_millis(*rng.pick(&[1, 1000])),
        synchronous: rng.chance(10),
        ..EngineOptions::default()
    }
}

fn over(
    ended: Result<Result<(), Error>, blockhaul_io::LostCompletion>,
) -> Result<CopyAttempt, String> {
    let ended = ended.map_err(|_| "the copy was dropped")?;
    if let Err(error) = &ended {
        note(&format!("the copy fails: {error}"));
    }
    Ok(Some(ended))
}

/// The copy itself, on its machine.
async fn go(
    source: String,
    target: String,
    options: EngineOptions,
    client: ClientOptions,
) -> Result<(), Error> {
    let backends = blockhaul_client::all(client);
    let registry = Registry { backends, ..Registry::default() };
    let source = open(&registry, &source, Intent::READ).await?;
    let target = open(&registry, &target, Intent::TARGET).await?;
    let pool = Pool::new(MEMORY);
    let result = copy(&source, &target, &options, &pool, &Arc::new(CopyProgress::new())).await;
    if pool.reserved() != 0 || pool.peak() > pool.limit() {
        let text = format!("{} bytes of memory are left, {} at most", pool.reserved(), pool.peak());
        return Err(Error::new(Kind::Invalid, text));
    }
    result.map(drop).map_err(Error::from)
}

async fn open(registry: &Registry, uri: &str, intent: Intent) -> Result<Stack, Error> {
    let spec = DeviceSpec::parse(uri.as_ref())?;
    registry.open(&spec, Vec::new(), intent).await
}
