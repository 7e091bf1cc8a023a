//! Which callback of which plugin runs on a thread: plain values, which the handler of crashes may look at.

use std::cell::Cell;
use std::ffi::CStr;

thread_local! {
    static RUNNING: Cell<Option<Running>> = const { Cell::new(None) };
}

/// A callback that runs, and the name of its plugin, which whoever called it keeps for as long.
#[derive(Clone, Copy)]
pub(crate) struct Running {
    pub(crate) callback: &'static CStr,
    pub(crate) plugin: *const str,
}

/// The callback that runs on this thread. For signal handlers: touches nothing but a plain value.
pub(crate) fn now() -> Option<Running> {
    RUNNING.try_with(Cell::get).ok().flatten()
}

/// Another one runs from here on; gives the one before.
pub(crate) fn replace(running: Option<Running>) -> Option<Running> {
    RUNNING.replace(running)
}

/// Ends the process by a crash that is said to be in another thread's callback.
pub(crate) fn crash_in(plugin: &str, callback: &'static CStr) -> ! {
    RUNNING.set(Some(Running { callback, plugin: &raw const *plugin }));
    std::process::abort()
}
