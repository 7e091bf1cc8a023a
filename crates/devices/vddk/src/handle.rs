//! A handle to a disk, as a device.

use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};

use blockhaul_block::{
    BASE_ALLOCATION, ContextSet, Device, Error, Extents, Facts, Kind, Op, OpKind, Outcome,
    PendingRequest, Reply, Request, RequestFlags,
};
use blockhaul_io::{BlockingPool, Completer, Data};

use crate::allocation::{Allocation, UnitBits};
use crate::changes::CONTEXT;
use crate::disk::{QueryHandle, VddkDisk};
use crate::library::{ResultCode, SECTOR, TransferMemory};
use crate::query::query;
use crate::scan::ScanStep;
use crate::session::{OpenDisk, failed};
use crate::trial::ReadOverlap;

/// Maximum number of runs in one reply; the caller requests the rest again.
const RUNS_MAX: usize = 64 << 10;

/// An open handle. It is closed when the last request has ended.
struct VddkHandle {
    disk: Arc<VddkDisk>,
    facts: Arc<Facts>,
    /// Calls that may block, in order.
    thread: BlockingPool,
    open: OpenDisk,
    /// The handle for queries, once this one has needed it.
    apart: OnceLock<Arc<QueryHandle>>,
}

/// A handle as a device.
struct VddkDevice(Arc<VddkHandle>);

/// Opens a handle to a disk.
///
/// # Errors
/// As [`VddkDisk::open`].
pub(crate) async fn open(disk: &Arc<VddkDisk>) -> Result<Arc<dyn Device>, Error> {
    let (open, facts) = disk.open().await?;
    let disk = disk.clone();
    let thread = BlockingPool::single("vddk-disk");
    Ok(Arc::new(VddkDevice(Arc::new(VddkHandle {
        disk,
        facts,
        thread,
        open,
        apart: OnceLock::new(),
    }))))
}

impl VddkHandle {
    fn error(&self, doing: &str, function: &str, code: ResultCode) -> Error {
        failed(self.open.library(), doing, function, code)
    }

    /// Reads or writes.
    fn transfer(
        self: &Arc<VddkHandle>,
        at: u64,
        len: u64,
        memory: TransferMemory,
    ) -> PendingRequest {
        let (completer, pending) = PendingRequest::completer();
        let flying = TransferInFlight::on(&self.disk);
        let handle = self.clone();
        self.thread.run(move || {
            let library = handle.open.library().clone();
            let raw = handle.open.raw;
            let done = move |memory, result| {
                drop(flying);
                handle.transferred(at, len, memory, result, completer);
            };
            library.transfer(raw, at / SECTOR, memory, Box::new(done));
        });
        pending
    }

    /// A transfer has ended; often on a thread of the library.
    fn transferred(
        self: Arc<VddkHandle>,
        at: u64,
        len: u64,
        memory: TransferMemory,
        result: Result<(), ResultCode>,
        completer: Completer<Outcome>,
    ) {
        if matches!(memory, TransferMemory::Write(_)) {
            self.disk.wrote(at, len);
        }
        let (doing, function) = match &memory {
            TransferMemory::Read(_) => ("cannot read", "ReadAsync"),
            TransferMemory::Write(_) => ("cannot write", "WriteAsync"),
        };
        self.disk.trial.transfer_ended();
        self.look_ahead();
        match (result, memory) {
            // The caller may close the handle once it is answered: it is given up before.
            (Ok(()), TransferMemory::Read(buf)) => {
                drop(self);
                completer.complete(Ok(Reply::Data(buf.into())));
            }
            (Ok(()), TransferMemory::Write(data)) => {
                drop((self, data));
                completer.complete(Ok(Reply::Done));
            }
            (Err(code), memory) => {
                drop(memory);
                // The library's text is asked for on a thread of ours.
                let handle = self.clone();
                self.thread.run(move || {
                    let error = handle.error(doing, function, code).before_flush();
                    drop(handle);
                    completer.complete(Err(error));
                });
            }
        }
    }

    fn flush(self: &Arc<VddkHandle>) -> PendingRequest {
        let durable = match self.disk.flushes.begin(OpKind::Flush) {
            Ok(durable) => durable,
            Err(error) => return error.into(),
        };
        let (completer, ticket) = blockhaul_io::ticket();
        let handle = self.clone();
        self.thread.run(move || {
            let library = handle.open.library();
            let raw = handle.open.raw;
            let waited = library.wait(raw).map_err(|code| ("Wait", code));
            let flushed = waited.and_then(|()| library.flush(raw).map_err(|code| ("Flush", code)));
            let result = flushed.map_err(|(name, code)| handle.error("cannot flush", name, code));
            drop(handle);
            completer.complete(result.map(|()| Reply::Done));
        });
        PendingRequest::start(async move {
            let lost = |_| Error::new(Kind::Io, "the flush got lost");
            let outcome = ticket.await.map_err(lost).and_then(|outcome| outcome);
            durable.end(outcome, false).await
        })
    }

