//! `blockhaul copy` as a process: what it copies, how it shows progress, and how each bad input ends.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::os::unix::net::UnixListener;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use blockhaul_testkit::image::pattern;
use blockhaul_testkit::tools::{self, PeerServer, ScratchDir, text};
use rustix::process::{Pid, Signal, kill_process};

const LIMIT: Duration = Duration::from_secs(120);
const OURS: &str = env!("CARGO_BIN_EXE_blockhaul");

fn copy(args: &[&str]) -> Output {
    tools::output(Command::new(OURS).arg("copy").args(args), LIMIT).unwrap()
}

/// A copy that has moved a hundredth of its bytes, and says so.
fn begun(args: &[&str]) -> Child {
    let mut command = Command::new(OURS);
    command.args(["copy", "--progress=1"]).args(args).stdin(Stdio::null());
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut line = [0];
    let mut told = Vec::new();
    while !told.ends_with(b"\n") || told.ends_with(b"\n0/100\n") || told == b"0/100\n" {
        let stdout = child.stdout.as_mut().unwrap();
        let count = stdout.read(&mut line).unwrap();
        assert_eq!(count, 1, "it ended before it had copied anything");
        told.push(line[0]);
    }
    child
}

#[track_caller]
fn assert_copies(args: &[&str]) -> Output {
    let output = copy(args);
    assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
    output
}

/// One line that holds these words, and this status.
#[track_caller]
fn assert_fails(args: &[&str], status: i32, words: &[&str]) {
    let output = copy(args);
    check_failure(&output, status, words);
}

#[track_caller]
fn check_failure(output: &Output, status: i32, words: &[&str]) {
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(status), "{said}");
    let lines: Vec<_> = said.lines().filter(|line| line.starts_with("blockhaul: copy: ")).collect();
    assert_eq!(lines.len(), 1, "{said}");
    assert!(words.iter().all(|word| lines[0].contains(word)), "{words:?} in {said}");
    assert!(!said.contains("panicked"), "{said}");
}

fn serve(scratch: &ScratchDir, args: &[&str]) -> PeerServer {
    PeerServer::blockhaul(OURS.as_ref(), &scratch.socket("own"), args).unwrap()
}

/// A file of pieces of `unit` bytes: data, and every other one a hole.
fn holey(path: &std::path::Path, size: u64, unit: usize) {
    let file = std::fs::File::create(path).unwrap();
    file.set_len(size).unwrap();
    let content = pattern(size as usize);
    for at in (0..size as usize).step_by(2 * unit) {
        file.write_all_at(&content[at..at + unit], at as u64).unwrap();
    }
}

#[test]
fn what_a_target_holds_is_written_over_or_freed() {
    let scratch = ScratchDir::new().unwrap();
    let source = scratch.file("source");
    let target = scratch.file("target");
    let paths = [&source, &target].map(|path| path.display().to_string());
    let size = 16_u64 << 20;
    let blocks = |path| std::fs::metadata(path).unwrap().blocks();
    let assert_same = || {
        assert!(std::fs::read(&source).unwrap() == std::fs::read(&target).unwrap());
        assert_eq!(blocks(&source), blocks(&target), "zeroes need no blocks");
    };
    // Long runs are zeroed where they are, and many short ones had better not be there before.
    for (unit, zeroed) in [(4 << 20, true), (64 << 10, false)] {
        holey(&source, size, unit);
        for held in [size / 2, size, size + 5000] {
            std::fs::write(&target, vec![0xee; held as usize]).unwrap();
            let done = assert_copies(&["--verbose", &paths[0], &paths[1]]);
            let said = text(&done.stderr);
            // What the target had not before is a hole already.
            let expected = if zeroed { (size - held.min(size)) / 2 } else { size / 2 };
            let told = format!("{} zeroed, {expected} skipped", size / 2 - expected);
            assert!(said.contains(&told), "{told}: {said}");
            assert_same();
        }
    }
    // Who says that it is zeroes, and who needs to know a fresh target, has it emptied.
    holey(&source, size, 4 << 20);
    let journal = scratch.file("journal").display().to_string();
    for options in [&["--destination-is-zero"][..], &["--journal", &journal]] {
        std::fs::write(&target, vec![0xee; size as usize]).unwrap();
        let done = assert_copies(&[options, &["--verbose", &paths[0], &paths[1]]].concat());
        let said = text(&done.stderr);
        assert!(said.contains(&format!("0 zeroed, {} skipped", size / 2)), "{said}");
        assert_same();
    }
}

