//! What is about to happen to other data than was meant is said, or refused.

use std::process::{Command, Output, Stdio};
use std::time::Duration;

use blockhaul_testkit::tools::{self, PeerProgram, ScratchDir, SkipReason, text};

const OURS: &str = env!("CARGO_BIN_EXE_blockhaul");
const LIMIT: Duration = Duration::from_secs(60);

fn copy(args: &[&str]) -> Output {
    tools::output(Command::new(OURS).arg("copy").args(args), LIMIT).unwrap()
}

/// The first bytes of a qcow2 image, and some more.
const QCOW2: &[u8] = b"QFI\xfb\0\0\0\x03 and more";

#[test]
fn the_bytes_of_an_image_are_used_with_a_warning() {
    let scratch = ScratchDir::new().unwrap();
    let image = scratch.file("vm.img");
    let raw = scratch.file("out.raw");
    std::fs::write(&image, QCOW2).unwrap();
    let image = image.to_str().unwrap();
    let raw = raw.to_str().unwrap();
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
    let scratch = ScratchDir::new().unwrap();
    let empty = scratch.file("empty");
    let disk = scratch.file("disk");
    std::fs::write(&empty, "").unwrap();
    std::fs::write(&disk, "data").unwrap();
    let empty = empty.to_str().unwrap();
    let disk = disk.to_str().unwrap();
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
        return tools::skip_or_fail(&SkipReason::new("script(1) is not installed"));
    }
    let scratch = ScratchDir::new().unwrap();
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
fn certificates_that_cannot_all_be_written_leave_none() {
    let scratch = ScratchDir::new().unwrap();
    let dir = scratch.file("pki");
    let name = |number: usize| format!("{number}.{}.example", "a".repeat(60));
    // The authority's certificate fits the limit of 1 or 2 KiB, the server's does not.
    let hosts: String = (0..40).map(|number| format!("--host {} ", name(number))).collect();
    let script = format!("ulimit -f 2; exec \"$0\" tls init {hosts} \"$1\"");
    let mut command = Command::new("sh");
    command.args(["-c", &script, OURS]).arg(&dir);
    let output = tools::output(&mut command, LIMIT).unwrap();
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("server-cert.pem: File too large"), "{said}");
    assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 0, "{said}");
    let mut again = Command::new(OURS);
    again.args(["tls", "init", "--host", "localhost"]).arg(&dir);
    let again = tools::output(&mut again, LIMIT).unwrap();
    assert!(again.status.success(), "{}", text(&again.stderr));
}

