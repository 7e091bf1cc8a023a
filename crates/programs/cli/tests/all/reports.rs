//! Output and control of `blockhaul copy` while it runs: digests, rates by the time of day, metrics
//! for Prometheus.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use blockhaul_testkit::tools::{self, ScratchDir, text};
use rustix::process::{Pid, Signal, kill_process};

const LIMIT: Duration = Duration::from_secs(120);
const OURS: &str = env!("CARGO_BIN_EXE_blockhaul");

fn copy(args: &[&str]) -> Output {
    tools::output(Command::new(OURS).arg("copy").args(args), LIMIT).unwrap()
}

#[test]
fn the_slow_side_is_seen() {
    let times = |layer: &str| {
        // Longer than a machine stands still, and no more requests than are made at once.
        let layer = [layer, "delay?read=3s&write=3s", "--request-size", "64k"];
        let output = copy(&[&["-v"], &layer[..], &["pattern:256k", "memory:256k"]].concat());
        let said = text(&output.stderr);
        ["a read took ", "a write took "].map(|words| {
            let time = said.split(words).nth(1).and_then(|rest| rest.split(' ').next());
            time.and_then(|time| time.parse::<f64>().ok()).unwrap_or_else(|| panic!("{said}"))
        })
    };
    let [read, write] = times("--source-layer");
    assert!(read >= 3000.0 && write < read, "{read} {write}");
    let [read, write] = times("--target-layer");
    assert!(write >= 3000.0 && read < write, "{read} {write}");
}

#[test]
fn the_digest_is_that_of_the_copy() {
    let scratch = ScratchDir::new().unwrap();
    let disk = scratch.file("disk");
    let path = disk.to_str().unwrap();
    for name in ["blake3", "sha256", "blksum"] {
        let copied = copy(&["--digest", name, "sample:20M", path]);
        let told = text(&copied.stdout);
        let (digest, rest) = told.split_at(64);
        assert!(copied.status.success() && rest == "  sample:20M\n", "{name}: {told}");
        let args = ["checksum", "--digest", name, path];
        let output = tools::output(Command::new(OURS).args(args), LIMIT).unwrap();
        assert!(text(&output.stdout).starts_with(digest), "{name}: {told}");
        // To standard output go the bytes, and the digest elsewhere.
        let piped = copy(&["--digest", name, path, "-"]);
        assert_eq!(piped.stdout, std::fs::read(&disk).unwrap());
        assert_eq!(text(&piped.stderr), format!("{digest}  {path}\n"));
    }
    let sum = Command::new("sha256sum").arg(path).output().unwrap();
    let ours = copy(&["--digest", "sha256", path, "null:"]);
    assert_eq!(text(&ours.stdout), text(&sum.stdout));
    let part = copy(&["--digest", "sha256", "--range", "0:1M", path, "null:"]);
    assert_eq!(part.status.code(), Some(2), "the digest of a part: {}", text(&part.stderr));
    let wrong = copy(&["--digest", "md5", path, "null:"]);
    assert_eq!(wrong.status.code(), Some(2));
    assert!(text(&wrong.stderr).contains("blake3, sha256, blksum"), "{}", text(&wrong.stderr));
}

#[test]
fn rates_follow_the_local_time_of_day() {
    let run = |zone: &str, rules: &str| {
        let mut command = Command::new(OURS);
        command.env("TZ", zone).args(["copy", "--rate", rules, "pattern:4M", "null:"]);
        let start = Instant::now();
        let output = tools::output(&mut command, LIMIT).unwrap();
        (output, start.elapsed())
    };
    // The clock of this zone is always between 00:00 and 24:00; whichever rule is for now, it counts.
    let slow = Duration::from_millis(400);
    let (output, time) = run("BHT5", "00:00-12:00=8M,12:00-24:00=8M,*=0");
    assert!(output.status.success() && time >= slow, "{time:?}: {}", text(&output.stderr));
    // In a zone where it is 04:30 now.
    const DAY: u64 = 24 * 60;
    let now = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs() / 60 % DAY;
    let west = (now + DAY - (4 * 60 + 30)) % DAY;
    let (sign, minutes) = if west <= DAY / 2 { ("", west) } else { ("-", DAY - west) };
    let zone = format!("BHT{sign}{}:{:02}", minutes / 60, minutes % 60);
    let (output, time) = run(&zone, "04:00-05:00=8M,*=0");
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(time >= slow, "{zone}: {time:?}");
    let (other, _) = run(&zone, "05:00-04:00=1k,*=0");
    assert!(other.status.success(), "{}", text(&other.stderr));
    let (output, _) = run("Nowhere/AtAll", "04:00-05:00=8M,*=0");
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
    let (output, _) = run("UTC0", "25:00-26:00=8M");
    assert!(text(&output.stderr).contains("08:00-18:00=50M"), "{}", text(&output.stderr));
    assert_eq!(output.status.code(), Some(2));
}

