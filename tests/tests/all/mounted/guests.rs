//! Virtual machines in software emulation that boot from a disk of ours, install files, and power off: over
//! vhost-user, over NBD, from a qcow2 image over NBD and behind HTTPS, and from a backup in restic's format. They need qemu-system-x86_64, a static busybox,
//! dpkg-deb and a kernel of Debian with its modules: that of this machine, or one below
//! `BLOCKHAUL_GUEST_KERNEL`, where a package linux-image was unpacked. `BLOCKHAUL_LONG` runs them.

use std::fs::{self, File};
use std::io::Write as _;
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use blockhaul_testkit::require_peer;
use blockhaul_testkit::rng::{Rng, seed};
use blockhaul_testkit::tools::{self, ScratchDir};
use blockhaul_tests::{blockhaul, bounded, done, lossy, peer, serve, text, with_port};

use super::ran;

/// A kernel takes minutes to boot in software emulation on a busy machine.
const LIMIT: Duration = Duration::from_secs(1500);
/// Memory of the machine.
const MEMORY: &str = "384M";
/// What it prints when all is installed.
const INSTALLED: &str = "all files are installed";
/// Modules of the disk's driver and of its file system, with those that they need in any order; kernels
/// that have them built in have no such files.
const MODULES: &[&str] = &[
    "virtio",
    "virtio_ring",
    "virtio_pci_legacy_dev",
    "virtio_pci_modern_dev",
    "virtio_pci",
    "virtio_blk",
    "crc16",
    "crc32c_generic",
    "libcrc32c",
    "mbcache",
    "jbd2",
    "ext4",
];

