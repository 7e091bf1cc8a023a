//! Plugins written for these tests, in C: those that misbehave, and those that answer later.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Output, Stdio};
use std::time::{Duration, Instant};

use blockhaul_testkit::tools::{PeerServer, ScratchDir, among_peers, long, until, until_ok};
use blockhaul_tests::{LIMIT, assert_same, bounded, compile, distinct, done, lossy, program, text};

/// Serves `nbdkit:PLUGIN?OPTIONS` while a script runs among the peers.
#[track_caller]
fn serve(plugin: &Path, options: &str, script: &str) -> Output {
    let device = format!("nbdkit:{}?{options}", text(plugin));
    let mut command = among_peers(program()).unwrap();
    command.args(["serve", &device, "--run", &format!("set -e; {script}")]);
    bounded(&mut command, if long() { 20 * LIMIT } else { LIMIT })
}

/// Standard error of a server whose script has to succeed.
#[track_caller]
fn served(plugin: &Path, options: &str, script: &str) -> String {
    let output = serve(plugin, options, script);
    let said = lossy(&output.stderr);
    assert!(output.status.success(), "{options}: {}: {said}", output.status);
    assert!(!said.contains("has not ended"), "{said}");
    lossy(&output.stdout) + &said
}

/// The plugin that misbehaves in this way: an asynchronous one for some.
fn misbehaving(mode: &str, scratch: &ScratchDir) -> Option<PathBuf> {
    let define = if mode.starts_with("async-") { "ASYNC" } else { "BLOCKING" };
    compile(Path::new("tests/tests/misbehaving.c"), define, scratch)
}

/// Seconds after which a callback has taken too long: longer than a busy machine holds up those that
/// return, and shorter than those sleep that do not return in time.
const PATIENCE: u32 = 5;

/// Both kinds of the plugin that misbehaves, which are compiled before anybody uses them.
struct Misbehaving {
    blocking: PathBuf,
    later: PathBuf,
}

impl Misbehaving {
    fn both(scratch: &ScratchDir) -> Option<Misbehaving> {
        let [blocking, later] = ["hang", "async-late"].map(|mode| misbehaving(mode, scratch));
        Some(Misbehaving { blocking: blocking?, later: later? })
    }

    fn of(&self, mode: &str) -> &Path {
        if mode.starts_with("async-") { &self.later } else { &self.blocking }
    }
}

/// Does this with all cases side by side, as most of them wait.
fn at_once<T: Sync>(cases: &[T], check: impl Fn(&T) + Sync) {
    let check = &check;
    std::thread::scope(|scope| {
        for case in cases {
            scope.spawn(move || check(case));
        }
    });
}

const READ: &str = "nbdsh -u \"$uri\" -c 'h.pread(512, 0)' 2>&1";

#[test]
fn a_null_handle_and_wrong_answers_have_names() {
    let scratch = ScratchDir::new().unwrap();
    // Our own client shows the server's words; libnbd's programs keep them to themselves.
    let read = format!("! {} copy --retries 0 \"$uri\" null: 2>&1", text(program()));
    let map = format!("! {} map \"$uri\" 2>&1", text(program()));
    for (mode, script, wanted) in [
        ("null-open", "! nbdinfo \"$uri\" 2>&1", "open answered NULL and gave no reason"),
        ("open-error", "! nbdinfo \"$uri\" 2>&1", "the cupboard is bare"),
        ("read-error", read.as_str(), "the disk is on fire"),
        // Seen in the log alone.
        ("read-shut", &format!("! {READ}"), "the office is closed"),
        ("read-odd", read.as_str(), "pread answered 7 instead of 0 or -1"),
        ("size-odd", "! nbdinfo \"$uri\" 2>&1", "get_size answered -5"),
        ("block-odd", "! nbdinfo \"$uri\" 2>&1", "block_size answered 3, 4096 and 8192"),
        ("extents-none", map.as_str(), "extents answered none"),
        ("async-short", read.as_str(), "answered a read of 65536 bytes with 100"),
        ("async-refuse", read.as_str(), "no time for this"),
        ("async-error", read.as_str(), "later than you think"),
    ] {
        let Some(plugin) = misbehaving(mode, &scratch) else { return };
        let said = served(&plugin, &format!("mode={mode}"), script);
        assert!(said.contains(wanted), "{mode}: {said}");
    }
}

