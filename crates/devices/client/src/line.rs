//! A bare connection in transmission, whose requests the caller makes: for a load generator, which
//! must cost less than the servers that it measures.

use blockhaul_block::{Error, Kind, Result};
use blockhaul_io::{RecvWindow, SendQueue, Stream};
use blockhaul_wire::handshake::client::ClientHandshakeResult;

use crate::connect::{ConnectOptions, HandshakeEnd, at, transmission};
use crate::link::HandshakeLink;
use crate::options::ConnectTarget;

/// A connection whose handshake is over.
pub struct BareConnection {
    /// The socket.
    pub stream: Stream,
    /// Received bytes that were not consumed yet.
    pub window: RecvWindow,
    /// Bytes to send.
    pub queue: SendQueue,
    /// The result of the negotiation.
    pub negotiated: ClientHandshakeResult,
}

impl BareConnection {
    /// Connects to the export of a place.
    pub async fn connect(
        place: &ConnectTarget,
        options: &ConnectOptions,
    ) -> Result<BareConnection> {
        let options = ConnectOptions { tls: place.tls.clone(), ..options.clone() };
        let dialled = transmission(&place.address, &place.export, &options).await;
        let opened = dialled.and_then(|(link, ended)| match ended {
            HandshakeEnd::Transmission(negotiated) => {
                let HandshakeLink { stream, window, queue, .. } = link;
                Ok(BareConnection { stream, window, queue, negotiated: *negotiated })
            }
            HandshakeEnd::Options(_) => {
                Err(Error::new(Kind::Io, "the handshake stopped too early"))
            }
        });
        opened.map_err(|error| at(&place.name, &place.address, error))
    }
}
