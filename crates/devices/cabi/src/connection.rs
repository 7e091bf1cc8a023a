//! A connection to a plugin: the thread of its callbacks, `preconnect`, the list of exports, the
//! default export. Shared by its handles.

use std::ffi::{CString, c_int};
use std::sync::{Arc, OnceLock};

use blockhaul_block::{Error, Kind, Result, ThreadModel};
use blockhaul_catalog::{ExportClient, ListedExport};
use blockhaul_io::{BlockingPool, FifoGuard};

use crate::context::{self, CallContext, CallResults};
use crate::lists;
use crate::overdue::CallTimeout;
use crate::plugin::Plugin;

/// Maximum length of an export's name in bytes (NBD's limit).
const NAME_MAX: usize = 4096;

/// A connection. Below `PARALLEL` all its callbacks run on one thread.
pub(crate) struct PluginConnection {
    pub(crate) plugin: Arc<Plugin>,
    pub(crate) readonly: bool,
    pub(crate) lane: Arc<BlockingPool>,
    client: ExportClient,
    /// It belongs to a server's client, not to this program itself.
    pub(crate) served: bool,
    /// Queried once.
    default: OnceLock<Result<String>>,
    /// The same for each backend in a chain of filters.
    defaults: Arc<context::DefaultExports>,
    _turn: Option<FifoGuard>,
}

impl PluginConnection {
    /// Admits a connection, when it is its turn and the plugin accepts it; without a client, it
    /// belongs to this program itself.
    pub(crate) async fn enter(
        plugin: Arc<Plugin>,
        readonly: bool,
        client: Option<ExportClient>,
    ) -> Result<Arc<PluginConnection>> {
        let turn = match plugin.model {
            ThreadModel::SerializeConnections => plugin.one_by_one.lock().await,
            _ => None,
        };
        let lane = match plugin.model {
            ThreadModel::Parallel => plugin.pool.clone(),
            ThreadModel::SerializeAllRequests => plugin.control.clone(),
            _ => Arc::new(BlockingPool::single(plugin.name.clone())),
        };
        let default = OnceLock::new();
        let connection = PluginConnection {
            plugin,
            readonly,
            lane,
            served: client.is_some(),
            client: client.unwrap_or_default(),
            default,
            defaults: Arc::default(),
            _turn: turn,
        };
        let connection = Arc::new(connection);
        if connection.plugin.abi.preconnect.is_some() {
            connection.clone().run(PluginConnection::preconnect).await?;
        }
        Ok(connection)
    }

