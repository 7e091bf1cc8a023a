//! Extent lists: the state of runs of bytes.

/// `base:allocation`: the range occupies no storage.
pub const HOLE: u64 = 1;
/// `base:allocation`: the range reads as zeroes.
pub const ZERO: u64 = 2;

/// A run of bytes in one state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// Length in bytes, not 0.
    pub len: u64,
    /// The state; its meaning depends on the context. For `base:allocation` [`HOLE`] and [`ZERO`].
    pub state: u64,
}

/// Consecutive runs without gaps; adjacent runs differ in state.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Extents {
    runs: Vec<Extent>,
    total: u64,
    beyond: u64,
}

impl Extents {
    /// No runs.
    pub fn new() -> Extents {
        Extents::default()
    }

    /// One run.
    pub fn one(len: u64, state: u64) -> Extents {
        let mut extents = Extents::new();
        extents.push(len, state);
        extents
    }

    /// Appends a run, joining it to the last one of the same state. Ignores runs of length 0, and
    /// bytes that would make the total overflow.
    #[inline]
    pub fn push(&mut self, len: u64, state: u64) {
        let len = len.min(u64::MAX - self.total);
        if len == 0 {
            return;
        }
        self.total += len;
        self.beyond = 0;
        match self.runs.last_mut() {
            Some(last) if last.state == state => last.len += len,
            _ => self.runs.push(Extent { len, state }),
        }
    }

    /// Bytes covered.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// The runs, in order.
    pub fn runs(&self) -> &[Extent] {
        &self.runs
    }

    /// Number of runs.
    pub fn len(&self) -> usize {
        self.runs.len()
    }

    /// Whether there are no runs.
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// Bytes after the last run that are known to have its state, too. Layers that change states or
    /// combine devices must not pass this on: new lists have none.
    pub fn beyond(&self) -> u64 {
        self.beyond
    }

    /// Keeps the first `len` bytes, and records how much longer the last run was.
    pub fn cut_at(&mut self, len: u64) {
        let mut end = 0;
        let mut beyond = 0;
        for run in &self.runs {
            end += run.len;
            if end >= len {
                beyond = end - len;
                break;
            }
        }
        self.truncate(len);
        self.beyond = beyond;
    }

    /// Keeps the first `len` bytes.
    pub fn truncate(&mut self, len: u64) {
        self.beyond = 0;
        let mut left = len.min(self.total);
        self.total = left;
        for (index, run) in self.runs.iter_mut().enumerate() {
            if left <= run.len {
                run.len = left;
                let keep = if left == 0 { index } else { index + 1 };
                self.runs.truncate(keep);
                return;
            }
            left -= run.len;
        }
    }

    /// Removes the first `len` bytes.
    pub fn skip(&mut self, len: u64) {
        let mut left = len.min(self.total);
        self.total -= left;
        let mut gone = 0;
        for run in &mut self.runs {
            if left < run.len {
                run.len -= left;
                break;
            }
            left -= run.len;
            gone += 1;
        }
        self.runs.drain(..gone);
    }

    /// Keeps the first run only.
    pub fn first_only(&mut self) {
        if self.runs.len() > 1 {
            self.beyond = 0;
        }
        self.runs.truncate(1);
        self.total = self.runs.first().map_or(0, |run| run.len);
    }

    /// The same in whole blocks of `block` bytes, not 0: `mixed` combines the states within a
    /// block, one after the other. A partial block at the end is dropped.
    #[must_use]
    pub fn in_blocks(&self, block: u64, mixed: impl Fn(u64, u64) -> u64) -> Extents {
        let mut blocks = Extents::new();
        // The state of a block that is not full yet.
        let mut filled = 0;
        let mut state = 0;
        for run in &self.runs {
            let mut len = run.len;
            if filled > 0 {
                let more = len.min(block - filled);
                state = mixed(state, run.state);
                (filled, len) = (filled + more, len - more);
                if filled < block {
                    continue;
                }
                blocks.push(block, state);
            }
            blocks.push(len - len % block, run.state);
            (filled, state) = (len % block, run.state);
        }
        blocks
    }

    /// The runs with their offsets, when the list starts at `at`.
    pub fn ranges(&self, at: u64) -> impl Iterator<Item = (u64, Extent)> + '_ {
        let mut next = at;
        self.runs.iter().map(move |run| {
            let here = next;
            next += run.len;
            (here, *run)
        })
    }
}

impl FromIterator<Extent> for Extents {
    fn from_iter<I: IntoIterator<Item = Extent>>(runs: I) -> Extents {
        let mut extents = Extents::new();
        for run in runs {
            extents.push(run.len, run.state);
        }
        extents
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The same list as one state per byte.
    fn bytes(extents: &Extents) -> Vec<u64> {
        let runs = extents.runs().iter();
        runs.flat_map(|run| std::iter::repeat_n(run.state, run.len as usize)).collect()
    }

    proptest! {
        #[test]
        fn lists_agree_with_a_state_per_byte(
            runs in prop::collection::vec((0_u64..20, 0_u64..3), 0..20),
            cut in 0_u64..200,
        ) {
            let mut extents = Extents::new();
            let mut model = Vec::new();
            for (len, state) in runs {
                extents.push(len, state);
                model.extend(std::iter::repeat_n(state, len as usize));
            }
            prop_assert_eq!(bytes(&extents), model.clone());
            prop_assert!(extents.runs().windows(2).all(|pair| pair[0].state != pair[1].state));
            let at = (cut as usize).min(model.len());
            let mut front = extents.clone();
            front.truncate(cut);
            prop_assert_eq!(bytes(&front), &model[..at]);
            prop_assert_eq!(front.total(), at as u64);
            extents.skip(cut);
            prop_assert_eq!(bytes(&extents), &model[at..]);
            prop_assert_eq!(extents.total(), (model.len() - at) as u64);
            prop_assert!(extents.runs().iter().all(|run| run.len > 0));
        }

        #[test]
        fn blocks_are_in_what_is_true_of_all_their_bytes(
            runs in prop::collection::vec((1_u64..20, 0_u64..4), 0..20),
            block in 1_u64..9,
        ) {
            let extents: Extents = runs.iter().map(|&(len, state)| Extent { len, state }).collect();
            let blocks = bytes(&extents.in_blocks(block, |one, other| one & other));
            let model = bytes(&extents);
            let model = model.chunks_exact(block as usize).flat_map(|bytes| {
                let state = bytes.iter().fold(3, |all, state| all & state);
                bytes.iter().map(move |_| state)
            });
            prop_assert_eq!(blocks, model.collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_total_never_overflows() {
        let mut extents = Extents::one(u64::MAX - 1, 0);
        extents.push(5, 1);
        assert_eq!((extents.total(), extents.len()), (u64::MAX, 2));
    }
}
