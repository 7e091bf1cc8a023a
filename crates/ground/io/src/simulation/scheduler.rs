//! The scheduler: one step of one worker, or one event, at a time.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::driver;
use super::life::WorkerTasks;
use super::report::SimulationReport;
use super::settings::SimulationSettings;
use super::workers::{self, SimulatedFileOp, SimulatedWorker, SimulatedWorkers};
use super::world::{self, SimulatedEvent, SimulatedWorld, WorkerRecord};
use crate::context::{Worker, replace_worker};
use crate::driver::{Interest, OpCompletion, SleepLimit, run_file_op};
use crate::ending::WorkerShutdown;
use crate::inbox::Inbox;
use crate::remote::WorkerHandle;
use crate::sync::{Ticket, ticket};
use crate::{panic, sys, task, worker};

/// Virtual time of a step.
const STEP: Duration = Duration::from_micros(1);
/// Most tasks of a step.
const TASKS_MAX: u64 = 16;
/// Rounds of work after which sockets are looked at even if there is more to do.
const LOOK_EVERY: u64 = 4;
/// Times that the clock moves without a look at the sockets, if nothing is known to have touched one: not
/// everything that makes one ready is noticed, such as a descriptor that is closed before it becomes a stream.
const UNSEEN_MAX: u64 = 64;
/// Longest time that it moves then.
const JUMP_MAX: Duration = Duration::from_millis(100);
/// Rounds in which the tasks of a killed machine may wake each other.
const DEATH_ROUNDS: usize = 1000;

/// Why a simulation ended without a result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SimulationError {
    /// Nothing will ever happen again: no timer, no ready socket, no operation.
    Idle,
    /// The virtual time is over.
    Time,
    /// The steps are over.
    Steps,
    /// The future itself has panicked.
    Panic,
}

impl fmt::Display for SimulationError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SimulationError::Idle => "everything waits, and nothing is left that could happen",
            SimulationError::Time => "the virtual time is over",
            SimulationError::Steps => "the steps are over",
            SimulationError::Panic => "the scenario has panicked",
        })
    }
}

impl std::error::Error for SimulationError {}

/// Workers that share their fate.
pub struct SimulatedMachine {
    number: usize,
    remotes: Vec<WorkerHandle>,
}

impl SimulatedMachine {
    /// Starts a machine. Call it in a simulation.
    ///
    /// # Errors
    /// The system has no descriptor for a worker.
    ///
    /// # Panics
    /// Outside of a simulation.
    pub fn start(workers: usize) -> std::io::Result<SimulatedMachine> {
        let ending = Arc::new(WorkerShutdown::new(workers));
        let inboxes = (0..workers)
            .map(|index| Inbox::new(index, ending.clone()).map(Arc::new))
            .collect::<std::io::Result<Vec<_>>>()?;
        let number = workers::with(|workers, world| add_machine(workers, world, &inboxes));
        let number = number.expect("a machine is started in a simulation");
        Ok(SimulatedMachine { number, remotes: inboxes.into_iter().map(WorkerHandle).collect() })
    }

    /// Its workers.
    pub fn workers(&self) -> &[WorkerHandle] {
        &self.remotes
    }

    /// Ends the machine at once: its tasks are dropped, and its operations in flight and blocking
    /// calls are carried out or not, by the seed. Ready when that is done. Not from a task of the
    /// machine itself.
    pub fn kill(self) -> Ticket<()> {
        let (completer, ticket) = ticket();
        world::with(|world| world.kills.push((self.number, completer)));
        ticket
    }
}

fn add_machine(
    workers: &mut SimulatedWorkers,
    world: &mut SimulatedWorld,
    inboxes: &[Arc<Inbox>],
) -> usize {
    let machine = world.machines;
    world.machines += 1;
    for inbox in inboxes {
        let driver = Box::new(driver::SimulatedDriver(workers.all.len()));
        let worker = Rc::new(Worker {
            inbox: inbox.clone(),
            peers: inboxes.to_vec(),
            ready: RefCell::default(),
            engine: Cell::new("simulated"),
            driver: RefCell::new(driver),
            ops: RefCell::default(),
            timers: RefCell::default(),
            ahead: Cell::default(),
            moved: Cell::default(),
        });
        let life = Rc::new(WorkerTasks::default());
        world.members.push(WorkerRecord { machine, life, alive: true });
        workers.all.push(SimulatedWorker { worker, done: Vec::new() });
    }
    machine
}

