//! Requests down the chain: to a filter, which passes them on as it likes, or to the plugin.
//!
//! Each returns 0, or -1 with an error number in `error`.

use std::ffi::{c_int, c_void};

use super::abi::{Filter, Next, ZERO_NATIVE};
use super::context::{self, OpenBackend, known};
use super::zeroes::{NOTHING, ZEROES};
use crate::abi::{CACHE_EMULATE, FLAG_FAST_ZERO, FLAG_FUA};
use crate::lists::ExtentList;

/// Bytes per step of a cache request done by reading, or of a zero request done by writing.
const PIECE: usize = ZEROES;

/// Returns a plugin's error number to the caller.
///
/// # Safety
/// `error` is null or writable.
unsafe fn answer(number: c_int, error: *mut c_int) -> c_int {
    if number == 0 {
        return 0;
    }
    if !error.is_null() {
        // SAFETY: the caller's promise.
        unsafe { *error = number };
    }
    -1
}

/// Whether a range lies within the device; logs an error with its name if not.
fn checked(open: &OpenBackend, what: &str, count: u32, at: u64, flags: u32) -> bool {
    log::debug!("{}: {what} count={count} offset={at} flags=0x{flags:x}", open.backend().name());
    at.checked_add(count.into()).is_some_and(|end| end <= open.size())
}

/// # Safety
/// `own` is open and prepared, `buf` has space for `count` bytes, `error` is writable.
pub(super) unsafe extern "C" fn pread(
    own: Next,
    buf: *mut c_void,
    count: u32,
    at: u64,
    flags: u32,
    error: *mut c_int,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        let open = known(own);
        if !checked(open, "pread", count, at, flags) {
            return answer(libc::EINVAL, error);
        }
        match (&open.bottom, &open.backend().filter) {
            (Some(bottom), _) => answer(bottom.pread(buf, count, at), error),
            (None, Some(Filter { pread: Some(call), .. })) => {
                call(open.next(), open.handle(), buf, count, at, flags, error)
            }
            (None, _) => pread(open.next(), buf, count, at, flags, error),
        }
    }
}

/// # Safety
/// As for [`pread`]; `buf` points to `count` bytes.
pub(super) unsafe extern "C" fn pwrite(
    own: Next,
    buf: *const c_void,
    count: u32,
    at: u64,
    flags: u32,
    error: *mut c_int,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        let open = known(own);
        if !checked(open, "pwrite", count, at, flags) {
            return answer(libc::ENOSPC, error);
        }
        match (&open.bottom, &open.backend().filter) {
            (Some(bottom), _) => {
                let fua = context::can_fua(own);
                answer(bottom.pwrite(buf, count, at, flags, fua), error)
            }
            (None, Some(Filter { pwrite: Some(call), .. })) => {
                call(open.next(), open.handle(), buf, count, at, flags, error)
            }
            (None, _) => pwrite(open.next(), buf, count, at, flags, error),
        }
    }
}

/// # Safety
/// As for [`pread`].
pub(super) unsafe extern "C" fn flush(own: Next, flags: u32, error: *mut c_int) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        let open = known(own);
        log::debug!("{}: flush", open.backend().name());
        match (&open.bottom, &open.backend().filter) {
            (Some(bottom), _) => answer(bottom.flush(), error),
            (None, Some(Filter { flush: Some(call), .. })) => {
                call(open.next(), open.handle(), flags, error)
            }
            (None, _) => flush(open.next(), flags, error),
        }
    }
}

/// # Safety
/// As for [`pread`].
pub(super) unsafe extern "C" fn trim(
    own: Next,
    count: u32,
    at: u64,
    flags: u32,
    error: *mut c_int,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        let open = known(own);
        if !checked(open, "trim", count, at, flags) {
            return answer(libc::EINVAL, error);
        }
        match (&open.bottom, &open.backend().filter) {
            (Some(bottom), _) => {
                let fua = context::can_fua(own);
                answer(bottom.trim(count, at, flags, fua), error)
            }
            (None, Some(Filter { trim: Some(call), .. })) => {
                call(open.next(), open.handle(), count, at, flags, error)
            }
            (None, _) => trim(open.next(), count, at, flags, error),
        }
    }
}