#[test]
fn double_late_and_foreign_answers_harm_nothing() {
    let scratch = ScratchDir::new().unwrap();
    let script =
        "nbdsh -u \"$uri\" -c 'for i in range(100): assert h.pread(4096, 0) == b\"r\" * 4096'";
    let Some(plugin) = misbehaving("async-double", &scratch) else { return };
    let said = served(&plugin, "mode=async-double", script);
    assert!(said.contains("answered a request that is not there"), "{said}");
}

#[test]
fn a_plugin_that_never_answers_is_reported_and_the_server_goes_on() {
    let scratch = ScratchDir::new().unwrap();
    let script = format!("! {READ}; nbdsh -u \"$uri\" -c 'h.pread(512, 4096)'");
    let Some(plugins) = Misbehaving::both(&scratch) else { return };
    at_once(&["hang", "async-late"], |mode| {
        let said = served(plugins.of(mode), &format!("mode={mode}&@timeout={PATIENCE}s"), &script);
        let place = "read of 512 bytes at offset 0";
        assert!(said.contains("has not completed") && said.contains(place), "{said}");
        assert!(said.contains("buffer cannot be reused"), "{said}");
        let returned = format!("for {PATIENCE} s, pread has not returned");
        assert!(*mode != "hang" || said.contains(&returned), "{said}");
    });
}

/// Without `--isolate` the server ends, with words: its service manager starts it again. What an
/// asynchronous plugin keeps for ever counts, too.
#[test]
fn a_watchdog_ends_a_server_whose_plugin_hangs() {
    let scratch = ScratchDir::new().unwrap();
    let cases = [
        ("hang-ever", "pread has not returned"),
        ("hang-open", "open has not returned"),
        ("async-cancel", "async_pread has not been answered"),
    ];
    let Some(plugins) = Misbehaving::both(&scratch) else { return };
    at_once(&cases, |(mode, what)| {
        let script = "! nbdsh -u \"nbd+unix:///hang?socket=$unixsocket\" -c 'h.pread(512, 0)' 2>&1";
        let output = serve(plugins.of(mode), &format!("mode={mode}&@watchdog={PATIENCE}s"), script);
        let said = lossy(&output.stderr);
        let wanted = format!("{what} for {PATIENCE} s; the watchdog ends the process");
        assert!(!output.status.success() && said.contains(&wanted), "{mode}: {said}");
    });
}

/// Wherever a client's connection hangs: the client gets an error, the log names the callback, and
/// others continue.
#[test]
fn a_connection_that_hangs_in_a_callback_is_reported_and_others_go_on() {
    let scratch = ScratchDir::new().unwrap();
    let ours = text(program());
    let hangs = "nbd+unix:///hang?socket=$unixsocket";
    let info = format!("! {ours} info \"{hangs}\" 2>&1");
    let list = format!("! {ours} info --list \"$uri\" 2>&1");
    // The first client.
    let first = format!("! {ours} info \"$uri\" 2>&1");
    let cases = [
        ("hang-open", info.as_str(), "open"),
        ("hang-size", &info, "get_size"),
        ("hang-can", &info, "can_extents"),
        ("hang-list", &list, "list_exports"),
        ("hang-preconnect", &first, "preconnect"),
    ];
    let Some(plugins) = Misbehaving::both(&scratch) else { return };
    at_once(&cases, |(mode, client, callback)| {
        let mode = *mode;
        let closed = scratch.file(&format!("closed-{mode}"));
        // What comes too late is closed, for which this waits.
        let wait = match mode {
            "hang-can" => format!("until [ -e {} ]; do sleep 0.1; done", text(&closed)),
            _ => ":".to_string(),
        };
        let script = format!("{client}; nbdsh -u \"$uri\" -c 'h.pread(512, 4096)'; {wait}");
        let options = format!("mode={mode}&closed={}&@timeout={PATIENCE}s", text(&closed));
        let output = serve(plugins.of(mode), &options, &script);
        let heard = lossy(&output.stdout);
        let said = lossy(&output.stderr);
        // A plugin in a callback that never returns cannot be unloaded on exit, and is given up.
        let status = if mode == "hang-can" { 0 } else { 9 };
        assert_eq!(output.status.code(), Some(status), "{mode}: {heard}{said}");
        let wanted = format!("plugin misbehaving: {callback} has not returned for {PATIENCE} s");
        assert!(said.contains(&wanted), "{mode}: {said}");
        // Before the handshake there is no way to say anything.
        assert!(mode == "hang-preconnect" || heard.contains(&wanted), "{mode}: {heard}");
        // What came too late was not left open.
        assert!(mode != "hang-can" || said.contains("closed 'hang'"), "{mode}: {said}");
    });
}

