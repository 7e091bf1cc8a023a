//! Checks the tables of an image: every cluster has as many references as its refcount says.
//!
//! A refcount that is too high is a *leak*: space that is lost. One that is too low, an entry that
//! cannot be true, or a flag that contradicts a refcount is a *corruption*: the next write may
//! destroy data.

use std::collections::HashSet;
use std::sync::Arc;

use blockhaul_block::{Device, Error, Kind, Result};

use super::entry::{COPIED, EntryLayout};
use super::error::damaged;
use super::header::{AUTOCLEAR_AT, Header, L1Place, autoclear, incompatible};
use super::image::FileHeader;
use super::refcount::Width;
use super::words::{bytes_of, words};
use super::{bitmap, snapshot};
use crate::bytes::index;
use crate::storage::{self, read};

/// Most clusters of an image file: their references are counted in memory, 2 bytes for each.
const CLUSTERS_MAX: u64 = 512 << 20;
/// Faults that are described.
const FAULTS_MAX: usize = 100;
/// Tables that are checked without a pause.
const STRETCH: usize = 64;

/// What is to be repaired.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Repair {
    /// Nothing: the image is only read.
    #[default]
    Nothing,
    /// Refcounts that are too high, unless something else is wrong.
    Leaks,
    /// All refcounts and flags. Entries that cannot be true stay as they are.
    All,
}

/// What a check has found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ImageCheckReport {
    /// Clusters of the disk.
    pub clusters: u64,
    /// Clusters of the disk with data of their own, compressed ones included.
    pub allocated: u64,
    /// Clusters of the disk that do not follow the one before them in the file; compressed ones count.
    pub fragmented: u64,
    /// Compressed clusters of the disk.
    pub compressed: u64,
    /// Faults that a write could make worse, without those that were repaired.
    pub corruptions: u64,
    /// Clusters of the file that are lost, without those that were repaired.
    pub leaks: u64,
    /// Corruptions that were repaired.
    pub corruptions_fixed: u64,
    /// Leaks that were repaired.
    pub leaks_fixed: u64,
    /// The offset after the last cluster in use, in bytes.
    pub image_end: u64,
    /// The image is marked as dirty: refcounts are expected to be wrong.
    pub is_dirty: bool,
    /// The first faults: of entries and refcounts, and then of flags.
    pub faults: Vec<CheckFault>,
}

/// What is wrong. Its text is one line.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum CheckFault {
    /// A refcount is not the number of references.
    Refcount {
        /// Number of the cluster in the file.
        cluster: u64,
        /// The refcount.
        stored: u64,
        /// The number of references.
        references: u64,
        /// It was repaired.
        fixed: bool,
    },
    /// A flag that says whether there is one reference contradicts the refcount.
    Flag {
        /// The entry with the flag.
        entry: FlagOf,
        /// Its 64 bits.
        value: u64,
        /// The refcount of what it names.
        refcount: u64,
        /// It was repaired.
        fixed: bool,
    },
    /// An entry names something that is behind the end of the file.
    Beyond {
        /// Its offset in the file, and its length, in bytes.
        offset: u64,
        /// See `offset`.
        len: u64,
        /// What names it.
        what: String,
    },
    /// Something else.
    Other(String),
}

/// The entry of a [`CheckFault::Flag`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FlagOf {
    /// An entry of the L1 table, by its number.
    L1(u64),
    /// The entry of an L2 table for the cluster at this offset of the disk, in bytes.
    L2(u64),
}

impl std::fmt::Display for CheckFault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            CheckFault::Refcount { cluster, stored, references, .. } => {
                write!(
                    f,
                    "cluster {cluster} has {references} references, and a refcount of {stored}"
                )
            }
            CheckFault::Flag { entry: FlagOf::L1(number), value, .. } => {
                write!(f, "L1 entry {number} ({value:#x}) has a flag that contradicts its refcount")
            }
            CheckFault::Flag { entry: FlagOf::L2(at), value, .. } => write!(
                f,
                "the L2 entry of the cluster at offset {at} of the disk ({value:#x}) has a flag that contradicts \
                 its refcount"
            ),
            CheckFault::Beyond { offset, len, what } => {
                write!(f, "{what}: {len} bytes at offset {offset} exceed the file")
            }
            CheckFault::Other(text) => f.write_str(text),
        }
    }
}

