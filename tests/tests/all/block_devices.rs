//! Block devices: loop devices over files, whose holes show what was freed.

use std::fs;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::PathBuf;
use std::process::Command;

use blockhaul_testkit::image;
use blockhaul_testkit::require_peer;
use blockhaul_testkit::rng::seed;
use blockhaul_testkit::tools::{self, PeerServer, ScratchDir, until};
use blockhaul_tests::disks::Loop;
use blockhaul_tests::{
    assert_same, blockhaul, distinct, done, garbage, lossy, run, serve, succeed, text,
};

const SIZE: u64 = 16 << 20;

fn stored(file: &std::path::Path) -> u64 {
    image::space(file).unwrap().allocated
}

#[test]
fn a_disk_is_a_source_and_a_target() {
    let scratch = ScratchDir::on_disk().unwrap();
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
fn trimmed(server: PeerServer, below: &std::path::Path) -> Option<(u64, u64)> {
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
    let scratch = ScratchDir::on_disk().unwrap();
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
                PeerServer::start(command, &socket).unwrap()
            }
        };
        let Some((before, after)) = trimmed(server, &below) else { return };
        assert!(after + (1 << 20) <= before, "{name}: {before} bytes stored before, {after} after");
    }
}

/// Runs a copy that must be refused with this status and these words.
#[track_caller]
fn refused(args: &[&str], status: i32, words: &str) {
    let output = run(&[&["copy"], args].concat());
    let said = lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(status), "{args:?}: {said}");
    assert!(said.contains(words), "{args:?}: {said}");
}

#[test]
fn a_loop_device_is_the_file_below_it() {
    let scratch = ScratchDir::on_disk().unwrap();
    let [below, other] = ["below", "other"].map(|name| scratch.file(name));
    garbage(&below, SIZE).unwrap();
    fs::copy(&below, &other).unwrap();
    let Some(disk) = Loop::over(&below) else { return };
    refused(&[&disk.device, text(&below)], 2, "are the same");
    refused(&[text(&below), &disk.device], 2, "are the same");
    let Some(second) = Loop::over(&below) else { return };
    refused(&[&second.device, &disk.device], 2, "are the same");
    drop(second);
    let Some(part) = Loop::with(&["--offset", "1048576"], &below) else { return };
    refused(&[&part.device, text(&below)], 2, "overlap");
    refused(&[&part.device, &disk.device], 2, "overlap");
    assert_same(&below, &other, "copies that were refused");
    succeed(&["copy", &disk.device, text(&other)]);
}

#[test]
fn one_server_does_not_write_a_file_and_a_loop_device_over_it() {
    let scratch = ScratchDir::on_disk().unwrap();
    let below = scratch.file("below");
    garbage(&below, SIZE).unwrap();
    let Some(disk) = Loop::over(&below) else { return };
    let Some(part) = Loop::with(&["--offset", "1048576"], &below) else { return };
    let folder = scratch.file("folder");
    fs::create_dir(&folder).unwrap();
    let bound = folder.join("below");
    fs::write(&bound, "").unwrap();
    let bind = Command::new("mount").arg("--bind").args([&below, &bound]).status();
    let is_bound = bind.is_ok_and(|status| status.success());
    let mut pairs = vec![(text(&below), disk.device.as_str()), (&disk.device, &part.device)];
    if is_bound {
        pairs.extend([(text(&below), text(&bound)), (text(&bound), disk.device.as_str())]);
    }
    let outcomes: Vec<_> = pairs
        .iter()
        .flat_map(|&(one, other)| [(one, other), (other, one)])
        .map(|(one, other)| {
            let named = [format!("a={one}"), format!("b={other}")];
            let socket = scratch.socket("nbd");
            run(&[
                "serve",
                "-U",
                text(&socket),
                "--export",
                &named[0],
                "--export",
                &named[1],
                "--run",
                "true",
            ])
        })
        .collect();
    if is_bound {
        done(Command::new("umount").arg(&bound));
    }
    for output in outcomes {
        let said = lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(3), "{said}");
        assert!(said.contains("already open for writing by export \"a\""), "{said}");
    }
}

#[test]
fn a_partition_is_a_part_of_its_disk() {
    let scratch = ScratchDir::on_disk().unwrap();
    let below = scratch.file("below");
    let mut disk = vec![0; 8 << 20];
    // Two partitions of 2 MiB, at 1 and 4 MiB, of Linux.
    for (entry, start) in [(0, 2048_u32), (1, 8192)] {
        let at = 446 + 16 * entry;
        disk[at + 4] = 0x83;
        disk[at + 8..at + 12].copy_from_slice(&start.to_le_bytes());
        disk[at + 12..at + 16].copy_from_slice(&4096_u32.to_le_bytes());
    }
    disk[510..512].copy_from_slice(&[0x55, 0xaa]);
    fs::write(&below, disk).unwrap();
    let Some(disk) = Loop::with(&["--partscan"], &below) else { return };
    // Not every kernel reads partition tables itself.
    let partx = Command::new("partx").args(["--update", &disk.device]).output();
    let name = disk.device.trim_start_matches("/dev/");
    let parts = [1, 2].map(|number| {
        let place = format!("/sys/block/{name}/{name}p{number}/dev");
        let device = fs::read_to_string(place).ok()?;
        let (major, minor) = device.trim().split_once(':')?;
        // Not every machine creates device nodes.
        let node = scratch.file(&format!("p{number}"));
        done(Command::new("mknod").args([text(&node), "b", major, minor]));
        Some(node)
    });
    let [Some(one), Some(two)] = parts else {
        return tools::skip(format!("no partitions of a loop device: {partx:?}"));
    };
    refused(&[text(&one), &disk.device], 2, "overlap");
    refused(&["--source-layer=truncate?truncate=2M", &disk.device, text(&one)], 2, "overlap");
    refused(&[text(&one), text(&below)], 2, "overlap");
    succeed(&["copy", text(&one), text(&two)]);
    // Layers say which part of the disk it is.
    succeed(&["copy", "--source-layer=partition?partition=1", &disk.device, text(&two)]);
}

