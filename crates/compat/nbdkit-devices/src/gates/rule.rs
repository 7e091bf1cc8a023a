//! What a gate decides, and how exports are guarded by it.

use std::sync::Arc;

use blockhaul_block::Result;
use blockhaul_catalog::{Export, ExportClient, Exports, Gate, ListedExport, OpenFuture, Visit};
use blockhaul_io::Ticket;

/// The decisions of a gate. The defaults change nothing.
pub(super) trait GateRule: Send + Sync + 'static {
    /// Decides whether to admit a client; the returned value is dropped when the client has
    /// disconnected.
    fn admit(self: Arc<Self>, client: &ExportClient) -> Result<Arc<dyn GateClient>>;

    /// What a client that is not admitted waits for, before the gate decides again; without it, the
    /// client is disconnected.
    fn next_change(&self) -> Option<Ticket<()>> {
        None
    }

    /// Called when the gate is put before exports.
    fn start(self: &Arc<Self>) -> Result<()> {
        Ok(())
    }
}

/// A client that was admitted.
pub(super) trait GateClient: Send + Sync {
    /// It opens an export: the name to use, or another export instead.
    fn open(&self, name: &str, tls: bool) -> Result<ExportChoice> {
        let _ = tls;
        Ok(ExportChoice::Name(name.to_string()))
    }

    /// What it gets of an export below.
    fn opened(&self, export: Export) -> Export {
        export
    }

    /// The exports that it may open, given those below.
    fn list(&self, listed: Vec<ListedExport>, tls: bool) -> Result<Vec<ListedExport>> {
        let _ = tls;
        Ok(listed)
    }

    /// Whether the list below is needed at all.
    fn needs_list(&self, tls: bool) -> bool {
        let _ = tls;
        true
    }
}

/// The result of opening an export.
pub(super) enum ExportChoice {
    /// The export below with this name.
    Name(String),
    /// Another export.
    Export(Export),
}

/// A gate with this rule.
pub(super) fn gate(rule: Arc<impl GateRule>) -> Result<Arc<dyn Gate>> {
    Ok(Arc::new(RuleGate(rule)))
}

struct RuleGate<R>(Arc<R>);

impl<R: GateRule> Gate for RuleGate<R> {
    fn guard(self: Arc<Self>, inner: Arc<dyn Exports>) -> Result<Arc<dyn Exports>> {
        self.0.start()?;
        Ok(Arc::new(GatedExports { inner, rule: self.0.clone() }))
    }
}

struct GatedExports<R> {
    inner: Arc<dyn Exports>,
    rule: Arc<R>,
}

impl<R: GateRule> Exports for GatedExports<R> {
    fn admit(&self, client: ExportClient) -> OpenFuture<Arc<dyn Visit>> {
        // Before anything below sees the client. A change after this decision is not lost.
        let change = self.rule.next_change();
        let guest = match (self.rule.clone().admit(&client), change) {
            (Ok(guest), _) => guest,
            (Err(error), None) => return Box::pin(std::future::ready(Err(error))),
            (Err(_), Some(change)) => {
                let waited = enter_later(self.rule.clone(), self.inner.clone(), client, change);
                return Box::pin(waited);
            }
        };
        Box::pin(enter(guest, self.inner.admit(client)))
    }

    fn state(&self) -> Option<String> {
        self.inner.state()
    }
}

/// Admits a client as soon as the rule does.
async fn enter_later(
    rule: Arc<impl GateRule>,
    inner: Arc<dyn Exports>,
    client: ExportClient,
    mut change: Ticket<()>,
) -> Result<Arc<dyn Visit>> {
    loop {
        // If the rule is gone, its next decision says so.
        let _ = change.await;
        let next = rule.next_change();
        match (rule.clone().admit(&client), next) {
            (Ok(guest), _) => return enter(guest, inner.admit(client)).await,
            (Err(error), None) => return Err(error),
            (Err(_), Some(next)) => change = next,
        }
    }
}

async fn enter(
    guest: Arc<dyn GateClient>,
    admitted: OpenFuture<Arc<dyn Visit>>,
) -> Result<Arc<dyn Visit>> {
    let visit = GatedVisit { inner: admitted.await?, guest };
    Ok(Arc::new(visit) as Arc<dyn Visit>)
}

struct GatedVisit {
    inner: Arc<dyn Visit>,
    guest: Arc<dyn GateClient>,
}

impl Visit for GatedVisit {
    fn list(&self, tls: bool) -> OpenFuture<Vec<ListedExport>> {
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

    fn open(&self, name: &str, tls: bool) -> OpenFuture<Option<Export>> {
        match self.guest.open(name, tls) {
            Ok(ExportChoice::Name(name)) => {
                let below = self.inner.open(&name, tls);
                let guest = self.guest.clone();
                Box::pin(async move { Ok(below.await?.map(|export| guest.opened(export))) })
            }
            Ok(ExportChoice::Export(export)) => Box::pin(std::future::ready(Ok(Some(export)))),
            Err(error) => Box::pin(std::future::ready(Err(error))),
        }
    }

    fn gone(&self) {
        self.inner.gone();
    }

    fn unreachable(&self) {
        self.inner.unreachable();
    }
}
