//! The options of `blockhaul copy` mean what nbdcopy's mean: seen in what arrives at a server, and in
//! the files.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use blockhaul_testkit::image;
use blockhaul_testkit::model::Model;
use blockhaul_testkit::peer::{self, Offer, ScriptedServer};
use blockhaul_testkit::require_peer;
use blockhaul_testkit::rng;
use blockhaul_testkit::tools::{PeerProgram, PeerServer, ScratchDir};
use blockhaul_tests::{
    LIMIT, allocated, assert_same, blockhaul, bounded, done, garbage, lossy, nonzero, peer,
    program, serve, succeed, text,
};

/// A request in the format of nbdkit's log filter.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Seen {
    at: u64,
    len: u64,
    op: String,
    /// Of zeroes: a hole may be made.
    trim: bool,
}

/// The requests in a log, in the order of their arrival. Reads of what was written, which find out
/// whether connections see the same disk, are left out.
fn seen(log: &Path) -> Vec<Seen> {
    let log = fs::read_to_string(log).unwrap();
    let parse = |line: &str| {
        let mut words = line.split(' ').skip(3);
        let op = words.next()?;
        if !["Write", "Zero", "Trim", "Flush"].contains(&op) {
            return None;
        }
        let value = |name: &str| {
            let mut values = line.split(' ').filter_map(|word| word.strip_prefix(name));
            values.next()
        };
        let number = |name: &str| {
            let text = value(name).unwrap_or("0x0").strip_prefix("0x").unwrap();
            u64::from_str_radix(text, 16).unwrap()
        };
        let trim = value("trim=") == Some("1");
        Some(Seen { at: number("offset="), len: number("count="), op: op.to_owned(), trim })
    };
    log.lines().filter_map(parse).collect()
}

/// Copies a source to nbdkit's memory, and returns what arrived.
fn arriving(nbdkit: &PeerProgram, size: &str, options: &[&str], source: &[&str]) -> Vec<Seen> {
    let scratch = ScratchDir::new().unwrap();
    let log = scratch.file("log");
    let logfile = format!("logfile={}", text(&log));
    let args = ["--filter=log", "memory", size, &logfile];
    let server = PeerServer::nbdkit(nbdkit, &scratch.socket("s"), &args).unwrap();
    succeed(&[&["copy"], options, &["--"], source, &[&server.uri("")]].concat());
    server.stop().unwrap();
    seen(&log)
}

/// One byte at the start and one at the end of 1 GiB, from a server with extents of 32 KiB.
const ENDS: [&str; 5] = ["[", "nbdkit", "data", "1 @1073741823 1", "]"];

fn write(at: u64, len: u64) -> Seen {
    Seen { at, len, op: "Write".into(), trim: false }
}

fn zero(at: u64, len: u64, trim: bool) -> Seen {
    Seen { at, len, op: "Zero".into(), trim }
}

/// Segments of 128 MiB, holes in them as long as they are, requests in full.
fn ends_and_holes(trim: bool) -> Vec<Seen> {
    let small = 32 << 10;
    let segment = 128 << 20;
    let size = 1 << 30;
    let mut expected = vec![write(0, small), zero(small, segment - small, trim)];
    expected.extend((1..7).map(|n| zero(n * segment, segment, trim)));
    expected.push(zero(7 * segment, segment - small, trim));
    expected.push(write(size - small, small));
    expected
}

#[test]
fn holes_are_zeroed_a_segment_at_a_time() {
    let nbdkit = require_peer!("nbdkit");
    let options = ["-S", "0", "--request-size=32k", "--zero-all", "--segment=128M"];
    let mut seen = arriving(&nbdkit, "1G", &options, &ENDS);
    seen.sort();
    assert_eq!(seen, ends_and_holes(true));
    // Ranges that the target reports as zero are skipped by default.
    let seen = arriving(&nbdkit, "1G", &options[..3], &ENDS);
    assert!(seen.len() == 2 && seen.iter().all(|seen| seen.op == "Write"), "{seen:?}");
    let options = ["-S", "0", "--request-size=32k", "--zero-all", "--segment=128M", "--allocated"];
    let mut seen = arriving(&nbdkit, "1G", &options, &ENDS);
    seen.sort();
    assert_eq!(seen, ends_and_holes(false));
}

