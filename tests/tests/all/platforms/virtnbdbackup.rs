//! virtnbdbackup: full, incremental and copied backups, of a machine in use and of one that is shut down;
//! with blockhaul in the place of qemu-nbd and qemu-img.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use super::libvirt::Libvirt;
use super::{report, succeeded};

/// Runs virtnbdbackup or virtnbdrestore, with our qemu-nbd and qemu-img.
#[track_caller]
fn tool(libvirt: &Libvirt, name: &str, args: &[&str]) -> String {
    let path = format!("{}:/usr/sbin:/usr/bin:/sbin:/bin", libvirt.scratch.file("bin").display());
    succeeded(libvirt.root.command_with_path(&path, name).args(args))
}

/// Makes a directory in which the names of QEMU's programs are ours.
fn names_of_qemu(dir: &Path) {
    fs::create_dir_all(dir).unwrap();
    for name in ["qemu-nbd", "qemu-img"] {
        symlink("/usr/local/bin/blockhaul", dir.join(name)).unwrap();
    }
}

/// Restores the last point of a backup; it is equal to the disk, as QEMU's own qemu-img sees both.
#[track_caller]
fn restore_and_compare(libvirt: &Libvirt, backup: &Path, disk: &Path) {
    let restored = libvirt.scratch.file("restored");
    tool(
        libvirt,
        "virtnbdrestore",
        &["-i", backup.to_str().unwrap(), "-o", restored.to_str().unwrap()],
    );
    let image = restored.join(disk.file_name().unwrap());
    let [image, disk] = [&image, &disk.to_path_buf()].map(|path| path.to_str().unwrap().to_owned());
    libvirt.root.run(&["/usr/bin/qemu-img", "compare", "-U", &image, &disk]);
    fs::remove_dir_all(restored).unwrap();
}

#[test]
fn backups_on_and_off_line_are_restored() {
    let Some(libvirt) = Libvirt::start() else { return };
    names_of_qemu(&libvirt.scratch.file("bin"));
    let disk = libvirt.scratch.file("vda.qcow2");
    libvirt.root.run(&["qemu-img", "create", "-q", "-f", "qcow2", disk.to_str().unwrap(), "256M"]);
    libvirt.define(&disk);
    let backup = |level: &str, name: &str| {
        let dir = libvirt.scratch.file(name);
        tool(
            &libvirt,
            "virtnbdbackup",
            &["-U", "qemu:///system", "-d", "vm1", "-l", level, "-o", dir.to_str().unwrap()],
        );
        dir
    };

    // In use.
    let mut guest = libvirt.boot();
    guest.run("mkfs.ext4 -q /dev/vda && mount /dev/vda /mnt");
    guest.run("dd if=/dev/urandom of=/mnt/a bs=1M count=20; umount /mnt; sync");
    let online = backup("full", "online");
    guest.run(
        "mount /dev/vda /mnt && dd if=/dev/urandom of=/mnt/b bs=1M count=10; umount /mnt; sync",
    );
    assert_eq!(backup("inc", "online"), online);
    restore_and_compare(&libvirt, &online, &disk);
    drop(guest);
    libvirt.virsh(&["destroy", "vm1"]);

    // Shut down: the tool reads through qemu-nbd.
    let copy = backup("copy", "copy");
    restore_and_compare(&libvirt, &copy, &disk);

    // An increment of a machine that has been shut down has the checkpoint of the backup before it, whose
    // increment would have the same file name: it has to be the first one.
    let mut guest = libvirt.boot();
    let offline = backup("full", "offline");
    guest.run(
        "mount /dev/vda /mnt && dd if=/dev/urandom of=/mnt/c bs=1M count=10; umount /mnt; sync",
    );
    drop(guest);
    libvirt.virsh(&["destroy", "vm1"]);
    assert_eq!(backup("inc", "offline"), offline);
    restore_and_compare(&libvirt, &offline, &disk);

    let version = libvirt.root.version(&["virtnbdbackup", "--version"]);
    let steps = "full backup and increment, in use; copy and increment, shut down; restored each time; qemu-nbd and qemu-img are ours";
    report("virtnbdbackup", &version, steps);
}
