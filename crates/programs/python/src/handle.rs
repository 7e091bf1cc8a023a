//! `Handle`: an open device, for threads that wait and for asyncio.

use std::ffi::OsString;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use blockhaul_block::{Can, ContextSet, Device, Facts, RequestFlags};
use blockhaul_client::TrafficFigures;
use blockhaul_io::{Pool, WorkerHandle};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::completions::{Completions, Promise, into_object};
use crate::direct::DirectConnection;
use crate::error::{fail, of_device};
use crate::memory::{ObjectMemory, copied};
use crate::opening::{
    CommandProcess, ConnectionInfo, HandshakeOptions, OpenConfig, OpenMode, PythonStack,
};
use crate::polling::{LoopConnection, LoopHandle, SubmitResult, Watch, Work};
use crate::request::{PythonReply, PythonRequest, carry_out, part_of};
use crate::wait;
use crate::workers::libc_numbers::{BADF, INVAL};
use crate::workers::{self, Generation};

/// Bytes of the buffers that a handle uses again and again.
const POOL: u64 = 64 << 20;

/// An open device. Its methods release the interpreter's lock while they wait.
#[pyclass(frozen, subclass, module = "blockhaul._blockhaul")]
pub(crate) struct Handle {
    inner: Mutex<Option<Arc<HandleInner>>>,
    facts: Arc<Facts>,
    connection: Option<ConnectionInfo>,
    /// Something was changed since the last flush before it was closed.
    changed: AtomicBool,
    generation: Generation,
}

/// The device and its workers.
struct HandleInner {
    /// Taken when it is closed.
    open: Option<PythonStack>,
    device: Option<Arc<dyn Device>>,
    /// What threads use themselves, until a worker must have it.
    direct: Option<DirectConnection>,
    pool: Pool,
    remote: WorkerHandle,
    writable: bool,
    generation: Generation,
}

impl HandleInner {
    /// Closes the device on this thread: it may wait for a server that it has started.
    fn close(&mut self) {
        // The command of a socket ends after its connection.
        let open = (self.device.take(), self.direct.take(), self.open.take());
        if self.generation.is_current() {
            drain(open.1.as_ref());
            drop(open);
        } else {
            // Its connections belong to the parent process.
            std::mem::forget(open);
        }
    }
}

impl Drop for HandleInner {
    fn drop(&mut self) {
        let open = (self.device.take(), self.direct.take(), self.open.take());
        if !self.generation.is_current() {
            return std::mem::forget(open);
        }
        if open.0.is_some() {
            // This may be a worker, or a thread of Python that must not wait.
            let _ = std::thread::Builder::new().name("closing".into()).spawn(move || {
                drain(open.1.as_ref());
                drop(open);
            });
        }
    }
}

impl LoopHandle for HandleInner {
    fn polling(&self) -> Option<&LoopConnection> {
        self.direct.as_ref().and_then(DirectConnection::polling)
    }
}

/// Waits for the requests that a loop has in flight.
fn drain(direct: Option<&DirectConnection>) {
    if let Some(polling) = direct.and_then(DirectConnection::polling) {
        polling.drain();
    }
}

impl Handle {
    fn inner(&self) -> PyResult<Arc<HandleInner>> {
        self.generation.check()?;
        let inner = self.inner.lock().expect("no panic under this lock").clone();
        inner.ok_or_else(|| fail(BADF, &format!("{}: the device is closed", self.facts.name)))
    }

    /// Whether closing it must flush it: images and caches write the rest behind the last user, and the next
    /// one must see it. A server is not asked for that: it sees all writes.
    fn must_flush(&self) -> bool {
        self.generation.is_current()
            && self.connection.is_none()
            && self.facts.can.contains(Can::FLUSH)
            && !self.closed()
            && self.changed.swap(false, Ordering::Relaxed)
    }

    /// Carries out a request, and waits for its result.
    fn ask(&self, py: Python<'_>, asked: PythonRequest) -> PyResult<PythonReply> {
        let inner = self.inner()?;
        self.changed.fetch_or(asked.changes(), Ordering::Relaxed);
        if let Some(direct) = inner.direct(asked.changes())
            && let Some(answer) = direct.ask(py, &asked)?
        {
            return Ok(answer);
        }
        inner.needs_worker(py)?;
        let (sender, receiver) = channel();
        let remote = inner.remote.clone();
        wait::start(&remote, sender, move || inner.carry_out(asked));
        wait::wait(py, receiver)?.map_err(|error| of_device(&error))
    }

