//! The scheme `vddk:`.

use std::collections::HashMap;
use std::ffi::{CString, OsString};
use std::path::PathBuf;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use blockhaul_block::{Device, Error, Kind, Result};
use blockhaul_catalog::{
    Backend, BackendTarget, Export, ExportClient, Exports, HandleOpener, ListedExport, OpenFuture,
    OpenedDevice, Param, StorageFigure, Visit,
};
use blockhaul_io::FifoLock;
use blockhaul_isolated::{HostMember, ProcessConfig, ProcessHost, RestartPolicy, WeakHost};

use crate::changes::CONTEXT;
use crate::disk::VddkDisk;
use crate::handle;
use crate::library;
use crate::options::{self, PARAMS, ServerAccess, VddkOptions};
use crate::session::LibrarySession;
use crate::statistics;

/// Longest name of an export in bytes, as the protocol has it.
const NAME_MAX: usize = 4096;
/// Maximum number of disks in one process.
const DISKS_MAX: usize = 4096;

/// The backend `vddk:PATH`.
pub struct VddkBackend;

impl Backend for VddkBackend {
    fn schemes(&self) -> &'static [&'static str] {
        &["vddk"]
    }

    fn operand(&self) -> &'static str {
        "PATH"
    }

    fn summary(&self) -> &'static str {
        "a disk of VMware, through the library of VMware's Virtual Disk Development Kit (VDDK) 6.5 to 9; \
         PATH is as in the machine's configuration ([datastore] machine/disk.vmdk), or a local VMDK file"
    }

    fn params(&self) -> &'static [Param] {
        PARAMS
    }

    fn raw(&self) -> bool {
        true
    }

    fn open(&self, target: BackendTarget) -> OpenFuture<OpenedDevice> {
        Box::pin(async move {
            let options = VddkOptions::parse(target.text()?)?;
            options.check(target.intent.write)?;
            if options.isolate {
                let member = member(&target, &options)?;
                return host(&target, &options, RestartPolicy::Never).await?.open(member).await;
            }
            let disk = VddkDisk::start(options, target.intent.write).await?;
            let device = handle::open(&disk).await?;
            Ok(OpenedDevice { device, more: Some(Arc::new(VddkHandles(disk))) })
        })
    }

    fn exports(&self, target: &BackendTarget) -> Option<OpenFuture<Arc<dyn Exports>>> {
        let target = target.clone();
        Some(Box::pin(async move {
            let write = target.intent.write;
            if let Some(library) = options::several(target.text()?)? {
                return Ok(Arc::new(MachineDisks::start(library, write).await?) as Arc<dyn Exports>);
            }
            let options = VddkOptions::parse(target.text()?)?;
            options.check(write)?;
            if options.isolate {
                let member = member(&target, &options)?;
                return Ok(host(&target, &options, RestartPolicy::ForClients)
                    .await?
                    .exports(member));
            }
            let disk = VddkDisk::start(options, write).await?;
            Ok(Arc::new(VddkExports(disk)) as Arc<dyn Exports>)
        }))
    }
}

/// What disks that share a process have in common: the library, its configuration, the machine and
/// the login; whether they are written, and whether the process is started again.
type ProcessKey = (PathBuf, Option<CString>, ServerAccess, bool, bool);

/// The processes of this program, and a lock for starting each. Few: one for each login.
static HOSTS: LazyLock<Mutex<HashMap<ProcessKey, Arc<HostSlot>>>> = LazyLock::new(Mutex::default);

#[derive(Default)]
struct HostSlot {
    turn: Arc<FifoLock>,
    host: Mutex<WeakHost>,
}

/// The process for a disk: that of an earlier disk of the same machine, or a new one.
async fn host(
    target: &BackendTarget,
    options: &VddkOptions,
    again: RestartPolicy,
) -> Result<ProcessHost> {
    let write = target.intent.write;
    let restarts = again == RestartPolicy::ForClients;
    let common =
        (options.folder.clone(), options.config.clone(), options.access.clone(), write, restarts);
    let slot = {
        let mut hosts = HOSTS.lock().unwrap_or_else(PoisonError::into_inner);
        hosts.retain(|_, slot| Arc::strong_count(slot) > 1 || slot.host().upgrade().is_some());
        hosts.entry(common).or_default().clone()
    };
    let _turn = slot.turn.lock().await;
    if let Some(host) = slot.host().upgrade() {
        return Ok(host);
    }
    let inside =
        BackendTarget { rest: options::for_process(target.text()?).into(), ..target.clone() };
    let host = ProcessHost::start(&inside, again, process_for(options)?).await?;
    *slot.host() = host.downgrade();
    Ok(host)
}

