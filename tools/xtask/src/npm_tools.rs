//! What tests need of npm's registry, below the target directory: a server of Azure's blobs.

use std::process::Command;

use crate::{TaskResult, run};

/// The package, with the version that tests were written with.
const PACKAGE: &str = "azurite@^3.35";
/// Its program.
const PROGRAM: &str = "node_modules/.bin/azurite-blob";

/// Installs the package into `target/npm-tools`, unless it is there.
pub fn ensure() -> TaskResult {
    let folder = run::target().join("npm-tools");
    if folder.join(PROGRAM).exists() {
        return Ok(());
    }
    if !run::have("npm") {
        return Err("npm is not installed".to_owned());
    }
    println!("installing {PACKAGE} into {}", folder.display());
    let mut npm = Command::new("npm");
    npm.args(["install", "--no-audit", "--no-fund", "--loglevel=error", "--prefix"]);
    run::quiet(npm.arg(&folder).arg(PACKAGE)).map(drop)
}
