//! The reference device: an array of bytes that implements the contract in the most obvious way.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use blockhaul_block::{
    BASE_ALLOCATION, Can, Device, Error, Extents, Facts, HOLE, Kind, Op, OpKind, Outcome,
    PendingRequest, Reply, Request, RequestFlags, ZERO,
};
use blockhaul_io::{Data, Reservation};

use crate::rng::Rng;

/// Bytes and their states. Uses two bytes of memory per byte: for devices up to some 100 MiB.
#[derive(Debug, Clone)]
pub struct Model {
    facts: Arc<Facts>,
    bytes: Vec<u8>,
    /// `HOLE` and `ZERO` bits for each byte, as in `base:allocation`.
    states: Vec<u8>,
    trim: TrimEffect,
    holes: bool,
    slow_zero: bool,
    runs_max: usize,
}

/// States that are compared at a time.
const RUN_PIECE: usize = 64;

/// What a trim does to the bytes: the contract allows anything, so callers must tolerate anything.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TrimEffect {
    /// They become zeroes.
    #[default]
    Zeroes,
    /// They stay as they are.
    Nothing,
    /// They become other bytes than they were.
    Garbage,
}

impl Model {
    /// A device of `size` zero bytes with all abilities, which is one hole.
    pub fn new(size: u64) -> Model {
        Model::with_facts(Model::all_facts(size))
    }

    /// The facts of [`Model::new`], for removing abilities or setting limits.
    pub fn all_facts(size: u64) -> Facts {
        let mut facts = Facts::new("model", size);
        facts.can = Can::all();
        facts.zeroed = true;
        facts.contexts = vec![BASE_ALLOCATION.to_string()];
        facts
    }

    /// The same facts with all hints, and two contexts. [`ModelDevice`] honours them.
    pub fn hinting_facts(size: u64) -> Facts {
        let mut facts = Model::all_facts(size);
        facts.takes_parked = true;
        facts.claims_room = true;
        facts.flush_failures_stay = true;
        facts.in_flight = Some(1 << 20);
        facts.contexts.push("test:piece".to_string());
        facts
    }

    /// A device of zero bytes with these facts. Panics if the size does not fit into memory.
    pub fn with_facts(facts: Facts) -> Model {
        let size = usize::try_from(facts.size).expect("a model fits into memory");
        Model {
            facts: Arc::new(facts),
            bytes: vec![0; size],
            states: vec![(HOLE | ZERO) as u8; size],
            trim: TrimEffect::default(),
            holes: false,
            slow_zero: false,
            runs_max: usize::MAX,
        }
    }

    /// The same with these contents, all allocated. Panics unless they have the device's size.
    #[must_use]
    pub fn with_content(mut self, bytes: Vec<u8>) -> Model {
        assert_eq!(bytes.len(), self.bytes.len(), "the content has the device's size");
        self.states.fill(0);
        self.bytes = bytes;
        Arc::make_mut(&mut self.facts).zeroed = false;
        self
    }

    /// The same with another way to trim.
    #[must_use]
    pub fn with_trim(mut self, trim: TrimEffect) -> Model {
        self.trim = trim;
        self
    }

    /// The same, but reads of zeroes return [`Reply::Hole`].
    #[must_use]
    pub fn with_holes(mut self) -> Model {
        self.holes = true;
        self
    }

    /// The same, but [`RequestFlags::FAST`] always fails as unsupported.
    #[must_use]
    pub fn with_slow_zero(mut self) -> Model {
        self.slow_zero = true;
        self
    }

    /// The same, but a reply has at most `runs_max` extents, at least 1.
    #[must_use]
    pub fn with_runs_max(mut self, runs_max: usize) -> Model {
        self.runs_max = runs_max.max(1);
        self
    }

    /// The facts of the device.
    pub fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    /// The contents.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The contents, for changes without requests; states do not change.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }

    /// The state of the byte at `at` in `base:allocation`.
    pub fn state(&self, at: u64) -> u64 {
        self.states[at as usize].into()
    }

