//! Functions for debug messages and their context: dumps of buffers, time stamps, and the name of the
//! server. nbdkit has them since 1.46 and 1.48.

use std::cell::RefCell;
use std::ffi::{CString, c_char, c_void};
use std::fmt::Write as _;
use std::sync::OnceLock;

/// Bytes of a line of a dump.
const LINE: u64 = 16;

/// The name of this server, for plugins and filters that ask for it.
static NAME: OnceLock<CString> = OnceLock::new();

/// Sets the name of this server: `nbdkit_name` returns it. The first name stays.
///
/// # Errors
/// The name holds a zero byte.
pub fn set_server_name(name: &str) -> Result<(), std::ffi::NulError> {
    NAME.get_or_init({
        let name = CString::new(name)?;
        || name
    });
    Ok(())
}

/// The name of this server; null if it has none.
#[unsafe(no_mangle)]
extern "C" fn nbdkit_name() -> *const c_char {
    NAME.get().map_or(std::ptr::null(), |name| name.as_ptr())
}

/// The time now in UTC; valid until the next call on this thread.
#[unsafe(no_mangle)]
extern "C" fn nbdkit_timestamp() -> *const c_char {
    thread_local! {
        static LAST: RefCell<CString> = RefCell::default();
    }
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is valid during the call.
    unsafe { libc::clock_gettime(libc::CLOCK_REALTIME, &raw mut now) };
    let text = CString::new(timestamp(now.tv_sec, now.tv_nsec / 1000)).unwrap_or_default();
    LAST.with_borrow_mut(|last| {
        *last = text;
        last.as_ptr()
    })
}

/// Seconds and microseconds since 1970 as a date and a time of day.
fn timestamp(seconds: libc::time_t, micros: libc::c_long) -> String {
    // SAFETY: numbers and a pointer: zeroes are valid.
    let mut time: libc::tm = unsafe { std::mem::zeroed() };
    // SAFETY: both pointers are valid during the call.
    unsafe { libc::gmtime_r(&raw const seconds, &raw mut time) };
    let libc::tm { tm_mon, tm_mday, tm_hour, tm_min, tm_sec, .. } = time;
    let (year, month) = (i64::from(time.tm_year) + 1900, tm_mon + 1);
    format!("{year}-{month:02}-{tm_mday:02} {tm_hour:02}:{tm_min:02}:{tm_sec:02}.{micros:06}")
}

/// Logs the bytes of a buffer.
///
/// # Safety
/// `bytes` has `len` readable bytes; `prefix` is null or a C string.
#[unsafe(no_mangle)]
unsafe extern "C" fn nbdkit_debug_hexdump(
    bytes: *const c_void,
    len: usize,
    prefix: *const c_char,
    start: u64,
) {
    if super::cabi_debugging() == 0 {
        return;
    }
    // SAFETY: the plugin's promise.
    let (bytes, prefix) = unsafe { (slice(bytes, len), super::text(prefix)) };
    let prefix = prefix.unwrap_or_default();
    lines(len, start).for_each(|line| {
        super::debug_text(&format!("{prefix}{}", line.shown(|index| bytes.get(index).copied())))
    });
}

/// Logs two buffers of one length: lines that differ with both contents.
///
/// # Safety
/// Both buffers have `len` readable bytes; `prefix` is null or a C string.
#[unsafe(no_mangle)]
unsafe extern "C" fn nbdkit_debug_hexdiff(
    first: *const c_void,
    second: *const c_void,
    len: usize,
    prefix: *const c_char,
    start: u64,
) {
    if super::cabi_debugging() == 0 {
        return;
    }
    // SAFETY: the plugin's promise.
    let (first, second, prefix) =
        unsafe { (slice(first, len), slice(second, len), super::text(prefix)) };
    let prefix = prefix.unwrap_or_default();
    for line in lines(len, start) {
        let old = line.shown(|index| first.get(index).copied());
        let range = line.from..line.to;
        if first.get(range.clone()) == second.get(range) {
            super::debug_text(&format!("{prefix} {old}"));
            continue;
        }
        let new = line.shown(|index| {
            let byte = second.get(index).copied();
            byte.filter(|byte| first.get(index) != Some(byte))
        });
        super::debug_text(&format!("{prefix}-{old}"));
        super::debug_text(&format!("{prefix}+{new}"));
    }
}

