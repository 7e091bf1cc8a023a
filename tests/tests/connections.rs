//! Several connections where the servers allow them, one where they do not: servers that give every
//! connection a disk of its own, refuse a second one, never answer it, or say something else on it,
//! as source and as target. The copy is right in any case, and says why it has fewer connections.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use blockhaul_tests::{LIMIT, assert_same, blockhaul, bounded, lossy, serve, text, with_port};
use testkit::model::Model;
use testkit::peer::{self, HandshakeFault, Offer, Scripted};
use testkit::require_peer;
use testkit::rng::Rng;
use testkit::tools::{Peer, Scratch, Server};

const SIZE: u64 = 12 << 20;
/// So slow that further connections have time to be made, and to have a part in the work.
const PACE: [&str; 6] =
    ["-v", "-R", "2", "--request-size=128k", "--segment=512k", "--source-layer"];
const DELAY: &str = "delay?read=15ms";

/// What a copy did.
struct Copied {
    lanes: usize,
    warnings: Vec<String>,
}

#[track_caller]
fn copy(options: &[&str], source: &str, target: &str) -> Copied {
    let args = [&["copy"], &PACE[..], &[DELAY], options, &["--", source, target]].concat();
    let output = bounded(&mut blockhaul(&args), LIMIT);
    let said = lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let last = said.lines().last().unwrap();
    let words: Vec<&str> = last.split([' ', ',']).filter(|word| !word.is_empty()).collect();
    let place = words.iter().position(|word| *word == "lanes").unwrap();
    let warnings = said.lines().filter(|line| line.contains("warning: "));
    Copied {
        lanes: words[place - 1].parse().unwrap(),
        warnings: warnings.map(str::to_owned).collect(),
    }
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
            warning.contains("going on with fewer connections") && warning.contains(why),
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
fn image(scratch: &Scratch) -> PathBuf {
    let path = scratch.file("image");
    fs::write(&path, content(1)).unwrap();
    path
}

fn empty(scratch: &Scratch, name: &str) -> PathBuf {
    let path = scratch.file(name);
    File::create(&path).unwrap().set_len(SIZE).unwrap();
    path
}

/// nbdkit's tmpdisk, which has a script make a disk for each connection. The script finds the scratch
/// directory in `$base`.
fn tmpdisk(nbdkit: &Peer, scratch: &Scratch, script: &str) -> Server {
    let socket = scratch.socket("tmpdisk");
    let mut command = nbdkit.tied_command();
    command.env("TMPDIR", scratch.path());
    command.args(["--foreground", "--unix"]).arg(&socket).arg("tmpdisk");
    command.arg(format!("size={SIZE}")).arg(format!("base={}", text(scratch.path())));
    command.arg(format!("command={script}"));
    Server::start(command, &socket).unwrap()
}

#[test]
fn a_source_with_a_disk_for_each_connection() {
    let nbdkit = require_peer!("nbdkit");
    let scratch = Scratch::new().unwrap();
    let (image, target) = (image(&scratch), scratch.file("target"));
    let script = "if mkdir \"$base/one\"; then cp \"$base/image\" \"$disk\"; \
                  else head -c \"$size\" /dev/urandom > \"$disk\"; fi";
    let from = tmpdisk(&nbdkit, &scratch, script);
    copy(&[], &from.uri(""), text(&target)).used_one("shows each connection a disk of its own");
    assert_same(&image, &target, "from tmpdisk");
}

#[test]
fn a_target_with_a_disk_for_each_connection() {
    let nbdkit = require_peer!("nbdkit");
    let scratch = Scratch::new().unwrap();
    let image = image(&scratch);
    let script = "truncate -s \"$size\" \"$disk\"; \
                  if mkdir \"$base/one\"; then ln \"$disk\" \"$base/kept\"; fi";
    let to = tmpdisk(&nbdkit, &scratch, script);
    let copied = copy(&["--flush"], text(&image), &to.uri(""));
    copied.used_one("shows each connection a disk of its own");
    assert_same(&image, &scratch.file("kept"), "to tmpdisk");
}

/// nbd-server, which goes to the background; it ends with this.
struct NbdServer {
    uri: String,
    pid: PathBuf,
    _scratch: Scratch,
}

impl NbdServer {
    /// Serves a file; `options` are lines of its export's section.
    fn start(nbd_server: &Peer, file: &Path, options: &str) -> NbdServer {
        let scratch = Scratch::new().unwrap();
        let (socket, pid) = (scratch.socket("nbd-server"), scratch.file("pid"));
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
        let begun = std::time::Instant::now();
        while std::os::unix::net::UnixStream::connect(&socket).is_err() {
            assert!(begun.elapsed() < LIMIT, "nbd-server does not listen");
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
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
    let scratch = Scratch::new().unwrap();
    let (image, disk, target) = (image(&scratch), empty(&scratch, "disk"), scratch.file("target"));
    for options in ["copyonwrite = false", "copyonwrite = true"] {
        let from = NbdServer::start(&nbd_server, &image, options);
        // What is only read is the same on all connections.
        copy(&[], &from.uri, text(&target)).used_several();
        assert_same(&image, &target, options);
    }
    let to = NbdServer::start(&nbd_server, &disk, "copyonwrite = true");
    // What it keeps of this is gone with the connection.
    let copied = copy(&["--flush"], text(&image), &to.uri);
    copied.used_one("shows each connection a disk of its own");
    drop(to);
    let to = NbdServer::start(&nbd_server, &disk, "copyonwrite = false");
    copy(&["--flush"], text(&image), &to.uri).used_several();
    assert_same(&image, &disk, "to nbd-server");
}

#[test]
fn servers_that_refuse_a_second_connection() {
    let nbdkit = require_peer!("nbdkit");
    let scratch = Scratch::new().unwrap();
    let (image, target) = (image(&scratch), scratch.file("target"));
    let (from_dir, to_dir) = (scratch.file("from"), scratch.file("to"));
    for dir in [&from_dir, &to_dir] {
        fs::create_dir(dir).unwrap();
    }
    fs::copy(&image, from_dir.join("default")).unwrap();
    let ondemand = |name: &str, dir: &Path| {
        let (dir, size) = (format!("dir={}", text(dir)), format!("size={SIZE}"));
        let args = ["ondemand", &dir, &size, "command=truncate -s \"$size\" \"$disk\""];
        Server::nbdkit(&nbdkit, &scratch.socket(name), &args).unwrap()
    };
    let from = ondemand("f", &from_dir);
    copy(&[], &from.uri(""), text(&target)).used_one("cannot connect");
    assert_same(&image, &target, "from ondemand");
    let to = ondemand("t", &to_dir);
    copy(&["--flush"], text(&image), &to.uri("")).used_one("cannot connect");
    assert_same(&image, &to_dir.join("default"), "to ondemand");
}

/// qemu-nbd without `-e` takes one client at a time, and does not answer the next. That nobody waits
/// for it is seen by the copy's end; the copy is over before it would be told.
#[test]
fn qemu_nbd_for_one_client() {
    let qemu_nbd = require_peer!("qemu-nbd");
    let scratch = Scratch::new().unwrap();
    let (image, target) = (image(&scratch), scratch.file("target"));
    let disk = empty(&scratch, "disk");
    let served = |name: &str, file: &Path| {
        let args = ["-f", "raw", text(file)];
        Server::qemu_nbd(&qemu_nbd, &scratch.socket(name), &args).unwrap()
    };
    let from = served("f", &image);
    assert_eq!(copy(&[], &from.uri(""), text(&target)).lanes, 1);
    assert_same(&image, &target, "from qemu-nbd");
    let to = served("t", &disk);
    assert_eq!(copy(&["--flush"], text(&image), &to.uri("")).lanes, 1);
    assert_same(&image, &disk, "to qemu-nbd");
}

/// A server whose first connection is as it should be, and whose further ones have a fault.
fn second_has(fault: HandshakeFault, content: Vec<u8>) -> (Scripted, Arc<Offer>) {
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
    (Scripted::start(script), first)
}

#[test]
fn second_connections_with_a_fault() {
    let scratch = Scratch::new().unwrap();
    let (image, target) = (image(&scratch), scratch.file("target"));
    let cases = [
        (HandshakeFault::CloseAtOnce, Some("cannot connect")),
        (HandshakeFault::Refuse(1 << 31 | 2, "one is enough".into()), Some("one is enough")),
        (HandshakeFault::Size(SIZE / 2), Some("on another")),
        // The copy is over before somebody tires of it.
        (HandshakeFault::Silent, None),
        (HandshakeFault::StopAtOption(2), None),
    ];
    for (fault, why) in cases {
        let what = format!("{fault:?}");
        let check = |copied: Copied| match why {
            Some(why) => copied.used_one(why),
            None => assert_eq!(copied.lanes, 1, "{what}"),
        };
        let (from, _) = second_has(fault.clone(), content(1));
        check(copy(&[], &from.uri(), text(&target)));
        assert!(from.connections() > 1, "{what}: no second connection was tried");
        assert_same(&image, &target, &what);
        let (to, offer) = second_has(fault, vec![0xA5; SIZE as usize]);
        check(copy(&["--flush"], text(&image), &to.uri()));
        assert!(to.connections() > 1, "{what}: no second connection was tried");
        assert!(offer.model.lock().unwrap().bytes() == content(1), "{what}: as a target");
    }
}

/// A memory disk that does not promise multi-conn, with a log of what it is asked.
fn without_promise(nbdkit: &Peer, scratch: &Scratch, name: &str) -> (Server, PathBuf) {
    let log = scratch.file(&format!("{name}.log"));
    let logfile = format!("logfile={}", text(&log));
    let size = SIZE.to_string();
    let filters = ["--filter=log", "--filter=multi-conn"];
    let args = [&filters[..], &["memory", &size, &logfile, "multi-conn-mode=disable"]].concat();
    (Server::nbdkit(nbdkit, &scratch.socket(name), &args).unwrap(), log)
}

#[test]
fn multi_conn_is_a_choice() {
    let nbdkit = require_peer!("nbdkit");
    let scratch = Scratch::new().unwrap();
    let image = image(&scratch);
    let cases = [("auto", true, true), ("always", true, false), ("advertised", false, false)];
    for (choice, several, examined) in cases {
        let (to, log) = without_promise(&nbdkit, &scratch, choice);
        let copied = copy(&["--multi-conn", choice, "--flush"], text(&image), &to.uri(""));
        match several {
            true => copied.used_several(),
            false => copied.used_one("does not report multi-conn"),
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
    // Where it is promised nobody looks.
    let ours = serve(&scratch, "ours", &["memory:12M"]);
    for choice in ["auto", "always", "advertised"] {
        copy(&["--multi-conn", choice], text(&image), &ours.uri("")).used_several();
    }
}

/// Every connection that wrote is flushed, once all of its writes have been answered.
#[test]
fn every_connection_that_wrote_is_flushed_after_its_replies() {
    let nbdkit = require_peer!("nbdkit");
    let scratch = Scratch::new().unwrap();
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
    let scratch = Scratch::new().unwrap();
    let image = image(&scratch);
    let log = scratch.file("log");
    let logfile = format!("logfile={}", text(&log));
    let size = SIZE.to_string();
    let args = ["--filter=log", "memory", &size, &logfile];
    let to = Server::nbdkit(&nbdkit, &scratch.socket("t"), &args).unwrap();
    copy(&["--flush"], text(&image), &to.uri("")).used_several();
    to.stop().unwrap();
    assert!(!fs::read_to_string(log).unwrap().contains(" Read "), "the target was read");
}
