//! Restoring a point: the copy from its device, after the point was checked.

use std::path::{Path, PathBuf};

use blockhaul_catalog::DeviceSpec;
use blockhaul_store::{BackupPoint, Store};
use blockhaul_transfer::{CopyRequest, Endpoint, TransferOptions};

use crate::check::check_points;
use crate::context::BackupContext;
use crate::error::{BackupError, BackupErrorKind, BackupStep, Result};
use crate::points::open_store;

/// A point that is restored to a disk.
pub struct RestoreRequest {
    /// The directory of the store.
    pub store: PathBuf,
    /// The name of the point; `None`: the newest.
    pub point: Option<String>,
    /// The files of the point are compared with their digests first.
    pub with_digests: bool,
    /// The disk that is written.
    pub target: Endpoint,
    /// How to copy. The target is flushed in any case.
    pub options: TransferOptions,
}

impl RestoreRequest {
    /// Checks the point, and returns the copy that restores it. The target is not opened.
    ///
    /// # Errors
    /// If the store has no such point, or the point is damaged.
    pub fn into_copy(self, context: &BackupContext) -> Result<CopyRequest> {
        let RestoreRequest { store: dir, point, with_digests, target, options } = self;
        let store = open_store(&dir)?;
        let point = store.point(point.as_deref());
        let point =
            point.map_err(|error| BackupError::of_store(BackupStep::OpenStore, &dir, error))?;
        let source = Endpoint::Device(device(&dir, &point.name)?);
        check_point(&store, point)?;
        if with_digests {
            check_digests(context, &store, point)?;
        }
        let options = TransferOptions { flush: true, ..options };
        Ok(CopyRequest { options, ..CopyRequest::new(source, target) })
    }
}

fn check_point(store: &Store, point: &BackupPoint) -> Result<()> {
    store.check(point).map_err(|error| {
        let text = format!("{error}: restore another point");
        let failed = BackupError::new(BackupErrorKind::Source, BackupStep::Check, text);
        failed.in_store(store.dir())
    })
}

fn check_digests(context: &BackupContext, store: &Store, point: &BackupPoint) -> Result<()> {
    let report = check_points(context, store, std::slice::from_ref(point))?;
    let Some(damage) = report.damage.first() else { return Ok(()) };
    let text = format!("point {:?} is damaged: {damage}", point.name);
    let error = BackupError::new(BackupErrorKind::Damage, BackupStep::Check, text);
    let remedy = ": restore another point, or this one as it is with --no-check";
    Err(error.in_store(store.dir()).and(remedy))
}

/// The description of a point, by its name.
fn device(dir: &Path, point: &str) -> Result<DeviceSpec> {
    let wrong = |text| {
        let error = BackupError::new(BackupErrorKind::Request, BackupStep::OpenStore, text);
        error.in_store(dir)
    };
    let name = dir.to_str();
    let name = name.ok_or_else(|| wrong(format!("{}: the name is not UTF-8", dir.display())))?;
    let text = format!("backup:{}?point={}", escaped(name), escaped(point));
    DeviceSpec::parse(text.as_ref()).map_err(|error| wrong(error.located()))
}

/// Text with everything escaped that has a meaning in the description of a device.
fn escaped(text: &str) -> String {
    let mut escaped = String::new();
    for c in text.chars() {
        match c {
            '%' | '?' | '&' | '#' | '=' | '+' => escaped += &format!("%{:02X}", u32::from(c)),
            c => escaped.push(c),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use blockhaul_catalog::{Intent, Registry};

    use super::*;

    #[test]
    fn names_are_escaped_in_descriptions() {
        let spec = device(Path::new("a b/100%?x"), "2026-11-23T10:00:00+01:00&c=1").unwrap();
        let backends: Vec<Arc<_>> = blockhaul_store::all();
        let registry = Registry { backends, ..Registry::default() };
        let (_, target) = registry.target(&spec, Intent::READ).unwrap();
        assert_eq!(target.path(), Path::new("a b/100%?x"));
        assert_eq!(target.args.text("point"), Some("2026-11-23T10:00:00+01:00&c=1"));
    }
}
