//! The NBD schemes and `[ CMD … ]` for the registry.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use blockhaul_block::{Device, Error, Kind, Result};
use blockhaul_catalog::{
    Backend, BackendTarget, Claim, ConnectionSettings, HandleOpener, ImageFormat, OpenFuture,
    OpenedDevice, StorageId, StorageIds, without_login_password,
};
use blockhaul_wire::uri::{HttpUri, TlsParameters, TlsType, Transport, Uri, is_http};

use crate::connect::{ConnectOptions, ServerAddress, connect_keeping};
use crate::link::insecure;
use crate::ssh::{SshAddress, StdioServer};
use crate::upgrade::HttpAddress;
use crate::{Companions, DeviceConnection, ServerProcess};

/// Interval and number of checks whether a server has ended: its sockets close some time before its
/// status is known.
const ENDING_STEP: Duration = Duration::from_millis(10);
const ENDING_STEPS: u32 = 20;

/// How often, and at which interval, an export that is in use is tried again: for a second.
const CLAIM_TRIES: u32 = 40;
const CLAIM_AGAIN: Duration = Duration::from_millis(25);

/// The backends of this crate, connecting with these options.
pub fn all(options: ConnectOptions) -> Vec<Arc<dyn Backend>> {
    let options = Arc::new(options);
    vec![Arc::new(NbdUri { options: options.clone() }), Arc::new(NbdCommand { options })]
}

struct NbdUri {
    options: Arc<ConnectOptions>,
}

impl Backend for NbdUri {
    fn schemes(&self) -> &'static [&'static str] {
        &[
            "nbd",
            "nbd+unix",
            "nbds",
            "nbds+unix",
            "nbd+vsock",
            "nbds+vsock",
            "nbd+ssh",
            "nbds+ssh",
            "nbd+http",
            "nbd+https",
            "ssh",
        ]
    }

    fn operand(&self) -> &'static str {
        "//[USER@][HOST[:PORT]]/[EXPORT][?socket=PATH][&tls-…]"
    }

    fn summary(&self) -> &'static str {
        "an export of an NBD server, by its URI. The nbds schemes require TLS: with keys \
         (tls-psk-file=FILE, and USER), or with certificates (tls-certificates=DIR [default: the \
         directories of libnbd, else the authorities of the system]; tls-hostname=NAME, tls-verify-peer=0). \
         nbd+vsock connects to a virtual machine or its host, by its context ID [default: 2, the host]; \
         nbd+ssh runs ssh for each connection, to port 10809 of the localhost of the SSH server or, with \
         socket=PATH and the program nc there, to a Unix socket. nbd+http and nbd+https connect to an HTTP server that starts NBD after an upgrade request (Incus, \
         LXD), with the path and query of the URI; socket=PATH, export=NAME and method=GET|POST [default: \
         POST, then GET if the server has no POST there] are not sent. ssh://[USER@]HOST[:PORT]/PATH is a disk of another \
         machine: ssh runs blockhaul there, which serves PATH (/~/PATH: in the home directory)"
    }

    fn example(&self) -> &'static str {
        r#"
blockhaul serve --background -U disk.sock --layer exitlast sample:64M
blockhaul copy --verify 'nbd+unix:///?socket=disk.sock' disk.raw
"#
    }

    fn raw(&self) -> bool {
        true
    }

    fn connecting(&self, settings: &ConnectionSettings) -> Option<Arc<dyn Backend>> {
        Some(Arc::new(NbdUri { options: Arc::new(self.options.connecting(settings)) }))
    }

    fn open(&self, target: BackendTarget) -> OpenFuture<OpenedDevice> {
        let options = self.options.clone();
        Box::pin(async move {
            let uri = format!("{}:{}", target.scheme, target.text()?);
            let UriParts { address, export, tls } = if target.scheme == "ssh" {
                let server = StdioServer::of_ssh(target.text()?, target.intent.write)?;
                let address = ServerAddress::Stdio(Box::new(server));
                UriParts { address, export: String::new(), tls: None }
            } else {
                parse(&uri)?
            };
            let claim = claim_on(&target, &address, &export, &uri).await?;
            let name = without_login_password(&uri).into_owned();
            let place = ExportSource { name, address, export, options, tls, process: None, claim };
            place.open().await
        })
    }
}

/// Image formats that QEMU's server supports, and no device of ours.
const QEMU_FORMATS: &[&str] = &["cloop", "dmg", "parallels", "qcow", "qed", "vpc"];

struct NbdCommand {
    options: Arc<ConnectOptions>,
}

