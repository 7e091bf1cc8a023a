//! `vddk:` in commands: the simulated library in a process of its own.
#![cfg(feature = "vddk")]
#![allow(clippy::unwrap_used, reason = "a test that fails")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

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
        command.current_dir(self.0.path()).args(words).output().unwrap()
    }

    /// Runs a command that succeeds; returns its output.
    fn ok(&self, words: &[&str]) -> String {
        let output = self.run(words);
        assert!(output.status.success(), "{words:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Number of queries, once the library has ended; nothing was used wrongly.
    fn queries(&self) -> u64 {
        let counters = wait_for(|| {
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

fn wait_for<T>(found: impl Fn() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(found) = found() {
            return found;
        }
        assert!(begun.elapsed() < Duration::from_secs(30), "it does not happen");
        std::thread::sleep(Duration::from_millis(10));
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
    wait_for(|| Path::new(&lab.path("s")).exists().then_some(()));
    let uri = format!("nbd+unix:///?socket={}", lab.path("s").display());
    let before = lab.ok(&["map", "--totals", &uri]);
    let child = child_of(server.id()).unwrap();
    let line = std::fs::read_to_string(format!("/proc/{child}/cmdline")).unwrap();
    assert!(line.contains("isolate=off") && !line.contains("hidden"), "{line}");
    assert!(Command::new("kill").args(["-9", &child]).status().unwrap().success());
    wait_for(|| lab.run(&["map", "--totals", &uri]).status.success().then_some(()));
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
