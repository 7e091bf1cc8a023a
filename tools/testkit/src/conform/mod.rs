//! The conformance suite: one check per sentence of the contract in the documentation of `block`, to
//! be run over every backend, layer and client, on every engine that the machine has.
//!
//! ```no_run
//! # use std::sync::Arc;
//! use blockhaul_testkit::conform::{self, ConformOptions};
//! use blockhaul_testkit::model::{CompletionOrder, Model, ModelDevice};
//!
//! conform::check("model", ConformOptions::default(), || async {
//!     let device = ModelDevice::new(Model::new(1 << 20), CompletionOrder::Deferred);
//!     Ok(device as Arc<dyn blockhaul_block::Device>)
//! });
//! ```
//!
//! The device is made anew for each check, on a worker; the suite puts `blockhaul_block::emulate`
//! (unless the options say [`ConformOptions::raw`]) and `blockhaul_block::fence` over it, as every caller
//! does. A device with a minimum block above one byte should be checked both ways. The device's
//! abilities are read from its facts; a check that does not apply is skipped, and the report says
//! why. The initial contents may be anything: they are read, and known from then on ([`InitialContent`]
//! says more).
//!
//! What the suite cannot see: whether a flush makes data durable (unless [`Subject::durable`] shows
//! the durable bytes), whether a failed flush is passed on (unless [`Subject::below`] can make one
//! fail), whether a parked payload is read (unless [`Subject::over`] shows how it arrives), whether
//! cached data is read faster, and a second completion of one request, which the types of `Pending`
//! make impossible.

mod case;
mod content;
mod extents;
mod flushes;
mod hints;
mod limits;
mod options;
mod random;
mod requests;
mod subject;
mod verdict;

use std::fmt::Write as _;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex};

use blockhaul_io::{IoEngine, Runtime, RuntimeConfig, WorkerHandle};

use self::case::CheckCase;
pub use self::options::{ConformOptions, InitialContent};
pub use self::subject::Subject;
use self::verdict::CheckResult;
pub use self::verdict::Verdict;
use crate::{rng, tools};

type CheckFunction = fn(CheckCase) -> std::pin::Pin<Box<dyn Future<Output = CheckResult>>>;

macro_rules! checks {
    ($($module:ident::$name:ident,)+) => {
        &[$((stringify!($name), |case| Box::pin($module::$name(case)))),+]
    };
}

/// All checks, in the order of the sentences of the contract.
const CHECKS: &[(&str, CheckFunction)] = checks![
    limits::the_facts_are_consistent,
    requests::submit_never_blocks,
    requests::a_request_has_started_when_submit_returns,
    requests::sixty_four_requests_are_at_work_at_once,
    requests::each_request_completes,
    requests::dropping_a_pending_detaches,
    requests::requests_in_flight_may_be_awaited_in_any_order,
    requests::neighbours_in_flight_leave_each_other_alone,
    requests::a_completed_write_is_seen_by_later_reads,
    requests::a_flush_makes_completed_writes_durable,
    requests::a_flush_covers_all_handles,
    requests::fua_is_durable_on_completion,
    flushes::a_failed_flush_is_reported_and_not_repeated,
    flushes::no_flush_succeeds_while_those_below_fail,
    content::the_content_is_as_told,
    content::a_read_answers_exactly_the_bytes_asked_for,
    content::a_write_changes_its_range_and_nothing_else,
    content::zero_makes_the_range_read_as_zeroes,
    content::fast_zero_works_or_is_unsupported,
    content::trim_leaves_its_neighbours_alone,
    extents::extents_start_at_the_offset_and_end_within_the_request,
    extents::one_extent_means_one,
    extents::data_is_never_called_zero_or_hole,
    extents::no_hole_keeps_the_range_allocated,
    requests::handles_move_between_workers,
    requests::workers_write_disjoint_ranges,
    limits::the_fence_refuses_what_the_facts_forbid,
    limits::read_only_devices_refuse_changes,
    limits::requests_at_the_limits_are_served,
    limits::a_lease_shows_the_same_bytes,
    limits::a_pool_of_one_request_is_enough,
    hints::a_zeroed_device_reads_as_zeroes,
    hints::late_room_has_its_memory_with_the_answer,
    hints::a_parked_payload_is_written_unseen,
    hints::every_context_is_answered,
    random::random_requests_match_the_model,
];

/// Names of all checks.
pub fn names() -> impl Iterator<Item = &'static str> {
    CHECKS.iter().map(|(name, _)| *name)
}

/// The results of all checks of one subject.
#[derive(Debug)]
pub struct ConformReport {
    /// The subject.
    pub name: String,
    /// The seed of everything random; `BLOCKHAUL_SEED` repeats it.
    pub seed: u64,
    /// Engine, check, and result.
    pub results: Vec<(IoEngine, &'static str, Result<Verdict, String>)>,
}

impl ConformReport {
    /// The checks that failed, and how.
    pub fn failures(&self) -> impl Iterator<Item = (IoEngine, &'static str, &str)> {
        self.results.iter().filter_map(|(engine, check, result)| {
            Some((*engine, *check, result.as_ref().err()?.as_str()))
        })
    }

    /// Whether this check failed on any engine.
    pub fn failed(&self, check: &str) -> bool {
        self.failures().any(|(_, name, _)| name == check)
    }

