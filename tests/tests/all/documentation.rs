//! The commands in the README and in `docs`, those of each page run as a script. Those in `docs/layers` are the
//! examples of the help, which the tests of the program run.
//!
//! Commands are the blocks without a language and those of `console`: each is run, or named below with a reason. If a
//! block begins with `$ `, its other lines are output.
//!
//! A line that starts a server gets a client that lists what it serves; a server with `--control` stays in
//! the background until the page's end. Names of hosts and absolute paths lead to servers and directories of
//! the test.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use blockhaul_testkit::require_peer;
use blockhaul_testkit::tools::{self, PeerProgram, PeerServer, ScratchDir};
use blockhaul_tests::{LIMIT, blockhaul, bounded, done, lossy, program, serve, succeed, text};

/// Lines that are not run, by a part of them, and why.
const LEFT_OUT: &[(&str, &str)] = &[
    ("nbdkit:curl?", "needs a host; plugins_curl.rs"),
    ("nbdkit:ssh?", "needs a host; plugins_ssh.rs"),
    ("ssh://", "needs a host; the program's tests of ssh"),
    ("[ ssh ", "the same"),
    ("nbdkit:floppy?", "needs nbdkit's package; plugins.rs"),
    ("nbdkit:linuxdisk?", "the same"),
    ("nbdkit:iso?", "needs xorriso; plugins.rs"),
    ("nbdkit:tmpdisk?", "needs mkfs.xfs; plugins.rs"),
    ("nbdkit:ondemand?", "makes a file system of 100 GiB; plugins.rs"),
    ("blockhaul plugin curl", "needs nbdkit's package for curl; plugins_curl.rs"),
    ("my-plugin.so", "plugins_c.rs compiles and runs the page's plugin"),
    ("python:disk.py", "the tests of the crate python run the page's plugin"),
    ("nbdkit python disk.py", "the same"),
    ("vddk:", "needs VMware's library; the program's tests take the simulated one"),
    ("disk.sh", "scripts/mod.rs runs the page's script"),
    ("pull --libvirt", "needs libvirt; platforms/libvirt.rs"),
    ("blockhaul follow", "needs a provider; follow.rs of the program carries out the page"),
    ("pull --qmp", "needs QEMU; the program's tests of machines"),
    ("systemctl ", "needs a running systemd; platforms/timer starts the units"),
    ("pull vm1.toml --metrics", "needs the file; the program's tests of runs of backups"),
    ("socket=/run/vm.nbd", "needs QEMU; the program's test of backups carries out the page"),
    ("/1.0/", "needs Incus or LXD; the program's tests of them"),
    ("/dev/", "a block device"),
    ("--tls-", "needs a client with keys; tls.rs"),
    ("nbds://", "needs a server with keys; tls.rs"),
    ("scp ", "needs a host"),
    ("blockhaul bench", "bench.rs"),
    (":9100", "a port that may be in use; the program's tests of the page take a free one"),
    ("https://", "needs a host; the program's tests of remote devices"),
    ("davs://", "the same"),
    ("s3://", "the same"),
    ("az://", "the same"),
    ("oci:", "needs an image; the program's tests of images carry out the page"),
    ("ova:vm.ova", "needs an OVA; the program's tests run the recipe"),
    ("| ssh ", "needs a host"),
    ("| curl -T", "needs a host; the same image goes to a file in formats.md"),
    ("as-qcow2:nbd:", "needs a host: the address of a socket is not allowed inside"),
    ("cp --reflink", "needs a file system that shares blocks"),
    ("job-resume 1", "needs a server that has ended; the program's tests of jobs that are kept"),
    ("--config ", "the program's tests of configuration files run the page's file"),
    ("/run/blockhaul/control reload", "the same"),
    ("--job", "the page's file names hosts; the program's test of jobs"),
    ("sample:20G", "takes long; peers_on_our_server copies smaller disks"),
    ("restic:", "needs restic; restic.rs of the program carries out the page"),
    ("ctl vm.ctl", "needs a machine that boots from a backup; mounted/guests.rs"),
    ("pull restic.toml", "needs restic; restic_backups.rs of the program"),
    ("--repo backups", "needs restic; restic.rs of the program carries out the page"),
    ("--filesystem", "needs a disk with a file system; the program's tests of mounts"),
    (
        "--context qemu:dirty-bitmap:b0 nbd:",
        "needs a server with a bitmap; the program's tests of maps",
    ),
];

