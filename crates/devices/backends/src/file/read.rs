//! Reads: cached data is returned at once, the rest goes through the driver.

use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use blockhaul_block::{Error, Kind, Outcome, PendingRequest, Reply};
use blockhaul_io::{Buf, ParkedPayload, PayloadRoute, Reservation};
use rustix::fs::{Advice, fadvise, fstat};

use super::storage::{FileState, INLINE_MAX, count};

/// Bytes between two places of a range that are looked at to find out whether it is cached.
const PROBE_STEP: usize = 176 << 10;

impl FileState {
    pub(super) fn read(self: &Arc<FileState>, at: u64, room: Reservation) -> PendingRequest {
        let len = room.len() as u64;
        if self.storage.grows && !self.has_grown_to(at.saturating_add(len)) {
            let inner = self.clone();
            return PendingRequest::start(
                async move { inner.read_growing(at, room.into_buf()).await },
            );
        }
        if self.past(at, len).is_some()
            && self.storage.file.cached(at, len).is_none_or(|cached| cached < len)
        {
            let inner = self.clone();
            return PendingRequest::start(
                async move { inner.read_past(at, room.into_buf()).await },
            );
        }
        let (file, direct) = self.route(at, room.len() as u64);
        let (mut buf, mut filled) = match ParkedPayload::begin(room) {
            Err(room) => (room.into_buf(), 0),
            Ok(parked) if direct || !self.is_cached(file, at, parked.missing()) => {
                match parked.into_buf() {
                    Ok(start) => start,
                    Err(error) => return Error::system("cannot empty a pipe", error).into(),
                }
            }
            Ok(mut parked) => {
                // An error recurs, and is reported, when the rest is read.
                let moved = parked.fill_from_file(file, at);
                match (moved, parked.missing()) {
                    (Ok(_), 0) => return PendingRequest::ready(Ok(Reply::Data(parked.into()))),
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
                return PendingRequest::ready(Ok(Reply::Data(buf.into())));
            }
        }
        let inner = self.clone();
        let file = file.clone();
        let reading = file.start_read(buf, filled, at + filled as u64);
        PendingRequest::under_way(async move {
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
                count(data, PayloadRoute::DirectRead);
            }
            Ok(reply)
        })
    }

    /// Whether a file that grows is at least this long.
    fn has_grown_to(&self, end: u64) -> bool {
        let length = &self.storage.length;
        if end <= length.load(Ordering::Relaxed) {
            return true;
        }
        let now = fstat(&self.storage.file).map(|stat| u64::try_from(stat.st_size).unwrap_or(0));
        let now = now.unwrap_or(0);
        length.fetch_max(now, Ordering::Relaxed);
        end <= now
    }

    /// Whether a range is very likely in memory, so that moving it would not wait for a disk.
    /// Checks only a few bytes, which is cheaper than all pages of the range.
    fn is_cached(&self, file: &blockhaul_io::File, at: u64, len: usize) -> bool {
        let probe = |place: usize| {
            let mut byte = [0];
            matches!(file.try_read_at(&mut byte, at + place as u64), Ok(1))
        };
        let places =
            (0..len).step_by((len / 3).clamp(1, PROBE_STEP)).chain([len.saturating_sub(1)]);
        self.in_memory()
            || (self.tells_cached.load(Ordering::Relaxed) && places.into_iter().all(probe))
    }

    /// Reads what is available without waiting; errors recur when the rest is read.
    fn read_cached(&self, file: &blockhaul_io::File, at: u64, buf: &mut [u8]) -> usize {
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

    /// Reads with direct I/O, or through the page cache if that is refused.
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
                    if let Some(counters) = buf.counters() {
                        counters.add(PayloadRoute::DirectRead, bytes);
                    }
                }
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) if past.refused(&error) => break,
                result => return Err(self.read_failed(at + filled as u64, result.err())),
            }
        }
        self.read_rest(&self.storage.file, at, buf, filled).await
    }

    async fn read_rest(
        &self,
        file: &blockhaul_io::File,
        at: u64,
        buf: Buf,
        filled: usize,
    ) -> Outcome {
        let mut buf = buf;
        let mut filled = filled;
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

    /// Reads a file that grows as it is written. Layers read the rest of a block for a partial
    /// write.
    async fn read_growing(&self, at: u64, mut buf: Buf) -> Outcome {
        let mut filled = 0;
        while filled < buf.len() {
            let (result, same) = self.storage.file.read_at(buf, filled, at + filled as u64).await;
            buf = same;
            match result {
                Ok(0) => {
                    buf[filled..].fill(0);
                    break;
                }
                Ok(bytes) => filled += bytes,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.read_failed(at + filled as u64, Some(error))),
            }
        }
        Ok(Reply::Data(buf.into()))
    }

    /// Why a read stopped at `at`: the file may have become shorter, which direct I/O reports as an
    /// invalid offset.
    fn read_failed(&self, at: u64, error: Option<std::io::Error>) -> Error {
        let now = fstat(&self.storage.file).ok().and_then(|stat| u64::try_from(stat.st_size).ok());
        match (now, error) {
            (Some(now), _) if !self.storage.is_disk && !self.storage.grows && now < self.size => {
                let text = format!(
                    "the file was shrunk while in use: it has {now} bytes, and had {} when it was opened",
                    self.size
                );
                Error::new(Kind::Io, text)
            }
            (_, Some(error)) => Error::system(format!("cannot read at offset {at}"), error),
            (_, None) => Error::new(Kind::Io, format!("nothing to read at offset {at}")),
        }
    }

    /// Starts readahead for a range.
    pub(super) fn cache(self: &Arc<FileState>, at: u64, len: u64) -> PendingRequest {
        let (Some(len), false) = (NonZeroU64::new(len), self.in_memory()) else {
            return PendingRequest::ready(Ok(Reply::Done));
        };
        let file = self.storage.file.clone();
        // Starting readahead may itself wait for the file's block map or a full disk queue.
        let advised =
            blockhaul_io::offload(move || fadvise(&file, at, Some(len), Advice::WillNeed));
        PendingRequest::start(async move {
            // Only a hint: if it fails, reads are slower, not wrong.
            if let Ok(Err(errno)) = advised.await {
                log::debug!("reading ahead was refused: {errno}");
            }
            Ok(Reply::Done)
        })
    }
}
