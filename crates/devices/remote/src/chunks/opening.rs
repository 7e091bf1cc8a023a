//! Opening disks in chunks: one writer at a time, by a lease in the manifest or a lock.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use blockhaul_block::{Error, FailedFlush, Kind, Result};
use futures_util::stream::{self, StreamExt as _, TryStreamExt as _};
use object_store::UpdateVersion;

use crate::chunks::buffer::BufferRoom;
use crate::chunks::commit::OpenManifest;
use crate::chunks::disk::ChunkDisk;
use crate::chunks::folder::{FoundObject, ObjectFolder};
use crate::chunks::layout::{
    ChunkManifest, ChunkVersion, MANIFEST, MANIFEST_MAX, PAGE, WRITERS_MAX, page_entries, page_name,
};
use crate::chunks::lease::WriterLease;
use crate::chunks::table::ChunkTable;
use crate::runtime;

/// Parts of a lease after which others look whether it was renewed, and the number of looks.
const LOOKS: u32 = 4;
/// Parts of a lease after which it is renewed.
const RENEWALS: u32 = 3;
/// Fewest chunks in memory.
const BUFFERS_MIN: u64 = 2;

/// The place of a disk, and how it is used.
#[derive(Clone)]
pub(crate) struct ChunkPlace {
    pub(crate) folder: Arc<dyn ObjectFolder>,
    /// Chunks that are sent at a time.
    pub(crate) connections: usize,
    /// Bytes of chunks in memory.
    pub(crate) cache: u64,
    pub(crate) lease: Duration,
}

impl ChunkPlace {
    /// The manifest, if there is a disk.
    async fn manifest(&self) -> Result<Option<(ChunkManifest, UpdateVersion)>> {
        let found = self.folder.get(MANIFEST, MANIFEST_MAX).await?;
        let parsed = |found: FoundObject| {
            ChunkManifest::parse(&found.bytes).map(|manifest| (manifest, found.version))
        };
        found.map(parsed).transpose()
    }

    /// Opens a disk to be read as it is now.
    ///
    /// # Errors
    /// There is no disk, or its index cannot be read.
    pub(crate) async fn open_to_read(&self) -> Result<Arc<ChunkDisk>> {
        let (manifest, version) = self.manifest().await?.ok_or_else(no_disk)?;
        let versions = self.versions(&manifest).await?;
        let table = ChunkTable::new(manifest.writer, versions);
        Ok(self.disk(OpenManifest::new(manifest, Some(version)), table, true))
    }

    /// Opens a disk to be read and written, if there is one.
    ///
    /// # Errors
    /// Another writer has the disk, or its index cannot be read.
    pub(crate) async fn open_to_write(&self) -> Result<Option<Arc<ChunkDisk>>> {
        let Some((mut manifest, mut version)) = self.manifest().await? else { return Ok(None) };
        let is_locked = self.folder.lock().await?;
        if is_locked {
            // As the writer before has left it.
            (manifest, version) = self.manifest().await?.ok_or_else(no_disk)?;
        } else {
            self.wait_for_lease(&manifest, &version).await?;
        }
        let is_clean = manifest.is_clean;
        let open = self.take(OpenManifest::new(manifest, Some(version))).await?;
        let versions = match self.versions(&open.manifest).await {
            Ok(versions) => versions,
            Err(error) => {
                self.give_back(open, is_clean).await;
                return Err(error);
            }
        };
        let manifest = open.manifest.clone();
        let table = ChunkTable::new(manifest.writer, versions.clone());
        let disk = self.disk(open, table, false);
        disk.remove_litter(manifest, versions, is_clean);
        keep_lease(&disk, self.lease, is_locked)?;
        Ok(Some(disk))
    }

