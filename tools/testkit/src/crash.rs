//! A device that loses power: it tracks current and durable contents separately.
//!
//! Every completed change is recorded with the handle that made it. A flush makes those of its
//! handle durable that had completed when it was submitted (those of all handles, if the facts say
//! [`Can::MULTI_CONN`]); FUA makes one change durable. A power cut leaves the durable contents, and
//! a random part of the rest, sector by sector, in the order of completion.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use blockhaul_block::{
    Can, Device, Error, Facts, Kind, OpKind, Outcome, PendingRequest, Request, RequestFlags,
};
use blockhaul_catalog::{HandleOpener, OpenFuture};

use crate::model::{CompletionOrder, Model, lock};
use crate::rng::Rng;

/// The unit that a disk writes atomically.
const SECTOR: usize = 512;

/// One handle on storage that can lose power.
pub struct CrashDevice {
    facts: Arc<Facts>,
    store: Arc<Mutex<CrashStore>>,
    handle: usize,
    ignores_flush: bool,
    ignores_fua: bool,
}

struct CrashStore {
    model: Model,
    /// The durable contents without the log.
    base: Vec<u8>,
    /// Changes since then, in the order of completion.
    log: Vec<WriteRecord>,
    /// Changes that have left the log.
    gone: usize,
    handles: usize,
    completion: CompletionOrder,
    rng: Rng,
    cut: bool,
}

struct WriteRecord {
    handle: usize,
    at: usize,
    /// The bytes afterwards.
    bytes: Vec<u8>,
    durable: bool,
}

impl CrashDevice {
    /// Storage with these contents, all of them durable, and its first handle.
    pub fn new(model: Model, completion: CompletionOrder) -> Arc<CrashDevice> {
        let seed = if let CompletionOrder::Shuffled(seed) = completion { seed } else { 0 };
        let facts = model.facts();
        let store = CrashStore {
            base: model.bytes().to_vec(),
            model,
            log: Vec::new(),
            gone: 0,
            handles: 1,
            completion,
            rng: Rng::new(seed),
            cut: false,
        };
        let store = Arc::new(Mutex::new(store));
        let ignores_flush = false;
        let ignores_fua = false;
        Arc::new(CrashDevice { facts, store, handle: 0, ignores_flush, ignores_fua })
    }

    /// Another handle to the same storage.
    pub fn handle(&self) -> Arc<CrashDevice> {
        let mut store = lock(&self.store);
        let handle = store.handles;
        store.handles += 1;
        let facts = self.facts.clone();
        let store = self.store.clone();
        let ignores_flush = self.ignores_flush;
        let ignores_fua = self.ignores_fua;
        Arc::new(CrashDevice { facts, store, handle, ignores_flush, ignores_fua })
    }

    /// The same handle with a flush that has no effect, to see whether tests detect it.
    pub fn ignoring_flush(&self) -> Arc<CrashDevice> {
        let handle = self.handle();
        let facts = handle.facts.clone();
        let store = handle.store.clone();
        let handle = handle.handle;
        Arc::new(CrashDevice { facts, store, handle, ignores_flush: true, ignores_fua: false })
    }

    /// The same handle with FUA that has no effect, to see whether tests detect it.
    pub fn ignoring_fua(&self) -> Arc<CrashDevice> {
        let handle = self.handle();
        let facts = handle.facts.clone();
        let store = handle.store.clone();
        let handle = handle.handle;
        Arc::new(CrashDevice { facts, store, handle, ignores_flush: false, ignores_fua: true })
    }

    /// The current contents.
    pub fn live(&self) -> Vec<u8> {
        lock(&self.store).model.bytes().to_vec()
    }

    /// The contents after a power cut in the worst case: every change that may be lost is.
    pub fn durable(&self) -> Vec<u8> {
        lock(&self.store).after_cut(|_| false)
    }