/// Runs a future on a machine of its own, with one worker, until it has an output. All machines that
/// it has started end with it.
///
/// # Panics
/// In a simulation, or on a thread that has a worker.
pub fn run<M, F>(
    settings: &SimulationSettings,
    make: M,
) -> (Result<F::Output, SimulationError>, SimulationReport)
where
    M: FnOnce() -> F,
    F: Future + 'static,
{
    let before = world::replace(Some(SimulatedWorld::new(settings)));
    assert!(before.is_none(), "a simulation runs on this thread already");
    workers::replace(Some(SimulatedWorkers::default()));
    let output = match SimulatedMachine::start(1) {
        Ok(director) => direct(settings, director, make),
        Err(error) => {
            log::error!("cannot start a simulated machine: {error}");
            Err(SimulationError::Idle)
        }
    };
    let machines = world::with(|world| world.machines).unwrap_or(0);
    for machine in (0..machines).rev() {
        kill(machine);
    }
    let world = world::replace(None);
    drop(workers::replace(None));
    let report = world.map(SimulatedWorld::into_report).unwrap_or_default();
    (output, report)
}

fn direct<M, F>(
    settings: &SimulationSettings,
    _director: SimulatedMachine,
    make: M,
) -> Result<F::Output, SimulationError>
where
    M: FnOnce() -> F,
    F: Future + 'static,
{
    let output = Rc::new(RefCell::new(None));
    let place = output.clone();
    let task = as_member(0, || {
        let future = make();
        task::spawn(async move {
            let output = future.await;
            place.replace(Some(output));
        })
    });
    loop {
        if let Some(output) = output.take() {
            return Ok(output);
        }
        if task.is_finished() {
            return Err(SimulationError::Panic);
        }
        round(settings)?;
    }
}

/// One step of a worker or one event, whichever the seed prefers; moves the clock if there is none.
fn round(settings: &SimulationSettings) -> Result<(), SimulationError> {
    for (machine, completer) in
        world::with(|world| std::mem::take(&mut world.kills)).unwrap_or_default()
    {
        kill(machine);
        completer.complete(());
    }
    let now = world::with(|world| (world.report.steps, world.now));
    let (steps, now) = now.expect("the simulation lasts as long as this loop");
    if steps >= settings.steps {
        return Err(SimulationError::Steps);
    }
    if now >= settings.time {
        return Err(SimulationError::Time);
    }
    let touched = || world::with(|world| world.touched).unwrap_or(false);
    if steps.is_multiple_of(LOOK_EVERY) && touched() {
        look();
    }
    if work() {
        return Ok(());
    }
    let unseen = world::with(|world| {
        world.unseen += 1;
        world.unseen
    });
    let is_far = || next().is_none_or(|next| next > now + JUMP_MAX);
    if touched() || unseen > Some(UNSEEN_MAX) || is_far() {
        look();
    }
    let Some(next) = next() else { return Err(SimulationError::Idle) };
    world::with(|world| world.now = world.now.max(next));
    Ok(())
}

/// What can be done now.
enum ScheduledStep {
    Step(usize),
    Event(SimulatedEvent),
}

/// Does something that is due now; false if there is nothing.
fn work() -> bool {
    let work = workers::with(|workers, world| {
        world.report.steps += 1;
        let ready = |member: &usize| is_ready(workers, world, *member);
        let ready: Vec<usize> = (0..workers.all.len()).filter(ready).collect();
        let choice = world.below(ready.len() as u64 + 1);
        let event = if choice == 0 { world.take_due() } else { None };
        if let Some(event) = event {
            return Some(ScheduledStep::Event(event));
        }
        let index = usize::try_from(choice.max(1) - 1).unwrap_or(0);
        ready.get(index).map(|member| ScheduledStep::Step(*member))
    });
    match work.flatten() {
        None => return false,
        Some(ScheduledStep::Step(member)) => step(member),
        Some(ScheduledStep::Event(event)) => happen(event),
    }
    true
}

