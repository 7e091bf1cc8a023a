//! Where a mount is: the place that the user asked for, where the disks are, and what is mounted now.

use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use blockhaul_fuse::mountpoint::{Mounted, Target};

use super::filesystem::Wanted;
use crate::args;
use crate::exit::{Failure, OPEN, plain};

/// What is wrong with a place.
pub fn unmountable(why: &blockhaul_fuse::mountpoint::Error) -> Failure {
    Failure::new(OPEN, why.to_string())
}

/// Where the disk is shown, and what is shown where the user asked for it.
pub struct Place {
    disk: Target,
    file_system: Option<Wanted>,
}

impl Place {
    /// With `--filesystem`, the disk gets a private directory of its own.
    pub fn new(target: Target, args: &args::Mount) -> Result<Place, Failure> {
        if !args.filesystem {
            return Ok(Place { disk: target, file_system: None });
        }
        let file_system = Some(Wanted {
            target: target.path().to_path_buf(),
            options: args.filesystem_options.clone(),
        });
        let run = Path::new("/run");
        let parent = if run.is_dir() { run.to_path_buf() } else { std::env::temp_dir() };
        let folder = parent.join(format!("blockhaul-mount-{}", std::process::id()));
        std::fs::DirBuilder::new().mode(0o700).create(&folder).map_err(|error| {
            let text = format!("cannot create {}: {}", folder.display(), plain(&error));
            Failure::new(OPEN, text)
        })?;
        let disk = Target::find(&folder).map_err(|why| unmountable(&why))?;
        Ok(Place { disk, file_system })
    }

    /// Where the disk is mounted.
    pub fn target(&self) -> &Target {
        &self.disk
    }

    /// The place that the user asked for.
    pub fn path(&self) -> &Path {
        self.file_system.as_ref().map_or(self.disk.path(), |wanted| &wanted.target)
    }

    /// What the user gets: the file of the disk, or the directory with the files on it.
    pub fn shown<'a>(&'a self, disk: &'a Path) -> &'a Path {
        self.file_system.as_ref().map_or(disk, |wanted| &wanted.target)
    }

    /// The file system to mount, if any.
    pub fn file_system(&self) -> Option<Wanted> {
        self.file_system.clone()
    }

    /// Removes the private directory, if it is there.
    pub fn remove(&self) {
        if self.file_system.is_some() && self.disk.path().exists() {
            remove(self.disk.path());
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.remove();
    }
}

fn remove(folder: &Path) {
    if let Err(error) = std::fs::remove_dir(folder) {
        log::warn!("cannot remove {}: {}", folder.display(), plain(&error));
    }
}

/// What is mounted now: a second signal unmounts it without waiting.
#[derive(Clone, Default)]
pub struct Current(Arc<Mutex<Option<Mounted>>>);

impl Current {
    /// Changes it.
    pub fn set(&self, mounted: Option<Mounted>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = mounted;
    }

    /// Unmounts it without waiting for anything.
    pub fn unmount(&self) {
        if let Some(mounted) = self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
            && let Err(error) = mounted.unmount_lazily()
        {
            log::warn!("{error}");
        }
    }
}
