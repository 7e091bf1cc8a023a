//! The allocated blocks of a disk, as far as they are known: a bit for each unit of 64 KiB, in parts
//! of 32 GiB, the longest range of one query.

use std::collections::BTreeMap;

use blockhaul_block::Extents;

/// Bytes of a unit: the smallest chunk of a query.
pub(crate) const UNIT: u64 = 64 << 10;
/// Bytes of a part.
pub(crate) const PART: u64 = 32 << 30;
/// Units of a part.
pub(crate) const UNITS: usize = 512 << 10;
const WORDS: usize = UNITS / 64;

/// The units of a part: set if allocated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum UnitBits {
    /// All are the same.
    Uniform(bool),
    /// A bit for each.
    Mixed(Box<[u64]>),
}

impl UnitBits {
    /// Sets `units`; those outside a part are ignored.
    pub(crate) fn set(&mut self, units: std::ops::Range<usize>) {
        let start = units.start;
        let end = units.end.min(UNITS);
        if start >= end || *self == UnitBits::Uniform(true) {
            return;
        }
        if (start, end) == (0, UNITS) {
            *self = UnitBits::Uniform(true);
            return;
        }
        if let UnitBits::Uniform(false) = self {
            *self = UnitBits::Mixed(vec![0; WORDS].into());
        }
        let UnitBits::Mixed(words) = self else { return };
        for word in start / 64..=(end - 1) / 64 {
            let from = start.max(word * 64) % 64;
            let to = end.min(word * 64 + 64) - word * 64;
            words[word] |= (u64::MAX >> (64 - (to - from))) << from;
        }
    }

    /// Sets all that `other` has set.
    pub(crate) fn add(&mut self, other: &UnitBits) {
        match (&mut *self, other) {
            (UnitBits::Uniform(true), _) | (_, UnitBits::Uniform(false)) => {}
            (_, UnitBits::Uniform(true)) | (UnitBits::Uniform(false), _) => *self = other.clone(),
            (UnitBits::Mixed(words), UnitBits::Mixed(others)) => {
                words.iter_mut().zip(others).for_each(|(word, other)| *word |= other);
            }
        }
    }

    /// Whether `unit` is set, and the first unit from there on that differs; at most [`UNITS`].
    fn run(&self, unit: usize) -> (bool, usize) {
        let words = match self {
            UnitBits::Uniform(set) => return (*set, UNITS),
            UnitBits::Mixed(words) => words,
        };
        let set = words[unit / 64] >> (unit % 64) & 1 == 1;
        let differs = |word: u64| if set { !word } else { word };
        let mut index = unit / 64;
        let mut word = differs(words[index]) & (u64::MAX << (unit % 64));
        while word == 0 {
            index += 1;
            if index == WORDS {
                return (set, UNITS);
            }
            word = differs(words[index]);
        }
        (set, index * 64 + word.trailing_zeros() as usize)
    }
}

/// The known parts of a disk.
#[derive(Debug)]
pub(crate) struct Allocation {
    /// Size of the disk in bytes.
    size: u64,
    parts: BTreeMap<u64, UnitBits>,
    /// The state of what is not allocated.
    hole: u64,
}

impl Allocation {
    /// Nothing is known of a disk of `size` bytes, whose unallocated ranges have the state `hole`.
    pub(crate) fn new(size: u64, hole: u64) -> Allocation {
        Allocation { size, parts: BTreeMap::new(), hole }
    }

    /// The part with offset `at`.
    pub(crate) fn part_of(at: u64) -> u64 {
        at / PART
    }

    /// Number of parts of the disk.
    pub(crate) fn parts(&self) -> u64 {
        self.size.div_ceil(PART)
    }

    pub(crate) fn knows(&self, part: u64) -> bool {
        self.parts.contains_key(&part)
    }

    /// The known parts, in order.
    pub(crate) fn known(&self) -> impl Iterator<Item = (u64, &UnitBits)> {
        self.parts.iter().map(|(part, bits)| (*part, bits))
    }

    /// Whole units of a part that lie in the disk: the rest at its end is always data.
    pub(crate) fn units(&self, part: u64) -> usize {
        let left = self.size.saturating_sub(part.saturating_mul(PART)).min(PART);
        usize::try_from(left / UNIT).unwrap_or(UNITS)
    }

