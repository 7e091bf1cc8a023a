//! A connection in transmission: reads requests, submits them ([`submit`]), sends replies.
//! [`waits`] has what it waits for.

mod submit;
mod waits;

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::io::ErrorKind;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use blockhaul_block::{
    ContextSet, Device, Error, Flushes, Op, OpKind, Outcome, Request, RequestFlags,
};
use blockhaul_catalog::{Dismissal, Export};
use blockhaul_io::{Data, Event, Pool, RecvWindow, SendQueue, Stream, Ticket};
use blockhaul_wire::handshake::server::ServerHandshakeResult;
use blockhaul_wire::reply::ReplyEncoder;
use blockhaul_wire::request::{CommandCode, RequestHeader, StatusFilter};
use blockhaul_wire::{CommandFlags, Errno, limits::PAYLOAD_HARD};

use crate::clients::unless_disconnected;
use crate::connection::Connection;
use crate::counters;
use crate::disconnect::DisconnectReason;
use crate::export_lookup::Visitor;
use crate::handshake::{ChosenExport, largest_payload};
use crate::in_flight::InFlight;
use crate::log_fields::{RequestFields, record};
use crate::log_limit::LogLimit;
use crate::reply::{self, ReplyContext};
use crate::{Limits, Server};

/// Replies are sent when this many bytes are queued: a payload leaves while it is still in the
/// cache, and its buffer is free for the next request.
const SEND_AT: usize = 192 << 10;

/// Requests processed from one connection before other tasks run; their bytes count as well, by
/// [`BYTES_PER_SHARE`].
const TURN: u64 = 64;
/// Bytes that count as one request: a turn takes at most a few milliseconds.
const BYTES_PER_SHARE: u64 = 128 << 10;
/// Size of an extent in the longest form.
const EXTENT_BYTES: usize = 16;

/// Serves requests until the client disconnects or violates the protocol; then finishes those in
/// progress.
pub(crate) async fn run(
    server: Arc<Server>,
    connection: Arc<Connection>,
    stream: Arc<Stream>,
    chosen: ChosenExport,
    visitor: Visitor,
    mut limits: Limits,
    disconnect: &mut Ticket<DisconnectReason>,
) -> Result<(), String> {
    let ChosenExport { negotiated, export, mut inbox, outbox } = chosen;
    let flushes = server.flushes(&export);
    let Export { device, .. } = export;
    let pool = server.share(&limits, device.facts().in_flight);
    // A list of extents is no longer than the advertised maximum payload.
    let longest = largest_payload(&server.config.offers, &limits, &device.facts()) as usize;
    limits.extents = limits.extents.min(longest / EXTENT_BYTES).max(1);
    inbox.expect_headers_of(negotiated.headers.len());
    let session = Rc::new(Session {
        parks_replies: !negotiated.tls && !stream.is_local_tcp(),
        stream,
        // TLS needs the bytes in memory.
        parks: !negotiated.tls,
        takes_parked: device.facts().takes_parked,
        size: device.facts().size,
        flushes,
        flush_failures_stay: device.facts().flush_failures_stay,
        connection,
        negotiated,
        device,
        dismissal: visitor.dismissal,
        limits,
        pool,
        aside: server.share_aside(),
        server,
        out: RefCell::new(outbox),
        to_send: Event::new(),
        progress: Event::new(),
        in_flight: InFlight::default(),
        blocked: Cell::new(false),
        broken: Cell::new(false),
        closing: Cell::new(false),
        leaving: Cell::new(false),
        untimed: Default::default(),
        writes_at_once: Cell::new(false),
        reads_at_once: Cell::new(false),
        reads_ahead: Cell::new(false),
        log_limit: LogLimit::default(),
    });
    let _unwinding = PanicGuard(session.clone());
    let writer = blockhaul_io::spawn(session.clone().write_replies());
    let server = session.server.clone();
    let connection = session.connection.clone();
    let look = || server.is_stopping() || connection.leave_requested.load(Ordering::Relaxed);
    let reading = unless_disconnected(disconnect, look, session.read_requests(inbox));
    // A stop reads no more, even if requests have arrived.
    let result = reading.await.unwrap_or(Ok(()));
    session.leaving.set(true);
    session.progress.notify();
    if session.dismissal.is_cut() {
        session.hang_up();
    }
    if session.in_flight.count() > 0 && !session.server.is_stopping() {
        visitor.visit.gone();
    }
    // nbd: disc.finish
    let finished = session.finish_all(visitor.visit.as_ref()).await;
    session.closing.set(true);
    session.to_send.notify();
    writer.await;
    session.close_stream(finished);
    result
}

