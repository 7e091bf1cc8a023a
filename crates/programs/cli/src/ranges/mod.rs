//! `--ranges`: lists of ranges as programs that know what has changed print them.
//!
//! JSON: values one after the other, each a range or an array of ranges, as objects with an offset and a
//! length. Names of members: `offset` and `length` (nbdinfo --map --json, rbd diff --format json), `start` and
//! `length` in `changedArea` (VMware's QueryChangedDiskAreas), `byte_offset` and `size_bytes` in
//! `block_metadata` (the SnapshotMetadata service of CSI; also in camel case, with numbers as strings).
//! XML: what `thin_delta` prints.

use std::io::Read;
use std::path::Path;

use quick_xml::events::{BytesStart, Event};
use serde_json::Value;

use crate::exit::{self, Failure, plain};

/// Maximum length of a list in bytes.
const LIST_MAX: u64 = 512 << 20;

/// Names of the members with an offset, and of those with a length.
const OFFSETS: [&str; 4] = ["offset", "start", "byte_offset", "byteOffset"];
const LENGTHS: [&str; 3] = ["length", "size_bytes", "sizeBytes"];
/// Names of the members that are lists of ranges.
const LISTS: [&str; 3] = ["changedArea", "block_metadata", "blockMetadata"];

/// Reads a list from a file, or from standard input for `-`: offsets and lengths in bytes, ascending, apart
/// from each other and not empty.
pub fn read(path: &Path) -> Result<Vec<(u64, u64)>, Failure> {
    let failed =
        |why: String| Failure::new(exit::OPEN, format!("--ranges: {}: {why}", path.display()));
    let mut text = String::new();
    let read = if path == Path::new("-") {
        std::io::stdin().lock().take(LIST_MAX + 1).read_to_string(&mut text)
    } else {
        std::fs::File::open(path).and_then(|file| file.take(LIST_MAX + 1).read_to_string(&mut text))
    };
    let len = read.map_err(|error| failed(plain(&error)))?;
    if len as u64 > LIST_MAX {
        return Err(failed(format!("the list is longer than {LIST_MAX} bytes")));
    }
    parse(&text).map_err(failed)
}

fn parse(text: &str) -> Result<Vec<(u64, u64)>, String> {
    let mut found = if text.trim_start().starts_with('<') { xml(text)? } else { json(text)? };
    found.sort_unstable();
    let mut ranges: Vec<(u64, u64)> = Vec::with_capacity(found.len());
    for (at, len) in found {
        // Ends were checked where the ranges were read.
        match ranges.last_mut() {
            Some(last) if last.0 + last.1 >= at => last.1 = last.1.max(at + len - last.0),
            _ => ranges.push((at, len)),
        }
    }
    Ok(ranges)
}

/// Adds a range that is not empty.
fn add(at: u64, len: u64, found: &mut Vec<(u64, u64)>) -> Result<(), String> {
    match at.checked_add(len).filter(|&end| i64::try_from(end).is_ok()) {
        None => Err(format!("{len} bytes at offset {at} end beyond 2^63 - 1")),
        Some(_) if len == 0 => Ok(()),
        Some(_) => {
            found.push((at, len));
            Ok(())
        }
    }
}

fn json(text: &str) -> Result<Vec<(u64, u64)>, String> {
    let mut found = Vec::new();
    let mut values = serde_json::Deserializer::from_str(text).into_iter::<Value>();
    while let Some(value) = values.next() {
        let value =
            value.map_err(|error| format!("neither JSON nor XML of thin_delta: {error}"))?;
        let line = || 1 + text[..values.byte_offset()].trim_end().matches('\n').count();
        collect(&value, true, &mut found).map_err(|why| format!("line {}: {why}", line()))?;
    }
    if found.is_empty() && text.trim().is_empty() {
        return Err("the file is empty: write an empty list as []".to_string());
    }
    Ok(found)
}

/// Adds the ranges of a value; `outer`: lists may be inside.
fn collect(value: &Value, outer: bool, found: &mut Vec<(u64, u64)>) -> Result<(), String> {
    let members = match value {
        Value::Array(entries) if outer => {
            return entries.iter().try_for_each(|entry| collect(entry, true, found));
        }
        Value::Object(members) => members,
        other => return Err(format!("not a range with offset and length: {}", shortened(other))),
    };
    if let Some(list) = LISTS.iter().find_map(|name| members.get(*name)) {
        return match list {
            Value::Array(entries) => {
                entries.iter().try_for_each(|entry| collect(entry, false, found))
            }
            Value::Null => Ok(()),
            other => Err(format!("not a list of ranges: {}", shortened(other))),
        };
    }
    // The map of a bitmap: what has not changed is listed, too.
    if members.get("description").and_then(Value::as_str) == Some("clean") {
        return Ok(());
    }
    let at = OFFSETS.iter().find_map(|name| members.get(*name));
    let len = LENGTHS.iter().find_map(|name| members.get(*name));
    match (at.and_then(number), len.and_then(number)) {
        (Some(at), Some(len)) => add(at, len, found),
        _ => Err(format!("not a range with offset and length: {}", shortened(value))),
    }
}

/// A number of bytes, which JSON made from protocol buffers writes as a string.
fn number(value: &Value) -> Option<u64> {
    value.as_u64().or_else(|| value.as_str()?.parse().ok())
}

