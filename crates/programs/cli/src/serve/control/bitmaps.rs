//! Requests about dirty bitmaps and snapshots.

use blockhaul_control::{
    BitmapRef, BitmapStatus, Refusal, Seconds, SnapshotFailurePolicy, SnapshotOptions,
    SnapshotRequest,
};
use blockhaul_jobs::{NewBitmap, OpenExport, SnapshotConfig};
use blockhaul_snapshot::{OnFailure, PointOptions, ViewTrim};
use serde_json::json;

use super::operations::{ControlReply, Operations};

impl Operations {
    pub(super) async fn add_bitmap(
        &self,
        export: &str,
        name: &str,
        granularity: u64,
        within: Seconds,
    ) -> ControlReply {
        let export = self.export(export)?;
        let bitmap = NewBitmap { name, granularity, kept: true };
        self.table.add_bitmap(&export, bitmap, within.0).await?;
        Ok(json!({ "done": "added" }))
    }

    pub(super) async fn remove_bitmap(&self, bitmap: BitmapRef) -> ControlReply {
        self.table.remove_bitmap(&*self.export(&bitmap.export)?, &bitmap.name).await?;
        Ok(json!({ "done": "removed" }))
    }

    pub(super) fn clear_bitmap(&self, bitmap: &BitmapRef) -> ControlReply {
        self.export(&bitmap.export)?.bitmap(&bitmap.name)?.clear();
        Ok(json!({ "done": "cleared" }))
    }

    pub(super) fn enable_bitmap(&self, bitmap: &BitmapRef, enabled: bool) -> ControlReply {
        self.export(&bitmap.export)?.bitmap(&bitmap.name)?.enable(enabled);
        Ok(json!({ "done": if enabled { "enable" } else { "disable" } }))
    }

    pub(super) fn merge_bitmaps(&self, export: &str, name: &str, from: &[String]) -> ControlReply {
        let export = self.export(export)?;
        if from.is_empty() {
            return Err(Refusal::usage("bitmap-merge: \"from\" is an empty list"));
        }
        export.merge_bitmaps(name, from)?;
        Ok(json!({ "done": "merged" }))
    }

    /// Serves a point in time of an export as another one.
    pub(super) async fn add_snapshot(&self, request: SnapshotRequest) -> ControlReply {
        let SnapshotRequest { export, name, discard, bitmap, start_bitmap, snapshot, seconds } =
            request;
        let export = self.export(&export)?;
        let options = options(&snapshot);
        let trim = if discard { ViewTrim::Releases } else { ViewTrim::Refused };
        let (start, within) = (start_bitmap, seconds.0);
        let begin = SnapshotConfig { options, bitmap, clears: false, start, trim, within };
        self.table.add_snapshot(export.clone(), &name, &begin).await?;
        log::info!(export = &*name; "added snapshot {name:?} of export {:?}", export.name);
        Ok(json!({ "done": "added" }))
    }
}

/// How a point in time is kept.
pub(super) fn options(options: &SnapshotOptions) -> PointOptions {
    PointOptions {
        block: options.block,
        directory: options.directory.as_ref().map(Into::into),
        max: options.max.unwrap_or(u64::MAX),
        guest_timeout: options.guest_timeout.0,
        on_failure: match options.on_failure {
            SnapshotFailurePolicy::Break => OnFailure::BreakSnapshot,
            SnapshotFailurePolicy::Fail => OnFailure::FailWrite,
        },
    }
}

/// The bitmaps of an export.
pub(super) fn bitmaps(export: &OpenExport) -> Vec<BitmapStatus> {
    let consistent = export.bitmaps().clone();
    let inconsistent = export.inconsistent().clone();
    let consistent = consistent.iter().map(|bitmap| BitmapStatus::Consistent {
        name: bitmap.name().to_string(),
        granularity: bitmap.granularity(),
        enabled: bitmap.is_enabled(),
        dirty: bitmap.dirty_bytes(),
    });
    let inconsistent = inconsistent.iter().map(|(name, why)| BitmapStatus::Inconsistent {
        name: name.to_string(),
        inconsistent: why.to_string(),
    });
    consistent.chain(inconsistent).collect()
}
