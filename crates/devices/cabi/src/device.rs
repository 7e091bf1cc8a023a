//! A plugin's handle as a device: requests become calls on the handle's lane.

use std::sync::Arc;

use blockhaul_block::{Device, Facts, PendingRequest, Request};

use crate::asynchronous::AsyncDevice;
use crate::handle::PluginHandle;

/// A device over a handle.
pub(crate) struct PluginDevice {
    handle: Arc<PluginHandle>,
}

impl PluginDevice {
    /// The device of a handle: asynchronous if the plugin is.
    pub(crate) fn over(handle: Arc<PluginHandle>) -> Arc<dyn Device> {
        match handle.connection.plugin.asynchronous {
            Some(asynchronous) => AsyncDevice::over(handle, asynchronous),
            None => Arc::new(PluginDevice { handle }),
        }
    }
}

impl Device for PluginDevice {
    fn facts(&self) -> Arc<Facts> {
        self.handle.facts.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        self.handle.submit(request)
    }
}
