//! A machine that writes 20 MB/s, a link of 100 MB/s, and providers and links that fail or lie.

use std::collections::BTreeMap;

use blockhaul_follow::protocol::{
    EndReply, Operation, ProviderRequest, ReplyReader, RoundOffer, VERSION,
};
use blockhaul_follow::{
    CopyFigures, FollowError, FollowErrorKind, FollowLimits, FollowMachine, FollowPhase,
    FollowPlatform, FollowResult, FollowState, RoundCopy, RoundFigures, VerifyScope, run_follow,
};
use blockhaul_testkit::rng::Rng;
use blockhaul_testkit::tools;
use blockhaul_transfer::TransferErrorKind;

const BLOCK: u64 = 256 << 10;
const BLOCKS: usize = 16 << 10;
/// Part of the writes that go to the hot region, and its part of the disk, in percent.
const HOT: (u64, usize) = (80, 4);
/// Seconds of simulation in which the writer keeps its rate.
const STEP: f64 = 0.05;

/// The worlds of the tests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Faults {
    None,
    /// Kills and lost links.
    Links,
    /// Providers that lie, too.
    Lies,
}

/// Kinds of lies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Lie {
    OmittedBlocks,
    OtherSize,
    OtherSince,
    OldEpoch,
    CutReply,
    OtherRound,
    OtherDisk,
    ShorterList,
    OldContents,
}

const LIES: [Lie; 9] = [
    Lie::OmittedBlocks,
    Lie::OtherSize,
    Lie::OtherSince,
    Lie::OldEpoch,
    Lie::CutReply,
    Lie::OtherRound,
    Lie::OtherDisk,
    Lie::ShorterList,
    Lie::OldContents,
];

/// A point in time.
#[derive(Clone)]
struct Moment {
    contents: Vec<u32>,
    time: f64,
}

struct World {
    rng: Rng,
    time: f64,
    contents: Vec<u32>,
    written: Vec<f64>,
    target: Vec<u32>,
    moments: BTreeMap<String, Moment>,
    lists: BTreeMap<String, Vec<usize>>,
    /// The epoch at which the list of each moment begins.
    begins: BTreeMap<String, String>,
    writes: u32,
    runs: bool,
    /// Writes per second: less and more in bursts.
    rate: f64,
    link: f64,
    burst_until: f64,
    faults: Faults,
    lie: Option<Lie>,
    saved: Option<String>,
    has_started: bool,
    lied: bool,
}

impl World {
    fn new(seed: u64, faults: Faults, megabytes: f64) -> World {
        let mut rng = Rng::new(seed);
        let lie = (faults == Faults::Lies).then(|| *rng.pick(&LIES));
        World {
            rng,
            time: 1e9,
            contents: (0..BLOCKS as u32).collect(),
            written: vec![0.0; BLOCKS],
            target: vec![u32::MAX; BLOCKS],
            moments: BTreeMap::new(),
            lists: BTreeMap::new(),
            begins: BTreeMap::new(),
            writes: BLOCKS as u32,
            runs: true,
            rate: megabytes * 1e6 / BLOCK as f64,
            link: 100e6,
            burst_until: 0.0,
            faults,
            lie,
            saved: None,
            has_started: false,
            lied: false,
        }
    }

    /// Time passes, in which the machine writes.
    fn pass(&mut self, seconds: f64) {
        let end = self.time + seconds;
        while self.time < end {
            let step = STEP.min(end - self.time);
            self.time += step;
            if !self.runs {
                continue;
            }
            if self.time > self.burst_until && self.rng.chance(1) {
                self.burst_until = self.time + 0.5;
            }
            let factor = if self.time < self.burst_until { 2.0 } else { 0.9 };
            let count = self.rate * factor * step;
            let part = (count.fract() * 1000.0) as u64;
            let count = count as u64 + u64::from(self.rng.below(1000) < part);
            for _ in 0..count {
                let hot = BLOCKS * HOT.1 / 100;
                let region = if self.rng.below(100) < HOT.0 { hot } else { BLOCKS };
                let block = self.rng.below(region as u64) as usize;
                self.writes += 1;
                self.contents[block] = self.writes;
                self.written[block] = self.time;
            }
        }
    }

