//! Debian roots: made by debootstrap, with the file systems of this machine that programs need.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{TaskResult, apt, run};

/// A Debian root.
pub struct Root {
    name: &'static str,
    suite: &'static str,
    /// A suite whose packages take precedence.
    newer: Option<&'static str>,
    packages: &'static str,
}

/// Debian 13 with backports: what administrators run.
pub const BACKPORTS: Root = Root {
    name: "backports",
    suite: "trixie",
    newer: Some("trixie-backports"),
    packages: "libvirt-daemon-system libvirt-clients qemu-system-x86 qemu-utils qemu-block-extra \
        linux-image-cloud-amd64 busybox-static cpio xz-utils e2fsprogs fio virtnbdbackup \
        incus-base incus-client nbd-client openssl virt-v2v nbdkit libnbd-bin kmod \
        systemd prometheus bsd-mailx dma",
};

/// The newest peers.
pub const SID: Root = Root {
    name: "sid",
    suite: "sid",
    newer: None,
    packages: "nbdkit nbdkit-plugin-python libnbd-bin python3-libnbd qemu-utils qemu-system-x86 \
        qemu-block-extra fio virt-v2v linux-image-cloud-amd64 busybox-static cpio xz-utils kmod e2fsprogs",
};

/// The files of a guest that virt-v2v converts.
pub const GUEST: Root = Root {
    name: "guest",
    suite: "trixie",
    newer: None,
    packages: "linux-image-cloud-amd64 initramfs-tools e2fsprogs zstd grub-common grub2-common",
};

/// Directories of this machine that a root has, too. A path below `/tmp` means the same inside and outside.
const MOUNTS: &[&str] = &["/proc", "/sys", "/dev", "/dev/pts", "/dev/shm", "/tmp"];

impl Root {
    /// Makes the root where it is missing or lacks packages, and mounts [`MOUNTS`].
    pub fn make(&self, roots: &Path) -> TaskResult {
        let dir = roots.join(self.name);
        let list = dir.join("etc/blockhaul-platform");
        if !dir.join("etc/debian_version").is_file() || dir.join("debootstrap").is_dir() {
            self.bootstrap(&dir)?;
        }
        mount(&dir)?;
        if fs::read_to_string(&list).is_ok_and(|text| text == self.packages) {
            return Ok(());
        }
        self.install(&dir)?;
        fs::write(&list, self.packages)
            .map_err(|error| format!("cannot write {}: {error}", list.display()))
    }

    fn bootstrap(&self, dir: &Path) -> TaskResult {
        if !run::have("debootstrap") {
            return Err("debootstrap is missing: install it (apt install debootstrap)".into());
        }
        let uri = archive()?;
        fs::create_dir_all(dir)
            .map_err(|error| format!("cannot make {}: {error}", dir.display()))?;
        println!("making {}", dir.display());
        run::quiet(
            Command::new("debootstrap").args(["--variant=minbase", self.suite]).arg(dir).arg(uri),
        )?;
        Ok(())
    }

    fn install(&self, dir: &Path) -> TaskResult {
        let uri = archive()?;
        let suites = [Some(self.suite), self.newer];
        let sources = suites.iter().flatten().map(|suite| format!("deb {uri} {suite} main\n"));
        let files: [(&str, String); 4] = [
            ("etc/apt/sources.list", sources.collect()),
            // A mirror may be a snapshot.
            ("etc/apt/apt.conf.d/99dates", DATES.into()),
            ("etc/dpkg/dpkg.cfg.d/unsafe-io", "force-unsafe-io\n".into()),
            // No service starts when its package is installed.
            ("usr/sbin/policy-rc.d", "#!/bin/sh\nexit 101\n".into()),
        ];
        for (name, text) in files {
            let path = dir.join(name);
            fs::write(&path, text)
                .map_err(|error| format!("cannot write {}: {error}", path.display()))?;
        }
        run::quiet(Command::new("chmod").arg("755").arg(dir.join("usr/sbin/policy-rc.d")))?;
        run::quiet(Command::new("cp").args(["-L", "/etc/resolv.conf"]).arg(dir.join("etc")))?;
        let mut install = vec!["apt-get", "-qy", "--no-install-recommends"];
        install.extend(self.newer.iter().flat_map(|suite| ["-t", suite]));
        install.push("install");
        install.extend(self.packages.split_whitespace());
        for args in [&["apt-get", "-q", "update"][..], &install, &["apt-get", "clean"]] {
            run::quiet(inside(dir).args(args))?;
        }
        Ok(())
    }
}

const DATES: &str = "Acquire::Check-Valid-Until \"false\";\nAcquire::Check-Date \"false\";\n";

/// Address of the Debian archive that this machine uses.
fn archive() -> Result<String, String> {
    let archives = apt::debian_archives(Path::new("/etc/apt"))?;
    archives.into_iter().next().map(|source| source.uri).ok_or_else(|| "no Debian archive".into())
}

fn mount(dir: &Path) -> TaskResult {
    for name in MOUNTS {
        let place: PathBuf = dir.join(&name[1..]);
        fs::create_dir_all(&place)
            .map_err(|error| format!("cannot make {}: {error}", place.display()))?;
        run::quiet(Command::new("mount").args(["--bind", name]).arg(&place))?;
    }
    Ok(())
}

/// A command of the root, with its own environment.
fn inside(dir: &Path) -> Command {
    let mut command = Command::new("chroot");
    command.arg(dir).args(["/usr/bin/env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin"]);
    command.args(["LANG=C.UTF-8", "HOME=/root", "DEBIAN_FRONTEND=noninteractive"]);
    command
}
