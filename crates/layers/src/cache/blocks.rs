//! What is known about each block of a cached device, and which were used last.

use std::collections::{BTreeMap, HashMap};

/// Where a block's bytes are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    /// In the device below only; a hole in the cache's file.
    Absent,
    /// In the cache's file and in the device below.
    Clean,
    /// In the cache's file; the device below has older ones.
    Dirty,
    /// Zeroes, of which the device below does not know yet; a hole in the cache's file.
    Zero,
}

impl State {
    /// Whether the block's bytes are in the cache's file.
    pub(super) fn is_kept(self) -> bool {
        matches!(self, State::Clean | State::Dirty)
    }
}

/// Blocks in a chunk.
const CHUNK: u64 = 4096;
const WORDS: usize = CHUNK as usize / 64;

/// Bits of neighbouring blocks; made when one of them is not absent.
struct Chunk {
    /// Clean and zero.
    low: [u64; WORDS],
    /// Dirty and zero: the device below is behind.
    behind: [u64; WORDS],
    /// Written since the block was last carried to the device below.
    touched: [u64; WORDS],
}

impl Chunk {
    const EMPTY: Chunk = Chunk { low: [0; WORDS], behind: [0; WORDS], touched: [0; WORDS] };
    const ABSENT: &'static Chunk = &Chunk::EMPTY;

    fn state(&self, word: usize, bit: u32) -> State {
        match (self.low[word] >> bit & 1, self.behind[word] >> bit & 1) {
            (0, 0) => State::Absent,
            (1, 0) => State::Clean,
            (0, _) => State::Dirty,
            _ => State::Zero,
        }
    }

    /// The blocks of a word that are in a state.
    fn mask(&self, word: usize, state: State) -> u64 {
        let (low, behind) = (self.low[word], self.behind[word]);
        match state {
            State::Absent => !low & !behind,
            State::Clean => low & !behind,
            State::Dirty => !low & behind,
            State::Zero => low & behind,
        }
    }

    fn is_empty(&self) -> bool {
        self.low.iter().chain(&self.behind).all(|word| *word == 0)
    }
}

/// All blocks; those of which nothing was said are absent.
pub(super) struct Blocks {
    chunks: BTreeMap<u64, Box<Chunk>>,
    /// How many are clean or dirty.
    kept: u64,
    /// When each of them was last used, if anybody wants to know.
    used: Option<HashMap<u64, u64>>,
    now: u64,
}

impl Blocks {
    /// No block is kept; `ages`: it is remembered when blocks were used.
    pub(super) fn new(ages: bool) -> Blocks {
        Blocks { chunks: BTreeMap::new(), kept: 0, used: ages.then(HashMap::new), now: 0 }
    }

    /// How many blocks are clean or dirty.
    pub(super) fn kept(&self) -> u64 {
        self.kept
    }

    pub(super) fn get(&self, block: u64) -> State {
        let (chunk, word, bit) = place(block);
        self.chunks.get(&chunk).map_or(State::Absent, |chunk| chunk.state(word, bit))
    }

    /// The state of `start`, and the first block behind it, up to `end`, that is in another.
    pub(super) fn run(&self, start: u64, end: u64) -> (State, u64) {
        let state = self.get(start);
        (state, self.next(start, end, |chunk, word| !chunk.mask(word, state)))
    }

    /// Whether all blocks of `start..end` are clean or dirty.
    pub(super) fn all_kept(&self, start: u64, end: u64) -> bool {
        let other = |chunk: &Chunk, word: usize| !(chunk.low[word] ^ chunk.behind[word]);
        self.next(start, end, other) == end
    }

    /// How many blocks of `start..end` are absent.
    pub(super) fn absent(&self, start: u64, end: u64) -> u64 {
        let mut absent = 0;
        let mut from = start;
        while from < end {
            let (state, to) = self.run(from, end);
            absent += if state == State::Absent { to - from } else { 0 };
            from = to;
        }
        absent
    }

    /// The first run of blocks from `start` on, up to `end`, of which the device below is behind.
    pub(super) fn next_behind(&self, start: u64, end: u64) -> Option<(u64, u64, State)> {
        let from = self.next(start, end, |chunk, word| chunk.behind[word]);
        let (state, to) = (from < end).then(|| self.run(from, end))?;
        Some((from, to, state))
    }