impl ImageCheckReport {
    fn corrupt(&mut self, text: impl FnOnce() -> String) {
        self.corruptions += 1;
        self.note(|| CheckFault::Other(text()));
    }

    fn note(&mut self, fault: impl FnOnce() -> CheckFault) {
        if self.faults.len() < FAULTS_MAX {
            self.faults.push(fault());
        }
    }
}

/// Checks the image in a device, which must be fenced, and writable for a repair. Nothing else may
/// use it. Call it on a worker. Memory: 2 bytes for each cluster of the file.
///
/// # Errors
/// If the header or the place of a table cannot be used, the image is too large, or the device
/// fails: the check is then incomplete.
pub async fn check(file: &Arc<dyn Device>, repair: Repair) -> Result<ImageCheckReport> {
    let head = FileHeader::read(file).await?;
    let mut check = TableCheck::new(file, head)?;
    if repair != Repair::Nothing {
        check.clear_unknown().await?;
    }
    check.count_all().await?;
    let wrong = check.compare().await?;
    match repair {
        Repair::Nothing => {}
        Repair::Leaks if check.report.corruptions > 0 => {
            let text = "leaks are not repaired while there are corruptions";
            check.report.note(|| CheckFault::Other(text.into()));
        }
        Repair::Leaks | Repair::All => check.repair(wrong, repair).await?,
    }
    let is_clean = check.report.corruptions == 0 && check.report.leaks == 0;
    check.flags(repair == Repair::All || (repair == Repair::Leaks && is_clean)).await?;
    if repair != Repair::Nothing {
        // What was lost at the end is free now.
        let used = check.references.iter().rposition(|&count| count > 0);
        let end = used.map_or(0, |last| last as u64 + 1);
        check.report.image_end = end << check.layout.cluster_bits;
    }
    if repair == Repair::All {
        check.clear_marks().await?;
    }
    Ok(check.report)
}

/// A refcount that is not the number of references.
struct RefcountMismatch {
    cluster: u64,
    stored: u64,
    /// The number of references.
    found: u64,
    /// Whether there is a place for it.
    has_block: bool,
}

struct TableCheck<'a> {
    file: &'a Arc<dyn Device>,
    header: Header,
    layout: EntryLayout,
    width: Width,
    /// References to each cluster of the file, and its refcount once both are compared; the largest number
    /// stands for more.
    references: Vec<u16>,
    blocks: Vec<u64>,
    /// The cluster of the file behind the last one of the disk that is not compressed.
    next: Option<u64>,
    report: ImageCheckReport,
}

