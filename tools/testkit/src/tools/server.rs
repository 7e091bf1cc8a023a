//! Foreign servers, started and stopped.

use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use super::peer::PeerProgram;
use super::run::{PipeOutput, wait_within};

/// A foreign server on a Unix socket. It is killed on drop.
#[derive(Debug)]
pub struct PeerServer {
    child: Child,
    socket: PathBuf,
    said: PipeOutput,
}

impl PeerServer {
    /// How long a server may take to listen; generous, because test machines are busy.
    const START: Duration = Duration::from_secs(120);

    /// How long a server may take to end after SIGTERM.
    const STOP: Duration = Duration::from_secs(60);

    /// Starts a server and waits until it listens on the socket. Nothing connects to it for that:
    /// some servers end after their first connection. Standard input and output are closed;
    /// standard error is kept for [`PeerServer::said`].
    ///
    /// # Errors
    /// The server's output, if it cannot be started, ends, or does not listen in time.
    pub fn start(mut command: Command, socket: &Path) -> Result<PeerServer, String> {
        let name = command.get_program().to_string_lossy().into_owned();
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().map_err(|error| format!("cannot start {name}: {error}"))?;
        let said = PipeOutput::collect(child.stderr.take());
        let mut server = PeerServer { child, socket: socket.to_owned(), said };
        server.await_socket(&name, socket)?;
        Ok(server)
    }

