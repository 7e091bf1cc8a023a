//! `tmpdisk:SIZE`: a fresh disk with a file system for each client, which is gone when the client is.

use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use block::{
    Backend, Client, Device, Error, Exports, Kind, Listed, Opened, Opening, Param, Result, Target,
    Visit,
};

use crate::made::{COMMAND, LABEL, Maker, TYPE};
use crate::{made, operand};

/// The backend `tmpdisk:SIZE`.
pub struct Tmpdisk;

impl Backend for Tmpdisk {
    fn schemes(&self) -> &'static [&'static str] {
        &["tmpdisk"]
    }

    fn operand(&self) -> &'static str {
        "SIZE"
    }

    fn summary(&self) -> &'static str {
        "for serve: a fresh disk with a file system for each client, made by mkfs in $TMPDIR or \
         /var/tmp, and gone with the client; bound clients with the layer limit, as each takes space"
    }

    fn params(&self) -> &'static [Param] {
        const { &[TYPE, LABEL, COMMAND] }
    }

    fn takes_others(&self) -> bool {
        true
    }

    fn open(&self, target: Target) -> Opening<Opened> {
        Box::pin(async move {
            operand::source_only(&target)?;
            let disks = Disks::of(&target)?;
            Ok(Opened::from(disks.fresh().await?))
        })
    }

    fn exports(&self, target: &Target) -> Option<Opening<Arc<dyn Exports>>> {
        let disks = Disks::of(target).map(|disks| Arc::new(disks) as Arc<dyn Exports>);
        Some(Box::pin(std::future::ready(disks)))
    }
}

#[derive(Clone)]
struct Disks {
    maker: Arc<Maker>,
    write: bool,
}

impl Disks {
    fn of(target: &Target) -> Result<Disks> {
        let maker = Arc::new(Maker::of(target, operand::size(target)?)?);
        Ok(Disks { maker, write: target.intent.write })
    }

    /// A new disk. Nothing of it stays behind.
    async fn fresh(&self) -> Result<Arc<dyn Device>> {
        let maker = self.maker.clone();
        let folder = io::offload(move || {
            let folder = Folder::new()?;
            maker.make(&folder.disk())?;
            Ok::<_, Error>(folder)
        });
        let folder = folder.await.map_err(|_| Error::new(Kind::Io, "the disk was not made"))??;
        // Open files stay when their names go, and the folder is removed here.
        made::device(&folder.disk(), self.write, true, None).await
    }
}

/// A folder that only this user can look into: others must not exchange the disk before it is opened.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Result<Folder> {
        let place = std::env::var_os("TMPDIR").filter(|place| !place.is_empty());
        let place = place.map_or_else(|| PathBuf::from("/var/tmp"), PathBuf::from);
        let cannot = |error| {
            Error::system(format!("cannot make a folder for a disk in {}", place.display()), error)
        };
        loop {
            let mut random = [0; 8];
            let flags = rustix::rand::GetRandomFlags::empty();
            rustix::rand::getrandom(&mut random, flags).map_err(|error| cannot(error.into()))?;
            let name = format!("blockhaul-disk-{:016x}", u64::from_ne_bytes(random));
            let path = std::path::absolute(place.join(name)).map_err(cannot)?;
            match DirBuilder::new().mode(0o700).create(&path) {
                Ok(()) => return Ok(Folder(path)),
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(cannot(error)),
            }
        }
    }

    fn disk(&self) -> PathBuf {
        self.0.join("disk")
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        remove(&self.0);
    }
}

fn remove(folder: &Path) {
    if let Err(error) = std::fs::remove_dir_all(folder) {
        log::warn!("cannot remove {}: {error}", folder.display());
    }
}

impl Exports for Disks {
    fn admit(&self, _client: Client) -> Opening<Arc<dyn Visit>> {
        Box::pin(std::future::ready(Ok(Arc::new(self.clone()) as Arc<dyn Visit>)))
    }
}

impl Visit for Disks {
    fn list(&self, _tls: bool) -> Opening<Vec<Listed>> {
        let all = Listed { name: String::new(), description: "a fresh disk".into() };
        Box::pin(std::future::ready(Ok(vec![all])))
    }

    fn open(&self, _name: &str, _tls: bool) -> Opening<Arc<dyn Device>> {
        let disks = self.clone();
        Box::pin(async move { disks.fresh().await })
    }
}
