//! What is known about a device in one context, and when it was last asked for.

use blockhaul_block::{Extent, Extents};

use crate::runs::Runs;

/// Runs that are forgotten at a time.
const PIECE: usize = 4096;

/// The state of a byte, if it is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Known(u64);

impl Known {
    /// No device tells a state of this number; one that does is asked each time.
    const NOTHING: Known = Known(u64::MAX);
}

impl Default for Known {
    fn default() -> Known {
        Known::NOTHING
    }
}

/// What is known of one context.
#[derive(Default)]
pub(super) struct Map {
    runs: Runs<Known>,
    /// When each of the known bytes was last asked for; 0 for the others.
    used: Runs<u64>,
}

impl Map {
    /// Bytes of memory.
    pub(super) fn cost(&self) -> u64 {
        self.runs.memory() + self.used.memory()
    }

    /// What is known about `at` and what follows it up to `end` without a gap, at most `most` runs; marked
    /// as used at `now`, which is above 0.
    pub(super) fn find(&mut self, at: u64, end: u64, most: usize, now: u64) -> Extents {
        let mut found = Extents::new();
        let known = self.runs.iter(at, end).take_while(|run| run.2 != Known::NOTHING);
        for (from, to, Known(state)) in known.take(most) {
            found.push(to - from, state);
        }
        self.used.set(at, at + found.total(), now);
        found
    }

    /// Whether something is known about `at`.
    pub(super) fn knows(&self, at: u64) -> bool {
        self.runs.get(at) != Known::NOTHING
    }

    /// The first offset from `at` on, where nothing is known, at which something is.
    pub(super) fn next_known(&self, at: u64) -> Option<u64> {
        let (_, next) = self.runs.run(at, u64::MAX);
        (next < u64::MAX).then_some(next)
    }

    /// Learns what `extents` says from `at` on; `now` is above 0.
    pub(super) fn learn(&mut self, at: u64, extents: &Extents, now: u64) {
        let end = at.saturating_add(extents.total());
        let runs = extents.runs().iter().map(|&Extent { len, state }| (len, Known(state)));
        self.runs.set_all(at, end, runs);
        self.used.set(at, end, now);
    }

    /// What is known about a range is true no more.
    pub(super) fn forget(&mut self, start: u64, end: u64) {
        self.runs.set(start, end, Known::NOTHING);
        self.used.set(start, end, 0);
    }

    /// The parts of a range about which something is known are in this state now.
    pub(super) fn set(&mut self, start: u64, end: u64, state: u64) {
        self.runs.update(start, end, |_, known| match known {
            Known::NOTHING => known,
            _ => Known(state),
        });
    }
}

/// Forgets what was not asked for for the longest time, until seven eighths of the memory suffice, if more
/// than that memory is used.
pub(super) fn forget_oldest(maps: &mut [Map], memory: u64) {
    let cost = |maps: &[Map]| maps.iter().map(Map::cost).sum::<u64>();
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
        // In pieces: a part of a long answer may stay.
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

    /// What the map knows, byte by byte.
    fn bytes(map: &mut Map) -> Vec<Option<u64>> {
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
            let mut map = Map::default();
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
        let mut maps = [Map::default(), Map::default()];
        let mut extents = Extents::new();
        (0..20_000).for_each(|at| extents.push(1, at % 2));
        for (now, (index, at)) in [(0, 0), (1, 0), (0, 50_000)].into_iter().enumerate() {
            maps[index].learn(at, &extents, now as u64 + 1);
        }
        let memory = maps.iter().map(Map::cost).sum::<u64>() - 1;
        assert_eq!(maps[0].find(0, 1000, 7, 9).total(), 7);
        forget_oldest(&mut maps, memory);
        // First of all what was learned first, but for what was asked for since.
        assert!(maps[0].knows(6) && !maps[0].knows(7));
        assert!(maps[1].knows(0) && maps[0].knows(50_000));
        let cost: u64 = maps.iter().map(Map::cost).sum();
        assert!(cost <= memory && cost > memory / 2);
    }
}
