//! The environment of copies: signals, workers, progress, metrics.

use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

use blockhaul_engine::Rate;
use blockhaul_io::{Remote, Runtime};

use crate::exit::{self, Failure, plain};
use crate::figures::Watched;
use crate::progress::{End, Reporter, Sink};
use crate::{args, figures, metrics, out, signals};

/// One or more copies, from before the first to after the last.
pub struct Session {
    runtime: Runtime,
    reporter: Option<Reporter>,
    metrics: Option<metrics::Server>,
    signal: Arc<AtomicI32>,
}

impl Session {
    /// Sets it up for copies that share a rate limit.
    pub fn start(
        args: &args::Copy,
        sink: Option<Sink>,
        disks: Vec<Watched>,
        limit: Option<Arc<Rate>>,
    ) -> Result<Session, Failure> {
        let signal = Arc::new(AtomicI32::new(0));
        let (cancelled, caught) = (disks.clone(), signal.clone());
        let on_signal = move |number| {
            caught.store(number, Ordering::Relaxed);
            cancelled.iter().for_each(|disk| disk.progress.cancel());
            out::error(
                "\nblockhaul: copy: stopping: waiting for requests in flight; repeat to stop at once\n",
            );
        };
        signals::on_stop(on_signal, || {})?;
        let config = args.engine.config(usize::from(args.threads));
        let runtime = Runtime::start(&config).map_err(|error| {
            Failure::new(exit::FAILED, format!("cannot start workers: {}", plain(&error)))
        })?;
        let reporter = match sink {
            None => None,
            Some(sink) => Some(Reporter::start(sink, disks.clone())?),
        };
        let metrics = match &args.metrics {
            None => None,
            Some(address) => Some(serve(address, disks, limit, &runtime.remote())?),
        };
        Ok(Session { runtime, reporter, metrics, signal })
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
    pub fn finish(&mut self, end: End) {
        self.metrics = None;
        if let Some(reporter) = self.reporter.take() {
            reporter.finish(end);
        }
    }
}

/// Serves metrics; prints the address if it is not known.
fn serve(
    address: &metrics::Address,
    disks: Vec<Watched>,
    limit: Option<Arc<Rate>>,
    worker: &Remote,
) -> Result<metrics::Server, Failure> {
    let server = metrics::Server::start(address, figures::page(disks, limit), worker)?;
    if let metrics::Address::Tcp(asked) = address
        && asked.port() == 0
    {
        out::error(&format!("blockhaul: copy: metrics on http://{}/metrics\n", server.address()));
    }
    Ok(server)
}
