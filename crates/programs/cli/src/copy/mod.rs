//! `blockhaul copy`: one copy, or those of a `--job`; shows progress, and a remedy after a failure.

pub(crate) mod copy_options;
mod hints;
pub(crate) mod report;

use blockhaul_catalog::DeviceSpec;
use blockhaul_io::{Pool, Runtime, RuntimeConfig};
use blockhaul_metrics::ObservedCopy;
use blockhaul_transfer::{
    CopyPlan, CopyRequest, CopySetup, NamedPlan, plans_json, plans_text, without_secrets,
};
use serde_json::Value;

use self::report::DigestLine;
use crate::brackets::Groups;
use crate::exit::{self, CommandFailure, CommandResult, plain};
use crate::progress::{ProgressReporter, ProgressStyle};
use crate::session::{CopySession, SessionOptions};
use crate::{args, jobs, out, signals};

/// Runs `blockhaul copy`.
pub fn run(args: &args::CopyArgs, groups: &Groups) -> CommandResult {
    if let Some(file) = &args.job {
        args.log.start(args.verbose);
        return jobs::run(args, file);
    }
    #[cfg(feature = "formats")]
    if let (Some(source), Some(target)) = (&args.source, &args.target)
        && let source = groups.spec(source)?
        && blockhaul_formats::OvaDisks::of(&source).is_some()
    {
        args.log.start(args.verbose);
        return jobs::run_all(args, source, groups.spec(target)?);
    }
    run_printing(args, groups, DigestLine::Named)
}

/// Runs one copy, and prints its digest in this form.
pub(crate) fn run_printing(
    args: &args::CopyArgs,
    groups: &Groups,
    digest: DigestLine,
) -> CommandResult {
    args.log.start(args.verbose);
    let alone = (args.parallel, args.total_memory, args.total_connections) == (None, None, None);
    if !alone {
        let text = "--parallel, --total-memory and --total-connections require --job";
        return Err(CommandFailure::usage(text));
    }
    let request = request(args, groups)?;
    if args.dry_run {
        return print_plans(&[(None, plan(request)?)], args.json);
    }
    run_request(request, &RunOptions { digest, ..args.into() })
}

/// What a command shows of its copy, and what runs it.
pub(crate) struct RunOptions {
    pub(crate) progress: Option<ProgressStyle>,
    pub(crate) no_progress: bool,
    /// A summary is printed at the end.
    pub(crate) verbose: bool,
    pub(crate) digest: DigestLine,
    pub(crate) session: SessionOptions,
}

impl From<&args::CopyArgs> for RunOptions {
    fn from(args: &args::CopyArgs) -> RunOptions {
        let args::CopyArgs { progress, no_progress, verbose, .. } = *args;
        let digest = DigestLine::Named;
        RunOptions { progress, no_progress, verbose, digest, session: args.into() }
    }
}

/// The request of a command line with a source and a target.
fn request(args: &args::CopyArgs, groups: &Groups) -> Result<CopyRequest, CommandFailure> {
    let (Some(source), Some(target)) = (&args.source, &args.target) else {
        return Err(CommandFailure::usage("give a source and a target, or --job with a file"));
    };
    let ends = [groups.spec(source)?, groups.spec(target)?];
    copy_options::checked_request(&args.image, args.into(), ends)
}

/// Both sides for a page that other users may read.
pub(crate) fn shown_ends(setup: &CopySetup) -> [String; 2] {
    setup.specs().map(|spec| without_secrets(&spec.to_string()))
}

/// Finds out what the copy of a request would do.
pub(crate) fn plan(request: CopyRequest) -> Result<CopyPlan, CommandFailure> {
    let setup = copy_options::set_up(request)?;
    let runtime = Runtime::start(&RuntimeConfig::default()).map_err(|error| {
        CommandFailure::new(exit::FAILED, format!("cannot start workers: {}", plain(&error)))
    })?;
    Ok(runtime.block_on(move || setup.plan())?)
}

/// Prints what copies would do, each with its name if there are several.
pub(crate) fn print_plans(plans: &[NamedPlan], as_json: bool) -> CommandResult {
    let text = if as_json { format!("{}\n", plans_json(plans)) } else { plans_text(plans) };
    out::print(text.as_bytes())?;
    Ok(0)
}

/// Runs the copy of a request that was checked.
pub(crate) fn run_request(request: CopyRequest, options: &RunOptions) -> CommandResult {
    run_reported(request, options, drop)
}

/// Runs the copy of a request that was checked. `take` gets its report as JSON, unless it fails.
pub(crate) fn run_reported(
    request: CopyRequest,
    options: &RunOptions,
    take: impl FnOnce(Value),
) -> CommandResult {
    let has_journal = request.options.journal.is_some();
    let can_skip = request.can_skip();
    let setup = copy_options::set_up(request)?;
    let sink = ProgressReporter::open(options.progress, options.no_progress)?;
    let progress = setup.control().progress().clone();
    let watched = ObservedCopy { ends: shown_ends(&setup), progress, ..ObservedCopy::default() };
    let mut session = CopySession::start(&options.session, sink, vec![watched], setup.rate())?;
    let ends = setup.specs().map(DeviceSpec::clone);
    let wants_journal = !has_journal && setup.can_have_journal();
    let control = setup.control();
    let pool = Pool::new(setup.memory());
    let started = std::time::Instant::now();
    let result = session.block_on(move || async move { setup.open().await?.run(pool).await });
    let hint = if wants_journal && control.has_left_a_part() {
        hints::journal_hint(&ends[1]).unwrap_or_default()
    } else {
        String::new()
    };
    let (outcome, report) = match result {
        Ok(report) => (Ok(report::status(&report)), Some(report)),
        Err(_) if session.signal() != 0 => {
            let text = format!("stopped by a signal{}", control.target_state());
            let failure = CommandFailure::new(signals::status(session.signal()), text);
            (Err(failure.and(&hint)), None)
        }
        Err(error) => {
            let skip = hints::skip_hint(&error, can_skip);
            // No hint for a loss of a few seconds.
            let is_long = started.elapsed() >= hints::WORTH_A_JOURNAL;
            let hint = if is_long { &hint } else { "" };
            (Err(CommandFailure::from(error).and(skip).and(hint)), None)
        }
    };
    session.finish(exit::command_end(&outcome));
    if let Some(report) = report {
        report::print(&report, options.verbose, "")?;
        report::print_digest(&report, &options.digest, ends[1] == DeviceSpec::Pipe)?;
        take(report::value(&report, &ends));
    }
    outcome
}
