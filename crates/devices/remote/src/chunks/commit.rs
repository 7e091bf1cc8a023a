//! Changes of the manifest by its writer: flushes, renewals of the lease, closing.

use std::sync::Arc;
use std::time::Duration;

use blockhaul_block::{Error, Kind, Result};
use futures_util::stream::{self, StreamExt as _, TryStreamExt as _};
use object_store::UpdateVersion;

use crate::chunks::disk::ChunkDisk;
use crate::chunks::folder::ObjectFolder;
use crate::chunks::layout::{
    ChunkManifest, ChunkObject, ChunkVersion, MANIFEST, MANIFEST_MAX, page_bytes, page_name,
};
use crate::chunks::lease;
use crate::chunks::table::IndexChange;
use crate::runtime;

/// Attempts to write a manifest whose earlier attempt may have succeeded unnoticed.
const ATTEMPTS: u32 = 4;

/// The manifest as this program has read or written it, and its version at the service.
pub(crate) struct OpenManifest {
    pub(crate) manifest: ChunkManifest,
    /// None: there is no manifest yet.
    pub(crate) version: Option<UpdateVersion>,
    /// A moment at which this program had the disk, once it has written the manifest.
    pub(crate) proven: Duration,
    /// The latest renewal that has failed, and when it ended.
    failure: Option<(Duration, Error)>,
}

impl OpenManifest {
    /// A manifest that was read, or one that is about to be made.
    pub(crate) fn new(manifest: ChunkManifest, version: Option<UpdateVersion>) -> OpenManifest {
        OpenManifest { manifest, version, proven: Duration::ZERO, failure: None }
    }

    /// Replaces the manifest. If the response gets lost, what is there then decides.
    ///
    /// # Errors
    /// [`Kind::InUse`]: another writer has the disk. Others: the manifest is the earlier one, or the new one.
    pub(crate) async fn replace(
        &mut self,
        folder: &dyn ObjectFolder,
        next: ChunkManifest,
    ) -> Result<()> {
        let begun = lease::now();
        for _ in 0..ATTEMPTS {
            let bytes = next.to_bytes().into();
            let written = folder.replace(MANIFEST, bytes, self.version.as_ref()).await;
            if let Ok(Some(version)) = written {
                self.become_owner(next, version, begun);
                return Ok(());
            }
            let failed = written.err();
            let found = match folder.get(MANIFEST, MANIFEST_MAX).await {
                Ok(found) => found,
                Err(error) => return Err(failed.unwrap_or(error)),
            };
            let Some(found) = found else { return Err(failed.unwrap_or_else(|| replaced(None))) };
            let manifest = ChunkManifest::parse(&found.bytes)?;
            if manifest == next {
                self.become_owner(next, found.version, begun);
                return Ok(());
            }
            if !self.is_own(&manifest, &next) {
                return Err(failed.unwrap_or_else(|| replaced(manifest.holder)));
            }
            if let Some(error) = failed {
                return Err(error);
            }
            // An earlier attempt, whose response got lost.
            self.version = Some(found.version);
        }
        let text = "the service refuses each new manifest";
        Err(Error::new(Kind::Io, text).with_remedy("try again later"))
    }

    fn become_owner(&mut self, manifest: ChunkManifest, version: UpdateVersion, moment: Duration) {
        *self = OpenManifest { proven: moment, ..OpenManifest::new(manifest, Some(version)) };
    }

    /// Whether this writer, which is about to write `next`, has written the manifest that was found. A holder has a
    /// random number.
    fn is_own(&self, found: &ChunkManifest, next: &ChunkManifest) -> bool {
        let was_open = self.manifest.writer == next.writer && found.holder == self.manifest.holder;
        found.id == next.id
            && found.writer == next.writer
            && (found.holder == next.holder || was_open)
    }
}

/// Notes the end of a flush, also of one whose task ends without a result.
struct FlushGuard<'a> {
    disk: &'a ChunkDisk,
    failed: Option<Error>,
}

impl Drop for FlushGuard<'_> {
    fn drop(&mut self) {
        if let Some(error) = &self.failed {
            self.disk.failed_flush.note(error);
            self.disk.table().is_littered = true;
        }
    }
}

fn replaced(holder: Option<String>) -> Error {
    let who = holder.map(|holder| format!(" ({holder})")).unwrap_or_default();
    let text =
        format!("another writer has taken the disk over{who}: this one cannot write any more");
    Error::new(Kind::InUse, text).with_remedy(
        "open the disk again, once the other writer has closed it; what was not flushed is lost",
    )
}

