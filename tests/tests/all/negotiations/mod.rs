//! Random options, then random requests, from a seed: the same to our server, Debian's nbdkit and qemu-nbd.
//! What ours answers is judged by the protocol document: which replies an option may have in the state that
//! those before it have made, how chunks are put together, what is stored. What the peers answer is shown where
//! ours is wrong, and with `BLOCKHAUL_DIFFERENCES` wherever ours differs from both.
//!
//! Some dozens of fixed seeds are run always, thousands with `BLOCKHAUL_LONG`; `BLOCKHAUL_SEED` runs one.

mod answers;
mod judge;
mod options;
mod requests;
mod talk;

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::time::Duration;

use blockhaul_testkit::rng::{self, Rng};
use blockhaul_testkit::tools::{PeerProgram, PeerServer, ScratchDir};
use blockhaul_tests::{program, text};
use blockhaul_wire::ReplyForm;
use rustix::fs::{FallocateFlags, fallocate};

use talk::{Script, Step, talk};

/// Bytes of the disks: whole sectors, for qemu-nbd knows no others.
const SIZE: u64 = 300 << 10;

/// How long our server may be silent, and a peer, on whom nothing depends.
const PATIENCE: [Duration; 2] = [Duration::from_secs(60), Duration::from_secs(1)];

/// What must hold, else the rest as a message.
macro_rules! ask {
    ($holds:expr, $($why:tt)+) => {
        if !$holds {
            return Err(format!($($why)+));
        }
    };
}
pub(crate) use ask;

/// A server, and the disk that it serves.
struct Place {
    server: PeerServer,
    disk: PathBuf,
    /// What is on the disk before a conversation.
    content: Vec<u8>,
    /// Options are sent a second time, in pieces, and the end of the connection is awaited.
    ours: bool,
    patience: Duration,
}

impl Place {
    fn new(
        scratch: &ScratchDir,
        name: &str,
        start: impl Fn(&str, &str) -> Result<PeerServer, String>,
    ) -> Place {
        let disk = scratch.file(&format!("{name}.img"));
        File::create(&disk).unwrap().set_len(SIZE).unwrap();
        let server = start(name, text(&disk)).unwrap();
        let ours = name == "ours";
        let patience = PATIENCE[usize::from(!ours)];
        Place { server, disk, content: vec![], ours, patience }
    }

    /// Data, zeroes that take room, and holes; what is where follows from the seed.
    fn fill(&mut self, seed: u64) {
        let rng = &mut Rng::new(seed);
        let file = File::options().write(true).open(&self.disk).unwrap();
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(&file, flags, 0, SIZE).unwrap();
        self.content = vec![0; SIZE as usize];
        for _ in 0..4 {
            let at = rng.below(SIZE);
            let mut bytes = vec![0; rng.between(1, 50_000).min(SIZE - at) as usize];
            if rng.chance(80) {
                rng.fill(&mut bytes);
            }
            file.write_all_at(&bytes, at).unwrap();
            self.content[at as usize..][..bytes.len()].copy_from_slice(&bytes);
        }
    }

    fn run(&mut self, seed: u64) -> Result<Vec<Step>, String> {
        self.fill(seed);
        talk(self, &Script::random(&mut Rng::new(seed)))
    }
}

fn ours(scratch: &ScratchDir) -> Place {
    Place::new(scratch, "ours", |name, disk| {
        let args = ["-e", "disk=[", disk, "--description", "a disk", "]"];
        let more = ["-e", "ro=[", disk, "--readonly", "]"];
        PeerServer::blockhaul(program(), &scratch.socket(name), &[&args[..], &more].concat())
    })
}

/// The peers that are there.
fn peers(scratch: &ScratchDir) -> Vec<Place> {
    let mut places = Vec::new();
    if let Ok(nbdkit) = PeerProgram::find("nbdkit") {
        places.push(Place::new(scratch, "nbdkit", |name, disk| {
            PeerServer::nbdkit(&nbdkit, &scratch.socket(name), &["file", disk])
        }));
    }
    if let Ok(qemu_nbd) = PeerProgram::find("qemu-nbd") {
        places.push(Place::new(scratch, "qemu-nbd", |name, disk| {
            let args = ["-f", "raw", "-e", "9", "-x", "disk", "-D", "a disk", disk];
            PeerServer::qemu_nbd(&qemu_nbd, &scratch.socket(name), &args)
        }));
    }
    places
}

