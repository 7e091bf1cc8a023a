//! `cargo xtask peers`: unpacks the programs that blockhaul is tested and measured against, from
//! Debian packages of one release, into `target/peers`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use crate::apt::{self, AptRoot};
use crate::enter::{MARK, UnshareFlags};
use crate::{TaskResult, run};

pub const HELP: &str = "\
cargo xtask peers [--version | --force]

Unpacks nbdkit, libnbd, QEMU's block programs, fio, web servers and what they need from Debian trixie's
packages into target/peers. The mirror and its key come from this machine's own apt sources; nothing is
installed on the machine. Does nothing when everything is there already; an interrupted run is
taken up where it stopped.

  --version   print the versions of the peers and do nothing else
  --force     unpack again

Afterwards:
  target/peers/bin/NAME ARGS…   runs one peer (nbdkit, nbdcopy, qemu-img, fio, mkfs.ext4, …)
  target/peers/enter CMD ARGS…  runs any command with all peers in its search path; what it starts
                                is entered already and starts without further cost
Both keep process id, open descriptors and exit status. As root they use a mount namespace, as
another user a user namespace too.
";

/// The release that the packages come from.
pub const SUITE: &str = "trixie";

/// The layout of target/peers; a change makes all be unpacked again.
const LAYOUT: u32 = 1;

/// Requested packages; apt adds their dependencies. From `bash` on they are for scripts, as the
/// peers' `/usr` hides the machine's.
const PACKAGES: &str = "\
    nbdkit nbdkit-plugin-python nbdkit-plugin-perl nbdkit-plugin-tcl nbdkit-plugin-lua \
    nbdkit-plugin-libvirt nbdkit-plugin-dev gcc libc6-dev \
    libcurl4-gnutls-dev xorriso openssh-client openssh-server libnbd-bin python3-libnbd nbd-server \
    qemu-utils qemu-system-common fio e2fsprogs dosfstools mtools gnutls-bin jq file bsdextrautils \
    socat fdisk strace restic rclone nginx apache2-bin caddy skopeo bash \
    dash coreutils diffutils findutils grep gzip hostname iproute2 mawk mount perl-base procps \
    python3-minimal sed tar util-linux xfsprogs xz-utils";

/// Programs that get a wrapper in target/peers/bin.
const PROGRAMS: &str = "\
    nbdkit nbdcopy nbdinfo nbddump nbdfuse nbdsh nbd-server qemu-img qemu-io qemu-nbd \
    qemu-storage-daemon fio mkfs.ext4 mkfs.xfs mke2fs e2fsck dumpe2fs debugfs fsck.vfat mdir certtool file \
    hexdump jq psktool python3 rclone restic sfdisk socat strace nginx apache2 caddy \
    skopeo";

/// Programs whose versions are printed.
const VERSIONS: &[&str] = &["nbdkit", "nbdinfo", "nbdcopy", "qemu-img", "qemu-nbd", "fio"];

/// Not needed to run the programs.
const PRUNED: &[&str] = &["share/doc", "share/info", "share/locale", "share/man", "share/lintian"];

pub fn main(args: &[String]) -> TaskResult {
    let peers = PeerDirectory::here();
    match args {
        [] => peers.ensure(false),
        [arg] if arg == "--force" => peers.ensure(true),
        [arg] if arg == "--version" => peers.print_versions(),
        _ => run::no_more(args),
    }
}

/// The directory of unpacked peers.
pub struct PeerDirectory {
    dir: PathBuf,
    /// The release that the packages come from.
    suite: &'static str,
    /// Packages requested besides [`PACKAGES`].
    more: &'static str,
}

impl PeerDirectory {
    /// The peers of this work tree, unpacked or not yet.
    pub fn here() -> PeerDirectory {
        PeerDirectory { dir: run::target().join("peers"), suite: SUITE, more: "" }
    }

    /// Peers elsewhere, from a release of Debian, with further packages.
    pub fn with(suite: &'static str, more: &'static str, dir: PathBuf) -> PeerDirectory {
        PeerDirectory { dir, suite, more }
    }

    /// Their directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Unpacks what is missing.
    pub fn ensure(&self, force: bool) -> TaskResult {
        if !force && self.is_complete() {
            println!("peers are ready in {}", self.shown());
            return Ok(());
        }
        for program in ["apt-get", "apt-config", "dpkg", "dpkg-deb", "unshare", "mount"] {
            if !run::have(program) {
                return Err(format!(
                    "'{program}' is missing: peers are unpacked from Debian packages, on Debian \
                     machines; elsewhere install nbdkit 1.42, libnbd 1.22, QEMU 10.0 and fio by \
                     the system's own means"
                ));
            }
        }
        if !fs::symlink_metadata("/bin").is_ok_and(|bin| bin.is_symlink()) {
            return Err("/bin is a directory of its own here; peers need a merged /usr".into());
        }
        fs::create_dir_all(&self.dir).map_err(|error| self.failed("make", &self.dir, &error))?;
        let _lock = PeersLock::take(&self.dir.join("lock"))?;
        // Another run may have done all of it while we waited.
        if !force && self.is_complete() {
            println!("peers are ready in {}", self.shown());
            return Ok(());
        }
        let flags = UnshareFlags::probe()?;
        let begun = Instant::now();
        let debs = self.fetch()?;
        self.unpack(&debs)?;
        let programs = self.locate()?;
        flags.write_scripts(&self.dir, &programs)?;
        self.print_versions()?;
        self.stamp(&debs)?;
        let bytes = apparent_bytes(&self.dir.join("root"));
        println!(
            "peers: {} packages, {} MiB in {}, {} s",
            debs.len(),
            bytes >> 20,
            self.shown(),
            begun.elapsed().as_secs()
        );
        self.remove("apt")
    }

