//! What a server serves: exports, which its clients open by name.

use std::fmt;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};

use crate::{Opening, Switch};
use blockhaul_block::{Device, Flushes};

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

/// What a server serves. Names may lead to other exports from one call to the next: a server asks anew for each
/// client, and keeps what a client has opened.
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

    /// An export by its name; the empty name stands for the default one. `None`: there is none of this name,
    /// which is no news. An error is one: it is logged.
    fn open(&self, name: &str, tls: bool) -> Opening<Option<Export>>;

    /// The client is gone, and requests of its are still in progress, whose answers nobody reads. They
    /// may end sooner.
    fn gone(&self) {}
}

/// An export that is open for a client.
#[derive(Clone)]
pub struct Export {
    /// Its name. Another one than was asked for: the server says so.
    pub name: String,
    /// For people; none: what the device says of itself.
    pub description: Option<String>,
    /// The device, fenced.
    pub device: Arc<dyn Device>,
    /// Who else has the device.
    pub sharing: Sharing,
}

impl Export {
    /// A device that was opened for one client, under this name.
    pub fn own(name: &str, device: Arc<dyn Device>) -> Export {
        Export { name: name.to_string(), description: None, device, sharing: Sharing::Own }
    }
}

/// Who has the device of an export.
#[derive(Clone)]
pub enum Sharing {
    /// One client, for which it was opened, and it is closed when that client leaves. The client's socket
    /// is shut only then, for storage that has it too ([`Client::stream`]).
    ///
    /// The storage may be the same for all clients of the name: they share failed flushes while one of them
    /// is there, unless the device keeps account of them ([`flush_failures_stay`]).
    ///
    /// [`flush_failures_stay`]: blockhaul_block::Facts::flush_failures_stay
    Own,
    /// All clients, and it stays open when they leave. A flush that fails is reported to each of them, by
    /// these.
    All(Arc<Flushes>),
}

/// A device that can be opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// Its name.
    pub name: String,
    /// For people; may be empty.
    pub description: String,
}

/// One device that all clients share, as exports. Each client has a handle of its own, so that the device
/// can be exchanged while they use it.
pub struct Shared(Arc<OneDevice>);

impl Shared {
    /// The device, fenced, under a name; clients that ask for the empty name get it too. An empty description
    /// stands for the device's own.
    pub fn new(name: &str, description: &str, device: Arc<dyn Device>) -> Arc<Shared> {
        Shared::with(name, description, device, false)
    }

    /// The same for clients that ask for any other name, too.
    pub fn under_any_name(name: &str, description: &str, device: Arc<dyn Device>) -> Arc<Shared> {
        Shared::with(name, description, device, true)
    }

    fn with(name: &str, description: &str, device: Arc<dyn Device>, any_name: bool) -> Arc<Shared> {
        let description = Some(description).filter(|text| !text.is_empty()).map(str::to_string);
        Arc::new(Shared(Arc::new(OneDevice {
            name: name.to_string(),
            description,
            switch: Switch::new(device),
            flushes: Arc::default(),
            any_name,
        })))
    }

    /// Where the device can be exchanged.
    pub fn switch(&self) -> &Arc<Switch> {
        &self.0.switch
    }
}

impl Exports for Shared {
    fn admit(&self, _client: Client) -> Opening<Arc<dyn Visit>> {
        // Nothing is kept for a client: a crowd of them must stay cheap.
        let visit: Arc<dyn Visit> = self.0.clone();
        Box::pin(std::future::ready(Ok(visit)))
    }
}

/// What [`Shared`] has; every client's visit is this.
struct OneDevice {
    name: String,
    description: Option<String>,
    switch: Arc<Switch>,
    /// They stay failed when the device is exchanged: what was lost below may be below the new one, too.
    flushes: Arc<Flushes>,
    any_name: bool,
}

impl Visit for OneDevice {
    fn list(&self, _tls: bool) -> Opening<Vec<Listed>> {
        let own = || self.switch.device().facts().description.clone();
        let description = self.description.clone().unwrap_or_else(own);
        Box::pin(std::future::ready(Ok(vec![Listed { name: self.name.clone(), description }])))
    }

    fn open(&self, name: &str, _tls: bool) -> Opening<Option<Export>> {
        let found = self.any_name || name.is_empty() || name == self.name;
        let export = found.then(|| Export {
            // Clients are not told of a name that they did not ask for.
            name: if self.any_name { name } else { &self.name }.to_string(),
            description: self.description.clone(),
            device: self.switch.handle(),
            sharing: Sharing::All(self.flushes.clone()),
        });
        Box::pin(std::future::ready(Ok(export)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockhaul_block::{Error, Facts, Kind, Pending, Request};

    struct Described(Arc<Facts>);

    impl Device for Described {
        fn facts(&self) -> Arc<Facts> {
            self.0.clone()
        }

        fn submit(&self, _request: Request) -> Pending {
            Error::new(Kind::Unsupported, "nothing is done here").into()
        }
    }

    fn now<T>(mut opening: Opening<T>) -> T {
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
        let shared = Shared::new("disk", "", device());
        let open = |name| now(now(shared.admit(Client::default())).open(name, false));
        let (one, other) = (open("disk").unwrap(), open("").unwrap());
        assert_eq!((one.name.as_str(), other.name.as_str()), ("disk", "disk"));
        assert_eq!(shared.switch().handles(), 2, "each has its own way to the one device");
        let (Sharing::All(one), Sharing::All(other)) = (one.sharing, other.sharing) else {
            panic!("both have the device that stays");
        };
        assert!(Arc::ptr_eq(&one, &other));
        assert!(open("other").is_none());
    }

    #[test]
    fn a_description_stands_before_that_of_the_device() {
        for (given, listed, opened) in [("", "its own", None), ("a", "a", Some("a"))] {
            let visit = now(Shared::new("disk", given, device()).admit(Client::default()));
            assert_eq!(now(visit.list(false))[0].description, listed);
            let export = now(visit.open("disk", false)).unwrap();
            assert_eq!(export.description.as_deref(), opened);
        }
    }

    #[test]
    fn under_any_name_clients_get_the_name_that_they_ask_for() {
        let visit = now(Shared::under_any_name("disk", "", device()).admit(Client::default()));
        for name in ["", "disk", "other"] {
            assert_eq!(now(visit.open(name, false)).unwrap().name, name);
        }
        assert_eq!(now(visit.list(false))[0].name, "disk");
    }
}
