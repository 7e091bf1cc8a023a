//! `blocksize`: sets the advertised block sizes, the handling of requests that violate them, and
//! the requests that reach the device.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use blockhaul_block::{
    BASE_ALLOCATION, BlockSizes, ContextSet, Device, Error, Extents, Facts, FileRange, Hints, Kind,
    LeaseAccess, Op, PendingRequest, Reply, Request, RequestFlags, Result, emulate,
};
use blockhaul_catalog::{Layer, LayerKind, ParamKind, ParamValues};

use crate::declared::{layer, param, param_or, usage};
use crate::masked::{masked, whole_size};
use crate::scratch::ScratchMemory;

/// Longest piece of a read in bytes: what a reader may expect as one request of `maxdata`.
const PIECE_MAX: u64 = 1 << 20;
/// Pieces of a request before other requests get their turn.
const PIECES_AT_ONCE: usize = 64;

/// The layer `blocksize`.
pub static BLOCKSIZE: LayerKind = LayerKind {
    name: "blocksize",
    summary: "sets the block sizes that clients see, and splits requests to those of the device",
    manual:
        "The server advertises `minimum`, `preferred` and `maximum`. With `error-policy=error`, \
requests that violate minimum or maximum, or the block sizes of a plugin below, are refused \
(EINVAL); with `allow` they are served. Extents are reported in whole blocks of `minimum`. If the \
size of the device is not a multiple of `minimum`, the largest power of two that divides the size is \
advertised and enforced, because clients could not read the end otherwise.

`minblock`, `maxdata` and `maxlen` apply to the device: it gets reads, writes and cache hints of whole \
blocks of `minblock` bytes (partial blocks are read, changed and written back), in pieces of \
at most `maxdata` bytes, and other requests in pieces of at most `maxlen` bytes, whatever the \
client sends. If the size of the device is not a multiple of `minblock`, a warning says so, and the \
bytes after the last whole block are not accessible.",
    example: r#"
blockhaul serve --layer 'blocksize?minimum=4k&minblock=4k' memory:64M \
  --run 'blockhaul info "$uri"'
"#,
    needs_content: false,
    writes_below: true,
    transparent: true,
    params: &[
        param(
            "minimum",
            ParamKind::Size,
            "Minimum block size to advertise; a power of two, 1 to 64k.",
        ),
        param(
            "preferred",
            ParamKind::Size,
            "Preferred block size to advertise; a power of two, 512 to 32M.",
        ),
        param("maximum", ParamKind::Size, "Maximum size of reads and writes to advertise."),
        param_or(
            "error-policy",
            ParamKind::Choice(&["allow", "error"]),
            "allow",
            "What to do with requests that violate the advertised sizes.",
        ),
        param(
            "minblock",
            ParamKind::Size,
            "Minimum block size of requests to the device; a power of two \
                                            to 64k.",
        ),
        param(
            "maxdata",
            ParamKind::Size,
            "Maximum size of reads, writes and cache hints to the device [default: maxlen].",
        ),
        param("maxlen", ParamKind::Size, "Maximum size of other requests to the device."),
    ],
    changeable: &[],
    configure: |args| configure(args),
};

fn configure(args: &ParamValues) -> Result<Arc<dyn Layer>> {
    let limits = BlockSizeLimits::new(args)?;
    layer(move |inner| limits.wrap(inner))
}

#[derive(Clone)]
struct BlockSizeLimits {
    minimum: Option<u32>,
    preferred: Option<u32>,
    maximum: Option<u32>,
    refuse: bool,
    minblock: u32,
    maxdata: Option<u64>,
    maxlen: Option<u64>,
    /// The user was warned that the sizes do not fit that of the device.
    warned: Arc<AtomicBool>,
}

impl BlockSizeLimits {
    fn new(args: &ParamValues) -> Result<BlockSizeLimits> {
        let power = |name: &str, low: u64, high: u64| match args.size(name) {
            None => Ok(None),
            Some(size) if size.is_power_of_two() && (low..=high).contains(&size) => {
                Ok(u32::try_from(size).ok())
            }
            Some(size) => Err(usage(format!(
                "blocksize: {name}={size} must be a power of two from {low} to {high}"
            ))),
        };
        let limits = BlockSizeLimits {
            minimum: power("minimum", 1, 64 << 10)?,
            preferred: power("preferred", 512, 32 << 20)?,
            maximum: args.size("maximum").map(|size| u32::try_from(size).unwrap_or(u32::MAX)),
            refuse: args.text("error-policy") == Some("error"),
            minblock: power("minblock", 1, 64 << 10)?.unwrap_or(1),
            maxdata: args.size("maxdata"),
            maxlen: args.size("maxlen"),
            warned: Arc::default(),
        };
        let least = limits.minimum.unwrap_or(1);
        if limits.preferred.is_some_and(|preferred| preferred < least) {
            return Err(usage("blocksize: preferred is smaller than minimum"));
        }
        let blocks = limits.maximum.is_none_or(|most| {
            most == u32::MAX || (most >= least && most.is_multiple_of(least) && most > 0)
        });
        if !blocks {
            return Err(usage("blocksize: maximum must be a multiple of minimum"));
        }
        for (name, most) in [("maxdata", limits.maxdata), ("maxlen", limits.maxlen)] {
            let block = u64::from(limits.minblock);
            if most.is_some_and(|most| most < block || !most.is_multiple_of(block)) {
                return Err(usage(format!("blocksize: {name} must be a multiple of minblock")));
            }
        }
        Ok(limits)
    }

