//! The functions of nbdkit's interface that plugins call, as far as they take a fixed number of
//! arguments; the others are in `shim.c`. Their contracts are those of nbdkit's manual pages
//! (`nbdkit_NAME(3)`); a pointer that a plugin hands over is good as those pages say.

use std::ffi::{CStr, CString, OsStr, c_char, c_double, c_int, c_uint};
use std::os::fd::AsRawFd as _;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};
use std::ptr;
use std::time::{Duration, Instant};

use crate::context;
use crate::lists::{Exports, Extents};
use crate::parse;

/// Between two looks at whether a sleep is to end early.
const SLEEP_SLICE: Duration = Duration::from_millis(50);

/// A text of a plugin; what is not UTF-8 is replaced.
///
/// # Safety
/// `text` is null or points to a C string that lives while the result is in use.
pub(crate) unsafe fn text<'a>(text: *const c_char) -> Option<std::borrow::Cow<'a, str>> {
    // SAFETY: the caller's promise.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy())
}

/// A copy on C's heap, for the plugin to free; null when there is no memory.
fn malloced(bytes: &[u8]) -> *mut c_char {
    // SAFETY: an allocation of at least one byte.
    let copy = unsafe { libc::malloc(bytes.len() + 1) }.cast::<u8>();
    if !copy.is_null() {
        // SAFETY: `copy` has room for the bytes and the terminator, and is fresh.
        unsafe {
            ptr::copy_nonoverlapping(bytes.as_ptr(), copy, bytes.len());
            copy.add(bytes.len()).write(0);
        }
    }
    copy.cast()
}

/// What the system says, without "(os error N)".
fn plain(error: &std::io::Error) -> String {
    let text = error.to_string();
    text.split(" (os error ").next().unwrap_or_default().to_string()
}

/// Says why a call failed.
fn failed<T>(why: impl AsRef<str>, value: T) -> T {
    context::said(why.as_ref());
    value
}

/// A text from a plugin, with its errors: for functions that fail on null.
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
        _ => match context::now() {
            Some(context) => log::debug!("{}: {}", context.plugin, text.trim_end()),
            None => log::debug!("a plugin: {}", text.trim_end()),
        },
    }
}

/// # Safety
/// `text` is a C string.
#[unsafe(no_mangle)]
unsafe extern "C" fn cabi_intern(text: *const c_char) -> *const c_char {
    // SAFETY: the shim passes a string of its own.
    context::intern(unsafe { CStr::from_ptr(text) }.to_owned())
}

/// The plugin's error number for the callback that runs.
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

/// Whether standard input and output are the plugin's to use: while it is configured.
#[unsafe(no_mangle)]
extern "C" fn nbdkit_stdio_safe() -> c_int {
    c_int::from(context::now().is_some_and(|context| context.stdio_safe))
}

