//! The context of a callback and its results: stored per thread while a plugin's code runs on it.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_int};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use blockhaul_catalog::{ExportClient, Shutdown};

use crate::running::{self, ActiveCallback};
use crate::watchdog::{self, WatchKind};

/// Maximum bytes of error texts stored for one callback.
const TEXT_MAX: usize = 4096;
/// Replaces the middle of a text that is too long.
const CUT: &str = " […] ";

/// The caller of a plugin.
#[derive(Default)]
pub(crate) struct CallContext {
    /// The plugin's name, for messages.
    pub(crate) plugin: Arc<str>,
    /// The connection; none in callbacks of the plugin's life.
    pub(crate) client: Option<ExportClient>,
    /// The export that the client requested.
    pub(crate) export: Option<CString>,
    /// The connection is encrypted.
    pub(crate) tls: bool,
    /// Strings that live as long as the connection.
    pub(crate) interned: InternedStrings,
    /// The plugin may use standard input and output.
    pub(crate) stdio_safe: bool,
    /// Names of default exports, for all contexts of a connection.
    pub(crate) defaults: Arc<DefaultExports>,
    /// Time after which a callback that has not returned ends the process.
    pub(crate) watchdog: Option<Duration>,
    /// Stops the plugin's server; none: unknown here.
    pub(crate) shutdown: Option<Shutdown>,
}

/// The names of the default exports of a chain's backends, by index. The names do not move as long
/// as this lives.
#[derive(Default)]
pub(crate) struct DefaultExports(Mutex<BTreeMap<usize, CString>>);

impl DefaultExports {
    /// The stored name; null: none.
    pub(crate) fn get(&self, place: usize) -> *const c_char {
        let names = self.0.lock().expect("no panic under this lock");
        names.get(&place).map_or(std::ptr::null(), |name| name.as_ptr())
    }

    /// Stores the first name for a backend; the pointer is valid as long as this lives.
    pub(crate) fn keep(&self, place: usize, name: CString) -> *const c_char {
        self.0.lock().expect("no panic under this lock").entry(place).or_insert(name).as_ptr()
    }
}

impl CallContext {
    /// Whether the client has disconnected, so that its reply is not needed.
    pub(crate) fn is_abandoned(&self) -> bool {
        use std::os::fd::{AsFd as _, AsRawFd as _};
        let Some(stream) = self.client.as_ref().and_then(|client| client.stream.as_ref()) else {
            return false;
        };
        let mut poll =
            libc::pollfd { fd: stream.as_fd().as_raw_fd(), events: libc::POLLRDHUP, revents: 0 };
        // SAFETY: one structure, a descriptor that `stream` keeps open, and no waiting.
        let ready = unsafe { libc::poll(&raw mut poll, 1, 0) };
        ready > 0 && poll.revents & (libc::POLLRDHUP | libc::POLLHUP | libc::POLLERR) != 0
    }
}

/// Strings that are freed together.
#[derive(Default)]
pub(crate) struct InternedStrings(Mutex<Vec<CString>>);

impl InternedStrings {
    /// Stores a copy; the pointer is valid as long as this lives.
    pub(crate) fn keep(&self, text: CString) -> *const c_char {
        let pointer = text.as_ptr();
        // A string's bytes do not move when it does.
        self.0.lock().expect("no panic under this lock").push(text);
        pointer
    }
}

/// The results of a callback other than its return value.
#[derive(Default)]
pub(crate) struct CallResults {
    /// `nbdkit_set_error`, 0 if it was not called.
    pub(crate) error: c_int,
    /// `errno` on return.
    pub(crate) errno: c_int,
    /// The texts of its `nbdkit_error` calls, joined.
    pub(crate) text: String,
}

struct CurrentCall {
    context: Arc<CallContext>,
    left: CallResults,
}

thread_local! {
    static CURRENT: RefCell<Option<CurrentCall>> = const { RefCell::new(None) };
    /// Errors reported outside callbacks, by a plugin's own threads: for the reply that follows.
    static LOOSE: RefCell<CallResults> = const {
        RefCell::new(CallResults { error: 0, errno: 0, text: String::new() })
    };
    /// The watch of a caller that waits with a timeout for this thread's job.
    static WATCH: RefCell<Option<Arc<CallWatch>>> = const { RefCell::new(None) };
}

