//! Backups to repositories of restic: killed, out of space, and pulled with bitmaps.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use blockhaul_testkit::require_peer;
use blockhaul_testkit::rng::Rng;
use blockhaul_testkit::tools::{self, PeerProgram, ScratchDir, long, text};

use crate::pull::Machine;
use crate::served_disk::{LIMIT, OURS};

const PAGE: &str = include_str!("../../../../../docs/restic.md");

/// A repository in a directory of its own.
struct Repository {
    restic: PeerProgram,
    scratch: ScratchDir,
}

impl Repository {
    fn new(restic: PeerProgram) -> Repository {
        let scratch = ScratchDir::new().unwrap();
        fs::write(scratch.file("password"), "secret\n").unwrap();
        Repository { restic, scratch }
    }

    fn restic(&self, args: &[&str]) -> String {
        let mut command = self.restic.command();
        command
            .args(args)
            .args(["--no-cache", "--password-file"])
            .arg(self.scratch.file("password"));
        command.arg("--repo").arg(self.scratch.file("repo"));
        let output = tools::output(&mut command, LIMIT).unwrap();
        assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
        text(&output.stdout)
    }

    fn spec(&self, place: &str) -> String {
        format!("restic:{}#{place}", self.scratch.file("repo").display())
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(OURS);
        command.args(args).env("RESTIC_PASSWORD_FILE", self.scratch.file("password"));
        command
    }

    fn run(&self, args: &[&str]) -> Output {
        tools::output(&mut self.command(args), LIMIT).unwrap()
    }

    #[track_caller]
    fn succeed(&self, args: &[&str]) -> String {
        let output = self.run(args);
        assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
        text(&output.stdout)
    }

    fn snapshots(&self) -> serde_json::Value {
        serde_json::from_str(&self.restic(&["snapshots", "--json", "--no-lock"])).unwrap()
    }
}

#[test]
fn a_backup_that_is_killed_leaves_a_right_repository() {
    let repository = Repository::new(require_peer!("restic"));
    let disk = repository.scratch.file("disk.raw");
    let mut bytes = Rng::new(5).disk(48 << 20, 3 << 20, 70);
    fs::write(&disk, &bytes).unwrap();
    let disk = disk.to_str().unwrap();
    let target = repository.spec("new/disk?init=on");
    let seed = u64::from(std::process::id());
    println!("seed {seed}");
    let mut rng = Rng::new(seed);
    let (mut kills, least) = (0, if long() { 200 } else { 5 });
    for round in 0.. {
        if kills >= least {
            break;
        }
        assert!(round < 20 * least, "{kills} of {round} runs were killed");
        let mut copy = repository.command(&["copy", "--no-progress", disk, &target]);
        let mut copy = copy.stdin(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(rng.below(600)));
        kills += usize::from(copy.try_wait().unwrap().is_none());
        copy.kill().unwrap();
        copy.wait().unwrap();
        let place = repository.scratch.file("repo");
        if place.join("config").exists() {
            repository.restic(&["check", "--read-data", "--no-lock"]);
            // The lock of a process that was killed.
            repository.restic(&["unlock"]);
        } else if fs::read_dir(place.join("keys")).is_ok_and(|mut keys| keys.next().is_some()) {
            // A key without a repository is removed by hand.
            fs::remove_dir_all(place).unwrap();
        }
        repository.succeed(&["copy", disk, &target]);
        let latest = repository.spec("latest/disk");
        repository.succeed(&["compare", disk, &latest]);
        assert_eq!(repository.restic(&["list", "locks", "--no-lock"]), "", "round {round}");
        // Packs of the copy that was killed have an index now.
        let said = repository.restic(&["check"]);
        assert!(!said.contains("additional files"), "round {round}: {said}");
        let at = rng.below(47) as usize * (1 << 20) + 77;
        rng.fill(&mut bytes[at..at + (1 << 19)]);
        fs::write(disk, &bytes).unwrap();
    }
    repository.restic(&["check", "--read-data"]);
    let restored = repository.scratch.file("restored");
    for snapshot in repository.snapshots().as_array().unwrap() {
        let id = snapshot["id"].as_str().unwrap();
        repository.restic(&["restore", id, "--target", restored.to_str().unwrap()]);
        let of = repository.spec(&format!("{id}/disk"));
        repository.succeed(&["compare", restored.join("disk").to_str().unwrap(), &of]);
        fs::remove_dir_all(&restored).unwrap();
    }
}

