//! Nodes as QEMU describes them: the options of a block device in JSON, as in file names `json:{…}`.

use std::path::PathBuf;

use blockhaul_block::{Error, Kind, Result};
use serde_json::{Map, Value, json};

use crate::{ImageFormat, percent_encode};

/// A node of QEMU over one file or export.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QemuNode {
    /// QEMU's name of the format. `None`: the node does not tell it.
    pub format: Option<String>,
    /// The file or export.
    pub place: QemuPlace,
    /// `x-dirty-bitmap`: the metadata context that takes the place of `base:allocation`.
    pub context: Option<String>,
    /// `tls-creds` and `tls-hostname`: the name of the credentials, and that of the server.
    pub tls: Option<(String, String)>,
    /// `cache.direct`: the page cache is bypassed.
    pub direct: bool,
}

/// The file or export of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum QemuPlace {
    /// A file or a block device. A relative path begins at the directory of the process.
    Path(PathBuf),
    /// A file name, which may have a protocol.
    Name(String),
    /// The URI of an export.
    Nbd(String),
    /// Zeroes: a number of bytes.
    Zero(u64),
}

/// Options of nodes that change how a file is accessed, but not what is in it.
const WITHOUT_EFFECT: &[&str] = &[
    "aio",
    "auto-read-only",
    "cache",
    "detect-zeroes",
    "discard",
    "driver",
    "force-share",
    "locking",
    "node-name",
    "read-only",
];

/// The option of a node of NBD that names a metadata context.
const CONTEXT: &str = "x-dirty-bitmap";

impl QemuNode {
    /// The node of these options.
    ///
    /// # Errors
    /// [`Kind::Unsupported`] with the name of a driver or an option that is not known, and [`Kind::Invalid`].
    pub fn from_options(given: &Map<String, Value>) -> Result<QemuNode> {
        let inner = match given.get("file") {
            Some(Value::Object(inner)) => Some(inner),
            None => None,
            Some(_) => return Err(unsupported("file: the name of a node is not supported here")),
        };
        let driver = text(given, "driver");
        if matches!(driver, "file" | "host_device" | "nbd" | "null-co") {
            // Nothing looks for a format in an export.
            let format = matches!(driver, "nbd" | "null-co").then(|| "raw".to_string());
            return Ok(QemuNode { format, ..QemuNode::over(driver, given)? });
        }
        let format = format_of(driver)?;
        only_options(given, &["file", "filename"])?;
        let direct = direct(given);
        let Some(inner) = inner else {
            let place = match text(given, "filename") {
                "" => return Err(invalid("A block device must be specified for \"file\"")),
                name => QemuPlace::Name(name.to_string()),
            };
            return Ok(QemuNode { format, place, context: None, tls: None, direct });
        };
        let driver = match text(inner, "driver") {
            "" => "file",
            driver => driver,
        };
        let node = QemuNode::over(driver, inner)?;
        Ok(QemuNode { format, direct: direct || node.direct, ..node })
    }

    /// The node of a protocol.
    fn over(driver: &str, given: &Map<String, Value>) -> Result<QemuNode> {
        let place = place(driver, given)?;
        let (context, tls, direct) = (context(given), tls(given), direct(given));
        Ok(QemuNode { format: None, place, context, tls, direct })
    }
}

/// The format of a driver that is no protocol; `None`: the node has no driver.
fn format_of(driver: &str) -> Result<Option<String>> {
    match driver {
        "" => Ok(None),
        "raw" => Ok(Some(driver.to_string())),
        other if ImageFormat::of_qemu_name(other).is_some() => Ok(Some(other.to_string())),
        other => Err(unsupported(format!("Unknown driver '{other}'"))),
    }
}

/// The options in JSON. As QEMU allows, texts may be in single quotes, and keys be those of options within options,
/// as `file.filename`.
///
/// # Errors
/// [`Kind::Invalid`].
pub fn options_of_json(text: &str) -> Result<Map<String, Value>> {
    let value: Value =
        serde_json::from_str(&double_quoted(text)).map_err(|error| invalid(error.to_string()))?;
    match value {
        Value::Object(given) => nested(given),
        _ => Err(invalid(format!("{text}: not an object"))),
    }
}

/// Options with those within options as members, on each level.
fn nested(given: Map<String, Value>) -> Result<Map<String, Value>> {
    let mut members = Map::new();
    for (key, value) in given {
        let value = match value {
            Value::Object(inner) => Value::Object(nested(inner)?),
            value => value,
        };
        insert_option(&mut members, &key, value)?;
    }
    Ok(members)
}

