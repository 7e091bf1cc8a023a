//! A disk of a session, and requests to it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use blockhaul_block::{Can, Device, Facts, Flushes, Outcome, Pending, Reply, Request};

use crate::files;

/// A disk to show.
pub struct Shown {
    /// Its name in a directory.
    pub name: String,
    /// The disk, fenced.
    pub device: Arc<dyn Device>,
    /// It may be written.
    pub write: bool,
}

/// A request of the kernel to a disk.
#[derive(Clone, Copy)]
pub(super) struct Call {
    /// Its number.
    pub(super) unique: u64,
    /// The place of the disk in the session's list.
    pub(super) disk: usize,
}

/// A disk that is shown as a file, with what is known about its writes.
pub(super) struct Disk {
    name: String,
    pub(super) device: Arc<dyn Device>,
    pub(super) write: bool,
    flushes: Arc<Flushes>,
    /// Something was written since the last flush was asked for.
    pub(super) unflushed: AtomicBool,
}

impl Disk {
    pub(super) fn new(shown: Shown) -> Disk {
        let Shown { name, device, write } = shown;
        let unflushed = AtomicBool::new(false);
        Disk { name, device, write, flushes: Arc::default(), unflushed }
    }

    /// Starts a flush of what was written since the last one.
    pub(super) fn flush_last(&self) -> Pending {
        if !self.unflushed.swap(false, Ordering::SeqCst) || !self.has_flush() {
            return Ok(Reply::Done).into();
        }
        match self.submit_durable(Request::flush()) {
            Ok(outcome) => outcome.into(),
            Err(pending) => pending,
        }
    }

    pub(super) fn has_flush(&self) -> bool {
        self.device.facts().can.contains(Can::FLUSH)
    }

    /// Submits a flush or FUA request, unless one has failed before. It succeeds only if no other
    /// one fails meanwhile.
    pub(super) fn submit_durable(&self, request: Request) -> Result<Outcome, Pending> {
        let alone = self.device.facts().flush_failures_stay;
        let durable = match self.flushes.begin(request.kind()) {
            Ok(durable) => durable,
            Err(error) => return Ok(Err(error)),
        };
        match self.device.submit(request).now() {
            Ok(outcome) => durable.end_now(outcome, alone).map_err(|(durable, outcome)| {
                Pending::start(async move { durable.end(outcome, alone).await })
            }),
            Err(pending) => {
                Err(Pending::start(async move { durable.end(pending.await, alone).await }))
            }
        }
    }
}

impl files::Shown for Disk {
    fn name(&self) -> &str {
        &self.name
    }

    fn write(&self) -> bool {
        self.write
    }

    fn facts(&self) -> Arc<Facts> {
        self.device.facts()
    }
}
