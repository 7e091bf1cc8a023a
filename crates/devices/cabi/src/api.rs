//! The functions of nbdkit's interface that plugins call, as far as they take a fixed number of
//! arguments; the others are in `shim.c`, with `nbdkit_shutdown`. Their contracts are those of
//! nbdkit's manual pages (`nbdkit_NAME(3)`), also for the validity of pointers that a plugin
//! passes. `debugging`: dumps, time stamps, the server's name. `peer`: functions about the client and its connection. `lists`: functions that fill
//! lists.

mod debugging;
mod lists;
mod peer;

pub use debugging::set_server_name;

use std::ffi::{CStr, CString, OsStr, c_char, c_double, c_int, c_uint, c_void};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};
use std::ptr;
use std::time::Duration;

use crate::context;
use crate::parse;
use crate::stdio;

/// Interval of checks whether to end a sleep early.
const SLEEP_SLICE: Duration = Duration::from_millis(50);

/// A text from a plugin; invalid UTF-8 is replaced.
///
/// # Safety
/// `text` is null or points to a C string that lives while the result is in use.
pub(crate) unsafe fn text<'a>(text: *const c_char) -> Option<std::borrow::Cow<'a, str>> {
    // SAFETY: the caller's promise.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy())
}

/// Prints through C's standard output.
pub(crate) fn print(text: &str) {
    if let Ok(text) = CString::new(text) {
        // SAFETY: a format and the C string that it requires.
        unsafe { libc::printf(c"%s".as_ptr(), text.as_ptr()) };
    }
}

/// A copy on C's heap, for the plugin to free; null when there is no memory.
fn malloced(bytes: &[u8]) -> *mut c_char {
    // SAFETY: an allocation of at least one byte.
    let copy = unsafe { libc::malloc(bytes.len() + 1) }.cast::<u8>();
    if !copy.is_null() {
        // SAFETY: `copy` has space for the bytes and the terminator, and is fresh.
        unsafe {
            ptr::copy_nonoverlapping(bytes.as_ptr(), copy, bytes.len());
            copy.add(bytes.len()).write(0);
        }
    }
    copy.cast()
}

/// Records why a call failed.
fn failed<T>(why: impl AsRef<str>, value: T) -> T {
    context::said(why.as_ref());
    value
}

/// A text from a plugin; null is an error.
///
/// # Safety
/// As [`text`].
unsafe fn wanted<'a>(what: &str, value: *const c_char) -> Option<std::borrow::Cow<'a, str>> {
    // SAFETY: the caller's promise.
    let value = unsafe { text(value) };
    if value.is_none() {
        context::said(&format!("{what}: the text is NULL"));
    }
    value
}

#[unsafe(no_mangle)]
extern "C" fn cabi_debugging() -> c_int {
    c_int::from(log::log_enabled!(log::Level::Debug))
}

/// # Safety
/// `text` is a C string.
#[unsafe(no_mangle)]
unsafe extern "C" fn cabi_said(level: c_int, text: *const c_char) {
    // SAFETY: the shim passes a string of its own.
    let Some(text) = (unsafe { self::text(text) }) else { return };
    match level {
        0 => context::said(text.trim_end()),
        _ => debug_text(text.trim_end()),
    }
}

/// Logs a text of the plugin for users who look for its faults.
fn debug_text(text: &str) {
    match context::now() {
        // The caller knows the source when it prints the text.
        Some(context) => log::debug!(target: &format!("plugin {}", context.plugin), "{text}"),
        None => log::debug!(target: "plugin", "{text}"),
    }
}

/// # Safety
/// `text` is a C string.
#[unsafe(no_mangle)]
unsafe extern "C" fn cabi_intern(text: *const c_char) -> *const c_char {
    // SAFETY: the shim passes a string of its own.
    context::intern(unsafe { CStr::from_ptr(text) }.to_owned())
}

/// The plugin's error number for the current callback.
#[unsafe(no_mangle)]
extern "C" fn nbdkit_set_error(error: c_int) {
    context::set_error(error);
}

/// # Safety
/// `text` is a C string.
#[unsafe(no_mangle)]
unsafe extern "C" fn nbdkit_parse_size(text: *const c_char) -> i64 {
    // SAFETY: the plugin's promise.
    let Some(text) = (unsafe { wanted("nbdkit_parse_size", text) }) else { return -1 };
    parse::size(&text).unwrap_or_else(|why| failed(why, -1))
}

