//! Plugins that answer later: requests are handed over on the worker, without blocking, and answered by
//! the plugin's functions below, from any thread.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use block::{
    Device, Error, Facts, Flags, Kind, Op, OpKind, Outcome, Pending, Reply, Request, Result,
};
use io::{Buf, Completer, Data};

use crate::abi;
use crate::async_abi::{AsyncPlugin, Conn};
use crate::budget::Charge;
use crate::context::{self, Left};
use crate::handle::{Handle, RANGE_MAX};
use crate::lists;
use crate::plugin::Plugin;
use crate::table::{Table, Tables};

/// All requests of all connections.
static TABLES: Tables<Lent, Arc<Plugin>> = Tables::new();

/// A request that the plugin has.
struct Lent {
    /// Who waits for the answer; nobody any more after a timeout.
    waiting: Option<Completer<Outcome>>,
    kind: OpKind,
    len: u64,
    flags: Flags,
    memory: Memory,
    /// Keeps the plugin's handle open.
    handle: Arc<Handle>,
    _charge: Charge,
}

/// What a request lends to the plugin until the answer.
enum Memory {
    None,
    Read(Buf),
    Write(Data),
    Extents(Box<lists::Extents>),
}

/// A connection's requests; its token is the plugin's `conn`.
pub(crate) struct AsyncDevice {
    handle: Arc<Handle>,
    asynchronous: AsyncPlugin,
    table: Arc<Table<Lent, Arc<Plugin>>>,
}

// SAFETY: the raw pointer in the description is not looked behind after it was read; the callbacks may
// be called on any thread (blockhaul-plugin.h).
unsafe impl Send for AsyncDevice {}
// SAFETY: as above.
unsafe impl Sync for AsyncDevice {}

impl AsyncDevice {
    /// The device of a handle of an asynchronous plugin.
    pub(crate) fn over(handle: Arc<Handle>, asynchronous: AsyncPlugin) -> Arc<dyn Device> {
        let table = TABLES.open(handle.connection.plugin.clone());
        // Forgotten with the handle, which every request holds.
        let fresh = handle.token.set(table.token()).is_ok();
        debug_assert!(fresh, "one device for each handle");
        Arc::new(AsyncDevice { handle, asynchronous, table })
    }

    fn plugin(&self) -> &Arc<Plugin> {
        &self.handle.connection.plugin
    }

    /// Whether the plugin has an asynchronous callback for this.
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

    /// Hands a request over, whose range fits the callbacks.
    fn lend(&self, request: Request, charge: Charge) -> Pending {
        let Request { op, at, len, flags } = request;
        let kind = kind_of(&op);
        let count = u32::try_from(len).expect("cut to fit before");
        let memory = match op {
            Op::Read(room) => Memory::Read(room.into_buf()),
            Op::Write(data) => Memory::Write(aligned(data)),
            Op::Extents(_) => {
                Memory::Extents(Box::new(lists::Extents::new(at, self.handle.facts.size)))
            }
            _ => Memory::None,
        };
        let (completer, pending) = Pending::completer();
        // Block memory does not move with its owner.
        let mut memory = memory;
        let pointer = match &mut memory {
            Memory::Read(buf) => buf.as_mut_ptr().cast::<c_void>(),
            Memory::Write(data) => data.bytes().as_ptr().cast_mut().cast(),
            Memory::Extents(list) => (&raw mut **list).cast(),
            Memory::None => std::ptr::null_mut(),
        };
        let lent = Lent {
            waiting: Some(completer),
            kind,
            len,
            flags,
            memory,
            handle: self.handle.clone(),
            _charge: charge,
        };
        let number = self.table.enter(lent);
        self.call(kind, number, pointer, count, at, flags);
        self.with_timeout(pending, number, kind, at, len)
    }

