//! The socket of QEMU's monitor protocol, with a plain client and with QEMU's own.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use blockhaul_testkit::require_peer;
use blockhaul_testkit::tools::{self, PeerServer, ScratchDir, text};
use serde_json::{Value, json};

use crate::served_disk::{ChildGuard, LIMIT, OURS, assert_holds, blockhaul, fill, succeed};

/// A client that keeps events until they are asked for.
pub struct Qmp {
    stream: UnixStream,
    received: Vec<u8>,
    events: VecDeque<Value>,
}

impl Qmp {
    /// Connects, and agrees on capabilities.
    pub fn connect(path: &Path) -> Qmp {
        let mut qmp = Qmp::greet(path);
        assert_eq!(qmp.succeeds("qmp_capabilities", json!({})), json!({}));
        qmp
    }

    /// Connects, and reads the greeting.
    fn greet(path: &Path) -> Qmp {
        let what = format!("{} has a listener", path.display());
        Qmp::over(tools::until_ok(&what, || UnixStream::connect(path)))
    }

    /// Reads the greeting from a connection.
    fn over(stream: UnixStream) -> Qmp {
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        let mut qmp = Qmp { stream, received: Vec::new(), events: VecDeque::new() };
        let greeting = qmp.line().unwrap();
        assert!(greeting["QMP"]["version"]["qemu"]["major"].is_u64(), "{greeting}");
        qmp
    }

    /// The next line; none at the end.
    fn line(&mut self) -> Option<Value> {
        loop {
            if let Some(end) = self.received.iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = self.received.drain(..=end).collect();
                assert!(line.is_ascii() && line.ends_with(b"\r\n"));
                return Some(serde_json::from_slice(&line).unwrap());
            }
            let mut part = [0; 4096];
            match self.stream.read(&mut part) {
                Ok(0) => return None,
                Err(error) if error.kind() == ErrorKind::ConnectionReset => return None,
                // With a time limit, a signal ends a wait.
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                len => self.received.extend_from_slice(&part[..len.unwrap()]),
            }
        }
    }

    /// Sends bytes, and reads the answer.
    fn raw(&mut self, bytes: &[u8]) -> Value {
        self.stream.write_all(bytes).unwrap();
        loop {
            let line = self.line().expect("an answer");
            if line.get("event").is_none() {
                return line;
            }
            self.events.push_back(line);
        }
    }

    pub fn ask(&mut self, command: &str, arguments: Value) -> Value {
        let command = json!({ "execute": command, "arguments": arguments });
        self.raw(format!("{command}\n").as_bytes())
    }

    #[track_caller]
    pub fn succeeds(&mut self, command: &str, arguments: Value) -> Value {
        let mut answer = self.ask(command, arguments.clone());
        assert!(answer.get("return").is_some(), "{command} {arguments}: {answer}");
        answer["return"].take()
    }

    /// The description of the error.
    #[track_caller]
    fn fails(&mut self, command: &str, arguments: Value) -> String {
        let answer = self.ask(command, arguments.clone());
        let text = answer["error"]["desc"].as_str();
        text.unwrap_or_else(|| panic!("{command} {arguments}: {answer}")).to_string()
    }

    /// The events that came with answers.
    pub fn take_events(&mut self) -> Vec<Value> {
        self.events.drain(..).collect()
    }

    /// Whether the server ends the connection.
    pub fn ends(&mut self) -> bool {
        while self.line().is_some() {}
        true
    }

    /// The events up to one that `is_it`, in short.
    #[track_caller]
    fn until(&mut self, is_it: impl Fn(&Value) -> bool) -> Vec<String> {
        let mut seen = Vec::new();
        loop {
            let event = match self.events.pop_front() {
                Some(event) => event,
                None => self.line().expect("an event"),
            };
            seen.push(short(&event));
            if is_it(&event) {
                return seen;
            }
        }
    }

    /// The events until a job has gone.
    #[track_caller]
    fn until_gone(&mut self, job: &str) -> Vec<String> {
        self.until(|event| event["data"]["id"] == job && event["data"]["status"] == "null")
    }

    fn add(&mut self, node: &str, path: &Path) {
        let file = json!({ "driver": "file", "filename": path });
        self.succeeds("blockdev-add", json!({ "driver": "raw", "node-name": node, "file": file }));
    }

    /// Dirty bytes of the only bitmap of a node.
    fn dirty(&mut self, node: &str) -> u64 {
        let nodes = self.succeeds("query-named-block-nodes", json!({}));
        let nodes = nodes.as_array().unwrap();
        let found = nodes.iter().find(|one| one["node-name"] == node).unwrap();
        found["dirty-bitmaps"][0]["count"].as_u64().unwrap()
    }
}

fn short(event: &Value) -> String {
    match event["event"].as_str().unwrap() {
        "JOB_STATUS_CHANGE" => event["data"]["status"].as_str().unwrap().to_string(),
        name => name.to_string(),
    }
}

/// Checks that a message has no remedy of a command line.
#[track_caller]
pub fn assert_advises_no_command_line(message: &str) {
    for words in
        [" --", "lock=off", "serve it", "run it again", "blockhaul ", " ctl ", "check the "]
    {
        assert!(!message.contains(words), "{message}");
    }
}

/// A server with one export, `a`, of random bytes.
struct Served {
    scratch: ScratchDir,
    server: PeerServer,
    socket: PathBuf,
}

impl Served {
    fn new(more: &[&str]) -> Served {
        let scratch = ScratchDir::new().unwrap();
        let socket = scratch.socket("qmp");
        let disk = scratch.file("a.raw");
        fill(disk.to_str().unwrap(), 1);
        let export = format!("a={}", disk.display());
        let mut args = vec!["--qmp", socket.to_str().unwrap(), "--export", &export];
        args.extend(more);
        let server = PeerServer::blockhaul(OURS.as_ref(), &scratch.socket("nbd"), &args).unwrap();
        Served { scratch, server, socket }
    }

    fn connect(&self) -> Qmp {
        Qmp::connect(&self.socket)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.scratch.file(name)
    }

    /// An empty file of the size of the disk.
    fn target(&self, qmp: &mut Qmp, node: &str) -> PathBuf {
        let path = self.file(&format!("{node}.raw"));
        let size = std::fs::metadata(self.file("a.raw")).unwrap().len();
        std::fs::File::create(&path).unwrap().set_len(size).unwrap();
        qmp.add(node, &path);
        path
    }

    /// A client overwrites a part of an export.
    fn write_part(&self, export: &str) {
        let to = self.server.uri(export);
        succeed(&["copy", "--no-progress", "--range", "8M:2M", "random:32M?seed=9", &to]);
    }

    #[track_caller]
    fn assert_same(&self, one: &str, other: &str) {
        let [one, other] =
            [one, other].map(|name| std::fs::read(self.file(&format!("{name}.raw"))).unwrap());
        assert!(one == other, "the disks differ");
    }
}

