//! One connection under load: as many requests in flight as wanted, sent and received in batches.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::{Duration, Instant};

use blockhaul_block::{Error, Kind, Result};
use blockhaul_client::BareConnection;
use blockhaul_io::{Data, Event, RecvWindow, SendQueue, Stream};
use blockhaul_wire::reply::{self, ChunkKind, ErrorChunk, HoleChunk, ReplyChunk, ReplyHeader};
use blockhaul_wire::{CommandCode, CommandFlags, Errno, ReplyForm, RequestForm, request};

use super::histogram::Histogram;
use super::pattern::LoadPattern;
use super::work::{LoadWork, payload};

/// Queued requests are sent when they reach this many bytes, even while there are replies to
/// process.
const SEND_AT: usize = 128 << 10;
/// Payloads from this size on are received into separate memory, up to this many bytes at a time:
/// little enough to stay in the processor's cache.
const LARGE: usize = 16 << 10;
const SCRATCH: usize = 256 << 10;
/// A server that sends nothing for this long while requests are in flight hangs.
const SILENCE: Duration = Duration::from_secs(60);

/// The result of a connection.
#[derive(Clone, Debug)]
pub(super) struct Tally {
    pub(super) requests: u64,
    /// Of successful requests.
    pub(super) bytes: u64,
    /// Requests that the server refused, by the name of the error.
    pub(super) errors: BTreeMap<String, u64>,
    pub(super) latency: Histogram,
}

/// When a connection is to end.
#[derive(Clone, Copy, Debug)]
pub(super) enum LoadEnd {
    /// After this many requests.
    Count(u64),
    /// No request is sent from then on.
    Deadline(Instant),
}

/// Puts load on a connection, and ends it. `number` is its number among all of them.
pub(super) async fn drive(
    line: BareConnection,
    work: &LoadWork,
    number: u64,
    until: LoadEnd,
) -> Result<Tally> {
    let BareConnection { stream, mut window, queue, negotiated } = line;
    let headers = negotiated.headers;
    let replies = negotiated.replies;
    window.expect_headers_of(match replies {
        ReplyForm::Simple => reply::SIMPLE_LEN,
        ReplyForm::Structured => reply::STRUCTURED_LEN + reply::DATA_PREFIX_LEN,
        ReplyForm::Extended => reply::EXTENDED_LEN + reply::DATA_PREFIX_LEN,
    });
    let socket = Rc::new(LoadSocket {
        stream,
        queue: RefCell::new(queue),
        to_send: Event::new(),
        blocked: Cell::new(false),
        closing: Cell::new(false),
        broken: RefCell::new(None),
        replies: Cell::new(0),
        silent: Cell::new(false),
    });
    let sender = blockhaul_io::spawn(socket.clone().send_rest());
    let watch = blockhaul_io::spawn(socket.clone().watch());
    let mut lane = LoadLane {
        headers,
        replies,
        size: work.size,
        pattern: LoadPattern::new(work, work.span_of(negotiated.info.size), number),
        until,
        // Not zeroes, which some servers detect.
        payload: payload(work),
        slots: vec![LoadSlot::default(); work.requests],
        in_flight: 0,
        scratch: vec![0; SCRATCH.min(work.size as usize)],
        tally: Tally { requests: 0, bytes: 0, errors: BTreeMap::new(), latency: Histogram::new() },
    };
    let result = lane.run(&socket, &mut window).await;
    let result = match (result, socket.broken.take()) {
        (Err(_), _) if socket.silent.get() => {
            let text = format!("the server has not answered for {} s", SILENCE.as_secs());
            Err(Error::new(Kind::TimedOut, text))
        }
        // A failed send explains missing replies.
        (Err(_), Some(error)) => Err(Error::system("cannot send", error)),
        (result, _) => result,
    };
    let answered = lane.tally.requests;
    socket.close(headers);
    sender.await;
    watch.cancel();
    match result {
        Ok(()) => Ok(lane.tally),
        Err(error) => {
            let text = format!("{} after {answered} replies", error.text());
            Err(Error::new(error.kind(), text))
        }
    }
}

/// A socket and its bytes to send, for the task that receives and the one that sends what could not
/// be sent at once.
struct LoadSocket {
    stream: Stream,
    queue: RefCell<SendQueue>,
    to_send: Event,
    /// The socket takes no more now; the sender waits for it.
    blocked: Cell<bool>,
    closing: Cell<bool>,
    broken: RefCell<Option<std::io::Error>>,
    /// Replies so far, for the watch.
    replies: Cell<u64>,
    silent: Cell<bool>,
}

impl LoadSocket {
    /// Sends what the socket takes; the sender sends the rest.
    fn send(&self) {
        if self.blocked.get() {
            return;
        }
        let sent = self.queue.borrow_mut().send(&self.stream);
        match sent {
            Ok(true) => {}
            Ok(false) => {
                self.blocked.set(true);
                self.to_send.notify();
            }
            Err(error) => self.break_off(error),
        }
    }

