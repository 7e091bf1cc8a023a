//! Mirrors of disks that clients write to, and the clients that move to them.

use std::fs::File;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use blockhaul_testkit::require_peer;
use blockhaul_testkit::tools::{self, PeerServer, text};

use crate::served_disk::{ChildGuard, Disk, LIMIT, OURS, assert_holds, blockhaul, succeed};

/// A client that slowly overwrites the disk.
fn slow_writer(disk: &Disk, seed: u32, rate: &str) -> ChildGuard {
    let random = format!("random:32M?seed={seed}");
    let mut command = Command::new(OURS);
    command.args(["copy", "--no-progress", "--rate", rate, &random, &disk.server.uri("a")]);
    ChildGuard(command.spawn().unwrap())
}

/// The device of the export, as `ctl exports` shows it.
fn device(disk: &Disk) -> String {
    let exports = disk.ctl_succeeds(&["exports", "--json"]);
    let exports: serde_json::Value = serde_json::from_str(&exports).unwrap();
    exports["exports"][0]["device"].as_str().unwrap().to_string()
}

#[test]
fn clients_move_to_the_target_while_they_write() {
    let disk = Disk::serve(&[]);
    let target = disk.file("mirror.raw");
    assert_eq!(disk.ctl_succeeds(&["mirror", "a", &target, "--wait"]), "job 1 is ready\n");
    assert_holds(&target, 1);
    let mut writer = slow_writer(&disk, 2, "16M");
    disk.wait_for("it follows", |job| job["rounds"].as_u64() > Some(1));
    let said = disk.ctl_succeeds(&["job-complete", "1", "--within", "10s", "--wait", "-v"]);
    assert!(said.starts_with("mirrored ") && said.contains("bytes"), "{said}");
    assert!(writer.0.try_wait().unwrap().is_none(), "the client has ended before the move");
    assert_eq!(device(&disk), target);
    assert!(writer.0.wait().unwrap().success());
    assert_holds(&target, 2);
    let old = blockhaul(&["compare", disk.path.to_str().unwrap(), "random:32M?seed=2"]);
    assert_eq!(old.status.code(), Some(1), "what was written later is not on the old device");
    let job = disk.job(1);
    assert_eq!(job["state"], "completed", "{job}");
    assert!(job["downtime"].as_f64() < Some(10.0), "{job}");
    // The export can be mirrored again, and back to a file that is not in use any more.
    disk.ctl_succeeds(&["mirror", "a", disk.path.to_str().unwrap(), "--wait"]);
    disk.ctl_succeeds(&["job-complete", "2", "--wait"]);
    assert_holds(disk.path.to_str().unwrap(), 2);
}

/// A server of memory offers to cache ahead; a file does not, and clients move to it anyway.
#[test]
fn clients_move_to_a_target_that_caches_nothing() {
    let disk = Disk::serve(&[]);
    let socket = disk.scratch.socket("memory");
    let memory = PeerServer::blockhaul(OURS.as_ref(), &socket, &["memory:32M"]).unwrap();
    disk.ctl_succeeds(&["export-add", &format!("b={}", memory.uri(""))]);
    let uri = disk.server.uri("b");
    let facts = succeed(&["info", "--json", &uri]);
    let facts: serde_json::Value = serde_json::from_str(&facts).unwrap();
    assert_eq!(facts["exports"][0]["can_cache"], true, "{facts}");
    let mut command = Command::new(OURS);
    command.args(["copy", "--no-progress", "--rate", "16M", "random:32M?seed=3", &uri]);
    let mut writer = ChildGuard(command.spawn().unwrap());
    let target = disk.file("moved.raw");
    disk.ctl_succeeds(&["mirror", "b", &target, "--wait"]);
    disk.ctl_succeeds(&["job-complete", "1", "--within", "10s", "--wait"]);
    assert!(writer.0.wait().unwrap().success());
    assert_holds(&target, 3);
}

