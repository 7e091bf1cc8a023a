//! A disk under the name that the user gave. Its own name is that of the image in the archive, and says neither that it
//! is in one nor which disk it is.

use std::sync::Arc;

use blockhaul_block::{Device, Facts, FileRange, LeaseAccess, PendingRequest, Request};
use blockhaul_catalog::{HandleOpener, OpenFuture, OpenedDevice};

/// The same device with this name; its facts do not change, because an OVA is read-only.
pub(super) fn named(opened: OpenedDevice, name: &str) -> OpenedDevice {
    let name: Arc<str> = name.into();
    let device = NamedDevice::of(opened.device, &name);
    let more = opened.more.map(|more| Arc::new(NamedHandles { more, name }) as Arc<_>);
    OpenedDevice { device, more }
}

struct NamedDevice {
    device: Arc<dyn Device>,
    facts: Arc<Facts>,
}

impl NamedDevice {
    fn of(device: Arc<dyn Device>, name: &Arc<str>) -> Arc<dyn Device> {
        let facts = Arc::new(Facts { name: name.clone(), ..(*device.facts()).clone() });
        Arc::new(NamedDevice { device, facts })
    }
}

impl Device for NamedDevice {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        self.device.submit(request)
    }

    fn file_at(&self, at: u64, len: u64, access: LeaseAccess) -> Option<FileRange> {
        self.device.file_at(at, len, access)
    }
}

/// Further handles of a disk, with its name.
struct NamedHandles {
    more: Arc<dyn HandleOpener>,
    name: Arc<str>,
}

impl HandleOpener for NamedHandles {
    fn another(&self) -> OpenFuture<Arc<dyn Device>> {
        let (more, name) = (self.more.clone(), self.name.clone());
        Box::pin(async move { Ok(NamedDevice::of(more.another().await?, &name)) })
    }
}
