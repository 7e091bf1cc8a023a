//! Plugins in separate processes (`serve --isolate`): what clients get when one crashes, and from the next.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command as Program;
use std::time::{Duration, Instant};

use blockhaul_testkit::peer::Conversation;
use blockhaul_testkit::tools::{
    PeerProgram, PeerServer, ScratchDir, among_peers, until, until_some,
};
use blockhaul_tests::{LIMIT, bounded, compile, done, lossy, program, run, succeed, text};
use blockhaul_wire::{CommandCode, ReplyForm};
use serde_json::Value;

/// Longer than a client may wait for an error.
const IN_TIME: Duration = Duration::from_secs(60);
/// The pause before the third process when two have died young.
const PAUSE: f64 = 0.5;

/// The plugin that misbehaves.
fn misbehaving(scratch: &ScratchDir) -> Option<PathBuf> {
    compile(Path::new("tests/tests/misbehaving.c"), "BLOCKING", scratch)
}

/// A server of the plugin with a control socket, whose temporary files are in a folder of their own.
struct Isolated {
    server: PeerServer,
    control: PathBuf,
    temporary: PathBuf,
}

impl Isolated {
    #[track_caller]
    fn start(scratch: &ScratchDir, isolate: &str, plugin: &Path, mode: &str) -> Isolated {
        Self::of(scratch, isolate, &format!("nbdkit:{}?mode={mode}", text(plugin)))
    }

    #[track_caller]
    fn of(scratch: &ScratchDir, isolate: &str, device: &str) -> Isolated {
        let socket = scratch.socket("s");
        let control = scratch.socket("c");
        let temporary = scratch.file("temporary");
        fs::create_dir(&temporary).unwrap();
        let mut command = among_peers(program()).unwrap();
        command.args(["serve", "--exit-with-parent", isolate, "--log-format", "json"]);
        command.args(["-U", text(&socket), "--control", text(&control)]);
        command.arg(device).env("TMPDIR", &temporary);
        let server = PeerServer::start(command, &socket).unwrap();
        until("there is a control socket", || control.exists());
        Isolated { server, control, temporary }
    }

    /// How `ctl` says that the process is.
    #[track_caller]
    fn state(&self) -> String {
        let told = succeed(&["ctl", text(&self.control), "--json", "exports"]);
        let told: Value = serde_json::from_str(&told).unwrap();
        told["exports"][0]["state"].as_str().unwrap().to_string()
    }

    /// The process that has the plugin.
    #[track_caller]
    fn process(&self) -> u32 {
        let state = self.state();
        let number = state.strip_prefix("process ").and_then(|rest| rest.split(',').next());
        number.unwrap_or_else(|| panic!("{state}")).parse().unwrap()
    }

    fn client(&self) -> Conversation {
        let mut client = Conversation::connect(self.server.socket()).unwrap();
        client.patience(IN_TIME).unwrap();
        client.open("", ReplyForm::Structured).unwrap();
        client
    }

    /// A record of the log with these words, once it is there.
    #[track_caller]
    fn record(&self, words: &str) -> Value {
        until_some(&format!("a record about {words:?}"), || {
            // The last line may not have been read to its end.
            let said = self.server.said();
            let mut lines = said.lines().filter(|line| line.contains(words));
            lines.find_map(|line| serde_json::from_str(line).ok())
        })
    }

    fn times(&self, words: &str) -> usize {
        self.server.said().matches(words).count()
    }

    /// Stops it; nothing of it is left.
    #[track_caller]
    fn ends(self, processes: &[u32]) {
        assert!(self.server.stop().unwrap().success());
        for process in processes {
            assert!(!Path::new(&format!("/proc/{process}")).exists(), "{process} is there");
        }
        assert_eq!(fs::read_dir(&self.temporary).unwrap().count(), 0);
    }
}

fn kill(process: u32) {
    done(Program::new("kill").args(["-s", "KILL", &process.to_string()]));
}

