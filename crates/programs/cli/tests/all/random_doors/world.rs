//! A server with its doors, and everything that must be true of it.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use blockhaul_testkit::history::History;
use blockhaul_testkit::rng::Rng;
use blockhaul_testkit::tools::{self, PeerProgram, PeerServer, text};
use serde_json::{Value, json};

use super::clients::{Door, Owner, RequestInFlight, assert_same};
use super::files::{Files, Form, Kind, SIZE};
use super::rules::{self, Held, Use, fit};
use super::{Counts, Story};
use crate::qmp::Qmp;
use crate::served_disk::{LIMIT, OURS, blockhaul};

/// Something that takes longer hangs.
const PATIENCE: Duration = Duration::from_secs(60);

/// A running server, and the model of its doors.
pub struct World<'a> {
    rng: Rng,
    files: Files,
    counts: &'a mut Counts,
    server: PeerServer,
    starts: u32,
    control: [Control; 2],
    qmp: Qmp,
    doors: Vec<Door>,
    jobs: Vec<Job>,
    snapshots: Vec<(Door, Vec<u8>)>,
    /// Files that clients have left while points in time needed them.
    lingering: Vec<usize>,
    names: u32,
    /// For a failed run.
    story: Story,
}

/// A connection to the control socket.
struct Control(BufReader<UnixStream>);

/// A job that was not refused.
struct Job {
    id: u64,
    source: String,
    file: usize,
    is_mirror: bool,
    expected: Moment,
    /// Why it must not succeed.
    conflict: Option<String>,
    /// It has the target open.
    holds: bool,
    /// The target is this node.
    node: Option<String>,
    /// A second door was tried meanwhile.
    was_beside: bool,
    /// Its target was opened by others once it had ended.
    is_overtaken: bool,
}

/// A disk at a moment; each of these requests was carried out before it, or after it.
struct Moment {
    disk: Vec<u8>,
    flying: Vec<(u64, Vec<u8>)>,
}

impl Control {
    fn connect(path: &str) -> Control {
        let stream = tools::until_ok("the control socket", || UnixStream::connect(path));
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Control(BufReader::new(stream))
    }

    fn send(&mut self, request: &Value) {
        let line = format!("{request}\n");
        self.0.get_mut().write_all(line.as_bytes()).unwrap();
    }

    fn receive(&mut self, request: &Value) -> Result<Value, String> {
        let mut line = String::new();
        let received = self.0.read_line(&mut line);
        received.unwrap_or_else(|error| panic!("no answer to {request}: {error}"));
        assert!(line.ends_with('\n'), "{request}: the connection has ended");
        let answer: Value = serde_json::from_str(&line).unwrap();
        match answer["ok"].as_bool() {
            Some(true) => Ok(answer),
            _ => Err(answer["error"].as_str().unwrap().to_string()),
        }
    }

    fn ask(&mut self, request: &Value) -> Result<Value, String> {
        self.send(request);
        self.receive(request)
    }
}

impl Moment {
    fn check(&self, found: &[u8], what: &str) {
        let mut wanted = self.disk.clone();
        for (at, bytes) in &self.flying {
            let range = *at as usize..*at as usize + bytes.len();
            if found.len() == wanted.len() && found[range.clone()] == **bytes {
                wanted[range].copy_from_slice(bytes);
            }
        }
        assert_same(found, &wanted, || what.to_string());
    }
}

