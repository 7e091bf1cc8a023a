//! Writes an image from front to back, to something that cannot seek: a pipe, or an upload.
//!
//! All tables come first, so everything is planned before the first byte. Without compression that
//! needs the extents of the source alone. Compressed clusters have lengths that are known only after
//! compression: the source is then read and compressed twice, first for the lengths. It must not
//! change in the meantime; if a cluster no longer fits its place, the image is given up.
//!
//! [`stream`] passes an image on; [`AsQcow2`] is a device whose contents are an image.

mod plan;
mod view;

use std::sync::Arc;

use blockhaul_block::{Device, Result};
use blockhaul_io::{Buf, Data};

pub use self::view::AsQcow2;

use self::plan::{REFCOUNT_ORDER, StreamTables};
use super::error::usage;
use super::header::MAGIC;
use crate::block_plan::BlockPlan;
use crate::bytes::index;
use crate::image_view::changed;
use crate::pack::{ClusterEncoding, ClusterReadAhead, CompressedClusters, pool};

/// Bytes of tables and small clusters that are passed on at once.
const PIECE: usize = 256 << 10;
/// Length in bytes of the header with the compression type, padded.
const HEADER_LEN: u32 = 112;
/// Incompatible feature: clusters are not compressed by zlib.
const COMPRESSION_TYPE: u64 = 1 << 3;
const ZSTD: u8 = 1;

/// How clusters are compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Codec {
    /// By zstd at this level, 1 to 19. QEMU reads it since version 5.1.
    Zstd(i32),
    /// By deflate at this level, 1 to 9, in parts of 4 KiB: larger, and for all readers.
    Deflate(u8),
}

/// How an image is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamOptions {
    /// Cluster size in bytes: a power of two from 512 to 2 MiB.
    pub cluster: u32,
    /// How clusters are compressed; none: they stay as they are.
    pub codec: Option<Codec>,
    /// Memory in bytes for compressed clusters between the two passes over the source: those that
    /// fit are compressed once.
    pub memory: u64,
}

impl StreamOptions {
    fn packing(self) -> ClusterEncoding {
        match self.codec {
            None => ClusterEncoding::Plain,
            Some(Codec::Zstd(level)) => ClusterEncoding::Zstd(level),
            Some(Codec::Deflate(level)) => ClusterEncoding::Deflate(level),
        }
    }
}

impl Default for StreamOptions {
    /// Clusters of 64 KiB, not compressed; 32 MiB of memory if they are.
    fn default() -> StreamOptions {
        StreamOptions { cluster: 64 << 10, codec: None, memory: 32 << 20 }
    }
}

/// What takes the bytes of an image, in order.
pub trait StreamSink {
    /// Takes the next bytes. The image is given up after an error.
    fn write(&mut self, bytes: Data) -> impl Future<Output = Result<()>>;
}

/// Writes an image of a disk, without a backing file, to `sink`; returns its length in bytes.
/// Version 3 of the format; its size is rounded up to 512 bytes, as QEMU does. The disk must be fenced and must not change. Call it on a worker.
///
/// Memory: 4 bytes for each cluster that an L2 table with data describes (32 KiB for each 512 MiB
/// with the default cluster size), some MiB for each worker, and [`StreamOptions::memory`].
///
/// # Errors
/// [`Kind::Usage`](blockhaul_block::Kind::Usage) if an option is out of range, or the cluster size too small for the disk; those
/// of the source and the sink; and [`Kind::Io`](blockhaul_block::Kind::Io) if the source has changed in the meantime.
pub async fn stream(
    source: &Arc<dyn Device>,
    options: StreamOptions,
    sink: &mut impl StreamSink,
) -> Result<u64> {
    let (tables, made) = plan(source, options).await?;
    let mut out = StreamOutput { sink, gathered: Vec::new(), at: 0 };
    write_tables(&tables, options, &mut out).await?;
    write_data(source, options, &tables, &made, &mut out).await?;
    out.pad_to(tables.len()).await?;
    out.pass_on().await?;
    Ok(out.at)
}

/// Plans the image of a disk; also the clusters that were compressed for that, as far as there is
/// memory.
async fn plan(
    source: &Arc<dyn Device>,
    options: StreamOptions,
) -> Result<(StreamTables, CompressedClusters)> {
    let cluster_bits = check(options)?;
    let size = source.facts().size.checked_next_multiple_of(512).unwrap_or(u64::MAX);
    let cluster = 1 << cluster_bits;
    let mut plan = BlockPlan::new(cluster, cluster / 8);
    plan.find_data(source).await?;
    let made = match options.codec {
        Some(_) => plan.measure(source, options.packing(), options.memory).await?,
        None => CompressedClusters::new(0),
    };
    Ok((StreamTables::new(plan, size)?, made))
}

