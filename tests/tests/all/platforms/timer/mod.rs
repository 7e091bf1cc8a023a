//! A guest of libvirt that is backed up each minute by the units and the drop-in of the pages, under systemd: one run is
//! killed, and one finds its file system full.

mod records;
mod series;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Duration;

use blockhaul_testkit::tools::{long, until};
use serde_json::Value;

use self::records::{Expectation, Records};
use self::series::{Alert, DIRECTORY, Recorder};
use super::libvirt::Libvirt;
use super::systemd::Systemd;
use super::{Root, blocks, report, succeeded};

const TIMER: &str = "blockhaul-pull@vm1.timer";
const SERVICE: &str = "blockhaul-pull@vm1.service";
const STORE: &str = "/var/lib/blockhaul/vm1/vda";

/// Each minute, in the place of each night.
const EACH_MINUTE: &str = "[Timer]
OnCalendar=
OnCalendar=*-*-* *:*:00
RandomizedDelaySec=0
AccuracySec=1s
";

/// Points that the retention keeps: so few that each later round merges one.
const KEPT: usize = 8;

/// The alert for a run that was killed is on 2 minutes after its file was written for the last time.
const LOST_AFTER: Duration = Duration::from_secs(125);

const LOST: Alert = Alert {
    name: "BlockhaulBackupLost",
    run: "vm1-pull",
    command: "pull",
    summary: "pull vm1-pull on host is gone without a result",
    description: None,
};

const FAILED: Alert = Alert {
    name: "BlockhaulBackupFailed",
    run: "vm1-pull",
    command: "pull",
    summary: "pull vm1-pull on host failed with exit status 6",
    description: Some(
        "blockhaul help exit-status explains the number; the log of the command has the error.",
    ),
};

/// What happens to a round.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fault {
    None,
    Kill,
    Full,
}

/// The faults of all rounds.
fn faults() -> Vec<Fault> {
    let mut faults = vec![Fault::None; if long() { 15 } else { 5 }];
    let third = faults.len() / 3;
    faults[third] = Fault::Kill;
    faults[2 * third + 1] = Fault::Full;
    faults
}

/// A round that has ended: how, and its point.
struct Round {
    result: String,
    status: String,
    point: Option<String>,
}

/// A point, and what the guest had written when its backup began.
struct Point {
    name: String,
    expected: Expectation,
}

/// Parts of the run, of which systemd is ended first.
struct TimerRun {
    systemd: Systemd,
    recorder: Recorder,
    records: Records,
    libvirt: Libvirt,
    /// The file system of the stores, as this machine names it.
    stores: Mount,
    points: Vec<Point>,
    invocation: String,
}

#[test]
fn a_guest_is_backed_up_by_the_units_each_minute() {
    let Some(libvirt) = Libvirt::start() else { return };
    let systemd = libvirt.root.version(&["systemctl", "--version"]);
    let version = format!("{}, systemd {systemd}", libvirt.version());
    let mut run = TimerRun::begin(libvirt);
    let faults = faults();
    for fault in &faults {
        match fault {
            Fault::None => run.good_round(),
            Fault::Kill => run.killed_round(),
            Fault::Full => run.full_round(),
        }
    }
    let records = run.end();
    let steps = format!(
        "timer and service of the pages under systemd, {} rounds of a minute, one killed, one on a full disk: alerts, \
         mails, points with {records} records of the guest",
        faults.len()
    );
    report("libvirt, systemd", &version, &steps);
}

impl TimerRun {
    #[track_caller]
    fn begin(libvirt: Libvirt) -> TimerRun {
        let scratch = libvirt.scratch.path().to_owned();
        let disk = libvirt.scratch.file("vda.qcow2");
        let image = disk.to_str().unwrap();
        libvirt.root.run(&["qemu-img", "create", "-q", "-f", "qcow2", image, "512M"]);
        libvirt.define(&disk);
        let records = Records::begin(libvirt.boot());
        remove_leftovers(&libvirt.root);
        libvirt.root.shell("/", &format!("set -e\n{}", nightly_block("sh")));
        let stores = Mount::make(libvirt.root.path("/var/lib/blockhaul"));
        let units = scratch.join("units");
        write_units(&units, &nightly_block("ini"));
        let systemd = Systemd::start(&libvirt.root, &scratch, &units);
        let recorder = Recorder::begin(libvirt.root.path(DIRECTORY));
        let points = Vec::new();
        TimerRun { systemd, recorder, records, libvirt, stores, points, invocation: String::new() }
    }

