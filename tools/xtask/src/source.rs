//! Source packages of Debian, unpacked below the target directory: used for tests, not part of this
//! tree.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::apt::{self, AptRoot};
use crate::suite::{PEERS, SuiteEdition};
use crate::{TaskResult, run};

pub const HELP: &str = "\
cargo xtask nbdkit-source

Fetches nbdkit's source package, from the mirror of this machine's own apt sources, and unpacks it into
target/nbdkit/source. It holds plugins that were compiled by every version of nbdkit's interface, which
the tests of plugins run where they are there.
";

/// `cargo xtask nbdkit-source`.
pub fn main(args: &[String]) -> TaskResult {
    run::no_more(args)?;
    let dir = run::target().join("nbdkit");
    fs::create_dir_all(&dir).map_err(|error| at("make", &dir, &error))?;
    ensure_nbdkit(&dir, &PEERS)
}

/// nbdkit's, in `DIR/source`.
pub fn ensure_nbdkit(dir: &Path, edition: &SuiteEdition) -> TaskResult {
    ensure(dir, edition.suite, "nbdkit", edition.nbdkit)
}

/// Fetches and unpacks a source package into `DIR/source` where it is missing.
pub fn ensure(dir: &Path, suite: &str, package: &str, version: &str) -> TaskResult {
    let source = dir.join("source");
    if source.is_dir() {
        println!("the source package {package} is ready in {}", source.display());
        return Ok(());
    }
    let apt_dir = dir.join("apt");
    fs::create_dir_all(&apt_dir).map_err(|error| at("make", &apt_dir, &error))?;
    let mut failures = Vec::new();
    let mut fetched = None;
    for archive in apt::debian_archives(Path::new("/etc/apt"))? {
        println!("fetching the source package {package} of {suite}");
        match fetch(&apt_dir, &archive, suite, package, version) {
            Ok(tarball) => {
                fetched = Some(tarball);
                break;
            }
            Err(why) => failures.push(why),
        }
    }
    let tarball = fetched.ok_or_else(|| failures.join("; "))?;
    let part = dir.join("source.part");
    if part.exists() {
        fs::remove_dir_all(&part).map_err(|error| at("remove", &part, &error))?;
    }
    fs::create_dir_all(&part).map_err(|error| at("make", &part, &error))?;
    let mut tar = Command::new("tar");
    tar.arg("-xf").arg(&tarball).args(["--strip-components=1", "-C"]).arg(&part);
    run::quiet(&mut tar)?;
    fs::rename(&part, &source).map_err(|error| at("make", &source, &error))?;
    fs::remove_dir_all(&apt_dir).map_err(|error| at("remove", &apt_dir, &error))
}

fn fetch(
    dir: &Path,
    archive: &apt::AptSource,
    suite: &str,
    package: &str,
    version: &str,
) -> Result<PathBuf, String> {
    let mut apt = AptRoot::new(dir, archive, suite)?;
    if let Err(why) = apt.update() {
        if !why.contains("NO_PUBKEY") {
            return Err(why);
        }
        let newer = apt.newer_keyring().map_err(|second| format!("{why}; {second}"))?;
        apt = AptRoot::new(dir, &newer, suite)?;
    }
    // The same archive, verified by the same keys, with its lists of sources, too.
    let sources = dir.join("archive.sources");
    let text = fs::read_to_string(&sources).map_err(|error| at("read", &sources, &error))?;
    let text = text.replacen("Types: deb\n", "Types: deb deb-src\n", 1);
    fs::write(&sources, text).map_err(|error| at("write", &sources, &error))?;
    apt.update()?;
    let download = dir.join("download");
    fs::create_dir_all(&download).map_err(|error| at("make", &download, &error))?;
    let mut command = Command::new("apt-get");
    command.args(["source", "-qq", "--download-only", package]).current_dir(&download);
    command.env("APT_CONFIG", dir.join("apt.conf")).env("LC_ALL", "C");
    run::quiet(&mut command).map_err(|why| {
        if run::ci() {
            // Apt's messages name the host.
            format!("apt-get source {package} failed")
        } else {
            why
        }
    })?;
    let entries = fs::read_dir(&download).map_err(|error| at("read", &download, &error))?;
    let tarball = entries.flatten().map(|entry| entry.path()).find(|path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with(&format!("{package}_{version}"))
            && name.contains(".orig.tar.")
            && !name.ends_with(".asc")
    });
    tarball.ok_or_else(|| format!("{suite} has no {package} {version}x"))
}

fn at(what: &str, path: &Path, error: &std::io::Error) -> String {
    format!("cannot {what} {}: {error}", path.display())
}