/// Ends a session whose device has panicked, so that its writer ends, too.
struct PanicGuard(Rc<Session>);

impl Drop for PanicGuard {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.hang_up();
        }
    }
}

struct Session {
    connection: Arc<Connection>,
    stream: Arc<Stream>,
    negotiated: ServerHandshakeResult,
    device: Arc<dyn Device>,
    /// Flushes and FUA requests of all connections to the storage.
    flushes: Arc<Flushes>,
    /// From the device's facts.
    flush_failures_stay: bool,
    /// Whether storage wants the client to leave.
    dismissal: Arc<Dismissal>,
    /// Payloads may stay in the kernel.
    parks: bool,
    /// Those of replies may.
    parks_replies: bool,
    /// Those of writes may.
    takes_parked: bool,
    /// Size of the device in bytes.
    size: u64,
    limits: Limits,
    pool: Pool,
    /// For one small request when the pool is exhausted.
    aside: Pool,
    server: Arc<Server>,
    out: RefCell<SendQueue>,
    /// Signals the writer that a task has queued a reply, or the session closes.
    to_send: Event,
    /// Signals that a request completed or replies were sent, and memory may be free.
    progress: Event,
    in_flight: InFlight,
    /// The socket takes no more now; the writer waits for it.
    blocked: Cell<bool>,
    broken: Cell<bool>,
    closing: Cell<bool>,
    /// No more requests follow.
    leaving: Cell<bool>,
    /// For each kind of request: 0 before the first, then one more than the number completed at
    /// once without timing since the last timed one.
    untimed: [Cell<u8>; OpKind::ALL.len()],
    /// The device carries out large writes within `submit`.
    writes_at_once: Cell<bool>,
    /// The device has completed the last read within `submit`.
    reads_at_once: Cell<bool>,
    /// The client has read nothing for a while: the next reads do not wait for it.
    reads_ahead: Cell<bool>,
    log_limit: LogLimit,
}

impl Session {
    /// Closes the connection. `finished`: no request is in flight at the device.
    fn close_stream(&self, finished: bool) {
        if !self.broken.get() {
            // nbd: disconnect.server-closes
            self.out.borrow_mut().close(&self.stream);
        }
        if !finished {
            // The requests in flight at the device hold the socket, too.
            self.stream.shutdown();
        }
    }

    /// Whether nothing of the client is in progress.
    fn is_idle(&self, inbox: &RecvWindow) -> bool {
        inbox.bytes().is_empty() && self.in_flight.count() == 0
    }

    async fn read_requests(self: &Rc<Self>, mut inbox: RecvWindow) -> Result<(), String> {
        let headers = self.negotiated.headers;
        let mut turn = 0;
        loop {
            let parsed =
                RequestHeader::parse(inbox.bytes(), headers).map_err(|error| error.to_string())?;
            let Some((header, used)) = parsed else {
                self.send();
                match inbox.fill(&self.stream).await {
                    Ok(true) => continue,
                    // Clients often disconnect without a request; what they sent is finished.
                    Ok(false) if inbox.bytes().is_empty() => return Ok(()),
                    Ok(false) => return Err("the client left in the middle of a request".into()),
                    // The same without reading the last replies.
                    Err(error)
                        if error.kind() == ErrorKind::ConnectionReset && self.is_idle(&inbox) =>
                    {
                        return Ok(());
                    }
                    Err(error) => return Err(error.to_string()),
                }
            };
            inbox.consume(used);
            // When the server stops, requests sent in time may still be in the socket's buffer.
            // nbd: disc.no-reply
            if header.command == CommandCode::Disconnect
                || self.server.is_stopping()
                || self.connection.leave_requested.load(Ordering::Relaxed)
            {
                return Ok(());
            }
            // A client that never pauses must not block others on this worker.
            turn += 1 + header.length.min(self.limits.payload.into()) / BYTES_PER_SHARE;
            if turn >= TURN {
                turn = 0;
                blockhaul_io::yield_now().await;
            }
            if header.command == CommandCode::Read {
                self.wait_for_reader().await;
            }
            let _place = self.wait_for_turn().await;
            self.request(header, &mut inbox).await?;
        }
    }