    /// Runs each peer once and prints the first line of its version output.
    pub fn print_versions(&self) -> TaskResult {
        if !self.dir.join("bin/nbdkit").is_file() {
            return Err("the peers are not unpacked; run `cargo xtask peers`".into());
        }
        for name in VERSIONS {
            let text = run::quiet(Command::new(self.dir.join("bin").join(name)).arg("--version"))?;
            // libnbd's programs name the library on the second line; qemu-nbd its own path first.
            let lines: Vec<&str> = text.lines().take(2).filter(|line| is_version(line)).collect();
            println!("  {}", lines.join(", ").trim_start_matches("/usr/bin/"));
        }
        let engines = run::quiet(Command::new(self.dir.join("bin/fio")).arg("--enghelp"))?;
        if engines.split_whitespace().any(|engine| engine == "nbd") {
            return Ok(());
        }
        Err("the fio that was unpacked has no nbd engine".into())
    }

    /// Downloads all packages, from the first of the machine's archives that has them.
    fn fetch(&self) -> Result<Vec<PathBuf>, String> {
        let sources = apt::debian_archives(Path::new("/etc/apt"))?;
        let dir = self.dir.join("apt");
        let mut failures = Vec::new();
        for source in sources {
            println!("peers: reading the package lists of {}", self.suite);
            match self.fetch_from(&dir, &source) {
                Ok(debs) => return Ok(debs),
                Err(why) => failures.push(why),
            }
        }
        Err(failures.join("; "))
    }

    fn fetch_from(&self, dir: &Path, source: &apt::AptSource) -> Result<Vec<PathBuf>, String> {
        let mut apt = AptRoot::new(dir, source, self.suite)?;
        if let Err(why) = apt.update() {
            if !why.contains("NO_PUBKEY") {
                return Err(why);
            }
            println!("peers: fetching a keyring that has {}'s key", self.suite);
            let newer = apt.newer_keyring().map_err(|second| format!("{why}; {second}"))?;
            apt = AptRoot::new(dir, &newer, self.suite)?;
            apt.update()?;
        }
        println!("peers: fetching packages");
        let packages = PACKAGES.split_whitespace().chain(self.more.split_whitespace());
        apt.download(&packages.collect::<Vec<_>>())
    }

