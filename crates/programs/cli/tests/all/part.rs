//! Copies of parts as processes: ranges, QEMU's dirty bitmaps, and what changed since a manifest; what
//! is said to read as zeroes; and the memory that a copy takes.

use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

use blockhaul_testkit::image::pattern;
use blockhaul_testkit::tools::{self, PeerProgram, PeerServer, ScratchDir};

const LIMIT: Duration = Duration::from_secs(120);
const OURS: &str = env!("CARGO_BIN_EXE_blockhaul");

fn run(args: &[&str]) -> Output {
    tools::output(Command::new(OURS).args(args), LIMIT).unwrap()
}

/// What it said on standard error, after success.
#[track_caller]
fn copies(args: &[&str]) -> String {
    let output = run(&[&["copy", "-v"], args].concat());
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{args:?}: {said}");
    said
}

#[track_caller]
fn fails(args: &[&str], status: i32, words: &[&str]) {
    let output = run(&[&["copy"], args].concat());
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(status), "{args:?}: {said}");
    assert!(words.iter().all(|word| said.contains(word)), "{args:?}: {words:?} in {said}");
    assert!(!said.contains("panicked"), "{said}");
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn a_range_goes_where_it_was_and_nothing_else_changes() {
    let scratch = ScratchDir::new().unwrap();
    let [disk, journal, manifest] = ["disk", "journal", "manifest"].map(|name| scratch.file(name));
    let size = 3_000_001;
    std::fs::write(&disk, vec![0xa5; size]).unwrap();
    let mut expected = vec![0xa5; size];
    let at = 1_000_003;
    let len = 1 << 20;
    expected[at..at + len].copy_from_slice(&pattern(size)[at..at + len]);
    let source = format!("pattern:{size}");
    let range = format!("{at}:1M");
    let args = ["--range", &range, "--verify", "--journal", text(&journal)];
    let said =
        copies(&[&args[..], &["--manifest", text(&manifest), &source, text(&disk)]].concat());
    assert!(
        said.contains(&format!(" {len} bytes: ")) && said.contains("verified 1048576"),
        "{said}"
    );
    assert!(std::fs::read(&disk).unwrap() == expected);
    assert!(!journal.exists());
    // The manifest describes the range.
    assert!(run(&["verify", text(&disk), text(&manifest)]).status.success());
    let file = std::fs::File::options().write(true).open(&disk).unwrap();
    file.write_all_at(b"!", at as u64 - 1).unwrap();
    assert!(run(&["verify", text(&disk), text(&manifest)]).status.success());
    file.write_all_at(b"!", at as u64).unwrap();
    assert_eq!(run(&["verify", text(&disk), text(&manifest)]).status.code(), Some(8));
    // Where there was nothing, and through a pipe.
    let fresh = scratch.file("fresh");
    copies(&["--range", &range, &source, text(&fresh)]);
    expected[..at].fill(0);
    expected[at + len..].fill(0);
    assert!(std::fs::read(&fresh).unwrap() == expected);
    let output = run(&["copy", "--range", &range, &source, "-"]);
    assert!(output.stdout == expected[at..at + len]);

    fails(&["--range", "3M:1", &source, text(&disk)], 3, &["range ends at", "3000001 bytes"]);
    std::fs::write(&fresh, "small").unwrap();
    fails(&["--range", &range, &source, text(&fresh)], 3, &["smaller than the end of the range"]);
    fails(&["--range", "0:1", "-", text(&disk)], 2, &["the source is a pipe"]);
    fails(&["--range", "0:1", "--digest", "blake3", &source, text(&disk)], 2, &["whole disk"]);
}

#[test]
fn a_journal_belongs_to_its_range() {
    let scratch = ScratchDir::new().unwrap();
    let [disk, journal] = ["disk", "journal"].map(|name| scratch.file(name));
    let copy = |range: &str, layer: &str| {
        let args = [
            "copy",
            "-v",
            "--retries",
            "0",
            "--segment",
            "64k",
            "--request-size",
            "16k",
            "-C",
            "1",
        ];
        let more = ["--range", range, "--journal", text(&journal), "--journal-interval", "1ms"];
        let ends = ["--target-layer", layer, "pattern:4M", text(&disk)];
        run(&[&args[..], &more, &ends].concat())
    };
    std::fs::write(&disk, vec![1; 4 << 20]).unwrap();
    // The last request fails: everything before it is recorded.
    let output = copy("100k:2M", "error?write=100%&at=2M,1M");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && journal.exists(), "{said}");
    let output = copy("100k:1M", "stats");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && said.contains("another range"), "{said}");
    let output = copy("100k:2M", "stats");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && said.contains("of an earlier run"), "{said}");
    let mut expected = vec![1; 4 << 20];
    let range = 100 << 10..(100 << 10) + (2 << 20);
    expected[range.clone()].copy_from_slice(&pattern(4 << 20)[range]);
    assert!(std::fs::read(&disk).unwrap() == expected);
}

