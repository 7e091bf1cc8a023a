//! Several connections where the servers allow them, one where they do not: servers that give every
//! connection a disk of its own, refuse a second one, never answer it, or say something else on it,
//! as source and as target. The copy is right in any case, and says why it has fewer connections.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use blockhaul_testkit::model::Model;
use blockhaul_testkit::peer::{self, HandshakeFault, Offer, ScriptedServer};
use blockhaul_testkit::require_peer;
use blockhaul_testkit::rng::Rng;
use blockhaul_testkit::tools::{
    PeerProgram, PeerServer, ScratchDir, until, until_some, wait_within,
};
use blockhaul_tests::{
    LIMIT, assert_same, blockhaul, bounded, lossy, serve, succeed, text, with_port,
};
use serde_json::Value;

const SIZE: u64 = 12 << 20;
/// Many requests, so that further connections can have a part in the work.
const SMALL: [&str; 5] = ["-v", "-R", "2", "--request-size=128k", "--segment=512k"];
/// What each of them takes at the end that is not looked at, until the copy has shown what it does about
/// further connections: a lane alone would need 12 seconds.
const PACE: Duration = Duration::from_millis(250);

/// What a copy did.
struct Copied {
    lanes: usize,
    warnings: Vec<String>,
}

/// Copies until it has found out whether further connections are of use.
#[track_caller]
fn copy(options: &[&str], source: &str, target: &str) -> Copied {
    copy_until(options, source, target, || false)
}

/// Copies between a server and a file, which is served slowly until several connections are at work,
/// or a warning says why not, or this says that all has happened that will.
#[track_caller]
fn copy_until(options: &[&str], source: &str, target: &str, happened: impl Fn() -> bool) -> Copied {
    let scratch = ScratchDir::new().unwrap();
    let control = scratch.socket("c");
    let said = scratch.file("said");
    let slow = |kind| format!("delay?{kind}={}ms", PACE.as_millis());
    let serve_file =
        |words: &[&str]| serve(&scratch, "slow", &[&["--control", text(&control)], words].concat());
    let (gate, kind, ends) = if source.starts_with("nbd") {
        File::create(target).unwrap().set_len(SIZE).unwrap();
        let gate = serve_file(&["--layer", &slow("write"), target]);
        let ends = [source.to_owned(), gate.uri("")];
        (gate, "write", ends)
    } else {
        let gate = serve_file(&["-r", "--layer", &slow("read"), source]);
        let ends = [gate.uri(""), target.to_owned()];
        (gate, "read", ends)
    };
    let args = [&["copy"], &SMALL[..], options, &["--", &ends[0], &ends[1]]].concat();
    let mut command = blockhaul(&args);
    let mut child = command.stderr(File::create(&said).unwrap()).spawn().unwrap();
    let told = || fs::read_to_string(&said).unwrap();
    until("several connections or a warning", || {
        child.try_wait().unwrap().is_some()
            || told().contains("warning: ")
            || happened()
            || at_work(&control) > 1
    });
    succeed(&["ctl", text(&control), "set", "", "delay", &format!("{kind}=0")]);
    let status = wait_within(&mut child, LIMIT);
    let said = told();
    assert!(status.is_some_and(|status| status.success()), "{status:?}: {said}");
    drop(gate);
    let last = said.lines().last().unwrap();
    let words: Vec<&str> = last.split([' ', ',']).filter(|word| !word.is_empty()).collect();
    let place = words.iter().position(|word| word.starts_with("connection")).unwrap();
    let warnings = said.lines().filter(|line| line.contains("warning: "));
    Copied {
        lanes: words[place - 1].parse().unwrap(),
        warnings: warnings.map(str::to_owned).collect(),
    }
}

/// Clients of a server with requests in flight.
fn at_work(control: &Path) -> usize {
    let mut stream = UnixStream::connect(control).unwrap();
    stream.write_all(b"{\"command\":\"clients\"}\n").unwrap();
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).unwrap();
    let told: Value = serde_json::from_str(&line).unwrap();
    let clients = told["clients"].as_array().unwrap();
    clients.iter().filter(|client| client["in_flight"].as_u64() > Some(0)).count()
}

impl Copied {
    #[track_caller]
    fn used_several(&self) {
        assert!(self.lanes > 1, "{} lanes, {:?}", self.lanes, self.warnings);
        assert!(self.warnings.is_empty(), "{:?}", self.warnings);
    }

    /// One connection was used, and one line says why.
    #[track_caller]
    fn used_one(&self, why: &str) {
        assert_eq!(self.lanes, 1, "{:?}", self.warnings);
        assert_eq!(self.warnings.len(), 1, "{:?}", self.warnings);
        let warning = &self.warnings[0];
        assert!(
            warning.contains("continuing with fewer connections") && warning.contains(why),
            "{warning}"
        );
    }
}

