//! Block sizes of plugins: told to clients and no more, as nbdkit does it, next to nbdkit.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Output;

use blockhaul_tests::{LIMIT, bounded, compile, lossy, program, text};
use testkit::tools::{Peer, Scratch, among_peers};

/// Requests below the minimum, unaligned, and beyond the maximum, from a client that does not care.
const ASK: &str = "nbdsh -c '
import os
h.set_strict_mode(0)
h.set_full_info(True)
h.connect_uri(os.environ[\"uri\"])
print(\"sizes\", [h.get_block_size(which) for which in range(3)])
def tried(what, *args):
    try:
        what(*args)
        print(what.__name__, args[-1], \"fine\")
    except nbd.Error as error:
        print(what.__name__, args[-1], error.errno)
M = 1 << 20
for count, at in (1, 0), (4096, 100), (4097, 512), (512, 512), (131072, 0), (131584, 0), \\
                 (40 * M, 0), (64 * M, 64 * M), (2, 128 * M - 1):
    print(count, at)
    tried(h.pread, count, at)
    tried(h.pwrite, b\"1\" * count, at)
    for what in h.zero, h.trim, h.cache:
        tried(what, count, at)
'";

/// What the client saw of a server.
#[track_caller]
fn asked(program: &Path, args: &[&str]) -> String {
    let script = format!("export uri; {ASK}");
    let mut command = among_peers(program).unwrap();
    let output: Output = bounded(command.args(args).args(["--run", &script]), LIMIT);
    assert!(output.status.success(), "{args:?}: {}", lossy(&output.stderr));
    lossy(&output.stdout)
}

/// Both servers with these words before and behind the plugin; `%` in them is where notes go. Gives
/// what both clients saw and what both plugins got, which have to be the same.
#[track_caller]
fn same(scratch: &Scratch, args: &[&str]) -> (String, String) {
    let ours = scratch.file("nbdkit");
    if !ours.exists() {
        symlink(program(), &ours).unwrap();
    }
    let of = |name: &str, program: &Path| {
        let notes = scratch.file(name);
        let _ = fs::remove_file(&notes);
        let args: Vec<_> = args.iter().map(|arg| arg.replace('%', text(&notes))).collect();
        let args: Vec<_> = args.iter().map(String::as_str).collect();
        (asked(program, &args), fs::read_to_string(&notes).unwrap_or_default())
    };
    let (ours, theirs) = (of("ours", &ours), of("theirs", Path::new("nbdkit")));
    assert_eq!(ours.0, theirs.0, "{args:?}: what clients see");
    assert_eq!(ours.1, theirs.1, "{args:?}: what the plugin gets");
    ours
}

/// A folder, and the plugin that writes down what it gets.
fn sizes() -> Option<(Scratch, String)> {
    Peer::require("nbdkit")?;
    let scratch = Scratch::new().unwrap();
    let plugin = compile(Path::new("tests/tests/block_sizes.c"), "SIZES", &scratch)?;
    let plugin = text(&plugin).to_string();
    Some((scratch, plugin))
}

#[test]
fn a_plugin_gets_what_clients_send() {
    let Some((scratch, plugin)) = sizes() else { return };
    let (seen, got) = same(&scratch, &[&plugin, "notes=%"]);
    assert!(seen.contains("sizes [512, 4096, 131072]"), "{seen}");
    for call in ["pread 1 0\n", "pwrite 4096 100\n", "pread 41943040 0\n", "pwrite 67108864"] {
        assert!(got.contains(call), "{call}: {got}");
    }
}

#[test]
fn a_policy_refuses_what_does_not_keep_to_them() {
    let Some((scratch, plugin)) = sizes() else { return };
    let policy = "--filter=blocksize-policy";
    let error = "blocksize-error-policy=error";
    // The plugin's own sizes, and others.
    let (_, got) = same(&scratch, &[policy, &plugin, "notes=%", error]);
    assert!(got.contains("pread 131072 0\n") && !got.contains("pread 131584"), "{got}");
    assert!(!got.contains("pread 1 0\n") && !got.contains("zero 4097"), "{got}");
    let larger = ["blocksize-minimum=4096", "blocksize-maximum=1M"];
    let args = [&[policy, &plugin, "notes=%", error][..], &larger].concat();
    same(&scratch, &args);
    same(&scratch, &[policy, &plugin, "notes=%", "blocksize-error-policy=allow"]);
    same(&scratch, &[policy, "null", "128M", error]);
    same(&scratch, &[policy, "null", "128M", error, "blocksize-minimum=512"]);
}

#[test]
fn a_script_gets_what_clients_send() {
    let Some((scratch, _)) = sizes() else { return };
    let eval = [
        "eval",
        "get_size=echo 128M",
        "block_size=echo 512 4096 131072",
        "pread=echo pread $3 $4 >> %; head -c $3 /dev/zero",
        "can_write=exit 0",
        "pwrite=echo pwrite $3 $4 >> %; cat > /dev/null",
        "can_zero=exit 0",
        "zero=echo zero $3 $4 >> %",
    ];
    let (seen, got) = same(&scratch, &eval);
    assert!(seen.contains("sizes [512, 4096, 131072]"), "{seen}");
    assert!(got.contains("pread 41943040 0\n") && got.contains("zero 4097 512\n"), "{got}");
}

#[test]
fn a_plugin_in_a_process_of_its_own_gets_the_same() {
    let Some((scratch, plugin)) = sizes() else { return };
    let (notes, isolated) = (scratch.file("notes"), scratch.file("isolated"));
    let payload = "--limit=payload=64M";
    let plain = format!("nbdkit:{plugin}?notes={}", text(&notes));
    let apart = format!("nbdkit:{plugin}?notes={}", text(&isolated));
    let wanted = asked(program(), &["serve", payload, &plain]);
    assert_eq!(asked(program(), &["serve", payload, "--isolate", &apart]), wanted);
    let read = |path: &Path| fs::read_to_string(path).unwrap();
    assert_eq!(read(&isolated), read(&notes));
}

#[test]
fn a_copy_keeps_to_them() {
    let Some((scratch, plugin)) = sizes() else { return };
    let notes = scratch.file("notes");
    let device = format!("nbdkit:{plugin}?notes={}", text(&notes));
    blockhaul_tests::succeed(&["copy", &device, "null:"]);
    let got = fs::read_to_string(&notes).unwrap();
    assert!(got.lines().count() >= 1024, "{got}");
    for line in got.lines() {
        let numbers: Vec<u64> = line.split(' ').skip(1).map(|word| word.parse().unwrap()).collect();
        assert!(numbers[0] <= 131_072, "{line}");
        assert!(numbers.iter().all(|number| number.is_multiple_of(512)), "{line}");
    }
}
