//! The kind of storage `kubevirt:URL`.

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use blockhaul_block::{Error, Kind, Result};
use blockhaul_catalog::{
    Backend, BackendTarget, ConnectionSettings, OpenFuture, OpenedDevice, Param, ParamKind,
};
use blockhaul_client::http::HttpServer;
use blockhaul_client::{ServerAddress, is_this_machine};
use blockhaul_tls::{ConnectorConfig, TlsConnector, TlsCredentials, TlsErrorKind};
use blockhaul_wire::uri::{HttpUri, Transport};

use crate::KubeVirtOptions;
use crate::device::KubeVirtDevice;
use crate::export::HttpExport;

/// Largest file with a token.
const TOKEN_MAX: u64 = 16 << 10;
/// Most requests under way.
const CONNECTIONS_MAX: u64 = 64;

/// The kind of storage `kubevirt:URL`.
pub struct KubeVirt {
    options: KubeVirtOptions,
}

impl KubeVirt {
    /// With these time limits.
    pub fn new(options: KubeVirtOptions) -> KubeVirt {
        KubeVirt { options }
    }
}

const PARAMS: &[Param] = &[
    Param {
        name: "token-file",
        kind: ParamKind::Text,
        default: None,
        doc: "File with the token of the export.",
    },
    Param {
        name: "ca",
        kind: ParamKind::Text,
        default: None,
        doc: "File with the certificate of the authority that has signed the server's, in PEM; the authorities \
              of the system if not given.",
    },
    Param {
        name: "tls-hostname",
        kind: ParamKind::Text,
        default: None,
        doc: "The name in the server's certificate, if it is another one than that in the URL.",
    },
    Param {
        name: "socket",
        kind: ParamKind::Text,
        default: None,
        doc: "Connect to this Unix socket; the host of the URL is then a name only.",
    },
    Param {
        name: "connections",
        kind: ParamKind::Number,
        default: Some("4"),
        doc: "Maximum requests under way, each on a connection of its own, 1 to 64.",
    },
];

impl Backend for KubeVirt {
    fn schemes(&self) -> &'static [&'static str] {
        &["kubevirt"]
    }

    fn operand(&self) -> &'static str {
        "http[s]://HOST[:PORT]/PATH"
    }

    fn summary(&self) -> &'static str {
        "a disk that KubeVirt exports for a backup in pull mode, read-only: the URL of its data or its map. In an \
         incremental backup the context kubevirt:dirty says what has changed"
    }

    fn example(&self) -> &'static str {
        r#"
blockhaul copy "kubevirt:$URL?token-file=token&ca=ca.pem" disk.raw
blockhaul copy --bitmap kubevirt:dirty "kubevirt:$URL?token-file=token&ca=ca.pem" disk.raw
"#
    }

    fn params(&self) -> &'static [Param] {
        PARAMS
    }

    fn connecting(&self, settings: &ConnectionSettings) -> Option<Arc<dyn Backend>> {
        let mut options = KubeVirtOptions { timeout: settings.timeout, ..self.options };
        if !settings.timeout.is_zero() {
            options.connect_timeout = options.connect_timeout.min(settings.timeout);
        }
        Some(Arc::new(KubeVirt { options }))
    }

    fn open(&self, target: BackendTarget) -> OpenFuture<OpenedDevice> {
        let options = self.options;
        Box::pin(async move { open(&target, options).await })
    }
}

async fn open(target: &BackendTarget, options: KubeVirtOptions) -> Result<OpenedDevice> {
    let url = target.text()?.to_owned();
    let name = format!("kubevirt:{url}");
    if target.intent.write {
        let text =
            "exports of KubeVirt are read-only: restore into a volume that the machine can use";
        return Err(Error::new(Kind::Unsupported, text).on(&name.into()));
    }
    let place = ExportUrl::of(&url, target)?;
    let read = blockhaul_io::offload(move || place.prepare(options)).await;
    let lost = |error| Error::new(Kind::Io, "cannot read the files").because(error);
    let named = |error: Error| error.on(&name.as_str().into());
    let export = read.map_err(lost)?.map_err(named)?;
    let map = export.map().await.map_err(named)?;
    log::debug!(
        "{name}: {} bytes, {}",
        map.size(),
        if map.is_incremental() { "incremental" } else { "full" }
    );
    let disk = KubeVirtDevice::new(&name, export, map);
    Ok(OpenedDevice { device: Arc::new(disk.clone()), more: Some(Arc::new(disk)) })
}

/// What was typed, checked.
struct ExportUrl {
    uri: HttpUri,
    path: String,
    token: Option<PathBuf>,
    authority: Option<PathBuf>,
    hostname: Option<String>,
    connections: usize,
}

