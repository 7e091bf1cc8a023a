//! Where a copy of a disk in use may differ from the disk, in a file that outlives the program.
//!
//! The file has a bit for each block. A bit is durable before a write to its block reaches the disk;
//! it is cleared after the block was copied, and the copy was flushed. Therefore whoever continues the
//! copy after a crash misses nothing, and may copy some blocks again.
//!
//! The file is a header, and then sectors of 512 bytes, each with bits and a checksum. A sector that
//! is damaged counts as "all of its blocks differ".

use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use blockhaul_block::{Device, Facts, Op, PendingRequest, Request, Result};
use blockhaul_catalog::Layer;
use blockhaul_io::Notify;
use blockhaul_layers::support::Runs;

const MAGIC: &[u8; 24] = b"blockhaul remaining 001\n";
/// Bytes before the first sector.
const HEADER: usize = 4096;
const SECTOR: usize = 512;
/// Bytes of a checksum (a truncated BLAKE3).
const CHECK: usize = 16;
/// Bytes of bits in a sector.
const BITS: usize = SECTOR - CHECK;
/// Smallest block in bytes: that of changes.
const BLOCK_MIN: u64 = 64 << 10;
/// Blocks of a disk: more are joined. The file has 2 MiB then.
const BLOCKS_MAX: u64 = 1 << 24;
/// Unit in which parts of blocks are counted as copied.
const UNIT: u64 = 512;

/// Is called once, on a thread that may block, when the file cannot be written any more: whatever
/// refers to it must be removed, durably, before it returns.
pub type InvalidateCallback = Box<dyn Fn(&str) + Send + Sync>;

/// The blocks in which a copy may differ from its disk.
#[derive(Clone)]
pub struct PersistentDirtyMap(Arc<DirtyMapFile>);

struct DirtyMapFile {
    id: [u8; 16],
    size: u64,
    block: u64,
    file: File,
    state: Mutex<DirtyMapState>,
    /// Sectors were written.
    written: Notify,
    broken: OnceLock<String>,
    invalidate: OnceLock<InvalidateCallback>,
}

#[derive(Default)]
struct DirtyMapState {
    /// The bits, as they are or will be in the file.
    set: Vec<u8>,
    /// Blocks that were written since [`PersistentDirtyMap::cut`], or the beginning.
    fresh: Vec<u8>,
    /// What the first pass has not copied yet, in units.
    todo: Runs<bool>,
    /// The first pass has ended.
    follows: bool,
    /// Blocks of writes in flight, by number: the first, and the one after the last.
    in_flight: HashMap<u64, (u64, u64)>,
    last: u64,
    /// Sectors that are not durable yet: writes wait for them.
    urgent: BTreeSet<usize>,
    /// The same, of which a thread writes.
    in_writing: BTreeSet<usize>,
    /// Sectors with bits that were cleared.
    lazy: BTreeSet<usize>,
    /// A thread writes, or will soon.
    scheduled: bool,
}

impl PersistentDirtyMap {
    /// For a disk of `size` bytes, in this empty file, open for reading and writing: every block
    /// differs. Nothing is written before [`PersistentDirtyMap::store`].
    pub fn create(file: File, id: [u8; 16], size: u64) -> PersistentDirtyMap {
        let block = block_of(size);
        let state =
            DirtyMapState { set: vec![0xff; bytes_of(size, block)], ..DirtyMapState::default() };
        PersistentDirtyMap::with(file, (id, size, block), state)
    }

