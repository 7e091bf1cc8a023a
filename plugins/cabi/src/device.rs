//! A plugin's handle as a device: requests become calls on the handle's lane.

use std::sync::Arc;

use block::{Device, Error, Facts, Kind, Pending, Request};

use crate::handle::Handle;

/// A device over a handle.
pub(crate) struct PluginDevice {
    handle: Arc<Handle>,
}

impl PluginDevice {
    /// The device of a handle: asynchronous where the plugin is.
    pub(crate) fn over(handle: Arc<Handle>) -> Arc<dyn Device> {
        Arc::new(PluginDevice { handle })
    }
}

impl Device for PluginDevice {
    fn facts(&self) -> Arc<Facts> {
        self.handle.facts.clone()
    }

    fn submit(&self, request: Request) -> Pending {
        let (kind, at, len) = (request.kind(), request.at, request.len);
        let (completer, pending) = Pending::completer();
        let handle = self.handle.clone();
        let lane = handle.connection.lane.clone();
        lane.run(move || {
            let outcome = handle.perform(request);
            // Before the answer: whoever hears it may look whether the handle is still open.
            drop(handle);
            completer.complete(outcome);
        });
        let plugin = &self.handle.connection.plugin;
        let Some(limit) = plugin.host.timeout else { return pending };
        let plugin = plugin.clone();
        Pending::start(async move {
            match io::timeout(limit, pending).await {
                Ok(outcome) => outcome,
                Err(io::Elapsed) => {
                    let name = &plugin.name;
                    log::error!(
                        "plugin {name}: {kind} of {len} bytes at offset {at} has not returned for \
                         {} s; its buffer stays lent",
                        limit.as_secs_f32()
                    );
                    let text = format!("plugin {name} does not answer");
                    Err(Error::new(Kind::TimedOut, text))
                }
            }
        })
    }
}
