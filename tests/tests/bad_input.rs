//! What is wrong on the command line, at the other end of a connection, or in the storage: one clear
//! line, a documented exit status, no hang, and never success with wrong bytes.
#![allow(clippy::unwrap_used)]

use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use blockhaul_tests::{LIMIT, assert_same, bounded, done, garbage, lossy, serve, succeed, text};
use testkit::arbitrary::Fill;
use testkit::image;
use testkit::model::Model;
use testkit::peer::{HandshakeFault, How, Offer, Scripted, Spoil};
use testkit::require_peer;
use testkit::rng;
use testkit::tools::{Scratch, Server};
use wire::Replies;

/// Exit statuses, as the help documents them.
const USAGE: i32 = 2;
const OPEN: i32 = 3;
const SOURCE: i32 = 4;
const TARGET: i32 = 5;
const FULL: i32 = 6;
const LOST: i32 = 7;

/// Nothing here may take longer, with a `--timeout` of a second or two.
const SOON: Duration = Duration::from_secs(20);

/// Checks the end of a run that has to fail; gives its line.
#[track_caller]
fn refused_by(output: &Output, what: &str, status: i32, words: &[&str]) -> String {
    let said = lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(status), "{what}: {said}");
    assert!(!said.contains("panicked") && !said.contains("RUST_BACKTRACE"), "{what}: {said}");
    let lines: Vec<&str> = said.lines().filter(|line| !line.trim().is_empty()).collect();
    assert_eq!(lines.len(), 1, "{what}: one line, not {said}");
    assert!(lines[0].starts_with("blockhaul: "), "{what}: {said}");
    for word in words {
        assert!(said.contains(word), "{what}: no {word:?} in {said}");
    }
    assert!(output.stdout.is_empty(), "{what}: {}", lossy(&output.stdout));
    lines[0].to_owned()
}

/// Runs a command that has to fail with one line that holds all of the words; gives the line.
#[track_caller]
fn refused(args: &[&str], status: i32, words: &[&str]) -> String {
    let output = bounded(&mut blockhaul(args), SOON);
    refused_by(&output, &format!("{args:?}"), status, words)
}

/// The program under test. What fails is not tried again here: the first failure ends a copy, as it
/// does after the last repetition, which have tests of their own.
fn blockhaul(args: &[&str]) -> Command {
    match args {
        ["copy", rest @ ..] => {
            blockhaul_tests::blockhaul(&[&["copy", "--retries", "0"], rest].concat())
        }
        _ => blockhaul_tests::blockhaul(args),
    }
}

/// A sparse random image.
fn random_image(path: &Path, size: u64) {
    let seed = rng::seed();
    println!("BLOCKHAUL_SEED={seed}");
    image::sparse(path, size, seed).unwrap();
}

/// Starts a copy on another thread and does something after a while; then waits for the copy.
fn meanwhile(args: &[&str], pause: Duration, act: impl FnOnce()) -> Output {
    std::thread::scope(|scope| {
        let copy = scope.spawn(|| bounded(&mut blockhaul(args), SOON + pause));
        std::thread::sleep(pause);
        assert!(!copy.is_finished(), "{args:?} ended before anything happened");
        act();
        copy.join().unwrap()
    })
}

#[test]
fn nobody_listens() {
    let scratch = Scratch::new().unwrap();
    let (absent, target) = (scratch.file("absent"), scratch.file("target"));
    let uri = format!("nbd+unix:///?socket={}", text(&absent));
    refused(&["copy", &uri, text(&target)], OPEN, &["source", text(&absent), "; "]);
    refused(&["copy", text(&absent), text(&target)], OPEN, &["source", text(&absent), "check"]);
    refused(&["copy", "zero:1M", &uri], OPEN, &["target", text(&absent), "; "]);
    refused(&["info", &uri], 1, &[text(&absent)]);
    refused(&["info", "--list", &uri], 1, &[text(&absent)]);
    refused(&["map", text(&absent)], OPEN, &[text(&absent)]);
    refused(
        &["serve", text(&absent), "-f", "-U", text(&scratch.socket("s"))],
        OPEN,
        &[text(&absent)],
    );
    // A port that was free a moment ago.
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let uri = format!("nbd://127.0.0.1:{port}/x");
    refused(&["copy", &uri, text(&target)], OPEN, &["127.0.0.1", &port.to_string(), "refused"]);
    refused(&["info", &uri], 1, &["127.0.0.1", &port.to_string(), "refused"]);
    let name = "nbd://no-such-host.invalid/";
    refused(&["info", name], 1, &["no-such-host.invalid"]);
    assert!(!target.exists(), "nothing came, but a target was made");
}

