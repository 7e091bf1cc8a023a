//! Devices that are plugins in Python, in nbdkit's interface for Python (nbdkit-python-plugin(3)),
//! which this program implements itself, and with coroutines.
//!
//! A plugin runs in a process of its own, with any interpreter: nothing here links to Python, and a
//! plugin that crashes is an error, not the end of the program. Payloads are in memory that both
//! processes map: the buffer that a plugin fills is the one that the reply is sent from.
//!
//! - `backend`: the scheme `python:`. `settings`: what is typed behind it.
//! - `process`: starts and ends the interpreter, which runs `host/host.py`. `keeper`: starts it again.
//! - `group`: a plugin in several processes (`@processes`). `group_device`: a client's handle in all of them.
//! - `wire`: the messages between both. `host`: requests and answers over them.
//! - `visit`: a client. `facts`: what a handle says of itself. `device`: an open handle and its requests.
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod backend;
mod device;
mod facts;
mod group;
mod group_device;
mod host;
mod keeper;
mod process;
mod settings;
mod visit;
mod wire;

use std::sync::Arc;

pub use backend::PythonBackend;
pub use host::{dump, dump_without_script};
pub use process::{give_up_starts, kill_all, stdio_is_a_client, wait_for_end};
pub use settings::{PythonHostSettings, PythonSettings};

/// Every kind of storage of this crate, for a [`blockhaul_catalog::Registry`].
pub fn all() -> Vec<Arc<dyn blockhaul_catalog::Backend>> {
    vec![Arc::new(PythonBackend)]
}
