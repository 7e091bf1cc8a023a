//! Panics in tasks: what waits for the task fails, or the process ends, as the program has chosen.

use std::any::Any;
use std::io::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};

static ABORTS: AtomicBool = AtomicBool::new(false);

/// From now on a panic in a task ends the process at once. For programs that are a server or a copy and
/// nothing else: state that requests share may be half changed, and going on could write wrong bytes.
///
/// Without this a panic ends its task alone, and is logged: whoever waits for the task hears that it got
/// [`Lost`](crate::Lost), or panics, too ([`Task`](crate::Task)). For programs that do other things besides, which
/// shall outlive a device that has a fault. The choice is the process's, which ends once.
pub fn abort_on_panic() {
    ABORTS.store(true, Ordering::Relaxed);
}

/// Runs tasks; a panic of theirs goes no further than this.
pub(crate) fn contained(tasks: impl FnOnce()) {
    // What a task leaves half changed is its own, or behind a lock that is poisoned then.
    if let Err(cause) = catch_unwind(AssertUnwindSafe(tasks)) {
        let text = text_of(&*cause);
        if ABORTS.load(Ordering::Relaxed) {
            abort(text);
        }
        log::error!("a task has panicked: {text}: what waits for it fails");
        // A payload may panic when it is dropped.
        std::mem::forget(cause);
    }
}

/// Ends the process.
pub(crate) fn abort(text: &str) -> ! {
    // Not by a macro: a test's captured output is lost with the process.
    let _ = writeln!(
        std::io::stderr(),
        "blockhaul: internal error in a worker: {text}: stopping at once"
    );
    std::process::abort();
}

/// What a panic says.
pub(crate) fn text_of(cause: &(dyn Any + Send)) -> &str {
    let text = cause.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| cause.downcast_ref().copied()).unwrap_or("see above")
}
