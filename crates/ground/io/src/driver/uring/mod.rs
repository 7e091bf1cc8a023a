//! The io_uring driver: one ring per worker, readiness by one-shot polls, files by owned
//! operations.
#![expect(unsafe_code, reason = "submission entries carry raw pointers")]

mod fixed;

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use io_uring::{IoUring, Probe, opcode, squeue, types};

use self::fixed::FixedBuffers;
use super::api::{Driver, FileOp, Interest, OpCompletion, SleepLimit};
use super::spin::Spin;
use crate::sys::Wakeup;

/// Submission entries that a turn can collect before it must enter the kernel: several per request
/// in flight on the worker's connections. The completion queue has four times as many.
const ENTRIES: u32 = 512;
/// `user_data` of the poll on the inbox's wakeup.
const WAKE: u64 = u64::MAX;
/// Wait for readiness before the first attempt (IORING_RECVSEND_POLL_FIRST): the caller has seen
/// that there is no data.
const RECV_POLL_FIRST: u16 = 1;
/// With this many writes in flight, a sleep may outlast the first completion: disks finish writes
/// one by one, and waking for each cost a fifth of the time of small direct writes. Reads completed
/// in groups anyway, and cost a tenth more with it.
const WRITES_MANY: usize = 16;
/// The sleep then ends after this many completions: the writes in flight, divided by this ...
const GATHER_PART: usize = 4;
/// ... or after this time with the first one, in microseconds.
const GATHER_USEC: u32 = 50;
/// `user_data` of operations whose completion is ignored.
const IGNORE: u64 = u64::MAX - 1;

pub(crate) struct UringDriver {
    ring: IoUring,
    /// Memory registered with the ring.
    fixed: FixedBuffers,
    wakeup: Arc<Wakeup>,
    wake_armed: bool,
    /// File operations by slot: the kernel may access their memory until they complete.
    ops: Vec<Option<FileOp>>,
    /// Writes among them.
    writes: usize,
    /// The kernel can wait for several completions with a timeout (Linux 6.12).
    gathers: bool,
    spin: Spin,
    /// An error of the ring that the next turn will report.
    failed: Option<io::Error>,
}

/// Whether a ring with all required features can be made here: `Err` names what is missing.
///
/// # Errors
/// The error of the kernel that refuses the ring, for example in a container.
pub fn available() -> io::Result<()> {
    make_ring().map(drop)
}

fn make_ring() -> io::Result<IoUring> {
    // Completion work runs when we ask for it, on this thread: fewer interruptions.
    let modern = IoUring::builder()
        .setup_single_issuer()
        .setup_defer_taskrun()
        // Shows that completion work is pending: see `Spin`.
        .setup_taskrun_flag()
        .setup_cqsize(ENTRIES * 4)
        .build(ENTRIES);
    let ring = match modern {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            IoUring::builder().setup_cqsize(ENTRIES * 4).build(ENTRIES)?
        }
        ring => ring?,
    };
    let mut probe = Probe::new();
    ring.submitter().register_probe(&mut probe)?;
    let needed = [
        ("read", opcode::Read::CODE),
        ("write", opcode::Write::CODE),
        ("read into registered memory", opcode::ReadFixed::CODE),
        ("write from registered memory", opcode::WriteFixed::CODE),
        ("fsync", opcode::Fsync::CODE),
        ("fallocate", opcode::Fallocate::CODE),
        ("poll", opcode::PollAdd::CODE),
        ("poll removal", opcode::PollRemove::CODE),
        ("receive", opcode::Recv::CODE),
        ("cancel", opcode::AsyncCancel::CODE),
    ];
    for (name, code) in needed {
        if !probe.is_supported(code) {
            return Err(io::Error::other(format!("the kernel's io_uring has no {name}")));
        }
    }
    if !ring.params().is_feature_ext_arg() {
        return Err(io::Error::other("the kernel's io_uring has no timeouts on waiting"));
    }
    Ok(ring)
}

impl UringDriver {
    pub(crate) fn new(wakeup: Arc<Wakeup>) -> io::Result<UringDriver> {
        let ring = make_ring()?;
        let gathers = ring.params().is_feature_min_timeout();
        Ok(UringDriver {
            ring,
            fixed: FixedBuffers::default(),
            wakeup,
            wake_armed: false,
            ops: Vec::new(),
            writes: 0,
            gathers,
            spin: Spin::default(),
            failed: None,
        })
    }

