//! What is checked.

use std::any::Any;
use std::sync::Arc;

use blockhaul_block::Device;
use blockhaul_catalog::{HandleOpener, OpenedDevice, Stack};

use crate::fault::FaultDevice;
use crate::model::ModelDevice;

/// A device to be checked, with further access for the suite.
pub struct Subject {
    pub(super) device: Arc<dyn Device>,
    pub(super) stack: Option<Stack>,
    pub(super) more: Option<Arc<dyn HandleOpener>>,
    pub(super) durable: Option<Box<dyn Fn() -> Vec<u8>>>,
    pub(super) below: Option<Arc<FaultDevice>>,
    pub(super) model: Option<Arc<ModelDevice>>,
    keep: Vec<Box<dyn Any>>,
}

impl Subject {
    /// A device alone.
    pub fn new(device: Arc<dyn Device>) -> Subject {
        Subject {
            device,
            stack: None,
            more: None,
            durable: None,
            below: None,
            model: None,
            keep: Vec::new(),
        }
    }

    /// With access to the bytes that would be left after a power cut, so that flush and FUA can be
    /// checked.
    #[must_use]
    pub fn durable(mut self, durable: impl Fn() -> Vec<u8> + 'static) -> Subject {
        self.durable = Some(Box::new(durable));
        self
    }

    /// With the device that this one is a layer over, so that its flushes can be made to fail.
    #[must_use]
    pub fn below(mut self, below: Arc<FaultDevice>) -> Subject {
        self.below = Some(below);
        self
    }

    /// With the model that this one is a layer over, so that the suite sees the requests that
    /// arrive there.
    #[must_use]
    pub fn over(mut self, model: Arc<ModelDevice>) -> Subject {
        self.model = Some(model);
        self
    }

    /// With something that must live as long as the device: a directory, a server.
    #[must_use]
    pub fn keep(mut self, thing: impl Any) -> Subject {
        self.keep.push(Box::new(thing));
        self
    }
}

impl From<Arc<dyn Device>> for Subject {
    fn from(device: Arc<dyn Device>) -> Subject {
        Subject::new(device)
    }
}

impl From<OpenedDevice> for Subject {
    fn from(opened: OpenedDevice) -> Subject {
        Subject { more: opened.more, ..Subject::new(opened.device) }
    }
}

impl From<Stack> for Subject {
    fn from(stack: Stack) -> Subject {
        Subject { stack: Some(stack.clone()), ..Subject::new(stack.device().clone()) }
    }
}
