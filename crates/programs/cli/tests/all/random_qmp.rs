//! Random commands of QEMU's monitor protocol, from a printed seed, beside a client that writes and
//! verifies. Arguments are taken from the state: nodes, bitmaps, jobs, exports. Each command has one
//! answer: a result, or an error with a class and a text. No read is wrong, the target of a completed
//! backup is the disk of its moment, the disk has everything at the end, and `quit` ends the server.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use blockhaul_testkit::peer::Conversation;
use blockhaul_testkit::rng::{Rng, seed};
use blockhaul_testkit::tools::{self, PeerServer, ScratchDir};
use blockhaul_wire::{CommandCode, ReplyForm};
use serde_json::{Value, json};

use crate::qmp::{Qmp, assert_advises_no_command_line};
use crate::random_doors::{Story, assert_same};
use crate::served_disk::{OURS, succeed};

const SIZE: usize = 1 << 20;

/// Names that commands choose from, now and then of nothing that is there.
const NODES: &[&str] = &["a", "b", "n0", "n1", "n2", "n3", "n4", "n5"];
const JOBS: &[&str] = &["j0", "j1", "j2", "j3", "j4"];
const BITMAPS: &[&str] = &["m0", "m1", "m2"];
const EXPORTS: &[&str] = &["e0", "e1", "e2", "a"];
const GROUPS: &[&str] = &["g0", "g1"];

/// What has happened.
#[derive(Debug, Default)]
struct Counts {
    /// Commands that may change something.
    commands: u64,
    succeeded: BTreeMap<String, u64>,
    failed: BTreeMap<String, u64>,
    queries: u64,
    requests: u64,
    backups: u64,
    moves: u64,
    sessions: u64,
}

/// A client that writes to the disk `a`, and reads what it has written.
struct Guest {
    disk: Arc<Mutex<Vec<u8>>>,
    requests: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Guest {
    fn start(server: &PeerServer, disk: Vec<u8>, seed: u64) -> Guest {
        let mut client = Conversation::connect(server.socket()).unwrap();
        client.open("a", ReplyForm::Structured).unwrap();
        let disk = Arc::new(Mutex::new(disk));
        let stop = Arc::new(AtomicBool::new(false));
        let requests = Arc::new(AtomicU64::new(0));
        let (model, stopped, count) = (disk.clone(), stop.clone(), requests.clone());
        let thread = std::thread::spawn(move || {
            let mut rng = Rng::new(seed);
            while !stopped.load(Ordering::Relaxed) {
                request(&mut client, &mut model.lock().unwrap(), &mut rng);
                count.fetch_add(1, Ordering::Relaxed);
                std::thread::sleep(Duration::from_micros(rng.below(3000)));
            }
        });
        Guest { disk, requests, stop, thread }
    }

    /// The disk as the client has left it, and the number of its requests.
    fn end(self) -> (Vec<u8>, u64) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap();
        let disk = self.disk.lock().unwrap().clone();
        (disk, self.requests.load(Ordering::Relaxed))
    }
}

fn request(client: &mut Conversation, disk: &mut [u8], rng: &mut Rng) {
    let at = rng.below(SIZE as u64);
    let most = *rng.pick(&[512, 8000, 100_000]);
    let len = rng.between(1, most.min(SIZE as u64 - at));
    let range = at as usize..(at + len) as usize;
    let kind = *rng.pick(&[
        CommandCode::Write,
        CommandCode::Write,
        CommandCode::WriteZeroes,
        CommandCode::Flush,
    ]);
    let (from, length) = if kind == CommandCode::Flush { (0, 0) } else { (at, len) };
    let header = client.request(kind, from, length);
    let mut payload = Vec::new();
    match kind {
        CommandCode::Write => {
            rng.fill(&mut disk[range.clone()]);
            payload = disk[range.clone()].to_vec();
        }
        CommandCode::WriteZeroes => disk[range.clone()].fill(0),
        _ => {}
    }
    let answer = client.ask(&header, &payload).unwrap();
    assert_eq!(answer.error, 0, "{kind:?} of {len} bytes at {at}: {}", answer.text);
    let found = client.read(at, len as usize).unwrap();
    assert_same(&found, &disk[range], || format!("the disk at {at}"));
}

