//! Makes internal snapshots, deletes them, and gives the disk their contents ("Snapshots").
//!
//! A snapshot is a copy of the L1 table: it shares L2 tables and data with the disk, whose entries
//! say by a flag that they may be written in place only while nothing else refers to them. The header
//! changes when everything that it names is durable, and what it named before is freed after that. An
//! interruption leaves lost clusters, and flags that contradict refcounts: both are harmless, and
//! [`mod@super::check`] repairs them.

use std::sync::Arc;

use blockhaul_block::{Device, Error, Kind, Result};
use blockhaul_catalog::OpenContext;

use super::chain::{CHANGE, ChainBase, open_base};
use super::edit::Edit;
use super::entry::{COPIED, EntryLayout};
use super::error::{damaged, unsupported, usage};
use super::header::{Header, L1Place, check_l1_len, incompatible};
use super::image::{FileHeader, l1_table};
use super::parts::ImageParts;
use super::snapshot::{self, COUNT_MAX, InternalSnapshot};
use super::words::bytes_of;
use super::write::refuse_bitmaps;
use crate::bytes::{be16, be32, index};
use crate::storage;

/// Offsets in the header: the size of the disk, with the place of the L1 table after it, and the number
/// of snapshots, with the place of their table after it.
const SIZE_AT: u64 = 24;
const SNAPSHOTS_AT: u64 = 60;
/// Longest name in bytes: its length has 16 bits.
const NAME_MAX: usize = 65535;

/// What is to be done with a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SnapshotChange {
    /// Make it, of the disk as it is. `date`: seconds since 1970, and nanoseconds.
    Create {
        /// The time that the snapshot tells.
        date: (u32, u32),
    },
    /// Give the disk its contents and its size.
    Apply,
    /// Delete it.
    Delete,
}

/// Changes the snapshot `name` of the image that `description` names, which nothing else may use. A
/// name that is not found is taken for a number, except by [`SnapshotChange::Delete`].
///
/// # Errors
/// [`Kind::NotFound`] if there is no such snapshot, [`Kind::Usage`] for a name that is too long,
/// [`Kind::Unsupported`] if the image has an external data file, refcounts of 1 bit, or bitmaps that
/// would become wrong, and those of the device.
pub async fn change_snapshot(
    context: &OpenContext,
    description: &str,
    name: &str,
    change: SnapshotChange,
) -> Result<()> {
    let ChainBase { file, head, .. } = open_base(context, description, CHANGE, |_| false).await?;
    let file = file.device;
    let shown = file.facts().name.clone();
    let named = |error: Error| error.on(&shown);
    if head.header.has(incompatible::DATA_FILE) {
        let way = "copy the disk to an image without one";
        return Err(named(unsupported("the image has an external data file", way)));
    }
    let done = async {
        let (all, table_len) = snapshot::list_with_len(&file, head.file_len, &head.header).await?;
        let table = SnapshotList { file: &file, header: &head.header, all, len: table_len };
        let edit = Edit::open(&file, &head, None).await?;
        let file_len = match change {
            SnapshotChange::Create { date } => {
                table.check_new(name)?;
                return edit.run(async |parts, _| table.create(parts, name, date).await).await;
            }
            SnapshotChange::Apply => {
                let layout = EntryLayout::new(&head.header, head.file_len, head.file_len);
                refuse_bitmaps(&file, &head.header, layout).await?;
                let wanted = snapshot::find(table.all.clone(), name)?;
                let size = head.header.size;
                if head.header.bitmaps.is_some() && wanted.size.is_some_and(|old| old != size) {
                    let what = "the image has bitmaps, and the snapshot another size";
                    return Err(unsupported(what, "remove the bitmaps first"));
                }
                edit.run(async |parts, _| table.apply(parts, &wanted).await).await?
            }
            SnapshotChange::Delete => {
                let number = table.all.iter().position(|one| one.name == name);
                let none = || Error::new(Kind::NotFound, format!("qcow2: no snapshot {name:?}"));
                let number = number.ok_or_else(none)?;
                edit.run(async |parts, _| table.delete(parts, number).await).await?
            }
        };
        // What has one reference now may be written in place again.
        let head = FileHeader { file_len, ..FileHeader::read(&file).await? };
        let edit = Edit::open(&file, &head, None).await?;
        edit.run(async |parts, _| parts.set_flags().await).await
    };
    done.await.map_err(named)
}

