//! Warm moves of disks of a real server, by the commands of the page and with its provider.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use blockhaul_testkit::require_peer;
use blockhaul_testkit::tools::{self, PeerProgram, PeerServer, ScratchDir, text};
use serde_json::Value;

use crate::served_disk::{ChildGuard, LIMIT, OURS, succeed};

const PAGE: &str = include_str!("../../../../../docs/warm-moves.md");
const PROVIDER: &str = include_str!("../../../../../examples/follow/server.py");
const QEMU_PROVIDER: &str = include_str!("../../../../../examples/follow/qemu.py");

/// A machine that writes all the time: a shell that copies random data to places of its disk.
const WRITER: &str = "i=0; while :; do i=$((i + 1)); blockhaul copy --no-progress --range \
    $((i * 37 % 251 * 256))k:64k random:64M?seed=$i 'nbd+unix:///vda?socket=disks.sock' || exit 1; done";

/// The page's plan, in a directory with its server.
struct Move {
    scratch: ScratchDir,
    _server: Box<dyn std::any::Any>,
}

/// The block of the page that begins with this text.
fn block(begin: &str) -> &'static str {
    let mut blocks = PAGE.split("```").skip(1).step_by(2);
    blocks.find(|block| block.starts_with(begin)).unwrap().strip_prefix("toml\n").unwrap()
}

fn executable(path: &Path, contents: &str) {
    std::fs::write(path, contents).unwrap();
    std::fs::set_permissions(path, PermissionsExt::from_mode(0o755)).unwrap();
}

impl Move {
    fn new() -> Move {
        let begun = Move::with_files();
        let file = |name: &str| begun.file(name);
        executable(&file("server.py"), PROVIDER);
        let control = file("disks.ctl");
        let export = format!("vda={}", file("a.raw").display());
        let args = ["--control", control.to_str().unwrap(), "--export", &export];
        let server = PeerServer::blockhaul(OURS.as_ref(), &file("disks.sock"), &args).unwrap();
        Move { _server: Box::new(server), ..begun }
    }

    /// The same disk in qemu-storage-daemon, if there is one.
    fn of_qemu() -> Option<Move> {
        let daemon = PeerProgram::require("qemu-storage-daemon")?;
        let image_tool = PeerProgram::require("qemu-img")?;
        let begun = Move::with_files();
        let file = |name: &str| begun.file(name);
        executable(&file("qemu.py"), QEMU_PROVIDER);
        let script = format!("#!/bin/sh\nexec {} \"$@\"\n", image_tool.program().display());
        executable(&file("bin/qemu-img"), &script);
        std::fs::create_dir(file("scratch")).unwrap();
        let mut command = daemon.tied_command();
        command.current_dir(begun.scratch.path()).stdin(Stdio::null());
        for (option, value) in [
            ("--blockdev", "driver=file,node-name=file,filename=a.raw"),
            ("--blockdev", "driver=raw,node-name=vda,file=file"),
            ("--chardev", "socket,id=q,path=vm.qmp,server=on,wait=off"),
            ("--monitor", "chardev=q"),
            ("--nbd-server", "addr.type=unix,addr.path=disks.sock"),
            ("--export", "type=nbd,id=vm,node-name=vda,name=vda,writable=on"),
        ] {
            command.args([option, value]);
        }
        let server = ChildGuard(command.spawn().unwrap());
        tools::until("QEMU listens", || file("disks.sock").exists() && file("vm.qmp").exists());
        Some(Move { _server: Box::new(server), ..begun })
    }

    fn with_files() -> Move {
        let scratch = ScratchDir::new().unwrap();
        let file = |name: &str| scratch.file(name);
        std::fs::create_dir(file("bin")).unwrap();
        std::os::unix::fs::symlink(OURS, file("bin/blockhaul")).unwrap();
        succeed(&["copy", "--no-progress", "random:64M", file("a.raw").to_str().unwrap()]);
        executable(&file("stop-vm1"), "#!/bin/sh\nkill $(cat writer.pid) && touch stopped\n");
        executable(&file("start-vm1"), "#!/bin/sh\ntest -e stopped && touch started\n");
        std::fs::write(file("plan.toml"), block("toml\n# plan.toml")).unwrap();
        Move { scratch, _server: Box::new(()) }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.scratch.file(name)
    }

    fn command(&self, program: &str) -> Command {
        let path = format!("{}:{}", self.file("bin").display(), std::env::var("PATH").unwrap());
        let mut command = Command::new(program);
        command.current_dir(self.scratch.path()).env("PATH", path).stdin(Stdio::null());
        command
    }

