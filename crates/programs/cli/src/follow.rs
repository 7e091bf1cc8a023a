//! `blockhaul follow`: warm moves.

use crate::exit::{CommandFailure, CommandResult};
use crate::{devices, logger, out, signals};

/// Runs `blockhaul follow`.
pub fn run(plan: &std::path::Path, settings: &[String], is_dry: bool) -> CommandResult {
    logger::start(false);
    let control = blockhaul_follow::FollowControl::default();
    let stop = control.clone();
    signals::on_stop(move |signal| stop.cancel(signal), || {})?;
    let registry = devices::registry(std::time::Duration::from_secs(60));
    let print = |line: &str| drop(out::print(line.as_bytes()));
    let done = blockhaul_follow::run_plan(plan, settings, is_dry, registry, &control, &print);
    done.map(|()| 0).map_err(|error| match control.signal() {
        0 => CommandFailure::from(error),
        signal => CommandFailure::from(error).with_status(signals::status(signal)),
    })
}
