//! The measurements: throughput over request size, requests in flight and connections; latency of
//! single requests; what a question for extents and a flush cost.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use blockhaul_block::{
    BASE_ALLOCATION, Can, Device, DeviceExt as _, Error, Kind, Request, Result, ZERO,
};
use blockhaul_catalog::Stack;
use blockhaul_io::{Data, Pool, WorkerHandle};

use super::findings::{
    Advice, ExtentQueryCost, Findings, LatencySummary, SettingsResult, advise, fastest, median,
};
use super::schedule::{Schedule, in_order};

/// Sizes that are tried, as far as the device takes them: those that a copy would use.
const SIZES: [u64; 4] = [64 << 10, 256 << 10, 1 << 20, 4 << 20];
/// Requests in flight on a connection that are tried.
const REQUESTS: [usize; 5] = [1, 4, 16, 64, 256];
/// Connections that are tried.
const CONNECTIONS: [usize; 6] = [1, 2, 4, 8, 16, 32];
/// Maximum number of connections to try if none is given.
const CONNECTIONS_MAX: usize = 8;
/// Number of settings that are measured again, besides the defaults.
const CANDIDATES: usize = 3;
/// Number of times that these are measured, one after the other and around again.
const ROUNDS: usize = 3;
/// Bytes in flight; what would need more is left out.
const MEMORY: u64 = 128 << 20;
/// Bytes that are read to be written back.
const WORK_AREA: u64 = 64 << 20;
/// Bytes of a request for latency.
const SMALL: u64 = 4096;
/// Single requests that are timed, at most.
const SINGLES_MAX: usize = 20_000;
/// Bytes of a question for extents: less than 4 GiB, so that it fits requests of 32 bits.
const QUERY: u64 = 2 << 30;
/// Questions for extents that are asked to find where data is.
const QUERIES_MAX: usize = 256;

/// What may be tried.
pub(super) struct ProbeLimits {
    pub time: Duration,
    pub write: bool,
    /// `None`: 8, or 1 where the device advises against more.
    pub connections: Option<usize>,
    pub requests: usize,
}

/// Measures all of it within the time. Call it on a worker.
pub(super) async fn measure(stack: &Stack, limits: &ProbeLimits) -> Result<Findings> {
    let started = Instant::now();
    let mut schedule = Schedule::new(limits.time);
    let share = |part: f64| limits.time.mul_f64(part);
    let facts = stack.device().facts();
    let grain = u64::from(facts.block.minimum).max(SMALL);
    if facts.size < u64::from(facts.block.minimum) || facts.size == 0 {
        return Err(Error::new(Kind::Usage, "the device is empty; there is nothing to measure"));
    }
    let mapping = map(stack.device().as_ref(), share(0.1));
    let (extents, ranges) = schedule.wait("a question for extents", mapping).await?;
    let only_zeroes = ranges.is_empty();
    let ranges = if only_zeroes { vec![(0, facts.size)] } else { ranges };
    let ranges = Arc::new(ReadRanges::new(ranges, grain, facts.size));
    let small = grain.min(facts.size);
    let single = singles(share(0.08), |number| {
        let at = ranges.place(number, small);
        let reading = stack.device().read(at, small as usize);
        async move { reading.await.map(drop) }
    });
    let read_latency = schedule.wait("a small read", single).await?;
    let work = if limits.write {
        Some(area_to_write(stack.device().as_ref(), share(0.1), &mut schedule).await?)
    } else {
        None
    };
    let mut written = WriteLatencies::default();
    if let Some(area) = &work {
        let data = area.slice(0, (small as usize).min(area.len()));
        written = write_latencies(stack, &data, &mut schedule, limits.time).await?;
    }
    let handles = handles(stack, lanes(stack, limits)).await?;
    let settings = settings(&facts, handles.len(), limits.requests);
    let directions = if work.is_some() { 2 } else { 1 };
    let again = (CANDIDATES + 1) * ROUNDS;
    schedule.plan((settings.len() + again) * directions);
    let (mut reading, mut writing) =
        sweep(&handles, settings, &ranges, work.as_ref(), &mut schedule).await?;
    let defaults = defaults(&facts, handles.len());
    let own_connections = stack.has_more();
    let of = Candidates { handles: &handles, defaults, own_connections };
    let reading_advice =
        of.advice(&mut schedule, &reading, ProbeWork::Read(ranges.clone())).await?;
    let writing_advice = match &work {
        Some(area) => of.advice(&mut schedule, &writing, ProbeWork::Write(area.clone())).await?,
        None => None,
    };
    sort_for_people(&mut reading);
    sort_for_people(&mut writing);
    Ok(Findings {
        device: String::new(),
        size: facts.size,
        minimum_block: facts.block.minimum,
        maximum_request: facts.block.maximum,
        own_connections,
        multi_conn: facts.can.contains(Can::MULTI_CONN),
        data_bytes: if only_zeroes { 0 } else { ranges.bytes() },
        only_zeroes,
        took_s: started.elapsed().as_secs_f64(),
        left_out: schedule.left_out,
        read_latency,
        write_latency: written.write,
        flush_latency: written.flush,
        extents,
        reading_advice,
        writing_advice,
        reading,
        writing,
    })
}