impl ChunkDisk {
    /// Makes all writes that have completed durable.
    ///
    /// # Errors
    /// An object cannot be written, another writer has the disk, or an earlier flush has failed.
    pub(crate) async fn flush(self: &Arc<ChunkDisk>) -> Result<()> {
        let turn = self.flushes.lock().await;
        self.check()?;
        self.failed_flush.check()?;
        let unfinished = Error::new(Kind::Io, "a flush ended without a result (a bug)");
        let mut guard = FlushGuard { disk: self, failed: Some(unfinished) };
        let committed = self.commit_as_owner().await;
        guard.failed = committed.as_ref().err().cloned();
        drop(guard);
        drop(turn);
        self.remove(committed?);
        Ok(())
    }

    /// Returns the objects that are not needed any more, once it is clear that the disk is still this writer's.
    async fn commit_as_owner(self: &Arc<ChunkDisk>) -> Result<Vec<String>> {
        self.noted(self.folder.holds_lock().await)?;
        let superseded = self.commit().await?;
        // A flush of nothing has written no manifest.
        self.prove_lease().await?;
        Ok(superseded)
    }

    /// Writes what has changed. Returns the objects that are not needed any more.
    async fn commit(self: &Arc<ChunkDisk>) -> Result<Vec<String>> {
        let dirty = self.table().dirty_buffers();
        let each = |(chunk, buffer)| async move { self.write_back(chunk, &buffer).await };
        self.carry_out(dirty, each).await?;
        let IndexChange { pages, mut superseded } = self.table().index_change();
        if pages.is_empty() {
            return Ok(superseded);
        }
        let each =
            |(page, entries)| async move { Ok((page, self.send_page(page, entries).await?)) };
        let sent = self.carry_out(pages, each).await?;
        let mut open = self.manifest.lock().await;
        let mut next = open.manifest.clone();
        next.generation += 1;
        for (page, version) in sent {
            let earlier = match version {
                ChunkVersion::HOLE => next.pages.remove(&page),
                version => next.pages.insert(page, version),
            };
            superseded.extend(earlier.map(|earlier| page_name(page, earlier)));
        }
        self.publish(&mut open, next).await?;
        Ok(superseded)
    }

    /// Carries out work for each of these, some at a time, and all to their ends: requests that are dropped may
    /// arrive nevertheless.
    async fn carry_out<T, U, F: Future<Output = Result<U>>>(
        &self,
        items: Vec<T>,
        work: impl FnMut(T) -> F,
    ) -> Result<Vec<U>> {
        let done = stream::iter(items).map(work).buffer_unordered(self.connections);
        done.collect::<Vec<_>>().await.into_iter().collect()
    }

    /// Writes a page of the index; a page of holes has no object.
    async fn send_page(&self, page: u64, entries: Vec<ChunkVersion>) -> Result<ChunkVersion> {
        if entries.iter().all(|entry| *entry == ChunkVersion::HOLE) {
            return Ok(ChunkVersion::HOLE);
        }
        let version = self.table().next_version()?;
        let bytes = page_bytes(&self.id, page, &entries);
        self.folder.put(&page_name(page, version), bytes.into()).await?;
        Ok(version)
    }

    async fn publish(&self, open: &mut OpenManifest, next: ChunkManifest) -> Result<()> {
        self.noted(open.replace(self.folder.as_ref(), next).await)?;
        self.lease.prove(open.proven);
        Ok(())
    }

    /// A result after which the disk cannot be used if it is that another writer has it.
    fn noted<T>(&self, result: Result<T>) -> Result<T> {
        if let Err(error) = &result
            && error.kind() == Kind::InUse
        {
            self.table().failed.get_or_insert(error.clone());
        }
        result
    }

    /// Whether what this program knows of the disk is surely not old: a reader sees the disk as it was.
    pub(crate) fn is_current(&self) -> bool {
        self.read_generation.is_some() || self.lease.holds()
    }

    /// Renews the lease if it may have run out. What was found out before is not old then.
    ///
    /// # Errors
    /// Those of [`renew`](ChunkDisk::renew).
    pub(crate) async fn prove_lease(&self) -> Result<()> {
        self.check()?;
        if self.is_current() {
            return Ok(());
        }
        let begun = lease::now();
        let mut open = self.manifest.lock().await;
        if self.is_current() {
            return self.check();
        }
        // All that have waited for one attempt fail with it.
        if let Some((ended, error)) = &open.failure
            && *ended >= begun
        {
            return Err(error.clone());
        }
        let renewed = self.renew_open(&mut open).await;
        open.failure = renewed.as_ref().err().map(|error| (lease::now(), error.clone()));
        renewed
    }

    /// Renews the lease.
    ///
    /// # Errors
    /// The manifest cannot be written, or another writer has the disk.
    pub(crate) async fn renew(&self) -> Result<()> {
        let mut open = self.manifest.lock().await;
        self.renew_open(&mut open).await
    }

    async fn renew_open(&self, open: &mut OpenManifest) -> Result<()> {
        self.check()?;
        let begun = lease::now();
        if self.noted(self.folder.holds_lock().await)? {
            self.lease.prove(begun);
            return Ok(());
        }
        let next = ChunkManifest { renewal: open.manifest.renewal + 1, ..open.manifest.clone() };
        self.publish(open, next).await
    }

