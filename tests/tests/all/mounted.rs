//! File systems of the kernel on loop devices over `blockhaul mount`: what was written is there after an
//! unmount, and fsck finds nothing. They need root and FUSE; `BLOCKHAUL_LONG` runs those that take long.

mod archives;
mod guests;
mod operations;
mod servers;
mod sizes;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use blockhaul_testkit::rng::{Rng, seed};
use blockhaul_testkit::tools::{
    self, PeerProgram, PeerServer, ScratchDir, SkipReason, among_peers, until,
};
use blockhaul_tests::disks::{Loop, Mounted};

use blockhaul_tests::{LIMIT, blockhaul, bounded, done, lossy, serve, succeed, text};

const SIZE: u64 = 512 << 20;
/// How often the process or its server is killed.
const KILLS: u64 = 100;

/// Whether this machine lets us mount; the test is skipped if not.
fn can_mount() -> bool {
    let fuse = fs::OpenOptions::new().read(true).write(true).open("/dev/fuse");
    let can = fuse.is_ok() && rustix::process::geteuid().is_root();
    if !can {
        tools::skip_or_fail(&SkipReason::new("needs root and /dev/fuse"));
    }
    can
}

/// A running `blockhaul mount`, in a directory or over a file.
struct Disk {
    child: Child,
    /// The directory or the file.
    folder: PathBuf,
}

impl Disk {
    fn of(folder: &Path, args: &[&str]) -> Disk {
        fs::create_dir_all(folder).unwrap();
        let disk = Disk::start(folder, args);
        until("it is mounted", || disk.file().exists());
        disk
    }

    /// Over a file, which it makes.
    fn over(file: &Path, args: &[&str]) -> Disk {
        fs::write(file, "").unwrap();
        let disk = Disk::start(file, args);
        until("it is mounted", || fs::metadata(file).is_ok_and(|found| found.len() > 0));
        disk
    }

    fn start(target: &Path, args: &[&str]) -> Disk {
        let mut command = blockhaul(&["mount", "-w"]);
        let child = command.args(args).arg(target).stdin(Stdio::null()).spawn().unwrap();
        Disk { child, folder: target.to_owned() }
    }

    fn file(&self) -> PathBuf {
        if self.folder.is_dir() { self.folder.join("disk") } else { self.folder.clone() }
    }

    /// Ends it as it should, once the kernel has closed the file of a loop device.
    fn end(mut self) {
        until("it can be unmounted", || is_unmounted(&self.folder));
        let status = tools::wait_within(&mut self.child, LIMIT).unwrap();
        assert_eq!(status.code(), Some(0));
    }

    /// Kills it, and removes the mount.
    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        until("the mount can be removed", || is_unmounted(&self.folder));
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        if self.child.try_wait().is_ok_and(|status| status.is_none()) {
            let _ = Command::new("umount").arg("--lazy").arg(&self.folder).status();
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// Unmounts a folder, unless it is in use.
fn is_unmounted(folder: &Path) -> bool {
    let unmounted = Command::new("umount").arg(folder).stderr(Stdio::null()).status();
    unmounted.is_ok_and(|status| status.success())
}

/// A type of file system: how to make it, and how to check it.
struct Kind {
    name: &'static str,
    make: &'static [&'static str],
    check: &'static [&'static str],
}

const KINDS: [Kind; 3] = [
    Kind { name: "ext4", make: &["mkfs.ext4", "-q"], check: &["e2fsck", "-fn"] },
    Kind { name: "xfs", make: &["mkfs.xfs", "-q", "-f"], check: &["xfs_repair", "-n"] },
    Kind { name: "btrfs", make: &["mkfs.btrfs", "-q", "-f"], check: &["btrfs", "check"] },
];

/// Runs a program of this machine, or else of the peers; false if there is none.
fn ran(words: &[&str], device: &str) -> bool {
    let mut here = Command::new(words[0]);
    here.arg("--help").stdout(Stdio::null()).stderr(Stdio::null());
    let mut command = match here.status() {
        Ok(_) => Command::new(words[0]),
        Err(_) => match among_peers(words[0]) {
            Ok(command) => command,
            Err(reason) => {
                tools::skip(format!("{}: {reason}", words[0]));
                return false;
            }
        },
    };
    let output = bounded(command.args(&words[1..]).arg(device), LIMIT);
    if output.status.code() == Some(127) {
        tools::skip(format!("{}: {}", words[0], lossy(&output.stderr)));
        return false;
    }
    let said = lossy(&output.stdout) + &lossy(&output.stderr);
    assert!(output.status.success(), "{words:?}: {said}");
    true
}

