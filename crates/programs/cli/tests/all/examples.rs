//! The examples in the help of devices and layers, each run unchanged.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use blockhaul_testkit::tools::{self, ScratchDir, SkipReason, text};

const LIMIT: Duration = Duration::from_secs(120);
const OURS: &str = env!("CARGO_BIN_EXE_blockhaul");

/// Programs that examples use and that are not everywhere, by a word of the example.
const NEEDED: [(&str, &[&str]); 2] = [("gzip", &["gzip"]), ("xz", &["xz"])];

#[test]
fn examples_of_layers_run() {
    let layers = blockhaul_layers::all()
        .into_iter()
        .chain(blockhaul_nbdkit_devices::layers::all())
        .map(|layer| (layer.name, layer.example));
    let gates =
        blockhaul_nbdkit_devices::gates::all().into_iter().map(|gate| (gate.name, gate.example));
    run_all(layers.chain(gates));
}

#[test]
fn examples_of_devices_run() {
    let mut devices = blockhaul_backends::all();
    devices.extend(blockhaul_nbdkit_devices::devices::all());
    devices.extend(blockhaul_formats::all());
    devices.extend(blockhaul_client::all(blockhaul_client::ConnectOptions::default()));
    devices.extend(blockhaul_cabi::all());
    devices.extend(blockhaul_script::all());
    devices.extend(blockhaul_python::all());
    // What brackets stand for has its example with serve and copy.
    let devices = devices.iter().map(|device| (device.schemes()[0], device.example()));
    run_all(devices.filter(|(name, _)| *name != "command"));
}

fn run_all(examples: impl Iterator<Item = (&'static str, &'static str)>) {
    let mut failed = BTreeMap::new();
    let mut count = 0;
    for (name, example) in examples {
        assert!(!example.trim().is_empty(), "{name} has no example");
        assert!(example.contains(name), "the example of {name} does not show it");
        let longest = example.lines().map(|line| line.chars().count()).max();
        assert!(longest <= Some(92), "the example of {name} has long lines: {longest:?}");
        count += 1;
        if let Err(why) = run(name, example) {
            failed.insert(name, why);
        }
    }
    assert!(count > 20 && failed.is_empty(), "{count}: {failed:#?}");
}

/// Runs an example in an empty directory.
fn run(name: &str, example: &str) -> Result<(), String> {
    let search = search_path();
    for (word, programs) in NEEDED {
        let there =
            |program: &&str| std::env::split_paths(&search).any(|d| d.join(program).exists());
        if example.contains(word) && !programs.iter().any(there) {
            tools::skip(format!("the example of {name}: none of {programs:?} is installed"));
            return Ok(());
        }
    }
    let mut shell = Command::new("sh");
    if name == "nbdkit" || example.contains("qemu-img") {
        match tools::among_peers("sh") {
            Ok(among) => shell = among,
            Err(reason) => {
                tools::skip_or_fail(&SkipReason::new(format!("the example of {name}: {reason}")));
                return Ok(());
            }
        }
    }
    let scratch = ScratchDir::new().map_err(|error| error.to_string())?;
    // The program by the name that examples give it.
    let script = format!("PATH={}:$PATH\nset -e\n{example}", bin(&scratch).display());
    shell.args(["-c", &script]).current_dir(scratch.path()).env("PATH", &search);
    let output = tools::output(shell.stdin(Stdio::null()), LIMIT)?;
    if output.status.success() {
        Ok(())
    } else {
        Err(format!("{:?}: {}", output.status, text(&output.stderr)))
    }
}

/// A directory with a link to the tested program.
fn bin(scratch: &ScratchDir) -> PathBuf {
    let bin = scratch.file(".bin");
    std::fs::create_dir(&bin).unwrap();
    std::os::unix::fs::symlink(Path::new(OURS), bin.join("blockhaul")).unwrap();
    bin
}

/// Where programs are searched, those of administrators included.
fn search_path() -> OsString {
    let mut path = std::env::var_os("PATH").unwrap_or_default();
    path.push(":/usr/sbin:/sbin");
    path
}
