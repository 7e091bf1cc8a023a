//! The layout of nbdkit's `struct nbdkit_filter` and of the functions with which filters call the
//! next backend. Neither is stable between releases: a filter is hosted if it is of a known
//! [`Release`].
//!
//! From 1.42 to 1.48 all offsets are the same. The interface changed once: since 1.44
//! `thread_model` gets the model of the backend below (release notes of 1.44), and
//! `nbdkit_extents_aligned` takes a count of 64 bits.

use std::ffi::{c_char, c_int, c_void};

use crate::lists::{ExportList, ExtentList};

/// The version of the interface, of all known releases.
pub(super) const API_VERSION: c_int = 6;
/// The known releases, for messages.
pub(super) const RELEASES: &str = "1.42, 1.44, 1.46 and 1.48";

/// The interface of a stable release.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Release {
    /// 1.42.
    Old,
    /// 1.44 to 1.48.
    New,
}

impl Release {
    /// The release of a version such as `1.48.1`; `None`: its layout is unknown.
    pub(super) fn of(version: &str) -> Option<Release> {
        let mut numbers = version.split('.');
        match (numbers.next()?, numbers.next()?, numbers.next()?) {
            ("1", "42", _) => Some(Release::Old),
            ("1", "44" | "46" | "48", _) => Some(Release::New),
            _ => None,
        }
    }
}

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

impl Filter {
    /// The strictest thread model of this filter and of the backends below, which is `below`; -1: it
    /// failed.
    ///
    /// # Safety
    /// The filter is of this release, and the thread is that of the chain's life.
    pub(super) unsafe fn stricter_model(&self, release: Release, below: c_int) -> c_int {
        type Old = unsafe extern "C-unwind" fn() -> c_int;
        type New = unsafe extern "C-unwind" fn(c_int) -> c_int;
        let Some(call) = self.thread_model else { return below };
        // SAFETY: the type of the release, and the caller's promise.
        let own = unsafe {
            match release {
                Release::Old => std::mem::transmute::<UntypedCall, Old>(call)(),
                Release::New => std::mem::transmute::<UntypedCall, New>(call)(below),
            }
        };
        own.min(below)
    }
}

/// A function whose type depends on the release.
type UntypedCall = unsafe extern "C-unwind" fn();

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
    pub(super) thread_model: Option<UntypedCall>,
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

// Sizes and offsets of these releases, on 64-bit machines.
const _: () = {
    assert!(size_of::<Filter>() == 336 && size_of::<NextOps>() == 176);
    assert!(std::mem::offset_of!(Filter, config) == 56);
    assert!(std::mem::offset_of!(Filter, cache) == 328);
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stable_releases_from_1_42_to_1_48_are_known() {
        assert_eq!(Release::of("1.42.3"), Some(Release::Old));
        for version in ["1.44.0", "1.46.2", "1.48.1"] {
            assert_eq!(Release::of(version), Some(Release::New), "{version}");
        }
        for version in ["1.40.5", "1.43.8", "1.45.11", "1.50.0", "2.42.1", "1.42", "1.4", ""] {
            assert_eq!(Release::of(version), None, "{version}");
        }
    }
}
