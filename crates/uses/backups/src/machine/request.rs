//! The request of a backup of a machine, and the names of what it makes there.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use blockhaul_block::{BITMAP_CONTEXT, Error, Kind};
use blockhaul_catalog::DeviceSpec;
use blockhaul_store::Store;

use crate::error::{BackupError, BackupErrorKind, BackupStep, Result};
use crate::pull::{ChangeBitmap, PullMode, PullQuestion, PullResult};

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
    /// The time of now in UTC, for example `20261130T022000123Z`, always as long; part of the name of the checkpoint.
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

/// A disk of a machine whose point in time has not begun.
#[derive(Debug)]
pub(super) struct IdleDisk {
    /// Its name.
    pub(super) name: String,
    /// Bytes of the disk.
    pub(super) size: u64,
    /// Bitmaps of the disk, or checkpoints of its domain.
    pub(super) checkpoints: Vec<String>,
    /// The checkpoint that a backup begins; `None`: none, and the next backup is a full one, too.
    pub(super) checkpoint: Option<String>,
}

impl IdleDisk {
    /// The point that a pull would make of it.
    pub(super) fn preview(
        &self,
        request: &MachineRequest,
        point: &PointRequest,
    ) -> Result<PullResult> {
        let dir = request.stores.join(&self.name);
        // The first backup makes both directories.
        let known = if request.stores.exists() { &dir } else { &request.stores };
        let store = Store::open_or_new(known);
        let store =
            store.map_err(|error| BackupError::of_store(BackupStep::OpenStore, &dir, error))?;
        let newest = store.newest().map(|newest| newest.checkpoint.clone());
        let bitmap = newest.filter(|newest| self.checkpoints.contains(newest));
        let has_bitmap = bitmap.is_some();
        let question = PullQuestion {
            bitmap: bitmap.map(|name| ChangeBitmap {
                context: format!("{BITMAP_CONTEXT}{name}"),
                checkpoint: name,
            }),
            point: point.name.clone(),
            checkpoint: self.checkpoint.clone(),
            mode: if point.full { PullMode::Full } else { PullMode::Auto },
            default_point: point.default_name.clone(),
        };
        let plan = question.decide(&store, self.size, has_bitmap)?;
        Ok(PullResult::foreseen(&self.name, &dir, plan))
    }
}

/// The point that a preview of a backup of a machine is about.
#[derive(Debug, Clone)]
pub struct PointRequest {
    /// Its name; `None`: the default one.
    pub name: Option<String>,
    /// The name of a point that has none. A number is appended where a store has such a point.
    pub default_name: String,
    /// All of each disk is copied, with or without a bitmap.
    pub full: bool,
}

/// The names that a backup gives to what it makes in a machine.
#[derive(Debug, Clone)]
pub(super) struct BackupNames {
    /// The beginning of all names for this directory of stores.
    pub(super) prefix: String,
    pub(super) nodes: String,
    /// The checkpoint that begins.
    pub(super) checkpoint: String,
    /// The socket of the exports.
    pub(super) socket: PathBuf,
    /// The directory of the stores.
    pub(super) stores: PathBuf,
}

impl BackupNames {
    pub(super) fn new(request: &MachineRequest) -> Result<BackupNames> {
        if crate::pull::is_repository(&request.stores) {
            let text = "the disks of a machine that this command finds need a directory: list the disks in a file, with \
                        store = \"restic:REPO#DIRECTORY\" for each";
            return Err(BackupError::new(BackupErrorKind::Request, BackupStep::OpenStore, text));
        }
        let path = std::path::absolute(&request.stores)
            .map_err(|error| failed_directory(&request.stores, error))?;
        let digest = blake3::hash(path.as_os_str().as_encoded_bytes()).to_hex();
        let prefix = format!("blockhaul-{}-", &digest.as_str()[..8]);
        let checkpoint = format!("{prefix}{}", request.time);
        let socket = request.scratch.join(format!("{prefix}nbd.sock"));
        let nodes = format!("bh-{}-", &digest.as_str()[..8]);
        Ok(BackupNames { prefix, nodes, checkpoint, socket, stores: path })
    }

    /// The checkpoints of the newest points of all stores, also of disks that are not backed up this time.
    pub(super) fn needed_checkpoints(&self) -> Result<HashSet<String>> {
        let listed = std::fs::read_dir(&self.stores);
        let listed = listed.map_err(|error| failed_directory(&self.stores, error))?;
        let folders = listed.flatten().map(|entry| entry.path()).filter(|path| path.is_dir());
        let mut needed = HashSet::new();
        for store in folders {
            // Other directories are no stores.
            if Store::open(&store).is_err_and(|error| error.kind() == Kind::NotFound) {
                continue;
            }
            needed.extend(newest_checkpoint(&store)?);
        }
        Ok(needed)
    }

    /// Whether this name is one of an earlier or of this backup.
    pub(super) fn is_own(&self, name: &str) -> bool {
        name.starts_with(&self.prefix)
    }

    /// The beginning of the names of nodes, jobs and exports, which QEMU limits to 31 bytes.
    pub(super) fn nodes(&self) -> &str {
        &self.nodes
    }

    pub(super) fn source(&self, export: &str) -> Result<DeviceSpec> {
        let uri = format!("nbd+unix:///{export}?socket={}", self.socket.display());
        DeviceSpec::parse(uri.as_ref())
            .map_err(|error| BackupError::of_file(BackupStep::OpenSource, &error))
    }
}

/// The checkpoint of the newest point of a store; `None`: there is no point.
pub(super) fn newest_checkpoint(store: &Path) -> Result<Option<String>> {
    let found = Store::open_or_new(store);
    let found =
        found.map_err(|error| BackupError::of_store(BackupStep::OpenStore, store, error))?;
    Ok(found.newest().map(|newest| newest.checkpoint.clone()))
}

pub(super) fn unusable(stores: &Path, why: &str) -> BackupError {
    let text = format!("the directory of the stores {}: {why}", stores.display());
    BackupError::new(BackupErrorKind::Open, BackupStep::OpenStore, text).in_store(stores)
}

/// A system call about the directory of the stores failed.
pub(super) fn failed_directory(stores: &Path, error: std::io::Error) -> BackupError {
    let text = format!("the directory of the stores {}", stores.display());
    BackupError::of_store(BackupStep::OpenStore, stores, Error::system(text, error))
}

/// An error of a machine.
pub(super) fn refused(text: String) -> BackupError {
    BackupError::new(BackupErrorKind::Open, BackupStep::OpenSource, text)
}

/// Checks that each wanted name is one of those that there are.
pub(super) fn check_known(wanted: &[String], known: &[&str]) -> Result<()> {
    match wanted.iter().find(|name| !known.contains(&name.as_str())) {
        None => Ok(()),
        Some(name) => {
            let text = format!("the machine has no disk {name:?}; known are {}", known.join(", "));
            Err(BackupError::new(BackupErrorKind::Request, BackupStep::OpenSource, text))
        }
    }
}
