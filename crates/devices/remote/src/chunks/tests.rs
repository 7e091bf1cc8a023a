//! Disks in chunks in a store in memory, with faults: leases, failed and lost requests, random requests against a model.
#![allow(clippy::unwrap_used, reason = "a test that fails")]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use blockhaul_block::{Error, Kind, Result};
use blockhaul_testkit::rng::{self, Rng};
use bytes::Bytes;
use futures_util::stream::BoxStream;
use futures_util::{StreamExt as _, TryStreamExt as _};
use object_store::UpdateVersion;
use object_store::memory::InMemory;
use object_store::path::Path;

use super::disk::ChunkDisk;
use super::folder::{FoundObject, ObjectFolder, StoreFolder};
use super::layout::{
    CHUNK_RANGE, ChunkManifest, ChunkObject, ChunkVersion, MANIFEST, MANIFEST_MAX, chunk_name,
    page_name,
};
use super::local_folder::LocalFolder;
use super::opening::ChunkPlace;
use crate::runtime::block_on;
use crate::store_failure::StoreKind;
use crate::store_object::StoreResource;

const CHUNK: u64 = *CHUNK_RANGE.start();
const LEASE: Duration = Duration::from_millis(200);

/// A folder with faults.
struct FaultyFolder {
    inside: StoreFolder,
    /// No request arrives.
    is_cut: AtomicBool,
    /// Writes take place whatever the object is.
    ignores_conditions: bool,
    /// Percent of writes that fail, before or after they take place.
    failures: AtomicU64,
    /// Milliseconds that an object takes to arrive.
    delay: AtomicU64,
    /// Replacements whose responses get lost: an error, or that of a repetition that meets its own object.
    lost: AtomicU64,
    repeats: bool,
    /// The next object that is written ends its task.
    panics: AtomicBool,
    /// The names of lists arrive when the gate is closed.
    gate: Option<Arc<tokio::sync::Semaphore>>,
    /// Objects that are being written.
    under_way: AtomicU64,
    rng: Mutex<Rng>,
}

impl FaultyFolder {
    fn new(store: &Arc<InMemory>, seed: u64) -> FaultyFolder {
        let resource = StoreResource {
            store: store.clone(),
            kind: StoreKind::S3,
            key: Path::from("a/disk"),
            bucket: "memory".into(),
            limit: Duration::ZERO,
            account: None,
        };
        FaultyFolder {
            inside: StoreFolder::new(resource, 4),
            is_cut: AtomicBool::new(false),
            ignores_conditions: false,
            failures: AtomicU64::new(0),
            delay: AtomicU64::new(0),
            lost: AtomicU64::new(0),
            repeats: false,
            panics: AtomicBool::new(false),
            gate: None,
            under_way: AtomicU64::new(0),
            rng: Mutex::new(Rng::new(seed)),
        }
    }

    fn reach(&self) -> Result<()> {
        if self.is_cut.load(Ordering::Relaxed) {
            return Err(Error::new(Kind::Disconnected, "cut"));
        }
        Ok(())
    }

    /// Carries out a write, which may fail before or after it took place.
    async fn attempt<T>(&self, write: impl Future<Output = Result<T>>) -> Result<T> {
        self.reach()?;
        let failures = self.failures.load(Ordering::Relaxed);
        let (fails, is_before) = {
            let mut rng = self.rng.lock().unwrap();
            (rng.chance(failures), rng.chance(50))
        };
        if fails && is_before {
            return Err(Error::new(Kind::Io, "failed"));
        }
        let written = write.await;
        if fails { Err(Error::new(Kind::Io, "the response is lost")) } else { written }
    }
}

#[async_trait]
impl ObjectFolder for FaultyFolder {
    async fn get(&self, name: &str, most: u64) -> Result<Option<FoundObject>> {
        self.reach()?;
        self.inside.get(name, most).await
    }

    async fn read(&self, name: &str, whole: u64, at: u64, buf: &mut [u8]) -> Result<bool> {
        self.reach()?;
        tokio::task::yield_now().await;
        self.inside.read(name, whole, at, buf).await
    }

