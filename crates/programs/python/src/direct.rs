//! Requests that a thread of Python carries out itself, over a connection that no worker has. A request
//! that needs more than the server offers (emulation) gives the connection to a worker, and it stays there. A
//! loop of asyncio may get it instead (`polling`).

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, mpsc};

use blockhaul_block::{
    Device, Error, Facts, Kind, OpKind, PendingRequest, Reply, Request, RequestFlags, Result,
};
use blockhaul_client::blocking::{
    BlockingConnection, CallStop, ConnectionHandover, ContinueCallback,
};
use blockhaul_io::{Data, Pool, WorkerHandle};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::error::{fail, of_device};
use crate::memory::{ObjectMemory, room};
use crate::polling::LoopConnection;
use crate::request::{PythonReply, PythonRequest, named};
use crate::wait;
use crate::workers::libc_numbers::IO;

/// Bytes of a read into a buffer that are received before they are copied there.
const STEP: usize = 8 << 20;

/// A connection for threads that wait, until a worker gets it.
pub(crate) struct DirectConnection {
    blocking: Mutex<Option<Arc<BlockingConnection>>>,
    /// Held while a worker gets it. Never taken with the interpreter's lock.
    giving: Mutex<()>,
    late: Arc<LateDevice>,
    /// What a loop got.
    polling: OnceLock<LoopConnection>,
}

/// The device of a connection once a worker has it.
pub(crate) struct LateDevice {
    facts: Arc<Facts>,
    device: OnceLock<Arc<dyn Device>>,
    /// Why there is no device.
    failed: OnceLock<Error>,
}

impl Device for LateDevice {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        match self.device.get() {
            Some(device) => device.submit(request),
            None => {
                let none = || Error::new(Kind::Io, "no worker has the connection");
                self.failed.get().cloned().unwrap_or_else(none).into()
            }
        }
    }
}

impl DirectConnection {
    /// A connection in transmission.
    pub(crate) fn new(blocking: BlockingConnection) -> DirectConnection {
        let facts = blocking.facts();
        let late = Arc::new(LateDevice { facts, device: OnceLock::new(), failed: OnceLock::new() });
        DirectConnection {
            blocking: Mutex::new(Some(Arc::new(blocking))),
            giving: Mutex::new(()),
            late,
            polling: OnceLock::new(),
        }
    }

    /// Its device, for workers.
    pub(crate) fn device(&self) -> Arc<dyn Device> {
        self.late.clone()
    }

