//! Flushes that failed: what a layer remembers of them for all handles on the same storage.
//!
//! The kernel reports data that could not be written once for each open file. A second flush then succeeds,
//! although the data is gone. So a layer that flushes, or repeats requests, never repeats a failed flush,
//! and no later flush succeeds until the storage is opened again.

use std::sync::{Arc, OnceLock};

use block::{
    Access, Can, Device, Error, Facts, FileRange, Flags, Kind, OpKind, Pending, Request, Result,
};

/// Whether the storage has failed a flush or a request with FUA since it was opened; shared by its handles.
#[derive(Default)]
pub(crate) struct Flushes(OnceLock<String>);

impl Flushes {
    /// Fails if data may be lost: then no flush and no request with FUA may succeed.
    pub(crate) fn check(&self) -> Result<()> {
        match self.0.get() {
            None => Ok(()),
            Some(why) => Err(Error::new(
                Kind::Io,
                format!(
                    "an earlier flush failed ({why}), and data written before it may be lost: open the \
                     device again, then write the data again"
                ),
            )),
        }
    }

    /// Data may be lost for this reason.
    pub(crate) fn fail(&self, why: &str) {
        let _ = self.0.set(why.to_string());
    }

    /// Looks at the end of a flush or a request with FUA ([`makes_durable`]). A success counts only if no
    /// other one has failed meanwhile.
    pub(crate) fn ended<T>(&self, kind: OpKind, outcome: Result<T>) -> Result<T> {
        match outcome {
            Ok(reply) => self.check().map(|()| reply),
            Err(error) => {
                if loses_data(kind, error.kind()) {
                    self.fail(&error.text());
                }
                Err(error)
            }
        }
    }

    /// The device; its flushes and requests with FUA go through this.
    pub(crate) fn guard(self: &Arc<Flushes>, inner: Arc<dyn Device>) -> Arc<dyn Device> {
        if !inner.facts().can.intersects(Can::FLUSH | Can::FUA) {
            return inner;
        }
        Arc::new(Guarded { inner, flushes: self.clone() })
    }
}

/// Whether a request makes data durable: a flush, or a change with FUA.
pub(crate) fn makes_durable(kind: OpKind, flags: Flags) -> bool {
    kind == OpKind::Flush || kind.changes() && flags.contains(Flags::FUA)
}

/// Whether a flush or request with FUA that ends with such an error may have lost data. A lost connection
/// has not: another one to the same storage can flush. Neither has a request that was refused.
pub(crate) fn loses_data(kind: OpKind, error: Kind) -> bool {
    let is_refused = matches!(
        error,
        Kind::ReadOnly | Kind::Invalid | Kind::TooLarge | Kind::Unsupported | Kind::Refused
    );
    !matches!(error, Kind::Disconnected | Kind::ShuttingDown)
        && (kind == OpKind::Flush || !is_refused)
}

struct Guarded {
    inner: Arc<dyn Device>,
    flushes: Arc<Flushes>,
}

impl Device for Guarded {
    fn facts(&self) -> Arc<Facts> {
        self.inner.facts()
    }

    fn submit(&self, request: Request) -> Pending {
        let kind = request.kind();
        if !makes_durable(kind, request.flags) {
            return self.inner.submit(request);
        }
        if let Err(error) = self.flushes.check() {
            return error.into();
        }
        let flushes = self.flushes.clone();
        match self.inner.submit(request).now() {
            Ok(outcome) => Pending::ready(flushes.ended(kind, outcome)),
            Err(pending) => Pending::start(async move { flushes.ended(kind, pending.await) }),
        }
    }

    fn file_at(&self, at: u64, len: u64, access: Access) -> Option<FileRange> {
        self.inner.file_at(at, len, access)
    }
}