    async fn put(&self, name: &str, bytes: Bytes) -> Result<()> {
        tokio::task::yield_now().await;
        assert!(!self.panics.swap(false, Ordering::Relaxed), "on purpose");
        self.under_way.fetch_add(1, Ordering::Relaxed);
        let delay = Duration::from_millis(self.delay.load(Ordering::Relaxed));
        if !delay.is_zero() && !name.starts_with("chunks/0000000000000000") {
            tokio::time::sleep(delay).await;
        }
        let written = self.attempt(self.inside.put(name, bytes)).await;
        self.under_way.fetch_sub(1, Ordering::Relaxed);
        written
    }

    async fn replace(
        &self,
        name: &str,
        bytes: Bytes,
        expected: Option<&UpdateVersion>,
    ) -> Result<Option<UpdateVersion>> {
        if self.ignores_conditions {
            self.inside.put(name, bytes).await?;
            return Ok(self.inside.get(name, MANIFEST_MAX).await?.map(|found| found.version));
        }
        let is_lost = |left: u64| left.checked_sub(1);
        let lost = self.lost.fetch_update(Ordering::Relaxed, Ordering::Relaxed, is_lost).is_ok();
        let written = self.attempt(self.inside.replace(name, bytes, expected)).await;
        match lost {
            true if self.repeats => Ok(None),
            true => Err(Error::new(Kind::Disconnected, "the response is lost")),
            false => written,
        }
    }

    async fn remove(&self, name: &str) -> Result<()> {
        self.attempt(self.inside.remove(name)).await
    }

    fn names(&self) -> BoxStream<'static, Result<String>> {
        let Some(gate) = self.gate.clone() else { return self.inside.names() };
        let later = move |name| {
            let gate = gate.clone();
            async move {
                // It is never free, but it is closed.
                let _ = gate.acquire().await;
                name
            }
        };
        // Pages that the service has sent already.
        let listed = self.inside.names().collect::<Vec<_>>();
        let pages = futures_util::stream::once(listed).flat_map(futures_util::stream::iter);
        pages.then(later).boxed()
    }

    async fn lock(&self) -> Result<bool> {
        Ok(false)
    }
}

fn place(folder: &Arc<FaultyFolder>) -> ChunkPlace {
    ChunkPlace { folder: folder.clone(), connections: 3, cache: 3 * CHUNK, lease: LEASE }
}

fn folder(store: &Arc<InMemory>) -> Arc<FaultyFolder> {
    Arc::new(FaultyFolder::new(store, 1))
}

async fn made(place: &ChunkPlace, size: u64) -> Arc<ChunkDisk> {
    let disk = place.plan(size, CHUNK).await.unwrap();
    place.begin(&disk).await.unwrap();
    disk
}

/// Two folders of one store, with faults of their own, and a disk that was made in the first one.
async fn shared_disk() -> (Arc<FaultyFolder>, Arc<FaultyFolder>, Arc<ChunkDisk>) {
    let store = Arc::new(InMemory::new());
    let (one, two) = (folder(&store), folder(&store));
    let disk = made(&place(&one), 8 * CHUNK).await;
    (one, two, disk)
}

/// Closes a disk once the search for objects of earlier writers has ended.
async fn close_searched(disk: Arc<ChunkDisk>) {
    drop(disk.removals.write().await);
    disk.close().await;
}

async fn content(disk: &ChunkDisk) -> Vec<u8> {
    let mut bytes = vec![1; disk.size as usize];
    disk.read(0, &mut bytes).await.unwrap();
    bytes
}

async fn manifest(folder: &FaultyFolder) -> ChunkManifest {
    let found = folder.inside.get(MANIFEST, MANIFEST_MAX).await.unwrap().unwrap();
    ChunkManifest::parse(&found.bytes).unwrap()
}

