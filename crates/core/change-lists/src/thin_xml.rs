//! The XML that thin_delta and thin_dump print: `<superblock>` around `<diff>`, or around `<device>`, around ranges in
//! blocks.
//!
//! thin_delta lists the blocks that differ between two snapshots, thin_dump those that a device has. It prints
//! their number, too. Nothing else in their output says that it is complete, but that elements end.

use std::io::{BufRead, Read, Result as IoResult};

use quick_xml::events::{BytesStart, Event};

use crate::ChangeList;
use crate::error::ChangeListError;
use crate::kind::ListKind;
use crate::range_set::RangeSet;

/// Reads a list that begins in this line.
///
/// # Errors
/// With the line. The output of a program that has not ended lacks the end of an element.
pub(crate) fn parse(from: impl BufRead, line: usize) -> Result<ChangeList, ChangeListError> {
    let mut reader = quick_xml::Reader::from_reader(LineReader { from, line });
    let mut tags = TagReader::default();
    let mut buffer = Vec::new();
    loop {
        let line = reader.get_ref().line;
        let failed = |why: String| ChangeListError::malformed(why).at(line);
        buffer.clear();
        let event = match reader.read_event_into(&mut buffer) {
            Ok(event) => event,
            Err(quick_xml::Error::Io(error)) => return Err(ChangeListError::unreadable(&error)),
            Err(error) => return Err(failed(error.to_string())),
        };
        let is_open = matches!(event, Event::Start(_));
        match event {
            Event::Start(tag) | Event::Empty(tag) => {
                tags.tag(&tag).map_err(|error| error.at(line))?
            }
            Event::End(_) => {
                tags.depth = tags.depth.saturating_sub(1);
                continue;
            }
            Event::Eof => return tags.finish(),
            Event::Text(text) if !text.as_ref().trim_ascii().is_empty() => {
                return Err(failed("text that thin_delta does not print".to_string()));
            }
            Event::CData(_) | Event::GeneralRef(_) => {
                return Err(failed("text that thin_delta does not print".to_string()));
            }
            _ => continue,
        }
        tags.began = true;
        tags.depth += u32::from(is_open);
    }
}

/// What elements say.
#[derive(Default)]
struct TagReader {
    ranges: RangeSet,
    /// Bytes of a block.
    block: Option<u64>,
    kind: Option<ListKind>,
    /// Blocks that the device has, as it says, and as its mappings have.
    mapped: Option<u64>,
    listed: u64,
    /// Elements that are open, and whether the outermost one was.
    depth: u32,
    began: bool,
}

impl TagReader {
    fn tag(&mut self, tag: &BytesStart<'_>) -> Result<(), ChangeListError> {
        let failed = |why: &str| ChangeListError::malformed(why);
        if self.depth == 0 && self.began {
            return Err(failed("more after the end of the output of thin_delta"));
        }
        let is_dump = self.kind == Some(ListKind::ThinDump);
        match (&*name_of(tag), self.depth) {
            ("superblock", 0) => {
                // In sectors.
                let bytes = attribute(tag, "data_block_size")?.checked_mul(512);
                let bytes = bytes.filter(|&bytes| bytes > 0);
                self.block = Some(bytes.ok_or_else(|| failed("invalid data_block_size"))?);
            }
            ("diff", 1) if !is_dump => self.kind = Some(ListKind::ThinDelta),
            ("device", 1) if self.kind.is_none() => {
                self.kind = Some(ListKind::ThinDump);
                self.mapped = Some(attribute(tag, "mapped_blocks")?);
            }
            ("device", 1) => {
                return Err(failed("a list of more than one device: use thin_dump --dev-id"));
            }
            ("different" | "left_only" | "right_only", 2..) if !is_dump => {
                self.blocks(attribute(tag, "begin")?, attribute(tag, "length")?)?;
            }
            ("single_mapping", 2) if is_dump => self.blocks(attribute(tag, "origin_block")?, 1)?,
            ("range_mapping", 2) if is_dump => {
                self.blocks(attribute(tag, "origin_begin")?, attribute(tag, "length")?)?;
            }
            ("same" | "range", 2..) if !is_dump => {}
            (
                name @ ("superblock" | "diff" | "different" | "left_only" | "right_only" | "same"
                | "range" | "device" | "single_mapping" | "range_mapping"),
                depth,
            ) => {
                let place = if depth == 0 { "no superblock before" } else { "in another element:" };
                return Err(failed(&format!("{place} <{name}>")));
            }
            (other, _) => {
                let other = blockhaul_wire::printable(other.as_bytes(), 60);
                return Err(failed(&format!(
                    "unknown element <{other}> in the output of thin_delta"
                )));
            }
        }
        Ok(())
    }

