//! Dialling and the handshake.

use std::cell::Cell;
use std::fmt;
use std::net::{IpAddr, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use blockhaul_block::{Device, Error, Kind, Result};
use blockhaul_catalog::ConnectionSettings;
use blockhaul_io::Stream;
use blockhaul_wire::InfoSet;
use blockhaul_wire::handshake::client::{ClientHandshake, ClientHandshakeResult};
use blockhaul_wire::handshake::negotiation::{
    Negotiation, NegotiationGoal, NegotiationOptions, NegotiationStep,
};

use crate::blocking::BlockingConnection;
use crate::device;
use crate::device::{Companions, ExportProperties};
use crate::link::{HandshakeLink, receive_error, refused};
use crate::ssh::{SshAddress, StdioServer};
use crate::traffic::Traffic;
use crate::upgrade::{HttpAddress, dial_http};

/// Time for one address of a host that has others: an unreachable one (broken IPv6) must not use up
/// all the time. Long enough for one retransmission.
const ADDRESS_MAX: Duration = Duration::from_millis(2500);

/// Where a server listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ServerAddress {
    /// A Unix socket.
    Unix(PathBuf),
    /// A host name or address, and a port.
    Tcp(String, u16),
    /// A machine's context ID and a port (vsock(7)).
    Vsock(u32, u32),
    /// A socket of the machine that an SSH server runs on.
    Ssh(Box<SshAddress>),
    /// A program that serves its standard input and output, started for each connection.
    Stdio(Box<StdioServer>),
    /// A server that speaks NBD after an HTTP request, over TLS if the options demand that.
    Http(Box<HttpAddress>),
    /// A socket that is connected already.
    Open(OpenSocket),
}

/// A socket that is connected to a server: good for one connection.
#[derive(Debug, Clone)]
pub struct OpenSocket(Arc<Mutex<Option<OwnedFd>>>);

impl OpenSocket {
    /// This socket.
    pub fn new(socket: OwnedFd) -> OpenSocket {
        OpenSocket(Arc::new(Mutex::new(Some(socket))))
    }

    fn take(&self) -> Result<Stream> {
        let socket = self.0.lock().expect("no panic under this lock").take();
        let socket = socket.ok_or_else(|| {
            Error::new(
                Kind::Disconnected,
                "a socket that is connected already cannot be dialled again",
            )
        })?;
        Stream::new(socket).map_err(|error| Error::system("connect", error))
    }
}

impl PartialEq for OpenSocket {
    fn eq(&self, other: &OpenSocket) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for OpenSocket {}

impl ServerAddress {
    /// Whether this process listens there. The addresses of SSH servers are not looked at.
    pub(crate) async fn is_own(&self) -> bool {
        if blockhaul_io::is_simulated() {
            return false;
        }
        let is_own = match self.clone() {
            ServerAddress::Unix(path) => {
                blockhaul_io::offload(move || blockhaul_io::listens_on_unix(&path)).await
            }
            ServerAddress::Tcp(host, port) => {
                let look = move || {
                    let found = (host.as_str(), port).to_socket_addrs();
                    found.is_ok_and(|mut found| found.any(blockhaul_io::listens_on_tcp))
                };
                blockhaul_io::offload(look).await
            }
            ServerAddress::Http(http) => return Box::pin(http.address.is_own()).await,
            ServerAddress::Vsock(..)
            | ServerAddress::Ssh(_)
            | ServerAddress::Stdio(_)
            | ServerAddress::Open(_) => return false,
        };
        is_own.unwrap_or(false)
    }

    /// Whether each connection passes a program between client and server, which may start a server for it.
    fn is_relayed(&self) -> bool {
        matches!(self, ServerAddress::Http(_) | ServerAddress::Ssh(_) | ServerAddress::Stdio(_))
    }

    /// The error of a connection that has ended, with what is known of the program that made it.
    async fn explained(&self, error: Error) -> Error {
        match self {
            ServerAddress::Stdio(server) => server.explained(error).await,
            _ => error,
        }
    }

    /// Whether each connection has a server of its own.
    fn has_own_server(&self) -> bool {
        matches!(self, ServerAddress::Stdio(_))
    }

    /// Whether NBD begins after an HTTP request: TLS is then around both.
    fn is_http(&self) -> bool {
        matches!(self, ServerAddress::Http(_))
    }
}

impl fmt::Display for ServerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ServerAddress::Unix(path) => write!(f, "Unix socket {}", path.display()),
            ServerAddress::Tcp(host, port) => write!(f, "{host} port {port}"),
            ServerAddress::Vsock(cid, port) => write!(f, "vsock {cid} port {port}"),
            ServerAddress::Ssh(ssh) => ssh.fmt(f),
            ServerAddress::Stdio(server) => server.fmt(f),
            ServerAddress::Http(http) => http.address.fmt(f),
            ServerAddress::Open(_) => f.write_str("a connected socket"),
        }
    }
}

