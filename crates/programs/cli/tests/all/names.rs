//! The program under the names of others, as a copy and as a hard link: whatever its file is called, what
//! it starts of itself is itself.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use blockhaul_testkit::image::pattern;
use blockhaul_testkit::tools::{self, ScratchDir, text};

const LIMIT: Duration = Duration::from_secs(60);
const OURS: &str = env!("CARGO_BIN_EXE_blockhaul");

/// Runs a check with each way to install the program under other names.
fn each_way(check: fn(&Path, &ScratchDir)) {
    type Install = fn(&Path) -> std::io::Result<()>;
    let ways: [Install; 3] = [
        |to| fs::copy(OURS, to).map(drop),
        |to| fs::hard_link(OURS, to),
        |to| std::os::unix::fs::symlink(OURS, to),
    ];
    for install in ways {
        // Hard links stay on one file system.
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        for name in ["nbdkit", "nbdcopy", "nbdinfo"] {
            install(&folder.path().join(name)).unwrap();
        }
        check(folder.path(), &ScratchDir::new().unwrap());
    }
}

#[track_caller]
fn run(command: &mut Command) -> String {
    let output = tools::output(command, LIMIT).unwrap();
    let said = text(&output.stderr);
    assert!(output.status.success(), "{command:?}: {}: {said}", output.status);
    text(&output.stdout)
}

/// Ends a server in the background when the check has ended.
struct Background(PathBuf);

impl Drop for Background {
    fn drop(&mut self) {
        let Ok(process) = fs::read_to_string(&self.0) else { return };
        let _ = Command::new("kill").arg(process.trim()).status();
    }
}

#[test]
fn nbdkit_goes_to_the_background() {
    each_way(|programs, scratch| {
        fs::write(scratch.file("disk"), pattern(100_000)).unwrap();
        let socket = scratch.socket("s");
        let process = scratch.file("pid");
        let _ends = Background(process.clone());
        let mut nbdkit = Command::new(programs.join("nbdkit"));
        nbdkit.current_dir(scratch.path()).arg("-U").arg(&socket).arg("-P").arg(&process);
        run(nbdkit.args(["file", "disk"]));
        let uri = format!("nbd+unix:///?socket={}", socket.display());
        let size = run(Command::new(programs.join("nbdinfo")).args(["--size", &uri]));
        assert_eq!(size, "100000\n");
        let server = fs::read_to_string(&process).unwrap();
        let dir = fs::read_link(format!("/proc/{}/cwd", server.trim())).unwrap();
        assert_eq!(dir, Path::new("/"), "it keeps a folder busy");
        let target = scratch.file("target");
        run(Command::new(programs.join("nbdcopy")).arg(&uri).arg(&target));
        assert!(fs::read(target).unwrap() == pattern(100_000));
    });
}

#[test]
fn nbdkit_runs_a_command() {
    each_way(|programs, scratch| {
        let mut nbdkit = Command::new(programs.join("nbdkit"));
        let path = std::env::join_paths([programs, Path::new("/usr/bin"), Path::new("/bin")]);
        nbdkit.env("PATH", path.unwrap()).current_dir(scratch.path());
        let size = run(nbdkit.args(["-U", "-", "memory", "1M", "--run", "nbdinfo --size $uri"]));
        assert_eq!(size, "1048576\n");
    });
}

#[test]
fn nbdcopy_and_nbdinfo_start_servers() {
    each_way(|programs, scratch| {
        let target = scratch.file("target");
        let server = ["[", "blockhaul", "serve", "pattern:100000", "]"];
        run(Command::new(programs.join("nbdcopy")).args(server).arg(&target));
        assert!(fs::read(&target).unwrap() == pattern(100_000));
        let size = run(Command::new(programs.join("nbdinfo")).arg("--size").args(server));
        assert_eq!(size, "100000\n");
        // Another server under a name of ours is started by that name.
        let nbdkit = programs.join("nbdkit");
        let server = ["[", nbdkit.to_str().unwrap(), "memory", "100000", "]"];
        let size = run(Command::new(programs.join("nbdinfo")).arg("--size").args(server));
        assert_eq!(size, "100000\n");
    });
}
