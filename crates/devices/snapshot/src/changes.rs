//! What of a disk has changed since it was copied, for a copy that follows a disk in use.

use std::sync::Arc;

use blockhaul_block::{Device, Facts, Op, Pending, Request, Result};
use blockhaul_catalog::Layer;
use blockhaul_io::{Notify, Ticket};

use crate::bitmap::Bitmap;

/// The ranges that were written since they were last [taken](Changes::take).
///
/// A range is marked when its write has completed, with or without success: whoever takes the range
/// and then reads it sees what was written. A dirty bitmap is different: it marks before.
#[derive(Clone)]
pub struct Changes(Arc<Inner>);

struct Inner {
    bitmap: Bitmap,
    /// A range was marked.
    marked: Notify,
}

impl Changes {
    /// No changes, of a disk of `size` bytes, in blocks of `granularity` bytes.
    ///
    /// # Errors
    /// If the granularity is not that of a bitmap.
    pub fn new(size: u64, granularity: u64) -> Result<Changes> {
        let bitmap = Bitmap::new("changes", size, granularity)?;
        Ok(Changes(Arc::new(Inner { bitmap, marked: Notify::default() })))
    }

    /// The layer that marks. All handles that write to the disk must be under it.
    pub fn layer(&self) -> Arc<dyn Layer> {
        Arc::new(Marking(self.0.clone()))
    }

    /// What has changed, as offset and length in bytes, in order. It counts as copied then.
    #[must_use]
    pub fn take(&self) -> Vec<(u64, u64)> {
        self.0.bitmap.take().ranges()
    }

    /// These ranges have not been copied after all.
    pub fn give_back(&self, ranges: &[(u64, u64)]) {
        ranges.iter().for_each(|&(at, len)| self.0.bitmap.mark(at, at.saturating_add(len)));
    }

    /// Number of bytes that have changed.
    pub fn bytes(&self) -> u64 {
        self.0.bitmap.dirty_bytes()
    }

    /// A ticket that completes at the next change, or [wake](Changes::wake). Take it before looking
    /// for changes.
    pub fn listen(&self) -> Ticket<()> {
        self.0.marked.listen()
    }

    /// Completes the tickets of all who listen.
    pub fn wake(&self) {
        self.0.marked.notify();
    }

    /// Whether both are of the same copy.
    pub fn is_same(&self, other: &Changes) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

struct Marking(Arc<Inner>);

impl Layer for Marking {
    fn wrap(&self, inner: Arc<dyn Device>) -> Result<Arc<dyn Device>> {
        let facts = Arc::new(Facts::same(&inner.facts()));
        Ok(Arc::new(Marked { facts, inner, changes: self.0.clone() }))
    }
}

struct Marked {
    facts: Arc<Facts>,
    inner: Arc<dyn Device>,
    changes: Arc<Inner>,
}

impl Device for Marked {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> Pending {
        if !matches!(request.op, Op::Write(_) | Op::Zero | Op::Trim) {
            return self.inner.submit(request);
        }
        let (at, end) = (request.at, request.end().unwrap_or(u64::MAX));
        // Dropped when the write has completed, or at once if it has already.
        let mark = Mark { changes: self.changes.clone(), at, end };
        self.inner.submit(request).guarded(move || mark)
    }
}

/// Marks a range when it is dropped.
struct Mark {
    changes: Arc<Inner>,
    at: u64,
    end: u64,
}

impl Drop for Mark {
    fn drop(&mut self) {
        self.changes.bitmap.mark(self.at, self.end);
        self.changes.marked.notify();
    }
}
