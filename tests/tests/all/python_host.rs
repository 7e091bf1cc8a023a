//! nbdkit's examples of plugins in Python, run by our own host for Python.

use std::fs;
use std::path::PathBuf;

use blockhaul_testkit::tools::{ScratchDir, SkipReason, skip_or_fail};
use blockhaul_tests::{LIMIT, assert_same, bounded, distinct, lossy, text};

use crate::hosted::{blockhaul, root};

/// The examples, from nbdkit's source package.
fn examples() -> Option<PathBuf> {
    let exe = std::env::current_exe().unwrap();
    let folder = exe.ancestors().nth(3)?.join("nbdkit/source/plugins/python/examples");
    if !folder.is_dir() {
        skip_or_fail(&SkipReason::new(
            "nbdkit's source is absent; run `cargo xtask nbdkit-source`",
        ));
        return None;
    }
    root().is_some().then_some(folder)
}

/// Serves a disk for the time that a script runs, which has to succeed.
#[track_caller]
fn serving(device: &str, script: &str) -> String {
    let script = format!("set -e; {script}");
    let output = bounded(&mut blockhaul(&["serve", device, "--run", &script]), LIMIT);
    let said = lossy(&output.stderr);
    assert!(output.status.success(), "{device}: {}: {said}", output.status);
    lossy(&output.stdout) + &said
}

#[test]
fn nbdkits_file_and_memory_are_written_and_read() {
    let Some(folder) = examples() else { return };
    let scratch = ScratchDir::new().unwrap();
    let disk = scratch.file("disk");
    fs::File::create(&disk).unwrap().set_len(1 << 20).unwrap();
    let input = scratch.file("in");
    fs::write(&input, distinct(1 << 20)).unwrap();
    let out = scratch.file("out");
    let script = format!("nbdcopy {0} \"$uri\"; nbdcopy \"$uri\" {1}", text(&input), text(&out));
    let file = folder.join("file.py");
    let memory = folder.join("ramdisk.py");
    let devices = [
        format!("python:{}?file={}", text(&file), text(&disk)),
        format!("python:{}", text(&memory)),
    ];
    for device in devices {
        serving(&device, &script);
        assert_same(&input, &out, &device);
        fs::remove_file(&out).unwrap();
    }
    assert_same(&disk, &input, "the file behind file.py");
}

#[test]
fn nbdkits_example_of_errors_fails_every_second_call() {
    let Some(folder) = examples() else { return };
    let scratch = ScratchDir::new().unwrap();
    let disk = scratch.file("disk");
    fs::write(&disk, [b'x'; 4096]).unwrap();
    let example = folder.join("error.py");
    let device = format!("python:{}?file={}", text(&example), text(&disk));
    let script = "nbdsh -u \"$uri\" -c '
for expected in (False, True) * 3:
    try:
        worked = h.pread(512, 0) == b\"x\" * 512
    except nbd.Error as error:
        worked = False
        assert error.errno == \"EIO\", error
    assert worked == expected
'";
    let said = serving(&device, script);
    assert!(said.contains("pread error offset=0 count=512"), "{said}");
}
