//! Connections through programs: `nbd+ssh`, for which `ssh` connects to a socket of the other machine; and
//! programs that serve their standard input and output, such as `ssh` with a command for `ssh:`. The
//! configuration of SSH decides about keys, jump hosts and shared connections.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt as _;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use blockhaul_block::{Error, Kind, Result};
use blockhaul_catalog::{percent_decode, without_login_password};
use blockhaul_io::Stream;
use blockhaul_wire::uri::{Transport, Uri};

/// Exit status of `ssh` that has not connected.
const SSH_FAILED: i32 = 255;
/// Exit status of a shell that has not found a program.
const NOT_FOUND: i32 = 127;
/// Number of times that the exit status is looked for, and the interval.
const LOOKS: u32 = 30;
const LOOK: Duration = Duration::from_millis(10);

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
        dial("ssh".into(), self.words(), ExitRecord::default()).await
    }

    /// The options of `ssh`. The URI's parser refuses names that would be options.
    fn login(&self) -> Vec<OsString> {
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
        words
    }

    /// The arguments of `ssh`.
    fn words(&self) -> Vec<OsString> {
        let mut words = self.login();
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

/// A program that serves NBD on its standard input and output. Each connection starts one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StdioServer {
    program: OsString,
    words: Vec<OsString>,
    exit: ExitRecord,
}

/// The exit status of the last program that has ended.
#[derive(Debug, Clone, Default)]
struct ExitRecord(Arc<Mutex<Option<i32>>>);

/// It says nothing about which server it is.
impl PartialEq for ExitRecord {
    fn eq(&self, _: &ExitRecord) -> bool {
        true
    }
}

impl Eq for ExitRecord {}

impl ExitRecord {
    fn set(&self, status: Option<i32>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = status;
    }

    fn get(&self) -> Option<i32> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Display for StdioServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "standard input of {}", self.program.display())
    }
}

impl StdioServer {
    /// The program with these words, if it runs this program's `serve --single` somewhere.
    pub(crate) fn of_command(words: &[OsString]) -> Option<StdioServer> {
        let (program, words) = words.split_first()?;
        let mut serve = words.iter().skip_while(|word| word.as_os_str() != "serve");
        let is_single = serve.any(|word| word.as_os_str() == "--single");
        // The word blockhaul in front means this program itself, which needs no other one between.
        (is_single && program.as_os_str() != "blockhaul")
            .then(|| StdioServer::new(program.clone(), words.to_vec()))
    }

    /// A disk of another machine, `//[USER@]HOST[:PORT]/PATH`: `ssh` runs this program there.
    ///
    /// # Errors
    /// [`Kind::Usage`] if the text is none.
    pub(crate) fn of_ssh(text: &str, writes: bool) -> Result<StdioServer> {
        let wrong = |why: &str| {
            let usage = "write ssh://[USER@]HOST[:PORT]/PATH";
            let uri = format!("ssh:{text}");
            Error::new(Kind::Usage, format!("{}: {why}; {usage}", without_login_password(&uri)))
        };
        if text.contains('?') {
            return Err(wrong("it has no options, and a question mark in PATH is %3F"));
        }
        let parts = text.strip_prefix("//").and_then(|rest| rest.split_once('/'));
        let parts = parts.filter(|(host, path)| !host.is_empty() && !path.is_empty());
        let (authority, path) = parts.ok_or_else(|| wrong("there is no host, or no path"))?;
        let uri = Uri::parse(&format!("nbd+ssh://{authority}/"));
        let uri = uri.map_err(|error| wrong(&error.to_string()))?;
        let Transport::Ssh { user, host, port, .. } = uri.transport else {
            return Err(wrong("there is no host"));
        };
        let (socket, nbd_port, compress) = (None, 0, false);
        let mut words =
            SshAddress { user, host: host.clone(), port, socket, nbd_port, compress }.login();
        words.extend(["--", &host, "blockhaul", "serve", "--single"].map(OsString::from));
        if !writes {
            words.push("-r".into());
        }
        let path = percent_decode(path)?;
        let path = match path.strip_prefix("~/") {
            // ssh begins in the home directory.
            Some(rest) => format!("./{rest}"),
            None => format!("/{path}"),
        };
        // The bytes of the file, whatever they are: who reads an image there names its format here.
        let device = format!("file:{}", path.replace('%', "%25").replace('?', "%3f"));
        words.extend(["--".into(), OsString::from_vec(quoted(device.as_bytes()))]);
        Ok(StdioServer::new("ssh".into(), words))
    }

