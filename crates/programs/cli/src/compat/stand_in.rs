//! Common parts of the emulated programs: output, errors and logs, and the translation to our own
//! commands.

use std::ffi::OsString;

use log::{Log, Metadata, Record};

use crate::args::{self, Cli};
use crate::brackets::{self, Groups};
use crate::exit::{CommandFailure, CommandResult, FAILED, joined};
use crate::out;

/// A failure of a program with only one failure status.
pub(super) fn failure(text: impl Into<String>) -> CommandFailure {
    CommandFailure::new(FAILED, text)
}

/// Prints the requested output.
pub(super) fn answer(text: &str) -> CommandResult {
    out::print(text.as_bytes())?;
    Ok(0)
}

/// Log records under the name of the emulated program, and only if requested: the originals print
/// nothing about errors that they recover from.
struct EmulationLogger {
    name: &'static str,
    verbose: bool,
}

impl Log for EmulationLogger {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        self.verbose && metadata.level() <= log::max_level()
    }

    fn log(&self, record: &Record<'_>) {
        if self.enabled(record.metadata()) {
            let level = record.level().as_str().to_ascii_lowercase();
            let text = out::one_line(&record.args().to_string());
            out::error(&format!("{}: {level}: {text}\n", self.name));
        }
    }

    fn flush(&self) {}
}

/// Starts logging before the command does, which then only sets the level.
pub(super) fn log_as(name: &'static str, verbose: bool) {
    // Fails only if a logger is already set, which is then used.
    let _ = log::set_boxed_logger(Box::new(EmulationLogger { name, verbose }));
}

/// Parses words of blockhaul's own command line.
pub(super) fn own(words: Vec<OsString>) -> Result<(Cli, Groups), CommandFailure> {
    let (words, groups) = brackets::take(words).map_err(failure)?;
    let parsed = args::parse(words).map_err(|error| {
        let text = joined(error.render().to_string().trim_start_matches("error: "));
        failure(brackets::readable(&text))
    });
    Ok((parsed?, groups))
}
