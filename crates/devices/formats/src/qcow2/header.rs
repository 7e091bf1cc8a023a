//! The header and its extensions (QEMU's docs/interop/qcow2.txt, "Header" to "Bitmaps extension").

use blockhaul_block::Result;

use super::error::{damaged, unsupported};
use crate::bytes::{be32, be64, index, text};

/// The first bytes of an image.
pub(super) const MAGIC: [u8; 4] = *b"QFI\xfb";
/// Length in bytes of the part of the header that all versions have and that of version 3.
const LEN_V2: usize = 72;
const LEN_V3: usize = 104;
/// Cluster sizes that exist, as powers of two: 512 bytes to 2 MiB.
const CLUSTER_BITS: std::ops::RangeInclusive<u32> = 9..=21;
/// Smallest cluster with extended L2 entries: 16 KiB.
const EXTENDED_BITS_MIN: u32 = 14;
/// Longest name of a backing file in bytes; QEMU allows as much.
const BACKING_NAME_MAX: u32 = 1023;
/// Longest L1 table in bytes; QEMU allows as much.
const L1_MAX: u64 = 32 << 20;
/// Longest refcount table in bytes; QEMU allows as much.
const REFCOUNT_TABLE_MAX: u64 = 8 << 20;
/// Maximum number of header extensions that are read: more than are defined.
const EXTENSIONS_MAX: usize = 64;
/// What a device writes at once or not at all, in bytes.
const SECTOR: usize = 512;
/// Length in bytes of the header of version 3 that is written, and log2 of the bits of refcounts that
/// version 2 always has.
const LEN_NEW: u32 = 112;
const REFCOUNT_ORDER_V2: u32 = 4;
/// Length in bytes of an entry of the table of feature names.
const FEATURE_LEN: usize = 48;

/// Incompatible features ("Header", bytes 72 to 79).
pub(super) mod incompatible {
    /// Refcounts may be too low or too high. Reading does not use them.
    pub(in crate::qcow2) const DIRTY: u64 = 1 << 0;
    /// Any table may be wrong.
    pub(in crate::qcow2) const CORRUPT: u64 = 1 << 1;
    /// Guest data is in another file.
    pub(in crate::qcow2) const DATA_FILE: u64 = 1 << 2;
    /// Compressed clusters are not in zlib's format.
    pub(in crate::qcow2) const COMPRESSION: u64 = 1 << 3;
    /// L2 entries have 128 bits.
    pub(in crate::qcow2) const EXTENDED_L2: u64 = 1 << 4;
    /// All that this program knows.
    pub(super) const KNOWN: u64 = DIRTY | CORRUPT | DATA_FILE | COMPRESSION | EXTENDED_L2;
}

/// Compatible features ("Header", bytes 80 to 87).
pub(super) mod compatible {
    /// Refcounts may be written late, with [`super::incompatible::DIRTY`] set meanwhile.
    pub(in crate::qcow2) const LAZY_REFCOUNTS: u64 = 1 << 0;
}

/// Features, as a new image names them for programs that do not know them: kind, bit and name.
const FEATURES: &[(u8, u8, &str)] = &[
    (0, 0, "dirty bit"),
    (0, 1, "corrupt bit"),
    (0, 2, "external data file"),
    (0, 3, "compression type"),
    (0, 4, "extended L2 entries"),
    (1, 0, "lazy refcounts"),
    (2, 0, "bitmaps"),
    (2, 1, "raw external data"),
];

/// The data of the extension with names of features ("Feature name table").
pub(super) fn feature_table() -> Vec<u8> {
    let mut all = Vec::new();
    for (kind, bit, name) in FEATURES {
        let start = all.len();
        all.extend([*kind, *bit]);
        all.extend(name.as_bytes());
        all.resize(start + FEATURE_LEN, 0);
    }
    all
}

/// Auto-clear features ("Header", bytes 88 to 95).
pub(super) mod autoclear {
    /// The bitmaps are consistent with the disk.
    pub(in crate::qcow2) const BITMAPS: u64 = 1 << 0;
    /// The external data file is a raw image of the disk.
    pub(in crate::qcow2) const RAW_DATA_FILE: u64 = 1 << 1;
    /// All that this program keeps right. A writer clears the others.
    pub(in crate::qcow2) const KNOWN: u64 = BITMAPS | RAW_DATA_FILE;
}

