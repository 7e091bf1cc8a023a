//! The ways to zero a range, best first; each is dropped for good once the file has refused it.

use std::sync::atomic::{AtomicBool, Ordering};

use blockhaul_block::Flags;
use blockhaul_io::Allocate;

/// The ways that the file has not refused yet.
pub(super) struct Ways {
    is_disk: bool,
    punch: AtomicBool,
    zero_range: AtomicBool,
    reserve: AtomicBool,
    /// Only for disks: discard without a promise of zeroes.
    pub(super) discard: AtomicBool,
}

/// One way to zero without sending zeroes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    Punch,
    ZeroRange,
    PunchAndReserve,
}

impl Ways {
    pub(super) fn new(is_disk: bool) -> Ways {
        let yes = || AtomicBool::new(true);
        Ways {
            is_disk,
            punch: yes(),
            zero_range: yes(),
            reserve: AtomicBool::new(!is_disk),
            discard: AtomicBool::new(is_disk),
        }
    }

    /// The ways to try, in order.
    pub(super) fn order(&self, flags: Flags) -> &'static [Way] {
        let keep = flags.contains(Flags::NO_HOLE);
        match (self.is_disk, flags.contains(Flags::FAST), keep) {
            // If a disk cannot mark a range as zero, the kernel writes zeroes: not fast.
            (true, true, true) => &[],
            (true, true, false) => &[Way::Punch],
            (true, false, true) => &[Way::ZeroRange],
            (false, _, true) => &[Way::ZeroRange, Way::PunchAndReserve],
            (_, _, false) => &[Way::Punch, Way::ZeroRange],
        }
    }

    pub(super) fn flag(&self, how: Allocate) -> &AtomicBool {
        match how {
            Allocate::PunchHole => &self.punch,
            Allocate::ZeroRange => &self.zero_range,
            Allocate::Reserve => &self.reserve,
        }
    }

    pub(super) fn left(&self, way: Way) -> bool {
        way.steps().iter().all(|&how| self.flag(how).load(Ordering::Relaxed))
    }

    /// As if the file had refused this.
    #[cfg(test)]
    pub(super) fn refuse(&self, how: Allocate) {
        self.flag(how).store(false, Ordering::Relaxed);
    }
}

impl Way {
    pub(super) fn steps(self) -> &'static [Allocate] {
        match self {
            Way::Punch => &[Allocate::PunchHole],
            Way::ZeroRange => &[Allocate::ZeroRange],
            Way::PunchAndReserve => &[Allocate::PunchHole, Allocate::Reserve],
        }
    }
}
