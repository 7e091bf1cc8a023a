//! `impl Device` over one connection.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use blockhaul_block::{
    BlockSizes, Can, ContextSet, Device, Error, Facts, Kind, Op, OpKind, PendingRequest, Reply,
    Request, RequestFlags, Result,
};
use blockhaul_catalog::Claim;
use blockhaul_io::Data;
use blockhaul_wire::handshake::client::ClientHandshakeResult;
use blockhaul_wire::request::{RequestHeader, StatusFilter};
use blockhaul_wire::{CommandCode, CommandFlags, ExportFlags, MetaContext, ReplyForm, RequestForm};

use crate::ServerProcess;
use crate::link::HandshakeLink;
use crate::reply::{ReadMemory, RequestFacts};
use crate::session::{self, ClientSession, ServerTimeouts};

/// Pieces of a long zero or trim request in flight at a time, for 32-bit lengths.
const PIECES_IN_FLIGHT: usize = 16;

struct NbdDevice {
    connection: Arc<SharedConnection>,
    export: Arc<ExportProperties>,
}

/// What a handshake has found out about an export: the facts of its device, and what its requests depend on.
pub(crate) struct ExportProperties {
    pub(crate) facts: Arc<Facts>,
    pub(crate) headers: RequestForm,
    pub(crate) replies: ReplyForm,
    /// IDs of the contexts, by their index in the facts.
    ids: Vec<u32>,
    /// The ID of `base:allocation`, if it was selected.
    allocation: Option<u32>,
    /// The server accepts block status requests for a subset of the contexts.
    filter: bool,
    /// Maximum effect length of one request.
    pub(crate) effect_max: u64,
}

/// A request, and what its reply is for.
pub(crate) struct RequestMessage {
    /// The header; its cookie is 0.
    pub(crate) header: RequestHeader,
    /// The IDs of the contexts whose block status is asked for.
    pub(crate) contexts: Vec<u32>,
    pub(crate) payload: RequestPayload,
    pub(crate) facts: RequestFacts,
    /// Memory for the reply to a read of a device.
    pub(crate) reading: Option<Box<ReadMemory>>,
}

/// The bytes after a request's header.
pub(crate) enum RequestPayload {
    None,
    Data(Data),
    Bytes(Vec<u8>),
}

impl RequestPayload {
    /// Length in bytes.
    pub(crate) fn len(&self) -> usize {
        match self {
            RequestPayload::None => 0,
            RequestPayload::Data(data) => data.len(),
            RequestPayload::Bytes(bytes) => bytes.len(),
        }
    }
}

impl RequestMessage {
    /// A request without payload or contexts.
    pub(crate) fn new(kind: OpKind, at: u64, len: u64, flags: RequestFlags) -> RequestMessage {
        let (command, offset, length) = match kind {
            OpKind::Read => (CommandCode::Read, at, len),
            OpKind::Write => (CommandCode::Write, at, len),
            OpKind::Zero => (CommandCode::WriteZeroes, at, len),
            OpKind::Trim => (CommandCode::Trim, at, len),
            // nbd: flush.zero
            OpKind::Flush => (CommandCode::Flush, 0, 0),
            OpKind::Cache => (CommandCode::Cache, at, len),
            OpKind::Extents => (CommandCode::BlockStatus, at, len),
        };
        let one = flags.contains(RequestFlags::ONE_EXTENT);
        RequestMessage {
            header: RequestHeader {
                flags: command_flags(flags),
                command,
                cookie: 0,
                offset,
                length,
            },
            contexts: Vec::new(),
            payload: RequestPayload::None,
            facts: RequestFacts { kind, at, len, one, allocation: None },
            reading: None,
        }
    }
}

/// A connection in use by a device and by requests sent in pieces. The last user sends the
/// disconnect request.
struct SharedConnection {
    session: Arc<ClientSession>,
    _companions: Companions,
}

