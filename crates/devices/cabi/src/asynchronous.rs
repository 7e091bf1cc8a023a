//! Plugins that reply later: requests are submitted on the worker, without blocking, and completed
//! by the functions in `answers`, from any thread.

mod answers;

use std::ffi::{CStr, c_void};
use std::sync::Arc;

use blockhaul_block::{
    Device, Error, Facts, Kind, Op, OpKind, Outcome, PendingRequest, Reply, Request, RequestFlags,
    Result,
};
use blockhaul_io::{Buf, Completer, Data};

use crate::abi;
use crate::async_abi::{AsyncPlugin, ConnectionToken};
use crate::context::{self, CallStage};
use crate::handle::{HandleToken, PluginHandle, RANGE_MAX, aligned};
use crate::lists;
use crate::plugin::Plugin;
use crate::watchdog::{self, WatchGuard, WatchKind};
use blockhaul_foreign::Charge;
use blockhaul_foreign::{RequestTable, RequestTables};

/// All requests of all connections.
static TABLES: RequestTables<LentRequest, Arc<Plugin>> = RequestTables::new();

/// A request that was lent to the plugin.
struct LentRequest {
    /// The waiter for the reply; none after a timeout.
    waiting: Option<Completer<Outcome>>,
    kind: OpKind,
    len: u64,
    flags: RequestFlags,
    memory: LentMemory,
    /// Keeps the plugin's handle open.
    handle: Arc<PluginHandle>,
    _charge: Charge,
    _watched: Option<WatchGuard>,
}

/// The memory lent to the plugin until the reply.
enum LentMemory {
    None,
    Read(Buf),
    Write(Data),
    Extents(Box<lists::ExtentList>),
}

/// A connection's requests; its token is the plugin's `conn`.
pub(crate) struct AsyncDevice {
    handle: Arc<PluginHandle>,
    asynchronous: AsyncPlugin,
    table: Arc<RequestTable<LentRequest, Arc<Plugin>>>,
}

// SAFETY: the raw pointer in the description is not dereferenced after it was read; the callbacks
// may be called on any thread (blockhaul-plugin.h).
unsafe impl Send for AsyncDevice {}
// SAFETY: as above.
unsafe impl Sync for AsyncDevice {}

impl AsyncDevice {
    /// The device of a handle of an asynchronous plugin.
    pub(crate) fn over(handle: Arc<PluginHandle>, asynchronous: AsyncPlugin) -> Arc<dyn Device> {
        let table = TABLES.open(handle.connection.plugin.clone());
        // Removed with the handle, which every request holds.
        let token = HandleToken { number: table.token(), forget: |token| TABLES.close(token) };
        let fresh = handle.token.set(token).is_ok();
        debug_assert!(fresh, "one device for each handle");
        Arc::new(AsyncDevice { handle, asynchronous, table })
    }

    fn plugin(&self) -> &Arc<Plugin> {
        &self.handle.connection.plugin
    }

    /// Whether the plugin has an asynchronous callback for this kind.
    fn takes(&self, kind: OpKind) -> bool {
        let plugin = &self.asynchronous;
        match kind {
            OpKind::Read => plugin.pread.is_some(),
            OpKind::Write => plugin.pwrite.is_some(),
            OpKind::Flush => plugin.flush.is_some(),
            OpKind::Trim => plugin.trim.is_some(),
            OpKind::Zero => plugin.zero.is_some(),
            OpKind::Extents => plugin.extents.is_some(),
            OpKind::Cache => plugin.cache.is_some(),
        }
    }

    /// Submits a request whose range fits the callbacks.
    fn lend(&self, request: Request, charge: Charge) -> PendingRequest {
        let kind = request.kind();
        let Request { op, at, len, flags } = request;
        let count = u32::try_from(len).expect("cut to fit before");
        let memory = match op {
            Op::Read(room) => LentMemory::Read(room.into_buf()),
            Op::Write(data) => LentMemory::Write(aligned(data)),
            Op::Extents(_) => {
                LentMemory::Extents(Box::new(lists::ExtentList::new(at, self.handle.facts.size)))
            }
            _ => LentMemory::None,
        };
        let (completer, pending) = PendingRequest::completer();
        // The block's memory does not move with its owner.
        let mut memory = memory;
        let pointer = match &mut memory {
            LentMemory::Read(buf) => buf.as_mut_ptr().cast::<c_void>(),
            LentMemory::Write(data) => data.bytes().as_ptr().cast_mut().cast(),
            LentMemory::Extents(list) => (&raw mut **list).cast(),
            LentMemory::None => std::ptr::null_mut(),
        };
        let context = &self.handle.context;
        let lent = LentRequest {
            waiting: Some(completer),
            kind,
            len,
            flags,
            memory,
            handle: self.handle.clone(),
            _charge: charge,
            _watched: watchdog::over(
                context.watchdog,
                &context.plugin,
                name_of(kind),
                WatchKind::Answer,
            ),
        };
        let number = self.table.enter(lent);
        self.call(kind, number, pointer, count, at, flags);
        self.with_timeout(pending, number, kind, at, len)
    }