/// What is wrong with our answers, if anything is.
fn wrong(seed: u64, run: &Result<Vec<Step>, String>) -> Option<String> {
    let steps = match run {
        Err(why) => return Some(format!("seed {seed}: {why}")),
        Ok(steps) => steps,
    };
    let at = steps.iter().position(|step| step.wrong.is_some())?;
    let asked: Vec<_> =
        steps[..=at].iter().map(|step| format!("{} -> {}", step.asked, step.came)).collect();
    let why = steps[at].wrong.as_deref().unwrap_or_default();
    Some(format!("seed {seed}: {why}\n  {}", asked.join("\n  ")))
}

/// What the peers say to a seed for which ours is wrong.
fn shown(seed: u64, scratch: &ScratchDir) -> String {
    let mut all = String::new();
    for mut place in peers(scratch) {
        let name = place.disk.file_stem().unwrap().to_owned();
        all += &format!("\n {name:?}:");
        match place.run(seed) {
            Ok(steps) => {
                steps.iter().for_each(|step| all += &format!("\n  {} -> {}", step.asked, step.came))
            }
            Err(why) => all += &why,
        }
    }
    all
}

/// Differences of ours to both peers: how often, and with which seed first.
type Differences = BTreeMap<String, (usize, u64)>;

/// Notes where ours differs from all peers that have negotiated the same.
fn compare(seed: u64, ours: &[Step], peers: &[Vec<Step>], differences: &mut Differences) {
    for (index, step) in ours.iter().enumerate() {
        let beside = peers.iter().filter_map(|steps| steps.get(index));
        let beside: Vec<_> = beside
            .filter(|other| other.replies == step.replies && other.asked == step.asked)
            .collect();
        let due = if step.replies == ReplyForm::Extended { 1 } else { 2 };
        if beside.len() >= due && beside.iter().all(|other| other.came != step.came) {
            let theirs: Vec<_> = beside.iter().map(|other| other.came.as_str()).collect();
            let what = format!(
                "{:?} {}: {} here, {} there",
                step.replies,
                step.asked,
                step.came,
                theirs.join(" and ")
            );
            differences.entry(what).or_insert((0, seed)).0 += 1;
        }
    }
}

fn seeds() -> Vec<u64> {
    match std::env::var_os("BLOCKHAUL_SEED") {
        Some(_) => vec![rng::seed()],
        None if std::env::var_os("BLOCKHAUL_LONG").is_some() => {
            let mut rng = Rng::new(rng::seed());
            (0..5000).map(|_| rng.number() >> 32).collect()
        }
        None => (1..=60).collect(),
    }
}

#[test]
fn random_options_and_requests_are_answered_as_the_protocol_allows() {
    let scratch = ScratchDir::new().unwrap();
    let mut ours = ours(&scratch);
    let failed: Vec<_> = seeds()
        .into_iter()
        .filter_map(|seed| wrong(seed, &ours.run(seed)).map(|why| (seed, why)))
        .collect();
    let Some((seed, _)) = failed.first() else { return };
    let shown = shown(*seed, &scratch);
    let all: Vec<_> = failed.iter().take(10).map(|(_, why)| why.as_str()).collect();
    panic!("{} seeds:\n{}\npeers with seed {seed}:{shown}", failed.len(), all.join("\n"));
}

/// Not a test, but a report: prints where ours differs from both peers.
#[test]
fn differences_to_both_peers_can_be_shown() {
    if std::env::var_os("BLOCKHAUL_DIFFERENCES").is_none() {
        return;
    }
    let mut scratches = vec![ScratchDir::new().unwrap()];
    let mut ours = ours(&scratches[0]);
    let mut beside = peers(&scratches[0]);
    let mut differences = Differences::new();
    for seed in seeds() {
        let Ok(here) = ours.run(seed) else { continue };
        let runs: Vec<_> = beside.iter_mut().map(|place| place.run(seed)).collect();
        // Some requests that should not be made end a peer.
        if let Some(why) = runs.iter().find_map(|run| run.as_ref().err()) {
            eprintln!("seed {seed}: {why}");
            scratches.push(ScratchDir::new().unwrap());
            beside = peers(&scratches[scratches.len() - 1]);
        }
        let there: Vec<_> = runs.into_iter().flatten().collect();
        compare(seed, &here, &there, &mut differences);
    }
    for (what, (count, seed)) in &differences {
        println!("{count:5} {seed:10} {what}");
    }
}
