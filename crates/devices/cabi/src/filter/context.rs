//! An open backend: one for each connection and level of the chain. A filter gets a pointer to that
//! of the backend below, and calls it through the functions in its first field.
//!
//! Pointers to [`OpenBackend`] come from [`open`] and are valid until [`close`]; whichever side opened it
//! closes it. The chain's thread model limits what a filter may do with one from several threads;
//! the state stored here is atomic.

use std::ffi::{CStr, CString, c_char, c_int};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicI64, AtomicPtr, AtomicU8, Ordering::Relaxed};

use super::abi::{Backends, Handle, Next, NextOps, OpaqueOpen};
use super::bottom::ChainEnd;
use super::calls;
use super::chain::{self, ChainBackend, no_handle};
use super::data;
use crate::context::{self, CallContext, said};

/// Maximum length of an export's name.
const NAME_MAX: usize = 4096;
/// Not queried yet.
const UNKNOWN: c_int = -2;

/// An open backend.
#[repr(C)]
pub struct OpenBackend {
    /// First, because filters expect it here.
    ops: NextOps,
    backend: &'static ChainBackend,
    /// The filter's handle.
    handle: AtomicPtr<std::ffi::c_void>,
    /// The plugin's, at the end of the chain.
    pub(super) bottom: Option<ChainEnd>,
    /// The open backend below.
    next: AtomicPtr<OpaqueOpen>,
    readonly: bool,
    state: AtomicU8,
    size: AtomicI64,
    block_size: std::sync::Mutex<Option<[u32; 3]>>,
    answers: [AtomicI32; QUESTIONS],
}

/// `prepare` succeeded.
const PREPARED: u8 = 1;
/// `finalize` failed: no function of it is called any more.
const FAILED: u8 = 2;

/// Queries that are made once.
#[derive(Clone, Copy)]
pub(super) enum Question {
    Write,
    Flush,
    Rotational,
    Trim,
    Zero,
    FastZero,
    Extents,
    Fua,
    MultiConn,
    Cache,
}

const QUESTIONS: usize = 10;

fn ops() -> NextOps {
    NextOps {
        prepare,
        finalize,
        get_size,
        export_description,
        block_size,
        can_write,
        can_flush,
        is_rotational,
        can_trim,
        can_zero,
        can_fast_zero,
        can_extents,
        can_fua,
        can_multi_conn,
        can_cache,
        pread: data::pread,
        pwrite: data::pwrite,
        flush: data::flush,
        trim: data::trim,
        zero: data::zero,
        extents: data::extents,
        cache: data::cache,
    }
}

/// Dereferences an open backend.
///
/// # Safety
/// `open` came from [`open`] and is not closed yet.
pub(super) unsafe fn known<'a>(open: Next) -> &'a OpenBackend {
    // SAFETY: the caller's promise; it is changed only through atomics.
    unsafe { &*open.cast() }
}

/// The name of a backend's default export; none: there is none, which was reported.
fn default_name(backend: &'static ChainBackend, readonly: c_int) -> Option<CString> {
    // SAFETY: one of the chain's; returns null or a C string.
    let default = unsafe { calls::default_export(backend.address(), readonly) };
    if default.is_null() {
        said("default export (\"\") not permitted");
        return None;
    }
    // SAFETY: not null.
    let name = unsafe { CStr::from_ptr(default) }.to_owned();
    if name.as_bytes().len() > NAME_MAX {
        said("the default export's name is too long");
        return None;
    }
    Some(name)
}

/// Opens a backend; null: it failed, and has reported why. `shared`: for no connection in
/// particular.
///
/// # Safety
/// `backend` is one of the chain's, `name` a C string.
pub(super) unsafe fn open(
    backend: Backends,
    readonly: c_int,
    name: *const c_char,
    shared: bool,
) -> Next {
    // SAFETY: the caller's promise.
    let (backend, name) = unsafe { (chain::known(backend), CStr::from_ptr(name)) };
    let mut name = name.to_owned();
    let current = context::now().filter(|context| context.client.is_some() && !shared);
    let tls = current.as_ref().is_some_and(|context| context.tls);
    if name.is_empty() && current.is_some() {
        let Some(default) = default_name(backend, readonly) else { return ptr::null_mut() };
        name = default;
    }
    let shown = name.to_string_lossy();
    log::debug!("{}: open readonly={readonly} exportname=\"{shown}\"", backend.name());
    let bottom = match backend.filter {
        Some(_) => None,
        None => {
            let context = Arc::new(CallContext {
                plugin: backend.name().into(),
                client: current.as_ref().and_then(|context| context.client.clone()),
                export: Some(name.clone()),
                tls,
                defaults: current.as_ref().map(|now| now.defaults.clone()).unwrap_or_default(),
                shutdown: current.as_ref().and_then(|now| now.shutdown.clone()),
                ..CallContext::default()
            });
            let Some(bottom) = ChainEnd::open(context, readonly) else { return ptr::null_mut() };
            Some(bottom)
        }
    };
    let made: Next = Box::into_raw(Box::new(OpenBackend {
        ops: ops(),
        backend,
        handle: AtomicPtr::new(ptr::null_mut()),
        bottom,
        next: AtomicPtr::new(ptr::null_mut()),
        readonly: readonly != 0,
        state: AtomicU8::new(0),
        size: AtomicI64::new(UNKNOWN.into()),
        block_size: std::sync::Mutex::new(None),
        answers: [const { AtomicI32::new(UNKNOWN) }; QUESTIONS],
    }))
    .cast();
    // SAFETY: made just above, and shared with the filter only.
    let own = unsafe { known(made) };
    if own.bottom.is_some() {
        return made;
    }
    // SAFETY: a filter's own callback, with its documented arguments.
    let handle = unsafe { open_filter(backend, made, readonly, &name, c_int::from(tls)) };
    if handle.is_null() {
        let next = own.next.swap(ptr::null_mut(), Relaxed);
        if !next.is_null() {
            // SAFETY: the filter opened it, and no longer uses it.
            unsafe { close(next) };
        }
        // SAFETY: made above; the filter no longer uses it.
        drop(unsafe { Box::from_raw(made.cast::<OpenBackend>()) });
        return ptr::null_mut();
    }
    own.handle.store(handle, Relaxed);
    made
}

