//! A disk is pulled, checked, restored and pruned without the program.
#![allow(clippy::unwrap_used, reason = "a test that fails")]

use std::path::Path;

use blockhaul_backups::{
    BackupContext, BackupErrorKind, BackupStep, FileDigests, KeepCount, PointKind, PullDisk,
    PullMode, PullPlan, PullRequest, RestoreRequest, RetentionPolicy, StoreDamage, check_chain,
    list_points, merge_oldest, prune_points,
};
use blockhaul_catalog::{DeviceSpec, Registry};
use blockhaul_io::{Runtime, RuntimeConfig};
use blockhaul_transfer::{Endpoint, TransferOptions};

const SIZE: usize = 1 << 20;

fn context() -> BackupContext {
    let registry = Registry {
        backends: blockhaul_backends::all(),
        path: blockhaul_backends::PATH_SCHEME,
        ..Registry::default()
    };
    BackupContext {
        registry,
        workers: RuntimeConfig::default(),
        progress: std::sync::Arc::default(),
    }
}

fn request(folder: &Path, context: &BackupContext) -> PullRequest {
    let disk = PullDisk {
        name: "vda".into(),
        store: folder.join("store"),
        source: DeviceSpec::Path(folder.join("disk")),
        registry: context.registry.clone(),
        layers: Vec::new(),
        retries: 0,
        bitmap: None,
        point: None,
        checkpoint: None,
        mode: PullMode::Auto,
        with_digests: true,
        files: Vec::new(),
    };
    PullRequest { disks: vec![disk], default_point: "monday".into(), restart: false }
}

/// Pulls the disk in `folder`; returns the name of the point.
fn pull(folder: &Path, context: &BackupContext) -> String {
    let PullPlan { points, mut targets } = request(folder, context).plan(context).unwrap();
    assert!(matches!(points[0].kind, PointKind::Full { .. }), "{:?}", points[0]);
    let target = &mut targets[0];
    let DeviceSpec::Path(file) = target.spec() else { panic!("a target that is no file") };
    std::fs::copy(folder.join("disk"), file).unwrap();
    let file = target.file_for_digests().unwrap();
    let registry = context.registry.clone();
    let runtime = Runtime::start(&context.workers).unwrap();
    let digests = runtime.block_on(move || FileDigests::of_file(registry, file)).unwrap();
    target.publish(1, Some(&digests)).unwrap();
    points[0].name.clone()
}

fn last(count: u32) -> RetentionPolicy {
    RetentionPolicy { last: KeepCount::Last(count), ..RetentionPolicy::default() }
}

fn restore(folder: &Path) -> RestoreRequest {
    RestoreRequest {
        store: folder.join("store"),
        point: None,
        with_digests: true,
        target: Endpoint::Device(DeviceSpec::Path(folder.join("new"))),
        options: TransferOptions::default(),
    }
}

#[test]
fn a_disk_is_pulled_checked_and_pruned() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let store = folder.join("store");
    let context = context();
    std::fs::write(folder.join("disk"), vec![7; SIZE]).unwrap();
    assert_eq!(pull(folder, &context), "monday");
    assert_eq!(pull(folder, &context), "monday-2");
    let report = check_chain(&context, &store, None).unwrap();
    assert_eq!((report.points, report.intact, report.damage.len()), (2, 2, 0));
    let refused = merge_oldest(&context, &store, true).unwrap_err();
    assert_eq!((refused.kind(), refused.step()), (BackupErrorKind::Request, BackupStep::Merge));
    assert_eq!(refused.store(), Some(&*store));
    let change = prune_points(&context, &store, &last(1), true).unwrap();
    assert_eq!((change.removed, change.kept, &*change.oldest), (1, 1, "monday-2"));
}

#[test]
fn a_damaged_point_is_not_restored() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let context = context();
    std::fs::write(folder.join("disk"), vec![7; SIZE]).unwrap();
    pull(folder, &context);
    let copy = restore(folder).into_copy(&context).unwrap();
    assert!(copy.options.flush && copy.source.spec().to_string().starts_with("backup:"));
    let points = list_points(&folder.join("store")).unwrap().points;
    std::fs::write(&points[0].file, vec![8; SIZE]).unwrap();
    let report = check_chain(&context, &folder.join("store"), Some("monday")).unwrap();
    assert!(matches!(report.damage[0], StoreDamage::Data { at: 0, .. }), "{report:?}");
    let refused = restore(folder).into_copy(&context).err().unwrap();
    assert_eq!((refused.kind(), refused.step()), (BackupErrorKind::Damage, BackupStep::Check));
    assert!(refused.remedy().contains("another point"), "{refused}");
}

#[test]
fn errors_name_the_disk_and_its_store() {
    let folder = tempfile::tempdir().unwrap();
    let context = context();
    let request = request(folder.path(), &context);
    let refused = request.plan(&context).err().unwrap();
    assert_eq!((refused.kind(), refused.step()), (BackupErrorKind::Open, BackupStep::OpenSource));
    assert_eq!((refused.disk(), refused.store()), (Some(0), Some(&*request.disks[0].store)));
}
