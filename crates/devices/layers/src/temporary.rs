//! A layer's own files, which have no name and are freed when they are closed.

use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use blockhaul_block::{Error, Result};

/// A file without a name in `dir`, or in TMPDIR, or in /var/tmp (not on a tmpfs).
///
/// # Errors
/// Those of creating the file, which name the directory.
pub fn file(layer: &str, dir: Option<&Path>) -> Result<blockhaul_io::File> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let dir = match dir {
        Some(dir) => dir.to_owned(),
        None => std::env::var_os("TMPDIR").map_or_else(|| "/var/tmp".into(), PathBuf::from),
    };
    loop {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = dir.join(format!(".blockhaul-{}-{number}", std::process::id()));
        let mut options = OpenOptions::new();
        let made = options.read(true).write(true).create_new(true).mode(0o600).open(&path);
        let made = made.and_then(|file| std::fs::remove_file(&path).map(|()| file));
        match made {
            Ok(file) => return Ok(blockhaul_io::File::new(file.into())),
            // Left behind by a program that was killed between the two steps.
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(error) => {
                let text = format!("{layer}: cannot create a temporary file in {}", dir.display());
                return Err(Error::system(text, error));
            }
        }
    }
}
