//! `blockhaul bench load`: keeps an NBD server busy, at less cost than the server, and reports the
//! results. The same seed gives the same requests, so that servers can be compared.
//!
//! - `lane`: one connection. `pattern`: request offsets. `histogram`: request times.
//! - `work`: the kinds of requests. `report`: the output.

mod histogram;
mod lane;
mod pattern;
mod report;
mod work;

use std::ffi::OsString;
use std::sync::Arc;
use std::time::{Duration, Instant};

use blockhaul_block::{Error as BlockError, Kind};
use blockhaul_catalog::{DeviceSpec, parse_size};
use blockhaul_client::options::ConnectTarget;
use blockhaul_client::{BareConnection, ServerAddress, ServerProcess};
use blockhaul_io::{
    Completer, IoEngine, LostCompletion, Runtime, RuntimeConfig, Ticket, WorkerHandle,
};
use blockhaul_wire::ExportFlags;
use blockhaul_wire::handshake::client::ClientHandshakeResult;
use clap::{ArgGroup, Args as ClapArgs};

use crate::error::{MeasureError, Result};
use crate::{DeviceContext, parse_time};
use lane::{LoadEnd, Tally};
use work::LoadWork;

use report::LoadReport;
use work::AccessOrder;

/// Options of `blockhaul bench load`.
#[derive(Debug, ClapArgs)]
#[command(group = ArgGroup::new("kind").args(["read", "write", "mix"]))]
#[command(group = ArgGroup::new("until").args(["time", "count"]))]
pub struct LoadArgs {
    /// NBD server to measure: its URI, or [ CMD ARG… ] to start one
    #[arg(value_name = "DEVICE")]
    device: OsString,

    /// Send reads (the default)
    #[arg(long)]
    read: bool,

    /// Send writes; the data of the device, or of --span, is lost
    #[arg(long)]
    write: bool,

    /// Send this percentage of reads, and writes; the data of the device, or of --span, is lost
    #[arg(long, value_name = "PERCENT", value_parser = crate::count::<u8>(1, 99))]
    mix: Option<u8>,

    /// Size of a request
    #[arg(long, alias = "request-size", value_name = "SIZE", default_value = "4k", value_parser = request_size)]
    size: u64,

    /// Requests in flight on each connection
    #[arg(long, value_name = "N", default_value = "64",
          value_parser = crate::count::<u32>(1, 65_536))]
    requests: u32,

    /// Connections
    #[arg(long, value_name = "N", default_value = "8",
          value_parser = crate::count::<u32>(1, 10_000))]
    connections: u32,

    /// Offsets of requests
    ///
    /// With sequential, each connection has a part of the device.
    #[arg(long, value_name = "NAME", value_enum, default_value_t)]
    pattern: AccessOrder,

    /// Use only the first SIZE bytes of the device
    #[arg(long, value_name = "SIZE", value_parser = size)]
    span: Option<u64>,

    /// End after this time [default: 3s, unless --count is given]
    #[arg(long, value_name = "TIME", value_parser = |text: &str| parse_time(text, "1ms"))]
    time: Option<Duration>,

    /// End after this number of requests, all connections together
    #[arg(long, value_name = "N", value_parser = crate::count::<u64>(1, u64::MAX))]
    count: Option<u64>,

    /// Seed of random offsets
    #[arg(long, value_name = "N", default_value = "1")]
    seed: u64,

    /// Threads of this program [default: one per connection, at most one per CPU]
    #[arg(long, value_name = "N", value_parser = crate::count::<u16>(1, 1024))]
    threads: Option<u16>,

    /// Print JSON
    #[arg(long)]
    json: bool,

    /// How to perform I/O: uring, threads or auto
    #[arg(long, value_name = "NAME", default_value = "auto")]
    engine: IoEngine,
}

/// The time of a run that has neither a time nor a count.
const TIME_DEFAULT: Duration = Duration::from_secs(3);
/// Longest request that servers need to take ("Size constraints"), and that most do.
const SIZE_MAX: u64 = 32 << 20;

fn size(text: &str) -> std::result::Result<u64, String> {
    match parse_size(text).map_err(|error| error.text())? {
        0 => Err("write a size above 0".to_owned()),
        size => Ok(size),
    }
}

