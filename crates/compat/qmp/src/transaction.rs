//! `transaction`: several changes at one moment, all or none.
//!
//! Bitmaps are added first, because that can fail. Then backups and the other changes of bitmaps are
//! checked; they happen at the moment at which the backups begin, while no request is in flight.
//! Bitmaps are removed last. If anything fails before the moment, the added bitmaps are removed.

use blockhaul_jobs::{BackupConfig, BitmapStep};
use serde_json::Value;

use crate::backups::BackupPlan;
use crate::commands::{self, ACTIONS, Arguments, list, needed, switch, text};
use crate::error::{QmpError, Result};
use crate::monitor::Monitor;
use crate::state::JobNodes;

/// Maximum number of actions.
const ACTIONS_MAX: usize = 1024;

/// An action whose arguments were checked.
struct TransactionAction<'a> {
    kind: &'a str,
    data: &'a Arguments,
}

impl Monitor {
    pub(crate) async fn transaction(&self, arguments: &Arguments) -> Result<()> {
        let empty = Arguments::new();
        let properties = arguments.get("properties").and_then(Value::as_object).unwrap_or(&empty);
        let grouped = is_grouped(properties)?;
        let actions = checked(list(arguments, "actions"), grouped, &empty)?;
        let mut added = Vec::new();
        let done = self.carry_out(&actions, grouped, &mut added).await;
        if done.is_err() {
            for (node, name) in added {
                if let Err(error) = self.remove_bitmap(node, name).await {
                    log::warn!("bitmap {name:?} of a failed transaction stays: {error}");
                }
            }
        }
        done
    }

    async fn carry_out<'a>(
        &self,
        actions: &[TransactionAction<'a>],
        grouped: bool,
        added: &mut Vec<(&'a str, &'a str)>,
    ) -> Result<()> {
        for action in actions.iter().filter(|one| one.kind == "block-dirty-bitmap-add") {
            self.add_bitmap(action.data).await?;
            added.push((needed(action.data, "node"), needed(action.data, "name")));
        }
        let mut disks = Vec::new();
        let mut nodes = Vec::new();
        let mut bitmap_steps: Vec<BitmapStep> = Vec::new();
        for action in actions {
            match action.kind {
                "abort" => {
                    return Err(QmpError::generic("Transaction aborted using Abort action"));
                }
                "blockdev-backup" => {
                    let BackupPlan { item, nodes: one, bitmap_steps: own } =
                        self.prepare_backup(action.data).await?;
                    disks.push(item);
                    nodes.push(one);
                    bitmap_steps.extend(own);
                }
                "block-dirty-bitmap-remove" => {
                    self.free_bitmap(needed(action.data, "node"), needed(action.data, "name"))
                        .await?;
                }
                _ => {
                    bitmap_steps.push(self.bitmap_change(action).await?);
                    bitmap_steps.extend(self.since_then(action, actions).await?);
                }
            }
        }
        check_jobs(&nodes)?;
        if disks.is_empty() {
            bitmap_steps.iter().for_each(|change| change());
        } else {
            self.begin(BackupConfig { disks, grouped, bitmap_steps }, nodes).await?;
        }
        for action in actions.iter().filter(|one| one.kind == "block-dirty-bitmap-remove") {
            self.remove_bitmap(needed(action.data, "node"), needed(action.data, "name")).await?;
        }
        Ok(())
    }

    /// A bitmap that begins together with a backup of an earlier point in time begins at that point:
    /// what was written between them is not in the backup.
    async fn since_then(
        &self,
        action: &TransactionAction<'_>,
        all: &[TransactionAction<'_>],
    ) -> Result<Vec<BitmapStep>> {
        let TransactionAction { kind, data } = action;
        if !matches!(*kind, "block-dirty-bitmap-add" | "block-dirty-bitmap-clear") {
            return Ok(Vec::new());
        }
        let node = needed(data, "node");
        let mut changes: Vec<BitmapStep> = Vec::new();
        for backup in all.iter().filter(|one| one.kind == "blockdev-backup") {
            let Some(snapshot) = self.snapshot_over(needed(backup.data, "device"), node).await?
            else {
                continue;
            };
            let bitmap = self.bitmap(node, needed(data, "name")).await?;
            changes.push(Box::new(move || {
                snapshot.changed().into_iter().for_each(|(at, len)| bitmap.set(at, len));
            }));
        }
        Ok(changes)
    }

    /// A change of a bitmap that cannot fail any more.
    async fn bitmap_change(&self, action: &TransactionAction<'_>) -> Result<BitmapStep> {
        let TransactionAction { kind, data } = action;
        if *kind == "block-dirty-bitmap-merge" {
            let (target, from) = self.merged(data).await?;
            return Ok(Box::new(move || from.iter().for_each(|other| target.merge(other))));
        }
        let bitmap = self.free_bitmap(needed(data, "node"), needed(data, "name")).await?;
        let disabled = switch(data, "disabled", false);
        Ok(match *kind {
            "block-dirty-bitmap-enable" => Box::new(move || bitmap.enable(true)),
            "block-dirty-bitmap-disable" => Box::new(move || bitmap.enable(false)),
            // What was written before the moment does not count.
            "block-dirty-bitmap-add" if disabled => Box::new(|| {}),
            _ => Box::new(move || bitmap.clear()),
        })
    }
}

fn is_grouped(properties: &Arguments) -> Result<bool> {
    if let Some(name) = properties.keys().find(|name| *name != "completion-mode") {
        return Err(QmpError::generic(format!("Parameter '{name}' is unexpected")));
    }
    match text(properties, "completion-mode") {
        None | Some("individual") => Ok(false),
        Some("grouped") => Ok(true),
        Some(other) => Err(commands::not_accepted("completion-mode", other)),
    }
}

/// The actions, all checked.
fn checked<'a>(
    list: &'a [Value],
    grouped: bool,
    empty: &'a Arguments,
) -> Result<Vec<TransactionAction<'a>>> {
    if list.len() > ACTIONS_MAX {
        return Err(QmpError::generic(format!("a transaction has at most {ACTIONS_MAX} actions")));
    }
    let mut actions = Vec::new();
    for action in list {
        let Some(action) = action.as_object() else {
            return Err(QmpError::generic(
                "Invalid parameter type for 'actions', expected: object",
            ));
        };
        let Some(kind) = text(action, "type") else {
            return Err(QmpError::generic("Parameter 'type' is missing"));
        };
        let Some(command) = commands::find(ACTIONS, kind) else {
            return Err(commands::not_accepted("type", kind));
        };
        let data = action.get("data").and_then(Value::as_object).unwrap_or(empty);
        commands::check(command, data)?;
        if grouped && kind != "blockdev-backup" {
            return Err(QmpError::generic(format!(
                "Action '{kind}' does not support transaction property completion-mode = grouped"
            )));
        }
        actions.push(TransactionAction { kind, data });
    }
    Ok(actions)
}

/// Refuses two jobs of one name, and two on one target.
fn check_jobs(nodes: &[JobNodes]) -> Result<()> {
    for (index, one) in nodes.iter().enumerate() {
        let before = &nodes[..index];
        if before.iter().any(|other| other.job == one.job) {
            return Err(QmpError::generic(format!("Job ID '{}' already in use", one.job)));
        }
        if before.iter().any(|other| other.target == one.target || other.source == one.target) {
            return Err(QmpError::busy(&one.target, "backup"));
        }
        if before.iter().any(|other| other.target == one.source) {
            return Err(QmpError::busy(&one.source, "backup"));
        }
    }
    Ok(())
}
