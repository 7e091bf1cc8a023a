//! Reproducible random numbers: everything random in tests comes from one printed seed.

/// A small, fast, seeded generator (SplitMix64). Not for secrets.
#[derive(Debug, Clone)]
pub struct Rng(u64);

impl Rng {
    /// A generator; the same seed gives the same numbers.
    pub fn new(seed: u64) -> Rng {
        Rng(seed)
    }

    /// The next number.
    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `bound`; 0 if `bound` is 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        if bound == 0 { 0 } else { self.number() % bound }
    }

    /// A number from `low` to `high`, both included; `low` if `high` is not above it.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        match high.saturating_sub(low).checked_add(1) {
            Some(count) => low + self.below(count),
            None => self.number(),
        }
    }

    /// True in `percent` of 100 cases.
    pub fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// One of the items. Panics if there is none.
    pub fn pick<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        &items[self.below(items.len() as u64) as usize]
    }

    /// Fills memory with random bytes.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            chunk.copy_from_slice(&self.number().to_le_bytes()[..chunk.len()]);
        }
    }

    /// Contents of a disk: runs of random bytes and of zeroes, unaligned, each of at most `longest`
    /// bytes; `percent` of them are random bytes.
    pub fn disk(&mut self, size: usize, longest: u64, percent: u64) -> Vec<u8> {
        let mut bytes = vec![0; size];
        let mut at = 0;
        while at < size {
            let len = (self.between(1, longest) as usize).min(size - at);
            if self.chance(percent) {
                self.fill(&mut bytes[at..at + len]);
            }
            at += len;
        }
        bytes
    }

    /// Shuffles the items.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last as u64 + 1) as usize);
        }
    }
}

/// The seed of this run: `BLOCKHAUL_SEED` (decimal, or hexadecimal after `0x`), which repeats a
/// failure; else `BLOCKHAUL_DEFAULT_SEED`; else a fresh one. Tests that run several seeds run one alone
/// if `BLOCKHAUL_SEED` names it, and all of them with a default seed. Panics if the variable is there and
/// is no number.
pub fn seed() -> u64 {
    for name in ["BLOCKHAUL_SEED", "BLOCKHAUL_DEFAULT_SEED"] {
        if let Ok(text) = std::env::var(name) {
            return parse(&text).unwrap_or_else(|| panic!("{name}={text:?} is not a number"));
        }
    }
    use std::hash::{BuildHasher, Hasher, RandomState};
    RandomState::new().build_hasher().finish()
}

fn parse(text: &str) -> Option<u64> {
    match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_gives_the_same_numbers() {
        let mut one = Rng::new(1);
        let mut two = Rng::new(1);
        let mut other = Rng::new(2);
        let numbers: Vec<_> = (0..100).map(|_| one.number()).collect();
        assert_eq!(numbers, (0..100).map(|_| two.number()).collect::<Vec<_>>());
        assert_ne!(numbers, (0..100).map(|_| other.number()).collect::<Vec<_>>());
    }

    #[test]
    fn numbers_stay_in_their_range_and_reach_its_ends() {
        let mut rng = Rng::new(3);
        let drawn: Vec<_> = (0..1000).map(|_| rng.between(5, 8)).collect();
        assert!(drawn.iter().all(|n| (5..=8).contains(n)));
        assert!((5..=8).all(|n| drawn.contains(&n)));
        assert_eq!((rng.below(0), rng.between(9, 2)), (0, 9));
        rng.between(0, u64::MAX);
        let mut items: Vec<_> = (0..50).collect();
        rng.shuffle(&mut items);
        assert!(!items.is_sorted());
        items.sort_unstable();
        assert_eq!(items, (0..50).collect::<Vec<_>>());
    }
}
