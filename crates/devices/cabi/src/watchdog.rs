//! The watchdog (`@watchdog`): a callback of a connection that does not return in time, or an
//! asynchronous request without a reply, ends the process like a crash. It has its own thread,
//! because a callback may hang on a worker, too.

use std::collections::BTreeMap;
use std::ffi::CStr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Once};
use std::time::{Duration, Instant};

use crate::running;

/// The jobs that are watched.
static GOING_ON: Mutex<WatchTable> =
    Mutex::new(WatchTable { next: 0, jobs: BTreeMap::new(), looks_at: None });
/// A job was added whose limit is before the next check.
static BEGUN: Condvar = Condvar::new();

struct WatchTable {
    next: u64,
    jobs: BTreeMap<u64, WatchedCall>,
    /// Time of the next check; none: it waits for the first job.
    looks_at: Option<Instant>,
}

#[derive(Clone)]
struct WatchedCall {
    until: Instant,
    limit: Duration,
    plugin: Arc<str>,
    callback: &'static CStr,
    what: WatchKind,
}

/// The kind of a job.
#[derive(Clone, Copy)]
pub(crate) enum WatchKind {
    /// A callback that must return.
    Callback,
    /// A request that must be answered.
    Answer,
}

/// A job that is watched until this is dropped.
pub(crate) struct WatchGuard(u64);

/// Starts the thread, once.
pub(crate) fn start() {
    static STARTED: Once = Once::new();
    STARTED.call_once(|| {
        let started = std::thread::Builder::new().name("watchdog".into()).spawn(watch);
        if let Err(error) = started {
            log::error!("cannot start the watchdog of plugins: {error}");
        }
    });
}

/// Watches a job of a plugin, if there is a limit.
pub(crate) fn over(
    limit: Option<Duration>,
    plugin: &Arc<str>,
    callback: &'static CStr,
    what: WatchKind,
) -> Option<WatchGuard> {
    let limit = limit?;
    let until = blockhaul_io::now() + limit;
    let mut going_on = lock();
    going_on.next += 1;
    let number = going_on.next;
    going_on
        .jobs
        .insert(number, WatchedCall { until, limit, plugin: plugin.clone(), callback, what });
    if going_on.looks_at.is_none_or(|at| until < at) {
        BEGUN.notify_all();
    }
    Some(WatchGuard(number))
}

impl Drop for WatchGuard {
    fn drop(&mut self) {
        lock().jobs.remove(&self.0);
    }
}

fn lock() -> MutexGuard<'static, WatchTable> {
    GOING_ON.lock().expect("no panic under this lock")
}

fn watch() {
    let mut going_on = lock();
    loop {
        let first = going_on.jobs.values().min_by_key(|job| job.until).cloned();
        going_on.looks_at = first.as_ref().map(|job| job.until);
        going_on = match first {
            None => BEGUN.wait(going_on).expect("no panic under this lock"),
            Some(job) => {
                let left = job.until.saturating_duration_since(blockhaul_io::now());
                if left.is_zero() {
                    drop(going_on);
                    job.end_the_process();
                }
                BEGUN.wait_timeout(going_on, left).expect("no panic under this lock").0
            }
        };
    }
}

impl WatchedCall {
    fn end_the_process(&self) -> ! {
        let plugin = &self.plugin;
        let limit = self.limit.as_secs_f32();
        let callback = self.callback.to_string_lossy();
        let what = match self.what {
            WatchKind::Callback => "has not returned",
            WatchKind::Answer => "has not been answered",
        };
        log::error!(
            "plugin {plugin}: {callback} {what} for {limit} s; the watchdog ends the process"
        );
        // The crash message names the callback, and a core file shows where it hangs.
        running::crash_in(plugin, self.callback)
    }
}
