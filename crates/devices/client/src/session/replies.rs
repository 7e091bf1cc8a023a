//! Replies: matches them with requests, and receives payloads directly into their buffers.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;

use blockhaul_block::{Error, Kind};
use blockhaul_io::{RecvWindow, Reservation};
use blockhaul_wire::Replies;
use blockhaul_wire::reply::{self, Chunk, ChunkKind, Header};

use super::{InFlight, Session, lost};
use crate::reply::{
    CHUNKS_MAX, Expected, Reading, Want, cut_off, server_error, small_chunk, violation, wrong,
};

impl Session {
    /// Receives replies until the connection ends.
    pub(super) async fn read_replies(self: Arc<Self>, mut window: RecvWindow) {
        loop {
            match self.next_reply(&mut window).await {
                Ok(true) => {}
                Ok(false) => {
                    let text = "the server closed the connection";
                    self.break_off(Error::new(Kind::Disconnected, text));
                    return;
                }
                Err(error) => {
                    self.break_off(error);
                    return;
                }
            }
        }
    }

    /// Receives one reply message; false at an orderly end of the stream.
    async fn next_reply(&self, window: &mut RecvWindow) -> Result<bool, Error> {
        let header = loop {
            match Header::parse(window.bytes(), self.replies).map_err(|error| wrong(&error))? {
                Some((header, used)) => {
                    window.consume(used);
                    self.traffic.received(used);
                    break header;
                }
                None => {
                    let more = window.fill(&self.stream).await;
                    self.lock().active = blockhaul_io::now();
                    if !more.map_err(|error| lost("cannot receive", error))? {
                        return if window.bytes().is_empty() { Ok(false) } else { Err(cut_off()) };
                    }
                }
            }
        };
        match header {
            Header::Simple { cookie, error } => self.simple(window, cookie, error).await?,
            Header::Chunk(chunk) => self.chunk(window, chunk).await?,
        }
        Ok(true)
    }

    async fn simple(
        &self,
        window: &mut RecvWindow,
        cookie: u64,
        error: Option<blockhaul_wire::Errno>,
    ) -> Result<(), Error> {
        let mut request = self.take(cookie)?;
        if let Some(errno) = error {
            request.expected.error = Some(server_error(errno, ""));
        } else if let Want::Read(reading) = &mut request.expected.want {
            // nbd: structured.simple-read-refused
            if self.replies != Replies::Simple {
                self.put_back(request);
                return Err(violation("a simple reply to a read, with structured replies on"));
            }
            let received = self.whole_payload(window, reading).await;
            if let Err(error) = received {
                self.put_back(request);
                return Err(error);
            }
        } else if let Want::Extents { .. } = request.expected.want {
            self.put_back(request);
            return Err(violation("a simple reply to block status"));
        }
        self.finish(request);
        Ok(())
    }

    async fn chunk(&self, window: &mut RecvWindow, chunk: Chunk) -> Result<(), Error> {
        let mut request = self.take(chunk.cookie)?;
        request.expected.chunks += 1;
        let result = if request.expected.chunks > CHUNKS_MAX {
            Err(violation("a reply in too many chunks"))
        } else {
            self.chunk_payload(window, &chunk, &mut request.expected).await
        };
        if result.is_err() || !chunk.is_done() {
            self.put_back(request);
            return result;
        }
        self.finish(request);
        Ok(())
    }

    async fn chunk_payload(
        &self,
        window: &mut RecvWindow,
        chunk: &Chunk,
        expected: &mut Expected,
    ) -> Result<(), Error> {
        // nbd: extended.offset-checked
        if chunk.offset.is_some_and(|offset| offset != expected.at) {
            return Err(violation("a reply with another offset than the request's"));
        }
        match chunk.kind {
            ChunkKind::None => Ok(()),
            ChunkKind::OffsetData => {
                let mut prefix = [0; reply::DATA_PREFIX_LEN];
                self.payload(window, &mut prefix).await?;
                let len = chunk.length.saturating_sub(prefix.len() as u64);
                let place = expected.place(u64::from_be_bytes(prefix), len);
                let start = place.ok_or_else(|| violation("data outside of the request"))?;
                let Want::Read(reading) = &mut expected.want else {
                    return Err(violation("data in reply to another command than read"));
                };
                if len == expected.len && reading.is_untouched() {
                    return self.whole_payload(window, reading).await;
                }
                if reading.has_room() {
                    self.lock().partial += 1;
                }
                let Some(mut buf) = reading.take_buf() else {
                    return Err(violation("data after the complete reply"));
                };
                // Inside the buffer, which has the request's length.
                // nbd: read.reassemble
                let part = &mut buf[start as usize..(start + len) as usize];
                let received = self.payload(window, part).await;
                reading.filled(buf, start, len);
                received
            }
            kind => {
                // Limited by the codec for every kind.
                let mut payload = vec![0; chunk.length as usize];
                self.payload(window, &mut payload).await?;
                small_chunk(kind, &payload, expected)
            }
        }
    }

