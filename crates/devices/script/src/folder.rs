//! The directory for a script's state: `$tmpdir`.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use blockhaul_block::{Error, Result};

/// Its parent directory: scripts written for nbdkit may use `$tmpdir` without quotes, so it must
/// not contain spaces, as a directory chosen by the user could.
const PLACE: &str = "/tmp";
/// Number of names to try.
const ATTEMPTS: u32 = 100;

/// A directory accessible only to this user, removed with its contents on drop.
pub(crate) struct StateFolder(PathBuf);

impl StateFolder {
    pub(crate) fn new() -> Result<StateFolder> {
        let cannot = |error| Error::system(format!("cannot create a directory in {PLACE}"), error);
        for _ in 0..ATTEMPTS {
            let mut salt = [0; 8];
            rustix::rand::getrandom(&mut salt[..], rustix::rand::GetRandomFlags::empty())
                .map_err(|error| cannot(error.into()))?;
            let name = format!("blockhaul-script-{:016x}", u64::from_ne_bytes(salt));
            let path = Path::new(PLACE).join(name);
            match DirBuilder::new().mode(0o700).create(&path) {
                Ok(()) => return Ok(StateFolder(path)),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(cannot(error)),
            }
        }
        Err(cannot(io::ErrorKind::AlreadyExists.into()))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for StateFolder {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.0) {
            log::warn!("cannot remove {}: {}", self.0.display(), blockhaul_io::plain(&error));
        }
    }
}