    async fn send_rest(self: Rc<Self>) {
        loop {
            let mark = self.to_send.mark();
            let sent = if self.broken.borrow().is_some() {
                Ok(true)
            } else {
                self.queue.borrow_mut().send(&self.stream)
            };
            match sent {
                Ok(true) if self.closing.get() => return,
                Ok(true) => {
                    self.blocked.set(false);
                    self.to_send.wait_after(mark).await;
                }
                Ok(false) => {
                    self.blocked.set(true);
                    if let Err(error) = self.stream.writable().await {
                        self.break_off(error);
                    }
                }
                Err(error) => self.break_off(error),
            }
        }
    }

    fn break_off(&self, error: std::io::Error) {
        self.broken.replace(Some(error));
        self.queue.borrow_mut().clear();
        self.stream.shutdown();
        self.to_send.notify();
    }

    /// Ends the connection when the server is silent for too long.
    async fn watch(self: Rc<Self>) {
        loop {
            let before = self.replies.get();
            blockhaul_io::sleep(SILENCE).await;
            if self.replies.get() == before && !self.closing.get() {
                self.silent.set(true);
                self.stream.shutdown();
                return;
            }
        }
    }

    /// Sends the disconnect request.
    fn close(&self, headers: RequestForm) {
        let goodbye = request::RequestHeader {
            flags: CommandFlags::NONE,
            command: CommandCode::Disconnect,
            cookie: 0,
            offset: 0,
            length: 0,
        };
        if self.broken.borrow().is_none()
            && let Ok(encoded) = goodbye.encode(headers)
        {
            let mut queue = self.queue.borrow_mut();
            queue.head(&encoded);
            // Optional: a failure means that the server has disconnected first.
            let _ = queue.send(&self.stream);
            queue.close(&self.stream);
            queue.clear();
        }
        self.closing.set(true);
        self.stream.shutdown_send();
        self.to_send.notify();
    }
}

/// A request in flight, or a place for one.
#[derive(Clone, Copy)]
struct LoadSlot {
    /// Upper half of the cookie; it differs from that of the slot's previous request.
    generation: u32,
    busy: bool,
    write: bool,
    sent: Instant,
    /// Received bytes of the reply.
    got: u64,
    error: Option<Errno>,
}

impl Default for LoadSlot {
    fn default() -> LoadSlot {
        let generation = 0;
        let busy = false;
        let write = false;
        let got = 0;
        let error = None;
        LoadSlot { generation, busy, write, sent: Instant::now(), got, error }
    }
}

struct LoadLane {
    headers: RequestForm,
    replies: ReplyForm,
    size: u64,
    pattern: LoadPattern,
    until: LoadEnd,
    payload: Data,
    slots: Vec<LoadSlot>,
    in_flight: usize,
    scratch: Vec<u8>,
    tally: Tally,
}

impl LoadLane {
    async fn run(&mut self, socket: &LoadSocket, window: &mut RecvWindow) -> Result<()> {
        let mut now = Instant::now();
        for slot in 0..self.slots.len() {
            self.issue(slot, now, socket)?;
        }
        socket.send();
        while self.in_flight > 0 {
            let parsed = ReplyHeader::parse(window.bytes(), self.replies);
            let Some((header, used)) = parsed.map_err(|error| broken(&error.to_string()))? else {
                socket.send();
                let more = window.fill(&socket.stream).await;
                if !more.map_err(|error| Error::system("cannot receive", error))? {
                    return Err(gone());
                }
                now = Instant::now();
                continue;
            };
            window.consume(used);
            let slot = self.find(header.cookie())?;
            if self.take(slot, header, socket, window).await? {
                // What was received by itself came later than what began it.
                let large = self.size >= LARGE as u64;
                if large {
                    now = Instant::now();
                }
                self.finish(slot, now)?;
                socket.replies.set(self.tally.requests);
                self.issue(slot, now, socket)?;
                // There may be something to receive for long, while the server waits for this.
                if large || socket.queue.borrow().queued() >= SEND_AT {
                    socket.send();
                }
            }
        }
        Ok(())
    }

