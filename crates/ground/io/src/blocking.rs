//! Threads for blocking code: a queue of jobs with a bounded number of threads, started on demand.
//!
//! [`offload`] has one pool for the whole program. Plugins have their own pools: one thread for
//! those that need all callbacks on one thread, more for those that accept parallel callbacks.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard};
use std::thread::Builder;
use std::time::Duration;

use crate::sync::{Ticket, ticket};

/// Maximum threads of the program's pool: enough to keep a disk busy through blocking calls (depth
/// gains end near 32 on common devices), few enough to be cheap.
const OFFLOAD_MAX: usize = 32;
/// How long an idle thread of the program's pool stays.
const OFFLOAD_IDLE: Duration = Duration::from_secs(5);
/// How long an idle thread of a parallel pool stays.
const IDLE: Duration = Duration::from_secs(2);
/// Stack size in bytes of a callback thread: interpreters and shells expect that of a main thread.
const STACK: usize = 8 << 20;

type BlockingJob = Box<dyn FnOnce() + Send>;

static OFFLOAD: LazyLock<BlockingPool> = LazyLock::new(|| {
    BlockingPool::new(BlockingPoolInner {
        name: "offload".to_string(),
        most: OFFLOAD_MAX,
        idle: OFFLOAD_IDLE,
        stack: None,
        stay: AtomicBool::new(false),
        state: Mutex::default(),
        work: Condvar::new(),
    })
});

/// Runs `job` on a thread that may block; the ticket yields its result.
pub fn offload<T: Send + 'static>(job: impl FnOnce() -> T + Send + 'static) -> Ticket<T> {
    let (completer, ticket) = ticket();
    offload_job(Box::new(move || completer.complete(job())));
    ticket
}

/// Runs a job on a thread of the program's pool, or on this one if no thread can be started.
pub(crate) fn offload_job(job: BlockingJob) {
    if let Err((job, error)) = OFFLOAD.push(job) {
        log::warn!("cannot start a thread for blocking calls: {error}");
        job();
    }
}

/// A queue of jobs and its threads. Threads start when there is work. On drop, the threads finish
/// the queued jobs, then end.
pub struct BlockingPool {
    shared: Arc<BlockingPoolInner>,
}

struct BlockingPoolInner {
    name: String,
    /// Maximum number of threads.
    most: usize,
    /// How long an idle thread stays.
    idle: Duration,
    /// Stack size in bytes, if not the default.
    stack: Option<usize>,
    /// Threads stay while the pool lives: the callers need the same thread each time.
    stay: AtomicBool,
    state: Mutex<BlockingQueue>,
    work: Condvar,
}

#[derive(Default)]
struct BlockingQueue {
    jobs: VecDeque<BlockingJob>,
    threads: usize,
    idle: usize,
    closed: bool,
}

impl BlockingPool {
    /// One thread, which does all jobs in order.
    pub fn single(name: impl Into<String>) -> BlockingPool {
        BlockingPool::for_callbacks(name.into(), 1, true)
    }

    /// Up to `most` threads, which end when idle.
    pub fn parallel(name: impl Into<String>, most: usize) -> BlockingPool {
        BlockingPool::for_callbacks(name.into(), most.max(1), false)
    }

    fn for_callbacks(mut name: String, most: usize, stay: bool) -> BlockingPool {
        // The kernel keeps 15 bytes; the standard library refuses a NUL.
        name.retain(|c| c != '\0');
        BlockingPool::new(BlockingPoolInner {
            name,
            most,
            idle: IDLE,
            stack: Some(STACK),
            stay: AtomicBool::new(stay),
            state: Mutex::default(),
            work: Condvar::new(),
        })
    }

    fn new(shared: BlockingPoolInner) -> BlockingPool {
        BlockingPool { shared: Arc::new(shared) }
    }

    /// Lets idle threads end: the callers do not need the same thread each time.
    pub fn end_when_idle(&self) {
        self.shared.stay.store(false, Ordering::Relaxed);
    }

    /// Queues a job. If there is no thread and none can be started, the job is dropped.
    pub fn run(&self, job: impl FnOnce() + Send + 'static) {
        if let Err((job, error)) = self.push(Box::new(job)) {
            log::error!("cannot start a thread for {}: {error}", self.shared.name);
            // Its owner notices the drop.
            drop(job);
        }
    }

    /// Queues a job; returns it if there is no thread and none can be started.
    fn push(&self, job: BlockingJob) -> Result<(), (BlockingJob, std::io::Error)> {
        #[cfg(feature = "simulation")]
        let Some(job) = crate::simulation::take_job(job, self.shared.most == 1) else {
            return Ok(());
        };
        let mut state = self.shared.lock();
        state.jobs.push_back(job);
        if state.idle >= state.jobs.len() {
            self.shared.work.notify_one();
            return Ok(());
        }
        if state.threads >= self.shared.most {
            return Ok(());
        }
        let shared = self.shared.clone();
        let mut builder = Builder::new().name(shared.name.clone());
        if let Some(stack) = shared.stack {
            builder = builder.stack_size(stack);
        }
        match builder.spawn(move || shared.work()) {
            Ok(_) => state.threads += 1,
            Err(error) if state.threads == 0 => {
                if let Some(job) = state.jobs.pop_back() {
                    return Err((job, error));
                }
            }
            // Existing threads will run it.
            Err(error) => log::debug!("cannot start another thread: {error}"),
        }
        Ok(())
    }
}

impl Drop for BlockingPool {
    fn drop(&mut self) {
        self.shared.lock().closed = true;
        self.shared.work.notify_all();
    }
}

impl BlockingPoolInner {
    fn lock(&self) -> MutexGuard<'_, BlockingQueue> {
        self.state.lock().expect("jobs run outside of this lock")
    }

    fn work(self: Arc<BlockingPoolInner>) {
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
                let (guard, timeout) = self
                    .work
                    .wait_timeout(state, self.idle)
                    .expect("jobs run outside of this lock");
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
    fn a_single_thread_keeps_the_order_and_finishes_when_dropped() {
        let pool = BlockingPool::single("one");
        let (sender, receiver) = mpsc::channel();
        for number in 0..100 {
            let sender = sender.clone();
            pool.run(move || sender.send((number, std::thread::current().id())).unwrap());
        }
        drop((pool, sender));
        let got: Vec<_> = receiver.iter().collect();
        assert_eq!(got.len(), 100);
        assert!(got.windows(2).all(|pair| pair[0].0 + 1 == pair[1].0 && pair[0].1 == pair[1].1));
    }

    #[test]
    fn a_pool_has_as_many_threads_as_jobs_up_to_its_bound() {
        let pool = BlockingPool::parallel("many", 3);
        let barrier = Arc::new(std::sync::Barrier::new(3));
        let (sender, receiver) = mpsc::channel();
        for _ in 0..9 {
            let barrier = barrier.clone();
            let sender = sender.clone();
            pool.run(move || {
                barrier.wait();
                sender.send(()).unwrap();
            });
        }
        drop(sender);
        assert_eq!(receiver.iter().count(), 9);
        assert!(pool.shared.lock().threads <= 3);
    }
}