    /// The callback itself; it may answer before it returns.
    fn call(
        &self,
        kind: OpKind,
        number: u64,
        pointer: *mut c_void,
        count: u32,
        at: u64,
        flags: Flags,
    ) {
        let plugin = &self.asynchronous;
        let (conn, handle) = (self.conn(), self.handle.pointer.0);
        let fua = flags.contains(Flags::FUA) && self.handle.has_native_fua();
        let (result, left) = context::call(&self.handle.context, name_of(kind), || {
            // SAFETY: callbacks of the header's types, with an open handle; the memory behind
            // `pointer` stays in the table until the answer, or this call's refusal.
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
                        let one = flags.contains(Flags::ONE_EXTENT);
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
            ),
        };
        match self.table.take(number) {
            Some(lent) => lent.finish(Err(error)),
            None => log::warn!(
                "plugin {} answered a request and refused it as well: {error}",
                self.plugin().name
            ),
        }
    }

    fn conn(&self) -> Conn {
        conn_of(self.table.token())
    }

    /// A request that is not answered in time fails; what it lends stays lent until the answer.
    fn with_timeout(
        &self,
        pending: Pending,
        number: u64,
        kind: OpKind,
        at: u64,
        len: u64,
    ) -> Pending {
        let Some(limit) = self.plugin().host.timeout else { return pending };
        let (table, plugin) = (self.table.clone(), self.plugin().clone());
        Pending::start(async move {
            match io::timeout(limit, pending).await {
                Ok(outcome) => outcome,
                Err(io::Elapsed) => {
                    // Nobody waits any more: the answer only gives back what was lent.
                    drop(table.with(number, |lent| lent.waiting.take()));
                    Err(plugin.no_answer(kind, at, len, limit))
                }
            }
        })
    }

    /// A request of any length, in pieces that fit the callbacks, and zeroing by writing where the
    /// plugin says that it cannot.
    async fn pieces(self: Arc<Self>, request: Request) -> Outcome {
        let (kind, flags, end) = (request.kind(), request.flags, request.at + request.len);
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
                        && !flags.contains(Flags::FAST) =>
                {
                    self.write_zeroes(at, len, flags & Flags::FUA).await?;
                }
                outcome => drop(outcome?),
            }
            at += len;
        }
        Ok(Reply::Done)
    }

    async fn write_zeroes(&self, at: u64, len: u64, flags: Flags) -> Result<()> {
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

    /// One request that fits the callbacks, with a flush behind it where the plugin has no other FUA.
    async fn one(&self, request: Request) -> Outcome {
        let bytes = payload(&request);
        let flush = request.flags.contains(Flags::FUA) && !self.handle.has_native_fua();
        let reply = match self.plugin().budget.take(bytes).await {
            Some(charge) => self.lend(request, charge).await?,
            None => return Err(Error::new(Kind::ShuttingDown, "the program ends")),
        };
        if flush {
            let flush = Request::flush();
            let charge = self.plugin().budget.take(0).await;
            match charge {
                Some(charge) if self.takes(OpKind::Flush) => self.lend(flush, charge).await?,
                _ => crate::device::on_lane(&self.handle, flush).await?,
            };
        }
        Ok(reply)
    }

    /// A further owner, for tasks.
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

    fn submit(&self, request: Request) -> Pending {
        let kind = request.kind();
        if !self.takes(kind) {
            return crate::device::on_lane(&self.handle, request);
        }
        let ranges = matches!(kind, OpKind::Zero | OpKind::Trim | OpKind::Cache);
        let fua = request.flags.contains(Flags::FUA) && !self.handle.has_native_fua();
        if ranges {
            let shared = self.shared();
            return Pending::start(shared.pieces(request));
        }
        let mut request = request;
        if kind == OpKind::Extents {
            // Less may be answered than was asked for.
            request.len = request.len.min(RANGE_MAX);
        }
        if !fua && let Some(charge) = self.plugin().budget.try_take(payload(&request)) {
            return self.lend(request, charge);
        }
        let shared = self.shared();
        Pending::start(async move { shared.one(request).await })
    }
}

/// Forgets a handle's requests: there are none any more.
pub(crate) fn forget(token: u64) {
    TABLES.close(token);
}

