//! The monitor of a server, which its clients share.

use std::sync::{Arc, Mutex, MutexGuard};

use blockhaul_io::FifoLock;
use blockhaul_jobs::{ExportTable, Jobs};
use blockhaul_server::Server;
use serde_json::Value;

use crate::commands::Arguments;
use crate::error::QmpError;
use crate::events::LineQueues;
use crate::host::MonitorHost;
use crate::state::MonitorState;

/// A running server, as a monitor controls it.
pub struct MonitorConfig {
    /// The server, whose clients see the exports that commands add.
    pub server: Arc<Server>,
    /// The table of exports; its disks are nodes.
    pub table: Arc<ExportTable>,
    /// The jobs of the exports. The monitor becomes their observer.
    pub jobs: Arc<Jobs>,
    /// Whether the server listens for NBD clients without `nbd-server-start`.
    pub listens_anyway: bool,
    /// The program around the server.
    pub host: Box<dyn MonitorHost>,
}

/// The monitor of a server.
pub struct Monitor {
    pub(crate) server: Arc<Server>,
    pub(crate) table: Arc<ExportTable>,
    pub(crate) jobs: Arc<Jobs>,
    pub(crate) host: Box<dyn MonitorHost>,
    /// The server listens for NBD clients without `nbd-server-start`.
    pub(crate) listens_anyway: bool,
    pub(crate) queues: LineQueues,
    pub(crate) state: Mutex<MonitorState>,
    /// One command at a time.
    pub(crate) turn: Arc<FifoLock>,
}

impl Monitor {
    /// A monitor for a running server.
    pub fn new(config: MonitorConfig) -> Arc<Monitor> {
        let MonitorConfig { server, table, jobs, listens_anyway, host } = config;
        let monitor = Arc::new(Monitor {
            server,
            table,
            jobs,
            host,
            listens_anyway,
            queues: LineQueues::default(),
            state: Mutex::default(),
            turn: Arc::default(),
        });
        let weak = Arc::downgrade(&monitor);
        monitor.jobs.observe(Box::new(move |job, happened| {
            if let Some(monitor) = weak.upgrade() {
                monitor.job_event(job, happened);
            }
        }));
        monitor
    }

    /// Runs a command that no client has sent, on a worker. `text` is its JSON object, as a client sends it.
    ///
    /// # Errors
    /// The text is no command, or the command has failed.
    pub async fn run(&self, text: &str) -> Result<(), QmpError> {
        let wrong = |why: &str| QmpError::generic(format!("{text}: {why}"));
        let command: Value =
            serde_json::from_str(text).map_err(|error| wrong(&error.to_string()))?;
        let name = command["execute"].as_str().ok_or_else(|| wrong("it is no command"))?;
        let empty = Arguments::new();
        let arguments = command["arguments"].as_object().unwrap_or(&empty);
        let done = self.execute(name, arguments).await;
        done.map(drop).map_err(|error| QmpError::generic(format!("{name}: {error}")))
    }

    /// Ends the listeners of `nbd-server-start`, and each client once its last lines are sent.
    pub fn stop(&self) {
        let server = self.state().nbd_server.take();
        drop(server);
        self.queues.close();
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, MonitorState> {
        self.state.lock().expect("no panic under this lock")
    }
}
