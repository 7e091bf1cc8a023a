//! A connection whose requests an event loop carries out, on the thread of the loop: nothing here waits.
//! The loop calls [`Polled::collect`] when the socket is readable, and [`Polled::send`] when it is writable.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use blockhaul_block::{Error, Extents, Facts, Flags, Kind, OpKind, Reply, Request, Result};
use blockhaul_io::Data;
use blockhaul_wire::reply::{self, Chunk, ChunkKind, Header, Hole};
use blockhaul_wire::request::Header as RequestHeader;
use blockhaul_wire::{Command, CommandFlags, Replies};
use rustix::buffer::spare_capacity;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, Shutdown, recv, sendmsg};
use slab::Slab;

use crate::blocking::Retired;
use crate::device::Export;
use crate::reply::{
    CHUNKS_MAX, Expected, Want, covers, cut_off, server_error, small_chunk, violation, wrong,
};
use crate::session::Payload;
use crate::traffic::Traffic;

/// Bytes received at once: replies to many small requests.
const WINDOW: usize = 256 << 10;
/// The same while large reads are in flight: their bytes are received where they belong, and what the window
/// has of them is copied.
const SMALL_WINDOW: usize = 4 << 10;
/// A read is large from this length on.
const LARGE: u64 = 64 << 10;
/// The rest of a payload is received into the window if it is shorter.
const SHORT: usize = 16 << 10;
/// Longest read.
const READ_MAX: u64 = 8 << 20;
/// Bytes that one call of [`Polled::collect`] receives: other users of the loop have their turn then.
const TURN: usize = 8 << 20;
/// Pieces that one system call sends.
const PIECES: usize = 64;

/// What a request has led to.
#[derive(Debug)]
pub enum Arrived {
    /// It is done.
    Done,
    /// The bytes of a read.
    Bytes(Vec<u8>),
    /// Extents by context.
    Extents(Vec<Extents>),
}

/// Requests that have ended, with what came with them.
pub type Ended<T> = Vec<(T, Result<Arrived>)>;

/// A connection in transmission, for an event loop. `T` comes with each request, and leaves with its result.
pub struct Polled<T> {
    export: Arc<Export>,
    traffic: Arc<Traffic>,
    timeout: Duration,
    /// Nothing after a worker has got it.
    socket: Option<OwnedFd>,
    /// Requests by the lower half of their cookies.
    in_flight: Slab<Slot<T>>,
    /// Large reads among them.
    large: usize,
    /// Makes cookies of reused slots differ.
    generation: u32,
    window: Box<[u8]>,
    start: usize,
    end: usize,
    next: Next,
    unsent: VecDeque<Piece>,
    /// Bytes of the first piece that were sent.
    sent: usize,
    /// When a byte arrived last, or the first request in flight was made.
    moved: Instant,
    broken: Option<Error>,
    /// The server is shutting down.
    refused: Option<Error>,
}

struct Slot<T> {
    cookie: u64,
    kind: OpKind,
    expected: Expected,
    read: Option<Read>,
    with: T,
}

/// What has arrived of a read.
#[derive(Default)]
struct Read {
    /// Ranges that have arrived, relative to the request, in order of arrival.
    covered: Vec<(u64, u64)>,
    bytes: Vec<u8>,
}

/// What comes next from the server.
enum Next {
    Header,
    /// A payload that is needed as a whole, or the beginning of one.
    Small {
        slot: usize,
        chunk: Chunk,
        bytes: Vec<u8>,
        len: usize,
    },
    /// Bytes of a read.
    Data {
        slot: usize,
        at: usize,
        end: usize,
        last: bool,
    },
}

/// A part of what is to be sent.
enum Piece {
    Bytes(Vec<u8>),
    Data(Data),
}

impl Piece {
    fn bytes(&self) -> &[u8] {
        match self {
            Piece::Bytes(bytes) => bytes,
            Piece::Data(data) => data.bytes(),
        }
    }
}

/// The socket of a [`Polled`], to find out when it can be used.
pub struct Watched(OwnedFd);

