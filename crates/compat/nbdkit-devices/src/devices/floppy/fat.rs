//! FAT: the layout of the disk, and its tables.
//!
//! The number of clusters alone determines the type of a file system (Microsoft's specification of
//! FAT, "FAT type determination"): FAT12 below 4085, FAT16 below 65525, else FAT32. The sizes of
//! all parts are the same for each type, those of FAT32, as in nbdkit's plugin for disks of all
//! sizes.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use blockhaul_block::{Error, Kind, Result};

use super::names::{self, ENTRY, Names, Short};
use super::tree::{Folder, Stamp, Times, Tree};
use crate::devices::table::{self, SECTOR};

/// Cluster size in bytes: required by the largest disk.
const CLUSTER: u64 = 32 * SECTOR;
/// First sector of the partition, and the number of its sectors before the tables.
const START: u64 = 2048;
const RESERVED: u64 = 32;
/// Sectors of a track, and heads.
const TRACK: u16 = 32;
const HEADS: u16 = 64;
/// Sectors of the partition with the free count, and with the copy of the first sector.
const INFO: u64 = 1;
const BACKUP: u64 = 6;
/// The first cluster, and the maximum number: cluster numbers have 28 bits, with some values
/// reserved.
const FIRST: u32 = 2;
const CLUSTERS_MAX: u64 = 0x0fff_fff0 - FIRST as u64;
/// Minimum clusters of FAT16, and of FAT32.
const SIXTEEN: u64 = 4085;
const THIRTY_TWO: u64 = 65_525;
/// Maximum clusters of a root directory outside the data area: its entries are counted with 16
/// bits.
const ROOT_MAX: u64 = 0xffff * ENTRY as u64 / CLUSTER;
/// Maximum entries of a directory.
const ENTRIES_MAX: usize = 65_536;
/// Attributes of entries.
const LABEL: u8 = 0x08;
const SUBFOLDER: u8 = 0x10;
const ARCHIVE: u8 = 0x20;

/// A part of the disk. Gaps between parts are zero.
pub(super) struct Part {
    pub at: u64,
    pub len: u64,
    pub what: What,
}

pub(super) enum What {
    Bytes(Arc<[u8]>),
    File(PathBuf),
}

/// A disk: its parts in order, and its size in bytes.
pub(super) struct Layout {
    pub parts: Vec<Part>,
    pub size: u64,
}

/// The type, which determines the width of cluster numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fat {
    Twelve,
    Sixteen,
    ThirtyTwo,
}

impl Fat {
    /// For this many clusters, `root` of which would hold the root directory.
    fn of(clusters: u64, root: u64) -> Fat {
        // Only FAT32 has the root directory among its clusters.
        match clusters.saturating_sub(root) {
            // Or if the others cannot count its entries: Linux reads it that way, too.
            _ if clusters >= THIRTY_TWO || root > ROOT_MAX => Fat::ThirtyTwo,
            others if others >= SIXTEEN => Fat::Sixteen,
            _ => Fat::Twelve,
        }
    }

    /// Type of the partition, with addressing by sectors if there is such a type.
    fn partition(self) -> u8 {
        match self {
            Fat::Twelve => 0x01,
            Fat::Sixteen => 0x0e,
            Fat::ThirtyTwo => 0x0c,
        }
    }

    fn name(self) -> &'static [u8; 8] {
        match self {
            Fat::Twelve => b"FAT12   ",
            Fat::Sixteen => b"FAT16   ",
            Fat::ThirtyTwo => b"FAT32   ",
        }
    }

    /// Marks the last cluster of a chain.
    fn last(self) -> u32 {
        match self {
            Fat::Twelve => 0xfff,
            Fat::Sixteen => 0xffff,
            Fat::ThirtyTwo => 0x0fff_ffff,
        }
    }

    /// The table with these chains.
    fn chained<'a>(self, chains: impl Iterator<Item = &'a Range<u32>>) -> Arc<[u8]> {
        let last = self.last();
        let mut entries: Vec<u32> = vec![last & !7, last];
        for chain in chains {
            entries.extend((chain.start + 1..chain.end).chain((!chain.is_empty()).then_some(last)));
        }
        self.table(&entries)
    }

    /// The table with these entries.
    fn table(self, entries: &[u32]) -> Arc<[u8]> {
        match self {
            Fat::Twelve => entries
                .chunks(2)
                .flat_map(|pair| {
                    let both = pair[0] | pair.get(1).unwrap_or(&0) << 12;
                    [both as u8, (both >> 8) as u8, (both >> 16) as u8]
                })
                .collect(),
            Fat::Sixteen => {
                entries.iter().flat_map(|entry| (*entry as u16).to_le_bytes()).collect()
            }
            Fat::ThirtyTwo => entries.iter().flat_map(|entry| entry.to_le_bytes()).collect(),
        }
    }
}

