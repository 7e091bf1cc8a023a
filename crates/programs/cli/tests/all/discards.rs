//! Copies that discard their source, with sides and journals that do not belong together: one disk behind two
//! servers, another disk behind an address, an older journal. Nothing may be lost.

use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use blockhaul_testkit::image::pattern;
use blockhaul_testkit::tools::{self, PeerProgram, PeerServer, ScratchDir, until};

const LIMIT: Duration = Duration::from_secs(120);
const OURS: &str = env!("CARGO_BIN_EXE_blockhaul");

/// A command that copies and discards; its messages are in the file `said`.
fn command(scratch: &ScratchDir, args: &[&str]) -> Command {
    let mut command = Command::new(OURS);
    command.current_dir(scratch.path()).stdin(Stdio::null());
    command.args(["copy", "--no-progress", "--discard-source"]).args(args);
    command
}

#[track_caller]
fn copies(scratch: &ScratchDir, args: &[&str]) -> String {
    let output = tools::output(&mut command(scratch, args), LIMIT).unwrap();
    let said = tools::text(&output.stderr);
    assert!(output.status.success(), "{args:?}: {said}");
    said
}

#[track_caller]
fn refused(scratch: &ScratchDir, args: &[&str], words: &[&str]) {
    let output = tools::output(&mut command(scratch, args), LIMIT).unwrap();
    let said = tools::text(&output.stderr);
    assert!(!output.status.success(), "{args:?}: {said}");
    assert!(words.iter().all(|word| said.contains(word)), "{args:?}: {words:?} in {said}");
    assert!(!said.contains("panicked"), "{said}");
}

fn ours(scratch: &ScratchDir, name: &str, args: &[&str]) -> PeerServer {
    PeerServer::blockhaul(OURS.as_ref(), &scratch.socket(name), args).unwrap()
}

fn allocated(path: &Path) -> u64 {
    std::fs::metadata(path).unwrap().blocks() * 512
}

/// A sparse file with content at these places.
fn sparse(path: &Path, len: u64, contents: &[(u64, &[u8])]) {
    let file = std::fs::File::create(path).unwrap();
    file.set_len(len).unwrap();
    for (at, bytes) in contents {
        file.write_all_at(bytes, *at).unwrap();
    }
}

/// Copies between two addresses of one disk are refused, each time, and the disk stays as it is.
#[track_caller]
fn one_storage(scratch: &ScratchDir, sides: [&str; 2], more: &[&str], is_same: impl Fn() -> bool) {
    for _ in 0..2 {
        let args = [&["--journal=journal"], more, &sides].concat();
        let words = ["source and target are one storage", "copy to another storage"];
        refused(scratch, &args, &words);
        assert!(is_same(), "{args:?}");
        assert!(!scratch.file("journal").exists());
    }
}

#[test]
fn one_disk_behind_two_servers_is_refused_before_anything_is_discarded() {
    let scratch = ScratchDir::new().unwrap();
    let disk = scratch.file("disk");
    let served = format!("file:{}?lock=off", disk.display());
    let bytes = pattern(3 << 20);
    std::fs::write(&disk, &bytes).unwrap();
    let [one, two] = ["one", "two"].map(|name| ours(&scratch, name, &[&served]));
    let is_same = || std::fs::read(&disk).unwrap() == bytes;
    let uris = [one.uri(""), two.uri("")];
    let sides = [&*uris[0], &*uris[1]];
    one_storage(&scratch, sides, &[], is_same);
    one_storage(&scratch, sides, &["-C", "1", "--range", "5000:1M"], is_same);
    // The target has it in a cache, and the other end does not know.
    one_storage(&scratch, sides, &["--target-layer", "cache"], is_same);
    one.stop().unwrap();
    two.stop().unwrap();
    // Content far behind zeroes that are allocated.
    let far = 600 << 20;
    sparse(&disk, far + (4 << 20), &[(far, &bytes)]);
    let servers = ["one", "two"].map(|name| ours(&scratch, name, &[&served]));
    assert_eq!(servers.each_ref().map(|server| server.uri("")), uris);
    let is_same = || {
        let mut there = vec![0; bytes.len()];
        std::fs::File::open(&disk).unwrap().read_exact_at(&mut there, far).unwrap();
        there == bytes
    };
    one_storage(&scratch, sides, &[], is_same);
    one_storage(&scratch, sides, &["--no-extents"], is_same);
}

