//! A disk whose flushes somebody sees.

use std::sync::{Arc, Mutex, PoisonError};

use blockhaul_block::{Device, Facts, OpKind, PendingRequest, Request};

/// What is called for each flush, if it is set.
#[derive(Clone, Default)]
pub(crate) struct FlushHook(Arc<Mutex<Option<FlushCallback>>>);

type FlushCallback = Box<dyn Fn() + Send>;

impl FlushHook {
    /// Calls this from now on, or nothing.
    pub(crate) fn set(&self, seer: Option<FlushCallback>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = seer;
    }

    fn see(&self) {
        if let Some(seer) = &*self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            seer();
        }
    }
}

/// The disk.
pub(crate) struct FlushObserver {
    inner: Arc<dyn Device>,
    look: FlushHook,
}

impl FlushObserver {
    /// The same disk.
    pub(crate) fn over(inner: Arc<dyn Device>, look: FlushHook) -> Arc<FlushObserver> {
        Arc::new(FlushObserver { inner, look })
    }
}

impl Device for FlushObserver {
    fn facts(&self) -> Arc<Facts> {
        self.inner.facts()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        if request.kind() == OpKind::Flush {
            self.look.see();
        }
        self.inner.submit(request)
    }
}
