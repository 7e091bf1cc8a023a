//! `backup DISK SOCKET TARGET`: serves a disk and backs it up while clients use it: all of it, and after each
//! line on standard input what has changed since the last backup.

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use blockhaul::device::DeviceSpec;
use blockhaul::jobs::{
    BackupConfig, BackupDisk, ExportConfig, ExportTable, ExportTableConfig, JobError, Jobs,
    SnapshotConfig,
};
use blockhaul::runtime::{self, Listener, Runtime};
use blockhaul::server::{Server, ServerConfig};

/// Name of the dirty bitmap.
const BITMAP: &str = "changes";

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [disk, socket, target] = &args[..] else {
        return Err("usage: backup DISK SOCKET TARGET".into());
    };
    let (disk, target): (DeviceSpec, DeviceSpec) = (disk.parse()?, target.parse()?);
    let listener = Listener::bind_unix(socket.as_ref())?;
    let runtime = Runtime::start(&runtime::RuntimeConfig::default())?;
    let exports = vec![ExportConfig::new("disk", disk)];
    let config =
        ExportTableConfig { exports, ..ExportTableConfig::new(blockhaul::device_registry()) };
    let table = Arc::new(ExportTable::new(config));
    let (served, jobs) = (table.clone(), Arc::new(Jobs::default()));
    let server = runtime.block_on(async move || {
        let server = Server::new(ServerConfig::new(served.open().await?));
        drop(runtime::spawn(server.clone().listen(listener)));
        Ok::<_, JobError>(server)
    })?;
    let mut begin = SnapshotConfig::with_new_bitmap(BITMAP);
    loop {
        let export = table.find("disk").ok_or("the export was removed")?;
        let (table, jobs) = (table.clone(), jobs.clone());
        let disk = BackupDisk::new(export, target.clone(), begin);
        let report = runtime.block_on(async move || {
            let started = jobs.backup(&table, BackupConfig::new(vec![disk])).await?;
            started[0].result().await
        })?;
        println!("{report}");
        if std::io::stdin().read_line(&mut String::new())? == 0 {
            break;
        }
        begin = SnapshotConfig::from_bitmap(BITMAP);
    }
    runtime.block_on(async move || {
        jobs.end_service(&table, server.stop(Duration::from_secs(5))).await
    });
    Ok(std::fs::remove_file(socket)?)
}