fn shortened(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

fn xml(text: &str) -> Result<Vec<(u64, u64)>, String> {
    let mut reader = quick_xml::Reader::from_str(text);
    let mut found = Vec::new();
    let mut block = None;
    let mut inside = false;
    loop {
        let position = reader.buffer_position();
        let line = || 1 + text[..position as usize].matches('\n').count();
        let event = reader.read_event().map_err(|error| format!("line {}: {error}", line()))?;
        let (Event::Start(tag) | Event::Empty(tag)) = event else {
            if matches!(event, Event::Eof) {
                break;
            }
            continue;
        };
        let failed = |why: String| format!("line {}: {why}", line());
        match tag.name().as_ref() {
            "superblock" => {
                // In sectors.
                let sectors = attribute(&tag, "data_block_size").map_err(failed)?;
                let bytes = sectors.checked_mul(512).filter(|&bytes| bytes > 0);
                block = Some(bytes.ok_or_else(|| failed("invalid data_block_size".to_string()))?);
            }
            "diff" => inside = true,
            "different" | "left_only" | "right_only" => {
                let block = block.ok_or_else(|| failed("no superblock before".to_string()))?;
                let (begin, length) = attribute(&tag, "begin")
                    .and_then(|begin| Ok((begin, attribute(&tag, "length")?)))
                    .map_err(failed)?;
                let range = begin.checked_mul(block).zip(length.checked_mul(block));
                let (at, len) =
                    range.ok_or_else(|| failed("the range ends beyond 2^63 - 1".to_string()))?;
                add(at, len, &mut found).map_err(failed)?;
            }
            "same" | "range" => {}
            other => {
                return Err(failed(format!(
                    "unknown element <{other}> in the output of thin_delta"
                )));
            }
        }
    }
    if inside { Ok(found) } else { Err("no <diff>, which thin_delta prints".to_string()) }
}

fn attribute(tag: &BytesStart<'_>, name: &str) -> Result<u64, String> {
    let found = tag.try_get_attribute(name).map_err(|error| error.to_string())?;
    let value = found.and_then(|found| found.value.parse().ok());
    value.ok_or_else(|| format!("no number {name} in <{}>", tag.name().as_ref()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_other_programs_are_read() {
        let lists = [
            // JSON lines.
            "{\"offset\": 0, \"length\": 4096}\n{\"offset\": 8192, \"length\": 512}\n",
            // nbdinfo --map --json, of a bitmap.
            r#"[{ "offset": 0, "length": 4096, "type": 1, "description": "dirty" },
                { "offset": 4096, "length": 4096, "type": 0, "description": "clean" },
                { "offset": 8192, "length": 512, "type": 1, "description": "dirty" }]"#,
            // rbd diff --format json
            r#"[{"offset":0,"length":4096,"exists":"true"},{"offset":8192,"length":512,"exists":"false"}]"#,
            // VMware
            r#"{"startOffset": 0, "length": 9000, "changedArea":
                [{"start": 8192, "length": 512}, {"start": 0, "length": 4096}]}"#,
            // CSI
            r#"{"block_metadata_type": 1, "volume_capacity_bytes": 9000,
                "block_metadata": [{"byte_offset": 0, "size_bytes": 4096}]}
               {"blockMetadata": [{"byteOffset": "8192", "sizeBytes": "512"}]}"#,
        ];
        for text in lists {
            assert_eq!(parse(text).unwrap(), [(0, 4096), (8192, 512)], "{text}");
        }
        let thin = "<superblock uuid=\"\" time=\"1\" transaction=\"2\" data_block_size=\"8\" \
                    nr_data_blocks=\"0\">\n  <diff left=\"1\" right=\"2\">\n    <different begin=\"0\" \
                    length=\"1\"/>\n    <same begin=\"1\" length=\"3\"/>\n    <left_only begin=\"4\" \
                    length=\"2\"/>\n    <right_only begin=\"9\" length=\"1\"/>\n  </diff>\n</superblock>\n";
        assert_eq!(parse(thin).unwrap(), [(0, 4096), (16384, 8192), (36864, 4096)]);
        let joined = r#"[{"offset":10,"length":5},{"offset":0,"length":10},{"offset":3,"length":1},
                         {"offset":20,"length":0}]"#;
        assert_eq!(parse(joined).unwrap(), [(0, 15)]);
        assert_eq!(parse("[]").unwrap(), []);
        assert_eq!(parse(r#"{"changedArea": null}"#).unwrap(), []);
    }

    #[test]
    fn wrong_lists_are_refused_with_the_line() {
        for (text, said) in [
            ("", "the file is empty"),
            ("disk.raw", "neither JSON nor XML"),
            ("{\"offset\": 1, \"length\": 1}\n{\"offset\": 1}", "line 2: not a range"),
            ("[1, 2]", "not a range"),
            (r#"{"offset": -1, "length": 1}"#, "not a range"),
            (r#"{"offset": 9223372036854775807, "length": 1}"#, "beyond 2^63"),
            (r#"{"block_metadata": 5}"#, "not a list"),
            (r#"{"block_metadata": [[]]}"#, "not a range"),
            ("<html></html>", "unknown element <html>"),
            ("<superblock data_block_size=\"8\"/>", "no <diff>"),
            ("<superblock data_block_size=\"x\"/>", "no number data_block_size"),
            ("<diff><different begin=\"1\" length=\"1\"/></diff>", "no superblock"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(said), "{text}: {error}");
        }
    }
}
