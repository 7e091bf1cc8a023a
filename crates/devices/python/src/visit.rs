//! A client, as plugins see it: `preconnect`, the list of exports, handles.

use std::os::fd::AsFd as _;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use blockhaul_block::{Device, Error, Kind, Result, ThreadModel};
use blockhaul_catalog::{Export, ExportClient, Exports, ListedExport, OpenFuture, Visit};
use blockhaul_io::FifoGuard;
use blockhaul_os::PeerCredentials;
use serde_json::{Value, json};

use crate::device::{PythonDevice, PythonHandle};
use crate::facts::OpenReply;
use crate::host::{PythonHost, message};
use crate::keeper::HostKeeper;
use crate::wire::HostCommand;

/// Longest name of an export, in bytes (NBD's document).
const NAME_MAX: usize = 4096;

/// A plugin's exports: each client has its own connection.
pub(crate) struct PythonExports {
    pub(crate) keeper: HostKeeper,
    pub(crate) readonly: bool,
}

impl Exports for PythonExports {
    fn admit(&self, client: ExportClient) -> OpenFuture<Arc<dyn Visit>> {
        let keeper = self.keeper.clone();
        let readonly = self.readonly;
        Box::pin(async move {
            let host = keeper.present().await?;
            let visit = PythonVisit::enter(host, readonly, Some(client)).await?;
            Ok(Arc::new(visit) as Arc<dyn Visit>)
        })
    }

    fn state(&self) -> Option<String> {
        Some(self.keeper.state_text())
    }
}

/// A connection.
pub(crate) struct PythonConnection {
    pub(crate) host: Arc<PythonHost>,
    pub(crate) number: u64,
    client: ExportClient,
    /// It belongs to a server's client, not to this program itself.
    served: bool,
    /// Handles that are open.
    handles: Mutex<Vec<Weak<PythonHandle>>>,
    _turn: Option<FifoGuard>,
}

impl Drop for PythonConnection {
    fn drop(&mut self) {
        self.host.inner.notify(HostCommand::Leave, 0, self.number);
        self.host.inner.leave(self.number);
    }
}

/// A visit, to be shared with the handles that it opens. Cloning shares it.
#[derive(Clone)]
pub(crate) struct PythonVisit(Arc<PythonConnection>);

impl PythonVisit {
    /// Admits a connection, when it is its turn and the plugin accepts it; without a client, it
    /// belongs to this program itself.
    pub(crate) async fn enter(
        host: Arc<PythonHost>,
        readonly: bool,
        client: Option<ExportClient>,
    ) -> Result<PythonVisit> {
        let turn = match host.model {
            ThreadModel::SerializeConnections => host.one_by_one.lock().await,
            _ => None,
        };
        let served = client.is_some();
        let client = client.unwrap_or_default();
        let number = host.inner.enter(client.clone());
        let handles = Mutex::default();
        let _turn = turn;
        let visitor = PythonConnection { host, number, client, served, handles, _turn };
        let about = about(&visitor.client, readonly);
        visitor.host.inner.control(HostCommand::Enter, 0, number, &message(&about)).await?;
        Ok(PythonVisit(Arc::new(visitor)))
    }

    /// The process that it visits.
    pub(crate) fn host(&self) -> &Arc<PythonHost> {
        &self.0.host
    }

    /// Opens a handle.
    pub(crate) async fn open_handle(
        &self,
        name: &str,
        tls: bool,
    ) -> Result<(String, Arc<dyn Device>)> {
        if name.len() > NAME_MAX || name.contains('\0') {
            let text = "the export's name is too long, or has a zero byte";
            return Err(Error::new(Kind::NotFound, text));
        }
        let visitor = &self.0;
        let inner = &visitor.host.inner;
        let mut opening = certified(&visitor.client);
        opening["export"] = name.into();
        opening["tls"] = tls.into();
        let number = inner.new_handle();
        let answer =
            inner.control(HostCommand::Open, number, visitor.number, &message(&opening)).await?;
        let answers: OpenReply = inner.parsed("open", &answer)?;
        let shown = if answers.export.is_empty() {
            inner.shown.clone()
        } else {
            format!("{}/{}", inner.shown, answers.export)
        };
        let single = visitor.host.model == ThreadModel::SerializeConnections;
        let facts = answers.facts(&shown, visitor.served, single);
        let mut handle = PythonHandle {
            visitor: visitor.clone(),
            number,
            facts: Arc::new(blockhaul_block::Facts::new(shown, 0)),
            native_zero: answers.zero,
            fua: answers.fua(),
            cache: answers.cache(),
        };
        // An error drops the handle, which closes it.
        handle.facts = Arc::new(facts?);
        let handle = Arc::new(handle);
        let mut handles = visitor.handles.lock().unwrap_or_else(PoisonError::into_inner);
        handles.retain(|handle| handle.strong_count() > 0);
        handles.push(Arc::downgrade(&handle));
        drop(handles);
        Ok((answers.export, Arc::new(PythonDevice(handle))))
    }
}

impl Visit for PythonVisit {
    fn list(&self, tls: bool) -> OpenFuture<Vec<ListedExport>> {
        let visitor = self.0.clone();
        Box::pin(async move {
            let inner = &visitor.host.inner;
            let mut about = certified(&visitor.client);
            about["tls"] = tls.into();
            let answer =
                inner.control(HostCommand::List, 0, visitor.number, &message(&about)).await?;
            let pairs: Vec<(String, String)> = inner.parsed("list_exports", &answer)?;
            Ok(pairs
                .into_iter()
                .map(|(name, description)| ListedExport { name, description })
                .collect())
        })
    }

    fn open(&self, name: &str, tls: bool) -> OpenFuture<Option<Export>> {
        let visit = PythonVisit(self.0.clone());
        let name = name.to_string();
        Box::pin(async move {
            let (found, device) = visit.open_handle(&name, tls).await?;
            Ok(Some(Export::own(&found, device)))
        })
    }

    fn gone(&self) {
        let handles = self.0.handles.lock().unwrap_or_else(PoisonError::into_inner);
        for handle in handles.iter().filter_map(Weak::upgrade) {
            self.0.host.inner.cancel(handle.number, 0);
        }
    }
}

/// What a plugin may ask about a client when it connects.
fn about(client: &ExportClient, readonly: bool) -> Value {
    let mut about = json!({ "readonly": readonly });
    let Some(stream) = &client.stream else { return about };
    about["peer_name"] = stream.peer().to_string().into();
    if let Ok(Some(PeerCredentials { pid, uid, gid })) = PeerCredentials::of_peer(stream.as_fd()) {
        about["peer_pid"] = pid.into();
        about["peer_uid"] = uid.into();
        about["peer_gid"] = gid.into();
    }
    about
}

/// What its certificate says, once TLS is up.
fn certified(client: &ExportClient) -> Value {
    match client.certificate.get() {
        Some(certificate) => {
            json!({ "subject": certificate.subject, "issuer": certificate.issuer })
        }
        None => json!({}),
    }
}
