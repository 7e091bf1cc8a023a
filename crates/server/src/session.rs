//! A connection in transmission: reads requests, submits them, answers.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use block::{Contexts, Device, Error, Flags, Kind, Op, Outcome, Request};
use io::{Event, Pool, RecvWindow, Room, SendQueue, Stream};
use wire::handshake::server::Negotiated;
use wire::reply::Answer;
use wire::request::{Command, Filter, Header};
use wire::{CommandFlags, Errno, limits::PAYLOAD_HARD};

use crate::Limits;
use crate::handshake::Chosen;
use crate::reply::{self, Asked};

/// Replies are sent when this many bytes wait: a payload leaves while it is still in the cache, and
/// its buffer is free for the next request.
const SEND_AT: usize = 192 << 10;
/// No request is taken up while more than this waits to be sent: bounds what is not buffers of the
/// pool (extent lists).
const QUEUED_MAX: usize = 64 << 20;

/// Requests taken from one connection before others have their turn.
const REQUESTS_PER_TURN: u64 = 64;

/// Serves requests until the client leaves or breaks the protocol; then finishes what is in progress.
pub(crate) async fn run(
    stream: Stream,
    chosen: Chosen,
    limits: &Limits,
    pool: Pool,
) -> Result<(), String> {
    let Chosen { negotiated, device, mut inbox } = chosen;
    inbox.expect_headers_of(negotiated.headers.len());
    let session = Rc::new(Session {
        stream,
        negotiated,
        takes_parked: device.facts().takes_parked,
        device,
        limits: limits.clone(),
        pool,
        out: RefCell::default(),
        to_send: Event::new(),
        progress: Event::new(),
        in_flight: Cell::new(0),
        blocked: Cell::new(false),
        broken: Cell::new(false),
        closing: Cell::new(false),
    });
    let writer = io::spawn(session.clone().write_replies());
    let result = session.read_requests(inbox).await;
    session.finish_all().await;
    session.closing.set(true);
    session.to_send.notify();
    writer.await;
    result
}

struct Session {
    stream: Stream,
    negotiated: Negotiated,
    device: Arc<dyn Device>,
    /// Payloads of writes may stay in the kernel.
    takes_parked: bool,
    limits: Limits,
    pool: Pool,
    out: RefCell<SendQueue>,
    /// Something was queued by a task, or the session closes: the writer looks.
    to_send: Event,
    /// A request completed or replies left: whoever waits for room looks.
    progress: Event,
    in_flight: Cell<usize>,
    /// The socket takes no more for now; the writer waits for it.
    blocked: Cell<bool>,
    broken: Cell<bool>,
    closing: Cell<bool>,
}

impl Session {
    async fn read_requests(self: &Rc<Self>, mut inbox: RecvWindow) -> Result<(), String> {
        let headers = self.negotiated.headers;
        let mut requests = 0_u64;
        loop {
            let parsed =
                Header::parse(inbox.bytes(), headers).map_err(|error| error.to_string())?;
            let Some((header, used)) = parsed else {
                self.send();
                match inbox.fill(&self.stream).await {
                    Ok(true) => continue,
                    // Clients that leave without saying so are common; what they sent is finished.
                    Ok(false) if inbox.bytes().is_empty() => return Ok(()),
                    Ok(false) => return Err("the client left in the middle of a request".into()),
                    Err(error) => return Err(error.to_string()),
                }
            };
            inbox.consume(used);
            // A client that never pauses must not keep others on this worker waiting.
            requests += 1;
            if requests.is_multiple_of(REQUESTS_PER_TURN) {
                io::yield_now().await;
            }
            if header.command == Command::Disconnect {
                return Ok(());
            }
            self.wait_for_turn().await;
            self.request(header, &mut inbox).await?;
        }
    }

    /// Waits until another request may be taken up.
    async fn wait_for_turn(&self) {
        loop {
            let mark = self.progress.mark();
            let busy = self.in_flight.get() >= self.limits.requests
                || self.out.borrow().queued() > QUEUED_MAX;
            if !busy || self.broken.get() {
                return;
            }
            self.send();
            self.to_send.notify();
            self.progress.wait_after(mark).await;
        }
    }

