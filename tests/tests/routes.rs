//! Which ways `blockhaul copy` takes between files and sockets, told by its own counters, with sizes
//! and offsets that fit nowhere.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use blockhaul_tests::{LIMIT, assert_same, blockhaul, bounded, lossy, serve, text};
use testkit::image;
use testkit::rng::seed;
use testkit::tools::Scratch;

/// Neither a multiple of a block nor of a request.
const SIZE: u64 = (24 << 20) + 1234;

/// Bytes by route.
type Routes = BTreeMap<String, u64>;

/// Runs a copy, which must succeed, and gives the counters of its closing line.
fn routes(command: &mut Command) -> Routes {
    let output = bounded(command, LIMIT);
    let told = lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {told}");
    let (_, routes) = told.split_once("routes: ").unwrap_or_else(|| panic!("{told}"));
    let routes = routes.split([';', '\n']).next().unwrap();
    let parse = |pair: &str| {
        let (name, bytes) = pair.rsplit_once(' ').unwrap();
        (name.to_string(), bytes.parse().unwrap())
    };
    routes.split(", ").map(parse).collect()
}

fn copy(args: &[&str]) -> Command {
    blockhaul(&[&["copy", "--verbose"], args].concat())
}

/// An image on a file system in memory, whose content is always in the page cache.
fn image(scratch: &Scratch) -> std::path::PathBuf {
    let path = scratch.file("source.img");
    image::sparse(&path, SIZE, seed()).unwrap();
    path
}

/// Bytes that went one way.
#[track_caller]
fn some(routes: &Routes, name: &str) -> u64 {
    *routes.get(name).unwrap_or_else(|| panic!("not {name}: {routes:?}"))
}

#[track_caller]
fn none(routes: &Routes, names: &[&str]) {
    for name in names {
        assert!(!routes.contains_key(*name), "{name}: {routes:?}");
    }
}

const KERNEL: [&str; 6] =
    ["file-to-socket", "socket-to-socket", "socket-to-file", "file-to-file", "vmsplice", "reflink"];

#[test]
fn payloads_stay_in_the_kernel_between_files_and_sockets() {
    let scratch = Scratch::new().unwrap();
    let source = image(&scratch);
    let targets = ["a.img", "b.img", "c.img"].map(|name| scratch.file(name));
    let from = serve(&scratch, "from", &["--read-only", text(&source)]);
    let [a, b, c] = targets.each_ref().map(|path| {
        std::fs::File::create(path).unwrap().set_len(SIZE).unwrap();
        text(path)
    });
    let to_a = serve(&scratch, "a", &[a]);
    let to_b = serve(&scratch, "b", &[b]);
    let cases = [
        ("socket-to-socket", from.uri(""), to_a.uri(""), a),
        ("file-to-socket", text(&source).to_string(), to_b.uri(""), b),
        ("socket-to-file", from.uri(""), c.to_string(), c),
    ];
    for (route, from, to, target) in cases {
        let routes = routes(&mut copy(&["-S", "0", &from, &to]));
        let moved = some(&routes, route);
        // What is short, and what lies at the end, goes through memory.
        assert!(moved > SIZE / 4, "{route}: {routes:?}");
        assert_eq!(some(&routes, "unseen"), moved + routes.get("memory").unwrap_or(&0));
        let others: Vec<_> = KERNEL.into_iter().filter(|other| *other != route).collect();
        none(&routes, &others);
        assert_same(&source, Path::new(target), route);
    }
}

#[test]
fn what_is_looked_at_goes_through_memory_and_zeroes_are_counted() {
    let scratch = Scratch::new().unwrap();
    let (source, target) = (image(&scratch), scratch.file("target.img"));
    let from = serve(&scratch, "from", &["--read-only", text(&source)]);
    let looked = routes(&mut copy(&["-S", "4096", &from.uri(""), text(&target)]));
    assert_same(&source, &target, "looked at");
    none(&looked, &KERNEL);
    none(&looked, &["unseen", "zeroes-written"]);
    some(&looked, "skip");
    // Zeroes shorter than asked for are written, and counted.
    let coarse = routes(&mut copy(&["-S", "65536", &from.uri(""), text(&target)]));
    assert_same(&source, &target, "looked at in large blocks");
    let zeroes = some(&coarse, "zeroes-written");
    assert_eq!(some(&coarse, "memory"), some(&looked, "memory") + zeroes);
}

#[test]
fn no_zero_copy_takes_everything_through_memory() {
    let scratch = Scratch::new().unwrap();
    let (source, target) = (image(&scratch), scratch.file("target.img"));
    let from = serve(&scratch, "from", &["--read-only", "--no-zero-copy", text(&source)]);
    let routes = routes(&mut copy(&["--no-zero-copy", "-S", "0", &from.uri(""), text(&target)]));
    assert_same(&source, &target, "through memory");
    none(&routes, &KERNEL);
    assert_eq!(some(&routes, "memory"), some(&routes, "unseen"));
}

/// Forgets what the page cache has of a file.
fn make_cold(path: &Path) -> io::File {
    let file = std::fs::File::open(path).unwrap();
    file.sync_all().unwrap();
    let file = io::File::new(file.into());
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    file
}

#[test]
fn what_is_cold_and_large_goes_past_the_page_cache() {
    let scratch = Scratch::on_disk().unwrap();
    let (source, target) = (scratch.file("source.img"), scratch.file("target.img"));
    let size = (64 << 20) + 1234;
    image::sparse(&source, size, seed()).unwrap();
    let ends = [text(&source), text(&target)];
    let file = make_cold(&source);
    if file.cached(0, size) != Some(0) {
        return eprintln!("the page cache cannot be emptied here: not checked");
    }
    let taken = routes(&mut copy(&ends));
    let cached = [file, open(&target)].map(|file| file.cached(0, size).unwrap());
    assert_same(&source, &target, "past the page cache");
    let data = some(&taken, "memory");
    let (read, written) = (some(&taken, "direct-read"), some(&taken, "direct-write"));
    // The last block is no whole one.
    assert!(read + 4096 > data && written + 4096 > data, "{taken:?}");
    // Files are read ahead in steps of this at the end, which alone is read through the page cache.
    assert!(cached.iter().all(|&bytes| bytes <= 256 << 10), "{cached:?}");
    // Now the source is cached, by the comparison.
    none(&routes(&mut copy(&ends)), &["direct-read", "direct-write"]);
    make_cold(&source);
    let off = [&["--direct=off"], &ends[..]].concat();
    none(&routes(&mut copy(&off)), &["direct-read", "direct-write"]);
    make_cold(&source);
    let on = [&["--direct=on"], &ends[..]].concat();
    some(&routes(&mut copy(&on)), "direct-read");
    assert_same(&source, &target, "all of it past the page cache");
}

fn open(path: &Path) -> io::File {
    io::File::new(std::fs::File::open(path).unwrap().into())
}