    /// Queues the next request, if there is to be one.
    fn issue(&mut self, index: usize, now: Instant, socket: &LoadSocket) -> Result<()> {
        match &mut self.until {
            LoadEnd::Count(left) => match left.checked_sub(1) {
                Some(rest) => *left = rest,
                None => return Ok(()),
            },
            LoadEnd::Deadline(deadline) if now >= *deadline => return Ok(()),
            LoadEnd::Deadline(_) => {}
        }
        let place = self.pattern.next();
        let slot = &mut self.slots[index];
        let generation = slot.generation.wrapping_add(1);
        let write = place.write;
        let sent = now;
        *slot = LoadSlot { generation, busy: true, write, sent, got: 0, error: None };
        let mut flags = CommandFlags::NONE;
        if write && self.headers == RequestForm::Extended {
            flags = CommandFlags::PAYLOAD_LEN;
        }
        let header = request::RequestHeader {
            flags,
            command: if write { CommandCode::Write } else { CommandCode::Read },
            cookie: u64::from(generation) << 32 | index as u64,
            offset: place.at,
            length: self.size,
        };
        let encoded = header.encode(self.headers).map_err(|error| broken(&error.to_string()))?;
        let mut queue = socket.queue.borrow_mut();
        queue.head(&encoded);
        if write {
            queue.data(self.payload.clone());
        }
        self.in_flight += 1;
        Ok(())
    }

    /// The slot of a cookie.
    fn find(&self, cookie: u64) -> Result<usize> {
        let index = (cookie & u64::from(u32::MAX)) as usize;
        match self.slots.get(index) {
            Some(slot) if slot.busy && u64::from(slot.generation) == cookie >> 32 => Ok(index),
            _ => Err(broken("an answer to a request that was not made")),
        }
    }

    /// Processes a message; true if it was the last one of its request.
    async fn take(
        &mut self,
        index: usize,
        header: ReplyHeader,
        socket: &LoadSocket,
        window: &mut RecvWindow,
    ) -> Result<bool> {
        let stream = &socket.stream;
        match header {
            ReplyHeader::Simple { error, .. } => {
                self.slots[index].error = error;
                if error.is_none() && !self.slots[index].write {
                    if self.replies != ReplyForm::Simple {
                        return Err(broken("a simple reply to a read, with structured replies on"));
                    }
                    self.skip(self.size, stream, window).await?;
                    self.slots[index].got = self.size;
                }
                Ok(true)
            }
            ReplyHeader::Chunk(chunk) => {
                self.chunk(index, &chunk, stream, window).await?;
                Ok(chunk.is_done())
            }
        }
    }

    async fn chunk(
        &mut self,
        index: usize,
        chunk: &ReplyChunk,
        stream: &Stream,
        window: &mut RecvWindow,
    ) -> Result<()> {
        match chunk.kind {
            ChunkKind::None => Ok(()),
            ChunkKind::OffsetData => {
                self.skip(chunk.length, stream, window).await?;
                // At least the prefix, as the codec has checked.
                self.slots[index].got += chunk.length - reply::DATA_PREFIX_LEN as u64;
                Ok(())
            }
            kind if kind.is_error() || kind == ChunkKind::OffsetHole => {
                // Limited by the codec.
                let mut payload = vec![0; chunk.length as usize];
                let whole = window.payload(stream, &mut payload).await;
                if !whole.map_err(|error| Error::system("cannot receive", error))? {
                    return Err(gone());
                }
                let wrong = |error: blockhaul_wire::ProtocolError| broken(&error.to_string());
                match kind {
                    ChunkKind::OffsetHole => {
                        let hole = HoleChunk::parse(&payload).map_err(wrong)?;
                        self.slots[index].got += u64::from(hole.len);
                    }
                    _ => {
                        let failure = ErrorChunk::parse(kind, &payload).map_err(wrong)?;
                        self.slots[index].error = Some(failure.error);
                    }
                }
                Ok(())
            }
            _ => Err(broken("extents, which nobody asked for")),
        }
    }

    /// Drops a payload.
    async fn skip(&mut self, len: u64, stream: &Stream, window: &mut RecvWindow) -> Result<()> {
        let lost = |error| Error::system("cannot receive", error);
        if len < LARGE as u64 || self.scratch.is_empty() {
            let whole = window.skip(stream, len).await.map_err(lost)?;
            return if whole { Ok(()) } else { Err(gone()) };
        }
        let mut left = len;
        while left > 0 {
            let part = left.min(self.scratch.len() as u64);
            let into = &mut self.scratch[..part as usize];
            if !window.payload(stream, into).await.map_err(lost)? {
                return Err(gone());
            }
            left -= part;
        }
        Ok(())
    }

    fn finish(&mut self, index: usize, now: Instant) -> Result<()> {
        let slot = &mut self.slots[index];
        slot.busy = false;
        self.in_flight -= 1;
        self.tally.requests += 1;
        self.tally.latency.add(now.saturating_duration_since(slot.sent));
        match slot.error {
            Some(error) => *self.tally.errors.entry(error.to_string()).or_default() += 1,
            None if !slot.write && slot.got != self.size => {
                return Err(broken("a read was answered with another number of bytes"));
            }
            None => self.tally.bytes += self.size,
        }
        Ok(())
    }
}

fn gone() -> Error {
    Error::new(Kind::Disconnected, "the server closed the connection")
}

fn broken(what: &str) -> Error {
    Error::new(Kind::Io, format!("the server broke the protocol: {what}"))
}
