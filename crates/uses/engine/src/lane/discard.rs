//! Discards at the source what is safe on the target: flushed there, and recorded if there is a
//! journal. Nothing of it is read again: what is suspect after a failed flush or a lost connection
//! was not discarded yet, and a resumed copy skips what is recorded.

use std::collections::VecDeque;

use blockhaul_block::{Error, Kind, PendingRequest, Request};

use super::Lane;
use crate::ledger::SegmentRange;
use crate::marker::MarkerStage;
use crate::resolved::whole_blocks;

/// Discards in flight at a time, for each lane.
const IN_FLIGHT: usize = 16;

impl Lane {
    /// Discards these ranges at the source. A failure is counted, and the first one reported: the copy does not
    /// depend on it. Without a marker there is no content.
    pub(super) async fn discard(&self, mut ranges: Vec<SegmentRange>) {
        let resolved = &self.shared.resolved;
        let marker = self.shared.retries.marker();
        let may_discard = marker.is_some() || resolved.no_marker;
        if !resolved.discard_source || !may_discard || ranges.is_empty() {
            return;
        }
        if let Some(marker) = marker
            && marker.stage() > MarkerStage::Placed
        {
            marker.enter(MarkerStage::Discarded);
        }
        let facts = self.source.facts();
        let mut out: VecDeque<(u64, PendingRequest)> = VecDeque::new();
        join(&mut ranges);
        for (start, end) in ranges.into_iter().filter_map(|range| whole_blocks(range, &facts)) {
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

    async fn discarded(&self, discard: Option<(u64, PendingRequest)>) {
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
fn join(ranges: &mut Vec<SegmentRange>) {
    ranges.sort_unstable();
    ranges.dedup_by(|next, last| {
        let adjacent = next.0 <= last.1;
        if adjacent {
            last.1 = last.1.max(next.1);
        }
        adjacent
    });
}

#[cfg(test)]
mod tests {
    use blockhaul_block::Facts;

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
