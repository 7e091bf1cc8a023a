//! The ways to zero a range, best first; each is dropped for good once the file has refused it.

use std::sync::atomic::{AtomicBool, Ordering};

use blockhaul_block::RequestFlags;
use blockhaul_io::FallocateMode;

/// The ways that the file has not refused yet.
pub(super) struct ZeroMethods {
    is_disk: bool,
    punch: AtomicBool,
    zero_range: AtomicBool,
    reserve: AtomicBool,
    /// Only for disks: discard without a promise of zeroes.
    pub(super) discard: AtomicBool,
}

/// One way to zero without sending zeroes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ZeroMethod {
    Punch,
    ZeroRange,
    PunchAndReserve,
}

impl ZeroMethods {
    pub(super) fn new(is_disk: bool) -> ZeroMethods {
        let yes = || AtomicBool::new(true);
        ZeroMethods {
            is_disk,
            punch: yes(),
            zero_range: yes(),
            reserve: AtomicBool::new(!is_disk),
            discard: AtomicBool::new(is_disk),
        }
    }

    /// The ways to try, in order.
    pub(super) fn order(&self, flags: RequestFlags) -> &'static [ZeroMethod] {
        let keep = flags.contains(RequestFlags::NO_HOLE);
        match (self.is_disk, flags.contains(RequestFlags::FAST), keep) {
            // If a disk cannot mark a range as zero, the kernel writes zeroes: not fast.
            (true, true, true) => &[],
            (true, true, false) => &[ZeroMethod::Punch],
            (true, false, true) => &[ZeroMethod::ZeroRange],
            (false, _, true) => &[ZeroMethod::ZeroRange, ZeroMethod::PunchAndReserve],
            (_, _, false) => &[ZeroMethod::Punch, ZeroMethod::ZeroRange],
        }
    }

    pub(super) fn flag(&self, how: FallocateMode) -> &AtomicBool {
        match how {
            FallocateMode::PunchHole => &self.punch,
            FallocateMode::ZeroRange => &self.zero_range,
            FallocateMode::Reserve => &self.reserve,
        }
    }

    pub(super) fn left(&self, way: ZeroMethod) -> bool {
        way.steps().iter().all(|&how| self.flag(how).load(Ordering::Relaxed))
    }

    /// As if the file had refused this.
    #[cfg(test)]
    pub(super) fn refuse(&self, how: FallocateMode) {
        self.flag(how).store(false, Ordering::Relaxed);
    }
}

impl ZeroMethod {
    pub(super) fn steps(self) -> &'static [FallocateMode] {
        match self {
            ZeroMethod::Punch => &[FallocateMode::PunchHole],
            ZeroMethod::ZeroRange => &[FallocateMode::ZeroRange],
            ZeroMethod::PunchAndReserve => &[FallocateMode::PunchHole, FallocateMode::Reserve],
        }
    }
}