fn content(seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; SIZE as usize];
    Rng::new(seed).fill(&mut bytes);
    bytes
}

/// An image without holes.
fn image(scratch: &ScratchDir) -> PathBuf {
    let path = scratch.file("image");
    fs::write(&path, content(1)).unwrap();
    path
}

fn empty(scratch: &ScratchDir, name: &str) -> PathBuf {
    let path = scratch.file(name);
    File::create(&path).unwrap().set_len(SIZE).unwrap();
    path
}

/// nbdkit's tmpdisk, which has a script make a disk for each connection. The script finds the scratch
/// directory in `$base`.
fn tmpdisk(nbdkit: &PeerProgram, scratch: &ScratchDir, script: &str) -> PeerServer {
    let socket = scratch.socket("tmpdisk");
    let mut command = nbdkit.tied_command();
    command.env("TMPDIR", scratch.path());
    command.args(["--foreground", "--unix"]).arg(&socket).arg("tmpdisk");
    command.arg(format!("size={SIZE}")).arg(format!("base={}", text(scratch.path())));
    command.arg(format!("command={script}"));
    PeerServer::start(command, &socket).unwrap()
}

#[test]
fn a_source_with_a_disk_for_each_connection() {
    let nbdkit = require_peer!("nbdkit");
    let scratch = ScratchDir::new().unwrap();
    let image = image(&scratch);
    let target = scratch.file("target");
    let script = "if mkdir \"$base/one\"; then cp \"$base/image\" \"$disk\"; \
                  else head -c \"$size\" /dev/urandom > \"$disk\"; fi";
    let from = tmpdisk(&nbdkit, &scratch, script);
    copy(&[], &from.uri(""), text(&target)).used_one("serves a different disk on each connection");
    assert_same(&image, &target, "from tmpdisk");
}

#[test]
fn a_target_with_a_disk_for_each_connection() {
    let nbdkit = require_peer!("nbdkit");
    let scratch = ScratchDir::new().unwrap();
    let image = image(&scratch);
    let script = "truncate -s \"$size\" \"$disk\"; \
                  if mkdir \"$base/one\"; then ln \"$disk\" \"$base/kept\"; fi";
    let to = tmpdisk(&nbdkit, &scratch, script);
    let copied = copy(&["--flush"], text(&image), &to.uri(""));
    copied.used_one("serves a different disk on each connection");
    assert_same(&image, &scratch.file("kept"), "to tmpdisk");
}

/// nbd-server, which goes to the background; it ends with this.
struct NbdServer {
    uri: String,
    pid: PathBuf,
    _scratch: ScratchDir,
}

impl NbdServer {
    /// Serves a file; `options` are lines of its export's section.
    fn start(nbd_server: &PeerProgram, file: &Path, options: &str) -> NbdServer {
        let scratch = ScratchDir::new().unwrap();
        let socket = scratch.socket("nbd-server");
        let pid = scratch.file("pid");
        let config = scratch.file("config");
        // It always listens on TCP, too.
        with_port(|port| {
            let lines = format!(
                "[generic]\nunixsock = {}\nlistenaddr = 127.0.0.1\nport = {port}\n\
                 [disk]\nexportname = {}\n{options}\n",
                text(&socket),
                text(file)
            );
            fs::write(&config, lines).unwrap();
            let mut command = nbd_server.command();
            command.arg("-C").arg(&config).arg("-p").arg(&pid);
            let output = bounded(&mut command, LIMIT);
            output.status.success().then_some(()).ok_or_else(|| lossy(&output.stderr))
        });
        // Waits as a client does: the process that was started has ended.
        let mut client = until_some("nbd-server listens", || UnixStream::connect(&socket).ok());
        // It makes numbers for TLS before it takes clients, which takes seconds, and longer than a client
        // waits on a busy machine.
        client.set_read_timeout(Some(LIMIT)).unwrap();
        client.read_exact(&mut [0; 8]).expect("nbd-server greets");
        NbdServer {
            uri: format!("nbd+unix:///disk?socket={}", text(&socket)),
            pid,
            _scratch: scratch,
        }
    }
}

impl Drop for NbdServer {
    fn drop(&mut self) {
        if let Ok(pid) = fs::read_to_string(&self.pid) {
            let _ = Command::new("kill").arg(pid.trim()).status();
        }
    }
}