#[test]
fn a_crash_names_the_plugin_and_the_callback() {
    let scratch = ScratchDir::new().unwrap();
    for (mode, wanted) in [
        ("segv", "segmentation fault in callback pread of plugin misbehaving"),
        ("abort", "abort in callback pread of plugin misbehaving"),
    ] {
        let Some(plugin) = misbehaving(mode, &scratch) else { return };
        let output = serve(&plugin, &format!("mode={mode}"), &format!("! {READ}"));
        let said = lossy(&output.stderr);
        assert!(!output.status.success(), "{said}");
        assert!(said.contains(wanted), "{mode}: {said}");
    }
}

/// Of two plugins in a server, the line names the one.
#[test]
fn a_crash_names_no_other_plugin() {
    let scratch = ScratchDir::new().unwrap();
    let Some(other) = compile(Path::new("tests/tests/who.c"), "WHO", &scratch) else { return };
    let Some(plugin) = misbehaving("segv", &scratch) else { return };
    let device = format!("nbdkit:{}?mode=segv", text(&plugin));
    let mut command = among_peers(program()).unwrap();
    command.args(["serve", "-r", &device, "--export"]);
    command.arg(format!("other=nbdkit:{}", text(&other)));
    let said = lossy(&bounded(command.args(["--run", &format!("! {READ}")]), LIMIT).stderr);
    let line = "segmentation fault in callback pread of plugin misbehaving\n";
    assert!(said.contains(line), "{said}");
}

#[test]
fn cancelled_requests_are_told_of_when_the_client_goes() {
    let scratch = ScratchDir::new().unwrap();
    let Some(plugin) = misbehaving("async-cancel", &scratch) else { return };
    let nbdsh = blockhaul_testkit::require_peer!("nbdsh");
    let socket = scratch.socket("s");
    let device = format!("nbdkit:{}?mode=async-cancel", text(&plugin));
    let mut server = among_peers(program()).unwrap();
    server.args(["serve", "-f", "--exit-with-parent", "-U", text(&socket), &device]);
    let server = PeerServer::start(server, &socket).unwrap();
    // A client that sends a request and leaves without waiting.
    let mut client = nbdsh.command();
    client.args(["-u", &server.uri(""), "-c", "h.aio_pread(nbd.Buffer(512), 0)"]);
    done(client.args(["-c", "h.poll(100)", "-c", "import os", "-c", "os._exit(0)"]));
    // While the server continues, and not because it ends.
    server.says("cancelled").unwrap();
    assert!(server.stop().unwrap().success());
}

/// Three threads answer each request, some after its time is up, while clients leave without waiting and
/// the server stops in the midst of it. `BLOCKHAUL_LONG` does it with a million requests. On a busy machine
/// even opening may take longer than the time that callbacks have: that client goes away.
#[test]
fn answers_race_with_clients_that_leave_with_timeouts_and_with_the_stop() {
    let scratch = ScratchDir::new().unwrap();
    let Some(plugin) = misbehaving("async-race", &scratch) else { return };
    let rounds = if long() { 5000 } else { 50 };
    let source = format!(
        "import random\n\
         def ended(error): return 1\n\
         for round in range({rounds}):\n  \
           h = nbd.NBD()\n  \
           try: h.connect_uri(uri)\n  \
           except nbd.Error: continue\n  \
           for i in range(200):\n    \
             h.aio_pread(nbd.Buffer(512), 64 * i, completion=ended)\n  \
           for i in range(random.randrange(30)):\n    \
             h.poll(1)\n  \
           del h\n"
    );
    let path = scratch.file("clients.py");
    fs::write(&path, format!("import nbd, os\nuri = os.environ['URI']\n{source}")).unwrap();
    let script = format!("URI=\"$uri\" python3 {}", text(&path));
    let said = served(&plugin, "mode=async-race&@timeout=3ms", &script);
    assert!(said.contains("answered a request that is not there"), "{said}");
    assert!(!said.contains("panicked") && !said.contains("internal error"), "{said}");
}