/// # Safety
/// `text` is a C string.
#[unsafe(no_mangle)]
unsafe extern "C" fn nbdkit_parse_bool(text: *const c_char) -> c_int {
    // SAFETY: the plugin's promise.
    let Some(text) = (unsafe { wanted("nbdkit_parse_bool", text) }) else { return -1 };
    parse::boolean(&text).map_or_else(|why| failed(why, -1), c_int::from)
}

macro_rules! parse_number {
    ($name:ident, $kind:ty) => {
        /// # Safety
        /// Both texts are C strings; `out` is null or may be written.
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(
            what: *const c_char,
            text: *const c_char,
            out: *mut $kind,
        ) -> c_int {
            // SAFETY: the plugin's promise.
            let (what, text) = unsafe { (self::text(what), wanted(stringify!($name), text)) };
            let (what, Some(text)) = (what.unwrap_or_default(), text) else { return -1 };
            match parse::integer(&what, &text, <$kind>::MIN.into(), <$kind>::MAX.into()) {
                Ok(number) => {
                    let number = <$kind>::try_from(number).expect("checked against these bounds");
                    if !out.is_null() {
                        // SAFETY: the plugin's promise.
                        unsafe { out.write(number) };
                    }
                    0
                }
                Err(why) => failed(why, -1),
            }
        }
    };
}

parse_number!(nbdkit_parse_int, c_int);
parse_number!(nbdkit_parse_unsigned, c_uint);
parse_number!(nbdkit_parse_int8_t, i8);
parse_number!(nbdkit_parse_uint8_t, u8);
parse_number!(nbdkit_parse_int16_t, i16);
parse_number!(nbdkit_parse_uint16_t, u16);
parse_number!(nbdkit_parse_int32_t, i32);
parse_number!(nbdkit_parse_uint32_t, u32);
parse_number!(nbdkit_parse_int64_t, i64);
parse_number!(nbdkit_parse_uint64_t, u64);

/// # Safety
/// Both texts are C strings; `out` is null or may be written.
#[unsafe(no_mangle)]
unsafe extern "C" fn nbdkit_parse_probability(
    what: *const c_char,
    text: *const c_char,
    out: *mut c_double,
) -> c_int {
    // SAFETY: the plugin's promise.
    let (what, text) = unsafe { (self::text(what), wanted("nbdkit_parse_probability", text)) };
    let Some(text) = text else { return -1 };
    match parse::probability(&what.unwrap_or_default(), &text) {
        Ok(value) => {
            if !out.is_null() {
                // SAFETY: the plugin's promise.
                unsafe { out.write(value) };
            }
            0
        }
        Err(why) => failed(why, -1),
    }
}

/// # Safety
/// Both texts are C strings; `seconds` and `nanos` are null or may be written.
#[unsafe(no_mangle)]
unsafe extern "C" fn nbdkit_parse_delay(
    what: *const c_char,
    text: *const c_char,
    seconds: *mut c_uint,
    nanos: *mut c_uint,
) -> c_int {
    // SAFETY: the plugin's promise.
    let (what, text) = unsafe { (self::text(what), wanted("nbdkit_parse_delay", text)) };
    let Some(text) = text else { return -1 };
    match parse::delay(&what.unwrap_or_default(), &text) {
        Ok(delay) => {
            let whole = c_uint::try_from(delay.as_secs()).unwrap_or(c_uint::MAX);
            for (out, value) in [(seconds, whole), (nanos, delay.subsec_nanos())] {
                if !out.is_null() {
                    // SAFETY: the plugin's promise.
                    unsafe { out.write(value) };
                }
            }
            0
        }
        Err(why) => failed(why, -1),
    }
}

/// The value itself, `-` from the terminal, `-FD` from a descriptor, `+FILE` from a file.
///
/// # Safety
/// `value` is a C string; `out` may be written.
#[unsafe(no_mangle)]
unsafe extern "C" fn nbdkit_read_password(value: *const c_char, out: *mut *mut c_char) -> c_int {
    if value.is_null() || out.is_null() {
        return failed("nbdkit_read_password: a pointer is NULL", -1);
    }
    // SAFETY: the plugin's promise.
    let value = unsafe { CStr::from_ptr(value) }.to_bytes();
    match crate::password::read(value) {
        Ok(password) => {
            let copy = malloced(&password);
            // SAFETY: the plugin's promise.
            unsafe { out.write(copy) };
            if copy.is_null() { failed("out of memory", -1) } else { 0 }
        }
        Err(why) => failed(why, -1),
    }
}

