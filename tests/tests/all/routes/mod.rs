//! The routes of `blockhaul copy` between files and sockets, according to its own counters, with
//! unaligned sizes and offsets.

mod disturbed;
mod files;
mod sockets;

use std::collections::BTreeMap;
use std::io::Read as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use blockhaul_testkit::image;
use blockhaul_testkit::rng::{Rng, seed};
use blockhaul_testkit::tools::{self, PeerProgram, ScratchDir};
use blockhaul_tests::{LIMIT, assert_same, blockhaul, bounded, garbage, lossy, serve, text};
use rustix::process::{Pid, Signal, kill_process};

/// Neither a multiple of a block nor of a request.
const SIZE: u64 = (24 << 20) + 1234;

/// Bytes by route.
type Routes = BTreeMap<String, u64>;

/// Runs a copy, which must succeed, and gives the counters of its closing line.
fn routes(command: &mut Command) -> Routes {
    let output = bounded(command, LIMIT);
    let told = lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {told}");
    let (_, routes) = told.split_once("routes: ").unwrap_or_else(|| panic!("{told}"));
    let routes = routes.split([';', '\n']).next().unwrap();
    let parse = |pair: &str| {
        let (name, bytes) = pair.rsplit_once(' ').unwrap();
        (name.to_string(), bytes.parse().unwrap())
    };
    routes.split(", ").map(parse).collect()
}

fn copy(args: &[&str]) -> Command {
    blockhaul(&[&["copy", "--verbose"], args].concat())
}

/// An image on a file system in memory, whose content is always in the page cache.
fn image(scratch: &ScratchDir) -> std::path::PathBuf {
    let path = scratch.file("source.img");
    image::sparse(&path, SIZE, seed()).unwrap();
    path
}

/// Bytes that went one way.
#[track_caller]
fn some(routes: &Routes, name: &str) -> u64 {
    *routes.get(name).unwrap_or_else(|| panic!("not {name}: {routes:?}"))
}

#[track_caller]
fn none(routes: &Routes, names: &[&str]) {
    for name in names {
        assert!(!routes.contains_key(*name), "{name}: {routes:?}");
    }
}

const KERNEL: [&str; 6] =
    ["file-to-socket", "socket-to-socket", "socket-to-file", "file-to-file", "vmsplice", "reflink"];

/// Forgets what the page cache has of a file.
fn make_cold(path: &Path) -> blockhaul_io::File {
    let file = std::fs::File::open(path).unwrap();
    file.sync_all().unwrap();
    let file = blockhaul_io::File::new(file.into());
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    file
}

/// A file system that is mounted for a test.
struct Mounted {
    scratch: ScratchDir,
}

impl Mounted {
    /// An XFS in a file. `None` where this machine does not let us, or has no mkfs.xfs.
    fn xfs() -> Option<Mounted> {
        let scratch = ScratchDir::on_disk().unwrap();
        let image = scratch.file("xfs.img");
        let folder = scratch.file("mounted");
        std::fs::create_dir(&folder).unwrap();
        std::fs::File::create(&image).unwrap().set_len(512 << 20).unwrap();
        let mut mkfs = PeerProgram::require("mkfs.xfs")?.command();
        mkfs.args(["-q", text(&image)]);
        let mut mount = Command::new("mount");
        mount.args(["-o", "loop", text(&image), text(&folder)]);
        for mut command in [mkfs, mount] {
            let output = tools::output(&mut command, LIMIT).unwrap();
            if !output.status.success() {
                tools::skip(format!("no XFS can be mounted: {}", lossy(&output.stderr)));
                return None;
            }
        }
        Some(Mounted { scratch })
    }

    /// A file system in memory with room for so many bytes. `None` where this machine does not let us.
    fn memory(bytes: u64) -> Option<Mounted> {
        let scratch = ScratchDir::new().unwrap();
        let folder = scratch.file("mounted");
        std::fs::create_dir(&folder).unwrap();
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &format!("size={bytes}"), "none", text(&folder)]);
        let output = tools::output(&mut mount, LIMIT).unwrap();
        if !output.status.success() {
            tools::skip(format!("no tmpfs can be mounted: {}", lossy(&output.stderr)));
            return None;
        }
        Some(Mounted { scratch })
    }

    fn file(&self, name: &str) -> std::path::PathBuf {
        self.scratch.file("mounted").join(name)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let folder = self.scratch.file("mounted");
        // The loop device goes with the mount; where this fails, the folder cannot be removed either.
        let _ = tools::output(Command::new("umount").arg(folder), LIMIT);
    }
}

/// The same command, for which the kernel refuses these system calls.
fn refusing(errno: &str, calls: &str, command: &Command) -> Command {
    let mut refusing = Command::new(env!("CARGO_BIN_EXE_refuse"));
    refusing.args([errno, calls]).arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        value.map(|value| refusing.env(name, value));
    }
    refusing
}

/// Runs a copy that is interrupted, as are these other processes, and looks what became of it: until one has
/// been interrupted several times before it was over.
#[track_caller]
fn interrupted(command: impl Fn() -> Command, others: &[u32], what: &str, check: impl Fn(&str)) {
    let begun = Instant::now();
    loop {
        let mut command = command();
        command.stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let interrupting = Interrupting::start([&[child.id()], others].concat());
        let ended = tools::wait_within(&mut child, LIMIT);
        let times = interrupting.stop();
        if ended.is_none() {
            child.kill().unwrap();
        }
        let mut told = String::new();
        child.stderr.take().unwrap().read_to_string(&mut told).unwrap();
        assert!(ended.is_some_and(|status| status.success()), "{what}: {ended:?}, {told}");
        check(&told);
        if times > 3 {
            return;
        }
        assert!(begun.elapsed() < LIMIT, "{what}: interrupted {times} times only");
    }
}

/// Stops and continues processes all the time until it is dropped: calls that wait return early, and
/// those that move bytes move fewer.
struct Interrupting {
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<u32>>,
}

impl Interrupting {
    fn start(pids: Vec<u32>) -> Interrupting {
        let over = Arc::new(AtomicBool::new(false));
        let seen = over.clone();
        let send = |pid: u32, signal| {
            let pid = Pid::from_raw(pid as i32).expect("a process");
            kill_process(pid, signal).is_ok()
        };
        let thread = std::thread::spawn(move || {
            let mut times = 0;
            while !seen.load(Ordering::Relaxed) {
                for &pid in &pids {
                    times += u32::from(send(pid, Signal::STOP));
                    std::thread::sleep(Duration::from_micros(200));
                    send(pid, Signal::CONT);
                }
                std::thread::sleep(Duration::from_micros(300));
            }
            times
        });
        Interrupting { over, thread: Some(thread) }
    }

    fn stop(mut self) -> u32 {
        self.over.store(true, Ordering::Relaxed);
        self.thread.take().expect("once").join().unwrap()
    }
}