#[test]
fn a_killed_plugin_breaks_its_sessions_and_the_next_client_has_a_new_one() {
    let scratch = ScratchDir::new().unwrap();
    let Some(plugin) = misbehaving(&scratch) else { return };
    // A read at 0 takes longer than the process has.
    let isolated = Isolated::start(&scratch, "--isolate", &plugin, "hang-ever");
    let first = isolated.process();
    let mut client = isolated.client();
    let mut idle = isolated.client();
    assert_eq!(client.read(4096, 512).unwrap(), [b'r'; 512]);
    let request = client.request(CommandCode::Read, 0, 512);
    client.send_request(&request, &[]).unwrap();
    kill(first);
    let answer = client.receive_answer(&request).unwrap();
    assert_eq!(answer.error, 5, "{}", answer.text);
    assert!(answer.text.contains("ended with signal: 9 (SIGKILL)"), "{}", answer.text);
    assert!(answer.text.contains("reconnects"), "{}", answer.text);
    // Its end is reported once.
    let told = isolated.record("ended with signal: 9");
    assert_eq!((&told["level"], &told["plugin"]), (&"error".into(), &Value::Null), "{told}");
    assert!(told["device"].as_str().unwrap().ends_with("misbehaving.so"), "{told}");
    assert!(told["error"].as_str().unwrap().contains("signal: 9"), "{told}");

    let mut next = isolated.client();
    assert_eq!(next.read(4096, 512).unwrap(), [b'r'; 512]);
    let second = isolated.process();
    assert_ne!(first, second);
    assert_eq!(isolated.state(), format!("process {second}, started 2 times"));
    let told = isolated.record("restarted as process");
    assert_eq!((&told["level"], &told["process"]), (&"warn".into(), &second.into()), "{told}");
    // Those from before are not brought over: what they wrote may be gone.
    for client in [&mut client, &mut idle] {
        let read = client.request(CommandCode::Read, 4096, 512);
        assert_eq!(client.ask(&read, &[]).unwrap().error, 5);
    }
    assert_eq!(next.read(8192, 512).unwrap(), [b'r'; 512]);
    assert_eq!(isolated.times("its process has ended with signal: 9 (SIGKILL); it will be"), 1);
    isolated.ends(&[first, second]);
}

#[test]
fn who_has_written_hears_that_it_is_gone() {
    if PeerProgram::require("nbdkit").is_none() {
        return;
    }
    let scratch = ScratchDir::new().unwrap();
    let isolated = Isolated::of(&scratch, "--isolate", "nbdkit:memory?1M");
    let first = isolated.process();
    let mut client = isolated.client();
    assert_eq!(client.write(0, &[7; 512]).unwrap(), 0);
    kill(first);
    isolated.record("it will be restarted for the next client");
    // Another client may read what is there now; this one may not believe that its write is.
    let mut next = isolated.client();
    assert_eq!(next.read(0, 512).unwrap(), [0; 512]);
    for command in [CommandCode::Flush, CommandCode::Read, CommandCode::Write] {
        let payload: &[u8] = if command == CommandCode::Write { &[8; 512] } else { &[] };
        let length = if command == CommandCode::Flush { 0 } else { 512 };
        let request = client.request(command, 0, length);
        assert_eq!(client.ask(&request, payload).unwrap().error, 5, "{command:?}");
    }
    assert_eq!(next.read(0, 512).unwrap(), [0; 512]);
    isolated.ends(&[first]);
}

/// The end is reported when it happens, also without requests.
#[test]
fn a_death_that_no_client_sees_is_logged() {
    let scratch = ScratchDir::new().unwrap();
    let Some(plugin) = misbehaving(&scratch) else { return };
    let isolated = Isolated::start(&scratch, "--isolate", &plugin, "none");
    let first = isolated.process();
    kill(first);
    isolated.record("it will be restarted for the next client");
    assert_eq!(isolated.state(), "ended with signal: 9 (SIGKILL)");
    // One that cannot be started: the client gets the reason, and the server continues.
    fs::rename(&plugin, scratch.file("away.so")).unwrap();
    let output = run(&["info", &isolated.server.uri("")]);
    assert_eq!(output.status.code(), Some(1));
    assert!(lossy(&output.stderr).contains("ended with exit status: 3"), "{output:?}");
    assert_eq!(isolated.state(), "down");
    fs::rename(scratch.file("away.so"), &plugin).unwrap();
    until("it comes again", || run(&["info", &isolated.server.uri("")]).status.success());
    let second = isolated.process();
    isolated.ends(&[first, second]);
}

