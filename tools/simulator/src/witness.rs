//! A disk whose flushes somebody sees.

use std::sync::{Arc, Mutex, PoisonError};

use blockhaul_block::{Device, Facts, OpKind, Pending, Request};

/// What is called for each flush, if it is set.
#[derive(Clone, Default)]
pub(crate) struct Look(Arc<Mutex<Option<Seer>>>);

type Seer = Box<dyn Fn() + Send>;

impl Look {
    /// Calls this from now on, or nothing.
    pub(crate) fn set(&self, seer: Option<Seer>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = seer;
    }

    fn see(&self) {
        if let Some(seer) = &*self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            seer();
        }
    }
}

/// The disk.
pub(crate) struct Witness {
    inner: Arc<dyn Device>,
    look: Look,
}

impl Witness {
    /// The same disk.
    pub(crate) fn over(inner: Arc<dyn Device>, look: Look) -> Arc<Witness> {
        Arc::new(Witness { inner, look })
    }
}

impl Device for Witness {
    fn facts(&self) -> Arc<Facts> {
        self.inner.facts()
    }

    fn submit(&self, request: Request) -> Pending {
        if request.kind() == OpKind::Flush {
            self.look.see();
        }
        self.inner.submit(request)
    }
}
