//! A connection, as plugins see it: `preconnect`, the list of exports, the default export, handles.

use std::ffi::{CString, c_int};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use block::{Client, Device, Error, Exports, Kind, Listed, Opening, Result, Visit};
use io::{Lane, Turn};

use crate::abi::ThreadModel;
use crate::asynchronous;
use crate::context::{self, Context, Left};
use crate::device::PluginDevice;
use crate::handle::Handle;
use crate::lists;
use crate::overdue::Overdue;
use crate::plugin::Plugin;

/// Longest name of an export in bytes (NBD's bound).
const NAME_MAX: usize = 4096;

/// A plugin's exports: each client is a connection of its own.
pub(crate) struct PluginExports {
    pub(crate) plugin: Arc<Plugin>,
    pub(crate) readonly: bool,
}

impl Exports for PluginExports {
    fn admit(&self, client: Client) -> Opening<Arc<dyn Visit>> {
        let (plugin, readonly) = (self.plugin.clone(), self.readonly);
        Box::pin(async move {
            let visit = PluginVisit::enter(plugin, readonly, Some(client)).await?;
            Ok(Arc::new(visit) as Arc<dyn Visit>)
        })
    }
}

/// A connection. Below `PARALLEL` all its callbacks run on one thread.
#[derive(Clone)]
pub(crate) struct PluginVisit(Arc<Connection>);

/// What a connection's handles share.
pub(crate) struct Connection {
    pub(crate) plugin: Arc<Plugin>,
    pub(crate) readonly: bool,
    pub(crate) lane: Arc<Lane>,
    client: Client,
    /// A server's client is behind it, not this program itself.
    pub(crate) served: bool,
    /// Asked for once.
    default: OnceLock<Result<String>>,
    /// The same of each backend in a chain of filters.
    defaults: Arc<context::Defaults>,
    /// Those that are open, for when the client goes.
    handles: Mutex<Vec<Weak<Handle>>>,
    _turn: Option<Turn>,
}

impl PluginVisit {
    /// Admits a connection, when it is its turn and the plugin has nothing against it; without a client,
    /// it is this program's own.
    pub(crate) async fn enter(
        plugin: Arc<Plugin>,
        readonly: bool,
        client: Option<Client>,
    ) -> Result<PluginVisit> {
        let turn = match plugin.model {
            ThreadModel::SerializeConnections => plugin.turns.take().await,
            _ => None,
        };
        let lane = match plugin.model {
            ThreadModel::Parallel => plugin.pool.clone(),
            ThreadModel::SerializeAllRequests => plugin.control.clone(),
            _ => Arc::new(Lane::single(plugin.name.clone())),
        };
        let default = OnceLock::new();
        let handles = Mutex::default();
        let connection = Connection {
            plugin,
            readonly,
            lane,
            served: client.is_some(),
            client: client.unwrap_or_default(),
            default,
            defaults: Arc::default(),
            handles,
            _turn: turn,
        };
        let visit = PluginVisit(Arc::new(connection));
        if visit.0.plugin.abi.preconnect.is_some() {
            visit.0.clone().run(Connection::preconnect).await?;
        }
        Ok(visit)
    }

    /// Opens a handle.
    pub(crate) async fn open_handle(&self, name: &str, tls: bool) -> Result<Arc<dyn Device>> {
        if name.len() > NAME_MAX {
            return Err(Error::new(Kind::NotFound, "the export's name is too long"));
        }
        let name = name.to_string();
        let handle = self.0.clone().run(move |connection| connection.open(&name, tls)).await?;
        Ok(PluginDevice::over(handle))
    }
}

impl Visit for PluginVisit {
    fn list(&self, tls: bool) -> Opening<Vec<Listed>> {
        let connection = self.0.clone();
        Box::pin(async move { connection.run(move |connection| connection.list(tls)).await })
    }

    fn open(&self, name: &str, tls: bool) -> Opening<Arc<dyn Device>> {
        let (visit, name) = (self.clone(), name.to_string());
        Box::pin(async move { visit.open_handle(&name, tls).await })
    }

    fn named(&self, asked: &str) -> String {
        let default = self.0.default.get().filter(|_| asked.is_empty());
        default.and_then(|name| name.clone().ok()).unwrap_or_else(|| asked.to_string())
    }

