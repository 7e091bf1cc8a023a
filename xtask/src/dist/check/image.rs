//! The container image, run as a container engine runs it: as process 1, as its user, without
//! privileges, in its root file system.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::root::Root;
use super::{Flavour, build, unpack};
use crate::dist::sums;
use crate::{Outcome, run};

/// Longer than a server takes to start or to stop.
const PATIENCE: Duration = Duration::from_secs(30);

pub fn check(image: &Path) -> Outcome {
    let layout = Root::empty("image-layout")?;
    unpack(image, &layout.path("/"))?;
    let root = Root::empty("image")?;
    let config = unpack_layers(&layout, &root)?;
    let user = config["config"]["User"].as_str().unwrap_or_default();
    let entry = config["config"]["Entrypoint"][0].as_str().unwrap_or_default();
    // Engines make it.
    fs::create_dir(root.path("/proc")).map_err(|error| format!("cannot make /proc: {error}"))?;
    let option = format!("--userspec={user}");
    let mut command = root.command(&[&option]);
    let mut server = command
        .args([entry, "serve", "-U", "/tmp/s", "sample:64M"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .map_err(|error| format!("cannot start the image: {error}"))?;
    let used = use_it(&root.path("/tmp"));
    let stopped = stop(&mut server);
    used.and(stopped)?;
    layout.remove()?;
    root.remove()
}

/// Unpacks the layers, and gives the configuration. Digests are those that the index leads to.
fn unpack_layers(layout: &Root, root: &Root) -> Result<Value, String> {
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
fn use_it(dir: &Path) -> Outcome {
    let begun = Instant::now();
    while !dir.join("s").exists() {
        if begun.elapsed() > PATIENCE {
            return Err("the image does not listen".into());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let program = build::program(Flavour::Shared)?.path;
    let ours = |args: &[&str]| run::quiet(Command::new(&program).current_dir(dir).args(args));
    let uri = "nbd+unix:///?socket=s";
    ours(&["copy", "--verify", uri, "disk.raw"])?;
    let text = ours(&["info", uri])?;
    if text.contains("export-size: 67108864 ") {
        Ok(())
    } else {
        Err(format!("info printed: {text}"))
    }
}

/// Asks process 1 of the image to end, as `podman stop` does, and waits for it.
fn stop(server: &mut Child) -> Outcome {
    let outer = server.id();
    let children = fs::read_to_string(format!("/proc/{outer}/task/{outer}/children"))
        .map_err(|error| format!("cannot find the image's process: {error}"))?;
    let inner = children.split_whitespace().next().and_then(|text| text.parse().ok());
    let inner = inner.and_then(Pid::from_raw).ok_or("the image has ended before it was stopped")?;
    kill_process(inner, Signal::TERM)
        .map_err(|error| format!("cannot stop the image's process: {error}"))?;
    let begun = Instant::now();
    loop {
        match server.try_wait().map_err(|error| format!("cannot wait for the image: {error}"))? {
            Some(status) if status.success() => return Ok(()),
            Some(status) => return Err(format!("the image ended with {status}")),
            None if begun.elapsed() > PATIENCE => {
                let _ = server.kill();
                return Err("the image did not end within 30 s of SIGTERM".into());
            }
            None => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}
