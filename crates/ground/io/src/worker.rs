//! Worker threads: one driver, one run queue, one set of timers each.

use std::cell::{Cell, RefCell};
use std::io;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

use async_task::Runnable;

use crate::context::{Worker, set_worker, with_worker};
use crate::driver::{self, IoEngine, OpCompletion, SleepLimit};
use crate::ending::WorkerShutdown;
use crate::inbox::{Inbox, InboxItem};
use crate::remote::WorkerHandle;
use crate::{panic, sys};

/// Tasks run between two turns of the driver: limits how long a completion waits behind tasks.
const TASKS_PER_TURN: usize = 128;

/// Maximum number of driver failures of a worker.
const FAILURES_MAX: usize = 8;

/// A worker that moved this many bytes in a turn does not spin before it sleeps: moving them costs
/// more than the wakeup. Nor does one that waits for a writable socket, or for a file, which takes
/// longer than a spin. Requests of 64 KiB, one at a time, gain from spinning: 17,400 writes a second where it was
/// 10,400, and 25,500 reads where it was 12,600 (nbdkit: 13,900 and 13,400).
const BULK: usize = 128 << 10;

/// Settings of the runtime.
#[derive(Debug, Clone, Default)]
pub struct RuntimeConfig {
    /// Number of workers; 0 means one per core.
    pub workers: usize,
    /// Kernel interface.
    pub engine: IoEngine,
}

/// The workers of a program. Dropping it stops them after their current tasks and file operations.
pub struct Runtime {
    remotes: Vec<WorkerHandle>,
    threads: Vec<JoinHandle<()>>,
}

impl Runtime {
    /// Starts the workers; an error if threads or the engine are not available.
    ///
    /// # Errors
    /// If a thread or a driver cannot be started.
    pub fn start(config: &RuntimeConfig) -> io::Result<Runtime> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let count = if config.workers == 0 { cores } else { config.workers };
        let mut remotes = Vec::new();
        let occupied = sys::occupy_low_descriptors();
        let ending = Arc::new(WorkerShutdown::new(count));
        for index in 0..count {
            remotes.push(WorkerHandle(Arc::new(Inbox::new(index, Arc::clone(&ending))?)));
        }
        let (ready_sender, ready) = mpsc::channel();
        let mut runtime = Runtime { remotes: remotes.clone(), threads: Vec::new() };
        for remote in &remotes {
            let inbox = remote.0.clone();
            let engine = config.engine;
            let peers = remotes.iter().map(|remote| remote.0.clone()).collect();
            let ready_sender = ready_sender.clone();
            let thread = std::thread::Builder::new()
                .name(format!("worker-{}", remote.worker()))
                .spawn(move || {
                    let opened = driver::open(engine, &inbox.wakeup);
                    let failed = match opened {
                        Ok((driver, engine)) => {
                            set_worker(Worker {
                                inbox,
                                peers,
                                ready: RefCell::default(),
                                engine: Cell::new(engine),
                                driver: RefCell::new(driver),
                                ops: RefCell::default(),
                                timers: RefCell::default(),
                                ahead: Cell::default(),
                                moved: Cell::default(),
                            });
                            None
                        }
                        Err(error) => {
                            drop(inbox.close());
                            Some(error)
                        }
                    };
                    let go = failed.is_none();
                    // The starter may have given up already; then the stop is in the inbox.
                    let _ = ready_sender.send(failed);
                    drop(ready_sender);
                    if go {
                        run_or_abort();
                    }
                })?;
            runtime.threads.push(thread);
        }
        drop(ready_sender);
        if let Some(error) = ready.into_iter().flatten().next() {
            return Err(error);
        }
        drop(occupied);
        Ok(runtime)
    }

    /// Handles to all workers.
    pub fn workers(&self) -> &[WorkerHandle] {
        &self.remotes
    }

    /// Runs a future on the first worker and waits for its output; not from within a worker. Panics
    /// if the future does.
    pub fn block_on<M, F>(&self, make: M) -> F::Output
    where
        M: FnOnce() -> F + Send + 'static,
        F: Future + 'static,
        F::Output: Send + 'static,
    {
        let (sender, receiver) = mpsc::channel();
        drop(self.remotes[0].spawn(move || {
            let future = make();
            async move {
                // The receiver waits below until this has been sent.
                let _ = sender.send(future.await);
            }
        }));
        receiver
            .recv()
            .expect("the future has panicked: workers end only after this runtime is dropped")
    }

    /// A handle to the first worker, for other threads.
    pub fn remote(&self) -> WorkerHandle {
        self.remotes[0].clone()
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        for remote in &self.remotes {
            remote.0.push(InboxItem::Stop);
        }
        // The others agree on their end without those that could not be started.
        for never in &self.remotes[self.threads.len()..] {
            drop(never.0.close());
        }
        for thread in self.threads.drain(..) {
            // A worker that panicked has aborted the process: nothing to report here.
            let _ = thread.join();
        }
    }
}

