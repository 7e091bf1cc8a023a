//! Texts of options as values: for every front end that reads texts.
//!
//! Each function returns, as its error, the reason why the text is not such a value.

use std::time::Duration;

use blockhaul_catalog::DirectMode;
use blockhaul_engine::{DigestAlgorithm, MultiConn, RateSchedule};

/// What a copy does if the storage of the source fails on a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorAction {
    /// It fails.
    Stop,
    /// It leaves out the range, goes on, and reads the range again in smaller pieces at the end.
    Skip,
}

/// The texts of [`parse_multi_conn`].
pub const MULTI_CONN_NAMES: [&str; 3] = ["auto", "always", "advertised"];

/// The texts of [`parse_error_action`].
pub const ERROR_ACTION_NAMES: [&str; 2] = ["stop", "skip"];

/// A time such as `5s`; zero is allowed.
///
/// # Errors
/// If the text is no such value.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    blockhaul_catalog::parse_duration(text).map_err(|error| error.text())
}

/// A size in bytes such as `64k`.
///
/// # Errors
/// If the text is no such value.
pub fn parse_size(text: &str) -> Result<u64, String> {
    blockhaul_catalog::parse_size(text).map_err(|error| error.text())
}

fn power_of_two(text: &str, least: u32, most: u32) -> Result<u32, String> {
    let wrong = || {
        let least = blockhaul_catalog::format_size(least.into());
        let most = blockhaul_catalog::format_size(most.into());
        format!("{text} is not a power of two from {least} to {most}")
    };
    let size = u32::try_from(parse_size(text)?).map_err(|_| wrong())?;
    let fits = size.is_power_of_two() && (least..=most).contains(&size);
    if fits { Ok(size) } else { Err(wrong()) }
}

/// Bytes of a request: a power of two from [`blockhaul_engine::MIN_REQUEST`] to [`blockhaul_engine::MAX_REQUEST`].
///
/// # Errors
/// If the text is no such value.
pub fn parse_request_size(text: &str) -> Result<u32, String> {
    power_of_two(text, blockhaul_engine::MIN_REQUEST, blockhaul_engine::MAX_REQUEST)
}

/// The name of a digest.
///
/// # Errors
/// If the text is no such value.
pub fn parse_algorithm(text: &str) -> Result<DigestAlgorithm, String> {
    text.parse().map_err(|error: blockhaul_block::Error| error.text())
}

/// Bytes of a segment: a power of two from 64 KiB to 1 GiB.
///
/// # Errors
/// If the text is no such value.
pub fn parse_segment(text: &str) -> Result<u32, String> {
    power_of_two(text, 64 << 10, 1 << 30)
}

/// A rate in bytes per second, or rules for the time of day.
///
/// # Errors
/// If the text is no such value.
pub fn parse_schedule(text: &str) -> Result<RateSchedule, String> {
    RateSchedule::parse(text).map_err(|error| error.text())
}

/// A range `OFFSET:LENGTH` in bytes, not empty.
///
/// # Errors
/// If the text is no such value.
pub fn parse_range(text: &str) -> Result<(u64, u64), String> {
    let wrong = || format!("{text} is not OFFSET:LENGTH, as 1G:64M");
    let (at, len) = text.split_once(':').ok_or_else(wrong)?;
    let at = parse_size(at)?;
    let len = parse_size(len)?;
    if len == 0 {
        return Err(format!("{text} is empty"));
    }
    at.checked_add(len).map(|_| (at, len)).ok_or_else(wrong)
}

/// The shortest run of zeroes that becomes a hole, in bytes: 0, or a power of two from 512 to 2 GiB.
///
/// # Errors
/// If the text is no such value.
pub fn parse_sparse(text: &str) -> Result<u32, String> {
    if parse_size(text)? == 0 { Ok(0) } else { power_of_two(text, 512, 1 << 31) }
}

/// Bytes in flight on each connection: from 1 byte to 64 GiB.
///
/// # Errors
/// If the text is no such value.
pub fn parse_queue_size(text: &str) -> Result<u64, String> {
    // More than this is no window but the whole disk in memory.
    const MOST: u64 = 64 << 30;
    match parse_size(text)? {
        bytes @ 1..=MOST => Ok(bytes),
        _ => Err(format!(
            "{text} is not between 1 byte and {}",
            blockhaul_catalog::format_size(MOST)
        )),
    }
}

/// When to use several connections: one of [`MULTI_CONN_NAMES`].
///
/// # Errors
/// If the text is none of them.
pub fn parse_multi_conn(text: &str) -> Result<MultiConn, String> {
    match text {
        "auto" => Ok(MultiConn::Auto),
        "always" => Ok(MultiConn::Always),
        "advertised" => Ok(MultiConn::Advertised),
        other => Err(format!("{other:?} is not one of {}", MULTI_CONN_NAMES.join(", "))),
    }
}

/// What to do after a failed read of the source: one of [`ERROR_ACTION_NAMES`].
///
/// # Errors
/// If the text is none of them.
pub fn parse_error_action(text: &str) -> Result<ErrorAction, String> {
    match text {
        "stop" => Ok(ErrorAction::Stop),
        "skip" => Ok(ErrorAction::Skip),
        other => Err(format!("{other:?} is not one of {}", ERROR_ACTION_NAMES.join(", "))),
    }
}

/// Whether to bypass the page cache: `auto`, `on` or `off`.
///
/// # Errors
/// If the text is none of them.
pub fn parse_direct(text: &str) -> Result<DirectMode, String> {
    match text {
        "auto" => Ok(DirectMode::Auto),
        "on" => Ok(DirectMode::On),
        "off" => Ok(DirectMode::Off),
        other => Err(format!("{other:?} is not one of auto, on, off")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_words_are_refused() {
        assert_eq!(parse_direct("maybe").unwrap_err(), "\"maybe\" is not one of auto, on, off");
        assert!(parse_multi_conn("never").is_err());
        for bad in ["", "1", "1:", "0:0", "16E:1", "1G-2G"] {
            assert!(parse_range(bad).is_err(), "{bad}");
        }
        assert_eq!(parse_range("1k:1"), Ok((1024, 1)));
    }
}