#[test]
fn short_runs_of_zeroes_make_holes_in_a_target_with_blocks_when_asked_for() {
    let scratch = ScratchDir::new().unwrap();
    let source = scratch.file("source");
    let target = scratch.file("target");
    let paths = [&source, &target].map(|path| path.display().to_string());
    // Data as far as its extents go, 16 KiB of zeroes in each 32.
    let mut content = pattern(4 << 20);
    content.chunks_mut(32 << 10).for_each(|piece| piece[..16 << 10].fill(0));
    std::fs::write(&source, &content).unwrap();
    for (sparse, share) in [(None, 1), (Some("4096"), 2)] {
        std::fs::write(&target, vec![0xee; content.len()]).unwrap();
        let sparse: Vec<_> = sparse.into_iter().flat_map(|size| ["-S", size]).collect();
        assert_copies(&[&sparse[..], &[&paths[0], &paths[1]]].concat());
        assert!(std::fs::read(&target).unwrap() == content);
        let blocks = std::fs::metadata(&target).unwrap().blocks();
        assert_eq!(blocks * 512 * share, content.len() as u64, "{sparse:?}");
    }
}

#[test]
fn a_layer_that_shows_a_part_of_the_target_leaves_the_rest() {
    let scratch = ScratchDir::new().unwrap();
    let file = |name: &str| scratch.file(name).display().to_string();
    let one = file("one");
    let other = file("other");
    let disk = file("disk");
    assert_copies(&["sample:8M?seed=1", &one]);
    assert_copies(&["sample:4M?seed=2", &other]);
    assert_copies(&[&format!("partitioning:{one},{other}"), &disk]);
    let size = std::fs::metadata(&disk).unwrap().len();

    assert_copies(&["random:8M", &disk, "--target-layer", "partition?partition=1", "--verify"]);
    assert_eq!(std::fs::metadata(&disk).unwrap().len(), size);
    let second = ["--source-layer", "partition?partition=2", "--target-layer", "checkwrite"];
    assert_copies(&[&second[..], &[&disk, &other]].concat());
    // From a pipe, too.
    let mut child = Command::new(OURS)
        .args(["copy", "-", &disk, "--target-layer", "offset?offset=1M"])
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(b"new").unwrap();
    assert!(child.wait().unwrap().success());
    let bytes = std::fs::read(&disk).unwrap();
    assert_eq!((bytes.len() as u64, &bytes[1 << 20..][..3]), (size, &b"new"[..]));
    assert_copies(&[&second[..], &[&disk, &other]].concat());

    // There is nothing to show in a file that is not there.
    let absent = file("absent");
    let layer = ["--target-layer", "partition?partition=1"];
    assert_fails(&[&["sample:1M", &absent][..], &layer].concat(), 3, &["No such file"]);
    assert!(!std::path::Path::new(&absent).exists());
}

#[test]
fn a_pipe_of_any_length_goes_through_a_layer_with_larger_blocks() {
    let scratch = ScratchDir::new().unwrap();
    let disk = scratch.file("disk");
    for len in [1, 4095, 4096, 4097, 1_000_003] {
        let content: Vec<u8> = (0..len).map(|at| (at % 251) as u8 + 1).collect();
        std::fs::write(&disk, [9; 10_000]).unwrap();
        let layer = ["--target-layer", "blocksize?minblock=4096"];
        let mut child = Command::new(OURS)
            .args(["copy", "-"])
            .arg(&disk)
            .args(layer)
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(&content).unwrap();
        assert!(child.wait().unwrap().success(), "{len} bytes");
        assert!(std::fs::read(&disk).unwrap() == content, "{len} bytes");
    }
}

#[test]
fn a_closed_standard_input_is_no_empty_disk() {
    let scratch = ScratchDir::new().unwrap();
    let disk = scratch.file("disk");
    std::fs::write(&disk, "content").unwrap();
    let shell = |redirection: &str| {
        let script = format!("exec \"$0\" copy - \"$1\" {redirection}");
        let mut command = Command::new("sh");
        tools::output(command.args(["-c", &script, OURS]).arg(&disk), LIMIT).unwrap()
    };
    check_failure(&shell("<&-"), 3, &["standard input"]);
    assert_eq!(std::fs::read(&disk).unwrap(), b"content");
    check_failure(&shell("</dev/null"), 3, &["standard input is empty"]);
    assert_eq!(std::fs::read(&disk).unwrap(), b"content");
    std::fs::remove_file(&disk).unwrap();
    assert!(shell("</dev/null").status.success());
    assert_eq!(std::fs::metadata(&disk).unwrap().len(), 0);
}

