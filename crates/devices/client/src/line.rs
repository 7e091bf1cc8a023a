//! A bare connection in transmission, whose requests the caller makes by itself: for a load generator,
//! which must cost less than the servers that it measures.

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
    /// What has been received and not been taken yet.
    pub window: RecvWindow,
    /// What is to be sent.
    pub queue: SendQueue,
    /// What was agreed on.
    pub negotiated: Negotiated,
}

impl Line {
    /// Connects to the export that a place names.
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
