//! `as-vmdk:DEVICE`: a device whose contents are a streamOptimized image of another device
//! ("Stream-Optimized Compressed Sparse Extents"), made as they are read.
//!
//! Header and descriptor come first, then for each table its grains and the table itself, then the
//! directory and the footer with its place. The lengths of compressed grains must be known before:
//! all data is compressed once when the device is opened.

use std::sync::Arc;

use blockhaul_block::{Device, Error, Result};
use blockhaul_catalog::{Backend, BackendTarget, OpenFuture, OpenedDevice, Param, ParamKind};
use blockhaul_io::Pool;

use super::sparse::{AT_END, HOSTED, SECTOR};
use crate::block_plan::BlockPlan;
use crate::bytes::index;
use crate::image_view::{self, ImagePart, ImageView, changed};
use crate::mapped::usage;
use crate::pack::{ClusterEncoding, ClusterReadAhead, ClusterStorage, CompressedClusters, pool};

const FORMAT: &str = "as-vmdk";
/// Grain size in bytes, and grains of a table: those of all programs.
const GRAIN: u64 = 64 << 10;
const ENTRIES: u64 = 512;
/// Bytes of the disk that a table covers.
const COVERS: u64 = GRAIN * ENTRIES;
/// Length of a table in bytes, and of the marker before it.
const TABLE: u64 = ENTRIES * 4;
const MARKER: u64 = SECTOR;
/// Offset of the first grain.
const OVERHEAD: u64 = 64 << 10;
/// Length of the descriptor in sectors.
const DESCRIPTOR_SECTORS: u64 = 20;
/// Largest disk in bytes: 62 TiB, the limit of VMware.
const SIZE_MAX: u64 = 62 << 40;
/// Types of markers ("Metadata Marker").
const GRAIN_TABLE: u32 = 1;
const GRAIN_DIRECTORY: u32 = 2;
const FOOTER: u32 = 3;
/// Flags: the test of line ends is valid, grains are compressed, and there are markers.
const FLAGS: u32 = 1 << 0 | 1 << 16 | 1 << 17;
/// Default of the option `level`, and of `memory` in bytes.
const LEVEL: u8 = 6;
const MEMORY: u64 = 32 << 20;

/// The backend `as-vmdk:DEVICE`.
pub struct AsVmdk;

impl Backend for AsVmdk {
    fn schemes(&self) -> &'static [&'static str] {
        &["as-vmdk"]
    }

    fn operand(&self) -> &'static str {
        "DEVICE"
    }

    fn summary(&self) -> &'static str {
        "a compressed VMDK image of DEVICE (streamOptimized, as in an OVA), made as it is read; DEVICE must not \
         change in the meantime. It is a path, or any device, where %3f is a question mark and %25 a percent sign"
    }

    fn example(&self) -> &'static str {
        r#"
blockhaul copy sample:64M disk.raw && blockhaul copy as-vmdk:disk.raw disk.vmdk
blockhaul copy 'as-vmdk:disk.raw?level=1' - > fast.vmdk
"#
    }

    fn params(&self) -> &'static [Param] {
        &[
            Param {
                name: "level",
                kind: ParamKind::Number,
                default: Some("6"),
                doc: "Compression level, 1 to 9. All data is compressed when the device is opened, for its length, \
                      and what does not fit in memory again when it is read.",
            },
            Param {
                name: "adapter",
                kind: ParamKind::Choice(&["lsilogic", "buslogic", "ide"]),
                default: Some("lsilogic"),
                doc: "Type of the controller that the descriptor names.",
            },
            Param {
                name: "memory",
                kind: ParamKind::Size,
                default: Some("32M"),
                doc: "Memory for compressed data.",
            },
        ]
    }

    fn open(&self, target: BackendTarget) -> OpenFuture<OpenedDevice> {
        Box::pin(async move {
            let level = level(&target)?;
            let memory = target.args.size("memory").unwrap_or(MEMORY);
            let adapter = target.args.text("adapter").unwrap_or("lsilogic");
            image_view::open(&target, async |source| make(source, level, memory, adapter).await)
                .await
        })
    }
}

/// The compression level of a description.
fn level(target: &BackendTarget) -> Result<u8> {
    let level = target.args.number("level").unwrap_or(LEVEL.into());
    let level = u8::try_from(level).ok().filter(|level| (1..=9).contains(level));
    level.ok_or_else(|| usage(FORMAT, "the compression level is not 1 to 9"))
}

