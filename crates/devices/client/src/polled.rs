//! A connection whose requests an event loop carries out, on the thread of the loop: nothing here waits.
//! The loop calls [`PolledConnection::collect`] when the socket is readable, and [`PolledConnection::send`] when it is
//! writable.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd as _, AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use blockhaul_block::{Error, Extents, Facts, Kind, OpKind, Reply, Request, RequestFlags, Result};
use blockhaul_io::Data;
use blockhaul_wire::status::StatusPayload;
use blockhaul_wire::transmission::{
    ReadRange, ReceiveResult, ReplyError, Transmission, TransmissionEvent,
};
use rustix::buffer::spare_capacity;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, Shutdown, recv};

use crate::blocking::ConnectionHandover;
use crate::device::{ExportProperties, RequestMessage, RequestPayload};
use crate::reply::{RequestFacts, wrong};
use crate::socket::{closed, cut_off, lost, send_now, silence};
use crate::traffic::Traffic;

/// Bytes received at once: replies to many small requests.
const WINDOW: usize = 256 << 10;
/// The same while large reads are in flight: their bytes are received where they belong, and what the window
/// has of them is copied.
const SMALL_WINDOW: usize = 4 << 10;
/// A read is large from this length on.
const LARGE: u64 = 64 << 10;
/// The rest of a payload is received into the window if it is shorter.
const SHORT: u64 = 16 << 10;
/// Longest read.
const READ_MAX: u64 = 8 << 20;
/// Bytes that one call of [`PolledConnection::collect`] receives: other users of the loop have their turn then.
const TURN: usize = 8 << 20;
/// Pieces that one system call sends.
const PIECES: usize = 64;

/// What a request has led to.
#[derive(Debug)]
pub enum PolledResult {
    /// It is done.
    Done,
    /// The bytes of a read.
    Bytes(Vec<u8>),
    /// Extents by context.
    Extents(Vec<Extents>),
}

/// Requests that have ended, with what came with them.
pub type CompletedRequests<T> = Vec<(T, Result<PolledResult>)>;

/// A connection in transmission, for an event loop. `T` comes with each request, and leaves with its result.
pub struct PolledConnection<T> {
    export: Arc<ExportProperties>,
    traffic: Arc<Traffic>,
    timeout: Duration,
    /// Nothing after a worker has got it.
    socket: Option<OwnedFd>,
    transmission: Transmission<PolledRequest<T>>,
    /// Large reads in flight.
    large: usize,
    window: Box<[u8]>,
    start: usize,
    end: usize,
    unsent: VecDeque<OutgoingPiece>,
    /// Bytes of the first piece that were sent.
    sent: usize,
    /// When a byte arrived last, or the first request in flight was made.
    moved: Instant,
    broken: Option<Error>,
    /// The server is shutting down.
    refused: Option<Error>,
}

struct PolledRequest<T> {
    facts: RequestFacts,
    /// Bytes of a read.
    bytes: Vec<u8>,
    with: T,
}

/// A part of what is to be sent.
enum OutgoingPiece {
    Bytes(Vec<u8>),
    Data(Data),
}

impl OutgoingPiece {
    fn bytes(&self) -> &[u8] {
        match self {
            OutgoingPiece::Bytes(bytes) => bytes,
            OutgoingPiece::Data(data) => data.bytes(),
        }
    }
}

/// The socket of a [`PolledConnection`], to find out when it can be used.
pub struct PolledSocket(OwnedFd);

