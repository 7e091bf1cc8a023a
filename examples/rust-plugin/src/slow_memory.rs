//! `slow-memory:SIZE?delay=TIME`: a disk in memory whose requests take a while. Requests wait in a
//! queue until they are due; two threads complete them, however many wait.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use blockhaul_block::{
    Can, Device, Error, Facts, Kind, Op, Outcome, PendingRequest, Reply, Request, Result,
};
use blockhaul_catalog::{
    Backend, BackendTarget, OpenFuture, OpenedDevice, Param, ParamKind, parse_size,
};
use blockhaul_io::{Buf, Completer, Data};

/// Bytes under one lock.
const PIECE: usize = 1 << 20;
/// Number of threads that complete requests.
const THREADS: usize = 2;
/// Bytes of requests that a client should keep in flight: 2 GB/s at 64 ms.
const IN_FLIGHT: u64 = 128 << 20;

const PARAMS: &[Param] = &[Param {
    name: "delay",
    kind: ParamKind::Duration,
    default: Some("64ms"),
    doc: "How long a request takes",
}];

/// The backend `slow-memory:SIZE`.
pub struct SlowMemory;

impl Backend for SlowMemory {
    fn schemes(&self) -> &'static [&'static str] {
        &["slow-memory"]
    }

    fn operand(&self) -> &'static str {
        "SIZE"
    }

    fn summary(&self) -> &'static str {
        "memory whose requests take a while"
    }

    fn params(&self) -> &'static [Param] {
        PARAMS
    }

    fn open(&self, target: BackendTarget) -> OpenFuture<OpenedDevice> {
        Box::pin(async move {
            let size = parse_size(target.text()?)?;
            let delay = target.args.duration("delay").unwrap_or_default();
            let device: Arc<dyn Device> = Arc::new(SlowDevice::start(size, delay)?);
            Ok(OpenedDevice::from(device))
        })
    }
}

/// An open disk. Dropping it ends the threads, once they have completed their requests.
struct SlowDevice {
    facts: Arc<Facts>,
    delay: Duration,
    shared: Arc<Shared>,
}

struct Shared {
    pieces: Vec<Mutex<Vec<u8>>>,
    queue: Mutex<Queue>,
    work: Condvar,
}

/// All requests take equally long: the first in is the first due.
#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    closed: bool,
}

/// A waiting request: it owns its memory, and the completer for its reply.
struct Job {
    due: Instant,
    at: u64,
    work: Work,
    completer: Completer<Outcome>,
}

enum Work {
    Read(Buf),
    Write(Data),
    Flush,
}

impl SlowDevice {
    fn start(size: u64, delay: Duration) -> Result<SlowDevice> {
        let count = usize::try_from(size.div_ceil(PIECE as u64));
        let count =
            count.map_err(|_| Error::new(Kind::Usage, "more than this machine's memory"))?;
        let pieces = (0..count).map(|_| Mutex::new(vec![0; PIECE])).collect();
        let shared = Shared { pieces, queue: Mutex::default(), work: Condvar::new() };
        let facts = Facts {
            can: Can::WRITE | Can::FLUSH | Can::MULTI_CONN,
            zeroed: true,
            in_flight: Some(IN_FLIGHT),
            ..Facts::new(format!("slow-memory:{size}"), size)
        };
        let device = SlowDevice { facts: Arc::new(facts), delay, shared: Arc::new(shared) };
        for _ in 0..THREADS {
            let shared = device.shared.clone();
            // On an error the device is dropped, which ends the thread that may have started.
            std::thread::Builder::new()
                .name("slow-memory".into())
                .spawn(move || shared.serve())
                .map_err(|error| Error::new(Kind::Io, format!("cannot start a thread: {error}")))?;
        }
        Ok(device)
    }
}

impl Device for SlowDevice {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    /// Queues the request and returns: the caller waits for the reply without a thread.
    fn submit(&self, request: Request) -> PendingRequest {
        let work = match request.op {
            Op::Read(room) => Work::Read(room.into_buf()),
            Op::Write(data) => Work::Write(data),
            Op::Flush => Work::Flush,
            _ => return Error::new(Kind::Unsupported, "not a request of this device").into(),
        };
        let (completer, pending) = PendingRequest::completer();
        let due = Instant::now() + self.delay;
        self.shared.lock().jobs.push_back(Job { due, at: request.at, work, completer });
        self.shared.work.notify_one();
        pending
    }
}

impl Drop for SlowDevice {
    fn drop(&mut self) {
        self.shared.lock().closed = true;
        self.shared.work.notify_all();
    }
}

impl Shared {
    fn lock(&self) -> std::sync::MutexGuard<'_, Queue> {
        self.queue.lock().expect("no panic under this lock")
    }

    /// The main loop of a thread.
    fn serve(&self) {
        while let Some(job) = self.next() {
            let outcome = self.perform(job.at, job.work);
            job.completer.complete(outcome);
        }
    }

    /// The next job, when it is due; none when the device is dropped.
    fn next(&self) -> Option<Job> {
        let mut queue = self.lock();
        loop {
            let Some(first) = queue.jobs.front() else {
                if queue.closed {
                    return None;
                }
                queue = self.work.wait(queue).expect("no panic under this lock");
                continue;
            };
            let left = first.due.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return queue.jobs.pop_front();
            }
            (queue, _) = self.work.wait_timeout(queue, left).expect("no panic under this lock");
        }
    }

    fn perform(&self, at: u64, work: Work) -> Outcome {
        match work {
            Work::Read(mut buf) => {
                let mut to = &mut buf[..];
                self.visit(at, to.len(), |piece| {
                    let (now, rest) = std::mem::take(&mut to).split_at_mut(piece.len());
                    now.copy_from_slice(piece);
                    to = rest;
                });
                Ok(Reply::Data(buf.into()))
            }
            Work::Write(data) => {
                let mut from = data.bytes();
                self.visit(at, from.len(), |piece| {
                    let (now, rest) = from.split_at(piece.len());
                    piece.copy_from_slice(now);
                    from = rest;
                });
                Ok(Reply::Done)
            }
            Work::Flush => Ok(Reply::Done),
        }
    }

    /// Visits the memory of a range, which lies inside the device: the fence ensures that.
    fn visit(&self, at: u64, len: usize, mut visit: impl FnMut(&mut [u8])) {
        let mut at = usize::try_from(at).expect("memory is addressable");
        let mut left = len;
        while left > 0 {
            let start = at % PIECE;
            let now = left.min(PIECE - start);
            let mut piece = self.pieces[at / PIECE].lock().expect("no panic under this lock");
            visit(&mut piece[start..start + now]);
            at += now;
            left -= now;
        }
    }
}
