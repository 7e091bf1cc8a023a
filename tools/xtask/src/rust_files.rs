//! The Rust files of the workspace.

use std::fs;
use std::path::{Path, PathBuf};

use crate::TaskResult;

/// Adds the Rust files below a directory of `root`, relative to `root`: not those of targets and hidden
/// directories.
pub(crate) fn rust_files(root: &Path, below: &Path, files: &mut Vec<PathBuf>) -> TaskResult {
    let dir = root.join(below);
    let entries =
        fs::read_dir(&dir).map_err(|error| format!("cannot read {}: {error}", dir.display()))?;
    for entry in entries.flatten() {
        let name = entry.file_name();
        let path = below.join(&name);
        let is_dir = entry.file_type().is_ok_and(|kind| kind.is_dir());
        if is_dir && name != "target" && !name.to_string_lossy().starts_with('.') {
            rust_files(root, &path, files)?;
        } else if !is_dir && path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    Ok(())
}
