//! Parses the output of scripts: sizes, lists of exports, extents.

use blockhaul_block::{BlockSizes, Extents};
use blockhaul_catalog::{ListedExport, parse_size};

/// Maximum number of exports in one list, and maximum length of a name or description in bytes
/// (NBD's limit).
const EXPORTS_MAX: usize = 10_000;
pub(crate) const STRING_MAX: usize = 4096;
/// Maximum number of extents in one reply; clients request the rest again.
const EXTENTS_MAX: usize = 1 << 20;

/// A size in bytes.
pub(crate) fn size(text: &str) -> Option<u64> {
    parse_size(text.trim_start()).ok()
}

/// Text without the newline at its end, up to the first zero byte.
pub(crate) fn line(bytes: &[u8]) -> &[u8] {
    let bytes = bytes.split(|&byte| byte == 0).next().unwrap_or_default();
    bytes.strip_suffix(b"\n").unwrap_or(bytes)
}

/// A list of exports: names, or names and descriptions in one of two orders. An unterminated last
/// line is ignored.
pub(crate) fn exports(text: &str) -> Result<Vec<ListedExport>, &'static str> {
    let complete = |text: &str| -> Vec<String> {
        let lines = text.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n'));
        lines.map(String::from).collect()
    };
    let list: Vec<(String, String)> = if let Some(rest) = text.strip_prefix("INTERLEAVED\n") {
        let mut lines = complete(rest).into_iter();
        let mut list = Vec::new();
        while let Some(name) = lines.next() {
            list.push((name, lines.next().unwrap_or_default()));
        }
        list
    } else if let Some(rest) = text.strip_prefix("NAMES+DESCRIPTIONS\n") {
        let mut names = complete(rest);
        let descriptions = names.split_off(names.len().div_ceil(2));
        let descriptions = descriptions.into_iter().chain(std::iter::repeat(String::new()));
        names.into_iter().zip(descriptions).collect()
    } else {
        let rest = text.strip_prefix("NAMES\n").unwrap_or(text);
        complete(rest).into_iter().map(|name| (name, String::new())).collect()
    };
    if list.len() > EXPORTS_MAX {
        return Err("too many exports");
    }
    if list.iter().any(|(name, about)| name.len() > STRING_MAX || about.len() > STRING_MAX) {
        return Err("the name or description of an export is too long");
    }
    Ok(list.into_iter().map(|(name, description)| ListedExport { name, description }).collect())
}

/// The first name of a list of exports.
pub(crate) fn first_export(text: &str) -> &str {
    let rest = ["INTERLEAVED\n", "NAMES+DESCRIPTIONS\n", "NAMES\n"]
        .iter()
        .find_map(|mode| text.strip_prefix(mode));
    rest.unwrap_or(text).split('\n').next().unwrap_or_default()
}

/// Minimum, preferred size and maximum; `None` for three zeroes.
pub(crate) fn block_size(text: &str) -> Result<Option<BlockSizes>, String> {
    let mut words = text.split_ascii_whitespace().map(|word| size(word)?.try_into().ok());
    let mut next = || words.next().flatten().ok_or("cannot be parsed");
    let minimum: u32 = next()?;
    let preferred: u32 = next()?;
    let maximum: u32 = next()?;
    if (minimum, preferred, maximum) == (0, 0, 0) {
        return Ok(None);
    }
    let told = BlockSizes::declared(minimum, preferred, maximum);
    told.map(Some).ok_or_else(|| {
        format!(
            "printed {minimum}, {preferred} and {maximum}, which are no minimum, preferred size and \
             maximum"
        )
    })
}

