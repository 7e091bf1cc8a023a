//! The disk of a session, for all of its queues.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, RwLock};
use std::time::{Duration, Instant};

use blockhaul_block::{
    Can, Device, Error, Flushes, OpKind, Outcome, PendingRequest, Request, RequestFlags,
};
use blockhaul_io::Pool;

use crate::blk::ID;

/// Interval of log lines about failed requests.
const LOG_AGAIN: Duration = Duration::from_secs(1);

/// Who counts the requests of a session. Called on the workers of its queues.
pub trait RequestWatcher: Send + Sync {
    /// The device has a request that did not complete at once.
    fn begun(&self);

    /// It has completed.
    fn ended(&self);

    /// A request was answered; `bytes` is none for one that failed.
    fn answered(&self, kind: OpKind, bytes: Option<u64>);

    /// So many requests took this time each.
    fn took(&self, kind: OpKind, time: Duration, count: u64);
}

/// What all queues of a session share.
pub(crate) struct VhostDisk {
    device: RwLock<Arc<dyn Device>>,
    flushes: Arc<Flushes>,
    pub(crate) pool: Pool,
    pub(crate) id: [u8; ID],
    /// The driver does not flush: each write is to be durable.
    pub(crate) durable_writes: AtomicBool,
    pub(crate) watch: Arc<dyn RequestWatcher>,
    logged: Mutex<Option<Instant>>,
}

impl VhostDisk {
    pub(crate) fn new(
        device: Arc<dyn Device>,
        flushes: Arc<Flushes>,
        pool: Pool,
        name: &str,
        watch: Arc<dyn RequestWatcher>,
    ) -> Arc<VhostDisk> {
        let mut id = [0; ID];
        let bytes = &name.as_bytes()[..name.len().min(ID)];
        id[..bytes.len()].copy_from_slice(bytes);
        Arc::new(VhostDisk {
            device: RwLock::new(device),
            flushes,
            pool,
            id,
            durable_writes: AtomicBool::new(false),
            watch,
            logged: Mutex::default(),
        })
    }

    /// The device as it is now.
    pub(crate) fn device(&self) -> Arc<dyn Device> {
        self.device.read().expect("no panic under this lock").clone()
    }

    /// Uses another handle for later requests.
    pub(crate) fn set_device(&self, device: Arc<dyn Device>) {
        *self.device.write().expect("no panic under this lock") = device;
    }

    /// The flags of writes.
    pub(crate) fn write_flags(&self, can: Can) -> RequestFlags {
        let durable = can.contains(Can::FUA) && self.durable_writes.load(Ordering::Relaxed);
        if durable { RequestFlags::FUA } else { RequestFlags::empty() }
    }

    /// Submits a request.
    pub(crate) fn submit(
        &self,
        device: &Arc<dyn Device>,
        request: Request,
    ) -> Result<Outcome, PendingRequest> {
        if request.kind() == OpKind::Flush || request.flags.contains(RequestFlags::FUA) {
            self.flushes.submit(&**device, request, device.facts().flush_failures_stay)
        } else {
            device.submit(request).now()
        }
    }

    /// Logs why a request failed, now and then.
    pub(crate) fn log(&self, error: &Error) {
        let mut logged = self.logged.lock().expect("no panic under this lock");
        if logged.is_none_or(|when| blockhaul_io::elapsed(when) >= LOG_AGAIN) {
            *logged = Some(blockhaul_io::now());
            log::warn!("{error}");
        }
    }
}
