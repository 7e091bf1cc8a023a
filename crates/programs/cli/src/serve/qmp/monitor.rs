//! The monitor of a server, which its clients share.

use std::sync::{Arc, Mutex, MutexGuard};

use blockhaul_io::FifoLock;
use blockhaul_jobs::{Jobs, Table};
use blockhaul_server::Server;
use serde_json::Value;

use super::commands::Arguments;
use super::events::Hub;
use super::state::State;
use crate::exit::Failure;
use crate::serve::control::Operations;
use crate::serve::stop::Stopper;

/// The monitor of a server.
pub struct Monitor {
    pub(super) server: Arc<Server>,
    pub(super) table: Arc<Table>,
    pub(super) jobs: Arc<Jobs>,
    pub(super) stopper: Stopper,
    /// The server listens for NBD clients without `nbd-server-start`.
    pub(super) listens_anyway: bool,
    pub(super) hub: Hub,
    pub(super) state: Mutex<State>,
    /// One command at a time.
    pub(super) turn: Arc<FifoLock>,
}

impl Monitor {
    /// For a running server.
    pub fn new(operations: &Operations, listens_anyway: bool) -> Arc<Monitor> {
        let monitor = Arc::new(Monitor {
            server: operations.server.clone(),
            table: operations.table.clone(),
            jobs: operations.jobs.clone(),
            stopper: operations.stopper.clone(),
            listens_anyway,
            hub: Hub::default(),
            state: Mutex::default(),
            turn: Arc::default(),
        });
        let weak = Arc::downgrade(&monitor);
        operations.jobs.observe(Box::new(move |job, happened| {
            if let Some(monitor) = weak.upgrade() {
                monitor.job_event(job, happened);
            }
        }));
        monitor
    }

    /// Runs a command of the command line, before any client is there.
    pub async fn run_first(&self, text: &str) -> std::result::Result<(), Failure> {
        let wrong = |why: &str| Failure::usage(format!("{text}: {why}"));
        let command: Value =
            serde_json::from_str(text).map_err(|error| wrong(&error.to_string()))?;
        let name = command["execute"].as_str().ok_or_else(|| wrong("it is no command"))?;
        let empty = Arguments::new();
        let arguments = command["arguments"].as_object().unwrap_or(&empty);
        let done = self.execute(name, arguments).await;
        done.map(drop).map_err(|error| Failure::usage(format!("{name}: {}", error.text())))
    }

    /// Ends listeners of NBD that were started here, and clients once they have got what waits for
    /// them.
    pub fn stop(&self) {
        let server = self.state().nbd_server.take();
        drop(server);
        self.hub.close();
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic under this lock")
    }
}
