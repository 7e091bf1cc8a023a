//! The protocol of the control socket, and what `ctl` prints, as a transcript: `control_protocol.txt`.
//!
//! The lines at the margin are given: `@` changes the scene, `>` is a request on the control socket, `$`
//! are the words of a `ctl`. Below each is the outcome: `>` and `<` are what `ctl` and the server have
//! sent, `|` and `!` are standard output and standard error, `=` is an exit status other than 0.
//! `BLOCKHAUL_WRITE_GOLDEN=1` writes the outcomes again.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};

use blockhaul_testkit::peer::Conversation;
use blockhaul_testkit::tools::{PeerServer, ScratchDir, text, until};
use blockhaul_wire::{CommandCode as Nbd, ReplyForm};
use serde_json::{Value, json};

use crate::served_disk::{LIMIT, OURS};

/// Bytes of each disk.
const SIZE: usize = 1 << 20;

#[test]
fn requests_replies_and_the_output_of_ctl_are_as_recorded() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/all/control_protocol.txt");
    let recorded = std::fs::read_to_string(&file).unwrap();
    let mut scene = Scene::new();
    let mut found = String::new();
    let given = recorded.lines().filter(|line| !line.starts_with(' '));
    for line in given {
        println!("{line}");
        writeln!(found, "{line}").unwrap();
        for outcome in scene.play(&scene.absolute(line)) {
            writeln!(found, "  {outcome}").unwrap();
        }
    }
    scene.check_complete();
    if std::env::var_os("BLOCKHAUL_WRITE_GOLDEN").is_some() {
        std::fs::write(&file, &found).unwrap();
    }
    let differs = recorded.lines().zip(found.lines()).find(|(old, new)| old != new);
    let count = [&recorded, &found].map(|text| text.lines().count());
    assert!(
        recorded == found,
        "BLOCKHAUL_WRITE_GOLDEN=1 records it again: {count:?} lines, first difference: {differs:#?}"
    );
}

/// A server, its clients, and what controls it.
struct Scene {
    scratch: ScratchDir,
    server: Option<PeerServer>,
    /// Servers so far, which numbers the sockets: the kernel may close those of a killed one later.
    servers: usize,
    arguments: Vec<String>,
    clients: Vec<Conversation>,
    control: Option<BufReader<UnixStream>>,
    relay: Relay,
    /// The commands that were carried out.
    commands: BTreeSet<String>,
    /// The commands that the server knows.
    known: BTreeSet<String>,
}

impl Scene {
    fn new() -> Scene {
        let scratch = ScratchDir::new().unwrap();
        for (name, byte) in [("a.raw", 1), ("b.raw", 2)] {
            std::fs::write(scratch.file(name), vec![byte; SIZE]).unwrap();
        }
        std::fs::create_dir(scratch.file("jobs")).unwrap();
        let relay = Relay::start(scratch.socket("relay"));
        Scene {
            scratch,
            server: None,
            servers: 0,
            arguments: Vec::new(),
            clients: Vec::new(),
            control: None,
            relay,
            commands: BTreeSet::new(),
            known: BTreeSet::new(),
        }
    }

    fn absolute(&self, line: &str) -> String {
        line.replace("$DIR", self.scratch.path().to_str().unwrap()).replace("$BLOCKHAUL", OURS)
    }

    /// The outcome of one given line.
    fn play(&mut self, line: &str) -> Vec<String> {
        let (kind, rest) = line.split_once(' ').unwrap_or((line, ""));
        let outcome = match kind {
            ">" => vec![self.request(&format!("{rest}\n"))],
            "$" => self.ctl(rest),
            "@" => self.change(rest),
            _ => Vec::new(),
        };
        let dir = self.scratch.path().to_str().unwrap();
        let general = |line: String| line.replace(dir, "$DIR").replace(OURS, "$BLOCKHAUL");
        outcome.into_iter().map(general).collect()
    }

    fn change(&mut self, what: &str) -> Vec<String> {
        let words: Vec<_> = what.split(' ').collect();
        match words[..] {
            ["server", ..] => {
                self.arguments = words[1..].iter().map(ToString::to_string).collect();
                self.serve();
            }
            ["kill"] => self.serve(),
            ["client", export] => self.connect(export),
            ["read"] => {
                let client = self.clients.last_mut().unwrap();
                let request = client.request(Nbd::Read, 0, 512);
                client.send_request(&request, &[]).unwrap();
                until("it is in flight", || self.asked("clients")["clients"][0]["in_flight"] == 1);
            }
            ["write"] => {
                self.clients.last_mut().unwrap().write(0, &[7; 65536]).unwrap();
            }
            ["alone"] => {
                self.clients.clear();
                until("no client", || self.asked("clients")["clients"] == json!([]));
            }
            ["copied", job] => self.until_job(job, |job| job["done"] != 0),
            ["state", job, state] => self.until_job(job, |job| job["state"] == state),
            ["endless"] => {
                let said = self.request(&"x".repeat(100 << 10));
                return vec![said];
            }
            _ => panic!("unknown change {what:?}"),
        }
        Vec::new()
    }

