//! `nbd+ssh`: the command `ssh` makes the connections. Here it is a script, which writes down how it
//! was called and starts a server on its standard input and output.

use std::os::unix::fs::PermissionsExt as _;
use std::process::{Command, Output};
use std::time::Duration;

use blockhaul_testkit::tools::{self, ScratchDir};

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
