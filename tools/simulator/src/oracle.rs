//! What a client may read: for each sector, the values that it can have now, and those that it can
//! have after a power cut.
//!
//! A client writes only its own sectors, each write with a value of its own, and has at most one
//! request at a time on a sector that changes it. A write that failed may have happened or not; if
//! its connection was lost, it may even happen later, so that its sectors are not written for a
//! while.

use std::ops::Range;
use std::time::{Duration, Instant};

use blockhaul_io::now;

/// Bytes of a sector: what a disk writes as a whole.
pub const SECTOR: usize = 512;
/// A request of a lost connection happens within this time, or never.
const LATE: Duration = Duration::from_secs(1000);
/// The value of zeroes.
pub const ZEROES: u64 = 0;

/// The sectors of one client.
pub struct Oracle {
    /// The number of the first sector on the disk.
    first: usize,
    sectors: Vec<SectorState>,
    /// The last value that was written.
    last: u64,
    /// Counts losses, and servers that have ended: a reply to a request from before one may itself be from
    /// before it.
    losses: u64,
    /// Counts flushes that were acknowledged.
    flushes: u64,
    /// A change has failed.
    has_failed: bool,
    /// A cache that the client has dropped may write until then, over whichever connection.
    cache_writes_until: Option<Instant>,
}

#[derive(Clone)]
struct SectorState {
    /// Values that a read may return.
    possible: Vec<u64>,
    /// Values that were possible until a flush was acknowledged, and its number: a read that began
    /// before may return them.
    until_flush: Vec<(u64, u64)>,
    /// Values that it may have after a power cut.
    after_cut: Vec<u64>,
    /// Values that it had at any time: a trim may bring back any of them, whether it fails or not.
    ever: Vec<u64>,
    /// The value of which the client knows that it was written over the connection it has.
    acked: Option<u64>,
    /// Counts changes.
    version: u64,
    /// A request that changes it is in flight.
    busy: bool,
    /// A request of a lost connection may change it until then.
    doubtful: Option<Instant>,
}

impl SectorState {
    /// Whether no request of a lost connection can change it any more.
    fn is_settled(&self, now: Instant) -> bool {
        self.doubtful.is_none_or(|until| until <= now)
    }

    /// Whether a request that began then may see this value.
    fn is_possible(&self, value: u64, begun: RequestStart) -> bool {
        let mut earlier = self.until_flush.iter();
        self.possible.contains(&value)
            || earlier.any(|(other, flush)| *other == value && begun.flushes < *flush)
    }
}

/// When a request began: what had happened before it.
#[derive(Clone, Copy)]
pub struct RequestStart {
    losses: u64,
    flushes: u64,
}

/// What a flush makes durable, as its sender sees it: sectors, with version and value.
pub struct FlushedSectors(Vec<(usize, u64, u64)>);

impl Oracle {
    /// Sectors from `first` on, each with the value of [`initial`].
    pub fn new(first: usize, count: usize) -> Oracle {
        let sector = |index| {
            let value = initial(first + index);
            SectorState {
                possible: vec![value],
                until_flush: Vec::new(),
                after_cut: vec![value],
                ever: vec![value],
                acked: None,
                version: 0,
                busy: false,
                doubtful: None,
            }
        };
        // Values of different clients differ.
        let last = (first as u64 + 1) << 32;
        Oracle {
            first,
            sectors: (0..count).map(sector).collect(),
            last,
            losses: 0,
            flushes: 0,
            has_failed: false,
            cache_writes_until: None,
        }
    }

    /// The sectors, by their numbers on the disk.
    pub fn all(&self) -> Range<usize> {
        self.first..self.first + self.sectors.len()
    }

    fn at(&mut self, range: Range<usize>) -> &mut [SectorState] {
        &mut self.sectors[range.start - self.first..range.end - self.first]
    }