#[test]
fn exports_that_are_not_there() {
    let qemu_nbd = require_peer!("qemu-nbd");
    let nbdkit = require_peer!("nbdkit");
    let scratch = Scratch::new().unwrap();
    let (image, target) = (scratch.file("image"), scratch.file("target"));
    File::create(&image).unwrap().set_len(1 << 20).unwrap();
    // Of two that might write the second is refused.
    let ours = serve(&scratch, "s", &["-r", "-e", "disk", text(&image)]);
    let args = ["-e", "4", "-x", "disk", "-f", "raw", text(&image)];
    let qemus = Server::qemu_nbd(&qemu_nbd, &scratch.socket("q"), &args).unwrap();
    let dir = format!("dir={}", text(scratch.path()));
    let nbdkits = Server::nbdkit(&nbdkit, &scratch.socket("k"), &["file", &dir]).unwrap();
    for server in [&ours, &qemus, &nbdkits] {
        let uri = server.uri("no such disk");
        let words = ["no such disk", text(server.socket()), "; "];
        refused(&["copy", &uri, text(&target)], OPEN, &words);
        refused(&["copy", "zero:1k", &uri], OPEN, &words);
        refused(&["info", &uri], 1, &words[..2]);
        refused(&["info", "--size", &uri], 1, &words[..2]);
        refused(&["map", &uri], OPEN, &words[..2]);
    }
}

#[test]
fn servers_of_something_else() {
    let scratch = Scratch::new().unwrap();
    let target = scratch.file("target");
    // A server of web pages waits for a line, and answers only then.
    let web = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = web.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for stream in web.incoming().flatten() {
            std::thread::spawn(move || {
                let mut stream = stream;
                let mut seen = [0; 4];
                if stream.read_exact(&mut seen).is_ok() {
                    let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n");
                }
            });
        }
    });
    let uri = format!("nbd://127.0.0.1:{port}");
    let place = port.to_string();
    refused(&["copy", "--timeout", "1", &uri, text(&target)], LOST, &["127.0.0.1", &place, "NBD"]);
    // One that greets, as servers of mail and of shells do.
    let shell = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = shell.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for mut stream in shell.incoming().flatten() {
            let _ = stream.write_all(b"SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3\r\n");
            // Held open until the client has had enough.
            let _ = stream.read(&mut [0; 64]);
        }
    });
    let uri = format!("nbd://127.0.0.1:{port}");
    let place = port.to_string();
    refused(&["copy", &uri, text(&target)], OPEN, &["127.0.0.1", &place, "NBD"]);
    refused(&["info", &uri], 1, &["127.0.0.1", &place, "NBD"]);
    assert!(!target.exists(), "nothing came, but a target was made");
}

/// Whatever goes wrong in the handshake.
#[test]
fn handshakes_that_go_wrong() {
    let silent = [
        HandshakeFault::Silent,
        HandshakeFault::StopAtOption(1),
        HandshakeFault::StopAtOption(2),
        HandshakeFault::StopAtOption(3),
    ];
    let wrong = [
        HandshakeFault::CloseAtOnce,
        HandshakeFault::NotNbd,
        HandshakeFault::WrongSecondMagic,
        HandshakeFault::HalfGreeting,
        HandshakeFault::CloseAtOption(1),
        HandshakeFault::CloseAtOption(3),
        HandshakeFault::WrongReplyMagic,
        HandshakeFault::AnswerToAnother,
        HandshakeFault::HugeAnswer,
        HandshakeFault::NoExportInfo,
        HandshakeFault::Size(u64::MAX),
    ];
    let faults = silent.into_iter().map(|fault| (fault, Some(LOST)));
    let faults = faults.chain(wrong.into_iter().map(|fault| (fault, None)));
    std::thread::scope(|scope| {
        for (fault, status) in faults {
            scope.spawn(move || {
                let what = format!("{fault:?}");
                let server = Scripted::offer(Offer::new(Model::new(1 << 20)).handshake(fault));
                let args = ["copy", "--timeout", "1", &server.uri(), "null:"];
                let begun = Instant::now();
                let output = bounded(&mut blockhaul(&args), SOON);
                let found = output.status.code().unwrap_or(-1);
                let expected = status.unwrap_or(if found == LOST { LOST } else { OPEN });
                let words = ["source", text(server.path())];
                refused_by(&output, &what, expected, &words);
                assert!(begun.elapsed() < Duration::from_secs(10), "{what}: {:?}", begun.elapsed());
            });
        }
    });
}

