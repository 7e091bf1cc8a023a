//! Helpers for tests that compare layers with the peers' filters over the same file.
#![allow(dead_code, clippy::unwrap_used)]

use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use blockhaul_block::Result;
use blockhaul_catalog::{DeviceSpec, Intent, Registry, Stack};
use blockhaul_testkit::conform::{self, ConformOptions};
use blockhaul_testkit::tools::{among_peers, output};

/// A file with layers over it, the last one outermost. On a worker.
pub async fn open(path: &Path, layers: &[&str], intent: Intent) -> Result<Stack> {
    let registry = Registry {
        backends: crate::common::backends(),
        layers: crate::common::kinds(),
        path: blockhaul_backends::PATH_SCHEME,
        ..Registry::default()
    };
    let layers = layers.iter().map(|text| registry.layer(text)).collect::<Result<_, _>>()?;
    registry.open(&DeviceSpec::parse(OsStr::new(path))?, layers, intent).await
}

/// Runs the conformance suite over a file with a layer.
pub fn conform(path: &Path, layer: &'static str, intent: Intent) {
    let path = path.to_path_buf();
    let reason = "a file system calls space that it has only reserved a hole";
    let options = ConformOptions { rounds: 1, steps: 40, ..ConformOptions::default() };
    let options = options.without("no_hole_keeps_the_range_allocated", reason);
    conform::check(layer, options, move || {
        let path = path.clone();
        async move { open(&path, &[layer], intent).await }
    });
}

/// The contents that nbdkit shows with these arguments; `None`: there are no peers here.
pub fn through_nbdkit(words: &[&str]) -> Option<Vec<u8>> {
    let mut command = match among_peers("nbdkit") {
        Ok(command) => command,
        Err(reason) => {
            blockhaul_testkit::tools::skip_or_fail(&reason);
            return None;
        }
    };
    command.args(["--foreground", "--readonly", "--unix=-"]).args(words);
    command.args(["--run", "nbdcopy \"$uri\" -"]);
    Some(run(&mut command))
}

/// What a command prints; it must succeed.
pub fn run(command: &mut Command) -> Vec<u8> {
    let output = output(command, Duration::from_secs(60)).unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {} {said}", output.status);
    output.stdout
}

/// Bytes that compress to about half, with runs and without, and some zeroes.
pub fn content(len: usize) -> Vec<u8> {
    let mut rng = blockhaul_testkit::rng::Rng::new(7);
    let mut bytes = Vec::with_capacity(len + 10_000);
    while bytes.len() < len {
        let run = 1 + rng.below(9000) as usize;
        match rng.below(4) {
            0 => bytes.resize(bytes.len() + run, 0),
            1 => bytes.extend((0..run).map(|at| (at / 3) as u8)),
            _ => bytes.extend((0..run / 2).map(|_| rng.below(256) as u8)),
        }
    }
    bytes.truncate(len);
    bytes
}
