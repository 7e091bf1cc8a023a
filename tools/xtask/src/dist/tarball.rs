//! Tarballs: everything below one directory, to be unpacked anywhere.

use super::build::{self, Flavour};
use super::files;
use super::piece::{DistRun, PackageOutput};
use crate::run;

pub fn make(dist: &DistRun) -> Result<PackageOutput, String> {
    pack(dist, Flavour::Shared)
}

pub fn make_static(dist: &DistRun) -> Result<PackageOutput, String> {
    pack(dist, Flavour::Static)
}

fn pack(dist: &DistRun, flavour: Flavour) -> Result<PackageOutput, String> {
    let program = build::program(flavour)?;
    let name = name(dist.version, flavour, program.libc);
    let top = dist.empty("tar")?;
    files::lay_out(dist, &program.path, flavour, &top.join(&name), &files::TARBALL)?;
    let tar = top.join(format!("{name}.tar"));
    run::quiet(dist.tar(&tar, &top).arg(&name))?;
    run::quiet(dist.command("gzip").args(["-9", "-n", "-f"]).arg(&tar))?;
    let file = dist.out.join(format!("{name}.tar.gz"));
    files::install(&tar.with_extension("tar.gz"), &file, 0o644)?;
    Ok(PackageOutput::Files(vec![file]))
}

/// The name of the directory, and of the tarball without its extensions.
pub fn name(version: &str, flavour: Flavour, libc: &str) -> String {
    let arch = std::env::consts::ARCH;
    match flavour {
        Flavour::Shared => format!("blockhaul-{version}-{arch}-linux-{libc}"),
        Flavour::Static => format!("blockhaul-{version}-{arch}-linux-static-{libc}"),
    }
}
