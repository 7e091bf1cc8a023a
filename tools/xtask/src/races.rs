//! `cargo xtask races`: code shared by several threads, under ThreadSanitizer.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::{TaskResult, run};

pub const HELP: &str = "\
cargo xtask races

Runs the tests of races, a million rounds each, under ThreadSanitizer: the table of requests that
asynchronous plugins answer, and the tickets by which answers reach their workers. Needs a nightly
toolchain with rust-src (rustup component add rust-src --toolchain nightly): the standard library is
built with the sanitizer, too.
";

/// Files that need nothing but the standard library, each a module of the program that is built.
const MODULES: &[(&str, &str)] =
    &[("table", "crates/devices/cabi/src/table.rs"), ("sync", "crates/ground/io/src/sync.rs")];

/// The only target that is tried.
const TARGET: &str = "x86_64-unknown-linux-gnu";

pub fn main(args: &[String]) -> TaskResult {
    run::no_more(args)?;
    let dir = run::target().join("races");
    let mut source = String::from("#![allow(dead_code, unreachable_pub, missing_docs)]\n");
    for (name, path) in MODULES {
        let path = run::workspace().join(path);
        source += &format!("#[path = {:?}]\nmod {name};\n", path.display().to_string());
    }
    let manifest = "[package]\nname = \"races\"\nversion = \"0.0.0\"\nedition = \"2024\"\n\
                    [lib]\npath = \"lib.rs\"\n[workspace]\n";
    write(&dir, "Cargo.toml", manifest)?;
    write(&dir, "lib.rs", &source)?;
    let mut command = Command::new("rustup");
    command.args([
        "run",
        "nightly",
        "cargo",
        "test",
        "--release",
        "-Zbuild-std",
        "--target",
        TARGET,
        "--lib",
    ]);
    command.current_dir(&dir);
    command.env("RUSTFLAGS", "-Zsanitizer=thread").env("CARGO_TARGET_DIR", dir.join("target"));
    command.env("TSAN_OPTIONS", "halt_on_error=1").env("BLOCKHAUL_LONG", "1");
    // The caller's own toolchain must not reach the other one.
    command.env_remove("RUSTUP_TOOLCHAIN").env_remove("CARGO").env_remove("RUSTC");
    run::show(&mut command)
}

fn write(dir: &Path, name: &str, text: &str) -> TaskResult {
    let failed = |error| format!("cannot write {}: {error}", dir.join(name).display());
    fs::create_dir_all(dir).map_err(failed)?;
    fs::write(dir.join(name), text).map_err(failed)
}