/// An image, whose grains are compressed once for their lengths.
async fn make(
    source: &Arc<dyn Device>,
    level: u8,
    memory: u64,
    adapter: &str,
) -> Result<VmdkStreamImage> {
    let facts = source.facts();
    let size = facts.size.checked_next_multiple_of(SECTOR).filter(|size| *size <= SIZE_MAX);
    let too_large = || usage(FORMAT, format!("a disk of {} bytes: at most {SIZE_MAX}", facts.size));
    let size = size.ok_or_else(too_large)?;
    let mut plan = BlockPlan::new(GRAIN, ENTRIES);
    plan.find_data(source).await?;
    let made = plan.measure(source, ClusterEncoding::Grain(level), memory).await?;
    let layout = VmdkStreamLayout::new(plan, size, adapter)?;
    Ok(VmdkStreamImage { layout, made, level, pool: pool(GRAIN) })
}

/// A table that has grains.
struct GrainTable {
    number: u64,
    /// Offset of its first grain in the image.
    start: u64,
    /// Offset of the marker before the table itself.
    marker: u64,
    sectors: Vec<u16>,
}

impl GrainTable {
    /// The grains that are stored: number, offset and length in the image.
    fn grains(&self) -> impl Iterator<Item = (u64, u64, u64)> + '_ {
        let mut next = self.start;
        let numbered =
            (self.number * ENTRIES..).zip(&self.sectors).filter(|(_, sectors)| **sectors > 0);
        numbered.map(move |(grain, sectors)| {
            let at = next;
            let len = u64::from(*sectors) * SECTOR;
            next += len;
            (grain, at, len)
        })
    }

    /// The marker and the table.
    fn bytes(&self) -> Vec<u8> {
        let mut bytes = marker(TABLE / SECTOR, GRAIN_TABLE);
        let mut entries = vec![0_u32; index(ENTRIES)];
        for (grain, at, _) in self.grains() {
            if let Some(entry) = entries.get_mut(index(grain % ENTRIES)) {
                // Checked for the end of the image.
                *entry = u32::try_from(at / SECTOR).unwrap_or(0);
            }
        }
        entries.iter().for_each(|entry| bytes.extend_from_slice(&entry.to_le_bytes()));
        bytes
    }
}

/// Where everything is in the image.
struct VmdkStreamLayout {
    /// Header and descriptor.
    head: Vec<u8>,
    /// In order.
    tables: Vec<GrainTable>,
    /// Offset of what follows the tables, and its bytes.
    tail_at: u64,
    tail: Vec<u8>,
}

impl VmdkStreamLayout {
    fn new(plan: BlockPlan, size: u64, adapter: &str) -> Result<VmdkStreamLayout> {
        let mut next = OVERHEAD;
        let mut tables = Vec::new();
        for (number, grains) in plan.tables {
            let sectors: Vec<_> = grains.into_iter().map(sectors).collect();
            let len: u64 = sectors.iter().map(|sectors| u64::from(*sectors) * SECTOR).sum();
            if len > 0 {
                let marker = next + len;
                tables.push(GrainTable { number, start: next, marker, sectors });
                next = marker + MARKER + TABLE;
            }
        }
        if next / SECTOR > u32::MAX.into() {
            let text = format!("an image of {next} bytes, which the format cannot have");
            return Err(usage(FORMAT, text));
        }
        let mut directory = vec![0; index(size.div_ceil(COVERS) * 4)];
        for table in &tables {
            let at = index(table.number * 4);
            let sector = u32::try_from((table.marker + MARKER) / SECTOR).unwrap_or(0);
            if let Some(entry) = directory.get_mut(at..at + 4) {
                entry.copy_from_slice(&sector.to_le_bytes());
            }
        }
        directory.resize(directory.len().next_multiple_of(index(SECTOR)), 0);
        let mut head = header(size, AT_END);
        head.extend_from_slice(descriptor(size, adapter, &tables).as_bytes());
        head.resize(index(OVERHEAD), 0);
        let mut tail = marker(directory.len() as u64 / SECTOR, GRAIN_DIRECTORY);
        tail.extend_from_slice(&directory);
        tail.extend(marker(1, FOOTER));
        tail.extend(header(size, (next + MARKER) / SECTOR));
        // The end of the stream is a marker of zeroes.
        tail.resize(tail.len() + index(SECTOR), 0);
        Ok(VmdkStreamLayout { head, tables, tail_at: next, tail })
    }

    fn len(&self) -> u64 {
        self.tail_at + self.tail.len() as u64
    }

    /// The tables whose grains, or themselves, are in a range of the image.
    fn tables(&self, at: u64, end: u64) -> impl Iterator<Item = &GrainTable> {
        let first = self.tables.partition_point(|table| table.marker + MARKER + TABLE <= at);
        self.tables.iter().skip(first).take_while(move |table| table.start < end)
    }
}

/// How many sectors a grain needs: 0 if it is not stored.
fn sectors(stored: ClusterStorage) -> u16 {
    if let ClusterStorage::Packed(sectors) = stored { sectors } else { 0 }
}