#[test]
fn what_changed_since_a_manifest() {
    let scratch = ScratchDir::new().unwrap();
    let [source, target, old, new] =
        ["source", "target", "old", "new"].map(|name| scratch.file(name));
    let mut bytes = pattern(40 << 20);
    bytes[8 << 20..16 << 20].fill(0);
    std::fs::write(&source, &bytes).unwrap();
    let from = text(&source);
    let to = text(&target);
    copies(&["--manifest", text(&old), from, to]);
    // Something new, something that becomes zero, something that was zero.
    let file = std::fs::File::options().write(true).open(&source).unwrap();
    file.write_all_at(b"new", 5_000_000).unwrap();
    file.write_all_at(&vec![0; 2 << 20], 20 << 20).unwrap();
    file.write_all_at(b"here", 12 << 20).unwrap();
    // What is the same in the source is not looked at on the target.
    let mark = std::fs::File::options().write(true).open(&target).unwrap();
    mark.write_all_at(b"mark", 30 << 20).unwrap();
    let journal = scratch.file("journal");
    let args = ["--since", text(&old), "--manifest", text(&new), "--verify"];
    let said = copies(&[&args[..], &["--journal", text(&journal), from, to]].concat());
    assert!(said.contains(" 4194304 bytes: "), "{said}");
    mark.write_all_at(&bytes[30 << 20..(30 << 20) + 4], 30 << 20).unwrap();
    assert!(std::fs::read(&source).unwrap() == std::fs::read(&target).unwrap());
    assert!(run(&["verify", to, text(&new)]).status.success());
    let said = copies(&["--since", text(&new), "--verify", from, to]);
    assert!(said.contains(" 0 bytes: "), "{said}");
    // A disk that has grown.
    for (file, size) in [(&file, 41 << 20), (&mark, 41 << 20)] {
        file.set_len(size).unwrap();
    }
    file.write_all_at(b"more", (41 << 20) - 4).unwrap();
    copies(&["--since", text(&new), from, to]);
    assert!(std::fs::read(&source).unwrap() == std::fs::read(&target).unwrap());

    fails(&["--since", "/no/such", from, to], 3, &["manifest /no/such", "No such file"]);
    fails(&["--since", from, from, to], 3, &["manifest"]);
    fails(&["--since", text(&new), from, "-"], 2, &["ranges cannot be left out in a pipe"]);
    let absent = scratch.file("absent");
    fails(&["--since", text(&new), from, text(&absent)], 3, &["needs the earlier copy"]);
    fails(&["--since", text(&new), "--target-is-zero", from, to], 2, &["holds the earlier copy"]);
}

