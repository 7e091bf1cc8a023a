//! Reads clusters of a disk in order, ahead of their use, and compresses them on all processors.

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use blockhaul_block::{Device, Error, Kind, Reply, Request, Result};
use blockhaul_io::{Buf, Data, Pool, Task, is_zero};
use miniz_oxide::DataFormat;
use miniz_oxide::deflate::core::{
    CompressorOxide, TDEFLFlush, TDEFLStatus, compress as deflate_core,
};

use crate::bytes::index;
use crate::storage;

/// Memory of a compressed cluster that is kept, beside its bytes.
const ENTRY: u64 = 128;
/// Bytes of the disk that are read and compressed as one piece, unless a cluster is larger.
pub(crate) const BATCH: u64 = 512 << 10;
/// Pieces for each worker that are in flight.
const AHEAD: usize = 3;

thread_local! {
    /// A compressor has some 100 KiB of tables: each thread keeps its own, with its level.
    static ZSTD: RefCell<Option<(i32, zstd::bulk::Compressor<'static>)>> =
        const { RefCell::new(None) };
    static DEFLATE: RefCell<Option<Box<CompressorOxide>>> = const { RefCell::new(None) };
}

/// Compressed clusters begin at sectors, so that their lengths fit in 16 bits.
pub(crate) const SECTOR: u64 = 512;
/// Distance in bytes that readers of qcow2 look back in a deflate stream.
const WINDOW: usize = 4096;
/// Length in bytes of the marker before a grain.
const GRAIN_MARKER: usize = 12;

/// How clusters are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ClusterEncoding {
    /// As they are.
    Plain,
    /// Compressed by zstd at this level.
    Zstd(i32),
    /// Compressed at this level of deflate, 1 to 9, for readers that remember 4 KiB.
    Deflate(u8),
    /// As grains of a VMDK, compressed at this level of deflate, 1 to 9.
    Grain(u8),
}

/// How a cluster of the disk is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ClusterStorage {
    /// Not at all: it reads as zeroes.
    Not,
    Plain,
    /// Compressed, in this number of sectors.
    Packed(u16),
}

/// A cluster as it is to be stored.
pub(crate) struct PackedCluster {
    pub(crate) number: u64,
    pub(crate) stored: ClusterStorage,
    /// As many bytes as `stored` says.
    pub(crate) bytes: Data,
}

/// Compressed clusters that are kept until they are written, so that they are not made again.
#[derive(Default)]
pub(crate) struct CompressedClusters {
    /// Memory that is left, in bytes.
    room: u64,
    clusters: HashMap<u64, Data>,
}

impl CompressedClusters {
    /// Keeps clusters of together at most `memory` bytes.
    pub(crate) fn new(memory: u64) -> CompressedClusters {
        CompressedClusters { room: memory, clusters: HashMap::new() }
    }

    pub(crate) fn keep(&mut self, packed: &PackedCluster) {
        let cost = packed.bytes.len() as u64 + ENTRY;
        if matches!(packed.stored, ClusterStorage::Packed(_)) && cost <= self.room {
            self.room -= cost;
            self.clusters.insert(packed.number, packed.bytes.clone());
        }
    }

    /// A piece, if all of its clusters are kept.
    fn piece(&self, (first, count): Batch) -> Option<Vec<PackedCluster>> {
        let numbers = first..first + count;
        let find = |number| {
            let bytes = self.clusters.get(&number)?.clone();
            let sectors = u16::try_from(bytes.len() / index(SECTOR)).ok()?;
            Some(PackedCluster { number, stored: ClusterStorage::Packed(sectors), bytes })
        };
        numbers.map(find).collect()
    }
}

/// Consecutive clusters of the disk: the first, and how many.
type Batch = (u64, u64);

/// Memory for pieces that are in flight.
pub(crate) fn pool(cluster: u64) -> Pool {
    Pool::new(Pool::cost(index(BATCH.max(cluster))) * most() as u64)
}

/// Number of pieces in flight.
pub(crate) fn most() -> usize {
    AHEAD * blockhaul_io::worker_count().max(1)
}

