//! Results for the futures of an asyncio loop. Workers queue them and make a descriptor readable; the loop
//! then takes all of them at once.

use std::collections::HashMap;
use std::io::{Read as _, Write as _};
use std::os::fd::{AsRawFd as _, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::{fail, of_device};
use crate::memory::{ObjectMemory, bytes_of};
use crate::request::PythonReply;
use crate::workers::Generation;
use crate::workers::libc_numbers::IO;

/// The result of a request; `None`: a worker has lost it.
type Outcome = Option<blockhaul_block::Result<PythonReply>>;

/// Futures that wait, and results for them. For one event loop.
#[pyclass(frozen, module = "blockhaul._blockhaul")]
pub(crate) struct Completions {
    queue: Arc<ResultQueue>,
    readable: UnixStream,
    waiting: Mutex<WaitingFutures>,
    generation: Generation,
}

#[derive(Default)]
struct WaitingFutures {
    next: u64,
    futures: HashMap<u64, Future>,
}

/// A future, and the buffer that its request fills.
struct Future {
    future: Py<PyAny>,
    buffer: Option<ObjectMemory>,
}

/// What workers reach: nothing of Python.
struct ResultQueue {
    done: Mutex<Vec<(u64, Outcome)>>,
    /// The descriptor is readable, or about to be.
    told: AtomicBool,
    wake: UnixStream,
}

/// Delivers one result.
pub(crate) struct Promise {
    queue: Arc<ResultQueue>,
    number: u64,
    outcome: Outcome,
}

impl Promise {
    /// The request has ended.
    pub(crate) fn complete(mut self, outcome: blockhaul_block::Result<PythonReply>) {
        self.outcome = Some(outcome);
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        let done = (self.number, self.outcome.take());
        self.queue.done.lock().expect("no panic under this lock").push(done);
        if !self.queue.told.swap(true, Ordering::SeqCst) {
            // Fails only if the loop is gone.
            let _ = (&self.queue.wake).write(&[0]);
        }
    }
}

impl Completions {
    /// Registers a future, and the buffer that its request fills.
    pub(crate) fn promise(
        &self,
        future: &Bound<'_, PyAny>,
        buffer: Option<ObjectMemory>,
    ) -> PyResult<Promise> {
        self.generation.check()?;
        let mut waiting = self.waiting.lock().expect("no panic under this lock");
        let number = waiting.next;
        waiting.next += 1;
        waiting.futures.insert(number, Future { future: future.clone().unbind(), buffer });
        Ok(Promise { queue: self.queue.clone(), number, outcome: None })
    }
}

#[pymethods]
impl Completions {
    #[new]
    fn new() -> PyResult<Completions> {
        let (readable, wake) = UnixStream::pair()?;
        readable.set_nonblocking(true)?;
        wake.set_nonblocking(true)?;
        let queue = ResultQueue { done: Mutex::default(), told: AtomicBool::new(false), wake };
        Ok(Completions {
            queue: Arc::new(queue),
            readable,
            waiting: Mutex::default(),
            generation: Generation::current(),
        })
    }

    /// The descriptor that becomes readable when results are there.
    fn fileno(&self) -> RawFd {
        self.readable.as_raw_fd()
    }

    /// Gives all results that are there to their futures.
    fn deliver(&self, py: Python<'_>) -> PyResult<()> {
        // An error means that there is nothing to read.
        let _ = (&self.readable).read(&mut [0; 16]);
        self.deliver_now(py)
    }
}

impl Completions {
    /// [`Completions::deliver_now`] follows: results need not make the descriptor readable until then.
    pub(crate) fn delivering(&self) {
        self.queue.told.store(true, Ordering::SeqCst);
    }

    /// Gives all results that are there to their futures.
    pub(crate) fn deliver_now(&self, py: Python<'_>) -> PyResult<()> {
        // Before the queue is taken: a later result makes the descriptor readable again.
        self.queue.told.store(false, Ordering::SeqCst);
        let done = std::mem::take(&mut *self.queue.done.lock().expect("no panic under this lock"));
        for (number, outcome) in done {
            let waiting =
                self.waiting.lock().expect("no panic under this lock").futures.remove(&number);
            let Some(Future { future, buffer }) = waiting else { continue };
            let future = future.bind(py);
            // It was cancelled.
            if future.call_method0(intern!(py, "done"))?.is_truthy()? {
                continue;
            }
            let result = match outcome {
                None => Err(fail(IO, "a worker has lost the request (a bug in the device)")),
                Some(Err(error)) => Err(of_device(&error)),
                Some(Ok(answer)) => into_object(py, answer, buffer),
            };
            match result {
                Ok(value) => future.call_method1(intern!(py, "set_result"), (value,))?,
                Err(error) => {
                    future.call_method1(intern!(py, "set_exception"), (error.into_value(py),))?
                }
            };
        }
        Ok(())
    }
}

/// The result as an object of Python; what was read goes to `buffer` if there is one.
pub(crate) fn into_object(
    py: Python<'_>,
    answer: PythonReply,
    buffer: Option<ObjectMemory>,
) -> PyResult<Py<PyAny>> {
    match (answer, buffer) {
        (PythonReply::Done, _) => Ok(py.None()),
        (PythonReply::Read(parts), None) => Ok(bytes_of(py, &parts)?.into_any().unbind()),
        (PythonReply::Read(parts), Some(buffer)) => {
            buffer.fill(py, &parts)?;
            Ok(buffer.len().into_pyobject(py)?.into_any().unbind())
        }
        (PythonReply::Extents(found), _) => {
            let lists = PyDict::new(py);
            for (name, runs) in found {
                lists.set_item(name, runs)?;
            }
            Ok(lists.into_any().unbind())
        }
    }
}
