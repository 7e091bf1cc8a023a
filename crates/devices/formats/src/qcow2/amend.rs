//! Changes what the header of an image says about its format.
//!
//! Each step leaves a whole image: the table of snapshots is replaced as by any other change, and the
//! header changes by one write within its first sector, after all that it names is durable.

use std::sync::Arc;

use blockhaul_block::{Device, Error, Result};
use blockhaul_catalog::OpenContext;

use super::chain::{CHANGE, ChainBase, open_base};
use super::error::{unsupported, usage};
use super::header::{COMPATIBLE_AT, Header, compatible, incompatible, upgraded};
use super::image::FileHeader;
use super::snapshot_change::add_sizes;
use crate::storage::{self, len_of};

/// What is to be changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct AmendOptions {
    /// Make it version 3 of the format, if it is version 2.
    pub upgrade: bool,
    /// Whether other programs may write refcounts late. Needs version 3.
    pub lazy_refcounts: Option<bool>,
}

/// Changes the image that `description` names, which nothing else may use.
///
/// # Errors
/// [`Kind::Usage`](blockhaul_block::Kind::Usage) if version 2 cannot say it,
/// [`Kind::Unsupported`](blockhaul_block::Kind::Unsupported) if the image must be repaired first, or if its
/// header has no room, and those of the device.
pub async fn amend(context: &OpenContext, description: &str, change: AmendOptions) -> Result<()> {
    let ChainBase { file, head, .. } = open_base(context, description, CHANGE, |_| false).await?;
    let file = file.device;
    let shown = file.facts().name.clone();
    let named = |error: Error| error.on(&shown);
    refuse(&head.header, change).map_err(named)?;
    let mut head = head;
    if change.upgrade && head.header.version < 3 {
        head = upgrade(&file, head).await.map_err(named)?;
    }
    let Some(lazy) = change.lazy_refcounts else { return Ok(()) };
    let old = head.header.compatible;
    let flag = compatible::LAZY_REFCOUNTS;
    let new = if lazy { old | flag } else { old & !flag };
    // Version 2 cannot say it, and has none.
    if new != old {
        put(&file, COMPATIBLE_AT, &new.to_be_bytes()).await.map_err(named)?;
    }
    Ok(())
}

fn refuse(header: &Header, change: AmendOptions) -> Result<()> {
    if header.has(incompatible::DIRTY | incompatible::CORRUPT) {
        let way = "repair it first with \"blockhaul check --repair=all\"";
        return Err(unsupported("the image is marked as dirty or corrupt", way));
    }
    let stays_old = header.version < 3 && !change.upgrade;
    if stays_old && change.lazy_refcounts == Some(true) {
        return Err(usage("an image of version 2 cannot have lazy refcounts: make it version 3"));
    }
    Ok(())
}

/// Makes an image of version 2 one of version 3.
async fn upgrade(file: &Arc<dyn Device>, head: FileHeader) -> Result<FileHeader> {
    // Refused before the snapshots are changed, which stay where the header has them.
    let first = first_cluster(file, &head.header).await?;
    upgraded(&first)?;
    add_sizes(file, &head).await?;
    let first = first_cluster(file, &head.header).await?;
    let new = upgraded(&first)?;
    if let Some((place, name)) = &new.name {
        put(file, *place, name).await?;
    }
    put(file, 0, &new.sector).await?;
    FileHeader::read(file).await
}

async fn first_cluster(file: &Arc<dyn Device>, header: &Header) -> Result<Vec<u8>> {
    let len = header.cluster().min(len_of(&file.facts()));
    Ok(storage::read(file, 0, len).await?.to_vec())
}

/// Writes bytes that are durable when this returns.
async fn put(file: &Arc<dyn Device>, at: u64, bytes: &[u8]) -> Result<()> {
    storage::write(file, at, bytes).await?;
    storage::flush(file).await
}