/// # Safety
/// As [`open`]; `made` belongs to `backend`, which is a filter.
unsafe fn open_filter(
    backend: &ChainBackend,
    made: Next,
    readonly: c_int,
    name: &CString,
    tls: c_int,
) -> Handle {
    // SAFETY: the caller's promise.
    unsafe {
        match backend.filter.as_ref().and_then(|filter| filter.open) {
            Some(open) => open(open_next, made, readonly, name.as_ptr(), tls),
            None if open_next(made, readonly, name.as_ptr()) == -1 => ptr::null_mut(),
            None => no_handle(),
        }
    }
}

/// For a filter's `open`: opens the backend below.
///
/// # Safety
/// `own` is the filter's own, `name` a C string.
unsafe extern "C" fn open_next(own: Next, readonly: c_int, name: *const c_char) -> c_int {
    // SAFETY: the caller's promise.
    let own = unsafe { known(own) };
    // SAFETY: as above.
    let next = unsafe { open(own.backend.next(), readonly, name, false) };
    if next.is_null() {
        return -1;
    }
    own.next.store(next, Relaxed);
    0
}

/// Closes what [`open`] opened, from the outside inwards.
///
/// # Safety
/// `own` came from [`open`]; this is its last use.
pub(super) unsafe fn close(own: Next) {
    // SAFETY: the caller's promise.
    let open = unsafe { Box::from_raw(own.cast::<OpenBackend>()) };
    log::debug!("{}: close", open.backend.name());
    if let Some(bottom) = &open.bottom {
        bottom.close();
    }
    if let Some(close) = open.backend.filter.as_ref().and_then(|filter| filter.close) {
        // SAFETY: the last use of the filter's handle.
        unsafe { close(open.handle.load(Relaxed)) };
    }
    let next = open.next.load(Relaxed);
    drop(open);
    if !next.is_null() {
        // SAFETY: it belonged to the backend that was closed.
        unsafe { close(next) };
    }
}

impl OpenBackend {
    pub(super) fn backend(&self) -> &'static ChainBackend {
        self.backend
    }

    pub(super) fn handle(&self) -> Handle {
        self.handle.load(Relaxed)
    }

    pub(super) fn next(&self) -> Next {
        self.next.load(Relaxed)
    }

    /// Replaces the open backend below, and returns the old one.
    pub(super) fn set_next(&self, next: Next) -> Next {
        self.next.swap(next, Relaxed)
    }

    fn remembered(&self, question: Question) -> Option<c_int> {
        let answer = self.answers[question as usize].load(Relaxed);
        (answer != UNKNOWN).then_some(answer)
    }

    fn remember(&self, question: Question, answer: c_int) -> c_int {
        // Failed queries are repeated.
        if answer != -1 {
            self.answers[question as usize].store(answer, Relaxed);
        }
        answer
    }

    /// The size, if known.
    pub(super) fn size(&self) -> u64 {
        u64::try_from(self.size.load(Relaxed)).unwrap_or(u64::MAX)
    }
}

/// # Safety
/// `own` is open.
pub(super) unsafe extern "C" fn prepare(own: Next) -> c_int {
    // SAFETY: the caller's promise; the backend below is open as long as this.
    unsafe {
        let open = known(own);
        if open.state.load(Relaxed) & PREPARED != 0 {
            return 0;
        }
        let next = open.next();
        if !next.is_null() && prepare(next) == -1 {
            return -1;
        }
        let readonly = c_int::from(open.readonly);
        log::debug!("{}: prepare readonly={readonly}", open.backend.name());
        let call = open.backend.filter.as_ref().and_then(|filter| filter.prepare);
        if call.is_some_and(|call| call(next, open.handle(), readonly) == -1) {
            return -1;
        }
        open.state.fetch_or(PREPARED, Relaxed);
        0
    }
}