    /// The blocks of `start..end` are in this state.
    pub(super) fn set(&mut self, start: u64, end: u64, state: State) {
        if state.is_kept() {
            self.use_now(start, end);
        } else if let Some(used) = &mut self.used {
            if end - start > used.len() as u64 {
                used.retain(|block, _| !(start..end).contains(block));
            } else {
                for block in start..end {
                    used.remove(&block);
                }
            }
        }
        let low = matches!(state, State::Clean | State::Zero);
        let behind = matches!(state, State::Dirty | State::Zero);
        self.change(start, end, state != State::Absent, |chunk, word, mask| {
            put(&mut chunk.low[word], mask, low);
            put(&mut chunk.behind[word], mask, behind);
            put(&mut chunk.touched[word], mask, behind);
        });
    }

    /// The blocks of `start..end`, which are all kept, were used.
    pub(super) fn use_now(&mut self, start: u64, end: u64) {
        if let Some(used) = &mut self.used {
            self.now += 1;
            for block in start..end {
                used.insert(block, self.now);
            }
        }
    }

    /// What is behind in `start..end` is being carried to the device below.
    pub(super) fn begin_carry(&mut self, start: u64, end: u64) {
        self.change(start, end, false, |chunk, word, mask| chunk.touched[word] &= !mask);
    }

    /// The device below has what these blocks held; those that were written since are dirty still.
    pub(super) fn end_carry(&mut self, start: u64, end: u64) {
        self.change(start, end, false, |chunk, word, mask| {
            let done = mask & !chunk.touched[word];
            // Dirty ones become clean, zero ones absent.
            let (dirty, zero) = (chunk.mask(word, State::Dirty), chunk.mask(word, State::Zero));
            chunk.low[word] = chunk.low[word] & !(zero & done) | dirty & done;
            chunk.behind[word] &= !((dirty | zero) & done);
        });
    }

    /// The `count` blocks that were used the longest time ago, in order of their place.
    pub(super) fn oldest(&self, count: u64) -> Vec<u64> {
        let Some(used) = &self.used else { return Vec::new() };
        let mut all: Vec<(u64, u64)> = used.iter().map(|(block, when)| (*when, *block)).collect();
        let count = usize::try_from(count).unwrap_or(usize::MAX);
        if count < all.len() {
            all.select_nth_unstable(count);
            all.truncate(count);
        }
        let mut blocks: Vec<u64> = all.into_iter().map(|(_, block)| block).collect();
        blocks.sort_unstable();
        blocks
    }

    /// The first block of `start..end` for which `wanted` has a bit.
    fn next(&self, start: u64, end: u64, wanted: impl Fn(&Chunk, usize) -> u64) -> u64 {
        let absent = wanted(Chunk::ABSENT, 0);
        let mut block = start;
        while block < end {
            let (number, word, bit) = place(block);
            let Some(chunk) = self.chunks.get(&number) else {
                if absent != 0 {
                    return block;
                }
                // On to the next chunk that says something.
                let next = self.chunks.range(number..).next();
                block = next.map_or(end, |(&chunk, _)| chunk.saturating_mul(CHUNK));
                continue;
            };
            for word in word..WORDS {
                let first = number * CHUNK + word as u64 * 64;
                let skip = if first < block { bit } else { 0 };
                let found = wanted(chunk, word) >> skip << skip;
                if found != 0 {
                    return (first + u64::from(found.trailing_zeros())).min(end);
                }
                if first + 64 >= end {
                    return end;
                }
            }
            block = (number + 1).saturating_mul(CHUNK);
        }
        end
    }

