//! The program in its two flavours, built with the profile `dist`.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::piece::size_of;
use crate::{TaskResult, run};

/// The bar for the stripped program that is linked against glibc, in bytes.
const LARGEST_PROGRAM: u64 = 24_000_000;

/// How the program is linked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flavour {
    /// Against glibc and the machine's OpenSSL, with every feature.
    Shared,
    /// Static, with its own OpenSSL and without plugins for nbdkit, which need `dlopen`.
    Static,
}

/// A program that was built.
pub struct BuiltProgram {
    pub path: PathBuf,
    /// The C library: glibc or musl.
    pub libc: &'static str,
}

impl Flavour {
    /// Arguments of cargo that choose the features.
    pub fn features(self) -> &'static [&'static str] {
        match self {
            Flavour::Shared => &[],
            Flavour::Static => &[
                "--no-default-features",
                "--features",
                "bench,formats,fuse,luks,remote,restic,vhost,vendored-openssl",
            ],
        }
    }

    fn directory(self) -> &'static str {
        match self {
            Flavour::Shared => "dist-build",
            Flavour::Static => "dist-build-static",
        }
    }
}

/// Builds the program. Cargo notices when there is nothing to do.
pub fn program(flavour: Flavour) -> Result<BuiltProgram, String> {
    let dir = run::target().join(flavour.directory());
    let mut cargo = compiler("blockhaul-cli", &dir);
    cargo.args(flavour.features());
    let mut flags = flags();
    let (folder, libc) = match flavour {
        Flavour::Shared => ("dist".into(), "glibc"),
        Flavour::Static => {
            let (target, libc) = static_target()?;
            if libc == "glibc" {
                flags.push("-Ctarget-feature=+crt-static".into());
            }
            cargo.args(["--target", &target]);
            // Where Debian and Fedora keep certificates of authorities and OpenSSL's configuration.
            cargo.env("OPENSSL_CONFIG_DIR", "/etc/ssl");
            (format!("{target}/dist"), libc)
        }
    };
    cargo.env("CARGO_ENCODED_RUSTFLAGS", flags.join("\x1f"));
    run::show(&mut cargo)?;
    let path = dir.join(folder).join("blockhaul");
    if flavour == Flavour::Shared {
        small_enough(&path)?;
    } else {
        linked_statically(&path)?;
    }
    Ok(BuiltProgram { path, libc })
}

/// Builds the module of the Python package, with the libraries of the shared program; returns its path.
pub fn python_module() -> Result<PathBuf, String> {
    let dir = run::target().join(Flavour::Shared.directory());
    let mut cargo = compiler("blockhaul-python-module", &dir);
    cargo.env("CARGO_ENCODED_RUSTFLAGS", flags().join("\x1f"));
    run::show(&mut cargo)?;
    Ok(dir.join("dist/lib_blockhaul.so"))
}

/// Cargo, told to build a package with the profile `dist` below `dir`.
fn compiler(package: &str, dir: &Path) -> Command {
    let mut cargo = run::cargo("build");
    cargo.args(["--locked", "--profile", "dist", "--package", package, "--target-dir"]).arg(dir);
    // OpenSSL records when it was compiled. With the date of the commit it would be compiled again
    // after each commit.
    cargo.env("SOURCE_DATE_EPOCH", "0");
    cargo
}

/// Flags of the compiler.
fn flags() -> Vec<String> {
    let mut flags = remapped();
    // Cargo leaves out the profile's `strip` for a package with options of its own in the profile.
    flags.push("-Cstrip=symbols".into());
    flags
}

/// Flags that keep paths of this machine out of the program.
fn remapped() -> Vec<String> {
    let home = std::env::var_os("HOME").map(PathBuf::from).unwrap_or_default();
    let cargo = std::env::var_os("CARGO_HOME").map(PathBuf::from).unwrap_or(home.join(".cargo"));
    let remap = |from: &Path, to: &str| format!("--remap-path-prefix={}={to}", from.display());
    vec![remap(&run::workspace(), "blockhaul"), remap(&cargo, "cargo")]
}

/// The target triple of the static program, and the C library that it contains.
fn static_target() -> Result<(String, &'static str), String> {
    let arch = std::env::consts::ARCH;
    let sysroot = run::quiet(Command::new("rustc").args(["--print", "sysroot"]))?;
    let musl = format!("{arch}-unknown-linux-musl");
    let installed = Path::new(sysroot.trim()).join("lib/rustlib").join(&musl).join("lib").is_dir();
    if installed && run::have("musl-gcc") {
        return Ok((musl, "musl"));
    }
    let missing = if installed {
        "musl-gcc (Debian's package musl-tools)".into()
    } else {
        format!("Rust's target {musl} (rustup target add {musl})")
    };
    println!("static: linked against glibc, as {missing} is not installed");
    Ok((format!("{arch}-unknown-linux-gnu"), "glibc"))
}

fn small_enough(path: &Path) -> TaskResult {
    let size = size_of(path)?;
    println!("the program: {size} bytes, at most {LARGEST_PROGRAM} are allowed");
    if size <= LARGEST_PROGRAM {
        return Ok(());
    }
    Err(format!("the program has {size} bytes, more than {LARGEST_PROGRAM}: see RELEASING.md"))
}

/// An error where the program asks for a dynamic linker.
fn linked_statically(path: &Path) -> TaskResult {
    let headers =
        run::quiet(Command::new("readelf").args(["--wide", "--program-headers"]).arg(path))?;
    if headers.contains("INTERP") {
        return Err(format!("{} is linked dynamically", path.display()));
    }
    println!("the static program: {} bytes", size_of(path)?);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn the_static_program_lacks_only_plugins() {
        let read = |name: &str| fs::read_to_string(run::workspace().join(name)).unwrap();
        let manifest = read("crates/programs/cli/Cargo.toml");
        let line = manifest.lines().find_map(|line| line.strip_prefix("default = [")).unwrap();
        let names = line.trim_end_matches(']').split(", ").map(|name| name.trim_matches('"'));
        let mut names: Vec<_> =
            names.filter(|name| !["nbdkit-plugins", "vddk"].contains(name)).collect();
        names.push("vendored-openssl");
        let expected = format!("--no-default-features --features {}", names.join(","));
        assert_eq!(Flavour::Static.features().join(" "), expected);
        assert!(read("Containerfile").contains(&expected));
    }
}
