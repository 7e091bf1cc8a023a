//! What a connection waits for, and for how long: its turn, memory, slow clients, the end.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::atomic::Ordering;
use std::task::Poll;
use std::time::Duration;

use blockhaul_block::{Error, Kind};
use blockhaul_catalog::Visit;
use blockhaul_io::{Pool, Reservation};
use blockhaul_wire::Errno;
use blockhaul_wire::reply::ReplyEncoder;

use super::Session;
use crate::in_flight::RequestSlot;
use crate::log_fields::{RequestFields, record};
use crate::reply;

/// Maximum bytes queued outside the pool's buffers before another request is read: heads and texts
/// of replies that a client does not read.
const LOOSE_MAX: u64 = 1 << 20;
/// Bytes of queued replies at which the next read waits, if reads complete at once. An earlier read
/// would not be answered earlier, but its payload would leave the cache before it is sent, and
/// there are not enough pipes for the payloads of many reads.
const READ_AHEAD: usize = 256 << 10;
/// Time after which it waits no longer: a client that reads nothing may have sent other requests
/// behind it.
const READ_AHEAD_WAIT: Duration = Duration::from_millis(100);
/// Memory that a connection may always use, as long as there is any.
const FAIR_LEAST: u64 = 1 << 20;

impl Session {
    /// Waits until the client has read most of the queued replies, if reads complete at once: then
    /// it is the client that is slower.
    pub(super) async fn wait_for_reader(&self) {
        while self.reads_at_once.get() && !self.reads_ahead.get() {
            let mark = self.progress.mark();
            if self.out.borrow().queued() < READ_AHEAD {
                return;
            }
            if !self.send_some() {
                let progress = self.progress.wait_after(mark);
                let waited = blockhaul_io::timeout(READ_AHEAD_WAIT, progress).await;
                self.reads_ahead.set(waited.is_err());
            }
        }
    }

    /// Waits until another request may be started. If others had to wait as well, the caller keeps
    /// the returned place until it has started the request.
    pub(super) async fn wait_for_turn(&self) -> Option<RequestSlot> {
        let mut place = None;
        loop {
            let mark = self.progress.mark();
            let queued = self.out.borrow().queued() as u64;
            let in_flight = self.in_flight.count();
            let busy = in_flight >= self.limits.requests
                || (queued > LOOSE_MAX && queued > LOOSE_MAX + self.pool.reserved());
            // One at a time is always allowed.
            let crowded =
                in_flight > 0 && self.server.all_in_flight.is_full(self.limits.requests_all);
            if !busy && !crowded {
                return None;
            }
            if self.send_some() {
                continue;
            }
            let progress = self.progress.wait_after(mark);
            if busy {
                progress.await;
                continue;
            }
            let all = &self.server.all_in_flight;
            let turn = place.get_or_insert_with(|| all.wait(self.limits.requests_all));
            if let Some(place) = either(turn, progress).await {
                return place.ok();
            }
        }
    }

    /// Whether `cost` more bytes are within the memory that this connection may always use.
    fn has_part(&self, own: u64, cost: u64) -> bool {
        if own == 0 || own + cost <= FAIR_LEAST {
            return true;
        }
        let half = self.server.config.pool.limit() / 2;
        own + cost <= half / self.server.open().max(1) as u64
    }

    /// Waits until `len` more bytes leave enough to others: once half of the pool is in use, each
    /// connection is entitled to a share of the other half, so that clients that read nothing
    /// cannot hold all of it. Those that exceed their share wait in order of arrival.
    async fn wait_until_fair(&self, len: usize) {
        let own = self.pool.reserved();
        let cost = Pool::cost(len);
        if own == 0 || own + cost <= FAIR_LEAST {
            return;
        }
        let all = &self.server.config.pool;
        let half = all.limit() / 2;
        if all.is_below(len, half) || self.has_part(own, cost) {
            return;
        }
        let mut turn = all.wait_below(len, half);
        loop {
            let mark = self.progress.mark();
            if self.has_part(self.pool.reserved(), cost) {
                return;
            }
            if self.send_some() {
                continue;
            }
            if either(&mut turn, self.progress.wait_after(mark)).await.is_some() {
                return;
            }
        }
    }

    /// Sends what the socket takes; whether that was anything, so that a condition is checked again.
    /// Waking the writer instead would wake this task in turn, without end.
    fn send_some(&self) -> bool {
        let before = self.out.borrow().queued();
        self.send();
        self.out.borrow().queued() < before
    }

    pub(super) async fn room(&self, len: u64) -> Result<Reservation, Error> {
        // Limited by the payload limit, which has 32 bits.
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        self.wait_until_fair(len).await;
        if let Some(room) = self.pool.try_reserve(len) {
            return Ok(room);
        }
        // Clients that hold the pool, or wait for it first, may take long.
        if let Some(room) = self.aside.try_reserve(len) {
            return Ok(room);
        }
        // Queued replies hold memory.
        self.send();
        self.to_send.notify();
        // Others hold the memory, unless this client's own share is exhausted.
        let own = self.pool.reserved() + Pool::cost(len) > self.pool.limit();
        let _starving = (!own).then(|| self.server.starving());
        let room = self.pool.reserve(len).await;
        room.map_err(|error| Error::new(Kind::NoMemory, "no buffer of this size").because(error))
    }

