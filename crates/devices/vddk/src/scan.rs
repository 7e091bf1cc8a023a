//! Asks for the allocated blocks of each part of a disk once, for all handles.

use std::collections::{BTreeMap, BTreeSet};

use blockhaul_io::{Completer, Ticket};

use crate::allocation::{Allocation, PART, UNIT, UnitBits, units_of};
use crate::library::{AllocatedBlock, SECTOR};

/// What is known of a disk, and what is being asked.
#[derive(Debug)]
pub(crate) struct Scan {
    pub(crate) map: Allocation,
    asking: BTreeMap<u64, PendingQuery>,
    /// The part to ask for next, once no transfers are under way.
    ahead: Option<u64>,
    /// Parts that count as data because their query failed.
    unsure: BTreeSet<u64>,
    /// A query was answered since the map was last saved.
    changed: bool,
    /// A failed query was reported.
    warned: bool,
}

/// A query that is under way.
struct PendingQuery {
    /// What was written since it began.
    written: UnitBits,
    waiting: Vec<Completer<()>>,
}

impl std::fmt::Debug for PendingQuery {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Asking({} waiting)", self.waiting.len())
    }
}

/// What to do for a part.
pub(crate) enum ScanStep {
    Known,
    /// Somebody asks.
    Wait(Ticket<()>),
    /// The caller asks; the ticket completes with the answer.
    Ask(Ticket<()>),
}

impl Scan {
    /// Nothing is known yet.
    pub(crate) fn new(map: Allocation) -> Scan {
        let asking = BTreeMap::new();
        let unsure = BTreeSet::new();
        Scan { map, asking, ahead: None, unsure, changed: false, warned: false }
    }

    /// Somebody needs a part.
    pub(crate) fn need(&mut self, part: u64) -> ScanStep {
        if self.map.knows(part) {
            return ScanStep::Known;
        }
        let (completer, ticket) = blockhaul_io::ticket();
        if let Some(asking) = self.asking.get_mut(&part) {
            asking.waiting.push(completer);
            return ScanStep::Wait(ticket);
        }
        self.ahead = self.ahead.filter(|ahead| *ahead != part);
        let asking = PendingQuery { written: UnitBits::Uniform(false), waiting: vec![completer] };
        self.asking.insert(part, asking);
        ScanStep::Ask(ticket)
    }

    /// A query has ended: adds its answer, none if it failed, and returns those who wait for it.
    pub(crate) fn answered(&mut self, part: u64, bits: Option<UnitBits>) -> Vec<Completer<()>> {
        let Some(asking) = self.asking.remove(&part) else { return Vec::new() };
        match bits {
            Some(_) => self.changed = true,
            None => {
                self.unsure.insert(part);
            }
        }
        let mut bits = bits.unwrap_or(UnitBits::Uniform(true));
        bits.add(&asking.written);
        self.map.learn(part, bits);
        asking.waiting
    }

    /// Somebody has got the extents of a part: the next one may be asked for ahead.
    pub(crate) fn used(&mut self, part: u64) {
        let next = part + 1;
        if next < self.map.parts() && !self.map.knows(next) && !self.asking.contains_key(&next) {
            self.ahead = Some(next);
        }
    }

    /// What is known for certain, if that is more than was saved before.
    pub(crate) fn take_unsaved(&mut self) -> Option<Vec<(u64, UnitBits)>> {
        let certain = self.map.known().filter(|(part, _)| !self.unsure.contains(part));
        let known: Vec<_> = certain.map(|(part, bits)| (part, bits.clone())).collect();
        std::mem::take(&mut self.changed).then_some(known)
    }

    /// A query was lost; whoever waits for it asks again.
    pub(crate) fn lost(&mut self, part: u64) {
        drop(self.asking.remove(&part));
    }

    /// The part that can be asked for while the disk is idle.
    pub(crate) fn take_ahead(&mut self) -> Option<u64> {
        self.ahead.take()
    }

