//! Objects of each kind of list.

use super::object::{Member, Object};
use crate::ChangeList;
use crate::error::ChangeListError;
use crate::kind::ListKind;
use crate::range_set::RangeSet;

/// Names of the members with an offset, and of those with a length.
const OFFSETS: [&str; 4] = ["offset", "start", "byte_offset", "byteOffset"];
const LENGTHS: [&str; 3] = ["length", "size_bytes", "sizeBytes"];
/// Where an answer of VMware begins, and its list of ranges, which may be absent if it is empty.
const ANSWER: [&str; 2] = ["startOffset", "changedArea"];
/// Other members of an answer; pyVmomi prints the last two for each object.
const ANSWER_OTHERS: [&str; 4] = ["startOffset", "length", "dynamicProperty", "dynamicType"];
/// Names of the list of ranges in a message of CSI, of the size of the volume, and of the kind of message.
const MESSAGE: [&str; 2] = ["block_metadata", "blockMetadata"];
const CAPACITY: [&str; 2] = ["volume_capacity_bytes", "volumeCapacityBytes"];
const MESSAGE_KIND: [&str; 2] = ["block_metadata_type", "blockMetadataType"];
/// Names of the length of a range in a message.
const MESSAGE_LENGTH: [&str; 2] = ["size_bytes", "sizeBytes"];
/// Names of the list of blocks in a page of EBS: ListChangedBlocks, ListSnapshotBlocks.
const PAGE: [&str; 2] = ["ChangedBlocks", "Blocks"];
const PAGE_SIZES: [&str; 2] = ["BlockSize", "VolumeSize"];
/// Bytes in a unit of `VolumeSize`.
const GIB: u64 = 1 << 30;

/// Where a value is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// In the file, or in an array in it.
    Value,
    /// In the list of an answer of VMware.
    Area,
    /// In the list of a message of CSI.
    MessageRange,
    /// In the list of a page of EBS.
    Block,
}

impl Place {
    /// The place of the entries of the list with this name.
    pub(super) fn of_list(name: &str) -> Option<Place> {
        match name {
            "changedArea" => Some(Place::Area),
            _ if MESSAGE.contains(&name) => Some(Place::MessageRange),
            _ if PAGE.contains(&name) => Some(Place::Block),
            _ => None,
        }
    }

    fn kind(self) -> Option<ListKind> {
        match self {
            Place::Value => None,
            Place::Area => Some(ListKind::VmwareAnswers),
            Place::MessageRange => Some(ListKind::CsiMessages),
            Place::Block => Some(ListKind::EbsPages),
        }
    }
}

/// What the objects of a list have in common.
#[derive(Debug, Default)]
pub(super) struct ListReader {
    kind: Option<ListKind>,
    /// In bytes, or in blocks of pages of EBS, whose size may follow.
    ranges: RangeSet,
    /// The part for which answers, or messages, are complete.
    covered: RangeSet,
    /// The ranges with a description, as nbdinfo prints them.
    map: RangeSet,
    /// Some of them are clean: then they are the whole map of a bitmap.
    has_clean: bool,
    messages: MessageFacts,
    pages: PageFacts,
    fault: Option<ChangeListError>,
}

/// What messages of CSI say.
#[derive(Debug, Default)]
struct MessageFacts {
    /// `block_metadata_type`: 1 for blocks of one length, 2 for others.
    kind: Option<u64>,
    /// The lengths of ranges, up to three.
    lengths: Vec<BlockLength>,
}

/// A length of ranges.
#[derive(Debug)]
struct BlockLength {
    length: u64,
    /// The end of the ranges of this length, if all have one.
    end: Option<u64>,
}

/// What pages of EBS say.
#[derive(Debug, Default)]
struct PageFacts {
    block: Option<u64>,
    volume: Option<u64>,
    /// A page without a token has come.
    is_finished: bool,
}

impl ListReader {
    pub(super) fn set_fault(&mut self, why: String) {
        self.fault.get_or_insert_with(|| ChangeListError::malformed(why));
    }

    pub(super) fn take_fault(&mut self) -> Option<ChangeListError> {
        self.fault.take()
    }

    /// Keeps the kind of an error about a range.
    fn ranged(&mut self, added: Result<(), ChangeListError>) -> Result<(), String> {
        added.map_err(|error| {
            let text = error.to_string();
            self.fault.get_or_insert(error);
            text
        })
    }

