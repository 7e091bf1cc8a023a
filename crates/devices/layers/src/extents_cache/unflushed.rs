//! Ranges that zero and trim requests have changed since the last flush. A server that crashes may lose
//! such a change, and a layer below may reconnect to it: what was zero is data again.

/// Maximum number of ranges; further ones are joined with what lies between.
const MAX: usize = 1024;
/// The handle of a range that several have changed. Handles are numbered from 1.
const SEVERAL: u64 = 0;

/// A changed range.
struct UnflushedChange {
    start: u64,
    end: u64,
    /// The handle that has changed it.
    handle: u64,
    /// Its position in the order of changes.
    number: u64,
}

/// The changed ranges of a disk.
#[derive(Default)]
pub(super) struct UnflushedChanges {
    changes: Vec<UnflushedChange>,
    /// Counts changes.
    number: u64,
}

impl UnflushedChanges {
    /// A range was changed through this handle.
    pub(super) fn add(&mut self, handle: u64, start: u64, end: u64) {
        self.number += 1;
        let number = self.number;
        // Most changes come in order.
        if let Some(last) = self.changes.last_mut()
            && last.handle == handle
            && last.end == start
        {
            last.end = end;
            last.number = number;
            return;
        }
        if self.changes.len() >= MAX {
            let own = self.changes.iter().position(|change| change.handle == handle);
            let joined = &mut self.changes[own.unwrap_or(0)];
            joined.start = joined.start.min(start);
            joined.end = joined.end.max(end);
            joined.number = number;
            if own.is_none() {
                joined.handle = SEVERAL;
            }
            return;
        }
        self.changes.push(UnflushedChange { start, end, handle, number });
    }

    /// The changes that a flush that begins now covers.
    pub(super) fn so_far(&self) -> u64 {
        self.number
    }

    /// A flush through this handle has succeeded. `all`: it covers those of other handles.
    pub(super) fn flushed(&mut self, handle: u64, so_far: u64, all: bool) {
        self.changes.retain(|change| change.number > so_far || change.handle != handle && !all);
    }

    /// The ranges, start and end.
    pub(super) fn ranges(&self) -> impl Iterator<Item = (u64, u64)> {
        self.changes.iter().map(|change| (change.start, change.end))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranges(unflushed: &UnflushedChanges) -> Vec<(u64, u64)> {
        unflushed.ranges().collect()
    }

    #[test]
    fn a_flush_covers_what_was_changed_before_it_through_its_handle() {
        let mut unflushed = UnflushedChanges::default();
        unflushed.add(1, 0, 10);
        unflushed.add(1, 10, 20);
        unflushed.add(2, 50, 60);
        let so_far = unflushed.so_far();
        unflushed.add(1, 20, 30);
        unflushed.flushed(1, so_far, false);
        assert_eq!(ranges(&unflushed), [(50, 60), (20, 30)]);
        unflushed.flushed(1, so_far, true);
        assert_eq!(ranges(&unflushed), [(20, 30)]);
        unflushed.flushed(1, unflushed.so_far(), false);
        assert_eq!(ranges(&unflushed), []);
    }

    #[test]
    fn a_range_that_grows_is_flushed_as_a_whole() {
        let mut unflushed = UnflushedChanges::default();
        unflushed.add(1, 0, 10);
        let so_far = unflushed.so_far();
        unflushed.add(1, 10, 20);
        unflushed.flushed(1, so_far, false);
        assert_eq!(ranges(&unflushed), [(0, 20)]);
    }

    #[test]
    fn many_ranges_become_one_that_has_them_all() {
        // Of few handles, and of a handle each.
        for handles in [3, u64::MAX] {
            let mut unflushed = UnflushedChanges::default();
            for number in 0..3 * MAX as u64 {
                unflushed.add(number % handles + 1, number * 20, number * 20 + 10);
            }
            assert!(unflushed.changes.len() <= MAX);
            for number in 0..3 * MAX as u64 {
                let at = number * 20;
                assert!(ranges(&unflushed).iter().any(|range| range.0 <= at && at + 10 <= range.1));
            }
            // A range of several handles is covered by a flush that covers all of them.
            let so_far = unflushed.so_far();
            for handle in 1..=3 * MAX as u64 {
                unflushed.flushed(handle, so_far, false);
            }
            assert_eq!(ranges(&unflushed).len(), usize::from(handles > 3));
            unflushed.flushed(1, so_far, true);
            assert_eq!(ranges(&unflushed), []);
        }
    }
}