/// What outlives the connections to an export.
#[derive(Clone, Default)]
pub struct Companions {
    /// The server, if it was started for these connections.
    pub process: Option<Arc<ServerProcess>>,
    /// The claim on the export.
    pub claim: Option<Arc<Claim>>,
}

impl Drop for SharedConnection {
    fn drop(&mut self) {
        self.session.close();
    }
}

/// Makes a device from a negotiated connection; its tasks run on this worker.
pub(crate) fn open(
    name: &str,
    link: HandshakeLink,
    negotiated: &ClientHandshakeResult,
    (timeout, min_rate): (Duration, u64),
    companions: Companions,
) -> Result<Arc<dyn Device>> {
    let export = Arc::new(ExportProperties::over(&link, name, negotiated));
    let patience = ServerTimeouts { name: name.to_string(), timeout, min_rate };
    let device = start(link, export.clone(), patience, companions);
    // If it is too large, the connection ends with a disconnect request.
    export.check()?;
    Ok(device)
}

/// Makes a device from a connection whose export is known; its tasks run on this worker.
pub(crate) fn over(
    link: HandshakeLink,
    export: Arc<ExportProperties>,
    timeout: Duration,
) -> Arc<dyn Device> {
    let patience = ServerTimeouts { name: export.facts.name.to_string(), timeout, min_rate: 0 };
    start(link, export, patience, Companions::default())
}

fn start(
    link: HandshakeLink,
    export: Arc<ExportProperties>,
    patience: ServerTimeouts,
    companions: Companions,
) -> Arc<dyn Device> {
    let session = session::start(link, export.headers, export.replies, patience);
    let connection = Arc::new(SharedConnection { session, _companions: companions });
    Arc::new(NbdDevice { connection, export })
}

impl ExportProperties {
    /// The result of the handshake over this connection; `name` is for messages.
    pub(crate) fn over(
        link: &HandshakeLink,
        name: &str,
        negotiated: &ClientHandshakeResult,
    ) -> ExportProperties {
        let info = &negotiated.info;
        let mut facts = Facts::new(name, info.size);
        facts.description = info.description.clone().unwrap_or_default();
        facts.can = abilities(info.flags, !negotiated.contexts.is_empty());
        // TLS needs the bytes in memory.
        facts.takes_parked = !negotiated.tls && !link.stream.is_local_tcp();
        facts.claims_room = true;
        if link.has_own_server && facts.can.contains(Can::WRITE) {
            // Another connection has another server, which does not see what this one caches.
            facts.can -= Can::MULTI_CONN;
        }
        facts.one_handle = link.is_relayed && !facts.can.contains(Can::MULTI_CONN);
        facts.rotational = info.flags.contains(ExportFlags::ROTATIONAL);
        // nbd: sizes.aligned
        facts.block = block_sizes(negotiated);
        facts.allocation_unit = facts.block.preferred;
        let mut contexts: Vec<_> = negotiated.contexts.iter().take(ContextSet::MAX).collect();
        // Callers expect it at index 0, wherever the server put it.
        contexts.sort_by_key(|context| context.name != blockhaul_block::BASE_ALLOCATION);
        facts.contexts = contexts.iter().map(|context| context.name.clone()).collect();
        // nbd: meta.id-opaque
        let ids = contexts.iter().map(|context| context.id).collect();
        let is_allocation =
            |context: &&&MetaContext| context.name == blockhaul_block::BASE_ALLOCATION;
        let allocation = contexts.iter().find(is_allocation).map(|context| context.id);
        let effect_max = match negotiated.headers {
            RequestForm::Extended => u64::MAX,
            // The largest 32-bit length that is aligned to every block size.
            RequestForm::Compact => u64::from(u32::MAX - 0xffff),
        };
        ExportProperties {
            facts: Arc::new(facts),
            headers: negotiated.headers,
            replies: negotiated.replies,
            ids,
            allocation,
            filter: info.flags.contains(ExportFlags::BLOCK_STATUS_PAYLOAD),
            effect_max,
        }
    }