#[test]
fn nbd_server_with_one_disk_and_with_copies_on_write() {
    let nbd_server = require_peer!("nbd-server");
    let scratch = ScratchDir::new().unwrap();
    let image = image(&scratch);
    let disk = empty(&scratch, "disk");
    let target = scratch.file("target");
    for options in ["copyonwrite = false", "copyonwrite = true"] {
        let from = NbdServer::start(&nbd_server, &image, options);
        // What is only read is the same on all connections.
        copy(&[], &from.uri, text(&target)).used_several();
        assert_same(&image, &target, options);
    }
    let to = NbdServer::start(&nbd_server, &disk, "copyonwrite = true");
    // What it keeps of this is gone with the connection.
    let copied = copy(&["--flush"], text(&image), &to.uri);
    copied.used_one("serves a different disk on each connection");
    drop(to);
    let to = NbdServer::start(&nbd_server, &disk, "copyonwrite = false");
    copy(&["--flush"], text(&image), &to.uri).used_several();
    assert_same(&image, &disk, "to nbd-server");
}

#[test]
fn servers_that_refuse_a_second_connection() {
    let nbdkit = require_peer!("nbdkit");
    let scratch = ScratchDir::new().unwrap();
    let image = image(&scratch);
    let target = scratch.file("target");
    let from_dir = scratch.file("from");
    let to_dir = scratch.file("to");
    for dir in [&from_dir, &to_dir] {
        fs::create_dir(dir).unwrap();
    }
    fs::copy(&image, from_dir.join("default")).unwrap();
    let ondemand = |name: &str, dir: &Path| {
        let dir = format!("dir={}", text(dir));
        let size = format!("size={SIZE}");
        let args = ["ondemand", &dir, &size, "command=truncate -s \"$size\" \"$disk\""];
        PeerServer::nbdkit(&nbdkit, &scratch.socket(name), &args).unwrap()
    };
    let from = ondemand("f", &from_dir);
    copy(&[], &from.uri(""), text(&target)).used_one("cannot open an export");
    assert_same(&image, &target, "from ondemand");
    let to = ondemand("t", &to_dir);
    copy(&["--flush"], text(&image), &to.uri("")).used_one("cannot open an export");
    assert_same(&image, &to_dir.join("default"), "to ondemand");
}

/// qemu-nbd without `-e` takes one client at a time, and does not answer the next. The copy does
/// not wait for the further connection: it ends while that is still being made.
#[test]
fn qemu_nbd_for_one_client() {
    let qemu_nbd = require_peer!("qemu-nbd");
    let scratch = ScratchDir::new().unwrap();
    let image = image(&scratch);
    let target = scratch.file("target");
    let disk = empty(&scratch, "disk");
    let served = |name: &str, file: &Path| {
        let args = ["-f", "raw", text(file)];
        PeerServer::qemu_nbd(&qemu_nbd, &scratch.socket(name), &args).unwrap()
    };
    let from = served("f", &image);
    let copied = copy_until(&[], &from.uri(""), text(&target), || dialled_twice(&from));
    assert_eq!(copied.lanes, 1);
    assert_same(&image, &target, "from qemu-nbd");
    let to = served("t", &disk);
    let copied = copy_until(&["--flush"], text(&image), &to.uri(""), || dialled_twice(&to));
    assert_eq!(copied.lanes, 1);
    assert_same(&image, &disk, "to qemu-nbd");
}

/// Whether a server has a second connection, accepted or not: then the socket's name is in the table
/// for the listener and for each of them.
fn dialled_twice(server: &PeerServer) -> bool {
    let table = fs::read_to_string("/proc/net/unix").unwrap();
    table.lines().filter(|line| line.ends_with(text(server.socket()))).count() > 2
}

/// A server whose first connection is as it should be, and whose further ones have a fault.
fn second_has(fault: HandshakeFault, content: Vec<u8>) -> (ScriptedServer, Arc<Offer>) {
    let first = Offer::new(Model::new(SIZE).with_content(content));
    let mut second = Offer::new(Model::new(SIZE)).handshake(fault);
    second.model = first.model.clone();
    let first = Arc::new(first);
    let offer = first.clone();
    let script = move |talk: &mut peer::Conversation, number| {
        // What becomes of clients that give up on a connection is not the point.
        let _ = peer::serve(talk, number, if number == 0 { &offer } else { &second });
        Ok(())
    };
    (ScriptedServer::start(script), first)
}

