//! Finder of peer programs (nbdkit, libnbd's tools, QEMU's, fio, mkfs.ext4, …) and what tests need
//! to run them: scratch directories with short socket paths, servers that are awaited and stopped,
//! runs that end within a bound.
//!
//! Programs come from `target/peers` (see `cargo xtask peers`), else from the search path. Where
//! one is absent or too old, a test prints the reason and is skipped; with `CI=true` or
//! `BLOCKHAUL_REQUIRE_PEERS=1` it fails instead. `BLOCKHAUL_PEERS` names another directory of
//! unpacked peers.
//!
//! ```no_run
//! use testkit::tools::{Scratch, Server};
//!
//! fn copies_from_nbdkit() {
//!     let nbdkit = testkit::require_peer!("nbdkit");
//!     let nbdinfo = testkit::require_peer!("nbdinfo");
//!     let scratch = Scratch::new().unwrap();
//!     let server = Server::nbdkit(&nbdkit, &scratch.socket("s"), &["pattern", "1G"]).unwrap();
//!     let mut command = nbdinfo.command();
//!     command.args(["--size", &server.uri("")]);
//!     let output = testkit::tools::output(&mut command, std::time::Duration::from_secs(10));
//!     assert_eq!(output.unwrap().stdout, b"1073741824\n");
//! }
//! ```

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fmt;
use std::fs;
use std::io::{self, Read, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// A peer program that is there and new enough.
#[derive(Clone, Debug)]
pub struct Peer {
    name: String,
    program: PathBuf,
    /// The directory of unpacked peers; none for a program from the search path.
    home: Option<PathBuf>,
    version: Option<Version>,
}

impl Peer {
    /// Finds a program by its name and checks that it is new enough: nbdkit 1.42, libnbd 1.22,
    /// QEMU 10.0, fio of any version with its nbd engine; others need only be there. Each program
    /// is run once in a process, later calls get the same answer.
    ///
    /// # Errors
    /// Why there is no such peer, and what to do about it.
    pub fn find(name: &str) -> Result<Peer, Reason> {
        static KNOWN: OnceLock<Mutex<HashMap<String, Result<Peer, Reason>>>> = OnceLock::new();
        // The lock is held while the program runs, so that many tests at once run it only once.
        let mut known = lock(KNOWN.get_or_init(Mutex::default));
        known.entry(name.to_owned()).or_insert_with(|| Peer::look_for(name)).clone()
    }

    /// Like [`Peer::find`]; where there is no such peer, says why and gives None, so that the test
    /// can return. [`require_peer!`](crate::require_peer) does both.
    ///
    /// # Panics
    /// Where there is no such peer and peers are required (`CI=true`, `BLOCKHAUL_REQUIRE_PEERS=1`).
    #[track_caller]
    pub fn require(name: &str) -> Option<Peer> {
        match Peer::find(name) {
            Ok(peer) => Some(peer),
            Err(reason) => {
                skip_or_fail(&reason);
                None
            }
        }
    }

    /// The program's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Path of the program, or of the wrapper that runs it. A server under test that is started by
    /// another program is named so.
    pub fn program(&self) -> &Path {
        &self.program
    }

    /// The version that the program states; None for programs of which none is asked.
    pub fn version(&self) -> Option<Version> {
        self.version
    }

    /// A command that runs the program. Process id, open descriptors, signals and exit status are
    /// the program's own.
    pub fn command(&self) -> Command {
        Command::new(&self.program)
    }

    /// Like [`Peer::command`], and the kernel ends the program when the *thread* that spawned it
    /// ends, even if the test process is killed. Not for programs that outlive their thread.
    pub fn tied_command(&self) -> Command {
        let tie = ["--pdeathsig", "KILL", "--"];
        if let Some(home) = &self.home {
            let mut command = Command::new(home.join("enter"));
            command.arg("setpriv").args(tie).arg(&self.name);
            return command;
        }
        let Some(setpriv) = in_search_path("setpriv") else { return self.command() };
        let mut command = Command::new(setpriv);
        command.args(tie).arg(&self.program);
        command
    }

    fn look_for(name: &str) -> Result<Peer, Reason> {
        let homes = homes();
        let unpacked = homes
            .into_iter()
            .map(|home| (home.join("bin").join(name), Some(home)))
            .find(|(program, _)| program.is_file());
        let found = unpacked.or_else(|| Some((in_search_path(name)?, None)));
        let Some((program, home)) = found else {
            return Err(Reason(format!("there is no {name}; `cargo xtask peers` unpacks it")));
        };
        let mut peer = Peer { name: name.to_owned(), program, home, version: None };
        if let Some(least) = least_version(name) {
            let version = peer.ask_version()?;
            if version < least {
                return Err(Reason(format!(
                    "{name} is {version}, older than {least}; `cargo xtask peers` unpacks a newer \
                     one"
                )));
            }
            peer.version = Some(version);
        }
        if name == "fio" {
            let engines = peer.ask("--enghelp")?;
            if !engines.split_whitespace().any(|engine| engine == "nbd") {
                return Err(Reason(
                    "fio has no nbd engine; `cargo xtask peers` unpacks one".into(),
                ));
            }
        }
        Ok(peer)
    }

    fn ask_version(&self) -> Result<Version, Reason> {
        let text = self.ask("--version")?;
        Version::parse(&text)
            .ok_or_else(|| Reason(format!("{} states no version: {text:?}", self.name)))
    }

    fn ask(&self, option: &str) -> Result<String, Reason> {
        let output = output(self.command().arg(option), Duration::from_secs(30));
        let output = output.map_err(Reason)?;
        if output.status.success() {
            return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
        }
        let words = String::from_utf8_lossy(&output.stderr);
        Err(Reason(format!("`{} {option}` failed: {}: {}", self.name, output.status, words.trim())))
    }
}

/// A command that runs any program among the unpacked peers: with `/usr` as the peers have it and
/// all of them in the search path, so that what it starts needs no wrapper. For shell lines with
/// several peers, and for programs of ours that start peers by name.
///
/// # Errors
/// Where no peers are unpacked.
pub fn among_peers(program: impl AsRef<OsStr>) -> Result<Command, Reason> {
    let enter = homes().into_iter().map(|home| home.join("enter")).find(|enter| enter.is_file());
    let Some(enter) = enter else {
        return Err(Reason("no peers are unpacked; run `cargo xtask peers`".into()));
    };
    let mut command = Command::new(enter);
    command.arg(program);
    Ok(command)
}

/// Finds the peer or ends the test: `let nbdkit = require_peer!("nbdkit");`. A test that returns a
/// value gives it as the second argument: `require_peer!("nbdkit", Ok(()))`.
#[macro_export]
macro_rules! require_peer {
    ($name:expr) => {
        $crate::require_peer!($name, ())
    };
    ($name:expr, $otherwise:expr) => {
        match $crate::tools::Peer::require($name) {
            Some(peer) => peer,
            None => return $otherwise,
        }
    };
}

/// Says why a test is skipped, past the capture of test output.
///
/// # Panics
/// Where what is missing must be there: `CI=true` or `BLOCKHAUL_REQUIRE_PEERS=1`.
#[track_caller]
pub fn skip_or_fail(reason: &Reason) {
    let set = |name: &str| std::env::var(name).is_ok_and(|value| value == "1" || value == "true");
    assert!(!set("CI") && !set("BLOCKHAUL_REQUIRE_PEERS"), "{reason}");
    let thread = std::thread::current();
    let test = thread.name().unwrap_or("a test");
    // Losing the line because standard error is closed is no reason to fail.
    let _ = writeln!(io::stderr(), "{test}: skipped: {reason}");
}

/// Why a test cannot run here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reason(String);

impl Reason {
    /// What is missing.
    pub fn new(text: impl Into<String>) -> Reason {
        Reason(text.into())
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Reason {}

/// The first two numbers of a version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// The number before the first point.
    pub major: u32,
    /// The number after it.
    pub minor: u32,
}

impl Version {
    /// The first `NUMBER.NUMBER` in what a program says.
    fn parse(text: &str) -> Option<Version> {
        text.split(|c: char| !c.is_ascii_digit() && c != '.').find_map(|word| {
            let mut parts = word.split('.');
            let major = parts.next()?.parse().ok()?;
            let minor = parts.next()?.parse().ok()?;
            Some(Version { major, minor })
        })
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// The oldest version of a program that can judge us: extended headers and today's output.
fn least_version(name: &str) -> Option<Version> {
    match name {
        "nbdkit" => Some(Version { major: 1, minor: 42 }),
        _ if name.starts_with("nbd") => Some(Version { major: 1, minor: 22 }),
        _ if name.starts_with("qemu-") => Some(Version { major: 10, minor: 0 }),
        _ => None,
    }
}

/// Directories of unpacked peers, the most particular first.
fn homes() -> Vec<PathBuf> {
    if let Some(dir) = std::env::var_os("BLOCKHAUL_PEERS") {
        return vec![dir.into()];
    }
    let mut homes = Vec::new();
    // A test program lies below the target directory, wherever that is.
    if let Ok(exe) = std::env::current_exe() {
        homes.extend(exe.ancestors().skip(1).map(|dir| dir.join("peers")));
    }
    if let Some(manifest) = std::env::var_os("CARGO_MANIFEST_DIR") {
        homes.extend(Path::new(&manifest).ancestors().map(|dir| dir.join("target/peers")));
    }
    homes.retain(|home| home.join("stamp").is_file());
    homes
}

fn in_search_path(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|dir| dir.join(name)).find(|program| program.is_file())
}

/// A server of somebody else's on a Unix socket. It is killed when this is dropped.
#[derive(Debug)]
pub struct Server {
    child: Child,
    socket: PathBuf,
    said: Said,
}

impl Server {
    /// How long a server may take to listen; generous, because test machines are busy.
    const START: Duration = Duration::from_secs(30);

    /// How long a server may take to end once asked to.
    const STOP: Duration = Duration::from_secs(10);

    /// Starts a server and waits until it listens on the socket. Nothing connects to it for that:
    /// some servers end after their first connection. Standard input and output are closed off;
    /// standard error is kept for [`Server::said`].
    ///
    /// # Errors
    /// What the server said, where it cannot be started, ends, or does not listen in time.
    pub fn start(mut command: Command, socket: &Path) -> Result<Server, String> {
        let name = command.get_program().to_string_lossy().into_owned();
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().map_err(|error| format!("cannot start {name}: {error}"))?;
        let said = Said::collect(child.stderr.take());
        let mut server = Server { child, socket: socket.to_owned(), said };
        let begun = Instant::now();
        while !is_listening(socket) {
            if let Ok(Some(status)) = server.child.try_wait() {
                server.said.await_end(Duration::from_secs(1));
                return Err(format!("{name} ended, {status}, and said: {}", server.said()));
            }
            if begun.elapsed() > Self::START {
                let seconds = Self::START.as_secs();
                return Err(format!(
                    "{name} does not listen on {} after {seconds} s, and said: {}",
                    socket.display(),
                    server.said()
                ));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(server)
    }

    /// Starts nbdkit in the foreground, tied to this thread. `args` are its options, plugin and
    /// parameters.
    ///
    /// # Errors
    /// As [`Server::start`].
    pub fn nbdkit(nbdkit: &Peer, socket: &Path, args: &[&str]) -> Result<Server, String> {
        let mut command = nbdkit.tied_command();
        command.args(["--foreground", "--unix"]).arg(socket).args(args);
        Server::start(command, socket)
    }

    /// Starts qemu-nbd for any number of clients one after another, tied to this thread. `args`
    /// are its options (`-f raw`, `-e 8` for as many clients at once, …) and the image.
    ///
    /// # Errors
    /// As [`Server::start`].
    pub fn qemu_nbd(qemu_nbd: &Peer, socket: &Path, args: &[&str]) -> Result<Server, String> {
        let mut command = qemu_nbd.tied_command();
        command.args(["--persistent", "--socket"]).arg(socket).args(args);
        Server::start(command, socket)
    }

    /// The socket that it listens on.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Address of an export (empty: the default export).
    pub fn uri(&self, export: &str) -> String {
        let socket = percent_encode(self.socket.as_os_str().as_bytes());
        format!("nbd+unix:///{}?socket={socket}", percent_encode(export.as_bytes()))
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What it has written to standard error up to now.
    pub fn said(&self) -> String {
        self.said.text()
    }

    /// Asks it to end (SIGTERM) and waits.
    ///
    /// # Errors
    /// Where it does not end in time; it is killed then.
    pub fn stop(mut self) -> Result<ExitStatus, String> {
        let pid = self.pid().to_string();
        // The shell's own kill: the standard library knows only SIGKILL.
        let asked = Command::new("sh").args(["-c", "kill -TERM \"$1\"", "sh", &pid]).status();
        asked.map_err(|error| format!("cannot start sh: {error}"))?;
        wait_within(&mut self.child, Self::STOP)
            .ok_or_else(|| format!("server {pid} did not end when asked to; {}", self.said()))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Both fail only for a child that has been waited for already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Whether somebody listens on a Unix socket of this path, without connecting to it.
fn is_listening(socket: &Path) -> bool {
    let Ok(table) = fs::read("/proc/net/unix") else {
        // Without the table there is only the other way to find out.
        return std::os::unix::net::UnixStream::connect(socket).is_ok();
    };
    let path = socket.as_os_str().as_bytes();
    table.split(|byte| *byte == b'\n').any(|line| listening_path(line) == Some(path))
}

/// The path of a listening socket in a line of `/proc/net/unix`: number, reference count, protocol,
/// flags, type, state, inode (padded with blanks), path. A listening socket has the flag
/// __SO_ACCEPTCON and no other (proc_net(5)).
fn listening_path(line: &[u8]) -> Option<&[u8]> {
    let mut fields = line.splitn(7, |byte| *byte == b' ');
    if fields.nth(3)? != b"00010000" {
        return None;
    }
    let rest = fields.nth(2)?.trim_ascii_start();
    let blank = rest.iter().position(|byte| *byte == b' ')?;
    Some(&rest[blank + 1..])
}

/// A directory of its own that is removed when this is dropped. Its path is short, as that of a
/// Unix socket has to fit 107 bytes.
#[derive(Debug)]
pub struct Scratch {
    dir: tempfile::TempDir,
}

impl Scratch {
    /// In memory where the machine has `/dev/shm`, else on disk.
    ///
    /// # Errors
    /// Where the directory cannot be made.
    pub fn new() -> io::Result<Scratch> {
        let memory = Path::new("/dev/shm");
        if memory.is_dir()
            && let Ok(scratch) = Scratch::within(memory)
        {
            return Ok(scratch);
        }
        Scratch::on_disk()
    }

    /// In the directory for temporary files, whose file system usually is a disk's.
    ///
    /// # Errors
    /// Where the directory cannot be made.
    pub fn on_disk() -> io::Result<Scratch> {
        let dir = std::env::temp_dir();
        let short = dir.as_os_str().len() <= 64;
        Scratch::within(if short { &dir } else { Path::new("/tmp") })
    }

    fn within(dir: &Path) -> io::Result<Scratch> {
        let dir = tempfile::Builder::new().prefix("bh").rand_bytes(8).tempdir_in(dir)?;
        Ok(Scratch { dir })
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Path of a file in the directory, there or not.
    pub fn file(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }

    /// Path of a socket in the directory.
    ///
    /// # Panics
    /// Where the name is so long that the path does not fit a socket's address.
    pub fn socket(&self, name: &str) -> PathBuf {
        let path = self.file(name);
        assert!(path.as_os_str().len() < 108, "{} is too long for a socket", path.display());
        path
    }
}

/// Runs a command to its end, without input; gives what it wrote and how it ended.
///
/// # Errors
/// Where it cannot be started, or has not ended within the limit; it is killed then, and what it
/// had said is told.
pub fn output(command: &mut Command, limit: Duration) -> Result<Output, String> {
    let name = command.get_program().to_string_lossy().into_owned();
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|error| format!("cannot start {name}: {error}"))?;
    let out = Said::collect(child.stdout.take());
    let err = Said::collect(child.stderr.take());
    let Some(status) = wait_within(&mut child, limit) else {
        let _ = child.kill();
        let _ = child.wait();
        let (out, err) = (out.text(), err.text());
        let seconds = limit.as_secs_f32();
        return Err(format!(
            "{name} has not ended after {seconds} s; it wrote {out:?} and {err:?}"
        ));
    };
    // What the program left running in the background may hold its pipes open.
    for said in [&out, &err] {
        said.await_end(Duration::from_secs(5));
    }
    Ok(Output { status, stdout: out.bytes(), stderr: err.bytes() })
}

/// Waits for a process; `None` when it has not ended within the limit.
pub fn wait_within(child: &mut Child, limit: Duration) -> Option<ExitStatus> {
    let begun = Instant::now();
    let mut pause = Duration::from_micros(200);
    loop {
        if let Ok(Some(status)) = child.try_wait() {
            return Some(status);
        }
        if begun.elapsed() > limit {
            return None;
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(10));
    }
}

/// What a program writes to one of its pipes, collected by a thread.
#[derive(Debug)]
struct Said {
    bytes: Arc<Mutex<Vec<u8>>>,
    /// Disconnected when the pipe has ended.
    ended: Mutex<mpsc::Receiver<()>>,
}

impl Said {
    fn collect(pipe: Option<impl Read + Send + 'static>) -> Said {
        let bytes = Arc::new(Mutex::new(Vec::new()));
        let (running, ended) = mpsc::channel();
        if let Some(mut pipe) = pipe {
            let bytes = Arc::clone(&bytes);
            std::thread::spawn(move || {
                let mut buffer = [0; 8192];
                while let Ok(count @ 1..) = pipe.read(&mut buffer) {
                    lock(&bytes).extend_from_slice(&buffer[..count]);
                }
                drop(running);
            });
        }
        Said { bytes, ended: Mutex::new(ended) }
    }

    fn await_end(&self, limit: Duration) -> bool {
        lock(&self.ended).recv_timeout(limit) == Err(RecvTimeoutError::Disconnected)
    }

    fn bytes(&self) -> Vec<u8> {
        lock(&self.bytes).clone()
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes()).trim().to_owned()
    }
}

/// A test that failed elsewhere leaves the data as good as it was.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn percent_encode(bytes: &[u8]) -> String {
    let mut text = String::new();
    for byte in bytes {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' => {
                text.push(char::from(*byte));
            }
            _ => text += &format!("%{byte:02X}"),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(20);

    fn shell(line: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", line]);
        command
    }

    #[test]
    fn versions_are_read_from_what_programs_say() {
        let of = |text: &str| Version::parse(text).map(|version| version.to_string());
        assert_eq!(of("nbdkit 1.42.3").as_deref(), Some("1.42"));
        assert_eq!(of("nbdinfo 1.22.2\nlibnbd 1.22.2").as_deref(), Some("1.22"));
        assert_eq!(of("qemu-img version 10.0.13 (Debian 1:10.0.13+ds-0)").as_deref(), Some("10.0"));
        assert_eq!(of("fio-3.39").as_deref(), Some("3.39"));
        assert_eq!(of("no number 7 here"), None);
        let old = Version { major: 9, minor: 2 };
        assert!(least_version("qemu-nbd").is_some_and(|least| old < least));
        assert!(least_version("nbdkit") > least_version("nbdcopy"));
        assert_eq!(least_version("jq"), None);
    }

    #[test]
    fn an_absent_peer_gives_its_reason() {
        let reason = Peer::find("no-such-peer").unwrap_err();
        assert!(reason.to_string().contains("no-such-peer"), "{reason}");
        assert!(reason.to_string().contains("cargo xtask peers"), "{reason}");
    }

    #[test]
    fn lines_of_listening_sockets_are_told_from_others() {
        let line = b"0000000000000000: 00000002 00000000 00010000 0001 01  1066 /a b/c";
        assert_eq!(listening_path(line), Some(&b"/a b/c"[..]));
        let line = b"0000000000000000: 00000002 00000000 00010000 0001 01 123456 @x";
        assert_eq!(listening_path(line), Some(&b"@x"[..]));
        let line = b"0000000000000000: 00000003 00000000 00000000 0001 03 123456 /a";
        assert_eq!(listening_path(line), None);
        let line = b"0000000000000000: 00000003 00000000 00010000 0001 01  1065";
        assert_eq!(listening_path(line), None);
        assert_eq!(listening_path(b""), None);
    }

    #[test]
    fn a_socket_listens_from_listen_to_close() {
        let scratch = Scratch::new().unwrap();
        let path = scratch.socket("a b");
        assert!(!is_listening(&path));
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        assert!(is_listening(&path));
        drop(listener);
        assert!(!is_listening(&path), "the file is left, but nobody listens");
    }

    #[test]
    fn scratch_directories_are_removed_and_their_sockets_fit() {
        let scratch = Scratch::on_disk().unwrap();
        let path = scratch.path().to_owned();
        fs::write(scratch.file("x"), "x").unwrap();
        assert!(scratch.socket("s").as_os_str().len() < 108);
        drop(scratch);
        assert!(!path.exists());
    }

    #[test]
    fn output_is_complete_and_bounded_in_time() {
        let output_of = |line: &str, limit| output(&mut shell(line), limit);
        let done = output_of("echo out; echo err >&2; exit 3", LIMIT).unwrap();
        assert_eq!((&done.stdout[..], &done.stderr[..]), (&b"out\n"[..], &b"err\n"[..]));
        assert_eq!(done.status.code(), Some(3));
        let large = output_of("head -c 1000000 /dev/zero", LIMIT).unwrap();
        assert_eq!(large.stdout.len(), 1_000_000);
        let begun = Instant::now();
        let late = output_of("echo begun; exec sleep 60", Duration::from_millis(300)).unwrap_err();
        assert!(late.contains("has not ended") && late.contains("begun"), "{late}");
        assert!(begun.elapsed() < LIMIT);
    }

    #[test]
    fn a_server_that_ends_tells_what_it_said() {
        let scratch = Scratch::new().unwrap();
        let why = Server::start(shell("echo no luck >&2; exit 4"), &scratch.socket("s"));
        let why = why.unwrap_err();
        assert!(why.contains("no luck") && why.contains('4'), "{why}");
    }

    #[test]
    fn addresses_are_percent_encoded() {
        assert_eq!(percent_encode(b"/dev/shm/a b%?&\xff"), "/dev/shm/a%20b%25%3F%26%FF");
    }

    #[test]
    fn nbdkit_serves_until_stopped_and_dies_when_dropped() {
        let nbdkit = crate::require_peer!("nbdkit");
        let nbdinfo = crate::require_peer!("nbdinfo");
        let scratch = Scratch::new().unwrap();
        let socket = scratch.socket("s");
        let server = Server::nbdkit(&nbdkit, &socket, &["pattern", "3M"]).unwrap();
        let size = output(nbdinfo.command().args(["--size", &server.uri("any")]), LIMIT).unwrap();
        assert_eq!(size.stdout, b"3145728\n", "{}", String::from_utf8_lossy(&size.stderr));
        // nbdkit takes SIGTERM for an ordinary end.
        assert!(server.stop().unwrap().success());
        assert!(!is_listening(&socket));

        let socket = scratch.socket("t");
        let server = Server::nbdkit(&nbdkit, &socket, &["-v", "memory", "1M"]).unwrap();
        let pid = server.pid();
        assert!(server.said().contains("debug"), "{}", server.said());
        drop(server);
        assert!(!Path::new(&format!("/proc/{pid}")).exists());
        assert!(!is_listening(&socket));
    }

    #[test]
    fn qemu_nbd_serves_and_peers_find_each_other() {
        let qemu_nbd = crate::require_peer!("qemu-nbd");
        let scratch = Scratch::new().unwrap();
        let image = scratch.file("image");
        fs::File::create(&image).unwrap().set_len(1 << 20).unwrap();
        let args = ["-f", "raw", "-e", "4", image.to_str().unwrap()];
        let server = Server::qemu_nbd(&qemu_nbd, &scratch.socket("s"), &args).unwrap();
        let mut command = match among_peers("sh") {
            Ok(command) => command,
            Err(reason) => return skip_or_fail(&reason),
        };
        command.args([
            "-c",
            "nbdcopy [ nbdkit pattern 1M ] \"$1\" && qemu-img compare -f raw -F raw \
             \"$1\" \"$2\"",
            "sh",
            &server.uri(""),
        ]);
        let output = output(command.arg(&image), LIMIT).unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(fs::read(&image).unwrap()[8..16], 8u64.to_be_bytes());
    }

    #[test]
    fn a_tied_server_ends_with_the_thread_that_started_it() {
        let nbdkit = crate::require_peer!("nbdkit");
        let scratch = Scratch::new().unwrap();
        let socket = scratch.socket("s");
        let start = || Server::nbdkit(&nbdkit, &socket, &["memory", "1M"]).unwrap();
        let mut server = std::thread::scope(|scope| scope.spawn(start).join().unwrap());
        assert!(wait_within(&mut server.child, LIMIT).is_some(), "it is running still");
    }
}
