//! The environment of copies: signals, workers, progress, metrics.

use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

use blockhaul_engine::{CopyProgress, RateLimit};
use blockhaul_io::Runtime;
use blockhaul_metrics::{
    BackupRun, CommandEnd, CopyObserver, Destination, Destinations, ObservedCopy, StateSource,
    TextSource,
};

use crate::exit::{self, CommandFailure, plain};
use crate::metrics::{BuildInfo as _, CommandMetrics};
use crate::progress::{ProgressOutput, ProgressReporter, ProgressStyle};
use crate::{args, logger, out, signals};

/// What runs copies: workers, metrics.
#[derive(Debug, Clone, Default)]
pub struct SessionOptions {
    /// Threads that copy; 0: one per core.
    pub threads: u16,
    /// How work is carried out.
    pub engine: args::EngineArgs,
    /// Where metrics are published.
    pub metrics: Vec<Destination>,
    /// A web page is served there, too.
    pub page: bool,
    /// A map of each disk is shown.
    pub shows_map: bool,
    /// The run that publishes the copies.
    pub run: Option<Arc<BackupRun>>,
}

impl From<&args::CopyArgs> for SessionOptions {
    fn from(args: &args::CopyArgs) -> SessionOptions {
        SessionOptions {
            threads: args.threads,
            engine: args.engine.clone(),
            metrics: args.metrics.clone(),
            page: args.page,
            shows_map: args.progress == Some(ProgressStyle::Map),
            run: None,
        }
    }
}

impl SessionOptions {
    /// The workers.
    pub fn config(&self) -> blockhaul_io::RuntimeConfig {
        self.engine.config(usize::from(self.threads))
    }
}

/// One or more copies, from before the first to after the last.
pub struct CopySession {
    runtime: Runtime,
    watch: Arc<CopyObserver>,
    reporter: Option<ProgressReporter>,
    metrics: Option<CommandMetrics>,
    signal: Arc<AtomicI32>,
}

impl CopySession {
    /// Sets it up for copies that share a rate limit.
    pub fn start(
        options: &SessionOptions,
        sink: Option<ProgressOutput>,
        disks: Vec<ObservedCopy>,
        limit: Option<Arc<RateLimit>>,
    ) -> Result<CopySession, CommandFailure> {
        let wanted = Destinations::new(&options.metrics, options.page)?;
        if wanted.page || options.shows_map {
            disks.iter().for_each(|disk| disk.progress.keep_map());
        }
        let signal = Arc::new(AtomicI32::new(0));
        let copies = disks.iter().map(|disk| disk.progress.clone()).collect();
        cancel_on_signal(copies, signal.clone())?;
        let runtime = Runtime::start(&options.config()).map_err(|error| {
            CommandFailure::new(exit::FAILED, format!("cannot start workers: {}", plain(&error)))
        })?;
        let watch = Arc::new(CopyObserver::new(disks, limit));
        if let Some(run) = &options.run {
            run.set_copies(&watch);
        }
        let reporter = match sink {
            None => None,
            Some(sink) => Some(ProgressReporter::start(sink, watch.clone())?),
        };
        let seen = watch.clone();
        let state: StateSource = Arc::new(move || seen.view().json());
        let published = (text(&watch), state);
        let metrics = (wanted != Destinations::default())
            .then(|| CommandMetrics::start(&wanted, "copy", published, &runtime.remote()));
        Ok(CopySession { runtime, watch, reporter, metrics: metrics.transpose()?, signal })
    }

    /// Runs work on a worker, and waits for it.
    pub fn block_on<M, F>(&self, work: M) -> F::Output
    where
        M: FnOnce() -> F + Send + 'static,
        F: Future + 'static,
        F::Output: Send + 'static,
    {
        self.runtime.block_on(work)
    }

    /// The signal that requested the end; 0 for none.
    pub fn signal(&self) -> i32 {
        self.signal.load(Ordering::Relaxed)
    }

    /// Shows the end state: everything after success.
    pub fn finish(&mut self, end: CommandEnd) {
        self.watch.finish(end);
        if let Some(reporter) = self.reporter.take() {
            reporter.finish();
        }
        if let Some(metrics) = self.metrics.take() {
            self.runtime.block_on(|| metrics.end());
        }
    }
}

/// Cancels these copies when a signal requests the end, and stores its number.
pub fn cancel_on_signal(
    copies: Vec<Arc<CopyProgress>>,
    signal: Arc<AtomicI32>,
) -> Result<(), CommandFailure> {
    let on_signal = move |number| {
        signal.store(number, Ordering::Relaxed);
        copies.iter().for_each(|copy| copy.cancel());
        if !logger::is_json() {
            // After the bar.
            out::error("\n");
        }
        let text = "stopping: waiting for requests in flight; repeat to stop at once";
        logger::message(log::Level::Info, "copy: ", text);
    };
    signals::on_stop(on_signal, || {})
}

/// The metrics of the program and of its copies.
fn text(watch: &Arc<CopyObserver>) -> TextSource {
    let copies = blockhaul_metrics::copy_text(watch.clone());
    Arc::new(move |mut figures| {
        figures.build_info();
        copies(figures)
    })
}
