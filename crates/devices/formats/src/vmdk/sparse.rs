//! Sparse extents: a directory of tables, which have the place of each grain ("Hosted Sparse
//! Extent", "ESX Server Sparse Extent"); seSparse has no public document, its layout is that of
//! QEMU's description.

use std::sync::Arc;

use blockhaul_block::{Device, Result};

use super::descriptor::FORMAT;
use crate::bytes::{index, le16, le32, le64};
use crate::mapped::{DiskPlace, TableLookup, check_within, damaged, unsupported};
use crate::storage::read;

pub(super) const SECTOR: u64 = 512;
/// First bytes of extents.
pub(super) const HOSTED: &[u8; 4] = b"KDMV";
const ESX: &[u8; 4] = b"COWD";
const SE: [u8; 8] = [0xbe, 0xba, 0xfe, 0xca, 0, 0, 0, 0];
const SE_VOLATILE: u64 = 0xcafe_cafe;
const SE_VERSION: u64 = 0x2_0000_0001;
/// The place of the directory of an extent whose last sectors have the real header.
pub(super) const AT_END: u64 = u64::MAX;
/// Flags of hosted extents.
const HAS_ZERO_GRAINS: u32 = 1 << 2;
pub(super) const COMPRESSED: u32 = 1 << 16;
/// Limits: grains in bytes, and entries of a table.
const GRAIN_MAX: u64 = 64 << 20;
const HOSTED_ENTRIES_MAX: u32 = 512;
const ESX_ENTRIES: u64 = 4096;
/// The entry of a grain of zeroes.
const ZERO_GRAIN: u32 = 1;
/// Bytes that a compressed grain can have besides its own length: a marker, and what deflate adds to
/// bytes that do not compress.
const PACKED_EXTRA: u64 = 1024;

/// An extent: how its tables are found. They are in file `file` of the image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SparseExtent {
    pub(super) file: usize,
    pub(super) file_len: u64,
    /// Length of the extent, and of a grain, in bytes.
    pub(super) len: u64,
    pub(super) grain: u64,
    /// Offset of the directory, and entries of a table.
    directory: u64,
    entries: u64,
    kind: SparseKind,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum SparseKind {
    /// Entries are sectors of 32 bits.
    Words { zeroes: bool, packed: bool },
    /// Entries have 64 bits: tables and grains are numbered in areas that begin at these offsets.
    Longs { tables: u64, grains: u64 },
}

/// Where the descriptor is that an extent contains: offset and length in bytes.
pub(super) type DescriptorPlace = Option<(u64, u64)>;

impl SparseExtent {
    /// Whether bytes are the beginning of an extent.
    pub(super) fn is_one(head: &[u8]) -> bool {
        head.starts_with(HOSTED) || head.starts_with(ESX) || head.starts_with(&SE)
    }

    pub(super) fn is_packed(&self) -> bool {
        matches!(self.kind, SparseKind::Words { packed: true, .. })
    }

    /// Reads the header of an extent; the place of a descriptor, and the extent, unless it has no
    /// grains of its own.
    pub(super) async fn open(
        device: &Arc<dyn Device>,
        file: usize,
        file_len: u64,
    ) -> Result<(DescriptorPlace, Option<SparseExtent>)> {
        let head = read(device, 0, SECTOR.min(file_len)).await?;
        let end = if head.starts_with(HOSTED) && le64(&head, 56) == Some(AT_END) {
            // Before the last sector is the footer ("Stream-Optimized Compressed Sparse Extents").
            let at = file_len.checked_sub(2 * SECTOR).filter(|at| *at > 0);
            let at = at.ok_or_else(|| damaged(FORMAT, "the file ends before its footer"))?;
            let footer = read(device, at, SECTOR).await?;
            if !footer.starts_with(HOSTED) || le64(&footer, 56) == Some(AT_END) {
                return Err(damaged(FORMAT, format!("no footer at offset {at}, where it must be")));
            }
            Some(footer)
        } else {
            None
        };
        let mut extent = SparseExtent::parse(&head, end.as_deref(), file, file_len)?;
        if let (_, Some(SparseExtent { kind: SparseKind::Longs { .. }, .. })) = &extent {
            check_journal(device, &head, file_len).await?;
        }
        if let (_, Some(sparse)) = &mut extent {
            sparse.check()?;
        }
        Ok(extent)
    }

