//! A crash in a plugin's code names the plugin: handlers of fatal signals that write one line and let
//! the signal take its course. So does the end of the process by a plugin's call of exit(3).

use std::ffi::{CString, c_char, c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::Once;
use std::sync::atomic::{AtomicI32, AtomicPtr, Ordering};

use crate::context;
use crate::running::{self, Running};

/// Signals that a program's own faults raise.
const SIGNALS: [c_int; 5] =
    [libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGFPE, libc::SIGABRT];
/// Most plugins that are named.
const SLOTS: usize = 8;

/// Names of loaded plugins, as C strings: all that a signal handler may look at.
static NAMES: [AtomicPtr<c_char>; SLOTS] = [const { AtomicPtr::new(ptr::null_mut()) }; SLOTS];
/// What was installed before, in the order of [`SIGNALS`].
static mut BEFORE: [MaybeUninit<libc::sigaction>; SIGNALS.len()] =
    [const { MaybeUninit::uninit() }; SIGNALS.len()];
static INSTALLED: Once = Once::new();
/// The process that has the handlers: what it forks has them, too, and may end as it likes.
static OWNER: AtomicI32 = AtomicI32::new(0);

/// A plugin's place among the names; given back when dropped.
pub(crate) struct Slot(Option<usize>);

impl Slot {
    /// No place.
    pub(crate) fn none() -> Slot {
        Slot(None)
    }

    /// Enters a name, and installs the handlers when it is the first.
    pub(crate) fn take(name: &str) -> Slot {
        let Ok(name) = CString::new(name) else { return Slot(None) };
        INSTALLED.call_once(install);
        // Never freed: a handler may be reading it.
        let name = name.into_raw();
        let free = NAMES.iter().position(|slot| {
            let (order, none) = (Ordering::SeqCst, ptr::null_mut());
            slot.compare_exchange(none, name, order, order).is_ok()
        });
        Slot(free)
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if let Some(index) = self.0 {
            NAMES[index].store(ptr::null_mut(), Ordering::SeqCst);
        }
    }
}

fn install() {
    // SAFETY: gives a number, and registers a function that lives for ever. Without room for it exits are
    // silent.
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
        // SAFETY: `BEFORE` is written here only, once, before the handler that reads it can run for
        // this signal; the handler calls async-signal-safe functions only.
        unsafe {
            let before = (&raw mut BEFORE[index]).cast::<libc::sigaction>();
            if libc::sigaction(signal, ptr::null(), before) == 0 {
                libc::sigaction(signal, &raw const action, ptr::null_mut());
            }
        }
    }
}

/// Names the callback that ends the process, if it is one, on whose thread this runs.
extern "C" fn exited() {
    // SAFETY: gives a number.
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
    // SAFETY: filled before this handler was installed. The earlier action takes over: when this
    // returns, the faulting instruction runs again, and abort() raises its signal again.
    unsafe {
        libc::sigaction(signal, (&raw const BEFORE[index]).cast(), ptr::null_mut());
    }
    context::set_errno(saved);
}

fn say_callback(running: Running) {
    say(b" in callback ");
    say(running.callback.to_bytes());
    say(b" of plugin ");
    // SAFETY: the callback's caller, further up on this thread, keeps the name.
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
    // SAFETY: a slice of that length. What cannot be written is lost.
    unsafe { libc::write(2, text.as_ptr().cast(), text.len()) };
}