fn request_size(text: &str) -> std::result::Result<u64, String> {
    match size(text)? {
        size if size > SIZE_MAX => Err("write a size up to 32M".to_owned()),
        size => Ok(size),
    }
}

impl LoadArgs {
    /// Does it, and returns what is to be printed and the exit status: 1 if requests were refused.
    pub fn run(&self, devices: &DeviceContext<'_>) -> Result<(String, u8)> {
        let work = self.work();
        let LoadServer { place, process } = self.server(devices)?;
        let name = place.name.clone();
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = self.threads.map_or(work.connections.min(cores), usize::from);
        let config = RuntimeConfig { workers: threads, engine: self.engine };
        let runtime = Runtime::start(&config).map_err(|error| {
            MeasureError::new(format!("cannot start workers: {}", blockhaul_io::plain(&error)))
        })?;
        let shared = Arc::new(work.clone());
        let done = runtime.block_on(move || measure(place, shared));
        // Not on a worker: this waits for the server of `[ CMD ]`.
        drop(process);
        let measured = done?;
        let outcome = LoadReport::new(name, &work, &measured);
        let status = u8::from(outcome.errors > 0);
        let text = if self.json { outcome.json()? } else { outcome.text() };
        Ok((text, status))
    }

    fn work(&self) -> LoadWork {
        LoadWork {
            size: self.size,
            requests: self.requests as usize,
            connections: self.connections as usize,
            order: self.pattern,
            reads: match (self.write, self.mix) {
                (true, _) => 0,
                (false, Some(reads)) => reads.into(),
                (false, None) => 100,
            },
            span: self.span,
            seed: self.seed,
            count: self.count,
            time: self.time.unwrap_or(TIME_DEFAULT),
        }
    }

    fn server(&self, devices: &DeviceContext<'_>) -> Result<LoadServer> {
        let usage = |error: BlockError| MeasureError::usage(error.to_string());
        let spec = (devices.spec)(&self.device).map_err(usage)?;
        let name = spec.to_string();
        match &spec {
            DeviceSpec::Command(words) => {
                let process = ServerProcess::start(words).map_err(usage)?;
                let address = ServerAddress::Unix(process.socket().to_path_buf());
                let place = ConnectTarget { name, address, export: String::new(), tls: None };
                Ok(LoadServer { place, process: Some(process) })
            }
            DeviceSpec::Scheme { scheme, .. } if scheme.starts_with("nbd") => {
                let place = ConnectTarget::parse(&name).map_err(usage)?;
                Ok(LoadServer { place, process: None })
            }
            _ => Err(MeasureError::usage(format!(
                "{name} is no NBD server: write its URI, or have it served by \
                 [ blockhaul serve {name} ]; bench device measures devices without a server"
            ))),
        }
    }
}

/// A server, and its process if it is started here.
struct LoadServer {
    place: ConnectTarget,
    process: Option<Arc<ServerProcess>>,
}

/// All that was measured.
struct LoadResult {
    tally: Tally,
    took: Duration,
    own_cpu: Duration,
    size: u64,
    tls: bool,
}

/// A connection that is open and waits for the start.
struct ReadyConnection {
    go: Completer<Instant>,
    outcome: Ticket<blockhaul_block::Result<Tally>>,
}