    fn offer(&mut self, request: &ProviderRequest) -> RoundOffer {
        let disk = &request.disks[0];
        if let Some(resume) = disk.resume.clone().filter(|name| self.moments.contains_key(name))
            && self.rng.chance(50)
        {
            // The list of a moment begins at one epoch; from another one, all is to be read.
            let since = disk.since.clone();
            let since = since.filter(|since| self.begins.get(&resume) == Some(since));
            let size = BLOCKS as u64 * BLOCK;
            let list = since.as_ref().map(|_| resume.clone().into());
            return RoundOffer {
                version: VERSION,
                round: request.round,
                disk: "vda".into(),
                size,
                source: resume.clone(),
                epoch: resume,
                since,
                ranges: list,
                bitmap: None,
            };
        }
        let name = format!("epoch-{}", self.moments.len());
        let moment = Moment { contents: self.contents.clone(), time: self.time };
        let since = disk.since.clone().filter(|since| self.moments.contains_key(since));
        let begin = since.as_ref().map(|since| self.moments[since].time);
        if let Some(begin) = begin {
            let changed = (0..BLOCKS).filter(|&block| self.written[block] > begin);
            self.lists.insert(name.clone(), changed.collect());
            self.begins.insert(name.clone(), since.clone().unwrap_or_default());
        }
        self.moments.insert(name.clone(), moment);
        let list = since.as_ref().map(|_| name.clone().into());
        RoundOffer {
            version: VERSION,
            round: request.round,
            disk: "vda".into(),
            size: BLOCKS as u64 * BLOCK,
            source: name.clone(),
            epoch: name,
            since,
            ranges: list,
            bitmap: None,
        }
    }

    /// The offer of a provider that lies.
    fn lying(&mut self, mut offer: RoundOffer) -> RoundOffer {
        let Some(lie) = self.lie.filter(|_| self.rng.chance(30)) else { return offer };
        let list = self.lists.get_mut(&offer.source);
        match lie {
            Lie::OmittedBlocks | Lie::ShorterList => match list {
                Some(list) if !list.is_empty() => {
                    let left = self.rng.below(list.len() as u64) as usize;
                    list.truncate(left);
                }
                _ => return offer,
            },
            Lie::OtherSize => offer.size += BLOCK,
            Lie::OtherSince if offer.since.is_some() => offer.since = Some("epoch-x".into()),
            Lie::OldEpoch => offer.epoch = "epoch-0".into(),
            Lie::OtherRound => offer.round += 1,
            Lie::OtherDisk => offer.disk = "vdb".into(),
            Lie::OldContents if offer.since.is_some() => {
                let old = self.moments["epoch-0"].contents.clone();
                self.moments.get_mut(&offer.source).unwrap().contents = old;
            }
            Lie::CutReply | Lie::OtherSince | Lie::OldContents => return offer,
        }
        self.lied = true;
        offer
    }

    fn fails(&mut self, percent: u64) -> bool {
        self.faults != Faults::None && self.rng.chance(percent)
    }
}

/// The name of the list of an offer.
fn list_name(copy: &RoundCopy) -> &str {
    copy.offer.ranges.as_deref().and_then(|path| path.to_str()).unwrap()
}

fn killed() -> FollowError {
    FollowError::new(FollowErrorKind::Cancelled, "killed")
}

impl FollowPlatform for World {
    fn now(&self) -> f64 {
        self.time
    }

    fn save(&mut self, state: &FollowState) -> Result<(), FollowError> {
        if self.fails(3) {
            return Err(killed());
        }
        self.saved = Some(serde_json::to_string(state).unwrap());
        if self.fails(3) { Err(killed()) } else { Ok(()) }
    }

    fn ask(&mut self, request: &ProviderRequest) -> Result<(Vec<RoundOffer>, f64), FollowError> {
        assert!(!request.last || !self.runs, "the last round of a machine that runs");
        let seconds = 0.3 + self.rng.below(100) as f64 / 1000.0;
        let mut reader = ReplyReader::new(request);
        let mut lines = Vec::new();
        if request.operation == Operation::Round {
            let offer = self.offer(request);
            let offer = self.lying(offer);
            lines.push(serde_json::to_string(&offer).unwrap());
        }
        self.pass(seconds);
        let end = EndReply { version: VERSION, round: request.round, end: request.operation };
        lines.push(serde_json::to_string(&end).unwrap());
        if self.lie == Some(Lie::CutReply) && self.rng.chance(30) {
            self.lied = true;
            lines.pop();
        }
        if self.fails(3) {
            return Err(killed());
        }
        for line in &lines {
            reader.line(line)?;
        }
        Ok((reader.finish()?, seconds))
    }

