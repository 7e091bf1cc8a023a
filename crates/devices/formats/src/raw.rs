//! Raw disks in files, byte for byte.

use std::path::Path;

use blockhaul_block::Error;
use blockhaul_catalog::{DeviceSpec, Intent, Registry};

use crate::qcow2::resize::NewSize;

/// Why the raw disk in a file has not been resized.
#[derive(Debug)]
pub enum RawResizeError {
    /// The disk is in no regular file.
    NoRegularFile,
    /// The new size is refused, with [`Kind::Usage`](blockhaul_block::Kind::Usage).
    Size(Error),
    /// The disk cannot be opened for this program alone.
    Open(Error),
    /// The system refuses to read or to set the length of the file.
    System(std::io::Error),
}

/// Sets the size of the raw disk in the regular file `path`, which `description` names, too, and which
/// nothing else may use, and returns it. New bytes read as zeroes. `shrink` allows a smaller size.
///
/// # Errors
/// See [`RawResizeError`]. The file is unchanged, unless the system has set its length and cannot flush it.
pub async fn resize(
    registry: &Registry,
    description: &DeviceSpec,
    path: &Path,
    size: NewSize,
    shrink: bool,
) -> Result<u64, RawResizeError> {
    let found = std::fs::metadata(path).map_err(RawResizeError::System)?;
    if !found.is_file() {
        return Err(RawResizeError::NoRegularFile);
    }
    let new = size.checked(found.len(), shrink).map_err(RawResizeError::Size)?;
    // Its locks keep other programs away.
    let opened = registry.open(description, Vec::new(), Intent::TARGET).await;
    let _stack = opened.map_err(RawResizeError::Open)?;
    set_len(path, new).map_err(RawResizeError::System)?;
    Ok(new)
}

fn set_len(path: &Path, size: u64) -> std::io::Result<()> {
    let file = std::fs::OpenOptions::new().write(true).open(path)?;
    file.set_len(size)?;
    file.sync_all()
}
