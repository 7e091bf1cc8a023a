//! Adds, removes and changes the persistent bitmaps of an image ("Bitmaps").
//!
//! Tables and bits that change are written to new clusters. The header then names a new directory,
//! and what the old one named is freed after that is durable: at any time the image has the old
//! bitmaps or the new ones. The header changes in steps that do not cross a sector of 512 bytes, each
//! of which leaves a whole header.

use std::sync::Arc;

use blockhaul_block::{Device, Error, Result};
use blockhaul_catalog::{Intent, OpenContext};

use super::bitmap::{self, BitmapEntry, PersistentBitmap, flag};
use super::chain::{CHANGE, ChainBase, open_base};
use super::edit::Edit;
use super::error::{unsupported, usage};
use super::header::{self, Area, BitmapDirectory, Header, autoclear};
use super::image::FileHeader;
use super::parts::ImageParts;
use super::words::bytes_of;
use crate::bytes::index;
use crate::storage::{len_of, read};

/// Default granularity: the cluster size within these bounds, in bytes, as QEMU's.
const GRANULARITY_DEFAULT: (u64, u64) = (4 << 10, 64 << 10);
/// Longest bitmap in bytes, without its table; QEMU allows as much.
const BITS_MAX: u64 = 512 << 20;
/// Extents that are read at a time.
const EXTENTS: usize = 4096;

/// What a device writes at once or not at all, in bytes.
const SECTOR: u64 = 512;

/// What is to be done with a bitmap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BitmapChange {
    /// Add it, without a dirty bit.
    Add {
        /// Bytes of the disk for each bit, a power of two from 512 to 2 GiB; `None` for the
        /// cluster size, but no less than 4 KiB and no more than 64 KiB.
        granularity: Option<u64>,
        /// Whether programs that write to the disk set its bits.
        enabled: bool,
    },
    /// Remove it, also if it is in use.
    Remove,
    /// Clear all of its bits.
    Clear,
    /// From now on programs that write to the disk set its bits.
    Enable,
    /// From now on its bits stay as they are.
    Disable,
    /// Set the bits that are set in others.
    Merge {
        /// Their names, at least one.
        sources: Vec<String>,
        /// The device with the qcow2 image that has them; `None`: the same image.
        from: Option<String>,
    },
}

/// Changes the bitmap `name` of the image that `description` names, which nothing else may use.
///
/// # Errors
/// [`Kind::Usage`](blockhaul_block::Kind::Usage) for a name, a granularity or a source that is not possible,
/// [`Kind::Unsupported`](blockhaul_block::Kind::Unsupported) for an image of version 2 and for a bitmap that is in use, and those of
/// the device.
pub async fn change_bitmap(
    context: &OpenContext,
    description: &str,
    name: &str,
    change: BitmapChange,
) -> Result<()> {
    let ChainBase { file, head, .. } = open_base(context, description, CHANGE, |_| false).await?;
    let file = file.device;
    let shown = file.facts().name.clone();
    let named = |error: Error| error.on(&shown);
    let found = find(&file, &head, name, &change).await.map_err(named)?;
    let foreign = match &change {
        BitmapChange::Merge { from: Some(from), .. } => {
            Some(open_base(context, from, Intent::READ, |_| false).await?)
        }
        _ => None,
    };
    let sources = match &change {
        BitmapChange::Merge { sources, .. } => match &foreign {
            Some(base) => sources_of(&base.file.device, &base.head, &head, sources).await,
            None => sources_of(&file, &head, &head, sources).await,
        },
        _ => Ok(Sources::default()),
    }?;
    let edit = Edit::open(&file, &head, None).await.map_err(named)?;
    let change = async |parts: &ImageParts, header: &Header| {
        let bitmaps = BitmapEditor { parts, header, file: &file };
        bitmaps.change(found, name, &change, &sources).await
    };
    edit.run(change).await.map_err(named)
}

/// The bitmaps of an image before a change.
struct BitmapList {
    entries: Vec<BitmapEntry>,
    /// Number of the bitmap that is changed; that of a new one is the number of entries.
    number: usize,
}