    /// A new disk, which does not exist before [`begin`](ChunkPlace::begin). The sizes are checked.
    ///
    /// # Errors
    /// There are objects already.
    pub(crate) async fn plan(&self, size: u64, chunk: u64) -> Result<Arc<ChunkDisk>> {
        if let Some(name) = self.folder.names().next().await.transpose()? {
            let text = format!("there is no disk in chunks, but other objects, such as {name}");
            let remedy =
                "choose an empty place, or remove them; a disk without its manifest is lost";
            return Err(Error::new(Kind::InUse, text).with_remedy(remedy));
        }
        let id = format!("{:016x}{:016x}", random_number()?, random_number()?);
        // Late requests of a writer of an earlier disk at this place must not meet objects of this one. Half of the
        // numbers are left.
        let before = random_number()? % (WRITERS_MAX / 2);
        let manifest = ChunkManifest {
            id,
            size,
            chunk,
            generation: 0,
            writer: before,
            renewal: 0,
            lease: self.lease,
            holder: None,
            is_clean: true,
            pages: Default::default(),
        };
        let versions = vec![ChunkVersion::HOLE; index(manifest.chunks())];
        // The first writer.
        let mut table = ChunkTable::new(before + 1, versions);
        table.failed = Some(Error::new(Kind::NotFound, "the disk was not made yet"));
        Ok(self.disk(OpenManifest::new(manifest, None), table, false))
    }

    /// Makes a disk that was [planned](ChunkPlace::plan).
    ///
    /// # Errors
    /// Others have made one, or the service cannot keep writers apart.
    pub(crate) async fn begin(&self, disk: &Arc<ChunkDisk>) -> Result<()> {
        let is_locked = self.folder.lock().await?;
        let mut open = disk.manifest.lock().await;
        let manifest = open.manifest.clone();
        let bytes = manifest.to_bytes();
        open.replace(self.folder.as_ref(), manifest.clone()).await.map_err(taken)?;
        if self.folder.replace(MANIFEST, bytes.into(), None).await?.is_some() {
            self.folder.remove(MANIFEST).await?;
            return Err(unconditional());
        }
        *open = self.take(OpenManifest::new(manifest, open.version.clone())).await?;
        disk.lease.prove(open.proven);
        drop(open);
        disk.table().failed = None;
        keep_lease(disk, self.lease, is_locked)
    }

    /// Waits until it is clear that the writer in the manifest does not run any more.
    async fn wait_for_lease(
        &self,
        manifest: &ChunkManifest,
        version: &UpdateVersion,
    ) -> Result<()> {
        let Some(holder) = &manifest.holder else { return Ok(()) };
        let lease = manifest.lease;
        log::info!("waiting {} s whether {holder} has the disk open", lease.as_secs_f32());
        for _ in 0..=LOOKS {
            tokio::time::sleep(lease / LOOKS).await;
            let (_, now) = self.manifest().await?.ok_or_else(no_disk)?;
            if now != *version {
                let text = format!("the disk is open for writing ({holder})");
                let remedy = "close it there, or open it read-only";
                return Err(Error::new(Kind::InUse, text).with_remedy(remedy));
            }
        }
        Ok(())
    }

    /// Makes this program the writer of a disk.
    async fn take(&self, mut open: OpenManifest) -> Result<OpenManifest> {
        let (was_clean, before) = (open.manifest.is_clean, open.version.clone());
        let next = open.manifest.next_writer(holder()?, self.lease)?;
        let bytes = next.to_bytes();
        open.replace(self.folder.as_ref(), next).await.map_err(taken)?;
        // The condition does not hold any more: a service that writes nevertheless ignores conditions.
        let error = match self.folder.replace(MANIFEST, bytes.into(), before.as_ref()).await {
            Ok(None) => return Ok(open),
            Ok(again) => {
                open.version = again;
                unconditional()
            }
            Err(error) => error,
        };
        self.give_back(open, was_clean).await;
        Err(error)
    }

    /// Gives a disk back that was not changed.
    async fn give_back(&self, mut open: OpenManifest, is_clean: bool) {
        let next = ChunkManifest { holder: None, is_clean, ..open.manifest.clone() };
        if let Err(error) = open.replace(self.folder.as_ref(), next).await {
            log::warn!("the disk counts as open for some time: {error}");
        }
    }

    /// Reads the index.
    async fn versions(&self, manifest: &ChunkManifest) -> Result<Vec<ChunkVersion>> {
        let mut versions = vec![ChunkVersion::HOLE; index(manifest.chunks())];
        let each = |(page, version): (&u64, &ChunkVersion)| self.page(manifest, *page, *version);
        let found =
            stream::iter(manifest.pages.iter().map(each)).buffer_unordered(self.connections);
        for (page, entries) in found.try_collect::<Vec<_>>().await? {
            let begin = index(page * PAGE);
            versions[begin..begin + entries.len()].copy_from_slice(&entries);
        }
        Ok(versions)
    }