#[test]
fn a_mirror_can_end_as_a_copy_of_that_moment() {
    let disk = Disk::serve(&[]);
    let target = disk.file("mirror.raw");
    disk.ctl_succeeds(&["mirror", "a", &target]);
    disk.ctl_succeeds(&["job-wait", "1", "--ready"]);
    disk.overwrite(2);
    disk.ctl_succeeds(&["job-complete", "1", "--stay", "--within", "10s", "--wait"]);
    disk.overwrite(3);
    assert_holds(&target, 2);
    assert_holds(disk.path.to_str().unwrap(), 3);
    assert_eq!(device(&disk), disk.path.to_str().unwrap());
    disk.ctl_fails(&["job-complete", "1"], 1, &["the job has ended"]);
}

#[test]
fn clients_do_not_wait_longer_than_they_may() {
    let disk = Disk::serve(&[]);
    let target = disk.file("mirror.raw");
    disk.ctl_succeeds(&["mirror", "a", &target, "--wait"]);
    // At this rate, the rest cannot be copied in time while the client writes.
    disk.ctl_succeeds(&["job-rate", "1", "1M"]);
    let mut writer = slow_writer(&disk, 2, "8M");
    disk.wait_for("it measures the rate", |job| job["rate"].as_f64() < Some(2e6));
    disk.ctl_succeeds(&["job-complete", "1", "--within", "20ms"]);
    assert!(writer.0.wait().unwrap().success());
    let job = disk.job(1);
    assert_eq!(job["state"], "completing", "{job}");
    // A paused job completes when it is resumed.
    disk.ctl_succeeds(&["job-pause", "1"]);
    disk.ctl_succeeds(&["job-rate", "1", "0"]);
    disk.ctl_succeeds(&["job-complete", "1", "--within", "10s"]);
    disk.ctl_succeeds(&["job-resume", "1"]);
    disk.ctl_succeeds(&["job-wait", "1"]);
    assert_holds(&target, 2);
    assert_eq!(device(&disk), target);
}

#[test]
fn a_failed_or_cancelled_mirror_leaves_the_clients_where_they_are() {
    let disk = Disk::serve(&[]);
    let target = disk.file("mirror.raw");
    disk.ctl_succeeds(&["mirror", "a", &target, "--rate", "1M"]);
    disk.wait_for("it copies", |job| job["done"].as_u64() > Some(0));
    disk.ctl_fails(&["mirror", "a", "other.raw"], 2, &["a mirror job of export \"a\" is running"]);
    disk.ctl_fails(&["layer-add", "a", "stats"], 2, &["a mirror job of export \"a\" is running"]);
    disk.ctl_succeeds(&["job-cancel", "1"]);
    disk.wait_for("cancelled", |job| job["state"] == "cancelled");
    disk.ctl_succeeds(&["layer-add", "a", "stats"]);
    disk.overwrite(2);
    assert_holds(disk.path.to_str().unwrap(), 2);
    // A target whose server goes away.
    let server = PeerServer::blockhaul(OURS.as_ref(), &disk.scratch.socket("b"), &["memory:32M"]);
    let server = server.unwrap();
    disk.ctl_succeeds(&["mirror", "a", &server.uri(""), "--wait"]);
    drop(server);
    disk.overwrite(3);
    assert_ne!(disk.ctl(&["job-wait", "2"]).status.code(), Some(0));
    assert_eq!(disk.job(2)["state"], "failed");
    disk.overwrite(4);
    assert_holds(disk.path.to_str().unwrap(), 4);
    assert_eq!(device(&disk), disk.path.to_str().unwrap());
}

