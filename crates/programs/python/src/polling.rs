//! A connection that an event loop reads, on its own thread. A request that needs more than the server offers
//! (emulation), or that comes from elsewhere than this loop, lets a worker have the connection, after the
//! requests in flight.

use std::os::fd::{AsRawFd as _, RawFd};
use std::sync::{Mutex, MutexGuard, Weak};
use std::time::Duration;

use blockhaul_block::{ContextSet, Error, Kind, OpKind, Request, RequestFlags, Result};
use blockhaul_client::blocking::{ConnectionHandover, LOOK};
use blockhaul_client::polled::{CompletedRequests, PolledConnection, PolledResult, PolledSocket};
use blockhaul_io::Data;
use pyo3::prelude::*;

use crate::completions::{Completions, Promise};
use crate::request::{PythonReply, PythonRequest, ReadPart, named};
use crate::workers::Generation;

/// What waits until a worker has the connection.
pub(crate) type Work = Box<dyn FnOnce() + Send>;

/// A connection for an event loop.
pub(crate) struct LoopConnection {
    state: Mutex<LoopState>,
    watched: PolledSocket,
}

struct LoopState {
    /// Nothing after a worker has got it.
    polled: Option<PolledConnection<LoopTicket>>,
    /// It is on its way to a worker, with what waits for that.
    leaving: Option<Vec<Work>>,
}

/// Who waits for a request.
struct LoopTicket {
    promise: Promise,
    /// The contexts that it asks for.
    contexts: ContextSet,
}

/// What owns a connection that a loop reads, or has read.
pub(crate) trait LoopHandle: Send + Sync {
    /// The connection.
    fn polling(&self) -> Option<&LoopConnection>;
}

/// What became of a request.
pub(crate) enum SubmitResult {
    /// It is on its way.
    Sent,
    /// It is to be sent by [`LoopConnection::send`].
    Queued,
    /// A worker must carry it out.
    Refused(PythonRequest, Promise),
}

impl LoopConnection {
    /// A connection on which nothing is in flight.
    ///
    /// # Errors
    /// If there are too many descriptors.
    pub(crate) fn new(retired: ConnectionHandover) -> Result<LoopConnection> {
        let polled = retired.polled();
        let watched = polled.watched();
        let watched = watched.map_err(|error| Error::system("cannot use the socket", error))?;
        let state = LoopState { polled: Some(polled), leaving: None };
        Ok(LoopConnection { state: Mutex::new(state), watched })
    }

    fn lock(&self) -> MutexGuard<'_, LoopState> {
        self.state.lock().expect("no panic under this lock")
    }

    /// Makes a request. With nothing else in flight it is sent at once, otherwise with those that follow.
    pub(crate) fn submit(&self, asked: PythonRequest, promise: Promise) -> SubmitResult {
        let mut state = self.lock();
        let LoopState { polled: Some(polled), leaving: None } = &mut *state else {
            return SubmitResult::Refused(asked, promise);
        };
        let read = |at, len| (OpKind::Read, at, len, RequestFlags::empty());
        let (kind, at, len, flags) = match &asked {
            // Nothing to do.
            PythonRequest::Read { len: 0, .. } => {
                promise.complete(Ok(PythonReply::Read(Vec::new())));
                return SubmitResult::Sent;
            }
            PythonRequest::Write { parts, .. } if parts.is_empty() => {
                promise.complete(Ok(PythonReply::Done));
                return SubmitResult::Sent;
            }
            PythonRequest::Read { at, len } => read(*at, *len),
            PythonRequest::Write { at, parts, flags } if parts.len() == 1 => {
                (OpKind::Write, *at, parts[0].len() as u64, *flags)
            }
            // It has several parts.
            PythonRequest::Write { .. } => return SubmitResult::Refused(asked, promise),
            PythonRequest::Zero { at, len, flags } => (OpKind::Zero, *at, *len, *flags),
            PythonRequest::Trim { at, len, flags } => (OpKind::Trim, *at, *len, *flags),
            PythonRequest::Flush => (OpKind::Flush, 0, 0, RequestFlags::empty()),
            PythonRequest::Cache { at, len } => (OpKind::Cache, *at, *len, RequestFlags::empty()),
            PythonRequest::Extents { at, len, flags, .. } => (OpKind::Extents, *at, *len, *flags),
        };
        if !polled.takes(kind, at, len, flags) {
            return SubmitResult::Refused(asked, promise);
        }
        let at_once = polled.is_idle();
        let contexts = match &asked {
            PythonRequest::Extents { contexts, .. } => *contexts,
            _ => ContextSet::empty(),
        };
        let ticket = LoopTicket { promise, contexts };
        let queued = match asked {
            PythonRequest::Read { at, len } => polled.read(at, len, ticket),
            other => match request(other) {
                Some(request) => polled.request(request, ticket),
                None => Err((ticket, Error::misfit())),
            },
        };
        if let Err((ticket, error)) = queued {
            ticket.promise.complete(Err(error));
            return SubmitResult::Sent;
        }
        if !at_once {
            return SubmitResult::Queued;
        }
        let mut ended = Vec::new();
        polled.send(&mut ended);
        let sent = if polled.has_unsent() { SubmitResult::Queued } else { SubmitResult::Sent };
        settle(polled, ended);
        sent
    }

    /// Sends what was queued; returns whether some is left.
    fn send(&self) -> bool {
        let mut state = self.lock();
        let Some(polled) = &mut state.polled else { return false };
        let mut ended = Vec::new();
        polled.send(&mut ended);
        let unsent = polled.has_unsent();
        settle(polled, ended);
        unsent
    }

    /// Receives what is there; false: the loop need not watch the socket any more.
    fn collect(&self) -> bool {
        let mut state = self.lock();
        let Some(polled) = &mut state.polled else { return false };
        let mut ended = Vec::new();
        polled.collect(&mut ended);
        polled.send(&mut ended);
        settle(polled, ended);
        polled.broken().is_none()
    }

    /// How long the server may still send nothing; `None`: nothing is in flight, or without limit.
    fn patience(&self) -> Option<Duration> {
        let mut state = self.lock();
        let polled = state.polled.as_mut()?;
        let mut ended = Vec::new();
        let left = polled.patience(&mut ended);
        settle(polled, ended);
        left
    }

    /// Waits until nothing is in flight, or the connection has ended.
    pub(crate) fn drain(&self) {
        loop {
            self.collect();
            let left = self.patience();
            let unsent = match &self.lock().polled {
                Some(polled) if !polled.is_idle() => polled.has_unsent(),
                _ => return,
            };
            let time = left.map_or(LOOK, |left| left.min(LOOK));
            if self.watched.wait(unsent, time).is_err() {
                std::thread::sleep(time);
            }
        }
    }

    /// Does something when a worker has the connection. True: the caller must call
    /// [`LoopConnection::leave`] then, on a thread that may wait.
    pub(crate) fn when_given(&self, work: Work) -> bool {
        let mut state = self.lock();
        let LoopState { polled, leaving } = &mut *state;
        match leaving {
            Some(waiting) => {
                waiting.push(work);
                false
            }
            None if polled.is_some() => {
                *leaving = Some(vec![work]);
                true
            }
            None => {
                drop(state);
                work();
                false
            }
        }
    }

    /// Waits until nothing is in flight, lets `give` have the connection, and does what waits for that.
    pub(crate) fn leave(&self, give: impl FnOnce(Result<ConnectionHandover>)) {
        self.drain();
        let mut state = self.lock();
        let polled = state.polled.take();
        drop(state);
        let retired = match polled {
            Some(mut polled) => polled.retire().ok_or_else(|| {
                let ended = || Error::new(Kind::Disconnected, "the connection has ended");
                polled.broken().cloned().unwrap_or_else(ended)
            }),
            None => Err(Error::misfit()),
        };
        give(retired);
        state = self.lock();
        let waiting = state.leaving.take();
        drop(state);
        for work in waiting.into_iter().flatten() {
            work();
        }
    }
}

