//! `backup:DIR`: any point of a store, read-only.

use std::path::Path;
use std::sync::Arc;

use blockhaul_block::{Device, Error, Kind, Result};
use blockhaul_catalog::{
    Backend, BackendTarget, DeviceSpec, Intent, OpenFuture, OpenedDevice, Param, ParamKind,
};

use crate::device::{PointDevice, PointFiles};
use crate::overlay::Overlay;
use crate::store::Store;

/// The kind of storage `backup:DIR`.
pub struct BackupBackend;

impl Backend for BackupBackend {
    fn schemes(&self) -> &'static [&'static str] {
        &["backup"]
    }

    fn operand(&self) -> &'static str {
        "DIR"
    }

    fn summary(&self) -> &'static str {
        "the disk as it was at a point in time, from a directory that blockhaul pull has written, read-only"
    }

    fn example(&self) -> &'static str {
        r#"
blockhaul copy sample:8M disk.raw
printf '[[disk]]\nsource = "disk.raw"\nstore = "vm"\npoint = "monday"\n' > pull.toml
blockhaul pull pull.toml
blockhaul compare disk.raw 'backup:vm?point=monday'
blockhaul serve --layer cow backup:vm --run 'blockhaul info "$uri"'
"#
    }

    fn params(&self) -> &'static [Param] {
        PARAMS
    }

    fn open(&self, target: BackendTarget) -> OpenFuture<OpenedDevice> {
        Box::pin(async move { open(&target).await })
    }
}

const PARAMS: &[Param] = &[Param {
    name: "point",
    kind: ParamKind::Text,
    default: None,
    doc: "The name of the point; the newest one if not given. blockhaul chain list prints all.",
}];

async fn open(target: &BackendTarget) -> Result<OpenedDevice> {
    let dir = target.path();
    if target.intent.write {
        let dir = dir.display();
        let text = format!(
            "backup: points are read-only: serve with --readonly or under --layer cow, or copy {dir} with \
             blockhaul restore"
        );
        return Err(Error::new(Kind::Unsupported, text));
    }
    let name = target.args.text("point").map(str::to_string);
    let read = blockhaul_io::offload(move || read(&dir, name.as_deref())).await;
    let lost = |error| Error::new(Kind::Io, "cannot read the store").because(error);
    let (found, overlay, paths, files, lock) = read.map_err(lost)??;
    let registry = target.context.registry();
    let intent = Intent { direct: target.intent.direct, ..Intent::READ_IMAGE };
    let mut levels: Vec<Arc<dyn Device>> = Vec::with_capacity(paths.len());
    for path in paths {
        let stack = registry.open(&DeviceSpec::Path(path), Vec::new(), intent).await?;
        levels.push(stack.device().clone());
    }
    let device = PointDevice::new(found, levels, overlay, files, lock)?;
    Ok(OpenedDevice::from(Arc::new(device) as Arc<dyn Device>))
}

/// What the store says about a point; its name and size, and where its bytes are.
fn read(dir: &Path, name: Option<&str>) -> Result<PointFiles> {
    let store = Store::open(dir)?;
    let point = store.point(name)?;
    let lock = store.hold(point)?;
    let mut overlay = Overlay::full(point.size);
    let mut paths = Vec::new();
    for (index, level) in store.levels(point)?.into_iter().enumerate() {
        if let Some(ranges) = level.ranges {
            overlay = overlay.with(ranges.list(), index)?;
        }
        paths.push(store.raw(level.number));
    }
    let title = (format!("{} of {}", point.name, dir.display()), point.size);
    Ok((title, overlay, paths, store.file_ids(), lock))
}
