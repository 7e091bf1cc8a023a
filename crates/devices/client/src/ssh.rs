//! `nbd+ssh`: each connection runs the command `ssh`, which connects to a socket of the other
//! machine. Its configuration decides about keys, jump hosts and shared connections.

use std::fmt;
use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt as _;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};

use std::ffi::OsString;

use blockhaul_block::{Error, Kind, Result};
use blockhaul_io::Stream;

/// A socket of the machine that an SSH server runs on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SshAddress {
    /// Login name; none: that of the configuration of SSH, else of the user.
    pub user: Option<String>,
    /// Host name or address of the SSH server, or a name in the configuration of SSH.
    pub host: String,
    /// Port of the SSH server; none: that of the configuration of SSH, else 22.
    pub port: Option<u16>,
    /// Path of a Unix socket there; none: a port of `localhost`.
    pub socket: Option<Vec<u8>>,
    /// That port.
    pub nbd_port: u16,
    /// Whether SSH compresses what it transfers.
    pub compress: bool,
}

impl fmt::Display for SshAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.socket {
            Some(path) => write!(f, "Unix socket {}", String::from_utf8_lossy(path))?,
            None => write!(f, "port {}", self.nbd_port)?,
        }
        write!(f, " of {} through SSH", self.host)
    }
}

impl SshAddress {
    /// Starts `ssh`. The connection ends when the server or `ssh` ends; `ssh` ends with the
    /// connection.
    pub(crate) async fn dial(&self) -> Result<Stream> {
        let words = self.words();
        let started = blockhaul_io::offload(move || start(words));
        let started = started.await.map_err(|lost| Error::new(Kind::Io, "ssh").because(lost))?;
        let ours = started.map_err(|error| match error.kind() {
            ErrorKind::NotFound => Error::new(Kind::NotFound, "cannot start ssh: no such program")
                .with_remedy("install an SSH client"),
            _ => Error::system("cannot start ssh", error),
        })?;
        Stream::new(ours).map_err(|error| Error::system("ssh", error))
    }

    /// The arguments of `ssh`. The URI's parser refuses names that would be options.
    fn words(&self) -> Vec<OsString> {
        let mut words: Vec<OsString> = Vec::new();
        if self.compress {
            words.push("-C".into());
        }
        if let Some(port) = self.port {
            words.extend(["-p".into(), port.to_string().into()]);
        }
        if let Some(user) = &self.user {
            words.extend(["-l".into(), user.into()]);
        }
        match &self.socket {
            // Needs no program on the other machine.
            None => {
                let place = format!("localhost:{}", self.nbd_port);
                words.extend(["-W".into(), place.into(), "--".into(), (&self.host).into()]);
            }
            // -W knows no Unix sockets.
            Some(path) => {
                words.extend(["--".into(), (&self.host).into()]);
                words.extend(["nc".into(), "-U".into(), OsString::from_vec(quoted(path))]);
            }
        }
        words
    }
}

/// A path as one word for the shell of the other machine, which gets all words as one text.
fn quoted(path: &[u8]) -> Vec<u8> {
    let mut quoted = vec![b'\''];
    for byte in path {
        match byte {
            b'\'' => quoted.extend(br"'\''"),
            byte => quoted.push(*byte),
        }
    }
    quoted.push(b'\'');
    quoted
}

/// Starts `ssh` and returns the socket that it transfers.
fn start(words: Vec<OsString>) -> std::io::Result<OwnedFd> {
    let (ours, theirs) = UnixStream::pair()?;
    let theirs = OwnedFd::from(theirs);
    let child = Command::new("ssh")
        .args(words)
        .stdin(Stdio::from(theirs.try_clone()?))
        .stdout(Stdio::from(theirs))
        .spawn()?;
    std::thread::Builder::new().name("ssh".into()).spawn(move || await_end(child))?;
    Ok(ours.into())
}

/// Collects the exit status, so that the process does not stay in the process table.
fn await_end(mut child: Child) {
    match child.wait() {
        Ok(status) if status.success() => {}
        // It has printed why, on standard error.
        Ok(status) => log::debug!("ssh has ended with {status}"),
        Err(error) => log::debug!("ssh: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(user: Option<&str>, port: Option<u16>, socket: Option<&str>) -> String {
        let address = SshAddress {
            user: user.map(Into::into),
            host: "host".into(),
            port,
            socket: socket.map(|path| path.as_bytes().to_vec()),
            nbd_port: 7,
            compress: user.is_some(),
        };
        let words = address.words().into_iter().map(|word| word.into_string().unwrap());
        words.collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn the_command_leaves_to_the_configuration_what_the_uri_does_not_say() {
        assert_eq!(words(None, None, None), "-W localhost:7 -- host");
        assert_eq!(words(Some("me"), Some(22), None), "-C -p 22 -l me -W localhost:7 -- host");
        assert_eq!(words(None, None, Some("/a b'c")), r"-- host nc -U '/a b'\''c'");
    }
}
