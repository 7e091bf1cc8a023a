//! `blockhaul rebase` and `blockhaul commit`: images and their backing files.

use blockhaul_block::{Error, Kind};
use blockhaul_catalog::OpenContext;
use blockhaul_formats::qcow2::backing_change::{
    BackingChange, BackingName, RebaseMode, SnapshotPolicy, commit, rebase,
};
use blockhaul_transfer::shown;

use crate::args::{self, RebaseArgs};
use crate::brackets::Groups;
use crate::exit::{self, CommandFailure, CommandResult};
use crate::image_change::{failure, policy, with_advice};
use crate::image_tools::{holder, run};
use crate::out;

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
    let result = run(move |registry| async move {
        let context = OpenContext::new(&registry).with_names(names);
        rebase(&context, &described, new.as_ref(), how, snapshots).await
    })?;
    let BackingChange { bytes: written, .. } =
        result.map_err(|error| refused("rebase", &name, &error))?;
    if !args.names_only {
        out::print(format!("{written} bytes were written to the image\n").as_bytes())?;
    }
    Ok(0)
}

/// What went wrong with an image, also that it cannot be changed in this way.
fn refused(command: &str, name: &str, error: &Error) -> CommandFailure {
    match error.kind() {
        Kind::Unsupported => {
            let text = format!("cannot {command} {}: {error}", shown(name));
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
    let result = run(move |registry| async move {
        let context = OpenContext::new(&registry).with_names(names);
        commit(&context, &described, None, keep, snapshots).await
    })?;
    let BackingChange { bytes: written, .. } =
        result.map_err(|error| refused("commit", &name, &error))?;
    out::print(format!("{written} bytes were written to the backing file\n").as_bytes())?;
    Ok(0)
}
