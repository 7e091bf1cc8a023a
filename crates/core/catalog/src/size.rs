//! Numbers, sizes, durations, rates and switches as users type them.

use std::time::Duration;

use blockhaul_block::{Error, Kind, Result};

/// Parses a whole number as C programs, such as nbdkit, read it: decimal, hexadecimal after `0x`,
/// octal after another `0`; blanks and one `+` may precede it.
///
/// # Errors
/// [`Kind::Usage`] for anything else, and for values that do not fit into a `T`.
pub fn parse_number<T: TryFrom<u64>>(text: &str) -> Result<T> {
    let blank = |letter: char| letter.is_ascii_whitespace() || letter == '\x0b';
    let typed = text.trim_start_matches(blank);
    let typed = typed.strip_prefix('+').unwrap_or(typed);
    let (digits, base) = match typed.as_bytes() {
        [b'0', b'x' | b'X', ..] => (&typed[2..], 16),
        [b'0', _, ..] => (&typed[1..], 8),
        _ => (typed, 10),
    };
    // Rejects a second sign.
    let all = digits.chars().all(|letter| letter.is_digit(base));
    let number = u64::from_str_radix(if all { digits } else { "" }, base).map_err(|_| {
        let text = format!("{text:?} is not a whole number from 0 on, such as 12, 0x0c or 014");
        Error::new(Kind::Usage, text)
    })?;
    T::try_from(number).map_err(|_| Error::new(Kind::Usage, format!("{text:?} is too large")))
}

/// Parses a decimal number from `least` to `most`; [`u64::MAX`]: without a limit.
///
/// # Errors
/// [`Kind::Usage`] for anything else, and for values that do not fit into a `T`.
pub fn parse_count<T: TryFrom<u64>>(text: &str, least: u64, most: u64) -> Result<T> {
    let found = text.parse().ok().filter(|number| (least..=most).contains(number));
    found.and_then(|number| T::try_from(number).ok()).ok_or_else(|| {
        let text = match most {
            u64::MAX => format!("use a number of at least {least}"),
            _ => format!("use a number from {least} to {most}"),
        };
        Error::new(Kind::Usage, text)
    })
}

/// Parses a size in bytes: a decimal number, or a hexadecimal one after `0x`, and an optional unit.
/// Units, base 1024, either case: b k m g t p e, KiB MiB GiB TiB PiB EiB; base 1000: kB MB GB TB PB EB;
/// `s` is a sector of 512 bytes. A decimal number may have a fraction before a unit: `1.5G`; a part of a byte
/// is left out. `_` may separate digits, and the number from a unit of one letter: `0x1_E` is 1 EiB,
/// where `0x1E` is 30.
///
/// # Errors
/// [`Kind::Usage`] for anything else, and for more than 2^63 - 1 bytes, the largest file offset.
pub fn parse_size(text: &str) -> Result<u64> {
    let wrong = || {
        let text = format!(
            "{text:?} is not a size: give a number with b, k, m, g, t, p, e (base 1024), \
             kB, MB, GB, TB (base 1000), KiB, MiB, GiB, TiB or s (512 bytes), for example 10G"
        );
        Error::new(Kind::Usage, text)
    };
    if let Some((whole, rest)) = text.split_once('.') {
        let size = with_fraction(whole, rest).ok_or_else(wrong)?;
        return limited(text, u64::try_from(size).ok());
    }
    let (number, unit) = size_parts(text).ok_or_else(wrong)?;
    let factor = unit_factor(unit).ok_or_else(wrong)?;
    limited(text, number.and_then(|number| number.checked_mul(factor)))
}

/// Bytes of `whole.rest`, where `rest` is digits and a unit of more than a byte.
fn with_fraction(whole: &str, rest: &str) -> Option<u128> {
    // So that no product exceeds 128 bits.
    const DIGITS_MAX: usize = 18;
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let end = rest.find(|letter: char| !letter.is_ascii_digit())?;
    let (digits, unit) = rest.split_at(end);
    if !is_number(whole) || !is_number(digits) || whole.len().max(digits.len()) > DIGITS_MAX {
        return None;
    }
    let factor = u128::from(unit_factor(unit).filter(|&factor| factor > 1)?);
    let [whole, part] = [whole, digits].map(|text| text.parse::<u128>().unwrap_or(0));
    let scale = 10_u128.pow(u32::try_from(digits.len()).ok()?);
    Some(whole * factor + part * factor / scale)
}