/// `info`, `map` and `copy` say what a server did not say, and for how long they waited for it.
#[test]
fn servers_that_say_nothing() {
    let offer = || Offer::new(Model::new(1 << 20));
    let greeting = "no greeting within 0.5 s: is this an NBD server?";
    let answer = "no answer in the handshake within 0.5 s; check that the server is alive, or wait";
    let request = "no byte from the server for 0.5 s with 1 request in flight";
    let mut cases = vec![(
        "map",
        offer().spoil(Spoil::from(wire::Command::BlockStatus, 0, How::Hang)),
        request,
    )];
    for command in ["info", "list", "map", "copy"] {
        cases.push((command, offer().handshake(HandshakeFault::Silent), greeting));
        cases.push((command, offer().handshake(HandshakeFault::StopAtOption(1)), answer));
    }
    std::thread::scope(|scope| {
        for (command, offer, words) in cases {
            scope.spawn(move || {
                let server = Scripted::offer(offer);
                let uri = server.uri();
                let (args, status): (&[&str], i32) = match command {
                    "info" => (&["info", "--timeout", "500ms", &uri], 1),
                    "list" => (&["info", "--timeout", "500ms", "--list", &uri], 1),
                    "copy" => (&["copy", "--timeout", "500ms", &uri, "null:"], LOST),
                    _ => (&["map", "--timeout", "500ms", &uri], LOST),
                };
                refused(args, status, &[text(server.path()), words]);
            });
        }
    });
}

/// Block sizes that the protocol forbids are no reason not to copy.
#[test]
fn block_sizes_that_make_no_sense() {
    let scratch = Scratch::new().unwrap();
    let (image, target) = (scratch.file("image"), scratch.file("target"));
    let content = Fill::Random(2).bytes((1 << 20) + 333);
    fs::write(&image, &content).unwrap();
    for (least, best, most) in [(3, 5, 7), (1 << 20, 1 << 20, 1 << 20), (4096, 512, 1), (0, 0, 0)] {
        let what = format!("{least} {best} {most}");
        let model = Model::new(content.len() as u64).with_content(content.clone());
        let fault = HandshakeFault::BlockSizes(least, best, most);
        let server = Scripted::offer(Offer::new(model).handshake(fault));
        let output = bounded(&mut blockhaul(&["copy", &server.uri(), text(&target)]), SOON);
        match output.status.success() {
            true => assert_same(&image, &target, &what),
            false => _ = refused_by(&output, &what, OPEN, &["source", text(server.path())]),
        }
    }
}

/// Every way to answer wrongly, from the third request on: either the copy fails with one line, or the
/// bytes are right.
#[test]
fn answers_that_go_wrong() {
    let ways = [
        How::Silence,
        How::Hang,
        How::Close,
        How::CloseInHead,
        How::CloseInPayload,
        How::WrongCookie,
        How::Garbage,
        How::Twice,
        How::Slow { first: Duration::from_millis(50), piece: Duration::from_micros(10) },
        How::Error(5),
        How::Error(12345),
        How::ErrorAt(5, 300_000, "a bad place".into()),
        How::ErrorZero,
        How::UnknownError,
        How::UnknownChunk,
        How::Oversized,
        How::OutsideRange,
        How::Missing,
        How::Overlap,
        How::Backwards,
        How::Hole,
        How::SimpleInstead,
        How::NeverDone,
        How::ErrorHalfway(5),
        How::WrongOffset,
        How::WrongContext,
        How::EmptyExtent,
        How::NoExtents,
        How::NoStatus,
        How::LongExtent,
    ];
    let size = 8 << 20;
    let scratch = Scratch::new().unwrap();
    let image = scratch.file("image");
    let content = Fill::Random(1).bytes(size);
    fs::write(&image, &content).unwrap();
    let cases: Vec<_> = [wire::Command::Read, wire::Command::Write, wire::Command::BlockStatus]
        .into_iter()
        .flat_map(|command| {
            let forms = [Replies::Simple, Replies::Structured, Replies::Extended];
            let ways = &ways;
            forms
                .into_iter()
                .flat_map(move |form| ways.iter().map(move |how| (command, form, how.clone())))
        })
        .collect();
    let check = |(index, (command, form, how)): (usize, &(wire::Command, Replies, How))| {
        let what = format!("{command:?} {form:?} {how:?}");
        // Zeroes that a hole stands for are right.
        let hole = *how == How::Hole;
        let reading = *command != wire::Command::Write;
        let model = Model::new(size as u64);
        let model = if reading { model.with_content(content.clone()) } else { model };
        let offer = Offer::new(model).replies(*form).spoil(Spoil::from(*command, 3, how.clone()));
        let memory = offer.model.clone();
        let server = Scripted::offer(offer);
        let (uri, target) = (server.uri(), scratch.file(&index.to_string()));
        let ends = if reading { [&uri, text(&target)] } else { [text(&image), &uri] };
        let output =
            bounded(&mut blockhaul(&[&["copy", "--timeout", "1"], &ends[..]].concat()), SOON);
        if output.status.success() {
            if reading && !hole {
                assert_same(&image, &target, &what);
            } else if !reading {
                let memory = memory.lock().unwrap();
                assert!(memory.bytes() == content, "{what}: success with wrong bytes");
            }
        } else {
            let status = output.status.code().unwrap_or(-1);
            assert!([OPEN, SOURCE, TARGET, LOST].contains(&status), "{what}: {status}");
            refused_by(&output, &what, status, &[text(server.path())]);
        }
        // Errors of block status only cost knowledge.
        if *command == wire::Command::BlockStatus && matches!(how, How::Error(_)) {
            assert!(output.status.success(), "{what}: {}", lossy(&output.stderr));
        }
        let fails = matches!(
            how,
            How::Close
                | How::CloseInHead
                | How::Garbage
                | How::WrongCookie
                | How::Hang
                | How::Silence
        );
        if fails && *command != wire::Command::BlockStatus {
            assert!(!output.status.success(), "{what}: success");
        }
        let _ = fs::remove_file(&target);
    };
    // Most of them wait.
    let (count, check, cases) = (8, &check, &cases);
    std::thread::scope(|scope| {
        for first in 0..count {
            scope
                .spawn(move || cases.iter().enumerate().skip(first).step_by(count).for_each(check));
        }
    });
}

