//! Runs a kind of storage in a separate process: another instance of this program serves it on a
//! private socket, and this one is its client. A crash ends that process, and is an error here.
//! Open devices remain broken: unflushed writes may be lost with the process, and their writer must
//! get the error. Later clients get a new process (`keeper`).
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]
#![cfg_attr(not(test), warn(clippy::missing_errors_doc))]

mod keeper;
mod report;

use std::ffi::OsString;
use std::sync::{Arc, Weak};

use blockhaul_block::{
    BlockSizes, Device, Facts, FileRange, Kind, LeaseAccess, PendingRequest, Request, Result,
};
use blockhaul_catalog::{
    Backend, BackendTarget, Export, ExportClient, Exports, HandleOpener, ListedExport, OpenFuture,
    OpenedDevice, Param, StorageFigure, Visit,
};

use blockhaul_client::{Companions, DeviceConnection, connect_keeping};
use keeper::{IsolatedProcess, ProcessKeeper};
pub use report::{ReportFormat, ReportWriter};

/// Whether to restart a process that has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RestartPolicy {
    /// When the next client connects.
    ForClients,
    /// Never: data in memory is lost, and a new disk must not be mistaken for the old one.
    Never,
}

/// The same kind of storage, with each device in its own process.
pub fn isolated(inner: Arc<dyn Backend>, again: RestartPolicy) -> Arc<dyn Backend> {
    Arc::new(IsolatedBackend(inner, again))
}

struct IsolatedBackend(Arc<dyn Backend>, RestartPolicy);

/// How the process of a device is started.
#[derive(Debug, Clone, Default)]
pub struct ProcessConfig {
    /// Environment variables that it has in addition to those of this program.
    pub environment: Vec<(OsString, OsString)>,
    /// A refusal is reported in the words of the process, once, instead of as one of an NBD server.
    pub own_words: bool,
    /// Metadata contexts that it has in addition to `base:allocation`, if the device has them.
    pub contexts: Vec<String>,
    /// What it counts.
    pub report: Option<ReportFormat>,
    /// Its name in messages; none: that of the target.
    pub name: Option<String>,
}

/// A process that serves several devices, each as an export. It ends when the last user of it and of
/// its devices is dropped.
#[derive(Clone)]
pub struct ProcessHost(Arc<ProcessKeeper>);

/// A reference to a [`ProcessHost`] that does not keep it.
#[derive(Clone, Default)]
pub struct WeakHost(Weak<ProcessKeeper>);

impl WeakHost {
    /// The host, if it is still in use, and its process runs or will be started again.
    pub fn upgrade(&self) -> Option<ProcessHost> {
        self.0.upgrade().filter(|keeper| !keeper.is_over()).map(ProcessHost)
    }
}

/// A device of a [`ProcessHost`].
#[derive(Debug, Clone)]
pub struct HostMember {
    /// Its name in messages.
    pub name: String,
    /// Its export in the process.
    pub export: String,
}

impl ProcessHost {
    /// Starts a process that serves `target`, which must not be isolated again.
    ///
    /// # Errors
    /// If the process does not start.
    pub async fn start(
        target: &BackendTarget,
        again: RestartPolicy,
        process: ProcessConfig,
    ) -> Result<ProcessHost> {
        Ok(ProcessHost(ProcessKeeper::start(target, again, process).await?))
    }

    /// A reference that does not keep the process.
    pub fn downgrade(&self) -> WeakHost {
        WeakHost(Arc::downgrade(&self.0))
    }

    /// Opens one of its devices. Further handles are further connections to the process.
    ///
    /// # Errors
    /// If the process cannot open the device.
    pub async fn open(self, member: HostMember) -> Result<OpenedDevice> {
        let device = device(self.0.present().await?, &member, false).await?;
        Ok(OpenedDevice { device, more: Some(Arc::new(ProcessConnections(self.0, member))) })
    }

    /// The same for the clients of a server: each has a connection of its own to the process.
    pub fn exports(self, member: HostMember) -> Arc<dyn Exports> {
        Arc::new(IsolatedExports(self.0, Some(member)))
    }
}

/// Further connections to a process.
struct ProcessConnections(Arc<ProcessKeeper>, HostMember);

impl HandleOpener for ProcessConnections {
    fn another(&self) -> OpenFuture<Arc<dyn Device>> {
        let keeper = self.0.clone();
        let member = self.1.clone();
        Box::pin(async move { device(keeper.present().await?, &member, false).await })
    }
}

impl Backend for IsolatedBackend {
    fn schemes(&self) -> &'static [&'static str] {
        self.0.schemes()
    }

    fn operand(&self) -> &'static str {
        self.0.operand()
    }

    fn summary(&self) -> &'static str {
        self.0.summary()
    }

    fn example(&self) -> &'static str {
        self.0.example()
    }

    fn params(&self) -> &'static [Param] {
        self.0.params()
    }

    fn raw(&self) -> bool {
        self.0.raw()
    }

    fn runs_foreign_code(&self) -> bool {
        self.0.runs_foreign_code()
    }

    fn open(&self, target: BackendTarget) -> OpenFuture<OpenedDevice> {
        Box::pin(async move {
            let keeper =
                ProcessKeeper::start(&target, RestartPolicy::Never, ProcessConfig::default())
                    .await?;
            let apart = keeper.present().await?;
            let only = HostMember { name: apart.name().to_string(), export: String::new() };
            Ok(OpenedDevice::from(device(apart, &only, false).await?))
        })
    }

    fn exports(&self, target: &BackendTarget) -> Option<OpenFuture<Arc<dyn Exports>>> {
        let target = target.clone();
        let again = self.1;
        Some(Box::pin(async move {
            let keeper = ProcessKeeper::start(&target, again, ProcessConfig::default()).await?;
            Ok(Arc::new(IsolatedExports(keeper, None)) as Arc<dyn Exports>)
        }))
    }
}

