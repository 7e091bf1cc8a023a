//! A connection whose requests are carried out by the threads that make them, without a worker in between:
//! a thread sends its request, and receives its reply into its own memory.
//!
//! Any number of threads may use a connection. One of those that wait receives; it takes in replies to the
//! others, too, and wakes them. A thread that cannot send receives meanwhile, so that a server that does
//! not read before it has sent its replies goes on.
//!
//! - `connection`: what threads share. `stop`: why a call ends without a result.
//! - `receiver`: bytes of the socket. `replies`: their way to the threads. `sending`: requests.
//! - `calls`: what threads ask for.

mod calls;
mod connection;
mod receiver;
mod replies;
mod sending;
mod stop;

pub use self::calls::BlockingRead;
pub use self::connection::{BlockingConnection, ConnectionHandover};
pub use self::stop::{CallStop, ContinueCallback, LOOK};