/// The offset of the place of the backing file's name, of the auto-clear features, and of the place and length of the refcount table.
pub(super) const BACKING_AT: u64 = 8;
pub(super) const AUTOCLEAR_AT: u64 = 88;
/// The offset of the compatible features.
pub(super) const COMPATIBLE_AT: u64 = 80;
pub(super) const REFCOUNT_TABLE_AT: u64 = 48;

/// Types of extensions ("Header extensions").
pub(super) mod extension {
    pub(in crate::qcow2) const END: u32 = 0;
    pub(in crate::qcow2) const BACKING_FORMAT: u32 = 0xe279_2aca;
    pub(in crate::qcow2) const FEATURE_NAMES: u32 = 0x6803_f857;
    pub(super) const BITMAPS: u32 = 0x2385_2875;
    pub(in crate::qcow2) const DATA_FILE: u32 = 0x4441_5441;
}

/// How clusters are compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CompressionType {
    /// A deflate stream without zlib's header.
    Deflate,
    /// A zstd frame.
    Zstd,
}

/// Place of the table of snapshots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SnapshotTable {
    pub(super) offset: u64,
    pub(super) count: u32,
}

/// Place of the directory of bitmaps; lengths in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct BitmapDirectory {
    pub(super) count: u32,
    pub(super) offset: u64,
    pub(super) len: u64,
}

/// An L1 table: its offset in the image file, and its number of entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct L1Place {
    pub(super) offset: u64,
    pub(super) entries: u32,
}

/// The refcount table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RefcountTable {
    pub(super) offset: u64,
    /// Length in clusters.
    pub(super) clusters: u32,
    /// log2 of the bits of a refcount, at most 6.
    pub(super) order: u32,
}

/// A header that was checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Header {
    /// 2 or 3.
    pub(super) version: u32,
    /// log2 of the cluster size in bytes, 9 to 21.
    pub(super) cluster_bits: u32,
    /// Size of the disk in bytes, at most 2^63 - 1.
    pub(super) size: u64,
    pub(super) l1: L1Place,
    pub(super) refcounts: RefcountTable,
    pub(super) snapshots: SnapshotTable,
    /// Bits of [`incompatible`]; no others.
    pub(super) incompatible: u64,
    /// Compatible features, known or not ("Header", bytes 80 to 87).
    pub(super) compatible: u64,
    /// Bits of [`autoclear`], and unknown ones.
    pub(super) autoclear: u64,
    pub(super) compression: CompressionType,
    /// The name of the backing file, as it is in the image.
    pub(super) backing: Option<String>,
    /// The format of the backing file.
    pub(super) backing_format: Option<String>,
    /// The name of the external data file; none if the image leaves it to the user.
    pub(super) data_file: Option<String>,
    /// The directory of bitmaps, if they are consistent.
    pub(super) bitmaps: Option<BitmapDirectory>,
}

