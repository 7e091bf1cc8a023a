//! Why a server stops, and who may stop it.

use std::sync::{Arc, Mutex, PoisonError};

use blockhaul_io::Completer;

/// Why the server is to stop.
pub enum Stop {
    /// A signal asked for it.
    Signal(i32),
    /// The command of `--run` has ended with this exit status.
    Command(u8),
    /// The client of `--single` has left.
    Left,
    /// A layer or a plugin asked for it: the command of `--run` goes on, as nbdkit's does.
    Ended,
    /// The control socket asked for it, or the last client of a server that accepts no more has left.
    Asked,
}

/// Completes the wait for the stop; whoever is first says why.
#[derive(Clone)]
pub struct Stopper(Arc<Mutex<Option<Completer<Stop>>>>);

impl Stopper {
    /// Completes this.
    pub fn new(completer: Completer<Stop>) -> Stopper {
        Stopper(Arc::new(Mutex::new(Some(completer))))
    }

    /// Stops the server, if nobody has yet.
    pub fn stop(&self, why: Stop) {
        let completer = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(completer) = completer {
            completer.complete(why);
        }
    }
}
