//! `info:MODE`: a small disk with information about the client or the time, like nbdkit's plugin of
//! that name. Each client gets its own.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime};

use blockhaul_block::{
    BASE_ALLOCATION, Can, Device, Error, Extents, Facts, Kind, Op, PendingRequest, Reply, Request,
    Result,
};
use blockhaul_catalog::{
    Backend, BackendTarget, Export, ExportClient, Exports, ListedExport, OpenFuture, OpenedDevice,
    Visit,
};

use blockhaul_backends::support::{decode_base64, fill, operand};

/// Size of a time in bytes: seconds in eight, microseconds in four, big-endian.
const TIME_LEN: u64 = 12;

/// The backend `info:MODE`.
pub struct InfoBackend;

impl Backend for InfoBackend {
    fn schemes(&self) -> &'static [&'static str] {
        &["info"]
    }

    fn operand(&self) -> &'static str {
        "MODE"
    }

    fn summary(&self) -> &'static str {
        "for serve: information about the connection, read-only. MODE is exportname (the name that the \
         client asked for; the default), base64exportname (the same name, decoded from base64), address (of \
         the client), or time, uptime (of the server) or conntime (of the connection), as big-endian \
         seconds in 8 and microseconds in 4 bytes"
    }

    fn example(&self) -> &'static str {
        r#"
blockhaul serve -p 0 -i localhost info:address \
  --run 'blockhaul copy "nbd://localhost:$port" -'
"#
    }

    fn open(&self, target: BackendTarget) -> OpenFuture<OpenedDevice> {
        let device = operand::source_only(&target).and_then(|()| {
            let visit = visit(&target, ExportClient::default())?;
            Ok(OpenedDevice::from(visit.device("")?))
        });
        Box::pin(std::future::ready(device))
    }

    fn exports(&self, target: &BackendTarget) -> Option<OpenFuture<Arc<dyn Exports>>> {
        let mode = InfoMode::of(target).map(|mode| {
            started();
            Arc::new(InfoExports { mode, name: operand::name(target) }) as Arc<dyn Exports>
        });
        Some(Box::pin(std::future::ready(mode)))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum InfoMode {
    Name,
    Base64,
    Address,
    Time,
    Uptime,
    Connected,
}

impl InfoMode {
    fn of(target: &BackendTarget) -> Result<InfoMode> {
        match target.text()?.to_ascii_lowercase().as_str() {
            "" | "exportname" | "export-name" => Ok(InfoMode::Name),
            "base64exportname" | "base64-export-name" => Ok(InfoMode::Base64),
            "address" => Ok(InfoMode::Address),
            "time" => Ok(InfoMode::Time),
            "uptime" => Ok(InfoMode::Uptime),
            "conntime" => Ok(InfoMode::Connected),
            mode => {
                let text = format!(
                    "info: unknown mode {mode:?}; known are exportname, base64exportname, address, \
                     time, uptime, conntime"
                );
                Err(Error::new(Kind::Usage, text))
            }
        }
    }
}

/// When the first of these disks was opened.
fn started() -> Instant {
    static STARTED: OnceLock<Instant> = OnceLock::new();
    *STARTED.get_or_init(blockhaul_io::now)
}

struct InfoExports {
    mode: InfoMode,
    name: String,
}

impl Exports for InfoExports {
    fn admit(&self, client: ExportClient) -> OpenFuture<Arc<dyn Visit>> {
        let visit = InfoVisit { mode: self.mode, name: self.name.clone(), client };
        Box::pin(std::future::ready(Ok(Arc::new(visit) as Arc<dyn Visit>)))
    }
}

fn visit(target: &BackendTarget, client: ExportClient) -> Result<InfoVisit> {
    started();
    Ok(InfoVisit { mode: InfoMode::of(target)?, name: operand::name(target), client })
}

struct InfoVisit {
    mode: InfoMode,
    name: String,
    client: ExportClient,
}

impl InfoVisit {
    fn device(&self, name: &str) -> Result<Arc<dyn Device>> {
        let what = match self.mode {
            InfoMode::Name => InfoContents::Bytes(name.as_bytes().into()),
            InfoMode::Base64 => InfoContents::Bytes(decode_base64(name)?.into()),
            InfoMode::Address => InfoContents::Bytes(self.address().into_bytes().into()),
            InfoMode::Time => InfoContents::Clock(None),
            InfoMode::Uptime => InfoContents::Clock(Some(started())),
            InfoMode::Connected => InfoContents::Clock(Some(blockhaul_io::now())),
        };
        let size = match &what {
            InfoContents::Bytes(bytes) => bytes.len() as u64,
            InfoContents::Clock(_) => TIME_LEN,
        };
        let mut facts = Facts {
            can: Can::CACHE | Can::EXTENTS,
            contexts: vec![BASE_ALLOCATION.to_string()],
            ..Facts::new(self.name.clone(), size)
        };
        // Other connections have other addresses, and read at other times.
        if matches!(self.mode, InfoMode::Name | InfoMode::Base64) {
            facts.can |= Can::MULTI_CONN;
        }
        Ok(Arc::new(InfoDevice { facts: Arc::new(facts), what }))
    }

    /// The client's address. The path of a Unix socket is not shown.
    fn address(&self) -> String {
        let Some(stream) = &self.client.stream else { return String::new() };
        let peer = stream.peer();
        let text = peer.to_string();
        if peer.ip().is_some() || text.starts_with("vsock:") { text } else { "unix".into() }
    }
}

impl Visit for InfoVisit {
    fn list(&self, _tls: bool) -> OpenFuture<Vec<ListedExport>> {
        let all = ListedExport { name: String::new(), description: String::new() };
        Box::pin(std::future::ready(Ok(vec![all])))
    }

    fn open(&self, name: &str, _tls: bool) -> OpenFuture<Option<Export>> {
        let export = self.device(name).map(|device| Some(Export::own(name, device)));
        Box::pin(std::future::ready(export))
    }
}

struct InfoDevice {
    facts: Arc<Facts>,
    what: InfoContents,
}

enum InfoContents {
    Bytes(Arc<[u8]>),
    /// The time since then; none: time of day.
    Clock(Option<Instant>),
}

/// A time in the format for clients.
fn told(time: Duration) -> [u8; TIME_LEN as usize] {
    let mut bytes = [0; TIME_LEN as usize];
    bytes[..8].copy_from_slice(&time.as_secs().to_be_bytes());
    bytes[8..].copy_from_slice(&time.subsec_micros().to_be_bytes());
    bytes
}

impl Device for InfoDevice {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        match request.op {
            Op::Read(room) => {
                let bytes = match &self.what {
                    InfoContents::Bytes(bytes) => bytes.clone(),
                    InfoContents::Clock(since) => {
                        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
                        let time = since.map(blockhaul_io::elapsed);
                        told(time.unwrap_or(now.unwrap_or_default())).as_slice().into()
                    }
                };
                fill::read(request.at, room, move |at, out| {
                    out.copy_from_slice(&bytes[at as usize..at as usize + out.len()]);
                })
            }
            Op::Extents(contexts) => {
                let lists = contexts.iter().map(|_| Extents::one(request.len, 0)).collect();
                PendingRequest::ready(Ok(Reply::Extents(lists)))
            }
            Op::Write(_) | Op::Zero | Op::Trim => {
                Error::new(Kind::ReadOnly, "this information cannot be written").into()
            }
            Op::Flush | Op::Cache => PendingRequest::ready(Ok(Reply::Done)),
        }
    }
}
