//! `--single`: the client at standard input and output, as with inetd and ssh. The monitor protocol
//! may have such a client, too.

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::mpsc;
use std::time::Duration;

use rustix::stdio::{stdin, stdout};

use crate::exit::{CommandFailure, FAILED, plain};

/// Bytes moved at a time without a socket.
const PIECE: usize = 64 << 10;

/// The connection to the client at standard input and output.
pub struct SingleClient {
    /// The server's end.
    pub socket: OwnedFd,
    /// Signals that everything has been written to standard output, if that is a pipe.
    gone: Option<mpsc::Receiver<()>>,
}

impl SingleClient {
    /// Takes standard input and output, for NBD.
    pub fn take() -> Result<SingleClient, CommandFailure> {
        if rustix::termios::isatty(stdin()) {
            let text = "standard input is a terminal: --single is for use by inetd, ssh and programs that \
                        start a server";
            return Err(CommandFailure::usage(text));
        }
        Self::take_any()
    }

    /// The same for a protocol that may be typed. A socket (inetd, socketpair) is served directly,
    /// two pipes (ssh) through a socket.
    pub fn take_any() -> Result<SingleClient, CommandFailure> {
        let cannot = |error: std::io::Error| {
            let text = format!("cannot serve standard input and output: {}", plain(&error));
            CommandFailure::new(FAILED, text)
        };
        let duplicate =
            |fd| rustix::io::fcntl_dupfd_cloexec(fd, 3).map_err(|errno| cannot(errno.into()));
        let socket = duplicate(stdin())?;
        if rustix::net::sockopt::socket_type(&socket).is_ok() {
            return Ok(SingleClient { socket, gone: None });
        }
        let (server, client) = UnixStream::pair().map_err(cannot)?;
        let input = std::fs::File::from(socket);
        let output = std::fs::File::from(duplicate(stdout())?);
        let to_server = client.try_clone().map_err(cannot)?;
        let from_server = client;
        let (sender, gone) = mpsc::channel();
        let thread = |name: &str, work: Box<dyn FnOnce() + Send>| {
            std::thread::Builder::new().name(name.into()).spawn(work).map(drop).map_err(cannot)
        };
        thread(
            "stdin",
            Box::new(move || {
                pump(input, &to_server);
                // Fails only if the server has already closed.
                let _ = to_server.shutdown(std::net::Shutdown::Write);
            }),
        )?;
        thread(
            "stdout",
            Box::new(move || {
                pump(&from_server, output);
                // A client that reads no more need not send, either.
                let _ = from_server.shutdown(std::net::Shutdown::Both);
                // Only a stopping server waits for this.
                let _ = sender.send(());
            }),
        )?;
        Ok(SingleClient { socket: server.into(), gone: Some(gone) })
    }

    /// The socket, and what to wait for after it was closed.
    pub fn split(self) -> (OwnedFd, PendingOutput) {
        (self.socket, PendingOutput(self.gone))
    }
}

/// Output still in transit to standard output.
pub struct PendingOutput(Option<mpsc::Receiver<()>>);

impl PendingOutput {
    /// Waits until it is written, for a short time: a client that does not read must not delay the
    /// end.
    pub fn wait(&self, patience: Duration) {
        if let Some(gone) = &self.0 {
            let _ = gone.recv_timeout(patience);
        }
    }
}

/// Moves bytes until one side ends.
fn pump(mut from: impl Read, mut to: impl Write) {
    let mut buffer = vec![0; PIECE];
    loop {
        match from.read(&mut buffer) {
            Ok(0) => return,
            Ok(count) if to.write_all(&buffer[..count]).is_err() => return,
            Ok(_) => {}
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(_) => return,
        }
    }
}
