//! `allocation-depth`: the metadata context of QEMU that counts images, for a disk that is one.

use std::sync::Arc;

use blockhaul_block::{
    BASE_ALLOCATION, Can, ContextSet, Device, Extents, Facts, FileRange, LeaseAccess, Op, Outcome,
    PendingRequest, Reply, Request,
};
use blockhaul_catalog::{Layer, LayerKind, ParamValues};

use crate::declared::layer;

/// The context that it adds.
const NAME: &str = "qemu:allocation-depth";
/// The state of what the top image has itself.
const TOP: u64 = 1;

/// The layer `allocation-depth`.
pub static ALLOCATION_DEPTH: LayerKind = LayerKind {
    name: "allocation-depth",
    summary: "adds the metadata context qemu:allocation-depth, with depth 1 for all of the disk",
    manual: "Clients of QEMU ask in this context which image of a chain has a range. A raw disk is not a \
part of a chain: it has everything itself, at depth 1, holes too. A qcow2 image has the context \
already, and the layer changes nothing there.",
    example: r#"
blockhaul serve --layer allocation-depth sample:1M \
  --run 'blockhaul map --context qemu:allocation-depth "$uri"'
"#,
    needs_content: false,
    writes_below: true,
    transparent: true,
    params: &[],
    changeable: &[],
    configure: |args| configure(args),
};

fn configure(_: &ParamValues) -> blockhaul_block::Result<Arc<dyn Layer>> {
    layer(|inner| {
        // All requests but those for the new context pass unchanged.
        let mut facts = Facts::same(&inner.facts());
        if !facts.can.contains(Can::EXTENTS) {
            facts.contexts.clear();
        }
        if facts.contexts.is_empty() {
            facts.contexts.push(BASE_ALLOCATION.to_string());
        }
        let index = facts.contexts.len();
        if facts.context(NAME).is_some() || index >= ContextSet::MAX {
            return Ok(inner);
        }
        facts.contexts.push(NAME.to_string());
        facts.can |= Can::EXTENTS;
        facts.emulated -= Can::EXTENTS;
        let asks = inner.facts().can.contains(Can::EXTENTS);
        Ok(Arc::new(DepthDevice { inner, facts: Arc::new(facts), index, asks }))
    })
}

struct DepthDevice {
    inner: Arc<dyn Device>,
    facts: Arc<Facts>,
    /// The index of the new context: the last one.
    index: usize,
    /// Whether the device below has extents.
    asks: bool,
}

impl Device for DepthDevice {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, mut request: Request) -> PendingRequest {
        let Op::Extents(contexts) = request.op else { return self.inner.submit(request) };
        let len = request.len;
        let others: ContextSet = contexts
            .iter()
            .filter(|index| *index != self.index)
            .fold(ContextSet::empty(), ContextSet::with);
        if !self.asks || others.is_empty() {
            // What is below has data, for all that is known.
            let state = |index| if index == self.index { TOP } else { 0 };
            let lists = contexts.iter().map(|index| Extents::one(len, state(index))).collect();
            return PendingRequest::ready(Ok(Reply::Extents(lists)));
        }
        request.op = Op::Extents(others);
        let pending = self.inner.submit(request);
        if others == contexts {
            return pending;
        }
        match pending.now() {
            Ok(outcome) => PendingRequest::ready(with_depth(outcome, len)),
            Err(pending) => {
                PendingRequest::under_way(async move { with_depth(pending.await, len) })
            }
        }
    }

    fn file_at(&self, at: u64, len: u64, access: LeaseAccess) -> Option<FileRange> {
        self.inner.file_at(at, len, access)
    }
}

/// The reply with the list of the last context.
fn with_depth(outcome: Outcome, len: u64) -> Outcome {
    let mut reply = outcome?;
    if let Reply::Extents(lists) = &mut reply {
        lists.push(Extents::one(len, TOP));
    }
    Ok(reply)
}
