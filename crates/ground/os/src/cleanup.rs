//! What a process has created in the file system, and removes when it ends.

use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use crate::UserIdentity;

/// The sockets, files and private directories that a process has created and must remove. Its copies are the same list.
#[derive(Debug, Clone, Default)]
pub struct CleanupList(Arc<Mutex<CleanupPaths>>);

#[derive(Debug, Default)]
struct CleanupPaths {
    sockets: Vec<PathEntry>,
    files: Vec<PathEntry>,
    dirs: Vec<PathBuf>,
}

/// A name in a directory, and what it referred to when it was recorded.
#[derive(Debug)]
struct PathEntry {
    path: PathBuf,
    device: u64,
    inode: u64,
}

impl PathEntry {
    fn of(path: &Path) -> Option<PathEntry> {
        let data = std::fs::symlink_metadata(path).ok()?;
        Some(PathEntry { path: path.into(), device: data.dev(), inode: data.ino() })
    }

    /// Removes the name, unless it refers to something else now. What cannot be removed stays: a
    /// socket or file that nobody serves.
    fn remove(&self) {
        let now = PathEntry::of(&self.path);
        if now.is_some_and(|now| (now.device, now.inode) == (self.device, self.inode)) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

impl CleanupList {
    fn with<T>(&self, change: impl FnOnce(&mut CleanupPaths) -> T) -> T {
        // A list of paths cannot be inconsistent.
        change(&mut self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner))
    }

    /// Records a socket that was created.
    pub fn remember_socket(&self, path: &Path) {
        self.with(|made| made.sockets.extend(PathEntry::of(path)));
    }

    /// Records a file that was created, which keeps its owner in [`CleanupList::give_to`].
    pub fn remember_file(&self, path: &Path) {
        // Not a device or a pipe that only received the contents.
        if std::fs::symlink_metadata(path).is_ok_and(|data| data.is_file()) {
            self.with(|made| made.files.extend(PathEntry::of(path)));
        }
    }

    /// Makes a directory for temporary files that only this user can access.
    ///
    /// # Errors
    /// If the system has no random number, or refuses the directory.
    pub fn private_dir(&self) -> io::Result<PathBuf> {
        let mut random = [0_u8; 8];
        let flags = rustix::rand::GetRandomFlags::empty();
        rustix::rand::getrandom(&mut random, flags)?;
        let dir =
            std::env::temp_dir().join(format!("blockhaul-{:016x}", u64::from_ne_bytes(random)));
        std::fs::DirBuilder::new().mode(0o700).create(&dir)?;
        self.with(|made| made.dirs.push(dir.clone()));
        Ok(dir)
    }

    /// Gives its sockets and private directories to the user that the server will run as: it
    /// removes them, and its command connects.
    ///
    /// # Errors
    /// If one of them cannot be given away: this user is not root.
    pub fn give_to(&self, identity: &UserIdentity) -> io::Result<()> {
        let give =
            |path: &Path| std::os::unix::fs::lchown(path, identity.uid(), Some(identity.gid()));
        self.with(|made| {
            made.sockets.iter().try_for_each(|socket| give(&socket.path))?;
            made.dirs.iter().try_for_each(|dir| give(dir))
        })
    }

    /// A value that removes on drop what was created.
    pub fn clean_on_drop(&self) -> CleanupOnDrop {
        CleanupOnDrop(self.clone())
    }

    /// Removes what was created, unless it has been replaced.
    pub fn clean(&self) {
        let CleanupPaths { sockets, files, dirs } = self.with(std::mem::take);
        sockets.iter().chain(&files).for_each(PathEntry::remove);
        for dir in dirs {
            let _ = std::fs::remove_dir(dir);
        }
    }
}

/// Removes on drop what is in a [`CleanupList`].
#[derive(Debug)]
pub struct CleanupOnDrop(CleanupList);

impl Drop for CleanupOnDrop {
    fn drop(&mut self) {
        self.0.clean();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_our_own_socket_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let cleanup = CleanupList::default();
        std::fs::write(&path, "").unwrap();
        cleanup.remember_socket(&path);
        std::fs::rename(&path, dir.path().join("old")).unwrap();
        std::fs::write(&path, "").unwrap();
        cleanup.clean();
        assert!(path.exists());
        cleanup.remember_socket(&path);
        cleanup.clean();
        assert!(!path.exists());
        let private = cleanup.private_dir().unwrap();
        assert!(private.is_dir());
        cleanup.clean();
        assert!(!private.exists());
    }
}
