//! The rights and rates of clients, in force before the exports of a server.

use std::sync::{Arc, Mutex, MutexGuard};

use blockhaul_block::{Error, Kind, Result};
use blockhaul_catalog::{Export, ExportClient, Exports, ListedExport, OpenFuture, Visit};
use blockhaul_jobs::ExportTable;
use blockhaul_layers::{SharedThrottle, ThrottledConnection};
use blockhaul_tls::DistinguishedName;

use crate::definition::ClientRights;

/// The rules about clients of a running server, which can change.
pub(crate) struct ClientAccess {
    /// The rules, in order. Empty: each client has all rights.
    rules: Mutex<Arc<[Arc<AccessRule>]>>,
    table: Arc<ExportTable>,
}

/// A rule, with the rates of its clients together.
struct AccessRule {
    rights: ClientRights,
    throttle: Arc<SharedThrottle>,
}

impl ClientAccess {
    pub(crate) fn new(rights: &[ClientRights], table: Arc<ExportTable>) -> Arc<ClientAccess> {
        let access = ClientAccess { rules: Mutex::default(), table };
        access.set(rights);
        Arc::new(access)
    }

    fn lock(&self) -> MutexGuard<'_, Arc<[Arc<AccessRule>]>> {
        self.rules.lock().expect("no panic under this lock")
    }

    /// Uses these rules for clients that open an export from now on, and their rates also for present clients of a
    /// rule about the same clients.
    pub(crate) fn set(&self, rights: &[ClientRights]) {
        let mut current = self.lock();
        let rules = rights.iter().map(|rights| {
            let is_same = |rule: &&Arc<AccessRule>| rule.rights.pattern == rights.pattern;
            let throttle = match current.iter().find(is_same) {
                Some(rule) => rule.throttle.clone(),
                None => Arc::new(SharedThrottle::new(None, None)),
            };
            throttle.set(rights.rate, rights.iops);
            Arc::new(AccessRule { rights: rights.clone(), throttle })
        });
        *current = rules.collect();
    }

    /// Exports behind these rules.
    pub(crate) fn guard(self: &Arc<Self>, inner: Arc<dyn Exports>) -> Arc<dyn Exports> {
        Arc::new(AccessExports { inner, access: self.clone() })
    }

    /// What a client may do now.
    fn rights(&self, client: &ExportClient) -> Result<GrantedAccess> {
        let all = self.lock().clone();
        if all.is_empty() {
            return Ok(GrantedAccess { rule: None });
        }
        let address = client.stream.as_ref().and_then(|stream| stream.peer().ip());
        // A subject that cannot be parsed is that of no rule.
        let certificate = client.certificate.get();
        let certificate =
            certificate.and_then(|names| DistinguishedName::parse(&names.subject).ok());
        let key = client.key_name.get().map(String::as_str);
        let is_about = |rule: &&Arc<AccessRule>| {
            rule.rights.pattern.matches(address, certificate.as_ref(), key)
        };
        let Some(rule) = all.iter().find(is_about).cloned() else {
            return Err(Error::new(Kind::Refused, "no rule for clients is about this one"));
        };
        Ok(GrantedAccess { rule: Some(rule) })
    }
}

/// What a client may do.
struct GrantedAccess {
    /// The rule about the client; `None`: it has all rights.
    rule: Option<Arc<AccessRule>>,
}

impl GrantedAccess {
    /// The names of the exports that the client sees, with those below them; `None`: all.
    fn exports(&self) -> Option<&[String]> {
        self.rule.as_ref()?.rights.exports.as_deref()
    }

    /// The export that the client means; `None`: it sees none.
    fn name<'a>(&'a self, name: &'a str) -> Option<&'a str> {
        match self.exports() {
            Some(visible) if name.is_empty() && !self.sees("") => {
                visible.first().map(String::as_str)
            }
            _ => Some(name),
        }
    }

    fn sees(&self, name: &str) -> bool {
        let has = |names: &[String]| names.iter().any(|own| is_below(name, own));
        self.exports().is_none_or(has)
    }

    /// The form of an export that the client gets.
    fn restricted(
        &self,
        export: Export,
        table: &ExportTable,
        connection: Arc<ThrottledConnection>,
    ) -> Result<Export> {
        let Some(rule) = &self.rule else { return Ok(export) };
        let ClientRights { write, rate, iops, .. } = rule.rights;
        let mut device = export.device;
        if !write {
            device = table.readonly(&device)?;
        }
        if rate.is_some() || iops.is_some() {
            device = rule.throttle.wrap(device, connection);
        }
        Ok(Export { device, ..export })
    }
}

/// Whether a name is that of an export, or below it. Nothing is below the empty name: each name would be.
fn is_below(name: &str, own: &str) -> bool {
    match name.strip_prefix(own) {
        Some(rest) => rest.is_empty() || (!own.is_empty() && rest.starts_with('/')),
        None => false,
    }
}

struct AccessExports {
    inner: Arc<dyn Exports>,
    access: Arc<ClientAccess>,
}

impl Exports for AccessExports {
    fn admit(&self, client: ExportClient) -> OpenFuture<Arc<dyn Visit>> {
        let admitted = self.inner.admit(client.clone());
        let access = self.access.clone();
        Box::pin(async move {
            let connection = Arc::default();
            let visit = AccessVisit { inner: admitted.await?, access, client, connection };
            Ok(Arc::new(visit) as Arc<dyn Visit>)
        })
    }

    fn state(&self) -> Option<String> {
        self.inner.state()
    }
}

/// A client. Its rule is found when it lists or opens exports: TLS comes after it was admitted.
struct AccessVisit {
    inner: Arc<dyn Visit>,
    access: Arc<ClientAccess>,
    client: ExportClient,
    /// The client for the rate of its rule.
    connection: Arc<ThrottledConnection>,
}

impl Visit for AccessVisit {
    fn list(&self, tls: bool) -> OpenFuture<Vec<ListedExport>> {
        let granted = match self.access.rights(&self.client) {
            Ok(granted) => granted,
            Err(error) => return Box::pin(std::future::ready(Err(error))),
        };
        let below = self.inner.list(tls);
        Box::pin(async move {
            let mut listed = below.await?;
            listed.retain(|one| granted.sees(&one.name));
            Ok(listed)
        })
    }

    fn open(&self, name: &str, tls: bool) -> OpenFuture<Option<Export>> {
        let granted = match self.access.rights(&self.client) {
            Ok(granted) => granted,
            Err(error) => return Box::pin(std::future::ready(Err(error))),
        };
        let Some(below) = granted.name(name).filter(|name| granted.sees(name)) else {
            return Box::pin(std::future::ready(Ok(None)));
        };
        let below = self.inner.open(below, tls);
        let (table, connection) = (self.access.table.clone(), self.connection.clone());
        Box::pin(async move {
            // The export may have another name than the one that the client asked for.
            let found = below.await?.filter(|export| granted.sees(&export.name));
            found.map(|export| granted.restricted(export, &table, connection)).transpose()
        })
    }

    fn gone(&self) {
        self.inner.gone();
    }

    fn unreachable(&self) {
        self.connection.leave();
        self.inner.unreachable();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_below_an_export_belong_to_it() {
        assert!(is_below("vms", "vms") && is_below("vms/a.img", "vms"));
        assert!(!is_below("vms2", "vms") && !is_below("", "vms") && !is_below("vm", "vms"));
        assert!(is_below("", "") && !is_below("a", "") && !is_below("/a", ""));
    }
}