/// How a block begins whose commands are run.
const RUN: [&str; 2] = ["blockhaul ", "truncate "];

/// Other blocks: their page, how they begin, and why they are not run.
const OTHER_BLOCKS: &[(&str, &str, &str)] = &[
    ("README.md", "./try", "compiles; .ci/run does both"),
    ("README.md", "cargo install", "compiles and installs"),
    (
        "backups.md",
        "qemu-system-x86_64",
        "backups.rs of the program carries out the page with qemu-storage-daemon",
    ),
    ("backups.md", "runuser", "needs a running systemd; platforms/timer starts the units"),
    ("coming-from-libnbd.md", "ln -s", "compat.rs of the program runs these names"),
    ("coming-from-nbdkit.md", "ln -s", "compat_nbdkit.rs runs this name"),
    ("coming-from-nbdkit.md", "dpkg-divert", "changes the system"),
    ("coming-from-nbdkit.md", "update-alternatives", "changes the system"),
    ("for-backups.md", "systemctl", "needs a running systemd; service.rs checks the units"),
    ("for-programmers.md", "pip install", "compiles; the package's tests install a checkout"),
    ("for-programmers.md", "cargo run", "compiles; the tests of the crate run its examples"),
    ("increments.md", "virsh", "needs libvirt; platforms/libvirt.rs"),
    ("increments.md", "lxc", "needs LXD; incus.rs of the program"),
    ("increments.md", "incus", "needs Incus; platforms/incus.rs"),
    ("increments.md", "kubectl", "needs KubeVirt; kubevirt.rs of the program"),
    ("jobs.md", "cargo test", "tests of this repository"),
    ("jobs.md", "BLOCKHAUL_LONG=1", "tests of this repository"),
    ("library.md", "cargo run", "compiles; the tests of the crate run its examples"),
    ("plugins-c.md", "cc ", "plugins_c.rs compiles and runs the page's plugin"),
    ("plugins-rust.md", "cargo run", "compiles; the tests of the crate run its example"),
    ("plugins-script.md", "chmod", "scripts/mod.rs runs the page's script"),
    ("python.md", "pip install", "compiles; the package's tests install a checkout"),
    ("qemu-img.md", "ln -s", "qemu_img.rs of the program runs this name"),
    ("qemu-img.md", "qemu-nbd", "qemu_nbd.rs of the program runs this name"),
    ("qmp.md", "mkdir", "needs qmpbackup; qmp.rs of the program"),
    ("qmp.md", "qemu-storage-daemon", "qmp.rs of the program runs this name"),
    ("recipes.md", "mkdir", "needs virt-v2v"),
    ("recipes.md", "virsh", "needs libvirt; platforms/libvirt.rs"),
    ("recipes.md", "ssh", "needs Proxmox VE"),
    ("restic.md", "export", "needs restic; restic.rs of the program carries out the page"),
    ("simulation.md", "cargo xtask", "tests of this repository"),
    ("tls.md", "nbdcopy", "needs a server with keys; tls.rs"),
    ("vddk-simulator.md", "cargo build", "compiles; vddk.rs of the program takes the simulator"),
    ("vddk.md", "# 1.", "needs VMware; vddk.rs of the program takes the simulator"),
    ("virtual-machines.md", "qemu-system-x86_64", "virtual_machines.rs of the program starts QEMU"),
    ("virtual-machines.md", "qemu-img", "virtual_machines.rs of the program runs it"),
    ("virtual-machines.md", "apt-get", "installs packages, and starts a machine"),
];

/// What stands for absolute paths.
const PATHS: &[(&str, &str)] = &[
    ("/var/lib/prometheus/node-exporter/", "run/"),
    ("/run/", "run/"),
    ("/var/images", "images"),
    ("/mnt", "mnt"),
    ("/ova", "ova"),
];

/// Bytes of every disk.
const SIZE: &str = "4M";

/// Files that commands read.
const DISKS: &[&str] = &[
    "disk.raw",
    "disk2.raw",
    "vm1.raw",
    "vm.raw",
    "disk.raw.1",
    "disk.raw.2",
    "first.raw",
    "boot.img",
    "swap.img",
    "root.img",
    "1.raw",
    "2.raw",
    "images/a.raw",
    "backup.raw",
    "a.raw",
];

/// The commands of a page, without comments.
struct Page {
    name: String,
    lines: Vec<String>,
    /// Names and contents of the files that it shows: their first line is a comment with the name.
    files: Vec<(String, String)>,
}

