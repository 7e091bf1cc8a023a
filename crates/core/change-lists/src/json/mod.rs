//! Lists in JSON: values one after the other, each a range, a page, or an array of these.
//!
//! Names of members: `offset` and `length` (nbdinfo --map --json, rbd diff --format json), `start` and
//! `length` in `changedArea` (VMware's QueryChangedDiskAreas), `byte_offset` and `size_bytes` in
//! `block_metadata` (the SnapshotMetadata service of CSI; also in camel case, with numbers as strings),
//! `BlockIndex` in `ChangedBlocks` or `Blocks` (EBS).
//!
//! - `stream` reads values: arrays element by element, of objects only the members with a known name.
//! - `object` has the members of one object.
//! - `list` knows what objects mean.
//!
//! A range with two offsets is refused: `start` and `offset` of `qemu-img map --output=json` are places on the
//! disk and in its file. A list that may be absent, or null, is so only if no other member may be a list.
//! An object with two members of one name is refused: a reader of JSON keeps one of them.

mod list;
mod object;
mod stream;

use std::io::Read;

use serde::de::DeserializeSeed as _;
use serde_json::error::Category;

use self::list::{ListReader, Place};
use self::stream::ValueSeed;
use crate::ChangeList;
use crate::error::ChangeListError;

/// Reads a list that begins in this line.
pub(crate) fn parse(from: impl Read, line: usize) -> Result<ChangeList, ChangeListError> {
    let mut list = ListReader::default();
    let mut json = serde_json::Deserializer::from_reader(from);
    loop {
        match json.end() {
            Ok(()) => break,
            Err(error) if error.is_io() => return Err(ChangeListError::unreadable(&error.into())),
            // Another value follows.
            Err(_) => {}
        }
        let value = ValueSeed { list: &mut list, place: Place::Value }.deserialize(&mut json);
        value.map_err(|error| {
            let at = error.line() + line - 1;
            match list.take_fault() {
                Some(fault) => fault.at(at),
                None if error.classify() == Category::Io => {
                    ChangeListError::unreadable(&error.into())
                }
                None => ChangeListError::malformed(format!("not JSON, or cut off: {error}")).at(at),
            }
        })?;
    }
    list.finish()
}
