//! Block sizes of plugins: only advertised to clients, like nbdkit, compared with nbdkit.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Output;

use blockhaul_testkit::tools::{PeerProgram, ScratchDir, among_peers};
use blockhaul_tests::{LIMIT, bounded, compile, lossy, program, text};

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
fn same(scratch: &ScratchDir, args: &[&str]) -> (String, String) {
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
    let ours = of("ours", &ours);
    let theirs = of("theirs", Path::new("nbdkit"));
    assert_eq!(ours.0, theirs.0, "{args:?}: what clients see");
    assert_eq!(ours.1, theirs.1, "{args:?}: what the plugin gets");
    ours
}

/// A directory, and the plugin that records its requests.
fn sizes() -> Option<(ScratchDir, String)> {
    PeerProgram::require("nbdkit")?;
    let scratch = ScratchDir::new().unwrap();
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
    let notes = scratch.file("notes");
    let isolated = scratch.file("isolated");
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

/// What nbdinfo finds different about plugins that are devices here, and why that stays.
const DIFFERENT: &[(&str, &str)] = &[
    // Files are asked what they can do when they are opened; the plugin waits for the first request.
    ("file f1", "can_fast_zero"),
    ("partitioning f1 f2", "can_trim"),
    // Blocks are forgotten at once here, and written there.
    ("sparse-random 1M seed=1", "can_fast_zero"),
    // All zeroing fails, as writing; trimming is not offered, as there is nothing to free.
    ("full 1M", "can_fast_zero"),
    ("full 1M", "can_trim"),
    // A flush is offered where it has nothing to do, and with it FUA.
    ("full 1M", "can_flush"),
    ("full 1M", "can_fua"),
    ("-r full 1M", "can_flush"),
    ("-r pattern 1M", "can_flush"),
    // The plugin leaves flushing and trimming of its files out.
    ("split f1 f2", "can_flush"),
    ("split f1 f2", "can_fua"),
    ("split f1 f2", "can_multi_conn"),
    ("split f1 f2", "can_trim"),
    ("-r split f1 f2", "can_flush"),
    ("-r split f1 f2", "can_multi_conn"),
];

/// Facts of an export that clients decide by.
const FACTS: &[&str] = &[
    "export-size",
    "is_read_only",
    "can_cache",
    "can_df",
    "can_fast_zero",
    "can_flush",
    "can_fua",
    "can_multi_conn",
    "can_trim",
    "can_zero",
    "block_size_minimum",
    "block_size_preferred",
    "block_size_maximum",
];

#[test]
fn devices_are_described_as_the_plugins_are() {
    let Some((scratch, _)) = sizes() else { return };
    fs::create_dir(scratch.file("d")).unwrap();
    fs::write(scratch.file("d").join("a"), "hi\n").unwrap();
    for (name, len) in [("f1", 1 << 20), ("f2", 3 << 20)] {
        fs::File::create(scratch.file(name)).unwrap().set_len(len).unwrap();
    }
    symlink(program(), scratch.file("nbdkit")).unwrap();
    let describe = |program: &Path, line: &str| {
        let script = "nbdinfo --json \"$uri\"";
        let mut command = among_peers(program).unwrap();
        command.current_dir(scratch.file("d").parent().unwrap());
        let output = bounded(command.args(line.split(' ')).args(["--run", script]), LIMIT);
        let printed = lossy(&output.stdout);
        // What file systems' programs print comes first.
        let json = printed.find("{\n\"protocol").map(|at| &printed[at..]).unwrap_or_default();
        let parsed = serde_json::from_str::<serde_json::Value>(json);
        parsed
            .map(|parsed| parsed["exports"][0].clone())
            .map_err(|error| format!("{line}: {error}: {printed}{}", lossy(&output.stderr)))
    };
    let mut wrong = Vec::new();
    let mut compared = 0;
    for line in [
        "memory 1M",
        "-r memory 1M",
        "data 1 size=1M",
        "file f1",
        "-r file f1",
        "null 1M",
        "-r null 1M",
        "zero",
        "-r ones 1M",
        "ones 1M",
        "-r pattern 1M",
        "pattern 1M",
        "random 1M",
        "-r random 1M",
        "sparse-random 1M seed=1",
        "-r sparse-random 1M seed=1",
        "full 1M",
        "-r full 1M",
        "split f1 f2",
        "-r split f1 f2",
        "info",
        "partitioning f1 f2",
        "-r partitioning f1",
        "eval get_size=echo\u{a0}1M",
    ] {
        let theirs = describe(Path::new("nbdkit"), line);
        // Where the plugin's helper programs are not here there is nothing to compare.
        let Ok(theirs) = theirs else { continue };
        compared += 1;
        let ours = describe(&scratch.file("nbdkit"), line).unwrap();
        for fact in FACTS {
            let known = DIFFERENT.contains(&(line, fact));
            let null = &serde_json::Value::Null;
            let ours = ours.get(fact).unwrap_or(null);
            let theirs = theirs.get(fact).unwrap_or(null);
            if (ours == theirs) == known {
                wrong.push(format!("{line}: {fact}: {ours} here, {theirs} there"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(compared > 15, "{compared}");
}
