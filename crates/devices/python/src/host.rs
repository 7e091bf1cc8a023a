//! A plugin in its process: requests go out in batches, and each worker takes its answers.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use blockhaul_block::{Error, Kind, Result, ThreadModel};
use blockhaul_catalog::{ExportClient, Shutdown};
use blockhaul_io::{Completer, FifoLock, Interest, SharedMemory, SharedPart, WorkerHandle};
use serde::Deserialize;
use serde_json::{Value, json};
use slab::Slab;

use crate::process::{NewProcess, PluginProcess, ended_with, stdio_is_free};
use crate::settings::PythonSettings;
use crate::wire::{self, HostCommand, HostMessage, HostRequest, MessageKind};

/// Memory for payloads in flight of one plugin, in bytes; pages are used on demand, the lowest first.
const MEMORY: usize = 256 << 20;
/// Buffers that a plugin may keep after its callbacks, in bytes.
const KEPT_MAX: usize = MEMORY / 2;
/// Maximum number of sockets for answers: workers beyond share them.
const LINKS_MAX: usize = 64;
/// The target of log records with a traceback, which has several lines.
const TRACEBACK: &str = concat!(env!("CARGO_CRATE_NAME"), "::traceback");
/// Bytes received at a time.
const RECEIVE: usize = 64 << 10;
/// Time for the process to end when it has closed its sockets, and when its plugin is not needed.
const PATIENCE: Duration = Duration::from_secs(2);
const UNLOAD: Duration = Duration::from_secs(30);

/// What a plugin says when it is ready.
#[derive(Deserialize)]
struct ReadyMessage {
    model: u8,
    api: u8,
    /// It has coroutines.
    #[serde(default, rename = "async")]
    coroutines: bool,
    #[serde(default)]
    text: String,
    /// The version of the interpreter.
    #[serde(default)]
    python: String,
}

/// A plugin that is ready. It ends when this is dropped.
pub(crate) struct PythonHost {
    pub(crate) inner: Arc<HostState>,
    pub(crate) model: ThreadModel,
    /// Its callbacks are coroutines, which overlap in every thread model.
    pub(crate) coroutines: bool,
    /// Number of requests in progress, where several processes share them.
    pub(crate) busy: AtomicUsize,
    /// Writes that only this process may know of, where a flush covers all clients.
    pub(crate) writes: WriteCounter,
    /// The lock for plugins with one connection at a time.
    pub(crate) one_by_one: Arc<FifoLock>,
}

/// Counts writes without FUA, to know whether the end of a process may lose any.
#[derive(Default)]
pub(crate) struct WriteCounter {
    acknowledged: AtomicU64,
    flushed: AtomicU64,
}

impl WriteCounter {
    /// A write was acknowledged.
    pub(crate) fn add(&self) {
        self.acknowledged.fetch_add(1, Ordering::AcqRel);
    }

    /// The number of writes that a flush covers if it starts now.
    pub(crate) fn count(&self) -> u64 {
        self.acknowledged.load(Ordering::Acquire)
    }

    /// A flush that covers this many writes was acknowledged.
    pub(crate) fn flushed(&self, count: u64) {
        self.flushed.fetch_max(count, Ordering::AcqRel);
    }

    /// Whether a write was not flushed.
    pub(crate) fn any(&self) -> bool {
        self.count() != self.flushed.load(Ordering::Acquire)
    }
}

/// What the requests and the readers of answers share.
pub(crate) struct HostState {
    /// The name for messages.
    pub(crate) shown: String,
    pub(crate) process: Arc<PluginProcess>,
    pub(crate) memory: SharedMemory,
    pub(crate) timeout: Option<Duration>,
    /// Number of processes that run the plugin.
    processes: usize,
    requests: UnixStream,
    links: usize,
    outgoing: Mutex<OutgoingRequests>,
    table: Mutex<ReplyTable>,
    /// Clients by the numbers of their visits.
    visits: Mutex<BTreeMap<u64, ExportClient>>,
    next_visit: AtomicU64,
    next_handle: AtomicU32,
    shutdown: Shutdown,
    /// It has started, and was not asked to end.
    needed: AtomicBool,
    /// It has closed a socket.
    gone: AtomicBool,
    /// Sockets for answers that it has not closed.
    open_links: AtomicUsize,
}