impl AsRawFd for Watched {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

impl Watched {
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

impl<T> Polled<T> {
    /// A connection on which nothing is in flight; its socket does not wait.
    pub(crate) fn new(
        socket: OwnedFd,
        export: Arc<Export>,
        traffic: Arc<Traffic>,
        timeout: Duration,
    ) -> Polled<T> {
        Polled {
            export,
            traffic,
            timeout,
            socket: Some(socket),
            in_flight: Slab::new(),
            large: 0,
            generation: 0,
            window: vec![0; WINDOW].into(),
            start: 0,
            end: 0,
            next: Next::Header,
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
    pub fn watched(&self) -> io::Result<Watched> {
        match &self.socket {
            Some(socket) => socket.as_fd().try_clone_to_owned().map(Watched),
            None => Err(io::ErrorKind::NotConnected.into()),
        }
    }

    /// The facts of the export. Requests must comply with them.
    pub fn facts(&self) -> Arc<Facts> {
        self.export.facts.clone()
    }

    /// Whether this request can be sent as it is: the server offers it, it complies with its block sizes,
    /// and it is not too long for one message.
    pub fn takes(&self, kind: OpKind, at: u64, len: u64, flags: Flags) -> bool {
        let most = u64::from(self.export.facts.block.maximum).min(READ_MAX);
        let whole = !matches!(kind, OpKind::Read | OpKind::Write) || len <= most;
        whole && self.export.takes(kind, at, len, flags)
    }

    /// Whether nothing is in flight.
    pub fn is_idle(&self) -> bool {
        self.in_flight.is_empty()
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
        let header = RequestHeader {
            flags: CommandFlags::NONE,
            command: Command::Read,
            cookie: 0,
            offset: at,
            length: len,
        };
        let expected = Expected::new(at, len, Want::Done);
        let read = Some(Read::default());
        self.queue(OpKind::Read, header, Payload::None, (expected, read, with))
    }

    /// Queues a request that is no read.
    ///
    /// # Errors
    /// As [`Polled::read`].
    pub fn request(&mut self, request: Request, with: T) -> Result<(), (T, Error)> {
        let kind = request.kind();
        let (header, payload, expected) = self.export.message(request);
        self.queue(kind, header, payload, (expected, None, with))
    }

    // nbd: transmission.cookies-differ
    fn queue(
        &mut self,
        kind: OpKind,
        mut header: RequestHeader,
        payload: Payload,
        (expected, read, with): (Expected, Option<Read>, T),
    ) -> Result<(), (T, Error)> {
        if let Some(error) = self.broken.as_ref().or(self.refused.as_ref()) {
            return Err((with, error.clone()));
        }
        self.generation = self.generation.wrapping_add(1);
        let entry = self.in_flight.vacant_entry();
        // Slots are few, so 32 bits hold them.
        header.cookie = entry.key() as u64 | u64::from(self.generation) << 32;
        let encoded = match header.encode(self.export.headers) {
            Ok(encoded) => encoded,
            Err(error) => return Err((with, crate::link::refused(&error))),
        };
        self.large += usize::from(kind == OpKind::Read && expected.len >= LARGE);
        entry.insert(Slot { cookie: header.cookie, kind, expected, read, with });
        if self.in_flight.len() == 1 {
            self.moved = blockhaul_io::now();
        }
        self.traffic.sent(encoded.len() + payload.len());
        self.append(&encoded);
        match payload {
            Payload::None => {}
            Payload::Bytes(bytes) => self.append(&bytes),
            Payload::Data(data) => self.unsent.push_back(Piece::Data(data)),
        }
        Ok(())
    }

    fn append(&mut self, bytes: &[u8]) {
        match self.unsent.back_mut() {
            Some(Piece::Bytes(before)) => before.extend_from_slice(bytes),
            _ => self.unsent.push_back(Piece::Bytes(bytes.to_vec())),
        }
    }

    /// Sends what the socket takes now. Failures end the connection.
    pub fn send(&mut self, ended: &mut Ended<T>) {
        if let Err(error) = self.send_some() {
            self.break_off(&error, ended);
        }
    }

    fn send_some(&mut self) -> Result<()> {
        let Some(socket) = &self.socket else { return Ok(()) };
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        while !self.unsent.is_empty() {
            let pieces = self.unsent.iter().take(PIECES);
            let mut bufs: Vec<_> = pieces.map(|piece| IoSlice::new(piece.bytes())).collect();
            IoSlice::advance_slices(&mut &mut bufs[..1], self.sent);
            let mut control = SendAncillaryBuffer::new(&mut [] as &mut [MaybeUninit<u8>]);
            match sendmsg(socket, &bufs, &mut control, flags) {
                Ok(sent) => self.sent += sent,
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(error) => return Err(lost("cannot send", error)),
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
    pub fn collect(&mut self, ended: &mut Ended<T>) {
        if self.broken.is_none()
            && let Err(error) = self.take_in(ended)
        {
            self.break_off(&error, ended);
        }
    }

    fn take_in(&mut self, ended: &mut Ended<T>) -> Result<()> {
        let mut left = TURN;
        loop {
            while self.step(ended)? {}
            if left == 0 {
                return Ok(());
            }
            let (received, more) = self.receive()?;
            if received > 0 {
                self.moved = blockhaul_io::now();
            }
            left = left.saturating_sub(received);
            if !more {
                while self.step(ended)? {}
                return Ok(());
            }
        }
    }

    /// Ends the connection if no byte has come for too long; otherwise how long it still waits for one.
    /// `None`: without limit, or nothing is in flight.
    pub fn patience(&mut self, ended: &mut Ended<T>) -> Option<Duration> {
        if self.in_flight.is_empty() || self.timeout.is_zero() {
            return None;
        }
        let left = self.timeout.saturating_sub(blockhaul_io::elapsed(self.moved));
        if left.is_zero() {
            let time = self.timeout.as_secs_f32();
            let text = format!("no byte from the server for {time} s with requests in flight");
            self.break_off(&Error::new(Kind::TimedOut, text), ended);
            return None;
        }
        Some(left)
    }

    fn break_off(&mut self, error: &Error, ended: &mut Ended<T>) {
        self.broken.get_or_insert_with(|| error.clone());
        for slot in self.in_flight.drain() {
            let Slot { kind, expected, with, .. } = slot;
            let error = error.clone().during(kind, expected.at, expected.len);
            ended.push((with, Err(error.on(&self.export.facts.name))));
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
    pub fn retire(&mut self) -> Option<Retired> {
        let between = self.start == self.end && matches!(self.next, Next::Header);
        if !self.is_idle() || self.has_unsent() || !between || self.broken.is_some() {
            return None;
        }
        let socket = self.socket.take()?;
        Some(Retired::new(socket, self.export.clone(), self.traffic.clone(), self.timeout))
    }

    /// Receives more: how much, and whether there may be more.
    fn receive(&mut self) -> Result<(usize, bool)> {
        let Some(socket) = &self.socket else { return Ok((0, false)) };
        if let Next::Data { slot, at, end, .. } = &mut self.next
            && *end - *at >= SHORT
            && self.start == self.end
        {
            let wanted = *end - *at;
            let read = self.in_flight.get_mut(*slot).and_then(|slot| slot.read.as_mut());
            let Some(read) = read else { return Err(violation("data that nobody asked for")) };
            let room = read.bytes.capacity() - *at;
            if read.bytes.len() == *at && room <= wanted + SMALL_WINDOW {
                // Behind what is there: into memory that needs no value before.
                let into = spare_capacity(&mut read.bytes);
                let received = recv(socket, into, RecvFlags::DONTWAIT).map(|received| received.1);
                let (received, more) = one(received, room)?;
                // More memory than the request's length may have been reserved.
                let beyond = received.saturating_sub(wanted);
                let kept = read.bytes.len() - beyond;
                self.window[..beyond].copy_from_slice(&read.bytes[kept..]);
                (self.start, self.end) = (0, beyond);
                read.bytes.truncate(kept);
                *at += received - beyond;
                self.traffic.received_more((received - beyond) as u64);
                return Ok((received, more));
            }
            if read.bytes.len() < *end {
                read.bytes.resize(*end, 0);
            }
            let into = &mut read.bytes[*at..*end];
            let received = recv(socket, into, RecvFlags::DONTWAIT).map(|received| received.1);
            let (received, more) = one(received, wanted)?;
            *at += received;
            self.traffic.received_more(received as u64);
            return Ok((received, more));
        }
        self.window.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        let most = if self.large > 0 { self.end + SMALL_WINDOW } else { WINDOW };
        let room = &mut self.window[self.end..most.min(WINDOW)];
        let len = room.len();
        let received = recv(socket, room, RecvFlags::DONTWAIT).map(|received| received.1);
        if received == Ok(0) && self.end == 0 && matches!(self.next, Next::Header) {
            return Err(Error::new(Kind::Disconnected, "the server closed the connection"));
        }
        let (received, more) = one(received, len)?;
        self.end += received;
        Ok((received, more))
    }

    /// Takes one thing out of the window; false: it needs more.
    fn step(&mut self, ended: &mut Ended<T>) -> Result<bool> {
        match &mut self.next {
            Next::Header => self.header(ended),
            Next::Small { bytes, len, .. } => {
                let here = (*len - bytes.len()).min(self.end - self.start);
                bytes.extend_from_slice(&self.window[self.start..self.start + here]);
                self.start += here;
                if bytes.len() < *len {
                    return Ok(false);
                }
                self.small(ended)
            }
            Next::Data { slot, at, end, last } => {
                let (slot, last) = (*slot, *last);
                let here = (*end - *at).min(self.end - self.start);
                let bytes = &self.window[self.start..self.start + here];
                let read = self.in_flight.get_mut(slot).and_then(|slot| slot.read.as_mut());
                let Some(read) = read else { return Err(violation("data that nobody asked for")) };
                if read.bytes.len() == *at {
                    read.bytes.extend_from_slice(bytes);
                } else {
                    read.bytes[*at..*at + here].copy_from_slice(bytes);
                }
                self.start += here;
                *at += here;
                self.traffic.received_more(here as u64);
                if at < end {
                    return Ok(false);
                }
                self.end_message(slot, last, ended);
                Ok(true)
            }
        }
    }

    fn header(&mut self, ended: &mut Ended<T>) -> Result<bool> {
        let bytes = &self.window[self.start..self.end];
        let parsed = Header::parse(bytes, self.export.replies).map_err(|error| wrong(&error))?;
        let Some((header, used)) = parsed else { return Ok(false) };
        self.start += used;
        self.traffic.received(used);
        let cookie = header.cookie();
        let index = (cookie & u64::from(u32::MAX)) as usize;
        let found = self.in_flight.get_mut(index).filter(|slot| slot.cookie == cookie);
        let Some(slot) = found else {
            return Err(violation("a reply to a request that is not in flight"));
        };
        match header {
            Header::Simple { error: Some(errno), .. } => {
                slot.expected.error = Some(server_error(errno, ""));
                self.end_message(index, true, ended);
            }
            Header::Simple { error: None, .. } => {
                if matches!(slot.expected.want, Want::Extents { .. }) {
                    return Err(violation("a simple reply to block status"));
                }
                if slot.read.is_none() {
                    self.end_message(index, true, ended);
                    return Ok(true);
                }
                // nbd: structured.simple-read-refused
                if self.export.replies != Replies::Simple {
                    let text = "a simple reply to a read, with structured replies on";
                    return Err(violation(text));
                }
                let all = (0, slot.expected.len);
                self.next = slot.data(index, all, true)?;
            }
            Header::Chunk(chunk) => {
                slot.expected.chunks += 1;
                if slot.expected.chunks > CHUNKS_MAX {
                    return Err(violation("a reply in too many chunks"));
                }
                // nbd: extended.offset-checked
                if chunk.offset.is_some_and(|offset| offset != slot.expected.at) {
                    return Err(violation("a reply with another offset than the request's"));
                }
                let len = match chunk.kind {
                    ChunkKind::None => {
                        self.end_message(index, chunk.is_done(), ended);
                        return Ok(true);
                    }
                    ChunkKind::OffsetData => reply::DATA_PREFIX_LEN,
                    // Limited by the codec for every kind.
                    _ => chunk.length as usize,
                };
                let bytes = Vec::with_capacity(len);
                self.next = Next::Small { slot: index, chunk, bytes, len };
            }
        }
        Ok(true)
    }

    /// A payload that is needed as a whole has arrived.
    fn small(&mut self, ended: &mut Ended<T>) -> Result<bool> {
        let next = std::mem::replace(&mut self.next, Next::Header);
        let Next::Small { slot: index, chunk, bytes, .. } = next else { return Ok(false) };
        self.traffic.received_more(bytes.len() as u64);
        let Some(slot) = self.in_flight.get_mut(index) else { return Ok(true) };
        match chunk.kind {
            ChunkKind::OffsetData => {
                let len = chunk.length.saturating_sub(bytes.len() as u64);
                let at = reply::data_at(&bytes);
                let start = at.and_then(|at| slot.expected.place(at, len));
                let start = start.ok_or_else(|| violation("data outside of the request"))?;
                self.next = slot.data(index, (start, len), chunk.is_done())?;
                return Ok(true);
            }
            ChunkKind::OffsetHole => slot.hole(&bytes)?,
            kind => small_chunk(kind, &bytes, &mut slot.expected)?,
        }
        self.end_message(index, chunk.is_done(), ended);
        Ok(true)
    }

    /// A message has ended; `last`: so has the reply.
    fn end_message(&mut self, index: usize, last: bool, ended: &mut Ended<T>) {
        self.next = Next::Header;
        if !last {
            return;
        }
        let Some(slot) = self.in_flight.try_remove(index) else { return };
        let Slot { kind, expected, read, with, .. } = slot;
        let (at, len) = (expected.at, expected.len);
        self.large -= usize::from(kind == OpKind::Read && len >= LARGE);
        let outcome = expected.finish().and_then(|reply| match (reply, read) {
            (_, Some(mut read)) => {
                covers(&mut read.covered, len).map(|()| Arrived::Bytes(read.bytes))
            }
            (Reply::Extents(lists), None) => Ok(Arrived::Extents(lists)),
            (_, None) => Ok(Arrived::Done),
        });
        let outcome = outcome.map_err(|error| {
            if error.kind() == Kind::ShuttingDown {
                self.refused.get_or_insert_with(|| error.clone());
            }
            error.during(kind, at, len).on(&self.export.facts.name)
        });
        ended.push((with, outcome));
    }
}

impl<T> Slot<T> {
    /// Data of this range of the read comes next, inside the request.
    fn data(&mut self, slot: usize, (start, len): (u64, u64), last: bool) -> Result<Next> {
        let read = self.read.as_mut();
        let read = read.ok_or_else(|| violation("data in reply to another command than read"))?;
        read.room(start, self.expected.len);
        read.covered.push((start, len));
        // At most the longest read.
        Ok(Next::Data { slot, at: start as usize, end: (start + len) as usize, last })
    }

    fn hole(&mut self, payload: &[u8]) -> Result<()> {
        let hole = Hole::parse(payload).map_err(|error| wrong(&error))?;
        let len = u64::from(hole.len);
        let start = self.expected.place(hole.at, len);
        let start = start.ok_or_else(|| violation("a hole outside of the request"))?;
        let read = self.read.as_mut();
        let read = read.ok_or_else(|| violation("a hole in reply to another command than read"))?;
        read.room(start, self.expected.len);
        read.covered.push((start, len));
        let end = (start + len) as usize;
        if read.bytes.len() == start as usize {
            read.bytes.resize(end, 0);
        } else {
            read.bytes[start as usize..end].fill(0);
        }
        Ok(())
    }
}

impl Read {
    /// Has memory for what begins at `start`: all of it, if that is not behind what has arrived.
    fn room(&mut self, start: u64, total: u64) {
        let total = total as usize;
        self.bytes.reserve_exact(total - self.bytes.len());
        if self.bytes.len() != start as usize {
            self.bytes.resize(total, 0);
        }
    }
}

impl<T> Drop for Polled<T> {
    // nbd: disc.zero
    fn drop(&mut self) {
        let goodbye = RequestHeader {
            flags: CommandFlags::NONE,
            command: Command::Disconnect,
            cookie: 0,
            offset: 0,
            length: 0,
        };
        if self.socket.is_some()
            && self.broken.is_none()
            && !self.has_unsent()
            && let Ok(encoded) = goodbye.encode(self.export.headers)
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
fn one(received: rustix::io::Result<usize>, room: usize) -> Result<(usize, bool)> {
    match received {
        Ok(0) => Err(cut_off()),
        Ok(bytes) => Ok((bytes, bytes == room)),
        Err(Errno::AGAIN) => Ok((0, false)),
        Err(Errno::INTR) => Ok((0, true)),
        Err(error) => Err(lost("cannot receive", error)),
    }
}

fn lost(what: &'static str, error: Errno) -> Error {
    Error::new(Kind::Disconnected, what).because(io::Error::from(error))
}