    async fn request(
        self: &Rc<Self>,
        header: RequestHeader,
        inbox: &mut RecvWindow,
    ) -> Result<(), String> {
        let payload = header.payload_len(self.negotiated.headers);
        if let Some((error, why)) = self.refuse(&header) {
            // nbd: extended.too-long
            if payload > u64::from(PAYLOAD_HARD) {
                return Err(format!("{why}, with {payload} bytes of payload"));
            }
            // nbd: extended.skip-payload
            self.skip(inbox, payload).await?;
            self.fail(&header, error, &why);
            return Ok(());
        }
        let len = header.length;
        let size = self.size;
        let longest = match self.negotiated.replies {
            blockhaul_wire::ReplyForm::Extended => u64::MAX,
            _ => u32::MAX.into(),
        };
        let mut asked = ReplyContext { header, len, size, longest, ids: Vec::new(), room: None };
        let op = match header.command {
            CommandCode::Read => match self.room(header.length).await {
                // The reply is sent unchanged: the device may leave it in the kernel.
                Ok(room) if self.parks_replies => Op::Read(room.parkable()),
                Ok(room) => Op::Read(room),
                Err(error) => {
                    self.complete(&mut asked, Err(error));
                    return Ok(());
                }
            },
            CommandCode::Write => match self.payload(header.length, inbox).await? {
                Ok(data) => Op::Write(data),
                Err(error) => {
                    self.skip(inbox, payload).await?;
                    self.complete(&mut asked, Err(error));
                    return Ok(());
                }
            },
            CommandCode::WriteZeroes => Op::Zero,
            CommandCode::Trim => Op::Trim,
            CommandCode::Flush => Op::Flush,
            // nbd: cache.no-effect
            CommandCode::Cache => Op::Cache,
            CommandCode::BlockStatus => match self.contexts(&mut asked, payload, inbox).await? {
                Ok(contexts) => {
                    // Lists are as large as reads, and a client need not read them at once.
                    let most = self.limits.extents.saturating_mul(EXTENT_BYTES * contexts.count());
                    let limit = usize::try_from(self.pool.limit() / 2).unwrap_or(usize::MAX);
                    asked.room = self.room(most.min(limit) as u64).await.ok();
                    Op::Extents(contexts)
                }
                Err(why) => {
                    self.fail(&header, Errno::Inval, &why);
                    return Ok(());
                }
            },
            CommandCode::Disconnect | CommandCode::Other(_) => return Ok(()),
        };
        let (at, len) = match op {
            // The range of a flush is meaningless.
            Op::Flush => (0, 0),
            _ => (header.offset, asked.len),
        };
        self.submit(asked, Request { op, at, len, flags: flags(&header) });
        Ok(())
    }

    /// The payload of a write; the outer error ends the connection; with the inner one the payload
    /// was not received.
    async fn payload(
        &self,
        len: u64,
        inbox: &mut RecvWindow,
    ) -> Result<Result<Data, Error>, String> {
        // Limited by the payload limit, which has 32 bits.
        if let Some(data) = usize::try_from(len).ok().and_then(|len| inbox.payload_here(len)) {
            return Ok(Ok(data));
        }
        let room = match self.room(len).await {
            Ok(room) if self.parks && self.takes_parked => room.parkable(),
            Ok(room) => room,
            Err(error) => return Ok(Err(error)),
        };
        let received = inbox.payload_or_parked(&self.stream, room);
        let received = self.patiently(self.answering(received)).await;
        match received.map_err(|error| error.to_string())? {
            Some(data) => Ok(Ok(data)),
            None => Err("the client left in the middle of a payload".into()),
        }
    }

