//! Clients and servers whose peers break the protocol: somebody between them changes bytes. Nothing
//! panics or hangs, memory is within its limit and comes back, and a client with a connection of its
//! own does not notice. Over TLS, no changed byte is accepted.

use std::ops::Range;
use std::time::Duration;

use blockhaul_block::{BlockSizes, ContextSet, Device, DeviceExt, Error, Request};
use blockhaul_catalog::{DeviceSpec, Intent, Registry, Stack};
use blockhaul_client::ConnectOptions;
use blockhaul_io::simulation::{SimulatedMachine, note, set_faults};
use blockhaul_io::{Data, sleep, timeout};
use blockhaul_testkit::model::Model;
use blockhaul_testkit::rng::Rng;

use crate::ScenarioSetup;
use crate::clients::{longest, requests};
use crate::meddler::{self, MeddlerConfig, Victim};
use crate::noise::calm;
use crate::oracle::{Oracle, SECTOR, bytes_of, image};
use crate::site::ServerSite;

/// Sectors of the disk; each of two clients has one half.
const SECTORS: usize = 256;
/// Virtual time in which a request ends.
const PATIENCE: Duration = Duration::from_secs(4 * 3600);

struct HostileScenario {
    site: ServerSite,
    meddling: MeddlerConfig,
    tls: bool,
    options: ConnectOptions,
    requests: u64,
    /// Connections that the client with a hostile peer makes.
    connections: u64,
    /// Longest request in sectors.
    longest: u64,
    rng: Rng,
}

pub(crate) async fn run(setting: ScenarioSetup) -> Result<(), String> {
    set_faults(calm(setting.faults));
    let mut hostile = HostileScenario::new(setting)?;
    note(&format!("{:?} tls {}", hostile.meddling.victim, hostile.tls));
    hostile.site.start(|_| {}).await?;
    hostile.work().await?;
    sleep(Duration::from_secs(3600)).await;
    hostile.site.is_tidy()
}

impl HostileScenario {
    fn new(setting: ScenarioSetup) -> Result<HostileScenario, String> {
        let ScenarioSetup { mut rng, dir, .. } = setting;
        let mut facts = Model::all_facts((SECTORS * SECTOR) as u64);
        facts.zeroed = false;
        facts.block = BlockSizes { minimum: 512, preferred: 4096, ..BlockSizes::default() };
        let workers = rng.between(1, 2) as usize;
        let site = ServerSite::new(dir.join("server"), workers, facts, image(SECTORS));
        let tls = rng.chance(5);
        let site = if tls { site.with_tls()? } else { site };
        let meddling = MeddlerConfig {
            socket: dir.join("between"),
            server: site.socket().to_path_buf(),
            victim: *rng.pick(&[Victim::Server, Victim::Client]),
            rate: *rng.pick(&[1000, 5000, 20_000, 50_000]),
        };
        let options = ConnectOptions {
            timeout: Duration::from_secs(5),
            connect_timeout: Duration::from_secs(*rng.pick(&[5, 60])),
            extended: rng.chance(60),
            structured: rng.chance(80),
            ..ConnectOptions::default()
        };
        let requests = requests(&mut rng);
        let connections = *rng.pick(&[1, 3, 10]);
        let longest = longest(&mut rng);
        Ok(HostileScenario { site, meddling, tls, options, requests, connections, longest, rng })
    }

    async fn work(&mut self) -> Result<(), String> {
        let machine = SimulatedMachine::start(1).map_err(|error| error.to_string())?;
        let meddling = self.meddling.clone();
        let listening = machine.workers()[0].spawn(move || async move { meddler::start(meddling) });
        listening.await.map_err(|_| "nobody listens")??;
        // What clients send may be changed to writes anywhere; over TLS it cannot.
        let is_safe = self.tls || self.meddling.victim == Victim::Client;
        let direct = HostileClient {
            uri: self.site.uri(),
            options: self.options.clone(),
            sectors: 0..SECTORS / 2,
            longest: self.longest,
            rng: Rng::new(self.rng.number()),
            checks: is_safe,
            writes: is_safe,
        };
        let through = HostileClient {
            uri: self.site.uri_over(&self.meddling.socket),
            options: self.options.clone(),
            sectors: SECTORS / 2..SECTORS,
            longest: self.longest,
            rng: Rng::new(self.rng.number()),
            checks: self.tls,
            writes: true,
        };
        let (requests, connections) = (self.requests, self.connections);
        let worker = &machine.workers()[0];
        let honest = worker.spawn(move || direct.undisturbed(requests));
        let harmed = worker.spawn(move || through.harmed(connections, requests));
        honest.await.map_err(|_| "a client was dropped")??;
        harmed.await.map_err(|_| "a client was dropped")??;
        // A killed machine has always been killed.
        let _ = machine.kill().await;
        Ok(())
    }
}

