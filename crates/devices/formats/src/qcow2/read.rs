//! Reads, and compressed clusters.

use std::sync::Arc;

use blockhaul_block::{Error, Kind, Outcome, PendingRequest, Result};
use blockhaul_io::{Buf, Pool, Reservation};

use super::entry::{ClusterPlace, Run};
use super::error::damaged;
use super::parts::ImageParts;
use super::unpack::unpack;
use super::write::ImageWriter;
use crate::assembly::{PackedBlock, PlainBytes, RunReader};
use crate::block_cache::BlockCache;
use crate::bytes::index;
use crate::storage;

/// The longest compressed data of a cluster of `cluster` bytes: it has fewer than 2^(bits - 8) + 1 sectors, about
/// twice a cluster.
pub(super) fn longest_packed(cluster: u64) -> u64 {
    cluster.saturating_mul(2).saturating_add(512)
}

/// Starts a read of a range within the disk.
pub(super) fn submit(parts: &Arc<ImageParts>, at: u64, room: Reservation) -> PendingRequest {
    let Some(end) = at.checked_add(room.len() as u64) else {
        return Error::new(Kind::Invalid, "beyond the end").into();
    };
    // Before the tables are looked at.
    let epoch = parts.image.writer.as_ref().map(ImageWriter::epoch);
    let room = match parts.image.runs_now(at, end, 1) {
        Some(Err(error)) => return error.into(),
        Some(Ok(runs)) => match runs[..] {
            [run] => match parts.pass_on(run, room) {
                Ok(pending) => {
                    return match epoch {
                        None => pending,
                        Some(epoch) => pending.guarded(|| epoch),
                    };
                }
                Err(room) => room,
            },
            _ => room,
        },
        None => room,
    };
    let parts = parts.clone();
    PendingRequest::start(async move {
        let _epoch = epoch;
        parts.read(at, end, room).await
    })
}

impl ImageParts {
    async fn read(&self, at: u64, end: u64, room: Reservation) -> Outcome {
        let runs = self.image.runs(&self.file, at, end).await?;
        self.read_runs(at, &runs, room).await
    }
}

impl RunReader for ImageParts {
    type Place = ClusterPlace;

    fn packed(place: ClusterPlace) -> Option<PackedBlock> {
        let ClusterPlace::Packed { host, len } = place else { return None };
        Some(PackedBlock { file: 0, at: host, len: len.into() })
    }

    fn cache_key(&self, run: Run) -> u64 {
        Self::packed(run.place).map_or(run.at, |packed| packed.at)
    }

    fn cache(&self) -> &BlockCache {
        &self.image.unpacked
    }

    fn unit(&self) -> u64 {
        self.image.layout.cluster()
    }

    fn block_len(&self, _at: u64) -> u64 {
        // Also of the last cluster, of which the disk may have a part only.
        self.image.layout.cluster()
    }

    fn plain(&self, run: Run) -> Option<PlainBytes<'_>> {
        let (device, at, end) = match (run.place, &self.backing) {
            (ClusterPlace::Data(host), _) => (&self.data, host, self.data_len()),
            (ClusterPlace::Unallocated, Some(backing)) => (&backing.device, run.at, backing.size),
            _ => return None,
        };
        PlainBytes::within(device, (at, end), run.len)
    }

    fn pieces(&self) -> &Pool {
        &self.pieces
    }

    async fn unpack(&self, runs: &[Run], at: u64, buf: Buf) -> Result<Buf> {
        let places = runs.iter().filter_map(|run| match run.place {
            ClusterPlace::Packed { host, len } => Some((run.at, host, u64::from(len))),
            _ => None,
        });
        let start = places.clone().map(|(_, host, _)| host).min().unwrap_or(0);
        let end = places.clone().map(|(_, host, len)| host + len).max().unwrap_or(start);
        let jobs: Vec<_> = places
            .map(|(guest, host, len)| ClusterUnpackJob {
                at: guest,
                out: index(guest - at),
                packed: index(host - start)..index(host + len - start),
            })
            .collect();
        let bytes = storage::packed(&self.file, &self.packed, start, end - start).await?;
        let kind = self.image.compression;
        let cluster = index(self.image.layout.cluster());
        let work = move || {
            let mut buf = buf;
            for ClusterUnpackJob { at, out, packed } in jobs {
                let (Some(packed), Some(out)) =
                    (bytes.bytes().get(packed), buf.get_mut(out..out + cluster))
                else {
                    return Err(Error::misfit());
                };
                unpack(kind, packed, out).map_err(|why| cannot_unpack(at, &why))?;
            }
            Ok(buf)
        };
        blockhaul_io::offload(work).await.map_err(lost)?
    }
}

/// A cluster to unpack.
struct ClusterUnpackJob {
    /// Its offset on the disk.
    at: u64,
    /// Its place in the buffer.
    out: usize,
    packed: std::ops::Range<usize>,
}

fn cannot_unpack(at: u64, why: &str) -> Error {
    damaged(format!("cannot unpack the compressed cluster at offset {at} of the disk: {why}"))
}

fn lost(lost: blockhaul_io::LostCompletion) -> Error {
    Error::new(Kind::Io, "qcow2: cannot unpack").because(lost)
}
