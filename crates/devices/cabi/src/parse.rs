//! Parses values of parameters like nbdkit's functions for plugins (`nbdkit_parse_size(3)` and
//! related): C numbers, sizes with a letter, delays with a unit.

use std::time::Duration;

/// Bytes: a number, decimal or hexadecimal after `0x`, and at most one letter (b k m g t p e, powers
/// of 1024; s: sectors of 512), which may follow a `_`.
pub(crate) fn size(text: &str) -> Result<i64, String> {
    let trimmed = text.trim_start();
    let plain = trimmed.strip_prefix('+').unwrap_or(trimmed);
    let Some((number, unit)) = blockhaul_catalog::size_parts(plain) else {
        return Err(if trimmed.starts_with('-') {
            format!("size cannot be negative: '{text}'")
        } else {
            format!("could not parse size string '{text}'")
        });
    };
    let Some(factor) = blockhaul_catalog::unit_bytes(unit) else {
        return Err(format!("could not parse size string '{text}': unknown suffix '{unit}'"));
    };
    let bytes = number.and_then(|number| i64::try_from(number.checked_mul(factor)?).ok());
    bytes.ok_or_else(|| format!("size is too large: '{text}'"))
}

/// A truth value in one of the usual words.
pub(crate) fn boolean(text: &str) -> Result<bool, String> {
    blockhaul_catalog::parse_switch(text)
        .map_err(|_| format!("could not decipher boolean ({text})"))
}

/// A whole number within bounds, in C's notation: decimal, 0x hexadecimal, 0 octal, with a sign.
pub(crate) fn integer(what: &str, text: &str, least: i128, most: i128) -> Result<i128, String> {
    let trimmed = text.trim_start();
    let (negative, digits) = match trimmed.as_bytes().first() {
        Some(b'-') => (true, &trimmed[1..]),
        Some(b'+') => (false, &trimmed[1..]),
        _ => (false, trimmed),
    };
    if negative && least == 0 {
        return Err(format!("{what}: negative numbers are not allowed: \"{text}\""));
    }
    let lower = digits.to_ascii_lowercase();
    let (digits, base) = match lower.strip_prefix("0x") {
        Some(digits) => (digits, 16),
        None if lower.len() > 1 && lower.starts_with('0') => (&lower[1..], 8),
        None => (lower.as_str(), 10),
    };
    let wrong = || format!("{what}: could not parse number: \"{text}\"");
    // from_str_radix would accept a second sign.
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
        return Err(wrong());
    }
    let out_of_range = || format!("{what}: number is out of range: \"{text}\"");
    let number = match i128::from_str_radix(digits, base) {
        Ok(number) if negative => -number,
        Ok(number) => number,
        Err(error) if *error.kind() == std::num::IntErrorKind::PosOverflow => {
            return Err(out_of_range());
        }
        Err(_) => return Err(wrong()),
    };
    if (least..=most).contains(&number) { Ok(number) } else { Err(out_of_range()) }
}

/// A probability: `0.3`, `30%`, or `1:3` and `1/3` for one in three.
pub(crate) fn probability(what: &str, text: &str) -> Result<f64, String> {
    let wrong = || format!("{what}: could not parse '{text}' as a probability");
    let number = |text: &str| text.trim().parse::<f64>().map_err(|_| wrong());
    let value = if let Some(percent) = text.strip_suffix('%') {
        number(percent)? / 100.0
    } else if let Some((part, whole)) = text.split_once([':', '/']) {
        let part = number(part)?;
        let whole = number(whole)?;
        // 0 in 0 is 0.
        if part == 0.0 { 0.0 } else { part / whole }
    } else {
        number(text)?
    };
    if !value.is_finite() || value < 0.0 {
        return Err(format!("{what}: a probability cannot be '{text}'"));
    }
    Ok(value)
}

/// A delay: seconds, with fractions, or a number and `s`, `ms`, `us` or `ns`.
pub(crate) fn delay(what: &str, text: &str) -> Result<Duration, String> {
    let wrong = || format!("{what}: could not parse '{text}' as a delay");
    let units = [("ms", 1e-3), ("us", 1e-6), ("μs", 1e-6), ("µs", 1e-6), ("ns", 1e-9), ("s", 1.0)];
    let found = units.iter().find_map(|(unit, scale)| Some((text.strip_suffix(unit)?, *scale)));
    let (digits, scale) = found.unwrap_or((text, 1.0));
    let number: f64 = digits.trim().parse().map_err(|_| wrong())?;
    if number < 0.0 {
        return Err(format!("{what}: a delay cannot be negative: '{text}'"));
    }
    let delay = Duration::try_from_secs_f64(number * scale).map_err(|_| wrong())?;
    // Seconds are an unsigned int in C.
    if u32::try_from(delay.as_secs()).is_err() {
        return Err(format!("{what}: the delay is too long: '{text}'"));
    }
    Ok(delay)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_one_letter() {
        for (text, wanted) in [
            ("0", 0),
            ("1024", 1024),
            ("1k", 1024),
            ("2M", 2 << 20),
            ("3s", 1536),
            ("7E", 7 << 60),
            (" +1K", 1024),
            ("0x10", 16),
            ("0x10M", 16 << 20),
            ("0x1_E", 1 << 60),
            ("1_M", 1 << 20),
            ("9223372036854775807", i64::MAX),
        ] {
            assert_eq!(size(text), Ok(wanted), "{text}");
        }
        for bad in ["", "-1", "1KiB", "1.5G", "8E", "9223372036854775808", "x", "1k ", "k"] {
            assert!(size(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn numbers_are_written_as_in_c_and_bounded() {
        let short = |text: &str| integer("n", text, -128, 127);
        assert_eq!(short("-128"), Ok(-128));
        assert_eq!(short(" 0x7f"), Ok(127));
        assert_eq!(short("-010"), Ok(-8));
        assert_eq!(short("0"), Ok(0));
        for bad in ["128", "", "1x", "0x", "08", "--1", "-+1", "1 "] {
            assert!(short(bad).is_err(), "{bad}");
        }
        assert!(integer("n", "-0", 0, 10).is_err());
        assert!(integer("n", &"9".repeat(60), 0, 10).unwrap_err().contains("range"));
    }

    #[test]
    fn words_shares_and_delays() {
        assert_eq!((boolean("Yes"), boolean("off")), (Ok(true), Ok(false)));
        assert!(boolean("2").is_err());
        assert_eq!(probability("p", "25%"), Ok(0.25));
        assert_eq!(probability("p", "1:4"), Ok(0.25));
        assert_eq!(probability("p", "0:0"), Ok(0.0));
        assert!(probability("p", "1:0").is_err() && probability("p", "-1").is_err());
        assert_eq!(delay("d", "1.5"), Ok(Duration::from_millis(1500)));
        assert_eq!(delay("d", "20ms"), Ok(Duration::from_millis(20)));
        assert_eq!(delay("d", "7μs"), Ok(Duration::from_micros(7)));
        assert!(delay("d", "-1").is_err() && delay("d", "5m").is_err());
        assert!(delay("d", "5000000000").is_err());
    }
}
