//! virt-v2v converts a Debian guest with our nbdkit, nbdcopy and nbdinfo, and the guest starts afterwards.

use std::fs;
use std::os::unix::fs::{FileExt as _, PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use blockhaul_testkit::tools::ScratchDir;
use blockhaul_tests::{bounded, done, lossy};

use super::guest::Shell;
use super::{Process, Root, report, scratch};

/// Where the partition of the guest begins, in bytes.
const PARTITION: u64 = 1 << 20;
/// Size of its disk, in bytes.
const SIZE: u64 = 2 << 30;

/// First program of the guest: it mounts, and gives its serial line to a shell.
const INIT: &str = "#!/bin/sh
mount -t proc proc /proc
mount -t sysfs sys /sys
exec < /dev/ttyS0 > /dev/ttyS0 2>&1
stty -echo
echo GUEST-READY
PS1= exec sh
";

const GRUB: &str = "set default=0
menuentry 'Debian' {
    linux /boot/VMLINUZ root=/dev/sda1 ro
    initrd /boot/INITRD
}
";

/// Files of the guest outside of its disk.
struct Guest {
    disk: PathBuf,
    kernel: PathBuf,
    initrd: PathBuf,
}

/// A master boot record with one bootable partition of Linux.
fn partition_table() -> [u8; 512] {
    let mut sector = [0; 512];
    let [first, count] = [PARTITION, SIZE - PARTITION].map(|bytes| (bytes / 512) as u32);
    // Places in cylinders are those of a disk that is too large for them.
    sector[446..454].copy_from_slice(&[0x80, 0xfe, 0xff, 0xff, 0x83, 0xfe, 0xff, 0xff]);
    sector[454..458].copy_from_slice(&first.to_le_bytes());
    sector[458..462].copy_from_slice(&count.to_le_bytes());
    sector[510..].copy_from_slice(&[0x55, 0xaa]);
    sector
}

/// Makes the disk of a Debian guest: one partition with ext4.
fn guest(scratch: &ScratchDir) -> Option<Guest> {
    let root = Root::find("guest")?;
    let tree = scratch.file("tree");
    fs::create_dir(&tree).unwrap();
    let [from, to] = [&root.path("/"), &tree].map(|path| path.display().to_string());
    // Without what is mounted there.
    let without = "--exclude=./tmp/* --exclude=./proc/* --exclude=./sys/* --exclude=./dev/*";
    let line = format!("tar -C {from} {without} -cf - . | tar -C {to} -xf -");
    done(Command::new("sh").args(["-c", &line]));
    let boot = |prefix: &str| {
        let entries = fs::read_dir(tree.join("boot")).unwrap().map(|entry| entry.unwrap().path());
        let is_one = |path: &PathBuf| {
            path.file_name()
                .is_some_and(|name| name.as_encoded_bytes().starts_with(prefix.as_bytes()))
        };
        entries.into_iter().find(is_one).unwrap()
    };
    let [kernel, initrd] = ["vmlinuz-", "initrd.img-"].map(boot);
    let name = |path: &Path| path.file_name().unwrap().to_str().unwrap().to_owned();
    fs::create_dir_all(tree.join("boot/grub")).unwrap();
    let grub = GRUB.replace("VMLINUZ", &name(&kernel)).replace("INITRD", &name(&initrd));
    fs::write(tree.join("boot/grub/grub.cfg"), grub).unwrap();
    fs::write(tree.join("etc/fstab"), "/dev/sda1 / ext4 defaults 0 1\n").unwrap();
    let init = tree.join("sbin/platform-init");
    fs::write(&init, INIT).unwrap();
    fs::set_permissions(&init, fs::Permissions::from_mode(0o755)).unwrap();

    let disk = scratch.file("disk");
    let file = fs::File::create(&disk).unwrap();
    file.set_len(SIZE).unwrap();
    file.write_all_at(&partition_table(), 0).unwrap();
    let mut make = Command::new("mke2fs");
    make.args(["-q", "-t", "ext4", "-E"]).arg(format!("offset={PARTITION}")).arg("-d").arg(&tree);
    done(make.arg(&disk).arg(format!("{}k", (SIZE - PARTITION) / 1024)));
    let [kernel, initrd] = [kernel, initrd].map(|path| {
        let kept = scratch.file(&name(&path));
        fs::copy(path, &kept).unwrap();
        kept
    });
    fs::remove_dir_all(tree).unwrap();
    Some(Guest { disk, kernel, initrd })
}

/// Our program in the place of `/usr/bin/nbdkit`, until it is dropped.
struct ReplacedNbdkit<'a> {
    root: &'a Root,
    undo: String,
}

