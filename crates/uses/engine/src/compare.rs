//! Compares two devices; ranges that both report as zero are not read.

use std::sync::Arc;

use blockhaul_catalog::Stack;
use blockhaul_io::Pool;

use crate::engine::Engine;
use crate::error::{CopyError, Result};
use crate::options::EngineOptions;
use crate::progress::CopyProgress;
use crate::side::Side;

/// The result of a comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ComparisonResult {
    /// Offset of the first difference; `None`: the contents are equal. Bytes of the longer device
    /// beyond the end of the shorter one count as equal if they are zero.
    pub differs_at: Option<u64>,
    /// Size of each device, in bytes.
    pub sizes: (u64, u64),
}

/// Compares all of two devices over several connections, see [`Engine::compare`]. Call it on a
/// worker.
///
/// # Errors
/// Those of [`Engine::compare`].
pub async fn compare(
    one: &Stack,
    other: &Stack,
    options: &EngineOptions,
    pool: &Pool,
    progress: &Arc<CopyProgress>,
) -> Result<ComparisonResult> {
    let sizes = (one.device().facts().size, other.device().facts().size);
    let (longer, shorter) = if sizes.0 >= sizes.1 { (one, other) } else { (other, one) };
    let mut engine = Engine::open_to_read(longer, Some(shorter), options, pool, progress)?;
    let differs_at = engine.compare().await;
    engine.close().await;
    let differs_at = differs_at.map_err(|CopyError { side, error }| CopyError {
        side: if sizes.0 >= sizes.1 { side } else { side.map(Side::other) },
        error,
    })?;
    Ok(ComparisonResult { differs_at, sizes })
}