    fn lock(&self) -> MutexGuard<'_, Option<Arc<BlockingConnection>>> {
        self.blocking.lock().expect("no panic under this lock")
    }

    /// The connection, if it takes this request as it is.
    fn taking(
        &self,
        kind: OpKind,
        (at, len): (u64, u64),
        flags: RequestFlags,
    ) -> Option<Arc<BlockingConnection>> {
        self.lock().as_ref().filter(|blocking| blocking.takes(kind, at, len, flags)).cloned()
    }

    /// Reads; `None`: a worker must do it.
    pub(crate) fn pread<'py>(
        &self,
        py: Python<'py>,
        count: u64,
        offset: u64,
    ) -> PyResult<Option<Bound<'py, PyBytes>>> {
        if count == 0 {
            return Ok(Some(PyBytes::new(py, b"")));
        }
        let Some(blocking) = self.taking(OpKind::Read, (offset, count), RequestFlags::empty())
        else {
            return Ok(None);
        };
        let Some(reading) = run(py, |go_on| blocking.start_read(offset, count, go_on))? else {
            return Ok(None);
        };
        let mut received = None;
        // The memory is prepared while the server works.
        let bytes = PyBytes::new_with(py, usize::try_from(count)?, |into| {
            received = run(py, |go_on| reading.finish(into, go_on))?;
            Ok(())
        })?;
        Ok(received.map(|()| bytes))
    }

    /// Fills a buffer; `None`: a worker must do it.
    pub(crate) fn pread_into(
        &self,
        py: Python<'_>,
        pool: &Pool,
        buffer: &ObjectMemory,
        offset: u64,
    ) -> PyResult<Option<()>> {
        let len = buffer.len();
        if len == 0 {
            return Ok(Some(()));
        }
        let range = (offset, len as u64);
        let Some(blocking) = self.taking(OpKind::Read, range, RequestFlags::empty()) else {
            return Ok(None);
        };
        for start in (0..len).step_by(STEP) {
            let len = STEP.min(len - start);
            let mut buf = room(pool, len).into_buf();
            // Inside the range that was checked.
            let at = offset + start as u64;
            let received = run(py, |go_on| {
                let reading = blocking.start_read(at, len as u64, &mut *go_on)?;
                reading.finish(&mut buf, go_on)
            })?;
            if received.is_none() {
                return Ok(None);
            }
            buffer.fill_at(py, start, &buf)?;
        }
        Ok(Some(()))
    }

    /// Writes; `None`: a worker must do it.
    pub(crate) fn pwrite(
        &self,
        py: Python<'_>,
        data: &[u8],
        offset: u64,
        flags: RequestFlags,
    ) -> PyResult<Option<()>> {
        if data.is_empty() {
            return Ok(Some(()));
        }
        let range = (offset, data.len() as u64);
        let Some(blocking) = self.taking(OpKind::Write, range, flags) else { return Ok(None) };
        run(py, |go_on| blocking.write(offset, data, flags, go_on))
    }

    /// Carries out a request that is no read; `None`: a worker must do it.
    pub(crate) fn ask(
        &self,
        py: Python<'_>,
        asked: &PythonRequest,
    ) -> PyResult<Option<PythonReply>> {
        if let PythonRequest::Write { at, parts, flags } = asked {
            return self.write_parts(py, *at, parts, *flags);
        }
        let Some(request) = asked.without_payload() else { return Ok(None) };
        let kind = request.kind();
        let range = (request.at, request.len);
        let flags = request.flags;
        let Some(blocking) = self.taking(kind, range, flags) else { return Ok(None) };
        let Some(reply) = run(py, |go_on| blocking.request(request, go_on))? else {
            return Ok(None);
        };
        match (reply, asked) {
            (Reply::Done, _) => Ok(Some(PythonReply::Done)),
            (Reply::Extents(lists), PythonRequest::Extents { contexts, .. }) => {
                Ok(Some(PythonReply::Extents(named(&self.late.facts, *contexts, &lists))))
            }
            _ => Err(of_device(&Error::misfit())),
        }
    }

    fn write_parts(
        &self,
        py: Python<'_>,
        mut at: u64,
        parts: &[Data],
        flags: RequestFlags,
    ) -> PyResult<Option<PythonReply>> {
        for part in parts {
            if self.pwrite(py, part.bytes(), at, flags)?.is_none() {
                return Ok(None);
            }
            at = at.saturating_add(part.len() as u64);
        }
        Ok(Some(PythonReply::Done))
    }

    /// Gives the connection to a worker, after the requests in flight. Does nothing if one has it.
    pub(crate) fn give_to_worker(&self, py: Python<'_>, remote: &WorkerHandle) -> PyResult<()> {
        // After a failure, its device says why.
        if self.late.device.get().is_some() || self.late.failed.get().is_some() {
            return Ok(());
        }
        let (given, raised) = py.detach(|| {
            let _giving = self.giving.lock().expect("no panic under this lock");
            let blocking = self.lock().clone();
            with_signals(|go_on| match blocking {
                Some(blocking) => self.give(&blocking, remote, go_on),
                // Another thread has done so meanwhile.
                None => Ok(()),
            })
        });
        settle(given, raised).map(drop)
    }

    fn give(
        &self,
        blocking: &BlockingConnection,
        remote: &WorkerHandle,
        go_on: ContinueCallback<'_>,
    ) -> Result<(), CallStop> {
        let retired = blocking.retire(go_on)?;
        self.give_retired(retired, remote)?;
        *self.lock() = None;
        Ok(())
    }

    fn give_retired(&self, retired: ConnectionHandover, remote: &WorkerHandle) -> Result<()> {
        let (sender, receiver) = mpsc::channel();
        wait::start(remote, sender, move || async move { retired.device() });
        let lost = |_| Error::new(Kind::Io, "the worker has ended");
        let device = receiver.recv().map_err(lost)??;
        // Nobody else sets it: `giving` is locked, or it was taken from a loop.
        let _ = self.late.device.set(device);
        Ok(())
    }

    /// Gives the connection to a loop, if no worker has it.
    pub(crate) fn give_to_loop(&self, py: Python<'_>) -> PyResult<Option<&LoopConnection>> {
        let (given, raised) = py.detach(|| {
            let _giving = self.giving.lock().expect("no panic under this lock");
            let Some(blocking) = self.lock().clone() else { return (Ok(()), None) };
            with_signals(|go_on| {
                let polling = LoopConnection::new(blocking.retire(go_on)?)?;
                // Nobody else sets it: `giving` is locked.
                let _ = self.polling.set(polling);
                *self.lock() = None;
                Ok(())
            })
        });
        settle(given, raised)?;
        Ok(self.polling.get())
    }

    /// What a loop has, or had.
    pub(crate) fn polling(&self) -> Option<&LoopConnection> {
        self.polling.get()
    }

    /// Gives the connection of a loop to a worker, after the requests in flight.
    pub(crate) fn leave_loop(&self, polling: &LoopConnection, remote: &WorkerHandle) {
        polling.leave(|retired| {
            if let Err(error) = retired.and_then(|retired| self.give_retired(retired, remote)) {
                let _ = self.late.failed.set(error);
            }
        });
    }
}

/// Runs a call without the interpreter's lock; `None`: the connection was given to a worker meanwhile.
fn run<T: Send>(
    py: Python<'_>,
    call: impl FnOnce(ContinueCallback<'_>) -> Result<T, CallStop> + Send,
) -> PyResult<Option<T>> {
    let (result, raised) = py.detach(|| with_signals(call));
    settle(result, raised)
}

/// Runs a call that ends when the handler of a signal raises; returns that exception, too.
fn with_signals<T>(
    call: impl FnOnce(ContinueCallback<'_>) -> Result<T, CallStop>,
) -> (Result<T, CallStop>, Option<PyErr>) {
    let mut raised = None;
    let result = call(&mut || {
        if raised.is_none() {
            raised = Python::attach(|py| py.check_signals()).err();
        }
        raised.is_none()
    });
    (result, raised)
}

fn settle<T>(result: Result<T, CallStop>, raised: Option<PyErr>) -> PyResult<Option<T>> {
    if let Some(raised) = raised {
        return Err(raised);
    }
    match result {
        Ok(value) => Ok(Some(value)),
        Err(CallStop::Retired) => Ok(None),
        Err(CallStop::Failed(error)) => Err(of_device(&error)),
        Err(CallStop::Interrupted) => Err(fail(IO, "the wait was interrupted")),
    }
}