impl ExportUrl {
    fn of(url: &str, target: &BackendTarget) -> Result<ExportUrl> {
        let wrong = |why: &str| Error::new(Kind::Usage, format!("kubevirt:{url}: {why}"));
        let scheme = url.split_once("://").map(|(scheme, _)| scheme.to_ascii_lowercase());
        let secure = match scheme.as_deref() {
            Some("https") => true,
            Some("http") => false,
            _ => return Err(wrong("write kubevirt:https://HOST/PATH, or http://")),
        };
        if url.contains('?') {
            return Err(wrong("leave out the query: offsets and lengths are added"));
        }
        let mut uri =
            HttpUri::parse(&format!("nbd+{url}")).map_err(|error| wrong(&error.to_string()))?;
        if let Some(socket) = target.args.text("socket") {
            uri.transport = Transport::Unix { socket: socket.as_bytes().to_vec() };
        }
        let path = uri.request.target.trim_end_matches('/');
        let path = path.strip_suffix("/data").or_else(|| path.strip_suffix("/map")).unwrap_or(path);
        let path = path.to_owned();
        let file = |name: &str| target.args.text(name).map(PathBuf::from);
        let authority = file("ca");
        let hostname = target.args.text("tls-hostname").map(str::to_owned);
        if !secure && (authority.is_some() || hostname.is_some()) {
            return Err(wrong("ca and tls-hostname are for https"));
        }
        let connections = target.args.number("connections").unwrap_or(4);
        if !(1..=CONNECTIONS_MAX).contains(&connections) {
            return Err(wrong("connections may be 1 to 64"));
        }
        let connections = usize::try_from(connections).unwrap_or(1);
        Ok(ExportUrl { uri, path, token: file("token-file"), authority, hostname, connections })
    }

    /// Reads the files. Blocks.
    fn prepare(self, options: KubeVirtOptions) -> Result<Arc<HttpExport>> {
        let ExportUrl { uri, path, token, authority, hostname, connections } = self;
        let address = match uri.transport {
            Transport::Tcp { host, port } => ServerAddress::Tcp(host, port),
            Transport::Unix { socket } => {
                let socket =
                    <std::ffi::OsString as std::os::unix::ffi::OsStringExt>::from_vec(socket);
                ServerAddress::Unix(socket.into())
            }
            _ => return Err(Error::new(Kind::Usage, "no host")),
        };
        let tls = match uri.tls {
            None => None,
            Some(_) => {
                let credentials =
                    authority.map_or(TlsCredentials::Usual, TlsCredentials::Authority);
                let hostname = hostname.or(uri.host);
                let demands = ConnectorConfig { credentials, user: None, hostname, verify: true };
                Some(Arc::new(TlsConnector::new(&demands).map_err(insecure)?.for_http()))
            }
        };
        if token.is_some()
            && tls.is_none()
            && let ServerAddress::Tcp(host, _) = &address
            && !is_this_machine(host)
        {
            log::warn!(
                "the token for {host} is sent without TLS: others on the network can read it"
            );
        }
        let fields = match token {
            None => String::new(),
            Some(file) => format!("x-kubevirt-export-token: {}\r\n", secret(&file)?),
        };
        let KubeVirtOptions { connect_timeout, timeout } = options;
        let server = HttpServer { address, host: uri.request.host, tls, connect_timeout, timeout };
        Ok(HttpExport::new(server, path, fields, connections))
    }
}

fn insecure(error: blockhaul_tls::TlsError) -> Error {
    let kind = if error.kind() == TlsErrorKind::File { Kind::NotFound } else { Kind::Invalid };
    // The text says which file is expected.
    let insecure = Error::new(kind, error.text().to_string()).complete();
    match error.remedy() {
        Some(remedy) => insecure.with_remedy(remedy),
        None => insecure,
    }
}

/// The token in a file.
fn secret(file: &Path) -> Result<String> {
    let shown = file.display();
    let failed = |error| Error::system(format!("cannot read the token in {shown}"), error);
    let mut bytes = Vec::new();
    let opened = blockhaul_io::open_regular_file(file).map_err(failed)?;
    opened.take(TOKEN_MAX + 1).read_to_end(&mut bytes).map_err(failed)?;
    let token = bytes.trim_ascii();
    if token.is_empty() || bytes.len() as u64 > TOKEN_MAX || !token.iter().all(u8::is_ascii_graphic)
    {
        let text = format!("{shown} holds no token: it must be one line, without spaces");
        return Err(Error::new(Kind::Invalid, text));
    }
    Ok(String::from_utf8_lossy(token).into_owned())
}