    // nbd: sizes.server-einval
    /// Why a request is refused without asking the device, if it is. The device's fence checks
    /// ranges and abilities; this checks what only NBD has.
    fn refuse(&self, header: &RequestHeader) -> Option<(Errno, String)> {
        if self.dismissal.is_refused() {
            return Some((Errno::Shutdown, "no more requests are served here".into()));
        }
        self.invalid(header).map(|why| (Errno::Inval, why))
    }

    // nbd: sizes.errors
    fn invalid(&self, header: &RequestHeader) -> Option<String> {
        // nbd: errors.einval-unknown
        if let CommandCode::Other(number) = header.command {
            return Some(format!("unknown command {number}"));
        }
        let extended = self.negotiated.headers == blockhaul_wire::RequestForm::Extended;
        let chunks = self.negotiated.replies != blockhaul_wire::ReplyForm::Simple;
        let allowed = match header.command {
            // nbd: command-flags.fua-accepted
            CommandCode::Write => CommandFlags::FUA.with(CommandFlags::PAYLOAD_LEN, extended),
            CommandCode::Read => CommandFlags::FUA.with(CommandFlags::DF, chunks),
            CommandCode::WriteZeroes => {
                CommandFlags::FUA | CommandFlags::NO_HOLE | CommandFlags::FAST_ZERO
            }
            CommandCode::BlockStatus => {
                CommandFlags::REQ_ONE | CommandFlags::FUA.with(CommandFlags::PAYLOAD_LEN, extended)
            }
            _ => CommandFlags::FUA,
        };
        // nbd: command-flags.unknown, cache.flags
        if !allowed.contains(header.flags) {
            return Some(format!(
                "flags {:#x} are not allowed for this command",
                header.flags.bits()
            ));
        }
        let payload = matches!(header.command, CommandCode::Read | CommandCode::Write);
        // nbd: read.split
        if payload && header.length > u64::from(self.limits.payload) {
            return Some(format!("longer than {} bytes", self.limits.payload));
        }
        None
    }

    /// The contexts that a block status request selects; the outer error ends the connection.
    async fn contexts(
        &self,
        asked: &mut ReplyContext,
        payload: u64,
        inbox: &mut RecvWindow,
    ) -> Result<Result<ContextSet, String>, String> {
        let negotiated = &self.negotiated.contexts;
        let known = |id| negotiated.iter().any(|context| context.id == id);
        if payload == 0 {
            asked.ids = negotiated.iter().map(|context| context.id).collect();
        } else if payload > StatusFilter::MAX_LEN as u64 {
            if payload > u64::from(PAYLOAD_HARD) {
                return Err(format!("{payload} bytes of payload for a block status request"));
            }
            self.skip(inbox, payload).await?;
            return Ok(Err("more contexts than were negotiated".into()));
        } else {
            // Limited just above.
            let mut buf = blockhaul_io::Buf::unpooled(payload as usize);
            self.whole(self.answering(inbox.payload(&self.stream, &mut buf)).await)?;
            match StatusFilter::parse(&buf, known) {
                Ok(filter) => (asked.len, asked.ids) = (filter.length, filter.contexts),
                // nbd: extended.filter-refused
                Err(error) => return Ok(Err(error.to_string())),
            }
        }
        if asked.ids.is_empty() {
            // nbd: meta.server-einval
            return Ok(Err("no context was negotiated".into()));
        }
        // Devices return lists in ascending order of context, and IDs are the device's indexes.
        asked.ids.sort_unstable();
        let indexes = asked.ids.iter().filter_map(|&id| usize::try_from(id).ok());
        Ok(Ok(indexes.fold(ContextSet::empty(), ContextSet::with)))
    }

    fn complete(&self, asked: &mut ReplyContext, outcome: Outcome) {
        if self.dismissal.is_cut() {
            return self.hang_up();
        }
        if let Some(kind) = counters::kind(asked.header.command) {
            self.connection.counters.answered(kind, outcome.is_ok().then_some(asked.len));
        }
        if !self.broken.get() {
            let mut out = self.out.borrow_mut();
            let replies = self.negotiated.replies;
            // nbd: chunk.maximum
            let replied = reply::reply(&mut out, replies, asked, outcome, self.limits.extents);
            if let Err(error) = replied {
                self.log_limit.failed(&self.connection, &asked.header, &error);
            }
        }
    }