#[test]
fn second_connections_with_a_fault() {
    let scratch = ScratchDir::new().unwrap();
    let image = image(&scratch);
    let target = scratch.file("target");
    let cases = [
        (HandshakeFault::CloseAtOnce, Some("cannot connect")),
        (HandshakeFault::Refuse(1 << 31 | 2, "one is enough".into()), Some("one is enough")),
        (HandshakeFault::Size(SIZE / 2), Some("on another")),
        // The copy ends before the timeout.
        (HandshakeFault::Silent, None),
        (HandshakeFault::StopAtOption(2), None),
    ];
    for (fault, why) in cases {
        let what = format!("{fault:?}");
        let check = |copied: Copied| match why {
            Some(why) => copied.used_one(why),
            None => assert_eq!(copied.lanes, 1, "{what}"),
        };
        // Where nothing is said about it, the second connection is all that can be waited for.
        let dialled = |server: &ScriptedServer| why.is_none() && server.connections() > 1;
        let (from, _) = second_has(fault.clone(), content(1));
        check(copy_until(&[], &from.uri(), text(&target), || dialled(&from)));
        assert!(from.connections() > 1, "{what}: no second connection was tried");
        assert_same(&image, &target, &what);
        let (to, offer) = second_has(fault, vec![0xA5; SIZE as usize]);
        check(copy_until(&["--flush"], text(&image), &to.uri(), || dialled(&to)));
        assert!(to.connections() > 1, "{what}: no second connection was tried");
        assert!(offer.model.lock().unwrap().bytes() == content(1), "{what}: as a target");
    }
}

/// A memory disk that does not promise multi-conn, with a log of what it is asked.
fn without_promise(
    nbdkit: &PeerProgram,
    scratch: &ScratchDir,
    name: &str,
) -> (PeerServer, PathBuf) {
    let log = scratch.file(&format!("{name}.log"));
    let logfile = format!("logfile={}", text(&log));
    let size = SIZE.to_string();
    let filters = ["--filter=log", "--filter=multi-conn"];
    let args = [&filters[..], &["memory", &size, &logfile, "multi-conn-mode=disable"]].concat();
    (PeerServer::nbdkit(nbdkit, &scratch.socket(name), &args).unwrap(), log)
}

#[test]
fn multi_conn_is_a_choice() {
    let nbdkit = require_peer!("nbdkit");
    let scratch = ScratchDir::new().unwrap();
    let image = image(&scratch);
    let cases = [("auto", true, true), ("always", true, false), ("advertised", false, false)];
    for (choice, several, examined) in cases {
        let (to, log) = without_promise(&nbdkit, &scratch, choice);
        let copied = copy(&["--multi-conn", choice, "--flush"], text(&image), &to.uri(""));
        if several {
            copied.used_several();
        } else {
            copied.used_one("does not report multi-conn");
        }
        let back = scratch.file("back");
        copy(&["--multi-conn", choice], &to.uri(""), text(&back));
        assert_same(&image, &back, choice);
        to.stop().unwrap();
        let log = fs::read_to_string(log).unwrap();
        // Of the copy that wrote: the one that reads begins after the last write.
        let end = log.rfind(" Write ").unwrap();
        assert_eq!(log[..end].contains(" Read "), examined, "{choice}");
    }
    // If it is promised, there is no check.
    let ours = serve(&scratch, "ours", &["memory:12M"]);
    for choice in ["auto", "always", "advertised"] {
        copy(&["--multi-conn", choice], text(&image), &ours.uri("")).used_several();
    }
}

/// Every connection that wrote is flushed, once all of its writes have been answered.
#[test]
fn every_connection_that_wrote_is_flushed_after_its_replies() {
    let nbdkit = require_peer!("nbdkit");
    let scratch = ScratchDir::new().unwrap();
    let image = image(&scratch);
    let (to, log) = without_promise(&nbdkit, &scratch, "t");
    copy(&["--flush"], text(&image), &to.uri("")).used_several();
    to.stop().unwrap();
    let log = fs::read_to_string(log).unwrap();
    // By connection: lines of the last answer to a write, and of the last flush that was asked for.
    let mut last: BTreeMap<&str, (usize, usize)> = BTreeMap::new();
    for (number, line) in log.lines().enumerate() {
        let words: Vec<&str> = line.split(' ').collect();
        let Some(connection) = words.iter().find(|word| word.starts_with("connection=")) else {
            continue;
        };
        let entry = last.entry(connection).or_default();
        if words.contains(&"...Write") {
            entry.0 = number;
        }
        if words.contains(&"Flush") {
            entry.1 = number;
        }
    }
    last.retain(|_, (written, _)| *written > 0);
    assert!(last.len() > 1, "{last:?}");
    for (connection, (written, flushed)) in &last {
        assert!(flushed > written, "{connection}: {log}");
    }
}

#[test]
fn a_target_is_not_read_where_its_promise_is_enough() {
    let nbdkit = require_peer!("nbdkit");
    let scratch = ScratchDir::new().unwrap();
    let image = image(&scratch);
    let log = scratch.file("log");
    let logfile = format!("logfile={}", text(&log));
    let size = SIZE.to_string();
    let args = ["--filter=log", "memory", &size, &logfile];
    let to = PeerServer::nbdkit(&nbdkit, &scratch.socket("t"), &args).unwrap();
    copy(&["--flush"], text(&image), &to.uri("")).used_several();
    to.stop().unwrap();
    assert!(!fs::read_to_string(log).unwrap().contains(" Read "), "the target was read");
}