    /// A value that was not written yet.
    pub fn fresh(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    /// Whether the sectors can be written: nothing old can change them any more.
    pub fn is_settled(&mut self, range: Range<usize>) -> bool {
        let now = now();
        self.at(range).iter().all(|sector| sector.is_settled(now))
    }

    /// The sectors that a request of a lost connection may still change.
    pub fn unsettled(&self) -> Vec<usize> {
        let now = now();
        let sectors = self.sectors.iter().enumerate();
        let late = sectors.filter(|(_, sector)| !sector.is_settled(now));
        late.map(|(index, _)| self.first + index).collect()
    }

    /// A request begins now.
    pub fn begun(&self) -> RequestStart {
        RequestStart { losses: self.losses, flushes: self.flushes }
    }

    /// A change begins.
    pub fn begin(&mut self, range: Range<usize>, value: u64) {
        for sector in self.at(range) {
            assert!(!std::mem::replace(&mut sector.busy, true), "one change at a time");
            add(&mut sector.possible, value);
            add(&mut sector.after_cut, value);
            add(&mut sector.ever, value);
            sector.version += 1;
            sector.acked = None;
        }
    }

    // nbd: trim.no-assumption
    /// A trim begins.
    pub fn begin_trim(&mut self, range: Range<usize>) {
        self.begin(range.clone(), ZEROES);
        for sector in self.at(range) {
            for value in sector.ever.clone() {
                add(&mut sector.possible, value);
                add(&mut sector.after_cut, value);
            }
        }
    }

    /// It was acknowledged. `durable`: with FUA. `begun`: when it began.
    pub fn done(&mut self, range: Range<usize>, value: u64, durable: bool, begun: RequestStart) {
        let same = begun.losses == self.losses;
        for sector in self.at(range) {
            sector.busy = false;
            sector.acked = Some(value);
            if durable || same {
                only(&mut sector.possible, value);
            }
            if durable {
                only(&mut sector.after_cut, value);
            }
        }
    }

    /// A flush of the client's current connection need not cover what it has written to these sectors.
    pub fn not_acked(&mut self, range: Range<usize>) {
        self.at(range).iter_mut().for_each(|sector| sector.acked = None);
    }

    /// A trim was acknowledged.
    pub fn trimmed(&mut self, range: Range<usize>) {
        self.at(range).iter_mut().for_each(|sector| sector.busy = false);
    }

    /// A change has failed. `late`: it may still happen.
    pub fn failed(&mut self, range: Range<usize>, late: bool) {
        let until = late.then(|| now() + LATE);
        self.has_failed = true;
        for sector in self.at(range) {
            sector.busy = false;
            sector.doubtful = until.max(sector.doubtful);
        }
    }

    /// Whether a change has failed.
    pub fn has_failed(&self) -> bool {
        self.has_failed
    }

    /// The client has another connection, and knows it.
    pub fn reconnected(&mut self) {
        self.sectors.iter_mut().for_each(|sector| sector.acked = None);
    }

    /// A flush begins.
    pub fn flush(&self) -> FlushedSectors {
        let known = self.sectors.iter().enumerate().filter_map(|(index, sector)| {
            let value = sector.acked.filter(|_| !sector.busy)?;
            Some((index, sector.version, value))
        });
        FlushedSectors(known.collect())
    }

    /// It was acknowledged.
    pub fn flushed(&mut self, flushing: &FlushedSectors) -> Result<(), String> {
        self.flushes += 1;
        for (index, version, value) in &flushing.0 {
            let sector = &mut self.sectors[*index];
            if sector.version != *version {
                continue;
            }
            if !sector.possible.contains(value) {
                let number = self.first + index;
                return Err(format!(
                    "a flush is acknowledged, but sector {number} was lost before"
                ));
            }
            let others = sector.possible.iter().filter(|other| *other != value);
            sector.until_flush.extend(others.map(|other| (*other, self.flushes)));
            only(&mut sector.possible, *value);
            only(&mut sector.after_cut, *value);
        }
        Ok(())
    }

    /// The disk has lost power.
    pub fn power_cut(&mut self) {
        self.losses += 1;
        for sector in &mut self.sectors {
            sector.possible = sector.after_cut.clone();
        }
    }

    /// A cache of the client's was dropped: what it had not written may be lost, or written late.
    pub fn lost_cache(&mut self) {
        let until = now() + LATE;
        self.losses += 1;
        self.cache_writes_until = Some(until);
        for sector in &mut self.sectors {
            sector.possible = sector.after_cut.clone();
            sector.doubtful = Some(until);
        }
    }

    /// No server is left that could carry out old requests. A dropped cache can still send new ones
    /// to the next server, if it reconnects. Replies of the server before may still arrive, to reads from
    /// before the last of those requests.
    pub fn forget_late(&mut self) {
        let until = self.cache_writes_until;
        self.losses += 1;
        self.sectors.iter_mut().for_each(|sector| sector.doubtful = until);
    }

    /// Everything on the disk is durable now.
    pub fn all_durable(&mut self) {
        for sector in &mut self.sectors {
            sector.after_cut = sector.possible.clone();
        }
    }

    /// Checks bytes that were read. The range is not being changed. `begun`: when the read began.
    pub fn check(
        &mut self,
        range: Range<usize>,
        bytes: &[u8],
        begun: RequestStart,
    ) -> Result<(), String> {
        let now = now();
        let same = begun.losses == self.losses;
        let start = range.start;
        for (index, (sector, bytes)) in
            self.at(range).iter_mut().zip(bytes.chunks_exact(SECTOR)).enumerate()
        {
            let number = start + index;
            let value = value_of(number, bytes)
                .ok_or_else(|| format!("sector {number} has contents that nobody wrote"))?;
            if !sector.is_possible(value, begun) {
                return Err(format!(
                    "sector {number} has value {value:#x}; possible are {:x?}",
                    sector.possible
                ));
            }
            if same && sector.is_settled(now) && sector.possible.contains(&value) {
                only(&mut sector.possible, value);
            }
        }
        Ok(())
    }

    /// Checks that a range that is reported as zeroes can have them. It is not being changed.
    /// `begun`: when the request began.
    pub fn check_zero(&mut self, range: Range<usize>, begun: RequestStart) -> Result<(), String> {
        let start = range.start;
        let wrong = self.at(range).iter().position(|sector| !sector.is_possible(ZEROES, begun));
        match wrong {
            None => Ok(()),
            Some(index) => Err(format!("sector {} is reported as zeroes", start + index)),
        }
    }
}

/// Removes all other values. Keeps the memory: this happens for each sector of a request.
fn only(values: &mut Vec<u64>, value: u64) {
    values.clear();
    values.push(value);
}

fn add(values: &mut Vec<u64>, value: u64) {
    if !values.contains(&value) {
        values.push(value);
    }
}

/// The value of a sector of a new disk: every other eight are zeroes.
pub fn initial(sector: usize) -> u64 {
    if (sector / 8).is_multiple_of(2) { ZEROES } else { 1 }
}

/// The bytes of a new disk.
pub fn image(sectors: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(sectors * SECTOR);
    (0..sectors).for_each(|sector| bytes.extend(bytes_of(sector..sector + 1, initial(sector))));
    bytes
}

/// The bytes of sectors with a value.
pub fn bytes_of(range: Range<usize>, value: u64) -> Vec<u8> {
    let mut bytes = vec![0; range.len() * SECTOR];
    for (sector, bytes) in range.zip(bytes.chunks_exact_mut(SECTOR)) {
        let word = word(sector, value).to_le_bytes();
        bytes.chunks_exact_mut(word.len()).for_each(|place| place.copy_from_slice(&word));
    }
    bytes
}

/// The value of a sector with these bytes; `None` if they are of no value.
pub fn value_of(sector: usize, bytes: &[u8]) -> Option<u64> {
    let (words, _) = bytes.as_chunks::<8>();
    let first = words.first()?;
    if words.iter().any(|word| word != first) {
        return None;
    }
    let found = u64::from_le_bytes(*first);
    let value = if found == 0 { 0 } else { found ^ place(sector) };
    (word(sector, value) == found).then_some(value)
}

/// The word that a sector with a value is filled with: another one for each sector.
fn word(sector: usize, value: u64) -> u64 {
    if value == ZEROES { 0 } else { value ^ place(sector) }
}

fn place(sector: usize) -> u64 {
    (sector as u64 + 1) << 48
}
