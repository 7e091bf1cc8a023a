//! Limits on the bytes and the requests per second of several connections together, which none of them can use up.
//!
//! Each connection has one request at a time in the order of all, and of that no more than the bytes of 100 ms: then the
//! other connections follow. A request waits for its own bytes, and for one such piece of each other connection, however
//! many and however long the requests of these are.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use blockhaul_block::{Device, Error, Facts, Kind, Op, PendingRequest, Request, Result};
use blockhaul_io::FifoLock;

use crate::rate::Bucket;

/// Limits of several connections together, which can change while the connections are in use. Reads, writes, zero and
/// trim requests count, each with its length.
#[derive(Debug)]
pub struct SharedThrottle {
    bytes: Bucket,
    requests: Bucket,
}

/// A connection under a [`SharedThrottle`].
#[derive(Default)]
pub struct ThrottledConnection {
    /// The order of its requests.
    queue: Arc<FifoLock>,
    /// Whether the client has left.
    is_gone: AtomicBool,
}

impl ThrottledConnection {
    /// Ends the reads of a client that has left, and gives back their places. Other requests are carried out.
    pub fn leave(&self) {
        self.is_gone.store(true, Ordering::Relaxed);
    }

    fn check_present(&self) -> Result<()> {
        if self.is_gone.load(Ordering::Relaxed) {
            return Err(Error::new(Kind::ShuttingDown, "its client has left before its turn"));
        }
        Ok(())
    }
}

impl SharedThrottle {
    /// Limits above 0, in bytes and requests per second; `None`: no limit.
    pub fn new(bytes: Option<u64>, requests: Option<u64>) -> SharedThrottle {
        let [bytes, requests] = [bytes, requests].map(|limit| {
            let (rate, burst) = rate_and_burst(limit);
            Bucket::new(rate, burst)
        });
        SharedThrottle { bytes, requests }
    }

    /// Changes the limits, also for requests that wait.
    pub fn set(&self, bytes: Option<u64>, requests: Option<u64>) {
        for (bucket, limit) in [(&self.bytes, bytes), (&self.requests, requests)] {
            let (rate, burst) = rate_and_burst(limit);
            bucket.set(rate, burst);
        }
    }

    /// The device of a connection with these limits.
    pub fn wrap(
        self: &Arc<Self>,
        inner: Arc<dyn Device>,
        connection: Arc<ThrottledConnection>,
    ) -> Arc<dyn Device> {
        Arc::new(SharedThrottleDevice { inner, throttle: self.clone(), connection })
    }

    /// The bytes that one connection draws at once.
    fn piece(&self) -> u64 {
        self.bytes.burst().max(1)
    }

    /// Whether a request passes without waiting. Else it has drawn nothing.
    fn passes_now(&self, len: u64) -> bool {
        if len > self.piece() {
            return false;
        }
        let Some(turn) = self.requests.draw_now(1) else { return false };
        let passes = self.bytes.draw_now(len).is_some();
        if !passes {
            self.requests.give_back(turn);
        }
        passes
    }

    /// Waits until a request of this length may go on, or the client has left whose read it is.
    async fn pass(&self, len: u64, reader: Option<&ThrottledConnection>) -> Result<()> {
        pass(&self.requests, 1, reader).await?;
        let mut left = len;
        loop {
            let piece = left.min(self.piece());
            pass(&self.bytes, piece, reader).await?;
            left -= piece;
            if left == 0 {
                return Ok(());
            }
        }
    }
}

/// Waits until these tokens have come in, or the reader has left.
async fn pass(bucket: &Bucket, tokens: u64, reader: Option<&ThrottledConnection>) -> Result<()> {
    let check_present = || reader.map_or(Ok(()), ThrottledConnection::check_present);
    check_present()?;
    let turn = bucket.draw(tokens);
    while let Some(wait) = bucket.wait(turn) {
        blockhaul_io::sleep(wait).await;
        check_present().inspect_err(|_| bucket.give_back(turn))?;
    }
    Ok(())
}

/// No limit is a rate at which everything passes.
fn rate_and_burst(limit: Option<u64>) -> (u64, u64) {
    let rate = limit.unwrap_or(u64::MAX);
    (rate, rate / 10)
}

struct SharedThrottleDevice {
    inner: Arc<dyn Device>,
    throttle: Arc<SharedThrottle>,
    connection: Arc<ThrottledConnection>,
}

impl Device for SharedThrottleDevice {
    fn facts(&self) -> Arc<Facts> {
        self.inner.facts()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        if !matches!(request.op, Op::Read(_) | Op::Write(_) | Op::Zero | Op::Trim) {
            return self.inner.submit(request);
        }
        let place = self.connection.queue.try_lock();
        if place.is_some() && self.throttle.passes_now(request.len) {
            return self.inner.submit(request);
        }
        drop(place);
        let inner = self.inner.clone();
        let throttle = self.throttle.clone();
        let connection = self.connection.clone();
        PendingRequest::start(async move {
            let place = connection.queue.lock().await;
            let reader = matches!(request.op, Op::Read(_)).then_some(&*connection);
            throttle.pass(request.len, reader).await?;
            drop(place);
            inner.submit(request).await
        })
    }
}
