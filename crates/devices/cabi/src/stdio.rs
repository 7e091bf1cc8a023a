//! Standard input and output: when plugins may use them.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

unsafe extern "C" {
    /// The C library's standard input.
    static stdin: *mut libc::FILE;
}

/// They belong to a client.
static TAKEN: AtomicBool = AtomicBool::new(false);

type Hook = Box<dyn Fn() + Send + Sync>;

/// Runs once plugins are ready.
static READY: OnceLock<Hook> = OnceLock::new();

/// Declares standard input and output as a connection: plugins must not use them.
pub fn stdio_is_a_client() {
    TAKEN.store(true, Ordering::Relaxed);
}

/// Runs the hook between `get_ready` and `after_fork` of each plugin, on the thread of its life:
/// after that, plugins may not use standard input and output. Only the first hook is kept.
pub fn when_ready(hook: impl Fn() + Send + Sync + 'static) {
    let _ = READY.set(Box::new(hook));
}

pub(crate) fn is_free() -> bool {
    !TAKEN.load(Ordering::Relaxed)
}

pub(crate) fn ready() {
    if let Some(hook) = READY.get() {
        // Flush what the plugin has printed to its old destination, and leave unread input to
        // others.
        // SAFETY: the C library's own streams; null means all output streams.
        unsafe {
            libc::fflush(std::ptr::null_mut());
            libc::fflush(stdin);
        }
        hook();
    }
}
