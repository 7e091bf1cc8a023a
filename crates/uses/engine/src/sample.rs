//! A digest of samples of a device: cheap, and different if the disk was replaced or changed.

use std::rc::Rc;
use std::time::Duration;

use blockhaul_block::{BASE_ALLOCATION, Can, DeviceExt as _, Error, Reply, Request, ZERO};
use blockhaul_catalog::Stack;
use blockhaul_io::Reservation;

use crate::error::Result;
use crate::extent_feed::{ExtentFeed, ExtentRun};
use crate::handle::ReconnectingHandle;
use crate::ledger::SegmentRange;

/// Maximum time for an extents reply.
const PATIENCE: Duration = Duration::from_secs(2);
/// Number of samples, spread evenly; they include the first and the last block, where partition
/// tables and many file systems store what changes.
const PLACES: u64 = 64;
/// Bytes of a sample.
const BLOCK: u64 = 64 << 10;
/// Samples in flight at a time.
const IN_FLIGHT: usize = 16;

/// Reads the samples, and digests them in order. `only`: where, if the rest may be unreadable.
pub(crate) async fn digest(
    source: Rc<ReconnectingHandle>,
    only: Option<&[SegmentRange]>,
) -> Result<[u8; 32]> {
    let facts = source.facts();
    let most = u64::from(facts.block.maximum.max(facts.block.minimum));
    let block = BLOCK.min(most);
    let places = match only {
        Some(ranges) => places_in(ranges, block),
        None => {
            let last = facts.size.saturating_sub(block) / block * block;
            let mut places: Vec<u64> =
                (0..PLACES).map(|place| last / block * place / (PLACES - 1) * block).collect();
            places.push(last);
            places.dedup();
            places.into_iter().map(|at| (at, block.min(facts.size - at))).collect()
        }
    };
    let mut hasher = blake3::Hasher::new();
    for group in places.chunks(IN_FLIGHT) {
        let reads: Vec<_> = group
            .iter()
            .map(|&(at, len)| blockhaul_io::start(read(source.clone(), at, len)))
            .collect();
        // All are awaited, also after an error.
        let mut blocks = Vec::with_capacity(reads.len());
        for read in reads {
            blocks.push(read.await);
        }
        for block in blocks {
            hasher.update(&block?);
        }
    }
    Ok(hasher.finalize().into())
}

/// Offsets and lengths of samples of ranges, spread evenly over their bytes.
fn places_in(ranges: &[SegmentRange], block: u64) -> Vec<(u64, u64)> {
    let total: u64 = ranges.iter().map(|range| range.1 - range.0).sum();
    let mut places = Vec::new();
    let mut ranges = ranges.iter().peekable();
    let mut before = 0;
    for place in 0..PLACES {
        let wanted = u128::from(total.saturating_sub(1)) * u128::from(place);
        let wanted = (wanted / u128::from(PLACES - 1)) as u64;
        while let Some(range) = ranges.next_if(|range| before + (range.1 - range.0) <= wanted) {
            before += range.1 - range.0;
        }
        let Some(&&(start, end)) = ranges.peek() else { break };
        let at = start + (wanted - before) / block * block;
        places.push((at, block.min(end - at)));
    }
    places.dedup();
    places
}

/// Bytes per sample of a target that is assumed to read as zeroes, and how many samples.
const LOOK: u64 = 4 << 10;
const LOOKS: u64 = 32;
/// Maximum number of extents to consider.
const RUNS: usize = 4 << 10;

/// Average extent length in bytes from which on a source counts as coarse.
const COARSE: u64 = 1 << 20;
/// Length of the extents request that finds that out, and maximum time for the reply.
const COARSE_OF: u64 = 2 << 30;
const COARSE_IN: Duration = Duration::from_millis(250);

