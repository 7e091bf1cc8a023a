//! The device of an object that is written.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use blockhaul_block::{
    Can, Device, Error, Facts, FileId, Kind, Op, PendingRequest, Reply, Request, Result,
};
use blockhaul_catalog::Claim;

use crate::device::{REQUEST, RemoteObject};
use crate::runtime;

/// Time for the service to delete the parts of an upload that is given up.
const ABORT_MAX: Duration = Duration::from_secs(10);

/// An object that is written once, as a whole. Its methods run on the thread of requests, but for `put`.
#[async_trait]
pub(crate) trait ObjectUpload: Send + Sync + 'static {
    /// Bytes of the object; the most that it may have if it [grows](ObjectUpload::grows).
    fn size(&self) -> u64;

    /// Whether the object is as long as what was written.
    fn grows(&self) -> bool {
        false
    }

    /// Takes bytes at offset `at`, or `len` zeroes. The request ends when there is room for the next one.
    ///
    /// # Errors
    /// The upload has failed, or the bytes were written before.
    fn put(self: Arc<Self>, at: u64, len: u64, bytes: Option<&[u8]>) -> Result<PendingRequest>;

    /// Sends what is left, and makes the object appear. What was not written is zeroes.
    ///
    /// # Errors
    /// The service refuses or fails. The upload has failed then.
    async fn complete(self: Arc<Self>) -> Result<()>;

    /// The object, once it exists, if it may be read.
    fn object(&self) -> Option<Arc<dyn RemoteObject>>;

    /// Whether the service has parts of an object that does not exist, and no later copy continues.
    fn is_given_up(&self) -> bool;

    /// Deletes what the service has of an object that is not completed.
    async fn abort(&self);
}

/// A device that is written once.
pub(crate) struct UploadDevice {
    facts: Arc<Facts>,
    upload: Arc<dyn ObjectUpload>,
    _claim: Claim,
}

impl UploadDevice {
    /// With this name, for the object of this number.
    pub(crate) fn new(
        name: &str,
        upload: Arc<dyn ObjectUpload>,
        identity: FileId,
        claim: Claim,
    ) -> UploadDevice {
        let mut facts = Facts::new(name, upload.size());
        facts.can = Can::WRITE | Can::ZERO | Can::FLUSH;
        facts.grows_from = upload.grows().then_some(0);
        facts.files = vec![identity];
        facts.one_handle = true;
        facts.flush_publishes = true;
        facts.block.preferred = REQUEST;
        UploadDevice { facts: Arc::new(facts), upload, _claim: claim }
    }

    fn read(&self) -> Result<Arc<dyn RemoteObject>> {
        self.upload.object().ok_or_else(|| {
            let text = "the object does not exist before all of it is written";
            Error::new(Kind::Unsupported, text).with_remedy("read it after the copy")
        })
    }

    fn flush(&self) -> Result<PendingRequest> {
        let (completer, pending) = PendingRequest::completer();
        let upload = self.upload.clone();
        runtime::spawn(async move {
            completer.complete(upload.complete().await.map(|()| Reply::Done));
        })?;
        Ok(pending)
    }
}

impl Device for UploadDevice {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        let Request { op, at, len, .. } = request;
        let started = match op {
            Op::Write(data) => self.upload.clone().put(at, len, Some(data.bytes())),
            Op::Zero => self.upload.clone().put(at, len, None),
            Op::Flush => self.flush(),
            Op::Read(room) => self.read().and_then(|object| {
                let (completer, pending) = PendingRequest::completer();
                let mut buf = room.into_buf();
                runtime::spawn(async move {
                    let read = object.read(at, &mut buf).await;
                    completer.complete(read.map(|()| Reply::Data(buf.into())));
                })?;
                Ok(pending)
            }),
            Op::Trim | Op::Cache | Op::Extents(_) => {
                Err(Error::new(Kind::Unsupported, "objects have no such request"))
            }
        };
        started.unwrap_or_else(Into::into)
    }
}

impl Drop for UploadDevice {
    fn drop(&mut self) {
        if !self.upload.is_given_up() {
            return;
        }
        let upload = self.upload.clone();
        let _ = runtime::finish(ABORT_MAX, async move { upload.abort().await });
    }
}