impl Header {
    /// Cluster size in bytes.
    pub(super) fn cluster(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Whether an incompatible feature is used.
    pub(super) fn has(&self, feature: u64) -> bool {
        self.incompatible & feature != 0
    }

    /// Whether guest data is in another file that is a raw image of the disk.
    pub(super) fn has_raw_data_file(&self) -> bool {
        self.has(incompatible::DATA_FILE) && self.autoclear & autoclear::RAW_DATA_FILE != 0
    }

    /// Whether L2 entries have 128 bits.
    pub(super) fn is_extended(&self) -> bool {
        self.has(incompatible::EXTENDED_L2)
    }

    /// The cluster size of an image, from its first bytes.
    ///
    /// # Errors
    /// If it is no qcow2 image, or has no possible cluster size.
    pub(super) fn cluster_bits(head: &[u8]) -> Result<u32> {
        if !head.starts_with(&MAGIC) {
            return Err(super::error::usage(
                "the file does not begin as a qcow2 image: use file:PATH for a raw one",
            ));
        }
        let (version, bits) = be32(head, 4).zip(be32(head, 20)).ok_or_else(cut_short)?;
        if !(2..=3).contains(&version) {
            let way = "convert it to version 3 with \"qemu-img convert -O qcow2\"";
            return Err(unsupported(format!("version {version} of the format is not known"), way));
        }
        if !CLUSTER_BITS.contains(&bits) {
            return Err(damaged(format!("cluster size 2^{bits} in the header (2^9 to 2^21)")));
        }
        Ok(bits)
    }

    /// Reads the header and its extensions from an image's first cluster; the file may be shorter
    /// than that.
    ///
    /// # Errors
    /// If a field is out of range, or the image has features that this program does not know.
    pub(super) fn parse(first: &[u8]) -> Result<Header> {
        let cluster_bits = Header::cluster_bits(first)?;
        let fixed = FixedFields::parse(first, cluster_bits)?;
        let found = Extensions::parse(first, fixed.len)?;
        fixed.check_incompatible(&found.feature_names)?;
        let compression = fixed.compression()?;
        let backing = fixed.backing(first)?;
        if backing.is_some() && fixed.has_raw_data_file() {
            return Err(damaged("a backing file and a raw external data file at once"));
        }
        let bitmaps = found.bitmaps.filter(|_| fixed.autoclear & autoclear::BITMAPS != 0);
        Ok(Header {
            version: fixed.version,
            cluster_bits,
            size: fixed.size,
            l1: fixed.l1,
            refcounts: fixed.refcounts,
            snapshots: fixed.snapshots,
            incompatible: fixed.incompatible,
            compatible: fixed.compatible,
            autoclear: fixed.autoclear,
            compression,
            backing,
            backing_format: found.backing_format,
            data_file: found.data_file,
            bitmaps,
        })
    }
}

/// Where the parts of the first cluster are that name bitmaps, or must make room for that; offsets in
/// bytes.
pub(super) struct Area {
    /// The bitmaps extension.
    pub(super) bitmaps: Option<usize>,
    /// The last extension, which marks the end of all.
    pub(super) end: usize,
    /// Offset and length of the name of the backing file.
    pub(super) name: Option<(u64, u64)>,
    pub(super) autoclear: u64,
}

impl Area {
    /// Length in bytes of the bitmaps extension, and of the one that marks the end.
    pub(super) const BITMAPS_LEN: usize = 32;
    pub(super) const END_LEN: usize = 8;

