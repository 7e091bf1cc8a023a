//! What state the blocks of an overlay are in: two bits each, in chunks that are made when needed.

use std::collections::BTreeMap;

/// Where a block's bytes are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    /// In the device below.
    Below = 0,
    /// In the overlay.
    Above = 1,
    /// Nowhere: it reads as zeroes.
    Zero = 2,
}

/// Blocks in a chunk; four in a byte.
const CHUNK: u64 = 16 << 10;

/// The states of all blocks; those of which nothing was said are below.
#[derive(Default)]
pub(super) struct States(BTreeMap<u64, Box<[u8]>>);

impl States {
    pub(super) fn get(&self, block: u64) -> State {
        let Some(chunk) = self.0.get(&(block / CHUNK)) else { return State::Below };
        let (byte, shift) = place(block);
        match chunk[byte] >> shift & 3 {
            0 => State::Below,
            1 => State::Above,
            _ => State::Zero,
        }
    }

    /// Sets the state of `start..end`.
    pub(super) fn set(&mut self, start: u64, end: u64, state: State) {
        for block in start..end {
            let chunk = self.0.entry(block / CHUNK);
            let chunk = chunk.or_insert_with(|| vec![0; CHUNK as usize / 4].into_boxed_slice());
            let (byte, shift) = place(block);
            chunk[byte] = chunk[byte] & !(3 << shift) | (state as u8) << shift;
        }
    }

    /// The first block from `start` on, up to `end`, that is in another state than `start`.
    pub(super) fn run(&self, start: u64, end: u64) -> (State, u64) {
        let state = self.get(start);
        let mut block = start + 1;
        while block < end {
            if !self.0.contains_key(&(block / CHUNK)) {
                if state != State::Below {
                    break;
                }
                // On to the next chunk that says something.
                let next = self.0.range(block / CHUNK..).next().map(|(&chunk, _)| chunk * CHUNK);
                block = next.unwrap_or(end).min(end);
                continue;
            }
            if self.get(block) != state {
                break;
            }
            block += 1;
        }
        (state, block.min(end))
    }
}

fn place(block: u64) -> (usize, u32) {
    ((block % CHUNK / 4) as usize, (block % 4 * 2) as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_are_kept_and_run_together() {
        let mut states = States::default();
        let far = 1 << 46;
        assert_eq!(states.run(0, far), (State::Below, far));
        states.set(5, 8, State::Above);
        states.set(7, CHUNK + 3, State::Zero);
        states.set(far / 2, far / 2 + 1, State::Above);
        assert_eq!(states.run(0, far), (State::Below, 5));
        assert_eq!(states.run(5, far), (State::Above, 7));
        assert_eq!(states.run(7, far), (State::Zero, CHUNK + 3));
        assert_eq!(states.run(7, 9), (State::Zero, 9));
        assert_eq!(states.run(CHUNK + 3, far), (State::Below, far / 2));
        states.set(6, 7, State::Below);
        assert_eq!((states.get(5), states.get(6)), (State::Above, State::Below));
    }
}