/// Requests that are not sent yet.
#[derive(Default)]
struct OutgoingRequests {
    bytes: Vec<u8>,
    sent: usize,
    /// A task will send them.
    scheduled: bool,
}

/// Requests that are not answered yet.
#[derive(Default)]
struct ReplyTable {
    waiting: Slab<(u32, PendingReply)>,
    generation: u32,
    /// Buffers that the plugin still uses after its callbacks, by their place.
    kept: BTreeMap<u64, SharedPart>,
    kept_bytes: usize,
    /// Why no requests are possible any more.
    lost: Option<Error>,
}

/// Completes a request: with its payload, or an error.
pub(crate) type RequestCompletion = Box<dyn FnOnce(Result<&[u8]>, RequestMemory) + Send>;

/// A request that is not answered yet.
pub(crate) struct PendingReply {
    /// Memory that is lent to the plugin.
    pub(crate) memory: Option<SharedPart>,
    pub(crate) finish: RequestCompletion,
}

/// The memory of a request once it is answered.
pub(crate) enum RequestMemory {
    /// It had none, or it was a write.
    None,
    /// It is ours again.
    Ours(SharedPart),
    /// The plugin still uses it: a copy of its bytes, as long as asked for.
    Copied(Vec<u8>),
}

impl PythonHost {
    /// Starts a process for a plugin, configures it and makes it ready.
    pub(crate) async fn start(
        settings: &PythonSettings,
        folder: Option<&Path>,
        shutdown: Shutdown,
    ) -> Result<Arc<PythonHost>> {
        let no_memory = |error| Error::system("cannot make memory for a Python process", error);
        let memory = SharedMemory::new("blockhaul-python", MEMORY).map_err(no_memory)?;
        let links = blockhaul_io::worker_count().min(LINKS_MAX);
        let own = memory.clone();
        let python = settings.host.python.clone();
        let of = folder.map(Path::to_path_buf);
        let started = blockhaul_io::offload(move || {
            PluginProcess::start(&python, of.as_deref(), &own, links)
        });
        let no_thread =
            |lost| Error::new(Kind::Io, "cannot start a thread").complete().because(lost);
        let NewProcess { process, requests, links } = started.await.map_err(no_thread)??;
        let inner = Arc::new(HostState {
            shown: settings.shown(),
            process,
            memory,
            timeout: settings.host.timeout,
            processes: settings.host.processes,
            requests,
            links: links.len(),
            outgoing: Mutex::default(),
            table: Mutex::default(),
            visits: Mutex::default(),
            next_visit: AtomicU64::new(1),
            next_handle: AtomicU32::new(1),
            shutdown,
            needed: AtomicBool::new(false),
            gone: AtomicBool::new(false),
            open_links: AtomicUsize::new(links.len()),
        });
        for (index, link) in links.into_iter().enumerate() {
            let inner = inner.clone();
            drop(WorkerHandle::to(index).spawn(move || inner.receive(link)));
        }
        let started =
            inner.control(HostCommand::Start, 0, 0, &start_message(settings, false)).await;
        let ready = started.and_then(|answer| inner.parsed::<ReadyMessage>("load", &answer));
        let usage = |error: Error| match error.kind() {
            Kind::Disconnected => error,
            _ if !settings.script.exists() => Error::new(Kind::NotFound, error.text()),
            _ => Error::new(Kind::Usage, error.text()),
        };
        let ReadyMessage { model, api, coroutines, .. } = match ready {
            Ok(ready) => ready,
            Err(error) => {
                inner.end();
                return Err(usage(error));
            }
        };
        let model = ThreadModel::from_number(model.into()).unwrap_or(ThreadModel::Parallel);
        inner.needed.store(true, Ordering::Release);
        inner.process.set_ready();
        let name = &inner.shown;
        let process = inner.process.id();
        log::debug!("{name} is ready in process {process}, API {api}, {}", model.name());
        let busy = AtomicUsize::new(0);
        let writes = WriteCounter::default();
        let one_by_one = Arc::default();
        Ok(Arc::new(PythonHost { inner, model, coroutines, busy, writes, one_by_one }))
    }

    /// Whether its process has ended.
    pub(crate) fn is_gone(&self) -> bool {
        self.inner.gone.load(Ordering::Acquire)
    }
}

impl Drop for PythonHost {
    fn drop(&mut self) {
        self.inner.end();
    }
}