    fn push(&mut self, entry: &squeue::Entry) {
        loop {
            // SAFETY: memory behind the entry is owned by `self.ops` until its completion is seen,
            // and descriptors are kept open by the operation or by the waiting future.
            if unsafe { self.ring.submission().push(entry) }.is_ok() {
                return;
            }
            // The queue is full: submit it. EBUSY means that completions have to be taken first;
            // the completion queue is large enough for that to be short.
            let submitted = self.ring.submit();
            if let Err(error) = &submitted {
                log::trace!("io_uring submit: {}", crate::plain(&error));
                std::thread::yield_now();
            }
            if let Err(error) = harmless(submitted) {
                // The operation is not submitted: it fails with all others.
                self.failed = Some(error);
                return;
            }
        }
    }

    /// Submits what was collected and spins for a while.
    fn look(&mut self, sleep: SleepLimit) -> io::Result<bool> {
        if !self.ring.submission().is_empty() {
            harmless(self.ring.submit())?;
        }
        let UringDriver { ring, spin, .. } = self;
        Ok(spin.look(sleep.most(), || {
            // Completion work waits for a call (the first), or has been done without one.
            ring.submission().taskrun() || !ring.completion().is_empty()
        }))
    }

    fn reap(&mut self, done: &mut Vec<OpCompletion>) {
        for completion in self.ring.completion() {
            match completion.user_data() {
                IGNORE => {}
                WAKE => {
                    self.wake_armed = false;
                    self.wakeup.clear();
                }
                slot => {
                    let slot = usize::try_from(slot).expect("slots are table indexes");
                    let op = self.ops.get_mut(slot).and_then(Option::take);
                    self.writes -= usize::from(matches!(op, Some(FileOp::Write { .. })));
                    done.push(OpCompletion { slot, result: completion.result(), op });
                }
            }
        }
    }
}

impl Driver for UringDriver {
    fn arm(&mut self, fd: RawFd, interest: Interest, slot: usize) {
        let events = match interest {
            Interest::Readable => libc::POLLIN | libc::POLLRDHUP,
            Interest::Writable => libc::POLLOUT,
        };
        let events = u32::from(events.unsigned_abs());
        let entry = opcode::PollAdd::new(types::Fd(fd), events).build().user_data(slot as u64);
        self.push(&entry);
    }

    fn disarm(&mut self, slot: usize) {
        let entry = opcode::PollRemove::new(slot as u64).build().user_data(IGNORE);
        self.push(&entry);
    }

    fn start(&mut self, mut op: FileOp, slot: usize) {
        let entry = match &mut op {
            FileOp::Read { file, buf, start, at, direct } => {
                let number = direct.then(|| self.fixed.number(&self.ring.submitter(), buf.block()));
                let fd = types::Fd(file.as_raw_fd());
                let at = *at;
                let part = &mut buf[*start..];
                let ptr = part.as_mut_ptr();
                let len = u32::try_from(part.len()).unwrap_or(u32::MAX);
                match number.flatten() {
                    Some(number) => opcode::ReadFixed::new(fd, ptr, len, number).offset(at).build(),
                    None => opcode::Read::new(fd, ptr, len).offset(at).build(),
                }
            }
            FileOp::Write { file, data, start, at, direct } => {
                let block = data.block().filter(|_| *direct);
                let number =
                    block.and_then(|block| self.fixed.number(&self.ring.submitter(), block));
                let fd = types::Fd(file.as_raw_fd());
                let at = *at;
                let part = &data.bytes()[*start..];
                let ptr = part.as_ptr();
                let len = u32::try_from(part.len()).unwrap_or(u32::MAX);
                match number {
                    Some(number) => {
                        opcode::WriteFixed::new(fd, ptr, len, number).offset(at).build()
                    }
                    None => opcode::Write::new(fd, ptr, len).offset(at).build(),
                }
            }
            FileOp::Sync { file, data_only } => {
                let flags = if *data_only {
                    types::FsyncFlags::DATASYNC
                } else {
                    types::FsyncFlags::empty()
                };
                opcode::Fsync::new(types::Fd(file.as_raw_fd())).flags(flags).build()
            }
            FileOp::Allocate { file, mode, at, len } => {
                opcode::Fallocate::new(types::Fd(file.as_raw_fd()), *len)
                    .offset(*at)
                    .mode(*mode)
                    .build()
            }
            FileOp::Recv { socket, buf, start, end } => {
                let part = &mut buf[*start..*end];
                let len = u32::try_from(part.len()).unwrap_or(u32::MAX);
                opcode::Recv::new(types::Fd(socket.as_raw_fd()), part.as_mut_ptr(), len)
                    .ioprio(RECV_POLL_FIRST)
                    .build()
            }
        };
        if self.ops.len() <= slot {
            self.ops.resize_with(slot + 1, || None);
        }
        // Buffers live on the heap, so moving the operation does not move what the entry points at.
        self.writes += usize::from(matches!(op, FileOp::Write { .. }));
        self.ops[slot] = Some(op);
        self.push(&entry.user_data(slot as u64));
    }

