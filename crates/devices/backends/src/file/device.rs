//! Requests on an open file.
//!
//! Short operations are done directly on the worker: reads from the page cache, small buffered
//! writes, anything on a file system in memory. The rest goes through the worker's driver.

use std::sync::Arc;

use blockhaul_block::{
    Can, Device, Error, Facts, FileRange, LeaseAccess, Op, PendingRequest, Reply, Request,
    RequestFlags, Result,
};
use rustix::fs::fstat;

use super::extents;
use super::storage::{FileState, FileStorage, WriteRoute};

/// A file or block device that serves requests.
pub(super) struct FileDevice {
    facts: Arc<Facts>,
    inner: Arc<FileState>,
}

impl FileDevice {
    pub(super) fn new(mut facts: Facts, storage: FileStorage) -> FileDevice {
        facts.flush_failures_stay = true;
        let inner = FileState::new(&facts, storage);
        FileDevice { facts: Arc::new(facts), inner: Arc::new(inner) }
    }

    /// Identifies an open file: device and inode.
    pub(super) fn identity(&self) -> Result<(u64, u64)> {
        let stat = fstat(&self.inner.storage.file)
            .map_err(|errno| Error::system("cannot get the status of the file", errno.into()))?;
        Ok((stat.st_dev, stat.st_ino))
    }

    #[cfg(test)]
    pub(super) fn inner(&self) -> &FileState {
        &self.inner
    }
}

impl Device for FileDevice {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        let Request { op, at, len, flags } = request;
        let inner = &self.inner;
        match op {
            Op::Read(room) => inner.read(at, room),
            Op::Write(data) => inner.write(at, data, flags.contains(RequestFlags::FUA)),
            Op::Zero | Op::Trim => {
                let inner = inner.clone();
                let trim = matches!(op, Op::Trim);
                let durable = flags.contains(RequestFlags::FUA);
                PendingRequest::start(async move {
                    if durable {
                        inner.syncs.check()?;
                    }
                    let _turn = inner.turn(WriteRoute::Cache, at, len).await;
                    let changed = if trim {
                        inner.trim(at, len).await
                    } else {
                        inner.zero(at, len, flags).await
                    };
                    inner.known_data.hole(at..at.saturating_add(len));
                    changed.map_err(Error::before_flush)?;
                    if durable {
                        inner.sync().await?;
                    }
                    Ok(Reply::Done)
                })
            }
            Op::Flush => {
                let inner = inner.clone();
                PendingRequest::start(async move { inner.sync().await.map(|()| Reply::Done) })
            }
            Op::Cache => inner.cache(at, len),
            Op::Extents(contexts) => extents::answer(inner, at, len, contexts.count(), flags),
        }
    }

    fn file_at(&self, at: u64, len: u64, access: LeaseAccess) -> Option<FileRange> {
        let writable = self.facts.can.contains(Can::WRITE);
        let len = len.min(self.inner.size.checked_sub(at)?);
        let ours = len > 0 && (access == LeaseAccess::Read || writable);
        // The kernel can reflink and copy ranges of files opened for direct I/O, too, and reflinks
        // bypass the page cache.
        let storage = &self.inner.storage;
        let file = storage.buffered.as_ref().unwrap_or(&storage.file);
        let past_cache = storage.past.is_some() || storage.align > 1;
        ours.then(|| FileRange { file: file.clone(), at, len, past_cache })
    }
}