#[test]
fn wrong_mirrors_are_refused_before_anything_is_touched() {
    let disk = Disk::serve(&["--export", "r=[", "memory:1M", "-r", "]"]);
    let small = disk.file("small");
    std::fs::write(&small, b"precious").unwrap();
    disk.ctl_fails(&["mirror", "r", "t"], 2, &["read-only: it does not change"]);
    disk.ctl_fails(&["mirror", "nosuch", "t"], 3, &["there is no export \"nosuch\""]);
    disk.ctl_fails(&["mirror", "a", "-"], 2, &["standard output of the server"]);
    disk.ctl_fails(&["mirror", "a", &small, "--rate", "x"], 2, &["rate"]);
    disk.ctl_fails(&["mirror", "a", "nosuch:x"], 2, &["unknown scheme"]);
    let own = disk.path.to_str().unwrap();
    disk.ctl_fails(&["mirror", "a", own], 2, &["are the same"]);
    disk.ctl_succeeds(&["mirror", "a", "memory:1M"]);
    let output = disk.ctl(&["job-wait", "1", "--ready"]);
    assert!(text(&output.stderr).contains("1048576"), "{output:?}");
    // So slow that it is still running.
    disk.ctl_succeeds(&["backup", "a", &disk.file("backup.raw"), "--rate", "16k"]);
    disk.ctl_fails(&["job-complete", "2"], 2, &["the job is not a mirror"]);
    disk.ctl_succeeds(&["job-cancel", "2"]);
    disk.ctl_fails(&["job-complete", "9"], 3, &["there is no job 9"]);
    assert_eq!(std::fs::read(&small).unwrap(), b"precious");
    assert_holds(own, 1);
    assert!(!Path::new("t").exists());
}

/// fio, which writes at random and verifies, until it is killed.
fn verifying_client(disk: &Disk, rate: &str) -> Option<ChildGuard> {
    let fio = require_peer!("fio", None);
    let mut command = fio.command();
    command.args(["--name=verified", "--thread", "--ioengine=nbd", "--rw=randwrite"]);
    command.args(["--bsrange=4k-64k", "--size=32M", "--time_based", "--runtime=100000"]);
    command.args([
        "--iodepth=16",
        "--verify=crc32c",
        "--verify_state_save=0",
        "--verify_backlog=64",
        "--verify_fatal=1",
    ]);
    command.args(["--fsync=97", "--randrepeat=1", "--output-format=terse"]);
    command.args([format!("--rate=,{rate}"), format!("--uri={}", disk.server.uri("a"))]);
    command.arg(format!("--aux-path={}", disk.scratch.path().display()));
    let log = File::create(disk.scratch.file("fio.log")).unwrap();
    command.stdout(log.try_clone().unwrap()).stderr(log);
    Some(ChildGuard(command.spawn().unwrap()))
}

#[track_caller]
fn assert_still_verifies(disk: &Disk, client: &mut ChildGuard) {
    let ended = client.0.try_wait().unwrap();
    let said = || std::fs::read_to_string(disk.scratch.file("fio.log")).unwrap();
    assert!(ended.is_none(), "fio has ended: {ended:?}: {}", said());
}