#[test]
fn without_extents_and_detection_everything_is_written() {
    let nbdkit = require_peer!("nbdkit");
    let options = ["-S", "0", "--no-extents", "--request-size=32M"];
    let mut seen = arriving(&nbdkit, "1G", &options, &ENDS);
    seen.sort();
    let whole: Vec<_> = (0..32).map(|n| write(n << 25, 1 << 25)).collect();
    assert_eq!(seen, whole);
    let options = ["-S", "0", "--request-size=1M"];
    let mut seen = arriving(&nbdkit, "32M", &options, &["[", "nbdkit", "pattern", "32M", "]"]);
    seen.sort();
    let whole: Vec<_> = (0..32).map(|n| write(n << 20, 1 << 20)).collect();
    assert_eq!(seen, whole);
}

#[test]
fn zeroes_are_left_out_where_the_target_is_zero() {
    let nbdkit = require_peer!("nbdkit");
    for option in ["--destination-is-zero", "--target-is-zero"] {
        let seen = arriving(&nbdkit, "1G", &[option, "--request-size=32k"], &ENDS);
        assert!(seen.iter().all(|seen| seen.op == "Write"), "{seen:?}");
        assert!(seen.iter().map(|seen| seen.len).sum::<u64>() <= 64 << 10, "{seen:?}");
    }
}

#[test]
fn flush_is_the_last_request() {
    let nbdkit = require_peer!("nbdkit");
    let source = ["sample:32M"];
    for connections in ["1", "4"] {
        let options = ["--flush", "-C", connections];
        let seen = arriving(&nbdkit, "32M", &options, &source);
        assert_eq!(seen.last().map(|seen| &*seen.op), Some("Flush"), "{seen:?}");
        let seen = arriving(&nbdkit, "32M", &options[1..], &source);
        assert!(seen.iter().all(|seen| seen.op != "Flush"), "{seen:?}");
    }
}

#[test]
fn every_option_gives_the_same_bytes() {
    let scratch = ScratchDir::new().unwrap();
    let image = scratch.file("image");
    let target = scratch.file("target");
    let seed = rng::seed();
    println!("BLOCKHAUL_SEED={seed}");
    let size = (12 << 20) + 777;
    image::sparse(&image, size, seed).unwrap();
    let data = nonzero(&image, 4096).unwrap();
    let held = allocated(&image, 4096).unwrap();
    let from = serve(&scratch, "s", &["-r", text(&image)]);
    let sets: [&[&str]; 24] = [
        &["-C", "1"],
        &["-C", "16", "-R", "1"],
        &["-R", "256"],
        &["--request-size=4k"],
        &["--request-size=32M"],
        &["--queue-size=4k"],
        &["-S", "0"],
        &["-S", "4096"],
        &["-S", "4096", "-R", "256"],
        &["-S", "512"],
        &["-S", "64k"],
        &["--allocated"],
        &["--allocated", "-S", "512", "--no-extents"],
        &["--no-extents"],
        &["--no-extents", "-S", "0"],
        &["--flush"],
        &["--synchronous"],
        &["-T", "1"],
        &["-T", "5", "-C", "3"],
        &["--engine", "threads"],
        &["--timeout", "0"],
        &["-p=2"],
        &["--connections=2", "--requests=7", "--request-size=64k", "--threads=2"],
        &["--source-layer", "stats", "--target-layer", "stats"],
    ];
    for (number, options) in sets.into_iter().enumerate() {
        for by_server in [false, true] {
            let what = format!("{options:?}, to a server: {by_server}");
            garbage(&target, size).unwrap();
            let to = by_server.then(|| serve(&scratch, &format!("t{number}"), &[text(&target)]));
            let address = to.as_ref().map_or(text(&target).to_owned(), |server| server.uri(""));
            succeed(&[&["copy", "--verify"], options, &[&from.uri(""), &address]].concat());
            drop(to);
            assert_same(&image, &target, &what);
            let stored = image::space(&target).unwrap().allocated;
            if options.contains(&"--allocated") {
                assert!(stored >= size, "{what}: holes were made, {stored} bytes are stored");
            } else if options.contains(&"4096") {
                assert!(stored <= data + 65536, "{what}: {stored} bytes for {data} of data");
            } else if !options.contains(&"0") {
                assert!(stored <= held + 65536, "{what}: {stored} bytes, the source {held}");
            }
        }
    }
}

