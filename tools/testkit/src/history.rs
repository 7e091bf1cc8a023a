//! What each sector of a disk may contain after a crash: what was flushed, or something newer.

use std::fmt;

/// Bytes of a sector.
pub const SECTOR: usize = 512;

/// The contents that each sector of a disk may have.
#[derive(Debug, Clone)]
pub struct History(Vec<SectorHistory>);

#[derive(Debug, Clone)]
struct SectorHistory {
    /// All contents that are possible after a crash; the last one is that of the latest request.
    values: Vec<Vec<u8>>,
    /// The first of them that is possible after a flush.
    base: usize,
}

/// A sector has contents that were never written to it, or are older than a flush.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContentMismatch {
    /// Number of the sector.
    pub sector: usize,
    /// Number of the contents that were possible.
    pub known: usize,
    /// The first bytes that were found.
    pub found: Vec<u8>,
}

impl fmt::Display for ContentMismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ContentMismatch { sector, known, found } = self;
        write!(f, "sector {sector} is none of {known} contents: {found:?} …")
    }
}

impl History {
    /// A disk with these contents, which are durable; its size is a multiple of a sector.
    pub fn new(disk: &[u8]) -> History {
        let sector = |bytes: &[u8]| SectorHistory { values: vec![bytes.to_vec()], base: 0 };
        History(disk.chunks(SECTOR).map(sector).collect())
    }

    fn sectors(&mut self, at: u64, len: usize) -> impl Iterator<Item = &mut SectorHistory> {
        self.0[at as usize / SECTOR..][..len / SECTOR].iter_mut()
    }

    /// A request that makes whole sectors these bytes has begun.
    pub fn begun(&mut self, at: u64, bytes: &[u8]) {
        for (sector, bytes) in self.sectors(at, bytes.len()).zip(bytes.chunks(SECTOR)) {
            sector.values.push(bytes.to_vec());
        }
    }

    /// It has completed: a later flush covers it.
    pub fn done(&mut self, at: u64, len: usize) {
        self.sectors(at, len).for_each(|sector| sector.base = sector.values.len() - 1);
    }

    /// A flush has succeeded that was sent after all that is `done`.
    pub fn flushed(&mut self) {
        self.0.iter_mut().for_each(SectorHistory::flushed);
    }

    /// The same for a part, after a request with FUA.
    pub fn flushed_part(&mut self, at: u64, len: usize) {
        self.sectors(at, len).for_each(SectorHistory::flushed);
    }

    /// The contents of a part without a crash: those of the latest requests.
    pub fn latest(&self, at: u64, len: usize) -> Vec<u8> {
        let first = at as usize / SECTOR;
        let sectors = &self.0[first..(at as usize + len).div_ceil(SECTOR)];
        let mut bytes = Vec::with_capacity(sectors.len() * SECTOR);
        sectors.iter().for_each(|sector| bytes.extend(sector.values.last().into_iter().flatten()));
        let skipped = at as usize - first * SECTOR;
        bytes[skipped..skipped + len].to_vec()
    }

    /// Compares a disk after a crash.
    ///
    /// # Errors
    /// The first sector with other contents.
    pub fn check(&self, disk: &[u8]) -> Result<(), ContentMismatch> {
        assert_eq!(disk.len(), self.0.len() * SECTOR, "the size of the disk");
        let wrong = |(found, sector): &(&[u8], &SectorHistory)| {
            !sector.values.iter().any(|one| one == found)
        };
        let mut all = disk.chunks(SECTOR).zip(&self.0).enumerate();
        match all.find(|(_, both)| wrong(both)) {
            None => Ok(()),
            Some((number, (found, sector))) => {
                let found = found[..8].to_vec();
                Err(ContentMismatch { sector: number, known: sector.values.len(), found })
            }
        }
    }
}

impl SectorHistory {
    fn flushed(&mut self) {
        self.values.drain(..self.base);
        self.base = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_flushed_is_there_and_what_was_not_may_be() {
        let sector = |number: u8| vec![number; SECTOR];
        let disk = |first: u8, second: u8| [sector(first), sector(second)].concat();
        let mut history = History::new(&disk(0, 0));
        history.begun(0, &disk(1, 1));
        assert_eq!(history.latest(0, 2 * SECTOR), disk(1, 1));
        history.begun(512, &sector(2));
        assert_eq!(history.latest(510, 4), [1, 1, 2, 2]);
        history.begun(512, &sector(1));
        assert!(
            [disk(0, 0), disk(0, 1), disk(1, 0), disk(1, 1)]
                .iter()
                .all(|one| history.check(one).is_ok())
        );
        // A flush does not cover what is in flight.
        history.flushed();
        assert_eq!(history.check(&disk(0, 1)), Ok(()));
        history.done(0, SECTOR);
        history.flushed();
        assert_eq!(history.check(&disk(1, 0)), Ok(()));
        let wrong = history.check(&disk(0, 1)).unwrap_err();
        assert_eq!(wrong, ContentMismatch { sector: 0, known: 1, found: vec![0; 8] });
        history.done(512, SECTOR);
        history.flushed_part(512, SECTOR);
        assert_eq!(history.check(&disk(1, 0)).unwrap_err().sector, 1);
        assert_eq!(history.check(&disk(1, 1)), Ok(()));
    }
}
