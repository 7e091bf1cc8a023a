//! Disks in chunks in an object store, with real programs: SeaweedFS, QEMU's, fio and libnbd's shell, and kills.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use blockhaul_testkit::require_peer;
use blockhaul_testkit::rng::Rng;
use blockhaul_testkit::tools::{self, text, until};

use crate::remote::{ObjectServer, http, lines, same};
use crate::served_disk::{ChildGuard, LIMIT};

/// With the server of another test: two of them do not listen.
pub fn disks_in_chunks_are_written_at_random_places(server: &ObjectServer) {
    the_commands_of_the_page_run(server);
    a_disk_in_use_is_refused(server);
    other_programs_use_it(server);
    a_killed_server_leaves_the_disk_of_a_flush(server);
}

/// A copy whose last flush fails has failed.
#[test]
fn a_copy_that_cannot_be_kept_fails() {
    let scratch = tools::ScratchDir::new().unwrap();
    let script = "ulimit -f 32; trap '' XFSZ; exec \"$0\" copy pattern:1M 'chunks:d?size=64K'";
    let mut command = Command::new("sh");
    command.args(["-c", script]).arg(env!("CARGO_BIN_EXE_blockhaul")).current_dir(scratch.path());
    let output = tools::output(&mut command, LIMIT).unwrap();
    assert_eq!(output.status.code(), Some(6), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("File too large"), "{}", text(&output.stderr));
}

/// In a directory, where no server is needed.
#[test]
fn a_place_is_not_both_source_and_target_and_a_dry_run_makes_nothing() {
    let scratch = tools::ScratchDir::new().unwrap();
    let run = |words: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_blockhaul"));
        let output = tools::output(command.args(words).current_dir(scratch.path()), LIMIT).unwrap();
        (output.status.code(), text(&output.stdout) + &text(&output.stderr))
    };
    for target in ["chunks:k?size=64K", "chunks:new/k?size=64K"] {
        let (status, said) = run(&["copy", "--dry-run", "pattern:1M", target]);
        assert!(status == Some(0) && said.contains("would create chunks:"), "{said}");
        assert_eq!(fs::read_dir(scratch.path()).unwrap().count(), 0);
    }
    let (status, said) = run(&["copy", "--dry-run", "pattern:1M", "chunks:k?size=3"]);
    assert_eq!(status, Some(2), "{said}");
    let (status, said) = run(&["copy", "pattern:1M", "chunks:k?size=64K"]);
    assert_eq!(status, Some(0), "{said}");
    std::os::unix::fs::symlink("k", scratch.file("link")).unwrap();
    for target in ["chunks:k", "chunks:./k/", "chunks:link?cache=1M"] {
        for options in [&["copy", "--dry-run"][..], &["copy"]] {
            let (status, said) = run(&[options, &["chunks:k", target]].concat());
            assert!(status == Some(2) && said.contains("are the same"), "{status:?} {said}");
        }
    }
    let (status, said) = run(&["compare", "pattern:1M", "chunks:k"]);
    assert_eq!(status, Some(0), "{said}");
}

