//! Clients of a plugin: each is a connection, with the handles that it has opened.

use std::sync::{Arc, Mutex, Weak};

use blockhaul_block::{Device, Result};
use blockhaul_catalog::{Export, ExportClient, Exports, ListedExport, OpenFuture, Visit};

use crate::asynchronous;
use crate::connection::PluginConnection;
use crate::device::PluginDevice;
use crate::handle::PluginHandle;
use crate::plugin::Plugin;

/// A plugin's exports: each client has its own connection.
pub(crate) struct PluginExports {
    pub(crate) plugin: Arc<Plugin>,
    pub(crate) readonly: bool,
}

impl Exports for PluginExports {
    fn admit(&self, client: ExportClient) -> OpenFuture<Arc<dyn Visit>> {
        let plugin = self.plugin.clone();
        let readonly = self.readonly;
        Box::pin(async move {
            let visit = PluginVisit::enter(plugin, readonly, Some(client)).await?;
            Ok(Arc::new(visit) as Arc<dyn Visit>)
        })
    }
}

/// A client's connection.
#[derive(Clone)]
pub(crate) struct PluginVisit {
    connection: Arc<PluginConnection>,
    /// Open handles, to notify when the client disconnects.
    handles: Arc<Mutex<Vec<Weak<PluginHandle>>>>,
}

impl PluginVisit {
    /// Admits a connection, when it is its turn and the plugin accepts it; without a client, it
    /// belongs to this program itself.
    pub(crate) async fn enter(
        plugin: Arc<Plugin>,
        readonly: bool,
        client: Option<ExportClient>,
    ) -> Result<PluginVisit> {
        let connection = PluginConnection::enter(plugin, readonly, client).await?;
        Ok(PluginVisit { connection, handles: Arc::default() })
    }

    /// Opens a handle.
    pub(crate) async fn open_handle(&self, name: &str, tls: bool) -> Result<Arc<dyn Device>> {
        let name = name.to_string();
        let handles = self.handles.clone();
        let open = move |connection: &Arc<PluginConnection>| {
            let name = connection.export(&name, tls)?;
            let handle = PluginHandle::open(connection.clone(), name, tls)?;
            let mut handles = handles.lock().expect("no panic under this lock");
            handles.retain(|handle| handle.strong_count() > 0);
            handles.push(Arc::downgrade(&handle));
            Ok(handle)
        };
        let handle = self.connection.clone().run(open).await?;
        Ok(PluginDevice::over(handle))
    }
}

impl Visit for PluginVisit {
    fn list(&self, tls: bool) -> OpenFuture<Vec<ListedExport>> {
        let connection = self.connection.clone();
        Box::pin(async move { connection.run(move |connection| connection.list(tls)).await })
    }

    fn open(&self, name: &str, tls: bool) -> OpenFuture<Option<Export>> {
        let visit = self.clone();
        let name = name.to_string();
        Box::pin(async move {
            let device = visit.open_handle(&name, tls).await?;
            // The plugin has reported its default export by now.
            let default = visit.connection.known_default().filter(|_| name.is_empty());
            Ok(Some(Export::own(&default.unwrap_or(name), device)))
        })
    }

    fn gone(&self) {
        let open: Vec<_> = {
            let handles = self.handles.lock().expect("no panic under this lock");
            handles.iter().filter_map(Weak::upgrade).collect()
        };
        open.iter().for_each(|handle| asynchronous::cancel(handle));
    }
}