fn request(asked: PythonRequest) -> Option<Request> {
    match asked {
        PythonRequest::Write { at, mut parts, flags } => {
            let part: Data = parts.pop()?;
            Some(Request::write(at, part).with(flags))
        }
        other => other.without_payload(),
    }
}

/// Gives results to those who wait.
fn settle(polled: &PolledConnection<LoopTicket>, ended: CompletedRequests<LoopTicket>) {
    for (LoopTicket { promise, contexts }, outcome) in ended {
        promise.complete(outcome.map(|arrived| match arrived {
            PolledResult::Done => PythonReply::Done,
            PolledResult::Bytes(bytes) => PythonReply::Read(vec![ReadPart::Bytes(bytes)]),
            PolledResult::Extents(lists) => {
                PythonReply::Extents(named(&polled.facts(), contexts, &lists))
            }
        }));
    }
}

/// What a loop calls when the socket of a connection can be used. It does not keep the connection open.
#[pyclass(frozen, module = "blockhaul._blockhaul")]
pub(crate) struct Watch {
    watched: PolledSocket,
    inner: Weak<dyn LoopHandle>,
    generation: Generation,
}

impl Watch {
    /// For the connection of a handle; `None`: no loop reads it.
    pub(crate) fn of(
        polling: &LoopConnection,
        inner: Weak<dyn LoopHandle>,
    ) -> PyResult<Option<Watch>> {
        let watched = match &polling.lock().polled {
            Some(polled) => polled.watched()?,
            None => return Ok(None),
        };
        Ok(Some(Watch { watched, inner, generation: Generation::current() }))
    }

    /// Calls `with` without the interpreter's lock, and delivers what is there then.
    fn run<R: Send>(
        &self,
        py: Python<'_>,
        completions: &Completions,
        with: impl FnOnce(&LoopConnection) -> R + Send,
    ) -> PyResult<Option<R>> {
        if !self.generation.is_current() {
            return Ok(None);
        }
        let Some(inner) = self.inner.upgrade() else { return Ok(None) };
        let Some(polling) = inner.polling() else { return Ok(None) };
        completions.delivering();
        let result = py.detach(|| with(polling));
        completions.deliver_now(py)?;
        Ok(Some(result))
    }
}

#[pymethods]
impl Watch {
    /// A descriptor of the socket.
    fn fileno(&self) -> RawFd {
        self.watched.as_raw_fd()
    }

    /// Receives what is there, and gives results to their futures. False: the loop need not watch it any more.
    fn collect(&self, py: Python<'_>, completions: &Completions) -> PyResult<bool> {
        self.run(py, completions, LoopConnection::collect).map(|going_on| going_on.unwrap_or(false))
    }

    /// Sends requests; returns whether some are left, until the socket can be written again.
    fn send(&self, py: Python<'_>, completions: &Completions) -> PyResult<bool> {
        self.run(py, completions, LoopConnection::send).map(|unsent| unsent.unwrap_or(false))
    }

    /// Seconds that the server may still send nothing; ``None`` if nothing is in flight, or without limit.
    fn patience(&self, py: Python<'_>, completions: &Completions) -> PyResult<Option<f64>> {
        let left = self.run(py, completions, LoopConnection::patience)?;
        Ok(left.flatten().map(|left| left.as_secs_f64()))
    }
}
