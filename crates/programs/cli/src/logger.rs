//! Log records on standard error, one line each, as text or JSON.

use std::ffi::OsString;
use std::io::IsTerminal as _;
use std::sync::atomic::{AtomicBool, Ordering};

use log::kv::{self, Key, VisitSource, VisitValue};
use log::{Level, LevelFilter, Log, Metadata, Record};
use serde_json::{Map, Value};

use crate::out::one_line;
use crate::syslog::{self, Severity};

struct StderrLogger;

/// The modules whose information is logged without `--verbose`.
const CHANGES: [&str; 3] =
    [concat!(env!("CARGO_CRATE_NAME"), "::serve"), "blockhaul_jobs", "blockhaul_qmp"];

impl Log for StderrLogger {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        let unheard = QUIET_CLIENTS.load(Ordering::Relaxed)
            && metadata.level() >= Level::Warn
            && metadata.target().starts_with("blockhaul_server");
        let is_wanted = match (metadata.level(), log::max_level()) {
            // Servers report what is changed while they run, and no other information.
            (Level::Info, LevelFilter::Info) => {
                CHANGES.iter().any(|module| metadata.target().starts_with(module))
            }
            (level, most) => level <= most,
        };
        is_wanted && !unheard
    }

    fn log(&self, record: &Record<'_>) {
        if !self.enabled(record.metadata()) {
            return;
        }
        if SYSLOG.load(Ordering::Relaxed) {
            return to_syslog(record);
        }
        if is_json() {
            return out_json(object(record));
        }
        let level = label(record.level());
        // A plugin's own message.
        let whose = record.target().strip_prefix("plugin ").map(|name| format!("{name}: "));
        let whose = whose.unwrap_or_default();
        let text = record.args().to_string();
        let has_lines = record.target().ends_with("::traceback") && std::io::stderr().is_terminal();
        let text = if has_lines { indented(&text) } else { one_line(&text) };
        crate::out::error(&format!("blockhaul: {level}{whose}{text}\n"));
    }

    fn flush(&self) {}
}

/// How lines of a level begin.
fn label(level: Level) -> &'static str {
    match level {
        Level::Error => "error: ",
        Level::Warn => "warning: ",
        Level::Info => "",
        Level::Debug => "debug: ",
        Level::Trace => "trace: ",
    }
}

/// Text of several lines for a terminal: all but the first are indented, so that none looks like a record.
fn indented(text: &str) -> String {
    let lines: Vec<_> = text.lines().map(one_line).collect();
    lines.join("\n    ")
}

/// Whether warnings about clients are left out: the only one reports them itself.
static QUIET_CLIENTS: AtomicBool = AtomicBool::new(false);

/// Leaves out warnings about clients.
pub fn set_quiet_clients(quiet: bool) {
    QUIET_CLIENTS.store(quiet, Ordering::Relaxed);
}

/// Whether records go to the system's log.
static SYSLOG: AtomicBool = AtomicBool::new(false);

/// Sends later records to the system's log instead of standard error.
pub fn use_syslog() {
    SYSLOG.store(true, Ordering::Relaxed);
}

fn to_syslog(record: &Record<'_>) {
    let severity = match record.level() {
        Level::Error => Severity::Error,
        Level::Warn => Severity::Warning,
        Level::Info => Severity::Info,
        Level::Debug | Level::Trace => Severity::Debug,
    };
    let text = if is_json() {
        Value::Object(object(record)).to_string()
    } else {
        one_line(&record.args().to_string())
    };
    syslog::send("blockhaul", severity, &text);
}

/// Whether records are JSON.
static JSON: AtomicBool = AtomicBool::new(false);

/// The format of log records.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    /// One line of text.
    Text,
    /// One JSON object per line: time, level, message, and members.
    Json,
}

impl std::str::FromStr for LogFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<LogFormat, String> {
        match text {
            "text" => Ok(LogFormat::Text),
            "json" => Ok(LogFormat::Json),
            _ => Err(format!("{text:?} is not one of text, json")),
        }
    }
}

/// Sets the format of later records, and of the failure of a command.
pub fn set_format(format: LogFormat) {
    JSON.store(format == LogFormat::Json, Ordering::Relaxed);
}

/// Whether records are JSON.
pub fn is_json() -> bool {
    JSON.load(Ordering::Relaxed)
}

/// Whether a command line, which may be wrong, asks for JSON.
pub fn asks_for_json(words: &[OsString]) -> bool {
    words.iter().any(|word| word == "--log-format=json")
        || words.windows(2).any(|pair| pair == ["--log-format", "json"])
}

/// Logs why a command failed.
pub fn failure(command: &str, text: &str) {
    message(Level::Error, command, text);
}

/// Prints a message that is not a warning and does not depend on `--verbose`.
pub fn announce(text: &str) {
    message(Level::Info, "", text);
}

/// Prints a warning that does not depend on the level of the log.
pub fn warn(text: &str) {
    message(Level::Warn, label(Level::Warn), text);
}

/// Prints a message that does not depend on the level of the log: in JSON with its level, as text behind `prefix`.
pub fn message(level: Level, prefix: &str, text: &str) {
    if is_json() {
        out_json(beginning(level, text));
    } else {
        crate::out::error(&format!("blockhaul: {prefix}{}\n", one_line(text)));
    }
}

