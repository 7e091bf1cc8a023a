//! `blockhaul compare` and `blockhaul checksum` as processes: what they say, and their statuses.

use std::process::{Command, Output};
use std::time::Duration;

use blockhaul_testkit::tools::{self, PeerServer, ScratchDir};

const LIMIT: Duration = Duration::from_secs(120);
const OURS: &str = env!("CARGO_BIN_EXE_blockhaul");

fn run(args: &[&str]) -> Output {
    tools::output(Command::new(OURS).args(args), LIMIT).unwrap()
}

/// Status and what was printed.
fn said(args: &[&str]) -> (i32, String) {
    let output = run(args);
    (output.status.code().unwrap(), String::from_utf8(output.stdout).unwrap())
}

fn serve(scratch: &ScratchDir, args: &[&str]) -> PeerServer {
    PeerServer::blockhaul(OURS.as_ref(), &scratch.socket("own"), args).unwrap()
}

#[test]
fn comparisons_end_as_those_of_qemu_img() {
    let scratch = ScratchDir::new().unwrap();
    let [one, other] = ["one", "other"].map(|name| scratch.file(name));
    let mut bytes = vec![0; 3 << 20];
    bytes[1 << 20..2 << 20].fill(7);
    std::fs::write(&one, &bytes).unwrap();
    bytes[1_234_567] = 8;
    std::fs::write(&other, &bytes).unwrap();
    let [a, b] = [&one, &other].map(|path| path.to_str().unwrap());
    assert_eq!(said(&["compare", a, a]), (0, "identical: 3145728 bytes\n".into()));
    assert_eq!(
        said(&["compare", a, b]),
        (1, "different: first difference at offset 1234567\n".into())
    );
    assert_eq!(said(&["compare", "--quiet", a, b]), (1, String::new()));
    let command = ["compare", a, "[", "blockhaul", "serve", b, "]"];
    assert_eq!(said(&command), (1, "different: first difference at offset 1234567\n".into()));

    // Zeroes at the end of the longer one.
    bytes[1_234_567] = 7;
    bytes.resize(5 << 20, 0);
    std::fs::write(&other, &bytes).unwrap();
    let (status, text) = said(&["compare", a, b]);
    assert_eq!(status, 0);
    assert!(text.contains("3145728 and 5242880 bytes"), "{text}");
    let sizes = "different sizes: 3145728 and 5242880 bytes\n".to_string();
    assert_eq!(said(&["compare", "--strict", a, b]), (1, sizes));
    bytes[4 << 20] = 1;
    std::fs::write(&other, &bytes).unwrap();
    assert_eq!(
        said(&["compare", a, b]),
        (1, "different: first difference at offset 4194304\n".into())
    );

    assert_eq!(said(&["compare", a, "/no/such/file"]).0, 2);
    assert_eq!(said(&["compare", a]).0, 2);
    for (layer, status) in [("error?extents=100%", 3), ("error?read=100%", 4)] {
        let scratch = ScratchDir::new().unwrap();
        let server = serve(&scratch, &["--layer", layer, a]);
        assert_eq!(said(&["compare", "--retries=0", a, &server.uri("")]).0, status, "{layer}");
    }
}

#[test]
fn checksums_are_those_of_other_programs() {
    let scratch = ScratchDir::new().unwrap();
    let file = scratch.file("hello");
    std::fs::write(&file, "hello").unwrap();
    let path = file.to_str().unwrap();
    let sha256 = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824";
    let blake3 = "ea8f163db38682925e4491c5e58d4bb3506ef8c14eb78a86e908c5624a67200f";
    for (name, expected) in [("sha256", sha256), ("blake3", blake3)] {
        let found = said(&["checksum", "--digest", name, path]);
        assert_eq!(found, (0, format!("{expected}  {path}\n")), "{name}");
    }
    let (status, text) = said(&["checksum", "--digest", "blksum", path]);
    assert!(status == 0 && text.starts_with("337355fe"), "{text}");
    // 64 GiB of hole: nothing is read.
    let sparse = scratch.file("sparse");
    std::fs::File::create(&sparse).unwrap().set_len(64 << 30).unwrap();
    assert_eq!(said(&["checksum", "--digest=blksum", sparse.to_str().unwrap()]).0, 0);
    assert_eq!(said(&["checksum", "--digest", "md5", path]).0, 2);
    assert_eq!(said(&["checksum", "/no/such/file"]).0, 3);
}

