//! Reads, and compressed blocks.

use std::ops::Range;
use std::sync::Arc;

use blockhaul_block::{Device, Error, Kind, Outcome, PendingRequest, Result};
use blockhaul_io::{Buf, Data, Pool, Reservation};

use super::errors::damaged;
use super::map::{BlockUnpacker, DiskPlace, Run};
use super::parts::MappedParts;
use crate::assembly::{PackedBlock, PlainBytes, RunReader};
use crate::block_cache::BlockCache;
use crate::bytes::index;
use crate::storage;

/// Compressed bytes that a block can have besides its own length: a header, and what deflate adds
/// to bytes that do not compress.
pub(crate) const PACKED_EXTRA: u64 = 1024;

/// The longest compressed data of a block of `unit` bytes.
pub(super) fn longest_packed(unit: u64) -> u64 {
    unit.saturating_mul(2).saturating_add(PACKED_EXTRA)
}

/// Starts a read of a range within the disk.
pub(super) fn submit(parts: &Arc<MappedParts>, at: u64, room: Reservation) -> PendingRequest {
    let Some(end) = at.checked_add(room.len() as u64) else {
        return Error::new(Kind::Invalid, "beyond the end").into();
    };
    let room = match parts.image.runs_now(at, end, 1) {
        Some(Err(error)) => return error.into(),
        Some(Ok(runs)) => match runs[..] {
            [run] => match parts.pass_on(run, room) {
                Ok(pending) => return pending,
                Err(room) => room,
            },
            _ => room,
        },
        None => room,
    };
    let parts = parts.clone();
    PendingRequest::start(async move { parts.read(at, end, room).await })
}

impl MappedParts {
    async fn read(&self, at: u64, end: u64, room: Reservation) -> Outcome {
        let mut steps = u64::MAX;
        let runs = self.image.runs(&self.files, (at, end), usize::MAX, &mut steps).await?;
        self.read_runs(at, &runs, room).await
    }

    /// Unpacks whole blocks into their places in a buffer that begins with byte `at` of the disk.
    async fn unpack_group(&self, runs: &[Run], at: u64, buf: Buf) -> Result<Buf> {
        let places = runs.iter().filter_map(|run| match run.place {
            DiskPlace::Packed { file, at, most } => Some((run, file, at, u64::from(most))),
            _ => None,
        });
        let Some((_, file, _, _)) = places.clone().next() else { return Err(Error::misfit()) };
        let len = self.image.lens.get(file).copied().unwrap_or(0);
        let start = places.clone().map(|(_, _, at, _)| at).min().unwrap_or(0);
        let ends = places.clone().map(|(_, _, at, most)| at.saturating_add(most));
        let end = ends.max().unwrap_or(start).min(len);
        let jobs: Vec<_> = places
            .map(|(run, _, host, most)| UnpackJob {
                at: run.at,
                out: index(run.at - at)..index(run.end() - at),
                packed: index(host - start)..index(host.saturating_add(most).min(end) - start),
                host,
            })
            .collect();
        let device = self.files.get(file).ok_or_else(Error::misfit)?;
        let bytes = storage::packed(device, &self.packed, start, end.saturating_sub(start)).await?;
        let unpack = self.image.unpack.clone().ok_or_else(Error::misfit)?;
        let format = self.image.format;
        let longest = index(self.image.unit.saturating_mul(2));
        let work = move || carry_out(format, &*unpack, &bytes, jobs, buf, longest);
        let (mut buf, long) =
            blockhaul_io::offload(work).await.map_err(|lost| self.lost(lost))??;
        for job in long {
            buf = self.unpack_long(device, len, job, buf).await?;
        }
        Ok(buf)
    }