/// Reads the directory, and refuses a change that is not possible.
async fn find(
    file: &Arc<dyn Device>,
    head: &FileHeader,
    name: &str,
    change: &BitmapChange,
) -> Result<BitmapList> {
    let FileHeader { header, file_len } = head;
    if header.version < 3 {
        let way = "convert it to version 3 with \"qemu-img amend -o compat=1.1\"";
        return Err(unsupported("an image of version 2 cannot have bitmaps", way));
    }
    let entries = match header.bitmaps {
        Some(directory) => bitmap::entries(file, *file_len, header, directory).await?,
        None => Vec::new(),
    };
    let place = entries.iter().position(|entry| entry.name == name);
    if let BitmapChange::Add { granularity, .. } = change {
        if place.is_some() {
            return Err(usage(format!("there is a bitmap {name:?} already")));
        }
        if entries.len() >= index(bitmap::COUNT_MAX.into()) {
            return Err(usage(format!("there are {} bitmaps, and no more can be", entries.len())));
        }
        check_name(name)?;
        table_entries(header, bits_of(header, *granularity)?)?;
        return Ok(BitmapList { number: entries.len(), entries });
    }
    let Some(number) = place else { return Err(absent(&entries, name)) };
    if entries[number].flags & flag::IN_USE != 0 && *change != BitmapChange::Remove {
        return Err(unsupported(
            format!("bitmap {name:?} was not saved correctly by its last user"),
            "remove it, make a new one, and make a full backup",
        ));
    }
    Ok(BitmapList { entries, number })
}

fn absent(entries: &[BitmapEntry], name: &str) -> Error {
    let all: Vec<_> = entries.iter().map(|entry| format!("{:?}", entry.name)).collect();
    let there = if all.is_empty() { "none".into() } else { all.join(", ") };
    usage(format!("the image has no bitmap {name:?}: it has {there}"))
}

pub(super) fn check_name(name: &str) -> Result<()> {
    if !(1..=bitmap::NAME_MAX).contains(&name.len()) || name.contains('\0') {
        let len = name.len();
        return Err(usage(format!(
            "a name of {len} bytes: it has 1 to 1023, and none of them is 0"
        )));
    }
    Ok(())
}

/// log2 of a granularity.
pub(super) fn bits_of(header: &Header, granularity: Option<u64>) -> Result<u8> {
    let (least, most) = GRANULARITY_DEFAULT;
    let bytes = granularity.unwrap_or_else(|| header.cluster().clamp(least, most));
    let bits = u8::try_from(bytes.trailing_zeros()).unwrap_or(u8::MAX);
    if !bytes.is_power_of_two() || !bitmap::GRANULARITY_BITS.contains(&bits) {
        return Err(usage(format!("granularity {bytes}: it is a power of two, 512 to 2G")));
    }
    Ok(bits)
}

/// Entries of the table of a bitmap. QEMU demands at least one.
pub(super) fn table_entries(header: &Header, granularity_bits: u8) -> Result<u32> {
    let bytes = header.size.div_ceil(1 << granularity_bits).div_ceil(8);
    let entries = bytes.div_ceil(header.cluster()).max(1);
    let fits = bytes <= BITS_MAX && entries * 8 <= bitmap::TABLE_MAX;
    u32::try_from(entries).ok().filter(|_| fits).ok_or_else(|| {
        usage(format!(
            "a bitmap of {bytes} bytes, which is too long: choose a larger granularity than {}",
            1_u64 << granularity_bits
        ))
    })
}

/// Bitmaps that are merged into another.
#[derive(Default)]
struct Sources {
    /// The file that has them.
    file: Option<Arc<dyn Device>>,
    all: Vec<PersistentBitmap>,
}

/// Opens the bitmaps of `names` in an image, for one with the header of `target`.
async fn sources_of(
    file: &Arc<dyn Device>,
    head: &FileHeader,
    target: &FileHeader,
    names: &[String],
) -> Result<Sources> {
    let found = async {
        let FileHeader { header, file_len } = head;
        if header.size != target.header.size {
            let (own, other) = (header.size, target.header.size);
            return Err(usage(format!("the disk has {own} bytes, and the other one {other}")));
        }
        let entries = match header.bitmaps {
            Some(directory) => bitmap::entries(file, *file_len, header, directory).await?,
            None => Vec::new(),
        };
        let mut all = Vec::new();
        for name in names {
            let entry = entries.iter().find(|entry| entry.name == *name);
            let entry = entry.ok_or_else(|| absent(&entries, name))?;
            all.push(entry.open(file, *file_len, header).await?);
        }
        Ok(Sources { file: Some(file.clone()), all })
    };
    found.await.map_err(|error| error.on(&file.facts().name))
}

