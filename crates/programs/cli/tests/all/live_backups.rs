//! Backups and snapshots of disks that clients write to.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use blockhaul_testkit::tools::{self, Scratch, Server, text};

const LIMIT: Duration = Duration::from_secs(120);
const OURS: &str = env!("CARGO_BIN_EXE_blockhaul");
const SIZE: &str = "32M";

fn blockhaul(args: &[&str]) -> Output {
    tools::output(Command::new(OURS).args(args), LIMIT).unwrap()
}

#[track_caller]
fn succeed(args: &[&str]) -> String {
    let output = blockhaul(args);
    assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

/// A served disk of random bytes.
struct Disk {
    scratch: Scratch,
    server: Server,
    control: String,
    path: PathBuf,
}

impl Disk {
    fn serve(more: &[&str]) -> Disk {
        let scratch = Scratch::new().unwrap();
        let path = scratch.file("disk.raw");
        let control = scratch.file("ctl").to_str().unwrap().to_string();
        fill(path.to_str().unwrap(), 1);
        let export = format!("a={}", path.display());
        let mut args = vec!["--control", &control, "--export", &export];
        args.extend(more);
        let server = Server::blockhaul(OURS.as_ref(), &scratch.socket("nbd"), &args).unwrap();
        Disk { scratch, server, control, path }
    }

    fn file(&self, name: &str) -> String {
        self.scratch.file(name).to_str().unwrap().to_string()
    }

    fn ctl(&self, args: &[&str]) -> Output {
        blockhaul(&[&["ctl", &self.control], args].concat())
    }

    #[track_caller]
    fn ctl_succeeds(&self, args: &[&str]) -> String {
        succeed(&[&["ctl", &self.control], args].concat())
    }

    #[track_caller]
    fn ctl_fails(&self, args: &[&str], status: i32, words: &[&str]) {
        let output = self.ctl(args);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{args:?}: {said}");
        assert!(words.iter().all(|word| said.contains(word)), "{args:?}: {said}");
    }

    /// A client overwrites the whole disk.
    fn overwrite(&self, seed: u32) {
        fill(&self.server.uri("a"), seed);
    }

    /// A client overwrites 2 MiB in the middle.
    fn write_part(&self) {
        let part = "random:32M?seed=9";
        let to = self.server.uri("a");
        succeed(&["copy", "--no-progress", "--range", "8M:2M", part, &to]);
    }

    fn job(&self, number: usize) -> serde_json::Value {
        let all = self.ctl_succeeds(&["jobs", "--json"]);
        let all: serde_json::Value = serde_json::from_str(&all).unwrap();
        all["jobs"][number - 1].clone()
    }

    #[track_caller]
    fn wait_for(&self, what: &str, is_so: impl Fn(&serde_json::Value) -> bool) {
        let started = Instant::now();
        while !is_so(&self.job(1)) {
            assert!(started.elapsed() < LIMIT, "{what}: {}", self.job(1));
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

fn fill(target: &str, seed: u32) {
    succeed(&["copy", "--no-progress", &format!("random:{SIZE}?seed={seed}"), target]);
}

#[track_caller]
fn assert_holds(path: &str, seed: u32) {
    succeed(&["compare", path, &format!("random:{SIZE}?seed={seed}")]);
}

#[test]
fn a_backup_is_the_disk_as_it_was_when_it_began() {
    let disk = Disk::serve(&[]);
    let target = disk.file("backup.raw");
    let said = disk.ctl_succeeds(&["backup", "a", &target, "--rate", "4M", "--verify"]);
    assert_eq!(said, "job 1 has begun\n");
    disk.overwrite(2);
    let job = disk.job(1);
    assert_eq!((&job["state"], &job["export"]), (&"running".into(), &"a".into()), "{job}");
    assert!(job["saved"].as_u64().unwrap() > 16 << 20, "{job}");
    disk.ctl_succeeds(&["job-pause", "1"]);
    assert_eq!(disk.job(1)["state"], "paused");
    disk.ctl_succeeds(&["job-resume", "1"]);
    disk.ctl_succeeds(&["job-rate", "1", "0"]);
    let said = disk.ctl_succeeds(&["job-wait", "1"]);
    assert!(said.contains("verified 33554432 bytes"), "{said}");
    assert_eq!(disk.job(1)["released"], 0, "verification has read it again");
    assert_holds(&target, 1);
    assert_holds(disk.path.to_str().unwrap(), 2);
    // The next one shows the disk of now.
    let next = disk.file("next.raw");
    disk.ctl_succeeds(&["backup", "a", &next, "--wait"]);
    assert_holds(&next, 2);
    let table = disk.ctl_succeeds(&["jobs"]);
    assert_eq!(table.matches("completed").count(), 2, "{table}");
}

#[test]
fn a_backup_can_be_paused_while_it_is_verified() {
    let disk = Disk::serve(&[]);
    let target = disk.file("backup.raw");
    disk.ctl_succeeds(&["backup", "a", &target, "--rate", "16M", "--verify"]);
    disk.wait_for("a part", |job| job["done"].as_u64() > Some(8 << 20));
    disk.ctl_succeeds(&["job-rate", "1", "4M"]);
    disk.wait_for("all to be copied", |job| job["done"] == job["total"]);
    disk.ctl_succeeds(&["job-pause", "1"]);
    // Without the pause it would end at once.
    disk.ctl_succeeds(&["job-rate", "1", "0"]);
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(disk.job(1)["state"], "paused");
    disk.ctl_succeeds(&["job-resume", "1"]);
    let said = disk.ctl_succeeds(&["job-wait", "1"]);
    assert!(said.contains("verified 33554432 bytes"), "{said}");
}

#[test]
fn what_is_copied_and_flushed_is_not_saved_any_more() {
    let disk = Disk::serve(&[]);
    let target = disk.file("backup.raw");
    disk.ctl_succeeds(&["backup", "a", &target, "--wait"]);
    let job = disk.job(1);
    assert_eq!(job["released"].as_u64(), Some(32 << 20), "{job}");
    assert_holds(&target, 1);
    // The same for a reader of a snapshot.
    disk.ctl_succeeds(&["snapshot-add", "a", "now", "--discard"]);
    let (other, now) = (disk.file("other.raw"), disk.server.uri("now"));
    let output = blockhaul(&["copy", "-v", "--no-progress", "--discard-source", &now, &other]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_holds(&other, 1);
    let gone = blockhaul(&["compare", &now, &other]);
    assert!(text(&gone.stderr).contains("discarded by its reader"), "{gone:?}");
    assert_holds(&disk.server.uri("a"), 1);
}

#[test]
fn a_snapshot_is_an_export_until_it_is_removed() {
    let disk = Disk::serve(&[]);
    disk.ctl_succeeds(&["snapshot-add", "a", "then"]);
    disk.overwrite(2);
    disk.ctl_succeeds(&["snapshot-add", "a", "later", "--snapshot-block", "4k"]);
    disk.overwrite(3);
    assert_holds(&disk.server.uri("then"), 1);
    assert_holds(&disk.server.uri("later"), 2);
    assert_holds(&disk.server.uri("a"), 3);
    let refused = blockhaul(&["copy", "--no-progress", "random:4096", &disk.server.uri("then")]);
    assert!(text(&refused.stderr).contains("read-only"), "{refused:?}");
    // A layer may come and go meanwhile.
    disk.ctl_succeeds(&["layer-add", "a", "stats?file=/dev/null"]);
    disk.overwrite(4);
    disk.ctl_succeeds(&["export-remove", "then"]);
    disk.ctl_succeeds(&["layer-remove", "a", "stats"]);
    disk.overwrite(5);
    assert_holds(&disk.server.uri("later"), 2);
    disk.ctl_succeeds(&["export-remove", "later"]);
    assert_holds(&disk.server.uri("a"), 5);
    disk.ctl_fails(&["snapshot-add", "a", "a"], 2, &["two exports have the name \"a\""]);
}

#[test]
fn a_lost_snapshot_fails_the_job_and_not_the_client() {
    let disk = Disk::serve(&[]);
    let target = disk.file("backup.raw");
    let args = ["backup", "a", &target, "--rate", "1M", "--fleece-max", "1M"];
    disk.ctl_succeeds(&args);
    disk.overwrite(2);
    assert_holds(disk.path.to_str().unwrap(), 2);
    let words = ["the snapshot is lost", "1048576 bytes that may be saved"];
    disk.ctl_fails(&["job-wait", "1"], 4, &words);
    assert_eq!(disk.job(1)["state"], "failed");
}

#[test]
fn a_job_is_cancelled_on_request_and_by_the_end_of_the_server() {
    let disk = Disk::serve(&[]);
    let (target, other) = (disk.file("backup.raw"), disk.file("other.raw"));
    disk.ctl_succeeds(&["backup", "a", &target, "--rate", "1M"]);
    disk.wait_for("it copies", |job| job["done"].as_u64() > Some(0));
    disk.ctl_succeeds(&["job-cancel", "1"]);
    disk.wait_for("cancelled", |job| job["state"] == "cancelled");
    disk.ctl_fails(&["job-pause", "1"], 1, &["not copying"]);
    disk.ctl_succeeds(&["backup", "a", &other, "--rate", "1M"]);
    assert!(disk.server.stop().unwrap().success());
    assert_holds(disk.path.to_str().unwrap(), 1);
}

#[test]
fn later_backups_copy_only_what_has_changed() {
    let disk = Disk::serve(&[]);
    let target = disk.file("backup.raw");
    disk.ctl_succeeds(&["backup", "a", &target, "--start-bitmap", "daily", "--wait"]);
    disk.write_part();
    let dirty = |disk: &Disk| {
        let exports = disk.ctl_succeeds(&["exports", "--json"]);
        let exports: serde_json::Value = serde_json::from_str(&exports).unwrap();
        exports["exports"][0]["bitmaps"][0]["dirty"].as_u64().unwrap()
    };
    assert_eq!(dirty(&disk), 2 << 20);
    // A job that does not end well leaves what was dirty dirty.
    disk.ctl_succeeds(&["backup", "a", &target, "--bitmap", "daily", "--rate", "4k"]);
    assert_eq!(dirty(&disk), 0, "handed over");
    disk.ctl_succeeds(&["job-cancel", "2"]);
    disk.ctl(&["job-wait", "2"]);
    assert_eq!(dirty(&disk), 2 << 20);
    // Clients see it, too.
    let copied = disk.file("copied.raw");
    std::fs::copy(&target, &copied).unwrap();
    let context = ["--bitmap", "qemu:dirty-bitmap:daily"];
    let uri = disk.server.uri("a");
    succeed(&[&["copy", "--no-progress"], &context[..], &[&uri, &copied]].concat());
    succeed(&["compare", &copied, disk.path.to_str().unwrap()]);
    disk.ctl_succeeds(&["backup", "a", &target, "--bitmap", "daily", "--wait"]);
    let job = disk.job(3);
    assert!(job["result"].as_str().unwrap().starts_with("2097152 bytes"), "{job}");
    succeed(&["compare", &target, disk.path.to_str().unwrap()]);
    assert_eq!(dirty(&disk), 0);
    disk.ctl_fails(&["bitmap-add", "a", "daily"], 2, &["has a bitmap \"daily\" already"]);
    disk.ctl_fails(&["bitmap-add", "a", "b", "--granularity", "1000"], 2, &["power of two"]);
    disk.ctl_fails(&["backup", "a", &target, "--bitmap", "x"], 2, &["known are \"daily\""]);
    disk.write_part();
    disk.ctl_succeeds(&["bitmap-clear", "a", "daily"]);
    assert_eq!(dirty(&disk), 0);
    disk.ctl_succeeds(&["bitmap-remove", "a", "daily"]);
    let lost = blockhaul(&[&["copy", "--no-progress"], &context[..], &[&uri, &copied]].concat());
    assert!(text(&lost.stderr).contains("no bitmap"), "{lost:?}");
}

#[test]
fn wrong_requests_are_refused_before_anything_is_touched() {
    let scratch = Scratch::new().unwrap();
    let kept = scratch.file("kept");
    std::fs::write(&kept, b"precious").unwrap();
    let kept = kept.to_str().unwrap();
    let export = ["--export", "r=[", kept, "-r", "]"];
    let disk = Disk::serve(&export);
    disk.ctl_fails(&["backup", "r", "t"], 2, &["read-only: it does not change"]);
    let own = disk.path.to_str().unwrap();
    disk.ctl_fails(&["backup", "nosuch", kept], 3, &["there is no export \"nosuch\""]);
    disk.ctl_fails(&["backup", "a", "-"], 2, &["standard output of the server"]);
    disk.ctl_fails(&["backup", "a", kept, "--rate", "x"], 2, &["rate"]);
    disk.ctl_fails(&["backup", "a", kept, "--snapshot-block", "5000"], 2, &["power of two"]);
    disk.ctl_fails(&["backup", "a", kept, "--fleece", "/no/such"], 1, &["/no/such"]);
    disk.ctl_fails(&["backup", "a", "nosuch:x"], 2, &["unknown scheme"]);
    disk.ctl_fails(&["job-cancel", "7"], 3, &["there is no job 7"]);
    disk.ctl_fails(&["backup", "a", own, "--wait"], 2, &["are the same"]);
    assert_eq!(std::fs::read(kept).unwrap(), b"precious");
    assert_holds(own, 1);
    assert!(
        raw(&disk, r#"{"command":"backup","export":"a","target":"t","options":["--journal=j"]}"#)
            .contains("--journal cannot be used here")
    );
    assert!(
        raw(&disk, r#"{"command":"backup","export":"a","target":"t","snapshot":{"x":1}}"#)
            .contains("wrong \\\"x\\\"")
    );
    assert!(!Path::new("t").exists());
}

/// The reply to a line on the control socket.
fn raw(disk: &Disk, line: &str) -> String {
    use std::io::{BufRead as _, BufReader, Write as _};
    let mut stream = std::os::unix::net::UnixStream::connect(&disk.control).unwrap();
    stream.write_all(format!("{line}\n").as_bytes()).unwrap();
    let mut reply = String::new();
    BufReader::new(stream).read_line(&mut reply).unwrap();
    reply
}
