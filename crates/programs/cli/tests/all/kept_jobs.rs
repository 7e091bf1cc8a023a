//! Jobs that outlive their server: it is killed or stopped, and another one resumes them.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use blockhaul_testkit::peer::Conversation;
use blockhaul_testkit::rng::{Rng, seed};
use blockhaul_testkit::tools::{ScratchDir, until};
use blockhaul_wire::ReplyForm;

use crate::served_disk::{Disk, blockhaul, succeed};

/// Bytes of the disk.
const SIZE: u64 = 32 << 20;

/// A served disk, with directories for jobs and bitmaps that outlive the server.
struct Kept {
    disk: Disk,
    directory: ScratchDir,
}

impl Kept {
    fn serve() -> Kept {
        let directory = ScratchDir::new().unwrap();
        fs::create_dir(directory.file("jobs")).unwrap();
        fs::create_dir(directory.file("bitmaps")).unwrap();
        let disk = Disk::serve(&words(&Kept::options(&directory)));
        Kept { disk, directory }
    }

    fn options(directory: &ScratchDir) -> Vec<String> {
        let file = |name| directory.file(name).to_str().unwrap().to_string();
        vec!["--job-state".into(), file("jobs"), "--bitmaps".into(), file("bitmaps")]
    }

    /// The same disk with another server.
    fn again(self, orderly: bool) -> Kept {
        let Kept { disk, directory } = self;
        let disk = disk.again(&words(&Kept::options(&directory)), orderly);
        Kept { disk, directory }
    }

    /// The files of jobs, in order.
    fn files(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.directory.file("jobs")).unwrap();
        let mut files: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
        files.sort();
        files
    }

    #[track_caller]
    fn assert_equal(&self, target: &str) {
        succeed(&["compare", self.disk.path.to_str().unwrap(), target]);
    }

    /// The first job once it has copied something that is flushed.
    fn wait_for_progress(&self) {
        let map = self.directory.file("jobs").join("job-1.map");
        until("something is recorded", || {
            fs::read(&map).is_ok_and(|map| map.len() > 4096 && map[4096] != 0xff)
        });
    }
}

fn words(options: &[String]) -> Vec<&str> {
    options.iter().map(String::as_str).collect()
}

/// A client that writes at random until it is asked to stop, or its server is gone.
struct Guest {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<u64>,
}

impl Guest {
    fn start(disk: &Disk, seed: u64) -> Guest {
        let mut client = Conversation::connect(disk.server.socket()).unwrap();
        client.hello(3).unwrap();
        client.negotiate(ReplyForm::Structured).unwrap();
        client.go("a").unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = std::thread::spawn(move || {
            let mut rng = Rng::new(seed);
            let mut writes = 0;
            while !stopped.load(Ordering::Relaxed) {
                let mut bytes = vec![0; 512 << rng.below(6)];
                rng.fill(&mut bytes);
                let at = rng.below((SIZE - bytes.len() as u64) / 512) * 512;
                if client.write(at, &bytes).is_err() {
                    break;
                }
                writes += 1;
                std::thread::sleep(Duration::from_millis(rng.below(8)));
            }
            writes
        });
        Guest { stop, thread }
    }

    /// Number of its writes.
    fn end(self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap()
    }
}

fn kills() -> u64 {
    if std::env::var_os("BLOCKHAUL_LONG").is_some() { 100 } else { 5 }
}

#[test]
fn a_mirror_goes_on_after_each_of_many_kills() {
    let seed = seed();
    eprintln!("BLOCKHAUL_SEED={seed:#x}");
    let mut rng = Rng::new(seed);
    let mut kept = Kept::serve();
    let target = kept.disk.file("mirror.raw");
    let mode = ["background", "write-blocking"][rng.below(2) as usize];
    let mirror = ["mirror", "a", &target, "--rate", "12M", "--copy-mode", mode];
    kept.disk.ctl_succeeds(&mirror);
    let mut guest = Guest::start(&kept.disk, rng.number());
    for _ in 0..kills() {
        std::thread::sleep(Duration::from_millis(rng.below(2500)));
        kept = kept.again(rng.chance(20));
        guest.end();
        let job = kept.disk.job(1);
        assert_eq!(
            (&job["state"], &job["resume"]),
            (&"interrupted".into(), &"same".into()),
            "{job}"
        );
        guest = Guest::start(&kept.disk, rng.number());
        std::thread::sleep(Duration::from_millis(rng.below(300)));
        if rng.chance(20) {
            // Not resumed: writes are marked all the same.
            continue;
        }
        kept.disk.ctl_succeeds(&["job-resume", "1"]);
    }
    if kept.disk.job(1)["state"] == "interrupted" {
        kept.disk.ctl_succeeds(&["job-resume", "1"]);
    }
    // Faster than the guest.
    kept.disk.ctl_succeeds(&["job-rate", "1", "0"]);
    kept.disk.ctl_succeeds(&["job-wait", "1", "--ready"]);
    assert!(guest.end() > 0);
    kept.disk.ctl_succeeds(&["job-complete", "1", "--stay", "--wait"]);
    kept.assert_equal(&target);
    assert_eq!(kept.files(), Vec::<PathBuf>::new(), "the job has ended");
}

