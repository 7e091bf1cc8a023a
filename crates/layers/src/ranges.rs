//! Lists of ranges of bytes as people type them.

use block::{Result, parse_number, parse_size};

use crate::declared::usage;

/// Sorted ranges that neither touch nor overlap: start, and end behind the last byte.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Ranges(Vec<(u64, u64)>);

impl Ranges {
    /// Parses `START-END,…` as nbdkit's protect filter has it: END is the last byte; a missing START
    /// is 0, a missing END the end of the device; `~START-END` is everything but the range.
    pub(crate) fn parse(owner: &str, text: &str) -> Result<Ranges> {
        let mut all = Vec::new();
        for word in text.split(',') {
            let wrong = |why: &str| {
                usage(format!(
                    "{owner}: {word:?} is not a range: {why}; give START-END, both inside"
                ))
            };
            let (inverted, range) = match word.strip_prefix('~') {
                Some(range) => (true, range),
                None => (false, word),
            };
            let (start, end) = range.split_once('-').ok_or_else(|| wrong("there is no -"))?;
            let size = |text: &str, missing| match text {
                "" => Ok(missing),
                // As the filter: C's numbers. Beyond it, sizes.
                text => parse_number(text)
                    .or_else(|_| parse_size(text))
                    .map_err(|error| wrong(&error.text())),
            };
            let (start, last) = (size(start, 0)?, size(end, u64::MAX - 1)?);
            if start > last {
                return Err(wrong("it ends before it starts"));
            }
            let end = last.saturating_add(1);
            match inverted {
                false => all.push((start, end)),
                true => all.extend([(0, start), (end, u64::MAX)]),
            }
        }
        Ok(Ranges::new(all))
    }

    fn new(mut all: Vec<(u64, u64)>) -> Ranges {
        all.retain(|(start, end)| start < end);
        all.sort_unstable();
        let mut merged: Vec<(u64, u64)> = Vec::new();
        for (start, end) in all {
            match merged.last_mut() {
                Some(last) if last.1 >= start => last.1 = last.1.max(end),
                _ => merged.push((start, end)),
            }
        }
        Ranges(merged)
    }

    /// The parts of `start..end` that are inside, in order.
    pub(crate) fn within(&self, start: u64, end: u64) -> impl Iterator<Item = (u64, u64)> + '_ {
        let first = self.0.partition_point(|range| range.1 <= start);
        let touching = self.0[first..].iter().take_while(move |range| range.0 < end);
        touching.map(move |range| (range.0.max(start), range.1.min(end)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_inclusive_and_may_be_inverted() {
        let parse = |text| Ranges::parse("x", text);
        assert_eq!(parse("0-511").unwrap().0, [(0, 512)]);
        assert_eq!(parse("1k-2k,0-3,4-9").unwrap().0, [(0, 10), (1024, 2049)]);
        assert_eq!(parse("~1k-2k").unwrap().0, [(0, 1024), (2049, u64::MAX)]);
        assert_eq!(parse("-9").unwrap().0, [(0, 10)]);
        assert_eq!(parse("0x10-020").unwrap().0, [(16, 17)]);
        assert_eq!(parse("0-0xffffffffffffffff").unwrap().0, [(0, u64::MAX)]);
        assert_eq!(parse("9-").unwrap().0, [(9, u64::MAX)]);
        assert_eq!(parse("~9-").unwrap().0, [(0, 9)]);
        for wrong in ["", "5", "7-5", "a-b", "1-2-3"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
        let ranges = parse("10-19,30-39").unwrap();
        assert_eq!(ranges.within(15, 35).collect::<Vec<_>>(), [(15, 20), (30, 35)]);
        assert_eq!(ranges.within(20, 30).count(), 0);
    }
}