#[test]
fn a_file_system_that_is_full_is_status_6_and_leaves_the_snapshots() {
    let repository = Repository::new(require_peer!("restic"));
    let disk = repository.scratch.file("disk.raw");
    let disk = disk.to_str().unwrap();
    let target = repository.spec("new/disk?init=on");
    repository.succeed(&["copy", "random:1M?seed=1", disk]);
    repository.succeed(&["copy", disk, &target]);
    // Files may not exceed 4 MiB: as on a file system with that space.
    repository.succeed(&["copy", "random:40M?seed=2", disk]);
    let line = format!("ulimit -f 4096; exec {OURS} copy {disk} '{target}'");
    let mut limited = Command::new("sh");
    limited.args(["-c", &format!("trap '' XFSZ; {line}")]);
    limited.env("RESTIC_PASSWORD_FILE", repository.scratch.file("password"));
    let output = tools::output(&mut limited, LIMIT).unwrap();
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(6), "{said}");
    assert!(said.contains("cannot write") && said.contains("; "), "{said}");
    assert_eq!(repository.snapshots().as_array().unwrap().len(), 1);
    assert_eq!(repository.restic(&["list", "locks", "--no-lock"]), "");
    repository.restic(&["check", "--read-data"]);
    repository.succeed(&["copy", disk, &target]);
    repository.succeed(&["compare", "--strict", disk, &repository.spec("latest/disk")]);
}

#[test]
fn parts_need_an_earlier_backup_and_each_copy_makes_one_snapshot() {
    let repository = Repository::new(require_peer!("restic"));
    let disk = repository.scratch.file("disk.raw");
    let disk = disk.to_str().unwrap();
    repository.succeed(&["copy", "random:8M?seed=1", disk]);
    let new = repository.spec("new/disk?init=on");
    let latest = repository.spec("latest/disk");
    let refused = |args: &[&str], words: &[&str]| {
        let output = repository.run(args);
        let said = text(&output.stderr);
        assert!(!output.status.success(), "{args:?}");
        assert!(words.iter().all(|word| said.contains(word)), "{args:?}: {said}");
    };
    refused(
        &["copy", "--range", "0:1M", disk, &new],
        &["no snapshot", "copy all of the disk first"],
    );
    assert!(!repository.scratch.file("repo").exists());
    let plan = repository.succeed(&["copy", "--dry-run", disk, &new]);
    assert!(plan.contains("nothing was changed"), "{plan}");
    assert!(!repository.scratch.file("repo").exists());
    repository.succeed(&["copy", "--verify", disk, &new]);
    repository.succeed(&["copy", "--range", "1M:100k", "pattern:8M", &new]);
    repository.succeed(&["copy", "--range", "1M:100k", "pattern:8M", disk]);
    repository.succeed(&["compare", "--strict", disk, &latest]);
    refused(&["copy", "--range", "0:64k", "random:7M", &new], &["smaller", "copy all"]);
    let mut pipe = repository.command(&["copy", "-", &new]);
    let output = pipe.stdin(Stdio::piped()).output().unwrap();
    assert!(text(&output.stderr).contains("standard input is empty"), "{output:?}");
    assert!(!output.status.success());
    // Several connections are one: the snapshot is made by the last flush.
    let before = repository.snapshots().as_array().unwrap().len();
    repository.succeed(&["copy", "--connections", "4", "--verify", disk, &new]);
    assert_eq!(repository.snapshots().as_array().unwrap().len(), before + 1);
    // A pipe replaces the beginning.
    let mut pipe = repository.command(&["copy", "-", &new]);
    let mut pipe = pipe.stdin(Stdio::piped()).spawn().unwrap();
    std::io::Write::write_all(&mut pipe.stdin.take().unwrap(), &[7; 3 << 19]).unwrap();
    assert!(pipe.wait().unwrap().success());
    let mut bytes = fs::read(disk).unwrap();
    bytes[..3 << 19].fill(7);
    fs::write(disk, bytes).unwrap();
    repository.succeed(&["compare", "--strict", disk, &latest]);
    // The journal of an earlier run is not needed: chunks are found.
    let journal = repository.scratch.file("journal");
    repository.succeed(&["copy", "--journal", journal.to_str().unwrap(), disk, &new]);
    refused(&["copy", "--range", "0:9M", "random:9M", &new], &["smaller"]);
    refused(
        &["copy", "--discard-source", "--journal", "j", disk, &new],
        &["leave out --discard-source"],
    );
    refused(&["serve", &new, "--run", "true"], &["read-only"]);
    refused(&["info", &new], &["target of a copy", "#latest/PATH"]);
    let locked = repository.scratch.file("repo").join("locks");
    assert_eq!(fs::read_dir(locked).unwrap().count(), 0);
    repository.restic(&["check", "--read-data"]);
}