impl ReplacedNbdkit<'_> {
    /// Runs the commands of `docs/coming-from-nbdkit.md`.
    #[track_caller]
    fn new(root: &Root) -> ReplacedNbdkit<'_> {
        let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/coming-from-nbdkit.md");
        let page = fs::read_to_string(page).unwrap();
        let (_, page) = page.split_once("## In the place of an installed nbdkit\n").unwrap();
        let mut blocks = super::blocks(page).into_iter().map(|(_, lines)| lines);
        let [replace, undo] = [blocks.next().unwrap(), blocks.next().unwrap()];
        // A run that was killed has left ours there.
        if root.path("/usr/bin/nbdkit.distrib").exists() {
            root.shell("/", &undo);
        }
        let program = root.path("/usr/bin/blockhaul");
        fs::copy(root.path("/usr/local/bin/blockhaul"), program).unwrap();
        root.shell("/", &format!("set -e\n{replace}"));
        assert!(
            root.run(&["/usr/bin/nbdkit", "--help"]).contains("blockhaul"),
            "nbdkit is not ours"
        );
        ReplacedNbdkit { root, undo }
    }

    /// Gives nbdkit its name back.
    #[track_caller]
    fn end(self) {
        self.root.shell("/", &format!("set -e\n{}", self.undo));
        fs::remove_file(self.root.path("/usr/bin/blockhaul")).unwrap();
        assert!(!self.root.run(&["/usr/bin/nbdkit", "--help"]).contains("blockhaul"));
    }
}

/// Converts the guest with a search path in which libnbd's and nbdkit's programs are ours; starts the result.
fn convert(root: &Root, in_place: bool) {
    let scratch = scratch();
    let Some(guest) = guest(&scratch) else { return };
    let bin = scratch.file("bin");
    fs::create_dir_all(&bin).unwrap();
    for name in ["nbdkit", "nbdcopy", "nbdinfo"] {
        symlink("/usr/local/bin/blockhaul", bin.join(name)).unwrap();
    }
    let replaced = in_place.then(|| ReplacedNbdkit::new(root));
    let out = scratch.file("out");
    fs::create_dir_all(&out).unwrap();
    let path = format!("{}:/usr/sbin:/usr/bin:/sbin:/bin", bin.display());
    let mut convert = root.command_with_path(&path, "env");
    convert.args(["LIBGUESTFS_BACKEND=direct", "LIBGUESTFS_BACKEND_SETTINGS=force_tcg"]);
    convert.args(["virt-v2v", "-v", "-x", "-i", "disk"]).arg(&guest.disk);
    convert.args(["-o", "local", "-of", "raw", "-os"]).arg(&out);
    let output = bounded(&mut convert, Duration::from_secs(1500));
    let log = format!("{}{}", lossy(&output.stdout), lossy(&output.stderr));
    assert!(output.status.success(), "{log}");
    // nbdkit's own log has no such line.
    assert!(log.contains(": debug: serving "), "nbdkit was not ours: {log}");
    if let Some(replaced) = replaced {
        replaced.end();
    }
    start(root, &scratch, &guest, &out.join("disk-sda"));

    let version = root.version(&["virt-v2v", "--version"]);
    let place = if in_place { "in the place of nbdkit" } else { "by the search path" };
    let steps =
        format!("Debian guest converted, {place}; nbdcopy and nbdinfo ours; the guest starts");
    report("virt-v2v", &version, &steps);
}

/// Starts the converted guest and looks at its files.
fn start(root: &Root, scratch: &ScratchDir, guest: &Guest, disk: &Path) {
    let serial = scratch.socket("serial");
    let mut qemu = root.command("qemu-system-x86_64");
    qemu.args(["-machine", "q35", "-accel", "tcg", "-cpu", "max", "-m", "512", "-nodefaults"]);
    qemu.args(["-display", "none", "-no-reboot", "-append"]);
    qemu.arg("console=ttyS0 quiet loglevel=1 panic=-1 root=/dev/vda1 rw init=/sbin/platform-init");
    qemu.arg("-kernel").arg(&guest.kernel).arg("-initrd").arg(&guest.initrd).arg("-drive");
    qemu.arg(format!("file={},format=raw,if=virtio", disk.display())).arg("-serial");
    qemu.arg(format!("unix:{},server=on,wait=off", serial.display()));
    let _machine = Process::start(qemu, &scratch.file("qemu.log"));
    let mut shell = Shell::wait(&serial);
    assert!(shell.run("cat /etc/os-release").contains("Debian"));
    shell.run("dpkg --audit; cp /bin/bash /root/b && cmp /bin/bash /root/b && sync");
}

#[test]
fn a_guest_is_converted_with_our_programs_in_the_search_path() {
    if let Some(root) = Root::find("backports") {
        convert(&root, false);
    }
}

#[test]
fn a_guest_is_converted_with_our_program_in_the_place_of_nbdkit() {
    if let Some(root) = Root::find("sid") {
        convert(&root, true);
    }
}
