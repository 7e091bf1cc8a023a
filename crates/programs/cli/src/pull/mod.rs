//! `blockhaul pull`: the disks of one machine, each in full or what has changed, as a new point of its
//! store.

mod disk;
mod machine;

use std::time::{SystemTime, UNIX_EPOCH};

use blockhaul_backups::{
    BackupContext, BackupError, FileDigests, MachineBackup, PointPlan, PullOutcome, PullPlan,
    PullRequest, PullResult, PullTarget, UnfinishedPoint, finish_pull, pull_json, pull_text,
};
use blockhaul_catalog::DeviceSpec;

use crate::backup_run::{BackupReport, with_report};
use crate::exit::{CommandFailure, CommandResult};
use crate::jobfile::{self, JobFile, JobFileDisk};
use crate::jobs::{CopyBatch, DiskRequest};
use crate::progress::ProgressReporter;
use crate::{args, chain, copy};

/// The form of names of points by the clock.
const POINT: &str = "%Y-%m-%dT%H:%M:%SZ";

/// Runs `blockhaul pull`.
pub fn run(args: &args::PullArgs) -> CommandResult {
    args.reporting.start_log();
    with_report("pull", &args.result, |report| run_reporting(args, report))
}

fn run_reporting(args: &args::PullArgs, report: &mut BackupReport) -> CommandResult {
    if let Some(file) = &args.job {
        return pull(args, jobfile::read_pull(file)?, report);
    }
    let request = machine::request(args)?;
    if args.dry_run {
        let rows = MachineBackup::preview(&request, &machine::point(args))?;
        return report.tell(pull_json(&rows), &pull_text(&rows));
    }
    let backup = MachineBackup::begin(&request)?;
    let outcome = pull(args, machine::job_file(&backup), report);
    match (outcome, backup.end()) {
        (Ok(_), Err(error)) => Err(error.into()),
        (outcome, ended) => {
            ended.unwrap_or_else(|error| log::warn!("{error}"));
            outcome
        }
    }
}

fn pull(args: &args::PullArgs, file: JobFile, report: &mut BackupReport) -> CommandResult {
    let JobFile { mut common, disks } = file;
    report.take_over(&mut common.session)?;
    let sink = ProgressReporter::open(args.reporting.progress, args.reporting.no_progress)?;
    let context = chain::context(common.session.config());
    let request = request(&disks, args)?;
    report.watch(request.disks.iter().map(|disk| disk.store.clone()).collect());
    if args.dry_run {
        let rows = request.preview(&context).map_err(|error| failure(error, &disks))?;
        check_resumptions(&rows, disks)?;
        if rows.iter().all(|row| row.outcome == PullOutcome::Already) {
            return Err(all_exist(rows.first().map(|row| &row.point)));
        }
        return report.tell(pull_json(&rows), &pull_text(&rows));
    }
    let planned = request.plan(&context).map_err(|error| failure(error, &disks))?;
    let PullPlan { points, mut targets } = planned;
    if targets.is_empty() {
        return Err(all_exist(points.first()));
    }
    let copies =
        copy_requests(disks, &targets).and_then(|listed| CopyBatch::prepare(common, listed));
    let mut copies = match copies {
        Ok(copies) => copies,
        Err(failure) => {
            targets.iter_mut().for_each(|target| forget(target, &request));
            return Err(failure);
        }
    };
    copies.run(sink)?;
    for (index, target) in targets.iter_mut().enumerate() {
        let copied = copies.results().nth(index).flatten().is_some_and(|result| result.is_ok());
        if copied && let Err(failure) = publish(target, &copies, &context) {
            copies.fail(index, failure);
        }
        forget(target, &request);
    }
    for (index, error) in finish_pull(&targets) {
        copies.fail(index, error.into());
    }
    let rows = request.disks.iter().zip(points).map(|(disk, point)| PullResult::new(disk, point));
    let rows = filled(rows.collect(), &copies);
    // On standard output, before the failures.
    report.tell(pull_json(&rows), &pull_text(&rows))?;
    copies.end(args.reporting.verbose)
}

