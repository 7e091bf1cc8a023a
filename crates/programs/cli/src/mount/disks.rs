//! The disks of a mount: those of the command line, each with its layers, and the files of a `dir:`.

use std::ffi::OsStr;
use std::sync::Arc;

use blockhaul_block::{Can, Device, Kind};
use blockhaul_catalog::{
    ClaimOwner, DeviceSpec, Export, ExportClient, Intent, Registry, Stack, Visit,
};
use blockhaul_fuse::{DISK, DISKS_MAX, DiskMount, HandleReopener, HandleSource, refused_name};
use blockhaul_transfer::{FileUse, format_warning, without_secrets};

use crate::args::{self, MountExport};
use crate::brackets::{self, Groups};
use crate::devices;
use crate::exit::{CommandFailure, OPEN};
use crate::serve::export_arguments::parse_named;

/// The disks of a command line.
pub struct MountSources {
    registry: Registry,
    disks: Vec<MountSource>,
}

/// A disk, or a directory of disks.
struct MountSource {
    /// None: it has no name of its own.
    name: Option<String>,
    spec: DeviceSpec,
    /// First innermost.
    layers: Vec<String>,
    /// Of the storage below the layers.
    intent: Intent,
    write: bool,
}

/// An open disk.
struct MountDisk {
    /// None: it has no name of its own.
    name: Option<String>,
    device: Arc<dyn Device>,
    /// It may be written.
    write: bool,
    /// How it is opened again.
    source: Option<HandleSource>,
}

impl MountDisk {
    /// The name of its file.
    fn file(&self) -> &str {
        self.name.as_deref().unwrap_or(DISK)
    }
}

/// Open disks.
#[derive(Default)]
pub struct MountDisks {
    all: Vec<MountDisk>,
    /// To be closed when no worker needs them any more.
    stacks: Vec<Stack>,
    visits: Vec<Arc<dyn Visit>>,
}

impl MountSources {
    /// Parses the command line, with all checks possible before anything is opened.
    pub fn new(args: &args::MountArgs, groups: &Groups) -> Result<MountSources, CommandFailure> {
        let registry = devices::registry(args.timeout);
        let mut disks = Vec::new();
        let mut name = None;
        for word in &args.export {
            match brackets::named(word) {
                Some((name, device)) => {
                    disks.push(MountSource::named(name, device, groups, &registry, args)?);
                }
                None if name.is_some() => {
                    let text =
                        "two names for one device: use --export NAME=DEVICE for a further device";
                    return Err(CommandFailure::usage(text));
                }
                None => {
                    let text = word.to_str();
                    name = Some(text.ok_or_else(|| CommandFailure::usage("a name is not UTF-8"))?);
                }
            }
        }
        match (args.places().0, name) {
            (Some(device), name) => {
                let name = name.map(str::to_string);
                let own = MountExport {
                    device: device.to_os_string(),
                    readonly: false,
                    layer: Vec::new(),
                    partition: args::PartitionArgs::default(),
                };
                disks.insert(
                    0,
                    MountSource::new(name, groups.spec(device)?, &own, &registry, args)?,
                );
            }
            (None, Some(name)) => {
                let text = format!("no device given: write --export {name}=DEVICE");
                return Err(CommandFailure::usage(text));
            }
            (None, None) => {}
        }
        let wanted = MountSources { registry, disks };
        wanted.check()?;
        Ok(wanted)
    }

    fn check(&self) -> Result<(), CommandFailure> {
        for (index, one) in self.disks.iter().enumerate() {
            one.check(&self.registry)?;
            let before = &self.disks[..index];
            if !one.is_directory() && before.iter().any(|other| other.file() == one.file()) {
                return Err(taken(one.file()));
            }
        }
        Ok(())
    }

    /// Whether they need a directory.
    pub fn need_directory(&self) -> bool {
        self.disks.len() > 1 || self.disks.iter().any(MountSource::is_directory)
    }

    /// Whether any may be written.
    pub fn write(&self) -> bool {
        self.disks.iter().any(|one| one.write)
    }

    /// What is mounted, for users who did not write the command line.
    pub fn source(&self) -> String {
        let all = self.disks.iter().map(|one| without_secrets(&one.spec.to_string()));
        all.collect::<Vec<_>>().join(",")
    }

    /// The only disk, for users; none if there are several.
    pub fn only(&self) -> Option<String> {
        match &self.disks[..] {
            [one] if !one.is_directory() => Some(one.spec.to_string()),
            _ => None,
        }
    }

