//! The state of each block of a cached device, and which were used last.

use crate::runs::Runs;

/// Where a block's data is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum CacheBlockState {
    /// In the device below only; a hole in the cache's file.
    #[default]
    Absent,
    /// In the cache's file and in the device below.
    Clean,
    /// In the cache's file; the device below has older data.
    Dirty,
    /// Zeroes that are not in the device below yet; a hole in the cache's file.
    Zero,
}

impl CacheBlockState {
    /// Whether the block's data is in the cache's file.
    pub(super) fn is_kept(self) -> bool {
        matches!(self, CacheBlockState::Clean | CacheBlockState::Dirty)
    }

    /// Whether the device below lacks it.
    fn is_behind(self) -> bool {
        matches!(self, CacheBlockState::Dirty | CacheBlockState::Zero)
    }
}

/// The state of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct CacheBlock {
    state: CacheBlockState,
    /// Written since it was last written back.
    touched: bool,
}

/// All blocks; absent by default.
#[derive(Default)]
pub(super) struct CacheBlocks {
    blocks: Runs<CacheBlock>,
    /// Number of clean or dirty blocks.
    kept: u64,
    /// Number of dirty or zero blocks.
    behind: u64,
    /// When each cached block was last used, if needed; 0 for the others.
    used: Option<Runs<u64>>,
    now: u64,
}

impl CacheBlocks {
    /// No block is cached; `ages`: record when blocks are used.
    pub(super) fn new(ages: bool) -> CacheBlocks {
        CacheBlocks { used: ages.then(Runs::default), ..CacheBlocks::default() }
    }

    /// Number of clean or dirty blocks.
    pub(super) fn kept(&self) -> u64 {
        self.kept
    }

    /// Whether the device below lacks any data.
    pub(super) fn is_behind(&self) -> bool {
        self.behind > 0
    }

    pub(super) fn get(&self, block: u64) -> CacheBlockState {
        self.blocks.get(block).state
    }

    /// The state of `start`, and the first block after it, up to `end`, with another state.
    pub(super) fn run(&self, start: u64, end: u64) -> (CacheBlockState, u64) {
        let (block, mut to) = self.blocks.run(start, end);
        // `touched` does not count as another state.
        while to < end {
            let (next, till) = self.blocks.run(to, end);
            if next.state != block.state {
                break;
            }
            to = till;
        }
        (block.state, to)
    }

    /// Whether all blocks of `start..end` are clean or dirty.
    pub(super) fn all_kept(&self, start: u64, end: u64) -> bool {
        self.blocks.iter(start, end).all(|(_, _, block)| block.state.is_kept())
    }

    /// Number of absent blocks in `start..end`.
    pub(super) fn absent(&self, start: u64, end: u64) -> u64 {
        let (block, to) = self.blocks.run(start, end);
        if to == end {
            return if block.state == CacheBlockState::Absent { end - start } else { 0 };
        }
        let absent =
            self.blocks.iter(start, end).filter(|run| run.2.state == CacheBlockState::Absent);
        absent.map(|(from, to, _)| to - from).sum()
    }

    /// The first run of blocks from `start` on, up to `end`, that the device below lacks.
    pub(super) fn next_behind(&self, start: u64, end: u64) -> Option<(u64, u64, CacheBlockState)> {
        if self.behind == 0 {
            return None;
        }
        let (from, ..) = self.blocks.iter(start, end).find(|run| run.2.state.is_behind())?;
        let (state, to) = self.run(from, end);
        Some((from, to, state))
    }

    /// Sets the state of the blocks `start..end`.
    pub(super) fn set(&mut self, start: u64, end: u64, state: CacheBlockState) {
        if state.is_kept() {
            self.use_now(start, end);
        } else if let Some(used) = &mut self.used {
            used.set(start, end, 0);
        }
        let to = CacheBlock { state, touched: state.is_behind() };
        self.change(start, end, |_| to);
    }

    /// Marks the blocks `start..end`, all of them cached, as used now.
    pub(super) fn use_now(&mut self, start: u64, end: u64) {
        if let Some(used) = &mut self.used {
            self.now += 1;
            used.set(start, end, self.now);
        }
    }

    /// Begins to write back `start..end`.
    pub(super) fn begin_carry(&mut self, start: u64, end: u64) {
        self.change(start, end, |block| CacheBlock { touched: false, ..block });
    }

    /// The device below has the data of these blocks; those written since are still dirty.
    pub(super) fn end_carry(&mut self, start: u64, end: u64) {
        self.change(start, end, |block| match block.state {
            CacheBlockState::Dirty if !block.touched => {
                CacheBlock { state: CacheBlockState::Clean, touched: false }
            }
            CacheBlockState::Zero if !block.touched => CacheBlock::default(),
            _ => block,
        });
    }

