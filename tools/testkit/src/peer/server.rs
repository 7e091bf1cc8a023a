//! A listening server that runs a script for each connection.

use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use super::conversation::{Conversation, ScriptResult};
use super::offer::Offer;
use super::serve::serve;
use crate::model::lock;
use crate::tools::ScratchDir;

/// A server on its own Unix socket; stops, with all its connections, on drop.
pub struct ScriptedServer {
    path: PathBuf,
    state: Arc<ScriptedServerState>,
    thread: Option<JoinHandle<()>>,
    _scratch: ScratchDir,
}

#[derive(Default)]
struct ScriptedServerState {
    stop: AtomicBool,
    accepted: AtomicUsize,
    streams: Mutex<Vec<UnixStream>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    errors: Mutex<Vec<String>>,
}

impl ScriptedServer {
    /// Listens, and runs the script on a thread for each connection; the script gets the
    /// connection's number, from 0. Panics if no socket can be made.
    pub fn start(
        script: impl Fn(&mut Conversation, usize) -> ScriptResult + Send + Sync + 'static,
    ) -> ScriptedServer {
        let scratch = ScratchDir::new().expect("a scratch directory can be made");
        let path = scratch.socket("peer");
        let listener = UnixListener::bind(&path).expect("a socket can be bound there");
        let state = Arc::new(ScriptedServerState::default());
        let thread = {
            let state = state.clone();
            let script = Arc::new(script);
            std::thread::spawn(move || accept(&listener, &state, script))
        };
        ScriptedServer { path, state, thread: Some(thread), _scratch: scratch }
    }

    /// Starts a plain server over a model, correct except for the faults in the offer.
    pub fn offer(offer: Offer) -> ScriptedServer {
        ScriptedServer::start(move |conversation, number| serve(conversation, number, &offer))
    }

    /// The path of its socket.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its URI, for the default export.
    pub fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.path.display())
    }

    /// Number of connections so far.
    pub fn connections(&self) -> usize {
        self.state.accepted.load(Ordering::SeqCst)
    }

    /// Errors of scripts so far: protocol violations of the peer.
    pub fn errors(&self) -> Vec<String> {
        lock(&self.state.errors).clone()
    }

    /// Stops, and returns the errors of scripts.
    ///
    /// # Errors
    /// The errors, one per line.
    pub fn finish(mut self) -> ScriptResult {
        self.stop();
        let errors = self.errors();
        if errors.is_empty() { Ok(()) } else { Err(errors.join("\n")) }
    }

    fn stop(&mut self) {
        self.state.stop.store(true, Ordering::SeqCst);
        // Wakes the thread from accept; if that fails it has already ended.
        let _ = UnixStream::connect(&self.path);
        if let Some(thread) = self.thread.take() {
            // Panics of scripts are reported by their own threads.
            let _ = thread.join();
        }
        for stream in lock(&self.state.streams).drain(..) {
            // It may be closed already.
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
        let threads = std::mem::take(&mut *lock(&self.state.threads));
        for thread in threads {
            if thread.join().is_err() {
                lock(&self.state.errors).push("a script panicked".to_string());
            }
        }
    }
}

impl Drop for ScriptedServer {
    fn drop(&mut self) {
        self.stop();
    }
}

fn accept<S>(listener: &UnixListener, state: &Arc<ScriptedServerState>, script: Arc<S>)
where
    S: Fn(&mut Conversation, usize) -> ScriptResult + Send + Sync + 'static,
{
    for stream in listener.incoming() {
        if state.stop.load(Ordering::SeqCst) {
            return;
        }
        let Ok(stream) = stream else { return };
        let number = state.accepted.fetch_add(1, Ordering::SeqCst);
        if let Ok(copy) = stream.try_clone() {
            lock(&state.streams).push(copy);
        }
        let state_there = state.clone();
        let script = script.clone();
        let thread = std::thread::spawn(move || {
            // When the test has ended, a cut connection is not an error. Checked before the client
            // can see the end of the connection, because then it may end the test.
            let over = || state_there.stop.load(Ordering::SeqCst);
            let (result, over) = match Conversation::new(stream) {
                Err(error) => (Err(error), over()),
                Ok(mut conversation) => {
                    let result = script(&mut conversation, number);
                    let over = over();
                    // Otherwise the copy above keeps the socket open.
                    conversation.end();
                    (result, over)
                }
            };
            if let Err(error) = result
                && !over
            {
                lock(&state_there.errors).push(format!("connection {number}: {error}"));
            }
        });
        lock(&state.threads).push(thread);
    }
}