    /// A round that has to make a point, which is right.
    #[track_caller]
    fn good_round(&mut self) {
        let (expected, round) = self.round();
        let ended = (round.result.as_str(), round.status.as_str());
        assert_eq!(ended, ("success", "0"), "{}", self.said());
        let name = round.point.unwrap_or_else(|| panic!("no new point: {}", self.said()));
        self.recorder.expect(&[]);
        let records = self.check(&name, &expected);
        println!("round of {name}: {records} records");
        self.points.push(Point { name, expected });
    }

    /// A round that is killed when it has copied a part.
    #[track_caller]
    fn killed_round(&mut self) {
        self.records.write_bulk();
        let before = self.stored();
        // Found out before: the copy takes a fraction of a second.
        let kill = self.systemd.instance_group(SERVICE).join("cgroup.kill");
        until("a part is copied", || self.stored() > before + (4 << 20));
        fs::write(kill, "1").unwrap();
        // No further round until the alert is on.
        self.systemd.systemctl(&["stop", TIMER]);
        self.invocation = self.systemd.property(SERVICE, "InvocationID");
        let round = self.await_end();
        assert_eq!((round.result.as_str(), round.point), ("signal", None), "{}", self.said());
        self.recorder.expect(&[]);
        thread::sleep(LOST_AFTER);
        self.recorder.expect(&[LOST]);
    }

    /// A round that finds the file system of the stores full.
    #[track_caller]
    fn full_round(&mut self) {
        self.records.write_bulk();
        let filler = self.stores.0.join("filler");
        // It fails when nothing is left.
        let _ = Command::new("dd").args(["if=/dev/zero", "bs=64k"]).arg(of(&filler)).output();
        let (_, round) = self.round();
        let ended = (round.result.as_str(), round.status.as_str(), round.point);
        assert_eq!(ended, ("exit-code", "6", None), "{}", self.said());
        self.recorder.expect(&[FAILED]);
        fs::remove_file(filler).unwrap();
    }

    /// Waits for the begin and the end of the next round; gives what its point has at least.
    #[track_caller]
    fn round(&mut self) -> (Expectation, Round) {
        let mut expected = self.records.expect();
        self.systemd.systemctl(&["start", TIMER]);
        let last = self.invocation.clone();
        until("the timer starts the service", || {
            let asked = self.records.expect();
            thread::sleep(Duration::from_millis(300));
            self.invocation = self.systemd.property(SERVICE, "InvocationID");
            let has_begun = !self.invocation.is_empty() && self.invocation != last;
            if !has_begun {
                expected = asked;
            }
            has_begun
        });
        (expected, self.await_end())
    }

    #[track_caller]
    fn await_end(&mut self) -> Round {
        until("the service has ended", || {
            let state = self.systemd.property(SERVICE, "ActiveState");
            ["inactive", "failed"].contains(&state.as_str())
        });
        let [result, status] =
            ["Result", "ExecMainStatus"].map(|name| self.systemd.property(SERVICE, name));
        let known = |name: &String| self.points.iter().any(|point| point.name == *name);
        let point = self.listed().into_iter().find(|name| !known(name));
        Round { result, status, point }
    }

    /// The names of the points.
    fn listed(&self) -> Vec<String> {
        let mut list = self.libvirt.root.command("blockhaul");
        let printed = list.args(["chain", "list", "--json", STORE]).output().unwrap().stdout;
        let listed: Value = serde_json::from_slice(&printed).unwrap();
        let names = listed["points"].as_array().into_iter().flatten();
        names.map(|point| point["name"].as_str().unwrap().to_owned()).collect()
    }

    /// Bytes that the files of the store occupy.
    fn stored(&self) -> u64 {
        use std::os::unix::fs::MetadataExt as _;
        let Ok(files) = fs::read_dir(self.libvirt.root.path(STORE)) else { return 0 };
        files.flatten().filter_map(|file| Some(file.metadata().ok()?.blocks() * 512)).sum()
    }

    /// What the service has printed.
    fn said(&self) -> String {
        self.systemd.journal(SERVICE)
    }

    /// Restores a point and checks it; gives the number of its records.
    #[track_caller]
    fn check(&mut self, name: &str, expected: &Expectation) -> usize {
        let copy = self.libvirt.scratch.file("restored.raw");
        let file = copy.to_str().unwrap();
        self.libvirt.root.run(&["blockhaul", "restore", STORE, file, "--point", name]);
        let records = self.records.check(&copy, expected);
        let (line, digest) = Records::bulk_check(file, expected);
        assert!(self.libvirt.root.shell("/", &line).starts_with(&digest), "bulk of {name}");
        fs::remove_file(copy).unwrap();
        records
    }