fn wrong(text: impl std::fmt::Display) -> Error {
    Error::new(Kind::Usage, format!("floppy: {text}"))
}

/// Lays out the disk; with `size`, the rest is free space.
pub(super) fn layout(tree: Tree, label: Short, size: Option<u64>) -> Result<Layout> {
    let mut tables = Vec::with_capacity(tree.folders.len());
    for index in 0..tree.folders.len() {
        tables.push(Table::of(&tree, index, label)?);
    }
    let places = Places::of(&tables, &tree, size)?;
    let Chains { folders, files, next } = Chains::of(&tables, &tree, places.kind);

    let mut parts = Vec::new();
    let mut push = |at: u64, bytes: Arc<[u8]>| {
        parts.push(Part { at, len: bytes.len() as u64, what: What::Bytes(bytes) });
    };
    let mut mbr = table::boot_sector();
    let extent = (START, places.sectors());
    table::mbr_entry(&mut mbr, 0, places.kind.partition(), false, extent)?;
    push(0, mbr.into());
    let start = START * SECTOR;
    let boot = places.boot_sector(label)?;
    push(start, boot.clone().into());
    if places.kind == Fat::ThirtyTwo {
        push(start + INFO * SECTOR, places.info_sector(next).into());
        push(start + BACKUP * SECTOR, boot.into());
    }
    let fat = places.kind.chained(folders.iter().chain(&files));
    push(places.fats, fat.clone());
    push(places.fats + places.fat_len, fat);
    for (table, chain) in tables.iter().zip(&folders) {
        // The root directory of FAT12 and FAT16 is before the clusters.
        let place = if chain.is_empty() { places.data } else { places.at(chain.start) };
        push(place, table.bytes(&folders, &files).into());
    }
    for (file, chain) in tree.files.into_iter().zip(&files) {
        if !chain.is_empty() {
            let at = places.at(chain.start);
            parts.push(Part { at, len: file.size, what: What::File(file.path) });
        }
    }
    Ok(Layout { parts, size: size.unwrap_or(places.end) })
}

fn clusters_of(bytes: u64) -> u64 {
    bytes.div_ceil(CLUSTER)
}

/// Where the parts of the file system are. Positions and lengths are bytes.
struct Places {
    kind: Fat,
    /// Clusters of the root directory.
    root: u64,
    clusters: u64,
    /// Clusters with data.
    used: u64,
    /// The first of the two tables, and the length of each.
    fats: u64,
    fat_len: u64,
    /// What follows the tables.
    data: u64,
    /// The first cluster.
    first: u64,
    end: u64,
}

impl Places {
    fn of(tables: &[Table], tree: &Tree, size: Option<u64>) -> Result<Places> {
        let root = clusters_of(tables[0].len());
        let lens = tables.iter().map(Table::len).chain(tree.files.iter().map(|file| file.size));
        let used = lens.fold(0, |sum: u64, len| sum.saturating_add(clusters_of(len)));
        // Readers reject a file system without a cluster besides the root directory.
        let least = used.max(root + 1);
        let clusters = match size {
            None => least,
            Some(size) => {
                let fits = clusters_in(size).filter(|&clusters| clusters >= least);
                fits.ok_or_else(|| {
                    let needed = room_for(least);
                    wrong(format!("size={size} is too small: {needed} bytes are needed"))
                })?
            }
        };
        if clusters > CLUSTERS_MAX {
            return Err(wrong("is larger than FAT32 allows"));
        }
        let kind = Fat::of(clusters, root);
        let fat_len = fat_clusters(clusters) * CLUSTER;
        let fats = (START + RESERVED) * SECTOR;
        let data = fats + 2 * fat_len;
        let first = match kind {
            Fat::ThirtyTwo => data,
            Fat::Twelve | Fat::Sixteen => data + root * CLUSTER,
        };
        let end = data + clusters * CLUSTER;
        Ok(Places { kind, root, clusters, used, fats, fat_len, data, first, end })
    }

