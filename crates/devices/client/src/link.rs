//! A connection during the handshake: a stream with its queues, and the mapping of codec and TLS
//! errors.

use std::io::ErrorKind;
use std::sync::Arc;

use blockhaul_block::{Error, Kind, Result};
use blockhaul_io::{RecvWindow, SendQueue, Stream};
use blockhaul_wire::{OptionCode, OptionError};

use crate::traffic::Traffic;

/// A connected stream, its received and unconsumed bytes, and its bytes to send.
pub(crate) struct HandshakeLink {
    pub(crate) stream: Stream,
    pub(crate) window: RecvWindow,
    pub(crate) queue: SendQueue,
    /// Nothing has arrived through TLS yet. In TLS 1.3 a client finishes the handshake before the
    /// server has checked its certificate, and GnuTLS servers disconnect silently if they reject
    /// it.
    pub(crate) unanswered: bool,
    /// A program between client and server passes the bytes on.
    pub(crate) is_relayed: bool,
    /// The server was started for this connection alone.
    pub(crate) has_own_server: bool,
    /// What was sent and received.
    pub(crate) traffic: Arc<Traffic>,
}

impl HandshakeLink {
    /// An unused stream.
    pub(crate) fn new(stream: Stream) -> HandshakeLink {
        HandshakeLink::going_on(stream, Arc::default())
    }

    /// A stream of a connection that has sent and received before.
    pub(crate) fn going_on(stream: Stream, traffic: Arc<Traffic>) -> HandshakeLink {
        let window = RecvWindow::new();
        let queue = SendQueue::default();
        HandshakeLink {
            stream,
            window,
            queue,
            unanswered: false,
            is_relayed: false,
            has_own_server: false,
            traffic,
        }
    }

    /// Messages of the handshake were taken in.
    pub(crate) fn consume(&mut self, bytes: usize) {
        self.window.consume(bytes);
        if bytes > 0 {
            self.traffic.received(bytes, 1);
        }
    }

    /// Sends all of `out`, and empties it.
    pub(crate) async fn say(&mut self, out: &mut Vec<u8>) -> Result<()> {
        // An empty send fails, too, if the server has disconnected: read its messages first.
        if out.is_empty() {
            return Ok(());
        }
        self.traffic.sent(out.len());
        self.queue.head(out);
        out.clear();
        let sent = self.queue.send_all(&self.stream).await;
        let Err(error) = sent else { return Ok(()) };
        // A server that rejects our identity reports it after our side of TLS is established.
        match self.window.fill(&self.stream).await {
            Err(said) => Err(receive_error(said)),
            Ok(_) => Err(Error::system("send", error)),
        }
    }

    // nbd: tls.failed-client
    /// Starts TLS: discards what was received before.
    pub(crate) async fn secure(&mut self, connector: &blockhaul_tls::TlsConnector) -> Result<()> {
        let session = connector.connect(&self.stream).await.map_err(insecure)?;
        let about = &session.about;
        log::debug!("TLS to {}: {} {}", self.stream.peer(), about.version, about.suite);
        // nbd: tls.all-after
        self.window.secure(session.opener, &session.received);
        self.queue.secure(session.sealer);
        self.unanswered = true;
        Ok(())
    }

    /// Adds what a lost connection may mean at this point, for the user who configured it.
    pub(crate) fn doubted(&self, error: Error) -> Error {
        if !self.unanswered || error.kind() != Kind::Disconnected {
            return error;
        }
        error.with_remedy(
            "the server may refuse the certificate or key of this client: check its messages",
        )
    }
}

/// A failed receive; with TLS possibly one that the server reports.
pub(crate) fn receive_error(error: std::io::Error) -> Error {
    match error.kind() {
        ErrorKind::ConnectionAborted if error.raw_os_error().is_none() => {
            Error::new(Kind::Refused, error.to_string())
        }
        _ => Error::system("receive", error),
    }
}

/// Maps errors of the codec.
pub(crate) fn refused(error: &blockhaul_wire::ProtocolError) -> Error {
    let kind = match error {
        blockhaul_wire::ProtocolError::Refused { reason, .. } => match reason {
            OptionError::Unknown => Kind::NotFound,
            OptionError::TlsRequired | OptionError::Policy => Kind::Refused,
            OptionError::Shutdown => Kind::ShuttingDown,
            OptionError::Unsupported => Kind::Unsupported,
            _ => Kind::Invalid,
        },
        _ => Kind::Io,
    };
    let text = error.to_string();
    let blockhaul_wire::ProtocolError::Refused { option, reason, .. } = error else {
        return Error::new(kind, text);
    };
    let refused = Error::new(kind, text);
    match reason {
        OptionError::TlsRequired => {
            refused.with_remedy("use an nbds URI, with a key or certificates")
        }
        OptionError::Policy | OptionError::Unsupported if *option == OptionCode::StartTls => {
            let remedy =
                "give the server keys or certificates, or use an nbd URI if the network is trusted";
            refused.with_remedy(remedy)
        }
        OptionError::Unknown => refused.with_remedy("list the exports with blockhaul info --list"),
        _ => refused,
    }
}

/// Maps errors of TLS.
pub(crate) fn insecure(error: blockhaul_tls::TlsError) -> Error {
    let kind = match error.kind() {
        blockhaul_tls::TlsErrorKind::File => Kind::NotFound,
        blockhaul_tls::TlsErrorKind::Setup => Kind::Invalid,
        blockhaul_tls::TlsErrorKind::Refused => Kind::Refused,
        blockhaul_tls::TlsErrorKind::Lost | blockhaul_tls::TlsErrorKind::Closed => {
            Kind::Disconnected
        }
    };
    let insecure = Error::new(kind, error.text().to_string());
    match error.remedy() {
        Some(remedy) => insecure.with_remedy(remedy),
        // The text says which file is expected.
        None if kind == Kind::NotFound => insecure.complete(),
        None => insecure,
    }
}
