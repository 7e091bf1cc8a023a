//! The options of a copy by their names, for front ends that read texts. Messages about values are those of the
//! command line.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::path::PathBuf;

use blockhaul_catalog::parse_count;

use crate::options::TransferOptions;
use crate::values::{
    ERROR_ACTION_NAMES, MULTI_CONN_NAMES, parse_algorithm, parse_direct, parse_duration,
    parse_error_action, parse_multi_conn, parse_queue_size, parse_range, parse_request_size,
    parse_schedule, parse_segment, parse_size, parse_sparse,
};

/// An option of `T` by its name.
pub struct OptionRow<T: 'static> {
    /// The long option of the command line, without dashes.
    pub name: &'static str,
    kind: RowKind<T>,
}

/// Sets a value; the error is the reason why the text is no such value.
pub type SetValue<T> = fn(&mut T, &OsStr) -> Result<(), String>;

/// Sets a list; the error is the text that is no such value, and the reason.
pub type SetList<T> = fn(&mut T, &[OsString]) -> Result<(), (OsString, String)>;

enum RowKind<T: 'static> {
    Flag(fn(&mut T) -> &mut bool),
    Value(&'static str, SetValue<T>),
    List(&'static str, SetList<T>),
}

/// The value of an option in a file or a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OptionValue {
    /// Whether a flag is set.
    Switch(bool),
    /// Texts; numbers as on the command line.
    Texts(Vec<OsString>),
}

/// Why a value is refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OptionValueError {
    /// The option is a flag.
    NotSwitch,
    /// The option has no value.
    NoValue,
    /// The message says what is wrong with the value.
    Invalid(String),
}

impl fmt::Display for OptionValueError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            OptionValueError::NotSwitch => f.write_str("the value must be true or false"),
            OptionValueError::NoValue => f.write_str("the value must be a string or a number"),
            OptionValueError::Invalid(text) => f.write_str(text),
        }
    }
}

impl std::error::Error for OptionValueError {}

impl<T> OptionRow<T> {
    /// A flag.
    pub const fn flag(name: &'static str, field: fn(&mut T) -> &mut bool) -> OptionRow<T> {
        OptionRow { name, kind: RowKind::Flag(field) }
    }

    /// An option with one value. `placeholder` stands for the value in messages. The error of `set` is the
    /// reason why the text is no such value; an empty reason: the value is missing.
    pub const fn value(
        name: &'static str,
        placeholder: &'static str,
        set: SetValue<T>,
    ) -> OptionRow<T> {
        OptionRow { name, kind: RowKind::Value(placeholder, set) }
    }

    /// An option with several values, which replace those from before. The error of `set` has the text
    /// that is wrong.
    pub const fn list(
        name: &'static str,
        placeholder: &'static str,
        set: SetList<T>,
    ) -> OptionRow<T> {
        OptionRow { name, kind: RowKind::List(placeholder, set) }
    }

    /// The name of the value in messages; `None` for a flag.
    pub fn placeholder(&self) -> Option<&'static str> {
        match self.kind {
            RowKind::Flag(_) => None,
            RowKind::Value(placeholder, _) | RowKind::List(placeholder, _) => Some(placeholder),
        }
    }

    /// Sets the option.
    ///
    /// # Errors
    /// If the value is not one of this option.
    pub fn set(&self, options: &mut T, value: &OptionValue) -> Result<(), OptionValueError> {
        let texts = match (&self.kind, value) {
            (RowKind::Flag(field), OptionValue::Switch(on)) => {
                *field(options) = *on;
                return Ok(());
            }
            (RowKind::Flag(_), OptionValue::Texts(_)) => return Err(OptionValueError::NotSwitch),
            (_, OptionValue::Texts(texts)) if !texts.is_empty() => texts,
            _ => return Err(OptionValueError::NoValue),
        };
        let set = match (&self.kind, &texts[..]) {
            (RowKind::List(_, set), texts) => set(options, texts),
            (RowKind::Value(_, set), [text]) => {
                set(options, text).map_err(|why| (text.clone(), why))
            }
            _ => {
                let text = format!("the argument '{self}' cannot be used multiple times");
                return Err(OptionValueError::Invalid(text));
            }
        };
        set.map_err(|(text, why)| OptionValueError::Invalid(self.refused(&text, &why)))
    }

    fn refused(&self, text: &OsStr, why: &str) -> String {
        let text = text.to_string_lossy();
        match why {
            why if why.is_empty() || why.starts_with('[') && text.is_empty() => {
                format!("a value is required for '{self}' but none was supplied {why}")
                    .trim_end()
                    .to_string()
            }
            why if why.starts_with('[') => format!("invalid value '{text}' for '{self}' {why}"),
            why => format!("invalid value '{text}' for '{self}': {why}"),
        }
    }
}