    /// Continues with a file of an earlier program. Blocks. Returns the number of damaged sectors, too.
    ///
    /// # Errors
    /// Why the file cannot be used: it is not of this `id`, or of a disk of another size.
    pub fn open(
        file: File,
        id: [u8; 16],
        size: u64,
    ) -> std::result::Result<(PersistentDirtyMap, usize), String> {
        let block = block_of(size);
        let bits = bytes_of(size, block);
        let sectors = bits.div_ceil(BITS);
        let len = file.metadata().map_err(|error| error.to_string())?.len();
        let wanted = (HEADER + sectors * SECTOR) as u64;
        let mut header = [0; HEADER];
        if len < HEADER as u64 {
            return Err(format!("it has only {len} bytes"));
        }
        file.read_exact_at(&mut header, 0).map_err(|error| error.to_string())?;
        check_header(&header, id, size)?;
        if len != wanted {
            return Err(format!("it has {len} bytes instead of {wanted}"));
        }
        let mut bytes = vec![0; sectors * SECTOR];
        file.read_exact_at(&mut bytes, HEADER as u64).map_err(|error| error.to_string())?;
        let mut set = Vec::with_capacity(sectors * BITS);
        let mut damaged = 0;
        for (number, sector) in bytes.chunks_exact(SECTOR).enumerate() {
            let (body, found) = sector.split_at(BITS);
            if check(&id, number, body) == *found {
                set.extend(body);
            } else {
                damaged += 1;
                set.extend([0xff; BITS]);
            }
        }
        set.truncate(bits);
        let state = DirtyMapState { set, ..DirtyMapState::default() };
        Ok((PersistentDirtyMap::with(file, (id, size, block), state), damaged))
    }

    fn with(
        file: File,
        (id, size, block): ([u8; 16], u64, u64),
        mut state: DirtyMapState,
    ) -> PersistentDirtyMap {
        let blocks = size.div_ceil(block);
        // Bits behind the last block mean nothing.
        clear(&mut state.set, blocks, bytes_of(size, block) as u64 * 8);
        state.fresh = vec![0; state.set.len()];
        PersistentDirtyMap(Arc::new(DirtyMapFile {
            id,
            size,
            block,
            file,
            state: Mutex::new(state),
            written: Notify::default(),
            broken: OnceLock::new(),
            invalidate: OnceLock::new(),
        }))
    }

    /// Calls this when the file cannot be written any more. Only the first one counts.
    pub fn on_failure(&self, invalidate: InvalidateCallback) {
        let _ = self.0.invalidate.set(invalidate);
    }

    /// Why the file cannot be written any more, if so: it must not be used again.
    pub fn broken(&self) -> Option<&str> {
        self.0.broken.get().map(String::as_str)
    }

    /// Whether both are the same.
    pub fn is_same(&self, other: &PersistentDirtyMap) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// The layer that marks what is written. All handles that write to the disk must be under it. Put
    /// it over that of [`ChangeTracker`](crate::ChangeTracker), if there is one.
    pub fn layer(&self) -> Arc<dyn Layer> {
        Arc::new(DirtyMapLayer(self.0.clone()))
    }

    /// A copy of these ranges, offset and length in bytes, begins; what else differs is what is
    /// written from now on. Call it while no write is in flight.
    pub fn begin(&self, ranges: &[(u64, u64)]) {
        let inner = &self.0;
        let mut state = inner.lock();
        state.fresh.fill(0);
        state.todo = Runs::default();
        state.follows = false;
        for &(at, len) in ranges {
            let end = at.saturating_add(len).min(inner.size);
            state.todo.set(at / UNIT, end.div_ceil(UNIT), true);
        }
        let blocks: Vec<_> = ranges.iter().map(|&(at, len)| inner.blocks(at, len)).collect();
        state.set.fill(0);
        for (first, last) in blocks {
            set(&mut state.set, first, last);
        }
        state.lazy.extend(0..inner.sectors());
    }

    /// These ranges, start and end in bytes, were copied by the first pass and flushed. What was
    /// written there since [`PersistentDirtyMap::begin`] differs still.
    pub fn copied(&self, ranges: &[(u64, u64)]) {
        let inner = &self.0;
        let mut state = inner.lock();
        if state.follows {
            return;
        }
        for &(start, end) in ranges {
            let end = end.min(inner.size);
            let units = if end == inner.size { end.div_ceil(UNIT) } else { end / UNIT };
            state.todo.set(start.div_ceil(UNIT), units, false);
            let (first, last) = inner.blocks(start, end.saturating_sub(start));
            for block in first..last {
                if !inner.has_todo(&state, block) && !get(&state.fresh, block) {
                    clear(&mut state.set, block, block + 1);
                    state.lazy.insert(sector_of(block));
                }
            }
        }
        state.keep_in_flight();
        inner.write_soon(&mut state);
    }