/// The pieces of a disk, read ahead.
pub(crate) struct ClusterReadAhead<'a, I: Iterator<Item = u64>> {
    source: &'a Arc<dyn Device>,
    cluster: u64,
    packing: ClusterEncoding,
    numbers: std::iter::Peekable<I>,
    pool: Pool,
    /// Clusters that were compressed before.
    made: Option<&'a CompressedClusters>,
    flying: VecDeque<Task<Result<Vec<PackedCluster>>>>,
}

impl<'a, I: Iterator<Item = u64>> ClusterReadAhead<'a, I> {
    /// Reads the clusters of these ascending numbers, with memory of a [`pool`].
    ///
    /// Callers may share the pool: pieces get their memory in order, so the one that a caller waits
    /// for never waits for memory of its later ones.
    pub(crate) fn new(
        source: &'a Arc<dyn Device>,
        pool: &Pool,
        cluster: u64,
        packing: ClusterEncoding,
        numbers: I,
    ) -> ClusterReadAhead<'a, I> {
        let numbers = numbers.peekable();
        let pool = pool.clone();
        ClusterReadAhead {
            source,
            cluster,
            packing,
            numbers,
            pool,
            made: None,
            flying: VecDeque::new(),
        }
    }

    /// The same, where some clusters were compressed before.
    pub(crate) fn with_made(self, made: &'a CompressedClusters) -> ClusterReadAhead<'a, I> {
        ClusterReadAhead { made: Some(made), ..self }
    }

    /// The clusters of the next piece; none at the end.
    pub(crate) async fn next(&mut self) -> Option<Result<Vec<PackedCluster>>> {
        while self.flying.len() < most()
            && let Some(batch) = self.batch()
        {
            if let Some(piece) = self.made.and_then(|made| made.piece(batch)) {
                self.flying.push_back(blockhaul_io::start(std::future::ready(Ok(piece))));
                continue;
            }
            let source = self.source.clone();
            let pool = self.pool.clone();
            let cluster = self.cluster;
            let packing = self.packing;
            let work = async move { carry_out(&source, &pool, cluster, packing, batch).await };
            self.flying.push_back(blockhaul_io::start(work));
        }
        Some(self.flying.pop_front()?.await)
    }

    fn batch(&mut self) -> Option<Batch> {
        let first = self.numbers.next()?;
        let most = (BATCH / self.cluster).max(1);
        let mut count = 1;
        while count < most && self.numbers.next_if_eq(&(first + count)).is_some() {
            count += 1;
        }
        Some((first, count))
    }
}

/// Reads a piece, and compresses its clusters.
async fn carry_out(
    source: &Arc<dyn Device>,
    pool: &Pool,
    cluster: u64,
    packing: ClusterEncoding,
    (first, count): Batch,
) -> Result<Vec<PackedCluster>> {
    let at = first * cluster;
    let end = (at + count * cluster).min(source.facts().size);
    let len = index(count * cluster);
    let bytes = read(source, pool, at, end - at, len).await?;
    let work = move || {
        let clusters = (0..count).map(|place| {
            let part = bytes.slice(index(place * cluster), index(cluster));
            pack(first + place, part, packing)
        });
        clusters.collect::<Result<Vec<_>>>()
    };
    let lost = |lost| Error::new(Kind::Io, "cannot compress").because(lost);
    blockhaul_io::offload(work).await.map_err(lost)?
}

/// Reads `wanted` bytes into memory of `len`, which is zero behind them.
async fn read(
    source: &Arc<dyn Device>,
    pool: &Pool,
    at: u64,
    wanted: u64,
    len: usize,
) -> Result<Data> {
    let room = storage::room(pool, len).await?;
    if wanted == len as u64 && wanted <= storage::piece(source) {
        return match source.submit(Request::read(at, room)).await? {
            Reply::Data(data) => {
                let failed = |error| Error::system("cannot read the source", error);
                data.load().map_err(failed)?;
                Ok(data)
            }
            Reply::Hole => Ok(Buf::unpooled(len).into()),
            _ => Err(Error::misfit()),
        };
    }
    let mut buf = room.into_buf();
    let (front, rest) = buf.split_at_mut(index(wanted).min(len));
    storage::read_into(source, at, front, None).await?;
    rest.fill(0);
    Ok(buf.into())
}

