//! An open handle of a plugin as a device: requests become messages, answers become replies.

use std::sync::Arc;

use blockhaul_block::{
    Device, Error, Facts, Kind, Op as BlockOp, OpKind, Outcome, PendingRequest, Reply, Request,
    RequestFlags, Result,
};
use blockhaul_io::{Completer, Data, Reservation, SharedPart};

use crate::facts::{self, PythonAbility};
use crate::host::{HostState, PendingReply, RequestCompletion, RequestMemory};
use crate::visit::PythonConnection;
use crate::wire::{self, HostCommand, HostRequest};

/// Maximum length of calls without a payload: nbdkit's lengths have 32 bits; aligned to any block.
const RANGE_MAX: u64 = 0xffff_0000;
/// Bytes read at a time to warm a cache.
const WARM: u64 = 1 << 20;

/// An open handle. Closed when dropped.
pub(crate) struct PythonHandle {
    pub(crate) visitor: Arc<PythonConnection>,
    pub(crate) number: u32,
    pub(crate) facts: Arc<Facts>,
    /// Whether `zero` is called at all.
    pub(crate) native_zero: bool,
    pub(crate) fua: PythonAbility,
    pub(crate) cache: PythonAbility,
}

/// A handle as a device.
pub(crate) struct PythonDevice(pub(crate) Arc<PythonHandle>);

impl Device for PythonDevice {
    fn facts(&self) -> Arc<Facts> {
        self.0.facts.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        let handle = self.0.clone();
        let emulated =
            request.flags.contains(RequestFlags::FUA) && handle.fua != PythonAbility::Native;
        match request.kind() {
            OpKind::Read | OpKind::Write | OpKind::Flush | OpKind::Extents if !emulated => {
                handle.one(request)
            }
            _ => PendingRequest::start(handle.several(request)),
        }
    }
}

/// A request, for what is done with its answer.
#[derive(Clone, Copy)]
struct RequestShape {
    kind: OpKind,
    at: u64,
    len: u64,
    flags: RequestFlags,
}

impl PythonHandle {
    fn inner(&self) -> &Arc<HostState> {
        &self.visitor.host.inner
    }

    /// A request that is one call of the plugin.
    fn one(self: Arc<PythonHandle>, request: Request) -> PendingRequest {
        let lent = match request.op {
            BlockOp::Read(_) | BlockOp::Write(_) => request.len,
            _ => return self.call(request, None),
        };
        let len = usize::try_from(lent).expect("at most the maximum of the facts");
        if let Some(part) = self.inner().memory.try_take(len) {
            return self.call(request, Some(part));
        }
        PendingRequest::start(async move {
            match self.inner().memory.take(len).await {
                Some(part) => self.call(request, Some(part)).await,
                None => Err(Error::new(Kind::NoMemory, "the request exceeds the shared memory")),
            }
        })
    }

    /// Sends a request, with its memory.
    fn call(self: Arc<PythonHandle>, request: Request, part: Option<SharedPart>) -> PendingRequest {
        let kind = request.kind();
        let at = request.at;
        let len = request.len;
        let flags = request.flags;
        let (completer, pending) = PendingRequest::completer();
        let mut part = part;
        let mut room = None;
        match request.op {
            BlockOp::Read(reservation) => room = Some(reservation),
            BlockOp::Write(data) => {
                if let Err(error) = data.load() {
                    return Error::system("cannot read the data to write", error).into();
                }
                if let Some(part) = &mut part {
                    part.fill(data.bytes());
                }
            }
            _ => {}
        }
        let fua = flags.contains(RequestFlags::FUA) && self.fua == PythonAbility::Native;
        let ask = HostRequest {
            op: HostCommand::of(kind),
            flags: wire::flags(kind, flags, fua),
            handle: self.number,
            at,
            len: len.min(RANGE_MAX),
            memory: part.as_ref().map_or(0, SharedPart::at),
        };
        let asked = RequestShape { kind, at, len, flags };
        let finish = self.clone().finish(asked, room, completer);
        let cookie = self.inner().ask(ask, &[], PendingReply { memory: part, finish });
        self.with_timeout(pending, kind, cookie)
    }

    /// What is done with the answer.
    fn finish(
        self: Arc<PythonHandle>,
        asked: RequestShape,
        room: Option<Reservation>,
        completer: Completer<Outcome>,
    ) -> RequestCompletion {
        Box::new(move |answer, memory| {
            let outcome = answer.and_then(|payload| match (asked.kind, room) {
                (OpKind::Read, Some(room)) => read(room, memory),
                (OpKind::Extents, _) => self.extents(payload, asked),
                _ => Ok(Reply::Done),
            });
            // Before the reply: its receiver may check whether the handle is still open.
            drop(self);
            completer.complete(outcome);
        })
    }

    fn extents(&self, payload: &[u8], asked: RequestShape) -> Outcome {
        let RequestShape { at, len, flags, .. } = asked;
        let mut extents = facts::extents(payload, at, self.facts.size).map_err(|why| {
            Error::new(Kind::Io, format!("{}: extents: {why}", self.facts.name)).complete()
        })?;
        extents.truncate(len);
        if flags.contains(RequestFlags::ONE_EXTENT) {
            extents.first_only();
        }
        Ok(Reply::Extents(vec![extents]))
    }