    fn parse(
        head: &[u8],
        footer: Option<&[u8]>,
        file: usize,
        file_len: u64,
    ) -> Result<(DescriptorPlace, Option<SparseExtent>)> {
        if head.starts_with(HOSTED) {
            return hosted(head, footer, file, file_len);
        }
        if head.starts_with(ESX) {
            return Ok((None, Some(esx(head, file, file_len)?)));
        }
        if head.starts_with(&SE) {
            return Ok((None, Some(se(head, file, file_len)?)));
        }
        Err(damaged(FORMAT, "a sparse extent that does not begin as one"))
    }

    /// Refuses an extent whose directory is not within the file, or whose grains are impossible.
    fn check(&self) -> Result<()> {
        if !self.grain.is_power_of_two() || !(SECTOR..=GRAIN_MAX).contains(&self.grain) {
            return Err(damaged(FORMAT, format!("grains of {} bytes in the header", self.grain)));
        }
        let covers = self.grain * self.entries;
        let width = if matches!(self.kind, SparseKind::Longs { .. }) { 8 } else { 4 };
        let tables = self.len.div_ceil(covers);
        if self.directory < SECTOR {
            return Err(damaged(
                FORMAT,
                format!("the directory of grains at offset {}", self.directory),
            ));
        }
        check_within(
            FORMAT,
            "the directory of grains",
            self.directory,
            tables * width,
            self.file_len,
        )
    }

    /// The place of a byte of the extent: as [`crate::mapped::BlockMap::find`].
    pub(super) fn find(
        &self,
        at: u64,
        look: &mut TableLookup<'_>,
    ) -> Result<Option<(u64, DiskPlace)>> {
        let grain = at / self.grain;
        let start = at % self.grain;
        let table = grain / self.entries;
        let entry = grain % self.entries;
        let in_table = (self.entries - entry) * self.grain - start;
        let spot = GrainPlace { grain, start, table, entry, in_table };
        match self.kind {
            SparseKind::Words { zeroes, packed } => self.find_word(&spot, zeroes, packed, look),
            SparseKind::Longs { tables, grains } => self.find_long(&spot, tables, grains, look),
        }
    }

    fn find_word(
        &self,
        spot: &GrainPlace,
        zeroes: bool,
        packed: bool,
        look: &mut TableLookup<'_>,
    ) -> Result<Option<(u64, DiskPlace)>> {
        let GrainPlace { grain, start, table, entry, in_table } = *spot;
        let Some(found) = look.number(self.file, self.directory + table * 4)? else {
            return Ok(None);
        };
        let table = u64::from(u32::from_le_bytes(found)) * SECTOR;
        if table == 0 {
            return Ok(Some((in_table, DiskPlace::Below)));
        }
        // The last table may end with the last grain.
        let entries = self.entries.min(self.grains() - grain + entry);
        self.check_table(grain, table, entries * 4)?;
        let Some(bytes) = look.bytes(self.file, table + entry * 4)? else { return Ok(None) };
        let found = le32(bytes, 0).ok_or_else(|| damaged(FORMAT, "a short table"))?;
        let next = le32(bytes, 4).filter(|_| entry + 1 < self.entries);
        let left = self.grain - start;
        match found {
            0 => Ok(Some((left, DiskPlace::Below))),
            ZERO_GRAIN if zeroes => Ok(Some((left, DiskPlace::Zero { stored: false }))),
            found => {
                let host = u64::from(found) * SECTOR;
                self.grain_at(grain, start, host, packed, next).map(Some)
            }
        }
    }

    fn find_long(
        &self,
        spot: &GrainPlace,
        tables: u64,
        grains: u64,
        look: &mut TableLookup<'_>,
    ) -> Result<Option<(u64, DiskPlace)>> {
        let GrainPlace { grain, start, table, entry, in_table } = *spot;
        let Some(found) = look.number(self.file, self.directory + table * 8)? else {
            return Ok(None);
        };
        let Some(table) = se_table(u64::from_le_bytes(found), tables, self.entries)? else {
            return Ok(Some((in_table, DiskPlace::Below)));
        };
        self.check_table(grain, table, self.entries * 8)?;
        let Some(found) = look.number(self.file, table + entry * 8)? else { return Ok(None) };
        let left = self.grain - start;
        match se_grain(u64::from_le_bytes(found), grain)? {
            SeGrain::Free => Ok(Some((left, DiskPlace::Below))),
            SeGrain::Zero => Ok(Some((left, DiskPlace::Zero { stored: false }))),
            SeGrain::At(number) => {
                let host = number.checked_mul(self.grain).and_then(|at| at.checked_add(grains));
                self.grain_at(grain, start, host.unwrap_or(u64::MAX), false, None).map(Some)
            }
        }
    }

