//! The functions with which a plugin completes its requests, from any thread.

use std::ffi::{c_char, c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use blockhaul_block::{Error, Kind, OpKind, Outcome, Reply, RequestFlags};

use super::{LentMemory, LentRequest, TABLES, name_of};
use crate::async_abi::ConnectionToken;
use crate::context::{self, CallResults};
use crate::plugin::Plugin;

impl LentRequest {
    /// Completes the request. Releases lent memory first, because the receiver may rely on that.
    pub(super) fn finish(self, outcome: Outcome) {
        let LentRequest { waiting, memory, handle, _charge, .. } = self;
        drop(memory);
        drop((_charge, handle));
        if let Some(completer) = waiting {
            completer.complete(outcome);
        }
    }

    /// Completes a successful request.
    fn done(mut self) {
        let outcome = match std::mem::replace(&mut self.memory, LentMemory::None) {
            LentMemory::Read(buf) => Ok(Reply::Data(buf.into())),
            LentMemory::Extents(list) => {
                let one = self.flags.contains(RequestFlags::ONE_EXTENT);
                let extents = self.handle.extents_from(&list, self.len, one);
                extents.map(|list| Reply::Extents(vec![list]))
            }
            LentMemory::Write(_) | LentMemory::None => Ok(Reply::Done),
        };
        self.finish(outcome);
    }

    /// Completes a read with `count` bytes at `from`.
    ///
    /// # Safety
    /// `from` points to `count` bytes.
    unsafe fn done_read(mut self, count: u32, from: *const c_void) -> c_int {
        let name = self.handle.connection.plugin.name.clone();
        let LentMemory::Read(buf) = &mut self.memory else {
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
            // SAFETY: the caller's promise; `copy` allows an overlap with the lent memory.
            unsafe { std::ptr::copy(from.cast::<u8>(), buf.as_mut_ptr(), buf.len()) };
        }
        self.done();
        0
    }

    fn misfit(self, text: String) -> c_int {
        log::warn!("{text}");
        self.finish(Err(Error::new(Kind::Io, text).complete()));
        -1
    }
}

/// Takes out the request that a reply is for.
fn answered(conn: ConnectionToken, number: u64) -> Option<LentRequest> {
    static STRAY: AtomicU64 = AtomicU64::new(0);
    let lent = TABLES.take(conn as u64, number);
    context::forget_loose();
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

/// The reply: done.
#[unsafe(no_mangle)]
extern "C" fn nbdkit_async_reply(conn: ConnectionToken, number: u64) -> c_int {
    let Some(lent) = answered(conn, number) else { return -1 };
    lent.done();
    0
}

/// The reply to a read.
///
/// # Safety
/// `from` points to `count` bytes.
#[unsafe(no_mangle)]
unsafe extern "C" fn nbdkit_async_reply_read(
    conn: ConnectionToken,
    number: u64,
    count: u32,
    from: *mut c_void,
) -> c_int {
    let Some(lent) = answered(conn, number) else { return -1 };
    // SAFETY: the plugin's promise.
    unsafe { lent.done_read(count, from) }
}

/// The reply: failed, with this thread's last error.
#[unsafe(no_mangle)]
extern "C" fn nbdkit_async_reply_error(conn: ConnectionToken, number: u64) -> c_int {
    let errno = context::errno();
    let mut left: CallResults = context::take_loose();
    left.errno = errno;
    let Some(lent) = answered(conn, number) else { return -1 };
    let error = lent.handle.connection.plugin.error(&name_of(lent.kind).to_string_lossy(), &left);
    lent.finish(Err(error));
    0
}

/// The reply: failed, with a number and a text.
///
/// # Safety
/// `text` is null or a C string.
#[unsafe(no_mangle)]
unsafe extern "C" fn blockhaul_async_reply_error(
    conn: ConnectionToken,
    number: u64,
    error: c_int,
    text: *const c_char,
) -> c_int {
    // SAFETY: the plugin's promise.
    let text = unsafe { crate::api::text(text) };
    let text = text.map(std::borrow::Cow::into_owned).unwrap_or_default();
    let Some(lent) = answered(conn, number) else { return -1 };
    let left = CallResults { error: if error == 0 { libc::EIO } else { error }, errno: 0, text };
    let error = lent.handle.connection.plugin.error(&name_of(lent.kind).to_string_lossy(), &left);
    lent.finish(Err(error));
    0
}

/// The reply to a read: all zeroes.
#[unsafe(no_mangle)]
extern "C" fn blockhaul_async_reply_hole(conn: ConnectionToken, number: u64) -> c_int {
    let Some(lent) = answered(conn, number) else { return -1 };
    if lent.kind != OpKind::Read {
        let name = &lent.handle.connection.plugin.name;
        let text = format!("plugin {name} answered a {} as if it were a read", lent.kind);
        return lent.misfit(text);
    }
    lent.finish(Ok(Reply::Hole));
    0
}

/// The plugin of an open connection.
fn plugin_of(conn: ConnectionToken) -> Option<Arc<Plugin>> {
    let table = TABLES.find(conn as u64);
    if table.is_none() {
        context::said("there is no such connection");
    }
    table.map(|table| table.owner.clone())
}

/// The limit of lent bytes; 0: none.
#[unsafe(no_mangle)]
extern "C" fn blockhaul_async_max_bytes(conn: ConnectionToken) -> i64 {
    plugin_of(conn).map_or(-1, |plugin| clamp(plugin.budget.limit()))
}

/// Changes the limit.
#[unsafe(no_mangle)]
extern "C" fn blockhaul_async_set_max_bytes(conn: ConnectionToken, bytes: u64) -> c_int {
    let Some(plugin) = plugin_of(conn) else { return -1 };
    plugin.budget.set_limit(bytes);
    0
}

/// Number of lent bytes.
#[unsafe(no_mangle)]
extern "C" fn blockhaul_async_bytes(conn: ConnectionToken) -> i64 {
    plugin_of(conn).map_or(-1, |plugin| clamp(plugin.budget.used()))
}

fn clamp(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}
