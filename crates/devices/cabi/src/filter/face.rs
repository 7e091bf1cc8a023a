//! A chain of filters as one plugin: callbacks that enter it at the top.

use std::ffi::{c_char, c_int, c_void};

use super::abi::Next;
use super::chain::{FilterChain, chain};
use super::{calls, context as open, data};
use crate::abi::{CACHE_NATIVE, FUA_NATIVE, PluginTable, RawHandle};
use crate::context;

/// The chain as a plugin: the plugin's description, with our callbacks.
pub(crate) fn face(inner: &FilterChain) -> PluginTable {
    PluginTable {
        struct_size: size_of::<PluginTable>() as u64,
        api_version: crate::abi::API_VERSION,
        // Already done, as the order matters.
        load: None,
        unload: Some(unload),
        config: Some(config),
        config_complete: Some(config_complete),
        dump_plugin: Some(dump_plugin),
        thread_model_now: Some(thread_model),
        get_ready: Some(get_ready),
        after_fork: Some(after_fork),
        cleanup: Some(cleanup),
        preconnect: Some(preconnect),
        list_exports: Some(list_exports),
        default_export: Some(default_export),
        open: Some(enter),
        close: Some(leave),
        get_size: Some(get_size),
        export_description: Some(export_description),
        block_size: Some(block_size),
        can_write: Some(can_write),
        can_flush: Some(can_flush),
        is_rotational: Some(is_rotational),
        can_trim: Some(can_trim),
        can_zero: Some(can_zero),
        can_fast_zero: Some(can_fast_zero),
        can_extents: Some(can_extents),
        can_fua: Some(can_fua),
        can_multi_conn: Some(can_multi_conn),
        can_cache: Some(can_cache),
        pread: Some(pread),
        pwrite: Some(pwrite),
        flush: Some(flush),
        trim: Some(trim),
        zero: Some(zero),
        extents: Some(extents),
        cache: Some(cache),
        pread_v1: None,
        pwrite_v1: None,
        flush_v1: None,
        trim_v1: None,
        zero_v1: None,
        // Request errors are returned by their number.
        errno_is_preserved: 0,
        ..inner.plugin
    }
}

/// The result and error number of a request, for the host.
fn told(result: c_int, number: c_int) -> c_int {
    if result == -1 {
        context::set_error(number);
    }
    result
}

unsafe extern "C-unwind" fn unload() {
    chain().unload();
}

unsafe extern "C-unwind" fn config(key: *const c_char, value: *const c_char) -> c_int {
    // SAFETY: the host passes C strings that are never freed.
    unsafe { calls::config(chain().top().address(), key, value) }
}

unsafe extern "C-unwind" fn config_complete() -> c_int {
    // SAFETY: the top is one of the chain's.
    unsafe { calls::config_complete(chain().top().address()) }
}

unsafe extern "C-unwind" fn dump_plugin() {
    chain().dump();
}

unsafe extern "C-unwind" fn thread_model() -> c_int {
    chain().thread_model()
}

unsafe extern "C-unwind" fn get_ready() -> c_int {
    chain().get_ready()
}

unsafe extern "C-unwind" fn after_fork() -> c_int {
    chain().after_fork()
}

unsafe extern "C-unwind" fn cleanup() {
    chain().cleanup();
}

unsafe extern "C-unwind" fn preconnect(readonly: c_int) -> c_int {
    // SAFETY: the top is one of the chain's.
    unsafe { calls::preconnect(chain().top().address(), readonly) }
}

unsafe extern "C-unwind" fn list_exports(
    readonly: c_int,
    _tls: c_int,
    exports: *mut c_void,
) -> c_int {
    // SAFETY: the top is one of the chain's; the host passes its list.
    unsafe { calls::list_exports(chain().top().address(), readonly, exports.cast()) }
}

unsafe extern "C-unwind" fn default_export(readonly: c_int, _tls: c_int) -> *const c_char {
    // SAFETY: the top is one of the chain's.
    unsafe { calls::default_export(chain().top().address(), readonly) }
}

