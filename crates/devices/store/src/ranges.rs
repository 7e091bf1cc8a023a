//! The ranges that an increment holds: JSON lines, so that other programs can use an increment, too.

use std::fmt::Write as _;
use std::path::Path;

use blockhaul_block::{Error, Kind, Result};
use serde::Deserialize;

use crate::files;

/// Maximum length of a list in bytes: enough for the most ranges of a bitmap that the engine reads.
const LENGTH_MAX: u64 = 512 << 20;

/// Ranges of a disk: offsets and lengths in bytes, ascending, apart from each other and not empty.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct IncrementRanges(Vec<(u64, u64)>);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RangeLine {
    offset: u64,
    length: u64,
}

impl IncrementRanges {
    /// Offsets and lengths of a disk of `size` bytes.
    ///
    /// # Errors
    /// [`Kind::Invalid`] if they are not in order, overlap, are empty, or end beyond the disk.
    pub fn new(ranges: Vec<(u64, u64)>, size: u64) -> Result<IncrementRanges> {
        let mut end = 0;
        for &(at, len) in &ranges {
            let next = at.checked_add(len).filter(|&next| len > 0 && at >= end && next <= size);
            let wrong = || {
                let text = format!("the range of {len} bytes at offset {at} is not possible here");
                Error::new(Kind::Invalid, text)
            };
            end = next.ok_or_else(wrong)?;
        }
        Ok(IncrementRanges(ranges))
    }

    /// Offsets and lengths.
    pub fn list(&self) -> &[(u64, u64)] {
        &self.0
    }

    /// Bytes in the ranges.
    pub fn total(&self) -> u64 {
        self.0.iter().map(|range| range.1).sum()
    }

    /// What these ranges or `other` have.
    pub(crate) fn union(&self, other: &IncrementRanges) -> IncrementRanges {
        let mut all = [&self.0[..], &other.0].concat();
        all.sort_unstable();
        let mut joined: Vec<(u64, u64)> = Vec::with_capacity(all.len());
        for (at, len) in all {
            match joined.last_mut() {
                // Ends fit in 64 bits: they are inside the disk.
                Some((start, length)) if at <= *start + *length => {
                    *length = (*length).max(at + len - *start);
                }
                _ => joined.push((at, len)),
            }
        }
        IncrementRanges(joined)
    }

    /// What these ranges have and `other` has not.
    pub(crate) fn without(&self, other: &IncrementRanges) -> IncrementRanges {
        let mut left = Vec::with_capacity(self.0.len());
        let mut next = 0;
        for &(at, len) in &self.0 {
            let (mut start, end) = (at, at + len);
            while other.0.get(next).is_some_and(|&(at, len)| at + len <= start) {
                next += 1;
            }
            let over = other.0[next..].iter().take_while(|range| range.0 < end);
            for &(hole, hole_len) in over {
                if hole > start {
                    left.push((start, hole - start));
                }
                start = end.min(hole + hole_len);
            }
            if start < end {
                left.push((start, end - start));
            }
        }
        IncrementRanges(left)
    }

    /// Distinguishes them from other ranges.
    pub fn digest(&self) -> String {
        let mut hasher = blake3::Hasher::new();
        for (at, len) in &self.0 {
            hasher.update(&at.to_be_bytes()).update(&len.to_be_bytes());
        }
        hasher.finalize().to_hex().to_string()
    }

    /// The list as the option `--ranges` of a copy reads it.
    pub fn to_text(&self) -> String {
        if self.0.is_empty() {
            return "[]\n".into();
        }
        let mut text = String::new();
        for (at, len) in &self.0 {
            let _ = writeln!(text, "{{\"offset\": {at}, \"length\": {len}}}");
        }
        text
    }

    /// Reads the list of an increment of a disk of `size` bytes, whose digest is known.
    pub(crate) fn read(path: &Path, size: u64, digest: &str) -> Result<IncrementRanges> {
        let wrong = |why: &str| Error::new(Kind::Invalid, format!("{}: {why}", path.display()));
        let text = files::read(path, LENGTH_MAX)?;
        let text = text
            .ok_or_else(|| Error::new(Kind::NotFound, format!("{} is missing", path.display())))?;
        let mut found = Vec::new();
        for line in text.lines().filter(|line| *line != "[]") {
            let line: RangeLine = serde_json::from_str(line)
                .map_err(|error| wrong(&format!("not a range: {error}")))?;
            found.push((line.offset, line.length));
        }
        let ranges = IncrementRanges::new(found, size).map_err(|error| wrong(&error.text()))?;
        if ranges.digest() == digest {
            Ok(ranges)
        } else {
            Err(wrong("its digest is wrong: it was changed or damaged"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_as_they_were_written_and_only_then() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ranges");
        for list in [vec![], vec![(0, 5)], vec![(0, 5), (5, 1), (90, 10)]] {
            let ranges = IncrementRanges::new(list, 100).unwrap();
            std::fs::write(&path, ranges.to_text()).unwrap();
            assert_eq!(IncrementRanges::read(&path, 100, &ranges.digest()).unwrap(), ranges);
            assert!(IncrementRanges::read(&path, 100, "0").is_err());
        }
        assert!(IncrementRanges::read(&path, 99, &IncrementRanges::default().digest()).is_err());
        for text in ["x", "{\"offset\": 1}", "{\"offset\": -1, \"length\": 1}", "[1]"] {
            std::fs::write(&path, text).unwrap();
            assert!(IncrementRanges::read(&path, 100, "0").is_err(), "{text}");
        }
    }

    #[test]
    fn unions_and_differences_are_those_of_their_bytes() {
        let mut rng = blockhaul_testkit::rng::Rng::new(7);
        for _ in 0..300 {
            let mut made = || {
                let mut list = Vec::new();
                let mut at = rng.below(9);
                while at < 90 {
                    let len = rng.between(1, 9);
                    list.push((at, len));
                    at += len + rng.below(9);
                }
                IncrementRanges::new(list, 100).unwrap()
            };
            let (one, other) = (made(), made());
            let has = |ranges: &IncrementRanges, byte: u64| {
                ranges.0.iter().any(|&(at, len)| (at..at + len).contains(&byte))
            };
            let (union, rest) = (one.union(&other), one.without(&other));
            for ranges in [&union, &rest] {
                assert!(IncrementRanges::new(ranges.0.clone(), 100).is_ok(), "{ranges:?}");
            }
            for byte in 0..100 {
                assert_eq!(has(&union, byte), has(&one, byte) || has(&other, byte));
                assert_eq!(has(&rest, byte), has(&one, byte) && !has(&other, byte));
            }
        }
    }

    #[test]
    fn impossible_ranges_are_refused() {
        for list in [
            vec![(0, 0)],
            vec![(0, 101)],
            vec![(5, 5), (9, 1)],
            vec![(5, 5), (0, 1)],
            vec![(u64::MAX, 2)],
        ] {
            assert!(IncrementRanges::new(list, 100).is_err());
        }
    }
}
