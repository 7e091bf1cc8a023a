//! Layers: devices over devices.

use std::sync::Arc;

use crate::opening::{Another, Opening};
use crate::{Args, Param};
use blockhaul_block::{Device, Result};

/// A kind of layer.
pub trait LayerKind: Sync {
    /// Its name.
    fn name(&self) -> &'static str;

    /// One line for the help.
    fn summary(&self) -> &'static str;

    /// Paragraphs for the manual, in Markdown, apart by empty lines; may be empty.
    fn manual(&self) -> &'static str {
        ""
    }

    /// Lines for a shell which show its use, for help and manual. They can be pasted as they are in an
    /// empty folder, come to an end and succeed; of 92 columns at most.
    fn example(&self) -> &'static str {
        ""
    }

    /// Its options.
    fn params(&self) -> &'static [Param];

    /// Those of its options that can be changed while requests pass ([`Layer::change`]).
    fn changeable(&self) -> &'static [&'static str] {
        &[]
    }

    /// Whether it shows a part or a form of what is there already. Then a copy through it does not
    /// empty the file below first, nor make it as large as the source.
    fn needs_content(&self) -> bool {
        false
    }

    /// Makes a layer with these options. Handles that it wraps share what the layer keeps (a rate).
    fn configure(&self, args: &Args) -> Result<Arc<dyn Layer>>;
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
    /// Opens the device again, with the layers that it has; none where there is nothing to open.
    pub reopen: Option<Arc<dyn Another>>,
    /// For a device that was opened for one client: the name that the client asked for. `None`: all
    /// handles that the layer is put over are on the same storage.
    pub export: Option<String>,
}