    /// Adds blocks.
    fn blocks(&mut self, begin: u64, length: u64) -> Result<(), ChangeListError> {
        let failed = |why: &str| ChangeListError::malformed(why);
        let block = self.block.ok_or_else(|| failed("no superblock before"))?;
        let place = begin.checked_mul(block).zip(length.checked_mul(block));
        let (at, len) = place.ok_or_else(|| failed("the range ends beyond 2^63 - 1"))?;
        self.listed = self.listed.saturating_add(length);
        self.ranges.add_length(at, len)
    }

    /// The list, at the end of the file.
    fn finish(self) -> Result<ChangeList, ChangeListError> {
        if self.depth > 0 || !self.began {
            return Err(ChangeListError::malformed(
                "the output of thin_delta is cut off: the end of an element is missing: run it again, and check \
                 that it succeeds",
            ));
        }
        let kind = self.kind.ok_or_else(|| {
            ChangeListError::malformed("no <diff>, which thin_delta prints, and no <device>")
        })?;
        if let Some(mapped) = self.mapped.filter(|&mapped| mapped != self.listed) {
            return Err(ChangeListError::malformed(format!(
                "the device has {mapped} blocks (mapped_blocks), but {} are listed: is the output of thin_dump \
                 damaged?",
                self.listed
            )));
        }
        let block = self.block.unwrap_or(1);
        Ok(ChangeList { kind, ranges: self.ranges, covered: None, block, is_unfinished: false })
    }
}

/// The name of an element.
fn name_of(tag: &BytesStart<'_>) -> String {
    String::from_utf8_lossy(tag.name().as_ref()).into_owned()
}

/// The number in an attribute. An element with an attribute twice is refused.
fn attribute(tag: &BytesStart<'_>, name: &str) -> Result<u64, ChangeListError> {
    let mut value = None;
    for found in tag.attributes() {
        let found = found.map_err(|error| ChangeListError::malformed(error.to_string()))?;
        if found.key.as_ref() == name.as_bytes() {
            value = std::str::from_utf8(&found.value).ok().and_then(|value| value.parse().ok());
        }
    }
    value.ok_or_else(|| {
        ChangeListError::malformed(format!("no number {name} in <{}>", name_of(tag)))
    })
}

/// A reader that counts the lines that were consumed.
struct LineReader<R> {
    from: R,
    line: usize,
}

impl<R: BufRead> Read for LineReader<R> {
    fn read(&mut self, into: &mut [u8]) -> IoResult<usize> {
        let len = self.fill_buf()?.read(into)?;
        self.consume(len);
        Ok(len)
    }
}

impl<R: BufRead> BufRead for LineReader<R> {
    fn fill_buf(&mut self) -> IoResult<&[u8]> {
        self.from.fill_buf()
    }

    fn consume(&mut self, len: usize) {
        // What was filled before is there without an error.
        let buffer = self.from.fill_buf().unwrap_or_default();
        self.line += buffer[..len.min(buffer.len())].iter().filter(|&&byte| byte == b'\n').count();
        self.from.consume(len);
    }
}
