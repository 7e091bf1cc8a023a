//! Servers that are slow in their own ways: connections whose handshake never ends, and servers that
//! are slower the more connections there are. These take their time: `BLOCKHAUL_LONG` runs them.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use blockhaul_tests::{LIMIT, assert_same, blockhaul, bounded, lossy, text};
use testkit::model::Model;
use testkit::peer::{self, HandshakeFault, Offer, Scripted};
use testkit::require_peer;
use testkit::rng::{Rng, seed};
use testkit::tools::{Scratch, Server};

/// Whether tests may take long.
fn long() -> bool {
    std::env::var_os("BLOCKHAUL_LONG").is_some()
}

fn image(scratch: &Scratch, size: usize) -> PathBuf {
    let mut bytes = vec![0; size];
    Rng::new(seed()).fill(&mut bytes);
    let path = scratch.file("image");
    fs::write(&path, bytes).unwrap();
    path
}

#[test]
fn a_handshake_that_never_ends_is_given_up_after_ten_seconds() {
    if !long() {
        return eprintln!("skipped: takes 13 seconds, set BLOCKHAUL_LONG");
    }
    let scratch = Scratch::new().unwrap();
    let size = 26 << 20;
    let image = image(&scratch, size);
    let content = fs::read(&image).unwrap();
    for fault in [HandshakeFault::Silent, HandshakeFault::StopAtOption(2)] {
        let first = Offer::new(Model::new(size as u64).with_content(content.clone()));
        let mut second = Offer::new(Model::new(size as u64)).handshake(fault.clone());
        second.model = first.model.clone();
        let from = Scripted::start(move |talk, number| {
            let _ = peer::serve(talk, number, if number == 0 { &first } else { &second });
            Ok(())
        });
        let target = scratch.file("target");
        // 13 seconds, and segments enough for all connections.
        let slow = ["--rate=2M", "--segment=1M", "--request-size=128k"];
        let ends = ["-v", &from.uri(), text(&target)];
        let output = bounded(&mut blockhaul(&[&["copy"], &slow[..], &ends].concat()), LIMIT);
        let said = lossy(&output.stderr);
        assert!(output.status.success(), "{fault:?}: {said}");
        assert!(from.connections() > 1, "{fault:?}: no second connection was tried");
        let warnings: Vec<_> = said.lines().filter(|line| line.contains("warning: ")).collect();
        assert_eq!(warnings.len(), 1, "{fault:?}: {said}");
        assert!(warnings[0].contains("no handshake within 10 s"), "{fault:?}: {said}");
        assert!(said.contains(" 1 lanes"), "{fault:?}: {said}");
        assert_same(&image, &target, &format!("{fault:?}"));
    }
}

/// A server that serves one request at a time, each the more slowly the more connections have asked for
/// the last eight.
const CROWDED: [&str; 5] = [
    "thread_model=echo serialize_all_requests",
    "open=date +%N",
    "can_multi_conn=exit 0",
    "get_size=stat -Lc %s \"$image\"",
    "pread=echo \"$2\" >> \"$asked\"; n=$(tail -n 8 \"$asked\" | sort -u | wc -l); \
     sleep \"$(printf 0.%03d $((2 * n * n)))\"; \
     dd if=\"$image\" iflag=skip_bytes,count_bytes skip=\"$4\" count=\"$3\" bs=256k status=none",
];

#[test]
fn a_server_that_is_slower_with_more_connections_is_used_with_fewer() {
    let nbdkit = require_peer!("nbdkit");
    if !long() {
        return eprintln!("skipped: takes half a minute, set BLOCKHAUL_LONG");
    }
    let scratch = Scratch::new().unwrap();
    let image = image(&scratch, 128 << 20);
    let (asked, target) = (scratch.file("asked"), scratch.file("target"));
    let socket = scratch.socket("s");
    let mut command = nbdkit.tied_command();
    command.env("image", &image).env("asked", &asked);
    command.args(["--foreground", "--unix"]).arg(&socket).arg("eval").args(CROWDED);
    let from = Server::start(command, &socket).unwrap();
    let options = ["--request-size=256k", "--segment=1M", "--progress=json"];
    let ends = ["-v", &from.uri(""), text(&target)];
    let mut copy = blockhaul(&[&["copy"], &options[..], &ends].concat());
    let output = bounded(&mut copy, 10 * LIMIT.max(Duration::from_secs(60)));
    let said = lossy(&output.stderr) + &lossy(&output.stdout);
    assert!(output.status.success(), "{said}");
    assert_same(&image, &target, "slower with more connections");
    let running = said.lines().filter(|line| line.contains("\"finished\":false"));
    let mut used = running.filter_map(|line| {
        let (_, rest) = line.split_once("\"connections\":")?;
        rest.split([',', '}']).next()?.parse::<u64>().ok()
    });
    let (most, end) = (used.clone().max(), used.next_back());
    assert!(most >= Some(4) && end < Some(4), "from {most:?} to {end:?} connections: {said}");
}
