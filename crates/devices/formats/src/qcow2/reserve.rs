//! Allocates space in an image before there is data for it.

use blockhaul_block::{Error, Result};
use blockhaul_catalog::OpenContext;

use super::chain::{CHANGE, ChainBase, open_base};
use super::edit::Edit;

/// Allocates clusters for the disk from `from` on, which must read as zeroes, where it has none, in the
/// image that `description` names and that nothing else may use. `writes`: zeroes are written to
/// them; otherwise only where the space was used before. Returns the length in bytes that the file must
/// have, and may not have yet.
///
/// An external data file is left as it is.
///
/// # Errors
/// If the tables are damaged, and those of the device.
pub async fn reserve(
    context: &OpenContext,
    description: &str,
    from: u64,
    writes: bool,
) -> Result<u64> {
    let ChainBase { file, head, .. } = open_base(context, description, CHANGE, |_| false).await?;
    let file = file.device;
    let shown = file.facts().name.clone();
    let named = |error: Error| error.on(&shown);
    let edit = Edit::open(&file, &head, None).await.map_err(named)?;
    let size = head.header.size;
    let from = from.next_multiple_of(head.header.cluster());
    let reserved = edit.run(async |parts, _| {
        parts.reserve(from, size, writes).await?;
        Ok(parts.image.layout_now().file_len())
    });
    reserved.await.map_err(named)
}
