//! States of ranges of numbers (blocks, bytes), one entry per run of equal states.
//!
//! A *mark* says which state begins at a number; it is valid up to the next mark, and before the
//! first one everything has the default state. Adjacent marks differ. Marks are stored in leaves of
//! bounded length, so that a change moves little memory. A change costs O(log n) plus what it
//! replaces, whatever the length of the range; a run costs 16 to 40 bytes for one-byte states.

use std::collections::BTreeMap;
use std::iter;
use std::ops::Bound;

/// Maximum number of marks in a leaf.
const LEAF: usize = 128;
/// Memory of a leaf besides its marks: its entry in the tree, its allocation.
const LEAF_COST: u64 = 64;

#[derive(Debug, Clone, Copy)]
struct Mark<S> {
    at: u64,
    state: S,
}

/// The states of all numbers.
#[derive(Debug)]
pub struct Runs<S> {
    /// By the position of their first mark; none is empty.
    leaves: BTreeMap<u64, Vec<Mark<S>>>,
    marks: usize,
}

impl<S> Default for Runs<S> {
    fn default() -> Runs<S> {
        Runs { leaves: BTreeMap::new(), marks: 0 }
    }
}

impl<S: Copy + Eq + Default> Runs<S> {
    /// Approximate memory use in bytes.
    pub fn memory(&self) -> u64 {
        self.marks as u64 * size_of::<Mark<S>>() as u64 + self.leaves.len() as u64 * LEAF_COST
    }

    /// The state of a number.
    pub fn get(&self, at: u64) -> S {
        self.find(at).0
    }

    /// The state of `at`, and the first number after it, up to `end`, with another state.
    pub fn run(&self, at: u64, end: u64) -> (S, u64) {
        let (state, next) = self.find(at);
        (state, next.map_or(end, |next| next.min(end)))
    }

