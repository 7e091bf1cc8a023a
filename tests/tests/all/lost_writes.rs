//! Copies onto disks that lose data when the kernel writes it back, after the write has succeeded. A copy
//! with `--flush`, `--verify` or `--journal` must not end with status 0 while bytes are missing on the
//! disk, and a journal must not record what the disk has lost. They need root; `BLOCKHAUL_LONG` runs them.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::Output;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use blockhaul_testkit::image;
use blockhaul_testkit::require_peer;
use blockhaul_testkit::rng::{Rng, seed};
use blockhaul_testkit::tools::{self, PeerProgram, PeerServer, ScratchDir};
use blockhaul_tests::disks::{LossyDisk, PAGE};
use blockhaul_tests::{assert_same, lossy, run, serve, text};

const SIZE: u64 = 24 << 20;
/// As much as a disk needs to store everything.
const ROOM: u64 = 2 * SIZE;
/// As documented for a target that failed, and for one that is full.
const FAILED: [Option<i32>; 2] = [Some(5), Some(6)];

/// So slow that data is written back during the copy.
const RATE: &str = "--rate=48M";

const PROMISES: [&str; 3] = ["--flush", "--verify", "--journal"];
const LANES: [&[&str]; 2] = [&["-C1", "--segment=8M"], &["-C4", "--segment=4M"]];

/// How a copy reaches the disk.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Route {
    Disk,
    /// `blockhaul serve`, which keeps the disk open: once a flush has failed, all later ones fail.
    Server,
    /// nbdkit opens the disk once for each connection, and reports each failure once.
    Nbdkit,
}

/// A copy that is run again and again until the disk has everything.
struct Run {
    scratch: ScratchDir,
    source: PathBuf,
    disk: LossyDisk,
    nbdkit: Option<PeerProgram>,
}

impl Run {
    /// A source without zeroes, and a disk with one to three bad places.
    fn new(rng: &mut Rng) -> Option<Run> {
        let scratch = ScratchDir::new().unwrap();
        let source = scratch.file("source");
        let mut bytes = vec![0; SIZE as usize];
        rng.fill(&mut bytes);
        fs::write(&source, bytes).unwrap();
        let mut bad: Vec<u64> = (0..rng.between(1, 3)).map(|_| rng.below(SIZE / PAGE)).collect();
        bad.sort_unstable();
        bad.dedup();
        let bad: Vec<u64> = bad.into_iter().map(|page| page * PAGE).collect();
        let disk = LossyDisk::with_bad_places(SIZE, &bad)?;
        Some(Run { scratch, source, disk, nbdkit: None })
    }

    fn copy(&self, route: Route, options: &[&str]) -> Output {
        let device = self.disk.device();
        let socket = self.scratch.socket("nbdkit");
        let server = match route {
            Route::Disk => None,
            Route::Server => Some(serve(&self.scratch, "s", &[device])),
            Route::Nbdkit => {
                let nbdkit = self.nbdkit.as_ref().unwrap();
                Some(PeerServer::nbdkit(nbdkit, &socket, &["file", device]).unwrap())
            }
        };
        let target = server.as_ref().map_or_else(|| device.into(), |server| server.uri(""));
        let always = ["copy", "--no-progress", "--retry-delay=20ms"];
        let sides = [text(&self.source), &target];
        let output = run(&[&always, options, &sides].concat());
        // Before the server ends, which may flush.
        self.check(&output, &format!("{route:?} {options:?}"));
        if let Some(server) = server {
            server.stop().unwrap();
            let _ = fs::remove_file(socket);
        }
        output
    }

    /// Whether all is on the disk, whatever its page cache holds.
    fn complete(&self) -> Result<(), image::FileDifference> {
        image::compare(&self.source, &self.disk.file())
    }

    #[track_caller]
    fn check(&self, output: &Output, what: &str) {
        let said = lossy(&output.stderr);
        let status = output.status.code();
        match status {
            Some(0) => {
                if let Err(lost) = self.complete() {
                    panic!("{what}: status 0, but data is missing on the disk: {lost}; {said}");
                }
            }
            _ => assert!(FAILED.contains(&status), "{what}: {status:?}: {said}"),
        }
    }

