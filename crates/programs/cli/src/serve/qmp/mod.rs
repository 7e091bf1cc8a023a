//! `--qmp`: the monitor protocol of QEMU (QMP) for jobs, exports and bitmaps, as far as clients of
//! qemu-storage-daemon need it. It works on the same exports, jobs and bitmaps as `blockhaul ctl`.
//!
//! - `input`: finds commands in what clients send. `commands`: all commands and their arguments, as
//!   tables. `error`: errors in QEMU's classes.
//! - `session`: a client. `events`: what all clients receive.
//! - `nodes`, `exports`, `jobs`, `bitmaps`, `transaction`, `query`: the commands.

mod bitmaps;
mod commands;
mod error;
mod events;
mod exports;
mod input;
mod jobs;
mod nodes;
mod query;
mod session;
mod transaction;

use std::sync::{Arc, Mutex, MutexGuard};

use blockhaul_io::FifoLock;
use blockhaul_server::Server;
use serde_json::{Value, json};

use super::control::Operations;
use super::exports::Table;
use super::jobs::Jobs;
use super::stop::{Stop, Stopper};
use crate::exit::Failure;
use commands::{Arguments, COMMANDS, needed, switch};
use error::{Error, Result};
use events::{EVENTS, Hub};
use exports::{Export, NbdServer};
use jobs::Use;
use nodes::Node;

/// The monitor of a server.
pub struct Monitor {
    server: Arc<Server>,
    table: Arc<Table>,
    jobs: Arc<Jobs>,
    stopper: Stopper,
    /// The server listens for NBD clients without `nbd-server-start`.
    listens_anyway: bool,
    hub: Hub,
    state: Mutex<State>,
    /// One command at a time.
    turn: Arc<FifoLock>,
}

/// What the protocol knows besides the disks, jobs and bitmaps of the server.
#[derive(Default)]
struct State {
    nodes: Vec<Arc<Node>>,
    exports: Vec<Export>,
    /// Exports of the server, by identifier, whose guest uses another node than their own.
    drives: Vec<(String, String)>,
    uses: Vec<Use>,
    /// Nodes whose disk has the name of another node, after a mirror.
    moved: Vec<(String, String)>,
    nbd_server: Option<NbdServer>,
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

    /// Ends listeners of NBD that were started here.
    pub fn stop(&self) {
        let server = self.state().nbd_server.take();
        drop(server);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic under this lock")
    }

    /// Carries out a command.
    async fn execute(&self, name: &str, arguments: &Arguments) -> Result<Value> {
        let command = commands::find(COMMANDS, name).ok_or_else(|| {
            let shown = blockhaul_wire::printable(name.as_bytes(), 64);
            Error::no_command(format!("The command {shown} has not been found"))
        })?;
        commands::check(command, arguments)?;
        if let Some(answer) = self.query(name) {
            return Ok(answer);
        }
        let _turn = self.turn.lock().await;
        self.change(name, arguments).await?;
        Ok(json!({}))
    }

    /// The answer of a command that changes nothing.
    fn query(&self, name: &str) -> Option<Value> {
        Some(match name {
            "query-block" => self.described_devices(),
            "query-block-exports" => self.described_exports(),
            "query-block-jobs" => self.described_block_jobs(),
            "query-commands" => {
                COMMANDS.iter().map(|command| json!({ "name": command.name })).collect()
            }
            "query-jobs" => self.described_jobs(),
            "query-named-block-nodes" => self.described_nodes(),
            "query-name" => json!({ "name": "blockhaul" }),
            "query-qmp-schema" => commands::schema(EVENTS),
            "query-status" => json!({ "running": true, "status": "running" }),
            "query-tpm" => json!([]),
            "query-version" => query::version(),
            _ => return None,
        })
    }

    async fn change(&self, name: &str, arguments: &Arguments) -> Result<()> {
        let node = needed(arguments, "node");
        let bitmap = needed(arguments, "name");
        match name {
            "block-dirty-bitmap-add" => self.add_bitmap(arguments).await,
            "block-dirty-bitmap-clear" => {
                self.free_bitmap(node, bitmap).await?.clear();
                Ok(())
            }
            "block-dirty-bitmap-enable" | "block-dirty-bitmap-disable" => {
                let enabled = name == "block-dirty-bitmap-enable";
                self.free_bitmap(node, bitmap).await?.enable(enabled);
                Ok(())
            }
            "block-dirty-bitmap-merge" => {
                let (target, from) = self.merged(arguments).await?;
                from.iter().for_each(|other| target.merge(other));
                Ok(())
            }
            "block-dirty-bitmap-remove" => self.remove_bitmap(node, bitmap).await,
            "block-export-add" => self.add_export(arguments).await,
            "block-export-del" => {
                let hard = needed(arguments, "mode") == "hard";
                self.remove_export(needed(arguments, "id"), hard).await
            }
            "blockdev-add" => self.add_node(arguments).await,
            "blockdev-backup" => self.backup(arguments).await,
            "blockdev-del" => self.delete_node(needed(arguments, "node-name")).await,
            "blockdev-mirror" => self.mirror(arguments).await,
            "nbd-server-add" => self.add_old_export(arguments).await,
            "nbd-server-remove" => {
                let hard = needed(arguments, "mode") == "hard";
                self.remove_export(needed(arguments, "name"), hard).await
            }
            "nbd-server-start" => self.start_nbd_server(arguments).await,
            "nbd-server-stop" => self.stop_nbd_server().await,
            "qom-set" => self.move_drive(arguments).await,
            "quit" => {
                log::info!("stopping on request of the monitor protocol");
                self.stopper.stop(Stop::Asked);
                Ok(())
            }
            "transaction" => self.transaction(arguments).await,
            _ => self.control_job(name, arguments),
        }
    }

    /// `nbd-server-add`: an export whose identifier is its name.
    async fn add_old_export(&self, arguments: &Arguments) -> Result<()> {
        let device = needed(arguments, "device");
        let name = commands::text(arguments, "name").unwrap_or(device);
        let bitmap = commands::text(arguments, "bitmap");
        let bitmaps: Vec<_> = bitmap.into_iter().map(Value::from).collect();
        let export = json!({
            "type": "nbd",
            "id": name,
            "node-name": device,
            "name": name,
            "description": needed(arguments, "description"),
            "writable": switch(arguments, "writable", false),
            "bitmaps": bitmaps,
        });
        match export.as_object() {
            Some(export) => self.add_export(export).await,
            None => Ok(()),
        }
    }
}

pub use session::start;
