//! `split:DEVICE,DEVICE…`: concatenates devices.

use std::ffi::OsStr;
use std::sync::Arc;

use blockhaul_block::{
    BASE_ALLOCATION, Can, ContextSet, Device, Error, Extents, Facts, Kind, Op, PendingRequest,
    Reply, Request, RequestFlags, Result, emulate,
};
use blockhaul_catalog::{
    Backend, BackendTarget, CompositeStorage, DeviceSpec, Intent, OpenFuture, OpenedDevice,
    percent_decode,
};
use blockhaul_io::{Pool, Reservation};

/// Longest piece of a read that crosses the end of a part, and how many are read at a time.
const PIECE: usize = 256 << 10;
const PIECES: u64 = 8;
/// Number of runs that is enough for one reply.
const RUNS_MAX: usize = 64 << 10;
/// Maximum number of parts: each needs a descriptor.
const PARTS_MAX: usize = 512;

/// The backend `split:DEVICE,DEVICE…`.
pub struct SplitBackend;

impl Backend for SplitBackend {
    fn schemes(&self) -> &'static [&'static str] {
        &["split"]
    }

    fn operand(&self) -> &'static str {
        "DEVICE,DEVICE…"
    }

    fn summary(&self) -> &'static str {
        "several files or other devices, concatenated: paths, or devices in the notation of the command \
         line, where %2c is a comma and %25 a percent sign"
    }

    fn example(&self) -> &'static str {
        r#"
blockhaul copy sample:8M 1.raw && blockhaul copy sample:8M 2.raw
blockhaul copy split:1.raw,2.raw disk.raw
blockhaul copy 'split:1.raw,zero:1M,data:0x55*512?size=1M' longer.raw
"#
    }

    fn raw(&self) -> bool {
        true
    }

    fn open(&self, target: BackendTarget) -> OpenFuture<OpenedDevice> {
        Box::pin(async move { open(&target).await })
    }
}

async fn open(target: &BackendTarget) -> Result<OpenedDevice> {
    let text = target.text()?;
    if target.intent.target_size.is_some() {
        let text = "split: cannot be resized for a copy: copy to a file, or serve it";
        return Err(Error::new(Kind::Usage, text));
    }
    let mut parts = Vec::new();
    let whole = CompositeStorage::default();
    let mut all_paths = true;
    for name in text.split(',').filter(|name| !name.is_empty()) {
        if parts.len() == PARTS_MAX {
            return Err(Error::new(Kind::Usage, format!("split: more than {PARTS_MAX} files")));
        }
        let description = percent_decode(name)?;
        all_paths &= is_path(&description);
        parts.push(part("split", (parts.len() + 1, &whole), &description, target).await?);
    }
    if parts.is_empty() {
        return Err(Error::new(Kind::Usage, "split: requires files: split:FILE,FILE"));
    }
    let what = if all_paths { "files" } else { "devices" };
    join("split", format!("split of {} {what}", parts.len()), parts)
}

/// Whether a description is a bare path.
pub fn is_path(description: &str) -> bool {
    matches!(DeviceSpec::parse(OsStr::new(description)), Ok(DeviceSpec::Path(_)))
}

/// Opens a part of `target` by its own description, with all emulations: the part of this number,
/// from 1 on. Two parts must not write one storage. `scheme` is for messages; those about files
/// already contain the name.
///
/// # Errors
/// Those of opening the part, which name its number.
pub async fn part(
    scheme: &str,
    (number, whole): (usize, &CompositeStorage),
    description: &str,
    target: &BackendTarget,
) -> Result<Arc<dyn Device>> {
    // Parts have fixed places.
    let intent = Intent { extends: false, ..target.intent };
    let context = target.context.for_part(whole, format!("part {number}"));
    let opened = context.open(description, intent).await.map_err(|error| {
        if is_path(description) {
            return error;
        }
        let why = error.located();
        error.reworded(format!("{scheme}: part {number}, {description}: {why}"))
    });
    Ok(emulate::emulate(opened?.device))
}

/// Concatenates devices under a name; the result has the abilities that all of them have. `scheme`
/// is for messages.
///
/// # Errors
/// [`Kind::Usage`] if the sum of the sizes exceeds 2^63 - 1 bytes.
pub fn join(scheme: &str, name: String, devices: Vec<Arc<dyn Device>>) -> Result<OpenedDevice> {
    let mut parts = Vec::with_capacity(devices.len());
    let mut size = 0_u64;
    for device in devices {
        let facts = device.facts();
        let base = facts.context(BASE_ALLOCATION).unwrap_or_else(ContextSet::first);
        let end = size.checked_add(facts.size).filter(|&end| i64::try_from(end).is_ok());
        let end = end.ok_or_else(|| {
            Error::new(Kind::Usage, format!("{scheme}: more than 2^63 - 1 bytes"))
        })?;
        parts.push(SplitPart { device, start: size, end, base });
        size = end;
    }
    let mut facts = Facts::new(name, size);
    facts.can = Can::all();
    facts.contexts = vec![BASE_ALLOCATION.to_string()];
    for part in &parts {
        let below = part.device.facts();
        facts.can &= below.can;
        facts.emulated |= below.emulated;
        facts.withheld |= below.withheld;
        facts.block.maximum = facts.block.maximum.min(below.block.maximum);
        facts.rotational |= below.rotational;
        facts.one_handle |= below.one_handle;
        facts.files.extend_from_slice(&below.files);
        facts.allocation_unit = facts.allocation_unit.min(below.allocation_unit);
    }
    facts.emulated &= facts.can;
    facts.withheld &= facts.can;
    // Drop empty parts.
    parts.retain(|part| part.start < part.end);
    let shared = SplitParts { parts, pool: Pool::new(Pool::cost(PIECE) * PIECES) };
    let device = SplitDevice { facts: Arc::new(facts), shared: Arc::new(shared) };
    Ok(OpenedDevice::from(Arc::new(device) as Arc<dyn Device>))
}