#[test]
fn servers_that_stop_answering() {
    let nbdkit = require_peer!("nbdkit");
    let scratch = Scratch::new().unwrap();
    let (image, target) = (scratch.file("image"), scratch.file("target"));
    garbage(&image, 8 << 20).unwrap();
    let layer = ["--layer", "delay?read=1000s&write=1000s"];
    let ours = serve(&scratch, "s", &[&layer[..], &["memory:8M"]].concat());
    let args = ["--filter=delay", "memory", "8M", "rdelay=1000", "wdelay=1000"];
    let nbdkits = Server::nbdkit(&nbdkit, &scratch.socket("k"), &args).unwrap();
    for server in [&ours, &nbdkits] {
        let (uri, place) = (server.uri(""), text(server.socket()));
        let copy = ["copy", "--no-extents", "--timeout", "2"];
        let begun = Instant::now();
        refused(
            &[&copy[..], &[&uri, text(&target)]].concat(),
            LOST,
            &["source", place, "2 s", "; "],
        );
        refused(
            &[&copy[..], &[text(&image), &uri]].concat(),
            LOST,
            &["target", place, "2 s", "; "],
        );
        assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    }
}

#[test]
fn connections_cut_in_the_middle() {
    let nbdkit = require_peer!("nbdkit");
    let scratch = Scratch::new().unwrap();
    let (image, target) = (scratch.file("image"), scratch.file("target"));
    garbage(&image, 256 << 20).unwrap();
    let pause = Duration::from_millis(700);
    let layer = ["--layer", "rate?rate=10M"];
    let ours = |name| serve(&scratch, name, &[&layer[..], &[text(&image)]].concat());
    let nbdkits = |name| {
        let args = ["--filter=rate", "file", text(&image), "rate=80M"];
        Server::nbdkit(&nbdkit, &scratch.socket(name), &args).unwrap()
    };
    for server in [ours("0"), nbdkits("1")] {
        let (uri, place) = (server.uri(""), text(server.socket()).to_owned());
        let output = meanwhile(&["copy", &uri, text(&target)], pause, || drop(server));
        refused_by(&output, "the source is killed", LOST, &["source", &place, "; "]);
    }
    let layer = ["--layer", "rate?rate=10M", "memory:256M"];
    let server = serve(&scratch, "2", &layer);
    let (uri, place) = (server.uri(""), text(server.socket()).to_owned());
    let output = meanwhile(&["copy", text(&image), &uri], pause, || drop(server));
    refused_by(&output, "the target is killed", LOST, &["target", &place, "; "]);
    // A server that is asked to end tells its clients.
    let server = ours("3");
    let (uri, place) = (server.uri(""), text(server.socket()).to_owned());
    let stop = || assert!(server.stop().unwrap().success());
    let output = meanwhile(&["copy", &uri, text(&target)], pause, stop);
    refused_by(&output, "the source is stopped", LOST, &["source", &place, "; "]);
}

