//! Log records on standard error, one line each, for people or as JSON.

use std::sync::atomic::{AtomicBool, Ordering};

use log::{Level, LevelFilter, Log, Metadata, Record};
use serde_json::{Map, Value};

struct Stderr;

impl Log for Stderr {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= log::max_level()
    }

    fn log(&self, record: &Record<'_>) {
        if !self.enabled(record.metadata()) {
            return;
        }
        if JSON.load(Ordering::Relaxed) {
            let text = record.args().to_string();
            return out_json(record.level(), record.target(), &text);
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

/// Whether records are JSON.
static JSON: AtomicBool = AtomicBool::new(false);

/// How log records are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// One line of text.
    Text,
    /// One JSON object in a line: time, level, message, and what the record is about.
    Json,
}

impl std::str::FromStr for Format {
    type Err = String;

    fn from_str(text: &str) -> Result<Format, String> {
        match text {
            "text" => Ok(Format::Text),
            "json" => Ok(Format::Json),
            _ => Err(format!("{text:?} is neither text nor json")),
        }
    }
}

/// From here on records, and the failure with which a command ends, have this format.
pub fn set_format(format: Format) {
    JSON.store(format == Format::Json, Ordering::Relaxed);
}

/// Says why a command has failed.
pub fn failure(command: &str, text: &str) {
    match JSON.load(Ordering::Relaxed) {
        true => out_json(Level::Error, "", text),
        false => crate::out::error(&format!("blockhaul: {command}{text}\n")),
    }
}

fn out_json(level: Level, target: &str, text: &str) {
    let mut record = Map::new();
    let mut add = |name: &str, value: Value| drop(record.insert(name.to_string(), value));
    add("time", Value::from(jiff::Timestamp::now().to_string()));
    add("level", Value::from(level.as_str().to_ascii_lowercase()));
    if let Some(name) = target.strip_prefix("plugin ") {
        add("plugin", Value::from(name));
    }
    if let Some(Ok(number)) = target.strip_prefix("connection ").map(str::parse::<u64>) {
        add("connection", Value::from(number));
    }
    add("message", Value::from(text));
    crate::out::error(&format!("{}\n", Value::Object(record)));
}

/// Starts logging: warnings, or also what is done with `--verbose`.
pub fn start(verbose: bool) {
    let level = if verbose { LevelFilter::Debug } else { LevelFilter::Warn };
    // Fails only if it was set before; then that one does.
    let _ = log::set_logger(&Stderr);
    log::set_max_level(level);
}