/// A client that writes faster than the mirror copies: only write-blocking lets it catch up.
#[test]
fn writes_that_go_to_both_let_a_mirror_catch_up() {
    let disk = Disk::serve(&[]);
    let Some(mut client) = verifying_client(&disk, "20m") else { return };
    let target = disk.file("mirror.raw");
    disk.ctl_succeeds(&["mirror", "a", &target]);
    disk.ctl_succeeds(&["job-wait", "1", "--ready"]);
    disk.ctl_succeeds(&["job-rate", "1", "2M"]);
    disk.wait_for("it falls behind", |job| job["dirty"].as_u64() > Some(8 << 20));
    assert_eq!(disk.job(1)["copy_mode"], "background");
    disk.ctl_succeeds(&["job-copy-mode", "1", "write-blocking"]);
    disk.ctl_succeeds(&["job-rate", "1", "16M"]);
    disk.wait_for("it has caught up", |job| job["synced"] == true);
    disk.ctl_succeeds(&["job-complete", "1", "--within", "10s", "--wait"]);
    assert_eq!(device(&disk), target);
    assert_still_verifies(&disk, &mut client);
    // The whole way in this mode, to a copy of a moment.
    let copy = disk.file("copy.raw");
    disk.ctl_succeeds(&["mirror", "a", &copy, "--copy-mode", "write-blocking", "--wait"]);
    assert_eq!(disk.job(2)["copy_mode"], "write-blocking");
    assert_still_verifies(&disk, &mut client);
    drop(client);
    disk.ctl_succeeds(&["job-complete", "2", "--stay", "--wait"]);
    succeed(&["compare", &copy, &device(&disk)]);
    disk.ctl_succeeds(&["backup", "a", &disk.file("backup.raw"), "--wait"]);
    let no_mirror = ["job-copy-mode", "3", "background"];
    disk.ctl_fails(&no_mirror, 2, &["the job is not a mirror"]);
    disk.ctl_fails(&["job-copy-mode", "2", "other"], 2, &["write-blocking"]);
}

/// Clients see the size that they have seen before, and nothing of what is behind it at the target.
#[test]
fn an_export_keeps_its_size_on_a_larger_target() {
    let disk = Disk::serve(&["--export", "b=memory:1M"]);
    let target = disk.file("large.raw");
    std::fs::write(&target, vec![b'o'; 3 << 20]).unwrap();
    let socket = disk.scratch.socket("t");
    let server = PeerServer::blockhaul(OURS.as_ref(), &socket, &[&target]).unwrap();
    disk.ctl_succeeds(&["layer-add", "b", "stats"]);
    disk.ctl_succeeds(&["mirror", "b", &server.uri(""), "--wait"]);
    let to = disk.server.uri("b");
    let size = || succeed(&["info", "--size", &to]);
    assert_eq!(size(), "1048576\n");
    disk.ctl_succeeds(&["job-complete", "1", "--wait"]);
    assert_eq!(size(), "1048576\n");
    disk.server.says(", with --layer 'offset?range=1048576'").unwrap();
    succeed(&["copy", "--no-progress", "random:1M?seed=5", &to]);
    succeed(&["compare", "random:1M?seed=5", &to]);
    let written = std::fs::read(&target).unwrap();
    assert_eq!(written.len(), 3 << 20);
    assert!(written[1 << 20..].iter().all(|&byte| byte == b'o'));
    // The layers of the disk that it has left are gone, and this one cannot be taken away.
    disk.ctl_fails(&["layer-remove", "b", "stats"], 3, &["has no layer \"stats\"", "offset"]);
    disk.ctl_fails(&["layer-remove", "b", "offset"], 2, &["clients would see another disk"]);
    // The size stays when it moves on.
    disk.ctl_succeeds(&["mirror", "b", &disk.file("next.raw"), "--wait"]);
    disk.ctl_succeeds(&["job-complete", "2", "--wait"]);
    assert_eq!(
        (size(), std::fs::metadata(disk.file("next.raw")).unwrap().len()),
        ("1048576\n".into(), 1 << 20)
    );
}