#[test]
fn copies_stopped_by_signals() {
    let scratch = Scratch::new().unwrap();
    let target = scratch.file("target");
    for (signal, status) in [("TERM", 143), ("INT", 130)] {
        let mut command = Command::new("timeout");
        // In the background, timeout signals its group, too: that would be a second signal.
        command.args(["--foreground", "--preserve-status", "--signal", signal, "1"]);
        command.arg(blockhaul_tests::program());
        command.args(["copy", "--source-layer", "rate?rate=5M", "pattern:64M", text(&target)]);
        let begun = Instant::now();
        let output = bounded(&mut command, SOON);
        assert!(begun.elapsed() < Duration::from_secs(5), "{signal}: {:?}", begun.elapsed());
        let said = lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{signal}: {said}");
        assert!(said.contains("signal") && !said.contains("panicked"), "{said}");
    }
}

#[test]
fn targets_that_cannot_take_the_source() {
    let nbdkit = require_peer!("nbdkit");
    let qemu_nbd = require_peer!("qemu-nbd");
    let scratch = Scratch::new().unwrap();
    let (image, small) = (scratch.file("image"), scratch.file("small"));
    random_image(&image, 2 << 20);
    garbage(&small, (2 << 20) - 512).unwrap();
    let untouched = scratch.file("untouched");
    fs::copy(&small, &untouched).unwrap();
    let source = text(&image);
    let shared = format!("file:{}?lock=off", text(&small));
    let ours = serve(&scratch, "s", &[&shared]);
    let args = ["file", text(&small)];
    let nbdkits = Server::nbdkit(&nbdkit, &scratch.socket("k"), &args).unwrap();
    let args = ["-e", "4", "-f", "raw", text(&small)];
    let qemus = Server::qemu_nbd(&qemu_nbd, &scratch.socket("q"), &args).unwrap();
    for server in [&ours, &nbdkits, &qemus] {
        let words = ["smaller", "2097152", "2096640", text(server.socket())];
        refused(&["copy", source, &server.uri("")], OPEN, &words);
    }
    refused(&["copy", source, "memory:1M"], OPEN, &["smaller", "2097152", "1048576"]);
    drop((ours, nbdkits, qemus));
    assert_same(&small, &untouched, "a refused copy wrote");

    let ours = serve(&scratch, "r", &["-r", text(&image)]);
    let args = ["-r", "file", text(&image)];
    let nbdkits = Server::nbdkit(&nbdkit, &scratch.socket("l"), &args).unwrap();
    let args = ["-r", "-e", "4", "-f", "raw", text(&image)];
    let qemus = Server::qemu_nbd(&qemu_nbd, &scratch.socket("p"), &args).unwrap();
    for server in [&ours, &nbdkits, &qemus] {
        refused(&["copy", "zero:1M", &server.uri("")], OPEN, &["read-only", text(server.socket())]);
    }
    refused(&["copy", "zero:1M", "pattern:1M"], OPEN, &["pattern:1M", "cannot be written"]);
    refused(&["copy", "zero:1M", text(scratch.path())], USAGE, &["directory"]);
    refused(&["copy", "zero:1M", "/dev/null"], USAGE, &["/dev/null", "null:"]);
    let nowhere = scratch.file("no/such/folder");
    refused(&["copy", "zero:1M", text(&nowhere)], OPEN, &[text(&nowhere)]);
}

#[test]
fn a_full_target() {
    let nbdkit = require_peer!("nbdkit");
    let scratch = Scratch::new().unwrap();
    let image = scratch.file("image");
    garbage(&image, 24 << 20).unwrap();
    let source = text(&image);
    let args = ["--filter=error", "memory", "24M", "error-pwrite=ENOSPC", "error-pwrite-rate=30%"];
    let nbdkits = Server::nbdkit(&nbdkit, &scratch.socket("k"), &args).unwrap();
    let layer = ["--layer", "error?error=ENOSPC&write=100%&after=10", "memory:24M"];
    let ours = serve(&scratch, "s", &layer);
    for server in [&nbdkits, &ours] {
        let words = ["target", "space", text(server.socket()), "; "];
        refused(&["copy", source, &server.uri("")], FULL, &words);
    }

    // A file system that is really full, in a mount namespace of its own.
    let mount = scratch.file("mount");
    fs::create_dir(&mount).unwrap();
    let target = mount.join("target");
    let within = |line: &str| {
        let mut command = Command::new("unshare");
        let root = fs::metadata("/proc/self")
            .is_ok_and(|data| std::os::unix::fs::MetadataExt::uid(&data) == 0);
        command.arg(if root { "-m" } else { "-rm" });
        let line = format!("mount -n -t tmpfs -o size=8m none \"$0\" || exit 99; {line}");
        command.args(["sh", "-c", &line, text(&mount)]).arg(blockhaul_tests::program());
        command.args([source, text(&target)]);
        bounded(&mut command, SOON)
    };
    let output = within("\"$1\" copy \"$2\" \"$3\"");
    if output.status.code() == Some(99) || lossy(&output.stderr).contains("unshare") {
        println!("no tmpfs of its own: {}", lossy(&output.stderr));
        return;
    }
    refused_by(&output, "a full tmpfs", FULL, &["target", "space", text(&target), "; "]);
    let serving = "truncate -s 24m \"$3\"; \"$1\" serve \"$3\" --run \"$1 copy $2 \\$uri\"";
    let mut output = within(serving);
    // The server's log is on the same terminal.
    let said = lossy(&output.stderr);
    let (log, rest): (Vec<&str>, _) =
        said.lines().partition(|line| line.starts_with("blockhaul: warning: connection "));
    assert!(log.iter().all(|line| line.contains("No space left on device")), "{said}");
    output.stderr = rest.join("\n").into_bytes();
    refused_by(&output, "a served full tmpfs", FULL, &["target", "space", "; "]);
}

