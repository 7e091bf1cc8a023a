//! Log records on standard error, one line each.

use log::{Level, LevelFilter, Log, Metadata, Record};

struct Stderr;

impl Log for Stderr {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= log::max_level()
    }

    fn log(&self, record: &Record<'_>) {
        if !self.enabled(record.metadata()) {
            return;
        }
        let level = match record.level() {
            Level::Error => "error: ",
            Level::Warn => "warning: ",
            Level::Info => "",
            Level::Debug => "debug: ",
            Level::Trace => "trace: ",
        };
        // What a plugin says in its own words.
        let whose = record.target().strip_prefix("plugin ").map(|name| format!("{name}: "));
        let whose = whose.unwrap_or_default();
        crate::out::error(&format!("blockhaul: {level}{whose}{}\n", record.args()));
    }

    fn flush(&self) {}
}

/// Starts logging: warnings, or also what is done with `--verbose`.
pub fn start(verbose: bool) {
    let level = if verbose { LevelFilter::Debug } else { LevelFilter::Warn };
    // Fails only if it was set before; then that one does.
    let _ = log::set_logger(&Stderr);
    log::set_max_level(level);
}