    /// Runs a job on the connection's thread. With a timeout, a job that takes longer is an error;
    /// its later result is dropped.
    pub(crate) async fn run<T: Send + 'static>(
        self: Arc<Self>,
        job: impl FnOnce(&Arc<Self>) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (completer, ticket) = blockhaul_io::ticket();
        let plugin = self.plugin.clone();
        let lane = self.lane.clone();
        let overdue = CallTimeout::of(&plugin);
        let timing = overdue.clone();
        lane.run(move || {
            let result = CallTimeout::during(timing.as_ref(), || job(&self));
            // The connection may end here, and its thread with it; the queue outlives it.
            drop(self);
            completer.complete(result);
        });
        let result = match &overdue {
            None => ticket.await,
            Some(overdue) => match overdue.wait(ticket).await {
                Ok(result) => result,
                Err(stage) => return Err(plugin.no_return(stage, overdue.limit)),
            },
        };
        result.map_err(|lost| {
            Error::new(Kind::Io, "cannot start a thread for a plugin").complete().because(lost)
        })?
    }

    /// The context for callbacks.
    pub(crate) fn context(&self, export: Option<CString>, tls: bool) -> CallContext {
        CallContext {
            plugin: self.plugin.name.as_str().into(),
            client: Some(self.client.clone()),
            export,
            tls,
            defaults: self.defaults.clone(),
            watchdog: self.plugin.host.watchdog,
            shutdown: Some(self.plugin.shutdown.clone()),
            ..CallContext::default()
        }
    }

    fn preconnect(self: &Arc<Self>) -> Result<()> {
        let Some(preconnect) = self.plugin.abi.preconnect else { return Ok(()) };
        let context = Arc::new(self.context(None, false));
        // SAFETY: the callback takes a number; the lane follows the thread model.
        let (result, left) = context::call(&context, c"preconnect", || unsafe {
            preconnect(c_int::from(self.readonly))
        });
        self.settled(c_int::from(result != 0), "preconnect", &left)
    }

    /// An error if the result is not 0.
    fn settled(&self, result: c_int, name: &str, left: &CallResults) -> Result<()> {
        if result == 0 {
            self.plugin.log_rest(left, 0);
            return Ok(());
        }
        Err(self.plugin.error(name, left))
    }

    /// Lists its exports. Runs on its thread.
    pub(crate) fn list(self: &Arc<Self>, tls: bool) -> Result<Vec<ListedExport>> {
        let Some(list_exports) = self.plugin.abi.list_exports else {
            // Without a default export there is nothing to list.
            let default = self.default_export(tls).ok();
            let listed = |name| ListedExport { name, description: String::new() };
            return Ok(default.map(listed).into_iter().collect());
        };
        let mut exports = lists::ExportList::default();
        let context = Arc::new(self.context(None, tls));
        let pointer = (&raw mut exports).cast();
        // SAFETY: the list lives through the call, and only the callback uses it meanwhile.
        let (result, left) = context::call(&context, c"list_exports", || unsafe {
            list_exports(c_int::from(self.readonly), c_int::from(tls), pointer)
        });
        self.settled(result, "list_exports", &left)?;
        // Without a name the default export is not listed.
        let default =
            if exports.default_at.is_empty() { None } else { self.default_export(tls).ok() };
        exports.resolve(default.as_deref());
        let listed = exports.into_list().into_iter().map(|export| ListedExport {
            name: export.name,
            description: export.description.unwrap_or_default(),
        });
        Ok(listed.collect())
    }

    /// The name that the empty name stands for.
    fn default_export(&self, tls: bool) -> Result<String> {
        self.default.get_or_init(|| self.ask_default_export(tls)).clone()
    }

    fn ask_default_export(&self, tls: bool) -> Result<String> {
        let Some(default_export) = self.plugin.abi.default_export else {
            return Ok(String::new());
        };
        let context = Arc::new(self.context(None, tls));
        // SAFETY: the callback takes numbers and returns a C string or null.
        let (name, left) = context::call(&context, c"default_export", || unsafe {
            default_export(c_int::from(self.readonly), c_int::from(tls))
        });
        // SAFETY: as the callback's contract says; copied at once.
        match unsafe { crate::api::text(name) } {
            Some(name) if name.len() <= NAME_MAX => Ok(name.into_owned()),
            Some(_) => Err(Error::new(Kind::NotFound, "the default export's name is too long")),
            None if left.text.is_empty() => {
                let text = format!("plugin {} has no default export: name one", self.plugin.name);
                Err(Error::new(Kind::NotFound, text))
            }
            None => Err(Error::new(Kind::NotFound, left.text)),
        }
    }

    /// The name of the export that a request for this name opens.
    pub(crate) fn export(&self, asked: &str, tls: bool) -> Result<CString> {
        if asked.len() > NAME_MAX {
            return Err(Error::new(Kind::NotFound, "the export's name is too long"));
        }
        let name = if asked.is_empty() { self.default_export(tls)? } else { asked.to_string() };
        let zero = |_| Error::new(Kind::NotFound, "the export's name holds a zero byte");
        CString::new(name).map_err(zero)
    }

    /// The name that the empty name stands for, if known.
    pub(crate) fn known_default(&self) -> Option<String> {
        self.default.get()?.clone().ok()
    }
}
