//! What the kernel can copy between two files, as far as known: shared by all lanes of a copy,
//! which use it in `lane::reflink` and `lane::copy_range`.
//!
//! Whether copy_file_range is faster than reading and writing depends on file systems, the kernel
//! and the machine, so it is measured: the first lane with a long enough range copies one part one
//! way and the next part the other way, twice. The best results are compared: the kernel must be
//! faster by a quarter.

use std::sync::Mutex;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use crate::options::KernelCopyMode;

/// Bytes of a measurement: some milliseconds from memory to memory.
const PROBE: u64 = 8 << 20;
/// Measurements of each way. The best counts: interference only makes a way slower.
const PROBES: usize = 2;
/// How much faster the kernel must be: smaller differences are noise in such short measurements,
/// and requests keep more in flight when a disk is the bottleneck.
const GAIN: f64 = 1.25;

/// What the files have not refused yet, for all lanes of a copy.
pub(crate) struct KernelCopy {
    pub(crate) reflink: AtomicBool,
    pub(crate) copy_range: CopyRange,
}

impl KernelCopy {
    pub(crate) fn new(by_kernel: KernelCopyMode) -> KernelCopy {
        KernelCopy {
            reflink: AtomicBool::new(by_kernel == KernelCopyMode::Auto),
            copy_range: CopyRange::new(by_kernel),
        }
    }
}

/// The state of copy_file_range, for all lanes of a copy.
pub(crate) struct CopyRange {
    /// Use it between any two files, without a measurement.
    pub(crate) always: bool,
    state: Mutex<CopyRangeState>,
}

#[derive(Debug)]
enum CopyRangeState {
    /// Not decided; the number of the lane that measures, if one does.
    Open(Option<u32>, SpeedTrial),
    /// In use.
    Taken,
    /// Refused, slower, or disabled.
    Left,
}

/// What copies the next range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CopyMethod {
    Kernel,
    /// The kernel, timed; at most this many bytes.
    TimeKernel(u64),
    /// Requests, timed; at most this many bytes.
    TimeRequests(u64),
    Requests,
}

impl CopyRange {
    pub(crate) fn new(by_kernel: KernelCopyMode) -> CopyRange {
        let state = match by_kernel {
            KernelCopyMode::Auto => CopyRangeState::Open(None, SpeedTrial::default()),
            KernelCopyMode::Never => CopyRangeState::Left,
            KernelCopyMode::CopyRange => CopyRangeState::Taken,
        };
        CopyRange { always: by_kernel == KernelCopyMode::CopyRange, state: Mutex::new(state) }
    }

    /// Whether it is not used, or not used any more.
    pub(crate) fn is_left(&self) -> bool {
        matches!(*self.state.lock().expect("no panic under this lock"), CopyRangeState::Left)
    }

    /// What copies the next range of this lane.
    pub(crate) fn turn(&self, lane: u32) -> CopyMethod {
        match &mut *self.state.lock().expect("no panic under this lock") {
            CopyRangeState::Taken => CopyMethod::Kernel,
            CopyRangeState::Open(owner, trial) => {
                if *owner.get_or_insert(lane) == lane {
                    trial.turn()
                } else {
                    CopyMethod::Requests
                }
            }
            CopyRangeState::Left => CopyMethod::Requests,
        }
    }

    /// Stops using it.
    pub(crate) fn leave(&self) {
        *self.state.lock().expect("no panic under this lock") = CopyRangeState::Left;
    }

    /// Counts a measurement, and decides when there are enough.
    pub(crate) fn note(&self, bytes: u64, time: Duration) {
        let mut state = self.state.lock().expect("no panic under this lock");
        let CopyRangeState::Open(_, trial) = &mut *state else { return };
        trial.note(bytes, time);
        let Some(pays) = trial.pays() else { return };
        let [kernel, requests] = trial.best.map(|pace| pace / f64::from(1 << 20));
        let verdict = if pays { "is used" } else { "is not used" };
        log::debug!(
            "copy_file_range {verdict}: {kernel:.0} MiB/s, reading and writing {requests:.0} MiB/s"
        );
        *state = if pays { CopyRangeState::Taken } else { CopyRangeState::Left };
    }
}

/// The measurements, alternately by the kernel and by requests.
#[derive(Debug, Default)]
struct SpeedTrial {
    /// Number of completed measurements.
    over: usize,
    /// Bytes of the current one.
    bytes: u64,
    time: Duration,
    /// Best rates in bytes per second, by the kernel and by requests.
    best: [f64; 2],
}

impl SpeedTrial {
    fn turn(&self) -> CopyMethod {
        let left = PROBE - self.bytes;
        if self.over.is_multiple_of(2) {
            CopyMethod::TimeKernel(left)
        } else {
            CopyMethod::TimeRequests(left)
        }
    }

    fn note(&mut self, bytes: u64, time: Duration) {
        self.bytes += bytes;
        self.time += time;
        if self.bytes < PROBE {
            return;
        }
        let pace = self.bytes as f64 / self.time.as_secs_f64().max(1e-9);
        let best = &mut self.best[self.over % 2];
        *best = best.max(pace);
        self.over += 1;
        (self.bytes, self.time) = (0, Duration::ZERO);
    }

    /// Whether the kernel is clearly faster; `None`: not known yet.
    fn pays(&self) -> Option<bool> {
        (self.over == 2 * PROBES).then_some(self.best[0] >= self.best[1] * GAIN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(paces: [u64; 2 * PROBES]) -> bool {
        let mut trial = SpeedTrial::default();
        for (number, mib) in paces.into_iter().enumerate() {
            let kernel = matches!(trial.turn(), CopyMethod::TimeKernel(PROBE));
            assert_eq!(kernel, number % 2 == 0);
            assert_eq!(trial.pays(), None);
            // In parts, as ranges come.
            let time = Duration::from_secs_f64(8.0 / mib as f64);
            trial.note(PROBE / 4, time / 4);
            trial.note(PROBE - PROBE / 4, time - time / 4);
        }
        trial.pays().expect("there are enough")
    }

    #[test]
    fn the_best_of_each_way_is_compared() {
        assert!(measured([1000, 500, 1000, 500]));
        assert!(measured([300, 500, 1000, 700]), "the kernel was disturbed once");
        assert!(!measured([300, 500, 400, 200]), "requests were disturbed once");
        assert!(!measured([600, 600, 500, 500]), "too little is gained");
    }

    #[test]
    fn one_lane_measures_and_the_others_go_on() {
        let range = CopyRange::new(KernelCopyMode::Auto);
        assert_eq!(range.turn(3), CopyMethod::TimeKernel(PROBE));
        assert_eq!(range.turn(1), CopyMethod::Requests);
        range.note(PROBE - 1, Duration::from_millis(1));
        assert_eq!(range.turn(3), CopyMethod::TimeKernel(1));
        range.leave();
        range.note(PROBE, Duration::from_millis(1));
        assert_eq!(range.turn(3), CopyMethod::Requests, "it was refused in the meantime");
        assert_eq!(CopyRange::new(KernelCopyMode::Never).turn(0), CopyMethod::Requests);
        assert_eq!(CopyRange::new(KernelCopyMode::CopyRange).turn(0), CopyMethod::Kernel);
    }
}