/// Whether a host, by its name or address, is this machine: nobody else reads what is sent to it.
pub fn is_this_machine(host: &str) -> bool {
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// Options of a connection.
#[derive(Debug, Clone)]
pub struct ConnectOptions {
    /// Time for dialling and the handshake together; zero: none.
    pub connect_timeout: Duration,
    /// Drop the connection when requests are in flight and no byte has moved either way for this
    /// long; zero: never.
    pub timeout: Duration,
    /// Minimum rate in bytes per second at which reads and writes must complete while some are in
    /// flight, measured over `timeout` (60 s if that is zero); below it the connection is dropped.
    /// 0: no minimum.
    pub min_rate: u64,
    /// Request extended headers.
    pub extended: bool,
    /// Request structured replies.
    pub structured: bool,
    /// Contexts to request.
    pub contexts: Vec<String>,
    /// Request name and description, too.
    pub full_info: bool,
    /// Require TLS, with these settings: nothing is sent without it.
    pub tls: Option<Arc<blockhaul_tls::TlsConnector>>,
}

impl Default for ConnectOptions {
    fn default() -> ConnectOptions {
        ConnectOptions {
            connect_timeout: Duration::from_secs(30),
            timeout: Duration::from_secs(60),
            min_rate: 0,
            extended: true,
            structured: true,
            contexts: vec![blockhaul_block::BASE_ALLOCATION.to_string()],
            full_info: false,
            tls: None,
        }
    }
}

impl ConnectOptions {
    /// The same options with these settings. Contexts are added to those of these options.
    #[must_use]
    pub fn connecting(&self, settings: &ConnectionSettings) -> ConnectOptions {
        let ConnectionSettings { timeout, min_rate, contexts } = settings;
        let mut options = ConnectOptions { timeout: *timeout, min_rate: *min_rate, ..self.clone() };
        if !timeout.is_zero() {
            options.connect_timeout = options.connect_timeout.min(*timeout);
        }
        let more = contexts.iter().filter(|context| !self.contexts.contains(context));
        options.contexts.extend(more.cloned());
        options
    }
}

/// An open connection.
pub struct DeviceConnection {
    /// The export, as a device.
    pub device: Arc<dyn Device>,
    /// The result of the negotiation.
    pub negotiated: ClientHandshakeResult,
}

/// An open connection that nobody uses yet.
pub struct NewConnection {
    name: String,
    link: HandshakeLink,
    /// The result of the negotiation.
    pub negotiated: ClientHandshakeResult,
    patience: (Duration, u64),
}

impl NewConnection {
    /// What the connection has sent and received, and what it will.
    pub fn traffic(&self) -> Arc<Traffic> {
        self.link.traffic.clone()
    }

    /// The connection as a device; its tasks run on this worker.
    ///
    /// # Errors
    /// If the export is longer than any device.
    pub fn device(self) -> Result<Arc<dyn Device>> {
        device::open(&self.name, self.link, &self.negotiated, self.patience, Companions::default())
    }

    /// The connection for threads that wait. Not with TLS, whose records belong to workers, and not with
    /// a minimum rate: then it is returned.
    ///
    /// # Errors
    /// If the export is longer than any device, or the socket cannot be used.
    pub fn blocking(self) -> Result<std::result::Result<BlockingConnection, NewConnection>> {
        let (timeout, min_rate) = self.patience;
        if self.negotiated.tls || min_rate > 0 {
            return Ok(Err(self));
        }
        let export = Arc::new(ExportProperties::over(&self.link, &self.name, &self.negotiated));
        BlockingConnection::new(&self.link, export, timeout).map(Ok)
    }
}

/// Connects to an export, for a caller that decides afterwards who carries out its requests.
pub async fn open(
    name: &str,
    address: &ServerAddress,
    export: &str,
    options: &ConnectOptions,
) -> Result<NewConnection> {
    let opened = transmission(address, export, options).await.and_then(|(link, ended)| {
        let HandshakeEnd::Transmission(negotiated) = ended else {
            return Err(Error::new(Kind::Io, "the handshake stopped too early"));
        };
        let patience = (options.timeout, options.min_rate);
        Ok(NewConnection { name: name.to_string(), link, negotiated: *negotiated, patience })
    });
    opened.map_err(|error| at(name, address, error))
}

/// Connects to an export. `name` is for messages: what the user typed.
pub async fn connect(
    name: &str,
    address: &ServerAddress,
    export: &str,
    options: &ConnectOptions,
) -> Result<DeviceConnection> {
    connect_keeping(Companions::default(), name, address, export, options).await
}

/// The same; the device keeps its companions.
pub async fn connect_keeping(
    companions: Companions,
    name: &str,
    address: &ServerAddress,
    export: &str,
    options: &ConnectOptions,
) -> Result<DeviceConnection> {
    let NewConnection { link, negotiated, patience, .. } =
        open(name, address, export, options).await?;
    let device = device::open(name, link, &negotiated, patience, companions);
    let device = device.map_err(|error| at(name, address, error))?;
    Ok(DeviceConnection { device, negotiated })
}

/// Connects and negotiates everything, up to the transmission phase.
pub(crate) async fn transmission(
    address: &ServerAddress,
    export: &str,
    options: &ConnectOptions,
) -> Result<(HandshakeLink, HandshakeEnd)> {
    let wants = NegotiationOptions {
        contexts: options.contexts.clone(),
        tls: options.tls.is_some() && !address.is_http(),
        extended: options.extended,
        structured: options.structured,
        infos: InfoSet {
            name: options.full_info,
            description: options.full_info,
            block_size: true,
        },
        ..NegotiationOptions::new(export)
    };
    met(address, wants, options).await
}

/// How a negotiation ended.
pub(crate) enum HandshakeEnd {
    Transmission(Box<ClientHandshakeResult>),
    Options(Box<ClientHandshake>),
}

/// Connects and negotiates headers and replies, but stays in the handshake.
pub(crate) async fn connect_for_options(
    address: &ServerAddress,
    options: &ConnectOptions,
) -> Result<(HandshakeLink, HandshakeEnd)> {
    let wants = NegotiationOptions {
        tls: options.tls.is_some() && !address.is_http(),
        extended: options.extended,
        structured: options.structured,
        end: NegotiationGoal::Options,
        ..NegotiationOptions::new("")
    };
    met(address, wants, options).await
}

// nbd: tls.no-memory
/// Connects and negotiates, within the timeout.
async fn met(
    address: &ServerAddress,
    wants: NegotiationOptions,
    options: &ConnectOptions,
) -> Result<(HandshakeLink, HandshakeEnd)> {
    let awaited = WaitReason::new("connection");
    let work = async {
        let negotiation = Negotiation::new(wants).map_err(|error| refused(&error))?;
        let mut link = match address {
            ServerAddress::Http(http) => dial_http(http, options, &awaited).await?,
            address => HandshakeLink::new(dial(address).await?),
        };
        let ended = negotiate(&mut link, negotiation, options, &awaited).await;
        let mut ended = match ended {
            Ok(ended) => ended,
            Err(error) => return Err(address.explained(link.doubted(error)).await),
        };
        link.is_relayed = address.is_relayed();
        link.has_own_server = address.has_own_server();
        if let HandshakeEnd::Transmission(negotiated) = &mut ended {
            // Also if the negotiation has not seen it.
            negotiated.tls = options.tls.is_some();
        }
        Ok((link, ended))
    };
    awaited.within(options.connect_timeout, work).await
}

/// What is currently awaited, for the message on a timeout.
pub(crate) struct WaitReason(Cell<&'static str>);

impl WaitReason {
    pub(crate) fn new(what: &'static str) -> WaitReason {
        WaitReason(Cell::new(what))
    }

    /// Something else is awaited from here on.
    pub(crate) fn set(&self, what: &'static str) {
        self.0.set(what);
    }

    /// Runs `work` with a timeout (zero: none); the error names what was awaited.
    pub(crate) async fn within<T>(
        &self,
        time: Duration,
        work: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        if time.is_zero() {
            return work.await;
        }
        blockhaul_io::timeout(time, work).await.unwrap_or_else(|blockhaul_io::TimeoutError| {
            let what = self.0.get();
            let text = format!("no {what} within {} s", time.as_secs_f32());
            Err(match what {
                GREETING => {
                    Error::new(Kind::TimedOut, text + ": is this an NBD server?").complete()
                }
                _ => Error::new(Kind::TimedOut, text),
            })
        })
    }
}

/// The first message of a server.
const GREETING: &str = "greeting";

/// Adds the name and address to an error, and what helps against errors of this kind at a server.
pub(crate) fn at(name: &str, address: &ServerAddress, error: Error) -> Error {
    let error = match error.kind() {
        Kind::NotFound => error.or_remedy("check that the server runs, and where it listens"),
        Kind::Refused => error.or_remedy("check what the server requires"),
        Kind::Io => error.or_remedy("check that an NBD server listens there"),
        _ => error,
    };
    let text = error.text();
    let what = if text.starts_with("the server refused") {
        "cannot open an export at"
    } else {
        "cannot connect to"
    };
    error.reworded(format!("{what} {address}: {text}")).on(&name.into())
}

pub(crate) async fn dial(address: &ServerAddress) -> Result<Stream> {
    match address {
        ServerAddress::Http(_) => Err(Error::new(Kind::Usage, "an HTTP server behind another one")),
        ServerAddress::Open(socket) => socket.take(),
        ServerAddress::Vsock(cid, port) => {
            let connected = Stream::connect_vsock(*cid, *port).await;
            connected.map_err(|error| Error::system("connect", error))
        }
        ServerAddress::Ssh(ssh) => ssh.dial().await,
        ServerAddress::Stdio(server) => server.dial().await,
        ServerAddress::Unix(path) => {
            Stream::connect_unix(path).await.map_err(|error| Error::system("connect", error))
        }
        ServerAddress::Tcp(host, port) => {
            let target = (host.clone(), *port);
            let found =
                blockhaul_io::offload(move || target.to_socket_addrs().map(Vec::from_iter)).await;
            let found = found.map_err(|lost| Error::new(Kind::Io, "look-up").because(lost))?;
            let addresses = found.map_err(|error| {
                Error::new(Kind::NotFound, format!("cannot look up host {host:?}"))
                    .because(error)
                    .with_remedy("check the name of the host")
            })?;
            let mut last = Error::new(Kind::NotFound, format!("host {host:?} has no address"));
            let mut addresses = addresses.into_iter().peekable();
            while let Some(address) = addresses.next() {
                let connecting = Stream::connect_tcp(address);
                // The last one has all the remaining time.
                let connected = match addresses.peek() {
                    None => connecting.await,
                    Some(_) => blockhaul_io::timeout(ADDRESS_MAX, connecting).await.unwrap_or_else(
                        |blockhaul_io::TimeoutError| Err(std::io::ErrorKind::TimedOut.into()),
                    ),
                };
                match connected {
                    Ok(stream) => return Ok(stream),
                    Err(error) => last = Error::system(format!("connect to {address}"), error),
                }
            }
            Err(last)
        }
    }
}

async fn negotiate(
    link: &mut HandshakeLink,
    mut negotiation: Negotiation,
    options: &ConnectOptions,
    awaited: &WaitReason,
) -> Result<HandshakeEnd> {
    let mut out = Vec::new();
    awaited.0.set(GREETING);
    loop {
        let step = negotiation.receive(link.window.bytes(), &mut out);
        // A client that has greeted expects a reply.
        if !out.is_empty() {
            awaited.0.set("answer in the handshake");
        }
        // Send pending messages first, including the end of the session after a refusal.
        let sent = link.say(&mut out).await;
        let (used, step) = step.map_err(|error| refused(&error))?;
        sent?;
        link.consume(used);
        link.unanswered &= used == 0;
        match step {
            NegotiationStep::NeedMore { bytes } => {
                if bytes > link.window.capacity() {
                    link.window.grow(bytes);
                }
                let more = link.window.fill(&link.stream).await;
                if !more.map_err(receive_error)? {
                    negotiation
                        .closed(link.window.bytes())
                        .map_err(|error| refused(&error).during_handshake())?;
                    return Err(Error::new(Kind::Disconnected, "the server closed the connection"));
                }
            }
            // nbd: tls.client-upgrades
            NegotiationStep::StartTls => {
                let Some(connector) = &options.tls else {
                    return Err(Error::new(Kind::Io, "the server started TLS without a request"));
                };
                awaited.0.set("answer in the handshake of TLS");
                // nbd: abort.hard-if-needed
                link.secure(connector).await?;
                negotiation.tls_started().map_err(|error| refused(&error))?;
            }
            NegotiationStep::Transmission(negotiated) => {
                return Ok(HandshakeEnd::Transmission(negotiated));
            }
            NegotiationStep::Options => {
                return Ok(HandshakeEnd::Options(Box::new(negotiation.into_handshake())));
            }
        }
    }
}

/// Marks the end of the stream during the handshake.
trait HandshakeContext {
    fn during_handshake(self) -> Error;
}

impl HandshakeContext for Error {
    fn during_handshake(self) -> Error {
        match self.kind() {
            Kind::Io => Error::new(Kind::Disconnected, self.text()),
            _ => self,
        }
    }
}
