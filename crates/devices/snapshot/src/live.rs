//! The layer over the live disk.

use std::sync::Arc;

use blockhaul_block::{Device, Error, Facts, Kind, Op, PendingRequest, Request, Result};
use blockhaul_catalog::Layer;

use crate::point::{LiveHandle, PointState};

/// Puts the point in time over handles of the disk.
pub(crate) struct LiveLayer(pub(crate) Arc<PointState>);

impl Layer for LiveLayer {
    fn wrap(&self, inner: Arc<dyn Device>) -> Result<Arc<dyn Device>> {
        let facts = inner.facts();
        if facts.size != self.0.size {
            let text = format!("the snapshot is of a disk of {} bytes", self.0.size);
            return Err(Error::new(Kind::Usage, text).on(&facts.name));
        }
        self.0.below.get_or_init(|| LiveHandle::new(inner.clone()));
        let facts = Arc::new(Facts::same(&facts));
        let below = Arc::new(LiveHandle::new(inner));
        Ok(Arc::new(LiveDevice { facts, point: self.0.clone(), below }))
    }
}

/// A handle of the live disk.
struct LiveDevice {
    facts: Arc<Facts>,
    point: Arc<PointState>,
    below: Arc<LiveHandle>,
}

impl Device for LiveDevice {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        let end = request.end().unwrap_or(u64::MAX);
        let changes = matches!(request.op, Op::Write(_) | Op::Zero | Op::Trim);
        if !changes || !self.point.must_save(request.at, end) {
            return self.below.device.submit(request);
        }
        let point = self.point.clone();
        let below = self.below.clone();
        PendingRequest::start(async move {
            point.before_write(&below, request.at, end).await?;
            below.device.submit(request).await
        })
    }
}
