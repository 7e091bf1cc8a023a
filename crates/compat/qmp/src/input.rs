//! Input of a client of the monitor protocol: JSON values, which need no line ends between them, with strings
//! in double or single quotes.

use std::io::{self, Write};

use serde::Serialize as _;
use serde_json::ser::Formatter;
use serde_json::{Serializer, Value};

/// Longest command in bytes.
const LENGTH_MAX: usize = 1 << 20;
/// Deepest nesting of lists and objects.
const DEPTH_MAX: usize = 64;

/// Bytes that were received, and how far they were understood.
#[derive(Default)]
pub struct InputBuffer {
    received: Vec<u8>,
    /// Number of scanned bytes.
    scanned: usize,
    depth: usize,
    quote: Option<u8>,
    escaped: bool,
    /// A value has begun.
    begun: bool,
}

/// Why the input is wrong.
#[derive(Debug, PartialEq, Eq)]
pub enum InputError {
    /// A value is not JSON; the next value may be.
    Json(String),
    /// A value never ends: the connection is to be closed.
    TooLong,
}

impl InputBuffer {
    /// Where to append what is received.
    pub fn buffer(&mut self) -> &mut Vec<u8> {
        &mut self.received
    }

    /// The next value, if it is complete.
    pub fn next(&mut self) -> Option<Result<Value, InputError>> {
        while let Some(&byte) = self.received.get(self.scanned) {
            self.scanned += 1;
            if self.quote.is_none() && !self.begun && byte.is_ascii_whitespace() {
                self.received.drain(..self.scanned);
                self.scanned = 0;
                continue;
            }
            if let Some(end) = self.look_at(byte) {
                return Some(self.take(end));
            }
        }
        if self.scanned > LENGTH_MAX {
            return Some(Err(InputError::TooLong));
        }
        None
    }

    /// Scans one more byte. Returns the length of the value, if the value ends there: after this byte, or before.
    fn look_at(&mut self, byte: u8) -> Option<usize> {
        if let Some(quote) = self.quote {
            match byte {
                // Control characters are not allowed in strings: the parser begins anew.
                0..0x20 => return Some(self.scanned),
                _ if self.escaped => self.escaped = false,
                b'\\' => self.escaped = true,
                _ if byte == quote => self.quote = None,
                _ => {}
            }
            let ends = self.quote.is_none() && self.depth == 0;
            return ends.then_some(self.scanned);
        }
        self.begun = true;
        match byte {
            b'"' | b'\'' => self.quote = Some(byte),
            b'{' | b'[' => {
                self.depth += 1;
                if self.depth > DEPTH_MAX {
                    return Some(self.scanned);
                }
            }
            b'}' | b']' => {
                self.depth = self.depth.saturating_sub(1);
                if self.depth == 0 {
                    return Some(self.scanned);
                }
            }
            // A word or a number outside of an object ends there; it is refused.
            b'\n' | b'\r' if self.depth == 0 => return Some(self.scanned),
            0..0x20 if !byte.is_ascii_whitespace() => return Some(self.scanned),
            _ => {}
        }
        None
    }

    fn take(&mut self, end: usize) -> Result<Value, InputError> {
        let rest = self.received.split_off(end);
        let text = std::mem::replace(&mut self.received, rest);
        let was_unfinished = self.quote.is_some();
        *self =
            InputBuffer { received: std::mem::take(&mut self.received), ..InputBuffer::default() };
        if was_unfinished {
            return Err(InputError::Json(
                "JSON parse error, a string is not terminated".to_string(),
            ));
        }
        let text = with_double_quotes(&text);
        serde_json::from_slice(&text).map_err(|_| {
            let text = text.trim_ascii();
            let is_word = text.first().is_some_and(u8::is_ascii_alphabetic);
            let what = if is_word { "invalid keyword" } else { "invalid input" };
            let shown = blockhaul_wire::printable(text, 40);
            InputError::Json(format!("JSON parse error, {what} '{shown}'"))
        })
    }
}

