//! Disks in images, with the program. The commands are those of `docs/remote.md`.

use std::fs;
use std::path::Path;
use std::process::Command;

use blockhaul_testkit::rng::Rng;
use blockhaul_testkit::tools::{self, ScratchDir, text};

use crate::remote::{lines, same};
use crate::served_disk::{LIMIT, OURS};

/// Stores a blob in a layout of images; its descriptor.
fn store(layout: &Path, media_type: &str, bytes: &[u8]) -> String {
    let folder = layout.join("blobs/sha256");
    fs::create_dir_all(&folder).unwrap();
    let new = folder.join("new");
    fs::write(&new, bytes).unwrap();
    let output = tools::output(Command::new("sha256sum").arg(&new), LIMIT).unwrap();
    let hex = text(&output.stdout).split(' ').next().unwrap().to_owned();
    fs::rename(new, folder.join(&hex)).unwrap();
    let size = bytes.len();
    format!("{{\"mediaType\":\"{media_type}\",\"digest\":\"sha256:{hex}\",\"size\":{size}}}")
}

/// A layout with a containerDisk of the name `vm1`, whose disk is `disk.qcow2`.
fn make_image(scratch: &ScratchDir) {
    let layout = scratch.file("images");
    fs::create_dir_all(scratch.file("root/disk")).unwrap();
    fs::rename(scratch.file("disk.qcow2"), scratch.file("root/disk/disk.qcow2")).unwrap();
    let mut tar = Command::new("tar");
    tar.args(["-czf", "-", "-C"]).arg(scratch.file("root")).arg("disk");
    let layer = tools::output(&mut tar, LIMIT).unwrap().stdout;
    let layer = store(&layout, "application/vnd.oci.image.layer.v1.tar+gzip", &layer);
    let config = store(&layout, "application/vnd.oci.image.config.v1+json", b"{}");
    let manifest = format!("{{\"schemaVersion\":2,\"config\":{config},\"layers\":[{layer}]}}");
    let manifest =
        store(&layout, "application/vnd.oci.image.manifest.v1+json", manifest.as_bytes());
    let name = "\"annotations\":{\"org.opencontainers.image.ref.name\":\"vm1\"}}";
    let entry = manifest.replace('}', &format!(",{name}"));
    let index = format!("{{\"schemaVersion\":2,\"manifests\":[{entry}]}}");
    fs::write(layout.join("index.json"), index).unwrap();
    fs::write(layout.join("oci-layout"), "{\"imageLayoutVersion\":\"1.0.0\"}").unwrap();
}

#[test]
fn the_disk_of_an_image_is_copied_served_and_journaled() {
    let scratch = ScratchDir::new().unwrap();
    let run = |words: &[&str]| {
        let mut command = Command::new(OURS);
        command.current_dir(scratch.path()).env("TMPDIR", scratch.path()).args(words);
        tools::output(&mut command, LIMIT).unwrap()
    };
    let succeed = |words: &[&str]| {
        let output = run(words);
        assert!(output.status.success(), "{words:?}: {}", text(&output.stderr));
        text(&output.stdout)
    };
    fs::write(scratch.file("disk.raw"), Rng::new(31).disk(9 << 20, 300_000, 60)).unwrap();
    succeed(&["copy", "as-qcow2:disk.raw", "disk.qcow2"]);
    make_image(&scratch);
    let page = lines("Images of registries");
    assert!(page.len() > 2);
    for line in page {
        let line = line.replace("oci://registry.example.com/disks/vm1:1.0", "oci:images:vm1");
        succeed(&line.split(' ').skip(1).collect::<Vec<_>>());
    }
    assert!(same(&scratch.file("disk.raw"), &scratch.file("new.raw")));
    let shown = succeed(&["info", "oci:images:vm1"]);
    assert!(shown.contains("/disk/disk.qcow2") && shown.contains("of image sha256:"), "{shown}");
    succeed(&["copy", "--journal", "j", "oci:images:vm1#disk=disk.qcow2", "copied.qcow2"]);
    assert!(same(&scratch.file("root/disk/disk.qcow2"), &scratch.file("copied.qcow2")));
    for (words, status, why) in [
        (&["info", "oci:images:none"][..], 1, "no such image"),
        (&["info", "oci:images:vm1#disk=none"], 1, "no file /disk/none"),
        (&["copy", "disk.raw", "oci:images:vm1"], 3, "read-only"),
        (&["info", "oci://127.0.0.1:1/a:b"], 1, "cannot connect"),
    ] {
        let output = run(words);
        let said = text(&output.stderr);
        assert!(output.status.code() == Some(status) && said.contains(why), "{words:?}: {said}");
    }
    // Nothing is left of the temporary files.
    let left = fs::read_dir(scratch.path()).unwrap().map(|entry| entry.unwrap().file_name());
    assert!(
        left.map(|name| name.into_string().unwrap()).all(|name| !name.starts_with(".blockhaul"))
    );
}