    /// Unpacks the packages into a fresh `root`, several at a time.
    fn unpack(&self, debs: &[PathBuf]) -> TaskResult {
        println!("peers: unpacking {} packages", debs.len());
        for stale in ["root.part", "root.old"] {
            self.remove(stale)?;
        }
        let root = self.dir.join("root.part");
        let usr = root.join("usr");
        for sub in ["bin", "sbin", "lib", "lib64"] {
            let path = usr.join(sub);
            fs::create_dir_all(&path).map_err(|error| self.failed("make", &path, &error))?;
            let link = root.join(sub);
            std::os::unix::fs::symlink(format!("usr/{sub}"), &link)
                .map_err(|error| self.failed("make", &link, &error))?;
        }
        let next = AtomicUsize::new(0);
        let failure = Mutex::new(None);
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(8);
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    while let Some(deb) = debs.get(next.fetch_add(1, Ordering::Relaxed)) {
                        let mut command = Command::new("dpkg-deb");
                        if let Err(why) = run::quiet(command.arg("-x").arg(deb).arg(&root)) {
                            *failure.lock().unwrap_or_else(|poison| poison.into_inner()) =
                                Some(why);
                            return;
                        }
                    }
                });
            }
        });
        if let Some(why) = failure.into_inner().unwrap_or_else(|poison| poison.into_inner()) {
            return Err(why);
        }
        self.finish_root(&root)?;
        let done = self.dir.join("root");
        self.remove("stamp")?;
        // Programs that run among the peers now keep their tree until the next time.
        if done.exists() {
            let old = self.dir.join("root.old");
            fs::rename(&done, &old).map_err(|error| self.failed("move", &done, &error))?;
        }
        fs::rename(&root, &done).map_err(|error| self.failed("make", &done, &error))
    }

    /// Does what the packages' own scripts would do as far as it matters, and removes what is not
    /// needed.
    fn finish_root(&self, root: &Path) -> TaskResult {
        let usr = root.join("usr");
        // The alternatives system would make these links.
        for (name, program) in [("awk", "mawk"), ("lzip", "lzip.lzip")] {
            let link = usr.join("bin").join(name);
            if !link.exists() && usr.join("bin").join(program).exists() {
                std::os::unix::fs::symlink(program, &link)
                    .map_err(|error| self.failed("make", &link, &error))?;
            }
        }
        let mark = usr.join(MARK);
        fs::write(&mark, "").map_err(|error| self.failed("write", &mark, &error))?;
        // Only /usr is mounted over the machine's; the rest is never visible.
        let entries = fs::read_dir(root).map_err(|error| self.failed("read", root, &error))?;
        for entry in entries.flatten() {
            if entry.file_name() != "usr" {
                remove(&entry.path())?;
            }
        }
        for sub in PRUNED {
            remove(&usr.join(sub))?;
        }
        Ok(())
    }

    /// Absolute paths, as seen inside, of the programs that get wrappers.
    fn locate(&self) -> Result<Vec<String>, String> {
        let mut found = Vec::new();
        for name in PROGRAMS.split_whitespace() {
            let path = ["/usr/bin", "/usr/sbin"]
                .iter()
                .map(|dir| format!("{dir}/{name}"))
                .find(|path| self.dir.join("root").join(&path[1..]).is_file());
            found.push(path.ok_or_else(|| format!("no package that was unpacked has '{name}'"))?);
        }
        Ok(found)
    }

    /// First line of the stamp: the inputs. A change of any of them unpacks again.
    fn wanted(&self) -> String {
        // The first line of a file, and for the usual peers without a trace of others.
        let more = if self.more.is_empty() { String::new() } else { format!("; {}", self.more) };
        format!("layout {LAYOUT} of {}: {PACKAGES}; {PROGRAMS}{more}", self.suite)
    }

    /// The stamp is written last: if it exists, everything does.
    fn stamp(&self, debs: &[PathBuf]) -> TaskResult {
        let mut text = self.wanted() + "\n";
        for (name, version) in debs.iter().map(|deb| apt::package(deb)) {
            text += &format!("{name} {version}\n");
        }
        let path = self.dir.join("stamp");
        fs::write(&path, text).map_err(|error| self.failed("write", &path, &error))
    }

    fn is_complete(&self) -> bool {
        let stamp = fs::read_to_string(self.dir.join("stamp")).unwrap_or_default();
        stamp.lines().next() == Some(self.wanted().as_str())
    }

    fn remove(&self, name: &str) -> TaskResult {
        remove(&self.dir.join(name))
    }

    fn shown(&self) -> String {
        if run::ci() { "target/peers".into() } else { self.dir.display().to_string() }
    }

    fn failed(&self, what: &str, path: &Path, error: &std::io::Error) -> String {
        format!("cannot {what} {}: {error}", path.display())
    }
}

/// Keeps a second run out until this one is done. The kernel releases it at the end of the process.
struct PeersLock {
    _file: fs::File,
}

impl PeersLock {
    fn take(path: &Path) -> Result<PeersLock, String> {
        let failed =
            |error: &dyn std::fmt::Display| format!("cannot lock {}: {error}", path.display());
        let file = fs::File::create(path).map_err(|error| failed(&error))?;
        rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive)
            .map_err(|error| failed(&error))?;
        Ok(PeersLock { _file: file })
    }
}

fn is_version(line: &str) -> bool {
    line.contains(|c: char| c.is_ascii_digit()) && !line.starts_with("Copyright")
}

/// Removes a file, a link or a tree; nothing there is fine.
fn remove(path: &Path) -> TaskResult {
    let result = match fs::symlink_metadata(path) {
        Err(_) => return Ok(()),
        Ok(meta) if meta.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
    };
    result.map_err(|error| format!("cannot remove {}: {error}", path.display()))
}

/// Sum of the sizes of the files in a tree.
fn apparent_bytes(dir: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(dir) else { return 0 };
    let of = |entry: fs::DirEntry| match entry.metadata() {
        Ok(meta) if meta.is_dir() => apparent_bytes(&entry.path()),
        Ok(meta) if meta.is_file() => meta.len(),
        _ => 0,
    };
    entries.flatten().map(of).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stamp_tells_a_complete_tree_from_an_older_or_broken_one() {
        let scratch = tempfile::tempdir().unwrap();
        let dir = scratch.path().to_path_buf();
        let peers = PeerDirectory::with(SUITE, "", dir.clone());
        assert!(!peers.is_complete());
        peers.stamp(&[PathBuf::from("nbdkit_1.42.3-1_amd64.deb")]).unwrap();
        assert!(peers.is_complete());
        let text = fs::read_to_string(dir.join("stamp")).unwrap();
        assert!(text.ends_with("\nnbdkit 1.42.3-1\n"), "{text}");
        fs::write(dir.join("stamp"), text.replacen("layout", "older", 1)).unwrap();
        assert!(!peers.is_complete());
    }
}