#[test]
fn one_bad_block() {
    let scratch = Scratch::new().unwrap();
    let (image, target) = (scratch.file("image"), scratch.file("target"));
    garbage(&image, 16 << 20).unwrap();
    let (source, to) = (text(&image), text(&target));
    // The request of 64 KiB that holds it.
    let bad = 0x0012_3456;
    let place = (bad / 65536 * 65536).to_string();
    let size = "--request-size=64k";
    let layer = format!("error?at={bad}&read=100%");
    let line = refused(
        &["copy", size, "--source-layer", &layer, source, to],
        SOURCE,
        &["source", source, &place, "read", "; "],
    );
    assert!(line.contains("65536") || line.contains("64"), "{line}");
    let layer = format!("error?at={bad}&write=100%");
    refused(
        &["copy", size, "--target-layer", &layer, source, to],
        TARGET,
        &["target", to, &place, "write", "; "],
    );
    let layer = format!("error?at={bad}&read=100%&write=100%");
    let server = serve(&scratch, "s", &["--layer", &layer, source]);
    let uri = server.uri("");
    let words = [text(server.socket()), &place, "; "];
    refused(&["copy", size, &uri, to], SOURCE, &words);
    refused(&["copy", size, source, &uri], TARGET, &words);
    let verify = ["copy", "--verify", size, "-C", "1", "--target-layer"];
    let layer = format!("error?at={bad}&read=100%");
    let line = refused(
        &[&verify[..], &[&layer, source, to]].concat(),
        TARGET,
        &["verification", "target failed", to, "read", "; "],
    );
    let number = |before: &str| -> u64 {
        let digits = line.split_once(before).map(|(_, rest)| rest).unwrap_or_default();
        digits.split(' ').next().unwrap_or_default().trim_end_matches(':').parse().unwrap()
    };
    let (at, len) = (number("at offset "), number("read of "));
    assert!((at..at + len).contains(&bad), "{line}");
}

#[test]
fn a_bad_block_of_somebody_elses() {
    let nbdkit = require_peer!("nbdkit");
    let scratch = Scratch::new().unwrap();
    let target = scratch.file("target");
    let bad = 0x0012_3456;
    let place = (bad / 65536 * 65536).to_string();
    let read = format!(
        "if [ $4 -le {bad} ] && [ $(( $4 + $3 )) -gt {bad} ]; then echo EIO bad >&2; exit 1; fi; \
         head -c $3 /dev/zero"
    );
    let read = format!("pread={read}");
    let args = ["eval", "get_size=echo 16M", &read, "thread_model=echo parallel"];
    let server = Server::nbdkit(&nbdkit, &scratch.socket("k"), &args).unwrap();
    let words = ["source", text(server.socket()), &place, "; "];
    let args = ["copy", "--request-size=64k", &server.uri(""), text(&target)];
    refused(&args, SOURCE, &words);
}

#[test]
fn the_target_is_the_source() {
    let scratch = Scratch::new().unwrap();
    let (image, before) = (scratch.file("image"), scratch.file("before"));
    random_image(&image, 1 << 20);
    fs::copy(&image, &before).unwrap();
    let (link, hard) = (scratch.file("link"), scratch.file("hard"));
    symlink(&image, &link).unwrap();
    fs::hard_link(&image, &hard).unwrap();
    let source = text(&image);
    let named = format!("file:{source}");
    let roundabout = format!("{}/../{}", text(scratch.path()), {
        let name = scratch.path().file_name().unwrap().to_str().unwrap();
        format!("{name}/image")
    });
    for target in [source, text(&link), text(&hard), &named, &roundabout] {
        refused(&["copy", source, target], USAGE, &["same", source]);
        refused(&["copy", target, source], USAGE, &["same"]);
    }
    let server = serve(&scratch, "s", &["-e", "disk", source]);
    let uri = server.uri("disk");
    refused(&["copy", &uri, &uri], USAGE, &["same"]);
    let encoded = uri.replace("/disk", "/%64isk");
    assert_ne!(uri, encoded);
    refused(&["copy", &uri, &encoded], USAGE, &["same"]);
    assert_same(&image, &before, "a refused copy changed its source");
}