/// The text of a value, with its strings in double quotes.
fn with_double_quotes(text: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(text.len());
    let mut quote = None;
    let mut bytes = text.iter().copied();
    while let Some(byte) = bytes.next() {
        match (quote, byte) {
            (None, b'\'' | b'"') => {
                quote = Some(byte);
                out.push(b'"');
            }
            (Some(open), _) if byte == open => {
                quote = None;
                out.push(b'"');
            }
            (Some(_), b'"') => out.extend(b"\\\""),
            (Some(_), b'\\') => match bytes.next() {
                // JSON has no such escape.
                Some(b'\'') => out.push(b'\''),
                Some(next) => out.extend([b'\\', next]),
                None => out.push(byte),
            },
            _ => out.push(byte),
        }
    }
    out
}

/// QEMU's form of JSON: one line, with a space after each comma and colon. Scripts compare it as text.
struct QemuFormatter;

impl Formatter for QemuFormatter {
    fn begin_array_value<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        out.write_all(b": ")
    }
}

/// A line for a client: only ASCII, as in QEMU.
pub fn line(value: &Value) -> String {
    use std::fmt::Write as _;
    let mut text = Vec::new();
    let written = value.serialize(&mut Serializer::with_formatter(&mut text, QemuFormatter));
    // Writing a value to memory does not fail, and JSON is UTF-8.
    let text = written.ok().and_then(|()| String::from_utf8(text).ok()).unwrap_or_default();
    let mut line = String::with_capacity(text.len() + 2);
    for letter in text.chars() {
        if letter.is_ascii() {
            line.push(letter);
            continue;
        }
        let mut units = [0; 2];
        for unit in letter.encode_utf16(&mut units) {
            // Writing to a string does not fail.
            let _ = write!(line, "\\u{unit:04X}");
        }
    }
    line + "\r\n"
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn all(parts: &[&[u8]]) -> Vec<Result<Value, InputError>> {
        let mut input = InputBuffer::default();
        let mut found = Vec::new();
        for part in parts {
            input.buffer().extend_from_slice(part);
            while let Some(next) = input.next() {
                let ends = next == Err(InputError::TooLong);
                found.push(next);
                if ends {
                    return found;
                }
            }
        }
        found
    }

    #[test]
    fn values_come_in_any_parts_and_quotes() {
        assert_eq!(
            all(&[b"{\"a\"", b":1} {'b':'\"}'}"]),
            [Ok(json!({ "a": 1 })), Ok(json!({ "b": "\"}" }))]
        );
        assert_eq!(all(&[b"{'a': 'it\\'s'}"]), [Ok(json!({ "a": "it's" }))]);
        assert_eq!(all(&[b"  \r\n"]), []);
        assert_eq!(all(&["{'a': '\u{e4}\u{1F600}'}".as_bytes()]), [Ok(json!({ "a": "ä😀" }))]);
    }

    #[test]
    fn after_garbage_the_next_value_counts() {
        let found = all(&[b"x\n{'a':1}\n"]);
        assert!(matches!(&found[..], [Err(InputError::Json(_)), Ok(_)]), "{found:?}");
        let found = all(&[b"{\"a\n{'a':1}"]);
        assert!(matches!(&found[..], [Err(InputError::Json(_)), Ok(_)]), "{found:?}");
        let found = all(&[b"]}{'a':1}"]);
        assert!(matches!(found.last(), Some(Ok(_))), "{found:?}");
        assert!(matches!(&all(&[b"\xff\xfe\n"])[..], [Err(InputError::Json(_))]));
    }

    #[test]
    fn what_never_ends_is_refused() {
        assert_eq!(all(&[&[b'a'; LENGTH_MAX + 1]]), [Err(InputError::TooLong)]);
        let found = all(&[&[b'['; DEPTH_MAX + 1]]);
        assert!(matches!(&found[..], [Err(InputError::Json(_))]), "{found:?}");
    }

    #[test]
    fn lines_are_ascii_with_qemus_spaces() {
        let value = json!({ "a": [1, "x, y:z"], "b": {}, "c": [] });
        assert_eq!(line(&value), "{\"a\": [1, \"x, y:z\"], \"b\": {}, \"c\": []}\r\n");
        assert_eq!(line(&json!("ä😀")), "\"\\u00E4\\uD83D\\uDE00\"\r\n");
    }
}