/// Gives the entries of snapshots the size of their disk, where it is missing: version 3 of the format
/// demands it.
///
/// # Errors
/// If the table is damaged, and those of the device.
pub(super) async fn add_sizes(file: &Arc<dyn Device>, head: &FileHeader) -> Result<()> {
    let (all, len) = snapshot::list_with_len(file, head.file_len, &head.header).await?;
    if all.iter().all(|one| one.size.is_some()) {
        return Ok(());
    }
    let table = SnapshotList { file, header: &head.header, all, len };
    let old = table.bytes().await?;
    let mut new = Vec::new();
    for one in &table.all {
        let entry = old.get(index(one.range.0)..index(one.range.1)).ok_or_else(Error::misfit)?;
        new.extend(with_size(entry, one, head.header.size).ok_or_else(Error::misfit)?);
    }
    let edit = Edit::open(file, head, None).await?;
    edit.run(async |parts, _| table.put(parts, &new, table.all.len()).await).await
}

/// The entry of a snapshot, with the size of its disk; `None` if it is cut short.
fn with_size(entry: &[u8], one: &InternalSnapshot, size: u64) -> Option<Vec<u8>> {
    if one.size.is_some() {
        return Some(entry.to_vec());
    }
    let extra = index(be32(entry, 36)?.into());
    let names = usize::from(be16(entry, 12)?) + usize::from(be16(entry, 14)?);
    let start = 40_usize.checked_add(extra)?;
    let mut new = entry.get(..36)?.to_vec();
    new.extend(24_u32.to_be_bytes());
    new.extend(one.facts.vm_state.to_be_bytes());
    new.extend(size.to_be_bytes());
    // Instructions were not counted.
    new.extend(u64::MAX.to_be_bytes());
    new.extend(entry.get(start..start.checked_add(names)?)?);
    new.resize(new.len().next_multiple_of(8), 0);
    Some(new)
}

/// The table of snapshots.
struct SnapshotList<'a> {
    file: &'a Arc<dyn Device>,
    header: &'a Header,
    all: Vec<InternalSnapshot>,
    /// Length in bytes.
    len: u64,
}

