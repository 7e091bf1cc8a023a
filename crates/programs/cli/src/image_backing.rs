//! `blockhaul rebase` and `blockhaul commit`: images and their backing files.

use std::sync::Arc;

use blockhaul_block::{Error, Kind};
use blockhaul_catalog::OpenContext;
use blockhaul_engine::CopyProgress;
use blockhaul_formats::qcow2::backing_change::{
    BackingChange, BackingName, RebaseMode, SnapshotPolicy, commit, rebase,
};
use blockhaul_transfer::shown as shown_name;
use serde_json::json;

use crate::args::{self, ChangeOutput, RebaseArgs};
use crate::brackets::Groups;
use crate::exit::{self, CommandFailure, CommandResult};
use crate::image_change::{failure, policy, with_advice};
use crate::image_tools::{holder, run};
use crate::out;
use crate::progress::WorkProgress;

/// Runs `blockhaul rebase`.
pub fn run_rebase(args: &RebaseArgs, groups: &Groups) -> CommandResult {
    let name = holder(groups.spec(&args.image)?)?.to_string();
    let names = policy(args.backing);
    let new = args.to.clone().zip(args.format.clone());
    let new = new.map(|(name, format)| BackingName { name, format });
    let how = match (args.names_only, args.compress) {
        (true, _) => RebaseMode::Unsafe,
        (false, true) => RebaseMode::Compressed,
        (false, false) => RebaseMode::Safe,
    };
    let snapshots = snapshots(args.change_snapshots);
    let described = name.clone();
    let result = shown("rebase", &args.output, |progress| {
        run(move |registry| async move {
            let context = OpenContext::new(&registry).with_names(names);
            let count = |done, all| progress.set_done(done, all);
            rebase(&context, &described, new.as_ref(), how, snapshots, &count).await
        })
    })?;
    let BackingChange { bytes: written, .. } =
        result.map_err(|error| refused("rebase", &name, &error))?;
    let text = format!("{written} bytes were written to the image\n");
    let text = if args.names_only { "" } else { &text };
    tell(&args.output, &name, written, text)
}

/// What went wrong with an image, also that it cannot be changed in this way.
fn refused(command: &str, name: &str, error: &Error) -> CommandFailure {
    match error.kind() {
        Kind::Unsupported => {
            let text = format!("cannot {command} {}: {error}", shown_name(name));
            with_advice(CommandFailure::new(exit::OPEN, text), error)
        }
        _ => failure(name, error),
    }
}

fn snapshots(change: bool) -> SnapshotPolicy {
    if change { SnapshotPolicy::Change } else { SnapshotPolicy::Refuse }
}

/// Runs `blockhaul commit`.
pub fn run_commit(args: &args::CommitArgs, groups: &Groups) -> CommandResult {
    let name = holder(groups.spec(&args.image)?)?.to_string();
    let names = policy(args.backing);
    let keep = args.keep;
    let snapshots = snapshots(args.change_snapshots);
    let described = name.clone();
    let result = shown("commit", &args.output, |progress| {
        run(move |registry| async move {
            let context = OpenContext::new(&registry).with_names(names);
            let count = |done, all| progress.set_done(done, all);
            commit(&context, &described, None, keep, snapshots, &count).await
        })
    })?;
    let BackingChange { bytes: written, .. } =
        result.map_err(|error| refused("commit", &name, &error))?;
    tell(
        &args.output,
        &name,
        written,
        &format!("{written} bytes were written to the backing file\n"),
    )
}

/// Runs work on an image, and shows its progress.
pub(crate) fn shown<T, E>(
    command: &'static str,
    output: &ChangeOutput,
    work: impl FnOnce(Arc<CopyProgress>) -> Result<Result<T, E>, CommandFailure>,
) -> Result<Result<T, E>, CommandFailure> {
    output.reporting.start_log();
    let shown = WorkProgress::start(command, &output.reporting)?;
    let begun = blockhaul_io::now();
    let result = work(shown.progress());
    log::debug!("{command} has ended after {:.3} s", blockhaul_io::elapsed(begun).as_secs_f64());
    shown.finish(matches!(result, Ok(Ok(_))));
    result
}

/// Prints how many bytes were written.
fn tell(output: &ChangeOutput, image: &str, written: u64, text: &str) -> CommandResult {
    out::result(output.json, &json!({ "image": image, "written": written }), text)?;
    Ok(0)
}
