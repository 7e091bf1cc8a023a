//! The file of a manifest: written atomically, and never over a foreign file.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::unix::fs::FileTypeExt as _;
use std::path::PathBuf;

use blockhaul_catalog::DeviceSpec;
use blockhaul_engine::Manifest;
use blockhaul_io::plain;

use crate::description::same_place;
use crate::error::{Result, TransferError, TransferErrorKind, TransferStep};
use crate::standard_stream::takes_writes;

/// The first bytes of manifests of all versions.
const BEGINNING: &[u8] = b"blockhaul manifest ";

/// A manifest file to be written.
pub(crate) struct ManifestFile {
    path: PathBuf,
    /// Its replacement: created before the copy, so that an error is found before hours of copying.
    fresh: Option<(PathBuf, File)>,
}

impl ManifestFile {
    /// A manifest at this path; nothing is created yet.
    pub(crate) fn new(path: PathBuf) -> ManifestFile {
        ManifestFile { path, fresh: None }
    }

    /// The name of the file.
    pub(crate) fn path(&self) -> &PathBuf {
        &self.path
    }

    /// Refuses a file with other contents, before anything is emptied.
    pub(crate) fn check(&self) -> Result<()> {
        match std::fs::metadata(&self.path) {
            Ok(data) if data.is_file() && data.len() > 0 => {}
            Ok(data) if data.is_dir() => {
                let path = self.path.display();
                let next = "give the name of a file in it";
                let text = format!("manifest {path}: it is a directory: {next}");
                return Err(manifest_error(TransferErrorKind::Request, text));
            }
            // A device or a pipe accepts anything. Opening a pipe waits for its other end.
            Ok(data) if data.file_type().is_char_device() => {
                let opened = OpenOptions::new().write(true).open(&self.path);
                let takes = opened.and_then(|file| takes_writes(&file));
                return takes.map_err(|error| self.failed(error));
            }
            Ok(_) => return Ok(()),
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(self.failed(error)),
        }
        let mut begins = Vec::new();
        let file = File::open(&self.path).map_err(|error| self.failed(error))?;
        let read = file.take(BEGINNING.len() as u64).read_to_end(&mut begins);
        read.map_err(|error| self.failed(error))?;
        if begins == BEGINNING {
            Ok(())
        } else {
            Err(self.refused("it exists and is not a manifest"))
        }
    }

    /// Creates the file, before the target is touched: it must not be a side of the copy.
    pub(crate) fn begin(&mut self, sides: [&DeviceSpec; 2]) -> Result<()> {
        let own = DeviceSpec::Path(self.path.clone());
        if sides.iter().any(|side| same_place(&own, side)) {
            return Err(self.refused("it is the source or the target"));
        }
        let there = std::fs::metadata(&self.path).ok();
        if there.as_ref().is_some_and(|data| !data.is_file()) {
            return Ok(());
        }
        // The target of a link is replaced, not the link.
        let path = std::fs::canonicalize(&self.path).unwrap_or_else(|_| self.path.clone());
        let mut name = path.clone().into_os_string();
        name.push(format!(".{}.new", std::process::id()));
        let fresh = PathBuf::from(name);
        let made = OpenOptions::new().write(true).create_new(true).open(&fresh);
        let file = made.map_err(|error| self.failed(error))?;
        let file = &self.fresh.insert((fresh, file)).1;
        if let Some(data) = there {
            let kept = file.set_permissions(data.permissions());
            kept.map_err(|error| self.failed(error))?;
        }
        self.path = path;
        Ok(())
    }

    /// Writes it durably.
    pub(crate) fn write(&mut self, made: &Manifest) -> Result<()> {
        let text = made.to_string();
        let written = match self.fresh.as_mut() {
            None => std::fs::write(&self.path, text),
            Some((fresh, file)) => file
                .write_all(text.as_bytes())
                .and_then(|()| file.sync_all())
                .and_then(|()| std::fs::rename(fresh, &self.path))
                .and_then(|()| blockhaul_io::sync_folder(&self.path)),
        };
        written.map_err(|error| self.failed(error))?;
        self.fresh = None;
        Ok(())
    }

    pub(crate) fn failed(&self, error: std::io::Error) -> TransferError {
        let path = self.path.display();
        let why = plain(&error);
        let next = match error.kind() {
            ErrorKind::NotFound => ": create its directory first",
            _ => "",
        };
        let text = format!("cannot write the manifest {path}: {why}{next}");
        manifest_error(TransferErrorKind::Other, text)
    }

    fn refused(&self, why: &str) -> TransferError {
        let path = self.path.display();
        let text = format!("cannot write the manifest {path}: {why}: choose another name");
        manifest_error(TransferErrorKind::Other, text)
    }
}

fn manifest_error(kind: TransferErrorKind, text: String) -> TransferError {
    TransferError::new(kind, TransferStep::Manifest, text)
}

impl Drop for ManifestFile {
    fn drop(&mut self) {
        if let Some((fresh, _)) = &self.fresh {
            let _ = std::fs::remove_file(fresh);
        }
    }
}