#[test]
fn a_second_writer_is_refused_until_the_lease_ends() {
    block_on(async {
        let (one, two, first) = shared_disk().await;
        first.write(5, b"first").await.unwrap();
        first.flush().await.unwrap();
        // The first one renews its lease.
        let refused = place(&two).open_to_write().await.err().unwrap();
        assert_eq!(refused.kind(), Kind::InUse);
        assert!(refused.is_complete() && refused.to_string().contains("process"), "{refused}");
        // A reader is not refused, and sees what was flushed.
        let reader = place(&two).open_to_read().await.unwrap();
        assert_eq!(&content(&reader).await[5..10], b"first");
        // It cannot renew it any more.
        one.is_cut.store(true, Ordering::Relaxed);
        let second = place(&two).open_to_write().await.unwrap().unwrap();
        one.is_cut.store(false, Ordering::Relaxed);
        first.write(5, b"wrong").await.unwrap();
        let lost = first.flush().await.unwrap_err();
        assert_eq!(lost.kind(), Kind::InUse);
        assert!(lost.is_complete(), "{lost}");
        for failed in [
            first.write(5, b"wrong").await,
            first.flush().await,
            first.read(0, &mut [0; 4]).await,
            first.trim(0, CHUNK).await,
            first.zero(0, 4 * CHUNK, false).await,
        ] {
            assert_eq!(failed.unwrap_err().kind(), Kind::InUse);
        }
        first.close().await;
        assert_eq!(&content(&second).await[5..10], b"first");
        second.write(5, b"after").await.unwrap();
        second.close().await;
        let third = place(&one).open_to_write().await.unwrap().unwrap();
        assert_eq!(&content(&third).await[5..10], b"after");
        close_searched(third).await;
        assert!(manifest(&one).await.is_clean);
        // The reader notices that its objects were replaced.
        let error = reader.read(0, &mut [0; 10]).await.unwrap_err();
        assert!(error.to_string().contains("changed the disk"), "{error}");
    });
}

/// A lock file that is removed lets another writer in.
#[test]
fn a_writer_notices_that_its_lock_was_removed() {
    block_on(async {
        let scratch = tempfile::tempdir().unwrap();
        let place = || ChunkPlace {
            folder: Arc::new(LocalFolder::new(scratch.path().to_owned())),
            connections: 3,
            cache: 3 * CHUNK,
            lease: LEASE,
        };
        let first = made(&place(), 8 * CHUNK).await;
        first.write(5, b"first").await.unwrap();
        first.flush().await.unwrap();
        let refused = place().open_to_write().await.err().unwrap();
        assert_eq!(refused.kind(), Kind::InUse);
        std::fs::remove_file(scratch.path().join("lock")).unwrap();
        let second = place().open_to_write().await.unwrap().unwrap();
        // Nothing has changed yet.
        assert_eq!(first.flush().await.unwrap_err().kind(), Kind::InUse);
        assert_eq!(first.read(0, &mut [0; 9]).await.unwrap_err().kind(), Kind::InUse);
        std::fs::remove_file(scratch.path().join("lock")).unwrap();
        second.write(5, b"wrong").await.unwrap();
        let lost = second.flush().await.unwrap_err();
        assert!(lost.kind() == Kind::InUse && lost.is_complete(), "{lost}");
        second.close().await;
        let third = place().open_to_write().await.unwrap().unwrap();
        assert_eq!(&content(&third).await[5..10], b"first");
        tokio::time::sleep(LEASE).await;
        assert_eq!(&content(&third).await[5..10], b"first");
        std::fs::remove_file(scratch.path().join("lock")).unwrap();
        tokio::time::sleep(LEASE).await;
        assert_eq!(third.read(0, &mut [0; 9]).await.unwrap_err().kind(), Kind::InUse);
    });
}

/// Whoever may read a directory can lock it.
#[test]
fn a_locked_directory_of_the_index_is_an_error_after_some_time() {
    block_on(async {
        let scratch = tempfile::tempdir().unwrap();
        let place = ChunkPlace {
            folder: Arc::new(LocalFolder::new(scratch.path().to_owned())),
            connections: 3,
            cache: 3 * CHUNK,
            lease: LEASE,
        };
        let disk = made(&place, 8 * CHUNK).await;
        disk.write(5, b"first").await.unwrap();
        let reader = std::fs::File::open(scratch.path().join("index")).unwrap();
        let lock = rustix::fs::FlockOperation::LockShared;
        rustix::fs::flock(&reader, lock).unwrap();
        let flushed = disk.clone();
        let flushed = tokio::spawn(async move { flushed.flush().await });
        tokio::time::sleep(LEASE).await;
        assert!(!flushed.is_finished());
        drop(reader);
        flushed.await.unwrap().unwrap();
        let reader = std::fs::File::open(scratch.path().join("index")).unwrap();
        rustix::fs::flock(&reader, lock).unwrap();
        disk.write(5, b"after").await.unwrap();
        let refused = disk.flush().await.unwrap_err();
        assert!(refused.kind() == Kind::InUse && refused.is_complete(), "{refused}");
        assert!(refused.to_string().contains("locked"), "{refused}");
    });
}

