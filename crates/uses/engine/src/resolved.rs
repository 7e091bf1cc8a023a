//! Options adapted to the devices.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use blockhaul_block::{Can, Compression, Device, DeviceExt as _, Error, Facts, Kind, Result};
use blockhaul_io::Pool;

use crate::ledger::SegmentRange;
use crate::options::{EngineOptions, MAX_REQUEST, MIN_REQUEST, MultiConn};
use crate::rate::RateLimit;

/// Larger target blocks do not widen the ranges copied as data.
pub(crate) const GRAIN_MAX: u32 = 64 << 10;
/// Minimum segment size, so that segments end on the grain.
const SEGMENT_MIN: u64 = 64 << 10;

/// Checks that a target can hold `size` bytes.
pub(crate) async fn check_target(size: u64, target: &Arc<dyn Device>) -> Result<()> {
    let facts = target.facts();
    if !facts.can.contains(Can::WRITE) {
        let text = "the target is read-only: choose another target, or serve it for writing";
        return Err(Error::new(Kind::ReadOnly, text).complete().on(&facts.name));
    }
    if facts.size < size {
        let text = format!(
            "the target ({} bytes) is smaller than the source ({size} bytes): make it larger",
            facts.size
        );
        return Err(Error::new(Kind::NoSpace, text).complete().on(&facts.name));
    }
    check_tail(size, target, "written", || "make it one block larger".into()).await
}

/// Checks that the first `size` bytes of a source can be read: a server may refuse to read a partial
/// block at the end. For a caller that is about to empty a target.
///
/// # Errors
/// If they cannot be read; names the `--range` that can.
pub async fn check_source(size: u64, source: &Arc<dyn Device>) -> Result<()> {
    let whole = |facts: &Facts| facts.size - u64::from(facts.tail);
    let advice = || format!("copy what can be with --range 0:{}", whole(&source.facts()));
    check_tail(size, source, "read", advice).await
}

/// Checks that the partial block at the end of a device can be reached, if it is within the first
/// `size` bytes, by reading it.
async fn check_tail(
    size: u64,
    device: &Arc<dyn Device>,
    done: &str,
    advice: impl FnOnce() -> String,
) -> Result<()> {
    let facts = device.facts();
    let start = facts.size - u64::from(facts.tail);
    if size <= start {
        return Ok(());
    }
    match device.read(start, facts.tail as usize).await {
        Err(error) if error.kind() == Kind::Invalid => {
            let text = format!(
                "the last {} of {} bytes cannot be {done}, as the size is not a multiple of its minimum \
                 block size: {}",
                facts.tail,
                facts.size,
                advice()
            );
            Err(Error::new(Kind::Invalid, text).on(&facts.name))
        }
        // Another error is that of the copy, which repeats the read.
        _ => Ok(()),
    }
}

/// Checks that what is copied can be discarded at the source, once it is durable on the target, which
/// must stay when the program ends. For a caller that is about to empty a target.
///
/// # Errors
/// Those of [`check_release`], and [`Kind::Unsupported`] if the target is temporary.
pub fn check_discard(source: &Facts, target: &Facts) -> Result<()> {
    check_release(source, target)?;
    if target.temporary {
        let text = "what is copied cannot be discarded at the source, because the target is lost when this \
                    program ends: copy to storage that stays";
        return Err(Error::new(Kind::Unsupported, text).on(&target.name));
    }
    Ok(())
}

/// Checks that a snapshot can be released where it is copied, once that is durable on the target. The
/// disk itself stays.
///
/// # Errors
/// [`Kind::ReadOnly`] or [`Kind::Unsupported`], with the side that is in the way.
pub fn check_release(source: &Facts, target: &Facts) -> Result<()> {
    if !source.can.contains(Can::WRITE) {
        let text = "what is copied cannot be discarded at the source, because that is read-only: make it \
                    writable, or leave out --discard-source";
        return Err(Error::new(Kind::ReadOnly, text).complete().on(&source.name));
    }
    if !source.can.contains(Can::TRIM) {
        let text = "what is copied cannot be discarded at the source, because that cannot trim: leave \
                    out --discard-source";
        return Err(Error::new(Kind::Unsupported, text).on(&source.name));
    }
    if !target.can.contains(Can::FLUSH) {
        let text = "what is copied cannot be discarded at the source, because the target cannot be \
                    flushed, and might lose it: leave out --discard-source";
        return Err(Error::new(Kind::Unsupported, text).on(&target.name));
    }
    Ok(())
}