/// A cluster as it is stored: left out if it is zero and can be compressed.
fn pack(number: u64, cluster: Data, packing: ClusterEncoding) -> Result<PackedCluster> {
    if packing == ClusterEncoding::Plain {
        return Ok(PackedCluster { number, stored: ClusterStorage::Plain, bytes: cluster });
    }
    if is_zero(cluster.bytes()) {
        return Ok(PackedCluster { number, stored: ClusterStorage::Not, bytes: Data::zeroes(0) });
    }
    match packing {
        ClusterEncoding::Plain => {
            Ok(PackedCluster { number, stored: ClusterStorage::Plain, bytes: cluster })
        }
        ClusterEncoding::Zstd(level) => {
            squeezed(number, cluster, |bytes, out| compress(level, bytes, out))
        }
        ClusterEncoding::Deflate(level) => {
            squeezed(number, cluster, |bytes, out| deflate_short(level, bytes, out))
        }
        ClusterEncoding::Grain(level) => grain(number, &cluster, level),
    }
}

/// A compressed cluster, if that saves at least a sector.
fn squeezed(
    number: u64,
    cluster: Data,
    compress: impl FnOnce(&[u8], &mut [u8]) -> Option<usize>,
) -> Result<PackedCluster> {
    // One sector less than a cluster, as plain clusters are read with less work.
    let mut out = vec![0; cluster.len().saturating_sub(index(SECTOR))];
    match compress(cluster.bytes(), &mut out) {
        Some(len) if len > 0 => packed(number, &out, len),
        _ => Ok(PackedCluster { number, stored: ClusterStorage::Plain, bytes: cluster }),
    }
}

/// The first `len` bytes of `out`, and the rest of their last sector, which is zero.
fn packed(number: u64, out: &[u8], len: usize) -> Result<PackedCluster> {
    let len = len.next_multiple_of(index(SECTOR));
    let sectors = u16::try_from(len / index(SECTOR)).map_err(|_| Error::misfit())?;
    let bytes = Data::copy_of(out.get(..len).ok_or_else(Error::misfit)?);
    Ok(PackedCluster { number, stored: ClusterStorage::Packed(sectors), bytes })
}

/// How a cluster is stored in an image that is written in place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ClusterForm {
    /// It reads as zeroes.
    Zero,
    Plain,
    /// Compressed, in this number of bytes.
    Packed(usize),
}

/// Compresses clusters into `out`, as long as all of them, one behind the other without a gap. The last
/// one may be short: zeroes follow it. Those that do not become smaller stay plain. Zeroes are
/// recognized if `zeroes`, else compressed.
pub(crate) fn pack_together(
    packing: ClusterEncoding,
    cluster: usize,
    bytes: &[u8],
    out: &mut [u8],
    zeroes: bool,
) -> Vec<ClusterForm> {
    let mut at = 0;
    let mut one = |bytes: &[u8]| {
        if zeroes && is_zero(bytes) {
            return ClusterForm::Zero;
        }
        let room = out.get_mut(at..at + cluster - 1).unwrap_or_default();
        let made = match packing {
            ClusterEncoding::Zstd(level) => compress(level, bytes, room),
            ClusterEncoding::Deflate(level) => deflate_short(level, bytes, room),
            ClusterEncoding::Plain | ClusterEncoding::Grain(_) => None,
        };
        match made {
            Some(len) if len > 0 => {
                at += len;
                ClusterForm::Packed(len)
            }
            _ => ClusterForm::Plain,
        }
    };
    let pack = |part: &[u8]| {
        if part.len() == cluster {
            return one(part);
        }
        let mut whole = part.to_vec();
        whole.resize(cluster, 0);
        one(&whole)
    };
    bytes.chunks(cluster).map(pack).collect()
}

