//! What lanes read, and what they find: the first difference, or the digests of units.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use blockhaul_block::Result;
use blockhaul_io::{Data, Pool, Reservation, is_zero};

use crate::blocks::{first_difference, room};
use crate::ledger::SegmentRange;
use crate::manifest::{BLOCK, UnitDigest};
use crate::segment::RunContent;

/// Offsets and digests of units.
pub(crate) type UnitDigests = Vec<(u64, UnitDigest)>;

/// A reading of the source, shared by all lanes.
pub(crate) struct SourceScan {
    /// Both sides are read and compared.
    compares: bool,
    /// Unit size in bytes of the requested digests.
    unit: Option<u64>,
    /// Digest of a zero block.
    zero_block: UnitDigest,
    /// Offset of the first difference found so far.
    differs_at: AtomicU64,
    units: Mutex<UnitDigests>,
    // A pool for each side, so that a task that holds a buffer of one waits only for the other.
    source_pool: Pool,
    target_pool: Pool,
}

impl SourceScan {
    /// A reading with the buffers of `pool`.
    pub(crate) fn new(compares: bool, unit: Option<u64>, pool: &Pool) -> SourceScan {
        let share = if compares { pool.limit() / 2 } else { pool.limit() };
        let half = share.max(Pool::cost(BLOCK as usize));
        if compares {
            // Idle buffers of an earlier copy have other sizes and would add to the two halves.
            pool.keep_idle(0);
        }
        SourceScan {
            compares,
            unit,
            zero_block: blake3::hash(&vec![0; BLOCK as usize]).into(),
            differs_at: AtomicU64::new(u64::MAX),
            units: Mutex::default(),
            // A pool for small requests has no room for a block.
            source_pool: if half <= pool.limit() { pool.share(half) } else { Pool::new(half) },
            target_pool: Pool::new(half),
        }
    }

    /// Which sides may have data in a run: source, target.
    pub(crate) fn sides_with(&self, what: RunContent) -> [bool; 2] {
        match what {
            RunContent::Data => [true, self.compares],
            RunContent::New => [true, false],
            RunContent::Zero => [false, self.compares],
            RunContent::Clean => [false, false],
        }
    }

    /// Reservations of these lengths for source and target; none for length 0.
    pub(crate) async fn rooms(&self, lens: [u64; 2]) -> Result<[Option<Reservation>; 2]> {
        // Always in this order: a task that waits for a target buffer holds a source buffer, and
        // one that holds a target buffer waits for none.
        Ok([room(&self.source_pool, lens[0]).await?, room(&self.target_pool, lens[1]).await?])
    }

    /// Whether a difference was found before this offset: bytes from there on need not be read.
    pub(crate) fn differs_before(&self, at: u64) -> bool {
        at > self.differs_at.load(Ordering::Relaxed)
    }

    /// The results: the digests of the source's units that are not all zero, in order, and the
    /// offset of the first difference.
    pub(crate) fn take_results(&self) -> (UnitDigests, Option<u64>) {
        let mut units = std::mem::take(&mut *self.units.lock().expect("no panic under this lock"));
        units.sort_unstable_by_key(|unit| unit.0);
        let differs_at = self.differs_at.load(Ordering::Relaxed);
        (units, (differs_at != u64::MAX).then_some(differs_at))
    }
}

/// A segment of a reading. Its requests share it; the last one to drop it completes its digests.
pub(crate) struct SegmentScan {
    pub(crate) reading: Arc<SourceScan>,
    range: SegmentRange,
    /// Digests of the blocks that are not zero, by offset.
    blocks: RefCell<BTreeMap<u64, UnitDigest>>,
}

impl SegmentScan {
    pub(crate) fn new(reading: Arc<SourceScan>, range: SegmentRange) -> SegmentScan {
        SegmentScan { reading, range, blocks: RefCell::default() }
    }

    /// Compares and digests what was read at `at`; `None` is all zero.
    pub(crate) fn add(&self, at: u64, source: Option<&Data>, target: Option<&Data>) {
        let SourceScan { compares, unit, differs_at, .. } = &*self.reading;
        if *compares && let Some(first) = first_difference(source, target) {
            differs_at.fetch_min(at + first, Ordering::Relaxed);
        }
        if let Some(data) = source.filter(|data| unit.is_some() && !is_zero(data.bytes())) {
            let digest = blake3::hash(data.bytes()).into();
            self.blocks.borrow_mut().insert(at, digest);
        }
    }

    /// The digests of the units that are not all zero.
    fn units(&self, unit: u64) -> UnitDigests {
        let blocks = self.blocks.borrow();
        let mut units = Vec::new();
        let mut next = blocks.keys().next().copied();
        while let Some(at) = next {
            let home = at - at % unit;
            let end = (home + unit).min(self.range.1);
            units.push((home, self.unit(&blocks, (home.max(self.range.0), end))));
            next = blocks.range(end..).next().map(|block| *block.0);
        }
        units
    }

    fn unit(&self, blocks: &BTreeMap<u64, UnitDigest>, (mut at, end): SegmentRange) -> UnitDigest {
        let mut hasher = blake3::Hasher::new();
        while at < end {
            let len = (BLOCK - at % BLOCK).min(end - at);
            match blocks.get(&at) {
                Some(digest) => hasher.update(digest),
                None if len == BLOCK => hasher.update(&self.reading.zero_block),
                None => hasher.update(blake3::hash(&vec![0; len as usize]).as_bytes()),
            };
            at += len;
        }
        hasher.finalize().into()
    }
}

impl Drop for SegmentScan {
    fn drop(&mut self) {
        let Some(unit) = self.reading.unit else { return };
        let units = self.units(unit);
        self.reading.units.lock().expect("no panic under this lock").extend(units);
    }
}
