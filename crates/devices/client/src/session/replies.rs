//! Replies: payloads are received directly into their buffers, or stay in pipes.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::{Arc, MutexGuard};

use blockhaul_block::{Error, Kind};
use blockhaul_io::{Buf, Data, RecvWindow, Reservation};
use blockhaul_wire::status::StatusPayload;
use blockhaul_wire::transmission::{ReadRange, ReceiveResult, ReplyError, TransmissionEvent};

use super::{ClientSession, ClientSessionState, SessionRequest};
use crate::reply::{ReadMemory, violation, wrong};
use crate::socket::{closed, cut_off, lost};

impl ClientSessionState {
    /// The memory of a read in flight.
    fn reading(&mut self, cookie: u64) -> Option<&mut ReadMemory> {
        self.transmission.get_mut(cookie)?.reading.as_deref_mut()
    }
}

impl ClientSession {
    /// Receives replies until the connection ends.
    pub(super) async fn read_replies(self: Arc<Self>, mut window: RecvWindow) {
        let error = loop {
            if let Err(error) = self.receive(&mut window).await {
                break error;
            }
        };
        self.break_off(error.clone());
        let mut state = self.lock();
        let receiving = state.receiving.take();
        let error = state.broken.clone().unwrap_or(error);
        drop(state);
        if let Some(request) = receiving {
            request.fail(error);
        }
    }

    /// Receives the bytes that are needed after those in the window.
    async fn receive(&self, window: &mut RecvWindow) -> Result<(), Error> {
        let (used, event) = self.process(window.bytes())?;
        window.consume(used);
        match event {
            TransmissionEvent::Payload(range) => self.read_payload(window, range).await,
            TransmissionEvent::Contents(len) => {
                let mut rest = vec![0; len];
                self.payload(window, &mut rest).await?;
                // All of them belong to the contents.
                self.process(&rest).map(drop)
            }
            _ => self.fill(window).await,
        }
    }

    async fn fill(&self, window: &mut RecvWindow) -> Result<(), Error> {
        let more = window.fill(&self.stream).await;
        let mut state = self.lock();
        state.active = blockhaul_io::now();
        let between = window.bytes().is_empty() && state.transmission.is_between_messages();
        match more {
            Ok(true) => Ok(()),
            Ok(false) if between => Err(closed()),
            Ok(false) => Err(cut_off()),
            Err(error) => Err(lost("cannot receive", error)),
        }
    }

    /// Processes received bytes until more are needed; returns the number of bytes consumed, and the event
    /// that needs more.
    fn process(&self, bytes: &[u8]) -> Result<(usize, TransmissionEvent<SessionRequest>), Error> {
        let mut all = 0;
        loop {
            let mut state = self.lock();
            let received = state.transmission.receive(&bytes[all..]);
            let ReceiveResult { used, messages, event } =
                received.map_err(|error| wrong(&error))?;
            all += used;
            self.traffic.received(used, messages);
            match event {
                TransmissionEvent::Hole(range) => {
                    if let Some(reading) = state.reading(range.cookie) {
                        reading.add_hole(range);
                    }
                }
                TransmissionEvent::End { request, result, .. } => {
                    self.finish(state, request, result)
                }
                event => return Ok((all, event)),
            }
        }
    }

    /// Receives a payload of a read.
    async fn read_payload(&self, window: &mut RecvWindow, range: ReadRange) -> Result<(), Error> {
        let room = self.lock().reading(range.cookie).and_then(|reading| reading.take_room(range));
        if let Some(room) = room {
            let data = self.whole_payload(window, room).await?;
            self.received(range, |reading| reading.fill_whole(data));
            return Ok(());
        }
        let mut buf = self.take_buf(range)?;
        // Inside the buffer, which has the request's length.
        // nbd: read.reassemble
        let part = &mut buf[range.at as usize..(range.at + range.len) as usize];
        self.payload(window, part).await?;
        self.received(range, |reading| reading.put_buf(buf));
        Ok(())
    }

    /// Takes the buffer of a read whose payload is not the whole reply.
    fn take_buf(&self, range: ReadRange) -> Result<Buf, Error> {
        let mut state = self.lock();
        let reading = state.reading(range.cookie);
        let reading = reading.ok_or_else(|| violation("data that nobody asked for"))?;
        let is_first = reading.has_room();
        let buf = reading.take_buf().ok_or_else(|| violation("data after the complete reply"))?;
        state.partial += usize::from(is_first);
        Ok(buf)
    }

    /// A payload was received; `keep` puts its memory back, unless the connection has been dropped meanwhile.
    fn received(&self, range: ReadRange, keep: impl FnOnce(&mut ReadMemory)) {
        self.traffic.received_more(range.len);
        let mut state = self.lock();
        state.transmission.took(range.len);
        if let Some(reading) = state.reading(range.cookie) {
            keep(reading);
        }
    }

    /// Receives a payload that is the whole reply to a read.
    async fn whole_payload(
        &self,
        window: &mut RecvWindow,
        room: Reservation,
    ) -> Result<Data, Error> {
        let room = self.claim(room).await;
        match self.alive(window.payload_or_parked(&self.stream, room)).await {
            Ok(data) => data.ok_or_else(cut_off),
            Err(error) => Err(lost("cannot receive", error)),
        }
    }

    async fn payload(&self, window: &mut RecvWindow, into: &mut [u8]) -> Result<(), Error> {
        match self.alive(window.payload(&self.stream, into)).await {
            Ok(true) => Ok(()),
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

    fn finish(
        &self,
        mut state: MutexGuard<'_, ClientSessionState>,
        request: SessionRequest,
        result: Result<Vec<StatusPayload>, ReplyError>,
    ) {
        let SessionRequest { facts, completer, mut reading, lent } = request;
        // A server that replies with an error may not have read the payload yet.
        if result.is_ok()
            && let Some(lent) = lent
        {
            lent.returned();
        }
        state.partial -= usize::from(reading.as_ref().is_some_and(|reading| reading.is_partial()));
        state.replied = state.active;
        if facts.is_payload() {
            state.payloads -= 1;
            state.moved += facts.len;
        }
        self.end_if_done(&mut state);
        drop(state);
        let outcome = facts.outcome(result);
        let outcome =
            outcome.map(|reply| reading.as_mut().map_or(reply, |reading| reading.finish()));
        if let Err(error) = &outcome
            && error.kind() == Kind::ShuttingDown
        {
            self.leave(error);
        }
        completer.complete(outcome);
    }
}