/// Connects all, then starts all at once, and waits for all.
async fn measure(place: ConnectTarget, work: Arc<LoadWork>) -> Result<LoadResult> {
    let opening = |error: BlockError| match error.kind() {
        Kind::Usage => MeasureError::usage(error.to_string()),
        _ => MeasureError::opening(error.to_string()),
    };
    let mut waiting = Vec::new();
    let mut met = None;
    for number in 0..work.connections {
        let (lane, told) = open(number, place.clone(), work.clone());
        let negotiated = told.await.map_err(|gone| opening(lost(gone)))?.map_err(opening)?;
        let usable = check(&work, &negotiated);
        usable.map_err(|error| opening(error.on(&place.name.as_str().into())))?;
        met = Some(negotiated);
        waiting.push(lane);
    }
    // There is one connection at least.
    let Some(negotiated) = met else { return Err(opening(lost(LostCompletion))) };
    let cpu = || blockhaul_os::processor_time(std::process::id()).unwrap_or_default();
    let before = cpu();
    let start = Instant::now();
    let mut outcomes = Vec::new();
    for ReadyConnection { go, outcome } in waiting {
        go.complete(start);
        outcomes.push(outcome);
    }
    let mut all = None;
    let mut failed = None;
    for (number, outcome) in outcomes.into_iter().enumerate() {
        match (outcome.await, &mut all) {
            (Ok(Ok(tally)), None) => all = Some(tally),
            (Ok(Ok(tally)), Some(all)) => all.merge(&tally),
            (Ok(Err(error)), _) => {
                let text = format!("connection {}: {}", number + 1, error.text());
                let error = BlockError::new(error.kind(), text);
                failed = failed.or(Some(error.on(&place.name.as_str().into())));
            }
            (Err(gone), _) => failed = failed.or(Some(lost(gone))),
        }
    }
    let took = start.elapsed();
    match (failed, all) {
        (None, Some(tally)) => Ok(LoadResult {
            tally,
            took,
            own_cpu: cpu().saturating_sub(before),
            size: negotiated.info.size,
            tls: negotiated.tls,
        }),
        (failed, _) => {
            Err(MeasureError::new(failed.unwrap_or_else(|| lost(LostCompletion)).to_string()))
        }
    }
}

/// Opens a connection on its worker; the ticket says what was agreed on.
fn open(
    number: usize,
    place: ConnectTarget,
    work: Arc<LoadWork>,
) -> (ReadyConnection, Ticket<blockhaul_block::Result<ClientHandshakeResult>>) {
    let (go, start) = blockhaul_io::ticket::<Instant>();
    let (tell, told) = blockhaul_io::ticket();
    let outcome = WorkerHandle::to(number).spawn(move || async move {
        let options = blockhaul_client::ConnectOptions {
            contexts: Vec::new(),
            ..blockhaul_client::ConnectOptions::default()
        };
        let line = match BareConnection::connect(&place, &options).await {
            Ok(line) => line,
            Err(error) => {
                tell.complete(Err(error.clone()));
                return Err(error);
            }
        };
        tell.complete(Ok(line.negotiated.clone()));
        let start = start.await.map_err(lost)?;
        let number = number as u64;
        let connections = work.connections as u64;
        let until = match work.count {
            // The first ones have one more.
            Some(count) => {
                LoadEnd::Count(count / connections + u64::from(number < count % connections))
            }
            None => LoadEnd::Deadline(start + work.time),
        };
        lane::drive(line, &work, number, until).await
    });
    (ReadyConnection { go, outcome }, told)
}

/// Whether the export can be used as is wanted.
fn check(work: &LoadWork, negotiated: &ClientHandshakeResult) -> blockhaul_block::Result<()> {
    let usage = |text: String| Err(BlockError::new(Kind::Usage, text));
    let info = &negotiated.info;
    if work.writes() && info.flags.contains(ExportFlags::READ_ONLY) {
        return Err(BlockError::new(Kind::ReadOnly, "the export cannot be written"));
    }
    let span = work.span_of(info.size);
    if span < work.size {
        return usage(format!(
            "{span} bytes are less than one request of {} bytes: choose a smaller --size, or a \
             larger --span",
            work.size
        ));
    }
    if let Some(sizes) = info.block_sizes {
        if !work.size.is_multiple_of(sizes.minimum.into()) {
            return usage(format!(
                "--size {} is no multiple of the export's smallest block of {} bytes",
                work.size, sizes.minimum
            ));
        }
        if work.size > u64::from(sizes.maximum) {
            return usage(format!(
                "--size {} is larger than the export's longest request of {} bytes",
                work.size, sizes.maximum
            ));
        }
    }
    Ok(())
}

fn lost(lost: LostCompletion) -> BlockError {
    BlockError::new(Kind::Io, "a connection was given up").because(lost)
}

impl Tally {
    fn merge(&mut self, other: &Tally) {
        self.requests += other.requests;
        self.bytes += other.bytes;
        for (name, count) in &other.errors {
            *self.errors.entry(name.clone()).or_default() += count;
        }
        self.latency.merge(&other.latency);
    }
}

#[cfg(test)]
mod tests;
