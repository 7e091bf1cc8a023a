//! Lists as text: a line with an offset and a length for each range, and the table of `rbd diff`, which has the
//! line `Offset Length Type` before them.

use std::io::BufRead;

use blockhaul_wire::printable;

use crate::ChangeList;
use crate::error::ChangeListError;
use crate::kind::ListKind;
use crate::range_set::RangeSet;

/// Bytes of a line in a message.
const SHOWN_MAX: usize = 60;

/// Whether a list that begins like this has lines of numbers. A bitmap in base64 has no spaces in its lines.
pub(crate) fn begins_with_line(first: &[u8]) -> bool {
    let line = first.split(|&byte| byte == b'\n').next().unwrap_or_default();
    let line = String::from_utf8_lossy(line);
    let fields = fields(&line);
    match fields.first() {
        Some(first) if first.starts_with('#') => true,
        Some(first) if fields.len() > 1 => {
            first.starts_with(|c: char| c.is_ascii_digit()) || first.eq_ignore_ascii_case("offset")
        }
        _ => false,
    }
}

/// Reads a list that begins in this line.
pub(crate) fn parse(mut from: impl BufRead, first: usize) -> Result<ChangeList, ChangeListError> {
    let mut ranges = RangeSet::default();
    let mut kind = None;
    let mut line = Vec::new();
    for number in first.. {
        line.clear();
        let read = from.read_until(b'\n', &mut line);
        if read.map_err(|error| ChangeListError::unreadable(&error))? == 0 {
            break;
        }
        let failed = |why: &str| {
            let text = format!("{why}: \"{}\"", printable(line.trim_ascii(), SHOWN_MAX));
            ChangeListError::malformed(text).at(number)
        };
        if line.last() != Some(&b'\n') {
            return Err(failed("the list is cut off: its last line has no end"));
        }
        let text = std::str::from_utf8(&line).map_err(|_| failed("not text"))?;
        let fields = fields(text);
        match (kind, &fields[..]) {
            (_, []) => {}
            (_, [first, ..]) if first.starts_with('#') => {}
            (None, [offset, length, rest @ ..])
                if offset.eq_ignore_ascii_case("offset")
                    && length.eq_ignore_ascii_case("length") =>
            {
                kind = match rest {
                    [] => Some(ListKind::Lines),
                    [word] if word.eq_ignore_ascii_case("type") => Some(ListKind::RbdDiff),
                    _ => return Err(failed("not the columns offset and length")),
                };
            }
            (Some(ListKind::RbdDiff), [at, len, "data" | "zero"])
            | (None | Some(ListKind::Lines), [at, len]) => {
                kind = kind.or(Some(ListKind::Lines));
                let range = self::number(at).zip(self::number(len));
                let (at, len) =
                    range.ok_or_else(|| failed("not an offset and a length in bytes"))?;
                ranges.add_length(at, len).map_err(|error| error.at(number))?;
            }
            (Some(ListKind::RbdDiff), _) => {
                return Err(failed(
                    "not offset, length, and data or zero, as rbd diff prints them",
                ));
            }
            _ => {
                return Err(failed(
                    "not a line with offset and length alone (of rbd diff, keep its first line; of nbdinfo, use \
                     --json)",
                ));
            }
        }
    }
    match kind {
        Some(kind) => {
            Ok(ChangeList { kind, ranges, covered: None, block: 1, is_unfinished: false })
        }
        None => Err(ChangeListError::empty()),
    }
}

fn fields(line: &str) -> Vec<&str> {
    let is_between = |c: char| c.is_ascii_whitespace() || c == ',';
    line.split(is_between).filter(|field| !field.is_empty()).take(9).collect()
}

/// A number, decimal or hexadecimal.
fn number(text: &str) -> Option<u64> {
    if !text.starts_with(|c: char| c.is_ascii_digit()) {
        return None;
    }
    match text.strip_prefix("0x") {
        Some(digits) if !digits.starts_with('+') => u64::from_str_radix(digits, 16).ok(),
        Some(_) => None,
        None => text.parse().ok(),
    }
}
