//! One request, from its chain to its status.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use blockhaul_block::{Can, Device, Error, Kind, OpKind, Outcome, Reply, Request, RequestFlags};
use blockhaul_io::{Data, Reservation};
use vm_memory::{Bytes as _, GuestAddress};

use super::QueueTask;
use crate::blk::{BlkCommand, BlkStatus, DiscardRange, HEADER, ID, RANGE, SECTOR};
use crate::chain::{self, Chain, MalformedChain, Segment};
use crate::memory::Memory;
use crate::ring::RingError;

/// Of requests that complete at once, one in this many is timed.
const TIMED: u8 = 16;
/// Maximum length of a read or write in bytes.
const TRANSFER_MAX: u64 = 32 << 20;

/// A request that was taken from the ring.
struct RingRequest {
    memory: Arc<Memory>,
    head: u16,
    /// The driver's memory for data.
    writable: Vec<Segment>,
    /// The driver's memory for the status.
    status: GuestAddress,
}

/// What the device is asked for.
struct RequestSummary {
    kind: OpKind,
    len: u64,
}

impl QueueTask {
    /// Carries out the request of a chain. Returns its bytes.
    pub(super) async fn request(
        self: &Rc<Self>,
        memory: &Arc<Memory>,
        device: &Arc<dyn Device>,
        head: u16,
    ) -> u64 {
        let Ok((asked, command, mut readable)) = RingRequest::read(memory, &self.layout, head)
        else {
            log::debug!("a guest's request is malformed");
            self.give_back(memory, head, 0, false);
            return 0;
        };
        let command = match command {
            Ok(command) => command,
            Err(status) => {
                self.answer(asked, status, 0, false);
                return 0;
            }
        };
        chain::after(&mut readable, HEADER);
        let made = match command {
            BlkCommand::Id => {
                self.identify(asked);
                return 0;
            }
            BlkCommand::Read(at) => self.read(&asked, device, at).await,
            BlkCommand::Write(at) => self.write(&asked, device, at, &readable).await,
            BlkCommand::Flush if device.facts().can.contains(Can::FLUSH) => Ok(Request::flush()),
            BlkCommand::Flush => {
                self.answer(asked, BlkStatus::Ok, 0, false);
                return 0;
            }
            BlkCommand::Discard | BlkCommand::Zero => ranged(&asked, device, command, &readable),
        };
        // Zeroes would take the place of data.
        if self.space.is_lost() {
            self.give_up(RingError::Lost);
            return 0;
        }
        match made {
            Ok(request) => {
                let bytes = request.len;
                self.submit(device, asked, request);
                bytes
            }
            Err(status) => {
                self.answer(asked, status, 0, false);
                0
            }
        }
    }

    async fn read(
        &self,
        asked: &RingRequest,
        device: &Arc<dyn Device>,
        at: u64,
    ) -> Result<Request, BlkStatus> {
        let len = checked(device, at, chain::total(&asked.writable))?;
        Ok(Request::read(at, self.room(len).await?))
    }

    async fn write(
        &self,
        asked: &RingRequest,
        device: &Arc<dyn Device>,
        at: u64,
        readable: &[Segment],
    ) -> Result<Request, BlkStatus> {
        let can = device.facts().can;
        if !can.contains(Can::WRITE) {
            return Err(BlkStatus::Failed);
        }
        let len = checked(device, at, chain::total(readable))?;
        let mut buf = self.room(len).await?.into_buf();
        chain::gather(&asked.memory, readable, &mut buf)
            .map_err(|MalformedChain| BlkStatus::Failed)?;
        Ok(Request::write(at, Data::from(buf)).with(self.disk.write_flags(can)))
    }

    /// Memory for data; the driver is notified of what is done before this waits.
    async fn room(&self, len: usize) -> Result<Reservation, BlkStatus> {
        if let Some(room) = self.disk.pool.try_reserve(len) {
            return Ok(room);
        }
        self.call_now();
        self.disk.pool.reserve(len).await.map_err(|_| BlkStatus::Failed)
    }