    fn new(program: OsString, words: Vec<OsString>) -> StdioServer {
        StdioServer { program, words, exit: ExitRecord::default() }
    }

    /// Starts the program. It ends with the connection.
    pub(crate) async fn dial(&self) -> Result<Stream> {
        self.exit.set(None);
        dial(self.program.clone(), self.words.clone(), self.exit.clone()).await
    }

    /// The error of a connection that the program has closed, with a remedy by its exit status.
    pub(crate) async fn explained(&self, error: Error) -> Error {
        if error.kind() != Kind::Disconnected {
            return error;
        }
        // The connection ends a moment before the program.
        for _ in 0..LOOKS {
            if self.exit.get().is_some() {
                break;
            }
            blockhaul_io::sleep(LOOK).await;
        }
        error.or_remedy(match self.exit.get() {
            Some(SSH_FAILED) if self.program == "ssh" => {
                "see the message of ssh above: log in once by hand, with the same user, host and port"
            }
            Some(NOT_FOUND) => "install blockhaul there, in the PATH of logins without a terminal",
            _ => "see the message of the server above: it must be able to open the disk",
        })
    }
}

/// Starts a program for a connection.
async fn dial(program: OsString, words: Vec<OsString>, exit: ExitRecord) -> Result<Stream> {
    let name = program.to_string_lossy().into_owned();
    let started = blockhaul_io::offload(move || start(&program, words, exit));
    let started = started.await.map_err(|lost| Error::new(Kind::Io, name.clone()).because(lost))?;
    let ours = started.map_err(|error| match error.kind() {
        ErrorKind::NotFound => {
            let text = format!("cannot start {name}: no such program");
            let remedy = if name == "ssh" { "install an SSH client" } else { "check its name" };
            Error::new(Kind::NotFound, text).with_remedy(remedy)
        }
        _ => Error::system(format!("cannot start {name}"), error),
    })?;
    Stream::new(ours).map_err(|error| Error::system(name, error))
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

/// Starts a program and returns the other end of the socket that is its standard input and output.
fn start(program: &OsStr, words: Vec<OsString>, exit: ExitRecord) -> std::io::Result<OwnedFd> {
    let (ours, theirs) = UnixStream::pair()?;
    let theirs = OwnedFd::from(theirs);
    let child = Command::new(program)
        .args(words)
        .stdin(Stdio::from(theirs.try_clone()?))
        .stdout(Stdio::from(theirs))
        .spawn()?;
    std::thread::Builder::new().name("ssh".into()).spawn(move || await_end(child, &exit))?;
    Ok(ours.into())
}

/// Collects the exit status, so that the process does not stay in the process table.
fn await_end(mut child: Child, exit: &ExitRecord) {
    let ended = child.wait();
    exit.set(ended.as_ref().ok().and_then(std::process::ExitStatus::code));
    match ended {
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
    fn a_disk_of_another_machine_is_served_there() {
        let words = |text: &str, writes| {
            let words = StdioServer::of_ssh(text, writes)?.words;
            Ok::<_, Error>(words.join(OsStr::new(" ")).into_string().unwrap())
        };
        let found = words("//me@host:2222/a%20b'c.raw", false).unwrap();
        assert_eq!(
            found,
            r"-p 2222 -l me -- host blockhaul serve --single -r -- 'file:/a b'\''c.raw'"
        );
        let found = words("//host/~/d.raw", true).unwrap();
        assert_eq!(found, "-- host blockhaul serve --single -- 'file:./d.raw'");
        for text in
            ["host", "//host", "//host/", "///x", "//-oX/x", "//h/x?y=1", "//h:0/x", "//h/%zz"]
        {
            assert_eq!(words(text, false).unwrap_err().kind(), Kind::Usage, "{text}");
        }
    }

    #[test]
    fn the_command_leaves_to_the_configuration_what_the_uri_does_not_say() {
        assert_eq!(words(None, None, None), "-W localhost:7 -- host");
        assert_eq!(words(Some("me"), Some(22), None), "-C -p 22 -l me -W localhost:7 -- host");
        assert_eq!(words(None, None, Some("/a b'c")), r"-- host nc -U '/a b'\''c'");
    }
}
