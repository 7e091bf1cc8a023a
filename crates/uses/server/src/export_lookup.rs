//! The server's exports as one client sees them.

use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use blockhaul_block::Kind;
use blockhaul_catalog::{ClientCertificate, Dismissal, Export, ExportClient, ListedExport, Visit};
use blockhaul_io::Stream;
use blockhaul_wire::ListEntry;
use blockhaul_wire::OptionError;
use blockhaul_wire::handshake::server::OptionRefusal;

use crate::connection::Connection;
use crate::log_fields::record;
use crate::log_limit::LogLimit;
use crate::{Limits, ServerConfig};

/// Time in which a program sends its next option. After that, the reason why an export could not be
/// opened may have been fixed.
const AT_ONCE: Duration = Duration::from_secs(5);

/// The exports as one client sees them.
pub(crate) struct ExportLookup<'a> {
    /// The limits of this client, which stay when those of the server change.
    pub(crate) limits: Arc<Limits>,
    /// Limits log lines about exports that cannot be opened.
    log_limit: &'a Mutex<LogLimit>,
    connection: Arc<Connection>,
    visit: Arc<dyn Visit>,
    /// The export opened last, by the requested name: clients query an export before they choose
    /// it.
    open: Option<(String, Export)>,
    /// The export that could not be opened for the previous option: name, why, and when.
    refused: Option<(String, OptionRefusal, Instant)>,
    /// The connection is encrypted.
    tls: bool,
    /// The client's certificate, for storage.
    certificate: Arc<OnceLock<ClientCertificate>>,
    /// The name of the client's key, for storage.
    key_name: Arc<OnceLock<String>>,
    /// Whether storage wants the client to leave.
    dismissal: Arc<Dismissal>,
}

impl<'a> ExportLookup<'a> {
    /// Admits a client.
    pub(crate) async fn enter(
        config: &ServerConfig,
        limits: Arc<Limits>,
        log_limit: &'a Mutex<LogLimit>,
        connection: Arc<Connection>,
        stream: Arc<Stream>,
    ) -> Result<ExportLookup<'a>, String> {
        let certificate = Arc::<OnceLock<ClientCertificate>>::default();
        let key_name = Arc::<OnceLock<String>>::default();
        let dismissal = Arc::<Dismissal>::default();
        let client = ExportClient {
            stream: Some(stream),
            certificate: certificate.clone(),
            key_name: key_name.clone(),
            dismissal: dismissal.clone(),
        };
        let admitted = config.exports.admit(client).await;
        let visit = admitted.map_err(|error| format!("not admitted: {error}"))?;
        let open = None;
        let refused = None;
        let tls = false;
        Ok(ExportLookup {
            limits,
            log_limit,
            connection,
            visit,
            open,
            refused,
            tls,
            certificate,
            key_name,
            dismissal,
        })
    }

    /// The connection is encrypted from here on: discards what was opened or refused before.
    pub(crate) fn secured(&mut self, about: &blockhaul_tls::TlsSessionInfo) {
        if let Some(names) = &about.names {
            let subject = names.subject.clone();
            let issuer = names.issuer.clone();
            // TLS is established once.
            self.certificate.get_or_init(|| ClientCertificate { subject, issuer });
        }
        if let Some(name) = &about.key_name {
            self.key_name.get_or_init(|| name.clone());
        }
        self.tls = true;
        self.open = None;
        self.refused = None;
    }

    /// The export of this name, for a client that selects its contexts. Most clients choose it
    /// next, with or without contexts: if it cannot be opened, do not try and log again.
    pub(crate) async fn find_for_contexts(&mut self, name: &str) -> Result<Export, OptionRefusal> {
        let found = self.find(name).await;
        if let Err(refusal) = &found {
            self.refused = Some((name.into(), refusal.clone(), blockhaul_io::now()));
        }
        found
    }

    /// The export of this name, which the client chooses.
    pub(crate) async fn choose(&mut self, name: &str) -> Result<Export, OptionRefusal> {
        match self.refused.take() {
            Some((refused, why, when))
                if refused == name && blockhaul_io::elapsed(when) < AT_ONCE =>
            {
                Err(why)
            }
            _ => self.find(name).await,
        }
    }

    /// The export of this name; the empty name selects the default one.
    pub(crate) async fn find(&mut self, name: &str) -> Result<Export, OptionRefusal> {
        self.refused = None;
        if let Some((open, export)) = &self.open
            && open == name
        {
            return Ok(export.clone());
        }
        // Close it before another one is opened.
        self.open = None;
        match self.visit.open(name, self.tls).await {
            Ok(Some(export)) => {
                self.open = Some((name.into(), export.clone()));
                Ok(export)
            }
            Ok(None) => Err(unknown(name)),
            Err(error) => {
                let log_limit = self.log_limit.lock().expect("no panic under this lock");
                log_limit.unopened(&self.connection, name, &error);
                drop(log_limit);
                let kind = match error.kind() {
                    Kind::ReadOnly | Kind::Refused | Kind::InUse => OptionError::Policy,
                    _ => OptionError::Unknown,
                };
                Err(OptionRefusal::new(kind, error.text()))
            }
        }
    }

    /// The client as storage knows it.
    pub(crate) fn visitor(&self) -> Visitor {
        Visitor { visit: self.visit.clone(), dismissal: self.dismissal.clone() }
    }

    /// All exports, up to the maximum of a list.
    pub(crate) async fn list(&mut self) -> Result<Vec<ListEntry>, OptionRefusal> {
        self.refused = None;
        let most = self.limits.exports;
        match self.visit.list(self.tls).await {
            Ok(mut listed) => {
                if listed.len() > most {
                    let connection = &self.connection;
                    record!(Warn, connection; "only {most} of {} exports are listed", listed.len());
                    listed.truncate(most);
                }
                let entry =
                    |one: ListedExport| ListEntry { name: one.name, description: one.description };
                Ok(listed.into_iter().map(entry).collect())
            }
            Err(error) => {
                let connection = &self.connection;
                let why = error.text();
                record!(
                    Warn, connection, error = why;
                    "cannot list exports for {}: {error}", connection.peer
                );
                Err(OptionRefusal::new(OptionError::Policy, error.text()))
            }
        }
    }
}

/// A client as storage knows it.
pub(crate) struct Visitor {
    /// Notified when the client disconnects.
    pub(crate) visit: Arc<dyn Visit>,
    /// Whether storage wants the client to leave.
    pub(crate) dismissal: Arc<Dismissal>,
}

fn unknown(name: &str) -> OptionRefusal {
    let shown = blockhaul_wire::printable(name.as_bytes(), 256);
    OptionRefusal::new(OptionError::Unknown, format!("there is no export \"{shown}\""))
}
