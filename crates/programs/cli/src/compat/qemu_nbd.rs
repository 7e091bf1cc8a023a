//! `qemu-nbd`, by `blockhaul serve`.

use std::ffi::OsString;
use std::sync::Arc;

use blockhaul_command_lines::ToolInvocation;
use blockhaul_command_lines::qemu_nbd::{IN_BACKGROUND, QemuNbdAction, parse};

use super::qemu_img::emulation;
use super::stand_in::{answer, failure, log_as, own};
use crate::args::CliCommand;
use crate::exit::{CommandResult, FAILED};
use crate::{info, serve};

/// Runs qemu-nbd with these words.
pub fn run(words: &[OsString]) -> CommandResult {
    let (in_background, words) = match words {
        [first, rest @ ..] if first == IN_BACKGROUND => (true, rest),
        words => (false, words),
    };
    let server = match parse(words).map_err(failure)? {
        ToolInvocation::Text(text) => return answer(&text),
        ToolInvocation::Run(QemuNbdAction::List(uri)) => {
            return info::run_qemu_list(&uri).map_err(|failure| failure.with_status(FAILED));
        }
        ToolInvocation::Run(QemuNbdAction::Serve(server)) => server,
    };
    let images = emulation(Arc::default());
    let format = images.image_format(server.image())?;
    let file = server.image().path().and_then(|path| std::fs::metadata(path).ok());
    let len = file.filter(std::fs::Metadata::is_file).map(|file| file.len());
    let own_words = server.words(format, len, in_background).map_err(failure)?;
    if server.guesses_raw(format) && !in_background {
        images.warn_of_guess(server.image());
    }
    if server.has("fork") && !in_background {
        let mut again: Vec<OsString> =
            vec!["compat".into(), "qemu-nbd".into(), IN_BACKGROUND.into()];
        again.extend(words.iter().cloned());
        return serve::again_in_background(&again);
    }
    log_as("qemu-nbd", server.has("verbose"));
    let (cli, groups) = own(own_words)?;
    let CliCommand::Serve(args) = cli.command else {
        return Err(failure("the command line was not understood"));
    };
    serve::run(*args, &groups).map_err(|failure| match failure.status() {
        // Like a shell for a program that was ended by a signal.
        128.. => failure,
        _ => failure.with_status(FAILED),
    })
}