    /// Opens all. On a worker. What was opened before a failure remains in `open`.
    pub async fn open(&self, open: &mut MountDisks) -> Result<(), CommandFailure> {
        for one in &self.disks {
            if one.is_directory() {
                self.open_directory(one, open).await?;
            } else {
                let (device, source) = self.open_one(one, open).await?;
                open.add(MountDisk { name: one.name.clone(), device, write: one.write, source })?;
            }
        }
        Ok(())
    }

    /// Opens a device with its layers.
    async fn open_one(
        &self,
        one: &MountSource,
        open: &mut MountDisks,
    ) -> Result<(Arc<dyn Device>, Option<HandleSource>), CommandFailure> {
        let name = one.spec.to_string();
        let layers = devices::make_layers(&self.registry, &one.layers)?;
        // Each worker has a handle of its own.
        let registry =
            self.registry.owned_by(ClaimOwner::new(format!("the mounted file {:?}", one.file())));
        let stack = registry.open(&one.spec, layers, one.intent).await;
        let stack = stack.map_err(|error| {
            let failure = CommandFailure::opening("device", &name, &error);
            match error.kind() {
                Kind::ReadOnly | Kind::Refused if one.intent.write => {
                    failure.and(", or mount it without --writable")
                }
                _ => failure,
            }
        })?;
        let device = if one.write {
            stack.device().clone()
        } else {
            devices::readonly(&self.registry, stack.device())?
        };
        let source = one.source(&registry, &stack);
        open.stacks.push(stack);
        if one.write && !device.facts().can.contains(Can::WRITE) {
            let text = format!("{name} is read-only: mount it without --writable");
            return Err(CommandFailure::new(OPEN, text));
        }
        Ok((device, source))
    }

    /// Opens all files of a directory that can be opened.
    async fn open_directory(
        &self,
        one: &MountSource,
        open: &mut MountDisks,
    ) -> Result<(), CommandFailure> {
        let name = one.spec.to_string();
        let failed = |error| CommandFailure::opening("device", &name, &error);
        let layers = devices::make_layers(&self.registry, &one.layers)?;
        let exports =
            self.registry.exports(&one.spec, &layers, one.intent).await.map_err(failed)?;
        let exports =
            exports.ok_or_else(|| CommandFailure::usage(format!("{name} is one device")))?;
        let visit = exports.admit(ExportClient::default()).await.map_err(failed)?;
        let mut found = 0;
        for listed in visit.list(false).await.map_err(failed)? {
            let file = listed.name;
            if let Some(why) = refused_name(&file) {
                log::warn!("{name}: {file:?} is not shown: the name {why}");
                continue;
            }
            let device = match visit.open(&file, false).await {
                Ok(Some(Export { device, .. })) => device,
                // It has been removed since.
                Ok(None) => continue,
                Err(error) => {
                    log::warn!("{name}: {file:?} is not shown: {error}");
                    continue;
                }
            };
            let write = one.write && device.facts().can.contains(Can::WRITE);
            let device = if write { device } else { devices::readonly(&self.registry, &device)? };
            open.add(MountDisk { name: Some(file), device, write, source: None })?;
            found += 1;
        }
        open.visits.push(visit);
        if found == 0 {
            let text = format!("{name} contains no regular file that can be opened");
            return Err(CommandFailure::new(OPEN, text));
        }
        Ok(())
    }
}

impl MountSource {
    fn new(
        name: Option<String>,
        spec: DeviceSpec,
        own: &MountExport,
        registry: &Registry,
        args: &args::MountArgs,
    ) -> Result<MountSource, CommandFailure> {
        let partition = own.partition.layer().or(args.partition.layer());
        let own_layers = own.layer.iter().chain(&args.layer).cloned();
        let layers: Vec<_> = partition.into_iter().chain(own_layers).collect();
        let write = args.writable && !own.readonly;
        // Under a layer that changes nothing the storage need not be writable.
        let kept = layers.iter().any(|layer| !devices::writes_below(registry, layer));
        let intent = if write && !kept { Intent::WRITE } else { Intent::READ };
        Ok(MountSource { name, spec, layers, intent, write })
    }

    /// `NAME=DEVICE`, or `NAME=[ DEVICE OPTION… ]`.
    fn named(
        name: &str,
        device: &OsStr,
        groups: &Groups,
        registry: &Registry,
        args: &args::MountArgs,
    ) -> Result<MountSource, CommandFailure> {
        let (name, own, inner) = parse_named::<MountExport>(name, device, groups)?;
        let spec = inner.spec(&own.device)?;
        MountSource::new(Some(name), spec, &own, registry, args)
    }