#[test]
fn one_that_always_dies_is_refused_and_not_started_all_the_time() {
    let scratch = ScratchDir::new().unwrap();
    let Some(plugin) = misbehaving(&scratch) else { return };
    let isolated = Isolated::start(&scratch, "--isolate", &plugin, "abort");
    let begun = Instant::now();
    let uri = isolated.server.uri("");
    let mut refused = 0;
    for _ in 0..10 {
        let output = run(&["copy", "--retries", "0", &uri, "null:"]);
        let said = lossy(&output.stderr);
        assert!(!output.status.success() && said.contains("ended with signal: 6"), "{said}");
        refused += usize::from(said.contains("it can be restarted in"));
    }
    isolated.record("restarted as process");
    let most = 1 + (begun.elapsed().as_secs_f64() / PAUSE) as usize;
    let starts = isolated.times("restarted as process");
    assert!(starts >= 1 && starts <= most, "{starts} starts where {most} are right");
    assert!(refused + 1 + most >= 10, "{refused} refused");
    isolated.server.says("processes ended early").unwrap();
    isolated.ends(&[]);
}

/// A plugin that hangs is alive: its watchdog ends it, and the next client has one that works. The request
/// itself has failed before. All times are longer than a busy machine holds up what works.
#[test]
fn one_that_hangs_is_ended_by_its_watchdog() {
    let scratch = ScratchDir::new().unwrap();
    let Some(plugin) = misbehaving(&scratch) else { return };
    let mode = "hang-ever&@timeout=4s&@watchdog=8s";
    let isolated = Isolated::start(&scratch, "--isolate", &plugin, mode);
    let first = isolated.process();
    let mut client = isolated.client();
    let request = client.request(CommandCode::Read, 0, 512);
    client.send_request(&request, &[]).unwrap();
    let answer = client.receive_answer(&request).unwrap();
    assert!(answer.text.contains("has not answered read for 4 s"), "{}", answer.text);
    isolated.record("its process has ended with signal: 6");
    isolated.server.says("misbehaving: pread has not returned for 8 s; the watchdog").unwrap();
    isolated.server.says("abort in callback pread of plugin misbehaving").unwrap();
    let mut next = isolated.client();
    assert_eq!(next.read(4096, 512).unwrap(), [b'r'; 512]);
    let second = isolated.process();
    assert_ne!(first, second);
    // Whoever is answered in time stays, for longer than the watchdog's time.
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(9) {
        assert_eq!(next.read(4096, 512).unwrap(), [b'r'; 512]);
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(isolated.process(), second);
    isolated.ends(&[first, second]);
}

/// Not in a process of its own: then it closes what the server cannot do without.
#[test]
fn one_that_closes_what_is_not_its_own_ends_the_server_which_says_why() {
    let scratch = ScratchDir::new().unwrap();
    let Some(plugin) = misbehaving(&scratch) else { return };
    let why =
        "something in this process, possibly a plugin, has closed descriptors that it does not own";
    // The check of Rust's library, which programs with debug assertions have, may find it first.
    let found_first = "IO Safety violation";
    let says_why = (0..10).any(|round| {
        let socket = scratch.socket(&format!("s{round}"));
        let mut command = among_peers(program()).unwrap();
        command.args(["serve", "--exit-with-parent", "-U", text(&socket)]);
        command.arg(format!("nbdkit:{}?mode=close-sockets", text(&plugin)));
        let server = PeerServer::start(command, &socket).unwrap();
        // Its connection is among what is closed.
        let _ = Conversation::connect(&socket).unwrap().open("", ReplyForm::Simple);
        let said = server.says_any(&[why, found_first]).unwrap();
        assert!(!said.contains("panicked"), "{said}");
        said.contains(why)
    });
    assert!(says_why);
}

#[test]
fn where_it_is_wanted_once_it_stays_down() {
    let scratch = ScratchDir::new().unwrap();
    let Some(plugin) = misbehaving(&scratch) else { return };
    let isolated = Isolated::start(&scratch, "--isolate=once", &plugin, "none");
    let first = isolated.process();
    kill(first);
    isolated.record("it is not restarted, and its clients get errors");
    for _ in 0..2 {
        let output = run(&["info", &isolated.server.uri("")]);
        let said = lossy(&output.stderr);
        assert!(!output.status.success() && said.contains("ended with signal: 9"), "{said}");
    }
    assert_eq!(isolated.times("it is not restarted"), 1, "{}", isolated.server.said());
    isolated.ends(&[first]);
    let output = run(&["serve", "--isolate=never", "memory:1M"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(lossy(&output.stderr).contains("not one of again, once"), "{output:?}");
}

/// An export in a process of its own takes no other down with it.
#[test]
fn the_crash_of_an_isolated_plugin_leaves_the_server_there() {
    let scratch = ScratchDir::new().unwrap();
    for (mode, what, signal) in [
        ("segv", "segmentation fault", "signal: 11 (SIGSEGV)"),
        ("abort", "abort", "signal: 6 (SIGABRT)"),
    ] {
        let Some(plugin) = misbehaving(&scratch) else { return };
        let device = format!("nbdkit:{}?mode={mode}", text(&plugin));
        let other = "other=memory:1M";
        let (ours, socket) = (text(program()), "nbd+unix:///other?socket=$unixsocket");
        let script = format!(
            "set -e; nbdinfo --size \"$uri\"; \
             {ours} copy --retries 0 \"$uri\" null: 2>&1 && exit 1; \
             {ours} copy --retries 0 \"$uri\" null: 2>&1 && exit 1; \
             nbdsh -u \"{socket}\" -c 'h.pwrite(b\"1\" * 512, 0)' -c 'print(h.pread(2, 0))'"
        );
        let mut command = among_peers(program()).unwrap();
        command.args(["serve", "--isolate", &device, "--export", other, "--run", &script]);
        let output = bounded(&mut command, LIMIT);
        let heard = lossy(&output.stdout);
        let said = lossy(&output.stderr);
        assert!(output.status.success(), "{heard}{said}");
        assert!(heard.starts_with("65536\n") && heard.ends_with("bytearray(b'11')\n"), "{heard}");
        // The second client had a process of its own, which crashed as the first.
        let end = format!("its process has ended with {signal}");
        assert_eq!(heard.matches(&end).count(), 2, "{heard}");
        let crash = format!("{what} in callback pread of plugin misbehaving");
        assert!(said.contains(&crash), "{said}");
        let report = said.lines().find(|line| line.contains(&end)).unwrap_or_default();
        let named = report.contains("misbehaving.so: ");
        assert!(named && report.contains("it will be restarted for the next client"), "{said}");
        assert_eq!(said.matches("restarted as process").count(), 1, "{said}");
        assert!(!said.contains("mode="), "parameters may be secret: {said}");
    }
}

/// What a plugin says reaches the client through the other process, and its names are there.
#[test]
fn an_isolated_plugin_is_itself() {
    let scratch = ScratchDir::new().unwrap();
    let read = format!("! {} copy --retries 0 \"$uri\" null: 2>&1", text(program()));
    for (mode, script, wanted) in [
        ("open-error", "! nbdinfo \"$uri\" 2>&1", "the cupboard is bare"),
        ("read-error", read.as_str(), "the disk is on fire"),
        ("none", "nbdinfo --list \"$uri\"", "export-size: 65536"),
    ] {
        let Some(plugin) = misbehaving(&scratch) else { return };
        let device = format!("nbdkit:{}?mode={mode}", text(&plugin));
        let mut command = among_peers(program()).unwrap();
        command.args(["serve", "--isolate", &device, "--run", script]);
        let output = bounded(&mut command, LIMIT);
        let heard = lossy(&output.stdout);
        assert!(output.status.success(), "{mode}: {output:?}");
        assert!(heard.contains(wanted), "{mode}: {output:?}");
    }
    let mut none = among_peers(program()).unwrap();
    none.args(["serve", "--isolate", "nbdkit:/nonexistent.so", "--run", "true"]);
    let output = bounded(&mut none, LIMIT);
    assert!(!output.status.success());
    let said = lossy(&output.stderr);
    assert!(said.contains("/nonexistent.so") && said.contains("its process has ended"), "{said}");
}