impl SnapshotList<'_> {
    fn check_new(&self, name: &str) -> Result<()> {
        if name.len() > NAME_MAX {
            return Err(usage(format!("a name of {} bytes (at most {NAME_MAX})", name.len())));
        }
        if self.all.len() >= index(COUNT_MAX.into()) {
            return Err(usage(format!("the image has {} snapshots already", self.all.len())));
        }
        if self.header.refcounts.order == 0 {
            let way = "copy the disk to an image with wider ones";
            return Err(unsupported("an image with refcounts of 1 bit has no snapshots", way));
        }
        Ok(())
    }

    /// The bytes of the table, with padding after the last entry.
    async fn bytes(&self) -> Result<Vec<u8>> {
        if self.len == 0 {
            return Ok(Vec::new());
        }
        // The padding may be behind the end of the file.
        let at = self.header.snapshots.offset;
        let there = self.len.min(storage::len_of(&self.file.facts()).saturating_sub(at));
        let mut bytes = storage::read(self.file, at, there).await?.to_vec();
        bytes.resize(index(self.len), 0);
        Ok(bytes)
    }

    async fn create(&self, parts: &ImageParts, name: &str, date: (u32, u32)) -> Result<()> {
        let entries = self.header.l1.entries;
        let mut l1 = Vec::with_capacity(index(entries.into()));
        for number in 0..u64::from(entries) {
            let entry = parts.image.l1_entry(number);
            l1.push(entry & !COPIED);
            if let Some(table) = parts.image.layout_now().l2_table(number, entry)? {
                parts.make_room().await?;
                parts.raise_tree(table).await?;
                parts.share(number, table).await?;
            }
        }
        let place = L1Place { offset: parts.new_table_or_none(&l1).await?, entries };
        let numbers = self.all.iter().filter_map(|one| one.id.parse::<u64>().ok());
        let id = numbers.max().unwrap_or(0).saturating_add(1).to_string();
        let mut bytes = self.bytes().await?;
        bytes.extend(entry(place, self.header.size, (&id, name), date)?);
        self.put(parts, &bytes, self.all.len() + 1).await
    }

    /// Deletes a snapshot; the length of the file.
    async fn delete(&self, parts: &ImageParts, number: usize) -> Result<u64> {
        let old = self.all.get(number).ok_or_else(Error::misfit)?;
        let l1 = self.l1_of(parts, old).await?;
        let mut bytes = self.bytes().await?;
        bytes.drain(index(old.range.0)..index(old.range.1));
        self.put(parts, &bytes, self.all.len() - 1).await?;
        parts.drop_trees(&l1).await?;
        parts.drop_table_at(old.l1.offset, u64::from(old.l1.entries) * 8);
        Ok(parts.image.layout_now().file_len())
    }

    /// Gives the disk the contents of a snapshot; the length of the file.
    async fn apply(&self, parts: &ImageParts, wanted: &InternalSnapshot) -> Result<u64> {
        let mut l1 = self.l1_of(parts, wanted).await?;
        l1.resize(l1.len().max(index(self.header.l1.entries.into())), 0);
        for (number, entry) in (0..).zip(&mut l1) {
            *entry &= !COPIED;
            if let Some(table) = parts.image.layout_now().l2_table(number, *entry)? {
                parts.make_room().await?;
                parts.raise_tree(table).await?;
            }
        }
        let entries = u32::try_from(l1.len()).map_err(|_| Error::misfit())?;
        let place = L1Place { offset: parts.new_table_or_none(&l1).await?, entries };
        check_l1_len(place)?;
        let size = wanted.size.unwrap_or(self.header.size);
        let mut fields = size.to_be_bytes().to_vec();
        // The image is not encrypted.
        fields.extend([0; 4]);
        fields.extend(entries.to_be_bytes());
        fields.extend(place.offset.to_be_bytes());
        let old: Vec<u64> = (0..u64::from(self.header.l1.entries))
            .map(|number| parts.image.l1_entry(number))
            .collect();
        parts.put_header(SIZE_AT, &fields).await?;
        parts.drop_trees(&old).await?;
        let L1Place { offset, entries } = self.header.l1;
        parts.drop_table_at(offset, u64::from(entries) * 8);
        Ok(parts.image.layout_now().file_len())
    }

    /// The L1 table of a snapshot.
    async fn l1_of(&self, parts: &ImageParts, one: &InternalSnapshot) -> Result<Vec<u64>> {
        let layout = parts.image.layout_now();
        let covers = u64::from(one.l1.entries).saturating_mul(layout.l2_covers());
        l1_table(self.file, layout, one.l1, covers).await
    }

    /// Writes a table of `count` snapshots, and the header that names it.
    async fn put(&self, parts: &ImageParts, bytes: &[u8], count: usize) -> Result<()> {
        let offset = if bytes.is_empty() { 0 } else { parts.new_table(bytes).await? };
        let count = u32::try_from(count).map_err(|_| Error::misfit())?;
        let mut fields = count.to_be_bytes().to_vec();
        fields.extend(offset.to_be_bytes());
        parts.put_header(SNAPSHOTS_AT, &fields).await?;
        parts.drop_table_at(self.header.snapshots.offset, self.len);
        Ok(())
    }
}

/// An entry of the table, with the extra data of QEMU: the length of the saved state of the virtual
/// machine, the size of the disk, and a number of instructions.
fn entry(l1: L1Place, size: u64, (id, name): (&str, &str), date: (u32, u32)) -> Result<Vec<u8>> {
    let short = |text: &str| u16::try_from(text.len()).map_err(|_| Error::misfit());
    let mut bytes = l1.offset.to_be_bytes().to_vec();
    bytes.extend(l1.entries.to_be_bytes());
    bytes.extend(short(id)?.to_be_bytes());
    bytes.extend(short(name)?.to_be_bytes());
    bytes.extend(date.0.to_be_bytes());
    bytes.extend(date.1.to_be_bytes());
    // The clock of the virtual machine, and the length of its state in 32 bits.
    bytes.extend([0; 12]);
    bytes.extend(24_u32.to_be_bytes());
    bytes.extend([0; 8]);
    bytes.extend(size.to_be_bytes());
    bytes.extend([0; 8]);
    bytes.extend(id.as_bytes());
    bytes.extend(name.as_bytes());
    bytes.resize(bytes.len().next_multiple_of(8), 0);
    Ok(bytes)
}