    fn set_kind(&mut self, kind: ListKind) -> Result<(), String> {
        if *self.kind.get_or_insert(kind) == kind {
            Ok(())
        } else {
            Err("a list of more than one kind: copy each list by itself".to_string())
        }
    }

    /// Adds an object.
    pub(super) fn object(&mut self, place: Place, object: &Object) -> Result<(), String> {
        if let Some(kind) = place.kind() {
            self.set_kind(kind)?;
        }
        match place {
            Place::Area => self.range(object),
            Place::MessageRange => self.message_range(object),
            Place::Block => self.block(object),
            Place::Value if object.has_any(&ANSWER) => self.answer(object),
            Place::Value if object.has_any(&MESSAGE) || object.has_any(&CAPACITY) => {
                self.message(object)
            }
            Place::Value if object.has_any(&PAGE) || object.has_any(&PAGE_SIZES) => {
                self.page(object)
            }
            Place::Value if object.has("BlockIndex") => Err(
                "a block of EBS without its page, which has BlockSize and NextToken: save the whole pages"
                    .into(),
            ),
            Place::Value => {
                self.set_kind(ListKind::Objects)?;
                self.range(object)
            }
        }
    }

    fn answer(&mut self, object: &Object) -> Result<(), String> {
        self.set_kind(ListKind::VmwareAnswers)?;
        // An answer without them covers nothing.
        if let [Some(at), Some(len)] = ["startOffset", "length"].map(|name| object.get(name)) {
            let (at, len) = at.number().zip(len.number()).ok_or_else(|| no_range(object))?;
            let added = self.covered.add_length(at, len);
            self.ranged(added)?;
        }
        object.check_list(&ANSWER[1..], &[&ANSWER_OTHERS])
    }

    fn message(&mut self, object: &Object) -> Result<(), String> {
        self.set_kind(ListKind::CsiMessages)?;
        if let Some(capacity) = object.one_of(&CAPACITY)? {
            let size = capacity.number().ok_or_else(|| {
                format!("volume_capacity_bytes is not a number of bytes: {}", capacity.shown())
            })?;
            match self.covered.first_end() {
                Some(before) if before != size => {
                    return Err(format!(
                        "volume_capacity_bytes is {size}, and was {before} before"
                    ));
                }
                _ => {
                    let added = self.covered.add_length(0, size);
                    self.ranged(added)?;
                }
            }
        }
        if let Some(kind) = object.one_of(&MESSAGE_KIND)? {
            let number = match kind {
                Member::Number(number @ 1..=2) => *number,
                Member::Text(text) if text == "FIXED_LENGTH" => 1,
                Member::Text(text) if text == "VARIABLE_LENGTH" => 2,
                other => {
                    return Err(format!(
                        "block_metadata_type is {}, not FIXED_LENGTH or VARIABLE_LENGTH",
                        other.shown()
                    ));
                }
            };
            if *self.messages.kind.get_or_insert(number) != number {
                return Err(
                    "block_metadata_type is another one than before: save the messages of one call"
                        .into(),
                );
            }
        }
        // JSON made from protocol buffers omits an empty list.
        object.check_list(&MESSAGE, &[&CAPACITY, &MESSAGE_KIND])
    }

    /// Adds a range of a message, which omits the offset 0.
    fn message_range(&mut self, object: &Object) -> Result<(), String> {
        let offset = object.one_of(&OFFSETS)?;
        if offset.is_none() {
            object.check_others("byte_offset", &[&MESSAGE_LENGTH])?;
        }
        let at = offset.map_or(Some(0), Member::number);
        let lengths = if offset.is_none() { &MESSAGE_LENGTH[..] } else { &LENGTHS };
        let len = object.one_of(lengths)?.and_then(Member::number);
        let (at, len) = at.zip(len).ok_or_else(|| no_range(object))?;
        let added = self.ranges.add_length(at, len);
        self.ranged(added)?;
        self.messages.add_length(len, at + len);
        Ok(())
    }