/// Refuses what the copies that go on would refuse.
fn check_resumptions(rows: &[PullResult], disks: Vec<JobFileDisk>) -> Result<(), CommandFailure> {
    for (row, mut disk) in rows.iter().zip(disks) {
        if let Some(UnfinishedPoint::Resumed(files)) = &row.unfinished {
            files.set_options(&mut disk.options);
            let target = DeviceSpec::Path(files.data.clone());
            copy::plan(DiskRequest::with_target(disk, target)?.request)?;
        }
    }
    Ok(())
}

/// There is nothing to copy.
fn all_exist(point: Option<&PointPlan>) -> CommandFailure {
    let name = point.map_or("", |point| &point.name);
    CommandFailure::usage(format!("all disks have the point {name:?} already: choose another name"))
}

/// The rows with the results of those that were copied, in the same order.
fn filled(mut rows: Vec<PullResult>, copies: &CopyBatch) -> Vec<PullResult> {
    let mut results = copies.results();
    for row in rows.iter_mut().filter(|row| row.outcome != PullOutcome::Already) {
        row.outcome = match results.next().flatten() {
            None => PullOutcome::NotStarted,
            Some(Ok(())) => PullOutcome::Complete,
            Some(Err(failure)) => PullOutcome::Failed(failure.to_string()),
        };
    }
    rows
}

/// The disks of the file; the command line takes precedence.
fn request(disks: &[JobFileDisk], args: &args::PullArgs) -> Result<PullRequest, CommandFailure> {
    Ok(PullRequest {
        disks: disks.iter().map(|disk| disk::pull_disk(disk, args)).collect::<Result<_, _>>()?,
        default_point: utc(POINT),
        // The moment of a machine that a run has left is over.
        restart: args.restart || args.job.is_none(),
    })
}

/// The failure of an error, with the position of its disk in the file.
fn failure(error: BackupError, disks: &[JobFileDisk]) -> CommandFailure {
    let disk = error.disk().and_then(|index| disks.get(index));
    let prefix = disk.map_or_else(String::new, |JobFileDisk { place, name, .. }| {
        format!("{place}: disk {name}: ")
    });
    let failure = CommandFailure::from(error);
    failure.reworded(format!("{prefix}{}", failure.facts()))
}

/// The copy of each disk that has a target.
fn copy_requests(
    disks: Vec<JobFileDisk>,
    targets: &[PullTarget],
) -> Result<Vec<DiskRequest>, CommandFailure> {
    let mut listed = Vec::with_capacity(targets.len());
    for (index, mut disk) in disks.into_iter().enumerate() {
        if let Some(target) = targets.iter().find(|target| target.disk() == index) {
            target.set_options(&mut disk.options);
            let mut request = DiskRequest::with_target(disk, target.spec())?;
            target.attach(&mut request.request);
            listed.push(request);
        }
    }
    Ok(listed)
}

/// Lists the point of a disk that is copied.
fn publish(
    target: &mut PullTarget,
    copies: &CopyBatch,
    context: &BackupContext,
) -> Result<(), CommandFailure> {
    let digests = match (target.file_for_digests(), copies.session()) {
        (Some(file), Some(session)) => {
            let registry = context.registry.clone();
            Some(session.block_on(move || FileDigests::of_file(registry, file))?)
        }
        _ => None,
    };
    Ok(target.publish(now(), digests.as_ref())?)
}

/// Removes what is recorded of a copy that has not begun.
fn forget(target: &mut PullTarget, request: &PullRequest) {
    if let Err(error) = target.forget_unstarted() {
        let name = request.disks.get(target.disk()).map_or("", |disk| &disk.name);
        log::warn!("disk {name}: {error}");
    }
}

/// The time of now in UTC, in this form.
fn utc(form: &str) -> String {
    let now = jiff::Timestamp::try_from(SystemTime::now()).unwrap_or(jiff::Timestamp::UNIX_EPOCH);
    now.strftime(form).to_string()
}

/// Seconds since 1970.
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
