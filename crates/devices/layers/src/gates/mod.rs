//! Gates decide about clients: who comes in, what they may open, and when the server is over.
//!
//! They see no requests. Their place among layers does not matter, but their order among themselves does: the
//! last one sees a client first.

mod exitlast;
mod exitwhen;
mod exportname;
mod ip;
mod limit;
mod tls_fallback;

use std::sync::Arc;

use blockhaul_block::Result;
use blockhaul_catalog::{Client, Export, Exports, Gate, Listed, Opening, Visit};

pub use exitlast::EXITLAST;
pub use exitwhen::EXITWHEN;
pub use exportname::EXPORTNAME;
pub use ip::IP;
pub use limit::LIMIT;
pub use tls_fallback::TLS_FALLBACK;

/// What a gate does with clients. Whatever is not said here stays as it is.
pub(crate) trait Rule: Send + Sync + 'static {
    /// Decides whether a client comes in; what is returned is dropped when it has left.
    fn admit(self: Arc<Self>, client: &Client) -> Result<Arc<dyn Guest>>;

    /// The gate is put before exports.
    fn start(self: &Arc<Self>) -> Result<()> {
        Ok(())
    }
}

/// A client that was admitted.
pub(crate) trait Guest: Send + Sync {
    /// It opens an export: under which name, or which one instead.
    fn open(&self, name: &str, tls: bool) -> Result<Choice> {
        let _ = tls;
        Ok(Choice::Name(name.to_string()))
    }

    /// What it gets of an export that is below.
    fn opened(&self, export: Export) -> Export {
        export
    }

    /// What it may open, given what there is.
    fn list(&self, listed: Vec<Listed>, tls: bool) -> Result<Vec<Listed>> {
        let _ = tls;
        Ok(listed)
    }

    /// Whether the list below is wanted at all.
    fn needs_list(&self, tls: bool) -> bool {
        let _ = tls;
        true
    }
}

/// What a client gets.
pub(crate) enum Choice {
    /// What is below, under this name.
    Name(String),
    /// Another export.
    Export(Export),
}

/// A gate with this rule.
pub(crate) fn gate(rule: Arc<impl Rule>) -> Result<Arc<dyn Gate>> {
    Ok(Arc::new(RuleGate(rule)))
}

struct RuleGate<R>(Arc<R>);

impl<R: Rule> Gate for RuleGate<R> {
    fn guard(self: Arc<Self>, inner: Arc<dyn Exports>) -> Result<Arc<dyn Exports>> {
        self.0.start()?;
        Ok(Arc::new(Gated { inner, rule: self.0.clone() }))
    }
}

struct Gated<R> {
    inner: Arc<dyn Exports>,
    rule: Arc<R>,
}

impl<R: Rule> Exports for Gated<R> {
    fn admit(&self, client: Client) -> Opening<Arc<dyn Visit>> {
        // Before anything below hears of the client.
        let guest = match self.rule.clone().admit(&client) {
            Ok(guest) => guest,
            Err(error) => return Box::pin(std::future::ready(Err(error))),
        };
        let admitted = self.inner.admit(client);
        Box::pin(async move {
            let visit = GatedVisit { inner: admitted.await?, guest };
            Ok(Arc::new(visit) as Arc<dyn Visit>)
        })
    }

    fn state(&self) -> Option<String> {
        self.inner.state()
    }
}

struct GatedVisit {
    inner: Arc<dyn Visit>,
    guest: Arc<dyn Guest>,
}

impl Visit for GatedVisit {
    fn list(&self, tls: bool) -> Opening<Vec<Listed>> {
        let guest = self.guest.clone();
        let below = guest.needs_list(tls).then(|| self.inner.list(tls));
        Box::pin(async move {
            let listed = match below {
                Some(below) => below.await?,
                None => Vec::new(),
            };
            guest.list(listed, tls)
        })
    }

    fn open(&self, name: &str, tls: bool) -> Opening<Option<Export>> {
        match self.guest.open(name, tls) {
            Ok(Choice::Name(name)) => {
                let (below, guest) = (self.inner.open(&name, tls), self.guest.clone());
                Box::pin(async move { Ok(below.await?.map(|export| guest.opened(export))) })
            }
            Ok(Choice::Export(export)) => Box::pin(std::future::ready(Ok(Some(export)))),
            Err(error) => Box::pin(std::future::ready(Err(error))),
        }
    }

    fn gone(&self) {
        self.inner.gone();
    }
}
