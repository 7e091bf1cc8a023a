//! The exports of a server, which clients open by name.

use std::fmt;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};

use crate::{OpenFuture, Switch};
use blockhaul_block::{Can, Device, Flushes, OpKind, Request, Result};

/// A client that opens a device.
#[derive(Clone, Default)]
pub struct ExportClient {
    /// The connection; none for commands that open a device for themselves.
    pub stream: Option<Arc<blockhaul_io::Stream>>,
    /// The client's certificate, once TLS is up.
    pub certificate: Arc<OnceLock<ClientCertificate>>,
    /// The name of the pre-shared key that the client has, once TLS is up.
    pub key_name: Arc<OnceLock<String>>,
    /// Whether storage wants the client to leave.
    pub dismissal: Arc<Dismissal>,
}

/// Whether a client must leave. Set by storage; never cleared.
#[derive(Debug, Default)]
pub struct Dismissal(AtomicU8);

/// Requests are refused.
const REFUSED: u8 = 1;
/// No more replies are sent.
const CUT: u8 = 2;

impl Dismissal {
    /// Later requests fail with ESHUTDOWN; those in progress are finished.
    pub fn refuse(&self) {
        self.0.fetch_max(REFUSED, Ordering::AcqRel);
    }

    /// The server closes the connection at its next check, without further replies.
    pub fn cut(&self) {
        self.0.fetch_max(CUT, Ordering::AcqRel);
    }

    /// Whether requests are refused.
    pub fn is_refused(&self) -> bool {
        self.0.load(Ordering::Acquire) >= REFUSED
    }

    /// Whether no more replies are sent.
    pub fn is_cut(&self) -> bool {
        self.0.load(Ordering::Acquire) >= CUT
    }
}

/// Names in a certificate, as RFC 4514 writes them: `CN=alice,O=Example`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientCertificate {
    /// The subject.
    pub subject: String,
    /// The issuer.
    pub issuer: String,
}

impl fmt::Debug for ExportClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.stream {
            Some(stream) => write!(f, "ExportClient({})", stream.peer()),
            None => f.write_str("ExportClient(this program)"),
        }
    }
}

/// The exports of a server. Names may change their meaning between calls: a server asks anew for
/// each client, and keeps what a client has opened.
pub trait Exports: Send + Sync {
    /// Admits a client that has connected; an error rejects it. May wait for other clients to
    /// leave.
    fn admit(&self, client: ExportClient) -> OpenFuture<Arc<dyn Visit>>;

    /// The state of the storage for the server's operator, if there is anything to report.
    fn state(&self) -> Option<String> {
        None
    }

    /// What the storage counts, for metrics. Two exports that share what is counted return the same
    /// figures, which are shown once.
    fn figures(&self) -> Vec<StorageFigure> {
        Vec::new()
    }
}

/// A figure of a storage, for metrics.
#[derive(Debug, Clone, PartialEq)]
pub struct StorageFigure {
    /// Its name after `blockhaul_`; it ends in `_total` if the figure only grows.
    pub name: &'static str,
    /// One sentence for users; the same for all figures of the name.
    pub help: &'static str,
    /// Labels and their values.
    pub labels: Vec<(&'static str, String)>,
    /// The value, in the unit that the name has.
    pub value: f64,
}

/// A client that was admitted. It leaves when this and every device that it opened are dropped.
pub trait Visit: Send + Sync {
    /// What it may open. `tls`: the connection is encrypted.
    fn list(&self, tls: bool) -> OpenFuture<Vec<ListedExport>>;

    /// Opens an export by name; the empty name selects the default one. `None`: there is no such
    /// export, which is not logged. An error is logged.
    fn open(&self, name: &str, tls: bool) -> OpenFuture<Option<Export>>;

    /// The client sends no more, with requests in progress. A plugin may be told.
    fn gone(&self) {}

