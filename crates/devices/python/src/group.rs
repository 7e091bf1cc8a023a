//! A plugin in several processes (`@processes`), for callbacks that compute: Python runs one thread of a
//! process at a time. Each process loads the plugin, and each client has a handle in every process.

use std::sync::{Arc, Mutex, MutexGuard};

use blockhaul_block::{Device, Error, Kind, Result, ThreadModel};
use blockhaul_catalog::{
    Export, ExportClient, Exports, HandleOpener, ListedExport, OpenFuture, OpenedDevice, Shutdown,
    Visit,
};
use blockhaul_io::FifoLock;

use crate::group_device::{GroupDevice, GroupHandle};
use crate::host::PythonHost;
use crate::keeper::HostKeeper;
use crate::settings::PythonSettings;
use crate::visit::PythonVisit;

/// The processes of a plugin.
pub(crate) struct PluginGroup {
    keepers: Vec<HostKeeper>,
}

impl PluginGroup {
    /// Starts all processes. The first one alone: an error of the script is reported once.
    pub(crate) async fn start(
        settings: PythonSettings,
        shutdown: Shutdown,
    ) -> Result<Arc<PluginGroup>> {
        let shown = settings.shown();
        let count = settings.host.processes;
        let first = HostKeeper::start(settings.clone(), shutdown.clone()).await?;
        check_model(&shown, &*first.present().await?)?;
        let others: Vec<_> = (1..count)
            .map(|_| blockhaul_io::spawn(HostKeeper::start(settings.clone(), shutdown.clone())))
            .collect();
        let mut keepers = vec![first];
        for other in others {
            keepers.push(other.await?);
        }
        Ok(Arc::new(PluginGroup { keepers }))
    }

    /// Number of processes.
    pub(crate) fn len(&self) -> usize {
        self.keepers.len()
    }

    /// A device for this program's own use.
    pub(crate) async fn open(self: Arc<PluginGroup>, readonly: bool) -> Result<OpenedDevice> {
        let more = GroupHandles { group: self, readonly };
        Ok(OpenedDevice { device: more.another().await?, more: Some(Arc::new(more)) })
    }
}

/// Other thread models promise the plugin that no two callbacks overlap, which processes that know
/// nothing of each other cannot keep.
fn check_model(shown: &str, host: &PythonHost) -> Result<()> {
    match host.model {
        ThreadModel::Parallel => Ok(()),
        ThreadModel::SerializeAllRequests | ThreadModel::SerializeRequests if host.coroutines => {
            Ok(())
        }
        model => {
            let name = model.name();
            let text = format!(
                "{shown}: @processes needs a plugin whose thread_model is THREAD_MODEL_PARALLEL, or \
                 with coroutines; its model is {name}"
            );
            Err(Error::new(Kind::Usage, text))
        }
    }
}

/// A plugin's exports, in several processes.
pub(crate) struct GroupExports {
    pub(crate) group: Arc<PluginGroup>,
    pub(crate) readonly: bool,
}

impl Exports for GroupExports {
    fn admit(&self, client: ExportClient) -> OpenFuture<Arc<dyn Visit>> {
        let group = self.group.clone();
        let readonly = self.readonly;
        Box::pin(async move {
            let session = GroupSession::enter(group, readonly, Some(client)).await?;
            Ok(Arc::new(GroupVisit(session)) as Arc<dyn Visit>)
        })
    }

    fn state(&self) -> Option<String> {
        let states: Vec<_> = self.group.keepers.iter().map(HostKeeper::state_text).collect();
        Some(states.join("; "))
    }
}

/// Handles for this program's own use.
struct GroupHandles {
    group: Arc<PluginGroup>,
    readonly: bool,
}

impl HandleOpener for GroupHandles {
    fn another(&self) -> OpenFuture<Arc<dyn Device>> {
        let group = self.group.clone();
        let readonly = self.readonly;
        Box::pin(async move {
            let session = GroupSession::enter(group, readonly, None).await?;
            Ok(session.open_handle("", false).await?.1)
        })
    }
}

