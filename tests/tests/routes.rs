//! Which ways `blockhaul copy` takes between files and sockets, told by its own counters, with sizes
//! and offsets that fit nowhere.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::io::Read as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use blockhaul_tests::{LIMIT, assert_same, blockhaul, bounded, garbage, lossy, serve, text};
use rustix::process::{Pid, Signal, kill_process};
use testkit::image;
use testkit::rng::{Rng, seed};
use testkit::tools::{self, Scratch};

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
fn image(scratch: &Scratch) -> std::path::PathBuf {
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

#[test]
fn payloads_stay_in_the_kernel_between_files_and_sockets() {
    let scratch = Scratch::new().unwrap();
    let source = image(&scratch);
    let targets = ["a.img", "b.img", "c.img"].map(|name| scratch.file(name));
    let from = serve(&scratch, "from", &["--read-only", text(&source)]);
    let [a, b, c] = targets.each_ref().map(|path| {
        std::fs::File::create(path).unwrap().set_len(SIZE).unwrap();
        text(path)
    });
    let to_a = serve(&scratch, "a", &[a]);
    let to_b = serve(&scratch, "b", &[b]);
    let cases = [
        ("socket-to-socket", from.uri(""), to_a.uri(""), a),
        ("file-to-socket", text(&source).to_string(), to_b.uri(""), b),
        ("socket-to-file", from.uri(""), c.to_string(), c),
    ];
    for (route, from, to, target) in cases {
        let routes = routes(&mut copy(&["-S", "0", &from, &to]));
        let moved = some(&routes, route);
        // What is short, and what lies at the end, goes through memory.
        assert!(moved > SIZE / 4, "{route}: {routes:?}");
        assert_eq!(some(&routes, "unseen"), moved + routes.get("memory").unwrap_or(&0));
        let others: Vec<_> = KERNEL.into_iter().filter(|other| *other != route).collect();
        none(&routes, &others);
        assert_same(&source, Path::new(target), route);
    }
}

#[test]
fn what_is_looked_at_goes_through_memory_and_zeroes_are_counted() {
    let scratch = Scratch::new().unwrap();
    let (source, target) = (image(&scratch), scratch.file("target.img"));
    let from = serve(&scratch, "from", &["--read-only", text(&source)]);
    let looked = routes(&mut copy(&["-S", "4096", &from.uri(""), text(&target)]));
    assert_same(&source, &target, "looked at");
    none(&looked, &KERNEL);
    none(&looked, &["unseen", "zeroes-written"]);
    some(&looked, "skip");
    // Zeroes shorter than asked for are written, and counted.
    let coarse = routes(&mut copy(&["-S", "65536", &from.uri(""), text(&target)]));
    assert_same(&source, &target, "looked at in large blocks");
    let zeroes = some(&coarse, "zeroes-written");
    assert_eq!(some(&coarse, "memory"), some(&looked, "memory") + zeroes);
}

#[test]
fn no_zero_copy_takes_everything_through_memory() {
    let scratch = Scratch::new().unwrap();
    let (source, target) = (image(&scratch), scratch.file("target.img"));
    let from = serve(&scratch, "from", &["--read-only", "--no-zero-copy", text(&source)]);
    let routes = routes(&mut copy(&["--no-zero-copy", "-S", "0", &from.uri(""), text(&target)]));
    assert_same(&source, &target, "through memory");
    none(&routes, &KERNEL);
    assert_eq!(some(&routes, "memory"), some(&routes, "unseen"));
}

/// Forgets what the page cache has of a file.
fn make_cold(path: &Path) -> io::File {
    let file = std::fs::File::open(path).unwrap();
    file.sync_all().unwrap();
    let file = io::File::new(file.into());
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    file
}

#[test]
fn what_is_cold_and_large_goes_past_the_page_cache() {
    let scratch = Scratch::on_disk().unwrap();
    let (source, target) = (scratch.file("source.img"), scratch.file("target.img"));
    let size = (64 << 20) + 1234;
    image::sparse(&source, size, seed()).unwrap();
    let ends = [text(&source), text(&target)];
    let file = make_cold(&source);
    if file.cached(0, size) != Some(0) {
        return eprintln!("the page cache cannot be emptied here: not checked");
    }
    let taken = routes(&mut copy(&ends));
    let cached = [file, open(&target)].map(|file| file.cached(0, size).unwrap());
    assert_same(&source, &target, "past the page cache");
    let data = some(&taken, "memory");
    let (read, written) = (some(&taken, "direct-read"), some(&taken, "direct-write"));
    // The last block is no whole one.
    assert!(read + 4096 > data && written + 4096 > data, "{taken:?}");
    // Files are read ahead in steps of this at the end, which alone is read through the page cache.
    assert!(cached.iter().all(|&bytes| bytes <= 256 << 10), "{cached:?}");
    // Now the source is cached, unless the kernel needs the memory for something else.
    if !cache(&source) {
        return eprintln!("the page cache does not keep 64 MiB here: not checked");
    }
    none(&routes(&mut copy(&ends)), &["direct-read", "direct-write"]);
    make_cold(&source);
    let off = [&["--direct=off"], &ends[..]].concat();
    none(&routes(&mut copy(&off)), &["direct-read", "direct-write"]);
    make_cold(&source);
    let on = [&["--direct=on"], &ends[..]].concat();
    some(&routes(&mut copy(&on)), "direct-read");
    assert_same(&source, &target, "all of it past the page cache");
}

/// Reads a file until the page cache has all of its data; false where it does not keep it.
fn cache(path: &Path) -> bool {
    let all = |file: &io::File| {
        let ranges = image::data_ranges(path).unwrap();
        ranges.iter().all(|range| {
            let len = range.end - range.start;
            file.cached(range.start, len).is_some_and(|cached| cached >= len)
        })
    };
    (0..5).any(|_| {
        std::fs::read(path).unwrap();
        all(&open(path))
    })
}

fn open(path: &Path) -> io::File {
    io::File::new(std::fs::File::open(path).unwrap().into())
}

/// A file system that is mounted for a test.
struct Mounted {
    scratch: Scratch,
}

impl Mounted {
    /// An XFS in a file. `None` where this machine does not let us, or has no mkfs.xfs.
    fn xfs() -> Option<Mounted> {
        let scratch = Scratch::on_disk().unwrap();
        let (image, folder) = (scratch.file("xfs.img"), scratch.file("mounted"));
        std::fs::create_dir(&folder).unwrap();
        std::fs::File::create(&image).unwrap().set_len(512 << 20).unwrap();
        let mut mkfs = tools::among_peers("mkfs.xfs").ok()?;
        mkfs.args(["-q", text(&image)]);
        let mut mount = Command::new("mount");
        mount.args(["-o", "loop", text(&image), text(&folder)]);
        for mut command in [mkfs, mount] {
            let output = tools::output(&mut command, LIMIT).ok()?;
            if !output.status.success() {
                eprintln!("no XFS can be mounted here: {}", lossy(&output.stderr));
                return None;
            }
        }
        Some(Mounted { scratch })
    }

    /// A file system in memory with room for so many bytes. `None` where this machine does not let us.
    fn memory(bytes: u64) -> Option<Mounted> {
        let scratch = Scratch::new().unwrap();
        let folder = scratch.file("mounted");
        std::fs::create_dir(&folder).unwrap();
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &format!("size={bytes}"), "none", text(&folder)]);
        let output = tools::output(&mut mount, LIMIT).ok()?;
        if !output.status.success() {
            eprintln!("nothing can be mounted here: {}", lossy(&output.stderr));
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

#[test]
fn files_of_one_xfs_share_their_data() {
    let Some(xfs) = Mounted::xfs() else { return };
    let (source, target) = (xfs.file("source.img"), xfs.file("target.img"));
    image::sparse(&source, SIZE, seed()).unwrap();
    let ends = [text(&source), text(&target)];
    let shared = routes(&mut copy(&ends));
    assert_same(&source, &target, "shared");
    let bytes = some(&shared, "reflink");
    none(&shared, &["memory", "direct-write", "file-to-file"]);
    assert_eq!(some(&shared, "unseen"), bytes);
    // Onto what is there already, of which nothing must shine through.
    garbage(&target, SIZE).unwrap();
    assert_eq!(some(&routes(&mut copy(&ends)), "reflink"), bytes);
    assert_same(&source, &target, "shared, over garbage");
    // What is shared does not pass through the page cache either.
    garbage(&target, SIZE).unwrap();
    assert_eq!(some(&routes(&mut copy(&["--direct=on", ends[0], ends[1]])), "reflink"), bytes);
    assert_same(&source, &target, "shared, past the page cache");
    // Who wants the bytes looked at, allocated, or moved, gets that.
    for options in [&["-S", "4096"][..], &["--allocated"], &["--no-zero-copy"]] {
        none(&routes(&mut copy(&[options, &ends].concat())), &["reflink"]);
        assert_same(&source, &target, &options.join(" "));
    }
    // Neither a file of another file system nor a part of a block can be shared.
    let other = Scratch::on_disk().unwrap();
    let far = other.file("target.img");
    none(&routes(&mut copy(&[text(&source), text(&far)])), &["reflink"]);
    assert_same(&source, &far, "to another file system");
    let crooked = format!("offset?offset=1000&range={}", SIZE - 1000);
    none(&routes(&mut copy(&["--source-layer", &crooked, ends[0], ends[1]])), &["reflink"]);
    assert_eq!(std::fs::metadata(&target).unwrap().len(), SIZE - 1000);
    let bytes = [&source, &target].map(|path| std::fs::read(path).unwrap());
    assert!(bytes[0][1000..] == bytes[1]);
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

/// A file of data that fits no block and no step, long enough for every way to be measured.
fn dense(scratch: &Scratch) -> (std::path::PathBuf, u64) {
    let (path, size) = (scratch.file("dense.img"), (48 << 20) + 1234);
    let mut bytes = vec![0; size];
    Rng::new(seed()).fill(&mut bytes);
    std::fs::write(&path, bytes).unwrap();
    (path, size as u64)
}

#[test]
fn copying_by_the_kernel_is_measured_between_files() {
    for scratch in [Scratch::new().unwrap(), Scratch::on_disk().unwrap()] {
        let ((source, size), target) = (dense(&scratch), scratch.file("target.img"));
        for options in [&["-S", "0"][..], &["-C", "1"], &[]] {
            garbage(&target, size + 4096).unwrap();
            let what = format!("{options:?}");
            let args = [options, &["--direct=off", text(&source), text(&target)]].concat();
            let taken = routes(&mut copy(&args));
            assert_same(&source, &target, &what);
            // Two measurements of 8 MiB each way, where one lane sees it all; else of a segment at least.
            let alone = options[..].contains(&"-C");
            let copied = some(&taken, "copy-file-range");
            assert!(copied >= if alone { 16 << 20 } else { 7 << 20 }, "{what}: {taken:?}");
            let others =
                ["memory", "file-to-file"].iter().filter_map(|way| taken.get(*way)).sum::<u64>();
            assert!(others >= if alone { 16 << 20 } else { 0 }, "{what}: {taken:?}");
            assert_eq!(others + copied, size, "{what}: {taken:?}");
            assert_eq!(options[..].contains(&"0"), some(&taken, "unseen") == size, "{taken:?}");
        }
        // At an offset that fits nothing.
        let crooked = format!("offset?offset=1000&range={}", size - 1003);
        let ends = [text(&source), text(&target)];
        let taken =
            routes(&mut copy(&["--direct=off", "--source-layer", &crooked, ends[0], ends[1]]));
        some(&taken, "copy-file-range");
        let bytes = [&source, &target].map(|path| std::fs::read(path).unwrap());
        assert!(bytes[0][1000..bytes[0].len() - 3] == bytes[1]);
        // Who wants the bytes looked at, allocated, moved or past the page cache, gets that.
        let others = ["-S=4096", "--allocated", "--no-zero-copy", "--digest=blake3"];
        for option in others {
            let taken = routes(&mut copy(&["--direct=off", option, ends[0], ends[1]]));
            none(&taken, &["copy-file-range"]);
            assert_same(&source, &target, option);
        }
    }
    let scratch = Scratch::on_disk().unwrap();
    let ((source, _), target) = (dense(&scratch), scratch.file("target.img"));
    none(&routes(&mut copy(&["--direct=on", text(&source), text(&target)])), &["copy-file-range"]);
    assert_same(&source, &target, "past the page cache");
}

#[test]
fn what_the_kernel_does_not_copy_is_read_and_written() {
    let scratch = Scratch::new().unwrap();
    let ((source, size), target) = (dense(&scratch), scratch.file("target.img"));
    let command = copy(&["-S", "0", text(&source), text(&target)]);
    for errno in ["EPERM", "ENOSYS", "EXDEV", "EINVAL", "EIO"] {
        garbage(&target, size).unwrap();
        none(&routes(&mut refusing(errno, "copy_file_range", &command)), &["copy-file-range"]);
        assert_same(&source, &target, errno);
    }
    for errno in ["EINVAL", "EIO"] {
        garbage(&target, size).unwrap();
        // The measurement is in steps of 7.5 MiB and the rest.
        let command = copy(&["-C", "1", text(&source), text(&target)]);
        let taken = routes(&mut refusing(errno, "copy_file_range_short", &command));
        assert!((1..16 << 20).contains(&some(&taken, "copy-file-range")), "{taken:?}");
        assert_same(&source, &target, errno);
    }
    // A target that is full is told as such, by whoever writes.
    let Some(small) = Mounted::memory(20 << 20) else { return };
    let (from, to) = (small.file("source.img"), small.file("target.img"));
    garbage(&from, 12 << 20).unwrap();
    let output = bounded(&mut copy(&["-S", "0", text(&from), text(&to)]), LIMIT);
    let told = lossy(&output.stderr);
    assert!(!output.status.success() && told.contains("No space left"), "{told}");
}

#[test]
fn copying_by_the_kernel_goes_on_when_it_is_interrupted() {
    let scratch = Scratch::new().unwrap();
    let ((source, size), target) = (dense(&scratch), scratch.file("target.img"));
    for _ in 0..4 {
        garbage(&target, size).unwrap();
        let mut command = copy(&["-S", "0", text(&source), text(&target)]);
        command.stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let interrupting = Interrupting::start(vec![child.id()]);
        let ended = tools::wait_within(&mut child, LIMIT);
        let times = interrupting.stop();
        if ended.is_none() {
            child.kill().unwrap();
        }
        let mut told = String::new();
        child.stderr.take().unwrap().read_to_string(&mut told).unwrap();
        assert!(ended.is_some_and(|status| status.success()), "{ended:?}, {told}");
        assert!(times > 3 && told.contains("copy-file-range"), "{times} times, {told}");
        assert_same(&source, &target, "interrupted");
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

#[test]
fn interrupted_calls_are_gone_on_with() {
    let scratch = Scratch::new().unwrap();
    let (source, size) = (scratch.file("source.img"), (3 << 20) + 1234);
    garbage(&source, size).unwrap();
    let (file, target) = (scratch.file("file.img"), scratch.file("target.img"));
    std::fs::File::create(&target).unwrap().set_len(size).unwrap();
    let from = serve(&scratch, "from", &["--read-only", text(&source)]);
    let to = serve(&scratch, "to", &[text(&target)]);
    let (from_uri, to_uri) = (from.uri(""), to.uri(""));
    let cases = [
        (text(&source), &*to_uri, &target),
        (&*from_uri, &*to_uri, &target),
        (&*from_uri, text(&file), &file),
        (text(&source), text(&file), &file),
    ];
    let options: [&[&str]; 5] = [
        &["-S", "0"],
        &["-S", "4096"],
        &["--no-zero-copy"],
        &["--engine=threads"],
        &["--direct=on"],
    ];
    for (from_name, to_name, changed) in cases {
        for options in options {
            let what = format!("{options:?}, {from_name} to {to_name}");
            garbage(changed, size).unwrap();
            let mut command = copy(&[&["--verify"], options, &[from_name, to_name]].concat());
            command.stdout(Stdio::null()).stderr(Stdio::piped());
            let mut child = command.spawn().unwrap();
            let interrupting = Interrupting::start(vec![child.id(), from.pid(), to.pid()]);
            let ended = tools::wait_within(&mut child, LIMIT);
            let times = interrupting.stop();
            let mut told = String::new();
            if ended.is_none() {
                child.kill().unwrap();
            }
            child.stderr.take().unwrap().read_to_string(&mut told).unwrap();
            assert!(ended.is_some_and(|status| status.success()), "{what}: {ended:?}, {told}");
            assert!(times > 3, "{what}: interrupted {times} times only");
            assert_same(&source, changed, &what);
        }
    }
}

/// What each refusal keeps from being used.
const REFUSED: [(&str, &[&str]); 8] = [
    ("io_uring_setup", &[]),
    ("io_uring_register", &[]),
    (
        "splice",
        &["file-to-socket", "socket-to-socket", "socket-to-file", "file-to-file", "vmsplice"],
    ),
    ("vmsplice", &["vmsplice"]),
    ("cachestat", &[]),
    ("cachestat,mincore,preadv2", &[]),
    ("copy_file_range,fallocate", &["copy-file-range"]),
    ("reflink", &["reflink"]),
];

#[test]
fn what_a_sandbox_refuses_is_done_another_way() {
    let scratch = Scratch::new().unwrap();
    let disk = Scratch::on_disk().unwrap();
    let xfs = Mounted::xfs();
    let source = image(&scratch);
    let cold = disk.file("source.img");
    image::sparse(&cold, (64 << 20) + 77, seed()).unwrap();
    let from = serve(&scratch, "from", &["--read-only", text(&source)]);
    let target = scratch.file("target.img");
    std::fs::File::create(&target).unwrap().set_len(SIZE).unwrap();
    let to = serve(&scratch, "to", &[text(&target)]);
    let (near, far) = (disk.file("target.img"), disk.file("copied.img"));
    let mut cases = vec![
        (from.uri(""), to.uri(""), &source, target.clone()),
        (text(&source).to_string(), to.uri(""), &source, target.clone()),
        (from.uri(""), text(&near).to_string(), &source, near.clone()),
        (text(&cold).to_string(), text(&far).to_string(), &cold, far.clone()),
    ];
    let shared = xfs.as_ref().map(|xfs| (xfs.file("source.img"), xfs.file("target.img")));
    if let Some((one, two)) = &shared {
        std::fs::copy(&source, one).unwrap();
        cases.push((text(one).to_string(), text(two).to_string(), one, two.clone()));
    }
    for (calls, gone) in REFUSED {
        for errno in ["EPERM", "ENOSYS"] {
            for (from, to, source, target) in &cases {
                make_cold(source);
                // Looked at in part, so that both kinds of payload are on their way.
                let told = format!("{from} to {to} without {calls} ({errno})");
                let taken = routes(&mut refusing(errno, calls, &copy(&[from, to])));
                assert_same(source, target, &told);
                none(&taken, gone);
            }
        }
    }
}

/// Payloads that stay in the kernel, and payloads that are sent from memory by reference.
const LOOKS: [(&str, &str); 2] = [("0", "socket-to-socket"), ("4096", "vmsplice")];

#[test]
fn writes_that_fail_in_the_middle_are_repeated_with_the_right_bytes() {
    let scratch = Scratch::new().unwrap();
    let (source, target) = (image(&scratch), scratch.file("target.img"));
    let from = serve(&scratch, "from", &["--read-only", text(&source)]);
    for (look, route) in LOOKS {
        garbage(&target, SIZE).unwrap();
        let failing = ["--layer", "error?write=0.2", text(&target)];
        let to = serve(&scratch, "to", &failing);
        let mut command = copy(&["-S", look, "--retries=100", "--retry-delay=1ms"]);
        let taken = routes(command.args([from.uri(""), to.uri("")]));
        some(&taken, route);
        assert_same(&source, &target, route);
        to.stop().unwrap();
    }
}

#[test]
fn a_connection_that_dies_with_payloads_on_their_way_leaves_the_right_bytes() {
    let scratch = Scratch::new().unwrap();
    let (source, target) = (image(&scratch), scratch.file("target.img"));
    let from = serve(&scratch, "from", &["--read-only", text(&source)]);
    for (look, route) in LOOKS {
        garbage(&target, SIZE).unwrap();
        // Slow enough for requests to be on their way when it ends.
        let slow = ["--layer", "delay?write=100ms", text(&target)];
        let to = serve(&scratch, route, &slow);
        let uri = to.uri("");
        let mut command = copy(&["-S", look, "--retries=50", "--retry-delay=20ms", "-C", "2"]);
        command.args(["--rate=16M", &from.uri(""), &uri]);
        let copying = std::thread::spawn(move || routes(&mut command));
        std::thread::sleep(std::time::Duration::from_millis(700));
        let killed = Command::new("kill").args(["-9", &to.pid().to_string()]).status().unwrap();
        assert!(killed.success());
        drop(to);
        let _ = std::fs::remove_file(scratch.socket(route));
        let _again = serve(&scratch, route, &[text(&target)]);
        let taken = copying.join().unwrap();
        some(&taken, route);
        assert_same(&source, &target, route);
    }
}