    /// Why this check was skipped, if it was.
    pub fn skipped(&self, check: &str) -> Option<&str> {
        self.results.iter().find_map(|(_, name, result)| match result {
            Ok(Verdict::Skipped(reason)) if *name == check => Some(reason.as_str()),
            _ => None,
        })
    }
}

/// Runs all checks, prints those that were skipped, and panics with all that failed.
pub fn check<M, F, S>(name: &str, options: ConformOptions, make: M)
where
    M: Fn() -> F + Send + Sync + 'static,
    F: Future<Output = blockhaul_block::Result<S>> + 'static,
    S: Into<Subject> + 'static,
{
    let report = run(name, options, make);
    let mut text = String::new();
    for (engine, check, result) in &report.results {
        match result {
            Ok(Verdict::Held) => {}
            Ok(Verdict::Skipped(reason)) => eprintln!("{name}: {check} skipped: {reason}"),
            Err(failure) => {
                // Writing to a string cannot fail.
                let _ = write!(text, "\n  {check} ({engine:?}): {failure}");
            }
        }
    }
    let seed = report.seed;
    assert!(text.is_empty(), "{name} breaks the contract (BLOCKHAUL_SEED={seed:#x}):{text}");
}

/// Runs all checks.
pub fn run<M, F, S>(name: &str, options: ConformOptions, make: M) -> ConformReport
where
    M: Fn() -> F + Send + Sync + 'static,
    F: Future<Output = blockhaul_block::Result<S>> + 'static,
    S: Into<Subject> + 'static,
{
    let named = options.skip.iter().map(|(name, _)| name).chain(&options.only);
    let unknown = { named }.find(|&name| !names().any(|known| known == *name));
    assert!(unknown.is_none(), "no check has the name {unknown:?}");
    let seed = options.seed.unwrap_or_else(rng::seed);
    let mut report = ConformReport { name: name.to_string(), seed, results: Vec::new() };
    let options = Arc::new(options);
    let make = Arc::new(make);
    for &engine in &options.engines {
        if engine == IoEngine::Uring && blockhaul_io::uring_available().is_err() {
            tools::skip("the kernel refuses io_uring: checked without it");
            continue;
        }
        let mut checker = CheckRunner {
            engine,
            runtime: None,
            options: options.clone(),
            seed,
            make: make.clone(),
        };
        for &(check_name, check) in CHECKS {
            if !options.only.is_empty() && !options.only.contains(&check_name) {
                continue;
            }
            let skip = options.skip.iter().find(|(name, _)| *name == check_name);
            let result = match skip {
                Some((_, reason)) => Ok(Verdict::Skipped((*reason).to_string())),
                None => checker.run(check),
            };
            report.results.push((engine, check_name, result));
        }
    }
    report
}

/// Workers of a check: more than one, so that handles can move.
const WORKERS: usize = 3;

/// Runs checks on one engine.
struct CheckRunner<M> {
    engine: IoEngine,
    /// The workers, which checks share until one of them does not end.
    runtime: Option<Runtime>,
    options: Arc<ConformOptions>,
    seed: u64,
    /// Makes a subject.
    make: Arc<M>,
}

impl<M, F, S> CheckRunner<M>
where
    M: Fn() -> F + Send + Sync + 'static,
    F: Future<Output = blockhaul_block::Result<S>> + 'static,
    S: Into<Subject> + 'static,
{
    fn run(&mut self, check: CheckFunction) -> CheckResult {
        let worker = self.worker()?;
        let (sender, receiver) = mpsc::channel();
        let sender = Arc::new(Mutex::new(sender));
        let options = self.options.clone();
        let seed = self.seed;
        let make = self.make.clone();
        drop(worker.spawn(move || async move {
            let checked = async {
                let made = blockhaul_io::timeout(options.check_timeout, make()).await;
                let made = made.map_err(|_| "the device was not opened in time".to_string())?;
                let subject = made.map_err(|error| format!("cannot open the device: {error}"))?;
                check(CheckCase::new(subject.into(), options, seed)?).await
            };
            let checked = checked.await;
            // The receiver may have given up.
            let _ = crate::model::lock(&sender).send(checked);
        }));
        match receiver.recv_timeout(self.options.check_timeout) {
            Ok(checked) => checked,
            Err(error) => {
                // Its workers may never end, and must not be waited for.
                if let Some(stuck) = self.runtime.take() {
                    std::mem::forget(stuck);
                }
                Err(self.no_result(error))
            }
        }
    }

    /// A worker for a check.
    fn worker(&mut self) -> Result<WorkerHandle, String> {
        if let Some(runtime) = &self.runtime {
            return Ok(runtime.remote());
        }
        let started = Runtime::start(&RuntimeConfig { workers: WORKERS, engine: self.engine });
        let started = started.map_err(|error| format!("cannot start workers: {error}"))?;
        let worker = started.remote();
        self.runtime = Some(started);
        Ok(worker)
    }

    /// Why a check has no result.
    fn no_result(&self, error: RecvTimeoutError) -> String {
        match error {
            RecvTimeoutError::Timeout => {
                let limit = self.options.check_timeout;
                format!("the check did not end within {limit:?}: something blocks or is lost")
            }
            RecvTimeoutError::Disconnected => "the check was dropped by its worker".to_string(),
        }
    }
}
