//! Lists in JSON: values one after the other, each a range or an array of ranges, as objects with an offset
//! and a length.
//!
//! Names of members: `offset` and `length` (nbdinfo --map --json, rbd diff --format json), `start` and
//! `length` in `changedArea` (VMware's QueryChangedDiskAreas), `byte_offset` and `size_bytes` in
//! `block_metadata` (the SnapshotMetadata service of CSI; also in camel case, with numbers as strings).
//!
//! A range with two offsets is refused: `start` and `offset` of `qemu-img map --output=json` are places on the
//! disk and in its file. A list that may be absent, or null, is so only if no other member may be a list.
//! An object with two members of one name is refused: a reader of JSON keeps one of them.

use serde_json::error::Category;
use serde_json::{Map, Value};

use super::coverage::{Contents, ListCoverage, ListKind, range};
use super::unique::UniqueValue;

/// Names of the members with an offset, and of those with a length.
const OFFSETS: [&str; 4] = ["offset", "start", "byte_offset", "byteOffset"];
const LENGTHS: [&str; 3] = ["length", "size_bytes", "sizeBytes"];
/// Where an answer of VMware begins, and its list of ranges, which may be absent if it is empty.
const ANSWER: [&str; 2] = ["startOffset", "changedArea"];
/// Other members of an answer; pyVmomi prints the last two for each object.
const ANSWER_OTHERS: [&str; 3] = ["length", "dynamicProperty", "dynamicType"];
/// Names of the list of ranges in a message of CSI, of the size of the volume, and of the kind of message.
const MESSAGE: [&str; 2] = ["block_metadata", "blockMetadata"];
const CAPACITY: [&str; 2] = ["volume_capacity_bytes", "volumeCapacityBytes"];
const MESSAGE_KIND: [&str; 2] = ["block_metadata_type", "blockMetadataType"];
/// Names of the length of a range in a message.
const MESSAGE_LENGTH: [&str; 2] = ["size_bytes", "sizeBytes"];

pub(super) fn parse(text: &str) -> Result<Contents, String> {
    let mut reader = RangeReader::default();
    let mut values = serde_json::Deserializer::from_str(text).into_iter::<UniqueValue>();
    while let Some(value) = values.next() {
        let UniqueValue(value) = value.map_err(|error| match error.classify() {
            Category::Data => error.to_string(),
            _ => format!("not JSON, or cut off: {error}"),
        })?;
        let line = || 1 + text[..values.byte_offset()].trim_end().matches('\n').count();
        reader.value(&value).map_err(|why| format!("line {}: {why}", line()))?;
    }
    if reader.has_clean {
        let map = std::mem::take(&mut reader.map);
        reader.cover(ListKind::BitmapMap)?.extend(map);
    }
    Ok((reader.found, reader.coverage))
}

#[derive(Default)]
struct RangeReader {
    found: Vec<(u64, u64)>,
    coverage: Option<ListCoverage>,
    /// The ranges with a description, as nbdinfo prints them.
    map: Vec<(u64, u64)>,
    /// Some of them are clean: then they are the whole map of a bitmap.
    has_clean: bool,
}

impl RangeReader {
    /// The ranges for which a list of this kind is complete.
    fn cover(&mut self, kind: ListKind) -> Result<&mut Vec<(u64, u64)>, String> {
        let coverage = self.coverage.get_or_insert(ListCoverage { kind, ranges: Vec::new() });
        if coverage.kind == kind {
            Ok(&mut coverage.ranges)
        } else {
            Err("a list of more than one kind: copy each list by itself".to_string())
        }
    }

    /// Adds a value in which lists may be.
    fn value(&mut self, value: &Value) -> Result<(), String> {
        let members = match value {
            Value::Array(entries) => return entries.iter().try_for_each(|entry| self.value(entry)),
            Value::Object(members) => members,
            other => return Err(no_range(other)),
        };
        if ANSWER.iter().any(|name| members.contains_key(*name)) {
            self.answer(value, members)
        } else if MESSAGE.iter().chain(&CAPACITY).any(|name| members.contains_key(*name)) {
            self.message(members)
        } else {
            self.range(value)
        }
    }

    fn answer(&mut self, value: &Value, members: &Map<String, Value>) -> Result<(), String> {
        let place = ["startOffset", "length"].map(|name| members.get(name));
        let covered = self.cover(ListKind::VmwareAnswers)?;
        // An answer without them covers nothing.
        if let [Some(at), Some(len)] = place {
            let place = number(at).zip(number(len)).ok_or_else(|| no_range(value))?;
            covered.push(range(place.0, place.1)?);
        }
        let list = members.get("changedArea");
        let list = entries(members, list, "changedArea", &[&ANSWER, &ANSWER_OTHERS])?;
        list.iter().try_for_each(|entry| self.range(entry))
    }

