//! Zero and trim requests: entries are changed, and no data is written, where that is possible.

use std::sync::Arc;

use blockhaul_block::{
    Can, DeviceExt as _, Error, Kind, PendingRequest, Request, RequestFlags, Result,
};
use blockhaul_io::Data;

use super::allocate::Clusters;
use super::data::WritePayload;
use super::writer::{ExternalData, ImageWriter};
use crate::bytes::index;
use crate::qcow2::parts::ImageParts;

/// Clusters whose entries are changed without a pause.
const STRETCH: u64 = 16 << 10;

/// What becomes of a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::qcow2) enum EraseMode {
    /// It reads as zeroes.
    Zero,
    /// It reads as zeroes, and space for it stays allocated.
    Keep,
    /// Anything: its space is free.
    Trim,
}

/// Starts a zero or trim request within the disk.
pub(in crate::qcow2) fn submit(
    parts: &Arc<ImageParts>,
    range: (u64, u64),
    trim: bool,
    flags: RequestFlags,
) -> PendingRequest {
    let erase = match (trim, flags.contains(RequestFlags::NO_HOLE)) {
        (true, _) => EraseMode::Trim,
        (false, true) => EraseMode::Keep,
        (false, false) => EraseMode::Zero,
    };
    let parts = parts.clone();
    PendingRequest::start(async move {
        let erased = parts.erase(range, erase, flags).await;
        erased.map_err(|error| parts.before_flush(error))?;
        parts.durable(flags).await
    })
}

impl ImageParts {
    /// Whether zero requests change entries only.
    pub(in crate::qcow2) fn zeroes_fast(&self) -> bool {
        let has_flag = self.image.layout.has_zero() || self.backing.is_none();
        let raw =
            self.image.writer.as_ref().is_some_and(|writer| writer.external == ExternalData::Raw);
        has_flag && !raw
    }

    /// Erases a range of the disk, at least one byte.
    pub(in crate::qcow2) async fn erase(
        &self,
        (at, end): (u64, u64),
        erase: EraseMode,
        flags: RequestFlags,
    ) -> Result<()> {
        let keep_slow = erase == EraseMode::Keep && !self.image.layout.has_zero();
        if flags.contains(RequestFlags::FAST) && (!self.zeroes_fast() || keep_slow) {
            let text = "zeroing is not faster than writing here";
            return Err(Error::new(Kind::Unsupported, text));
        }
        self.begin().await?;
        let writer = self.writer()?;
        let bits = self.image.layout.cluster_bits;
        let _turn = writer.clusters.lock(at >> bits, ((end - 1) >> bits) + 1).await;
        if !self.zeroes_with_entries(writer, erase) {
            return if erase == EraseMode::Trim {
                Ok(())
            } else {
                self.write_zeroes(at, end).await
            };
        }
        // Entries say something about whole clusters, but for the last one of the disk, which may
        // be short. Clusters with subclusters can have more than that.
        let (first, last) = self.whole_clusters(at, end);
        self.erase_edge(at, first, erase).await?;
        self.erase_whole(writer, (first, last), erase).await?;
        self.erase_edge(last, end, erase).await
    }

    /// Erases whole clusters, which are locked; the last one of the disk may be short. Entries must be able to
    /// say it.
    pub(super) async fn erase_whole(
        &self,
        writer: &ImageWriter,
        (first, last): (u64, u64),
        erase: EraseMode,
    ) -> Result<()> {
        let mut next = first;
        while next < last {
            self.make_room().await?;
            let covers = self.image.layout.l2_covers();
            let stretch = (next / covers + 1).saturating_mul(covers).min(last);
            let most = STRETCH << self.image.layout.cluster_bits;
            let stretch = stretch.min(next.saturating_add(most));
            self.erase_clusters(writer, next, stretch, erase).await?;
            blockhaul_io::yield_now().await;
            next = stretch;
        }
        Ok(())
    }

    /// Whether entries can say what a request wants.
    pub(super) fn zeroes_with_entries(&self, writer: &ImageWriter, erase: EraseMode) -> bool {
        match erase {
            // The raw file has to have the zeroes itself.
            _ if writer.external == ExternalData::Raw => false,
            EraseMode::Keep => self.image.layout.has_zero(),
            // Version 2 has entries for nothing only, which shows the backing file.
            EraseMode::Zero | EraseMode::Trim => {
                let is_alone = self.backing.is_none() && !self.image.is_rebased;
                self.image.layout.has_zero() || is_alone
            }
        }
    }

    /// A range within a cluster.
    async fn erase_edge(&self, at: u64, end: u64, erase: EraseMode) -> Result<()> {
        if at >= end || erase == EraseMode::Trim {
            return Ok(());
        }
        if erase == EraseMode::Zero && !self.image.is_rebased && self.reads_zero(at, end).await? {
            return Ok(());
        }
        self.write_zeroes(at, end).await
    }

    /// Writes zeroes to a range whose clusters are locked.
    async fn write_zeroes(&self, at: u64, end: u64) -> Result<()> {
        let raw = self.writer()?.external == ExternalData::Raw;
        let mut next = at;
        while next < end {
            self.make_room().await?;
            let len = (end - next)
                .min(Data::ZEROES_MAX as u64)
                .min(self.data.facts().block.maximum.into());
            let data = Data::zeroes(index(len));
            if raw && self.data.facts().can.contains(Can::ZERO) {
                // Frees space, unlike a write.
                self.data.submit(Request::zero(next, len)).await?;
                self.mark_zero(next, next + len).await?;
            } else {
                self.write_locked(WritePayload::new(next, data)).await?;
            }
            next += len;
        }
        Ok(())
    }