impl HostSlot {
    fn host(&self) -> MutexGuard<'_, WeakHost> {
        self.host.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How the process of the library is started.
fn process_for(options: &VddkOptions) -> Result<ProcessConfig> {
    let (path, _) = library::find(&options.folder)
        .map_err(|why| Error::new(Kind::Usage, format!("vddk: {why}")))?;
    let mut environment = options.access.environment();
    // The library's own libraries are beside it.
    let mut folders: Vec<_> = path.parent().map(OsString::from).into_iter().collect();
    folders.extend(std::env::var_os("LD_LIBRARY_PATH"));
    environment.push(("LD_LIBRARY_PATH".into(), folders.join(&OsString::from(":"))));
    Ok(ProcessConfig {
        environment,
        own_words: true,
        contexts: vec![CONTEXT.to_string()],
        report: Some(statistics::REPORTED),
        name: Some(options.name()),
    })
}

/// A disk in that process.
fn member(target: &BackendTarget, options: &VddkOptions) -> Result<HostMember> {
    let export = options::for_export(target.text()?);
    match export.len() {
        ..=NAME_MAX => Ok(HostMember { name: options.name(), export }),
        _ => {
            let text = format!("vddk: the parameters are longer than {NAME_MAX} bytes");
            Err(Error::new(Kind::Usage, text))
        }
    }
}

/// Disks of a machine, for the program that has started this process: each export has a description of
/// a disk as its name.
struct MachineDisks {
    library: VddkOptions,
    write: bool,
    /// Keeps the library.
    session: Arc<LibrarySession>,
    disks: Arc<Mutex<HashMap<String, Arc<VddkDisk>>>>,
}

impl MachineDisks {
    async fn start(library: VddkOptions, write: bool) -> Result<MachineDisks> {
        let session = LibrarySession::start(&library).await?;
        Ok(MachineDisks { library, write, session, disks: Arc::default() })
    }
}

impl Exports for MachineDisks {
    fn admit(&self, _client: ExportClient) -> OpenFuture<Arc<dyn Visit>> {
        let visit = MachineVisit {
            folder: self.library.folder.clone(),
            write: self.write,
            session: self.session.clone(),
            disks: self.disks.clone(),
        };
        Box::pin(std::future::ready(Ok(Arc::new(visit) as Arc<dyn Visit>)))
    }
}

struct MachineVisit {
    folder: PathBuf,
    write: bool,
    session: Arc<LibrarySession>,
    disks: Arc<Mutex<HashMap<String, Arc<VddkDisk>>>>,
}

impl MachineVisit {
    /// The disk of this name, the same one for all clients.
    fn disk(&self, name: &str) -> Result<Arc<VddkDisk>> {
        let mut disks = self.disks.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(disk) = disks.get(name) {
            return Ok(disk.clone());
        }
        let options = VddkOptions::parse(name)?;
        options.check(self.write)?;
        if options.folder != self.folder || disks.len() >= DISKS_MAX {
            let text = format!("vddk: another library, or more than {DISKS_MAX} disks");
            return Err(Error::new(Kind::Usage, text));
        }
        let disk = VddkDisk::of(options, self.session.clone(), self.write);
        disks.insert(name.to_string(), disk.clone());
        Ok(disk)
    }
}

impl Visit for MachineVisit {
    fn list(&self, _tls: bool) -> OpenFuture<Vec<ListedExport>> {
        Box::pin(std::future::ready(Ok(Vec::new())))
    }

    fn open(&self, name: &str, _tls: bool) -> OpenFuture<Option<Export>> {
        let disk = self.disk(name);
        let name = name.to_string();
        Box::pin(async move { Ok(Some(Export::own(&name, handle::open(&disk?).await?))) })
    }
}

/// Handles for this program's own use.
struct VddkHandles(Arc<VddkDisk>);

impl HandleOpener for VddkHandles {
    fn another(&self) -> OpenFuture<Arc<dyn Device>> {
        let disk = self.0.clone();
        Box::pin(async move { handle::open(&disk).await })
    }
}

/// A disk for clients of a server: each has its own handle.
struct VddkExports(Arc<VddkDisk>);

impl Exports for VddkExports {
    fn admit(&self, _client: ExportClient) -> OpenFuture<Arc<dyn Visit>> {
        let visit = VddkVisit(self.0.clone());
        Box::pin(std::future::ready(Ok(Arc::new(visit) as Arc<dyn Visit>)))
    }

    fn state(&self) -> Option<String> {
        Some(self.0.state())
    }

    fn figures(&self) -> Vec<StorageFigure> {
        self.0.figures()
    }
}

struct VddkVisit(Arc<VddkDisk>);

impl Visit for VddkVisit {
    fn list(&self, _tls: bool) -> OpenFuture<Vec<ListedExport>> {
        let listed = ListedExport { name: String::new(), description: String::new() };
        Box::pin(std::future::ready(Ok(vec![listed])))
    }

    fn open(&self, name: &str, _tls: bool) -> OpenFuture<Option<Export>> {
        let disk = self.0.clone();
        let name = name.to_string();
        Box::pin(async move { Ok(Some(Export::own(&name, handle::open(&disk).await?))) })
    }
}