    /// Call it before the flush after which [`PersistentDirtyMap::settle`] is called.
    pub fn cut(&self) {
        self.0.lock().fresh.fill(0);
    }

    /// Everything was copied once and flushed, but for these ranges, offset and length in bytes, and
    /// what was written since [`PersistentDirtyMap::cut`].
    pub fn settle(&self, differ: &[(u64, u64)]) {
        let inner = &self.0;
        let mut state = inner.lock();
        state.follows = true;
        let mut now = state.fresh.clone();
        for &(at, len) in differ {
            let (first, last) = inner.blocks(at, len);
            set(&mut now, first, last);
        }
        for &(first, last) in state.in_flight.values() {
            set(&mut now, first, last);
        }
        let before = std::mem::replace(&mut state.set, now);
        for number in 0..inner.sectors() {
            let bits = |all: &[u8]| bits_of(all, number).to_vec();
            let (old, new) = (bits(&before), bits(&state.set));
            if old != new {
                let grows = old.iter().zip(&new).any(|(old, new)| new & !old != 0);
                if grows {
                    state.urgent.insert(number)
                } else {
                    state.lazy.insert(number)
                };
            }
        }
        inner.write_soon(&mut state);
    }

    /// Where they differ: offset and length in bytes, in order.
    pub fn ranges(&self) -> Vec<(u64, u64)> {
        let inner = &self.0;
        let state = inner.lock();
        let mut ranges: Vec<(u64, u64)> = Vec::new();
        for block in (0..inner.size.div_ceil(inner.block)).filter(|&block| get(&state.set, block)) {
            let at = block * inner.block;
            let len = inner.block.min(inner.size - at);
            match ranges.last_mut() {
                Some(last) if last.0 + last.1 == at => last.1 += len,
                _ => ranges.push((at, len)),
            }
        }
        ranges
    }

    /// Makes the file durable as it is.
    ///
    /// # Errors
    /// Why the file cannot be written.
    pub async fn store(&self) -> std::result::Result<(), String> {
        let inner = &self.0;
        {
            let mut state = inner.lock();
            state.urgent.extend(0..inner.sectors());
            inner.write_soon(&mut state);
        }
        inner.stored(0, inner.size.div_ceil(inner.block)).await;
        match inner.broken.get() {
            None => Ok(()),
            Some(why) => Err(why.clone()),
        }
    }
}

impl DirtyMapState {
    /// Writes in flight may change their blocks at any time.
    fn keep_in_flight(&mut self) {
        for &(first, last) in self.in_flight.values() {
            set(&mut self.set, first, last);
        }
    }

    fn waits(&self, first: u64, last: u64) -> bool {
        let sectors = sector_of(first)..=sector_of(last - 1);
        self.urgent.range(sectors.clone()).next().is_some()
            || self.in_writing.range(sectors).next().is_some()
    }
}

