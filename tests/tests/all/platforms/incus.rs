//! Incus: a volume over its NBD export, as `docs/backups.md` and `docs/recipes.md` describe it, also while
//! the daemon is killed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use blockhaul_testkit::tools::{ScratchDir, until};
use blockhaul_tests::program;

use super::{Process, Root, report, scratch, succeeded};

const BACKUPS: &str = include_str!("../../../../docs/backups.md");
const RECIPES: &str = include_str!("../../../../docs/recipes.md");

/// The daemon in a root, with the volume `NAME` in the pool `POOL`.
struct Incus {
    root: Root,
    scratch: ScratchDir,
    daemon: Option<Process>,
}

impl Incus {
    /// Starts it. `None` without the root.
    fn start() -> Option<Incus> {
        let root = Root::find("backports")?;
        let mut incus = Incus { root, scratch: scratch(), daemon: None };
        fs::create_dir(incus.dir()).unwrap();
        incus.restart();
        incus.client(&["storage", "create", "POOL", "dir"]);
        incus.client(&[
            "storage",
            "volume",
            "create",
            "POOL",
            "NAME",
            "--type=block",
            "size=64MiB",
        ]);
        let disk = incus.disk().display().to_string();
        incus.blockhaul(&["copy", "--no-progress", "random:64M?seed=1", &disk]);
        Some(incus)
    }

    fn dir(&self) -> PathBuf {
        self.scratch.file("i")
    }

    fn socket(&self) -> PathBuf {
        self.dir().join("unix.socket")
    }

    /// The file of the volume.
    fn disk(&self) -> PathBuf {
        self.dir().join("storage-pools/POOL/custom/default_NAME/root.img")
    }

    /// A program of the root that finds the daemon.
    fn command(&self, words: &[&str]) -> Command {
        let path = "/usr/libexec/incus:/usr/sbin:/usr/bin:/sbin:/bin";
        let mut command = self.root.command_with_path(path, "env");
        command.arg(format!("INCUS_DIR={}", self.dir().display()));
        command.arg(format!("INCUS_SOCKET={}", self.socket().display())).args(words);
        command
    }

    #[track_caller]
    fn client(&self, args: &[&str]) -> String {
        succeeded(&mut self.command(&[&["incus"], args].concat()))
    }

    /// Starts the daemon; one that runs is killed first.
    fn restart(&mut self) {
        drop(self.daemon.take());
        let inner = self.command(&["/usr/libexec/incus/incusd", "--group", "root"]);
        // It mounts below its directory.
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation", "private"]);
        command.arg(inner.get_program()).args(inner.get_args());
        self.daemon = Some(Process::start(command, &self.scratch.file("incusd.log")));
        until("incusd answers", || {
            let output = self.command(&["incus", "query", "/1.0"]).output();
            output.is_ok_and(|output| output.status.success())
        });
    }

    #[track_caller]
    fn blockhaul(&self, args: &[&str]) -> String {
        succeeded(Command::new(program()).args(args).current_dir(self.scratch.path()))
    }

    /// The command of a page, with the socket of this daemon.
    fn words(&self, page: &str, begin: &str) -> Vec<String> {
        let is_command =
            |line: &&str| line.starts_with(begin) && line.contains("/var/lib/incus/unix.socket");
        let line = page.lines().find(is_command).unwrap();
        let socket = self.socket().display().to_string();
        let line = line.replace("/var/lib/incus/unix.socket", &socket).replace('\'', "");
        line.split_whitespace().skip(1).map(String::from).collect()
    }

    #[track_caller]
    fn run(&self, words: &[String]) -> String {
        self.blockhaul(&words.iter().map(String::as_str).collect::<Vec<_>>())
    }

    #[track_caller]
    fn assert_equal(&self, copy: &str) {
        assert!(fs::read(self.scratch.file(copy)).unwrap() == fs::read(self.disk()).unwrap());
    }

    fn remove(&self, name: &str) {
        fs::remove_file(self.scratch.file(name)).unwrap();
    }
}

/// Whether the first bytes of a copy were written.
fn has_begun(copy: &Path) -> bool {
    use std::os::unix::fs::MetadataExt as _;
    fs::metadata(copy).is_ok_and(|data| data.blocks() > 0)
}

/// A copy that takes some seconds, and is under way.
fn slow_copy(incus: &Incus, words: &[String]) -> Child {
    let mut command = Command::new(program());
    command.args(words).args(["--no-progress", "--rate", "16M"]);
    let child = command.current_dir(incus.scratch.path()).spawn().unwrap();
    until("the copy has begun", || has_begun(&incus.scratch.file("disk.raw")));
    child
}

#[test]
fn a_volume_is_copied_pulled_and_restored() {
    let Some(mut incus) = Incus::start() else { return };
    let copy = incus.words(RECIPES, "blockhaul copy");
    let info = incus.words(BACKUPS, "blockhaul info");
    for _ in 0..5 {
        incus.run(&copy);
        incus.assert_equal("disk.raw");
        incus.remove("disk.raw");
        let said = incus.run(&info);
        assert!(said.contains("export-size: 67108864"), "{said}");
    }
    let uri = info.last().unwrap();
    let job = format!("[[disk]]\nname = 'v'\nsource = '{uri}'\nstore = 'store'\n");
    fs::write(incus.scratch.file("job.toml"), job).unwrap();
    incus.blockhaul(&["pull", "--full", "job.toml", "--point", "one"]);
    incus.blockhaul(&["restore", "store", "restored.raw"]);
    incus.assert_equal("restored.raw");
    // The daemon is killed, away for a moment, and there again.
    let mut child = slow_copy(&incus, &copy);
    incus.restart();
    let status = child.wait().unwrap();
    assert!(status.success(), "{status}");
    incus.assert_equal("disk.raw");
    incus.run(&info);
    // A volume that is not there, in the words of the daemon.
    let missing = uri.replace("NAME", "other");
    let output = Command::new(program()).args(["info", &missing]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("404 Not Found") && !said.contains('{'), "{said}");
    let version = incus.client(&["query", "/1.0"]);
    let version =
        version.split("\"server_version\":").nth(1).and_then(|rest| rest.split('"').nth(1));
    let version = version.unwrap_or("?");
    report(
        "Incus",
        version,
        "copy 5 times, info, pull and restore; the daemon killed in the middle",
    );
}
