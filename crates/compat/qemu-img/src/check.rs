//! `qemu-img check`.

use blockhaul_catalog::Intent;
use blockhaul_command_lines::qemu_image::{QemuFormat, QemuImage};
use blockhaul_command_lines::qemu_img::QemuImgCommand;
use blockhaul_formats::qcow2::check::{CheckFault, FlagOf, ImageCheckReport, Repair, check};
use blockhaul_transfer::one_line;

use crate::error::{QemuImgError, QemuImgErrorKind, QemuImgStatus, Result, failure};
use crate::json::JsonValue;
use crate::tool::QemuImg;

impl QemuImg {
    /// Runs `check`.
    pub(crate) fn check(&self, line: &QemuImgCommand) -> Result<QemuImgStatus> {
        line.at_most(1)?;
        let is_json = line.is_json()?;
        let repair = match line.value("repair") {
            None => Repair::Nothing,
            Some("leaks") => Repair::Leaks,
            Some("all") => Repair::All,
            Some(_) => {
                return Err(failure("check: --repair expects 'leaks' or 'all'"));
            }
        };
        let image = line.image(0, "format")?;
        let format = self.image_format(&image)?;
        if format != QemuFormat::Qcow2 {
            let text = "This image format does not support checks";
            return Err(QemuImgError::new(QemuImgErrorKind::CheckUnsupported, text));
        }
        let found = self.check_tables(&image, repair)?;
        self.tell_faults(&found.faults);
        let status = status(&found);
        if is_json {
            self.print(&format!("{}\n", value(&image, format, &found).json()))?;
            return Ok(status);
        }
        self.say(line, &summary(&found))?;
        Ok(status)
    }

    /// Checks the tables of an image.
    fn check_tables(&self, image: &QemuImage, repair: Repair) -> Result<ImageCheckReport> {
        let intent = match repair {
            Repair::Nothing => Intent::READ,
            Repair::Leaks | Repair::All => Intent { exclusive: true, ..Intent::WRITE },
        };
        let holder = image.holder();
        let found =
            self.with_device(&holder, intent, async move |device| check(&device, repair).await)?;
        found.map_err(|error| QemuImgError::opening("image", &holder, &error))
    }

    /// Prints the faults as the original does, which names a repaired fault twice.
    fn tell_faults(&self, faults: &[CheckFault]) {
        let print = |text: &str| self.tell(&format!("{}\n", one_line(text)));
        let refcount = |fault: &CheckFault, repaired: bool| {
            let CheckFault::Refcount { cluster, stored, references, .. } = fault else { return };
            let what = match (repaired, stored < references) {
                (true, _) => "Repairing",
                (false, true) => "ERROR",
                (false, false) => "Leaked",
            };
            print(&format!("{what} cluster {cluster} refcount={stored} reference={references}"));
        };
        for fault in faults {
            match fault {
                CheckFault::Refcount { .. } => refcount(fault, false),
                CheckFault::Flag { .. } => {}
                CheckFault::Beyond { offset, len, .. } => print(&format!(
                    "ERROR: counting reference for region exceeding the end of the file by one cluster or more: offset \
                     {offset:#x} size {len:#x}"
                )),
                other => print(&other.to_string()),
            }
        }
        for fault in faults {
            match fault {
                CheckFault::Refcount { fixed: true, .. } => refcount(fault, true),
                CheckFault::Flag { entry, value, refcount, fixed } => {
                    let what = if *fixed { "Repairing" } else { "ERROR" };
                    let entry = match entry {
                        FlagOf::L1(number) => {
                            format!("L2 cluster: l1_index={number} l1_entry={value:x}")
                        }
                        FlagOf::L2(_) => format!("data cluster: l2_entry={value:x}"),
                    };
                    print(&format!("{what} OFLAG_COPIED {entry} refcount={refcount}"));
                }
                _ => {}
            }
        }
    }
}

fn status(found: &ImageCheckReport) -> QemuImgStatus {
    match (found.corruptions, found.leaks) {
        (1.., _) => QemuImgStatus::Damaged,
        (0, 1..) => QemuImgStatus::Leaks,
        (0, 0) => QemuImgStatus::Success,
    }
}

fn value(image: &QemuImage, format: QemuFormat, found: &ImageCheckReport) -> JsonValue {
    let number = |name, count: u64| (name, JsonValue::Number(count));
    let some = |name, count: u64| (count > 0).then_some((name, JsonValue::Number(count)));
    let mut all = vec![number("image-end-offset", found.image_end)];
    all.extend(some("compressed-clusters", found.compressed));
    all.push(number("total-clusters", found.clusters));
    all.extend(some("corruptions", found.corruptions));
    all.extend(some("corruptions-fixed", found.corruptions_fixed));
    all.push(number("check-errors", 0));
    all.extend(some("leaks", found.leaks));
    all.extend(some("leaks-fixed", found.leaks_fixed));
    all.extend(some("allocated-clusters", found.allocated));
    all.push(("filename", JsonValue::Text(image.shown.clone())));
    all.push(("format", JsonValue::Text(format.name().to_string())));
    all.extend(some("fragmented-clusters", found.fragmented));
    JsonValue::Object(all)
}

fn summary(found: &ImageCheckReport) -> String {
    let mut text = String::new();
    if found.corruptions_fixed > 0 || found.leaks_fixed > 0 {
        text += &format!(
            "The following inconsistencies were found and repaired:\n\n    {} leaked clusters\n    {} \
             corruptions\n\nDouble checking the fixed image now...\n",
            found.leaks_fixed, found.corruptions_fixed
        );
    }
    if found.corruptions == 0 && found.leaks == 0 {
        text += "No errors were found on the image.\n";
    }
    if found.corruptions > 0 {
        text += &format!(
            "\n{} errors were found on the image.\nData may be corrupted, or further writes to the image may \
             corrupt it.\n",
            found.corruptions
        );
    }
    if found.leaks > 0 {
        text += &format!(
            "\n{} leaked clusters were found on the image.\nThis means waste of disk space, but no harm to data.\n",
            found.leaks
        );
    }
    if found.clusters > 0 && found.allocated > 0 {
        let percent = |part: u64, whole: u64| part as f64 * 100.0 / whole as f64;
        text += &format!(
            "{}/{} = {:.2}% allocated, {:.2}% fragmented, {:.2}% compressed clusters\n",
            found.allocated,
            found.clusters,
            percent(found.allocated, found.clusters),
            percent(found.fragmented, found.allocated),
            percent(found.compressed, found.allocated)
        );
    }
    if found.image_end > 0 {
        text += &format!("Image end offset: {}\n", found.image_end);
    }
    text
}
