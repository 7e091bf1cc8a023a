//! Drivers: the kernel interfaces that a worker can use.
//!
//! An implementation waits for readiness of descriptors, runs owned file operations, and sleeps until
//! one of these completes or another thread wakes it. Everything else (sockets, timers, tasks) is
//! built above, once.

#![cfg_attr(
    not(test),
    expect(
        clippy::disallowed_methods,
        reason = "drivers measure what sleeping and spinning cost the processor"
    )
)]

mod api;
mod epoll;
mod spin;
mod uring;

use std::io;
use std::str::FromStr;
use std::sync::Arc;

pub use self::api::Interest;
pub(crate) use self::api::{Driver, FileOp, OpCompletion, SleepLimit};
#[cfg(feature = "simulation")]
pub(crate) use self::epoll::run as run_file_op;
pub use self::uring::available as uring_available;
use crate::sys::Wakeup;

/// Which kernel interface the workers use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum IoEngine {
    /// io_uring if a probe finds it usable, else threads.
    #[default]
    Auto,
    /// io_uring; an error if it is refused.
    Uring,
    /// epoll for sockets and a bounded pool of threads for files.
    Threads,
}

impl FromStr for IoEngine {
    type Err = String;

    fn from_str(text: &str) -> Result<IoEngine, String> {
        match text {
            "auto" => Ok(IoEngine::Auto),
            "uring" => Ok(IoEngine::Uring),
            "threads" => Ok(IoEngine::Threads),
            other => Err(format!("unknown engine {other:?}; known are auto, uring, threads")),
        }
    }
}

/// A driver to replace one that has failed, and its name.
pub(crate) fn open_again(wakeup: &Arc<Wakeup>) -> io::Result<(Box<dyn Driver>, &'static str)> {
    open(IoEngine::Threads, wakeup)
}

/// The driver for `engine`, and its name; `wakeup` ends its sleep.
pub(crate) fn open(
    engine: IoEngine,
    wakeup: &Arc<Wakeup>,
) -> io::Result<(Box<dyn Driver>, &'static str)> {
    match engine {
        IoEngine::Uring => {
            let uring =
                uring::UringDriver::new(wakeup.clone()).map_err(|error| unusable(&error))?;
            Ok((Box::new(uring), "uring"))
        }
        IoEngine::Threads => Ok((Box::new(epoll::EpollDriver::new(wakeup.clone())?), "threads")),
        IoEngine::Auto => match uring::UringDriver::new(wakeup.clone()) {
            Ok(uring) => Ok((Box::new(uring), "uring")),
            Err(error) => {
                let why = crate::plain(&error);
                log::debug!("io_uring is not usable ({why}): using epoll and threads");
                Ok((Box::new(epoll::EpollDriver::new(wakeup.clone())?), "threads"))
            }
        },
    }
}

/// The error of a program that was to use io_uring only, with a remedy.
fn unusable(error: &io::Error) -> io::Error {
    let remedy = match error.kind() {
        io::ErrorKind::OutOfMemory => {
            "allow more locked memory with ulimit -l 8192 or LimitMEMLOCK=8M"
        }
        _ => {
            "allow it with sysctl kernel.io_uring_disabled=0, and in the seccomp profile of a container"
        }
    };
    let why = crate::plain(error);
    io::Error::new(
        error.kind(),
        format!("io_uring is not usable ({why}): {remedy}, or use --engine threads"),
    )
}
