//! `nbddump`: the content of a disk in hexadecimal.

use std::ffi::OsString;

use blockhaul_command_lines::{ToolInvocation, nbddump};

use super::stand_in::{answer, failure, log_as};
use crate::exit::{CommandFailure, CommandResult, FAILED};
use crate::info;

/// Runs nbddump with these words.
pub fn run(words: &[OsString]) -> CommandResult {
    let dump = match nbddump::translate(words).map_err(failure)? {
        ToolInvocation::Text(text) => return answer(&text),
        ToolInvocation::Run(dump) => dump,
    };
    log_as("nbddump", false);
    info::run_dump(dump).map_err(|failure: CommandFailure| failure.with_status(FAILED))
}