    /// Replies cannot be sent any more. Reads may end early; what was written is carried out.
    fn unreachable(&self) {}
}

/// An export that is open for a client.
#[derive(Clone)]
pub struct Export {
    /// Its name. If it differs from the requested one, the server reports it.
    pub name: String,
    /// For users; none: the device's own description.
    pub description: Option<String>,
    /// The device, fenced.
    pub device: Arc<dyn Device>,
    /// Which clients share the device.
    pub sharing: DeviceSharing,
}

impl Export {
    /// A device that was opened for one client, under this name.
    pub fn own(name: &str, device: Arc<dyn Device>) -> Export {
        Export { name: name.to_string(), description: None, device, sharing: DeviceSharing::Own }
    }
}

/// Which clients share the device of an export.
#[derive(Clone)]
pub enum DeviceSharing {
    /// One client, for which it was opened; it is closed when that client leaves. The client's
    /// socket is shut down only then, for storage that uses it too ([`ExportClient::stream`]).
    ///
    /// The storage may be the same for all clients of the name: they share failed flushes while one
    /// of them is connected, unless the device tracks them ([`flush_failures_stay`]).
    ///
    /// [`flush_failures_stay`]: blockhaul_block::Facts::flush_failures_stay
    Own,
    /// All clients; it stays open when they leave. These report a failed flush to each of them.
    All(Arc<Flushes>),
}

/// A device that can be opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedExport {
    /// Its name.
    pub name: String,
    /// For users; may be empty.
    pub description: String,
}

/// One device that all clients share, as exports. Each client has its own handle, so that the
/// device can be exchanged while in use.
pub struct SharedDevice(Arc<OneDevice>);

impl SharedDevice {
    /// The device, fenced, under a name; the empty name selects it, too. An empty description means
    /// the device's own.
    pub fn new(name: &str, description: &str, device: Arc<dyn Device>) -> Arc<SharedDevice> {
        SharedDevice::with(name, description, device, false)
    }

    /// The same for clients that ask for any other name, too.
    pub fn under_any_name(
        name: &str,
        description: &str,
        device: Arc<dyn Device>,
    ) -> Arc<SharedDevice> {
        SharedDevice::with(name, description, device, true)
    }

    fn with(
        name: &str,
        description: &str,
        device: Arc<dyn Device>,
        any_name: bool,
    ) -> Arc<SharedDevice> {
        let description = Some(description).filter(|text| !text.is_empty()).map(str::to_string);
        Arc::new(SharedDevice(Arc::new(OneDevice {
            name: name.to_string(),
            description,
            switch: Switch::new(device),
            flushes: Arc::default(),
            any_name,
            form: None,
        })))
    }

    /// The same device under another name, in the form that `form` gives to the handle of each
    /// client, if there is one.
    pub fn beside(
        &self,
        name: &str,
        description: &str,
        form: Option<HandleWrapper>,
    ) -> Arc<SharedDevice> {
        Arc::new(SharedDevice(Arc::new(OneDevice {
            name: name.to_string(),
            description: Some(description).filter(|text| !text.is_empty()).map(str::to_string),
            switch: self.0.switch.clone(),
            flushes: self.0.flushes.clone(),
            any_name: false,
            form,
        })))
    }

    /// Used to exchange the device.
    pub fn switch(&self) -> &Arc<Switch> {
        &self.0.switch
    }

    /// Makes durable what clients have written.
    ///
    /// # Errors
    /// That of the device. Once a flush of a client has failed, all others fail, and this one too.
    pub async fn flush(&self) -> Result<()> {
        let device = self.0.switch.device();
        let facts = device.facts();
        if !facts.can.contains(Can::WRITE | Can::FLUSH) {
            return Ok(());
        }
        let flush = self.0.flushes.begin(OpKind::Flush)?;
        let outcome = device.submit(Request::flush()).await;
        flush.end(outcome, facts.flush_failures_stay).await.map(drop)
    }
}

impl Exports for SharedDevice {
    fn admit(&self, _client: ExportClient) -> OpenFuture<Arc<dyn Visit>> {
        // No state per client: many clients must be cheap.
        let visit: Arc<dyn Visit> = self.0.clone();
        Box::pin(std::future::ready(Ok(visit)))
    }
}

