//! `blockhaul pull`, `restore` and `chain`, on disks of our server and of QEMU's.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use blockhaul_testkit::require_peer;
use blockhaul_testkit::rng::{self, Rng};
use blockhaul_testkit::tools::{self, PeerServer, ScratchDir, text};
use serde_json::Value;

use crate::backups::{PointInTime, Qmp};
use crate::served_disk::{LIMIT, OURS, blockhaul, succeed};

const SIZE: &str = "16M";

#[track_caller]
fn refused(args: &[&str], status: i32, words: &[&str]) -> String {
    let output = blockhaul(args);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(status), "{args:?}: {said}");
    assert!(words.iter().all(|word| said.contains(word)), "{args:?}: {said}");
    said
}

/// A served disk of random bytes, and a file that pulls it to `store`.
pub(crate) struct Machine {
    scratch: ScratchDir,
    server: PeerServer,
}

impl Machine {
    fn start(scratch: ScratchDir, more: &[&str]) -> Machine {
        let disk = scratch.file("disk");
        succeed(&["copy", &format!("random:{SIZE}?seed=1"), disk.to_str().unwrap()]);
        let server = Machine::serve(&scratch, more);
        let machine = Machine { scratch, server };
        machine.job("");
        machine
    }

    fn serve(scratch: &ScratchDir, more: &[&str]) -> PeerServer {
        let disk = scratch.file("disk");
        let control = scratch.file("ctl");
        let export = format!("a={}", disk.display());
        let mut args = vec!["--control", control.to_str().unwrap(), "--export", &export];
        args.extend(more);
        PeerServer::blockhaul(OURS.as_ref(), &scratch.socket("nbd"), &args).unwrap()
    }

    /// Kills the server, and starts it again.
    fn restart(self, more: &[&str]) -> Machine {
        let Machine { scratch, server } = self;
        drop(server);
        for left in [scratch.socket("nbd"), scratch.file("ctl")] {
            let _ = fs::remove_file(left);
        }
        let server = Machine::serve(&scratch, more);
        Machine { scratch, server }
    }

    pub(crate) fn new() -> Machine {
        Machine::start(ScratchDir::new().unwrap(), &[])
    }

    pub(crate) fn file(&self, name: &str) -> String {
        self.scratch.file(name).to_str().unwrap().to_string()
    }

    /// Writes the file, with more keys of the disk.
    fn job(&self, keys: &str) {
        let uri = self.server.uri("a");
        let store = self.file("store");
        let disk = format!("[[disk]]\nname = 'vda'\nsource = '{uri}'\nstore = '{store}'\n{keys}");
        fs::write(self.scratch.file("job"), disk).unwrap();
    }

