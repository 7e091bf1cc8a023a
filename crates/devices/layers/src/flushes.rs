//! Failed flushes: what a layer remembers of them for all handles to the same storage.
//!
//! The kernel reports data that could not be written once per open file. A second flush then
//! succeeds, although the data is lost. So a layer that flushes, or repeats requests, never repeats
//! a failed flush, and no later flush succeeds until the storage is opened again.

use std::sync::Arc;

use blockhaul_block::{
    Can, Device, Error, Facts, FailedFlush, FileRange, Kind, LeaseAccess, OpKind, PendingRequest,
    Request, RequestFlags, Result,
};

/// Whether the storage has failed a flush or FUA request since it was opened; shared by its
/// handles.
#[derive(Default)]
pub struct FlushRecord(FailedFlush);

impl FlushRecord {
    /// Fails if data may be lost: then no flush and no FUA request may succeed.
    ///
    /// # Errors
    /// Those of [`FailedFlush::check`].
    pub fn check(&self) -> Result<()> {
        self.0.check()
    }

    /// Records that data may be lost.
    pub fn fail(&self, error: &Error) {
        self.0.note(error);
    }

    /// Checks the result of a flush or FUA request. A success counts only if no
    /// other one has failed meanwhile.
    ///
    /// # Errors
    /// The error of the request, and those of [`FlushRecord::check`].
    pub fn ended<T>(&self, kind: OpKind, outcome: Result<T>) -> Result<T> {
        match outcome {
            Ok(reply) => self.check().map(|()| reply),
            Err(error) => {
                if loses_data(kind, &error) {
                    self.fail(&error);
                }
                Err(error)
            }
        }
    }

    /// The device with its flushes and FUA requests checked by this.
    pub fn guard(self: &Arc<FlushRecord>, inner: Arc<dyn Device>) -> Arc<dyn Device> {
        if !inner.facts().can.intersects(Can::FLUSH | Can::FUA) {
            return inner;
        }
        Arc::new(FlushRecordDevice { inner, flushes: self.clone() })
    }
}

/// Whether a request makes data durable: a flush, or a change with FUA.
pub fn makes_durable(kind: OpKind, flags: RequestFlags) -> bool {
    kind == OpKind::Flush || kind.changes() && flags.contains(RequestFlags::FUA)
}

/// Whether a flush or FUA request with such an error may have lost data. A lost connection has not:
/// another one to the same storage can flush. Neither has a request that was refused, or that
/// failed before anything was flushed.
pub fn loses_data(kind: OpKind, error: &Error) -> bool {
    let is_refused = matches!(
        error.kind(),
        Kind::ReadOnly | Kind::Invalid | Kind::TooLarge | Kind::Unsupported | Kind::Refused
    );
    !error.is_before_flush()
        && !matches!(error.kind(), Kind::Disconnected | Kind::ShuttingDown)
        && (kind == OpKind::Flush || !is_refused)
}

struct FlushRecordDevice {
    inner: Arc<dyn Device>,
    flushes: Arc<FlushRecord>,
}

impl Device for FlushRecordDevice {
    fn facts(&self) -> Arc<Facts> {
        self.inner.facts()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        let kind = request.kind();
        if !makes_durable(kind, request.flags) {
            return self.inner.submit(request);
        }
        if let Err(error) = self.flushes.check() {
            return error.into();
        }
        let flushes = self.flushes.clone();
        match self.inner.submit(request).now() {
            Ok(outcome) => PendingRequest::ready(flushes.ended(kind, outcome)),
            Err(pending) => {
                PendingRequest::start(async move { flushes.ended(kind, pending.await) })
            }
        }
    }

    fn file_at(&self, at: u64, len: u64, access: LeaseAccess) -> Option<FileRange> {
        self.inner.file_at(at, len, access)
    }
}
