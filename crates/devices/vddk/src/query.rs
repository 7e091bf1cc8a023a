//! Queries for allocated blocks.

use std::time::Duration;

use blockhaul_block::{Error, Kind};

use crate::allocation::{PART, UNIT, UnitBits};
use crate::disk::VddkDisk;
use crate::library::SECTOR;
use crate::scan::bits_of;
use crate::session::{OpenDisk, failed};

/// Pauses before a failed query is repeated.
const REPEATS: [Duration; 2] = [Duration::from_millis(100), Duration::from_millis(500)];

/// The allocated units of a part; none if the query fails. Blocks.
pub(crate) fn query(disk: &VddkDisk, open: &OpenDisk, part: u64) -> Option<UnitBits> {
    let units = match disk.scan() {
        Some(scan) => scan.map.units(part),
        None => 0,
    };
    if units == 0 {
        return Some(UnitBits::Uniform(true));
    }
    let mut pauses = REPEATS.iter();
    loop {
        let error = match once(open, part, units) {
            Ok(bits) => return Some(bits),
            Err(error) => error,
        };
        let unsupported = error.kind() == Kind::Unsupported;
        match pauses.next().filter(|_| !unsupported) {
            Some(pause) => {
                log::debug!("{}: {error}; asking again", disk.options.name());
                std::thread::sleep(*pause);
            }
            None => {
                warn(disk, part, &error);
                return None;
            }
        }
    }
}

fn once(open: &OpenDisk, part: u64, units: usize) -> Result<UnitBits, Error> {
    let doing = format!(
        "cannot query the allocated blocks of {} bytes at offset {}",
        units as u64 * UNIT,
        part * PART
    );
    let start = part * (PART / SECTOR);
    let count = units as u64 * (UNIT / SECTOR);
    let library = open.library();
    let blocks = library
        .query(open.raw, start, count, UNIT / SECTOR)
        .map_err(|code| failed(library, &doing, "QueryAllocatedBlocks", code))?;
    bits_of(part, units, &blocks).map_err(|why| Error::new(Kind::Io, format!("{doing}: {why}")))
}

/// Reports the first failed query of the disk.
fn warn(disk: &VddkDisk, part: u64, error: &Error) {
    let first = disk.scan().is_some_and(|mut scan| scan.warn());
    let name = &disk.options.name();
    if first {
        log::warn!(
            device = name, error = error.text();
            "{name}: {error}; this range counts as data, as does any other whose query fails"
        );
    } else {
        log::debug!("{name}: {error}; part {part} counts as data");
    }
}
