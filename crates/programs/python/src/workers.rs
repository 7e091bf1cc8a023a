//! The workers of this process. They begin when the first device is opened.
//!
//! Threads do not survive a fork: the child has handles whose workers are gone. Each handle remembers the
//! generation in which it was opened, and is refused in another. The child gets workers of its own when it
//! opens a device; what belongs to the parent is never dropped in the child, because that would end
//! connections of the parent.

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use blockhaul_io::{Runtime, RuntimeConfig, WorkerHandle};
use pyo3::prelude::*;

use crate::error::fail;

/// Forks between the first process that loaded this module and this one.
static GENERATION: AtomicUsize = AtomicUsize::new(0);

/// The workers of the first generation.
static FIRST: WorkerSlot = WorkerSlot::new();

/// The next worker to carry out requests of a new handle.
static NEXT: AtomicUsize = AtomicUsize::new(0);

/// The workers of one generation. Those of the parent may have been locked when the child was made, and
/// are not touched by it.
struct WorkerSlot {
    runtime: Mutex<Option<Arc<Runtime>>>,
    next: OnceLock<Box<WorkerSlot>>,
}

impl WorkerSlot {
    const fn new() -> WorkerSlot {
        WorkerSlot { runtime: Mutex::new(None), next: OnceLock::new() }
    }
}

/// The process that a handle belongs to.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Generation(usize);

impl Generation {
    /// This process.
    pub(crate) fn current() -> Generation {
        Generation(GENERATION.load(Ordering::Relaxed))
    }

    /// Refuses what belongs to the process that forked this one.
    pub(crate) fn check(self) -> PyResult<()> {
        if self.is_current() {
            return Ok(());
        }
        let text =
            "this was opened before a fork, and belongs to the parent process: open it again here";
        Err(fail(libc_numbers::BADF, text))
    }

    pub(crate) fn is_current(self) -> bool {
        self == Generation::current()
    }
}

/// Numbers of errors that no device reports.
pub(crate) mod libc_numbers {
    /// A closed handle.
    pub(crate) const BADF: i32 = 9;
    /// An invalid argument.
    pub(crate) const INVAL: i32 = 22;
    /// Another failure.
    pub(crate) const IO: i32 = 5;
}

fn slot() -> &'static WorkerSlot {
    let mut slot = &FIRST;
    for _ in 0..GENERATION.load(Ordering::Relaxed) {
        slot = slot.next.get_or_init(|| Box::new(WorkerSlot::new()));
    }
    slot
}

/// The workers of this process, started on first use: one for each core.
///
/// # Errors
/// If threads or the kernel's interface are not available.
pub(crate) fn runtime() -> PyResult<Arc<Runtime>> {
    let mut runtime = slot().runtime.lock().expect("no panic under this lock");
    if let Some(runtime) = &*runtime {
        return Ok(runtime.clone());
    }
    keep_freed_memory();
    let started = Runtime::start(&RuntimeConfig::default());
    let started = started.map_err(|error| {
        fail(libc_numbers::IO, &format!("cannot start workers: {}", blockhaul_io::plain(&error)))
    })?;
    Ok(runtime.insert(Arc::new(started)).clone())
}

/// Memory that the C library may keep after it was freed is twice this.
const KEPT: usize = 16 << 20;

/// Lets the C library keep what large results were in: otherwise it returns each one's pages to the kernel,
/// and gets and zeroes them again for the next. glibc does so for blocks up to the largest that was freed
/// (mallopt(3), M_MMAP_THRESHOLD). This block is never touched, and costs no memory.
fn keep_freed_memory() {
    drop(std::hint::black_box(vec![0_u8; KEPT]));
}

/// The worker for a new handle.
pub(crate) fn remote(runtime: &Runtime) -> WorkerHandle {
    let workers = runtime.workers();
    workers[NEXT.fetch_add(1, Ordering::Relaxed) % workers.len()].clone()
}

/// Called in the child of a fork, by `os.register_at_fork`.
#[pyfunction]
pub(crate) fn after_fork() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
}

/// Called when the interpreter ends, and devices are closed: waits for file operations in flight and for
/// data that layers still have to write.
#[pyfunction]
pub(crate) fn shut_down(py: Python<'_>) {
    py.detach(|| {
        let runtime = slot().runtime.lock().expect("no panic under this lock").take();
        // Ends the workers, unless a copy runs.
        drop(runtime);
    });
}

/// Sets the file of the program `blockhaul`, which `[ blockhaul … ]` starts.
#[pyfunction]
pub(crate) fn set_program(path: PathBuf) {
    blockhaul_client::set_program(path);
}
