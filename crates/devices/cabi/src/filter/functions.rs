//! The functions that filters call (nbdkit-filter(3)).

use std::ffi::{c_char, c_int};
use std::ptr;

use super::abi::{Backends, Next, Release};
use super::{context as open, data};
use crate::abi::FLAG_REQ_ONE;
use crate::context::{self, said};
use crate::lists::{CExport, ExportList, ExtentList};

/// The backend below the filter with this open backend.
///
/// # Safety
/// `own` is open.
#[unsafe(no_mangle)]
unsafe extern "C" fn nbdkit_context_get_backend(own: Next) -> Backends {
    // SAFETY: the filter's promise.
    unsafe { open::known(own) }.backend().next()
}

/// Opens a backend; null: it failed.
///
/// # Safety
/// `backend` was passed to the filter, `name` is a C string.
#[unsafe(no_mangle)]
unsafe extern "C" fn nbdkit_next_context_open(
    backend: Backends,
    readonly: c_int,
    name: *const c_char,
    shared: c_int,
) -> Next {
    if backend.is_null() || name.is_null() {
        said("nbdkit_next_context_open: a pointer is NULL");
        return ptr::null_mut();
    }
    // SAFETY: the filter's promise.
    unsafe { open::open(backend, readonly, name, shared != 0) }
}

/// Closes what a filter opened itself; null is ignored.
///
/// # Safety
/// `own` is open, and used for the last time.
#[unsafe(no_mangle)]
unsafe extern "C" fn nbdkit_next_context_close(own: Next) {
    if !own.is_null() {
        // SAFETY: the filter's promise.
        unsafe { open::close(own) };
    }
}

/// Replaces the open backend below a filter, and returns the old one.
///
/// # Safety
/// `own` is the filter's own; `next` is null, or open and of the backend below.
#[unsafe(no_mangle)]
unsafe extern "C" fn nbdkit_context_set_next(own: Next, next: Next) -> Next {
    // SAFETY: the filter's promise.
    unsafe { open::known(own) }.set_next(next)
}

/// All extents of a range, in a list that the filter frees; null with an error number on failure.
///
/// # Safety
/// `own` is open, `error` writable.
#[unsafe(no_mangle)]
unsafe extern "C" fn nbdkit_extents_full(
    own: Next,
    count: u32,
    at: u64,
    flags: u32,
    error: *mut c_int,
) -> *mut ExtentList {
    let flags = flags & !FLAG_REQ_ONE;
    let end = at.saturating_add(count.into());
    let mut all = ExtentList::new(at, end);
    let mut from = at;
    while from < end {
        let mut part = ExtentList::new(from, end);
        let left = u32::try_from(end - from).unwrap_or(u32::MAX);
        // SAFETY: the filter's promise, and a list that lives through the call.
        if unsafe { data::extents(own, left, from, flags, &raw mut part, error) } == -1 {
            return ptr::null_mut();
        }
        let before = from;
        for extent in part.list() {
            if all.add(extent.at, extent.len, extent.state).is_err() {
                break;
            }
            from = extent.at + extent.len;
        }
        if from <= before {
            // SAFETY: the filter's promise.
            unsafe { *error = libc::EIO };
            return ptr::null_mut();
        }
    }
    Box::into_raw(Box::new(all))
}

/// The extents of a range of whole blocks, as whole blocks: those within one become one extent with
/// only the flags that all have.
///
/// # Safety
/// `own` is open, `extents` a valid list, `error` writable.
#[unsafe(no_mangle)]
unsafe extern "C" fn nbdkit_extents_aligned(
    own: Next,
    count: u64,
    at: u64,
    flags: u32,
    align: u32,
    extents: *mut ExtentList,
    error: *mut c_int,
) -> c_int {
    // SAFETY: the filter's promise.
    let open = unsafe { open::known(own) };
    let count = match open.backend().caller() {
        // Its type is of 32 bits, and the upper half of the register undefined.
        Release::Old => count & u64::from(u32::MAX),
        Release::New => count.min(open.size().saturating_sub(at)),
    };
    let end = at.saturating_add(count);
    let count = u32::try_from(count).unwrap_or(u32::MAX);
    let mut found = ExtentList::new(at, end);
    // SAFETY: the filter's promise, and a list that lives through the call.
    if unsafe { data::extents(own, count, at, flags, &raw mut found, error) } == -1 {
        return -1;
    }
    let align = u64::from(align.max(1));
    let mut blocks = in_blocks(&found, align);
    if blocks.is_empty() {
        // Not even the first block is known completely.
        let block = u32::try_from(align.min(end - at)).unwrap_or(u32::MAX);
        // SAFETY: as above.
        let parts = unsafe { nbdkit_extents_full(own, block, at, flags, error) };
        if parts.is_null() {
            return -1;
        }
        // SAFETY: made just above; this function frees it.
        let parts = unsafe { Box::from_raw(parts) };
        blocks = in_blocks(&parts, block.into());
    }
    // SAFETY: the filter's promise.
    let Some(list) = (unsafe { extents.as_mut() }) else { return -1 };
    for (at, run) in blocks.ranges(at) {
        // States of lists that plugins fill have 32 bits.
        if list.add(at, run.len, run.state as u32).is_err() {
            context::set_errno(libc::EINVAL);
            // SAFETY: the filter's promise.
            unsafe { *error = libc::EINVAL };
            return -1;
        }
    }
    0
}

/// A list in whole blocks; a block is a hole or zero only if all of it is.
fn in_blocks(list: &ExtentList, block: u64) -> blockhaul_block::Extents {
    let runs = list.list().iter();
    let runs = runs.map(|run| blockhaul_block::Extent { len: run.len, state: run.state.into() });
    runs.collect::<blockhaul_block::Extents>().in_blocks(block, |one, other| one & other)
}

/// Number of exports in a list.
///
/// # Safety
/// `exports` is null or a valid list.
#[unsafe(no_mangle)]
unsafe extern "C" fn nbdkit_exports_count(exports: *const ExportList) -> usize {
    // SAFETY: the filter's promise.
    unsafe { exports.as_ref() }.map_or(0, ExportList::count)
}

/// An export of a list, by its index; valid as long as the list.
///
/// # Safety
/// `exports` is a valid list that does not change meanwhile.
#[unsafe(no_mangle)]
unsafe extern "C" fn nbdkit_get_export(exports: *mut ExportList, index: usize) -> CExport {
    // SAFETY: the filter's promise.
    match unsafe { exports.as_mut() } {
        Some(exports) => exports.get(index),
        None => CExport { name: ptr::null(), description: ptr::null() },
    }
}