#[test]
fn a_client_must_agree_first_and_wrong_input_has_qemus_errors() {
    let served = Served::new(&[]);
    let mut qmp = Qmp::greet(&served.socket);
    let answer = qmp.ask("query-status", json!({}));
    assert_eq!(answer["error"]["class"], "CommandNotFound", "{answer}");
    qmp.succeeds("qmp_capabilities", json!({}));
    let class = |answer: &Value| answer["error"]["class"].as_str().unwrap().to_string();
    assert_eq!(class(&qmp.ask("qmp_capabilities", json!({}))), "CommandNotFound");
    for wrong in
        [&b"x\n"[..], b"[1]\n", b"{\"execute\":1}\n", b"{\"a\":1}\n", b"\xff\xfe\n", b"{\"a\x01"]
    {
        assert_eq!(class(&qmp.raw(wrong)), "GenericError", "{wrong:?}");
    }
    let answer = qmp.raw(b"{'execute': 'query-jobs', 'id': {'a': ['\xc3\xa4']}}");
    assert_eq!(answer, json!({ "return": [], "id": { "a": ["ä"] } }));
    // In halves, and two at once.
    qmp.stream.write_all(b"{\"execute\":").unwrap();
    assert_eq!(qmp.raw(b"\"query-jobs\"}{\"execute\":\"query-name\"}")["return"], json!([]));
    assert_eq!(qmp.line().unwrap()["return"]["name"], "blockhaul");
    assert_eq!(class(&qmp.ask("nonesuch", json!({}))), "CommandNotFound");
    assert_eq!(qmp.fails("query-jobs", json!({ "x": 1 })), "Parameter 'x' is unexpected");
    assert_eq!(qmp.fails("block-job-cancel", json!({ "device": "j" })), "Block job 'j' not found");
    let commands = qmp.succeeds("query-commands", json!({}));
    let schema = qmp.succeeds("query-qmp-schema", json!({}));
    for command in commands.as_array().unwrap() {
        let is_it =
            |entry: &&Value| entry["meta-type"] == "command" && entry["name"] == command["name"];
        assert!(schema.as_array().unwrap().iter().any(|entry| is_it(&entry)), "{command}");
    }
    qmp.succeeds("quit", json!({}));
    while qmp.line().is_some() {}
}

