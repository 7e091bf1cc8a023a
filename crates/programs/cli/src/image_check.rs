//! `blockhaul check`: the tables of a qcow2 image.

use blockhaul_catalog::Intent;
use blockhaul_formats::qcow2::check::{ImageCheckReport, Repair};

use crate::brackets::Groups;
use crate::exit::{CommandFailure, CommandResult};
use crate::image_tools::{holder, with_device};
use crate::{args, out};

/// Exit statuses, the same as of qemu-img check.
pub const INCOMPLETE: u8 = 1;
const CORRUPT: u8 = 2;
const LEAKS: u8 = 3;

/// Runs `blockhaul check`.
pub fn check(args: &args::CheckArgs, groups: &Groups) -> CommandResult {
    let (name, report) = checked(args, groups)?;
    let text = if args.json { json(&name, &report) } else { text(&report) };
    out::print(text.as_bytes())?;
    Ok(status(&report))
}

/// The exit status for what was found.
fn status(report: &ImageCheckReport) -> u8 {
    match (report.corruptions, report.leaks) {
        (1.., _) => CORRUPT,
        (0, 1..) => LEAKS,
        (0, 0) => 0,
    }
}

/// Checks an image; also returns its name.
fn checked(
    args: &args::CheckArgs,
    groups: &Groups,
) -> Result<(String, ImageCheckReport), CommandFailure> {
    let spec = holder(groups.spec(&args.image)?)?;
    let repair = match args.repair {
        None => Repair::Nothing,
        Some(args::RepairArg::Leaks) => Repair::Leaks,
        Some(args::RepairArg::All) => Repair::All,
    };
    let intent = match repair {
        Repair::Nothing => Intent::READ,
        Repair::Leaks | Repair::All => Intent { exclusive: true, ..Intent::WRITE },
    };
    let name = spec.to_string();
    let report = with_device("image", spec, intent, async move |device| {
        blockhaul_formats::qcow2::check::check(&device, repair).await
    })?;
    Ok((name, report))
}

fn text(report: &ImageCheckReport) -> String {
    let mut text = String::new();
    for fault in &report.faults {
        text += &format!("{}\n", out::one_line(&fault.to_string()));
    }
    let fixed = [(report.corruptions_fixed, "corruptions"), (report.leaks_fixed, "leaks")];
    for (count, what) in fixed.into_iter().filter(|(count, _)| *count > 0) {
        text += &format!("repaired: {count} {what}\n");
    }
    text += &match (report.corruptions, report.leaks) {
        (0, 0) => "no faults".to_string(),
        (corruptions, leaks) => format!("corruptions: {corruptions}, leaked clusters: {leaks}"),
    };
    let ImageCheckReport { allocated, clusters, compressed, image_end, .. } = report;
    let dirty = if report.is_dirty { ", marked as dirty" } else { "" };
    text += &format!(
        "; {allocated} of {clusters} clusters allocated, {compressed} compressed, {image_end} bytes in \
         use{dirty}\n"
    );
    text
}

fn json(name: &str, report: &ImageCheckReport) -> String {
    let value = serde_json::json!({
        "image": name,
        "format": "qcow2",
        "corruptions": report.corruptions,
        "leaks": report.leaks,
        "corruptions-fixed": report.corruptions_fixed,
        "leaks-fixed": report.leaks_fixed,
        "total-clusters": report.clusters,
        "allocated-clusters": report.allocated,
        "compressed-clusters": report.compressed,
        "image-end-offset": report.image_end,
        "dirty": report.is_dirty,
        "messages": report.faults.iter().map(ToString::to_string).collect::<Vec<_>>(),
    });
    format!("{value:#}\n")
}