#[test]
fn pipes_are_sources_and_targets() {
    let nbdkit = require_peer!("nbdkit");
    let nbdcopy = require_peer!("nbdcopy");
    let scratch = ScratchDir::new().unwrap();
    let image = scratch.file("image");
    let target = scratch.file("target");
    let seed = rng::seed();
    println!("BLOCKHAUL_SEED={seed}");
    let size = (40 << 20) + 12_345;
    image::sparse(&image, size, seed).unwrap();
    let from = serve(&scratch, "s", &["-r", text(&image)]);
    let shell = |line: &str, uri: &str| {
        let mut command = Command::new("sh");
        command.args(["-c", line]).arg(program()).args([uri, text(&image), text(&target)]);
        done(&mut command);
    };
    shell("\"$0\" copy \"$1\" - | cat > \"$3\"", &from.uri(""));
    assert_same(&image, &target, "to a pipe");
    // Redirected to a file.
    shell("\"$0\" copy \"$1\" - > \"$3\"", &from.uri(""));
    assert_same(&image, &target, "to a file by redirection");
    garbage(&target, size + 4096).unwrap();
    shell("cat \"$2\" | \"$0\" copy - \"$3\"", "");
    assert_same(&image, &target, "from a pipe to a file");
    shell("\"$0\" copy - \"$3\" < \"$2\"", "");
    assert_same(&image, &target, "from a file by redirection");
    let memory = size.to_string();
    let to = PeerServer::nbdkit(&nbdkit, &scratch.socket("k"), &["memory", &memory]).unwrap();
    shell(
        "(head -c 100 \"$2\"; sleep 0.2; tail -c +101 \"$2\") | \"$0\" copy - \"$1\"",
        &to.uri(""),
    );
    fs::remove_file(&target).unwrap();
    peer(&nbdcopy, &[&to.uri(""), text(&target)]);
    assert_same(&image, &target, "from a slow pipe to a server");
    // A closed pipe is a failure without a long message.
    shell("\"$0\" copy \"$1\" - | head -c 1000 > \"$3\"", &from.uri(""));
    image::compare_ranges((&image, 0), (&target, 0), 1000).unwrap();
    // More comes than fits.
    let small = serve(&scratch, "small", &["memory:1M"]);
    let mut command = Command::new("sh");
    command.args(["-c", "exec \"$0\" copy - \"$1\" < \"$2\""]).arg(program());
    let output = bounded(command.args([&small.uri(""), text(&image)]), LIMIT);
    assert!(!output.status.success());
    assert_eq!(lossy(&output.stderr).lines().count(), 1, "{}", lossy(&output.stderr));
}

/// After a copy was killed at any time, the same command gives the right bytes.
#[test]
fn a_killed_copy_can_be_done_again() {
    let scratch = ScratchDir::new().unwrap();
    let image = scratch.file("image");
    let target = scratch.file("target");
    let seed = rng::seed();
    println!("BLOCKHAUL_SEED={seed}");
    let size = 32 << 20;
    image::sparse(&image, size, seed).unwrap();
    let from = serve(&scratch, "s", &["-r", text(&image)]);
    // None of them ends before it is killed.
    let slow = serve(&scratch, "slow", &["-r", "--layer", "rate?rate=1M", text(&image)]);
    File::create(&target).unwrap().set_len(size).unwrap();
    let to = serve(&scratch, "t", &[text(&target)]);
    for millis in [30, 100, 200] {
        let mut copy = blockhaul(&["copy", &slow.uri(""), &to.uri("")]);
        let mut copy = copy.spawn().unwrap();
        std::thread::sleep(std::time::Duration::from_millis(millis));
        copy.kill().unwrap();
        assert!(!copy.wait().unwrap().success());
    }
    succeed(&["copy", &from.uri(""), &to.uri("")]);
    assert_same(&image, &target, "after copies that were killed");
}

