//! `qemu-img commit`.

use blockhaul_catalog::NamePolicy;
use blockhaul_command_lines::qemu_image::{QemuFormat, QemuImage};
use blockhaul_command_lines::qemu_img::QemuImgCommand;
use blockhaul_formats::qcow2::backing_change::{BackingName, SnapshotPolicy, commit};
use blockhaul_formats::qcow2::resize::NewSize;

use crate::error::{QemuImgStatus, Result, failure};
use crate::image::stored_name;
use crate::progress::{FINE, ProgressLines};
use crate::tool::QemuImg;

impl QemuImg {
    /// Runs `commit`.
    pub(crate) fn commit(&self, line: &QemuImgCommand) -> Result<QemuImgStatus> {
        line.at_most(1)?;
        let image = line.image(0, "format")?;
        self.require_qcow2(line, &image)?;
        let shown = ProgressLines::begin(self.output(), line, FINE);
        if let Some(base) = line.value("base") {
            let (above, base, format) = self.images_down_to(&image, base)?;
            for one in above.iter().rev() {
                self.commit_image(one, Some((&base, format)), true)?;
            }
        } else {
            if let Some((below, format, size)) = self.backing_to_grow(&image)? {
                self.set_disk_size(&below, format, NewSize::To(size), false)?;
            }
            self.commit_image(&image, None, line.has("drop"))?;
        }
        shown.end();
        self.say(line, "Image committed.\n")
    }

    /// Copies what an image has to the image below it, or to `base`.
    fn commit_image(
        &self,
        image: &QemuImage,
        base: Option<(&QemuImage, QemuFormat)>,
        keep: bool,
    ) -> Result<()> {
        let base = match base {
            None => None,
            Some((base, format)) => {
                let path = base.path().map(std::path::absolute).transpose();
                let path = path.map_err(|error| failure(format!("{}: {error}", base.shown)))?;
                let name = path.map_or_else(|| Ok(base.holder()), |path| stored_name(&path))?;
                Some(BackingName { name, format: format.name().to_string() })
            }
        };
        let result = self.with_holder(image, NamePolicy::Allow, async move |context, holder| {
            commit(context, holder, base.as_ref(), keep, SnapshotPolicy::Change, &|_, _| ()).await
        })?;
        self.tell_changes(image, result)
    }
}
