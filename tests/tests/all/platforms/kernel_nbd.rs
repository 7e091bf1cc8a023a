//! Linux's nbd module in a guest, as a client of `blockhaul serve`.

use std::fs::File;
use std::path::Path;
use std::process::Command;

use blockhaul_tests::{blockhaul, done, text, with_port};

use super::guest::{Image, KERNEL_ARGUMENTS, Shell};
use super::{Process, Root, report, scratch};

fn serve(disk: &Path, log: &Path) -> (Process, u16) {
    with_port(|port| {
        let mut command =
            blockhaul(&["serve", "-i", "127.0.0.1", "-p", &port.to_string(), text(disk)]);
        command.env("RUST_BACKTRACE", "1");
        let server = Process::start(command, log);
        let mut info = blockhaul(&["info", "--size", &format!("nbd://127.0.0.1:{port}")]);
        for _ in 0..100 {
            if info.output().is_ok_and(|output| output.status.success()) {
                return Ok((server, port));
            }
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
        Err(String::from("the server does not answer"))
    })
    .0
}

/// Starts the guest, with a network in which 10.0.2.2 is this machine.
fn boot(root: &Root, image: &Image, serial: &Path, log: &Path) -> Process {
    let mut qemu = root.command("qemu-system-x86_64");
    qemu.args(["-machine", "q35", "-accel", "tcg", "-cpu", "max", "-m", "512", "-nodefaults"]);
    qemu.args(["-display", "none", "-no-reboot", "-append", KERNEL_ARGUMENTS, "-kernel"]);
    qemu.arg(&image.kernel).arg("-initrd").arg(&image.initrd).arg("-serial");
    qemu.arg(format!("unix:{},server=on,wait=off", serial.display()));
    qemu.args(["-netdev", "user,id=n", "-device", "virtio-net-pci,netdev=n"]);
    Process::start(qemu, log)
}

#[test]
fn a_guest_uses_a_disk_through_its_kernel() {
    let Some(root) = Root::find("backports") else { return };
    let scratch = scratch();
    let disk = scratch.file("disk");
    File::create(&disk).unwrap().set_len(512 << 20).unwrap();
    let (_server, port) = serve(&disk, &scratch.file("serve.log"));
    let image = Image::make(&root, &scratch.file("guest"));
    let serial = scratch.socket("serial");
    let machine = boot(&root, &image, &serial, &scratch.file("qemu.log"));
    let mut guest = Shell::wait(&serial);

    guest.run("ifconfig eth0 10.0.2.15 netmask 255.255.255.0 up; insmod /modules/nbd.ko");
    guest.run(&format!("/opt/nbd-client 10.0.2.2 {port} /dev/nbd0 -C 2 -timeout 30"));
    let queue =
        guest.run("cd /sys/block/nbd0/queue && cat discard_max_bytes write_zeroes_max_bytes");
    assert!(queue.split_whitespace().all(|value| value != "0"), "discard and zeroes: {queue}");
    guest.run("/opt/mkfs.ext4 -q /dev/nbd0 && mount /dev/nbd0 /mnt");
    guest.run(
        "fio --name=a --directory=/mnt --size=32m --rw=randwrite --bs=4k --ioengine=psync --verify=crc32c \
         --end_fsync=1",
    );
    guest.run("dd if=/dev/urandom of=/mnt/b bs=1M count=16 && rm /mnt/a* && fstrim /mnt");
    let digest = guest.digest("/dev/nbd0");
    guest.run("/opt/e2fsck -fn /dev/nbd0");
    let kernel = guest.run("uname -r");
    guest.run("/opt/nbd-client -d /dev/nbd0");
    drop(machine);

    let here = done(Command::new("md5sum").arg(&disk));
    assert_eq!(here.split_whitespace().next(), Some(digest.as_str()));
    let client = root.version(&["nbd-client", "--version"]);
    let steps = "two connections, ext4, fio with verification, fstrim, e2fsck, the image as the guest read it";
    report("nbd.ko in a guest", &format!("{}, nbd-client {client}", kernel.trim()), steps);
}