    /// Changes the words of `start..end`; `make`: of chunks that are not there yet, too.
    fn change(
        &mut self,
        start: u64,
        end: u64,
        make: bool,
        change: impl Fn(&mut Chunk, usize, u64),
    ) {
        let mut block = start;
        while block < end {
            let (number, word, bit) = place(block);
            let last = (number * CHUNK + word as u64 * 64).saturating_add(64).min(end);
            let chunk = match make {
                true => Some(self.chunks.entry(number).or_insert_with(|| Box::new(Chunk::EMPTY))),
                false => self.chunks.get_mut(&number),
            };
            let Some(chunk) = chunk else {
                let next = self.chunks.range(number..).next();
                block = next.map_or(end, |(&chunk, _)| chunk.saturating_mul(CHUNK));
                continue;
            };
            let len = last - block;
            let mask = if len == 64 { u64::MAX } else { ((1 << len) - 1) << bit };
            let kept =
                |chunk: &Chunk| u64::from((chunk.low[word] ^ chunk.behind[word]).count_ones());
            let before = kept(chunk);
            change(chunk, word, mask);
            self.kept = self.kept + kept(chunk) - before;
            let chunk_ends = last == end || last.is_multiple_of(CHUNK);
            if !make && chunk_ends && chunk.is_empty() {
                self.chunks.remove(&number);
            }
            block = last;
        }
    }
}

/// Chunk, word and bit of a block.
fn place(block: u64) -> (u64, usize, u32) {
    (block / CHUNK, (block % CHUNK / 64) as usize, (block % 64) as u32)
}

fn put(word: &mut u64, mask: u64, on: bool) {
    if on { *word |= mask } else { *word &= !mask }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATES: [State; 4] = [State::Absent, State::Clean, State::Dirty, State::Zero];

    #[test]
    fn blocks_agree_with_a_state_each() {
        let mut rng = testkit::rng::Rng::new(testkit::rng::seed());
        let count = 3 * CHUNK;
        // Far from the first, so that chunks are missing between.
        let base = 1_u64 << 40;
        for _ in 0..20 {
            let mut blocks = Blocks::new(false);
            let mut model = vec![(State::Absent, false); count as usize];
            for _ in 0..60 {
                let start = rng.below(count);
                let end = start + 1 + rng.below((count - start).min(300));
                let range = start as usize..end as usize;
                let (from, to) = (base + start, base + end);
                match rng.below(6) {
                    step @ 0..4 => {
                        let state = STATES[step as usize];
                        blocks.set(from, to, state);
                        let touched = matches!(state, State::Dirty | State::Zero);
                        model[range].fill((state, touched));
                    }
                    4 => {
                        blocks.begin_carry(from, to);
                        model[range].iter_mut().for_each(|(_, touched)| *touched = false);
                    }
                    _ => {
                        blocks.end_carry(from, to);
                        for (state, touched) in &mut model[range] {
                            *state = match (*state, *touched) {
                                (State::Dirty, false) => State::Clean,
                                (State::Zero, false) => State::Absent,
                                (state, _) => state,
                            };
                        }
                    }
                }
            }
            let kept = model.iter().filter(|(state, _)| state.is_kept()).count();
            assert_eq!(blocks.kept(), kept as u64);
            let mut from = 0;
            let mut behind = Vec::new();
            while from < count {
                let state = model[from as usize].0;
                let same = model[from as usize..].iter().take_while(|(other, _)| *other == state);
                let to = from + same.count() as u64;
                assert_eq!(blocks.run(base + from, base + count), (state, base + to));
                assert_eq!(blocks.all_kept(base + from, base + to), state.is_kept());
                assert_eq!(blocks.get(base + to - 1), state);
                if matches!(state, State::Dirty | State::Zero) {
                    behind.push((base + from, base + to, state));
                }
                from = to;
            }
            let mut found = Vec::new();
            let mut next = 0;
            while let Some(run) = blocks.next_behind(next, base + count) {
                next = run.1;
                found.push(run);
            }
            assert_eq!(found, behind);
            let absent = model.iter().filter(|(state, _)| *state == State::Absent).count();
            assert_eq!(blocks.absent(base, base + count), absent as u64);
            blocks.set(0, base + count, State::Absent);
            assert_eq!((blocks.kept(), blocks.chunks.len()), (0, 0));
        }
    }

    #[test]
    fn the_oldest_are_those_not_used_for_long() {
        let mut blocks = Blocks::new(true);
        for block in [7, 3, 9, 1] {
            blocks.set(block, block + 1, State::Clean);
        }
        blocks.use_now(7, 8);
        assert_eq!(blocks.oldest(2), [3, 9]);
        blocks.set(3, 4, State::Absent);
        blocks.set(9, 10, State::Zero);
        assert_eq!(blocks.oldest(9), [1, 7]);
        blocks.set(0, 1 << 40, State::Absent);
        assert_eq!(blocks.oldest(9), [0_u64; 0]);
    }
}
