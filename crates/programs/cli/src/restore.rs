//! `blockhaul restore`: a copy from a point of a store, after its digests were checked.

use blockhaul_backups::RestoreRequest;
use blockhaul_transfer::{Endpoint, TransferOptions};

use crate::args;
use crate::brackets::Groups;
use crate::copy::copy_options::check_request;
use crate::copy::report::DigestLine;
use crate::copy::{self, RunOptions};
use crate::exit::{CommandFailure, CommandResult};
use crate::progress::ProgressStyle;
use crate::session::SessionOptions;
use crate::{chain, logger};

/// Runs `blockhaul restore`.
pub fn run(args: &args::RestoreArgs, groups: &Groups) -> CommandResult {
    logger::start(args.reporting.verbose);
    let context = chain::context(blockhaul_io::RuntimeConfig::default());
    let request = request(args, groups)?.into_copy(&context)?;
    check_request(&request)?;
    copy::run_request(request, &run_options(args))
}

/// The point, and how to copy it.
fn request(args: &args::RestoreArgs, groups: &Groups) -> Result<RestoreRequest, CommandFailure> {
    Ok(RestoreRequest {
        store: args.dir.clone(),
        point: args.point.clone(),
        with_digests: !args.no_check,
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
    let args::ProgressOptions { progress, no_progress, verbose } = args.reporting;
    let shows_map = progress == Some(ProgressStyle::Map);
    let session = SessionOptions { shows_map, ..SessionOptions::default() };
    let (digest, json) = (DigestLine::Named, args.json);
    RunOptions { progress, no_progress, verbose, digest, json, session }
}
