//! Copies one device to another: an engine that runs one plan.

use std::sync::Arc;

use blockhaul_catalog::Stack;
use blockhaul_io::Pool;

use crate::engine::Engine;
use crate::error::Result;
use crate::options::{CopySummary, EngineOptions};
use crate::progress::CopyProgress;

/// Copies all of `source` to the start of `target`, which must be at least as large. Call it on a
/// worker; lanes are spread over all workers.
///
/// # Errors
/// The first error that retries did not resolve;
/// [`Kind::ShuttingDown`](blockhaul_block::Kind::ShuttingDown) after a cancel.
pub async fn copy(
    source: &Stack,
    target: &Stack,
    options: &EngineOptions,
    pool: &Pool,
    progress: &Arc<CopyProgress>,
) -> Result<CopySummary> {
    let engine = Engine::open(source, target, options, pool, progress).await?;
    let plan = engine.plan();
    engine.run_last(&plan).await
}
