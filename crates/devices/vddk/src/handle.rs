//! A handle to a disk, as a device.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use blockhaul_block::{
    BASE_ALLOCATION, Contexts, Device, Error, Extents, Facts, Flags, Kind, Op, OpKind, Outcome,
    Pending, Reply, Request,
};
use blockhaul_io::{BlockingPool, Completer, Data};

use crate::allocation::{Allocation, Bits, PART, UNIT};
use crate::changes::CONTEXT;
use crate::disk::{Disk, SECTOR};
use crate::library::{Code, Memory};
use crate::scan::{Next, bits_of};
use crate::session::{OpenDisk, failed};

/// Maximum number of runs in one reply; the caller requests the rest again.
const RUNS_MAX: usize = 64 << 10;
/// Pauses before a failed query is repeated.
const REPEATS: [Duration; 2] = [Duration::from_millis(100), Duration::from_millis(500)];

/// An open handle. It is closed when the last request has ended.
pub(crate) struct Handle {
    disk: Arc<Disk>,
    facts: Arc<Facts>,
    /// Calls that may block, in order.
    thread: BlockingPool,
    open: OpenDisk,
}

/// A handle as a device.
struct VddkDevice(Arc<Handle>);

impl Handle {
    /// The device of a handle.
    pub(crate) fn over(disk: Arc<Disk>, open: OpenDisk, facts: Arc<Facts>) -> Arc<dyn Device> {
        let thread = BlockingPool::single("vddk-disk");
        Arc::new(VddkDevice(Arc::new(Handle { disk, facts, thread, open })))
    }

    fn error(&self, doing: &str, function: &str, code: Code) -> Error {
        failed(self.open.library(), doing, function, code)
    }

