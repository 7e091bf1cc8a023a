//! `blockhaul chain`: lists, checks, merges and prunes the points of a store.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use blockhaul_backups::{
    BackupContext, BackupError, ChainChange, abandon_point, check_chain, list_points, merge_oldest,
    plan_merge, plan_prune, prune_points,
};
use serde_json::json;

use crate::args::{self, ChainCommand, ChainReporting};
use crate::backup_run::{BackupReport, with_report};
use crate::exit::{self, CommandFailure, CommandResult};
use crate::progress::WorkProgress;
use crate::{devices, logger, out};

/// Runs `blockhaul chain`.
pub fn run(args: &args::ChainArgs) -> CommandResult {
    logger::start(false);
    let (dir, result) = args.command.place();
    with_report("chain", result, |report| {
        report.watch(vec![dir.to_path_buf()]);
        run_reporting(&args.command, dir, report)
    })
}

fn run_reporting(
    command: &ChainCommand,
    dir: &Path,
    report: &mut BackupReport,
) -> Result<u8, CommandFailure> {
    match command {
        ChainCommand::List { .. } => {
            let list = list_points(dir)?;
            report.tell(list.json(), &list.text())
        }
        ChainCommand::Check { point, reporting, .. } => {
            let check = |context: &_| check_chain(context, dir, point.as_deref());
            let found = reporting.run("check", check)?;
            report.tell(found.json(), &found.text())?;
            Ok(if found.damage.is_empty() { 0 } else { exit::DIFFERENT })
        }
        ChainCommand::Merge { dry_run: true, .. } => {
            let plan = plan_merge(dir)?;
            report.tell(plan.json(), &plan.text())
        }
        ChainCommand::Merge { no_check, reporting, .. } => {
            let merge = |context: &_| merge_oldest(context, dir, !no_check);
            tell(&reporting.run("merge", merge)?, report)
        }
        ChainCommand::Abandon { .. } => {
            let name = abandon_point(dir)?;
            let text = out::one_line(&format!("the unfinished point {name:?} is removed"));
            report.tell(json!({ "removed": name }), &(text + "\n"))
        }
        ChainCommand::Prune { keep, dry_run: true, .. } => {
            let plan = plan_prune(dir, &keep.policy())?;
            report.tell(plan.json(), &plan.text())
        }
        ChainCommand::Prune { keep, no_check, reporting, .. } => {
            let prune = |context: &_| prune_points(context, dir, &keep.policy(), !no_check);
            tell(&reporting.run("prune", prune)?, report)
        }
    }
}

impl ChainReporting {
    /// Runs an operation on a store, and shows its progress.
    fn run<T>(
        &self,
        command: &'static str,
        operation: impl FnOnce(&BackupContext) -> Result<T, BackupError>,
    ) -> Result<T, CommandFailure> {
        self.reporting.start_log();
        let shown = WorkProgress::start(command, &self.reporting)?;
        let context =
            BackupContext { progress: shown.progress(), ..context(self.engine.config(0)) };
        let result = operation(&context);
        shown.finish(result.is_ok());
        Ok(result?)
    }
}

/// The devices of this program, with these workers.
pub(crate) fn context(workers: blockhaul_io::RuntimeConfig) -> BackupContext {
    let registry = devices::registry(Duration::ZERO);
    BackupContext { registry, workers, progress: Arc::default() }
}

/// Prints the number of points that are left.
fn tell(change: &ChainChange, report: &mut BackupReport) -> Result<u8, CommandFailure> {
    let ChainChange { removed, kept, oldest } = change;
    let text = format!("removed {removed}, kept {kept}; the oldest point is {oldest}");
    let json = json!({ "removed": removed, "kept": kept, "oldest": oldest });
    report.tell(json, &(out::one_line(&text) + "\n"))
}
