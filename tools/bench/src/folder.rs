//! Folders of our own, which go when they are done with.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use blockhaul_measure::{MeasureError, Result};

/// A separate directory, removed with its contents on drop.
pub(crate) struct ScratchFolder {
    pub(crate) path: PathBuf,
    keep: bool,
}

impl ScratchFolder {
    pub(crate) fn new(parent: &Path, kind: &str, keep: bool) -> Result<ScratchFolder> {
        use std::os::unix::fs::DirBuilderExt as _;
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let parent = parent.canonicalize().map_err(|error| {
            MeasureError::usage(format!("cannot use {} as --{kind}: {error}", parent.display()))
        })?;
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = parent.join(format!("blockhaul-bench-{}-{number}", std::process::id()));
        std::fs::DirBuilder::new()
            .mode(0o700)
            .create(&path)
            .map_err(|error| MeasureError::file("make", &path, error))?;
        Ok(ScratchFolder { path, keep })
    }
}

impl Drop for ScratchFolder {
    fn drop(&mut self) {
        if !self.keep {
            // What cannot be removed is in a directory for temporary files; the failure is ignored.
            std::fs::remove_dir_all(&self.path).ok();
        }
    }
}