/// # Safety
/// `path` is a C string.
#[unsafe(no_mangle)]
unsafe extern "C" fn nbdkit_absolute_path(path: *const c_char) -> *mut c_char {
    // SAFETY: the plugin's promise.
    let Some(path) = (unsafe { path_of(path) }) else { return ptr::null_mut() };
    match std::path::absolute(&path) {
        Ok(path) => malloced(path.as_os_str().as_bytes()),
        Err(error) => failed(format!("{}: {}", path.display(), plain(&error)), ptr::null_mut()),
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
        Err(error) => failed(format!("{}: {}", path.display(), plain(&error)), ptr::null_mut()),
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

/// Sleeps, but not on when the client has gone.
#[unsafe(no_mangle)]
extern "C" fn nbdkit_nanosleep(seconds: c_uint, nanos: c_uint) -> c_int {
    let end =
        Instant::now() + Duration::from_secs(seconds.into()) + Duration::from_nanos(nanos.into());
    let context = context::now();
    loop {
        let left = end.saturating_duration_since(Instant::now());
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

/// The name of the export that the client asked for.
#[unsafe(no_mangle)]
extern "C" fn nbdkit_export_name() -> *const c_char {
    match context::now() {
        Some(context) => match &context.export {
            // Good as long as the connection: the context lives at least until its handle is closed.
            Some(name) => name.as_ptr(),
            None => failed("nbdkit_export_name: no client has asked for an export", ptr::null()),
        },
        None => failed("nbdkit_export_name: called outside of a callback", ptr::null()),
    }
}

/// Whether the connection is encrypted.
#[unsafe(no_mangle)]
extern "C" fn nbdkit_is_tls() -> c_int {
    match context::now() {
        Some(context) if context.client.is_some() => c_int::from(context.tls),
        _ => failed("nbdkit_is_tls: there is no connection", -1),
    }
}

/// Asks the whole program to stop.
#[unsafe(no_mangle)]
extern "C" fn nbdkit_shutdown() {
    log::debug!("a plugin asks for the end of the server");
    let own = c_int::try_from(std::process::id()).unwrap_or(0);
    if own > 0 {
        // SAFETY: a signal to this very process, which it handles.
        unsafe { libc::kill(own, libc::SIGTERM) };
    }
}

/// Ends the connection: at once, or once what the client has sent is answered.
#[unsafe(no_mangle)]
extern "C" fn nbdkit_disconnect(force: c_int) {
    let Some(fd) = client_fd() else { return failed("there is no connection", ()) };
    let how = if force != 0 { libc::SHUT_RDWR } else { libc::SHUT_RD };
    // SAFETY: the descriptor is open while the context holds the stream.
    unsafe { libc::shutdown(fd.1, how) };
}

/// The client's socket, kept open while the first part lives.
fn client_fd() -> Option<(std::sync::Arc<context::Context>, c_int)> {
    use std::os::fd::AsFd as _;
    let context = context::now()?;
    let fd = context.client.as_ref()?.stream.as_ref()?.as_fd().as_raw_fd();
    Some((context, fd))
}

/// # Safety
/// `address` and `len` are as for getpeername(2).
#[unsafe(no_mangle)]
unsafe extern "C" fn nbdkit_peer_name(
    address: *mut libc::sockaddr,
    len: *mut libc::socklen_t,
) -> c_int {
    let Some(fd) = client_fd() else { return failed("the client has no socket", -1) };
    // SAFETY: the plugin's promise, and the descriptor is open.
    match unsafe { libc::getpeername(fd.1, address, len) } {
        0 => 0,
        _ => failed(format!("getpeername: {}", plain(&std::io::Error::last_os_error())), -1),
    }
}

fn peer_credentials() -> Option<libc::ucred> {
    let Some(fd) = client_fd() else { return failed("the client has no socket", None) };
    let mut credentials = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    let out = (&raw mut credentials).cast();
    // SAFETY: `out` has room for `len` bytes, and the descriptor is open.
    let got =
        unsafe { libc::getsockopt(fd.1, libc::SOL_SOCKET, libc::SO_PEERCRED, out, &raw mut len) };
    // Process 0: not a Unix socket.
    if got != 0 || credentials.pid == 0 {
        return failed("the client's user is known on Unix sockets only", None);
    }
    Some(credentials)
}

/// The client's process id.
#[unsafe(no_mangle)]
extern "C" fn nbdkit_peer_pid() -> i64 {
    peer_credentials().map_or(-1, |peer| peer.pid.into())
}

/// The client's user id.
#[unsafe(no_mangle)]
extern "C" fn nbdkit_peer_uid() -> i64 {
    peer_credentials().map_or(-1, |peer| peer.uid.into())
}

/// The client's group id.
#[unsafe(no_mangle)]
extern "C" fn nbdkit_peer_gid() -> i64 {
    peer_credentials().map_or(-1, |peer| peer.gid.into())
}

/// The client's security context (SELinux), to be freed by the plugin.
#[unsafe(no_mangle)]
extern "C" fn nbdkit_peer_security_context() -> *mut c_char {
    let Some(fd) = client_fd() else { return failed("the client has no socket", ptr::null_mut()) };
    let mut label = [0_u8; 1024];
    let mut len = label.len() as libc::socklen_t;
    let out = label.as_mut_ptr().cast();
    // SAFETY: `out` has room for `len` bytes, and the descriptor is open.
    let got =
        unsafe { libc::getsockopt(fd.1, libc::SOL_SOCKET, libc::SO_PEERSEC, out, &raw mut len) };
    if got != 0 {
        let error = std::io::Error::last_os_error();
        let why = format!("the client has no security context: {}", plain(&error));
        return failed(why, ptr::null_mut());
    }
    let label = &label[..label.len().min(len as usize)];
    let end = label.iter().position(|&byte| byte == 0).unwrap_or(label.len());
    malloced(&label[..end])
}

/// The subject of the client's certificate: empty, as it is not handed to plugins.
#[unsafe(no_mangle)]
extern "C" fn nbdkit_peer_tls_dn() -> *mut c_char {
    malloced(b"")
}

/// The issuer of the client's certificate: empty, as it is not handed to plugins.
#[unsafe(no_mangle)]
extern "C" fn nbdkit_peer_tls_issuer_dn() -> *mut c_char {
    malloced(b"")
}

/// Adds an extent to a list.
///
/// # Safety
/// `extents` came from this crate and is used by one thread at a time.
#[unsafe(no_mangle)]
unsafe extern "C" fn nbdkit_add_extent(
    extents: *mut Extents,
    at: u64,
    len: u64,
    state: u32,
) -> c_int {
    // SAFETY: the plugin passes on what it was given.
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

/// A list of extents of the plugin's own.
#[unsafe(no_mangle)]
extern "C" fn nbdkit_extents_new(start: u64, end: u64) -> *mut Extents {
    if start > end || end > i64::MAX as u64 {
        context::set_errno(libc::ERANGE);
        return failed("nbdkit_extents_new: not a range", ptr::null_mut());
    }
    Box::into_raw(Box::new(Extents::new(start, end)))
}

/// # Safety
/// `extents` is null or came from [`nbdkit_extents_new`], and is not used again.
#[unsafe(no_mangle)]
unsafe extern "C" fn nbdkit_extents_free(extents: *mut Extents) {
    if !extents.is_null() {
        // SAFETY: the plugin's promise.
        drop(unsafe { Box::from_raw(extents) });
    }
}

/// # Safety
/// `extents` came from this crate.
#[unsafe(no_mangle)]
unsafe extern "C" fn nbdkit_extents_count(extents: *const Extents) -> usize {
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
unsafe extern "C" fn nbdkit_get_extent(extents: *const Extents, index: usize) -> CExtent {
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
    exports: *mut Exports,
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
unsafe extern "C" fn nbdkit_use_default_export(exports: *mut Exports) -> c_int {
    // SAFETY: the plugin's promise.
    let Some(exports) = (unsafe { exports.as_mut() }) else {
        return failed("nbdkit_use_default_export: the list is NULL", -1);
    };
    exports.add_default().map_or_else(|why| failed(why, -1), |()| 0)
}

/// # Safety
/// `exports` is null: plugins make no lists of exports, but many hold on to this function.
#[unsafe(no_mangle)]
unsafe extern "C" fn nbdkit_exports_free(exports: *mut Exports) {
    if !exports.is_null() {
        // SAFETY: the plugin's promise: it came from [`nbdkit_exports_new`].
        drop(unsafe { Box::from_raw(exports) });
    }
}

/// A list of exports of the plugin's own.
#[unsafe(no_mangle)]
extern "C" fn nbdkit_exports_new() -> *mut Exports {
    Box::into_raw(Box::default())
}
