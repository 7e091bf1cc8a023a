//! One connection in transmission: requests out in batches, replies in ([`replies`]), in any order.

mod replies;

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

use blockhaul_block::{Error, Kind, Outcome};
use blockhaul_io::{Completer, LentPayload, SendQueue, Stream};
use blockhaul_wire::reply;
use blockhaul_wire::transmission::Transmission;
use blockhaul_wire::{ReplyForm, RequestForm};

use crate::device::{RequestMessage, RequestPayload};
use crate::link::HandshakeLink;
use crate::reply::{ReadMemory, RequestFacts};
use crate::socket::{lost, silence};
use crate::traffic::Traffic;

/// State shared by submitters (any worker) and the connection's own tasks (one worker).
pub(crate) struct ClientSession {
    stream: Stream,
    traffic: Arc<Traffic>,
    state: Mutex<ClientSessionState>,
}

struct ClientSessionState {
    queue: SendQueue,
    transmission: Transmission<SessionRequest>,
    writer: Option<Waker>,
    /// The socket takes no more now.
    blocked: bool,
    /// Why nothing more can be sent.
    broken: Option<Error>,
    /// The server is shutting down: no more requests are sent, replies still arrive.
    refused: Option<Error>,
    closing: bool,
    /// Time of the last byte either way, or when the first request in flight was queued.
    active: Instant,
    /// Time of the last complete reply, or when the first request in flight was queued.
    replied: Instant,
    /// Bytes of complete reads and writes.
    moved: u64,
    /// Reads and writes in flight, and since when there has always been at least one.
    payloads: usize,
    payloads_since: Instant,
    /// A reply waits for memory.
    claiming: bool,
    /// Partial read replies, which already have memory.
    partial: usize,
    /// The read whose payload was being received when the connection was lost.
    receiving: Option<SessionRequest>,
}

struct SessionRequest {
    facts: RequestFacts,
    completer: Completer<Outcome>,
    /// The memory of a read.
    reading: Option<Box<ReadMemory>>,
    /// The payload of a write, whose pages the server reads until it replies.
    lent: Option<LentPayload>,
}

impl SessionRequest {
    /// Completes a request that has no reply, once its memory is back.
    fn fail(self, error: Error) {
        let SessionRequest { completer, reading, lent, .. } = self;
        drop((reading, lent));
        completer.complete(Err(error));
    }
}

/// Starts the tasks of a connection on this worker.
pub(crate) fn start(
    link: HandshakeLink,
    headers: RequestForm,
    replies: ReplyForm,
    patience: ServerTimeouts,
) -> Arc<ClientSession> {
    let HandshakeLink { stream, mut window, queue, traffic, .. } = link;
    window.expect_headers_of(match replies {
        ReplyForm::Simple => reply::SIMPLE_LEN,
        ReplyForm::Structured => reply::STRUCTURED_LEN + reply::DATA_PREFIX_LEN,
        ReplyForm::Extended => reply::EXTENDED_LEN + reply::DATA_PREFIX_LEN,
    });
    let session = Arc::new(ClientSession {
        stream,
        traffic,
        state: Mutex::new(ClientSessionState {
            queue,
            transmission: Transmission::new(headers, replies),
            writer: None,
            blocked: false,
            broken: None,
            refused: None,
            closing: false,
            active: blockhaul_io::now(),
            replied: blockhaul_io::now(),
            moved: 0,
            payloads: 0,
            payloads_since: blockhaul_io::now(),
            claiming: false,
            partial: 0,
            receiving: None,
        }),
    });
    drop(blockhaul_io::spawn(session.clone().write_requests()));
    drop(blockhaul_io::spawn(session.clone().read_replies(window)));
    if !patience.timeout.is_zero() || patience.min_rate > 0 {
        drop(blockhaul_io::spawn(watch(Arc::downgrade(&session), patience)));
    }
    session
}