    fn serve(&mut self) {
        self.control = None;
        self.clients.clear();
        self.server = None;
        self.servers += 1;
        let socket = self.scratch.socket(&format!("nbd{}", self.servers));
        let control = self.scratch.socket(&format!("ctl{}", self.servers));
        self.relay.target.lock().unwrap().clone_from(&control);
        let mut args = vec!["--control", control.to_str().unwrap()];
        args.extend(self.arguments.iter().map(String::as_str));
        self.server = Some(PeerServer::blockhaul(OURS.as_ref(), &socket, &args).unwrap());
    }

    fn connect(&mut self, export: &str) {
        let mut client = Conversation::connect(self.server.as_ref().unwrap().socket()).unwrap();
        client.hello(3).unwrap();
        client.negotiate(ReplyForm::Structured).unwrap();
        client.go(export).unwrap();
        self.clients.push(client);
        let all = self.clients.len();
        until("it is listed", || {
            let listed = self.asked("clients");
            let open = |one: &&Value| one["export"].is_string();
            listed["clients"].as_array().unwrap().iter().filter(open).count() == all
        });
    }

    /// A new connection to the control socket.
    fn control(&self) -> BufReader<UnixStream> {
        let target = self.relay.target.lock().unwrap();
        BufReader::new(UnixStream::connect(&*target).unwrap())
    }

    /// The reply to a command without members, on a connection of its own.
    fn asked(&self, command: &str) -> Value {
        let reply = exchange(&mut self.control(), &format!("{{\"command\":\"{command}\"}}\n"));
        serde_json::from_str(&reply).unwrap()
    }

    fn until_job(&self, number: &str, is_so: impl Fn(&Value) -> bool) {
        let number: u64 = number.parse().unwrap();
        until("the job is as it should be", || {
            let jobs = self.asked("jobs");
            jobs["jobs"].as_array().unwrap().iter().any(|job| job["job"] == number && is_so(job))
        });
    }

    /// The reply to these bytes.
    fn request(&mut self, line: &str) -> String {
        let mut control = self.control.take().unwrap_or_else(|| self.control());
        let reply = exchange(&mut control, line);
        self.control = Some(control).filter(|_| !reply.is_empty());
        self.note(line, &reply);
        lasting(&format!("< {reply}"))
    }

    /// The words, what was sent, and what is printed.
    fn ctl(&mut self, words: &str) -> Vec<String> {
        let relay = self.relay.socket.to_str().unwrap();
        let words = words.split(' ').map(|word| if word == "''" { "" } else { word });
        let args: Vec<_> = ["ctl", relay].into_iter().chain(words).collect();
        let mut command = Command::new(OURS);
        // Relative paths are made absolute.
        command.args(args).current_dir(self.scratch.path()).env("COLUMNS", "1000");
        let output = blockhaul_testkit::tools::output(&mut command, LIMIT).unwrap();
        let sent = std::mem::take(&mut *self.relay.lines.lock().unwrap());
        for pair in sent.chunks(2) {
            self.note(&pair[0][2..], pair.get(1).map_or("", |reply| &reply[2..]));
        }
        let mut outcome: Vec<_> = sent.iter().map(|line| lasting(line)).collect();
        let mut printed = Vec::new();
        for line in text(&output.stdout).lines() {
            let same = sent.iter().any(|sent| sent.strip_prefix("< ") == Some(line));
            let line = if same { "(the reply)".to_string() } else { without_times(line) };
            printed.push(format!("| {line}"));
        }
        if printed.len() > 100 {
            printed.truncate(2);
            printed.push("| (metrics)".to_string());
        }
        outcome.extend(printed);
        outcome.extend(text(&output.stderr).lines().map(|line| format!("! {line}")));
        if output.status.code() != Some(0) {
            outcome.push(format!("= {}", output.status.code().unwrap()));
        }
        outcome.iter().map(|line| line.trim_end().to_string()).collect()
    }

    fn note(&mut self, request: &str, reply: &str) {
        let request: Value = serde_json::from_str(request).unwrap_or_default();
        let reply: Value = serde_json::from_str(reply).unwrap_or_default();
        let command = request["command"].as_str().unwrap_or_default();
        if reply["ok"] == true || command == "wait" {
            self.commands.insert(command.to_string());
        }
        let error = reply["error"].as_str().unwrap_or_default();
        if let Some((_, known)) = error.split_once("known are clients, ") {
            self.known = known.split(", ").map(String::from).collect();
        }
    }