    fn page(&mut self, object: &Object) -> Result<(), String> {
        self.set_kind(ListKind::EbsPages)?;
        match object.one_of(&PAGE)? {
            Some(Member::List) => {}
            Some(other) => return Err(format!("not a list of blocks: {}", other.shown())),
            None => {
                return Err(
                    "a page of EBS without ChangedBlocks or Blocks: save the whole pages".into()
                );
            }
        }
        let number = |name: &str| match object.get(name) {
            None => Ok(None),
            Some(member) => match member.number().filter(|&number| number > 0) {
                Some(number) => Ok(Some(number)),
                None => Err(format!("{name} is not a positive number: {}", member.shown())),
            },
        };
        let block =
            number("BlockSize")?.ok_or("a page of EBS without BlockSize: save the whole pages")?;
        same("BlockSize", &mut self.pages.block, block)?;
        if let Some(gib) = number("VolumeSize")? {
            same("VolumeSize", &mut self.pages.volume, gib)?;
            let size = gib.checked_mul(GIB).ok_or_else(|| format!("VolumeSize is {gib} GiB"))?;
            let added = self.covered.add_length(0, size);
            self.ranged(added)?;
        }
        if self.pages.is_finished {
            return Err(
                "a page follows the one without NextToken, which is the last: pass the pages of one listing in \
                 their order, each once"
                    .into(),
            );
        }
        self.pages.is_finished = match object.get("NextToken") {
            None | Some(Member::Null) => true,
            Some(Member::Text(token)) => token.is_empty(),
            Some(other) => return Err(format!("NextToken is not a text: {}", other.shown())),
        };
        Ok(())
    }

    fn block(&mut self, object: &Object) -> Result<(), String> {
        let index = object.get("BlockIndex").and_then(Member::number);
        let index =
            index.ok_or_else(|| format!("not a block with BlockIndex: {}", object.shown()))?;
        let added = self.ranges.add_length(index, 1);
        self.ranged(added)
    }

    fn range(&mut self, object: &Object) -> Result<(), String> {
        let at = object.one_of(&OFFSETS)?.and_then(Member::number);
        let len = object.one_of(&LENGTHS)?.and_then(Member::number);
        let (at, len) = at.zip(len).ok_or_else(|| no_range(object))?;
        // The map of a bitmap: what has not changed is listed, too.
        let is_clean = match object.get("description") {
            Some(Member::Text(description)) => {
                let added = self.map.add_length(at, len);
                self.ranged(added)?;
                description == "clean"
            }
            _ => false,
        };
        self.has_clean |= is_clean;
        let added = if is_clean { Ok(()) } else { self.ranges.add_length(at, len) };
        self.ranged(added)
    }

    /// The list, once all objects were added.
    pub(super) fn finish(self) -> Result<ChangeList, ChangeListError> {
        let ListReader { kind, mut ranges, covered, map, has_clean, messages, pages, .. } = self;
        let mut is_unfinished = false;
        let (kind, covered) = match kind.unwrap_or(ListKind::Objects) {
            ListKind::Objects if has_clean => (ListKind::BitmapMap, Some(map)),
            ListKind::Objects => (ListKind::Objects, None),
            ListKind::CsiMessages => {
                messages.check(covered.first_end())?;
                (ListKind::CsiMessages, Some(covered))
            }
            ListKind::EbsPages => {
                // Each page has it.
                ranges.scale(pages.block.unwrap_or(1))?;
                is_unfinished = !pages.is_finished;
                (ListKind::EbsPages, Some(covered))
            }
            kind => (kind, Some(covered)),
        };
        Ok(ChangeList { kind, ranges, covered, block: 1, is_unfinished })
    }
}

impl MessageFacts {
    /// Notes a range of this length.
    fn add_length(&mut self, length: u64, end: u64) {
        if let Some(known) = self.lengths.iter_mut().find(|known| known.length == length) {
            known.end = known.end.filter(|&known| known == end);
        } else if self.lengths.len() < 3 {
            self.lengths.push(BlockLength { length, end: Some(end) });
        }
    }

    /// Checks that blocks of a fixed length have one, but for the last block of the volume.
    fn check(mut self, capacity: Option<u64>) -> Result<(), ChangeListError> {
        self.lengths.sort_by_key(|known| known.length);
        match (self.kind, &self.lengths[..]) {
            (Some(1), [last, _]) if last.end.is_some() && last.end == capacity => Ok(()),
            (Some(1), [one, other, ..]) => Err(ChangeListError::malformed(format!(
                "block_metadata_type is FIXED_LENGTH, but blocks have {} and {} bytes: is the list damaged, or of \
                 several calls?",
                one.length, other.length
            ))),
            _ => Ok(()),
        }
    }
}

/// Sets what all pages must have in common.
fn same(name: &str, fact: &mut Option<u64>, value: u64) -> Result<(), String> {
    let before = *fact.get_or_insert(value);
    if before == value {
        Ok(())
    } else {
        Err(format!("{name} is {value}, and was {before} before: pass the pages of one listing"))
    }
}

fn no_range(object: &Object) -> String {
    format!("not a range with offset and length: {}", object.shown())
}