/// An export of a process as a device. For a server's clients, block sizes are advertised but not
/// enforced, as without isolation.
async fn device(
    apart: Arc<IsolatedProcess>,
    member: &HostMember,
    served: bool,
) -> Result<Arc<dyn Device>> {
    let companions = Companions { process: Some(apart.process.clone()), claim: None };
    let HostMember { name, export } = member;
    match connect_keeping(companions, name, &apart.address(), export, &apart.how()).await {
        Ok(DeviceConnection { device: inner, negotiated }) => {
            let mut facts = Facts::clone(&inner.facts());
            if let Some(sizes) = negotiated.info.block_sizes.filter(|_| served) {
                let blockhaul_wire::BlockSizeInfo { minimum, preferred, maximum } = sizes;
                facts.advertised = Some(BlockSizes { minimum, preferred, maximum });
                facts.block.minimum = 1;
            }
            if served {
                facts.block.maximum = BlockSizes::default().maximum;
            }
            Ok(Arc::new(IsolatedDevice {
                inner,
                facts: Arc::new(facts),
                apart,
                name: name.clone(),
            }))
        }
        Err(error) => Err(apart.explained(error, name).await),
    }
}

/// Storage in a process, for the clients of a server: each has its own connections to it. With one
/// member of a process they get that one, else what the process serves under their name.
struct IsolatedExports(Arc<ProcessKeeper>, Option<HostMember>);

impl Exports for IsolatedExports {
    fn admit(&self, _client: ExportClient) -> OpenFuture<Arc<dyn Visit>> {
        let visit = IsolatedVisit(self.0.clone(), self.1.clone());
        Box::pin(std::future::ready(Ok(Arc::new(visit) as Arc<dyn Visit>)))
    }

    fn state(&self) -> Option<String> {
        Some(self.0.state())
    }

    fn figures(&self) -> Vec<StorageFigure> {
        self.0.figures()
    }
}

struct IsolatedVisit(Arc<ProcessKeeper>, Option<HostMember>);

impl Visit for IsolatedVisit {
    fn list(&self, _tls: bool) -> OpenFuture<Vec<ListedExport>> {
        let keeper = self.0.clone();
        if self.1.is_some() {
            let only = ListedExport { name: String::new(), description: String::new() };
            return Box::pin(std::future::ready(Ok(vec![only])));
        }
        Box::pin(async move {
            let apart = keeper.present().await?;
            match listed(&apart).await {
                Err(_) if apart.has_ended() => listed(&*keeper.present().await?).await,
                listed => listed,
            }
        })
    }

    fn open(&self, name: &str, _tls: bool) -> OpenFuture<Option<Export>> {
        let keeper = self.0.clone();
        let member = self.1.clone();
        let name = name.to_string();
        Box::pin(async move {
            let apart = keeper.present().await?;
            let same = || HostMember { name: apart.name().to_string(), export: name.clone() };
            let member = member.unwrap_or_else(same);
            let opened = match device(apart.clone(), &member, true).await {
                // The process was already ending: not this client's fault.
                Err(_) if apart.has_ended() => device(keeper.present().await?, &member, true).await,
                opened => opened,
            };
            Ok(Some(Export::own(&name, opened?)))
        })
    }
}

async fn listed(apart: &IsolatedProcess) -> Result<Vec<ListedExport>> {
    let mut session = apart.options().await?;
    let listed = session.list().await;
    session.abort().await;
    let listed = match listed {
        Ok(listed) => listed,
        Err(error) => return Err(apart.explained(error, apart.name()).await),
    };
    let listed = listed
        .into_iter()
        .map(|entry| ListedExport { name: entry.name, description: entry.description });
    Ok(listed.collect())
}

/// A device in another process; a lost connection means that the process has ended.
struct IsolatedDevice {
    inner: Arc<dyn Device>,
    facts: Arc<Facts>,
    apart: Arc<IsolatedProcess>,
    name: String,
}

impl Device for IsolatedDevice {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        let pending = match self.inner.submit(request).now() {
            Ok(Err(error)) if error.kind() == Kind::Disconnected => Err(error).into(),
            Ok(outcome) => return outcome.into(),
            Err(pending) => pending,
        };
        let apart = self.apart.clone();
        let name = self.name.clone();
        PendingRequest::start(async move {
            match pending.await {
                Err(error) if error.kind() == Kind::Disconnected => {
                    Err(apart.explained(error, &name).await)
                }
                outcome => outcome,
            }
        })
    }

    fn file_at(&self, at: u64, len: u64, access: LeaseAccess) -> Option<FileRange> {
        self.inner.file_at(at, len, access)
    }
}
