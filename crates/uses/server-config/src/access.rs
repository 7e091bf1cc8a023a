//! The rights and rates of clients, in force before the exports of a server.

use std::sync::{Arc, Mutex, MutexGuard};

use blockhaul_block::{Error, Kind, Result};
use blockhaul_catalog::{Export, ExportClient, Exports, ListedExport, OpenFuture, Visit};
use blockhaul_jobs::ExportTable;
use blockhaul_layers::AdjustableThrottle;

use crate::definition::ClientRights;

/// The rules about clients of a running server, which can change.
pub(crate) struct ClientAccess {
    rules: Mutex<Arc<AccessRules>>,
    table: Arc<ExportTable>,
}

/// The rules, in order.
#[derive(Default)]
struct AccessRules {
    /// Empty: each client has all rights.
    rules: Vec<Arc<AccessRule>>,
    /// Names of exports that no client sees yet.
    hidden: Vec<String>,
}

/// A rule, with the rates of its clients together.
struct AccessRule {
    rights: ClientRights,
    throttle: Arc<AdjustableThrottle>,
}

impl ClientAccess {
    pub(crate) fn new(rights: &[ClientRights], table: Arc<ExportTable>) -> Arc<ClientAccess> {
        let access = ClientAccess { rules: Mutex::default(), table };
        access.set(rights, Vec::new());
        Arc::new(access)
    }

    fn lock(&self) -> MutexGuard<'_, Arc<AccessRules>> {
        self.rules.lock().expect("no panic under this lock")
    }

    /// Uses these rules for clients that open an export from now on, and their rates also for present clients of a
    /// rule about the same clients. Exports of the names in `hidden` are shown to no client until [`ClientAccess::hide`].
    pub(crate) fn set(&self, rights: &[ClientRights], hidden: Vec<String>) {
        let mut current = self.lock();
        let rules = rights.iter().map(|rights| {
            let is_same = |rule: &&Arc<AccessRule>| rule.rights.pattern == rights.pattern;
            let throttle = match current.rules.iter().find(is_same) {
                Some(rule) => rule.throttle.clone(),
                None => Arc::new(AdjustableThrottle::new(None, None)),
            };
            throttle.set(rights.rate, rights.iops);
            Arc::new(AccessRule { rights: rights.clone(), throttle })
        });
        *current = Arc::new(AccessRules { rules: rules.collect(), hidden });
    }

    /// Shows exports of these names, and no others, to no client.
    pub(crate) fn hide(&self, hidden: Vec<String>) {
        let mut current = self.lock();
        *current = Arc::new(AccessRules { rules: current.rules.clone(), hidden });
    }

    /// Exports behind these rules.
    pub(crate) fn guard(self: &Arc<Self>, inner: Arc<dyn Exports>) -> Arc<dyn Exports> {
        Arc::new(AccessExports { inner, access: self.clone() })
    }

    /// What a client may do now.
    fn rights(&self, client: &ExportClient) -> Result<GrantedAccess> {
        let all = self.lock().clone();
        if all.rules.is_empty() {
            return Ok(GrantedAccess { rule: None, all });
        }
        let address = client.stream.as_ref().and_then(|stream| stream.peer().ip());
        let certificate = client.certificate.get().map(|names| names.subject.as_str());
        let key = client.key_name.get().map(String::as_str);
        let is_about =
            |rule: &&Arc<AccessRule>| rule.rights.pattern.matches(address, certificate, key);
        let Some(rule) = all.rules.iter().find(is_about).cloned() else {
            return Err(Error::new(Kind::Refused, "no rule for clients is about this one"));
        };
        Ok(GrantedAccess { rule: Some(rule), all })
    }
}

/// What a client may do.
struct GrantedAccess {
    /// The rule about the client; `None`: it has all rights.
    rule: Option<Arc<AccessRule>>,
    all: Arc<AccessRules>,
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
        !has(&self.all.hidden) && self.exports().is_none_or(has)
    }

    /// The form of an export that the client gets.
    fn restricted(&self, export: Export, table: &ExportTable) -> Result<Export> {
        let Some(rule) = &self.rule else { return Ok(export) };
        let ClientRights { write, rate, iops, .. } = rule.rights;
        let mut device = export.device;
        if !write {
            device = table.readonly(&device)?;
        }
        if rate.is_some() || iops.is_some() {
            device = rule.throttle.layer().wrap(device)?;
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
            let visit = AccessVisit { inner: admitted.await?, access, client };
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
        let table = self.access.table.clone();
        Box::pin(async move {
            // The export may have another name than the one that the client asked for.
            let found = below.await?.filter(|export| granted.sees(&export.name));
            found.map(|export| granted.restricted(export, &table)).transpose()
        })
    }

    fn gone(&self) {
        self.inner.gone();
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