/// Minimum number of segments per lane.
const SEGMENTS_PER_LANE: u64 = 2;
/// Number of lanes at the start on a machine with one processor.
const LANES_FIRST_MIN: usize = 2;
/// Minimum number of requests per segment, so that lanes do not change places all the time.
const REQUESTS_PER_SEGMENT: u64 = 16;

/// Options adapted to the devices.
#[derive(Debug)]
pub(crate) struct EffectiveOptions {
    /// Lanes to start with if requests take long.
    pub(crate) connections: usize,
    /// Lanes to start with.
    pub(crate) connections_first: usize,
    /// Maximum number of lanes.
    pub(crate) connections_max: usize,
    pub(crate) multi_conn: MultiConn,
    pub(crate) requests: usize,
    pub(crate) adaptive: bool,
    pub(crate) request_size: u64,
    /// Whether to find the best request size.
    pub(crate) adaptive_size: bool,
    pub(crate) queue_size: u64,
    /// Grain of zero detection; 0: do not check for zeroes.
    pub(crate) sparse: u32,
    pub(crate) sampled: bool,
    /// Reads that return holes are written like others.
    pub(crate) writes_holes: bool,
    pub(crate) allocated: bool,
    pub(crate) target_is_zero: bool,
    pub(crate) flush: bool,
    pub(crate) discard_source: bool,
    pub(crate) no_marker: bool,
    pub(crate) segment: u64,
    /// Separate writes start and end at multiples of this.
    pub(crate) grain: u64,
    rate: Arc<RateLimit>,
    /// The options include a rate, possibly without a limit at the moment.
    has_rate: bool,
    /// The rate does not limit this engine at the moment.
    ignores_rate: AtomicBool,
}

impl EffectiveOptions {
    pub(crate) fn new(
        options: &EngineOptions,
        source: &Arc<dyn Device>,
        target: &Arc<dyn Device>,
        pool: &Pool,
    ) -> EffectiveOptions {
        let from = source.facts();
        let to = target.facts();
        // As nbdcopy: at least what both sides prefer, and never more than their maximum.
        let wish = options.request_size.clamp(MIN_REQUEST, MAX_REQUEST);
        let preferred = from.block.preferred.max(to.block.preferred);
        let most = from.block.maximum.min(to.block.maximum).min(MAX_REQUEST);
        let most = u64::from(most).min(pool.limit());
        let request_size = u64::from(wish.max(preferred)).min(most).max(1);
        let minimum = u64::from(from.block.minimum.max(to.block.minimum).max(1));
        let request_size = (request_size - request_size % minimum).max(minimum);
        let alone = options.synchronous || keeps_one_handle(options, &from, &to);
        let connections = if alone { 1 } else { options.connections.max(1) };
        // If all lanes share one handle on both sides, more of them add nothing.
        let more = options.adaptive_connections && !alone;
        let connections_max =
            if more { connections.max(options.connections_max) } else { connections };
        // Copies on one machine wait only for its processors; more connections than processors only
        // make the servers' threads wait for each other.
        let processors = std::thread::available_parallelism().map_or(connections, usize::from);
        let connections_first =
            if more { connections.min(processors.max(LANES_FIRST_MIN)) } else { connections };
        // Zeroes are detected in blocks that the target can free.
        let sparse = match options.sparse {
            _ if options.allocated => 0,
            0 => 0,
            sparse => sparse.max(block(&to)),
        };
        EffectiveOptions {
            connections,
            connections_first,
            connections_max,
            multi_conn: options.multi_conn,
            requests: if options.synchronous { 1 } else { options.requests.max(1) },
            adaptive: options.adaptive,
            request_size,
            adaptive_size: options.adaptive_size && !options.synchronous,
            queue_size: options.queue_size.max(request_size),
            sparse,
            sampled: options.sampled,
            // As nbdcopy, which does not see that they were holes.
            writes_holes: options.zero_all && sparse == 0,
            allocated: options.allocated,
            target_is_zero: options.target_is_zero || (to.zeroed && !options.allocated),
            // What is not durable on the target must stay at the source.
            flush: options.flush || options.discard_source,
            discard_source: options.discard_source,
            no_marker: options.no_marker,
            grain: grain(options, &from, &to),
            segment: segment(options, from.size, connections_max, request_size)
                .max(u64::from(block(&to))),
            rate: options.rate.clone().unwrap_or_else(|| Arc::new(RateLimit::new(0, 0))),
            has_rate: options.rate.is_some(),
            ignores_rate: AtomicBool::new(false),
        }
    }

