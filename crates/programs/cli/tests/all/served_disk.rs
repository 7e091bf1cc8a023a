//! A disk of random bytes that a server serves, with its control socket.

use std::path::PathBuf;
use std::process::{Child, Command, Output};
use std::time::Duration;

use blockhaul_testkit::tools::{self, PeerServer, ScratchDir, text};

pub const LIMIT: Duration = Duration::from_secs(120);
pub const OURS: &str = env!("CARGO_BIN_EXE_blockhaul");
pub const SIZE: &str = "32M";

pub fn blockhaul(args: &[&str]) -> Output {
    tools::output(Command::new(OURS).args(args), LIMIT).unwrap()
}

#[track_caller]
pub fn succeed(args: &[&str]) -> String {
    let output = blockhaul(args);
    assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

/// A process that is killed at the end of the test.
pub struct ChildGuard(pub Child);

impl Drop for ChildGuard {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A served disk of random bytes.
pub struct Disk {
    pub scratch: ScratchDir,
    pub server: PeerServer,
    pub control: String,
    pub path: PathBuf,
}

impl Disk {
    pub fn serve(more: &[&str]) -> Disk {
        let scratch = ScratchDir::new().unwrap();
        let path = scratch.file("disk.raw");
        let control = scratch.file("ctl").to_str().unwrap().to_string();
        fill(path.to_str().unwrap(), 1);
        let export = format!("a={}", path.display());
        let mut args = vec!["--control", &control, "--export", &export];
        args.extend(more);
        let server = PeerServer::blockhaul(OURS.as_ref(), &scratch.socket("nbd"), &args).unwrap();
        Disk { scratch, server, control, path }
    }

    /// The same disk with another server; the first one ends in order, or is killed.
    pub fn again(self, more: &[&str], orderly: bool) -> Disk {
        let Disk { scratch, server, control, path } = self;
        // The kernel may close the sockets of a killed server later.
        let socket = scratch.socket(&format!("nbd-{}", server.pid()));
        if orderly {
            assert!(server.stop().unwrap().success());
        } else {
            drop(server);
        }
        let export = format!("a={}", path.display());
        let mut args = vec!["--control", &control, "--export", &export];
        args.extend(more);
        let server = PeerServer::blockhaul(OURS.as_ref(), &socket, &args).unwrap();
        Disk { scratch, server, control, path }
    }

    pub fn file(&self, name: &str) -> String {
        self.scratch.file(name).to_str().unwrap().to_string()
    }

    pub fn ctl(&self, args: &[&str]) -> Output {
        blockhaul(&[&["ctl", &self.control], args].concat())
    }

    #[track_caller]
    pub fn ctl_succeeds(&self, args: &[&str]) -> String {
        succeed(&[&["ctl", &self.control], args].concat())
    }

    #[track_caller]
    pub fn ctl_fails(&self, args: &[&str], status: i32, words: &[&str]) {
        let output = self.ctl(args);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{args:?}: {said}");
        assert!(words.iter().all(|word| said.contains(word)), "{args:?}: {said}");
    }

    /// A client overwrites the whole disk.
    pub fn overwrite(&self, seed: u32) {
        fill(&self.server.uri("a"), seed);
    }

    /// A client overwrites 2 MiB in the middle.
    pub fn write_part(&self) {
        let part = "random:32M?seed=9";
        let to = self.server.uri("a");
        succeed(&["copy", "--no-progress", "--range", "8M:2M", part, &to]);
    }

    pub fn job(&self, number: usize) -> serde_json::Value {
        let all = self.ctl_succeeds(&["jobs", "--json"]);
        let all: serde_json::Value = serde_json::from_str(&all).unwrap();
        all["jobs"][number - 1].clone()
    }

    #[track_caller]
    pub fn wait_for(&self, what: &str, is_so: impl Fn(&serde_json::Value) -> bool) {
        tools::until_ok(what, || {
            let job = self.job(1);
            if is_so(&job) { Ok(()) } else { Err(job) }
        });
    }
}

pub fn fill(target: &str, seed: u32) {
    succeed(&["copy", "--no-progress", &format!("random:{SIZE}?seed={seed}"), target]);
}

#[track_caller]
pub fn assert_holds(path: &str, seed: u32) {
    succeed(&["compare", path, &format!("random:{SIZE}?seed={seed}")]);
}
