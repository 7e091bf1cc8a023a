//! Makes completed writes durable, in the order that [`super`] describes.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use blockhaul_block::{Device, DeviceExt as _, Result};
use blockhaul_io::Data;

use super::writer::ImageWriter;
use crate::bytes::index;
use crate::qcow2::cache::Slice;
use crate::qcow2::header::AUTOCLEAR_AT;
use crate::qcow2::parts::ImageParts;
use crate::qcow2::words::bytes_of;
use crate::storage;

/// Slices that are written at a time.
const WRITES: usize = 16;
/// Longest write of slices that lie together, in bytes.
const WRITE_MAX: usize = 256 << 10;

/// Tables of an image could not be written when its last handle was closed.
static LOST: AtomicBool = AtomicBool::new(false);

/// Whether a closed image lacks accepted writes, because its tables could not be written.
pub fn data_was_lost() -> bool {
    LOST.load(Ordering::Relaxed)
}

impl ImageParts {
    /// Makes everything durable that had completed before.
    pub(in crate::qcow2) async fn flush(&self) -> Result<()> {
        let writer = self.writer()?;
        let before = writer.started.load(Ordering::SeqCst);
        writer.failed.check()?;
        let _turn = writer.flushing.lock().await;
        writer.failed.check()?;
        // One that began after this request serves it, too.
        if writer.ended.load(Ordering::SeqCst) > before {
            return Ok(());
        }
        let number = writer.started.fetch_add(1, Ordering::SeqCst) + 1;
        self.write_back(writer).await.inspect_err(|error| writer.failed.note(error))?;
        writer.ended.store(number, Ordering::SeqCst);
        Ok(())
    }

    /// Whether changes of tables are not in the file yet.
    pub(in crate::qcow2) fn is_behind(&self, writer: &ImageWriter) -> bool {
        self.image.cache.behind().0 || writer.has_waiting()
    }

    /// Writes tables if too many of them have changed.
    pub(in crate::qcow2) async fn make_room(&self) -> Result<()> {
        if self.image.cache.behind().1 { self.flush().await } else { Ok(()) }
    }

    async fn write_back(&self, writer: &ImageWriter) -> Result<()> {
        let batch = self.image.cache.take(false);
        if batch.is_empty() && !writer.has_waiting() {
            return self.sync().await;
        }
        let written = async {
            self.write_slices(&batch.early).await?;
            self.sync().await?;
            self.write_slices(&batch.late).await?;
            if batch.late.is_empty() { Ok(()) } else { storage::flush(&self.file).await }
        };
        if let Err(error) = written.await {
            self.image.cache.put_back(batch);
            return Err(error);
        }
        let mut batch = batch;
        writer.retire(std::mem::take(&mut batch.freed));
        self.image.cache.written(batch);
        self.apply_freed(writer).await;
        // A refcount that is too high is no harm: no flush.
        let lowered = self.image.cache.take(true);
        match self.write_slices(&lowered.early).await {
            Ok(()) => self.image.cache.written(lowered),
            Err(error) => {
                self.image.cache.put_back(lowered);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Flushes the files.
    async fn sync(&self) -> Result<()> {
        if self.is_external {
            storage::flush(&self.data).await?;
        }
        storage::flush(&self.file).await
    }

    /// Flushes between two writes of tables.
    pub(super) async fn barrier(&self, writer: &ImageWriter) -> Result<()> {
        writer.failed.check()?;
        storage::flush(&self.file).await.inspect_err(|error| writer.failed.note(error))
    }

    /// Writes slices, ascending.
    async fn write_slices(&self, slices: &[(u64, Slice)]) -> Result<()> {
        let mut flying = VecDeque::new();
        let mut failure = None;
        let size = self.file.facts().size;
        let most = WRITE_MAX.min(index(storage::piece(&self.file))).max(index(self.image.slice));
        let joins = |one: &(u64, Slice), next: &(u64, Slice)| one.0 + self.image.slice == next.0;
        for run in slices.chunk_by(joins) {
            for part in run.chunks((most / index(self.image.slice)).max(1)) {
                let Some(&(at, _)) = part.first() else { continue };
                let mut bytes: Vec<u8> =
                    part.iter().flat_map(|(_, slice)| bytes_of(slice)).collect();
                // The last table of a device may end with it.
                bytes.truncate(index(size.saturating_sub(at)));
                if flying.len() >= WRITES {
                    failure = failure.or(next(&mut flying).await);
                }
                flying.push_back(self.file.write(at, Data::copy_of(&bytes)));
            }
        }
        while !flying.is_empty() {
            failure = failure.or(next(&mut flying).await);
        }
        failure.map_or(Ok(()), Err)
    }

    /// Prepares the image for its first change: features that this program does not keep right are
    /// cleared.
    pub(in crate::qcow2) async fn begin(&self) -> Result<()> {
        let writer = self.writer()?;
        if writer.has_begun.load(Ordering::Acquire) {
            return Ok(());
        }
        let _turn = writer.flushing.lock().await;
        if let Some(known) = writer.autoclear
            && !writer.has_begun.load(Ordering::Acquire)
        {
            storage::write(&self.file, AUTOCLEAR_AT, &known.to_be_bytes()).await?;
            self.barrier(writer).await?;
        }
        writer.has_begun.store(true, Ordering::Release);
        Ok(())
    }
}

/// Waits for the oldest write; its error.
async fn next<F: Future<Output = Result<()>>>(
    flying: &mut VecDeque<F>,
) -> Option<blockhaul_block::Error> {
    flying.pop_front()?.await.err()
}

impl ImageWriter {
    /// Whether requests may change the image without [`ImageParts::begin`].
    pub(in crate::qcow2) fn has_begun(&self) -> bool {
        self.has_begun.load(Ordering::Acquire)
    }

    /// The last handle writes nothing more when it is closed, because a change has failed.
    pub(in crate::qcow2) fn give_up(&self) {
        self.gave_up.store(true, Ordering::SeqCst);
    }

    /// A handle was made.
    pub(in crate::qcow2) fn enter(&self) {
        self.users.fetch_add(1, Ordering::SeqCst);
    }
}

impl Drop for ImageParts {
    /// Writes the changed tables when the last handle is closed.
    fn drop(&mut self) {
        let Some(writer) = &self.image.writer else { return };
        if writer.users.fetch_sub(1, Ordering::SeqCst) != 1
            || writer.gave_up.load(Ordering::SeqCst)
            || !self.is_behind(writer)
        {
            return;
        }
        let image = self.image.clone();
        let is_external = self.is_external;
        let file: Arc<dyn Device> = self.file.clone();
        let data = self.data.clone();
        let pieces = self.pieces.clone();
        let packed = self.packed.clone();
        let worker = self.worker.clone();
        writer.enter();
        let parts =
            ImageParts { image, file, data, is_external, backing: None, pieces, packed, worker };
        let spawned = self.worker.spawn_last(move || async move {
            if let Err(error) = parts.flush().await {
                // Another attempt would not tell what is lost.
                if let Some(writer) = &parts.image.writer {
                    writer.gave_up.store(true, Ordering::SeqCst);
                }
                LOST.store(true, Ordering::Relaxed);
                log::error!("qcow2: written data is lost: {error}");
            }
        });
        if !spawned {
            LOST.store(true, Ordering::Relaxed);
            log::error!("qcow2: the program ended before all tables were written");
        }
    }
}
