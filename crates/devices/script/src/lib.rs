//! Devices implemented by scripts, in nbdkit's protocol for scripts (nbdkit-sh-plugin(1),
//! nbdkit-eval-plugin(1)), which this program implements itself.
//!
//! - `backend`: the schemes `sh:` and `eval:`. `settings`: what is typed behind them.
//! - `source`: where the scripts are. `call`: one run of one. `answer`: what its exit status means.
//! - `plugin`: the life of a script. `visit`: a client; `connection`: what its handles share. `handle`: an
//!   open handle and its calls.
//! - `parse`: the output of scripts. `folder`: the directory for their state.
//!
//! A run blocks a thread, never a worker: runs are jobs on lanes ([`blockhaul_io::BlockingPool`]), whose threads are
//! bounded and end when idle.
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]
#![cfg_attr(not(test), warn(clippy::missing_errors_doc))]

mod answer;
mod backend;
mod call;
mod connection;
mod folder;
mod handle;
mod parse;
mod plugin;
mod settings;
mod source;
mod visit;

use std::sync::Arc;

pub use backend::{EvalBackend, ShBackend};
pub use call::kill_all;
pub use plugin::{dump, wait_for_end};
pub use settings::{ScriptHostSettings, ScriptSettings};
pub use source::Language;

/// Every kind of storage of this crate, for a [`blockhaul_catalog::Registry`].
pub fn all() -> Vec<Arc<dyn blockhaul_catalog::Backend>> {
    vec![Arc::new(ShBackend), Arc::new(EvalBackend)]
}