/// What a server of figures answers on this socket.
fn page(socket: &Path) -> String {
    let mut peer = tools::until_ok("it listens", || UnixStream::connect(socket));
    peer.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    let mut answer = String::new();
    peer.read_to_string(&mut answer).unwrap();
    let (head, page) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 OK"), "{head}");
    page.to_string()
}

/// The value of a figure.
fn figure(page: &str, name: &str) -> f64 {
    let line = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("no {name} in {page}")).parse().unwrap()
}

#[test]
fn metrics_tell_of_a_copy_under_way() {
    let scratch = ScratchDir::new().unwrap();
    let socket = scratch.socket("metrics");
    let address = format!("unix:{}", socket.display());
    let target = scratch.file("target");
    let mut child = Command::new(OURS)
        .args(["copy", "--metrics", &address, "--rate", "4M", "--request-size", "64k"])
        .args(["--source-layer", "error?read=5%", "--retry-delay", "1ms", "--retries", "99"])
        .args(["pattern:4G", target.to_str().unwrap()])
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let metrics = tools::until_ok("bytes and retries are counted", || {
        let metrics = page(&socket);
        let data = figure(&metrics, "blockhaul_copy_bytes_total{kind=\"data\"}");
        let retries = figure(&metrics, "blockhaul_copy_retries_total{side=\"source\"}");
        if data > 2e6 && retries > 0.0 { Ok(metrics) } else { Err(metrics) }
    });
    assert_eq!(figure(&metrics, "blockhaul_copy_size_bytes"), 4.0 * f64::from(1 << 30));
    assert_eq!(figure(&metrics, "blockhaul_copy_limit_bytes_per_second"), f64::from(4 << 20));
    assert_eq!(figure(&metrics, "blockhaul_copy_request_size_bytes"), f64::from(64 << 10));
    assert!(figure(&metrics, "blockhaul_copy_connections") >= 1.0, "{metrics}");
    for side in ["source", "target"] {
        let count = format!("blockhaul_copy_request_duration_seconds_count{{side=\"{side}\"}}");
        assert!(figure(&metrics, &count) > 20.0, "{metrics}");
    }
    assert!(
        figure(&metrics, "blockhaul_copy_route_bytes_total{route=\"memory\"}") > 0.0,
        "{metrics}"
    );
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert!(!socket.exists(), "removed in the end");
    for wrong in ["0.0.0.0:1", "9100", "unix:"] {
        let output = copy(&["--metrics", wrong, "null:1M", "null:"]);
        assert_eq!(output.status.code(), Some(2), "{wrong}: {}", text(&output.stderr));
    }
    let output = copy(&["--metrics", "unix:/nowhere/at/all", "null:1M", "null:"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("cannot listen on unix:/nowhere"));
}

#[test]
fn a_file_grows_with_what_comes_through_the_pipe() {
    let scratch = ScratchDir::new().unwrap();
    let target = scratch.file("target");
    std::fs::write(&target, vec![7; 9 << 20]).unwrap();
    let mut child = Command::new(OURS)
        .args(["copy", "--request-size", "64k", "-", target.to_str().unwrap()])
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let mut pipe = child.stdin.take().unwrap();
    let bytes: Vec<u8> = (0..3_000_001_u32).map(|at| (at % 251) as u8).collect();
    pipe.write_all(&bytes).unwrap();
    let whole = bytes.len() as u64 / (64 << 10) * (64 << 10);
    // Several requests are written at a time, not the last one last.
    tools::until_ok("all whole requests are written", || {
        let written = std::fs::read(&target).unwrap();
        if written == bytes[..whole as usize] { Ok(()) } else { Err(written.len()) }
    });
    // What a SIGKILL leaves is no larger than what was written.
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(std::fs::read(&target).unwrap(), bytes[..whole as usize]);
    // Zeroes at the end are part of it.
    let zeroes = [vec![1; 5000], vec![0; 200_000]].concat();
    for options in [&[][..], &["-S", "0"], &["--allocated"], &["--flush"]] {
        let mut child = Command::new(OURS)
            .args(["copy", "-", target.to_str().unwrap()])
            .args(options)
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(&zeroes).unwrap();
        assert!(child.wait().unwrap().success());
        assert!(std::fs::read(&target).unwrap() == zeroes, "{options:?}");
    }
}