    fn journal(&self) -> String {
        format!("--journal={}", text(&self.scratch.file("journal")))
    }

    fn options<'a>(promise: &'a str, journal: &'a str, lanes: &[&'a str]) -> Vec<&'a str> {
        let promise: &[&str] = match promise {
            "--journal" => &[journal, "--journal-interval=20ms", RATE],
            _ => &[promise],
        };
        // The page cache has to take the writes.
        [lanes, promise, &["--direct=off"]].concat()
    }

    /// Runs the copy again on storage that is sound now. It has to write what the journal does not have.
    fn resume(&self, route: Route, options: &[&str]) {
        self.disk.heal(ROOM);
        // The next program that opens the disk gets a failure that was not reported yet.
        let _ = File::open(self.disk.device()).unwrap().sync_data();
        let output = self.copy(route, options);
        assert!(output.status.success(), "{}", lossy(&output.stderr));
        assert_same(&self.source, &self.disk.file(), &format!("resumed, {route:?} {options:?}"));
    }
}

#[test]
fn a_copy_onto_a_disk_with_bad_places_fails_and_can_be_resumed() {
    if !tools::runs_long() {
        return;
    }
    println!("BLOCKHAUL_SEED={}", seed());
    let mut rng = Rng::new(seed());
    for round in 0..3 {
        for route in [Route::Disk, Route::Server] {
            for lanes in LANES {
                for promise in PROMISES {
                    let Some(run) = Run::new(&mut rng) else { return };
                    let journal = run.journal();
                    let options = Run::options(promise, &journal, lanes);
                    let output = run.copy(route, &options);
                    let what = format!("round {round}, {route:?} {options:?}");
                    assert!(run.complete().is_err(), "{what}: the disk has no bad places");
                    assert!(!output.status.success(), "{what}");
                    run.resume(route, &options);
                }
            }
        }
    }
}

/// Writes back what the page cache holds until that fails, and then repairs the disk. Each program
/// that has the disk open gets the failure with its next flush, and none after that.
fn write_back_until_it_fails(probe: &File, disk: &LossyDisk, copies: &AtomicBool) -> bool {
    while copies.load(Ordering::Relaxed) {
        if probe.sync_data().is_err() {
            disk.heal(ROOM);
            return true;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    false
}

/// Ends the other thread also if the copy panics.
struct Copies<'a>(&'a AtomicBool);

impl Drop for Copies<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

#[test]
fn a_failure_that_is_over_before_the_copy_flushes_is_not_missed() {
    if !tools::runs_long() {
        return;
    }
    let nbdkit = require_peer!("nbdkit");
    println!("BLOCKHAUL_SEED={}", seed());
    let mut rng = Rng::new(seed());
    for route in [Route::Disk, Route::Server, Route::Nbdkit] {
        for lanes in LANES {
            for promise in PROMISES {
                let Some(mut run) = Run::new(&mut rng) else { return };
                run.nbdkit = Some(nbdkit.clone());
                let journal = run.journal();
                let mut options = Run::options(promise, &journal, lanes);
                options.retain(|option| *option != RATE);
                options.push(RATE);
                let probe = File::open(run.disk.device()).unwrap();
                let copies = AtomicBool::new(true);
                let (output, healed) = std::thread::scope(|scope| {
                    let healing =
                        scope.spawn(|| write_back_until_it_fails(&probe, &run.disk, &copies));
                    let copying = Copies(&copies);
                    let output = run.copy(route, &options);
                    drop(copying);
                    (output, healing.join().unwrap())
                });
                drop(probe);
                let what = format!("{route:?} {options:?}: {}", lossy(&output.stderr));
                assert!(healed, "{what}");
                if route == Route::Nbdkit && lanes == LANES[0] && promise != "--journal" {
                    // One flush fails, and the copy writes all of it again.
                    assert!(output.status.success(), "{what}");
                }
                run.resume(route, &options);
            }
        }
    }
}