/// Tells the plugin that the client of a handle's requests has gone, if there are any.
pub(crate) fn cancel(handle: &Handle) {
    let plugin = &handle.connection.plugin;
    let Some(call) = plugin.asynchronous.as_ref().and_then(|plugin| plugin.cancel) else { return };
    let Some(&token) = handle.token.get() else { return };
    if TABLES.find(token).is_none_or(|table| table.len() == 0) {
        return;
    }
    let pointer = handle.pointer.0;
    // SAFETY: the callback takes the connection's token and an open handle, on any thread.
    let ((), left) = context::call(&handle.context, c"async_cancel", || unsafe {
        call(conn_of(token), pointer);
    });
    plugin.log_rest(&left, 0);
}

impl Lent {
    /// Answers. What was lent goes back first: whoever hears the answer may count on it.
    fn finish(self, outcome: Outcome) {
        let Lent { waiting, memory, handle, _charge, .. } = self;
        drop(memory);
        drop((_charge, handle));
        if let Some(completer) = waiting {
            completer.complete(outcome);
        }
    }

    /// The answer of a request that went well.
    fn done(mut self) {
        let outcome = match std::mem::replace(&mut self.memory, Memory::None) {
            Memory::Read(buf) => Ok(Reply::Data(buf.into())),
            Memory::Extents(list) => {
                let one = self.flags.contains(Flags::ONE_EXTENT);
                let extents = self.handle.extents_from(&list, self.len, one);
                extents.map(|list| Reply::Extents(vec![list]))
            }
            Memory::Write(_) | Memory::None => Ok(Reply::Done),
        };
        self.finish(outcome);
    }

    /// An answer to a read of `count` bytes at `from`.
    ///
    /// # Safety
    /// `from` points to `count` bytes.
    unsafe fn done_read(mut self, count: u32, from: *const c_void) -> c_int {
        let name = self.handle.connection.plugin.name.clone();
        let Memory::Read(buf) = &mut self.memory else {
            let text = format!("plugin {name} answered a {} as if it were a read", self.kind);
            return self.misfit(text);
        };
        if buf.len() != count as usize {
            let text = format!("plugin {name} answered a read of {} bytes with {count}", buf.len());
            return self.misfit(text);
        }
        if from.is_null() && count > 0 {
            let text = format!("plugin {name} answered a read with NULL");
            return self.misfit(text);
        }
        if !std::ptr::eq(from.cast::<u8>(), buf.as_ptr()) {
            // SAFETY: the caller's promise; `copy` allows for an overlap with what was lent.
            unsafe { std::ptr::copy(from.cast::<u8>(), buf.as_mut_ptr(), buf.len()) };
        }
        self.done();
        0
    }

    fn misfit(self, text: String) -> c_int {
        log::warn!("{text}");
        self.finish(Err(Error::new(Kind::Io, text)));
        -1
    }
}

/// Takes out the request that an answer is for.
fn answered(conn: Conn, number: u64) -> Option<Lent> {
    static STRAY: AtomicU64 = AtomicU64::new(0);
    let lent = TABLES.take(conn as u64, number);
    if lent.is_none() {
        let stray = STRAY.fetch_add(1, Ordering::Relaxed) + 1;
        // A plugin that does it once does it often.
        if stray.is_power_of_two() {
            log::warn!(
                "a plugin answered a request that is not there (answered already, or never asked); \
                 so far {stray} such answers"
            );
        }
    }
    lent
}

/// The answer: done.
#[unsafe(no_mangle)]
extern "C" fn nbdkit_async_reply(conn: Conn, number: u64) -> c_int {
    let Some(lent) = answered(conn, number) else { return -1 };
    lent.done();
    0
}

/// The answer to a read.
///
/// # Safety
/// `from` points to `count` bytes.
#[unsafe(no_mangle)]
unsafe extern "C" fn nbdkit_async_reply_read(
    conn: Conn,
    number: u64,
    count: u32,
    from: *mut c_void,
) -> c_int {
    let Some(lent) = answered(conn, number) else { return -1 };
    // SAFETY: the plugin's promise.
    unsafe { lent.done_read(count, from) }
}

