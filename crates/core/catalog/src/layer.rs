//! Layers: devices over devices.

use std::sync::Arc;

use crate::opening::{HandleOpener, Intent, OpenFuture};
use crate::{Param, ParamValues};
use blockhaul_block::{Device, Result};

/// A kind of layer: its declaration for parser, help, manual and commands.
#[derive(Debug)]
pub struct LayerKind {
    /// Its name.
    pub name: &'static str,
    /// One line for the help.
    pub summary: &'static str,
    /// Paragraphs for the manual, in Markdown, separated by empty lines; may be empty.
    pub manual: &'static str,
    /// Shell lines that show its use, for help and manual; may be empty. They must work when pasted
    /// in an empty directory, end and succeed; at most 92 columns.
    pub example: &'static str,
    /// Whether it shows a part or a form of existing contents. A copy through it then does not
    /// first empty the file below, nor resize it to the source's size.
    pub needs_content: bool,
    /// Whether clients' changes reach the device below. Storage below a layer that changes nothing
    /// there is opened read-only.
    pub writes_below: bool,
    /// Whether clients see the same bytes and size with and without it. It can then be added and
    /// removed while they are connected.
    pub transparent: bool,
    /// Its options.
    pub params: &'static [Param],
    /// Its options that can be changed while requests are in flight ([`Layer::change`]).
    pub changeable: &'static [&'static str],
    /// Makes a layer with these options. The handles that it wraps share its state (such as a
    /// rate).
    pub configure: fn(&ParamValues) -> Result<Arc<dyn Layer>>,
}

/// A layer with its options.
pub trait Layer: Send + Sync {
    /// Puts the layer over a device.
    ///
    /// # Errors
    /// If the device lacks what the layer needs, or the options do not fit the device.
    fn wrap(&self, inner: Arc<dyn Device>) -> Result<Arc<dyn Device>>;

    /// Puts the layer over a device for a stack; runs on a worker. For layers that must read the
    /// device first, or may open it again.
    fn open(self: Arc<Self>, below: LayerBase) -> OpenFuture<Arc<dyn Device>> {
        Box::pin(std::future::ready(self.wrap(below.device)))
    }

    /// Whether it holds writes that a flush does not pass to the device below. Such a layer cannot
    /// be removed while clients use it.
    fn keeps_writes(&self) -> bool {
        false
    }

    /// Whether the device below holds the contents in a format, and has to be read as
    /// [`Intent::READ_IMAGE`]: a change of it by others damages them.
    fn reads_image(&self) -> bool {
        false
    }

    /// Sets new values for the [`LayerKind::changeable`] options, for later requests and those
    /// waiting in the layer; `args` has all options. An error changes nothing.
    ///
    /// # Errors
    /// If a value does not fit. Nothing has changed then.
    fn change(&self, args: &ParamValues) -> Result<()> {
        let _ = args;
        Ok(())
    }
}

/// What a layer in a stack is put over.
pub struct LayerBase {
    /// The device.
    pub device: Arc<dyn Device>,
    /// The purpose for which the device was opened; a layer that opens its own device uses the
    /// same.
    pub intent: Intent,
    /// Opens the device again, with its layers; none if it cannot be opened again.
    pub reopen: Option<Arc<dyn HandleOpener>>,
    /// For a device opened for one client: the name that the client requested. `None`: all handles
    /// that the layer is put over use the same storage.
    pub export: Option<String>,
}

impl LayerBase {
    /// A read-write device that cannot be opened again.
    pub fn alone(device: Arc<dyn Device>) -> LayerBase {
        LayerBase { device, intent: Intent::WRITE, reopen: None, export: None }
    }
}
