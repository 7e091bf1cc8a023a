//! A connection, as scripts see it: `preconnect`, the list of exports, the default export, handles.

use std::ffi::OsString;
use std::sync::{Arc, OnceLock};

use block::{Client, Device, Error, Exports, Kind, Listed, Opening, Result, Visit};
use io::{Lane, Turn};

use crate::answer::Ended;
use crate::handle::{Handle, ScriptDevice};
use crate::parse;
use crate::plugin::{Plugin, ThreadModel, no_thread};

/// A script's exports: each client is a connection of its own.
pub(crate) struct ScriptExports {
    pub(crate) plugin: Arc<Plugin>,
    pub(crate) readonly: bool,
}

impl Exports for ScriptExports {
    fn admit(&self, client: Client) -> Opening<Arc<dyn Visit>> {
        let (plugin, readonly) = (self.plugin.clone(), self.readonly);
        Box::pin(async move {
            let visit = ScriptVisit::enter(plugin, readonly, Some(client)).await?;
            Ok(Arc::new(visit) as Arc<dyn Visit>)
        })
    }
}

/// A connection.
#[derive(Clone)]
pub(crate) struct ScriptVisit(Arc<Connection>);

/// What a connection's handles share.
pub(crate) struct Connection {
    pub(crate) plugin: Arc<Plugin>,
    pub(crate) readonly: bool,
    pub(crate) lane: Arc<Lane>,
    pub(crate) client: Client,
    /// A server's client is behind it, not this program itself.
    pub(crate) served: bool,
    /// Asked for once.
    default: OnceLock<Result<String>>,
    _turn: Option<Turn>,
}

impl ScriptVisit {
    /// Admits a connection, when it is its turn and the script has nothing against it; without a client,
    /// it is this program's own.
    pub(crate) async fn enter(
        plugin: Arc<Plugin>,
        readonly: bool,
        client: Option<Client>,
    ) -> Result<ScriptVisit> {
        let turn = match plugin.model {
            ThreadModel::SerializeConnections => plugin.turns.take().await,
            _ => None,
        };
        let lane = match plugin.model {
            ThreadModel::Parallel => plugin.pool.clone(),
            ThreadModel::SerializeAllRequests => plugin.control.clone(),
            _ => Arc::new(Lane::single("script")),
        };
        let default = OnceLock::new();
        let served = client.is_some();
        let client = client.unwrap_or_default();
        let connection =
            Connection { plugin, readonly, lane, client, served, default, _turn: turn };
        let visit = ScriptVisit(Arc::new(connection));
        visit.0.clone().run(Connection::preconnect).await?;
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
        let handle = self.0.clone().run(move |connection| connection.open(&name, tls)).await?;
        Ok(Arc::new(ScriptDevice(handle)))
    }
}

impl Visit for ScriptVisit {
    fn list(&self, tls: bool) -> Opening<Vec<Listed>> {
        let connection = self.0.clone();
        Box::pin(async move { connection.run(move |connection| connection.list(tls)).await })
    }

    fn open(&self, name: &str, tls: bool) -> Opening<Arc<dyn Device>> {
        let (visit, name) = (self.clone(), name.to_string());
        Box::pin(async move { visit.open_handle(&name, tls).await })
    }
}

/// A truth value as scripts get it.
pub(crate) fn word(value: bool) -> OsString {
    if value { "true".into() } else { "false".into() }
}

impl Connection {
    /// Runs a job on the connection's lane.
    async fn run<T: Send + 'static>(
        self: Arc<Self>,
        job: impl FnOnce(&Arc<Self>) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (completer, ticket) = io::ticket();
        let lane = self.lane.clone();
        lane.run(move || {
            let result = job(&self);
            // The connection may end here: then so may its thread, whose queue outlives it.
            drop(self);
            completer.complete(result);
        });
        ticket.await.map_err(no_thread)?
    }

    fn preconnect(self: &Arc<Self>) -> Result<()> {
        let args = [word(self.readonly)];
        self.plugin.call("preconnect", &args, &[], Some(&self.client)).map(drop)
    }

    fn list(self: &Arc<Self>, tls: bool) -> Result<Vec<Listed>> {
        let args = [word(self.readonly), word(tls)];
        match self.plugin.words("list_exports", &args, Some(&self.client))? {
            (Ended::Done, printed) => parse::exports(&String::from_utf8_lossy(&printed))
                .map_err(|why| self.wrong("list_exports", why)),
            _ => {
                let name = self.default_export(tls)?;
                Ok(vec![Listed { name, description: String::new() }])
            }
        }
    }

    /// The name behind the empty name.
    fn default_export(&self, tls: bool) -> Result<String> {
        self.default.get_or_init(|| self.ask_default_export(tls)).clone()
    }

    fn ask_default_export(&self, tls: bool) -> Result<String> {
        let args = [word(self.readonly), word(tls)];
        let (Ended::Done, printed) =
            self.plugin.words("default_export", &args, Some(&self.client))?
        else {
            return Ok(String::new());
        };
        let text = String::from_utf8_lossy(&printed);
        match parse::first_export(&text) {
            name if name.len() <= parse::STRING_MAX && !name.contains('\0') => Ok(name.into()),
            _ => Err(self.wrong("default_export", "the name is too long, or holds a zero byte")),
        }
    }

    fn open(self: &Arc<Self>, name: &str, tls: bool) -> Result<Arc<Handle>> {
        let name = match name.is_empty() {
            true => self.default_export(tls)?,
            false => name.to_string(),
        };
        Handle::open(self.clone(), &name, tls)
    }

    /// The error of an answer that cannot be used.
    pub(crate) fn wrong(&self, method: &str, why: &str) -> Error {
        Error::new(Kind::Io, format!("{}: {method}: {why}", self.plugin.script_of(method)))
    }
}