    /// Whether there is such a part.
    pub(crate) fn has_ahead(&self) -> bool {
        self.ahead.is_some()
    }

    /// A range was written.
    pub(crate) fn wrote(&mut self, at: u64, len: u64) {
        self.map.wrote(at, len);
        for (part, units) in units_of(at, len) {
            if let Some(asking) = self.asking.get_mut(&part) {
                asking.written.set(units);
            }
        }
    }

    /// Whether a failed query is to be reported: once.
    pub(crate) fn warn(&mut self) -> bool {
        !std::mem::replace(&mut self.warned, true)
    }
}

/// The bits of a part of `units` units, from the answer of a query.
///
/// # Errors
/// Why the answer is wrong.
pub(crate) fn bits_of(
    part: u64,
    units: usize,
    blocks: &[AllocatedBlock],
) -> Result<UnitBits, String> {
    let start = part * (PART / SECTOR);
    let end = start + units as u64 * (UNIT / SECTOR);
    let mut bits = UnitBits::Uniform(false);
    let mut before = start;
    for &AllocatedBlock { offset, length } in blocks {
        let stop = offset.checked_add(length).filter(|stop| *stop <= end);
        let Some(stop) = stop else {
            return Err(format!(
                "the answer has {length} sectors from sector {offset} on, and the query ended at {end}"
            ));
        };
        if offset < before {
            return Err(format!("the answer has overlapping blocks at sector {offset}"));
        }
        let unit = |sector: u64| usize::try_from(sector).unwrap_or(usize::MAX);
        let per_unit = UNIT / SECTOR;
        bits.set(unit((offset - start) / per_unit)..unit((stop - start).div_ceil(per_unit)));
        before = stop;
    }
    Ok(bits)
}

#[cfg(test)]
mod tests {
    use blockhaul_block::{HOLE, ZERO};

    use super::*;

    const ALL: u64 = 100 * UNIT;

    fn scan() -> Scan {
        Scan::new(Allocation::new(ALL, HOLE | ZERO))
    }

    #[test]
    fn what_is_written_during_a_query_is_data() {
        let mut scan = scan();
        scan.wrote(0, 512);
        assert!(matches!(scan.need(0), ScanStep::Ask(_)));
        assert!(matches!(scan.need(0), ScanStep::Wait(_)));
        scan.wrote(3 * UNIT, 512);
        assert_eq!(scan.answered(0, Some(UnitBits::Uniform(false))).len(), 2);
        scan.wrote(5 * UNIT, 512);
        let found = scan.map.find(0, ALL, 99).unwrap();
        let states: Vec<_> = found.runs().iter().map(|run| (run.len / UNIT, run.state)).collect();
        assert_eq!(states, [(3, 3), (1, 0), (1, 3), (1, 0), (94, 3)]);
        assert!(matches!(scan.need(0), ScanStep::Known) && !scan.has_ahead());
    }

    #[test]
    fn a_lost_query_is_asked_again() {
        let mut scan = scan();
        assert!(matches!(scan.need(0), ScanStep::Ask(_)));
        scan.lost(0);
        assert!(matches!(scan.need(0), ScanStep::Ask(_)));
    }

    #[test]
    fn answers_are_checked() {
        let block = |offset, length| AllocatedBlock { offset, length };
        let bits = bits_of(0, 10, &[block(0, 128), block(128, 128), block(1279, 1)]).unwrap();
        let mut expected = UnitBits::Uniform(false);
        expected.set(0..2);
        expected.set(9..10);
        assert_eq!(bits, expected);
        let bad = [
            vec![block(0, 1281)],
            vec![block(1280, 1)],
            vec![block(u64::MAX, 2)],
            vec![block(128, 128), block(255, 2)],
            vec![block(128, 128), block(0, 2)],
        ];
        for blocks in bad {
            assert!(bits_of(0, 10, &blocks).is_err(), "{blocks:?}");
        }
        assert!(bits_of(1, 10, &[block(0, 128)]).is_err(), "before the part");
    }
}