/// The first request.
fn start_message(settings: &PythonSettings, dump: bool) -> Vec<u8> {
    let script = settings.script.to_string_lossy();
    let threads = settings.host.threads;
    let config = &settings.config;
    let stdio = stdio_is_free();
    let all = json!({
        "script": script, "threads": threads, "config": config, "dump": dump, "stdio": stdio
    });
    all.to_string().into_bytes()
}

impl HostState {
    /// A number for a new handle.
    pub(crate) fn new_handle(&self) -> u32 {
        self.next_handle.fetch_add(1, Ordering::Relaxed)
    }

    /// A number for a visit of this client.
    pub(crate) fn enter(&self, client: ExportClient) -> u64 {
        let number = self.next_visit.fetch_add(1, Ordering::Relaxed);
        self.visits().insert(number, client);
        number
    }

    /// The client of a visit is gone.
    pub(crate) fn leave(&self, visit: u64) {
        self.visits().remove(&visit);
    }

    /// Makes a request; `waiting` is finished in any case, maybe before this returns. Call it on a
    /// worker.
    pub(crate) fn ask(
        self: &Arc<HostState>,
        ask: HostRequest,
        payload: &[u8],
        waiting: PendingReply,
    ) -> u64 {
        let entered = {
            let mut table = self.table();
            match table.lost.clone() {
                Some(error) => Err((error, waiting)),
                None => Ok(table.enter(waiting)),
            }
        };
        let cookie = match entered {
            Ok(cookie) => cookie,
            Err((error, waiting)) => {
                (waiting.finish)(Err(error), RequestMemory::None);
                return u64::MAX;
            }
        };
        self.send(ask, cookie, payload);
        cookie
    }

    /// Sends a request without an answer, or one that is in the table.
    fn send(self: &Arc<HostState>, ask: HostRequest, cookie: u64, payload: &[u8]) {
        // Both counts are at most LINKS_MAX.
        let link = u16::try_from(blockhaul_io::worker() % self.links).unwrap_or_default();
        let schedule = {
            let mut outgoing = self.outgoing();
            ask.encode(link, cookie, payload, &mut outgoing.bytes);
            !std::mem::replace(&mut outgoing.scheduled, true)
        };
        if schedule {
            // Sent after what else can run now: it may have more requests.
            drop(blockhaul_io::spawn(self.clone().flush()));
        }
    }

    /// Asks the host to cancel the coroutine of a request, or with 0 all of a handle.
    pub(crate) fn cancel(self: &Arc<HostState>, handle: u32, cookie: u64) {
        self.send(HostRequest::new(HostCommand::Cancel, handle, cookie), 0, &[]);
    }

    /// Whether a request is not answered yet.
    pub(crate) fn is_waiting(&self, cookie: u64) -> bool {
        self.table().find(cookie).is_some()
    }

    /// Makes a request other than for data; returns the answer's payload.
    pub(crate) async fn control(
        self: &Arc<HostState>,
        op: HostCommand,
        handle: u32,
        at: u64,
        payload: &[u8],
    ) -> Result<Vec<u8>> {
        let (completer, ticket) = blockhaul_io::ticket();
        self.ask(HostRequest::new(op, handle, at), payload, PendingReply::control(completer));
        let lost = |_| Error::new(Kind::Disconnected, format!("{}: no answer", self.shown));
        // To start takes as long as it takes: nobody is served yet.
        let limit = self.timeout.filter(|_| op != HostCommand::Start);
        let Some(limit) = limit else { return ticket.await.map_err(lost)? };
        match blockhaul_io::timeout(limit, ticket).await {
            Ok(answer) => answer.map_err(lost)?,
            Err(blockhaul_io::TimeoutError) => {
                self.process.kill();
                Err(self.too_late(&format!("{op:?}"), limit))
            }
        }
    }

    /// Makes a request whose answer nobody waits for; an error is logged. Call it on any thread.
    pub(crate) fn notify(self: &Arc<HostState>, op: HostCommand, handle: u32, at: u64) {
        let finish: RequestCompletion = Box::new(|answer, _| {
            if let Err(error) = answer
                && error.kind() != Kind::Disconnected
            {
                log::warn!("{error}");
            }
        });
        let cookie = {
            let mut table = self.table();
            if self.gone.load(Ordering::Acquire) || table.lost.is_some() {
                return;
            }
            table.enter(PendingReply { memory: None, finish })
        };
        // This may be the end of the runtime: sent at once, behind what waits.
        let mut outgoing = self.outgoing();
        HostRequest::new(op, handle, at).encode(0, cookie, &[], &mut outgoing.bytes);
        // What does not fit goes with the next request.
        let _ = outgoing.write(&self.requests);
    }

