//! The queues of a session: their settings, and when they run.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use blockhaul_io::{Ticket, WorkerHandle};

use crate::blk::BlkFeatures;
use crate::in_flight::InFlightTable;
use crate::memory::{GuestSpace, Regions};
use crate::protocol::{Message, RingAddress};
use crate::queue::{self, Call, QueueStart, Stopper, VhostDisk};
use crate::ring::{QUEUES_MAX, Ring, RingError, RingLayout};

/// All queues. A queue runs while it is enabled and has a descriptor for notifications.
pub(super) struct Queues {
    disk: Arc<VhostDisk>,
    space: Arc<GuestSpace>,
    features: BlkFeatures,
    table: Option<InFlightTable>,
    all: Vec<QueueConfig>,
}

#[derive(Default)]
struct QueueConfig {
    size: u16,
    address: RingAddress,
    /// Position of the next request.
    base: u16,
    kick: Option<OwnedFd>,
    call: Arc<Call>,
    enabled: bool,
    running: Option<QueueRun>,
}

struct QueueRun {
    stopper: Stopper,
    ended: Ticket<Result<u16, RingError>>,
}

impl Queues {
    pub(super) fn new(disk: Arc<VhostDisk>, space: Arc<GuestSpace>) -> Queues {
        let all = (0..QUEUES_MAX).map(|_| QueueConfig::default()).collect();
        Queues { disk, space, features: BlkFeatures::empty(), table: None, all }
    }

    pub(super) fn set_features(&mut self, features: BlkFeatures) {
        self.features = features;
    }

    pub(super) fn set_table(&mut self, table: InFlightTable) {
        self.table = Some(table);
    }

    fn queue(&mut self, index: u32) -> Result<&mut QueueConfig, String> {
        let queue = usize::try_from(index).ok().and_then(|index| self.all.get_mut(index));
        queue.ok_or_else(|| format!("there is no queue {index}"))
    }

    /// Handles a message about a queue.
    pub(super) async fn change(
        &mut self,
        regions: &Regions,
        message: Message,
        mut fds: Vec<OwnedFd>,
    ) -> Result<(), String> {
        let mut one = |wanted: bool| match (fds.pop(), fds.is_empty()) {
            (fd, true) if fd.is_some() == wanted => Ok(fd),
            _ => Err("a message with a wrong number of descriptors".to_string()),
        };
        match message {
            Message::SetRingSize { queue, size } => {
                let size =
                    u16::try_from(size).map_err(|_| RingError::Size(u16::MAX).to_string())?;
                self.idle(queue)?.size = size;
            }
            Message::SetRingAddress { queue, address } => self.queue(queue)?.address = address,
            Message::SetRingBase { queue, base } => {
                let base =
                    u16::try_from(base).map_err(|_| format!("position {base} of a queue"))?;
                self.idle(queue)?.base = base;
            }
            Message::SetRingKick { queue, has_fd } => {
                let fd = one(has_fd)?.ok_or("a queue without notifications is not supported")?;
                self.stop(queue).await?;
                unblock(&fd)?;
                self.queue(queue)?.kick = Some(fd);
                self.start(regions, queue)?;
            }
            Message::SetRingCall { queue, has_fd } => {
                // It keeps its mode: the front end may wait in a read of it.
                let fd = one(has_fd)?;
                let call = &self.queue(queue)?.call;
                call.set(fd);
                // There may have been something to say before.
                call.signal();
            }
            // Errors are logged here.
            Message::SetRingError { queue, has_fd } => drop((self.queue(queue)?, one(has_fd)?)),
            Message::EnableRing { queue, enabled } => {
                self.queue(queue)?.enabled = enabled;
                if enabled {
                    self.start(regions, queue)?;
                } else {
                    self.stop(queue).await?;
                }
            }
            message => return Err(format!("{message:?} is not expected")),
        }
        Ok(())
    }

    /// A queue that does not run.
    fn idle(&mut self, index: u32) -> Result<&mut QueueConfig, String> {
        let queue = self.queue(index)?;
        match queue.running {
            None => Ok(queue),
            Some(_) => Err(format!("queue {index} is running")),
        }
    }

    /// Stops a queue for good, and returns the position of its next request.
    pub(super) async fn base(&mut self, index: u32) -> Result<u16, String> {
        self.stop(index).await?;
        let queue = self.queue(index)?;
        queue.kick = None;
        Ok(queue.base)
    }

    /// Starts a queue, if it is enabled and has a descriptor for notifications.
    fn start(&mut self, regions: &Regions, index: u32) -> Result<(), String> {
        // Without the optional parts of the protocol, queues are always enabled.
        let always = !self.features.contains(BlkFeatures::PROTOCOL_FEATURES);
        let event_idx = self.features.contains(BlkFeatures::EVENT_IDX);
        let disk = self.disk.clone();
        let space = self.space.clone();
        let number = u16::try_from(index).unwrap_or(u16::MAX);
        let entries = |table: &InFlightTable, size| {
            let entries = table.queue(number, size);
            entries.ok_or_else(|| format!("the table of requests has no queue {index}"))
        };
        let size = self.queue(index)?.size;
        let entries = self.table.as_ref().map(|table| entries(table, size)).transpose();
        let queue = self.queue(index)?;
        let Some(kick) = queue.kick.as_ref().filter(|_| queue.enabled || always) else {
            return Ok(());
        };
        if queue.running.is_some() {
            return Ok(());
        }
        let guest = |user| regions.to_guest(user).ok_or_else(|| RingError::Place.to_string());
        let layout = RingLayout {
            size,
            descriptors: guest(queue.address.descriptors)?,
            available: guest(queue.address.available)?,
            used: guest(queue.address.used)?,
            event_idx,
        };
        Ring::new(layout, queue.base, &space.now()).map_err(|why| why.to_string())?;
        let kick = kick.try_clone().map_err(|error| blockhaul_io::plain(&error))?;
        let base = queue.base;
        let call = queue.call.clone();
        let start = QueueStart { disk, space, layout, base, kick, call, entries: entries? };
        let (stopper, stop) = queue::stopper();
        let worker = WorkerHandle::to(blockhaul_io::worker() + usize::from(number));
        let ended = worker.spawn(move || queue::run(start, stop));
        queue.running = Some(QueueRun { stopper, ended });
        log::debug!("queue {index} of {size} descriptors runs on worker {}", worker.worker());
        Ok(())
    }

    /// Stops a queue after the requests that it has taken.
    async fn stop(&mut self, index: u32) -> Result<(), String> {
        let queue = self.queue(index)?;
        if let Some(QueueRun { stopper, ended }) = queue.running.take() {
            stopper.stop();
            if let Ok(Ok(base)) = ended.await {
                queue.base = base;
            }
        }
        Ok(())
    }

    /// Stops all queues after the requests that they have taken.
    pub(super) async fn stop_all(&mut self) {
        let mut ending = Vec::new();
        for queue in &mut self.all {
            if let Some(QueueRun { stopper, ended }) = queue.running.take() {
                stopper.stop();
                ending.push((queue, ended));
            }
        }
        for (queue, ended) in ending {
            if let Ok(Ok(base)) = ended.await {
                queue.base = base;
            }
        }
    }
}

/// Reads of a descriptor must not block a worker.
fn unblock(fd: &OwnedFd) -> Result<(), String> {
    rustix::io::ioctl_fionbio(fd, true).map_err(|error| error.to_string())
}