    /// The `count` least recently used blocks, in order of offset: as runs.
    pub(super) fn oldest(&self, count: u64) -> Vec<(u64, u64)> {
        let Some(used) = &self.used else { return Vec::new() };
        let runs = used.iter(0, u64::MAX).filter(|run| run.2 > 0);
        let mut all: Vec<(u64, u64, u64)> = runs.map(|(from, to, when)| (when, from, to)).collect();
        all.sort_unstable();
        let mut left = count;
        let mut oldest = Vec::new();
        for (_, from, to) in all {
            if left == 0 {
                break;
            }
            let to = to.min(from.saturating_add(left));
            left -= to - from;
            oldest.push((from, to));
        }
        oldest.sort_unstable();
        let mut merged: Vec<(u64, u64)> = Vec::new();
        for (from, to) in oldest {
            match merged.last_mut() {
                Some(last) if last.1 == from => last.1 = to,
                _ => merged.push((from, to)),
            }
        }
        merged
    }

    fn change(&mut self, start: u64, end: u64, change: impl Fn(CacheBlock) -> CacheBlock) {
        let CacheBlocks { blocks, kept, behind, .. } = self;
        blocks.update(start, end, |len, before| {
            let after = change(before);
            let count = |of: bool| if of { len } else { 0 };
            *kept = *kept + count(after.state.is_kept()) - count(before.state.is_kept());
            *behind = *behind + count(after.state.is_behind()) - count(before.state.is_behind());
            after
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATES: [CacheBlockState; 4] = [
        CacheBlockState::Absent,
        CacheBlockState::Clean,
        CacheBlockState::Dirty,
        CacheBlockState::Zero,
    ];

    #[test]
    fn blocks_agree_with_a_state_each() {
        let mut rng = blockhaul_testkit::rng::Rng::new(blockhaul_testkit::rng::seed());
        let count = 12 << 10;
        let base = 1_u64 << 40;
        for _ in 0..20 {
            let mut blocks = CacheBlocks::new(false);
            let mut model = vec![(CacheBlockState::Absent, false); count as usize];
            for _ in 0..60 {
                let start = rng.below(count);
                let end = start + 1 + rng.below((count - start).min(300));
                let range = start as usize..end as usize;
                let from = base + start;
                let to = base + end;
                match rng.below(6) {
                    step @ 0..4 => {
                        let state = STATES[step as usize];
                        blocks.set(from, to, state);
                        let touched =
                            matches!(state, CacheBlockState::Dirty | CacheBlockState::Zero);
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
                                (CacheBlockState::Dirty, false) => CacheBlockState::Clean,
                                (CacheBlockState::Zero, false) => CacheBlockState::Absent,
                                (state, _) => state,
                            };
                        }
                    }
                }
            }
            let kept = model.iter().filter(|(state, _)| state.is_kept()).count();
            assert_eq!(blocks.kept(), kept as u64);
            let is_behind = |state| matches!(state, CacheBlockState::Dirty | CacheBlockState::Zero);
            assert_eq!(blocks.is_behind(), model.iter().any(|(state, _)| is_behind(*state)));
            let mut from = 0;
            let mut behind = Vec::new();
            while from < count {
                let state = model[from as usize].0;
                let same = model[from as usize..].iter().take_while(|(other, _)| *other == state);
                let to = from + same.count() as u64;
                assert_eq!(blocks.run(base + from, base + count), (state, base + to));
                assert_eq!(blocks.all_kept(base + from, base + to), state.is_kept());
                assert_eq!(blocks.get(base + to - 1), state);
                if matches!(state, CacheBlockState::Dirty | CacheBlockState::Zero) {
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
            let absent =
                model.iter().filter(|(state, _)| *state == CacheBlockState::Absent).count();
            assert_eq!(blocks.absent(base, base + count), absent as u64);
            blocks.set(0, base + count, CacheBlockState::Absent);
            assert_eq!((blocks.kept(), blocks.is_behind(), blocks.blocks.memory()), (0, false, 0));
        }
    }

    #[test]
    fn the_oldest_are_those_not_used_for_long() {
        let mut blocks = CacheBlocks::new(true);
        for block in [7, 3, 9, 1] {
            blocks.set(block, block + 1, CacheBlockState::Clean);
        }
        blocks.use_now(7, 8);
        assert_eq!(blocks.oldest(2), [(3, 4), (9, 10)]);
        blocks.set(3, 4, CacheBlockState::Absent);
        blocks.set(9, 10, CacheBlockState::Zero);
        assert_eq!(blocks.oldest(9), [(1, 2), (7, 8)]);
        blocks.set(20, 30, CacheBlockState::Clean);
        assert_eq!(blocks.oldest(5), [(1, 2), (7, 8), (20, 23)]);
        blocks.set(0, 1 << 40, CacheBlockState::Absent);
        assert_eq!(blocks.oldest(9), []);
    }
}