/// # Safety
/// `own` is open.
pub(super) unsafe extern "C" fn finalize(own: Next) -> c_int {
    // SAFETY: the caller's promise; the backend below is open as long as this.
    unsafe {
        let open = known(own);
        let state = open.state.load(Relaxed);
        if state & FAILED != 0 {
            return -1;
        }
        let next = open.next();
        let call = open.backend.filter.as_ref().and_then(|filter| filter.finalize);
        if state & PREPARED != 0 {
            log::debug!("{}: finalize", open.backend.name());
            if call.is_some_and(|call| call(next, open.handle()) == -1) {
                open.state.fetch_or(FAILED, Relaxed);
                return -1;
            }
        }
        if next.is_null() { 0 } else { finalize(next) }
    }
}

/// # Safety
/// `own` is open and prepared.
pub(super) unsafe extern "C" fn get_size(own: Next) -> i64 {
    // SAFETY: the caller's promise; the backend below is open as long as this.
    unsafe {
        let open = known(own);
        let known = open.size.load(Relaxed);
        if known >= 0 {
            return known;
        }
        log::debug!("{}: get_size", open.backend.name());
        let size = match (&open.bottom, open.backend.filter.as_ref().and_then(|f| f.get_size)) {
            (Some(bottom), _) => bottom.size(),
            (None, Some(call)) => call(open.next(), open.handle()),
            (None, None) => get_size(open.next()),
        };
        open.size.store(size, Relaxed);
        size
    }
}

/// # Safety
/// `own` is open and prepared.
pub(super) unsafe extern "C" fn export_description(own: Next) -> *const c_char {
    // SAFETY: the caller's promise; the backend below is open as long as this.
    unsafe {
        let open = known(own);
        let call = open.backend.filter.as_ref().and_then(|filter| filter.export_description);
        match (&open.bottom, call) {
            (Some(bottom), _) => bottom.description(),
            (None, Some(call)) => call(open.next(), open.handle()),
            (None, None) => export_description(open.next()),
        }
    }
}

/// # Safety
/// `own` is open and prepared; the other pointers are writable.
pub(super) unsafe extern "C" fn block_size(
    own: Next,
    minimum: *mut u32,
    preferred: *mut u32,
    maximum: *mut u32,
) -> c_int {
    // SAFETY: the caller's promise; the backend below is open as long as this.
    unsafe {
        let open = known(own);
        let mut known = open.block_size.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let sizes = match *known {
            Some(sizes) => sizes,
            None => {
                let mut sizes = [0; 3];
                let call = open.backend.filter.as_ref().and_then(|filter| filter.block_size);
                let [least, usual, most] = &mut sizes;
                let answer = match (&open.bottom, call) {
                    (Some(bottom), _) => bottom.block_size(&mut sizes),
                    (None, Some(call)) => call(open.next(), open.handle(), least, usual, most),
                    (None, None) => block_size(open.next(), least, usual, most),
                };
                if answer == -1 {
                    return -1;
                }
                *known.insert(sizes)
            }
        };
        [*minimum, *preferred, *maximum] = sizes;
        0
    }
}

/// Queries a backend, once. If `on` is no, so is this.
macro_rules! question {
    ($name:ident, $question:ident $(, $on:ident)?) => {
        /// # Safety
        /// `own` is open and prepared.
        pub(super) unsafe extern "C" fn $name(own: Next) -> c_int {
            // SAFETY: the caller's promise; the backend below is open as long as this.
            unsafe {
                let open = known(own);
                if let Some(answer) = open.remembered(Question::$question) {
                    return answer;
                }
                if open.readonly && matches!(Question::$question, Question::Write) {
                    return 0;
                }
                log::debug!("{}: {}", open.backend.name(), stringify!($name));
                $(
                    let first = $on(own);
                    if first < 1 {
                        return open.remember(Question::$question, first);
                    }
                )?
                let call = open.backend.filter.as_ref().and_then(|filter| filter.$name);
                let answer = match (&open.bottom, call) {
                    (Some(bottom), _) => bottom.$name(),
                    (None, Some(call)) => call(open.next(), open.handle()),
                    (None, None) => $name(open.next()),
                };
                open.remember(Question::$question, answer)
            }
        }
    };
}

question!(can_write, Write);
question!(can_flush, Flush);
question!(is_rotational, Rotational);
question!(can_trim, Trim, can_write);
question!(can_zero, Zero, can_write);
question!(can_fast_zero, FastZero, can_zero);
question!(can_extents, Extents);
question!(can_fua, Fua, can_write);
question!(can_multi_conn, MultiConn);
question!(can_cache, Cache);
