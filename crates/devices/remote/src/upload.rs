//! An object that is written. Parts that are complete are uploaded while others are filled; the object exists when
//! all of it is written and flushed.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use async_trait::async_trait;
use blockhaul_block::{Error, Kind, PendingRequest, Reply, Result};
use blockhaul_catalog::RecordFile;
use bytes::Bytes;
use object_store::multipart::PartId;
use object_store::{MultipartId, ObjectStoreExt as _};
use tokio::sync::{Notify, Semaphore};

use crate::device::RemoteObject;
use crate::part_buffer::PartBuffer;
use crate::runtime::{self, blocking};
use crate::store_failure::{failure, is_forbidden};
use crate::store_object::{StoreObject, StoreResource, open};
use crate::upload_device::ObjectUpload;
use crate::upload_record::{UploadRecord, UploadTarget};

/// Bytes of a part: the services want at least 5 MiB.
const PART_MIN: u64 = 8 << 20;
/// Most parts of an object.
const PARTS_MAX: u64 = 10_000;
/// Parts that are filled at a time.
const FILLED_MAX: usize = 32;

/// An object that is written once.
pub(crate) struct Upload {
    name: Arc<str>,
    resource: StoreResource,
    size: u64,
    /// Bytes of each part but the last one.
    part: u64,
    state: Mutex<UploadState>,
    turns: Semaphore,
    progress: Notify,
    zeroes: OnceLock<Bytes>,
    /// The record of the upload, if a later copy may continue it.
    record: OnceLock<Arc<Mutex<UploadRecord>>>,
}

#[derive(Default)]
struct UploadState {
    id: Option<MultipartId>,
    filled: BTreeMap<u64, PartBuffer>,
    /// Parts that are being sent, and those that were sent.
    sent: BTreeMap<u64, Option<PartId>>,
    /// SHA-256 of the parts, of an upload with a record.
    digests: BTreeMap<u64, [u8; 32]>,
    failed: Option<Error>,
    /// Whether the object exists.
    is_complete: bool,
    /// The object, if it exists and may be read.
    object: Option<Arc<dyn RemoteObject>>,
}