/// The tables and clusters that the header names no longer after a change.
#[derive(Default)]
pub(super) struct ObsoleteParts {
    /// Offset and length in bytes of tables.
    tables: Vec<(u64, u64)>,
    /// Offsets of single clusters.
    clusters: Vec<u64>,
}

/// The bitmaps of an image that is changed.
pub(super) struct BitmapEditor<'a> {
    pub(super) parts: &'a ImageParts,
    pub(super) header: &'a Header,
    pub(super) file: &'a Arc<dyn Device>,
}

impl BitmapEditor<'_> {
    async fn change(
        &self,
        found: BitmapList,
        name: &str,
        change: &BitmapChange,
        sources: &Sources,
    ) -> Result<()> {
        let BitmapList { mut entries, number } = found;
        let mut old = ObsoleteParts::default();
        match change {
            BitmapChange::Add { granularity, enabled } => {
                let bits = bits_of(self.header, *granularity)?;
                entries.push(self.new_entry(name, bits, *enabled).await?);
            }
            BitmapChange::Remove => {
                let entry = entries.remove(number);
                self.retire(&entry, &mut old).await?;
            }
            BitmapChange::Clear => {
                let entry = &mut entries[number];
                self.retire(entry, &mut old).await?;
                let count = table_entries(self.header, entry.granularity_bits)?;
                let table = self.parts.new_table(&vec![0; index(u64::from(count) * 8)]).await?;
                entry.set_table(table, count);
            }
            BitmapChange::Enable => entries[number].set_flags(|flags| flags | flag::AUTO),
            BitmapChange::Disable => entries[number].set_flags(|flags| flags & !flag::AUTO),
            BitmapChange::Merge { .. } => {
                let entry = &mut entries[number];
                let words = self.merged(entry, sources).await?;
                self.retire(entry, &mut old).await?;
                let (table, count) = self.new_words(&words).await?;
                entry.set_table(table, count);
            }
        }
        self.put(&entries, old).await
    }

    /// Replaces the directory, and frees what the new one names no longer.
    pub(super) async fn put(&self, entries: &[BitmapEntry], mut old: ObsoleteParts) -> Result<()> {
        self.put_directory(entries, &mut old).await?;
        for (offset, len) in old.tables {
            self.parts.drop_table_at(offset, len);
        }
        for offset in old.clusters {
            self.parts.drop_table_at(offset, self.header.cluster());
        }
        Ok(())
    }

    /// An entry for a new bitmap, and its table.
    async fn new_entry(
        &self,
        name: &str,
        granularity_bits: u8,
        enabled: bool,
    ) -> Result<BitmapEntry> {
        let count = table_entries(self.header, granularity_bits)?;
        let table = self.parts.new_table(&vec![0; index(u64::from(count) * 8)]).await?;
        let flags = if enabled { flag::AUTO } else { 0 };
        entry_of(name, granularity_bits, flags, (table, count))
    }

    /// Writes the table of a bitmap; its offset and number of entries.
    pub(super) async fn new_words(&self, words: &[u64]) -> Result<(u64, u32)> {
        let count = u32::try_from(words.len()).map_err(|_| Error::misfit())?;
        Ok((self.parts.new_table(&bytes_of(words)).await?, count))
    }

    /// Notes what an entry names, to be freed.
    ///
    /// # Errors
    /// If its table cannot be right.
    pub(super) async fn retire(&self, entry: &BitmapEntry, old: &mut ObsoleteParts) -> Result<()> {
        let file_len = self.parts.image.layout_now().file_len();
        old.clusters.extend(entry.clusters(self.file, file_len, self.header.cluster()).await?);
        old.tables.push((entry.table, u64::from(entry.table_entries) * 8));
        Ok(())
    }

    /// Writes the directory, and the header that names it.
    async fn put_directory(&self, entries: &[BitmapEntry], old: &mut ObsoleteParts) -> Result<()> {
        let mut bytes = Vec::new();
        for entry in entries {
            bytes.extend(&entry.raw);
            bytes.resize(bytes.len().next_multiple_of(8), 0);
        }
        let len = bytes.len() as u64;
        if len > bitmap::DIRECTORY_MAX {
            return Err(usage(format!("a directory of {len} bytes for all bitmaps is too long")));
        }
        let directory = match u32::try_from(entries.len()).map_err(|_| Error::misfit())? {
            0 => None,
            count => {
                let offset = self.parts.new_table(&bytes).await?;
                Some(BitmapDirectory { count, offset, len })
            }
        };
        self.name_directory(directory).await?;
        old.tables.extend(self.header.bitmaps.map(|directory| (directory.offset, directory.len)));
        Ok(())
    }

    /// Lets the header name this directory.
    async fn name_directory(&self, directory: Option<BitmapDirectory>) -> Result<()> {
        let first = self.header.cluster().min(len_of(&self.file.facts()));
        let first = read(self.file, 0, first).await?;
        let area = Area::find(&first)?;
        match (area.bitmaps, directory.map(header::bitmaps_extension)) {
            (Some(at), Some(new)) => {
                let data = at as u64 + 8;
                let crosses = data / SECTOR != (data + 23) / SECTOR;
                if crosses {
                    self.mark(&area, false).await?;
                }
                self.parts.put_header(data, &new[8..]).await?;
                self.mark(&area, true).await
            }
            (None, Some(new)) => {
                self.add_extension(&first, &area, &new).await?;
                self.mark(&area, true).await
            }
            (Some(at), None) => {
                self.mark(&area, false).await?;
                // Where another follows, it stays and counts for nothing.
                if at + Area::BITMAPS_LEN == area.end {
                    self.parts.put_header(at as u64, &[0; Area::END_LEN]).await?;
                }
                Ok(())
            }
            (None, None) => Ok(()),
        }
    }

    /// Adds the bitmaps extension behind the others.
    async fn add_extension(&self, first: &[u8], area: &Area, new: &[u8]) -> Result<()> {
        let cluster = self.header.cluster();
        let end = area.end as u64;
        let new_end = end + (Area::BITMAPS_LEN + Area::END_LEN) as u64;
        let no_room = || {
            let way = "convert the image to one with larger clusters";
            unsupported("the first cluster has no room for the directory of bitmaps", way)
        };
        if new_end > cluster {
            return Err(no_room());
        }
        if let Some((at, len)) = area.name
            && at < new_end
        {
            // The old name stays until the header names the new place.
            let place = new_end.max(at + len);
            if place + len > cluster {
                return Err(no_room());
            }
            let name = first.get(index(at)..index(at + len)).ok_or_else(Error::misfit)?;
            self.parts.put_header(place, name).await?;
            self.parts.put_header(header::BACKING_AT, &place.to_be_bytes()).await?;
        }
        // The extensions end before it until its first bytes are written.
        let mut rest = new[8..].to_vec();
        rest.extend([0; Area::END_LEN]);
        self.parts.put_header(end + 8, &rest).await?;
        self.parts.put_header(end, &new[..8]).await
    }

    /// Says in the header whether the bitmaps are consistent.
    async fn mark(&self, area: &Area, consistent: bool) -> Result<()> {
        let known = area.autoclear & autoclear::KNOWN;
        let features =
            if consistent { known | autoclear::BITMAPS } else { known & !autoclear::BITMAPS };
        self.parts.put_header(header::AUTOCLEAR_AT, &features.to_be_bytes()).await
    }

    /// The table of a bitmap with the bits of others, whose clusters are written.
    async fn merged(&self, entry: &BitmapEntry, sources: &Sources) -> Result<Vec<u64>> {
        let file_len = self.parts.image.layout_now().file_len();
        let own = entry.open(self.file, file_len, self.header).await?;
        let bits = entry.granularity_bits;
        let mut words = Vec::new();
        for number in 0..table_entries(self.header, bits)? {
            let (mut piece, end) = self.piece(number, bits);
            piece.add(&own, self.file, end).await?;
            for source in &sources.all {
                let file = sources.file.as_ref().ok_or_else(Error::misfit)?;
                piece.add(source, file, end).await?;
            }
            words.push(self.word(&piece).await?);
        }
        Ok(words)
    }

    /// The table of a bitmap in which these ranges are dirty, in order, whose clusters are written.
    pub(super) async fn table_of(&self, bits: u8, dirty: &[(u64, u64)]) -> Result<Vec<u64>> {
        let mut words = Vec::new();
        let mut rest = dirty;
        for number in 0..table_entries(self.header, bits)? {
            let (mut piece, end) = self.piece(number, bits);
            let before = rest.partition_point(|(at, len)| at.saturating_add(*len) <= piece.start);
            rest = &rest[before..];
            for &(at, len) in rest.iter().take_while(|(at, _)| *at < end) {
                let (from, to) = (at.max(piece.start), at.saturating_add(len).min(end));
                if from < to {
                    piece.set(from, to);
                }
            }
            words.push(self.word(&piece).await?);
        }
        Ok(words)
    }

    /// The part of the disk whose bits one entry of a table has, without dirty bits, and its end.
    fn piece(&self, number: u32, bits: u8) -> (BitmapPiece, u64) {
        let cluster = self.header.cluster();
        let covers = (u128::from(cluster) * 8) << bits;
        let place = |number: u64| {
            let byte = u128::from(number) * covers;
            u64::try_from(byte).unwrap_or(u64::MAX).min(self.header.size)
        };
        let start = place(number.into());
        (BitmapPiece { start, bits, bytes: vec![0; index(cluster)] }, place(u64::from(number) + 1))
    }

    /// The entry of a table for these bits, which are written if they are not all the same.
    async fn word(&self, piece: &BitmapPiece) -> Result<u64> {
        let all = piece.bytes.iter().fold((0, 0xff), |(any, all), &byte| (any | byte, all & byte));
        match all {
            (0, _) => Ok(0),
            (_, 0xff) => Ok(bitmap::ALL_ONES),
            _ => self.parts.new_table(&piece.bytes).await,
        }
    }
}

