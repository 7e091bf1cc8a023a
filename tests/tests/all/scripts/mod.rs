//! Scripts as disks (`sh:`, `eval:`), next to nbdkit running the same ones: clients see the same, and
//! the scripts see the same calls.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use blockhaul_testkit::tools::{PeerProgram, ScratchDir, among_peers};
use blockhaul_tests::{LIMIT, assert_same, bounded, lossy, program, text};

const DISK: &str = include_str!("disk.sh");
const CLIENT: &str = include_str!("client.py");

/// The program under test, among the peers.
fn blockhaul(args: &[&str]) -> Command {
    let mut command = among_peers(program()).unwrap();
    command.args(args);
    command
}

/// A script that can be started.
fn script(scratch: &ScratchDir, lines: &str) -> PathBuf {
    let path = scratch.file("script");
    fs::write(&path, lines).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
    path
}

/// Serves a device while the shell runs a command with `$uri`.
fn serve(device: &str, run: &str) -> Output {
    bounded(&mut blockhaul(&["serve", device, "--run", run]), LIMIT)
}

/// Percent-encodes a parameter.
fn encoded(value: &str) -> String {
    value.replace('%', "%25").replace('&', "%26")
}

/// The calls that a script has noted, but those whose place depends on the server: clients need not
/// ask for descriptions, and connections end side by side.
fn calls(log: &Path) -> Vec<String> {
    let text = fs::read_to_string(log).unwrap();
    let lines = text.lines().map(|line| line.trim_end().to_string());
    lines
        .filter(|line| !line.starts_with("export_description") && !line.starts_with("close"))
        .collect()
}

#[test]
fn a_script_serves_as_under_nbdkit_and_sees_the_same_calls() {
    let Some(nbdkit) = PeerProgram::require("nbdkit") else { return };
    let scratch = ScratchDir::new().unwrap();
    let disk = script(&scratch, DISK);
    let client = scratch.file("client.py");
    fs::write(&client, CLIENT).unwrap();
    let run = format!(
        "export uri; nbdsh -c 'exec(open(\"{}\").read())' && nbdinfo --json --list \"$uri\"",
        text(&client)
    );
    let logs = [scratch.file("theirs"), scratch.file("ours")];
    let mut theirs = nbdkit.command();
    theirs.args(["-U", "-", "sh", text(&disk), "1M", "--run", &run]).env("calls", &logs[0]);
    let theirs = bounded(&mut theirs, LIMIT);
    let device = format!("sh:{}?1M", text(&disk));
    let mut ours = blockhaul(&["serve", &device, "--run", &run]);
    let ours = bounded(ours.env("calls", &logs[1]), LIMIT);
    for output in [&theirs, &ours] {
        assert!(output.status.success(), "{}", lossy(&output.stderr));
    }
    // What the protocol of today has besides.
    let shown = |output: &Output| -> Vec<String> {
        let text = lossy(&output.stdout);
        let newer = ["structured", "extended", "block_status_payload", "\"uri\""];
        let lines = text.lines().filter(|line| newer.iter().all(|word| !line.contains(word)));
        lines.map(str::to_string).collect()
    };
    assert!(shown(&ours).len() > 20, "{:?}", shown(&ours));
    assert_eq!(shown(&ours), shown(&theirs));
    assert_eq!(calls(&logs[1]), calls(&logs[0]));
    let all = fs::read_to_string(&logs[1]).unwrap();
    assert_eq!(all.matches("open ").count(), all.matches("close ").count(), "{all}");
    assert!(all.ends_with("unload\n"), "{all}");
}

#[test]
fn commands_in_place_serve_as_under_nbdkit() {
    let Some(nbdkit) = PeerProgram::require("nbdkit") else { return };
    let scratch = ScratchDir::new().unwrap();
    let config = [
        ("config", "test $2 = text || exit 1; printf %s \"$3\" > $tmpdir/text"),
        ("text", "100% of it & more"),
        ("get_size", "echo 64k"),
        ("pread", "head -c $3 /dev/zero | tr '\\0' x"),
        ("pwrite", "echo \"$3 $4 [$5] $(wc -c)\" >> $calls"),
        ("can_fua", "echo emulate"),
        ("flush", "echo flush >> $calls"),
        ("can_flush", "exit 0"),
        ("extents", "echo \"EIO $(cat $tmpdir/text)\" >&2; exit 1"),
        ("missing", "echo $1 >> $calls; exit 2"),
    ];
    let run = "nbdsh --base-allocation -u \"$uri\" \
        -c 'h.pwrite(b\"1\" * 4096, 512, nbd.CMD_FLAG_FUA); h.zero(8192, 0)' \
        -c 'print(h.can_trim(), h.can_cache(), h.pread(5, 3))' \
        -c 'try: h.block_status(10, 0, lambda *a: 0)' \
        -c 'except nbd.Error as error: print(error.errno)'"
        .replace("' -c 'except", "\nexcept");
    let logs = [scratch.file("theirs"), scratch.file("ours")];
    let mut theirs = nbdkit.command();
    theirs.args(["-U", "-", "eval"]);
    theirs.args(config.map(|(key, value)| format!("{key}={value}")));
    let theirs = bounded(theirs.args(["--run", &run]).env("calls", &logs[0]), LIMIT);
    let parts = config.map(|(key, value)| format!("{key}={}", encoded(value)));
    let mut ours = blockhaul(&["serve", &format!("eval:{}", parts.join("&")), "--run", &run]);
    let ours = bounded(ours.env("calls", &logs[1]), LIMIT);
    assert!(ours.status.success(), "{}", lossy(&ours.stderr));
    assert_eq!(lossy(&ours.stdout), lossy(&theirs.stdout));
    // Abilities are asked for in an order of each server's own.
    let sorted = |log: &Path| {
        let mut calls = calls(log);
        calls.sort();
        calls
    };
    assert_eq!(sorted(&logs[1]), sorted(&logs[0]));
}

