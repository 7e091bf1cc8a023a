//! `tmpdisk:SIZE`: a fresh disk with a file system for each client, removed when the client
//! disconnects.

use std::sync::Arc;

use blockhaul_block::{Device, Error, Kind, Result};
use blockhaul_catalog::{
    Backend, Client, Export, Exports, Listed, Opened, Opening, Param, Target, Visit,
};

use crate::devices::made;
use crate::devices::made::{COMMAND, Folder, LABEL, Maker, TYPE};
use blockhaul_backends::support::operand;

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
        "for serve: a new disk with a file system for each client, created by mkfs in $TMPDIR or /var/tmp \
         and removed when the client disconnects; each client takes disk space: cap them with --layer \
         limit"
    }

    fn example(&self) -> &'static str {
        r#"
blockhaul serve --layer 'limit?limit=10' 'tmpdisk:64M?type=ext4&label=scratch' \
  --run 'blockhaul info "$uri"'
"#
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

    /// A new disk. Leaves nothing behind.
    async fn fresh(&self) -> Result<Arc<dyn Device>> {
        let maker = self.maker.clone();
        let folder = blockhaul_io::offload(move || {
            let folder = Folder::new()?;
            maker.make(&folder.disk())?;
            Ok::<_, Error>(folder)
        });
        let folder =
            folder.await.map_err(|_| Error::new(Kind::Io, "the disk was not created"))??;
        // Open files outlive their names, and the directory is removed here.
        made::device(&folder.disk(), self.write, true, None).await
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

    fn open(&self, name: &str, _tls: bool) -> Opening<Option<Export>> {
        let disks = self.clone();
        let name = name.to_string();
        Box::pin(async move { Ok(Some(Export::own(&name, disks.fresh().await?))) })
    }
}