    /// Finds the parts in an image's first cluster.
    ///
    /// # Errors
    /// If the header is damaged.
    pub(super) fn find(first: &[u8]) -> Result<Area> {
        let fixed = FixedFields::parse(first, Header::cluster_bits(first)?)?;
        let mut bitmaps = None;
        let end = walk_extensions(first, fixed.len, |at, kind, _| {
            if kind == extension::BITMAPS {
                bitmaps = Some(at);
            }
            Ok(())
        })?;
        let name = (fixed.backing_offset != 0)
            .then_some((fixed.backing_offset, u64::from(fixed.backing_len)));
        Ok(Area { bitmaps, end, name, autoclear: fixed.autoclear })
    }
}

/// The first bytes of an image with other names of its backing file and that file's format, or none: the
/// header, its extensions and the name, to be written at the beginning of the file.
///
/// # Errors
/// [`Kind::Usage`](blockhaul_block::Kind::Usage) if the name is too long for the first cluster, and
/// if the header is damaged.
pub(super) fn with_backing(first: &[u8], names: Option<(&str, &str)>) -> Result<Vec<u8>> {
    let fixed = FixedFields::parse(first, Header::cluster_bits(first)?)?;
    let old_name_end = fixed.backing_offset.saturating_add(fixed.backing_len.into());
    let mut new = first.get(..fixed.len).ok_or_else(cut_short)?.to_vec();
    if let Some((_, format)) = names {
        push_extension(&mut new, extension::BACKING_FORMAT, format.as_bytes());
    }
    let end = walk_extensions(first, fixed.len, |_, kind, data| {
        if kind != extension::BACKING_FORMAT {
            push_extension(&mut new, kind, data);
        }
        Ok(())
    })?;
    push_extension(&mut new, extension::END, &[]);
    let name = names.map_or("", |(name, _)| name);
    let place = if name.is_empty() { 0 } else { new.len() as u64 };
    let room = fixed.cluster().saturating_sub(new.len() as u64).min(BACKING_NAME_MAX.into());
    let len = u32::try_from(name.len()).ok().filter(|&len| u64::from(len) <= room);
    let Some(len) = len else {
        let text = format!("the name of the backing file has {} bytes, of {room}", name.len());
        return Err(super::error::usage(text));
    };
    let at = index(BACKING_AT);
    new[at..at + 8].copy_from_slice(&place.to_be_bytes());
    new[at + 8..at + 12].copy_from_slice(&len.to_be_bytes());
    new.extend(name.as_bytes());
    // Nothing of the old names is left behind the new ones.
    let old_end = old_name_end.max((end + Area::END_LEN) as u64).min(first.len() as u64);
    new.resize(new.len().max(index(old_end)), 0);
    Ok(new)
}

/// The header of an image of version 2 as one of version 3.
#[derive(Debug)]
pub(super) struct HeaderUpgrade {
    /// The first 512 bytes of the file.
    pub(super) sector: Vec<u8>,
    /// A place behind them for the name of the backing file, and the name, if it has no room in them.
    pub(super) name: Option<(u64, Vec<u8>)>,
}

/// The header of an image of version 2, in its first cluster, as one of version 3.
///
/// # Errors
/// [`Kind::Unsupported`](blockhaul_block::Kind::Unsupported) if its extensions and names have no room, and
/// if the header is damaged.
pub(super) fn upgraded(first: &[u8]) -> Result<HeaderUpgrade> {
    let fixed = FixedFields::parse(first, Header::cluster_bits(first)?)?;
    let mut new = first.get(..LEN_V2).ok_or_else(cut_short)?.to_vec();
    new[4..8].copy_from_slice(&3_u32.to_be_bytes());
    // No features.
    new.resize(96, 0);
    new.extend(REFCOUNT_ORDER_V2.to_be_bytes());
    new.extend(LEN_NEW.to_be_bytes());
    new.resize(index(LEN_NEW.into()), 0);
    let end = walk_extensions(first, fixed.len, |_, kind, data| {
        push_extension(&mut new, kind, data);
        Ok(())
    })?;
    push_extension(&mut new, extension::END, &[]);
    let no_room = || {
        let what = "the first cluster has no room for a header of version 3";
        unsupported(what, "copy the disk to a new image")
    };
    if new.len() > SECTOR {
        return Err(no_room());
    }
    let (at, len) = (fixed.backing_offset, u64::from(fixed.backing_len));
    let name_end = at.saturating_add(len);
    let name = match len {
        0 => Vec::new(),
        _ => first.get(index(at)..index(name_end)).ok_or_else(no_room)?.to_vec(),
    };
    let mut behind = None;
    if !name.is_empty() {
        let mut place = new.len() as u64;
        if new.len() + name.len() <= SECTOR {
            new.extend(name);
        } else {
            // The old name stays until the header names the new place.
            place = name_end.max(end as u64).max(SECTOR as u64).next_multiple_of(8);
            if place + len > fixed.cluster() {
                return Err(no_room());
            }
            behind = Some((place, name));
        }
        new[index(BACKING_AT)..index(BACKING_AT) + 8].copy_from_slice(&place.to_be_bytes());
    }
    new.resize(SECTOR, 0);
    Ok(HeaderUpgrade { sector: new, name: behind })
}

pub(super) fn push_extension(header: &mut Vec<u8>, kind: u32, data: &[u8]) {
    header.extend(kind.to_be_bytes());
    // Lengths were read from 32 bits, or are those of short names.
    header.extend(u32::try_from(data.len()).unwrap_or(u32::MAX).to_be_bytes());
    header.extend(data);
    header.resize(header.len().next_multiple_of(8), 0);
}

/// The bitmaps extension for a directory.
pub(super) fn bitmaps_extension(directory: BitmapDirectory) -> Vec<u8> {
    let BitmapDirectory { count, offset, len } = directory;
    let mut bytes = extension::BITMAPS.to_be_bytes().to_vec();
    bytes.extend(24_u32.to_be_bytes());
    bytes.extend(count.to_be_bytes());
    bytes.extend([0; 4]);
    bytes.extend(len.to_be_bytes());
    bytes.extend(offset.to_be_bytes());
    bytes
}

/// Reads the extensions in the first cluster from an offset on, with their offsets, but for the last,
/// which marks their end; returns its offset. The area may end with the file.
fn walk_extensions(
    first: &[u8],
    start: usize,
    mut found: impl FnMut(usize, u32, &[u8]) -> Result<()>,
) -> Result<usize> {
    let mut at = start;
    for _ in 0..EXTENSIONS_MAX {
        let Some((kind, len)) = be32(first, at).zip(be32(first, at + 4)) else { break };
        if kind == extension::END {
            break;
        }
        let len = index(len.into());
        let end = (at + 8).checked_add(len);
        let Some(data) = end.and_then(|end| first.get(at + 8..end)) else {
            return Err(damaged(format!(
                "header extension {kind:#x} at offset {at} exceeds the first cluster"
            )));
        };
        found(at, kind, data)?;
        // The length is at most that of a cluster.
        at += 8 + len.next_multiple_of(8);
    }
    Ok(at)
}

fn cut_short() -> blockhaul_block::Error {
    damaged("the file ends within its header")
}

/// The fields at fixed offsets.
struct FixedFields {
    version: u32,
    cluster_bits: u32,
    backing_offset: u64,
    backing_len: u32,
    size: u64,
    l1: L1Place,
    refcounts: RefcountTable,
    snapshots: SnapshotTable,
    incompatible: u64,
    compatible: u64,
    autoclear: u64,
    /// 0: zlib, also if the header is too short for the field.
    compression_type: u8,
    /// Length in bytes.
    len: usize,
}

impl FixedFields {
    fn parse(head: &[u8], cluster_bits: u32) -> Result<FixedFields> {
        let word = |at| be32(head, at).ok_or_else(cut_short);
        let long = |at: u64| be64(head, index(at)).ok_or_else(cut_short);
        let version = word(4)?;
        // Version 2 ends here, and has the defaults of the rest.
        let is_new = version >= 3;
        let len = if is_new { index(word(100)?.into()) } else { LEN_V2 };
        let fixed = FixedFields {
            version,
            cluster_bits,
            backing_offset: long(8)?,
            backing_len: word(16)?,
            size: long(24)?,
            l1: L1Place { offset: long(40)?, entries: word(36)? },
            refcounts: RefcountTable {
                offset: long(REFCOUNT_TABLE_AT)?,
                clusters: word(56)?,
                order: if is_new { word(96)? } else { 4 },
            },
            snapshots: SnapshotTable { offset: long(64)?, count: word(60)? },
            incompatible: if is_new { long(72)? } else { 0 },
            compatible: if is_new { long(80)? } else { 0 },
            autoclear: if is_new { long(AUTOCLEAR_AT)? } else { 0 },
            compression_type: if len > LEN_V3 {
                *head.get(LEN_V3).ok_or_else(cut_short)?
            } else {
                0
            },
            len,
        };
        fixed.check(word(32)?)?;
        fixed.check_tables()?;
        Ok(fixed)
    }