#[test]
fn a_block_device_in_use_is_no_target() {
    let scratch = ScratchDir::on_disk().unwrap();
    let [source, below, fresh] = ["source", "below", "fresh"].map(|name| scratch.file(name));
    garbage(&source, 1 << 20).unwrap();
    fs::File::create(&below).unwrap().set_len(64 << 20).unwrap();
    let Some(disk) = Loop::over(&below) else { return };
    let place = scratch.file("a place");
    fs::create_dir(&place).unwrap();
    let made = Command::new("mkfs.ext4").args(["-q", &disk.device]).status();
    let mounted = Command::new("mount").args([&disk.device, text(&place)]).status();
    if !made.is_ok_and(|made| made.success()) || !mounted.is_ok_and(|done| done.success()) {
        return tools::skip("no file system can be mounted");
    }
    let words = format!("mounted on {}", text(&place));
    let direct = ["--direct=on", text(&source), &disk.device];
    refused(&direct, 3, &words);
    refused(&[text(&source), &disk.device], 3, &words);
    let journal = format!("--journal={}", text(&fresh));
    refused(&[&journal, text(&source), &disk.device], 3, &words);
    // Readers, and servers, can open it as before.
    succeed(&["copy", &disk.device, text(&fresh)]);
    drop(serve(&scratch, "s", &[&disk.device]));
    // Who knows better says so.
    let unlocked = format!("file:{}?lock=off", disk.device);
    refused(&["--target-layer=readonly", text(&source), &unlocked], 3, "read-only");
    done(Command::new("umount").arg(&place));
    // A peer that was started meanwhile has a mount namespace of its own, where the disk is still mounted.
    until("nobody has the disk any more", || {
        fs::File::options().read(true).custom_flags(libc::O_EXCL).open(&disk.device).is_ok()
    });
    for direct in ["--direct=off", "--direct=on", "--direct=auto"] {
        succeed(&["copy", "--verify", "-C4", direct, text(&source), &disk.device]);
    }
}

#[test]
fn a_read_only_block_device_is_no_target() {
    let scratch = ScratchDir::on_disk().unwrap();
    let [source, below] = ["source", "below"].map(|name| scratch.file(name));
    garbage(&source, 1 << 20).unwrap();
    fs::File::create(&below).unwrap().set_len(8 << 20).unwrap();
    let Some(disk) = Loop::over(&below) else { return };
    done(Command::new("blockdev").args(["--setro", &disk.device]));
    for more in [&[][..], &["--dry-run"]] {
        refused(&[&[text(&source), &disk.device], more].concat(), 3, "cannot open it for writing");
    }
}

#[test]
fn verification_after_a_flush_reads_the_disk_and_not_its_page_cache() {
    const DAMAGED: u64 = 1 << 20;
    let scratch = ScratchDir::on_disk().unwrap();
    let [source, below] = ["source", "below"].map(|name| scratch.file(name));
    fs::write(&source, distinct(SIZE)).unwrap();
    for promise in ["--flush", "--journal"] {
        garbage(&below, SIZE).unwrap();
        let Some(disk) = Loop::over(&below) else { return };
        let journal = format!("--journal={}", text(&scratch.file("journal")));
        let promise = if promise == "--journal" { &journal } else { promise };
        let rate = ["-C1", "--rate=8M", "--direct=off", "--retry-delay=20ms"];
        let sides = ["--no-progress", text(&source), &disk.device];
        let args = [&["copy", "--verify", promise], &rate[..], &sides].concat();
        let output = std::thread::scope(|scope| {
            let copy = scope.spawn(|| run(&args));
            // Once the first bytes are on the disk, and clean in its page cache, they change below it.
            let probe = fs::File::open(&disk.device).unwrap();
            until("the start of the disk is written", || {
                probe.sync_data().unwrap();
                image::compare_ranges((&source, 0), (&below, 0), DAMAGED).is_ok()
            });
            let stored = fs::File::options().write(true).open(&below).unwrap();
            stored.write_all_at(b"damaged", 4096).unwrap();
            let output = copy.join().unwrap();
            // The probe has kept the page cache.
            drop(probe);
            output
        });
        let said = lossy(&output.stderr);
        assert!(!output.status.success(), "{promise}: {said}");
        assert!(
            said.contains("source and target differ, first at offset 4096"),
            "{promise}: {said}"
        );
    }
}