#[test]
fn a_replaced_writer_does_not_take_removed_objects_for_lost_ones() {
    block_on(async {
        let (one, two, first) = shared_disk().await;
        first.write(0, &[7; 4 * CHUNK as usize]).await.unwrap();
        first.flush().await.unwrap();
        one.is_cut.store(true, Ordering::Relaxed);
        let second = place(&two).open_to_write().await.unwrap().unwrap();
        second.write(0, &[8; 4 * CHUNK as usize]).await.unwrap();
        close_searched(second).await;
        assert_eq!(two.names().count().await, 6);
        one.is_cut.store(false, Ordering::Relaxed);
        let replaced = first.read(0, &mut [0; 9]).await.unwrap_err();
        assert!(replaced.kind() == Kind::InUse && replaced.is_complete(), "{replaced}");
    });
}

#[test]
fn the_lease_is_renewed_during_a_long_flush() {
    block_on(async {
        let (one, two, first) = shared_disk().await;
        first.write(5, b"first").await.unwrap();
        one.delay.store(3 * u64::try_from(LEASE.as_millis()).unwrap(), Ordering::Relaxed);
        let two = place(&two);
        let (flushed, refused) = tokio::join!(first.flush(), two.open_to_write());
        flushed.unwrap();
        assert_eq!(refused.err().unwrap().kind(), Kind::InUse);
        one.delay.store(0, Ordering::Relaxed);
        first.close().await;
    });
}

#[test]
fn a_writer_whose_lease_has_run_out_answers_nothing_that_may_be_old() {
    block_on(async {
        let (one, two, first) = shared_disk().await;
        first.write(5, b"first").await.unwrap();
        first.flush().await.unwrap();
        one.is_cut.store(true, Ordering::Relaxed);
        tokio::time::sleep(LEASE).await;
        // Nobody else has the disk, but this writer cannot know it.
        let failed = first.read(0, &mut [0; 9]).await.unwrap_err();
        assert_eq!(failed.kind(), Kind::Disconnected);
        one.is_cut.store(false, Ordering::Relaxed);
        assert_eq!(&content(&first).await[5..10], b"first");
        first.flush().await.unwrap();
        one.is_cut.store(true, Ordering::Relaxed);
        let second = place(&two).open_to_write().await.unwrap().unwrap();
        second.write(5, b"after").await.unwrap();
        second.flush().await.unwrap();
        // In memory, in a hole, and a flush of nothing.
        for at in [0, 4 * CHUNK] {
            assert!(first.read(at, &mut [0; 9]).await.is_err());
        }
        assert_eq!(first.flush().await.unwrap_err().kind(), Kind::Disconnected);
        one.is_cut.store(false, Ordering::Relaxed);
        assert_eq!(first.read(0, &mut [0; 9]).await.unwrap_err().kind(), Kind::InUse);
        assert!(first.flush().await.is_err());
        second.close().await;
    });
}

#[test]
fn late_objects_of_a_replaced_writer_are_removed_by_the_next_one() {
    block_on(async {
        let (one, two, first) = shared_disk().await;
        first.write(5, b"first").await.unwrap();
        first.flush().await.unwrap();
        one.is_cut.store(true, Ordering::Relaxed);
        close_searched(place(&two).open_to_write().await.unwrap().unwrap()).await;
        assert!(manifest(&two).await.is_clean);
        let late = ChunkVersion::of(manifest(&two).await.writer - 1, 99).unwrap();
        let names = [chunk_name(3, late), page_name(0, late)];
        for name in &names {
            two.inside.put(name, Bytes::from_static(b"late")).await.unwrap();
        }
        let third = place(&two).open_to_write().await.unwrap().unwrap();
        for _ in 0..100 {
            tokio::time::sleep(LEASE / 20).await;
            if two.names().count().await == 3 {
                break;
            }
        }
        assert_eq!(two.names().count().await, 3);
        assert_eq!(&content(&third).await[5..10], b"first");
        third.close().await;
    });
}

