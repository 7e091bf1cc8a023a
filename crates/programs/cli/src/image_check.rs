//! `blockhaul check`: the tables of a qcow2 image.

use blockhaul_catalog::Intent;
use blockhaul_formats::qcow2::check::{ImageCheckReport, Repair};
use blockhaul_inspect::{check_json, check_text};

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
    out::result(args.json, &check_json(&name, &report), &check_text(&report))?;
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