#[test]
fn one_qcow2_image_behind_two_servers_is_refused_before_anything_is_discarded() {
    let Some(qemu_nbd) = PeerProgram::require("qemu-nbd") else { return };
    let Some(qemu_img) = PeerProgram::require("qemu-img") else { return };
    let scratch = ScratchDir::new().unwrap();
    let bytes = pattern(5 << 20);
    std::fs::write(scratch.file("raw"), &bytes).unwrap();
    let [image, raw] = ["image", "raw"].map(|name| scratch.file(name));
    let made =
        qemu_img.command().args(["convert", "-O", "qcow2"]).args([&raw, &image]).status().unwrap();
    assert!(made.success());
    let options = format!(
        "driver=qcow2,discard=unmap,file.driver=file,file.locking=off,file.discard=unmap,file.filename={}",
        image.display()
    );
    let serve = |name: &str| {
        let args = ["--image-opts", &options, "--discard=unmap", "-e", "8"];
        PeerServer::qemu_nbd(&qemu_nbd, &scratch.socket(name), &args).unwrap()
    };
    let [one, two] = ["one", "two"].map(serve);
    let uris = [one.uri(""), two.uri("")];
    let is_same = || {
        let same = qemu_img.command().args(["compare", "-U"]).args([&raw, &image]).output();
        same.unwrap().status.success()
    };
    one_storage(&scratch, [&uris[0], &uris[1]], &[], is_same);
}

/// A copy that runs slowly, until something is discarded at the source file.
fn begun(scratch: &ScratchDir, args: &[&str], source: &Path) -> Child {
    let before = allocated(source);
    let slow = ["--rate=2M", "--segment=64k", "--request-size=16k", "-C", "1"];
    let more =
        ["--retries=100", "--retry-delay=50ms", "--journal-interval=10ms", "--journal=journal"];
    let said = std::fs::File::create(scratch.file("said")).unwrap();
    let mut copy = command(scratch, &[&slow[..], &more, args].concat());
    let mut copy = copy.stderr(said).spawn().unwrap();
    until("something is discarded", || {
        let said = scratch.file("said");
        assert!(copy.try_wait().unwrap().is_none(), "{}", std::fs::read_to_string(said).unwrap());
        allocated(source) + (1 << 20) <= before
    });
    copy
}

/// The copy has failed with these words.
#[track_caller]
fn failed(scratch: &ScratchDir, mut copy: Child, words: &str) {
    let status = tools::wait_within(&mut copy, LIMIT).expect("it ends");
    let said = std::fs::read_to_string(scratch.file("said")).unwrap();
    assert!(!status.success() && said.contains(words), "{said}");
}

#[test]
fn another_disk_behind_the_address_of_a_side_ends_the_copy() {
    let scratch = ScratchDir::new().unwrap();
    let [source, target, empty] = ["source", "target", "empty"].map(|name| scratch.file(name));
    let size = 8 << 20;
    let bytes = pattern(size);
    let serve = |path: &Path| ours(&scratch, "moved", &[path.to_str().unwrap()]);
    for side in ["target", "source"] {
        std::fs::write(&source, &bytes).unwrap();
        for path in [&target, &empty] {
            sparse(path, size as u64, &[]);
        }
        let _ = std::fs::remove_file(scratch.file("journal"));
        let moved = if side == "target" { &target } else { &source };
        let server = serve(moved);
        let uri = server.uri("");
        let args = if side == "target" { ["source", &uri] } else { [&*uri, "target"] };
        let copy = begun(&scratch, &args, &source);
        server.stop().unwrap();
        let server = serve(&empty);
        let words = if side == "target" {
            "the target lacks what was written to it"
        } else {
            "the content of the source has changed"
        };
        failed(&scratch, copy, words);
        assert_eq!(allocated(&empty), 0, "{side}: the other disk is untouched");
        // Nor does a copy go on with it.
        let again = [&["--journal=journal", "--segment=64k"], &args[..]].concat();
        let back =
            if side == "target" { "put the target of the journal back" } else { "put the source" };
        refused(&scratch, &again, &[back]);
        assert_eq!(allocated(&empty), 0, "{side}");
        server.stop().unwrap();
        let server = serve(moved);
        copies(&scratch, &again);
        assert!(std::fs::read(&target).unwrap() == bytes, "{side}");
        server.stop().unwrap();
    }
}

