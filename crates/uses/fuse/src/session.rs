//! Mounted disks: requests of the kernel become requests of the devices.

mod disk;
mod lane;
mod standby;
mod transfer;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use blockhaul_block::{Error, Kind};
use blockhaul_io::{Pool, WorkerHandle};

use crate::channel::Channel;
use crate::files::{Files, Node};
use crate::in_flight::InFlight;
use crate::protocol::{Init, InitReply, KernelErrno, MAJOR, MINOR_LEAST, init_flags, open_flags};
use disk::DiskFile;
pub use disk::{DiskMount, HandleReopener, HandleSource};
use lane::Lane;
use standby::Standby;

/// Maximum read or write in bytes: 256 pages, the kernel's own maximum.
const TRANSFER_MAX: u32 = 1 << 20;
const PAGES_MAX: u16 = 256;
/// Requests in flight that nobody waits for (reading ahead, asynchronous I/O), of all workers.
const BACKGROUND: u16 = 256;
/// Maximum time that a request waits for a look at the size of a disk.
const LOOKING: Duration = Duration::from_millis(300);
/// Interval of log lines about failed requests.
const LOG_AGAIN: Duration = Duration::from_secs(1);

/// Whether the kernel's page cache keeps the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PageCacheMode {
    /// Never: each read and write is a request.
    None,
    /// While the file is open; what others write to the storage is seen when it is opened again.
    #[default]
    Open,
    /// Until memory is needed for something else: for storage that nobody else changes.
    Keep,
}

/// What to show, and how.
pub struct MountConfig {
    /// The disks: exactly one if the root is no directory, else at most [`DISKS_MAX`].
    ///
    /// [`DISKS_MAX`]: crate::DISKS_MAX
    pub disks: Vec<DiskMount>,
    /// The files.
    pub files: Files,
    /// Whether the page cache keeps the disk.
    pub cache: PageCacheMode,
    /// Bytes of requests in flight; at least 16 MiB are used.
    pub memory: u64,
}

/// How a session ended.
#[derive(Debug)]
#[non_exhaustive]
pub struct MountEnd {
    /// Requests that the devices have not completed in time.
    pub held: usize,
    /// Why the last flush of a disk failed.
    pub flush: Result<(), Error>,
    /// Why data from the page cache could not be written, the first time: of a mapping (mmap(2)) that a
    /// program has changed and maybe left since.
    pub written_back: Result<(), Error>,
}

/// Disks that are shown as files. Shared by all workers.
pub struct Session {
    disks: Vec<DiskFile>,
    files: Files,
    cache: PageCacheMode,
    /// Memory of reads, and of small writes.
    pool: Pool,
    /// Memory that requests are received in: that of a large write goes to the device.
    inboxes: Pool,
    in_flight: InFlight,
    standby: Standby,
    logged: Mutex<Option<Instant>>,
}

impl Session {
    /// A session before its file system is mounted.
    pub fn new(config: MountConfig) -> Arc<Session> {
        let MountConfig { disks, files, cache, memory } = config;
        let memory = memory.max(u64::from(TRANSFER_MAX) * 16);
        Arc::new(Session {
            disks: disks.into_iter().map(DiskFile::new).collect(),
            files,
            cache,
            pool: Pool::new(memory / 2),
            inboxes: Pool::new(memory / 2),
            in_flight: InFlight::default(),
            standby: Standby::default(),
            logged: Mutex::default(),
        })
    }

    /// Serves a mounted connection on all workers until it is unmounted; then completes what is in
    /// flight, and flushes. Call it on a worker.
    ///
    /// # Errors
    /// If no worker can read requests any more.
    pub async fn serve(self: Arc<Self>, connection: OwnedFd) -> io::Result<MountEnd> {
        let channels = channels(connection);
        log::debug!("{} descriptors for requests", channels.len());
        for disk in &self.disks {
            disk.open_lanes().await;
        }
        let lanes: Vec<_> = channels
            .into_iter()
            .enumerate()
            .map(|(worker, channel)| {
                let session = self.clone();
                WorkerHandle::to(blockhaul_io::worker() + worker)
                    .spawn(move || Lane::new(session, channel, worker).run())
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
        let lost = self.disks.iter().find_map(DiskFile::lost).cloned();
        Ok(MountEnd { held, flush, written_back: lost.map_or(Ok(()), Err) })
    }

    /// Flushes what was written since the last flush: whoever wrote it may rely on an unmount.
    async fn flush_last(&self) -> Result<(), Error> {
        // All at once.
        let flushing: Vec<_> = self.disks.iter().map(DiskFile::flush_last).collect();
        let mut all = Ok(());
        for pending in flushing {
            let one = pending.await.map(drop);
            if let (Err(error), Err(_)) = (&one, &all) {
                log::warn!("what was written last may be lost: {error}");
            }
            all = all.and(one);
        }
        all
    }

    /// Looks at the sizes that a file depends on, but waits no longer than [`LOOKING`]: a later request
    /// sees what was found later.
    async fn look(self: &Arc<Self>, node: Node) {
        let places = match node {
            Node::Disk(disk) => disk..disk + 1,
            Node::Info => 0..self.disks.len(),
            Node::Folder => return,
        };
        let session = self.clone();
        let looking = blockhaul_io::start(async move {
            for place in places {
                session.disks[place].look().await;
            }
        });
        // It goes on without us.
        let _ = blockhaul_io::timeout(LOOKING, looking).await;
    }

    /// Looks at the size of a disk again, if it is smaller than a request needs.
    async fn size_for(self: &Arc<Self>, disk: usize, end: u64) {
        if end > self.disks[disk].facts().size && self.disks[disk].is_due() {
            self.look(Node::Disk(disk)).await;
        }
    }

    /// The answer to INIT.
    fn init(&self, asked: &Init) -> Result<InitReply, KernelErrno> {
        if asked.major != MAJOR || asked.minor < MINOR_LEAST {
            log::error!(
                "the kernel has version {}.{} of FUSE: at least {MAJOR}.{MINOR_LEAST} is needed \
                 (Linux 4.20)",
                asked.major,
                asked.minor
            );
            return Err(KernelErrno::PROTO);
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
            PageCacheMode::None => open_flags::DIRECT_IO | open_flags::PARALLEL_DIRECT_WRITES,
            PageCacheMode::Open => 0,
            PageCacheMode::Keep => open_flags::KEEP_CACHE,
        }
    }

    /// The kernel's number for a failed request, which is logged.
    fn errno(&self, error: &Error) -> KernelErrno {
        let mut logged = self.logged.lock().expect("no panic under this lock");
        if logged.is_none_or(|when| blockhaul_io::elapsed(when) >= LOG_AGAIN) {
            *logged = Some(blockhaul_io::now());
            log::warn!("{error}");
        }
        errno(error)
    }
}

/// The kernel's number for an error.
fn errno(error: &Error) -> KernelErrno {
    match error.kind() {
        Kind::ReadOnly => KernelErrno::ROFS,
        Kind::NoMemory => KernelErrno::NOMEM,
        Kind::Invalid | Kind::Usage | Kind::TooLarge => KernelErrno::INVAL,
        Kind::NoSpace => KernelErrno::NOSPC,
        Kind::Unsupported => KernelErrno::OPNOTSUPP,
        Kind::Refused => KernelErrno::ACCES,
        Kind::InUse => KernelErrno::BUSY,
        Kind::Io | Kind::ShuttingDown | Kind::Disconnected | Kind::TimedOut | Kind::NotFound => {
            KernelErrno::IO
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