    /// Carries out a request, and gives its result to a future. True: the loop is to call `Watch.send`.
    fn start(
        &self,
        (completions, future): (&Completions, &Bound<'_, PyAny>),
        asked: PythonRequest,
        buffer: Option<ObjectMemory>,
    ) -> PyResult<bool> {
        let inner = self.inner()?;
        self.changed.fetch_or(asked.changes(), Ordering::Relaxed);
        let Some(polling) = inner.polling() else {
            inner.needs_worker(future.py())?;
            let promise = completions.promise(future, buffer)?;
            inner.spawn(asked, promise);
            return Ok(false);
        };
        let promise = completions.promise(future, buffer)?;
        let (asked, promise) = if inner.writable || !asked.changes() {
            match polling.submit(asked, promise) {
                SubmitResult::Sent => return Ok(false),
                SubmitResult::Queued => return Ok(true),
                SubmitResult::Refused(asked, promise) => (asked, promise),
            }
        } else {
            (asked, promise)
        };
        let then = inner.clone();
        inner.leave_loop(Box::new(move || then.spawn(asked, promise)));
        Ok(false)
    }

    /// Refuses a read that cannot succeed before memory is needed for it.
    fn read_of(&self, count: u64, offset: u64) -> PyResult<PythonRequest> {
        let fits = offset.checked_add(count).is_some_and(|end| end <= self.facts.size);
        if !fits {
            let name = &self.facts.name;
            let size = self.facts.size;
            let text = format!(
                "{name}: read of {count} bytes at offset {offset}: the device has {size} bytes"
            );
            return Err(fail(INVAL, &text));
        }
        Ok(PythonRequest::Read { at: offset, len: count })
    }

    fn read_into_of(&self, buffer: &ObjectMemory, offset: u64) -> PyResult<PythonRequest> {
        if buffer.is_readonly() {
            return Err(PyValueError::new_err("the buffer is read-only"));
        }
        self.read_of(buffer.len() as u64, offset)
    }

    fn write_of(&self, data: &Bound<'_, PyAny>, offset: u64, fua: bool) -> PyResult<PythonRequest> {
        let inner = self.inner()?;
        let Some(device) = &inner.device else { return Err(fail(BADF, "the device is closed")) };
        let part = part_of(&**device);
        let parts = copied(data, part, &inner.pool)?;
        Ok(PythonRequest::Write { at: offset, parts, flags: flag(RequestFlags::FUA, fua) })
    }

    fn extents_of(
        &self,
        count: u64,
        offset: u64,
        contexts: Option<Vec<String>>,
        one: bool,
    ) -> PyResult<PythonRequest> {
        let contexts = match contexts {
            None => self.facts.all_contexts(),
            Some(names) => self.contexts_of(&names)?,
        };
        Ok(PythonRequest::Extents {
            at: offset,
            len: count,
            contexts,
            flags: flag(RequestFlags::ONE_EXTENT, one),
        })
    }

    fn contexts_of(&self, names: &[String]) -> PyResult<ContextSet> {
        let mut contexts = ContextSet::empty();
        for name in names {
            let index = self.facts.contexts.iter().position(|context| context == name);
            let Some(index) = index else {
                let known = self.facts.contexts.join(", ");
                let text = format!(
                    "{}: no context {name:?} was negotiated; there are: {known}",
                    self.facts.name
                );
                return Err(fail(INVAL, &text));
            };
            contexts = contexts.with(index);
        }
        if contexts.is_empty() {
            Err(PyValueError::new_err("name at least one context"))
        } else {
            Ok(contexts)
        }
    }
}

impl HandleInner {
    /// What this thread can use itself; to change something only if that is allowed.
    fn direct(&self, changes: bool) -> Option<&DirectConnection> {
        self.direct.as_ref().filter(|_| self.writable || !changes)
    }