/// The cluster size as a power of two.
fn check(options: StreamOptions) -> Result<u32> {
    let StreamOptions { cluster, codec, .. } = options;
    if !cluster.is_power_of_two() || !(512..=2 << 20).contains(&cluster) {
        return Err(usage(format!("clusters of {cluster} bytes: use a power of two, 512 to 2M")));
    }
    match codec {
        Some(Codec::Zstd(level)) if !(1..=19).contains(&level) => {
            Err(usage(format!("compression level {level}: use 1 to 19")))
        }
        Some(Codec::Deflate(level)) if !(1..=9).contains(&level) => {
            Err(usage(format!("compression level {level}: use 1 to 9")))
        }
        _ => Ok(cluster.trailing_zeros()),
    }
}

/// Passes bytes on in pieces.
struct StreamOutput<'a, S> {
    sink: &'a mut S,
    gathered: Vec<u8>,
    /// Bytes so far, with those that are gathered.
    at: u64,
}

impl<S: StreamSink> StreamOutput<'_, S> {
    async fn bytes(&mut self, bytes: &[u8]) -> Result<()> {
        self.gathered.extend_from_slice(bytes);
        self.at += bytes.len() as u64;
        if self.gathered.len() >= PIECE { self.pass_on().await } else { Ok(()) }
    }

    /// Passes a payload on without a copy, if it is long.
    async fn data(&mut self, data: Data) -> Result<()> {
        if data.len() < PIECE / 8 {
            return self.bytes(data.bytes()).await;
        }
        self.pass_on().await?;
        self.at += data.len() as u64;
        self.sink.write(data).await
    }

    async fn pass_on(&mut self) -> Result<()> {
        if self.gathered.is_empty() {
            return Ok(());
        }
        let mut buf = Buf::unpooled(self.gathered.len());
        buf.copy_from_slice(&self.gathered);
        self.gathered.clear();
        self.sink.write(buf.into()).await
    }

    /// Zeroes up to an offset; fails if it is behind.
    async fn pad_to(&mut self, end: u64) -> Result<()> {
        let mut left = end.checked_sub(self.at).ok_or_else(|| changed("qcow2"))?;
        while left > 0 {
            let now = left.min(Data::ZEROES_MAX as u64);
            self.bytes(Data::zeroes(index(now)).bytes()).await?;
            left -= now;
        }
        Ok(())
    }
}

async fn write_tables(
    tables: &StreamTables,
    options: StreamOptions,
    out: &mut StreamOutput<'_, impl StreamSink>,
) -> Result<()> {
    for cluster in 0..tables.parts.data {
        out.bytes(&table(tables, options, cluster)).await?;
    }
    Ok(())
}

/// A cluster of the image before its data.
fn table(tables: &StreamTables, options: StreamOptions, cluster: u64) -> Vec<u8> {
    if cluster > 0 {
        return tables.table(cluster);
    }
    let mut bytes = header(tables, options);
    bytes.resize(index(tables.cluster()), 0);
    bytes
}

/// The header, without extensions ("Header"), and the end of the list of extensions.
fn header(tables: &StreamTables, options: StreamOptions) -> Vec<u8> {
    let parts = tables.parts;
    let bits = tables.cluster().trailing_zeros();
    let mut bytes = vec![0; index(HEADER_LEN.into()) + 8];
    let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
    put(0, &MAGIC);
    put(4, &3_u32.to_be_bytes());
    put(20, &bits.to_be_bytes());
    put(24, &tables.size.to_be_bytes());
    // At most 2^22 entries, and 2^14 clusters.
    put(36, &u32::try_from(parts.l1_entries).unwrap_or(u32::MAX).to_be_bytes());
    put(40, &tables.offset(parts.l1).to_be_bytes());
    put(48, &tables.offset(parts.refcount_table).to_be_bytes());
    put(56, &u32::try_from(parts.refcount_table_len).unwrap_or(u32::MAX).to_be_bytes());
    if matches!(options.codec, Some(Codec::Zstd(_))) {
        put(72, &COMPRESSION_TYPE.to_be_bytes());
        put(104, &[ZSTD]);
    }
    put(96, &REFCOUNT_ORDER.to_be_bytes());
    put(100, &HEADER_LEN.to_be_bytes());
    bytes
}

async fn write_data(
    source: &Arc<dyn Device>,
    options: StreamOptions,
    tables: &StreamTables,
    made: &CompressedClusters,
    out: &mut StreamOutput<'_, impl StreamSink>,
) -> Result<()> {
    let numbers = tables.placed(0).map(|placed| placed.number);
    let pool = pool(tables.cluster());
    let ahead = ClusterReadAhead::new(source, &pool, tables.cluster(), options.packing(), numbers);
    let mut ahead = ahead.with_made(made);
    let mut placed = tables.placed(0);
    while let Some(piece) = ahead.next().await {
        for packed in piece? {
            let place = placed.next().filter(|place| place.number == packed.number);
            let place = place.filter(|place| place.stored == packed.stored);
            let place = place.ok_or_else(|| changed("qcow2"))?;
            out.pad_to(place.host).await?;
            out.data(packed.bytes).await?;
        }
    }
    Ok(())
}
