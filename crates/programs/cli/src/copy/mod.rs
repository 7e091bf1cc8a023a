//! `blockhaul copy`: one copy, or those of a `--job`; shows progress, and a remedy after a failure.

mod asked;
pub(crate) mod job;
mod manifest;

use std::sync::Arc;
use std::time::Instant;

use blockhaul_catalog::Spec;
use blockhaul_engine::Progress;
use blockhaul_io::Pool;

use self::job::CopyJob;
use crate::brackets::Groups;
use crate::exit::{Failure, Outcome};
use crate::long;
use crate::progress::Reporter;
use crate::session::Session;
use crate::snapshot::{End, Watched};
use crate::{args, jobs, logger, signals};

/// Runs `blockhaul copy`.
pub fn run(args: &args::CopyArgs, groups: &Groups) -> Outcome {
    logger::start(args.verbose);
    if let Some(file) = &args.job {
        return jobs::run(args, file);
    }
    run_one(args, groups, Arc::default())
}

/// Runs one copy, with these counters.
pub(crate) fn run_one(args: &args::CopyArgs, groups: &Groups, progress: Arc<Progress>) -> Outcome {
    let alone = (args.parallel, args.total_memory, args.total_connections) == (None, None, None);
    if !alone {
        let text = "--parallel, --total-memory and --total-connections require --job";
        return Err(Failure::usage(text));
    }
    let mut job = CopyJob::new(args, groups)?;
    let sink = Reporter::open(args.progress, args.no_progress)?;
    job.options.rate = long::rate(args)?;
    let ends = job.shown_ends();
    job.progress = progress.clone();
    let watched = Watched { ends, progress, ..Watched::default() };
    let mut session = Session::start(args, sink, vec![watched], job.options.rate.clone())?;
    let to_pipe = *job.ends().1 == Spec::Pipe;
    let pool = Pool::new(job.memory());
    let started = Instant::now();
    let (result, job) = session.block_on(move || job.run(pool));
    let stopped = job.stopped();
    let gone = job.gone();
    let hint = if job.journal.is_none() && job.has_left_a_part() && gone.is_none() {
        long::hint(job.ends()).unwrap_or_default()
    } else {
        String::new()
    };
    let gone = gone.unwrap_or_default();
    // Not on a worker: this waits for the servers of `[ CMD ]`, which end when workers have closed
    // their connections.
    drop(job);
    let (outcome, report) = match result {
        Ok(report) => (Ok(report.status), Some(report)),
        Err(_) if session.signal() != 0 => {
            let failure = Failure::new(signals::status(session.signal()), stopped);
            (Err(failure.and(&gone).and(&hint)), None)
        }
        // No hint for a loss of a few seconds.
        Err(failure) if started.elapsed() >= long::WORTH_A_JOURNAL => {
            (Err(failure.and(&gone).and(&hint)), None)
        }
        Err(failure) => (Err(failure.and(&gone)), None),
    };
    session.finish(End::from(&outcome));
    if let Some(report) = report {
        report.tell(args.verbose, "", to_pipe)?;
    }
    outcome
}
