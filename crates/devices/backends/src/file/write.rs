//! Writes: through the page cache, on the worker if they are short, or with direct I/O.

use std::sync::Arc;

use blockhaul_block::{Error, Kind, Outcome, PendingRequest, Reply, Result};
use blockhaul_io::{Data, ParkedPayload, PayloadRoute, WRITE_NOW_MAX};

use super::inode::WORTH_WAITING;
use super::storage::{FileState, INLINE_MAX, WriteRoute, count};

impl FileState {
    pub(super) fn write(
        self: &Arc<FileState>,
        at: u64,
        data: Data,
        durable: bool,
    ) -> PendingRequest {
        if durable && let Err(error) = self.syncs.check() {
            return error.into();
        }
        if self.past(at, data.len() as u64).is_some() {
            let inner = self.clone();
            return PendingRequest::start(async move { inner.write_past(at, data, durable).await });
        }
        let (_, direct) = self.route(at, data.len() as u64);
        if direct || self.changing.is_none() {
            return self.write_by(at, data, durable);
        }
        let inner = self.clone();
        PendingRequest::start(async move {
            let _turn = inner.turn(WriteRoute::Cache, at, data.len() as u64).await;
            inner.write_by(at, data, durable).await
        })
    }

    /// Writes by the route of the range; through the page cache when it has its turn.
    fn write_by(self: &Arc<FileState>, at: u64, data: Data, durable: bool) -> PendingRequest {
        let (_, direct) = self.route(at, data.len() as u64);
        let short = if self.in_memory() { INLINE_MAX } else { WRITE_NOW_MAX };
        let inline = !direct && data.len() <= short;
        if !inline || data.len() < WORTH_WAITING {
            return self.start_write(at, data, durable, inline);
        }
        if let Some(_writing) = self.inode.try_lock() {
            return self.start_write(at, data, durable, inline);
        }
        let inner = self.clone();
        PendingRequest::start(async move {
            let writing = inner.inode.lock().await;
            let pending = inner.start_write(at, data, durable, inline);
            drop(writing);
            pending.await
        })
    }

    /// Writes on the worker (`inline`) or through the driver.
    fn start_write(
        self: &Arc<FileState>,
        at: u64,
        data: Data,
        durable: bool,
        inline: bool,
    ) -> PendingRequest {
        let (file, direct) = self.route(at, data.len() as u64);
        let data = match (direct, data.take_parked()) {
            (false, Ok(parked)) => return self.write_parked(at, parked, inline, durable),
            (true, Ok(parked)) => Data::from(parked),
            (_, Err(data)) => data,
        };
        if let Err(error) = data.load() {
            return write_failed(error).into();
        }
        if inline {
            if let Err(error) = file.write_all_now(data.bytes(), at) {
                return write_failed(error).into();
            }
            if !durable {
                return PendingRequest::ready(Ok(Reply::Done));
            }
            // Its memory is not needed any more.
            drop(data);
            let inner = self.clone();
            return PendingRequest::start(async move { inner.sync().await.map(|()| Reply::Done) });
        }
        let inner = self.clone();
        let file = file.clone();
        if direct
            && !durable
            && is_aligned(&data, self.storage.align)
            && let Some(turn) = self.turn_now(WriteRoute::Past, at, data.len() as u64)
        {
            let writing = file.start_write(data.clone(), 0, at);
            return PendingRequest::finishing(async move {
                let _turn = turn;
                match writing.await {
                    Ok(written) if written == data.len() => {}
                    Ok(0) => return Err(write_failed(std::io::ErrorKind::WriteZero.into())),
                    // Rare, so boxed to keep it out of the future of each write.
                    Ok(written) => Box::pin(file.write_rest_at(data.clone(), written, at))
                        .await
                        .map_err(write_failed)?,
                    Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {
                        let again = Box::pin(file.write_all_at(data.clone(), at));
                        again.await.map_err(write_failed)?;
                    }
                    Err(error) => return Err(write_failed(error)),
                }
                count(&data, PayloadRoute::DirectWrite);
                Ok(Reply::Done)
            });
        }
        PendingRequest::start(async move {
            let align = inner.storage.align;
            if direct {
                let aligned = inner.aligned(data.clone(), align).await?;
                let _turn = inner.turn(WriteRoute::Past, at, data.len() as u64).await;
                file.write_all_at(aligned, at).await.map_err(write_failed)?;
                count(&data, PayloadRoute::DirectWrite);
            } else {
                file.write_all_at(data, at).await.map_err(write_failed)?;
            }
            if durable {
                inner.sync().await?;
            }
            Ok(Reply::Done)
        })
    }

    /// Writes with direct I/O, or through the page cache if that is refused.
    async fn write_past(&self, at: u64, data: Data, durable: bool) -> Outcome {
        data.load().map_err(write_failed)?;
        let mut done = false;
        if let Some(past) = self.past(at, data.len() as u64) {
            let aligned = self.aligned(data.clone(), past.align).await?;
            let _turn = self.turn(WriteRoute::Past, at, data.len() as u64).await;
            match past.file.write_all_at(aligned, at).await {
                Ok(()) => {
                    done = true;
                    count(&data, PayloadRoute::DirectWrite);
                }
                Err(error) if past.refused(&error) => {}
                Err(error) => return Err(write_failed(error)),
            }
        }
        if !done {
            let _turn = self.turn(WriteRoute::Cache, at, data.len() as u64).await;
            self.storage.file.write_all_at(data, at).await.map_err(write_failed)?;
        }
        if durable {
            self.sync().await?;
        }
        Ok(Reply::Done)
    }

    /// Moves a payload from its pipe into the page cache.
    fn write_parked(
        self: &Arc<FileState>,
        at: u64,
        mut parked: ParkedPayload,
        inline: bool,
        durable: bool,
    ) -> PendingRequest {
        let inner = self.clone();
        let file = self.storage.file.clone();
        let moved = if inline {
            let moved = parked.drain_to_file(&file, at);
            if !durable || moved.is_err() {
                return PendingRequest::ready(moved.map(|()| Reply::Done).map_err(write_failed));
            }
            None
        } else {
            Some(blockhaul_io::offload(move || parked.drain_to_file(&file, at)))
        };
        PendingRequest::start(async move {
            if let Some(moving) = moved {
                let moved = moving.await;
                moved
                    .map_err(|lost| {
                        Error::new(Kind::Io, "cannot write").because(lost).before_flush()
                    })?
                    .map_err(write_failed)?;
            }
            if durable {
                inner.sync().await?;
            }
            Ok(Reply::Done)
        })
    }

    /// The same bytes in memory suitable for direct I/O.
    async fn aligned(&self, data: Data, align: u32) -> Result<Data> {
        if is_aligned(&data, align) {
            return Ok(data);
        }
        let room = self.scratch.reserve(data.len()).await.map_err(|error| {
            let text = "no aligned memory for the write";
            Error::new(Kind::NoMemory, text).because(error).before_flush()
        })?;
        let mut buf = room.into_buf();
        buf.copy_from_slice(data.bytes());
        Ok(buf.into())
    }
}

/// Whether a payload is in memory suitable for direct I/O.
fn is_aligned(data: &Data, align: u32) -> bool {
    data.bytes().as_ptr().addr().is_multiple_of(align as usize)
}

pub(super) fn write_failed(error: std::io::Error) -> Error {
    Error::system("cannot write", error).before_flush()
}