#[test]
fn an_older_journal_is_refused_whatever_the_target_is() {
    let bytes = pattern(4 << 20);
    for kind in ["new file", "server", "no extents", "range"] {
        let scratch = ScratchDir::new().unwrap();
        let file = |name: &str| scratch.file(name);
        std::fs::write(file("source"), &bytes).unwrap();
        let mut expected = bytes.clone();
        let mut more = vec!["--journal=journal", "--segment=64k", "--request-size=16k", "-C", "1"];
        more.extend(["--journal-interval=1ms", "--retries=0"]);
        match kind {
            "no extents" => more.push("--no-extents"),
            "range" => {
                std::fs::write(file("target"), vec![7; 4 << 20]).unwrap();
                more.extend(["--range", "128k:3M"]);
                expected.fill(7);
                expected[128 << 10..][..3 << 20].copy_from_slice(&bytes[128 << 10..][..3 << 20]);
            }
            "server" => sparse(&file("target"), 4 << 20, &[]),
            _ => {}
        }
        let path = file("target");
        let server = (kind == "server").then(|| ours(&scratch, "s", &[path.to_str().unwrap()]));
        let uri = server.as_ref().map_or_else(|| "target".to_string(), |server| server.uri(""));
        let to = |end: &'static str| match end {
            "" => [&more[..], &["source", &uri]].concat(),
            fault => [&more[..], &["--target-layer", fault, "source", &uri]].concat(),
        };
        let mut older = Vec::new();
        for fault in ["error?write=100%&at=1M,64k", "error?write=100%&at=2M,64k"] {
            refused(&scratch, &to(fault), &["the target failed"]);
            older.push(std::fs::read(file("journal")).unwrap());
        }
        assert!(older[0].len() > 4096 && older[0].len() < older[1].len());
        older.push(older[0][..4096].to_vec());
        let refuses = |older: &[Vec<u8>]| {
            let before = std::fs::read(&path).unwrap();
            for journal in older {
                std::fs::write(file("journal"), journal).unwrap();
                refused(&scratch, &to(""), &["put the latest journal back"]);
                assert!(std::fs::read(&path).unwrap() == before, "{kind}: the target was changed");
            }
        };
        refuses(&[older[0].clone(), older[2].clone()]);
        std::fs::write(file("journal"), &older[1]).unwrap();
        copies(&scratch, &to(""));
        assert!(std::fs::read(&path).unwrap() == expected, "{kind}");
        refuses(&older);
    }
}

#[test]
fn a_target_that_was_zero_goes_on_after_a_kill_before_the_first_record() {
    let scratch = ScratchDir::new().unwrap();
    let bytes = pattern(4 << 20);
    std::fs::write(scratch.file("source"), &bytes).unwrap();
    let target = scratch.file("target");
    sparse(&target, 4 << 20, &[]);
    let server = ours(&scratch, "s", &[target.to_str().unwrap()]);
    let uri = server.uri("");
    for discard in [true, false] {
        let args = ["--destination-is-zero", "--journal=journal", "source", &uri];
        let command = |more: &[&str]| {
            let mut command = Command::new(OURS);
            command.current_dir(scratch.path()).args(["copy", "--no-progress"]);
            command.args(discard.then_some("--discard-source")).args(args).args(more);
            command
        };
        std::fs::write(scratch.file("source"), &bytes).unwrap();
        sparse(&target, 4 << 20, &[]);
        let _ = std::fs::remove_file(scratch.file("journal"));
        let slow = ["--rate=1M", "--request-size=16k", "--journal-interval=60s"];
        let mut copy = command(&slow).stderr(Stdio::null()).spawn().unwrap();
        until("something is written", || allocated(&target) >= 256 << 10);
        copy.kill().unwrap();
        copy.wait().unwrap();
        assert_eq!(std::fs::metadata(scratch.file("journal")).unwrap().len(), 4096);
        let output = tools::output(&mut command(&[]), LIMIT).unwrap();
        assert!(output.status.success(), "{}", tools::text(&output.stderr));
        assert!(std::fs::read(&target).unwrap() == bytes);
    }
}

#[test]
fn a_target_that_is_lost_with_the_program_is_refused() {
    let scratch = ScratchDir::new().unwrap();
    let bytes = pattern(1 << 20);
    std::fs::write(scratch.file("source"), &bytes).unwrap();
    sparse(&scratch.file("target"), 1 << 20, &[]);
    for target in [
        &["memory:1M"][..],
        &["null:1M"],
        &["target", "--target-layer", "cow"],
        &["target", "--target-layer", "cache?cache=unsafe"],
        &["target", "--target-layer", "stats", "--target-layer", "cow"],
    ] {
        let args = [&["--journal=journal", "source"], target].concat();
        refused(&scratch, &args, &["cannot be discarded", "copy to storage that stays"]);
        assert!(std::fs::read(scratch.file("source")).unwrap() == bytes, "{target:?}");
    }
    copies(&scratch, &["--journal=journal", "source", "target", "--target-layer", "cache"]);
    assert!(std::fs::read(scratch.file("target")).unwrap() == bytes);
}

#[test]
fn a_complete_copy_names_the_socket_of_its_target() {
    let scratch = ScratchDir::new().unwrap();
    std::fs::write(scratch.file("source"), pattern(1 << 20)).unwrap();
    sparse(&scratch.file("target"), 1 << 20, &[]);
    let server = ours(&scratch, "s", &[scratch.file("target").to_str().unwrap()]);
    let uri = server.uri("");
    let args = ["--journal=journal", "source", &uri];
    copies(&scratch, &args);
    let said = copies(&scratch, &args);
    assert!(said.contains("nothing is copied") && said.contains(&uri), "{said}");
}
