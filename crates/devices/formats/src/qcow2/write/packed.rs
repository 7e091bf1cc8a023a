//! Writes of whole clusters that are stored compressed. Others are plain, as clusters are that do not
//! become smaller.

use std::collections::VecDeque;

use blockhaul_block::{DeviceExt as _, Error, Kind, RequestFlags, Result};
use blockhaul_io::{Buf, Data, Reservation, Ticket};

use super::data::WritePayload;
use super::writer::ImageWriter;
use super::zero::EraseMode;
use crate::bytes::index;
use crate::pack::{self, ClusterForm};
use crate::qcow2::parts::ImageParts;
use crate::storage;

/// A piece of a write that is compressed.
struct CompressionInFlight {
    at: u64,
    end: u64,
    ticket: Ticket<(Buf, Vec<ClusterForm>)>,
}

/// A piece that was compressed.
struct CompressedPiece {
    /// Its range on the disk.
    at: u64,
    end: u64,
    /// How each of its clusters is stored.
    forms: Vec<ClusterForm>,
    /// The data of those that are compressed, one behind the other.
    bytes: Data,
}

/// Places of compressed clusters, in order.
struct PackedPlaces {
    /// Offset and length in bytes.
    all: Vec<(u64, u64)>,
    /// Number of those that have an entry.
    used: usize,
}

impl ImageParts {
    /// Whether clusters of a write are compressed.
    pub(super) fn packs(&self, at: u64, end: u64, flags: RequestFlags) -> bool {
        let wanted = self.image.packs || flags.contains(RequestFlags::COMPRESS);
        let (first, last) = self.whole_clusters(at, end);
        wanted && !self.is_external && first < last
    }

    /// The whole clusters of a range of the disk: their range, which is empty if there are none. The last
    /// cluster of the disk may be short.
    pub(super) fn whole_clusters(&self, at: u64, end: u64) -> (u64, u64) {
        let cluster = self.image.layout.cluster();
        let first = at.next_multiple_of(cluster).min(end);
        let last = if end == self.image.size { end } else { end & !(cluster - 1) };
        (first, last.max(first))
    }

    /// Writes a range whose clusters are locked, with its whole clusters compressed.
    pub(super) async fn write_packed(&self, at: u64, data: Data) -> Result<()> {
        data.load().map_err(|error| Error::system("cannot read the payload", error))?;
        let end = at + data.len() as u64;
        let (first, last) = self.whole_clusters(at, end);
        let part = |from: u64, to: u64| data.slice(index(from - at), index(to - from));
        if at < first {
            self.write_locked(WritePayload::new(at, part(at, first))).await?;
        }
        self.write_clusters(first, part(first, last)).await?;
        if last < end {
            self.write_locked(WritePayload::new(last, part(last, end))).await?;
        }
        Ok(())
    }

    /// Writes whole clusters compressed: pieces of them at a time.
    async fn write_clusters(&self, at: u64, data: Data) -> Result<()> {
        let writer = self.writer()?;
        let piece = pack::BATCH.max(self.image.layout.cluster());
        let zeroes = self.zeroes_with_entries(writer, EraseMode::Zero);
        let end = at + data.len() as u64;
        let mut flying = VecDeque::new();
        let mut next = at;
        loop {
            while next < end {
                let until = end.min(next + piece);
                let Some(room) = self.pack_room(writer, until - next, flying.is_empty()).await?
                else {
                    break;
                };
                let part = data.slice(index(next - at), index(until - next));
                let ticket = self.start_packing(part, room, zeroes);
                flying.push_back(CompressionInFlight { at: next, end: until, ticket });
                next = until;
            }
            let Some(CompressionInFlight { at: start, end: stop, ticket }) = flying.pop_front()
            else {
                return Ok(());
            };
            let lost = |lost| Error::new(Kind::Io, "qcow2: cannot compress").because(lost);
            let (out, forms) = ticket.await.map_err(lost)?;
            self.make_room().await?;
            let part = data.slice(index(start - at), index(stop - start));
            let piece = CompressedPiece { at: start, end: stop, forms, bytes: out.into() };
            self.store_piece(writer, piece, &part).await?;
        }
    }

    /// Memory for a compressed piece. Waits for others only if `waits`: own pieces may hold all of it.
    async fn pack_room(
        &self,
        writer: &ImageWriter,
        len: u64,
        waits: bool,
    ) -> Result<Option<Reservation>> {
        let len = index(len.next_multiple_of(self.image.layout.cluster()));
        match writer.packs.try_reserve(len) {
            None if waits => storage::room(&writer.packs, len).await.map(Some),
            room => Ok(room),
        }
    }

