//! A device over an NBD connection.
//!
//! `session`, [`blocking`] and [`polled`] drive the same state machine, [`blockhaul_wire::transmission`].
//!
//! - [`connect`]: dials, negotiates everything the server offers, and yields a
//!   [`blockhaul_block::Device`].
//! - `link`: a connection during the handshake. `session`: one in transmission, many requests in
//!   flight, replies in any order.
//! - [`options`]: a connection that stays in the handshake, to query exports.
//! - `command`: `[ CMD … ]`, a server started by socket activation.
//! - `guard`: ends such a server when this program is killed.
//! - [`ShellProcess`]: a script that ends with this program, too.
//! - `backends`: the schemes `nbd:`, `nbd+unix:` … and `[ CMD … ]` for the registry.
//! - [`blocking`]: a connection for threads that send and receive themselves.
//! - [`polled`]: a connection for the thread of an event loop.
//! - `socket`: sockets without a worker, and the errors of connections that end. `reply`: outcomes of requests.
//! - [`http`]: requests to an HTTP server, for devices that are read so.
//! - [`BareConnection`]: a bare connection, for callers that make requests themselves.
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod backends;
pub mod blocking;
mod command;
mod connect;
mod device;
mod guard;
pub mod http;
mod http_head;
mod line;
mod link;
pub mod options;
pub mod polled;
mod reply;
mod session;
mod shell;
mod socket;
mod ssh;
mod traffic;
mod upgrade;

pub use backends::{all, is_own_export};
pub use command::ServerProcess;
pub use connect::{
    ConnectOptions, DeviceConnection, NewConnection, OpenSocket, ServerAddress, connect,
    connect_keeping, is_this_machine, open,
};
pub use device::Companions;
pub use guard::set_program;
pub use line::BareConnection;
pub use shell::ShellProcess;
pub use ssh::{SshAddress, StdioServer};
pub use traffic::{Traffic, TrafficFigures};
pub use upgrade::HttpAddress;