    fn changed_targets(&mut self) -> Vec<(usize, String)> {
        Vec::new()
    }

    fn selected(&mut self, copy: &RoundCopy) -> Result<Option<u64>, FollowError> {
        Ok(Some(self.lists[list_name(copy)].len() as u64 * BLOCK))
    }

    fn copy(&mut self, copies: &[RoundCopy]) -> Result<CopyFigures, FollowError> {
        let [copy] = copies else { panic!("one disk") };
        let blocks: Vec<usize> = match &copy.full {
            Some(_) => (0..BLOCKS).collect(),
            None => self.lists[list_name(copy)].clone(),
        };
        let begin = self.time;
        self.pass(0.2);
        let end = if self.fails(15) {
            self.rng.below(blocks.len() as u64 + 1) as usize
        } else {
            blocks.len()
        };
        for &block in &blocks[..end] {
            self.target[block] = self.moments[&copy.offer.source].contents[block];
        }
        let passes = if copy.last { 2.0 } else { 1.0 };
        self.pass(passes * (end as u64 * BLOCK) as f64 / self.link);
        if end < blocks.len() {
            let lost = FollowErrorKind::Copy(TransferErrorKind::Connection);
            return Err(if self.rng.chance(50) {
                killed()
            } else {
                FollowError::new(lost, "lost")
            });
        }
        let seconds = self.time - begin;
        let bytes = end as u64 * BLOCK;
        Ok(CopyFigures { bytes, read: bytes, seconds })
    }

    fn hold(&mut self, until: Option<f64>) -> Result<bool, FollowError> {
        if let Some(until) = until.filter(|_| self.faults != Faults::None && self.rng.chance(30)) {
            self.pass((until - self.time).max(0.0));
            return Ok(false);
        }
        Ok(true)
    }

    fn stop(&mut self) -> Result<(), FollowError> {
        self.pass(0.2);
        self.runs = false;
        if self.fails(10) { Err(killed()) } else { Ok(()) }
    }

    fn verify(&mut self, copies: &[RoundCopy]) -> Result<Option<(usize, String)>, FollowError> {
        if self.faults != Faults::Lies {
            return Ok(None);
        }
        // The source as it is, by its digests.
        assert!(!self.runs);
        let different = (0..BLOCKS).find(|&block| self.target[block] != self.contents[block]);
        Ok(different.map(|block| (copies[0].disk, format!("at block {block}"))))
    }

    fn start(&mut self) -> Result<(), FollowError> {
        self.has_started = true;
        self.pass(0.2);
        Ok(())
    }

    fn round(&mut self, _: &RoundFigures) {}

    fn phase(&mut self, _: FollowPhase, _: Option<f64>) {}
}

fn limits(verify: VerifyScope) -> FollowLimits {
    // To read all of both sides takes 43 s.
    let downtime = if verify == VerifyScope::All { 60.0 } else { 2.0 };
    FollowLimits { downtime, rounds: 20, until: None, verify }
}

/// Runs a move, again after each kill; the error of a run that no repetition can help, or its result.
fn moved(world: &mut World, verify: VerifyScope) -> Result<FollowResult, FollowError> {
    let disks = ["vda".to_string()];
    for _ in 0..200 {
        let mut machine = match &world.saved {
            None => FollowMachine::new("vm", &disks, limits(verify)),
            Some(state) => {
                let state = serde_json::from_str(state).unwrap();
                FollowMachine::resume("vm", &disks, limits(verify), state, true).unwrap()
            }
        };
        match run_follow(&mut machine, world) {
            Err(error) if error.kind() == FollowErrorKind::Cancelled || error.is_transient() => {
                // Somebody starts the machine where it was, until the command is run again; not when it starts elsewhere.
                let phase = world
                    .saved
                    .as_deref()
                    .map(|state| serde_json::from_str::<FollowState>(state).unwrap().phase);
                let is_here = !matches!(
                    phase,
                    Some(FollowPhase::Starting | FollowPhase::Ending | FollowPhase::Complete)
                );
                if is_here && !world.runs && !world.has_started && world.rng.chance(50) {
                    world.runs = true;
                    world.pass(1.0);
                }
            }
            outcome => return outcome,
        }
    }
    panic!("it does not end");
}

