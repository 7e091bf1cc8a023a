//! What a client may choose from: the server's exports, or devices that are opened for this client.

use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use blockhaul_block::{Device, Kind};
use blockhaul_catalog::{Certificate, Client, Dismissal, Listed, Visit};
use blockhaul_io::Stream;
use blockhaul_wire::ListEntry;
use blockhaul_wire::OptionError;
use blockhaul_wire::handshake::server::Refusal;

use crate::complaints::Complaints;
use crate::connection::Connection;
use crate::records::record;
use crate::{Config, Export};

/// Time in which a program sends its next option. Whoever takes longer may have mended meanwhile what an
/// export could not be opened for.
const AT_ONCE: Duration = Duration::from_secs(5);

/// The exports as one client sees them.
pub(crate) struct Hall<'a> {
    config: &'a Config,
    /// What was said of exports that cannot be opened.
    complaints: &'a Mutex<Complaints>,
    connection: Arc<Connection>,
    visit: Option<Arc<dyn Visit>>,
    /// The device that was opened last: clients ask about an export before they choose it.
    open: Option<(String, Arc<dyn Device>)>,
    /// Why one could not be opened for the option just before, and when.
    refused: Option<(String, Refusal, Instant)>,
    /// The connection is encrypted by now.
    tls: bool,
    /// For those who open devices: what the client has shown.
    certificate: Arc<OnceLock<Certificate>>,
    /// For those who open devices: whether they want no more of this client.
    dismissal: Arc<Dismissal>,
}

impl<'a> Hall<'a> {
    /// Admits a client.
    pub(crate) async fn enter(
        config: &'a Config,
        complaints: &'a Mutex<Complaints>,
        connection: Arc<Connection>,
        stream: Arc<Stream>,
    ) -> Result<Hall<'a>, String> {
        let certificate = Arc::<OnceLock<Certificate>>::default();
        let dismissal = Arc::<Dismissal>::default();
        let visit = match &config.visits {
            None => None,
            Some(visits) => {
                let client = Client {
                    stream: Some(stream),
                    certificate: certificate.clone(),
                    dismissal: dismissal.clone(),
                };
                let admitted = visits.admit(client).await;
                Some(admitted.map_err(|error| format!("not admitted: {error}"))?)
            }
        };
        let (open, refused, tls) = (None, None, false);
        Ok(Hall {
            config,
            complaints,
            connection,
            visit,
            open,
            refused,
            tls,
            certificate,
            dismissal,
        })
    }

    /// The connection is encrypted from here on: what was opened before counts no more.
    pub(crate) fn secured(&mut self, about: &blockhaul_tls::About) {
        if let Some(names) = &about.names {
            let (subject, issuer) = (names.subject.clone(), names.issuer.clone());
            // TLS comes up once.
            self.certificate.get_or_init(|| Certificate { subject, issuer });
        }
        self.tls = true;
        self.open = None;
    }

    /// The export of this name, for a client that selects contexts of it. Most choose it next, whether
    /// there are any or not: where it cannot be opened, that need not be found out and logged again.
    pub(crate) async fn find_for_contexts(&mut self, name: &str) -> Result<Export, Refusal> {
        let found = self.find(name).await;
        if let Err(refusal) = &found {
            self.refused = Some((name.into(), refusal.clone(), blockhaul_io::now()));
        }
        found
    }

    /// The export of this name, which the client chooses.
    pub(crate) async fn choose(&mut self, name: &str) -> Result<Export, Refusal> {
        match self.refused.take() {
            Some((refused, why, when))
                if refused == name && blockhaul_io::elapsed(when) < AT_ONCE =>
            {
                Err(why)
            }
            _ => self.find(name).await,
        }
    }

    /// The export of this name; the empty name stands for the first one, or the device's own default.
    pub(crate) async fn find(&mut self, name: &str) -> Result<Export, Refusal> {
        self.refused = None;
        let Some(visit) = &self.visit else {
            let exports = &self.config.exports;
            let named = exports.iter().find(|export| export.name == name);
            let found = named.or_else(|| exports.first().filter(|_| name.is_empty()));
            return found.cloned().ok_or_else(|| unknown(name));
        };
        let export =
            |device| Export { name: visit.named(name), description: String::new(), device };
        if let Some((open, device)) = &self.open
            && open == name
        {
            return Ok(export(device.clone()));
        }
        // Closed before another one is opened.
        self.open = None;
        match visit.open(name, self.tls).await {
            Ok(device) => {
                self.open = Some((name.into(), device.clone()));
                Ok(export(device))
            }
            Err(error) => {
                let complaints = self.complaints.lock().expect("no panic under this lock");
                complaints.unopened(&self.connection, name, &error);
                drop(complaints);
                let kind = match error.kind() {
                    Kind::ReadOnly | Kind::Refused => OptionError::Policy,
                    _ => OptionError::Unknown,
                };
                Err(Refusal::new(kind, error.text()))
            }
        }
    }

    /// The client's side of those who open devices.
    pub(crate) fn guest(&self) -> Guest {
        Guest { visit: self.visit.clone(), dismissal: self.dismissal.clone() }
    }

    /// All exports, but not more than a list may have.
    pub(crate) async fn list(&mut self) -> Result<Vec<ListEntry>, Refusal> {
        self.refused = None;
        let most = self.config.limits.exports;
        let Some(visit) = &self.visit else {
            return Ok(self.config.exports.iter().take(most).map(entry).collect());
        };
        match visit.list(self.tls).await {
            Ok(mut listed) => {
                if listed.len() > most {
                    let connection = &self.connection;
                    record!(Warn, connection; "only {most} of {} exports are listed", listed.len());
                    listed.truncate(most);
                }
                let entry =
                    |one: Listed| ListEntry { name: one.name, description: one.description };
                Ok(listed.into_iter().map(entry).collect())
            }
            Err(error) => {
                let connection = &self.connection;
                let why = error.text();
                record!(
                    Warn, connection, error = why;
                    "cannot list exports for {}: {error}", connection.peer
                );
                Err(Refusal::new(OptionError::Policy, error.text()))
            }
        }
    }
}

/// A client, as those who open devices know it.
pub(crate) struct Guest {
    /// What is told when the client goes.
    pub(crate) visit: Option<Arc<dyn Visit>>,
    /// Whether it is to leave.
    pub(crate) dismissal: Arc<Dismissal>,
}

/// An export in a list.
pub(crate) fn entry(export: &Export) -> ListEntry {
    let description = match export.description.is_empty() {
        true => export.device.facts().description.clone(),
        false => export.description.clone(),
    };
    ListEntry { name: export.name.clone(), description }
}

fn unknown(name: &str) -> Refusal {
    let shown = blockhaul_wire::printable(name.as_bytes(), 256);
    Refusal::new(OptionError::Unknown, format!("there is no export \"{shown}\""))
}