    /// The error of a request that took too long.
    pub(crate) fn too_late(&self, what: &str, limit: Duration) -> Error {
        let name = &self.shown;
        let limit = limit.as_secs_f32();
        Error::new(Kind::TimedOut, format!("{name}: {what} has not returned after {limit} s"))
    }

    /// An answer in JSON.
    pub(crate) fn parsed<T: serde::de::DeserializeOwned>(
        &self,
        what: &str,
        answer: &[u8],
    ) -> Result<T> {
        serde_json::from_slice(answer).map_err(|error| {
            let text = format!("{}: {what}: the answer makes no sense", self.shown);
            Error::new(Kind::Io, text).complete().because(error)
        })
    }

    /// Sends what waits. One task at a time.
    async fn flush(self: Arc<HostState>) {
        loop {
            let written = {
                let mut outgoing = self.outgoing();
                let written = outgoing.write(&self.requests);
                if !matches!(written, Ok(false)) {
                    outgoing.scheduled = false;
                }
                written
            };
            match written {
                Ok(false) => {}
                // If the process is gone, the readers notice.
                Ok(true) | Err(_) => return,
            }
            if blockhaul_io::ready(&self.requests, Interest::Writable).await.is_err() {
                self.outgoing().scheduled = false;
                return;
            }
        }
    }

    /// Takes answers from a socket until its end.
    async fn receive(self: Arc<HostState>, link: UnixStream) {
        let mut buffer = vec![0; RECEIVE];
        let mut filled = 0;
        loop {
            match (&link).read(&mut buffer[filled..]) {
                Ok(0) => break,
                Ok(count) => filled += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    if blockhaul_io::ready(&link, Interest::Readable).await.is_err() {
                        break;
                    }
                    continue;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(_) => break,
            }
            let used = match self.take_messages(&buffer[..filled]) {
                Ok(used) => used,
                Err(error) => {
                    log::error!("{}: {error}; it is killed", self.shown);
                    self.process.kill();
                    break;
                }
            };
            let full = filled == buffer.len();
            buffer.copy_within(used..filled, 0);
            filled -= used;
            if filled == buffer.len() {
                // One message, whose length is bounded.
                buffer.resize(buffer.len() * 2, 0);
            } else if !full && blockhaul_io::ready(&link, Interest::Readable).await.is_err() {
                break;
            }
        }
        self.lose().await;
    }

    /// Handles the messages in what was received; returns how many bytes these are.
    fn take_messages(self: &Arc<HostState>, bytes: &[u8]) -> Result<usize> {
        let mut used = 0;
        while let Some((message, len)) = wire::decode(&bytes[used..])? {
            self.take(&message);
            used += len;
        }
        Ok(used)
    }

    fn take(&self, message: &HostMessage<'_>) {
        match message.kind {
            MessageKind::Answer => self.answered(message),
            MessageKind::Debug => {
                log::debug!("{}: {}", self.shown, String::from_utf8_lossy(message.payload));
            }
            MessageKind::Shutdown => {
                self.shutdown.request(&format!("{} asks for it", self.shown));
            }
            MessageKind::Disconnect => self.disconnect(message.number, message.status != 0),
            MessageKind::Freed => {
                let mut table = self.table();
                if let Some(part) = table.kept.remove(&message.number) {
                    table.kept_bytes -= part.size();
                }
            }
        }
    }

    fn answered(&self, message: &HostMessage<'_>) {
        let Some(mut waiting) = self.table().leave(message.number) else {
            log::warn!("{}: an answer without a request", self.shown);
            return;
        };
        let memory = match waiting.memory.take() {
            Some(part) if message.kept => self.keep(part),
            Some(part) => RequestMemory::Ours(part),
            None => RequestMemory::None,
        };
        let answer = match message.status {
            0 => Ok(message.payload),
            status => Err(self.error(status, message.payload)),
        };
        (waiting.finish)(answer, memory);
    }

