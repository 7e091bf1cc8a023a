//! libvirt with a guest: backups as `docs/increments.md` describes them, word for word.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use blockhaul_testkit::tools::{ScratchDir, until};

use super::guest::{Image, KERNEL_ARGUMENTS, Shell};
use super::{Process, Root, report, scratch};

/// A libvirt daemon in a root, with one machine.
pub struct Libvirt {
    pub root: Root,
    pub scratch: ScratchDir,
    image: Image,
    _daemon: Process,
}

const QEMU_CONF: &str = "user = \"root\"
group = \"root\"
security_driver = \"none\"
remember_owner = 0
cgroup_controllers = []
namespaces = []
stdio_handler = \"file\"
";

impl Libvirt {
    /// Starts the daemon. `None` without the root.
    pub fn start() -> Option<Libvirt> {
        let root = Root::find("backports")?;
        let scratch = scratch();
        fs::write(root.path("/etc/libvirt/qemu.conf"), QEMU_CONF).unwrap();
        let log = scratch.file("libvirtd.log");
        let conf = format!(
            "unix_sock_group = \"root\"\nauth_unix_rw = \"none\"\nauth_unix_ro = \"none\"\n\
             log_outputs = \"2:file:{}\"\n",
            log.display()
        );
        fs::write(root.path("/etc/libvirt/libvirtd.conf"), conf).unwrap();
        let _daemon = Process::start(root.command("libvirtd"), &scratch.file("libvirtd.out"));
        let image = Image::make(&root, &scratch.file("guest"));
        let libvirt = Libvirt { root, scratch, image, _daemon };
        until("libvirtd answers", || {
            let mut command = libvirt.root.command("virsh");
            command.args(["-q", "-c", "qemu:///system", "uri"]);
            command.output().is_ok_and(|output| output.status.success())
        });
        libvirt.forget();
        Some(libvirt)
    }

    /// Version of libvirt and of its QEMU.
    pub fn version(&self) -> String {
        let qemu = self.root.version(&["qemu-system-x86_64", "--version"]);
        let libvirt = self.virsh(&["version", "--daemon"]);
        let daemon = libvirt.lines().find_map(|line| line.strip_prefix("Running against daemon: "));
        format!("{}, QEMU {qemu}", daemon.unwrap_or("?"))
    }

    #[track_caller]
    pub fn virsh(&self, args: &[&str]) -> String {
        self.root.run(&[&["virsh", "-q", "-c", "qemu:///system"], args].concat())
    }

    /// Defines the machine `vm1` with one disk, without starting it.
    #[track_caller]
    pub fn define(&self, disk: &Path) {
        let xml = self.scratch.file("vm1.xml");
        fs::write(&xml, self.machine(disk)).unwrap();
        self.virsh(&["define", xml.to_str().unwrap()]);
    }

    /// Starts the machine and waits for the shell of its guest.
    #[track_caller]
    pub fn boot(&self) -> Shell {
        self.virsh(&["start", "vm1"]);
        Shell::wait(&self.serial_line())
    }

    fn serial_line(&self) -> PathBuf {
        self.scratch.socket("ttyS0")
    }

    fn machine(&self, disk: &Path) -> String {
        let [kernel, initrd] = [&self.image.kernel, &self.image.initrd].map(|path| path.display());
        format!(
            "<domain type='qemu'><name>vm1</name><memory unit='MiB'>384</memory><vcpu>1</vcpu>\
             <os><type arch='x86_64' machine='q35'>hvm</type><kernel>{kernel}</kernel>\
             <initrd>{initrd}</initrd><cmdline>{KERNEL_ARGUMENTS}</cmdline></os>\
             <cpu mode='maximum'/><features><acpi/></features><devices>\
             <emulator>/usr/bin/qemu-system-x86_64</emulator>\
             <disk type='file' device='disk'><driver name='qemu' type='qcow2'/>\
             <source file='{}'/><target dev='vda' bus='virtio'/></disk>\
             <serial type='unix'><source mode='bind' path='{}'/></serial>\
             <memballoon model='none'/></devices></domain>",
            disk.display(),
            self.serial_line().display()
        )
    }

    /// Removes a machine that another run has left.
    fn forget(&self) {
        for args in [&["destroy", "vm1"][..], &["undefine", "vm1", "--checkpoints-metadata"]] {
            let mut command = self.root.command("virsh");
            let _ = command.args(["-q", "-c", "qemu:///system"]).args(args).output();
        }
    }
}

impl Drop for Libvirt {
    fn drop(&mut self) {
        self.forget();
    }
}

