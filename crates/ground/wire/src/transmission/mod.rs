//! The client's side of the transmission phase, without I/O: requests in flight, and the meaning of
//! the bytes that a server sends.
//!
//! ```text
//! begin ── the head of a request; its payload follows
//! receive ── NeedMore, Contents    receive more bytes, and call it again
//!         ── Payload               take bytes of a read from the stream, then call took
//!         ── Hole                  bytes of a read are zeroes
//!         ── End                   a request has its whole reply
//! ```
//!
//! The bytes of a read do not pass through [`Transmission`]: a driver receives them where they
//! belong.

mod coverage;
mod event;
mod machine;
mod reply_state;
mod table;
#[cfg(test)]
mod tests;

pub use event::{ReadRange, ReceiveResult, ReplyError, TransmissionEvent};
pub use machine::Transmission;
