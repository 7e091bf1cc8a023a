//! The scheme `vddk:`.

use std::ffi::OsString;
use std::sync::Arc;

use blockhaul_block::{Device, Error, Kind, Result};
use blockhaul_catalog::{
    Another, Backend, Client, Export, Exports, Listed, Opened, Opening, Param, Target, Visit,
};
use blockhaul_isolated::{Again, Process};

use crate::changes::CONTEXT;
use crate::disk::Disk;
use crate::library;
use crate::options::{Options, PARAMS, for_process};

/// The backend `vddk:PATH`.
pub struct Vddk;

impl Backend for Vddk {
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

    fn open(&self, target: Target) -> Opening<Opened> {
        Box::pin(async move {
            let options = Options::parse(target.text()?)?;
            options.check(target.intent.write)?;
            if options.isolate {
                let process = process_for(&options)?;
                return blockhaul_isolated::open(&inside(&target)?, process).await;
            }
            let disk = Disk::start(options, target.intent.write).await?;
            let device = disk.open().await?;
            Ok(Opened { device, more: Some(Arc::new(Handles(disk))) })
        })
    }

    fn exports(&self, target: &Target) -> Option<Opening<Arc<dyn Exports>>> {
        let target = target.clone();
        Some(Box::pin(async move {
            let options = Options::parse(target.text()?)?;
            options.check(target.intent.write)?;
            if options.isolate {
                let process = process_for(&options)?;
                let target = inside(&target)?;
                return blockhaul_isolated::exports(&target, Again::ForClients, process).await;
            }
            let disk = Disk::start(options, target.intent.write).await?;
            Ok(Arc::new(VddkExports(disk)) as Arc<dyn Exports>)
        }))
    }
}

/// How the process of the library is started.
fn process_for(options: &Options) -> Result<Process> {
    let (path, _) = library::find(&options.folder)
        .map_err(|why| Error::new(Kind::Usage, format!("vddk: {why}")))?;
    let mut environment = options.access.environment();
    // The library's own libraries are beside it.
    let mut folders: Vec<_> = path.parent().map(OsString::from).into_iter().collect();
    folders.extend(std::env::var_os("LD_LIBRARY_PATH"));
    environment.push(("LD_LIBRARY_PATH".into(), folders.join(&OsString::from(":"))));
    let contexts = options.changes.iter().map(|_| CONTEXT.to_string()).collect();
    Ok(Process { environment, own_words: true, contexts })
}

/// The target for that process.
fn inside(target: &Target) -> Result<Target> {
    Ok(Target { rest: for_process(target.text()?).into(), ..target.clone() })
}

/// Handles for this program's own use.
struct Handles(Arc<Disk>);

impl Another for Handles {
    fn another(&self) -> Opening<Arc<dyn Device>> {
        let disk = self.0.clone();
        Box::pin(async move { disk.open().await })
    }
}

/// A disk for clients of a server: each has its own handle.
struct VddkExports(Arc<Disk>);

impl Exports for VddkExports {
    fn admit(&self, _client: Client) -> Opening<Arc<dyn Visit>> {
        let visit = VddkVisit(self.0.clone());
        Box::pin(std::future::ready(Ok(Arc::new(visit) as Arc<dyn Visit>)))
    }

    fn state(&self) -> Option<String> {
        Some(self.0.state())
    }
}

struct VddkVisit(Arc<Disk>);

impl Visit for VddkVisit {
    fn list(&self, _tls: bool) -> Opening<Vec<Listed>> {
        let listed = Listed { name: String::new(), description: String::new() };
        Box::pin(std::future::ready(Ok(vec![listed])))
    }

    fn open(&self, name: &str, _tls: bool) -> Opening<Option<Export>> {
        let (disk, name) = (self.0.clone(), name.to_string());
        Box::pin(async move { Ok(Some(Export::own(&name, disk.open().await?))) })
    }
}
