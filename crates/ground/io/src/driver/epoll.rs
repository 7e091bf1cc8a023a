//! The driver for systems that refuse io_uring: epoll for readiness, a bounded pool of threads for
//! files.

use std::io;
use std::os::fd::{OwnedFd, RawFd};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};

use super::api::{Driver, FileOp, Interest, OpCompletion, SleepLimit};
use super::spin::Spin;
use crate::blocking::offload_job;
use crate::sys;
use crate::sys::Wakeup;

/// Maximum events taken from the kernel at a time.
const EVENTS: usize = 256;
/// Event data of the inbox's wakeup: no descriptor has this number.
const WAKE: u64 = u64::MAX;

pub(crate) struct EpollDriver {
    epoll: OwnedFd,
    wakeup: Arc<Wakeup>,
    /// Where the kernel writes events. Kept, because clearing it costs more than a turn.
    events: Vec<epoll::Event>,
    /// The waiters, indexed by descriptor; entries remain when a descriptor is idle or closed.
    /// Descriptors are small numbers: the kernel hands out the lowest free one.
    watched: Vec<WatchedFd>,
    /// The descriptor that each slot waits for, indexed by slot: a table hands them out, and reuses them.
    by_slot: Vec<Option<RawFd>>,
    /// Completions known before the next turn.
    pending: Vec<OpCompletion>,
    finished: Arc<Mutex<Vec<OpCompletion>>>,
    spin: Spin,
}

#[derive(Default, Clone)]
struct WatchedFd {
    read: Option<usize>,
    write: Option<usize>,
    registered: bool,
}

impl EpollDriver {
    pub(crate) fn new(wakeup: Arc<Wakeup>) -> io::Result<EpollDriver> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &wakeup, EventData::new_u64(WAKE), EventFlags::IN)?;
        let no_event = epoll::Event { flags: EventFlags::empty(), data: EventData::new_u64(0) };
        Ok(EpollDriver {
            epoll,
            wakeup,
            events: vec![no_event; EVENTS],
            watched: Vec::new(),
            by_slot: Vec::new(),
            pending: Vec::new(),
            finished: Arc::default(),
            spin: Spin::default(),
        })
    }

    /// Registers the interest in `fd` with the kernel; every event is one-shot.
    fn register(&mut self, fd: RawFd) {
        let Some(watched) = self.watched.get_mut(index(fd)) else { return };
        let mut flags = EventFlags::ONESHOT;
        if watched.read.is_some() {
            flags |= EventFlags::IN | EventFlags::RDHUP;
        }
        if watched.write.is_some() {
            flags |= EventFlags::OUT;
        }
        let data = EventData::new_u64(fd.unsigned_abs().into());
        let borrowed = sys::borrow(fd);
        // A descriptor may have been closed and its number reused: the kernel has then forgotten
        // it.
        let mut result = if watched.registered {
            epoll::modify(&self.epoll, borrowed, data, flags)
        } else {
            epoll::add(&self.epoll, borrowed, data, flags)
        };
        match result {
            Err(rustix::io::Errno::NOENT) => {
                result = epoll::add(&self.epoll, borrowed, data, flags);
            }
            Err(rustix::io::Errno::EXIST) => {
                result = epoll::modify(&self.epoll, borrowed, data, flags);
            }
            _ => {}
        }
        watched.registered = result.is_ok();
        if let Err(error) = result {
            // Regular files cannot be polled and never block: ready (EPERM). Otherwise report the
            // error.
            let code = match error {
                rustix::io::Errno::PERM => 0,
                error => -error.raw_os_error(),
            };
            let waiting = [watched.read.take(), watched.write.take()];
            self.complete(waiting, code);
        }
    }

    /// Ends what waits in `slots`, with the same result.
    fn complete(&mut self, slots: [Option<usize>; 2], result: i32) {
        for slot in slots.into_iter().flatten() {
            self.forget(slot);
            self.pending.push(OpCompletion { slot, result, op: None });
        }
    }

    /// The descriptor that the slot waited for.
    fn forget(&mut self, slot: usize) -> Option<RawFd> {
        self.by_slot.get_mut(slot).and_then(Option::take)
    }

    fn wait(&mut self, sleep: SleepLimit, may_look: bool) -> io::Result<()> {
        let mut events = std::mem::take(&mut self.events);
        let result = self.wait_into(&mut events, sleep, may_look);
        if let Ok(count) = result {
            for event in &events[..count] {
                let data = event.data.u64();
                let flags = event.flags;
                if data == WAKE {
                    self.wakeup.clear();
                } else if let Ok(fd) = RawFd::try_from(data) {
                    self.fire(fd, flags);
                }
            }
        }
        self.events = events;
        result.map(|_| ())
    }

    /// The number of events that the kernel wrote.
    fn wait_into(
        &mut self,
        events: &mut [epoll::Event],
        sleep: SleepLimit,
        may_look: bool,
    ) -> io::Result<usize> {
        let mut wait = |most: Option<Duration>| -> io::Result<usize> {
            let most = most.map(Timespec::try_from).transpose().map_err(io::Error::other)?;
            match epoll::wait(&self.epoll, &mut *events, most.as_ref()) {
                Err(rustix::io::Errno::INTR) => Ok(0),
                result => Ok(result?),
            }
        };
        match sleep {
            SleepLimit::No => wait(sleep.most()),
            _ if !may_look => wait(sleep.most()),
            _ if self.spin.looks() => {
                let mut looked = Ok(0);
                let seen = self.spin.look(sleep.most(), || {
                    looked = wait(Some(Duration::ZERO));
                    !matches!(looked, Ok(0))
                });
                if seen { looked } else { wait(sleep.most()) }
            }
            _ => {
                let begun = Instant::now();
                let count = wait(sleep.most())?;
                self.spin.slept(begun.elapsed());
                Ok(count)
            }
        }
    }

    fn fire(&mut self, fd: RawFd, flags: EventFlags) {
        let Some(watched) = self.watched.get_mut(index(fd)) else { return };
        let broken = flags.intersects(EventFlags::ERR | EventFlags::HUP);
        let readable = broken || flags.intersects(EventFlags::IN | EventFlags::RDHUP);
        let writable = broken || flags.intersects(EventFlags::OUT);
        let read = if readable { watched.read.take() } else { None };
        let write = if writable { watched.write.take() } else { None };
        let more = watched.read.is_some() || watched.write.is_some();
        self.complete([read, write], 0);
        if more {
            self.register(fd);
        }
    }
}