impl<'a> World<'a> {
    pub fn new(seed: u64, counts: &'a mut Counts) -> World<'a> {
        let mut rng = Rng::new(seed);
        let files = Files::new(&mut rng);
        let doors = [("a", 0, true), ("b", 4, true), ("c", 8, true), ("e", 1, rng.chance(50))];
        let doors = doors.map(|(name, file, writes)| {
            let usage = Use::of(files.all[file].kind, Form::Own, writes);
            let name = name.to_string();
            Door { name, owner: Owner::Export, file, form: Form::Own, usage, clients: Vec::new() }
        });
        let doors = Vec::from(doors);
        let (server, control, qmp) = start(&files, &doors, 0);
        let story = Story::of(seed);
        let (jobs, snapshots) = (Vec::new(), Vec::new());
        let mut world = World {
            rng,
            files,
            counts,
            server,
            starts: 0,
            control,
            qmp,
            doors,
            jobs,
            snapshots,
            names: 0,
            lingering: Vec::new(),
            story,
        };
        world.meet_all(true);
        world
    }

    /// Some steps, and everything is checked.
    pub fn run(&mut self, steps: u64) {
        for _ in 0..steps {
            self.step();
        }
        while !self.jobs.is_empty() {
            self.end_job(0);
        }
        self.audit();
        self.kill();
    }

    fn step(&mut self) {
        // The server disconnects peers that are idle for a minute.
        for control in &mut self.control {
            control.ask(&json!({ "command": "jobs" })).unwrap();
        }
        self.keep_sources();
        match self.rng.below(20) {
            0..=5 => self.traffic(),
            6..=9 => self.open_door(),
            10 => self.close_door(),
            11..=13 if self.jobs.len() < 2 => {
                if let Some(job) = self.begin_job() {
                    self.jobs.push(job);
                }
            }
            14..=16 if !self.jobs.is_empty() => {
                let job = self.rng.below(self.jobs.len() as u64) as usize;
                self.end_job(job);
            }
            17 => self.snapshot(),
            18 if self.rng.chance(60) => self.kill(),
            _ => self.audit(),
        }
    }

    fn note(&mut self, line: String) {
        self.story.add(line);
    }

    fn ask(&mut self, request: &Value) -> Result<Value, String> {
        self.control[0].ask(request)
    }

    fn name(&mut self, kind: &str) -> String {
        self.names += 1;
        format!("{kind}{}", self.names)
    }

    /// Enough exports that jobs can copy.
    fn keep_sources(&mut self) {
        let is_source = |door: &&Door| door.owner == Owner::Export && door.is_written();
        if self.doors.iter().filter(is_source).count() < 2 {
            self.close_door();
            self.add_export(true);
        }
    }

    // Clients.

    /// Requests of the clients of one door.
    fn traffic(&mut self) {
        let door = self.rng.below(self.doors.len() as u64) as usize;
        for _ in 0..self.rng.between(1, 4) {
            self.requests(door);
        }
    }

    fn requests(&mut self, door: usize) {
        self.note(format!("requests to {}", self.doors[door].label()));
        let door = &mut self.doors[door];
        if door.clients.is_empty() || door.form != Form::Own {
            return;
        }
        let rng = &mut self.rng;
        let file = &mut self.files.all[door.file];
        // A job to a node writes what others read.
        let Some(history) = &mut file.history else { return };
        if door.is_written() {
            let flying = door.send_changes(rng, history, true);
            self.counts.requests += flying.len() as u64;
            door.finish(flying, history);
            if rng.chance(20) {
                door.flush(rng, history);
            }
            self.files.has_changed(door.file);
        }
        let history = self.files.all[door.file].history.as_ref().unwrap();
        door.verify(rng, history);
        self.counts.reads += 1;
    }

    /// Clients of a new door, which show the disk.
    fn meet(&mut self, mut door: Door, is_crashed: bool) -> Door {
        let count = self.rng.between(1, 3);
        for _ in 0..count {
            let writes = door.connect(self.server.socket(), &mut self.rng);
            let writes = writes.unwrap_or_else(|why| panic!("{}: {why}", door.label()));
            assert!(writes == door.usage.writes(), "{} writes: {writes}", door.label());
        }
        self.look(&mut door, is_crashed);
        door
    }

    /// The disk is the known one, or becomes known. After a crash it is one of those that are possible.
    fn look(&mut self, door: &mut Door, is_crashed: bool) {
        if door.form != Form::Own {
            return;
        }
        let found = door.read_all();
        if self.jobs.iter().any(|job| job.file == door.file && job.node.is_some()) {
            return;
        }
        let file = &mut self.files.all[door.file];
        match &file.history {
            Some(history) if is_crashed => {
                history.check(&found).unwrap_or_else(|why| panic!("{}: {why}", door.label()));
            }
            Some(history) => {
                assert_same(&found, &history.latest(0, SIZE), || door.label());
                return;
            }
            None => {}
        }
        file.history = Some(History::new(&found));
    }

    fn meet_all(&mut self, is_crashed: bool) {
        for door in std::mem::take(&mut self.doors) {
            let door = self.meet(door, is_crashed);
            self.doors.push(door);
        }
    }

    // Doors.

    fn held(&self) -> Vec<Held> {
        let doors = self.doors.iter().map(|door| {
            rules::all(door.file, self.kind(door.file), door.form, door.usage, &door.label())
        });
        let jobs = self.jobs.iter().filter(|job| job.holds && job.node.is_none()).map(|job| {
            let owner = format!("job {}", job.id);
            rules::all(job.file, self.kind(job.file), Form::Own, Use::CopyTarget, &owner)
        });
        doors.chain(jobs).flatten().collect()
    }

    fn kind(&self, file: usize) -> Kind {
        self.files.all[file].kind
    }

    /// Whether a refusal says that a target is in use, which clients of a mirror have moved to. Its
    /// claim stays that of a target; and two images over one file are taken for the same.
    fn is_known(&self, why: &str) -> bool {
        !self.lingering.is_empty()
            || why.contains("has it open as the target of a copy")
            || why.contains("are the same")
    }

    /// Why a device must not be opened.
    fn conflict(&self, wanted: &[Held]) -> Option<String> {
        let held = self.held();
        let meets = |one: &&Held| wanted.iter().any(|wanted| !fit(one, wanted));
        held.iter().find(meets).map(|one| format!("{one:?}"))
    }

    /// A file, how it is used, and whether it is written.
    fn any_use(&mut self) -> (usize, Form, bool) {
        let file = self.rng.below(self.files.all.len() as u64) as usize;
        let is_image = self.kind(file) != Kind::Raw;
        let form = match self.rng.below(10) {
            0 => Form::Made,
            1 | 2 if is_image => Form::Bytes,
            _ => Form::Own,
        };
        (file, form, form != Form::Made && self.rng.chance(50))
    }

    fn open_door(&mut self) {
        for job in &mut self.jobs {
            job.was_beside = true;
        }
        self.counts.tried += 1;
        match self.rng.below(11) {
            0..=3 => self.add_export(false),
            4..=5 => self.add_node(),
            6..=7 => self.enter_directory(),
            8..=9 => self.two_at_once(),
            _ => self.add_twice(),
        }
    }

    /// The request for an export, and the door.
    fn wanted_export(&mut self, writes: bool) -> (Value, Door) {
        let (file, form, random) = self.any_use();
        let form = if writes { Form::Own } else { form };
        let writes = writes || random;
        let device = self.files.device(&mut self.rng, file, form);
        let name = self.name("x");
        let request =
            json!({ "command": "export-add", "name": name, "device": device, "readonly": !writes });
        let usage = Use::of(self.kind(file), form, writes);
        (request, Door { name, owner: Owner::Export, file, form, usage, clients: Vec::new() })
    }

    fn add_export(&mut self, writes: bool) {
        let (request, door) = self.wanted_export(writes);
        let answer = self.ask(&request);
        self.note(format!("{request}: {answer:?}"));
        self.opened(door, answer.map(|_| ()));
    }

    /// The server has answered: it is open, or refused.
    fn opened(&mut self, mut door: Door, answer: Result<(), String>) {
        let kind = self.kind(door.file);
        let wanted = rules::all(door.file, kind, door.form, door.usage, &door.label());
        let before = self.conflict(&wanted);
        if answer.is_ok() {
            self.settle_jobs();
        }
        match (answer, self.conflict(&wanted).and(before)) {
            (Ok(()), Some(conflict)) => panic!("{} was opened beside {conflict}", door.label()),
            (Ok(()), None) => {
                self.counts.opened += 1;
                self.overtake_jobs(door.file);
                if door.usage.writes() {
                    self.files.is_opened_for_writing(door.file);
                }
                if door.owner == Owner::Export {
                    door = self.meet(door, false);
                }
                self.doors.push(door);
            }
            (Err(_), Some(_)) => self.counts.refused += 1,
            (Err(why), None) => {
                if self.files.exists(door.file) && !self.is_known(&why) {
                    self.counts.unexpected(&format!("{} {:?}: {why}", door.label(), door.usage));
                }
            }
        }
    }

    /// A device that would write one file at two places.
    fn add_twice(&mut self) {
        let (file, ..) = self.any_use();
        let device = self.files.twice(&mut self.rng, file);
        let name = self.name("x");
        let request = json!({ "command": "export-add", "name": name, "device": device });
        let answer = self.ask(&request);
        self.note(format!("{request}: {answer:?}"));
        assert!(answer.is_err(), "{request}");
        self.counts.refused += 1;
    }

    fn add_node(&mut self) {
        let (file, form, writes) = self.any_use();
        let form = if form == Form::Made { Form::Own } else { form };
        let device = self.files.device(&mut self.rng, file, form);
        let path = device.trim_start_matches("file:").trim_start_matches("qcow2:");
        let path = path.split('?').next().unwrap();
        let node = self.name("n");
        let is_image = form == Form::Own && self.kind(file) != Kind::Raw;
        let below = json!({ "driver": "file", "filename": path });
        let driver = if is_image { "qcow2" } else { "raw" };
        let request =
            json!({ "driver": driver, "node-name": node, "file": below, "read-only": !writes });
        let answer = self.qmp.ask("blockdev-add", request.clone());
        self.note(format!("{request}: {answer}"));
        let usage = Use::of(self.kind(file), form, writes);
        let door = Door { name: node, owner: Owner::Node, file, form, usage, clients: Vec::new() };
        let answer = match answer["error"]["desc"].as_str() {
            None => Ok(()),
            Some(why) => Err(why.to_string()),
        };
        self.opened(door, answer);
    }

    /// A client of the directory gets what is possible.
    fn enter_directory(&mut self) {
        let file = self.rng.below(self.files.all.len() as u64) as usize;
        let form = if self.kind(file) == Kind::Raw { Form::Own } else { Form::Bytes };
        let links = ["", "", ".link", ".symbolic"];
        let name = format!("d/{}{}", self.files.all[file].name, self.rng.pick(&links));
        let clients = Vec::new();
        let mut door =
            Door { name, owner: Owner::Directory, file, form, usage: Use::Read, clients };
        let connected = door.connect(self.server.socket(), &mut self.rng);
        self.note(format!("a client of {:?}: {connected:?}", door.name));
        match connected {
            Ok(writes) => {
                door.usage = if writes { Use::Write } else { Use::Read };
                self.opened(door, Ok(()));
                let door = self.doors.len() - 1;
                let mut door = self.doors.remove(door);
                self.look(&mut door, false);
                self.doors.push(door);
            }
            // Symbolic links are not followed.
            Err(why) if why.contains("No such file") || why.contains("symbolic") => {
                self.counts.refused += 1
            }
            Err(why) => self.opened(door, Err(why)),
        }
    }

    /// Two requests at the same time: at most one of two that do not fit succeeds.
    fn two_at_once(&mut self) {
        let (first, one) = self.wanted_export(false);
        let (mut second, mut other) = self.wanted_export(false);
        if self.rng.chance(70) {
            other.file = one.file;
            other.form = one.form;
            if one.form == Form::Made {
                second["readonly"] = json!(true);
            }
            other.usage = Use::of(self.kind(one.file), one.form, second["readonly"] == false);
            second["device"] = json!(self.files.device(&mut self.rng, one.file, one.form));
        }
        self.control[0].send(&first);
        self.control[1].send(&second);
        let answers = [self.control[0].receive(&first), self.control[1].receive(&second)];
        self.note(format!("at once {first} and {second}: {answers:?}"));
        let [answer, other_answer] = answers.map(|answer| answer.map(|_| ()));
        // A refusal may have its reason in the other one.
        if answer.is_err() && other_answer.is_ok() {
            self.opened(other, other_answer);
            self.opened(one, answer);
        } else {
            self.opened(one, answer);
            self.opened(other, other_answer);
        }
    }

    fn close_door(&mut self) {
        if self.doors.len() < 4 {
            return;
        }
        let door = self.rng.below(self.doors.len() as u64) as usize;
        let name = self.doors[door].name.clone();
        let label = self.doors[door].label();
        let is_used =
            self.jobs.iter().any(|job| job.source == name || job.node.as_ref() == Some(&name))
                || self.snapshots.iter().any(|(_, _)| true);
        if is_used {
            return;
        }
        let mut door = self.doors.remove(door);
        door.clients.iter_mut().for_each(blockhaul_testkit::peer::Conversation::end);
        self.note(format!("{label} is removed"));
        match door.owner {
            Owner::Export => self.remove_export(&name),
            Owner::Node => {
                self.qmp.succeeds("blockdev-del", json!({ "node-name": name }));
            }
            Owner::Directory => {}
        }
        if door.owner == Owner::Directory {
            self.wait_for_clients(&name);
        }
    }

    /// Waits until the server has no clients of an export.
    fn wait_for_clients(&mut self, export: &str) {
        tools::until(&format!("{export} has no clients"), || {
            let clients = self.control[0].ask(&json!({ "command": "clients" })).unwrap();
            clients["clients"].as_array().unwrap().iter().all(|client| client["export"] != export)
        });
    }

    fn remove_export(&mut self, name: &str) {
        self.wait_for_clients(name);
        self.ask(&json!({ "command": "export-remove", "name": name })).unwrap();
    }

    /// A moment of a disk as an export; earlier ones are checked.
    fn snapshot(&mut self) {
        if self.snapshots.len() > 1 {
            let (mut door, moment) = self.snapshots.remove(0);
            let found = door.read_all();
            assert_same(&found, &moment, || format!("snapshot {}", door.name));
            self.counts.snapshots += 1;
            door.clients.iter_mut().for_each(blockhaul_testkit::peer::Conversation::end);
            let name = door.name.clone();
            return self.remove_export(&name);
        }
        let Some(source) = self.source() else { return };
        let name = self.name("s");
        let snapshot = json!({ "guest_timeout": 60 });
        let request = json!({ "command": "snapshot-add", "export": self.doors[source].name,
                              "name": name, "snapshot": snapshot });
        let answer = self.ask(&request);
        self.note(format!("{request}: {answer:?}"));
        answer.unwrap_or_else(|why| panic!("{request}: {why}"));
        let file = self.doors[source].file;
        let moment = self.files.all[file].history.as_ref().unwrap().latest(0, SIZE);
        let usage = Use::Read;
        let mut door =
            Door { name, owner: Owner::Export, file, form: Form::Own, usage, clients: Vec::new() };
        let writes = door.connect(self.server.socket(), &mut self.rng).unwrap();
        assert!(!writes, "{request}");
        self.snapshots.push((door, moment));
    }

    /// An export that can be copied.
    fn source(&mut self) -> Option<usize> {
        let is_source = |door: &Door| door.owner == Owner::Export && door.is_written();
        let all: Vec<_> = (0..self.doors.len()).filter(|&at| is_source(&self.doors[at])).collect();
        if all.is_empty() { None } else { Some(*self.rng.pick(&all)) }
    }

    // Jobs.

    fn begin_job(&mut self) -> Option<Job> {
        let source = self.source()?;
        let name = self.doors[source].name.clone();
        if self.rng.chance(20) {
            return self.begin_job_to_node(source, name);
        }
        let is_mirror = self.rng.chance(50);
        let file = self.target();
        let device = self.files.device(&mut self.rng, file, Form::Own);
        let owner = "the job".to_string();
        let wanted = rules::all(file, self.kind(file), Form::Own, Use::CopyTarget, &owner);
        let before = self.conflict(&wanted);
        let mut options = vec!["--request-size=64k".to_string()];
        // So slow that it does not end before it is to.
        let is_slow = is_mirror || self.rng.chance(80);
        if is_slow {
            options.push("--rate=16k".to_string());
        }
        if !is_mirror && self.rng.chance(30) {
            options.push("--verify".to_string());
        }
        let mut request = json!({ "export": name, "target": device, "options": options });
        if is_mirror {
            request["command"] = json!("mirror");
            request["copy_mode"] = json!(self.rng.pick(&["background", "write-blocking"]));
        } else {
            request["command"] = json!("backup");
            request["snapshot"] = json!({ "guest_timeout": 60 });
        }
        let (flying, expected) = self.send_at_the_moment(source);
        let answer = self.ask(&request);
        self.finish(source, flying);
        self.settle_jobs();
        let conflict = self.conflict(&wanted).and(before);
        self.note(format!("{request}: {answer:?} ({conflict:?})"));
        let id = match answer {
            Err(why) => {
                self.counts.refused += 1;
                if conflict.is_none() && !why.contains("is running") {
                    self.counts.unexpected(&why);
                }
                return None;
            }
            Ok(answer) => answer["job"].as_u64().unwrap(),
        };
        if conflict.is_none() {
            self.files.is_unknown(file);
            self.overtake_jobs(file);
        }
        let job = Job {
            id,
            source: name,
            file,
            is_mirror,
            expected,
            conflict,
            holds: false,
            node: None,
            was_beside: false,
            is_overtaken: false,
        };
        if !is_slow {
            self.ask(&json!({ "command": "job-wait", "job": id })).unwrap();
            return Some(job);
        }
        Some(self.wait_until_it_holds(job))
    }

    /// Where a job writes: a file that nobody uses, or not.
    fn target(&mut self) -> usize {
        let held = self.held();
        let wants_free = self.rng.chance(65);
        let is_free = |file: &usize| !held.iter().any(|one| one.file == *file);
        let all: Vec<_> =
            (0..self.files.all.len()).filter(|file| is_free(file) == wants_free).collect();
        if all.is_empty() { 0 } else { *self.rng.pick(&all) }
    }

    /// A job whose target is a node that can be written.
    fn begin_job_to_node(&mut self, source: usize, name: String) -> Option<Job> {
        let is_target = |door: &&Door| {
            door.owner == Owner::Node && door.form == Form::Own && door.usage.writes()
        };
        let node = self.doors.iter().find(is_target)?;
        let (file, node) = (node.file, node.name.clone());
        let id = self.name("j");
        let (flying, expected) = self.send_at_the_moment(source);
        let answer = self.qmp.ask(
            "blockdev-backup",
            json!({ "job-id": id, "device": name, "target": node, "sync": "full" }),
        );
        self.finish(source, flying);
        self.note(format!("QMP: backup of {name} to {node}: {answer}"));
        if answer.get("error").is_some() {
            self.counts.refused += 1;
            return None;
        }
        self.files.is_unknown(file);
        // The one before has ended.
        let before = self.jobs.iter_mut().filter(|job| job.node.as_ref() == Some(&node));
        before.for_each(|job| job.is_overtaken = true);
        let jobs = self.ask(&json!({ "command": "jobs" })).unwrap();
        let job = jobs["jobs"].as_array().unwrap().iter().find(|job| job["name"] == id.as_str());
        let id = job.unwrap()["job"].as_u64().unwrap();
        Some(Job {
            id,
            source: name,
            file,
            is_mirror: false,
            expected,
            conflict: None,
            holds: true,
            node: Some(node),
            was_beside: false,
            is_overtaken: false,
        })
    }

    /// The disk of now, and often requests that are in flight.
    fn send_at_the_moment(&mut self, source: usize) -> (Vec<RequestInFlight>, Moment) {
        let door = &mut self.doors[source];
        let history = self.files.all[door.file].history.as_mut().unwrap();
        let disk = history.latest(0, SIZE);
        let mut flying = Vec::new();
        if self.rng.chance(40) {
            flying = door.send_changes(&mut self.rng, history, false);
            self.counts.requests += flying.len() as u64;
            self.files.has_changed(door.file);
        }
        let expected = flying.iter().map(|one| (one.at(), one.bytes.clone())).collect();
        (flying, Moment { disk, flying: expected })
    }

    fn finish(&mut self, door: usize, flying: Vec<RequestInFlight>) {
        let door = &mut self.doors[door];
        door.finish(flying, self.files.all[door.file].history.as_mut().unwrap());
    }

    fn described(&mut self, id: u64) -> Value {
        let jobs = self.ask(&json!({ "command": "jobs" })).unwrap();
        let found = jobs["jobs"].as_array().unwrap().iter().find(|job| job["job"] == id).cloned();
        found.unwrap_or_else(|| panic!("job {id} is gone: {jobs}"))
    }

    /// A job has opened its target, or has ended.
    fn wait_until_it_holds(&mut self, mut job: Job) -> Job {
        let id = job.id;
        tools::until("the job has opened its target", || {
            let described = self.described(id);
            let is_over = !described["exit_status"].is_null();
            job.holds =
                !is_over && (described["done"].as_u64() > Some(0) || described["state"] == "ready");
            is_over || job.holds
        });
        if job.holds && job.conflict.is_some() {
            self.settle_jobs();
            let owner = "the job".to_string();
            let kind = self.kind(job.file);
            let wanted = rules::all(job.file, kind, Form::Own, Use::CopyTarget, &owner);
            if let Some(conflict) = self.conflict(&wanted) {
                panic!("job {id} has opened its target beside {conflict}");
            }
            job.conflict = None;
            self.files.is_unknown(job.file);
            self.overtake_jobs(job.file);
        }
        job
    }

    /// Notes which jobs surely have their targets open still.
    fn settle_jobs(&mut self) {
        for place in 0..self.jobs.len() {
            let described = self.described(self.jobs[place].id);
            let is_copied = described["done"] == described["total"];
            let is_over = !described["exit_status"].is_null();
            self.jobs[place].holds &= !is_over && (self.jobs[place].is_mirror || !is_copied);
        }
    }

    /// A device of a file was opened: a job onto it has ended before. Nobody knows any more what it has
    /// left there.
    fn overtake_jobs(&mut self, file: usize) {
        let ended = self.jobs.iter_mut().filter(|job| job.file == file && !job.holds);
        ended.for_each(|job| job.is_overtaken = true);
    }

    /// Ends a job in one of the possible ways, and checks its target.
    fn end_job(&mut self, place: usize) {
        let mut job = self.jobs.remove(place);
        let id = job.id;
        let Some(source) = self.doors.iter().position(|door| door.name == job.source) else {
            panic!("the export of job {id} is gone");
        };
        self.requests(source);
        let _ = self.ask(&json!({ "command": "job-rate", "job": id, "rate": 0 }));
        let cancels = self.rng.chance(20);
        let switches = self.rng.chance(60);
        if cancels {
            let _ = self.ask(&json!({ "command": "job-cancel", "job": id }));
        } else if job.is_mirror {
            let waited =
                self.ask(&json!({ "command": "job-wait", "job": id, "ready": true })).unwrap();
            if waited["exit_status"].is_null() {
                self.requests(source);
                let (flying, expected) = self.send_at_the_moment(source);
                job.expected = expected;
                let request = json!({ "command": "job-complete", "job": id, "switch": switches, "seconds": 30 });
                let completes = self.ask(&request);
                self.finish(source, flying);
                completes.unwrap_or_else(|why| panic!("job-complete of job {id}: {why}"));
            }
        }
        let ended = self.ask(&json!({ "command": "job-wait", "job": id })).unwrap();
        self.note(format!("job {id}, cancelled: {cancels}, moves clients: {switches}: {ended}"));
        self.counts.jobs += 1;
        self.counts.jobs_beside += u64::from(job.was_beside || job.conflict.is_some());
        let why = ended["error"].as_str().unwrap_or_default();
        match (ended["state"].as_str().unwrap(), &job.conflict) {
            ("completed", Some(conflict)) => panic!("job {id} has succeeded beside {conflict}"),
            ("completed", None) if job.is_overtaken => self.counts.overtaken += 1,
            ("completed", None) => self.check_target(&job, source, switches),
            (_, Some(_)) => self.counts.refused += 1,
            ("cancelled", None) => self.counts.cancelled += 1,
            (_, None) if self.is_known(why) => self.counts.refused += 1,
            (_, None) => {
                self.counts.failed += 1;
                self.counts.unexpected(&format!("job {id} to {}: {why}", ended["target"]));
            }
        }
        if self.doors.iter().all(|door| door.file != job.file) {
            return;
        }
        // A node whose contents are unknown after a job. Another job may have the same one.
        let is_last = self.jobs.iter().all(|other| other.node != job.node);
        if job.node.is_some() && is_last && self.files.all[job.file].history.is_none() {
            let place = self.doors.iter().position(|door| Some(&door.name) == job.node.as_ref());
            let node = self.doors.remove(place.unwrap());
            self.qmp.succeeds("blockdev-del", json!({ "node-name": node.name }));
        }
    }

    fn check_target(&mut self, job: &Job, source: usize, switches: bool) {
        let what = format!("the target of job {} ({})", job.id, self.files.all[job.file].name);
        if job.is_mirror && switches {
            // In flight or not: its clients see all of it.
            let kind = self.kind(job.file);
            let door = &mut self.doors[source];
            let old = door.file;
            let latest = self.files.all[old].history.as_ref().unwrap().latest(0, SIZE);
            door.file = job.file;
            door.usage = Use::of(kind, Form::Own, true);
            // The last round is durable; what was in flight then is not yet.
            let mut history = History::new(&job.expected.disk);
            for (at, bytes) in &job.expected.flying {
                history.begun(*at, bytes);
                history.done(*at, bytes.len());
            }
            assert_same(&history.latest(0, SIZE), &latest, || format!("the model of {what}"));
            self.files.all[job.file].history = Some(history);
            assert_same(&self.doors[source].read_all(), &latest, || what.clone());
            self.counts.moves += 1;
            self.check_left(job, old);
            return;
        }
        if let Some(node) = &job.node {
            let place = self.doors.iter().position(|door| door.name == *node).unwrap();
            self.doors.remove(place);
            self.qmp.succeeds("blockdev-del", json!({ "node-name": node }));
        }
        let Some(found) = self.content(job.file) else { return };
        job.expected.check(&found, &what);
        self.files.all[job.file].history = Some(History::new(&found));
        self.counts.copies += 1;
    }

    /// What clients have left is the disk of the moment when they moved.
    fn check_left(&mut self, job: &Job, file: usize) {
        let is_held = self.snapshots.iter().any(|(door, _)| door.file == file)
            || self.jobs.iter().any(|other| other.source == job.source)
            || self.doors.iter().any(|door| door.file == file);
        self.files.is_unknown(file);
        if is_held && self.kind(file) != Kind::Raw {
            // A point in time needs it still.
            self.lingering.push(file);
            return;
        }
        if is_held {
            self.lingering.push(file);
        }
        let Some(found) = self.content(file) else { return };
        let what = format!("what job {} has left ({})", job.id, self.files.all[file].name);
        job.expected.check(&found, &what);
        self.files.all[file].history = Some(History::new(&found));
    }

    /// The disk in a file that nobody uses; none: what is under it is written.
    fn content(&mut self, file: usize) -> Option<Vec<u8>> {
        let kind = self.kind(file);
        if kind == Kind::Raw {
            return Some(fs::read(self.files.path(file)).unwrap());
        }
        let wanted = rules::all(file, kind, Form::Own, Use::ReadImage, "the test");
        if self.conflict(&wanted).is_some() {
            return None;
        }
        let device = self.files.plain_device(file);
        let name = self.name("y");
        let request =
            json!({ "command": "export-add", "name": name, "device": device, "readonly": true });
        self.ask(&request).unwrap_or_else(|why| panic!("{request}: {why}"));
        let usage = Use::ReadImage;
        let mut door =
            Door { name, owner: Owner::Export, file, form: Form::Own, usage, clients: Vec::new() };
        door.connect(self.server.socket(), &mut self.rng).unwrap();
        let found = door.read_all();
        door.clients.iter_mut().for_each(blockhaul_testkit::peer::Conversation::end);
        let name = door.name.clone();
        self.remove_export(&name);
        Some(found)
    }

    // Files.

    /// Each file that nobody writes is as it was, and raw files have what clients have written.
    fn audit(&mut self) {
        let held = self.held();
        for file in 0..self.files.all.len() {
            // What clients have left may be open still, and its tables in memory.
            let is_written = self.lingering.contains(&file)
                || held.iter().any(|one| one.file == file && one.usage.writes());
            let is_target = self.jobs.iter().any(|job| job.file == file && job.conflict.is_none());
            if !self.files.exists(file) || is_target {
                continue;
            }
            let bytes = fs::read(self.files.path(file)).unwrap();
            let one = &mut self.files.all[file];
            if let (Kind::Raw, Some(history)) = (one.kind, &one.history) {
                assert_same(&bytes, &history.latest(0, SIZE), || one.name.to_string());
            }
            if !is_written {
                let hash = blake3::hash(&bytes);
                let before = *one.rest.get_or_insert(hash);
                assert!(before == hash, "{} has changed, although nobody may write it", one.name);
            }
            self.counts.audits += 1;
        }
    }

    /// The server is killed, or ends in order, while requests are in flight and jobs run. Another one
    /// has the same exports.
    fn kill(&mut self) {
        let is_orderly = self.rng.chance(15);
        let mut flying = Vec::new();
        for door in self.doors.iter_mut().filter(|door| door.is_written()) {
            if self.rng.chance(70) {
                let history = self.files.all[door.file].history.as_mut().unwrap();
                flying.extend(door.send_changes(&mut self.rng, history, false));
                self.files.has_changed(door.file);
            }
        }
        std::thread::sleep(Duration::from_micros(self.rng.below(2000)));
        self.note(format!("the server ends, in order: {is_orderly}"));
        let socket = self.server.socket().to_path_buf();
        let pid = self.server.pid();
        let ended = if is_orderly {
            self.counts.stops += 1;
            tools::output(std::process::Command::new("kill").arg(pid.to_string()), LIMIT)
        } else {
            self.counts.kills += 1;
            tools::output(
                std::process::Command::new("kill").args(["-KILL", &pid.to_string()]),
                LIMIT,
            )
        };
        assert!(ended.unwrap().status.success());
        tools::until("the server has ended", || !tools::is_running(&pid.to_string()));
        let _ = fs::remove_file(socket);
        self.after_the_end(is_orderly);
        self.starts += 1;
        self.doors.retain(|door| door.owner == Owner::Export);
        self.doors.iter_mut().for_each(|door| door.clients.clear());
        self.snapshots.clear();
        self.lingering.clear();
        let (server, control, qmp) = start(&self.files, &self.doors, self.starts);
        (self.server, self.control, self.qmp) = (server, control, qmp);
        self.meet_all(true);
    }

    /// What must be true of the files now.
    fn after_the_end(&mut self, is_orderly: bool) {
        let targets: Vec<_> = std::mem::take(&mut self.jobs);
        for job in targets.iter().filter(|job| job.conflict.is_none()) {
            self.files.is_unknown(job.file);
            self.counts.killed_jobs += 1;
        }
        let written: Vec<_> =
            self.doors.iter().filter(|door| door.usage.writes()).map(|door| door.file).collect();
        for file in 0..self.files.all.len() {
            let kind = self.kind(file);
            if let Some(history) = &mut self.files.all[file].history
                && (is_orderly || kind == Kind::Raw)
            {
                // It is in the page cache.
                history.flushed();
            }
            let is_target = targets.iter().any(|job| job.file == file && job.conflict.is_none());
            if kind == Kind::Raw || !(is_target || written.contains(&file)) {
                continue;
            }
            let is_sound = self.check_image(file);
            if !is_sound {
                assert!(is_target, "{} cannot be opened", self.files.all[file].name);
                self.files.remove(file);
            }
        }
        self.audit_raw_after_the_end();
    }

    fn audit_raw_after_the_end(&mut self) {
        for place in 0..self.files.all.len() {
            let path = self.files.path(place);
            let file = &mut self.files.all[place];
            let known = file.history.as_ref().filter(|_| file.kind == Kind::Raw);
            if let Some(history) = known {
                let bytes = fs::read(path).unwrap();
                history.check(&bytes).unwrap_or_else(|why| panic!("{}: {why}", file.name));
                // What was in flight was written, or was not.
                file.history = Some(History::new(&bytes));
            }
        }
    }

    /// Whether an image can be opened; it must not be corrupt.
    fn check_image(&mut self, file: usize) -> bool {
        if !self.files.exists(file) {
            return false;
        }
        let path = self.files.path(file);
        let output = blockhaul(&["check", "--json", &format!("qcow2:{path}")]);
        let found: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        self.counts.checks += 1;
        let Some(corruptions) = found["corruptions"].as_u64() else {
            self.note(format!("{path}: {}", text(&output.stderr)));
            return false;
        };
        assert_eq!(corruptions, 0, "{path}: {found}");
        if self.rng.chance(25)
            && let Some(qemu_img) = PeerProgram::require("qemu-img")
        {
            let output =
                qemu_img.command().args(["check", "--output=json", &path]).output().unwrap();
            let found: Value = serde_json::from_slice(&output.stdout).unwrap();
            let errors = found["corruptions"].as_u64().unwrap_or(0)
                + found["check-errors"].as_u64().unwrap_or(0);
            assert_eq!(errors, 0, "{path}: {found}");
            self.counts.checks += 1;
        }
        true
    }
}

/// A server with these exports, and that of the directory.
fn start(files: &Files, doors: &[Door], number: u32) -> (PeerServer, [Control; 2], Qmp) {
    let scratch = &files.scratch;
    let socket = |name: &str| -> PathBuf { scratch.socket(&format!("{name}-{number}")) };
    let control = socket("ctl").to_str().unwrap().to_string();
    let qmp = socket("qmp");
    let directory = format!("d=dir:{}", files.folder().display());
    let mut args = vec!["--control".into(), control.clone(), "--qmp".into()];
    args.push(qmp.to_str().unwrap().to_string());
    args.extend(["--workers".into(), "2".into(), "--export".into(), directory]);
    for door in doors {
        args.extend(["--export".into(), format!("{}=[", door.name)]);
        args.push(match door.form {
            Form::Own => files.plain_device(door.file),
            Form::Bytes => format!("file:{}", files.path(door.file)),
            Form::Made => format!("as-qcow2:{}", files.path(door.file)),
        });
        args.extend((!door.usage.writes()).then(|| "-r".to_string()));
        args.push("]".into());
    }
    let args: Vec<_> = args.iter().map(String::as_str).collect();
    let server = PeerServer::blockhaul(OURS.as_ref(), &socket("nbd"), &args).unwrap();
    let control = [Control::connect(&control), Control::connect(&control)];
    let qmp = Qmp::connect(&qmp);
    (server, control, qmp)
}