#[test]
fn small_requests_are_verified_too() {
    let scratch = ScratchDir::new().unwrap();
    let disk = scratch.file("disk");
    let path = disk.to_str().unwrap();
    let small = ["--request-size", "4k", "--queue-size", "4k", "--synchronous", "-C", "1"];
    for more in [&["--verify"][..], &["--digest", "sha256"], &["--digest", "blake3"]] {
        assert_copies(&[&small[..], more, &["sample:8M", path]].concat());
    }
}

#[test]
fn the_first_command_of_the_readme() {
    let scratch = ScratchDir::new().unwrap();
    let disk = scratch.file("disk.raw");
    let path = disk.to_str().unwrap();
    let output =
        assert_copies(&["--verify", "-v", "[", "blockhaul", "serve", "sample:256M", "]", path]);
    assert!(text(&output.stderr).contains("verified 268435456 bytes"), "{}", text(&output.stderr));
    let data = std::fs::metadata(&disk).unwrap();
    assert_eq!(data.len(), 256 << 20);
    assert!(data.blocks() * 512 < data.len() / 2, "{} blocks", data.blocks());
    // The same bytes without NBD.
    assert_copies(&["--verify", "sample:256M", path]);
}

#[test]
fn sizes_of_all_kinds() {
    let scratch = ScratchDir::new().unwrap();
    let disk = scratch.file("d");
    let path = disk.to_str().unwrap();
    for size in [0_usize, 1, 511, 513, 4095, 1_000_001] {
        assert_copies(&["--verify", &format!("pattern:{size}"), path]);
        assert_eq!(std::fs::read(&disk).unwrap(), pattern(size), "{size}");
    }
    // A larger target keeps what is behind.
    let server = serve(&scratch, &["memory:2M"]);
    assert_copies(&["--verify", "pattern:1000", &server.uri("")]);
}

#[test]
fn no_connections_are_made_that_have_nothing_to_do() {
    let scratch = ScratchDir::new().unwrap();
    // It refuses a second one, which would be reported.
    let server = serve(&scratch, &["--layer", "limit?limit=1", "memory:1M"]);
    let slow = ["-C", "4", "--source-layer", "delay?read=300ms", "pattern:1M", &server.uri("")];
    let output = assert_copies(&slow);
    assert_eq!(text(&output.stderr), "", "there is one segment, for one connection");
}

#[test]
fn pipes_in_and_out() {
    let scratch = ScratchDir::new().unwrap();
    let disk = scratch.file("d");
    std::fs::write(&disk, "what was there before").unwrap();
    let shell = |line: &str| {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", line, "sh", OURS]).arg(&disk);
        let output = tools::output(&mut command, LIMIT).unwrap();
        assert!(output.status.success(), "{line}: {}", text(&output.stderr));
        output.stdout
    };
    shell("\"$1\" copy pattern:3000001 - | \"$1\" copy - \"$2\"");
    assert!(std::fs::read(&disk).unwrap() == pattern(3_000_001));
    // A file that exists is not emptied without a word: `targets::an_empty_pipe_does_not_empty_a_file`.
    std::fs::remove_file(&disk).unwrap();
    assert_eq!(shell("\"$1\" copy - \"$2\" </dev/null; \"$1\" copy \"$2\" -"), b"");
    // Whoever reads has had enough: no word about it, and no success, as one who died looks the same.
    for program in ["copy", "compat nbdcopy"] {
        let line = format!(
            "exec 3>&1; {{ \"$1\" {program} \"$2\" - 2>&3; echo status $? >&3; }} | head -c 16 >/dev/null"
        );
        std::fs::write(&disk, pattern(16 << 20)).unwrap();
        assert_eq!(shell(&line), b"status 141\n", "{program}");
    }
    let output = copy(&["-", "-"]);
    check_failure(&output, 2, &["one of them must be a device"]);
}