    /// The number of grains of the extent.
    fn grains(&self) -> u64 {
        self.len.div_ceil(self.grain)
    }

    fn check_table(&self, grain: u64, at: u64, len: u64) -> Result<()> {
        check_within(FORMAT, format_args!("the table of grain {grain}"), at, len, self.file_len)
    }

    /// A grain at an offset of the file; `next` is the entry of the grain after it.
    fn grain_at(
        &self,
        grain: u64,
        start: u64,
        host: u64,
        packed: bool,
        next: Option<u32>,
    ) -> Result<(u64, DiskPlace)> {
        let used = if packed { 1 } else { self.grain.min(self.len - grain * self.grain) };
        if host < SECTOR || host.checked_add(used).is_none_or(|end| end > self.file_len) {
            let text = format!(
                "grain {grain} of the extent is at offset {host}, not within the {} bytes of the file",
                self.file_len
            );
            return Err(damaged(FORMAT, text));
        }
        let left = self.grain - start;
        if !packed {
            return Ok((left, DiskPlace::Data { file: self.file, at: host + start }));
        }
        // Compressed grains follow one another; the last one of a table may have any length.
        let longest = self.grain + PACKED_EXTRA;
        let to_next = next.and_then(|next| (u64::from(next) * SECTOR).checked_sub(host));
        let most = to_next.filter(|len| (1..=longest).contains(len)).unwrap_or(longest);
        let most = u32::try_from(most.min(self.file_len - host)).unwrap_or(u32::MAX);
        Ok((left, DiskPlace::Packed { file: self.file, at: host, most }))
    }
}

/// A place in the tables.
#[derive(Clone, Copy)]
struct GrainPlace {
    /// The number of the grain, and the offset in it.
    grain: u64,
    start: u64,
    /// The numbers of the table and of the entry in it.
    table: u64,
    entry: u64,
    /// Bytes of the disk from there to the end of the table.
    in_table: u64,
}

/// A hosted extent; `footer` has the real place of the directory, if the header does not.
fn hosted(
    head: &[u8],
    footer: Option<&[u8]>,
    file: usize,
    file_len: u64,
) -> Result<(DescriptorPlace, Option<SparseExtent>)> {
    let head = footer.unwrap_or(head);
    let short = || damaged(FORMAT, "the file ends within its header");
    let word = |at| le32(head, at).ok_or_else(short);
    let sectors = |at| {
        let number = le64(head, at).ok_or_else(short)?;
        let bytes = number.checked_mul(SECTOR).filter(|bytes| i64::try_from(*bytes).is_ok());
        bytes.ok_or_else(|| damaged(FORMAT, format!("{number} sectors in the header")))
    };
    let version = word(4)?;
    let flags = word(8)?;
    if !(1..=3).contains(&version) {
        let text = format!("version {version} of the format is not known");
        return Err(unsupported(FORMAT, text, "convert it with VMware's tools"));
    }
    let at = sectors(28)?;
    let len = sectors(36)?;
    let embedded = (at > 0 && len > 0).then_some((at, len));
    let len = sectors(12)?;
    if len == 0 {
        return Ok((embedded, None));
    }
    let packed = flags & COMPRESSED != 0;
    let algorithm = le16(head, 77).ok_or_else(short)?;
    if packed && algorithm != 1 {
        let text = format!("compression algorithm {algorithm} is not known");
        return Err(unsupported(FORMAT, text, "convert it with VMware's tools"));
    }
    let entries = word(44)?;
    if !(1..=HOSTED_ENTRIES_MAX).contains(&entries) {
        return Err(damaged(FORMAT, format!("tables of {entries} grains in the header")));
    }
    let kind = SparseKind::Words { zeroes: flags & HAS_ZERO_GRAINS != 0, packed };
    let grain = sectors(20)?;
    let directory = sectors(56)?;
    let entries = entries.into();
    Ok((embedded, Some(SparseExtent { file, file_len, len, grain, directory, entries, kind })))
}

/// An extent of old versions of ESX.
fn esx(head: &[u8], file: usize, file_len: u64) -> Result<SparseExtent> {
    let short = || damaged(FORMAT, "the file ends within its header");
    let sectors = |at| Ok(u64::from(le32(head, at).ok_or_else(short)?) * SECTOR);
    let kind = SparseKind::Words { zeroes: false, packed: false };
    let len = sectors(12)?;
    let grain = sectors(16)?;
    let directory = sectors(20)?;
    Ok(SparseExtent { file, file_len, len, grain, directory, entries: ESX_ENTRIES, kind })
}