    fn wrap(&self, inner: Arc<dyn Device>) -> Result<Arc<dyn Device>> {
        let mut device = inner;
        if self.minblock > 1 {
            let block = device.facts().block;
            let maximum = block.maximum - block.maximum % self.minblock;
            let minimum = self.minblock.max(block.minimum);
            let size = whole_size(&device.facts(), minimum, "blocksize", &self.warned);
            device = masked(device, |facts| {
                facts.size = size;
                facts.block = BlockSizes { minimum, maximum: maximum.max(minimum), ..block };
            });
        }
        let below = device.facts();
        let most = u64::from(below.block.maximum);
        let maxdata = self.maxdata.or(self.maxlen).unwrap_or(most).min(most);
        if self.maxdata.is_some() || self.maxlen.is_some() {
            let maxlen = self.maxlen.unwrap_or(u64::MAX);
            let scratch = ScratchMemory::new(maxdata.min(PIECE_MAX));
            let mut kept = Hints::ZEROED
                | Hints::TAKES_PARKED
                | Hints::FLUSH_FAILURES_STAY
                | Hints::IN_FLIGHT
                | Hints::EXTENTS;
            // Reads in pieces take their buffer before the data arrives.
            kept.set(Hints::CLAIMS_ROOM, maxdata == most);
            let facts = Arc::new(Facts::over(&below).keeping(&below, kept));
            device = Arc::new(RequestSplitter { facts, inner: device, maxdata, maxlen, scratch });
        }
        // Partial blocks are emulated here, above the pieces.
        device = emulate::emulate(device);
        let mut facts = Facts::same(&device.facts());
        let silent = self.minimum.is_none() && self.preferred.is_none() && self.maximum.is_none();
        // The device's own advertised sizes are enforced as well.
        if silent && !(self.refuse && facts.advertised.is_some()) {
            return Ok(device);
        }
        let sizes = facts.advertised_or_own();
        let minimum = self.minimum.unwrap_or(sizes.minimum);
        let maximum = self.maximum.unwrap_or(sizes.maximum).max(minimum);
        let preferred = self.preferred.unwrap_or(sizes.preferred).max(minimum).max(512);
        let told = BlockSizes { minimum, preferred, maximum }.dividing(facts.size);
        if told.minimum < minimum && !self.warned.swap(true, Ordering::Relaxed) {
            let (name, size, told) = (&facts.name, facts.size, told.minimum);
            log::warn!(
                "blocksize: {name} advertises a minimum of {told}, not {minimum}: the size, {size} bytes, is not a \
                 multiple of {minimum}"
            );
        }
        let minimum = told.minimum;
        facts.advertised = Some(told);
        Ok(Arc::new(BlockSizeDevice {
            inner: device,
            facts: Arc::new(facts),
            minimum,
            maximum,
            refuse: self.refuse,
        }))
    }
}

/// Advertises block sizes, and enforces them if requested.
struct BlockSizeDevice {
    inner: Arc<dyn Device>,
    facts: Arc<Facts>,
    minimum: u32,
    maximum: u32,
    refuse: bool,
}

impl Device for BlockSizeDevice {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        let block = u64::from(self.minimum);
        if self.refuse {
            if !request.at.is_multiple_of(block) || !request.len.is_multiple_of(block) {
                let text = format!("offset and length must be multiples of {block} bytes");
                return Error::new(Kind::Invalid, text).into();
            }
            let payload = matches!(request.op, Op::Read(_) | Op::Write(_));
            if payload && request.len > u64::from(self.maximum) {
                let text = format!("longer than {} bytes", self.maximum);
                return Error::new(Kind::Invalid, text).into();
            }
        }
        match request.op {
            // Clients that comply with the block size ask on at the end of what they were told.
            Op::Extents(contexts) if block > 1 && request.at.is_multiple_of(block) => {
                let (inner, at, len, flags) =
                    (self.inner.clone(), request.at, request.len, request.flags);
                PendingRequest::start(async move {
                    let mut lists = Vec::with_capacity(contexts.count());
                    for index in contexts.iter() {
                        let mut list = in_blocks(&inner, (at, len), flags, index, block).await?;
                        if flags.contains(RequestFlags::ONE_EXTENT) {
                            list.first_only();
                        }
                        lists.push(list);
                    }
                    Ok(Reply::Extents(lists))
                })
            }
            _ => self.inner.submit(request),
        }
    }

    fn file_at(&self, at: u64, len: u64, access: LeaseAccess) -> Option<FileRange> {
        (!self.refuse).then(|| self.inner.file_at(at, len, access))?
    }
}