    /// Every command that the server lists was carried out.
    fn check_complete(&self) {
        let left: Vec<_> = self.known.difference(&self.commands).collect();
        assert!(self.known.len() >= 30 && left.is_empty(), "never carried out: {left:?}");
    }
}

/// Sends bytes, and receives a line: empty if the connection ends.
fn exchange(control: &mut BufReader<UnixStream>, line: &str) -> String {
    control.get_ref().set_read_timeout(Some(LIMIT)).unwrap();
    // The server may close it before it has read everything.
    let _ = control.get_mut().write_all(line.as_bytes());
    let mut reply = String::new();
    let _ = control.read_line(&mut reply);
    reply.trim_end().to_string()
}

/// A socket for `ctl` that records what goes to the control socket and back.
struct Relay {
    socket: PathBuf,
    /// The control socket of the server.
    target: Arc<Mutex<PathBuf>>,
    lines: Arc<Mutex<Vec<String>>>,
}

impl Relay {
    fn start(socket: PathBuf) -> Relay {
        let listener = UnixListener::bind(&socket).unwrap();
        let target = Arc::new(Mutex::new(PathBuf::new()));
        let control = target.clone();
        let lines = Arc::new(Mutex::new(Vec::new()));
        let recorded = lines.clone();
        std::thread::spawn(move || {
            for peer in listener.incoming() {
                let mut peer = BufReader::new(peer.unwrap());
                let Ok(control) = UnixStream::connect(&*control.lock().unwrap()) else { continue };
                let mut control = BufReader::new(control);
                let mut line = String::new();
                while peer.read_line(&mut line).is_ok_and(|len| len > 0) {
                    recorded.lock().unwrap().push(format!("> {}", line.trim_end()));
                    let reply = exchange(&mut control, &line);
                    recorded.lock().unwrap().push(format!("< {reply}"));
                    if reply.is_empty() || writeln!(peer.get_mut(), "{reply}").is_err() {
                        break;
                    }
                    line.clear();
                }
            }
        });
        Relay { socket, target, lines }
    }
}

/// A request or reply without what is different each time.
fn lasting(line: &str) -> String {
    let (mark, said) = line.split_at(2);
    if said.is_empty() {
        return format!("{mark}(the connection ends)");
    }
    let Ok(mut value) = serde_json::from_str(said) else { return line.to_string() };
    if mark == "< " {
        mask(&mut value);
    }
    format!("{mark}{value}")
}

fn mask(value: &mut Value) {
    match value {
        Value::Array(all) => all.iter_mut().for_each(mask),
        Value::Object(members) => {
            let is_job = members.contains_key("exit_status");
            let is_partial = members.get("exit_status").is_some_and(|status| *status != 0);
            for (name, value) in members {
                let is_measured = match name.as_str() {
                    "age" | "begun" | "seconds" | "rounds" | "downtime" | "writes_delayed"
                    | "longest_delay" | "end_time" => value.is_number(),
                    "data_rate" => is_job,
                    "rate" | "predicted_downtime" => is_job,
                    "done" | "total" | "saved" | "kept" | "released" | "dirty" | "synced" => {
                        is_partial
                    }
                    "text" => value.is_string(),
                    _ => false,
                };
                if is_measured {
                    *value = json!("~");
                } else if let Value::String(text) = value {
                    *text = shortened(text);
                } else {
                    mask(value);
                }
            }
        }
        _ => {}
    }
}

/// A text without the figures of a report, and without lists of devices and layers.
fn shortened(text: &str) -> String {
    let cut = |at: &str, is_so: bool| text.split_once(at).filter(|_| is_so);
    let report = cut(" skipped, ", text.contains(" MiB/s"));
    let is_summary = ["backed up ", "mirrored "].iter().any(|verb| text.starts_with(verb));
    let report = report.or_else(|| cut(" in ", is_summary));
    let unknown = ["unknown scheme", "unknown layer"].iter().any(|what| text.contains(what));
    match report.or_else(|| cut("known are", unknown)) {
        Some((kept, _)) => format!("{kept} ~"),
        None => text.to_string(),
    }
}

/// A line of output without ages, and without the width of columns, which paths change.
fn without_times(line: &str) -> String {
    let is_age = |cell: &str| {
        let number = cell.strip_suffix('s');
        number.is_some_and(|number| number.parse::<f64>().is_ok())
    };
    let cells = line.split("  ").map(str::trim).filter(|cell| !cell.is_empty());
    let cells = cells.map(|cell| if is_age(cell) { "~".to_string() } else { shortened(cell) });
    cells.collect::<Vec<_>>().join("  ")
}