    /// The extents, the changes, or both.
    fn in_contexts(
        self: &Arc<VddkHandle>,
        request: &Request,
        contexts: ContextSet,
    ) -> PendingRequest {
        let asks = |name| {
            let context = self.facts.context(name);
            context.is_some_and(|context| contexts.includes(context))
        };
        let changes = self.disk.changes().filter(|_| asks(CONTEXT)).map(|changes| {
            let end = request.at.saturating_add(request.len);
            changes.find(request.at, end, runs_for(request))
        });
        match (asks(BASE_ALLOCATION), changes) {
            (true, None) => self.extents(request),
            (false, Some(changes)) => PendingRequest::ready(Ok(Reply::Extents(vec![changes]))),
            (true, Some(changes)) => {
                let extents = self.extents(request);
                PendingRequest::start(async move {
                    match extents.await? {
                        Reply::Extents(mut lists) => {
                            lists.push(changes);
                            Ok(Reply::Extents(lists))
                        }
                        reply => Ok(reply),
                    }
                })
            }
            (false, None) => {
                Error::new(Kind::Unsupported, "the disk has no such metadata context").into()
            }
        }
    }

    fn extents(self: &Arc<VddkHandle>, request: &Request) -> PendingRequest {
        let at = request.at;
        let end = request.at.saturating_add(request.len);
        let most = runs_for(request);
        if let Some(found) = self.find(at, end, most) {
            return PendingRequest::ready(Ok(Reply::Extents(vec![found])));
        }
        let handle = self.clone();
        let part = Allocation::part_of(at);
        let first = handle.need(part);
        PendingRequest::start(async move {
            let mut need = first;
            loop {
                if let Some(ticket) = need {
                    // A lost query is asked again.
                    let _ = ticket.await;
                }
                match handle.find(at, end, most) {
                    Some(found) => return Ok(Reply::Extents(vec![found])),
                    None => need = handle.need(part),
                }
                if need.is_none() {
                    return Err(Error::new(Kind::Io, "the extents of the disk are not known"));
                }
            }
        })
    }

    /// The extents of a range, if they are known; the next part may then be asked for.
    fn find(self: &Arc<VddkHandle>, at: u64, end: u64, most: usize) -> Option<Extents> {
        let mut scan = self.disk.scan()?;
        let found = scan.map.find(at, end, most)?;
        scan.used(Allocation::part_of(at.saturating_add(found.total() - 1)));
        let ahead = scan.has_ahead();
        drop(scan);
        if ahead {
            self.look_ahead();
        }
        Some(found)
    }

    /// Makes sure that a part gets known; a ticket to wait for.
    fn need(self: &Arc<VddkHandle>, part: u64) -> Option<blockhaul_io::Ticket<()>> {
        let next = self.disk.scan()?.need(part);
        match next {
            ScanStep::Known => None,
            ScanStep::Wait(ticket) => Some(ticket),
            ScanStep::Ask(ticket) => {
                self.ask(part);
                Some(ticket)
            }
        }
    }

    /// Asks for a part that somebody waits for.
    fn ask(self: &Arc<VddkHandle>, part: u64) {
        let way = self.way().unwrap_or(QueryRoute::Here);
        self.ask_by(way, part);
    }

    fn ask_by(self: &Arc<VddkHandle>, way: QueryRoute, part: u64) {
        let asked = PartQuery { disk: self.disk.clone(), part };
        match way {
            QueryRoute::Here => self.ask_here(asked),
            QueryRoute::Apart => self.ask_apart(asked),
        }
    }

    /// How to ask now; none: a query would hold up what is under way.
    fn way(&self) -> Option<QueryRoute> {
        let idle = self.disk.is_idle();
        let trial = &self.disk.trial;
        let here = idle.then_some(QueryRoute::Here);
        match trial.overlap() {
            _ if self.disk.is_written() => here,
            ReadOverlap::Yes => Some(QueryRoute::Apart),
            ReadOverlap::No => here,
            ReadOverlap::Unknown => here.or_else(|| trial.begin().then_some(QueryRoute::Apart)),
        }
    }

