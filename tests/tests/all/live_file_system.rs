//! Full and incremental backups of a disk that holds a file system of the kernel, which is written at full
//! speed meanwhile: each backup passes fsck, and its files are those at the moment when the job began. It
//! needs root and FUSE; `BLOCKHAUL_LONG` runs it.

use std::path::Path;
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use blockhaul_testkit::rng::{Rng, seed};
use blockhaul_testkit::tools::{self, PeerServer, ScratchDir, until};
use blockhaul_tests::disks::{Loop, Mounted};
use blockhaul_tests::{done, lossy, serve, succeed, text};

const SIZE: u64 = 512 << 20;
const ROUNDS: usize = 5;

/// The export as a file, by a server of QEMU, until it is dropped.
struct Fuse(Child);

impl Fuse {
    /// None where there is no such server: peers have a mount namespace of their own, in which their
    /// file cannot be seen from here.
    fn over(server: &PeerServer, file: &Path) -> Option<Fuse> {
        std::fs::write(file, []).unwrap();
        let socket = text(server.socket());
        let node = format!("driver=nbd,node-name=n,server.type=unix,server.path={socket},export=a");
        let export = format!("type=fuse,id=e,node-name=n,mountpoint={},writable=on", text(file));
        let mut command = Command::new("qemu-storage-daemon");
        let started = command.args(["--blockdev", &node, "--export", &export]).spawn();
        let Ok(child) = started else {
            tools::skip(format!("qemu-storage-daemon: {started:?}"));
            return None;
        };
        let fuse = Fuse(child);
        until("the file shows the disk", || file.metadata().is_ok_and(|now| now.len() == SIZE));
        Some(fuse)
    }
}

impl Drop for Fuse {
    fn drop(&mut self) {
        let _ = Command::new("kill").arg(self.0.id().to_string()).status();
        let _ = tools::wait_within(&mut self.0, Duration::from_secs(10));
    }
}

/// Makes, renames and removes files until it is stopped.
struct Writer {
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Writer {
    fn start(folder: &Path, mut rng: Rng) -> Writer {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let folder = folder.to_owned();
        let thread = std::thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                let [one, two, three] = [0; 3].map(|_| rng.below(60));
                let mut bytes = vec![0; rng.between(1, 2 << 20) as usize];
                rng.fill(&mut bytes);
                let path = folder.join(format!("f{one}"));
                let file = std::fs::write(&path, bytes).and_then(|()| std::fs::File::open(&path));
                file.and_then(|file| file.sync_all()).unwrap();
                // The files need not be there.
                let _ = std::fs::rename(folder.join(format!("f{two}")), folder.join("renamed"));
                let _ = std::fs::remove_file(folder.join(format!("f{three}")));
            }
        });
        Writer { stop, thread: Some(thread) }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let ended = self.thread.take().map(std::thread::JoinHandle::join);
        assert!(ended.is_none_or(|ended| ended.is_ok()) || std::thread::panicking());
    }
}

/// The files of a folder with their digests.
fn files(folder: &Path) -> String {
    let list = "find . -type f | sort | xargs -r sha256sum";
    done(Command::new("sh").args(["-c", list]).current_dir(folder))
}

/// Stops all writes to a file system, or lets them go on.
fn freeze(folder: &Path, how: &str) {
    done(Command::new("fsfreeze").args([how, text(folder)]));
}

/// Whether fsck has nothing to say, once the journal of the file system is replayed.
fn check(device: &Loop) {
    device.wait_until_closed();
    let output = Command::new("e2fsck").args(["-fy", &device.device]).output().unwrap();
    let said = lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert!(!said.contains("Fix"), "{said}");
}

#[test]
fn backups_of_a_busy_file_system_are_the_file_system_at_their_moments() {
    if !tools::runs_long() {
        return;
    }
    let seed = seed();
    println!("BLOCKHAUL_SEED={seed:#x}");
    let scratch = ScratchDir::on_disk().unwrap();
    let [disk, backup, copy, fuse, control] =
        ["disk", "backup", "copy", "fuse", "ctl"].map(|name| scratch.file(name));
    std::fs::File::create(&disk).and_then(|file| file.set_len(SIZE)).unwrap();
    let export = format!("a={}", text(&disk));
    let server = serve(&scratch, "s", &["--control", text(&control), "--export", &export]);
    let Some(file) = Fuse::over(&server, &fuse) else { return };
    let Some(device) = Loop::over(&fuse) else { return };
    done(Command::new("mkfs.ext4").args(["-q", &device.device]));
    let Some(mounted) = Mounted::new(&[&device.device], &scratch.file("live")) else { return };
    let writer = Writer::start(mounted.path(), Rng::new(seed));
    let ctl = |args: &[&str]| succeed(&[&["ctl", text(&control)], args].concat());
    for round in 1..=ROUNDS {
        std::thread::sleep(Duration::from_millis(700));
        freeze(mounted.path(), "--freeze");
        let expected = files(mounted.path());
        let bitmap = if round == 1 { "--start-bitmap=daily" } else { "--bitmap=daily" };
        ctl(&["backup", "a", text(&backup), bitmap, "--rate=40M"]);
        freeze(mounted.path(), "--unfreeze");
        ctl(&["job-wait", &round.to_string()]);
        // fsck writes.
        done(Command::new("cp").args(["--sparse=always", text(&backup), text(&copy)]));
        let Some(restored) = Loop::over(&copy) else { return };
        check(&restored);
        let restored = ["-o", "ro", &restored.device];
        let restored = Mounted::new(&restored, &scratch.file("restored")).unwrap();
        assert_eq!(files(restored.path()), expected, "round {round}");
        println!("round {round}: {} files", expected.lines().count());
    }
    drop(writer);
    drop(mounted);
    check(&device);
    drop((device, file));
    assert!(server.stop().unwrap().success());
}
