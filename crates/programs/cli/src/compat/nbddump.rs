//! `nbddump`: the content of a disk in hexadecimal.

use std::ffi::OsString;

use blockhaul_command_lines::{Asked, nbddump};

use super::stand_in::{answer, failure, log_as};
use crate::exit::{FAILED, Failure, Outcome};
use crate::info;

/// Runs nbddump with these words.
pub fn run(words: &[OsString]) -> Outcome {
    let dump = match nbddump::translate(words).map_err(failure)? {
        Asked::Text(text) => return answer(&text),
        Asked::Run(dump) => dump,
    };
    log_as("nbddump", false);
    info::run_dump(dump).map_err(|failure: Failure| failure.with_status(FAILED))
}