/// Writes go to both, and what the target did not take is copied again: nothing of it is locked while
/// the job is stopped by an error, or waits for its rate.
#[test]
fn a_job_that_waits_holds_no_write_of_a_client() {
    let disk = Disk::serve(&[]);
    let control = disk.file("ctl-t");
    let args = ["--control", &control, "--export", "t=memory:32M"];
    let server = PeerServer::blockhaul(OURS.as_ref(), &disk.scratch.socket("t"), &args).unwrap();
    let target = server.uri("t");
    succeed(&["copy", "--no-progress", disk.path.to_str().unwrap(), &target]);
    let mut mirror = vec!["mirror", "a", &target, "--sync", "none", "--wait"];
    mirror.extend(["--copy-mode", "write-blocking", "--on-target-error", "stop"]);
    disk.ctl_succeeds(&mirror);
    let write = |seed: u32| {
        let random = format!("random:32M?seed={seed}");
        let to = disk.server.uri("a");
        succeed(&["copy", "--no-progress", "--range", "8M:2M", &random, &to]);
    };
    let full = "error?error=ENOSPC&write=100%&zero=100%";
    succeed(&["ctl", &control, "layer-add", "t", full]);
    write(2);
    disk.wait_for("the target is full", |job| job["state"] == "paused");
    write(3);
    disk.ctl_succeeds(&["job-rate", "1", "1"]);
    succeed(&["ctl", &control, "layer-remove", "t", "error"]);
    disk.ctl_succeeds(&["job-resume", "1"]);
    write(4);
    let job = disk.job(1);
    assert_eq!(job["state"], "ready");
    assert!(job["dirty"].as_u64() > Some(512 << 10), "{job}");
    assert_eq!(job["synced"], false, "the rate does not let it catch up: {job}");
    disk.ctl_succeeds(&["job-rate", "1", "0"]);
    disk.ctl_succeeds(&["job-complete", "1", "--stay", "--within", "10s", "--wait"]);
    succeed(&["compare", disk.path.to_str().unwrap(), &target]);
}

/// A mirror of the disk to memory of another server, which is paused with 2 MiB that it has not
/// copied. The second result is the control socket of that server.
fn paused_mirror(disk: &Disk, options: &[&str]) -> (PeerServer, String) {
    let control = disk.file("ctl-t");
    let args = ["--control", &control, "--export", "t=memory:32M"];
    let server = PeerServer::blockhaul(OURS.as_ref(), &disk.scratch.socket("t"), &args).unwrap();
    let target = server.uri("t");
    let mirror = ["mirror", "a", &target, "--wait"];
    disk.ctl_succeeds(&[&mirror, options].concat());
    disk.ctl_succeeds(&["job-pause", "1"]);
    disk.write_part();
    (server, control)
}

/// A client overwrites 2 MiB in the middle with other bytes.
fn write_other_part(disk: &Disk) {
    let to = disk.server.uri("a");
    succeed(&["copy", "--no-progress", "--range", "9M:2M", "random:32M?seed=3", &to]);
}

/// The last round copies what the rate would admit in that time, and clients do not wait for its tokens.
#[test]
fn the_last_round_does_not_wait_for_the_rate() {
    let disk = Disk::serve(&[]);
    let (target, _) = paused_mirror(&disk, &[]);
    // 2 MiB would take 32 seconds.
    disk.ctl_succeeds(&["job-rate", "1", "64k"]);
    disk.ctl_succeeds(&["job-complete", "1", "--stay", "--within", "60s"]);
    disk.ctl_succeeds(&["job-resume", "1"]);
    disk.ctl_succeeds(&["job-wait", "1"]);
    let job = disk.job(1);
    assert!(job["downtime"].as_f64() < Some(16.0), "{job}");
    succeed(&["compare", disk.path.to_str().unwrap(), &target.uri("t")]);
}

#[test]
fn clients_do_not_wait_for_a_job_that_waits_after_an_error() {
    for policy in ["stop", "ignore"] {
        let disk = Disk::serve(&[]);
        let (server, control) = paused_mirror(&disk, &["--on-target-error", policy]);
        let full = "error?error=ENOSPC&write=100%&zero=100%";
        succeed(&["ctl", &control, "layer-add", "t", full]);
        disk.ctl_succeeds(&["job-complete", "1", "--within", "60s"]);
        disk.ctl_succeeds(&["job-resume", "1"]);
        let is_stopped = policy == "stop";
        let state = if is_stopped { "paused" } else { "completing" };
        disk.wait_for("clients are released", |job| {
            job["state"] == state && job["postponed"].is_string()
        });
        write_other_part(&disk);
        disk.ctl_succeeds(&["export-add", "b=memory:1M"]);
        assert_eq!(device(&disk), disk.path.to_str().unwrap());
        succeed(&["ctl", &control, "layer-remove", "t", "error"]);
        if is_stopped {
            disk.ctl_succeeds(&["job-resume", "1"]);
        }
        disk.ctl_succeeds(&["job-wait", "1"]);
        assert_eq!(device(&disk), server.uri("t"));
        succeed(&["compare", disk.path.to_str().unwrap(), &server.uri("t")]);
    }
}

