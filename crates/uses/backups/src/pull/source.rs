//! The source of a pull: its size, and its bitmap.

use std::sync::Arc;

use blockhaul_block::{Error, Kind};
use blockhaul_catalog::{DeviceSpec, Intent, Layer, Registry, Stack};
use blockhaul_engine::{BitmapSelection, CopyProgress, EngineOptions};
use blockhaul_store::{IncrementRanges, Store};
use blockhaul_transfer::make_layers;

use super::decision::PullQuestion;
use super::is_repository;
use super::request::{PointKind, PointPlan, PullDisk};
use crate::error::{BackupError, BackupErrorKind, BackupStep, Result};

/// A source that is about to be opened.
pub(super) struct PullSource {
    registry: Registry,
    spec: DeviceSpec,
    layers: Vec<Arc<dyn Layer>>,
    retries: u32,
    question: PullQuestion,
}

impl PullSource {
    pub(super) fn new(disk: &PullDisk, default_point: &str) -> Result<PullSource> {
        let layers = make_layers(&disk.registry, &disk.layers);
        let layers =
            layers.map_err(|error| BackupError::of_file(BackupStep::OpenSource, &error))?;
        Ok(PullSource {
            registry: disk.registry.clone(),
            spec: disk.source.clone(),
            layers,
            retries: disk.retries,
            question: PullQuestion::new(disk, default_point),
        })
    }

    /// Opens the source, and reads the bitmap if an increment is possible. Runs on a worker; the stack is
    /// dropped outside of workers.
    /// `counts`: the data of a full backup is counted.
    pub(super) async fn plan(
        mut self,
        store: Store,
        counts: bool,
    ) -> (Result<PointPlan>, Option<Stack>) {
        let layers = std::mem::take(&mut self.layers);
        match self.registry.open(&self.spec, layers, Intent::READ).await {
            Ok(stack) => {
                let mut plan = self.plan_for(&stack, &store).await;
                if counts && let Ok(plan) = &mut plan {
                    // Only a figure for users.
                    let all = [(0, plan.size)];
                    plan.data = blockhaul_transfer::data_bytes(&stack, &all).await.ok().flatten();
                }
                (plan, Some(stack))
            }
            Err(error) => (Err(BackupError::opening_source(&self.spec.to_string(), &error)), None),
        }
    }

    async fn plan_for(&self, stack: &Stack, store: &Store) -> Result<PointPlan> {
        let failed = |error: Error| BackupError::of_store(BackupStep::Plan, store.dir(), error);
        let facts = stack.device().facts();
        let bitmap = self.question.bitmap.as_ref();
        let has_bitmap = bitmap.is_some_and(|bitmap| facts.context(&bitmap.context).is_some());
        let mut plan = self.question.decide(store, facts.size, has_bitmap)?;
        if let PointKind::Increment { parent, bitmap } = &plan.kind {
            let newest = store.point(Some(parent)).map_err(failed)?;
            // An increment on something damaged would be lost.
            if !is_repository(store.dir()) {
                store.check(newest).map_err(failed)?;
            }
            let ranges = self.ranges(stack, bitmap).await?;
            plan.ranges = Some(IncrementRanges::new(ranges, facts.size).map_err(failed)?);
        }
        Ok(plan)
    }

    async fn ranges(&self, stack: &Stack, context: &str) -> Result<Vec<(u64, u64)>> {
        let bitmap = BitmapSelection { context: context.to_string(), mask: u64::MAX };
        let options = EngineOptions { retries: self.retries, ..EngineOptions::default() };
        let progress = Arc::new(CopyProgress::new());
        let read = blockhaul_engine::bitmap_ranges(stack, &bitmap, &options, &progress).await;
        read.map_err(|failed| {
            let error = BackupError::of_file(BackupStep::ReadBitmap, &failed.error);
            match failed.error.kind() {
                Kind::Disconnected | Kind::TimedOut => error,
                _ => error.with_kind(BackupErrorKind::Source),
            }
        })
    }
}