/// The recipe of the page: the one command; the two XML files, and the commands of the next day.
fn recipe() -> [String; 4] {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/increments.md");
    let page = fs::read_to_string(page).unwrap();
    let (_, page) = page.split_once("### libvirt\n").unwrap();
    let blocks = super::blocks(page);
    let languages = [0, 1, 2, 3].map(|at: usize| blocks[at].0.as_str());
    assert_eq!(languages, ["", "xml", "xml", ""]);
    [0, 1, 2, 3].map(|at: usize| blocks[at].1.clone())
}

const PULL: &str = "[[disk]]
name = \"vda\"
source = \"nbd+unix:///vda?socket=/run/vm1.nbd\"
store = \"store\"
";

#[test]
fn a_guest_in_use_is_backed_up_as_the_page_says() {
    let Some(libvirt) = Libvirt::start() else { return };
    let dir = libvirt.scratch.path().to_str().unwrap();
    let disk = libvirt.scratch.file("vda.qcow2");
    libvirt.root.run(&["qemu-img", "create", "-q", "-f", "qcow2", disk.to_str().unwrap(), "512M"]);
    libvirt.define(&disk);
    let mut guest = libvirt.boot();
    let [_, backup, checkpoint, commands] = recipe();
    let write = |name: &str, text: &str| fs::write(libvirt.scratch.file(name), text).unwrap();
    let run = |line: &str| {
        libvirt.root.shell(dir, &format!("export LIBVIRT_DEFAULT_URI=qemu:///system; {line}"))
    };
    write("backup.xml", &backup);
    write("checkpoint.xml", &checkpoint);
    fs::write(libvirt.root.path("/run/vm1.toml"), PULL).unwrap();
    guest.run(
        "mkfs.ext4 -q /dev/vda && mount /dev/vda /mnt && dd if=/dev/urandom of=/mnt/a bs=1M count=20",
    );
    let monday = guest.digest("/dev/vda");
    run("virsh backup-begin vm1 backup.xml checkpoint.xml");
    run("blockhaul pull /run/vm1.toml --point monday");
    run("virsh domjobabort vm1");

    guest.run("mount /dev/vda /mnt && rm /mnt/a && dd if=/dev/urandom of=/mnt/b bs=1M count=40");
    let tuesday = guest.digest("/dev/vda");
    let incremental = "<incremental>monday</incremental>\n  <server ";
    let backup = backup.replace("<server ", incremental);
    write("backup.xml", &backup.replace("<disk ", "<disk exportbitmap='monday' "));
    write("checkpoint.xml", &checkpoint.replace("monday", "tuesday"));
    let lines: Vec<&str> = commands.lines().collect();
    let [begin, pull, end] = lines[..] else { panic!("{commands}") };
    run(begin);
    // The guest writes meanwhile.
    guest.run(
        "sh -c '(mount /dev/vda /mnt; for i in 1 2 3 4 5 6; do dd if=/dev/urandom of=/mnt/w$i bs=1M count=8; \
         sync; done; rm /mnt/b; sync) > /dev/null 2>&1 &'",
    );
    for _ in 0..3 {
        kill_in_the_middle(&libvirt, dir, pull);
    }
    run(pull);
    run(end);

    run("blockhaul chain check store");
    for (point, digest) in [("monday", monday), ("tuesday", tuesday)] {
        run(&format!("blockhaul restore store {point}.raw --point {point}"));
        let restored = run(&format!("md5sum < {point}.raw"));
        assert_eq!(restored.split_whitespace().next(), Some(digest.as_str()), "{point}");
    }
    let steps = "full backup, increment with a guest that writes, three SIGKILLs, restore of both";
    report("libvirt", &libvirt.version(), steps);
}

/// Begins the pull slowly, and kills it.
fn kill_in_the_middle(libvirt: &Libvirt, dir: &str, pull: &str) {
    let slow = format!("rate = \"4M\"\n{PULL}");
    fs::write(libvirt.scratch.file("slow.toml"), slow).unwrap();
    let pull = pull.replace("/run/vm1.toml", "slow.toml");
    let mut command = libvirt.root.command("sh");
    command.args(["-c", &format!("cd {dir} && exec {pull}")]);
    let process = Process::start(command, &libvirt.scratch.file("pull.log"));
    std::thread::sleep(Duration::from_secs(3));
    process.kill();
}

