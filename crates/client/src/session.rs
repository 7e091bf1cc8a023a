//! One connection in transmission: requests out in batches, replies in, in any order.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

use block::{Error, Kind, Outcome};
use io::{Completer, Data, Lent, RecvWindow, Room, SendQueue, Stream};
use slab::Slab;
use wire::reply::{self, Chunk, ChunkKind, Header};
use wire::{Command, Headers, Replies, request};

use crate::connect::Link;
use crate::reply::{Expected, Reading, Want, server_error, small_chunk, violation, wrong};

/// Chunks of one reply: one for every 512 bytes of the longest read, and as many again. A server that
/// sends more makes a list that never ends.
const CHUNKS_MAX: u32 = 128 << 10;

/// State that submitters (any worker) and the connection's own tasks (one worker) share.
pub(crate) struct Session {
    stream: Stream,
    headers: Headers,
    replies: Replies,
    state: Mutex<State>,
}

struct State {
    queue: SendQueue,
    /// Requests by the lower half of their cookies; `None` while a reply is worked on.
    in_flight: Slab<Option<InFlight>>,
    /// Makes cookies of reused slots differ.
    generation: u32,
    writer: Option<Waker>,
    /// The socket takes no more for now.
    blocked: bool,
    /// Why nothing more can be sent.
    broken: Option<Error>,
    closing: bool,
    /// When the last byte went either way, or the first request in flight was queued.
    active: Instant,
    /// An answer waits for memory.
    claiming: bool,
    /// Reads that are answered in part, in memory of their own.
    partial: usize,
}

struct InFlight {
    cookie: u64,
    expected: Expected,
    completer: Completer<Outcome>,
    /// The payload of a write, whose pages the server reads until it answers.
    lent: Option<Lent>,
}

/// Starts the tasks of a connection on this worker.
pub(crate) fn start(
    link: Link,
    headers: Headers,
    replies: Replies,
    timeout: Duration,
) -> Arc<Session> {
    let Link { stream, mut window, queue } = link;
    window.expect_headers_of(match replies {
        Replies::Simple => reply::SIMPLE_LEN,
        Replies::Structured => reply::STRUCTURED_LEN + reply::DATA_PREFIX_LEN,
        Replies::Extended => reply::EXTENDED_LEN + reply::DATA_PREFIX_LEN,
    });
    let session = Arc::new(Session {
        stream,
        headers,
        replies,
        state: Mutex::new(State {
            queue,
            in_flight: Slab::new(),
            generation: 0,
            writer: None,
            blocked: false,
            broken: None,
            closing: false,
            active: Instant::now(),
            claiming: false,
            partial: 0,
        }),
    });
    drop(io::spawn(session.clone().write_requests()));
    drop(io::spawn(session.clone().read_replies(window)));
    if !timeout.is_zero() {
        drop(io::spawn(watch(Arc::downgrade(&session), timeout)));
    }
    session
}

