//! Purposes for which ranges of the cache are locked, and which of them are compatible.

/// What a range is locked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CacheHold {
    /// To change the range exclusively.
    Alone,
    /// To use the range in place: shared with all but `Alone`.
    Stay,
    /// To write; the old data may be written back meanwhile.
    Write,
    /// To write back, one task at a time.
    Carry,
}

impl blockhaul_io::LockMode for CacheHold {
    fn excludes(self, other: CacheHold) -> bool {
        matches!(
            (self, other),
            (CacheHold::Alone, _)
                | (_, CacheHold::Alone)
                | (CacheHold::Write, CacheHold::Write)
                | (CacheHold::Carry, CacheHold::Carry)
        )
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use blockhaul_io::RangeLocks;

    use super::*;

    #[test]
    fn who_does_not_go_together_waits() {
        use CacheHold::{Alone, Carry, Stay, Write};
        let free_beside = |first, second| {
            let locks = Arc::<RangeLocks<CacheHold>>::default();
            let held = locks.try_lock_for(first, 10, 20).unwrap();
            assert!(locks.try_lock_for(second, 0, 10).is_some(), "a neighbour");
            let free = locks.try_lock_for(second, 19, 21).is_some();
            drop(held);
            assert!(locks.try_lock_for(Alone, 0, 99).is_some(), "everything is free again");
            free
        };
        for (first, second, expected) in [
            (Alone, Stay, false),
            (Write, Alone, false),
            (Write, Write, false),
            (Write, Carry, true),
            (Carry, Carry, false),
            (Carry, Stay, true),
            (Stay, Stay, true),
            (Stay, Write, true),
        ] {
            assert_eq!(free_beside(first, second), expected, "{first:?} {second:?}");
            assert_eq!(free_beside(second, first), expected, "{second:?} {first:?}");
        }
    }
}