/// The number of connections to try; one handle is used by as many threads as a copy would use for it.
fn lanes(stack: &Stack, limits: &ProbeLimits) -> usize {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let usual = if stack.device().facts().one_handle { 1 } else { CONNECTIONS_MAX };
    let most = limits.connections.unwrap_or(usual);
    if stack.has_more() { most } else { processors.min(most) }
}

/// What the beginning of a device holds, which is written back.
async fn area_to_write(
    device: &dyn Device,
    time: Duration,
    schedule: &mut Schedule,
) -> Result<Data> {
    let facts = device.facts();
    if !facts.can.contains(Can::WRITE) {
        return Err(Error::new(Kind::ReadOnly, "the device cannot be written"));
    }
    schedule.wait("a read", read_area(device, facts.size, time)).await
}

/// Sorts points as people read them.
fn sort_for_people(points: &mut [SettingsResult]) {
    points.sort_by_key(|point| (point.request_size, point.requests, point.connections));
}

/// What single writes take.
#[derive(Default)]
struct WriteLatencies {
    write: Option<LatencySummary>,
    /// With a write before each flush.
    flush: Option<LatencySummary>,
}

/// Times single writes of `data`, and flushes after them if the device supports flushes.
async fn write_latencies(
    stack: &Stack,
    data: &Data,
    schedule: &mut Schedule,
    time: Duration,
) -> Result<WriteLatencies> {
    let single = singles(time.mul_f64(0.05), |_| stack.device().write(0, data.clone()));
    let write = schedule.wait("a small write", single).await?;
    if !stack.device().facts().can.contains(Can::FLUSH) {
        return Ok(WriteLatencies { write, flush: None });
    }
    let single = singles(time.mul_f64(0.07), |_| {
        let writing = stack.device().write(0, data.clone());
        async move {
            writing.await?;
            stack.device().flush().await
        }
    });
    Ok(WriteLatencies { write, flush: schedule.wait("a flush", single).await? })
}

/// Measures each of the settings for which there is time: reading, and writing if there is a `work`
/// area.
async fn sweep(
    handles: &[Arc<dyn Device>],
    settings: Vec<SettingsResult>,
    ranges: &Arc<ReadRanges>,
    work: Option<&Data>,
    schedule: &mut Schedule,
) -> Result<(Vec<SettingsResult>, Vec<SettingsResult>)> {
    let mut reading = Vec::new();
    let mut writing = Vec::new();
    for point in in_order(settings) {
        if let Some(time) = schedule.next(&point, &reading) {
            let running = run(handles, point, ProbeWork::Read(ranges.clone()), time);
            reading.push(schedule.wait("reading", running).await?);
        }
        if let Some(area) = work
            && point.request_size <= area.len() as u64
            && let Some(time) = schedule.next(&point, &writing)
        {
            let running = run(handles, point, ProbeWork::Write(area.clone()), time);
            writing.push(schedule.wait("writing", running).await?);
        }
    }
    Ok((reading, writing))
}

type Range = (u64, u64);

