//! A connection, and what the threads that use it share.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use blockhaul_block::{Device, Error, Facts, Result};
use blockhaul_io::Stream;
use blockhaul_wire::status::StatusPayload;
use blockhaul_wire::transmission::{ReplyError, Transmission};

use super::receiver::{Receiver, TimedSocket};
use super::stop::{CallStop, ContinueCallback};
use crate::device::{self, ExportProperties};
use crate::link::HandshakeLink;
use crate::polled::PolledConnection;
use crate::reply::RequestFacts;
use crate::traffic::Traffic;

/// A connection in transmission, for threads that wait.
pub struct BlockingConnection {
    pub(super) export: Arc<ExportProperties>,
    pub(super) traffic: Arc<Traffic>,
    pub(super) socket: TimedSocket,
    /// The rest of a request whose sender went away: it goes before all others.
    pub(super) sending: Mutex<Vec<u8>>,
    pub(super) state: Mutex<BlockingConnectionState>,
}

pub(super) struct BlockingConnectionState {
    pub(super) transmission: Transmission<BlockingRequest>,
    /// Complete replies whose threads have not taken them yet.
    pub(super) finished: Vec<CompleteReply>,
    /// Nothing while a thread receives.
    pub(super) receiver: Option<Receiver>,
    /// Threads that wait until somebody else has received something.
    pub(super) waiting: VecDeque<Arc<Condvar>>,
    pub(super) broken: Option<Error>,
    /// The server is shutting down.
    pub(super) refused: Option<Error>,
    pub(super) retired: bool,
}

/// A request in flight.
pub(super) struct BlockingRequest {
    pub(super) facts: RequestFacts,
    pub(super) owner: Arc<Condvar>,
    /// The bytes of a read, if another thread has received them.
    pub(super) stored: Option<Vec<u8>>,
    /// Nobody waits for the reply any more.
    pub(super) abandoned: bool,
}

/// A request with its complete reply.
pub(super) struct CompleteReply {
    pub(super) cookie: u64,
    pub(super) slot: BlockingRequest,
    pub(super) result: Result<Vec<StatusPayload>, ReplyError>,
}

/// A request of the thread that waits, and where its bytes go.
pub(super) struct OwnRequest<'a> {
    pub(super) cookie: u64,
    pub(super) into: &'a mut [u8],
}

/// What remains of a [`BlockingConnection`]: a worker can go on with the connection.
pub struct ConnectionHandover {
    socket: OwnedFd,
    export: Arc<ExportProperties>,
    traffic: Arc<Traffic>,
    timeout: Duration,
}

impl BlockingConnection {
    /// A connection whose handshake is over. `timeout`: time without a byte, with requests in flight, after
    /// which it is dropped; zero: none.
    ///
    /// # Errors
    /// If the socket cannot be used, or the server has sent more than the handshake.
    pub(crate) fn new(
        link: &HandshakeLink,
        export: Arc<ExportProperties>,
        timeout: Duration,
    ) -> Result<BlockingConnection> {
        export.check()?;
        if !link.window.bytes().is_empty() {
            return Err(crate::reply::violation("bytes after the handshake"));
        }
        let socket = TimedSocket::new(&link.stream, timeout);
        let socket = socket.map_err(|error| Error::system("cannot use the socket", error))?;
        let state = BlockingConnectionState {
            transmission: Transmission::new(export.headers, export.replies),
            finished: Vec::new(),
            receiver: Some(Receiver::new()),
            waiting: VecDeque::new(),
            broken: None,
            refused: None,
            retired: false,
        };
        let traffic = link.traffic.clone();
        Ok(BlockingConnection {
            export,
            traffic,
            socket,
            sending: Mutex::default(),
            state: Mutex::new(state),
        })
    }

    /// The facts of the export. Requests must comply with them.
    pub fn facts(&self) -> Arc<Facts> {
        self.export.facts.clone()
    }

    /// Takes the connection away, after the requests in flight: later ones fail with [`CallStop::Retired`].
    ///
    /// # Errors
    /// [`CallStop::Retired`] if somebody else has done so.
    pub fn retire(&self, go_on: ContinueCallback<'_>) -> Result<ConnectionHandover, CallStop> {
        let before = std::mem::replace(&mut self.lock().retired, true);
        if before {
            return Err(CallStop::Retired);
        }
        let retired = self.drained(go_on).and_then(|()| {
            let socket = self.socket.released();
            Ok(socket.map_err(|error| Error::system("cannot use the socket", error))?)
        });
        match retired {
            Ok(socket) => {
                let export = self.export.clone();
                let traffic = self.traffic.clone();
                let timeout = self.socket.timeout;
                Ok(ConnectionHandover { socket, export, traffic, timeout })
            }
            Err(stop) => {
                self.lock().retired = false;
                Err(stop)
            }
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, BlockingConnectionState> {
        self.state.lock().expect("no panic under this lock")
    }

    /// Fails everything in flight and all later requests.
    pub(super) fn break_off(&self, error: &Error) {
        let mut state = self.lock();
        if state.broken.is_some() {
            return;
        }
        state.broken = Some(error.clone());
        for waiting in state.waiting.drain(..) {
            waiting.notify_all();
        }
        drop(state);
        self.socket.shutdown();
    }
}

impl Drop for BlockingConnection {
    fn drop(&mut self) {
        let state = self.lock();
        let unusable = state.retired || state.broken.is_some();
        drop(state);
        if !unusable {
            self.say_goodbye();
        }
    }
}

impl ConnectionHandover {
    /// A connection on which nothing is in flight; its socket does not wait.
    pub(crate) fn new(
        socket: OwnedFd,
        export: Arc<ExportProperties>,
        traffic: Arc<Traffic>,
        timeout: Duration,
    ) -> ConnectionHandover {
        ConnectionHandover { socket, export, traffic, timeout }
    }

    /// The connection for an event loop.
    pub fn polled<T>(self) -> PolledConnection<T> {
        PolledConnection::new(self.socket, self.export, self.traffic, self.timeout)
    }

    /// The connection as a device; its tasks run on this worker.
    ///
    /// # Errors
    /// If the socket cannot be used.
    pub fn device(self) -> Result<Arc<dyn Device>> {
        let stream = Stream::new(self.socket);
        let stream = stream.map_err(|error| Error::system("cannot use the socket", error))?;
        Ok(device::over(HandshakeLink::going_on(stream, self.traffic), self.export, self.timeout))
    }
}