#[test]
fn what_a_script_says_of_an_error_reaches_the_client() {
    if PeerProgram::require("nbdsh").is_none() {
        return;
    }
    let device = "eval:get_size=echo 1M&pread=echo ENOSPC the cellar is full >%262; exit 1";
    let run =
        "nbdinfo --size \"$uri\"; blockhaul=$0; qemu-io -r -f raw -c 'r 0 512' \"$uri\" 2>&1; :";
    let output = serve(device, run);
    assert!(lossy(&output.stdout).contains("No space left"), "{output:?}");
    // Error text is in the reply: our own client shows it.
    let copy = format!("{} copy \"$uri\" null:", text(program()));
    let output = serve(device, &copy);
    assert!(!output.status.success());
    assert!(lossy(&output.stderr).contains("the cellar is full"), "{output:?}");
}

#[test]
fn a_run_without_end_is_killed_and_the_server_goes_on() {
    if PeerProgram::require("nbdsh").is_none() {
        return;
    }
    let device = "eval:get_size=echo 1M&thread_model=echo parallel&@timeout=5s\
        &pread=if [ $4 = 0 ]; then sleep 1000; fi; head -c $3 /dev/zero";
    let run = "nbdsh -u \"$uri\" -c 'import errno' \
        -c 'try: h.pread(512, 0)\nexcept nbd.Error as error: print(error.errno)' \
        -c 'print(len(h.pread(512, 512)))'";
    let output = serve(device, run);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(lossy(&output.stdout).replace("EIO", "5"), "5\n512\n", "{output:?}");
    let said = lossy(&output.stderr);
    assert!(said.contains("pread has not ended within 5 s"), "{said}");
}

#[test]
fn runs_are_in_parallel_or_not_as_the_script_says() {
    if PeerProgram::require("nbdsh").is_none() {
        return;
    }
    let run = "nbdsh -u \"$uri\" \
        -c 'buffers = [nbd.Buffer(512) for at in range(4)]' \
        -c 'for at in range(4): h.aio_pread(buffers[at], at * 512, lambda e: 1)' \
        -c 'while h.aio_in_flight() > 0: h.poll(-1)' \
        -c 'print(sorted(bytes(buffer.to_bytearray())[0] for buffer in buffers))'";
    // Each waits until all four are there.
    let together = "mkdir $tmpdir/$4; while [ $(ls -d $tmpdir/[0-9]* | wc -l) -lt 4 ]; do sleep 0.01; \
        done; head -c $3 /dev/zero";
    let device = format!(
        "eval:get_size=echo 1M&thread_model=echo parallel&@threads=4&@timeout=60s&pread={}",
        encoded(together)
    );
    let output = serve(&device, run);
    assert_eq!(lossy(&output.stdout), "[0, 0, 0, 0]\n", "{output:?}");
    // Each finds itself alone, or says so.
    let alone = "mkdir $tmpdir/busy || { head -c $3 /dev/zero | tr '\\0' x; exit 0; }; sleep 0.05; \
        rmdir $tmpdir/busy; head -c $3 /dev/zero";
    for model in ["", "&thread_model=echo serialize-requests", "&thread_model=echo nonsense"] {
        let device = format!("eval:get_size=echo 1M{model}&pread={}", encoded(alone));
        let output = serve(&device, run);
        assert_eq!(lossy(&output.stdout), "[0, 0, 0, 0]\n", "{model}: {output:?}");
    }
}