/// JSON whose texts may be in single quotes, in the standard's form.
fn double_quoted(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut quote = None;
    let mut letters = text.chars();
    while let Some(letter) = letters.next() {
        match (letter, quote) {
            ('"' | '\'', None) => {
                quote = Some(letter);
                out.push('"');
            }
            (letter, Some(begun)) if letter == begun => {
                quote = None;
                out.push('"');
            }
            ('"', Some(_)) => out.push_str("\\\""),
            ('\\', Some(_)) => match letters.next() {
                Some('\'') => out.push('\''),
                next => {
                    out.push('\\');
                    out.extend(next);
                }
            },
            _ => out.push(letter),
        }
    }
    out
}

/// Sets the option `a.b.c`, where a number is an index of a list.
///
/// # Errors
/// [`Kind::Invalid`] if it is set already, or is no list or group of options.
pub fn insert_option(members: &mut Map<String, Value>, key: &str, value: Value) -> Result<()> {
    let wrong = || invalid(format!("Parameter '{key}' is used inconsistently"));
    let Some((first, rest)) = key.split_once('.') else {
        return match members.insert(key.to_string(), value) {
            None => Ok(()),
            Some(_) => Err(wrong()),
        };
    };
    let below = members.entry(first).or_insert_with(|| match rest.split('.').next() {
        Some(index) if index.bytes().all(|byte| byte.is_ascii_digit()) => json!([]),
        _ => json!({}),
    });
    match below {
        Value::Object(below) => insert_option(below, rest, value),
        // The elements come in order.
        Value::Array(list) if rest == list.len().to_string() => {
            list.push(value);
            Ok(())
        }
        _ => Err(wrong()),
    }
}

fn invalid(text: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(Kind::Invalid, text)
}

fn unsupported(text: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(Kind::Unsupported, text)
}

fn text<'a>(given: &'a Map<String, Value>, name: &str) -> &'a str {
    given.get(name).and_then(Value::as_str).unwrap_or_default()
}

fn tls(given: &Map<String, Value>) -> Option<(String, String)> {
    let id = Some(text(given, "tls-creds")).filter(|id| !id.is_empty())?;
    Some((id.to_string(), text(given, "tls-hostname").to_string()))
}

fn direct(given: &Map<String, Value>) -> bool {
    let direct = given.get("cache").and_then(|cache| cache.get("direct"));
    direct.is_some_and(|value| value.as_bool() == Some(true) || value == "on")
}

fn context(given: &Map<String, Value>) -> Option<String> {
    Some(text(given, CONTEXT)).filter(|name| !name.is_empty()).map(str::to_string)
}

fn place(driver: &str, given: &Map<String, Value>) -> Result<QemuPlace> {
    match driver {
        "file" | "host_device" => {
            only_options(given, &["filename"])?;
            match text(given, "filename") {
                "" => Err(invalid("The 'file' block driver requires a file name")),
                name => Ok(QemuPlace::Path(PathBuf::from(name))),
            }
        }
        "nbd" => export(given).map(QemuPlace::Nbd),
        "null-co" => {
            only_options(given, &["size", "read-zeroes", "latency-ns"])?;
            let size = match given.get("size") {
                None => Some(1 << 30),
                Some(Value::String(text)) => text.parse().ok(),
                Some(number) => number.as_u64(),
            };
            let wrong = || invalid("Parameter 'size' expects a number of bytes");
            size.map(QemuPlace::Zero).ok_or_else(wrong)
        }
        other => Err(unsupported(format!("driver '{other}' is not supported here"))),
    }
}

/// The URI of an export.
fn export(given: &Map<String, Value>) -> Result<String> {
    let names = ["server", "export", "host", "port", "path", "tls-creds", "tls-hostname", CONTEXT];
    only_options(given, &names)?;
    let server = given.get("server").and_then(Value::as_object).unwrap_or(given);
    // As QEMU prints it: an empty name has a slash before it, and none has not.
    let export = given.get("export").and_then(Value::as_str);
    let export =
        export.map_or_else(String::new, |name| "/".to_string() + &percent_encode(name.as_bytes()));
    match (text(server, "path"), text(server, "host")) {
        ("", "") => Err(invalid("One of path and host must be specified")),
        ("", host) => Ok(format!("nbd://{}{export}", address(host, text(server, "port"))?)),
        (path, _) => Ok(format!("nbd+unix://{export}?socket={}", percent_encode(path.as_bytes()))),
    }
}

/// A host and a port in a URI, of which they are no other part.
fn address(host: &str, port: &str) -> Result<String> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._:%".contains(&byte);
    if !host.bytes().all(is_plain) || !port.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(invalid(format!("'{host}' and '{port}' are no host and port")));
    }
    let host = if host.contains(':') { format!("[{host}]") } else { host.to_string() };
    Ok(if port.is_empty() { format!("{host}:10809") } else { format!("{host}:{port}") })
}