    /// Calls the callback, which may reply before it returns.
    fn call(
        &self,
        kind: OpKind,
        number: u64,
        pointer: *mut c_void,
        count: u32,
        at: u64,
        flags: RequestFlags,
    ) {
        let plugin = &self.asynchronous;
        let conn = self.conn();
        let handle = self.handle.pointer.0;
        let fua = flags.contains(RequestFlags::FUA) && self.handle.has_native_fua();
        let (result, left) = context::call(&self.handle.context, name_of(kind), || {
            // SAFETY: callbacks of the header's types, with an open handle; the memory behind
            // `pointer` stays in the table until the reply, or a refusal by this call.
            unsafe {
                match kind {
                    OpKind::Read => plugin
                        .pread
                        .map(|call| call(conn, number, false, handle, pointer, count, at)),
                    OpKind::Write => plugin
                        .pwrite
                        .map(|call| call(conn, number, fua, handle, pointer, count, at)),
                    OpKind::Flush => plugin.flush.map(|call| call(conn, number, handle)),
                    OpKind::Trim => {
                        plugin.trim.map(|call| call(conn, number, fua, handle, count, at))
                    }
                    OpKind::Zero => plugin
                        .zero
                        .map(|call| call(conn, number, fua, handle, count, at, zero_flags(flags))),
                    OpKind::Extents => plugin.extents.map(|call| {
                        let one = flags.contains(RequestFlags::ONE_EXTENT);
                        let flags = if one { abi::FLAG_REQ_ONE } else { 0 };
                        call(conn, number, handle, count, at, flags, pointer)
                    }),
                    OpKind::Cache => plugin.cache.map(|call| call(conn, number, handle, count, at)),
                }
            }
        });
        if result == Some(0) {
            self.plugin().log_rest(&left, 0);
            return;
        }
        let error = match result {
            Some(-1) => self.plugin().error(&name_of(kind).to_string_lossy(), &left),
            other => Error::new(
                Kind::Io,
                format!(
                    "plugin {}: {} answered {} instead of 0 or -1",
                    self.plugin().name,
                    name_of(kind).to_string_lossy(),
                    other.unwrap_or_default()
                ),
            )
            .complete(),
        };
        match self.table.take(number) {
            Some(lent) => lent.finish(Err(error)),
            None => log::warn!(
                "plugin {} answered a request and refused it as well: {error}",
                self.plugin().name
            ),
        }
    }

    fn conn(&self) -> ConnectionToken {
        conn_of(self.table.token())
    }

    /// Fails a request without a reply in time; its memory stays lent until the reply.
    fn with_timeout(
        &self,
        pending: PendingRequest,
        number: u64,
        kind: OpKind,
        at: u64,
        len: u64,
    ) -> PendingRequest {
        let Some(limit) = self.plugin().host.timeout else { return pending };
        let table = self.table.clone();
        let plugin = self.plugin().clone();
        PendingRequest::start(async move {
            match blockhaul_io::timeout(limit, pending).await {
                Ok(outcome) => outcome,
                Err(blockhaul_io::TimeoutError) => {
                    // No waiter any more: the reply only returns the lent memory.
                    drop(table.with(number, |lent| lent.waiting.take()));
                    Err(plugin.no_answer(kind, at, len, CallStage::Over, limit))
                }
            }
        })
    }

    /// A request of any length, in pieces that fit the callbacks; zeroes are written if the plugin
    /// does not support zero.
    async fn pieces(self: Arc<Self>, request: Request) -> Outcome {
        let kind = request.kind();
        let flags = request.flags;
        let end = request.at + request.len;
        let mut at = request.at;
        while at < end {
            let len = (end - at).min(RANGE_MAX);
            let op = match kind {
                OpKind::Zero => Op::Zero,
                OpKind::Trim => Op::Trim,
                _ => Op::Cache,
            };
            match self.one(Request { op, at, len, flags }).await {
                Err(error)
                    if kind == OpKind::Zero
                        && error.kind() == Kind::Unsupported
                        && !flags.contains(RequestFlags::FAST) =>
                {
                    self.write_zeroes(at, len, flags & RequestFlags::FUA).await?;
                }
                outcome => drop(outcome?),
            }
            at += len;
        }
        Ok(Reply::Done)
    }

