//! `--metrics` and `--page`: what a command publishes, and the messages about it.

use blockhaul_io::WorkerHandle;
use blockhaul_metrics::{
    Destinations, MetricsError, MetricsWriter, Publisher, ScrapeAddress, StateSource, TextSource,
};

use crate::exit::{CommandFailure, FAILED};
use crate::logger;

/// The metrics of a command, which are published until this is ended or dropped.
pub struct CommandMetrics(Publisher);

impl CommandMetrics {
    /// Publishes metrics and state at the destinations, in tasks of a worker. Prints the address of the
    /// page, and a port that was chosen; `command` is for these messages.
    pub fn start(
        destinations: &Destinations,
        command: &str,
        sources: (TextSource, StateSource),
        worker: &WorkerHandle,
    ) -> Result<CommandMetrics, CommandFailure> {
        let publisher = Publisher::start(destinations, sources, worker)?;
        announce(command, destinations, &publisher);
        Ok(CommandMetrics(publisher))
    }

    /// Publishes the last state.
    pub async fn end(self) {
        self.0.end().await;
    }
}

/// Prints where the page is, or the port that was chosen for metrics alone.
fn announce(command: &str, destinations: &Destinations, publisher: &Publisher) {
    let Some(ScrapeAddress::Tcp { address, .. }) = publisher.address() else { return };
    if destinations.page {
        logger::announce(&format!("{command}: page on http://{address}/"));
    } else if destinations.address.as_ref().is_some_and(ScrapeAddress::has_free_port) {
        logger::announce(&format!("{command}: metrics on http://{address}/metrics"));
    }
}

/// The metric that names the version of the program.
pub trait BuildInfo {
    /// Adds the metric. It comes first.
    fn build_info(&mut self);
}

impl BuildInfo for MetricsWriter {
    fn build_info(&mut self) {
        let help = "Version and commit of the program, as labels.";
        let labels =
            [("version", env!("CARGO_PKG_VERSION")), ("revision", env!("BLOCKHAUL_COMMIT"))];
        self.add("blockhaul_build_info", "gauge", help, &labels, 1.0);
    }
}

impl From<MetricsError> for CommandFailure {
    fn from(error: MetricsError) -> CommandFailure {
        let remedy = error.remedy().map(|remedy| format!(": {remedy}")).unwrap_or_default();
        let text = format!("--metrics: {error}");
        match error {
            MetricsError::PageWithoutAddress => CommandFailure::usage(
                "--page requires an address to listen on: add --metrics localhost:PORT",
            ),
            MetricsError::SeveralAddresses
            | MetricsError::SeveralFiles
            | MetricsError::Directory { .. } => CommandFailure::usage(text),
            MetricsError::Listen { .. } | MetricsError::Write { .. } => {
                CommandFailure::new(FAILED, text).and(&remedy)
            }
        }
    }
}
