//! FUA by a flush after the request, for devices that can flush.

use std::sync::Arc;

use super::supply::supply;
use crate::{
    Can, Device, Error, Facts, FileRange, LeaseAccess, PendingRequest, Request, RequestFlags,
};

pub(super) struct Fua {
    inner: Arc<dyn Device>,
    facts: Arc<Facts>,
}

impl Fua {
    pub(super) fn new(inner: Arc<dyn Device>) -> Fua {
        let facts = Arc::new(supply(&inner.facts(), Can::FUA));
        Fua { inner, facts }
    }
}

impl Device for Fua {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, mut request: Request) -> PendingRequest {
        if !request.flags.contains(RequestFlags::FUA) {
            return self.inner.submit(request);
        }
        request.flags -= RequestFlags::FUA;
        let inner = self.inner.clone();
        PendingRequest::start(async move {
            let reply = inner.submit(request).await.map_err(Error::before_flush)?;
            inner.submit(Request::flush()).await?;
            Ok(reply)
        })
    }

    fn file_at(&self, at: u64, len: u64, access: LeaseAccess) -> Option<FileRange> {
        self.inner.file_at(at, len, access)
    }
}