/// A location that is restored while a writer stands still keeps the objects that it had before.
#[test]
fn a_replaced_writer_removes_nothing_any_more() {
    block_on(async {
        let store = Arc::new(InMemory::new());
        let one = folder(&store);
        let disk = made(&place(&one), 8 * CHUNK).await;
        disk.write(0, &[7; 4 * CHUNK as usize]).await.unwrap();
        disk.close().await;
        let names: Vec<_> = one.names().try_collect().await.unwrap();
        let mut backup = Vec::new();
        for name in names {
            let found = one.inside.get(&name, MANIFEST_MAX).await.unwrap().unwrap();
            backup.push((name, found.bytes));
        }
        let disk = place(&one).open_to_write().await.unwrap().unwrap();
        disk.write(0, &[8; 4 * CHUNK as usize]).await.unwrap();
        disk.close().await;
        for (name, bytes) in backup.iter().filter(|(name, _)| name != MANIFEST) {
            one.inside.put(name, bytes.clone()).await.unwrap();
        }
        let gate = Arc::new(tokio::sync::Semaphore::new(0));
        let slow = FaultyFolder { gate: Some(gate.clone()), ..FaultyFolder::new(&store, 1) };
        let slow = Arc::new(slow);
        let replaced = place(&slow).open_to_write().await.unwrap().unwrap();
        // The search has its names.
        tokio::time::sleep(LEASE / 4).await;
        slow.is_cut.store(true, Ordering::Relaxed);
        tokio::time::sleep(LEASE).await;
        for (name, bytes) in &backup {
            one.inside.put(name, bytes.clone()).await.unwrap();
        }
        slow.is_cut.store(false, Ordering::Relaxed);
        gate.close();
        replaced.remove(vec![backup[0].0.clone()]);
        drop(replaced.removals.write().await);
        assert_eq!(replaced.check().unwrap_err().kind(), Kind::InUse);
        for (name, _) in &backup {
            assert!(one.inside.get(name, MANIFEST_MAX).await.unwrap().is_some(), "{name}");
        }
        let reader = place(&one).open_to_read().await.unwrap();
        assert!(content(&reader).await[..4 * CHUNK as usize].iter().all(|byte| *byte == 7));
    });
}

/// Closing ends the search for objects of earlier writers; the next writer searches again if the disk was not clean.
#[test]
fn closing_does_not_wait_for_a_list() {
    block_on(async {
        let store = Arc::new(InMemory::new());
        let one = folder(&store);
        made(&place(&one), CHUNK).await.close().await;
        let gate = Some(Arc::new(tokio::sync::Semaphore::new(0)));
        let slow = Arc::new(FaultyFolder { gate, ..FaultyFolder::new(&store, 1) });
        place(&slow).open_to_write().await.unwrap().unwrap().close().await;
        assert!(manifest(&one).await.is_clean);
        // A killed writer.
        let killed = place(&one).open_to_write().await.unwrap().unwrap();
        one.is_cut.store(true, Ordering::Relaxed);
        drop(killed);
        place(&slow).open_to_write().await.unwrap().unwrap().close().await;
        let found = manifest(&slow).await;
        assert!(!found.is_clean && found.holder.is_none());
        one.is_cut.store(false, Ordering::Relaxed);
        close_searched(place(&one).open_to_write().await.unwrap().unwrap()).await;
        assert!(manifest(&one).await.is_clean);
    });
}

#[test]
fn a_manifest_whose_response_is_lost_is_recognized() {
    block_on(async {
        for repeats in [false, true] {
            let store = Arc::new(InMemory::new());
            let faulty = Arc::new(FaultyFolder { repeats, ..FaultyFolder::new(&store, 1) });
            let lose = || faulty.lost.store(1, Ordering::Relaxed);
            let place = place(&faulty);
            let disk = place.plan(CHUNK, CHUNK).await.unwrap();
            lose();
            place.begin(&disk).await.unwrap();
            disk.write(0, b"first").await.unwrap();
            lose();
            disk.flush().await.unwrap();
            lose();
            disk.close().await;
            lose();
            let disk = place.open_to_write().await.unwrap().unwrap();
            assert_eq!(&content(&disk).await[..5], b"first");
            disk.close().await;
            assert!(manifest(&faulty).await.holder.is_none());
        }
    });
}

