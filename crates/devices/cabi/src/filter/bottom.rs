//! The plugin at the end of a chain: its callbacks, and the defaults for missing ones
//! (nbdkit-plugin(3)).

use std::ffi::{c_char, c_int, c_void};
use std::sync::Arc;

use super::abi::{Handle, ZERO_EMULATE, ZERO_NATIVE};
use super::chain::{call_plugin, chain};
use super::zeroes::{NOTHING, ZEROES};
use crate::abi::{
    CACHE_NATIVE, FLAG_FAST_ZERO, FLAG_FUA, FLAG_MAY_TRIM, FUA_EMULATE, FUA_NATIVE, FUA_NONE,
};
use crate::context::{self, CallContext, said};
use crate::lists::{ExportList, ExtentList};

/// # Safety
/// Key and value are C strings that are never freed.
pub(super) unsafe fn config(key: *const c_char, value: *const c_char) -> c_int {
    let Some(config) = chain().plugin.config else {
        // SAFETY: the caller's promise.
        let key = unsafe { crate::api::text(key) }.unwrap_or_default();
        said(&format!("the plugin takes no parameters, but {key}= is given"));
        return -1;
    };
    // SAFETY: the caller's promise.
    unsafe { config(key, value) }
}

/// # Safety
/// To be called on the thread of the chain's life.
pub(super) unsafe fn config_complete() -> c_int {
    // SAFETY: the caller's promise.
    chain().plugin.config_complete.map_or(0, |call| unsafe { call() })
}

/// # Safety
/// To be called on the connection's thread.
pub(super) unsafe fn preconnect(readonly: c_int) -> c_int {
    // SAFETY: the caller's promise.
    chain().plugin.preconnect.map_or(0, |call| unsafe { call(readonly) })
}

/// # Safety
/// `exports` is a valid list.
pub(super) unsafe fn list_exports(readonly: c_int, tls: c_int, exports: *mut ExportList) -> c_int {
    match chain().plugin.list_exports {
        // SAFETY: the caller's promise.
        Some(call) => unsafe { call(readonly, tls, exports.cast()) },
        None => {
            // SAFETY: as above.
            let list = unsafe { exports.as_mut() };
            list.map_or(-1, |list| list.add_default().map_or(-1, |()| 0))
        }
    }
}

/// # Safety
/// To be called on the connection's thread.
pub(super) unsafe fn default_export(readonly: c_int, tls: c_int) -> *const c_char {
    match chain().plugin.default_export {
        // SAFETY: the caller's promise.
        Some(call) => unsafe { call(readonly, tls) },
        None => c"".as_ptr(),
    }
}

/// The plugin's open handle, and the context of its callbacks.
pub(super) struct ChainEnd {
    pub(super) handle: Handle,
    pub(super) context: Arc<CallContext>,
}

impl ChainEnd {
    /// Opens a handle; the plugin's errors are passed to the caller.
    pub(super) fn open(context: Arc<CallContext>, readonly: c_int) -> Option<ChainEnd> {
        let open = chain().plugin.open.expect("checked when it was loaded");
        // SAFETY: the callback takes a number, on the connection's thread.
        let (handle, number) =
            call_plugin(&context, c"open", || unsafe { open(readonly) }, |handle| handle.is_null());
        if handle.is_null() {
            context::set_error(number);
            return None;
        }
        Some(ChainEnd { handle, context })
    }

    pub(super) fn close(&self) {
        if let Some(close) = chain().plugin.close {
            // SAFETY: the last use of the handle.
            call_plugin(&self.context, c"close", || unsafe { close(self.handle) }, |()| false);
        }
    }

    /// A query that returns -1 or a number.
    fn ask(&self, name: &'static std::ffi::CStr, callback: crate::abi::Ask) -> c_int {
        // SAFETY: an open handle.
        let call = || unsafe { callback(self.handle) };
        let (answer, number) = call_plugin(&self.context, name, call, |answer| *answer == -1);
        if answer == -1 {
            context::set_error(number);
        }
        answer
    }

    /// A query that returns yes or no.
    fn yes(
        &self,
        name: &'static std::ffi::CStr,
        callback: Option<crate::abi::Ask>,
        otherwise: bool,
    ) -> c_int {
        match callback {
            None => c_int::from(otherwise),
            Some(callback) => match self.ask(name, callback) {
                -1 => -1,
                answer => c_int::from(answer != 0),
            },
        }
    }

    pub(super) fn size(&self) -> i64 {
        let get_size = chain().plugin.get_size.expect("checked when it was loaded");
        // SAFETY: an open handle.
        let call = || unsafe { get_size(self.handle) };
        let (size, number) = call_plugin(&self.context, c"get_size", call, |size| *size < 0);
        if size < 0 {
            context::set_error(number);
        }
        size
    }