/// Whether a source has long extents, as far as its first reply shows, or reports none, so that
/// zeroing a target hole by hole costs little compared to writing the data.
pub async fn is_coarse(source: &Stack) -> bool {
    let device = source.device();
    let facts = device.facts();
    let asks = facts.can.contains(Can::EXTENTS) && facts.size > 0;
    let Some(context) = facts.context(BASE_ALLOCATION).filter(|_| asks) else { return true };
    let len = facts.size.min(COARSE_OF);
    match blockhaul_io::timeout(COARSE_IN, device.extents(0, len, context)).await {
        Ok(Ok(lists)) => {
            lists.iter().all(|extents| extents.len() as u64 <= 1 + extents.total() / COARSE)
        }
        // Too slow, or an error that the copy itself will report.
        Err(_) | Ok(Err(_)) => true,
    }
}

/// Reads samples of what a device does not report as zero, spread evenly: the offset of the first
/// byte found that is not zero. Does not wait much longer for extents than for other replies:
/// without them, the samples cover the whole device.
pub(crate) async fn first_content(
    end: Rc<ReconnectingHandle>,
    (from, to): (u64, u64),
) -> Result<Option<u64>> {
    let mut feed = ExtentFeed::allocation(end.clone(), true, from, to);
    let mut filled = Vec::new();
    let mut at = from;
    while at < to {
        let known = match blockhaul_io::timeout(PATIENCE, feed.front()).await {
            Ok(known) if filled.len() < RUNS => known?,
            _ => ExtentRun { len: to - at, state: None },
        };
        let len = known.len.clamp(1, to - at);
        if known.state.unwrap_or(0) & ZERO == 0 {
            filled.push((at, len));
        }
        at += len;
        feed.skip_to(at);
    }
    let total: u64 = filled.iter().map(|run| run.1).sum();
    let mut runs = filled.into_iter().peekable();
    let mut before = 0;
    let mut last = None;
    for look in 0..LOOKS {
        // The first and the last byte, and others between them.
        let wanted =
            (u128::from(total.saturating_sub(1)) * u128::from(look) / u128::from(LOOKS - 1)) as u64;
        while runs.peek().is_some_and(|run| before + run.1 <= wanted) {
            before += runs.next().map_or(0, |run| run.1);
        }
        let Some(&(start, _)) = runs.peek() else { return Ok(None) };
        let place = start + (wanted - before);
        let place = (place - place % LOOK).max(from);
        if last.replace(place) == Some(place) {
            continue;
        }
        let len = LOOK.min(to - place);
        let request = Request::read(place, Reservation::unpooled(len as usize));
        if let Reply::Data(data) = end.device().submit(request).await?
            && let Some(found) = data.bytes().iter().position(|&byte| byte != 0)
        {
            return Ok(Some(place + found as u64));
        }
    }
    Ok(None)
}

async fn read(source: Rc<ReconnectingHandle>, at: u64, len: u64) -> Result<[u8; 32]> {
    if len == 0 {
        return Ok(blake3::hash(&[]).into());
    }
    let mut attempts = 0;
    loop {
        let generation = source.generation();
        let request = Request::read(at, Reservation::unpooled(len as usize));
        match source.device().submit(request).await {
            Ok(Reply::Data(data)) => return Ok(blake3::hash(data.bytes()).into()),
            Ok(Reply::Hole) => return Ok(blake3::hash(&vec![0; len as usize]).into()),
            Ok(_) => return Err(Error::misfit().into()),
            Err(error) => source.recover(error, generation, &mut attempts).await?,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_lie_in_the_ranges() {
        assert_eq!(places_in(&[], BLOCK), []);
        assert_eq!(places_in(&[(5, 6), (9, 10)], BLOCK), [(5, 1), (9, 1)]);
        let ranges = [(100, 100 + 3 * BLOCK), (1 << 30, 2 << 30)];
        let places = places_in(&ranges, BLOCK);
        assert_eq!((places.first(), places.len()), (Some(&(100, BLOCK)), 64));
        assert_eq!(places.last(), Some(&((2 << 30) - BLOCK, BLOCK)));
        let within = |&(at, len): &(u64, u64)| ranges.iter().any(|r| r.0 <= at && at + len <= r.1);
        assert!(places.iter().all(within));
    }
}
