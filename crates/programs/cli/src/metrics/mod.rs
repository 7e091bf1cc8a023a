//! `--metrics` and `--page`: what a command does, for Prometheus and for browsers, while it runs.
//!
//! - `destination`: addresses and files. `text`: Prometheus' text format. `textfile`: a file of it.
//! - `http`: requests and replies. `page`: the files of the page. `events`: its snapshots.
//!
//! Any client that reaches the address can read all of it, without a password: therefore only
//! addresses of this machine, and Unix sockets. Nothing can be changed. Few connections, small
//! requests, short timeouts: a slow, greedy or broken peer occupies one of a few places for a few
//! seconds.

mod destination;
mod events;
mod http;
mod page;
mod text;
mod textfile;

#[cfg(any(test, fuzzing))]
pub(crate) use http::parse as parse_http;

use std::rc::Rc;
use std::sync::Arc;

use blockhaul_io::{Listener, Remote, Stream};
use blockhaul_metrics::peer_listener::{self, PeerListener};
use serde_json::Value;

pub use self::destination::{Address, Destination, Destinations};
use self::events::Events;
pub use self::events::Status;
use self::http::{PATIENCE, Reply};
pub use self::text::{Figures, Text};
use self::textfile::TextFile;
use crate::exit::{self, Failure, plain};
use crate::out;

/// Maximum number of connections; more are closed at once. A browser opens six at a time.
const CONNECTIONS_MAX: usize = 32;

/// The media type of Prometheus' text format.
const PROMETHEUS: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Publishes metrics until it is ended or dropped.
pub struct Metrics {
    server: Option<Server>,
    file: Option<TextFile>,
}

impl Metrics {
    /// Publishes what the destinations ask for, in tasks of a worker. Prints the address of the
    /// page, and a port that was chosen; `command` is for these messages.
    pub fn start(
        wanted: &Destinations,
        command: &str,
        (text, status): (Text, Status),
        worker: &Remote,
    ) -> Result<Metrics, Failure> {
        let server = match &wanted.address {
            None => None,
            Some(address) => {
                let status = wanted.page.then_some(status);
                let server = Server::start(address, text.clone(), status, worker)?;
                announce(command, address, &server);
                Some(server)
            }
        };
        let file = wanted.file.as_ref().map(|path| TextFile::start(path, text, worker));
        Ok(Metrics { server, file: file.transpose()? })
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

/// Prints where the page is, or the port that was chosen for metrics alone.
fn announce(command: &str, asked: &Address, server: &Server) {
    match (asked, &server.address) {
        (_, Address::Tcp { address, .. }) if server.shared.has_page => {
            out::error(&format!("blockhaul: {command}: page on http://{address}/\n"));
        }
        (Address::Tcp { address: asked, .. }, address) if asked.port() == 0 => {
            out::error(&format!("blockhaul: {command}: metrics on http://{address}/metrics\n"));
        }
        _ => {}
    }
}

/// What connections share.
struct Shared {
    address: Address,
    text: Text,
    has_page: bool,
    events: Arc<Events>,
}

/// Serves metrics, and the page if there is a snapshot for it, until it is dropped.
struct Server {
    serving: Option<PeerListener>,
    address: Address,
    shared: Arc<Shared>,
}

impl Server {
    /// Listens, and replies in tasks of a worker.
    fn start(
        address: &Address,
        text: Text,
        status: Option<Status>,
        worker: &Remote,
    ) -> Result<Server, Failure> {
        let cannot = |error: std::io::Error| {
            let text = format!("--metrics: cannot listen on {address}: {}", plain(&error));
            Failure::new(exit::FAILED, text)
        };
        let (listener, address) = bind(address).map_err(cannot)?;
        let has_page = status.is_some();
        let events = Events::new(status.unwrap_or_else(|| Arc::new(|| Value::Null)));
        let shared = Arc::new(Shared { address: address.clone(), text, has_page, events });
        let connected = shared.clone();
        let attend = move |peer: Rc<Stream>| {
            let shared = connected.clone();
            async move { attend(&peer, &shared).await }
        };
        let serving = peer_listener::serve(listener, worker, CONNECTIONS_MAX, attend);
        Ok(Server { serving: Some(serving), address, shared })
    }
}

/// The socket, and its address with the actual port.
fn bind(address: &Address) -> std::io::Result<(Listener, Address)> {
    Ok(match address {
        Address::Tcp { address: wanted, name } => {
            let listener = Listener::bind_tcp(*wanted)?;
            let address = listener.local_tcp().unwrap_or(*wanted);
            (listener, Address::Tcp { address, name: name.clone() })
        }
        Address::Unix(path) => (Listener::replace_unix(path)?, address.clone()),
    })
}

impl Drop for Server {
    fn drop(&mut self) {
        self.serving = None;
        if let Address::Unix(path) = &self.address {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Serves one connection. A slow or disconnected peer gets no reply.
async fn attend(peer: &Stream, shared: &Arc<Shared>) {
    let read = blockhaul_io::timeout(PATIENCE, http::read(peer)).await;
    let Ok(Ok(Some(request))) = read else { return };
    let (head, reply) = match request.as_deref().map(http::parse) {
        None => (false, Reply::refused("431 Request Header Fields Too Large", "")),
        Some(Err(status)) => (false, Reply::refused(status, "")),
        Some(Ok(request)) if !http::is_ours(request.host, &shared.address) => {
            let text = "this server is only known as localhost";
            (request.head, Reply::refused("421 Misdirected Request", text))
        }
        Some(Ok(request)) if shared.has_page && request.path == "/events" && !request.head => {
            match shared.events.place() {
                Some(place) => return shared.events.stream(peer, place).await,
                None => {
                    let text = "too many viewers: close another page";
                    (false, Reply::refused("503 Service Unavailable", text))
                }
            }
        }
        Some(Ok(request)) => (request.head, reply(request.path, shared).await),
    };
    let bytes = reply.bytes(head);
    let _ = blockhaul_io::timeout(PATIENCE, peer.send_all(&bytes)).await;
}

/// The reply to a request for a path.
async fn reply(path: &str, shared: &Arc<Shared>) -> Reply {
    let found = match path {
        "/metrics" => Some(metrics(shared).await),
        "/" if !shared.has_page => Some(metrics(shared).await),
        "/status.json" if shared.has_page => {
            let status = shared.events.snapshot().await;
            Some(Reply::ok("application/json", format!("{status}\n")))
        }
        "/events" if shared.has_page => Some(Reply::ok("text/event-stream", "")),
        path if shared.has_page => page::file(path),
        _ => None,
    };
    found.unwrap_or_else(|| Reply::refused("404 Not Found", ""))
}

/// The text for Prometheus. That of many clients takes long: not on the worker.
async fn metrics(shared: &Arc<Shared>) -> Reply {
    let text = shared.text.clone();
    match blockhaul_io::offload(move || text(Figures::default())).await {
        Ok(text) => Reply::ok(PROMETHEUS, text),
        Err(_) => Reply::refused("503 Service Unavailable", "the program ends"),
    }
}

#[cfg(test)]
mod tests;