    pub(super) fn description(&self) -> *const c_char {
        let Some(callback) = chain().plugin.export_description else { return std::ptr::null() };
        // SAFETY: an open handle.
        let call = || unsafe { callback(self.handle) };
        call_plugin(&self.context, c"export_description", call, |_| false).0
    }

    pub(super) fn block_size(&self, sizes: &mut [u32; 3]) -> c_int {
        let Some(callback) = chain().plugin.block_size else { return 0 };
        let [minimum, preferred, maximum] = sizes;
        // SAFETY: an open handle, and three places to write to.
        let call = || unsafe { callback(self.handle, minimum, preferred, maximum) };
        let (answer, number) =
            call_plugin(&self.context, c"block_size", call, |answer| *answer == -1);
        if answer == -1 {
            context::set_error(number);
        }
        answer
    }

    pub(super) fn can_write(&self) -> c_int {
        let plugin = &chain().plugin;
        let writes = plugin.pwrite.is_some() || plugin.pwrite_v1.is_some();
        self.yes(c"can_write", plugin.can_write, writes)
    }

    pub(super) fn can_flush(&self) -> c_int {
        self.yes(c"can_flush", chain().plugin.can_flush, self.flushes())
    }

    fn flushes(&self) -> bool {
        chain().plugin.flush.is_some() || chain().plugin.flush_v1.is_some()
    }

    pub(super) fn is_rotational(&self) -> c_int {
        self.yes(c"is_rotational", chain().plugin.is_rotational, false)
    }

    pub(super) fn can_trim(&self) -> c_int {
        let plugin = &chain().plugin;
        let trims = plugin.trim.is_some() || plugin.trim_v1.is_some();
        self.yes(c"can_trim", plugin.can_trim, trims)
    }

    pub(super) fn can_zero(&self) -> c_int {
        let plugin = &chain().plugin;
        let zeroes = plugin.zero.is_some() || plugin.zero_v1.is_some();
        match self.yes(c"can_zero", plugin.can_zero, zeroes) {
            -1 => -1,
            0 => ZERO_EMULATE,
            _ => ZERO_NATIVE,
        }
    }

    pub(super) fn can_fast_zero(&self) -> c_int {
        // Without zero, fast zero fails at once.
        self.yes(c"can_fast_zero", chain().plugin.can_fast_zero, chain().plugin.zero.is_none())
    }

    pub(super) fn can_extents(&self) -> c_int {
        let plugin = &chain().plugin;
        self.yes(c"can_extents", plugin.can_extents, plugin.extents.is_some())
    }

    pub(super) fn can_fua(&self) -> c_int {
        let plugin = &chain().plugin;
        let answer = match plugin.can_fua {
            Some(callback) => self.ask(c"can_fua", callback),
            None if self.flushes() => FUA_EMULATE,
            None => FUA_NONE,
        };
        if plugin.api_version < 2 { answer.min(FUA_EMULATE) } else { answer }
    }

    pub(super) fn can_multi_conn(&self) -> c_int {
        self.yes(c"can_multi_conn", chain().plugin.can_multi_conn, false)
    }

    pub(super) fn can_cache(&self) -> c_int {
        let plugin = &chain().plugin;
        match plugin.can_cache {
            Some(callback) => self.ask(c"can_cache", callback),
            None => c_int::from(plugin.cache.is_some()) * CACHE_NATIVE,
        }
    }

    /// Runs a request; returns 0 or its error number.
    fn run(&self, name: &'static std::ffi::CStr, call: impl FnOnce() -> c_int) -> c_int {
        call_plugin(&self.context, name, call, |result| *result == -1).1
    }

    /// # Safety
    /// `buf` has space for `count` bytes.
    pub(super) unsafe fn pread(&self, buf: *mut c_void, count: u32, at: u64) -> c_int {
        let plugin = &chain().plugin;
        let handle = self.handle;
        // SAFETY: an open handle, and the caller's promise.
        self.run(c"pread", || unsafe {
            match (plugin.pread, plugin.pread_v1) {
                (Some(pread), _) if plugin.api_version >= 2 => pread(handle, buf, count, at, 0),
                (_, Some(pread)) => pread(handle, buf, count, at),
                _ => -1,
            }
        })
    }

    /// # Safety
    /// `buf` points to `count` bytes.
    pub(super) unsafe fn pwrite(
        &self,
        buf: *const c_void,
        count: u32,
        at: u64,
        flags: u32,
        fua: c_int,
    ) -> c_int {
        let plugin = &chain().plugin;
        let handle = self.handle;
        self.durably(flags, fua, |flags| {
            // SAFETY: an open handle, and the caller's promise.
            self.run(c"pwrite", || unsafe {
                match (plugin.pwrite, plugin.pwrite_v1) {
                    (Some(pwrite), _) if plugin.api_version >= 2 => {
                        pwrite(handle, buf, count, at, flags)
                    }
                    (_, Some(pwrite)) => pwrite(handle, buf, count, at),
                    _ => {
                        context::set_error(libc::EROFS);
                        -1
                    }
                }
            })
        })
    }

