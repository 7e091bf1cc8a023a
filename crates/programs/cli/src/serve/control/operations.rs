//! A running server as requests see it, and why it refuses one.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use blockhaul_control::Refusal;
use blockhaul_io::WorkerHandle;
use blockhaul_jobs::{ExportTable, Jobs};
use blockhaul_server::{Server, ServiceNotifier};
use serde_json::Value;

use crate::exit::{CommandFailure, USAGE};
use crate::serve::stop::Stopper;
use crate::serve::tls::TlsSettings;

/// The operations of a running server.
pub struct Operations {
    pub server: Arc<Server>,
    pub table: Arc<ExportTable>,
    pub stopper: Stopper,
    /// The worker that waits for clients to disconnect.
    pub worker: WorkerHandle,
    pub secured: TlsSettings,
    pub notify: ServiceNotifier,
    pub jobs: Arc<Jobs>,
}

/// The operations of a server, for code that runs before it.
#[derive(Clone, Default)]
pub struct SharedOperations(Arc<Mutex<OperationsState>>);

#[derive(Default)]
struct OperationsState {
    /// Dangling before the server is ready, and after it has ended.
    operations: Weak<Operations>,
    /// Whether the keys may have changed since the server read them, before it was ready.
    reload_due: bool,
}

impl SharedOperations {
    /// Called once, when the server is ready.
    pub fn set(&self, operations: &Arc<Operations>) {
        let mut known = self.lock();
        known.operations = Arc::downgrade(operations);
        let reload_due = std::mem::take(&mut known.reload_due);
        drop(known);
        if reload_due {
            // The result is in the log.
            let _ = operations.reload();
        }
    }

    /// Runs `work`, if the server is ready.
    pub fn with(&self, work: impl FnOnce(&Operations)) {
        let weak = self.lock().operations.clone();
        if let Some(operations) = weak.upgrade() {
            work(&operations);
        }
    }

    /// Reloads as [`Operations::reload`] does, as soon as the server is ready.
    pub fn reload(&self) {
        let mut known = self.lock();
        if let Some(operations) = known.operations.upgrade() {
            drop(known);
            // The result is in the log.
            let _ = operations.reload();
        } else {
            known.reload_due = true;
        }
    }

    fn lock(&self) -> MutexGuard<'_, OperationsState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The failure of an operation.
impl From<CommandFailure> for Refusal {
    fn from(failure: CommandFailure) -> Refusal {
        let error = failure.to_string();
        if failure.status() == USAGE { Refusal::usage(error) } else { Refusal::failed(error) }
    }
}

/// The members of a reply, or why there is none.
pub(super) type ControlReply = Result<Value, Refusal>;

impl Operations {
    /// Reloads the TLS files, for later clients. Returns what was done, or why nothing has changed.
    pub fn reload(&self) -> Result<&'static str, String> {
        if self.secured.is_off() {
            return Ok("nothing to reload: TLS is off");
        }
        self.notify.reloading();
        let read = match self.secured.open() {
            Ok(tls) => {
                self.server.set_tls(tls);
                log::info!("TLS: keys and certificates reloaded");
                Ok("keys and certificates reloaded")
            }
            Err(failure) => {
                let text = format!("{failure}; those from before stay in use");
                log::error!("{text}");
                Err(text)
            }
        };
        self.notify.ready(if read.is_ok() { "reloaded" } else { "reload failed; check the log" });
        read
    }
}