    /// Checks the alerts, the mails and all points that are kept; gives the number of records of the guest.
    #[track_caller]
    fn end(mut self) -> usize {
        self.systemd.systemctl(&["stop", TIMER]);
        self.recorder.end();
        self.check_alerts();
        let mails =
            fs::read_to_string(self.libvirt.root.path("/var/mail/root")).unwrap_or_default();
        let subject = format!("Subject: {SERVICE} failed on ");
        assert_eq!(mails.matches(&subject).count(), 2, "{mails}");
        assert!(mails.contains("No space left on device"), "{mails}");
        self.libvirt.root.run(&["blockhaul", "chain", "check", STORE]);
        let kept = self.listed();
        assert_eq!(kept.len(), KEPT.min(self.points.len()));
        for Point { name, expected } in std::mem::take(&mut self.points) {
            if kept.contains(&name) {
                self.check(&name, &expected);
            }
        }
        self.records.end()
    }

    /// promtool evaluates the rules with what the metrics files had.
    #[track_caller]
    fn check_alerts(&self) {
        let rules = self.libvirt.scratch.file("alerts.yml");
        fs::copy(repository("examples/prometheus/alerts.yml"), &rules).unwrap();
        let test = self.libvirt.scratch.file("recorded.yml");
        fs::write(&test, self.recorder.rule_test(&rules).to_string()).unwrap();
        self.libvirt.root.run(&["promtool", "test", "rules", test.to_str().unwrap()]);
    }
}

/// The first block of a language in the page about nightly backups.
#[track_caller]
fn nightly_block(language: &str) -> String {
    let page = fs::read_to_string(repository("docs/backups.md")).unwrap();
    let (_, nightly) = page.split_once("## Each night\n").unwrap();
    let found = blocks(nightly).into_iter().find(|block| block.0 == language);
    found.unwrap_or_else(|| panic!("no block of {language}")).1
}

/// Removes what an earlier run has left in the root.
fn remove_leftovers(root: &Root) {
    let stamp = format!("/var/lib/systemd/timers/stamp-{TIMER}");
    let metrics = ["pull", "prune"].map(|command| format!("{DIRECTORY}/vm1-{command}.prom"));
    for path in [stamp.as_str(), &metrics[0], &metrics[1], "/var/mail/root"] {
        let _ = fs::remove_file(root.path(path));
    }
}

/// The units of the examples with the drop-in of the page, a retention by number and a timer of a minute.
#[track_caller]
fn write_units(units: &Path, drop_in: &str) {
    // Where `Root` has put the program.
    let ours = |text: &str| text.replace("/usr/bin/blockhaul", "/usr/local/bin/blockhaul");
    fs::create_dir(units).unwrap();
    for name in ["blockhaul-pull@.service", "blockhaul-pull@.timer", "blockhaul-failed@.service"] {
        let unit = fs::read_to_string(repository("examples/systemd").join(name)).unwrap();
        fs::write(units.join(name), ours(&unit)).unwrap();
    }
    let service = fs::read_to_string(units.join("blockhaul-pull@.service")).unwrap();
    let (_, prune) = service.split_once("ExecStartPost=").unwrap();
    let (prune, _) = prune.split_once("\n#").unwrap();
    let nightly = "--keep-daily 7 --keep-weekly 4 --keep-monthly 12";
    assert!(prune.contains(nightly), "{prune}");
    let prune = prune.replace(nightly, &format!("--keep-last {KEPT}"));
    let add = |unit: &str, name: &str, text: &str| {
        let dir = units.join(format!("{unit}.d"));
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join(name), text).unwrap();
    };
    add(SERVICE, "override.conf", &ours(drop_in));
    // Before the drop-in of the page, whose own commands stay.
    add(
        SERVICE,
        "10-retention.conf",
        &format!("[Service]\nExecStartPost=\nExecStartPost={prune}\n"),
    );
    add(TIMER, "override.conf", EACH_MINUTE);
}

fn of(file: &Path) -> String {
    format!("of={}", file.display())
}

fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

/// A small file system in memory, at a directory.
struct Mount(PathBuf);

impl Mount {
    #[track_caller]
    fn make(dir: PathBuf) -> Mount {
        fs::create_dir_all(&dir).unwrap();
        succeeded(
            Command::new("mount").args(["-t", "tmpfs", "-o", "size=512m", "tmpfs"]).arg(&dir),
        );
        Mount(dir)
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
    }
}
