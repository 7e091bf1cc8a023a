//! Sizes, durations and rates as people type them.

use std::time::Duration;

use crate::{Error, Kind, Result};

/// Parses a size in bytes: a decimal number and an optional unit. Units, base 1024, either case:
/// b k m g t p e, KiB MiB GiB TiB PiB EiB; `s` is a sector of 512 bytes.
pub fn parse_size(text: &str) -> Result<u64> {
    let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(split);
    let wrong = || {
        let text = format!(
            "{text:?} is not a size: give a number with b, k, m, g, t, p, e (base 1024), \
             KiB, MiB, GiB, TiB or s (512 bytes), for example 10G"
        );
        Error::new(Kind::Usage, text)
    };
    let number: u64 = digits.parse().map_err(|_| wrong())?;
    let factor: u64 = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "s" => 512,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        "t" | "tib" => 1 << 40,
        "p" | "pib" => 1 << 50,
        "e" | "eib" => 1 << 60,
        _ => return Err(wrong()),
    };
    number
        .checked_mul(factor)
        .filter(|&size| i64::try_from(size).is_ok())
        .ok_or_else(|| Error::new(Kind::Usage, format!("{text} is more than 2^63 - 1 bytes")))
}

/// A size as nbdinfo prints it: the largest unit that divides it, for example `8M`, `2075312K`, `513`.
pub fn format_size(size: u64) -> String {
    let units = [(60, "E"), (50, "P"), (40, "T"), (30, "G"), (20, "M"), (10, "K")];
    for (bits, unit) in units {
        if size >= 1 << bits && size.is_multiple_of(1 << bits) {
            return format!("{}{unit}", size >> bits);
        }
    }
    size.to_string()
}

/// Parses a rate in bytes per second: a size, with an optional `/s`.
pub fn parse_rate(text: &str) -> Result<u64> {
    parse_size(text.strip_suffix("/s").unwrap_or(text))
}

/// Parses a duration: a number, which may have a fraction, and ns, us, ms, s, m or h; a plain number
/// is seconds.
pub fn parse_duration(text: &str) -> Result<Duration> {
    let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let wrong = || {
        let text =
            format!("{text:?} is not a time: give a number with ms, s, m or h, for example 50ms");
        Error::new(Kind::Usage, text)
    };
    let number: f64 = number.parse().map_err(|_| wrong())?;
    let seconds = match unit {
        "ns" => number / 1e9,
        "us" | "µs" => number / 1e6,
        "ms" => number / 1e3,
        "" | "s" => number,
        "m" | "min" => number * 60.0,
        "h" => number * 3600.0,
        _ => return Err(wrong()),
    };
    Duration::try_from_secs_f64(seconds).map_err(|_| wrong())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units_of_1024() {
        let good = [
            ("0", 0),
            ("10", 10),
            ("10b", 10),
            ("3s", 1536),
            ("1k", 1024),
            ("2M", 2 << 20),
            ("2MiB", 2 << 20),
            ("2mib", 2 << 20),
            ("1G", 1 << 30),
            ("7e", 7 << 60),
        ];
        for (text, size) in good {
            assert_eq!(parse_size(text).unwrap(), size, "{text}");
        }
        for text in
            ["", "k", "1.5G", "-1", "10 M", "1kb", "1MB", "8e", "0x10", "99999999999999999999"]
        {
            assert_eq!(parse_size(text).unwrap_err().kind(), Kind::Usage, "{text}");
        }
    }

    #[test]
    fn sizes_are_printed_in_the_largest_exact_unit() {
        let cases =
            [(0, "0"), (513, "513"), (1024, "1K"), (8 << 20, "8M"), (2_125_119_488, "2075312K")];
        for (size, text) in cases {
            assert_eq!(format_size(size), text);
        }
    }

    #[test]
    fn durations_and_rates() {
        assert_eq!(parse_duration("50ms").unwrap(), Duration::from_millis(50));
        assert_eq!(parse_duration("1.5").unwrap(), Duration::from_millis(1500));
        assert_eq!(parse_duration("2m").unwrap(), Duration::from_secs(120));
        for text in ["", "ms", "1 s", "-1s", "1e9x", "."] {
            assert!(parse_duration(text).is_err(), "{text}");
        }
        assert_eq!(parse_rate("10M/s").unwrap(), 10 << 20);
    }
}