/// Where data is: all of the device, if it reports no extents.
async fn map(device: &dyn Device, time: Duration) -> Result<(Option<ExtentQueryCost>, Vec<Range>)> {
    let facts = device.facts();
    let contexts = facts.context(BASE_ALLOCATION);
    let Some(contexts) = contexts.filter(|_| facts.can.contains(Can::EXTENTS)) else {
        return Ok((None, vec![(0, facts.size)]));
    };
    let started = Instant::now();
    let mut at = 0;
    let mut extents = 0;
    let mut times: Vec<Duration> = Vec::new();
    let mut ranges: Vec<Range> = Vec::new();
    // One in any case, or it would look as if there were nothing but zeroes.
    while at < facts.size
        && times.len() < QUERIES_MAX
        && (times.is_empty() || started.elapsed() < time)
    {
        let asked = Instant::now();
        let lists = device.extents(at, QUERY.min(facts.size - at), contexts).await?;
        times.push(asked.elapsed());
        let list = lists.into_iter().next().unwrap_or_default();
        extents += list.len() as u64;
        ranges.extend(
            list.ranges(at).filter(|(_, run)| run.state & ZERO == 0).map(|(at, run)| (at, run.len)),
        );
        at += list.total();
    }
    let latency = LatencySummary::of(times);
    let questions = latency.map(|latency| ExtentQueryCost { latency, covered: at, extents });
    Ok((questions, ranges))
}

/// Ranges that are read, one after the other and around again.
struct ReadRanges {
    /// Start in the device, start in the row of all ranges.
    parts: Vec<(u64, u64)>,
    total: u64,
    grain: u64,
    size: u64,
}

impl ReadRanges {
    fn new(ranges: Vec<Range>, grain: u64, size: u64) -> ReadRanges {
        let mut total = 0;
        let mut parts = Vec::with_capacity(ranges.len());
        for (at, len) in ranges {
            parts.push((at, total));
            total += len;
        }
        ReadRanges { parts, total: total.max(1), grain, size }
    }

    fn bytes(&self) -> u64 {
        self.total
    }

    /// Where request number `number` of `len` bytes starts: aligned, and inside of the device.
    fn place(&self, number: u64, len: u64) -> u64 {
        let wanted = number.wrapping_mul(len) % self.total;
        let part = self.parts.partition_point(|(_, start)| *start <= wanted).saturating_sub(1);
        let (at, start) = self.parts[part];
        let last = self.size.saturating_sub(len) / self.grain;
        ((at + (wanted - start)) / self.grain).min(last) * self.grain
    }
}

/// Times one request after the other.
async fn singles<F>(
    time: Duration,
    mut request: impl FnMut(u64) -> F,
) -> Result<Option<LatencySummary>>
where
    F: Future<Output = Result<()>>,
{
    let started = Instant::now();
    let mut times = Vec::new();
    while times.is_empty() || (times.len() < SINGLES_MAX && started.elapsed() < time) {
        let asked = Instant::now();
        request(times.len() as u64).await?;
        times.push(asked.elapsed());
    }
    Ok(LatencySummary::of(times))
}

/// The beginning of a device, which is written back: whole blocks, as much as can be read in the time.
async fn read_area(device: &dyn Device, size: u64, time: Duration) -> Result<Data> {
    let started = Instant::now();
    let block = u64::from(device.facts().block.minimum);
    let len = WORK_AREA.min(size) / block * block;
    let mut bytes = Vec::with_capacity(len as usize);
    while (bytes.len() as u64) < len && (bytes.is_empty() || started.elapsed() < time) {
        let part = (len - bytes.len() as u64).min(1 << 20);
        bytes.extend_from_slice(device.read(bytes.len() as u64, part as usize).await?.bytes());
    }
    Ok(Data::copy_of(&bytes))
}

/// A handle for each connection, on the worker that will use it.
async fn handles(stack: &Stack, count: usize) -> Result<Vec<Arc<dyn Device>>> {
    let mut handles = Vec::new();
    for number in 0..count {
        if number == 0 || !stack.has_more() {
            handles.push(stack.device().clone());
            continue;
        }
        let stack = stack.clone();
        let opened =
            WorkerHandle::to(number).spawn(move || async move { stack.another().await }).await;
        match opened {
            Ok(Ok(handle)) => handles.push(handle),
            // A server may limit its clients: what there is is measured.
            Ok(Err(error)) => {
                log::warn!("connection {}: {error}; measuring with {number}", number + 1);
                break;
            }
            Err(_) => return Err(Error::new(Kind::Io, "a worker ended")),
        }
    }
    Ok(handles)
}