    /// How the open disk is opened again, for a handle of each worker and to learn its size; none if it
    /// has one handle and keeps its size.
    fn source(&self, registry: &Registry, stack: &Stack) -> Option<HandleSource> {
        // Otherwise a flush of one handle would leave out what was written through another.
        if !stack.device().facts().can.contains(Can::MULTI_CONN) {
            return None;
        }
        // A layer can keep what it knows of the disk, or of what was written, for one handle.
        if !self.layers.is_empty() {
            return None;
        }
        let write = self.write;
        let shown = move |registry: &Registry, device: Arc<dyn Device>| {
            if write { Ok(device) } else { devices::readonly(registry, &device) }
        };
        if stack.has_more() {
            let (registry, stack) = (registry.clone(), stack.clone());
            let reopen: HandleReopener = Arc::new(move || {
                let (registry, stack) = (registry.clone(), stack.clone());
                Box::pin(async move { shown(&registry, stack.another().await?) })
            });
            return Some(HandleSource { reopen, one_for_each_worker: true });
        }
        if !is_opened_quickly(&self.spec, write) {
            return None;
        }
        let (registry, spec, intent) = (registry.clone(), self.spec.clone(), self.intent);
        let reopen: HandleReopener = Arc::new(move || {
            let (registry, spec) = (registry.clone(), spec.clone());
            Box::pin(async move {
                let stack = registry.open(&spec, Vec::new(), intent).await?;
                shown(&registry, stack.device().clone())
            })
        });
        Some(HandleSource { reopen, one_for_each_worker: false })
    }

    /// Whether its files are the disks.
    fn is_directory(&self) -> bool {
        matches!(&self.spec, DeviceSpec::Scheme { scheme, .. } if scheme == "dir")
    }

    /// The name of its file.
    fn file(&self) -> &str {
        self.name.as_deref().unwrap_or(DISK)
    }

    fn check(&self, registry: &Registry) -> Result<(), CommandFailure> {
        registry.target(&self.spec, self.intent)?;
        devices::make_layers(registry, &self.layers)?;
        if let Some(name) = &self.name {
            let shown = blockhaul_wire::printable(name.as_bytes(), 256);
            if let Some(why) = refused_name(name) {
                let text = format!("--export {shown}: the name {why}: choose another");
                return Err(CommandFailure::usage(text));
            }
            if self.is_directory() {
                let text = format!(
                    "--export {shown}: the files of dir: have names of their own: write it as DEVICE"
                );
                return Err(CommandFailure::usage(text));
            }
        }
        if let Some(text) = format_warning(&self.spec, !self.layers.is_empty(), FileUse::Read) {
            log::warn!("{text}");
        }
        Ok(())
    }
}

impl MountDisks {
    fn add(&mut self, disk: MountDisk) -> Result<(), CommandFailure> {
        if self.all.iter().any(|other| other.file() == disk.file()) {
            return Err(taken(disk.file()));
        }
        if self.all.len() == DISKS_MAX {
            let text = format!("more than {DISKS_MAX} disks: use several mounts");
            return Err(CommandFailure::new(OPEN, text));
        }
        self.all.push(disk);
        Ok(())
    }

    /// How many they are.
    pub fn count(&self) -> usize {
        self.all.len()
    }

    /// The name of the first one's file.
    pub fn first(&self) -> &str {
        self.all.first().map_or(DISK, MountDisk::file)
    }

    /// What is to be shown.
    pub fn shown(&self) -> Vec<DiskMount> {
        let shown = |disk: &MountDisk| DiskMount {
            name: disk.file().to_string(),
            device: disk.device.clone(),
            write: disk.write,
            source: disk.source.clone(),
        };
        self.all.iter().map(shown).collect()
    }

    /// Makes the text about them, which is that of `blockhaul info --json`.
    pub fn info(&self) -> blockhaul_fuse::Info {
        let names: Vec<_> =
            self.all.iter().map(|disk| disk.name.clone().unwrap_or_default()).collect();
        Arc::new(move |facts| {
            let all: Vec<_> = names.iter().map(String::as_str).zip(facts.iter().cloned()).collect();
            crate::info::json_of(&all)
        })
    }
}

/// Whether opening a disk again costs little and starts no program: it then happens each time that
/// programs ask for its size. Nobody else resizes an image that is open for writing.
fn is_opened_quickly(spec: &DeviceSpec, write: bool) -> bool {
    match spec {
        DeviceSpec::Path(_) => true,
        DeviceSpec::Scheme { scheme, rest } => match scheme.as_str() {
            "file" => true,
            "qcow2" => !write && !rest.contains("://"),
            _ => false,
        },
        DeviceSpec::Command(_) | DeviceSpec::Pipe => false,
    }
}

fn taken(name: &str) -> CommandFailure {
    CommandFailure::usage(format!("two disks have the name {name:?}: choose another with --export"))
}