/// Refuses options of a node that are not among these, and would have an effect.
///
/// # Errors
/// [`Kind::Unsupported`] with the name of an option.
pub fn only_options(given: &Map<String, Value>, names: &[&str]) -> Result<()> {
    let known = |name: &str| names.contains(&name) || WITHOUT_EFFECT.contains(&name);
    match given.keys().find(|name| !known(name)) {
        None => Ok(()),
        Some(name) => Err(unsupported(format!("Parameter '{name}' is not supported"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(json: &str) -> Result<QemuNode> {
        QemuNode::from_options(&options_of_json(json)?)
    }

    #[test]
    fn nested_and_flat_options_are_the_same() {
        let nested =
            node(r#"{"driver":"qcow2","file":{"driver":"file","filename":"/a"}}"#).unwrap();
        assert_eq!(nested.format.as_deref(), Some("qcow2"));
        assert_eq!(nested.place, QemuPlace::Path("/a".into()));
        for same in [
            r#"{"driver":"qcow2","file.driver":"file","file.filename":"/a"}"#,
            "{'driver':'qcow2','file':{'filename':'/a','read-only':true},'node-name':'n'}",
            r#"{"driver":"qcow2","file.filename":"/a","discard":"unmap"}"#,
        ] {
            assert_eq!(node(same).unwrap(), nested, "{same}");
        }
        let place = |json| node(json).unwrap().place;
        assert_eq!(place(r#"{"filename":"nbd:h:1"}"#), QemuPlace::Name("nbd:h:1".into()));
        assert_eq!(place(r#"{"driver":"null-co","size":"512"}"#), QemuPlace::Zero(512));
        let uri = |json| match place(json) {
            QemuPlace::Nbd(uri) => uri,
            other => panic!("{other:?}"),
        };
        let unix = r#"{"driver":"raw","file":{"driver":"nbd","server":{"type":"unix","path":"/a?b"},"export":"e&f"}}"#;
        assert_eq!(uri(unix), "nbd+unix:///e%26f?socket=/a%3Fb");
        let dotted =
            r#"{"driver":"raw","file":{"driver":"nbd","server.path":"/a?b","export":"e&f"}}"#;
        assert_eq!(place(dotted), place(unix));
        let inet = r#"{"driver":"nbd","server.type":"inet","server.host":"::1","server.port":"1"}"#;
        assert_eq!(uri(inet), "nbd://[::1]:1");
        assert_eq!(uri(r#"{"driver":"nbd","host":"h"}"#), "nbd://h:10809");
    }

    #[test]
    fn what_is_not_known_is_refused_by_name() {
        for (json, kind, why) in [
            (r#"{"driver":"rbd","pool":"p"}"#, Kind::Unsupported, "'rbd'"),
            (
                r#"{"driver":"qcow2","file":{"driver":"https","url":"u"}}"#,
                Kind::Unsupported,
                "'https'",
            ),
            (
                r#"{"driver":"raw","offset":1,"file":{"filename":"a"}}"#,
                Kind::Unsupported,
                "'offset'",
            ),
            (
                r#"{"driver":"qcow2","backing":null,"file":{"filename":"a"}}"#,
                Kind::Unsupported,
                "'backing'",
            ),
            (r#"{"driver":"qcow2","file":"node"}"#, Kind::Unsupported, "name of a node"),
            (r#"{"driver":"qcow2"}"#, Kind::Invalid, "must be specified"),
            (r#"{"file":{"filename":1}}"#, Kind::Invalid, "file name"),
            (r#"{"driver":"nbd"}"#, Kind::Invalid, "path and host"),
            (r#"{"driver":"nbd","host":"h/x?socket=/s"}"#, Kind::Invalid, "no host"),
            (r#"{"driver":"nbd","host":"h","port":"1/"}"#, Kind::Invalid, "no host"),
            (r#"{"file":{"filename":"a"},"file.filename":"b"}"#, Kind::Invalid, "inconsistently"),
            ("{", Kind::Invalid, "EOF"),
            ("", Kind::Invalid, "EOF"),
            ("[]", Kind::Invalid, "not an object"),
            (&"{'a':".repeat(1000), Kind::Invalid, "recursion"),
            (&format!("{{'{}b':1}}", "a.".repeat(500)), Kind::Unsupported, "'a'"),
        ] {
            let error = node(json).unwrap_err();
            assert!(error.kind() == kind && error.text().contains(why), "{json}: {error:?}");
        }
    }
}
