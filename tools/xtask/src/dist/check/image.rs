//! The container image, run as a container engine runs it: as process 1, as its user, without
//! privileges, in its root file system.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use super::root::RootFileSystem;
use super::{EXPORT_SIZE, server, unpack};
use crate::dist::build::{self, Flavour};
use crate::dist::sums;
use crate::{TaskResult, run};

pub fn check(image: &Path) -> TaskResult {
    let layout = RootFileSystem::empty("image-layout")?;
    unpack(image, &layout.path("/"))?;
    let root = RootFileSystem::empty("image")?;
    let config = unpack_layers(&layout, &root)?;
    let user = config["config"]["User"].as_str().unwrap_or_default();
    let entry = config["config"]["Entrypoint"][0].as_str().unwrap_or_default();
    // Engines make it.
    fs::create_dir(root.path("/proc")).map_err(|error| format!("cannot make /proc: {error}"))?;
    let option = format!("--userspec={user}");
    let mut command = root.command(&[&option]);
    command.args([entry, "serve", "-U", "/tmp/s", "sample:64M"]);
    let dir = root.path("/tmp");
    server::with(command, &dir.join("s"), || use_it(&dir))?;
    layout.remove()?;
    root.remove()
}

/// Unpacks the layers, and gives the configuration. Digests are those that the index leads to.
fn unpack_layers(layout: &RootFileSystem, root: &RootFileSystem) -> Result<Value, String> {
    let read = |path: &str| -> Result<Value, String> {
        let text = fs::read_to_string(layout.path(path))
            .map_err(|error| format!("cannot read {path} of the image: {error}"))?;
        serde_json::from_str(&text).map_err(|error| format!("{path} of the image: {error}"))
    };
    let blob = |value: &Value| -> Result<String, String> {
        let digest = value["digest"].as_str().unwrap_or_default();
        let sum = digest.strip_prefix("sha256:").ok_or("a digest is not of SHA-256")?;
        let path = format!("blobs/sha256/{sum}");
        let found = sums::of(&layout.path(&path))?;
        if found == sum { Ok(path) } else { Err(format!("{path} has the digest {found}")) }
    };
    let index = read("index.json")?;
    let manifest = read(&blob(&index["manifests"][0])?)?;
    for layer in manifest["layers"].as_array().into_iter().flatten() {
        unpack(&layout.path(&blob(layer)?), &root.path("/"))?;
    }
    read(&blob(&manifest["config"])?)
}

/// Copies what the image serves, with verification, and shows information about it. The socket is
/// named relative to its directory, as names of sockets are short.
fn use_it(dir: &Path) -> TaskResult {
    let program = build::program(Flavour::Shared)?.path;
    let ours = |args: &[&str]| run::quiet(Command::new(&program).current_dir(dir).args(args));
    let uri = "nbd+unix:///?socket=s";
    ours(&["copy", "--verify", uri, "disk.raw"])?;
    let text = ours(&["info", uri])?;
    if text.contains(EXPORT_SIZE) { Ok(()) } else { Err(format!("info printed: {text}")) }
}