#[test]
fn progress_for_scripts_and_programs() {
    let mut command = Command::new("/bin/sh");
    let line = "exec \"$1\" copy --progress=3 sample:64M null: 3>&1 >/dev/null";
    let output = tools::output(command.args(["-c", line, "sh", OURS]), LIMIT).unwrap();
    let told = text(&output.stdout);
    let lines: Vec<_> = told.lines().collect();
    assert_eq!((lines.first(), lines.last()), (Some(&"0/100"), Some(&"100/100")), "{told}");

    let output = assert_copies(&["--progress=json", "sample:64M", "memory:64M"]);
    let told = text(&output.stderr);
    let last: serde_json::Value = serde_json::from_str(told.lines().last().unwrap()).unwrap();
    assert_eq!((&last["finished"], &last["success"]), (&true.into(), &true.into()), "{told}");
    assert_eq!((&last["exit_status"], &last["error"]), (&0.into(), &serde_json::Value::Null));
    let failed =
        ["--progress=json", "--retries=0", "--source-layer=error?read=100%", "pattern:1M", "null:"];
    let failed = copy(&failed);
    let said = text(&failed.stderr);
    let end = said.lines().rfind(|line| line.starts_with('{')).unwrap();
    let end: serde_json::Value = serde_json::from_str(end).unwrap();
    assert_eq!((&end["success"], &end["exit_status"]), (&false.into(), &4.into()), "{said}");
    assert!(end["error"].as_str().unwrap().contains("the source failed"), "{said}");
    assert_eq!((&last["done"], &last["total"]), (&(64 << 20).into(), &(64 << 20).into()), "{told}");
    let parts = ["data", "zeroed", "skipped"].map(|part| last[part].as_u64().unwrap());
    assert_eq!(parts.iter().sum::<u64>(), 64 << 20, "{told}");
    assert!(last["rate"].is_u64() && last.get("eta").is_some(), "{told}");

    let output = assert_copies(&["--progress", "sample:64M", "null:"]);
    assert!(text(&output.stderr).contains("100% [***"), "{}", text(&output.stderr));
    assert_eq!(text(&assert_copies(&["sample:1M", "null:"]).stderr), "");
    assert_fails(&["--progress=9", "sample:1M", "null:"], 2, &["descriptor 9"]);
}

#[test]
fn what_is_told_where_nobody_can_hear_it_is_refused_first() {
    let scratch = ScratchDir::new().unwrap();
    let disk = scratch.file("disk");
    std::fs::write(&disk, "content").unwrap();
    for (options, word) in [
        ("--progress=3 sample:1M \"$1\" 3</dev/null", "only open for reading"),
        ("--digest=blake3 sample:1M \"$1\" >&-", "standard output"),
    ] {
        let script = format!("exec \"$0\" copy {options}");
        let mut command = Command::new("sh");
        let output = tools::output(command.args(["-c", &script, OURS]).arg(&disk), LIMIT).unwrap();
        check_failure(&output, 2, &[word]);
        assert_eq!(std::fs::read(&disk).unwrap(), b"content", "{options}");
    }
}

#[test]
fn servers_that_are_not_there() {
    let scratch = ScratchDir::new().unwrap();
    let target = scratch.file("t");
    let target = target.to_str().unwrap();
    assert_fails(&["nbd+unix:///?socket=/no/such", target], 3, &["/no/such", "server runs"]);
    // The port of a client: it has no listener, and no other program gets it meanwhile.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let closed = taken.local_addr().unwrap();
    assert_fails(&[&format!("nbd://{closed}/"), target], 3, &["Connection refused", "listens"]);
    let server = serve(&scratch, &["-e", "disk", "memory:1M"]);
    assert_fails(&[&server.uri("other"), target], 3, &["other", "--list"]);
    assert_fails(&["sample:1M", &server.uri("other")], 3, &["target", "other", "--list"]);
    assert_fails(&["[", "false", "]", target], 3, &["source", "[ false ]"]);
    // It listens until the shell finds nothing to put in its place.
    let absent = ["[", "no-such-program", "]", target];
    assert_fails(&absent, 3, &["[ no-such-program ]", "exit status: 127"]);
    assert_fails(&[&format!("nbds://{closed}/"), target], 3, &["Connection refused"]);
    let missing = "nbds://localhost/?tls-psk-file=/no/such";
    assert_fails(&[missing, target], 3, &["cannot read /no/such"]);
    assert_fails(&["nbds://localhost/?tls-type=psk", target], 2, &["tls-psk-file=FILE"]);
    assert_fails(&["nbd:/localhost/", target], 2, &["nbd:/localhost/"]);
    assert!(!std::fs::exists(target).unwrap(), "nothing is made before the source is there");
}

