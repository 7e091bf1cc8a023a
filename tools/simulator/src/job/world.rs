//! A served disk in use, the target of its jobs, and what happens to both.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use blockhaul_block::{BlockSizes, Can, DeviceExt as _, Error, Facts, Kind, OpKind};
use blockhaul_client::ConnectOptions;
use blockhaul_io::simulation::{Faults, SimulatedMachine, choose, note, set_faults};
use blockhaul_io::{Ticket, WorkerHandle, sleep};
use blockhaul_testkit::crash::CrashDevice;
use blockhaul_testkit::fault::{FaultEffect, FaultRule};
use blockhaul_testkit::model::Model;
use blockhaul_testkit::rng::Rng;

use super::bitmaps::{BitmapBaseline, Bitmaps};
use crate::ScenarioSetup;
use crate::clients::{ClientConfig, ClientPace, SimulatedClient, lock, longest, open, work};
use crate::desk::{JobServer, JobServerConfig, OWN};
use crate::noise::calm;
use crate::oracle::{Oracle, SECTOR, image};
use crate::serve::disk_faults;
use crate::site::{ServerSite, pause};

/// Requests of each client: more than it makes until it is asked to end.
const REQUESTS: u64 = 1_000_000;
/// After this time, no request of a lost connection is carried out any more.
const LATE: Duration = Duration::from_secs(100);
/// Attempts to open a disk over a bad network.
const ATTEMPTS: u32 = 200;

/// What there is.
pub(super) struct JobWorld {
    pub(super) rng: Rng,
    pub(super) dir: PathBuf,
    sectors: usize,
    /// The server of the disk, with the jobs.
    pub(super) live: ServerSite,
    /// Where the disk is, once clients have moved from the server's own disk to a target.
    home: Option<ServerSite>,
    /// Where jobs write.
    pub(super) target: ServerSite,
    targets: u64,
    /// A flush of one connection to the target covers what the others have written.
    pub(super) target_is_shared: bool,
    pub(super) bitmaps: Bitmaps,
    /// The bitmap of what has changed since the backup on the target.
    pub(super) chain: Option<String>,
    /// Number of bitmaps so far.
    pub(super) begun: u64,
    pub(super) tempo: Arc<ClientPace>,
    oracles: Vec<Arc<Mutex<Oracle>>>,
    longest: u64,
    options: ConnectOptions,
    faults: Faults,
    /// Nothing goes wrong any more.
    pub(super) is_calm: bool,
    calamities: u64,
    /// Number of things that have gone wrong.
    troubles: u64,
    /// A disk is slow or fails as long as its server runs.
    pub(super) has_bad_disk: bool,
    /// Number of servers of the disk so far.
    pub(super) starts: u64,
    /// Number of times that clients have moved.
    moves: u64,
}

/// How a server ends.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ServerShutdown {
    InOrder,
    /// In order, and then its machine loses power.
    InOrderThenPower,
    Killed,
    Power,
}

/// Clients at work, and their machine.
pub(super) struct ClientMachine {
    machine: SimulatedMachine,
    clients: Vec<Ticket<Result<Option<Vec<u64>>, String>>>,
}

