//! The report of a copy for the user of the command.

use blockhaul_transfer::{CopyEnd, CopyReport};

use crate::exit::Failure;
use crate::{out, signals};

/// The exit status of a copy that succeeded. Like other programs that write to a pipe, a copy whose
/// reader is gone prints no message, but does not report success either.
pub(crate) fn status(report: &CopyReport) -> u8 {
    match report.end {
        CopyEnd::Complete | CopyEnd::CompletedEarlier => 0,
        CopyEnd::ReaderGone => signals::status(signal_hook::consts::SIGPIPE),
    }
}

/// Prints the report and the digest. Each line begins with `disk`.
pub(crate) fn print(
    report: &CopyReport,
    verbose: bool,
    disk: &str,
    to_pipe: bool,
) -> Result<(), Failure> {
    for warning in &report.warnings {
        let warning = out::one_line(&format!("{disk}warning: {warning}"));
        out::error(&format!("blockhaul: copy: {warning}\n"));
    }
    if verbose || report.end == CopyEnd::CompletedEarlier {
        let text = out::one_line(&format!("{disk}{}", report.text));
        out::error(&format!("blockhaul: copy: {text}\n"));
    }
    match &report.digest {
        None => {}
        Some(line) if to_pipe => out::error(line),
        Some(line) => drop(out::print(line.as_bytes())?),
    }
    Ok(())
}
