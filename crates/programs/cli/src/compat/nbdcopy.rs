//! `nbdcopy`, by `blockhaul copy`.

use std::ffi::OsString;
use std::path::PathBuf;

use blockhaul_command_lines::nbdcopy::NbdcopyRequest;
use blockhaul_command_lines::{ToolInvocation, nbdcopy};

use super::stand_in::{answer, failure, log_as, own};
use crate::args::CliCommand;
use crate::copy::report::DigestLine;
use crate::exit::{CommandFailure, CommandResult, FAILED, plain};
use crate::{copy, out, signals};

/// Runs nbdcopy with these words.
pub fn run(words: &[OsString]) -> CommandResult {
    let copy = match nbdcopy::parse(words).map_err(failure)? {
        ToolInvocation::Text(text) => return answer(&text),
        ToolInvocation::Run(copy) => copy,
    };
    carry_out(copy).map_err(|failure: CommandFailure| match failure.status() {
        // Like a shell for a program that was ended by a signal.
        128.. => failure,
        _ => failure.with_status(FAILED),
    })
}

fn carry_out(mut requested: NbdcopyRequest) -> CommandResult {
    log_as("nbdcopy", requested.is_verbose());
    let mut started = Vec::new();
    if requested.is_verbose() {
        let text;
        (text, started) = requested.described();
        out::error(&text);
    }
    requested.take_places().map_err(failure)?;
    let line = match requested.digest() {
        Some(_) if requested.is_stream() => {
            return Err(failure("--blkhash is not supported for a copy from a pipe to a pipe"));
        }
        Some(file) => DigestLine::Alone(file.map(PathBuf::from)),
        None => DigestLine::Named,
    };
    if requested.is_stream() {
        return pour();
    }
    let (cli, groups) = own(requested.words())?;
    let CliCommand::Copy(args) = cli.command else {
        return Err(failure("the command line was not understood"));
    };
    let outcome = copy::run_printing(&args, &groups, line);
    // Servers that were started here end here.
    drop(started);
    outcome
}

/// Copies standard input to standard output.
fn pour() -> CommandResult {
    let copied = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::stdout().lock());
    match copied {
        Ok(_) => Ok(0),
        // The reader has closed the pipe, for a reason that only it knows.
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => {
            Ok(signals::status(signal_hook::consts::SIGPIPE))
        }
        Err(error) => {
            let text = format!("cannot copy standard input to output: {}", plain(&error));
            Err(failure(text))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_of_words_is_understood_by_copy() {
        let lines = [
            "",
            "-C 99999 -R 99999999 -T 4294967295 --queue-size=0",
            "--queue-size=7E -S 2147483648 --request-size=32M",
            "-p -v --allocated --flush --no-extents --target-is-zero --synchronous",
            "--progress=3 -C1 -R1 -T1 -S 512",
            "--blkhash=sha256 --blkhash-file=x",
        ];
        for line in lines {
            let words: Vec<OsString> = line
                .split(' ')
                .filter(|word| !word.is_empty())
                .chain(["a", "b"])
                .map(OsString::from)
                .collect();
            let ToolInvocation::Run(copy) = nbdcopy::parse(&words).unwrap() else {
                panic!("{line}")
            };
            assert!(matches!(own(copy.words()).unwrap().0.command, CliCommand::Copy(_)), "{line}");
        }
    }
}
