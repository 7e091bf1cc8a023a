//! `qemu-img snapshot`.

use std::time::{SystemTime, UNIX_EPOCH};

use blockhaul_block::{Error, Kind};
use blockhaul_catalog::NamePolicy;
use blockhaul_command_lines::qemu_image::{QemuFormat, QemuImage};
use blockhaul_command_lines::qemu_img::QemuImgCommand;
use blockhaul_formats::qcow2::snapshot_change::{SnapshotChange, change_snapshot};

use crate::error::{QemuImgError, QemuImgStatus, Result, failure};
use crate::info::table;
use crate::tool::QemuImg;

impl QemuImg {
    /// Runs `snapshot`.
    pub(crate) fn snapshot(&self, line: &QemuImgCommand) -> Result<QemuImgStatus> {
        line.at_most(1)?;
        let asked: Vec<_> = ["list", "create", "apply", "delete"]
            .into_iter()
            .filter(|name| line.has(name))
            .collect();
        if asked.len() > 1 {
            return Err(failure("Cannot mix '-l', '-a', '-c', '-d'"));
        }
        let image = line.image(0, "format")?;
        let Some((what, name)) = asked.first().and_then(|what| Some((*what, line.value(what)?)))
        else {
            return self.list_snapshots(image);
        };
        if what == "list" {
            return self.list_snapshots(image);
        }
        self.change_snapshots(&image, what, name)
    }

    fn list_snapshots(&self, image: QemuImage) -> Result<QemuImgStatus> {
        let all = self.snapshots(image)?;
        if !all.is_empty() {
            self.print(&table(&all))?;
        }
        Ok(QemuImgStatus::Success)
    }

    fn change_snapshots(&self, image: &QemuImage, what: &str, name: &str) -> Result<QemuImgStatus> {
        let wrong = |why: &str| failure(format!("Could not {what} snapshot '{name}': {why}"));
        let format = self.image_format(image)?;
        if format != QemuFormat::Qcow2 {
            return Err(wrong("Operation not supported"));
        }
        let change = match what {
            "create" => SnapshotChange::Create { date: now() },
            "apply" => SnapshotChange::Apply,
            _ => SnapshotChange::Delete,
        };
        let wanted = name.to_string();
        let result = self.with_holder(image, NamePolicy::Allow, async move |context, holder| {
            change_snapshot(context, holder, &wanted, change).await
        })?;
        result.map_err(|error| explained(&error, change, wrong))?;
        Ok(QemuImgStatus::Success)
    }
}

fn explained(
    error: &Error,
    change: SnapshotChange,
    wrong: impl Fn(&str) -> QemuImgError,
) -> QemuImgError {
    match (error.kind(), change) {
        (Kind::NotFound, SnapshotChange::Delete) => wrong("snapshot not found"),
        (Kind::NotFound, SnapshotChange::Apply) => {
            wrong("Failed to load snapshot: No such file or directory")
        }
        _ => wrong(&error.to_string()),
    }
}

/// Seconds since 1970, and nanoseconds.
fn now() -> (u32, u32) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    (u32::try_from(now.as_secs()).unwrap_or(u32::MAX), now.subsec_nanos())
}