    fn cluster(&self) -> u64 {
        1 << self.cluster_bits
    }

    fn check(&self, crypt_method: u32) -> Result<()> {
        let len = self.len as u64;
        if self.version >= 3
            && (len < LEN_V3 as u64 || !len.is_multiple_of(8) || len > self.cluster())
        {
            return Err(damaged(format!("header length {len}")));
        }
        if i64::try_from(self.size).is_err() {
            return Err(damaged(format!("disk size {} (at most 2^63 - 1)", self.size)));
        }
        let refcount_order = self.refcounts.order;
        if refcount_order > 6 {
            return Err(damaged(format!("refcounts of 2^{refcount_order} bits (at most 2^6)")));
        }
        let method = match crypt_method {
            0 => return Ok(()),
            1 => "AES".to_string(),
            2 => "LUKS".to_string(),
            other => format!("method {other}"),
        };
        let way = "decrypt it with \"qemu-img convert --image-opts\" first, or open it with [ qemu-nbd … ]";
        Err(unsupported(format!("the image is encrypted ({method})"), way))
    }

    fn check_tables(&self) -> Result<()> {
        let aligned = |what: &str, offset: u64| {
            if offset.is_multiple_of(self.cluster()) {
                Ok(())
            } else {
                Err(damaged(format!(
                    "the {what} begins at offset {offset}, which is not a multiple of the cluster size {}",
                    self.cluster()
                )))
            }
        };
        aligned("L1 table", self.l1.offset)?;
        aligned("refcount table", self.refcounts.offset)?;
        if self.snapshots.count > 0 {
            aligned("snapshot table", self.snapshots.offset)?;
        }
        check_l1_len(self.l1)?;
        let len = u64::from(self.refcounts.clusters) << self.cluster_bits;
        if len > REFCOUNT_TABLE_MAX {
            return Err(damaged(format!("a refcount table of {len} bytes (at most 8 MiB)")));
        }
        Ok(())
    }

