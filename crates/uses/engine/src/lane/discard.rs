//! Discards at the source what is safe on the target: flushed there, and recorded if there is a
//! journal. Nothing of it is read again: what is suspect after a failed flush or a lost connection
//! was not discarded yet, and a resumed copy skips what is recorded.

use std::collections::VecDeque;

use blockhaul_block::{Error, Facts, Kind, Pending, Reply, Request};
use blockhaul_io::Reservation;

use super::Lane;
use crate::discarded::first_content;
use crate::error::CopyError;
use crate::ledger::Range;
use crate::resolved::GRAIN_MAX;

/// Maximum number of bytes in which content is looked for, to prove that source and target are apart.
const LOOK_MAX: u64 = 512 << 20;
/// Discards in flight at a time, for each lane.
const IN_FLIGHT: usize = 16;

impl Lane {
    /// Discards these ranges at the source. A failure is counted, and the first one reported: the
    /// copy does not depend on it.
    pub(super) async fn discard(&self, mut ranges: Vec<Range>) {
        if !self.shared.resolved.discard_source {
            return;
        }
        let facts = self.source.facts();
        let mut out: VecDeque<(u64, Pending)> = VecDeque::new();
        join(&mut ranges);
        let mut ranges: Vec<_> =
            ranges.into_iter().filter_map(|range| whole_blocks(range, &facts)).collect();
        if !self.safety.apart.get() && !self.prove_apart(&mut ranges).await {
            return;
        }
        for (start, end) in ranges {
            while out.len() >= IN_FLIGHT {
                self.discarded(out.pop_front()).await;
            }
            let request = Request::trim(start, end - start);
            out.push_back((end - start, self.source.device().submit(request)));
        }
        while !out.is_empty() {
            self.discarded(out.pop_front()).await;
        }
    }

    /// Discards one block with content, and looks whether the target still has it. If not, source and target are
    /// one disk behind different names, for example behind two servers: the block is written back, and the copy
    /// fails. True: the ranges that are left may be discarded.
    async fn prove_apart(&self, ranges: &mut Vec<Range>) -> bool {
        let facts = self.source.facts();
        let block = facts.block.preferred.min(GRAIN_MAX).max(facts.block.minimum).max(512);
        let block = u64::from(block);
        // Long ranges have no content.
        ranges.sort_unstable_by_key(|(start, end)| end - start);
        let mut left = LOOK_MAX;
        for index in 0..ranges.len() {
            let (start, end) = ranges[index];
            let end_of_look = end.min(start + left);
            left -= end_of_look - start;
            let Ok(found) = first_content(&self.source, (start, end_of_look)).await else {
                return false;
            };
            let Some(place) = found else { continue };
            let at = start + (place - start) / block * block;
            let len = block.min(end - at);
            let read = || Request::read(at, Reservation::unpooled(len as usize));
            let Ok(Reply::Data(content)) = self.source.device().submit(read()).await else {
                return false;
            };
            let all: u64 = ranges.iter().map(|(start, end)| end - start).sum();
            let trimmed = self.source.device().submit(Request::trim(at, len)).await;
            let is_trimmed = trimmed.is_ok();
            let count = if is_trimmed { len } else { all };
            self.discarded(Some((count, Pending::ready(trimmed)))).await;
            if !is_trimmed {
                return false;
            }
            let kept = match self.target.device().submit(read()).await {
                Ok(Reply::Data(data)) => data.bytes() == content.bytes(),
                Ok(_) => false,
                Err(error) => {
                    let rest = (all > len).then(|| (all - len, Pending::ready(Err(error))));
                    self.discarded(rest).await;
                    return false;
                }
            };
            if kept {
                ranges.splice(index..=index, [(start, at), (at + len, end)]);
                ranges.retain(|(start, end)| start < end);
                self.safety.apart.set(true);
                return true;
            }
            let restored = self.source.device().submit(Request::write(at, content)).await;
            let error = self.one_storage(at, restored.err());
            self.shared.fail(CopyError::at_target(error));
            return false;
        }
        // Nothing is lost that is zero, if all was looked at.
        left > 0
    }

    fn one_storage(&self, at: u64, lost: Option<Error>) -> Error {
        let lost = match lost {
            None => String::new(),
            Some(error) => format!(", and cannot be written again: {error}"),
        };
        let text = format!(
            "source and target are one storage, or the target does not keep what is written: what was \
             discarded at offset {at} of the source is gone from the target{lost}"
        );
        Error::new(Kind::Invalid, text)
            .on(&self.target.facts().name)
            .with_remedy("copy to another storage")
    }

    async fn discarded(&self, discard: Option<(u64, Pending)>) {
        let Some((len, reply)) = discard else { return };
        match reply.await {
            Ok(_) => self.shared.progress.add_discarded(len),
            Err(error) => {
                if self.shared.progress.add_kept(len) {
                    self.shared.warn(format!(
                        "cannot discard what is copied: {error}; it stays at the source, and the \
                         copy goes on"
                    ));
                }
            }
        }
    }

    /// The target may be another disk after its connection was lost, and what was discarded cannot
    /// be written again.
    pub(super) fn lost_for_good(&self) -> Error {
        let text = "the connection to the target was lost, and its server does not promise that a new \
                    one shows the same disk (multi-conn), while parts of the source are discarded: \
                    check that the target holds what was copied";
        Error::new(Kind::Disconnected, text).on(&self.target.facts().name)
    }
}

/// Sorts ranges, and joins those that are adjacent.
fn join(ranges: &mut Vec<Range>) {
    ranges.sort_unstable();
    ranges.dedup_by(|next, last| {
        let adjacent = next.0 <= last.1;
        if adjacent {
            last.1 = last.1.max(next.1);
        }
        adjacent
    });
}

/// The whole blocks of a range, if there are any.
fn whole_blocks((start, end): Range, facts: &Facts) -> Option<Range> {
    let block = facts.block.preferred.min(GRAIN_MAX).max(facts.block.minimum).max(1);
    let block = u64::from(block);
    let reached = facts.size - u64::from(facts.tail);
    let start = start.checked_next_multiple_of(block)?;
    let end = if end >= reached { reached } else { end - end % block };
    (start < end).then_some((start, end))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_joined_and_shrunk_to_blocks() {
        let mut ranges = vec![(8192, 9000), (0, 100), (100, 8192), (20000, 30000)];
        join(&mut ranges);
        assert_eq!(ranges, [(0, 9000), (20000, 30000)]);
        let mut facts = Facts::new("disk", 30000);
        assert_eq!(whole_blocks((0, 9000), &facts), Some((0, 8192)));
        assert_eq!(whole_blocks((1, 8191), &facts), None);
        assert_eq!(whole_blocks((20000, 30000), &facts), Some((20480, 30000)));
        facts.tail = 304;
        assert_eq!(whole_blocks((20000, 30000), &facts), Some((20480, 29696)));
        let mut facts = Facts::new("disk", 1 << 20);
        facts.block.minimum = 65536;
        assert_eq!(whole_blocks((0, 65535), &facts), None);
        assert_eq!(whole_blocks((1, 200_000), &facts), Some((65536, 196_608)));
    }
}
