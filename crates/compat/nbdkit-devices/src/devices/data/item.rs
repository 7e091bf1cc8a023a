//! The parsed description, as a tree, and its expansion into a device.

use std::ops::Range;
use std::sync::Arc;

use blockhaul_block::{Error, Kind, Result};

use blockhaul_backends::support::MemoryDevice;

/// Maximum bytes that a description may expand to, without zeroes; an item adds [`ITEM_COST`]
/// bytes. A second's work at most.
pub const WORK_MAX: u64 = 256 << 20;
/// Cost of placing one item, measured in bytes that could be copied instead.
const ITEM_COST: u64 = 32;
/// Bytes of a repeated item that are written at a time.
const CHUNK: usize = 64 << 10;
/// Maximum size of a device.
const SIZE_MAX: u64 = i64::MAX as u64;

/// A node of the description.
#[derive(Debug)]
pub struct Item {
    what: What,
    /// Its length, at most [`SIZE_MAX`].
    len: u64,
    /// It is all zero.
    zero: bool,
    /// Cost of its expansion, see [`WORK_MAX`].
    work: u64,
}

#[derive(Debug)]
enum What {
    Bytes(Vec<u8>),
    /// Items with their offsets in the group.
    Group(Vec<(u64, Arc<Item>)>),
    /// Repetitions of the item.
    Repeat(Arc<Item>),
    /// The item from this offset on.
    Slice(Arc<Item>, u64),
}

impl Item {
    fn new(what: What, len: u64, zero: bool, work: u64) -> Item {
        let work = if zero { ITEM_COST } else { work.saturating_add(ITEM_COST) };
        Item { what, len, zero, work }
    }

    /// These bytes.
    pub fn bytes(bytes: Vec<u8>) -> Item {
        let zero = bytes.iter().all(|&byte| byte == 0);
        let len = bytes.len() as u64;
        Item::new(What::Bytes(bytes), len, zero, len)
    }

    /// The item repeated `count` times.
    pub fn repeat(item: &Arc<Item>, count: u64) -> Result<Item> {
        let len = item.len.checked_mul(count).filter(|&len| len <= SIZE_MAX);
        let len = len.ok_or_else(too_large)?;
        let work = match item.what {
            What::Bytes(_) => len,
            _ => item.work.saturating_mul(count),
        };
        let zero = item.zero || count == 0;
        Ok(Item::new(What::Repeat(item.clone()), len, zero, work))
    }

    /// Bytes `range` of the item; `None` if it is shorter.
    pub fn slice(item: &Arc<Item>, range: Range<u64>) -> Option<Item> {
        let len = range.end.checked_sub(range.start)?;
        if range.end > item.len {
            return None;
        }
        let work = item.work_of(&range);
        Some(Item::new(What::Slice(item.clone(), range.start), len, item.zero, work))
    }

    /// Its length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Cost of the expansion of only this part.
    fn work_of(&self, part: &Range<u64>) -> u64 {
        let start = part.start;
        let end = part.end.min(self.len);
        if start >= end || self.zero {
            return ITEM_COST;
        }
        if start == 0 && end == self.len {
            return self.work;
        }
        let work = match &self.what {
            What::Bytes(_) => end - start,
            What::Group(items) => items.iter().fold(0, |sum: u64, (at, item)| {
                let inside = start.saturating_sub(*at)..end.saturating_sub(*at);
                sum.saturating_add(item.work_of(&inside))
            }),
            What::Repeat(item) if matches!(item.what, What::Bytes(_)) => end - start,
            What::Repeat(item) => {
                let touched = (end - 1) / item.len - start / item.len + 1;
                item.work.saturating_mul(touched)
            }
            What::Slice(item, from) => item.work_of(&(from + start..from + end)),
        };
        work.saturating_add(ITEM_COST)
    }
}

pub fn too_large() -> Error {
    Error::new(Kind::Usage, "data: reaches beyond 2^63 - 1 bytes")
}

/// The items of a group while it is parsed.
#[derive(Default)]
pub struct Group {
    items: Vec<(u64, Arc<Item>)>,
    at: u64,
    end: u64,
}

impl Group {
    /// Where the next item goes.
    pub fn at(&self) -> u64 {
        self.at
    }

    /// Continues at this offset; `None`: one that cannot be represented.
    pub fn seek(&mut self, to: Option<u64>) -> Result<()> {
        self.at = to.filter(|&to| to <= SIZE_MAX).ok_or_else(too_large)?;
        self.end = self.end.max(self.at);
        Ok(())
    }