    /// Refuses an export that is longer than any device.
    pub(crate) fn check(&self) -> Result<()> {
        let size = self.facts.size;
        match i64::try_from(size) {
            Ok(_) => Ok(()),
            Err(_) => {
                let text = format!("the server reported an export of {size} bytes");
                Err(Error::new(Kind::TooLarge, text))
            }
        }
    }

    /// The message of a request.
    pub(crate) fn message(&self, request: Request) -> RequestMessage {
        let kind = request.kind();
        let Request { op, at, len, flags } = request;
        let mut message = RequestMessage::new(kind, at, len, flags);
        match op {
            Op::Read(room) => message.reading = Some(Box::new(ReadMemory::new(room, len))),
            Op::Write(data) => message.payload = RequestPayload::Data(data),
            Op::Extents(contexts) => self.ask_for(contexts, &mut message),
            Op::Zero | Op::Trim | Op::Flush | Op::Cache => {}
        }
        message
    }

    /// Completes the message of a block status request.
    fn ask_for(&self, contexts: ContextSet, message: &mut RequestMessage) {
        let RequestMessage { header, contexts: ids, facts, .. } = message;
        header.length = facts.len.min(self.effect_max);
        facts.len = header.length;
        facts.allocation = self.allocation;
        ids.extend(contexts.iter().filter_map(|i| self.ids.get(i).copied()));
        if self.filter && ids.len() < self.ids.len() {
            let filter = StatusFilter { length: header.length, contexts: ids.clone() };
            let mut bytes = Vec::new();
            filter.emit(&mut bytes);
            header.length = filter.payload_len();
            header.flags |= CommandFlags::PAYLOAD_LEN;
            message.payload = RequestPayload::Bytes(bytes);
        }
    }

    /// Whether this request can be sent as it is: the server offers it, and it complies with its block sizes.
    /// Reads and writes may be longer than one request.
    pub(crate) fn takes(&self, kind: OpKind, at: u64, len: u64, flags: RequestFlags) -> bool {
        let facts = &self.facts;
        let mut needed = match kind {
            OpKind::Read => Can::empty(),
            OpKind::Write => Can::WRITE,
            OpKind::Zero => Can::ZERO,
            OpKind::Trim => Can::TRIM,
            OpKind::Flush => Can::FLUSH,
            OpKind::Cache => Can::CACHE,
            OpKind::Extents => Can::EXTENTS,
        };
        needed.set(Can::FUA, flags.contains(RequestFlags::FUA));
        needed.set(Can::FAST_ZERO, flags.contains(RequestFlags::FAST));
        let aligned = facts.block.fits(at, len, facts.size);
        let inside = at.checked_add(len).is_some_and(|end| end <= facts.size);
        let whole = matches!(kind, OpKind::Read | OpKind::Write) || len <= self.effect_max;
        let ranged = kind == OpKind::Flush || (len > 0 && aligned && inside && whole);
        facts.can.contains(needed) && ranged
    }
}

// nbd: flags.only-offered, baseline.negotiated
fn abilities(flags: ExportFlags, contexts: bool) -> Can {
    let mut can = Can::empty();
    // nbd: flush.offered
    can.set(Can::FLUSH, flags.contains(ExportFlags::SEND_FLUSH));
    can.set(Can::CACHE, flags.contains(ExportFlags::SEND_CACHE));
    can.set(Can::MULTI_CONN, flags.contains(ExportFlags::CAN_MULTI_CONN));
    // nbd: meta.needs-selection, block-status.needs-selection
    can.set(Can::EXTENTS, contexts);
    if !flags.contains(ExportFlags::READ_ONLY) {
        can |= Can::WRITE;
        let fast_zero = ExportFlags::SEND_WRITE_ZEROES | ExportFlags::SEND_FAST_ZERO;
        can.set(Can::FUA, flags.contains(ExportFlags::SEND_FUA));
        // nbd: trim.offered
        can.set(Can::TRIM, flags.contains(ExportFlags::SEND_TRIM));
        // nbd: zeroes.offered
        can.set(Can::ZERO, flags.contains(ExportFlags::SEND_WRITE_ZEROES));
        // nbd: flags.fast-zero-client, zeroes.fast-offered
        can.set(Can::FAST_ZERO, flags.contains(fast_zero));
    }
    can
}