/// Random numbers, whose seed is printed.
fn random() -> (u64, Rng) {
    let seed = seed();
    println!("BLOCKHAUL_SEED={seed:#x}");
    (seed, Rng::new(seed))
}

/// An image that is a hole of this size.
fn empty_image(scratch: &ScratchDir, size: u64) -> PathBuf {
    let image = scratch.file("image");
    fs::File::create(&image).and_then(|file| file.set_len(size)).unwrap();
    image
}

/// A file system of the kernel, on a loop device over a mount.
struct Live<'a> {
    kind: &'a Kind,
    at: PathBuf,
    // Unmounted before the loop device goes.
    mounted: Option<Mounted>,
    device: Loop,
}

impl Live<'_> {
    /// Makes a file system and mounts it; none if that is not possible here.
    fn make<'a>(kind: &'a Kind, disk: &Disk, scratch: &ScratchDir) -> Option<Live<'a>> {
        let device = Loop::with(&["--direct-io=on"], &disk.file())?;
        if !ran(kind.make, &device.device) {
            return None;
        }
        let at = scratch.file("live");
        let mounted = Some(Mounted::new(&[&device.device], &at)?);
        Some(Live { kind, at, mounted, device })
    }

    fn path(&self) -> &Path {
        &self.at
    }

    fn unmount(&mut self) {
        drop(self.mounted.take());
        self.device.wait_until_closed();
    }

    /// Unmounts, checks, and mounts it again.
    fn check(&mut self) {
        self.unmount();
        ran(self.kind.check, &self.device.device);
        self.mounted = Some(Mounted::new(&[&self.device.device], &self.at).unwrap());
    }

    fn end(mut self) {
        self.unmount();
    }
}

/// Makes, changes, renames, syncs and removes files; returns their contents.
fn exercise(folder: &Path, rng: &mut Rng, steps: u64) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut model: BTreeMap<PathBuf, Vec<u8>> = BTreeMap::new();
    for _ in 0..steps {
        let path = folder.join(format!("f{}", rng.below(40)));
        match rng.below(10) {
            0 => {
                let to = folder.join(format!("f{}", rng.below(40)));
                if let Some(content) = model.remove(&path) {
                    fs::rename(&path, &to).unwrap();
                    model.insert(to, content);
                }
            }
            1 => {
                if model.remove(&path).is_some() {
                    fs::remove_file(&path).unwrap();
                }
            }
            2..5 => {
                let len = rng.between(1, 4 << 20) as usize;
                let mut bytes = vec![0; len];
                rng.fill(&mut bytes);
                fs::write(&path, &bytes).unwrap();
                model.insert(path, bytes);
            }
            _ => {
                let Some(content) = model.get_mut(&path) else { continue };
                let at = rng.below(content.len() as u64) as usize;
                let len = (rng.between(1, 64 << 10) as usize).min(content.len() - at);
                rng.fill(&mut content[at..at + len]);
                let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
                file.write_all_at(&content[at..at + len], at as u64).unwrap();
                if rng.below(4) == 0 {
                    file.sync_all().unwrap();
                }
            }
        }
    }
    model
}

fn assert_files(model: &BTreeMap<PathBuf, Vec<u8>>, what: &str) {
    for (path, content) in model {
        assert!(fs::read(path).unwrap() == *content, "{what}: {}", path.display());
    }
}

/// fio with verification, if it is there.
fn fio(folder: &Path) {
    let Some(fio) = PeerProgram::require("fio") else { return };
    let mut command = fio.command();
    command.args(["--name=verify", "--rw=randrw", "--bsrange=512-256k", "--size=64M"]);
    command.args([
        "--ioengine=libaio",
        "--direct=1",
        "--iodepth=16",
        "--verify=crc32c",
        "--verify_state_save=0",
    ]);
    command.args(["--fsync=64", "--do_verify=1", "--verify_fatal=1", "--minimal"]);
    let output = bounded(command.arg(format!("--directory={}", text(folder))), LIMIT);
    assert!(output.status.success(), "{}", lossy(&output.stdout) + &lossy(&output.stderr));
}

/// A file system of this kind on the disk is written, unmounted, checked, and mounted again.
fn use_file_system(kind: &Kind, disk: &Disk, scratch: &ScratchDir, rng: &mut Rng) {
    let Some(mut live) = Live::make(kind, disk, scratch) else { return };
    let model = exercise(live.path(), rng, 300);
    fio(live.path());
    assert_files(&model, "before the unmount");
    live.check();
    assert_files(&model, "after the unmount");
    live.end();
    println!("{}: {} files", kind.name, model.len());
}

