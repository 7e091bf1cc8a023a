//! Worker threads: one driver, one run queue, one set of timers each.

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::VecDeque;
use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Instant;

use async_task::Runnable;

use crate::driver::{self, Done, Driver, Engine, Sleep};
use crate::op::Table;
use crate::panic;
use crate::remote::{Inbox, Item, Remote};
use crate::timer::Timers;

/// Tasks run between two looks at the driver: bounds how long a completion waits behind tasks.
const TASKS_PER_TURN: usize = 128;

/// A worker that moved so many bytes in a turn does not look before it sleeps: the moving costs more than
/// the waking up. Nor does one that is ahead of a peer, that is, waits for room to send, or waits for a
/// file, which takes longer than a look.
const BULK: usize = 64 << 10;

thread_local! {
    static CURRENT: OnceCell<Worker> = const { OnceCell::new() };
    static LOCAL: RefCell<VecDeque<Runnable>> = const { RefCell::new(VecDeque::new()) };
}

/// What a worker thread owns.
pub(crate) struct Worker {
    inbox: Arc<Inbox>,
    peers: Vec<Remote>,
    engine: &'static str,
    pub(crate) driver: RefCell<Box<dyn Driver>>,
    pub(crate) ops: RefCell<Table>,
    pub(crate) timers: RefCell<Timers>,
    /// How many wait for room to send.
    pub(crate) ahead: Cell<usize>,
    /// Bytes sent and received since the last turn of the driver.
    moved: Cell<usize>,
}

impl Worker {
    /// Has all workers look at what there is to do.
    pub(crate) fn wake_peers(&self) {
        for peer in &self.peers {
            peer.0.push(Item::Call(Box::new(|| {})));
        }
    }

    /// Where a task that became ready is queued: here, or through the inbox from other threads.
    pub(crate) fn scheduler(&self) -> impl Fn(Runnable) + Send + Sync + 'static {
        let inbox = self.inbox.clone();
        move |runnable| {
            let here = try_with_worker(|worker| {
                worker.inbox.worker == inbox.worker && Arc::ptr_eq(&worker.inbox, &inbox)
            });
            if here == Some(true) {
                LOCAL.with_borrow_mut(|queue| queue.push_back(runnable));
            } else {
                inbox.push(Item::Run(runnable));
            }
        }
    }
}

/// Takes note of bytes that were sent or received.
pub(crate) fn moved(bytes: usize) {
    try_with_worker(|worker| worker.moved.update(|moved| moved.saturating_add(bytes)));
}

/// Runs `f` with the current thread's worker. Panics outside of a worker.
pub(crate) fn with_worker<R>(f: impl FnOnce(&Worker) -> R) -> R {
    CURRENT.with(|current| f(current.get().expect("called outside of a worker thread")))
}

/// Runs `f` with the current thread's worker, if it is one and not already ending.
pub(crate) fn try_with_worker<R>(f: impl FnOnce(&Worker) -> R) -> Option<R> {
    CURRENT.try_with(|current| current.get().map(f)).ok().flatten()
}

/// The current worker's number.
pub fn worker() -> usize {
    with_worker(|worker| worker.inbox.worker)
}

/// How many workers the current worker's runtime has.
pub fn worker_count() -> usize {
    with_worker(|worker| worker.peers.len())
}

/// Another worker of the runtime that has nothing to do just now, if there is one.
pub fn idle_worker() -> Option<Remote> {
    with_worker(|worker| {
        let (before, after) = worker.peers.split_at(worker.inbox.worker);
        let mut others = after[1..].iter().chain(before);
        others.find(|other| other.0.is_asleep()).cloned()
    })
}

/// Name of the engine in use: `uring` or `threads`.
pub fn engine_name() -> &'static str {
    with_worker(|worker| worker.engine)
}

impl Remote {
    /// Handle on worker `index` (modulo their number) of the current worker's runtime.
    pub fn to(index: usize) -> Remote {
        with_worker(|worker| worker.peers[index % worker.peers.len()].clone())
    }
}

/// How to run.
#[derive(Debug, Clone, Default)]
pub struct Config {
    /// Number of workers; 0 means one per core.
    pub workers: usize,
    /// Kernel interface.
    pub engine: Engine,
}

/// The workers of a program. Dropping it stops them after their current tasks and file operations.
pub struct Runtime {
    remotes: Vec<Remote>,
    threads: Vec<JoinHandle<()>>,
}

