//! Names the plugin after a crash in its code: handlers of fatal signals write one line and then
//! let the signal proceed. The same applies if a plugin calls exit(3).

use std::ffi::{CString, c_char, c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::Once;
use std::sync::atomic::{AtomicI32, AtomicPtr, Ordering};

use crate::context;
use crate::running::{self, ActiveCallback};

/// Signals of a program's own faults.
const SIGNALS: [c_int; 5] =
    [libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGFPE, libc::SIGABRT];
/// Maximum number of plugins to name.
const SLOTS: usize = 8;

/// Names of loaded plugins, as C strings: the only data that a signal handler may read.
static NAMES: [AtomicPtr<c_char>; SLOTS] = [const { AtomicPtr::new(ptr::null_mut()) }; SLOTS];
/// The previous handlers, in the order of [`SIGNALS`].
static mut BEFORE: [MaybeUninit<libc::sigaction>; SIGNALS.len()] =
    [const { MaybeUninit::uninit() }; SIGNALS.len()];
static INSTALLED: Once = Once::new();
/// The process that installed the handlers: forked processes inherit them, but may end as they
/// like.
static OWNER: AtomicI32 = AtomicI32::new(0);

/// A plugin's slot among the names; released on drop.
pub(crate) struct CrashSlot(Option<usize>);

impl CrashSlot {
    /// No slot.
    pub(crate) fn none() -> CrashSlot {
        CrashSlot(None)
    }

    /// Adds a name, and installs the handlers if it is the first.
    pub(crate) fn take(name: &str) -> CrashSlot {
        let Ok(name) = CString::new(name) else { return CrashSlot(None) };
        INSTALLED.call_once(install);
        // Never freed: a handler may be reading it.
        let name = name.into_raw();
        let free = NAMES.iter().position(|slot| {
            let order = Ordering::SeqCst;
            let none = ptr::null_mut();
            slot.compare_exchange(none, name, order, order).is_ok()
        });
        CrashSlot(free)
    }
}

impl Drop for CrashSlot {
    fn drop(&mut self) {
        if let Some(index) = self.0 {
            NAMES[index].store(ptr::null_mut(), Ordering::SeqCst);
        }
    }
}

fn install() {
    // SAFETY: returns a number, and registers a function that lives for ever. If that fails, exits
    // are not reported.
    unsafe {
        OWNER.store(libc::getpid(), Ordering::SeqCst);
        libc::atexit(exited);
    }
    for (index, &signal) in SIGNALS.iter().enumerate() {
        // SAFETY: all zeroes is a sigaction without flags.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) = crashed;
        action.sa_sigaction = handler as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        // SAFETY: `BEFORE` is written only here, once, before the handler that reads it can run for
        // this signal; the handler calls async-signal-safe functions only.
        unsafe {
            let before = (&raw mut BEFORE[index]).cast::<libc::sigaction>();
            if libc::sigaction(signal, ptr::null(), before) == 0 {
                libc::sigaction(signal, &raw const action, ptr::null_mut());
            }
        }
    }
}

/// Names the callback that ends the process, if one runs on this thread.
extern "C" fn exited() {
    // SAFETY: returns a number.
    let pid = unsafe { libc::getpid() };
    if let Some(running) = running::now().filter(|_| pid == OWNER.load(Ordering::SeqCst)) {
        say(b"blockhaul: exit");
        say_callback(running);
        say(b"\n");
    }
}

/// The handler. Only write(2), sigaction(2), kill(2) and plain memory.
extern "C" fn crashed(signal: c_int, _info: *mut libc::siginfo_t, _context: *mut c_void) {
    let saved = context::errno();
    say(b"blockhaul: ");
    say(match signal {
        libc::SIGSEGV => b"segmentation fault",
        libc::SIGBUS => b"bus error",
        libc::SIGILL => b"illegal instruction",
        libc::SIGFPE => b"arithmetic error",
        _ => b"abort",
    });
    match running::now() {
        Some(running) => say_callback(running),
        None => {
            say(b" outside of a plugin's callbacks; loaded: ");
            say_names();
        }
    }
    say(b"\n");
    let Some(index) = SIGNALS.iter().position(|&known| known == signal) else { return };
    // SAFETY: filled before this handler was installed. The previous action takes over: when this
    // returns, the faulting instruction runs again, and abort() raises its signal again.
    unsafe {
        libc::sigaction(signal, (&raw const BEFORE[index]).cast(), ptr::null_mut());
    }
    context::set_errno(saved);
}

fn say_callback(running: ActiveCallback) {
    say(b" in callback ");
    say(running.callback.to_bytes());
    say(b" of plugin ");
    // SAFETY: the callback's caller, further up on this thread, holds the name.
    say(unsafe { &*running.plugin }.as_bytes());
}

fn say_names() {
    let mut first = true;
    for name in &NAMES {
        let name = name.load(Ordering::SeqCst);
        if !name.is_null() {
            if !first {
                say(b" or ");
            }
            first = false;
            // SAFETY: a C string that is never freed.
            say(unsafe { std::ffi::CStr::from_ptr(name) }.to_bytes());
        }
    }
}

fn say(text: &[u8]) {
    // SAFETY: a slice of that length. A failed write is ignored.
    unsafe { libc::write(2, text.as_ptr().cast(), text.len()) };
}