#[test]
fn pulls_with_bitmaps_are_snapshots_of_all_disks() {
    let repository = Repository::new(require_peer!("restic"));
    let machine = Machine::new();
    let store = repository.spec("vms/one?init=on");
    let uri = machine.uri();
    let job = repository.scratch.file("job.toml");
    // The disk of the page, and another one.
    let disk = PAGE.split("```toml\n").nth(1).unwrap().split("```").next().unwrap();
    let disk = disk.replace("nbd+unix:///vda?socket=/run/vm1.nbd", &uri);
    let disk = disk.replace("restic:backups#vm1?init=on", &store);
    let xml = repository.scratch.file("vm1.xml");
    fs::write(&xml, "<domain/>").unwrap();
    let disk = disk.replace("vm1.xml", xml.to_str().unwrap());
    assert!(disk.contains(&uri) && disk.contains(&store), "{disk}");
    fs::write(&job, disk.clone() + &disk.replace("\"vda\"", "\"vdb\"")).unwrap();
    let job = job.to_str().unwrap();
    let pull = |more: &[&str]| repository.succeed(&[&["pull", job][..], more].concat());
    let dry = pull(&["--point", "monday", "--dry-run"]);
    assert!(dry.contains("would be a full backup"), "{dry}");
    assert!(!repository.scratch.file("repo").exists());
    machine.begin_bitmap("monday");
    machine.keep("monday");
    pull(&["--point", "monday"]);
    machine.write("2M:1M", "pattern", "tuesday");
    machine.begin_bitmap("tuesday");
    let said = pull(&["--bitmap", "monday", "--point", "tuesday"]);
    let increment =
        "disk vda: tuesday is an increment of monday: 1048576 of 16777216 bytes have changed";
    assert!(said.contains(increment), "{said}");
    let snapshots = repository.snapshots();
    let snapshots = snapshots.as_array().unwrap();
    assert_eq!(snapshots.len(), 2);
    let paths = ["/vms/one/vda", "/vms/one/vdb", "/vms/one/vm1.xml"];
    assert_eq!(snapshots[1]["paths"], serde_json::json!(paths));
    assert_eq!(snapshots[1]["parent"], snapshots[0]["id"]);
    for point in ["monday", "tuesday"] {
        for name in ["vda", "vdb"] {
            let device =
                repository.spec(&format!("latest/vms/one/{name}?tag={name}:point={point}"));
            repository.succeed(&["compare", "--strict", &machine.file(point), &device]);
        }
    }
    // The file beside the disks, as restic and we read it.
    assert_eq!(repository.restic(&["dump", "latest", "/vms/one/vm1.xml"]), "<domain/>");
    let beside = repository.spec("latest/vms/one/vm1.xml");
    repository.succeed(&["compare", xml.to_str().unwrap(), &beside]);
    // A bitmap of another backup, and a point that exists.
    let refused = |more: &[&str], words: &str| {
        let output = repository.run(&[&["pull", job][..], more].concat());
        let said = text(&output.stderr);
        assert!(!output.status.success() && said.contains(words), "{more:?}: {said}");
    };
    refused(&["--bitmap", "monday", "--point", "wednesday"], "began with another backup");
    refused(&["--point", "monday"], "already");
    refused(&["--point", "tuesday"], "have the point");
    // A disk without a bitmap is copied in full; nothing new is written but lists.
    let said = pull(&["--point", "wednesday"]);
    assert!(said.contains("is a full backup"), "{said}");
    repository.restic(&["forget", "--keep-last", "1", "--prune", "--max-unused", "0"]);
    repository.restic(&["check", "--read-data"]);
    let device = repository.spec("latest/vms/one/vdb");
    repository.succeed(&["compare", "--strict", &machine.file("tuesday"), &device]);
    for command in [&["chain", "list"][..], &["chain", "check"], &["restore"]] {
        let args = if command.len() == 2 {
            [command, &[&store]].concat()
        } else {
            vec!["restore", &store, "x.raw"]
        };
        let said = text(&repository.run(&args).stderr);
        assert!(
            said.contains("restic snapshots") && said.contains("blockhaul copy"),
            "{args:?}: {said}"
        );
    }
    let machine = repository.run(&["pull", "--libvirt", "vm", "--store", &store]);
    assert!(text(&machine.stderr).contains("need a directory"), "{}", text(&machine.stderr));
}