#[test]
fn a_failed_flush_has_ended_and_stays_failed() {
    block_on(async {
        let store = Arc::new(InMemory::new());
        let folder = folder(&store);
        let disk = made(&place(&folder), 8 * CHUNK).await;
        for chunk in 0..3 {
            disk.write(chunk * CHUNK, b"data").await.unwrap();
        }
        // The first chunk fails while others are sent.
        folder.delay.store(50, Ordering::Relaxed);
        folder.failures.store(100, Ordering::Relaxed);
        disk.flush().await.unwrap_err();
        assert_eq!(folder.under_way.load(Ordering::Relaxed), 0);
        folder.failures.store(0, Ordering::Relaxed);
        assert!(disk.flush().await.is_err());
        disk.close().await;
        let disk = place(&folder).open_to_write().await.unwrap().unwrap();
        disk.write(0, b"data").await.unwrap();
        folder.panics.store(true, Ordering::Relaxed);
        let flushed = disk.clone();
        assert!(tokio::spawn(async move { flushed.flush().await }).await.is_err());
        let failed = disk.flush().await.unwrap_err();
        assert!(failed.to_string().contains("flush failed"), "{failed}");
    });
}

#[test]
fn the_last_chunk_is_whole_where_the_disk_ends() {
    block_on(async {
        let store = Arc::new(InMemory::new());
        let folder = folder(&store);
        let size = CHUNK + CHUNK / 2;
        let disk = made(&place(&folder), size).await;
        disk.write(0, &vec![7; size as usize]).await.unwrap();
        disk.close().await;
        let names: Vec<_> = folder.names().try_collect().await.unwrap();
        let last = names.iter().find(|name| name.starts_with("chunks/0000000000000001")).unwrap();
        folder.inside.remove(last).await.unwrap();
        let disk = place(&folder).open_to_write().await.unwrap().unwrap();
        disk.write(CHUNK, &[8; CHUNK as usize / 2]).await.unwrap();
        disk.flush().await.unwrap();
        disk.close().await;
        let found = content(&place(&folder).open_to_read().await.unwrap()).await;
        assert!(found[CHUNK as usize..].iter().all(|byte| *byte == 8));
    });
}

#[test]
fn disks_at_one_place_have_other_objects() {
    block_on(async {
        let store = Arc::new(InMemory::new());
        let folder = folder(&store);
        let mut all = std::collections::BTreeSet::new();
        for _ in 0..2 {
            let disk = made(&place(&folder), CHUNK).await;
            disk.write(0, b"content").await.unwrap();
            disk.close().await;
            let names: Vec<_> = folder.names().try_collect().await.unwrap();
            for name in names {
                folder.inside.remove(&name).await.unwrap();
                assert!(name == MANIFEST || all.insert(name.clone()), "{name}");
            }
        }
        assert_eq!(all.len(), 4);
    });
}

#[test]
fn a_service_that_ignores_conditions_is_refused() {
    block_on(async {
        let store = Arc::new(InMemory::new());
        let faulty = FaultyFolder { ignores_conditions: true, ..FaultyFolder::new(&store, 1) };
        let faulty = Arc::new(faulty);
        let disk = place(&faulty).plan(CHUNK, CHUNK).await.unwrap();
        let refused = place(&faulty).begin(&disk).await.unwrap_err();
        assert_eq!(refused.kind(), Kind::Unsupported);
        assert_eq!(faulty.names().count().await, 0);
        made(&place(&folder(&store)), CHUNK).await.close().await;
        let refused = place(&faulty).open_to_write().await.err().unwrap();
        assert!(refused.is_complete() && refused.kind() == Kind::Unsupported, "{refused}");
        assert!(manifest(&faulty).await.holder.is_none());
    });
}