    /// Waits until the server, which has this name in errors, listens on a socket.
    fn await_socket(&mut self, name: &str, socket: &Path) -> Result<(), String> {
        let begun = Instant::now();
        // The kernel may close the socket of a killed server on the same path later than it reports its end.
        while !(socket.exists() && is_listening(socket)) {
            if let Ok(Some(status)) = self.child.try_wait() {
                self.said.await_end(Duration::from_secs(5));
                return Err(format!("{name} ended, {status}, and said: {}", self.said()));
            }
            if begun.elapsed() > Self::START {
                let seconds = Self::START.as_secs();
                return Err(format!(
                    "{name} does not listen on {} after {seconds} s, and said: {}",
                    socket.display(),
                    self.said()
                ));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }

    /// Starts the program under test in the foreground, ending with this process. `args` are options
    /// of `blockhaul serve` and the device.
    ///
    /// # Errors
    /// As [`PeerServer::start`].
    pub fn blockhaul(blockhaul: &Path, socket: &Path, args: &[&str]) -> Result<PeerServer, String> {
        let mut command = Command::new(blockhaul);
        command.args(["serve", "--foreground", "--exit-with-parent", "--unix"]);
        command.arg(socket).args(args);
        let mut server = PeerServer::start(command, socket)?;
        // It begins to listen on its sockets one after the other.
        for words in args.windows(2).filter(|words| matches!(words[0], "-U" | "--unix")) {
            server.await_socket("blockhaul", Path::new(words[1]))?;
        }
        Ok(server)
    }

    /// Starts nbdkit in the foreground, tied to this thread. `args` are its options, plugin and
    /// parameters.
    ///
    /// # Errors
    /// As [`PeerServer::start`].
    pub fn nbdkit(
        nbdkit: &PeerProgram,
        socket: &Path,
        args: &[&str],
    ) -> Result<PeerServer, String> {
        let mut command = nbdkit.tied_command();
        command.args(["--foreground", "--unix"]).arg(socket).args(args);
        PeerServer::start(command, socket)
    }

    /// Starts qemu-nbd for any number of clients one after another, tied to this thread. `args`
    /// are its options (`-f raw`, `-e 8` for as many clients at once, …) and the image.
    ///
    /// # Errors
    /// As [`PeerServer::start`].
    pub fn qemu_nbd(
        qemu_nbd: &PeerProgram,
        socket: &Path,
        args: &[&str],
    ) -> Result<PeerServer, String> {
        let mut command = qemu_nbd.tied_command();
        command.args(["--persistent", "--socket"]).arg(socket).args(args);
        PeerServer::start(command, socket)
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

    /// Its output on standard error so far.
    pub fn said(&self) -> String {
        self.said.text()
    }

    /// Waits until it has written these words to standard error; they may follow the event that
    /// they are about.
    ///
    /// # Errors
    /// All of its output, if they do not appear in time.
    pub fn says(&self, words: &str) -> Result<String, String> {
        self.says_any(&[words])
    }

    /// The same for any of several texts.
    ///
    /// # Errors
    /// Like [`PeerServer::says`].
    pub fn says_any(&self, words: &[&str]) -> Result<String, String> {
        let begun = Instant::now();
        loop {
            let said = self.said();
            if words.iter().any(|words| said.contains(words)) {
                return Ok(said);
            }
            if begun.elapsed() > Self::START {
                return Err(format!("none of {words:?}: {said}"));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Sends SIGTERM and waits.
    ///
    /// # Errors
    /// If it does not end in time; it is then killed.
    pub fn stop(mut self) -> Result<ExitStatus, String> {
        let pid = self.pid().to_string();
        // The shell's own kill: the standard library knows only SIGKILL.
        let asked = Command::new("sh").args(["-c", "kill -TERM \"$1\"", "sh", &pid]).status();
        asked.map_err(|error| format!("cannot start sh: {error}"))?;
        wait_within(&mut self.child, Self::STOP)
            .ok_or_else(|| format!("server {pid} did not end when asked to; {}", self.said()))
    }
}

impl Drop for PeerServer {
    fn drop(&mut self) {
        // Both fail only for a child that has already been reaped.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Whether a Unix socket of this path has a listener, without connecting to it.
fn is_listening(socket: &Path) -> bool {
    let Ok(table) = fs::read("/proc/net/unix") else {
        // Without the table, connecting is the only way to find out.
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
    use crate::tools::run::shell;
    use crate::tools::{ScratchDir, among_peers, output, skip_or_fail, until};

    const LIMIT: Duration = Duration::from_secs(60);

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
        let scratch = ScratchDir::new().unwrap();
        let path = scratch.socket("a b");
        assert!(!is_listening(&path));
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        assert!(is_listening(&path));
        drop(listener);
        // A program started by another test has a copy of the socket until it execs.
        until("the file is left, but nobody listens", || !is_listening(&path));
    }

    #[test]
    fn a_server_that_ends_tells_what_it_said() {
        let scratch = ScratchDir::new().unwrap();
        let why = PeerServer::start(shell("echo no luck >&2; exit 4"), &scratch.socket("s"));
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
        let scratch = ScratchDir::new().unwrap();
        let socket = scratch.socket("s");
        let server = PeerServer::nbdkit(&nbdkit, &socket, &["pattern", "3M"]).unwrap();
        let size = output(nbdinfo.command().args(["--size", &server.uri("any")]), LIMIT).unwrap();
        assert_eq!(size.stdout, b"3145728\n", "{}", String::from_utf8_lossy(&size.stderr));
        // nbdkit takes SIGTERM for an ordinary end.
        assert!(server.stop().unwrap().success());
        assert!(!is_listening(&socket));

        let socket = scratch.socket("t");
        let server = PeerServer::nbdkit(&nbdkit, &socket, &["-v", "memory", "1M"]).unwrap();
        let pid = server.pid();
        server.says("debug").unwrap();
        drop(server);
        assert!(!Path::new(&format!("/proc/{pid}")).exists());
        assert!(!is_listening(&socket));
    }

    #[test]
    fn qemu_nbd_serves_and_peers_find_each_other() {
        let qemu_nbd = crate::require_peer!("qemu-nbd");
        let scratch = ScratchDir::new().unwrap();
        let image = scratch.file("image");
        fs::File::create(&image).unwrap().set_len(1 << 20).unwrap();
        let args = ["-f", "raw", "-e", "4", image.to_str().unwrap()];
        let server = PeerServer::qemu_nbd(&qemu_nbd, &scratch.socket("s"), &args).unwrap();
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
        let scratch = ScratchDir::new().unwrap();
        let socket = scratch.socket("s");
        let start = || PeerServer::nbdkit(&nbdkit, &socket, &["memory", "1M"]).unwrap();
        let mut server = std::thread::scope(|scope| scope.spawn(start).join().unwrap());
        assert!(wait_within(&mut server.child, LIMIT).is_some(), "it is running still");
    }
}