#[test]
fn file_systems_of_the_kernel_work_over_every_kind_of_device() {
    if !tools::runs_long() {
        return;
    }
    let (seed, mut rng) = random();
    let scratch = ScratchDir::on_disk().unwrap();
    let (image, keys) = (empty_image(&scratch, SIZE), scratch.file("keys.psk"));
    succeed(&["tls", "init", "--psk", "alice", text(&keys)]);
    let memory = format!("memory:{SIZE}");
    let server = serve(&scratch, "tls", &["--tls-psk", text(&keys), &memory]);
    let socket = text(server.socket());
    let secure = format!("nbds+unix://alice@/?socket={socket}&tls-psk-file={}", text(&keys));
    let errors = format!("error?read=2%&write=2%&zero=2%&trim=2%&seed={}", seed >> 1);
    let retry = "retry?retries=20&retry-delay=1ms&retry-exponential=off";
    let devices: [(&str, Vec<&str>); 6] = [
        ("file", vec![text(&image)]),
        ("memory", vec![&memory]),
        ("cow", vec!["--layer", "cow", text(&image)]),
        ("cache", vec!["--layer", "cache", text(&image)]),
        ("retry over errors", vec!["--layer", &errors, "--layer", retry, text(&image)]),
        ("nbds", vec![&secure]),
    ];
    for (name, args) in devices {
        for kind in &KINDS {
            println!("{} over {name}", kind.name);
            let disk = Disk::of(&scratch.file("mnt"), &args);
            use_file_system(kind, &disk, &scratch, &mut rng);
            disk.end();
        }
    }
}

/// Writes and flushes through a mount until it fails; the number of the last block that was flushed.
fn write_until_it_fails(disk: &Path, from: u64) -> u64 {
    let Ok(file) = fs::OpenOptions::new().write(true).open(disk) else { return from };
    let mut flushed = from;
    for number in from + 1.. {
        let block = number.to_ne_bytes().repeat(512);
        let at = number % (SIZE / 4096) * 4096;
        if file.write_all_at(&block, at).and_then(|()| file.sync_data()).is_err() {
            break;
        }
        flushed = number;
    }
    flushed
}

fn kill_often(mut start: impl FnMut(&Path) -> Disk, mut kill: impl FnMut(Disk), image: &Path) {
    let (_, mut rng) = random();
    let scratch = ScratchDir::on_disk().unwrap();
    let mut flushed = 0;
    for round in 0..KILLS {
        let disk = start(&scratch.file("mnt"));
        let file = disk.file();
        let writer = std::thread::spawn(move || write_until_it_fails(&file, flushed));
        std::thread::sleep(Duration::from_millis(rng.between(1, 200)));
        kill(disk);
        flushed = writer.join().unwrap();
        let content = fs::File::open(image).unwrap();
        let blocks = SIZE / 4096;
        for number in flushed.saturating_sub(blocks - 2).max(1)..=flushed {
            let mut block = [0; 8];
            content.read_exact_at(&mut block, number % blocks * 4096).unwrap();
            // The next write, which was not flushed, may have come as far as this.
            assert_eq!(u64::from_ne_bytes(block), number, "round {round}");
        }
    }
    println!("{flushed} blocks were flushed in {KILLS} rounds");
}

#[test]
fn what_was_flushed_survives_kills_of_the_mount() {
    if !tools::runs_long() {
        return;
    }
    let scratch = ScratchDir::on_disk().unwrap();
    let image = empty_image(&scratch, SIZE);
    kill_often(|folder| Disk::of(folder, &[text(&image)]), Disk::kill, &image);
}

#[test]
fn what_was_flushed_survives_kills_of_the_server() {
    if !tools::runs_long() {
        return;
    }
    let scratch = ScratchDir::on_disk().unwrap();
    let image = empty_image(&scratch, SIZE);
    let server = std::cell::RefCell::new(None::<PeerServer>);
    let mut rounds = 0;
    let start = |folder: &Path| {
        // The kernel can close the socket of a killed server later than the process ends: another name
        // tells the new server's from it.
        rounds += 1;
        let started = serve(&scratch, &format!("s{rounds}"), &[text(&image)]);
        let disk = Disk::of(folder, &["--timeout", "5s", &started.uri("")]);
        server.replace(Some(started));
        disk
    };
    let kill = |mut disk: Disk| {
        let server = server.take().unwrap();
        done(Command::new("kill").args(["-9", &server.pid().to_string()]));
        // The writer gets an error, and what was written last may be lost.
        until("it can be unmounted", || is_unmounted(&disk.folder));
        let status = tools::wait_within(&mut disk.child, LIMIT).unwrap();
        assert!(matches!(status.code(), Some(0 | 5)), "{status}");
    };
    kill_often(start, kill, &image);
}