    fn message(&mut self, members: &Map<String, Value>) -> Result<(), String> {
        let covered = self.cover(ListKind::CsiMessages)?;
        if let Some(capacity) = member(members, &CAPACITY)? {
            let size = number(capacity).ok_or_else(|| {
                format!("volume_capacity_bytes is not a number of bytes: {}", shortened(capacity))
            })?;
            match covered.first() {
                Some(&(_, before)) if before != size => {
                    return Err(format!(
                        "volume_capacity_bytes is {size}, and was {before} before"
                    ));
                }
                Some(_) => {}
                None => covered.push(range(0, size)?),
            }
        }
        // JSON made from protocol buffers omits an empty list.
        let list = member(members, &MESSAGE)?;
        let known: [&[&str]; 3] = [&MESSAGE, &CAPACITY, &MESSAGE_KIND];
        let list = entries(members, list, "block_metadata", &known)?;
        list.iter().try_for_each(|entry| self.message_range(entry))
    }

    /// Adds a range of a message, which omits the offset 0.
    fn message_range(&mut self, value: &Value) -> Result<(), String> {
        let members = value.as_object().ok_or_else(|| no_range(value))?;
        if member(members, &OFFSETS)?.is_some() {
            return self.range(value);
        }
        refuse_others(members, "byte_offset", &[&MESSAGE_LENGTH])?;
        let len = member(members, &MESSAGE_LENGTH)?.and_then(number);
        self.found.push(range(0, len.ok_or_else(|| no_range(value))?)?);
        Ok(())
    }

    fn range(&mut self, value: &Value) -> Result<(), String> {
        let members = value.as_object().ok_or_else(|| no_range(value))?;
        let at = member(members, &OFFSETS)?.and_then(number);
        let len = member(members, &LENGTHS)?.and_then(number);
        let (at, len) = at.zip(len).ok_or_else(|| no_range(value))?;
        let found = range(at, len)?;
        // The map of a bitmap: what has not changed is listed, too.
        let description = members.get("description").and_then(Value::as_str);
        if description.is_some() {
            self.map.push(found);
        }
        if description == Some("clean") {
            self.has_clean = true;
        } else {
            self.found.push(found);
        }
        Ok(())
    }
}

/// The member with one of these names.
///
/// # Errors
/// It has more than one.
fn member<'a>(
    members: &'a Map<String, Value>,
    names: &[&str],
) -> Result<Option<&'a Value>, String> {
    let mut found = names.iter().filter_map(|name| Some((name, members.get(*name)?)));
    let first = found.next();
    match (first, found.next()) {
        (Some((one, _)), Some((other, _))) => Err(format!(
            "ambiguous: the same object has \"{one}\" and \"{other}\": keep the one that is about the disk"
        )),
        _ => Ok(first.map(|(_, value)| value)),
    }
}

/// Refuses members that are not known, where `absent` may be omitted: they may stand for it. Names that begin
/// with `_` describe the object.
fn refuse_others(
    members: &Map<String, Value>,
    absent: &str,
    known: &[&[&str]],
) -> Result<(), String> {
    let is_known = |name: &str| name.starts_with('_') || known.iter().any(|of| of.contains(&name));
    match members.keys().find(|name| !is_known(name)) {
        Some(other) => Err(format!(
            "no {absent}, but the unknown member {}: is the answer an error, or the list renamed?",
            shortened(&Value::from(other.as_str()))
        )),
        None => Ok(()),
    }
}

/// The ranges of the list with this name. It may be absent or null, which is an empty list, if all other
/// members are `known`.
fn entries<'a>(
    members: &Map<String, Value>,
    list: Option<&'a Value>,
    name: &str,
    known: &[&[&str]],
) -> Result<&'a [Value], String> {
    match list {
        Some(Value::Array(entries)) => Ok(entries),
        None | Some(Value::Null) => refuse_others(members, name, known).map(|()| &[][..]),
        Some(other) => Err(format!("not a list of ranges: {}", shortened(other))),
    }
}

/// A number of bytes, which JSON made from protocol buffers writes as a string.
fn number(value: &Value) -> Option<u64> {
    value.as_u64().or_else(|| value.as_str()?.parse().ok())
}

fn no_range(value: &Value) -> String {
    format!("not a range with offset and length: {}", shortened(value))
}

fn shortened(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}