impl ImageParts {
    /// Writes an L1 table; offset 0 for one without entries.
    async fn new_table_or_none(&self, words: &[u64]) -> Result<u64> {
        if words.is_empty() { Ok(0) } else { self.new_table(&bytes_of(words)).await }
    }

    /// Counts one more reference to an L2 table and to each cluster that its entries name.
    async fn raise_tree(&self, table: u64) -> Result<()> {
        let layout = self.image.layout;
        let words = self.table_words(table).await?;
        let entries = words.iter().step_by(index(layout.entry_words()));
        let all = entries.filter_map(|&entry| layout.refers_to(entry));
        for (first, count) in all.chain([(table >> layout.cluster_bits, 1)]) {
            self.raise(first, count).await?;
        }
        Ok(())
    }

    /// Notes in the entries of the disk that an L2 table and its clusters have further references.
    async fn share(&self, number: u64, table: u64) -> Result<()> {
        let per_table = self.image.layout.l2_entries();
        let clusters = number * per_table..(number + 1) * per_table;
        self.set_l2(table, clusters, |_, words| {
            words[0] &= !COPIED;
            None
        })
        .await?;
        self.set_l1(number, table, None).await
    }

    /// Gives up one reference to each L2 table of an L1 table and to what its entries name, when
    /// nothing in the file leads there.
    async fn drop_trees(&self, l1: &[u64]) -> Result<()> {
        let layout = self.image.layout;
        for (number, &entry) in (0..).zip(l1) {
            let Some(table) = self.image.layout_now().l2_table(number, entry)? else { continue };
            let words = self.table_words(table).await?;
            let entries = words.iter().step_by(index(layout.entry_words()));
            for (first, count) in entries.filter_map(|&entry| layout.refers_to(entry)) {
                self.drop_clusters(first, count);
            }
            self.drop_clusters(table >> layout.cluster_bits, 1);
            blockhaul_io::yield_now().await;
        }
        Ok(())
    }

    /// Sets the flags of all entries of the disk as the refcounts have it.
    async fn set_flags(&self) -> Result<()> {
        let layout = self.image.layout;
        let per_table = layout.l2_entries();
        for number in 0..self.image.l1.len() as u64 {
            let entry = self.image.l1_entry(number);
            let Some(table) = self.image.layout_now().l2_table(number, entry)? else { continue };
            self.make_room().await?;
            let own = self.is_single(table >> layout.cluster_bits).await?;
            let words = self.table_words(table).await?;
            let mut flags = Vec::with_capacity(index(per_table));
            for &entry in words.iter().step_by(index(layout.entry_words())) {
                let single = match layout.refers_to(entry) {
                    Some((first, _)) if !EntryLayout::is_compressed(entry) => {
                        self.is_single(first).await?
                    }
                    _ => false,
                };
                flags.push(if single { COPIED } else { 0 });
            }
            let start = number * per_table;
            self.set_l2(table, start..start + per_table, |cluster, words| {
                let flag = flags.get(index(cluster - start)).copied().unwrap_or(0);
                words[0] = words[0] & !COPIED | flag;
                None
            })
            .await?;
            self.set_l1(number, table | if own { COPIED } else { 0 }, None).await?;
            blockhaul_io::yield_now().await;
        }
        Ok(())
    }

    async fn is_single(&self, cluster: u64) -> Result<bool> {
        let writer = self.writer()?;
        let none = || damaged(format!("the refcount of cluster {cluster} cannot be read"));
        self.refcount(writer, cluster).await.map(|found| found.1 == 1).ok_or_else(none)
    }
}
