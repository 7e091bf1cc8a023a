//! A device with changed facts: the fence refuses what they do not announce, or it is emulated.

use std::sync::Arc;

use blockhaul_block::{Access, Device, Facts, FileRange, Pending, Request};

/// The device with other facts.
pub fn masked(inner: Arc<dyn Device>, change: impl FnOnce(&mut Facts)) -> Arc<dyn Device> {
    let mut facts = Facts::same(&inner.facts());
    change(&mut facts);
    facts.emulated &= facts.can;
    facts.withheld &= facts.can;
    Arc::new(Masked { inner, facts: Arc::new(facts) })
}

struct Masked {
    inner: Arc<dyn Device>,
    facts: Arc<Facts>,
}

impl Device for Masked {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> Pending {
        self.inner.submit(request)
    }

    fn file_at(&self, at: u64, len: u64, access: Access) -> Option<FileRange> {
        self.inner.file_at(at, len, access)
    }
}
