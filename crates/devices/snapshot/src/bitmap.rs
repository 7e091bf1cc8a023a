//! Dirty bitmaps: which blocks of a disk were written since a moment.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blockhaul_block::{
    BITMAP_CONTEXT, Can, ContextSet, Device, Error, Extents, Facts, Kind, Op, PendingRequest,
    Reply, Request, RequestFlags, Result,
};
use blockhaul_catalog::Layer;
use blockhaul_layers::support::Runs;

/// State of a dirty range in that context (QEMU's docs/interop/nbd.txt).
pub const DIRTY: u64 = 1;
/// Smallest granularity in bytes.
pub const GRANULARITY_MIN: u64 = 512;
/// Largest granularity in bytes.
pub const GRANULARITY_MAX: u64 = 64 << 20;
/// Bitmaps of one disk: their contexts and `base:allocation` fit a set of contexts.
pub const BITMAPS_MAX: usize = 32;
/// Longest name in bytes, as in QEMU.
const NAME_MAX: usize = 1023;
/// Runs in one reply.
const RUNS_MAX: usize = 16384;

/// A bitmap, which has a bit for each block of `granularity` bytes.
#[derive(Debug)]
pub struct DirtyBitmap {
    name: String,
    size: u64,
    granularity: u64,
    dirty: Mutex<Runs<bool>>,
    /// What was dirty and was handed over to jobs that have not ended. Locked before `dirty`.
    handed_over: Mutex<Vec<Arc<DirtyBitmap>>>,
    /// Writes are not marked.
    disabled: AtomicBool,
    /// It need not outlive the server.
    transient: AtomicBool,
}

impl DirtyBitmap {
    /// A clean bitmap of a disk of `size` bytes.
    ///
    /// # Errors
    /// [`Kind::Usage`] if the granularity is not a power of two from [`GRANULARITY_MIN`] to
    /// [`GRANULARITY_MAX`], or the name is empty or too long.
    pub fn new(name: &str, size: u64, granularity: u64) -> Result<DirtyBitmap> {
        let range = GRANULARITY_MIN..=GRANULARITY_MAX;
        if !granularity.is_power_of_two() || !range.contains(&granularity) {
            let text = "the granularity of a bitmap must be a power of two from 512 to 64M";
            return Err(Error::new(Kind::Usage, text));
        }
        if name.is_empty() || name.len() > NAME_MAX || name.contains('\0') {
            let text = "the name of a bitmap must have 1 to 1023 bytes, without a NUL";
            return Err(Error::new(Kind::Usage, text));
        }
        Ok(DirtyBitmap::of(name.to_string(), size, granularity, true))
    }

