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
mod request;

use std::fs::File;
use std::path::Path;

use blockhaul_io::plain;
use rustix::fs::FlockOperation;

use crate::error::Result;
use crate::pull::PullResult;
use libvirt::LibvirtMachine;
use qmp::QmpMachine;
use request::{BackupNames, failed_directory, unusable};

pub use request::{MachineAddress, MachineDisk, MachineRequest, PointRequest};

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

impl MachineBackup {
    /// Begins the point in time. Blocks.
    ///
    /// # Errors
    /// If another backup runs, the machine is unknown or refuses, or a directory cannot be used. Nothing stays begun
    /// in the machine.
    pub fn begin(request: &MachineRequest) -> Result<MachineBackup> {
        let names = BackupNames::new(request)?;
        check_place(&request.stores)?;
        // No directory is made for a machine that cannot be backed up.
        let mut machine = match &request.address {
            MachineAddress::Libvirt { domain, connect } => {
                let machine = LibvirtMachine::new(domain, connect.as_deref());
                machine.check(request)?;
                Machine::Libvirt(machine)
            }
            MachineAddress::Qmp { socket } => Machine::Qmp(QmpMachine::connect(socket)?),
        };
        let lock = lock(&request.stores)?;
        let disks = match &mut machine {
            Machine::Libvirt(machine) => machine.begin(request, &names),
            Machine::Qmp(machine) => machine.begin(request, &names),
        }?;
        Ok(MachineBackup { machine, disks, names, _lock: lock })
    }

    /// The points that a backup would make. Nothing changes in the machine or in the stores. Blocks.
    ///
    /// # Errors
    /// If the machine is unknown, or a backup would be refused.
    pub fn preview(request: &MachineRequest, point: &PointRequest) -> Result<Vec<PullResult>> {
        let names = BackupNames::new(request)?;
        let disks = match &request.address {
            MachineAddress::Libvirt { domain, connect } => {
                LibvirtMachine::new(domain, connect.as_deref()).idle_disks(request, &names)?
            }
            MachineAddress::Qmp { socket } => {
                QmpMachine::connect(socket)?.idle_disks(&request.disks, &names)?
            }
        };
        disks.iter().map(|disk| disk.preview(request, point)).collect()
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
            Machine::Libvirt(machine) => machine.end(&names),
            Machine::Qmp(machine) => machine.end(&disks, &names),
        };
        drop(lock);
        ended
    }
}

/// Refuses a directory of stores that [`lock`] cannot make.
fn check_place(stores: &Path) -> Result<()> {
    let above = stores.parent().filter(|above| !above.as_os_str().is_empty());
    let Some(above) = above.filter(|above| !above.exists()) else { return Ok(()) };
    Err(unusable(stores, &format!("{} does not exist: create that first", above.display())))
}

/// Makes the directory of the stores, and keeps other backups out of it.
fn lock(stores: &Path) -> Result<File> {
    use std::io::ErrorKind;
    match std::fs::create_dir(stores) {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            // Only the last one is made: where a file system is not mounted, nothing fills the one below.
            let why = format!("{}: create its directory first", plain(&error));
            return Err(unusable(stores, &why));
        }
        Err(error) if error.kind() != ErrorKind::AlreadyExists => {
            return Err(failed_directory(stores, error));
        }
        _ => {}
    }
    let lock = File::create(stores.join("lock"));
    let lock = lock.map_err(|error| failed_directory(stores, error))?;
    let locked = rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive);
    locked.map_err(|error| match error {
        rustix::io::Errno::WOULDBLOCK => {
            unusable(stores, "another backup runs in it: wait until it ends")
        }
        error => failed_directory(stores, error.into()),
    })?;
    Ok(lock)
}
