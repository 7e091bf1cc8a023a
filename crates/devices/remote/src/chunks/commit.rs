//! Changes of the manifest by its writer: flushes, renewals of the lease, closing.

use std::sync::Arc;

use blockhaul_block::{Error, Kind, Result};
use futures_util::stream::{self, StreamExt as _, TryStreamExt as _};
use object_store::UpdateVersion;

use crate::chunks::disk::ChunkDisk;
use crate::chunks::folder::ObjectFolder;
use crate::chunks::layout::{
    ChunkManifest, ChunkObject, ChunkVersion, MANIFEST, MANIFEST_MAX, page_bytes, page_name,
};
use crate::chunks::table::IndexChange;
use crate::runtime;

/// Attempts to write a manifest whose earlier attempt may have succeeded unnoticed.
const ATTEMPTS: u32 = 4;

/// The manifest as this program has written it, and its version at the service.
pub(crate) struct OpenManifest {
    pub(crate) manifest: ChunkManifest,
    pub(crate) version: UpdateVersion,
}

impl OpenManifest {
    /// Replaces the manifest. The lease is that of this writer until others have replaced it.
    ///
    /// # Errors
    /// [`Kind::InUse`]: another writer has the disk. Others: the manifest is the earlier one, or the new one.
    pub(crate) async fn replace(
        &mut self,
        folder: &dyn ObjectFolder,
        next: ChunkManifest,
    ) -> Result<()> {
        for _ in 0..ATTEMPTS {
            let bytes = next.to_bytes().into();
            if let Some(version) = folder.replace(MANIFEST, bytes, Some(&self.version)).await? {
                *self = OpenManifest { manifest: next, version };
                return Ok(());
            }
            let Some(found) = folder.get(MANIFEST, MANIFEST_MAX).await? else {
                return Err(replaced(None));
            };
            let manifest = ChunkManifest::parse(&found.bytes)?;
            if manifest.id != next.id || manifest.writer != next.writer {
                return Err(replaced(manifest.holder));
            }
            // An attempt whose response got lost.
            self.version = found.version;
            if manifest == next {
                self.manifest = next;
                return Ok(());
            }
        }
        let text = "the service refuses each new manifest";
        Err(Error::new(Kind::Io, text).with_remedy("try again later"))
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
        let flush = self.flushes.lock().await;
        self.check()?;
        self.failed_flush.check()?;
        let committed = self.commit().await;
        drop(flush);
        if let Err(error) = &committed {
            self.failed_flush.note(error);
            self.table().is_littered = true;
        }
        self.remove(committed?);
        Ok(())
    }

    /// Returns the objects that are not needed any more.
    async fn commit(self: &Arc<ChunkDisk>) -> Result<Vec<String>> {
        let dirty = self.table().dirty_buffers();
        let each = |(chunk, buffer)| async move { self.write_back(chunk, &buffer).await };
        let sent = stream::iter(dirty).map(Ok).try_for_each_concurrent(self.connections, each);
        sent.await?;
        let IndexChange { pages, mut superseded } = self.table().index_change();
        if pages.is_empty() {
            return Ok(superseded);
        }
        let each =
            |(page, entries)| async move { Ok((page, self.send_page(page, entries).await?)) };
        let sent = stream::iter(pages).map(each).buffer_unordered(self.connections);
        let sent: Vec<_> = sent.try_collect().await?;
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
        let replaced = open.replace(self.folder.as_ref(), next).await;
        if let Err(error) = &replaced
            && error.kind() == Kind::InUse
        {
            self.table().failed.get_or_insert(error.clone());
        }
        replaced
    }

    /// Renews the lease.
    ///
    /// # Errors
    /// The manifest cannot be written, or another writer has the disk.
    pub(crate) async fn renew(&self) -> Result<()> {
        let mut open = self.manifest.lock().await;
        self.check()?;
        let next = ChunkManifest { renewal: open.manifest.renewal + 1, ..open.manifest.clone() };
        self.publish(&mut open, next).await
    }

    /// Waits for all requests, flushes, waits until the objects that are not needed are removed, and gives the disk back to other writers.
    pub(crate) async fn close(self: &Arc<ChunkDisk>) {
        if self.check().is_err() {
            return;
        }
        let _last = self.requests.write().await;
        if let Err(error) = self.flush().await {
            log::warn!("{error}");
        }
        let mut open = self.manifest.lock().await;
        let _ended = self.removals.write().await;
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
            stream::iter(names).for_each_concurrent(disk.connections, each).await;
        });
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

    async fn remove_one(&self, name: String) {
        if let Err(error) = self.folder.remove(&name).await {
            log::warn!("{name} remains, and is removed later: {error}");
            self.table().is_littered = true;
        }
    }

    /// Removes the objects of earlier writers that the index of `manifest` with these `versions` does not name.
    pub(crate) fn remove_litter(
        self: &Arc<ChunkDisk>,
        manifest: ChunkManifest,
        versions: Vec<ChunkVersion>,
    ) {
        let disk = self.clone();
        self.start_removal(async move {
            let each = |name: String| {
                let is_litter = is_litter(&name, &manifest, &versions);
                let disk = &disk;
                async move {
                    if is_litter {
                        disk.remove_one(name).await;
                    }
                    Ok(())
                }
            };
            let removed = disk.folder.names().try_for_each_concurrent(disk.connections, each).await;
            if let Err(error) = removed {
                log::warn!("objects of an earlier writer remain, and are removed later: {error}");
                disk.table().is_littered = true;
            }
        });
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
