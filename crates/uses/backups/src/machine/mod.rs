//! Backups of a virtual machine from its start to its end: a point in time of all disks, the checkpoints that the next
//! backup needs, and what a run that was killed has left.
//!
//! [`MachineBackup`] begins the point in time with `virsh` (`libvirt`) or over QEMU's monitor protocol (`qmp`), and
//! ends it. In between the caller pulls its disks. A checkpoint is a bitmap of a machine with the name of the
//! directory of the stores, so that backups in other directories have their own. A checkpoint stays as long as the
//! newest point of a store names it; the bits of all others are merged into it.

mod libvirt;
mod qmp;
mod qmp_client;

use std::fs::File;
use std::path::{Path, PathBuf};

use blockhaul_catalog::DeviceSpec;
use blockhaul_io::plain;
use blockhaul_store::Store;
use rustix::fs::FlockOperation;

use crate::error::{BackupError, BackupErrorKind, BackupStep, Result};
use libvirt::LibvirtMachine;
use qmp::QmpMachine;

/// The machine whose disks are backed up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MachineAddress {
    /// A domain of libvirt, through `virsh`.
    Libvirt {
        /// The name of the domain.
        domain: String,
        /// The URI of libvirt; `None`: the default of `virsh`.
        connect: Option<String>,
    },
    /// QEMU or its storage daemon.
    Qmp {
        /// The socket of the monitor.
        socket: PathBuf,
    },
}

/// A backup of a machine.
#[derive(Debug, Clone)]
pub struct MachineRequest {
    /// The machine.
    pub address: MachineAddress,
    /// The directory with a store for each disk; created if it is absent.
    pub stores: PathBuf,
    /// The disks, by target (libvirt), device or node (QMP); empty: all that are disks and can be written.
    pub disks: Vec<String>,
    /// A directory for what the machine overwrites meanwhile, and for the socket: as the machine sees it.
    pub scratch: PathBuf,
    /// The file systems of the guest are frozen for the moment, if its agent answers.
    pub freeze: bool,
    /// The time of now in UTC, for example `20261130T022000Z`; part of the name of the checkpoint.
    pub time: String,
}

/// A disk of a machine at the point in time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MachineDisk {
    /// Its name.
    pub name: String,
    /// The export.
    pub source: DeviceSpec,
    /// The directory of its store.
    pub store: PathBuf,
    /// The bitmap with the changes since the newest point of the store, whose checkpoint has this name, too.
    pub bitmap: Option<String>,
    /// A checkpoint begins with this backup; else the next one is a full backup, too.
    pub has_checkpoint: bool,
}

/// A point in time of a machine. End it: the machine saves what it overwrites until then.
pub struct MachineBackup {
    machine: Machine,
    disks: Vec<MachineDisk>,
    names: BackupNames,
    /// Held while the backup runs.
    _lock: File,
}

enum Machine {
    Libvirt(LibvirtMachine),
    Qmp(QmpMachine),
}

/// The names that a backup gives to what it makes in a machine.
#[derive(Debug, Clone)]
pub(crate) struct BackupNames {
    /// The beginning of all names for this directory of stores.
    prefix: String,
    nodes: String,
    /// The checkpoint that begins.
    checkpoint: String,
    /// The socket of the exports.
    socket: PathBuf,
}

impl BackupNames {
    fn new(request: &MachineRequest) -> Result<BackupNames> {
        let path = std::path::absolute(&request.stores)
            .map_err(|error| unusable(&request.stores, &plain(&error)))?;
        let digest = blake3::hash(path.as_os_str().as_encoded_bytes()).to_hex();
        let prefix = format!("blockhaul-{}-", &digest.as_str()[..8]);
        let checkpoint = format!("{prefix}{}", request.time);
        let socket = request.scratch.join(format!("{prefix}nbd.sock"));
        let nodes = format!("bh-{}-", &digest.as_str()[..8]);
        Ok(BackupNames { prefix, nodes, checkpoint, socket })
    }

    /// Whether this name is one of an earlier or of this backup.
    fn is_own(&self, name: &str) -> bool {
        name.starts_with(&self.prefix)
    }

