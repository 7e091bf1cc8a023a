//! Hosts plugins written in C (or anything that makes shared objects): unmodified ones for nbdkit's
//! interface, versions 1 and 2, and asynchronous ones for `blockhaul-plugin.h`.
//!
//! - `load`, `abi`, `async_abi`: the shared object and its description; `about`, `dump`: show it.
//! - `plugin`: its life. `connection`, and `visit`: a client's. `handle`: an open handle and its
//!   calls. `device`: that as a [`blockhaul_block::Device`]. `backend`: the scheme `nbdkit:`;
//!   `hint`: for users who omit it.
//! - `asynchronous`: asynchronous plugins, their requests and the limit of lent
//!   bytes.
//! - `filter`: nbdkit's filters between the host and a plugin.
//! - `api`, `shim.c`: the functions that plugins call; `context`: what those know about the caller.
//! - `stdio`: who uses standard input and output. `sink`: memory for unwanted bytes.
//! - `shutdown`: which server a plugin stops.
//! - `overdue`, `watchdog`: callbacks that do not return. `crash`: a crash names the plugin, by
//!   `running`. `debug`: global variables that enable debug messages of plugins.
//!
//! A program that hosts plugins must export the functions: its build script passes
//! `-Wl,--export-dynamic-symbol=nbdkit_*` and the same for `blockhaul_*` to the linker.
//!
//! Callbacks block, and so never run on a worker: they run on a lane of threads of the plugin
//! (`blockhaul_io::BlockingPool`).
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod abi;
mod about;
mod api;
mod async_abi;
mod asynchronous;
mod backend;
mod capture;
mod connection;
mod context;
mod crash;
mod debug;
mod device;
mod dump;
mod filter;
mod handle;
mod hint;
mod lists;
mod load;
mod overdue;
mod parse;
mod password;
mod plugin;
mod running;
mod shutdown;
mod sink;
mod stdio;
mod visit;
mod watchdog;

pub use about::{PluginDescription, about};
pub use api::set_server_name;
pub use backend::NbdkitBackend;
pub use blockhaul_block::ThreadModel;
pub use dump::{dump, print_dump};
pub use filter::{about as about_filter, hosts as hosts_filter};
pub use load::{PATH_VARIABLE, filter_folder, plugin_folder};
pub use plugin::{PluginHostSettings, PluginSettings, wait_for_end};
pub use stdio::{stdio_is_a_client, when_ready};

/// Every kind of storage of this crate, for a [`blockhaul_catalog::Registry`].
pub fn all() -> Vec<std::sync::Arc<dyn blockhaul_catalog::Backend>> {
    vec![std::sync::Arc::new(NbdkitBackend)]
}
