//! Root file systems to try packages in.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{TaskResult, apt, run};

/// What changes whenever packages are installed and removed, whatever they are.
const VOLATILE: &[&str] = &[
    "proc",
    "tmp",
    "var/log",
    "var/cache",
    "var/lib/apt",
    "var/lib/rpm",
    "root/.rpmdb",
    "etc/ld.so.cache",
    "var/lib/dpkg/status",
    "var/lib/dpkg/status-old",
    "var/lib/dpkg/lock",
    "var/lib/dpkg/lock-frontend",
    "var/lib/dpkg/triggers/Lock",
];

/// A root file system that may be changed.
pub struct RootFileSystem {
    dir: PathBuf,
}

fn roots() -> PathBuf {
    run::target().join("dist-roots")
}

impl RootFileSystem {
    /// A copy of a fresh Debian, which is fetched once.
    pub fn debian(suite: &str) -> Result<RootFileSystem, String> {
        let base = roots().join(suite);
        if !base.is_dir() {
            fetch(suite, &base)?;
        }
        let root = RootFileSystem::empty(&format!("{suite}-work"))?;
        run::quiet(
            Command::new("cp").args(["-a", "--reflink=auto"]).arg(base.join(".")).arg(&root.dir),
        )?;
        Ok(root)
    }

    /// An empty directory.
    pub fn empty(name: &str) -> Result<RootFileSystem, String> {
        let root = RootFileSystem { dir: roots().join(name) };
        if root.dir.exists() {
            root.clear()?;
        }
        fs::create_dir_all(&root.dir)
            .map_err(|error| format!("cannot make {}: {error}", root.dir.display()))?;
        Ok(root)
    }

    /// A path inside, as seen from outside.
    pub fn path(&self, inside: &str) -> PathBuf {
        self.dir.join(inside.trim_start_matches('/'))
    }

    /// Runs a command inside, and gives its output. It has a mount namespace and process ids of its
    /// own, so that its mounts and its processes end with it.
    pub fn run(&self, words: &[&str]) -> Result<String, String> {
        let why = |why| format!("{}: {why}", words.join(" "));
        run::quiet(self.command(&[]).args(words)).map_err(why)
    }

    /// The command that starts what its further arguments say. /proc is mounted where there is a
    /// directory for it; `chroot` are options of chroot.
    pub fn command(&self, chroot: &[&str]) -> Command {
        let script = "dir=$1; shift; [ ! -d \"$dir/proc\" ] || mount -t proc proc \"$dir/proc\"; exec chroot \"$@\"";
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation", "private", "--pid", "--fork", "--kill-child"]);
        command.args(["sh", "-ec", script, "sh"]).arg(&self.dir).args(chroot).arg(&self.dir);
        command.env_clear().env("LC_ALL", "C.UTF-8").env("DEBIAN_FRONTEND", "noninteractive");
        command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").env("HOME", "/root");
        command
    }

    /// Every file inside with its kind and where it leads; files of /etc and of dpkg's database with
    /// their digests.
    pub fn listing(&self) -> Result<BTreeSet<String>, String> {
        let mut find = Command::new("find");
        find.current_dir(&self.dir).args([".", "-xdev"]);
        let names = run::quiet(find.args(["-printf", "%P %y %M %U %G %l\n"]))?;
        let mut digests = Command::new("find");
        digests.current_dir(&self.dir).args(["etc", "var/lib/dpkg", "-xdev", "-type", "f"]);
        let digests = run::quiet(digests.args(["-exec", "md5sum", "--", "{}", "+"]))?;
        let digests = digests.lines().filter_map(|line| {
            let (digest, name) = line.split_once("  ")?;
            Some(format!("{name} md5 {digest}"))
        });
        Ok(names.lines().map(str::to_owned).chain(digests).filter(|line| lasting(line)).collect())
    }

    /// Removes the root file system.
    pub fn remove(self) -> TaskResult {
        self.clear()
    }

    /// Removes everything, unless something is still mounted inside: what is mounted must not be
    /// removed with it.
    fn clear(&self) -> TaskResult {
        let mounts = fs::read_to_string("/proc/mounts")
            .map_err(|error| format!("cannot read /proc/mounts: {error}"))?;
        let dir = fs::canonicalize(&self.dir)
            .map_err(|error| format!("cannot find {}: {error}", self.dir.display()))?;
        if let Some(place) = mounted_below(&mounts, &dir) {
            return Err(format!(
                "{place} is mounted; unmount it before {} is removed",
                dir.display()
            ));
        }
        fs::remove_dir_all(&dir)
            .map_err(|error| format!("cannot remove {}: {error}", dir.display()))
    }
}

/// Whether a line of a listing is about something that packages decide.
fn lasting(line: &str) -> bool {
    let name = line.split(' ').next().unwrap_or_default();
    !VOLATILE.iter().any(|path| {
        name.strip_prefix(path).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    })
}

/// A place of `/proc/mounts` at or below a directory.
fn mounted_below<'a>(mounts: &'a str, dir: &Path) -> Option<&'a str> {
    mounts.lines().filter_map(|line| line.split(' ').nth(1)).find(|place| {
        // Spaces in the file are written as \040.
        Path::new(&place.replace("\\040", " ")).starts_with(dir)
    })
}

/// Fetches a minimal Debian from the mirror of this machine.
fn fetch(suite: &str, base: &Path) -> TaskResult {
    let archives = apt::debian_archives(Path::new("/etc/apt"))?;
    let archive = archives.first().ok_or("this machine has no Debian mirror")?;
    let part = RootFileSystem::empty(&format!("{suite}.part"))?;
    println!("fetching Debian {suite}");
    let mut command = Command::new("debootstrap");
    command.args(["--variant=minbase", suite]).arg(&part.dir).arg(&archive.uri);
    run::quiet(&mut command).map_err(|why| apt::without_host(&why, &archive.uri))?;
    run::quiet(
        Command::new("rm").arg("-rf").arg("--").args([part.path("/var/cache/apt/archives")]),
    )?;
    run::quiet(
        Command::new("mkdir").arg("-p").args([part.path("/var/cache/apt/archives/partial")]),
    )?;
    fs::rename(&part.dir, base)
        .map_err(|error| format!("cannot rename {}: {error}", part.dir.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_packages_decide_is_listed() {
        assert!(lasting("usr/bin/nbdkit l lrwxrwxrwx 0 0 /etc/alternatives/nbdkit"));
        assert!(lasting("var/lib/dpkg/info/blockhaul.list f -rw-r--r-- 0 0 "));
        assert!(!lasting("var/lib/dpkg/status md5 00"));
        assert!(!lasting("var/log/dpkg.log f -rw-r--r-- 0 0 "));
        assert!(lasting("var/logs f -rw-r--r-- 0 0 "));
    }

    #[test]
    fn mounts_inside_are_found() {
        let mounts = "proc /proc proc rw 0 0\nproc /a/work\\040dir/proc proc rw 0 0\n";
        assert_eq!(mounted_below(mounts, Path::new("/a/work dir")), Some("/a/work\\040dir/proc"));
        assert_eq!(mounted_below(mounts, Path::new("/a/work")), None);
        assert_eq!(mounted_below(mounts, Path::new("/proc")), Some("/proc"));
    }
}
