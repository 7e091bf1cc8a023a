//! `blockhaul info` against nbdinfo 1.22 on the same servers: same bytes, same exit status.

use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

use blockhaul_testkit::require_peer;
use blockhaul_testkit::tools::{self, PeerProgram, PeerServer, ScratchDir, text};

const LIMIT: Duration = Duration::from_secs(120);
const OURS: &str = env!("CARGO_BIN_EXE_blockhaul");

/// Ways to ask about one export.
const MODES: &[&[&str]] = &[
    &[],
    &["--json"],
    &["--color"],
    &["--color", "--json"],
    &["--no-content"],
    &["--size"],
    &["--size", "--json"],
    &["--uri"],
    &["--uri", "--json"],
    &["--map"],
    &["--map", "--json"],
    &["--map", "--color"],
    &["--map", "--totals"],
    &["--map", "--totals", "--json"],
    &["--map", "--totals", "--color"],
    &["--map=no:such-context"],
];

/// Ways to ask about all exports.
const LISTS: &[&[&str]] = &[
    &["--list"],
    &["--list", "--json"],
    &["--list", "--color"],
    &["--list", "--content"],
    &["-L", "--content", "--json"],
];

const ABILITIES: &[&str] = &[
    "connect",
    "read",
    "write",
    "tls",
    "sr",
    "eh",
    "structured reply",
    "extended-headers",
    "read-only",
    "rotational",
    "block status payload",
    "cache",
    "df",
    "fast-zero",
    "flush",
    "fua",
    "multi_conn",
    "trim",
    "zero",
];

/// Both programs with the peers' `file` and libraries.
fn run(program: &str, mode: &[&str], uri: &str) -> Output {
    let mut command = tools::among_peers(program).unwrap();
    if program == OURS {
        command.arg("info");
    }
    command.args(mode).arg(uri);
    tools::output(&mut command, LIMIT).unwrap_or_else(|why| panic!("{program} {mode:?}: {why}"))
}

/// Runs both; where nbdinfo fails, ours must fail, too, and print nothing but its reason.
#[track_caller]
fn compare(mode: &[&str], uri: &str) {
    let theirs = run("nbdinfo", mode, uri);
    let ours = run(OURS, mode, uri);
    let said = text(&ours.stderr);
    assert_eq!(theirs.status.code(), ours.status.code(), "{mode:?} {uri}: {said}");
    if theirs.status.success() {
        assert_eq!(text(&theirs.stdout), text(&ours.stdout), "{mode:?} {uri}: {said}");
    } else if theirs.status.code() == Some(1) {
        assert_eq!(text(&ours.stdout), "", "{mode:?} {uri}");
        assert!(said.starts_with("blockhaul: info: ") && said.lines().count() == 1, "{said}");
    }
}

#[track_caller]
fn compare_all(server: &PeerServer, exports: &[&str], lists: bool) {
    for export in exports {
        let uri = server.uri(export);
        MODES.iter().for_each(|mode| compare(mode, &uri));
        for ability in ABILITIES {
            compare(&["--can", ability], &uri);
        }
        compare(&["--isnt", "write"], &uri);
        compare(&["--has-not", "trim"], &uri);
    }
    if lists {
        LISTS.iter().for_each(|mode| compare(mode, &server.uri("")));
    }
}

fn nbdkit(scratch: &ScratchDir, args: &[&str]) -> Option<PeerServer> {
    drop(PeerProgram::require("nbdinfo")?);
    let nbdkit = PeerProgram::require("nbdkit")?;
    Some(PeerServer::nbdkit(&nbdkit, &scratch.socket("s"), args).unwrap())
}

macro_rules! nbdkit_tests {
    ($($name:ident: $args:expr, $exports:expr, $lists:expr;)*) => {$(
        #[test]
        fn $name() {
            let scratch = ScratchDir::new().unwrap();
            let Some(server) = nbdkit(&scratch, &$args) else { return };
            compare_all(&server, &$exports, $lists);
        }
    )*};
}

nbdkit_tests! {
    nbdkit_data_with_an_odd_tail: ["data", "(0x55*32768) @131072 1"], ["", "any name"], true;
    nbdkit_memory_readonly: ["-r", "memory", "3G"], [""], true;
    nbdkit_pattern: ["pattern", "1M"], [""], true;
    nbdkit_empty: ["null", "0"], [""], true;
    nbdkit_oldstyle: ["-o", "memory", "1M"], [""], true;
    nbdkit_without_contexts: ["--no-mc", "memory", "1000"], [""], true;
    nbdkit_with_a_default_export: [
        "--filter=exportname", "memory", "1M", "default-export=dflt", "exportname=dflt",
        "exportname=two", "exportname-list=explicit", "exportdesc=fixed:some text, really",
    ], ["", "two"], true;
    nbdkit_with_block_sizes: [
        "--filter=blocksize-policy", "memory", "1M", "blocksize-minimum=512",
        "blocksize-preferred=64k", "blocksize-maximum=1M",
    ], [""], true;
    nbdkit_rotational: [
        "eval", "get_size=echo 65536", "pread=head -c $3 /dev/zero", "is_rotational=exit 0",
        "can_extents=exit 0", "can_multi_conn=exit 3",
        // Zero but allocated, hole that is not zero, one by one.
        "extents=echo 0 512 zero; echo 512 512 hole; echo 1024 512 hole,zero; echo 1536 64000 0",
    // Not its list: this server takes one connection at a time, on which nbdinfo waits for itself.
    ], [""], false;
}