    /// A worker is to carry out requests from here on.
    fn needs_worker(self: &Arc<Self>, py: Python<'_>) -> PyResult<()> {
        let Some(direct) = &self.direct else { return Ok(()) };
        if direct.polling().is_none() {
            return direct.give_to_worker(py, &self.remote);
        }
        let (sender, receiver) = channel();
        self.leave_loop(Box::new(move || sender.send(()).unwrap_or_default()));
        wait::wait(py, receiver)
    }

    /// Does something when a worker has the connection of a loop.
    fn leave_loop(self: &Arc<Self>, work: Work) {
        let Some(polling) = self.polling() else { return };
        if !polling.when_given(work) {
            return;
        }
        let inner = self.clone();
        let leaving = std::thread::Builder::new().name("leaving".into());
        if leaving.spawn(move || inner.give_from_loop()).is_err() {
            // There are too many threads: this one waits itself.
            self.give_from_loop();
        }
    }

    /// Gives the connection of a loop to a worker.
    fn give_from_loop(&self) {
        if let Some(direct) = &self.direct
            && let Some(polling) = direct.polling()
        {
            direct.leave_loop(polling, &self.remote);
        }
    }

    /// Lets a worker carry out a request.
    fn spawn(self: Arc<Self>, asked: PythonRequest, promise: Promise) {
        let remote = self.remote.clone();
        drop(remote.spawn(move || {
            let work = self.carry_out(asked);
            async move { promise.complete(work.await) }
        }));
    }

    fn carry_out(
        self: Arc<Self>,
        asked: PythonRequest,
    ) -> impl Future<Output = blockhaul_block::Result<PythonReply>> + 'static {
        let device = self.device.clone();
        let pool = self.pool.clone();
        async move {
            let Some(device) = device else {
                return Err(blockhaul_block::Error::new(
                    blockhaul_block::Kind::ShuttingDown,
                    "the device is closed",
                ));
            };
            let answer = carry_out(device, pool, asked).await;
            // The device is in use until here.
            drop(self);
            answer
        }
    }
}

fn flag(flag: RequestFlags, on: bool) -> RequestFlags {
    if on { flag } else { RequestFlags::empty() }
}

