//! In place of `snapshots` in a program without repositories of restic.

use std::path::Path;

use blockhaul_block::{Error, Kind, Result};
use blockhaul_catalog::DeviceSpec;
use blockhaul_store::Store;
use blockhaul_transfer::{CopyRequest, TransferOptions};

use super::request::{PointPlan, PullDisk};

/// Whether a store is a repository.
pub(crate) fn is_repository(store: &Path) -> bool {
    store.to_str().is_some_and(|store| store.starts_with("restic:"))
}

pub(super) fn check_names(_: &PullDisk, _: &[PullDisk], _: &str) -> Result<()> {
    Ok(())
}

#[derive(Default)]
pub(super) struct SnapshotStores(());

/// No value of this type exists.
pub(super) enum SnapshotTarget {}

impl SnapshotStores {
    pub(super) fn points(&mut self, disk: &PullDisk) -> Result<Store> {
        let text = format!("{}: this program has no repositories of restic", disk.store.display());
        let remedy = "use a program that was built with the feature restic";
        Err(Error::new(Kind::Unsupported, text).with_remedy(remedy))
    }

    pub(super) fn begin(
        self,
        _planned: &[(usize, &PullDisk, &PointPlan)],
    ) -> Result<Vec<(usize, SnapshotTarget)>, (usize, Error)> {
        Ok(Vec::new())
    }
}

impl SnapshotTarget {
    pub(super) fn spec(&self) -> DeviceSpec {
        match *self {}
    }

    pub(super) fn attach(&self, _request: &mut CopyRequest) {
        match *self {}
    }

    pub(super) fn set_options(&self, _options: &mut TransferOptions) {
        match *self {}
    }

    pub(super) fn complete(&self) {
        match *self {}
    }

    pub(super) fn is_beside(&self, _other: &SnapshotTarget) -> bool {
        match *self {}
    }

    pub(super) fn finish(&self) -> Result<()> {
        match *self {}
    }
}
