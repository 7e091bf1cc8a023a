//! A device with changed facts: the fence refuses what they do not announce, or it is emulated.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use blockhaul_block::{Device, Facts, FileRange, LeaseAccess, PendingRequest, Request};

/// The device with other facts.
pub fn masked(inner: Arc<dyn Device>, change: impl FnOnce(&mut Facts)) -> Arc<dyn Device> {
    let mut facts = Facts::same(&inner.facts());
    change(&mut facts);
    facts.emulated &= facts.can;
    facts.withheld &= facts.can;
    Arc::new(MaskedDevice { inner, facts: Arc::new(facts) })
}

/// The size of a device without a partial block at the end. Warns of what `layer` hides, once.
pub fn whole_size(facts: &Facts, block: u32, layer: &str, warned: &AtomicBool) -> u64 {
    let hidden = facts.size % u64::from(block.max(1));
    if hidden > 0 && !warned.swap(true, Ordering::Relaxed) {
        let name = &facts.name;
        log::warn!(
            "{layer}: the last {hidden} bytes of {name} are not accessible: its size is not a multiple of {block}"
        );
    }
    facts.size - hidden
}

struct MaskedDevice {
    inner: Arc<dyn Device>,
    facts: Arc<Facts>,
}

impl Device for MaskedDevice {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        self.inner.submit(request)
    }

    fn file_at(&self, at: u64, len: u64, access: LeaseAccess) -> Option<FileRange> {
        self.inner.file_at(at, len, access)
    }
}
