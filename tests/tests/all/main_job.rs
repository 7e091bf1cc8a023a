//! The first thing that people try, on a smaller sample: serve a generated disk image, copy it over
//! NBD with several connections, verify it.

use std::fs;

use blockhaul_testkit::image;
use blockhaul_testkit::require_peer;
use blockhaul_testkit::tools::ScratchDir;
use blockhaul_tests::{
    LIMIT, assert_same, blockhaul, bounded, done, lossy, nonzero, peer, program, succeed, text,
};

#[test]
fn a_sample_is_served_copied_and_verified() {
    let scratch = ScratchDir::on_disk().unwrap();
    let disk = scratch.file("disk.raw");
    let again = scratch.file("again.raw");
    let source = ["[", "blockhaul", "serve", "sample:256M", "]"];
    let args = [&["copy", "--verify", "-v"], &source[..], &[text(&disk)]].concat();
    let output = bounded(&mut blockhaul(&args), LIMIT);
    let said = lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    assert!(said.contains("verified 268435456 bytes"), "{said}");
    assert_eq!(image::space(&disk).unwrap().apparent, 256 << 20);
    // 30% is data by default; the rest takes no place.
    let stored = image::space(&disk).unwrap().allocated;
    let data = nonzero(&disk, 4096).unwrap();
    assert!(stored <= data + (2 << 20), "{stored} bytes are stored for {data} bytes of data");
    assert!((50 << 20..110 << 20).contains(&data), "{data} bytes are data");

    // The same sample, without a server, and by another program.
    succeed(&["copy", "--no-extents", "sample:256M", text(&again)]);
    assert_same(&disk, &again, "without a server");
    fs::remove_file(&again).unwrap();
    let nbdcopy = require_peer!("nbdcopy");
    let source = ["[", text(program()), "serve", "sample:256M", "]"];
    peer(&nbdcopy, &[&source[..], &[text(&again)]].concat());
    assert_same(&disk, &again, "by nbdcopy");
}

#[test]
fn it_tells_programs_of_its_progress() {
    let scratch = ScratchDir::new().unwrap();
    let disk = scratch.file("disk.raw");
    // Slow enough for several lines.
    let source = ["[", "blockhaul", "serve", "--layer", "rate?rate=16M", "sample:64M", "]"];
    let args = [&["copy", "--verify", "--progress=json"], &source[..], &[text(&disk)]].concat();
    let output = bounded(&mut blockhaul(&args), LIMIT);
    assert!(output.status.success(), "{}", lossy(&output.stderr));
    let text = lossy(&output.stderr);
    let lines: Vec<serde_json::Value> =
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let last = lines.last().unwrap();
    assert_eq!(last["total"], 64 << 20, "{last}");
    assert_eq!(last["done"], 64 << 20, "{last}");
    assert_eq!(last["finished"], true, "{last}");
    let copied = lines.iter().rfind(|line| line["phase"] == "copy").unwrap();
    let sum = |line: &serde_json::Value| -> u64 {
        ["data", "zeroed", "skipped"].iter().map(|key| line[key].as_u64().unwrap()).sum()
    };
    assert_eq!(sum(copied), copied["done"].as_u64().unwrap(), "{copied}");
    let mut done = 0;
    for line in lines.iter().filter(|line| line["phase"] == "copy") {
        assert!(line["done"].as_u64().unwrap() >= done, "{line}");
        done = line["done"].as_u64().unwrap();
    }

    // As nbdcopy: percents on a descriptor.
    let mut command = std::process::Command::new("sh");
    command.args(["-c", "\"$0\" copy --progress=3 sample:64M null: 3>&1 >/dev/null"]);
    let percents = self::done(command.arg(program()));
    assert_eq!(percents.lines().last(), Some("100/100"), "{percents}");
}

/// `--verify` is worth something: a target that does not keep what it was given is found.
#[test]
fn a_target_that_loses_bytes_is_found() {
    let args = ["copy", "--verify", "[", "blockhaul", "serve", "sample:16M", "]", "null:16M"];
    let output = bounded(&mut blockhaul(&args), LIMIT);
    let said = lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(8), "{said}");
    assert!(said.contains("verif") && said.lines().count() == 1, "{said}");
}

#[test]
fn both_engines_do_it() {
    let scratch = ScratchDir::new().unwrap();
    for engine in ["auto", "threads", "uring"] {
        let disk = scratch.file(engine);
        let server = ["[", "blockhaul", "serve", "--engine", engine, "sample:32M?seed=3", "]"];
        let copy = ["copy", "--verify", "--engine", engine];
        let args = [&copy[..], &server, &[text(&disk)]].concat();
        let output = bounded(&mut blockhaul(&args), LIMIT);
        if engine == "uring" && !output.status.success() {
            // Containers often refuse it; that is said, and is no wrong copy.
            assert!(lossy(&output.stderr).contains("uring"), "{}", lossy(&output.stderr));
            continue;
        }
        assert!(output.status.success(), "{engine}: {}", lossy(&output.stderr));
        assert_same(&scratch.file("auto"), &disk, engine);
    }
}