    fn identify(self: &Rc<Self>, asked: RingRequest) {
        let len = chain::total(&asked.writable).min(ID as u64);
        let id = usize::try_from(len).map_or(&[][..], |len| &self.disk.id[..len]);
        match chain::scatter(&asked.memory, &asked.writable, id) {
            Ok(()) => self.answer(asked, BlkStatus::Ok, len, false),
            Err(MalformedChain) => self.answer(asked, BlkStatus::Failed, 0, false),
        }
    }

    /// Submits a request to the device, and answers when it completes.
    fn submit(self: &Rc<Self>, device: &Arc<dyn Device>, asked: RingRequest, request: Request) {
        let wanted = RequestSummary { kind: request.kind(), len: request.len };
        let begun = self.begin(wanted.kind);
        match self.disk.submit(device, request) {
            Ok(outcome) => {
                self.completed_at_once(wanted.kind, begun);
                self.complete(asked, &wanted, outcome, false);
            }
            Err(pending) => {
                let begun = blockhaul_io::now();
                let running = QueueRequest::begin(self);
                drop(blockhaul_io::start(async move {
                    let outcome = pending.await;
                    let queue = running.0.clone();
                    queue.disk.watch.took(wanted.kind, blockhaul_io::elapsed(begun), 1);
                    queue.complete(asked, &wanted, outcome, true);
                    drop(running);
                }));
            }
        }
    }

    fn complete(
        self: &Rc<Self>,
        asked: RingRequest,
        wanted: &RequestSummary,
        outcome: Outcome,
        soon: bool,
    ) {
        let done = outcome.and_then(|reply| deliver(&asked, wanted, reply));
        let watch = &self.disk.watch;
        match done {
            Ok(written) => {
                watch.answered(wanted.kind, Some(wanted.len));
                self.answer(asked, BlkStatus::Ok, written, soon);
            }
            Err(error) => {
                watch.answered(wanted.kind, None);
                self.disk.log(&error);
                let status = match error.kind() {
                    Kind::Unsupported => BlkStatus::Unsupported,
                    _ => BlkStatus::Failed,
                };
                self.answer(asked, status, 0, soon);
            }
        }
    }

    /// Writes the status, and gives the chain back.
    fn answer(self: &Rc<Self>, asked: RingRequest, status: BlkStatus, written: u64, soon: bool) {
        let RingRequest { memory, head, status: at, .. } = asked;
        let status = memory.write_obj(status as u8, at);
        // A status that cannot be written is the driver's fault; it gets its chain back.
        let written = status.map_or(0, |()| u32::try_from(written + 1).unwrap_or(u32::MAX));
        self.give_back(&memory, head, written, soon);
    }

    /// The current time, if the next request of this kind is to be timed even if it completes at once.
    fn begin(&self, kind: OpKind) -> Option<Instant> {
        self.untimed[kind as usize].get().is_multiple_of(TIMED).then(blockhaul_io::now)
    }

    fn completed_at_once(&self, kind: OpKind, begun: Option<Instant>) {
        let untimed = &self.untimed[kind as usize];
        match begun {
            None => untimed.set(untimed.get() + 1),
            Some(begun) => {
                // The first one counts only for itself.
                let count = 1 + u64::from(untimed.get().saturating_sub(1));
                self.disk.watch.took(kind, blockhaul_io::elapsed(begun), count);
                untimed.set(1);
            }
        }
    }
}

impl RingRequest {
    /// Reads a chain, and the header of its request. The third part is what follows that and the
    /// header itself.
    #[expect(clippy::type_complexity, reason = "three parts of one chain")]
    fn read(
        memory: &Arc<Memory>,
        ring: &crate::ring::RingLayout,
        head: u16,
    ) -> Result<(RingRequest, Result<BlkCommand, BlkStatus>, Vec<Segment>), MalformedChain> {
        let Chain { readable, mut writable } = Chain::read(memory, ring, head)?;
        let status = chain::last_byte(&mut writable).ok_or(MalformedChain)?;
        let mut header = [0; HEADER];
        chain::gather(memory, &readable, &mut header)?;
        let asked = RingRequest { memory: memory.clone(), head, writable, status };
        Ok((asked, BlkCommand::parse(&header), readable))
    }
}

