//! The callback that runs on a thread, and its plugin: plain values, which the crash handler may
//! read.

use std::cell::Cell;
use std::ffi::CStr;

thread_local! {
    static RUNNING: Cell<Option<ActiveCallback>> = const { Cell::new(None) };
}

/// A running callback, and the name of its plugin, which its caller keeps valid.
#[derive(Clone, Copy)]
pub(crate) struct ActiveCallback {
    pub(crate) callback: &'static CStr,
    pub(crate) plugin: *const str,
}

/// The callback that runs on this thread. For signal handlers: reads only a plain value.
pub(crate) fn now() -> Option<ActiveCallback> {
    RUNNING.try_with(Cell::get).ok().flatten()
}

/// Sets the running callback; returns the previous one.
pub(crate) fn replace(running: Option<ActiveCallback>) -> Option<ActiveCallback> {
    RUNNING.replace(running)
}

/// Aborts the process with a crash attributed to another thread's callback.
pub(crate) fn crash_in(plugin: &str, callback: &'static CStr) -> ! {
    RUNNING.set(Some(ActiveCallback { callback, plugin: &raw const *plugin }));
    std::process::abort()
}