    /// Receives a payload, for which memory is held. A client that takes long to send it is cut if
    /// others wait for memory.
    pub(super) async fn patiently<T>(
        &self,
        receiving: impl Future<Output = std::io::Result<T>>,
    ) -> std::io::Result<T> {
        let patience = self.limits.stalled;
        if patience.is_zero() {
            return receiving.await;
        }
        let mut receiving = pin!(receiving);
        if let Ok(received) = blockhaul_io::timeout(patience, receiving.as_mut()).await {
            return received;
        }
        loop {
            let mut hungry = self.server.hungry.listen();
            if self.server.is_starving() {
                let text =
                    "the client does not send the data of its request, and others need the memory";
                return Err(std::io::Error::new(std::io::ErrorKind::TimedOut, text));
            }
            if let Some(received) = either(receiving.as_mut(), &mut hungry).await {
                return received;
            }
        }
    }

    /// Waits for the socket. A client that reads nothing for long is cut if others wait for the
    /// memory of its replies, or if it has no more requests.
    pub(super) async fn writable(&self) -> std::io::Result<()> {
        let patience = self.limits.stalled;
        if patience.is_zero() {
            return self.stream.writable().await;
        }
        let mut ready = pin!(self.stream.writable());
        if let Ok(ready) = blockhaul_io::timeout(patience, ready.as_mut()).await {
            return ready;
        }
        loop {
            let mark = self.progress.mark();
            let mut hungry = self.server.hungry.listen();
            if self.server.is_starving() || self.leaving.get() {
                let text = "the client does not read its replies";
                return Err(std::io::Error::new(std::io::ErrorKind::TimedOut, text));
            }
            let news = pin!(either(&mut hungry, self.progress.wait_after(mark)));
            if let Some(ready) = either(ready.as_mut(), news).await {
                return ready;
            }
        }
    }

    /// Waits until the device has finished all requests and the client has read all replies; during
    /// a stop, with a time limit. Returns whether the device has finished.
    pub(super) async fn finish_all(&self, visit: &dyn Visit) -> bool {
        let mut finished = true;
        let mut reads_until = None;
        loop {
            let mark = self.progress.mark();
            let mut closing = self.server.closing.listen();
            self.send();
            let waiting = self.out.borrow().queued() > 0 && !self.broken.get();
            if self.in_flight.count() == 0 && !waiting {
                return finished;
            }
            // A client that has only sent its last request still reads.
            if self.broken.get() {
                visit.unreachable();
            }
            let mut wait = None;
            if let Some(stop) = self.server.stop_order() {
                let now = blockhaul_io::now();
                if self.in_flight.count() > 0 {
                    if now >= stop.drained {
                        self.give_up();
                        finished = false;
                        continue;
                    }
                    wait = Some(stop.drained - now);
                } else {
                    let until = *reads_until.get_or_insert(now + stop.patience);
                    if now >= until {
                        let text = "the client does not read its replies, and the server stops";
                        let late = std::io::Error::new(std::io::ErrorKind::TimedOut, text);
                        self.break_off(&late);
                        continue;
                    }
                    wait = Some(until - now);
                }
            }
            // The state is checked again either way.
            let progress = self.progress.wait_after(mark);
            match wait {
                Some(wait) => _ = blockhaul_io::timeout(wait, progress).await,
                None => _ = either(&mut closing, progress).await,
            }
        }
    }

    // nbd: disconnect.server-stop
    /// Answers the requests still in flight at the device; they may or may not be carried out.
    fn give_up(&self) {
        let given_up = self.in_flight.give_up();
        let connection = &self.connection;
        let peer = &connection.peer;
        let export = blockhaul_wire::printable(self.negotiated.export.as_bytes(), 256);
        self.server.all_in_flight.remove(given_up.len(), self.limits.requests_all);
        self.server.given_up.fetch_add(given_up.len(), Ordering::Relaxed);
        self.connection.counters.in_progress(0);
        let text = "the server stops, but the device has not completed the request";
        for request in given_up {
            let header = request.header;
            let RequestFields { request: kind, offset, length } = RequestFields::of(&header);
            record!(
                Warn, connection, request = kind, offset, length, error = text;
                "gave up, of {peer} on export \"{export}\": {request}"
            );
            self.connection.counters.refused();
            let replies = self.negotiated.replies;
            let answer = ReplyEncoder { replies, cookie: header.cookie, offset: header.offset };
            reply::failure(&mut self.out.borrow_mut(), &answer, Errno::Shutdown, text);
        }
    }
}

/// The output of `one`, or `None` if `other` completes first. `one` can be continued.
async fn either<T>(one: impl Future<Output = T> + Unpin, other: impl Future) -> Option<T> {
    let mut one = one;
    let mut other = pin!(other);
    poll_fn(|cx| match pin!(&mut one).poll(cx) {
        Poll::Ready(output) => Poll::Ready(Some(output)),
        Poll::Pending => other.as_mut().poll(cx).map(|_| None),
    })
    .await
}
