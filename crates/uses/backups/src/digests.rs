//! Digests of the files of a store.

use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use blockhaul_block::{Error, Kind, Result};
use blockhaul_catalog::{DeviceSpec, Intent, Registry};
use blockhaul_engine::{CopyProgress, EngineOptions, Manifest};
use blockhaul_io::Pool;

/// Longest file with digests, in bytes: far more than the engine makes of the largest disk.
const DIGESTS_MAX: u64 = 1 << 30;

/// Digests of a file of a store: the text of their own file, and the digest of that.
pub struct FileDigests {
    text: String,
    digest: String,
}

impl FileDigests {
    /// Reads `file` and makes its digests. Runs on a worker.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub async fn of_file(registry: Registry, file: PathBuf) -> Result<FileDigests> {
        FileDigests::counted(registry, file, &Arc::default()).await
    }

    /// As [`FileDigests::of_file`]; the bytes of the file are counted.
    pub(crate) async fn counted(
        registry: Registry,
        file: PathBuf,
        progress: &Arc<CopyProgress>,
    ) -> Result<FileDigests> {
        // The copy that wrote the file may have it open.
        let made = manifest(registry.for_command(), file, None, progress).await?;
        Ok(FileDigests { text: made.to_string(), digest: made.digest() })
    }

    /// Text and digest, as a store records them.
    pub(crate) fn pair(&self) -> (&str, &str) {
        (&self.text, &self.digest)
    }
}

/// The manifest of a file, with the blocks of `like`. Runs on a worker.
pub(crate) async fn manifest(
    registry: Registry,
    file: PathBuf,
    like: Option<&Manifest>,
    progress: &Arc<CopyProgress>,
) -> Result<Manifest> {
    let stack = registry.open(&DeviceSpec::Path(file), Vec::new(), Intent::READ).await?;
    let options = EngineOptions::default();
    let progress = progress.part();
    progress.expect(stack.device().facts().size);
    let pool = Pool::new(options.memory());
    let made = blockhaul_engine::manifest(&stack, like, &options, &pool, &progress).await;
    made.map_err(|failed| failed.error)
}

/// Reads the digests in the file `path`, whose own digest is `digest`.
pub(crate) fn read_digests(path: &Path, digest: &str) -> Result<Manifest> {
    let failed = |error| Error::system(format!("cannot read {}", path.display()), error);
    let wrong = |why: &str| Error::new(Kind::Invalid, format!("{}: {why}", path.display()));
    let mut text = String::new();
    let file = File::open(path).map_err(failed)?;
    file.take(DIGESTS_MAX).read_to_string(&mut text).map_err(failed)?;
    let kept: Manifest = text.parse().map_err(|error: Error| wrong(&error.text()))?;
    if kept.digest() != digest {
        return Err(wrong("these are not the digests that the store lists"));
    }
    Ok(kept)
}