/// Sends these bytes to every client, and optionally keeps connections open.
fn impostor(scratch: &ScratchDir, answer: &'static [u8], keep: bool) -> String {
    let socket = scratch.socket("impostor");
    let listener = UnixListener::bind(&socket).unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            std::thread::spawn(move || {
                let mut stream = stream;
                // The client may go away at any time.
                let _ = stream.write_all(answer);
                if keep {
                    let _ = stream.read_to_end(&mut Vec::new());
                }
            });
        }
    });
    format!("nbd+unix:///?socket={}", socket.display())
}

#[test]
fn servers_that_do_not_speak_nbd_or_nothing_at_all() {
    let scratch = ScratchDir::new().unwrap();
    let uri = impostor(&scratch, b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n", true);
    assert_fails(&[&uri, "null:"], 3, &["NBD server"]);
    let scratch = ScratchDir::new().unwrap();
    let uri = impostor(&scratch, b"", false);
    assert_fails(&[&uri, "null:"], 3, &["closed", "refuses this client, or is no NBD server"]);
    // In the middle of a handshake.
    let scratch = ScratchDir::new().unwrap();
    let uri = impostor(&scratch, b"NBDMAGIC", true);
    assert_fails(
        &["--timeout=1", &uri, "null:"],
        7,
        &["no greeting within 1 s", "is this an NBD server?"],
    );
}

#[test]
fn servers_that_fall_silent_or_die() {
    let scratch = ScratchDir::new().unwrap();
    let server = serve(&scratch, &["--layer", "delay?read=60s", "pattern:1M"]);
    // Time for everything else that is answered.
    let silent = ["--timeout=3", "--retries=1", &server.uri(""), "null:"];
    assert_fails(&silent, 7, &["source", "--timeout"]);
    drop(server);
    let scratch = ScratchDir::new().unwrap();
    let server = serve(&scratch, &["--layer", "rate?rate=4M", "pattern:64M"]);
    let client = begun(&["--retry-delay=1ms", &server.uri(""), "null:"]);
    // Killed.
    drop(server);
    check_failure(&client.wait_with_output().unwrap(), 7, &["source"]);
}

#[test]
fn targets_that_do_not_fit() {
    let scratch = ScratchDir::new().unwrap();
    let server = serve(&scratch, &["-e", "small", "memory:1M"]);
    let words = ["sample:2M", "smaller", "1048576", "2097152", "small?"];
    assert_fails(&["sample:2M", &server.uri("small")], 3, &words);
    drop(server);
    let scratch = ScratchDir::new().unwrap();
    let server = serve(&scratch, &["-r", "memory:2M"]);
    assert_fails(&["sample:2M", &server.uri("")], 3, &["read-only", "sample:2M"]);
    assert_fails(&["sample:2M", "pattern:2M"], 3, &["pattern:2M", "cannot be written"]);
    assert_fails(&["zero:9223372036854775807", "memory:1M"], 3, &["smaller"]);
    assert_fails(&["sample:1M", "/no/such/dir/file"], 3, &["/no/such/dir/file"]);
}

#[test]
fn source_and_target_that_are_the_same() {
    let scratch = ScratchDir::new().unwrap();
    let disk = scratch.file("d");
    std::fs::write(&disk, "precious").unwrap();
    std::os::unix::fs::symlink(&disk, scratch.file("link")).unwrap();
    let path = disk.to_str().unwrap();
    let link = format!("file:{}", scratch.file("link").display());
    assert_fails(&[path, path], 2, &["the same"]);
    assert_fails(&[path, &link], 2, &["the same"]);
    assert_eq!(std::fs::read(&disk).unwrap(), b"precious");
    let server = serve(&scratch, &["memory:1M"]);
    let other = format!("nbd+unix:///%61?socket={}", server.socket().display());
    assert_fails(&[&server.uri("a"), &other], 2, &["the same"]);
    assert_fails(&["NBD://Localhost/x", "nbd://localhost:10809/x"], 2, &["the same"]);
}

#[test]
fn errors_on_one_side_name_side_and_place() {
    let quick = "--retry-delay=1ms";
    let read = [quick, "--source-layer", "error?read=100%&at=1M,512", "pattern:4M", "null:"];
    assert_fails(&read, 4, &["source", "pattern:4M", "offset 1048576"]);
    let layer = "error?write=100%&at=1M,512";
    let write = [quick, "--target-layer", layer, "pattern:4M", "memory:4M"];
    assert_fails(&write, 5, &["target", "memory:4M", "offset 1048576"]);
    let full =
        ["--target-layer", "error?write=100%&error=ENOSPC&after=3", "pattern:4M", "memory:4M"];
    assert_fails(&full, 6, &["target", "free some space"]);
    // The same over NBD.
    let scratch = ScratchDir::new().unwrap();
    let layer = ["--layer", "error?write=100%&error=ENOSPC&after=3"];
    let server = serve(&scratch, &[&layer[..], &["memory:4M"]].concat());
    assert_fails(&["pattern:4M", &server.uri("")], 6, &["target", "free some space"]);
}

#[test]
fn verification_finds_what_differs() {
    let words = ["verification", "pattern:1M", "null:", "offset"];
    assert_fails(&["--verify", "pattern:1M", "null:"], 8, &words);
    assert_copies(&["--verify", "zero:1M", "null:"]);
}

#[test]
fn a_real_file_system_that_is_full() {
    let scratch = ScratchDir::new().unwrap();
    let dir = scratch.path().display().to_string();
    // In a mount namespace of its own, so that nothing is left behind.
    let line = "mount -t tmpfs -o size=2m none \"$2\" && exec \"$1\" copy pattern:8M \"$2/disk\"";
    let mut command = Command::new("unshare");
    command.args(["--user", "--map-root-user", "--mount", "/bin/sh", "-c", line, "sh", OURS, &dir]);
    match tools::output(&mut command, LIMIT) {
        Ok(output) if output.status.code() == Some(6) => {
            check_failure(&output, 6, &["target", "offset", "free some space"]);
        }
        Ok(output) if text(&output.stderr).contains("blockhaul") => {
            panic!("{:?}: {}", output.status, text(&output.stderr))
        }
        other => tools::skip(format!("cannot mount: {other:?}")),
    }
}

#[test]
fn a_source_that_shrinks() {
    let scratch = ScratchDir::new().unwrap();
    let disk = scratch.file("d");
    std::fs::write(&disk, vec![b'x'; 64 << 20]).unwrap();
    let layer = ["--source-layer", "rate?rate=4M&burst=64k"];
    let ends = [disk.to_str().unwrap(), "null:"];
    let options = ["--retry-delay=1ms", "-C1", "-R1", "--request-size=64k"];
    let client = begun(&[&options[..], &layer, &ends].concat());
    std::fs::File::options().write(true).open(&disk).unwrap().set_len(1 << 20).unwrap();
    check_failure(&client.wait_with_output().unwrap(), 4, &["source", "offset"]);
}

#[test]
fn a_closed_standard_output_is_no_place_for_a_copy() {
    let shell = |redirection: &str| {
        let script = format!("exec \"$0\" copy sample:1M - {redirection}");
        tools::output(Command::new("sh").args(["-c", &script, OURS]), LIMIT).unwrap()
    };
    check_failure(&shell(">&-"), 3, &["standard output", "null:"]);
    check_failure(&shell("1</dev/null"), 3, &["standard output"]);
    assert!(shell(">/dev/null").status.success());
    assert_eq!(shell("").stdout.len(), 1 << 20);
}

#[test]
fn interrupted_while_nothing_comes_from_a_pipe_it_ends() {
    let scratch = ScratchDir::new().unwrap();
    let disk = scratch.file("disk");
    let mut command = Command::new(OURS);
    command.args(["copy", "--request-size=64k", "-"]).arg(&disk);
    let mut child = command.stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut pipe = child.stdin.take().unwrap();
    pipe.write_all(&[b'x'; 100_000]).unwrap();
    // The first request is carried out, and the second one never comes whole.
    tools::until("it has written a request", || {
        std::fs::metadata(&disk).is_ok_and(|data| data.blocks() * 512 >= 64 << 10)
    });
    kill_process(Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap(), Signal::TERM).unwrap();
    let status = tools::wait_within(&mut child, LIMIT).expect("it waits for the pipe");
    let mut said = String::new();
    child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert_eq!(status.code(), Some(143), "{said}");
    assert!(said.contains("stopped by a signal"), "{said}");
    // What has come is where it belongs.
    drop(pipe);
    assert_eq!(std::fs::read(&disk).unwrap()[..100_000], [b'x'; 100_000]);
}

#[test]
fn interrupted_it_drains_and_says_so() {
    for (signal, status) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let child = begun(&["--source-layer", "rate?rate=4M", "pattern:256M", "null:"]);
        let pid = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
        kill_process(pid, signal).unwrap();
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(status), "{}", text(&output.stderr));
        assert!(text(&output.stderr).contains("stopped by a signal"), "{}", text(&output.stderr));
    }
}

