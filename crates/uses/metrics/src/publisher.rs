//! The listener that serves metrics, and the page.
//!
//! Any client that reaches the address can read all of it, without a password: therefore only
//! addresses of this machine, and Unix sockets. Nothing can be changed. Few connections, small
//! requests, short timeouts: a slow, greedy or broken peer occupies one of a few places for a few
//! seconds.

use std::io;
use std::rc::Rc;
use std::sync::Arc;

use blockhaul_io::{Listener, Stream, WorkerHandle};
use serde_json::Value;

use crate::destination::{Destinations, ScrapeAddress};
use crate::error::MetricsError;
use crate::events::{Events, StateSource};
use crate::http::{self, HttpReply, PATIENCE};
use crate::page;
use crate::peer_listener::{self, PeerListener};
use crate::text::{MetricsWriter, TextSource};
use crate::textfile::TextFile;

/// Maximum number of connections; more are closed at once. A browser opens six at a time.
const CONNECTIONS_MAX: usize = 32;

/// The media type of Prometheus' text format.
const PROMETHEUS: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Metrics that are published until this is ended or dropped.
pub struct Publisher {
    server: Option<MetricsServer>,
    file: Option<TextFile>,
}

impl Publisher {
    /// Publishes metrics and state at the destinations, in tasks of a worker.
    ///
    /// # Errors
    /// The address cannot be listened on, or the file cannot be written.
    pub fn start(
        destinations: &Destinations,
        (text, state): (TextSource, StateSource),
        worker: &WorkerHandle,
    ) -> Result<Publisher, MetricsError> {
        let server = destinations.address.as_ref().map(|address| {
            let state = destinations.page.then_some(state);
            MetricsServer::start(address, text.clone(), state, worker)
        });
        let server = server.transpose()?;
        let file = destinations.file.as_ref().map(|path| TextFile::start(path, text, worker));
        Ok(Publisher { server, file: file.transpose()? })
    }

    /// The address that serves metrics, with the actual port; `None` without one.
    pub fn address(&self) -> Option<&ScrapeAddress> {
        self.server.as_ref().map(|server| &server.address)
    }

    /// Publishes the last state: writes the file, and sends viewers of the page the last snapshot.
    pub async fn end(self) {
        if let Some(file) = self.file {
            file.end().await;
        }
        if let Some(server) = self.server {
            server.shared.events.end().await;
        }
    }
}

/// State that connections share.
struct PublisherState {
    address: ScrapeAddress,
    text: TextSource,
    has_page: bool,
    events: Arc<Events>,
}

/// A server of metrics, and of the page if there is a source of states, until it is dropped.
struct MetricsServer {
    listener: Option<PeerListener>,
    address: ScrapeAddress,
    shared: Arc<PublisherState>,
}

impl MetricsServer {
    /// Listens, and replies in tasks of a worker.
    fn start(
        address: &ScrapeAddress,
        text: TextSource,
        state: Option<StateSource>,
        worker: &WorkerHandle,
    ) -> Result<MetricsServer, MetricsError> {
        let (listener, address) = bind(address)
            .map_err(|error| MetricsError::Listen { address: address.clone(), error })?;
        let has_page = state.is_some();
        let events = Events::new(state.unwrap_or_else(|| Arc::new(|| Value::Null)));
        let shared = Arc::new(PublisherState { address: address.clone(), text, has_page, events });
        let connected = shared.clone();
        let attend = move |peer: Rc<Stream>| {
            let shared = connected.clone();
            async move { attend(&peer, &shared).await }
        };
        let listener = peer_listener::serve(listener, worker, CONNECTIONS_MAX, attend);
        Ok(MetricsServer { listener: Some(listener), address, shared })
    }
}

/// The socket, and its address with the actual port.
fn bind(address: &ScrapeAddress) -> io::Result<(Listener, ScrapeAddress)> {
    Ok(match address {
        ScrapeAddress::Tcp { address: wanted, name } => {
            let listener = Listener::bind_tcp(*wanted)?;
            let address = listener.local_tcp().unwrap_or(*wanted);
            (listener, ScrapeAddress::Tcp { address, name: name.clone() })
        }
        ScrapeAddress::Unix(path) => (Listener::replace_unix(path)?, address.clone()),
    })
}

impl Drop for MetricsServer {
    fn drop(&mut self) {
        self.listener = None;
        if let ScrapeAddress::Unix(path) = &self.address {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Serves one connection. A slow or disconnected peer gets no reply.
async fn attend(peer: &Stream, shared: &Arc<PublisherState>) {
    let read = blockhaul_io::timeout(PATIENCE, http::read(peer)).await;
    let Ok(Ok(Some(request))) = read else { return };
    let (head, reply) = match request.as_deref().map(http::parse) {
        None => (false, HttpReply::refused("431 Request Header Fields Too Large", "")),
        Some(Err(status)) => (false, HttpReply::refused(status, "")),
        Some(Ok(request)) if !http::is_ours(request.host, &shared.address) => {
            let text = "this server is only known as localhost";
            (request.head, HttpReply::refused("421 Misdirected Request", text))
        }
        Some(Ok(request)) if shared.has_page && request.path == "/events" && !request.head => {
            match shared.events.place() {
                Some(place) => return shared.events.stream(peer, place).await,
                None => {
                    let text = "too many viewers: close another page";
                    (false, HttpReply::refused("503 Service Unavailable", text))
                }
            }
        }
        Some(Ok(request)) => (request.head, reply(request.path, shared).await),
    };
    let bytes = reply.bytes(head);
    let _ = blockhaul_io::timeout(PATIENCE, peer.send_all(&bytes)).await;
}

/// The reply to a request for a path.
async fn reply(path: &str, shared: &Arc<PublisherState>) -> HttpReply {
    let found = match path {
        "/metrics" => Some(metrics(shared).await),
        "/" if !shared.has_page => Some(metrics(shared).await),
        "/status.json" if shared.has_page => {
            let state = shared.events.snapshot().await;
            Some(HttpReply::ok("application/json", format!("{state}\n")))
        }
        "/events" if shared.has_page => Some(HttpReply::ok("text/event-stream", "")),
        path if shared.has_page => page::file(path),
        _ => None,
    };
    found.unwrap_or_else(|| HttpReply::refused("404 Not Found", ""))
}

/// The text for Prometheus. That of many clients takes long: not on the worker.
async fn metrics(shared: &Arc<PublisherState>) -> HttpReply {
    let text = shared.text.clone();
    match blockhaul_io::offload(move || text(MetricsWriter::default())).await {
        Ok(text) => HttpReply::ok(PROMETHEUS, text),
        Err(_) => HttpReply::refused("503 Service Unavailable", "the program ends"),
    }
}

#[cfg(test)]
mod tests;
