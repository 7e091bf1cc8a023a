//! Copies at random: any source to any target with any options that go together, disturbed by requests
//! that fail, by SIGKILL and by SIGTERM. A success is the same bytes, and nothing else of the target
//! has changed; a failure says what, and no copy hangs. `BLOCKHAUL_LONG` makes hundreds of them.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use blockhaul_testkit::image;
use blockhaul_testkit::require_peer;
use blockhaul_testkit::rng::{self, Rng};
use blockhaul_testkit::tools::{PeerProgram, PeerServer, ScratchDir, wait_within};
use blockhaul_tests::{LIMIT, blockhaul, bounded, done, garbage, lossy, serve, text};

/// What [`garbage`] fills a file with.
const GARBAGE: u8 = 0xA5;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum From {
    File,
    Pipe,
    Server,
    /// Without multi-conn.
    OneConnection,
    Nbdkit,
    Qcow2,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum To {
    Absent,
    Kept,
    /// Behind the first 8192 bytes of a file.
    Behind,
    Server,
    OneConnection,
    /// Takes whole blocks of 4096 bytes and at most 128 KiB.
    Blocks,
    QemuRaw,
    Qcow2,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    None,
    Flaky,
    Kill,
    Term,
}

/// The programs of others that take part.
struct Peers {
    nbdkit: PeerProgram,
    qemu_nbd: PeerProgram,
    qemu_img: PeerProgram,
}

/// One copy with everything about it.
struct Case<'a> {
    rng: Rng,
    peers: &'a Peers,
    scratch: ScratchDir,
    from: From,
    to: To,
    size: u64,
    target_size: u64,
    range: Option<(u64, u64)>,
    resumable: bool,
    fault: Fault,
    told: String,
}