impl TableCheck<'_> {
    fn new(file: &Arc<dyn Device>, head: FileHeader) -> Result<TableCheck<'_>> {
        let FileHeader { header, file_len } = head;
        let clusters = file_len.div_ceil(header.cluster());
        if clusters > CLUSTERS_MAX {
            let text = format!("qcow2: {clusters} clusters are too many to be checked");
            return Err(Error::new(Kind::Unsupported, text));
        }
        // The last cluster of the file may be short.
        let whole = clusters << header.cluster_bits;
        let layout = EntryLayout::new(
            &header,
            whole,
            if header.has(incompatible::DATA_FILE) { 1 << 62 } else { whole },
        );
        let report = ImageCheckReport {
            clusters: header.size.div_ceil(header.cluster()),
            is_dirty: header.has(incompatible::DIRTY),
            ..ImageCheckReport::default()
        };
        let width = Width::of_order(header.refcounts.order);
        let references = vec![0; index(clusters)];
        Ok(TableCheck {
            file,
            header,
            layout,
            width,
            references,
            blocks: Vec::new(),
            next: None,
            report,
        })
    }

    fn cluster(&self) -> u64 {
        self.layout.cluster()
    }

    /// Counts a reference to each cluster of a range of the file, in bytes.
    fn refer(&mut self, offset: u64, len: u64, what: impl FnOnce() -> String) {
        let first = offset >> self.layout.cluster_bits;
        let end = offset.checked_add(len).map(|end| end.div_ceil(self.cluster()));
        match end.filter(|&end| end <= self.references.len() as u64) {
            None => {
                self.report.corruptions += 1;
                self.report.note(|| CheckFault::Beyond { offset, len, what: what() });
            }
            Some(end) => self.references[index(first)..index(end)]
                .iter_mut()
                .for_each(|count| *count = count.saturating_add(1)),
        }
    }

    async fn count_all(&mut self) -> Result<()> {
        let cluster = self.cluster();
        let file_len = self.layout.file_len();
        self.refer(0, cluster, || "header".into());
        self.count_refcounts().await?;
        self.count_tables(self.header.l1, true, "the disk").await?;
        let (snapshots, len) = snapshot::list_with_len(self.file, file_len, &self.header).await?;
        if len > 0 {
            self.refer(self.header.snapshots.offset, len, || "snapshot table".into());
        }
        for one in snapshots {
            self.count_tables(one.l1, false, &format!("snapshot {:?}", one.name)).await?;
        }
        if let Some(directory) = self.header.bitmaps {
            self.refer(directory.offset, directory.len, || "directory of bitmaps".into());
            for (name, table, entries) in bitmap::tables(self.file, file_len, &self.header).await? {
                self.count_bitmap(&name, table, entries).await?;
            }
        }
        Ok(())
    }

    async fn count_refcounts(&mut self) -> Result<()> {
        let table = self.header.refcounts;
        let len = u64::from(table.clusters) << self.layout.cluster_bits;
        let end = table.offset.checked_add(len);
        if end.is_none_or(|end| end > self.layout.file_len()) {
            let offset = table.offset;
            return Err(damaged(format!("a refcount table of {len} bytes at offset {offset}")));
        }
        self.refer(table.offset, len, || "refcount table".into());
        self.blocks = self.read_words(table.offset, len).await?;
        for number in 0..self.blocks.len() {
            let block = self.blocks[number];
            let cluster = self.cluster();
            let is_there = block.is_multiple_of(cluster)
                && block.checked_add(cluster).is_some_and(|end| end <= self.layout.file_len());
            if block == 0 {
                continue;
            }
            if is_there {
                self.refer(block, cluster, || "refcount block".into());
            } else {
                self.report.corrupt(|| format!("refcount block {number} at offset {block}"));
                self.blocks[number] = 0;
            }
        }
        Ok(())
    }

    /// Reads a range of the file, whose last cluster may be short.
    async fn read_words(&self, offset: u64, len: u64) -> Result<Vec<u64>> {
        let there = len.min(storage::len_of(&self.file.facts()).saturating_sub(offset));
        let mut all: Vec<u64> = words(&read(self.file, offset, there).await?).collect();
        all.resize(index(len / 8), 0);
        Ok(all)
    }

    /// Counts the references of an L1 table.
    async fn count_tables(&mut self, l1: L1Place, is_active: bool, whose: &str) -> Result<()> {
        let len = u64::from(l1.entries) * 8;
        if l1.offset.checked_add(len).is_none_or(|end| end > self.layout.file_len()) {
            let offset = l1.offset;
            self.report
                .corrupt(|| format!("{whose}: an L1 table of {len} bytes at offset {offset}"));
            return Ok(());
        }
        if len > 0 {
            self.refer(l1.offset, len, || format!("L1 table of {whose}"));
        }
        let entries = self.read_words(l1.offset, len).await?;
        let mut seen = HashSet::new();
        for (number, &entry) in entries.iter().enumerate() {
            match self.layout.l2_table(number as u64, entry) {
                Ok(None) => {}
                // Followed once, whatever the entries say.
                Ok(Some(table)) if !seen.insert(table) => {
                    self.report
                        .corrupt(|| format!("{whose}: the L2 table at {table} is used twice"));
                }
                Ok(Some(table)) => {
                    self.refer(table, self.cluster(), || format!("L2 table of {whose}"));
                    self.count_l2(table, number as u64, is_active, whose).await?;
                }
                Err(error) => self.report.corrupt(|| format!("{whose}: {}", short(&error))),
            }
            if number % STRETCH == 0 {
                blockhaul_io::yield_now().await;
            }
        }
        Ok(())
    }

    async fn count_l2(&mut self, table: u64, l1: u64, is_active: bool, whose: &str) -> Result<()> {
        let all = self.read_words(table, self.cluster()).await?;
        self.next = None;
        let each = index(self.layout.entry_words());
        for (number, words) in all.chunks(each).enumerate() {
            let at = l1.saturating_mul(self.layout.l2_covers());
            let at = at.saturating_add((number as u64) << self.layout.cluster_bits);
            let found = match self.layout.found(words, at) {
                Ok(found) => found,
                Err(error) => {
                    self.count_wrong(words, at, whose, &error);
                    continue;
                }
            };
            let Some(&entry) = words.first() else { continue };
            if is_active && (found.units != 0 || found.elsewhere) {
                self.report.allocated += 1;
                if EntryLayout::is_compressed(entry) {
                    self.report.compressed += 1;
                    self.report.fragmented += 1;
                } else if let Some((cluster, _)) = self.layout.refers_to(entry) {
                    let is_next = self.next.is_none_or(|next| next == cluster);
                    self.report.fragmented += u64::from(!is_next);
                    self.next = Some(cluster + 1);
                }
            }
            if let Some((first, count)) = self.layout.refers_to(entry) {
                let bits = self.layout.cluster_bits;
                self.refer(first << bits, count << bits, || {
                    format!("{whose}: the cluster at offset {at} of the disk")
                });
            }
        }
        Ok(())
    }

    /// Notes an entry that cannot be true.
    fn count_wrong(&mut self, words: &[u64], at: u64, whose: &str, error: &Error) {
        let found = words.first().and_then(|&entry| self.layout.refers_to(entry));
        let bits = self.layout.cluster_bits;
        match found {
            Some((first, count)) if first.saturating_add(count) > self.references.len() as u64 => {
                let what = format!("{whose}: the cluster at offset {at} of the disk");
                self.refer(first << bits, count << bits, || what);
            }
            _ => self.report.corrupt(|| format!("{whose}: {}", short(error))),
        }
    }

    async fn count_bitmap(&mut self, name: &str, table: u64, entries: u64) -> Result<()> {
        let len = entries * 8;
        self.refer(table, len, || format!("table of bitmap {name:?}"));
        if table.checked_add(len).is_none_or(|end| end > self.layout.file_len()) {
            return Ok(());
        }
        for entry in self.read_words(table, len).await? {
            let offset = entry & bitmap::OFFSET;
            if offset != 0 {
                self.refer(offset, self.cluster(), || format!("bitmap {name:?}"));
            }
        }
        Ok(())
    }

    /// Compares the flags of the disk's tables with the refcounts; sets them right if `repair`.
    async fn flags(&mut self, repair: bool) -> Result<()> {
        if self.header.has(incompatible::DATA_FILE) {
            return Ok(());
        }
        let l1 = self.header.l1;
        let len = u64::from(l1.entries) * 8;
        if l1.offset.checked_add(len).is_none_or(|end| end > self.layout.file_len()) {
            return Ok(());
        }
        let mut entries = self.read_words(l1.offset, len).await?;
        let mut changed = false;
        for (number, slot) in entries.iter_mut().enumerate() {
            let entry = *slot;
            let Ok(table) = self.layout.l2_table(number as u64, entry) else { continue };
            let right = match table {
                Some(_) => self.right_flag(entry),
                // Nothing has exactly one reference.
                None => (entry & COPIED != 0).then_some(entry ^ COPIED),
            };
            if let Some(right) = right {
                *slot = right;
                changed = true;
                self.flag_fault(repair, FlagOf::L1(number as u64), entry);
            }
            let Some(table) = table else { continue };
            self.l2_flags(table, number as u64, repair).await?;
        }
        if changed && repair {
            storage::write(self.file, l1.offset, &bytes_of(&entries)).await?;
        }
        Ok(())
    }

    async fn l2_flags(&mut self, table: u64, l1: u64, repair: bool) -> Result<()> {
        let mut all = self.read_words(table, self.cluster()).await?;
        let mut changed = false;
        let each = index(self.layout.entry_words());
        for (number, entry) in all.iter_mut().step_by(each).enumerate() {
            if let Some(right) = self.right_flag(*entry) {
                let old = std::mem::replace(entry, right);
                changed = true;
                let at =
                    l1 * self.layout.l2_covers() + ((number as u64) << self.layout.cluster_bits);
                self.flag_fault(repair, FlagOf::L2(at), old);
            }
        }
        if changed && repair {
            storage::write(self.file, table, &bytes_of(&all)).await?;
        }
        Ok(())
    }

    /// The entry with the other flag, if the flag contradicts the refcount.
    fn right_flag(&self, entry: u64) -> Option<u64> {
        // Compressed clusters never have it.
        if EntryLayout::is_compressed(entry) {
            return (entry & COPIED != 0).then_some(entry ^ COPIED);
        }
        let (first, _) = self.layout.refers_to(entry)?;
        let count = *self.references.get(index(first))?;
        let is_one = count == 1;
        (is_one != (entry & COPIED != 0)).then_some(entry ^ COPIED)
    }

    fn flag_fault(&mut self, fixed: bool, entry: FlagOf, value: u64) {
        let cluster = self.layout.refers_to(value).map_or(0, |found| found.0);
        let refcount = self.references.get(index(cluster)).copied().unwrap_or(0).into();
        if fixed {
            self.report.corruptions_fixed += 1;
        } else {
            self.report.corruptions += 1;
        }
        self.report.note(|| CheckFault::Flag { entry, value, refcount, fixed });
    }

    /// Compares refcounts with the references.
    async fn compare(&mut self) -> Result<Vec<RefcountMismatch>> {
        let per_block = self.cluster() / 8 * self.width.per_word();
        let mut wrong = Vec::new();
        for number in 0..self.blocks.len() {
            let first = (number as u64).saturating_mul(per_block);
            let block = self.blocks[number];
            let counts = match block {
                0 => Vec::new(),
                _ => self.read_words(block, self.cluster()).await?,
            };
            if block == 0 && first >= self.references.len() as u64 {
                continue;
            }
            // What counts clusters behind the end of the file loses no space.
            let end = per_block.min((self.references.len() as u64).saturating_sub(first));
            for inside in 0..end {
                let stored = self.width.get(&counts, inside).unwrap_or(0);
                self.compare_one(first + inside, stored, block != 0, &mut wrong);
            }
            blockhaul_io::yield_now().await;
        }
        let covered = (self.blocks.len() as u64).saturating_mul(per_block);
        for cluster in covered..self.references.len() as u64 {
            self.compare_one(cluster, 0, false, &mut wrong);
        }
        Ok(wrong)
    }

    fn compare_one(
        &mut self,
        cluster: u64,
        stored: u64,
        has_block: bool,
        wrong: &mut Vec<RefcountMismatch>,
    ) {
        let found = self.references.get(index(cluster)).copied().unwrap_or(0);
        if found > 0 || stored > 0 {
            self.report.image_end = (cluster + 1) << self.layout.cluster_bits;
        }
        // A count at its limit stands for more.
        if stored == u64::from(found) || (found == u16::MAX && stored >= u64::from(found)) {
            return;
        }
        if let Some(count) = self.references.get_mut(index(cluster)) {
            *count = u16::try_from(stored).unwrap_or(u16::MAX);
        }
        let found = u64::from(found);
        if stored > found {
            self.report.leaks += 1;
        } else {
            self.report.corruptions += 1;
        }
        let fault = || CheckFault::Refcount { cluster, stored, references: found, fixed: false };
        self.report.note(fault);
        wrong.push(RefcountMismatch { cluster, stored, found, has_block });
    }

    /// Sets refcounts right: first those that are too low, so that the image gets no worse if this
    /// is interrupted.
    async fn repair(&mut self, wrong: Vec<RefcountMismatch>, repair: Repair) -> Result<()> {
        let is_low = |one: &RefcountMismatch| one.found > one.stored;
        let (low, high): (Vec<_>, Vec<_>) = wrong.into_iter().partition(is_low);
        if repair == Repair::All {
            let fixed = self.set_all(&low).await?;
            self.report.corruptions -= fixed;
            self.report.corruptions_fixed += fixed;
            storage::flush(self.file).await?;
        }
        let fixed = self.set_all(&high).await?;
        self.report.leaks -= fixed;
        self.report.leaks_fixed += fixed;
        storage::flush(self.file).await
    }

    /// Clears auto-clear features that this program does not know, as every writer does.
    async fn clear_unknown(&self) -> Result<()> {
        let known = self.header.autoclear & autoclear::KNOWN;
        if known != self.header.autoclear {
            storage::write(self.file, AUTOCLEAR_AT, &known.to_be_bytes()).await?;
            storage::flush(self.file).await?;
        }
        Ok(())
    }

    /// Notes that nothing is wrong any longer, if that is so.
    async fn clear_marks(&mut self) -> Result<()> {
        if self.report.corruptions == 0 && self.header.version >= 3 {
            let marks = incompatible::DIRTY | incompatible::CORRUPT;
            if self.header.incompatible & marks != 0 {
                let features = self.header.incompatible & !marks;
                storage::write(self.file, INCOMPATIBLE_AT, &features.to_be_bytes()).await?;
                storage::flush(self.file).await?;
                self.report.is_dirty = false;
            }
        }
        Ok(())
    }

    /// Notes that a refcount is right now.
    fn fixed(&mut self, one: &RefcountMismatch) {
        if let Some(count) = self.references.get_mut(index(one.cluster)) {
            *count = u16::try_from(one.found).unwrap_or(u16::MAX);
        }
        for fault in &mut self.report.faults {
            if let CheckFault::Refcount { cluster, fixed, .. } = fault
                && *cluster == one.cluster
            {
                *fixed = true;
            }
        }
    }

    /// Sets these refcounts to the number of references; returns how many.
    async fn set_all(&mut self, wrong: &[RefcountMismatch]) -> Result<u64> {
        let per_block = self.cluster() / 8 * self.width.per_word();
        let mut fixed = 0;
        let same = |one: &RefcountMismatch, other: &RefcountMismatch| {
            one.cluster / per_block == other.cluster / per_block
        };
        for group in wrong.chunk_by(same) {
            let Some(first) = group.first().filter(|one| one.has_block) else { continue };
            let Some(&block) = self.blocks.get(index(first.cluster / per_block)) else { continue };
            let mut counts = self.read_words(block, self.cluster()).await?;
            let mut done = Vec::new();
            for one in group {
                if self.width.set(&mut counts, one.cluster % per_block, one.found) {
                    done.push(one);
                }
            }
            storage::write(self.file, block, &bytes_of(&counts)).await?;
            fixed += done.len() as u64;
            done.into_iter().for_each(|one| self.fixed(one));
        }
        Ok(fixed)
    }
}

/// The offset of the incompatible features.
const INCOMPATIBLE_AT: u64 = 72;

/// An error of a table, without what to do about it.
fn short(error: &Error) -> String {
    let text = error.text();
    let text = text.strip_prefix("qcow2: ").unwrap_or(&text);
    text.split(": the image is damaged").next().unwrap_or(text).to_string()
}