/// All combinations that fit the device and the memory.
fn settings(
    facts: &blockhaul_block::Facts,
    handles: usize,
    most_requests: usize,
) -> Vec<SettingsResult> {
    let block = u64::from(facts.block.minimum).max(SMALL);
    let largest = u64::from(facts.block.maximum).min(facts.size / block * block);
    let mut sizes: Vec<u64> = SIZES.into_iter().filter(|size| *size <= largest).collect();
    if sizes.is_empty() {
        sizes.push(largest.max(facts.size.min(block)));
    }
    let mut all = Vec::new();
    for request_size in sizes {
        for requests in REQUESTS.into_iter().filter(|n| *n <= most_requests) {
            for connections in CONNECTIONS.into_iter().filter(|n| *n <= handles) {
                if request_size * (requests * connections) as u64 <= MEMORY {
                    let bytes_per_second = 0.0;
                    let cpu_s_per_gib = 0.0;
                    all.push(SettingsResult {
                        request_size,
                        requests,
                        connections,
                        bytes_per_second,
                        cpu_s_per_gib,
                    });
                }
            }
        }
    }
    all
}

/// What a copy uses without options, as far as the device accepts it. A copy changes the number of
/// connections while it runs; this is the number that it starts with.
fn defaults(facts: &blockhaul_block::Facts, handles: usize) -> SettingsResult {
    let options = blockhaul_engine::EngineOptions::default();
    let block = u64::from(facts.block.minimum).max(1);
    let largest = u64::from(facts.block.maximum).min(facts.size);
    let request_size = u64::from(options.request_size).min(largest);
    let connections = options.connections.min(handles).max(1);
    let memory = (MEMORY / (request_size.max(1) * connections as u64)).max(1) as usize;
    SettingsResult {
        request_size: (request_size - request_size % block).max(block),
        requests: options.requests.min(memory),
        connections,
        bytes_per_second: 0.0,
        cpu_s_per_gib: 0.0,
    }
}

/// Settings that are compared with the defaults of a copy.
struct Candidates<'a> {
    handles: &'a [Arc<dyn Device>],
    defaults: SettingsResult,
    own_connections: bool,
}

impl Candidates<'_> {
    /// Measures the fastest of `points` and the defaults several times, in turn, so that a
    /// disturbance meets all of them. `None` if nothing was measured.
    async fn advice(
        &self,
        schedule: &mut Schedule,
        points: &[SettingsResult],
        work: ProbeWork,
    ) -> Result<Option<Advice>> {
        let mut settings = vec![self.defaults];
        settings.extend(fastest(points, CANDIDATES));
        let mut measured = vec![Vec::new(); settings.len()];
        for _ in 0..ROUNDS {
            for (point, measured) in settings.iter().zip(&mut measured) {
                let Some(time) = schedule.next(point, points) else { continue };
                let running = run(self.handles, *point, work.clone(), time);
                measured.push(schedule.wait("a repeated measurement", running).await?);
            }
        }
        let mut medians = measured.into_iter().map(median);
        let defaults = medians.next().flatten();
        let again: Vec<_> = medians.flatten().collect();
        // A slow device has no time for more than one measurement.
        let points = if again.is_empty() { points } else { &again[..] };
        Ok(advise(points, defaults, self.own_connections))
    }
}

#[derive(Clone)]
enum ProbeWork {
    Read(Arc<ReadRanges>),
    Write(Data),
}

/// What the connections of one combination share.
#[derive(Clone)]
struct ProbeState {
    work: ProbeWork,
    /// The number of the next request.
    next: Arc<AtomicU64>,
    pool: Pool,
    deadline: Instant,
}

