//! QEMU's monitor protocol (QMP) over the exports, dirty bitmaps and jobs of a running server, as far as clients
//! of qemu-storage-daemon need it. `docs/qmp.md` lists its commands.
//!
//! - A caller makes one [`Monitor`] for its server, from a [`MonitorConfig`], and hands it listeners
//!   ([`Monitor::serve`]), connected sockets ([`Monitor::serve_connection`]) or commands without a client
//!   ([`Monitor::run`]). It calls [`Monitor::stop`] before it drops the server.
//! - [`MonitorHost`] is the program around the server: it stops, and it binds TCP ports.
//! - A [`QmpError`] is the error of a command in QEMU's classes.
//!
//! The crate binds no monitor socket, and neither prints nor ends the process. It opens devices only through the
//! table of exports, so that other front ends of the server (`blockhaul ctl`) see the same exports, bitmaps and
//! jobs. Commands run on workers of `blockhaul_io`, one at a time.
//!
//! Files:
//! - `input`: commands in the bytes of a client. `commands`: all commands and their arguments, as tables. `error`:
//!   errors in QEMU's classes.
//! - `session`: a client. `events`: events, and the lines that wait for a client. `monitor`: shared by all clients;
//!   `state`: its nodes, objects and exports. `host`: the program around it. `execute`: dispatch of commands.
//! - `nodes` (`node_plan`, `points_in_time`), `objects`, `exports`, `bitmaps`, `transaction`, `query`: the commands.
//! - `backups` and `mirrors` begin jobs, from their `job_setup`; `jobs` controls them, `job_reports` shows them.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod backups;
mod bitmaps;
mod commands;
mod error;
mod events;
mod execute;
mod exports;
mod host;
mod input;
mod job_reports;
mod job_setup;
mod jobs;
mod mirrors;
mod monitor;
mod node_plan;
mod nodes;
mod objects;
mod points_in_time;
mod query;
mod session;
mod state;
mod transaction;

pub use error::QmpError;
pub use host::{ListenerFuture, MonitorHost};
pub use monitor::{Monitor, MonitorConfig};
