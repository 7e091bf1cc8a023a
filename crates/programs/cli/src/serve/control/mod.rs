//! `--control`: the socket for managing a running server, with `blockhaul ctl`. One JSON object per
//! line, each answered with one; `docs/serve.md` documents them.
//!
//! This file has the socket; `commands` has the commands of `blockhaul ctl`, and an arm for each request; the other files carry
//! requests out.

mod bitmaps;
mod clients;
pub(crate) mod commands;
mod copy_options;
mod exports;
mod jobs;
mod operations;

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use blockhaul_control::ControlRequest;
use blockhaul_io::{Listener, Stream};
use blockhaul_metrics::MetricsWriter;
use blockhaul_metrics::peer_listener::{self, PeerListener};
use blockhaul_os::{CleanupList, UserIdentity};
use rustix::fs::Mode;
use serde_json::{Value, json};

use super::figures;
use super::stop::StopReason;
use crate::exit::{CommandFailure, OPEN, plain};

pub use jobs::{JobReply, reply};
use operations::ControlReply;
pub use operations::{Operations, SharedOperations};

/// Longer requests end the connection.
const REQUEST_MAX: usize = 64 << 10;
/// Maximum number of peers: a few users and programs.
const PEERS_MAX: usize = 16;
/// Time after which an idle peer is disconnected.
const IDLE: Duration = Duration::from_secs(60);
/// Maximum time for sending a reply.
const PATIENCE: Duration = Duration::from_secs(5);

/// A control socket that is not served yet.
pub struct ControlSocket {
    listener: Listener,
    path: PathBuf,
}

impl ControlSocket {
    /// Makes the socket, for this user only. Call it before there are other threads, whose files
    /// would get the same mode.
    ///
    /// `option` is the option that names it.
    pub fn bind(
        option: &str,
        path: &Path,
        cleanup: &CleanupList,
    ) -> Result<ControlSocket, CommandFailure> {
        let cannot = |why: &str| {
            let text = format!("{option}: cannot listen on {}: {why}", path.display());
            CommandFailure::new(OPEN, text)
        };
        // Absolute, because a background server leaves the current directory.
        let path = std::path::absolute(path).map_err(|error| cannot(&plain(&error)))?;
        let mode = rustix::process::umask(Mode::XUSR | Mode::RWXG | Mode::RWXO);
        let bound = Listener::replace_unix(&path);
        rustix::process::umask(mode);
        let listener = bound.map_err(|error| match error.kind() {
            ErrorKind::AddrInUse => {
                cannot("another program listens there: choose another path, or end that program")
            }
            _ => cannot(&plain(&error)),
        })?;
        cleanup.remember_socket(&path);
        Ok(ControlSocket { listener, path })
    }

    /// Gives it to the user that the server will run as.
    pub fn give_to(&self, identity: &UserIdentity) -> std::io::Result<()> {
        std::os::unix::fs::chown(&self.path, identity.uid(), Some(identity.gid()))
    }

    /// The socket itself.
    pub fn into_listener(self) -> Listener {
        self.listener
    }

    /// Serves it until the returned value is dropped.
    pub fn start(self, operations: &Arc<Operations>) -> PeerListener {
        let worker = &operations.worker;
        let operations = Arc::downgrade(operations);
        let attend = move |peer: Rc<Stream>| {
            let operations = operations.clone();
            async move { attend(&peer, &operations).await }
        };
        peer_listener::serve(self.listener, worker, PEERS_MAX, attend)
    }
}

/// Serves one peer, request by request.
async fn attend(peer: &Stream, operations: &Weak<Operations>) {
    let mut received = Vec::new();
    let mut heard = Instant::now();
    let mut waits = false;
    loop {
        if let Some(end) = received.iter().position(|&byte| byte == b'\n') {
            let rest = received.split_off(end + 1);
            let line = std::mem::replace(&mut received, rest);
            let Some(operations) = operations.upgrade() else { return };
            let reply = match ControlRequest::parse(&line) {
                Ok(request) => operations.answer(request).await,
                Err(error) => Err(error.into()),
            };
            let Some(reply) = reply.transpose() else {
                waits = true;
                continue;
            };
            if say(peer, reply).await.is_err() {
                return;
            }
            heard = Instant::now();
            continue;
        }
        if received.len() > REQUEST_MAX {
            return;
        }
        let receiving = peer_listener::receive(peer, &mut received);
        let more = if waits {
            receiving.await
        } else {
            let left = IDLE.saturating_sub(heard.elapsed());
            let more = blockhaul_io::timeout(left, receiving).await;
            more.unwrap_or_else(|late| Err(std::io::Error::other(late)))
        };
        if !more.unwrap_or(false) {
            return;
        }
    }
}

async fn say(peer: &Stream, reply: ControlReply) -> std::io::Result<()> {
    let ok = reply.is_ok();
    let mut value = reply.unwrap_or_else(|refusal| json!(refusal));
    value["ok"] = ok.into();
    let text = format!("{value}\n");
    let sending = blockhaul_io::timeout(PATIENCE, peer.send_all(text.as_bytes()));
    sending.await.unwrap_or_else(|late| Err(std::io::Error::other(late)))
}

impl Operations {
    fn metrics(&self) -> Value {
        let text = figures::write(MetricsWriter::default(), &self.server, &self.table, &self.jobs);
        json!({ "text": text })
    }

    fn stop(&self) -> Value {
        log::info!("stopping on request of the control socket");
        let clients = self.server.open();
        self.stopper.stop(StopReason::Asked);
        json!({ "clients": clients })
    }
}
