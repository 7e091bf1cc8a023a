//! `memory:SIZE`: sparse memory, allocated page by page on write.
//!
//! Pages are in a tree whose inner nodes are made once and never change or disappear before the
//! device does, so finding a page takes no lock and no reference count; each page has its own lock,
//! held for a copy of at most one page. So workers contend only for the same page.

use std::collections::TryReserveError;
use std::sync::{Arc, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use blockhaul_block::{
    BASE_ALLOCATION, Can, Device, Error, Extents, Facts, HOLE, Kind, Op, Outcome, PendingRequest,
    Reply, Request, RequestFlags, Result, ZERO,
};
use blockhaul_catalog::{Backend, BackendTarget, OpenFuture, OpenedDevice};
use blockhaul_io::{Data, Reservation};

use crate::support::{fill, operand};

/// Bytes allocated and freed at once: small enough for sparse disks, large enough that a page's
/// overhead is small. nbdkit's number, because maps of disks are compared.
const PAGE: u64 = 32 << 10;
/// Children of a node, as a power of two: a leaf spans 32 MiB in 16 KiB, and five levels span 2^63.
const FAN_BITS: u32 = 10;
const FAN: usize = 1 << FAN_BITS;
const LEAF: u64 = PAGE << FAN_BITS;
/// Maximum number of pages and gaps checked per extents request: about a millisecond, and at least
/// 1 GiB.
const STEPS_MAX: usize = 32 << 10;

/// The backend `memory:SIZE`.
pub struct MemoryBackend;

impl Backend for MemoryBackend {
    fn schemes(&self) -> &'static [&'static str] {
        &["memory"]
    }

    fn operand(&self) -> &'static str {
        "SIZE"
    }

    fn summary(&self) -> &'static str {
        "sparse memory, lost when the program exits; as a copy target, SIZE may be omitted"
    }

    fn example(&self) -> &'static str {
        r#"
blockhaul serve memory:1G --run 'blockhaul copy --verify sample:64M "$uri"'
"#
    }

    fn open(&self, target: BackendTarget) -> OpenFuture<OpenedDevice> {
        let size = match target.intent.target_size {
            Some(wanted) => operand::optional_size(&target).map(|size| size.unwrap_or(wanted)),
            None => operand::size(&target),
        };
        let device = size.map(|size| OpenedDevice::from(with_name(operand::name(&target), size)));
        Box::pin(std::future::ready(device))
    }
}

/// A zeroed device of `size` bytes of memory, at most 2^63 - 1.
pub fn memory(size: u64) -> Arc<dyn Device> {
    with_name(format!("memory:{size}"), size)
}

fn with_name(name: String, size: u64) -> Arc<dyn Device> {
    Arc::new(MemoryDevice::new(name, size))
}

/// Sparse memory that its owner also reads and writes at once, without requests.
pub struct MemoryDevice {
    facts: Arc<Facts>,
    pages: Arc<Pages>,
}

impl MemoryDevice {
    /// A zeroed device of `size` bytes, at most 2^63 - 1.
    pub fn new(name: String, size: u64) -> MemoryDevice {
        let facts = Facts {
            can: Can::all(),
            zeroed: true,
            temporary: true,
            allocation_unit: PAGE as u32,
            contexts: vec![BASE_ALLOCATION.to_string()],
            ..Facts::new(name, size)
        };
        MemoryDevice { facts: Arc::new(facts), pages: Arc::new(Pages::new(size)) }
    }

    /// Changes the facts of a new device.
    pub fn with_facts(mut self, change: impl FnOnce(&mut Facts)) -> MemoryDevice {
        change(Arc::make_mut(&mut self.facts));
        self
    }

    /// Writes at once, on the calling thread.
    ///
    /// # Errors
    /// [`Kind::NoMemory`](blockhaul_block::Kind::NoMemory) if the system has no memory for the pages.
    pub fn write_now(&self, at: u64, bytes: &[u8]) -> Result<()> {
        self.pages.write(at, bytes)
    }

    /// Zeroes at once, on the calling thread.
    ///
    /// # Errors
    /// [`Kind::NoMemory`](blockhaul_block::Kind::NoMemory) if the system has no memory for the pages.
    pub fn zero_now(&self, at: u64, len: u64) -> Result<()> {
        self.pages.zero(at, len, false)
    }

