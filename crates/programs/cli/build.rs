//! Exports the functions that plugins call (crate `cabi`) from the program, and records the commit
//! for `--version`.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    for pattern in ["nbdkit_*", "blockhaul_*"] {
        println!("cargo:rustc-link-arg-bins=-Wl,--export-dynamic-symbol={pattern}");
    }
    // Only a checkout of its own: a package may be built inside of another one.
    let log = Path::new("../../../.git/logs/HEAD");
    if log.exists() {
        println!("cargo:rerun-if-changed={}", log.display());
    }
    let commit = Command::new("git").args(["rev-parse", "--short=12", "HEAD"]).output();
    let commit = commit.ok().filter(|output| output.status.success() && log.exists());
    let commit = commit.and_then(|output| String::from_utf8(output.stdout).ok());
    println!("cargo:rustc-env=BLOCKHAUL_COMMIT={}", commit.as_deref().unwrap_or("").trim());
}
