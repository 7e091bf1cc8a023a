//! Writes the marker of a copy that discards its source ([`crate::marker`]).

use blockhaul_block::{Can, Error, Kind, Request, RequestFlags};
use blockhaul_io::Reservation;

use super::Lane;
use crate::error::{CopyError, Result};
use crate::flushes::FlushDoubt;
use crate::handle::is_lost;
use crate::ledger::SegmentRange;
use crate::marker::check::{one_storage, other_copy_at_source, other_source};
use crate::marker::choice::read_block;
use crate::marker::{JournalPosition, Marker, MarkerFields, MarkerPlace, MarkerStage};
use crate::side::Side;

/// How often a late marker is overwritten. Each is a write that was in flight when its connection was lost.
const LATE_MARKERS_MAX: u32 = 32;

impl Lane {
    /// Writes the marker over this block, and refuses a source that shows it: source and target are one storage,
    /// which then has again what it had. A layer may show the block in another form, so a source that changes
    /// when the block is written back shows it, too. The source was not read at the place of the marker before:
    /// a cache would hide the change. For a copy of which nothing is recorded.
    pub(crate) async fn place_marker(&self, marker: &Marker, old: &[u8]) -> Result<()> {
        let MarkerPlace { at, content, len, .. } = marker.place;
        let fields = marker.next(JournalPosition::default());
        self.write_durably(at, &marker.block(&fields)).await?;
        let marked = read_block(&self.source, at, len).await;
        let restored = self.write_durably(at, old).await;
        let marked = marked?;
        if let Err(lost) = restored {
            return Err(match marker.fields(&marked) {
                Some(_) => self.one_storage(at, Some(&lost.error)),
                None => lost,
            });
        }
        if let Some(shown) = MarkerFields::of(&marked) {
            self.remove_empty_journal();
            let is_own = marker.fields(&marked) == Some(shown);
            let other = || other_copy_at_source(&self.source, at);
            return Err(if is_own { self.one_storage(at, None) } else { other() });
        }
        if marked != read_block(&self.source, at, len).await? {
            self.remove_empty_journal();
            return Err(self.one_storage(at, None));
        }
        if !marker.place.is_content(&read_block(&self.source, content, len).await?) {
            return Err(other_source(&self.source, content));
        }
        self.write_durably(at, &marker.block(&fields)).await?;
        marker.wrote(&fields);
        marker.enter(MarkerStage::Placed);
        Ok(())
    }

    fn one_storage(&self, at: u64, lost: Option<&Error>) -> CopyError {
        let has_journal = self.shared.durability.journal.is_some();
        CopyError::at_target(one_storage(&self.target, at, lost.map(|error| (error, has_journal))))
    }

    /// Removes a journal without records, once the target has again what it had.
    fn remove_empty_journal(&self) {
        if let Some(journal) = &self.shared.durability.journal {
            let _ = journal.file.remove();
        }
    }

    /// Refuses a side that does not show what identifies it: a layer may have opened its device again, and another
    /// disk may be behind its address now. Returns the generation of the handle that was examined and is still the
    /// current one.
    pub(super) async fn check_side(&self, marker: &Marker, side: Side) -> Result<u64> {
        let end = if side == Side::Source { &self.source } else { &self.target };
        let mut attempts = 0;
        loop {
            let generation = end.settled().await;
            match marker.differs(side, &*end.device()).await {
                Ok(None) if end.is_settled(generation) => return Ok(generation),
                Ok(None) => {}
                Ok(Some(why)) => {
                    let error = Error::new(Kind::Invalid, why).on(&end.facts().name);
                    return Err(CopyError { side: Some(side), error });
                }
                Err(error) => end.recover(error, generation, &mut attempts).await?,
            }
        }
    }

    /// Makes a marker of this position durable while there is a marker, over a connection that shows the newest one.
    /// For the lane that has its turn. Returns the generation of the connection: it is still the current one, and no
    /// other one is being made, which could be accepted by the marker before.
    pub(super) async fn raise_marker(
        &self,
        marker: &Marker,
        position: JournalPosition,
    ) -> Result<u64> {
        let mut attempts = 0;
        loop {
            let generation = self.check_side(marker, Side::Target).await?;
            if marker.stage() > MarkerStage::Placed {
                self.remove_late_marker(marker).await?;
                return Ok(generation);
            }
            let fields = marker.next(position);
            let block = marker.block(&fields);
            let written = self.try_write_durably(marker.place.at, &block, &mut attempts).await?;
            if written && self.target.is_settled(generation) {
                marker.wrote(&fields);
                return Ok(generation);
            }
        }
    }