    /// Keeps a buffer for the plugin, which has an object that refers to it.
    fn keep(&self, part: SharedPart) -> RequestMemory {
        let mut copy = vec![0; part.size()];
        part.copy_to(&mut copy);
        let mut table = self.table();
        table.kept_bytes += part.size();
        let too_many = table.kept_bytes > KEPT_MAX;
        table.kept.insert(part.at(), part);
        drop(table);
        if too_many {
            let name = &self.shown;
            log::error!(
                "{name}: it keeps the buffers of {KEPT_MAX} bytes of requests; it is killed"
            );
            self.process.kill();
        }
        RequestMemory::Copied(copy)
    }

    /// The error in an answer: a line for the client, and the traceback for the log.
    fn error(&self, status: u32, payload: &[u8]) -> Error {
        let text = String::from_utf8_lossy(payload);
        let (line, full) = text.split_once('\0').unwrap_or((&text, ""));
        if full != line && !full.is_empty() {
            log::error!(target: TRACEBACK, "{full}");
        }
        Error::new(kind_of(status), line.to_string()).of_plugin()
    }

    fn disconnect(&self, visit: u64, at_once: bool) {
        let stream = self.visits().get(&visit).and_then(|client| client.stream.clone());
        match stream {
            Some(stream) if at_once => stream.shutdown(),
            Some(stream) => stream.shutdown_receive(),
            None => {}
        }
    }

    /// The process has closed a socket. With the last one all answers are taken, and the other
    /// requests fail when it is known how it has ended.
    async fn lose(&self) {
        self.gone.store(true, Ordering::Release);
        if self.open_links.fetch_sub(1, Ordering::AcqRel) > 1 {
            return;
        }
        let needed = self.needed.load(Ordering::Acquire);
        let patience = if needed { PATIENCE } else { UNLOAD };
        let status = self.process.ended(patience).await;
        let needed = self.needed.load(Ordering::Acquire);
        let error = match status {
            Some(status) if !needed && self.process.is_ready() && status.success() => {
                Error::new(Kind::Disconnected, format!("{}: its process has ended", self.shown))
            }
            status => ended_with(&self.shown, status),
        };
        if needed {
            match self.processes {
                1 => log::error!("{error}; the next client gets a new one"),
                _ => log::error!("{error} (process {}); a new one is started", self.process.id()),
            }
        }
        let waiting = {
            let mut table = self.table();
            table.lost = Some(error.clone());
            table.kept.clear();
            std::mem::take(&mut table.waiting)
        };
        for (_, (_, waiting)) in waiting {
            // Its memory is dropped before: nobody else uses it any more.
            drop(waiting.memory);
            (waiting.finish)(Err(error.clone()), RequestMemory::None);
        }
    }

    /// Asks the process to end. Call it on any thread.
    fn end(&self) {
        self.needed.store(false, Ordering::Release);
        let mut outgoing = self.outgoing();
        HostRequest::new(HostCommand::End, 0, 0).encode(0, 0, &[], &mut outgoing.bytes);
        let _ = outgoing.write(&self.requests);
        // The end of the stream says the same.
        let _ = self.requests.shutdown(std::net::Shutdown::Write);
    }

    fn outgoing(&self) -> MutexGuard<'_, OutgoingRequests> {
        self.outgoing.lock().expect("no panic under this lock")
    }

    fn table(&self) -> MutexGuard<'_, ReplyTable> {
        self.table.lock().expect("no panic under this lock")
    }

    fn visits(&self) -> MutexGuard<'_, BTreeMap<u64, ExportClient>> {
        self.visits.lock().expect("no panic under this lock")
    }
}

impl OutgoingRequests {
    /// Sends what the socket takes. True: that was all.
    fn write(&mut self, mut socket: &UnixStream) -> std::io::Result<bool> {
        while self.sent < self.bytes.len() {
            match socket.write(&self.bytes[self.sent..]) {
                Ok(count) => self.sent += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => {
                    self.bytes.clear();
                    self.sent = 0;
                    return Err(error);
                }
            }
        }
        self.bytes.clear();
        self.sent = 0;
        Ok(true)
    }
}

impl ReplyTable {
    /// Adds a request; returns its cookie.
    fn enter(&mut self, waiting: PendingReply) -> u64 {
        self.generation = self.generation.wrapping_add(1);
        let generation = self.generation;
        let index = self.waiting.insert((generation, waiting));
        // A slab of 2^32 requests does not fit into memory.
        u64::from(generation) << 32 | index as u64 & u64::from(u32::MAX)
    }