    /// The runs of a range: start, end, state.
    pub fn iter(&self, start: u64, end: u64) -> impl Iterator<Item = (u64, u64, S)> + '_ {
        let mut at = start;
        let mut state = self.get(start);
        let mut marks = self.marks_behind(start);
        iter::from_fn(move || {
            if at >= end {
                return None;
            }
            let from = at;
            let found = state;
            at = end;
            if let Some(mark) = marks.next().filter(|mark| mark.at < end) {
                at = mark.at;
                state = mark.state;
            }
            Some((from, at, found))
        })
    }

    /// Sets the state of `start..end`.
    pub fn set(&mut self, start: u64, end: u64, state: S) {
        if start < end && self.run(start, end) != (state, end) {
            self.replace(start, end, iter::once(Mark { at: start, state }));
        }
    }

    /// Sets the states of a range: lengths and states, which add up to its length.
    pub fn set_all(&mut self, start: u64, end: u64, runs: impl Iterator<Item = (u64, S)>) {
        let mut at = start;
        let marks = runs.map_while(|(len, state)| {
            let mark = Mark { at, state };
            at = at.saturating_add(len);
            (mark.at < end).then_some(mark)
        });
        let marks: Vec<Mark<S>> = marks.collect();
        if start < end && !marks.is_empty() {
            self.replace(start, end, marks.into_iter());
        }
    }

    /// Changes the state of each run of a range; `change` gets the run's length and state.
    pub fn update(&mut self, start: u64, end: u64, mut change: impl FnMut(u64, S) -> S) {
        if start >= end {
            return;
        }
        let (before, to) = self.run(start, end);
        if to == end {
            let state = change(end - start, before);
            if state != before {
                self.replace(start, end, iter::once(Mark { at: start, state }));
            }
            return;
        }
        let marks = self.iter(start, end);
        let marks = marks.map(|(at, to, state)| Mark { at, state: change(to - at, state) });
        let marks: Vec<Mark<S>> = marks.collect();
        self.replace(start, end, marks.into_iter());
    }

    /// The state of a number, and the position of the next mark.
    fn find(&self, at: u64) -> (S, Option<u64>) {
        let Some((&key, leaf)) = self.leaves.range(..=at).next_back() else {
            return (S::default(), self.leaves.first_key_value().map(|(&key, _)| key));
        };
        // The first mark of the leaf is not after `at`.
        let behind = leaf.partition_point(|mark| mark.at <= at);
        let state = leaf[behind - 1].state;
        let next = leaf.get(behind).map(|mark| mark.at).or_else(|| self.key_behind(key));
        (state, next)
    }

    fn key_behind(&self, key: u64) -> Option<u64> {
        let behind = (Bound::Excluded(key), Bound::Unbounded);
        self.leaves.range(behind).next().map(|(&key, _)| key)
    }

    fn marks_behind(&self, at: u64) -> impl Iterator<Item = &Mark<S>> {
        let first = self.leaves.range(..=at).next_back().map_or(0, |(&key, _)| key);
        let leaves = self.leaves.range(first..);
        leaves.flat_map(move |(_, leaf)| &leaf[leaf.partition_point(|mark| mark.at <= at)..])
    }

    /// Replaces the marks of a range by these, the first of which is at its start.
    fn replace(&mut self, start: u64, end: u64, marks: impl Iterator<Item = Mark<S>>) {
        let before = match start.checked_sub(1) {
            None => S::default(),
            Some(before) => self.get(before),
        };
        // The states after the range do not change.
        let behind = Mark { at: end, state: self.get(end) };
        let mut last = before;
        let new = marks.chain(iter::once(behind)).filter(|mark| {
            let differs = mark.state != last;
            last = mark.state;
            differs
        });
        let covering = self.leaves.range(..=start).next_back().map(|(&key, _)| key);
        let first = self.leaves.first_key_value().map(|(&key, _)| key);
        let Some(key) = covering.or(first) else {
            let leaf: Vec<Mark<S>> = new.collect();
            self.marks += leaf.len();
            return self.put(leaf, true);
        };
        let next = self.key_behind(key).filter(|&next| next <= end);
        let Some(leaf) = self.leaves.get_mut(&key) else { return };
        let from = leaf.partition_point(|mark| mark.at < start);
        let to = leaf.partition_point(|mark| mark.at <= end);
        let len = leaf.len();
        if next.is_some() {
            self.marks -= len - from;
            leaf.truncate(from);
            leaf.extend(new);
            self.marks += leaf.len() - from;
            self.remove_leaves(key, end);
        } else {
            leaf.splice(from..to, new);
            self.marks = self.marks + leaf.len() - len;
        }
        let Some(leaf) = self.leaves.get_mut(&key) else { return };
        let is_in_place = leaf.first().is_some_and(|mark| mark.at == key);
        if is_in_place && leaf.len() <= LEAF {
            if leaf.len() * 4 < leaf.capacity() {
                leaf.shrink_to(leaf.len() * 2);
            }
            return;
        }
        if let Some(leaf) = self.leaves.remove(&key) {
            self.put(leaf, to == len);
        }
    }

    /// Removes the marks up to `end` from the leaves after the one at `key`.
    fn remove_leaves(&mut self, key: u64, end: u64) {
        while let Some(next) = self.key_behind(key).filter(|&next| next <= end) {
            let Some(mut leaf) = self.leaves.remove(&next) else { return };
            let gone = leaf.partition_point(|mark| mark.at <= end);
            self.marks -= gone;
            leaf.drain(..gone);
            self.put(leaf, false);
        }
    }

    /// Adds a leaf that overlaps no other, split into several if it is too long; `grows`: at its
    /// end.
    fn put(&mut self, leaf: Vec<Mark<S>>, grows: bool) {
        let Some(first) = leaf.first() else { return };
        if leaf.len() <= LEAF {
            self.leaves.insert(first.at, leaf);
            return;
        }
        let is_long = leaf.len() > 2 * LEAF;
        let size = if grows || is_long { LEAF } else { leaf.len().div_ceil(2) };
        for part in leaf.chunks(size) {
            self.leaves.insert(part[0].at, part.to_vec());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: u64 = 3000;

    /// Checks every rule of the representation, and returns the states of `base..base + SIZE`.
    fn checked(runs: &Runs<u8>, base: u64) -> Vec<u8> {
        let mut all = Vec::new();
        for (&key, leaf) in &runs.leaves {
            assert_eq!(leaf.first().map(|mark| mark.at), Some(key));
            assert!(leaf.len() <= LEAF && leaf.capacity() <= 4 * LEAF);
            all.extend_from_slice(leaf);
        }
        assert_eq!(all.len(), runs.marks);
        assert!(all.is_sorted_by(|a, b| a.at < b.at && a.state != b.state));
        assert!(all.first().is_none_or(|mark| mark.state != 0));
        let mut states = Vec::new();
        let mut next = base;
        for (from, to, state) in runs.iter(base, base + SIZE) {
            assert!(from == next && from < to);
            assert_eq!(runs.run(from, base + SIZE), (state, to));
            assert_eq!((runs.get(from), runs.get(to - 1)), (state, state));
            states.resize((to - base) as usize, state);
            next = to;
        }
        assert_eq!(next, base + SIZE);
        states
    }

    #[test]
    fn runs_agree_with_a_state_each() {
        let mut rng = blockhaul_testkit::rng::Rng::new(blockhaul_testkit::rng::seed());
        for round in 0..40 {
            let base = if round % 2 == 0 { 0 } else { u64::MAX - SIZE };
            let mut runs = Runs::default();
            let mut model = vec![0_u8; SIZE as usize];
            // Short ranges make many leaves, long ones remove several at once.
            let longest = [3, 40, 2500][round % 3];
            for _ in 0..1500 {
                let start = rng.below(SIZE);
                let end = (start + 1 + rng.below(longest)).min(SIZE);
                let part = &mut model[start as usize..end as usize];
                let from = base + start;
                let to = base + end;
                match rng.below(5) {
                    0..3 => {
                        let state = rng.below(3) as u8;
                        runs.set(from, to, state);
                        part.fill(state);
                    }
                    3 => {
                        let turn = rng.below(2) as u8 + 1;
                        let mut seen = 0;
                        runs.update(from, to, |len, state| {
                            seen += len;
                            (state + turn) % 3
                        });
                        assert_eq!(seen, to - from);
                        part.iter_mut().for_each(|state| *state = (*state + turn) % 3);
                    }
                    _ => {
                        part.iter_mut().for_each(|state| *state = rng.below(3) as u8);
                        let list = part.iter().map(|&state| (1, state));
                        runs.set_all(from, to, list);
                    }
                }
            }
            assert!(checked(&runs, base) == model);
            runs.set(base, base + SIZE, 0);
            assert_eq!((runs.leaves.len(), runs.marks, runs.memory()), (0, 0, 0));
        }
    }

    #[test]
    fn a_change_costs_what_it_touches_and_a_run_some_bytes() {
        let mut runs = Runs::default();
        runs.set(0, u64::MAX, 1_u8);
        runs.set(1 << 40, 1 << 62, 2);
        assert_eq!(runs.iter(0, u64::MAX).count(), 3);
        assert!(runs.memory() < 200);
        // The maximum for single blocks, in two orders.
        let mut rng = blockhaul_testkit::rng::Rng::new(blockhaul_testkit::rng::seed());
        for shuffled in [false, true] {
            let mut runs = Runs::default();
            let count = 100_000;
            let mut blocks: Vec<u64> = (0..count).map(|block| 2 * block).collect();
            if shuffled {
                rng.shuffle(&mut blocks);
            }
            for block in blocks {
                runs.set(block, block + 1, 1_u8);
            }
            assert_eq!(runs.marks as u64, 2 * count);
            let capacity: usize = runs.leaves.values().map(Vec::capacity).sum();
            let bytes = (capacity * size_of::<Mark<u8>>()) as u64 + runs.leaves.len() as u64 * 64;
            assert!(bytes < 80 * count, "{} bytes a block", bytes / count);
            runs.set(0, 2 * count, 1);
            assert_eq!(runs.marks, 2);
        }
    }
}
