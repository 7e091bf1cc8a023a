//! nbdkit's ssh plugin, unmodified, against an SSH server of this test's own on loopback, with keys that
//! live as long as the test.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use blockhaul_testkit::tools::{
    PeerProgram, ScratchDir, SkipReason, among_peers, skip, skip_or_fail, until,
};
use blockhaul_tests::{
    LIMIT, assert_same, bounded, distinct, done, lossy, program, text, with_port,
};

/// The server must not run as root, which needs a user for the separation of privileges, and who logs
/// in must be who runs it and have a shell that exists. On Debian that is so for this user.
const USER: (&str, &str) = ("sync", "4");

/// The SSH server; it stops when dropped.
struct Sshd(Child);

impl Drop for Sshd {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// Whether the machine is one where the server can be run.
fn possible() -> bool {
    let Some(nbdkit) = PeerProgram::require("nbdkit") else { return false };
    let root = nbdkit.program().parent().unwrap().parent().unwrap().join("root");
    if !root.join("usr/sbin/sshd").exists() {
        skip_or_fail(&SkipReason::new("the peers have no sshd"));
        return false;
    }
    let users = fs::read_to_string("/etc/passwd").unwrap_or_default();
    let known = users.lines().any(|line| line.starts_with(&format!("{}:x:{}:", USER.0, USER.1)));
    if !rustix::process::geteuid().is_root() || !known {
        skip("an SSH server for a test needs root, to run it as Debian's user sync");
        return false;
    }
    true
}

#[test]
fn the_ssh_plugin_reads_and_writes_over_loopback() {
    if !possible() {
        return;
    }
    let scratch = ScratchDir::new().unwrap();
    let dir = scratch.file("ssh");
    fs::create_dir(&dir).unwrap();
    for name in ["host", "key"] {
        let mut keygen = among_peers(Path::new("ssh-keygen")).unwrap();
        done(keygen.args(["-q", "-t", "ed25519", "-N", "", "-f", text(&dir.join(name))]));
    }
    let at = |name: &str| text(&dir.join(name)).to_string();
    fs::copy(at("key.pub"), at("authorized")).unwrap();
    fs::File::create(at("disk")).unwrap().set_len(1_000_448).unwrap();
    done(Command::new("chmod").args(["755", text(dir.parent().unwrap())]));
    let (_sshd, port) = with_port(|port| {
        let config = format!(
            "Port {port}\nListenAddress 127.0.0.1\nHostKey {}\nAuthorizedKeysFile {}\nPidFile none\n\
             StrictModes no\nUsePAM no\nSubsystem sftp internal-sftp\nForceCommand internal-sftp\n",
            at("host"),
            at("authorized")
        );
        fs::write(at("config"), config).unwrap();
        done(Command::new("chown").args(["-R", USER.1, text(&dir)]));
        let mut sshd = among_peers(Path::new("setpriv")).unwrap();
        sshd.args([&format!("--reuid={}", USER.1), "--regid=65534", "--clear-groups"]);
        sshd.args(["/usr/sbin/sshd", "-D", "-e", "-f", &at("config")]);
        let log = fs::File::create(scratch.file("log")).unwrap();
        let mut sshd = Sshd(sshd.stdin(Stdio::null()).stderr(log).spawn().unwrap());
        let said = || fs::read_to_string(scratch.file("log")).unwrap();
        let mut ended = false;
        let mut listens = false;
        until("sshd listens", || {
            // Asked first: the words of one that has ended are all there.
            ended = sshd.0.try_wait().unwrap().is_some();
            listens = said().contains("Server listening on");
            ended || listens
        });
        if listens { Ok(sshd) } else { Err(said()) }
    });
    let host = fs::read_to_string(at("host.pub")).unwrap();
    fs::write(at("known"), format!("[127.0.0.1]:{port} {host}")).unwrap();

    let input = scratch.file("in");
    let out = scratch.file("out");
    let bytes = distinct(1_000_448);
    fs::write(&input, bytes).unwrap();
    let device = |known: &str, path: &str| {
        format!(
            "nbdkit:ssh?host=127.0.0.1&port={port}&user={}&path={}&identity={}&known-hosts={}",
            USER.0,
            at(path),
            at("key"),
            at(known)
        )
    };
    let serve = |device: &str, script: &str| {
        let mut command = among_peers(program()).unwrap();
        bounded(command.args(["serve", device, "--run", &format!("set -e; {script}")]), LIMIT)
    };
    let both =
        format!("nbdcopy --flush {} \"$uri\"; nbdcopy \"$uri\" {}", text(&input), text(&out));
    let output = serve(&device("known", "disk"), &both);
    assert!(output.status.success(), "{}", lossy(&output.stderr));
    assert_same(&input, &out, "through the ssh plugin");
    assert_same(&input, &dir.join("disk"), "the file behind the SSH server");
    // What goes wrong is said in the plugin's words.
    let output = serve(&device("known", "none"), "nbdinfo \"$uri\"");
    let said = lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("No such file"), "{said}");
    fs::write(at("strange"), "").unwrap();
    let output = serve(&device("strange", "disk"), "nbdinfo \"$uri\"");
    let said = lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("ssh"), "{said}");
}
