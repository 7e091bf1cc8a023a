//! The request of a copy: plain data.

use std::sync::Arc;

use blockhaul_catalog::{DeviceSpec, Stack};
use blockhaul_engine::{CopyProgress, RateLimit};

use crate::error::Result;
use crate::options::{OptionConflict, TransferOptions};

/// A side of a copy.
#[derive(Clone)]
pub enum Endpoint {
    /// A device that is opened by its description. [`DeviceSpec::Pipe`] is standard input or output.
    Device(DeviceSpec),
    /// An open device, and the description that names it in messages and in the journal. As a target it
    /// is neither created nor emptied.
    Open(DeviceSpec, Stack),
}

impl Endpoint {
    /// The description of the device.
    pub fn spec(&self) -> &DeviceSpec {
        match self {
            Endpoint::Device(spec) | Endpoint::Open(spec, _) => spec,
        }
    }
}

/// A copy of one disk, or of parts of it.
pub struct CopyRequest {
    /// The side that is read.
    pub source: Endpoint,
    /// The side that is written.
    pub target: Endpoint,
    /// How to copy.
    pub options: TransferOptions,
    /// A limit that several copies share, in place of that of the options.
    pub rate: Option<Arc<RateLimit>>,
    /// The counters.
    pub progress: Arc<CopyProgress>,
}

impl CopyRequest {
    /// A copy of all of `source` with default options.
    pub fn new(source: Endpoint, target: Endpoint) -> CopyRequest {
        let options = TransferOptions::default();
        CopyRequest { source, target, options, rate: None, progress: Arc::default() }
    }

    /// Refuses fields that do not go together. Opens nothing.
    ///
    /// # Errors
    /// The names of two such fields.
    pub fn check(&self) -> Result<(), OptionConflict> {
        self.options.check_with(self.source.spec(), self.target.spec())
    }

    /// Whether the same copy can also leave out what cannot be read, and does not yet.
    pub fn can_skip(&self) -> bool {
        self.options.can_skip(self.source.spec(), self.target.spec())
    }
}
