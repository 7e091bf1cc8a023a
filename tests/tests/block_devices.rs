//! Block devices: loop devices over files, whose holes show what was freed.
#![allow(clippy::unwrap_used)]

use std::path::PathBuf;
use std::process::Command;

use blockhaul_tests::{
    LIMIT, assert_same, blockhaul, done, garbage, lossy, run, serve, succeed, text,
};
use testkit::image;
use testkit::require_peer;
use testkit::rng::seed;
use testkit::tools::{self, Scratch, Server};

const SIZE: u64 = 16 << 20;

/// A loop device over a file, until it is dropped.
struct Loop {
    device: String,
}

impl Loop {
    /// `None` where this machine does not let us.
    fn over(file: &std::path::Path) -> Option<Loop> {
        let mut attach = Command::new("losetup");
        let output = tools::output(attach.args(["--find", "--show", text(file)]), LIMIT).ok()?;
        if !output.status.success() {
            eprintln!("no loop device can be had here: {}", lossy(&output.stderr));
            return None;
        }
        Some(Loop { device: lossy(&output.stdout).trim().to_string() })
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let status = Command::new("losetup").args(["--detach", &self.device]).status();
        assert!(status.is_ok_and(|status| status.success()) || std::thread::panicking());
    }
}

fn stored(file: &std::path::Path) -> u64 {
    image::space(file).unwrap().allocated
}

#[test]
fn a_disk_is_a_source_and_a_target() {
    let scratch = Scratch::on_disk().unwrap();
    let [source, below, back] = ["source", "below", "back"].map(|name| scratch.file(name));
    println!("BLOCKHAUL_SEED={}", seed());
    image::sparse(&source, SIZE, seed()).unwrap();
    for direct in ["--direct=off", "--direct=on"] {
        garbage(&below, SIZE).unwrap();
        let Some(disk) = Loop::over(&below) else { return };
        succeed(&[
            "copy",
            "--verify",
            "--flush",
            "-S",
            "4096",
            direct,
            text(&source),
            &disk.device,
        ]);
        succeed(&["copy", "--verify", direct, &disk.device, text(&back)]);
        assert_same(&source, &back, direct);
        // Too small a disk is refused before anything is written.
        let larger = scratch.file("larger");
        std::fs::File::create(&larger).unwrap().set_len(SIZE + 4096).unwrap();
        let output = run(&["copy", text(&larger), &disk.device]);
        assert!(!output.status.success(), "{}", lossy(&output.stderr));
        succeed(&["compare", text(&source), &disk.device]);
        drop(disk);
        assert_same(&source, &below, direct);
        assert!(stored(&below) < SIZE, "zeroes of a disk are not stored where it can forget them");
    }
}

/// Serves a disk, lets a client trim its third MiB, and gives what is stored before and after.
fn trimmed(server: Server, below: &std::path::Path) -> Option<(u64, u64)> {
    let nbdsh = require_peer!("nbdsh", None);
    let before = stored(below);
    let mut command = nbdsh.command();
    command.args(["-u", &server.uri(""), "-c", "h.trim(1 << 20, 2 << 20); h.flush()"]);
    done(&mut command);
    server.stop().unwrap();
    Some((before, stored(below)))
}

#[test]
fn what_is_trimmed_is_forgotten_with_and_without_fallocate() {
    let scratch = Scratch::on_disk().unwrap();
    let below: PathBuf = scratch.file("below");
    for (name, refused) in [("plain", None), ("refused", Some("fallocate"))] {
        garbage(&below, SIZE).unwrap();
        let Some(disk) = Loop::over(&below) else { return };
        let server = match refused {
            None => serve(&scratch, name, &[&disk.device]),
            Some(calls) => {
                let served = blockhaul(&["serve", "--exit-with-parent", "--unix"]);
                let socket = scratch.socket(name);
                let mut command = Command::new(env!("CARGO_BIN_EXE_refuse"));
                command.args(["ENOSYS", calls]).arg(served.get_program()).args(served.get_args());
                command.arg(&socket).arg(&disk.device);
                Server::start(command, &socket).unwrap()
            }
        };
        let Some((before, after)) = trimmed(server, &below) else { return };
        assert!(after + (1 << 20) <= before, "{name}: {before} bytes stored before, {after} after");
    }
}