    fn gone(&self) {
        let open: Vec<_> = {
            let handles = self.0.handles.lock().expect("no panic under this lock");
            handles.iter().filter_map(Weak::upgrade).collect()
        };
        open.iter().for_each(|handle| asynchronous::cancel(handle));
    }
}

impl Connection {
    /// Runs a job on the connection's thread. Where there is a timeout, a job that takes longer is an
    /// error; what it gives in the end is dropped.
    async fn run<T: Send + 'static>(
        self: Arc<Self>,
        job: impl FnOnce(&Arc<Self>) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (completer, ticket) = io::ticket();
        let (plugin, lane) = (self.plugin.clone(), self.lane.clone());
        let overdue = Overdue::of(&plugin);
        let timing = overdue.clone();
        lane.run(move || {
            let result = Overdue::during(timing.as_ref(), || job(&self));
            // The connection may end here: then so may its thread, whose queue outlives it.
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
            Error::new(Kind::Io, "cannot start a thread for a plugin").because(lost)
        })?
    }

    pub(crate) fn context(&self, export: Option<CString>, tls: bool) -> Context {
        Context {
            plugin: self.plugin.name.clone(),
            client: Some(self.client.clone()),
            export,
            tls,
            defaults: self.defaults.clone(),
            watchdog: self.plugin.host.watchdog,
            ..Context::default()
        }
    }

    fn preconnect(self: &Arc<Self>) -> Result<()> {
        let Some(preconnect) = self.plugin.abi.preconnect else { return Ok(()) };
        let context = Arc::new(self.context(None, false));
        // SAFETY: the callback takes a number; the lane keeps to the thread model.
        let (result, left) = context::call(&context, c"preconnect", || unsafe {
            preconnect(c_int::from(self.readonly))
        });
        self.settled(c_int::from(result != 0), "preconnect", &left)
    }

    /// An error for what is not 0.
    fn settled(&self, result: c_int, name: &str, left: &Left) -> Result<()> {
        if result == 0 {
            self.plugin.log_rest(left, 0);
            return Ok(());
        }
        Err(self.plugin.error(name, left))
    }

    fn list(self: &Arc<Self>, tls: bool) -> Result<Vec<Listed>> {
        let Some(list_exports) = self.plugin.abi.list_exports else {
            // Without a default export there is nothing to list.
            let default = self.default_export(tls).ok();
            let listed = |name| Listed { name, description: String::new() };
            return Ok(default.map(listed).into_iter().collect());
        };
        let mut exports = lists::Exports::default();
        let context = Arc::new(self.context(None, tls));
        let pointer = (&raw mut exports).cast();
        // SAFETY: the list lives through the call, and is used by the callback only meanwhile.
        let (result, left) = context::call(&context, c"list_exports", || unsafe {
            list_exports(c_int::from(self.readonly), c_int::from(tls), pointer)
        });
        self.settled(result, "list_exports", &left)?;
        // Without a name the default export is not listed.
        let default = match exports.default_at.is_empty() {
            true => None,
            false => self.default_export(tls).ok(),
        };
        exports.resolve(default.as_deref());
        let listed = exports.into_list().into_iter().map(|export| Listed {
            name: export.name,
            description: export.description.unwrap_or_default(),
        });
        Ok(listed.collect())
    }

    /// The name behind the empty name.
    fn default_export(&self, tls: bool) -> Result<String> {
        self.default.get_or_init(|| self.ask_default_export(tls)).clone()
    }

    fn ask_default_export(&self, tls: bool) -> Result<String> {
        let Some(default_export) = self.plugin.abi.default_export else {
            return Ok(String::new());
        };
        let context = Arc::new(self.context(None, tls));
        // SAFETY: the callback takes numbers; what it answers is a C string or null.
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

    fn open(self: &Arc<Self>, asked: &str, tls: bool) -> Result<Arc<Handle>> {
        let name = match asked.is_empty() {
            true => self.default_export(tls)?,
            false => asked.to_string(),
        };
        let zero = |_| Error::new(Kind::NotFound, "the export's name holds a zero byte");
        let name = CString::new(name).map_err(zero)?;
        let handle = Handle::open(self.clone(), name, tls)?;
        let mut handles = self.handles.lock().expect("no panic under this lock");
        handles.retain(|handle| handle.strong_count() > 0);
        handles.push(Arc::downgrade(&handle));
        Ok(handle)
    }
}