#[test]
fn words_that_mean_nothing() {
    let scratch = Scratch::new().unwrap();
    let target = scratch.file("target");
    let to = text(&target);
    refused(&["copy", "ftp://host/disk", to], USAGE, &["ftp", "nbd"]);
    refused(&["copy", "zero:1M", "qcow3:disk"], USAGE, &["qcow3", "file"]);
    refused(&["info", "ftp://host/disk"], 1, &["ftp"]);
    refused(&["copy", "sample:1M?date=3", to], USAGE, &["date", "data", "seed"]);
    refused(&["copy", "file:/x?direkt=on", to], USAGE, &["direkt", "direct"]);
    refused(&["copy", "file:/x?direct=maybe", to], USAGE, &["direct", "maybe"]);
    refused(&["copy", "memory:10Q", to], USAGE, &["10Q"]);
    refused(&["copy", "zero:", to], USAGE, &["zero:"]);
    refused(&["copy", "zero:-1", to], USAGE, &["-1"]);
    refused(&["copy", "zero:99999999999999999999", to], USAGE, &["99999999999999999999"]);
    refused(&["copy", "nbd://host:port/x", to], USAGE, &["\"port\""]);
    refused(&["copy", "nbd+unix:///disk", to], USAGE, &["socket"]);
    refused(&["copy", "nbd://h/x?soket=/s", to], USAGE, &["soket", "socket"]);
    refused(&["copy", "--source-layer", "slow", "zero:1M", to], USAGE, &["slow", "delay"]);
    refused(&["copy", "--source-layer", "delay?reed=1s", "zero:1M", to], USAGE, &["reed", "read"]);
    refused(&["copy", "-", "-"], USAGE, &["-"]);
    refused(&["copy", "--verify", "-", to], USAGE, &["--verify"]);
    refused(&["copy", "[", "nbdkit"], USAGE, &["]"]);
    refused(&["copy", "[", "]", to], USAGE, &["["]);
    refused(&["compat"], USAGE, &["missing", "known are nbdcopy, nbdinfo, nbdkit"]);
    refused(&["compat", "nbdfuse"], USAGE, &["nbdfuse", "nbdcopy, nbdinfo, nbdkit"]);
    assert!(succeed(&["compat", "--help"]).ends_with("Programs: nbdcopy, nbdinfo, nbdkit\n"));
    assert!(!target.exists(), "a refused copy made its target");
    // Usage errors of the parser take several lines, and the status is the same.
    for args in [&["copy", "--no-such-option", "a", "b"][..], &["copy", "a"], &["frobnicate"], &[]]
    {
        let output = bounded(&mut blockhaul(args), SOON);
        assert_eq!(output.status.code(), Some(USAGE), "{args:?}: {}", lossy(&output.stderr));
        assert!(!lossy(&output.stderr).contains("panicked"), "{args:?}");
        assert!(!output.stderr.is_empty(), "{args:?}");
    }
}

/// A server that its client starts, and that ends at once or never listens.
#[test]
fn servers_that_do_not_start() {
    let scratch = Scratch::new().unwrap();
    let target = scratch.file("target");
    let server = ["sh", "-c", "echo no luck >&2; exit 3"];
    for (server, word) in [(&server[..], "no luck"), (&["/no/such/program"], "/no/such/program")] {
        let args = [&["copy", "["], server, &["]", text(&target)]].concat();
        let output = bounded(&mut blockhaul(&args), SOON);
        let said = lossy(&output.stderr);
        assert!([OPEN, LOST].contains(&output.status.code().unwrap_or(-1)), "{said}");
        // What the server said, and what we say about it.
        assert!(said.contains(word) && !said.contains("panicked"), "{said}");
        let ours: Vec<_> = said.lines().filter(|line| line.starts_with("blockhaul: ")).collect();
        assert!(ours.len() == 1 && ours[0].contains(server[0]), "{said}");
    }
    let args = ["copy", "--timeout", "1", "[", "sleep", "1000", "]", text(&target)];
    let output = bounded(&mut blockhaul(&args), SOON);
    let said = lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(LOST), "{said}");
    assert!(said.contains("sleep"), "{said}");
}