#[test]
fn a_script_may_end_the_server_or_the_connection() {
    if PeerProgram::require("nbdsh").is_none() {
        return;
    }
    let scratch = ScratchDir::new().unwrap();
    let client = scratch.file("client.py");
    let lines =
        "try:\n  h.pwrite(b'1' * 512, 0)\n  print('done')\nexcept nbd.Error:\n  print('lost')\n";
    fs::write(&client, lines).unwrap();
    let run = format!("nbdsh -u \"$uri\" -c 'exec(open(\"{}\").read())'", text(&client));
    for (code, then, printed) in [
        // The command is not ended with the server.
        (
            4,
            "while nbdsh -u \"$uri\" -c pass 2>/dev/null; do sleep 0.1; done; echo gone",
            "done\ngone\n",
        ),
        (6, "echo the server goes on", "lost\nthe server goes on\n"),
        (7, "echo the server goes on", "done\nthe server goes on\n"),
    ] {
        let unloaded = scratch.file(&format!("unloaded-{code}"));
        let device = format!(
            "eval:get_size=echo 1M&pread=exit 0&pwrite=cat >/dev/null; exit {code}\
             &unload=echo $tmpdir > {}",
            text(&unloaded)
        );
        let output = serve(&device, &format!("{run}; {then}"));
        assert_eq!(lossy(&output.stdout), printed, "{code}: {output:?}");
        let folder = fs::read_to_string(&unloaded).unwrap();
        assert!(folder.starts_with("/tmp/"), "{folder}");
        assert!(!Path::new(folder.trim_end()).exists(), "{code}");
    }
}

#[test]
fn a_script_may_come_on_standard_input() {
    let scratch = ScratchDir::new().unwrap();
    let lines =
        "case $1 in get_size) echo 12345 ;; pread) head -c $3 /dev/zero ;; *) exit 2 ;; esac\n";
    let path = script(&scratch, lines);
    let out = scratch.file("out");
    let copy = |input: &Path| {
        let line = format!("{} copy sh:- {} <{}", text(program()), text(&out), text(input));
        bounded(Command::new("sh").args(["-c", &line]), LIMIT)
    };
    let output = copy(&path);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(fs::metadata(&out).unwrap().len(), 12345);
    let output = copy(Path::new("/dev/null"));
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(lossy(&output.stderr).contains("no script on standard input"), "{output:?}");
}

#[test]
fn bad_scripts_and_parameters_are_refused_with_a_reason() {
    let scratch = ScratchDir::new().unwrap();
    let empty = script(&scratch, "#!/bin/sh\nexit 2\n");
    let with = |options: &str| format!("sh:{}{options}", text(&empty));
    for (device, reason) in [
        ("sh:".to_string(), "name the script first"),
        ("sh:?size=1".to_string(), "name the script first"),
        ("sh:/nonexistent/script".to_string(), "/nonexistent/script"),
        (with(""), "get_size"),
        (with("?size=1"), "takes no parameters"),
        (with("?one"), "KEY=VALUE"),
        (with("?@timeout=x"), "@timeout"),
        ("eval:".to_string(), "get_size"),
        ("eval:get_size=echo 1&get_size=echo 2".to_string(), "more than once"),
        ("eval:get_size=echo 1&size=1".to_string(), "size is no method"),
        ("eval:get_size=echo much".to_string(), "much"),
        ("eval:get_size=exit 3".to_string(), "3/false"),
        ("eval:get_size=kill -9 $$".to_string(), "signal 9"),
        ("eval:get_size=echo 1&open=echo EPERM not you >%262; exit 1".to_string(), "not you"),
        ("eval:get_size=echo 1&can_cache=echo so".to_string(), "neither none, emulate nor native"),
        ("eval:get_size=echo 1".to_string(), "pread"),
        ("eval:get_size=echo 4&pread=echo 123456".to_string(), "7 bytes instead of 4"),
        ("eval:get_size=echo 1&block_size=echo 3 3 3".to_string(), "block_size"),
    ] {
        let output = bounded(Command::new(program()).args(["copy", &device, "null:"]), LIMIT);
        let said = lossy(&output.stderr);
        assert!(!output.status.success(), "{device}: {said}");
        assert!(said.contains(reason), "{device}: {said}");
    }
}

#[test]
fn the_plugin_of_the_manual_is_read_and_written() {
    let scratch = ScratchDir::new().unwrap();
    let manual = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/plugins-script.md");
    let manual = fs::read_to_string(manual).unwrap();
    let lines = manual.split("```sh\n").nth(1).unwrap().split("```").next().unwrap();
    assert!(lines.lines().count() <= 20, "it says so");
    let disk = script(&scratch, lines);
    let input = scratch.file("in");
    let out = scratch.file("out");
    // Data, a long run of zeroes, and data again.
    let mut bytes = vec![0; 4 << 20];
    for at in (0..300_000).chain(3 << 20..4 << 20) {
        bytes[at] = (at % 251 + 1) as u8;
    }
    fs::write(&input, &bytes).unwrap();
    let program = text(program());
    let run = format!(
        "{program} copy {0} \"$uri\" && {program} copy \"$uri\" {1}",
        text(&input),
        text(&out)
    );
    let output = serve(&format!("sh:{}?size=4M", text(&disk)), &run);
    assert!(output.status.success(), "{output:?}");
    assert_same(&input, &out, "what the script keeps");
}
