//! A disk in memory: slow, with faults, and with a look at its bytes at any moment.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use blockhaul_block::{
    BASE_ALLOCATION, Can, Device, Error, Extents, Facts, HOLE, Kind, Op, OpKind, Outcome,
    PendingRequest, Reply, Request, RequestFlags, ZERO,
};
use blockhaul_testkit::rng::Rng;

/// Bytes whose state is reported as one.
const UNIT: usize = 4096;
/// This and lower numbers are ways to wait.
pub const TURNS: u64 = 40;
/// Copies of another disk that are kept, one for each flush.
const MOMENTS: usize = 8;

/// The disk.
pub struct ModelDisk {
    facts: Arc<Facts>,
    state: Mutex<ModelDiskState>,
}

struct ModelDiskState {
    bytes: Vec<u8>,
    rng: Rng,
    faults: Vec<DiskFault>,
    /// Number of requests that have failed, by kind.
    failed: [u64; OpKind::ALL.len()],
    /// Number of writes that no flush has covered yet.
    unflushed: u64,
    /// At each flush, the bytes of this disk are kept.
    followed: Option<Arc<ModelDisk>>,
    moments: VecDeque<Vec<u8>>,
}

/// Requests of one kind that fail, and have no effect.
#[derive(Debug, Clone, Copy)]
pub struct DiskFault {
    pub on: OpKind,
    pub kind: Kind,
    /// Of those that there are.
    pub percent: u64,
    /// At most this many times.
    pub left: u64,
}

impl ModelDisk {
    /// A disk with these contents.
    pub fn new(bytes: Vec<u8>, multi_conn: bool, rng: Rng) -> Arc<ModelDisk> {
        let mut can = Can::all();
        can.set(Can::MULTI_CONN, multi_conn);
        let size = bytes.len() as u64;
        let facts = Facts {
            can,
            flush_failures_stay: true,
            contexts: vec![BASE_ALLOCATION.to_string()],
            ..Facts::new(format!("memory:{size}"), size)
        };
        let state = ModelDiskState {
            bytes,
            rng,
            faults: Vec::new(),
            failed: Default::default(),
            unflushed: 0,
            followed: None,
            moments: VecDeque::new(),
        };
        Arc::new(ModelDisk { facts: Arc::new(facts), state: Mutex::new(state) })
    }

    /// The bytes of now.
    pub fn bytes(&self) -> Vec<u8> {
        self.lock().bytes.clone()
    }

    /// These requests fail from now on, and no others.
    pub fn fail(&self, faults: Vec<DiskFault>) {
        let mut state = self.lock();
        state.faults = faults;
        state.failed = Default::default();
    }

    /// Number of requests of this kind that have failed since then.
    pub fn failed(&self, kind: OpKind) -> u64 {
        self.lock().failed[kind as usize]
    }

    /// Gives it other contents.
    pub fn take(&self, bytes: Vec<u8>) {
        self.lock().bytes = bytes;
    }

    /// Number of writes that no flush has covered.
    pub fn unflushed(&self) -> u64 {
        self.lock().unflushed
    }

    /// Keeps the bytes of `other` at each flush from now on.
    pub fn follow(&self, other: Option<Arc<ModelDisk>>) {
        let mut state = self.lock();
        state.followed = other;
        state.moments.clear();
    }

    /// Whether the followed disk was this at one of the latest flushes.
    pub fn has_seen(&self, bytes: &[u8]) -> bool {
        self.lock().moments.iter().any(|moment| moment == bytes)
    }

    fn lock(&self) -> MutexGuard<'_, ModelDiskState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, at: u64, with: impl FnOnce(&mut [u8]), len: usize) {
        let mut state = self.lock();
        with(&mut state.bytes[at as usize..at as usize + len]);
        state.unflushed += 1;
    }

    /// Carries a request out. Long ones take effect in two parts.
    async fn carry_out(self: Arc<Self>, request: Request, waits: [u64; 2]) -> Outcome {
        let at = request.at;
        let len = request.len as usize;
        let flags = request.flags;
        let half = len / 2;
        let parts = [(0, half), (half, len - half)];
        wait(waits[0]).await;
        match request.op {
            Op::Read(room) => {
                let mut buf = room.into_buf();
                for (from, len) in parts {
                    let start = at as usize + from;
                    buf[from..from + len].copy_from_slice(&self.lock().bytes[start..start + len]);
                    wait(waits[1]).await;
                }
                return Ok(Reply::Data(buf.into()));
            }
            Op::Write(data) => {
                for (from, len) in parts {
                    let part = &data.bytes()[from..from + len];
                    self.change(at + from as u64, |bytes| bytes.copy_from_slice(part), len);
                    wait(waits[1]).await;
                }
            }
            Op::Zero | Op::Trim => {
                for (from, len) in parts {
                    self.change(at + from as u64, |bytes| bytes.fill(0), len);
                    wait(waits[1]).await;
                }
            }
            Op::Flush => self.flush(waits[1]).await,
            Op::Cache => {}
            Op::Extents(contexts) => {
                let mut extents = self.extents(at as usize, len);
                if flags.contains(RequestFlags::ONE_EXTENT) {
                    extents.first_only();
                }
                let lists = contexts.iter().map(|_| extents.clone()).collect();
                return Ok(Reply::Extents(lists));
            }
        }
        if flags.contains(RequestFlags::FUA) {
            self.flush(0).await;
        }
        Ok(Reply::Done)
    }

    /// Covers what was written before it began.
    async fn flush(&self, turns: u64) {
        let (covered, followed) = {
            let state = self.lock();
            (state.unflushed, state.followed.clone())
        };
        wait(turns).await;
        let moment = followed.map(|other| other.bytes());
        let mut state = self.lock();
        state.unflushed = state.unflushed.saturating_sub(covered);
        if let Some(moment) = moment {
            state.moments.push_back(moment);
            if state.moments.len() > MOMENTS {
                state.moments.pop_front();
            }
        }
    }

    fn extents(&self, at: usize, len: usize) -> Extents {
        let state = self.lock();
        let mut extents = Extents::new();
        let mut next = at;
        while next < at + len {
            let to = ((next / UNIT + 1) * UNIT).min(at + len);
            let is_zero = state.bytes[next..to].iter().all(|byte| *byte == 0);
            extents.push((to - next) as u64, if is_zero { HOLE | ZERO } else { 0 });
            next = to;
        }
        extents
    }
}

/// A handle of a disk.
pub struct ModelHandle(pub Arc<ModelDisk>);

impl Device for ModelHandle {
    fn facts(&self) -> Arc<Facts> {
        self.0.facts.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        let waits = {
            let mut state = self.0.lock();
            let ModelDiskState { rng, faults, failed, .. } = &mut *state;
            let due = faults.iter_mut().find(|fault| {
                fault.on == request.kind() && fault.left > 0 && rng.chance(fault.percent)
            });
            if let Some(fault) = due {
                fault.left -= 1;
                failed[request.kind() as usize] += 1;
                return Error::new(fault.kind, "a fault of the test").into();
            }
            [0, 1].map(|_| rng.below(TURNS + 1))
        };
        PendingRequest::start(self.0.clone().carry_out(request, waits))
    }
}

/// Lets other tasks run.
pub async fn wait(turns: u64) {
    match turns {
        TURNS => blockhaul_io::sleep(Duration::from_micros(50)).await,
        turns => {
            for _ in 0..turns % 4 {
                blockhaul_io::yield_now().await;
            }
        }
    }
}
