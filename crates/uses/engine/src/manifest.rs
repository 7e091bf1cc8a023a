//! Manifests: digests of the pieces of a device, as a text to verify the device with later.
//!
//! ```text
//! blockhaul manifest 2
//! size 300000000
//! unit 1048576
//! range 0 300000000
//! 0 af13…
//! 134217728 9b0c…
//! digest 0c44…
//! ```
//!
//! Each unit has a line with its offset and the BLAKE3 of the BLAKE3s of its 256 KiB blocks. Units
//! that are all zero have no line, so that the length of a manifest depends on the data. The range
//! is the part that was digested. The last line is the digest of the whole, which `verify` also
//! reports: the BLAKE3 of size, unit, start and length (8 bytes each, big-endian) and, for each
//! line, its offset and digest. It also shows that the text is complete.

use std::fmt;
use std::str::FromStr;

use blockhaul_block::{Error, Kind, Result};

use crate::segment::SEGMENT;

/// Size of a digest block and of a read in bytes. Part of the digest's definition: do not change.
pub(crate) const BLOCK: u64 = 256 << 10;

pub(crate) type UnitDigest = [u8; blake3::OUT_LEN];

const TITLE: &str = "blockhaul manifest 2";
/// Smallest unit in bytes: small enough that a copy of the changes copies little else.
const UNIT_MIN: u64 = 1 << 20;
/// Maximum number of units of a device, unless they have the largest size: limits text and memory.
const UNITS: u64 = 64 << 10;

/// Digests of the pieces of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Manifest {
    pub(crate) size: u64,
    /// Unit size in bytes.
    pub(crate) unit: u64,
    /// Start and end of the digested range.
    pub(crate) range: (u64, u64),
    /// Offsets and digests of the units that are not all zero, ascending.
    pub(crate) units: Vec<(u64, UnitDigest)>,
}

/// Unit size in bytes for a device of `size` bytes: a power of two from 1 MiB to 128 MiB.
pub(crate) fn unit_of(size: u64) -> u64 {
    size.div_ceil(UNITS).clamp(UNIT_MIN, SEGMENT).next_power_of_two()
}

impl Manifest {
    /// Size of the device, in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Unit size in bytes.
    pub fn unit(&self) -> u64 {
        self.unit
    }

    /// Offset and length of the digested range, in bytes.
    pub fn range(&self) -> (u64, u64) {
        (self.range.0, self.range.1 - self.range.0)
    }

    /// The digest of the whole, in hexadecimal.
    pub fn digest(&self) -> String {
        let mut all = blake3::Hasher::new();
        let (at, len) = self.range();
        for number in [self.size, self.unit, at, len] {
            all.update(&number.to_be_bytes());
        }
        for (at, digest) in &self.units {
            all.update(&at.to_be_bytes()).update(digest);
        }
        all.finalize().to_hex().to_string()
    }

    /// Offsets and lengths, in bytes, of the differences to another device with manifest `other`;
    /// adjacent ones are joined. Both have the same unit size.
    pub fn differences(&self, other: &Manifest) -> Vec<(u64, u64)> {
        let mut ranges: Vec<(u64, u64)> = Vec::new();
        // What only one of them has differs, zero or not.
        let (short, long) =
            if self.size < other.size { (self.size, other.size) } else { (other.size, self.size) };
        let mut add = |at: u64, end: u64| match ranges.last_mut() {
            Some(last) if last.0 + last.1 >= at => last.1 = last.1.max(end - last.0),
            _ => ranges.push((at, end - at)),
        };
        let mut mine = &self.units[..];
        let mut others = &other.units[..];
        loop {
            let first = mine.first().map(|unit| unit.0);
            let next = others.first().map(|unit| unit.0);
            let Some(at) = first.into_iter().chain(next).min() else { break };
            if mine.first() != others.first() {
                add(at, (at + self.unit).min(long));
            }
            if first == Some(at) {
                mine = &mine[1..];
            }
            if next == Some(at) {
                others = &others[1..];
            }
        }
        if short < long {
            let at = short - short % self.unit;
            ranges.retain(|range| range.0 < at);
            let before = ranges.last().is_some_and(|last| last.0 + last.1 >= at);
            match ranges.last_mut() {
                Some(last) if before => last.1 = long - last.0,
                _ => ranges.push((at, long - at)),
            }
        }
        ranges
    }
}

impl fmt::Display for Manifest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{TITLE}\nsize {}\nunit {}", self.size, self.unit)?;
        writeln!(f, "range {} {}", self.range().0, self.range().1)?;
        for (at, digest) in &self.units {
            writeln!(f, "{at} {}", blake3::Hash::from_bytes(*digest).to_hex())?;
        }
        writeln!(f, "digest {}", self.digest())
    }
}

impl FromStr for Manifest {
    type Err = Error;

