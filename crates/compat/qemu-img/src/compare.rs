//! `qemu-img compare`.

use std::sync::Arc;
use std::time::Duration;

use blockhaul_block::{Error, OpKind};
use blockhaul_catalog::{DeviceSpec, Intent, Registry, Stack};
use blockhaul_command_lines::qemu_img::QemuImgCommand;
use blockhaul_engine::{ComparisonResult, CopyProgress, EngineOptions};
use blockhaul_io::Pool;

use crate::error::{QemuImgError, QemuImgErrorKind, QemuImgStatus, Result, failure};
use crate::progress::{COARSE, ProgressLines};
use crate::tool::{QemuImg, workers};

/// The unit in bytes in which the original compares.
const SECTOR: u64 = 512;
/// Connections to each image, and how often each repeats a request.
const CONNECTIONS: usize = 4;
const RETRIES: u32 = 5;
/// Time without a byte after which a connection is dropped.
const TIMEOUT: Duration = Duration::from_secs(60);

impl QemuImg {
    /// Runs `compare`.
    pub(crate) fn compare(&self, line: &QemuImgCommand) -> Result<QemuImgStatus> {
        line.at_most(2)?;
        if line.operands.len() < 2 {
            return Err(failure("compare: Expecting two image file names"));
        }
        let disks = self.compared_disks(line).map_err(not_compared)?;
        let shown = ProgressLines::begin(self.output(), line, COARSE);
        let progress = Arc::default();
        shown.watch(&progress, None);
        let outcome = self
            .compare_disks(disks, line.has("strict"), progress)
            .and_then(|found| self.tell_differences(line, &found));
        shown.leave();
        outcome
    }

    /// The disks in both images.
    fn compared_disks(&self, line: &QemuImgCommand) -> Result<[DeviceSpec; 2]> {
        Ok([self.compared_disk(line, 0, "format")?, self.compared_disk(line, 1, "b-format")?])
    }

    /// The disk in the image that an operand names, in the format of this option.
    fn compared_disk(
        &self,
        line: &QemuImgCommand,
        number: usize,
        format: &str,
    ) -> Result<DeviceSpec> {
        let image = line.image(number, format)?;
        Ok(DeviceSpec::parse(self.read_disk(&image, |_| Ok(Vec::new()))?.as_ref())?)
    }

    /// Compares two disks, with these counters. With `strict`, disks of different sizes are not read.
    fn compare_disks(
        &self,
        disks: [DeviceSpec; 2],
        strict: bool,
        progress: Arc<CopyProgress>,
    ) -> Result<ComparisonResult> {
        let registry = self.registry(TIMEOUT, &[]);
        for disk in &disks {
            let target = registry.target(disk, Intent::READ);
            target.map_err(|error| not_compared(error.into()))?;
        }
        let runtime = workers(0).map_err(not_compared)?;
        let options = EngineOptions {
            connections: CONNECTIONS,
            retries: RETRIES,
            ..EngineOptions::default()
        };
        let (result, open) = runtime.block_on(move || async move {
            let stacks = match open(&registry, disks).await {
                Ok(stacks) => stacks,
                Err(failure) => return (Err(failure), None),
            };
            let sizes = (stacks[0].device().facts().size, stacks[1].device().facts().size);
            if strict && sizes.0 != sizes.1 {
                return (Ok(ComparisonResult { differs_at: None, sizes }), Some(stacks));
            }
            let pool = Pool::new(options.memory());
            let [one, other] = &stacks;
            let compared = blockhaul_engine::compare(one, other, &options, &pool, &progress).await;
            (compared.map_err(|error| not_read(error.into())), Some(stacks))
        });
        // Not on a worker: this waits for servers to end.
        drop(open);
        result
    }

    /// Prints what a comparison has found.
    fn tell_differences(
        &self,
        line: &QemuImgCommand,
        found: &ComparisonResult,
    ) -> Result<QemuImgStatus> {
        let mut text = String::new();
        if found.sizes.0 != found.sizes.1 {
            if line.has("strict") {
                self.say(line, "Strict mode: Image size mismatch!\n")?;
                return Ok(QemuImgStatus::Different);
            }
            // A difference where both have something is reported alone.
            let common = found.sizes.0.min(found.sizes.1);
            if found.differs_at.is_none_or(|at| at >= common) {
                text += "Warning: Image size mismatch!\n";
            }
        }
        if let Some(at) = found.differs_at {
            let at = at / SECTOR * SECTOR;
            self.say(line, &format!("{text}Content mismatch at offset {at}!\n"))?;
            return Ok(QemuImgStatus::Different);
        }
        self.say(line, &format!("{text}Images are identical.\n"))
    }
}

async fn open(registry: &Registry, [one, other]: [DeviceSpec; 2]) -> Result<[Stack; 2]> {
    let open = async |disk: DeviceSpec| {
        let opened = registry.open(&disk, Vec::new(), Intent::READ).await;
        let failed = |error: Error| QemuImgError::opening("device", &disk.to_string(), &error);
        opened.map_err(|error| not_compared(failed(error)))
    };
    Ok([open(one).await?, open(other).await?])
}

/// The error of a comparison that has read nothing.
fn not_compared(error: QemuImgError) -> QemuImgError {
    error.with_kind(QemuImgErrorKind::CompareOpen)
}

fn not_read(error: Error) -> QemuImgError {
    let kind = match error.request() {
        Some((OpKind::Extents, ..)) => QemuImgErrorKind::CompareExtents,
        _ => QemuImgErrorKind::CompareData,
    };
    QemuImgError::from(error).with_kind(kind)
}