#[test]
fn the_commands_in_pages_run() {
    let qemu_img = require_peer!("qemu-img");
    let _ = require_peer!("qemu-nbd");
    require_peer!("nbdcopy");
    let mut failed = BTreeMap::new();
    let mut used = BTreeSet::new();
    let mut count = 0;
    for Page { name, mut lines, files } in pages() {
        lines.retain(|line| {
            let reasons: Vec<_> =
                LEFT_OUT.iter().map(|(part, _)| *part).filter(|part| line.contains(part)).collect();
            used.extend(reasons.iter().copied());
            reasons.is_empty()
        });
        if !can_mount() && lines.iter().any(|line| line.starts_with("blockhaul mount")) {
            tools::skip(format!("{name}: needs root and /dev/fuse"));
            continue;
        }
        count += lines.len();
        if !lines.is_empty()
            && let Err(why) = run(&lines, &files, &qemu_img)
        {
            failed.insert(name, why);
        }
    }
    assert!(failed.is_empty(), "{failed:#?}");
    assert!(count > 25, "only {count} lines were found");
    let unused: Vec<_> = LEFT_OUT.iter().filter(|(part, _)| !used.contains(part)).collect();
    assert!(unused.is_empty(), "no page has these lines any more: {unused:?}");
}

/// Whether this machine lets the commands of a page mount.
fn can_mount() -> bool {
    let fuse = fs::OpenOptions::new().read(true).write(true).open("/dev/fuse");
    fuse.is_ok() && done(Command::new("id").arg("-u")).trim() == "0"
}

/// Every page with the commands of its blocks that are run.
fn pages() -> Vec<Page> {
    paths()
        .iter()
        .map(|path| {
            let content = fs::read_to_string(path).unwrap();
            let blocks = commands(&content).into_iter();
            let ours = blocks.filter(|block| RUN.iter().any(|begin| block[0].starts_with(begin)));
            let blocks = content.split("```").skip(1).step_by(2);
            let files = blocks.filter_map(|block| {
                let text = block.strip_prefix("toml\n# ")?;
                Some((text.lines().next()?.to_owned(), format!("# {text}")))
            });
            let name = path.file_name().unwrap().display().to_string();
            Page { name, lines: ours.flatten().collect(), files: files.collect() }
        })
        .collect()
}

/// The README and the pages in `docs`.
fn paths() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut paths = vec![root.join("README.md")];
    let inner = fs::read_dir(root.join("docs")).unwrap().map(|entry| entry.unwrap().path());
    paths.extend(inner.filter(|path| path.extension().is_some_and(|kind| kind == "md")));
    paths.sort();
    paths
}

/// The commands of each block of a page.
fn commands(content: &str) -> Vec<Vec<String>> {
    // Text and blocks take turns; the first line of a block is its language.
    let blocks = content.split("```").skip(1).step_by(2);
    let blocks = blocks.filter_map(|block| {
        let (language, lines) = block.split_once('\n')?;
        let lines =
            ["", "console"].contains(&language).then(|| lines.lines().map(without_comment))?;
        let prompts = |line: &String| line.strip_prefix("$ ").map(String::from);
        Some(if lines.clone().next()?.starts_with("$ ") {
            lines.filter_map(|line| prompts(&line)).collect()
        } else {
            lines.collect()
        })
    });
    blocks.collect()
}

/// Every block of commands is run, or is named with the reason why it is not.
#[test]
fn each_block_of_commands_runs_or_has_a_reason() {
    let mut used = BTreeSet::new();
    for path in paths() {
        let name = path.file_name().unwrap().display().to_string();
        for block in commands(&fs::read_to_string(&path).unwrap()) {
            if RUN.iter().any(|begin| block[0].starts_with(begin)) {
                continue;
            }
            let found = OTHER_BLOCKS
                .iter()
                .find(|(page, begin, _)| *page == name && block[0].starts_with(begin));
            used.insert(found.unwrap_or_else(|| panic!("{name}: no reason for {block:#?}")));
        }
    }
    let unused: Vec<_> = OTHER_BLOCKS.iter().filter(|row| !used.contains(row)).collect();
    assert!(unused.is_empty(), "no page has these blocks any more: {unused:?}");
}

fn without_comment(line: &str) -> String {
    line.split_once("  #").map_or(line, |(command, _)| command).trim().to_owned()
}

