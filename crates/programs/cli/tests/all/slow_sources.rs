//! Sources whose queries for extents take long: noticed by measuring, and asked as little as possible.

use std::process::Command;
use std::time::Duration;

use blockhaul_testkit::require_peer;
use blockhaul_testkit::tools::{self, PeerServer, ScratchDir, text};

const LIMIT: Duration = Duration::from_secs(120);
const OURS: &str = env!("CARGO_BIN_EXE_blockhaul");
/// What `--verbose` prints about a slow source.
const NOTICED: &str = "a query for extents takes";

/// Copies and verifies a disk of 4 GiB with 20000 pieces of data from a server whose queries take
/// `delay`. Returns what was printed, and the number of queries.
fn copy_from(scratch: &ScratchDir, delay: &str) -> (String, u64) {
    let list: String =
        (0..20_000_u64).map(|piece| format!("{} 4096\n", piece * 200 * 1024)).collect();
    let list_file = scratch.file("list");
    let target = scratch.file("target");
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
    let scratch = ScratchDir::new().unwrap();
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
    let scratch = ScratchDir::new().unwrap();
    for (delay, slow) in [("40ms", true), ("0", false)] {
        let delay = format!("delay-extents={delay}");
        let socket = scratch.socket(if slow { "slow" } else { "quick" });
        let args = ["--filter=delay", "memory", "64G", &delay];
        let server = PeerServer::nbdkit(&nbdkit, &socket, &args).unwrap();
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

/// An image with data, zeroes and two bitmaps, served by qemu-nbd.
fn bitmaps(qemu_nbd: &tools::PeerProgram, scratch: &ScratchDir) -> PeerServer {
    let image = scratch.file("image");
    let script = "qemu-img create -q -f qcow2 i 8M; qemu-io -c 'w 1M 64k' i
        qemu-img bitmap --add i a; qemu-img bitmap --add i b
        qemu-io -c 'w 2M 192k' -c 'w -z 4M 64k' i; mv i image";
    let mut command = tools::among_peers("sh").unwrap();
    let output = tools::output(command.args(["-ec", script]).current_dir(scratch.path()), LIMIT);
    assert!(output.unwrap().status.success());
    let image = image.to_str().unwrap();
    let args = ["-r", "-e", "8", "-f", "qcow2", "-B", "a", "-B", "b", image];
    PeerServer::qemu_nbd(qemu_nbd, &scratch.socket("s"), &args).unwrap()
}

/// Offset, length and state of the ranges of one context, adjacent equal ones joined.
fn ranges(all: impl Iterator<Item = (u64, u64, u64)>) -> Vec<(u64, u64, u64)> {
    let mut found: Vec<(u64, u64, u64)> = Vec::new();
    for (at, len, state) in all {
        match found.last_mut() {
            Some(last) if last.2 == state && last.0 + last.1 == at => last.1 += len,
            _ => found.push((at, len, state)),
        }
    }
    found
}

#[test]
fn a_map_of_several_contexts_shows_the_states_of_each() {
    let qemu_nbd = require_peer!("qemu-nbd");
    require_peer!("qemu-img");
    let scratch = ScratchDir::new().unwrap();
    let server = bitmaps(&qemu_nbd, &scratch);
    let uri = server.uri("");
    let map = |words: &[&str]| {
        let mut command = Command::new(OURS);
        let output = tools::output(command.args(["map", &uri]).args(words), LIMIT).unwrap();
        assert!(output.status.success(), "{words:?}: {output:?}");
        text(&output.stdout).to_string()
    };
    let names = ["qemu:dirty-bitmap:b", "base:allocation"];
    let contexts = ["--context", names[0], "--context", names[1]];
    let lines = map(&[&contexts[..], &["--format", "json-lines"]].concat());
    let lines: Vec<serde_json::Value> =
        lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    for (index, name) in names.into_iter().enumerate() {
        let number = |value: &serde_json::Value| value.as_u64().unwrap();
        let projected = ranges(lines.iter().map(|line| {
            let context = &line["contexts"][index];
            assert_eq!(context["context"], name);
            (number(&line["offset"]), number(&line["length"]), number(&context["type"]))
        }));
        let alone: serde_json::Value =
            serde_json::from_str(&map(&["--context", name, "--json"])).unwrap();
        let alone =
            alone.as_array().unwrap().iter().map(|line| {
                (number(&line["offset"]), number(&line["length"]), number(&line["type"]))
            });
        assert_eq!(projected, ranges(alone), "{name}");
    }
    let expected = "   1048576       65536    0  data    0  clean\n";
    let swapped = ["--context", names[1], "--context", names[0]];
    assert!(map(&swapped).contains(expected));
    let totals = map(&[&swapped[..], &["--totals"]].concat());
    assert!(totals.contains("    196608   2.3%   0 data   1 dirty\n"), "{totals}");
    let svg = scratch.file("map.svg");
    let strips = map(&[&swapped[..], &["--strip", "--svg", svg.to_str().unwrap()]].concat());
    let legends: Vec<_> = strips.lines().skip(1).step_by(2).collect();
    assert!(legends[0].starts_with("data: 256 KiB of 8 MiB"), "{strips}");
    assert!(legends[1].starts_with("dirty: 256 KiB of 8 MiB"), "{strips}");
    let svg = std::fs::read_to_string(svg).unwrap();
    assert!(svg.contains(">data: 256 KiB") && svg.contains(">dirty: 256 KiB"), "{svg}");
}

#[test]
fn a_copy_shows_a_map_that_fills() {
    let scratch = ScratchDir::new().unwrap();
    let source = scratch.file("source");
    let file = std::fs::File::create(&source).unwrap();
    file.set_len(64 << 20).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &vec![1; 32 << 20], 0).unwrap();
    let mut command = Command::new(OURS);
    command.args(["copy", "--progress=map", "--verify", source.to_str().unwrap()]);
    let output = tools::output(command.arg(scratch.file("target")), LIMIT).unwrap();
    let said = text(&output.stderr).to_string();
    let last = said.rsplit('\r').next().unwrap();
    assert!(last.starts_with("100% [") && last.contains("/s"), "{said}");
    let cells = last.split(['[', ']']).nth(1).unwrap();
    assert!(cells.len() >= 64 && cells.chars().all(|cell| "#*.".contains(cell)), "{said}");
    assert!(cells.starts_with(['#', '*']), "{said}");
    let refused = Command::new(OURS).args(["copy", "--progress=maps", "a", "b"]).output().unwrap();
    assert!(text(&refused.stderr).contains("map, json or json:FD"));
}

#[test]
fn a_context_that_is_missing_or_given_twice_is_refused() {
    let cases: [(&[&str], &str); 2] = [
        (&["base:allocation", "base:allocation"], "base:allocation is given twice"),
        (&["base:allocation", "qemu:dirty-bitmap:b"], "does not support metadata context"),
    ];
    for (contexts, part) in cases {
        let mut command = Command::new(OURS);
        let contexts = contexts.iter().flat_map(|name| ["--context", name]);
        let output = tools::output(command.args(["map", "memory:1M"]).args(contexts), LIMIT);
        let said = text(&output.unwrap().stderr).to_string();
        assert!(said.contains(part) && said.lines().count() == 1, "{said}");
    }
}