/// # Safety
/// As for [`pread`].
pub(super) unsafe extern "C" fn zero(
    own: Next,
    count: u32,
    at: u64,
    flags: u32,
    error: *mut c_int,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        let open = known(own);
        if !checked(open, "zero", count, at, flags) {
            return answer(libc::ENOSPC, error);
        }
        if context::can_zero(own) != ZERO_NATIVE {
            return write_zeroes(own, count, at, flags, error);
        }
        match (&open.bottom, &open.backend().filter) {
            (Some(bottom), _) => {
                let fua = context::can_fua(own);
                answer(bottom.zero(count, at, flags, fua), error)
            }
            (None, Some(Filter { zero: Some(call), .. })) => {
                call(open.next(), open.handle(), count, at, flags, error)
            }
            (None, _) => zero(open.next(), count, at, flags, error),
        }
    }
}

/// Zero for a backend that emulates it by writing.
///
/// # Safety
/// As for [`pread`].
unsafe fn write_zeroes(own: Next, count: u32, at: u64, flags: u32, error: *mut c_int) -> c_int {
    if flags & FLAG_FAST_ZERO != 0 {
        // SAFETY: the caller's promise.
        return unsafe { answer(libc::ENOTSUP, error) };
    }
    for (at, piece) in pieces(at, count) {
        // SAFETY: the constant has at least `piece` bytes; the rest is the caller's promise.
        let result =
            unsafe { pwrite(own, NOTHING.0.as_ptr().cast(), piece, at, flags & FLAG_FUA, error) };
        if result == -1 {
            return -1;
        }
    }
    0
}

/// # Safety
/// As for [`pread`]; `extents` is a valid list.
pub(super) unsafe extern "C" fn extents(
    own: Next,
    count: u32,
    at: u64,
    flags: u32,
    extents: *mut ExtentList,
    error: *mut c_int,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        let open = known(own);
        if !checked(open, "extents", count, at, flags) {
            return answer(libc::EINVAL, error);
        }
        if context::can_extents(own) == 0 {
            // Without extents, everything is data.
            let Some(list) = extents.as_mut() else { return answer(libc::EINVAL, error) };
            let added = list.add(at, count.into(), 0);
            return answer(if added.is_ok() { 0 } else { libc::EINVAL }, error);
        }
        match (&open.bottom, &open.backend().filter) {
            (Some(bottom), _) => answer(bottom.extents(count, at, flags, extents), error),
            (None, Some(Filter { extents: Some(call), .. })) => {
                call(open.next(), open.handle(), count, at, flags, extents, error)
            }
            (None, _) => self::extents(open.next(), count, at, flags, extents, error),
        }
    }
}

/// # Safety
/// As for [`pread`].
pub(super) unsafe extern "C" fn cache(
    own: Next,
    count: u32,
    at: u64,
    flags: u32,
    error: *mut c_int,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        let open = known(own);
        if !checked(open, "cache", count, at, flags) {
            return answer(libc::EINVAL, error);
        }
        if context::can_cache(own) == CACHE_EMULATE {
            let mut buf = vec![0_u8; PIECE.min(count as usize)];
            for (at, piece) in pieces(at, count) {
                if pread(own, buf.as_mut_ptr().cast(), piece, at, 0, error) == -1 {
                    return -1;
                }
            }
            return 0;
        }
        match (&open.bottom, &open.backend().filter) {
            (Some(bottom), _) => answer(bottom.cache(count, at), error),
            (None, Some(Filter { cache: Some(call), .. })) => {
                call(open.next(), open.handle(), count, at, flags, error)
            }
            (None, _) => cache(open.next(), count, at, flags, error),
        }
    }
}

/// A range in pieces.
fn pieces(at: u64, count: u32) -> impl Iterator<Item = (u64, u32)> {
    let piece = u32::try_from(PIECE).expect("a mebibyte");
    (0..count.div_ceil(piece)).map(move |index| {
        let begin = index * piece;
        (at + u64::from(begin), piece.min(count - begin))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_a_range_once() {
        let piece = PIECE as u64;
        let all: Vec<_> = pieces(7, (2 << 20) + 5).collect();
        assert_eq!(all, [(7, 1 << 20), (7 + piece, 1 << 20), (7 + 2 * piece, 5)]);
        let last = pieces(0, u32::MAX).last();
        assert_eq!(last, Some((0xfff0_0000, 0xf_ffff)));
        assert_eq!(pieces(0, 0).count(), 0);
    }
}