#[test]
fn the_plugin_in_the_manual_works_and_is_as_short_as_it_says() {
    let scratch = ScratchDir::new().unwrap();
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let manual = fs::read_to_string(workspace.join("docs/plugins-c.md")).unwrap();
    let source = manual.split("```c\n").nth(1).unwrap().split("```").next().unwrap();
    assert_eq!(source.lines().count(), 40);
    fs::write(scratch.file("mini.c"), source).unwrap();
    let Some(plugin) = compile(&scratch.file("mini.c"), "MANUAL", &scratch) else { return };
    let input = scratch.file("in");
    let bytes = distinct(64 << 20);
    fs::write(&input, bytes).unwrap();
    let out = scratch.file("out");
    let from = text(&input);
    let to = text(&out);
    served(&plugin, "", &format!("nbdcopy {from} \"$uri\"; nbdcopy \"$uri\" {to}"));
    assert_same(&input, &out, "through the manual's plugin");
}

#[test]
fn the_example_in_memory_is_read_and_written_within_its_bound() {
    let scratch = ScratchDir::new().unwrap();
    let Some(plugin) =
        compile(Path::new("crates/devices/cabi/examples/async-memory.c"), "EXAMPLE", &scratch)
    else {
        return;
    };
    let input = scratch.file("in");
    let bytes = distinct(8 << 20);
    fs::write(&input, bytes).unwrap();
    let out = scratch.file("out");
    let script =
        format!("nbdcopy --flush {} \"$uri\"; nbdcopy \"$uri\" {}", text(&input), text(&out));
    served(&plugin, "size=8M&delay=2ms&memory=1M", &script);
    assert_same(&input, &out, "through the asynchronous plugin");
    // And without a server between.
    let device = format!("nbdkit:{}?size=8M&delay=1ms", text(&plugin));
    let mut copy = among_peers(program()).unwrap();
    done(copy.args(["copy", "--verify", text(&input), &device]));
}

/// The name of each thread of a process.
fn threads(pid: u32) -> Vec<String> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    // One that has just ended has none.
    tasks.flatten().filter_map(|task| fs::read_to_string(task.path().join("comm")).ok()).collect()
}

/// However many requests a client has in flight, there are the plugin's two threads, a worker, and the
/// one that waits for signals. Those that opened the plugin end when they have rested.
#[test]
fn a_thousand_requests_in_flight_need_four_threads() {
    let fio = blockhaul_testkit::require_peer!("fio");
    let scratch = ScratchDir::new().unwrap();
    let Some(plugin) =
        compile(Path::new("crates/devices/cabi/examples/async-memory.c"), "EXAMPLE", &scratch)
    else {
        return;
    };
    let socket = scratch.socket("s");
    let device = format!("nbdkit:{}?size=64M&delay=20ms&memory=64M", text(&plugin));
    let mut server = among_peers(program()).unwrap();
    server.args(["serve", "-f", "-r", "--exit-with-parent", "--workers", "1", "--threads", "1024"]);
    server.args(["-U", text(&socket), &device]);
    let server = PeerServer::start(server, &socket).unwrap();
    let mut fio = fio.command();
    fio.args(["--name=load", "--thread", "--ioengine=nbd", "--rw=randread", "--bs=4k"]);
    fio.args(["--size=64M", "--iodepth=1024", "--time_based", "--runtime=100"]);
    fio.arg(format!("--uri=nbd+unix:///?socket={}", text(&socket)));
    let mut fio = Running(fio.stdout(Stdio::null()).spawn().unwrap());
    let mut steady = None;
    // For a second from when the threads that have nothing to do have ended.
    until_ok("its threads are few for a second", || {
        assert_eq!(fio.0.try_wait().unwrap(), None, "fio ended: {}", server.said());
        let threads = threads(server.pid());
        let busy = cpu_ticks(server.pid()) > 20;
        match steady {
            None if threads.len() <= 4 && busy => steady = Some(Instant::now()),
            Some(_) => assert!(threads.len() <= 4, "threads: {threads:?}"),
            None => {}
        }
        let over = steady.is_some_and(|since| since.elapsed() >= Duration::from_secs(1));
        if over { Ok(()) } else { Err(threads) }
    });
}