    /// Fails a request without an answer in time. Its memory stays lent until the answer; a plugin
    /// that does not answer within the same time again is killed, which bounds what it can hold.
    fn with_timeout(
        self: Arc<PythonHandle>,
        pending: PendingRequest,
        kind: OpKind,
        cookie: u64,
    ) -> PendingRequest {
        let Some(limit) = self.inner().timeout else { return pending };
        PendingRequest::start(async move {
            if let Ok(outcome) = blockhaul_io::timeout(limit, pending).await {
                return outcome;
            }
            let inner = self.inner().clone();
            inner.cancel(self.number, cookie);
            let error = inner.too_late(kind.name(), limit);
            drop(blockhaul_io::spawn(async move {
                blockhaul_io::sleep(limit).await;
                if inner.is_waiting(cookie) {
                    log::error!("{}: a callback does not return; it is killed", inner.shown);
                    inner.process.kill();
                }
            }));
            Err(error)
        })
    }

    /// A request that may need several calls.
    async fn several(self: Arc<PythonHandle>, request: Request) -> Outcome {
        let Request { op, at, len, flags } = request;
        let fua = flags.contains(RequestFlags::FUA);
        let native = fua && self.fua == PythonAbility::Native;
        let passed = if native { flags } else { flags - RequestFlags::FUA };
        match op {
            BlockOp::Zero => self.clone().zero(at, len, passed).await?,
            BlockOp::Trim => self.clone().pieces(OpKind::Trim, at, len, passed).await?,
            BlockOp::Cache if self.cache == PythonAbility::Emulate => {
                self.clone().warm(at, len).await?
            }
            BlockOp::Cache => self.clone().pieces(OpKind::Cache, at, len, passed).await?,
            op => {
                let request = Request { op, at, len, flags: passed };
                drop(self.clone().one(request).await?);
            }
        }
        if fua && !native {
            drop(self.one(Request::flush()).await?);
        }
        Ok(Reply::Done)
    }

    async fn pieces(
        self: Arc<PythonHandle>,
        kind: OpKind,
        at: u64,
        len: u64,
        flags: RequestFlags,
    ) -> Result<()> {
        for (at, len) in pieces(at, len, RANGE_MAX) {
            let request = match kind {
                OpKind::Trim => Request::trim(at, len),
                OpKind::Zero => Request::zero(at, len),
                _ => Request::cache(at, len),
            };
            drop(self.clone().one(request.with(flags)).await?);
        }
        Ok(())
    }

    /// The plugin's zero, or writes if that is not supported.
    async fn zero(self: Arc<PythonHandle>, at: u64, len: u64, flags: RequestFlags) -> Result<()> {
        let fast = flags.contains(RequestFlags::FAST);
        for (at, len) in pieces(at, len, RANGE_MAX) {
            if self.native_zero {
                match self.clone().pieces(OpKind::Zero, at, len, flags).await {
                    Ok(()) => continue,
                    Err(error) if error.kind() == Kind::Unsupported && !fast => {}
                    Err(error) => return Err(error),
                }
            }
            if fast {
                let text = "zeroing is no faster than writing here";
                return Err(Error::new(Kind::Unsupported, text));
            }
            self.clone().write_zeroes(at, len, flags & RequestFlags::FUA).await?;
        }
        Ok(())
    }

    async fn write_zeroes(
        self: Arc<PythonHandle>,
        at: u64,
        len: u64,
        flags: RequestFlags,
    ) -> Result<()> {
        let most = (Data::ZEROES_MAX as u64).min(self.facts.block.maximum.into());
        let most = most - most % u64::from(self.facts.block.minimum.max(1));
        for (at, len) in pieces(at, len, most.max(1)) {
            let data = Data::zeroes(usize::try_from(len).expect("a piece is small"));
            drop(self.clone().one(Request::write(at, data).with(flags)).await?);
        }
        Ok(())
    }

    /// Reads, and drops what was read.
    async fn warm(self: Arc<PythonHandle>, at: u64, len: u64) -> Result<()> {
        let most = u64::from(self.facts.block.maximum).min(WARM);
        for (at, len) in pieces(at, len, most) {
            let room = Reservation::unpooled(usize::try_from(len).expect("a piece is small"));
            drop(self.clone().one(Request::read(at, room)).await?);
        }
        Ok(())
    }
}

/// The reply of a read, in the memory that the plugin has filled.
fn read(room: Reservation, memory: RequestMemory) -> Outcome {
    let misfit = || Error::misfit();
    match memory {
        RequestMemory::Ours(part) => {
            let buf = room.into_shared(part).map_err(|_| misfit())?;
            Ok(Reply::Data(buf.into()))
        }
        RequestMemory::Copied(bytes) => {
            let mut buf = room.into_buf();
            let len = buf.len();
            buf.copy_from_slice(bytes.get(..len).ok_or_else(misfit)?);
            Ok(Reply::Data(buf.into()))
        }
        RequestMemory::None => Err(misfit()),
    }
}

impl Drop for PythonHandle {
    fn drop(&mut self) {
        self.inner().notify(HostCommand::Close, self.number, self.visitor.number);
    }
}

/// A range in pieces of at most `most` bytes.
fn pieces(at: u64, len: u64, most: u64) -> impl Iterator<Item = (u64, u64)> {
    let mut done = 0;
    std::iter::from_fn(move || {
        let count = (len - done).min(most);
        let piece = (at + done, count);
        done += count;
        (count > 0).then_some(piece)
    })
}