fn the_commands_of_the_page_run(server: &ObjectServer) {
    let disk = server.disk(7);
    let is_command = |line: &String| line != "blockhaul chunks 1";
    for line in lines("Disks in chunks").iter().filter(|line| is_command(line)) {
        let words: Vec<_> = line.split(' ').skip(1).map(|word| word.trim_matches('"')).collect();
        server.succeed(&words);
    }
    server.succeed(&["copy", "chunks:vm1", "again.raw"]);
    assert!(same(&disk, &server.scratch.file("again.raw")));
    // 20 MiB and 512 bytes: the hole has no objects, the last chunk has one.
    let map = server.succeed(&["map", "--json", "chunks:s3://disks/vm1"]);
    assert!(map.contains("hole") || map.contains("zero"), "{map}");
    let listed = http(server.filer, "GET /buckets/disks/vm1/chunks/?limit=1000", b"");
    let count = listed.matches("vm1/chunks/0").count();
    assert!(count > 4 && count < 18, "{count} chunks: {listed}");
    server.refuse(&["copy", "disk.raw", "chunks:s3://disks/vm1?size=2M"], "size=1048576");
    server.refuse(&["info", "chunks:s3://disks/none"], "no disk in chunks");
    server.refuse(&["serve", "chunks:s3://disks/none", "-U", "sock"], "create=10G");
    server.refuse(&["copy", "chunks:s3://disks/vm1", "chunks:s3://disks/vm1/"], "are the same");
    server.succeed(&["copy", "--dry-run", "disk.raw", "chunks:s3://disks/none"]);
    server.refuse(&["copy", "--dry-run", "disk.raw", "chunks:s3://nothing/none"], "NoSuchBucket");
    server.refuse(&["info", "chunks:s3://disks/none"], "no disk in chunks");
    // Objects of others are no empty place.
    server.succeed(&["copy", "disk.raw", "s3://disks/other/disk.raw"]);
    server.refuse(&["copy", "disk.raw", "chunks:s3://disks/other"], "other objects");
    let images = ["copy", "as-qcow2:disk.raw", "chunks:s3://disks/image?create=64M"];
    server.succeed(&images);
    server.succeed(&["compare", "disk.raw", "qcow2:chunks:s3://disks/image"]);
}

