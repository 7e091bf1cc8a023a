//! `nbdinfo`, by `blockhaul info`.

use std::ffi::OsString;

use blockhaul_command_lines::{ToolInvocation, nbdinfo};

use super::stand_in::{answer, failure, log_as, own};
use crate::args::CliCommand;
use crate::exit::{CommandFailure, CommandResult, FAILED};
use crate::info;

/// Runs nbdinfo with these words.
pub fn run(words: &[OsString]) -> CommandResult {
    let words = match nbdinfo::translate(words).map_err(failure)? {
        ToolInvocation::Text(text) => return answer(&text),
        ToolInvocation::Run(words) => words,
    };
    log_as("nbdinfo", false);
    let (cli, groups) = own(words)?;
    let CliCommand::Info(mut args) = cli.command else {
        return Err(failure("the command line was not understood"));
    };
    args.is_nbdinfo = true;
    info::run(&args, &groups).map_err(|failure: CommandFailure| failure.with_status(FAILED))
}

#[cfg(test)]
mod tests {
    use blockhaul_command_lines::getopt::{self, OptionArity};
    use blockhaul_command_lines::nbdinfo::OPTIONS;

    use super::*;

    fn status(text: &str) -> (u8, String) {
        let words: Vec<OsString> = text.split_whitespace().map(OsString::from).collect();
        match run(&words) {
            Ok(status) => (status, String::new()),
            Err(failure) => (failure.status(), failure.to_string()),
        }
    }

    #[test]
    fn wrong_command_lines_end_with_1_and_say_why() {
        let cases = [
            ("", "one NBD URI"),
            ("nbd://a nbd://b", "one NBD URI"),
            ("--list --size nbd://a", "exclude each other"),
            ("--is x --cannot y nbd://a", "exclude each other"),
            ("--totals nbd://a", "--map"),
            ("--what nbd://a", "--what"),
            ("disk.raw", "no NBD URI"),
            ("memory:1m", "no NBD URI"),
            ("[ a", "[ without ]"),
            ("--can fly nbd+unix:///?socket=/no/such", "fly"),
        ];
        for (text, part) in cases {
            let (status, said) = status(text);
            assert_eq!(status, FAILED, "{text}");
            assert!(said.contains(part), "{text}: {said}");
        }
    }

    #[test]
    fn every_option_is_known_to_info() {
        for opt in
            getopt::table(OPTIONS).iter().filter(|opt| !["help", "version"].contains(&opt.means))
        {
            if opt.long.ends_with("-options") {
                continue;
            }
            let map = if opt.means == "totals" { " --map" } else { "" };
            let value = if opt.value == OptionArity::Must { " write" } else { "" };
            let (status, said) =
                status(&format!("--{}{value}{map} nbd+unix:///?socket=/no/such", opt.long));
            // The command line is fine; the server is not there.
            assert_eq!(status, FAILED, "{}", opt.long);
            assert!(said.contains("/no/such"), "{}: {said}", opt.long);
        }
    }
}
