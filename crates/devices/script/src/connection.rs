//! State shared by the handles of a connection, and the methods called before there is a handle.

use std::ffi::OsString;
use std::sync::{Arc, OnceLock};

use blockhaul_block::{Error, Kind, Result};
use blockhaul_catalog::{ExportClient, ListedExport};
use blockhaul_io::{BlockingPool, FifoGuard};

use crate::answer::MethodResult;
use crate::parse;
use crate::plugin::{ScriptPlugin, no_thread};

/// State shared by a connection's handles.
pub(crate) struct ScriptConnection {
    pub(crate) plugin: Arc<ScriptPlugin>,
    pub(crate) readonly: bool,
    pub(crate) lane: Arc<BlockingPool>,
    pub(crate) client: ExportClient,
    /// It belongs to a server's client, not to this program itself.
    pub(crate) served: bool,
    /// Queried once.
    pub(crate) default: OnceLock<Result<String>>,
    pub(crate) _turn: Option<FifoGuard>,
}

/// A truth value in the form for scripts.
pub(crate) fn word(value: bool) -> OsString {
    if value { "true".into() } else { "false".into() }
}

impl ScriptConnection {
    /// Runs a job on the connection's lane.
    pub(crate) async fn run<T: Send + 'static>(
        self: Arc<Self>,
        job: impl FnOnce(&Arc<Self>) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (completer, ticket) = blockhaul_io::ticket();
        let lane = self.lane.clone();
        lane.run(move || {
            let result = job(&self);
            // The connection may end here, and its thread with it; the queue outlives it.
            drop(self);
            completer.complete(result);
        });
        ticket.await.map_err(no_thread)?
    }

    pub(crate) fn preconnect(self: &Arc<Self>) -> Result<()> {
        let args = [word(self.readonly)];
        self.plugin.call("preconnect", &args, &[], Some(&self.client)).map(drop)
    }

    pub(crate) fn list(self: &Arc<Self>, tls: bool) -> Result<Vec<ListedExport>> {
        let args = [word(self.readonly), word(tls)];
        match self.plugin.words("list_exports", &args, Some(&self.client))? {
            (MethodResult::Done, printed) => parse::exports(&String::from_utf8_lossy(&printed))
                .map_err(|why| self.wrong("list_exports", why)),
            _ => {
                let name = self.default_export(tls)?;
                Ok(vec![ListedExport { name, description: String::new() }])
            }
        }
    }

    /// The name that the empty name stands for.
    pub(crate) fn default_export(&self, tls: bool) -> Result<String> {
        self.default.get_or_init(|| self.ask_default_export(tls)).clone()
    }

    fn ask_default_export(&self, tls: bool) -> Result<String> {
        let args = [word(self.readonly), word(tls)];
        let (MethodResult::Done, printed) =
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

    /// The error for an invalid reply.
    pub(crate) fn wrong(&self, method: &str, why: &str) -> Error {
        Error::new(Kind::Io, format!("{}: {method}: {why}", self.plugin.script_of(method)))
            .complete()
    }
}