fn out_json(object: Map<String, Value>) {
    crate::out::raw_error(&format!("{}\n", Value::Object(object)));
}

/// The members of every object.
fn beginning(level: Level, text: &str) -> Map<String, Value> {
    let mut object = Map::new();
    let mut add = |name: &str, value: String| object.insert(name.to_string(), Value::from(value));
    add("time", jiff::Timestamp::now().to_string());
    add("level", level.as_str().to_ascii_lowercase());
    add("message", text.to_string());
    object
}

/// A record as an object: the common members, and its own.
fn object(record: &Record<'_>) -> Map<String, Value> {
    let mut object = beginning(record.level(), &record.args().to_string());
    if let Some(name) = record.target().strip_prefix("plugin ") {
        object.insert("plugin".into(), Value::from(name));
    }
    // The visitor returns no errors.
    let _ = record.key_values().visit(&mut RecordMembers(&mut object));
    object
}

/// Adds a record's own members, except empty ones.
struct RecordMembers<'a>(&'a mut Map<String, Value>);

impl<'kvs> VisitSource<'kvs> for RecordMembers<'_> {
    fn visit_pair(&mut self, key: Key<'kvs>, value: kv::Value<'kvs>) -> Result<(), kv::Error> {
        let mut read = RecordValue(Value::Null);
        value.visit(&mut read)?;
        if read.0.is_null() {
            return Ok(());
        }
        let mut name = key.as_str().to_string();
        // Common members are not overwritten.
        while self.0.contains_key(&name) {
            name.push('_');
        }
        self.0.insert(name, read.0);
        Ok(())
    }
}

/// A value of a record as JSON: numbers and booleans as such, the rest as text.
struct RecordValue(Value);

impl<'v> VisitValue<'v> for RecordValue {
    fn visit_any(&mut self, value: kv::Value<'_>) -> Result<(), kv::Error> {
        self.0 = Value::from(value.to_string());
        Ok(())
    }

    fn visit_null(&mut self) -> Result<(), kv::Error> {
        self.0 = Value::Null;
        Ok(())
    }

    fn visit_u64(&mut self, value: u64) -> Result<(), kv::Error> {
        self.0 = Value::from(value);
        Ok(())
    }

    fn visit_i64(&mut self, value: i64) -> Result<(), kv::Error> {
        self.0 = Value::from(value);
        Ok(())
    }

    fn visit_f64(&mut self, value: f64) -> Result<(), kv::Error> {
        // Numbers without a JSON form become null, and are omitted.
        self.0 = Value::from(value);
        Ok(())
    }

    fn visit_bool(&mut self, value: bool) -> Result<(), kv::Error> {
        self.0 = Value::from(value);
        Ok(())
    }

    fn visit_str(&mut self, value: &str) -> Result<(), kv::Error> {
        self.0 = Value::from(value);
        Ok(())
    }
}

/// Starts logging: warnings, and more with `--verbose`.
pub fn start(verbose: bool) {
    start_at(if verbose { LevelFilter::Debug } else { LevelFilter::Warn });
}

/// Starts logging warnings, unless the command has started its log already.
#[cfg(feature = "formats")]
pub fn start_unless_started() {
    if log::max_level() == LevelFilter::Off {
        start(false);
    }
}

/// Starts the log of a server, which also has what is changed while it runs.
pub fn start_server(verbose: bool) {
    start_at(if verbose { LevelFilter::Debug } else { LevelFilter::Info });
}

fn start_at(level: LevelFilter) {
    // Fails only if a logger is already set, which is then used.
    let _ = log::set_logger(&StderrLogger);
    log::set_max_level(level);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_traceback_keeps_its_lines_and_none_looks_like_a_record() {
        let shown = indented("Traceback:\n  File \"a.py\"\n\u{1b}blockhaul: error: x\n");
        assert_eq!(shown.lines().count(), 3, "{shown}");
        assert!(shown.lines().skip(1).all(|line| line.starts_with("    ")), "{shown}");
        assert!(!shown.contains('\u{1b}'), "{shown}");
    }

    #[test]
    fn members_are_numbers_or_text_and_never_what_every_record_has() {
        let members: [(&str, kv::Value<'_>); 7] = [
            ("export", "a\nb".into()),
            ("offset", u64::MAX.into()),
            ("change", (-1).into()),
            ("first", true.into()),
            ("user", kv::Value::null()),
            ("level", "mine".into()),
            ("message", "mine".into()),
        ];
        let members: &[(&str, kv::Value<'_>)] = &members;
        let text = format_args!("said");
        let mut builder = Record::builder();
        let record = builder.args(text).level(Level::Warn).target("plugin p").key_values(&members);
        let mut object = object(&record.build());
        assert!(object.remove("time").is_some_and(|time| time.is_string()));
        let expected = serde_json::json!({
            "level": "warn", "message": "said", "plugin": "p", "export": "a\nb",
            "offset": u64::MAX, "change": -1, "first": true, "level_": "mine", "message_": "mine",
        });
        assert_eq!(Value::Object(object), expected);
    }
}