impl Backend for NbdCommand {
    fn schemes(&self) -> &'static [&'static str] {
        &["command"]
    }

    fn operand(&self) -> &'static str {
        ""
    }

    fn summary(&self) -> &'static str {
        "written [ CMD ARG… ]: an NBD server that is started for this run by socket activation, and \
         stopped at its end; or one that serves its standard input and output, [ ssh HOST blockhaul serve --single … ]"
    }

    fn instead_of(&self, scheme: &str, rest: &str) -> Option<String> {
        let known = QEMU_FORMATS.iter().find(|name| **name == scheme).copied();
        // For a program without devices for them.
        let format = known.or_else(|| Some(ImageFormat::of_scheme(scheme)?.qemu_name))?;
        let file = if rest.is_empty() { "FILE" } else { rest };
        Some(format!(
            "image formats need QEMU: write [ qemu-nbd -f {format} {file} ], as separate words"
        ))
    }

    fn connecting(&self, settings: &ConnectionSettings) -> Option<Arc<dyn Backend>> {
        Some(Arc::new(NbdCommand { options: Arc::new(self.options.connecting(settings)) }))
    }

    fn open(&self, target: BackendTarget) -> OpenFuture<OpenedDevice> {
        let options = self.options.clone();
        Box::pin(async move {
            let (name, address, process) = match StdioServer::of_command(&target.command) {
                Some(server) => {
                    let words = target.command.join(OsStr::new(" "));
                    let name = format!("[ {} ]", words.to_string_lossy());
                    (name, ServerAddress::Stdio(Box::new(server)), None)
                }
                None => {
                    let process = ServerProcess::start(&target.command)?;
                    let address = ServerAddress::Unix(process.socket().to_path_buf());
                    (process.name().to_string(), address, Some(process))
                }
            };
            // The server was started for this device alone.
            let (export, tls, claim) = (String::new(), None, None);
            ExportSource { name, address, export, options, tls, process, claim }.open().await
        })
    }
}

/// Whether a URI is that of an export of this process.
///
/// # Errors
/// [`Kind::Usage`] if it is not a URI for NBD.
pub async fn is_own_export(uri: &str) -> Result<bool> {
    Ok(parse(uri)?.address.is_own().await)
}

/// Claims an export of a server in this process. Raw bytes may be written by any number of devices:
/// the server keeps them in order, and other programs write as well.
async fn claim_on(
    target: &BackendTarget,
    address: &ServerAddress,
    export: &str,
    uri: &str,
) -> Result<Option<Arc<Claim>>> {
    // A copy or job onto an export of its own process would write below the clients of that export.
    if target.intent.exclusive && target.intent.write && address.is_own().await {
        let text = "is an export of this server: choose another target";
        return Err(Error::new(Kind::InUse, text).on(&uri.into()));
    }
    let id = match address {
        // A path that cannot be completed is that of no other device, either.
        ServerAddress::Unix(path) => {
            let path = std::path::absolute(path).unwrap_or_else(|_| path.clone());
            StorageId::Export(format!("{} {export}", path.display()))
        }
        ServerAddress::Open(_) => return Ok(None),
        ServerAddress::Stdio(_) => StorageId::Export(uri.to_string()),
        ServerAddress::Http(http) => StorageId::Export(format!("{} {export}", http.server_name())),
        address => StorageId::Export(format!("{address:?} {export}")),
    };
    let ids = StorageIds { same: vec![id], below: Vec::new() };
    let claimed = || target.claim(ids.clone(), uri, true).map(|claim| Some(Arc::new(claim)));
    // A device that was closed has its claim until its last request has ended.
    for _ in 0..CLAIM_TRIES {
        match claimed() {
            Err(error) if error.kind() == Kind::InUse => blockhaul_io::sleep(CLAIM_AGAIN).await,
            done => return done,
        }
    }
    claimed().map_err(|error| error.on(&uri.into()))
}

/// The result of parsing a URI.
pub(crate) struct UriParts {
    pub(crate) address: ServerAddress,
    pub(crate) export: String,
    pub(crate) tls: Option<Arc<blockhaul_tls::TlsConnector>>,
}

