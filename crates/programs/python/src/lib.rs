//! `blockhaul._blockhaul`: what the Python package calls. The package adds classes, defaults and types in
//! Python (`blockhaul/`).
//!
//! - `workers`: the workers of the process, and what a fork means for them. `wait`: a thread of Python
//!   waits for a worker, without the interpreter's lock. `direct`: it needs none, and does its own input
//!   and output. `polling`: the thread of an event loop does that.
//! - `handle`: an open device. `opening`: what it is opened from. `request`: requests and their results.
//!   `completions`: results for an asyncio loop. `memory`: buffers of Python.
//! - `options`: what a server says before an export is opened. `copy`, `serve`: the functions of these names. `object`: a device in Python, served.
//! - `error`: exceptions.
//!
//! Workers never take the interpreter's lock: results and requests cross in queues, and become objects of
//! Python on other threads.

mod completions;
mod copy;
mod direct;
mod error;
mod handle;
mod memory;
mod object;
mod opening;
mod options;
mod polling;
mod request;
mod serve;
mod wait;
mod workers;

use pyo3::prelude::*;

/// The module.
#[pymodule]
mod _blockhaul {
    use super::{Bound, PyModule, PyModuleMethods as _, PyResult};

    #[pymodule_export]
    use super::completions::Completions;
    #[pymodule_export]
    use super::copy::{PythonCopy, PythonCopyResult};
    #[pymodule_export]
    use super::handle::Handle;
    #[pymodule_export]
    use super::options::{greet, list_contexts, list_exports};
    #[pymodule_export]
    use super::polling::Watch;
    #[pymodule_export]
    use super::serve::PythonServer;
    #[pymodule_export]
    use super::workers::{after_fork, set_program, shut_down};

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        super::error::add_classes(module)?;
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
