//! Writes: passed on whole where the range is in one place that may be written, else piece by
//! piece.

use std::sync::Arc;

use blockhaul_block::{
    Device, DeviceExt as _, Error, Kind, Outcome, PendingRequest, Reply, Request, RequestFlags,
    Result,
};
use blockhaul_io::Data;

use super::allocate::Clusters;
use super::writer::{COPY, ExternalData};
use crate::assembly::RunReader as _;
use crate::bytes::index;
use crate::qcow2::entry::{COPIED, ClusterPlace, EntryContent, Run};
use crate::qcow2::parts::ImageParts;
use crate::storage;

/// Most clusters of one piece.
const CLUSTERS_MAX: u64 = 2048;

/// Starts a write of a range within the disk.
pub(in crate::qcow2) fn submit(
    parts: &Arc<ImageParts>,
    at: u64,
    data: Data,
    flags: RequestFlags,
) -> PendingRequest {
    let packs = parts.packs(at, at.saturating_add(data.len() as u64), flags);
    if !packs
        && !flags.contains(RequestFlags::FUA)
        && let Some(writer) = parts.image.writer.as_ref().filter(|writer| writer.has_begun())
    {
        let epoch = writer.epoch();
        let end = at.saturating_add(data.len() as u64);
        if let Some(host) = parts.in_place(at, end) {
            // By value: a payload in the kernel stays there.
            return parts.data.submit(Request::write(host, data)).guarded(|| epoch);
        }
    }
    let parts = parts.clone();
    PendingRequest::start(async move {
        parts.write(at, data, packs).await.map_err(|error| parts.before_flush(error))?;
        parts.durable(flags).await
    })
}

/// The payload of a request, from an offset of the disk on.
pub(super) struct WritePayload {
    at: u64,
    data: Data,
}

impl WritePayload {
    pub(super) fn new(at: u64, data: Data) -> WritePayload {
        WritePayload { at, data }
    }

    fn end(&self) -> u64 {
        self.at + self.data.len() as u64
    }

    /// The part for a range; the last one as it is, so that a payload in the kernel stays there.
    fn part(&mut self, at: u64, end: u64) -> Data {
        let len = index(end - at);
        if at == self.at && len == self.data.len() {
            return std::mem::replace(&mut self.data, Data::zeroes(0));
        }
        self.data.slice(index(at - self.at), len)
    }
}

/// A range to write, with what its first and last cluster need.
struct WritePiece {
    /// The range that is written: `data` is in its middle.
    start: u64,
    end: u64,
    /// Where `start` is in the file.
    host: u64,
    fresh: bool,
}

impl ImageParts {
    /// The error of a request that failed before its flush, unless another one was the reason.
    pub(super) fn before_flush(&self, error: Error) -> Error {
        let has_failed = self.writer().is_ok_and(|writer| writer.failed.check().is_err());
        if has_failed { error } else { error.before_flush() }
    }

    /// Ends a request that changed something.
    pub(super) async fn durable(&self, flags: RequestFlags) -> Outcome {
        if flags.contains(RequestFlags::FUA) {
            self.flush().await?;
        }
        Ok(Reply::Done)
    }

    /// Where a range is, if it is data in one place that may be written, as far as that is known
    /// without waiting.
    fn in_place(&self, at: u64, end: u64) -> Option<u64> {
        let layout = self.image.layout_now();
        let mut next = at;
        let mut host = None;
        while next < end {
            let number = next / layout.l2_covers();
            let entry = self.image.l1_entry(number);
            let table = layout.l2_table(number, entry).ok()??;
            let byte = self.image.byte_of(next);
            let slice = self.image.cache.find(table + byte - byte % self.image.slice)?;
            let words = slice.get(index(byte % self.image.slice / 8)..)?;
            let words = words.get(..index(layout.entry_words()))?;
            let until = ((next | (layout.cluster() - 1)) + 1).min(end);
            let found = layout.found(words, next).ok()?;
            let own = found.own.filter(|_| entry & COPIED != 0)?;
            let touched = layout.touched(next, until);
            if found.units & touched != touched {
                return None;
            }
            let place = own + (next & (layout.cluster() - 1));
            match host {
                None => host = Some(place),
                Some(first) if first + (next - at) == place => {}
                Some(_) => return None,
            }
            next = until;
        }
        host
    }

    /// Writes a range, with its whole clusters compressed if `packs`.
    async fn write(&self, at: u64, data: Data, packs: bool) -> Result<()> {
        let end = at + data.len() as u64;
        self.begin().await?;
        self.make_room().await?;
        let writer = self.writer()?;
        let bits = self.image.layout.cluster_bits;
        let _turn = writer.clusters.lock(at >> bits, ((end - 1) >> bits) + 1).await;
        if packs {
            return self.write_packed(at, data).await;
        }
        self.write_locked(WritePayload::new(at, data)).await
    }