    /// Cuts the power; returns what is left, by this seed. All handles fail with
    /// [`Kind::Disconnected`] from now on; [`Model::with_content`] restarts with what is left.
    pub fn power_cut(&self, seed: u64) -> Vec<u8> {
        let mut rng = Rng::new(seed);
        // From "nothing reached the disk" to "everything".
        let percent = rng.between(0, 100);
        let mut store = lock(&self.store);
        store.cut = true;
        store.after_cut(|_| rng.chance(percent))
    }
}

impl HandleOpener for CrashDevice {
    fn another(&self) -> OpenFuture<Arc<dyn Device>> {
        let handle = self.handle();
        Box::pin(async move { Ok(handle as Arc<dyn Device>) })
    }
}

impl CrashStore {
    fn after_cut(&self, mut lucky: impl FnMut(Range<usize>) -> bool) -> Vec<u8> {
        let mut bytes = self.base.clone();
        for change in &self.log {
            let mut from = change.at;
            let end = change.at + change.bytes.len();
            while from < end {
                let to = end.min((from / SECTOR + 1) * SECTOR);
                if change.durable || lucky(from..to) {
                    bytes[from..to]
                        .copy_from_slice(&change.bytes[from - change.at..to - change.at]);
                }
                from = to;
            }
        }
        bytes
    }

    fn apply(&mut self, request: Request, handle: usize, durable: bool) -> Outcome {
        if self.cut {
            return Err(Error::new(Kind::Disconnected, "the power is off"));
        }
        let changes = request.kind().changes();
        let at = request.at;
        let end = request.end();
        let reply = self.model.apply(request)?;
        if let Some(end) = end.filter(|_| changes) {
            let at = at as usize;
            let bytes = self.model.bytes()[at..end as usize].to_vec();
            self.log.push(WriteRecord { handle, at, bytes, durable });
            self.settle();
        }
        Ok(reply)
    }

    /// Number of changes completed so far.
    fn mark(&self) -> usize {
        self.gone + self.log.len()
    }

    fn flush(&mut self, mark: usize, handle: Option<usize>) -> Outcome {
        if self.cut {
            return Err(Error::new(Kind::Disconnected, "the power is off"));
        }
        let count = mark.saturating_sub(self.gone);
        for change in self.log.iter_mut().take(count) {
            change.durable |= handle.is_none_or(|handle| handle == change.handle);
        }
        self.settle();
        Ok(blockhaul_block::Reply::Done)
    }

    /// Moves durable changes at the front of the log into the base.
    fn settle(&mut self) {
        let count = self.log.iter().take_while(|change| change.durable).count();
        for change in self.log.drain(..count) {
            self.base[change.at..change.at + change.bytes.len()].copy_from_slice(&change.bytes);
        }
        self.gone += count;
    }

    fn turns(&mut self) -> u64 {
        match self.completion {
            CompletionOrder::Immediate => 0,
            CompletionOrder::Deferred => 2,
            CompletionOrder::Shuffled(_) => self.rng.below(40),
        }
    }
}

impl Device for CrashDevice {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        let mut guard = lock(&self.store);
        let mark = guard.mark();
        let turns = guard.turns();
        drop(guard);
        let store = self.store.clone();
        let handle = self.handle;
        let all = self.facts.can.contains(Can::MULTI_CONN);
        let durable = request.flags.contains(RequestFlags::FUA) && !self.ignores_fua;
        let ignores_flush = self.ignores_flush;
        let work = move || {
            let mut store = lock(&store);
            match request.kind() {
                OpKind::Flush if ignores_flush => Ok(blockhaul_block::Reply::Done),
                OpKind::Flush => store.flush(mark, (!all).then_some(handle)),
                _ => store.apply(request, handle, durable),
            }
        };
        if turns == 0 {
            return work().into();
        }
        PendingRequest::start(async move {
            for _ in 0..turns {
                blockhaul_io::yield_now().await;
            }
            work()
        })
    }
}
