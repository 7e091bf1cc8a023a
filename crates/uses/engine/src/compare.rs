//! Comparing two devices: what both call zero is not read.

use std::sync::Arc;

use blockhaul_block::Result;
use blockhaul_catalog::Stack;
use blockhaul_io::Pool;

use crate::options::Options;
use crate::progress::Progress;
use crate::selection::Selection;
use crate::verify::Reading;

/// What a comparison found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Comparison {
    /// Offset of the first byte that differs; `None`: all are the same. What one device has beyond
    /// the end of the other counts as the same when it is zero.
    pub differs_at: Option<u64>,
    /// Size of each, in bytes.
    pub sizes: (u64, u64),
}

/// Compares two devices over several connections. An error of a question for extents or of a read
/// tells so by [`blockhaul_block::Error::request`]. Call it on a worker.
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