impl Session {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic under this lock")
    }

    /// The form of requests.
    pub(crate) fn headers(&self) -> Headers {
        self.headers
    }

    /// Queues a request; it leaves with others that are queued before the worker gets to it.
    pub(crate) fn submit(
        &self,
        mut header: request::Header,
        payload: Payload,
        expected: Expected,
        completer: Completer<Outcome>,
    ) {
        let mut state = self.lock();
        if let Some(error) = state.broken.clone() {
            drop(state);
            completer.complete(Err(error));
            return;
        }
        if state.in_flight.is_empty() {
            state.active = Instant::now();
        }
        state.generation = state.generation.wrapping_add(1);
        let generation = u64::from(state.generation) << 32;
        let entry = state.in_flight.vacant_entry();
        let key = entry.key();
        // Slots are few, so 32 bits hold them.
        header.cookie = entry.key() as u64 | generation;
        let encoded = match header.encode(self.headers) {
            Ok(encoded) => encoded,
            Err(error) => {
                drop(state);
                completer.complete(Err(crate::connect::refused(&error)));
                return;
            }
        };
        entry.insert(Some(InFlight { cookie: header.cookie, expected, completer, lent: None }));
        state.queue.head(&encoded);
        match payload {
            Payload::None => {}
            Payload::Data(data) => {
                let lent = state.queue.lend(data);
                if let Some(Some(request)) = state.in_flight.get_mut(key) {
                    request.lent = lent;
                }
            }
            Payload::Bytes(bytes) => state.queue.head(&bytes),
        }
        let writer = if state.blocked { None } else { state.writer.take() };
        drop(state);
        if let Some(writer) = writer {
            writer.wake();
        }
    }

    /// Says goodbye: after what is queued, as far as the socket takes it without waiting. The
    /// connection ends when everything in flight has been answered.
    pub(crate) fn close(&self) {
        let mut state = self.lock();
        if state.closing || state.broken.is_some() {
            return;
        }
        state.closing = true;
        let goodbye = request::Header {
            flags: wire::CommandFlags::NONE,
            command: Command::Disconnect,
            cookie: 0,
            offset: 0,
            length: 0,
        };
        if let Ok(encoded) = goodbye.encode(self.headers) {
            state.queue.head(&encoded);
        }
        // A failure means that the server has gone first.
        let _ = state.queue.send(&self.stream);
        self.end_if_done(&mut state);
        let writer = state.writer.take();
        drop(state);
        if let Some(writer) = writer {
            writer.wake();
        }
    }

    /// Ends the connection once the goodbye is out and nothing is owed any more: a server that does
    /// not close for its part must not keep it open for ever.
    fn end_if_done(&self, state: &mut State) {
        if state.closing && state.in_flight.is_empty() && state.queue.queued() == 0 {
            state.queue.close(&self.stream);
            self.stream.shutdown();
        }
    }

    /// Fails everything in flight and everything to come.
    fn break_off(&self, error: Error) {
        let mut state = self.lock();
        if state.broken.is_some() {
            return;
        }
        state.broken = Some(error.clone());
        state.queue.clear();
        let in_flight = std::mem::take(&mut state.in_flight);
        let writer = state.writer.take();
        let quiet = state.closing && in_flight.is_empty();
        drop(state);
        if !quiet {
            log::debug!("connection lost with {} requests in flight: {error}", in_flight.len());
        }
        self.stream.shutdown();
        // The one whose reply is worked on is completed by the reader.
        for request in in_flight.into_iter().filter_map(|(_, request)| request) {
            request.completer.complete(Err(error.clone()));
        }
        if let Some(writer) = writer {
            writer.wake();
        }
    }

    async fn write_requests(self: Arc<Self>) {
        loop {
            let sent = poll_fn(|cx| {
                let mut state = self.lock();
                if state.broken.is_some() {
                    return Poll::Ready(None);
                }
                if state.queue.queued() == 0 {
                    if state.closing {
                        self.end_if_done(&mut state);
                        return Poll::Ready(None);
                    }
                    state.writer = Some(cx.waker().clone());
                    return Poll::Pending;
                }
                let sent = state.queue.send(&self.stream);
                state.blocked = matches!(sent, Ok(false));
                state.active = Instant::now();
                Poll::Ready(Some(sent))
            });
            match sent.await {
                None => return,
                Some(Ok(true)) => {}
                Some(Ok(false)) => {
                    let waited = self.stream.writable().await;
                    self.lock().blocked = false;
                    if let Err(error) = waited {
                        self.break_off(Error::system("cannot send", error));
                    }
                }
                Some(Err(error)) => self.break_off(lost("cannot send", error)),
            }
        }
    }

    async fn read_replies(self: Arc<Self>, mut window: RecvWindow) {
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

    /// Takes one reply message; false at an orderly end of the stream.
    async fn next_reply(&self, window: &mut RecvWindow) -> Result<bool, Error> {
        let header = loop {
            match Header::parse(window.bytes(), self.replies).map_err(|error| wrong(&error))? {
                Some((header, used)) => {
                    window.consume(used);
                    break header;
                }
                None => {
                    let more = window.fill(&self.stream).await;
                    self.lock().active = Instant::now();
                    if !more.map_err(|error| lost("cannot receive", error))? {
                        return match window.bytes().is_empty() {
                            true => Ok(false),
                            false => Err(cut_off()),
                        };
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
        error: Option<wire::Errno>,
    ) -> Result<(), Error> {
        let mut request = self.take(cookie)?;
        if let Some(errno) = error {
            request.expected.error = Some(server_error(errno, ""));
        } else if let Want::Read(reading) = &mut request.expected.want {
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
        let result = match request.expected.chunks > CHUNKS_MAX {
            true => Err(violation("a reply in more pieces than there can be")),
            false => self.chunk_payload(window, &chunk, &mut request.expected).await,
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
                    return Err(violation("data after all of it has come"));
                };
                // Inside the buffer, which has the request's length.
                let part = &mut buf[start as usize..(start + len) as usize];
                let received = self.payload(window, part).await;
                reading.filled(buf, start, len);
                received
            }
            kind => {
                // Bounded by the codec for every kind.
                let mut payload = vec![0; chunk.length as usize];
                self.payload(window, &mut payload).await?;
                small_chunk(kind, &payload, expected)
            }
        }
    }

    /// Takes a payload that is all of the answer to a read.
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
                reading.filled_whole(data);
                Ok(())
            }
            Ok(None) => Err(cut_off()),
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

    /// The memory of an answer that has come. Meanwhile nothing is received, which is not the server's
    /// silence.
    async fn claim(&self, room: Room) -> Room {
        {
            let mut state = self.lock();
            if state.partial > 0 {
                // What is there in part has memory, which would wait for what comes behind this.
                return room.claim_now();
            }
            state.claiming = true;
        }
        let room = room.claim().await;
        let mut state = self.lock();
        (state.claiming, state.active) = (false, Instant::now());
        room
    }

    /// Notes each turn of a reception, which means that bytes came: a large payload on a slow line is
    /// not silence.
    async fn alive<T>(&self, receiving: impl Future<Output = T>) -> T {
        let mut receiving = pin!(receiving);
        poll_fn(|cx| {
            let polled = receiving.as_mut().poll(cx);
            self.lock().active = Instant::now();
            polled
        })
        .await
    }

    /// Takes a request out of the table while its reply is worked on; its slot stays taken.
    fn take(&self, cookie: u64) -> Result<InFlight, Error> {
        let mut state = self.lock();
        let slot = state.in_flight.get_mut(slot(cookie));
        let request = slot.and_then(|slot| slot.take_if(|request| request.cookie == cookie));
        request.ok_or_else(|| violation("a reply to a request that is not in flight"))
    }

    /// Enters a request again whose reply goes on.
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
        // A server that answers with an error may not have read the payload yet.
        if request.expected.error.is_none()
            && let Some(lent) = request.lent.take()
        {
            lent.returned();
        }
        let mut state = self.lock();
        state.partial -= usize::from(request.expected.is_partial());
        // Not there any more if the connection has been given up meanwhile.
        let _ = state.in_flight.try_remove(slot(request.cookie));
        self.end_if_done(&mut state);
        drop(state);
        request.completer.complete(request.expected.finish());
    }
}

/// The place of a cookie's request in the table.
fn slot(cookie: u64) -> usize {
    (cookie & u64::from(u32::MAX)) as usize
}

/// Gives a connection up when nothing moves although something should. Does not keep it alive.
async fn watch(session: Weak<Session>, timeout: Duration) {
    loop {
        io::sleep((timeout / 4).max(Duration::from_millis(10))).await;
        let Some(session) = session.upgrade() else { return };
        let state = session.lock();
        if state.broken.is_some() {
            return;
        }
        let silent = state.active.elapsed();
        let (waiting, claiming) = (state.in_flight.len(), state.claiming);
        drop(state);
        if waiting > 0 && silent >= timeout && !claiming {
            let text = format!(
                "no byte from the server for {} s with {waiting} requests in flight",
                timeout.as_secs_f32()
            );
            session.break_off(Error::new(Kind::TimedOut, text));
            return;
        }
    }
}

/// What follows a request's header.
pub(crate) enum Payload {
    None,
    Data(Data),
    Bytes(Vec<u8>),
}

/// The stream ended or failed.
fn lost(what: &'static str, error: std::io::Error) -> Error {
    Error::new(Kind::Disconnected, what).because(error)
}

fn cut_off() -> Error {
    Error::new(Kind::Disconnected, "the server closed the connection in the middle of a reply")
}
