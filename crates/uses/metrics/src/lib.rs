//! Metrics of a command for Prometheus, and its state as JSON for a page in a browser, while the command runs.
//!
//! - [`Publisher`] serves both over HTTP, and writes the metrics to a file; [`Destinations`] says where.
//!   `http`: requests and replies. `page`: the files of the page, which are part of the program. `events`: the
//!   states that the page shows. `textfile`: the file.
//! - [`MetricsWriter`]: Prometheus' text format.
//! - [`CopyObserver`]: the state of running copies as JSON; [`copy_text`]: their metrics. [`add_server`] and
//!   [`add_jobs`]: metrics of a server and of its jobs.
//! - [`BackupRun`]: the metrics of a command about backups.
//! - [`peer_listener`]: a listener for a few peers, for all that is beside the main work.
//!
//! [`MetricsError`] is data: front ends choose exit statuses, and words of their own.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]
#![cfg_attr(not(test), warn(clippy::missing_errors_doc))]

mod backup_figures;
mod copy_figures;
mod copy_state;
mod destination;
mod error;
mod events;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
mod http;
mod job_figures;
mod page;
pub mod peer_listener;
mod progress_line;
mod publisher;
mod server_figures;
mod text;
mod textfile;

pub use backup_figures::{BackupRun, StoreSample, StoreSource};
pub use copy_figures::copy_text;
pub use copy_state::{
    CommandEnd, CopyObserver, CopySnapshot, DiskSnapshot, ObservedCopy, latencies,
};
pub use destination::{Destination, Destinations, ScrapeAddress};
pub use error::{DestinationError, MetricsError};
pub use events::StateSource;
pub use job_figures::{JobSample, add_jobs};
pub use publisher::Publisher;
pub use server_figures::add_server;
pub use text::{MetricsWriter, TextSource};
