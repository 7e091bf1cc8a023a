//! Allocated blocks: rules and costs of a query.

use std::time::Instant;

use crate::settings::BlockListFault;
use crate::state::{CallExtra, DiskHandle, LibraryState, Simulator};
use crate::transfer::delay;
use crate::types::{Block, CHUNK_MIN, CHUNKS_MAX, FAIL, FILE_ERROR, INVALID, VixError};

const FUNCTION: &str = "QueryAllocatedBlocks";

/// A query: sectors from `start` on, in chunks of `chunk` sectors.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Query {
    pub(crate) start: u64,
    pub(crate) count: u64,
    pub(crate) chunk: u64,
}

impl Query {
    /// Whether the library takes it for a disk of this many sectors.
    fn is_valid(self, sectors: u64) -> bool {
        let Query { start, count, chunk } = self;
        chunk >= CHUNK_MIN
            && chunk.is_power_of_two()
            && start.is_multiple_of(chunk)
            && count.is_multiple_of(chunk)
            && count > 0
            && count / chunk <= CHUNKS_MAX
            && start.checked_add(count).is_some_and(|end| end <= sectors - sectors % chunk)
    }
}

impl Simulator {
    /// The allocated blocks of a range; returns the address of a list.
    pub(crate) fn query(&self, number: usize, query: Query) -> Result<usize, VixError> {
        let started = Instant::now();
        let begun = self.begin(FUNCTION, |state, extra| {
            state.begin_query(number, query, extra).map(|end| (end, extra.wrong))
        })?;
        let (end, wrong) = begun.inspect_err(|_| self.over(true, started))?;
        std::thread::sleep(end.saturating_duration_since(Instant::now()));
        let found = self.blocks(number, query, wrong);
        self.over(found.is_err(), started);
        found
    }

    fn over(&self, failed: bool, started: Instant) {
        if let Some(state) = self.lock().as_mut() {
            state.end(FUNCTION, failed, started.elapsed());
        }
    }

    fn blocks(
        &self,
        number: usize,
        query: Query,
        wrong: Option<BlockListFault>,
    ) -> Result<usize, VixError> {
        let disk = {
            let mut guard = self.lock();
            guard.as_mut().ok_or(FAIL)?.handle(FUNCTION, number)?.disk.clone()
        };
        let Query { start, count, chunk } = query;
        let mut blocks = disk.allocated(start, count, chunk).map_err(|_| FILE_ERROR)?;
        match (wrong, blocks.last().copied()) {
            (Some(BlockListFault::Overlap), Some(last)) => blocks.push(last),
            (Some(BlockListFault::PastEnd), _) => {
                blocks.push(Block { offset: start + count, length: chunk });
            }
            _ => {}
        }
        let mut words = vec![blocks.len() as u64];
        words.extend(blocks.iter().flat_map(|block| [block.offset, block.length]));
        self.lock().as_mut().map(|state| state.give(words)).ok_or(FAIL)
    }
}

impl LibraryState {
    /// Checks a query, and reserves the disk; returns when the query ends.
    fn begin_query(
        &mut self,
        number: usize,
        query: Query,
        extra: CallExtra,
    ) -> Result<Instant, VixError> {
        let exclusive = self.settings.exclusive;
        let scan = self.settings.scan;
        let once = self.settings.query;
        let handle = self.handle(FUNCTION, number)?;
        let path = handle.path.clone();
        let sectors = handle.sectors;
        if !query.is_valid(sectors) {
            self.misuse(&format!("{FUNCTION}: {query:?} of {sectors} sectors"));
            return Err(INVALID);
        }
        let queries = if scan { self.handle(FUNCTION, number)?.queries_of_scan(query) } else { 1 };
        let time = once.saturating_mul(queries) + extra.delay;
        let now = Instant::now();
        if !exclusive {
            return Ok(now + time);
        }
        let begin = self.busy.get(&path).map_or(now, |end| now.max(*end));
        self.busy.insert(path.clone(), begin + time);
        delay(self, &path, time);
        Ok(begin + time)
    }
}

impl DiskHandle {
    /// How many queries one costs with `scan=on`: the cache of a program that asks for the whole
    /// disk when it is first asked for more than one chunk, which programs use as a probe.
    fn queries_of_scan(&mut self, query: Query) -> u32 {
        if query.count == query.chunk {
            return u32::from(!self.scanned);
        }
        if std::mem::replace(&mut self.scanned, true) {
            0
        } else {
            let longest = query.chunk.saturating_mul(CHUNKS_MAX);
            u32::try_from(self.sectors.div_ceil(longest)).unwrap_or(u32::MAX)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_have_whole_chunks_inside_the_disk() {
        let valid = |start, count, chunk| Query { start, count, chunk }.is_valid(1000);
        assert!(valid(0, 896, 128) && valid(128, 128, 128));
        assert!(!valid(0, 1024, 128) && !valid(64, 128, 128) && !valid(0, 100, 128));
        assert!(!valid(0, 0, 128) && !valid(0, 64, 64) && !valid(u64::MAX - 127, 128, 128));
        let large = Query { start: 0, count: 128 * (CHUNKS_MAX + 1), chunk: 128 };
        assert!(!large.is_valid(u64::MAX));
    }
}