/// Stops a server, or continues it.
fn signal(server: &PeerServer, name: &str) {
    let mut kill = Command::new("kill");
    assert!(kill.args([name, &server.pid().to_string()]).status().unwrap().success());
}

#[test]
fn clients_do_not_wait_for_a_target_that_does_not_answer() {
    let disk = Disk::serve(&[]);
    let (server, _) = paused_mirror(&disk, &[]);
    let target = server.uri("t");
    disk.ctl_succeeds(&["job-complete", "1", "--within", "300ms"]);
    signal(&server, "-STOP");
    disk.ctl_succeeds(&["job-resume", "1"]);
    disk.wait_for("clients are released", |job| job["postponed"].is_string());
    write_other_part(&disk);
    assert_eq!(disk.job(1)["state"], "completing");
    assert_eq!(device(&disk), disk.path.to_str().unwrap());
    signal(&server, "-CONT");
    // It may have completed already, within its 300 ms.
    let _ = blockhaul(&["ctl", &disk.control, "job-complete", "1", "--within", "60s"]);
    disk.ctl_succeeds(&["job-wait", "1"]);
    assert_eq!(device(&disk), target);
    succeed(&["compare", disk.path.to_str().unwrap(), &target]);
}

#[test]
fn a_cancelled_job_releases_clients_that_wait_for_its_end() {
    let disk = Disk::serve(&[]);
    let (server, _) = paused_mirror(&disk, &[]);
    disk.ctl_succeeds(&["job-complete", "1", "--within", "1h"]);
    signal(&server, "-STOP");
    disk.ctl_succeeds(&["job-resume", "1"]);
    // A job cannot be paused while clients wait for it.
    while disk.ctl(&["job-pause", "1"]).status.success() {
        disk.ctl_succeeds(&["job-resume", "1"]);
    }
    disk.ctl_succeeds(&["job-cancel", "1"]);
    write_other_part(&disk);
    signal(&server, "-CONT");
    disk.wait_for("cancelled", |job| job["state"] == "cancelled");
    assert_eq!(device(&disk), disk.path.to_str().unwrap());
}

/// fio writes at random and verifies, while its export moves from file to file.
#[test]
fn an_export_moves_between_files_under_a_client_that_verifies() {
    let moves = if tools::long() { 100 } else { 4 };
    let disk = Disk::serve(&[]);
    let Some(mut client) = verifying_client(&disk, "40m") else { return };
    let started = Instant::now();
    for number in 1..=moves {
        let target = disk.file(if number % 2 == 0 { "even.raw" } else { "odd.raw" });
        disk.ctl_succeeds(&["mirror", "a", &target, "--wait"]);
        let number = number.to_string();
        disk.ctl_succeeds(&["job-complete", &number, "--within", "10s", "--wait"]);
        assert_eq!(device(&disk), target);
        assert_still_verifies(&disk, &mut client);
        assert!(started.elapsed() < LIMIT * moves, "too slow");
    }
    drop(client);
    // A mirror of the whole is equal once nobody writes.
    let copy = disk.file("copy.raw");
    let number = (moves + 1).to_string();
    disk.ctl_succeeds(&["mirror", "a", &copy, "--wait"]);
    disk.ctl_succeeds(&["job-complete", &number, "--stay", "--wait"]);
    succeed(&["compare", &copy, &device(&disk)]);
}
