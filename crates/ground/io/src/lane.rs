//! Threads for callbacks that block. A lane is a queue of jobs with a bounded number of threads: one
//! for plugins that want all callbacks on one thread, more for those that take callbacks in parallel.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

/// How long a thread of a parallel lane stays without work.
const IDLE: Duration = Duration::from_secs(2);
/// Stack of a thread, in bytes: interpreters and shells expect what a main thread has.
const STACK: usize = 8 << 20;

type Job = Box<dyn FnOnce() + Send>;

/// A queue of jobs and its threads. Threads start when there is work. Dropping it has the threads
/// finish what is queued, and end.
pub struct Lane {
    shared: Arc<Shared>,
}

struct Shared {
    name: String,
    /// Most threads.
    most: usize,
    /// Threads stay while the lane lives: whoever calls wants the same one again.
    stay: AtomicBool,
    state: Mutex<State>,
    work: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    threads: usize,
    idle: usize,
    closed: bool,
}

impl Lane {
    /// One thread, which does all jobs in order.
    pub fn single(name: impl Into<String>) -> Lane {
        Lane::new(name.into(), 1, true)
    }

    /// Up to `most` threads, which end when idle.
    pub fn parallel(name: impl Into<String>, most: usize) -> Lane {
        Lane::new(name.into(), most.max(1), false)
    }

    fn new(mut name: String, most: usize, stay: bool) -> Lane {
        // The kernel keeps 15 bytes; the standard library refuses a NUL.
        name.retain(|c| c != '\0');
        let stay = AtomicBool::new(stay);
        let shared = Shared { name, most, stay, state: Mutex::default(), work: Condvar::new() };
        Lane { shared: Arc::new(shared) }
    }

    /// Lets its threads end when idle: whoever calls does not mind which one it is.
    pub fn let_go(&self) {
        self.shared.stay.store(false, Ordering::Relaxed);
    }

    /// Queues a job. Without any thread, and unable to start one, the job is dropped.
    pub fn run(&self, job: impl FnOnce() + Send + 'static) {
        let mut state = self.shared.lock();
        state.jobs.push_back(Box::new(job));
        if state.idle >= state.jobs.len() {
            self.shared.work.notify_one();
            return;
        }
        if state.threads >= self.shared.most {
            return;
        }
        let shared = self.shared.clone();
        let builder = std::thread::Builder::new().name(shared.name.clone()).stack_size(STACK);
        match builder.spawn(move || shared.work()) {
            Ok(_) => state.threads += 1,
            Err(error) if state.threads == 0 => {
                log::error!("cannot start a thread for {}: {error}", self.shared.name);
                let job = state.jobs.pop_back();
                drop(state);
                // Its owner sees that it got lost.
                drop(job);
            }
            Err(error) => log::debug!("cannot start another thread: {error}"),
        }
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        self.shared.lock().closed = true;
        self.shared.work.notify_all();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("jobs run outside of this lock")
    }

    fn work(self: Arc<Shared>) {
        let mut state = self.lock();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                drop(state);
                job();
                state = self.lock();
                continue;
            }
            if state.closed {
                break;
            }
            state.idle += 1;
            let timed_out;
            if self.stay.load(Ordering::Relaxed) {
                state = self.work.wait(state).expect("jobs run outside of this lock");
                timed_out = false;
            } else {
                let (guard, timeout) =
                    self.work.wait_timeout(state, IDLE).expect("jobs run outside of this lock");
                state = guard;
                timed_out = timeout.timed_out();
            }
            state.idle -= 1;
            if timed_out && state.jobs.is_empty() {
                break;
            }
        }
        state.threads -= 1;
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn a_single_lane_keeps_order_and_thread_and_finishes_when_dropped() {
        let lane = Lane::single("one");
        let (sender, receiver) = mpsc::channel();
        for number in 0..100 {
            let sender = sender.clone();
            lane.run(move || sender.send((number, std::thread::current().id())).unwrap());
        }
        drop((lane, sender));
        let got: Vec<_> = receiver.iter().collect();
        assert_eq!(got.len(), 100);
        assert!(got.windows(2).all(|pair| pair[0].0 + 1 == pair[1].0 && pair[0].1 == pair[1].1));
    }

    #[test]
    fn a_parallel_lane_has_as_many_threads_as_jobs_up_to_its_bound() {
        let lane = Lane::parallel("many", 3);
        let barrier = Arc::new(std::sync::Barrier::new(3));
        let (sender, receiver) = mpsc::channel();
        for _ in 0..9 {
            let (barrier, sender) = (barrier.clone(), sender.clone());
            lane.run(move || {
                barrier.wait();
                sender.send(()).unwrap();
            });
        }
        drop(sender);
        assert_eq!(receiver.iter().count(), 9);
        assert!(lane.shared.lock().threads <= 3);
    }
}