impl DirtyMapFile {
    fn lock(&self) -> MutexGuard<'_, DirtyMapState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn sectors(&self) -> usize {
        bytes_of(self.size, self.block).div_ceil(BITS)
    }

    /// The blocks that a range touches: the first, and the one after the last.
    fn blocks(&self, at: u64, len: u64) -> (u64, u64) {
        let end = at.saturating_add(len).min(self.size);
        let first = at / self.block;
        (first, end.div_ceil(self.block).max(first))
    }

    fn has_todo(&self, state: &DirtyMapState, block: u64) -> bool {
        let start = block * self.block / UNIT;
        let end = ((block + 1) * self.block).min(self.size).div_ceil(UNIT);
        let (is_todo, to) = state.todo.run(start, end);
        is_todo || to < end
    }

    /// A write to these blocks begins. Whether it must wait until that is durable.
    fn enter(self: &Arc<DirtyMapFile>, first: u64, last: u64) -> (DirtyMapWrite, bool) {
        let mut state = self.lock();
        state.last += 1;
        let number = state.last;
        state.in_flight.insert(number, (first, last));
        set(&mut state.fresh, first, last);
        for block in first..last {
            if !get(&state.set, block) {
                set(&mut state.set, block, block + 1);
                state.urgent.insert(sector_of(block));
            }
        }
        let waits = self.broken.get().is_none() && state.waits(first, last);
        if waits {
            self.write_soon(&mut state);
        }
        (DirtyMapWrite { inner: self.clone(), number }, waits)
    }

    /// Waits until the sectors of these blocks are durable, or the file is given up.
    async fn stored(&self, first: u64, last: u64) {
        if first >= last {
            return;
        }
        loop {
            let written = self.written.listen();
            if self.broken.get().is_some() || !self.lock().waits(first, last) {
                return;
            }
            // This side keeps the sender.
            let _ = written.await;
        }
    }

    fn write_soon(self: &Arc<DirtyMapFile>, state: &mut DirtyMapState) {
        let idle = state.urgent.is_empty() && state.lazy.is_empty();
        if !idle && !std::mem::replace(&mut state.scheduled, true) {
            let inner = self.clone();
            drop(blockhaul_io::offload(move || inner.write()));
        }
    }

    /// Writes sectors until none is left. Blocks.
    fn write(&self) {
        loop {
            let images = {
                let mut state = self.lock();
                if state.urgent.is_empty() && state.lazy.is_empty() {
                    state.scheduled = false;
                    return;
                }
                state.in_writing = std::mem::take(&mut state.urgent);
                let lazy = std::mem::take(&mut state.lazy);
                let numbers: BTreeSet<_> = state.in_writing.union(&lazy).copied().collect();
                numbers.into_iter().map(|number| self.image(&state, number)).collect::<Vec<_>>()
            };
            let stored = match self.broken.get() {
                None => self.write_all(&images),
                Some(_) => Ok(()),
            };
            if let Err(error) = stored {
                let why = error.to_string();
                if let Some(invalidate) = self.invalidate.get() {
                    invalidate(&why);
                }
                let _ = self.broken.set(why);
            }
            self.lock().in_writing.clear();
            self.written.notify();
        }
    }

    /// The place and the bytes of a sector.
    fn image(&self, state: &DirtyMapState, number: usize) -> (u64, [u8; SECTOR]) {
        let mut sector = [0; SECTOR];
        let bits = bits_of(&state.set, number);
        sector[..bits.len()].copy_from_slice(bits);
        let check = check(&self.id, number, &sector[..BITS]);
        sector[BITS..].copy_from_slice(&check);
        ((HEADER + number * SECTOR) as u64, sector)
    }

    fn write_all(&self, images: &[(u64, [u8; SECTOR])]) -> io::Result<()> {
        if self.file.metadata()?.len() == 0 {
            self.file.write_all_at(&header(&self.id, self.size), 0)?;
        }
        for (at, sector) in images {
            self.file.write_all_at(sector, *at)?;
        }
        self.file.sync_data()
    }
}

/// A write in flight.
struct DirtyMapWrite {
    inner: Arc<DirtyMapFile>,
    number: u64,
}

impl Drop for DirtyMapWrite {
    fn drop(&mut self) {
        let mut state = self.inner.lock();
        if let Some((first, last)) = state.in_flight.remove(&self.number) {
            // The disk may have changed after a cut.
            set(&mut state.fresh, first, last);
        }
    }
}

struct DirtyMapLayer(Arc<DirtyMapFile>);

impl Layer for DirtyMapLayer {
    fn wrap(&self, inner: Arc<dyn Device>) -> Result<Arc<dyn Device>> {
        let facts = Arc::new(Facts::same(&inner.facts()));
        Ok(Arc::new(DirtyMapDevice { facts, inner, remaining: self.0.clone() }))
    }
}

struct DirtyMapDevice {
    facts: Arc<Facts>,
    inner: Arc<dyn Device>,
    remaining: Arc<DirtyMapFile>,
}

impl Device for DirtyMapDevice {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        let changes = matches!(request.op, Op::Write(_) | Op::Zero | Op::Trim);
        let (first, last) = self.remaining.blocks(request.at, request.len);
        if !changes || first >= last {
            return self.inner.submit(request);
        }
        let (writing, waits) = self.remaining.enter(first, last);
        if !waits {
            // Dropped when the write has completed, or at once if it has already.
            return self.inner.submit(request).guarded(move || writing);
        }
        let inner = self.inner.clone();
        let remaining = self.remaining.clone();
        PendingRequest::start(async move {
            remaining.stored(first, last).await;
            let outcome = inner.submit(request).await;
            drop(writing);
            outcome
        })
    }
}