#[pymethods]
impl Handle {
    #[new]
    #[pyo3(signature = (words, *, mode="r", size=0, layers=Vec::new(), contexts=Vec::new(), timeout=60.0,
                        uri=false, structured=true, extended=true, allocation=true, export=None))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments")]
    fn new(
        py: Python<'_>,
        words: Vec<OsString>,
        mode: &str,
        size: u64,
        layers: Vec<String>,
        contexts: Vec<String>,
        timeout: f64,
        uri: bool,
        structured: bool,
        extended: bool,
        allocation: bool,
        export: Option<String>,
    ) -> PyResult<Handle> {
        let mode = match mode {
            "r" => OpenMode::Read,
            "r+" => OpenMode::Write,
            "w" => OpenMode::Create(size),
            _ => return Err(PyValueError::new_err("mode is one of 'r', 'r+' and 'w'")),
        };
        let timeout = seconds(timeout)?;
        let handshake = (uri || export.is_some()).then_some(HandshakeOptions {
            structured,
            extended,
            allocation,
        });
        let wanted = OpenConfig { words, mode, layers, contexts, timeout, handshake, export };
        let runtime = workers::runtime()?;
        let remote = workers::remote(&runtime);
        let open = wait::run(py, &remote, move || wanted.open())?;
        let mut open = open.map_err(|error| of_device(&error))?;
        let device = open.stack.device().clone();
        let generation = Generation::current();
        let facts = device.facts();
        let connection = open.connection.clone();
        let inner = HandleInner {
            direct: open.direct.take(),
            open: Some(open),
            device: Some(device),
            pool: Pool::new(POOL),
            remote,
            writable: facts.can.contains(Can::WRITE),
            generation,
        };
        let inner = Mutex::new(Some(Arc::new(inner)));
        let changed = AtomicBool::new(false);
        Ok(Handle { inner, facts, connection, changed, generation })
    }

    /// Closes the device, after the requests in flight. What was written through ``open`` is flushed first.
    /// Does nothing if it is closed.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let flushed =
            if self.must_flush() { self.ask(py, PythonRequest::Flush).map(drop) } else { Ok(()) };
        let inner = self.inner.lock().expect("no panic under this lock").take();
        // If a request still uses it, it is closed after that.
        if let Some(mut inner) = inner.and_then(Arc::into_inner) {
            py.detach(move || inner.close());
        }
        flushed
    }

    /// Lets workers carry out requests from here on, also those that a thread waits for.
    fn use_workers(&self, py: Python<'_>) -> PyResult<()> {
        self.inner()?.needs_worker(py)
    }

    /// Lets the thread of an event loop carry out requests from here on, those of ``start_…``; returns what
    /// the loop must watch. ``None``: workers carry them out.
    fn use_loop(&self, py: Python<'_>) -> PyResult<Option<Watch>> {
        let inner = self.inner()?;
        let polling = match &inner.direct {
            Some(direct) => direct.give_to_loop(py)?,
            None => None,
        };
        match polling {
            Some(polling) => {
                let polls: Arc<dyn LoopHandle> = inner.clone();
                Watch::of(polling, Arc::downgrade(&polls))
            }
            None => Ok(None),
        }
    }

    /// Lets workers carry out what a loop did, after the requests in flight. Does not wait for them.
    fn leave_loop(&self) -> PyResult<()> {
        self.inner()?.leave_loop(Box::new(|| {}));
        Ok(())
    }

    /// Whether it is closed.
    #[getter]
    fn closed(&self) -> bool {
        self.inner.lock().expect("no panic under this lock").is_none()
    }

    /// Process ID of the command that serves it; ``None`` if it was not opened as one.
    #[getter]
    fn pid(&self) -> PyResult<Option<u32>> {
        let inner = self.inner()?;
        let command = inner.open.as_ref().and_then(|open| open.command.as_ref());
        Ok(command.and_then(CommandProcess::id))
    }

    /// Size in bytes.
    #[getter]
    fn size(&self) -> u64 {
        self.facts.size
    }

    /// The device as it was named, without secrets.
    #[getter]
    fn name(&self) -> &str {
        &self.facts.name
    }

    /// What the server or the device says about its contents; may be empty.
    #[getter]
    fn description(&self) -> &str {
        &self.facts.description
    }

    /// Minimum, preferred and maximum block size in bytes. Requests of any length and offset work.
    #[getter]
    fn block_size(&self) -> (u32, u32, u32) {
        let block = self.facts.block;
        (block.minimum, block.preferred, block.maximum)
    }

    /// Names of the metadata contexts that can be asked for.
    #[getter]
    fn contexts(&self) -> Vec<String> {
        self.facts.contexts.clone()
    }

    /// Abilities: those of the device itself, or with those that are emulated.
    #[pyo3(signature = (name, *, emulated=true))]
    fn can(&self, name: &str, emulated: bool) -> PyResult<bool> {
        let ability = match name {
            "write" => Can::WRITE,
            "flush" => Can::FLUSH,
            "fua" => Can::FUA,
            "trim" => Can::TRIM,
            "zero" => Can::ZERO,
            "fast_zero" => Can::FAST_ZERO,
            "cache" => Can::CACHE,
            "extents" => Can::EXTENTS,
            "multi_conn" => Can::MULTI_CONN,
            _ => return Err(PyValueError::new_err(format!("no ability {name:?} is known"))),
        };
        let there = self.facts.can.contains(ability);
        Ok(there && (emulated || !self.facts.emulated.contains(ability)))
    }

    /// Whether the storage says that it is a rotating disk.
    #[getter]
    fn rotational(&self) -> bool {
        self.facts.rotational
    }

    /// What the handshake with the server has led to; `None` for a device that is not a URI.
    #[getter]
    fn connection<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyDict>>> {
        let Some(connection) = &self.connection else { return Ok(None) };
        let found = PyDict::new(py);
        found.set_item("protocol", connection.protocol)?;
        found.set_item("tls", connection.tls)?;
        found.set_item("structured_replies", connection.structured)?;
        found.set_item("extended_headers", connection.extended)?;
        found.set_item("contexts", &connection.contexts)?;
        found.set_item("flags", connection.flags)?;
        found.set_item("name", &connection.name)?;
        found.set_item("description", &connection.description)?;
        found.set_item("block_sizes", connection.block_sizes)?;
        Ok(Some(found))
    }

    /// What the connection has sent and received: bytes and messages sent, bytes and messages received. `None`
    /// for a device that is not a URI.
    #[getter]
    fn traffic(&self) -> Option<(u64, u64, u64, u64)> {
        let figures = self.connection.as_ref()?.traffic.figures();
        let TrafficFigures { bytes_sent, messages_sent, bytes_received, messages_received } =
            figures;
        Some((bytes_sent, messages_sent, bytes_received, messages_received))
    }

    /// Reads ``count`` bytes at ``offset``.
    fn pread(&self, py: Python<'_>, count: u64, offset: u64) -> PyResult<Py<PyAny>> {
        let asked = self.read_of(count, offset)?;
        let inner = self.inner()?;
        if let Some(direct) = inner.direct(false)
            && let Some(bytes) = direct.pread(py, count, offset)?
        {
            return Ok(bytes.into_any().unbind());
        }
        into_object(py, self.ask(py, asked)?, None)
    }

    /// Fills a buffer from ``offset``; returns its length in bytes.
    fn pread_into(
        &self,
        py: Python<'_>,
        buffer: &Bound<'_, PyAny>,
        offset: u64,
    ) -> PyResult<Py<PyAny>> {
        let buffer = ObjectMemory::of(buffer)?;
        let asked = self.read_into_of(&buffer, offset)?;
        let inner = self.inner()?;
        if let Some(direct) = inner.direct(false)
            && direct.pread_into(py, &inner.pool, &buffer, offset)?.is_some()
        {
            return Ok(buffer.len().into_pyobject(py)?.into_any().unbind());
        }
        into_object(py, self.ask(py, asked)?, Some(buffer))
    }

    /// Writes a buffer at ``offset``; with ``fua`` it is durable on return.
    #[pyo3(signature = (data, offset, *, fua=false))]
    fn pwrite(
        &self,
        py: Python<'_>,
        data: &Bound<'_, PyAny>,
        offset: u64,
        fua: bool,
    ) -> PyResult<()> {
        let inner = self.inner()?;
        if let Some(direct) = inner.direct(true)
            && let Ok(bytes) = data.cast::<PyBytes>()
        {
            // Bytes never change, so that they need no copy.
            let flags = flag(RequestFlags::FUA, fua);
            if direct.pwrite(py, bytes.as_bytes(), offset, flags)?.is_some() {
                return Ok(());
            }
        }
        let asked = self.write_of(data, offset, fua)?;
        self.ask(py, asked).map(drop)
    }

    /// Makes ``count`` bytes at ``offset`` read as zeroes.
    #[pyo3(signature = (count, offset, *, fua=false, allocate=false, fast=false))]
    fn zero(
        &self,
        py: Python<'_>,
        count: u64,
        offset: u64,
        fua: bool,
        allocate: bool,
        fast: bool,
    ) -> PyResult<()> {
        if count == 0 {
            return self.inner().map(drop);
        }
        let flags = zero_flags(fua, allocate, fast);
        self.ask(py, PythonRequest::Zero { at: offset, len: count, flags }).map(drop)
    }

    /// Discards ``count`` bytes at ``offset``; what they read as afterwards is undefined.
    #[pyo3(signature = (count, offset, *, fua=false))]
    fn trim(&self, py: Python<'_>, count: u64, offset: u64, fua: bool) -> PyResult<()> {
        if count == 0 {
            return self.inner().map(drop);
        }
        let flags = flag(RequestFlags::FUA, fua);
        self.ask(py, PythonRequest::Trim { at: offset, len: count, flags }).map(drop)
    }

    /// Makes completed writes durable.
    fn flush(&self, py: Python<'_>) -> PyResult<()> {
        self.ask(py, PythonRequest::Flush).map(drop)
    }

    /// Announces that ``count`` bytes at ``offset`` will be read.
    fn cache(&self, py: Python<'_>, count: u64, offset: u64) -> PyResult<()> {
        self.ask(py, PythonRequest::Cache { at: offset, len: count }).map(drop)
    }

    /// The state of ``count`` bytes at ``offset``, or of a part of them: for each context its runs, as
    /// length in bytes and flags.
    #[pyo3(signature = (count, offset, contexts=None, *, one=false))]
    fn block_status(
        &self,
        py: Python<'_>,
        count: u64,
        offset: u64,
        contexts: Option<Vec<String>>,
        one: bool,
    ) -> PyResult<Py<PyAny>> {
        let asked = self.extents_of(count, offset, contexts, one)?;
        into_object(py, self.ask(py, asked)?, None)
    }

    /// Starts a read; the future gets bytes.
    fn start_pread(
        &self,
        completions: &Completions,
        future: &Bound<'_, PyAny>,
        count: u64,
        offset: u64,
    ) -> PyResult<bool> {
        let asked = self.read_of(count, offset)?;
        self.start((completions, future), asked, None)
    }

    /// Starts a read into a buffer, which must not change size meanwhile; the future gets its length.
    fn start_pread_into(
        &self,
        completions: &Completions,
        future: &Bound<'_, PyAny>,
        buffer: &Bound<'_, PyAny>,
        offset: u64,
    ) -> PyResult<bool> {
        let buffer = ObjectMemory::of(buffer)?;
        let asked = self.read_into_of(&buffer, offset)?;
        self.start((completions, future), asked, Some(buffer))
    }

    /// Starts a write. The data is copied before this returns.
    #[pyo3(signature = (completions, future, data, offset, *, fua=false))]
    fn start_pwrite(
        &self,
        completions: &Completions,
        future: &Bound<'_, PyAny>,
        data: &Bound<'_, PyAny>,
        offset: u64,
        fua: bool,
    ) -> PyResult<bool> {
        let asked = self.write_of(data, offset, fua)?;
        self.start((completions, future), asked, None)
    }

    /// Starts to zero a range.
    #[pyo3(signature = (completions, future, count, offset, *, fua=false, allocate=false, fast=false))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments")]
    fn start_zero(
        &self,
        completions: &Completions,
        future: &Bound<'_, PyAny>,
        count: u64,
        offset: u64,
        fua: bool,
        allocate: bool,
        fast: bool,
    ) -> PyResult<bool> {
        let flags = zero_flags(fua, allocate, fast);
        self.start(
            (completions, future),
            PythonRequest::Zero { at: offset, len: count, flags },
            None,
        )
    }

    /// Starts to discard a range.
    #[pyo3(signature = (completions, future, count, offset, *, fua=false))]
    fn start_trim(
        &self,
        completions: &Completions,
        future: &Bound<'_, PyAny>,
        count: u64,
        offset: u64,
        fua: bool,
    ) -> PyResult<bool> {
        let flags = flag(RequestFlags::FUA, fua);
        self.start(
            (completions, future),
            PythonRequest::Trim { at: offset, len: count, flags },
            None,
        )
    }

    /// Starts a flush.
    fn start_flush(&self, completions: &Completions, future: &Bound<'_, PyAny>) -> PyResult<bool> {
        self.start((completions, future), PythonRequest::Flush, None)
    }

    /// Starts to prefetch a range.
    fn start_cache(
        &self,
        completions: &Completions,
        future: &Bound<'_, PyAny>,
        count: u64,
        offset: u64,
    ) -> PyResult<bool> {
        self.start((completions, future), PythonRequest::Cache { at: offset, len: count }, None)
    }

    /// Starts to ask for extents; the future gets what ``block_status`` returns.
    #[pyo3(signature = (completions, future, count, offset, contexts=None, *, one=false))]
    fn start_block_status(
        &self,
        completions: &Completions,
        future: &Bound<'_, PyAny>,
        count: u64,
        offset: u64,
        contexts: Option<Vec<String>>,
        one: bool,
    ) -> PyResult<bool> {
        let asked = self.extents_of(count, offset, contexts, one)?;
        self.start((completions, future), asked, None)
    }
}

fn zero_flags(fua: bool, allocate: bool, fast: bool) -> RequestFlags {
    flag(RequestFlags::FUA, fua)
        | flag(RequestFlags::NO_HOLE, allocate)
        | flag(RequestFlags::FAST, fast)
}

/// A time in seconds; 0 for none.
pub(crate) fn seconds(seconds: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(seconds)
        .map_err(|_| PyValueError::new_err("a time is a number of seconds, 0 or more"))
}
