//! Sources whose queries for extents take long: noticed by measuring, and asked as little as possible.

use std::process::Command;
use std::time::Duration;

use blockhaul_testkit::require_peer;
use blockhaul_testkit::tools::{self, Scratch, Server, text};

const LIMIT: Duration = Duration::from_secs(120);
const OURS: &str = env!("CARGO_BIN_EXE_blockhaul");
/// What `--verbose` prints about a slow source.
const NOTICED: &str = "a query for extents takes";

/// Copies and verifies a disk of 4 GiB with 20000 pieces of data from a server whose queries take
/// `delay`. Returns what was printed, and the number of queries.
fn copy_from(scratch: &Scratch, delay: &str) -> (String, u64) {
    let list: String =
        (0..20_000_u64).map(|piece| format!("{} 4096\n", piece * 200 * 1024)).collect();
    let (list_file, target) = (scratch.file("list"), scratch.file("target"));
    std::fs::write(&list_file, list).unwrap();
    let slow = format!("delay?extents={delay}");
    let list = format!("extentlist?extentlist={}", list_file.display());
    let run = format!("{OURS} copy --verbose --verify \"$uri\" {}", target.display());
    let words = ["serve", "--layer", &list, "--layer", &slow, "--layer", "stats", "null:4G"];
    let mut command = Command::new(OURS);
    let output = tools::output(command.args(words).args(["--run", &run]), LIMIT).unwrap();
    assert!(output.status.success(), "{output:?}");
    let said = text(&output.stderr).to_string();
    let row = said.lines().find_map(|line| line.strip_prefix("extents ")).unwrap();
    let queries = row.split_whitespace().next().unwrap().parse().unwrap();
    (said, queries)
}

#[test]
fn a_copy_asks_a_slow_source_once_and_a_quick_one_as_before() {
    let scratch = Scratch::new().unwrap();
    let (said, queries) = copy_from(&scratch, "50ms");
    assert!(said.contains(NOTICED), "{said}");
    // Two are measured; the verification asks nothing.
    assert!(queries <= 4, "{queries}: {said}");
    // On a busy machine a quick source may look slow for a moment.
    let is_quick = |_| {
        let (said, quick) = copy_from(&scratch, "0s");
        !said.contains(NOTICED) && quick > queries
    };
    assert!((0..5).any(is_quick));
}

#[test]
fn map_and_info_notice_a_slow_server() {
    let nbdkit = require_peer!("nbdkit");
    let scratch = Scratch::new().unwrap();
    for (delay, slow) in [("40ms", true), ("0", false)] {
        let delay = format!("delay-extents={delay}");
        let socket = scratch.socket(if slow { "slow" } else { "quick" });
        let args = ["--filter=delay", "memory", "64G", &delay];
        let server = Server::nbdkit(&nbdkit, &socket, &args).unwrap();
        for words in [vec!["map"], vec!["info", "--map"]] {
            let is_noticed = |_| {
                let mut command = Command::new(OURS);
                command.args(&words).args(["--verbose", &server.uri("")]);
                let output = tools::output(&mut command, LIMIT).unwrap();
                assert_eq!(text(&output.stdout), "         0  68719476736    3  hole,zero\n");
                text(&output.stderr).contains(NOTICED)
            };
            // On a busy machine a quick server may look slow for a moment.
            assert!((0..5).any(|attempt| is_noticed(attempt) == slow), "{words:?}, {slow}");
        }
    }
}
