//! Ground floor: workers, engines, buffers, files, sockets, timers.
//!
//! # Execution model
//! A [`Runtime`] starts one *worker* thread per core. Each worker owns one driver (io_uring, or
//! epoll with a pool of threads), one run queue of local tasks and one set of timers. Workers share
//! the buffer [`Pool`] and the pool of pipes ([`ParkedPayload`]); devices may share more. A task never
//! moves to another worker, so futures need not be `Send`; another thread reaches a worker through
//! [`WorkerHandle`].
//!
//! Sockets are non-blocking: a system call is made at once, and the task waits for readiness
//! through the driver only if the call would block. Files go through the driver as owned operations
//! ([`File::read_at`] and others), after an attempt that cannot block ([`File::try_read_at`]).
//!
//! # Cancellation contract
//! *Dropping the future of an operation does not stop the operation.* Whatever the kernel may still
//! access (buffer, file) is owned by the driver until the operation has completed, so dropping is
//! always sound. A write whose future was dropped may or may not reach the file; therefore callers
//! drain writes instead of dropping them. Waiting for readiness is the exception: it owns nothing
//! and is cancelled on drop. A worker that stops first waits for all file operations in flight.
//!
//! In this crate `unsafe` is only in `sys`, `memory`, `cached`, `offload_file`, `vsock` and `driver`, each
//! block with its reason.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]
#![cfg_attr(not(test), warn(clippy::missing_errors_doc))]
#![cfg_attr(not(test), warn(clippy::cast_possible_truncation, clippy::cast_sign_loss))]
#![cfg_attr(not(test), warn(clippy::cast_possible_wrap, clippy::cast_lossless))]

mod blocking;
mod cached;
mod clock;
mod context;
mod driver;
mod ending;
mod fifo_lock;
mod file;
mod inbox;
mod memory;
mod net;
mod offload_file;
mod op;
mod own_listeners;
mod panic;
mod plain;
mod range_locks;
mod recv_window;
mod regular_file;
mod remote;
mod seal;
mod send_queue;
#[cfg(feature = "simulation")]
pub mod simulation;
mod sync;
mod sys;
mod table;
mod task;
mod timer;
mod timers;
mod token_bucket;
mod vsock;
mod worker;
mod zeroes;

pub use blocking::{BlockingPool, offload};
pub use clock::{elapsed, is_simulated, now};
pub use context::{engine_name, worker, worker_count};
pub use driver::{Interest, IoEngine, uring_available};
pub use fifo_lock::{FifoGuard, FifoLock};
pub use file::{FallocateMode, File, FileRead, FileWrite, WRITE_NOW_MAX, sync_folder};
pub use memory::{
    ALIGN, Buf, Data, KeptReservation, LentPayload, ParkedPayload, PayloadRoute, Pool, Reservation,
    RouteCounters, SharedMemory, SharedPart, TooLarge, disable_parking,
};
pub use net::{Listener, PeerAddress, Stream};
pub use op::ready;
pub use own_listeners::{listens_on_tcp, listens_on_unix};
pub use panic::abort_on_panic;
pub use plain::plain;
pub use range_locks::{ExclusiveMode, LockMode, RangeLock, RangeLocks};
pub use recv_window::RecvWindow;
pub use regular_file::{open_regular_file, read_regular_file};
pub use remote::{WorkerHandle, idle_worker};
pub use seal::{
    OpenedRecord, RECORD_MAX, RECORD_PLAIN_MAX, SEAL_MAX, SEALED_MAX, StreamOpener, StreamSealer,
};
pub use send_queue::SendQueue;
pub use sync::{Completer, Event, LostCompletion, Notify, Ticket, ticket};
pub use task::{Task, spawn, start, yield_now};
pub use timer::{TimeoutError, sleep, sleep_until, timeout};
pub use token_bucket::{TokenBucket, Turn};
pub use worker::{Runtime, RuntimeConfig};
pub use zeroes::is_zero;