    /// Receives a payload that is the whole reply to a read.
    async fn whole_payload(
        &self,
        window: &mut RecvWindow,
        reading: &mut Reading,
    ) -> Result<(), Error> {
        let Some(room) = reading.take_room() else {
            return Err(violation("more data than was asked for"));
        };
        let room = self.claim(room).await;
        match self.alive(window.payload_or_parked(&self.stream, room)).await {
            Ok(Some(data)) => {
                self.traffic.received_more(data.len() as u64);
                reading.filled_whole(data);
                Ok(())
            }
            Ok(None) => Err(cut_off()),
            Err(error) => Err(lost("cannot receive", error)),
        }
    }

    async fn payload(&self, window: &mut RecvWindow, into: &mut [u8]) -> Result<(), Error> {
        let len = into.len() as u64;
        match self.alive(window.payload(&self.stream, into)).await {
            Ok(true) => {
                self.traffic.received_more(len);
                Ok(())
            }
            Ok(false) => Err(cut_off()),
            Err(error) => Err(lost("cannot receive", error)),
        }
    }

    /// The memory for a reply that has arrived. Nothing is received meanwhile, which does not count
    /// as the server's silence.
    async fn claim(&self, room: Reservation) -> Reservation {
        {
            let mut state = self.lock();
            if state.partial > 0 {
                // Partial replies hold memory that would wait for the data after this.
                return room.claim_now();
            }
            state.claiming = true;
        }
        let room = room.claim().await;
        let mut state = self.lock();
        (state.claiming, state.active) = (false, blockhaul_io::now());
        room
    }

    /// Records each poll of a receive, which means that bytes arrived: a large payload on a slow
    /// line is not silence.
    async fn alive<T>(&self, receiving: impl Future<Output = T>) -> T {
        let mut receiving = pin!(receiving);
        poll_fn(|cx| {
            let polled = receiving.as_mut().poll(cx);
            self.lock().active = blockhaul_io::now();
            polled
        })
        .await
    }

    /// Takes a request out of the table while its reply is processed; its slot stays reserved.
    fn take(&self, cookie: u64) -> Result<InFlight, Error> {
        let mut state = self.lock();
        let slot = state.in_flight.get_mut(slot(cookie));
        let request = slot.and_then(|slot| slot.take_if(|request| request.cookie == cookie));
        request.ok_or_else(|| violation("a reply to a request that is not in flight"))
    }

    /// Puts a request back whose reply continues.
    fn put_back(&self, request: InFlight) {
        let mut state = self.lock();
        if state.broken.is_none()
            && let Some(slot) = state.in_flight.get_mut(slot(request.cookie))
        {
            *slot = Some(request);
            return;
        }
        let error = state.broken.clone().unwrap_or_else(cut_off);
        drop(state);
        request.completer.complete(Err(error));
    }

    fn finish(&self, mut request: InFlight) {
        // A server that replies with an error may not have read the payload yet.
        if request.expected.error.is_none()
            && let Some(lent) = request.lent.take()
        {
            lent.returned();
        }
        let mut state = self.lock();
        state.partial -= usize::from(request.expected.is_partial());
        state.replied = state.active;
        if request.payload {
            state.payloads -= 1;
            state.moved += request.expected.len;
        }
        // Already gone if the connection has been dropped meanwhile.
        let _ = state.in_flight.try_remove(slot(request.cookie));
        self.end_if_done(&mut state);
        drop(state);
        let outcome = request.expected.finish();
        if let Err(error) = &outcome
            && error.kind() == Kind::ShuttingDown
        {
            self.leave(error);
        }
        request.completer.complete(outcome);
    }
}

/// The slot of a cookie's request in the table.
fn slot(cookie: u64) -> usize {
    (cookie & u64::from(u32::MAX)) as usize
}
