//! The state of a simulation below its workers: the clock, the seed, what is to come, and the record
//! of what was.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;
use std::time::{Duration, Instant};

use super::life::WorkerTasks;
use super::report::SimulationReport;
use super::settings::{Faults, SimulationSettings};
use crate::sync::Completer;

thread_local! {
    static WORLD: RefCell<Option<SimulatedWorld>> = const { RefCell::new(None) };
}

/// Faults in a run beyond which none is recorded, which bounds the memory of a long one.
const CHOSEN_MAX: usize = 100_000;

/// What is known here of a worker. Workers are numbered across all machines.
pub(super) struct WorkerRecord {
    pub(super) machine: usize,
    pub(super) life: Rc<WorkerTasks>,
    pub(super) alive: bool,
}

/// What happens at a time.
pub(super) enum SimulatedEvent {
    /// A wait ends, by its number.
    Ready(u64),
    /// A worker's file operation is carried out, by its number.
    File { member: usize, number: u64 },
    Job {
        /// The machine that asked for it; none for what a job itself started.
        machine: Option<usize>,
        job: Box<dyn FnOnce() + Send>,
    },
}

pub(super) struct SimulatedWorld {
    base: Instant,
    pub(super) now: Duration,
    /// Decides the order of events and their delays.
    order: Rng,
    /// Decides about faults: apart, so that one that is left out changes no other draw.
    fate: Rng,
    pub(super) faults: Faults,
    keep: Option<BTreeSet<u64>>,
    /// Number of faults drawn so far.
    drawn: u64,
    pub(super) members: Vec<WorkerRecord>,
    pub(super) machines: usize,
    /// The worker whose tasks run.
    pub(super) current: Option<usize>,
    queue: BTreeMap<(Duration, u64), SimulatedEvent>,
    next: u64,
    /// Jobs of pools with one thread end in order: not before this.
    serial: Duration,
    /// Something was done since the last look that may have made a socket ready.
    pub(super) touched: bool,
    /// Times that the clock has moved since the last look.
    pub(super) unseen: u64,
    /// Machines to kill before the next step.
    pub(super) kills: Vec<(usize, Completer<()>)>,
    log: VecDeque<String>,
    log_max: usize,
    pub(super) report: SimulationReport,
}

impl SimulatedWorld {
    pub(super) fn new(settings: &SimulationSettings) -> SimulatedWorld {
        let mut seeds = Rng(settings.seed);
        SimulatedWorld {
            base: real_now(),
            now: Duration::ZERO,
            order: Rng(seeds.number()),
            fate: Rng(seeds.number()),
            faults: settings.faults,
            keep: settings.keep.as_ref().map(|keep| keep.iter().copied().collect()),
            drawn: 0,
            members: Vec::new(),
            machines: 0,
            current: None,
            queue: BTreeMap::new(),
            next: 0,
            serial: Duration::ZERO,
            touched: false,
            unseen: 0,
            kills: Vec::new(),
            log: VecDeque::new(),
            log_max: settings.log,
            report: SimulationReport {
                trace: 0xcbf2_9ce4_8422_2325,
                ..SimulationReport::default()
            },
        }
    }

    /// A number below `bound`; 0 if that is 0.
    pub(super) fn below(&mut self, bound: u64) -> u64 {
        self.order.below(bound)
    }

    /// True in `count` of `of` cases.
    pub(super) fn chance(&mut self, count: u64, of: u64) -> bool {
        self.order.below(of) < count
    }

    /// A duration up to `most`; short ones are more likely.
    pub(super) fn delay(&mut self, most: Duration) -> Duration {
        let nanos = u64::try_from(most.as_nanos()).unwrap_or(u64::MAX);
        let shift = [0, 3, 6, 12][usize::try_from(self.below(4)).unwrap_or(0)];
        Duration::from_nanos(self.below(nanos >> shift))
    }

    /// Whether a fault happens that happens in `count` of 100,000 cases. Each has a number.
    pub(super) fn choose(&mut self, what: &'static str, count: u64) -> bool {
        if self.fate.below(100_000) >= count {
            return false;
        }
        let number = self.drawn;
        self.drawn += 1;
        let kept = self.keep.as_ref().is_none_or(|keep| keep.contains(&number));
        if kept && self.report.chosen.len() < CHOSEN_MAX {
            self.report.chosen.push((number, what));
            self.trace(what, number, 0);
        }
        kept
    }

    /// Adds an event to the record.
    pub(super) fn trace(&mut self, what: &'static str, a: u64, b: u64) {
        let nanos = u64::try_from(self.now.as_nanos()).unwrap_or(u64::MAX);
        for number in [nanos, a, b] {
            self.mix(number);
        }
        what.bytes().for_each(|byte| self.mix(byte.into()));
        if self.log_max > 0 {
            self.write(format!("{what} {a} {b}"));
        }
    }

