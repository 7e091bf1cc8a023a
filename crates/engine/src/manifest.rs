//! Manifests: digests of the segments of a device, as a text that is kept and checked later.
//!
//! ```text
//! blockhaul manifest 1
//! size 300000000
//! segment 134217728
//! 0 af13…
//! 134217728 9b0c…
//! 268435456 51d7…
//! digest 0c44…
//! ```
//!
//! A line for each segment has its offset and the BLAKE3 of the BLAKE3s of its blocks of 256 KiB. The
//! last line is the digest of the whole, which `verify` tells, too: the BLAKE3 of the size (8 bytes,
//! big-endian) and all segments' digests. It also shows that the text is complete.

use std::fmt;
use std::str::FromStr;

use block::{Error, Kind, Result};

use crate::options::SEGMENT;

pub(crate) type Digest = [u8; blake3::OUT_LEN];

const TITLE: &str = "blockhaul manifest 1";

/// Digests of the segments of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Manifest {
    pub(crate) size: u64,
    pub(crate) segments: Vec<Digest>,
}

impl Manifest {
    /// Size of the device, in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The digest of the whole, in hexadecimal.
    pub fn digest(&self) -> String {
        let mut all = blake3::Hasher::new();
        all.update(&self.size.to_be_bytes());
        for segment in &self.segments {
            all.update(segment);
        }
        all.finalize().to_hex().to_string()
    }

    /// Offsets and lengths, in bytes, of what is different in another device, whose own manifest this
    /// is; neighbours are joined.
    pub fn differences(&self, other: &Manifest) -> Vec<(u64, u64)> {
        let size = self.size.max(other.size);
        let count = self.segments.len().max(other.segments.len());
        let mut ranges: Vec<(u64, u64)> = Vec::new();
        let mut at = 0;
        for index in 0..count {
            let len = SEGMENT.min(size - at);
            if self.segments.get(index) != other.segments.get(index) {
                match ranges.last_mut() {
                    Some(last) if last.0 + last.1 == at => last.1 += len,
                    _ => ranges.push((at, len)),
                }
            }
            at += len;
        }
        ranges
    }
}

impl fmt::Display for Manifest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{TITLE}\nsize {}\nsegment {SEGMENT}", self.size)?;
        for (index, segment) in (0_u64..).zip(&self.segments) {
            writeln!(f, "{} {}", index * SEGMENT, blake3::Hash::from_bytes(*segment).to_hex())?;
        }
        writeln!(f, "digest {}", self.digest())
    }
}

impl FromStr for Manifest {
    type Err = Error;

    fn from_str(text: &str) -> Result<Manifest> {
        let wrong = |why: &str| Error::new(Kind::Invalid, format!("not a whole manifest: {why}"));
        let mut lines = text.lines();
        let mut field = |name: &str| {
            let line = lines.next().ok_or_else(|| wrong("it ends early"))?;
            match (line == TITLE, line.strip_prefix(name).and_then(|l| l.strip_prefix(' '))) {
                (true, _) if name == TITLE => Ok(line),
                (_, Some(value)) => Ok(value),
                _ => Err(wrong(&format!("no line {name:?} where it should be"))),
            }
        };
        field(TITLE)?;
        let size: u64 = field("size")?.parse().map_err(|_| wrong("the size is no number"))?;
        if field("segment")? != SEGMENT.to_string() {
            return Err(wrong("segments of this size are not known"));
        }
        // What a short text promises is not allocated: segments are taken as they come.
        let mut segments = Vec::new();
        for index in 0..size.div_ceil(SEGMENT) {
            let digest = field(&(index * SEGMENT).to_string())?;
            let digest = blake3::Hash::from_hex(digest).map_err(|_| wrong("a bad digest"))?;
            segments.push(digest.into());
        }
        let manifest = Manifest { size, segments };
        match field("digest")? == manifest.digest() {
            true => Ok(manifest),
            false => Err(wrong("its digest does not fit: it was changed or damaged")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Manifest {
        let segments = (0..3).map(|number| [number; 32]).collect();
        Manifest { size: 2 * SEGMENT + 5, segments }
    }

    #[test]
    fn a_manifest_is_read_as_it_was_written_and_damage_is_found() {
        let text = sample().to_string();
        assert_eq!(text.parse::<Manifest>().unwrap(), sample());
        let empty = Manifest { size: 0, segments: Vec::new() };
        assert_eq!(empty.to_string().parse::<Manifest>().unwrap(), empty);
        for (at, _) in text.char_indices().filter(|(at, _)| *at < text.len() - 1) {
            assert!(text[..at].parse::<Manifest>().is_err(), "cut at {at}");
            let mut damaged = text.clone().into_bytes();
            damaged[at] ^= 1;
            let damaged = String::from_utf8(damaged).unwrap();
            assert!(damaged.parse::<Manifest>().is_err(), "damaged at {at}: {damaged}");
        }
        let huge = format!("{TITLE}\nsize {}\nsegment {SEGMENT}\n", u64::MAX);
        assert!(huge.parse::<Manifest>().is_err());
    }

    #[test]
    fn differences_are_ranges() {
        let mut other = sample();
        assert_eq!(sample().differences(&other), []);
        other.segments[1] = [9; 32];
        other.segments[2] = [9; 32];
        assert_eq!(sample().differences(&other), [(SEGMENT, SEGMENT + 5)]);
        other.segments.pop();
        other.size = 2 * SEGMENT;
        assert_eq!(other.differences(&sample()), [(SEGMENT, SEGMENT + 5)]);
    }
}
