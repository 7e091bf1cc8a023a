//! What is about to happen to other data than was meant is said, or refused.

use std::process::{Command, Output, Stdio};
use std::time::Duration;

use blockhaul_testkit::tools::{self, Peer, Scratch, text};

const OURS: &str = env!("CARGO_BIN_EXE_blockhaul");
const LIMIT: Duration = Duration::from_secs(60);

fn copy(args: &[&str]) -> Output {
    tools::output(Command::new(OURS).arg("copy").args(args), LIMIT).unwrap()
}

/// The first bytes of a qcow2 image, and some more.
const QCOW2: &[u8] = b"QFI\xfb\0\0\0\x03 and more";

#[test]
fn the_bytes_of_an_image_are_used_with_a_warning() {
    let scratch = Scratch::new().unwrap();
    let (image, raw) = (scratch.file("vm.img"), scratch.file("out.raw"));
    std::fs::write(&image, QCOW2).unwrap();
    let (image, raw) = (image.to_str().unwrap(), raw.to_str().unwrap());
    let output = copy(&[image, raw]);
    let said = text(&output.stderr);
    assert!(output.status.success(), "{said}");
    let wanted = format!("warning: {image} is a qcow2 image and is copied as it is");
    assert!(said.contains(&wanted) && said.contains("blockhaul copy qcow2:"), "{said}");
    assert_eq!(std::fs::read(raw).unwrap(), QCOW2);
    // Not if the user says so, or the target is one as well.
    let file = format!("file:{image}");
    let [plain, other] = ["plain.raw", "copy.img"].map(|name| scratch.file(name));
    for args in [[&file, plain.to_str().unwrap()], [image, other.to_str().unwrap()]] {
        let output = copy(&args);
        assert!(output.status.success() && output.stderr.is_empty(), "{}", text(&output.stderr));
    }
    // The other way round.
    std::fs::write(raw, "raw bytes").unwrap();
    let said = text(&copy(&[raw, image]).stderr);
    assert!(said.contains("is a qcow2 image and is overwritten with raw bytes"), "{said}");
    std::fs::write(image, QCOW2).unwrap();
    let served = ["serve", "--run", "true", image];
    let output = tools::output(Command::new(OURS).args(served), LIMIT).unwrap();
    let said = text(&output.stderr);
    assert!(said.contains("its bytes are served as they are"), "{said}");
}

#[test]
fn an_empty_source_does_not_empty_a_file() {
    let scratch = Scratch::new().unwrap();
    let (empty, disk) = (scratch.file("empty"), scratch.file("disk"));
    std::fs::write(&empty, "").unwrap();
    std::fs::write(&disk, "data").unwrap();
    let (empty, disk) = (empty.to_str().unwrap(), disk.to_str().unwrap());
    for source in ["null:", empty] {
        let output = copy(&[source, disk]);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(3), "{said}");
        assert!(said.contains("is empty: 4 bytes of"), "{said}");
        assert_eq!(std::fs::read(disk).unwrap(), b"data");
    }
    let new = scratch.file("new");
    assert!(copy(&[empty, new.to_str().unwrap()]).status.success());
    assert_eq!(std::fs::read(new).unwrap(), b"");
}

#[test]
fn a_disk_is_not_written_to_a_terminal() {
    if Command::new("script").arg("--version").stdout(Stdio::null()).status().is_err() {
        println!("there is no script(1)");
        return;
    }
    let scratch = Scratch::new().unwrap();
    let log = scratch.file("log");
    for name in ["copy", "compat nbdcopy"] {
        let mut command = Command::new("script");
        let line = format!("{OURS} {name} -- pattern:1M - ");
        let line =
            if name == "copy" { line } else { line.replace("pattern:1M", "/etc/os-release") };
        command.args(["-q", "-e", "-c", &line]).arg(&log).stdin(Stdio::null());
        let output = tools::output(&mut command, LIMIT).unwrap();
        let said = text(&output.stdout);
        assert!(!output.status.success(), "{name}: {said}");
        assert!(said.contains("standard output is a terminal"), "{name}: {said}");
    }
}