/// Starts a server whose export has blocks of 4096 bytes and a size that is no multiple of that. It
/// refuses parts of blocks, also at the end, or serves them.
fn with_tail(
    nbdkit: &PeerProgram,
    scratch: &ScratchDir,
    name: &str,
    file: &Path,
    policy: &str,
) -> PeerServer {
    let file = format!("file={}", text(file));
    let policy = format!("blocksize-error-policy={policy}");
    let policy = ["blocksize-minimum=4096", &policy];
    let args = [&["--filter=blocksize-policy", "file", &file], &policy[..]].concat();
    PeerServer::nbdkit(nbdkit, &scratch.socket(name), &args).unwrap()
}

/// A copy that has to be refused, with what the message says; the target stays as it is.
fn refused_before_a_byte(from: &str, to: &str, target: &Path, says: &[&str]) {
    let before = fs::read(target).unwrap();
    let output = bounded(&mut blockhaul(&["copy", from, to]), LIMIT);
    let said = lossy(&output.stderr);
    assert!(!output.status.success(), "{from} to {to} succeeded");
    assert!(says.iter().all(|words| said.contains(words)), "{said}");
    assert!(fs::read(target).unwrap() == before, "{from} to {to} changed the target: {said}");
}

#[test]
fn sizes_that_are_no_multiple_of_the_servers_blocks() {
    let nbdkit = require_peer!("nbdkit");
    let scratch = ScratchDir::new().unwrap();
    let whole = 256 << 10;
    let size = (256 << 10) + 200;
    let image = scratch.file("image");
    let mut bytes = vec![0; size];
    rng::Rng::new(rng::seed()).fill(&mut bytes);
    fs::write(&image, &bytes).unwrap();
    let target = scratch.file("target");
    garbage(&target, size as u64).unwrap();

    let from = with_tail(&nbdkit, &scratch, "from", &image, "error");
    let to = with_tail(&nbdkit, &scratch, "to", &target, "error");
    let says = ["the last 200 of", "cannot be read", "--range 0:262144"];
    refused_before_a_byte(&from.uri(""), text(&target), &target, &says);
    let says = ["the last 200 of", "cannot be written"];
    refused_before_a_byte(text(&image), &to.uri(""), &target, &says);
    // What the advice says works, onto a part of it all as well.
    for range in ["0:262144", "0:262000", "0:5000"] {
        garbage(&target, size as u64).unwrap();
        succeed(&["copy", "--range", range, &from.uri(""), &to.uri("")]);
        let len: usize = range[2..].parse().unwrap();
        let copied = fs::read(&target).unwrap();
        assert!(copied[..len] == bytes[..len], "{range}");
        assert!(copied[len..].iter().all(|&byte| byte == 0xA5), "{range}");
    }
    // A source that ends within a block of the target.
    let short = scratch.file("short");
    fs::write(&short, &bytes[..whole - 100]).unwrap();
    garbage(&target, size as u64).unwrap();
    succeed(&["copy", text(&short), &to.uri("")]);
    let copied = fs::read(&target).unwrap();
    assert!(copied[..whole - 100] == bytes[..whole - 100]);
    assert!(copied[whole - 100..].iter().all(|&byte| byte == 0xA5));

    // A server that serves the end, although its blocks are larger.
    let from = with_tail(&nbdkit, &scratch, "from-allow", &image, "allow");
    let to = with_tail(&nbdkit, &scratch, "to-allow", &target, "allow");
    garbage(&target, size as u64).unwrap();
    succeed(&["copy", "--verify", &from.uri(""), &to.uri("")]);
    assert_same(&image, &target, "through blocks of 4096 bytes");
    let map = succeed(&["map", "--json", &from.uri("")]);
    let map: serde_json::Value = serde_json::from_str(&map).unwrap();
    let lengths = map.as_array().unwrap().iter().map(|run| run["length"].as_u64().unwrap());
    assert_eq!(lengths.sum::<u64>(), size as u64, "{map}");

    // Our layer omits the tail where the device gets whole blocks.
    let lacking =
        serve(&scratch, "lacking", &["-r", "--layer", "blocksize?minblock=4k", text(&image)]);
    succeed(&["copy", &lacking.uri(""), text(&target)]);
    assert!(fs::read(&target).unwrap() == bytes[..whole]);
    for policy in ["allow", "error"] {
        let layer = format!("blocksize?minimum=4k&error-policy={policy}");
        let told = serve(&scratch, policy, &["-r", "--layer", &layer, text(&image)]);
        let copied = scratch.file("copied");
        succeed(&["copy", &told.uri(""), text(&copied)]);
        assert_same(&image, &copied, policy);
        read_by_peers(&told, &image, &scratch);
    }
    // A script with blocks of 4096 bytes gets whole ones, but for the end.
    let script = scratch.file("methods.sh");
    let methods = format!(
        r#"#!/bin/sh
case "$1" in
get_size) echo {size} ;;
block_size) echo 4096 4096 1048576 ;;
pread)
  if [ $(( $4 % 4096 )) -ne 0 ] || [ $(( $3 % 4096 )) -ne 0 -a $(( $3 + $4 )) -ne {size} ]; then
    echo "EINVAL $3 at $4" >&2; exit 1
  fi
  dd if={} skip=$4 count=$3 iflag=skip_bytes,count_bytes status=none ;;