    /// Carries out a request. A range outside the device is an error, never a panic.
    pub fn apply(&mut self, request: Request) -> Outcome {
        let Request { op, at, len, flags } = request;
        let end = at.checked_add(len).filter(|&end| end <= self.facts.size);
        let Some(end) = end else {
            return Err(Error::new(Kind::Invalid, "the range leaves the model"));
        };
        let range = at as usize..end as usize;
        match op {
            Op::Read(room) => return Ok(self.read(room, &self.bytes[range])),
            Op::Write(data) if data.len() != range.len() => {
                return Err(Error::new(Kind::Invalid, "the payload has another length"));
            }
            Op::Write(data) => {
                self.bytes[range.clone()].copy_from_slice(data.bytes());
                self.states[range].fill(0);
            }
            Op::Zero if self.slow_zero && flags.contains(RequestFlags::FAST) => {
                return Err(Error::new(Kind::Unsupported, "this model zeroes slowly"));
            }
            Op::Zero => {
                let state = if flags.contains(RequestFlags::NO_HOLE) { ZERO } else { HOLE | ZERO };
                self.bytes[range.clone()].fill(0);
                self.states[range].fill(state as u8);
            }
            Op::Trim => match self.trim {
                TrimEffect::Nothing => {}
                TrimEffect::Zeroes => {
                    self.bytes[range.clone()].fill(0);
                    self.states[range].fill((HOLE | ZERO) as u8);
                }
                TrimEffect::Garbage => {
                    self.bytes[range.clone()].iter_mut().for_each(|byte| *byte ^= 0xa5);
                    self.states[range].fill(0);
                }
            },
            Op::Flush | Op::Cache => {}
            Op::Extents(contexts) => {
                let lists = contexts.iter().map(|context| self.extents(context, at, len, flags));
                return Ok(Reply::Extents(lists.collect()));
            }
        }
        Ok(Reply::Done)
    }

    fn read(&self, room: Reservation, bytes: &[u8]) -> Reply {
        if self.holes && bytes.iter().all(|&byte| byte == 0) {
            return Reply::Hole;
        }
        let mut buf = room.into_buf();
        if buf.len() == bytes.len() {
            buf.copy_from_slice(bytes);
        }
        Reply::Data(Data::from(buf))
    }

    fn extents(&self, context: usize, at: u64, len: u64, flags: RequestFlags) -> Extents {
        let runs_max = if flags.contains(RequestFlags::ONE_EXTENT) { 1 } else { self.runs_max };
        let mut extents = Extents::new();
        let mut here = at;
        while here < at + len {
            let (state, end) = self.run(context, here, at + len);
            extents.push(end - here, state);
            if extents.len() > runs_max {
                let last = extents.runs().last().map_or(0, |run| run.len);
                extents.truncate(extents.total() - last);
                break;
            }
            here = end;
        }
        extents
    }

    /// The state at `at` in a context, and its end before `limit`. Contexts other than the first
    /// have their own states, which differ from one 64 KiB piece to the next.
    fn run(&self, context: usize, at: u64, limit: u64) -> (u64, u64) {
        if context > 0 {
            let piece = at >> 16;
            return (((context as u64) << 32) | piece, limit.min((piece + 1) << 16));
        }
        let states = &self.states[at as usize..limit as usize];
        let first = states[0];
        // Whole pieces first: they are compared faster than single bytes.
        let pieces = states.chunks_exact(RUN_PIECE);
        let whole = pieces.take_while(|piece| **piece == [first; RUN_PIECE]).count() * RUN_PIECE;
        let rest = states[whole..].iter().take_while(|state| **state == first).count();
        (first.into(), at + (whole + rest) as u64)
    }
}

/// When the model's device completes requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CompletionOrder {
    /// Within `submit`.
    #[default]
    Immediate,
    /// On the worker, after other tasks have run.
    Deferred,
    /// In any of these ways and from another thread, in random order by this seed.
    Shuffled(u64),
}