/// Odd sizes are no error: what was there comes out.
#[test]
fn empty_and_odd_sizes() {
    let nbdkit = require_peer!("nbdkit");
    let scratch = Scratch::new().unwrap();
    for (index, size) in [0, 1, 511, 513, 4095, 65537, (1 << 20) + 1].into_iter().enumerate() {
        let (image, target) = (scratch.file("image"), scratch.file("target"));
        fs::write(&image, Fill::Random(9).bytes(size)).unwrap();
        let what = format!("{size} bytes");
        garbage(&target, 100_000).unwrap();
        succeed(&["copy", "--verify", text(&image), text(&target)]);
        assert_same(&image, &target, &what);
        let ours = serve(&scratch, &format!("s{index}"), &[text(&image)]);
        let args = ["file", text(&image)];
        let nbdkits = scratch.socket(&format!("k{index}"));
        let nbdkits = Server::nbdkit(&nbdkit, &nbdkits, &args).unwrap();
        for server in [&ours, &nbdkits] {
            assert_eq!(succeed(&["info", "--size", &server.uri("")]), format!("{size}\n"));
            fs::remove_file(&target).unwrap();
            succeed(&["copy", "--verify", &server.uri(""), text(&target)]);
            assert_same(&image, &target, &what);
        }
        let piped = format!(
            "'{}' copy '{}' - > '{}'",
            text(blockhaul_tests::program()),
            ours.uri(""),
            text(&target)
        );
        done(Command::new("sh").args(["-c", &piped]));
        assert_same(&image, &target, &what);
    }
}

#[test]
fn the_largest_device() {
    let nbdkit = require_peer!("nbdkit");
    let scratch = Scratch::new().unwrap();
    let size = i64::MAX as u64;
    let name = format!("zero:{size}");
    let ours = serve(&scratch, "s", &[&name]);
    let args = ["null", &size.to_string()];
    let nbdkits = Server::nbdkit(&nbdkit, &scratch.socket("k"), &args).unwrap();
    let target = scratch.file("target");
    for server in [&ours, &nbdkits] {
        let uri = server.uri("");
        assert_eq!(succeed(&["info", "--size", &uri]), format!("{size}\n"));
        succeed(&["info", &uri]);
        let words = ["smaller", &size.to_string()];
        refused(&["copy", &uri, "memory:1G"], OPEN, &words);
        // Most file systems take no file of this size, tmpfs does: then the copy is over at once
        // where the server's answers cover all of it, else it is stopped.
        let mut command = Command::new("timeout");
        command.args(["--foreground", "--preserve-status", "--signal", "TERM", "2"]);
        command.arg(blockhaul_tests::program()).args(["copy", &uri, text(&target)]);
        let output = bounded(&mut command, SOON);
        let status = output.status.code().unwrap_or(-1);
        if [0, 143].contains(&status) {
            assert_eq!(image::space(&target).unwrap().apparent, size);
        } else {
            assert!([OPEN, FULL].contains(&status), "{status}: {}", lossy(&output.stderr));
            refused_by(&output, "a file", status, &["target", text(&target)]);
        }
    }
    let map = succeed(&["map", "--json", &ours.uri("")]);
    let map: serde_json::Value = serde_json::from_str(&map).unwrap();
    assert_eq!(map.as_array().unwrap().len(), 1, "{map}");
    assert_eq!(map[0]["length"], size);
    refused(&["copy", "zero:9223372036854775808", text(&target)], USAGE, &["9223372036854775808"]);
}

#[test]
fn a_source_that_shrinks() {
    let scratch = Scratch::new().unwrap();
    let (image, target) = (scratch.file("image"), scratch.file("target"));
    let pause = Duration::from_millis(700);
    let shrink = || File::options().write(true).open(&image).unwrap().set_len(4 << 20).unwrap();
    garbage(&image, 64 << 20).unwrap();
    let source = text(&image);
    let args = ["copy", "--source-layer", "rate?rate=10M", source, text(&target)];
    let output = meanwhile(&args, pause, shrink);
    refused_by(&output, "a file that shrinks", SOURCE, &["source", source, "; "]);

    garbage(&image, 64 << 20).unwrap();
    let server = serve(&scratch, "s", &["-r", "--layer", "rate?rate=10M", source]);
    let output = meanwhile(&["copy", &server.uri(""), text(&target)], pause, shrink);
    refused_by(&output, "a served file that shrinks", SOURCE, &["source", "; "]);
    // The server goes on.
    assert_eq!(succeed(&["info", "--size", &server.uri("")]), format!("{}\n", 64 << 20));
}

/// The test of the tests: what is refused with two lines is found.
#[test]
#[should_panic(expected = "one line")]
fn two_lines_are_found() {
    let output = bounded(Command::new("sh").args(["-c", "echo a >&2; echo b >&2; exit 3"]), LIMIT);
    refused_by(&output, "two lines", 3, &[]);
}
