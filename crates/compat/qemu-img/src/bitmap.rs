//! `qemu-img bitmap`.

use blockhaul_catalog::NamePolicy;
use blockhaul_command_lines::qemu_image::QemuImage;
use blockhaul_command_lines::qemu_img::QemuImgCommand;
use blockhaul_formats::qcow2::bitmap_change::{BitmapChange, change_bitmap};

use crate::error::{QemuImgStatus, Result, failure};
use crate::image::{image_failure, size};
use crate::tool::QemuImg;

/// A change of the bitmaps of an image.
enum Change {
    /// Of the one that the command line names.
    One(BitmapChange),
    /// All are removed.
    RemoveAll,
}

/// The bitmap that the command line names; none if no change needs one.
fn named_bitmap<'a>(line: &'a QemuImgCommand, changes: &[Change]) -> Result<Option<&'a String>> {
    let needed = changes.iter().any(|one| matches!(one, Change::One(_)));
    match (needed, line.operands.get(1)) {
        (true, None) => Err(failure("bitmap: Expecting image file name and bitmap name")),
        (false, Some(word)) => Err(failure(format!("bitmap: Unexpected argument: {word}"))),
        (_, found) => Ok(found),
    }
}

impl QemuImg {
    /// Runs `bitmap`.
    pub(crate) fn change_bitmaps(&self, line: &QemuImgCommand) -> Result<QemuImgStatus> {
        line.at_most(2)?;
        let image = line.image(0, "format")?;
        let mut changes = Vec::new();
        for (name, value) in line.options() {
            changes.extend(self.bitmap_change(line, name, value)?);
        }
        if changes.is_empty() {
            let text = "Need at least one of --add, --remove, --remove-all, --clear, --enable, --disable, \
                        or --merge";
            return Err(failure(text));
        }
        let bitmap = named_bitmap(line, &changes)?;
        if bitmap.is_some() {
            self.require_qcow2(line, &image)?;
        }
        for one in changes {
            match (one, bitmap) {
                (Change::One(change), Some(bitmap)) => {
                    self.change_bitmap(&image, bitmap, change)?
                }
                _ => self.remove_bitmaps(&image)?,
            }
        }
        Ok(QemuImgStatus::Success)
    }

    /// Removes all bitmaps of an image. Images in other formats have none.
    fn remove_bitmaps(&self, image: &QemuImage) -> Result<()> {
        for one in self.bitmaps(image)? {
            self.change_bitmap(image, &one.name, BitmapChange::Remove)?;
        }
        Ok(())
    }

    /// The change that an option asks for; `None` for other options.
    fn bitmap_change(
        &self,
        line: &QemuImgCommand,
        option: &str,
        value: &str,
    ) -> Result<Option<Change>> {
        let change = match option {
            "remove-all" => return Ok(Some(Change::RemoveAll)),
            "add" => {
                let granularity = line.value("granularity").map(size).transpose()?;
                BitmapChange::Add { granularity, enabled: true }
            }
            "remove" => BitmapChange::Remove,
            "clear" => BitmapChange::Clear,
            "enable" => BitmapChange::Enable,
            "disable" => BitmapChange::Disable,
            "merge" => BitmapChange::Merge {
                sources: vec![value.to_string()],
                from: self.merge_source(line)?,
            },
            _ => return Ok(None),
        };
        Ok(Some(Change::One(change)))
    }

    /// The description of the other image of a merge, if there is one.
    fn merge_source(&self, line: &QemuImgCommand) -> Result<Option<String>> {
        let Some(file) = line.value("source-file") else { return Ok(None) };
        let from = QemuImage::named(file, line.value("source-format"))?;
        self.require_qcow2(line, &from)?;
        Ok(Some(from.holder()))
    }

    fn change_bitmap(&self, image: &QemuImage, bitmap: &str, change: BitmapChange) -> Result<()> {
        let bitmap = bitmap.to_string();
        let result =
            self.with_holder(image, NamePolicy::Refuse, async move |context, holder| {
                change_bitmap(context, holder, &bitmap, change).await
            })?;
        result.map_err(|error| image_failure(image, &error))
    }
}
