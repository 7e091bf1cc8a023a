//! How callbacks of a plugin are called: their order through a plugin's life, how often, on which threads,
//! how many at a time, and what becomes of error numbers. nbdkit runs the same plugin where it can judge.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use blockhaul_testkit::tools::{PeerProgram, ScratchDir, among_peers};
use blockhaul_tests::{LIMIT, bounded, compile_with, lossy, program, text};

/// Thread models by their numbers.
const CONNECTIONS: u8 = 0;
const ALL_REQUESTS: u8 = 1;
const REQUESTS: u8 = 2;
const PARALLEL: u8 = 3;

/// A note of the plugin's: a callback, its handle (0: none), its thread, and more.
struct Note {
    callback: String,
    handle: u32,
    thread: u32,
    more: String,
}

/// The plugin with a thread model; `preserved`: its callbacks' errno counts.
fn plugin(model: u8, preserved: bool, scratch: &ScratchDir) -> Option<PathBuf> {
    let model = format!("-DMODEL={model}");
    let define = if preserved { "PRESERVED" } else { "NOT_PRESERVED" };
    compile_with(Path::new("tests/tests/life.c"), define, scratch, &[OsStr::new(&model)])
}

/// Whether nbdkit or blockhaul runs it.
#[derive(Clone, Copy, Debug)]
enum Host {
    Nbdkit,
    Blockhaul,
}

use Host::{Blockhaul, Nbdkit};

/// Serves the plugin while a script runs, which has to succeed; what that prints, and the notes.
#[track_caller]
fn serve(host: Host, plugin: &Path, config: &[&str], script: &str) -> (String, Vec<Note>) {
    let scratch = ScratchDir::new().unwrap();
    let notes = scratch.file("notes");
    let script = format!("set -e; {script}");
    let mut command = match host {
        Nbdkit => {
            let mut command = PeerProgram::require("nbdkit").unwrap().command();
            command.args(["-U", "-", text(plugin)]).args(config);
            command
        }
        Blockhaul => {
            let mut command = among_peers(program()).unwrap();
            let device = format!("nbdkit:{}?{}", text(plugin), config.join("&"));
            command.args(["serve", &device]);
            command
        }
    };
    let output = run(command.args(["--run", &script]).env("NOTES", &notes));
    let said = lossy(&output.stderr);
    assert!(output.status.success(), "{host:?}: {}: {said}", output.status);
    let lines = fs::read_to_string(notes).unwrap();
    (lossy(&output.stdout), lines.lines().map(Note::parse).collect())
}

fn run(command: &mut Command) -> Output {
    bounded(command, LIMIT)
}

impl Note {
    fn parse(line: &str) -> Note {
        let mut words = line.splitn(4, ' ');
        let mut next = || words.next().unwrap();
        Note {
            callback: next().into(),
            handle: next().parse().unwrap(),
            thread: next().parse().unwrap(),
            more: next().into(),
        }
    }

    /// What does not depend on the run.
    fn shown(&self) -> String {
        format!("{} {} {}", self.callback, self.handle, self.more)
    }
}

/// From load to unload, one client after the other: nbdkit's order. Questions about a handle are asked
/// once for each, in an order of each server's own.
#[test]
fn a_life_has_nbdkits_order_and_questions_are_asked_once() {
    let scratch = ScratchDir::new().unwrap();
    let Some(plugin) = plugin(ALL_REQUESTS, false, &scratch) else { return };
    let client = "nbdsh --base-allocation -u \"$uri\" \
        -c 'for i in range(3): h.pread(512, 0)' -c 'h.pwrite(bytes(512), 0, nbd.CMD_FLAG_FUA)' \
        -c 'h.trim(512, 0)' -c 'h.zero(512, 0)' -c 'h.cache(512, 0)' -c 'h.flush()' \
        -c 'h.block_status(4096, 0, lambda *a: 0)' -c 'h.is_rotational()' -c 'h.can_multi_conn()' \
        -c 'h.shutdown()'";
    let listed = "nbdinfo --list --json \"nbd+unix:///?socket=$unixsocket\" >/dev/null";
    let config = ["a=1", "value", "b=x y", "a=2"];
    // Until it is closed a client's handle may be behind the next client's.
    let closed =
        |number| format!("until grep -q '^close {number} ' \"$NOTES\"; do sleep 0.01; done");
    let script = format!("{client}; {}; {client}; {}; {listed}", closed(1), closed(2));
    let [theirs, ours] = [Nbdkit, Blockhaul].map(|host| serve(host, &plugin, &config, &script).1);
    let asked = |note: &Note| {
        let name = note.callback.as_str();
        name.starts_with("can_")
            || ["get_size", "block_size", "is_rotational", "export_description"].contains(&name)
            // nbdkit's client that lists opens each export; what else it asks is its business.
            || name == "list_exports"
    };
    let order = |notes: &[Note]| -> Vec<String> {
        notes.iter().filter(|note| !asked(note)).map(Note::shown).collect()
    };
    assert_eq!(order(&ours), order(&theirs));
    assert_eq!(ours.first().unwrap().callback, "load");
    assert_eq!(ours.last().unwrap().callback, "unload");
    for (host, notes) in [("theirs", &theirs), ("ours", &ours)] {
        let mut times = BTreeMap::new();
        for note in notes.iter().filter(|note| asked(note) && note.handle != 0) {
            *times.entry((note.handle, &note.callback)).or_insert(0) += 1;
        }
        assert!(times.len() >= 2 * 12, "{host}: {times:?}");
        let twice: Vec<_> = times.iter().filter(|(_, times)| **times > 1).collect();
        // Each client queries the description.
        let twice: Vec<_> =
            twice.iter().filter(|((_, name), _)| *name != "export_description").collect();
        assert!(twice.is_empty(), "{host}: {twice:?}");
    }
}

