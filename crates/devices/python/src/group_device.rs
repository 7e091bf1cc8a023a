//! A client's handle in all processes of a plugin: each request goes to the process with the fewest
//! requests in progress. A flush goes to all of them.
//!
//! When a process ends, its requests fail and the others go on; the handle is opened again in a new
//! process. If writes through it were acknowledged but not flushed, they may be lost: then flushes of
//! the handle fail from there on.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use blockhaul_block::{
    Can, Device, Error, Facts, Kind, OpKind, Outcome, PendingRequest, Reply, Request, RequestFlags,
    Result,
};
use blockhaul_io::FifoLock;

use crate::group::{GroupSession, VisitError};
use crate::host::WriteCounter;
use crate::process;
use crate::visit::PythonVisit;

/// Pause after a failed attempt to open a handle again: each request would make one.
const RETRY: Duration = Duration::from_secs(1);

/// A handle in all processes, as a device.
pub(crate) struct GroupDevice(pub(crate) Arc<GroupHandle>);

/// A handle in all processes.
pub(crate) struct GroupHandle {
    session: Arc<GroupSession>,
    name: String,
    tls: bool,
    facts: Arc<Facts>,
    places: Vec<HandleSlot>,
    /// Where to look first, so that idle processes take turns.
    turn: AtomicUsize,
    /// A process has ended with writes that were not flushed.
    lost: AtomicBool,
}

/// A handle in one of the processes.
#[derive(Default)]
struct HandleSlot {
    /// None while the process does not run.
    open: Mutex<Option<Arc<ProcessHandle>>>,
    /// Held while the handle is opened again.
    opening: Arc<FifoLock>,
    /// A task opens it again.
    renewing: AtomicBool,
    /// When to try again, and why the last attempt failed.
    failed: Mutex<Option<(Instant, Error)>>,
}

/// A handle in a process.
struct ProcessHandle {
    device: Arc<dyn Device>,
    visit: PythonVisit,
    writes: WriteCounter,
}

impl Device for GroupDevice {
    fn facts(&self) -> Arc<Facts> {
        self.0.facts.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        let handle = self.0.clone();
        if request.kind() == OpKind::Flush {
            return PendingRequest::start(handle.flush());
        }
        match handle.pick() {
            Some(opened) => handle.send(opened, request),
            None => PendingRequest::start(async move {
                let opened = handle.wait().await?;
                handle.send(opened, request).await
            }),
        }
    }
}

impl GroupHandle {
    /// Opens a handle in every process that runs, at least one.
    pub(crate) async fn open(
        session: Arc<GroupSession>,
        name: &str,
        tls: bool,
    ) -> Result<(String, Arc<GroupHandle>)> {
        let opening: Vec<_> = (0..session.group.len())
            .map(|index| {
                let session = session.clone();
                let name = name.to_string();
                blockhaul_io::spawn(async move { open_in(&session, index, &name, tls).await })
            })
            .collect();
        let mut first: Option<(String, Arc<Facts>)> = None;
        let mut places = Vec::new();
        let mut absent = None;
        for task in opening {
            let place = HandleSlot::default();
            match task.await {
                Ok((found, opened)) => {
                    let facts = opened.device.facts();
                    match &first {
                        Some((_, other)) => check_same(other, &facts)?,
                        None => first = Some((found, facts)),
                    }
                    *place.open() = Some(Arc::new(opened));
                }
                Err(VisitError::Refused(error)) => return Err(error),
                Err(VisitError::Process(error)) => absent = Some(error),
            }
            places.push(place);
        }
        let none = || absent.unwrap_or_else(|| Error::new(Kind::Io, "no process").complete());
        let (found, facts) = first.ok_or_else(none)?;
        let name = name.to_string();
        let turn = AtomicUsize::new(0);
        let lost = AtomicBool::new(false);
        Ok((found, Arc::new(GroupHandle { session, name, tls, facts, places, turn, lost })))
    }

    /// The running process with the fewest requests; the others are started again meanwhile.
    fn pick(self: &Arc<GroupHandle>) -> Option<Arc<ProcessHandle>> {
        let count = self.places.len();
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let mut best: Option<(usize, Arc<ProcessHandle>)> = None;
        for step in 0..count {
            let index = turn.wrapping_add(step) % count;
            let Some(opened) = self.running(index) else {
                self.renew_later(index);
                continue;
            };
            let busy = opened.visit.host().busy.load(Ordering::Relaxed);
            if best.as_ref().is_none_or(|(fewest, _)| busy < *fewest) {
                best = Some((busy, opened));
            }
        }
        best.map(|(_, opened)| opened)
    }

    /// The handle in a process, if that runs.
    fn running(&self, index: usize) -> Option<Arc<ProcessHandle>> {
        let mut open = self.places[index].open();
        let opened = open.clone()?;
        if !opened.is_gone() {
            return Some(opened);
        }
        *open = None;
        drop(open);
        self.check_lost(&opened);
        None
    }

    /// Notes if a process has ended with writes that were not flushed.
    fn check_lost(&self, opened: &ProcessHandle) {
        if opened.is_gone() && self.writes(opened).any() {
            self.lost.store(true, Ordering::Release);
        }
    }