    fn follow(&self, settings: &[&str]) -> Command {
        let mut command = self.command(OURS);
        command.args(["follow", "plan.toml"]);
        for setting in settings {
            command.args(["--set", setting]);
        }
        command
    }

    fn run(&self, settings: &[&str]) -> Output {
        tools::output(&mut self.follow(settings), LIMIT).unwrap()
    }

    /// Starts the machine.
    fn write(&self) -> ChildGuard {
        let mut command = self.command("sh");
        let child = command.args(["-c", WRITER]).stderr(Stdio::null()).spawn().unwrap();
        std::fs::write(self.file("writer.pid"), child.id().to_string()).unwrap();
        ChildGuard(child)
    }

    fn is_moved(&self) -> bool {
        std::fs::read(self.file("a.raw")).unwrap() == std::fs::read(self.file("new.raw")).unwrap()
    }

    fn result(&self) -> Value {
        let text = std::fs::read_to_string(self.file("vm1.follow/result.json")).unwrap();
        serde_json::from_str(&text).unwrap()
    }
}

#[test]
fn a_machine_that_writes_is_moved() {
    require_peer!("python3");
    let moved = Move::new();
    let dry = succeed(&["follow", moved.file("plan.toml").to_str().unwrap(), "--dry-run"]);
    assert!(
        dry.contains("disk vda: copied to new.raw") && !moved.file("new.raw").exists(),
        "{dry}"
    );
    let _machine = moved.write();
    let output = moved.run(&["verify=all"]);
    let said = format!("{}{}", text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{said}");
    assert!(
        said.contains("round 1: 67.1 MB") && said.contains("all of vda (it is the first round)"),
        "{said}"
    );
    assert!(said.contains("moved: ") && said.contains("predicted"), "{said}");
    assert!(moved.file("started").exists() && moved.is_moved(), "{said}");
    let result = moved.result();
    let rounds = result["rounds"].as_array().unwrap();
    assert!(rounds.len() >= 3, "{result}");
    let last = rounds.last().unwrap();
    // An increment: the bitmap has less than the disk.
    assert!(last["last"] == true && last["bytes"].as_u64().unwrap() < 32 << 20, "{result}");
    let manifest = moved.file("vm1.follow/vda.manifest");
    succeed(&["verify", moved.file("new.raw").to_str().unwrap(), manifest.to_str().unwrap()]);
    // The provider has removed its snapshots and bitmaps.
    let exports = succeed(&["ctl", moved.file("disks.ctl").to_str().unwrap(), "exports"]);
    assert!(!exports.contains("follow-"), "{exports}");
    // It is complete: the same command does nothing.
    std::fs::remove_file(moved.file("started")).unwrap();
    assert!(moved.run(&[]).status.success());
    assert!(!moved.file("started").exists());
}

#[test]
fn a_disk_of_qemu_is_moved_also_after_kills() {
    require_peer!("python3");
    let Some(moved) = Move::of_qemu() else { return };
    let _machine = moved.write();
    let provider = "provider=./qemu.py vm.qmp disks.sock scratch";
    for millis in [200, 600, 1000] {
        let mut command = moved.follow(&[provider, "cut-over=signal"]);
        let mut child = command.stdout(Stdio::null()).spawn().unwrap();
        std::thread::sleep(std::time::Duration::from_millis(millis));
        child.kill().unwrap();
        child.wait().unwrap();
        // The provider of the killed run is ended meanwhile.
        std::thread::sleep(std::time::Duration::from_millis(500));
    }
    let output = moved.run(&[provider, "verify=all"]);
    let said = format!("{}{}", text(&output.stdout), text(&output.stderr));
    assert!(output.status.success() && moved.is_moved(), "{said}");
    let last = moved.result()["rounds"].as_array().unwrap().last().unwrap().clone();
    assert!(last["bytes"].as_u64().unwrap() < 32 << 20, "{last}");
    assert_eq!(std::fs::read_dir(moved.file("scratch")).unwrap().count(), 0, "overlays are left");
}

#[test]
fn a_target_with_most_of_the_disk_is_adopted() {
    require_peer!("python3");
    let moved = Move::new();
    let mut old = std::fs::read(moved.file("a.raw")).unwrap();
    old[5 << 20..6 << 20].fill(1);
    std::fs::write(moved.file("new.raw"), old).unwrap();
    executable(&moved.file("stop-vm1"), "#!/bin/sh\ntouch stopped\n");
    let output = moved.run(&["adopt=true", "verify=all"]);
    assert!(output.status.success() && moved.is_moved(), "{}", text(&output.stderr));
    let result = moved.result();
    assert!(result["rounds"][0]["bytes"].as_u64().unwrap() <= 8 << 20, "{result}");
}

#[test]
fn a_move_that_is_killed_goes_on() {
    require_peer!("python3");
    let moved = Move::new();
    let _machine = moved.write();
    for millis in [50, 150, 300, 500, 800] {
        let mut child = moved.follow(&["cut-over=signal"]).stdout(Stdio::null()).spawn().unwrap();
        std::thread::sleep(std::time::Duration::from_millis(millis));
        child.kill().unwrap();
        child.wait().unwrap();
        // The provider of the killed run is ended meanwhile.
        std::thread::sleep(std::time::Duration::from_millis(500));
    }
    let output = moved.run(&["verify=all"]);
    let said = format!("{}{}", text(&output.stdout), text(&output.stderr));
    assert!(output.status.success() && moved.is_moved(), "{said}");
}

#[test]
fn the_cut_over_waits_for_its_file_and_for_a_signal() {
    require_peer!("python3");
    let moved = Move::new();
    let _machine = moved.write();
    let mut child = moved.follow(&["cut-over=file go"]).stdout(Stdio::null()).spawn().unwrap();
    tools::until("a round is complete", || {
        std::fs::read_to_string(moved.file("vm1.follow/state.json"))
            .is_ok_and(|state| state.contains("\"holding\""))
    });
    assert!(!moved.file("stopped").exists());
    // SIGTERM stops it, and the same plan goes on.
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(143));
    let mut child = moved.follow(&["cut-over=file go"]).stdout(Stdio::null()).spawn().unwrap();
    std::fs::write(moved.file("go"), "").unwrap();
    assert!(child.wait().unwrap().success());
    assert!(moved.file("started").exists() && moved.is_moved());
}

