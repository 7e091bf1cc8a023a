//! `blockhaul pull --libvirt` and `--qmp`: the disks of a machine at a point in time that this program begins.

use blockhaul_backups::{MachineAddress, MachineBackup, MachineDisk, MachineRequest, PointRequest};
use blockhaul_transfer::TransferOptions;

use crate::args;
use crate::exit::CommandFailure;
use crate::jobfile::{JobFile, JobFileDisk, JobFileOptions};

/// The backup of a command line.
pub(super) fn request(args: &args::PullArgs) -> Result<MachineRequest, CommandFailure> {
    let machine = &args.machine;
    let address = match (&machine.libvirt, &machine.qmp) {
        (Some(domain), _) => {
            let (domain, connect) = (domain.clone(), machine.connect.clone());
            MachineAddress::Libvirt { domain, connect }
        }
        (None, Some(socket)) => MachineAddress::Qmp { socket: socket.clone() },
        (None, None) => return Err(CommandFailure::usage("give a file, --libvirt or --qmp")),
    };
    // A file of jobs names them as text.
    let stores = machine.store.clone().filter(|store| store.to_str().is_some());
    let wrong = || CommandFailure::usage("add --store with a directory, whose name is UTF-8");
    let stores = stores.ok_or_else(wrong)?;
    let (disks, scratch) = (machine.disk.clone(), machine.scratch.clone());
    let time = super::utc("%Y%m%dT%H%M%S%3fZ");
    Ok(MachineRequest { address, stores, disks, scratch, freeze: !machine.no_freeze, time })
}

/// The point that a dry run is about.
pub(super) fn point(args: &args::PullArgs) -> PointRequest {
    PointRequest {
        name: args.point.clone(),
        default_name: super::utc(super::POINT),
        full: args.full,
    }
}

/// The disks as a file would list them.
pub(super) fn job_file(backup: &MachineBackup) -> JobFile {
    let disk = |disk: &MachineDisk| {
        let mut keys = vec![("store", disk.store.to_string_lossy().into_owned())];
        keys.extend(disk.bitmap.iter().map(|bitmap| ("bitmap", bitmap.clone())));
        if disk.has_checkpoint {
            keys.push(("checkpoint", backup.checkpoint().to_string()));
        }
        JobFileDisk {
            name: disk.name.clone(),
            place: "the machine".to_string(),
            source: disk.source.clone(),
            target: None,
            options: TransferOptions::default(),
            image: args::ImageFormatArgs::default(),
            keys: keys.into_iter().map(|(key, value)| (key.to_string(), value)).collect(),
        }
    };
    JobFile { common: JobFileOptions::default(), disks: backup.disks().iter().map(disk).collect() }
}
