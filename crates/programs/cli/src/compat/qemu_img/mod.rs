//! `qemu-img`, by our commands about images. Differences are listed in docs/qemu-img.md.

mod amend;
mod bitmap;
mod bitmaps;
mod check;
mod commit;
mod common;
mod compare;
mod convert;
mod create;
mod dd;
mod help;
mod info;
mod json;
mod map;
mod measure;
mod progress;
mod rebase;
mod resize;
mod snapshot;

use std::ffi::OsString;

use blockhaul_command_lines::Asked;
use blockhaul_command_lines::qemu_img::parse;

use self::common::failure;
pub(super) use self::common::{opened, warn_of_guess};
use super::stand_in::{answer, log_as};
use crate::exit::{FAILED, Outcome};

/// Runs qemu-img with these words.
pub fn run(words: &[OsString]) -> Outcome {
    let line = match parse(words).map_err(failure)? {
        Asked::Text(text) => return answer(&text),
        Asked::Run(line) => line,
    };
    log_as("qemu-img", false);
    let outcome = match line.command {
        "amend" => amend::amended(&line),
        "bitmap" => bitmap::change_bitmaps(&line),
        "check" => return check::checked(&line),
        "commit" => commit::committed(&line),
        "compare" => return compare::compared(&line),
        "convert" => convert::convert(&line),
        "create" => create::create(&line),
        "dd" => dd::dd(&line),
        "info" => info::info(&line),
        "map" => map::map(&line),
        "measure" => measure::measured(&line),
        "rebase" => rebase::rebased(&line),
        "resize" => resize::resized(&line),
        _ => snapshot::snapshot(&line),
    };
    outcome.map_err(|failure| match failure.status() {
        // Like a shell for a program that was ended by a signal.
        128.. => failure,
        _ => failure.with_status(FAILED),
    })
}
