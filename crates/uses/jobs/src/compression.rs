//! The layer over the target of a job whose data is to be compressed.

use std::sync::Arc;

use blockhaul_block::{
    Compression, Device, Facts, Hints, OpKind, PendingRequest, Request, RequestFlags, Result,
};
use blockhaul_catalog::Layer;

/// The hints that layers of jobs pass on. No parked payloads: a device compresses written data, and a write
/// that is repeated needs it again.
pub(crate) const KEPT_HINTS: Hints = Hints::ZEROED
    .union(Hints::CLAIMS_ROOM)
    .union(Hints::FLUSH_FAILURES_STAY)
    .union(Hints::IN_FLIGHT)
    .union(Hints::EXTENTS);

/// Asks the device for compression with each write.
pub struct CompressingLayer;

impl Layer for CompressingLayer {
    fn wrap(&self, inner: Arc<dyn Device>) -> Result<Arc<dyn Device>> {
        let below = inner.facts();
        let mut facts = Facts::over(&below).keeping(&below, KEPT_HINTS);
        if let Some(unit) = below.compression.unit() {
            facts.compression = Compression::All(unit);
            facts.block.preferred = facts.block.preferred.max(unit).min(facts.block.maximum);
        }
        Ok(Arc::new(CompressingDevice { facts: Arc::new(facts), inner }))
    }
}

struct CompressingDevice {
    facts: Arc<Facts>,
    inner: Arc<dyn Device>,
}

impl Device for CompressingDevice {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        let is_write = request.kind() == OpKind::Write;
        self.inner.submit(if is_write { request.with(RequestFlags::COMPRESS) } else { request })
    }
}