#[test]
fn a_backup_goes_on_after_each_of_many_kills() {
    let seed = seed();
    eprintln!("BLOCKHAUL_SEED={seed:#x}");
    let mut rng = Rng::new(seed);
    let mut kept = Kept::serve();
    let is_compressed = rng.chance(50);
    let image = kept.disk.file(if is_compressed { "backup.qcow2" } else { "backup.raw" });
    let target = if is_compressed { format!("qcow2:{image}?compress=on") } else { image.clone() };
    eprintln!("{target}");
    let other = kept.disk.file("other.raw");
    // Increments onto an earlier backup, at one moment with another disk.
    kept.disk.ctl_succeeds(&["backup", "a", &target, "--start-bitmap", "daily", "--wait"]);
    if is_compressed {
        succeed(&["copy", "--no-progress", "pattern:32M", &kept.disk.server.uri("a")]);
    } else {
        kept.disk.overwrite(7);
    }
    let selects = if rng.chance(50) { &["--bitmap", "daily"][..] } else { &[] };
    kept.disk.ctl_succeeds(&[&["backup", "a", &target, "--rate", "4M"][..], selects].concat());
    let mut guest = Guest::start(&kept.disk, rng.number());
    for _ in 0..kills() {
        std::thread::sleep(Duration::from_millis(rng.below(1500)));
        kept = kept.again(rng.chance(20));
        guest.end();
        assert_eq!(kept.disk.job(1)["state"], "interrupted", "{}", kept.disk.job(1));
        guest = Guest::start(&kept.disk, rng.number());
        std::thread::sleep(Duration::from_millis(rng.below(300)));
        if rng.chance(70) {
            kept.disk.ctl_succeeds(&["job-resume", "2", "--new-moment"]);
        }
    }
    guest.end();
    kept = kept.again(false);
    kept.disk.ctl_succeeds(&["job-resume", "2", "--new-moment"]);
    fs::copy(&kept.disk.path, &other).unwrap();
    // Behind its moment.
    kept.disk.overwrite(8);
    kept.disk.ctl_succeeds(&["job-rate", "2", "0"]);
    kept.disk.ctl_succeeds(&["job-wait", "2"]);
    succeed(&["compare", &other, &target]);
    if is_compressed {
        // A kill may leave clusters without a use: leaks.
        let found = blockhaul(&["check", "--json", &format!("qcow2:{image}")]).stdout;
        let found: serde_json::Value = serde_json::from_slice(&found).unwrap();
        let counted = (found["corruptions"].as_u64(), found["compressed-clusters"].as_u64());
        assert!(matches!(counted, (Some(0), Some(1..))), "{found}");
    }
    assert_eq!(kept.files(), Vec::<PathBuf>::new());
}

#[test]
fn a_group_is_resumed_at_one_moment() {
    let directory = ScratchDir::new().unwrap();
    fs::create_dir(directory.file("jobs")).unwrap();
    let second = directory.file("second.raw");
    crate::served_disk::fill(second.to_str().unwrap(), 5);
    let export = format!("b={}", second.display());
    let jobs = directory.file("jobs").to_str().unwrap().to_string();
    let more = ["--export", &export, "--job-state", &jobs];
    let mut disk = Disk::serve(&more);
    let [to_a, to_b] = ["a.raw", "b.raw"].map(|name| disk.file(name));
    disk.ctl_succeeds(&["backup", "a", &to_a, "--with", "b", &to_b, "--rate", "4M"]);
    disk = disk.again(&more, false);
    disk.overwrite(2);
    disk.ctl_succeeds(&["job-resume", "2", "--new-moment"]);
    disk.ctl_succeeds(&["job-rate", "1", "0"]);
    for (job, target, now) in [("1", &to_a, &disk.path), ("2", &to_b, &second)] {
        disk.ctl_succeeds(&["job-wait", job]);
        succeed(&["compare", now.to_str().unwrap(), target]);
    }
}

