//! JSON in the layout of nbdinfo.

use std::io::{Result, Write};

use serde::Serialize;
use serde_json::Serializer;
use serde_json::ser::{CharEscape, Formatter};

/// Depth inside the list of exports, inside an export, and inside the list of its contexts.
const EXPORTS: usize = 2;
const EXPORT: usize = 3;
const CONTEXTS: usize = 4;
/// Depth inside an object in a list of an export, which is one line.
const INNER: usize = 5;

/// A value in the layout of nbdinfo.
pub(crate) fn json(value: &(impl Serialize + ?Sized)) -> String {
    let mut text = Vec::new();
    // Writing to memory does not fail, and names of members are strings.
    let _ = value.serialize(&mut Serializer::with_formatter(&mut text, JsonLayout::default()));
    String::from_utf8(text).unwrap_or_default()
}

/// One member and one value a line: those of an export after a tab, its contexts after two.
#[derive(Default)]
struct JsonLayout {
    /// Lists and objects around the place.
    depth: usize,
    /// The list that began last has no value.
    is_empty: bool,
}

impl JsonLayout {
    /// The end of the line before, and the tabs of this one.
    fn line<W: Write + ?Sized>(&self, writer: &mut W, first: bool, tabs: &[u8]) -> Result<()> {
        writer.write_all(if first { b"" } else { b",\n" })?;
        writer.write_all(tabs)
    }
}

impl Formatter for JsonLayout {
    fn begin_array<W: Write + ?Sized>(&mut self, writer: &mut W) -> Result<()> {
        self.depth += 1;
        self.is_empty = true;
        writer.write_all(b"[\n")
    }

    fn begin_array_value<W: Write + ?Sized>(&mut self, writer: &mut W, first: bool) -> Result<()> {
        self.is_empty = false;
        self.line(writer, first, if self.depth == CONTEXTS { b"\t\t" } else { b"\t" })
    }

    fn end_array<W: Write + ?Sized>(&mut self, writer: &mut W) -> Result<()> {
        let end: &[u8] = match self.depth {
            CONTEXTS => b"\n\t]",
            EXPORTS if !self.is_empty => b" ]",
            _ => b"]",
        };
        self.depth -= 1;
        writer.write_all(end)
    }

    fn begin_object<W: Write + ?Sized>(&mut self, writer: &mut W) -> Result<()> {
        self.depth += 1;
        writer.write_all(if self.depth == INNER { b"{" } else { b"{\n" })
    }

    fn begin_object_key<W: Write + ?Sized>(&mut self, writer: &mut W, first: bool) -> Result<()> {
        match self.depth {
            INNER if first => Ok(()),
            INNER => writer.write_all(b", "),
            EXPORT => self.line(writer, first, b"\t"),
            _ => self.line(writer, first, b""),
        }
    }

    fn begin_object_value<W: Write + ?Sized>(&mut self, writer: &mut W) -> Result<()> {
        writer.write_all(b": ")
    }

    fn end_object<W: Write + ?Sized>(&mut self, writer: &mut W) -> Result<()> {
        let end: &[u8] = match self.depth {
            INNER => b"}",
            EXPORT => b"\n\t}",
            _ => b"\n}\n",
        };
        self.depth -= 1;
        writer.write_all(end)
    }

    fn write_char_escape<W: Write + ?Sized>(
        &mut self,
        writer: &mut W,
        escape: CharEscape,
    ) -> Result<()> {
        let byte = match escape {
            CharEscape::Quote => return writer.write_all(b"\\\""),
            CharEscape::ReverseSolidus => return writer.write_all(b"\\\\"),
            CharEscape::Solidus => return writer.write_all(b"/"),
            CharEscape::Backspace => 0x08,
            CharEscape::Tab => b'\t',
            CharEscape::LineFeed => b'\n',
            CharEscape::FormFeed => 0x0c,
            CharEscape::CarriageReturn => b'\r',
            CharEscape::AsciiControl(byte) => byte,
        };
        write!(writer, "\\u{byte:04x}")
    }
}