/// Opens the chain for a connection.
unsafe extern "C-unwind" fn enter(readonly: c_int) -> RawHandle {
    let name = context::now().and_then(|context| context.export.clone()).unwrap_or_default();
    // SAFETY: the top is one of the chain's.
    unsafe {
        let top = open::open(chain().top().address(), readonly, name.as_ptr(), false);
        if !top.is_null() && open::prepare(top) == -1 {
            open::close(top);
            return std::ptr::null_mut();
        }
        top.cast()
    }
}

unsafe extern "C-unwind" fn leave(handle: RawHandle) {
    let top: Next = handle.cast();
    // SAFETY: the host passes the result of `enter`, for the last time.
    unsafe {
        open::finalize(top);
        open::close(top);
    }
}

/// A callback for the host that passes the result of `enter` and its other arguments to the top.
macro_rules! pass {
    ($($name:ident($($arg:ident: $kind:ty),*) -> $result:ty = $to:path;)*) => {$(
        unsafe extern "C-unwind" fn $name(handle: RawHandle, $($arg: $kind),*) -> $result {
            // SAFETY: the host passes the result of `enter`, and pointers that are valid meanwhile.
            unsafe { $to(handle.cast(), $($arg),*) }
        }
    )*};
}

pass! {
    get_size() -> i64 = open::get_size;
    export_description() -> *const c_char = open::export_description;
    block_size(minimum: *mut u32, preferred: *mut u32, maximum: *mut u32) -> c_int = open::block_size;
    can_write() -> c_int = open::can_write;
    can_flush() -> c_int = open::can_flush;
    is_rotational() -> c_int = open::is_rotational;
    can_trim() -> c_int = open::can_trim;
    can_zero() -> c_int = open::can_zero;
    can_fast_zero() -> c_int = open::can_fast_zero;
    can_extents() -> c_int = open::can_extents;
    can_multi_conn() -> c_int = open::can_multi_conn;
}

/// The end of the chain decides how: the flag enters at the top.
unsafe extern "C-unwind" fn can_fua(handle: RawHandle) -> c_int {
    // SAFETY: the host passes the result of `enter`.
    let answer = unsafe { open::can_fua(handle.cast()) };
    if answer > 0 { FUA_NATIVE } else { answer }
}

/// As for [`can_fua`].
unsafe extern "C-unwind" fn can_cache(handle: RawHandle) -> c_int {
    // SAFETY: the host passes the result of `enter`.
    let answer = unsafe { open::can_cache(handle.cast()) };
    if answer > 0 { CACHE_NATIVE } else { answer }
}

/// A request from the host, passed to the top; returns its error number.
macro_rules! request {
    ($($name:ident($($arg:ident: $kind:ty),*) = $to:path, $($passed:expr),*;)*) => {$(
        unsafe extern "C-unwind" fn $name(handle: RawHandle, $($arg: $kind),*) -> c_int {
            let mut number = 0;
            // SAFETY: the host passes the result of `enter`, and pointers that are valid meanwhile.
            let result = unsafe { $to(handle.cast(), $($passed),*, &raw mut number) };
            told(result, number)
        }
    )*};
}

request! {
    pread(buf: *mut c_void, count: u32, at: u64, flags: u32) = data::pread, buf, count, at, flags;
    pwrite(buf: *const c_void, count: u32, at: u64, flags: u32)
        = data::pwrite, buf, count, at, flags;
    flush(flags: u32) = data::flush, flags;
    trim(count: u32, at: u64, flags: u32) = data::trim, count, at, flags;
    zero(count: u32, at: u64, flags: u32) = data::zero, count, at, flags;
    extents(count: u32, at: u64, flags: u32, list: *mut c_void)
        = data::extents, count, at, flags, list.cast();
    cache(count: u32, at: u64, flags: u32) = data::cache, count, at, flags;
}