    /// Sectors of the partition.
    fn sectors(&self) -> u64 {
        self.end / SECTOR - START
    }

    /// The position of a cluster.
    fn at(&self, cluster: u32) -> u64 {
        self.first + u64::from(cluster - FIRST) * CLUSTER
    }

    fn boot_sector(&self, label: Short) -> Result<Vec<u8>> {
        boot_sector(self.kind, label, self.sectors(), self.fat_len / SECTOR, self.root)
    }

    fn info_sector(&self, next: u32) -> Vec<u8> {
        info_sector(self.clusters - self.used, next, self.used < self.clusters)
    }
}

/// The clusters of directories and files: directories first, then files, without gaps.
struct Chains {
    folders: Vec<Range<u32>>,
    files: Vec<Range<u32>>,
    /// The first free cluster.
    next: u32,
}

impl Chains {
    fn of(tables: &[Table], tree: &Tree, kind: Fat) -> Chains {
        let mut next = FIRST;
        let mut place = |bytes: u64| {
            // All fit: their sum does.
            let start = next;
            next += clusters_of(bytes) as u32;
            // Empty files have no cluster.
            if next == start { 0..0 } else { start..next }
        };
        let folders = (tables.iter().enumerate())
            .map(|(index, table)| match (index, kind) {
                (0, Fat::Twelve | Fat::Sixteen) => 0..0,
                _ => place(table.len()),
            })
            .collect();
        let files = tree.files.iter().map(|file| place(file.size)).collect();
        Chains { folders, files, next }
    }
}

/// Clusters of a table for this many data clusters.
fn fat_clusters(clusters: u64) -> u64 {
    ((clusters + u64::from(FIRST)) * 4).div_ceil(CLUSTER)
}

/// Bytes of a disk with this many data clusters.
fn room_for(clusters: u64) -> u64 {
    (START + RESERVED) * SECTOR + (2 * fat_clusters(clusters) + clusters) * CLUSTER
}

/// Maximum data clusters on a disk of this many bytes; `None`: not even its tables fit.
fn clusters_in(size: u64) -> Option<u64> {
    let all = size.checked_sub((START + RESERVED) * SECTOR)? / CLUSTER;
    // The tables for all are at most one cluster too large each.
    let clusters = all.checked_sub(2 * fat_clusters(all))?;
    Some(if room_for(clusters + 1) <= size { clusters + 1 } else { clusters })
}

/// The first sector of the partition.
fn boot_sector(
    kind: Fat,
    label: Short,
    sectors: u64,
    fat_sectors: u64,
    root: u64,
) -> Result<Vec<u8>> {
    let large = |_| wrong("is larger than 2 TiB, the limit of an MBR");
    let sectors = u32::try_from(sectors).map_err(large)?;
    let fat_sectors = u32::try_from(fat_sectors).map_err(large)?;
    let mut out = table::boot_sector();
    let mut put = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
    put(3, b"MSWIN4.1");
    put(11, &(SECTOR as u16).to_le_bytes());
    put(13, &[(CLUSTER / SECTOR) as u8]);
    put(14, &(RESERVED as u16).to_le_bytes());
    put(16, &[2]);
    put(21, &[0xf8]);
    // A geometry that is unused, but required by some; all sizes are multiples of its tracks.
    put(24, &TRACK.to_le_bytes());
    put(26, &HEADS.to_le_bytes());
    put(28, &(START as u32).to_le_bytes());
    put(32, &sectors.to_le_bytes());
    let about = match kind {
        Fat::Twelve | Fat::Sixteen => {
            // At most ROOT_MAX clusters of them.
            put(17, &((root * CLUSTER / ENTRY as u64) as u16).to_le_bytes());
            // Below 65525 clusters these are 16 bits.
            put(22, &(fat_sectors as u16).to_le_bytes());
            36
        }
        Fat::ThirtyTwo => {
            put(36, &fat_sectors.to_le_bytes());
            put(44, &FIRST.to_le_bytes());
            put(48, &(INFO as u16).to_le_bytes());
            put(50, &(BACKUP as u16).to_le_bytes());
            64
        }
    };
    put(about, &[0x80, 0, 0x29]);
    // A fixed number, so that the same files make the same disk.
    put(about + 3, b"bhfl");
    put(about + 7, &label);
    put(about + 18, kind.name());
    // A jump over the tables, to a halt: it does not boot.
    let code = about + 26;
    put(0, &[0xeb, code as u8 - 2, 0x90]);
    put(code, &[0xf4, 0xeb, 0xfd]);
    Ok(out)
}