/// Bytes of a unit of any length: `M`, `MiB`, `MB`.
fn unit_factor(unit: &str) -> Option<u64> {
    let lower = unit.to_ascii_lowercase();
    match lower.as_bytes() {
        [_, b'i', b'b'] => decimal_power(&lower[..1]).and_then(|_| unit_bytes(&lower[..1])),
        [_, b'b'] => decimal_power(&lower[..1]).map(|power| 1000_u64.pow(power)),
        _ => unit_bytes(&lower),
    }
}

/// The power of 1000 of a letter.
fn decimal_power(letter: &str) -> Option<u32> {
    let place = ["k", "m", "g", "t", "p", "e"].iter().position(|known| *known == letter)?;
    u32::try_from(place).ok().map(|place| place + 1)
}

/// Bytes of a unit of one letter, or of none.
pub fn unit_bytes(unit: &str) -> Option<u64> {
    let bits = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "s" => 9,
        "k" => 10,
        "m" => 20,
        "g" => 30,
        "t" => 40,
        "p" => 50,
        "e" => 60,
        _ => return None,
    };
    Some(1 << bits)
}

/// Splits a size into its number and the text of its unit; the number is `None` if it is more than
/// 2^64 - 1. `None`: the text does not begin with a number.
pub fn size_parts(text: &str) -> Option<(Option<u64>, &str)> {
    let (digits, base) = match text.strip_prefix("0x").or(text.strip_prefix("0X")) {
        Some(digits) => (digits, 16),
        None => (text, 10),
    };
    let (digits, unit) = match digits.rsplit_once('_') {
        // Some units are hexadecimal digits, too.
        Some((digits, unit)) if unit.len() == 1 && unit_bytes(unit).is_some() => (digits, unit),
        _ => {
            let is_digit = |letter: char| letter.is_digit(base) || letter == '_';
            digits.split_at(digits.find(|letter| !is_digit(letter)).unwrap_or(digits.len()))
        }
    };
    let groups = || digits.split('_');
    if groups().any(|group| group.is_empty() || !group.chars().all(|letter| letter.is_digit(base)))
    {
        return None;
    }
    let number = u64::from_str_radix(&groups().collect::<String>(), base).ok();
    Some((number, unit))
}