/// The bytes of a buffer; none of a null pointer.
///
/// # Safety
/// `bytes` has `len` readable bytes, or is null.
unsafe fn slice<'a>(bytes: *const c_void, len: usize) -> &'a [u8] {
    if bytes.is_null() {
        return &[];
    }
    // SAFETY: not null; the caller's promise.
    unsafe { std::slice::from_raw_parts(bytes.cast(), len) }
}

/// A line of a dump: the offset at its start, and the bytes of the buffer on it.
struct Line {
    offset: u64,
    from: usize,
    to: usize,
    /// Places before the first byte.
    blank: usize,
}

/// The lines of a buffer whose first byte has the offset `start`.
fn lines(len: usize, start: u64) -> impl Iterator<Item = Line> {
    let blank = usize::try_from(start % LINE).expect("less than a line");
    let ends = (0..=len.saturating_add(blank)).step_by(16).skip(1).map(move |end| end - blank);
    let ends = ends.chain(std::iter::once(len));
    let mut from = 0;
    ends.filter_map(move |to| {
        let line = Line {
            offset: start.wrapping_add(from as u64) / LINE * LINE,
            blank: if from == 0 { blank } else { 0 },
            from,
            to,
        };
        from = to;
        (line.from < line.to).then_some(line)
    })
}

impl Line {
    /// The line with bytes in hexadecimal and as letters; a byte of `None` is left blank.
    fn shown(&self, byte: impl Fn(usize) -> Option<u8>) -> String {
        let place = |at: usize| {
            let index = at.checked_sub(self.blank)? + self.from;
            if index < self.to { byte(index) } else { None }
        };
        let mut line = format!("{:08x}:", self.offset);
        for at in 0..16 {
            line += if at == 8 { "  " } else { " " };
            match place(at) {
                Some(byte) => drop(write!(line, "{byte:02x}")),
                None => line += "  ",
            }
        }
        line += "  |";
        line.extend((0..16).map(|at| match place(at) {
            Some(byte @ b' '..=b'~') => char::from(byte),
            Some(_) => '.',
            None => ' ',
        }));
        line.push('|');
        line
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dump(bytes: &[u8], start: u64) -> Vec<String> {
        lines(bytes.len(), start)
            .map(|line| line.shown(|index| bytes.get(index).copied()))
            .collect()
    }

    #[test]
    fn lines_of_a_dump_begin_at_multiples_of_their_length() {
        assert_eq!(
            dump(b"1234567812345678abc\0\xff ~\x7f", 0),
            [
                "00000000: 31 32 33 34 35 36 37 38  31 32 33 34 35 36 37 38  |1234567812345678|",
                "00000010: 61 62 63 00 ff 20 7e 7f                           |abc.. ~.        |",
            ]
        );
        assert_eq!(
            dump(b"1234567812345678abc", 5),
            [
                "00000000:                31 32 33  34 35 36 37 38 31 32 33  |     12345678123|",
                "00000010: 34 35 36 37 38 61 62 63                           |45678abc        |",
            ]
        );
        assert_eq!(
            dump(b"123", 0x1_2345_6789),
            ["123456780:                             31 32 33              |         123    |"]
        );
        assert_eq!(dump(b"", 3), [""; 0]);
        assert_eq!(dump(&[0; 32], 0).len(), 2);
    }

    #[test]
    fn time_stamps_are_in_utc() {
        assert_eq!(timestamp(0, 1), "1970-01-01 00:00:00.000001");
        assert_eq!(timestamp(951_782_400, 0), "2000-02-29 00:00:00.000000");
        assert_eq!(timestamp(1_767_268_800, 333), "2026-01-01 12:00:00.000333");
        assert_eq!(timestamp(4_107_542_399, 0), "2100-02-28 23:59:59.000000");
    }
}