    fn from_str(text: &str) -> Result<Manifest> {
        let wrong = |why: &str| Error::new(Kind::Invalid, format!("incomplete manifest: {why}"));
        let mut lines = text.lines();
        if lines.next() != Some(TITLE) {
            return Err(wrong(&format!("its first line is not {TITLE:?}")));
        }
        let mut field = |name: &str| {
            let line = lines.next().ok_or_else(|| wrong("it ends early"))?;
            let value = line.strip_prefix(name).and_then(|rest| rest.strip_prefix(' '));
            value.ok_or_else(|| wrong(&format!("expected a line {name:?}")))
        };
        let number = |text: &str| text.parse::<u64>().map_err(|_| wrong("a bad number"));
        let size = number(field("size")?)?;
        let unit = number(field("unit")?)?;
        if !unit.is_power_of_two() || !(UNIT_MIN..=SEGMENT).contains(&unit) {
            return Err(wrong("this unit length is not supported"));
        }
        let (at, len) = field("range")?.split_once(' ').ok_or_else(|| wrong("a bad range"))?;
        let at = number(at)?;
        let len = number(len)?;
        let range = at.checked_add(len).filter(|&end| end <= size).map(|end| (at, end));
        let range = range.ok_or_else(|| wrong("its range ends beyond its size"))?;
        let mut units: Vec<(u64, UnitDigest)> = Vec::new();
        let mut told = None;
        for line in lines {
            if told.is_some() {
                return Err(wrong("something follows its end"));
            }
            let (at, digest) = line.split_once(' ').ok_or_else(|| wrong("a bad line"))?;
            if at == "digest" {
                told = Some(digest);
                continue;
            }
            let at = number(at)?;
            let digest = blake3::Hash::from_hex(digest).map_err(|_| wrong("a bad digest"))?;
            if units.last().is_some_and(|last| last.0 >= at) || !at.is_multiple_of(unit) {
                return Err(wrong("its lines are not in order"));
            }
            if at >= range.1 {
                return Err(wrong("it has more than its range"));
            }
            units.push((at, digest.into()));
        }
        let manifest = Manifest { size, unit, range, units };
        match told {
            None => Err(wrong("it ends early")),
            Some(told) if told == manifest.digest() => Ok(manifest),
            Some(_) => Err(wrong("its digest is wrong: it was changed or damaged")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNIT: u64 = UNIT_MIN;

    fn sample() -> Manifest {
        let units = [0, 1, 3].map(|number| (number * UNIT, [number as u8; 32])).to_vec();
        let size = 5 * UNIT + 5;
        Manifest { size, unit: UNIT, range: (0, size), units }
    }

    #[test]
    fn a_manifest_is_read_as_it_was_written_and_damage_is_found() {
        let text = sample().to_string();
        assert_eq!(text.parse::<Manifest>().unwrap(), sample());
        let empty = Manifest { size: 0, unit: UNIT, range: (0, 0), units: Vec::new() };
        assert_eq!(empty.to_string().parse::<Manifest>().unwrap(), empty);
        for (at, _) in text.char_indices().filter(|(at, _)| *at < text.len() - 1) {
            assert!(text[..at].parse::<Manifest>().is_err(), "cut at {at}");
            let mut damaged = text.clone().into_bytes();
            damaged[at] ^= 1;
            let damaged = String::from_utf8(damaged).unwrap();
            assert!(damaged.parse::<Manifest>().is_err(), "damaged at {at}: {damaged}");
        }
        let huge = format!("{TITLE}\nsize {0}\nunit {UNIT}\nrange 1 {0}\n", u64::MAX);
        assert!(huge.parse::<Manifest>().is_err());
    }

    #[test]
    fn differences_are_ranges() {
        let mut other = sample();
        assert_eq!(sample().differences(&other), []);
        other.units[1].1 = [9; 32];
        // One became zero, and one became data.
        other.units.remove(2);
        other.units.push((5 * UNIT, [8; 32]));
        let expected = [(UNIT, UNIT), (3 * UNIT, UNIT), (5 * UNIT, 5)];
        assert_eq!(sample().differences(&other), expected);
        assert_eq!(other.differences(&sample()), expected);
        let mut other = sample();
        (other.size, other.range.1) = (4 * UNIT + 1, 4 * UNIT + 1);
        assert_eq!(other.differences(&sample()), [(4 * UNIT, UNIT + 5)]);
        other.units.pop();
        assert_eq!(other.differences(&sample()), [(3 * UNIT, 2 * UNIT + 5)]);
    }

    #[test]
    fn units_grow_with_the_device() {
        assert_eq!((unit_of(0), unit_of(64 << 30)), (1 << 20, 1 << 20));
        assert_eq!((unit_of((64 << 30) + 1), unit_of(1 << 40)), (2 << 20, 16 << 20));
        assert_eq!((unit_of(16 << 40), unit_of(i64::MAX as u64)), (SEGMENT, SEGMENT));
    }
}