    /// The same for a range whose clusters are locked.
    pub(super) async fn write_locked(&self, mut data: WritePayload) -> Result<()> {
        let mut next = data.at;
        let end = data.end();
        while next < end {
            let covers = self.image.layout.l2_covers();
            let table_end = (next / covers + 1).saturating_mul(covers).min(end);
            let table = self.own_table(next).await?;
            next = self.write_some(table, next, table_end, &mut data).await?;
        }
        Ok(())
    }

    /// Writes the first part of a range that has one L2 table; returns its end.
    async fn write_some(
        &self,
        table: u64,
        at: u64,
        end: u64,
        data: &mut WritePayload,
    ) -> Result<u64> {
        let layout = self.image.layout;
        let cluster_end = |at: u64| ((at | (layout.cluster() - 1)) + 1).min(end);
        let first = self.found(table, at).await?;
        let touched = layout.touched(at, cluster_end(at));
        match first.own {
            Some(host) if first.units & touched == touched => {
                let host = host + (at & (layout.cluster() - 1));
                let mut until = cluster_end(at);
                while until < end {
                    let next = self.found(table, until).await?;
                    let touched = layout.touched(until, cluster_end(until));
                    if next.own != Some(host + (until - at)) || next.units & touched != touched {
                        break;
                    }
                    until = cluster_end(until);
                }
                self.data.write(host, data.part(at, until)).await?;
                Ok(until)
            }
            Some(host) => {
                let until = cluster_end(at);
                self.fill(table, (at, until), (host, first), data).await?;
                Ok(until)
            }
            None => {
                let mut until = cluster_end(at);
                let mut count = 1;
                let mut last = first;
                while until < end && count < CLUSTERS_MAX {
                    let next = self.found(table, until).await?;
                    if next.own.is_some() {
                        break;
                    }
                    (until, count, last) = (cluster_end(until), count + 1, next);
                }
                self.write_new(table, (at, until), count, (first, last), data).await
            }
        }
    }

    async fn found(&self, table: u64, at: u64) -> Result<EntryContent> {
        let entry = self.l2_entry(table, at).await?;
        self.image.layout_now().found(self.words_of(&entry), at)
    }

    /// The range that must be written for a range of a cluster: whole subclusters where these have
    /// no data yet, all of the cluster if there is data elsewhere.
    fn widened(&self, at: u64, end: u64, found: EntryContent) -> (u64, u64) {
        let layout = self.image.layout;
        let cluster = at & !(layout.cluster() - 1);
        let cluster_end = cluster + layout.cluster();
        if found.elsewhere {
            return (cluster, cluster_end);
        }
        let unit = layout.unit();
        let has = |at: u64| found.own.is_some() && found.units & layout.touched(at, at + 1) != 0;
        let start = if has(at) { at } else { at - at % unit };
        let stop = if has(end - 1) { end } else { end.next_multiple_of(unit) };
        (start, stop)
    }

    /// Writes to a cluster that is there, but whose subclusters lack data.
    async fn fill(
        &self,
        table: u64,
        (at, end): (u64, u64),
        (host, found): (u64, EntryContent),
        data: &mut WritePayload,
    ) -> Result<()> {
        let layout = self.image.layout;
        let (start, stop) = self.widened(at, end, found);
        let host_start = host + (start & (layout.cluster() - 1));
        let piece = WritePiece { start, end: stop, host: host_start, fresh: false };
        self.extend_data(host + layout.cluster());
        self.write_piece(piece, at, data.part(at, end)).await?;
        let touched = layout.touched(at, end);
        let units = found.units | touched;
        let zeroes = found.zeroes & !touched;
        let entry = layout.data_entry(host, units, zeroes);
        let number = at >> layout.cluster_bits;
        self.set_l2(table, number..number + 1, |_, words| {
            words.copy_from_slice(&entry[..words.len()]);
            None
        })
        .await
    }

    /// The file with the guest's data gets at least this long.
    fn extend_data(&self, end: u64) {
        self.image.extend_data(end.min(self.data.facts().size));
    }