    /// Waits for all requests, flushes, waits until the objects that are not needed are removed, and gives the disk back
    /// to other writers.
    pub(crate) async fn close(self: &Arc<ChunkDisk>) {
        if self.check().is_err() {
            return;
        }
        self.closing.notify_one();
        let _last = self.requests.write().await;
        if let Err(error) = self.flush().await {
            log::warn!("{error}");
        }
        // Removals prove the lease, for which the manifest must be free.
        let _ended = self.removals.write().await;
        let mut open = self.manifest.lock().await;
        if self.check().is_err() {
            return;
        }
        let is_clean = !self.table().is_littered;
        let renewal = open.manifest.renewal + 1;
        let next = ChunkManifest { renewal, is_clean, holder: None, ..open.manifest.clone() };
        if let Err(error) = self.publish(&mut open, next).await {
            log::warn!("the disk counts as open for some time: {error}");
        }
        let closed = Error::new(Kind::ShuttingDown, "the disk was closed");
        self.table().failed.get_or_insert(closed);
    }

    /// Removes objects that no index names.
    pub(crate) fn remove(self: &Arc<ChunkDisk>, names: Vec<String>) {
        if names.is_empty() {
            return;
        }
        let disk = self.clone();
        self.start_removal(async move {
            let each = |name: String| disk.remove_one(name);
            let names = stream::iter(names).map(Ok);
            let removed = names.try_for_each_concurrent(disk.connections, each).await;
            if let Err(error) = removed {
                disk.note_litter(&error);
            }
        });
    }

    /// Notes that objects remain. A writer that has lost the disk leaves them to the next one.
    fn note_litter(&self, error: &Error) {
        if self.check().is_ok() {
            log::warn!("objects that are not needed remain, and are removed later: {error}");
        }
        self.table().is_littered = true;
    }

    /// Starts a removal, for which closing waits.
    fn start_removal(self: &Arc<ChunkDisk>, removal: impl Future<Output = ()> + Send + 'static) {
        let started = self.removals.clone().try_read_owned().is_ok_and(|under_way| {
            let guarded = async move {
                removal.await;
                drop(under_way);
            };
            runtime::spawn(guarded).is_ok()
        });
        if !started {
            self.table().is_littered = true;
        }
    }

    /// Removes an object while the disk is surely this writer's: a disk that others have put there since may name it.
    ///
    /// # Errors
    /// Another writer has the disk, or may have it. An object that cannot be removed is none.
    async fn remove_one(&self, name: String) -> Result<()> {
        self.noted(self.folder.holds_lock().await)?;
        self.prove_lease().await?;
        if let Err(error) = self.folder.remove(&name).await {
            log::warn!("{name} remains, and is removed later: {error}");
            self.table().is_littered = true;
        }
        Ok(())
    }

    /// Removes the objects of earlier writers that the index of `manifest` with these `versions` does not name. There
    /// may be some although the disk `was_clean`: those of a replaced writer can arrive at any time. Closing the disk
    /// ends the search; if the disk was not clean, the next writer searches again.
    pub(crate) fn remove_litter(
        self: &Arc<ChunkDisk>,
        manifest: ChunkManifest,
        versions: Vec<ChunkVersion>,
        was_clean: bool,
    ) {
        let disk = self.clone();
        self.start_removal(async move {
            let each = |name: String| {
                let is_litter = is_litter(&name, &manifest, &versions);
                let disk = &disk;
                async move { if is_litter { disk.remove_one(name).await } else { disk.check() } }
            };
            let names = disk.folder.names().take_until(disk.search_end(was_clean));
            match names.try_for_each_concurrent(disk.connections, each).await {
                // The names of others stay as they are, and those who may not list them need not.
                Err(error) if was_clean || error.kind() == Kind::Invalid => {
                    log::debug!("the search for objects of earlier writers has ended: {error}");
                }
                Err(error) => disk.note_litter(&error),
                Ok(()) => {}
            }
        });
    }

    /// Waits until the disk is closed. The search that ends then has not seen all names.
    async fn search_end(&self, was_clean: bool) {
        self.closing.notified().await;
        self.table().is_littered |= !was_clean;
    }
}

/// Whether an object of an earlier writer is named neither by the manifest nor by the index.
fn is_litter(name: &str, manifest: &ChunkManifest, versions: &[ChunkVersion]) -> bool {
    match ChunkObject::parse(name) {
        Some(object) if object.version().writer() >= manifest.writer => false,
        Some(ChunkObject::Chunk(chunk, version)) => {
            let chunk = usize::try_from(chunk).unwrap_or(usize::MAX);
            versions.get(chunk) != Some(&version)
        }
        Some(ChunkObject::Page(page, version)) => manifest.pages.get(&page) != Some(&version),
        None => false,
    }
}
