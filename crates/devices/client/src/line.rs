//! A bare connection in transmission, whose requests the caller makes: for a load generator, which
//! must cost less than the servers that it measures.

use blockhaul_block::{Error, Kind, Result};
use blockhaul_io::{RecvWindow, SendQueue, Stream};
use blockhaul_wire::handshake::client::Negotiated;

use crate::connect::{Ended, Options, at, transmission};
use crate::link::Link;
use crate::options::Place;

/// A connection whose handshake is over.
pub struct Line {
    /// The socket.
    pub stream: Stream,
    /// Received bytes that were not consumed yet.
    pub window: RecvWindow,
    /// Bytes to send.
    pub queue: SendQueue,
    /// The result of the negotiation.
    pub negotiated: Negotiated,
}

impl Line {
    /// Connects to the export of a place.
    pub async fn connect(place: &Place, options: &Options) -> Result<Line> {
        let options = Options { tls: place.tls.clone(), ..options.clone() };
        let dialled = transmission(&place.address, &place.export, &options).await;
        let opened = dialled.and_then(|(link, ended)| match ended {
            Ended::Transmission(negotiated) => {
                let Link { stream, window, queue, .. } = link;
                Ok(Line { stream, window, queue, negotiated: *negotiated })
            }
            Ended::Options(_) => Err(Error::new(Kind::Io, "the handshake stopped too early")),
        });
        opened.map_err(|error| at(&place.name, &place.address, error))
    }
}
