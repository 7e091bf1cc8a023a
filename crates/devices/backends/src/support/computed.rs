//! Read-only devices whose bytes are computed.

use std::sync::Arc;

use blockhaul_block::{
    BASE_ALLOCATION, Can, Device, Error, Extents, Facts, Kind, Op, PendingRequest, Reply, Request,
};
use blockhaul_catalog::{BackendTarget, OpenedDevice};

use super::{fill, operand};

/// A read-only device of data whose bytes are computed: `fill(offset, piece)`.
pub fn computed(
    target: &BackendTarget,
    size: u64,
    fill: impl Fn(u64, &mut [u8]) + Clone + Send + Sync + 'static,
) -> OpenedDevice {
    let facts = Facts {
        can: Can::CACHE | Can::EXTENTS | Can::FLUSH | Can::MULTI_CONN,
        contexts: vec![BASE_ALLOCATION.to_string()],
        ..Facts::new(operand::name(target), size)
    };
    OpenedDevice::from(Arc::new(ComputedDevice { facts: Arc::new(facts), fill }) as Arc<dyn Device>)
}

struct ComputedDevice<F> {
    facts: Arc<Facts>,
    fill: F,
}

impl<F: Fn(u64, &mut [u8]) + Clone + Send + Sync + 'static> Device for ComputedDevice<F> {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        match request.op {
            Op::Read(room) => fill::read(request.at, room, self.fill.clone()),
            Op::Extents(contexts) => {
                let lists = contexts.iter().map(|_| Extents::one(request.len, 0)).collect();
                PendingRequest::ready(Ok(Reply::Extents(lists)))
            }
            Op::Write(_) | Op::Zero | Op::Trim => {
                Error::new(Kind::ReadOnly, "this device is generated and cannot be written").into()
            }
            Op::Flush | Op::Cache => PendingRequest::ready(Ok(Reply::Done)),
        }
    }
}
