//! Sets of ranges, each with its start and its end in bytes.

/// The same set in ascending order, without empty ranges: ranges that overlap or touch are joined.
pub fn join_ranges(mut ranges: Vec<(u64, u64)>) -> Vec<(u64, u64)> {
    ranges.retain(|(start, end)| start < end);
    ranges.sort_unstable();
    ranges.dedup_by(|next, last| {
        let joined = next.0 <= last.1;
        if joined {
            last.1 = last.1.max(next.1);
        }
        joined
    });
    ranges
}

/// The ranges from 0 to `size` that are outside of a joined set, in ascending order.
pub fn gaps(joined: &[(u64, u64)], size: u64) -> Vec<(u64, u64)> {
    let mut at = 0;
    let mut found = Vec::new();
    for &(start, end) in joined.iter().chain([&(size, size)]) {
        if at < start.min(size) {
            found.push((at, start.min(size)));
        }
        at = at.max(end);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_joined_in_order() {
        let ranges = vec![(9, 9), (5, 8), (0, 2), (2, 3), (6, 7), (8, 10), (12, 13)];
        assert_eq!(join_ranges(ranges), [(0, 3), (5, 10), (12, 13)]);
        assert_eq!(join_ranges(vec![(3, 2), (0, u64::MAX), (7, 9)]), [(0, u64::MAX)]);
        assert_eq!(join_ranges(Vec::new()), []);
    }

    #[test]
    fn gaps_are_what_no_range_has() {
        assert_eq!(gaps(&[(0, 3), (5, 10)], 10), [(3, 5)]);
        assert_eq!(gaps(&[(1, 3), (5, 10)], 12), [(0, 1), (3, 5), (10, 12)]);
        assert_eq!(gaps(&[(1, 3), (5, 10), (14, 20)], 12), [(0, 1), (3, 5), (10, 12)]);
        assert_eq!(gaps(&[(0, 20)], 12), []);
        assert_eq!(gaps(&[], 12), [(0, 12)]);
        assert_eq!(gaps(&[], 0), []);
    }
}