    /// Adds an item.
    pub fn push(&mut self, mut item: Arc<Item>) -> Result<()> {
        let at = self.at;
        self.seek(at.checked_add(item.len))?;
        // Consecutive literal bytes become one item. Named items are shared instead: with copies,
        // nested names would need unbounded memory.
        if let Some(Item { what: What::Bytes(more), len: more_len, zero: more_zero, .. }) =
            Arc::get_mut(&mut item)
            && let Some((before, last)) = self.items.last_mut()
            && let Some(Item { what: What::Bytes(bytes), len, zero, work }) = Arc::get_mut(last)
            && *before + *len == at
        {
            bytes.append(more);
            *len += *more_len;
            *zero &= *more_zero;
            *work = if *zero { ITEM_COST } else { *len + ITEM_COST };
            return Ok(());
        }
        self.items.push((at, item));
        Ok(())
    }

    /// All of them as one item.
    pub fn finish(mut self) -> Arc<Item> {
        if let [(0, only)] = &self.items[..]
            && only.len == self.end
            && let Some((_, only)) = self.items.pop()
        {
            return only;
        }
        let zero = self.items.iter().all(|(_, item)| item.zero);
        let work = self.items.iter().fold(0_u64, |sum, (_, item)| sum.saturating_add(item.work));
        Arc::new(Item::new(What::Group(self.items), self.end, zero, work))
    }
}

/// A device of `size` bytes with the item as its contents.
///
/// # Errors
/// It expands to more than [`WORK_MAX`], or there is not enough memory.
pub fn unfold(all: &Item, name: String, size: u64) -> Result<MemoryDevice> {
    if all.work_of(&(0..size)) > WORK_MAX {
        let text = format!(
            "data: expands to more than {} MiB: use a file, or pattern: or sample:",
            WORK_MAX >> 20
        );
        return Err(Error::new(Kind::Usage, text));
    }
    let device = MemoryDevice::new(name, size).with_facts(|facts| facts.zeroed = false);
    Writer { device: &device }.item(all, 0, &(0..i128::from(size)))?;
    Ok(device)
}

/// Writes items to a zeroed device.
struct Writer<'a> {
    device: &'a MemoryDevice,
}

impl Writer<'_> {
    /// Writes the part of an item at `at` that lies within `clip`. A slice begins before its clip,
    /// and so may begin before the device.
    fn item(&self, item: &Item, at: i128, clip: &Range<i128>) -> Result<()> {
        let inside = at.max(clip.start)..(at + i128::from(item.len)).min(clip.end);
        if inside.is_empty() {
            return Ok(());
        }
        match &item.what {
            _ if item.zero => self.zero(&inside),
            What::Bytes(bytes) => {
                let part = (inside.start - at) as usize..(inside.end - at) as usize;
                self.bytes(&bytes[part], inside.start as u64)
            }
            What::Group(items) => {
                // A group overwrites its whole length, including gaps.
                self.zero(&inside)?;
                let mut items = items.iter();
                items.try_for_each(|(offset, item)| {
                    self.item(item, at + i128::from(*offset), &inside)
                })
            }
            What::Repeat(item) => match &item.what {
                What::Bytes(bytes) => self.repeated(bytes, at, &inside),
                _ => {
                    let len = i128::from(item.len);
                    let first = (inside.start - at) / len;
                    let last = (inside.end - 1 - at) / len;
                    (first..=last).try_for_each(|index| self.item(item, at + index * len, &inside))
                }
            },
            What::Slice(item, from) => self.item(item, at - i128::from(*from), &inside),
        }
    }

    fn zero(&self, range: &Range<i128>) -> Result<()> {
        self.device.zero_now(range.start as u64, (range.end - range.start) as u64)
    }

    /// Writes bytes; pages of zeroes take no memory.
    fn bytes(&self, mut bytes: &[u8], mut at: u64) -> Result<()> {
        while !bytes.is_empty() {
            let (here, rest) = bytes.split_at((CHUNK - at as usize % CHUNK).min(bytes.len()));
            if here.len() == CHUNK && here.iter().all(|&byte| byte == 0) {
                self.device.zero_now(at, CHUNK as u64)?;
            } else {
                self.device.write_now(at, here)?;
            }
            at += here.len() as u64;
            bytes = rest;
        }
        Ok(())
    }

    /// Fills a range with bytes that repeat from `at` on.
    fn repeated(&self, bytes: &[u8], at: i128, range: &Range<i128>) -> Result<()> {
        let phase = ((range.start - at) % bytes.len() as i128) as usize;
        // A few repetitions make a chunk, and the chunk is repeated.
        let len = (range.end - range.start) as u64;
        let most = (CHUNK / bytes.len()).max(1) as u64;
        let chunk = bytes.repeat(most.min(len / bytes.len() as u64 + 1) as usize);
        let mut at = range.start as u64;
        let mut left = len;
        let mut skip = phase;
        while left > 0 {
            let here = left.min((chunk.len() - skip) as u64);
            self.device.write_now(at, &chunk[skip..skip + here as usize])?;
            at += here;
            left -= here;
            skip = 0;
        }
        Ok(())
    }
}