/// Lines of offset, length and type, as the extents of the range from `at` up to the disk's `end`.
pub(crate) fn extents(text: &str, at: u64, end: u64) -> Result<Extents, String> {
    let mut found = Extents::new();
    let mut next = None;
    for line in text.lines() {
        let mut words = line.split([' ', '\t']).filter(|word| !word.is_empty());
        let wrong = || format!("cannot parse {line:?}");
        let mut number = || words.next().and_then(size).ok_or_else(wrong);
        let offset = number()?;
        let len = number()?;
        let state = state(words.next().unwrap_or("0"));
        if next.is_some_and(|next| next != offset) {
            return Err("extents must be in ascending order and without gaps".into());
        }
        let stop = offset.checked_add(len).ok_or_else(wrong)?;
        if len == 0 {
            continue;
        }
        next = Some(stop);
        let from = offset.max(at);
        let to = stop.min(end);
        if found.is_empty() && offset > at {
            return Err("the first extent must cover the start of the request".into());
        }
        if from < to && found.len() < EXTENTS_MAX {
            found.push(to - from, state);
        }
    }
    if found.is_empty() { Err("answered no extents".into()) } else { Ok(found) }
}

/// A number, or words.
fn state(word: &str) -> u64 {
    let digits = word.find(|c: char| !c.is_ascii_digit()).unwrap_or(word.len());
    match word[..digits].parse::<u64>() {
        Ok(number) => number & (blockhaul_block::HOLE | blockhaul_block::ZERO),
        Err(_) => {
            let hole = if word.contains("hole") { blockhaul_block::HOLE } else { 0 };
            hole | if word.contains("zero") { blockhaul_block::ZERO } else { 0 }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn exports_in_three_forms() {
        let names = |text| -> Vec<_> {
            let listed = exports(text).unwrap().into_iter();
            listed.map(|export| (export.name, export.description)).collect()
        };
        let pair = |name: &str, about: &str| (name.to_string(), about.to_string());
        assert_eq!(names("a\nb\nc"), [pair("a", ""), pair("b", "")]);
        assert_eq!(names("NAMES\nINTERLEAVED\n"), [pair("INTERLEAVED", "")]);
        assert_eq!(names("INTERLEAVED\na\n1\nb\n"), [pair("a", "1"), pair("b", "")]);
        let wanted = [pair("a", "1"), pair("b", "")];
        assert_eq!(names("NAMES+DESCRIPTIONS\na\nb\n1\n"), wanted);
        assert_eq!(names(""), []);
        assert_eq!(first_export("INTERLEAVED\na\n1\n"), "a");
        assert_eq!(first_export("x"), "x");
        assert!(exports(&"n\n".repeat(EXPORTS_MAX + 1)).is_err());
        assert!(exports(&("n".repeat(STRING_MAX + 1) + "\n")).is_err());
    }

    #[test]
    fn extents_are_clipped_joined_and_checked() {
        let found = extents("0 1M\n1M  9M\thole,zero\n10M 1M 1x\n11M 0\n11M 5M", 4096, 12 << 20);
        let found = found.unwrap();
        let runs: Vec<_> = found.runs().iter().map(|run| (run.len, run.state)).collect();
        let wanted = [((1 << 20) - 4096, 0), (9 << 20, 3), (1 << 20, 1), (1 << 20, 0)];
        assert_eq!(runs, wanted);
        for bad in ["", "0 1\n2 1", "5000 1", "x 1", "0", "0 1k\n1k"] {
            assert!(extents(bad, 4096, 8192).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn block_sizes_are_checked() {
        let sizes = block_size("512 4k\n1M").unwrap().unwrap();
        assert_eq!((sizes.minimum, sizes.preferred, sizes.maximum), (512, 4096, 1 << 20));
        assert_eq!(block_size("0 0 0").unwrap(), None);
        for bad in ["", "1 2", "3 4096 4096", "1 4096 5G", "x 1 1"] {
            assert!(block_size(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn lines_end_before_newlines_and_zero_bytes() {
        assert_eq!(line(b"a\n\n"), b"a\n");
        assert_eq!(line(b"a\0b"), b"a");
        assert_eq!(size("  12k"), Some(12288));
        assert_eq!(size("12k "), None);
    }
}
