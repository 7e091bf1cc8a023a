//! What a prune or a merge would do: which points go, which stay and why, and the bytes of that.

use std::collections::HashSet;

use blockhaul_store::{BackupPoint, Store};
use blockhaul_transfer::one_line;
use serde_json::{Value, json};

use crate::error::{BackupError, BackupStep, Result};
use crate::points::{made_at, stored};
use crate::retention::RetentionDecision;

/// The points of a store with what happens to each; nothing has changed yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChainPlan {
    /// The points, the oldest first.
    pub points: Vec<PlannedPoint>,
    /// Bytes that files occupy that are removed.
    pub removed_bytes: u64,
    /// Bytes that are read from increments and written to other files.
    pub merged_bytes: u64,
}

/// What happens to a point.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedPoint {
    /// The name of the point.
    pub name: String,
    /// When it was made, in seconds since 1970.
    pub created: u64,
    /// Bytes that its files occupy.
    pub stored: u64,
    /// The rules that keep it; empty: it is removed.
    pub reasons: Vec<String>,
    /// The name of the point that takes in what this one holds; `None`: it stays, or nothing needs it.
    pub merged_into: Option<String>,
}

impl ChainPlan {
    /// The plan of a store, by the decision about the point at each index.
    ///
    /// # Errors
    /// If the list of what an increment holds is missing or damaged.
    pub(crate) fn new(
        store: &Store,
        decide: impl Fn(usize) -> RetentionDecision,
    ) -> Result<ChainPlan> {
        let points = store.points();
        let decisions: Vec<_> = (0..points.len()).map(decide).collect();
        let into = |index: usize| -> Option<&BackupPoint> {
            if decisions[index].is_kept() {
                return None;
            }
            let next = (index + 1..points.len()).find(|&next| decisions[next].is_kept())?;
            let is_needed = points[index + 1..=next].iter().all(|point| point.full().is_none());
            is_needed.then_some(&points[next])
        };
        let planned = |(index, point): (usize, &BackupPoint)| PlannedPoint {
            name: point.name.clone(),
            created: point.created,
            stored: stored(store, point),
            reasons: decisions[index].reasons.clone(),
            merged_into: into(index).map(|next| next.name.clone()),
        };
        let plan = ChainPlan {
            points: points.iter().enumerate().map(planned).collect(),
            removed_bytes: 0,
            merged_bytes: 0,
        };
        let failed = |error| BackupError::of_store(BackupStep::Prune, store.dir(), error);
        plan.with_bytes(store).map_err(failed)
    }

    /// Refuses points that the removal would refuse, and counts the bytes of their files.
    fn with_bytes(mut self, store: &Store) -> blockhaul_block::Result<ChainPlan> {
        let points = store.points();
        let is_removed = |index: usize| self.points[index].reasons.is_empty();
        let mut first = 0;
        while first < points.len() {
            let run = (first..points.len()).take_while(|&index| is_removed(index)).count();
            let next = first + run;
            let Some(kept) = points.get(next).filter(|_| run > 0) else {
                first = next + 1;
                continue;
            };
            let full = (first..next).rev().find(|&index| points[index].full().is_some());
            let (files, merged) = match full {
                _ if kept.full().is_some() => ((first..next).collect::<Vec<_>>(), 0),
                // The full backup takes in each increment in turn.
                Some(full) => {
                    let each = (full + 1..=next).map(|index| store.held_bytes(index, index));
                    let merged = each.sum::<blockhaul_block::Result<u64>>()?;
                    ((first..full).chain(full + 1..=next).collect(), merged)
                }
                None => {
                    store.refuse_readers(kept)?;
                    ((first..=next).collect(), store.held_bytes(first, next)?)
                }
            };
            points[first..next].iter().try_for_each(|point| store.refuse_readers(point))?;
            self.removed_bytes +=
                files.iter().map(|&index| stored(store, &points[index])).sum::<u64>();
            self.merged_bytes += merged;
            first = next + 1;
        }
        Ok(self)
    }

    /// The names of the points that stay.
    pub(crate) fn kept_names(&self) -> HashSet<String> {
        let kept = self.points.iter().filter(|point| !point.reasons.is_empty());
        kept.map(|point| point.name.clone()).collect()
    }

    fn removed(&self) -> impl Iterator<Item = &PlannedPoint> {
        self.points.iter().filter(|point| point.reasons.is_empty())
    }

    /// Lines for users.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for point in &self.points {
            let what = match (&point.reasons[..], &point.merged_into) {
                ([], Some(into)) => format!("would be merged into {into}"),
                ([], None) => "would be removed".to_string(),
                (reasons, _) => format!("stays: {}", reasons.join("; ")),
            };
            let line = format!("{}  {}  {what}", made_at(point.created), point.name);
            text += &one_line(&line);
            text.push('\n');
        }
        let removed = self.removed().count();
        text += &format!(
            "{removed} of {} points would go: {} bytes of files removed, {} bytes written by merging; nothing was changed\n",
            self.points.len(),
            self.removed_bytes,
            self.merged_bytes
        );
        text
    }

    /// The plan for programs.
    pub fn json(&self) -> Value {
        let point = |point: &PlannedPoint| {
            json!({
                "name": point.name, "created": made_at(point.created), "stored": point.stored,
                "kept": !point.reasons.is_empty(), "reasons": point.reasons,
                "merged_into": point.merged_into,
            })
        };
        json!({
            "dry_run": true, "points": self.points.iter().map(point).collect::<Vec<_>>(),
            "removed_bytes": self.removed_bytes, "merged_bytes": self.merged_bytes,
        })
    }
}
