//! Runs a kind of storage in a separate process: another instance of this program serves it on a
//! private socket, and this one is its client. A crash ends that process, and is an error here.
//! Open devices remain broken: unflushed writes may be lost with the process, and their writer must
//! get the error. Later clients get a new process (`keeper`).
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod keeper;

use std::ffi::OsString;
use std::sync::Arc;

use blockhaul_block::{
    Access, BlockSizes, Device, Facts, FileRange, Kind, Pending, Request, Result,
};
use blockhaul_catalog::{
    Another, Backend, Client, Export, Exports, Listed, Opened, Opening, Param, Target, Visit,
};

use blockhaul_client::{Connected, connect_keeping};
use keeper::{Apart, Keeper};

/// Whether to restart a process that has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Again {
    /// When the next client connects.
    ForClients,
    /// Never: data in memory is lost, and a new disk must not be mistaken for the old one.
    Never,
}

/// The same kind of storage, with each device in its own process.
pub fn isolated(inner: Arc<dyn Backend>, again: Again) -> Arc<dyn Backend> {
    Arc::new(Isolated(inner, again))
}

struct Isolated(Arc<dyn Backend>, Again);

/// How the process of a device is started.
#[derive(Debug, Clone, Default)]
pub struct Process {
    /// Environment variables that it has in addition to those of this program.
    pub environment: Vec<(OsString, OsString)>,
    /// A refusal is reported in the words of the process, once, instead of as one of an NBD server.
    pub own_words: bool,
    /// Metadata contexts that it has in addition to `base:allocation`.
    pub contexts: Vec<String>,
}

/// Opens a device in a process of its own, in which the target must not be isolated again. Further
/// handles are further connections to that process.
///
/// # Errors
/// If the process does not start, or cannot open the device.
pub async fn open(target: &Target, process: Process) -> Result<Opened> {
    let keeper = Keeper::start(target, Again::Never, process).await?;
    let device = device(keeper.present().await?, "", false).await?;
    Ok(Opened { device, more: Some(Arc::new(Connections(keeper))) })
}

/// Further connections to a process.
struct Connections(Arc<Keeper>);

impl Another for Connections {
    fn another(&self) -> Opening<Arc<dyn Device>> {
        let keeper = self.0.clone();
        Box::pin(async move { device(keeper.present().await?, "", false).await })
    }
}

/// The same for the clients of a server: each has a connection of its own to the process.
///
/// # Errors
/// If the process does not start.
pub async fn exports(target: &Target, again: Again, process: Process) -> Result<Arc<dyn Exports>> {
    Ok(Arc::new(IsolatedExports(Keeper::start(target, again, process).await?)))
}

impl Backend for Isolated {
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

    fn open(&self, target: Target) -> Opening<Opened> {
        Box::pin(async move {
            let keeper = Keeper::start(&target, Again::Never, Process::default()).await?;
            Ok(Opened::from(device(keeper.present().await?, "", false).await?))
        })
    }

    fn exports(&self, target: &Target) -> Option<Opening<Arc<dyn Exports>>> {
        let (target, again) = (target.clone(), self.1);
        Some(Box::pin(async move { exports(&target, again, Process::default()).await }))
    }
}

/// An export of a process as a device; for a server's clients, block sizes are advertised but not
/// enforced, as without isolation.
async fn device(apart: Arc<Apart>, export: &str, served: bool) -> Result<Arc<dyn Device>> {
    let process = Some(apart.process.clone());
    match connect_keeping(process, apart.name(), &apart.address(), export, &apart.how()).await {
        Ok(Connected { device: inner, negotiated }) => {
            let mut facts = Facts::clone(&inner.facts());
            if let Some(sizes) = negotiated.info.block_sizes.filter(|_| served) {
                let blockhaul_wire::BlockSizes { minimum, preferred, maximum } = sizes;
                facts.advertised = Some(BlockSizes { minimum, preferred, maximum });
                facts.block.minimum = 1;
            }
            if served {
                facts.block.maximum = BlockSizes::default().maximum;
            }
            Ok(Arc::new(IsolatedDevice { inner, facts: Arc::new(facts), apart }))
        }
        Err(error) => Err(apart.explained(error).await),
    }
}

/// Storage in a process, for the clients of a server: each has its own connections to it.
struct IsolatedExports(Arc<Keeper>);

impl Exports for IsolatedExports {
    fn admit(&self, _client: Client) -> Opening<Arc<dyn Visit>> {
        let visit = IsolatedVisit(self.0.clone());
        Box::pin(std::future::ready(Ok(Arc::new(visit) as Arc<dyn Visit>)))
    }

    fn state(&self) -> Option<String> {
        Some(self.0.state())
    }
}

struct IsolatedVisit(Arc<Keeper>);

impl Visit for IsolatedVisit {
    fn list(&self, _tls: bool) -> Opening<Vec<Listed>> {
        let keeper = self.0.clone();
        Box::pin(async move {
            let apart = keeper.present().await?;
            match listed(&apart).await {
                Err(_) if apart.has_ended() => listed(&*keeper.present().await?).await,
                listed => listed,
            }
        })
    }

    fn open(&self, name: &str, _tls: bool) -> Opening<Option<Export>> {
        let (keeper, name) = (self.0.clone(), name.to_string());
        Box::pin(async move {
            let apart = keeper.present().await?;
            let opened = match device(apart.clone(), &name, true).await {
                // The process was already ending: not this client's fault.
                Err(_) if apart.has_ended() => device(keeper.present().await?, &name, true).await,
                opened => opened,
            };
            Ok(Some(Export::own(&name, opened?)))
        })
    }
}

async fn listed(apart: &Apart) -> Result<Vec<Listed>> {
    let mut session = apart.options().await?;
    let listed = session.list().await;
    session.abort().await;
    let listed = match listed {
        Ok(listed) => listed,
        Err(error) => return Err(apart.explained(error).await),
    };
    let listed =
        listed.into_iter().map(|entry| Listed { name: entry.name, description: entry.description });
    Ok(listed.collect())
}

/// A device in another process; a lost connection means that the process has ended.
struct IsolatedDevice {
    inner: Arc<dyn Device>,
    facts: Arc<Facts>,
    apart: Arc<Apart>,
}

impl Device for IsolatedDevice {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> Pending {
        let pending = match self.inner.submit(request).now() {
            Ok(Err(error)) if error.kind() == Kind::Disconnected => Err(error).into(),
            Ok(outcome) => return outcome.into(),
            Err(pending) => pending,
        };
        let apart = self.apart.clone();
        Pending::start(async move {
            match pending.await {
                Err(error) if error.kind() == Kind::Disconnected => {
                    Err(apart.explained(error).await)
                }
                outcome => outcome,
            }
        })
    }

    fn file_at(&self, at: u64, len: u64, access: Access) -> Option<FileRange> {
        self.inner.file_at(at, len, access)
    }
}