#[test]
fn doubts_make_a_round_full_and_bad_providers_are_errors() {
    require_peer!("python3");
    let moved = Move::new();
    std::fs::write(moved.file("writer.pid"), "0").unwrap();
    executable(&moved.file("stop-vm1"), "#!/bin/sh\ntouch stopped\n");
    let fails = |provider: &str, status: i32, words: &str| {
        let output =
            moved.run(&[&format!("provider={provider}"), "timeout=2s", "state=other.follow"]);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{provider}: {said}");
        assert!(said.contains(words) && said.lines().count() == 1, "{provider}: {said}");
        assert!(!moved.file("new.raw").exists() && !moved.file("stopped").exists());
    };
    let offer = "{\"version\":1,\"round\":1,\"disk\":\"vda\",\"size\":67108864,\"epoch\":\"a\",\"source\":\"a.raw\"}";
    fails("exit 3; :", 1, "failed: exit status 3");
    fails("sleep 60; :", 1, "it takes longer than 2 s (timeout)");
    fails("echo garbage; :", 1, "a line that is no reply of version 1: garbage");
    fails(&format!("echo '{offer}'; :"), 1, "the reply of the provider is cut off");
    let end = "{\"version\":1,\"round\":1,\"end\":\"round\"}";
    let other = offer.replace("67108864", "4096");
    fails(
        &format!("echo '{other}'; echo '{end}'; :"),
        1,
        "has 67108864 bytes, and the provider says 4096",
    );
    let other = offer.replace("vda", "vdb");
    fails(
        &format!("echo '{other}'; echo '{end}'; :"),
        1,
        "offers disk \"vdb\", which the plan does not have",
    );
    let output = moved.run(&["downtime=soon"]);
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));

    // Somebody writes to the target between two rounds.
    let mut child = moved.follow(&["cut-over=file go"]).stdout(Stdio::null()).spawn().unwrap();
    tools::until("it waits for the cut-over", || {
        std::fs::read_to_string(moved.file("vm1.follow/state.json"))
            .is_ok_and(|state| state.contains("\"holding\""))
    });
    std::fs::write(moved.file("new.raw"), vec![7; 64 << 20]).unwrap();
    std::fs::write(moved.file("go"), "").unwrap();
    assert!(child.wait().unwrap().success());
    assert!(moved.is_moved());
    let result = moved.result();
    let last = result["rounds"].as_array().unwrap().last().unwrap();
    assert_eq!(last["full"][0][1], "the target was changed since the last round", "{result}");
}