    /// The beginning of the names of nodes, jobs and exports, which QEMU limits to 31 bytes.
    fn nodes(&self) -> &str {
        &self.nodes
    }

    fn source(&self, export: &str) -> Result<DeviceSpec> {
        let uri = format!("nbd+unix:///{export}?socket={}", self.socket.display());
        DeviceSpec::parse(uri.as_ref())
            .map_err(|error| BackupError::of_file(BackupStep::OpenSource, &error))
    }
}

impl MachineBackup {
    /// Begins the point in time. Blocks.
    ///
    /// # Errors
    /// If another backup runs, the machine is unknown or refuses, or a directory cannot be used. Nothing stays begun
    /// in the machine.
    pub fn begin(request: &MachineRequest) -> Result<MachineBackup> {
        let names = BackupNames::new(request)?;
        let lock = lock(&request.stores)?;
        let (machine, disks) = match &request.address {
            MachineAddress::Libvirt { domain, connect } => {
                let mut machine = LibvirtMachine::new(domain, connect.as_deref());
                let disks = machine.begin(request, &names)?;
                (Machine::Libvirt(machine), disks)
            }
            MachineAddress::Qmp { socket } => {
                let mut machine = QmpMachine::connect(socket)?;
                let disks = machine.begin(request, &names)?;
                (Machine::Qmp(machine), disks)
            }
        };
        Ok(MachineBackup { machine, disks, names, _lock: lock })
    }

    /// The disks at the point in time.
    pub fn disks(&self) -> &[MachineDisk] {
        &self.disks
    }

    /// The name of the checkpoint that has begun.
    pub fn checkpoint(&self) -> &str {
        &self.names.checkpoint
    }

    /// Ends the point in time, after the disks were pulled or that has failed: removes what the machine has saved, and
    /// the checkpoints that no store needs any more. Blocks.
    ///
    /// # Errors
    /// If the machine is gone or refuses. The next backup repairs that.
    pub fn end(self) -> Result<()> {
        let MachineBackup { machine, disks, names, _lock: lock } = self;
        let ended = match machine {
            Machine::Libvirt(machine) => machine.end(&disks, &names),
            Machine::Qmp(machine) => machine.end(&disks, &names),
        };
        drop(lock);
        ended
    }
}

/// The checkpoint of the newest point of a store; `None`: there is no point.
fn newest_checkpoint(store: &Path) -> Result<Option<String>> {
    let found = Store::open_or_new(store);
    let found =
        found.map_err(|error| BackupError::of_store(BackupStep::OpenStore, store, error))?;
    Ok(found.newest().map(|newest| newest.checkpoint.clone()))
}

/// Makes the directory of the stores, and keeps other backups out of it.
fn lock(stores: &Path) -> Result<File> {
    match std::fs::create_dir(stores) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
            return Err(unusable(stores, &plain(&error)));
        }
        _ => {}
    }
    let lock = File::create(stores.join("lock"));
    let lock = lock.map_err(|error| unusable(stores, &plain(&error)))?;
    rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive).map_err(|error| {
        let why = match error {
            rustix::io::Errno::WOULDBLOCK => "another backup runs in it: wait until it ends".into(),
            error => plain(&std::io::Error::from(error)),
        };
        unusable(stores, &why)
    })?;
    Ok(lock)
}

fn unusable(stores: &Path, why: &str) -> BackupError {
    let text = format!("the directory of the stores {}: {why}", stores.display());
    BackupError::new(BackupErrorKind::Open, BackupStep::OpenStore, text).in_store(stores)
}

/// An error of a machine.
fn refused(text: String) -> BackupError {
    BackupError::new(BackupErrorKind::Open, BackupStep::OpenSource, text)
}

/// Checks that each wanted name is one of those that there are.
fn check_known(wanted: &[String], known: &[&str]) -> Result<()> {
    match wanted.iter().find(|name| !known.contains(&name.as_str())) {
        None => Ok(()),
        Some(name) => {
            let text = format!("the machine has no disk {name:?}; known are {}", known.join(", "));
            Err(BackupError::new(BackupErrorKind::Request, BackupStep::OpenSource, text))
        }
    }
}