    /// Reads or writes.
    fn transfer(self: &Arc<Handle>, at: u64, len: u64, memory: Memory) -> Pending {
        let (completer, pending) = Pending::completer();
        let flying = InFlight::on(&self.disk);
        let handle = self.clone();
        self.thread.run(move || {
            let (library, raw) = (handle.open.library().clone(), handle.open.raw);
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
        self: Arc<Handle>,
        at: u64,
        len: u64,
        memory: Memory,
        result: Result<(), Code>,
        completer: Completer<Outcome>,
    ) {
        if matches!(memory, Memory::Write(_)) {
            self.disk.wrote(at, len);
        }
        let (doing, function) = match &memory {
            Memory::Read(_) => ("cannot read", "ReadAsync"),
            Memory::Write(_) => ("cannot write", "WriteAsync"),
        };
        self.look_ahead();
        match (result, memory) {
            // The caller may close the handle once it is answered: it is given up before.
            (Ok(()), Memory::Read(buf)) => {
                drop(self);
                completer.complete(Ok(Reply::Data(buf.into())));
            }
            (Ok(()), Memory::Write(data)) => {
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

    fn flush(self: &Arc<Handle>) -> Pending {
        let durable = match self.disk.flushes.begin(OpKind::Flush) {
            Ok(durable) => durable,
            Err(error) => return error.into(),
        };
        let (completer, ticket) = blockhaul_io::ticket();
        let handle = self.clone();
        self.thread.run(move || {
            let (library, raw) = (handle.open.library(), handle.open.raw);
            let waited = library.wait(raw).map_err(|code| ("Wait", code));
            let flushed = waited.and_then(|()| library.flush(raw).map_err(|code| ("Flush", code)));
            let result = flushed.map_err(|(name, code)| handle.error("cannot flush", name, code));
            drop(handle);
            completer.complete(result.map(|()| Reply::Done));
        });
        Pending::start(async move {
            let lost = |_| Error::new(Kind::Io, "the flush got lost");
            let outcome = ticket.await.map_err(lost).and_then(|outcome| outcome);
            durable.end(outcome, false).await
        })
    }

    /// The extents, the changes, or both.
    fn in_contexts(self: &Arc<Handle>, request: &Request, contexts: Contexts) -> Pending {
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
            (false, Some(changes)) => Pending::ready(Ok(Reply::Extents(vec![changes]))),
            (true, Some(changes)) => {
                let extents = self.extents(request);
                Pending::start(async move {
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

    fn extents(self: &Arc<Handle>, request: &Request) -> Pending {
        let (at, end) = (request.at, request.at.saturating_add(request.len));
        let most = runs_for(request);
        if let Some(found) = self.find(at, end, most) {
            return Pending::ready(Ok(Reply::Extents(vec![found])));
        }
        let handle = self.clone();
        let part = Allocation::part_of(at);
        let first = handle.need(part);
        Pending::start(async move {
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
    fn find(self: &Arc<Handle>, at: u64, end: u64, most: usize) -> Option<Extents> {
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
    fn need(self: &Arc<Handle>, part: u64) -> Option<blockhaul_io::Ticket<()>> {
        let next = self.disk.scan()?.need(part);
        match next {
            Next::Known => None,
            Next::Wait(ticket) => Some(ticket),
            Next::Ask(ticket) => {
                self.ask(part);
                Some(ticket)
            }
        }
    }

    /// Asks for a part, on the thread of this handle.
    fn ask(self: &Arc<Handle>, part: u64) {
        let asked = Asked { handle: self.clone(), part };
        self.thread.run(move || {
            let bits = asked.handle.query(part);
            let Some(mut scan) = asked.handle.disk.scan() else { return };
            let waiting = scan.answered(part, bits);
            drop(scan);
            // Those who wait may close their handles: this one is given up before.
            drop(asked);
            waiting.into_iter().for_each(|completer| completer.complete(()));
        });
    }

    /// Asks for the next part while nothing else is under way: the library may hold up reads during
    /// a query.
    fn look_ahead(self: &Arc<Handle>) {
        if !self.disk.is_idle() {
            return;
        }
        let Some(mut scan) = self.disk.scan() else { return };
        if !scan.has_ahead() {
            return;
        }
        let part = scan.take_ahead().filter(|part| matches!(scan.need(*part), Next::Ask(_)));
        drop(scan);
        if let Some(part) = part {
            self.ask(part);
        }
    }

    /// The allocated units of a part; none if the query fails.
    fn query(&self, part: u64) -> Option<Bits> {
        let units = match self.disk.scan() {
            Some(scan) => scan.map.units(part),
            None => 0,
        };
        if units == 0 {
            return Some(Bits::Uniform(true));
        }
        let mut pauses = REPEATS.iter();
        loop {
            let error = match self.query_once(part, units) {
                Ok(bits) => return Some(bits),
                Err(error) => error,
            };
            let unsupported = error.kind() == Kind::Unsupported;
            match pauses.next().filter(|_| !unsupported) {
                Some(pause) => {
                    log::debug!("{}: {error}; asking again", self.facts.name);
                    std::thread::sleep(*pause);
                }
                None => {
                    self.warn(part, &error);
                    return None;
                }
            }
        }
    }

    fn query_once(&self, part: u64, units: usize) -> Result<Bits, Error> {
        let doing = format!(
            "cannot query the allocated blocks of {} bytes at offset {}",
            units as u64 * UNIT,
            part * PART
        );
        let (start, count) = (part * (PART / SECTOR), units as u64 * (UNIT / SECTOR));
        let library = self.open.library();
        let blocks = library
            .query(self.open.raw, start, count, UNIT / SECTOR)
            .map_err(|code| self.error(&doing, "QueryAllocatedBlocks", code))?;
        bits_of(part, units, &blocks).map_err(|why| Error::new(Kind::Io, format!("{doing}: {why}")))
    }

    /// Reports the first failed query of the disk.
    fn warn(&self, part: u64, error: &Error) {
        let first = self.disk.scan().is_some_and(|mut scan| scan.warn());
        let name = &self.facts.name;
        if first {
            log::warn!(
                device = name, error = error.text();
                "{name}: {error}; this range counts as data, as does any other whose query fails"
            );
        } else {
            log::debug!("{name}: {error}; part {part} counts as data");
        }
    }
}

/// A transfer under way.
struct InFlight(Arc<Disk>);

/// Maximum number of runs of a reply.
fn runs_for(request: &Request) -> usize {
    if request.flags.contains(Flags::ONE_EXTENT) { 1 } else { RUNS_MAX }
}

impl InFlight {
    fn on(disk: &Arc<Disk>) -> InFlight {
        disk.in_flight.fetch_add(1, Ordering::Relaxed);
        InFlight(disk.clone())
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A query under way; if its job is dropped, others ask again.
struct Asked {
    handle: Arc<Handle>,
    part: u64,
}

impl Drop for Asked {
    fn drop(&mut self) {
        if let Some(mut scan) = self.handle.disk.scan() {
            scan.lost(self.part);
        }
    }
}

impl Device for VddkDevice {
    fn facts(&self) -> Arc<Facts> {
        self.0.facts.clone()
    }

    fn submit(&self, request: Request) -> Pending {
        let (at, len) = (request.at, request.len);
        match request.op {
            Op::Read(room) => self.0.transfer(at, len, Memory::Read(room.into_buf())),
            Op::Write(data) => self.0.transfer(at, len, Memory::Write(aligned(data))),
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