/// One request that a device has received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestRecord {
    /// What.
    pub kind: OpKind,
    /// Offset in bytes.
    pub at: u64,
    /// Length in bytes.
    pub len: u64,
    /// How.
    pub flags: RequestFlags,
}

impl RequestRecord {
    /// The record of a request.
    pub fn of(request: &Request) -> RequestRecord {
        let Request { at, len, flags, .. } = *request;
        RequestRecord { kind: request.kind(), at, len, flags }
    }
}

/// A [`Model`] as a device. It does not check requests: put [`blockhaul_block::fence`] before it.
pub struct ModelDevice {
    facts: Arc<Facts>,
    model: Arc<Mutex<Model>>,
    completion: CompletionOrder,
    rng: Mutex<Rng>,
    seen: Mutex<Vec<RequestRecord>>,
    parked_writes: AtomicUsize,
    finisher: OnceLock<Sender<CompletionJob>>,
}

type CompletionJob = Box<dyn FnOnce() + Send>;

impl ModelDevice {
    /// The device over a model.
    pub fn new(model: Model, completion: CompletionOrder) -> Arc<ModelDevice> {
        let seed = if let CompletionOrder::Shuffled(seed) = completion { seed } else { 0 };
        Arc::new(ModelDevice {
            facts: model.facts(),
            model: Arc::new(Mutex::new(model)),
            completion,
            rng: Mutex::new(Rng::new(seed)),
            seen: Mutex::default(),
            parked_writes: AtomicUsize::new(0),
            finisher: OnceLock::new(),
        })
    }

    /// The model, for inspection or changes.
    pub fn model(&self) -> MutexGuard<'_, Model> {
        lock(&self.model)
    }

    /// A copy of the device's contents.
    pub fn bytes(&self) -> Vec<u8> {
        self.model().bytes.clone()
    }

    /// All requests so far, in the order of their submission.
    pub fn seen(&self) -> Vec<RequestRecord> {
        lock(&self.seen).clone()
    }

    /// Number of writes so far whose payload was parked in the kernel and unread.
    pub fn parked_writes(&self) -> usize {
        self.parked_writes.load(Ordering::Relaxed)
    }

    /// Passes a request to another thread, which completes it a little later.
    fn hand_over(&self, job: CompletionJob) {
        let finisher = self.finisher.get_or_init(|| {
            let (sender, receiver) = mpsc::channel::<CompletionJob>();
            // Ends when the device is dropped, with all jobs done.
            let thread = std::thread::Builder::new().name("model".to_string());
            let spawned = thread.spawn(move || receiver.into_iter().for_each(|job| job()));
            spawned.expect("a test can start a thread");
            sender
        });
        finisher.send(job).expect("the thread lives as long as the device");
    }
}

impl Device for ModelDevice {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        lock(&self.seen).push(RequestRecord::of(&request));
        if let Op::Write(data) = &request.op
            && data.is_parked()
        {
            self.parked_writes.fetch_add(1, Ordering::Relaxed);
        }
        let request = match request.op {
            // A late reservation gets its memory only now, with the reply.
            Op::Read(room) if self.facts.claims_room => {
                let model = self.model.clone();
                let at = request.at;
                return PendingRequest::start(async move {
                    let room = room.claim().await;
                    lock(&model).apply(Request::read(at, room))
                });
            }
            op => Request { op, ..request },
        };
        let turns = match self.completion {
            CompletionOrder::Immediate => return self.model().apply(request).into(),
            CompletionOrder::Deferred => 2,
            CompletionOrder::Shuffled(_) => {
                let mut rng = lock(&self.rng);
                match rng.below(4) {
                    0 => return self.model().apply(request).into(),
                    1 => {
                        let pause = Duration::from_micros(rng.below(200));
                        let model = self.model.clone();
                        let (completer, pending) = PendingRequest::completer();
                        self.hand_over(Box::new(move || {
                            std::thread::sleep(pause);
                            let outcome = lock(&model).apply(request);
                            completer.complete(outcome);
                        }));
                        return pending;
                    }
                    2 => {
                        let outcome = self.model().apply(request);
                        let pause = Duration::from_micros(rng.below(200));
                        return PendingRequest::start(async move {
                            blockhaul_io::sleep(pause).await;
                            outcome
                        });
                    }
                    _ => rng.below(40),
                }
            }
        };
        let model = self.model.clone();
        PendingRequest::start(async move {
            for _ in 0..turns {
                blockhaul_io::yield_now().await;
            }
            lock(&model).apply(request)
        })
    }
}

