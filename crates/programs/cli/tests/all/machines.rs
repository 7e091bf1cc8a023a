//! `pull --qmp`: a machine of QEMU is backed up by one command, from its moment to its end; and what a run that was
//! killed or has failed leaves to the next one. `pull --libvirt`: what is refused without libvirt.

use std::fs;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use blockhaul_testkit::tools::{self, PeerProgram, ScratchDir, text};
use serde_json::Value;

use crate::backups::Qmp;
use crate::served_disk::{OURS, blockhaul, succeed};

const SIZE: u64 = 16 << 20;

/// QEMU's storage daemon with two disks: `disk0` in qcow2, `disk1` in a raw file. It has a monitor for the test and one
/// for the backups.
struct Machine {
    daemon: Child,
    qmp: Qmp,
    scratch: ScratchDir,
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}

impl Machine {
    /// `None` where there is no QEMU.
    fn start() -> Option<Machine> {
        let daemon = PeerProgram::require("qemu-storage-daemon")?;
        let scratch = ScratchDir::on_disk().unwrap();
        let file = |name: &str| scratch.file(name).display().to_string();
        succeed(&["create", &format!("qcow2:{}", file("disk0")), "16M"]);
        fs::File::create(scratch.file("disk1")).unwrap().set_len(SIZE).unwrap();
        let mut command = daemon.tied_command();
        for (node, driver) in [("disk0", "qcow2"), ("disk1", "raw")] {
            let path = file(node);
            command.args(["--blockdev", &format!("driver=file,filename={path},node-name={node}f")]);
            command.args(["--blockdev", &format!("driver={driver},file={node}f,node-name={node}")]);
        }
        for id in ["q", "b"] {
            let path = scratch.socket(id).display().to_string();
            command.args(["--chardev", &format!("socket,id={id},path={path},server=on,wait=off")]);
            command.args(["--monitor", &format!("chardev={id}")]);
        }
        let daemon = command.stdin(Stdio::null()).spawn().unwrap();
        let qmp = Qmp::connect(&scratch.socket("q"));
        Some(Machine { daemon, qmp, scratch })
    }

    fn file(&self, name: &str) -> String {
        self.scratch.file(name).display().to_string()
    }