#[test]
fn a_dirty_bitmap_of_qemu() {
    let (Some(nbd), Some(img), Some(io)) = (
        PeerProgram::require("qemu-nbd"),
        PeerProgram::require("qemu-img"),
        PeerProgram::require("qemu-io"),
    ) else {
        return;
    };
    let scratch = ScratchDir::new().unwrap();
    let [disk, target] = ["disk.qcow2", "target"].map(|name| scratch.file(name));
    let tool = |peer: &PeerProgram, args: &[&str]| {
        let output = tools::output(peer.command().args(args), LIMIT).unwrap();
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    };
    let image = text(&disk);
    tool(&img, &["create", "-q", "-f", "qcow2", image, "16M"]);
    tool(&io, &["-f", "qcow2", "-c", "write -P 1 0 16M", image]);
    tool(&img, &["convert", "-O", "raw", image, text(&target)]);
    tool(&img, &["bitmap", "--add", image, "b0"]);
    tool(&io, &["-f", "qcow2", "-c", "write -P 2 1M 64k", "-c", "write -z 5M 1M", image]);
    let mut expected = vec![1; 16 << 20];
    expected[1 << 20..(1 << 20) + 65536].fill(2);
    expected[5 << 20..6 << 20].fill(0);
    // What is not in the bitmap stays, and is not compared.
    let mark = std::fs::File::options().write(true).open(&target).unwrap();
    mark.write_all_at(b"mark", 10 << 20).unwrap();
    expected[10 << 20..(10 << 20) + 4].copy_from_slice(b"mark");
    let socket = scratch.socket("qemu");
    let args = ["-r", "-f", "qcow2", "-B", "b0", "-e", "8", image];
    let server = PeerServer::qemu_nbd(&nbd, &socket, &args).unwrap();
    let uri = server.uri("");
    let bitmap = ["--bitmap", "qemu:dirty-bitmap:b0"];
    let said = copies(&[&bitmap[..], &["--verify", &uri, text(&target)]].concat());
    assert!(said.contains(&format!(" {} bytes: ", (1 << 20) + 65536)), "{said}");
    assert!(said.contains(&format!("verified {} bytes", (1 << 20) + 65536)), "{said}");
    assert!(std::fs::read(&target).unwrap() == expected);
    let none = [&bitmap[..], &["--bitmap-flags", "2", &uri, text(&target)]].concat();
    assert!(copies(&none).contains(" 0 bytes: "));
    // A journal is for the ranges that the bitmap has when the copy begins.
    let journal = scratch.file("journal");
    let kept = ["--journal", text(&journal), &uri, text(&target)];
    let said = copies(&[&bitmap[..], &kept].concat());
    assert!(said.contains(&format!(" {} bytes: ", (1 << 20) + 65536)), "{said}");
    assert!(std::fs::read(&target).unwrap() == expected);

    fails(
        &["--bitmap", "qemu:dirty-bitmap:b1", &uri, text(&target)],
        3,
        &["no bitmap \"qemu:dirty-bitmap:b1\"", "blockhaul info"],
    );
    fails(&[&bitmap[..], &[&uri, "-"]].concat(), 2, &["ranges cannot be left out in a pipe"]);
    fails(&["--bitmap", "base:allocation", &uri, text(&target)], 2, &["is not a dirty bitmap"]);
    let absent = scratch.file("absent");
    fails(&[&bitmap[..], &[&uri, text(&absent)]].concat(), 3, &["needs the earlier copy"]);
}

/// The ranges of 64 KiB and a bit, one in each MiB, as JSON lines.
fn spread(count: u64) -> (Vec<(u64, u64)>, String) {
    let ranges: Vec<_> = (0..count).map(|number| ((number << 20) + 4099, 70_000)).collect();
    let lines = ranges.iter().map(|(at, len)| format!("{{\"offset\": {at}, \"length\": {len}}}\n"));
    let lines = lines.collect();
    (ranges, lines)
}

