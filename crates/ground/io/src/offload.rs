//! A bounded pool of threads for code that blocks. Threads start on demand and end when idle.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex};
use std::time::Duration;

use crate::sync::{Ticket, ticket};

/// Most threads in the pool: enough to keep a disk busy through blocking calls (the gain from depth
/// ends near 32 on the devices in use), few enough to be cheap.
const THREADS_MAX: usize = 32;
/// How long a thread stays without work.
const IDLE: Duration = Duration::from_secs(5);

type Job = Box<dyn FnOnce() + Send>;

struct State {
    jobs: VecDeque<Job>,
    threads: usize,
    idle: usize,
}

static STATE: Mutex<State> = Mutex::new(State { jobs: VecDeque::new(), threads: 0, idle: 0 });
static WORK: Condvar = Condvar::new();

/// Runs `job` on a thread that may block; the ticket yields its result.
pub fn offload<T: Send + 'static>(job: impl FnOnce() -> T + Send + 'static) -> Ticket<T> {
    let (completer, ticket) = ticket();
    run(Box::new(move || completer.complete(job())));
    ticket
}

pub(crate) fn run(job: Job) {
    let mut state = STATE.lock().expect("jobs run outside of this lock");
    state.jobs.push_back(job);
    if state.idle >= state.jobs.len() {
        WORK.notify_one();
        return;
    }
    if state.threads < THREADS_MAX {
        let name = format!("offload-{}", state.threads);
        match std::thread::Builder::new().name(name).spawn(work) {
            Ok(_) => state.threads += 1,
            // Others will get to it; without any, this thread does it rather than lose it.
            Err(error) if state.threads == 0 => {
                log::warn!("cannot start a thread for blocking calls: {error}");
                let job = state.jobs.pop_back();
                drop(state);
                if let Some(job) = job {
                    job();
                }
            }
            Err(error) => log::debug!("cannot start another thread: {error}"),
        }
    }
}

fn work() {
    let mut state = STATE.lock().expect("jobs run outside of this lock");
    loop {
        if let Some(job) = state.jobs.pop_front() {
            drop(state);
            job();
            state = STATE.lock().expect("jobs run outside of this lock");
            continue;
        }
        state.idle += 1;
        let (guard, timeout) =
            WORK.wait_timeout(state, IDLE).expect("jobs run outside of this lock");
        state = guard;
        state.idle -= 1;
        if timeout.timed_out() && state.jobs.is_empty() {
            state.threads -= 1;
            return;
        }
    }
}