    /// Reads at once, on the calling thread.
    pub fn read_now(&self, at: u64, out: &mut [u8]) {
        self.pages.read(at, out);
    }
}

impl Device for MemoryDevice {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        let Request { op, at, len, flags } = request;
        match op {
            Op::Read(room) => self.read(at, room),
            Op::Write(data) => self.write(at, data),
            // Memory that must stay allocated has to be filled, which is writing.
            Op::Zero if flags.contains(RequestFlags::FAST | RequestFlags::NO_HOLE) => {
                let text = "zeroing allocated memory is not faster than writing";
                Error::new(Kind::Unsupported, text).into()
            }
            Op::Zero => self.zero(at, len, flags.contains(RequestFlags::NO_HOLE)),
            Op::Trim => self.zero(at, len, false),
            Op::Flush | Op::Cache => PendingRequest::ready(Ok(Reply::Done)),
            Op::Extents(contexts) => {
                let mut extents = self.pages.extents(at, len);
                if flags.contains(RequestFlags::ONE_EXTENT) {
                    extents.first_only();
                }
                let lists = contexts.iter().map(|_| extents.clone()).collect();
                PendingRequest::ready(Ok(Reply::Extents(lists)))
            }
        }
    }
}

impl MemoryDevice {
    fn read(&self, at: u64, room: Reservation) -> PendingRequest {
        if self.pages.absent(at, room.len() as u64) {
            return PendingRequest::ready(Ok(Reply::Hole));
        }
        let pages = self.pages.clone();
        fill::read(at, room, move |at, out| pages.read(at, out))
    }

    fn write(&self, at: u64, data: Data) -> PendingRequest {
        if data.len() <= fill::SHORT {
            return PendingRequest::ready(self.pages.write(at, data.bytes()).map(|()| Reply::Done));
        }
        let pages = self.pages.clone();
        PendingRequest::start(async move {
            let mut next = at;
            for piece in data.bytes().chunks(fill::SHORT) {
                pages.write(next, piece)?;
                next += piece.len() as u64;
                blockhaul_io::yield_now().await;
            }
            Outcome::Ok(Reply::Done)
        })
    }

    fn zero(&self, at: u64, len: u64, keep: bool) -> PendingRequest {
        // What one step frees or fills; freeing is a hundred times faster than filling.
        let step = if keep { fill::SHORT as u64 } else { LEAF };
        if len <= step {
            return PendingRequest::ready(self.pages.zero(at, len, keep).map(|()| Reply::Done));
        }
        let pages = self.pages.clone();
        PendingRequest::start(async move {
            let (mut at, end) = (at, at + len);
            while at < end {
                if !keep && let PageLookup::Absent { until } = pages.find(at) {
                    at = until.min(end);
                    continue;
                }
                let next = at.saturating_add(step).min(end);
                pages.zero(at, next - at, keep)?;
                at = next;
                blockhaul_io::yield_now().await;
            }
            Outcome::Ok(Reply::Done)
        })
    }
}

/// A page of [`PAGE`] bytes; none while it reads as zeroes and takes no memory.
type Page = Option<Box<[u8]>>;

enum PageNode {
    Inner(Box<[OnceLock<PageNode>]>),
    Leaf(Box<[RwLock<Page>]>),
}

impl PageNode {
    fn inner() -> PageNode {
        PageNode::Inner((0..FAN).map(|_| OnceLock::new()).collect())
    }

    fn leaf() -> PageNode {
        PageNode::Leaf((0..FAN).map(|_| RwLock::default()).collect())
    }
}

/// The result of looking up an offset in the tree.
enum PageLookup<'a> {
    /// The page that contains it.
    Page(&'a RwLock<Page>),
    /// Nothing was ever written from there up to `until`.
    Absent { until: u64 },
}

struct Pages {
    size: u64,
    root: PageNode,
    /// Levels of inner nodes above the leaves, at least 1.
    levels: u32,
}

impl Pages {
    fn new(size: u64) -> Pages {
        let mut levels = 1;
        while levels < 4 && size > LEAF << (levels * FAN_BITS) {
            levels += 1;
        }
        Pages { size, root: PageNode::inner(), levels }
    }

    /// Bytes below one child of a node `level` levels above the leaves.
    fn span(level: u32) -> u64 {
        LEAF << ((level - 1) * FAN_BITS)
    }