    fn receives(&self) -> bool {
        true
    }

    fn cancel(&mut self, slot: usize) {
        let entry = opcode::AsyncCancel::new(slot as u64).build().user_data(IGNORE);
        self.push(&entry);
    }

    fn turn(
        &mut self,
        sleep: SleepLimit,
        may_look: bool,
        done: &mut Vec<OpCompletion>,
    ) -> io::Result<()> {
        let entered = self.enter(sleep, may_look);
        self.reap(done);
        match self.failed.take() {
            Some(error) => Err(error),
            None => entered,
        }
    }
}

impl UringDriver {
    /// The part of a turn that enters the kernel.
    fn enter(&mut self, sleep: SleepLimit, may_look: bool) -> io::Result<()> {
        if !self.wake_armed {
            self.wake_armed = true;
            let fd = types::Fd(self.wakeup.as_raw_fd());
            let events = u32::from(libc::POLLIN.unsigned_abs());
            let entry = opcode::PollAdd::new(fd, events).build().user_data(WAKE);
            self.push(&entry);
        }
        let many = self.gathers && self.writes >= WRITES_MANY;
        let (sleep, begun) = match sleep {
            SleepLimit::No => (sleep, None),
            _ if many || !may_look => (sleep, None),
            _ if !self.spin.looks() => (sleep, Some(Instant::now())),
            _ => (if self.look(sleep)? { SleepLimit::No } else { sleep }, None),
        };
        let result = match sleep {
            SleepLimit::Forever if many => {
                let args = types::SubmitArgs::new().min_wait_usec(GATHER_USEC);
                self.ring.submitter().submit_with_args(self.writes / GATHER_PART, &args)
            }
            SleepLimit::AtMost(time) if many => {
                let time = types::Timespec::from(time);
                let args = types::SubmitArgs::new().timespec(&time).min_wait_usec(GATHER_USEC);
                self.ring.submitter().submit_with_args(self.writes / GATHER_PART, &args)
            }
            SleepLimit::Forever => self.ring.submit_and_wait(1),
            SleepLimit::No => {
                let args = types::SubmitArgs::new();
                let zero = types::Timespec::from(Duration::ZERO);
                self.ring.submitter().submit_with_args(1, &args.timespec(&zero))
            }
            SleepLimit::AtMost(time) => {
                let time = types::Timespec::from(time);
                let args = types::SubmitArgs::new().timespec(&time);
                self.ring.submitter().submit_with_args(1, &args)
            }
        };
        harmless(result)?;
        if let Some(begun) = begun {
            self.spin.slept(begun.elapsed());
        }
        Ok(())
    }
}

/// Errors of a turn that mean: try again.
fn harmless(result: io::Result<usize>) -> io::Result<()> {
    let harmless = [libc::ETIME, libc::EINTR, libc::EBUSY, libc::EAGAIN];
    match result {
        Err(error) if !error.raw_os_error().is_some_and(|number| harmless.contains(&number)) => {
            Err(error)
        }
        _ => Ok(()),
    }
}

impl Drop for UringDriver {
    fn drop(&mut self) {
        // The worker ends when no file operation is in flight, but receives may be; after a failure
        // of the ring any operation may be. The memory must outlive the ring, so it is leaked
        // rather than freed.
        for op in self.ops.drain(..).flatten() {
            if let FileOp::Recv { socket, .. } = &op {
                // Close the connection for the peer, as the socket leaks. Fails only if the
                // connection has already ended.
                let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Both);
            }
            std::mem::forget(op);
        }
    }
}