    /// Runs a change with the plugin's own FUA, or followed by a flush.
    fn durably(&self, flags: u32, fua: c_int, change: impl FnOnce(u32) -> c_int) -> c_int {
        let flush = flags & FLAG_FUA != 0 && fua != FUA_NATIVE;
        let number = change(if flush { flags & !FLAG_FUA } else { flags });
        if number == 0 && flush { self.flush() } else { number }
    }

    pub(super) fn flush(&self) -> c_int {
        let plugin = &chain().plugin;
        let handle = self.handle;
        // SAFETY: an open handle.
        self.run(c"flush", || unsafe {
            match (plugin.flush, plugin.flush_v1) {
                (Some(flush), _) if plugin.api_version >= 2 => flush(handle, 0),
                (_, Some(flush)) => flush(handle),
                _ => {
                    context::set_error(libc::EINVAL);
                    -1
                }
            }
        })
    }

    pub(super) fn trim(&self, count: u32, at: u64, flags: u32, fua: c_int) -> c_int {
        let plugin = &chain().plugin;
        let handle = self.handle;
        self.durably(flags, fua, |flags| {
            // SAFETY: an open handle.
            self.run(c"trim", || unsafe {
                match (plugin.trim, plugin.trim_v1) {
                    (Some(trim), _) if plugin.api_version >= 2 => trim(handle, count, at, flags),
                    (_, Some(trim)) => trim(handle, count, at),
                    _ => {
                        context::set_error(libc::EINVAL);
                        -1
                    }
                }
            })
        })
    }

    /// The plugin's zero; if it does not support zero, writes zeroes.
    pub(super) fn zero(&self, count: u32, at: u64, flags: u32, fua: c_int) -> c_int {
        let fast = flags & FLAG_FAST_ZERO != 0;
        let number = self.durably(flags, fua, |flags| self.own_zero(count, at, flags));
        if ![libc::ENOTSUP, libc::EOPNOTSUPP].contains(&number) {
            return number;
        }
        if fast { libc::EOPNOTSUPP } else { self.write_zeroes(count, at, flags & FLAG_FUA, fua) }
    }

    fn own_zero(&self, count: u32, at: u64, flags: u32) -> c_int {
        let plugin = &chain().plugin;
        let handle = self.handle;
        // SAFETY: an open handle.
        self.run(c"zero", || unsafe {
            match (plugin.zero, plugin.zero_v1) {
                (Some(zero), _) if plugin.api_version >= 2 => zero(handle, count, at, flags),
                (_, Some(zero)) if flags & FLAG_FAST_ZERO == 0 => {
                    zero(handle, count, at, c_int::from(flags & FLAG_MAY_TRIM != 0))
                }
                _ => {
                    context::set_error(libc::EOPNOTSUPP);
                    -1
                }
            }
        })
    }

    fn write_zeroes(&self, count: u32, at: u64, flags: u32, fua: c_int) -> c_int {
        let mut done = 0;
        let count = u64::from(count);
        while done < count {
            let piece = (count - done).min(ZEROES as u64);
            let last = done + piece == count;
            let flags = if last || fua == FUA_NATIVE { flags } else { 0 };
            let piece_len = u32::try_from(piece).expect("no more than a mebibyte");
            // SAFETY: the constant has at least `piece` bytes.
            let number =
                unsafe { self.pwrite(NOTHING.0.as_ptr().cast(), piece_len, at + done, flags, fua) };
            if number != 0 {
                return number;
            }
            done += piece;
        }
        0
    }

    /// # Safety
    /// `extents` is a valid list.
    pub(super) unsafe fn extents(
        &self,
        count: u32,
        at: u64,
        flags: u32,
        extents: *mut ExtentList,
    ) -> c_int {
        let Some(callback) = chain().plugin.extents else { return libc::EINVAL };
        // SAFETY: an open handle, and the caller's promise.
        self.run(c"extents", || unsafe { callback(self.handle, count, at, flags, extents.cast()) })
    }

    pub(super) fn cache(&self, count: u32, at: u64) -> c_int {
        // A plugin that claims to cache but has no callback has nothing to do.
        let Some(callback) = chain().plugin.cache else { return 0 };
        // SAFETY: an open handle.
        self.run(c"cache", || unsafe { callback(self.handle, count, at, 0) })
    }
}