/// A space-efficient extent.
fn se(head: &[u8], file: usize, file_len: u64) -> Result<SparseExtent> {
    let short = || damaged(FORMAT, "the file ends within its header");
    let long = |number: usize| le64(head, number * 8).ok_or_else(short);
    let bytes = |number: usize| {
        let sectors = long(number)?;
        let bytes = sectors.checked_mul(SECTOR).filter(|bytes| i64::try_from(*bytes).is_ok());
        bytes.ok_or_else(|| damaged(FORMAT, format!("{sectors} sectors in the header")))
    };
    if long(1)? != SE_VERSION {
        let text = format!("version {:#x} of seSparse is not known", long(1)?);
        return Err(unsupported(FORMAT, text, "copy the disk with vddk:"));
    }
    let len = bytes(2)?;
    let grain = bytes(3)?;
    let table = bytes(4)?;
    let directory = bytes(16)?;
    let tables = bytes(18)?;
    let grains = bytes(24)?;
    if table == 0 || table > 1 << 20 {
        return Err(damaged(FORMAT, format!("tables of {table} bytes in the header")));
    }
    let kind = SparseKind::Longs { tables, grains };
    Ok(SparseExtent { file, file_len, len, grain, directory, entries: table / 8, kind })
}

/// Refuses a space-efficient extent whose journal must be applied.
async fn check_journal(device: &Arc<dyn Device>, head: &[u8], file_len: u64) -> Result<()> {
    let at = le64(head, 80).and_then(|sectors| sectors.checked_mul(SECTOR));
    let at = at.ok_or_else(|| damaged(FORMAT, "the place of the second header"))?;
    check_within(FORMAT, "the second header", at, SECTOR, file_len)?;
    let second = read(device, at, SECTOR).await?;
    if le64(&second, 0) != Some(SE_VOLATILE) {
        return Err(damaged(FORMAT, format!("no second header at offset {at}")));
    }
    match second.get(24) {
        Some(0) => Ok(()),
        _ => {
            let text = "an extent whose journal must be applied first";
            Err(unsupported(
                FORMAT,
                text,
                "open the disk with VMware's tools once, or copy it with vddk:",
            ))
        }
    }
}

/// The offset of a table of a space-efficient extent.
fn se_table(entry: u64, tables: u64, entries: u64) -> Result<Option<u64>> {
    if entry == 0 {
        return Ok(None);
    }
    let place =
        (entry & 0xffff_ffff).checked_mul(entries * 8).and_then(|at| at.checked_add(tables));
    match place.filter(|_| entry >> 32 == 0x1000_0000) {
        Some(place) => Ok(Some(place)),
        None => Err(damaged(FORMAT, format!("entry {entry:#x} in the directory of grains"))),
    }
}

enum SeGrain {
    Free,
    Zero,
    At(u64),
}

/// An entry of a table of a space-efficient extent: its kind is in the upper four bits, and its
/// number has the twelve bits after those at its end.
fn se_grain(entry: u64, grain: u64) -> Result<SeGrain> {
    let number = (entry >> 48 & 0xfff) | (entry & 0xffff_ffff_ffff) << 12;
    match entry >> 60 {
        0 if entry == 0 => Ok(SeGrain::Free),
        1 | 2 => Ok(SeGrain::Zero),
        3 => Ok(SeGrain::At(number)),
        _ => Err(damaged(FORMAT, format!("entry {entry:#x} of grain {grain}"))),
    }
}

/// How compressed grains begin: with their sector, and the length of the compressed bytes ("Grain
/// Marker").
pub(super) struct Grains;

impl crate::mapped::BlockUnpacker for Grains {
    fn header(&self) -> usize {
        12
    }

    fn len(&self, header: &[u8], at: u64) -> Result<usize, String> {
        let marker = le64(header, 0).zip(le32(header, 8));
        let (sector, len) = marker.ok_or("the file ends within its marker")?;
        if sector != at / SECTOR {
            return Err(format!("its marker is that of sector {sector}"));
        }
        Ok(index(len.into()))
    }

    fn unpack(&self, packed: &[u8], out: &mut [u8]) -> Result<(), String> {
        crate::inflate::zlib(packed, out)
    }
}
