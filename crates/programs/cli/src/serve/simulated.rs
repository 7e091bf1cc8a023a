//! The exports of a server and their jobs, without its sockets and signals: for the simulator, which
//! runs them in virtual time.

use std::ffi::OsString;
use std::sync::Arc;
use std::time::Duration;

use blockhaul_catalog::{Backend, Exports};
use blockhaul_server::Server;

pub use super::exports::Table;
pub use super::job_errors::OnError;
pub use super::job_state::Status;
pub use super::jobs::{Item, Job, Jobs, Settings, Source, To, WantedJobs, WantedMirror};
pub use super::mirror::{CopyMode, Ending, First};
pub use super::running::Running;
pub use super::snapshots::{AtOnce, Begin, Begun, NewBitmap};
use super::wanted::WantedExports;
use crate::args;
pub use crate::exit::Failure;
use crate::{brackets, devices};

/// Time without a byte after which a connection of a served device is dropped.
const SILENCE: Duration = Duration::from_secs(60);

/// Opens the exports of `blockhaul serve` with these options. On a worker. `more`: kinds of devices
/// that the program does not have.
///
/// # Errors
/// If an option is wrong, or a device cannot be opened.
pub async fn open(
    options: Vec<OsString>,
    more: Vec<Arc<dyn Backend>>,
) -> Result<(Arc<Table>, Arc<dyn Exports>), Failure> {
    let (words, groups) = brackets::take(options).map_err(Failure::usage)?;
    let parsed = args::parse_command::<args::Serve>("serve", words);
    let (args, _) = parsed.map_err(|error| Failure::usage(error.to_string()))?;
    let mut registry = devices::registry(SILENCE);
    registry.backends.extend(more);
    let table = Arc::new(Table::new(WantedExports::new(&args, &groups, registry)?)?);
    let exports = table.open().await?;
    Ok((table, exports))
}

/// Ends the jobs and the clients of a server, and keeps its bitmaps, as a server that stops does;
/// returns the number of requests that devices have held for longer than `patience`.
pub async fn stop(server: &Server, jobs: &Jobs, table: &Table, patience: Duration) -> usize {
    super::job::end_service(server, jobs, table, patience).await
}
