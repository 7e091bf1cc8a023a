//! Where space of an image file is that reads as zeroes.

use std::sync::Arc;

use blockhaul_block::{Device, Error, Result};
use blockhaul_catalog::OpenContext;

use super::describe::{ChainLink, walk_chain};
use super::image::{FileHeader, ImageMetadata, ImageOptions};
use crate::bytes::index;

/// Memory in bytes for tables of an image.
const MEMORY: u64 = 4 << 20;

/// The tables of an image.
pub struct ZeroPlaces {
    image: ImageMetadata,
    file: Arc<dyn Device>,
}

/// The chain of an image, as [`describe_chain`](super::describe::describe_chain) does it, with the tables of
/// each qcow2 image.
///
/// # Errors
/// Those of [`describe_chain`](super::describe::describe_chain).
pub async fn chain_places(
    context: &OpenContext,
    description: &str,
) -> Result<Vec<(ChainLink, Option<ZeroPlaces>)>> {
    let mut all = Vec::new();
    for (link, storage) in walk_chain(context, description).await? {
        let places = match &link.image {
            None => None,
            Some(_) => Some(ZeroPlaces::new(storage.device).await?),
        };
        all.push((link, places));
    }
    Ok(all)
}

impl ZeroPlaces {
    async fn new(file: Arc<dyn Device>) -> Result<ZeroPlaces> {
        let head = FileHeader::read(&file).await?;
        // Data is not read, so that the length of its file does not matter.
        let data_len = head.header.has(super::header::incompatible::DATA_FILE).then_some(1 << 62);
        let options = ImageOptions {
            snapshot: None,
            data_len,
            memory: MEMORY,
            write: false,
            keeps_bitmaps: false,
        };
        let image = ImageMetadata::open(&file, &head, options).await?;
        Ok(ZeroPlaces { image, file })
    }

    /// The offset in the file, in bytes, of the space that is allocated for a range of the disk, none if there is
    /// none; and the length of the range's first part for which that is so. The range is not empty and
    /// has no compressed data.
    ///
    /// # Errors
    /// If a table is damaged or cannot be read.
    pub async fn host(&self, at: u64, len: u64) -> Result<(u64, Option<u64>)> {
        let cluster = self.image.layout.cluster();
        let end = at.saturating_add(len);
        let first = self.host_of(at).await?;
        let mut next = at;
        while next < end {
            next = ((next | (cluster - 1)) + 1).min(end);
            let wanted = first.map(|first| first.saturating_add(next - at));
            if next < end && self.host_of(next).await? != wanted {
                break;
            }
        }
        Ok((next - at, first))
    }

    /// The same for a byte.
    async fn host_of(&self, at: u64) -> Result<Option<u64>> {
        let image = &self.image;
        let layout = image.layout;
        let number = at / layout.l2_covers();
        let Some(table) = layout.l2_table(number, image.l1_entry(number))? else { return Ok(None) };
        let byte = image.byte_of(at);
        let slice = image.load(&self.file, table + byte - byte % image.slice).await?;
        let entry = slice.get(index(byte % image.slice / 8)).ok_or_else(Error::misfit)?;
        let host = layout.space(*entry, at)?;
        Ok(host.map(|host| host + at % layout.cluster()))
    }
}