/// The sector with the free count and the next free cluster.
fn info_sector(free: u64, next: u32, has_free: bool) -> Vec<u8> {
    let mut out = table::boot_sector();
    out[..4].copy_from_slice(b"RRaA");
    out[484..488].copy_from_slice(b"rrAa");
    out[488..492].copy_from_slice(&(free as u32).to_le_bytes());
    let next = if has_free { next } else { u32::MAX };
    out[492..496].copy_from_slice(&next.to_le_bytes());
    out
}

/// The entries of a directory, before the layout is known.
struct Table {
    entries: Vec<([u8; ENTRY], Leads)>,
}

/// The target of an entry.
#[derive(Clone, Copy)]
enum Leads {
    Nowhere,
    Folder(usize),
    File(usize),
}

impl Table {
    fn of(tree: &Tree, index: usize, label: Short) -> Result<Table> {
        let mut table = Table { entries: Vec::new() };
        let folder = &tree.folders[index];
        if index == 0 {
            let entry = entry(&label, LABEL, folder.times, 0);
            table.entries.push((entry, Leads::Nowhere));
        } else {
            let parent = &tree.folders[folder.parent];
            // The root has no cluster number.
            let up = match folder.parent {
                0 => Leads::Nowhere,
                parent => Leads::Folder(parent),
            };
            table
                .entries
                .push((entry(b".          ", SUBFOLDER, folder.times, 0), Leads::Folder(index)));
            table.entries.push((entry(b"..         ", SUBFOLDER, parent.times, 0), up));
        }
        let mut names = Names::default();
        for &child in &folder.folders {
            let Folder { name, times, .. } = &tree.folders[child];
            table.add(&mut names, name, (SUBFOLDER, *times, 0), Leads::Folder(child));
        }
        for &child in &folder.files {
            let file = &tree.files[child];
            let about = (ARCHIVE, file.times, file.size as u32);
            table.add(&mut names, &file.name, about, Leads::File(child));
        }
        if table.entries.len() > ENTRIES_MAX {
            let text = format!("the directory {:?} has more names than FAT allows", folder.name);
            return Err(wrong(text));
        }
        Ok(table)
    }

    fn add(
        &mut self,
        names: &mut Names,
        name: &str,
        (attributes, times, size): (u8, Times, u32),
        leads: Leads,
    ) {
        let (short, whole) = names.short(name);
        if !whole {
            let long = names::long(name, &short).into_iter();
            self.entries.extend(long.map(|entry| (entry, Leads::Nowhere)));
        }
        self.entries.push((entry(&short, attributes, times, size), leads));
    }

    fn len(&self) -> u64 {
        (self.entries.len() * ENTRY) as u64
    }

    fn bytes(&self, folders: &[Range<u32>], files: &[Range<u32>]) -> Vec<u8> {
        let entries = self.entries.iter().flat_map(|(entry, leads)| {
            let cluster = match *leads {
                Leads::Nowhere => 0,
                Leads::Folder(index) => folders[index].start,
                Leads::File(index) => files[index].start,
            };
            let mut entry = *entry;
            if cluster > 0 {
                let cluster = cluster.to_le_bytes();
                entry[26..28].copy_from_slice(&cluster[..2]);
                entry[20..22].copy_from_slice(&cluster[2..]);
            }
            entry
        });
        entries.collect()
    }
}

/// An entry with a short name.
fn entry(name: &Short, attributes: u8, times: Times, size: u32) -> [u8; ENTRY] {
    let mut entry = [0; ENTRY];
    let Times { created, accessed, modified } = times;
    let Stamp { date, time, fine } = created;
    entry[..11].copy_from_slice(name);
    entry[11] = attributes;
    entry[13] = fine;
    for (at, number) in
        [(14, time), (16, date), (18, accessed.date), (22, modified.time), (24, modified.date)]
    {
        entry[at..at + 2].copy_from_slice(&number.to_le_bytes());
    }
    entry[28..].copy_from_slice(&size.to_le_bytes());
    entry
}
