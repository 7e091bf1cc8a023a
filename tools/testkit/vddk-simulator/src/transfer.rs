//! Reads and writes: how long they take, and the threads that carry them out.

use std::ffi::c_void;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::disk::SimulatedDisk;
use crate::job::{Transfer, TransferCallback, TransferJob};
use crate::state::{CallExtra, LibraryState, SIMULATOR, Simulator};
use crate::types::{
    ASYNC, FAIL, FILE_ERROR, INVALID, OK, OUT_OF_MEMORY, READ_ONLY, SECTOR, VixError,
};

/// Longest wait of an idle thread: it then looks whether the library was ended.
const IDLE: Duration = Duration::from_secs(1);

impl Simulator {
    /// Starts an asynchronous transfer; returns [`ASYNC`] or an error.
    pub(crate) fn start(&self, transfer: Transfer, answer: TransferCallback) -> VixError {
        let function = transfer.function;
        let begun = self.begin(function, |state, extra| {
            let due = state.admit(&transfer, extra)?;
            let handle = state.handle(function, transfer.handle)?;
            handle.unanswered += 1;
            handle.busy += 1;
            state.counters.in_flight += 1;
            let counters = &mut state.counters;
            counters.most_in_flight = counters.most_in_flight.max(counters.in_flight);
            state.jobs.push(TransferJob { due, transfer, answer, started: Instant::now() });
            Ok(())
        });
        match begun {
            Ok(Ok(())) => {
                self.work.notify_one();
                ASYNC
            }
            Ok(Err(error)) | Err(error) => error,
        }
    }

    /// Carries out a transfer, and returns its result.
    pub(crate) fn now(&self, mut transfer: Transfer) -> VixError {
        let started = Instant::now();
        let function = transfer.function;
        let number = transfer.handle;
        let begun = self.begin(function, |state, extra| {
            let due = state.admit(&transfer, extra)?;
            Ok((due, state.handle(function, number)?.disk.clone()))
        });
        let (due, disk) = match begun {
            Ok(Ok(begun)) => begun,
            Ok(Err(error)) | Err(error) => return error,
        };
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        let result = carry_out(&disk, &mut transfer);
        if let Some(state) = self.lock().as_mut() {
            let bytes = transfer.count.saturating_mul(SECTOR);
            state.counters.end(function, result != OK, bytes, started.elapsed());
        }
        result
    }

    /// The life of a thread for asynchronous transfers.
    pub(crate) fn transfer(&self) {
        let mut guard = self.lock();
        loop {
            let Some(state) = guard.as_mut() else { return };
            let now = Instant::now();
            let wait = state.jobs.peek().map_or(IDLE, |job| job.due.saturating_duration_since(now));
            if !wait.is_zero() {
                guard = match self.work.wait_timeout(guard, wait.min(IDLE)) {
                    Ok((guard, _)) => guard,
                    Err(poisoned) => poisoned.into_inner().0,
                };
                continue;
            }
            let Some(job) = state.jobs.pop() else { continue };
            let disk = state.handles.get(&job.transfer.handle).map(|handle| handle.disk.clone());
            drop(guard);
            self.finish(job, disk);
            guard = self.lock();
        }
    }

    fn finish(&self, job: TransferJob, disk: Option<Arc<SimulatedDisk>>) {
        let TransferJob { mut transfer, answer, started, .. } = job;
        let result = match disk {
            Some(disk) => carry_out(&disk, &mut transfer),
            None => FAIL,
        };
        if let Some(state) = self.lock().as_mut() {
            let bytes = transfer.count.saturating_mul(SECTOR);
            state.counters.end(transfer.function, result != OK, bytes, started.elapsed());
            state.counters.in_flight = state.counters.in_flight.saturating_sub(1);
            if let Some(handle) = state.handles.get_mut(&transfer.handle) {
                handle.unanswered = handle.unanswered.saturating_sub(1);
            }
        }
        // The memory belongs to the program from here on.
        let number = transfer.handle;
        (answer.callback)(std::ptr::without_provenance_mut::<c_void>(answer.data), result);
        if let Some(state) = self.lock().as_mut()
            && let Some(handle) = state.handles.get_mut(&number)
        {
            handle.busy = handle.busy.saturating_sub(1);
        }
        self.answered.notify_all();
    }