    /// The count of writes that a flush of this handle covers.
    fn writes<'a>(&self, opened: &'a ProcessHandle) -> &'a WriteCounter {
        if self.facts.can.contains(Can::MULTI_CONN) {
            &opened.visit.host().writes
        } else {
            &opened.writes
        }
    }

    /// A request in one process.
    fn send(
        self: Arc<GroupHandle>,
        opened: Arc<ProcessHandle>,
        request: Request,
    ) -> PendingRequest {
        let durable = request.flags.contains(RequestFlags::FUA) || !request.kind().changes();
        let busy = RequestInProgress::begin(opened.clone());
        let pending = opened.device.submit(request);
        PendingRequest::start(async move {
            let outcome = pending.await;
            drop(busy);
            if outcome.is_ok() && !durable {
                self.writes(&opened).add();
                // The process may have ended, and a new one may have its place.
                self.check_lost(&opened);
            }
            outcome
        })
    }

    /// A flush of every process.
    async fn flush(self: Arc<GroupHandle>) -> Outcome {
        let running: Vec<_> = (0..self.places.len()).filter_map(|i| self.running(i)).collect();
        self.check_flush()?;
        let begun = running.into_iter().map(|opened| {
            let count = self.writes(&opened).count();
            let pending = opened.device.submit(Request::flush());
            (opened, count, pending)
        });
        let mut failed = None;
        for (opened, count, pending) in begun.collect::<Vec<_>>() {
            match pending.await {
                Ok(_) => self.writes(&opened).flushed(count),
                // What it had not flushed is lost, and nothing else.
                Err(_) if opened.is_gone() => self.check_lost(&opened),
                Err(error) => failed = Some(error),
            }
        }
        self.check_flush()?;
        failed.map_or(Ok(Reply::Done), Err)
    }

    /// The error of a flush after writes were lost.
    fn check_flush(&self) -> Result<()> {
        if !self.lost.load(Ordering::Acquire) {
            return Ok(());
        }
        let name = &self.facts.name;
        let text = format!("{name}: a process has ended with writes that were not flushed");
        Err(Error::new(Kind::Io, text).complete())
    }

    /// Opens the handle again in a process, in the background.
    fn renew_later(self: &Arc<GroupHandle>, index: usize) {
        let place = &self.places[index];
        if place.pause().is_some() || place.renewing.swap(true, Ordering::AcqRel) {
            return;
        }
        let handle = self.clone();
        drop(blockhaul_io::spawn(async move {
            if let Err(error) = handle.renew(index).await
                && !process::is_stopping()
            {
                log::warn!("{error}");
            }
            handle.places[index].renewing.store(false, Ordering::Release);
        }));
    }

    /// The first process that runs again.
    async fn wait(&self) -> Result<Arc<ProcessHandle>> {
        let mut failed = None;
        for index in 0..self.places.len() {
            match self.renew(index).await {
                Ok(opened) => return Ok(opened),
                Err(error) => drop(failed.get_or_insert(error)),
            }
        }
        Err(failed.unwrap_or_else(|| Error::new(Kind::Io, "no process").complete()))
    }

    /// The handle in a process, opened again if that has ended.
    async fn renew(&self, index: usize) -> Result<Arc<ProcessHandle>> {
        let place = &self.places[index];
        let _turn = place.opening.lock().await;
        if let Some(opened) = self.running(index) {
            return Ok(opened);
        }
        if let Some(error) = place.pause() {
            return Err(error);
        }
        let opened = open_in(&self.session, index, &self.name, self.tls).await;
        let checked = opened.map_err(Error::from).and_then(|(_, opened)| {
            check_same(&self.facts, &opened.device.facts())?;
            Ok(Arc::new(opened))
        });
        match &checked {
            Ok(opened) => *place.open() = Some(opened.clone()),
            Err(error) => *place.failed() = Some((blockhaul_io::now() + RETRY, error.clone())),
        }
        checked
    }
}

impl HandleSlot {
    /// Why the last attempt failed, while it is too early for another.
    fn pause(&self) -> Option<Error> {
        let failed = self.failed();
        let (until, error) = failed.as_ref()?;
        (blockhaul_io::now() < *until).then(|| error.clone())
    }

    fn open(&self) -> MutexGuard<'_, Option<Arc<ProcessHandle>>> {
        self.open.lock().expect("no panic under this lock")
    }

    fn failed(&self) -> MutexGuard<'_, Option<(Instant, Error)>> {
        self.failed.lock().expect("no panic under this lock")
    }
}

impl ProcessHandle {
    fn is_gone(&self) -> bool {
        self.visit.host().is_gone()
    }
}

/// A request in progress in a process. Its end counts also if nobody waits for it.
struct RequestInProgress(Arc<ProcessHandle>);

impl RequestInProgress {
    fn begin(opened: Arc<ProcessHandle>) -> RequestInProgress {
        opened.visit.host().busy.fetch_add(1, Ordering::Relaxed);
        RequestInProgress(opened)
    }
}

impl Drop for RequestInProgress {
    fn drop(&mut self) {
        self.0.visit.host().busy.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Opens a handle in one process; returns the export's name, too.
async fn open_in(
    session: &GroupSession,
    index: usize,
    name: &str,
    tls: bool,
) -> Result<(String, ProcessHandle), VisitError> {
    let visit = session.visit(index).await?;
    let opened = visit.open_handle(name, tls).await;
    let (found, device) = opened.map_err(VisitError::Refused)?;
    Ok((found, ProcessHandle { device, visit, writes: WriteCounter::default() }))
}

/// Refuses a handle whose disk is another one than in the other processes.
fn check_same(one: &Facts, other: &Facts) -> Result<()> {
    let sizes = (one.size, other.size);
    let cans = (one.can, other.can);
    let same = sizes.0 == sizes.1
        && cans.0 == cans.1
        && one.block == other.block
        && one.advertised == other.advertised;
    if same {
        return Ok(());
    }
    let name = &one.name;
    let one = sizes.0;
    let other = sizes.1;
    let text = format!(
        "{name}: its processes disagree about the disk: {one} and {other} bytes, or abilities or \
         block sizes that differ"
    );
    Err(Error::new(Kind::Io, text).complete())
}
