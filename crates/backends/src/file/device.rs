//! Requests on an open file.
//!
//! What is sure to be short is done at once on the worker: reads that the page cache answers, small
//! buffered writes, anything on a file system in memory. The rest goes through the worker's driver.

use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use block::{
    Access, Can, Device, Error, Facts, FileRange, Flags, Kind, Op, Outcome, Pending, Reply,
    Request, Result,
};
use io::{Buf, Data, Hold, Parked, Pool, RangeLock, RangeLocks, Room, Way};
use rustix::fs::{Advice, fadvise, fstat};

use super::limits::Nearness;
use super::lock::Lock;
use super::open::page;
use super::{extents, zero};

/// Longest request that is copied on the worker itself: about 100 us from memory to memory.
pub(super) const INLINE_MAX: usize = 1 << 20;
/// Longest buffered write that is done on the worker itself: dearer to hand over than to do, and
/// the kernel holds back larger amounts when too much is waiting for the disk.
const INLINE_WRITE: usize = 128 << 10;

/// An open file or block device, as [`super::open`] found it.
pub(super) struct Storage {
    /// For data: with direct I/O if it was asked for.
    pub(super) file: io::File,
    /// The same file through the page cache, where some requests cannot be direct.
    pub(super) buffered: Option<io::File>,
    /// The same file past the page cache, for requests that can and had better.
    pub(super) past: Option<Past>,
    /// Alignment in bytes of requests to `file`; 1 unless all are direct.
    pub(super) align: u32,
    /// It is a block device.
    pub(super) is_disk: bool,
    /// How far the file system can be trusted to answer at once.
    pub(super) nearness: Nearness,
    /// Keeps other programs from writing to it.
    pub(super) _lock: Option<Lock>,
}

/// A second descriptor, for direct I/O.
pub(super) struct Past {
    file: io::File,
    /// Alignment of offsets, lengths and memory, in bytes.
    align: u32,
    /// Cleared when the file system refuses after all.
    works: AtomicBool,
}

impl Past {
    pub(super) fn new(file: io::File, align: u32) -> Past {
        Past { file, align, works: AtomicBool::new(true) }
    }

    /// Notes that a request was refused as a direct one, if that is what `error` says.
    fn refused(&self, error: &std::io::Error) -> bool {
        let refused = [libc::EINVAL, libc::EOPNOTSUPP]
            .iter()
            .any(|&number| error.raw_os_error() == Some(number));
        if refused {
            log::debug!("direct I/O is not used any more: {error}");
            self.works.store(false, Ordering::Relaxed);
        }
        refused
    }
}

/// How a change reaches the file. One that reaches pages of the page cache while another writes the
/// same pages past it makes the kernel say at the next flush that a write was lost (EIO): clients
/// should not do that, and have to get along with their own disk where they do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Route {
    Cache,
    Past,
}

impl Hold for Route {
    fn excludes(self, other: Route) -> bool {
        self != other
    }
}

/// Held while pages are changed; nothing where there is one route only.
type Turn = Option<RangeLock<Route>>;

/// The pages that a range touches.
fn pages(at: u64, len: u64) -> (u64, u64) {
    let page = u64::from(page());
    // A size is at most 2^63-1.
    (at - at % page, (at + len).next_multiple_of(page))
}

pub(super) struct FileDevice {
    facts: Arc<Facts>,
    inner: Arc<Inner>,
}

/// What requests that go on after `submit` hold on to.
pub(super) struct Inner {
    pub(super) storage: Storage,
    pub(super) size: u64,
    /// Ways to zero that have not failed yet.
    pub(super) zero: zero::Ways,
    /// Cleared when the file system turns out not to know where its holes are.
    pub(super) seeks: AtomicBool,
    /// Cleared when the file system turns out not to tell whether a read would wait.
    tells_cached: AtomicBool,
    /// For payloads whose memory is not aligned for direct I/O; those who wait hold none of it.
    scratch: Pool,
    /// Pages that are being changed, where changes go both through the page cache and past it.
    changing: Option<Arc<RangeLocks<Route>>>,
}