impl<T> fmt::Display for OptionRow<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.placeholder() {
            None => write!(f, "--{}", self.name),
            Some(placeholder) => write!(f, "--{} <{placeholder}>", self.name),
        }
    }
}

/// An option by its name, with its value: in a file, or in a request of another program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedOption {
    /// The long option of `blockhaul copy`, without dashes.
    pub name: String,
    /// The value.
    pub value: OptionValue,
}

impl NamedOption {
    /// An option with one value.
    pub fn new(name: &str, value: impl fmt::Display) -> NamedOption {
        let value = OptionValue::Texts(vec![value.to_string().into()]);
        NamedOption { name: name.to_string(), value }
    }

    /// A flag that is set.
    pub fn flag(name: &str) -> NamedOption {
        NamedOption { name: name.to_string(), value: OptionValue::Switch(true) }
    }

    /// An option with these texts; a flag that is set, if there are none.
    pub fn from_texts(name: &str, texts: &[OsString]) -> NamedOption {
        let flag = NamedOption::flag(name);
        if texts.is_empty() {
            flag
        } else {
            NamedOption { value: OptionValue::Texts(texts.to_vec()), ..flag }
        }
    }
}

impl TransferOptions {
    /// The defaults with these options set.
    ///
    /// # Errors
    /// If a name is unknown, or a value is not one of its option. The message names the option.
    pub fn from_named(options: &[NamedOption]) -> Result<TransferOptions, OptionValueError> {
        let mut found = TransferOptions::default();
        for NamedOption { name, value } in options {
            let unknown =
                || OptionValueError::Invalid(format!("unexpected argument '--{name}' found"));
            find_option(TRANSFER_OPTIONS, name).ok_or_else(unknown)?.set(&mut found, value)?;
        }
        Ok(found)
    }
}

