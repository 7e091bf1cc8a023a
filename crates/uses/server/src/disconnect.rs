//! Why connections end, other than by the client's disconnect request.

use std::fmt;

/// Why a connection ends, other than by the client's request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum DisconnectReason {
    /// Caused by the client or its network.
    Client(String),
    /// The client failed to authenticate.
    Refused(String),
    /// The client closed the connection during its handshake, as it may at any time.
    Left(String),
    /// Others need its place, and it has not finished its handshake.
    Crowded,
    /// The server stops.
    Stopping,
    /// The operator requested it.
    Operator,
}

impl From<String> for DisconnectReason {
    fn from(why: String) -> DisconnectReason {
        DisconnectReason::Client(why)
    }
}

/// As logged for a connection that is disconnected during its handshake.
impl fmt::Display for DisconnectReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DisconnectReason::Client(why) | DisconnectReason::Refused(why) | DisconnectReason::Left(why) => why,
            DisconnectReason::Crowded => {
                "disconnected: too many connections, and this one was in its handshake for the longest \
                 time"
            }
            DisconnectReason::Stopping => "disconnected in its handshake: the server stops",
            DisconnectReason::Operator => "disconnected in its handshake by request through the control socket",
        })
    }
}

/// What [`Server::disconnect`](crate::Server::disconnect) did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DisconnectResult {
    /// No further request is read; those in progress are finished and answered.
    Requested,
    /// It had been requested before: the connection is cut.
    Cut,
}