/// The stage of a job that calls a plugin, for a caller that waits with a timeout.
#[derive(Default)]
pub(crate) struct CallWatch(Mutex<(CallStage, bool)>);

/// The stage of a job.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum CallStage {
    /// It waits for a thread.
    #[default]
    Queued,
    /// On its thread, outside the plugin's callbacks.
    Begun,
    /// In this callback.
    In(&'static CStr),
    /// It has ended.
    Over,
}

impl CallWatch {
    /// The caller stops waiting for the job; returns its stage.
    pub(crate) fn give_up(&self) -> CallStage {
        let mut state = self.lock();
        state.1 = true;
        state.0
    }

    fn swap(&self, stage: CallStage) -> CallStage {
        std::mem::replace(&mut self.lock().0, stage)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, (CallStage, bool)> {
        self.0.lock().expect("no panic under this lock")
    }
}

/// Runs a job on this thread, and updates `watch`. Also returns whether the caller stopped waiting.
pub(crate) fn watched<R>(watch: &Arc<CallWatch>, job: impl FnOnce() -> R) -> (R, bool) {
    watch.swap(CallStage::Begun);
    let outer = WATCH.replace(Some(watch.clone()));
    let result = job();
    WATCH.set(outer);
    let mut state = watch.lock();
    state.0 = CallStage::Over;
    (result, state.1)
}

fn tell(stage: CallStage) -> CallStage {
    WATCH.with_borrow(|watch| watch.as_ref().map_or(CallStage::Begun, |watch| watch.swap(stage)))
}

/// Runs a callback of a plugin, named `name` for messages.
pub(crate) fn call<R>(
    context: &Arc<CallContext>,
    name: &'static CStr,
    callback: impl FnOnce() -> R,
) -> (R, CallResults) {
    let fresh = CurrentCall { context: context.clone(), left: CallResults::default() };
    let outer = CURRENT.replace(Some(fresh));
    let running = ActiveCallback { callback: name, plugin: &raw const *context.plugin };
    let outer_running = running::replace(Some(running));
    let outer_stage = tell(CallStage::In(name));
    let watched = watchdog::over(context.watchdog, &context.plugin, name, WatchKind::Callback);
    set_errno(0);
    let returns = ReturnGuard { context, name };
    let result = callback();
    std::mem::forget(returns);
    let errno = errno();
    drop(watched);
    tell(outer_stage);
    running::replace(outer_running);
    let mut left = CURRENT.replace(outer).map(|current| current.left).unwrap_or_default();
    left.errno = errno;
    (result, left)
}

/// Aborts the process when a callback is left other than by its return. Unwinding would drop
/// requests that are half done, and answer them.
struct ReturnGuard<'a> {
    context: &'a CallContext,
    name: &'static CStr,
}

impl Drop for ReturnGuard<'_> {
    fn drop(&mut self) {
        log::error!(
            "plugin {}: {} ended by an exception or by the end of its thread, not by its return",
            self.context.plugin,
            self.name.to_string_lossy()
        );
        std::process::abort()
    }
}

/// The context of the callback on this thread.
pub(crate) fn now() -> Option<Arc<CallContext>> {
    CURRENT.with_borrow(|current| current.as_ref().map(|current| current.context.clone()))
}

/// `nbdkit_set_error`.
pub(crate) fn set_error(error: c_int) {
    CURRENT.with_borrow_mut(|current| match current {
        Some(current) => current.left.error = error,
        None => LOOSE.with_borrow_mut(|left| left.error = error),
    });
}

/// This thread's last errors, outside callbacks or in the current one.
pub(crate) fn take_loose() -> CallResults {
    CURRENT.with_borrow_mut(|current| match current {
        Some(current) => std::mem::take(&mut current.left),
        None => LOOSE.take(),
    })
}

/// Discards this thread's errors from outside callbacks: their request has been answered.
pub(crate) fn forget_loose() {
    LOOSE.take();
}

