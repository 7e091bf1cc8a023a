//! The cached extents of a device in one context, and when they were last used.

use blockhaul_block::{Extent, Extents};

use crate::runs::Runs;

/// Runs dropped at a time.
const PIECE: usize = 4096;

/// The state of a byte, if known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct KnownState(u64);

impl KnownState {
    /// No device reports a state of this number; if one does, it is requested each time.
    const NOTHING: KnownState = KnownState(u64::MAX);
}

impl Default for KnownState {
    fn default() -> KnownState {
        KnownState::NOTHING
    }
}

/// The cached extents of one context.
#[derive(Default)]
pub(super) struct ExtentMap {
    runs: Runs<KnownState>,
    /// When each known byte was last used; 0 for the others.
    used: Runs<u64>,
}

impl ExtentMap {
    /// Memory use in bytes.
    pub(super) fn cost(&self) -> u64 {
        self.runs.memory() + self.used.memory()
    }

    /// The known runs from `at` up to `end` without a gap, at most `most` of them; marks them as
    /// used at `now`, which is above 0.
    pub(super) fn find(&mut self, at: u64, end: u64, most: usize, now: u64) -> Extents {
        let mut found = Extents::new();
        let known = self.runs.iter(at, end).take_while(|run| run.2 != KnownState::NOTHING);
        for (from, to, KnownState(state)) in known.take(most) {
            found.push(to - from, state);
        }
        self.used.set(at, at + found.total(), now);
        found
    }

    /// Whether the state of `at` is known.
    pub(super) fn knows(&self, at: u64) -> bool {
        self.runs.get(at) != KnownState::NOTHING
    }

    /// The first offset from `at` on, where the state is unknown, with a known state.
    pub(super) fn next_known(&self, at: u64) -> Option<u64> {
        let (_, next) = self.runs.run(at, u64::MAX);
        (next < u64::MAX).then_some(next)
    }

    /// Adds `extents`, which begin at `at`; `now` is above 0.
    pub(super) fn learn(&mut self, at: u64, extents: &Extents, now: u64) {
        let end = at.saturating_add(extents.total());
        let runs = extents.runs().iter().map(|&Extent { len, state }| (len, KnownState(state)));
        self.runs.set_all(at, end, runs);
        self.used.set(at, end, now);
    }

    /// Drops a range.
    pub(super) fn forget(&mut self, start: u64, end: u64) {
        self.runs.set(start, end, KnownState::NOTHING);
        self.used.set(start, end, 0);
    }

    /// Sets the state of the known parts of a range.
    pub(super) fn set(&mut self, start: u64, end: u64, state: u64) {
        self.runs.update(start, end, |_, known| match known {
            KnownState::NOTHING => known,
            _ => KnownState(state),
        });
    }
}

/// Drops the least recently used extents until they fit in seven eighths of the memory, if they
/// exceed that memory.
pub(super) fn forget_oldest(maps: &mut [ExtentMap], memory: u64) {
    let cost = |maps: &[ExtentMap]| maps.iter().map(ExtentMap::cost).sum::<u64>();
    if cost(maps) <= memory {
        return;
    }
    let enough = memory - memory / 8;
    let mut oldest: Vec<(u64, usize, u64, u64)> = Vec::new();
    for (index, map) in maps.iter().enumerate() {
        let used = map.used.iter(0, u64::MAX).filter(|run| run.2 > 0);
        oldest.extend(used.map(|(from, to, when)| (when, index, from, to)));
    }
    oldest.sort_unstable();
    for (_, index, mut from, to) in oldest {
        // In pieces: a part of a long reply may stay.
        while from < to {
            if cost(maps) <= enough {
                return;
            }
            let map = &mut maps[index];
            let piece = map.runs.iter(from, to).nth(PIECE - 1).map_or(to, |run| run.1);
            map.forget(from, piece);
            from = piece;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: usize = 30_000;

    /// The contents of the map, byte by byte.
    fn bytes(map: &mut ExtentMap) -> Vec<Option<u64>> {
        let mut all = vec![None; SIZE];
        let mut at = 0;
        while at < SIZE as u64 {
            let out = map.find(at, SIZE as u64, usize::MAX, 1);
            assert_eq!(map.knows(at), !out.is_empty());
            for (here, run) in out.ranges(at) {
                all[here as usize..(here + run.len) as usize].fill(Some(run.state));
            }
            at = match out.total() {
                0 => map.next_known(at).unwrap_or(SIZE as u64),
                total => at + total,
            };
        }
        all
    }

    #[test]
    fn a_map_agrees_with_a_state_per_byte() {
        let mut rng = blockhaul_testkit::rng::Rng::new(blockhaul_testkit::rng::seed());
        for _ in 0..20 {
            let mut map = ExtentMap::default();
            let mut model = vec![None; SIZE];
            for step in 1..60 {
                let at = rng.below(SIZE as u64);
                let len = 1 + rng.below(SIZE as u64 - at).min(9000);
                let range = at as usize..(at + len) as usize;
                match step % 4 {
                    0 | 1 => {
                        let mut extents = Extents::new();
                        while extents.total() < len {
                            // Enough runs for several segments.
                            let run = 1 + rng.below(2).min(len - extents.total() - 1);
                            extents.push(run, rng.below(4));
                        }
                        for (here, run) in extents.ranges(at) {
                            model[here as usize..(here + run.len) as usize].fill(Some(run.state));
                        }
                        map.learn(at, &extents, step);
                    }
                    2 => {
                        map.set(at, at + len, 7);
                        model[range].iter_mut().flatten().for_each(|state| *state = 7);
                    }
                    _ => {
                        map.forget(at, at + len);
                        model[range].fill(None);
                    }
                }
            }
            assert!(bytes(&mut map) == model);
            forget_oldest(std::slice::from_mut(&mut map), 0);
            assert_eq!(map.cost(), 0);
        }
    }

    #[test]
    fn what_was_used_last_stays() {
        let mut maps = [ExtentMap::default(), ExtentMap::default()];
        let mut extents = Extents::new();
        (0..20_000).for_each(|at| extents.push(1, at % 2));
        for (now, (index, at)) in [(0, 0), (1, 0), (0, 50_000)].into_iter().enumerate() {
            maps[index].learn(at, &extents, now as u64 + 1);
        }
        let memory = maps.iter().map(ExtentMap::cost).sum::<u64>() - 1;
        assert_eq!(maps[0].find(0, 1000, 7, 9).total(), 7);
        forget_oldest(&mut maps, memory);
        // The oldest first, except what was used since.
        assert!(maps[0].knows(6) && !maps[0].knows(7));
        assert!(maps[1].knows(0) && maps[0].knows(50_000));
        let cost: u64 = maps.iter().map(ExtentMap::cost).sum();
        assert!(cost <= memory && cost > memory / 2);
    }
}