/// A server, its monitor, and what is known of both.
struct World<'a> {
    rng: Rng,
    scratch: ScratchDir,
    qmp: Qmp,
    guest: Guest,
    /// Reads the disk of the guest.
    reader: Conversation,
    counts: &'a mut Counts,
    /// Names that are there.
    nodes: Vec<String>,
    jobs: Vec<String>,
    bitmaps: Vec<String>,
    exports: Vec<String>,
    /// The node that the guest writes to.
    node: String,
    /// Backups that run: the moment, and the file of the target.
    moments: BTreeMap<String, (PathBuf, Vec<u8>)>,
    /// The same for backups whose first event did not come yet.
    new_moments: BTreeMap<String, (PathBuf, Vec<u8>)>,
    /// Jobs begin: their events wait until their moment is known.
    begins: bool,
    /// The files of nodes that are raw.
    files: BTreeMap<String, PathBuf>,
    story: Story,
}

impl World<'_> {
    fn file(&mut self) -> (PathBuf, bool) {
        let name = *self.rng.pick(&["a.raw", "b.raw", "t0.raw", "t1.raw", "t2.raw", "q0", "q1"]);
        (self.scratch.file(name), name.starts_with('q'))
    }

    /// One of the names that are there, mostly.
    fn any(&mut self, names: Vec<String>, all: &[&str]) -> String {
        if names.is_empty() || self.rng.chance(12) {
            return self.rng.pick(all).to_string();
        }
        self.rng.pick(&names).clone()
    }

    fn any_node(&mut self) -> String {
        self.any(self.nodes.clone(), NODES)
    }

    fn any_job(&mut self) -> String {
        self.any(self.jobs.clone(), JOBS)
    }

    fn any_bitmap(&mut self) -> Value {
        let bitmaps = self.any(self.bitmaps.clone(), BITMAPS);
        json!(bitmaps)
    }

    /// Sends a command: it has one answer.
    fn ask(&mut self, command: &str, arguments: Value) -> Result<Value, String> {
        self.story.add(format!("{command} {arguments}"));
        let mut answer = self.qmp.ask(command, arguments.clone());
        self.note_events();
        let what = || format!("{command} {arguments}: {answer}");
        let returned = answer.get("return").is_some();
        match answer.get("error") {
            None => {
                assert!(returned && answer.as_object().unwrap().len() == 1, "{}", what());
                self.story.add("  done".to_string());
                Ok(answer["return"].take())
            }
            Some(error) => {
                assert!(!returned, "{}", what());
                let class = error["class"].as_str().unwrap_or_default();
                let desc = error["desc"].as_str().unwrap_or_default();
                let known = [
                    "GenericError",
                    "CommandNotFound",
                    "DeviceNotActive",
                    "DeviceNotFound",
                    "KVMMissingCap",
                ];
                assert!(known.contains(&class) && !desc.is_empty(), "{}", what());
                assert_advises_no_command_line(desc);
                let members = error.as_object().unwrap().len();
                assert_eq!(members, 2, "{}", what());
                self.story.add(format!("  {desc}"));
                Err(desc.to_string())
            }
        }
    }

    /// A completed backup has the disk of its moment.
    fn note_events(&mut self) {
        if self.begins {
            return;
        }
        for event in self.qmp.take_events() {
            let name = event["event"].as_str().unwrap_or_else(|| panic!("{event}"));
            assert!(event["timestamp"]["seconds"].is_i64(), "{event}");
            if event["data"]["status"] == "created" {
                let job = event["data"]["id"].as_str().unwrap();
                self.moments.remove(job);
                self.moments.extend(self.new_moments.remove_entry(job));
            }
            if name != "BLOCK_JOB_COMPLETED" && name != "BLOCK_JOB_CANCELLED" {
                continue;
            }
            let job = event["data"]["device"].as_str().unwrap();
            let Some((file, moment)) = self.moments.remove(job) else { continue };
            if name == "BLOCK_JOB_COMPLETED" && event["data"].get("error").is_none() {
                let found = fs::read(&file).unwrap();
                assert_same(&found, &moment, || format!("the target of {job}: {event}"));
                self.counts.backups += 1;
            }
        }
    }

    /// Looks at the state.
    fn look(&mut self) {
        let names = |list: &Value, member: &str| -> Vec<String> {
            let all = list.as_array().unwrap().iter();
            all.filter_map(|one| one[member].as_str().map(String::from)).collect()
        };
        let nodes = self.ask("query-named-block-nodes", json!({})).unwrap();
        self.nodes = names(&nodes, "node-name");
        let bitmaps = nodes.as_array().unwrap().iter().flat_map(names_of_bitmaps);
        self.bitmaps = bitmaps.collect();
        let jobs = self.ask("query-jobs", json!({})).unwrap();
        self.jobs = names(&jobs, "id");
        let exports = self.ask("query-block-exports", json!({})).unwrap();
        self.exports = names(&exports, "id");
        self.ask("query-block-jobs", json!({})).unwrap();
        self.node = self.guest_node();
        self.counts.queries += 5;
    }

    /// The whole disk is as the guest has made it.
    fn verify(&mut self) {
        let disk = self.guest.disk.clone();
        let disk = disk.lock().unwrap();
        let found = self.reader.read(0, SIZE).unwrap();
        assert_same(&found, &disk, || "the disk of the guest".to_string());
    }

    fn guest_node(&mut self) -> String {
        let exports = self.ask("query-block-exports", json!({})).unwrap();
        let own = exports.as_array().unwrap().iter().find(|one| one["id"] == "a");
        own.unwrap()["node-name"].as_str().unwrap().to_string()
    }

    fn backup(&mut self) -> Value {
        let device = if self.rng.chance(60) { self.node.clone() } else { self.any_node() };
        let sync =
            *self.rng.pick(&["full", "full", "full", "top", "incremental", "bitmap", "none"]);
        let mut backup = json!({ "device": device, "target": self.any_node(), "sync": sync });
        if self.rng.chance(90) {
            backup["job-id"] = json!(self.rng.pick(JOBS));
        }
        if ["incremental", "bitmap"].contains(&sync) {
            backup["bitmap"] = self.any_bitmap();
        }
        if sync == "bitmap" {
            backup["bitmap-mode"] = json!(self.rng.pick(&["on-success", "never", "always"]));
        }
        self.add_common(&mut backup);
        if self.rng.chance(5) {
            backup["compress"] = json!(true);
        }
        backup
    }

    fn add_common(&mut self, job: &mut Value) {
        for (name, percent) in [("auto-finalize", 10), ("auto-dismiss", 10)] {
            if self.rng.chance(percent) {
                job[name] = json!(false);
            }
        }
        if self.rng.chance(40) {
            job["speed"] = json!(self.rng.pick(&[0_u64, 65536, 1 << 20, 16 << 20]));
        }
        for name in ["on-source-error", "on-target-error"] {
            if self.rng.chance(20) {
                job[name] = json!(self.rng.pick(&["report", "ignore", "enospc", "stop"]));
            }
        }
    }

    fn bitmap_action(&mut self) -> (String, Value) {
        let node = if self.rng.chance(60) { self.node.clone() } else { self.any_node() };
        let verb = *self.rng.pick(&["add", "add", "remove", "clear", "enable", "disable", "merge"]);
        let command = format!("block-dirty-bitmap-{verb}");
        let arguments = match verb {
            "add" => {
                let granularity = *self.rng.pick(&[4096_u64, 65536, 65536, 1000]);
                let persistent = self.rng.chance(30);
                let name = self.rng.pick(BITMAPS);
                json!({ "node": node, "name": name, "granularity": granularity,
                        "persistent": persistent, "disabled": self.rng.chance(10) })
            }
            "merge" => {
                json!({ "node": node, "target": self.any_bitmap(), "bitmaps": [self.any_bitmap()] })
            }
            _ => json!({ "node": node, "name": self.any_bitmap() }),
        };
        (command, arguments)
    }

    fn job_command(&mut self) -> (String, Value) {
        let job = self.any_job();
        let old = self.rng.chance(40);
        let verbs: &[&str] = &["cancel", "complete", "pause", "resume", "finalize", "dismiss"];
        let verb =
            *self.rng.pick(&[verbs, &["resume", "set-speed", "change", "complete"]].concat());
        let by_id = ["finalize", "dismiss", "change"].contains(&verb);
        match verb {
            "set-speed" => {
                let speed = *self.rng.pick(&[0_u64, 0, 65536, 4 << 20]);
                ("block-job-set-speed".into(), json!({ "device": job, "speed": speed }))
            }
            "change" => {
                let mode = *self.rng.pick(&["background", "write-blocking"]);
                (
                    "block-job-change".into(),
                    json!({ "id": job, "type": "mirror", "copy-mode": mode }),
                )
            }
            _ if old && by_id => (format!("block-job-{verb}"), json!({ "id": job })),
            "cancel" if old => {
                ("block-job-cancel".into(), json!({ "device": job, "force": self.rng.chance(50) }))
            }
            _ if old => (format!("block-job-{verb}"), json!({ "device": job })),
            _ => (format!("job-{verb}"), json!({ "id": job })),
        }
    }

    fn node_command(&mut self) -> (String, Value) {
        if self.nodes.len() > 5 && self.rng.chance(60) || self.rng.chance(10) {
            return ("blockdev-del".into(), json!({ "node-name": self.any_node() }));
        }
        let (path, is_image) = self.file();
        let below = json!({ "driver": "file", "filename": path });
        let below = if self.rng.chance(10) { json!(self.any_node()) } else { below };
        let node = *self.rng.pick(NODES);
        let mut added = match self.rng.below(10) {
            0 => {
                json!({ "driver": "copy-before-write", "file": self.any_node(), "target": self.any_node() })
            }
            1 => json!({ "driver": "snapshot-access", "file": self.any_node() }),
            2 => {
                json!({ "driver": "throttle", "file": self.any_node(), "throttle-group": self.rng.pick(GROUPS) })
            }
            3 => json!({ "driver": "null-co", "size": SIZE, "read-zeroes": true }),
            4 => json!({ "driver": "file", "filename": path }),
            _ => json!({ "driver": if is_image { "qcow2" } else { "raw" }, "file": below }),
        };
        added["node-name"] = json!(node);
        // What is written to null-co is lost.
        if added["driver"] == "null-co" || self.rng.chance(20) {
            added["read-only"] = json!(true);
        }
        ("blockdev-add".into(), added)
    }

    fn export_command(&mut self) -> (String, Value) {
        let id = self.any(self.exports.clone(), EXPORTS);
        match self.rng.below(6) {
            0 | 1 => {
                let new = *self.rng.pick(EXPORTS);
                let export = json!({ "type": "nbd", "id": new, "node-name": self.any_node(),
                                     "name": new, "writable": self.rng.chance(50) });
                ("block-export-add".into(), export)
            }
            2 | 3 => (
                "block-export-del".into(),
                json!({ "id": id, "mode": self.rng.pick(&["safe", "hard"]) }),
            ),
            4 => (
                "nbd-server-add".into(),
                json!({ "device": self.any_node(), "writable": self.rng.chance(50) }),
            ),
            _ => ("nbd-server-remove".into(), json!({ "name": id, "mode": "safe" })),
        }
    }

    /// A random command, and its answer.
    fn step(&mut self) {
        if self.rng.chance(30) {
            self.look();
        }
        let kind = match self.rng.below(20) {
            // Nothing to control.
            9..=13 if self.jobs.is_empty() && self.rng.chance(90) => self.rng.between(4, 8),
            kind => kind,
        };
        let (command, arguments) = match kind {
            0..=3 => self.node_command(),
            4..=6 => ("blockdev-backup".to_string(), self.backup()),
            7..=8 => {
                let device = if self.rng.chance(60) { self.node.clone() } else { self.any_node() };
                let sync = *self.rng.pick(&["full", "full", "top"]);
                let mut mirror = json!({ "job-id": self.rng.pick(JOBS), "device": device, "target": self.any_node(),
                    "sync": sync });
                if self.rng.chance(40) {
                    mirror["copy-mode"] = json!(self.rng.pick(&["background", "write-blocking"]));
                }
                self.add_common(&mut mirror);
                ("blockdev-mirror".to_string(), mirror)
            }
            9..=13 => self.job_command(),
            14..=15 => self.bitmap_action(),
            16 => {
                let count = self.rng.between(1, 4);
                let actions: Vec<_> = (0..count)
                    .map(|_| match self.rng.below(8) {
                        0 => json!({ "type": "abort", "data": {} }),
                        1..=3 => json!({ "type": "blockdev-backup", "data": self.backup() }),
                        _ => {
                            let (kind, data) = self.bitmap_action();
                            json!({ "type": kind, "data": data })
                        }
                    })
                    .collect();
                let mode = *self.rng.pick(&["individual", "grouped"]);
                let properties = json!({ "completion-mode": mode });
                ("transaction".to_string(), json!({ "actions": actions, "properties": properties }))
            }
            17..=18 => self.export_command(),
            _ => {
                let id = *self.rng.pick(GROUPS);
                let kind = *self.rng.pick(&["throttle-group", "throttle-group", "iothread"]);
                match self.rng.below(3) {
                    0 => ("object-del".to_string(), json!({ "id": id })),
                    _ => ("object-add".to_string(), json!({ "qom-type": kind, "id": id })),
                }
            }
        };
        self.counts.commands += 1;
        let done = self.carry_out(&command, arguments);
        self.verify();
        let counted = if done { &mut self.counts.succeeded } else { &mut self.counts.failed };
        *counted.entry(command).or_default() += 1;
    }

    /// Sends a command. While it begins backups, the guest waits, so that their moment is known.
    fn carry_out(&mut self, command: &str, arguments: Value) -> bool {
        let backups: Vec<Value> = match command {
            "blockdev-backup" => vec![arguments.clone()],
            "transaction" => {
                let actions = arguments["actions"].as_array().unwrap().iter();
                let backups = actions.filter(|action| action["type"] == "blockdev-backup");
                backups.map(|action| action["data"].clone()).collect()
            }
            "blockdev-add" => {
                let done = self.ask(command, arguments.clone()).is_ok();
                if done {
                    let node = arguments["node-name"].as_str().unwrap().to_string();
                    let file = &arguments["file"]["filename"];
                    let file = if file.is_null() { &arguments["filename"] } else { file };
                    match file.as_str() {
                        Some(path) if arguments["driver"] != "qcow2" => {
                            self.files.insert(node, path.into())
                        }
                        _ => self.files.remove(&node),
                    };
                }
                return done;
            }
            "blockdev-mirror" => {
                self.begins = true;
                let done = self.ask(command, arguments.clone()).is_ok();
                let target = self.files.get(arguments["target"].as_str().unwrap()).cloned();
                self.moments.retain(|_, (file, _)| !done || Some(&*file) != target.as_ref());
                self.begins = false;
                self.note_events();
                return done;
            }
            _ => return self.ask(command, arguments).is_ok(),
        };
        let disk = self.guest.disk.clone();
        let disk = disk.lock().unwrap();
        let before = self.guest_node();
        self.begins = true;
        let done = self.ask(command, arguments).is_ok();
        let is_sure = before == self.guest_node();
        for backup in backups.iter().filter(|_| done) {
            let text = |name: &str| backup[name].as_str().unwrap_or_default().to_string();
            let Some(file) = self.files.get(&text("target")).cloned() else { continue };
            // It is written again.
            self.moments.retain(|_, (other, _)| *other != file);
            let is_whole = ["full", "top"].contains(&text("sync").as_str());
            if is_sure && is_whole && text("device") == before && !text("job-id").is_empty() {
                self.new_moments.insert(text("job-id"), (file, disk.clone()));
            }
        }
        self.begins = false;
        self.note_events();
        self.new_moments.clear();
        done
    }

    /// Ends jobs; everything is on the disk.
    fn end(mut self, server: PeerServer) {
        for _ in 0..1000 {
            let jobs = self.ask("query-jobs", json!({})).unwrap();
            let jobs = jobs.as_array().unwrap().clone();
            if jobs.is_empty() {
                break;
            }
            for job in jobs {
                let id = job["id"].clone();
                let verb = if job["status"] == "concluded" { "job-dismiss" } else { "job-cancel" };
                let _ = self.ask(verb, json!({ "id": id }));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        let jobs = self.ask("query-jobs", json!({})).unwrap();
        assert_eq!(jobs, json!([]), "jobs do not end");
        let node = self.guest_node();
        let (disk, requests) = self.guest.end();
        self.counts.requests += requests;
        self.counts.sessions += 1;
        self.counts.moves += u64::from(node != "a");
        let target = self.scratch.file("last.raw");
        fs::write(&target, vec![0; SIZE]).unwrap();
        let file = json!({ "driver": "file", "filename": target });
        self.qmp.succeeds(
            "blockdev-add",
            json!({ "driver": "raw", "node-name": "last", "file": file }),
        );
        let backup = json!({ "job-id": "last", "device": node, "target": "last", "sync": "full" });
        self.qmp.succeeds("blockdev-backup", backup);
        tools::until("the last backup ends", || {
            self.qmp.succeeds("query-jobs", json!({})) == json!([])
        });
        assert_same(&fs::read(&target).unwrap(), &disk, || "the last backup".to_string());
        self.qmp.succeeds("quit", json!({}));
        assert!(self.qmp.ends());
        let pid = server.pid().to_string();
        tools::until("the server ends", || !tools::is_running(&pid));
        let said = server.said();
        assert!(!said.contains("panicked"), "{said}");
        let own = if node == "a" {
            Some(self.scratch.file("a.raw"))
        } else {
            self.files.get(&node).cloned()
        };
        if let Some(own) = own {
            assert_same(&fs::read(own).unwrap(), &disk, || format!("the file of {node:?}"));
        }
    }
}

fn names_of_bitmaps(node: &Value) -> Vec<String> {
    let bitmaps = node["dirty-bitmaps"].as_array().cloned().unwrap_or_default();
    bitmaps.iter().filter_map(|one| one["name"].as_str().map(String::from)).collect()
}

/// One server, until this many commands were sent.
fn session(seed: u64, commands: u64, counts: &mut Counts) {
    let mut rng = Rng::new(seed);
    let scratch = ScratchDir::new().unwrap();
    let path = |name: &str| scratch.file(name).to_str().unwrap().to_string();
    let disk = rng.disk(SIZE, 60_000, 60);
    for name in ["a.raw", "b.raw", "t0.raw", "t1.raw", "t2.raw"] {
        fs::write(scratch.file(name), &disk).unwrap();
    }
    for name in ["q0", "q1"] {
        succeed(&["create", &format!("qcow2:{}", path(name)), &SIZE.to_string()]);
    }
    fs::create_dir(scratch.file("bitmaps")).unwrap();
    let socket = scratch.socket("qmp");
    let exports = ["a", "b"].map(|name| format!("{name}={}", path(&format!("{name}.raw"))));
    let bitmaps = path("bitmaps");
    let args = ["--qmp", socket.to_str().unwrap(), "--bitmaps", &bitmaps, "--workers", "2"];
    let args = [&args[..], &["--export", &exports[0], "--export", &exports[1]]].concat();
    let server = PeerServer::blockhaul(OURS.as_ref(), &scratch.socket("nbd"), &args).unwrap();
    let qmp = Qmp::connect(&socket);
    let guest = Guest::start(&server, disk, rng.number());
    let mut reader = Conversation::connect(server.socket()).unwrap();
    reader.open("a", ReplyForm::Structured).unwrap();
    let files =
        ["a", "b"].map(|name| (name.to_string(), scratch.file(&format!("{name}.raw")))).into();
    let mut world = World {
        rng,
        scratch,
        qmp,
        guest,
        reader,
        counts,
        files,
        nodes: Vec::new(),
        jobs: Vec::new(),
        bitmaps: Vec::new(),
        exports: Vec::new(),
        node: "a".to_string(),
        moments: BTreeMap::new(),
        new_moments: BTreeMap::new(),
        begins: false,
        story: Story::of(seed),
    };
    for (node, file) in [("n0", "t0.raw"), ("n1", "t1.raw"), ("n2", "t2.raw"), ("n3", "q0")] {
        let below = json!({ "driver": "file", "filename": world.scratch.file(file) });
        let driver = if node == "n3" { "qcow2" } else { "raw" };
        let added = json!({ "driver": driver, "node-name": node, "file": below });
        assert!(world.carry_out("blockdev-add", added));
    }
    world.look();
    for _ in 0..commands {
        world.step();
    }
    world.end(server);
}

#[test]
fn random_commands_have_one_answer_and_no_wrong_effect() {
    // The short form always makes the same choices.
    let is_random = tools::long() || std::env::var_os("BLOCKHAUL_SEED").is_some();
    let first = if is_random { seed() } else { 1 };
    println!("BLOCKHAUL_SEED={first:#x}");
    let (commands, sessions) = if tools::long() { (250, 24) } else { (50, 1) };
    let mut counts = Counts::default();
    for number in 0..sessions {
        session(first.wrapping_add(number), commands, &mut counts);
        if tools::long() {
            println!("{counts:?}");
        }
    }
    println!("{counts:#?}");
}