/// State left by a test thread that panicked is still valid.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use blockhaul_block::ContextSet;

    use super::*;

    fn read(model: &mut Model, at: u64, len: usize) -> Vec<u8> {
        match model.apply(Request::read(at, Reservation::unpooled(len))).unwrap() {
            Reply::Data(data) => data.bytes().to_vec(),
            Reply::Hole => vec![0; len],
            other => panic!("{other:?}"),
        }
    }

    fn extents(model: &mut Model, request: Request) -> Vec<Vec<(u64, u64)>> {
        let Reply::Extents(lists) = model.apply(request).unwrap() else { panic!("no extents") };
        let pairs = |list: &Extents| list.runs().iter().map(|run| (run.len, run.state)).collect();
        lists.iter().map(pairs).collect()
    }

    #[test]
    fn it_holds_what_was_written_and_knows_what_is_a_hole() {
        let mut model = Model::new(100);
        model.apply(Request::write(10, Data::copy_of(b"abcde"))).unwrap();
        model.apply(Request::zero(12, 1)).unwrap();
        model.apply(Request::zero(13, 1).with(RequestFlags::NO_HOLE)).unwrap();
        assert_eq!(read(&mut model, 9, 7), b"\0ab\0\0e\0");
        let all = Request::extents(0, 100, ContextSet::first());
        let expected = [(10, 3), (2, 0), (1, 3), (1, 2), (1, 0), (85, 3)];
        assert_eq!(extents(&mut model, all), [expected]);
        let one = Request::extents(11, 80, ContextSet::first()).with(RequestFlags::ONE_EXTENT);
        assert_eq!(extents(&mut model, one), [[(1, 0)]]);
        let mut short = model.with_runs_max(2);
        let all = Request::extents(0, 100, ContextSet::first());
        assert_eq!(extents(&mut short, all), [[(10, 3), (2, 0)]]);
    }

    #[test]
    fn trims_do_what_was_asked_for() {
        for (trim, left) in
            [(TrimEffect::Zeroes, 0), (TrimEffect::Nothing, 7), (TrimEffect::Garbage, 7 ^ 0xa5)]
        {
            let mut model = Model::new(10).with_content(vec![7; 10]).with_trim(trim);
            model.apply(Request::trim(2, 3)).unwrap();
            assert_eq!(read(&mut model, 0, 10), [7, 7, left, left, left, 7, 7, 7, 7, 7]);
        }
    }

    #[test]
    fn what_lies_outside_is_an_error() {
        let mut model = Model::new(10);
        for (at, len) in [(0, 11), (10, 1), (u64::MAX, 1), (1, u64::MAX)] {
            assert_eq!(model.apply(Request::trim(at, len)).unwrap_err().kind(), Kind::Invalid);
        }
    }

    #[test]
    fn further_contexts_have_states_of_their_own() {
        let mut facts = Model::all_facts(100 << 10);
        facts.contexts.push("test:piece".to_string());
        let mut model = Model::with_facts(facts);
        let lists =
            extents(&mut model, Request::extents(0, 100 << 10, ContextSet::first().with(1)));
        assert_eq!(lists[0], [(100 << 10, 3)]);
        assert_eq!(lists[1], [(64 << 10, 1 << 32), (36 << 10, 1 << 32 | 1)]);
    }
}
