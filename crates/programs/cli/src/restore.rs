//! `blockhaul restore`: a copy from a point of a store, after its digests were checked.

use blockhaul_backups::RestoreRequest;
use blockhaul_transfer::{Endpoint, TransferOptions, plans_text, without_secrets};
use serde_json::json;

use crate::args;
use crate::backup_run::with_report;
use crate::brackets::Groups;
use crate::chain;
use crate::copy::copy_options::check_request;
use crate::copy::report::DigestLine;
use crate::copy::{self, RunOptions};
use crate::exit::{CommandFailure, CommandResult};
use crate::progress::ProgressStyle;
use crate::session::SessionOptions;

/// Runs `blockhaul restore`.
pub fn run(args: &args::RestoreArgs, groups: &Groups) -> CommandResult {
    args.reporting.start_log();
    with_report("restore", &args.result, |report| {
        report.watch(vec![args.dir.clone()]);
        let context = chain::context(blockhaul_io::RuntimeConfig::default());
        let request = request(args, groups)?.into_copy(&context)?;
        check_request(&request)?;
        if args.dry_run {
            let plan = copy::plan(request)?;
            return report.tell(plan.json(), &plans_text(&[(None, plan.clone())]));
        }
        let [source, target] =
            [&request.source, &request.target].map(|side| side.spec().to_string());
        let mut options = run_options(args);
        report.take_over(&mut options.session)?;
        report.tell(json!({ "source": source, "target": without_secrets(&target) }), "")?;
        let mut made = None;
        let outcome = copy::run_reported(request, &options, |value| made = Some(value));
        made.map_or(Ok(0), |value| report.tell(value, ""))?;
        outcome
    })
}

/// The point, and how to copy it.
fn request(args: &args::RestoreArgs, groups: &Groups) -> Result<RestoreRequest, CommandFailure> {
    Ok(RestoreRequest {
        store: args.dir.clone(),
        point: args.point.clone(),
        with_digests: !args.no_check && !args.dry_run,
        target: Endpoint::Device(groups.spec(&args.target)?),
        options: TransferOptions {
            verify: args.verify,
            journal: args.journal.clone(),
            ..TransferOptions::default()
        },
    })
}

/// How the copy is shown.
fn run_options(args: &args::RestoreArgs) -> RunOptions {
    let args::ProgressOptions { progress, no_progress, verbose, .. } = args.reporting;
    let shows_map = progress == Some(ProgressStyle::Map);
    let session = SessionOptions { shows_map, ..SessionOptions::default() };
    RunOptions { progress, no_progress, verbose, digest: DigestLine::Named, session }
}
