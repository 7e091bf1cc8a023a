//! A crate of another workspace depends on the library by its path.

use std::fs;
use std::path::Path;
use std::process::Command;

/// Maximum number of lines of the program.
const LINES: usize = 40;

/// A program that serves a device and copies to it.
const PROGRAM: &str = include_str!("outside_program.rs");

#[test]
fn a_crate_elsewhere_serves_a_device_and_copies_to_it() {
    assert!(PROGRAM.lines().count() < LINES);
    if std::env::var_os("BLOCKHAUL_LONG").is_none() {
        println!("skipped: it compiles the library once more; BLOCKHAUL_LONG=1 runs it");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let library = Path::new(env!("CARGO_MANIFEST_DIR"));
    let workspace = library.ancestors().nth(2).unwrap();
    let manifest = format!(
        "[package]\nname = \"outside\"\nversion = \"0.0.0\"\nedition = \"2024\"\n\
         [dependencies]\nblockhaul = {{ path = {library:?} }}\n\
         [profile.dev]\ndebug = false\n"
    );
    fs::write(folder.path().join("Cargo.toml"), manifest).unwrap();
    fs::create_dir(folder.path().join("src")).unwrap();
    fs::write(folder.path().join("src/main.rs"), PROGRAM).unwrap();
    // The same versions, so that nothing is downloaded.
    fs::copy(workspace.join("Cargo.lock"), folder.path().join("Cargo.lock")).unwrap();
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["run", "--offline", "--quiet"]).current_dir(&folder);
    // Kept for the next run.
    cargo.env("CARGO_TARGET_DIR", Path::new(env!("CARGO_TARGET_TMPDIR")).join("outside"));
    let output = cargo.output().unwrap();
    let (text, errors) = (output.stdout, String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{errors}");
    assert_eq!(String::from_utf8(text).unwrap(), "copied 1048576 bytes\n", "{errors}");
}