/// Bytes of a block of a disk of `size` bytes.
fn block_of(size: u64) -> u64 {
    let mut block = BLOCK_MIN;
    while size.div_ceil(block) > BLOCKS_MAX {
        block *= 2;
    }
    block
}

/// Bytes of the bits of a disk: those of at least one block.
fn bytes_of(size: u64, block: u64) -> usize {
    // At most BLOCKS_MAX / 8.
    size.div_ceil(block).max(1).div_ceil(8) as usize
}

fn header(id: &[u8; 16], size: u64) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend(id);
    bytes.extend(size.to_be_bytes());
    bytes.resize(HEADER - CHECK, 0);
    let check = blake3::hash(&bytes);
    bytes.extend(&check.as_bytes()[..CHECK]);
    bytes
}

fn check_header(found: &[u8; HEADER], id: [u8; 16], size: u64) -> std::result::Result<(), String> {
    let (body, check) = found.split_at(HEADER - CHECK);
    if !found.starts_with(MAGIC) || blake3::hash(body).as_bytes()[..CHECK] != *check {
        return Err("its header is damaged".to_string());
    }
    let body = &body[MAGIC.len()..];
    if body[..16] != id {
        return Err("it belongs to another job".to_string());
    }
    if body[16..24] != size.to_be_bytes() {
        return Err("it is of a disk of another size".to_string());
    }
    Ok(())
}

fn check(id: &[u8; 16], number: usize, body: &[u8]) -> [u8; CHECK] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(id).update(&(number as u64).to_be_bytes()).update(body);
    let mut check = [0; CHECK];
    check.copy_from_slice(&hasher.finalize().as_bytes()[..CHECK]);
    check
}

fn sector_of(block: u64) -> usize {
    // Blocks are at most BLOCKS_MAX.
    block as usize / 8 / BITS
}

/// The bits of a sector; the last one may have fewer.
fn bits_of(all: &[u8], number: usize) -> &[u8] {
    &all[number * BITS..all.len().min((number + 1) * BITS)]
}

fn get(bits: &[u8], at: u64) -> bool {
    bits[at as usize / 8] >> (at % 8) & 1 == 1
}

fn set(bits: &mut [u8], first: u64, last: u64) {
    change(bits, first, last, |byte, mask| byte | mask);
}

fn clear(bits: &mut [u8], first: u64, last: u64) {
    change(bits, first, last, |byte, mask| byte & !mask);
}

