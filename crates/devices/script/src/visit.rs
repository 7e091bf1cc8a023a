//! A connection, as scripts see it: `preconnect`, the list of exports, the default export, handles.

use std::sync::{Arc, OnceLock};

use blockhaul_block::{Device, Error, Kind, Result, ThreadModel};
use blockhaul_catalog::{Export, ExportClient, Exports, ListedExport, OpenFuture, Visit};
use blockhaul_io::BlockingPool;

use crate::connection::ScriptConnection;
use crate::handle::{ScriptDevice, ScriptHandle};
use crate::parse;
use crate::plugin::ScriptPlugin;

/// A script's exports: each client has its own connection.
pub(crate) struct ScriptExports {
    pub(crate) plugin: Arc<ScriptPlugin>,
    pub(crate) readonly: bool,
}

impl Exports for ScriptExports {
    fn admit(&self, client: ExportClient) -> OpenFuture<Arc<dyn Visit>> {
        let plugin = self.plugin.clone();
        let readonly = self.readonly;
        Box::pin(async move {
            let visit = ScriptVisit::enter(plugin, readonly, Some(client)).await?;
            Ok(Arc::new(visit) as Arc<dyn Visit>)
        })
    }
}

/// A connection.
#[derive(Clone)]
pub(crate) struct ScriptVisit(Arc<ScriptConnection>);

impl ScriptVisit {
    /// Admits a connection, when it is its turn and the script accepts it; without a client, it
    /// belongs to this program itself.
    pub(crate) async fn enter(
        plugin: Arc<ScriptPlugin>,
        readonly: bool,
        client: Option<ExportClient>,
    ) -> Result<ScriptVisit> {
        let turn = match plugin.model {
            ThreadModel::SerializeConnections => plugin.one_by_one.lock().await,
            _ => None,
        };
        let lane = match plugin.model {
            ThreadModel::Parallel => plugin.pool.clone(),
            ThreadModel::SerializeAllRequests => plugin.control.clone(),
            _ => Arc::new(BlockingPool::single("script")),
        };
        let default = OnceLock::new();
        let served = client.is_some();
        let client = client.unwrap_or_default();
        let connection =
            ScriptConnection { plugin, readonly, lane, client, served, default, _turn: turn };
        let visit = ScriptVisit(Arc::new(connection));
        visit.0.clone().run(ScriptConnection::preconnect).await?;
        Ok(visit)
    }

    /// Opens a handle.
    pub(crate) async fn open_handle(&self, name: &str, tls: bool) -> Result<Arc<dyn Device>> {
        if name.len() > parse::STRING_MAX {
            return Err(Error::new(Kind::NotFound, "the export's name is too long"));
        }
        if name.contains('\0') {
            return Err(Error::new(Kind::NotFound, "the export's name holds a zero byte"));
        }
        let name = name.to_string();
        let handle = self.0.clone().run(move |connection| open(connection, &name, tls)).await?;
        Ok(Arc::new(ScriptDevice(handle)))
    }
}

impl Visit for ScriptVisit {
    fn list(&self, tls: bool) -> OpenFuture<Vec<ListedExport>> {
        let connection = self.0.clone();
        Box::pin(async move { connection.run(move |connection| connection.list(tls)).await })
    }

    fn open(&self, name: &str, tls: bool) -> OpenFuture<Option<Export>> {
        let visit = self.clone();
        let name = name.to_string();
        Box::pin(async move {
            let device = visit.open_handle(&name, tls).await?;
            Ok(Some(Export::own(&name, device)))
        })
    }
}

/// A handle on what the name is for.
fn open(connection: &Arc<ScriptConnection>, name: &str, tls: bool) -> Result<Arc<ScriptHandle>> {
    let name = if name.is_empty() { connection.default_export(tls)? } else { name.to_string() };
    ScriptHandle::open(connection.clone(), &name, tls)
}
