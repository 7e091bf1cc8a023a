//! `nbd+ssh`: the command `ssh` makes the connections. Here it is a script, which writes down how it
//! was called and starts a server on its standard input and output.

use std::os::unix::fs::PermissionsExt as _;
use std::process::{Command, Output};
use std::time::Duration;

use blockhaul_testkit::tools::{self, ScratchDir};

use crate::served_disk::succeed;

const LIMIT: Duration = Duration::from_secs(60);
const OURS: &str = env!("CARGO_BIN_EXE_blockhaul");

/// Makes a directory with a program `ssh` that runs `script`.
fn ssh(scratch: &ScratchDir, script: &str) -> String {
    let folder = scratch.file("bin");
    std::fs::create_dir(&folder).unwrap();
    let program = folder.join("ssh");
    std::fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    folder.to_str().unwrap().to_string()
}

fn with_path(path: &str, args: &[&str]) -> Output {
    tools::output(Command::new(OURS).args(args).env("PATH", path), LIMIT).unwrap()
}

#[test]
fn each_connection_runs_ssh() {
    let scratch = ScratchDir::new().unwrap();
    let disk = scratch.file("disk.raw");
    std::fs::write(&disk, (0..4 << 20).map(|at: u32| (at % 251) as u8).collect::<Vec<_>>())
        .unwrap();
    let disk = disk.to_str().unwrap();
    let log = scratch.file("log");
    let serve = format!("echo \"$@\" >>{}; exec {OURS} serve -r --single {disk}", log.display());
    let path = format!("{}:/usr/bin:/bin", ssh(&scratch, &serve));
    let copied = scratch.file("copied.raw");
    let args = ["copy", "-C", "2", "nbd+ssh://me@host:2222/", copied.to_str().unwrap()];
    let output = with_path(&path, &args);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    assert!(std::fs::read(disk).unwrap() == std::fs::read(&copied).unwrap(), "the copy differs");
    let log = std::fs::read_to_string(&log).unwrap();
    assert!(!log.is_empty(), "ssh was not started");
    for line in log.lines() {
        assert_eq!(line, "-p 2222 -l me -W localhost:10809 -- host");
    }
}

/// A program `ssh` that runs its command as an SSH server does: as one text, in a shell. `found`: blockhaul is
/// in the PATH there.
fn remote(scratch: &ScratchDir, found: bool) -> String {
    let there = scratch.file("there");
    std::fs::create_dir(&there).unwrap();
    if found {
        std::os::unix::fs::symlink(OURS, there.join("blockhaul")).unwrap();
    }
    let there = there.display();
    let log = scratch.file("log");
    let log = log.display();
    let script = format!(
        "echo \"$@\" >>{log}; while [ \"$1\" != -- ]; do shift; done; shift 2; \
         PATH={there}:/usr/bin:/bin exec sh -c \"$*\""
    );
    format!("{}:/usr/bin:/bin", ssh(scratch, &script))
}

