//! A plugin's handle as a device: requests become calls on the handle's lane.

use std::sync::Arc;

use blockhaul_block::{Device, Facts, Pending, Request};

use crate::asynchronous::AsyncDevice;
use crate::handle::Handle;
use crate::overdue::Overdue;

/// A device over a handle.
pub(crate) struct PluginDevice {
    handle: Arc<Handle>,
}

impl PluginDevice {
    /// The device of a handle: asynchronous where the plugin is.
    pub(crate) fn over(handle: Arc<Handle>) -> Arc<dyn Device> {
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

    fn submit(&self, request: Request) -> Pending {
        on_lane(&self.handle, request)
    }
}

/// Has a request done by the plugin's blocking callbacks.
pub(crate) fn on_lane(handle: &Arc<Handle>, request: Request) -> Pending {
    let (kind, at, len) = (request.kind(), request.at, request.len);
    let (completer, pending) = Pending::completer();
    let (plugin, lane) = (handle.connection.plugin.clone(), handle.connection.lane.clone());
    let own = handle.clone();
    let overdue = Overdue::of(&plugin);
    let timing = overdue.clone();
    lane.run(move || {
        let outcome = Overdue::during(timing.as_ref(), || own.perform(request));
        // Before the answer: whoever hears it may look whether the handle is still open.
        drop(own);
        completer.complete(outcome);
    });
    let Some(overdue) = overdue else { return pending };
    Pending::start(async move {
        match overdue.wait(pending).await {
            Ok(outcome) => outcome,
            Err(stage) => Err(plugin.no_answer(kind, at, len, stage, overdue.limit)),
        }
    })
}
