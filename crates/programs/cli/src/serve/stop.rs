//! Why a server stops, and how to stop it.

use std::sync::{Arc, Mutex, PoisonError};

use blockhaul_io::Completer;

/// The reason for stopping the server.
pub enum StopReason {
    /// A signal.
    Signal(i32),
    /// The command of `--run` has ended with this exit status.
    Command(u8),
    /// The client of `--single` has disconnected, or the file system was unmounted.
    Left,
    /// A layer or a plugin requested it: the command of `--run` continues, as in nbdkit.
    Ended,
    /// The control socket requested it, or the last client of a draining server has disconnected.
    Asked,
}

/// Stops the server; the first caller sets the reason.
#[derive(Clone)]
pub struct Stopper(Arc<Mutex<Option<Completer<StopReason>>>>);

impl Stopper {
    /// Resolves this.
    pub fn new(completer: Completer<StopReason>) -> Stopper {
        Stopper(Arc::new(Mutex::new(Some(completer))))
    }

    /// Stops the server, unless already stopped.
    pub fn stop(&self, why: StopReason) {
        let completer = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(completer) = completer {
            completer.complete(why);
        }
    }
}
