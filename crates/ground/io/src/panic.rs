//! Panics in tasks: they fail whatever waits for the task, or abort the process, as the program
//! chooses.

use std::any::Any;
use std::io::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};

static ABORTS: AtomicBool = AtomicBool::new(false);

/// Makes a panic in a task abort the process at once. For programs that only serve or copy: state
/// shared by requests may be inconsistent, and continuing could write wrong data.
///
/// By default a panic ends only its task, and is logged: a caller that waits for the task gets
/// [`LostCompletion`](crate::LostCompletion), or panics, too ([`Task`](crate::Task)). For programs with other duties,
/// which must survive a faulty device. The setting applies to the whole process.
pub fn abort_on_panic() {
    ABORTS.store(true, Ordering::Relaxed);
}

/// Runs tasks and contains their panics.
pub(crate) fn contained(tasks: impl FnOnce()) {
    // State that a panic leaves inconsistent belongs to the task, or is behind a lock that is then
    // poisoned.
    if let Err(cause) = catch_unwind(AssertUnwindSafe(tasks)) {
        let text = text_of(&*cause);
        #[cfg(feature = "simulation")]
        crate::simulation::note_panic(text);
        if ABORTS.load(Ordering::Relaxed) {
            abort(text);
        }
        log::error!("a task has panicked: {text}: what waits for it fails");
        // A payload may panic when it is dropped.
        std::mem::forget(cause);
    }
}

/// Aborts the process.
pub(crate) fn abort(text: &str) -> ! {
    // Not by a macro: a test's captured output is lost with the process.
    let _ = writeln!(
        std::io::stderr(),
        "blockhaul: internal error in a worker: {text}: stopping at once"
    );
    std::process::abort();
}

/// The message of a panic.
pub(crate) fn text_of(cause: &(dyn Any + Send)) -> &str {
    let text = cause.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| cause.downcast_ref().copied()).unwrap_or("see above")
}
