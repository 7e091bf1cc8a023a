//! A copy that is killed leaves behind no server, no lock, no directory.

use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use blockhaul_testkit::tools::{self, ScratchDir, text};

const LIMIT: Duration = Duration::from_secs(60);
const OURS: &str = env!("CARGO_BIN_EXE_blockhaul");

/// A copy of 64 MiB to `disk` through this server, which takes its time.
struct Copy {
    scratch: ScratchDir,
    server: Vec<String>,
}

impl Copy {
    fn through(server: impl Fn(&str) -> Vec<String>) -> Copy {
        let scratch = ScratchDir::new().unwrap();
        fs::create_dir(scratch.file("tmp")).unwrap();
        fs::File::create(scratch.file("disk")).unwrap().set_len(64 << 20).unwrap();
        let server = server(scratch.file("disk").to_str().unwrap());
        Copy { scratch, server }
    }

    fn command(&self, options: &[&str]) -> Command {
        let mut command = Command::new(OURS);
        command.current_dir(self.scratch.path()).env("TMPDIR", self.scratch.file("tmp"));
        command.args(["copy", "--no-progress", "--journal=j"]).args(options);
        command.args(["random:64M", "["]).args(&self.server).arg("]");
        command
    }

    /// Starts it and waits until it has copied something.
    fn begin(&self) -> Child {
        let mut command = self.command(&["--rate=4M"]);
        let mut copy = command.stdin(Stdio::null()).spawn().unwrap();
        tools::until("it has copied something", || {
            assert!(copy.try_wait().unwrap().is_none(), "it ended before it was killed");
            fs::metadata(self.scratch.file("j")).is_ok_and(|data| data.len() > 0)
        });
        copy
    }

    /// Folders of servers.
    fn folders(&self) -> Vec<PathBuf> {
        let folders = fs::read_dir(self.scratch.file("tmp")).unwrap();
        folders.map(|entry| entry.unwrap().path()).collect()
    }

    /// Ids of processes whose arguments name the disk.
    fn processes(&self) -> Vec<String> {
        let disk = self.scratch.file("disk");
        let processes = fs::read_dir("/proc").unwrap().filter_map(|entry| {
            let entry = entry.ok()?;
            let command = fs::read(entry.path().join("cmdline")).ok()?;
            let names = String::from_utf8_lossy(&command).contains(disk.to_str()?);
            names.then(|| entry.file_name().to_string_lossy().into_owned())
        });
        processes.collect()
    }

    /// Kills a copy. Then all is gone soon.
    #[track_caller]
    fn kill(&self) {
        let copy = self.begin();
        self.kill_begun(copy);
    }

    #[track_caller]
    fn kill_begun(&self, mut copy: Child) {
        assert_eq!(self.folders().len(), 1);
        copy.kill().unwrap();
        copy.wait().unwrap();
        let killed = Instant::now();
        tools::until_ok("nothing is left behind", || {
            let left = (self.folders(), self.processes());
            if left.0.is_empty() && left.1.is_empty() { Ok(()) } else { Err(left) }
        });
        println!("all is gone after {:?}", killed.elapsed());
    }

    /// The same command continues where the killed one was.
    #[track_caller]
    fn go_on(&self) {
        let again = tools::output(&mut self.command(&[]), LIMIT).unwrap();
        assert!(again.status.success(), "{}", text(&again.stderr));
        assert!(self.folders().is_empty() && self.processes().is_empty());
    }
}

#[test]
fn a_killed_copy_leaves_no_server() {
    let copy = Copy::through(|disk| ["blockhaul", "serve", disk].map(String::from).to_vec());
    copy.kill();
    copy.go_on();
}

#[test]
fn nor_what_the_server_has_started() {
    let copy = Copy::through(|disk| {
        // The name of a program may hold anything, and those that a process has started may have ended.
        let odd = format!("{disk}) Z 1 1 (");
        let line = format!(
            "cp \"$(command -v sleep)\" '{odd}' && ( '{odd}' 1000 & ( '{odd}' 1000; : ) ) &
             exec '{OURS}' serve '{disk}'"
        );
        ["sh", "-c", &line].map(String::from).to_vec()
    });
    copy.kill();
}

#[test]
fn a_server_that_does_not_end_is_killed() {
    if !tools::runs_long() {
        return;
    }
    let copy = Copy::through(|disk| ["blockhaul", "serve", disk].map(String::from).to_vec());
    let begun = copy.begin();
    // The copy itself names the disk, too, and is the first of them.
    let server = copy.processes().into_iter().find(|process| *process != begun.id().to_string());
    // A process that is stopped does not act on SIGTERM.
    let stopped = Command::new("kill").args(["-s", "STOP", &server.unwrap()]).status();
    assert!(stopped.unwrap().success());
    copy.kill_begun(begun);
    copy.go_on();
}