    /// Takes a request out, if it is there.
    fn leave(&mut self, cookie: u64) -> Option<PendingReply> {
        let index = self.find(cookie)?;
        Some(self.waiting.remove(index).1)
    }

    fn find(&self, cookie: u64) -> Option<usize> {
        let index = (cookie & u64::from(u32::MAX)) as usize;
        let generation = self.waiting.get(index)?.0;
        (u64::from(generation) == cookie >> 32).then_some(index)
    }
}

impl PendingReply {
    fn control(completer: Completer<Result<Vec<u8>>>) -> PendingReply {
        let finish: RequestCompletion =
            Box::new(|answer, _| completer.complete(answer.map(<[u8]>::to_vec)));
        PendingReply { memory: None, finish }
    }
}

/// What a plugin's error number means for callers.
fn kind_of(status: u32) -> Kind {
    match status {
        // EROFS, EDQUOT and EFBIG, as nbdkit maps them; ETIMEDOUT means more for connections.
        30 => Kind::ReadOnly,
        122 | 27 => Kind::NoSpace,
        110 => Kind::Io,
        number => Kind::from_number(number),
    }
}

/// The description of a plugin, without making it ready: lines of `key=value`, as printed by `nbdkit
/// --dump-plugin`. Blocks.
///
/// # Errors
/// Those of starting the interpreter and of the plugin.
pub fn dump(settings: &PythonSettings) -> Result<String> {
    let no_memory = |error| Error::system("cannot make memory for a Python process", error);
    let memory = SharedMemory::new("blockhaul-python", 1 << 20).map_err(no_memory)?;
    let started = PluginProcess::start(&settings.host.python, None, &memory, 1)?;
    let shown = settings.shown();
    let answer = dump_by(&started, settings)
        .map_err(|error| Error::system(format!("{shown}: no answer"), error));
    // Nothing is left to be done in it.
    started.process.kill();
    let (status, payload) = answer?;
    if status != 0 {
        let text = String::from_utf8_lossy(&payload);
        let line = text.split('\0').next_back().unwrap_or_default();
        return Err(Error::new(Kind::Usage, line.to_string()));
    }
    let ready: ReadyMessage = serde_json::from_slice(&payload).map_err(|error| {
        Error::new(Kind::Io, format!("{shown}: no answer")).complete().because(error)
    })?;
    let ReadyMessage { model, api, text, python, .. } = ready;
    let model = ThreadModel::from_number(model.into()).unwrap_or(ThreadModel::Parallel).name();
    let about = dump_without_script();
    Ok(format!("{about}api_version={api}\nthread_model={model}\npython_version={python}\n{text}"))
}

/// The part of [`dump`] that is the same for all plugins.
pub fn dump_without_script() -> String {
    let version = env!("CARGO_PKG_VERSION");
    format!(
        "name=python\nversion={version}\nmax_thread_model=parallel\nerrno_is_preserved=0\n\
         magic_config_key=script\n"
    )
}

fn dump_by(started: &NewProcess, settings: &PythonSettings) -> std::io::Result<(u32, Vec<u8>)> {
    let NewProcess { requests, links, .. } = started;
    requests.set_nonblocking(false)?;
    let mut message = Vec::new();
    let ask = HostRequest::new(HostCommand::Start, 0, 0);
    ask.encode(0, 0, &start_message(settings, true), &mut message);
    (&*requests).write_all(&message)?;
    let mut link = links.first().ok_or(ErrorKind::NotConnected)?;
    link.set_nonblocking(false)?;
    let mut bytes = Vec::new();
    let mut part = [0; 4096];
    loop {
        let decoded = wire::decode(&bytes).map_err(|_| ErrorKind::InvalidData)?;
        match decoded {
            Some((message, _)) if message.kind == MessageKind::Answer => {
                return Ok((message.status, message.payload.to_vec()));
            }
            Some((_, len)) => drop(bytes.drain(..len)),
            None => match link.read(&mut part)? {
                0 => return Err(ErrorKind::UnexpectedEof.into()),
                count => bytes.extend_from_slice(&part[..count]),
            },
        }
    }
}

/// A visit or an open request of a client, for the plugin.
pub(crate) fn message(value: &Value) -> Vec<u8> {
    value.to_string().into_bytes()
}