#[test]
fn lost_objects_are_errors_and_never_zeroes() {
    block_on(async {
        let store = Arc::new(InMemory::new());
        let folder = folder(&store);
        let disk = made(&place(&folder), 8 * CHUNK).await;
        disk.write(0, &[7; 4 * CHUNK as usize]).await.unwrap();
        disk.close().await;
        let names: Vec<_> = folder.names().try_collect().await.unwrap();
        let name = names.iter().find(|name| name.starts_with("chunks/0000000000000002")).unwrap();
        folder.inside.remove(name).await.unwrap();
        let disk = place(&folder).open_to_write().await.unwrap().unwrap();
        let lost = disk.read(2 * CHUNK, &mut [0; 9]).await.unwrap_err();
        assert!(lost.is_complete() && lost.to_string().contains(name.as_str()), "{lost}");
        disk.read(3 * CHUNK, &mut [0; 9]).await.unwrap();
        // A hole is none.
        disk.read(5 * CHUNK, &mut [0; 9]).await.unwrap();
        // A part of it cannot be written, all of it can.
        disk.write(2 * CHUNK, &[1; CHUNK as usize]).await.unwrap();
        disk.close().await;
        let short = names.iter().find(|name| name.starts_with("chunks/0000000000000003")).unwrap();
        folder.inside.put(short, Bytes::from_static(b"short")).await.unwrap();
        let disk = place(&folder).open_to_read().await.unwrap();
        assert_eq!(content_of(&disk, 2).await.unwrap(), [1; 9]);
        let damaged = content_of(&disk, 3).await.unwrap_err();
        assert!(damaged.to_string().contains("5 bytes instead of 65536"), "{damaged}");
        let names: Vec<_> = folder.names().try_collect().await.unwrap();
        let page = names.iter().find(|name| name.starts_with("index/")).unwrap();
        folder.inside.remove(page).await.unwrap();
        let lost = place(&folder).open_to_read().await.err().unwrap();
        assert!(lost.to_string().contains(page.as_str()), "{lost}");
        // Without its manifest, the rest is not taken for an empty place.
        folder.inside.remove(MANIFEST).await.unwrap();
        assert!(place(&folder).open_to_write().await.unwrap().is_none());
        assert_eq!(place(&folder).plan(CHUNK, CHUNK).await.err().unwrap().kind(), Kind::InUse);
    });
}

async fn content_of(disk: &ChunkDisk, chunk: u64) -> Result<[u8; 9]> {
    let mut bytes = [0; 9];
    disk.read(chunk * CHUNK, &mut bytes).await?;
    Ok(bytes)
}

/// Reads, again where the lease could not be renewed before: on a slow machine it runs out.
async fn read(disk: &ChunkDisk, at: u64, bytes: &mut [u8]) {
    for _ in 0..50 {
        if disk.read(at, bytes).await.is_ok() {
            return;
        }
    }
    disk.read(at, bytes).await.unwrap();
}