/// The answer: failed, for what this thread said last.
#[unsafe(no_mangle)]
extern "C" fn nbdkit_async_reply_error(conn: Conn, number: u64) -> c_int {
    let errno = context::errno();
    let mut left: Left = context::take_loose();
    left.errno = errno;
    let Some(lent) = answered(conn, number) else { return -1 };
    let error = lent.handle.connection.plugin.error(&name_of(lent.kind).to_string_lossy(), &left);
    lent.finish(Err(error));
    0
}

/// The answer: failed, with a number and a text.
///
/// # Safety
/// `text` is null or a C string.
#[unsafe(no_mangle)]
unsafe extern "C" fn blockhaul_async_reply_error(
    conn: Conn,
    number: u64,
    error: c_int,
    text: *const c_char,
) -> c_int {
    // SAFETY: the plugin's promise.
    let text = unsafe { crate::api::text(text) };
    let text = text.map(std::borrow::Cow::into_owned).unwrap_or_default();
    let Some(lent) = answered(conn, number) else { return -1 };
    let left = Left { error: if error == 0 { libc::EIO } else { error }, errno: 0, text };
    let error = lent.handle.connection.plugin.error(&name_of(lent.kind).to_string_lossy(), &left);
    lent.finish(Err(error));
    0
}

/// The answer to a read: all zeroes.
#[unsafe(no_mangle)]
extern "C" fn blockhaul_async_reply_hole(conn: Conn, number: u64) -> c_int {
    let Some(lent) = answered(conn, number) else { return -1 };
    if lent.kind != OpKind::Read {
        let name = &lent.handle.connection.plugin.name;
        let text = format!("plugin {name} answered a {} as if it were a read", lent.kind);
        return lent.misfit(text);
    }
    lent.finish(Ok(Reply::Hole));
    0
}

/// The plugin of a connection that is open.
fn plugin_of(conn: Conn) -> Option<Arc<Plugin>> {
    let table = TABLES.find(conn as u64);
    if table.is_none() {
        context::said("there is no such connection");
    }
    table.map(|table| table.owner.clone())
}

/// The bound in bytes on what is lent; 0: none.
#[unsafe(no_mangle)]
extern "C" fn blockhaul_async_max_bytes(conn: Conn) -> i64 {
    plugin_of(conn).map_or(-1, |plugin| clamp(plugin.budget.limit()))
}

/// Changes the bound.
#[unsafe(no_mangle)]
extern "C" fn blockhaul_async_set_max_bytes(conn: Conn, bytes: u64) -> c_int {
    let Some(plugin) = plugin_of(conn) else { return -1 };
    plugin.budget.set_limit(bytes);
    0
}

/// Bytes that are lent.
#[unsafe(no_mangle)]
extern "C" fn blockhaul_async_bytes(conn: Conn) -> i64 {
    plugin_of(conn).map_or(-1, |plugin| clamp(plugin.budget.used()))
}

fn clamp(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

/// A token as the plugin sees it: never a real address.
fn conn_of(token: u64) -> Conn {
    std::ptr::without_provenance_mut(token as usize)
}

/// Bytes that a request lends.
fn payload(request: &Request) -> u64 {
    match request.op {
        Op::Read(_) | Op::Write(_) => request.len,
        _ => 0,
    }
}

fn zero_flags(flags: Flags) -> u32 {
    let may_trim = if flags.contains(Flags::NO_HOLE) { 0 } else { abi::FLAG_MAY_TRIM };
    let fast = if flags.contains(Flags::FAST) { abi::FLAG_FAST_ZERO } else { 0 };
    may_trim | fast
}

/// A payload that begins on a page: parts of others are copied, which layers alone make.
fn aligned(data: Data) -> Data {
    if data.bytes().as_ptr().align_offset(io::ALIGN) == 0 {
        data
    } else {
        Data::copy_of(data.bytes())
    }
}

fn kind_of(op: &Op) -> OpKind {
    match op {
        Op::Read(_) => OpKind::Read,
        Op::Write(_) => OpKind::Write,
        Op::Zero => OpKind::Zero,
        Op::Trim => OpKind::Trim,
        Op::Flush => OpKind::Flush,
        Op::Cache => OpKind::Cache,
        Op::Extents(_) => OpKind::Extents,
    }
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