#[test]
fn floods_end_one_connection_and_not_the_server() {
    let served = Served::new(&[]);
    let mut flood = served.connect();
    let text = vec![b'['; 4 << 20];
    // It is cut while it writes, or after it.
    let _ = flood.stream.write_all(&text);
    let mut endless = served.connect();
    let _ = endless.stream.write_all(&vec![b'a'; 4 << 20]);
    while endless.line().is_some() {}
    // It asks, and does not read.
    let deaf = served.connect();
    deaf.stream.set_nonblocking(true).unwrap();
    let started = Instant::now();
    let question = b"{\"execute\":\"query-qmp-schema\"}\n".repeat(100);
    while started.elapsed() < Duration::from_secs(1) {
        if (&deaf.stream).write(&question).is_err() {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    assert_eq!(served.connect().succeeds("query-jobs", json!({})), json!([]));
}

#[test]
fn a_backup_and_a_bitmap_begin_at_one_moment_and_an_increment_follows() {
    let served = Served::new(&[]);
    let mut qmp = served.connect();
    let path = served.target(&mut qmp, "t");
    let actions = json!([
        { "type": "block-dirty-bitmap-add", "data": { "node": "a", "name": "m" } },
        { "type": "blockdev-backup",
          "data": { "job-id": "b", "device": "a", "target": "t", "sync": "full" } },
    ]);
    qmp.succeeds("transaction", json!({ "actions": actions }));
    let order =
        ["created", "running", "waiting", "pending", "BLOCK_JOB_COMPLETED", "concluded", "null"];
    assert_eq!(qmp.until_gone("b"), order);
    assert_holds(path.to_str().unwrap(), 1);
    served.write_part("a");
    assert_eq!(qmp.dirty("a"), 2 << 20);
    let increment = |mode: &str| {
        json!({ "job-id": "i", "device": "a", "target": "t", "sync": "bitmap", "bitmap": "m",
                "bitmap-mode": mode })
    };
    qmp.succeeds("blockdev-backup", increment("never"));
    qmp.until_gone("i");
    served.assert_same("a", "t");
    assert_eq!(qmp.dirty("a"), 2 << 20);
    qmp.succeeds("blockdev-backup", increment("on-success"));
    qmp.until_gone("i");
    assert_eq!(qmp.dirty("a"), 0);
}

#[test]
fn a_backup_is_compressed_in_a_target_that_can_do_it() {
    let peer = require_peer!("qemu-img");
    let qemu_img = |args: &[&str]| {
        let output = tools::output(peer.command().args(args), LIMIT).unwrap();
        assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
        text(&output.stdout)
    };
    let served = Served::new(&[]);
    let mut qmp = served.connect();
    succeed(&["copy", "--no-progress", "sample:32M", &served.server.uri("a")]);
    served.target(&mut qmp, "t");
    let backup = |target: &str, sync: &str, compress: bool| json!({ "job-id": "b", "device": "a", "target": target, "sync": sync, "compress": compress });
    let said = qmp.fails("blockdev-backup", backup("t", "full", true));
    assert_eq!(said, "Compression is not supported for this drive t");
    let mut lens = Vec::new();
    for (node, options, compress) in [
        ("plain", "cluster_size=64k", false),
        ("zlib", "cluster_size=64k", true),
        ("zstd", "cluster_size=64k,compression_type=zstd", true),
        // Larger than what a copy writes at a time else.
        ("large", "cluster_size=2M,compression_type=zstd", true),
    ] {
        let path = served.file(node);
        let path = path.to_str().unwrap();
        qemu_img(&["create", "-q", "-f", "qcow2", "-o", options, path, "32M"]);
        let file = json!({ "driver": "file", "filename": path });
        let add = json!({ "driver": "qcow2", "node-name": node, "file": file });
        qmp.succeeds("blockdev-add", add);
        qmp.succeeds("blockdev-backup", backup(node, "full", compress));
        qmp.until_gone("b");
        qmp.succeeds("blockdev-del", json!({ "node-name": node }));
        let found: Value =
            serde_json::from_str(&qemu_img(&["check", "--output=json", path])).unwrap();
        let count = found["compressed-clusters"].as_u64().unwrap_or(0);
        assert!((count > 3) == compress && found.get("leaks").is_none(), "{node}: {found}");
        if node == "large" {
            assert_eq!(found["allocated-clusters"].as_u64(), Some(count), "{found}");
        }
        let disk = served.file("a.raw");
        qemu_img(&["compare", "-f", "raw", "-F", "qcow2", disk.to_str().unwrap(), path]);
        lens.push(std::fs::metadata(path).unwrap().len());
    }
    assert!(lens[1] < lens[0] * 3 / 4 && lens[2] < lens[1], "{lens:?}");
}

#[test]
fn a_job_that_fails_or_is_cancelled_leaves_its_bitmap_as_it_was() {
    let served = Served::new(&[]);
    let mut qmp = served.connect();
    served.target(&mut qmp, "t");
    qmp.succeeds("block-dirty-bitmap-add", json!({ "node": "a", "name": "m" }));
    served.write_part("a");
    let backup = json!({ "job-id": "b", "device": "a", "target": "t", "sync": "incremental",
                         "bitmap": "m", "speed": 65536 });
    qmp.succeeds("blockdev-backup", backup);
    let busy = qmp.fails("block-dirty-bitmap-clear", json!({ "node": "a", "name": "m" }));
    assert!(busy.contains("currently in use"), "{busy}");
    qmp.succeeds("block-job-cancel", json!({ "device": "b" }));
    let order = ["created", "running", "aborting", "BLOCK_JOB_CANCELLED", "concluded", "null"];
    assert_eq!(qmp.until_gone("b"), order);
    assert_eq!(qmp.dirty("a"), 2 << 20);
}

#[test]
fn jobs_accept_what_their_state_allows() {
    let served = Served::new(&[]);
    let mut qmp = served.connect();
    served.target(&mut qmp, "t");
    let backup = json!({ "job-id": "b", "device": "a", "target": "t", "sync": "full",
                         "speed": 1 << 20, "auto-finalize": false, "auto-dismiss": false });
    qmp.succeeds("blockdev-backup", backup.clone());
    let refused = qmp.fails("blockdev-backup", backup);
    assert_eq!(refused, "Node 't' is busy: block device is in use by block job: backup");
    assert_eq!(
        qmp.fails("job-complete", json!({ "id": "b" })),
        "Job 'b' in state 'running' cannot accept command verb 'complete'"
    );
    qmp.succeeds("job-pause", json!({ "id": "b" }));
    assert_eq!(qmp.fails("job-pause", json!({ "id": "b" })), "Job is already paused");
    assert_eq!(qmp.succeeds("query-jobs", json!({}))[0]["status"], "paused");
    qmp.succeeds("block-job-resume", json!({ "device": "b" }));
    qmp.succeeds("block-job-set-speed", json!({ "device": "b", "speed": 0 }));
    qmp.until(|event| event["event"] == "BLOCK_JOB_PENDING");
    assert_eq!(qmp.succeeds("query-block-jobs", json!({}))[0]["status"], "pending");
    qmp.succeeds("job-finalize", json!({ "id": "b" }));
    let seen = qmp.until(|event| event["data"]["status"] == "concluded");
    assert_eq!(seen, ["BLOCK_JOB_COMPLETED", "concluded"]);
    served.assert_same("a", "t");
    qmp.succeeds("job-dismiss", json!({ "id": "b" }));
    assert_eq!(qmp.fails("job-dismiss", json!({ "id": "b" })), "Job not found");
}

/// After mirrors in a circle, disks have the names of other nodes.
#[test]
fn a_deleted_node_is_no_other_one_and_its_name_is_free() {
    let served = Served::new(&[]);
    let mut qmp = served.connect();
    served.target(&mut qmp, "t");
    served.target(&mut qmp, "u");
    for (device, target) in [("a", "t"), ("t", "u"), ("u", "a")] {
        let mirror = json!({ "job-id": "m", "device": device, "target": target, "sync": "full" });
        qmp.succeeds("blockdev-mirror", mirror);
        qmp.until(|event| event["event"] == "BLOCK_JOB_READY");
        qmp.succeeds("job-complete", json!({ "id": "m" }));
        qmp.until_gone("m");
    }
    fill(&served.server.uri("a"), 2);
    qmp.succeeds("blockdev-del", json!({ "node-name": "t" }));
    let backup = json!({ "job-id": "b", "device": "a", "target": "t", "sync": "full" });
    let said = qmp.fails("blockdev-backup", backup.clone());
    assert_eq!(said, "Cannot find device='t' nor node-name='t'");
    assert_holds(served.file("u.raw").to_str().unwrap(), 1);
    // The same name again, for another file.
    let other = served.file("other.raw");
    std::fs::File::create(&other).unwrap().set_len(32 << 20).unwrap();
    qmp.add("t", &other);
    qmp.succeeds("blockdev-backup", backup);
    qmp.until_gone("b");
    assert_holds(other.to_str().unwrap(), 2);
    assert_holds(served.file("u.raw").to_str().unwrap(), 1);
    qmp.succeeds("blockdev-del", json!({ "node-name": "u" }));
    qmp.succeeds("blockdev-del", json!({ "node-name": "t" }));
}

/// A job writes to its target below the bitmaps and points in time of that disk.
#[test]
fn the_target_of_a_job_is_no_source_and_no_export_and_its_bitmaps_show_everything() {
    let control = ScratchDir::new().unwrap();
    let control = control.socket("ctl");
    let control = control.to_str().unwrap();
    let served = Served::new(&["--control", control]);
    let mut qmp = served.connect();
    for node in ["t", "u", "v"] {
        served.target(&mut qmp, node);
    }
    qmp.succeeds("block-dirty-bitmap-add", json!({ "node": "t", "name": "m" }));
    let job = |id: &str, device: &str, target: &str| json!({ "job-id": id, "device": device, "target": target, "sync": "full" });
    let mut slow = job("j", "a", "t");
    slow["speed"] = json!(65536);
    qmp.succeeds("blockdev-mirror", slow);
    let export = json!({ "type": "nbd", "id": "e", "node-name": "t" });
    let backup = json!({ "type": "blockdev-backup", "data": job("k", "t", "u") });
    for (command, arguments) in [
        ("blockdev-backup", job("k", "t", "u")),
        ("blockdev-mirror", job("k", "t", "u")),
        ("transaction", json!({ "actions": [backup] })),
        ("block-export-add", export.clone()),
    ] {
        let busy = qmp.fails(command, arguments);
        assert_eq!(busy, "Node 't' is busy: block device is in use by block job: mirror");
    }
    let to = served.file("to.raw");
    for command in ["backup", "mirror"] {
        let output = blockhaul(&["ctl", control, command, "t", to.to_str().unwrap()]);
        let said = text(&output.stderr);
        assert!(!output.status.success() && said.contains("is the target of a job"), "{said}");
    }
    assert!(!to.exists());
    // In one group, one after another.
    let actions = [job("k", "a", "u"), job("l", "u", "v")]
        .map(|data| json!({ "type": "blockdev-backup", "data": data }));
    let busy = qmp.fails("transaction", json!({ "actions": actions }));
    assert_eq!(busy, "Node 'u' is busy: block device is in use by block job: backup");
    qmp.succeeds("job-cancel", json!({ "id": "j" }));
    qmp.until_gone("j");
    assert_eq!(qmp.dirty("t"), 32 << 20);
    qmp.succeeds("block-export-add", export);
    qmp.succeeds("blockdev-backup", job("k", "t", "u"));
    qmp.until_gone("k");
    served.assert_same("t", "u");
    // What a point in time of it uses is no target.
    let output = blockhaul(&["ctl", control, "snapshot-add", "v", "now"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let busy = qmp.fails("blockdev-backup", job("k", "a", "v"));
    assert!(busy.contains("a job or a point in time uses \"v\""), "{busy}");
}

#[test]
fn a_mirror_moves_clients_to_its_target_or_leaves_a_copy() {
    let served = Served::new(&[]);
    let mut qmp = served.connect();
    let path = served.target(&mut qmp, "t");
    let mirror = |device: &str, target: &str| json!({ "job-id": "m", "device": device, "target": target, "sync": "full" });
    let is_ready = |event: &Value| event["event"] == "BLOCK_JOB_READY";
    qmp.succeeds("blockdev-mirror", mirror("a", "t"));
    assert_eq!(qmp.until(is_ready), ["created", "running", "ready", "BLOCK_JOB_READY"]);
    qmp.succeeds("block-job-cancel", json!({ "device": "m" }));
    assert!(qmp.until_gone("m").contains(&"BLOCK_JOB_COMPLETED".to_string()));
    served.assert_same("a", "t");
    qmp.succeeds("blockdev-mirror", mirror("a", "t"));
    qmp.until(is_ready);
    served.write_part("a");
    qmp.succeeds("job-complete", json!({ "id": "m" }));
    qmp.until_gone("m");
    served.assert_same("a", "t");
    fill(&served.server.uri("a"), 2);
    assert_holds(path.to_str().unwrap(), 2);
    assert_eq!(qmp.succeeds("query-block", json!({}))[0]["inserted"]["node-name"], "t");
    // And back.
    qmp.succeeds("blockdev-mirror", mirror("t", "a"));
    qmp.until(is_ready);
    qmp.succeeds("job-complete", json!({ "id": "m" }));
    qmp.until_gone("m");
    fill(&served.server.uri("a"), 3);
    assert_holds(served.file("a.raw").to_str().unwrap(), 3);
    assert_holds(path.to_str().unwrap(), 2);
}

#[test]
fn a_disk_without_clients_is_mirrored_to_a_server_of_one_connection() {
    let served = Served::new(&[]);
    let mut qmp = served.connect();
    let to = served.file("to.raw");
    std::fs::File::create(&to).unwrap().set_len(32 << 20).unwrap();
    let socket = served.scratch.socket("to");
    let args = ["--layer", "multi-conn?mode=disable", to.to_str().unwrap()];
    let target = PeerServer::blockhaul(OURS.as_ref(), &socket, &args).unwrap();
    let server = json!({ "type": "unix", "path": socket });
    qmp.succeeds("blockdev-add", json!({ "driver": "nbd", "node-name": "t", "server": server }));
    let from = served.file("from.raw");
    fill(from.to_str().unwrap(), 3);
    qmp.add("from", &from);
    let mirror =
        |device: &str| json!({ "job-id": "m", "device": device, "target": "t", "sync": "full" });
    // Its clients could not move there.
    qmp.succeeds("blockdev-mirror", mirror("a"));
    let seen = qmp.until_gone("m");
    assert!(!seen.contains(&"BLOCK_JOB_READY".to_string()), "{seen:?}");
    qmp.succeeds("blockdev-mirror", mirror("from"));
    qmp.until(|event| event["event"] == "BLOCK_JOB_READY");
    qmp.succeeds("job-complete", json!({ "id": "m" }));
    qmp.until(|event| {
        assert!(event["data"].get("error").is_none(), "{event}");
        event["event"] == "BLOCK_JOB_COMPLETED"
    });
    drop(target);
    served.assert_same("from", "to");
}

#[test]
fn a_mirror_takes_writes_before_they_complete() {
    let served = Served::new(&[]);
    let mut qmp = served.connect();
    served.target(&mut qmp, "t");
    let mirror = json!({ "job-id": "m", "device": "a", "target": "t", "sync": "full" });
    qmp.succeeds("blockdev-mirror", mirror);
    qmp.until(|event| event["event"] == "BLOCK_JOB_READY");
    assert_eq!(qmp.succeeds("query-block-jobs", json!({}))[0]["actively-synced"], false);
    let change = |mode: &str| json!({ "id": "m", "type": "mirror", "copy-mode": mode });
    qmp.succeeds("block-job-change", change("write-blocking"));
    let started = Instant::now();
    while qmp.succeeds("query-block-jobs", json!({}))[0]["actively-synced"] != true {
        assert!(started.elapsed() < LIMIT);
    }
    served.write_part("a");
    served.assert_same("a", "t");
    qmp.fails("block-job-change", change("other"));
    qmp.succeeds("block-job-cancel", json!({ "device": "m" }));
    qmp.until_gone("m");
    qmp.fails("block-job-change", change("background"));
    let mirror = json!({ "job-id": "m", "device": "a", "target": "t", "sync": "full",
                         "copy-mode": "write-blocking" });
    qmp.succeeds("blockdev-mirror", mirror);
    qmp.until(|event| event["event"] == "BLOCK_JOB_READY");
    served.write_part("a");
    qmp.succeeds("job-complete", json!({ "id": "m" }));
    qmp.until_gone("m");
    served.assert_same("a", "t");
}

#[test]
fn a_mirror_can_begin_with_a_bitmap_or_nothing() {
    let served = Served::new(&[]);
    let mut qmp = served.connect();
    served.target(&mut qmp, "t");
    let actions = json!([
        { "type": "block-dirty-bitmap-add", "data": { "node": "a", "name": "m" } },
        { "type": "blockdev-backup",
          "data": { "job-id": "b", "device": "a", "target": "t", "sync": "full" } },
    ]);
    qmp.succeeds("transaction", json!({ "actions": actions }));
    qmp.until_gone("b");
    served.write_part("a");
    for (sync, bitmap) in [("incremental", Some("m")), ("none", None)] {
        let mut mirror = json!({ "job-id": "m", "device": "a", "target": "t", "sync": sync });
        if let Some(bitmap) = bitmap {
            mirror["bitmap"] = bitmap.into();
        }
        qmp.succeeds("blockdev-mirror", mirror);
        qmp.until(|event| event["event"] == "BLOCK_JOB_READY");
        qmp.succeeds("block-job-cancel", json!({ "device": "m" }));
        qmp.until_gone("m");
        served.assert_same("a", "t");
    }
    assert_eq!(qmp.dirty("a"), 0);
}

#[test]
fn a_transaction_happens_as_a_whole_or_not_at_all() {
    let served = Served::new(&[]);
    let mut qmp = served.connect();
    let add = |name: &str| json!({ "type": "block-dirty-bitmap-add", "data": { "node": "a", "name": name } });
    for last in [
        json!({ "type": "abort", "data": {} }),
        json!({ "type": "block-dirty-bitmap-clear", "data": { "node": "a", "name": "no" } }),
        json!({ "type": "blockdev-backup",
                "data": { "job-id": "j", "device": "a", "target": "no", "sync": "full" } }),
    ] {
        qmp.fails("transaction", json!({ "actions": [add("m"), last] }));
        let found = qmp.fails("block-dirty-bitmap-remove", json!({ "node": "a", "name": "m" }));
        assert_eq!(found, "Dirty bitmap 'm' not found");
    }
    qmp.succeeds("transaction", json!({ "actions": [add("m"), add("n")] }));
    served.write_part("a");
    let merge = json!([
        { "type": "block-dirty-bitmap-clear", "data": { "node": "a", "name": "m" } },
        { "type": "block-dirty-bitmap-merge",
          "data": { "node": "a", "target": "m", "bitmaps": [{ "node": "a", "name": "n" }] } },
        { "type": "block-dirty-bitmap-remove", "data": { "node": "a", "name": "n" } },
    ]);
    qmp.succeeds("transaction", json!({ "actions": merge }));
    assert_eq!(qmp.dirty("a"), 2 << 20);
}

#[test]
fn if_one_backup_of_a_group_fails_the_other_is_cancelled() {
    let served = Served::new(&[]);
    let mut qmp = served.connect();
    let other = served.file("b.raw");
    fill(other.to_str().unwrap(), 2);
    qmp.add("b", &other);
    served.target(&mut qmp, "t");
    served.target(&mut qmp, "u");
    let backup = |job: &str, device: &str, target: &str| {
        json!({ "type": "blockdev-backup", "data": {
            "job-id": job, "device": device, "target": target, "sync": "full", "speed": 1 << 20 } })
    };
    let actions = json!([backup("x", "a", "t"), backup("y", "b", "u")]);
    let group = json!({ "actions": actions, "properties": { "completion-mode": "grouped" } });
    qmp.succeeds("transaction", group);
    qmp.succeeds("job-cancel", json!({ "id": "x" }));
    let mut gone = 0;
    while gone < 2 {
        let seen = qmp.until(|event| event["data"]["status"] == "null");
        assert!(!seen.contains(&"waiting".to_string()), "{seen:?}");
        gone += 1;
    }
    assert_eq!(qmp.succeeds("query-jobs", json!({})), json!([]));
}

#[test]
fn refusals_advise_nothing_that_the_protocol_cannot_express() {
    let served = Served::new(&[]);
    let mut qmp = served.connect();
    let locked = served.file("locked.raw");
    std::fs::write(&locked, [1; 4096]).unwrap();
    let socket = served.scratch.socket("other");
    let full = ["--layer", "error?write=100%&zero=100%&error=ENOSPC", "memory:32M"];
    let server =
        |socket: &Path, args: &[&str]| PeerServer::blockhaul(OURS.as_ref(), socket, args).unwrap();
    let _other = server(&socket, &[locked.to_str().unwrap()]);
    let target = served.scratch.socket("full");
    let _full = server(&target, &full);
    let file = |path: &Path| {
        let file = json!({ "driver": "file", "filename": path });
        json!({ "driver": "raw", "node-name": "n", "file": file })
    };
    let nbd = |name: &str, socket: &Path| {
        let server = json!({ "type": "unix", "path": socket });
        json!({ "driver": "nbd", "node-name": name, "server": server })
    };
    for (command, arguments, words) in [
        (
            "blockdev-add",
            file(&served.file("a.raw")),
            "already open for writing by export \"a\"; node \"n\" cannot open it for writing",
        ),
        ("blockdev-add", file(&locked), "another program has locked it against writing"),
        ("blockdev-add", nbd("n", &served.scratch.socket("none")), "No such file or directory"),
        (
            "block-dirty-bitmap-add",
            json!({ "node": "a", "name": "b", "persistent": true }),
            "Can't store persistent bitmaps to a",
        ),
    ] {
        let said = qmp.fails(command, arguments);
        assert!(said.ends_with(words), "{said}");
        assert_advises_no_command_line(&said);
    }
    // A job that has failed.
    qmp.succeeds("blockdev-add", nbd("t", &target));
    let backup = json!({ "job-id": "b", "device": "a", "target": "t", "sync": "full",
                         "auto-dismiss": false });
    qmp.succeeds("blockdev-backup", backup);
    qmp.until(|event| event["data"]["status"] == "concluded");
    for query in ["query-jobs", "query-block-jobs"] {
        let job = qmp.succeeds(query, json!({}))[0].take();
        let said = job["error"].as_str().unwrap_or_else(|| panic!("{job}"));
        assert!(said.contains("the target failed: ") && said.contains("no space left"), "{said}");
        assert_advises_no_command_line(said);
    }
    let daemon = Daemon::ours(&[]);
    let mut qmp = Qmp::connect(&daemon.socket);
    let address = json!({ "type": "unix", "data": { "path": served.scratch.socket("more") } });
    let start = json!({ "addr": address, "tls-creds": "tls0" });
    assert_eq!(qmp.fails("nbd-server-start", start), "No TLS credentials with id 'tls0'");
}

#[test]
fn a_job_stops_at_an_error_and_goes_on_when_it_is_resumed() {
    let served = Served::new(&[]);
    let path = served.file("t.raw");
    std::fs::File::create(&path).unwrap().set_len(32 << 20).unwrap();
    let control = served.scratch.socket("ctl");
    let control = control.to_str().unwrap();
    let args = ["--control", control, path.to_str().unwrap()];
    let target = PeerServer::blockhaul(OURS.as_ref(), &served.scratch.socket("t"), &args).unwrap();
    let layer = "error?write=100%&zero=100%&error=ENOSPC";
    let break_target = || drop(succeed(&["ctl", control, "layer-add", "", layer]));
    let fix_target = || drop(succeed(&["ctl", control, "layer-remove", "", "error"]));
    break_target();
    let mut qmp = served.connect();
    let server = json!({ "type": "unix", "path": served.scratch.socket("t") });
    qmp.succeeds("blockdev-add", json!({ "driver": "nbd", "node-name": "t", "server": server }));
    let backup = |policy: &str| {
        json!({ "job-id": "b", "device": "a", "target": "t", "sync": "full",
                "on-target-error": policy })
    };
    qmp.succeeds("blockdev-backup", backup("report"));
    let seen = qmp.until_gone("b");
    assert_eq!(
        seen,
        ["created", "running", "aborting", "BLOCK_JOB_COMPLETED", "concluded", "null"]
    );
    qmp.succeeds("blockdev-backup", backup("enospc"));
    qmp.until(|event| event["data"]["status"] == "paused");
    let job = qmp.succeeds("query-block-jobs", json!({}))[0].clone();
    assert_eq!((&job["io-status"], &job["paused"]), (&json!("nospace"), &json!(true)), "{job}");
    fix_target();
    qmp.succeeds("job-resume", json!({ "id": "b" }));
    qmp.until_gone("b");
    served.assert_same("a", "t");
    // One that waits can be cancelled, too.
    break_target();
    qmp.succeeds("blockdev-backup", backup("stop"));
    qmp.until(|event| event["event"] == "BLOCK_JOB_ERROR" && event["data"]["action"] == "stop");
    qmp.succeeds("job-cancel", json!({ "id": "b" }));
    assert!(qmp.until_gone("b").contains(&"BLOCK_JOB_CANCELLED".to_string()));
    // An ignored error is repeated until it is gone.
    qmp.succeeds("blockdev-backup", backup("ignore"));
    qmp.until(|event| event["event"] == "BLOCK_JOB_ERROR" && event["data"]["action"] == "ignore");
    fix_target();
    qmp.until_gone("b");
    served.assert_same("a", "t");
    drop(target);
}

#[test]
fn old_contents_can_be_read_from_a_node_over_the_disk() {
    let served = Served::new(&[]);
    let mut qmp = served.connect();
    served.target(&mut qmp, "fleece");
    let path = served.target(&mut qmp, "t");
    qmp.succeeds(
        "blockdev-add",
        json!({ "driver": "copy-before-write", "node-name": "cbw", "file": "a", "target": "fleece" }),
    );
    let access = json!({ "driver": "snapshot-access", "node-name": "then", "file": "cbw" });
    qmp.succeeds("blockdev-add", access);
    let device = qmp.succeeds("query-block", json!({}))[0]["qdev"].clone();
    let drive = |value: &str| json!({ "path": device, "property": "drive", "value": value });
    qmp.succeeds("qom-set", drive("cbw"));
    fill(&served.server.uri("a"), 2);
    let export = json!({ "type": "nbd", "id": "then", "node-name": "then" });
    qmp.succeeds("block-export-add", export);
    assert_holds(&served.server.uri("then"), 1);
    let backup = json!({ "job-id": "b", "device": "then", "target": "t", "sync": "full" });
    qmp.succeeds("blockdev-backup", backup);
    qmp.until_gone("b");
    assert_holds(path.to_str().unwrap(), 1);
    assert_eq!(
        qmp.fails("blockdev-del", json!({ "node-name": "cbw" })),
        "Block device cbw is in use"
    );
    qmp.succeeds("block-export-del", json!({ "id": "then", "mode": "hard" }));
    qmp.succeeds("blockdev-del", json!({ "node-name": "then" }));
    qmp.succeeds("qom-set", drive("a"));
    for node in ["cbw", "fleece", "t"] {
        qmp.succeeds("blockdev-del", json!({ "node-name": node }));
    }
    assert_holds(&served.server.uri("a"), 2);
}

#[test]
fn a_bitmap_that_begins_with_a_backup_lacks_nothing_that_the_backup_lacks() {
    let served = Served::new(&[]);
    let mut qmp = served.connect();
    served.target(&mut qmp, "fleece");
    served.target(&mut qmp, "t");
    let over = json!({ "driver": "copy-before-write", "node-name": "cbw", "file": "a",
                       "target": "fleece" });
    qmp.succeeds("blockdev-add", over);
    let access = json!({ "driver": "snapshot-access", "node-name": "then", "file": "cbw" });
    qmp.succeeds("blockdev-add", access);
    let device = qmp.succeeds("query-block", json!({}))[0]["qdev"].clone();
    qmp.succeeds("qom-set", json!({ "path": device, "property": "drive", "value": "cbw" }));
    // As in qmpbackup, the bitmap is added later than the point in time begins.
    served.write_part("a");
    let actions = json!([
        { "type": "block-dirty-bitmap-add", "data": { "node": "a", "name": "m" } },
        { "type": "blockdev-backup",
          "data": { "job-id": "b", "device": "then", "target": "t", "sync": "full" } },
    ]);
    qmp.succeeds("transaction", json!({ "actions": actions }));
    qmp.until_gone("b");
    assert_eq!(qmp.dirty("a"), 2 << 20);
    let increment = json!({ "job-id": "i", "device": "a", "target": "t", "sync": "incremental",
                            "bitmap": "m" });
    qmp.succeeds("blockdev-backup", increment);
    qmp.until_gone("i");
    served.assert_same("a", "t");
}

#[test]
fn a_job_of_an_earlier_server_is_resumed_or_dismissed() {
    let jobs = ScratchDir::new().unwrap();
    let options = ["--job-state", jobs.path().to_str().unwrap()];
    let served = Served::new(&options);
    let mut qmp = served.connect();
    served.target(&mut qmp, "t");
    served.target(&mut qmp, "u");
    let job = |id: &str, target: &str| json!({ "job-id": id, "device": "a", "target": target, "sync": "full", "speed": 1 << 20 });
    qmp.succeeds("blockdev-mirror", job("m", "t"));
    qmp.succeeds("blockdev-backup", job("b", "u"));
    let Served { scratch, server, socket } = served;
    drop(server);
    let export = format!("a={}", scratch.file("a.raw").display());
    let mut args = vec!["--qmp", socket.to_str().unwrap(), "--export", &export];
    args.extend(options);
    let server = PeerServer::blockhaul(OURS.as_ref(), &scratch.socket("nbd-2"), &args).unwrap();
    let served = Served { scratch, server, socket };
    let mut qmp = served.connect();
    let jobs = qmp.succeeds("query-jobs", json!({}));
    assert_eq!((&jobs[0]["id"], &jobs[0]["type"]), (&"m".into(), &"mirror".into()), "{jobs}");
    assert_eq!((&jobs[1]["id"], &jobs[1]["status"]), (&"b".into(), &"concluded".into()), "{jobs}");
    assert!(jobs[1]["error"].as_str().unwrap().contains("the server ended"), "{jobs}");
    let in_use = qmp.fails(
        "blockdev-backup",
        json!({ "job-id": "b", "device": "a", "target": "a", "sync": "full" }),
    );
    assert_eq!(in_use, "Source and target cannot be the same");
    let lost = qmp.fails("job-resume", json!({ "id": "b" }));
    assert!(lost.contains("its moment is lost"), "{lost}");
    qmp.succeeds("job-dismiss", json!({ "id": "b" }));
    // By a node, which has the target open.
    let file = json!({ "driver": "file", "filename": served.file("t.raw") });
    qmp.succeeds("blockdev-add", json!({ "driver": "raw", "node-name": "t", "file": file }));
    served.write_part("a");
    qmp.succeeds("job-resume", json!({ "id": "m" }));
    qmp.succeeds("block-job-set-speed", json!({ "device": "m", "speed": 0 }));
    qmp.until(|event| event["event"] == "BLOCK_JOB_READY");
    qmp.succeeds("block-job-cancel", json!({ "device": "m" }));
    qmp.until_gone("m");
    served.assert_same("a", "t");
    assert_eq!(qmp.succeeds("query-jobs", json!({})), json!([]));
}

#[test]
fn ctl_and_the_monitor_see_the_same_jobs_and_bitmaps() {
    let scratch = ScratchDir::new().unwrap();
    let control = scratch.file("ctl");
    let control = control.to_str().unwrap();
    let served = Served::new(&["--control", control]);
    let mut qmp = served.connect();
    served.target(&mut qmp, "t");
    succeed(&["ctl", control, "bitmap-add", "a", "m"]);
    served.write_part("a");
    assert_eq!(qmp.dirty("a"), 2 << 20);
    let target = served.file("ctl.raw");
    succeed(&["ctl", control, "backup", "a", target.to_str().unwrap(), "--wait"]);
    assert!(qmp.until_gone("job1").contains(&"BLOCK_JOB_COMPLETED".to_string()));
    let backup = json!({ "job-id": "b", "device": "a", "target": "t", "sync": "full",
                         "speed": 1 << 20 });
    qmp.succeeds("blockdev-backup", backup);
    let jobs = succeed(&["ctl", control, "jobs", "--json"]);
    let jobs: Value = serde_json::from_str(&jobs).unwrap();
    assert_eq!(jobs["jobs"][1]["name"], "b");
    succeed(&["ctl", control, "job-rate", "2", "0"]);
    qmp.until_gone("b");
    let exports = succeed(&["ctl", control, "exports", "--json"]);
    let exports: Value = serde_json::from_str(&exports).unwrap();
    assert_eq!(
        (&exports["exports"][1]["name"], &exports["exports"][1]["served"]),
        (&json!("t"), &json!(false))
    );
}

#[test]
fn persistent_bitmaps_outlive_the_server_and_others_do_not() {
    let scratch = ScratchDir::new().unwrap();
    let bitmaps = scratch.path().to_str().unwrap().to_string();
    let served = Served::new(&["--bitmaps", &bitmaps]);
    let mut qmp = served.connect();
    for (name, kept) in [("kept", true), ("lost", false)] {
        let bitmap = json!({ "node": "a", "name": name, "persistent": kept });
        qmp.succeeds("block-dirty-bitmap-add", bitmap);
    }
    served.write_part("a");
    let Served { scratch, server, .. } = served;
    assert!(server.stop().unwrap().success());
    let socket = scratch.socket("again");
    let disk = scratch.file("a.raw");
    let export = format!("a={}", disk.display());
    let args = ["--qmp", socket.to_str().unwrap(), "--export", &export, "--bitmaps", &bitmaps];
    let server = PeerServer::blockhaul(OURS.as_ref(), &scratch.socket("nbd2"), &args).unwrap();
    let mut qmp = Qmp::connect(&socket);
    assert_eq!(qmp.dirty("a"), 2 << 20);
    let names = json!({ "node": "a", "name": "lost" });
    assert_eq!(qmp.fails("block-dirty-bitmap-remove", names), "Dirty bitmap 'lost' not found");
    drop(server);
}

/// `qemu-storage-daemon`, ours or QEMU's, with a monitor.
struct Daemon {
    child: Child,
    socket: PathBuf,
    scratch: ScratchDir,
}

impl Daemon {
    fn start(mut command: Command, options: &[&str]) -> Daemon {
        let scratch = ScratchDir::new().unwrap();
        let socket = scratch.socket("qmp");
        let chardev = format!("socket,id=c,path={},server=on,wait=off", socket.display());
        command.args(["--chardev", &chardev, "--monitor", "c"]).args(options);
        command.current_dir(scratch.path()).stdin(Stdio::null());
        fill(scratch.file("a.raw").to_str().unwrap(), 1);
        std::fs::File::create(scratch.file("t.raw")).unwrap().set_len(32 << 20).unwrap();
        std::fs::File::create(scratch.file("small.raw")).unwrap().set_len(1 << 20).unwrap();
        let child = command.spawn().unwrap();
        Daemon { child, socket, scratch }
    }

    fn ours(options: &[&str]) -> Daemon {
        let mut command = Command::new(OURS);
        command.args(["compat", "qemu-storage-daemon"]);
        Daemon::start(command, options)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn the_command_line_of_qemus_daemon_serves_and_writes_its_pid() {
    let daemon = Daemon::ours(&[
        "--pidfile",
        "pid",
        "--object",
        "iothread,id=io",
        "--blockdev",
        "driver=file,node-name=f,filename=a.raw",
        "--blockdev={\"driver\":\"raw\",\"node-name\":\"a\",\"file\":\"f\"}",
        "--nbd-server",
        "addr.type=unix,addr.path=nbd",
        "--export",
        "nbd,id=e,node-name=a,name=disk,writable=on",
    ]);
    let mut qmp = Qmp::connect(&daemon.socket);
    let pid = std::fs::read_to_string(daemon.scratch.file("pid")).unwrap();
    assert_eq!(pid.trim(), daemon.child.id().to_string());
    let uri = format!("nbd+unix:///disk?socket={}", daemon.scratch.file("nbd").display());
    assert_holds(&uri, 1);
    assert_eq!(
        qmp.fails("nbd-server-start", json!({ "addr": { "type": "unix", "path": "x" } })),
        "NBD server already running"
    );
    assert_eq!(qmp.fails("blockdev-del", json!({ "node-name": "f" })), "Block device f is in use");
    qmp.succeeds("nbd-server-stop", json!({}));
    assert!(!blockhaul(&["info", &uri]).status.success());
    for node in ["a", "f"] {
        qmp.succeeds("blockdev-del", json!({ "node-name": node }));
    }
    let refused = blockhaul(&["compat", "qemu-storage-daemon", "--export", "fuse,id=x"]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(text(&refused.stderr).contains("does not accept value 'fuse'"), "{refused:?}");
    let refused = blockhaul(&["compat", "qemu-storage-daemon", "--blockdev", "vmdk,node-name=x"]);
    assert!(text(&refused.stderr).contains("'driver' does not accept value 'vmdk'"), "{refused:?}");
}

#[test]
fn nodes_of_a_throttle_group_share_its_limits() {
    let daemon = Daemon::ours(&[
        "--object",
        "throttle-group,id=g,limits.bps-write=1M,limits.bps-write-max=1M",
        "--blockdev",
        "throttle,node-name=t,throttle-group=g,file.driver=file,file.filename=t.raw",
        "--nbd-server",
        "addr.type=unix,addr.path=nbd",
        "--export",
        "nbd,id=e,node-name=t,writable=on",
    ]);
    let mut qmp = Qmp::connect(&daemon.socket);
    let file = json!({ "driver": "file", "filename": "small.raw" });
    let other =
        json!({ "driver": "throttle", "node-name": "u", "throttle-group": "g", "file": file });
    qmp.succeeds("blockdev-add", other);
    let export = json!({ "type": "nbd", "id": "u", "node-name": "u", "writable": true });
    qmp.succeeds("block-export-add", export);
    let started = Instant::now();
    // 1 MiB passes at once, and another 512 KiB in half a second.
    for (name, len) in [("t", "1M"), ("u", "512k")] {
        let socket = daemon.scratch.file("nbd");
        let to = format!("nbd+unix:///{name}?socket={}", socket.display());
        succeed(&["copy", "--no-progress", "--range", &format!("0:{len}"), "random:1M", &to]);
    }
    assert!(started.elapsed() >= Duration::from_millis(490), "{:?}", started.elapsed());
    assert_eq!(
        qmp.fails("object-del", json!({ "id": "g" })),
        "object 'g' is in use, can not be deleted"
    );
    for wrong in [
        json!({ "iops-total": 1, "iops-read": 1 }),
        json!({ "iops-total-max": 1 }),
        json!({ "iops-total": 2, "iops-total-max": 1 }),
        json!({ "ips": 1 }),
    ] {
        let group = json!({ "qom-type": "throttle-group", "id": "h", "limits": wrong });
        qmp.fails("object-add", group);
    }
    for id in ["e", "u"] {
        qmp.succeeds("block-export-del", json!({ "id": id }));
    }
    for node in ["t", "u"] {
        qmp.succeeds("blockdev-del", json!({ "node-name": node }));
    }
    qmp.succeeds("object-del", json!({ "id": "g" }));
    let node =
        json!({ "driver": "throttle", "node-name": "v", "throttle-group": "g", "file": "x" });
    assert_eq!(qmp.fails("blockdev-add", node), "Throttle group 'g' does not exist");
}

/// qemu-storage-daemon, ours, with one client, by these words and through this script of a shell.
fn daemon_of_one_client(script: &str, chardev: &str) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", script, "sh", OURS, "compat", "qemu-storage-daemon"]);
    command.args(["--chardev", chardev, "--monitor", "c", "--blockdev", "null-co,node-name=n"]);
    command
}

/// The daemon with no more done.
const RUN: &str = "exec \"$@\"";

#[test]
fn qemus_daemon_serves_the_client_of_an_inherited_socket() {
    let (client, server) = UnixStream::pair().unwrap();
    let script = "exec 3<&0 </dev/null; exec \"$@\"";
    let mut command = daemon_of_one_client(script, "socket,id=c,fd=3");
    let mut child = ChildGuard(command.stdin(OwnedFd::from(server)).spawn().unwrap());
    // Its socket is closed here: a daemon that fails ends the stream.
    drop(command);
    let mut qmp = Qmp::over(client);
    qmp.succeeds("qmp_capabilities", json!({}));
    let nodes = qmp.succeeds("query-named-block-nodes", json!({}));
    assert_eq!(nodes[0]["node-name"], "n", "{nodes}");
    qmp.succeeds("quit", json!({}));
    while qmp.line().is_some() {}
    assert!(child.0.wait().unwrap().success());
    let mut command = daemon_of_one_client(RUN, "socket,id=c,fd=9");
    let refused = tools::output(&mut command, LIMIT).unwrap();
    assert!(text(&refused.stderr).contains("descriptor 9 is not a socket"), "{refused:?}");
}

#[test]
fn qemus_daemon_connects_to_a_client_that_listens() {
    let scratch = ScratchDir::new().unwrap();
    let path = scratch.socket("client");
    let chardev = format!("socket,id=c,path={}", path.display());
    let mut command = daemon_of_one_client(RUN, &chardev);
    let refused = tools::output(&mut command, LIMIT).unwrap();
    assert!(text(&refused.stderr).contains("Failed to connect to"), "{refused:?}");
    let listener = UnixListener::bind(&path).unwrap();
    let mut child = ChildGuard(command.spawn().unwrap());
    let mut qmp = Qmp::over(listener.accept().unwrap().0);
    qmp.succeeds("qmp_capabilities", json!({}));
    qmp.succeeds("quit", json!({}));
    assert!(child.0.wait().unwrap().success());
}

#[test]
fn qemus_daemon_has_a_monitor_at_standard_input_and_output() {
    let scratch = ScratchDir::new().unwrap();
    let input = scratch.file("input");
    // A file, as in `<<` of shells: its end is there at once.
    std::fs::write(
        &input,
        "{'execute':'qmp_capabilities'}{'execute':'query-status','id':[1,2]}{'execute':'quit'}",
    )
    .unwrap();
    let script = format!("exec \"$@\" <'{}'", input.display());
    let mut command = daemon_of_one_client(&script, "stdio,id=c");
    let output = tools::output(&mut command, LIMIT).unwrap();
    assert!(output.status.success(), "{output:?}");
    let lines = text(&output.stdout);
    let lines: Vec<_> = lines.lines().collect();
    assert!(lines[0].starts_with("{\"QMP\": {"), "{lines:?}");
    let status = "{\"id\": [1, 2], \"return\": {\"running\": true, \"status\": \"running\"}}";
    assert_eq!(lines[1..], ["{\"return\": {}}", status, "{\"return\": {}}"]);
    let mut both = daemon_of_one_client(RUN, "stdio,id=c");
    let refused = tools::output(both.arg("--daemonize"), LIMIT).unwrap();
    assert!(text(&refused.stderr).contains("--daemonize: a monitor cannot"), "{refused:?}");
}

/// Commands that both daemons get, after a comment what each is about.
fn script() -> Vec<(&'static str, Value)> {
    let backup = |more: Value| {
        let mut backup = json!({ "job-id": "j", "device": "a", "target": "t", "sync": "full" });
        backup.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        ("blockdev-backup", backup)
    };
    let raw = |node: &str, file: &str| {
        let file = json!({ "driver": "file", "filename": file });
        ("blockdev-add", json!({ "driver": "raw", "node-name": node, "file": file }))
    };
    let bitmap =
        |command: &'static str, name: &str| (command, json!({ "node": "a", "name": name }));
    let export = |id: &str, node: &str, kind: &str| {
        ("block-export-add", json!({ "type": kind, "id": id, "node-name": node }))
    };
    vec![
        ("query-jobs", json!({ "x": 1 })),
        ("nonesuch", json!({})),
        ("blockdev-add", json!({})),
        ("blockdev-add", json!({ "driver": "nonesuch", "node-name": "x" })),
        ("blockdev-add", json!({ "driver": "file", "node-name": "x", "filename": 3 })),
        ("blockdev-add", json!({ "driver": "file", "node-name": "x", "filename": "/no/such" })),
        ("blockdev-add", json!({ "driver": "file", "node-name": "1x", "filename": "a.raw" })),
        ("blockdev-add", json!({ "driver": "file", "filename": "a.raw" })),
        ("blockdev-add", json!({ "driver": "raw", "node-name": "x", "file": "nope" })),
        raw("a", "a.raw"),
        raw("a", "a.raw"),
        raw("t", "t.raw"),
        raw("small", "small.raw"),
        ("blockdev-del", json!({ "node-name": "zz" })),
        export("e", "a", "nbd"),
        ("nbd-server-stop", json!({})),
        ("nbd-server-start", json!({ "addr": { "type": "unix", "data": { "path": "nbd" } } })),
        ("nbd-server-start", json!({ "addr": { "type": "unix", "data": { "path": "nbd" } } })),
        export("e", "a", "nbd"),
        export("e", "a", "nbd"),
        export("f", "a", "nbd"),
        export("f", "zz", "nbd"),
        export("f", "a", "foo"),
        export("1 2", "a", "nbd"),
        ("query-block-exports", json!({})),
        ("nbd-server-add", json!({ "device": "a", "name": "b" })),
        ("nbd-server-remove", json!({ "name": "b" })),
        ("nbd-server-remove", json!({ "name": "b" })),
        ("blockdev-del", json!({ "node-name": "a" })),
        ("block-export-del", json!({ "id": "q" })),
        ("block-export-del", json!({ "id": "e" })),
        bitmap("block-dirty-bitmap-add", "m"),
        bitmap("block-dirty-bitmap-add", "m"),
        bitmap("block-dirty-bitmap-add", ""),
        bitmap("block-dirty-bitmap-remove", "zz"),
        bitmap("block-dirty-bitmap-disable", "m"),
        bitmap("block-dirty-bitmap-enable", "m"),
        ("block-dirty-bitmap-add", json!({ "node": "a", "name": "n", "granularity": 1000 })),
        ("block-dirty-bitmap-merge", json!({ "node": "a", "target": "m", "bitmaps": ["zz"] })),
        backup(json!({ "job-id": "1j" })),
        backup(json!({ "target": "zz" })),
        backup(json!({ "device": "zz" })),
        backup(json!({ "target": "a" })),
        backup(json!({ "sync": "foo" })),
        backup(json!({ "sync": "incremental" })),
        backup(json!({ "sync": "bitmap", "bitmap": "m" })),
        backup(json!({ "sync": "incremental", "bitmap": "m", "bitmap-mode": "never" })),
        backup(json!({ "bitmap": "m", "bitmap-mode": "never" })),
        backup(json!({ "bitmap": "m" })),
        backup(json!({ "sync": "incremental", "bitmap": "zz" })),
        backup(json!({ "bitmap-mode": "always" })),
        backup(json!({ "speed": -1 })),
        backup(json!({ "target": "small" })),
        (
            "blockdev-mirror",
            json!({ "job-id": "m", "device": "a", "target": "t", "sync": "bitmap" }),
        ),
        ("job-cancel", json!({ "id": "j" })),
        ("block-job-cancel", json!({ "device": "j" })),
        ("transaction", json!({ "actions": [{ "type": "foo", "data": {} }] })),
        ("transaction", json!({ "actions": [{ "type": "blockdev-mirror", "data": {} }] })),
        backup(json!({ "speed": 1 << 20, "auto-finalize": false, "auto-dismiss": false })),
        ("job-complete", json!({ "id": "j" })),
        ("job-finalize", json!({ "id": "j" })),
        ("job-dismiss", json!({ "id": "j" })),
        ("job-resume", json!({ "id": "j" })),
        ("job-pause", json!({ "id": "j" })),
        ("job-pause", json!({ "id": "j" })),
        ("block-job-resume", json!({ "device": "j" })),
        ("block-job-cancel", json!({ "device": "j" })),
    ]
}

/// The answers of a daemon to the script, and the events until its job has concluded. QEMU pauses
/// jobs for moments when nodes change; these events are left out.
fn answers(daemon: &Daemon) -> (Vec<String>, Vec<String>) {
    let mut qmp = Qmp::connect(&daemon.socket);
    let all = script().into_iter().map(|(command, arguments)| {
        let answer = qmp.ask(command, arguments.clone());
        format!("{command} {arguments}: {answer}")
    });
    let all: Vec<String> = all.collect();
    let mut events = qmp.until(|event| event["data"]["status"] == "concluded");
    events.retain(|event| !["created", "running", "paused", "null"].contains(&event.as_str()));
    (all, events)
}

#[test]
fn qemus_daemon_answers_the_same() {
    let peer = require_peer!("qemu-storage-daemon");
    let ours = Daemon::ours(&[]);
    let theirs = Daemon::start(peer.command(), &[]);
    let (ours, our_events) = answers(&ours);
    let (theirs, their_events) = answers(&theirs);
    for (ours, theirs) in ours.iter().zip(&theirs) {
        assert_eq!(ours, theirs);
    }
    assert_eq!(our_events, their_events);
}

#[test]
fn qemus_python_library_makes_a_backup() {
    let Some(python) = tools::python_with("qemu.qmp") else { return };
    let served = Served::new(&[]);
    let path = served.target(&mut served.connect(), "t");
    let program = "
import asyncio, sys
from qemu.qmp import QMPClient, EventListener

async def main():
    qmp = QMPClient('test')
    await qmp.connect(sys.argv[1])
    with qmp.listener(('BLOCK_JOB_COMPLETED',)) as listener:
        arguments = {'job-id': 'b', 'device': 'a', 'target': 't', 'sync': 'full'}
        await qmp.execute('blockdev-backup', arguments)
        event = await listener.get()
        assert 'error' not in event['data'], event
    try:
        await qmp.execute('job-cancel', {'id': 'b'})
    except Exception as error:
        print(error)
    await qmp.disconnect()

asyncio.run(main())
";
    let mut command = Command::new(python);
    command.args(["-c", program]).arg(&served.socket);
    let output = tools::output(&mut command, LIMIT).unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("Job not found"), "{}", text(&output.stdout));
    assert_holds(path.to_str().unwrap(), 1);
}