impl FileDevice {
    pub(super) fn new(facts: Facts, storage: Storage) -> FileDevice {
        let both = storage.past.is_some() || storage.align > 1;
        let inner = Inner {
            size: facts.size,
            zero: zero::Ways::new(storage.is_disk),
            seeks: AtomicBool::new(!storage.is_disk),
            tells_cached: AtomicBool::new(true),
            scratch: Pool::new(u64::from(facts.block.maximum)),
            changing: both.then(Arc::default),
            storage,
        };
        FileDevice { facts: Arc::new(facts), inner: Arc::new(inner) }
    }

    /// What makes two open files the same: device and inode.
    pub(super) fn identity(&self) -> Result<(u64, u64)> {
        let stat = fstat(&self.inner.storage.file)
            .map_err(|errno| Error::system("cannot look at the file", errno.into()))?;
        Ok((stat.st_dev, stat.st_ino))
    }

    #[cfg(test)]
    pub(super) fn inner(&self) -> &Inner {
        &self.inner
    }
}

impl Device for FileDevice {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> Pending {
        let Request { op, at, len, flags } = request;
        let inner = &self.inner;
        match op {
            Op::Read(room) => inner.read(at, room),
            Op::Write(data) => inner.write(at, data, flags.contains(Flags::FUA)),
            Op::Zero | Op::Trim => {
                let (inner, trim) = (inner.clone(), matches!(op, Op::Trim));
                Pending::start(async move {
                    let _turn = inner.turn(Route::Cache, at, len).await;
                    match trim {
                        true => inner.trim(at, len).await?,
                        false => inner.zero(at, len, flags).await?,
                    }
                    if flags.contains(Flags::FUA) {
                        inner.sync().await?;
                    }
                    Ok(Reply::Done)
                })
            }
            Op::Flush => {
                let inner = inner.clone();
                Pending::start(async move { inner.sync().await.map(|()| Reply::Done) })
            }
            Op::Cache => inner.cache(at, len),
            Op::Extents(contexts) => extents::answer(inner, at, len, contexts.count(), flags),
        }
    }

    fn file_at(&self, at: u64, len: u64, access: Access) -> Option<FileRange> {
        let writable = self.facts.can.contains(Can::WRITE);
        let len = len.min(self.inner.size.checked_sub(at)?);
        let ours = len > 0 && (access == Access::Read || writable);
        // The kernel shares and copies ranges of direct files like those of others, and what it shares
        // does not pass through the page cache.
        let storage = &self.inner.storage;
        let file = storage.buffered.as_ref().unwrap_or(&storage.file);
        let past_cache = storage.past.is_some() || storage.align > 1;
        ours.then(|| FileRange { file: file.clone(), at, len, past_cache })
    }
}

impl Inner {
    /// The descriptor for a request, and whether it is a direct one. What is not aligned for direct
    /// I/O goes through the page cache, which the kernel keeps coherent.
    pub(super) fn route(&self, at: u64, len: u64) -> (&io::File, bool) {
        let align = u64::from(self.storage.align);
        let aligned = at.is_multiple_of(align) && len.is_multiple_of(align);
        match &self.storage.buffered {
            Some(buffered) if !aligned => (buffered, false),
            _ => (&self.storage.file, align > 1),
        }
    }

    /// Whether everything is in memory, so that no call waits.
    pub(super) fn in_memory(&self) -> bool {
        self.storage.nearness == Nearness::Memory
    }

    /// Waits until nobody changes these pages by the other route.
    pub(super) async fn turn(&self, route: Route, at: u64, len: u64) -> Turn {
        let (start, end) = pages(at, len);
        match &self.changing {
            Some(changing) => Some(changing.lock_for(route, start, end).await),
            None => None,
        }
    }

    /// The turn where it need not be waited for.
    fn turn_now(&self, route: Route, at: u64, len: u64) -> Option<Turn> {
        let (start, end) = pages(at, len);
        match &self.changing {
            Some(changing) => changing.try_lock_for(route, start, end).map(Some),
            None => Some(None),
        }
    }

    /// The descriptor for a request that is to go past the page cache.
    fn past(&self, at: u64, len: u64) -> Option<&Past> {
        let aligned = |past: &&Past| {
            let align = u64::from(past.align);
            at.is_multiple_of(align) && len.is_multiple_of(align)
        };
        let works = |past: &&Past| past.works.load(Ordering::Relaxed);
        self.storage.past.as_ref().filter(aligned).filter(works)
    }