    /// Waits until all asynchronous transfers of a handle have been answered.
    pub(crate) fn wait(&self, function: &'static str, number: usize) -> Result<(), VixError> {
        let mut guard = self.lock();
        loop {
            let state = guard.as_mut().ok_or(FAIL)?;
            if state.handle(function, number)?.busy == 0 {
                return Ok(());
            }
            guard = match self.answered.wait(guard) {
                Ok(guard) => guard,
                Err(poisoned) => poisoned.into_inner(),
            };
        }
    }

    /// Closes a handle.
    pub(crate) fn close(&self, number: usize) -> Result<(), VixError> {
        let look = |state: &mut LibraryState| {
            if state.handle("Close", number)?.unanswered > 0 {
                state.misuse("Close is called while requests are in flight");
            }
            Ok(())
        };
        self.lock().as_mut().map_or(Err(FAIL), look)?;
        // A callback may have let the program close, and not have returned yet.
        self.wait("Close", number)?;
        if let Some(state) = self.lock().as_mut() {
            state.handles.remove(&number);
        }
        Ok(())
    }
}

impl LibraryState {
    /// Checks a transfer; returns when it ends.
    fn admit(&mut self, transfer: &Transfer, extra: CallExtra) -> Result<Instant, VixError> {
        let &Transfer { function, handle: number, write, sector, count, .. } = transfer;
        let align = self.settings.align;
        let longest = self.settings.longest;
        let handle = self.handle(function, number)?;
        let sectors = handle.sectors;
        let read_only = handle.read_only;
        let end = sector.checked_add(count);
        if count == 0 || end.is_none_or(|end| end > sectors) {
            self.misuse(&format!("{function}: sectors {sector} to {end:?} of {sectors}"));
            return Err(INVALID);
        }
        if write && read_only {
            self.misuse(&format!("{function}: the disk is read-only"));
            return Err(READ_ONLY);
        }
        if !transfer.memory.address().is_multiple_of(usize::try_from(align).unwrap_or(1)) {
            self.misuse(&format!("{function}: memory is not a multiple of {align}"));
            return Err(INVALID);
        }
        let bytes = count * SECTOR;
        if longest > 0 && bytes > longest {
            return Err(OUT_OF_MEMORY);
        }
        let jitter = u64::try_from(self.settings.jitter.as_nanos()).unwrap_or(u64::MAX);
        let jitter = Duration::from_nanos(self.random(jitter.saturating_add(1)));
        let latency = self.settings.latency;
        let rate = self.settings.rate;
        let handle = self.handle(function, number)?;
        let path = handle.path.clone();
        let query = self.busy.get(&path).copied();
        let handle = self.handle(function, number)?;
        let begin = handle.free.max(Instant::now());
        let begin = query.map_or(begin, |end| begin.max(end));
        let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(rate.max(1));
        let move_time = match rate {
            0 => Duration::ZERO,
            _ => Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX)),
        };
        handle.free = begin + move_time;
        Ok(handle.free + latency + jitter + extra.delay)
    }
}

fn carry_out(disk: &SimulatedDisk, transfer: &mut Transfer) -> VixError {
    let at = transfer.sector * SECTOR;
    let result = if transfer.write {
        disk.write(at, transfer.memory.bytes())
    } else {
        disk.read(at, transfer.memory.bytes_mut())
    };
    if result.is_ok() { OK } else { FILE_ERROR }
}

/// Delays all transfers of a disk: a query has the disk for itself.
pub(crate) fn delay(state: &mut LibraryState, path: &std::path::Path, by: Duration) {
    let now = Instant::now();
    let on_disk: Vec<usize> = state
        .handles
        .iter_mut()
        .filter(|(_, handle)| handle.path == path)
        .map(|(number, handle)| {
            if handle.free > now {
                handle.free += by;
            }
            *number
        })
        .collect();
    let jobs = std::mem::take(&mut state.jobs).into_vec().into_iter();
    state.jobs =
        jobs.map(|job| if on_disk.contains(&job.handle()) { job.later(by) } else { job }).collect();
    SIMULATOR.work.notify_all();
}