#[test]
fn a_limit_on_the_size_of_files_is_an_error() {
    let scratch = ScratchDir::new().unwrap();
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
    let Some(img) = PeerProgram::require("qemu-img") else { return };
    let scratch = ScratchDir::new().unwrap();
    let raw = scratch.file("disk.raw");
    let image = scratch.file("new.qcow2");
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

#[test]
#[cfg(feature = "formats")]
fn a_disk_is_resized_only_if_it_is_clear_which_one() {
    let Some(img) = PeerProgram::require("qemu-img") else { return };
    let scratch = ScratchDir::new().unwrap();
    let run = |args: &[&str]| {
        let mut command = Command::new(OURS);
        command.arg("resize").args(args).current_dir(scratch.path());
        let output = tools::output(&mut command, LIMIT).unwrap();
        (output.status.code().unwrap(), text(&output.stderr))
    };
    let theirs = |args: &[&str]| {
        let mut command = img.command();
        command.args(args).current_dir(scratch.path());
        let output = tools::output(&mut command, LIMIT).unwrap();
        assert!(output.status.success(), "{args:?}: {output:?}");
        text(&output.stdout)
    };
    let size = || {
        let found = theirs(&["info", "--output=json", "-f", "qcow2", "vm"]);
        serde_json::from_str::<serde_json::Value>(&found).unwrap()["virtual-size"].as_u64().unwrap()
    };
    theirs(&["create", "-q", "-f", "qcow2", "vm", "3M"]);
    let before = std::fs::read(scratch.file("vm")).unwrap();
    // A path is a raw disk: this would ruin an image.
    let (status, said) = run(&["vm", "+1M"]);
    assert!(status == 3 && said.contains("begins as a qcow2 image"), "{said}");
    let (status, said) = run(&["qcow2:vm", "-1M"]);
    assert!(status == 2 && said.contains("add --shrink"), "{said}");
    assert_eq!(run(&["qcow2:vm", "-4M", "--shrink"]).0, 2);
    assert!(std::fs::read(scratch.file("vm")).unwrap() == before, "it has changed");
    assert_eq!((run(&["qcow2:vm", "+1M"]).0, size()), (0, 4 << 20));
    assert_eq!((run(&["--shrink", "qcow2:vm", "-3M"]).0, size()), (0, 1 << 20));
    assert_eq!((run(&["qcow2:vm", "1000000000"]).0, size()), (0, 1_000_000_000));
    theirs(&["create", "-q", "-f", "qcow2", "-b", "vm", "-F", "qcow2", "top", "1M"]);
    let (status, said) = run(&["qcow2:top", "2M"]);
    assert!(status == 3 && said.contains("--backing allow"), "{said}");
    assert_eq!(run(&["--backing", "allow", "qcow2:top", "2M"]).0, 0);
    std::fs::write(scratch.file("raw"), [7; 5000]).unwrap();
    let raw = || std::fs::read(scratch.file("raw")).unwrap();
    assert_eq!((run(&["raw", "+1000"]).0, raw().len()), (0, 6000));
    assert_eq!((run(&["raw", "4k"]).0, raw().len()), (2, 6000));
    assert_eq!((run(&["raw", "4k", "--shrink"]).0, raw()), (0, vec![7; 4096]));
    assert_eq!(run(&["null:1M", "2M"]).0, 2);
    assert_eq!(run(&["absent", "2M"]).0, 3);
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
    let scratch = ScratchDir::new().unwrap();
    let one = scratch.file("one");
    let other = scratch.file("other");
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

/// A raw disk whose guest wrote the header of a qcow2 image with a backing file.
fn guests_header(path: &std::path::Path, backing: &str) {
    let mut bytes = vec![0; 256 << 10];
    let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
    put(0, b"QFI\xfb\0\0\0\x03");
    put(8, &256_u64.to_be_bytes());
    put(16, &(backing.len() as u32).to_be_bytes());
    put(20, &16_u32.to_be_bytes());
    put(24, &(64_u64 << 10).to_be_bytes());
    put(36, &1_u32.to_be_bytes());
    put(40, &(64_u64 << 10).to_be_bytes());
    put(96, &4_u32.to_be_bytes());
    put(100, &104_u32.to_be_bytes());
    // The format of the backing file, so that it is not asked for.
    put(104, &0xe279_2aca_u32.to_be_bytes());
    put(108, &3_u32.to_be_bytes());
    put(112, b"raw");
    put(256, backing.as_bytes());
    std::fs::write(path, bytes).unwrap();
}

#[test]
#[cfg(feature = "formats")]
fn a_header_that_a_guest_wrote_never_opens_another_file() {
    let scratch = ScratchDir::new().unwrap();
    let [disk, secret, out] = ["disk.img", "secret", "out.raw"].map(|name| scratch.file(name));
    std::fs::write(&secret, vec![b's'; 64 << 10]).unwrap();
    guests_header(&disk, secret.to_str().unwrap());
    let guest = std::fs::read(&disk).unwrap();
    let [disk, out] = [disk, out].map(|path| path.to_str().unwrap().to_string());
    // Raw is the default, and the default of backing is to refuse.
    for options in [&[][..], &["--format", "raw"]] {
        let output = copy(&[options, &[&disk, &out]].concat());
        assert!(output.status.success(), "{}", text(&output.stderr));
        assert_eq!(output.stderr.is_empty(), !options.is_empty());
        assert_eq!(std::fs::read(&out).unwrap(), guest);
        std::fs::remove_file(&out).unwrap();
    }
    for format in ["auto", "qcow2"] {
        for backing in [&[][..], &["--backing", "refuse"]] {
            let output = copy(&[&["--format", format], backing, &[&disk, &out]].concat());
            let said = text(&output.stderr);
            assert!(!output.status.success() && said.contains("which is not opened"), "{said}");
            assert_eq!(said.contains("is used as a qcow2 image"), format == "auto", "{said}");
            assert!(!std::path::Path::new(&out).exists());
        }
    }
    let output = copy(&["--format", "auto", "--backing", "allow", &disk, &out]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(std::fs::read(&out).unwrap(), vec![b's'; 64 << 10]);
}

#[test]
#[cfg(feature = "formats")]
fn a_format_applies_to_paths_in_all_commands() {
    let Some(img) = PeerProgram::require("qemu-img") else { return };
    let scratch = ScratchDir::new().unwrap();
    std::fs::write(scratch.file("disk"), vec![7; 3 << 20]).unwrap();
    let run = |args: &[&str]| {
        let mut command = Command::new(OURS);
        let output = tools::output(command.args(args).current_dir(scratch.path()), LIMIT).unwrap();
        (output.status.success(), text(&output.stdout), text(&output.stderr))
    };
    for (format, name) in
        [("vmdk", "vmdk"), ("vhdx", "vhdx"), ("vhd", "vpc"), ("vdi", "vdi"), ("qcow2", "qcow2")]
    {
        let mut command = img.command();
        // A name that would be another device without its folder.
        command.args(["convert", "-f", "raw", "-O", name]);
        if name == "vpc" {
            command.args(["-o", "force_size=on"]);
        }
        command.args(["disk", "./null:1?%"]).current_dir(scratch.path());
        assert!(tools::output(&mut command, LIMIT).unwrap().status.success());
        for choice in [format, "auto"] {
            let (fine, size, said) = run(&["info", "--size", "--format", choice, "./null:1?%"]);
            assert!(fine && size.trim() == "3145728", "{size} {said}");
            assert_eq!(said.contains("image"), choice == "auto", "{said}");
            let (fine, map, said) = run(&["map", "--image-format", choice, "./null:1?%"]);
            assert!(fine && map.contains("3145728"), "{map} {said}");
            let (fine, _, said) = run(&["copy", "--format", choice, "./null:1?%", "out"]);
            assert!(
                fine && std::fs::read(scratch.file("out")).unwrap() == vec![7; 3 << 20],
                "{said}"
            );
            let info = format!("{OURS} info --size \"$uri\"");
            let (fine, size, said) =
                run(&["serve", "-r", "--format", choice, "./null:1?%", "--run", &info]);
            assert!(fine && size.contains("3145728"), "{size} {said}");
            let export = "a=./null:1?%";
            let info = format!("{OURS} info --size 'nbd+unix:///a?socket='\"$unixsocket\"");
            let (fine, size, said) =
                run(&["serve", "-r", "--format", choice, "--export", export, "--run", &info]);
            assert!(fine && size.contains("3145728"), "{size} {said}");
        }
    }
    let (fine, _, said) = run(&["info", "--format", "auto", "disk"]);
    assert!(fine && said.contains("disk is used as a raw disk"), "{said}");
    for args in
        [&["info", "--format", "vmdk", "null:1M"][..], &["info", "--backing", "allow", "disk"]]
    {
        assert!(!run(args).0, "{args:?}");
    }
}
