//! The layout of nbdkit's `struct nbdkit_filter` and of the functions with which filters call the
//! next backend. Neither is stable between releases: both are checked against [`VERSION`].

use std::ffi::{c_char, c_int, c_void};

use crate::lists::{ExportList, ExtentList};

/// The version of the interface, and the prefix of the release's name: its layout is the one below.
pub(super) const API_VERSION: c_int = 6;
pub(super) const VERSION: &str = "1.42.";

/// A level of `can_zero`, as filters see it.
pub(super) const ZERO_EMULATE: c_int = 1;
pub(super) const ZERO_NATIVE: c_int = 2;

pub(super) type Handle = *mut c_void;

/// A backend as filters see it: an address.
#[repr(C)]
pub(super) struct OpaqueBackend([u8; 0]);

/// The same for an open backend.
#[repr(C)]
pub struct OpaqueOpen([u8; 0]);

pub(super) type Backends = *const OpaqueBackend;
/// The next open backend.
pub(super) type Next = *mut OpaqueOpen;

pub(super) type NextConfig = unsafe extern "C" fn(Backends, *const c_char, *const c_char) -> c_int;
pub(super) type NextComplete = unsafe extern "C" fn(Backends) -> c_int;
pub(super) type NextPreconnect = unsafe extern "C" fn(Backends, c_int) -> c_int;
pub(super) type NextList = unsafe extern "C" fn(Backends, c_int, *mut ExportList) -> c_int;
pub(super) type NextDefault = unsafe extern "C" fn(Backends, c_int) -> *const c_char;
pub(super) type NextOpen = unsafe extern "C" fn(Next, c_int, *const c_char) -> c_int;

pub(super) type Ask = unsafe extern "C" fn(Next, Handle) -> c_int;
pub(super) type Range = unsafe extern "C" fn(Next, Handle, u32, u64, u32, *mut c_int) -> c_int;

/// A filter's description.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Filter {
    pub(super) api_version: c_int,
    pub(super) version: *const c_char,
    pub(super) name: *const c_char,
    pub(super) longname: *const c_char,
    pub(super) description: *const c_char,
    pub(super) load: Option<unsafe extern "C-unwind" fn()>,
    pub(super) unload: Option<unsafe extern "C-unwind" fn()>,
    pub(super) config:
        Option<unsafe extern "C" fn(NextConfig, Backends, *const c_char, *const c_char) -> c_int>,
    pub(super) config_complete: Option<unsafe extern "C" fn(NextComplete, Backends) -> c_int>,
    pub(super) config_help: *const c_char,
    pub(super) thread_model: Option<unsafe extern "C-unwind" fn() -> c_int>,
    pub(super) dump_plugin: Option<unsafe extern "C-unwind" fn()>,
    pub(super) get_ready: Option<unsafe extern "C" fn(c_int) -> c_int>,
    pub(super) after_fork: Option<unsafe extern "C" fn(Backends) -> c_int>,
    pub(super) cleanup: Option<unsafe extern "C" fn(Backends)>,
    pub(super) preconnect: Option<unsafe extern "C" fn(NextPreconnect, Backends, c_int) -> c_int>,
    pub(super) list_exports:
        Option<unsafe extern "C" fn(NextList, Backends, c_int, c_int, *mut ExportList) -> c_int>,
    pub(super) default_export:
        Option<unsafe extern "C" fn(NextDefault, Backends, c_int, c_int) -> *const c_char>,
    pub(super) open:
        Option<unsafe extern "C" fn(NextOpen, Next, c_int, *const c_char, c_int) -> Handle>,
    pub(super) close: Option<unsafe extern "C" fn(Handle)>,
    pub(super) prepare: Option<unsafe extern "C" fn(Next, Handle, c_int) -> c_int>,
    pub(super) finalize: Option<Ask>,
    pub(super) get_size: Option<unsafe extern "C" fn(Next, Handle) -> i64>,
    pub(super) export_description: Option<unsafe extern "C" fn(Next, Handle) -> *const c_char>,
    pub(super) block_size:
        Option<unsafe extern "C" fn(Next, Handle, *mut u32, *mut u32, *mut u32) -> c_int>,
    pub(super) can_write: Option<Ask>,
    pub(super) can_flush: Option<Ask>,
    pub(super) is_rotational: Option<Ask>,
    pub(super) can_trim: Option<Ask>,
    pub(super) can_zero: Option<Ask>,
    pub(super) can_fast_zero: Option<Ask>,
    pub(super) can_extents: Option<Ask>,
    pub(super) can_fua: Option<Ask>,
    pub(super) can_multi_conn: Option<Ask>,
    pub(super) can_cache: Option<Ask>,
    pub(super) pread:
        Option<unsafe extern "C" fn(Next, Handle, *mut c_void, u32, u64, u32, *mut c_int) -> c_int>,
    pub(super) pwrite: Option<
        unsafe extern "C" fn(Next, Handle, *const c_void, u32, u64, u32, *mut c_int) -> c_int,
    >,
    pub(super) flush: Option<unsafe extern "C" fn(Next, Handle, u32, *mut c_int) -> c_int>,
    pub(super) trim: Option<Range>,
    pub(super) zero: Option<Range>,
    pub(super) extents: Option<
        unsafe extern "C" fn(Next, Handle, u32, u64, u32, *mut ExtentList, *mut c_int) -> c_int,
    >,
    pub(super) cache: Option<Range>,
}