#[test]
fn interrupted_while_the_source_is_opened_it_does_not_wait() {
    let scratch = ScratchDir::new().unwrap();
    let socket = scratch.socket("silent");
    // It takes connections, and says nothing.
    let listener = UnixListener::bind(&socket).unwrap();
    let uri = format!("nbd+unix:///?socket={}", socket.display());
    let mut command = Command::new(OURS);
    command.args(["copy", "--timeout", "1h", &uri, "null:"]).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let connection = listener.accept().unwrap();
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    let status = tools::wait_within(&mut child, LIMIT);
    drop(connection);
    assert_eq!(status.expect("it waits for the server").code(), Some(130));
}

#[test]
fn stopped_while_it_is_verified_it_says_that_all_is_copied() {
    let scratch = ScratchDir::new().unwrap();
    let source = scratch.file("source");
    std::fs::write(&source, pattern(16 << 20)).unwrap();
    let [journal, target] = ["journal", "target"].map(|name| scratch.file(name));
    let [journal, from, to] = [&journal, &source, &target].map(|path| path.to_str().unwrap());
    for (options, words) in [
        (vec!["--verify"], "all data is copied, but not verified: copy it again, or compare"),
        (
            vec!["--verify", "--journal", journal],
            "all data is copied, but not verified: run it again to",
        ),
    ] {
        // Only verification reads the target, and takes half a minute for it.
        let layer = ["--target-layer", "delay?read=500ms", "-C", "1", "--requests=4"];
        let ends = ["--request-size=64k", "--progress=json:1", from, to];
        let mut command = Command::new(OURS);
        command.arg("copy").args(&options).args(layer).args(ends).stdin(Stdio::null());
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        for line in lines {
            let line: serde_json::Value = serde_json::from_str(&line.unwrap()).unwrap();
            if line["phase"] == "verify" {
                break;
            }
        }
        let pid = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
        kill_process(pid, Signal::TERM).unwrap();
        let output = child.wait_with_output().unwrap();
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(143), "{said}");
        assert!(said.contains(words) && !said.contains("incomplete"), "{said}");
        assert!(!said.contains("--journal"), "{said}");
    }
}

