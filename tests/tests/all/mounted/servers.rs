//! Servers that end or hang under a mount.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt as _;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use blockhaul_testkit::rng::Rng;
use blockhaul_testkit::tools::{self, PeerServer, ScratchDir, until};
use blockhaul_tests::{LIMIT, done, serve, text};

use super::{Disk, KINDS, Live, can_mount, empty_image, is_unmounted, random};

fn signal(server: &PeerServer, name: &str) {
    done(Command::new("kill").args(["-s", name, &server.pid().to_string()]));
}

/// Stops a server, and waits until all of its threads have stopped: until then they answer requests.
fn stop(server: &PeerServer) {
    signal(server, "STOP");
    let threads = format!("/proc/{}/task", server.pid());
    let is_stopped = |thread: std::io::Result<std::fs::DirEntry>| {
        let status = std::fs::read_to_string(thread.unwrap().path().join("status")).unwrap();
        status.lines().any(|line| line.starts_with("State:\tT"))
    };
    until("it has stopped", || std::fs::read_dir(&threads).unwrap().all(is_stopped));
}

#[test]
fn a_file_system_goes_on_when_its_server_was_killed_and_started_again() {
    if !can_mount() {
        return;
    }
    let (seed, _) = random();
    let scratch = ScratchDir::on_disk().unwrap();
    let image = empty_image(&scratch, 64 << 20);
    let mut server = serve(&scratch, "s", &[text(&image)]);
    let retry = "retry?retries=10000&retry-delay=20ms&retry-exponential=off";
    let disk = Disk::of(&scratch.file("mnt"), &["--layer", retry, &server.uri("")]);
    let Some(mut live) = Live::make(&KINDS[0], &disk, &scratch) else { return };
    let at = live.path().to_owned();
    let content = move |number: usize| {
        let mut bytes = vec![0; 100_000];
        Rng::new(seed ^ number as u64).fill(&mut bytes);
        bytes
    };
    let flushed = Arc::new(AtomicUsize::new(0));
    let stop = Arc::new(AtomicBool::new(false));
    let writer = {
        let (folder, flushed, stop) = (at.clone(), flushed.clone(), stop.clone());
        std::thread::spawn(move || {
            for number in 0.. {
                if stop.load(Ordering::SeqCst) {
                    break;
                }
                let path = folder.join(format!("{}", number % 100));
                let file = File::create(path).unwrap();
                file.write_all_at(&content(number), 0).unwrap();
                file.sync_all().unwrap();
                flushed.store(number + 1, Ordering::SeqCst);
            }
        })
    };
    for round in 0..3 {
        let enough = flushed.load(Ordering::SeqCst) + 20;
        let is_enough = || flushed.load(Ordering::SeqCst) >= enough || writer.is_finished();
        until("files are written", is_enough);
        signal(&server, "KILL");
        drop(server);
        // While nobody is there: what is not in the page cache has to wait.
        std::thread::sleep(Duration::from_millis(100));
        server = serve(&scratch, "s", &[text(&image)]);
        assert!(!writer.is_finished(), "round {round}: a write has failed");
    }
    let enough = flushed.load(Ordering::SeqCst) + 20;
    until("files are written", || flushed.load(Ordering::SeqCst) >= enough || writer.is_finished());
    stop.store(true, Ordering::SeqCst);
    writer.join().expect("no write and no fsync fails");
    live.check();
    let all = flushed.load(Ordering::SeqCst);
    for number in all.saturating_sub(100)..all {
        let path = at.join(format!("{}", number % 100));
        assert!(fs::read(path).unwrap() == content(number), "file {number} of {all}");
    }
    live.end();
    disk.end();
    println!("{all} files were flushed");
}

#[test]
fn requests_fail_within_the_timeout_when_a_server_hangs() {
    if !can_mount() {
        return;
    }
    let scratch = ScratchDir::new().unwrap();
    let server = serve(&scratch, "s", &["memory:16M"]);
    let args = ["--timeout", "1s", "--cache", "none", &server.uri("")];
    let mut disk = Disk::of(&scratch.file("mnt"), &args);
    let file = OpenOptions::new().read(true).write(true).open(disk.file()).unwrap();
    file.write_all_at(&[1; 4096], 0).unwrap();
    file.sync_all().unwrap();
    stop(&server);
    let begun = Instant::now();
    let failed = file.read_exact_at(&mut [0; 4096], 0).unwrap_err();
    let read = begun.elapsed();
    assert_eq!(failed.raw_os_error(), Some(5), "EIO");
    let failed = file.write_all_at(&[2; 4096], 0).unwrap_err();
    assert_eq!(failed.raw_os_error(), Some(5), "EIO");
    // The time is for the machine: it is the timeout, and not that of a request that never ends.
    assert!(read >= Duration::from_millis(900) && begun.elapsed() < LIMIT / 2, "{read:?}");
    signal(&server, "CONT");
    drop(file);
    until("it can be unmounted", || is_unmounted(&disk.folder));
    let status = tools::wait_within(&mut disk.child, LIMIT).unwrap();
    assert_eq!(status.code(), Some(5), "the second write may be lost");
}
