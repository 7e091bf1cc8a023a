//! Verification and manifests.
//!
//! Ranges that a device reports as zero are neither read nor hashed: the digests leave out zeroes,
//! so that the cost depends on the data, not on the size.

use std::num::NonZero;
use std::sync::Arc;

use blockhaul_block::{FileRange, LeaseAccess};
use blockhaul_catalog::Stack;
use blockhaul_io::Pool;
use rustix::fs::{Advice, fadvise};

use crate::engine::Engine;
use crate::error::Result;
use crate::manifest::Manifest;
use crate::options::EngineOptions;
use crate::progress::CopyProgress;

/// The result of a successful verification.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct VerificationResult {
    /// Bytes compared, known zeroes included.
    pub bytes: u64,
    /// Digest of the content, in hexadecimal, like that of a [`Manifest`]; none if only a part was
    /// copied.
    pub digest: Option<String>,
}

/// Compares `source` and the start of `target`, as far as the options select them for a copy, see
/// [`Engine::verify`]. Call it on a worker after the writes have completed.
///
/// # Errors
/// Those of [`Engine::verify`].
pub async fn verify(
    source: &Stack,
    target: &Stack,
    options: &EngineOptions,
    pool: &Pool,
    progress: &Arc<CopyProgress>,
) -> Result<VerificationResult> {
    let mut engine = Engine::open_to_read(source, Some(target), options, pool, progress)?;
    let verified = engine.verify().await;
    engine.close().await;
    verified
}

/// Reads `source`, or the one range that the options select, and returns the digests of its units,
/// see [`Engine::manifest`]. Call it on a worker.
///
/// # Errors
/// Those of [`Engine::manifest`].
pub async fn manifest(
    source: &Stack,
    like: Option<&Manifest>,
    options: &EngineOptions,
    pool: &Pool,
    progress: &Arc<CopyProgress>,
) -> Result<Manifest> {
    let mut engine = Engine::open_to_read(source, None, options, pool, progress)?;
    let manifest = engine.manifest(like).await;
    engine.close().await;
    manifest
}

/// Drops the page cache of these ranges of a target, as far as it lends its file. Most file systems
/// mark pages that could not be written back as clean, and reads would return them from memory.
pub(crate) async fn drop_cached(target: &Stack, ranges: &[(u64, u64)]) {
    let device = target.device();
    let mut lent = Vec::new();
    for &(mut at, end) in ranges {
        while at < end
            && let Some(piece) = device.file_at(at, end - at, LeaseAccess::Read)
        {
            at += piece.len;
            lent.push(piece);
        }
    }
    let dropped = blockhaul_io::offload(move || {
        lent.into_iter().try_for_each(|FileRange { file, at, len, .. }| {
            fadvise(&file, at, NonZero::new(len), Advice::DontNeed)
        })
    });
    match dropped.await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => log::debug!("the page cache is not dropped before verification: {error}"),
        Err(lost) => log::debug!("the page cache is not dropped before verification: {lost}"),
    }
}
