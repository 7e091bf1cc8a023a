//! Mounts and unmounts: directly, which needs root, or with the program `fusermount3`.

mod error;
mod helper;
mod table;

use std::ffi::CString;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

pub use self::error::MountError;
use crate::files::Permissions;

/// The type of the file system in the table of mounts.
const TYPE: &str = "fuse.blockhaul";
/// Maximum length of the source in the table of mounts, in bytes: options share a page.
const SOURCE_MAX: usize = 1024;

/// A file or directory over which a disk can be shown.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountTarget {
    path: PathBuf,
    is_folder: bool,
}

impl MountTarget {
    /// Checks the directory or regular file at `path`.
    ///
    /// # Errors
    /// If it does not exist, is something else, or something is mounted there.
    pub fn find(path: &Path) -> Result<MountTarget, MountError> {
        let shown = path.display();
        let found = std::fs::metadata(path).and_then(|data| Ok((path.canonicalize()?, data)));
        let (full, data) = found.map_err(|error| match Errno::from_io_error(&error) {
            Some(Errno::NOENT) => {
                MountError(format!("{shown} does not exist: create a directory or an empty file"))
            }
            Some(Errno::NOTCONN) => has_ended(path),
            _ => MountError(format!("cannot use {shown}: {}", blockhaul_io::plain(&error))),
        })?;
        if !data.is_dir() && !data.is_file() {
            let text = "is neither a directory nor a regular file";
            return Err(MountError(format!("{shown} {text}: choose another place")));
        }
        if table::find(&full).is_some() {
            // Attributes may still be there when nobody answers any more.
            let opened = std::fs::File::open(&full).map_err(|error| Errno::from_io_error(&error));
            if matches!(opened, Err(Some(Errno::NOTCONN | Errno::CONNABORTED))) {
                return Err(has_ended(path));
            }
            let text = "something is mounted there already";
            return Err(MountError(format!("cannot mount on {shown}: {text}: unmount it first")));
        }
        Ok(MountTarget { path: full, is_folder: data.is_dir() })
    }

    /// Its full path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether it is a directory.
    pub fn is_folder(&self) -> bool {
        self.is_folder
    }

    /// Mounts on it; returns the connection to the kernel. `source` is what the table of mounts
    /// shows. Blocks, but not until requests are answered.
    ///
    /// # Errors
    /// If there is no FUSE here, or this user must not mount on the target.
    pub fn mount(
        self,
        source: &str,
        permissions: &Permissions,
    ) -> Result<(MountedDisk, OwnedFd), MountError> {
        let source = shortened(source);
        if !rustix::process::geteuid().is_root() {
            let fd = helper::mount(&self.path, source, permissions)?;
            return Ok((MountedDisk { path: self.path, direct: false }, fd));
        }
        let fd = blockhaul_os::open_fuse().map_err(|error| no_device(&error))?;
        match self.mount_directly(&fd, source, permissions) {
            Ok(()) => Ok((MountedDisk { path: self.path, direct: true }, fd)),
            // Root of a container without the capability.
            Err(Errno::PERM) if helper::exists() => {
                let fd = helper::mount(&self.path, source, permissions)?;
                Ok((MountedDisk { path: self.path, direct: false }, fd))
            }
            Err(error) => Err(self.refused(error)),
        }
    }

    fn mount_directly(
        &self,
        fd: &OwnedFd,
        source: &str,
        permissions: &Permissions,
    ) -> Result<(), Errno> {
        let mode = if self.is_folder { "40000" } else { "100000" };
        let others = if permissions.others { ",allow_other" } else { "" };
        let Permissions { uid, gid, .. } = permissions;
        let options = format!(
            "fd={},rootmode={mode},user_id={uid},group_id={gid},default_permissions,\
             max_read={}{others}",
            fd.as_raw_fd(),
            helper::READ_MAX
        );
        let options = CString::new(options).map_err(|_| Errno::INVAL)?;
        let mut flags = MountFlags::NOSUID | MountFlags::NODEV;
        flags.set(MountFlags::RDONLY, !permissions.write);
        let source = source.replace('\0', "");
        mount(source.as_str(), &self.path, TYPE, flags, &*options)
    }

    fn refused(&self, error: Errno) -> MountError {
        let shown = self.path.display();
        MountError(match error {
            Errno::PERM => format!(
                "cannot mount on {shown}: this process may not mount (CAP_SYS_ADMIN), and \
                 fusermount3 is not installed"
            ),
            Errno::NODEV => format!("cannot mount on {shown}: {NO_MODULE}"),
            Errno::BUSY => format!("cannot mount on {shown}: it is in use: choose another place"),
            error => format!("cannot mount on {shown}: {error}"),
        })
    }
}