struct HostileClient {
    uri: String,
    options: ConnectOptions,
    /// Those that it reads and writes.
    sectors: Range<usize>,
    longest: u64,
    rng: Rng,
    /// Only known values can be there.
    checks: bool,
    writes: bool,
}

impl HostileClient {
    /// Works over one connection, without an error.
    async fn undisturbed(mut self, requests: u64) -> Result<(), String> {
        let failed = |error: Error| format!("the client without a hostile peer: {error}");
        let mut oracle = Oracle::new(self.sectors.start, self.sectors.len());
        let stack = within(self.open()).await?.map_err(failed)?;
        for _ in 0..requests {
            within(self.request(&stack, &mut oracle)).await??.map_err(failed)?;
        }
        Ok(())
    }

    /// Works over connections that may fail at any time.
    async fn harmed(mut self, connections: u64, requests: u64) -> Result<(), String> {
        let mut oracle = Oracle::new(self.sectors.start, self.sectors.len());
        for _ in 0..connections {
            let stack = match within(self.open()).await? {
                Ok(stack) => stack,
                Err(error) => {
                    note(&error.to_string());
                    continue;
                }
            };
            for _ in 0..requests {
                if let Err(error) = within(self.request(&stack, &mut oracle)).await?? {
                    note(&error.to_string());
                    break;
                }
            }
        }
        Ok(())
    }

    async fn open(&self) -> Result<Stack, Error> {
        let backends = blockhaul_client::all(self.options.clone());
        let registry = Registry { backends, ..Registry::default() };
        registry.open(&DeviceSpec::parse(self.uri.as_ref())?, Vec::new(), Intent::WRITE).await
    }

    /// One request; the outer error is a broken promise.
    async fn request(
        &mut self,
        stack: &Stack,
        oracle: &mut Oracle,
    ) -> Result<Result<(), Error>, String> {
        let sectors = self.some();
        let at = (sectors.start * SECTOR) as u64;
        let len = sectors.len() * SECTOR;
        let device = stack.device();
        Ok(match self.rng.below(10) {
            0 => device.flush().await,
            1 => {
                let request = Request::extents(at, len as u64, ContextSet::first());
                if device.facts().contexts.is_empty() {
                    Ok(())
                } else {
                    device.submit(request).await.map(drop)
                }
            }
            2..6 if self.writes => self.write(&**device, sectors, oracle).await,
            _ => match device.read(at, len).await {
                Ok(data) if self.checks => {
                    let begun = oracle.begun();
                    oracle.check(sectors, data.bytes(), begun).map(Ok)?
                }
                other => other.map(drop),
            },
        })
    }

    async fn write(
        &self,
        device: &dyn Device,
        sectors: Range<usize>,
        oracle: &mut Oracle,
    ) -> Result<(), Error> {
        if !oracle.is_settled(sectors.clone()) {
            return Ok(());
        }
        let value = oracle.fresh();
        let begun = oracle.begun();
        let data = Data::copy_of(&bytes_of(sectors.clone(), value));
        oracle.begin(sectors.clone(), value);
        let written = device.submit(Request::write((sectors.start * SECTOR) as u64, data)).await;
        match written {
            Ok(_) => oracle.done(sectors, value, false, begun),
            Err(_) => oracle.failed(sectors, true),
        }
        written.map(drop)
    }

    fn some(&mut self) -> Range<usize> {
        let start = self.sectors.start as u64 + self.rng.below(self.sectors.len() as u64);
        let most = (self.sectors.end as u64 - start).min(self.longest);
        let end = start + self.rng.between(1, most);
        start as usize..end as usize
    }
}

/// The output, if it comes in time.
async fn within<T>(work: impl Future<Output = T>) -> Result<T, String> {
    timeout(PATIENCE, work).await.map_err(|_| format!("no reply after {PATIENCE:?}"))
}
