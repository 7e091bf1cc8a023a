//! What a connection waits for: its turn, memory, slow clients, the end; and how long.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::atomic::Ordering;
use std::task::Poll;

use blockhaul_block::{Error, Kind};
use blockhaul_io::{Pool, Reservation};
use blockhaul_wire::Errno;
use blockhaul_wire::reply::Answer;

use super::Session;
use crate::held::Place;
use crate::records::{Asked, record};
use crate::reply;

/// No request is taken up while more than this waits to be sent that is not in buffers of the pool:
/// heads and texts of replies that a client does not read.
const LOOSE_MAX: u64 = 1 << 20;
/// Memory that a connection may use whatever others use, as far as there is any.
const FAIR_LEAST: u64 = 1 << 20;

impl Session {
    /// Waits until another request may be taken up. What is returned, where others had to wait as well, is
    /// kept until it has been.
    pub(super) async fn wait_for_turn(&self) -> Option<Place> {
        let mut place = None;
        loop {
            let mark = self.progress.mark();
            let queued = self.out.borrow().queued() as u64;
            let held = self.held.count();
            let busy = held >= self.limits.requests
                || (queued > LOOSE_MAX && queued > LOOSE_MAX + self.pool.reserved());
            // One at a time is always taken up, whatever others do.
            let crowded = held > 0 && self.server.everywhere.is_full(self.limits.requests_all);
            if !busy && !crowded {
                return None;
            }
            self.send();
            self.to_send.notify();
            let progress = self.progress.wait_after(mark);
            if busy {
                progress.await;
                continue;
            }
            let everywhere = &self.server.everywhere;
            let turn = place.get_or_insert_with(|| everywhere.wait(self.limits.requests_all));
            if let Some(place) = either(turn, progress).await {
                return place.ok();
            }
        }
    }

    /// Whether so much more memory is within what this connection has whatever others use.
    fn has_part(&self, own: u64, cost: u64) -> bool {
        if own == 0 || own + cost <= FAIR_LEAST {
            return true;
        }
        let half = self.server.config.pool.limit() / 2;
        own + cost <= half / self.server.open().max(1) as u64
    }

    /// Waits until so much more memory leaves the others theirs: once half of it is in use, a connection has
    /// its part of the other half. So those that read nothing cannot hold all of it. Those beyond their part
    /// wait in the order in which they came.
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
            self.send();
            self.to_send.notify();
            if either(&mut turn, self.progress.wait_after(mark)).await.is_some() {
                return;
            }
        }
    }

    pub(super) async fn room(&self, len: u64) -> Result<Reservation, Error> {
        // Bounded by the payload limit, which has 32 bits.
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        self.wait_until_fair(len).await;
        if let Some(room) = self.pool.try_reserve(len) {
            return Ok(room);
        }
        // Those who hold the pool, or stand before it, may take long.
        if let Some(room) = self.aside.try_reserve(len) {
            return Ok(room);
        }
        // What waits to be sent holds room.
        self.send();
        self.to_send.notify();
        // Others have it, unless this client's own share is used up.
        let own = self.pool.reserved() + Pool::cost(len) > self.pool.limit();
        let _starving = (!own).then(|| self.server.starving());
        let room = self.pool.reserve(len).await;
        room.map_err(|error| Error::new(Kind::NoMemory, "no buffer of this size").because(error))
    }

    /// Receives a payload, for which memory is held. A client that takes long to send it is cut when
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
                let text = "the client does not send what it began, and others need its memory";
                return Err(std::io::Error::new(std::io::ErrorKind::TimedOut, text));
            }
            if let Some(received) = either(receiving.as_mut(), &mut hungry).await {
                return received;
            }
        }
    }

    /// Waits for the socket. A client that reads nothing for long is cut when others wait for the
    /// memory that its replies hold, and when it asks for nothing any more.
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

    /// Waits until the device has finished all requests and the client has read all replies. When the
    /// server stops, only for as long as that may take. Whether the device has finished.
    pub(super) async fn finish_all(&self) -> bool {
        let mut finished = true;
        let mut reads_until = None;
        loop {
            let mark = self.progress.mark();
            let mut closing = self.server.closing.listen();
            self.send();
            let waiting = self.out.borrow().queued() > 0 && !self.broken.get();
            if self.held.count() == 0 && !waiting {
                return finished;
            }
            let mut wait = None;
            if let Some(stop) = self.server.stop_order() {
                let now = blockhaul_io::now();
                if self.held.count() > 0 {
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
            // Either way things are looked at again.
            let progress = self.progress.wait_after(mark);
            match wait {
                Some(wait) => _ = blockhaul_io::timeout(wait, progress).await,
                None => _ = either(&mut closing, progress).await,
            }
        }
    }

    /// Answers what the device still holds, so that clients know: it may or may not be carried out.
    fn give_up(&self) {
        let held = self.held.give_up();
        let connection = &self.connection;
        let peer = &connection.peer;
        let export = blockhaul_wire::printable(self.negotiated.export.as_bytes(), 256);
        self.server.everywhere.remove(held.len(), self.limits.requests_all);
        self.server.given_up.fetch_add(held.len(), Ordering::Relaxed);
        self.connection.tally.in_progress(0);
        let text = "the server stops, and its device has not finished the request";
        for held in held {
            let header = held.header;
            let Asked { request, offset, length } = Asked::of(&header);
            record!(
                Warn, connection, request, offset, length, error = text;
                "gave up, of {peer} on export \"{export}\": {held}"
            );
            self.connection.tally.refused();
            let replies = self.negotiated.replies;
            let answer = Answer { replies, cookie: header.cookie, offset: header.offset };
            reply::failure(&mut self.out.borrow_mut(), &answer, Errno::Shutdown, text);
        }
    }
}

/// What comes first: the output of the one, or `None` for the other. The first one goes on where it was.
async fn either<T>(one: impl Future<Output = T> + Unpin, other: impl Future) -> Option<T> {
    let (mut one, mut other) = (one, pin!(other));
    poll_fn(|cx| match pin!(&mut one).poll(cx) {
        Poll::Ready(output) => Poll::Ready(Some(output)),
        Poll::Pending => other.as_mut().poll(cx).map(|_| None),
    })
    .await
}
