//! `--qmp`: the monitor protocol of QEMU (QMP) for jobs, exports and bitmaps, as far as clients of
//! qemu-storage-daemon need it. It works on the same exports, jobs and bitmaps as `blockhaul ctl`.
//!
//! - `input`: finds commands in what clients send. `commands`: all commands and their arguments, as
//!   tables. `error`: errors in QEMU's classes.
//! - `session`: a client. `events`: what all clients receive. `monitor`: what they share; `state`: what it
//!   knows. `host`: the program around it. `execute`: from the name of a command to what carries it out.
//! - `nodes`, `objects`, `exports`, `jobs`, `bitmaps`, `transaction`, `query`: the commands.

mod bitmaps;
mod commands;
mod error;
mod events;
mod execute;
mod exports;
mod host;
mod input;
mod jobs;
mod monitor;
mod nodes;
mod objects;
mod query;
mod session;
mod state;
mod transaction;

pub use host::{ListenerFuture, MonitorHost};
pub use monitor::{Monitor, MonitorConfig};