impl Runtime {
    /// Starts the workers; an error when threads or the engine cannot be had.
    pub fn start(config: &Config) -> io::Result<Runtime> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let count = if config.workers == 0 { cores } else { config.workers };
        let mut remotes = Vec::new();
        let last = Arc::default();
        for index in 0..count {
            remotes.push(Remote(Arc::new(Inbox::new(index, Arc::clone(&last))?)));
        }
        let (ready_sender, ready) = mpsc::channel();
        let mut runtime = Runtime { remotes: remotes.clone(), threads: Vec::new() };
        for remote in &remotes {
            let (inbox, peers, engine) = (remote.0.clone(), remotes.clone(), config.engine);
            let ready_sender = ready_sender.clone();
            let thread = std::thread::Builder::new()
                .name(format!("worker-{}", remote.worker()))
                .spawn(move || {
                    let opened = driver::open(engine, inbox.clone());
                    let failed = match opened {
                        Ok((driver, engine)) => {
                            let worker = Worker {
                                inbox,
                                peers,
                                engine,
                                driver: RefCell::new(driver),
                                ops: RefCell::default(),
                                timers: RefCell::default(),
                                ahead: Cell::default(),
                                moved: Cell::default(),
                            };
                            let fresh = CURRENT.with(|current| current.set(worker).is_ok());
                            assert!(fresh, "a new thread has no worker yet");
                            None
                        }
                        Err(error) => Some(error),
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
        Ok(runtime)
    }

    /// Handles on all workers.
    pub fn workers(&self) -> &[Remote] {
        &self.remotes
    }

    /// Runs a future on the first worker and waits for its output; not from within a worker. Panics if the
    /// future does.
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

    /// Handle on the first worker, for threads that are none.
    pub fn remote(&self) -> Remote {
        self.remotes[0].clone()
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        for remote in &self.remotes {
            remote.0.push(Item::Stop);
        }
        for thread in self.threads.drain(..) {
            // A worker that panicked has aborted the process: nothing to report here.
            let _ = thread.join();
        }
    }
}

/// A panic in a task is the program's to judge ([`crate::abort_on_panic`]). One of the worker itself ends the
/// process whatever the program has chosen: the kernel may still write to memory of operations under way, which
/// nobody could wait for any more.
fn run_or_abort() {
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        CURRENT.with(|current| run(current.get().expect("set before running")));
    }));
    if let Err(cause) = result {
        panic::abort(panic::text_of(&*cause));
    }
}

fn run(worker: &Worker) {
    let mut done: Vec<Done> = Vec::new();
    let mut stopping = false;
    loop {
        for item in worker.inbox.take() {
            match item {
                Item::Run(runnable) => {
                    LOCAL.with_borrow_mut(|queue| queue.push_back(runnable));
                }
                Item::Call(call) => panic::contained(call),
                Item::Stop => stopping = true,
            }
        }
        // After a panic the tasks that are left have the next turn.
        panic::contained(|| {
            for _ in 0..TASKS_PER_TURN {
                let Some(runnable) = LOCAL.with_borrow_mut(VecDeque::pop_front) else { break };
                runnable.run();
            }
        });
        let idle = LOCAL.with_borrow(VecDeque::is_empty);
        let last = || worker.inbox.last.load(Ordering::SeqCst);
        if stopping && idle && worker.ops.borrow().files_out == 0 && last() == 0 {
            break;
        }
        let sleep = if idle { time_to_sleep(worker) } else { Sleep::No };
        let sleep = match sleep {
            Sleep::No => Sleep::No,
            sleep if worker.inbox.prepare_sleep() => sleep,
            _ => Sleep::No,
        };
        let quick = worker.moved.take() < BULK && worker.ops.borrow().files_out == 0;
        let may_look = quick && worker.ahead.get() == 0;
        let turned = worker.driver.borrow_mut().turn(sleep, may_look, &mut done);
        worker.inbox.awake();
        turned.expect("the kernel interface works after it was set up");
        for done in done.drain(..) {
            let waker = worker.ops.borrow_mut().complete(done);
            if let Some(waker) = waker {
                waker.wake();
            }
        }
        let due = worker.timers.borrow_mut().due(Instant::now());
        due.into_iter().for_each(std::task::Waker::wake);
    }
    // Calls that came late are refused. Tasks that still wait are dropped with all that they hold:
    // a task whose last waker goes is queued once more, and dropping its queue entry drops it.
    drop(worker.inbox.close());
    let ops = std::mem::take(&mut *worker.ops.borrow_mut());
    let timers = std::mem::take(&mut *worker.timers.borrow_mut());
    drop((ops, timers));
    while let Some(runnable) = LOCAL.with_borrow_mut(VecDeque::pop_front) {
        drop(runnable);
    }
}

fn time_to_sleep(worker: &Worker) -> Sleep {
    match worker.timers.borrow().earliest() {
        None => Sleep::Forever,
        Some(at) => {
            let left = at.saturating_duration_since(Instant::now());
            if left.is_zero() { Sleep::No } else { Sleep::AtMost(left) }
        }
    }
}
