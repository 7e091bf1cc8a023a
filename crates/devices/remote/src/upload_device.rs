//! The device of an object that is written.

use std::sync::Arc;
use std::time::Duration;

use blockhaul_block::{
    Can, Device, Error, Facts, FileId, Kind, Op, PendingRequest, Reply, Request, Result,
};
use blockhaul_catalog::Claim;

use crate::device::{REQUEST, RemoteObject as _};
use crate::runtime;
use crate::upload::Upload;

/// Time for the service to delete the parts of an upload that is given up.
const ABORT_MAX: Duration = Duration::from_secs(10);

/// A device that is written once.
pub(crate) struct UploadDevice {
    facts: Arc<Facts>,
    upload: Arc<Upload>,
    _claim: Claim,
}

impl UploadDevice {
    /// With this name, for the object of this number.
    pub(crate) fn new(
        name: &str,
        upload: Arc<Upload>,
        identity: FileId,
        claim: Claim,
    ) -> UploadDevice {
        let mut facts = Facts::new(name, upload.size());
        facts.can = Can::WRITE | Can::ZERO | Can::FLUSH;
        facts.files = vec![identity];
        facts.one_handle = true;
        facts.flush_publishes = true;
        facts.block.preferred = REQUEST;
        UploadDevice { facts: Arc::new(facts), upload, _claim: claim }
    }

    fn put(&self, at: u64, len: u64, bytes: Option<&[u8]>) -> Result<PendingRequest> {
        let mut parts = self.upload.put(at, len, bytes)?;
        let Some(last) = parts.pop() else { return Ok(PendingRequest::ready(Ok(Reply::Done))) };
        for part in parts {
            runtime::spawn(self.upload.clone().send(part, || {}))?;
        }
        // The caller waits until there is room for the next part.
        let (completer, pending) = PendingRequest::completer();
        let begun = move || completer.complete(Ok(Reply::Done));
        runtime::spawn(self.upload.clone().send(last, begun))?;
        Ok(pending)
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
            Op::Write(data) => self.put(at, len, Some(data.bytes())),
            Op::Zero => self.put(at, len, None),
            Op::Flush => self.flush(),
            Op::Read(room) => self.upload.object().and_then(|object| {
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
