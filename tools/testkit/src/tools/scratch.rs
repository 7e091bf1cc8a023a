//! Directories for the files and sockets of a test.

use std::io;
use std::path::{Path, PathBuf};

/// A separate directory, removed on drop. Its path is short, as that of a Unix socket must fit in
/// 107 bytes.
#[derive(Debug)]
pub struct ScratchDir {
    dir: tempfile::TempDir,
}

impl ScratchDir {
    /// In memory where the machine has `/dev/shm`, else on disk.
    ///
    /// # Errors
    /// Where the directory cannot be made.
    pub fn new() -> io::Result<ScratchDir> {
        let memory = Path::new("/dev/shm");
        if memory.is_dir()
            && let Ok(scratch) = ScratchDir::within(memory)
        {
            return Ok(scratch);
        }
        ScratchDir::on_disk()
    }

    /// In the directory for temporary files, whose file system is usually on a disk.
    ///
    /// # Errors
    /// If the directory cannot be made.
    pub fn on_disk() -> io::Result<ScratchDir> {
        let dir = std::env::temp_dir();
        let short = dir.as_os_str().len() <= 64;
        ScratchDir::within(if short { &dir } else { Path::new("/tmp") })
    }

    fn within(dir: &Path) -> io::Result<ScratchDir> {
        let dir = tempfile::Builder::new().prefix("bh").rand_bytes(8).tempdir_in(dir)?;
        Ok(ScratchDir { dir })
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Path of a file in the directory, which need not exist.
    pub fn file(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }

    /// Path of a socket in the directory.
    ///
    /// # Panics
    /// Where the name is so long that the path does not fit a socket's address.
    pub fn socket(&self, name: &str) -> PathBuf {
        let path = self.file(name);
        assert!(path.as_os_str().len() < 108, "{} is too long for a socket", path.display());
        path
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn scratch_directories_are_removed_and_their_sockets_fit() {
        let scratch = ScratchDir::on_disk().unwrap();
        let path = scratch.path().to_owned();
        fs::write(scratch.file("x"), "x").unwrap();
        assert!(scratch.socket("s").as_os_str().len() < 108);
        drop(scratch);
        assert!(!path.exists());
    }
}
