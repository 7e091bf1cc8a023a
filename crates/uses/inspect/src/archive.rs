//! The disks of an OVA, as data and as text.

use blockhaul_block::Result;
use blockhaul_catalog::{ArchivedDisk, DeviceSpec, Registry};
#[cfg(feature = "formats")]
use blockhaul_formats::OvaDisks;
#[cfg(feature = "formats")]
use blockhaul_transfer::FileFormat;
use blockhaul_transfer::one_line;
use serde_json::{Value, json};

use crate::sizes::with_unit;

/// The disks of the OVA that a description names; none for other devices, and for one disk of an OVA. A path whose
/// archive is damaged has none either: its facts are those of the file.
///
/// # Errors
/// The archive cannot be opened, or is none.
#[cfg(feature = "formats")]
pub(crate) async fn disks(registry: &Registry, spec: &DeviceSpec) -> Result<Vec<ArchivedDisk>> {
    match archive_of(spec) {
        None => Ok(Vec::new()),
        Some(archive) => match OvaDisks::list(registry, &archive).await {
            Err(_) if matches!(spec, DeviceSpec::Path(_)) => Ok(Vec::new()),
            listed => listed,
        },
    }
}

#[cfg(not(feature = "formats"))]
pub(crate) async fn disks(_: &Registry, _: &DeviceSpec) -> Result<Vec<ArchivedDisk>> {
    Ok(Vec::new())
}

#[cfg(feature = "formats")]
fn archive_of(spec: &DeviceSpec) -> Option<DeviceSpec> {
    match spec {
        DeviceSpec::Path(path) => {
            (FileFormat::of(path) == Some(FileFormat::Ova)).then(|| spec.clone())
        }
        _ => OvaDisks::archive_of(spec),
    }
}

/// The description of the first disk of `ova:DEVICE`.
pub(crate) fn first_disk(archive: &str) -> String {
    let place = archive.split_once('?').map_or(archive, |(place, _)| place);
    format!("{place}?disk=1")
}

/// The disks as lines; empty without disks.
pub(crate) fn text(disks: &[ArchivedDisk]) -> String {
    let head = match disks.len() {
        0 => return String::new(),
        count => format!("\tdisks: {count}\n"),
    };
    disks.iter().fold(head, |text, disk| text + &line(disk))
}

fn line(disk: &ArchivedDisk) -> String {
    let ArchivedDisk { number, file, format, disk_size, file_size } = disk;
    let size = disk_size.map_or("unknown".to_string(), with_unit);
    let file = one_line(file);
    let stored = with_unit(*file_size);
    format!("\t\t{number}: {file}, format {format}, disk-size {size}, file-size {stored}\n")
}

/// The disks as JSON.
pub(crate) fn entries(disks: &[ArchivedDisk]) -> Vec<Value> {
    let entry = |disk: &ArchivedDisk| {
        json!({
            "number": disk.number,
            "file": disk.file,
            "format": disk.format,
            "disk-size": disk.disk_size,
            "file-size": disk.file_size,
        })
    };
    disks.iter().map(entry).collect()
}
