//! A mounted disk: requests of the kernel become requests of the device.

mod lane;
mod transfer;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use blockhaul_block::{Device, Error, Flushes, Kind, Outcome, Pending, Request as Asked};
use blockhaul_io::{Pool, Remote};

use crate::channel::Channel;
use crate::files::Files;
use crate::in_flight::InFlight;
use crate::protocol::{Errno, Init, InitReply, MAJOR, MINOR_LEAST, init_flags, open_flags};
use lane::Lane;

/// Maximum read or write in bytes: 256 pages, the kernel's own maximum.
const TRANSFER_MAX: u32 = 1 << 20;
const PAGES_MAX: u16 = 256;
/// Requests in flight that nobody waits for (reading ahead, asynchronous I/O), of all workers.
const BACKGROUND: u16 = 256;
/// Interval of log lines about failed requests.
const LOG_AGAIN: Duration = Duration::from_secs(1);
/// Maximum time that the device has, after the file system was unmounted, for what is in flight.
const DRAIN: Duration = Duration::from_secs(30);

/// Whether the kernel's page cache keeps the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Cache {
    /// Never: each read and write is a request.
    None,
    /// While the file is open; what others write to the storage is seen when it is opened again.
    #[default]
    Open,
    /// Until memory is needed for something else: for storage that nobody else changes.
    Keep,
}

/// What to show, and how.
pub struct Config {
    /// The disk, fenced.
    pub device: Arc<dyn Device>,
    /// The files.
    pub files: Files,
    /// Whether the page cache keeps the disk.
    pub cache: Cache,
    /// Bytes of requests in flight; at least 16 MiB are used.
    pub memory: u64,
}

/// How a session ended.
#[derive(Debug)]
#[non_exhaustive]
pub struct Ended {
    /// Requests that the device has not completed in time.
    pub held: usize,
    /// Why the last flush failed.
    pub flush: Result<(), Error>,
}

/// A disk that is shown as a file. Shared by all workers.
pub struct Session {
    device: Arc<dyn Device>,
    files: Files,
    cache: Cache,
    /// Memory of reads, and of small writes.
    pool: Pool,
    /// Memory that requests are received in: that of a large write goes to the device.
    inboxes: Pool,
    flushes: Arc<Flushes>,
    in_flight: InFlight,
    /// Something was written since the last flush was asked for.
    unflushed: AtomicBool,
    logged: Mutex<Option<Instant>>,
}

impl Session {
    /// A session before its file system is mounted.
    pub fn new(config: Config) -> Arc<Session> {
        let Config { device, files, cache, memory } = config;
        let memory = memory.max(u64::from(TRANSFER_MAX) * 16);
        Arc::new(Session {
            device,
            files,
            cache,
            pool: Pool::new(memory / 2),
            inboxes: Pool::new(memory / 2),
            flushes: Arc::default(),
            in_flight: InFlight::default(),
            unflushed: AtomicBool::new(false),
            logged: Mutex::default(),
        })
    }

    /// Serves a mounted connection on all workers until it is unmounted; then completes what is in
    /// flight, and flushes. Call it on a worker.
    ///
    /// # Errors
    /// If no worker can read requests any more.
    pub async fn serve(self: Arc<Self>, connection: OwnedFd) -> io::Result<Ended> {
        let channels = channels(connection);
        log::debug!("{} descriptors for requests", channels.len());
        let lanes: Vec<_> = channels
            .into_iter()
            .enumerate()
            .map(|(worker, channel)| {
                let session = self.clone();
                Remote::to(blockhaul_io::worker() + worker)
                    .spawn(move || Lane::new(session, channel).run())
            })
            .collect();
        let mut held = 0;
        let mut failed = None;
        let mut served = false;
        for lane in lanes {
            match lane.await {
                Ok((Ok(()), rest)) => (held, served) = (held + rest, true),
                Ok((Err(error), rest)) => (held, failed) = (held + rest, Some(error)),
                Err(lost) => failed = Some(io::Error::other(lost)),
            }
        }
        if let Some(error) = failed.filter(|_| !served) {
            return Err(error);
        }
        let flush = self.flush_last().await;
        Ok(Ended { held, flush })
    }