/// Processor time that a process has used, in hundredths of a second.
fn cpu_ticks(pid: u32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let behind_the_name = stat.rsplit(')').next().unwrap();
    let times = behind_the_name.split_whitespace().skip(11).take(2);
    times.map(|time| time.parse::<u64>().unwrap()).sum()
}

/// A process that is killed when this is dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_plugin_is_told_who_the_client_is() {
    let scratch = ScratchDir::new().unwrap();
    let Some(plugin) = compile(Path::new("tests/tests/who.c"), "WHO", &scratch) else { return };
    let pki = scratch.file("pki");
    done(among_peers(program()).unwrap().args(["tls", "init", "--client", "alice", text(&pki)]));
    let program = text(program());
    let pki = text(&pki);
    let tls =
        format!("nbds+unix:///?socket=$unixsocket&tls-certificates={pki}&tls-hostname=localhost");
    let read = |uri: &str, name: &str| {
        let out = scratch.file(name);
        let copy = format!("{program} copy --no-progress \"{uri}\" {}", text(&out));
        (copy, out)
    };
    let (plain, plain_out) = read("nbd+unix:///a%20name?socket=$unixsocket", "plain");
    let (proved, proved_out) = read(&tls, "proved");
    // Among the peers, a user who is not root is called so.
    let own = |option: &str| done(among_peers("id").unwrap().arg(option));
    let user = format!("uid={}gid={}", own("-u"), own("-g"));
    for (options, script, out, wanted) in [
        (&[][..], plain, plain_out, ["export=a name\ntls=0\nsubject=\nissuer=\n", &user]),
        (
            &["--tls-certificates", pki, "--tls-verify-peer"],
            proved,
            proved_out,
            ["tls=1\nsubject=CN=alice\nissuer=CN=", &user],
        ),
    ] {
        let device = format!("nbdkit:{}", text(&plugin));
        let mut command = among_peers(Path::new(program)).unwrap();
        command.args(["serve", "-r"]).args(options);
        done(command.args([&device, "--run", &script]));
        let said = lossy(&fs::read(out).unwrap());
        assert!(wanted.iter().all(|text| said.contains(text)), "{said}");
        assert!(said.contains("unix=1\npid=") && !said.contains("pid=-1"), "{said}");
    }
}

#[test]
fn a_plugin_that_hangs_in_close_is_given_up_after_the_drain_timeout() {
    let scratch = ScratchDir::new().unwrap();
    let Some(plugin) = misbehaving("hang-close", &scratch) else { return };
    let device = format!("nbdkit:{}?mode=hang-close", text(&plugin));
    let socket = scratch.socket("s");
    let log = scratch.file("log");
    let args = ["serve", "-f", "-U", text(&socket), "--drain-timeout=1s", &device];
    let mut command = blockhaul_tests::blockhaul(&args);
    let mut server = command.stderr(std::fs::File::create(&log).unwrap()).spawn().unwrap();
    until("it listens", || std::os::unix::net::UnixStream::connect(&socket).is_ok());
    let mut client = blockhaul_testkit::peer::Conversation::connect(&socket).unwrap();
    client.open("", blockhaul_wire::ReplyForm::Structured).unwrap();
    done(std::process::Command::new("kill").arg(server.id().to_string()));
    let status = blockhaul_testkit::tools::wait_within(&mut server, LIMIT);
    let said = std::fs::read_to_string(&log).unwrap();
    assert_eq!(status.and_then(|status| status.code()), Some(9), "{said}");
    assert!(said.contains("has not ended in time"), "{said}");
}