/// The length of a read or write that is inside the device, and not too long.
fn checked(device: &Arc<dyn Device>, at: u64, len: u64) -> Result<usize, BlkStatus> {
    let facts = device.facts();
    let longest = TRANSFER_MAX.min(facts.block.maximum.into());
    let end = at.checked_add(len).ok_or(BlkStatus::Failed)?;
    if len == 0 || !len.is_multiple_of(SECTOR) || len > longest || end > facts.size {
        return Err(BlkStatus::Failed);
    }
    usize::try_from(len).map_err(|_| BlkStatus::Failed)
}

/// A discard or write zeroes request.
fn ranged(
    asked: &RingRequest,
    device: &Arc<dyn Device>,
    command: BlkCommand,
    readable: &[Segment],
) -> Result<Request, BlkStatus> {
    // One range, as the configuration says.
    if chain::total(readable) != RANGE as u64 {
        return Err(BlkStatus::Unsupported);
    }
    let mut bytes = [0; RANGE];
    chain::gather(&asked.memory, readable, &mut bytes)
        .map_err(|MalformedChain| BlkStatus::Failed)?;
    let DiscardRange { at, len, unmap } = DiscardRange::parse(&bytes)?;
    let facts = device.facts();
    if at.checked_add(len).is_none_or(|end| end > facts.size) {
        return Err(BlkStatus::Failed);
    }
    let zeroes = command == BlkCommand::Zero;
    // The flag is for zeroes only.
    if unmap && !zeroes {
        return Err(BlkStatus::Unsupported);
    }
    let needed = if zeroes { Can::ZERO } else { Can::TRIM };
    if !facts.can.contains(needed | Can::WRITE) {
        return Err(BlkStatus::Unsupported);
    }
    Ok(if !zeroes {
        Request::trim(at, len)
    } else if unmap {
        Request::zero(at, len)
    } else {
        Request::zero(at, len).with(RequestFlags::NO_HOLE)
    })
}

/// Copies what was read to the driver's memory. Returns the number of bytes.
fn deliver(asked: &RingRequest, wanted: &RequestSummary, reply: Reply) -> Result<u64, Error> {
    let outside =
        |MalformedChain| Error::new(Kind::Invalid, "a buffer is not in the guest's memory");
    let RingRequest { memory, writable, .. } = asked;
    match (reply, wanted.kind) {
        (Reply::Data(data), OpKind::Read) if data.len() as u64 == wanted.len => {
            data.load()
                .map_err(|error| Error::new(Kind::Io, "the data was lost").because(error))?;
            chain::scatter(memory, writable, data.bytes()).map_err(outside)?;
            Ok(wanted.len)
        }
        (Reply::Hole, OpKind::Read) => {
            clear(memory, writable).map_err(outside)?;
            Ok(wanted.len)
        }
        (Reply::Done, kind) if kind != OpKind::Read => Ok(0),
        _ => Err(Error::misfit()),
    }
}

/// Fills the segments with zeroes.
fn clear(memory: &Memory, segments: &[Segment]) -> Result<(), MalformedChain> {
    for segment in segments {
        let mut at = segment.at.0;
        let mut left = segment.len as usize;
        while left > 0 {
            let part = left.min(Data::ZEROES_MAX);
            let zeroes = Data::zeroes(part);
            memory.write_slice(zeroes.bytes(), GuestAddress(at)).map_err(|_| MalformedChain)?;
            at = at.checked_add(part as u64).ok_or(MalformedChain)?;
            left -= part;
        }
    }
    Ok(())
}

/// A request that the device has; not any more when this is dropped.
struct QueueRequest(Rc<QueueTask>);

impl QueueRequest {
    fn begin(queue: &Rc<QueueTask>) -> QueueRequest {
        queue.running.update(|count| count + 1);
        queue.disk.watch.begun();
        QueueRequest(queue.clone())
    }
}

impl Drop for QueueRequest {
    fn drop(&mut self) {
        self.0.running.update(|count| count - 1);
        self.0.disk.watch.ended();
        self.0.completed.notify();
    }
}
