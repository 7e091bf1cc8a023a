//! A device that is an object of Python. Threads of its own call its methods; workers only hand requests to
//! them.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;

use blockhaul_block::{
    BASE_ALLOCATION, BlockSizes, Can, Device, Error, Extents, Facts, Kind, Op, Outcome,
    PendingRequest, Reply, Request, RequestFlags, Result,
};
use blockhaul_io::{Completer, Data, Reservation};
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PyMemoryView};

use crate::memory::ObjectMemory;

/// Most threads that call methods at a time.
const THREADS_MAX: usize = 1024;
/// Most extents that are taken from one answer.
const EXTENTS_MAX: usize = 64 << 10;
/// Flags of a plugin's callbacks (nbdkit-plugin(3)): a zeroed range may be discarded; the first extent
/// suffices.
const MAY_TRIM: u32 = 1;
const REQ_ONE: u32 = 4;
/// States of a plugin's extents that base:allocation has, too.
const STATES: u64 = 3;

/// The methods that make a device able to do something.
const ABILITIES: [(&str, Can); 6] = [
    ("pwrite", Can::WRITE),
    ("flush", Can::FLUSH),
    ("trim", Can::TRIM),
    ("zero", Can::ZERO),
    ("cache", Can::CACHE),
    ("extents", Can::EXTENTS),
];

/// An object as a device.
pub(crate) struct ObjectDevice {
    facts: Arc<Facts>,
    shared: Arc<ObjectState>,
}

/// The threads that call its methods. They end, and are awaited, when this is dropped, which must be on a
/// thread that does not hold the interpreter's lock.
pub(crate) struct Threads {
    shared: Arc<ObjectState>,
    threads: Vec<JoinHandle<()>>,
}

struct ObjectState {
    queue: Mutex<ObjectQueue>,
    ready: Condvar,
}

#[derive(Default)]
struct ObjectQueue {
    jobs: VecDeque<(Request, Completer<Outcome>)>,
    closed: bool,
}

impl ObjectState {
    fn lock(&self) -> MutexGuard<'_, ObjectQueue> {
        self.queue.lock().expect("no panic under this lock")
    }

    /// The next request; `None`: there are no more.
    fn next(&self) -> Option<(Request, Completer<Outcome>)> {
        let mut queue = self.lock();
        loop {
            if queue.closed {
                return None;
            }
            if let Some(job) = queue.jobs.pop_front() {
                return Some(job);
            }
            queue = self.ready.wait(queue).expect("no panic under this lock");
        }
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        let mut queue = self.shared.lock();
        queue.closed = true;
        // Their requests fail.
        let left = std::mem::take(&mut queue.jobs);
        drop(queue);
        self.shared.ready.notify_all();
        for (_, completer) in left {
            completer.complete(Err(stopped()));
        }
        for thread in self.threads.drain(..) {
            // It has panicked, and its request has failed.
            let _ = thread.join();
        }
    }
}

impl Device for ObjectDevice {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        let mut queue = self.shared.lock();
        if queue.closed {
            return stopped().into();
        }
        let (completer, pending) = PendingRequest::completer();
        queue.jobs.push_back((request, completer));
        drop(queue);
        self.shared.ready.notify_one();
        pending
    }
}

fn stopped() -> Error {
    Error::new(Kind::ShuttingDown, "the server has stopped")
}

/// Makes a device of an object, whose methods at most `threads` threads call at a time.
///
/// # Errors
/// If it has no `get_size` or `pread`; exceptions of its methods.
pub(crate) fn device(
    object: &Bound<'_, PyAny>,
    threads: usize,
) -> PyResult<(Arc<dyn Device>, Threads)> {
    if !(1..=THREADS_MAX).contains(&threads) {
        let text = format!("threads is a number from 1 to {THREADS_MAX}");
        return Err(PyValueError::new_err(text));
    }
    let facts = Arc::new(facts(object)?);
    let shared = Arc::new(ObjectState { queue: Mutex::default(), ready: Condvar::new() });
    let mut started = Threads { shared: shared.clone(), threads: Vec::new() };
    for _ in 0..threads {
        let queue = shared.clone();
        let own = object.clone().unbind();
        let work = move || Python::attach(|py| serve(py, &queue, own.bind(py)));
        let thread = std::thread::Builder::new().name("object".into()).spawn(work);
        match thread {
            Ok(thread) => started.threads.push(thread),
            Err(error) => {
                object.py().detach(move || drop(started));
                return Err(error.into());
            }
        }
    }
    Ok((Arc::new(ObjectDevice { facts, shared }), started))
}

/// What the methods of an object say about it.
fn facts(object: &Bound<'_, PyAny>) -> PyResult<Facts> {
    for name in ["get_size", "pread"] {
        if !object.hasattr(name)? {
            let class = object.get_type().name()?;
            let text = format!(
                "{class} has no method {name}: a device is a description, or an object with the callbacks \
                 of a plugin"
            );
            return Err(PyValueError::new_err(text));
        }
    }
    let size: i64 = object.call_method0("get_size")?.extract()?;
    let size =
        u64::try_from(size).map_err(|_| PyValueError::new_err("get_size returned less than 0"))?;
    let name = format!("object of class {}", object.get_type().name()?);
    let mut facts = Facts::new(name, size);
    facts.can = Can::empty();
    for (method, ability) in ABILITIES {
        facts.can.set(ability, object.hasattr(method)?);
    }
    if !facts.can.contains(Can::WRITE) {
        facts.can -= Can::CHANGES;
    }
    if facts.can.contains(Can::EXTENTS) {
        facts.contexts = vec![BASE_ALLOCATION.to_string()];
    }
    if object.hasattr("block_size")? {
        let (minimum, preferred, maximum) = object.call_method0("block_size")?.extract()?;
        let declared = BlockSizes::declared(minimum, preferred, maximum);
        let wrong = || PyValueError::new_err("block_size returned sizes that are not possible");
        facts.block = declared.ok_or_else(wrong)?.enforced(false, facts.size);
    }
    Ok(facts)
}