    async fn request(
        self: &Rc<Self>,
        header: Header,
        inbox: &mut RecvWindow,
    ) -> Result<(), String> {
        let payload = header.payload_len(self.negotiated.headers);
        if let Some(why) = self.refuse(&header) {
            if payload > u64::from(PAYLOAD_HARD) {
                return Err(format!("{why}, with {payload} bytes of payload"));
            }
            self.skip(inbox, payload).await?;
            self.fail(&header, &why);
            return Ok(());
        }
        let mut asked = Asked { header, len: header.length, ids: Vec::new() };
        let op = match header.command {
            Command::Read => match self.room(header.length).await {
                // The reply goes out as it is: the device may leave it in the kernel.
                Ok(room) => Op::Read(room.parkable()),
                Err(error) => {
                    self.complete(&asked, Err(error));
                    return Ok(());
                }
            },
            Command::Write => {
                let room = match self.room(header.length).await {
                    Ok(room) if self.takes_parked => room.parkable(),
                    Ok(room) => room,
                    Err(error) => {
                        self.skip(inbox, payload).await?;
                        self.complete(&asked, Err(error));
                        return Ok(());
                    }
                };
                let received = inbox.payload_or_parked(&self.stream, room).await;
                match received.map_err(|error| error.to_string())? {
                    Some(data) => Op::Write(data),
                    None => return Err("the client left in the middle of a payload".into()),
                }
            }
            Command::WriteZeroes => Op::Zero,
            Command::Trim => Op::Trim,
            Command::Flush => Op::Flush,
            Command::Cache => Op::Cache,
            Command::BlockStatus => match self.contexts(&mut asked, payload, inbox).await? {
                Ok(contexts) => Op::Extents(contexts),
                Err(why) => {
                    self.fail(&header, &why);
                    return Ok(());
                }
            },
            Command::Disconnect | Command::Other(_) => return Ok(()),
        };
        let (at, len) = match op {
            // The range of a flush means nothing.
            Op::Flush => (0, 0),
            _ => (header.offset, asked.len),
        };
        self.submit(asked, Request { op, at, len, flags: flags(&header) });
        Ok(())
    }

    fn submit(self: &Rc<Self>, asked: Asked, request: Request) {
        match self.device.submit(request).now() {
            Ok(outcome) => {
                self.complete(&asked, outcome);
                if self.out.borrow().queued() >= SEND_AT {
                    self.send();
                }
            }
            Err(pending) => {
                self.in_flight.set(self.in_flight.get() + 1);
                let session = self.clone();
                drop(io::spawn(async move {
                    let outcome = pending.await;
                    session.in_flight.set(session.in_flight.get() - 1);
                    session.complete(&asked, outcome);
                    session.to_send.notify();
                    session.progress.notify();
                }));
            }
        }
    }

    /// Why a request is answered EINVAL without asking the device, if it is. The device's fence
    /// checks ranges and abilities; here is what only NBD knows.
    fn refuse(&self, header: &Header) -> Option<String> {
        if let Command::Other(number) = header.command {
            return Some(format!("unknown command {number}"));
        }
        let extended = self.negotiated.headers == wire::Headers::Extended;
        let chunks = self.negotiated.replies != wire::Replies::Simple;
        let allowed = match header.command {
            Command::Write => CommandFlags::FUA.with(CommandFlags::PAYLOAD_LEN, extended),
            Command::Read => CommandFlags::FUA.with(CommandFlags::DF, chunks),
            Command::WriteZeroes => {
                CommandFlags::FUA | CommandFlags::NO_HOLE | CommandFlags::FAST_ZERO
            }
            Command::BlockStatus => {
                CommandFlags::REQ_ONE | CommandFlags::FUA.with(CommandFlags::PAYLOAD_LEN, extended)
            }
            _ => CommandFlags::FUA,
        };
        if !allowed.contains(header.flags) {
            return Some(format!("flags {:#x} are not for this command", header.flags.bits()));
        }
        let payload = matches!(header.command, Command::Read | Command::Write);
        if payload && header.length > u64::from(self.limits.payload) {
            return Some(format!("longer than {} bytes", self.limits.payload));
        }
        None
    }

