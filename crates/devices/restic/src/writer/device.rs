//! The target of a copy: a disk that becomes a snapshot when it is flushed.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use blockhaul_block::{
    BASE_ALLOCATION, Can, Device, Error, Facts, Kind, Op, PendingRequest, Reply, Request,
    RequestFlags,
};
use blockhaul_io::BlockingPool;
use jiff::Timestamp;

use crate::digest::Digest;
use crate::fault::Result;
use crate::writer::disk::{DiskImage, threads};
use crate::writer::person::Person;
use crate::writer::session::BackupSession;
use crate::writer::snapshot_text::SnapshotFacts;
use crate::writer::tree_text::FileNode;

/// A disk that is backed up, and its snapshot.
pub(crate) struct DiskBackup {
    pub(crate) session: Arc<BackupSession>,
    pub(crate) disk: DiskImage,
    /// The snapshot that a flush makes. None: a flush makes blobs durable, and their owner makes the snapshot.
    pub(crate) snapshot: Option<SnapshotDuty>,
    /// Whether the disk has changed since the last snapshot.
    pub(crate) has_changed: AtomicBool,
    /// One flush at a time.
    pub(crate) turn: Mutex<()>,
}

/// A snapshot of one disk.
pub(crate) struct SnapshotDuty {
    /// The path in the snapshot.
    pub(crate) path: String,
    pub(crate) facts: SnapshotFacts,
}

/// A handle to a disk that is backed up.
#[derive(Clone)]
pub(crate) struct BackupDevice {
    facts: Arc<Facts>,
    /// Once the backup has begun.
    backup: Arc<OnceLock<DiskBackup>>,
    pool: Arc<BlockingPool>,
}

impl DiskBackup {
    /// Makes the snapshot, unless it was made and nothing has changed. Blocks.
    fn publish(&self) -> Result<()> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        if !self.has_changed.swap(false, Ordering::Relaxed) {
            return Ok(());
        }
        let published = self.disk.complete(|content| match &self.snapshot {
            None => self.session.commit(),
            Some(snapshot) => self.publish_as(snapshot, content),
        });
        if published.is_err() {
            self.has_changed.store(true, Ordering::Relaxed);
        }
        published
    }

    fn publish_as(&self, snapshot: &SnapshotDuty, content: &[Digest]) -> Result<()> {
        let SnapshotDuty { path, facts } = snapshot;
        let Person { uid, gid, .. } = Person::here();
        let (size, time) = (self.disk.size(), Timestamp::now());
        let node = FileNode { size, content, time, owner: [uid, gid] };
        let id = self.session.publish(&[(path, node)], facts)?;
        log::info!("restic: snapshot {} has {path}", id.short());
        Ok(())
    }
}

impl BackupDevice {
    /// A disk of this many bytes in chunks of this length, whose backup begins later.
    pub(crate) fn new(name: &str, size: u64, chunk: u64) -> BackupDevice {
        let mut facts = Facts::new(name, size);
        facts.can = Can::WRITE | Can::ZERO | Can::FLUSH | Can::EXTENTS;
        facts.contexts = vec![BASE_ALLOCATION.to_owned()];
        facts.one_handle = true;
        facts.flush_publishes = true;
        facts.flush_failures_stay = true;
        // Chunks are at most 16 MiB, and powers of two.
        let chunk = u32::try_from(chunk).unwrap_or(1 << 20);
        facts.block.preferred = chunk;
        facts.rewrite_unit = chunk;
        let pool = BlockingPool::parallel("restic", threads());
        BackupDevice { facts: Arc::new(facts), backup: Arc::default(), pool: Arc::new(pool) }
    }

    /// Begins the backup.
    pub(crate) fn begin(&self, backup: DiskBackup) {
        // It begins once.
        let _ = self.backup.set(backup);
    }

    /// The digests of all chunks, which are saved. Blocks.
    ///
    /// # Errors
    /// The repository fails.
    pub(crate) fn digests(&self) -> Result<Vec<Digest>> {
        let backup = self.backup.get().ok_or_else(unbegun)?;
        backup.disk.complete(|content| Ok(content.to_vec()))
    }

    /// Runs `work` on a thread that may block.
    fn start(
        &self,
        work: impl FnOnce(&DiskBackup) -> Result<Reply> + Send + 'static,
    ) -> PendingRequest {
        let (completer, pending) = PendingRequest::completer();
        let backup = self.backup.clone();
        self.pool.run(move || {
            let outcome = match backup.get() {
                Some(backup) => work(backup).map_err(Error::from),
                None => Err(unbegun()),
            };
            // Before the reply: the drop of the last handle, which follows, removes the lock.
            drop(backup);
            completer.complete(outcome);
        });
        pending
    }

    fn change(&self, at: u64, len: u64, data: Option<blockhaul_io::Data>) -> PendingRequest {
        self.start(move |backup| {
            let bytes = data.as_ref().map(blockhaul_io::Data::bytes);
            let written = backup.disk.write(at, len, bytes);
            // Afterwards: a snapshot that is being made may be without it.
            backup.has_changed.store(true, Ordering::Relaxed);
            written.map(|()| Reply::Done)
        })
    }
}

fn unbegun() -> Error {
    Error::new(Kind::Invalid, "the backup has not begun")
}

impl Device for BackupDevice {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        let Request { op, at, len, flags } = request;
        if at.checked_add(len).is_none_or(|end| end > self.facts.size) {
            return Error::new(Kind::Invalid, "beyond the end").into();
        }
        match op {
            Op::Write(data) => self.change(at, len, Some(data)),
            Op::Zero => self.change(at, len, None),
            Op::Flush => self.start(|backup| backup.publish().map(|()| Reply::Done)),
            Op::Read(room) => self.start(move |backup| {
                let mut buf = room.into_buf();
                backup.disk.read(at, &mut buf)?;
                Ok(Reply::Data(buf.into()))
            }),
            Op::Extents(contexts) => self.start(move |backup| {
                let mut extents = backup.disk.extents(at, len);
                if flags.contains(RequestFlags::ONE_EXTENT) {
                    extents.first_only();
                }
                Ok(Reply::Extents(contexts.iter().map(|_| extents.clone()).collect()))
            }),
            Op::Trim | Op::Cache => {
                Error::new(Kind::Unsupported, "backups have no such request").into()
            }
        }
    }
}