#[test]
fn a_disk_of_another_machine_is_read_and_written() {
    let scratch = ScratchDir::new().unwrap();
    let path = remote(&scratch, true);
    let disk = scratch.file("a disk.raw");
    let bytes: Vec<_> = (0..4 << 20).map(|at: u32| (at % 253) as u8).collect();
    std::fs::write(&disk, &bytes).unwrap();
    let [copied, written] = ["copied.raw", "written.raw"].map(|name| scratch.file(name));
    std::fs::File::create(&written).unwrap().set_len(4 << 20).unwrap();
    let there = |path: &std::path::Path| {
        format!("ssh://me@host:2222{}", path.to_str().unwrap().replace(' ', "%20"))
    };
    let output = with_path(&path, &["copy", &there(&disk), copied.to_str().unwrap()]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(std::fs::read(&copied).unwrap() == bytes, "the copy differs");
    let args = ["copy", "--verify", copied.to_str().unwrap(), &there(&written)];
    let output = with_path(&path, &args);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(std::fs::read(&written).unwrap() == bytes, "what was written differs");
    let log = std::fs::read_to_string(scratch.file("log")).unwrap();
    let read = "-p 2222 -l me -- host blockhaul serve --single -r -- 'file:/";
    assert!(log.lines().next().unwrap().starts_with(read), "{log}");
    // The same by a command in brackets.
    let mut words = vec!["copy", "[", "ssh", "--", "host", "blockhaul", "serve", "--single", "-r"];
    let again = scratch.file("again.raw");
    words.extend([copied.to_str().unwrap(), "]", again.to_str().unwrap()]);
    let output = with_path(&path, &words);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(std::fs::read(&again).unwrap() == bytes, "the copy of the command differs");
}

#[test]
fn a_machine_without_blockhaul_or_disk_is_an_error_with_a_remedy() {
    let scratch = ScratchDir::new().unwrap();
    let path = remote(&scratch, false);
    let output = with_path(&path, &["info", "ssh://host/disk.raw"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("not found"), "{said}");
    assert!(said.contains("install blockhaul there"), "{said}");
    let refusing = ScratchDir::new().unwrap();
    let path = ssh(&refusing, "echo 'ssh: host: no route' >&2; exit 255");
    let output = with_path(&path, &["info", "ssh://host/disk.raw"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("see the message of ssh above: log in once by hand"), "{said}");
    let output = with_path("/nonexistent", &["info", "ssh://host/disk.raw"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("install an SSH client"), "{said}");
    let scratch = ScratchDir::new().unwrap();
    let path = remote(&scratch, true);
    let output = with_path(&path, &["copy", "ssh://host/nonexistent/disk.raw", "null:"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{said}");
    assert!(said.contains("No such file or directory"), "{said}");
    assert!(said.contains("it must be able to open the disk"), "{said}");
    // One warning about an image, and none where the disk in it is meant.
    let image = scratch.file("vm.qcow2").display().to_string();
    succeed(&["create", &format!("qcow2:{image}"), "1M"]);
    for (source, warnings) in [("ssh://host", 1), ("qcow2:ssh://host", 0)] {
        let output = with_path(&path, &["copy", &format!("{source}{image}"), "null:"]);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{said}");
        assert_eq!(said.matches("warning").count(), warnings, "{said}");
    }
    // No message has a password that somebody wrote into the URI.
    for words in [
        ["copy", &format!("ssh://u:secret@host{image}"), "null:"],
        ["copy", "ssh://u:secret@host/nonexistent/disk.raw", "null:"],
        ["copy", "ssh://u:secret@host/disk.raw?x=y", "null:"],
        ["copy", "ssh://u:secret@host/a.raw", "ssh://u:secret@host/a.raw"],
        ["info", "nbd+ssh://u:secret@host/?x=y", "--json"],
    ] {
        let output = with_path(&path, &words);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains("ssh://") && !said.contains("secret"), "{words:?}: {said}");
    }
    for (typed, meant) in
        [("host:/disk.raw", "ssh://host/disk.raw"), ("me@host:/disk.raw", "ssh://me@host/disk.raw")]
    {
        let output = with_path(&path, &["info", typed]);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains(&format!("write {meant}")), "{said}");
    }
    let output = with_path(&path, &["info", "ssh:host"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("write ssh://[USER@]HOST[:PORT]/PATH"), "{said}");
}

#[test]
fn a_failure_of_ssh_is_an_error_with_its_message() {
    let scratch = ScratchDir::new().unwrap();
    let path = ssh(&scratch, "echo 'ssh: host: no route' >&2; exit 255");
    let output = with_path(&path, &["info", "nbd+ssh://host/x?socket=/run/nbd.sock"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("ssh: host: no route"), "{said}");
    assert!(said.contains("Unix socket /run/nbd.sock of host through SSH"), "{said}");
    let output = with_path("/nonexistent", &["info", "nbd+ssh://host/"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("install an SSH client"), "{said}");
}

#[test]
fn vsock_connects_or_says_that_there_is_none() {
    // Nothing listens on this port of the host.
    let output = with_path("/usr/bin", &["info", "nbd+vsock://1:4294967294/"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("cannot connect to vsock 1 port 4294967294"), "{said}");
}
