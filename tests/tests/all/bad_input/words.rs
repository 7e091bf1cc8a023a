//! What is said on the command line, and sizes at the ends of what there is.

use super::*;

#[test]
fn a_word_that_means_nothing_is_refused_with_what_was_meant() {
    let scratch = ScratchDir::new().unwrap();
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
    refused(
        &["compat"],
        USAGE,
        &[
            "missing",
            "known are nbdcopy, nbddiscard, nbddump, nbdinfo, nbdkit, nbdzero, qemu-img, qemu-nbd, \
             qemu-storage-daemon",
        ],
    );
    refused(
        &["compat", "nbdfuse"],
        USAGE,
        &["nbdfuse", "nbdcopy, nbddiscard, nbddump, nbdinfo, nbdkit"],
    );
    assert!(succeed(&["compat", "--help"]).ends_with(
        "Programs: nbdcopy, nbddiscard, nbddump, nbdinfo, nbdkit, nbdzero, qemu-img, qemu-nbd, \
         qemu-storage-daemon\n"
    ));
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

/// Odd sizes are no error: what was there comes out.
#[test]
fn empty_and_odd_sizes_are_copied_whole() {
    let nbdkit = require_peer!("nbdkit");
    let scratch = ScratchDir::new().unwrap();
    for (index, size) in [0, 1, 511, 513, 4095, 65537, (1 << 20) + 1].into_iter().enumerate() {
        let image = scratch.file("image");
        let target = scratch.file("target");
        fs::write(&image, WriteFill::Random(9).bytes(size)).unwrap();
        let what = format!("{size} bytes");
        match size {
            // An empty source does not empty a file.
            0 => drop(fs::remove_file(&target)),
            _ => garbage(&target, 100_000).unwrap(),
        }
        succeed(&["copy", "--verify", text(&image), text(&target)]);
        assert_same(&image, &target, &what);
        let ours = serve(&scratch, &format!("s{index}"), &[text(&image)]);
        let args = ["file", text(&image)];
        let nbdkits = scratch.socket(&format!("k{index}"));
        let nbdkits = PeerServer::nbdkit(&nbdkit, &nbdkits, &args).unwrap();
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
fn the_largest_device_is_served_measured_and_mapped() {
    let nbdkit = require_peer!("nbdkit");
    let scratch = ScratchDir::new().unwrap();
    let size = i64::MAX as u64;
    let name = format!("zero:{size}");
    let ours = serve(&scratch, "s", &[&name]);
    let args = ["null", &size.to_string()];
    let nbdkits = PeerServer::nbdkit(&nbdkit, &scratch.socket("k"), &args).unwrap();
    let target = scratch.file("target");
    for server in [&ours, &nbdkits] {
        let uri = server.uri("");
        assert_eq!(succeed(&["info", "--size", &uri]), format!("{size}\n"));
        succeed(&["info", &uri]);
        let words = ["smaller", &size.to_string()];
        refused(&["copy", &uri, "memory:1G"], OPEN, &words);
        // Most file systems take no file of this size, tmpfs does: then the copy is over at once
        // where the server's answers cover all of it, else it is stopped.
        let mut copy = blockhaul_tests::blockhaul(&["copy", &uri, text(&target)]);
        let mut copy = copy.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let grown = || image::space(&target).is_ok_and(|space| space.apparent == size);
        until("there is a target", || copy.try_wait().unwrap().is_some() || grown());
        // Time for the end of those that are over at once; and it may have ended.
        if wait_within(&mut copy, Duration::from_secs(2)).is_none() {
            done(Command::new("kill").args(["-s", "TERM", &copy.id().to_string()]));
        }
        assert!(wait_within(&mut copy, SOON).is_some(), "it does not stop");
        let output = copy.wait_with_output().unwrap();
        let status = output.status.code().unwrap_or(-1);
        if [0, 143].contains(&status) {
            assert!(grown(), "{status}: {}", lossy(&output.stderr));
            fs::remove_file(&target).unwrap();
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
