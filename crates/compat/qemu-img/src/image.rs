//! Operations on images that several commands use.

use std::path::Path;
use std::sync::Arc;

use blockhaul_block::{Device, Error, Kind};
use blockhaul_catalog::{DeviceSpec, Intent, NamePolicy, OpenContext, parse_size};
use blockhaul_command_lines::qemu_image::{QemuFormat, QemuImage};
use blockhaul_command_lines::qemu_img::QemuImgCommand;
use blockhaul_formats::qcow2::backing_change::{
    BackingChange, BackingName, RebaseMode, SnapshotPolicy, rebase,
};

use crate::error::{QemuImgError, QemuImgStatus, Result, failure};
use crate::tool::QemuImg;

impl QemuImg {
    /// Opens a device by its description, and runs `work` with it on a worker.
    pub(crate) fn with_device<T, F>(
        &self,
        description: &str,
        intent: Intent,
        work: F,
    ) -> Result<Result<T, Error>>
    where
        T: Send + 'static,
        F: AsyncFnOnce(Arc<dyn Device>) -> Result<T, Error> + Send + 'static,
    {
        let spec = DeviceSpec::parse(description.as_ref())?;
        let (result, open) = self.on_worker(move |registry| async move {
            match registry.open(&spec, Vec::new(), intent).await {
                Ok(stack) => (work(stack.device().clone()).await, Some(stack)),
                Err(error) => (Err(error), None),
            }
        })?;
        // Not on a worker: this waits for servers to end.
        drop(open);
        Ok(result)
    }

    /// The size of the disk in an image, in bytes.
    pub(crate) fn disk_size(&self, image: &QemuImage) -> Result<u64> {
        let format = self.image_format(image)?;
        let disk = image.disk(format, &[]);
        let found =
            self.with_device(&disk, Intent::READ, async |device| Ok(device.facts().size))?;
        found.map_err(|error| not_opened(image, &error))
    }

    /// Runs `work` on a worker with the description of the device that holds an image. `names`: whether files
    /// that the image names are opened.
    pub(crate) fn with_holder<T, F>(
        &self,
        image: &QemuImage,
        names: NamePolicy,
        work: F,
    ) -> Result<Result<T, Error>>
    where
        T: Send + 'static,
        F: AsyncFnOnce(&OpenContext, &str) -> Result<T, Error> + Send + 'static,
    {
        let holder = image.holder();
        self.on_worker(move |registry| async move {
            work(&OpenContext::new(&registry).with_names(names), &holder).await
        })
    }

    /// Refuses images in other formats than qcow2, which have no such tables.
    pub(crate) fn require_qcow2(&self, line: &QemuImgCommand, image: &QemuImage) -> Result<()> {
        match self.image_format(image)? {
            QemuFormat::Qcow2 => Ok(()),
            other => {
                let text = format!("{}: not supported for format {}", line.command, other.name());
                Err(failure(text))
            }
        }
    }

    /// Prints a text, unless `-q` suppresses it.
    pub(crate) fn say(&self, line: &QemuImgCommand, text: &str) -> Result<QemuImgStatus> {
        if line.has("quiet") { Ok(QemuImgStatus::Success) } else { self.print(text) }
    }

    /// Gives an image another backing file.
    pub(crate) fn give_backing(
        &self,
        image: &QemuImage,
        new: Option<BackingName>,
        how: RebaseMode,
    ) -> Result<()> {
        let result = self.with_holder(image, NamePolicy::Allow, async move |context, holder| {
            let snapshots = SnapshotPolicy::Change;
            rebase(context, holder, new.as_ref(), how, snapshots, &|_, _| ()).await
        })?;
        self.tell_changes(image, result)
    }

    /// Warns of snapshots that have other contents. The original says nothing.
    pub(crate) fn tell_changes(
        &self,
        image: &QemuImage,
        result: blockhaul_block::Result<BackingChange>,
    ) -> Result<()> {
        let BackingChange { snapshots, .. } = result.map_err(|error| not_changed(image, &error))?;
        if snapshots > 0 {
            let shown = &image.shown;
            let text = format!(
                "qemu-img: warning: {shown}: the contents of its internal snapshots ({snapshots}) have changed where \
                 they came from the backing file\n"
            );
            self.tell(&text);
        }
        Ok(())
    }
}

/// An image that cannot be opened.
pub(crate) fn not_opened(image: &QemuImage, error: &Error) -> QemuImgError {
    failure(format!("Could not open '{}': {error}", image.shown))
}

/// The name of a file as an image stores it.
pub(crate) fn stored_name(path: &Path) -> Result<String> {
    let wrong =
        || failure(format!("{}: the name of a file in an image must be UTF-8", path.display()));
    path.to_str().map(str::to_string).ok_or_else(wrong)
}

/// A name in an image, from the directory of this program.
pub(crate) fn beside(image: &QemuImage, name: &str) -> String {
    let has_protocol = name.split_once(':').is_some_and(|(scheme, _)| !scheme.contains('/'));
    match image.path().and_then(Path::parent) {
        Some(folder) if !has_protocol && !folder.as_os_str().is_empty() => {
            folder.join(name).display().to_string()
        }
        _ => name.to_string(),
    }
}

/// An image that has not been changed, because it cannot be opened, or for another reason.
pub(crate) fn not_changed(image: &QemuImage, error: &Error) -> QemuImgError {
    match error.kind() {
        Kind::NotFound | Kind::Refused | Kind::InUse => not_opened(image, error),
        _ => failure(error.to_string()),
    }
}

/// An image that cannot be opened or changed, with the description of its device.
pub(crate) fn image_failure(image: &QemuImage, error: &Error) -> QemuImgError {
    match error.kind() {
        Kind::Usage => failure(error.to_string()),
        _ => QemuImgError::opening("image", &image.holder(), error),
    }
}

/// A size, as the original parses it.
pub(crate) fn size(text: &str) -> Result<u64> {
    parse_size(text).map_err(|error| failure(format!("Invalid size: {}", error.text())))
}