/// A grain of a VMDK: a marker with its sector and length, and a zlib stream.
fn grain(number: u64, cluster: &Data, level: u8) -> Result<PackedCluster> {
    let most = cluster.len() + cluster.len() / 8 + 1024;
    let mut out = vec![0; most];
    let (marker, body) = out.split_at_mut(GRAIN_MARKER);
    let len = deflate(level, cluster.bytes(), body).ok_or_else(Error::misfit)?;
    let sector = number * (cluster.len() as u64 / SECTOR);
    let (first, second) = marker.split_at_mut(8);
    first.copy_from_slice(&sector.to_le_bytes());
    let short = u32::try_from(len).map_err(|_| Error::misfit())?;
    second.copy_from_slice(&short.to_le_bytes());
    packed(number, &out, GRAIN_MARKER + len)
}

/// Compresses into `out`, which begins as zeroes; none if it does not fit.
fn deflate(level: u8, bytes: &[u8], out: &mut [u8]) -> Option<usize> {
    DEFLATE.with_borrow_mut(|state| {
        let compressor = state.get_or_insert_default();
        compressor.reset();
        compressor.set_format_and_level(DataFormat::Zlib, level);
        let (status, read, made) = deflate_core(compressor, bytes, out, TDEFLFlush::Finish);
        (status == TDEFLStatus::Done && read == bytes.len()).then_some(made)
    })
}

/// Compresses into `out`, which begins as zeroes, for a reader with a window of 4 KiB, as QEMU's for
/// qcow2; none if it does not fit.
fn deflate_short(level: u8, bytes: &[u8], out: &mut [u8]) -> Option<usize> {
    DEFLATE.with_borrow_mut(|state| {
        let compressor = state.get_or_insert_default();
        compressor.reset();
        compressor.set_format_and_level(DataFormat::Raw, level);
        let mut made = 0;
        let mut parts = bytes.chunks(WINDOW).peekable();
        while let Some(part) = parts.next() {
            // A full flush forgets what was before it: nothing refers further back.
            let (flush, wanted) = match parts.peek() {
                Some(_) => (TDEFLFlush::Full, TDEFLStatus::Okay),
                None => (TDEFLFlush::Finish, TDEFLStatus::Done),
            };
            let (status, read, len) = deflate_core(compressor, part, out.get_mut(made..)?, flush);
            made += len;
            // Without room at the end there may be more to come.
            if status != wanted || read != part.len() || made == out.len() {
                return None;
            }
        }
        Some(made)
    })
}

/// Compresses into `out`, and zeroes the rest of it; none if it does not fit.
fn compress(level: i32, bytes: &[u8], out: &mut [u8]) -> Option<usize> {
    ZSTD.with_borrow_mut(|state| {
        if state.as_ref().is_none_or(|(known, _)| *known != level) {
            *state = Some((level, zstd::bulk::Compressor::new(level).ok()?));
        }
        let (_, compressor) = state.as_mut()?;
        let len = compressor.compress_to_buffer(bytes, out).ok()?;
        out.get_mut(len..)?.fill(0);
        Some(len)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_deflate_refers_no_further_back_than_its_window() {
        let mut content: Vec<u8> = (0..65536_u32).map(|n| (n * n / 1009) as u8).collect();
        content.copy_within(0..20_000, 40_000);
        for len in [1, 512, 4096, 4097, 65536] {
            let mut out = vec![0; len + 1024];
            let made = deflate_short(6, &content[..len], &mut out).unwrap();
            let unpacked = miniz_oxide::inflate::decompress_to_vec(&out[..made]).unwrap();
            assert!(unpacked == content[..len], "{len}");
        }
        let mut out = vec![0; 65536];
        let zeroes = deflate_short(6, &[0; 65536], &mut out).unwrap();
        assert!(zeroes < 2048, "{zeroes}");
        assert_eq!(deflate_short(6, &content, &mut [0; 1000]), None);
    }
}