    /// Notes zeroes of a raw data file in entries, as far as these are about whole clusters.
    async fn mark_zero(&self, at: u64, end: u64) -> Result<()> {
        let layout = self.image.layout;
        let mut next = at;
        let cluster = layout.cluster();
        while next < end {
            let until = ((next | (cluster - 1)) + 1).min(end);
            let is_whole = next.is_multiple_of(cluster)
                && (until.is_multiple_of(cluster) || until == self.image.size);
            if is_whole {
                let table = self.own_table(next).await?;
                let number = next >> layout.cluster_bits;
                let entry = layout.zero_entry(Some(next));
                let set = |_, words: &mut [u64]| {
                    words.copy_from_slice(&entry[..words.len()]);
                    None
                };
                self.set_l2(table, number..number + 1, set).await?;
            } else {
                // Data or not: the file has the zeroes, and the rest of the cluster.
                let data = Data::zeroes(index(until - next));
                self.write_locked(WritePayload::new(next, data)).await?;
            }
            next = until;
        }
        Ok(())
    }

    /// Whole clusters that have one L2 table.
    async fn erase_clusters(
        &self,
        writer: &ImageWriter,
        at: u64,
        end: u64,
        erase: EraseMode,
    ) -> Result<()> {
        let layout = self.image.layout;
        let has_table = {
            let number = at / layout.l2_covers();
            self.image.layout_now().l2_table(number, self.image.l1_entry(number))?.is_some()
        };
        let is_zero = !self.image.is_rebased
            && self.backing.as_ref().is_none_or(|backing| at >= backing.size);
        if !has_table && (erase == EraseMode::Trim || (erase == EraseMode::Zero && is_zero)) {
            return Ok(());
        }
        self.discard_below(writer, at, end, erase).await;
        let table = self.own_table(at).await?;
        let numbers = at >> layout.cluster_bits..end.div_ceil(layout.cluster());
        if erase == EraseMode::Keep {
            return self.reserve_zeroes(table, numbers).await;
        }
        let nothing = erase == EraseMode::Trim && self.backing.is_none() || !layout.has_zero();
        let entry = if nothing { [0, 0] } else { layout.zero_entry(None) };
        self.set_l2(table, numbers, |_, words| {
            let old = words.first().copied();
            let is_free = old == Some(0);
            let has_bits = words.get(1).is_some_and(|&bits| bits != 0);
            if is_free && !has_bits && is_zero {
                // It reads as zeroes already.
                return None;
            }
            words.copy_from_slice(&entry[..words.len()]);
            old
        })
        .await
    }

    /// Zeroes that have space: clusters that are there stay.
    async fn reserve_zeroes(&self, table: u64, numbers: std::ops::Range<u64>) -> Result<()> {
        let layout = self.image.layout;
        let mut next = numbers.start;
        while next < numbers.end {
            let at = next << layout.cluster_bits;
            let entry = self.l2_entry(table, at).await?;
            let found = self.image.layout_now().found(self.words_of(&entry), at)?;
            if let Some(host) = found.own {
                let entry = layout.zero_entry(Some(host));
                let set = |_, words: &mut [u64]| {
                    words.copy_from_slice(&entry[..words.len()]);
                    None
                };
                self.set_l2(table, next..next + 1, set).await?;
                next += 1;
                continue;
            }
            let mut count = 1;
            while next + count < numbers.end {
                let at = (next + count) << layout.cluster_bits;
                let entry = self.l2_entry(table, at).await?;
                if self.image.layout_now().found(self.words_of(&entry), at)?.own.is_some() {
                    break;
                }
                count += 1;
            }
            let clusters = self.clusters_for(at, count).await?;
            if let Err(error) = self.zero_clusters(clusters).await {
                self.release_data(clusters).await;
                return Err(error);
            }
            let first = clusters.first;
            self.set_new(table, next, clusters, |one, words| {
                let old = words.first().copied();
                let host = (first + (one - next)) << layout.cluster_bits;
                let entry = layout.zero_entry(Some(host));
                words.copy_from_slice(&entry[..words.len()]);
                old
            })
            .await?;
            next += clusters.count;
        }
        Ok(())
    }

    /// Zeroes new clusters, which keep their space.
    async fn zero_clusters(&self, clusters: Clusters) -> Result<()> {
        let layout = self.image.layout;
        let at = clusters.first << layout.cluster_bits;
        let end = clusters.count << layout.cluster_bits;
        let end = (at + end).min(self.data.facts().size);
        if at < end {
            let zero = Request::zero(at, end - at).with(RequestFlags::NO_HOLE);
            self.data.submit(zero).await?;
        }
        if self.data.facts().grows_from.is_some() && at < end {
            // The file must not end before its clusters do, also where the first of them was used before.
            let last = (end - 1) & !511;
            self.data.write(last, Data::zeroes(index(end - last))).await?;
        }
        Ok(())
    }

    /// Frees the space of clusters in an external data file: their entries refer to it no longer.
    async fn discard_below(&self, writer: &ImageWriter, at: u64, end: u64, erase: EraseMode) {
        let end = end.min(self.data.facts().size);
        let wanted =
            writer.external == ExternalData::Mapped && erase == EraseMode::Trim && at < end;
        if wanted
            && self.data.facts().can.contains(Can::TRIM)
            && let Err(error) = self.data.submit(Request::trim(at, end - at)).await
        {
            log::debug!("cannot free space of the data file: {error}");
        }
    }
}