    /// Whether requests cover whole digest blocks, and everything read is also checked for zeroes,
    /// so that wider reads make no fewer holes.
    pub(crate) fn in_whole_blocks(&self) -> bool {
        let whole = |size: u64| size.is_multiple_of(crate::algorithm::BLOCK);
        whole(self.request_size) && whole(self.segment) && (self.sparse != 0 || self.allocated)
    }

    /// Whether there is a rate limit, or may be one later.
    pub(crate) fn is_limited(&self) -> bool {
        self.has_rate || self.rate.is_limited()
    }

    /// The limit for all lanes together.
    pub(crate) fn rate(&self) -> &Arc<RateLimit> {
        &self.rate
    }

    /// Starts requests without regard to the rate limit from now on, or not.
    pub(crate) fn ignore_rate(&self, ignores: bool) {
        self.ignores_rate.store(ignores, Ordering::Relaxed);
    }

    /// Waits until the rate limit admits a request of `bytes` bytes.
    pub(crate) async fn pace(&self, bytes: u64, stopped: impl Fn() -> bool) {
        if self.rate.is_limited() {
            let admitted = || stopped() || self.ignores_rate.load(Ordering::Relaxed);
            self.rate.take(bytes, admitted).await;
        }
    }
}

/// Whether a side has one handle only, as its facts advise and the user does not say otherwise. Each lane flushes when it
/// ends: a target that a flush publishes has one.
pub(crate) fn keeps_one_handle(options: &EngineOptions, from: &Facts, to: &Facts) -> bool {
    let is_chosen = !options.adaptive_connections || options.multi_conn == MultiConn::Always;
    to.flush_publishes || !is_chosen && (from.one_handle || to.one_handle)
}

/// The whole blocks of a range of a source that can be discarded, if there are any.
pub(crate) fn whole_blocks((start, end): SegmentRange, facts: &Facts) -> Option<SegmentRange> {
    let block = facts.block.preferred.min(GRAIN_MAX).max(facts.block.minimum).max(1);
    let block = u64::from(block);
    let reached = facts.size - u64::from(facts.tail);
    let start = start.checked_next_multiple_of(block)?;
    let end = if end >= reached { reached } else { end - end % block };
    (start < end).then_some((start, end))
}

/// The block in bytes in which the target is written: all of a unit that is compressed.
pub(crate) fn block(to: &Facts) -> u32 {
    let block = to.block.preferred.max(to.block.minimum).min(GRAIN_MAX);
    match to.compression {
        Compression::All(unit) => block.max(unit),
        Compression::None | Compression::Asked(_) => block,
    }
}

/// The alignment in bytes of zeroes and of wanted ranges.
fn grain(options: &EngineOptions, from: &Facts, to: &Facts) -> u64 {
    let block = block(to).max(to.block.minimum).max(from.block.minimum);
    let grain = u64::from(block).max(1);
    if options.digest.is_some() { grain.max(crate::algorithm::BLOCK) } else { grain }
}

/// Segment size in bytes: smaller than in the options if a disk has too few segments to keep all
/// connections busy until the end, but still many requests long.
fn segment(options: &EngineOptions, size: u64, connections: usize, request_size: u64) -> u64 {
    let most = options.segment.max(SEGMENT_MIN).next_power_of_two();
    let pieces = connections as u64 * SEGMENTS_PER_LANE;
    if !options.spread || connections == 1 || size / pieces >= most {
        return most;
    }
    let least = request_size.saturating_mul(REQUESTS_PER_SEGMENT).max(SEGMENT_MIN);
    (size / pieces).max(least).next_power_of_two().min(most)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_disks_have_work_for_all_connections() {
        let options = EngineOptions::default();
        let of = |size, connections| segment(&options, size, connections, 512 << 10);
        assert_eq!(of(1 << 40, 4), options.segment);
        assert_eq!(of(128 << 20, 4), 16 << 20);
        assert_eq!(of(128 << 20, 1), options.segment);
        assert_eq!(of(1 << 20, 4), 8 << 20);
        assert_eq!(of(0, 4), 8 << 20);
        let told = EngineOptions { spread: false, ..EngineOptions::default() };
        assert_eq!(segment(&told, 1 << 20, 4, 512 << 10), told.segment);
    }
}
