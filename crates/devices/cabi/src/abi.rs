//! The layout of nbdkit's `struct nbdkit_plugin`, as it grew from version 1.0 to 1.42, and the
//! constants of its interface.

use std::ffi::{c_char, c_int, c_void};

/// A handle returned by a plugin's `open`.
pub(crate) type RawHandle = *mut c_void;

/// `int (*) (void *handle)`.
pub(crate) type Ask = unsafe extern "C-unwind" fn(RawHandle) -> c_int;
type Plain = unsafe extern "C-unwind" fn();
type Answers = unsafe extern "C-unwind" fn() -> c_int;
type Range = unsafe extern "C-unwind" fn(RawHandle, u32, u64, u32) -> c_int;

/// A plugin's description. Plugins of older versions have a shorter one; missing fields are zero
/// here. Bytes after it are never read.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct PluginTable {
    pub(crate) struct_size: u64,
    pub(crate) api_version: c_int,
    pub(crate) thread_model: c_int,
    pub(crate) name: *const c_char,
    pub(crate) longname: *const c_char,
    pub(crate) version: *const c_char,
    pub(crate) description: *const c_char,
    pub(crate) load: Option<Plain>,
    pub(crate) unload: Option<Plain>,
    pub(crate) config: Option<unsafe extern "C-unwind" fn(*const c_char, *const c_char) -> c_int>,
    pub(crate) config_complete: Option<Answers>,
    pub(crate) config_help: *const c_char,
    pub(crate) open: Option<unsafe extern "C-unwind" fn(c_int) -> RawHandle>,
    pub(crate) close: Option<unsafe extern "C-unwind" fn(RawHandle)>,
    pub(crate) get_size: Option<unsafe extern "C-unwind" fn(RawHandle) -> i64>,
    pub(crate) can_write: Option<Ask>,
    pub(crate) can_flush: Option<Ask>,
    pub(crate) is_rotational: Option<Ask>,
    pub(crate) can_trim: Option<Ask>,
    pub(crate) pread_v1:
        Option<unsafe extern "C-unwind" fn(RawHandle, *mut c_void, u32, u64) -> c_int>,
    pub(crate) pwrite_v1:
        Option<unsafe extern "C-unwind" fn(RawHandle, *const c_void, u32, u64) -> c_int>,
    pub(crate) flush_v1: Option<Ask>,
    pub(crate) trim_v1: Option<unsafe extern "C-unwind" fn(RawHandle, u32, u64) -> c_int>,
    pub(crate) zero_v1: Option<unsafe extern "C-unwind" fn(RawHandle, u32, u64, c_int) -> c_int>,
    pub(crate) errno_is_preserved: c_int,
    pub(crate) dump_plugin: Option<Plain>,
    pub(crate) can_zero: Option<Ask>,
    pub(crate) can_fua: Option<Ask>,
    pub(crate) pread:
        Option<unsafe extern "C-unwind" fn(RawHandle, *mut c_void, u32, u64, u32) -> c_int>,
    pub(crate) pwrite:
        Option<unsafe extern "C-unwind" fn(RawHandle, *const c_void, u32, u64, u32) -> c_int>,
    pub(crate) flush: Option<unsafe extern "C-unwind" fn(RawHandle, u32) -> c_int>,
    pub(crate) trim: Option<Range>,
    pub(crate) zero: Option<Range>,
    pub(crate) magic_config_key: *const c_char,
    pub(crate) can_multi_conn: Option<Ask>,
    pub(crate) can_extents: Option<Ask>,
    pub(crate) extents:
        Option<unsafe extern "C-unwind" fn(RawHandle, u32, u64, u32, *mut c_void) -> c_int>,
    pub(crate) can_cache: Option<Ask>,
    pub(crate) cache: Option<Range>,
    pub(crate) thread_model_now: Option<Answers>,
    pub(crate) can_fast_zero: Option<Ask>,
    pub(crate) preconnect: Option<unsafe extern "C-unwind" fn(c_int) -> c_int>,
    pub(crate) get_ready: Option<Answers>,
    pub(crate) after_fork: Option<Answers>,
    pub(crate) list_exports:
        Option<unsafe extern "C-unwind" fn(c_int, c_int, *mut c_void) -> c_int>,
    pub(crate) default_export: Option<unsafe extern "C-unwind" fn(c_int, c_int) -> *const c_char>,
    pub(crate) export_description: Option<unsafe extern "C-unwind" fn(RawHandle) -> *const c_char>,
    pub(crate) cleanup: Option<Plain>,
    pub(crate) block_size:
        Option<unsafe extern "C-unwind" fn(RawHandle, *mut u32, *mut u32, *mut u32) -> c_int>,
}

// Offsets of one field of each generation, on 64-bit machines (nbdkit's header).
const _: () = {
    assert!(size_of::<PluginTable>() == 384 && size_of::<*const ()>() == 8);
    assert!(std::mem::offset_of!(PluginTable, pread_v1) == 144);
    assert!(std::mem::offset_of!(PluginTable, dump_plugin) == 192);
    assert!(std::mem::offset_of!(PluginTable, pread) == 216);
    assert!(std::mem::offset_of!(PluginTable, magic_config_key) == 256);
    assert!(std::mem::offset_of!(PluginTable, preconnect) == 320);
    assert!(std::mem::offset_of!(PluginTable, block_size) == 376);
};

/// Size of the oldest struct still in use: nbdkit 1.0.
pub(crate) const OLDEST_SIZE: u64 = 176;
/// Newest version of the interface.
pub(crate) const API_VERSION: c_int = 2;

/// `can_fua`: none.
pub(crate) const FUA_NONE: c_int = 0;
/// `can_fua`: by a flush afterwards.
pub(crate) const FUA_EMULATE: c_int = 1;
/// `can_fua`: the plugin gets the flag.
pub(crate) const FUA_NATIVE: c_int = 2;
/// `can_cache`: by reading.
pub(crate) const CACHE_EMULATE: c_int = 1;
/// `can_cache`: the plugin's `cache`.
pub(crate) const CACHE_NATIVE: c_int = 2;

/// The range may be freed (zero).
pub(crate) const FLAG_MAY_TRIM: u32 = 1;
/// Durable on return.
pub(crate) const FLAG_FUA: u32 = 2;
/// One extent is enough.
pub(crate) const FLAG_REQ_ONE: u32 = 4;
/// Fail rather than be slow (zero).
pub(crate) const FLAG_FAST_ZERO: u32 = 8;