    fn read(self: &Arc<Inner>, at: u64, room: Room) -> Pending {
        let len = room.len() as u64;
        if self.past(at, len).is_some()
            && self.storage.file.cached(at, len).is_none_or(|cached| cached < len)
        {
            let inner = self.clone();
            return Pending::start(async move { inner.read_past(at, room.into_buf()).await });
        }
        let (file, direct) = self.route(at, room.len() as u64);
        let (mut buf, mut filled) = match Parked::begin(room) {
            Err(room) => (room.into_buf(), 0),
            Ok(parked) if direct || !self.is_cached(file, at, parked.missing()) => {
                match parked.into_buf() {
                    Ok(start) => start,
                    Err(error) => return Error::system("cannot empty a pipe", error).into(),
                }
            }
            Ok(mut parked) => {
                // An error is met again, and told, by whoever reads the rest.
                let moved = parked.fill_from_file(file, at);
                match (moved, parked.missing()) {
                    (Ok(_), 0) => return Pending::ready(Ok(Reply::Data(parked.into()))),
                    _ => match parked.into_buf() {
                        Ok(start) => start,
                        Err(error) => return Error::system("cannot empty a pipe", error).into(),
                    },
                }
            }
        };
        if !direct && buf.len() <= INLINE_MAX {
            filled += self.read_cached(file, at + filled as u64, &mut buf[filled..]);
            if filled == buf.len() {
                return Pending::ready(Ok(Reply::Data(buf.into())));
            }
        }
        let (inner, file) = (self.clone(), file.clone());
        let reading = file.start_read(buf, filled, at + filled as u64);
        Pending::under_way(async move {
            let (result, buf) = reading.await;
            let reply = match result {
                Ok(bytes) if filled + bytes == buf.len() => Reply::Data(buf.into()),
                Ok(bytes) if bytes > 0 => {
                    filled += bytes;
                    Box::pin(inner.read_rest(&file, at, buf, filled)).await?
                }
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {
                    Box::pin(inner.read_rest(&file, at, buf, filled)).await?
                }
                result => return Err(inner.read_failed(at + filled as u64, result.err())),
            };
            if let (true, Reply::Data(data)) = (direct, &reply) {
                count(data, Way::DirectRead);
            }
            Ok(reply)
        })
    }

    /// Whether a range is very likely in memory: moving it would not wait for a disk. Looks at a few
    /// bytes, which is cheaper than the range's pages one by one.
    fn is_cached(&self, file: &io::File, at: u64, len: usize) -> bool {
        let probe = |place: usize| {
            let mut byte = [0];
            matches!(file.try_read_at(&mut byte, at + place as u64), Ok(1))
        };
        self.in_memory()
            || (self.tells_cached.load(Ordering::Relaxed)
                && [0, len / 3, len - len / 3, len - 1].into_iter().all(probe))
    }

    /// Reads what is there without waiting; errors are left to whoever reads the rest.
    fn read_cached(&self, file: &io::File, at: u64, buf: &mut [u8]) -> usize {
        if self.in_memory() {
            let mut filled = 0;
            while filled < buf.len() {
                match file.read_now(&mut buf[filled..], at + filled as u64) {
                    Ok(bytes) if bytes > 0 => filled += bytes,
                    _ => break,
                }
            }
            return filled;
        }
        if !self.tells_cached.load(Ordering::Relaxed) {
            return 0;
        }
        match file.try_read_at(buf, at) {
            Ok(bytes) => bytes,
            Err(error) => {
                if error.kind() == std::io::ErrorKind::Unsupported {
                    self.tells_cached.store(false, Ordering::Relaxed);
                }
                0
            }
        }
    }

