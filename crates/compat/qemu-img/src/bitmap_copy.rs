//! `--bitmaps` of `qemu-img convert`.

use blockhaul_catalog::NamePolicy;
use blockhaul_command_lines::qemu_image::{QemuFormat, QemuImage};
use blockhaul_command_lines::qemu_img::QemuImgCommand;
use blockhaul_formats::qcow2::bitmap_change::{BitmapChange, change_bitmap};
use blockhaul_formats::qcow2::describe::BitmapDescription;
use blockhaul_transfer::one_line;

use crate::error::{Result, failure};
use crate::image::not_changed;
use crate::tool::QemuImg;

/// The bitmaps that the target gets.
pub(crate) struct BitmapCopy {
    from: String,
    all: Vec<BitmapDescription>,
}

impl QemuImg {
    /// Finds the bitmaps of the source, and refuses those that cannot be copied; none if they are not
    /// asked for.
    pub(crate) fn bitmap_copy(
        &self,
        line: &QemuImgCommand,
        sources: &[QemuImage],
        target: QemuFormat,
    ) -> Result<Option<BitmapCopy>> {
        let skips = line.has("skip-broken-bitmaps");
        if !line.has("bitmaps") {
            if skips {
                return Err(failure("Use of --skip-broken-bitmaps requires --bitmaps"));
            }
            return Ok(None);
        }
        let [source] = sources else {
            return Err(failure("Copying bitmaps only possible with single source"));
        };
        if target != QemuFormat::Qcow2 {
            let text = format!("Format driver '{}' does not support bitmaps", target.name());
            return Err(failure(text));
        }
        let mut all = match self.image_format(source)? {
            QemuFormat::Qcow2 => self.bitmaps(source)?,
            _ => Vec::new(),
        };
        // The original goes through them in the reverse order of the image.
        for broken in all.iter().rev().filter(|one| one.in_use) {
            let name = one_line(&broken.name);
            if !skips {
                return Err(failure(format!(
                    "Cannot copy inconsistent bitmap '{name}'\nTry --skip-broken-bitmaps, or use 'qemu-img bitmap \
                     --remove' to delete it"
                )));
            }
            self.tell(&format!("qemu-img: warning: Skipping inconsistent bitmap '{name}'\n"));
        }
        all.retain(|one| !one.in_use);
        Ok(Some(BitmapCopy { from: source.holder(), all }))
    }

    /// Adds bitmaps to the target.
    pub(crate) fn add_bitmaps(&self, bitmaps: BitmapCopy, target: &QemuImage) -> Result<()> {
        let BitmapCopy { from, all } = bitmaps;
        let result =
            self.with_holder(target, NamePolicy::Allow, async move |context, holder| {
                for one in all {
                    let granularity = Some(one.granularity);
                    let add = BitmapChange::Add { granularity, enabled: one.enabled };
                    change_bitmap(context, holder, &one.name, add).await?;
                    let sources = vec![one.name.clone()];
                    let merge = BitmapChange::Merge { sources, from: Some(from.clone()) };
                    change_bitmap(context, holder, &one.name, merge).await?;
                }
                Ok(())
            })?;
        result.map_err(|error| not_changed(target, &error))
    }
}
