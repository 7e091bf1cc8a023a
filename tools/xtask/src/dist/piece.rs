//! What all pieces share: directories, dates, commands, and what becomes of a piece.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{TaskResult, run};

/// What became of a piece: files, or the reason for which it is left out.
pub enum PackageOutput {
    Files(Vec<PathBuf>),
    LeftOut(String),
}

/// The packages of a run by the names of their pieces; of several files the first one.
pub type Packages = BTreeMap<&'static str, PathBuf>;

/// What all pieces share.
pub struct DistRun {
    /// The version of the workspace.
    pub version: &'static str,
    /// Where the packages go: `target/dist`.
    pub out: PathBuf,
    /// Where trees are laid out before they are packed. Emptied for each piece.
    pub work: PathBuf,
    /// Seconds since 1970, for dates in packages.
    pub epoch: u64,
}

impl DistRun {
    pub fn new() -> Result<DistRun, String> {
        let target = run::target();
        let dist = DistRun {
            version: env!("CARGO_PKG_VERSION"),
            out: target.join("dist"),
            work: target.join("dist-work"),
            epoch: epoch()?,
        };
        fs::create_dir_all(&dist.out)
            .map_err(|error| format!("cannot make {}: {error}", dist.out.display()))?;
        Ok(dist)
    }

    /// An empty directory for the tree of a piece.
    pub fn empty(&self, name: &str) -> Result<PathBuf, String> {
        let dir = self.work.join(name);
        if dir.exists() {
            fs::remove_dir_all(&dir)
                .map_err(|error| format!("cannot empty {}: {error}", dir.display()))?;
        }
        fs::create_dir_all(&dir)
            .map_err(|error| format!("cannot make {}: {error}", dir.display()))?;
        Ok(dir)
    }

    /// A command with the date that tools write into packages.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.env("SOURCE_DATE_EPOCH", self.epoch.to_string());
        // Names of months in packages are English.
        command.env("LC_ALL", "C.UTF-8");
        command
    }

    /// `tar`, set up so that the same files give the same bytes: sorted, owned by root, dated.
    pub fn tar(&self, file: &Path, below: &Path) -> Command {
        let mut tar = self.command("tar");
        tar.args(["--sort=name", "--owner=0", "--group=0", "--numeric-owner", "--format=gnu"]);
        tar.arg(format!("--mtime=@{}", self.epoch)).arg("-cf").arg(file).arg("-C").arg(below);
        tar
    }
}

/// The size of a file in bytes.
pub fn size_of(file: &Path) -> Result<u64, String> {
    let data = fs::metadata(file)
        .map_err(|error| format!("cannot find the size of {}: {error}", file.display()))?;
    Ok(data.len())
}

/// The date of packages: SOURCE_DATE_EPOCH, else that of the last commit.
fn epoch() -> Result<u64, String> {
    let text = match std::env::var("SOURCE_DATE_EPOCH") {
        Ok(text) => text,
        Err(_) => run::quiet(Command::new("git").current_dir(run::workspace()).args([
            "log",
            "-1",
            "--format=%ct",
        ]))?,
    };
    text.trim().parse().map_err(|_| format!("'{}' is not a number of seconds", text.trim()))
}

/// Who is named in packages, in the form `NAME <ADDRESS>`, by Debian's variables.
pub fn maintainer() -> String {
    let name = std::env::var("DEBFULLNAME").unwrap_or("The blockhaul developers".into());
    let address = std::env::var("DEBEMAIL").unwrap_or("root@localhost".into());
    format!("{name} <{address}>")
}

/// Writes a file, in a directory that is made if there is none.
pub fn write(path: &Path, text: impl AsRef<[u8]>) -> TaskResult {
    if let Some(dir) = path.parent() {
        fs::create_dir_all(dir)
            .map_err(|error| format!("cannot make {}: {error}", dir.display()))?;
    }
    fs::write(path, text).map_err(|error| format!("cannot write {}: {error}", path.display()))
}

/// The entries of a directory, sorted.
pub fn sorted(dir: &Path) -> Result<Vec<PathBuf>, String> {
    let entries =
        fs::read_dir(dir).map_err(|error| format!("cannot read {}: {error}", dir.display()))?;
    let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    paths.sort();
    Ok(paths)
}