struct SplitDevice {
    facts: Arc<Facts>,
    shared: Arc<SplitParts>,
}

struct SplitParts {
    /// In order, without gaps, none of them empty.
    parts: Vec<SplitPart>,
    pool: Pool,
}

struct SplitPart {
    device: Arc<dyn Device>,
    start: u64,
    end: u64,
    base: ContextSet,
}

impl Device for SplitDevice {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        let shared = self.shared.clone();
        let Request { op, at, len, flags } = request;
        if matches!(op, Op::Flush) {
            return PendingRequest::start(async move { shared.flush().await });
        }
        let first = shared.parts.partition_point(|part| part.end <= at);
        let Some(part) = shared.parts.get(first) else {
            return Error::new(Kind::Invalid, "beyond the end").into();
        };
        let inside = part.end - at;
        match op {
            // With one extent, it ends with its part.
            Op::Extents(_) if len <= inside || flags.contains(RequestFlags::ONE_EXTENT) => {
                let asked = Request::extents(at - part.start, len.min(inside), part.base);
                part.device.submit(asked.with(flags))
            }
            Op::Extents(_) => {
                PendingRequest::start(async move { shared.extents(at, at + len).await })
            }
            op if len <= inside => {
                part.device.submit(Request { op, at: at - part.start, len, flags })
            }
            Op::Read(room) => PendingRequest::start(async move { shared.read(at, room).await }),
            op => PendingRequest::start(async move {
                let mut flags = flags;
                for (part, from, to) in shared.within(at, at + len) {
                    let op = match &op {
                        Op::Write(data) => {
                            Op::Write(data.slice((from - at) as usize, (to - from) as usize))
                        }
                        Op::Zero => Op::Zero,
                        Op::Trim => Op::Trim,
                        _ => Op::Cache,
                    };
                    let request = Request { op, at: from - part.start, len: to - from, flags };
                    part.device.submit(request).await?;
                    // Once a part has been zeroed fast, the request must not fail any more.
                    flags -= RequestFlags::FAST;
                }
                Ok(Reply::Done)
            }),
        }
    }
}

impl SplitParts {
    /// The parts of a range: the part, and the start and end offsets in the device.
    fn within(&self, at: u64, end: u64) -> impl Iterator<Item = (&SplitPart, u64, u64)> {
        let first = self.parts.partition_point(|part| part.end <= at);
        let touching = self.parts[first..].iter().take_while(move |part| part.start < end);
        touching.map(move |part| (part, part.start.max(at), part.end.min(end)))
    }

    async fn flush(&self) -> blockhaul_block::Outcome {
        let out: Vec<_> =
            self.parts.iter().map(|part| part.device.submit(Request::flush())).collect();
        let mut failed = None;
        for flush in out {
            if let Err(error) = flush.await {
                failed.get_or_insert(error);
            }
        }
        failed.map_or(Ok(Reply::Done), Err)
    }

    /// Extents of several parts in one list; ends early where a part's list is short.
    async fn extents(&self, at: u64, end: u64) -> blockhaul_block::Outcome {
        let mut all = Extents::new();
        for (part, from, to) in self.within(at, end) {
            let asked = Request::extents(from - part.start, to - from, part.base);
            let lists = match part.device.submit(asked).await {
                Ok(Reply::Extents(lists)) => lists,
                // Return what is known; the error recurs when the rest is requested.
                Err(_) if !all.is_empty() => break,
                other => return other,
            };
            lists.first().into_iter().flat_map(Extents::runs).for_each(|run| {
                all.push(run.len.min(to - at - all.total()), run.state);
            });
            if at + all.total() < to || all.len() >= RUNS_MAX {
                break;
            }
        }
        Ok(Reply::Extents(vec![all]))
    }

    async fn read(&self, at: u64, room: Reservation) -> blockhaul_block::Outcome {
        let mut buf = room.into_buf();
        let end = at + buf.len() as u64;
        let mut zero = true;
        for (part, from, to) in self.within(at, end) {
            let mut next = from;
            for piece in buf[(from - at) as usize..(to - at) as usize].chunks_mut(PIECE) {
                let room = self.pool.reserve(piece.len()).await.map_err(|error| {
                    Error::new(Kind::NoMemory, "no scratch memory").because(error)
                })?;
                match part.device.submit(Request::read(next - part.start, room)).await? {
                    Reply::Data(found) => {
                        piece.copy_from_slice(found.bytes());
                        zero = false;
                    }
                    _ => piece.fill(0),
                }
                next += piece.len() as u64;
            }
        }
        Ok(if zero { Reply::Hole } else { Reply::Data(buf.into()) })
    }
}