/// Changes the bits of a range, byte by byte.
fn change(bits: &mut [u8], first: u64, last: u64, to: impl Fn(u8, u8) -> u8) {
    let mut at = first;
    while at < last {
        let end = (at / 8 * 8 + 8).min(last);
        let mask = (0xff_u8 << (at % 8)) & (0xff >> (7 - (end - 1) % 8));
        let byte = &mut bits[at as usize / 8];
        *byte = to(*byte, mask);
        at = end;
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const ID: [u8; 16] = *b"0123456789abcdef";
    const SIZE: u64 = (100 << 16) + 512;

    fn file() -> File {
        tempfile::tempfile().unwrap()
    }

    fn stored(remaining: &PersistentDirtyMap) -> File {
        remaining.0.lock().lazy.extend(0..remaining.0.sectors());
        remaining.0.write();
        remaining.0.file.try_clone().unwrap()
    }

    #[test]
    fn bits_of_a_range_change() {
        let mut bits = vec![0; 4];
        set(&mut bits, 3, 21);
        assert_eq!(bits, [0xf8, 0xff, 0x1f, 0]);
        clear(&mut bits, 4, 6);
        clear(&mut bits, 8, 16);
        assert_eq!(bits, [0xc8, 0, 0x1f, 0]);
        assert!(get(&bits, 3) && !get(&bits, 4) && get(&bits, 20) && !get(&bits, 21));
    }

    #[test]
    fn a_file_shows_what_is_left_of_a_copy() {
        let remaining = PersistentDirtyMap::create(file(), ID, SIZE);
        assert_eq!(remaining.ranges(), [(0, SIZE)]);
        remaining.begin(&[(0, 512), (1 << 16, 3 << 16), (SIZE - 512, 512)]);
        let (first, _) = remaining.0.enter(50, 51);
        drop(first);
        // In flight while it is copied.
        let (second, waits) = remaining.0.enter(2, 3);
        assert!(waits, "its sector is not durable yet");
        remaining.copied(&[(0, 256), (1 << 16, 4 << 16), (SIZE - 512, SIZE)]);
        let left = [(0, 1 << 16), (2 << 16, 1 << 16), (50 << 16, 1 << 16)];
        assert_eq!(remaining.ranges(), left);
        drop(second);
        remaining.copied(&[(0, 512), (2 << 16, 3 << 16)]);
        let (read, damaged) = PersistentDirtyMap::open(stored(&remaining), ID, SIZE).unwrap();
        assert_eq!((read.ranges(), damaged), (left[1..].to_vec(), 0));
    }

    #[test]
    fn a_follower_differs_where_changes_are() {
        let remaining = PersistentDirtyMap::create(file(), ID, SIZE);
        remaining.begin(&[(0, SIZE)]);
        drop(remaining.0.enter(1, 2));
        let (in_flight, _) = remaining.0.enter(4, 5);
        remaining.cut();
        drop(remaining.0.enter(7, 8));
        remaining.settle(&[(0, 512)]);
        drop(in_flight);
        let block = 1 << 16;
        assert_eq!(remaining.ranges(), [(0, block), (4 * block, block), (7 * block, block)]);
        remaining.copied(&[(0, SIZE)]);
        assert_eq!(remaining.ranges().len(), 3, "only a first pass counts");
    }

    #[test]
    fn what_is_not_of_this_copy_is_refused_and_what_is_damaged_differs() {
        let remaining = PersistentDirtyMap::create(file(), ID, SIZE);
        remaining.begin(&[(0, 512)]);
        let stored = stored(&remaining);
        let why = |file: &File, id, size| {
            PersistentDirtyMap::open(file.try_clone().unwrap(), id, size).err().unwrap()
        };
        assert!(why(&stored, *b"another one.....", SIZE).contains("another job"));
        assert!(why(&stored, ID, SIZE + 512).contains("another size"));
        assert!(why(&file(), ID, SIZE).contains("only 0 bytes"));
        stored.write_all_at(b"x", HEADER as u64 + 3).unwrap();
        let (read, damaged) =
            PersistentDirtyMap::open(stored.try_clone().unwrap(), ID, SIZE).unwrap();
        assert_eq!((read.ranges(), damaged), (vec![(0, SIZE)], 1));
        stored.set_len(HEADER as u64 + 100).unwrap();
        assert!(why(&stored, ID, SIZE).contains("bytes instead of"));
        stored.write_all_at(b"x", 30).unwrap();
        assert!(why(&stored, ID, SIZE).contains("header is damaged"));
    }

    #[test]
    fn a_file_that_cannot_be_written_is_given_up_before_anybody_goes_on() {
        let read_only = File::open("/dev/null").unwrap();
        let remaining = PersistentDirtyMap::create(read_only, ID, SIZE);
        let failures = Arc::new(Mutex::new(Vec::new()));
        let (seen, inner) = (failures.clone(), Arc::downgrade(&remaining.0));
        remaining.on_failure(Box::new(move |why| {
            let waits = inner.upgrade().unwrap().lock().waits(3, 4);
            seen.lock().unwrap().push((why.to_string(), waits));
        }));
        remaining.begin(&[]);
        remaining.0.lock().scheduled = true;
        let (writing, waits) = remaining.0.enter(3, 4);
        assert!(waits && remaining.broken().is_none());
        remaining.0.write();
        assert!(remaining.broken().is_some());
        assert!(!remaining.0.lock().waits(3, 4));
        drop(writing);
        assert!(!remaining.0.enter(5, 6).1, "it is not marked any more");
        remaining.0.write();
        let failures = failures.lock().unwrap().clone();
        assert!(matches!(&failures[..], [(why, true)] if why.contains("Bad file")), "{failures:?}");
    }
}