#[test]
fn a_disk_whose_copy_fails_is_left_out_of_the_snapshot() {
    let repository = Repository::new(require_peer!("restic"));
    let job = repository.scratch.file("job.toml");
    let store = repository.spec("vm?init=on");
    let disk = |name: &str, more: &str| {
        format!(
            "[[disk]]\nname = '{name}'\nsource = 'random:8M?seed=1'\nstore = '{store}'\n{more}\n"
        )
    };
    let failing = disk("vdb", "source-layer = ['error?read=100%&at=5M,512']\nretries = 0");
    fs::write(&job, disk("vda", "") + &failing + &disk("vdc", "")).unwrap();
    let pull = ["pull", job.to_str().unwrap(), "--point", "monday"];
    let output = repository.run(&pull);
    let (printed, said) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(4), "{said}");
    assert!(said.contains("vdb") && !printed.contains("vdb"), "{printed}{said}");
    let snapshots = repository.snapshots();
    assert_eq!(snapshots[0]["paths"], serde_json::json!(["/vm/vda", "/vm/vdc"]), "{snapshots}");
    assert_eq!(repository.restic(&["list", "locks", "--no-lock"]), "");
    // The same command copies what is missing.
    fs::write(&job, disk("vda", "") + &disk("vdb", "") + &disk("vdc", "")).unwrap();
    let printed = repository.succeed(&pull);
    assert!(printed.contains("disk vda: monday is complete already"), "{printed}");
    let snapshots = repository.snapshots();
    assert_eq!(snapshots[1]["paths"], serde_json::json!(["/vm/vdb"]), "{snapshots}");
    for (disk, name) in [("vda", "vda"), ("vdb", "vdb")] {
        let device = repository.spec(&format!("latest/vm/{disk}?tag={name}:point=monday"));
        repository.succeed(&["compare", "--strict", "random:8M?seed=1", &device]);
    }
    repository.restic(&["check", "--read-data"]);
    // Two disks with one name, and one file in place of a directory.
    fs::write(&job, disk("vda", "") + &disk("vda", "")).unwrap();
    let said = text(&repository.run(&pull).stderr);
    assert!(said.contains("another disk also has the name"), "{said}");
    let beside = |files: &str| disk("vda", &format!("files = {files}")) + &disk("vdx", "");
    for (files, words) in [
        ("['/nonexistent/a.xml']", "cannot read /nonexistent/a.xml"),
        ("['x/vdx']", "has the name of disk vdx"),
        ("'a.xml'", "must be a list of names of files"),
    ] {
        fs::write(&job, beside(files)).unwrap();
        let output = repository.run(&["pull", job.to_str().unwrap()]);
        let said = text(&output.stderr);
        assert!(!output.status.success() && said.contains(words), "{files}: {said}");
    }
    let plain = repository.scratch.file("plain").display().to_string();
    fs::write(&job, beside("['a.xml']").replace(&store, &plain)).unwrap();
    let said = text(&repository.run(&["pull", job.to_str().unwrap()]).stderr);
    assert!(said.contains("no files beside the disk"), "{said}");
    assert!(!repository.scratch.file("plain").exists());
    let inside = disk("vda", "").replace("#vm?", "#vm/vdx?") + &disk("vdx", "");
    fs::write(&job, inside).unwrap();
    assert!(repository.run(&["pull", job.to_str().unwrap()]).status.success());
}

