//! `cargo xtask dist`: packages of the program, in `target/dist`. Each kind of package has its own
//! file here; `files` lays out what they install, and `piece` has what all of them use.

mod build;
mod check;
mod closure;
mod deb;
mod files;
mod image;
mod licenses;
mod piece;
mod rpm;
mod sbom;
mod sums;
mod tarball;
mod wheel;

use std::path::PathBuf;
use std::time::Instant;

use self::piece::{DistRun, PackageOutput, Packages, size_of};
use crate::{TaskResult, run};

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
  wheel   wheel for Python 3.11 and later with the package and the program: pip install gives the command, too.
          Needs python3
  sbom    lists of the crates in both programs (CycloneDX 1.5)

and SHA256SUMS over all of them. Dates in packages are that of the last commit (or SOURCE_DATE_EPOCH); the
maintainer in the .deb and .rpm is DEBFULLNAME and DEBEMAIL.

  --check  makes the pieces, then installs each one in a clean root file system (debootstrap of Debian bookworm
           and trixie, kept in target/dist-roots), copies a disk over NBD with verification there, runs `info`,
           removes the package, and fails if a file is left. Needs root and debootstrap
";

/// A kind of package: its name on the command line, and what makes it.
struct PackageKind {
    name: &'static str,
    make: fn(&DistRun) -> Result<PackageOutput, String>,
}

/// Every piece, in the order in which they are made. To add one, add a file and a line here.
const PIECES: &[PackageKind] = &[
    PackageKind { name: "deb", make: deb::make },
    PackageKind { name: "rpm", make: rpm::make },
    PackageKind { name: "tar", make: tarball::make },
    PackageKind { name: "static", make: tarball::make_static },
    PackageKind { name: "image", make: image::make },
    PackageKind { name: "wheel", make: wheel::make },
    PackageKind { name: "sbom", make: sbom::make },
];

pub fn main(args: &[String]) -> TaskResult {
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
    let dist = DistRun::new()?;
    let mut made = Packages::new();
    for piece in PIECES.iter().filter(|piece| names.is_empty() || names.contains(&piece.name)) {
        let begun = Instant::now();
        match (piece.make)(&dist).map_err(|why| format!("{}: {why}", piece.name))? {
            PackageOutput::Files(files) => {
                report(piece.name, &files, begun)?;
                made.extend(files.into_iter().next().map(|file| (piece.name, file)));
            }
            PackageOutput::LeftOut(why) if names.is_empty() && !run::ci() => {
                println!("{}: left out: {why}", piece.name);
            }
            PackageOutput::LeftOut(why) => return Err(format!("{}: {why}", piece.name)),
        }
    }
    sums::write_all(&dist)?;
    if check { check::all(&dist, &made) } else { Ok(()) }
}

/// One line for each file: its size in bytes, and how long it took to make.
fn report(piece: &str, files: &[PathBuf], begun: Instant) -> TaskResult {
    for file in files {
        let size = size_of(file)?;
        let name = file.file_name().unwrap_or_default().display();
        println!("{piece}: {name}, {size} bytes, {:.1} s", begun.elapsed().as_secs_f64());
    }
    Ok(())
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