/// Whether a worker has anything to do.
fn is_ready(workers: &SimulatedWorkers, world: &SimulatedWorld, member: usize) -> bool {
    if !world.members[member].alive {
        return false;
    }
    let entry = &workers.all[member];
    let worker = &entry.worker;
    let due = || {
        let earliest = worker.timers.borrow().earliest();
        earliest.is_some_and(|at| world.offset(at) <= world.now)
    };
    !entry.done.is_empty() || !worker.ready.borrow().is_empty() || !worker.inbox.is_empty() || due()
}

/// Runs `f` as a task of this worker would.
fn as_member<R>(member: usize, f: impl FnOnce() -> R) -> R {
    let worker = workers::with(|workers, world| {
        world.current = Some(member);
        workers.all[member].worker.clone()
    });
    let before = replace_worker(worker);
    let output = f();
    replace_worker(before);
    world::with(|world| world.current = None);
    output
}

/// One turn of a worker.
fn step(member: usize) {
    let drawn = workers::with(|workers, world| {
        world.now += STEP;
        let worker = &workers.all[member].worker;
        let waiting = worker.ready.borrow().len();
        world.trace("step", member as u64, waiting as u64);
        (worker.clone(), world.below(TASKS_MAX) + 1)
    });
    let Some((worker, most)) = drawn else { return };
    as_member(member, || {
        worker.inbox.awake();
        let mut done = Vec::new();
        // The simulated driver does not fail.
        let _ = worker.driver.borrow_mut().turn(SleepLimit::No, false, &mut done);
        worker::wake_completed(&worker, &mut done);
        worker::wake_due(&worker);
        // Machines end by `kill` alone.
        let _stop = worker::take_items(&worker);
        worker::run_tasks(&worker, usize::try_from(most).unwrap_or(1));
        worker.moved.set(0);
        if worker.ready.borrow().is_empty() {
            worker.inbox.prepare_sleep();
        }
    });
}

/// Lets an event happen.
fn happen(event: SimulatedEvent) {
    match event {
        SimulatedEvent::Ready(number) => {
            workers::with(|workers, world| {
                let Some(armed) = workers.armed.remove(&number) else { return };
                workers.by_slot.remove(&(armed.member, armed.slot));
                world.trace("ready", armed.member as u64, armed.slot as u64);
                let done = OpCompletion { slot: armed.slot, result: 0, op: None };
                workers.all[armed.member].done.push(done);
            });
        }
        SimulatedEvent::File { member, number } => {
            let Some(SimulatedFileOp { slot, op }) = take_file(number) else { return };
            let (result, op) = run_file_op(op);
            workers::with(|workers, world| {
                world.trace("file", member as u64, u64::from(result.unsigned_abs()));
                workers.all[member].done.push(OpCompletion { slot, result, op: Some(op) });
            });
        }
        SimulatedEvent::Job { machine, job } => {
            world::with(|world| world.trace("job", machine.unwrap_or(0) as u64, 0));
            panic::contained(job);
        }
    }
}

/// A file operation that is carried out now, or never.
fn take_file(number: u64) -> Option<SimulatedFileOp> {
    workers::with(|workers, _| workers.files.remove(&number)).flatten()
}

