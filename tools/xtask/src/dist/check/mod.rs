//! `cargo xtask dist --check`: each package in a clean root file system: installed, used, removed,
//! nothing left.

mod image;
mod root;
mod server;

use std::path::Path;
use std::process::Command;
use std::time::Instant;

use self::root::RootFileSystem;
use super::build::{self, Flavour};
use super::piece::{DistRun, Packages, sorted};
use super::{deb, files, tarball};
use crate::{TaskResult, run};

/// Debian releases whose root file systems are used.
const SUITES: [&str; 2] = ["bookworm", "trixie"];

/// What `info` prints of the disk of 64 MiB that the jobs use.
const EXPORT_SIZE: &str = "export-size: 67108864 ";

/// What is run of an installed package: `$1` is the program, `$2` says whether the names of other
/// programs lead to it. The first job serves a disk and copies it with verification, the second one
/// shows information about a served disk.
const JOBS: &str = r#"
set -e
program=$1 names=$2
cd "$(mktemp -d)"
"$program" --version
"$program" copy --verify [ "$program" serve sample:64M ] disk.raw
"$program" compare disk.raw [ "$program" serve sample:64M ]
"$program" info [ "$program" serve -r disk.raw ] | grep '^[[:space:]]*export-size: 67108864 '
if [ "$names" = names ]; then
    [ "$(nbdinfo --size [ nbdkit memory 1M ])" = 1048576 ]
    nbdcopy [ nbdkit -r file disk.raw ] again.raw
    cmp disk.raw again.raw
    qemu-img convert -f raw -O qcow2 disk.raw disk.qcow2
    qemu-nbd --fork -r -f qcow2 -k "$PWD/nbd.sock" disk.qcow2
    qemu-img compare -f raw -F raw disk.raw "nbd+unix:///?socket=$PWD/nbd.sock"
    # The server ends after its client, and removes its socket.
    for _ in $(seq 100); do [ ! -e nbd.sock ] || sleep 0.1; done
    [ ! -e nbd.sock ]
fi
dir=$PWD
cd /
rm -r "$dir"
"#;

/// What is run of the Python package.
const PYTHON_JOB: &str = r#"
import blockhaul
with blockhaul.open("sample:64M") as disk:
    assert disk.size == 67108864 and len(disk.pread(4096, 0)) == 4096
"#;

/// An error where the check cannot run here.
pub fn ready() -> TaskResult {
    for (program, package) in
        [("debootstrap", "debootstrap"), ("unshare", "util-linux"), ("chroot", "coreutils")]
    {
        if !run::have(program) {
            return Err(format!("--check needs {program} (Debian's package {package})"));
        }
    }
    if rustix::process::geteuid().is_root() {
        return Ok(());
    }
    Err("--check makes root file systems and changes its root: run it as root".into())
}

/// Checks those packages that can be installed.
pub fn all(dist: &DistRun, made: &Packages) -> TaskResult {
    if ["deb", "rpm", "tar", "wheel"].iter().any(|name| made.contains_key(name)) {
        for suite in SUITES {
            in_suite(dist, suite, made)?;
        }
    }
    if let Some(tarball) = made.get("static") {
        timed("static", "an empty root file system", || static_tarball(tarball))?;
    }
    if let Some(image) = made.get("image") {
        timed("image", "a root file system of its own", || image::check(image))?;
    }
    Ok(())
}

fn timed(piece: &str, place: &str, check: impl FnOnce() -> TaskResult) -> TaskResult {
    let begun = Instant::now();
    check().map_err(|why| format!("{piece} in {place}: {why}"))?;
    let seconds = begun.elapsed().as_secs_f64();
    println!("check {piece}: installed, used and removed in {place}, {seconds:.1} s");
    Ok(())
}

fn in_suite(dist: &DistRun, suite: &str, made: &Packages) -> TaskResult {
    let root = RootFileSystem::debian(suite)?;
    let place = format!("Debian {suite}");
    if let Some(package) = made.get("deb") {
        timed("deb", &place, || leaves_nothing(&root, || debian_package(package, &root)))?;
    }
    if ["rpm", "tar", "wheel"].iter().any(|name| made.contains_key(name)) {
        // None of them brings the libraries.
        let names = libraries(dist, &root)?;
        let mut install = vec!["apt-get", "install", "-qq", "-y", "--no-install-recommends"];
        install.extend(names.iter().map(String::as_str));
        root.run(&install)?;
    }
    if let Some(package) = made.get("rpm") {
        timed("rpm", &place, || leaves_nothing(&root, || rpm_package(package, &root)))?;
    }
    if let Some(tarball) = made.get("tar") {
        let name = tarball::name(dist.version, Flavour::Shared, "glibc");
        timed("tar", &place, || leaves_nothing(&root, || shared_tarball(tarball, &name, &root)))?;
    }
    if let Some(wheel) = made.get("wheel") {
        root.run(&["apt-get", "install", "-qq", "-y", "--no-install-recommends", "python3-pip"])?;
        // pip removes the directory of programs with the last one.
        root.run(&["touch", "/usr/local/bin/another"])?;
        timed("wheel", &place, || leaves_nothing(&root, || python_wheel(wheel, &root)))?;
    }
    root.remove()
}