#[test]
fn a_limit_on_the_size_of_files_is_an_error() {
    let scratch = Scratch::new().unwrap();
    let script = "ulimit -f 100; exec \"$0\" copy --no-progress random:1M \"$1\"";
    let mut command = Command::new("sh");
    command.args(["-c", script, OURS]).arg(scratch.file("disk"));
    let output = tools::output(&mut command, LIMIT).unwrap();
    let said = text(&output.stderr);
    assert!(matches!(output.status.code(), Some(3..=6)), "{:?}: {said}", output.status);
    assert!(said.contains("File too large"), "{said}");
}

#[test]
fn an_image_is_created_checked_and_repaired() {
    let Some(img) = Peer::require("qemu-img") else { return };
    let scratch = Scratch::new().unwrap();
    let (raw, image) = (scratch.file("disk.raw"), scratch.file("new.qcow2"));
    let bytes: Vec<u8> = (0..3_000_064_u32).map(|n| (n % 249) as u8).collect();
    std::fs::write(&raw, &bytes).unwrap();
    let target = format!("qcow2:{}", image.display());
    let output = copy(&[&raw.display().to_string(), &target]);
    assert!(output.status.success(), "{output:?}");
    let theirs = |args: &[&str]| {
        let output = tools::output(img.command().args(args).arg(&image), LIMIT).unwrap();
        assert!(output.status.success(), "{args:?}: {output:?}");
    };
    theirs(&["check", "-q"]);
    let run = |args: &[&str]| {
        let mut command = Command::new(OURS);
        let output = tools::output(command.arg("check").args(args).arg(&image), LIMIT).unwrap();
        (output.status.code().unwrap(), text(&output.stdout))
    };
    let (status, text) = run(&[]);
    assert!(status == 0 && text.starts_with("no faults"), "{text}");
    // Cluster 3 has one reference; the refcounts begin in cluster 2.
    let mut bytes = std::fs::read(&image).unwrap();
    bytes[(2 << 16) + 7] = 2;
    std::fs::write(&image, &bytes).unwrap();
    let (status, text) = run(&["--json"]);
    let found: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!((status, &found["leaks"]), (3, &1.into()), "{text}");
    let (status, text) = run(&["--repair", "leaks"]);
    assert!(status == 0 && text.contains("repaired: 1 leaks"), "{text}");
    theirs(&["check", "-q"]);
    bytes[(2 << 16) + 7] = 0;
    std::fs::write(&image, &bytes).unwrap();
    assert_eq!(run(&[]).0, 2);
    assert_eq!(run(&["--repair", "leaks"]).0, 2);
    assert_eq!(run(&["--repair", "all"]).0, 0);
    theirs(&["check", "-q"]);
    std::fs::write(&image, b"something else").unwrap();
    assert_eq!(run(&[]).0, 1);
}

/// A copy of a part keeps the rest of an image that is there.
#[test]
fn options_of_an_inner_uri_are_escaped() {
    let refused = copy(&["qcow2:nbd+unix:///?socket=s", "null:"]);
    assert_eq!(refused.status.code(), Some(2));
    let said = text(&refused.stderr);
    assert!(
        said.contains("unknown option \"socket\"") && said.contains("write %3f for ?"),
        "{said}"
    );
}

#[test]
fn a_part_is_copied_into_an_existing_image() {
    let scratch = Scratch::new().unwrap();
    let (one, other) = (scratch.file("one"), scratch.file("other"));
    std::fs::write(&one, vec![1; 1 << 20]).unwrap();
    std::fs::write(&other, vec![2; 1 << 20]).unwrap();
    let image = format!("qcow2:{}", scratch.file("image").display());
    let name = |path: &std::path::Path| path.display().to_string();
    assert!(copy(&[&name(&one), &image]).status.success());
    assert!(copy(&["--range", "4096:8192", &name(&other), &image]).status.success());
    let back = scratch.file("back");
    assert!(copy(&[&image, &name(&back)]).status.success());
    let mut wanted = vec![1; 1 << 20];
    wanted[4096..12288].fill(2);
    assert!(std::fs::read(&back).unwrap() == wanted);
}