impl<'a> Case<'a> {
    fn new(seed: u64, peers: &'a Peers) -> Case<'a> {
        let mut rng = Rng::new(seed);
        let from = *rng.pick(&[
            From::File,
            From::Pipe,
            From::Server,
            From::OneConnection,
            From::Nbdkit,
            From::Qcow2,
        ]);
        let to = *rng.pick(&[
            To::Absent,
            To::Kept,
            To::Behind,
            To::Server,
            To::OneConnection,
            To::Blocks,
            To::QemuRaw,
            To::Qcow2,
        ]);
        let any = rng.between(1, 8 << 20);
        let size = *rng.pick(&[1, 511, 4096, 65536, (3 << 20) + 777, 8 << 20, any, any]);
        let unit = match (from, to) {
            (_, To::Blocks) => 4096,
            (From::Qcow2, _) | (_, To::QemuRaw | To::Qcow2) => 512,
            _ => 1,
        };
        let size = size.next_multiple_of(unit);
        let larger = to != To::Qcow2 && rng.chance(25);
        let target_size = if larger { size + (1 << 20) } else { size };
        let start = rng.below(size);
        let range =
            (from != From::Pipe && rng.chance(20)).then(|| (start, rng.between(1, size - start)));
        let fault = match rng.pick(&[Fault::None, Fault::Flaky, Fault::Kill, Fault::Term]) {
            // QEMU's server may hold the image for a while yet.
            Fault::Kill if to == To::Qcow2 => Fault::Term,
            // What came from a pipe is not written a second time.
            Fault::Flaky if from == From::Pipe => Fault::None,
            fault => *fault,
        };
        let scratch = ScratchDir::new().unwrap();
        let told = format!("seed {seed}: {from:?} to {to:?}, {fault:?}, {size} bytes");
        Case {
            peers,
            scratch,
            from,
            to,
            size,
            target_size,
            range,
            resumable: from != From::Pipe && rng.chance(60),
            fault,
            told,
            rng,
        }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.scratch.file(name)
    }

    /// The source as words of the command line, and what serves it.
    fn source(&mut self) -> (Vec<String>, Option<PeerServer>) {
        let file = self.file("source");
        image::sparse(&file, self.size, self.rng.number()).unwrap();
        let path = text(&file).to_string();
        let one = ["-r", "--layer", "multi-conn?mode=disable", &path];
        let server = match self.from {
            From::File => return (vec![path], None),
            From::Pipe => return (vec!["-".into()], None),
            From::Server => serve(&self.scratch, "s", &["-r", &path]),
            From::OneConnection => serve(&self.scratch, "s", &one),
            From::Nbdkit => {
                let args = ["-r", "file", &path];
                PeerServer::nbdkit(&self.peers.nbdkit, &self.scratch.socket("s"), &args).unwrap()
            }
            From::Qcow2 => {
                let packed = self.file("packed");
                let args = ["convert", "-c", "-f", "raw", "-O", "qcow2", &path, text(&packed)];
                done(self.peers.qemu_img.command().args(args));
                let words = ["[", "qemu-nbd", "-r", "-f", "qcow2", text(&packed), "]"];
                return (words.map(str::to_string).to_vec(), None);
            }
        };
        (vec![server.uri("")], Some(server))
    }

    /// The target likewise.
    fn target(&mut self) -> (Vec<String>, Option<PeerServer>) {
        let file = self.file("target");
        let path = text(&file).to_string();
        let socket = self.scratch.socket("t");
        match self.to {
            To::Absent => {}
            To::Behind => garbage(&file, self.target_size + 8192).unwrap(),
            To::Qcow2 => {
                let args = ["create", "-q", "-f", "qcow2", &path, &self.size.to_string()];
                done(self.peers.qemu_img.command().args(args));
            }
            _ => garbage(&file, self.target_size).unwrap(),
        }
        let file_is = format!("file={path}");
        let server = match self.to {
            To::Absent | To::Kept | To::Behind => return (vec![path], None),
            To::Qcow2 => {
                let words = ["[", "qemu-nbd", "-f", "qcow2", &path, "]"];
                return (words.map(str::to_string).to_vec(), None);
            }
            To::Server => serve(&self.scratch, "t", &[&path]),
            To::OneConnection => {
                let layers = ["--layer", "multi-conn?mode=disable", "--layer", "nozero"];
                serve(&self.scratch, "t", &[&layers[..], &[&path]].concat())
            }
            To::Blocks => {
                let sizes = ["blocksize-minimum=4096", "blocksize-maximum=131072"];
                let policy = ["--filter=blocksize-policy", "file", &file_is];
                let args = [&policy[..], &sizes, &["blocksize-error-policy=error"]].concat();
                PeerServer::nbdkit(&self.peers.nbdkit, &socket, &args).unwrap()
            }
            To::QemuRaw => {
                let args = ["-t", "-f", "raw", "-e", "8", "--discard=unmap", &path];
                PeerServer::qemu_nbd(&self.peers.qemu_nbd, &socket, &args).unwrap()
            }
        };
        (vec![server.uri("")], Some(server))
    }

    /// Options that may differ when a copy is continued.
    fn varying(&mut self) -> Vec<String> {
        let mut options = Vec::new();
        for (name, values) in [
            ("-C", &["1", "2", "7"][..]),
            ("-R", &["1", "3", "64"]),
            ("--request-size", &["4k", "64k", "1M", "8M"]),
            ("--queue-size", &["4k", "1M"]),
            ("-S", &["0", "512", "4096", "64k"]),
            ("--direct", &["on", "off"]),
            ("--engine", &["threads"]),
            ("--multi-conn", &["always", "advertised"]),
        ] {
            if self.rng.chance(25) {
                options.extend([name.to_string(), self.rng.pick(values).to_string()]);
            }
        }
        let flags = ["--allocated", "--no-extents", "--flush", "--synchronous", "--no-zero-copy"];
        options.extend(flags.iter().filter(|_| self.rng.chance(12)).map(|flag| flag.to_string()));
        if self.from != From::Pipe && self.rng.chance(30) {
            options.push("--verify".into());
        }
        options
    }

    fn check(mut self) {
        let (from, _source) = self.source();
        let (to, target) = self.target();
        let mut fixed: Vec<String> = Vec::new();
        let mut add = |words: &[&str]| fixed.extend(words.iter().map(|word| word.to_string()));
        let journal = self.scratch.file("journal");
        if self.resumable {
            add(&["--journal", text(&journal), "--journal-interval", "5ms"]);
        }
        if self.to == To::Behind {
            add(&["--target-layer", "offset?offset=8192"]);
        }
        if let Some((at, len)) = self.range {
            add(&["--range", &format!("{at}:{len}")]);
        }
        match self.fault {
            Fault::None => {}
            Fault::Flaky => add(&[
                "--source-layer",
                "error?read=10%",
                "--target-layer",
                "error?write=10%&zero=10%&flush=5%",
                "--retries",
                "100",
                "--retry-delay",
                "1ms",
            ]),
            // It lasts for a while.
            Fault::Kill | Fault::Term => add(&["--source-layer", "rate?rate=20M"]),
        }
        let mut disturbed = matches!(self.fault, Fault::Kill | Fault::Term);
        for run in 0.. {
            let options = self.varying();
            let words = [&fixed[..], &options, &from, &to].concat();
            self.told += &format!("\nrun {run}: {}", words.join(" "));
            let status = self.run(&words, disturbed);
            if status == 0 {
                break;
            }
            assert!(disturbed, "{}", self.told);
            disturbed = run < 2;
        }
        assert!(!journal.exists(), "{}", self.told);
        if let Some(server) = target {
            server.stop().unwrap();
        }
        self.compare();
    }

    /// Runs a copy to its end, which it may be made to come to.
    fn run(&mut self, words: &[String], disturbed: bool) -> i32 {
        let words: Vec<&str> =
            [&["copy"][..], &words.iter().map(|word| &**word).collect::<Vec<_>>()].concat();
        let mut command = blockhaul(&words);
        if self.from == From::Pipe {
            let mut piped = Command::new("sh");
            piped.args(["-c", "exec \"$@\" < \"$0\""]).arg(self.file("source"));
            piped.arg(command.get_program()).args(command.get_args());
            piped.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
            command = piped;
        }
        if !disturbed {
            let output = bounded(&mut command, LIMIT);
            let said = lossy(&output.stderr);
            assert!(output.status.success(), "{}\n{said}", self.told);
            return 0;
        }
        let said = self.file("said");
        let mut child = command.stderr(File::create(&said).unwrap()).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(self.rng.between(5, 400)));
        let signal = if self.fault == Fault::Kill { "KILL" } else { "TERM" };
        let pid = child.id().to_string();
        // It may have ended.
        let mut kill = Command::new("sh");
        kill.args(["-c", "kill -s \"$0\" \"$1\"", signal, &pid]).stderr(Stdio::null());
        kill.status().unwrap();
        let status = wait_within(&mut child, LIMIT);
        let said = fs::read_to_string(said).unwrap();
        let status = status.unwrap_or_else(|| panic!("it hangs: {}\n{said}", self.told));
        match status.code() {
            Some(0) => return 0,
            Some(143) if self.fault == Fault::Term => assert!(said.contains("stopped"), "{said}"),
            // Before it has seen to signals.
            None => {}
            Some(_) => panic!("{status}: {}\n{said}", self.told),
        }
        1
    }