/// A client, with a visit in each process.
pub(crate) struct GroupSession {
    pub(crate) group: Arc<PluginGroup>,
    readonly: bool,
    client: Option<ExportClient>,
    seats: Vec<ProcessVisit>,
}

/// A client's visit in one of the processes.
#[derive(Default)]
struct ProcessVisit {
    /// Held while the process is started and entered.
    entering: Arc<FifoLock>,
    visit: Mutex<Option<PythonVisit>>,
}

/// Why a client has no visit in a process.
pub(crate) enum VisitError {
    /// The process does not run now.
    Process(Error),
    /// The plugin refuses the client, or has ended while it was asked.
    Refused(Error),
}

impl From<VisitError> for Error {
    fn from(absent: VisitError) -> Error {
        match absent {
            VisitError::Process(error) | VisitError::Refused(error) => error,
        }
    }
}

impl GroupSession {
    /// Admits a client in every process that runs, at least one.
    async fn enter(
        group: Arc<PluginGroup>,
        readonly: bool,
        client: Option<ExportClient>,
    ) -> Result<Arc<GroupSession>> {
        let seats = (0..group.len()).map(|_| ProcessVisit::default()).collect();
        let session = Arc::new(GroupSession { group, readonly, client, seats });
        let mut entered = Err(Error::new(Kind::Io, "no process").complete());
        for index in 0..session.seats.len() {
            match session.visit(index).await {
                Ok(_) => entered = Ok(()),
                Err(VisitError::Refused(error)) => return Err(error),
                Err(VisitError::Process(error)) => entered = entered.map_err(|_| error),
            }
        }
        entered.map(|()| session)
    }

    /// The visit in a process. If the process has ended, starts another and enters it.
    pub(crate) async fn visit(&self, index: usize) -> Result<PythonVisit, VisitError> {
        let seat = &self.seats[index];
        let _turn = seat.entering.lock().await;
        if let Some(visit) = seat.entered() {
            return Ok(visit);
        }
        let host = self.group.keepers[index].present().await.map_err(VisitError::Process)?;
        let entering = PythonVisit::enter(host, self.readonly, self.client.clone());
        let visit = entering.await.map_err(VisitError::Refused)?;
        *seat.visit() = Some(visit.clone());
        Ok(visit)
    }

    async fn open_handle(
        self: Arc<GroupSession>,
        name: &str,
        tls: bool,
    ) -> Result<(String, Arc<dyn Device>)> {
        let (found, handle) = GroupHandle::open(self, name, tls).await?;
        Ok((found, Arc::new(GroupDevice(handle))))
    }
}

impl ProcessVisit {
    /// The visit, if its process runs.
    fn entered(&self) -> Option<PythonVisit> {
        self.visit().clone().filter(|visit| !visit.host().is_gone())
    }

    fn visit(&self) -> MutexGuard<'_, Option<PythonVisit>> {
        self.visit.lock().expect("no panic under this lock")
    }
}

/// A client of a server.
struct GroupVisit(Arc<GroupSession>);

impl Visit for GroupVisit {
    fn list(&self, tls: bool) -> OpenFuture<Vec<ListedExport>> {
        let session = self.0.clone();
        Box::pin(async move {
            let running = session.seats.iter().find_map(ProcessVisit::entered);
            let visit = match running {
                Some(visit) => visit,
                None => session.visit(0).await?,
            };
            visit.list(tls).await
        })
    }

    fn open(&self, name: &str, tls: bool) -> OpenFuture<Option<Export>> {
        let session = self.0.clone();
        let name = name.to_string();
        Box::pin(async move {
            let (found, device) = session.open_handle(&name, tls).await?;
            Ok(Some(Export::own(&found, device)))
        })
    }

    fn gone(&self) {
        for visit in self.0.seats.iter().filter_map(ProcessVisit::entered) {
            visit.gone();
        }
    }
}