fn runs(short: u64) -> u64 {
    if tools::long() { 10 * short } else { short }
}

#[test]
fn moves_converge_in_four_rounds_and_predict_their_downtime() {
    let (mut near, mut most) = (0, 0);
    for seed in 1..=100 {
        let mut world = World::new(seed, Faults::None, 20.0);
        let result = moved(&mut world, VerifyScope::Written).unwrap();
        assert!(world.target == world.contents, "seed {seed}: the target differs");
        let before = result.rounds.len() - 1;
        assert!(before <= 4, "seed {seed}: {before} rounds");
        most = most.max(before);
        let (predicted, real) = (result.predicted.unwrap(), result.copied);
        assert!(real <= 2.0 * 1.5, "seed {seed}: {real} s");
        near += u32::from((predicted - real).abs() <= 0.2 * real);
        println!("seed {seed}: {before} rounds, predicted {predicted:.2}, real {real:.2}");
    }
    println!("{near} of 100 predictions within 20 %, at most {most} rounds");
    assert!(near >= 90, "{near} of 100 predictions within 20 %");
}

#[test]
fn kills_and_lost_links_never_end_in_a_wrong_success() {
    let mut complete = 0;
    for seed in 1..=runs(100) {
        let mut world = World::new(seed, Faults::Links, 20.0);
        match moved(&mut world, VerifyScope::Written) {
            Ok(_) => {
                assert!(world.target == world.contents, "seed {seed}: the target differs");
                complete += 1;
            }
            Err(error) => {
                assert_eq!(error.kind(), FollowErrorKind::NoConvergence, "seed {seed}: {error}");
            }
        }
    }
    assert!(complete > 50, "{complete}");
}

#[test]
fn lying_providers_never_end_in_a_wrong_success() {
    let mut refused = BTreeMap::new();
    for seed in 1..=runs(200) {
        let mut world = World::new(seed, Faults::Lies, 20.0);
        let outcome = moved(&mut world, VerifyScope::All);
        let lie = world.lie.unwrap();
        match outcome {
            Ok(_) => assert!(world.target == world.contents, "seed {seed}, {lie:?}: wrong"),
            Err(error) => {
                // The provider may fail when everything is done.
                let is_right = !world.has_started || world.target == world.contents;
                assert!(is_right, "seed {seed}, {lie:?}: {error}");
                if world.lied {
                    *refused.entry(format!("{lie:?} {:?}", error.kind())).or_insert(0) += 1;
                } else {
                    assert_eq!(
                        error.kind(),
                        FollowErrorKind::NoConvergence,
                        "seed {seed}: {error}"
                    );
                }
            }
        }
    }
    println!("{refused:?}");
    for kind in [
        "OmittedBlocks Difference",
        "OldContents Difference",
        "OtherSize Provider",
        "CutReply Provider",
    ] {
        assert!(refused.contains_key(kind), "{kind}: {refused:?}");
    }
}

#[test]
fn a_writer_that_is_faster_than_the_link_is_an_error_with_what_it_would_need() {
    let mut world = World::new(7, Faults::None, 400.0);
    let error = moved(&mut world, VerifyScope::Written).unwrap_err();
    assert_eq!(error.kind(), FollowErrorKind::NoConvergence);
    let text = error.to_string();
    assert!(text.contains("the link carries") && text.contains("allow a downtime of"), "{text}");
    assert!(world.runs && !world.has_started);
}

#[test]
fn a_difference_makes_the_next_round_a_full_one() {
    let mut world = World::new(3, Faults::None, 20.0);
    world.faults = Faults::Lies;
    world.lie = Some(Lie::OmittedBlocks);
    // Kills are other faults.
    let mut seed = 3;
    let error = loop {
        match moved(&mut world, VerifyScope::All) {
            Err(error) if error.kind() == FollowErrorKind::Difference => break error,
            _ => {
                seed += 1;
                world = World::new(seed, Faults::Lies, 20.0);
                world.lie = Some(Lie::OmittedBlocks);
            }
        }
    };
    assert_eq!(error.disk(), Some("vda"));
    world.lie = None;
    let result = moved(&mut world, VerifyScope::All).unwrap();
    assert!(world.target == world.contents);
    let last = result.rounds.last().unwrap();
    assert!(last.last && last.full[0].1.contains("differed"), "{last:?}");
}