    fn start_packing(
        &self,
        data: Data,
        room: Reservation,
        zeroes: bool,
    ) -> Ticket<(Buf, Vec<ClusterForm>)> {
        let packing = self.image.packing();
        let cluster = index(self.image.layout.cluster());
        blockhaul_io::offload(move || {
            let mut out = room.into_buf();
            let forms = pack::pack_together(packing, cluster, data.bytes(), &mut out, zeroes);
            (out, forms)
        })
    }

    /// Stores a piece: compressed data first, then the clusters in order.
    async fn store_piece(
        &self,
        writer: &ImageWriter,
        mut piece: CompressedPiece,
        data: &Data,
    ) -> Result<()> {
        let lens = piece.forms.iter().filter_map(|form| match form {
            ClusterForm::Packed(len) => Some(*len as u64),
            _ => None,
        });
        let lens: Vec<u64> = lens.collect();
        let places = self.place(&lens).await?;
        // What has no place is plain.
        let packed = piece.forms.iter_mut().filter(|form| matches!(form, ClusterForm::Packed(_)));
        packed.skip(places.len()).for_each(|form| *form = ClusterForm::Plain);
        let mut placed = PackedPlaces { all: places.into_iter().zip(lens).collect(), used: 0 };
        let stored = async {
            self.write_places(&placed.all, &piece.bytes).await?;
            self.store_clusters(writer, &piece, &mut placed, data).await
        };
        let stored = stored.await;
        if stored.is_err() {
            self.give_back(placed.all.drain(placed.used..));
        }
        stored
    }

    /// Writes compressed data to its places.
    async fn write_places(&self, places: &[(u64, u64)], bytes: &Data) -> Result<()> {
        let most = u64::from(self.data.facts().block.maximum).max(1);
        let mut from = 0;
        for run in places.chunk_by(|one, next| one.0 + one.1 == next.0) {
            let Some(&(host, _)) = run.first() else { continue };
            let len: u64 = run.iter().map(|(_, len)| len).sum();
            let mut done = 0;
            while done < len {
                let now = most.min(len - done);
                let part = bytes.slice(index(from + done), index(now));
                self.data.write(host + done, part).await?;
                done += now;
            }
            from += len;
        }
        Ok(())
    }

    /// Makes the entries of compressed clusters, and writes the others.
    async fn store_clusters(
        &self,
        writer: &ImageWriter,
        piece: &CompressedPiece,
        placed: &mut PackedPlaces,
        data: &Data,
    ) -> Result<()> {
        let cluster = self.image.layout.cluster();
        let mut at = piece.at;
        let is_same = |one: &ClusterForm, next: &ClusterForm| {
            matches!(one, ClusterForm::Packed(_)) && matches!(next, ClusterForm::Packed(_))
                || one == next
        };
        for run in piece.forms.chunk_by(is_same) {
            let end = piece.end.min(at + run.len() as u64 * cluster);
            match run.first() {
                Some(ClusterForm::Zero) => {
                    self.erase_whole(writer, (at, end), EraseMode::Zero).await?
                }
                Some(ClusterForm::Packed(_)) => {
                    self.set_packed(at, run.len() as u64, placed).await?
                }
                _ => {
                    let part = data.slice(index(at - piece.at), index(end - at));
                    self.write_locked(WritePayload::new(at, part)).await?;
                }
            }
            at = end;
        }
        Ok(())
    }

    /// Makes the entries of `count` clusters from `at` on, with the next places.
    async fn set_packed(&self, at: u64, count: u64, placed: &mut PackedPlaces) -> Result<()> {
        let layout = self.image.layout;
        let mut next = at >> layout.cluster_bits;
        let end = next + count;
        while next < end {
            let table = self.own_table(next << layout.cluster_bits).await?;
            let until = end.min((next / layout.l2_entries() + 1) * layout.l2_entries());
            self.set_l2(table, next..until, |_, words| {
                let &(host, len) = placed.all.get(placed.used)?;
                let entry = layout.packed_entry(host, len)?;
                placed.used += 1;
                let old = words.first().copied();
                words.copy_from_slice(&entry[..words.len()]);
                old
            })
            .await?;
            next = until;
        }
        Ok(())
    }
}
