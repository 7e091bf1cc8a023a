//! A running server as requests see it, and why it refuses one.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use blockhaul_control::Refusal;
use blockhaul_io::{FifoLock, WorkerHandle};
use blockhaul_jobs::{ExportTable, Jobs};
use blockhaul_server::{Server, ServiceNotifier, TlsPolicy};
use blockhaul_server_config::{RunningConfig, ServerConfigFile};
use serde_json::Value;

use crate::exit::{CommandFailure, USAGE};
use crate::serve::stop::Stopper;
use crate::serve::tls::TlsSettings;

/// The operations of a running server.
pub struct Operations {
    /// The configuration file, if there is one.
    pub config: Option<Arc<RunningConfig>>,
    /// The lock of reloads: none has read files that are older than those in force.
    pub reloads: Arc<FifoLock>,
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
            operations.clone().begin_reload();
        }
    }

    /// Runs `work`, if the server is ready.
    pub fn with(&self, work: impl FnOnce(&Operations)) {
        let weak = self.lock().operations.clone();
        if let Some(operations) = weak.upgrade() {
            work(&operations);
        }
    }

    /// Begins to reload as [`Operations::reload`] does, as soon as the server is ready.
    pub fn reload(&self) {
        let mut known = self.lock();
        if let Some(operations) = known.operations.upgrade() {
            drop(known);
            operations.begin_reload();
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
    /// Begins to reload, from any thread. The result is in the log.
    fn begin_reload(self: Arc<Self>) {
        let worker = self.worker.clone();
        drop(worker.spawn(move || async move {
            let _ = self.reload().await;
        }));
    }

    /// Reads the configuration file and the files of TLS again, and carries out what has changed, for later clients.
    /// Returns what was done, or why nothing has changed. On a worker.
    pub async fn reload(self: Arc<Self>) -> Result<String, String> {
        if self.secured.is_off() && self.config.is_none() {
            return Ok("nothing to reload: TLS is off".into());
        }
        let _reload = self.reloads.lock().await;
        self.notify.reloading();
        let done = self.clone().reload_files().await;
        match &done {
            Ok(done) => log::info!("{done}"),
            Err(error) => log::error!("{error}"),
        }
        self.notify.ready(if done.is_ok() { "reloaded" } else { "reload failed; check the log" });
        done
    }

    async fn reload_files(self: Arc<Self>) -> Result<String, String> {
        let reader = self.clone();
        let read = blockhaul_io::offload(move || reader.read_files()).await;
        let (tls, file) = read.map_err(|lost| lost.to_string())??;
        let mut done = Vec::new();
        let has_tls = tls.is_some();
        let secure = || tls.into_iter().for_each(|tls| self.server.set_tls(tls));
        if let (Some(config), Some(file)) = (&self.config, file) {
            let changed = config.change(file, &self.server, secure).await;
            let changed = changed.map_err(|error| format!("{error}; nothing has changed"))?;
            done.push(changed.to_string());
        } else {
            secure();
        }
        if has_tls {
            done.push("keys and certificates reloaded".into());
        }
        Ok(done.join("; "))
    }

    fn read_files(&self) -> Result<(Option<TlsPolicy>, Option<ServerConfigFile>), String> {
        let file = self.config.as_ref().map(|config| config.read()).transpose();
        let file = file.map_err(|error| format!("{error}; nothing has changed"))?;
        let tls = (!self.secured.is_off()).then(|| self.secured.open()).transpose();
        let tls = tls.map_err(|failure| format!("{failure}; those from before stay in use"))?;
        Ok((tls, file))
    }
}