/// What a trace says of names that files got, and of files and folders that were synced.
#[derive(Default)]
struct SyncOrder {
    /// Descriptors of files without names that were synced.
    synced: HashSet<String>,
    /// Folders with names that were given in these lines, and not synced since.
    pending: Vec<(String, usize)>,
    /// Calls that have begun, by their threads.
    begun: HashMap<String, (String, usize)>,
    names: usize,
}

impl SyncOrder {
    /// A call without its thread, from its first line to its end.
    fn call(&mut self, call: &str, begun: usize, ended: usize) {
        let (name, arguments) = call.split_once('(').unwrap_or_default();
        let number = |text: &str| text.split('<').next().unwrap().to_owned();
        let path = |text: &str| {
            text.split('<').nth(1).unwrap_or_default().split('>').next().unwrap().to_owned()
        };
        if name == "fsync" || name == "fdatasync" {
            let folder = path(arguments);
            if folder.contains('#') {
                self.synced.insert(number(arguments));
            }
            self.pending.retain(|(other, at)| *other != folder || *at > begun);
        } else if name == "linkat" {
            let parts: Vec<_> = arguments.split(", ").collect();
            let file = parts[1].trim_matches('"').rsplit('/').next().unwrap();
            assert!(self.synced.remove(file), "{call}: the file was not synced");
            let folder = path(parts[2]);
            let is_first =
                |earlier: &str| self.pending.iter().all(|(other, _)| !other.contains(earlier));
            let is_index = folder.ends_with("/index");
            if is_index || folder.ends_with("/snapshots") {
                assert!(is_first("/repo/data/"), "{call}: {:?}", self.pending);
                assert!(is_index || is_first("/repo/index"), "{call}: {:?}", self.pending);
            }
            self.names += 1;
            self.pending.push((folder, ended));
        }
    }

    fn line(&mut self, number: usize, line: &str) {
        let Some((thread, call)) = line.split_once(' ') else { return };
        let call = call.trim_start();
        if let Some(part) = call.strip_suffix(" <unfinished ...>") {
            self.begun.insert(thread.to_owned(), (part.to_owned(), number));
        } else if call.starts_with("<...") {
            let (part, begun) = self.begun.remove(thread).unwrap_or_default();
            self.call(&part, begun, number);
        } else {
            self.call(call, number, number);
        }
    }
}

/// What the model of the crash tests in the crate takes for granted.
#[test]
fn each_file_is_durable_before_a_file_that_names_it_exists() {
    let repository = Repository::new(require_peer!("restic"));
    let strace = require_peer!("strace");
    let disk = repository.scratch.file("disk.raw");
    fs::write(&disk, Rng::new(8).disk(60 << 20, 3 << 20, 90)).unwrap();
    let trace = repository.scratch.file("trace");
    let mut command = strace.command();
    command.args([
        "-f",
        "-y",
        "-e",
        "trace=linkat,renameat,renameat2,rename,fsync,fdatasync",
        "-o",
    ]);
    command.arg(&trace).args([OURS, "copy"]).arg(&disk).arg(repository.spec("new/disk?init=on"));
    command.env("RESTIC_PASSWORD_FILE", repository.scratch.file("password"));
    let output = tools::output(&mut command, LIMIT).unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let trace = fs::read_to_string(trace).unwrap();
    let mut order = SyncOrder::default();
    trace.lines().enumerate().for_each(|(number, line)| order.line(number, line));
    // Key, config, lock, packs, index and snapshot.
    assert!(order.names >= 8, "{trace}");
    assert!(order.pending.is_empty(), "{:?}", order.pending);
}