impl ClientSession {
    fn lock(&self) -> MutexGuard<'_, ClientSessionState> {
        self.state.lock().expect("no panic under this lock")
    }

    /// Queues a request; it is sent together with others that are queued before the worker runs.
    pub(crate) fn submit(&self, message: RequestMessage, completer: Completer<Outcome>) {
        let mut state = self.lock();
        if let Some(error) = state.broken.clone().or_else(|| state.refused.clone()) {
            drop(state);
            completer.complete(Err(error));
            return;
        }
        let RequestMessage { header, contexts, payload, facts, reading } = message;
        let is_payload = facts.is_payload();
        let is_first = state.transmission.in_flight() == 0;
        let request = SessionRequest { facts, completer, reading, lent: None };
        let (cookie, encoded) = match state.transmission.begin(header, contexts, request) {
            Ok(begun) => begun,
            Err((request, error)) => {
                drop(state);
                request.completer.complete(Err(crate::link::refused(&error)));
                return;
            }
        };
        if is_first || (is_payload && state.payloads == 0) {
            let now = blockhaul_io::now();
            if is_first {
                (state.active, state.replied) = (now, now);
            }
            state.payloads_since = now;
        }
        state.payloads += usize::from(is_payload);
        self.traffic.sent(encoded.len() + payload.len());
        state.queue.head(&encoded);
        match payload {
            RequestPayload::None => {}
            RequestPayload::Data(data) => {
                // nbd: write.payload
                let lent = state.queue.lend(data);
                if let Some(request) = state.transmission.get_mut(cookie) {
                    request.lent = lent;
                }
            }
            RequestPayload::Bytes(bytes) => state.queue.head(&bytes),
        }
        let writer = if state.blocked { None } else { state.writer.take() };
        drop(state);
        if let Some(writer) = writer {
            writer.wake();
        }
    }

    // nbd: disconnect.only-as-allowed
    /// Sends the disconnect request after what is queued, as far as the socket takes it without
    /// waiting. The connection ends when everything in flight has been answered.
    pub(crate) fn close(&self) {
        self.say_goodbye(self.lock());
    }

    // nbd: disconnect.shutdown
    /// The server has replied that it is shutting down: starts no more requests, and disconnects
    /// when those in flight have been answered.
    fn leave(&self, error: &Error) {
        let mut state = self.lock();
        state.refused.get_or_insert_with(|| error.clone());
        self.say_goodbye(state);
    }

    fn say_goodbye(&self, mut state: MutexGuard<'_, ClientSessionState>) {
        if state.closing || state.broken.is_some() {
            return;
        }
        // nbd: disc.nothing-after
        state.closing = true;
        if let Ok(encoded) = state.transmission.disconnect() {
            self.traffic.sent(encoded.len());
            state.queue.head(&encoded);
        }
        // A failure means that the server has disconnected first.
        let _ = state.queue.send(&self.stream);
        self.end_if_done(&mut state);
        let writer = state.writer.take();
        drop(state);
        if let Some(writer) = writer {
            writer.wake();
        }
    }

    /// Ends the connection once the disconnect request is sent and no reply is outstanding: a
    /// server that does not close its side must not keep it open for ever.
    fn end_if_done(&self, state: &mut ClientSessionState) {
        if state.closing && state.transmission.in_flight() == 0 && state.queue.queued() == 0 {
            state.queue.close(&self.stream);
            self.stream.shutdown();
        }
    }

    /// Fails everything in flight and all later requests.
    fn break_off(&self, error: Error) {
        let mut state = self.lock();
        if state.broken.is_some() {
            return;
        }
        state.broken = Some(error.clone());
        // Over TLS, the server gets the alert. It could not read that after a partial record.
        if state.queue.queued() == 0 {
            state.queue.close(&self.stream);
        }
        state.queue.clear();
        let mut in_flight: Vec<SessionRequest> = state.transmission.drain().collect();
        let is_received =
            |request: &SessionRequest| request.reading.as_ref().is_some_and(|read| read.is_lent());
        // The task that receives the payload has the memory, and completes the request.
        if let Some(at) = in_flight.iter().position(is_received) {
            state.receiving = Some(in_flight.swap_remove(at));
        }
        let writer = state.writer.take();
        let quiet = state.closing && in_flight.is_empty();
        drop(state);
        if !quiet {
            log::debug!("connection lost with {} requests in flight: {error}", in_flight.len());
        }
        self.stream.shutdown();
        for request in in_flight {
            request.fail(error.clone());
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
                state.active = blockhaul_io::now();
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
}

/// Minimum number of checks of a session during its timeout, before it is dropped: a client that
/// was stopped meanwhile (SIGSTOP, a paused machine) first reads what has arrived.
const LOOKS: u32 = 4;

/// Interval of warnings about a server that sends bytes and completes no reply.
const WARN_EVERY: Duration = Duration::from_secs(60);
/// Time over which the rate is measured if there is no timeout.
const WINDOW: Duration = Duration::from_secs(60);

/// Time limits for a server.
pub(crate) struct ServerTimeouts {
    /// The name of the device, for messages.
    pub(crate) name: String,
    /// Time without a byte after which the connection is dropped; zero: none.
    pub(crate) timeout: Duration,
    /// Minimum rate of complete reads and writes in bytes per second; 0: no minimum.
    pub(crate) min_rate: u64,
}

/// Drops a connection when nothing moves although requests are in flight, or too slowly. Does not
/// keep the session alive.
async fn watch(session: Weak<ClientSession>, patience: ServerTimeouts) {
    let ServerTimeouts { name, timeout, min_rate } = patience;
    let window = if timeout.is_zero() { WINDOW } else { timeout };
    let mut before = None;
    let mut looks = 0;
    // Times of checks, and the bytes moved until then, oldest first.
    let mut marks: VecDeque<(Instant, u64)> = VecDeque::new();
    let mut warned: Option<Instant> = None;
    loop {
        blockhaul_io::sleep((window / LOOKS).max(Duration::from_millis(10))).await;
        let Some(session) = session.upgrade() else { return };
        let state = session.lock();
        if state.broken.is_some() {
            return;
        }
        let active = state.active;
        let silent = blockhaul_io::elapsed(state.active);
        let waiting = state.transmission.in_flight();
        let claiming = state.claiming;
        let unanswered = blockhaul_io::elapsed(state.replied);
        let moved = state.moved;
        let has_payloads = state.payloads > 0;
        let busy = has_payloads.then(|| blockhaul_io::elapsed(state.payloads_since));
        let busy = busy.unwrap_or_default();
        drop(state);
        looks = if before.replace(active) == Some(active) { looks + 1 } else { 1 };
        let now = blockhaul_io::now();
        marks.push_back((now, moved));
        // Keep the last mark that is at least a window old.
        while marks.get(1).is_some_and(|mark| now.duration_since(mark.0) >= window) {
            marks.pop_front();
        }
        if claiming {
            marks.clear();
            continue;
        }
        let requests = format!("{waiting} {}", if waiting == 1 { "request" } else { "requests" });
        if !timeout.is_zero() && waiting > 0 && silent >= timeout && looks >= LOOKS {
            return session.break_off(silence(timeout, &requests));
        }
        if let Some((since, then)) = marks.front()
            && now.duration_since(*since) >= window
            && busy >= now.duration_since(*since)
            && let Some(slow) = below(min_rate, moved - then, now.duration_since(*since))
        {
            let text = format!(
                "{slow} with {requests} in flight, less than the {min_rate} bytes/s of --min-rate"
            );
            return session.break_off(Error::new(Kind::TimedOut, text));
        }
        // A server silent for longer is left to the timeout.
        if waiting > 0
            && unanswered >= window
            && silent < window / 2
            && warned.is_none_or(|warned| now.duration_since(warned) >= WARN_EVERY)
        {
            warned = Some(now);
            log::warn!(
                "{name}: no complete reply for {:.0} s with {requests} in flight, although bytes \
                 are transferred ({moved} bytes so far); use --min-rate to drop such a connection",
                unanswered.as_secs_f64()
            );
        }
    }
}

/// Bytes and time, as a text, if they are less than the minimum rate.
fn below(min_rate: u64, bytes: u64, time: Duration) -> Option<String> {
    let time = time.as_secs_f64();
    let is_slow = (bytes as f64) < min_rate as f64 * time;
    is_slow.then(|| format!("{bytes} bytes in {time:.1} s"))
}
