//! A disk under the name that the user gave. Its own name is that of the image in the archive, and says neither that it
//! is in one nor which disk it is.

use std::sync::Arc;

use blockhaul_block::Device;
use blockhaul_catalog::{HandleOpener, OpenFuture, OpenedDevice};
use blockhaul_layers::support::masked;

/// The same device with this name.
pub(super) fn named(opened: OpenedDevice, name: &str) -> OpenedDevice {
    let name: Arc<str> = name.into();
    let device = masked(opened.device, |facts| facts.name = name.clone());
    let more = opened.more.map(|more| Arc::new(NamedHandles { more, name }) as Arc<_>);
    OpenedDevice { device, more }
}

/// Further handles of a disk, with its name.
struct NamedHandles {
    more: Arc<dyn HandleOpener>,
    name: Arc<str>,
}

impl HandleOpener for NamedHandles {
    fn another(&self) -> OpenFuture<Arc<dyn Device>> {
        let (more, name) = (self.more.clone(), self.name.clone());
        Box::pin(async move { Ok(masked(more.another().await?, |facts| facts.name = name)) })
    }
}