    /// Reads past the page cache, or through it where that is refused.
    async fn read_past(&self, at: u64, mut buf: Buf) -> Outcome {
        let mut filled = 0;
        while let Some(past) = self.past(at + filled as u64, (buf.len() - filled) as u64)
            && filled < buf.len()
            && buf.as_ptr().addr().is_multiple_of(past.align as usize)
        {
            let (result, same) = past.file.read_at(buf, filled, at + filled as u64).await;
            buf = same;
            match result {
                Ok(bytes) if bytes > 0 => {
                    filled += bytes;
                    if let Some(tally) = buf.tally() {
                        tally.add(Way::DirectRead, bytes);
                    }
                }
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) if past.refused(&error) => break,
                result => return Err(self.read_failed(at + filled as u64, result.err())),
            }
        }
        self.read_rest(&self.storage.file, at, buf, filled).await
    }

    async fn read_rest(&self, file: &io::File, at: u64, buf: Buf, filled: usize) -> Outcome {
        let (mut buf, mut filled) = (buf, filled);
        while filled < buf.len() {
            let (result, same) = file.read_at(buf, filled, at + filled as u64).await;
            buf = same;
            match result {
                Ok(bytes) if bytes > 0 => filled += bytes,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                result => return Err(self.read_failed(at + filled as u64, result.err())),
            }
        }
        Ok(Reply::Data(buf.into()))
    }

    /// Why a read stopped at `at`: the file may have become shorter, which direct I/O reports as an
    /// invalid offset.
    fn read_failed(&self, at: u64, error: Option<std::io::Error>) -> Error {
        let now = fstat(&self.storage.file).ok().and_then(|stat| u64::try_from(stat.st_size).ok());
        match (now, error) {
            (Some(now), _) if !self.storage.is_disk && now < self.size => {
                let text = format!(
                    "the file is {now} bytes long now and was {} when it was opened: do not shrink \
                     it while it is in use",
                    self.size
                );
                Error::new(Kind::Io, text)
            }
            (_, Some(error)) => Error::system(format!("cannot read at offset {at}"), error),
            (_, None) => Error::new(Kind::Io, format!("nothing to read at offset {at}")),
        }
    }

    fn write(self: &Arc<Inner>, at: u64, data: Data, durable: bool) -> Pending {
        if self.past(at, data.len() as u64).is_some() {
            let inner = self.clone();
            return Pending::start(async move { inner.write_past(at, data, durable).await });
        }
        let (_, direct) = self.route(at, data.len() as u64);
        if direct || self.changing.is_none() {
            return self.write_by(at, data, durable);
        }
        let inner = self.clone();
        Pending::start(async move {
            let _turn = inner.turn(Route::Cache, at, data.len() as u64).await;
            inner.write_by(at, data, durable).await
        })
    }

    /// Writes by the descriptor that the range asks for; through the page cache when it is its turn.
    fn write_by(self: &Arc<Inner>, at: u64, data: Data, durable: bool) -> Pending {
        let (file, direct) = self.route(at, data.len() as u64);
        let short = if self.in_memory() { INLINE_MAX } else { INLINE_WRITE };
        let inline = !direct && data.len() <= short;
        let data = match (direct, data.take_parked()) {
            (false, Ok(parked)) => return self.write_parked(at, parked, inline, durable),
            (true, Ok(parked)) => Data::from(parked),
            (_, Err(data)) => data,
        };
        if inline {
            if let Err(error) = write_now(file, at, data.bytes()) {
                return write_failed(error).into();
            }
            if !durable {
                return Pending::ready(Ok(Reply::Done));
            }
            // Its memory is not needed any more.
            drop(data);
            let inner = self.clone();
            return Pending::start(async move { inner.sync().await.map(|()| Reply::Done) });
        }
        let (inner, file) = (self.clone(), file.clone());
        if direct
            && !durable
            && is_aligned(&data, self.storage.align)
            && let Some(turn) = self.turn_now(Route::Past, at, data.len() as u64)
        {
            let writing = file.start_write(data.clone(), 0, at);
            return Pending::finishing(async move {
                let _turn = turn;
                match writing.await {
                    Ok(written) if written == data.len() => {}
                    Ok(0) => return Err(write_failed(std::io::ErrorKind::WriteZero.into())),
                    // Rare, and no part of the memory that each write needs.
                    Ok(written) => Box::pin(file.write_rest_at(data.clone(), written, at))
                        .await
                        .map_err(write_failed)?,
                    Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {
                        let again = Box::pin(file.write_all_at(data.clone(), at));
                        again.await.map_err(write_failed)?;
                    }
                    Err(error) => return Err(write_failed(error)),
                }
                count(&data, Way::DirectWrite);
                Ok(Reply::Done)
            });
        }
        Pending::start(async move {
            let align = inner.storage.align;
            if direct {
                let aligned = inner.aligned(data.clone(), align).await?;
                let _turn = inner.turn(Route::Past, at, data.len() as u64).await;
                file.write_all_at(aligned, at).await.map_err(write_failed)?;
                count(&data, Way::DirectWrite);
            } else {
                file.write_all_at(data, at).await.map_err(write_failed)?;
            }
            if durable {
                inner.sync().await?;
            }
            Ok(Reply::Done)
        })
    }

    /// Writes past the page cache, or through it where that is refused.
    async fn write_past(&self, at: u64, data: Data, durable: bool) -> Outcome {
        let mut done = false;
        if let Some(past) = self.past(at, data.len() as u64) {
            let aligned = self.aligned(data.clone(), past.align).await?;
            let _turn = self.turn(Route::Past, at, data.len() as u64).await;
            match past.file.write_all_at(aligned, at).await {
                Ok(()) => {
                    done = true;
                    count(&data, Way::DirectWrite);
                }
                Err(error) if past.refused(&error) => {}
                Err(error) => return Err(write_failed(error)),
            }
        }
        if !done {
            let _turn = self.turn(Route::Cache, at, data.len() as u64).await;
            self.storage.file.write_all_at(data, at).await.map_err(write_failed)?;
        }
        if durable {
            self.sync().await?;
        }
        Ok(Reply::Done)
    }

    /// Moves a payload from its pipe into the page cache.
    fn write_parked(
        self: &Arc<Inner>,
        at: u64,
        mut parked: Parked,
        inline: bool,
        durable: bool,
    ) -> Pending {
        let (inner, file) = (self.clone(), self.storage.file.clone());
        let moved = match inline {
            true => {
                let moved = parked.drain_to_file(&file, at);
                if !durable || moved.is_err() {
                    return Pending::ready(moved.map(|()| Reply::Done).map_err(write_failed));
                }
                None
            }
            false => Some(io::offload(move || parked.drain_to_file(&file, at))),
        };
        Pending::start(async move {
            if let Some(moving) = moved {
                let moved = moving.await;
                moved
                    .map_err(|lost| Error::new(Kind::Io, "cannot write").because(lost))?
                    .map_err(write_failed)?;
            }
            if durable {
                inner.sync().await?;
            }
            Ok(Reply::Done)
        })
    }

    /// The same bytes in memory that direct I/O takes.
    async fn aligned(&self, data: Data, align: u32) -> Result<Data> {
        if is_aligned(&data, align) {
            return Ok(data);
        }
        let room = self.scratch.reserve(data.len()).await.map_err(|error| {
            Error::new(Kind::NoMemory, "no aligned memory for the write").because(error)
        })?;
        let mut buf = room.into_buf();
        buf.copy_from_slice(data.bytes());
        Ok(buf.into())
    }

    /// Makes completed writes durable.
    async fn sync(&self) -> Result<()> {
        if self.in_memory() {
            return Ok(());
        }
        let synced = self.storage.file.sync().await;
        synced.map_err(|error| Error::system("cannot make it durable", error))
    }

    fn cache(self: &Arc<Inner>, at: u64, len: u64) -> Pending {
        let (Some(len), false) = (NonZeroU64::new(len), self.in_memory()) else {
            return Pending::ready(Ok(Reply::Done));
        };
        let file = self.storage.file.clone();
        // Starting to read ahead may itself wait for the file's block map or a full disk queue.
        let advised = io::offload(move || fadvise(&file, at, Some(len), Advice::WillNeed));
        Pending::start(async move {
            // Only a hint: where it is not taken, reads are slower, not wrong.
            if let Ok(Err(errno)) = advised.await {
                log::debug!("reading ahead was refused: {errno}");
            }
            Ok(Reply::Done)
        })
    }
}

/// Whether a payload is in memory that direct I/O takes.
fn is_aligned(data: &Data, align: u32) -> bool {
    data.bytes().as_ptr().addr().is_multiple_of(align as usize)
}

/// Counts all of a payload.
fn count(data: &Data, way: Way) {
    if let Some(tally) = data.tally() {
        tally.add(way, data.len());
    }
}

/// Writes all of `bytes` on the calling thread.
pub(super) fn write_now(file: &io::File, at: u64, bytes: &[u8]) -> std::io::Result<()> {
    let mut written = 0;
    while written < bytes.len() {
        match file.write_now(&bytes[written..], at + written as u64) {
            Ok(0) => return Err(std::io::ErrorKind::WriteZero.into()),
            Ok(bytes) => written += bytes,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

pub(super) fn write_failed(error: std::io::Error) -> Error {
    Error::system("cannot write", error)
}