    fn mix(&mut self, number: u64) {
        self.report.trace = (self.report.trace ^ number).wrapping_mul(0x0100_0000_01b3);
        self.report.trace ^= self.report.trace >> 29;
    }

    fn write(&mut self, text: String) {
        if self.log.len() == self.log_max {
            self.log.pop_front();
        }
        self.log.push_back(format!("{:12.6} {text}", self.now.as_secs_f64()));
    }

    /// Queues an event for `delay` from now.
    pub(super) fn after(&mut self, delay: Duration, event: SimulatedEvent) {
        self.at(self.now + delay, event);
    }

    fn at(&mut self, time: Duration, event: SimulatedEvent) {
        self.next += 1;
        self.queue.insert((time, self.next), event);
    }

    /// A fresh number, for a wait or a file operation.
    pub(super) fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// The time of the next event of the queue.
    pub(super) fn next_event(&self) -> Option<Duration> {
        self.queue.keys().next().map(|key| key.0)
    }

    /// Takes the next event if it is due.
    pub(super) fn take_due(&mut self) -> Option<SimulatedEvent> {
        let entry = self.queue.first_entry()?;
        (entry.key().0 <= self.now).then(|| entry.remove())
    }

    /// The time until a moment of the simulated clock; zero for one in the past.
    pub(super) fn offset(&self, at: Instant) -> Duration {
        at.saturating_duration_since(self.base)
    }

    /// The events of the queue that a machine has asked for.
    pub(super) fn take_events_of(&mut self, dead: usize) -> Vec<SimulatedEvent> {
        let of = |world: &SimulatedWorld, event: &SimulatedEvent| match event {
            SimulatedEvent::Ready(_) => false,
            SimulatedEvent::File { member, .. } => world.members[*member].machine == dead,
            SimulatedEvent::Job { machine, .. } => *machine == Some(dead),
        };
        let keys: Vec<_> =
            self.queue.iter().filter(|(_, event)| of(self, event)).map(|(key, _)| *key).collect();
        keys.into_iter().filter_map(|key| self.queue.remove(&key)).collect()
    }

    pub(super) fn into_report(mut self) -> SimulationReport {
        self.report.time = self.now;
        self.report.log = self.log.drain(..).collect();
        self.report
    }
}

/// Runs `f` with the simulation of this thread, if there is one. `f` runs no foreign code.
pub(super) fn with<R>(f: impl FnOnce(&mut SimulatedWorld) -> R) -> Option<R> {
    WORLD.try_with(|world| world.borrow_mut().as_mut().map(f)).ok().flatten()
}

/// Makes `world` the simulation of this thread; returns the one before.
pub(super) fn replace(world: Option<SimulatedWorld>) -> Option<SimulatedWorld> {
    WORLD.with(|current| current.replace(world))
}

/// The time, in a simulation.
pub(crate) fn now() -> Option<Instant> {
    with(|world| world.base + world.now)
}

#[expect(clippy::disallowed_methods, reason = "any instant is as good as the beginning")]
fn real_now() -> Instant {
    Instant::now()
}

/// Queues a blocking call in a simulation; otherwise gives it back. `serial`: its pool has one
/// thread.
pub(crate) fn take_job(
    job: Box<dyn FnOnce() + Send>,
    serial: bool,
) -> Option<Box<dyn FnOnce() + Send>> {
    let mut job = Some(job);
    with(|world| {
        let Some(job) = job.take() else { return };
        let machine = world.current.map(|current| world.members[current].machine);
        let mut time = world.now + world.delay(world.faults.file_delay);
        if serial {
            time = time.max(world.serial);
            world.serial = time;
        }
        world.at(time, SimulatedEvent::Job { machine, job });
    });
    job
}

/// Records that a task has panicked.
pub(crate) fn note_panic(text: &str) {
    with(|world| world.report.panics.push(text.to_string()));
}

/// A socket may have become ready.
pub(crate) fn touch() {
    with(|world| world.touched = true);
}

/// Whether a fault of the caller's happens, as it does in `count` of 100,000 cases. It gets a number
/// as the faults of sockets do, so that a run can be repeated without it. False outside of a
/// simulation.
pub fn choose(what: &'static str, count: u64) -> bool {
    with(|world| world.choose(what, count)).unwrap_or(false)
}

/// A number below `bound`, by the seed; 0 outside of a simulation.
pub fn random(bound: u64) -> u64 {
    with(|world| world.below(bound)).unwrap_or(0)
}

/// Adds a line to [`SimulationReport::log`]. It may contain what differs from run to run, such as paths.
pub fn note(text: &str) {
    with(|world| {
        if world.log_max > 0 {
            world.write(text.to_string());
        }
    });
}

/// Changes what may go wrong from now on.
pub fn set_faults(faults: Faults) {
    with(|world| world.faults = faults);
}

/// A seeded generator (SplitMix64).
pub(super) struct Rng(u64);

impl Rng {
    fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: u64) -> u64 {
        if bound == 0 { 0 } else { self.number() % bound }
    }
}
