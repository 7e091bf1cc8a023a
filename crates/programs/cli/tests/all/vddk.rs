//! `vddk:` in commands: the simulated library in a process of its own.

use std::io::{Read as _, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use blockhaul_testkit::tools::{self, SkipReason, until, until_some};

/// A folder with the simulated library, its settings and a disk.
struct Lab(tempfile::TempDir);

impl Lab {
    fn new(settings: &str, pattern: &str) -> Lab {
        let lab = Lab(tempfile::tempdir().unwrap());
        let program = std::env::current_exe().unwrap();
        std::fs::create_dir(lab.path("lib64")).unwrap();
        let library = lab.path("lib64/libvixDiskLib.so.8");
        std::fs::copy(program.with_file_name("libvddk_simulator.so"), library).unwrap();
        let folder = lab.0.path().display();
        let text = format!("disks={folder}\ncounters={folder}/counters\n{settings}\n");
        std::fs::write(lab.path("simulator.conf"), text).unwrap();
        let text = format!("vddk-simulator-pattern {pattern}");
        std::fs::write(lab.path("p.vmdk"), text).unwrap();
        lab
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn disk(&self, more: &str) -> String {
        format!("vddk:[store] machine/p.vmdk?libdir={}{more}", self.0.path().display())
    }

    fn run(&self, words: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_blockhaul"));
        command.current_dir(self.0.path()).args(words).stdin(Stdio::null()).output().unwrap()
    }

    /// Runs a command that succeeds; returns its output.
    fn ok(&self, words: &[&str]) -> String {
        let output = self.run(words);
        assert!(output.status.success(), "{words:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Number of queries, once the library has ended; nothing was used wrongly.
    fn queries(&self) -> u64 {
        let counters = until_some("the library has ended", || {
            let text = std::fs::read_to_string(self.path("counters")).ok()?;
            text.contains("\"Exit\"").then_some(text)
        });
        let counters: serde_json::Value = serde_json::from_str(&counters).unwrap();
        assert_eq!(
            (&counters["misuse"], &counters["handles"]),
            (&0.into(), &0.into()),
            "{counters}"
        );
        std::fs::remove_file(self.path("counters")).unwrap();
        counters["functions"]["QueryAllocatedBlocks"]["calls"].as_u64().unwrap_or(0)
    }
}

#[test]
fn each_part_of_the_disk_is_asked_for_once() {
    let lab = Lab::new("query=20ms", "size=64G stride=10M data=2");
    let disk = lab.disk("");
    lab.ok(&["info", "--size", &disk]);
    assert_eq!(lab.queries(), 0);
    lab.ok(&["info", &disk]);
    assert_eq!(lab.queries(), 0);
    let totals = lab.ok(&["map", "--totals", &disk]);
    assert!(totals.contains("  0 data") && totals.contains("  3 hole,zero"), "{totals}");
    assert_eq!(lab.queries(), 2);
    lab.ok(&["copy", "--connections", "4", &disk, "null:64G"]);
    assert_eq!(lab.queries(), 2);
    // Two clients of a server, each with several connections.
    let program = env!("CARGO_BIN_EXE_blockhaul");
    let run = format!("{program} map \"$uri\" >/dev/null && {program} copy \"$uri\" null:64G");
    lab.ok(&["serve", "--readonly", "--unix", "s", &disk, "--run", &run]);
    assert_eq!(lab.queries(), 2);
}

/// The line of a shell that runs a peer on the URI of the server, if the peer is there.
fn peer(name: &str, words: &str) -> Option<String> {
    let peer = blockhaul_testkit::tools::PeerProgram::require(name)?;
    let program = peer.command().get_program().to_string_lossy().into_owned();
    Some(format!("{program} {words} >/dev/null"))
}

#[test]
fn no_client_makes_more_than_two_queries_of_64_gib() {
    // How much is data changes the time, and not the number of queries.
    let data = if std::env::var_os("BLOCKHAUL_LONG").is_some() { 45 } else { 1 };
    let lab = Lab::new("query=20ms", &format!("size=64G stride=10M data={data}"));
    let disk = lab.disk("");
    let own = |words: &str| {
        lab.ok(&words
            .split(' ')
            .map(|word| if word == "DISK" { &disk } else { word })
            .collect::<Vec<_>>());
        lab.queries()
    };
    assert_eq!((own("info DISK"), own("map --totals DISK")), (0, 2));
    assert_eq!(own("copy --connections 1 DISK null:64G"), 2);
    let null = "json:{\\\"file.driver\\\":\\\"null-co\\\",\\\"file.size\\\":\\\"1E\\\"}";
    // Without writing zeroes, which that target takes as data.
    let convert = format!("convert -n --target-is-zero -f raw \"$uri\" -O raw \"{null}\"");
    let clients = [
        ("nbdinfo", "\"$uri\"", 0),
        ("nbdinfo", "--map --totals \"$uri\"", 2),
        ("nbdcopy", "\"$uri\" null:", 2),
        ("qemu-img", "info \"$uri\"", 0),
        ("qemu-img", "map -f raw \"$uri\"", 2),
        ("qemu-img", convert.as_str(), 2),
    ];
    for (name, words, most) in clients {
        let Some(run) = peer(name, words) else { continue };
        lab.ok(&["serve", "--readonly", "--unix", "s", &disk, "--run", &run]);
        let asked = lab.queries();
        assert!(asked <= most, "{name} {words}: {asked}");
    }
}

#[test]
fn two_clients_during_the_scan_share_its_queries() {
    let lab = Lab::new("query=300ms", "size=64G stride=10M data=2");
    let program = env!("CARGO_BIN_EXE_blockhaul");
    let map = format!("{program} map --totals \"$uri\"");
    // A third one leaves in the middle.
    let run = format!("timeout 0.1 {map}; {map} >one & {map} >two; wait $!; cmp one two");
    lab.ok(&["serve", "--readonly", "--unix", "s", &lab.disk(""), "--run", &run]);
    assert_eq!(lab.queries(), 2);
}

#[test]
fn a_map_of_a_million_extents_costs_little_more_than_its_queries() {
    let lab = Lab::new("query=1s", "size=64G stride=128K data=50");
    let begun = Instant::now();
    let lines = lab.ok(&["map", "--verbose", &lab.disk("")]).lines().count();
    assert_eq!((lines, lab.queries()), (1 << 20, 2));
    // In a test, only an upper limit far above it.
    assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", begun.elapsed());
}

/// Changes a disk at these places, and writes what VMware reports about that.
fn change(lab: &Lab, places: &[u64], byte: u8, list: &str) {
    use std::os::unix::fs::FileExt as _;
    let disk = std::fs::File::options().write(true).open(lab.path("w.vmdk")).unwrap();
    let area = |at: &u64| {
        disk.write_all_at(&[byte; 4096], *at).unwrap();
        serde_json::json!({ "start": at / 65536 * 65536, "length": 65536 })
    };
    let areas: Vec<_> = places.iter().map(area).collect();
    let answer = serde_json::json!({ "startOffset": 0, "length": 64 << 20, "changedArea": areas });
    std::fs::write(lab.path(list), answer.to_string()).unwrap();
}

#[test]
fn a_machine_is_migrated_while_it_runs() {
    let lab = Lab::new("query=5ms", "size=1G stride=1M data=50");
    let first = std::fs::File::create(lab.path("w.vmdk")).unwrap();
    first.set_len(64 << 20).unwrap();
    change(&lab, &[0, 10 << 20, 63 << 20], 1, "unused.json");
    let disk = |more: &str| lab.disk(more).replace("p.vmdk", "w.vmdk");
    // All of snapshot 1.
    lab.ok(&["copy", "--journal", "full.journal", &disk(""), "target"]);
    // While the machine runs: the changes up to snapshot 2, as a list of ranges.
    change(&lab, &[10 << 20, 20 << 20, (30 << 20) + 4096], 2, "2.json");
    let verbose = lab.run(&["copy", "-v", "--ranges", "2.json", &disk(""), "target"]);
    let said = String::from_utf8(verbose.stderr).unwrap();
    assert!(verbose.status.success() && said.contains(" 196608 bytes: "), "{said}");
    // After power-off: the last changes, as a bitmap of the disk.
    change(&lab, &[0, 40 << 20], 3, "3.json");
    let last = disk("&changes=3.json");
    let map = lab.ok(&["map", "--context", "qemu:dirty-bitmap:changes", &last]);
    let expected = "         0       65536    1  dirty\n     65536    41877504    0  clean\n  \
                    41943040       65536    1  dirty\n  42008576    25100288    0  clean\n";
    assert_eq!(map, expected);
    let bitmap = ["--bitmap", "qemu:dirty-bitmap:changes"];
    let verbose = lab.run(&[&["copy", "-v"], &bitmap[..], &[&last, "target"]].concat());
    let said = String::from_utf8(verbose.stderr).unwrap();
    assert!(verbose.status.success() && said.contains(" 131072 bytes: "), "{said}");
    lab.ok(&["compare", &disk(""), "target"]);
    let target = std::fs::read(lab.path("target")).unwrap();
    assert_eq!((target[0], target[10 << 20], target[20 << 20], target[63 << 20]), (3, 2, 2, 1));
    // In this process, and for the clients of a server.
    let inside = disk("&changes=3.json&isolate=off");
    let two = ["--context", "qemu:dirty-bitmap:changes", "--context", "base:allocation"];
    let map = lab.ok(&[&["map", "--totals"], &two[..], &[&inside]].concat());
    assert!(map.contains("    131072   0.2%   1 dirty   0 data\n"), "{map}");
    let program = env!("CARGO_BIN_EXE_blockhaul");
    let run = format!("{program} map --context qemu:dirty-bitmap:changes \"$uri\" >clients");
    lab.ok(&["serve", "--readonly", "--unix", "s", &last, "--run", &run]);
    assert_eq!(std::fs::read_to_string(lab.path("clients")).unwrap(), expected);
}

#[test]
fn wrong_lists_of_changes_are_one_line() {
    let lab = Lab::new("", "size=1M stride=1M data=50");
    for (text, part) in [
        ("[]x", "expected value"),
        ("{}", "line 1: not a range with offset and length: {}"),
        ("[]", "not an answer of QueryChangedDiskAreas"),
        (r#"{"changedArea": [{"start": 0, "length": 2097152}]}"#, "the range ends at 2097152"),
        (
            r#"{"changedArea": [{"start": 0, "length": 512}]}"#,
            "no answer of QueryChangedDiskAreas has startOffset and length",
        ),
        (
            r#"{"startOffset": 0, "length": 524288, "changedArea": []}"#,
            "bytes 524288 to 1048575 are missing: query again with startOffset=524288",
        ),
    ] {
        std::fs::write(lab.path("list"), text).unwrap();
        let output = lab.run(&["map", &lab.disk("&changes=list")]);
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && said.contains(part), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
    }
}

#[test]
fn a_refusal_is_one_line_without_the_password() {
    let login = "&server=esx&user=root&vm=x&password=";
    let lab = Lab::new("password=right", "size=1G stride=1M data=50");
    for isolate in ["on", "off"] {
        let output = lab.run(&["map", &lab.disk(&format!("{login}secret&isolate={isolate}"))]);
        let text = String::from_utf8(output.stderr).unwrap();
        let expected = "cannot connect to esx as root: VixDiskLib_ConnectEx: Insufficient";
        assert!(text.contains(expected) && text.contains("[store] machine/p.vmdk"), "{text}");
        assert!(text.lines().count() == 1 && !text.contains("secret"), "{text}");
        assert!(!output.status.success());
    }
    std::fs::write(lab.path("password"), "right\nmore\n").unwrap();
    let totals = lab.ok(&["map", "--totals", &lab.disk(&format!("{login}%2Bpassword"))]);
    assert!(totals.contains("50.0%"), "{totals}");
}

#[test]
fn a_copy_that_is_stopped_shows_and_keeps_no_password() {
    let lab = Lab::new("password=secret\nrate=20M", "size=4G stride=1M data=50");
    let disk = lab.disk("&server=esx&user=root&vm=x&password=secret");
    for journal in [&["--journal", "journal"][..], &[]] {
        let copy = Command::new(env!("CARGO_BIN_EXE_blockhaul"))
            .current_dir(lab.0.path())
            .args([&["copy", "--progress=json"], journal, &[&disk, "target"]].concat())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // The copy has begun: a block that is not zero is written.
        let target = lab.path("target");
        until("something is written", || {
            std::fs::metadata(&target).is_ok_and(|data| data.blocks() > 0)
        });
        let pid = copy.id().to_string();
        assert!(Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
        let output = copy.wait_with_output().unwrap();
        let said = [output.stdout, output.stderr].concat();
        let said = String::from_utf8(said).unwrap();
        assert!(said.contains("stopped by a signal") && !said.contains("secret"), "{said}");
        // The command to repeat is shown if there is no journal.
        assert_eq!(said.contains("password=…"), journal.is_empty(), "{said}");
        if !journal.is_empty() {
            let kept = std::fs::read(lab.path("journal")).unwrap();
            assert!(!String::from_utf8_lossy(&kept).contains("secret"));
        }
        std::fs::remove_file(&target).unwrap();
    }
}

#[test]
fn a_password_comes_from_a_descriptor() {
    let lab = Lab::new("password=right", "size=1G stride=1M data=50");
    let disk = lab.disk("&server=esx&user=root&vm=x&password=-9");
    let script = format!("exec {} map --totals '{disk}'", env!("CARGO_BIN_EXE_blockhaul"));
    for (password, right) in [("right", true), ("wrong", false)] {
        let script = format!("echo {password} | {{ exec 9<&0 </dev/null; {script}; }}");
        let output = Command::new("sh").args(["-c", &script]).output().unwrap();
        assert_eq!(output.status.success(), right, "{output:?}");
    }
}

#[test]
fn a_password_is_typed_without_being_shown() {
    let lab = Lab::new("password=right-one", "size=1G stride=1M data=50");
    let disk = lab.disk("&server=esx&user=root&vm=x&password=-");
    let program = env!("CARGO_BIN_EXE_blockhaul");
    // script(1), which Debian always has, gives the program a terminal.
    let typed = Command::new("script")
        .args(["-qefc", &format!("exec {program} map --totals '{disk}'"), "/dev/null"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn();
    let mut typed = match typed {
        Ok(typed) => typed,
        Err(error) => {
            let reason = format!("script(1) cannot be started: {error}");
            return tools::skip_or_fail(&SkipReason::new(reason));
        }
    };
    let mut said = Vec::new();
    let mut output = typed.stdout.take().unwrap();
    while !said.ends_with(b"password: ") {
        let mut byte = [0];
        output.read_exact(&mut byte).unwrap();
        said.push(byte[0]);
    }
    typed.stdin.take().unwrap().write_all(b"right-one\n").unwrap();
    output.read_to_end(&mut said).unwrap();
    let said = String::from_utf8(said).unwrap();
    assert!(typed.wait().unwrap().success(), "{said}");
    assert!(said.contains("50.0%") && !said.contains("right-one"), "{said}");
    // Without a terminal nobody is asked.
    let output = lab.run(&["map", &disk]);
    assert!(String::from_utf8(output.stderr).unwrap().contains("needs a terminal"));
}

#[test]
fn disks_of_a_machine_share_a_process_whose_calls_are_counted() {
    let lab = Lab::new("query=1s", "size=1G stride=1M data=50");
    std::fs::copy(lab.path("p.vmdk"), lab.path("q.vmdk")).unwrap();
    let program = env!("CARGO_BIN_EXE_blockhaul");
    let export = |name: &str, path: &str| {
        let disk = lab.disk("&server=esx&user=root&vm=x&password=hidden").replace("p.vmdk", path);
        format!("{name}={disk}")
    };
    // Both are open at the same time.
    let map = |name: &str| format!("{program} map --totals 'nbd+unix:///{name}?socket=s' >{name}");
    let run = format!(
        "{} & {} && wait $! && {program} ctl c metrics >metrics && {program} ctl c exports >exports",
        map("a"),
        map("b")
    );
    let a = export("a", "p.vmdk");
    let b = export("b", "q.vmdk");
    let common = ["serve", "--readonly", "--unix", "s", "--control", "c"];
    lab.ok(&[&common[..], &["--export", &a, "--export", &b, "--run", &run]].concat());
    let read = |name: &str| std::fs::read_to_string(lab.path(name)).unwrap();
    assert_eq!(read("a"), read("b"));
    let metrics = read("metrics");
    for (function, calls) in [("ConnectEx", 1), ("Open", 2), ("QueryAllocatedBlocks", 2)] {
        let begin = format!("blockhaul_vddk_calls_total{{function=\"{function}\",process=\"");
        let lines: Vec<_> = metrics.lines().filter(|line| line.starts_with(&begin)).collect();
        assert!(lines.len() == 1 && lines[0].ends_with(&format!(" {calls}")), "{lines:?}");
    }
    let exports = read("exports");
    assert!(
        exports.contains("VDDK 8: ") && exports.contains("QueryAllocatedBlocks 2 ("),
        "{exports}"
    );
    assert!(!exports.contains("hidden") && !metrics.contains("hidden"), "{exports}");
    assert_eq!(lab.queries(), 2);
}

#[test]
fn a_library_that_crashes_in_a_query_is_one_line() {
    let lab = Lab::new("fail=QueryAllocatedBlocks:1:crash", "size=1G stride=1M data=50");
    let output = lab.run(&["map", &lab.disk("")]);
    let said = String::from_utf8(output.stderr).unwrap();
    let lines: Vec<_> = said.lines().collect();
    let expected = "vddk:[store] machine/p.vmdk: its process has ended with signal";
    assert!(!output.status.success() && lines.iter().all(|line| line.contains(expected)), "{said}");
    assert!(!said.contains("libdir") && lines.len() <= 2, "{said}");
}

/// The process of the library: a child of the server.
fn child_of(parent: u32) -> Option<String> {
    let children = std::fs::read_to_string(format!("/proc/{parent}/task/{parent}/children"));
    let all = std::fs::read_dir("/proc").ok()?.flatten().filter_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        let stat = std::fs::read_to_string(entry.path().join("stat")).ok()?;
        let parent_there = stat.rsplit_once(") ")?.1.split(' ').nth(1)?.to_string();
        let line = std::fs::read_to_string(entry.path().join("cmdline")).ok()?;
        (parent_there == parent.to_string() && line.contains("isolate=off")).then_some(name)
    });
    let known: Vec<String> = all.collect();
    known.into_iter().next().or_else(|| children.ok()?.split(' ').next().map(String::from))
}

#[test]
fn a_killed_library_is_started_again_for_the_next_client() {
    let lab = Lab::new("", "size=1G stride=1M data=50");
    let secret = "&server=esx&user=root&vm=x&password=hidden";
    let mut server = Command::new(env!("CARGO_BIN_EXE_blockhaul"))
        .current_dir(lab.0.path())
        .args(["serve", "--readonly", "--unix", "s", &lab.disk(secret)])
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    until("it listens", || Path::new(&lab.path("s")).exists());
    let uri = format!("nbd+unix:///?socket={}", lab.path("s").display());
    let before = lab.ok(&["map", "--totals", &uri]);
    let child = child_of(server.id()).unwrap();
    let line = std::fs::read_to_string(format!("/proc/{child}/cmdline")).unwrap();
    assert!(line.contains("isolate=off") && !line.contains("hidden"), "{line}");
    assert!(Command::new("kill").args(["-9", &child]).status().unwrap().success());
    until("it answers", || lab.run(&["map", "--totals", &uri]).status.success());
    assert_eq!(lab.ok(&["map", "--totals", &uri]), before);
    server.kill().unwrap();
    server.wait().unwrap();
}

#[test]
fn maps_have_ranges_formats_and_pictures() {
    let lab = Lab::new("", "size=1G stride=1M data=50");
    let disk = lab.disk("");
    let map = |more: &[&str]| lab.ok(&[&["map", &disk], more].concat());
    assert_eq!(
        map(&["--range", "512K:1M"]),
        "    524288      524288    3  hole,zero\n   1048576      524288    0  data\n"
    );
    let lines = map(&["--range", "0:1M", "--format", "json-lines"]);
    assert_eq!(
        lines,
        "{ \"offset\": 0, \"length\": 524288, \"type\": 0, \"description\": \"data\"}\n\
         { \"offset\": 524288, \"length\": 524288, \"type\": 3, \"description\": \"hole,zero\"}\n"
    );
    let qemu: serde_json::Value =
        serde_json::from_str(&map(&["--range", "0:1M", "--format", "qemu"])).unwrap();
    assert_eq!(
        (&qemu[1]["start"], &qemu[1]["zero"], &qemu[1]["data"], &qemu[0]["data"]),
        (&524_288.into(), &true.into(), &false.into(), &true.into())
    );
    let strip = map(&["--strip", "--svg", "map.svg"]);
    assert!(
        strip.starts_with("|▄") && strip.contains("data: 512 MiB of 1 GiB (50.0 %)"),
        "{strip}"
    );
    let svg = std::fs::read_to_string(lab.path("map.svg")).unwrap();
    assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n"), "{svg}");
    let output = lab.run(&["map", &disk, "--range", "1G:1"]);
    assert!(String::from_utf8(output.stderr).unwrap().contains("ends behind the device's"));
}
