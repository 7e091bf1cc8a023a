//! `qemu-storage-daemon`, by `blockhaul serve`.

use std::ffi::OsString;

use blockhaul_command_lines::ToolInvocation;
use blockhaul_command_lines::qemu_storage_daemon::{IN_BACKGROUND, parse};

use super::stand_in::{answer, failure, log_as, own};
use crate::args::CliCommand;
use crate::exit::{CommandResult, FAILED};
use crate::serve;

/// Runs qemu-storage-daemon with these words.
pub fn run(words: &[OsString]) -> CommandResult {
    let (in_background, words) = match words {
        [first, rest @ ..] if first == IN_BACKGROUND => (true, rest),
        words => (false, words),
    };
    let daemon = match parse(words).map_err(failure)? {
        ToolInvocation::Text(text) => return answer(&text),
        ToolInvocation::Run(daemon) => daemon,
    };
    if daemon.daemonize && !in_background {
        let mut again: Vec<OsString> =
            vec!["compat".into(), "qemu-storage-daemon".into(), IN_BACKGROUND.into()];
        again.extend(words.iter().cloned());
        return serve::again_in_background(&again);
    }
    log_as("qemu-storage-daemon", false);
    let (cli, groups) = own(daemon.words(in_background))?;
    let CliCommand::Serve(args) = cli.command else {
        return Err(failure("the command line was not understood"));
    };
    serve::run(*args, &groups).map_err(|failure| match failure.status() {
        // Like a shell for a program that was ended by a signal.
        128.. => failure,
        _ => failure.with_status(FAILED),
    })
}
