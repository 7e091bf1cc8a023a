//! Files with secrets that every user can read.

use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// Permission of others to read.
const READ_BY_OTHERS: u32 = 0o004;

/// The files that were warned of.
static WARNED: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

/// Warns, once for each file, if every user can read a file with a secret. `what`: what it holds.
pub(crate) fn warn(path: &Path, what: &str) {
    let Some(text) = warning(path, what) else { return };
    let mut warned = WARNED.lock().unwrap_or_else(PoisonError::into_inner);
    if warned.insert(path.to_path_buf()) {
        log::warn!("{text}");
    }
}

fn warning(path: &Path, what: &str) -> Option<String> {
    // A file that cannot be read is an error elsewhere.
    let mode = std::fs::metadata(path).ok()?.permissions().mode() & 0o7777;
    let shown = path.display();
    (mode & READ_BY_OTHERS != 0).then(|| {
        format!("every user can read {what} in {shown} (mode {mode:04o}): chmod 600 {shown}")
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::fs::{self, Permissions};

    use super::*;

    #[test]
    fn a_secret_that_everybody_can_read_is_warned_of() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = file.path();
        let warning = |mode| {
            fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
            warning(path, "the private key")
        };
        assert_eq!((warning(0o600), warning(0o640), warning(0o622)), (None, None, None));
        let shown = path.display();
        let text = format!(
            "every user can read the private key in {shown} (mode 0644): chmod 600 {shown}"
        );
        assert_eq!(warning(0o644), Some(text));
        assert!(warning(0o604).is_some());
    }
}