    /// Overwrites a marker that the server of a lost connection has written late, over what the target has there.
    async fn remove_late_marker(&self, marker: &Marker) -> Result<()> {
        let MarkerPlace { at, len, .. } = marker.place;
        for _ in 0..LATE_MARKERS_MAX {
            if marker.fields(&read_block(&self.target, at, len).await?).is_none() {
                return Ok(());
            }
            let under = read_block(&self.source, at, len).await?;
            self.write_durably(at, &under).await?;
        }
        let text = format!("it shows the marker again and again (at offset {at})");
        Err(CopyError::at_target(Error::new(Kind::Io, text).on(&self.target.facts().name)))
    }

    /// Warns that the last segment stays at the source. Returns its length in bytes.
    pub(super) fn keep_last(&self, marker: &Marker, batch: &[SegmentRange]) -> u64 {
        let at = marker.place.at;
        let bytes = batch.iter().map(|(start, end)| end - start).sum();
        self.shared.warn(format!(
            "the connection to the target was lost during a write of the marker (at offset {at}), which the server may \
             still carry out: what was copied last stays at the source; run the same command again when the server \
             has ended that connection: it checks the target, copies these bytes again and discards them"
        ));
        bytes
    }

    /// Overwrites the marker by what the source has there, once the target has the content: all else is copied.
    pub(crate) async fn remove_marker(&self, marker: &Marker) -> Result<()> {
        if marker.stage() != MarkerStage::Placed {
            return Ok(());
        }
        self.check_side(marker, Side::Target).await?;
        let MarkerPlace { at, content, len, .. } = marker.place;
        let block = read_block(&self.source, content, len).await?;
        let under = read_block(&self.source, at, len).await?;
        if !marker.place.is_content(&block) || MarkerFields::of(&under).is_some() {
            return Err(other_source(&self.source, content));
        }
        if at != content {
            self.write_durably(content, &block).await?;
        }
        if let Some(journal) = &self.shared.durability.journal
            && let Err(why) = journal.file.leave().await
        {
            self.lacks_journal(&why);
        }
        marker.enter(MarkerStage::Leaving);
        self.write_durably(at, &under).await?;
        marker.enter(MarkerStage::Restored);
        Ok(())
    }

    /// Writes blocks of the target, and returns when they are durable.
    async fn write_durably(&self, at: u64, bytes: &[u8]) -> Result<()> {
        let mut attempts = 0;
        while !self.try_write_durably(at, bytes, &mut attempts).await? {}
        Ok(())
    }

    /// Writes blocks of the target over the current connection. False: they may not be durable, and can be written
    /// again. A request that fails is a failed flush.
    async fn try_write_durably(&self, at: u64, bytes: &[u8], attempts: &mut u32) -> Result<bool> {
        self.note_doubts();
        let failures = self.safety.ledger.borrow().failures();
        let generation = self.target.generation();
        let device = self.target.device();
        let facts = device.facts();
        let at_once = facts.can.difference(facts.emulated).contains(Can::FUA);
        let flags = if at_once { RequestFlags::FUA } else { RequestFlags::empty() };
        let mut room = Reservation::unpooled(bytes.len()).into_buf();
        room.copy_from_slice(bytes);
        let written = async {
            let reply = device.submit(Request::write(at, room.into()).with(flags)).await?;
            if at_once { Ok(reply) } else { device.submit(Request::flush()).await }
        };
        match self.shared.durability.flushes.run(failures, written, is_lost).await {
            Ok(()) => Ok(true),
            Err(FlushDoubt::Overlapped) => Ok(false),
            Err(FlushDoubt::Failed { error, last }) => {
                if let Some(marker) = self.shared.retries.marker()
                    && is_lost(&error)
                    && MarkerFields::of(bytes).is_some()
                {
                    marker.lost_write();
                }
                let error = self.not_durable(error);
                if last {
                    return Err(CopyError::at_target(error));
                }
                self.recover(self.target_failed(generation, error), attempts).await?;
                Ok(false)
            }
        }
    }
}