/// Calls the methods of an object until there are no more requests. The thread keeps its state in the
/// interpreter.
fn serve(py: Python<'_>, shared: &ObjectState, object: &Bound<'_, PyAny>) {
    while let Some((request, completer)) = py.detach(|| shared.next()) {
        let kind = request.kind();
        let at = request.at;
        let len = request.len;
        let outcome = call(object, request);
        completer.complete(outcome.map_err(|error| error.during(kind, at, len)));
    }
}

fn call(object: &Bound<'_, PyAny>, request: Request) -> Outcome {
    let Request { op, at, len, flags } = request;
    let done = match op {
        Op::Read(room) => return read(object, at, room),
        Op::Write(data) => write(object, at, &data)?,
        Op::Zero => {
            let allocate = flags.contains(RequestFlags::NO_HOLE);
            let flags = if allocate { 0 } else { MAY_TRIM };
            object.call_method1(intern!(object.py(), "zero"), (len, at, flags))
        }
        Op::Trim => object.call_method1(intern!(object.py(), "trim"), (len, at, 0)),
        Op::Flush => object.call_method1(intern!(object.py(), "flush"), (0,)),
        Op::Cache => object.call_method1(intern!(object.py(), "cache"), (len, at, 0)),
        Op::Extents(_) => return extents(object, at, len, flags),
    };
    settle(object, done).map(|()| Reply::Done)
}

/// Awaitable results are refused: nothing would run them.
fn settle(object: &Bound<'_, PyAny>, done: PyResult<Bound<'_, PyAny>>) -> Result<()> {
    let result = done.map_err(|error| raised(object, &error))?;
    match result.hasattr(intern!(object.py(), "__await__")) {
        Ok(true) => {
            let text = "the method is a coroutine: only plugins (python:SCRIPT) can have these";
            Err(Error::new(Kind::Io, text))
        }
        _ => Ok(()),
    }
}

/// Reads into memory of Python, and copies that: the object may keep it.
fn read(object: &Bound<'_, PyAny>, at: u64, room: Reservation) -> Outcome {
    let py = object.py();
    let failed = |error: PyErr| raised(object, &error);
    let memory = PyByteArray::new_with(py, room.len(), |_| Ok(())).map_err(failed)?;
    let view = PyMemoryView::from(memory.as_any()).map_err(failed)?;
    let done = object.call_method1(intern!(py, "pread"), (view, at, 0));
    settle(object, done)?;
    if memory.len() != room.len() {
        return Err(Error::new(Kind::Io, "pread has resized its buffer"));
    }
    let memory = ObjectMemory::of(memory.as_any()).map_err(failed)?;
    let mut buf = room.into_buf();
    memory.copy_to(py, &mut buf).map_err(failed)?;
    Ok(Reply::Data(Data::from(buf)))
}

fn write<'py>(
    object: &Bound<'py, PyAny>,
    at: u64,
    data: &Data,
) -> Result<PyResult<Bound<'py, PyAny>>> {
    data.load().map_err(|error| Error::system("cannot read the payload", error))?;
    let py = object.py();
    let bytes = PyBytes::new(py, data.bytes());
    let view = PyMemoryView::from(bytes.as_any()).map_err(|error| raised(object, &error))?;
    Ok(object.call_method1(intern!(py, "pwrite"), (view, at, 0)))
}

/// The extents from `at` on, as a plugin returns them: offset, length and state of each, in order.
fn extents(object: &Bound<'_, PyAny>, at: u64, len: u64, flags: RequestFlags) -> Outcome {
    let failed = |error: PyErr| raised(object, &error);
    let one = if flags.contains(RequestFlags::ONE_EXTENT) { REQ_ONE } else { 0 };
    let name = intern!(object.py(), "extents");
    let answer = object.call_method1(name, (len, at, one)).map_err(failed)?;
    let end = at.saturating_add(len);
    let mut found = Extents::new();
    let mut reached = at;
    for run in answer.try_iter().map_err(failed)?.take(EXTENTS_MAX) {
        let run = run.and_then(|run| run.extract::<(u64, u64, u64)>());
        let (start, length, state) = run.map_err(failed)?;
        let after = start.checked_add(length).ok_or_else(gap)?;
        if after <= reached {
            continue;
        }
        if start > reached {
            return Err(gap());
        }
        found.push(after.min(end) - reached, state & STATES);
        reached = after;
        if reached >= end {
            break;
        }
    }
    if found.is_empty() {
        return Err(Error::new(Kind::Io, "extents returned nothing for the range"));
    }
    if one != 0 {
        found.first_only();
    }
    Ok(Reply::Extents(vec![found]))
}

fn gap() -> Error {
    Error::new(Kind::Io, "extents returned ranges that are not adjacent")
}

/// The error for an exception, whose traceback goes to `sys.unraisablehook`.
fn raised(object: &Bound<'_, PyAny>, error: &PyErr) -> Error {
    let py = object.py();
    let number = if error.is_instance_of::<PyOSError>(py) {
        error.value(py).getattr("errno").and_then(|number| number.extract::<u32>()).ok()
    } else {
        None
    };
    let text = error.to_string();
    error.clone_ref(py).write_unraisable(py, Some(object));
    Error::new(number.map_or(Kind::Io, Kind::from_number), text)
}