    /// Refuses features that this program does not know, by the names that the image gives them.
    fn check_incompatible(&self, names: &[FeatureName]) -> Result<()> {
        let unknown = self.incompatible & !incompatible::KNOWN;
        if unknown != 0 {
            let bits = (0..64).filter(|bit| unknown & (1 << bit) != 0);
            let list: Vec<_> = bits.map(|bit| name_of(names, bit)).collect();
            let what = format!("the image has unknown incompatible features: {}", list.join(", "));
            let way = "use [ qemu-nbd -r -f qcow2 IMAGE ] of a QEMU that knows them";
            return Err(unsupported(what, way));
        }
        if self.incompatible & incompatible::EXTENDED_L2 != 0
            && self.cluster_bits < EXTENDED_BITS_MIN
        {
            let cluster = self.cluster();
            return Err(damaged(format!("extended L2 entries with clusters of {cluster} bytes")));
        }
        Ok(())
    }

    fn compression(&self) -> Result<CompressionType> {
        let flagged = self.incompatible & incompatible::COMPRESSION != 0;
        match (self.compression_type, flagged) {
            (0, false) => Ok(CompressionType::Deflate),
            (1, true) => Ok(CompressionType::Zstd),
            (0 | 1, _) => Err(damaged("the compression type contradicts its feature bit")),
            (other, _) => Err(unsupported(
                format!("compression type {other} is not known"),
                "use [ qemu-nbd -r -f qcow2 IMAGE ] of a QEMU that knows it",
            )),
        }
    }

    fn has_raw_data_file(&self) -> bool {
        self.autoclear & autoclear::RAW_DATA_FILE != 0
            && self.incompatible & incompatible::DATA_FILE != 0
    }

    fn backing(&self, first: &[u8]) -> Result<Option<String>> {
        if self.backing_offset == 0 {
            return Ok(None);
        }
        let start = self.backing_offset;
        let len = self.backing_len;
        let place = || format!("the name of the backing file, {len} bytes at offset {start}");
        let end = start.checked_add(len.into()).filter(|&end| end <= self.cluster());
        let Some(end) = end.filter(|_| len <= BACKING_NAME_MAX) else {
            return Err(damaged(format!("{}, exceeds the first cluster or 1023 bytes", place())));
        };
        let bytes = first.get(index(start)..index(end));
        let bytes = bytes.ok_or_else(|| damaged(format!("the file ends before {}", place())))?;
        // QEMU takes an empty name for none.
        if bytes.is_empty() {
            return Ok(None);
        }
        let name = std::str::from_utf8(bytes).ok().filter(|name| !name.contains('\0'));
        let way = "name the backing device with backing=DEVICE";
        match name {
            Some(name) => Ok(Some(name.to_string())),
            None => Err(unsupported("the name of the backing file is not UTF-8", way)),
        }
    }
}

/// Checks the length of an L1 table, also that of a snapshot.
pub(super) fn check_l1_len(l1: L1Place) -> Result<()> {
    let len = u64::from(l1.entries) * 8;
    if len > L1_MAX {
        return Err(damaged(format!("an L1 table of {len} bytes (at most 32 MiB)")));
    }
    Ok(())
}

/// Why an image cannot be opened by a program that knows what this one does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OpenObstacle {
    /// Incompatible features that are not known: the names that the image gives them, and the bits of
    /// those that it does not name.
    Features(Vec<String>, u64),
    /// The disk is larger than any table can describe.
    TooLarge,
}

