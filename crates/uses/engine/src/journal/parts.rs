//! Segments of which a copy selects a part only: the journal records one when all its parts are durable.

use std::collections::BTreeMap;

use crate::ledger::SegmentRange;

/// The selected parts of segments that are not selected as a whole.
#[derive(Debug)]
pub(crate) struct SelectedParts {
    /// Bytes of a segment.
    segment: u64,
    /// By the number of the segment. Those that are recorded are removed.
    partial: BTreeMap<u64, SegmentParts>,
}

#[derive(Debug, Default)]
struct SegmentParts {
    /// Ascending and disjoint.
    selected: Vec<SegmentRange>,
    /// Durable: ascending, disjoint, and not adjacent.
    durable: Vec<SegmentRange>,
}

impl SegmentParts {
    fn add(&mut self, (start, end): SegmentRange) {
        let first = self.durable.partition_point(|range| range.1 < start);
        let behind = self.durable.partition_point(|range| range.0 <= end);
        let joined = self.durable[first..behind]
            .iter()
            .fold((start, end), |joined, range| (joined.0.min(range.0), joined.1.max(range.1)));
        self.durable.splice(first..behind, [joined]);
    }

    fn are_durable(&self) -> bool {
        self.selected.iter().all(|part| {
            let behind = self.durable.partition_point(|range| range.0 <= part.0);
            behind > 0 && self.durable[behind - 1].1 >= part.1
        })
    }
}

impl SelectedParts {
    /// The parts that these ranges, ascending and disjoint, select of segments of `segment` bytes.
    pub(crate) fn new(ranges: &[SegmentRange], segment: u64) -> SelectedParts {
        let mut partial: BTreeMap<u64, SegmentParts> = BTreeMap::new();
        for &range in ranges {
            let (_, ends) = split(range, segment);
            for (number, part) in ends.into_iter().flatten() {
                partial.entry(number).or_default().selected.push(part);
            }
        }
        SelectedParts { segment, partial }
    }

    /// A range has become durable: the segments that are durable with it, as numbers of the first one
    /// and of the one behind the last. Adds what is selected of them to `selected`.
    pub(crate) fn durable(
        &mut self,
        range: SegmentRange,
        selected: &mut Vec<SegmentRange>,
    ) -> Vec<SegmentRange> {
        let (whole, ends) = split(range, self.segment);
        let mut complete: Vec<SegmentRange> = whole.into_iter().collect();
        selected.extend(whole.map(|(first, behind)| (first * self.segment, behind * self.segment)));
        for (number, part) in ends.into_iter().flatten() {
            // Another copy of a segment that is recorded, or a part that is not selected.
            let Some(parts) = self.partial.get_mut(&number) else { continue };
            parts.add(part);
            if parts.are_durable() {
                let parts = self.partial.remove(&number);
                selected.extend(parts.into_iter().flat_map(|parts| parts.selected));
                complete.push((number, number + 1));
            }
        }
        complete
    }
}

/// A range as the numbers of the segments that it fills, and its parts of the segments at its ends.
fn split(
    (start, end): SegmentRange,
    segment: u64,
) -> (Option<SegmentRange>, [Option<(u64, SegmentRange)>; 2]) {
    let first = start / segment;
    let last = end / segment;
    if first == last {
        return (None, [(start < end).then_some((first, (start, end))), None]);
    }
    let head = !start.is_multiple_of(segment);
    let front = head.then(|| (first, (start, (first + 1) * segment)));
    let back = (!end.is_multiple_of(segment)).then(|| (last, (last * segment, end)));
    let whole = (first + u64::from(head), last);
    ((whole.0 < whole.1).then_some(whole), [front, back])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_segment_is_complete_when_all_its_selected_parts_are() {
        let mut parts = SelectedParts::new(&[(10, 20), (30, 40), (90, 350)], 100);
        let mut durable = |range| {
            let mut selected = Vec::new();
            (parts.durable(range, &mut selected), selected)
        };
        let none = (vec![], vec![]);
        assert_eq!(durable((10, 20)), none);
        assert_eq!(durable((10, 20)), none, "the same part again");
        assert_eq!(durable((90, 250)), (vec![(1, 2)], vec![(100, 200)]));
        let first = vec![(10, 20), (30, 40), (90, 100)];
        assert_eq!(durable((30, 40)), (vec![(0, 1)], first));
        assert_eq!(durable((30, 40)), none, "recorded already");
        assert_eq!(durable((250, 350)), (vec![(3, 4)], vec![(300, 350)]));
        let third = (vec![(2, 3)], vec![(200, 300)]);
        assert_eq!(durable((200, 300)), third, "segments that are selected as a whole come so");
        assert_eq!(durable((300, 350)), none);
    }

    proptest! {
        #[test]
        fn no_segment_is_complete_before_its_bytes(
            cuts in prop::collection::btree_set(0_u64..1000, 2..40),
            order in any::<prop::sample::Index>(),
            segment in 1_u64..200,
        ) {
            let cuts: Vec<_> = cuts.into_iter().collect();
            let ranges: Vec<SegmentRange> = cuts.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect();
            // As lanes take them: cut at segments.
            let mut pieces: Vec<SegmentRange> = ranges
                .iter()
                .flat_map(|&(start, end)| {
                    (start / segment..=(end - 1) / segment).map(move |number| {
                        (start.max(number * segment), end.min((number + 1) * segment))
                    })
                })
                .collect();
            let turn = order.index(pieces.len());
            pieces.rotate_left(turn);
            let mut parts = SelectedParts::new(&ranges, segment);
            let (mut left, mut complete) = (pieces.clone(), Vec::new());
            let mut selected = Vec::new();
            for piece in pieces {
                left.retain(|other| *other != piece);
                for (first, behind) in parts.durable(piece, &mut selected) {
                    for number in first..behind {
                        prop_assert!(left.iter().all(|range| range.0 / segment != number));
                        complete.push(number);
                    }
                }
            }
            complete.sort_unstable();
            let mut expected: Vec<_> = ranges
                .iter()
                .flat_map(|&(start, end)| start / segment..=(end - 1) / segment)
                .collect();
            expected.dedup();
            prop_assert_eq!(complete, expected);
            selected.sort_unstable();
            let bytes = |ranges: &[SegmentRange]| -> Vec<u64> {
                ranges.iter().flat_map(|range| range.0..range.1).collect()
            };
            prop_assert_eq!(bytes(&selected), bytes(&ranges));
        }
    }
}
