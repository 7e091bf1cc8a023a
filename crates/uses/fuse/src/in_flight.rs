//! Requests that the kernel may interrupt: those that change nothing.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use crate::channel::Channel;

/// Requests in flight on all channels that may be answered early, by number. An interrupt can come
/// through another channel than its request.
#[derive(Default)]
pub(crate) struct InFlight(Mutex<HashMap<u64, Arc<Channel>>>);

impl InFlight {
    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Arc<Channel>>> {
        self.0.lock().expect("no panic under this lock")
    }

    /// The request may be answered early from here on.
    pub(crate) fn add(&self, unique: u64, channel: &Arc<Channel>) {
        self.lock().insert(unique, channel.clone());
    }

    /// Takes the request out, in order to answer it; `None`: somebody else does.
    pub(crate) fn take(&self, unique: u64) -> Option<Arc<Channel>> {
        self.lock().remove(&unique)
    }
}