    /// The contexts that a block status request asks for; the outer error ends the connection.
    async fn contexts(
        &self,
        asked: &mut Asked,
        payload: u64,
        inbox: &mut RecvWindow,
    ) -> Result<Result<Contexts, String>, String> {
        let negotiated = &self.negotiated.contexts;
        let known = |id| negotiated.iter().any(|context| context.id == id);
        if payload == 0 {
            asked.ids = negotiated.iter().map(|context| context.id).collect();
        } else if payload > Filter::MAX_LEN as u64 {
            if payload > u64::from(PAYLOAD_HARD) {
                return Err(format!("{payload} bytes of payload for a block status request"));
            }
            self.skip(inbox, payload).await?;
            return Ok(Err("more contexts than were negotiated".into()));
        } else {
            // Bounded just above.
            let mut buf = io::Buf::unpooled(payload as usize);
            self.whole(inbox.payload(&self.stream, &mut buf).await)?;
            match Filter::parse(&buf, known) {
                Ok(filter) => (asked.len, asked.ids) = (filter.length, filter.contexts),
                Err(error) => return Ok(Err(error.to_string())),
            }
        }
        if asked.ids.is_empty() {
            return Ok(Err("no context was negotiated".into()));
        }
        // Devices answer in ascending order of context, and ids are the device's indexes.
        asked.ids.sort_unstable();
        let indexes = asked.ids.iter().filter_map(|&id| usize::try_from(id).ok());
        Ok(Ok(indexes.fold(Contexts::empty(), Contexts::with)))
    }

    async fn room(&self, len: u64) -> Result<Room, Error> {
        // Bounded by the payload limit, which has 32 bits.
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        if let Some(room) = self.pool.try_reserve(len) {
            return Ok(room);
        }
        // What waits to be sent holds room.
        self.send();
        self.to_send.notify();
        let room = self.pool.reserve(len).await;
        room.map_err(|error| Error::new(Kind::NoMemory, "no buffer of this size").because(error))
    }

    fn complete(&self, asked: &Asked, outcome: Outcome) {
        if !self.broken.get() {
            let mut out = self.out.borrow_mut();
            let replies = self.negotiated.replies;
            reply::reply(&mut out, replies, asked, outcome, self.limits.extents);
        }
    }

    fn fail(&self, header: &Header, why: &str) {
        log::debug!("refused a request: {why}");
        let replies = self.negotiated.replies;
        let answer = Answer { replies, cookie: header.cookie, offset: header.offset };
        reply::failure(&mut self.out.borrow_mut(), &answer, Errno::Inval, why);
    }

    async fn skip(&self, inbox: &mut RecvWindow, count: u64) -> Result<(), String> {
        self.whole(inbox.skip(&self.stream, count).await)
    }

    fn whole(&self, received: std::io::Result<bool>) -> Result<(), String> {
        match received {
            Ok(true) => Ok(()),
            Ok(false) => Err("the client left in the middle of a payload".into()),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Sends what the socket takes; the rest is the writer's.
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

    /// The writer: sends replies that tasks queue, and waits when the socket is full.
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
                    let waited = self.stream.writable().await;
                    self.blocked.set(false);
                    if let Err(error) = waited {
                        self.break_off(&error);
                    }
                }
                Err(error) => self.break_off(&error),
            }
        }
    }

    /// The client is gone: replies have no reader, requests in progress are still finished.
    fn break_off(&self, error: &std::io::Error) {
        log::debug!("cannot send replies: {error}");
        self.broken.set(true);
        self.out.borrow_mut().clear();
        self.stream.shutdown();
        self.to_send.notify();
        self.progress.notify();
    }

    async fn finish_all(&self) {
        loop {
            let mark = self.progress.mark();
            self.send();
            let waiting = self.out.borrow().queued() > 0 && !self.broken.get();
            if self.in_flight.get() == 0 && !waiting {
                return;
            }
            self.progress.wait_after(mark).await;
        }
    }
}

fn flags(header: &Header) -> Flags {
    let mut flags = Flags::empty();
    // FUA on commands that write nothing is without meaning, not wrong.
    let fua = matches!(header.command, Command::Write | Command::WriteZeroes | Command::Trim);
    flags.set(Flags::FUA, fua && header.flags.contains(CommandFlags::FUA));
    flags.set(Flags::NO_HOLE, header.flags.contains(CommandFlags::NO_HOLE));
    flags.set(Flags::FAST, header.flags.contains(CommandFlags::FAST_ZERO));
    flags.set(Flags::ONE_EXTENT, header.flags.contains(CommandFlags::REQ_ONE));
    flags
}
