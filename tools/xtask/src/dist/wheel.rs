//! A wheel for Python: the package, its module, and the program.

use std::path::Path;
use std::process::Command;

use super::build::{self, Flavour};
use super::files;
use super::piece::{DistRun, PackageOutput};
use crate::run;

/// What packs the wheel, also for `pip install .`.
const SCRIPT: &str = "crates/programs/python/build/blockhaul_build.py";

pub fn make(dist: &DistRun) -> Result<PackageOutput, String> {
    if !run::have("python3") {
        return Ok(PackageOutput::LeftOut("python3 is not installed".into()));
    }
    let program = build::program(Flavour::Shared)?.path;
    let module = build::python_module()?;
    let compiled = dist.empty("wheel")?;
    files::install(&program, &compiled.join("blockhaul"), 0o755)?;
    files::install(&module, &compiled.join("lib_blockhaul.so"), 0o755)?;
    let glibc = glibc(&program)?.max(glibc(&module)?);
    let platform = format!("manylinux_2_{glibc}_{}", std::env::consts::ARCH);
    let mut python = dist.command("python3");
    python.env("BLOCKHAUL_WHEEL_PLATFORM", platform).arg(run::workspace().join(SCRIPT));
    python.arg("wheel").arg(&dist.out).arg("--from").arg(&compiled);
    let name = run::quiet(&mut python)?;
    Ok(PackageOutput::Files(vec![dist.out.join(name.trim())]))
}

/// The release of glibc that a file needs: 34 for 2.34.
fn glibc(file: &Path) -> Result<u32, String> {
    let versions =
        run::quiet(Command::new("readelf").args(["--wide", "--version-info"]).arg(file))?;
    newest(&versions).ok_or_else(|| format!("{} needs no version of glibc", file.display()))
}

/// The newest of the versions of glibc that `readelf` lists.
fn newest(versions: &str) -> Option<u32> {
    let minor = |text: &str| text.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok();
    versions.split("Name: GLIBC_2.").skip(1).filter_map(minor).max()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_version_counts() {
        let listed = "  0x0010:   Name: GLIBC_2.9  Flags: none  Version: 5\n  \
                      0x0020:   Name: GLIBC_2.34  Flags: none  Version: 4\n  \
                      0x0030:   Name: GLIBC_2.2.5  Flags: none\n  0x0040:   Name: OPENSSL_3.0.0";
        assert_eq!(newest(listed), Some(34));
        assert_eq!(newest("no version information"), None);
    }
}