/// A server of a disk in chunks, and its socket.
fn serve(server: &ObjectServer, name: &str, disk: &str) -> (ChildGuard, PathBuf) {
    let socket = server.scratch.socket(name);
    let mut command = server.command();
    command.args(["serve", "--foreground", "--exit-with-parent", "--unix"]).arg(&socket).arg(disk);
    let child = ChildGuard(command.stdin(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
    let begun = Instant::now();
    while std::os::unix::net::UnixStream::connect(&socket).is_err() {
        assert!(begun.elapsed() < LIMIT, "no server");
        std::thread::sleep(Duration::from_millis(20));
    }
    (child, socket)
}

fn stop(mut served: ChildGuard) {
    let pid = served.0.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    assert!(served.0.wait().unwrap().success());
}

fn uri(socket: &Path) -> String {
    format!("nbd+unix:///?socket={}", socket.display())
}

fn a_disk_in_use_is_refused(server: &ObjectServer) {
    let disk = "chunks:s3://disks/used?create=8M&lease=2s";
    let (served, socket) = serve(server, "used", disk);
    server.refuse(&["serve", disk, "-U", "sock"], "open for writing");
    // A reader is not refused.
    server.succeed(&["compare", "zero:8M", "chunks:s3://disks/used"]);
    stop(served);
    let _ = fs::remove_file(socket);
    let begun = Instant::now();
    let (served, _socket) = serve(server, "used-again", disk);
    assert!(begun.elapsed() < Duration::from_millis(1900), "a disk that was closed is free");
    stop(served);
}

fn other_programs_use_it(server: &ObjectServer) {
    let disk = server.disk(8);
    let size = fs::metadata(&disk).unwrap().len();
    let spec = format!("chunks:s3://disks/nbd?create={size}&size=256K&cache=2M");
    let (served, socket) = serve(server, "nbd", &spec);
    let uri = uri(&socket);
    if let Some(qemu_img) = peer("qemu-img") {
        let run = |words: &[&str]| {
            let output = tools::output(qemu_img.command().args(words), LIMIT).unwrap();
            assert!(output.status.success(), "{words:?}: {}", text(&output.stderr));
        };
        let path = disk.to_str().unwrap();
        run(&["convert", "-n", "-f", "raw", "-O", "raw", path, &uri]);
        run(&["compare", "-f", "raw", "-F", "raw", path, &uri]);
    }
    if let Some(fio) = peer("fio") {
        let mut command = fio.command();
        command.args(["--name=verified", "--thread", "--ioengine=nbd", "--rw=randwrite"]);
        command.args(["--bsrange=4k-256k", "--size=16M", "--iodepth=16", "--verify=crc32c"]);
        command.args(["--verify_fatal=1", "--verify_state_save=0", "--fsync=31", "--randrepeat=1"]);
        command.arg(format!("--uri={uri}"));
        command.arg(format!("--aux-path={}", server.scratch.path().display()));
        let output = tools::output(&mut command, LIMIT).unwrap();
        assert!(output.status.success(), "{} {}", text(&output.stdout), text(&output.stderr));
    }
    stop(served);
    server.succeed(&["info", "chunks:s3://disks/nbd"]);
}

fn peer(name: &str) -> Option<tools::PeerProgram> {
    Some(require_peer!(name, None))
}

/// Bytes of a write, and writes of a flush.
const STEP: usize = 48 << 10;
const WRITES: u64 = 5;
const SIZE: usize = 4 << 20;

/// Writes, flushes, and tells after each flush how many there were. The place of a write follows from its number.
const WRITER: &str = "
import sys
for n in range(first, first + 100000):
    h.pwrite(bytes([n % 251]) * 49152, n * 7919 * 4096 % (4194304 - 49152))
    if n % 5 == 4:
        h.flush()
        print(n // 5 + 1, flush=True)
";

/// The disk after this number of flushes.
fn after(flushes: u64) -> Vec<u8> {
    let mut bytes = vec![0; SIZE];
    for number in 0..flushes * WRITES {
        let at = (number * 7919 * 4096) as usize % (SIZE - STEP);
        bytes[at..at + STEP].fill((number % 251) as u8);
    }
    bytes
}

fn a_killed_server_leaves_the_disk_of_a_flush(server: &ObjectServer) {
    let nbdsh = require_peer!("nbdsh");
    let seed = u64::from(std::process::id());
    println!("seed {seed}");
    let mut rng = Rng::new(seed);
    let kills = if std::env::var_os("BLOCKHAUL_LONG").is_some() { 100 } else { 4 };
    let spec = format!("chunks:s3://disks/cut?create={SIZE}&size=64K&cache=256K&lease=300ms");
    let mut flushes = 0;
    for kill in 0..kills {
        let (mut served, socket) = serve(server, &format!("killed-{kill}"), &spec);
        let mut command = nbdsh.command();
        let first = format!("first = {}", flushes * WRITES);
        command.args(["-u", &uri(&socket), "-c", &first, "-c", WRITER]);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut client = ChildGuard(command.spawn().unwrap());
        let mut told = BufReader::new(client.0.stdout.take().unwrap()).lines();
        // Not before the first flush of this server.
        let first = told.next().map(Result::unwrap);
        let reader = std::thread::spawn(move || told.map_while(Result::ok).last());
        std::thread::sleep(Duration::from_millis(rng.below(700)));
        served.0.kill().unwrap();
        served.0.wait().unwrap();
        client.0.wait().unwrap();
        let told: u64 = reader.join().unwrap().or(first).unwrap().parse().unwrap();
        server.succeed(&["copy", "chunks:s3://disks/cut", "left.raw"]);
        let left = fs::read(server.scratch.file("left.raw")).unwrap();
        // The reply of the last flush may have been lost.
        let found = (told..=told + 1).find(|flushes| left == after(*flushes));
        flushes = found.unwrap_or_else(|| panic!("seed {seed}: not the disk of flush {told}"));
    }
    let (served, _socket) = serve(server, "killed-last", &spec);
    let objects = || {
        let listed = http(server.filer, "GET /buckets/disks/cut/chunks/?limit=1000", b"");
        listed.matches("cut/chunks/0").count()
    };
    // A server that stops leaves what it has not removed yet to the next one.
    until("objects of killed servers are removed", || objects() <= SIZE >> 16);
    stop(served);
    assert!(objects() > 0);
}