impl Upload {
    /// An object of `size` bytes, of which at most `connections` parts are sent at a time.
    pub(crate) fn new(
        name: &Arc<str>,
        resource: StoreResource,
        size: u64,
        connections: usize,
    ) -> Upload {
        let part = size.div_ceil(PARTS_MAX).next_multiple_of(1 << 20).max(PART_MIN);
        Upload {
            name: name.clone(),
            resource,
            size,
            part,
            state: Mutex::default(),
            turns: Semaphore::new(connections),
            progress: Notify::new(),
            zeroes: OnceLock::new(),
            record: OnceLock::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, UploadState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn failed(&self, error: &object_store::Error) -> Error {
        failure(self.resource.kind, error).error
    }

    /// Whether the object is sent in one request.
    fn is_single(&self) -> bool {
        self.size <= self.part
    }

    fn parts(&self) -> u64 {
        self.size.div_ceil(self.part)
    }

    fn part_len(&self, number: u64) -> u64 {
        self.part.min(self.size - number * self.part)
    }

    /// Begins the upload at the service, or continues that of the record.
    ///
    /// # Errors
    /// The service refuses, or the record is that of another upload.
    pub(crate) async fn begin(self: Arc<Upload>, record: Option<RecordFile>) -> Result<()> {
        if let Some(record) = record.as_ref().filter(|record| record.restart) {
            self.give_up_earlier(record).await?;
        }
        if self.size == 0 {
            // A copy of nothing sends no request.
            return self.complete().await;
        }
        if self.is_single() {
            return Ok(());
        }
        let name = self.name.to_string();
        let target = UploadTarget { name, size: self.size, part: self.part };
        if let Some(RecordFile { path, .. }) = record.clone() {
            let (path, target) = (path.clone(), target.clone());
            if let Some(earlier) = blocking(move || UploadRecord::open(&path, &target)).await? {
                self.lock().id = Some(earlier.id.clone());
                self.record.get_or_init(|| Arc::new(Mutex::new(earlier)));
                return Ok(());
            }
        }
        let StoreResource { store, key, .. } = &self.resource;
        let id = store.create_multipart(key).await.map_err(|error| self.failed(&error))?;
        self.lock().id = Some(id.clone());
        let Some(RecordFile { path, .. }) = record else { return Ok(()) };
        match blocking(move || UploadRecord::create(&path, &target, &id)).await {
            Ok(begun) => {
                self.record.get_or_init(|| Arc::new(Mutex::new(begun)));
                Ok(())
            }
            Err(error) => {
                self.abort().await;
                Err(error)
            }
        }
    }

    /// Deletes the parts of the upload in a record, and the record.
    async fn give_up_earlier(&self, record: &RecordFile) -> Result<()> {
        let path = record.path.clone();
        let Some((earlier, target)) = blocking(move || UploadRecord::read(&path)).await? else {
            return Ok(());
        };
        if target.name == *self.name {
            self.lock().id = Some(earlier.id.clone());
            self.abort().await;
        } else {
            let name = target.name;
            log::warn!("parts of {name} remain at the service, which charges for them");
        }
        blocking(move || earlier.remove()).await
    }

    /// Takes bytes at offset `at`, or `len` zeroes, and returns the parts that are complete.
    ///
    /// # Errors
    /// A part was sent before, an earlier part could not be sent, or the writes are too far apart.
    fn fill(&self, at: u64, len: u64, bytes: Option<&[u8]>) -> Result<Vec<FilledPart>> {
        let mut state = self.lock();
        if let Some(error) = &state.failed {
            return Err(error.clone());
        }
        let end = at + len;
        let mut complete = Vec::new();
        for number in at / self.part..end.div_ceil(self.part) {
            if state.is_complete || state.sent.contains_key(&number) {
                return Err(written_once());
            }
            let base = number * self.part;
            let (from, to) = (at.max(base), end.min(base + self.part));
            let buffer = state.filled.entry(number).or_default();
            let inside = bytes.map(|bytes| &bytes[index(from - at)..index(to - at)]);
            buffer.put(index(from - base), index(to - from), inside, index(self.part_len(number)));
            if buffer.is_complete(index(self.part_len(number))) && !self.is_single() {
                complete.extend(state.take(number));
            }
        }
        let with_bytes = state.filled.values().filter(|buffer| buffer.has_bytes()).count();
        if with_bytes > FILLED_MAX {
            let text = format!("more than {FILLED_MAX} parts of the object are written at a time");
            return Err(
                Error::new(Kind::Unsupported, text).with_remedy("copy with one connection (-C 1)")
            );
        }
        Ok(complete)
    }

    /// Waits until a part can be sent, then calls `begun`, and sends it.
    async fn send(self: Arc<Upload>, filled: FilledPart, begun: impl FnOnce()) {
        // Nobody closes it.
        let _turn = self.turns.acquire().await;
        begun();
        let FilledPart { number, buffer } = filled;
        let sent = self.send_part(number, self.payload(number, buffer)).await;
        let mut state = self.lock();
        match sent {
            Ok(part) => {
                state.sent.insert(number, Some(part));
            }
            Err(error) => {
                state.failed.get_or_insert(error);
            }
        }
        drop(state);
        self.progress.notify_waiters();
    }

    /// Sends a part, unless the service has it from an earlier run.
    async fn send_part(&self, number: u64, payload: Bytes) -> Result<PartId> {
        let record = self.record.get().cloned();
        let digest = if record.is_some() { openssl::sha::sha256(&payload) } else { [0; 32] };
        if record.is_some() {
            self.lock().digests.insert(number, digest);
        }
        if let Some(record) = &record
            && let Some((earlier, part)) = lock_record(record).sent.remove(&number)
            && earlier == digest
        {
            log::debug!("part {number} is at the service");
            return Ok(part);
        }
        let id = self.lock().id.clone().unwrap_or_default();
        let StoreResource { store, key, .. } = &self.resource;
        let sent = store.put_part(key, &id, index(number), payload.into()).await;
        let part = sent.map_err(|error| self.failed(&error))?;
        if let Some(record) = record {
            let added = part.clone();
            let add = move || lock_record(&record).add(number, &digest, &added);
            if let Err(error) = blocking(add).await {
                log::warn!("{error}: a killed copy sends this part again");
            }
        }
        Ok(part)
    }

    fn payload(&self, number: u64, buffer: PartBuffer) -> Bytes {
        let len = index(self.part_len(number));
        match buffer.into_bytes() {
            Some(bytes) => Bytes::from(bytes),
            None => {
                let zeroes =
                    self.zeroes.get_or_init(|| vec![0; index(self.part.min(self.size))].into());
                zeroes.slice(..len)
            }
        }
    }

    /// The object for reads, if it may be read.
    async fn send_rest(self: Arc<Upload>) -> Result<Option<StoreObject>> {
        let StoreResource { store, key, .. } = &self.resource;
        let failed = |error: object_store::Error| self.failed(&error);
        if self.is_single() {
            let buffer = self.lock().filled.remove(&0).unwrap_or_default();
            let payload = if self.size == 0 { Bytes::new() } else { self.payload(0, buffer) };
            store.put(key, payload.into()).await.map_err(failed)?;
        } else {
            let take = |number| self.lock().take(number);
            let rest: Vec<_> = (0..self.parts()).filter_map(take).collect();
            for part in rest {
                runtime::spawn(self.clone().send(part, || {}))?;
            }
            let parts = self.all_sent().await?;
            let id = self.lock().id.clone().unwrap_or_default();
            if let Err(error) = store.complete_multipart(key, &id, parts).await.map_err(failed) {
                // An earlier copy may have been killed behind its completion, or within it: services then answer that
                // there is no such upload, or that they have failed.
                if self.record.get().is_none() || !self.is_stored().await {
                    return Err(error);
                }
            }
            if let Some(record) = self.record.get().cloned()
                && let Err(error) = blocking(move || lock_record(&record).remove()).await
            {
                log::warn!("{error}");
            }
        }
        let object = match open(self.resource.clone()).await {
            Ok(object) => object,
            Err(error) if is_forbidden(&error) => return Ok(None),
            Err(error) => return Err(error),
        };
        if object.size() != self.size {
            let text = format!("the object has {} bytes instead of {}", object.size(), self.size);
            let remedy = "check whether others write to it, and copy again";
            return Err(Error::new(Kind::Io, text).with_remedy(remedy));
        }
        Ok(Some(object))
    }

    /// Whether the object consists of the parts of this upload, by their digests.
    async fn is_stored(&self) -> bool {
        let Ok(object) = open(self.resource.clone()).await else { return false };
        if object.size() != self.size {
            return false;
        }
        for number in 0..self.parts() {
            let mut bytes = vec![0; index(self.part_len(number))];
            let digest = self.lock().digests.get(&number).copied();
            let read = object.read(number * self.part, &mut bytes).await;
            if read.is_err() || digest != Some(openssl::sha::sha256(&bytes)) {
                return false;
            }
        }
        true
    }

    /// Waits until all parts were sent.
    async fn all_sent(&self) -> Result<Vec<PartId>> {
        loop {
            let progress = self.progress.notified();
            tokio::pin!(progress);
            // Before the look: nothing is missed.
            progress.as_mut().enable();
            {
                let state = self.lock();
                if let Some(error) = &state.failed {
                    return Err(error.clone());
                }
                let sent: Option<Vec<_>> = state.sent.values().cloned().collect();
                if let Some(sent) = sent {
                    return Ok(sent);
                }
            }
            progress.await;
        }
    }
}

#[async_trait]
impl ObjectUpload for Upload {
    fn size(&self) -> u64 {
        self.size
    }

    fn put(self: Arc<Self>, at: u64, len: u64, bytes: Option<&[u8]>) -> Result<PendingRequest> {
        let mut parts = self.fill(at, len, bytes)?;
        let Some(last) = parts.pop() else { return Ok(PendingRequest::ready(Ok(Reply::Done))) };
        for part in parts {
            runtime::spawn(self.clone().send(part, || {}))?;
        }
        // The caller waits until there is room for the next part.
        let (completer, pending) = PendingRequest::completer();
        let begun = move || completer.complete(Ok(Reply::Done));
        runtime::spawn(self.send(last, begun))?;
        Ok(pending)
    }

    async fn complete(self: Arc<Self>) -> Result<()> {
        {
            let state = self.lock();
            if let Some(error) = &state.failed {
                return Err(error.clone());
            }
            if state.is_complete {
                return Ok(());
            }
        }
        let completed = self.clone().send_rest().await;
        let mut state = self.lock();
        match completed {
            Ok(object) => {
                state.id = None;
                state.is_complete = true;
                state.object = object.map(|object| Arc::new(object) as Arc<dyn RemoteObject>);
                Ok(())
            }
            Err(error) => {
                state.failed.get_or_insert(error.clone());
                Err(error)
            }
        }
    }

    fn object(&self) -> Option<Arc<dyn RemoteObject>> {
        self.lock().object.clone()
    }

    fn is_given_up(&self) -> bool {
        self.record.get().is_none() && self.lock().id.is_some()
    }

    async fn abort(&self) {
        let Some(id) = self.lock().id.take() else { return };
        let StoreResource { store, key, .. } = &self.resource;
        if let Err(error) = store.abort_multipart(key, &id).await {
            let why = self.failed(&error);
            log::warn!(
                "parts of {key} remain at the service, which charges for them: {}",
                why.text()
            );
        }
    }
}

impl UploadState {
    /// Takes a part to be sent; none if it was taken before.
    fn take(&mut self, number: u64) -> Option<FilledPart> {
        if self.sent.contains_key(&number) {
            return None;
        }
        self.sent.insert(number, None);
        Some(FilledPart { number, buffer: self.filled.remove(&number).unwrap_or_default() })
    }
}

/// A part to be sent.
struct FilledPart {
    number: u64,
    buffer: PartBuffer,
}

fn lock_record(record: &Mutex<UploadRecord>) -> MutexGuard<'_, UploadRecord> {
    record.lock().unwrap_or_else(PoisonError::into_inner)
}

fn written_once() -> Error {
    let text = "an object cannot be written at random places: this part of it was already sent";
    Error::new(Kind::Unsupported, text).with_remedy("write to a file, and copy that to the object")
}

/// An offset inside a part, or a number of a part: both are small.
fn index(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}