/// The place of a descriptor in a list. No open descriptor is negative.
fn index(fd: RawFd) -> usize {
    fd.unsigned_abs() as usize
}

/// The entry at `at`; the list grows up to it.
fn entry<T: Clone + Default>(list: &mut Vec<T>, at: usize) -> &mut T {
    if list.len() <= at {
        list.resize(at + 1, T::default());
    }
    &mut list[at]
}

impl Driver for EpollDriver {
    fn arm(&mut self, fd: RawFd, interest: Interest, slot: usize) {
        let watched = entry(&mut self.watched, index(fd));
        let place = match interest {
            Interest::Readable => &mut watched.read,
            Interest::Writable => &mut watched.write,
        };
        // A second waiter for the same event: wake the first, which checks and waits again.
        let first = place.replace(slot);
        self.complete([first, None], 0);
        *entry(&mut self.by_slot, slot) = Some(fd);
        self.register(fd);
    }

    fn disarm(&mut self, slot: usize) {
        let Some(fd) = self.forget(slot) else { return };
        if let Some(watched) = self.watched.get_mut(index(fd)) {
            if watched.read == Some(slot) {
                watched.read = None;
            }
            if watched.write == Some(slot) {
                watched.write = None;
            }
        }
        self.pending.push(OpCompletion { slot, result: -libc::ECANCELED, op: None });
    }

    fn start(&mut self, op: FileOp, slot: usize) {
        let finished = self.finished.clone();
        let wakeup = self.wakeup.clone();
        offload_job(Box::new(move || {
            let (result, op) = run(op);
            let done = OpCompletion { slot, result, op: Some(op) };
            finished.lock().expect("no panic under this lock").push(done);
            wakeup.wake();
        }));
    }

    fn receives(&self) -> bool {
        false
    }

    /// Threads finish what they have begun.
    fn cancel(&mut self, _slot: usize) {}

    fn turn(
        &mut self,
        sleep: SleepLimit,
        may_look: bool,
        done: &mut Vec<OpCompletion>,
    ) -> io::Result<()> {
        let ready = !self.pending.is_empty()
            || !self.finished.lock().expect("no panic under this lock").is_empty();
        self.wait(if ready { SleepLimit::No } else { sleep }, may_look)?;
        done.append(&mut self.pending);
        done.append(&mut self.finished.lock().expect("no panic under this lock"));
        Ok(())
    }
}

/// Runs a file operation on the calling thread.
pub(crate) fn run(mut op: FileOp) -> (i32, FileOp) {
    let result = match &mut op {
        FileOp::Read { file, buf, start, at, .. } => {
            rustix::io::pread(file, &mut buf[*start..], *at)
        }
        FileOp::Write { file, data, start, at, .. } => {
            rustix::io::pwrite(file, &data.bytes()[*start..], *at)
        }
        FileOp::Sync { file, data_only: true } => rustix::fs::fdatasync(file).map(|()| 0),
        FileOp::Sync { file, data_only: false } => rustix::fs::fsync(file).map(|()| 0),
        FileOp::Allocate { file, mode, at, len } => {
            let mode = rustix::fs::FallocateFlags::from_bits_retain(mode.cast_unsigned());
            rustix::fs::fallocate(file, mode, *at, *len).map(|()| 0)
        }
        FileOp::Recv { socket, buf, start, end } => {
            let flags = rustix::net::RecvFlags::empty();
            rustix::net::recv(socket, &mut buf[*start..*end], flags).map(|(_, bytes)| bytes)
        }
    };
    let result = match result {
        Ok(bytes) => i32::try_from(bytes).unwrap_or(i32::MAX),
        Err(error) => -error.raw_os_error(),
    };
    (result, op)
}
