//! SEEK_DATA and SEEK_HOLE, from the extents of a device.

use blockhaul_block::{BASE_ALLOCATION, Device, DeviceExt as _, Result, ZERO};

use crate::protocol::SeekTarget;

/// Maximum number of lists of extents for one search. A search that needs more reports what is
/// always allowed: data at once, or the hole behind the end.
const LISTS_MAX: usize = 64 << 10;

/// The first offset from `at` on, which lies inside, with data or with a hole; `None`: there is no
/// more data. What reads as zeroes is a hole; the end of the device is one, too.
pub(crate) async fn seek(device: &dyn Device, at: u64, whence: SeekTarget) -> Result<Option<u64>> {
    let facts = device.facts();
    let size = facts.size;
    let Some(context) = facts.context(BASE_ALLOCATION) else {
        return Ok(without_extents(at, size, whence));
    };
    let mut next = at;
    for _ in 0..LISTS_MAX {
        if next >= size {
            return Ok(end(size, whence));
        }
        let lists = device.extents(next, size - next, context).await?;
        // One list for each context, and not empty.
        let Some(list) = lists.first().filter(|list| list.total() > 0) else { break };
        let found = list.ranges(next).find(|(_, run)| {
            let is_hole = run.state & ZERO != 0;
            is_hole == (whence == SeekTarget::Hole)
        });
        if let Some((found, _)) = found {
            return Ok(Some(found));
        }
        next = next.saturating_add(list.total());
    }
    Ok(without_extents(next, size, whence))
}

/// What is true of every file: all of it is data.
fn without_extents(at: u64, size: u64, whence: SeekTarget) -> Option<u64> {
    match whence {
        SeekTarget::Data => (at < size).then_some(at),
        SeekTarget::Hole => Some(size),
    }
}

fn end(size: u64, whence: SeekTarget) -> Option<u64> {
    match whence {
        SeekTarget::Data => None,
        SeekTarget::Hole => Some(size),
    }
}