/// The functions with which filters call the next backend: the first field of an open backend.
#[repr(C)]
pub(super) struct NextOps {
    pub(super) prepare: unsafe extern "C" fn(Next) -> c_int,
    pub(super) finalize: unsafe extern "C" fn(Next) -> c_int,
    pub(super) get_size: unsafe extern "C" fn(Next) -> i64,
    pub(super) export_description: unsafe extern "C" fn(Next) -> *const c_char,
    pub(super) block_size: unsafe extern "C" fn(Next, *mut u32, *mut u32, *mut u32) -> c_int,
    pub(super) can_write: unsafe extern "C" fn(Next) -> c_int,
    pub(super) can_flush: unsafe extern "C" fn(Next) -> c_int,
    pub(super) is_rotational: unsafe extern "C" fn(Next) -> c_int,
    pub(super) can_trim: unsafe extern "C" fn(Next) -> c_int,
    pub(super) can_zero: unsafe extern "C" fn(Next) -> c_int,
    pub(super) can_fast_zero: unsafe extern "C" fn(Next) -> c_int,
    pub(super) can_extents: unsafe extern "C" fn(Next) -> c_int,
    pub(super) can_fua: unsafe extern "C" fn(Next) -> c_int,
    pub(super) can_multi_conn: unsafe extern "C" fn(Next) -> c_int,
    pub(super) can_cache: unsafe extern "C" fn(Next) -> c_int,
    pub(super) pread: unsafe extern "C" fn(Next, *mut c_void, u32, u64, u32, *mut c_int) -> c_int,
    pub(super) pwrite:
        unsafe extern "C" fn(Next, *const c_void, u32, u64, u32, *mut c_int) -> c_int,
    pub(super) flush: unsafe extern "C" fn(Next, u32, *mut c_int) -> c_int,
    pub(super) trim: unsafe extern "C" fn(Next, u32, u64, u32, *mut c_int) -> c_int,
    pub(super) zero: unsafe extern "C" fn(Next, u32, u64, u32, *mut c_int) -> c_int,
    pub(super) extents:
        unsafe extern "C" fn(Next, u32, u64, u32, *mut ExtentList, *mut c_int) -> c_int,
    pub(super) cache: unsafe extern "C" fn(Next, u32, u64, u32, *mut c_int) -> c_int,
}

// Sizes and offsets of that release, on 64-bit machines.
const _: () = {
    assert!(size_of::<Filter>() == 336 && size_of::<NextOps>() == 176);
    assert!(std::mem::offset_of!(Filter, config) == 56);
    assert!(std::mem::offset_of!(Filter, cache) == 328);
};
