//! The report of a copy for the user of the command.

use std::path::PathBuf;

use blockhaul_catalog::DeviceSpec;
use blockhaul_engine::CopySummary;
use blockhaul_transfer::{CopyEnd, CopyReport, without_secrets};
use log::Level;
use serde_json::{Value, json};

use crate::exit::{CommandFailure, FAILED, PARTIAL, plain};
use crate::{logger, out, signals};

/// The exit status of a copy that succeeded. Like other programs that write to a pipe, a copy whose
/// reader is gone prints no message, but does not report success either.
pub(crate) fn status(report: &CopyReport) -> u8 {
    match report.end {
        CopyEnd::Complete | CopyEnd::CompletedEarlier => 0,
        CopyEnd::Partial => PARTIAL,
        CopyEnd::ReaderGone => signals::status(signal_hook::consts::SIGPIPE),
    }
}

/// How the digest of a copy is printed.
#[derive(Debug)]
pub(crate) enum DigestLine {
    /// With the name of the source, on standard output, or on standard error if that is the target.
    Named,
    /// Without a name, on standard output or in this file.
    Alone(Option<PathBuf>),
}

/// Prints the digest, if there is one.
pub(crate) fn print_digest(
    report: &CopyReport,
    form: &DigestLine,
    to_pipe: bool,
) -> Result<(), CommandFailure> {
    let Some(line) = &report.digest else { return Ok(()) };
    let alone =
        || line.split_whitespace().next().map(|digest| format!("{digest}\n")).unwrap_or_default();
    match form {
        DigestLine::Named if to_pipe && logger::is_json() => logger::announce(line.trim_end()),
        DigestLine::Named if to_pipe => out::error(line),
        DigestLine::Named => drop(out::print(line.as_bytes())?),
        DigestLine::Alone(None) => drop(out::print(alone().as_bytes())?),
        DigestLine::Alone(Some(path)) => std::fs::write(path, alone()).map_err(|error| {
            let text = format!("cannot write the digest to {}: {}", path.display(), plain(&error));
            CommandFailure::new(FAILED, text)
        })?,
    }
    Ok(())
}

/// The report as JSON.
pub(crate) fn value(report: &CopyReport, [source, target]: &[DeviceSpec; 2]) -> Value {
    let CopySummary { size, data, zeroed, skipped, resumed, elapsed, .. } = &report.summary;
    json!({
        "source": without_secrets(&source.to_string()),
        "target": without_secrets(&target.to_string()),
        "size": size,
        "data": data,
        "zeroed": zeroed,
        "skipped": skipped,
        "resumed": resumed,
        "verified": report.verified,
        "seconds": elapsed.as_secs_f64(),
    })
}

/// Prints the report. Each line begins with `disk`.
pub(crate) fn print(report: &CopyReport, verbose: bool, disk: &str) -> Result<(), CommandFailure> {
    for warning in &report.warnings {
        let label = if logger::is_json() { "" } else { "warning: " };
        logger::message(Level::Warn, "copy: ", &format!("{disk}{label}{warning}"));
    }
    if verbose || report.end == CopyEnd::CompletedEarlier {
        logger::message(Level::Info, "copy: ", &format!("{disk}{}", report.text));
    }
    Ok(())
}
