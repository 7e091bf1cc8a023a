//! `null:[SIZE]`: discards every write; reads as zeroes.

use std::sync::Arc;

use blockhaul_block::{
    BASE_ALLOCATION, Can, Device, Extents, Facts, HOLE, Op, PendingRequest, Reply, Request, ZERO,
};
use blockhaul_catalog::{Backend, BackendTarget, OpenFuture, OpenedDevice};

use crate::support::operand;

/// The backend `null:[SIZE]`.
pub struct NullBackend;

impl Backend for NullBackend {
    fn schemes(&self) -> &'static [&'static str] {
        &["null"]
    }

    fn operand(&self) -> &'static str {
        "[SIZE]"
    }

    fn summary(&self) -> &'static str {
        "discards what is written and reads as zeroes; as a copy target, it has the size of the source"
    }

    fn example(&self) -> &'static str {
        r#"
blockhaul copy sample:1G null:
"#
    }

    fn open(&self, target: BackendTarget) -> OpenFuture<OpenedDevice> {
        let device = operand::optional_size(&target).map(|size| {
            let size = size.or(target.intent.target_size).unwrap_or(0);
            let facts = Facts {
                can: Can::all(),
                zeroed: true,
                temporary: true,
                takes_parked: true,
                allocation_unit: 1,
                contexts: vec![BASE_ALLOCATION.to_string()],
                ..Facts::new(operand::name(&target), size)
            };
            OpenedDevice::from(
                Arc::new(EmptyDevice { facts: Arc::new(facts), runs: 0 }) as Arc<dyn Device>
            )
        });
        Box::pin(std::future::ready(device))
    }
}

/// A device without contents: also used for `zero:`, without the abilities to change.
pub(crate) struct EmptyDevice {
    pub(crate) facts: Arc<Facts>,
    /// Length of alternating extents; 0: it is one hole.
    pub(crate) runs: u64,
}

/// Maximum number of runs in one extents reply.
const RUNS_MAX: usize = 64 << 10;

impl EmptyDevice {
    fn extents(&self, mut at: u64, mut left: u64) -> Extents {
        if self.runs == 0 {
            return Extents::one(left, HOLE | ZERO);
        }
        let mut list = Extents::new();
        while left > 0 && list.len() < RUNS_MAX {
            let len = (self.runs - at % self.runs).min(left);
            let hole = (at / self.runs).is_multiple_of(2);
            list.push(len, if hole { HOLE | ZERO } else { ZERO });
            left -= len;
            // Inside the device.
            at += len;
        }
        list
    }
}

impl Device for EmptyDevice {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        PendingRequest::ready(Ok(match request.op {
            Op::Read(_) => Reply::Hole,
            Op::Extents(contexts) => Reply::Extents(
                contexts.iter().map(|_| self.extents(request.at, request.len)).collect(),
            ),
            _ => Reply::Done,
        }))
    }
}
