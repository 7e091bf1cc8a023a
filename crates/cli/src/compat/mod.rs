//! blockhaul in the place of libnbd's programs and of nbdkit: called as `nbdcopy`, `nbdinfo` or `nbdkit`
//! (a symbolic link), or as `blockhaul compat NAME`, it takes their command lines and keeps to what
//! scripts read: formats, descriptors, exit statuses. What differs is in docs/coming-from-libnbd.md and
//! docs/coming-from-nbdkit.md.
//!
//! - `options`: command lines as getopt_long(3) reads them.
//! - `nbdcopy`, `nbdinfo`, `nbdkit`: a program each, put into words of `blockhaul copy`, `blockhaul info`
//!   and `blockhaul serve`, so that there is one of each.

mod nbdcopy;
mod nbdinfo;
mod nbdkit;
mod options;

use std::ffi::{OsStr, OsString};
use std::path::Path;

use log::{Log, Metadata, Record};

use crate::args::{self, Cli};
use crate::brackets::{self, Groups};
use crate::exit::{FAILED, Failure, Outcome};
use crate::out;

/// The version of libnbd whose programs are matched, and which is told to who asks: scripts compare
/// it to know which options there are.
const VERSION: &str = "1.22.2";

/// A program that is stood in for.
struct Program {
    name: &'static str,
    /// Runs it with the words behind its name.
    run: fn(&[OsString]) -> Outcome,
}

const PROGRAMS: &[Program] = &[
    Program { name: "nbdcopy", run: nbdcopy::run },
    Program { name: "nbdinfo", run: nbdinfo::run },
    Program { name: "nbdkit", run: nbdkit::run },
];

/// Runs what the command line calls by one of those names and gives the exit status; none if it
/// does not.
pub fn run(words: &[OsString]) -> Option<u8> {
    let (program, rest) = called(words)?;
    Some((program.run)(rest).unwrap_or_else(|failure| {
        out::error(&format!("{}: {failure}\n", program.name));
        failure.status()
    }))
}

fn called(words: &[OsString]) -> Option<(&'static Program, &[OsString])> {
    let named = |name: &OsStr| PROGRAMS.iter().find(|program| name == program.name);
    let (first, rest) = words.split_first()?;
    if let Some(program) = Path::new(first).file_name().and_then(named) {
        return Some((program, rest));
    }
    match rest {
        [compat, name, rest @ ..] if compat == "compat" => Some((named(name)?, rest)),
        _ => None,
    }
}

/// A failure of a program that knows one status for all of them.
fn failure(text: impl Into<String>) -> Failure {
    Failure::new(FAILED, text)
}

/// Prints what was asked for.
fn answer(text: &str) -> Outcome {
    out::print(text.as_bytes())?;
    Ok(0)
}

/// Log records under the name that the program is called by, and only where they are asked for: the
/// originals say nothing of what they get over.
struct Logger {
    name: &'static str,
    verbose: bool,
}

impl Log for Logger {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        self.verbose && metadata.level() <= log::max_level()
    }

    fn log(&self, record: &Record<'_>) {
        if self.enabled(record.metadata()) {
            let level = record.level().as_str().to_ascii_lowercase();
            out::error(&format!("{}: {level}: {}\n", self.name, record.args()));
        }
    }

    fn flush(&self) {}
}

/// Starts logging before the command does, which then only sets the level.
fn log_as(name: &'static str, verbose: bool) {
    // Fails only if it was set before; then that one does.
    let _ = log::set_boxed_logger(Box::new(Logger { name, verbose }));
}

fn version(name: &str) -> String {
    format!("{name} {VERSION}\nlibnbd {VERSION}\n")
}

/// Parses words of blockhaul's own command line.
fn own(words: Vec<OsString>) -> Result<(Cli, Groups), Failure> {
    let (words, groups) = brackets::take(words).map_err(failure)?;
    let parsed = args::parse(words).map_err(|error| {
        failure(brackets::readable(error.render().to_string().trim_start_matches("error: ")))
    });
    Ok((parsed?, groups))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name_of(text: &str) -> Option<(&'static str, usize)> {
        let words: Vec<OsString> = text.split_whitespace().map(OsString::from).collect();
        called(&words).map(|(program, rest)| (program.name, rest.len()))
    }

    #[test]
    fn the_name_or_the_first_words_choose_the_program() {
        assert_eq!(name_of("/usr/bin/nbdcopy a b"), Some(("nbdcopy", 2)));
        assert_eq!(name_of("nbdinfo"), Some(("nbdinfo", 0)));
        assert_eq!(name_of("blockhaul compat nbdinfo x"), Some(("nbdinfo", 1)));
        let none =
            ["blockhaul", "blockhaul copy nbdcopy x", "blockhaul compat x", "nbdcopy2 a", ""];
        assert!(none.into_iter().all(|text| name_of(text).is_none()));
    }
}