    /// The machine writes to both disks; what they then hold is kept as `NAME-DISK`.
    fn write(&mut self, range: &str, seed: u32, name: &str) {
        self.begin_write(range, seed, name);
        self.qmp.done(r#"{"execute": "nbd-server-stop"}"#);
    }

    /// As [`Machine::write`], but the NBD server goes on.
    fn begin_write(&mut self, range: &str, seed: u32, name: &str) {
        let socket = self.scratch.socket("n").display().to_string();
        let _ = fs::remove_file(&socket);
        self.qmp.done(&format!(
            r#"{{"execute": "nbd-server-start", "arguments": {{"addr": {{"type": "unix", "data": {{"path": "{socket}"}}}}}}}}"#
        ));
        for disk in ["disk0", "disk1"] {
            self.qmp.done(&format!(
                r#"{{"execute": "block-export-add", "arguments": {{"type": "nbd", "id": "m{disk}", "node-name": "{disk}", "name": "{disk}", "writable": true}}}}"#
            ));
            let uri = format!("nbd+unix:///{disk}?socket={socket}");
            succeed(&["copy", "--range", range, &format!("random:16M?seed={seed}"), &uri]);
            succeed(&["copy", &uri, &self.file(&format!("{name}-{disk}"))]);
        }
    }

    fn args(&self, more: &[&str]) -> Vec<String> {
        let socket = self.scratch.socket("b").display().to_string();
        let (stores, scratch) = (self.file("stores"), self.file("fleece"));
        fs::create_dir_all(&scratch).unwrap();
        let own = ["pull", "--qmp", &socket, "--store", &stores, "--scratch", &scratch];
        let disks = ["--disk", "disk0", "--disk", "disk1"];
        [&own[..], &disks, more].concat().into_iter().map(String::from).collect()
    }

    #[track_caller]
    fn pull(&self, point: &str) -> String {
        let args = self.args(&["--point", point]);
        succeed(&args.iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// What a dry run of the same says.
    #[track_caller]
    fn planned(&self, point: &str) -> String {
        let args = self.args(&["--point", point, "--dry-run"]);
        succeed(&args.iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// What a backup must not leave in the machine.
    #[track_caller]
    fn assert_clean(&mut self, bitmaps: usize) {
        for command in ["query-block-exports", "query-jobs"] {
            let left = self.qmp.answer(&format!(r#"{{"execute": "{command}"}}"#)).unwrap();
            assert_eq!(left, Value::Array(Vec::new()), "{command}");
        }
        let nodes = self.qmp.answer(r#"{"execute": "query-named-block-nodes"}"#).unwrap();
        let nodes = nodes.as_array().unwrap();
        assert_eq!(nodes.len(), 4, "{nodes:?}");
        for node in nodes.iter().filter(|node| !node["node-name"].as_str().unwrap().ends_with('f'))
        {
            let found = node["dirty-bitmaps"].as_array().map_or(0, Vec::len);
            assert_eq!(found, bitmaps, "{node}");
        }
        assert_eq!(fs::read_dir(self.file("fleece")).unwrap().count(), 0, "overlays");
    }

    #[track_caller]
    fn assert_restores(&self, points: &[&str]) {
        for point in points {
            for disk in ["disk0", "disk1"] {
                let store = format!("{}/{disk}", self.file("stores"));
                let device = format!("backup:{store}?point={point}");
                succeed(&["compare", "--strict", &device, &self.file(&format!("{point}-{disk}"))]);
            }
        }
    }
}

#[test]
fn a_machine_is_backed_up_by_one_command() {
    let Some(mut machine) = Machine::start() else { return };
    machine.write("1M:4M", 1, "monday");
    let planned = machine.planned("monday");
    let full = "monday would be a full backup of 16777216 bytes: it is the first of this disk";
    assert_eq!(planned.matches(full).count(), 2, "{planned}");
    let args = machine.args(&["--dry-run", "--json"]);
    let planned = succeed(&args.iter().map(String::as_str).collect::<Vec<_>>());
    let planned: Value = serde_json::from_str(&planned).unwrap();
    for disk in planned["disks"].as_array().unwrap() {
        assert!(disk["checkpoint"].as_str().unwrap().starts_with("blockhaul-"), "{planned}");
    }
    assert!(fs::metadata(machine.file("stores")).is_err());
    machine.assert_clean(0);
    let said = machine.pull("monday");
    assert_eq!(said.matches("monday is a full backup of 16777216 bytes").count(), 2, "{said}");
    machine.assert_clean(1);
    // The directory of the machine is no store: the remedy names those in it.
    let refused = blockhaul(&["chain", "list", &machine.file("stores")]);
    let said = text(&refused.stderr);
    let remedy = format!("name {0}/disk0 or {0}/disk1", machine.file("stores"));
    assert!(refused.status.code() == Some(3) && said.contains(&remedy), "{said}");
    machine.write("2M:1M", 2, "tuesday");
    let planned = machine.planned("tuesday");
    let increment = "tuesday would be an increment of monday, which has 16777216 bytes";
    assert_eq!(planned.matches(increment).count(), 2, "{planned}");
    machine.assert_clean(1);
    let said = machine.pull("tuesday");
    let increment = "tuesday is an increment of monday: 1048576 of 16777216 bytes have changed";
    assert_eq!(said.matches(increment).count(), 2, "{said}");
    machine.assert_clean(1);
    machine.assert_restores(&["monday", "tuesday"]);
    // Without changes.
    machine.write("2M:1M", 2, "wednesday");
    machine.pull("wednesday");
    machine.assert_restores(&["monday", "tuesday", "wednesday"]);
}

#[test]
fn the_server_of_others_goes_on() {
    let Some(mut machine) = Machine::start() else { return };
    machine.begin_write("1M:4M", 1, "monday");
    for more in [&["--dry-run"][..], &[]] {
        let args = machine.args(&[&["--point", "monday"], more].concat());
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let refused = blockhaul(&args);
        let said = text(&refused.stderr);
        assert_eq!(refused.status.code(), Some(3), "{more:?}: {said}");
        assert!(said.contains("stop it (nbd-server-stop)"), "{more:?}: {said}");
    }
    // Others still have their exports.
    let socket = machine.scratch.socket("n").display().to_string();
    let uri = format!("nbd+unix:///disk0?socket={socket}");
    succeed(&["compare", "--strict", &uri, &machine.file("monday-disk0")]);
    for disk in ["disk0", "disk1"] {
        machine.qmp.done(&format!(
            r#"{{"execute": "block-export-del", "arguments": {{"id": "m{disk}"}}}}"#
        ));
    }
    machine.assert_clean(0);
    machine.qmp.done(r#"{"execute": "nbd-server-stop"}"#);
    machine.pull("monday");
    machine.assert_clean(1);
    machine.assert_restores(&["monday"]);
}

#[test]
fn what_a_killed_or_failed_backup_leaves_is_put_right_by_the_next_one() {
    let Some(mut machine) = Machine::start() else { return };
    machine.write("1M:4M", 1, "monday");
    machine.pull("monday");
    machine.write("2M:8M", 2, "lost");
    // Killed while it copies: the file with the rate is what the test has for that.
    let args = machine.args(&["--point", "lost", "--progress=json"]);
    for most in [60, 200, 400] {
        let mut child = Command::new(OURS)
            .args(&args)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        if tools::wait_within(&mut child, Duration::from_millis(most)).is_none() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }
    // The daemon admits no new writer while a backup that was left runs.
    for disk in ["disk0", "disk1"] {
        fs::copy(machine.file(&format!("lost-{disk}")), machine.file(&format!("tuesday-{disk}")))
            .unwrap();
    }
    let said = machine.pull("tuesday");
    assert!(said.contains("tuesday is an increment of "), "{said}");
    machine.assert_clean(1);
    machine.assert_restores(&["monday", "tuesday"]);
    // One disk fails: its changes are in the next backup, and the other disk goes on.
    machine.write("3M:1M", 4, "failed");
    let broken = format!("{}/disk1/000001.raw", machine.file("stores"));
    let kept = fs::read(&broken).unwrap();
    fs::remove_file(&broken).unwrap();
    let args = machine.args(&["--point", "failed", "--json"]);
    let failed = blockhaul(&args.iter().map(String::as_str).collect::<Vec<_>>());
    let value: Value = serde_json::from_str(&text(&failed.stdout)).unwrap();
    assert_eq!(failed.status.code(), Some(3), "{value}");
    assert!(value["error"].as_str().unwrap().contains("000001.raw"), "{value}");
    machine.assert_clean(1);
    fs::write(&broken, kept).unwrap();
    machine.write("4M:1M", 5, "friday");
    let said = machine.pull("friday");
    assert_eq!(said.matches("friday is an increment of tuesday").count(), 2, "{said}");
    machine.assert_restores(&["monday", "tuesday", "friday"]);
}

#[test]
fn machines_that_cannot_be_backed_up_are_refused_with_a_remedy() {
    let scratch = ScratchDir::new().unwrap();
    let stores = scratch.file("stores").display().to_string();
    let none = scratch.socket("none").display().to_string();
    for (args, status, said) in [
        (vec!["--qmp", &none, "--store", &stores], 3, "check that the machine runs"),
        (vec!["--qmp", &none], 2, "--store"),
        (vec!["--qmp", &none, "--libvirt", "vm1", "--store", &stores], 2, "cannot be used with"),
        (vec!["vm1.toml", "--libvirt", "vm1", "--store", &stores], 2, "cannot be used with"),
        (vec!["--qmp", &none, "--store", &stores, "--dry-run"], 3, "cannot connect"),
        (vec!["--libvirt", "vm1", "--store", "/nosuch/stores"], 3, "/nosuch/stores"),
        (vec!["--disk", "vda", "vm1.toml"], 2, "--libvirt"),
    ] {
        let output = blockhaul(&[&["pull"], &args[..]].concat());
        let words = text(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{args:?}: {words}");
        assert!(words.contains(said), "{args:?}: {words}");
    }
    // Without virsh.
    let mut command = Command::new(OURS);
    command.args(["pull", "--libvirt", "vm1", "--store", &stores]).env("PATH", scratch.path());
    let output = tools::output(&mut command, Duration::from_secs(60)).unwrap();
    assert_eq!(output.status.code(), Some(3));
    assert!(text(&output.stderr).contains("install it (Debian: libvirt-clients)"));
}