    fn compare(&self) {
        let file = self.file("target");
        let held = match self.to {
            To::Qcow2 => {
                let raw = self.file("raw");
                let args = ["convert", "-f", "qcow2", "-O", "raw", text(&file), text(&raw)];
                done(self.peers.qemu_img.command().args(args));
                raw
            }
            _ => file,
        };
        let held = fs::read(held).unwrap();
        let held = if self.to == To::Behind { &held[8192..] } else { &held };
        let source = fs::read(self.file("source")).unwrap();
        let (at, len) = self.range.unwrap_or((0, self.size));
        let (at, end) = (at as usize, (at + len) as usize);
        assert!(held[at..end] == source[at..end], "{}", self.told);
        // What else there is stays as it was.
        let rest = match (self.to, self.range) {
            (To::Absent | To::Qcow2, _) => 0,
            (To::Kept, None) => {
                return assert_eq!(held.len() as u64, self.size, "{}", self.told);
            }
            _ => GARBAGE,
        };
        let before = &held[..at];
        let behind = &held[end..];
        let stays = before.iter().chain(behind).all(|&byte| byte == rest);
        assert!(stays, "{}", self.told);
    }
}

#[test]
fn any_copy_is_the_same_bytes_or_says_why_not() {
    let nbdkit = require_peer!("nbdkit");
    let qemu_nbd = require_peer!("qemu-nbd");
    let peers = Peers { nbdkit, qemu_nbd, qemu_img: require_peer!("qemu-img") };
    let seed = rng::seed();
    println!("BLOCKHAUL_SEED={seed}");
    let count = if std::env::var_os("BLOCKHAUL_LONG").is_some() { 400 } else { 8 };
    for number in 0..count {
        Case::new(seed.wrapping_add(number), &peers).check();
    }
}
