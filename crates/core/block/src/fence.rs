//! The fence checks every request in one place, so that devices need not.

use std::sync::Arc;

use crate::pending::ReplyCheck;
use crate::{
    Can, Compression, Device, Error, Facts, FileRange, Kind, LeaseAccess, Op, OpKind,
    PendingRequest, Request, RequestFlags,
};

/// Puts the fence before a device. Adds the device's name and the request's place to errors.
pub fn fence(inner: Arc<dyn Device>) -> Arc<dyn Device> {
    Arc::new(Fence { facts: inner.facts(), inner })
}

struct Fence {
    inner: Arc<dyn Device>,
    facts: Arc<Facts>,
}

impl Device for Fence {
    fn facts(&self) -> Arc<Facts> {
        self.inner.facts()
    }

    fn submit(&self, mut request: Request) -> PendingRequest {
        if self.facts.compression == Compression::None {
            // Only a wish.
            request.flags.remove(RequestFlags::COMPRESS);
        }
        let kind = request.kind();
        let at = request.at;
        let len = request.len;
        let check = || ReplyCheck { device: self.facts.name.clone(), kind, at, len };
        match refuse(&self.facts, &request) {
            Some(error) => PendingRequest::from(error.before_flush()).with_check(check()),
            None => self.inner.submit(request).checked_as(kind, len, check),
        }
    }

    fn file_at(&self, at: u64, len: u64, access: LeaseAccess) -> Option<FileRange> {
        let writable = access == LeaseAccess::Read || self.facts.can.contains(Can::WRITE);
        let inside = at.checked_add(len).is_some_and(|end| end <= self.facts.size);
        if len > 0 && inside && writable { self.inner.file_at(at, len, access) } else { None }
    }
}

/// Why a request is refused, if it is.
fn refuse(facts: &Facts, request: &Request) -> Option<Error> {
    let kind = request.kind();
    refuse_ability(facts, request, kind)
        .or_else(|| refuse_flags(facts, request, kind))
        .or_else(|| refuse_range(facts, request, kind))
        .or_else(|| refuse_payload(facts, request))
}

// nbd: write.eperm
fn refuse_ability(facts: &Facts, request: &Request, kind: OpKind) -> Option<Error> {
    if kind.changes() && !facts.can.contains(Can::WRITE) {
        return Some(Error::new(Kind::ReadOnly, "the device is read-only"));
    }
    let needed = match kind {
        OpKind::Read | OpKind::Write => Can::empty(),
        OpKind::Zero => Can::ZERO,
        OpKind::Trim => Can::TRIM,
        OpKind::Flush => Can::FLUSH,
        OpKind::Cache => Can::CACHE,
        OpKind::Extents => Can::EXTENTS,
    };
    if !facts.can.contains(needed) {
        return Some(Error::new(Kind::Invalid, format!("the device has no {kind}")));
    }
    if let Op::Extents(contexts) = &request.op
        && (contexts.is_empty() || !facts.all_contexts().includes(*contexts))
    {
        return Some(Error::new(Kind::Invalid, "the device has no such context"));
    }
    None
}

fn refuse_flags(facts: &Facts, request: &Request, kind: OpKind) -> Option<Error> {
    let allowed = match kind {
        OpKind::Write => RequestFlags::FUA | RequestFlags::COMPRESS,
        OpKind::Trim => RequestFlags::FUA,
        OpKind::Zero => RequestFlags::FUA | RequestFlags::NO_HOLE | RequestFlags::FAST,
        OpKind::Extents => RequestFlags::ONE_EXTENT,
        OpKind::Read | OpKind::Flush | OpKind::Cache => RequestFlags::empty(),
    };
    if !allowed.contains(request.flags) {
        return Some(Error::new(Kind::Invalid, format!("{kind} does not take these flags")));
    }
    if request.flags.contains(RequestFlags::FUA) && !facts.can.contains(Can::FUA) {
        return Some(Error::new(Kind::Invalid, "the device has no FUA"));
    }
    if request.flags.contains(RequestFlags::FAST) && !facts.can.contains(Can::FAST_ZERO) {
        return Some(Error::new(
            Kind::Unsupported,
            "the device cannot tell whether zeroing is fast",
        ));
    }
    None
}

// nbd: sizes.in-range, write.enospc, block-status.einval
fn refuse_range(facts: &Facts, request: &Request, kind: OpKind) -> Option<Error> {
    if kind == OpKind::Flush {
        let clean = request.at == 0 && request.len == 0;
        return (!clean).then(|| Error::new(Kind::Invalid, "a flush has no range"));
    }
    if request.len == 0 {
        return Some(Error::new(Kind::Invalid, "the range is empty"));
    }
    if request.end().is_none_or(|end| end > facts.size) {
        // As nbdkit and QEMU answer: no space for writes and zeroes, invalid for the rest.
        let stores = matches!(kind, OpKind::Write | OpKind::Zero);
        let kind = if stores { Kind::NoSpace } else { Kind::Invalid };
        let text = format!("the range ends behind the device's {} bytes", facts.size);
        return Some(Error::new(kind, text));
    }
    if !facts.block.fits(request.at, request.len, facts.size) {
        let minimum = facts.block.minimum;
        let text = format!("offset and length must be multiples of {minimum} bytes");
        return Some(Error::new(Kind::Invalid, text));
    }
    None
}

fn refuse_payload(facts: &Facts, request: &Request) -> Option<Error> {
    let payload = match &request.op {
        Op::Read(room) => room.len(),
        Op::Write(data) => {
            // A device that does not take parked payloads reads them. Their storage may fail only
            // now.
            if !facts.takes_parked
                && let Err(error) = data.load()
            {
                return Some(Error::system("cannot read the payload to be written", error));
            }
            data.len()
        }
        _ => return None,
    };
    if payload as u64 != request.len {
        return Some(Error::new(Kind::Invalid, "the payload does not have the request's length"));
    }
    if request.len > u64::from(facts.block.maximum) {
        let text = format!("longer than the {} bytes that are taken at once", facts.block.maximum);
        return Some(Error::new(Kind::Invalid, text));
    }
    None
}
