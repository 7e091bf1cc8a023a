//! Layers: devices over devices.

use std::sync::Arc;

use crate::opening::{Another, Intent, Opening};
use crate::{Args, Param};
use blockhaul_block::{Device, Result};

/// A kind of layer: all that parser, help, manual and commands know about it.
#[derive(Debug)]
pub struct LayerKind {
    /// Its name.
    pub name: &'static str,
    /// One line for the help.
    pub summary: &'static str,
    /// Paragraphs for the manual, in Markdown, apart by empty lines; may be empty.
    pub manual: &'static str,
    /// Lines for a shell which show its use, for help and manual; may be empty. They can be pasted as they
    /// are in an empty folder, come to an end and succeed; of 92 columns at most.
    pub example: &'static str,
    /// Whether it shows a part or a form of what is there already. Then a copy through it does not
    /// empty the file below first, nor make it as large as the source.
    pub needs_content: bool,
    /// Whether changes that clients make reach the device below. Storage below a layer that changes nothing
    /// there is opened to be read.
    pub writes_below: bool,
    /// Whether clients see the same bytes and the same size with it and without it. Then it can be added and
    /// removed while they are connected.
    pub transparent: bool,
    /// Its options.
    pub params: &'static [Param],
    /// Those of its options that can be changed while requests pass ([`Layer::change`]).
    pub changeable: &'static [&'static str],
    /// Makes a layer with these options. Handles that it wraps share what the layer keeps (a rate).
    pub configure: fn(&Args) -> Result<Arc<dyn Layer>>,
}

/// A layer with its options.
pub trait Layer: Send + Sync {
    /// Puts the layer over a device.
    fn wrap(&self, inner: Arc<dyn Device>) -> Result<Arc<dyn Device>>;

    /// Puts the layer over a device for a stack; runs on a worker. For layers that must look at the
    /// device first, or may open it again.
    fn open(self: Arc<Self>, below: Below) -> Opening<Arc<dyn Device>> {
        Box::pin(std::future::ready(self.wrap(below.device)))
    }

    /// Whether it keeps writes that a flush does not carry to the device below. Such a layer cannot be removed
    /// while clients use it.
    fn keeps_writes(&self) -> bool {
        false
    }

    /// Takes new values for options that [`LayerKind::changeable`] names, for requests that come and those
    /// that wait in the layer; `args` has all options. An error changes nothing.
    fn change(&self, args: &Args) -> Result<()> {
        let _ = args;
        Ok(())
    }
}

/// What a layer in a stack is put over.
pub struct Below {
    /// The device.
    pub device: Arc<dyn Device>,
    /// What the device was opened for. A layer that needs a device of its own opens it for the same.
    pub intent: Intent,
    /// Opens the device again, with the layers that it has; none where there is nothing to open.
    pub reopen: Option<Arc<dyn Another>>,
    /// For a device that was opened for one client: the name that the client asked for. `None`: all
    /// handles that the layer is put over are on the same storage.
    pub export: Option<String>,
}

impl Below {
    /// A device that cannot be opened again, to be read and written.
    pub fn alone(device: Arc<dyn Device>) -> Below {
        Below { device, intent: Intent::WRITE, reopen: None, export: None }
    }
}