impl AsRawFd for PolledSocket {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

impl PolledSocket {
    /// Waits until there is something to receive or, if `or_send`, room to send.
    ///
    /// # Errors
    /// If the system has no memory.
    pub fn wait(&self, or_send: bool, time: Duration) -> io::Result<()> {
        let mut wanted = PollFlags::IN;
        wanted.set(PollFlags::OUT, or_send);
        let time = Timespec::try_from(time).ok();
        match poll(&mut [PollFd::new(&self.0, wanted)], time.as_ref()) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

impl<T> PolledConnection<T> {
    /// A connection on which nothing is in flight; its socket does not wait.
    pub(crate) fn new(
        socket: OwnedFd,
        export: Arc<ExportProperties>,
        traffic: Arc<Traffic>,
        timeout: Duration,
    ) -> PolledConnection<T> {
        let transmission = Transmission::new(export.headers, export.replies);
        PolledConnection {
            export,
            traffic,
            timeout,
            socket: Some(socket),
            transmission,
            large: 0,
            window: vec![0; WINDOW].into(),
            start: 0,
            end: 0,
            unsent: VecDeque::new(),
            sent: 0,
            moved: blockhaul_io::now(),
            broken: None,
            refused: None,
        }
    }

    /// Another descriptor of the socket.
    ///
    /// # Errors
    /// If there are too many.
    pub fn watched(&self) -> io::Result<PolledSocket> {
        match &self.socket {
            Some(socket) => socket.as_fd().try_clone_to_owned().map(PolledSocket),
            None => Err(io::ErrorKind::NotConnected.into()),
        }
    }

    /// The facts of the export. Requests must comply with them.
    pub fn facts(&self) -> Arc<Facts> {
        self.export.facts.clone()
    }

    /// Whether this request can be sent as it is: the server offers it, it complies with its block sizes,
    /// and it is not too long for one message.
    pub fn takes(&self, kind: OpKind, at: u64, len: u64, flags: RequestFlags) -> bool {
        let most = u64::from(self.export.facts.block.maximum).min(READ_MAX);
        let whole = !matches!(kind, OpKind::Read | OpKind::Write) || len <= most;
        whole && self.export.takes(kind, at, len, flags)
    }

    /// Whether nothing is in flight.
    pub fn is_idle(&self) -> bool {
        self.transmission.in_flight() == 0
    }

    /// Whether something is to be sent.
    pub fn has_unsent(&self) -> bool {
        !self.unsent.is_empty()
    }

    /// Why it has ended.
    pub fn broken(&self) -> Option<&Error> {
        self.broken.as_ref()
    }

    /// Queues a read.
    ///
    /// # Errors
    /// If the connection has ended or the server is shutting down; `with` comes back.
    pub fn read(&mut self, at: u64, len: u64, with: T) -> Result<(), (T, Error)> {
        self.queue(RequestMessage::new(OpKind::Read, at, len, RequestFlags::empty()), with)
    }

    /// Queues a request that is no read.
    ///
    /// # Errors
    /// As [`PolledConnection::read`].
    pub fn request(&mut self, request: Request, with: T) -> Result<(), (T, Error)> {
        self.queue(self.export.message(request), with)
    }

    fn queue(&mut self, message: RequestMessage, with: T) -> Result<(), (T, Error)> {
        if let Some(error) = self.broken.as_ref().or(self.refused.as_ref()) {
            return Err((with, error.clone()));
        }
        let RequestMessage { header, contexts, payload, facts, .. } = message;
        let is_large = facts.is_large();
        let slot = PolledRequest { facts, bytes: Vec::new(), with };
        let (_, encoded) = self
            .transmission
            .begin(header, contexts, slot)
            .map_err(|(slot, error)| (slot.with, crate::link::refused(&error)))?;
        self.large += usize::from(is_large);
        if self.transmission.in_flight() == 1 {
            self.moved = blockhaul_io::now();
        }
        self.traffic.sent(encoded.len() + payload.len());
        self.append(&encoded);
        match payload {
            RequestPayload::None => {}
            RequestPayload::Bytes(bytes) => self.append(&bytes),
            RequestPayload::Data(data) => self.unsent.push_back(OutgoingPiece::Data(data)),
        }
        Ok(())
    }

    fn append(&mut self, bytes: &[u8]) {
        match self.unsent.back_mut() {
            Some(OutgoingPiece::Bytes(before)) => before.extend_from_slice(bytes),
            _ => self.unsent.push_back(OutgoingPiece::Bytes(bytes.to_vec())),
        }
    }

    /// Sends what the socket takes now. Failures end the connection.
    pub fn send(&mut self, ended: &mut CompletedRequests<T>) {
        if let Err(error) = self.send_some() {
            self.break_off(&error, ended);
        }
    }

    fn send_some(&mut self) -> Result<()> {
        let Some(socket) = &self.socket else { return Ok(()) };
        while !self.unsent.is_empty() {
            let pieces = self.unsent.iter().take(PIECES);
            let mut bufs: Vec<_> = pieces.map(|piece| IoSlice::new(piece.bytes())).collect();
            IoSlice::advance_slices(&mut &mut bufs[..1], self.sent);
            match send_now(socket, &bufs)? {
                0 => return Ok(()),
                sent => self.sent += sent,
            }
            while let Some(first) = self.unsent.front()
                && self.sent >= first.bytes().len()
            {
                self.sent -= first.bytes().len();
                self.unsent.pop_front();
            }
        }
        Ok(())
    }

    /// Receives what is there, and adds the requests that it ends. Failures end the connection and all
    /// requests in flight.
    pub fn collect(&mut self, ended: &mut CompletedRequests<T>) {
        if self.broken.is_none()
            && let Err(error) = self.take_in(ended)
        {
            self.break_off(&error, ended);
        }
    }

    fn take_in(&mut self, ended: &mut CompletedRequests<T>) -> Result<()> {
        let mut left = TURN;
        loop {
            let due = self.process(ended)?;
            if left == 0 {
                return Ok(());
            }
            let (received, more) = self.receive(due)?;
            if received > 0 {
                self.moved = blockhaul_io::now();
            }
            left = left.saturating_sub(received);
            if !more {
                self.process(ended)?;
                return Ok(());
            }
        }
    }

    /// Ends the connection if no byte has come for too long; otherwise how long it still waits for one.
    /// `None`: without limit, or nothing is in flight.
    pub fn patience(&mut self, ended: &mut CompletedRequests<T>) -> Option<Duration> {
        if self.is_idle() || self.timeout.is_zero() {
            return None;
        }
        let left = self.timeout.saturating_sub(blockhaul_io::elapsed(self.moved));
        if left.is_zero() {
            self.break_off(&silence(self.timeout, "requests"), ended);
            return None;
        }
        Some(left)
    }

    fn break_off(&mut self, error: &Error, ended: &mut CompletedRequests<T>) {
        self.broken.get_or_insert_with(|| error.clone());
        for PolledRequest { facts, with, .. } in self.transmission.drain() {
            ended.push((with, Err(facts.locate(error.clone(), &self.export.facts))));
        }
        self.large = 0;
        self.unsent.clear();
        self.sent = 0;
        self.shut_down();
    }

    fn shut_down(&self) {
        if let Some(socket) = &self.socket {
            // Fails only if the connection has already ended.
            let _ = rustix::net::shutdown(socket, Shutdown::Both);
        }
    }

    /// What a worker needs to go on; `None` if something is in flight, or it has ended.
    pub fn retire(&mut self) -> Option<ConnectionHandover> {
        let between = self.start == self.end && self.transmission.is_between_messages();
        if !self.is_idle() || self.has_unsent() || !between || self.broken.is_some() {
            return None;
        }
        let socket = self.socket.take()?;
        Some(ConnectionHandover::new(
            socket,
            self.export.clone(),
            self.traffic.clone(),
            self.timeout,
        ))
    }

    /// Receives more, directly into the memory of a read whose bytes are `due`, if they are many: how much,
    /// and whether there may be more.
    fn receive(&mut self, due: Option<ReadRange>) -> Result<(usize, bool)> {
        match due {
            Some(range) if range.len >= SHORT => self.receive_payload(range),
            _ => self.receive_window(),
        }
    }

    /// The window is empty.
    fn receive_payload(&mut self, range: ReadRange) -> Result<(usize, bool)> {
        let Some(socket) = &self.socket else { return Ok((0, false)) };
        let Some(slot) = self.transmission.get_mut(range.cookie) else { return Ok((0, false)) };
        let (at, wanted) = (range.at as usize, range.len as usize);
        let bytes = slot.room(range);
        let room = bytes.capacity() - at;
        let (received, more) = if bytes.len() == at && room <= wanted + SMALL_WINDOW {
            // Behind what is there: into memory that needs no value before.
            one(recv(socket, spare_capacity(bytes), RecvFlags::DONTWAIT), room)?
        } else {
            bytes.resize(bytes.len().max(at + wanted), 0);
            one(recv(socket, &mut bytes[at..at + wanted], RecvFlags::DONTWAIT), wanted)?
        };
        // More memory than the request's length may have been reserved.
        let beyond = received.saturating_sub(wanted);
        let kept = bytes.len() - beyond;
        self.window[..beyond].copy_from_slice(&bytes[kept..]);
        (self.start, self.end) = (0, beyond);
        bytes.truncate(kept);
        self.took(received - beyond);
        Ok((received, more))
    }

    fn receive_window(&mut self) -> Result<(usize, bool)> {
        let Some(socket) = &self.socket else { return Ok((0, false)) };
        self.window.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        let most = if self.large > 0 { self.end + SMALL_WINDOW } else { WINDOW };
        let room = &mut self.window[self.end..most.min(WINDOW)];
        let len = room.len();
        let received = recv(socket, room, RecvFlags::DONTWAIT);
        if let Ok((_, 0)) = received
            && self.end == 0
            && self.transmission.is_between_messages()
        {
            return Err(closed());
        }
        let (received, more) = one(received, len)?;
        self.end += received;
        Ok((received, more))
    }

    /// Processes the window; returns the payload of which it has no more bytes.
    fn process(&mut self, ended: &mut CompletedRequests<T>) -> Result<Option<ReadRange>> {
        loop {
            let received = self.transmission.receive(&self.window[self.start..self.end]);
            let ReceiveResult { used, messages, event } =
                received.map_err(|error| wrong(&error))?;
            self.start += used;
            self.traffic.received(used, messages);
            match event {
                TransmissionEvent::NeedMore | TransmissionEvent::Contents(_) => return Ok(None),
                TransmissionEvent::Payload(range) if self.start == self.end => {
                    return Ok(Some(range));
                }
                TransmissionEvent::Payload(range) => self.copy_payload(range),
                TransmissionEvent::Hole(range) => self.hole(range),
                TransmissionEvent::End { request, result, .. } => {
                    self.end_request(request, result, ended)
                }
            }
        }
    }

    /// Takes bytes of a payload out of the window.
    fn copy_payload(&mut self, range: ReadRange) {
        let Some(slot) = self.transmission.get_mut(range.cookie) else { return };
        let at = range.at as usize;
        let here = (range.len as usize).min(self.end - self.start);
        let received = &self.window[self.start..self.start + here];
        let bytes = slot.room(range);
        if bytes.len() == at {
            bytes.extend_from_slice(received);
        } else {
            bytes[at..at + here].copy_from_slice(received);
        }
        self.start += here;
        self.took(here);
    }

    fn took(&mut self, bytes: usize) {
        self.transmission.took(bytes as u64);
        self.traffic.received_more(bytes as u64);
    }

    fn hole(&mut self, range: ReadRange) {
        let Some(slot) = self.transmission.get_mut(range.cookie) else { return };
        let at = range.at as usize;
        let end = at + range.len as usize;
        let bytes = slot.room(range);
        if bytes.len() == at {
            bytes.resize(end, 0);
        } else {
            bytes[at..end].fill(0);
        }
    }

    fn end_request(
        &mut self,
        slot: PolledRequest<T>,
        result: Result<Vec<StatusPayload>, ReplyError>,
        ended: &mut CompletedRequests<T>,
    ) {
        let PolledRequest { facts, bytes, with } = slot;
        self.large -= usize::from(facts.is_large());
        let outcome = match facts.outcome(result) {
            Ok(_) if facts.kind == OpKind::Read => Ok(PolledResult::Bytes(bytes)),
            Ok(Reply::Extents(lists)) => Ok(PolledResult::Extents(lists)),
            Ok(_) => Ok(PolledResult::Done),
            Err(error) => {
                if error.kind() == Kind::ShuttingDown {
                    self.refused.get_or_insert_with(|| error.clone());
                }
                Err(facts.locate(error, &self.export.facts))
            }
        };
        ended.push((with, outcome));
    }
}

impl RequestFacts {
    fn is_large(&self) -> bool {
        self.kind == OpKind::Read && self.len >= LARGE
    }
}

impl<T> PolledRequest<T> {
    /// Memory for this range: for all of the read, if it is not just behind the bytes that are there.
    fn room(&mut self, range: ReadRange) -> &mut Vec<u8> {
        // At most the longest read.
        let total = self.facts.len as usize;
        self.bytes.reserve_exact(total - self.bytes.len());
        if self.bytes.len() != range.at as usize {
            self.bytes.resize(total, 0);
        }
        &mut self.bytes
    }
}

impl<T> Drop for PolledConnection<T> {
    fn drop(&mut self) {
        if self.socket.is_some()
            && self.broken.is_none()
            && !self.has_unsent()
            && let Ok(encoded) = self.transmission.disconnect()
        {
            self.traffic.sent(encoded.len());
            self.append(&encoded);
            // A failure means that the server has disconnected first.
            let _ = self.send_some();
        }
        // The loop has a descriptor of its own, and finds the end there.
        self.shut_down();
    }
}

/// What a receive of at most `room` bytes has led to: bytes, and whether there may be more.
fn one<B>(received: rustix::io::Result<(B, usize)>, room: usize) -> Result<(usize, bool)> {
    match received {
        Ok((_, 0)) => Err(cut_off()),
        Ok((_, bytes)) => Ok((bytes, bytes == room)),
        Err(Errno::AGAIN) => Ok((0, false)),
        Err(Errno::INTR) => Ok((0, true)),
        Err(error) => Err(lost("cannot receive", error.into())),
    }
}
