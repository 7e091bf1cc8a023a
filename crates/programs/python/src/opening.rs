//! What a handle is opened from.

use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::Child;
use std::sync::Arc;
use std::time::Duration;

use blockhaul_block::{Error, Kind, Result};
use blockhaul_catalog::{ConnectionSettings, DeviceSpec, Intent, Layer, Stack};
use blockhaul_client::options::ConnectTarget;
use blockhaul_client::{ConnectOptions, OpenSocket, ServerAddress, Traffic};
use blockhaul_registry::device_registry;
use blockhaul_wire::handshake::GreetingForm;
use blockhaul_wire::handshake::client::ClientHandshakeResult;
use blockhaul_wire::{ReplyForm, RequestForm};

use crate::direct::DirectConnection;

/// Why a device is opened.
#[derive(Clone, Copy)]
pub(crate) enum OpenMode {
    /// It is only read.
    Read,
    /// It is written, too.
    Write,
    /// It is created with this many bytes, or emptied and resized, if it is a file.
    Create(u64),
}

/// What to open, and how.
pub(crate) struct OpenConfig {
    /// One word as on the command line, or the words of a command between `[` and `]`.
    pub(crate) words: Vec<OsString>,
    pub(crate) mode: OpenMode,
    /// Layers, the first innermost.
    pub(crate) layers: Vec<String>,
    /// Contexts besides `base:allocation`.
    pub(crate) contexts: Vec<String>,
    /// A connection is dropped after this long without a byte; zero: never.
    pub(crate) timeout: Duration,
    /// For a URI, and for a command with a socket: what is asked for in the handshake.
    pub(crate) handshake: Option<HandshakeOptions>,
    /// The words are a command whose standard input and output are the connection; the name of the export.
    pub(crate) export: Option<String>,
}

/// What a client asks for in a handshake.
#[derive(Clone, Copy)]
pub(crate) struct HandshakeOptions {
    pub(crate) structured: bool,
    pub(crate) extended: bool,
    /// `base:allocation`, besides the other contexts.
    pub(crate) allocation: bool,
}

/// An open device.
pub(crate) struct PythonStack {
    pub(crate) stack: Stack,
    /// The result of the handshake, for a URI.
    pub(crate) connection: Option<ConnectionInfo>,
    /// The connection, until a worker has it: what `stack` is over.
    pub(crate) direct: Option<DirectConnection>,
    /// The command at the other end of a socket. Dropped after the device.
    pub(crate) command: Option<CommandProcess>,
}

/// A command that serves on its standard input and output.
pub(crate) struct CommandProcess(Option<Child>);

impl CommandProcess {
    fn start(words: &[OsString]) -> Result<(CommandProcess, OpenSocket)> {
        let Some((program, rest)) = words.split_first() else {
            return Err(Error::new(Kind::Usage, "the command has no words"));
        };
        let cannot = |error| Error::system(format!("cannot start {}", program.display()), error);
        let (ours, theirs) = UnixStream::pair().map_err(cannot)?;
        let output = theirs.try_clone().map_err(cannot)?;
        let mut command = std::process::Command::new(program);
        let command = command.args(rest).stdin(OwnedFd::from(theirs)).stdout(OwnedFd::from(output));
        let child = command.spawn().map_err(cannot)?;
        Ok((CommandProcess(Some(child)), OpenSocket::new(ours.into())))
    }

    /// Its process ID.
    pub(crate) fn id(&self) -> Option<u32> {
        self.0.as_ref().map(Child::id)
    }
}

impl Drop for CommandProcess {
    fn drop(&mut self) {
        let Some(mut child) = self.0.take() else { return };
        // It ends when its connection is closed. This may be a worker, which must not wait. Both calls fail
        // only if there is no such process, or no thread.
        let _ = std::thread::Builder::new().name("command".into()).spawn(move || child.wait());
    }
}

/// What a handshake has led to.
#[derive(Clone)]
pub(crate) struct ConnectionInfo {
    pub(crate) protocol: &'static str,
    pub(crate) tls: bool,
    pub(crate) structured: bool,
    pub(crate) extended: bool,
    pub(crate) contexts: Vec<String>,
    /// The flags of the export.
    pub(crate) flags: u16,
    pub(crate) name: Option<String>,
    pub(crate) description: Option<String>,
    /// Minimum, preferred and maximum, if the server has sent them.
    pub(crate) block_sizes: Option<(u32, u32, u32)>,
    pub(crate) traffic: Arc<Traffic>,
}

/// Options of a connection that is dropped after `timeout` without a byte (zero: never).
pub(crate) fn connecting(timeout: Duration) -> ConnectOptions {
    ConnectOptions::default().connecting(&ConnectionSettings::with_timeout(timeout))
}

