//! `qemu-img amend`.

use blockhaul_catalog::NamePolicy;
use blockhaul_command_lines::qemu_image::{QemuFormat, QemuImage};
use blockhaul_command_lines::qemu_img::QemuImgCommand;
use blockhaul_formats::qcow2::amend::{AmendOptions, amend};
use blockhaul_formats::qcow2::describe::Qcow2Description;
use blockhaul_formats::qcow2::resize::NewSize;

use crate::error::{QemuImgStatus, Result, failure};
use crate::help::OptionUse;
use crate::image::{not_changed, size};
use crate::new_image::is_on;
use crate::progress::{FINE, ProgressLines};
use crate::tool::QemuImg;

/// Options of `create` that do not change later.
const ONLY_NEW: &[&str] = &[
    "cluster_size",
    "compression_type",
    "encrypt.cipher-alg",
    "encrypt.cipher-mode",
    "encrypt.format",
    "encrypt.hash-alg",
    "encrypt.ivgen-alg",
    "encrypt.ivgen-hash-alg",
    "encrypt.key-secret",
    "encryption",
    "extended_l2",
    "preallocation",
];

/// The changes that the options ask for.
#[derive(Default)]
struct ImageAmendment {
    change: AmendOptions,
    size: Option<NewSize>,
}

impl QemuImg {
    /// Runs `amend`.
    pub(crate) fn amend(&self, line: &QemuImgCommand) -> Result<QemuImgStatus> {
        let options = line.creation()?;
        if options.is_empty() {
            return Err(failure("Must specify options (-o)"));
        }
        if line.wants_help() && line.value("format").is_some() {
            return self.print_options(line.value("format").unwrap_or_default(), OptionUse::Amend);
        }
        if line.operands.is_empty() {
            return Err(failure("Expecting one image file name"));
        }
        line.at_most(1)?;
        let image = line.image(0, "format")?;
        let format = self.image_format(&image)?;
        if line.wants_help() {
            return self.print_options(format.name(), OptionUse::Amend);
        }
        if format != QemuFormat::Qcow2 {
            let name = format.name();
            return Err(failure(format!(
                "Format driver '{name}' does not support option amendment"
            )));
        }
        let found = self.description(&image)?;
        let mut amendment = ImageAmendment::default();
        for (name, value) in &options {
            amendment.add(&found, name, value)?;
        }
        let is_new = found.version >= 3 || amendment.change.upgrade;
        if amendment.change.lazy_refcounts == Some(true) && !is_new {
            return Err(failure(
                "Lazy refcounts only supported with compatibility level 1.1 and above (use compat=1.1 or \
                 greater)",
            ));
        }
        let shown = ProgressLines::begin(self.output(), line, FINE);
        self.amend_image(&image, amendment.change)?;
        if let Some(size) = amendment.size {
            self.set_disk_size(&image, format, size, true)?;
        }
        shown.end();
        Ok(QemuImgStatus::Success)
    }

    fn amend_image(&self, image: &QemuImage, change: AmendOptions) -> Result<()> {
        if change == AmendOptions::default() {
            return Ok(());
        }
        let result =
            self.with_holder(image, NamePolicy::Refuse, async move |context, holder| {
                amend(context, holder, change).await
            })?;
        result.map_err(|error| not_changed(image, &error))
    }
}

impl ImageAmendment {
    /// Takes one option. What the image is already changes nothing.
    fn add(&mut self, found: &Qcow2Description, name: &str, value: &str) -> Result<()> {
        let other = |what: &str| {
            let text = format!("amend: {what} is not supported: copy the disk to a new image");
            Err(failure(text))
        };
        match name {
            "compat" => match (value, found.version) {
                ("1.1" | "v3", _) => self.change.upgrade = true,
                ("0.10" | "v2", ..3) => self.change.upgrade = false,
                ("0.10" | "v2", _) => return other("compat=0.10"),
                _ => return Err(failure(format!("Unknown compatibility level {value}"))),
            },
            "lazy_refcounts" => self.change.lazy_refcounts = Some(is_on(value)),
            "size" => self.size = Some(NewSize::To(size(value)?)),
            // Also those that the image has already.
            "backing_file" | "backing_fmt" => {
                let text = "Cannot amend the backing file\nYou can use 'qemu-img rebase' instead.";
                return Err(failure(text));
            }
            "refcount_bits" if value == found.refcount_bits.to_string() => {}
            "data_file" if found.data_file.as_deref() == Some(value) => {}
            "data_file_raw" if found.data_file_raw == is_on(value) => {}
            "refcount_bits" | "data_file" | "data_file_raw" => return other(name),
            _ if ONLY_NEW.contains(&name) => {
                let text = "This option is only supported for image creation";
                return Err(failure(format!("Invalid parameter '{name}'\n{text}")));
            }
            _ => return Err(failure(format!("Invalid parameter '{name}'"))),
        }
        Ok(())
    }
}
