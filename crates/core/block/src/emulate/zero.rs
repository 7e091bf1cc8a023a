//! Zeroing by writing zeroes, for devices without it.

use std::sync::Arc;

use blockhaul_io::Data;

use super::supply::supply;
use crate::{
    Can, Device, Error, Facts, FileRange, Kind, LeaseAccess, Op, PendingRequest, Reply, Request,
    RequestFlags, Result,
};

/// Pieces of a zero request in flight at a time: enough to hide a round trip, few enough to stay
/// fair.
const PIECES_IN_FLIGHT: usize = 8;

pub(super) struct Zero {
    inner: Arc<dyn Device>,
    facts: Arc<Facts>,
}

impl Zero {
    pub(super) fn new(inner: Arc<dyn Device>) -> Zero {
        let facts = Arc::new(supply(&inner.facts(), Can::ZERO));
        Zero { inner, facts }
    }
}

impl Device for Zero {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        if !matches!(request.op, Op::Zero) {
            return self.inner.submit(request);
        }
        if request.flags.contains(RequestFlags::FAST) {
            let error = Error::new(Kind::Unsupported, "zeroing is no faster than writing here");
            return error.before_flush().into();
        }
        let most = u32::try_from(Data::ZEROES_MAX).unwrap_or(u32::MAX);
        let piece = self.facts.block.maximum.min(most);
        let piece = piece - piece % self.facts.block.minimum;
        PendingRequest::start(write_zeroes(self.inner.clone(), request, u64::from(piece.max(1))))
    }

    fn file_at(&self, at: u64, len: u64, access: LeaseAccess) -> Option<FileRange> {
        self.inner.file_at(at, len, access)
    }
}

async fn write_zeroes(inner: Arc<dyn Device>, request: Request, piece: u64) -> Result<Reply> {
    let flags = request.flags & RequestFlags::FUA;
    let mut at = request.at;
    let mut left = request.len;
    let mut first_error = None;
    while left > 0 && first_error.is_none() {
        let mut out = Vec::with_capacity(PIECES_IN_FLIGHT);
        while left > 0 && out.len() < PIECES_IN_FLIGHT {
            let len = left.min(piece);
            let data = Data::zeroes(usize::try_from(len).expect("a piece is small"));
            out.push(inner.submit(Request::write(at, data).with(flags)));
            at += len;
            left -= len;
        }
        // All are awaited even after an error: writes are drained.
        for pending in out {
            if let Err(error) = pending.await {
                first_error.get_or_insert(error);
            }
        }
    }
    first_error.map_or(Ok(Reply::Done), Err)
}