impl JobWorld {
    pub(super) fn new(setting: ScenarioSetup) -> Result<JobWorld, String> {
        let ScenarioSetup { mut rng, dir, faults } = setting;
        // Mostly small ones: they are quick, and what happens concerns more of them.
        let sectors = *rng.pick(&[128, 128, 129, 300, 512, 2049]);
        let longest = longest(&mut rng);
        let bitmaps = dir.join("bitmaps");
        std::fs::create_dir(&bitmaps).map_err(|error| error.to_string())?;
        let workers = rng.between(1, 2) as usize;
        let facts = facts(sectors, true);
        let live = ServerSite::new(dir.join("live"), workers, facts.clone(), image(sectors));
        let live = live.with_jobs(JobServerConfig { bitmaps, device: None });
        let target = ServerSite::new(dir.join("target-0"), 1, facts, vec![0; sectors * SECTOR]);
        let clients = rng.between(1, 3) as usize;
        let share = sectors / clients;
        let oracle = |index| Arc::new(Mutex::new(Oracle::new(index * share, share)));
        let oracles = (0..clients).map(oracle).collect();
        let options = ConnectOptions {
            timeout: Duration::from_secs(*rng.pick(&[5, 60])),
            extended: rng.chance(70),
            ..ConnectOptions::default()
        };
        let pace = Duration::from_millis(*rng.pick(&[1, 10, 100]));
        Ok(JobWorld {
            dir,
            sectors,
            live,
            home: None,
            target,
            targets: 0,
            target_is_shared: true,
            bitmaps: Bitmaps::default(),
            chain: None,
            begun: 0,
            tempo: ClientPace::of(pace),
            oracles,
            longest,
            options,
            faults,
            is_calm: false,
            calamities: rng.below(6),
            troubles: 0,
            has_bad_disk: false,
            starts: 0,
            moves: 0,
            rng,
        })
    }

    /// Starts the server of the disk.
    pub(super) async fn start(&mut self) -> Result<(), String> {
        self.starts += 1;
        let healthy = self.is_calm;
        for attempt in 1.. {
            let mut bad = false;
            let prepare = |disk: &_| bad = !healthy && disk_faults(disk);
            match self.live.start(prepare).await {
                // A disk elsewhere may be out of reach for a while.
                Err(why) if self.home.is_some() && attempt < ATTEMPTS => {
                    note(&why);
                    sleep(Duration::from_secs(1)).await;
                }
                ended => {
                    self.has_bad_disk |= bad;
                    return ended;
                }
            }
        }
        Ok(())
    }

    /// A target with other contents, or these.
    pub(super) async fn new_target(&mut self, contents: Option<Vec<u8>>) -> Result<(), String> {
        self.targets += 1;
        self.chain = None;
        let path = self.dir.join(format!("target-{}", self.targets));
        self.target_is_shared = self.rng.chance(70);
        let facts = facts(self.sectors, self.target_is_shared);
        let size = self.sectors * SECTOR;
        let garbage = |rng: &mut Rng| rng.disk(size, 50_000, 50);
        let contents = contents.unwrap_or_else(|| garbage(&mut self.rng));
        let target = ServerSite::new(path, self.rng.between(1, 2) as usize, facts, contents);
        let mut before = std::mem::replace(&mut self.target, target);
        before.lose_process().await;
        self.start_target().await
    }

    pub(super) async fn start_target(&mut self) -> Result<(), String> {
        let healthy = self.is_calm;
        let mut bad = false;
        let started = self.target.start(|disk| bad = !healthy && disk_faults(disk)).await;
        self.has_bad_disk |= bad;
        started
    }

    /// Its clients begin to work.
    pub(super) fn begin_work(&mut self) -> Result<ClientMachine, String> {
        let machine = SimulatedMachine::start(1).map_err(|error| error.to_string())?;
        let mut clients = Vec::new();
        for (number, oracle) in self.oracles.iter().enumerate() {
            let guest = ClientConfig {
                number,
                oracle: oracle.clone(),
                uri: self.live.uri(),
                layers: Vec::new(),
                options: self.options.clone(),
                longest: self.longest,
                tempo: self.tempo.clone(),
            };
            let rng = Rng::new(self.rng.number());
            let client = move || work(SimulatedClient::new(guest), REQUESTS, rng);
            clients.push(machine.workers()[0].spawn(client));
        }
        Ok(ClientMachine { machine, clients })
    }

    /// Its clients end.
    pub(super) async fn end_work(&mut self, working: ClientMachine) -> Result<(), String> {
        self.tempo.end();
        for client in working.clients {
            client.await.map_err(|_| "a client was dropped")??;
        }
        // A killed machine has always been killed.
        let _ = working.machine.kill().await;
        Ok(())
    }

