//! Disks in archives: the recipe for an OVA.

use std::fs::{self, File};
use std::process::Command;

use blockhaul_testkit::require_peer;
use blockhaul_testkit::tools::{self, ScratchDir, SkipReason};
use blockhaul_tests::{LIMIT, blockhaul, bounded, done, lossy, peer, succeed, text};

use super::can_mount;

#[test]
fn a_partition_of_a_disk_in_an_ova_is_mounted_without_unpacking() {
    if !can_mount() {
        return;
    }
    let qemu_img = require_peer!("qemu-img");
    let mkfs = require_peer!("mkfs.ext4");
    let scratch = ScratchDir::on_disk().unwrap();
    let file = |name: &str| scratch.file(name);
    let [content, part, raw, ova] = ["content", "part.raw", "disk.raw", "ova"].map(file);
    fs::create_dir_all(content.join("etc")).unwrap();
    fs::write(content.join("etc/fstab"), "of the machine\n").unwrap();
    File::create(&part).unwrap().set_len(16 << 20).unwrap();
    peer(&mkfs, &["-q", "-d", text(&content), text(&part)]);
    succeed(&["copy", &format!("partitioning:{}", text(&part)), text(&raw)]);
    fs::write(file("vm.ovf"), "<Envelope/>").unwrap();
    succeed(&["copy", &format!("as-vmdk:{}", text(&raw)), text(&file("ours.vmdk"))]);
    let options = ["convert", "-O", "vmdk", "-o", "subformat=streamOptimized", "-f", "raw"];
    let theirs = file("theirs.vmdk");
    peer(&qemu_img, &[&options[..], &[text(&raw), text(&theirs)]].concat());
    let members = ["cf", "vm.ova", "vm.ovf", "ours.vmdk", "theirs.vmdk"];
    done(Command::new("tar").args(members).current_dir(scratch.path()));
    fs::create_dir(&ova).unwrap();
    let mnt = file("mnt");
    fs::create_dir(&mnt).unwrap();
    let outer = |member: &str, inner: &str| {
        let entry = format!("tar?tar-entry={member}");
        let run = format!("{} mount --partition 1 {inner}", text(blockhaul_tests::program()));
        let args = ["mount", "--layer", &entry, "vm.ova", "ova", "--run", &run];
        bounded(blockhaul(&args).current_dir(scratch.path()), LIMIT)
    };
    for member in ["ours.vmdk", "theirs.vmdk"] {
        let output = outer(member, "vmdk:ova/disk mnt --run 'cmp -n 16777216 mnt/disk part.raw'");
        assert!(output.status.success(), "{member}: {}", lossy(&output.stderr));
        let inner = "--filesystem vmdk:ova/disk mnt --run 'cat mnt/etc/fstab'";
        let output = outer(member, inner);
        let said = lossy(&output.stderr);
        if said.contains("cannot make a loop device") {
            return tools::skip_or_fail(&SkipReason::new(said));
        }
        assert_eq!(lossy(&output.stdout), "of the machine\n", "{member}: {said}");
        assert!(output.status.success(), "{member}: {said}");
    }
    let output = outer("absent.vmdk", "vmdk:ova/disk mnt");
    let said = lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("absent.vmdk"), "{said}");
}