fn limited(text: &str, size: Option<u64>) -> Result<u64> {
    size.filter(|&size| i64::try_from(size).is_ok())
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

/// A size for people: the largest unit that fits, with at most one decimal, for example `64 KiB`, `1.5 GiB`.
pub fn rounded_size(bytes: u64) -> String {
    const UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    let text = format!("{value:.1}");
    format!("{} {}", text.strip_suffix(".0").unwrap_or(&text), UNITS[unit])
}

/// Parses a rate in bytes per second: a size, or bits with `bit`, `kbit`, `Mbit` or `Gbit` (base 1000), with
/// an optional `/s`.
///
/// # Errors
/// Like [`parse_size`].
pub fn parse_rate(text: &str) -> Result<u64> {
    let size = text.strip_suffix("/s").unwrap_or(text);
    match size.strip_suffix("bit") {
        Some("") => parse_size(size),
        Some(bits) => parse_size(&format!("{bits}B")).map(|bits| bits / 8),
        None => parse_size(size),
    }
}

/// Maximum result of [`parse_duration`]: a century. The clock can represent a time that far ahead,
/// and sums of such durations.
const FOREVER: Duration = Duration::from_secs(100 * 365 * 86_400);

/// Parses a duration: a number, with an optional fraction and exponent, and ns, us, ms, s, m or h;
/// a plain number is in seconds. More than a century counts as a century.
///
/// # Errors
/// [`Kind::Usage`] for anything else.
pub fn parse_duration(text: &str) -> Result<Duration> {
    let units = text.trim_end_matches(|c: char| !c.is_ascii_digit() && c != '.');
    let (number, unit) = text.split_at(units.len());
    let wrong = || {
        let text =
            format!("{text:?} is not a time: give a number with ms, s, m or h, for example 50ms");
        Error::new(Kind::Usage, text)
    };
    let number: f64 = number.parse().map_err(|_| wrong())?;
    let seconds = match unit {
        "ns" => number / 1e9,
        // The sign for micro, and the Greek letter.
        "us" | "µs" | "μs" => number / 1e6,
        "ms" => number / 1e3,
        "" | "s" => number,
        "m" | "min" => number * 60.0,
        "h" => number * 3600.0,
        _ => return Err(wrong()),
    };
    if !seconds.is_finite() {
        return Err(wrong());
    }
    Duration::try_from_secs_f64(seconds.min(FOREVER.as_secs_f64())).map_err(|_| wrong())
}

/// Parses `on` or `off`, or the synonyms of nbdkit and libnbd, in either case.
///
/// # Errors
/// [`Kind::Usage`] for anything else.
pub fn parse_switch(text: &str) -> Result<bool> {
    match text.to_ascii_lowercase().as_str() {
        "on" | "yes" | "y" | "true" | "t" | "1" => Ok(true),
        "off" | "no" | "n" | "false" | "f" | "0" => Ok(false),
        _ => Err(Error::new(Kind::Usage, format!("{text:?} is not on or off"))),
    }
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
            ("010", 10),
            ("0x10", 16),
            ("0xbE", 190),
            ("0x10M", 16 << 20),
            ("0x1E", 30),
            ("0x1_E", 1 << 60),
            ("0X1_b", 1),
            ("0x10_0000", 1 << 20),
            ("1_M", 1 << 20),
            ("1_000_000k", 1_024_000_000),
            ("1.5G", 3 << 29),
            ("0.1k", 102),
            ("1.25MiB", 5 << 18),
            ("1kb", 1000),
            ("1GB", 1_000_000_000),
            ("1.5MB", 1_500_000),
            ("9EB", 9_000_000_000_000_000_000),
        ];
        for (text, size) in good {
            assert_eq!(parse_size(text).unwrap(), size, "{text}");
        }
        for text in [
            "",
            "k",
            "1.5",
            "1.5b",
            ".5G",
            "1.G",
            "1..5G",
            "0x1.5G",
            "1.5_0G",
            "8.5e",
            "1.0000000000000000000k",
            "1bb",
            "1sb",
            "1sib",
            "-1",
            "10 M",
            "8e",
            "10EB",
            "0x",
            "0xg",
            "99999999999999999999",
            "_1",
            "1_",
            "1__0",
            "0x_1",
            "1_x",
            "1_MiB",
            "iB",
            "xib",
        ] {
            assert_eq!(parse_size(text).unwrap_err().kind(), Kind::Usage, "{text}");
        }
    }

    #[test]
    fn numbers_are_read_as_c_programs_read_them() {
        let good = [
            ("0", 0),
            ("90", 90),
            ("0x5a", 90),
            ("0X5A", 90),
            ("0132", 90),
            (" \t+90", 90),
            ("00", 0),
            ("18446744073709551615", u64::MAX),
            ("0xffffffffffffffff", u64::MAX),
        ];
        for (text, number) in good {
            assert_eq!(parse_number::<u64>(text).unwrap(), number, "{text}");
        }
        let bad = [
            "",
            " ",
            "+",
            "-1",
            "++1",
            "0x",
            "0x+1",
            "0+1",
            "08",
            "1k",
            "90 ",
            "5a",
            "1e3",
            "18446744073709551616",
        ];
        for text in bad {
            assert_eq!(parse_number::<u64>(text).unwrap_err().kind(), Kind::Usage, "{text}");
        }
    }

    #[test]
    fn numbers_that_do_not_fit_are_refused() {
        assert_eq!(parse_number::<u8>("0xff").unwrap(), 255);
        assert_eq!(parse_number::<u8>("256").unwrap_err().kind(), Kind::Usage);
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
        assert_eq!(parse_duration("1e-3s").unwrap(), Duration::from_millis(1));
        assert_eq!(parse_duration("15e2").unwrap(), Duration::from_secs(1500));
        assert_eq!(parse_duration("7μs").unwrap(), Duration::from_micros(7));
        for text in ["9223372036854775807", "1e99", "5124095576030431h"] {
            let time = parse_duration(text).unwrap();
            assert_eq!(time, FOREVER, "{text}");
            assert!(std::time::Instant::now().checked_add(2 * time).is_some());
        }
        for text in ["", "ms", "1 s", "-1s", "1e9x", ".", "inf", "nan", "1e999", "1e-", "e3"] {
            assert!(parse_duration(text).is_err(), "{text}");
        }
        for (text, rate) in [
            ("10M/s", 10 << 20),
            ("20MB/s", 20_000_000),
            ("160Mbit", 20_000_000),
            ("1.5Gbit/s", 187_500_000),
            ("800bit", 100),
        ] {
            assert_eq!(parse_rate(text).unwrap(), rate, "{text}");
        }
        for text in ["bit", "1Mbits", "/s", "1sbit"] {
            assert!(parse_rate(text).is_err(), "{text}");
        }
    }
}
