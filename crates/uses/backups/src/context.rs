//! The environment of an operation: devices and workers.

use std::sync::Arc;

use blockhaul_catalog::Registry;
use blockhaul_engine::CopyProgress;
use blockhaul_io::{Runtime, RuntimeConfig, plain};

use crate::error::{BackupError, BackupErrorKind, BackupStep, Result};

/// The devices that an operation on stores opens, and the workers that it starts.
#[derive(Clone)]
pub struct BackupContext {
    /// The kinds of devices and layers.
    pub registry: Registry,
    /// The workers, which end with the operation.
    pub workers: RuntimeConfig,
    /// Counts the bytes of files that are checked, merged and digested.
    pub progress: Arc<CopyProgress>,
}

impl BackupContext {
    /// Starts the workers for this step.
    pub(crate) fn start(&self, step: BackupStep) -> Result<Runtime> {
        Runtime::start(&self.workers).map_err(|error| {
            let text = format!("cannot start workers: {}", plain(&error));
            BackupError::new(BackupErrorKind::Other, step, text)
        })
    }
}