#[test]
fn a_manifest_is_written_and_checked_later() {
    let scratch = ScratchDir::new().unwrap();
    let [disk, manifest] = ["disk", "manifest"].map(|name| scratch.file(name));
    let [to, kept] = [&disk, &manifest].map(|path| path.to_str().unwrap());
    assert_eq!(said(&["copy", "--manifest", kept, "sample:200M", to]).0, 0);
    assert_eq!(
        said(&["verify", to, kept]),
        (0, "same as in the manifest: 209715200 bytes\n".into())
    );
    assert_eq!(said(&["verify", "sample:200M", kept]).0, 0);
    // One bit in the second segment.
    let file = std::fs::File::options().read(true).write(true).open(&disk).unwrap();
    let mut byte = [0];
    std::os::unix::fs::FileExt::read_exact_at(&file, &mut byte, 150 << 20).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &[byte[0] ^ 4], 150 << 20).unwrap();
    let expected = "different: 1048576 bytes at offset 157286400\n";
    assert_eq!(said(&["verify", to, kept]), (8, expected.into()));
    let text = std::fs::read_to_string(&manifest).unwrap();
    std::fs::write(&manifest, &text[..text.len() - 10]).unwrap();
    assert_eq!(said(&["verify", to, kept]).0, 3);
    let no_text = run(&["verify", to, to]);
    assert_eq!(no_text.status.code(), Some(3));
    let why = String::from_utf8_lossy(&no_text.stderr).into_owned();
    assert!(why.contains("it is not a manifest"), "{why}");
    assert_eq!(said(&["copy", "--manifest", kept, "sample:1M", "-"]).0, 2);
}

#[test]
fn a_manifest_takes_the_place_of_manifests_only() {
    let scratch = ScratchDir::new().unwrap();
    let [disk, copy, manifest, link] =
        ["disk", "copy", "manifest", "link"].map(|name| scratch.file(name));
    let [from, to, kept] = [&disk, &copy, &manifest].map(|path| path.to_str().unwrap());
    let content = vec![7; 100_000];
    std::fs::write(&disk, &content).unwrap();
    std::fs::write(&copy, "what was there").unwrap();
    std::os::unix::fs::symlink(&disk, &link).unwrap();
    for place in [&disk, &copy, &link] {
        let place = place.to_str().unwrap();
        let output = run(&["copy", "--manifest", place, from, to]);
        let why = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{why}");
        assert!(why.contains("it exists and is not a manifest: choose another name"), "{why}");
    }
    // An impossible one is reported before the copy.
    assert_eq!(said(&["copy", "--manifest", "/no/such/manifest", from, to]).0, 1);
    assert_eq!(std::fs::read(&disk).unwrap(), content);
    // A target that is made by the copy itself.
    let fresh = scratch.file("fresh").to_str().unwrap().to_string();
    let output = run(&["copy", "--manifest", &fresh, from, &fresh]);
    let why = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{why}");
    assert!(why.contains("the source or the target"), "{why}");
    // It is as it was, or complete.
    assert_eq!(said(&["copy", "--manifest", kept, from, to]).0, 0);
    let first = std::fs::read(&manifest).unwrap();
    let failing = ["--target-layer", "error?write=100%&error=EIO", "--retries=0", "sample:8M", to];
    assert_eq!(said(&[&["copy", "--manifest", kept], &failing[..]].concat()).0, 5);
    assert_eq!(std::fs::read(&manifest).unwrap(), first);
    assert_eq!(said(&["copy", "--manifest", kept, "sample:8M", to]).0, 0);
    assert_eq!(said(&["verify", to, kept]).0, 0);
    assert_eq!(said(&["copy", "--manifest", "/dev/null", "sample:8M", to]).0, 0);
    let left = std::fs::read_dir(scratch.file("")).unwrap();
    assert!(left.flatten().all(|file| !file.file_name().to_string_lossy().ends_with(".new")));
}

#[test]
fn what_is_verified_or_described_has_been_flushed() {
    let scratch = ScratchDir::new().unwrap();
    let [log, manifest] = ["log", "manifest"].map(|name| scratch.file(name));
    let layer = format!("log?file={}", log.display());
    for (options, flushed) in [
        (&[][..], false),
        (&["--verify"], true),
        (&["--manifest", manifest.to_str().unwrap()], true),
    ] {
        let _ = std::fs::remove_file(&log);
        let rest = ["--target-layer", &layer, "sample:1M", "memory:1M"];
        assert_eq!(said(&[&["copy"], options, &rest[..]].concat()).0, 0);
        let logged = std::fs::read_to_string(&log).unwrap();
        assert_eq!(logged.to_lowercase().contains("flush"), flushed, "{options:?}: {logged}");
    }
}