    fn pull_args<'a>(&self, file: &'a str, more: &[&'a str]) -> Vec<&'a str> {
        [&["pull", file][..], more].concat()
    }

    #[track_caller]
    pub(crate) fn pull(&self, more: &[&str]) -> String {
        succeed(&self.pull_args(&self.file("job"), more))
    }

    #[track_caller]
    fn pull_refused(&self, more: &[&str], status: i32, words: &[&str]) {
        refused(&self.pull_args(&self.file("job"), more), status, words);
    }

    #[track_caller]
    pub(crate) fn begin_bitmap(&self, name: &str) {
        succeed(&["ctl", &self.file("ctl"), "bitmap-add", "a", name]);
    }

    /// A client writes, and what the disk then holds is kept as `name`.
    pub(crate) fn write(&self, range: &str, what: &str, name: &str) {
        succeed(&["copy", "--range", range, &format!("{what}:{SIZE}"), &self.server.uri("a")]);
        self.keep(name);
    }

    fn write_to(&self, uri: &str, range: &str, name: &str) {
        succeed(&["copy", "--range", range, &format!("pattern:{SIZE}"), uri]);
        self.keep(name);
    }

    pub(crate) fn keep(&self, name: &str) {
        fs::copy(self.scratch.file("disk"), self.scratch.file(name)).unwrap();
    }

    /// The disk.
    pub(crate) fn uri(&self) -> String {
        self.server.uri("a")
    }

    /// The directory of the disk, the store and the file.
    pub(crate) fn scratch(&self) -> &ScratchDir {
        &self.scratch
    }

    /// A full backup and an increment.
    pub(crate) fn with_two_points() -> Machine {
        let machine = Machine::new();
        machine.begin_bitmap("monday");
        machine.keep("monday");
        machine.pull(&["--point", "monday"]);
        machine.write("2M:1M", "pattern", "tuesday");
        machine.begin_bitmap("tuesday");
        machine.pull(&["--bitmap", "monday", "--point", "tuesday"]);
        machine
    }

    #[track_caller]
    pub(crate) fn assert_restores(&self, points: &[&str]) {
        let store = self.file("store");
        let target = self.file("target");
        for point in points {
            succeed(&["restore", &store, &target, "--point", point]);
            let restored = fs::read(&target).unwrap();
            assert!(restored == fs::read(self.scratch.file(point)).unwrap(), "{point}");
            let device = format!("backup:{store}?point={point}");
            succeed(&["compare", "--strict", &device, &self.file(point)]);
        }
    }

    fn points(&self) -> Vec<String> {
        let all = succeed(&["chain", "list", "--json", &self.file("store")]);
        let all: Value = serde_json::from_str(&all).unwrap();
        let points = all["points"].as_array().unwrap();
        points.iter().map(|point| point["name"].as_str().unwrap().to_string()).collect()
    }
}

/// Runs the script of the page for a served disk, whose export is `a` here.
fn page_script(machine: &Machine, more: &[&str]) -> std::process::Output {
    tools::output(&mut page_command(machine, more), LIMIT).unwrap()
}

fn page_command(machine: &Machine, more: &[&str]) -> Command {
    let page = include_str!("../../../../../docs/backups.md");
    let script = page.split("#!/bin/sh\n").nth(1).unwrap().split("```").next().unwrap();
    let script = script.replace("/run/blockhaul/control", &machine.file("ctl"));
    let script = script.replace("/var/lib/blockhaul/vm1/vda", &machine.file("store"));
    let script = script.replace("/etc/blockhaul/vm1.toml", &machine.file("job"));
    let script = script.replace("-add vda", "-add a").replace("-remove vda", "-remove a");
    let script = script.replace("== \"vda\"", "== \"a\"");
    let names = machine.scratch.file("names");
    let _ = fs::create_dir(&names);
    let _ = std::os::unix::fs::symlink(OURS, names.join("blockhaul"));
    let path = format!("{}:/usr/bin:/bin", names.display());
    let mut shell = Command::new("sh");
    shell.args(["-c", &script, "pull-vm1"]).args(more).env("PATH", path);
    shell
}

#[test]
fn the_script_of_the_page_pulls_a_served_disk_each_night() {
    require_peer!("jq");
    let machine = Machine::new();
    let uri = machine.server.uri("now");
    let store = machine.file("store");
    let job = format!("[[disk]]\nname = 'vda'\nsource = '{uri}'\nstore = '{store}'\n");
    fs::write(machine.scratch.file("job"), job).unwrap();
    let full = "is a full backup of 16777216 bytes: it is the first of this disk";
    let nights = [full, "is an increment of", "is an increment of"];
    for (night, kind) in nights.into_iter().enumerate() {
        if night == 1 {
            // A run of the night before that was killed leaves its moment and an unfinished point.
            succeed(&["ctl", &machine.file("ctl"), "snapshot-add", "a", "now"]);
            let mut killed = begin_slowly(&machine, &["--point", "killed", "--full"]);
            killed.kill().unwrap();
            killed.wait().unwrap();
        }
        let output = page_script(&machine, &[]);
        let said = text(&output.stdout) + &text(&output.stderr);
        assert!(output.status.success() && said.contains(kind), "{night}: {said}");
        assert!(!said.contains("warning"), "{night}: {said}");
        succeed(&["compare", &format!("backup:{store}"), &machine.server.uri("a")]);
        // Names have seconds.
        std::thread::sleep(Duration::from_millis(1100));
        machine.write(&format!("{night}M:64k"), "pattern", "kept");
        let failed = page_script(&machine, &["--mode"]);
        assert_eq!(failed.status.code(), Some(2), "{night}: {}", text(&failed.stderr));
        std::thread::sleep(Duration::from_millis(1100));
    }
    let exports = succeed(&["ctl", &machine.file("ctl"), "exports", "--json"]);
    let exports: Value = serde_json::from_str(&exports).unwrap();
    let found = exports["exports"].as_array().unwrap();
    assert_eq!(found.len(), 1, "{exports}");
    assert_eq!(found[0]["bitmaps"].as_array().unwrap().len(), 1, "{exports}");
}

#[test]
fn the_script_of_the_page_makes_a_full_backup_after_a_crash_of_the_server() {
    require_peer!("jq");
    require_peer!("flock");
    let mut machine = Machine::new();
    let uri = machine.server.uri("now");
    let store = machine.file("store");
    let job = format!("[[disk]]\nname = 'vda'\nsource = '{uri}'\nstore = '{store}'\n");
    fs::write(machine.scratch.file("job"), job).unwrap();
    let bitmaps = machine.file("bitmaps");
    fs::create_dir(&bitmaps).unwrap();
    let kept = ["--bitmaps", bitmaps.as_str()];
    let run = |machine: &Machine, kind: &str| {
        let output = page_script(machine, &[]);
        let said = text(&output.stdout) + &text(&output.stderr);
        assert!(output.status.success() && said.contains(kind), "{said}");
        succeed(&["compare", &format!("backup:{store}"), &machine.server.uri("a")]);
    };
    run(&machine, "is a full backup");
    // The point of a pull that cannot print is complete, and its bitmap stays.
    let full = fs::File::options().write(true).open("/dev/full").unwrap();
    let output = page_command(&machine, &["--json"]).stdout(full).output().unwrap();
    assert!(!output.status.success());
    machine.write("1M:64k", "pattern", "kept");
    run(&machine, "is an increment of");
    // Without bitmaps, and with one that is inconsistent.
    for (more, range) in [(&[][..], "2M:64k"), (&kept, "3M:64k")] {
        machine = machine.restart(more);
        machine.write(range, "pattern", "kept");
        run(&machine, "is a full backup");
    }
    machine = machine.restart(&kept);
    let exports = succeed(&["ctl", &machine.file("ctl"), "exports"]);
    assert!(exports.contains("inconsistent"), "{exports}");
    run(&machine, "is a full backup");
    machine.write("4M:64k", "pattern", "kept");
    run(&machine, "is an increment of");
    // Another run.
    let script = page_command(&machine, &[]);
    let mut second = Command::new("flock");
    second.arg(machine.file("job")).arg(script.get_program()).args(script.get_args());
    second.envs(script.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let output = tools::output(&mut second, LIMIT).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("another run has not ended"));
}

#[test]
fn every_point_is_the_disk_at_that_time() {
    let machine = Machine::new();
    machine.begin_bitmap("monday");
    machine.keep("monday");
    let said = machine.pull(&["--point", "monday"]);
    assert_eq!(
        said,
        "disk vda: monday is a full backup of 16777216 bytes: it is the first of this disk\n"
    );
    machine.write("2M:1M", "pattern", "tuesday");
    machine.begin_bitmap("tuesday");
    let said = machine.pull(&["--bitmap", "monday", "--point", "tuesday"]);
    assert_eq!(
        said,
        "disk vda: tuesday is an increment of monday: 1048576 of 16777216 bytes have changed\n"
    );
    machine.write("1M:12M", "zero", "wednesday");
    machine.begin_bitmap("wednesday");
    let context = "qemu:dirty-bitmap:tuesday";
    let said = machine.pull(&["--bitmap", context, "--point", "wednesday", "--json"]);
    let found: Value = serde_json::from_str(&said).unwrap();
    let disk = &found["disks"][0];
    for (key, value) in [
        ("disk", "vda"),
        ("point", "wednesday"),
        ("checkpoint", "wednesday"),
        ("kind", "increment"),
        ("parent", "tuesday"),
        ("bitmap", context),
        ("state", "complete"),
    ] {
        assert_eq!(disk[key], value, "{found}");
    }
    assert_eq!(disk["changed"], 12 << 20, "{found}");
    // Nothing has changed.
    machine.keep("thursday");
    machine.pull(&["--bitmap", "wednesday", "--point", "thursday"]);
    let all = ["monday", "tuesday", "wednesday", "thursday"];
    machine.assert_restores(&all);
    assert_eq!(machine.points(), all);
    // The newest one is served, also with writes that are lost.
    let newest = format!("backup:{}", machine.file("store"));
    let run = format!("'{OURS}' compare \"$uri\" '{}'", machine.file("thursday"));
    succeed(&["serve", "--readonly", "-U", "-", &newest, "--run", &run]);
    let run = format!("'{OURS}' copy random:{SIZE} \"$uri\" && '{OURS}' info \"$uri\"");
    succeed(&["serve", "--layer", "cow", "-U", "-", &newest, "--run", &run]);
    machine.assert_restores(&all);
    // No other export writes to a file of the store meanwhile.
    let file = format!("b={}/000001.raw", machine.file("store"));
    let point = ["--export", "a=[", &newest, "--readonly", "]"];
    let file = ["--export", file.as_str()];
    for exports in [[&point[..], &file].concat(), [&file[..], &point].concat()] {
        let words = [&["serve", "-U", "-"], &exports[..], &["--run", "true"]].concat();
        refused(&words, 3, &["export \"a\"", "export \"b\""]);
    }
    machine.assert_restores(&all);
}

#[test]
fn a_bitmap_may_keep_its_name_or_keep_recording() {
    let machine = Machine::new();
    machine.begin_bitmap("b");
    machine.begin_bitmap("always");
    machine.job("bitmap = 'b'\ncheckpoint = 'b'\n");
    // Each backup clears the bitmap; points have names by the clock, or others.
    let mut wanted = Vec::new();
    for (number, name) in ["monday", "tuesday", "wednesday"].iter().enumerate() {
        machine.write(&format!("{number}M:1M"), "pattern", name);
        let said = machine.pull(&["--point", name]);
        assert!(said.contains(if number == 0 { "full" } else { " 1048576 of" }), "{said}");
        succeed(&["ctl", &machine.file("ctl"), "bitmap-clear", "a", "b"]);
        wanted.push(*name);
    }
    // This one has marked everything since the beginning.
    machine.keep("thursday");
    machine.job("bitmap = 'always'");
    machine.pull_refused(&["--point", "thursday"], 2, &["began with another backup"]);
    let said = machine.pull(&["--point", "thursday", "--parent", "wednesday"]);
    assert!(said.contains(&format!(" {} of", 3 << 20)), "{said}");
    wanted.push("thursday");
    machine.assert_restores(&wanted);
    let said = machine.pull(&["--parent", "thursday"]);
    assert!(said.contains("Z is an increment of thursday"), "{said}");
}

#[test]
fn an_export_behind_an_http_upgrade_is_pulled() {
    let machine = Machine::start(ScratchDir::new().unwrap(), &["--http-upgrade"]);
    let job = fs::read_to_string(machine.scratch.file("job")).unwrap();
    let socket = machine.server.socket().display().to_string();
    let uri = format!("nbd+http://lxd/1.0/volumes/a/nbd?socket={socket}&export=a");
    fs::write(machine.scratch.file("job"), job.replace(&machine.server.uri("a"), &uri)).unwrap();
    machine.begin_bitmap("monday");
    machine.keep("monday");
    machine.pull(&["--point", "monday"]);
    machine.write_to(&uri, "5M:1M", "tuesday");
    let said = machine.pull(&["--point", "tuesday", "--bitmap", "monday"]);
    assert!(said.contains(" 1048576 of"), "{said}");
    machine.assert_restores(&["monday", "tuesday"]);
}

#[test]
fn a_disk_without_its_bitmap_is_copied_in_full() {
    let machine = Machine::new();
    let other = machine.file("other");
    succeed(&["copy", "random:4M", &other]);
    let job = fs::read_to_string(machine.scratch.file("job")).unwrap();
    let store = machine.file("store-of-other");
    let both = format!("{job}[[disk]]\nsource = '{other}'\nstore = '{store}'\n");
    fs::write(machine.scratch.file("job"), both).unwrap();
    machine.begin_bitmap("monday");
    machine.pull(&["--point", "monday"]);
    machine.keep("tuesday");
    let said = machine.pull(&["--bitmap", "monday", "--point", "tuesday"]);
    let lines: Vec<_> = said.lines().collect();
    assert!(lines[0].contains("vda: tuesday is an increment of monday: 0 of"), "{said}");
    assert!(lines[1].ends_with("the source has no bitmap \"qemu:dirty-bitmap:monday\""), "{said}");
    let list = succeed(&["chain", "list", &store]);
    assert_eq!(list.matches("full").count(), 2, "{list}");
    machine.assert_restores(&["tuesday"]);
    // The older backup is not needed any more.
    succeed(&["chain", "prune", &store, "--keep", "1"]);
    succeed(&["compare", "--strict", &format!("backup:{store}"), &other]);
    assert!(!Path::new(&store).join("000001.raw").exists());
}

#[test]
fn a_disk_that_is_complete_is_not_copied_again_when_another_one_has_failed() {
    let machine = Machine::with_two_points();
    let other = machine.file("monday");
    let store = machine.file("store-of-other");
    let job = fs::read_to_string(machine.scratch.file("job")).unwrap();
    let both = |layer: &str| {
        let other = format!("[[disk]]\nsource = '{other}'\nstore = '{store}'\n{layer}\n");
        fs::write(machine.scratch.file("job"), format!("{job}{other}")).unwrap();
    };
    let args = ["pull", &machine.file("job"), "--bitmap", "tuesday", "--point", "wednesday"];
    both("source-layer = 'error?read=100%&after=3'\nretries = 0");
    machine.write("3M:2M", "pattern", "wednesday");
    let output = blockhaul(&[&args[..], &["--json"]].concat());
    assert_eq!(output.status.code(), Some(4), "{output:?}");
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    let states = [&found["disks"][0]["state"], &found["disks"][1]["state"]];
    assert_eq!(states, ["complete", "failed"], "{found}");
    assert!(found["disks"][1]["error"].as_str().is_some_and(|why| !why.is_empty()), "{found}");
    both("");
    let said = succeed(&args);
    assert!(said.contains("vda: wednesday is complete already"), "{said}");
    assert!(said.contains("disk 2: wednesday is a full backup"), "{said}");
    machine.assert_restores(&["monday", "tuesday", "wednesday"]);
    succeed(&["compare", "--strict", &format!("backup:{store}"), &other]);
    refused(&args, 2, &["all disks have the point \"wednesday\" already"]);
}

#[test]
fn what_is_not_the_next_increment_is_refused_and_changes_nothing() {
    let machine = Machine::with_two_points();
    let before = listing(&machine.scratch.file("store"));
    let refused = |more: &[&str], status, words: &[&str]| {
        machine.pull_refused(more, status, words);
        assert_eq!(listing(&machine.scratch.file("store")), before, "{more:?}");
    };
    refused(&["--bitmap", "monday", "--point", "x"], 2, &["disk vda", "began with another backup"]);
    let parent = ["--bitmap", "monday", "--parent", "sunday", "--point", "x"];
    refused(&parent, 2, &["began at \"sunday\""]);
    refused(&["--bitmap", "tuesday", "--point", "monday"], 2, &["has a point \"monday\" already"]);
    refused(&["--bitmap", "monday", "--point", "tuesday"], 2, &["choose another name"]);
    refused(&["--point", "x\n"], 2, &["control characters"]);
    machine.job("mode = 'increment'");
    refused(&["--bitmap", "none", "--point", "x"], 3, &["not possible", "no bitmap"]);
    machine.job("mode = 'never'");
    refused(&[], 2, &["mode must be"]);
    machine.job("target = 'x'");
    refused(&[], 2, &["target"]);
    machine.job("journal = 'x'");
    refused(&[], 2, &["journal: not for blockhaul pull"]);
    machine.job("discard-source = true\nverify = true");
    refused(&["--full", "--point", "x"], 2, &["verify"]);
    // Another disk that cannot be opened.
    machine.job("[[disk]]\nsource = '/nonexistent'\nstore = 'x'\n");
    refused(&["--full", "--point", "x"], 3, &["disk 2", "/nonexistent"]);
    machine.job(&format!("[[disk]]\nsource = 'x'\nstore = '{}/'\n", machine.file("store")));
    refused(&["--full", "--point", "x"], 2, &["disk 2", "same store"]);
    machine.job("[[disk]]\nsource = 'x'\nstore = '/nonexistent/store'\n");
    refused(&["--full", "--point", "x"], 3, &["disk 2", "create its directory first"]);
    machine.assert_restores(&["monday", "tuesday"]);
}

/// Names and lengths of the files in a directory.
fn listing(dir: &Path) -> Vec<(String, u64)> {
    let mut found: Vec<_> = fs::read_dir(dir)
        .unwrap()
        .filter_map(|entry| {
            let entry = entry.unwrap();
            // A pull that runs may have removed it.
            let data = entry.metadata().ok()?;
            Some((entry.file_name().display().to_string(), data.len()))
        })
        .collect();
    found.sort();
    found
}

#[test]
fn a_disk_that_was_resized_needs_a_full_backup() {
    let machine = Machine::with_two_points();
    let larger = Machine::start(ScratchDir::new().unwrap(), &["--layer", "truncate?truncate=17M"]);
    larger.begin_bitmap("tuesday");
    let job = fs::read_to_string(larger.scratch.file("job")).unwrap();
    let job = job.replace(&larger.file("store"), &machine.file("store"));
    fs::write(machine.scratch.file("job"), job).unwrap();
    let next = ["--bitmap", "tuesday", "--point", "wednesday"];
    machine.pull_refused(&next, 3, &["17825792 bytes", "16777216", "--full"]);
    machine.pull(&[&next[..], &["--full"]].concat());
    machine.assert_restores(&["monday", "tuesday"]);
    let list = succeed(&["chain", "list", &machine.file("store")]);
    assert!(list.contains("17 MiB"), "{list}");
}

#[test]
fn damage_is_found_by_a_check_and_before_a_restore() {
    use std::os::unix::fs::FileExt as _;
    let machine = Machine::with_two_points();
    let store = machine.file("store");
    let target = machine.file("target");
    let said = succeed(&["chain", "check", &store]);
    assert_eq!(said, "2 points: 2 files are as they were written\n");
    let raw =
        fs::File::options().write(true).open(machine.scratch.file("store/000002.raw")).unwrap();
    raw.write_all_at(b"x", (2 << 20) + 5).unwrap();
    let output = blockhaul(&["chain", "check", &store]);
    assert_eq!(output.status.code(), Some(8), "{output:?}");
    let said = text(&output.stdout);
    assert!(said.contains("000002.raw: 1048576 bytes at offset 2097152 have changed"), "{said}");
    let words = ["tuesday", "damaged", "--no-check"];
    refused(&["restore", &store, &target], 8, &words);
    assert!(!Path::new(&target).exists(), "nothing was written");
    refused(&["chain", "merge", &store], 8, &["nothing was merged"]);
    let file = machine.file("store/000001.raw");
    let other = machine.file("other");
    succeed(&["copy", "pattern:16M", &other]);
    for dry_run in [&["--dry-run"][..], &[]] {
        let words = ["is a file of the store of backups", "choose another target"];
        let copy = ["copy", &other, &file];
        refused(&[&copy[..], dry_run].concat(), 2, &words);
        let restore = ["restore", &store, &file, "--point", "monday"];
        refused(&[&restore[..], dry_run].concat(), 2, &words);
        let new = machine.file("store/000003.raw");
        refused(&[&["copy", &other, &new], dry_run].concat(), 2, &words);
    }
    machine.assert_restores(&["monday"]);
    succeed(&["restore", "--no-check", &store, &target]);
    // A missing file, and an edited manifest.
    fs::remove_file(machine.scratch.file("store/000002.raw")).unwrap();
    refused(&["restore", &store, &target], 4, &["000002.raw"]);
    refused(&["info", &format!("backup:{store}")], 1, &["000002.raw"]);
    machine.pull_refused(&["--bitmap", "tuesday", "--point", "x"], 3, &["000002.raw"]);
    let manifest = machine.scratch.file("store/manifest.json");
    let edited = fs::read_to_string(&manifest).unwrap().replace("monday", "sunday");
    fs::write(&manifest, edited).unwrap();
    for args in [&["chain", "list", &store][..], &["restore", &store, &target]] {
        refused(args, 3, &["manifest.json", "it was changed or damaged"]);
    }
    machine.pull_refused(&["--full", "--point", "x"], 3, &["it was changed or damaged"]);
}

#[test]
fn digests_may_be_left_out() {
    let machine = Machine::new();
    machine.job("digests = false\nverify = true\n");
    machine.begin_bitmap("monday");
    machine.keep("monday");
    machine.pull(&["--point", "monday"]);
    machine.write("2M:1M", "zero", "tuesday");
    machine.pull(&["--point", "tuesday", "--bitmap", "monday"]);
    let store = machine.file("store");
    let said = succeed(&["chain", "check", &store]);
    assert_eq!(said, "2 points: 0 files are as they were written, 2 have no digests\n");
    machine.assert_restores(&["monday", "tuesday"]);
    succeed(&["chain", "merge", "--no-check", &store]);
    machine.assert_restores(&["tuesday"]);
    assert!(succeed(&["chain", "check", &store]).contains("1 have no digests"));
    refused(&["chain", "merge", &store], 2, &["nothing to merge"]);
}

#[test]
fn a_pull_that_is_asked_to_stop_leaves_no_point_and_is_resumed() {
    let machine = Machine::new();
    machine.keep("monday");
    let mut child = begin_slowly(&machine, &["--point", "monday"]);
    let pid = child.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    let status = tools::wait_within(&mut child, LIMIT).unwrap();
    assert_eq!(status.code(), Some(143));
    refused(&["chain", "check", &machine.file("store")], 3, &["holds no backup"]);
    machine.pull(&["--point", "monday"]);
    machine.assert_restores(&["monday"]);
}

#[test]
fn unknown_points_and_other_directories_are_refused() {
    let machine = Machine::with_two_points();
    let store = machine.file("store");
    let target = machine.file("target");
    let words = ["no point \"sunday\"", "\"tuesday\"", "chain list"];
    refused(&["restore", &store, &target, "--point", "sunday"], 3, &words);
    refused(&["info", &format!("backup:{store}?point=sunday")], 1, &words);
    refused(&["chain", "check", &store, "--point", "sunday"], 3, &words);
    let scratch = machine.scratch.path().to_str().unwrap();
    for command in ["list", "check", "merge"] {
        refused(&["chain", command, scratch], 3, &["holds no backup"]);
    }
    refused(&["chain", "prune", scratch, "--keep", "1"], 3, &["holds no backup"]);
    refused(&["chain", "prune", &store, "--keep", "0"], 2, &["0"]);
    let said = text(&blockhaul(&["copy", "random:1M", &format!("backup:{store}")]).stderr);
    assert!(said.contains("points are read-only"), "{said}");
    // Files of the store are no targets, whatever point they belong to.
    let point = ["--point", "tuesday"];
    for file in ["000001.raw", "000002.ranges", "manifest.json"] {
        let inside = format!("{store}/{file}");
        for dry_run in [&["--dry-run"][..], &[]] {
            refused(
                &[&["restore", &store, &inside], &point[..], dry_run].concat(),
                2,
                &["is a file of the store of backups"],
            );
        }
    }
    assert_eq!(succeed(&["chain", "check", &store]).lines().count(), 1);
    machine.job("");
    let job = fs::read_to_string(machine.scratch.file("job")).unwrap();
    fs::write(machine.scratch.file("job"), job.replace(&store, scratch)).unwrap();
    machine.pull_refused(&["--point", "x"], 2, &["choose an empty directory"]);
}

/// Starts a pull that takes long, and waits until it copies.
fn begin_slowly(machine: &Machine, more: &[&str]) -> Child {
    let job = fs::read_to_string(machine.scratch.file("job")).unwrap();
    let slow = machine.file("slow");
    fs::write(&slow, format!("rate = '1M'\n{job}")).unwrap();
    let mut command = Command::new(OURS);
    command.args(["pull", &slow]).args(more).stdin(Stdio::null()).stderr(Stdio::null());
    let mut child = command.spawn().unwrap();
    let copies = || {
        let names = listing(&machine.scratch.file("store"));
        names.iter().any(|(name, len)| name.ends_with(".journal") && *len > 0)
    };
    tools::until("it copies", || {
        assert!(child.try_wait().unwrap().is_none(), "it has ended");
        machine.scratch.file("store").exists() && copies()
    });
    child
}

#[test]
fn two_pulls_at_once_are_refused_and_an_interrupted_one_is_resumed_or_discarded() {
    let machine = Machine::new();
    machine.begin_bitmap("monday");
    machine.keep("monday");
    let mut first = begin_slowly(&machine, &["--point", "monday"]);
    machine.pull_refused(&["--point", "monday"], 3, &["in use by another pull"]);
    let listed = succeed(&["chain", "list", &machine.file("store")]);
    assert!(listed.lines().count() == 2 && listed.contains("monday  -     unfinished"), "{listed}");
    first.kill().unwrap();
    first.wait().unwrap();
    refused(&["restore", &machine.file("store"), &machine.file("target")], 3, &["no backup"]);
    // Another pull is another moment.
    let words = ["unfinished point \"monday\"", "--restart"];
    for dry_run in [&["--dry-run"][..], &[]] {
        machine.pull_refused(&[&["--point", "other"], dry_run].concat(), 3, &words);
        machine.pull_refused(dry_run, 3, &words);
    }
    let plan = machine.pull(&["--point", "other", "--restart", "--dry-run"]);
    assert!(plan.contains("where the unfinished pull is discarded"), "{plan}");
    let plan = machine.pull(&["--point", "monday", "--dry-run"]);
    assert!(plan.contains("where the unfinished pull is resumed"), "{plan}");
    let plan = machine.pull(&["--point", "monday", "--dry-run", "--json"]);
    assert!(plan.contains("\"unfinished\":\"resumed\""), "{plan}");
    refused_after_a_change_of_the_source(&machine);
    machine.pull(&["--point", "monday"]);
    machine.write("2M:8M", "pattern", "tuesday");
    machine.begin_bitmap("tuesday");
    let next = ["--bitmap", "monday", "--point", "tuesday"];
    let mut child = begin_slowly(&machine, &next);
    child.kill().unwrap();
    child.wait().unwrap();
    // What is copied has changed since.
    machine.write("0:1M", "pattern", "tuesday");
    for dry_run in [&["--dry-run"][..], &[]] {
        let args = [&next[..], dry_run].concat();
        machine.pull_refused(&args, 3, &["other changes than when it began", "--restart"]);
        let args = [&next[..], &["--full"], dry_run].concat();
        machine.pull_refused(&args, 3, &["it is an increment, and this pull makes a full backup"]);
    }
    machine.pull(&[&next[..], &["--restart"]].concat());
    machine.assert_restores(&["monday", "tuesday"]);
    assert_eq!(succeed(&["chain", "check", &machine.file("store")]).lines().count(), 1);
}

/// A dry run and a run both compare the source with the journal, and see a change in its first block.
fn refused_after_a_change_of_the_source(machine: &Machine) {
    let first = machine.file("first-block");
    let export = machine.uri();
    succeed(&["copy", "--range", "0:64k", &export, &first]);
    succeed(&["copy", "--range", "0:64k", "pattern:16M", &export]);
    for dry_run in [&["--dry-run"][..], &[]] {
        let args = [&["--point", "monday"], dry_run].concat();
        machine.pull_refused(&args, 1, &["the source has changed", "--restart"]);
    }
    succeed(&["copy", "--range", "0:64k", &first, &export]);
}

#[test]
fn killed_pulls_are_resumed_and_right() {
    let seed = rng::seed();
    eprintln!("BLOCKHAUL_SEED={seed:#x}");
    let mut rng = Rng::new(seed);
    let kills = if std::env::var_os("BLOCKHAUL_LONG").is_some() { 100 } else { 8 };
    let mut killed = 0;
    let mut round = 0;
    while killed < kills {
        let machine = Machine::start(ScratchDir::new().unwrap(), &["--layer", "rate?rate=48M"]);
        let names = ["monday", "tuesday", "wednesday"];
        machine.job("journal-interval = '20ms'\n");
        for (number, name) in names.iter().enumerate() {
            machine.keep(name);
            machine.begin_bitmap(name);
            let mut args = vec!["--point", name];
            if number > 0 {
                args.extend(["--bitmap", names[number - 1]]);
            }
            killed += kill_until_done(&machine, &args, &mut rng);
            assert_eq!(machine.points(), names[..=number]);
            let at = rng.below(4 << 20);
            let len = rng.between(1 << 20, 12 << 20);
            let source = format!("random:{SIZE}?seed={}", rng.below(1000));
            let uri = machine.server.uri("a");
            succeed(&["copy", "--range", &format!("{at}:{len}"), &source, &uri]);
        }
        machine.assert_restores(&names);
        succeed(&["chain", "check", &machine.file("store")]);
        round += 1;
    }
    println!("{killed} kills in {round} rounds");
}

/// Kills a pull at random moments until one is complete; how often.
fn kill_until_done(machine: &Machine, args: &[&str], rng: &mut Rng) -> usize {
    let mut killed = 0;
    loop {
        let mut command = Command::new(OURS);
        command.args(["pull", &machine.file("job")]).args(args).stdin(Stdio::null());
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        // Later ones get more time, so that there is an end.
        let most = Duration::from_millis(10 + rng.below(200) + 20 * killed as u64);
        let status = match tools::wait_within(&mut child, most) {
            Some(status) => status,
            None => {
                child.kill().unwrap();
                child.wait().unwrap();
                killed += 1;
                continue;
            }
        };
        if status.success() {
            return killed;
        }
        let mut said = String::new();
        std::io::Read::read_to_string(child.stderr.as_mut().unwrap(), &mut said).unwrap();
        // It was killed after its last step that counts.
        assert!(said.contains("already: choose another name"), "{said}");
        return killed;
    }
}

#[test]
fn killed_merges_are_completed_and_every_other_point_stays_right() {
    let seed = rng::seed();
    eprintln!("BLOCKHAUL_SEED={seed:#x}");
    let mut rng = Rng::new(seed);
    let machine = Machine::with_two_points();
    let mut names = vec!["monday".to_string(), "tuesday".to_string()];
    let count = if std::env::var_os("BLOCKHAUL_LONG").is_some() { 20 } else { 3 };
    for number in 0..count {
        let name = format!("p{number}");
        let last = names.last().unwrap().clone();
        machine.write(&format!("{}M:3M", number % 12), "pattern", &name);
        machine.begin_bitmap(&name);
        machine.pull(&["--bitmap", &last, "--point", &name]);
        succeed(&["ctl", &machine.file("ctl"), "bitmap-remove", "a", &last]);
        names.push(name);
    }
    let mut tries = 0;
    while machine.points().len() > 1 {
        tries += 1;
        let mut command = Command::new(OURS);
        command.args(["chain", "merge", &machine.file("store")]);
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
        // Later ones get more time, so that there is an end.
        let most = Duration::from_millis(rng.below(60) + 10 * tries);
        if tools::wait_within(&mut child, most).is_none() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        let points = machine.points();
        machine.assert_restores(&points.iter().map(String::as_str).collect::<Vec<_>>());
    }
    succeed(&["chain", "prune", &machine.file("store"), "--keep", "1"]);
    assert_eq!(machine.points(), names[names.len() - 1..]);
    let said = succeed(&["chain", "check", &machine.file("store")]);
    assert!(said.starts_with("1 point: its file"), "{said}");
}

#[test]
fn a_full_file_system_leaves_no_point_and_the_pull_is_resumed() {
    let machine = Machine::with_two_points();
    machine.write("1M:12M", "random", "wednesday");
    let full = machine.scratch.file("full");
    fs::create_dir(&full).unwrap();
    // In a mount namespace of its own, so that nothing is left behind.
    let line = "mount -t tmpfs -o size=24m none \"$2\" || exit 77; cp -r \"$3\" \"$2/store\" || exit 77; \
                \"$1\" pull \"$4\" --bitmap tuesday --point wednesday; status=$?; \
                \"$1\" chain list \"$2/store\"; mount -o remount,size=64m \"$2\" || exit 77; \
                \"$1\" pull \"$4\" --bitmap tuesday --point wednesday || exit 9; \
                \"$1\" compare \"backup:$2/store\" \"$5\" || exit 10; exit $status";
    let job = machine.file("small");
    let text_of_job = fs::read_to_string(machine.scratch.file("job")).unwrap();
    let place = full.join("store").display().to_string();
    fs::write(&job, text_of_job.replace(&machine.file("store"), &place)).unwrap();
    let mut command = Command::new("unshare");
    command.args(["-rm", "/bin/sh", "-c", line, "sh", OURS]);
    let full = full.display().to_string();
    let wednesday = machine.file("wednesday");
    let output =
        tools::output(command.args([&full, &machine.file("store"), &job, &wednesday]), LIMIT);
    let output = match output {
        Ok(output) if output.status.code() != Some(77) => output,
        other => return tools::skip(format!("cannot mount: {other:?}")),
    };
    let said = text(&output.stderr);
    if said.starts_with("unshare: ") {
        return tools::skip(said);
    }
    assert_eq!(output.status.code(), Some(6), "{said}");
    assert!(said.contains("disk vda") && said.contains("free some space"), "{said}");
    let list = text(&output.stdout);
    let before = list.split("wednesday is an increment").next().unwrap();
    assert!(before.contains("tuesday") && before.contains("wednesday  -      "), "{list}");
}

#[test]
fn an_increment_of_qemu_is_pulled_while_its_overlay_shrinks() {
    let _ = (require_peer!("qemu-storage-daemon"), require_peer!("qemu-img"));
    let seed = rng::seed();
    eprintln!("BLOCKHAUL_SEED={seed:#x}");
    let mut rng = Rng::new(seed);
    let most = if std::env::var_os("BLOCKHAUL_LONG").is_some() { 100 } else { 3 };
    let mut killed = 0;
    let mut rounds = 0;
    while killed < most && rounds < most {
        killed += pull_and_discard(&mut rng);
        rounds += 1;
    }
    println!("{killed} kills in {rounds} rounds");
}

/// Pulls an increment whose source is discarded meanwhile; how often it was killed.
fn pull_and_discard(rng: &mut Rng) -> usize {
    use std::os::unix::fs::MetadataExt as _;
    let scratch = ScratchDir::new().unwrap();
    let point = PointInTime::begin(&scratch).unwrap();
    let file = |name: &str| scratch.file(name).display().to_string();
    fs::write(scratch.file("before"), &point.before).unwrap();
    let store = file("store");
    let job = file("job");
    let write = |source: &str, more: &str| {
        let disk = format!("[[disk]]\nsource = '{source}'\nstore = '{store}'\n");
        fs::write(&job, format!("rate = '64M'\n{disk}journal-interval = '5ms'\n{more}")).unwrap();
    };
    write(&file("before"), "");
    succeed(&["pull", &job, "--point", "monday"]);
    let uri = format!("nbd+unix:///then?socket={}", point.socket.display());
    write(&uri, "discard-source = true\n");
    let args = ["pull", &job, "--bitmap", "monday", "--point", "tuesday"];
    let used = || fs::metadata(scratch.file("fleece")).unwrap().blocks() * 512;
    let before = used();
    let mut killed = 0;
    loop {
        let mut child = Command::new(OURS).args(args).stdout(Stdio::null()).spawn().unwrap();
        let most = Duration::from_millis(10 + rng.below(150) + 20 * killed as u64);
        let Some(status) = tools::wait_within(&mut child, most) else {
            child.kill().unwrap();
            child.wait().unwrap();
            killed += 1;
            continue;
        };
        assert!(status.success() || killed > 0, "{status}");
        break;
    }
    // What was discarded is nowhere else.
    let unfinished = scratch.file("store/000002.journal").exists();
    assert!(!unfinished, "a pull that ended by itself left its journal");
    let newest = scratch.file("newest");
    succeed(&["restore", &store, newest.to_str().unwrap(), "--point", "tuesday"]);
    assert!(fs::read(&newest).unwrap() == point.then);
    assert!(before > 4 << 20 && used() < 1 << 20, "{before} bytes before, {} now", used());
    let list = succeed(&["chain", "list", "--json", &store]);
    let list: Value = serde_json::from_str(&list).unwrap();
    let total: usize = point.dirty.iter().map(|range| range.1).sum();
    assert_eq!(list["points"][1]["changed"], total, "{list}");
    killed
}

#[test]
fn a_pull_that_has_discarded_its_source_does_not_begin_again() {
    let _ = (require_peer!("qemu-storage-daemon"), require_peer!("qemu-img"));
    let scratch = ScratchDir::new().unwrap();
    let point = PointInTime::begin(&scratch).unwrap();
    let file = |name: &str| scratch.file(name).display().to_string();
    fs::write(scratch.file("before"), &point.before).unwrap();
    let store = file("store");
    let job = file("job");
    let write = |source: &str, rate: &str| {
        let keys = "journal-interval = '5ms'\ndiscard-source = true";
        let keys = if rate.is_empty() { "" } else { keys };
        let disk = format!("{rate}[[disk]]\nsource = '{source}'\nstore = '{store}'\n{keys}");
        fs::write(&job, disk).unwrap();
    };
    write(&file("before"), "");
    succeed(&["pull", &job, "--point", "monday"]);
    let uri = format!("nbd+unix:///then?socket={}", point.socket.display());
    write(&uri, "rate = '4M'\n");
    let args = ["pull", &job, "--bitmap", "monday", "--point", "tuesday"];
    let mut child = Command::new(OURS).args(args).stderr(Stdio::null()).spawn().unwrap();
    let journal = scratch.file("store/000002.journal");
    tools::until("something is recorded", || {
        assert!(child.try_wait().unwrap().is_none(), "it has ended");
        fs::metadata(&journal).is_ok_and(|data| data.len() > 0)
    });
    child.kill().unwrap();
    child.wait().unwrap();
    refused(&[&args[..], &["--restart"]].concat(), 3, &["000002.journal", "chain abandon"]);
    let other = ["pull", &job, "--bitmap", "monday", "--point", "wednesday"];
    refused(&other, 3, &["--point \"tuesday\"", "discarded at the source", "chain abandon"]);
    let whole = fs::read(&journal).unwrap();
    let mut damaged = whole.clone();
    damaged[100] ^= 1;
    fs::write(&journal, &damaged).unwrap();
    for more in [&[][..], &["--restart"]] {
        refused(&[&args[..], more].concat(), 3, &["its header is damaged", "on the target only"]);
    }
    assert!(fs::read(&journal).unwrap() == damaged);
    fs::write(&journal, whole).unwrap();
    write(&uri, "rate = '1G'\n");
    // All is copied, and the point cannot be listed.
    let list = scratch.file("store/manifest.json.tmp");
    fs::create_dir(&list).unwrap();
    refused(&args, 3, &["manifest.json"]);
    refused(&[&args[..], &["--restart"]].concat(), 3, &["000002.journal", "chain abandon"]);
    fs::remove_dir(&list).unwrap();
    succeed(&args);
    assert!(!journal.exists());
    let newest = scratch.file("newest");
    succeed(&["restore", &store, newest.to_str().unwrap()]);
    assert!(fs::read(&newest).unwrap() == point.then);
    refused(&["chain", "abandon", &store], 2, &["no unfinished point"]);
    refused(&["chain", "abandon", &file("none")], 3, &["none does not exist: check the name"]);
    assert!(!scratch.file("none").exists());
}

/// A disk of `size` bytes in QEMU's storage daemon, as a writable export `disk` with the bitmaps.
struct Qemu {
    daemon: Child,
    qmp: Qmp,
    scratch: ScratchDir,
}

impl Qemu {
    /// `None` where there is no QEMU.
    fn start(size: u64) -> Option<Qemu> {
        let daemon = tools::PeerProgram::require("qemu-storage-daemon")?;
        // In memory, a file is at most as large as the memory on some machines.
        let scratch = ScratchDir::on_disk().unwrap();
        let disk = scratch.file("disk");
        fs::File::create(&disk).unwrap().set_len(size).unwrap();
        let mut command = daemon.tied_command();
        command
            .args([
                "--blockdev",
                &format!("driver=file,filename={},node-name=file0", disk.display()),
            ])
            .args(["--blockdev", "driver=raw,file=file0,node-name=disk0"])
            .args([
                "--chardev",
                &format!("socket,id=c,path={},server=on,wait=off", scratch.socket("q").display()),
            ])
            .args(["--monitor", "chardev=c"])
            .stdin(Stdio::null());
        let daemon = command.spawn().unwrap();
        let mut qmp = Qmp::connect(&scratch.socket("q"));
        qmp.done(&format!(
            r#"{{"execute": "nbd-server-start", "arguments": {{"max-connections": 0, "addr": {{"type": "unix", "data": {{"path": "{}"}}}}}}}}"#,
            scratch.socket("n").display()
        ));
        Some(Qemu { daemon, qmp, scratch })
    }

