//! Functions that fill and read lists of extents and of exports.

use std::ffi::{c_char, c_int};
use std::ptr;

use super::{failed, text};
use crate::context;
use crate::lists::{ExportList, ExtentList};

/// Adds an extent to a list.
///
/// # Safety
/// `extents` came from this crate and is used by one thread at a time.
#[unsafe(no_mangle)]
unsafe extern "C" fn nbdkit_add_extent(
    extents: *mut ExtentList,
    at: u64,
    len: u64,
    state: u32,
) -> c_int {
    // SAFETY: the plugin passes on the pointer that it got.
    let Some(extents) = (unsafe { extents.as_mut() }) else {
        return failed("nbdkit_add_extent: the list is NULL", -1);
    };
    match extents.add(at, len, state) {
        Ok(()) => 0,
        Err(why) => {
            context::set_errno(libc::EINVAL);
            failed(format!("nbdkit_add_extent: {why}"), -1)
        }
    }
}

/// A new list of extents for the plugin.
#[unsafe(no_mangle)]
extern "C" fn nbdkit_extents_new(start: u64, end: u64) -> *mut ExtentList {
    if start > end || end > i64::MAX as u64 {
        context::set_errno(libc::ERANGE);
        return failed("nbdkit_extents_new: not a range", ptr::null_mut());
    }
    Box::into_raw(Box::new(ExtentList::new(start, end)))
}

/// # Safety
/// `extents` is null or came from [`nbdkit_extents_new`], and is not used again.
#[unsafe(no_mangle)]
unsafe extern "C" fn nbdkit_extents_free(extents: *mut ExtentList) {
    if !extents.is_null() {
        // SAFETY: the plugin's promise.
        drop(unsafe { Box::from_raw(extents) });
    }
}

/// # Safety
/// `extents` came from this crate.
#[unsafe(no_mangle)]
unsafe extern "C" fn nbdkit_extents_count(extents: *const ExtentList) -> usize {
    // SAFETY: the plugin's promise.
    unsafe { extents.as_ref() }.map_or(0, |extents| extents.list().len())
}

/// `struct nbdkit_extent`.
#[repr(C)]
struct CExtent {
    offset: u64,
    length: u64,
    state: u32,
}

/// # Safety
/// `extents` came from this crate.
#[unsafe(no_mangle)]
unsafe extern "C" fn nbdkit_get_extent(extents: *const ExtentList, index: usize) -> CExtent {
    // SAFETY: the plugin's promise.
    let extents = unsafe { extents.as_ref() };
    match extents.and_then(|extents| extents.list().get(index)) {
        Some(extent) => CExtent { offset: extent.at, length: extent.len, state: extent.state },
        None => {
            let none = CExtent { offset: 0, length: 0, state: 0 };
            failed("nbdkit_get_extent: there is no such extent", none)
        }
    }
}

/// Adds an export to a list.
///
/// # Safety
/// `exports` came from this crate; `description` may be null.
#[unsafe(no_mangle)]
unsafe extern "C" fn nbdkit_add_export(
    exports: *mut ExportList,
    name: *const c_char,
    description: *const c_char,
) -> c_int {
    // SAFETY: the plugin's promise.
    let (exports, name, description) = unsafe { (exports.as_mut(), text(name), text(description)) };
    let (Some(exports), Some(name)) = (exports, name) else {
        return failed("nbdkit_add_export: a pointer is NULL", -1);
    };
    match exports.add(&name, description.as_deref()) {
        Ok(()) => 0,
        Err(why) => {
            context::set_errno(libc::EINVAL);
            failed(format!("nbdkit_add_export: {why}"), -1)
        }
    }
}

/// Adds the plugin's default export to a list.
///
/// # Safety
/// `exports` came from this crate.
#[unsafe(no_mangle)]
unsafe extern "C" fn nbdkit_use_default_export(exports: *mut ExportList) -> c_int {
    // SAFETY: the plugin's promise.
    let Some(exports) = (unsafe { exports.as_mut() }) else {
        return failed("nbdkit_use_default_export: the list is NULL", -1);
    };
    exports.add_default().map_or_else(|why| failed(why, -1), |()| 0)
}

/// # Safety
/// `exports` is null: plugins make no lists of exports, but many refer to this function.
#[unsafe(no_mangle)]
unsafe extern "C" fn nbdkit_exports_free(exports: *mut ExportList) {
    if !exports.is_null() {
        // SAFETY: the plugin's promise: it came from [`nbdkit_exports_new`].
        drop(unsafe { Box::from_raw(exports) });
    }
}

/// A new list of exports for the plugin.
#[unsafe(no_mangle)]
extern "C" fn nbdkit_exports_new() -> *mut ExportList {
    Box::into_raw(Box::default())
}