#[test]
fn the_ranges_of_a_list_and_nothing_else() {
    let scratch = ScratchDir::new().unwrap();
    let [disk, list, fresh] = ["disk", "list", "fresh"].map(|name| scratch.file(name));
    let size = 4 << 20;
    let (ranges, lines) = spread(4);
    std::fs::write(&list, lines).unwrap();
    std::fs::write(&disk, vec![0xa5; size]).unwrap();
    let mut expected = vec![0xa5; size];
    let source = format!("pattern:{size}");
    for &(at, len) in &ranges {
        let place = at as usize..(at + len) as usize;
        expected[place.clone()].copy_from_slice(&pattern(size)[place]);
    }
    let args = ["--ranges", text(&list), "--verify"];
    let said = copies(&[&args[..], &[&source, text(&disk)]].concat());
    assert!(said.contains(" 280000 bytes: ") && said.contains("verified 280000 bytes"), "{said}");
    assert!(std::fs::read(&disk).unwrap() == expected);
    // Where there was nothing, and from standard input.
    let mut child = Command::new(OURS)
        .args(["copy", "--ranges", "-", &source, text(&fresh)])
        .stdin(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    std::io::Write::write_all(&mut input, b"[{\"offset\": 4096, \"length\": 512}]").unwrap();
    drop(input);
    assert!(child.wait().unwrap().success());
    let mut only = vec![0; size];
    only[4096..4608].copy_from_slice(&pattern(size)[4096..4608]);
    assert!(std::fs::read(&fresh).unwrap() == only);
    // What is wrong is refused before the target is touched.
    let absent = scratch.file("absent");
    std::fs::write(&list, "{\"offset\": 0, \"length\": 512}\n{\"offset\": 5}\n").unwrap();
    fails(&["--ranges", text(&list), &source, text(&absent)], 3, &["line 2", "not a range"]);
    let beyond = format!("[{{\"offset\": {}, \"length\": 513}}]", size - 512);
    std::fs::write(&list, beyond).unwrap();
    fails(&["--ranges", text(&list), &source, text(&absent)], 3, &["but the range ends at"]);
    fails(&["--ranges", text(&list), &source, "-"], 2, &["ranges cannot be left out in a pipe"]);
    fails(&["--ranges", "/nowhere", &source, text(&absent)], 3, &["/nowhere"]);
    assert!(!absent.exists());
}

/// Kills a copy when its journal has records.
fn kill_with_records(args: &[&str], journal: &Path) {
    let mut child = Command::new(OURS).arg("copy").args(args).spawn().unwrap();
    tools::until("there are records", || {
        assert!(child.try_wait().unwrap().is_none(), "it ended before it was killed");
        std::fs::metadata(journal).is_ok_and(|data| data.len() > 4096)
    });
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn ranges_that_share_segments_are_all_there_after_a_kill() {
    let scratch = ScratchDir::new().unwrap();
    let [disk, list, journal] = ["disk", "list", "journal"].map(|name| scratch.file(name));
    let size = 64 << 20;
    let (ranges, lines) = spread(64);
    std::fs::write(&list, lines).unwrap();
    std::fs::write(&disk, vec![0xa5; size]).unwrap();
    let mut expected = vec![0xa5; size];
    let bytes = pattern(size);
    for &(at, len) in &ranges {
        let place = at as usize..(at + len) as usize;
        expected[place.clone()].copy_from_slice(&bytes[place]);
    }
    let source = format!("pattern:{size}");
    let args = ["--ranges", text(&list), "--journal", text(&journal)];
    let both = [source.as_str(), text(&disk)];
    let slow = ["--journal-interval", "50ms", "--rate", "1M", "--request-size", "64k"];
    kill_with_records(&[&args[..], &slow, &both].concat(), &journal);
    // Other ranges are another copy.
    let other = scratch.file("other");
    std::fs::write(&other, "[{\"offset\": 0, \"length\": 512}, {\"offset\": 9000, \"length\": 1}]")
        .unwrap();
    let wrong = ["--ranges", text(&other), "--journal", text(&journal)];
    fails(&[&wrong[..], &both].concat(), 1, &["other ranges", "--restart"]);
    let said = copies(&[&args[..], &both].concat());
    assert!(said.contains("of an earlier run"), "{said}");
    assert!(std::fs::read(&disk).unwrap() == expected);
    assert!(!journal.exists());
}

#[test]
fn a_target_that_is_said_to_be_zero_is_looked_at() {
    let scratch = ScratchDir::new().unwrap();
    let disk = scratch.file("disk");
    let size = 8 << 20;
    let serve = |name: &str| {
        let socket = scratch.socket(name);
        let mut command = Command::new(OURS);
        command.args(["serve", "-f", "--exit-with-parent", "-U"]).arg(&socket).arg(&disk);
        PeerServer::start(command, &socket).unwrap()
    };
    std::fs::File::create(&disk).unwrap().set_len(size).unwrap();
    let file = std::fs::File::options().write(true).open(&disk).unwrap();
    {
        let server = serve("empty");
        copies(&["--target-is-zero", "--verify", "pattern:8M?data=64k&hole=64k", &server.uri("")]);
    }
    // One block of what is there: found by the extents, wherever it is.
    file.set_len(0).unwrap();
    file.set_len(size).unwrap();
    file.write_all_at(b"something", 5_555_555).unwrap();
    let server = serve("full");
    let uri = server.uri("");
    let source = "pattern:8M?data=64k&hole=64k";
    fails(&["--target-is-zero", source, &uri], 5, &["there is data at offset 55"]);
    let copied = copies(&["--target-is-zero", "--trust", source, &uri]);
    assert!(copied.contains("4194304 skipped"), "{copied}");
    // Without the promise what the target calls zero is left out, and nothing else.
    copies(&["--verify", source, &uri]);
}

/// Peak memory of a copy in KiB, without the pages of its program's file: of a program that is not
/// optimized they are twice as many, 23 MiB.
fn peak(args: &[&str]) -> u64 {
    // On a busy machine a short one may end before it is looked at.
    (0..100).find_map(|_| peak_seen(args)).expect("it is seen once")
}

fn peak_seen(args: &[&str]) -> Option<u64> {
    let mut command = Command::new(OURS);
    command.arg("copy").args(args).stderr(std::process::Stdio::null());
    let mut child = command.spawn().unwrap();
    let status = format!("/proc/{}/status", child.id());
    let mut peak = None;
    tools::until("it has ended", || {
        let text = std::fs::read_to_string(&status).unwrap_or_default();
        // The kernel's own mark of the most only grows. Once the program has ended it is gone.
        let Some(most) = tools::status_kib(&text, "VmHWM") else { return true };
        // The name changes after the memory: before that, this is the memory of the tests.
        if text.starts_with("Name:\tblockhaul\n") {
            let of_file = tools::status_kib(&text, "RssFile").unwrap();
            peak = peak.max(Some(most.saturating_sub(of_file)));
        }
        false
    });
    let ended = child.wait().unwrap();
    assert!(ended.success(), "{args:?}: {ended}");
    peak
}

/// Most that a copy may take, in KiB: 36 MiB for what is in flight, and its own.
const MOST: u64 = 48 << 10;

#[test]
fn a_copy_needs_little_memory_whatever_it_copies() {
    for args in [
        &["zero:16T", "null:"][..],
        // 10 million extents.
        &["zero:40G?runs=4k", "null:"],
        &["[", "blockhaul", "serve", "zero:40G?runs=4k", "]", "null:"],
        &["pattern:512M?data=4k&hole=4k", "null:"],
        // A slow source, whose extents are cached.
        &[
            "--source-layer",
            "delay?extents=25ms",
            "[",
            OURS,
            "serve",
            "zero:16G?runs=4k",
            "]",
            "null:",
        ],
    ] {
        let peak = peak(args);
        assert!(peak < MOST, "{args:?}: {peak} KiB");
    }
    // A long path: everything that may be in flight is.
    let scratch = ScratchDir::new().unwrap();
    let disk = scratch.file("disk");
    let args = ["--source-layer", "delay?read=50ms", "--verify", "pattern:120M", text(&disk)];
    // A delayed sampler sees less than there was, never more.
    let mut seen = Vec::new();
    while seen.last().is_none_or(|peak| *peak < 20 << 10) {
        assert!(seen.len() < 20, "{args:?}: {seen:?} KiB");
        let peak = peak(&args);
        assert!(peak < MOST, "{args:?}: {peak} KiB");
        seen.push(peak);
    }
}

/// Bytes that a file takes on the disk.
fn allocated(path: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt as _;
    std::fs::metadata(path).unwrap().blocks() * 512
}

#[test]
fn what_is_copied_is_discarded_at_the_source() {
    let scratch = ScratchDir::new().unwrap();
    let [source, target, journal] = ["source", "target", "journal"].map(|name| scratch.file(name));
    let from = text(&source);
    let to = text(&target);
    let bytes = pattern(8 << 20);
    let fill = || std::fs::write(&source, &bytes).unwrap();
    fill();
    let said = copies(&["--discard-source", "--journal", text(&journal), from, to]);
    assert!(said.contains("8388608 bytes discarded at the source"), "{said}");
    assert!(said.contains(&format!("; the journal {} stays", journal.display())), "{said}");
    assert!(std::fs::read(&target).unwrap() == bytes);
    std::fs::remove_file(&journal).unwrap();
    assert_eq!(allocated(&source), 0);
    assert_eq!(std::fs::metadata(&source).unwrap().len(), 8 << 20);
    // Only what was copied, in whole blocks.
    fill();
    let fresh = |name: &str| format!("--journal={}", scratch.file(name).display());
    copies(&["--discard-source", &fresh("part"), "--range", "1000:1M", from, to]);
    let mut left = bytes.clone();
    left[4096..(1 << 20)].fill(0);
    assert!(std::fs::read(&source).unwrap() == left);
    // What cannot be discarded stays, and is said.
    fill();
    let kept = fresh("kept");
    let args = ["--discard-source", &kept, "--source-layer", "error?trim=100%", from, to];
    let said = copies(&args);
    assert!(said.contains("warning: 8388608 bytes could not be discarded"), "{said}");
    assert!(std::fs::read(&source).unwrap() == bytes);

    // A copy that fails, and goes on with its journal.
    let args = ["--discard-source", "--journal", text(&journal), "--journal-interval", "1ms"];
    let more = ["--segment", "64k", "--request-size", "16k", "-C", "1", "--retries", "0"];
    let fault = ["--target-layer", "error?write=100%&at=6M,1M", from, to];
    let failing = [&args[..], &more, &fault].concat();
    fails(&failing, 5, &["the target failed"]);
    assert!(allocated(&source) < 8 << 20);
    fails(&["--journal", text(&journal), from, to], 1, &["with --discard-source", "target only"]);
    fails(
        &["--journal", text(&journal), "--restart", "--discard-source", from, to],
        1,
        &["is on the target only"],
    );
    let said = copies(&[&args[..], &more, &[from, to]].concat());
    assert!(said.contains("of an earlier run"), "{said}");
    assert!(std::fs::read(&target).unwrap() == bytes);
    // Before the target is touched.
    fill();
    std::fs::write(&target, "old").unwrap();
    let refused = |args: &[&str], status, words: &[&str]| {
        let journal = fresh("refused");
        fails(&[&["--discard-source", &journal], args].concat(), status, words);
        assert!(
            std::fs::read(&target).unwrap() == b"old" && std::fs::read(&source).unwrap() == bytes
        );
    };
    refused(&["pattern:1M", to], 3, &["read-only: make it writable"]);
    refused(&["--source-layer", "readonly", from, to], 3, &["read-only"]);
    refused(&["/no/such", to], 3, &["cannot open the source", "/no/such"]);
    fails(&["--discard-source", from, to], 2, &["needs a journal", "--journal FILE"]);
    for pipe in [["-", to], [from, "-"]] {
        refused(&pipe, 2, &["pipe"]);
        fails(&[&["--discard-source"], &pipe[..]].concat(), 2, &["a pipe can neither"]);
    }
    for option in ["--verify", "--digest=blake3", "--manifest=m", "--since=m"] {
        refused(&[option, from, to], 2, &["reads the source a second time"]);
    }
    let list = scratch.file("job.toml");
    let job = format!("[[disk]]\nsource = {from:?}\ntarget = {to:?}\ndiscard-source = true\n");
    std::fs::write(&list, &job).unwrap();
    fails(&["--job", text(&list)], 2, &["needs a journal"]);
    let other = text(&journal);
    let two =
        format!("{job}journal = {other:?}\n[[disk]]\nsource = {from:?}\ntarget = \"other\"\n");
    std::fs::write(&list, two).unwrap();
    fails(&["--job", text(&list)], 2, &["has the same source"]);
    assert!(std::fs::read(&target).unwrap() == b"old" && std::fs::read(&source).unwrap() == bytes);
}

/// Serves a file, and returns the server.
fn serve(scratch: &ScratchDir, name: &str, args: &[&str]) -> PeerServer {
    PeerServer::blockhaul(OURS.as_ref(), &scratch.socket(name), args).unwrap()
}

/// Runs a command whose copy is complete: it says so in one line.
#[track_caller]
fn says_complete(args: &[&str], disk: &str, journal: &Path) {
    let output = run(&[&["copy", "--no-progress"], args].concat());
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{args:?}: {said}");
    let line =
        format!("blockhaul: copy: {disk}nothing is copied: the journal {}", journal.display());
    let lines: Vec<_> = said.lines().filter(|said| said.starts_with(&line)).collect();
    let [line] = lines[..] else { panic!("{args:?}: {said}") };
    assert!(line.contains(&format!("remove {} only if", journal.display())), "{line}");
    assert!(line.contains("another journal and another target"), "{line}");
}

#[test]
fn a_copy_that_has_discarded_its_source_is_not_repeated() {
    let scratch = ScratchDir::new().unwrap();
    let [source, target, journal] = ["source", "target", "journal"].map(|name| scratch.file(name));
    let bytes = pattern(4 << 20);
    std::fs::write(&source, &bytes).unwrap();
    std::fs::write(&target, vec![1; 4 << 20]).unwrap();
    let server = serve(&scratch, "s", &[text(&target)]);
    let uri = server.uri("");
    let args = ["--discard-source", "--journal", text(&journal), "--range", "1M:2M", text(&source)];
    let again = [&args[..], &[&uri]].concat();
    copies(&again);
    assert_eq!(allocated(&source), 2 << 20);
    server.stop().unwrap();
    // The target cannot be written now, and the source is in use again.
    let server = serve(&scratch, "s", &["-r", text(&target)]);
    assert_eq!(server.uri(""), uri);
    let used = vec![7; 4 << 20];
    std::fs::write(&source, &used).unwrap();
    says_complete(&again, "", &journal);
    let mut expected = vec![1; 4 << 20];
    expected[1 << 20..3 << 20].copy_from_slice(&bytes[1 << 20..3 << 20]);
    let untouched = || {
        assert!(std::fs::read(&source).unwrap() == used && journal.exists());
        assert!(std::fs::read(&target).unwrap() == expected);
    };
    untouched();
    // The journal is that of this copy alone.
    let part = ["--discard-source", "--journal", text(&journal), text(&source), &uri];
    fails(
        &part,
        1,
        &[text(&journal), "another range", "the journal of another copy", "another target"],
    );
    fails(&again[1..], 1, &["with --discard-source", "another journal and another target"]);
    fails(&[&["--restart"], &again[..]].concat(), 1, &["is complete", "remove this file only if"]);
    server.stop().unwrap();
    let gone = ["cannot open the target", "its source was discarded", text(&journal)];
    fails(&again, 3, &gone);
    untouched();
    std::fs::remove_file(&journal).unwrap();
    let _server = serve(&scratch, "s", &[text(&target)]);
    copies(&again);
    assert!(std::fs::read(&target).unwrap()[1 << 20..3 << 20] == used[1 << 20..3 << 20]);
    // Where nothing was discarded, the journal is not needed any more.
    std::fs::remove_file(&journal).unwrap();
    let few = ["--discard-source", "--journal", text(&journal), "--range", "1:100"];
    copies(&[&few[..], &[text(&source), &uri]].concat());
    assert!(!journal.exists());
}

#[test]
fn disks_of_a_job_that_have_discarded_their_source_are_not_copied_again() {
    let scratch = ScratchDir::new().unwrap();
    let file = |name: &str| scratch.file(name);
    let bytes = pattern(1 << 20);
    let names = ["one", "two", "plain"];
    for name in names {
        std::fs::write(file(name), &bytes).unwrap();
    }
    std::fs::write(file("ranges"), "[{\"start\": 0, \"length\": 65536}]").unwrap();
    let job = |fault: &str| {
        let disk = |name: &str, more: &str| {
            let [from, to, journal] =
                ["", ".copy", ".journal"].map(|end| file(&format!("{name}{end}")));
            format!(
                "[[disk]]\nname = {name:?}\nsource = {from:?}\ntarget = {to:?}\njournal = {journal:?}\n{more}\n"
            )
        };
        let ranges = format!("discard-source = true\nranges = {:?}", file("ranges"));
        let text = disk("one", &ranges)
            + &disk("two", &format!("discard-source = true\n{fault}"))
            + &disk("plain", "");
        std::fs::write(file("job.toml"), text).unwrap();
    };
    let path = file("job.toml");
    let args = ["--job", text(&path)];
    job("target-layer = [\"error?write=100%\"]\nretries = 0");
    fails(&args, 5, &["disk two", "2 of 3 disks are complete"]);
    let journals = names.map(|name| file(&format!("{name}.journal")));
    assert!(journals.iter().all(|journal| journal.exists()));
    job("");
    says_complete(&args, "disk one: ", &journals[0]);
    assert_eq!(journals.each_ref().map(|journal| journal.exists()), [true, true, false]);
    says_complete(&args, "disk one: ", &journals[0]);
    says_complete(&args, "disk two: ", &journals[1]);
    for name in ["two", "plain"] {
        assert!(std::fs::read(file(&format!("{name}.copy"))).unwrap() == bytes, "{name}");
    }
    assert!(std::fs::read(file("one.copy")).unwrap()[..65536] == bytes[..65536]);
    assert_eq!((allocated(&file("two")), allocated(&file("plain"))), (0, 1 << 20));
}

/// A copy that discards its source, and is killed.
struct DiscardingCopy {
    scratch: ScratchDir,
    bytes: Vec<u8>,
}

impl DiscardingCopy {
    fn new(len: usize) -> DiscardingCopy {
        DiscardingCopy { scratch: ScratchDir::new().unwrap(), bytes: pattern(len) }
    }

    fn fill(&self) {
        std::fs::write(self.scratch.file("source"), &self.bytes).unwrap();
        for name in ["target", "journal"] {
            let _ = std::fs::remove_file(self.scratch.file(name));
        }
    }

    fn command(&self, more: &[&str]) -> Command {
        let mut command = Command::new(OURS);
        command.current_dir(self.scratch.path()).stderr(std::process::Stdio::null());
        command.args(["copy", "--no-progress", "--discard-source", "--journal=journal"]);
        command.args(["--journal-interval=1ms", "--request-size=16k"]);
        command.args(more).args(["source", "target"]);
        command
    }

    fn journal(&self) -> u64 {
        std::fs::metadata(self.scratch.file("journal")).map_or(0, |data| data.len())
    }

    /// Runs it, and kills it when `now` is true. False: it has ended before.
    fn kill_when(&self, more: &[&str], now: impl Fn() -> bool) -> bool {
        let mut child = self.command(more).spawn().unwrap();
        while !now() {
            if child.try_wait().unwrap().is_some() {
                return false;
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        child.kill().unwrap();
        !child.wait().unwrap().success()
    }

    /// Runs the same command until it succeeds, and once more: the copy is right each time.
    #[track_caller]
    fn is_right(&self, what: &str) {
        for _ in 0..2 {
            assert!(self.command(&[]).status().unwrap().success(), "{what}");
            let target = std::fs::read(self.scratch.file("target")).unwrap();
            assert!(target == self.bytes, "{what}");
        }
    }
}

#[test]
fn a_discarding_copy_that_is_killed_while_it_flushes_or_discards_loses_nothing() {
    let copy = DiscardingCopy::new(1 << 20);
    let one = ["-C", "1", "--segment=1M"];
    let is_empty = || allocated(&copy.scratch.file("source")) == 0;
    let target = copy.scratch.file("target");
    let is_written = || target.exists() && allocated(&target) >= 1 << 20;
    // The header, and the record that the marker leaves: before that of the only segment.
    let leaving = 4096 + 32;
    // All is written, and not flushed.
    let flushing = [&one[..], &["--target-layer", "delay?flush=10s"]].concat();
    copy.fill();
    assert!(copy.kill_when(&flushing, is_written));
    assert!(copy.journal() <= leaving && !is_empty());
    copy.is_right("killed before the flush");
    // All is recorded, and nothing is discarded.
    let discarding = [&one[..], &["--source-layer", "delay?trim=10s"]].concat();
    copy.fill();
    assert!(copy.kill_when(&discarding, || copy.journal() > leaving));
    assert!(!is_empty());
    copy.is_right("killed before the discard");
    // All is discarded; that it is complete may be recorded or not.
    copy.fill();
    copy.kill_when(&one, is_empty);
    copy.is_right("killed after the discard");
}

#[test]
fn a_discarding_copy_that_is_killed_at_any_moment_goes_on_with_the_same_command() {
    use blockhaul_testkit::rng::{Rng, seed};
    let seed = seed();
    println!("BLOCKHAUL_SEED={seed}");
    let mut random = Rng::new(seed);
    let copy = DiscardingCopy::new(2 << 20);
    copy.fill();
    let begun = std::time::Instant::now();
    copy.is_right("not killed");
    // Of one of the two runs, and a bit more.
    let longest = begun.elapsed().as_micros() as u64 * 3 / 4;
    let wanted = if std::env::var_os("BLOCKHAUL_LONG").is_some() { 250 } else { 6 };
    let mut kills = 0;
    // Of which so many were between the first record and the last.
    let mut within = 0;
    while kills < wanted {
        copy.fill();
        // Each in a run of its own, and of the same copy.
        for _ in 0..4 {
            let moment = Duration::from_micros(random.below(longest.max(1)));
            let begun = std::time::Instant::now();
            let killed = copy.kill_when(&["--segment=64k"], || begun.elapsed() >= moment);
            kills += u32::from(killed);
            within += u32::from(killed && copy.journal() > 4096);
        }
        copy.is_right(&format!("{kills} kills"));
    }
    println!("{kills} kills, {within} of them with something recorded");
}
