//! The handshake ("Handshake"): a state machine for each role. Each processes received bytes,
//! appends the bytes to send, and returns an event or a question for the caller. The caller does
//! reading, writing, timeouts and TLS.

pub mod client;
pub mod negotiation;
pub mod server;

/// The form of the greeting.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GreetingForm {
    /// Size and flags at once, without names and options. Very old servers, and `nbdkit -o`.
    Oldstyle,
    /// Original newstyle: only EXPORT_NAME may be sent.
    Newstyle,
    /// Fixed newstyle: all options.
    FixedNewstyle,
}