    fn find(&self, at: u64) -> PageLookup<'_> {
        let mut node = &self.root;
        let mut level = self.levels;
        loop {
            match node {
                PageNode::Leaf(pages) => {
                    return PageLookup::Page(&pages[(at / PAGE) as usize % FAN]);
                }
                PageNode::Inner(children) => {
                    let span = Self::span(level);
                    match children[(at / span) as usize % FAN].get() {
                        Some(child) => (node, level) = (child, level - 1),
                        None => {
                            return PageLookup::Absent {
                                until: (at / span + 1).saturating_mul(span),
                            };
                        }
                    }
                }
            }
        }
    }

    fn find_or_make(&self, at: u64) -> &RwLock<Page> {
        let mut node = &self.root;
        let mut level = self.levels;
        loop {
            match node {
                PageNode::Leaf(pages) => return &pages[(at / PAGE) as usize % FAN],
                PageNode::Inner(children) => {
                    let child = &children[(at / Self::span(level)) as usize % FAN];
                    level -= 1;
                    node = child.get_or_init(if level == 0 {
                        PageNode::leaf
                    } else {
                        PageNode::inner
                    });
                }
            }
        }
    }

    /// Whether nothing is allocated in the range.
    fn absent(&self, at: u64, len: u64) -> bool {
        let (mut at, end) = (at, at + len);
        while at < end {
            match self.find(at) {
                PageLookup::Page(page) if read(page).is_some() => return false,
                PageLookup::Page(_) => at = page_end(at),
                PageLookup::Absent { until } => at = until,
            }
        }
        true
    }

    fn read(&self, at: u64, out: &mut [u8]) {
        let mut at = at;
        let mut out = out;
        while !out.is_empty() {
            let (start, len) = part(at, out.len());
            let (here, rest) = out.split_at_mut(len);
            match self.find(at) {
                PageLookup::Page(page) => match &*read(page) {
                    Some(bytes) => here.copy_from_slice(&bytes[start..start + len]),
                    None => here.fill(0),
                },
                PageLookup::Absent { .. } => here.fill(0),
            }
            at += len as u64;
            out = rest;
        }
    }

    fn write(&self, at: u64, bytes: &[u8]) -> Result<()> {
        let mut at = at;
        let mut bytes = bytes;
        while !bytes.is_empty() {
            let (start, len) = part(at, bytes.len());
            let (here, rest) = bytes.split_at(len);
            let mut page = write(self.find_or_make(at));
            match &mut *page {
                Some(page) => page[start..start + len].copy_from_slice(here),
                None => *page = Some(new_page(start, here).map_err(no_memory)?),
            }
            drop(page);
            at += len as u64;
            bytes = rest;
        }
        Ok(())
    }

    /// Zeroes the range; whole pages are freed, or with `keep` all are allocated.
    fn zero(&self, at: u64, len: u64, keep: bool) -> Result<()> {
        let (mut at, end) = (at, at + len);
        while at < end {
            let left = usize::try_from(end - at).unwrap_or(usize::MAX);
            let (start, len) = part(at, left);
            let place = if keep { PageLookup::Page(self.find_or_make(at)) } else { self.find(at) };
            match place {
                PageLookup::Page(lock) => {
                    // The last page of a device may be whole with fewer bytes.
                    let whole = start == 0 && (len as u64 == PAGE || at + len as u64 == self.size);
                    let mut page = write(lock);
                    let mut freed = None;
                    match &mut *page {
                        Some(_) if whole && !keep => freed = page.take(),
                        Some(bytes) => bytes[start..start + len].fill(0),
                        None if keep => *page = Some(new_page(0, &[]).map_err(no_memory)?),
                        None => {}
                    }
                    drop(page);
                    // Freeing memory may enter the kernel: not under the page's lock.
                    drop(freed);
                    at += len as u64;
                }
                PageLookup::Absent { until } => at = until,
            }
        }
        Ok(())
    }

    fn extents(&self, at: u64, len: u64) -> Extents {
        let mut extents = Extents::new();
        let (mut at, end) = (at, at + len);
        for _ in 0..STEPS_MAX {
            if at >= end {
                break;
            }
            let (next, state) = match self.find(at) {
                PageLookup::Page(page) if read(page).is_some() => (page_end(at), 0),
                PageLookup::Page(_) => (page_end(at), HOLE | ZERO),
                PageLookup::Absent { until } => (until, HOLE | ZERO),
            };
            let next = next.min(end);
            extents.push(next - at, state);
            at = next;
        }
        extents
    }
}