// nbd: sizes.obeyed, sizes.client-maximum
/// Limits of the server, within those of the protocol ("Size constraints").
fn block_sizes(negotiated: &ClientHandshakeResult) -> BlockSizes {
    let maximum = blockhaul_wire::BlockSizeInfo::DEFAULT.maximum;
    let usual = BlockSizes { maximum, ..BlockSizes::default() };
    match negotiated.info.block_sizes {
        None => usual,
        Some(sizes) => {
            // The codec rejects invalid sizes, but a maximum need not be a multiple of the minimum.
            let maximum = sizes.maximum.min(usual.maximum);
            let maximum = maximum - maximum % sizes.minimum;
            let preferred = sizes.preferred.min(1 << maximum.ilog2());
            BlockSizes { minimum: sizes.minimum, preferred, maximum }
        }
    }
}

impl Device for NbdDevice {
    fn facts(&self) -> Arc<Facts> {
        self.export.facts.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        let kind = request.kind();
        if matches!(kind, OpKind::Zero | OpKind::Trim | OpKind::Cache)
            && request.len > self.export.effect_max
        {
            return self.submit_in_pieces(request);
        }
        self.submit_one(request)
    }
}

impl NbdDevice {
    fn submit_one(&self, request: Request) -> PendingRequest {
        let (completer, pending) = PendingRequest::completer();
        self.connection.session.submit(self.export.message(request), completer);
        pending
    }

    /// A zero, trim or cache request longer than one request can express.
    fn submit_in_pieces(&self, request: Request) -> PendingRequest {
        let kind = request.kind();
        let Request { mut at, len: mut left, flags, .. } = request;
        // Delays the disconnect request until the last piece is sent.
        let connection = self.connection.clone();
        let max = self.export.effect_max;
        let mut next = move |flags| {
            let len = left.min(max);
            let message = RequestMessage::new(kind, at, len, flags);
            left -= len;
            at = at.saturating_add(len);
            let (completer, pending) = PendingRequest::completer();
            connection.session.submit(message, completer);
            (left > 0, pending)
        };
        PendingRequest::start(async move {
            let mut out = VecDeque::new();
            let mut more = true;
            let mut first_error = None;
            if flags.contains(RequestFlags::FAST) {
                // A fast zero request is refused before anything is zeroed, or carried out as a
                // whole.
                let (left, first) = next(flags);
                first.await?;
                more = left;
            }
            let flags = flags - RequestFlags::FAST;
            loop {
                while more && first_error.is_none() && out.len() < PIECES_IN_FLIGHT {
                    let (left, pending) = next(flags);
                    more = left;
                    out.push_back(pending);
                }
                // After an error the rest is still awaited: what was sent is drained.
                match out.pop_front() {
                    None => return first_error.map_or(Ok(Reply::Done), Err),
                    Some(pending) => {
                        if let Err(error) = pending.await {
                            first_error.get_or_insert(error);
                        }
                    }
                }
            }
        })
    }
}

// nbd: flags.df-client, command-flags.known, command-flags.df
fn command_flags(flags: RequestFlags) -> CommandFlags {
    CommandFlags::NONE
        .with(CommandFlags::FUA, flags.contains(RequestFlags::FUA))
        .with(CommandFlags::NO_HOLE, flags.contains(RequestFlags::NO_HOLE))
        .with(CommandFlags::FAST_ZERO, flags.contains(RequestFlags::FAST))
        .with(CommandFlags::REQ_ONE, flags.contains(RequestFlags::ONE_EXTENT))
}
