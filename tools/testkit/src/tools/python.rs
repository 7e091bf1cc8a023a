//! Python interpreters, and programs of PyPI and npm, that tests need.

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
    let found = ours("python-tools/bin/python3")
        .into_iter()
        .chain([PathBuf::from("python3")])
        .find(|python| {
            let imported = Command::new(python).args(["-c", &format!("import {module}")]).output();
            imported.is_ok_and(|output| output.status.success())
        });
    if found.is_none() {
        skip(format!("python3 has no module {module}"));
    }
    found
}

/// A program of a package of PyPI: that of `cargo xtask test`, or one in the search path. Where there is none,
/// says so and gives None, so that the test can return.
///
/// # Panics
/// As [`skip`].
#[track_caller]
pub fn python_program(name: &str) -> Option<PathBuf> {
    program(name, &format!("python-tools/bin/{name}"), "PyPI")
}

/// A program of a package of npm: that of `cargo xtask test`, or one in the search path. Where there is none, says so
/// and gives None, so that the test can return.
///
/// # Panics
/// As [`skip`].
#[track_caller]
pub fn npm_program(name: &str) -> Option<PathBuf> {
    program(name, &format!("npm-tools/node_modules/.bin/{name}"), "npm")
}

#[track_caller]
fn program(name: &str, file: &str, registry: &str) -> Option<PathBuf> {
    let search = std::env::var_os("PATH").unwrap_or_default();
    let others = std::env::split_paths(&search).map(|dir| dir.join(name));
    let own = ours(file);
    let found = own.into_iter().chain(others).find(|program| program.is_file());
    if found.is_none() {
        skip(format!("{name} is not installed, which {registry} has"));
    }
    found
}

/// Where a file of the tools may be: a test program lies below the target directory, wherever that is.
fn ours(file: &str) -> Vec<PathBuf> {
    let exe = std::env::current_exe().unwrap_or_default();
    exe.ancestors().skip(1).map(|dir| dir.join(file)).collect()
}