/// The state of [`SharedDevice`]; every client's visit is this.
struct OneDevice {
    name: String,
    description: Option<String>,
    switch: Arc<Switch>,
    /// They remain failed when the device is exchanged: the new one may have the same lost data
    /// below it.
    flushes: Arc<Flushes>,
    any_name: bool,
    form: Option<HandleWrapper>,
}

/// Makes of a handle the device that a client gets.
pub type HandleWrapper = Arc<dyn Fn(Arc<dyn Device>) -> Result<Arc<dyn Device>> + Send + Sync>;

impl Visit for OneDevice {
    fn list(&self, _tls: bool) -> OpenFuture<Vec<ListedExport>> {
        let own = || self.switch.device().facts().description.clone();
        let description = self.description.clone().unwrap_or_else(own);
        Box::pin(std::future::ready(Ok(vec![ListedExport {
            name: self.name.clone(),
            description,
        }])))
    }

    fn open(&self, name: &str, _tls: bool) -> OpenFuture<Option<Export>> {
        let found = self.any_name || name.is_empty() || name == self.name;
        if !found {
            return Box::pin(std::future::ready(Ok(None)));
        }
        let handle = self.switch.handle();
        let device =
            self.form.as_ref().map_or_else(|| Ok(handle.clone()), |form| form(handle.clone()));
        let export = device.map(|device| Export {
            // Clients do not see a name that they did not ask for.
            name: if self.any_name { name } else { &self.name }.to_string(),
            description: self.description.clone(),
            device,
            sharing: DeviceSharing::All(self.flushes.clone()),
        });
        Box::pin(std::future::ready(export.map(Some)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockhaul_block::{Error, Facts, Kind, PendingRequest, Request};

    struct Described(Arc<Facts>);

    impl Device for Described {
        fn facts(&self) -> Arc<Facts> {
            self.0.clone()
        }

        fn submit(&self, _request: Request) -> PendingRequest {
            Error::new(Kind::Unsupported, "nothing is done here").into()
        }
    }

    fn now<T>(mut opening: OpenFuture<T>) -> T {
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        match opening.as_mut().poll(&mut context) {
            std::task::Poll::Ready(opened) => opened.unwrap(),
            std::task::Poll::Pending => panic!("nothing has to be awaited here"),
        }
    }

    fn device() -> Arc<dyn Device> {
        let facts = Facts { description: "its own".into(), ..Facts::new("described", 512) };
        Arc::new(Described(Arc::new(facts)))
    }

    #[test]
    fn one_device_is_the_same_for_all_clients_with_its_flushes() {
        let shared = SharedDevice::new("disk", "", device());
        let open = |name| now(now(shared.admit(ExportClient::default())).open(name, false));
        let one = open("disk").unwrap();
        let other = open("").unwrap();
        assert_eq!((one.name.as_str(), other.name.as_str()), ("disk", "disk"));
        assert_eq!(shared.switch().handles(), 2, "each has its own way to the one device");
        let (DeviceSharing::All(one), DeviceSharing::All(other)) = (one.sharing, other.sharing)
        else {
            panic!("both have the device that stays");
        };
        assert!(Arc::ptr_eq(&one, &other));
        assert!(open("other").is_none());
    }

    #[test]
    fn a_description_stands_before_that_of_the_device() {
        for (given, listed, opened) in [("", "its own", None), ("a", "a", Some("a"))] {
            let visit =
                now(SharedDevice::new("disk", given, device()).admit(ExportClient::default()));
            assert_eq!(now(visit.list(false))[0].description, listed);
            let export = now(visit.open("disk", false)).unwrap();
            assert_eq!(export.description.as_deref(), opened);
        }
    }

    #[test]
    fn under_any_name_clients_get_the_name_that_they_ask_for() {
        let visit =
            now(SharedDevice::under_any_name("disk", "", device()).admit(ExportClient::default()));
        for name in ["", "disk", "other"] {
            assert_eq!(now(visit.open(name, false)).unwrap().name, name);
        }
        assert_eq!(now(visit.list(false))[0].name, "disk");
    }
}
