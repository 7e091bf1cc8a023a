//! Reads clusters of a disk in order, ahead of their use, and compresses them on all processors.

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use blockhaul_block::{Device, Error, Kind, Reply, Request, Result};
use blockhaul_io::{Buf, Data, Pool, Task, is_zero};

use super::plan::{SECTOR, Stored};
use crate::bytes::index;
use crate::storage;

/// Memory of a compressed cluster that is kept, beside its bytes.
const ENTRY: u64 = 128;
/// Bytes of the disk that are read and compressed as one piece, unless a cluster is larger.
const BATCH: u64 = 512 << 10;
/// Pieces for each worker that are in flight.
const AHEAD: usize = 3;

thread_local! {
    /// A compressor has some 100 KiB of tables: each thread keeps its own, with its level.
    static ZSTD: RefCell<Option<(i32, zstd::bulk::Compressor<'static>)>> =
        const { RefCell::new(None) };
}

/// A cluster as it is to be stored.
pub(super) struct Packed {
    pub(super) number: u64,
    pub(super) stored: Stored,
    /// As many bytes as `stored` says.
    pub(super) bytes: Data,
}

/// Compressed clusters that are kept until they are written, so that they are not made again.
#[derive(Default)]
pub(super) struct Made {
    /// Memory that is left, in bytes.
    room: u64,
    clusters: HashMap<u64, Data>,
}

impl Made {
    /// Keeps clusters of together at most `memory` bytes.
    pub(super) fn new(memory: u64) -> Made {
        Made { room: memory, clusters: HashMap::new() }
    }

    pub(super) fn keep(&mut self, packed: &Packed) {
        let cost = packed.bytes.len() as u64 + ENTRY;
        if matches!(packed.stored, Stored::Packed(_)) && cost <= self.room {
            self.room -= cost;
            self.clusters.insert(packed.number, packed.bytes.clone());
        }
    }

    /// A piece, if all of its clusters are kept.
    fn piece(&self, (first, count): Batch) -> Option<Vec<Packed>> {
        let numbers = first..first + count;
        let find = |number| {
            let bytes = self.clusters.get(&number)?.clone();
            let sectors = u16::try_from(bytes.len() / index(SECTOR)).ok()?;
            Some(Packed { number, stored: Stored::Packed(sectors), bytes })
        };
        numbers.map(find).collect()
    }
}

/// Consecutive clusters of the disk: the first, and how many.
type Batch = (u64, u64);

/// Memory for pieces that are in flight.
pub(super) fn pool(cluster: u64) -> Pool {
    Pool::new(Pool::cost(index(BATCH.max(cluster))) * most() as u64)
}

/// Number of pieces in flight.
fn most() -> usize {
    AHEAD * blockhaul_io::worker_count().max(1)
}

/// The pieces of a disk, read ahead.
pub(super) struct Ahead<'a, I: Iterator<Item = u64>> {
    source: &'a Arc<dyn Device>,
    cluster: u64,
    /// Compression level; none: clusters stay as they are.
    level: Option<i32>,
    numbers: std::iter::Peekable<I>,
    pool: Pool,
    /// Clusters that were compressed before.
    made: Option<&'a Made>,
    flying: VecDeque<Task<Result<Vec<Packed>>>>,
}

impl<'a, I: Iterator<Item = u64>> Ahead<'a, I> {
    /// Reads the clusters of these ascending numbers, with memory of a [`pool`].
    ///
    /// Callers may share the pool: pieces get their memory in order, so the one that a caller waits
    /// for never waits for memory of its later ones.
    pub(super) fn new(
        source: &'a Arc<dyn Device>,
        pool: &Pool,
        cluster: u64,
        level: Option<i32>,
        numbers: I,
    ) -> Ahead<'a, I> {
        let (numbers, pool) = (numbers.peekable(), pool.clone());
        Ahead { source, cluster, level, numbers, pool, made: None, flying: VecDeque::new() }
    }

    /// The same, where some clusters were compressed before.
    pub(super) fn with_made(self, made: &'a Made) -> Ahead<'a, I> {
        Ahead { made: Some(made), ..self }
    }

    /// The clusters of the next piece; none at the end.
    pub(super) async fn next(&mut self) -> Option<Result<Vec<Packed>>> {
        while self.flying.len() < most()
            && let Some(batch) = self.batch()
        {
            if let Some(piece) = self.made.and_then(|made| made.piece(batch)) {
                self.flying.push_back(blockhaul_io::start(std::future::ready(Ok(piece))));
                continue;
            }
            let (source, pool) = (self.source.clone(), self.pool.clone());
            let (cluster, level) = (self.cluster, self.level);
            let work = async move { carry_out(&source, &pool, cluster, level, batch).await };
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
    level: Option<i32>,
    (first, count): Batch,
) -> Result<Vec<Packed>> {
    let at = first * cluster;
    let end = (at + count * cluster).min(source.facts().size);
    let len = index(count * cluster);
    let bytes = read(source, pool, at, end - at, len).await?;
    let work = move || {
        let clusters = (0..count).map(|place| {
            let part = bytes.slice(index(place * cluster), index(cluster));
            pack(first + place, part, level)
        });
        clusters.collect::<Result<Vec<_>>>()
    };
    let lost = |lost| Error::new(Kind::Io, "qcow2: cannot compress").because(lost);
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

/// A cluster as it is stored: compressed if that saves at least a sector, and left out if it is
/// zero. Without a level it stays as it is.
fn pack(number: u64, cluster: Data, level: Option<i32>) -> Result<Packed> {
    let Some(level) = level else {
        return Ok(Packed { number, stored: Stored::Plain, bytes: cluster });
    };
    if is_zero(cluster.bytes()) {
        return Ok(Packed { number, stored: Stored::Not, bytes: Data::zeroes(0) });
    }
    let sector = index(SECTOR);
    // One sector less than a cluster, as plain clusters are read with less work.
    let mut out = vec![0; cluster.len().saturating_sub(sector)];
    match compress(level, cluster.bytes(), &mut out) {
        Some(len) if len > 0 => {
            let len = len.next_multiple_of(sector);
            let sectors = u16::try_from(len / sector).map_err(|_| Error::misfit())?;
            // What follows the compressed bytes in the last sector is zero.
            let bytes = Data::copy_of(out.get(..len).ok_or_else(Error::misfit)?);
            Ok(Packed { number, stored: Stored::Packed(sectors), bytes })
        }
        _ => Ok(Packed { number, stored: Stored::Plain, bytes: cluster }),
    }
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