    /// Unpacks a block with more bytes than its place suggests.
    async fn unpack_long(
        &self,
        device: &Arc<dyn Device>,
        file_len: u64,
        (job, needed): (UnpackJob, usize),
        buf: Buf,
    ) -> Result<Buf> {
        let format = self.image.format;
        let needed = needed as u64;
        if job.host.checked_add(needed).is_none_or(|end| end > file_len) {
            return Err(bad_block(format, job.at, "its compressed bytes exceed the file"));
        }
        let bytes = storage::packed(device, &self.packed, job.host, needed).await?;
        let unpack = self.image.unpack.clone().ok_or_else(Error::misfit)?;
        let job = UnpackJob { packed: 0..bytes.len(), ..job };
        let work = move || carry_out(format, &*unpack, &bytes, vec![job], buf, index(needed));
        let (buf, long) = blockhaul_io::offload(work).await.map_err(|lost| self.lost(lost))??;
        if long.is_empty() { Ok(buf) } else { Err(Error::misfit()) }
    }

    fn lost(&self, lost: blockhaul_io::LostCompletion) -> Error {
        Error::new(Kind::Io, format!("{}: cannot unpack", self.image.format)).because(lost)
    }
}

impl RunReader for MappedParts {
    type Place = DiskPlace;

    fn packed(place: DiskPlace) -> Option<PackedBlock> {
        let DiskPlace::Packed { file, at, most } = place else { return None };
        Some(PackedBlock { file, at, len: most.into() })
    }

    fn cache_key(&self, run: Run) -> u64 {
        run.at - run.at % self.image.unit
    }

    fn cache(&self) -> &BlockCache {
        &self.image.unpacked
    }

    fn unit(&self) -> u64 {
        self.image.unit
    }

    fn block_len(&self, at: u64) -> u64 {
        // The last block of the disk may be shorter.
        let start = at - at % self.image.unit;
        self.image.unit.min(self.image.size.saturating_sub(start))
    }

    fn plain(&self, run: Run) -> Option<PlainBytes<'_>> {
        let (device, at, end) = match (run.place, &self.backing) {
            (DiskPlace::Data { file, at }, _) => {
                (self.files.get(file)?, at, *self.image.lens.get(file)?)
            }
            (DiskPlace::Below, Some(backing)) => (backing, run.at, backing.facts().size),
            _ => return None,
        };
        PlainBytes::within(device, (at, end), run.len)
    }

    fn pieces(&self) -> &Pool {
        &self.pieces
    }

    async fn unpack(&self, runs: &[Run], at: u64, buf: Buf) -> Result<Buf> {
        self.unpack_group(runs, at, buf).await
    }
}

/// A block to unpack.
struct UnpackJob {
    /// Its offset on the disk.
    at: u64,
    /// Its place in the buffer.
    out: Range<usize>,
    /// Its place in the compressed bytes.
    packed: Range<usize>,
    /// Its offset in the file.
    host: u64,
}

/// Blocks that need more compressed bytes than were read, and how many.
type LongBlocks = Vec<(UnpackJob, usize)>;

/// Unpacks blocks, on any thread. A block has at most `longest` compressed bytes.
fn carry_out(
    format: &str,
    unpack: &dyn BlockUnpacker,
    bytes: &Data,
    jobs: Vec<UnpackJob>,
    mut buf: Buf,
    longest: usize,
) -> Result<(Buf, LongBlocks)> {
    let mut long = Vec::new();
    for job in jobs {
        let bad = |why: String| bad_block(format, job.at, &why);
        let packed = bytes.bytes().get(job.packed.clone()).ok_or_else(Error::misfit)?;
        let Some((header, packed)) = packed.split_at_checked(unpack.header()) else {
            return Err(bad("the file ends before it".into()));
        };
        let len = unpack.len(header, job.at).map_err(bad)?;
        let Some(packed) = packed.get(..len) else {
            let needed = len.saturating_add(unpack.header());
            if needed > longest {
                return Err(bad(format!("it has {len} compressed bytes")));
            }
            long.push((job, needed));
            continue;
        };
        let out = buf.get_mut(job.out.clone()).ok_or_else(Error::misfit)?;
        unpack.unpack(packed, out).map_err(bad)?;
    }
    Ok((buf, long))
}

fn bad_block(format: &str, at: u64, why: &str) -> Error {
    damaged(format, format!("cannot unpack the compressed data of offset {at} of the disk: {why}"))
}