/// Finds out whether an image can be opened from its first bytes, a cluster or all of a shorter file;
/// none also if they are damaged.
pub(super) fn obstacle(first: &[u8]) -> Option<OpenObstacle> {
    let cluster_bits = Header::cluster_bits(first).ok()?;
    let fixed = FixedFields::parse(first, cluster_bits).ok()?;
    let first = first.get(..index(fixed.cluster())).unwrap_or(first);
    let unknown = fixed.incompatible & !incompatible::KNOWN;
    if unknown != 0 {
        let mut unnamed = unknown;
        let mut names = Vec::new();
        for one in Extensions::parse(first, fixed.len).ok()?.feature_names {
            let bit = 1_u64.checked_shl(one.bit.into()).unwrap_or(0);
            if one.kind == 0 && unnamed & bit != 0 {
                unnamed &= !bit;
                names.push(one.name);
            }
        }
        return Some(OpenObstacle::Features(names, unnamed));
    }
    // An L2 table has at least 32 entries.
    let entries = fixed.size >> (2 * cluster_bits - 3);
    (entries > i32::MAX.unsigned_abs().into()).then_some(OpenObstacle::TooLarge)
}

struct FeatureName {
    /// 0: incompatible.
    kind: u8,
    bit: u8,
    name: String,
}

fn name_of(names: &[FeatureName], bit: u8) -> String {
    let found = names.iter().find(|name| name.kind == 0 && name.bit == bit);
    found.map_or_else(|| format!("bit {bit}"), |found| format!("{:?} (bit {bit})", found.name))
}

/// What the extensions say.
#[derive(Default)]
struct Extensions {
    backing_format: Option<String>,
    data_file: Option<String>,
    bitmaps: Option<BitmapDirectory>,
    feature_names: Vec<FeatureName>,
}

impl Extensions {
    /// Reads the extensions in the first cluster from an offset on. The area may end with the file.
    fn parse(first: &[u8], start: usize) -> Result<Extensions> {
        let mut found = Extensions::default();
        walk_extensions(first, start, |_, kind, data| found.add(kind, data))?;
        Ok(found)
    }

    fn add(&mut self, kind: u32, data: &[u8]) -> Result<()> {
        match kind {
            extension::BACKING_FORMAT => self.backing_format = Some(text(data)),
            extension::DATA_FILE => self.data_file = Some(text(data)),
            extension::FEATURE_NAMES => self.feature_names = feature_names(data),
            extension::BITMAPS => self.bitmaps = Some(bitmaps(data)?),
            // "Other": can be safely ignored.
            _ => {}
        }
        Ok(())
    }
}

fn feature_names(data: &[u8]) -> Vec<FeatureName> {
    // QEMU fills up the last one.
    let entries = data.chunks(FEATURE_LEN).filter(|entry| entry.len() > 2);
    let parse = |entry: &[u8]| {
        let name = entry[2..].split(|&byte| byte == 0).next().unwrap_or_default();
        FeatureName { kind: entry[0], bit: entry[1], name: text(name) }
    };
    entries.map(parse).collect()
}

fn bitmaps(data: &[u8]) -> Result<BitmapDirectory> {
    let short = || damaged(format!("a bitmaps extension of {} bytes (24)", data.len()));
    let count = be32(data, 0).ok_or_else(short)?;
    let (len, offset) = be64(data, 8).zip(be64(data, 16)).ok_or_else(short)?;
    Ok(BitmapDirectory { count, offset, len })
}
