//! A connection on its way: a stream with its queues, and what errors of the codec and of TLS mean.

use std::io::ErrorKind;

use blockhaul_block::{Error, Kind, Result};
use blockhaul_io::{RecvWindow, SendQueue, Stream};
use blockhaul_wire::OptionError;

/// A connected stream, what has been received from it but not yet taken, and what is to be sent.
pub(crate) struct Link {
    pub(crate) stream: Stream,
    pub(crate) window: RecvWindow,
    pub(crate) queue: SendQueue,
    /// Nothing has come through TLS yet. In TLS 1.3 a client is done before the server has looked at its
    /// certificate, and GnuTLS's servers leave without a word where they do not accept it.
    pub(crate) unanswered: bool,
}

impl Link {
    /// A stream that nothing has passed through yet.
    pub(crate) fn new(stream: Stream) -> Link {
        let (window, queue) = (RecvWindow::new(), SendQueue::default());
        Link { stream, window, queue, unanswered: false }
    }

    /// Sends all of `out`, and empties it.
    pub(crate) async fn say(&mut self, out: &mut Vec<u8>) -> Result<()> {
        // Sending nothing fails, too, where the server has left: what it said is read first.
        if out.is_empty() {
            return Ok(());
        }
        self.queue.head(out);
        out.clear();
        let sent = self.queue.send_all(&self.stream).await;
        let Err(error) = sent else { return Ok(()) };
        // A server that does not accept who we are says so when our side of TLS is up already.
        match self.window.fill(&self.stream).await {
            Err(said) => Err(unheard(said)),
            Ok(_) => Err(Error::system("send", error)),
        }
    }

    /// Starts TLS: what was said before counts no more.
    pub(crate) async fn secure(&mut self, connector: &blockhaul_tls::Connector) -> Result<()> {
        let session = connector.connect(&self.stream).await.map_err(insecure)?;
        let about = &session.about;
        log::debug!("TLS to {}: {} {}", self.stream.peer(), about.version, about.suite);
        self.window.secure(session.opener, &session.received);
        self.queue.secure(session.sealer);
        self.unanswered = true;
        Ok(())
    }

    /// What a lost connection may mean at this point, for whoever set it up.
    pub(crate) fn doubted(&self, error: Error) -> Error {
        if !self.unanswered || error.kind() != Kind::Disconnected {
            return error;
        }
        let text = format!(
            "{}; the server may not accept this client's certificate or key: see its messages",
            error.text()
        );
        Error::new(error.kind(), text)
    }
}

/// A failure to receive; with TLS also one that the server tells.
pub(crate) fn unheard(error: std::io::Error) -> Error {
    match error.kind() {
        ErrorKind::ConnectionAborted if error.raw_os_error().is_none() => {
            Error::new(Kind::Refused, error.to_string())
        }
        _ => Error::system("receive", error),
    }
}

/// Errors of the codec, by what the caller can do about them.
pub(crate) fn refused(error: &blockhaul_wire::Error) -> Error {
    let kind = match error {
        blockhaul_wire::Error::Refused { reason, .. } => match reason {
            OptionError::Unknown => Kind::NotFound,
            OptionError::TlsRequired | OptionError::Policy => Kind::Refused,
            OptionError::Shutdown => Kind::ShuttingDown,
            OptionError::Unsupported => Kind::Unsupported,
            _ => Kind::Invalid,
        },
        _ => Kind::Io,
    };
    Error::new(kind, error.to_string())
}

/// Errors of TLS, by what the caller can do about them.
pub(crate) fn insecure(error: blockhaul_tls::Error) -> Error {
    let kind = match error.kind() {
        blockhaul_tls::Kind::File => Kind::NotFound,
        blockhaul_tls::Kind::Setup => Kind::Invalid,
        blockhaul_tls::Kind::Refused => Kind::Refused,
        blockhaul_tls::Kind::Lost => Kind::Disconnected,
    };
    Error::new(kind, error.to_string())
}
