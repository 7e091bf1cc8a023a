//! Clients of a server with layers on both sides, while connections are cut, the server's process
//! ends, its machine loses power, and its disk fails. Nobody reads what cannot be there; what was
//! flushed stays; every request ends.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use blockhaul_block::{BlockSizes, Can, DeviceExt, Error, HOLE, Kind, OpKind, ZERO};
use blockhaul_client::ConnectOptions;
use blockhaul_io::simulation::{Faults, SimulatedMachine, choose, note, set_faults};
use blockhaul_io::sleep;
use blockhaul_testkit::fault::{FaultDevice, FaultEffect, FaultRule};
use blockhaul_testkit::model::Model;
use blockhaul_testkit::rng::Rng;

use crate::ScenarioSetup;
use crate::clients::{ClientConfig, SimulatedClient, lock, longest, open, requests, states, work};
use crate::noise::calm;
use crate::oracle::{Oracle, SECTOR, image};
use crate::site::{ServerSite, pause};

/// Which layers there are, and what follows for the run.
struct LayerLayout {
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
    /// Each client opens the disk for itself.
    per_client: bool,
}

impl LayerLayout {
    fn new(rng: &mut Rng) -> LayerLayout {
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
        LayerLayout {
            trusts: has(&client, "retry") && trusts,
            volatile: has(&server, "cow"),
            caches: has(&server, "cache"),
            exact: !has(&client, "cache") && !has(&server, "cache") && !has(&server, "cow"),
            // Rarely: a connection takes as long as a whole run without TLS.
            tls: rng.chance(4),
            per_client: rng.chance(25),
            client,
            server,
        }
    }
}

/// Whether a layer of this kind is among these.
fn has(layers: &[String], name: &str) -> bool {
    layers.iter().any(|layer| layer.starts_with(name))
}

struct ServeScenario {
    site: ServerSite,
    layout: LayerLayout,
    faults: Faults,
    options: ConnectOptions,
    clients: Vec<Arc<Mutex<Oracle>>>,
    /// Of the disk.
    sectors: usize,
    /// Longest request in sectors.
    longest: u64,
    calamities: u64,
    requests: u64,
    /// Number of times the disk was started: another disk may be allocated otherwise.
    starts: u64,
    rng: Rng,
}

pub(crate) async fn run(setting: ScenarioSetup) -> Result<(), String> {
    let mut serving = ServeScenario::new(setting)?;
    note(&format!("layers {:?} over {:?}", serving.layout.client, serving.layout.server));
    serving.start().await?;
    serving.work().await?;
    serving.end().await
}

impl ServeScenario {
    fn new(setting: ScenarioSetup) -> Result<ServeScenario, String> {
        let ScenarioSetup { mut rng, dir, faults } = setting;
        let layout = LayerLayout::new(&mut rng);
        let sectors = *rng.pick(&[64, 128, 512]);
        let longest = longest(&mut rng);
        let mut facts = Model::all_facts((sectors * SECTOR) as u64);
        facts.zeroed = false;
        facts.block = BlockSizes { minimum: 512, preferred: 4096, ..BlockSizes::default() };
        if layout.per_client {
            // A cache of extents has to see the requests of all connections.
            let is_shared = has(&layout.server, "extents-cache") || rng.chance(50);
            facts.can.set(Can::MULTI_CONN, is_shared);
        }
        let path = dir.join("server");
        let temporary = |layer: &String| {
            if layer.starts_with('c') {
                format!("{layer}&dir={}", dir.display())
            } else {
                layer.clone()
            }
        };
        let layout = LayerLayout {
            client: layout.client.iter().map(temporary).collect(),
            server: layout.server.iter().map(temporary).collect(),
            ..layout
        };
        let site = ServerSite::new(path, rng.between(1, 2) as usize, facts, image(sectors));
        let site = site.with_layers(layout.server.clone());
        let site = if layout.tls { site.with_tls()? } else { site };
        let site = if layout.per_client { site.with_device_per_client() } else { site };
        // Caches of several clients would not know of each other.
        let count = if layout.client.is_empty() { rng.between(1, 3) as usize } else { 1 };
        let share = sectors / count;
        let oracle = |index| Arc::new(Mutex::new(Oracle::new(index * share, share)));
        let clients = (0..count).map(oracle).collect();
        let options = ConnectOptions {
            timeout: Duration::from_secs(*rng.pick(&[5, 60])),
            extended: rng.chance(70),
            ..ConnectOptions::default()
        };
        let calamities = rng.below(6);
        let requests = requests(&mut rng);
        let starts = 0;
        Ok(ServeScenario {
            site,
            layout,
            faults,
            options,
            clients,
            sectors,
            longest,
            calamities,
            requests,
            starts,
            rng,
        })
    }

    async fn start(&mut self) -> Result<(), String> {
        self.starts += 1;
        // A cache that cannot be written back when the last client leaves is lost, which only the log says.
        let may_fail = !(self.layout.per_client && self.layout.caches);
        // Requests may fail: nobody asks why.
        let prepare = |disk: &FaultDevice| {
            if may_fail {
                disk_faults(disk);
            }
        };
        self.site.start(prepare).await
    }

    fn oracles(&self) -> impl Iterator<Item = MutexGuard<'_, Oracle>> {
        self.clients.iter().map(|oracle| lock(oracle))
    }

    /// The clients work, while calamities happen.
    async fn work(&mut self) -> Result<(), String> {
        let machine = SimulatedMachine::start(1).map_err(|error| error.to_string())?;
        let mut working = Vec::new();
        for (number, oracle) in self.clients.iter().enumerate() {
            let oracle = oracle.clone();
            let uri = self.site.uri();
            let layers = self.layout.client.clone();
            let options = self.options.clone();
            let requests = self.requests;
            let rng = Rng::new(self.rng.number());
            let (longest, tempo) = (self.longest, Arc::default());
            let guest = ClientConfig { number, oracle, uri, layers, options, longest, tempo };
            working.push(
                machine.workers()[0]
                    .spawn(move || work(SimulatedClient::new(guest), requests, rng)),
            );
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
            let begun = oracle.begun();
            oracle.check(all, data.bytes(), begun)?;
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
        let ours = states(&**stack.device(), 0..self.sectors).await.map_err(failed)?;
        self.compare_extents(0..self.sectors, &ours).await
    }
}

/// What is wrong with the disk of a server from now on; whether anything is.
pub(crate) fn disk_faults(disk: &FaultDevice) -> bool {
    let mut is_bad = false;
    if choose("the disk is slow", 50_000) {
        disk.delay_up_to(Duration::from_millis(20));
        disk.reorder(20);
    }
    if choose("the disk fails", 20_000) {
        disk.add(FaultRule::new(FaultEffect::Fail(Kind::Io)).percent(5));
        disk.add(FaultRule::new(FaultEffect::FailAfter(Kind::Io)).kind(OpKind::Write).percent(5));
        is_bad = true;
    }
    if choose("the disk is full", 10_000) {
        disk.add(
            FaultRule::new(FaultEffect::FailHalfway(Kind::NoSpace)).kind(OpKind::Write).percent(10),
        );
        is_bad = true;
    }
    if choose("flushes are slow", 20_000) {
        disk.add(
            FaultRule::new(FaultEffect::Delay(Duration::from_secs(20)))
                .kind(OpKind::Flush)
                .percent(30),
        );
        is_bad = true;
    }
    is_bad
}