    fn fail(&self, header: &RequestHeader, error: Errno, why: &str) {
        let id = self.connection.id;
        let peer = &self.connection.peer;
        let RequestFields { request, offset, length } = RequestFields::of(header);
        record!(
            Debug, self.connection, request, offset, length, error = why;
            "connection {id} from {peer}: refused a request: {why}"
        );
        self.connection.counters.refused();
        let replies = self.negotiated.replies;
        let answer = ReplyEncoder { replies, cookie: header.cookie, offset: header.offset };
        reply::failure(&mut self.out.borrow_mut(), &answer, error, why);
    }

    /// Receives, and sends what is queued as soon as nothing has arrived: a reply must not wait for
    /// the payload of another request.
    async fn answering<T>(&self, receiving: impl Future<Output = T>) -> T {
        let mut receiving = pin!(receiving);
        poll_fn(|cx| {
            let polled = receiving.as_mut().poll(cx);
            if polled.is_pending() && self.out.borrow().queued() > 0 {
                self.send();
            }
            polled
        })
        .await
    }

    async fn skip(&self, inbox: &mut RecvWindow, count: u64) -> Result<(), String> {
        self.whole(self.answering(inbox.skip(&self.stream, count)).await)
    }

    fn whole(&self, received: std::io::Result<bool>) -> Result<(), String> {
        match received {
            Ok(true) => Ok(()),
            Ok(false) => Err("the client left in the middle of a payload".into()),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Sends what the socket takes; the writer sends the rest.
    fn send(&self) {
        if self.blocked.get() || self.broken.get() {
            return;
        }
        let sent = self.out.borrow_mut().send(&self.stream);
        match sent {
            Ok(true) => {}
            Ok(false) => self.to_send.notify(),
            Err(error) => self.break_off(&error),
        }
    }

    /// The writer: sends replies that tasks queue, and waits while the socket is full.
    async fn write_replies(self: Rc<Self>) {
        loop {
            let mark = self.to_send.mark();
            if self.broken.get() {
                return;
            }
            let sent = self.out.borrow_mut().send(&self.stream);
            self.progress.notify();
            match sent {
                Ok(true) if self.closing.get() => return,
                Ok(true) => self.to_send.wait_after(mark).await,
                Ok(false) => {
                    self.blocked.set(true);
                    let waited = self.writable().await;
                    self.blocked.set(false);
                    self.reads_ahead.set(false);
                    if let Err(error) = waited {
                        self.break_off(&error);
                    }
                }
                Err(error) => self.break_off(&error),
            }
        }
    }

    // nbd: disconnect.only-as-allowed
    /// Ends the connection for the storage: drops queued replies, and closes a TLS session
    /// properly.
    fn hang_up(&self) {
        if self.broken.replace(true) {
            return;
        }
        {
            let mut out = self.out.borrow_mut();
            out.clear();
            out.close(&self.stream);
        }
        self.stream.shutdown();
        self.to_send.notify();
        self.progress.notify();
    }

    /// The client is gone: drops its replies; requests in progress are still finished.
    fn break_off(&self, error: &std::io::Error) {
        record!(
            Debug, self.connection, error = error.to_string();
            "cannot send replies: {error}"
        );
        self.broken.set(true);
        self.out.borrow_mut().clear();
        self.stream.shutdown();
        self.to_send.notify();
        self.progress.notify();
    }
}

fn flags(header: &RequestHeader) -> RequestFlags {
    let mut flags = RequestFlags::empty();
    // FUA on commands that write nothing is meaningless, not invalid.
    let fua =
        matches!(header.command, CommandCode::Write | CommandCode::WriteZeroes | CommandCode::Trim);
    flags.set(RequestFlags::FUA, fua && header.flags.contains(CommandFlags::FUA));
    // nbd: command-flags.no-hole
    flags.set(RequestFlags::NO_HOLE, header.flags.contains(CommandFlags::NO_HOLE));
    // nbd: command-flags.fast-zero, zeroes.fast
    flags.set(RequestFlags::FAST, header.flags.contains(CommandFlags::FAST_ZERO));
    flags.set(RequestFlags::ONE_EXTENT, header.flags.contains(CommandFlags::REQ_ONE));
    flags
}