    async fn page(
        &self,
        manifest: &ChunkManifest,
        page: u64,
        version: ChunkVersion,
    ) -> Result<(u64, Vec<ChunkVersion>)> {
        let name = page_name(page, version);
        let count = index((manifest.chunks() - page * PAGE).min(PAGE));
        let found = self.folder.get(&name, MANIFEST_MAX).await?;
        let bytes = found.map(|found| found.bytes).ok_or_else(|| {
            let text =
                format!("the object {name} is lost: the manifest names it, and it is not there");
            Error::new(Kind::Io, text)
                .with_remedy("restore it; if a writer has the disk open, open the disk again")
        })?;
        let entries = page_entries(&manifest.id, page, count, &bytes).ok_or_else(|| {
            let text = format!("the object {name} is no page of the index of this disk");
            Error::new(Kind::Io, text).with_remedy("restore it")
        })?;
        Ok((page, entries))
    }

    fn disk(&self, open: OpenManifest, table: ChunkTable, reads: bool) -> Arc<ChunkDisk> {
        let ChunkManifest { id, size, chunk, generation, lease, .. } = &open.manifest;
        Arc::new(ChunkDisk {
            folder: self.folder.clone(),
            id: id.clone(),
            size: *size,
            chunk: *chunk,
            connections: self.connections,
            read_generation: reads.then_some(*generation),
            room: BufferRoom::new(index((self.cache / chunk).max(BUFFERS_MIN))),
            table: Mutex::new(table),
            lease: WriterLease::new(*lease, open.proven),
            manifest: tokio::sync::Mutex::new(open),
            flushes: tokio::sync::Mutex::default(),
            failed_flush: FailedFlush::default(),
            requests: Arc::default(),
            closing: tokio::sync::Notify::new(),
            removals: Arc::default(),
        })
    }
}

/// Renews the lease until the disk is closed, unless a lock keeps others away.
fn keep_lease(disk: &Arc<ChunkDisk>, lease: Duration, is_locked: bool) -> Result<()> {
    if is_locked {
        return Ok(());
    }
    let disk = Arc::downgrade(disk);
    runtime::spawn(async move {
        loop {
            tokio::time::sleep(lease / RENEWALS).await;
            let Some(disk) = disk.upgrade() else { return };
            if let Err(error) = disk.renew().await {
                if let Err(lost) = disk.check() {
                    if lost.kind() == Kind::InUse {
                        log::warn!("{lost}");
                    }
                    return;
                }
                log::warn!("cannot renew the lease of the disk: {error}");
            }
        }
    })
}

/// The name of this writer for others. No other one has it: hosts may share their names, and the numbers of processes.
fn holder() -> Result<String> {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let host = blockhaul_wire::printable(name.trim().as_bytes(), 64);
    Ok(format!("{host} process {} {:016x}", std::process::id(), random_number()?))
}

fn random_number() -> Result<u64> {
    let mut bytes = [0; 8];
    openssl::rand::rand_bytes(&mut bytes)
        .map_err(|error| Error::new(Kind::Io, "no random numbers").because(error))?;
    Ok(u64::from_be_bytes(bytes))
}

/// The error of a place without a disk.
pub(crate) fn no_disk() -> Error {
    let text = "there is no disk in chunks";
    Error::new(Kind::NotFound, text)
        .with_remedy("check the name; to make a disk, copy to it, or give its size: create=10G")
}

/// The error of a disk that could not be taken.
fn taken(error: Error) -> Error {
    if error.kind() != Kind::InUse {
        return error;
    }
    let text = "another writer has opened the disk at the same moment";
    Error::new(Kind::InUse, text).with_remedy("close it there, or open it read-only")
}

fn unconditional() -> Error {
    let text = "the service ignores conditions of writes (If-Match, If-None-Match): two writers would damage the disk";
    let remedy = "use a service that has conditional writes, or a local directory";
    Error::new(Kind::Unsupported, text).with_remedy(remedy)
}

/// A small number.
fn index(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}