/// Keeps a device busy with one combination for a while.
async fn run(
    handles: &[Arc<dyn Device>],
    point: SettingsResult,
    work: ProbeWork,
    time: Duration,
) -> Result<SettingsResult> {
    let point = SettingsResult { connections: point.connections.min(handles.len()), ..point };
    let started = Instant::now();
    let shared = ProbeState {
        work,
        next: Arc::new(AtomicU64::new(0)),
        pool: Pool::new(2 * MEMORY),
        deadline: started + time.max(Duration::from_millis(5)),
    };
    let cpu_before = blockhaul_os::processor_time(std::process::id()).unwrap_or_default();
    let mut lanes = Vec::new();
    for (number, handle) in handles.iter().take(point.connections).enumerate() {
        let handle = handle.clone();
        let shared = shared.clone();
        lanes.push(
            WorkerHandle::to(number)
                .spawn(move || async move { lane(handle, point, shared).await }),
        );
    }
    let mut bytes = 0;
    let mut result = Ok(());
    for lane in lanes {
        match lane.await {
            Ok(Ok(moved)) => bytes += moved,
            Ok(Err(error)) => result = result.and(Err(error)),
            Err(lost) => {
                let text = format!("a worker ended: {lost:?}");
                result = result.and(Err(Error::new(Kind::Io, text)));
            }
        }
    }
    result?;
    let took = started.elapsed().as_secs_f64();
    let cpu = blockhaul_os::processor_time(std::process::id())
        .unwrap_or_default()
        .saturating_sub(cpu_before);
    Ok(SettingsResult {
        bytes_per_second: bytes as f64 / took,
        cpu_s_per_gib: cpu.as_secs_f64() / (bytes.max(1) as f64 / f64::from(1 << 30)),
        ..point
    })
}

/// One connection: as many tasks as requests in flight, each with one request after the other.
async fn lane(handle: Arc<dyn Device>, point: SettingsResult, shared: ProbeState) -> Result<u64> {
    let moved = Rc::new(Cell::new(0));
    let tasks: Vec<_> = (0..point.requests)
        .map(|_| {
            let handle = handle.clone();
            let ProbeState { work, next, pool, deadline } = shared.clone();
            let moved = moved.clone();
            blockhaul_io::start(async move {
                // At least one each, so that a slow device is measured, too.
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    let len =
                        one(handle.as_ref(), &work, number, point.request_size, &pool).await?;
                    moved.set(moved.get() + len);
                    if Instant::now() >= deadline {
                        return Ok::<(), Error>(());
                    }
                }
            })
        })
        .collect();
    let mut result = Ok(());
    for task in tasks {
        // After an error what is out is awaited, too.
        result = result.and(task.await);
    }
    result.map(|()| moved.get())
}

async fn one(
    device: &dyn Device,
    work: &ProbeWork,
    number: u64,
    len: u64,
    pool: &Pool,
) -> Result<u64> {
    match work {
        ProbeWork::Read(ranges) => {
            let room = pool.reserve(len as usize).await;
            let room = room.map_err(|error| Error::new(Kind::Io, error.to_string()))?;
            device.submit(Request::read(ranges.place(number, len), room)).await?;
        }
        ProbeWork::Write(area) => {
            let slots = (area.len() as u64 / len).max(1);
            let at = number % slots * len;
            let len = (area.len() as u64 - at).min(len);
            device.write(at, area.slice(at as usize, len as usize)).await?;
            return Ok(len);
        }
    }
    Ok(len)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_lie_in_the_ranges_and_in_the_device() {
        let ranges = ReadRanges::new(vec![(1 << 20, 1 << 16), (8 << 20, 1 << 16)], 4096, 16 << 20);
        let places: Vec<u64> = (0..4).map(|number| ranges.place(number, 1 << 16)).collect();
        assert_eq!(places, [1 << 20, 8 << 20, 1 << 20, 8 << 20]);
        let odd = ReadRanges::new(vec![(0, 10_001)], 4096, 10_001);
        for number in 0..100 {
            let at = odd.place(number, 4096);
            assert!(at.is_multiple_of(4096) && at + 4096 <= 10_001, "{at}");
        }
    }

    #[test]
    fn latencies_are_percentiles() {
        let times = (1..=101).rev().map(Duration::from_micros).collect();
        let found = LatencySummary::of(times).unwrap();
        assert_eq!((found.median_us.round(), found.p90_us.round()), (51.0, 91.0));
        assert_eq!((found.p99_us.round(), found.max_us.round()), (100.0, 101.0));
        assert_eq!(LatencySummary::of(Vec::new()), None);
    }
}
