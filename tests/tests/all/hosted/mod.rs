//! nbdkit's plugins as Debian compiles them, in `blockhaul serve` among the peers: what their tests share.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use blockhaul_testkit::tools::{PeerProgram, ScratchDir, SkipReason, among_peers, skip_or_fail};
use blockhaul_tests::{LIMIT, assert_same, bounded, distinct, lossy, program, text};

/// Where plugins lie among the peers.
pub const FOLDER: &str = "usr/lib/x86_64-linux-gnu/nbdkit/plugins";

/// The root of the unpacked peers.
pub fn root() -> Option<PathBuf> {
    let nbdkit = PeerProgram::require("nbdkit")?;
    let root = nbdkit.program().parent()?.parent()?.join("root");
    root.is_dir().then_some(root)
}

/// Whether a plugin is unpacked; a test that needs it is skipped else.
pub fn has(plugin: &str) -> bool {
    let Some(root) = root() else { return false };
    let folder = root.join(FOLDER);
    let there = folder.join(format!("nbdkit-{plugin}-plugin.so")).exists()
        || folder.join(format!("nbdkit-{plugin}-plugin")).exists();
    if !there {
        skip_or_fail(&SkipReason::new(format!("the peers have no plugin {plugin}")));
    }
    there
}

/// The program under test, among the peers.
pub fn blockhaul(args: &[&str]) -> Command {
    let mut command = among_peers(program()).unwrap();
    command.args(args);
    command
}

/// Serves a plugin for the time that a script runs, which has to succeed. Gives all that was printed.
#[track_caller]
pub fn serving(plugin: &str, options: &[&str], script: &str) -> String {
    let output = serve_and_run(plugin, options, script);
    let said = lossy(&output.stderr);
    assert!(output.status.success(), "{plugin}: {}: {said}", output.status);
    assert!(!said.contains("has not ended"), "{said}");
    lossy(&output.stdout) + &said
}

/// The same, whatever becomes of the script.
#[track_caller]
pub fn serve_and_run(plugin: &str, options: &[&str], script: &str) -> Output {
    bounded(&mut serving_command(plugin, options, script), LIMIT)
}

/// The command for it.
pub fn serving_command(plugin: &str, options: &[&str], script: &str) -> Command {
    let device = format!("nbdkit:{plugin}");
    let script = format!("set -e; {script}");
    let mut args = vec!["serve", &device];
    args.extend_from_slice(options);
    args.extend_from_slice(&["--run", &script]);
    blockhaul(&args)
}

/// A file with contents that show where they are from.
pub fn contents(path: &Path, len: usize) -> PathBuf {
    fs::write(path, distinct(len as u64)).unwrap();
    path.to_path_buf()
}

/// Writes a file to a plugin's disk, and reads it back over another connection.
#[track_caller]
pub fn write_and_read(plugin: &str, len: usize, scratch: &ScratchDir) {
    let input = contents(&scratch.file("in"), len);
    let out = scratch.file("out");
    let input_text = text(&input);
    let out_text = text(&out);
    let script = format!("nbdcopy --flush {input_text} \"$uri\"; nbdcopy \"$uri\" {out_text}");
    serving(plugin, &[], &script);
    assert_same(&input, &out, plugin);
}