/// The program chooses the effect of a panic in a task ([`crate::abort_on_panic`]). A panic of the
/// worker itself always aborts the process: the kernel may still write to memory of operations in
/// flight, which could not be awaited any more.
fn run_or_abort() {
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        with_worker(run);
    }));
    if let Err(cause) = result {
        panic::abort(panic::text_of(&*cause));
    }
}

fn run(worker: &Worker) {
    let mut done: Vec<OpCompletion> = Vec::new();
    let mut stopping = false;
    let mut failures = 0;
    let mut agreed = false;
    let ending = &worker.inbox.ending;
    let index = worker.inbox.worker;
    loop {
        if std::mem::take(&mut agreed) && !ending.withdraw(index) {
            break;
        }
        stopping |= take_items(worker);
        run_tasks(worker, TASKS_PER_TURN);
        let idle = worker.ready.borrow().is_empty();
        if stopping && idle && worker.ops.borrow().files_out == 0 {
            if ending.agree(index, &worker.peers) {
                break;
            }
            agreed = true;
        }
        let sleep = if idle { time_to_sleep(worker) } else { SleepLimit::No };
        let sleep = match sleep {
            SleepLimit::No => SleepLimit::No,
            sleep if worker.inbox.prepare_sleep() => sleep,
            _ => SleepLimit::No,
        };
        let quick = worker.moved.take() < BULK && worker.ops.borrow().files_out == 0;
        let may_look = quick && worker.ahead.get() == 0;
        let turned = worker.driver.borrow_mut().turn(sleep, may_look, &mut done);
        worker.inbox.awake();
        wake_completed(worker, &mut done);
        if let Err(error) = turned {
            failures += 1;
            replace_driver(worker, &error, failures);
        }
        wake_due(worker);
    }
    end(worker);
}

/// Takes what other threads have passed to the worker; true if that includes a stop.
#[inline]
pub(crate) fn take_items(worker: &Worker) -> bool {
    let mut stop = false;
    for item in worker.inbox.take() {
        match item {
            InboxItem::Run(runnable) => worker.ready.borrow_mut().push_back(runnable),
            InboxItem::Call(call) => panic::contained(call),
            InboxItem::Stop => stop = true,
        }
    }
    stop
}

/// Runs at most this many tasks that are ready. After a panic, the rest run on the next turn.
#[inline]
pub(crate) fn run_tasks(worker: &Worker, most: usize) {
    panic::contained(|| {
        for _ in 0..most {
            let Some(runnable) = next_ready(worker) else { break };
            runnable.run();
        }
    });
}

/// Wakes the tasks that wait for these completions.
#[inline]
pub(crate) fn wake_completed(worker: &Worker, done: &mut Vec<OpCompletion>) {
    for done in done.drain(..) {
        let waker = worker.ops.borrow_mut().complete(done);
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

/// Wakes the tasks whose time has come.
#[inline]
pub(crate) fn wake_due(worker: &Worker) {
    let due = worker.timers.borrow_mut().due(crate::now());
    due.into_iter().for_each(std::task::Waker::wake);
}

/// Refuses late calls and drops all tasks that wait.
pub(crate) fn end(worker: &Worker) {
    // Late calls are refused. Waiting tasks are dropped with everything they hold: a task whose
    // last waker is dropped is queued once more, and dropping its queue entry drops it.
    drop(worker.inbox.close());
    let ops = std::mem::take(&mut *worker.ops.borrow_mut());
    let timers = std::mem::take(&mut *worker.timers.borrow_mut());
    drop((ops, timers));
    while let Some(runnable) = next_ready(worker) {
        drop(runnable);
    }
}

/// The next task that is ready. The queue is not borrowed while the task runs.
fn next_ready(worker: &Worker) -> Option<Runnable> {
    worker.ready.borrow_mut().pop_front()
}

/// Continues with another driver after an unexpected driver error. Operations in flight fail.
fn replace_driver(worker: &Worker, error: &io::Error, failures: usize) {
    let engine = worker.engine.get();
    log::error!(
        "the kernel's interface of worker {} ({engine}) fails: {error}: what is in progress fails, and it \
         goes on with epoll and threads",
        worker.inbox.worker
    );
    assert!(failures <= FAILURES_MAX, "no kernel interface works any more: {error}");
    let (driver, engine) =
        driver::open_again(&worker.inbox.wakeup).expect("epoll is there, and a descriptor for it");
    worker.driver.replace(driver);
    worker.engine.set(engine);
    let woken = worker.ops.borrow_mut().fail_all();
    woken.into_iter().for_each(std::task::Waker::wake);
}

fn time_to_sleep(worker: &Worker) -> SleepLimit {
    match worker.timers.borrow().earliest() {
        None => SleepLimit::Forever,
        Some(at) => {
            let left = at.saturating_duration_since(crate::now());
            if left.is_zero() { SleepLimit::No } else { SleepLimit::AtMost(left) }
        }
    }
}