/// Only what nbdinfo can tell: some of its questions need the options of fixed newstyle.
#[test]
fn nbdkit_not_fixed() {
    let scratch = ScratchDir::new().unwrap();
    let Some(server) = nbdkit(&scratch, &["--mask-handshake=0", "memory", "1M"]) else { return };
    for mode in [&[][..], &["--json"], &["--uri"], &["--map"], &["--list"], &["--can", "sr"]] {
        compare(mode, &server.uri(""));
    }
    assert_eq!(text(&run(OURS, &["--size"], &server.uri("")).stdout), "1048576\n");
}

/// Not its map: with 32-bit lengths that takes a request for each 4 GiB, whoever asks.
#[test]
fn nbdkit_largest() {
    let scratch = ScratchDir::new().unwrap();
    let Some(server) = nbdkit(&scratch, &["null", "9223372036854775807"]) else { return };
    for mode in [&[][..], &["--json"], &["--size"], &["--list"]] {
        compare(mode, &server.uri(""));
    }
}

#[test]
fn nobody_there() {
    drop(require_peer!("nbdinfo"));
    let scratch = ScratchDir::new().unwrap();
    let uri = format!("nbd+unix:///?socket={}", scratch.socket("none").display());
    for mode in [&[][..], &["--size"], &["--uri"], &["--can", "connect"], &["--isnt", "connect"]] {
        compare(mode, &uri);
    }
    compare(&["--can", "nothing that is known"], &uri);
}

#[test]
fn nbdkit_exports_with_odd_names() {
    let scratch = ScratchDir::new().unwrap();
    let dir = scratch.file("d");
    std::fs::create_dir(&dir).unwrap();
    let names = ["plain.img", "a \"q\\b.img", "ü b%20.img", "tab\there"];
    for name in names {
        std::fs::write(dir.join(name), [b'x'; 5000]).unwrap();
    }
    let arg = format!("dir={}", dir.display());
    let Some(server) = nbdkit(&scratch, &["file", &arg]) else { return };
    compare_all(&server, &names, true);
    // There is no default export.
    compare(&[], &server.uri(""));
    compare(&["--map"], &server.uri(""));
    compare(&["--size"], &server.uri(""));
}

#[test]
fn nbdkit_as_a_command() {
    drop(require_peer!("nbdkit"));
    for mode in MODES.iter().filter(|mode| !mode.contains(&"--uri")) {
        let run = |program| {
            let mut command = tools::among_peers(program).unwrap();
            if program == OURS {
                command.arg("info");
            }
            // nbdinfo leaves the server behind when it fails.
            let server = ["[", "nbdkit", "--exit-with-parent", "memory", "1M", "]"];
            command.args(*mode).arg("--").args(server);
            tools::output(&mut command, LIMIT).unwrap()
        };
        let theirs = run("nbdinfo");
        let ours = run(OURS);
        assert_eq!(theirs.status.code(), ours.status.code(), "{mode:?}: {}", text(&ours.stderr));
        assert_eq!(text(&theirs.stdout), text(&ours.stdout), "{mode:?}");
    }
}

fn shell(line: &str, dir: &Path) {
    let mut command = tools::among_peers("sh").unwrap();
    let output = tools::output(command.args(["-e", "-c", line, "sh"]).arg(dir), LIMIT).unwrap();
    assert!(output.status.success(), "{line}: {}", text(&output.stderr));
}

#[test]
fn qemu_nbd_raw() {
    let qemu_nbd = require_peer!("qemu-nbd");
    let _ = require_peer!("nbdinfo");
    let scratch = ScratchDir::new().unwrap();
    let image = scratch.file("i");
    std::fs::File::create(&image).unwrap().set_len(3_000_320).unwrap();
    let image = image.display().to_string();
    let socket = scratch.socket("s");
    let args = ["-e", "8", "-f", "raw", "-r", &image];
    let server = PeerServer::qemu_nbd(&qemu_nbd, &socket, &args).unwrap();
    compare_all(&server, &[""], true);
    compare(&[], &server.uri("nope"));
}

