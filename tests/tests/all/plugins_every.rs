//! Every callback of an asynchronous plugin, in one that is written in C++: what it is called with, from how
//! much memory, and what its answers become.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

use blockhaul_testkit::tools::{ScratchDir, SkipReason, among_peers, skip_or_fail};
use blockhaul_tests::{LIMIT, bounded, compile_with, lossy, program, text};

fn plugin(scratch: &ScratchDir) -> Option<PathBuf> {
    if std::process::Command::new("c++").arg("--version").output().is_err() {
        skip_or_fail(&SkipReason::new("there is no compiler for C++"));
        return None;
    }
    // What the library includes is not usable here.
    let more = [OsStr::new("-std=c++11"), OsStr::new("-lstdc++")];
    compile_with(Path::new("tests/tests/every.cc"), "EVERY", scratch, &more)
}

/// What a client's program in Python prints, and what the plugin notes.
#[track_caller]
fn serve(plugin: &Path, wrong: &str, client: &str) -> (String, Vec<String>) {
    let (output, notes) = run(plugin, wrong, client);
    let said = lossy(&output.stderr);
    assert!(output.status.success(), "{wrong}: {}: {said}", output.status);
    (lossy(&output.stdout) + &said, notes)
}

/// The same of a server that may fail.
fn run(plugin: &Path, wrong: &str, client: &str) -> (Output, Vec<String>) {
    let scratch = ScratchDir::new().unwrap();
    let notes = scratch.file("notes");
    let path = scratch.file("client.py");
    fs::write(&path, client).unwrap();
    let device = format!("nbdkit:{}?wrong={wrong}&notes={}", text(plugin), text(&notes));
    let script =
        format!("nbdsh --base-allocation -u \"$uri\" -c 'exec(open(\"{}\").read())'", text(&path));
    let mut command = among_peers(program()).unwrap();
    command.args(["serve", &device, "--run", &script]);
    let output = bounded(command.env("NOTES", &notes), LIMIT);
    let notes = fs::read_to_string(notes).unwrap();
    (output, notes.lines().map(String::from).collect())
}

const MIB: u64 = 1 << 20;
/// The longest range of a call: a multiple of any block below 4 GiB.
const LONGEST: u64 = 0xffff_0000;

#[test]
fn every_callback_is_called_with_what_the_client_asks_for() {
    let scratch = ScratchDir::new().unwrap();
    let Some(plugin) = plugin(&scratch) else { return };
    let client = "\
        M, G = 1 << 20, 1 << 30\n\
        h.pwrite(b'a' * 4096, M)\n\
        h.pwrite(b'b' * 512, 2 * M, nbd.CMD_FLAG_FUA)\n\
        assert h.pread(4096, M) == b'a' * 4096 and h.pread(512, 2 * M) == b'b' * 512\n\
        assert h.pread(4096, 3 * G) == bytes(4096)\n\
        assert h.pread(2 * M, 15 * M) == bytes(2 * M)\n\
        h.flush()\n\
        h.cache(8192, 4096)\n\
        h.trim(5 * G, 0)\n\
        h.trim(4096, 0, nbd.CMD_FLAG_FUA)\n\
        h.zero(4096, M, nbd.CMD_FLAG_NO_HOLE)\n\
        h.zero(5 * G, M)\n\
        assert h.pread(4096, M) == bytes(4096)\n\
        try: h.zero(4096, 0, nbd.CMD_FLAG_FAST_ZERO)\n\
        except nbd.Error as error: print(error.errno)\n\
        found = []\n\
        h.block_status(5 * M, 14 * M, lambda context, at, runs, error: found.append((at, runs)) or 0)\n\
        print(found)\n\
        h.block_status(4096, 0, lambda *all: 0, nbd.CMD_FLAG_REQ_ONE)\n";
    let (said, mut notes) = serve(&plugin, "", client);
    assert!(said.starts_with("ENOTSUP\n"), "{said}");
    // The last run may be longer than what was asked for.
    assert!(said.contains(&format!("({}, [{}, 0, ", 14 * MIB, 2 * MIB)), "{said}");
    assert!(said.contains(", 3])]"), "{said}");
    assert!(notes.pop().unwrap().starts_with("most "), "{notes:?}");
    let g = 1 << 30;
    // 1: may trim; 2: durable; 4: one extent; 8: fast.
    let wanted = [
        format!("pwrite 4096 {MIB} 0"),
        format!("pwrite 512 {} 1", 2 * MIB),
        format!("pread 4096 {MIB} 0"),
        format!("pread 512 {} 0", 2 * MIB),
        format!("pread 4096 {} 0", 3_u64 * g),
        format!("pread {} {} 0", 2 * MIB, 15 * MIB),
        "flush 0 0 0".into(),
        "cache 8192 4096 0".into(),
        format!("trim {LONGEST} 0 0"),
        format!("trim {} {LONGEST} 0", 5 * g - LONGEST),
        "trim 4096 0 1".into(),
        format!("zero 4096 {MIB} 0"),
        format!("zero {LONGEST} {MIB} 1"),
        format!("zero {} {} 1", 5 * g - LONGEST, MIB + LONGEST),
        format!("pread 4096 {MIB} 0"),
        "zero 4096 0 9".into(),
        format!("extents {} {} 0", 5 * MIB, 14 * MIB),
        "extents 4096 0 4".into(),
        "close 0 0 0".into(),
    ];
    assert_eq!(notes, wanted);
}