/// Requests in random order on a disk with faults; what is left must be as at one of its flushes.
async fn round(seed: u64) {
    let mut rng = Rng::new(seed);
    let store = Arc::new(InMemory::new());
    let size = CHUNK * rng.between(1, 12) + rng.below(CHUNK);
    let mut bytes = vec![0; size as usize];
    let one = folder(&store);
    made(&place(&one), size).await.close().await;
    for life in 0..3 {
        let folder = Arc::new(FaultyFolder::new(&store, rng.number()));
        let disk = place(&folder).open_to_write().await.unwrap().unwrap();
        assert!(content(&disk).await == bytes, "seed {seed:#x}, life {life}: wrong bytes");
        let failures = if life < 2 && rng.chance(60) { rng.below(12) } else { 0 };
        folder.failures.store(failures, Ordering::Relaxed);
        // The contents that may be found later: those of the last flush, or of one that failed.
        let mut durable = vec![bytes.clone()];
        let mut has_failed = false;
        for _ in 0..60 {
            let at = rng.below(size);
            let len = rng.between(1, (3 * CHUNK).min(size - at));
            let range = at as usize..(at + len) as usize;
            match rng.below(10) {
                0..=4 => {
                    let mut fresh = vec![0; len as usize];
                    rng.fill(&mut fresh);
                    let written = disk.write(at, &fresh).await;
                    if written.is_err() {
                        // Part of it may be there: read it.
                        read(&disk, at, &mut fresh).await;
                    }
                    bytes[range].copy_from_slice(&fresh);
                }
                5 => {
                    if disk.zero(at, len, rng.chance(30)).await.is_ok() {
                        bytes[range].fill(0);
                    } else {
                        let mut found = vec![0; len as usize];
                        read(&disk, at, &mut found).await;
                        bytes[range].copy_from_slice(&found);
                    }
                }
                6 => {
                    disk.trim(at, len).await.unwrap();
                    let (first, last) = (at.next_multiple_of(CHUNK), at + len);
                    let last = if last == size { last } else { last - last % CHUNK };
                    if first < last {
                        bytes[first as usize..last as usize].fill(0);
                    }
                }
                7 if !has_failed => match disk.flush().await {
                    Ok(()) => durable = vec![bytes.clone()],
                    Err(_) => {
                        has_failed = true;
                        durable.push(bytes.clone());
                    }
                },
                7 => assert!(
                    disk.flush().await.is_err(),
                    "seed {seed:#x}: a flush after a failed one"
                ),
                _ => {
                    let mut found = vec![0; len as usize];
                    read(&disk, at, &mut found).await;
                    assert!(
                        found == bytes[range],
                        "seed {seed:#x}: wrong bytes at {at}, length {len}"
                    );
                }
            }
        }
        folder.failures.store(0, Ordering::Relaxed);
        if rng.chance(50) {
            // As if the program had been killed: its late requests do nothing.
            folder.is_cut.store(true, Ordering::Relaxed);
        } else if !has_failed {
            durable = vec![bytes.clone()];
        }
        disk.close().await;
        let reader = place(&one).open_to_read().await.unwrap();
        bytes = content(&reader).await;
        assert!(durable.contains(&bytes), "seed {seed:#x}, life {life}: neither flush is there");
        drop(disk);
    }
    // All objects are named by the index, once a writer has closed the disk.
    close_searched(place(&one).open_to_write().await.unwrap().unwrap()).await;
    let disk = place(&one).open_to_read().await.unwrap();
    assert!(manifest(&one).await.is_clean, "seed {seed:#x}");
    let names: Vec<_> = one.names().try_collect().await.unwrap();
    for name in names.iter().filter(|name| *name != MANIFEST) {
        let is_named = match ChunkObject::parse(name).unwrap() {
            ChunkObject::Chunk(chunk, version) => disk.table().version(chunk) == version,
            ChunkObject::Page(page, version) => {
                manifest(&one).await.pages.get(&page) == Some(&version)
            }
        };
        assert!(is_named, "seed {seed:#x}: {name} is left");
    }
}

#[test]
fn random_requests_with_faults_leave_the_disk_of_a_flush() {
    let rounds = if std::env::var_os("BLOCKHAUL_LONG").is_some() { 500 } else { 8 };
    let first = rng::seed() % (u64::MAX / 2);
    println!("BLOCKHAUL_SEED={first:#x}, {rounds} rounds");
    for seed in first..first + rounds {
        block_on(round(seed));
    }
}

#[test]
fn requests_at_once_share_little_memory() {
    block_on(async {
        let store = Arc::new(InMemory::new());
        let folder = folder(&store);
        let size = 40 * CHUNK;
        let disk = made(&place(&folder), size).await;
        let one = |number: u64| {
            let disk = disk.clone();
            async move {
                let mut rng = Rng::new(number);
                let begin = number * size / 8;
                let mut bytes = vec![0; (size / 8) as usize];
                for turn in 0..40 {
                    let at = rng.below(size / 8);
                    let len = rng.between(1, (CHUNK + 9).min(size / 8 - at));
                    let range = at as usize..(at + len) as usize;
                    bytes[range.clone()].fill(turn);
                    disk.write(begin + at, &bytes[range.clone()]).await.unwrap();
                    if rng.chance(20) {
                        disk.flush().await.unwrap();
                    }
                    let mut found = vec![0; len as usize];
                    disk.read(begin + at, &mut found).await.unwrap();
                    assert!(found == bytes[range]);
                }
                bytes
            }
        };
        let all: Vec<_> = futures_util::future::join_all((0..8).map(one)).await.concat();
        disk.close().await;
        let reader = place(&folder).open_to_read().await.unwrap();
        assert!(content(&reader).await == all);
    });
}
