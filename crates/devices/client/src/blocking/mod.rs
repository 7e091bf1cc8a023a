//! A connection whose requests are carried out by the threads that make them, without a worker in between:
//! a thread sends its request, and receives its reply into its own memory.
//!
//! Any number of threads may use a connection. One of those that wait receives; it takes in replies to the
//! others, too, and wakes them. A thread that cannot send receives meanwhile, so that a server that does
//! not read before it has sent its replies goes on.
//!
//! - `receiver`: bytes of the socket. `replies`: what they mean. `sending`: requests.
//! - `calls`: what threads ask for.

mod calls;
mod receiver;
mod replies;
mod sending;

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use blockhaul_block::{Device, Error, Facts, Kind, Result};
use blockhaul_io::Stream;
use slab::Slab;

pub use self::calls::Reading;
use self::receiver::{Receiver, Socket};
use crate::device::{self, Export};
use crate::link::Link;
use crate::reply::Expected;

/// Interval at which a waiting thread asks whether to go on.
pub const LOOK: Duration = Duration::from_millis(100);

/// Called by a thread that waits, each [`LOOK`] and after signals; false: it does not want to wait any more.
pub type GoOn<'a> = &'a mut dyn FnMut() -> bool;

/// Why a call has no result.
#[derive(Debug)]
pub enum Stop {
    /// It has failed.
    Failed(Error),
    /// The thread did not want to wait any more. A change may still happen.
    Interrupted,
    /// The connection was given away ([`Blocking::retire`]); the request was not sent.
    Retired,
}

impl From<Error> for Stop {
    fn from(error: Error) -> Stop {
        Stop::Failed(error)
    }
}

/// A connection in transmission, for threads that wait.
pub struct Blocking {
    export: Arc<Export>,
    socket: Socket,
    /// The rest of a request whose sender went away: it goes before all others.
    sending: Mutex<Vec<u8>>,
    state: Mutex<State>,
}

struct State {
    /// Requests by the lower half of their cookies.
    in_flight: Slab<Slot>,
    /// Makes cookies of reused slots differ.
    generation: u32,
    /// Nothing while a thread receives.
    receiver: Option<Receiver>,
    /// Threads that wait until somebody else has received something.
    waiting: VecDeque<Arc<Condvar>>,
    broken: Option<Error>,
    /// The server is shutting down.
    refused: Option<Error>,
    retired: bool,
}

/// A request in flight.
struct Slot {
    cookie: u64,
    owner: Arc<Condvar>,
    /// `None` while a message of its reply is taken in.
    part: Option<Part>,
    done: bool,
    /// Nobody waits for the reply any more.
    abandoned: bool,
}

/// A reply so far.
struct Part {
    expected: Expected,
    read: Option<Read>,
}

/// What has arrived of a read.
#[derive(Default)]
struct Read {
    /// Ranges that have arrived, relative to the request, in order of arrival.
    covered: Vec<(u64, u64)>,
    /// The bytes, if another thread has received them.
    stored: Option<Vec<u8>>,
}

/// A request of the thread that waits, and where its bytes go.
struct Mine<'a> {
    cookie: u64,
    into: &'a mut [u8],
}

/// What remains of a [`Blocking`]: a worker can go on with the connection.
pub struct Retired {
    socket: OwnedFd,
    export: Arc<Export>,
    timeout: Duration,
}

impl Blocking {
    /// A connection whose handshake is over. `timeout`: time without a byte, with requests in flight, after
    /// which it is dropped; zero: none.
    ///
    /// # Errors
    /// If the socket cannot be used, or the server has sent more than the handshake.
    pub(crate) fn new(link: &Link, export: Arc<Export>, timeout: Duration) -> Result<Blocking> {
        export.check()?;
        if !link.window.bytes().is_empty() {
            return Err(crate::reply::violation("bytes after the handshake"));
        }
        let socket = Socket::new(&link.stream, timeout);
        let socket = socket.map_err(|error| Error::system("cannot use the socket", error))?;
        let state = State {
            in_flight: Slab::new(),
            generation: 0,
            receiver: Some(Receiver::new()),
            waiting: VecDeque::new(),
            broken: None,
            refused: None,
            retired: false,
        };
        Ok(Blocking { export, socket, sending: Mutex::default(), state: Mutex::new(state) })
    }

    /// The facts of the export. Requests must comply with them.
    pub fn facts(&self) -> Arc<Facts> {
        self.export.facts.clone()
    }

    /// Takes the connection away, after the requests in flight: later ones fail with [`Stop::Retired`].
    ///
    /// # Errors
    /// [`Stop::Retired`] if somebody else has done so.
    pub fn retire(&self, go_on: GoOn<'_>) -> Result<Retired, Stop> {
        let before = std::mem::replace(&mut self.lock().retired, true);
        if before {
            return Err(Stop::Retired);
        }
        let retired = self.drained(go_on).and_then(|()| {
            let socket = self.socket.released();
            Ok(socket.map_err(|error| Error::system("cannot use the socket", error))?)
        });
        match retired {
            Ok(socket) => {
                let export = self.export.clone();
                let timeout = self.socket.timeout;
                Ok(Retired { socket, export, timeout })
            }
            Err(stop) => {
                self.lock().retired = false;
                Err(stop)
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic under this lock")
    }

    /// Fails everything in flight and all later requests.
    fn break_off(&self, error: &Error) {
        let mut state = self.lock();
        if state.broken.is_some() {
            return;
        }
        state.broken = Some(error.clone());
        for owner in state.in_flight.iter().map(|(_, slot)| slot.owner.clone()) {
            owner.notify_all();
        }
        for waiting in state.waiting.drain(..) {
            waiting.notify_all();
        }
        drop(state);
        self.socket.shutdown();
    }
}

impl Drop for Blocking {
    fn drop(&mut self) {
        let state = self.lock();
        let unusable = state.retired || state.broken.is_some();
        drop(state);
        if !unusable {
            self.say_goodbye();
        }
    }
}

impl Retired {
    /// The connection as a device; its tasks run on this worker.
    ///
    /// # Errors
    /// If the socket cannot be used.
    pub fn device(self) -> Result<Arc<dyn Device>> {
        let stream = Stream::new(self.socket);
        let stream = stream.map_err(|error| Error::system("cannot use the socket", error))?;
        Ok(device::over(Link::new(stream), self.export, self.timeout))
    }
}

/// The server has closed the connection, or it was lost.
fn lost(what: &'static str, error: std::io::Error) -> Error {
    Error::new(Kind::Disconnected, what).because(error)
}