    /// Asks on the thread of this handle: its later reads wait.
    fn ask_here(self: &Arc<VddkHandle>, asked: PartQuery) {
        let handle = self.clone();
        self.thread.run(move || {
            let bits = query(&handle.disk, &handle.open, asked.part);
            // Those who wait may close their handles: this one is given up before.
            drop(handle);
            asked.answered(bits);
        });
    }

    /// Asks with the handle for queries, which is opened first if there is none.
    fn ask_apart(self: &Arc<VddkHandle>, asked: PartQuery) {
        if let Some(apart) = self.apart.get().cloned().or_else(|| self.disk.apart()) {
            // It stays as long as a handle that has used it.
            let _ = self.apart.set(apart.clone());
            return apart.ask(asked);
        }
        let handle = self.clone();
        self.disk.open_apart(move |opened| match opened {
            Ok(apart) => {
                let _ = handle.apart.set(apart.clone());
                drop(handle);
                apart.ask(asked);
            }
            Err(error) => {
                log::debug!("{}: no handle for queries: {error}", handle.facts.name);
                handle.disk.trial.set(ReadOverlap::No);
                handle.disk.trial.give_up();
                handle.ask_here(asked);
            }
        });
    }

    /// Asks for the next part: while nothing else is under way, because the library may hold up reads
    /// during a query, or at any time if it does not.
    fn look_ahead(self: &Arc<VddkHandle>) {
        let Some(mut scan) = self.disk.scan() else { return };
        let Some(way) = scan.has_ahead().then(|| self.way()).flatten() else { return };
        let part = scan.take_ahead().filter(|part| matches!(scan.need(*part), ScanStep::Ask(_)));
        drop(scan);
        match part {
            Some(part) => self.ask_by(way, part),
            None if way == QueryRoute::Apart => self.disk.trial.give_up(),
            None => {}
        }
    }
}

/// Which handle asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum QueryRoute {
    /// This one, which cannot read meanwhile.
    Here,
    /// The one for queries.
    Apart,
}

/// A transfer under way.
struct TransferInFlight(Arc<VddkDisk>);

/// Maximum number of runs of a reply.
fn runs_for(request: &Request) -> usize {
    if request.flags.contains(RequestFlags::ONE_EXTENT) { 1 } else { RUNS_MAX }
}

impl TransferInFlight {
    fn on(disk: &Arc<VddkDisk>) -> TransferInFlight {
        disk.in_flight.fetch_add(1, Ordering::Relaxed);
        TransferInFlight(disk.clone())
    }
}

impl Drop for TransferInFlight {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A query under way; if its job is dropped, others ask again.
struct PartQuery {
    disk: Arc<VddkDisk>,
    part: u64,
}

impl PartQuery {
    /// The query has ended: none if it failed.
    fn answered(self, bits: Option<UnitBits>) {
        let Some(mut scan) = self.disk.scan() else { return };
        let waiting = scan.answered(self.part, bits);
        drop(scan);
        // Those who wait may be the last ones that use the disk.
        drop(self);
        waiting.into_iter().for_each(|completer| completer.complete(()));
    }
}

impl Drop for PartQuery {
    fn drop(&mut self) {
        if let Some(mut scan) = self.disk.scan() {
            scan.lost(self.part);
        }
    }
}

impl QueryHandle {
    fn ask(self: Arc<QueryHandle>, asked: PartQuery) {
        let apart = self.clone();
        self.thread.run(move || {
            let disk = &asked.disk;
            let bits =
                disk.trial.during(|| !disk.is_idle(), || query(disk, &apart.open, asked.part));
            drop(apart);
            asked.answered(bits);
        });
    }
}

impl Device for VddkDevice {
    fn facts(&self) -> Arc<Facts> {
        self.0.facts.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        let at = request.at;
        let len = request.len;
        match request.op {
            Op::Read(room) => self.0.transfer(at, len, TransferMemory::Read(room.into_buf())),
            Op::Write(data) => self.0.transfer(at, len, TransferMemory::Write(aligned(data))),
            Op::Flush => self.0.flush(),
            Op::Extents(contexts) => self.0.in_contexts(&request, contexts),
            _ => Error::new(Kind::Unsupported, "the library has no such function").into(),
        }
    }
}

/// The same bytes at an aligned address, which the library may need for unbuffered disks.
fn aligned(data: Data) -> Data {
    match data.bytes().as_ptr().align_offset(blockhaul_io::ALIGN) {
        0 => data,
        _ => Data::copy_of(data.bytes()),
    }
}
