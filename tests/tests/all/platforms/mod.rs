//! Real platforms, each in a Debian root of its own. `cargo xtask platforms` makes the roots, runs these
//! tests and prints a table of what they report; without it they are skipped.

mod guest;
mod incus;
mod kernel_nbd;
mod libvirt;
mod newest_peers;
mod systemd;
mod timer;
mod virt_v2v;
mod virtnbdbackup;

use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;

use blockhaul_testkit::tools::{self, ScratchDir, SkipReason};
use blockhaul_tests::{bounded, lossy, program};

/// Longer than any command takes with an emulated guest on a busy machine.
const PATIENCE: Duration = Duration::from_secs(600);

/// A Debian root.
pub struct Root {
    dir: PathBuf,
}

impl Root {
    /// The root of this name, with the program under test as `/usr/local/bin/blockhaul`. `None` without
    /// `cargo xtask platforms`.
    pub fn find(name: &str) -> Option<Root> {
        let Some(roots) = std::env::var_os("BLOCKHAUL_PLATFORMS") else {
            let wanted = SkipReason::new(format!(
                "needs a root with {name}; see `cargo xtask platforms --help`"
            ));
            tools::skip(wanted);
            return None;
        };
        let root = Root { dir: Path::new(&roots).join(name) };
        assert!(root.dir.join("etc/debian_version").is_file(), "{} is no root", root.dir.display());
        let bin = root.path("/usr/local/bin/blockhaul");
        // A program that still runs cannot be written.
        let _ = std::fs::remove_file(&bin);
        std::fs::copy(program(), bin).unwrap();
        Some(root)
    }

    /// A file of the root, as this machine names it.
    pub fn path(&self, path: &str) -> PathBuf {
        self.dir.join(path.trim_start_matches('/'))
    }

    /// A command of the root.
    pub fn command(&self, program: &str) -> Command {
        self.command_with_path("/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", program)
    }

    /// A command of the root with a search path of its own.
    pub fn command_with_path(&self, path: &str, program: &str) -> Command {
        // `setpriv` ends it with the thread of the test.
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "--", "chroot"]).arg(&self.dir);
        command.args(["/usr/bin/env", "-i", "LANG=C.UTF-8", "HOME=/root"]);
        command.arg(format!("PATH={path}")).arg(program);
        command
    }

    /// Runs a command, which has to succeed; gives what it printed.
    #[track_caller]
    pub fn run(&self, args: &[&str]) -> String {
        succeeded(self.command(args[0]).args(&args[1..]))
    }

    /// Runs a line of the shell in a directory of the root, as pages print it.
    #[track_caller]
    pub fn shell(&self, dir: &str, line: &str) -> String {
        self.run(&["sh", "-c", &format!("cd {dir} && {line}")])
    }

    /// First word of what a program prints about its version that begins with a digit.
    #[track_caller]
    pub fn version(&self, args: &[&str]) -> String {
        let printed = self.run(args);
        let is_version = |word: &&str| word.starts_with(|first: char| first.is_ascii_digit());
        let version = printed.split(|c: char| c.is_whitespace() || c == '=').find(is_version);
        version
            .unwrap_or_else(|| panic!("{args:?}: no version: {printed}"))
            .trim_end_matches(',')
            .into()
    }
}

/// Runs a command, which has to succeed within [`PATIENCE`]; gives its standard output.
#[track_caller]
fn succeeded(command: &mut Command) -> String {
    let output = bounded(command, PATIENCE);
    let [out, err] = [&output.stdout, &output.stderr].map(|bytes| lossy(bytes));
    assert!(output.status.success(), "{command:?}: {}\n{out}{err}", output.status);
    out
}

/// A process in the background, killed at the end.
pub struct Process(Child);

impl Process {
    /// Starts it; what it prints goes into a file.
    #[track_caller]
    pub fn start(mut command: Command, log: &Path) -> Process {
        let log = std::fs::File::create(log).unwrap();
        command.stdout(log.try_clone().unwrap()).stderr(log);
        command.stdin(std::process::Stdio::null());
        Process(command.spawn().unwrap())
    }

    /// Kills it now.
    pub fn kill(self) {}
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A scratch directory below `/tmp`, which the roots have, too.
fn scratch() -> ScratchDir {
    let scratch = ScratchDir::on_disk().unwrap();
    assert!(scratch.path().starts_with("/tmp"), "{} is not below /tmp", scratch.path().display());
    scratch
}

/// Reports a row of the table: all bytes were equal.
fn report(platform: &str, version: &str, steps: &str) {
    // One line, at the beginning of which the harness may have printed the name of the test.
    println!("PLATFORM\t{platform}\t{version}\t{steps}");
}

/// The blocks of a page between lines of three backticks, each with its language.
fn blocks(page: &str) -> Vec<(String, String)> {
    let mut blocks = Vec::new();
    let mut lines = page.lines();
    while let Some(line) = lines.next() {
        let Some(language) = line.strip_prefix("```") else { continue };
        let body: Vec<&str> = lines.by_ref().take_while(|line| !line.starts_with("```")).collect();
        blocks.push((language.to_owned(), body.join("\n")));
    }
    blocks
}
