//! Where a mount is: the place that the user asked for, where the disks are, and what is mounted now.

use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use blockhaul_fuse::mountpoint::{MountTarget, MountedDisk};
use blockhaul_fuse::{FileSystemError, FileSystemErrorKind, FileSystemTarget};

use crate::args;
use crate::exit::{CommandFailure, FAILED, OPEN, plain};

/// What is wrong with a place.
pub fn unmountable(why: &blockhaul_fuse::mountpoint::MountError) -> CommandFailure {
    CommandFailure::new(OPEN, why.to_string())
}

/// The reason why a file system is not mounted.
pub fn no_file_system(error: FileSystemError) -> CommandFailure {
    let text = format!("--filesystem: {error}");
    match error.kind {
        FileSystemErrorKind::Target => CommandFailure::usage(text),
        FileSystemErrorKind::Permission | FileSystemErrorKind::LoopDevice => {
            CommandFailure::new(OPEN, text)
        }
        FileSystemErrorKind::Mount => CommandFailure::new(FAILED, error.to_string()),
    }
}

/// Where the disk is shown, and what is shown where the user asked for it.
pub struct MountLocation {
    disk: MountTarget,
    file_system: Option<FileSystemTarget>,
}

impl MountLocation {
    /// With `--filesystem`, the disk gets a private directory of its own.
    pub fn new(
        target: MountTarget,
        args: &args::MountArgs,
    ) -> Result<MountLocation, CommandFailure> {
        if !args.filesystem {
            return Ok(MountLocation { disk: target, file_system: None });
        }
        let file_system = Some(FileSystemTarget {
            target: target.path().to_path_buf(),
            options: args.filesystem_options.clone(),
        });
        let run = Path::new("/run");
        let parent = if run.is_dir() { run.to_path_buf() } else { std::env::temp_dir() };
        let folder = parent.join(format!("blockhaul-mount-{}", std::process::id()));
        std::fs::DirBuilder::new().mode(0o700).create(&folder).map_err(|error| {
            let text = format!("cannot create {}: {}", folder.display(), plain(&error));
            CommandFailure::new(OPEN, text)
        })?;
        let disk = MountTarget::find(&folder).map_err(|why| unmountable(&why))?;
        Ok(MountLocation { disk, file_system })
    }

    /// Where the disk is mounted.
    pub fn target(&self) -> &MountTarget {
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
    pub fn file_system(&self) -> Option<FileSystemTarget> {
        self.file_system.clone()
    }

    /// Removes the private directory, if it is there.
    pub fn remove(&self) {
        if self.file_system.is_some() && self.disk.path().exists() {
            remove(self.disk.path());
        }
    }
}

impl Drop for MountLocation {
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
pub struct CurrentMount(Arc<Mutex<Option<MountedDisk>>>);

impl CurrentMount {
    /// Changes it.
    pub fn set(&self, mounted: Option<MountedDisk>) {
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