*) exit 2 ;;
esac"#,
        text(&image)
    );
    fs::write(&script, methods).unwrap();
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
    let told = serve(&scratch, "script", &["-r", &format!("sh:{}", text(&script))]);
    read_by_peers(&told, &image, &scratch);
}

/// Other programs read all of an export.
fn read_by_peers(server: &PeerServer, image: &Path, scratch: &ScratchDir) {
    let uri = server.uri("");
    let size = fs::metadata(image).unwrap().len();
    let copied = scratch.file("copied by a peer");
    peer(&require_peer!("nbdcopy"), &[&uri, text(&copied)]);
    assert_same(image, &copied, "nbdcopy");
    let convert = ["convert", "-f", "raw", "-O", "raw", &uri, text(&copied)];
    peer(&require_peer!("qemu-img"), &convert);
    let read = fs::read(&copied).unwrap();
    assert!(read[..size as usize] == fs::read(image).unwrap(), "qemu-img");
    let map = peer(&require_peer!("nbdinfo"), &["--map", "--totals", &uri]);
    assert!(map.contains(&size.to_string()), "{map}");
}

#[test]
fn a_tail_is_written_by_a_request_that_ends_there() {
    let scratch = ScratchDir::new().unwrap();
    let image = scratch.file("image");
    let size = (64 << 10) + 200;
    fs::write(&image, vec![1; size]).unwrap();
    let mut model = Model::all_facts(size as u64);
    model.block.minimum = 512;
    model.zeroed = false;
    let offer = Offer::new(Model::with_facts(model).with_content(vec![2; size]));
    let offer = Arc::new(offer);
    let offered = offer.clone();
    let to = ScriptedServer::start(move |talk, number| {
        let _ = peer::serve(talk, number, &offered);
        Ok(())
    });
    succeed(&["copy", "--range", "0:65536", text(&image), &to.uri()]);
    let written = |at: usize| offer.model.lock().unwrap().bytes()[at];
    assert_eq!([written(65535), written(65536), written(size - 1)], [1, 2, 2]);
    succeed(&["copy", text(&image), &to.uri()]);
    assert!(offer.model.lock().unwrap().bytes() == vec![1; size]);
}

#[test]
fn a_larger_target_keeps_its_end_and_that_is_said_once() {
    let scratch = ScratchDir::new().unwrap();
    let [image, target] = ["image", "target"].map(|name| scratch.file(name));
    fs::write(&image, vec![1; 65536]).unwrap();
    fs::write(&target, vec![2; 70000]).unwrap();
    let to = serve(&scratch, "to", &[text(&target)]);
    let output = bounded(&mut blockhaul(&["copy", text(&image), &to.uri("")]), LIMIT);
    let said = lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    assert_eq!(
        said.matches("larger than the source: its last 4464 bytes are left unchanged").count(),
        1,
        "{said}"
    );
    assert!(fs::read(&target).unwrap() == [vec![1; 65536], vec![2; 4464]].concat());
    // A part of it is what was asked for, and a file gets the size of the source.
    let quiet = |args: &[&str]| {
        let output = bounded(&mut blockhaul(args), LIMIT);
        assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    };
    quiet(&["copy", "--range", "0:4096", text(&image), &to.uri("")]);
    drop(to);
    quiet(&["copy", text(&image), text(&target)]);
    assert_eq!(fs::metadata(&target).unwrap().len(), 65536);
}
