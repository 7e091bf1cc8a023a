//! Compares two devices; ranges that both report as zero are not read.

use std::sync::Arc;

use blockhaul_block::Result;
use blockhaul_catalog::Stack;
use blockhaul_io::Pool;

use crate::options::Options;
use crate::progress::Progress;
use crate::selection::Selection;
use crate::verify::Reading;

/// The result of a comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Comparison {
    /// Offset of the first difference; `None`: the contents are equal. Bytes of the longer device
    /// beyond the end of the shorter one count as equal if they are zero.
    pub differs_at: Option<u64>,
    /// Size of each device, in bytes.
    pub sizes: (u64, u64),
}

/// Compares two devices over several connections. An error of an extents request or a read names
/// the request ([`blockhaul_block::Error::request`]). Call it on a worker.
pub async fn compare(
    one: &Stack,
    other: &Stack,
    options: &Options,
    pool: &Pool,
    progress: &Arc<Progress>,
) -> Result<Comparison> {
    let sizes = (one.device().facts().size, other.device().facts().size);
    let size = sizes.0.max(sizes.1);
    progress.set_total(size);
    let (longer, shorter) = if sizes.0 >= sizes.1 { (one, other) } else { (other, one) };
    let selection = Selection::all(size);
    let reading =
        Reading { source: longer, target: Some(shorter), unit: None, strict: true, selection };
    let (_, differs_at) = reading.walk(options, pool, progress).await?;
    Ok(Comparison { differs_at, sizes })
}