/// The first program: it makes the disk usable, and starts the one that is on it.
const LOAD: &str = "\
#!/bin/busybox sh
/bin/busybox mount -t devtmpfs dev /dev
# One that needs another is loaded in a later turn.
for turn in 1 2 3 4; do
    for module in /modules/*; do /bin/busybox insmod $module 2>/dev/null; done
done
/bin/busybox mount -t ext4 /dev/vda /disk || exec /bin/busybox poweroff -f
exec /bin/busybox switch_root /disk /sbin/init
";

/// The program on the disk: it installs a package and an archive, changes and removes files, and powers
/// off.
const INSTALL: &str = "\
#!/bin/busybox sh
PATH=/bin:/sbin
/bin/busybox --install -s /bin
set -e
trap 'poweroff -f' EXIT
mount -t proc proc /proc
mount -t devtmpfs dev /dev
dpkg -i /payload.deb
mkdir /unpacked
tar -xf /payload.tar -C /unpacked
cp -r /unpacked /again
rm -r /unpacked
mv /again /unpacked
dd if=/dev/zero of=/large bs=64k count=512
dd if=/unpacked/0 of=/large bs=1k seek=777 conv=notrunc
fallocate -l 1m /allocated
rm /payload.tar
sync
(cd /unpacked && md5sum *) > /sums
echo ALL
mount -o remount,ro /
";

/// A kernel, and its modules.
struct Kernel {
    image: PathBuf,
    modules: PathBuf,
}

impl Kernel {
    fn find() -> Result<Kernel, String> {
        let root =
            std::env::var_os("BLOCKHAUL_GUEST_KERNEL").map_or_else(|| "/".into(), PathBuf::from);
        let boot = root.join("boot");
        let entries = fs::read_dir(&boot).into_iter().flatten().flatten();
        let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
        for version in names.filter_map(|name| Some(name.strip_prefix("vmlinuz-")?.to_string())) {
            let modules =
                ["lib", "usr/lib"].map(|lib| root.join(lib).join("modules").join(&version));
            if let Some(modules) = modules.into_iter().find(|path| path.join("kernel").is_dir()) {
                return Ok(Kernel { image: boot.join(format!("vmlinuz-{version}")), modules });
            }
        }
        Err(format!(
            "no kernel with modules is in {}: unpack a package linux-image and set BLOCKHAUL_GUEST_KERNEL",
            boot.display()
        ))
    }

    /// The file of a module, uncompressed.
    fn module(&self, name: &str) -> Option<Vec<u8>> {
        let (path, packed) = find_module(&self.modules.join("kernel"), name)?;
        if packed.is_empty() {
            return Some(fs::read(path).unwrap());
        }
        let program = if packed == "xz" { "xz" } else { "zstd" };
        let output = bounded(Command::new(program).arg("-dc").arg(path), LIMIT);
        assert!(output.status.success(), "{program}: {}", lossy(&output.stderr));
        Some(output.stdout)
    }
}

/// A module below a directory, and how it is compressed.
fn find_module(folder: &Path, name: &str) -> Option<(PathBuf, &'static str)> {
    for entry in fs::read_dir(folder).ok()?.flatten() {
        let path = entry.path();
        if path.is_dir() {
            if let Some(found) = find_module(&path, name) {
                return Some(found);
            }
            continue;
        }
        let file = entry.file_name().into_string().ok()?;
        let Some((stem, rest)) = file.split_once(".ko") else { continue };
        if stem.replace('-', "_") == name {
            let packed = ["xz", "zst"].into_iter().find(|packed| rest.ends_with(packed));
            return Some((path, packed.unwrap_or_default()));
        }
    }
    None
}

/// The programs that a guest is made of.
fn busybox() -> Result<PathBuf, String> {
    let missing = "no static busybox: install busybox-static".to_string();
    let found = ["/bin/busybox", "/usr/bin/busybox"].map(PathBuf::from);
    let found = found.into_iter().find(|path| path.is_file()).ok_or_else(|| missing.clone())?;
    let bytes = fs::read(&found).unwrap();
    let loader = b"/ld-linux";
    let is_static = !bytes.windows(loader.len()).any(|window| window == loader);
    is_static.then_some(found).ok_or(missing)
}

/// An archive of files and directories in the format that kernels unpack (cpio, "newc").
#[derive(Default)]
struct Cpio {
    bytes: Vec<u8>,
    count: u32,
}

impl Cpio {
    fn add(&mut self, name: &str, mode: u32, content: &[u8]) {
        self.count += 1;
        let size = content.len() as u32;
        let name_len = name.len() as u32 + 1;
        let fields = [self.count, mode, 0, 0, 1, 0, size, 0, 0, 0, 0, name_len, 0];
        self.bytes.extend(b"070701");
        for field in fields {
            self.bytes.extend(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }

    fn directory(&mut self, name: &str) {
        self.add(name, 0o040_755, &[]);
    }

    fn program(&mut self, name: &str, content: &[u8]) {
        self.add(name, 0o100_755, content);
    }

    fn end(mut self) -> Vec<u8> {
        self.add("TRAILER!!!", 0, &[]);
        self.bytes
    }
}

fn initramfs(kernel: &Kernel, busybox: &Path) -> Vec<u8> {
    let mut cpio = Cpio::default();
    for name in ["bin", "dev", "disk", "modules"] {
        cpio.directory(name);
    }
    cpio.program("bin/busybox", &fs::read(busybox).unwrap());
    cpio.program("init", LOAD.as_bytes());
    for (number, name) in MODULES.iter().enumerate() {
        if let Some(module) = kernel.module(name) {
            cpio.program(&format!("modules/{number:02}-{name}.ko"), &module);
        }
    }
    cpio.end()
}

fn write_program(path: &Path, content: &[u8]) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, content).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

/// The content of the files that the guest unpacks, by name.
fn payload(rng: &mut Rng) -> Vec<Vec<u8>> {
    let bytes = |rng: &mut Rng| {
        let most = 1 << rng.between(4, 19);
        let mut bytes = vec![0; rng.between(1, most) as usize];
        rng.fill(&mut bytes);
        bytes
    };
    (0..200).map(|_| bytes(rng)).collect()
}

/// Makes the disk that the guest boots from, with an archive and a package to install.
fn make_disk(scratch: &ScratchDir, busybox: &Path, payload: &[Vec<u8>]) -> Option<PathBuf> {
    let root = scratch.file("root");
    for name in ["bin", "dev", "proc", "var/lib/dpkg/info", "tmp"] {
        fs::create_dir_all(root.join(name)).unwrap();
    }
    fs::write(root.join("var/lib/dpkg/status"), "").unwrap();
    write_program(&root.join("bin/busybox"), &fs::read(busybox).unwrap());
    let install = INSTALL.replace("ALL", INSTALLED);
    write_program(&root.join("sbin/init"), install.as_bytes());
    let files = scratch.file("files");
    fs::create_dir(&files).unwrap();
    for (number, content) in payload.iter().enumerate() {
        fs::write(files.join(number.to_string()), content).unwrap();
    }
    let archive = root.join("payload.tar");
    done(Command::new("tar").arg("cf").arg(archive).arg("-C").arg(&files).arg("."));
    let package = scratch.file("package");
    fs::create_dir_all(package.join("DEBIAN")).unwrap();
    fs::create_dir_all(package.join("opt/package")).unwrap();
    fs::write(package.join("opt/package/content"), &payload[1]).unwrap();
    let control = "Package: payload\nVersion: 1\nArchitecture: all\nMaintainer: nobody <nobody@localhost>\n\
                   Description: files\n";
    fs::write(package.join("DEBIAN/control"), control).unwrap();
    let mut build = Command::new("dpkg-deb");
    build.args(["-Zgzip", "--root-owner-group", "-b"]).arg(&package).arg(root.join("payload.deb"));
    match tools::output(&mut build, LIMIT) {
        Ok(output) => assert!(output.status.success(), "{}", lossy(&output.stderr)),
        Err(why) => {
            tools::skip(why);
            return None;
        }
    }
    let disk = scratch.file("disk.raw");
    File::create(&disk).unwrap().set_len(512 << 20).unwrap();
    let mkfs = require_peer!("mkfs.ext4", None);
    peer(&mkfs, &["-q", "-d", text(&root), text(&disk)]);
    Some(disk)
}

/// What is on a disk of ext4, read without the kernel.
fn read_file(disk: &Path, name: &str, scratch: &ScratchDir) -> Vec<u8> {
    let debugfs = tools::PeerProgram::require("debugfs").expect("it came with mkfs.ext4");
    let to = scratch.file("from-disk");
    peer(&debugfs, &["-R", &format!("dump {name} {}", text(&to)), text(disk)]);
    fs::read(to).unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn check(disk: &Path, payload: &[Vec<u8>], scratch: &ScratchDir) {
    if !ran(&["e2fsck", "-fn"], text(disk)) {
        return;
    }
    for (number, content) in payload.iter().enumerate() {
        let name = format!("/unpacked/{number}");
        assert!(read_file(disk, &name, scratch) == *content, "{name}");
    }
    assert!(read_file(disk, "/opt/package/content", scratch) == payload[1], "the package's file");
    let status = read_file(disk, "/var/lib/dpkg/status", scratch);
    assert!(lossy(&status).contains("install ok installed"), "{}", lossy(&status));
    let large = read_file(disk, "/large", scratch);
    let changed = payload[0].len();
    assert_eq!(large.len(), 32 << 20);
    assert!(large[777 << 10..][..changed] == payload[0], "it was changed in place");
    assert!(large[(777 << 10) + changed..].iter().all(|byte| *byte == 0));
    assert_eq!(lossy(&read_file(disk, "/sums", scratch)).lines().count(), payload.len());
}

/// A guest, and what its disk holds when it has installed all.
struct Guest {
    kernel: Kernel,
    initrd: PathBuf,
    /// The disk before it boots.
    original: PathBuf,
    payload: Vec<Vec<u8>>,
    scratch: ScratchDir,
}

impl Guest {
    /// A guest; `None` where a test is not to run, or something is absent.
    fn new() -> Option<Guest> {
        if !tools::runs_long() {
            return None;
        }
        let found = Kernel::find().and_then(|kernel| Ok((kernel, busybox()?)));
        let found = found.and_then(|found| {
            let version = tools::output(Command::new("qemu-system-x86_64").arg("--version"), LIMIT);
            version.map_err(|why| format!("{why}: install qemu-system-x86"))?;
            Ok(found)
        });
        let (kernel, busybox) = match found {
            Ok(found) => found,
            Err(why) => {
                tools::skip(why);
                return None;
            }
        };
        let seed = seed();
        println!("BLOCKHAUL_SEED={seed:#x}");
        let mut rng = Rng::new(seed);
        let scratch = ScratchDir::on_disk().unwrap();
        let payload = payload(&mut rng);
        let original = make_disk(&scratch, &busybox, &payload)?;
        let initrd = scratch.file("initramfs");
        File::create(&initrd).unwrap().write_all(&initramfs(&kernel, &busybox)).unwrap();
        Some(Guest { kernel, initrd, original, payload, scratch })
    }

    /// Boots with this disk, installs, and powers itself off.
    fn run(&self, disk: &[&str]) {
        let mut qemu = Command::new("qemu-system-x86_64");
        let memory = format!("memory-backend-memfd,id=memory,size={MEMORY},share=on");
        qemu.args(["-accel", "tcg", "-smp", "2", "-m", MEMORY, "-object", &memory]);
        qemu.args(["-machine", "q35,memory-backend=memory", "-nodefaults", "-no-user-config"]);
        qemu.args(["-display", "none", "-serial", "stdio", "-monitor", "none", "-no-reboot"]);
        qemu.args(["-append", "console=ttyS0 panic=-1 quiet", "-kernel"]).arg(&self.kernel.image);
        qemu.arg("-initrd").arg(&self.initrd).args(disk);
        let output = bounded(&mut qemu, LIMIT);
        let said = lossy(&output.stdout) + &lossy(&output.stderr);
        assert!(output.status.success() && said.contains(INSTALLED), "{}: {said}", output.status);
    }

    fn run_over_nbd(&self, uri: &str) {
        self.run(&["-drive", &format!("file={uri},format=raw,if=virtio,discard=unmap")]);
    }

    fn check(&self, disk: &Path) {
        check(disk, &self.payload, &self.scratch);
    }

    /// The image is behind HTTPS, what is read is cached, and what is written goes to a temporary file.
    fn boots_from_https(&self) {
        let scratch = &self.scratch;
        let nginx = require_peer!("nginx");
        let (web, pki) = (scratch.file("web"), scratch.file("pki"));
        fs::create_dir(&web).unwrap();
        let image = web.join("disk.qcow2");
        done(blockhaul(&["copy"]).arg(&self.original).arg(format!("qcow2:{}", text(&image))));
        fs::set_permissions(&image, fs::Permissions::from_mode(0o644)).unwrap();
        done(blockhaul(&["tls", "init", "--host", "127.0.0.1"]).arg(&pki));
        let (mut server, port) = with_port(|port| {
            fs::write(scratch.file("nginx.conf"), NGINX.replace("PORT", &port.to_string()))
                .unwrap();
            let mut command = nginx.tied_command();
            command.args(["-e", "stderr", "-c", "nginx.conf", "-p"]).arg(scratch.path());
            let server = command.spawn().map_err(|error| error.to_string())?;
            tools::until_ok("nginx listens", || TcpStream::connect(("127.0.0.1", port)));
            Ok(server)
        });
        let authority = pki.join("ca-cert.pem");
        let url = format!("qcow2:https://127.0.0.1:{port}/disk.qcow2#ca={}", text(&authority));
        let layers = ["--layer", "cache?cache-on-read=true", "--layer", "cow"];
        let export = serve(scratch, "https", &[&layers[..], &[&url]].concat());
        let before = fs::read(&image).unwrap();
        self.run_over_nbd(&export.uri(""));
        let disk = scratch.file("https.raw");
        done(blockhaul(&["copy", &export.uri("")]).arg(&disk));
        export.stop().unwrap();
        server.kill().unwrap();
        server.wait().unwrap();
        self.check(&disk);
        assert!(fs::read(&image).unwrap() == before, "the image is as it was");
    }

    /// The disk is a backup in restic's format with a layer of writes; a mirror moves the guest to a file while it runs.
    fn boots_from_a_backup(&self) {
        let scratch = &self.scratch;
        let (repo, password) = (scratch.file("repository"), scratch.file("password"));
        fs::write(&password, "secret").unwrap();
        let place =
            |part: &str| format!("restic:{}#{part}?password-file={}", text(&repo), text(&password));
        let new = place("new/vda") + "&init=on";
        done(blockhaul(&["copy"]).arg(&self.original).arg(&new));
        let backup = place("latest/vda");
        let control = scratch.socket("control");
        let vda = format!("vda={backup}");
        let layers = ["--control", text(&control), "--layer", "cow", "--export", &vda];
        let server = serve(scratch, "backup", &layers);
        let (uri, disk) = (server.uri("vda"), scratch.file("moved.raw"));
        std::thread::scope(|scope| {
            let run = scope.spawn(|| self.run_over_nbd(&uri));
            done(blockhaul(&["ctl", text(&control), "mirror", "vda"]).arg(&disk).arg("--wait"));
            let complete = ["job-complete", "1", "--within", "5s", "--wait"];
            done(blockhaul(&["ctl", text(&control)]).args(complete));
            assert!(!run.is_finished(), "the guest runs on with its new disk");
            run.join().unwrap();
        });
        server.stop().unwrap();
        self.check(&disk);
        done(blockhaul(&["compare", &backup]).arg(&self.original));
    }
}

const NGINX: &str = "
daemon off;
master_process off;
pid nginx.pid;
error_log stderr;
events {}
http {
    access_log off;
    client_body_temp_path t1; proxy_temp_path t2; fastcgi_temp_path t3; uwsgi_temp_path t4; scgi_temp_path t5;
    server {
        listen 127.0.0.1:PORT ssl;
        ssl_certificate pki/server-cert.pem;
        ssl_certificate_key pki/server-key.pem;
        root web;
    }
}
";

#[test]
fn a_guest_boots_from_vhost_user_from_nbd_and_from_qcow2_and_installs_files() {
    let Some(guest) = Guest::new() else { return };
    let scratch = &guest.scratch;
    // The last one is an image behind NBD.
    for way in ["vhost-user", "nbd", "qcow2"] {
        let image = scratch.file(&format!("{way}.image"));
        let is_qcow2 = way == "qcow2";
        let device = if is_qcow2 { format!("qcow2:{}", text(&image)) } else { text(&image).into() };
        done(blockhaul(&["copy"]).arg(&guest.original).arg(&device));
        let server = if way == "vhost-user" {
            let socket = scratch.socket("vm");
            let place = text(&socket);
            let server = serve(scratch, "vhost", &["--vhost-user", place, &device]);
            let chardev = format!("socket,id=disk,path={place}");
            let device = "vhost-user-blk-pci,chardev=disk,num-queues=2";
            guest.run(&["-chardev", &chardev, "-device", device]);
            server
        } else {
            let server = serve(scratch, "nbd", &[&device]);
            guest.run_over_nbd(&server.uri(""));
            server
        };
        server.stop().unwrap();
        guest.check(&if is_qcow2 { read_by_qemu(&image, scratch) } else { image });
        println!("{way}: {} files", guest.payload.len());
    }
}

#[test]
fn a_guest_boots_from_an_image_behind_https_and_from_a_backup_and_is_moved_to_a_file() {
    let Some(guest) = Guest::new() else { return };
    guest.boots_from_https();
    guest.boots_from_a_backup();
}

/// Checks an image with QEMU's program, and converts it to a raw one with that program.
fn read_by_qemu(image: &Path, scratch: &ScratchDir) -> PathBuf {
    let disk = scratch.file("converted.raw");
    let qemu = tools::PeerProgram::require("qemu-img").expect("QEMU's emulator was here");
    peer(&qemu, &["check", "-f", "qcow2", text(image)]);
    peer(&qemu, &["convert", "-f", "qcow2", "-O", "raw", text(image), text(&disk)]);
    disk
}