/// Runs a check, and compares the files before and after it.
fn leaves_nothing(root: &RootFileSystem, check: impl FnOnce() -> TaskResult) -> TaskResult {
    let before = root.listing()?;
    check()?;
    let after = root.listing()?;
    let left: Vec<_> = after.difference(&before).map(String::as_str).collect();
    let gone: Vec<_> = before.difference(&after).map(String::as_str).collect();
    if left.is_empty() && gone.is_empty() {
        println!("  the same {} files before and after", before.len());
        return Ok(());
    }
    Err(format!("left or changed: {}; missing or changed: {}", left.join(", "), gone.join(", ")))
}

fn debian_package(package: &Path, root: &RootFileSystem) -> TaskResult {
    let inside = "/root/blockhaul.deb";
    files::install(package, &root.path(inside), 0o644)?;
    root.run(&["apt-get", "install", "-qq", "-y", "--no-install-recommends", inside])?;
    root.run(&["dpkg", "--verify", "blockhaul"])?;
    jobs(root, "blockhaul", true)?;
    root.run(&["apt-get", "purge", "-qq", "-y", "--autoremove", "blockhaul"])?;
    root.run(&["rm", inside]).map(drop)
}

/// The packages that the Debian package depends on; the first one of alternatives.
fn libraries(dist: &DistRun, root: &RootFileSystem) -> Result<Vec<String>, String> {
    let program = build::program(Flavour::Shared)?;
    let depends = deb::depends(dist, &program.path)?;
    let names = depends.split(", ").filter_map(|entry| entry.split([' ', ':']).next());
    // Debian 13 renamed libssl3, whose successor provides the old name.
    let known =
        |name: &&str| root.run(&["apt-cache", "show", name]).is_ok_and(|text| !text.is_empty());
    Ok(names.map(|name| if known(&name) { name.into() } else { format!("{name}t64") }).collect())
}

/// There is no root file system of an RPM distribution: its package goes into Debian's, by `rpm`
/// from outside and without its dependencies.
fn rpm_package(package: &Path, root: &RootFileSystem) -> TaskResult {
    let rpm = |args: &[&str]| {
        let mut command = Command::new("rpm");
        command.arg("--root").arg(root.path("/")).args(args);
        run::quiet(&mut command).map(drop)
    };
    rpm(&["--initdb"])?;
    rpm(&["-i", "--nodeps", &package.display().to_string()])?;
    rpm(&["--verify", "--nodeps", "blockhaul"])?;
    jobs(root, "blockhaul", true)?;
    rpm(&["-e", "--nodeps", "blockhaul"])
}

fn shared_tarball(tarball: &Path, name: &str, root: &RootFileSystem) -> TaskResult {
    unpack(tarball, &root.path("/opt"))?;
    jobs(root, &format!("/opt/{name}/bin/blockhaul"), false)?;
    root.run(&["rm", "-r", &format!("/opt/{name}")]).map(drop)
}

/// The wheel, installed by pip.
fn python_wheel(wheel: &Path, root: &RootFileSystem) -> TaskResult {
    let inside = format!("/root/{}", wheel.file_name().unwrap_or_default().display());
    files::install(wheel, &root.path(&inside), 0o644)?;
    let pip = |args: &[&str]| root.run(&[&["python3", "-m", "pip", "-q"], args].concat());
    pip(&["install", "--break-system-packages", "--no-index", &inside])?;
    root.run(&["python3", "-c", PYTHON_JOB])?;
    jobs(root, "/usr/local/bin/blockhaul", false)?;
    pip(&["uninstall", "--break-system-packages", "-y", "blockhaul"])?;
    root.run(&["rm", &inside]).map(drop)
}

/// The static program in a root file system with nothing else: no shell, no /proc, no /dev.
fn static_tarball(tarball: &Path) -> TaskResult {
    let root = RootFileSystem::empty("static")?;
    unpack(tarball, &root.path("/"))?;
    let program = program_below(&root)?;
    let mut command = root.command(&[]);
    command.args([&program, "serve", "-U", "/s", "sample:64M"]);
    server::with(command, &root.path("/s"), || {
        let uri = "nbd+unix:///?socket=/s";
        root.run(&[&program, "copy", "--verify", uri, "/disk.raw"])?;
        root.run(&[&program, "compare", uri, "/disk.raw"])?;
        let text = root.run(&[&program, "info", uri])?;
        if text.contains(EXPORT_SIZE) { Ok(()) } else { Err(format!("info printed: {text}")) }
    })?;
    root.remove()
}

/// The program in the only directory of a root file system, as seen from inside.
fn program_below(root: &RootFileSystem) -> Result<String, String> {
    let top = sorted(&root.path("/"))?;
    let [dir] = top.as_slice() else { return Err(format!("the tarball has {top:?}")) };
    Ok(format!("/{}/bin/blockhaul", dir.file_name().unwrap_or_default().display()))
}

fn jobs(root: &RootFileSystem, program: &str, names: bool) -> TaskResult {
    let names = if names { "names" } else { "no-names" };
    let text = root.run(&["sh", "-c", JOBS, "sh", program, names])?;
    println!("  {}", text.lines().next().unwrap_or_default());
    Ok(())
}

fn unpack(tarball: &Path, dir: &Path) -> TaskResult {
    run::quiet(Command::new("tar").arg("-xf").arg(tarball).arg("-C").arg(dir)).map(drop)
}