/// The option of this name among `rows`.
pub fn find_option<T>(rows: &'static [OptionRow<T>], name: &str) -> Option<&'static OptionRow<T>> {
    rows.iter().find(|row| row.name == name)
}

/// Every field of [`TransferOptions`], by the long option of `blockhaul copy`.
pub static TRANSFER_OPTIONS: &[OptionRow<TransferOptions>] = &[
    OptionRow::value("connections", "N", |o, t| put(&mut o.connections, number(t, 1, 1024))),
    OptionRow::value("multi-conn", "WHEN", |o, t| {
        set(&mut o.multi_conn, one_of(t, &MULTI_CONN_NAMES, parse_multi_conn))
    }),
    OptionRow::value("requests", "N", |o, t| put(&mut o.requests, number(t, 1, 65536))),
    OptionRow::value("request-size", "SIZE", |o, t| {
        put(&mut o.request_size, parsed(t, parse_request_size))
    }),
    OptionRow::value("queue-size", "SIZE", |o, t| {
        set(&mut o.queue_size, parsed(t, parse_queue_size))
    }),
    OptionRow::value("sparse", "SIZE", |o, t| put(&mut o.sparse, parsed(t, parse_sparse))),
    OptionRow::flag("allocated", |o| &mut o.allocated),
    OptionRow::flag("destination-is-zero", |o| &mut o.destination_is_zero),
    OptionRow::flag("trust", |o| &mut o.trust),
    OptionRow::flag("zero-all", |o| &mut o.zero_all),
    OptionRow::flag("no-extents", |o| &mut o.no_extents),
    OptionRow::flag("flush", |o| &mut o.flush),
    OptionRow::flag("discard-source", |o| &mut o.discard_source),
    OptionRow::value("direct", "HOW", |o, t| set(&mut o.direct, parsed(t, parse_direct))),
    OptionRow::flag("synchronous", |o| &mut o.synchronous),
    OptionRow::flag("verify", |o| &mut o.verify),
    OptionRow::value("manifest", "FILE", |o, t| put(&mut o.manifest, path(t))),
    OptionRow::value("digest", "NAME", |o, t| put(&mut o.digest, parsed(t, parse_algorithm))),
    OptionRow::value("on-error", "WHAT", |o, t| {
        set(&mut o.on_error, one_of(t, &ERROR_ACTION_NAMES, parse_error_action))
    }),
    OptionRow::value("error-map", "FILE", |o, t| put(&mut o.error_map, path(t))),
    OptionRow::value("range", "OFFSET:LENGTH", |o, t| put(&mut o.range, parsed(t, parse_range))),
    OptionRow::value("ranges", "FILE|-", |o, t| put(&mut o.ranges, path(t))),
    OptionRow::value("ranges-command", "CMD", |o, t| put(&mut o.ranges_command, string(t))),
    OptionRow::flag("ranges-partial", |o| &mut o.ranges_partial),
    OptionRow::value("bitmap", "CONTEXT", |o, t| put(&mut o.bitmap, string(t))),
    OptionRow::value("bitmap-flags", "FLAGS", |o, t| {
        put(&mut o.bitmap_flags, number(t, 1, u64::MAX))
    }),
    OptionRow::value("since", "MANIFEST", |o, t| put(&mut o.since, path(t))),
    OptionRow::value("timeout", "TIME", |o, t| set(&mut o.timeout, parsed(t, parse_duration))),
    OptionRow::value("min-rate", "RATE", |o, t| set(&mut o.min_rate, parsed(t, parse_size))),
    OptionRow::value("retries", "N", |o, t| set(&mut o.retries, number(t, 0, 1000))),
    OptionRow::value("retry-delay", "TIME", |o, t| {
        set(&mut o.retry_delay, parsed(t, parse_duration))
    }),
    OptionRow::value("journal", "FILE", |o, t| put(&mut o.journal, path(t))),
    OptionRow::flag("restart", |o| &mut o.restart),
    OptionRow::value("journal-interval", "TIME", |o, t| {
        put(&mut o.journal_interval, parsed(t, parse_duration))
    }),
    OptionRow::value("rate", "RATE|RULES", |o, t| put(&mut o.rate, parsed(t, parse_schedule))),
    OptionRow::value("rate-file", "FILE", |o, t| put(&mut o.rate_file, path(t))),
    OptionRow::value("iops", "N", |o, t| put(&mut o.iops, number(t, 1, u64::MAX))),
    OptionRow::value("segment", "SIZE", |o, t| put(&mut o.segment, parsed(t, parse_segment))),
    OptionRow::list("source-layer", "NAME[?key=value&…]", |o, t| {
        strings(t).map(|layers| o.source_layer = layers)
    }),
    OptionRow::list("target-layer", "NAME[?key=value&…]", |o, t| {
        strings(t).map(|layers| o.target_layer = layers)
    }),
    OptionRow::flag("no-zero-copy", |o| &mut o.no_zero_copy),
];

fn set<V>(field: &mut V, value: Result<V, String>) -> Result<(), String> {
    value.map(|value| *field = value)
}

fn put<V>(field: &mut Option<V>, value: Result<V, String>) -> Result<(), String> {
    value.map(|value| *field = Some(value))
}

/// The text, if it is UTF-8.
pub(crate) fn utf8(text: &OsStr) -> Result<&str, String> {
    text.to_str().ok_or_else(|| "it is not UTF-8".to_string())
}

fn parsed<V>(text: &OsStr, parse: fn(&str) -> Result<V, String>) -> Result<V, String> {
    utf8(text).and_then(parse)
}

fn one_of<V>(
    text: &OsStr,
    names: &[&str],
    parse: fn(&str) -> Result<V, String>,
) -> Result<V, String> {
    parsed(text, parse).map_err(|_| format!("[possible values: {}]", names.join(", ")))
}

/// A number within these bounds.
///
/// # Errors
/// The reason why the text is no such number, in the words of the command line.
pub fn number<N: TryFrom<u64>>(text: &OsStr, least: u64, most: u64) -> Result<N, String> {
    parse_count(utf8(text)?, least, most).map_err(|error| error.text())
}

fn path(text: &OsStr) -> Result<PathBuf, String> {
    if text.is_empty() { Err(String::new()) } else { Ok(text.into()) }
}

fn string(text: &OsStr) -> Result<String, String> {
    utf8(text).map(String::from)
}

fn strings(texts: &[OsString]) -> Result<Vec<String>, (OsString, String)> {
    texts.iter().map(|text| string(text).map_err(|why| (text.clone(), why))).collect()
}