    /// Flushes what was written since the last flush: whoever wrote it may rely on an unmount.
    async fn flush_last(&self) -> Result<(), Error> {
        if !self.unflushed.swap(false, Ordering::SeqCst) || !self.has_flush() {
            return Ok(());
        }
        let outcome = match self.submit_durable(Asked::flush()) {
            Ok(outcome) => outcome,
            Err(pending) => pending.await,
        };
        outcome.map(drop)
    }

    fn has_flush(&self) -> bool {
        self.device.facts().can.contains(blockhaul_block::Can::FLUSH)
    }

    /// Submits a flush or FUA request, unless one has failed before. It succeeds only if no other
    /// one fails meanwhile.
    fn submit_durable(&self, request: Asked) -> Result<Outcome, Pending> {
        let alone = self.device.facts().flush_failures_stay;
        let durable = match self.flushes.begin(request.kind()) {
            Ok(durable) => durable,
            Err(error) => return Ok(Err(error)),
        };
        match self.device.submit(request).now() {
            Ok(outcome) => durable.end_now(outcome, alone).map_err(|(durable, outcome)| {
                Pending::start(async move { durable.end(outcome, alone).await })
            }),
            Err(pending) => {
                Err(Pending::start(async move { durable.end(pending.await, alone).await }))
            }
        }
    }

    /// The answer to INIT.
    fn init(&self, asked: &Init) -> Result<InitReply, Errno> {
        if asked.major != MAJOR || asked.minor < MINOR_LEAST {
            log::error!(
                "the kernel has version {}.{} of FUSE: at least {MAJOR}.{MINOR_LEAST} is needed \
                 (Linux 4.20)",
                asked.major,
                asked.minor
            );
            return Err(Errno::PROTO);
        }
        let wanted = init_flags::ASYNC_READ
            | init_flags::BIG_WRITES
            | init_flags::ASYNC_DIO
            | init_flags::PARALLEL_DIROPS
            | init_flags::MAX_PAGES
            | init_flags::EXTENDED
            | init_flags::DIRECT_IO_ALLOW_MMAP;
        Ok(InitReply {
            max_readahead: asked.max_readahead.max(TRANSFER_MAX),
            flags: asked.flags & wanted,
            max_background: BACKGROUND,
            max_write: TRANSFER_MAX,
            max_pages: PAGES_MAX,
        })
    }

    /// Flags of the disk when it is opened.
    fn open_flags(&self) -> u32 {
        match self.cache {
            Cache::None => open_flags::DIRECT_IO | open_flags::PARALLEL_DIRECT_WRITES,
            Cache::Open => 0,
            Cache::Keep => open_flags::KEEP_CACHE,
        }
    }

    /// The kernel's number for a failed request, which is logged.
    fn errno(&self, error: &Error) -> Errno {
        let mut logged = self.logged.lock().expect("no panic under this lock");
        if logged.is_none_or(|when| blockhaul_io::elapsed(when) >= LOG_AGAIN) {
            *logged = Some(blockhaul_io::now());
            log::warn!("{error}");
        }
        errno(error)
    }
}

/// The kernel's number for an error.
fn errno(error: &Error) -> Errno {
    match error.kind() {
        Kind::ReadOnly => Errno::ROFS,
        Kind::NoMemory => Errno::NOMEM,
        Kind::Invalid | Kind::Usage | Kind::TooLarge => Errno::INVAL,
        Kind::NoSpace => Errno::NOSPC,
        Kind::Unsupported => Errno::OPNOTSUPP,
        Kind::Refused => Errno::ACCES,
        Kind::Io | Kind::ShuttingDown | Kind::Disconnected | Kind::TimedOut | Kind::NotFound => {
            Errno::IO
        }
    }
}

/// One descriptor for each worker, as far as the kernel gives them.
fn channels(connection: OwnedFd) -> Vec<Arc<Channel>> {
    let mut further = Vec::new();
    for _ in 1..blockhaul_io::worker_count() {
        match blockhaul_os::clone_fuse(&connection) {
            Ok(fd) => further.push(Arc::new(Channel::new(fd))),
            Err(error) => {
                log::debug!("the workers share a descriptor: {error}");
                break;
            }
        }
    }
    let first = Arc::new(Channel::new(connection));
    let shared = blockhaul_io::worker_count() - 1 - further.len();
    let mut all: Vec<_> = std::iter::repeat_n(first, 1 + shared).collect();
    all.extend(further);
    all
}
