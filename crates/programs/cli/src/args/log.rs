//! Options about messages.

use clap::Args;

use crate::logger::{self, LogFormat};

/// The form of messages: for every command that runs long.
#[derive(Debug, Clone, Copy, Args)]
pub struct LogArgs {
    /// Format of messages on standard error: text, or json, an object per line [default: text]
    #[arg(long, value_name = "FORMAT", default_value = "text", hide_default_value = true)]
    pub log_format: LogFormat,
}

impl LogArgs {
    /// Starts the log of a command: warnings, and more with `--verbose`.
    pub fn start(self, verbose: bool) {
        logger::set_format(self.log_format);
        logger::start(verbose);
    }
}