    /// Writes to new clusters, `count` or fewer; returns the end of what was written. `found` is
    /// what there is instead of the first and of the last one.
    async fn write_new(
        &self,
        table: u64,
        (at, end): (u64, u64),
        count: u64,
        found: (EntryContent, EntryContent),
        data: &mut WritePayload,
    ) -> Result<u64> {
        let layout = self.image.layout;
        let bits = layout.cluster_bits;
        let clusters = self.clusters_for(at, count).await?;
        let number = at >> bits;
        let (until, last) = if clusters.count == count {
            (end, found.1)
        } else {
            let until = (number + clusters.count) << bits;
            (until, self.found(table, until - 1).await?)
        };
        let start = self.widened(at, until.min((number + 1) << bits), found.0).0;
        let last_start = ((until - 1) >> bits << bits).max(at);
        let stop = self.widened(last_start, until, last).1;
        let host = (clusters.first << bits) + (start & (layout.cluster() - 1));
        let piece = WritePiece { start, end: stop, host, fresh: clusters.fresh };
        if let Err(error) = self.write_piece(piece, at, data.part(at, until)).await {
            self.release_data(clusters).await;
            return Err(error);
        }
        let first = clusters.first;
        self.set_new(table, number, clusters, |one, words| {
            let from = start.max(one << bits);
            let to = stop.min((one + 1) << bits);
            let host = (first + (one - number)) << bits;
            let old = words.first().copied();
            let zeroes = words.get(1).map_or(0, |bits| bits >> 32);
            let touched = layout.touched(from, to);
            let entry = layout.data_entry(host, touched, zeroes & !touched);
            words.copy_from_slice(&entry[..words.len()]);
            old
        })
        .await?;
        Ok(until)
    }

    /// New clusters for `count` ones of the disk from the one at `at` on. In an external data file
    /// each has its own place.
    pub(super) async fn clusters_for(&self, at: u64, count: u64) -> Result<Clusters> {
        let layout = self.image.layout;
        if self.writer()?.external == ExternalData::None {
            return self.allocate(count).await;
        }
        let first = at >> layout.cluster_bits;
        let start = first << layout.cluster_bits;
        if start >= self.data.facts().size {
            return Err(Error::new(Kind::NoSpace, "the external data file is too short"));
        }
        self.extend_data((first + count) << layout.cluster_bits);
        Ok(Clusters { first, count, fresh: false })
    }

    /// Writes a piece: `data`, which is for `at`, and around it what the disk has there.
    async fn write_piece(&self, piece: WritePiece, at: u64, data: Data) -> Result<()> {
        let WritePiece { start, end, host, fresh } = piece;
        let until = at + data.len() as u64;
        // What the data file ends before cannot be written, and is not read either.
        let end = end.min(start + self.data.facts().size.saturating_sub(host)).max(until);
        let mut gaps = Vec::new();
        let mut is_needed = false;
        for (from, to) in [(start, at), (until, end)] {
            if from < to {
                // The last cluster may be longer than the disk.
                let inside = to.min(self.image.size.max(from));
                let runs = self.image.runs(&self.file, from, inside).await?;
                is_needed |= !fresh || runs.iter().any(|run| !self.is_zero(run));
                gaps.push((from, to, runs));
            }
        }
        if !is_needed {
            return self.data.write(host + (at - start), data).await;
        }
        if end - start <= COPY.max(self.image.layout.cluster()) {
            let copied = self.gathered(start, end, &gaps, Some((at, &data))).await?;
            return self.data.write(host, copied).await;
        }
        for (from, to, runs) in gaps {
            let gap = [(from, to, runs)];
            let copied = self.gathered(from, to, &gap, None).await?;
            self.data.write(host + (from - start), copied).await?;
        }
        self.data.write(host + (at - start), data).await
    }

    /// Whether a run reads as zeroes, as far as the tables of this image say.
    fn is_zero(&self, run: &Run) -> bool {
        match (run.place, &self.backing) {
            (ClusterPlace::Zero { .. } | ClusterPlace::Unallocated, None) => true,
            (ClusterPlace::Zero { .. }, _) => true,
            (ClusterPlace::Unallocated, Some(backing)) => run.at >= backing.size,
            _ => false,
        }
    }

    /// Bytes of the disk, and new ones.
    async fn gathered(
        &self,
        start: u64,
        end: u64,
        gaps: &[(u64, u64, Vec<Run>)],
        data: Option<(u64, &Data)>,
    ) -> Result<Data> {
        let room = storage::room(&self.writer()?.copies, index(end - start)).await?;
        let mut buf = room.into_buf();
        for (from, to, runs) in gaps {
            buf[index(from - start)..index(to - start)].fill(0);
            buf = self.assemble(start, buf, runs).await?.buf;
        }
        if let Some((at, data)) = data {
            data.load().map_err(|error| Error::system("cannot read the payload", error))?;
            let place = index(at - start);
            buf[place..place + data.len()].copy_from_slice(data.bytes());
        }
        Ok(buf.into())
    }

    /// Whether a range reads as zeroes, as far as the tables of this image say.
    pub(super) async fn reads_zero(&self, at: u64, end: u64) -> Result<bool> {
        let runs = self.image.runs(&self.file, at, end).await?;
        Ok(runs.iter().all(|run| self.is_zero(run)))
    }
}
