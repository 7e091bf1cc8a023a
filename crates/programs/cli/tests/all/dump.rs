//! `nbddump` against libnbd's on the same servers: the same bytes, and the same exit status.

use std::process::{Command, Output};
use std::time::Duration;

use blockhaul_testkit::require_peer;
use blockhaul_testkit::rng::{Rng, seed};
use blockhaul_testkit::tools::{self, PeerProgram, PeerServer, ScratchDir, text};

const LIMIT: Duration = Duration::from_secs(60);
/// Lines in the place of those that repeat: without colors, and with them at the beginning of the output
/// and after another line.
const MARKS: [&str; 3] = ["*\n", "\u{2606}\n", "\u{1b}[0m\u{2606}\n"];
const OURS: &str = env!("CARGO_BIN_EXE_blockhaul");

/// The results of both programs.
fn both(theirs: &PeerProgram, words: &[&str]) -> [Output; 2] {
    let mut ours = Command::new(OURS);
    ours.args(["compat", "nbddump"]);
    [theirs.command(), ours].map(|mut command| tools::output(command.args(words), LIMIT).unwrap())
}

fn compare(theirs: &PeerProgram, words: &[&str]) {
    let [theirs, ours] = both(theirs, words);
    assert_eq!(theirs.status.code(), ours.status.code(), "{words:?}: {}", text(&ours.stderr));
    let [theirs, ours] = [text(&theirs.stdout), text(&ours.stdout)];
    let left_out = MARKS.iter().find_map(|mark| theirs.strip_prefix(mark));
    assert_eq!(left_out.unwrap_or(&theirs), rest(&ours, left_out.is_some()), "{words:?}");
}

/// What libnbd's prints if it leaves out the first line. It does so if the line is equal to memory
/// that it has not initialized, and the offset is not 0: it depends on the machine for zeroes.
fn rest(ours: &str, left_out: bool) -> &str {
    if !left_out {
        return ours;
    }
    let (_, rest) = ours.split_once('\n').unwrap();
    // The color of the first line ends at the beginning of the second one.
    let mut ends = MARKS.iter().chain([&"\u{1b}[0m"]);
    ends.find_map(|end| rest.strip_prefix(end)).unwrap_or(rest)
}

/// Bytes of all kinds, with repeated lines, zeroes and long holes.
fn content(size: usize, rng: &mut Rng) -> Vec<u8> {
    let mut bytes = vec![0; size];
    for _ in 0..40 {
        let start = rng.below(size as u64) as usize;
        let end = (start + 1 + rng.below(100) as usize).min(size);
        match rng.below(3) {
            0 => bytes[start..end].fill(b'x'),
            1 => bytes[start..end].iter_mut().for_each(|byte| *byte = rng.below(256) as u8),
            _ => bytes[start..end].iter_mut().for_each(|byte| *byte = 32 + rng.below(95) as u8),
        }
    }
    bytes
}

#[test]
fn the_output_is_the_originals() {
    let nbdkit = require_peer!("nbdkit");
    let theirs = require_peer!("nbddump");
    let mut rng = Rng::new(seed());
    let scratch = ScratchDir::new().unwrap();
    let file = scratch.file("disk");
    for (round, size) in [0, 5, 16, 4096, 70_000, 300_000, 5 << 20].into_iter().enumerate() {
        std::fs::write(&file, content(size, &mut rng)).unwrap();
        let socket = scratch.socket(&format!("s{round}"));
        let server =
            PeerServer::nbdkit(&nbdkit, &socket, &["file", file.to_str().unwrap()]).unwrap();
        let uri = server.uri("");
        let from = rng.below(size as u64 + 1);
        let len = rng.below(2000);
        let from = from.to_string();
        let len = len.to_string();
        let almost = size.saturating_sub(3).to_string();
        let cases: &[&[&str]] = &[
            &[&uri],
            &["--color", &uri],
            &["-n", "100", &uri],
            &["-n", &almost, &uri],
            &["--limit=1M", &uri],
            &["--length=-1", "--no-colour", &uri],
            &["-o", &from, &uri],
            &["--skip", &from, "-n", &len, &uri],
            &["--colours", "--offset", &from, "--length", &len, &uri],
            &["-n", "x", &uri],
        ];
        cases.iter().for_each(|words| compare(&theirs, words));
    }
}

#[test]
fn holes_need_no_reads() {
    let scratch = ScratchDir::new().unwrap();
    let socket = scratch.socket("s");
    let server = PeerServer::blockhaul(OURS.as_ref(), &socket, &["memory:4T"]).unwrap();
    let mut command = Command::new(OURS);
    let output =
        tools::output(command.args(["compat", "nbddump", &server.uri("")]), LIMIT).unwrap();
    let zeroes = "00 00 00 00 00 00 00 00  00 00 00 00 00 00 00 00 |................|\n";
    let expected = format!("0000000000: {zeroes}*\n3fffffffff0: {zeroes}");
    assert_eq!(text(&output.stdout), expected);
}

#[test]
fn what_is_wrong_is_one_line() {
    for (words, part) in [
        (
            vec!["-o", "4097", "[", OURS, "serve", "memory:4096", "]"],
            "offset 4097 is behind the end",
        ),
        (vec!["nbd+unix:///?socket=/no/such"], "/no/such"),
        (vec!["disk.raw"], "is no NBD URI"),
    ] {
        let mut command = Command::new(OURS);
        command.args(["compat", "nbddump"]).args(&words);
        let output = tools::output(&mut command, LIMIT).unwrap();
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{words:?}");
        assert!(said.contains(part) && said.lines().count() == 1, "{words:?}: {said}");
    }
}