#[test]
fn a_resumed_job_copies_only_what_is_missing() {
    let mut kept = Kept::serve();
    let target = kept.disk.file("mirror.raw");
    kept.disk.ctl_succeeds(&["mirror", "a", &target, "--rate", "1M"]);
    kept.wait_for_progress();
    kept = kept.again(false);
    let left = kept.disk.job(1)["dirty"].as_u64().unwrap();
    assert!(0 < left && left < SIZE, "{left}");
    // Another job does not get its number.
    let other = kept.disk.file("other.raw");
    kept.disk.ctl_succeeds(&["backup", "a", &other, "--wait"]);
    assert_eq!(kept.disk.job(2)["job"], 2);
    // Only one of several can do it.
    let resume = || kept.disk.ctl(&["job-resume", "1"]).status.success();
    let resumed = std::thread::scope(|scope| {
        let all: Vec<_> = (0..3).map(|_| scope.spawn(resume)).collect();
        all.into_iter().map(|one| one.join().unwrap()).collect::<Vec<_>>()
    });
    assert!(resumed.contains(&true), "{resumed:?}");
    let all = kept.disk.ctl_succeeds(&["jobs", "--json"]);
    assert_eq!(all.matches("\"type\":\"mirror\"").count(), 1, "{all}");
    kept.disk.ctl_succeeds(&["job-rate", "1", "0"]);
    kept.disk.ctl_succeeds(&["job-complete", "1", "--wait"]);
    let all = kept.disk.ctl_succeeds(&["jobs", "--json"]);
    let all: serde_json::Value = serde_json::from_str(&all).unwrap();
    let job = all["jobs"].as_array().unwrap().iter().find(|job| job["job"] == 1).unwrap();
    assert_eq!(job["state"], "completed", "{job}");
    assert!(job["done"].as_u64().unwrap() <= left, "{job}");
    kept.assert_equal(&target);
    // The old device is not copied onto the new one again.
    kept = kept.again(false);
    assert_eq!(kept.disk.job(1), serde_json::Value::Null);
}

#[test]
fn a_backup_is_resumed_at_another_moment_only_and_keeps_its_bitmap() {
    let mut kept = Kept::serve();
    let target = kept.disk.file("backup.raw");
    let backup = ["backup", "a", &target, "--start-bitmap", "daily", "--rate", "4M"];
    kept.disk.ctl_succeeds(&backup);
    kept.wait_for_progress();
    kept.disk.write_part();
    kept = kept.again(false);
    let job = kept.disk.job(1);
    assert_eq!(job["state"], "interrupted");
    assert!(job["error"].as_str().unwrap().contains("its moment is lost"), "{job}");
    kept.disk.ctl_fails(&["job-resume", "1"], 2, &["moment is lost", "--new-moment"]);
    kept.disk.ctl_fails(&["job-wait", "1"], 7, &["the server ended before the job"]);
    kept.disk.ctl_succeeds(&["job-resume", "1", "--new-moment"]);
    kept.disk.ctl_succeeds(&["job-wait", "1"]);
    kept.assert_equal(&target);
    assert!(kept.disk.job(1)["done"].as_u64().unwrap() < SIZE);
    // The bitmap began with it: an increment, which is interrupted in order, is complete.
    kept.disk.write_part();
    let increment = ["backup", "a", &target, "--bitmap", "daily", "--rate", "64k"];
    kept.disk.ctl_succeeds(&increment);
    kept = kept.again(true);
    kept.disk.overwrite(3);
    kept.disk.ctl_succeeds(&["job-resume", "2", "--new-moment"]);
    kept.disk.ctl_succeeds(&["job-rate", "2", "0"]);
    kept.disk.ctl_succeeds(&["job-wait", "2"]);
    kept.assert_equal(&target);
    // It fails after all: nothing is lost for the next one.
    kept.disk.write_part();
    kept.disk.ctl_succeeds(&increment);
    kept = kept.again(false);
    kept.disk.ctl_succeeds(&["job-resume", "3", "--new-moment"]);
    kept.disk.ctl_succeeds(&["job-cancel", "3"]);
    kept.disk.ctl(&["job-wait", "3"]);
    kept.disk.ctl_succeeds(&["backup", "a", &target, "--bitmap", "daily", "--wait"]);
    kept.assert_equal(&target);
    assert_eq!(kept.files(), Vec::<PathBuf>::new());
}