/// Whether the plugin may use standard input and output: while it is configured.
#[unsafe(no_mangle)]
extern "C" fn nbdkit_stdio_safe() -> c_int {
    c_int::from(stdio::is_free() && context::now().is_some_and(|context| context.stdio_safe))
}

/// # Safety
/// `path` is a C string.
#[unsafe(no_mangle)]
unsafe extern "C" fn nbdkit_absolute_path(path: *const c_char) -> *mut c_char {
    // SAFETY: the plugin's promise.
    let Some(path) = (unsafe { path_of(path) }) else { return ptr::null_mut() };
    match std::path::absolute(&path) {
        Ok(path) => malloced(path.as_os_str().as_bytes()),
        Err(error) => {
            failed(format!("{}: {}", path.display(), blockhaul_io::plain(&error)), ptr::null_mut())
        }
    }
}

/// # Safety
/// `path` is a C string.
#[unsafe(no_mangle)]
unsafe extern "C" fn nbdkit_realpath(path: *const c_char) -> *mut c_char {
    // SAFETY: the plugin's promise.
    let Some(path) = (unsafe { path_of(path) }) else { return ptr::null_mut() };
    match path.canonicalize() {
        Ok(path) => malloced(&path.into_os_string().into_vec()),
        Err(error) => {
            failed(format!("{}: {}", path.display(), blockhaul_io::plain(&error)), ptr::null_mut())
        }
    }
}

/// # Safety
/// `path` is null or a C string.
unsafe fn path_of(path: *const c_char) -> Option<PathBuf> {
    if path.is_null() {
        return failed("a path is NULL", None);
    }
    // SAFETY: not null; the caller's promise.
    let bytes = unsafe { CStr::from_ptr(path) }.to_bytes();
    if bytes.is_empty() {
        return failed("a path is empty", None);
    }
    Some(Path::new(OsStr::from_bytes(bytes)).to_path_buf())
}

/// Sleeps; ends early if the client has disconnected.
#[unsafe(no_mangle)]
extern "C" fn nbdkit_nanosleep(seconds: c_uint, nanos: c_uint) -> c_int {
    let end = blockhaul_io::now()
        + Duration::from_secs(seconds.into())
        + Duration::from_nanos(nanos.into());
    let context = context::now();
    loop {
        let left = end.saturating_duration_since(blockhaul_io::now());
        if left.is_zero() {
            return 0;
        }
        if context.as_ref().is_some_and(|context| context.is_abandoned()) {
            context::set_errno(libc::ESHUTDOWN);
            return failed("the client left during a sleep", -1);
        }
        std::thread::sleep(left.min(SLEEP_SLICE));
    }
}

/// # Safety
/// `text` is a C string.
#[unsafe(no_mangle)]
unsafe extern "C" fn nbdkit_strdup_intern(text: *const c_char) -> *const c_char {
    if text.is_null() {
        return failed("nbdkit_strdup_intern: the text is NULL", ptr::null());
    }
    // SAFETY: not null; the plugin's promise.
    context::intern(unsafe { CStr::from_ptr(text) }.to_owned())
}

/// # Safety
/// `text` is a C string, or `most` bytes.
#[unsafe(no_mangle)]
unsafe extern "C" fn nbdkit_strndup_intern(text: *const c_char, most: usize) -> *const c_char {
    if text.is_null() {
        return failed("nbdkit_strndup_intern: the text is NULL", ptr::null());
    }
    // SAFETY: not null, and it is read up to its end or `most` bytes: the plugin's promise.
    let bytes = unsafe { std::slice::from_raw_parts(text.cast::<u8>(), libc::strnlen(text, most)) };
    context::intern(CString::new(bytes).expect("ends before the first zero byte"))
}

/// The name of the export that the client requested.
#[unsafe(no_mangle)]
extern "C" fn nbdkit_export_name() -> *const c_char {
    match context::now() {
        Some(context) => match &context.export {
            // Valid as long as the connection: the context lives at least until its handle is
            // closed.
            Some(name) => name.as_ptr(),
            None => failed("nbdkit_export_name: no client has asked for an export", ptr::null()),
        },
        None => failed("nbdkit_export_name: called outside of a callback", ptr::null()),
    }
}

/// `nbdkit_shutdown`, called by code at `caller`.
#[unsafe(no_mangle)]
extern "C" fn cabi_shutdown(caller: *const c_void) {
    crate::shutdown::request(caller);
}
