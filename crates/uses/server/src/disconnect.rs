//! Why connections end, other than by the client's farewell.

use std::fmt;

/// Why a connection ends, other than politely.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Disconnect {
    /// The client's doing, or its network's.
    Client(String),
    /// The client could not prove who it is.
    Refused(String),
    /// Others want its place, and it has not finished its handshake.
    Crowded,
    /// The server stops.
    Stopping,
    /// Whoever runs the server wants it.
    Operator,
}

impl From<String> for Disconnect {
    fn from(why: String) -> Disconnect {
        Disconnect::Client(why)
    }
}

/// As the log has it: of a connection in its handshake where others want it to end.
impl fmt::Display for Disconnect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Disconnect::Client(why) | Disconnect::Refused(why) => why,
            Disconnect::Crowded => {
                "cut: too many connections, and this one has not finished its handshake for longest"
            }
            Disconnect::Stopping => "cut in its handshake: the server stops",
            Disconnect::Operator => "disconnected in its handshake by whoever runs the server",
        })
    }
}

/// What [`Server::disconnect`](crate::Server::disconnect) did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Disconnected {
    /// No further request is read; what is in progress is finished and answered.
    Requested,
    /// That had been requested before: the connection is cut.
    Cut,
}