fn has_ended(path: &Path) -> MountError {
    let shown = path.display();
    MountError(format!(
        "the program that had mounted {shown} has ended: unmount it with umount {shown}"
    ))
}

const NO_MODULE: &str = "the kernel has no FUSE: load its module with modprobe fuse";

fn no_device(error: &std::io::Error) -> MountError {
    let why = match Errno::from_io_error(error) {
        Some(Errno::NOENT | Errno::NXIO | Errno::NODEV) => NO_MODULE.to_string(),
        Some(Errno::ACCESS | Errno::PERM) => {
            "access to it is denied; a container needs the device, for example with \
             --device /dev/fuse"
                .to_string()
        }
        _ => blockhaul_io::plain(error),
    };
    MountError(format!("cannot open /dev/fuse: {why}"))
}

fn shortened(source: &str) -> &str {
    let end = (0..=SOURCE_MAX.min(source.len())).rev().find(|&end| source.is_char_boundary(end));
    &source[..end.unwrap_or(0)]
}

/// A mounted disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountedDisk {
    path: PathBuf,
    direct: bool,
}

impl MountedDisk {
    /// The full path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Unmounts it. If it is in use, it is not visible any more, and the session ends when the last
    /// user closes its files. Blocks until requests are answered.
    ///
    /// # Errors
    /// If the kernel or `fusermount3` refuses.
    pub fn unmount(&self) -> Result<(), MountError> {
        if self.is_unmounted(false)? { Ok(()) } else { self.unmount_lazily() }
    }

    /// Unmounts it without waiting for anything.
    ///
    /// # Errors
    /// If the kernel or `fusermount3` refuses.
    pub fn unmount_lazily(&self) -> Result<(), MountError> {
        self.is_unmounted(true).map(drop)
    }

    /// Unmounts it, with `lazily` even if it is in use; false if it is.
    fn is_unmounted(&self, lazily: bool) -> Result<bool, MountError> {
        let unmounted = if self.direct {
            self.unmount_directly(lazily)
        } else {
            helper::unmount(&self.path, lazily)
        };
        // Somebody may have unmounted it, and removed its place.
        unmounted
            .or_else(|error| if table::find(&self.path).is_none() { Ok(true) } else { Err(error) })
    }

    fn unmount_directly(&self, lazily: bool) -> Result<bool, MountError> {
        let flags = if lazily { UnmountFlags::DETACH } else { UnmountFlags::empty() };
        match unmount(&self.path, flags | UnmountFlags::NOFOLLOW) {
            // EINVAL: somebody has unmounted it.
            Ok(()) | Err(Errno::INVAL) => Ok(true),
            Err(Errno::BUSY) if !lazily => Ok(false),
            Err(error) => {
                Err(MountError(format!("cannot unmount {}: {error}", self.path.display())))
            }
        }
    }

    /// Sets how many bytes the kernel reads ahead. Needs root; without, the kernel's own value
    /// (128 KiB) stays.
    pub fn read_ahead(&self, bytes: u64) {
        let Some(device) = table::find(&self.path) else { return };
        let path = format!("/sys/class/bdi/{device}/read_ahead_kb");
        if let Err(error) = std::fs::write(&path, (bytes >> 10).to_string()) {
            log::debug!("cannot write {path}: {}", blockhaul_io::plain(&error));
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_target_is_a_directory_or_a_file() {
        let folder = tempfile::tempdir().unwrap();
        let target = MountTarget::find(folder.path()).unwrap();
        assert!(target.is_folder());
        let file = folder.path().join("f");
        let absent = MountTarget::find(&file).unwrap_err().to_string();
        assert!(
            absent.ends_with("does not exist: create a directory or an empty file"),
            "{absent}"
        );
        std::fs::write(&file, "").unwrap();
        assert!(!MountTarget::find(&file).unwrap().is_folder());
        let null = MountTarget::find(Path::new("/dev/null")).unwrap_err().to_string();
        assert!(null.contains("neither a directory nor a regular file"), "{null}");
        let busy = MountTarget::find(Path::new("/proc")).unwrap_err().to_string();
        assert!(busy.contains("something is mounted there already"), "{busy}");
    }

    #[test]
    fn a_long_source_is_cut_at_a_character() {
        let long = "ä".repeat(1000);
        assert_eq!(shortened(&long).len(), 1024);
        assert_eq!(shortened(&format!("x{long}")).len(), 1023);
        assert_eq!(shortened("a"), "a");
    }
}