#[test]
fn words_that_cannot_be_understood() {
    assert_fails(&["tape:1", "null:"], 2, &["tape", "known are"]);
    assert_fails(&["patern:1M", "null:"], 2, &["did you mean pattern?"]);
    assert_fails(&["perl:x.pl", "null:"], 2, &["'nbdkit:perl?script=x.pl'"]);
    assert_fails(&["ftp://h/x", "null:"], 2, &["'nbdkit:curl?url=ftp://h/x'"]);
    assert_fails(&["parallels:x.img", "null:"], 2, &["[ qemu-nbd -f parallels x.img ]"]);
    assert_fails(&["vmdk:x.img", "null:"], 3, &["x.img", "check the name"]);
    assert_fails(&["qcow2:x.img", "null:"], 3, &["x.img", "check the name"]);
    assert_fails(&["rate:1M", "null:"], 2, &["rate is a layer"]);
    assert_fails(&["memory", "null:"], 2, &["for the device write memory:SIZE"]);
    assert_fails(&["/dev/null?lock=off", "null:"], 2, &["write file:/dev/null?lock=off"]);
    assert_fails(&["--source-layer=rat?rate=1", "null:1", "null:"], 2, &["did you mean rate?"]);
    assert_fails(&["", "null:"], 2, &["empty"]);
    assert_fails(&["sample:1M?dta=3", "null:"], 2, &["dta", "known are"]);
    assert_fails(&["file:%zz", "null:"], 2, &["%"]);
    assert_fails(&["--verify", "-", "null:"], 2, &["--verify"]);
    for args in
        [&["--request-size=5000", "a", "b"][..], &["a"], &["a", "b", "c"], &["-C", "0", "a", "b"]]
    {
        let output = copy(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(text(&output.stderr).starts_with("error: "), "{}", text(&output.stderr));
    }
    let output = copy(&["[", "a", "[", "b", "]", "null:"]);
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(text(&output.stderr).lines().count(), 1);
}