/// First offset after the page of `at`.
fn page_end(at: u64) -> u64 {
    (at / PAGE + 1).saturating_mul(PAGE)
}

/// The position of `at` in its page, and how many of `len` bytes are in the page.
fn part(at: u64, len: usize) -> (usize, usize) {
    let start = (at % PAGE) as usize;
    (start, len.min(PAGE as usize - start))
}

/// A page that holds `bytes` at `start` and zeroes elsewhere.
fn new_page(start: usize, bytes: &[u8]) -> Result<Box<[u8]>, TryReserveError> {
    let mut page = Vec::new();
    page.try_reserve_exact(PAGE as usize)?;
    page.resize(start, 0);
    page.extend_from_slice(bytes);
    page.resize(PAGE as usize, 0);
    Ok(page.into_boxed_slice())
}

fn no_memory(error: TryReserveError) -> Error {
    Error::new(Kind::NoMemory, "out of memory").because(error)
}

/// Pages are plain bytes: a panic elsewhere cannot leave one in an invalid state.
fn read(page: &RwLock<Page>) -> RwLockReadGuard<'_, Page> {
    page.read().unwrap_or_else(PoisonError::into_inner)
}

fn write(page: &RwLock<Page>) -> RwLockWriteGuard<'_, Page> {
    page.write().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Number of allocated pages.
    fn allocated(pages: &Pages, at: u64, len: u64) -> u64 {
        let extents = pages.extents(at, len);
        assert_eq!(extents.total(), len);
        extents.runs().iter().filter(|run| run.state == 0).map(|run| run.len / PAGE).sum()
    }

    #[test]
    fn pages_come_with_writes_and_go_with_zeroes() {
        let pages = Pages::new(100 * PAGE);
        pages.write(PAGE - 1, &[1, 2]).unwrap();
        assert_eq!(allocated(&pages, 0, 100 * PAGE), 2);
        // Part of a page is zeroed in place, a whole one is freed.
        pages.zero(PAGE - 1, PAGE + 1, false).unwrap();
        assert_eq!(allocated(&pages, 0, 100 * PAGE), 1);
        assert!(!pages.absent(0, 1) && pages.absent(PAGE, 99 * PAGE));
        pages.zero(10 * PAGE + 5, 2 * PAGE, true).unwrap();
        assert_eq!(allocated(&pages, 10 * PAGE, 10 * PAGE), 3);
        pages.zero(0, 100 * PAGE, false).unwrap();
        assert_eq!(allocated(&pages, 0, 100 * PAGE), 0);
    }

    #[test]
    fn a_device_as_large_as_can_be_is_cheap_where_it_is_empty() {
        let size = i64::MAX as u64;
        let pages = Pages::new(size);
        pages.write(size - 3, &[1, 2, 3]).unwrap();
        pages.write(size / 3, &[4; 100_000]).unwrap();
        let mut read = [9; 5];
        pages.read(size - 5, &mut read);
        assert_eq!(read, [0, 0, 1, 2, 3]);
        let runs = pages.extents(0, size);
        assert_eq!((runs.len(), runs.total()), (4, size));
        pages.zero(0, size, false).unwrap();
        assert!(pages.absent(0, size));
    }

    #[test]
    fn threads_that_write_side_by_side_do_not_disturb_each_other() {
        let pages = Pages::new(64 * PAGE);
        std::thread::scope(|scope| {
            for thread in 0..4_u8 {
                let pages = &pages;
                scope.spawn(move || {
                    for round in 0..200_u64 {
                        // Quarters of the same pages.
                        let at = round % 64 * PAGE + u64::from(thread) * PAGE / 4;
                        pages.write(at, &[thread + 1; (PAGE / 4) as usize]).unwrap();
                        pages.zero(at, 100, false).unwrap();
                    }
                });
            }
        });
        let mut page = vec![0; PAGE as usize];
        for number in 0..64 {
            pages.read(number * PAGE, &mut page);
            for (index, &byte) in page.iter().enumerate() {
                let thread = index / (PAGE as usize / 4);
                let offset = index % (PAGE as usize / 4);
                assert_eq!(byte, if offset < 100 { 0 } else { thread as u8 + 1 });
            }
        }
    }
}