/// Three clients at the same time, each with two reads.
const MEET: &str = "import threading\n\
    def client():\n\
    \x20 h = nbd.NBD()\n\
    \x20 h.connect_uri(uri)\n\
    \x20 buffers = [nbd.Buffer(512) for i in range(2)]\n\
    \x20 for i in range(2): h.aio_pread(buffers[i], 512 * i, lambda error: 1)\n\
    \x20 while h.aio_in_flight() > 0: h.poll(-1)\n\
    \x20 h.shutdown()\n\
    threads = [threading.Thread(target=client) for i in range(3)]\n\
    for thread in threads: thread.start()\n\
    for thread in threads: thread.join()\n";

/// The threads of each handle's callbacks.
fn threads(notes: &[Note]) -> BTreeMap<u32, BTreeSet<u32>> {
    let mut threads: BTreeMap<u32, BTreeSet<u32>> = BTreeMap::new();
    for note in notes.iter().filter(|note| note.handle != 0) {
        threads.entry(note.handle).or_default().insert(note.thread);
    }
    threads
}

/// The most reads that were going on at a time.
fn most(notes: &[Note]) -> u32 {
    let met = notes.iter().filter(|note| note.callback == "pread");
    met.map(|note| note.more.parse::<u32>().unwrap()).max().unwrap()
}

#[test]
fn thread_models_are_kept_to() {
    let scratch = ScratchDir::new().unwrap();
    let client = scratch.file("client.py");
    fs::write(&client, format!("import os\nuri = os.environ['uri']\n{MEET}")).unwrap();
    let script = format!("export uri; nbdsh -c 'exec(open(\"{}\").read())'", text(&client));
    for (model, own, any) in
        [(CONNECTIONS, 1, 1), (ALL_REQUESTS, 1, 1), (REQUESTS, 1, 2), (PARALLEL, 2, 2)]
    {
        let Some(plugin) = plugin(model, false, &scratch) else { return };
        for (reads, most_wanted) in [("reads=meet-own", own), ("reads=meet-any", any)] {
            // Those who meet do so at once; on a busy machine soon.
            let patience = if most_wanted == 1 { "patience=50" } else { "patience=60000" };
            let (_, notes) = serve(Blockhaul, &plugin, &[reads, patience], &script);
            let threads = threads(&notes);
            assert_eq!(threads.len(), 3, "{model}");
            let found = most(&notes);
            match most_wanted {
                1 => assert_eq!(found, 1, "{model}, {reads}"),
                _ => assert!(found >= most_wanted, "{model}, {reads}: {found}"),
            }
            let single = threads.values().all(|threads| threads.len() == 1);
            assert!(model == PARALLEL || single, "{model}: {threads:?}");
        }
        if model == CONNECTIONS {
            // From open to close no other client's callbacks.
            let (_, notes) = serve(Blockhaul, &plugin, &[], &script);
            let mut handles: Vec<_> =
                notes.iter().map(|note| note.handle).filter(|&handle| handle != 0).collect();
            handles.dedup();
            assert_eq!(handles.len(), 3, "{handles:?}");
        }
    }
}

/// Every number up to 140, set by `nbdkit_set_error` and left in `errno`: clients get nbdkit's.
#[test]
fn error_numbers_reach_clients_as_from_nbdkit() {
    let scratch = ScratchDir::new().unwrap();
    let client = scratch.file("client.py");
    let lines = "def told(what):\n\
                 \x20 try: what()\n\
                 \x20 except nbd.Error as error: return error.errno\n\
                 for at in range(0, 140):\n\
                 \x20 print(at, told(lambda: h.pread(512, 512 * at)),\n\
                 \x20   told(lambda: h.zero(512, 512 * at)),\n\
                 \x20   told(lambda: h.zero(512, 512 * at, nbd.CMD_FLAG_FAST_ZERO)))\n";
    fs::write(&client, lines).unwrap();
    let script = format!("nbdsh -u \"$uri\" -c 'exec(open(\"{}\").read())'", text(&client));
    for (preserved, reads) in [
        (false, "reads=set-error"),
        (true, "reads=set-error"),
        (false, "reads=errno"),
        (true, "reads=errno"),
    ] {
        let Some(plugin) = plugin(PARALLEL, preserved, &scratch) else { return };
        let [theirs, ours] =
            [Nbdkit, Blockhaul].map(|host| serve(host, &plugin, &[reads], &script).0);
        assert_eq!(theirs.lines().count(), 140);
        // EACCES is EPERM here, EINVAL there.
        let (denied, different): (Vec<_>, Vec<_>) = ours
            .lines()
            .zip(theirs.lines())
            .filter(|(ours, theirs)| ours != theirs)
            .partition(|(ours, _)| ours.starts_with("13 EPERM"));
        assert!(denied.len() <= 1, "{denied:?}");
        assert!(different.is_empty(), "preserved {preserved}, {reads}: {different:?}");
    }
}
