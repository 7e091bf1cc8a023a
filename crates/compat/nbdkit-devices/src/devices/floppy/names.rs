//! FAT names: a long one in UTF-16 before the entry, and a short one in the entry itself, which
//! must be unique in the directory.

use std::collections::{HashMap, HashSet};

/// Size of a directory entry in bytes.
pub(super) const ENTRY: usize = 32;
/// UTF-16 units in an entry of a long name, and their positions.
const UNITS: usize = 13;
const PLACES: [usize; UNITS] = [1, 3, 5, 7, 9, 14, 16, 18, 20, 22, 24, 28, 30];

/// A short name: eight and three bytes, padded with spaces.
pub(super) type Short = [u8; 11];

/// Assigns short names to the names of a directory, in order.
#[derive(Default)]
pub(super) struct Names {
    taken: HashSet<Short>,
    /// The last number used after each base of a short name.
    numbers: HashMap<Short, u32>,
}

impl Names {
    /// The short name of a name, and whether it is complete.
    pub fn short(&mut self, name: &str) -> (Short, bool) {
        let (base, extension) = match name.rsplit_once('.') {
            // A leading dot does not begin an extension.
            Some((base, extension)) if !base.trim_start_matches('.').is_empty() => {
                (base, extension)
            }
            _ => (name, ""),
        };
        let base = Plain::of(base, 8);
        let extension = Plain::of(extension, 3);
        let make = |base: &[u8]| {
            let mut short = [b' '; 11];
            short[..base.len()].copy_from_slice(base);
            short[8..8 + extension.bytes.len()].copy_from_slice(&extension.bytes);
            short
        };
        let first = make(&base.bytes);
        let mut short = first;
        let mut cut = base.cut || extension.cut || base.bytes.is_empty();
        while cut || self.taken.contains(&short) {
            let number = self.numbers.entry(first).or_default();
            *number += 1;
            let tail = format!("~{number}");
            let kept = base.bytes.len().min(8_usize.saturating_sub(tail.len()));
            short = make(&[&base.bytes[..kept], tail.as_bytes()].concat());
            cut = false;
        }
        self.taken.insert(short);
        (short, short == first && !base.folded && !extension.folded)
    }
}

/// The part of a name that fits a short one.
struct Plain {
    bytes: Vec<u8>,
    /// A character is missing or was replaced.
    cut: bool,
    /// A character was in lower case.
    folded: bool,
}

impl Plain {
    /// Up to `most` bytes in upper case.
    fn of(name: &str, most: usize) -> Plain {
        let mut plain = Plain { bytes: Vec::new(), cut: false, folded: false };
        for letter in name.chars() {
            match letter {
                ' ' | '.' => plain.cut = true,
                _ if letter.is_ascii_alphanumeric() || "!#$%&'()-@^_`{}~".contains(letter) => {
                    plain.folded |= letter.is_ascii_lowercase();
                    plain.bytes.push(letter.to_ascii_uppercase() as u8);
                }
                _ => {
                    plain.cut = true;
                    plain.bytes.push(b'_');
                }
            }
        }
        plain.cut |= plain.bytes.len() > most;
        plain.bytes.truncate(most);
        plain
    }
}

/// The entries with the long name, before the entry with the short one.
pub(super) fn long(name: &str, short: &Short) -> Vec<[u8; ENTRY]> {
    let mut units: Vec<u16> = name.encode_utf16().collect();
    // Terminated by a zero if it does not fill its entries.
    if !units.len().is_multiple_of(UNITS) {
        units.push(0);
        units.resize(units.len().next_multiple_of(UNITS), 0xffff);
    }
    let sum = short.iter().fold(0_u8, |sum, &byte| sum.rotate_right(1).wrapping_add(byte));
    let parts = units.chunks(UNITS).enumerate().rev();
    let count = units.len() / UNITS;
    let entries = parts.map(|(index, part)| {
        let mut entry = [0; ENTRY];
        let last = if index + 1 == count { 0x40 } else { 0 };
        entry[0] = (index as u8 + 1) | last;
        entry[11] = 0x0f;
        entry[13] = sum;
        for (place, unit) in PLACES.into_iter().zip(part) {
            entry[place..place + 2].copy_from_slice(&unit.to_le_bytes());
        }
        entry
    });
    entries.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_names_are_the_only_ones() {
        let mut names = Names::default();
        let mut short = |name: &str| {
            let (short, whole) = names.short(name);
            (String::from_utf8(short.to_vec()).unwrap(), whole)
        };
        let cases = [
            ("README.TXT", "README  TXT", true),
            ("README", "README     ", true),
            ("readme", "README~1   ", false),
            ("Makefile.am", "MAKEFILEAM ", false),
            ("Makefile.amx", "MAKEFILEAMX", false),
            ("Makefile.also", "MAKEFI~1ALS", false),
            (".hidden", "HIDDEN~1   ", false),
            ("a.b.c", "AB~1    C  ", false),
            ("...", "~1         ", false),
            ("é", "_~1        ", false),
            ("ö", "_~2        ", false),
            ("A B.C", "AB~2    C  ", false),
            ("lower.txt", "LOWER   TXT", false),
            ("MAKEFI~2.AM", "MAKEFI~2AM ", true),
            ("Makefile.AM", "MAKEFI~1AM ", false),
        ];
        for (name, expected, whole) in cases {
            assert_eq!(short(name), (expected.to_string(), whole), "{name}");
        }
        for number in 0..200 {
            short(&format!("a file with a name {number}"));
        }
        assert_eq!(short("a file with a name").0, "AFIL~201   ");
        assert_eq!(short("a file with another name").0, "AFIL~202   ");
    }

    #[test]
    fn long_names_fill_their_entries() {
        let short = *b"ABCDEF~1   ";
        assert_eq!(long("abcdefghijklm", &short).len(), 1);
        let entries = long("abcdefghijklmn", &short);
        assert_eq!((entries[0][0], entries[1][0]), (0x42, 1));
        assert_eq!(&entries[0][1..7], b"n\0\0\0\xff\xff");
        assert_eq!(&entries[1][28..], b"l\0m\0");
        assert_eq!(entries[0][13], entries[1][13]);
    }
}
