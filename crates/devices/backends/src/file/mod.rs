//! `file:PATH` and bare paths: regular files and block devices.
//!
//! [`open`] inspects the path and its abilities. [`device`] takes requests, which [`mod@read`],
//! [`mod@write`], [`zero`] (with its [`ways`]) and [`extents`] (with its [`known_data`]) carry out
//! on the open [`storage`]. [`inode`] lets writers take turns, and [`syncs`] flushes. [`limits`]
//! queries the kernel for alignments and file systems, and [`lock`] keeps two programs from writing
//! to one file; [`in_use`] finds what uses a block device. [`identity`](mod@identity) identifies the
//! storage of a path or a device. [`handed`] has descriptors passed in, and [`dir`] the files of a
//! directory as exports.

mod device;
mod dir;
mod extents;
mod handed;
mod identity;
mod in_use;
mod inode;
mod known_data;
mod limits;
mod lock;
mod open;
mod read;
mod storage;
mod syncs;
mod ways;
mod write;
mod zero;

use std::path::PathBuf;
use std::sync::Arc;

use blockhaul_block::{Device, Error, Kind};
use blockhaul_catalog::{
    Backend, BackendTarget, OpenFuture, OpenedDevice, Param, ParamKind, Preparation,
};

pub use dir::DirBackend;
pub use identity::{StorageRelation, identity, identity_of, shared};
pub use lock::disable_locks;

/// The backend `file:PATH`, which also takes bare paths.
pub struct FileBackend;

impl Backend for FileBackend {
    fn schemes(&self) -> &'static [&'static str] {
        &["file"]
    }

    fn operand(&self) -> &'static str {
        "PATH"
    }

    fn summary(&self) -> &'static str {
        "a file or block device; as a copy target, it is created if it does not exist, otherwise emptied \
         or overwritten"
    }

    fn example(&self) -> &'static str {
        r#"
blockhaul copy sample:64M 'file:disk.raw?direct=on' && blockhaul info disk.raw
"#
    }

    fn params(&self) -> &'static [Param] {
        &[DIRECT, LOCK, handed::FD]
    }

    fn open(&self, target: BackendTarget) -> OpenFuture<OpenedDevice> {
        let opening = self.open_target(target);
        Box::pin(async move {
            let (opened, preparation) = opening.await?;
            preparation.run().await?;
            Ok(opened)
        })
    }

    fn open_target(&self, target: BackendTarget) -> OpenFuture<(OpenedDevice, Preparation)> {
        // Opening may wait for a disk or a network: not on the worker.
        let opening = blockhaul_io::offload(move || open::open(&target));
        Box::pin(async move {
            let (device, resize) = opening.await.map_err(given_up)??;
            let preparation = match resize {
                None => Preparation::default(),
                Some(resize) => Preparation::new(move || {
                    let resizing = blockhaul_io::offload(move || resize.run());
                    Box::pin(async move { resizing.await.map_err(given_up)? })
                }),
            };
            Ok((OpenedDevice::from(Arc::new(device) as Arc<dyn Device>), preparation))
        })
    }
}

fn given_up<E: std::error::Error + Send + Sync + 'static>(lost: E) -> Error {
    Error::new(Kind::Io, "opening the file was cancelled").because(lost)
}

const DIRECT: Param = Param {
    name: "direct",
    kind: ParamKind::Switch,
    default: None,
    doc: "Bypass the page cache (O_DIRECT); offsets and lengths are then multiples of the block size of \
          the storage. If not given, the command decides, or it is off.",
};

const LOCK: Param = Param {
    name: "lock",
    kind: ParamKind::Switch,
    default: Some("on"),
    doc: "When writing: lock the file against other writers, QEMU included, and refuse a file that is \
          locked (byte locks, which only bind programs that check them). As a copy target: refuse a block \
          device that is mounted or in use.",
};

/// The path that a `file:` description names, from the path before the `?` and the options after
/// it, both still encoded; for a descriptor (`fd=N`) the path in /proc. `None` if it cannot be
/// parsed.
pub fn named(path: &str, options: &str) -> Option<PathBuf> {
    let path = blockhaul_catalog::percent_decode(path).ok()?;
    if !path.is_empty() {
        return Some(PathBuf::from(path));
    }
    let options = blockhaul_catalog::parse_options(options).ok()?;
    let (_, number) = options.iter().rfind(|(key, _)| key == handed::FD.name)?;
    number.parse().ok().map(handed::path)
}

#[cfg(test)]
mod tests;
