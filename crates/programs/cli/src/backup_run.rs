//! How a command about backups ended, for programs and for monitoring: also if it failed before it began.

use std::path::PathBuf;
use std::sync::Arc;

use blockhaul_io::{Runtime, RuntimeConfig};
use blockhaul_metrics::{BackupRun, Destination, Destinations, StoreSample};
use serde_json::Value;

use crate::args::ResultArgs;
use crate::exit::{self, CommandFailure, CommandResult, plain};
use crate::metrics::{BuildInfo as _, CommandMetrics};
use crate::out;
use crate::session::SessionOptions;

/// The result of a command about backups.
pub struct BackupReport {
    command: &'static str,
    run: Arc<BackupRun>,
    as_json: bool,
    value: Value,
    published: Option<(Vec<CommandMetrics>, Runtime)>,
}

/// Runs `work`, and publishes and prints how it ended.
pub fn with_report(
    command: &'static str,
    result: &ResultArgs,
    work: impl FnOnce(&mut BackupReport) -> CommandResult,
) -> CommandResult {
    let run = BackupRun::begin(command);
    let as_json = result.json;
    let mut report = BackupReport { command, run, as_json, value: Value::Null, published: None };
    let outcome = report.publish(&result.metrics, false).and_then(|()| work(&mut report));
    report.run.finish(exit::command_end(&outcome));
    if let Some((metrics, runtime)) = report.published.take() {
        metrics.into_iter().for_each(|metrics| runtime.block_on(|| metrics.end()));
    }
    if as_json {
        out::print(format!("{}\n", report.run.result(report.value)).as_bytes())?;
    }
    outcome
}

impl BackupReport {
    /// Publishes the metrics of the run from now on, if there is a destination. A destination that cannot be used
    /// is left out: a backup that cannot be seen is better than none.
    pub fn publish(&mut self, given: &[Destination], page: bool) -> Result<(), CommandFailure> {
        // What the command line says takes precedence.
        if self.published.is_some() || (given.is_empty() && !page) {
            return Ok(());
        }
        let wanted = Destinations::new(given, page)?;
        let config = RuntimeConfig { workers: 1, ..RuntimeConfig::default() };
        let runtime = Runtime::start(&config).map_err(|error| {
            CommandFailure::new(exit::FAILED, format!("cannot start workers: {}", plain(&error)))
        })?;
        let text = self.run.text();
        let text: blockhaul_metrics::TextSource = Arc::new(move |mut figures| {
            figures.build_info();
            text(figures)
        });
        let sources = (text, self.run.state());
        let mut metrics = Vec::new();
        for one in wanted.each() {
            match CommandMetrics::start(&one, self.command, sources.clone(), &runtime.remote()) {
                Ok(started) => metrics.push(started),
                Err(failure) => log::warn!("{failure}; going on without it"),
            }
        }
        self.published = Some((metrics, runtime));
        Ok(())
    }

    /// Publishes the copies of a session with the run, at the destinations of the run or of the session.
    pub fn take_over(&mut self, session: &mut SessionOptions) -> Result<(), CommandFailure> {
        self.publish(&std::mem::take(&mut session.metrics), session.page)?;
        session.shows_map |= std::mem::take(&mut session.page);
        session.run = Some(self.run.clone());
        Ok(())
    }

    /// Publishes the points of these stores.
    pub fn watch(&self, stores: Vec<PathBuf>) {
        self.run.set_stores(Box::new(move || {
            let found = stores.iter().filter_map(|dir| {
                let points = blockhaul_backups::list_points(dir).ok()?.points;
                Some(StoreSample {
                    store: dir.display().to_string(),
                    points: points.len() as u64,
                    newest: points.last().map(|newest| newest.point.created),
                    bytes: points.iter().map(|point| point.stored).sum(),
                })
            });
            found.collect()
        }));
    }

    /// Prints a result: the text now, or JSON when the command has ended.
    pub fn tell(&mut self, value: Value, text: &str) -> CommandResult {
        self.value = value;
        if !self.as_json {
            out::print(text.as_bytes())?;
        }
        Ok(0)
    }
}
