//! Images made by QEMU's tools, and their disks read by ours.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use blockhaul_block::{ContextSet, Device, DeviceExt as _, Extents, Facts, Result};
use blockhaul_catalog::{DeviceSpec, Intent, Registry, Stack};
use blockhaul_io::{Runtime, RuntimeConfig};
use blockhaul_testkit::tools::{self, PeerProgram, ScratchDir};

/// Longest read at once.
const PIECE: u64 = 3 << 20;

pub fn registry() -> Registry {
    let mut backends = blockhaul_backends::all();
    backends.extend(blockhaul_formats::all());
    let registry =
        Registry { backends, path: blockhaul_backends::PATH_SCHEME, ..Registry::default() };
    // As the commands that change images.
    registry.for_command()
}

pub async fn open(spec: &str, intent: Intent) -> Result<Stack> {
    let spec = DeviceSpec::parse(OsStr::new(spec)).unwrap();
    registry().open(&spec, Vec::new(), intent).await
}

/// Runs with a device on two workers.
pub fn with<T, F>(spec: &str, work: impl FnOnce(Arc<dyn Device>) -> F + Send + 'static) -> T
where
    T: Send + 'static,
    F: Future<Output = T> + 'static,
{
    try_with(spec, work).unwrap_or_else(|error| panic!("{error}"))
}

pub fn try_with<T, F>(
    spec: &str,
    work: impl FnOnce(Arc<dyn Device>) -> F + Send + 'static,
) -> Result<T>
where
    T: Send + 'static,
    F: Future<Output = T> + 'static,
{
    let runtime =
        Runtime::start(&RuntimeConfig { workers: 2, ..RuntimeConfig::default() }).unwrap();
    let spec = spec.to_string();
    runtime.block_on(move || async move {
        let stack = open(&spec, Intent::READ).await?;
        Ok(work(stack.device().clone()).await)
    })
}

/// The same with a device that is written; all of it is in the image when this returns.
pub fn write_with<T, F>(
    spec: &str,
    work: impl FnOnce(Arc<dyn Device>) -> F + Send + 'static,
) -> Result<T>
where
    T: Send + 'static,
    F: Future<Output = T> + 'static,
{
    let runtime =
        Runtime::start(&RuntimeConfig { workers: 2, ..RuntimeConfig::default() }).unwrap();
    let spec = spec.to_string();
    runtime.block_on(move || async move {
        let stack = open(&spec, Intent::WRITE).await?;
        Ok(work(stack.device().clone()).await)
    })
}

/// All bytes of a device.
pub async fn content(device: &Arc<dyn Device>) -> Result<Vec<u8>> {
    let size = device.facts().size;
    let mut bytes = Vec::new();
    let mut at = 0;
    while at < size {
        let len = PIECE.min(size - at).min(device.facts().block.maximum.into());
        bytes.extend_from_slice(device.read(at, len as usize).await?.bytes());
        at += len;
    }
    Ok(bytes)
}

/// All extents of a device in a context.
pub async fn extents(device: &Arc<dyn Device>, contexts: ContextSet) -> Result<Extents> {
    let size = device.facts().size;
    let mut all = Extents::new();
    while all.total() < size {
        let at = all.total();
        let lists = device.extents(at, size - at, contexts).await?;
        lists[0].runs().iter().for_each(|run| all.push(run.len, run.state));
    }
    Ok(all)
}

pub fn facts(spec: &str) -> Facts {
    with(spec, |device| async move { Facts::clone(&device.facts()) })
}

pub fn read_all(spec: &str) -> Result<Vec<u8>> {
    try_with(spec, |device| async move { content(&device).await })?
}

/// The text of the error that opening or reading a device ends with.
pub fn error(spec: &str) -> String {
    match read_all(spec) {
        Ok(bytes) => panic!("{spec}: {} bytes were read", bytes.len()),
        Err(error) => error.to_string(),
    }
}

/// QEMU's tools and a directory for images.
pub struct Qemu {
    img: PeerProgram,
    io: PeerProgram,
    pub scratch: ScratchDir,
}

impl Qemu {
    /// The tools, or none: the test is then skipped.
    pub fn find() -> Option<Qemu> {
        let img = PeerProgram::require("qemu-img")?;
        let io = PeerProgram::require("qemu-io")?;
        Some(Qemu { img, io, scratch: ScratchDir::new().unwrap() })
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.scratch.file(name)
    }

    /// The description of an image in the directory, with options.
    pub fn spec(&self, name: &str, options: &str) -> String {
        format!("qcow2:{}?{options}", self.file(name).display())
    }

    /// Runs qemu-img in the directory; its standard output.
    pub fn img(&self, args: &[&str]) -> String {
        let (status, text) = self.run(self.img.command(), args);
        assert!(status, "qemu-img {args:?}: {text}");
        text
    }

    /// What qemu-img says in the directory, or its error.
    pub fn try_img(&self, args: &[&str]) -> std::result::Result<String, String> {
        let (status, text) = self.run(self.img.command(), args);
        if status { Ok(text) } else { Err(text) }
    }

    /// Makes an image of QEMU.
    pub fn create(&self, name: &str, options: &str, size: u64) {
        self.img(&["create", "-q", "-f", "qcow2", "-o", options, name, &size.to_string()]);
    }

    /// Runs commands of qemu-io on a file.
    pub fn io(&self, format: &str, name: &str, commands: &[String]) {
        let mut args = vec!["-f", format];
        commands.iter().for_each(|command| args.extend(["-c", command]));
        args.push(name);
        let (status, text) = self.run(self.io.command(), &args);
        assert!(status && !text.contains("failed"), "{args:?}: {text}");
    }

    /// Panics unless an image is in order and has no cluster that nothing refers to.
    pub fn check(&self, name: &str, label: &str) {
        let (fine, text) = self.run(self.img.command(), &["check", "-f", "qcow2", name]);
        assert!(fine && text.contains("No errors"), "{label}: qemu-img check: {text}");
    }

    /// Errors and lost clusters that qemu-img check finds.
    pub fn faults(&self, name: &str) -> (u64, u64) {
        let (_, text) =
            self.run(self.img.command(), &["check", "-f", "qcow2", "--output=json", name]);
        let end = text.rfind('}').map_or(0, |end| end + 1);
        let Ok(found) = serde_json::from_str::<serde_json::Value>(&text[..end]) else {
            // It refuses the image.
            return (1, 0);
        };
        let number = |name: &str| found[name].as_u64().unwrap_or(0);
        (number("corruptions") + number("check-errors"), number("leaks"))
    }

    /// The disk in an image, as qemu-img reads it.
    pub fn raw(&self, name: &str) -> Vec<u8> {
        self.img(&["convert", "-f", "qcow2", "-O", "raw", name, "converted.raw"]);
        std::fs::read(self.file("converted.raw")).unwrap()
    }

    fn run(&self, mut command: Command, args: &[&str]) -> (bool, String) {
        command.args(args).current_dir(self.scratch.path());
        let output = tools::output(&mut command, Duration::from_secs(60)).unwrap();
        let text = tools::text(&output.stdout);
        if output.status.success() {
            (true, text)
        } else {
            (false, text + &tools::text(&output.stderr))
        }
    }
}

pub fn write(path: &Path, bytes: &[u8]) {
    std::fs::write(path, bytes).unwrap();
}
