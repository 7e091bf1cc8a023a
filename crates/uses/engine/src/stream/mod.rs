//! Copies from and to pipes: the pipe's side is in order and of unknown size; the device's side has
//! many requests in flight.
//!
//! - `from`: a pipe to a device. `to`: a device to a pipe.

mod from;
mod room;
mod summary;
mod to;

pub use from::copy_from_pipe;
pub use to::copy_to_pipe;