/// 64 requests of 256 KiB are in flight: no more of them are lent than the plugin wants, and that may
/// change. The plugin refuses what is beyond, and memory that does not begin on a page.
#[test]
fn no_more_is_lent_than_the_plugin_wants() {
    let scratch = ScratchDir::new().unwrap();
    let Some(plugin) = plugin(&scratch) else { return };
    let client = "h.pwrite(b'x' * 512, 0)\n\
        buffers = [nbd.Buffer(256 << 10) for at in range(64)]\n\
        failed = []\n\
        for at in range(64):\n\
        \x20 h.aio_pread(buffers[at], at * (256 << 10), lambda error: failed.append(error.value) or 1)\n\
        while h.aio_in_flight() > 0: h.poll(-1)\n\
        assert failed == [0] * 64, failed\n";
    for (wrong, most) in [("", 3 * MIB), ("change-bound", MIB)] {
        let (_, notes) = serve(&plugin, wrong, client);
        let last = notes.last().unwrap();
        assert_eq!(*last, format!("most 0 {most} 0"), "{wrong}");
    }
}

#[test]
fn answers_that_do_not_fit_their_request_are_errors_by_name() {
    let scratch = ScratchDir::new().unwrap();
    let Some(plugin) = plugin(&scratch) else { return };
    let write = "try: h.pwrite(b'x' * 512, 0)\nexcept nbd.Error as error: print(error.errno)\n";
    let map = "try: h.block_status(512, 0, lambda *all: 0)\n\
               except nbd.Error as error: print(error.errno)\n";
    for (wrong, client, wanted) in [
        ("write-as-read", write, "plugin every answered a write as if it were a read"),
        ("write-as-hole", write, "plugin every answered a write as if it were a read"),
        ("no-extents", map, "plugin every: extents answered none"),
    ] {
        let (said, _) = serve(&plugin, wrong, client);
        assert!(said.contains("EIO\n") && said.contains(wanted), "{wrong}: {said}");
    }
    // Zeroing that a plugin cannot do after all is written.
    let client = "h.pwrite(b'x' * 8192, 0)\nh.zero(4096, 4096)\n\
                  assert h.pread(8192, 0) == b'x' * 4096 + bytes(4096)\n";
    let (_, notes) = serve(&plugin, "no-zero", client);
    assert!(notes.contains(&"pwrite 4096 4096 0".to_string()), "{notes:?}");
}

/// The client has gone when the answer comes: the handle is closed behind it, and not before.
#[test]
fn an_answer_after_the_client_has_gone_is_heard_by_nobody() {
    let scratch = ScratchDir::new().unwrap();
    let Some(plugin) = plugin(&scratch) else { return };
    // It stays until the plugin has the request, and not until the answer.
    let client = "import os\nh.aio_pread(nbd.Buffer(512), 0)\n\
                  while 'pread' not in open(os.environ['NOTES']).read(): h.poll(10)\n\
                  os._exit(0)\n";
    let (said, notes) = serve(&plugin, "late", client);
    let order: Vec<_> = notes.iter().filter_map(|note| note.split(' ').next()).collect();
    assert_eq!(order, ["pread", "answered", "close", "most"], "{said}");
    assert!(!said.contains("panicked") && !said.contains("is not there"), "{said}");
}

#[test]
fn what_a_thread_said_of_one_request_is_no_reason_for_another() {
    let scratch = ScratchDir::new().unwrap();
    let Some(plugin) = plugin(&scratch) else { return };
    let client =
        "h.pread(512, 0)\ntry: h.pread(512, 512)\nexcept nbd.Error as error: print(error.errno)\n";
    let (said, _) = serve(&plugin, "stale", client);
    assert!(said.starts_with("EIO\n"), "{said}");
    assert!(said.contains("async_pread of plugin every failed"), "{said}");
}

/// No request is answered on the way out.
#[test]
fn a_callback_that_does_not_return_but_leaves_ends_the_process_by_name() {
    let scratch = ScratchDir::new().unwrap();
    let Some(plugin) = plugin(&scratch) else { return };
    let client = "try: h.pread(512, 0)\nexcept nbd.Error as error: print(error.errno)\n";
    let left = "plugin every: async_pread ended by an exception or by the end of its thread";
    for (wrong, wanted) in [
        ("throw", left),
        ("end-of-thread", left),
        ("exit", "exit in callback async_pread of plugin every"),
    ] {
        let (output, _) = run(&plugin, wrong, client);
        let said = lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(wanted), "{wrong}: {said}");
        assert!(
            !said.contains("got lost") && !output.stdout.starts_with(b"EIO"),
            "{wrong}: {said}"
        );
        assert!(wrong != "exit" || output.status.code() == Some(5), "{}", output.status);
    }
}