    async fn write_zeroes(&self, at: u64, len: u64, flags: RequestFlags) -> Result<()> {
        let most = (Data::ZEROES_MAX as u64).min(self.handle.facts.block.maximum.into());
        let (mut at, end) = (at, at + len);
        while at < end {
            let len = (end - at).min(most);
            let data = Data::zeroes(usize::try_from(len).expect("a piece is small"));
            self.one(Request::write(at, data).with(flags)).await?;
            at += len;
        }
        Ok(())
    }

    /// One request that fits the callbacks, followed by a flush if the plugin has no other FUA.
    async fn one(&self, request: Request) -> Outcome {
        let bytes = payload(&request);
        let flush = request.flags.contains(RequestFlags::FUA) && !self.handle.has_native_fua();
        let reply = match self.plugin().budget.take(bytes).await {
            Some(charge) => self.lend(request, charge).await?,
            None => return Err(Error::new(Kind::ShuttingDown, "the program ends")),
        };
        if flush {
            let flush = Request::flush();
            let charge = self.plugin().budget.take(0).await;
            match charge {
                Some(charge) if self.takes(OpKind::Flush) => self.lend(flush, charge).await?,
                _ => self.handle.submit(flush).await?,
            };
        }
        Ok(reply)
    }

    /// Another owner, for tasks.
    fn shared(&self) -> Arc<AsyncDevice> {
        Arc::new(AsyncDevice {
            handle: self.handle.clone(),
            asynchronous: self.asynchronous,
            table: self.table.clone(),
        })
    }
}

impl Device for AsyncDevice {
    fn facts(&self) -> Arc<Facts> {
        self.handle.facts.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        let kind = request.kind();
        if !self.takes(kind) {
            return self.handle.submit(request);
        }
        let ranges = matches!(kind, OpKind::Zero | OpKind::Trim | OpKind::Cache);
        let fua = request.flags.contains(RequestFlags::FUA) && !self.handle.has_native_fua();
        if ranges {
            let shared = self.shared();
            return PendingRequest::start(shared.pieces(request));
        }
        let mut request = request;
        if kind == OpKind::Extents {
            // A reply may cover less than requested.
            request.len = request.len.min(RANGE_MAX);
        }
        if !fua && let Some(charge) = self.plugin().budget.try_take(payload(&request)) {
            return self.lend(request, charge);
        }
        let shared = self.shared();
        PendingRequest::start(async move { shared.one(request).await })
    }
}

/// Notifies the plugin that the client of a handle's requests has disconnected, if it has any
/// requests.
pub(crate) fn cancel(handle: &PluginHandle) {
    let plugin = &handle.connection.plugin;
    let Some(call) = plugin.asynchronous.as_ref().and_then(|plugin| plugin.cancel) else { return };
    let Some(&HandleToken { number: token, .. }) = handle.token.get() else { return };
    if TABLES.find(token).is_none_or(|table| table.is_empty()) {
        return;
    }
    let pointer = handle.pointer.0;
    // SAFETY: the callback takes the connection's token and an open handle, on any thread.
    let ((), left) = context::call(&handle.context, c"async_cancel", || unsafe {
        call(conn_of(token), pointer);
    });
    plugin.log_rest(&left, 0);
}

/// A token for the plugin: never a real address.
fn conn_of(token: u64) -> ConnectionToken {
    std::ptr::without_provenance_mut(token as usize)
}

/// Number of bytes that a request lends.
fn payload(request: &Request) -> u64 {
    match request.op {
        Op::Read(_) | Op::Write(_) => request.len,
        _ => 0,
    }
}

fn zero_flags(flags: RequestFlags) -> u32 {
    let may_trim = if flags.contains(RequestFlags::NO_HOLE) { 0 } else { abi::FLAG_MAY_TRIM };
    let fast = if flags.contains(RequestFlags::FAST) { abi::FLAG_FAST_ZERO } else { 0 };
    may_trim | fast
}

fn name_of(kind: OpKind) -> &'static CStr {
    match kind {
        OpKind::Read => c"async_pread",
        OpKind::Write => c"async_pwrite",
        OpKind::Zero => c"async_zero",
        OpKind::Trim => c"async_trim",
        OpKind::Flush => c"async_flush",
        OpKind::Cache => c"async_cache",
        OpKind::Extents => c"async_extents",
    }
}
