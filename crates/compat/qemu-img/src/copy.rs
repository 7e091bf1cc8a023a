//! Copies of disks, for `convert` and `dd`, and new disks.

use blockhaul_catalog::DeviceSpec;
use blockhaul_io::Pool;
use blockhaul_transfer::{CopyControl, CopyRequest, CopySetup, TransferError, one_line};

use crate::error::{QemuImgError, QemuImgErrorKind, Result};
use crate::tool::{QemuImg, workers};

/// The state of the target of a copy before the copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CopyTarget {
    /// The target is created, or emptied.
    New,
    /// The target exists, and is written in place.
    Existing,
}

impl QemuImg {
    /// Runs a copy.
    pub(crate) fn copy(&self, request: CopyRequest, target: CopyTarget) -> Result<()> {
        request.check().map_err(TransferError::from)?;
        if request.options.no_zero_copy {
            blockhaul_io::disable_parking();
        }
        let registry = self.registry(request.options.timeout, &[]);
        let mut setup = CopySetup::new(request, registry)?;
        if target == CopyTarget::Existing {
            setup.keep_target();
        }
        let control = setup.control();
        self.announce(&control)?;
        let runtime = workers(0)?;
        let pool = Pool::new(setup.memory());
        let result = runtime.block_on(move || async move { setup.open().await?.run(pool).await });
        let report = result.map_err(|error| stopped(&control, error))?;
        for warning in &report.warnings {
            self.tell(&format!("blockhaul: copy: warning: {}\n", one_line(warning)));
        }
        Ok(())
    }

    /// Creates a disk of `size` bytes, in place of one that exists.
    pub(crate) fn create_disk(&self, description: &str, size: u64) -> Result<()> {
        let spec = DeviceSpec::parse(description.as_ref())?;
        let result =
            self.on_worker(move |registry| async move { registry.create(&spec, size).await })?;
        result.map_err(|error| QemuImgError::opening("target", description, &error))
    }
}

fn stopped(control: &CopyControl, error: TransferError) -> QemuImgError {
    if control.progress().is_cancelled() {
        let text = format!("stopped by a signal{}", control.target_state());
        return QemuImgError::new(QemuImgErrorKind::Cancelled, text);
    }
    error.into()
}
