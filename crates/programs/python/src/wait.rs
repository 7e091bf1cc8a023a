//! A thread of Python waits for a worker.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use blockhaul_io::WorkerHandle;
use pyo3::prelude::*;

use crate::error::fail;
use crate::workers::libc_numbers::IO;

/// Interval of checks for signals: Ctrl-C ends a wait.
const LOOK: Duration = Duration::from_millis(100);

/// Waits for a value without the interpreter's lock. What is in flight goes on if a signal handler raises.
///
/// # Errors
/// That of a signal handler; EIO if the value never comes, because the worker has panicked.
pub(crate) fn wait<T: Send>(py: Python<'_>, receiver: Receiver<T>) -> PyResult<T> {
    wait_looking(py, receiver, LOOK, |_| Ok(()))
}

/// The same; calls `look` with the interpreter's lock, each `interval`.
pub(crate) fn wait_looking<T: Send>(
    py: Python<'_>,
    receiver: Receiver<T>,
    interval: Duration,
    mut look: impl FnMut(Python<'_>) -> PyResult<()>,
) -> PyResult<T> {
    let mut receiver = receiver;
    loop {
        let (received, back) = py.detach(move || {
            let received = receiver.recv_timeout(interval);
            (received, receiver)
        });
        receiver = back;
        match received {
            Ok(value) => return Ok(value),
            Err(RecvTimeoutError::Timeout) => {
                py.check_signals()?;
                look(py)?;
            }
            Err(RecvTimeoutError::Disconnected) => {
                return Err(fail(IO, "a worker has lost the request (a bug in the device)"));
            }
        }
    }
}

/// Runs a future on a worker, and waits for its output.
///
/// # Errors
/// Like [`wait`].
pub(crate) fn run<M, F>(py: Python<'_>, remote: &WorkerHandle, make: M) -> PyResult<F::Output>
where
    M: FnOnce() -> F + Send + 'static,
    F: Future + 'static,
    F::Output: Send + 'static,
{
    let (sender, receiver) = channel();
    start(remote, sender, make);
    wait(py, receiver)
}

/// Runs a future on a worker, and sends its output.
pub(crate) fn start<M, F>(remote: &WorkerHandle, sender: Sender<F::Output>, make: M)
where
    M: FnOnce() -> F + Send + 'static,
    F: Future + 'static,
    F::Output: Send + 'static,
{
    drop(remote.spawn(move || {
        let future = make();
        async move {
            // Nobody waits any more after a signal.
            let _ = sender.send(future.await);
        }
    }));
}