    fn of(name: String, size: u64, granularity: u64, enabled: bool) -> DirtyBitmap {
        let disabled = AtomicBool::new(!enabled);
        let transient = AtomicBool::new(false);
        let dirty = Mutex::default();
        let handed_over = Mutex::default();
        DirtyBitmap { name, size, granularity, dirty, handed_over, disabled, transient }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    // nbd: meta.namespace
    /// The metadata context that shows it.
    pub fn context(&self) -> String {
        format!("{BITMAP_CONTEXT}{}", self.name)
    }

    /// Bytes of its disk.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Bytes of a block.
    pub fn granularity(&self) -> u64 {
        self.granularity
    }

    /// Number of bytes in dirty blocks.
    pub fn dirty_bytes(&self) -> u64 {
        self.ranges().into_iter().map(|(_, len)| len).sum()
    }

    /// Makes all blocks clean.
    pub fn clear(&self) {
        *self.lock() = Runs::default();
    }

    /// Makes all blocks clean, and returns a bitmap with those that were dirty.
    #[must_use]
    pub fn take(&self) -> DirtyBitmap {
        let dirty = std::mem::take(&mut *self.lock());
        let taken = DirtyBitmap::of(self.name.clone(), self.size, self.granularity, true);
        *taken.lock() = dirty;
        taken
    }

    /// Makes all blocks clean, and dirty in `to` those that were dirty here: a job copies them. Until
    /// [`DirtyBitmap::settle`] or [`DirtyBitmap::give_back`], [`DirtyBitmap::unsettled_ranges`] has them, too.
    pub fn hand_over(&self, to: &Arc<DirtyBitmap>) {
        let mut handed_over = self.handed_over();
        to.merge(&self.take());
        handed_over.push(to.clone());
    }

    /// What was handed over is copied.
    pub fn settle(&self, taken: &Arc<DirtyBitmap>) {
        self.handed_over().retain(|other| !Arc::ptr_eq(other, taken));
    }

    /// What was handed over is dirty still.
    pub fn give_back(&self, taken: &Arc<DirtyBitmap>) {
        self.merge(taken);
        self.settle(taken);
    }

    /// The ranges that are dirty, or handed over and not settled: what the bitmap has to show if the
    /// server ends now.
    pub fn unsettled_ranges(&self) -> Vec<(u64, u64)> {
        let handed_over = self.handed_over();
        let all = self.frozen();
        handed_over.iter().for_each(|taken| all.merge(taken));
        all.ranges()
    }

    /// A bitmap that shows the same, for good.
    #[must_use]
    pub fn frozen(&self) -> DirtyBitmap {
        let frozen = DirtyBitmap::of(self.name.clone(), self.size, self.granularity, false);
        frozen.merge(self);
        frozen
    }

    /// Whether it is to outlive the server, if the server keeps bitmaps.
    pub fn keep(&self, kept: bool) {
        self.transient.store(!kept, Ordering::SeqCst);
    }

    /// Whether it is to outlive the server.
    pub fn is_kept(&self) -> bool {
        !self.transient.load(Ordering::SeqCst)
    }

    /// Marks what is written from now on, or does not.
    pub fn enable(&self, enabled: bool) {
        self.disabled.store(!enabled, Ordering::SeqCst);
    }

    /// Whether writes are marked.
    pub fn is_enabled(&self) -> bool {
        !self.disabled.load(Ordering::SeqCst)
    }

    /// Makes a range of bytes dirty.
    pub fn set(&self, at: u64, len: u64) {
        self.mark(at, at.saturating_add(len));
    }

    /// Makes dirty here what is dirty in `other`, a bitmap of the same disk.
    pub fn merge(&self, other: &DirtyBitmap) {
        for (at, len) in other.ranges() {
            self.mark(at, at + len);
        }
    }

    /// The dirty ranges, as offset and length in bytes, in order.
    pub fn ranges(&self) -> Vec<(u64, u64)> {
        let dirty = self.lock();
        let runs = dirty.iter(0, self.size.div_ceil(self.granularity));
        runs.filter(|(.., dirty)| *dirty).map(|(from, to, _)| self.bytes(from, to)).collect()
    }

    /// A range of bytes is about to change.
    pub(crate) fn mark(&self, at: u64, end: u64) {
        let end = end.min(self.size);
        if at < end {
            self.lock().set(at / self.granularity, end.div_ceil(self.granularity), true);
        }
    }

    /// The state of a range, from its start on.
    pub(crate) fn extents(&self, at: u64, len: u64, flags: RequestFlags) -> Extents {
        let end = at.saturating_add(len).min(self.size);
        let most = if flags.contains(RequestFlags::ONE_EXTENT) { 1 } else { RUNS_MAX };
        let dirty = self.lock();
        let mut extents = Extents::new();
        let blocks = dirty.iter(at / self.granularity, end.div_ceil(self.granularity));
        for (from, to, dirty) in blocks.take(most) {
            let (start, len) = self.bytes(from, to);
            let from = start.max(at);
            let to = (start + len).min(end);
            extents.push(to - from, if dirty { DIRTY } else { 0 });
        }
        extents
    }

    /// Blocks as offset and length in bytes.
    fn bytes(&self, from: u64, to: u64) -> (u64, u64) {
        let at = from.saturating_mul(self.granularity);
        (at, to.saturating_mul(self.granularity).min(self.size).saturating_sub(at))
    }

    fn handed_over(&self) -> MutexGuard<'_, Vec<Arc<DirtyBitmap>>> {
        self.handed_over.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> MutexGuard<'_, Runs<bool>> {
        self.dirty.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A layer that marks in these bitmaps what is written, and shows them as metadata contexts. All
/// handles that write to the disk must be under it.
pub fn tracking(bitmaps: Vec<Arc<DirtyBitmap>>) -> Arc<dyn Layer> {
    Arc::new(BitmapLayer(bitmaps.into()))
}

struct BitmapLayer(Arc<[Arc<DirtyBitmap>]>);

impl Layer for BitmapLayer {
    fn wrap(&self, inner: Arc<dyn Device>) -> Result<Arc<dyn Device>> {
        let below = inner.facts();
        let mut facts = Facts::same(&below);
        if !below.can.contains(Can::EXTENTS) {
            facts.contexts.clear();
        }
        let first = facts.contexts.len();
        facts.contexts.extend(self.0.iter().map(|bitmap| bitmap.context()));
        facts.can |= Can::EXTENTS;
        let bitmaps = self.0.clone();
        Ok(Arc::new(BitmapDevice { facts: Arc::new(facts), inner, first, bitmaps }))
    }
}

struct BitmapDevice {
    facts: Arc<Facts>,
    inner: Arc<dyn Device>,
    /// Index of the context of the first bitmap.
    first: usize,
    bitmaps: Arc<[Arc<DirtyBitmap>]>,
}

impl BitmapDevice {
    fn extents(&self, request: Request, contexts: ContextSet) -> PendingRequest {
        let Request { at, len, flags, .. } = request;
        let own = contexts.iter().filter_map(|index| index.checked_sub(self.first));
        let own = own.filter_map(|index| self.bitmaps.get(index));
        let own: Vec<Extents> = own.map(|bitmap| bitmap.extents(at, len, flags)).collect();
        let below = contexts.iter().filter(|index| *index < self.first);
        let below = below.fold(ContextSet::empty(), ContextSet::with);
        if below.is_empty() {
            return PendingRequest::ready(Ok(Reply::Extents(own)));
        }
        let asked = self.inner.submit(Request::extents(at, len, below).with(flags));
        if own.is_empty() {
            return asked;
        }
        PendingRequest::start(async move {
            let Reply::Extents(mut lists) = asked.await? else { return Err(Error::misfit()) };
            lists.extend(own);
            Ok(Reply::Extents(lists))
        })
    }
}

impl Device for BitmapDevice {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        match request.op {
            // Before it is written: a bitmap may show too much, never too little.
            Op::Write(_) | Op::Zero | Op::Trim => {
                let end = request.end().unwrap_or(u64::MAX);
                let enabled = self.bitmaps.iter().filter(|bitmap| bitmap.is_enabled());
                enabled.for_each(|bitmap| bitmap.mark(request.at, end));
                self.inner.submit(request)
            }
            Op::Extents(contexts) => self.extents(request, contexts),
            Op::Read(_) | Op::Flush | Op::Cache => self.inner.submit(request),
        }
    }
}