/// A metadata marker ("Metadata Marker").
fn marker(sectors: u64, kind: u32) -> Vec<u8> {
    let mut bytes = vec![0; index(MARKER)];
    bytes[..8].copy_from_slice(&sectors.to_le_bytes());
    bytes[12..16].copy_from_slice(&kind.to_le_bytes());
    bytes
}

/// The header ("Sparse Extent Header"), with the directory at a sector.
fn header(size: u64, directory: u64) -> Vec<u8> {
    let mut bytes = vec![0; index(SECTOR)];
    let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
    put(0, HOSTED);
    put(4, &3_u32.to_le_bytes());
    put(8, &FLAGS.to_le_bytes());
    put(12, &(size / SECTOR).to_le_bytes());
    put(20, &(GRAIN / SECTOR).to_le_bytes());
    put(28, &1_u64.to_le_bytes());
    put(36, &DESCRIPTOR_SECTORS.to_le_bytes());
    put(44, &512_u32.to_le_bytes());
    put(56, &directory.to_le_bytes());
    put(64, &(OVERHEAD / SECTOR).to_le_bytes());
    // Bytes that a transfer as text would change.
    put(73, b"\n \r\n");
    put(77, &1_u16.to_le_bytes());
    bytes
}

/// The descriptor. Its identifier depends on what is stored, so that all handles have the same.
fn descriptor(size: u64, adapter: &str, tables: &[GrainTable]) -> String {
    let sectors = size / SECTOR;
    let mut crc = crate::crc32c::Crc32c::new();
    crc.add(&size.to_le_bytes());
    for table in tables {
        crc.add(&table.number.to_le_bytes());
        table.sectors.iter().for_each(|sectors| crc.add(&sectors.to_le_bytes()));
    }
    // The largest numbers have a meaning of their own.
    let id = crc.sum() & 0x7fff_ffff;
    let (heads, tracks) = if adapter == "ide" { (16, 63) } else { (255, 63) };
    let cylinders = sectors.div_ceil(heads * tracks).clamp(1, 65535);
    format!(
        "# Disk DescriptorFile\nversion=1\nCID={id:08x}\nparentCID=ffffffff\ncreateType=\"streamOptimized\"\n\n\
         # Extent description\nRW {sectors} SPARSE \"disk.vmdk\"\n\n# The Disk Data Base\n#DDB\n\n\
         ddb.virtualHWVersion = \"4\"\nddb.geometry.cylinders = \"{cylinders}\"\n\
         ddb.geometry.heads = \"{heads}\"\nddb.geometry.sectors = \"{tracks}\"\n\
         ddb.adapterType = \"{adapter}\"\n"
    )
}

/// What all handles share.
struct VmdkStreamImage {
    layout: VmdkStreamLayout,
    made: CompressedClusters,
    level: u8,
    /// Memory for grains of the source.
    pool: Pool,
}

impl ImageView for VmdkStreamImage {
    const SCHEME: &'static str = FORMAT;

    fn len(&self) -> u64 {
        self.layout.len()
    }

    fn plain(&self, _size: u64, _at: u64, _len: u64) -> Option<(u64, u64)> {
        // All grains are compressed.
        None
    }

    async fn fill(&self, source: &Arc<dyn Device>, part: &mut ImagePart<'_>) -> Result<()> {
        // All bytes belong to one of these.
        part.put(0, &self.layout.head);
        part.put(self.layout.tail_at, &self.layout.tail);
        for table in self.layout.tables(part.at, part.end()) {
            self.put_grains(source, table, part).await?;
            if table.marker < part.end() {
                part.put(table.marker, &table.bytes());
            }
        }
        Ok(())
    }
}

impl VmdkStreamImage {
    /// Compresses the grains of a table that are in a part.
    async fn put_grains(
        &self,
        source: &Arc<dyn Device>,
        table: &GrainTable,
        part: &mut ImagePart<'_>,
    ) -> Result<()> {
        let (at, end) = (part.at, part.end());
        let inside = |(_, host, len): &(u64, u64, u64)| host + len > at && *host < end;
        let wanted: Vec<_> = table.grains().filter(inside).collect();
        let numbers = wanted.iter().map(|(grain, ..)| *grain);
        let ahead = ClusterReadAhead::new(
            source,
            &self.pool,
            GRAIN,
            ClusterEncoding::Grain(self.level),
            numbers,
        );
        let mut ahead = ahead.with_made(&self.made);
        let mut places = wanted.iter();
        while let Some(piece) = ahead.next().await {
            for packed in piece? {
                let (grain, host, len) = places.next().ok_or_else(Error::misfit)?;
                if packed.number != *grain || packed.bytes.len() as u64 != *len {
                    return Err(changed(FORMAT));
                }
                part.put(*host, packed.bytes.bytes());
            }
        }
        Ok(())
    }
}