/// An entry of the directory for a bitmap with a table: its offset and number of entries.
pub(super) fn entry_of(
    name: &str,
    granularity_bits: u8,
    flags: u32,
    (table, count): (u64, u32),
) -> Result<BitmapEntry> {
    let name_len = u16::try_from(name.len()).map_err(|_| Error::misfit())?;
    let mut raw = table.to_be_bytes().to_vec();
    raw.extend(count.to_be_bytes());
    raw.extend(flags.to_be_bytes());
    // The type of dirty tracking bitmaps.
    raw.extend([1, granularity_bits]);
    raw.extend(name_len.to_be_bytes());
    raw.extend([0; 4]);
    raw.extend(name.as_bytes());
    raw.resize(raw.len().next_multiple_of(8), 0);
    BitmapEntry::parse(&raw).map(|(entry, _)| entry).ok_or_else(Error::misfit)
}

/// The bits of a part of the disk.
struct BitmapPiece {
    /// Where it begins on the disk, in bytes.
    start: u64,
    /// log2 of the granularity.
    bits: u8,
    bytes: Vec<u8>,
}

impl BitmapPiece {
    /// Sets the bits of what `bitmap` marks up to `end`.
    async fn add(
        &mut self,
        bitmap: &PersistentBitmap,
        file: &Arc<dyn Device>,
        end: u64,
    ) -> Result<()> {
        let mut at = self.start;
        while at < end {
            let extents = bitmap.extents(file, at, end, EXTENTS).await?;
            for extent in extents.runs() {
                let next = at.saturating_add(extent.len).min(end);
                if extent.state != 0 {
                    self.set(at, next);
                }
                at = next;
            }
            blockhaul_io::yield_now().await;
        }
        Ok(())
    }

    /// Sets the bits of a range of the disk, which is not empty.
    fn set(&mut self, at: u64, end: u64) {
        let first = index((at - self.start) >> self.bits);
        let end = index((end - self.start - 1) >> self.bits) + 1;
        let (head, tail) = (first.next_multiple_of(8).min(end), end - end % 8);
        for bit in (first..head).chain(tail.max(head)..end) {
            if let Some(byte) = self.bytes.get_mut(bit / 8) {
                *byte |= 1 << (bit % 8);
            }
        }
        if let Some(bytes) = self.bytes.get_mut(head / 8..tail / 8) {
            bytes.fill(0xff);
        }
    }
}

impl BitmapEntry {
    fn set_table(&mut self, table: u64, entries: u32) {
        (self.table, self.table_entries) = (table, entries);
        self.raw[..8].copy_from_slice(&table.to_be_bytes());
        self.raw[8..12].copy_from_slice(&entries.to_be_bytes());
    }

    pub(super) fn set_flags(&mut self, change: impl FnOnce(u32) -> u32) {
        self.flags = change(self.flags);
        self.raw[12..16].copy_from_slice(&self.flags.to_be_bytes());
    }
}