/// Parses a URI, and reads the files that TLS needs. Refuses what this version does not support.
pub(crate) fn parse(uri: &str) -> Result<UriParts> {
    let wrong = |error: blockhaul_wire::uri::UriError| {
        Error::new(Kind::Usage, format!("{}: {error}", without_login_password(uri)))
    };
    let (transport, http, given, export) = if is_http(uri) {
        let HttpUri { transport, host, request, export, tls } =
            HttpUri::parse(uri).map_err(wrong)?;
        (transport, Some((request, host)), tls, export)
    } else {
        let Uri { transport, export, tls } = Uri::parse(uri).map_err(wrong)?;
        (transport, None, tls, export)
    };
    let (mut address, mut host) = match transport {
        Transport::Tcp { host, port } => (ServerAddress::Tcp(host.clone(), port), Some(host)),
        Transport::Unix { socket } => {
            (ServerAddress::Unix(PathBuf::from(std::ffi::OsString::from_vec(socket))), None)
        }
        Transport::Vsock { cid, port } => (ServerAddress::Vsock(cid, port), None),
        Transport::Ssh { user, host, port, socket, nbd_port, compress } => {
            let ssh = SshAddress { user, host: host.clone(), port, socket, nbd_port, compress };
            (ServerAddress::Ssh(Box::new(ssh)), Some(host))
        }
    };
    let is_http = http.is_some();
    if let Some((request, named)) = http {
        address = ServerAddress::Http(Box::new(HttpAddress::new(address, request)));
        host = named;
    }
    let tls = match given {
        None => {
            // libnbd also accepts them silently.
            if names_tls(uri) {
                let schemes =
                    if is_http { "nbd+https instead of nbd+http" } else { "nbds instead of nbd" };
                log::warn!(
                    "{uri}: the TLS parameters have no effect, the connection is not encrypted: use \
                     {schemes}"
                );
            }
            None
        }
        Some(parameters) => {
            let demands = demands(uri, parameters, host)?;
            let connector = blockhaul_tls::TlsConnector::new(&demands).map_err(insecure);
            let connector = connector.map_err(|error| error.on(&uri.into()))?;
            Some(Arc::new(if is_http { connector.for_http() } else { connector }))
        }
    };
    Ok(UriParts { address, export, tls })
}

/// Whether a URI has parameters that only matter to TLS.
fn names_tls(uri: &str) -> bool {
    let query = uri.split_once('?').map_or("", |(_, query)| query);
    query.split(['&', ';']).any(|parameter| parameter.starts_with("tls-"))
}

/// The TLS requirements in a URI's parameters. A Unix socket has no name for the certificate to
/// match: unless one is given, any certificate signed by a trusted authority is accepted.
fn demands(
    uri: &str,
    given: TlsParameters,
    host: Option<String>,
) -> Result<blockhaul_tls::ConnectorConfig> {
    let credentials = match (given.kind, given.psk_file, given.certificates) {
        (Some(TlsType::Psk), None, _) => {
            let text =
                format!("{uri}: tls-type=psk requires a file of keys: add tls-psk-file=FILE");
            return Err(Error::new(Kind::Usage, text));
        }
        (None | Some(TlsType::Psk), Some(file), _) => {
            blockhaul_tls::TlsCredentials::Keys(file.into())
        }
        (_, _, Some(dir)) => blockhaul_tls::TlsCredentials::Certificates(dir.into()),
        (_, _, None) => blockhaul_tls::TlsCredentials::Usual,
    };
    Ok(blockhaul_tls::ConnectorConfig {
        credentials,
        user: given.username,
        hostname: given.hostname.or(host),
        verify: given.verify_peer.unwrap_or(true),
    })
}

/// An export that accepts any number of connections.
#[derive(Clone)]
struct ExportSource {
    name: String,
    address: ServerAddress,
    export: String,
    options: Arc<ConnectOptions>,
    tls: Option<Arc<blockhaul_tls::TlsConnector>>,
    /// The server, if it was started for this export.
    process: Option<Arc<ServerProcess>>,
    claim: Option<Arc<Claim>>,
}

impl ExportSource {
    async fn open(self) -> Result<OpenedDevice> {
        let device = self.connect().await?;
        Ok(OpenedDevice { device, more: Some(Arc::new(self)) })
    }

    async fn connect(&self) -> Result<Arc<dyn Device>> {
        let companions = Companions { process: self.process.clone(), claim: self.claim.clone() };
        let name = &self.name;
        let options = ConnectOptions { tls: self.tls.clone(), ..(*self.options).clone() };
        let connected =
            connect_keeping(companions, name, &self.address, &self.export, &options).await;
        let error = match connected {
            Ok(DeviceConnection { device, .. }) => return Ok(device),
            Err(error) => error,
        };
        match self.how_it_ended().await {
            // How the connection ended depends on the moment.
            Some(how) => Err(Error::new(Kind::Disconnected, format!("{}: {how}", self.name))),
            None => Err(error),
        }
    }

    /// How the server ended, if it was started for this export and has ended.
    async fn how_it_ended(&self) -> Option<String> {
        let process = self.process.as_ref()?;
        for _ in 0..ENDING_STEPS {
            if let Some(how) = process.ended() {
                return Some(how);
            }
            blockhaul_io::sleep(ENDING_STEP).await;
        }
        process.ended()
    }
}

impl HandleOpener for ExportSource {
    fn another(&self) -> OpenFuture<Arc<dyn Device>> {
        let place = self.clone();
        Box::pin(async move { place.connect().await })
    }
}
