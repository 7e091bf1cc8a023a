//! The handshake ("Handshake"): a state machine for each role. Each takes the bytes that have come,
//! appends the bytes that are to be sent, and tells what happened or what must be decided. Reading,
//! writing, timeouts and TLS are the caller's.

pub mod client;
pub mod negotiation;
pub mod server;

/// How a connection was greeted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Protocol {
    /// Size and flags at once, no names and no options. Servers of long ago, and `nbdkit -o`.
    Oldstyle,
    /// Newstyle before it was fixed: only EXPORT_NAME may be sent.
    Newstyle,
    /// Fixed newstyle: all options.
    FixedNewstyle,
}
