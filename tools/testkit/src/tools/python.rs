//! Python interpreters with packages that tests need.

use std::path::PathBuf;
use std::process::Command;

use super::skip::skip;

/// An interpreter that can import a module of PyPI: that of `cargo xtask test`, or the machine's own.
/// Where there is none, says so and gives None, so that the test can return: not every machine
/// reaches PyPI.
///
/// # Panics
/// As [`skip`].
#[track_caller]
pub fn python_with(module: &str) -> Option<PathBuf> {
    // A test program lies below the target directory, wherever that is.
    let exe = std::env::current_exe().unwrap_or_default();
    let ours = exe.ancestors().skip(1).map(|dir| dir.join("python-tools/bin/python3"));
    let found = ours.chain([PathBuf::from("python3")]).find(|python| {
        let imported = Command::new(python).args(["-c", &format!("import {module}")]).output();
        imported.is_ok_and(|output| output.status.success())
    });
    if found.is_none() {
        skip(format!("python3 has no module {module}"));
    }
    found
}
