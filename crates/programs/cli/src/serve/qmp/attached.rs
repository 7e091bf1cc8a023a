//! Clients of the monitor protocol that are there from the beginning: the server connects to them, or
//! got the connection from its parent.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use crate::args::QmpClient;
use crate::exit::{FAILED, Failure, plain};
use crate::serve::single::{Rest, Single};

/// A client that is connected, and not served yet.
pub struct Attached {
    pub(super) socket: OwnedFd,
    /// Output still in transit to standard output.
    pub(super) rest: Option<Rest>,
}

impl Attached {
    /// Connects to a client, or takes the connection.
    pub fn open(client: &QmpClient) -> Result<Attached, Failure> {
        let socket = match client {
            QmpClient::Unix(path) => {
                let connected = UnixStream::connect(path).map_err(|error| {
                    let path = path.display();
                    let text = format!("Failed to connect to '{path}': {}", plain(&error));
                    Failure::new(FAILED, text)
                });
                connected?.into()
            }
            QmpClient::Descriptor(number) => {
                let socket = blockhaul_os::inherited(*number)
                    .filter(|fd| rustix::net::sockopt::socket_type(fd).is_ok());
                let wrong = || Failure::usage(format!("descriptor {number} is not a socket"));
                socket.ok_or_else(wrong)?
            }
            QmpClient::Stdio => {
                let (socket, rest) = Single::take_any()?.split();
                return Ok(Attached { socket, rest: Some(rest) });
            }
        };
        Ok(Attached { socket, rest: None })
    }
}
