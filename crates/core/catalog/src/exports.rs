//! Storage that has a device for each client, by name: plugins, folders.

use std::fmt;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};

use crate::Opening;
use blockhaul_block::{Device, Error, Kind};

/// Who asks for a device.
#[derive(Clone, Default)]
pub struct Client {
    /// The connection; none for commands that open a device for themselves.
    pub stream: Option<Arc<blockhaul_io::Stream>>,
    /// The certificate that the client has shown, once TLS is up.
    pub certificate: Arc<OnceLock<Certificate>>,
    /// Whether the client is to leave, as storage may decide.
    pub dismissal: Arc<Dismissal>,
}

/// Whether a client is to leave. Decided by storage; never taken back.
#[derive(Debug, Default)]
pub struct Dismissal(AtomicU8);

/// Requests are refused.
const REFUSED: u8 = 1;
/// Nothing is answered any more.
const CUT: u8 = 2;

impl Dismissal {
    /// Requests that come from now on are answered ESHUTDOWN; what is in progress is finished.
    pub fn refuse(&self) {
        self.0.fetch_max(REFUSED, Ordering::AcqRel);
    }

    /// The connection ends when the server looks next, and nothing more is answered.
    pub fn cut(&self) {
        self.0.fetch_max(CUT, Ordering::AcqRel);
    }

    /// Whether requests are refused.
    pub fn is_refused(&self) -> bool {
        self.0.load(Ordering::Acquire) >= REFUSED
    }

    /// Whether nothing is answered.
    pub fn is_cut(&self) -> bool {
        self.0.load(Ordering::Acquire) >= CUT
    }
}

/// Names in a certificate, as RFC 4514 writes them: `CN=alice,O=Example`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Certificate {
    /// Whose it is.
    pub subject: String,
    /// Who vouches for it.
    pub issuer: String,
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.stream {
            Some(stream) => write!(f, "Client({})", stream.peer()),
            None => f.write_str("Client(this program)"),
        }
    }
}

/// Storage whose clients each get devices of their own.
pub trait Exports: Send + Sync {
    /// Admits a client that has connected; an error sends it away. May wait for others to leave.
    fn admit(&self, client: Client) -> Opening<Arc<dyn Visit>>;

    /// How the storage is, for whoever runs the server, where there is something to tell.
    fn state(&self) -> Option<String> {
        None
    }
}

/// A client that was admitted. It leaves when this is dropped with every device it opened.
pub trait Visit: Send + Sync {
    /// What it may open. `tls`: the connection is encrypted by now.
    fn list(&self, tls: bool) -> Opening<Vec<Listed>>;

    /// A device by its name; the empty name stands for the default one.
    fn open(&self, name: &str, tls: bool) -> Opening<Arc<dyn Device>>;

    /// The name of the export that is open for a client who asked for this one: the empty name stands for
    /// another one with some.
    fn named(&self, asked: &str) -> String {
        asked.to_string()
    }

    /// The client is gone, and requests of its are still in progress, whose answers nobody reads. They
    /// may end sooner.
    fn gone(&self) {}
}

/// A device that can be opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// Its name.
    pub name: String,
    /// For people; may be empty.
    pub description: String,
}

/// One device that all clients share, as exports: for gates over devices without exports of their own.
pub struct Shared {
    listed: Listed,
    device: Arc<dyn Device>,
    any: bool,
}

impl Shared {
    /// The device under a name; clients that ask for the empty name get it too.
    pub fn new(name: &str, description: &str, device: Arc<dyn Device>) -> Arc<Shared> {
        let description = match description.is_empty() {
            true => device.facts().description.clone(),
            false => description.to_string(),
        };
        let listed = Listed { name: name.to_string(), description };
        Arc::new(Shared { listed, device, any: false })
    }

    /// The same device for clients that ask for any other name, too.
    pub fn under_any_name(&self) -> Arc<dyn Exports> {
        let (listed, device) = (self.listed.clone(), self.device.clone());
        Arc::new(Shared { listed, device, any: true })
    }
}

impl Exports for Shared {
    fn admit(&self, _client: Client) -> Opening<Arc<dyn Visit>> {
        let (listed, device) = (self.listed.clone(), self.device.clone());
        let visit = SharedVisit { listed, device, any: self.any };
        Box::pin(std::future::ready(Ok(Arc::new(visit) as Arc<dyn Visit>)))
    }
}

struct SharedVisit {
    listed: Listed,
    device: Arc<dyn Device>,
    any: bool,
}

impl Visit for SharedVisit {
    fn list(&self, _tls: bool) -> Opening<Vec<Listed>> {
        Box::pin(std::future::ready(Ok(vec![self.listed.clone()])))
    }

    fn open(&self, name: &str, _tls: bool) -> Opening<Arc<dyn Device>> {
        let opened = match self.any || name.is_empty() || name == self.listed.name {
            true => Ok(self.device.clone()),
            false => Err(Error::new(Kind::NotFound, "there is no export of this name")),
        };
        Box::pin(std::future::ready(opened))
    }
}
