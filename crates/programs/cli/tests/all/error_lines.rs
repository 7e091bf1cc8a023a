//! The error lines of the program and their exit statuses, which users read and scripts search.
//!
//! `error_lines/lines.txt` is a transcript: each command, what it writes to standard error, and its
//! exit status. The commands run in a directory that `error_lines/setup.sh` has filled, next to
//! servers, correct ones and ones with faults. `BLOCKHAUL_WRITE_LINES=1` writes the transcript again.

use std::fmt::Write as _;
use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use blockhaul_testkit::image::pattern;
use blockhaul_testkit::model::Model;
use blockhaul_testkit::peer::{HandshakeFault, Offer, ReplyFault, ReplyFaultKind, ScriptedServer};
use blockhaul_testkit::tools::{self, PeerServer, ScratchDir, text};
use blockhaul_wire::CommandCode as Op;

const OURS: &str = env!("CARGO_BIN_EXE_blockhaul");
const LIMIT: Duration = Duration::from_secs(120);
const LINES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/all/error_lines/lines.txt");
const SETUP: &str = include_str!("error_lines/setup.sh");
/// Certificates of which that of the server has expired.
const EXPIRED: [(&str, &str); 3] = [
    ("ca-cert.pem", include_str!("error_lines/expired/ca-cert.pem")),
    ("server-cert.pem", include_str!("error_lines/expired/server-cert.pem")),
    ("server-key.pem", include_str!("error_lines/expired/server-key.pem")),
];
/// Names under which the program is run, in `bin`.
const NAMES: [&str; 6] = ["blockhaul", "nbdcopy", "nbdinfo", "nbdkit", "qemu-img", "qemu-nbd"];
/// Commands that run at the same time; some wait for a time limit.
const AT_ONCE: usize = 6;

/// Commands, and the servers that they connect to.
struct Stage {
    scratch: ScratchDir,
    busy: TcpListener,
    _servers: Vec<PeerServer>,
    _peers: Vec<ScriptedServer>,
}

impl Stage {
    fn new() -> Stage {
        let scratch = ScratchDir::new().unwrap();
        let bin = scratch.file("bin");
        fs::create_dir(&bin).unwrap();
        for name in NAMES {
            symlink(OURS, bin.join(name)).unwrap();
        }
        fs::create_dir(scratch.file("expired")).unwrap();
        for (name, pem) in EXPIRED {
            fs::write(scratch.file("expired").join(name), pem).unwrap();
        }
        let busy = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut stage = Stage { scratch, busy, _servers: Vec::new(), _peers: Vec::new() };
        let made = tools::output(&mut stage.shell(SETUP), LIMIT).unwrap();
        assert!(made.status.success(), "{}", text(&made.stderr));
        stage._servers = stage.servers();
        stage._peers = stage.peers();
        stage
    }

    /// A shell command in the directory, with our programs before all others.
    fn shell(&self, command: &str) -> Command {
        let path = std::env::var("PATH").unwrap_or_default();
        let path = format!("{}:{path}", self.scratch.file("bin").display());
        let port = self.busy.local_addr().unwrap().port().to_string();
        let mut shell = Command::new("sh");
        shell.args(["-c", command]).current_dir(self.scratch.path());
        shell.env("PATH", path).env("LC_ALL", "C").env("PORT", port);
        shell.env("BLOCKHAUL_PLUGIN_PATH", self.scratch.file("folder"));
        shell.env("TMPDIR", self.scratch.path());
        shell
    }

    fn servers(&self) -> Vec<PeerServer> {
        let tls = ["--tls=require", "--tls-certificates=pki"];
        [
            ("plain", vec!["--control=control", "memory:1M"]),
            ("readonly", vec!["--readonly", "memory:1M"]),
            ("tls", [&tls[..], &["sample:1M"]].concat()),
            ("verify", [&tls[..], &["--tls-verify-peer", "sample:1M"]].concat()),
            ("expired.sock", vec!["--tls=require", "--tls-certificates=expired", "sample:1M"]),
            ("psk", vec!["--tls=require", "--tls-psk=keys.psk", "sample:1M"]),
        ]
        .map(|(name, args)| {
            let mut command = Command::new(OURS);
            command.current_dir(self.scratch.path());
            command.args(["serve", "--foreground", "--exit-with-parent", "--unix", name]);
            command.args(args);
            PeerServer::start(command, &self.scratch.socket(name)).unwrap()
        })
        .into()
    }