    /// Disables the bitmap `old`, begins the bitmap `new`, and exports the disk with the old one.
    fn export(&mut self, old: Option<&str>, new: &str) {
        let bitmap = |what: &str, name: &str| {
            format!(
                r#"{{"execute": "block-dirty-bitmap-{what}", "arguments": {{"node": "disk0", "name": "{name}"}}}}"#
            )
        };
        self.qmp.done(&bitmap("add", new));
        let mut bitmaps = String::new();
        if let Some(old) = old {
            self.qmp.done(&bitmap("disable", old));
            bitmaps = format!(r#", "bitmaps": [{{"node": "disk0", "name": "{old}"}}]"#);
        }
        self.add_export("disk", &bitmaps);
    }

    fn add_export(&mut self, id: &str, more: &str) {
        self.qmp.done(&format!(
            r#"{{"execute": "block-export-add", "arguments": {{"type": "nbd", "id": "{id}", "node-name": "disk0", "name": "{id}", "writable": true{more}}}}}"#
        ));
    }

    fn remove_export(&mut self, id: &str) {
        let line = format!(
            r#"{{"execute": "block-export-del", "arguments": {{"id": "{id}", "mode": "hard"}}}}"#
        );
        self.qmp.done(&line);
        // It is gone a moment later.
        tools::until_ok("no export is left", || {
            let left = self.qmp.answer(r#"{"execute": "query-block-exports"}"#).unwrap();
            if left.as_array().is_some_and(Vec::is_empty) { Ok(()) } else { Err(left) }
        });
    }

    fn uri(&self, export: &str) -> String {
        format!("nbd+unix:///{export}?socket={}", self.scratch.socket("n").display())
    }

    /// The machine writes random bytes at these places.
    fn write(&mut self, ranges: &[(u64, u64)], size: u64, seed: u64) {
        self.add_export("machine", "");
        let list: String = ranges
            .iter()
            .map(|(at, len)| format!("{{\"offset\": {at}, \"length\": {len}}}\n"))
            .collect();
        fs::write(self.scratch.file("list"), list).unwrap();
        let list = self.scratch.file("list").display().to_string();
        succeed(&[
            "copy",
            "--ranges",
            &list,
            &format!("random:{size}?seed={seed}"),
            &self.uri("machine"),
        ]);
        self.remove_export("machine");
    }

    /// Bytes that QEMU has read, from files and sockets.
    fn read_bytes(&self) -> u64 {
        let counters = fs::read_to_string(format!("/proc/{}/io", self.daemon.id())).unwrap();
        let mut lines = counters.lines();
        lines.find_map(|line| line.strip_prefix("rchar: ")).unwrap().parse().unwrap()
    }

    fn job(&self, keys: &str) -> (String, String) {
        let store = self.scratch.file("store").display().to_string();
        let job: PathBuf = self.scratch.file("job");
        let disk = format!("[[disk]]\nsource = '{}'\nstore = '{store}'\n{keys}", self.uri("disk"));
        fs::write(&job, disk).unwrap();
        (job.display().to_string(), store)
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}

#[test]
fn three_increments_of_qemu_are_the_disk_at_each_time() {
    require_peer!("qemu-storage-daemon");
    let size = 64 << 20;
    let seed = rng::seed();
    eprintln!("BLOCKHAUL_SEED={seed:#x}");
    let mut rng = Rng::new(seed);
    let mut qemu = Qemu::start(size).unwrap();
    qemu.write(&[(0, 20 << 20), (30 << 20, 5 << 20)], size, 1);
    let names = ["p0", "p1", "p2", "p3"];
    let (job, store) = qemu.job("verify = true\n");
    for (number, name) in names.iter().enumerate() {
        let before = number.checked_sub(1).map(|before| names[before]);
        qemu.export(before, name);
        let mut args = vec!["pull", &job, "--point", name];
        args.extend(before.iter().flat_map(|before| ["--bitmap", before]));
        let said = succeed(&args);
        assert!(said.contains(if number == 0 { "full" } else { "increment" }), "{said}");
        fs::copy(qemu.scratch.file("disk"), qemu.scratch.file(name)).unwrap();
        qemu.remove_export("disk");
        let mut ranges = Vec::new();
        let mut at = 0;
        while at < size {
            ranges.push((at, rng.between(1, 300_000).min(size - at)));
            at += rng.between(400_000, 9_000_000);
        }
        qemu.write(&ranges, size, number as u64 + 2);
    }
    for name in names {
        let target = qemu.scratch.file("target");
        let kept = qemu.scratch.file(name);
        succeed(&["restore", &store, target.to_str().unwrap(), "--point", name]);
        assert!(fs::read(&target).unwrap() == fs::read(&kept).unwrap(), "{name}");
    }
    assert!(succeed(&["chain", "check", &store]).starts_with("4 points: 4 files are"));
}

#[test]
fn an_increment_of_a_huge_disk_reads_only_what_has_changed() {
    require_peer!("qemu-storage-daemon");
    let size = 1 << 40;
    let mut qemu = Qemu::start(size).unwrap();
    qemu.export(None, "p0");
    let (job, store) = qemu.job("");
    succeed(&["pull", &job, "--point", "p0"]);
    qemu.remove_export("disk");
    // 12.5 MiB in 200 places, each the block of a bit.
    let ranges: Vec<(u64, u64)> = (0..200).map(|place| (place * (5 << 30), 65536)).collect();
    qemu.write(&ranges, size, 7);
    qemu.export(Some("p0"), "p1");
    let before = qemu.read_bytes();
    let said = succeed(&["pull", &job, "--bitmap", "p0", "--point", "p1"]);
    let changed: u64 = ranges.iter().map(|range| range.1).sum();
    assert!(said.contains(&format!(" {changed} of {size} bytes have changed")), "{said}");
    // The journal and the recognition of the disk read samples of that once more.
    let read = qemu.read_bytes() - before;
    assert!(read >= changed && read <= changed + (8 << 20), "{read} bytes for {changed}");
    println!("{read} bytes were read for {changed} changed ones");
    let newest = format!("backup:{store}");
    let disk = qemu.scratch.file("disk");
    succeed(&["compare", "--strict", &newest, disk.to_str().unwrap()]);
}