/// Looks which sockets are ready, and decides when their tasks will know.
fn look() {
    workers::with(|workers, world| {
        (world.touched, world.unseen) = (false, 0);
        let waits: Vec<u64> =
            workers.armed.iter().filter(|(_, armed)| !armed.scheduled).map(|(n, _)| *n).collect();
        if waits.is_empty() {
            return;
        }
        let mut polled: Vec<PollFd<'_>> = waits
            .iter()
            .map(|number| {
                let armed = &workers.armed[number];
                let flags = match armed.interest {
                    Interest::Readable => PollFlags::IN | PollFlags::RDHUP,
                    Interest::Writable => PollFlags::OUT,
                };
                PollFd::from_borrowed_fd(sys::borrow(armed.fd), flags)
            })
            .collect();
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        // Interrupted: another look follows.
        if poll(&mut polled, Some(&at_once)).is_err() {
            return;
        }
        let ready = polled.iter().map(|fd| !fd.revents().is_empty());
        let ready: Vec<u64> =
            waits.iter().zip(ready).filter(|(_, ready)| *ready).map(|(n, _)| *n).collect();
        for number in ready {
            let delay = world.delay(world.faults.socket_delay);
            world.after(delay, SimulatedEvent::Ready(number));
            if let Some(armed) = workers.armed.get_mut(&number) {
                armed.scheduled = true;
            }
        }
    });
}

/// The time of what comes next, if anything does.
fn next() -> Option<Duration> {
    workers::with(|workers, world| {
        let both = world.members.iter().zip(&workers.all);
        let alive = both.filter(|(member, _)| member.alive).map(|(_, simulated)| simulated);
        let timers = alive.filter_map(|simulated| {
            let earliest = simulated.worker.timers.borrow().earliest()?;
            Some(world.offset(earliest))
        });
        timers.chain(world.next_event()).min()
    })
    .flatten()
}

/// Ends a machine: what it has asked of the kernel happens or not; its tasks are dropped.
fn kill(machine: usize) {
    let ended = world::with(|world| {
        world.touched = true;
        world.trace("kill", machine as u64, 0);
        let members: Vec<usize> = (0..world.members.len())
            .filter(|member| {
                world.members[*member].machine == machine && world.members[*member].alive
            })
            .collect();
        let events = world.take_events_of(machine);
        let late: Vec<(SimulatedEvent, bool)> =
            events.into_iter().map(|event| (event, world.chance(1, 2))).collect();
        (members, late)
    });
    let Some((members, late)) = ended else { return };
    for (event, happens) in late {
        match event {
            event if happens => happen(event),
            // Outside of `with`, as below.
            SimulatedEvent::File { number, .. } => drop(take_file(number)),
            SimulatedEvent::Ready(_) | SimulatedEvent::Job { .. } => {}
        }
    }
    for member in &members {
        let life = world::with(|world| world.members[*member].life.clone());
        let wakers = life.map(|life| life.end()).unwrap_or_default();
        as_member(*member, || wakers.into_iter().for_each(std::task::Waker::wake));
    }
    for _ in 0..DEATH_ROUNDS {
        let busy: Vec<usize> =
            members.iter().copied().filter(|member| has_tasks(*member)).collect();
        if busy.is_empty() {
            break;
        }
        busy.into_iter().for_each(drain);
    }
    for member in members {
        let worker = workers::with(|workers, _| workers.all[member].worker.clone());
        let Some(worker) = worker else { return };
        as_member(member, || worker::end(&worker));
        let done = workers::with(|workers, world| {
            world.members[member].alive = false;
            workers.armed.retain(|_, armed| armed.member != member);
            workers.by_slot.retain(|(of, _), _| *of != member);
            std::mem::take(&mut workers.all[member].done)
        });
        // Outside of `with`: buffers go back to their pools, which wakes tasks.
        drop(done);
    }
}

fn has_tasks(member: usize) -> bool {
    workers::with(|workers, _| {
        let worker = &workers.all[member].worker;
        !worker.ready.borrow().is_empty() || !worker.inbox.is_empty()
    })
    .unwrap_or(false)
}

/// Polls the tasks of a dead worker, each of which then drops its future.
fn drain(member: usize) {
    let worker = workers::with(|workers, _| workers.all[member].worker.clone());
    let Some(worker) = worker else { return };
    as_member(member, || {
        let _stop = worker::take_items(&worker);
        worker::run_tasks(&worker, usize::MAX);
    });
}
