//! The orderly stop: requests in progress are finished, within time limits for devices and clients.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::atomic::Ordering;
use std::task::Poll;
use std::time::{Duration, Instant};

use blockhaul_io::WorkerHandle;

use crate::Server;

/// Maximum time for which a blocked worker may delay the last replies of its connections at the end
/// of a stop: the client is not at fault.
const BEHIND: Duration = Duration::from_secs(5);

/// Settings of a stop.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stop {
    /// Deadline for devices to finish requests.
    pub(crate) drained: Instant,
    /// Time that a client has to read its last replies.
    pub(crate) patience: Duration,
}

impl Server {
    /// Orderly stop: reads no more requests; those in progress are finished and answered. Clients
    /// have `patience` to read their last replies, then they are cut. Devices have
    /// [`crate::Limits::drain`] to finish; requests still in flight then are logged and answered
    /// ESHUTDOWN, and their number is returned, including those of workers blocked in a device.
    pub async fn stop(&self, patience: Duration) -> usize {
        let drained = blockhaul_io::now() + self.limits().drain;
        self.stop.get_or_init(|| Stop { drained, patience });
        self.stopping.store(true, Ordering::SeqCst);
        self.closing.notify();
        self.clients.stop();
        if self.wait_until_empty(self.limits().drain).await {
            return self.given_up.load(Ordering::Relaxed);
        }
        // Each connection keeps these limits by itself. What is left then blocks the stop.
        let turned = self.wait_for_workers(2 * patience).await;
        if self.open() > 0 {
            self.cut_all(patience).await;
        }
        let given_up = self.given_up.load(Ordering::Relaxed);
        if turned || self.open() == 0 {
            given_up
        } else {
            // Requests that the device carries out on the worker itself are not listed.
            (given_up + self.all_in_flight.count()).max(1)
        }
    }

    async fn cut_all(&self, patience: Duration) {
        let open = self.open();
        let each = if open == 1 { "connection that takes" } else { "connections that take" };
        log::info!(connections = open; "disconnecting {open} {each} too long");
        self.clients.cut();
        self.wait_until_empty(patience).await;
    }

    /// Waits until all connections have ended, or each worker has run and its connections have had
    /// `time`. False: one is blocked for longer than allowed.
    async fn wait_for_workers(&self, time: Duration) -> bool {
        let turning: Vec<_> = (0..blockhaul_io::worker_count())
            .map(|worker| {
                WorkerHandle::to(worker)
                    .spawn(move || async move { blockhaul_io::sleep(time).await })
            })
            .collect();
        let turned = async {
            for worker in turning {
                // Lost only if the worker has ended.
                let _ = worker.await;
            }
        };
        let either = first_of(turned, self.empty());
        blockhaul_io::timeout(time + BEHIND, either).await.is_ok()
    }

    async fn wait_until_empty(&self, patience: Duration) -> bool {
        blockhaul_io::timeout(patience, self.empty()).await.is_ok()
    }

    /// Waits until all connections have ended.
    async fn empty(&self) {
        loop {
            let changed = self.clients.changed();
            if self.open() == 0 {
                return;
            }
            // Only the server drops the other end.
            let _ = changed.await;
        }
    }
}

/// Waits for either of two futures.
async fn first_of(one: impl Future<Output = ()>, other: impl Future<Output = ()>) {
    let mut one = pin!(one);
    let mut other = pin!(other);
    poll_fn(|cx| match one.as_mut().poll(cx) {
        Poll::Ready(()) => Poll::Ready(()),
        Poll::Pending => other.as_mut().poll(cx),
    })
    .await;
}