#[test]
fn disks_of_a_domain_are_those_of_the_schema() {
    let Some(root) = Root::find("backports") else { return };
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/virtual-machines.md");
    let page = fs::read_to_string(page).unwrap();
    let parts = super::blocks(&page).into_iter().filter(|block| block.0 == "xml");
    let (memory, disks): (Vec<_>, Vec<_>) =
        parts.map(|part| part.1).partition(|part| part.starts_with("<memoryBacking>"));
    assert_eq!((memory.len(), disks.len()), (1, 3));
    let domain = format!(
        "<domain type='qemu'><name>vm1</name><memory unit='MiB'>512</memory>{}\
         <os><type arch='x86_64' machine='q35'>hvm</type></os><devices>{}</devices></domain>",
        memory.concat(),
        disks.concat()
    );
    let scratch = scratch();
    let file = scratch.file("vm1.xml");
    fs::write(&file, domain).unwrap();
    root.run(&["virt-xml-validate", file.to_str().unwrap(), "domain"]);
}

#[test]
fn a_domain_is_backed_up_by_one_command_each_time() {
    let Some(libvirt) = Libvirt::start() else { return };
    let dir = libvirt.scratch.path().to_str().unwrap();
    let disk = libvirt.scratch.file("vda.qcow2");
    libvirt.root.run(&["qemu-img", "create", "-q", "-f", "qcow2", disk.to_str().unwrap(), "512M"]);
    libvirt.define(&disk);
    let mut guest = libvirt.boot();
    let [command, ..] = recipe();
    let command = command.replace("/var/lib/blockhaul/vm1", "vm1");
    let run = |line: &str| {
        libvirt.root.shell(dir, &format!("export LIBVIRT_DEFAULT_URI=qemu:///system; {line}"))
    };
    let backup = |point: &str| run(&format!("{command} --point {point}"));
    guest.run(
        "mkfs.ext4 -q /dev/vda && mount /dev/vda /mnt && dd if=/dev/urandom of=/mnt/a bs=1M count=20",
    );
    let monday = guest.digest("/dev/vda");
    let planned = run(&format!("{command} --point monday --dry-run"));
    assert!(planned.contains("monday would be a full backup of 536870912 bytes"), "{planned}");
    assert!(backup("monday").contains("monday is a full backup"));
    let planned = run(&format!("{command} --point tuesday --dry-run"));
    assert!(planned.contains("tuesday would be an increment of monday"), "{planned}");
    assert!(!libvirt.virsh(&["domjobinfo", "vm1"]).contains("Backup"));

    guest.run("mount /dev/vda /mnt && rm /mnt/a && dd if=/dev/urandom of=/mnt/b bs=1M count=40");
    let tuesday = guest.digest("/dev/vda");
    assert!(backup("tuesday").contains("tuesday is an increment of monday"));

    // Runs are killed while the guest writes.
    guest.run(
        "sh -c '(mount /dev/vda /mnt; for i in 1 2 3 4 5 6; do dd if=/dev/urandom of=/mnt/w$i bs=1M count=8; \
         sync; done; rm /mnt/b; sync) > /dev/null 2>&1 &'",
    );
    for seconds in [1, 2, 4] {
        let mut killed = libvirt.root.command("sh");
        let uri = "export LIBVIRT_DEFAULT_URI=qemu:///system";
        killed.args(["-c", &format!("{uri}; cd {dir} && exec {command} --point killed")]);
        let process = Process::start(killed, &libvirt.scratch.file("pull.log"));
        std::thread::sleep(Duration::from_secs(seconds));
        process.kill();
    }
    guest.run(
        "sh -c 'while pidof dd sync > /dev/null; do sleep 1; done; sync; umount /mnt || true'",
    );
    let wednesday = guest.digest("/dev/vda");
    let said = backup("wednesday");
    assert!(said.contains("wednesday is an increment of"), "{said}");
    assert_eq!(libvirt.virsh(&["checkpoint-list", "vm1", "--name"]).split_whitespace().count(), 1);
    assert!(!libvirt.virsh(&["domjobinfo", "vm1"]).contains("Backup"));

    run("blockhaul chain check vm1/vda");
    for (point, digest) in [("monday", monday), ("tuesday", tuesday), ("wednesday", wednesday)] {
        run(&format!("blockhaul restore vm1/vda {point}.raw --point {point}"));
        let restored = run(&format!("md5sum < {point}.raw"));
        assert_eq!(restored.split_whitespace().next(), Some(digest.as_str()), "{point}");
    }
    let steps = "`pull --libvirt`: full backup, two increments, three SIGKILLs, restore of all";
    report("libvirt", &libvirt.version(), steps);
}