    /// A worker of the server, and its jobs.
    pub(super) fn desk(&self) -> Result<(WorkerHandle, JobServer), String> {
        self.live.desk().ok_or_else(|| "the server is off".to_string())
    }

    /// The site with the disk.
    fn site(&self) -> &ServerSite {
        self.home.as_ref().unwrap_or(&self.live)
    }

    /// The disk that clients use.
    pub(super) fn disk(&self) -> Result<Arc<CrashDevice>, String> {
        self.site().disk().cloned().ok_or_else(|| "the disk is off".to_string())
    }

    fn oracles(&self) -> impl Iterator<Item = MutexGuard<'_, Oracle>> {
        self.oracles.iter().map(|oracle| lock(oracle))
    }

    /// What may have made a job fail, as a number that grows.
    pub(super) fn blame(&self) -> u64 {
        let failures =
            |site: &ServerSite| site.faults().map_or(0, |faults| faults.failures().len());
        let sites = [Some(&self.live), Some(&self.target), self.home.as_ref()];
        let failures: usize = sites.into_iter().flatten().map(failures).sum();
        self.troubles + failures as u64
    }

    /// Whether no flush of the disk can have failed.
    fn can_flush(&self) -> bool {
        let has_failed = has_failed(self.site());
        let is_here = self.home.is_none() && !self.has_moved();
        !self.has_bad_disk && !has_failed && (is_here || !self.has_bad_network())
    }

    /// Whether flushes of the target may fail because one has failed before: they do until the target is
    /// opened again.
    pub(super) fn target_has_failed(&self) -> bool {
        has_failed(&self.target)
    }

    /// Whether connections can be lost.
    pub(super) fn has_bad_network(&self) -> bool {
        !self.is_calm && (self.faults.cut > 0 || self.faults.refuse > 0)
    }

    /// The network is as bad as it was, or calm for a while.
    pub(super) fn set_calm(&self, is_calm: bool) {
        let faults = if is_calm || self.is_calm { calm(self.faults) } else { self.faults };
        set_faults(faults);
    }

    /// Disks carry out what is asked of them from now on.
    pub(super) fn heal(&self) {
        let sites = [Some(&self.live), Some(&self.target), self.home.as_ref()];
        for faults in sites.into_iter().flatten().filter_map(ServerSite::faults) {
            faults.heal();
        }
    }

    /// Whether clients use another disk now than the server was started with.
    fn has_moved(&self) -> bool {
        let started_with = self.home.as_ref().map_or(OWN.to_string(), ServerSite::uri);
        self.desk().is_ok_and(|(_, desk)| desk.export.storage() != started_with)
    }

    /// Number of times that clients have moved to another disk.
    pub(super) fn moves(&self) -> u64 {
        self.moves + u64::from(self.has_moved())
    }

    /// Notes that clients have moved to the target, if they have; there is a new target then.
    pub(super) async fn follow(&mut self) -> Result<(), String> {
        if !self.has_moved() {
            return Ok(());
        }
        note("clients have moved");
        self.moves += 1;
        self.live.serve_instead(self.target.uri());
        let path = self.dir.join("none");
        let none = ServerSite::new(path, 1, facts(1, true), vec![0; SECTOR]);
        let target = std::mem::replace(&mut self.target, none);
        if let Some(mut before) = self.home.replace(target) {
            before.lose_process().await;
        }
        self.new_target(None).await
    }

    /// The base of a bitmap: these contents, which the disk had at a moment since the last restart.
    pub(super) fn base(&self, contents: Vec<u8>) -> BitmapBaseline {
        let is_elsewhere = self.home.is_some() || self.has_moved();
        let all = self.oracles().flat_map(|oracle| oracle.unsettled());
        BitmapBaseline {
            contents,
            unsettled: if is_elsewhere { all.collect() } else { Vec::new() },
        }
    }

    /// Something bad, if it is time for that.
    pub(super) async fn calamity(&mut self) -> Result<(), String> {
        if self.calamities == 0 || self.is_calm {
            return Ok(());
        }
        self.calamities -= 1;
        let end = match self.rng.below(10) {
            0 if choose("the server loses power", 100_000) => ServerShutdown::Power,
            1 if choose("the server's process ends", 100_000) => ServerShutdown::Killed,
            2 if choose("the server stops", 100_000) => ServerShutdown::InOrder,
            3 if choose("the server stops, and loses power", 100_000) => {
                ServerShutdown::InOrderThenPower
            }
            _ => return self.lesser_calamity().await,
        };
        self.troubles += 1;
        self.restart(end).await
    }

    async fn lesser_calamity(&mut self) -> Result<(), String> {
        self.follow().await?;
        match self.rng.below(6) {
            0 if choose("the target loses power", 100_000) => {
                self.target.lose_power().await;
                self.troubles += 1;
                pause().await;
                self.start_target().await?;
            }
            1 if choose("the target's process ends", 100_000) => {
                self.target.lose_process().await;
                self.troubles += 1;
                pause().await;
                self.start_target().await?;
            }
            2 if choose("a server disconnects its clients", 100_000) => {
                let site = *self.rng.pick(&[&self.live, &self.target]);
                let Some(server) = site.server() else { return Ok(()) };
                for client in server.clients() {
                    server.disconnect(client.number);
                }
                self.troubles += 1;
            }
            3 if choose("requests of a disk fail", 100_000) => self.disk_fails(),
            4 if self.home.is_some() && choose("the disk elsewhere loses power", 100_000) => {
                self.home_loses_power().await?;
            }
            _ => {}
        }
        Ok(())
    }

    /// Some requests of one side of a job fail.
    fn disk_fails(&mut self) {
        let kind = *self.rng.pick(&[Kind::Io, Kind::NoSpace]);
        let rule = |then, on| FaultRule::new(then).kind(on);
        let percent = self.rng.between(5, 60);
        let times = self.rng.between(1, 4);
        let (site, rules) = if self.rng.chance(40) {
            (self.site(), vec![rule(FaultEffect::Fail(Kind::Io), OpKind::Read)])
        } else {
            let all = [OpKind::Write, OpKind::Zero, OpKind::Flush];
            let some = if self.rng.chance(80) { &all[..2] } else { &all[2..] };
            let thens = [
                FaultEffect::Fail(kind),
                FaultEffect::FailAfter(kind),
                FaultEffect::FailHalfway(kind),
            ];
            let then = *self.rng.pick(&thens);
            (&self.target, some.iter().map(|on| rule(then, *on)).collect())
        };
        let Some(faults) = site.faults() else { return };
        rules.into_iter().for_each(|rule| faults.add(rule.percent(percent).times(times)));
    }

    async fn home_loses_power(&mut self) -> Result<(), String> {
        self.troubles += 1;
        let Some(home) = &mut self.home else { return Ok(()) };
        home.lose_power().await;
        self.oracles().for_each(|mut oracle| oracle.power_cut());
        // They may lack what is lost now. After a server that ends in order they must not be sound.
        self.bitmaps.server_has_ended(false);
        pause().await;
        if let Some(home) = &mut self.home {
            home.start(|_| {}).await?;
        }
        let end =
            if self.rng.chance(50) { ServerShutdown::InOrder } else { ServerShutdown::Killed };
        self.restart(end).await
    }

    /// Ends the server of the disk, and starts it again.
    async fn restart(&mut self, end: ServerShutdown) -> Result<(), String> {
        let in_order = matches!(end, ServerShutdown::InOrder | ServerShutdown::InOrderThenPower);
        if in_order {
            self.live.quit().await?;
        }
        // A failed flush leaves bitmaps inconsistent, too.
        let is_sound = in_order && self.can_flush();
        self.follow().await?;
        let is_here = self.home.is_none();
        if matches!(end, ServerShutdown::Power | ServerShutdown::InOrderThenPower) {
            self.live.lose_power().await;
            if is_here {
                self.oracles().for_each(|mut oracle| oracle.power_cut());
            }
        } else {
            self.live.lose_process().await;
        }
        self.bitmaps.server_has_ended(is_sound);
        if is_here {
            self.oracles().for_each(|mut oracle| oracle.forget_late());
            pause().await;
        } else {
            sleep(LATE).await;
        }
        self.start().await?;
        self.check_bitmaps()
    }

    /// Every byte that has changed is in a dirty block.
    pub(super) fn check_bitmaps(&mut self) -> Result<(), String> {
        let (_, desk) = self.desk()?;
        let now = self.disk()?.live();
        self.bitmaps.check(&desk.export, &now)?;
        let sound = |name: &String| self.bitmaps.is_sound(name);
        self.chain = self.chain.take().filter(sound);
        Ok(())
    }

    /// Nothing goes wrong from now on: both servers start again with sound disks.
    pub(super) async fn become_calm(&mut self) -> Result<(), String> {
        self.is_calm = true;
        self.set_calm(true);
        self.heal();
        self.follow().await?;
        if self.home.is_some() {
            self.home_restarts(false).await?;
        }
        self.restart(ServerShutdown::InOrder).await?;
        self.target.stop().await?;
        self.has_bad_disk = false;
        self.start_target().await
    }

    /// The server of a disk elsewhere starts again. Its client, our server, must do so, too.
    async fn home_restarts(&mut self, power: bool) -> Result<(), String> {
        sleep(LATE).await;
        if let Some(home) = &mut self.home {
            if power {
                home.lose_power().await;
            } else {
                home.stop().await?;
            }
            home.start(|_| {}).await?;
        }
        self.bitmaps.clear();
        self.chain = None;
        Ok(())
    }

    /// Reads everything back, flushes it, and reads it again after a power cut.
    pub(super) async fn end(&mut self) -> Result<(), String> {
        sleep(Duration::from_secs(3600)).await;
        self.live.is_tidy()?;
        self.target.is_tidy()?;
        self.check_bitmaps()?;
        self.read_back(true).await?;
        let end = if self.home.is_some() { ServerShutdown::Killed } else { ServerShutdown::Power };
        if self.home.is_some() {
            self.home_restarts(true).await?;
            self.oracles().for_each(|mut oracle| oracle.power_cut());
        }
        self.restart(end).await?;
        self.read_back(false).await
    }

    /// Reads the whole disk over a new connection.
    async fn read_back(&self, flush: bool) -> Result<(), String> {
        let failed = |error: Error| format!("the disk cannot be read at the end: {error}");
        let stack = open(&self.live.uri(), &[], self.options.clone()).await.map_err(failed)?;
        for oracle in &self.oracles {
            let all = lock(oracle).all();
            let at = (all.start * SECTOR) as u64;
            let data = stack.device().read(at, all.len() * SECTOR).await.map_err(failed)?;
            let mut oracle = lock(oracle);
            let begun = oracle.begun();
            oracle.check(all, data.bytes(), begun)?;
        }
        if flush {
            let flushed = stack.device().flush().await;
            flushed.map_err(|error| format!("the last flush fails: {error}"))?;
            self.oracles().for_each(|mut oracle| oracle.all_durable());
        }
        Ok(())
    }
}

/// Whether a request to the disk has failed since its server has started.
fn has_failed(site: &ServerSite) -> bool {
    site.faults().is_some_and(|faults| !faults.failures().is_empty())
}

fn facts(sectors: usize, multi_conn: bool) -> Facts {
    let mut facts = Model::all_facts((sectors * SECTOR) as u64);
    facts.zeroed = false;
    facts.can.set(Can::MULTI_CONN, multi_conn);
    facts.block = BlockSizes { minimum: 512, preferred: 4096, ..BlockSizes::default() };
    facts
}
