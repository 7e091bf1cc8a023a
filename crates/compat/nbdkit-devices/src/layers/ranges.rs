//! Lists of byte ranges as users type them.

use blockhaul_block::Result;
use blockhaul_catalog::{parse_number, parse_size};

use blockhaul_layers::support::{Runs, usage};

/// The bytes in any of several ranges.
#[derive(Debug, Default)]
pub(crate) struct RangeSet(Runs<bool>);

impl RangeSet {
    /// Parses `START-END,…` like nbdkit's protect filter: END is the last byte; the default START
    /// is 0, the default END the end of the device; `~START-END` is everything but the range.
    pub(crate) fn parse(owner: &str, text: &str) -> Result<RangeSet> {
        let mut all = Runs::default();
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
            let (start, end) = range.split_once('-').ok_or_else(|| wrong("no -"))?;
            let size = |text: &str, missing| match text {
                "" => Ok(missing),
                // As the filter: C's numbers. In addition, sizes.
                text => parse_number(text)
                    .or_else(|_| parse_size(text))
                    .map_err(|error| wrong(&error.text())),
            };
            let start = size(start, 0)?;
            let last = size(end, u64::MAX - 1)?;
            if start > last {
                return Err(wrong("it ends before it starts"));
            }
            let end = last.saturating_add(1);
            if inverted {
                all.set(0, start, true);
                all.set(end, u64::MAX, true);
            } else {
                all.set(start, end, true);
            }
        }
        Ok(RangeSet(all))
    }

    /// The parts of `start..end` that are inside, in order.
    pub(crate) fn within(&self, start: u64, end: u64) -> impl Iterator<Item = (u64, u64)> + '_ {
        let inside = self.0.iter(start, end).filter(|run| run.2);
        inside.map(|(from, to, _)| (from, to))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_inclusive_and_may_be_inverted() {
        let parse = |text| {
            let ranges = RangeSet::parse("x", text)?;
            Ok::<_, blockhaul_block::Error>(ranges.within(0, u64::MAX).collect::<Vec<_>>())
        };
        assert_eq!(parse("0-511").unwrap(), [(0, 512)]);
        assert_eq!(parse("1k-2k,0-3,4-9").unwrap(), [(0, 10), (1024, 2049)]);
        assert_eq!(parse("~1k-2k").unwrap(), [(0, 1024), (2049, u64::MAX)]);
        assert_eq!(parse("-9").unwrap(), [(0, 10)]);
        assert_eq!(parse("0x10-020").unwrap(), [(16, 17)]);
        assert_eq!(parse("0-0xffffffffffffffff").unwrap(), [(0, u64::MAX)]);
        assert_eq!(parse("9-").unwrap(), [(9, u64::MAX)]);
        assert_eq!(parse("~9-").unwrap(), [(0, 9)]);
        for wrong in ["", "5", "7-5", "a-b", "1-2-3"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
        let ranges = RangeSet::parse("x", "10-19,30-39").unwrap();
        assert_eq!(ranges.within(15, 35).collect::<Vec<_>>(), [(15, 20), (30, 35)]);
        assert_eq!(ranges.within(20, 30).count(), 0);
    }
}
