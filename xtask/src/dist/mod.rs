//! `cargo xtask dist`: packages of the program, in `target/dist`. Each kind of package has its own
//! file here; `files` lays out what they install.

mod build;
mod check;
mod closure;
mod deb;
mod files;
mod image;
mod licenses;
mod rpm;
mod sbom;
mod sums;
mod tarball;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use crate::{Outcome, run};

pub const HELP: &str = "\
cargo xtask dist [PIECE…] [--check]

Builds the program with the profile `dist` (stripped) and makes packages of it in target/dist [default: all
pieces]:

  deb     Debian package. Needs dpkg-deb and dpkg-shlibdeps (package dpkg-dev)
  rpm     RPM package. Needs rpmbuild (Debian's package rpm); left out, with the reason, where it is missing
  tar     tarball with the program linked against glibc and OpenSSL
  static  tarball with a static program: OpenSSL compiled in, no plugins for nbdkit. Linked against musl
          where Rust's target for it and musl-gcc are installed, else against glibc
  image   container image (OCI layout in a tar file) with the static program
  sbom    lists of the crates in both programs (CycloneDX 1.5)

and SHA256SUMS over all of them. Dates in packages are that of the last commit (or SOURCE_DATE_EPOCH); the
maintainer in the .deb and .rpm is DEBFULLNAME and DEBEMAIL.

  --check  makes the pieces, then installs each one in a clean root file system (debootstrap of Debian bookworm
           and trixie, kept in target/dist-roots), copies a disk over NBD with verification there, runs `info`,
           removes the package, and fails if a file is left. Needs root and debootstrap
";

/// The bar for the stripped program that is linked against glibc, in bytes.
const LARGEST_PROGRAM: u64 = 16_000_000;

/// A kind of package: its name on the command line, and what makes it.
struct Piece {
    name: &'static str,
    make: fn(&Dist) -> Result<Made, String>,
}

/// What became of a piece: files, or the reason for which it is left out.
enum Made {
    Files(Vec<PathBuf>),
    LeftOut(String),
}

/// The packages of a run by the names of their pieces; of several files the first one.
type Packages = BTreeMap<&'static str, PathBuf>;

/// Every piece, in the order in which they are made. To add one, add a file and a line here.
const PIECES: &[Piece] = &[
    Piece { name: "deb", make: deb::make },
    Piece { name: "rpm", make: rpm::make },
    Piece { name: "tar", make: tarball::make },
    Piece { name: "static", make: tarball::make_static },
    Piece { name: "image", make: image::make },
    Piece { name: "sbom", make: sbom::make },
];

/// What all pieces share.
pub struct Dist {
    /// The version of the workspace.
    version: &'static str,
    /// Where the packages go: `target/dist`.
    out: PathBuf,
    /// Where trees are laid out before they are packed. Emptied for each piece.
    work: PathBuf,
    /// Seconds since 1970, for dates in packages.
    epoch: u64,
}

pub fn main(args: &[String]) -> Outcome {
    let mut names = Vec::new();
    let mut check = false;
    for arg in args {
        match arg.as_str() {
            "--check" => check = true,
            name if PIECES.iter().any(|piece| piece.name == name) => names.push(name),
            _ => return Err(format!("unknown argument '{arg}' (see --help)")),
        }
    }
    if check {
        check::ready()?;
    }
    let dist = Dist::new()?;
    let mut made = Packages::new();
    for piece in PIECES.iter().filter(|piece| names.is_empty() || names.contains(&piece.name)) {
        let begun = Instant::now();
        match (piece.make)(&dist).map_err(|why| format!("{}: {why}", piece.name))? {
            Made::Files(files) => {
                report(piece.name, &files, begun)?;
                made.extend(files.into_iter().next().map(|file| (piece.name, file)));
            }
            Made::LeftOut(why) if names.is_empty() && !run::ci() => {
                println!("{}: left out: {why}", piece.name);
            }
            Made::LeftOut(why) => return Err(format!("{}: {why}", piece.name)),
        }
    }
    sums::write_all(&dist)?;
    if check { check::all(&dist, &made) } else { Ok(()) }
}

/// One line for each file: its size in bytes, and how long it took to make.
fn report(piece: &str, files: &[PathBuf], begun: Instant) -> Outcome {
    for file in files {
        let size = size_of(file)?;
        let name = file.file_name().unwrap_or_default().display();
        println!("{piece}: {name}, {size} bytes, {:.1} s", begun.elapsed().as_secs_f64());
    }
    Ok(())
}

fn size_of(file: &Path) -> Result<u64, String> {
    let data = fs::metadata(file)
        .map_err(|error| format!("cannot find the size of {}: {error}", file.display()))?;
    Ok(data.len())
}

impl Dist {
    fn new() -> Result<Dist, String> {
        let target = run::target();
        let dist = Dist {
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
    fn empty(&self, name: &str) -> Result<PathBuf, String> {
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
    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.env("SOURCE_DATE_EPOCH", self.epoch.to_string());
        // Names of months in packages are English.
        command.env("LC_ALL", "C.UTF-8");
        command
    }

    /// `tar`, set up so that the same files give the same bytes: sorted, owned by root, dated.
    fn tar(&self, file: &Path, below: &Path) -> Command {
        let mut tar = self.command("tar");
        tar.args(["--sort=name", "--owner=0", "--group=0", "--numeric-owner", "--format=gnu"]);
        tar.arg(format!("--mtime=@{}", self.epoch)).arg("-cf").arg(file).arg("-C").arg(below);
        tar
    }
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
fn maintainer() -> String {
    let name = std::env::var("DEBFULLNAME").unwrap_or("The blockhaul developers".into());
    let address = std::env::var("DEBEMAIL").unwrap_or("root@localhost".into());
    format!("{name} <{address}>")
}

fn write(path: &Path, text: impl AsRef<[u8]>) -> Outcome {
    if let Some(dir) = path.parent() {
        fs::create_dir_all(dir)
            .map_err(|error| format!("cannot make {}: {error}", dir.display()))?;
    }
    fs::write(path, text).map_err(|error| format!("cannot write {}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_help_names_every_piece() {
        for piece in PIECES {
            assert!(HELP.contains(&format!("\n  {:8}", piece.name)), "{}", piece.name);
        }
    }
}