#[test]
fn qemu_nbd_qcow2_with_bitmaps_and_depth() {
    let qemu_nbd = require_peer!("qemu-nbd");
    let _ = require_peer!("nbdinfo");
    let scratch = ScratchDir::new().unwrap();
    shell(
        "cd \"$1\"; qemu-img create -q -f qcow2 a 8M; qemu-io -c 'w 0 64k' a
        qemu-img create -q -f qcow2 -b a -F qcow2 b; qemu-io -c 'w 1M 64k' b
        qemu-img create -q -f qcow2 -b b -F qcow2 c
        qemu-img bitmap --add c b0; qemu-img bitmap --add c other
        qemu-io -c 'w 2M 192k' -c 'w -z 4M 64k' c",
        scratch.path(),
    );
    let image = scratch.file("c").display().to_string();
    // With one client at a time nbdinfo waits ten seconds for itself.
    let bitmaps = ["-A", "-B", "b0", "-B", "other"];
    let about = ["-x", "hello", "-D", "world", &image];
    let args = [&["-e", "8", "-f", "qcow2"], &bitmaps[..], &about].concat();
    let server = PeerServer::qemu_nbd(&qemu_nbd, &scratch.socket("s"), &args).unwrap();
    compare_all(&server, &["hello"], true);
    for context in ["qemu:allocation-depth", "qemu:dirty-bitmap:b0", "qemu:dirty-bitmap:other"] {
        let map = format!("--map={context}");
        for rest in [&[][..], &["--json"], &["--totals"], &["--totals", "--json"], &["--color"]] {
            compare(&[&[map.as_str()], rest].concat(), &server.uri("hello"));
        }
    }
}

/// Our own server, for peers to judge.
fn serve(scratch: &ScratchDir, args: &[&str]) -> Option<PeerServer> {
    drop(PeerProgram::require("nbdinfo")?);
    Some(PeerServer::blockhaul(OURS.as_ref(), &scratch.socket("own"), args).unwrap())
}

macro_rules! own_tests {
    ($($name:ident: $args:expr, $exports:expr;)*) => {$(
        #[test]
        fn $name() {
            let scratch = ScratchDir::new().unwrap();
            let Some(server) = serve(&scratch, &$args) else { return };
            compare_all(&server, &$exports, true);
        }
    )*};
}

own_tests! {
    own_memory: ["memory:1G"], ["", "nope"];
    own_sample: ["-e", "disk 1", "--description", "what a disk looks like", "sample:64M"],
        ["", "disk 1"];
    own_pattern: ["pattern:1000"], [""];
    own_empty: ["memory:0"], [""];
    own_largest: ["zero:9223372036854775807"], [""];
    own_readonly: ["-r", "memory:1M"], [""];
    own_without_extended_headers: ["--no-extended", "sample:16G"], [""];
    own_without_contexts: ["--no-contexts", "memory:1M"], [""];
}

#[test]
fn long_maps_are_written_as_short_ones() {
    use std::os::unix::fs::FileExt as _;
    let scratch = ScratchDir::new().unwrap();
    let path = scratch.file("many.raw");
    let file = std::fs::File::create(&path).unwrap();
    // More than one reply has: every other page is a hole.
    let runs = 200_000;
    file.set_len(runs * 4096).unwrap();
    for page in (0..runs).step_by(2) {
        file.write_all_at(&[1], page * 4096).unwrap();
    }
    let Some(server) = serve(&scratch, &["-r", path.to_str().unwrap()]) else { return };
    for mode in [&["--map"][..], &["--map", "--json"], &["--map", "--totals"]] {
        compare(mode, &server.uri(""));
    }
}

#[test]
fn devices_that_are_not_servers_are_shown_likewise() {
    let info =
        |args: &[&str]| tools::output(Command::new(OURS).arg("info").args(args), LIMIT).unwrap();
    let output = info(&["--no-content", "memory:8M"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let told = text(&output.stdout);
    assert!(
        told.starts_with("device: memory:8M\n\texport-size: 8388608 (8M)\n\tcontexts:\n"),
        "{told}"
    );
    assert!(
        told.contains("\tis_read_only: false\n") && told.contains("\tcan_zero: true\n"),
        "{told}"
    );
    let output = info(&["--json", "pattern:1000"]);
    let told: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(told["device"], "pattern:1000");
    assert_eq!(told["exports"][0]["export-size"], 1000);
    assert_eq!(text(&info(&["--size", "zero:1M"]).stdout), "1048576\n");
    let output = tools::output(Command::new(OURS).args(["map", "memory:1M"]), LIMIT).unwrap();
    assert_eq!(text(&output.stdout), "         0     1048576    3  hole,zero\n");
    assert_eq!(info(&["--can", "write", "pattern:1M"]).status.code(), Some(2));
    assert_eq!(info(&["--uri", "memory:1M"]).status.code(), Some(1));
}