    /// Adds a part.
    pub(crate) fn learn(&mut self, part: u64, mut bits: UnitBits) {
        bits.set(self.units(part)..UNITS);
        self.parts.insert(part, bits);
    }

    /// A range was written.
    pub(crate) fn wrote(&mut self, at: u64, len: u64) {
        for (part, units) in units_of(at, len) {
            if let Some(bits) = self.parts.get_mut(&part) {
                bits.set(units);
            }
        }
    }

    /// The extents of a range that is inside the disk and not empty, at most `most` runs; none if
    /// its first byte is not known.
    pub(crate) fn find(&self, at: u64, end: u64, most: usize) -> Option<Extents> {
        let mut found = Extents::new();
        let mut here = at;
        while here < end && found.len() <= most {
            let Some(bits) = self.parts.get(&(here / PART)) else { break };
            let start = here / PART * PART;
            let unit = usize::try_from((here - start) / UNIT).ok()?;
            let (set, next) = bits.run(unit);
            let stop = start.saturating_add(next as u64 * UNIT).min(end);
            found.push(stop - here, if set { 0 } else { self.hole });
            here = stop;
        }
        if found.len() > most {
            // The last run may go on.
            let kept = found.runs()[..most].iter().map(|run| run.len).sum();
            found.truncate(kept);
        }
        (here > at).then_some(found)
    }
}

/// The parts of a range, and the units of each that it touches.
pub(crate) fn units_of(at: u64, len: u64) -> impl Iterator<Item = (u64, std::ops::Range<usize>)> {
    let end = at.saturating_add(len);
    let parts = if len == 0 { 0..0 } else { at / PART..end.div_ceil(PART) };
    parts.map(move |part| {
        let start = part * PART;
        let from = at.max(start) - start;
        let to = (end - start).min(PART);
        let unit = |at: u64| usize::try_from(at).unwrap_or(UNITS);
        (part, unit(from / UNIT)..unit(to.div_ceil(UNIT)))
    })
}

#[cfg(test)]
mod tests {
    use blockhaul_block::{HOLE, ZERO};
    use blockhaul_testkit::rng::{Rng, seed};

    use super::*;

    #[test]
    fn a_map_agrees_with_a_state_per_unit() {
        let mut rng = Rng::new(seed());
        let size = PART + 1000 * UNIT + 512;
        for _ in 0..20 {
            let mut map = Allocation::new(size, HOLE | ZERO);
            let mut model = vec![false; 1001];
            assert_eq!((map.parts(), map.units(1)), (2, 1000));
            let mut bits = UnitBits::Uniform(false);
            for _ in 0..rng.below(40) {
                let start = rng.below(1000) as usize;
                let end = (start + 1 + rng.below(90) as usize).min(1000);
                bits.set(start..end);
                model[start..end].fill(true);
            }
            model[1000] = true;
            assert_eq!(map.find(PART, size, 9), None);
            map.learn(1, bits);
            let at = rng.below(999);
            let len = 1 + rng.below(3);
            map.wrote(PART + at * UNIT + 5, len * UNIT - 5);
            model[at as usize..(at + len) as usize].fill(true);
            let mut at = PART;
            let most = 1 + rng.below(9) as usize;
            while at < size {
                let found = map.find(at, size, most).unwrap();
                assert!(found.len() <= most);
                for (here, run) in found.ranges(at) {
                    for byte in (here..here + run.len).step_by(512) {
                        let unit = ((byte - PART) / UNIT) as usize;
                        assert_eq!(run.state == 0, model[unit], "{byte}");
                    }
                }
                at += found.total();
            }
        }
    }

    #[test]
    fn ranges_touch_units_of_several_parts() {
        let touched: Vec<_> = units_of(PART - 1, 2).collect();
        assert_eq!(touched, [(0, UNITS - 1..UNITS), (1, 0..1)]);
        assert_eq!(units_of(5, 0).count(), 0);
        assert_eq!(units_of(u64::MAX - 5, 9).last().unwrap().0, u64::MAX / PART);
        let mut all = UnitBits::Uniform(false);
        all.set(0..UNITS);
        assert_eq!(all, UnitBits::Uniform(true));
        let mut some = UnitBits::Uniform(false);
        some.set(3..4);
        let mut both = some.clone();
        both.add(&UnitBits::Uniform(false));
        assert_eq!(both, some);
        both.add(&all);
        assert_eq!(both, all);
    }
}
