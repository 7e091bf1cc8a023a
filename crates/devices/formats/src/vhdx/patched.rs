//! A file as it is once the log was applied; it is never written.

use std::sync::Arc;

use blockhaul_block::{
    Can, Device, Error, Facts, FileRange, Kind, LeaseAccess, Op, PendingRequest, Reply, Request,
};

use super::log::Patches;
use crate::bytes::index;
use crate::storage;

/// A handle to the file.
pub(super) struct PatchedDevice {
    inner: Arc<dyn Device>,
    /// Length of the file itself in bytes.
    len: u64,
    facts: Arc<Facts>,
    patches: Arc<Patches>,
}

impl PatchedDevice {
    /// Over a fenced device with all emulations.
    pub(super) fn new(inner: Arc<dyn Device>, patches: Arc<Patches>) -> PatchedDevice {
        let below = inner.facts();
        let mut facts = Facts::over(&below);
        facts.can &= Can::MULTI_CONN;
        facts.size = below.size.max(patches.len);
        PatchedDevice { len: below.size, inner, facts: Arc::new(facts), patches }
    }

    /// Whether a range is as it is in the file.
    fn is_plain(&self, at: u64, end: u64) -> bool {
        end <= self.len && !self.patches.touch(at, end)
    }
}

impl Device for PatchedDevice {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        let Request { op, at, .. } = request;
        let Op::Read(room) = op else {
            return Error::new(Kind::ReadOnly, "images of this format are read-only").into();
        };
        if self.is_plain(at, at.saturating_add(room.len() as u64)) {
            return self.inner.submit(Request::read(at, room));
        }
        let inner = self.inner.clone();
        let patches = self.patches.clone();
        let len = self.len;
        PendingRequest::start(async move {
            let mut buf = room.into_buf();
            let inside = index(len.saturating_sub(at)).min(buf.len());
            let (front, beyond) = buf.split_at_mut(inside);
            storage::read_into(&inner, at, front, None).await?;
            beyond.fill(0);
            patches.apply(at, &mut buf);
            Ok(Reply::Data(buf.into()))
        })
    }

    fn file_at(&self, at: u64, len: u64, access: LeaseAccess) -> Option<FileRange> {
        let is_plain = access == LeaseAccess::Read && self.is_plain(at, at.checked_add(len)?);
        is_plain.then(|| self.inner.file_at(at, len, access))?
    }
}
