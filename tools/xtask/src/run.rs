//! Runs other programs, and finds the workspace and its target directory.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::TaskResult;

/// The root of the workspace.
pub fn workspace() -> PathBuf {
    // Cargo sets the variable when it runs us; a binary started by hand knows where it was built.
    let manifest =
        std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    let xtask = PathBuf::from(manifest);
    xtask.ancestors().nth(2).map(Path::to_path_buf).unwrap_or(xtask)
}

/// The target directory that cargo uses for this workspace.
pub fn target() -> PathBuf {
    // Cargo marks the target directories that it makes, wherever its configuration puts them.
    let marked = std::env::current_exe().ok().and_then(|exe| {
        exe.ancestors().find(|dir| dir.join("CACHEDIR.TAG").is_file()).map(Path::to_path_buf)
    });
    marked
        .or_else(|| std::env::var_os("CARGO_TARGET_DIR").map(PathBuf::from))
        .unwrap_or_else(|| workspace().join("target"))
}

/// True in continuous integration: what is missing fails instead of being skipped, and no name of a
/// host or path of this machine is printed.
pub fn ci() -> bool {
    std::env::var_os("CI").is_some_and(|value| value == "true" || value == "1")
}

/// An error when arguments are left that the task does not know.
pub fn no_more(args: &[String]) -> TaskResult {
    match args.first() {
        None => Ok(()),
        Some(arg) => Err(format!("unknown argument '{arg}' (see --help)")),
    }
}

/// Cargo, in the workspace's root; quiet about what it compiles in continuous integration, as those
/// lines name hosts and paths of the machine.
pub fn cargo(subcommand: &str) -> Command {
    let mut command = loud_cargo(subcommand);
    if ci() {
        command.env("CARGO_TERM_QUIET", "true");
    }
    command
}

/// Cargo, in the workspace's root, with its ordinary output. Test programs that a quiet cargo runs
/// would not name their tests.
pub fn loud_cargo(subcommand: &str) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(workspace()).arg(subcommand).env_remove("CARGO_TERM_QUIET");
    // These are about xtask itself and mean nothing to the cargo that it starts.
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST_") {
            command.env_remove(&name);
        }
    }
    command
}

/// A build of the named programs. All packages are selected, so that dependencies have the features that a
/// build of the whole workspace gives them, and are compiled once.
pub fn build(programs: &[&str], release: bool) -> Command {
    let mut command = cargo("build");
    command.arg("--workspace").args(release.then_some("--release"));
    command.args(programs.iter().map(|program| format!("--bin={program}")));
    command
}

/// Prints the command and runs it with our input and output.
pub fn show(command: &mut Command) -> TaskResult {
    announce(command);
    wait_for(command)
}

/// Runs the command without printing it.
fn wait_for(command: &mut Command) -> TaskResult {
    let mut child = start(command)?;
    wait(command, &mut child)
}

/// Prints the command that is about to run.
pub fn announce(command: &Command) {
    println!("+ {}", line_of(command));
}

/// Starts the command.
pub fn start(command: &mut Command) -> Result<Child, String> {
    command.spawn().map_err(|error| cannot_start(command, &error))
}

/// Waits until the process of the command has ended.
pub fn wait(command: &Command, child: &mut Child) -> TaskResult {
    let status = child.wait().map_err(|error| format!("{}: {error}", program_of(command)))?;
    if status.success() { Ok(()) } else { Err(format!("`{}` failed: {status}", line_of(command))) }
}

/// Runs the command silently; gives its standard output, or an error with its last words.
pub fn quiet(command: &mut Command) -> Result<String, String> {
    let output =
        command.stdin(Stdio::null()).output().map_err(|error| cannot_start(command, &error))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let mut words = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    if words.is_empty() {
        words = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    }
    Err(format!("`{}` failed: {}: {words}", program_of(command), output.status))
}

/// Whether a program of this name is in the search path.
pub fn have(program: &str) -> bool {
    std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|dir| dir.join(program).is_file()))
}

fn cannot_start(command: &Command, error: &std::io::Error) -> String {
    format!("cannot start {}: {error}", program_of(command))
}

fn program_of(command: &Command) -> String {
    let path = Path::new(command.get_program());
    path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
}

fn line_of(command: &Command) -> String {
    let args = command.get_args().map(OsStr::to_string_lossy);
    std::iter::once(program_of(command).into()).chain(args).collect::<Vec<_>>().join(" ")
}