#[test]
fn a_cancelled_job_is_forgotten() {
    let mut kept = Kept::serve();
    let target = kept.disk.file("mirror.raw");
    kept.disk.ctl_succeeds(&["mirror", "a", &target, "--rate", "4M"]);
    kept = kept.again(true);
    kept.disk.ctl_succeeds(&["job-cancel", "1"]);
    assert_eq!(kept.disk.job(1)["state"], "cancelled");
    kept.disk.ctl_fails(&["job-resume", "1"], 1, &["not copying"]);
    assert_eq!(kept.files(), Vec::<PathBuf>::new());
    kept.disk.overwrite(2);
    kept = kept.again(true);
    assert_eq!(kept.disk.job(1), serde_json::Value::Null);
}

#[test]
fn what_does_not_fit_is_refused() {
    let mut kept = Kept::serve();
    let target = kept.disk.file("mirror.raw");
    for _ in 0..5 {
        kept.disk.ctl_succeeds(&["mirror", "a", &target, "--rate", "64k"]);
        // Two at a time are not possible.
        kept = kept.again(true);
    }
    // The target of the first is opened.
    kept.disk.ctl_succeeds(&["job-resume", "1"]);
    let has_target = |path: &Path| fs::read_to_string(path).unwrap().contains("target_id");
    let [one, one_map, two, three, _, four_map, five, five_map] = [
        "job-1.json",
        "job-1.map",
        "job-2.json",
        "job-3.json",
        "job-4.json",
        "job-4.map",
        "job-5.json",
        "job-5.map",
    ]
    .map(|name| kept.directory.file("jobs").join(name));
    until("its target is recorded", || has_target(&one));
    let Kept { disk, directory } = kept;
    let Disk { scratch, server, control, path } = disk;
    assert!(server.stop().unwrap().success());
    assert!(one_map.exists());
    // A bit of a description; half of one; half of a map; the map of another job.
    let mut bytes = fs::read(&two).unwrap();
    bytes[30] ^= 1;
    fs::write(&two, bytes).unwrap();
    let text = fs::read(&three).unwrap();
    fs::write(&three, &text[..text.len() / 2]).unwrap();
    let map = fs::read(&four_map).unwrap();
    fs::write(&four_map, &map[..4100]).unwrap();
    fs::write(&five_map, fs::read(&one_map).unwrap()).unwrap();
    assert!(five.exists());
    // Another target of the same name and size.
    let moved = scratch.file("moved.raw");
    fs::rename(&target, &moved).unwrap();
    fs::copy(&moved, &target).unwrap();
    let export = format!("a={}", path.display());
    let mut args = vec!["--control", &control, "--export", &export];
    let options = Kept::options(&directory);
    args.extend(words(&options));
    let socket = scratch.socket("nbd-again");
    let ours = crate::served_disk::OURS.as_ref();
    let server = blockhaul_testkit::tools::PeerServer::blockhaul(ours, &socket, &args).unwrap();
    let kept = Kept { disk: Disk { scratch, server, control, path }, directory };
    for (job, why) in [
        ("2", "job-2.json is damaged"),
        ("3", "job-3.json is"),
        ("4", "4100 bytes instead of"),
        ("5", "belongs to another job"),
    ] {
        kept.disk.ctl_fails(&["job-resume", job], 2, &[why, "cannot be resumed", "cancel it"]);
    }
    kept.disk.ctl_succeeds(&["job-resume", "1"]);
    kept.disk.ctl_fails(&["job-wait", "1"], 3, &["is not the one that the job has written"]);
    for job in ["2", "3", "4", "5"] {
        kept.disk.ctl_succeeds(&["job-cancel", job]);
    }
    assert_eq!(kept.files(), Vec::<PathBuf>::new());
}

#[test]
fn another_disk_of_the_same_export_is_not_that_of_the_job() {
    let mut kept = Kept::serve();
    let target = kept.disk.file("mirror.raw");
    kept.disk.ctl_succeeds(&["mirror", "a", &target, "--rate", "64k"]);
    let path = kept.disk.path.clone();
    kept = kept.again(true);
    assert!(kept.disk.ctl(&["export-remove", "a", "--force"]).status.success());
    let why = "no export has its disk";
    kept.disk.ctl_fails(&["job-resume", "1"], 2, &[why]);
    kept.disk.ctl_succeeds(&["export-add", &format!("a={}", path.display())]);
    assert_eq!(kept.disk.job(1)["resume"], "same");
    // Longer than before.
    kept.disk.ctl_succeeds(&["export-remove", "a"]);
    fs::File::options().write(true).open(&path).unwrap().set_len(SIZE + 4096).unwrap();
    kept.disk.ctl_succeeds(&["export-add", &format!("a={}", path.display())]);
    let words = ["33554432 bytes", "33558528 now"];
    kept.disk.ctl_fails(&["job-resume", "1"], 2, &words);
    kept.disk.ctl_fails(&["job-resume", "7"], 3, &["there is no job 7"]);
}