    fn peers(&self) -> Vec<ScriptedServer> {
        let refuses = |code: u32| HandshakeFault::Refuse((1 << 31) + code, "not today".into());
        let handshakes = [
            ("silent", HandshakeFault::Silent),
            ("closes", HandshakeFault::CloseAtOnce),
            ("other-protocol", HandshakeFault::NotNbd),
            ("half", HandshakeFault::HalfGreeting),
            ("wrong-reply", HandshakeFault::WrongReplyMagic),
            ("no-size", HandshakeFault::NoExportInfo),
            ("huge", HandshakeFault::Size(u64::MAX)),
            ("refuses-unsupported", refuses(1)),
            ("refuses-policy", refuses(2)),
            ("refuses-platform", refuses(4)),
            ("refuses-tls", refuses(5)),
            ("refuses-shutdown", refuses(7)),
            ("refuses-block-size", refuses(8)),
        ];
        let replies = [
            ("drops", ReplyFaultKind::Close),
            ("hangs", ReplyFaultKind::Hang),
            ("garbage", ReplyFaultKind::Garbage),
            ("fails", ReplyFaultKind::Error(5)),
            ("fails-with-text", ReplyFaultKind::ErrorAt(5, 0, "the disk is broken".into())),
            ("full", ReplyFaultKind::Error(28)),
            ("no-memory", ReplyFaultKind::Error(12)),
            ("not-permitted", ReplyFaultKind::Error(1)),
            ("shuts-down", ReplyFaultKind::Error(108)),
        ];
        let offer = || Offer::new(Model::new(4096).with_content(pattern(4096)));
        let started = |name: &str, offer| {
            let peer = ScriptedServer::offer(offer);
            symlink(peer.path(), self.scratch.file(name)).unwrap();
            peer
        };
        let mut peers = Vec::new();
        for (name, fault) in handshakes {
            peers.push(started(name, offer().handshake(fault)));
        }
        for (name, how) in replies {
            let spoil = |op| ReplyFault::from(op, 1, how.clone());
            peers.push(started(name, offer().spoil(spoil(Op::Read)).spoil(spoil(Op::Write))));
        }
        let fails = ReplyFault::from(Op::BlockStatus, 1, ReplyFaultKind::Error(5));
        peers.push(started("no-extents", offer().spoil(fails)));
        let second = ReplyFault::from(Op::Read, 2, ReplyFaultKind::Error(5));
        peers.push(started("fails-later", offer().spoil(second)));
        peers
    }

    /// What a command writes to standard error, apart from the log, and its exit status.
    fn lines(&self, command: &str) -> String {
        let output = tools::output(&mut self.shell(command), LIMIT).unwrap();
        let port = format!("port {}", self.busy.local_addr().unwrap().port());
        let said = text(&output.stderr)
            .replace(&*self.scratch.path().to_string_lossy(), "DIR")
            .replace(&port, "port PORT");
        let mut lines = String::new();
        // Python's traces differ from version to version.
        for line in said.lines().filter(|line| !line.starts_with("blockhaul: error: ")) {
            writeln!(lines, "{}", line.trim_end()).unwrap();
        }
        writeln!(lines, "exit {}", output.status.code().unwrap()).unwrap();
        lines
    }
}

/// The commands of a transcript, with the comments before each.
fn commands(transcript: &str) -> Vec<(String, &str)> {
    let mut comments = String::new();
    let mut commands = Vec::new();
    for line in transcript.lines() {
        if let Some(command) = line.strip_prefix("$ ") {
            commands.push((std::mem::take(&mut comments), command));
        } else if line.starts_with('#') {
            writeln!(comments, "{line}").unwrap();
        }
    }
    commands
}

#[test]
fn error_lines_and_exit_statuses_are_as_recorded() {
    let recorded = fs::read_to_string(LINES).unwrap();
    let commands = commands(&recorded);
    assert!(commands.len() >= 120, "{} commands", commands.len());
    let stage = Stage::new();
    let next = AtomicUsize::new(0);
    let found = Mutex::new(vec![String::new(); commands.len()]);
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some((_, command)) = commands.get(index) else { return };
                    let lines = stage.lines(command);
                    found.lock().unwrap()[index] = lines;
                }
            });
        }
    });
    let found = found.into_inner().unwrap();
    let mut transcript = String::new();
    let mut differences = String::new();
    for ((comments, command), lines) in commands.iter().zip(&found) {
        let entry = format!("$ {command}\n{lines}");
        if !recorded.contains(&format!("{entry}\n")) {
            writeln!(differences, "{entry}").unwrap();
        }
        writeln!(transcript, "{comments}{entry}").unwrap();
    }
    if std::env::var_os("BLOCKHAUL_WRITE_LINES").is_some() {
        fs::write(LINES, transcript).unwrap();
        return;
    }
    assert!(
        transcript == recorded,
        "{} is out of step with what the program writes: BLOCKHAUL_WRITE_LINES=1 writes it again\n\
         {differences}",
        Path::new(LINES).display()
    );
}