/// The device that these words describe.
///
/// # Errors
/// [`Kind::Usage`] if there is none, or it is a standard stream.
pub(crate) fn spec(words: &[OsString]) -> Result<DeviceSpec> {
    match words {
        [] => Err(Error::new(
            Kind::Usage,
            "a device is a text, or a list with the words of a command",
        )),
        [word] => match DeviceSpec::parse(word)? {
            DeviceSpec::Pipe => {
                Err(Error::new(Kind::Usage, "- is a standard stream, not a device"))
            }
            spec => Ok(spec),
        },
        [open, inner @ .., close] if open == "[" && close == "]" => {
            Ok(DeviceSpec::Command(inner.to_vec()))
        }
        words => Ok(DeviceSpec::Command(words.to_vec())),
    }
}

impl OpenConfig {
    /// Opens it, on a worker.
    pub(crate) async fn open(self) -> Result<PythonStack> {
        match self.handshake {
            Some(asking) => self.connect(asking).await,
            None => self.open_device().await,
        }
    }

    fn connections(&self) -> ConnectionSettings {
        let contexts = self.contexts.clone();
        ConnectionSettings { contexts, ..ConnectionSettings::with_timeout(self.timeout) }
    }

    async fn open_device(self) -> Result<PythonStack> {
        let registry = device_registry().connecting(&self.connections());
        let spec = spec(&self.words)?;
        let layers = self.layers.iter().map(|text| registry.layer(text));
        let mut layers = layers.collect::<Result<Vec<Arc<dyn Layer>>>>()?;
        let stack = match self.mode {
            OpenMode::Read => {
                layers.push(registry.layer("readonly")?);
                registry.open(&spec, layers, Intent::READ).await?
            }
            OpenMode::Write => registry.open(&spec, layers, Intent::WRITE).await?,
            OpenMode::Create(size) => {
                let (stack, preparation) =
                    registry.open_target(&spec, layers, Intent::target(size)).await?;
                preparation.run().await?;
                stack
            }
        };
        Ok(PythonStack { stack, connection: None, direct: None, command: None })
    }

    async fn connect(self, asking: HandshakeOptions) -> Result<PythonStack> {
        let (place, command) = place(&self.words, self.export)?;
        let mut options = connecting(self.timeout);
        if !asking.allocation {
            options.contexts.clear();
        }
        options.contexts.extend(self.contexts);
        options.structured = asking.structured;
        options.extended = asking.extended;
        options.full_info = true;
        options.tls = place.tls.clone();
        let ConnectTarget { name, address, export, .. } = place;
        let opened = blockhaul_client::open(&name, &address, &export, &options).await?;
        let connection = Some(ConnectionInfo::of(&opened.negotiated, opened.traffic()));
        let (device, direct) = match opened.blocking()? {
            Ok(blocking) => {
                let direct = DirectConnection::new(blocking);
                (direct.device(), Some(direct))
            }
            Err(opened) => (opened.device()?, None),
        };
        let mut stack = Stack::over(device);
        if !matches!(self.mode, OpenMode::Write) {
            let registry = device_registry();
            stack = stack.with_layer(registry.layer("readonly")?).await?;
        }
        Ok(PythonStack { stack, connection, direct, command })
    }
}

/// Where to connect to: a URI, or an export of a command, which is started.
pub(crate) fn place(
    words: &[OsString],
    export: Option<String>,
) -> Result<(ConnectTarget, Option<CommandProcess>)> {
    let Some(export) = export else {
        let uri = words.first().and_then(|word| word.to_str()).unwrap_or_default();
        return Ok((ConnectTarget::parse(uri)?, None));
    };
    let (command, socket) = CommandProcess::start(words)?;
    let name = words.iter().map(|word| word.display().to_string()).collect::<Vec<_>>();
    let name = name.join(" ");
    let address = ServerAddress::Open(socket);
    Ok((ConnectTarget { name, address, export, tls: None }, Some(command)))
}

/// The name of a protocol, as libnbd has it.
pub(crate) fn protocol_name(protocol: GreetingForm) -> &'static str {
    match protocol {
        GreetingForm::Oldstyle => "oldstyle",
        GreetingForm::Newstyle => "newstyle",
        GreetingForm::FixedNewstyle => "newstyle-fixed",
    }
}

impl ConnectionInfo {
    fn of(negotiated: &ClientHandshakeResult, traffic: Arc<Traffic>) -> ConnectionInfo {
        let info = &negotiated.info;
        let sizes = info.block_sizes;
        ConnectionInfo {
            protocol: protocol_name(negotiated.protocol),
            tls: negotiated.tls,
            structured: negotiated.replies != ReplyForm::Simple,
            extended: negotiated.headers == RequestForm::Extended,
            contexts: negotiated.contexts.iter().map(|context| context.name.clone()).collect(),
            flags: info.flags.bits(),
            name: info.name.clone(),
            description: info.description.clone(),
            block_sizes: sizes.map(|sizes| (sizes.minimum, sizes.preferred, sizes.maximum)),
            traffic,
        }
    }
}