/// Runs the lines of a page in a fresh directory with disks and with the hosts that they name.
fn run(lines: &[String], files: &[(String, String)], qemu_img: &PeerProgram) -> Result<(), String> {
    let scratch = ScratchDir::new().unwrap();
    prepare(&scratch, qemu_img);
    for (name, text) in files {
        fs::write(scratch.file(name), text).unwrap();
    }
    // Servers in the background are asked to end, however the script ends.
    let mut script = String::from(
        "set -e\ntrap 'umount -q mnt ova || true; cat *.pid 2>/dev/null | xargs -r kill || true' EXIT\n",
    );
    let mut hosts = BTreeMap::new();
    for line in lines {
        let mut line = hosts_replaced(line, &scratch, &mut hosts);
        for (from, to) in PATHS {
            line = line.replace(from, to);
        }
        if line.starts_with("blockhaul serve ") && line.contains("--control") {
            line += &format!(" --background --pidfile {}.pid", script.len());
        } else if line.starts_with("blockhaul serve ") && !line.contains("--run") {
            line += " --run 'blockhaul info --list \"$uri\"'";
        }
        script += &format!("echo {} >&2\n{line}\n", quoted(&line));
    }
    let second = serve(&scratch, "second", &[&format!("memory:{SIZE}")]);
    let link = scratch.file("second.sock");
    std::os::unix::fs::symlink(second.socket(), link).unwrap();
    // Its search path has the peers.
    let ours = blockhaul(&[]);
    let path = ours.get_envs().find_map(|(name, value)| (name == "PATH").then_some(value?));
    let path =
        path.map_or_else(|| std::env::var("PATH").unwrap(), |path| path.display().to_string());
    let path = format!("{}:{path}:/usr/sbin:/sbin", text(&scratch.file("bin")));
    let mut shell = Command::new("sh");
    shell.args(["-c", &script]).current_dir(scratch.path()).env("PATH", path);
    let output = bounded(shell.stdin(Stdio::null()), LIMIT);
    if output.status.success() {
        return Ok(());
    }
    Err(format!("{}: {}", output.status, lossy(&output.stderr)))
}

/// Makes the disks: all the same, so that whatever is copied or compared fits.
fn prepare(scratch: &ScratchDir, qemu_img: &PeerProgram) {
    for dir in ["bin", "run", "images", "drivers", "root", "mnt", "ova"] {
        fs::create_dir(scratch.file(dir)).unwrap();
    }
    std::os::unix::fs::symlink(program(), scratch.file("bin/blockhaul")).unwrap();
    let first = scratch.file(DISKS[0]);
    succeed(&["copy", &format!("sample:{SIZE}"), text(&first)]);
    for name in &DISKS[1..] {
        fs::copy(&first, scratch.file(name)).unwrap();
    }
    let images = [
        ("vm.qcow2", "qcow2"),
        ("old.qcow2", "qcow2"),
        ("vm.vmdk", "vmdk"),
        ("vm.vhdx", "vhdx"),
        ("vm.hdd", "parallels"),
        ("vm.img", "vdi"),
    ];
    for (name, format) in images {
        let convert = ["convert", "-f", "raw", "-O", format, text(&first)];
        done(qemu_img.command().args(convert).arg(scratch.file(name)));
    }
    let archive = ["cf", "vm.ova", "disk.raw", "vm.vmdk"];
    done(Command::new("tar").args(archive).current_dir(scratch.path()));
    done(
        qemu_img
            .command()
            .args(["bitmap", "--add", "--disable"])
            .arg(scratch.file("vm.qcow2"))
            .arg("daily"),
    );
    let snapshot = ["snapshot", "-c", "before the upgrade"];
    done(qemu_img.command().args(snapshot).arg(scratch.file("vm.qcow2")));
}

/// The line with each `nbd://HOST/NAME` replaced by a server of the test's, one for each host.
fn hosts_replaced(
    line: &str,
    scratch: &ScratchDir,
    hosts: &mut BTreeMap<String, PeerServer>,
) -> String {
    let mut parts = line.split("nbd://");
    let mut replaced = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let end = part.find([' ', '\'']).unwrap_or(part.len());
        let (host, name) = part[..end].split_once('/').unwrap();
        let server = hosts
            .entry(host.to_owned())
            .or_insert_with(|| serve(scratch, host, &["--any-name", &format!("memory:{SIZE}")]));
        replaced += &format!("'{}'{}", server.uri(name), &part[end..]);
    }
    replaced
}

fn quoted(line: &str) -> String {
    format!("'{}'", line.replace('\'', "'\\''"))
}