/// The extents in a context in whole blocks, but for the end of the range.
async fn in_blocks(
    inner: &Arc<dyn Device>,
    (at, len): (u64, u64),
    flags: RequestFlags,
    index: usize,
    block: u64,
) -> Result<Extents> {
    let is_base = inner.facts().contexts.get(index).is_some_and(|name| name == BASE_ALLOCATION);
    // A block is a hole or zero only if all of it is; in other contexts the highest state counts.
    let mixed = |one: u64, other: u64| if is_base { one & other } else { one.max(other) };
    let mut found = Extents::new();
    // At least the first block.
    while found.total() < len.min(block) {
        let (at, left) = (at.saturating_add(found.total()), len - found.total());
        let asked = Request::extents(at, left, ContextSet::empty().with(index)).with(flags);
        let Reply::Extents(lists) = inner.submit(asked).await? else { return Err(Error::misfit()) };
        let before = found.total();
        for run in lists.iter().flat_map(Extents::runs) {
            found.push(run.len.min(len - found.total()), run.state);
        }
        if found.total() == before {
            return Err(Error::misfit());
        }
    }
    let mut blocks = found.in_blocks(block, mixed);
    if found.total() == len {
        // The partial block at the end of the device.
        found.skip(blocks.total());
        let end = found.runs().iter().map(|run| run.state).reduce(mixed);
        blocks.push(found.total(), end.unwrap_or(0));
    }
    Ok(blocks)
}

/// The extents of pieces that follow each other, as far as the device reports whole pieces.
async fn extents_of_pieces(
    inner: &Arc<dyn Device>,
    contexts: ContextSet,
    flags: RequestFlags,
    pieces: impl Iterator<Item = (u64, u64)>,
) -> Result<Reply> {
    let mut all = Vec::new();
    for (at, len) in pieces {
        let asked = Request::extents(at, len, contexts).with(flags);
        let lists = match inner.submit(asked).await {
            Ok(Reply::Extents(lists)) => lists,
            Ok(_) => return Err(Error::misfit()),
            // What precedes the failure is right, and the caller gets the failure when it goes on.
            Err(_) if !all.is_empty() => break,
            Err(error) => return Err(error),
        };
        all.resize_with(lists.len(), Extents::new);
        for (all, list) in all.iter_mut().zip(&lists) {
            let end = all.total() + len;
            list.runs().iter().for_each(|run| all.push(run.len.min(end - all.total()), run.state));
        }
        if lists.iter().any(|list| list.total() < len) {
            break;
        }
    }
    Ok(Reply::Extents(all))
}

/// Splits requests into pieces.
struct RequestSplitter {
    inner: Arc<dyn Device>,
    facts: Arc<Facts>,
    maxdata: u64,
    maxlen: u64,
    scratch: ScratchMemory,
}

impl Device for RequestSplitter {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        // Some devices read what they are told to cache.
        let is_data = matches!(request.op, Op::Read(_) | Op::Write(_) | Op::Cache);
        let most = if is_data { self.maxdata } else { self.maxlen };
        let Request { op, at, len, flags } = request;
        if len <= most {
            return self.inner.submit(Request { op, at, len, flags });
        }
        let inner = self.inner.clone();
        let scratch = self.scratch.clone();
        // The pieces: offset in the request, and length.
        let pieces = move || (0..len).step_by(most as usize).map(move |s| (s, most.min(len - s)));
        match op {
            Op::Extents(_) if flags.contains(RequestFlags::ONE_EXTENT) => {
                inner.submit(Request { op, at, len: most, flags })
            }
            Op::Extents(contexts) => PendingRequest::start(async move {
                // The caller requests the rest again.
                let pieces = pieces().take(PIECES_AT_ONCE);
                let pieces = pieces.map(|(start, len)| (at + start, len));
                extents_of_pieces(&inner, contexts, flags, pieces).await
            }),
            Op::Read(room) => PendingRequest::start(async move {
                let mut buf = room.into_buf();
                // Pieces of the scratch memory are no longer than `maxdata`.
                if scratch.fill_ahead(&inner, at, &mut buf).await? {
                    Ok(Reply::Data(buf.into()))
                } else {
                    Ok(Reply::Hole)
                }
            }),
            op => PendingRequest::start(async move {
                let mut flags = flags;
                for (index, (start, len)) in pieces().enumerate() {
                    // The device may complete at once, and there may be very many pieces.
                    if index % PIECES_AT_ONCE == PIECES_AT_ONCE - 1 {
                        blockhaul_io::yield_now().await;
                    }
                    let op = match &op {
                        Op::Write(data) => Op::Write(data.slice(start as usize, len as usize)),
                        Op::Zero => Op::Zero,
                        Op::Trim => Op::Trim,
                        _ => Op::Cache,
                    };
                    inner.submit(Request { op, at: at + start, len, flags }).await?;
                    // Once a part has been zeroed fast, the request must not fail any more.
                    flags -= RequestFlags::FAST;
                }
                Ok(Reply::Done)
            }),
        }
    }

    fn file_at(&self, at: u64, len: u64, access: LeaseAccess) -> Option<FileRange> {
        self.inner.file_at(at, len, access)
    }
}
