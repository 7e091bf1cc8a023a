//! Standard input and output: whose they are, and until when plugins have them.

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

/// Says that standard input and output are a connection: plugins are told to leave them alone.
pub fn stdio_is_a_client() {
    TAKEN.store(true, Ordering::Relaxed);
}

/// Has this run between `get_ready` and `after_fork` of each plugin, on the thread of its life: from then
/// on plugins have no more to do with standard input and output. The first one stays.
pub fn when_ready(hook: impl Fn() + Send + Sync + 'static) {
    let _ = READY.set(Box::new(hook));
}

pub(crate) fn is_free() -> bool {
    !TAKEN.load(Ordering::Relaxed)
}

pub(crate) fn ready() {
    if let Some(hook) = READY.get() {
        // What the plugin has printed goes to where it printed it, and what it has not read of its input
        // is left for others.
        // SAFETY: the C library's own streams; null stands for all that are written to.
        unsafe {
            libc::fflush(std::ptr::null_mut());
            libc::fflush(stdin);
        }
        hook();
    }
}