/// `nbdkit_error`: stored for the caller; from a plugin's own threads it goes to the log.
pub(crate) fn said(text: &str) {
    let kept = CURRENT.with_borrow_mut(|current| {
        let Some(current) = current else { return false };
        current.left.say(text);
        true
    });
    if !kept {
        LOOSE.with_borrow_mut(|left| left.say(text));
        log::warn!("a plugin says: {text}");
    }
}

impl CallResults {
    /// Stores a text. If it is too long, its beginning and its end are kept: interpreters put the
    /// reason at the end.
    fn say(&mut self, text: &str) {
        let between = if self.text.is_empty() { "" } else { "; " };
        let room = TEXT_MAX.saturating_sub(self.text.len() + between.len());
        if text.len() > room && room < 2 * CUT.len() {
            return;
        }
        self.text.push_str(between);
        if text.len() <= room {
            self.text.push_str(text);
            return;
        }
        let half = (room - CUT.len()) / 2;
        let whole = |at: &usize| text.is_char_boundary(*at);
        let head = (0..=half).rev().find(whole).unwrap_or(0);
        let tail = (text.len() - half..).find(whole).unwrap_or(text.len());
        self.text.push_str(&text[..head]);
        self.text.push_str(CUT);
        self.text.push_str(&text[tail..]);
    }
}

/// Stores a string for the connection, or for ever if there is none.
pub(crate) fn intern(text: CString) -> *const c_char {
    match now() {
        Some(context) if context.client.is_some() => context.interned.keep(text),
        _ => text.into_raw(),
    }
}

pub(crate) fn errno() -> c_int {
    // SAFETY: the C library returns this thread's own errno.
    unsafe { *libc::__errno_location() }
}

pub(crate) fn set_errno(value: c_int) {
    // SAFETY: as in `errno`.
    unsafe { *libc::__errno_location() = value }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn what_a_callback_leaves_is_seen_once_and_nested_calls_do_not_mix() {
        let context = Arc::new(CallContext::default());
        let (inner, left) = call(&context, c"outer", || {
            said("first");
            said("second");
            set_error(libc::ENOSPC);
            let ((), inner) = call(&context, c"inner", || {
                said("third");
                set_errno(libc::EPERM);
            });
            assert_eq!(running::now().unwrap().callback, c"outer");
            set_errno(libc::EIO);
            inner
        });
        assert_eq!((inner.error, inner.errno, inner.text.as_str()), (0, libc::EPERM, "third"));
        assert_eq!(left.text, "first; second");
        assert_eq!((left.error, left.errno), (libc::ENOSPC, libc::EIO));
        assert!(now().is_none() && running::now().is_none());
        let ((), left) = call(&context, c"next", || ());
        assert_eq!((left.error, left.errno, left.text.as_str()), (0, 0, ""));
    }

    #[test]
    fn of_a_text_that_is_too_long_beginning_and_end_are_kept() {
        let mut left = CallResults::default();
        left.say("before");
        left.say(&format!("Traceback {} RuntimeError: why", "é".repeat(TEXT_MAX)));
        assert!(left.text.len() <= TEXT_MAX, "{}", left.text.len());
        assert!(left.text.starts_with("before; Traceback éé"), "{}", left.text);
        assert!(left.text.contains("é […] é") && left.text.ends_with("é RuntimeError: why"));
        let full = left.text.clone();
        left.say("too late");
        assert_eq!(left.text, full);
    }

    #[test]
    fn who_waits_for_a_job_sees_the_callback_it_is_in() {
        let context = Arc::new(CallContext::default());
        let watch = Arc::new(CallWatch::default());
        assert_eq!(watch.give_up(), CallStage::Queued);
        let watch = Arc::new(CallWatch::default());
        let ((), given_up) = watched(&watch, || {
            assert_eq!(watch.lock().0, CallStage::Begun);
            call(&context, c"outer", || {
                call(&context, c"inner", || assert_eq!(watch.lock().0, CallStage::In(c"inner")));
                assert_eq!(watch.give_up(), CallStage::In(c"outer"));
            });
            assert_eq!(watch.lock().0, CallStage::Begun);
        });
        assert!(given_up);
        call(&context, c"another", || ());
        assert_eq!(watch.lock().0, CallStage::Over);
    }
}
